package clusterfacts

import (
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go4.org/netipx"
	"pgregory.net/rapid"

	"github.com/lodestone-lb/lodestone/pkg/config"
	"github.com/lodestone-lb/lodestone/pkg/testcost"
)

const header = "apiVersion: lodestone.io/v1alpha1\nkind: Config\n"

func parsed(t testing.TB, document string) *config.Config {
	t.Helper()
	cfg, err := config.Parse([]byte(header + document))
	require.NoError(t, err)
	return cfg
}

func facts(t testing.TB, segments []string, ranges ...string) *Facts {
	t.Helper()
	f := &Facts{}
	if segments != nil {
		f.Segments = []netip.Prefix{}
	}
	for _, s := range segments {
		f.Segments = append(f.Segments, netip.MustParsePrefix(s))
	}
	for _, r := range ranges {
		text, why, _ := strings.Cut(r, " is ")
		if !strings.ContainsAny(text, "/-") {
			text += "-" + text
		}
		if p, err := netip.ParsePrefix(text); err == nil {
			f.Forbidden = append(f.Forbidden, Forbidden{Range: netipx.RangeOfPrefix(p), Why: why})
			continue
		}
		parsed, err := netipx.ParseIPRange(text)
		require.NoError(t, err)
		f.Forbidden = append(f.Forbidden, Forbidden{Range: parsed, Why: why})
	}
	return f
}

func TestWarnings(t *testing.T) {
	t.Parallel()
	const (
		lan   = "pools:\n  - name: lan\n    addresses: [198.18.0.0/24]\n"
		never = ": it is never handed out; exclude it to silence this"
		off   = ": the addresses are announced, but nobody asks for them unless a router on a node's segment takes them for " +
			"directly connected"
	)
	for _, tt := range []struct {
		name, document string
		facts          *Facts
		want           []string
	}{
		{"nothing known", lan, facts(t, nil), nil},
		{"all is well", lan, facts(t, []string{"198.18.0.0/23"}, "198.18.1.1 is the address of node n1",
			"10.96.0.0/12 is in the Service CIDR"), nil},
		{
			"addresses and ranges, in order", lan,
			facts(t, nil, "10.0.0.0/8 is far away", "198.18.0.1 is the default gateway of node n1",
				"198.18.0.128/26 is in the pod CIDR 198.18.0.128/26 of node n1", "198.18.0.200-198.18.1.10 is taken"),
			[]string{
				`pool "lan" contains 198.18.0.1, the default gateway of node n1` + never,
				`pool "lan" contains 198.18.0.128/26, in the pod CIDR 198.18.0.128/26 of node n1` + never,
				`pool "lan" contains 198.18.0.200-198.18.0.254, taken` + never,
			},
		},
		{
			"what is excluded or not handed out anyway is not mentioned",
			"pools:\n  - name: lan\n    addresses: [198.18.0.0/24]\n    exclude: [198.18.0.1, 198.18.0.16/28]\n",
			facts(t, nil, "198.18.0.0 is the network", "198.18.0.1 is the default gateway of node n1",
				"198.18.0.20 is the address of node n1", "198.18.0.255 is the broadcast address"), nil,
		},
		{
			"what every segment has is no mistake",
			"pools:\n  - name: lan\n    addresses: [198.18.0.0-198.18.0.255, \"2001:db8::/64\"]\n",
			facts(t, []string{"198.18.0.0/24", "2001:db8::/64"}, "198.18.0.0 is the network", "198.18.0.255 is the broadcast address",
				"2001:db8:: is everybody's"), nil,
		},
		{
			"a range around an excluded one is one warning",
			"pools:\n  - name: lan\n    addresses: [198.18.0.0/24]\n    exclude: [198.18.0.16/28]\n",
			facts(t, nil, "198.18.0.8-198.18.0.39 is taken"), []string{`pool "lan" contains 198.18.0.8-198.18.0.39, taken` + never},
		},
		{
			"a range over several pools concerns each",
			"pools:\n  - name: b\n    addresses: [198.18.0.8/29, 198.18.0.24/29]\n    useFirstAndLast: true\n  - name: a\n    " +
				"addresses: [198.18.0.16/29]\n    useFirstAndLast: true\n",
			facts(t, nil, "198.18.0.0/24 is taken"),
			[]string{`pool "b" contains 198.18.0.8-198.18.0.31, taken` + never, `pool "a" contains 198.18.0.16/29, taken` + never},
		},
		{
			"many are counted", lan,
			facts(t, nil, "198.18.0.1 is a", "198.18.0.2 is b", "198.18.0.3 is c", "198.18.0.4 is d", "198.18.0.5 is e",
				"198.18.0.6 is f", "198.18.0.7 is g"),
			[]string{
				`pool "lan" contains 198.18.0.1, a` + never, `pool "lan" contains 198.18.0.2, b` + never,
				`pool "lan" contains 198.18.0.3, c` + never,
				`pool "lan" contains 198.18.0.4, d` + never, `pool "lan" contains 198.18.0.5, e` + never,
				`pool "lan" contains 2 more addresses or ranges that are never handed out`,
			},
		},
		{
			"a pool of another network, which is meant",
			lan + "  - name: dmz\n    addresses: [198.51.100.0/27]\n    advertise: [routed]\nadvertisements:\n  - name: lan\n    " +
				"layer2: {}\n  - name: routed\n    layer2: {anySegment: true}\n",
			facts(t, []string{"198.18.0.0/24"}), nil,
		},
		{
			"a pool of another network",
			lan + "  - name: dmz\n    addresses: [198.51.100.0/27]\n", facts(t, []string{"198.18.0.0/24"}),
			[]string{`pool "dmz": no node is on the segment of 198.51.100.0/27` + off},
		},
		{
			"a pool of another network, which something else announces",
			lan + "  - name: dmz\n    addresses: [198.51.100.0/27]\nadvertisements: []\n", facts(t, []string{"198.18.0.0/24"}), nil,
		},
		{
			"parts of a pool",
			"pools:\n  - name: lan\n    addresses: [198.18.0.0/24, 198.51.100.0/27, 203.0.113.9/32, \"2001:db8::/120\"]\n",
			facts(t, []string{"198.18.0.0/24", "2001:db8::/64"}),
			[]string{`pool "lan": no node is on the segment of 198.51.100.0/27 and of 1 more ranges` + off},
		},
		{"speakers that are on no segment", lan, facts(t, []string{}),
			[]string{`pool "lan": no node is on the segment of 198.18.0.0/24` + off}},
		{
			"a part that is excluded as a whole is announced by nobody",
			"pools:\n  - name: lan\n    addresses: [198.18.0.0/24, 198.51.100.0/27]\n    exclude: [198.51.100.0/27]\n",
			facts(t, []string{"198.18.0.0/24"}), nil,
		},
		{"a segment inside of the pool", "pools:\n  - name: lan\n    addresses: [198.18.0.0/16]\n",
			facts(t, []string{"198.18.7.0/24", "198.18.7.128/25"}), nil},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			assert.Equal(t, tt.want, Warnings(parsed(t, tt.document), tt.facts))
		})
	}
}

// Only neighbours on a segment need the pool to be on one.
func TestPoolsThatAreNotOnlyAnnouncedByLayer2(t *testing.T) {
	t.Parallel()
	cfg := parsed(t, "pools:\n  - name: lan\n    addresses: [198.51.100.0/27]\n")
	layer2, routed := config.Advertisement{Name: "l2", Layer2: &config.Layer2{}}, config.Advertisement{Name: "routed"}
	for _, tt := range []struct {
		advertise      []string
		advertisements []config.Advertisement
		warned         bool
	}{
		{nil, []config.Advertisement{layer2}, true},
		{nil, []config.Advertisement{routed}, false},
		{nil, []config.Advertisement{layer2, routed}, false},
		{nil, []config.Advertisement{{Name: "both", Layer2: &config.Layer2{}, BGP: &config.BGP{}}}, false},
		{[]string{"l2"}, []config.Advertisement{layer2, routed}, true},
		{[]string{"routed"}, []config.Advertisement{layer2, routed}, false},
	} {
		cfg.Advertisements, cfg.Pools[0].Advertise = tt.advertisements, tt.advertise
		assert.Equal(t, tt.warned, len(PoolWarnings(cfg, facts(t, []string{"198.18.0.0/24"}))) > 0, "%+v", tt)
	}
}

// TestConflictsAreThoseOfEachAddress compares with asking for every address
// of a small network.
func TestConflictsAreThoseOfEachAddress(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(rt *rapid.T) {
		address := func(n int) netip.Addr { return netip.AddrFrom4([4]byte{198, 18, 0, byte(n)}) }
		pools := make([]config.Pool, rapid.IntRange(1, 3).Draw(rt, "pools"))
		owner := rapid.SliceOfN(rapid.IntRange(-1, len(pools)-1), 64, 64).Draw(rt, "pool of each address")
		for i := range pools {
			var b netipx.IPSetBuilder
			for n, of := range owner {
				if of == i {
					b.Add(address(n))
				}
			}
			pools[i].Name = fmt.Sprint("p", i)
			pools[i].Free, _ = b.IPSet()
		}
		var forbidden []Forbidden
		for i := range rapid.IntRange(0, 12).Draw(rt, "forbidden") {
			from := rapid.IntRange(0, 63).Draw(rt, "from")
			to := rapid.IntRange(from, 63).Draw(rt, "to")
			forbidden = append(forbidden, Forbidden{Range: netipx.IPRangeFrom(address(from), address(to)), Why: fmt.Sprint(i)})
		}
		got := intersect(pools, forbidden)
		for i := range pools {
			var want []Forbidden
			for _, f := range forbidden {
				var in []netip.Addr
				for a := f.Range.From(); a.Compare(f.Range.To()) <= 0; a = a.Next() {
					if pools[i].Free.Contains(a) {
						in = append(in, a)
					}
				}
				if len(in) > 0 {
					want = append(want, Forbidden{Range: netipx.IPRangeFrom(in[0], in[len(in)-1]), Why: f.Why})
				}
			}
			if got[i].total != len(want) || !slices.Equal(got[i].named, want[:min(len(want), maxWarnings)]) {
				rt.Fatalf("pool %d: %d %v, want %d %v", i, got[i].total, got[i].named, len(want), want)
			}
		}
	})
}

func BenchmarkWarnings(b *testing.B) {
	document := "pools:\n"
	for i := range 1000 {
		document += fmt.Sprintf("  - name: p%d\n    addresses: [10.%d.%d.0/24]\n", i, i/256, i%256)
	}
	cfg := parsed(b, document)
	f := Collect(large(10000))
	b.ReportAllocs()
	for b.Loop() {
		Warnings(cfg, f)
	}
}

// What nothing uses is a mistake, mostly.
func TestWhatNothingUsesIsReported(t *testing.T) {
	t.Parallel()
	const (
		pool   = "pools: [{name: lan, addresses: [198.18.0.0/28]}]\n"
		named  = "pools: [{name: lan, addresses: [198.18.0.0/28], advertise: [segment]}]\n"
		peers  = "peers: [{name: tor, address: 192.0.2.1, localASN: 1, peerASN: 2}, {name: spine, address: 192.0.2.2, localASN: 1, peerASN: 2}]\n"
		layer2 = "advertisements: [{name: segment, layer2: {}}"
	)
	unused := func(name string) string {
		return fmt.Sprintf("advertisement %q announces nothing: no pool has it in advertise", name)
	}
	silent := func(name string) string {
		return fmt.Sprintf("peer %q gets no routes: no advertisement that a pool has sends to it by bgp, nor are the pods' routes for it", name)
	}
	many, names := "", []string{}
	for i := range 7 {
		many += fmt.Sprintf(", {name: a%d, layer2: {}}", i)
		names = append(names, unused(fmt.Sprint("a", i)))
	}
	for name, tt := range map[string]struct {
		document string
		want     []string
	}{
		"the default":      {pool, nil},
		"no pools":         {layer2 + "]", nil},
		"all are used":     {pool + peers + layer2 + ", {name: tor, bgp: {}}]", nil},
		"an advertisement": {named + layer2 + ", {name: other, layer2: {}}]", []string{unused("other")}},
		"a peer":           {named + peers + "advertisements: [{name: segment, bgp: {peers: [tor]}}]", []string{silent("spine")}},
		"an advertisement and its peers": {named + peers + layer2 + ", {name: routed, bgp: {}}]",
			[]string{unused("routed"), silent("tor"), silent("spine")}},
		"a peer for routes to pods":    {pool + peers + "routes: {mode: bgp, peers: [tor]}\n", []string{silent("spine")}},
		"peers for routes to pods":     {pool + peers + "routes: {mode: bgp}\n", nil},
		"routes to pods in the kernel": {pool + peers + "routes: {mode: kernel}\n", []string{silent("tor"), silent("spine")}},
		"many": {named + layer2 + many + "]",
			append(names[:maxWarnings:maxWarnings], "2 more advertisements that announce nothing")},
	} {
		t.Run(name, func(t *testing.T) { require.Equal(t, tt.want, Warnings(parsed(t, tt.document), facts(t, nil))) })
	}
}

// A document and a cluster of four times the size cost about four times as much,
// whatever there is much of.
func TestCostOfWarnings(t *testing.T) {
	type input struct {
		cfg *config.Config
		f   *Facts
	}
	// numbered repeats an item with the numbers from 0 to n in it.
	numbered := func(n int, item string) string {
		var b strings.Builder
		for i := range n {
			b.WriteString(strings.NewReplacer("%a", fmt.Sprintf("10.%d.%d.%d", 2*i>>16&255, 2*i>>8&255, 2*i&255), "%d",
				strconv.Itoa(i)).Replace(item))
		}
		return b.String()
	}
	segments := func(n int, format string) (all []string) {
		for i := range n {
			all = append(all, fmt.Sprintf(format, i>>8&255, i&255))
		}
		return all
	}
	for name, make := range map[string]func(n int) input{
		"addresses on no segment": func(n int) input {
			return input{parsed(t, "pools: [{name: a, addresses: ["+numbered(n, "%a,")+"]}]"), facts(t, []string{"198.18.0.0/24"})}
		},
		"addresses on segments": func(n int) input {
			return input{parsed(t, "pools: [{name: a, addresses: ["+numbered(n, "%a,")+"]}]"), facts(t, segments(n, "10.%d.%d.0/24"))}
		},
		"advertisements for other segments": func(n int) input {
			n /= 2 // no document has more
			return input{parsed(t, "pools: [{name: a, addresses: [192.0.2.1], advertise: ["+numbered(n, "n%d,")+"]}]\n"+
				"advertisements: ["+numbered(n, "{name: w%d, layer2: {anySegment: true}},{name: n%d, layer2: {}},")+"]"),
				facts(t, []string{"198.18.0.0/24"})}
		},
		"forbidden addresses": func(n int) input {
			return input{parsed(t, "pools: [{name: a, addresses: ["+numbered(n, "%a,")+"]}]\nroutes: {mode: kernel, "+
				"cidrs: [10.0.0.0/8,"+numbered(n, "%a/32,")+"]}"), facts(t, nil)}
		},
	} {
		t.Run(name, func(t *testing.T) {
			// With the race detector, 1,000 need no garbage collection and 2,000 do.
			testcost.Grows(t, "Warnings", make(2000), make(testcost.Growth*2000), func(in input) { Warnings(in.cfg, in.f) })
		})
	}
}
