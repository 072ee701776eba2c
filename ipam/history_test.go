package ipam_test

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/lodestone-lb/lodestone/ipam"
)

// op is one step of a history.
type op struct {
	kind       string
	after      time.Duration // the clock moves before the step
	req        ipam.Request  // allocate; Owner for release and restore
	addr       netip.Addr    // restore
	layout     int           // set pools
	quarantine time.Duration
}

func (o op) String() string {
	text := fmt.Sprintf("%+v %s %s", o.after, o.kind, o.req.Owner.UID)
	switch o.kind {
	case "allocate":
		return text + fmt.Sprintf(" %v all=%v pools=%v addresses=%v", o.req.Families, o.req.RequireAll, o.req.Pools, o.req.Addresses)
	case "restore":
		return text + " " + o.addr.String()
	case "pools":
		return text + fmt.Sprintf(" layout %d, quarantine %v", o.layout, o.quarantine)
	}
	return text
}

// world is the addresses that histories are about.
var world = func() (w []netip.Addr) {
	for i := range byte(12) {
		w = append(w, netip.AddrFrom4([4]byte{198, 18, 0, i}))
	}
	for i := range byte(12) {
		w = append(w, netip.AddrFrom16([16]byte{0x20, 0x01, 0x0d, 0xb8, 15: i}))
	}
	return w
}()

func randomLayout(random *rand.Rand) layout {
	l := layout{poolOf: map[netip.Addr]int{}, withheld: map[netip.Addr]int{}}
	names := []string{"p", "q", "r", "s"}
	random.Shuffle(len(names), func(i, j int) { names[i], names[j] = names[j], names[i] })
	texts := make([][]string, random.IntN(len(names)+1))
	l.free = make([][]netip.Addr, len(texts))
	to := 0
	for _, a := range world {
		if len(texts) == 0 {
			break
		}
		if random.IntN(3) == 0 {
			to = random.IntN(len(texts))
		}
		switch random.IntN(8) {
		case 0:
		case 1:
			texts[to] = append(texts[to], "!"+a.String()+"-"+a.String())
			l.withheld[a] = to
		default:
			texts[to] = append(texts[to], a.String()+"-"+a.String())
			l.poolOf[a] = to
			l.free[to] = append(l.free[to], a)
		}
	}
	for i, t := range texts {
		p := pool(names[i], t...)
		p.AutoAssign, p.Priority = random.IntN(4) > 0, random.IntN(3)-1
		p.Namespaces = [][]string{nil, nil, {"a"}, {"b", "c"}}[random.IntN(4)]
		l.pools = append(l.pools, p)
		l.byRank = append(l.byRank, i)
	}
	slices.SortStableFunc(l.byRank, func(i, j int) int { return l.pools[i].Priority - l.pools[j].Priority })
	return l
}

func randomOp(random *rand.Rand, layouts int) op {
	pick := func(n int) netip.Addr { return world[random.IntN(n)] }
	service := []string{"a/x", "a/y", "a/z", "b/x", "b/y", "b/z", "c/x"}[random.IntN(7)]
	o := op{req: ipam.Request{
		Owner:      ipam.Owner{UID: fmt.Sprintf("%s#%d", service, random.IntN(2)), Name: service},
		Namespace:  service[:1],
		RequireAll: random.IntN(2) == 0,
	}}
	switch random.IntN(12) {
	case 0:
		o.after = -time.Duration(random.IntN(20)) * time.Second
	case 1:
		o.after = time.Minute
	case 2, 3, 4, 5:
		o.after = time.Duration(random.IntN(3000)) * time.Millisecond
	}
	switch n := random.IntN(100); {
	case n < 60:
		o.kind = "allocate"
		o.req.Families = [][]ipam.Family{{ipam.IPv4}, {ipam.IPv6}, {ipam.IPv4, ipam.IPv6}, {ipam.IPv6, ipam.IPv4}}[random.IntN(4)]
		for range max(0, random.IntN(4)-1) {
			o.req.Pools = append(o.req.Pools, []string{"p", "q", "r", "s", "t"}[random.IntN(5)])
		}
		for range max(0, random.IntN(5)-2) {
			o.req.Addresses = append(o.req.Addresses, pick(len(world)))
		}
	case n < 90:
		o.kind = "release"
	case n < 96:
		o.kind, o.addr = "restore", pick(len(world))
	default:
		o.kind, o.layout, o.quarantine = "pools", random.IntN(layouts), []time.Duration{0, 3 * time.Second, 10 * time.Second}[random.IntN(3)]
	}
	return o
}

// run plays a history on two allocators and the model. It returns the first
// step after which they differ, and how.
func run(ops []op, layouts []layout) (failed int, how string) {
	m := &model{taken: map[netip.Addr]*record{}, holds: map[string][]netip.Addr{}}
	a, b := ipam.New(), ipam.New()
	now := start
	for i, o := range ops {
		now = now.Add(o.after)
		if how := step(o, now, layouts, m, a, b); how != "" {
			return i, how
		}
		if i%16 == 0 || i == len(ops)-1 {
			if how := compare(m, a, b, now); how != "" {
				return i, how
			}
		}
	}
	return -1, ""
}

// step plays one step. It says how the answers differ, if they do.
func step(o op, now time.Time, layouts []layout, m *model, a, b *ipam.Allocator) string {
	uid := o.req.Owner.UID
	switch o.kind {
	case "allocate":
		before := a.Holds(uid)
		want, reason := m.allocate(o.req, now)
		got, err := a.Allocate(o.req, now)
		again, errAgain := b.Allocate(o.req, now)
		switch r, _ := err.(*ipam.Refusal); {
		case fmt.Sprint(err) != fmt.Sprint(errAgain) || !slices.Equal(got, again):
			return fmt.Sprintf("the same history gave %v %v and %v %v", got, err, again, errAgain)
		case err == nil && reason != "", err != nil && (r.Reason != reason || r.Message == ""), !slices.Equal(got, want):
			return fmt.Sprintf("got %v %v, want %v %q", got, err, want, reason)
		case err != nil && !slices.Equal(a.Holds(uid), before):
			return fmt.Sprintf("a refusal changed %v to %v", before, a.Holds(uid))
		}
	case "release":
		want, got := m.release(uid, now), a.Release(uid, now)
		b.Release(uid, now)
		if !slices.Equal(got, want) {
			return fmt.Sprintf("got %v, want %v", got, want)
		}
	case "restore":
		want, wantOK := m.restore(o.req.Owner, o.addr)
		got, ok := a.Restore(o.req.Owner, o.addr)
		b.Restore(o.req.Owner, o.addr)
		if got != want || ok != wantOK {
			return fmt.Sprintf("got %v %v, want %v %v", got, ok, want, wantOK)
		}
	case "pools":
		l := layouts[o.layout]
		m.setPools(l, o.quarantine)
		a.SetPools(l.pools, o.quarantine)
		b.SetPools(l.pools, o.quarantine)
	}
	if !slices.Equal(a.Holds(uid), m.held(uid)) {
		return fmt.Sprintf("%s holds %v, want %v", uid, a.Holds(uid), m.held(uid))
	}
	next, resting := a.NextFree()
	if want, any := m.nextFree(); !next.Equal(want) || resting != any {
		return fmt.Sprintf("next free %v %v, want %v %v", next, resting, want, any)
	}
	return ""
}

// compare compares everything that can be seen, and looks for addresses that
// are lost or held twice.
func compare(m *model, a, b *ipam.Allocator, now time.Time) string {
	if got, want := a.Stats(now), m.stats(now); !slices.Equal(got, want) {
		return fmt.Sprintf("stats are %v, want %v", got, want)
	}
	for _, s := range b.Stats(now) {
		if s.Size != s.Free+s.Assigned+s.Quarantined {
			return fmt.Sprintf("addresses lost or doubled: %v", s)
		}
	}
	holders := map[netip.Addr]string{}
	for uid := range m.holds {
		for _, h := range a.Holds(uid) {
			if other, twice := holders[h.Addr]; twice {
				return fmt.Sprintf("%s is held by %s and %s", h.Addr, uid, other)
			}
			holders[h.Addr] = uid
		}
	}
	for _, addr := range world {
		if o, held := a.OwnerOf(addr); held != (holders[addr] != "") || o.UID != holders[addr] {
			return fmt.Sprintf("%s is owned by %q, held by %q", addr, o.UID, holders[addr])
		}
	}
	return ""
}

// shrink leaves steps out of a failing history as long as it still fails.
func shrink(ops []op, layouts []layout) []op {
	for size := len(ops); size >= 1; size /= 2 {
		for from := 0; from < len(ops); {
			fewer := slices.Delete(slices.Clone(ops), from, min(from+size, len(ops)))
			if at, _ := run(fewer, layouts); at >= 0 {
				ops = fewer[:at+1]
			} else {
				from += size
			}
		}
	}
	return ops
}

// TestRandomHistoriesAgainstModel plays a million random steps.
func TestRandomHistoriesAgainstModel(t *testing.T) {
	seeds, steps := 200, 5000
	if testing.Short() {
		seeds = 20
	}
	for seed := range seeds {
		random := rand.New(rand.NewPCG(uint64(seed), 0))
		var layouts []layout
		for range 20 {
			layouts = append(layouts, randomLayout(random))
		}
		ops := []op{{kind: "pools", quarantine: 3 * time.Second}}
		for range steps {
			ops = append(ops, randomOp(random, len(layouts)))
		}
		at, how := run(ops, layouts)
		if at < 0 {
			continue
		}
		var story strings.Builder
		for _, o := range shrink(ops[:at+1], layouts) {
			fmt.Fprintln(&story, o)
			if o.kind == "pools" {
				describe(&story, layouts[o.layout])
			}
		}
		t.Fatalf("seed %d, step %d: %s\na short history that fails:\n%s", seed, at, how, story.String())
	}
}

func describe(w *strings.Builder, l layout) {
	for i, p := range l.pools {
		fmt.Fprintf(w, "    %s auto=%v priority=%d namespaces=%v %v withheld=%v\n",
			p.Name, p.AutoAssign, p.Priority, p.Namespaces, l.free[i], p.Withheld.Prefixes())
	}
}

// FuzzAllocate sends requests of any shape to an allocator in use.
func FuzzAllocate(f *testing.F) {
	f.Add("IPv4", true, "", "")
	f.Add("IPv6,IPv4", false, "lan,dmz", "::ffff:198.18.0.3,2001:db8::1")
	f.Add("IPX,IPv4", true, "\x00", "fe80::1%eth0,198.18.1.0,0.0.0.0")
	f.Fuzz(func(t *testing.T, fs string, all bool, pools, addresses string) {
		s := begin(t, pool("lan", "198.18.0.0/30", "!198.18.0.0/32"), onRequest(pool("dmz", "198.18.1.0/31", "2001:db8::/127")))
		s.gets("default/web", "dmz/198.18.1.0 dmz/2001:db8::", families(ipam.IPv4, ipam.IPv6), from("dmz"))
		s.gets("default/a", "lan/198.18.0.1")
		req := ipam.Request{Owner: owner("default/a"), Namespace: "default", RequireAll: all}
		for _, w := range strings.Split(fs, ",") {
			req.Families = append(req.Families, ipam.Family(w))
		}
		if pools != "" {
			req.Pools = strings.Split(pools, ",")
		}
		if addresses != "" {
			for _, w := range strings.Split(addresses, ",") {
				a, _ := netip.ParseAddr(w)
				req.Addresses = append(req.Addresses, a)
			}
		}
		got, err := s.Allocate(req, s.now)
		if err != nil {
			var r *ipam.Refusal
			require.ErrorAs(t, err, &r)
			assert.NotEmpty(t, r.Reason)
			assert.NotEmpty(t, r.Message)
			s.holds("default/a", "lan/198.18.0.1")
			return
		}
		assert.NotEmpty(t, got)
		again, err := s.Allocate(req, s.now)
		require.NoError(t, err)
		assert.Equal(t, got, again)
		s.holds("default/web", "dmz/198.18.1.0 dmz/2001:db8::")
	})
}
