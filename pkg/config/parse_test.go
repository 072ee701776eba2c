package config

import (
	"fmt"
	"math"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/lodestone-lb/lodestone/pkg/testcost"
)

// What an operator who writes nothing but a pool gets.
func TestDefaults(t *testing.T) {
	doc := header + "pools: [{name: lan, addresses: [203.0.113.0/24]}]\n"
	c, err := Parse([]byte(doc))
	require.NoError(t, err)
	assert.Equal(t, "kubernetes", c.ClusterID)
	assert.Equal(t, 30*time.Second, c.Quarantine)
	assert.Equal(t, []Advertisement{{Name: "default", Layer2: &Layer2{}}}, c.Advertisements)
	lan := c.Pools[0]
	assert.True(t, lan.AutoAssign)
	assert.True(t, lan.Allows(Subject{Namespace: "any"}))
	assert.EqualValues(t, 254, lan.Size())

	again, err := Parse([]byte(doc + "# edited\n"))
	require.NoError(t, err)
	assert.Len(t, c.Digest, 64)
	assert.NotEqual(t, c.Digest, again.Digest, "the digest is of the text")
}

func TestPoolOf(t *testing.T) {
	c, err := Parse(read(t, "testdata/valid/design.yaml"))
	require.NoError(t, err)
	for addr, want := range map[string]string{
		"203.0.113.1":   "lan", // excluded, but nobody else's
		"203.0.113.2":   "lan",
		"198.51.100.31": "dmz",
		"203.0.113.99":  "",
	} {
		p, ok := c.PoolOf(netip.MustParseAddr(addr))
		assert.Equal(t, want != "", ok, addr)
		if ok {
			assert.Equal(t, want, p.Name, addr)
		}
	}
	dmz := c.Pools[1]
	assert.True(t, dmz.Allows(Subject{Namespace: "edge"}))
	assert.False(t, dmz.Allows(Subject{Namespace: "web"}))
}

// A document as long as it can be is compiled in reasonable time, whatever its
// advertisements have in common.
func TestManyAdvertisements(t *testing.T) {
	var b strings.Builder
	b.WriteString(header + "pools: [{name: lan, addresses: [10.0.0.0/8]}]\npeers:\n")
	for i := range 2000 {
		fmt.Fprintf(&b, "- {name: p%d, address: 10.1.%d.%d, peerASN: 64512, nodeSelector: {matchLabels: {n: n%d}}}\n", i, i/200, i%200, i)
	}
	b.WriteString("advertisements:\n")
	for i := range 1001 {
		fmt.Fprintf(&b, "- {name: a%d, bgp: {peers: [p%d], localPreference: %d, med: %d, asPathPrepend: %d}}\n", i, i, i, i, 1+i%10)
	}
	_, err := Parse([]byte(b.String()))
	require.EqualError(t, err, `config.yaml:3006:3: advertisements[1000] "a1000": is one too many: `+
		"a document has at most 1000 advertisements by BGP")
}

// An absent selector, one of everything and one of labels are three things.
func TestWhoMayUseAPool(t *testing.T) {
	c, err := Parse([]byte(header + `pools:
- {name: teams, addresses: [192.0.2.1], namespaces: [edge], namespaceSelector: {matchLabels: {team: a}}}
- {name: everybody, addresses: [192.0.2.2], namespaceSelector: {}, requesters: []}
- {name: web, addresses: [192.0.2.3], serviceSelector: {matchLabels: {tier: web}}, requesters: [edge]}
`))
	require.NoError(t, err)
	teams, everybody, web := &c.Pools[0], &c.Pools[1], &c.Pools[2]
	a, b := map[string]string{"team": "a"}, map[string]string{"team": "b"}
	assert.True(t, teams.Allows(Subject{Namespace: "edge", NamespaceLabels: b}))
	assert.True(t, teams.Allows(Subject{Namespace: "shop", NamespaceLabels: a}))
	assert.False(t, teams.Allows(Subject{Namespace: "shop", NamespaceLabels: b}))
	assert.True(t, teams.MayRequest("shop"))
	assert.True(t, everybody.Allows(Subject{Namespace: "shop"}))
	assert.False(t, everybody.MayRequest("shop"))
	assert.True(t, web.Allows(Subject{Namespace: "shop", Labels: map[string]string{"tier": "web"}}))
	assert.False(t, web.Allows(Subject{Namespace: "shop", NamespaceLabels: map[string]string{"tier": "web"}}))
	assert.True(t, web.MayRequest("edge"))
	assert.False(t, web.MayRequest("shop"))
}

func TestSelector(t *testing.T) {
	c, err := Parse(read(t, "testdata/valid/design.yaml"))
	require.NoError(t, err)
	everyNode, gateways := c.Advertisements[0].Layer2.NodeSelector, c.Advertisements[1].Layer2.NodeSelector
	node := func(change ...string) map[string]string {
		labels := map[string]string{"rack": "a", "node-role.kubernetes.io/gateway": "", "disk": "ssd"}
		for i := 0; i < len(change); i += 2 {
			labels[change[i]] = change[i+1]
		}
		return labels
	}
	assert.True(t, everyNode.Matches(nil))
	assert.True(t, gateways.Matches(node()))
	assert.False(t, gateways.Matches(nil))
	assert.False(t, gateways.Matches(node("rack", "b")))
	assert.False(t, gateways.Matches(node("disk", "hdd")))
	assert.False(t, gateways.Matches(node("retired", "")))
}

func TestSize(t *testing.T) {
	c, err := Parse(read(t, "testdata/valid/large.yaml"))
	require.NoError(t, err)
	assert.InEpsilon(t, math.Pow(2, 96), c.Pools[0].Size(), 1e-9)
}

// A manifest's errors are where the operator's editor finds them.
func TestConfigMapPositions(t *testing.T) {
	const bad = "apiVersion: lodestone.io/v1alpha1\nkind: Config\npools:\n  - name: lan\n    addresses: [203.0.113.0/24, 203.0.113.7]\n"
	manifest := func(style, indent string) string {
		body := strings.ReplaceAll("\n"+strings.TrimSuffix(bad, "\n"), "\n", "\n"+indent)
		return "apiVersion: v1\nkind: ConfigMap\ndata:\n  other: x\n  config.yaml: " + style + body + "\n"
	}
	tests := map[string]struct{ file, want string }{
		"bare document": {bad, `cm.yaml:5:33: pools[0] "lan": 203.0.113.7 overlaps 203.0.113.0/24 in line 5 of the same pool`},
		"literal block": {manifest("|", "    "),
			`cm.yaml:10:37: pools[0] "lan": 203.0.113.7 overlaps 203.0.113.0/24 in line 10 of the same pool`},
		"deeper literal block": {manifest("|-", "        "),
			`cm.yaml:10:41: pools[0] "lan": 203.0.113.7 overlaps 203.0.113.0/24 in line 10 of the same pool`},
		"blank first line": {manifest("|\n", "    "),
			`cm.yaml:11:37: pools[0] "lan": 203.0.113.7 overlaps 203.0.113.0/24 in line 11 of the same pool`},
		"Windows line ends": {
			strings.ReplaceAll(manifest("|", "    "), "\n", "\r\n"),
			`cm.yaml:10:37: pools[0] "lan": 203.0.113.7 overlaps 203.0.113.0/24 in line 10 of the same pool`,
		},
		"after another manifest": {
			"kind: Namespace\n---\n" + manifest("|", "    "),
			`cm.yaml:12:37: pools[0] "lan": 203.0.113.7 overlaps 203.0.113.0/24 in line 12 of the same pool`,
		},
		"in quotes, as kubectl prints it": {
			fmt.Sprintf("kind: ConfigMap\ndata:\n  config.yaml: %q\n", bad),
			`cm.yaml:3:16: config.yaml:5:33: pools[0] "lan": 203.0.113.7 overlaps 203.0.113.0/24 in line 5 of the same pool`,
		},
		"syntax error in the block": {
			"kind: ConfigMap\ndata:\n  config.yaml: |\n    kind: Config\n    \tpools: []\n",
			"cm.yaml:5:6: this is not YAML: found a tab character that violates indentation: indent with spaces, not with tabs",
		},
		"empty block": {
			"kind: ConfigMap\ndata:\n  config.yaml: |\n",
			"cm.yaml:4:1: the document is empty: it needs at least apiVersion: lodestone.io/v1alpha1 and kind: Config",
		},
		"other manifests": {
			"apiVersion: v1\nkind: Namespace\n---\napiVersion: v1\nkind: Secret\n",
			`cm.yaml:1:13: apiVersion: "v1" is not a version of this document: this program reads lodestone.io/v1alpha1` +
				"; of Kubernetes' own objects a ConfigMap has one, under the key config.yaml",
		},
		"no data": {"kind: ConfigMap\n", "cm.yaml:1:1: the ConfigMap has no key config.yaml under data: write the document there, " +
			"after config.yaml: |"},
		"no key": {"kind: ConfigMap\ndata: {a: b}\n", "cm.yaml:1:1: the ConfigMap has no key config.yaml under data: " +
			"write the document there, after config.yaml: |"},
		"other key": {"kind: ConfigMap\ndata:\n  a: b\n  config.yml: x\n", "cm.yaml:4:3: the ConfigMap has no key config.yaml under data: " +
			`rename "config.yml"`},
		"no text": {"kind: ConfigMap\nbinaryData:\n  config.yaml: aGVsbG8=\n", "cm.yaml:3:3: the ConfigMap has no key config.yaml under " +
			"data: binaryData is not read, and kubectl puts there what is not text in UTF-8"},
		"MetalLB's": {"kind: ConfigMap\ndata:\n  config: |\n    address-pools:\n    - name: default\n", "cm.yaml:1:1: the ConfigMap has no " +
			"key config.yaml under data: this is the configuration of MetalLB before v0.13: lodestone migrate metallb makes one of ours of " +
			"its ConfigMap"},
		"not text": {
			"kind: ConfigMap\ndata:\n  config.yaml: {kind: Config}\n",
			"cm.yaml:3:16: data[config.yaml]: must be a single value, not a map: write it in quotes, or after | on lines of its own, " +
				"to make it text",
		},
		"two": {
			"kind: ConfigMap\ndata: {config.yaml: a}\n---\nkind: ConfigMap\ndata: {config.yaml: b}\n",
			"cm.yaml:5:21: data[config.yaml]: the file has a second document, the first is in line 2: validate one at a time",
		},
		"the key twice": {
			"kind: ConfigMap\ndata:\n  config.yaml: a\n  config.yaml: b\n",
			`cm.yaml:4:3: data: key "config.yaml" is already set in line 3`,
		},
		"folded": {
			manifest(">", "    "),
			"cm.yaml:5:16: data[config.yaml]: is written after >, which joins its lines: write config.yaml: |",
		},
		"in a List": {
			"kind: List\nitems:\n- kind: Namespace\n- kind: ConfigMap\n  data: {config.yaml: 'kind: Config'}\n",
			`cm.yaml:5:23: config.yaml:1:1: key "apiVersion" is missing: write apiVersion: lodestone.io/v1alpha1`,
		},
		"behind aliases": {
			"kind: List\nname: &cm ConfigMap\nx: &x\n  config.yaml: |\n    kind: Config\nitems:\n- {kind: *cm, data: *x}\n",
			`cm.yaml:5:5: key "apiVersion" is missing: write apiVersion: lodestone.io/v1alpha1`,
		},
		"an alias of a ConfigMap": {
			"kind: List\nx: &map {kind: ConfigMap, data: {config.yaml: 'kind: Config'}}\nitems: [*map]\n",
			`cm.yaml:2:47: config.yaml:1:1: key "apiVersion" is missing: write apiVersion: lodestone.io/v1alpha1`,
		},
		"no YAML": {"kind: ConfigMap: x\n", "cm.yaml:1:1: this is not YAML: mapping values are not allowed in this context: " +
			"check the indentation of this line, and quote values that contain ': '"},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			_, err := ParseFile("cm.yaml", []byte(tt.file))
			assert.EqualError(t, err, tt.want)
		})
	}
}

// An error far behind its cause, in documents too large to search, still has
// a position.
func TestSyntaxErrorInALargeDocument(t *testing.T) {
	padding := strings.Repeat("# padding\n", 10_000)
	_, err := Parse([]byte(header + padding + "clusterID: [a\nx: b: c\n"))
	assert.ErrorContains(t, err, "config.yaml:10003:1: this is not YAML")
	_, err = Parse([]byte(header + "clusterID: \"a\n" + strings.Repeat("a\n", 1000)))
	assert.ErrorContains(t, err, "config.yaml:3:1: this is not YAML")
}

// thousandPools has 1000 pools of 100 entries, which is about what a ConfigMap
// holds.
func thousandPools() []byte {
	var b strings.Builder
	b.WriteString(header + "pools:\n")
	for p := range 1000 {
		fmt.Fprintf(&b, "- name: p%d\n  addresses: [", p)
		for r := range 100 {
			fmt.Fprintf(&b, "1.%d.%d.%d,", p/100, p%100, r)
		}
		b.WriteString("]\n")
	}
	return []byte(b.String())
}

func TestThousandPools(t *testing.T) {
	c, err := Parse(thousandPools())
	require.NoError(t, err)
	assert.Len(t, c.Pools, 1000)
}

// Of thousands of wrong reservations the first ones are reported, each with its reason.
func TestManyReservations(t *testing.T) {
	var b strings.Builder
	b.WriteString(header + "pools:\n- name: p\n  addresses: [10.0.0.0/8]\n  exclude: [")
	for i := range 10_000 {
		fmt.Fprintf(&b, "10.0.%d.%d,", i/250, i%250)
	}
	b.WriteString("]\nreservations:\n")
	for i := range 4_000 {
		fmt.Fprintf(&b, "- {service: a/s%d, addresses: [10.0.%d.%d, 10.0.0.1]}\n", i, i/250, i%250)
	}
	_, err := Parse([]byte(b.String()))
	var errs Errors
	require.ErrorAs(t, err, &errs)
	assert.Len(t, errs, maxKept, "the first ones")
	assert.Equal(t, `10.0.0.0 is the first or last address of 10.0.0.0/8, which pool "p" withholds: `+
		"set its useFirstAndLast, or reserve another address", errs[0].Message)
	assert.Equal(t, `10.0.0.1 is excluded from pool "p": remove it from exclude there, or reserve another address`, errs[1].Message)
}

func BenchmarkParseThousandPools(b *testing.B) {
	doc := thousandPools()
	b.ReportAllocs()
	for b.Loop() {
		if _, err := Parse(doc); err != nil {
			b.Fatal(err)
		}
	}
}

// BenchmarkPoolOf finds the pool of an address of the last one.
func BenchmarkPoolOf(b *testing.B) {
	c, err := Parse(thousandPools())
	require.NoError(b, err)
	for _, n := range []int{10, 100, 1000} {
		b.Run(fmt.Sprint("pools=", n), func(b *testing.B) {
			some := Config{Pools: c.Pools[:n]}
			addr := some.Pools[n-1].Free.Ranges()[0].From()
			for b.Loop() {
				if _, found := some.PoolOf(addr); !found {
					b.Fatal(addr)
				}
			}
		})
	}
}

func FuzzParse(f *testing.F) {
	for _, dir := range []string{"invalid", "valid"} {
		files, _ := filepath.Glob(filepath.Join("testdata", dir, "*.yaml"))
		for _, file := range files {
			text, err := os.ReadFile(file)
			require.NoError(f, err)
			f.Add(text)
		}
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		for _, parse := range []func([]byte) (*Config, error){
			Parse, func(b []byte) (*Config, error) { return ParseFile("f", b) },
		} {
			var c *Config
			var err error
			testcost.Within(t, "a document", len(text), func() { c, err = parse(text) })
			if err != nil {
				require.Nil(t, c)
				inOrder(t, err)
				continue
			}
			valid(t, c)
		}
	})
}

// valid checks what everybody downstream relies on.
func valid(t *testing.T, c *Config) {
	t.Helper()
	require.NotEmpty(t, c.ClusterID)
	require.NotEmpty(t, c.Digest)
	require.GreaterOrEqual(t, c.Quarantine, time.Duration(0))
	names := map[string]bool{}
	for _, a := range c.Advertisements {
		require.True(t, a.Layer2 != nil || a.BGP != nil)
		require.False(t, names[a.Name])
		names[a.Name] = true
	}
	bgp(t, c)
	reservations(t, c)
	for i, p := range c.Pools {
		require.GreaterOrEqual(t, p.NamespaceQuota, 0)
		require.LessOrEqual(t, p.KeepFor, 720*time.Hour)
		require.Equal(t, p.DHCP == nil, p.Size() > 0)
		if p.DHCP != nil {
			on, _ := c.PoolOn(p.DHCP.Interface)
			require.Same(t, &c.Pools[i], on)
		}
		require.False(t, p.Free.Overlaps(p.Withheld))
		for _, other := range c.Pools[:i] {
			require.NotEqual(t, other.Name, p.Name)
			require.False(t, p.Free.Overlaps(other.Free) || p.Withheld.Overlaps(other.Free) || p.Free.Overlaps(other.Withheld))
		}
		for _, a := range p.Advertise {
			require.True(t, names[a])
		}
	}
}

// bgp checks that sessions can be had, and that routes contain only addresses
// of ours.
func bgp(t *testing.T, c *Config) {
	t.Helper()
	names, routers := map[string]bool{}, map[string]bool{}
	for _, p := range c.Peers {
		router := p.Interface + p.Address.String() + " " + p.NodeSelector.String()
		require.False(t, names[p.Name] || routers[router])
		names[p.Name], routers[router] = true, true
		require.NotEqual(t, p.Address.IsValid(), p.Interface != "")
		require.NotEqual(t, ASN{}, p.PeerASN)
		require.Positive(t, p.Port)
		require.True(t, p.HoldTime == 0 && p.BFD != nil || p.HoldTime >= 3*time.Second)
		require.True(t, p.HoldTime == 0 || p.KeepaliveInterval >= time.Second && p.KeepaliveInterval <= p.HoldTime/3)
		require.False(t, p.Multihop > 0 && p.TTLSecurity > 0)
		if p.BFD != nil {
			require.Positive(t, min(int(p.BFD.TransmitInterval), int(p.BFD.ReceiveInterval), p.BFD.DetectMultiplier))
		}
		if p.Password != nil {
			require.True(t, p.Password.Name != "" && p.Password.Key != "")
		}
	}
	for _, a := range c.Advertisements {
		if a.BGP == nil {
			continue
		}
		require.NotEmpty(t, names)
		for _, name := range a.BGP.Peers {
			require.True(t, names[name])
		}
		for i := range c.Pools {
			if p := &c.Pools[i]; p.AdvertisedBy(a.Name) && len(p.Free.Ranges()) > 0 {
				require.True(t, p.ContainsPrefix(a.BGP.Aggregate(p.Free.Ranges()[0].From())))
			}
		}
	}
}

// reservations checks that each address is one that a pool hands out, and is
// reserved once.
func reservations(t *testing.T, c *Config) {
	t.Helper()
	services, addresses := map[string]bool{}, map[netip.Addr]bool{}
	for _, r := range c.Reservations {
		require.False(t, services[r.Service])
		services[r.Service] = true
		require.NotEmpty(t, r.Addresses)
		require.LessOrEqual(t, len(r.Addresses), 8)
		for _, a := range r.Addresses {
			p, ok := c.PoolOf(a)
			require.True(t, ok && p.Free.Contains(a), a)
			require.False(t, addresses[a], a)
			addresses[a] = true
		}
	}
}

// A community is shown as it is written; the numbers are those of the RFCs.
func TestCommunitiesAreShownAsTheyAreWritten(t *testing.T) {
	t.Parallel()
	for c, want := range map[Community]string{
		64512<<16 | 100: "64512:100", 0: "0:0", 0xffff0000: "graceful-shutdown", 0xffff0007: "no-llgr", 0xffff029a: "blackhole",
		0xffffff01: "no-export", 0xffffff02: "no-advertise", 0xffffff03: "no-export-subconfed", 0xffffff04: "no-peer",
		0xffff0001: "65535:1",
	} {
		if got := c.String(); got != want {
			t.Errorf("%#x is %s, want %s", uint32(c), got, want)
		}
	}
}
