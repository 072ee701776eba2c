package speaker

import (
	"bytes"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"
	"k8s.io/client-go/kubernetes/fake"
	"pgregory.net/rapid"

	"github.com/lodestone-lb/lodestone/pkg/config"
	"github.com/lodestone-lb/lodestone/pkg/report"
	"github.com/lodestone-lb/lodestone/speaker/netstate"
	"github.com/lodestone-lb/lodestone/speaker/plan"
)

// fleet is the loops of all nodes, which see the same cluster at the same time
// of a clock of their own.
type fleet struct {
	t        require.TestingT
	now      time.Time
	config   *config.Config
	nodes    map[string]plan.Node
	alive    map[string]bool
	services map[string]plan.Service
	loops    map[string]*Speaker
	told     map[string][]report.Move // by node, as the controller has read them
}

func newFleet(t require.TestingT, nodes, vips int) *fleet {
	f := &fleet{t: t, now: time.Unix(1e9, 0), nodes: map[string]plan.Node{}, alive: map[string]bool{}, services: map[string]plan.Service{},
		loops: map[string]*Speaker{}, told: map[string][]report.Move{}}
	f.config = &config.Config{
		Pools:          []config.Pool{{Name: "lan", Free: prefix("203.0.113.0/24"), Withheld: prefix("198.51.100.0/32")}},
		Advertisements: []config.Advertisement{{Name: "all", Layer2: &config.Layer2{}}},
	}
	for i := range vips {
		name := fmt.Sprint("default/web-", i)
		f.services[name] = plan.Service{Name: name, Serving: true, VIPs: []netip.Addr{netip.AddrFrom4([4]byte{203, 0, 113, byte(i)})}}
	}
	for i := range nodes {
		name := fmt.Sprint("n", i)
		f.nodes[name] = plan.Node{Labels: map[string]string{"name": name}}
		f.begin(name, true)
	}
	f.see()
	return f
}

// begin starts a speaker that knows nothing, on a node that is ready or not.
func (f *fleet) begin(node string, ready bool) {
	s, err := New(Options{Node: node, Scope: testScope, Client: fake.NewClientset(), Log: slog.New(slog.DiscardHandler),
		Registry: prometheus.NewRegistry()})
	require.NoError(f.t, err)
	f.loops[node], f.alive[node] = s, ready
	delete(f.told, node)
}

// lose takes a node down.
func (f *fleet) lose(node string) {
	delete(f.alive, node)
	delete(f.loops, node)
	f.see()
}

func (f *fleet) exclude(node string, excluded bool) {
	n := f.nodes[node]
	n.Excluded = excluded
	f.nodes[node] = n
	f.see()
}

func (f *fleet) prefer(node string) {
	c := *f.config
	c.Advertisements = []config.Advertisement{{Name: "all",
		Layer2: &config.Layer2{PreferredNodes: []config.Preference{{Weight: 1, NodeSelector: labelled("name", node)}}}}}
	f.config = &c
	f.see()
}

func labelled(key, value string) config.Selector {
	return config.Selector{{Key: key, Operator: config.In, Values: []string{value}}}
}

// see has all loops see the cluster as it is.
func (f *fleet) see() {
	for _, s := range f.loops {
		s.speakers = maps.Clone(f.alive)
		s.planner.Set(f.config, maps.Clone(f.nodes), s.speakers)
		for _, svc := range f.services {
			s.planner.Put(svc)
		}
		s.noteMoves(s.update(), f.now)
	}
}

// owners returns the owner of each VIP.
func (f *fleet) owners() map[netip.Addr]string {
	return plan.Owners(plan.Snapshot{Config: f.config, Nodes: f.nodes, Speakers: f.alive, Services: slices.Collect(maps.Values(f.services))})
}

// after lets time pass and returns what was told meanwhile: "203.0.113.1 n1 n2
// SpeakerLost" for each VIP.
func (f *fleet) after(d time.Duration) []string {
	said := []string{}
	for end := f.now.Add(d); f.now.Before(end); {
		f.now = f.now.Add(min(time.Second, end.Sub(f.now)))
		for node, s := range f.loops {
			s.settleMoves(f.now)
			moves := report.Of(report.Report{Moves: s.Moves()}.Annotations()).Moves
			for _, m := range report.NewMoves(f.told[node], moves) {
				for to, vips := range m.To {
					for _, vip := range vips {
						said = append(said, fmt.Sprintf("%s %q %q %s", vip, m.From, to, m.Why))
					}
				}
			}
			f.told[node] = moves
		}
	}
	slices.Sort(said)
	return said
}

// tells returns what is to be told when the owners were these before.
func (f *fleet) tells(before map[netip.Addr]string, why report.Reason) []string {
	said := []string{}
	for vip, owner := range f.owners() {
		if before[vip] != owner {
			said = append(said, fmt.Sprintf("%s %q %q %s", vip, before[vip], owner, why))
		}
	}
	slices.Sort(said)
	return said
}

func TestMovesAreToldOnceTheyHaveSettled(t *testing.T) {
	t.Parallel()
	f := newFleet(t, 4, 40)
	require.Empty(t, f.after(time.Minute), "a first owner is no news")
	before := f.owners()

	t.Log("a node is lost")
	f.lose("n0")
	require.Empty(t, f.after(movesSettle-time.Second))
	lost := f.tells(before, report.SpeakerLost)
	require.NotEmpty(t, lost)
	require.Equal(t, lost, f.after(time.Minute), "by one of the others")
	t.Log("and is back")
	f.begin("n0", false)
	f.see()
	f.alive["n0"] = true
	without := f.owners()
	f.see()
	back := f.after(time.Minute)
	require.Len(t, back, len(lost))
	require.Contains(t, back[0], ` "n0" NotOwner`)
	require.Equal(t, before, f.owners())
	require.Equal(t, before, without)

	t.Log("its speaker is replaced: nobody hears of it")
	f.alive["n0"] = false // it hands over
	f.see()
	require.Empty(t, f.after(time.Second))
	f.lose("n0")
	require.Empty(t, f.after(4*time.Second))
	f.begin("n0", false)
	f.see()
	require.Empty(t, f.after(time.Second))
	f.alive["n0"] = true
	f.see()
	require.Empty(t, f.after(time.Hour))

	t.Log("it flaps, and in the end it is gone")
	for range 20 {
		delete(f.alive, "n0")
		f.see()
		require.Empty(t, f.after(3*time.Second))
		f.alive["n0"] = true
		f.see()
		require.Empty(t, f.after(3*time.Second))
	}
	f.lose("n0")
	require.Equal(t, lost, f.after(time.Hour))
}

func TestMovesHaveTheirReasons(t *testing.T) {
	t.Parallel()
	f := newFleet(t, 3, 30)
	f.after(time.Minute)
	for _, step := range []struct {
		why report.Reason
		do  func()
	}{
		{"NodeExcluded", func() { f.exclude("n1", true) }},
		{"NotOwner", func() { f.exclude("n1", false) }},
		{"LessPreferred", func() { f.prefer("n2") }},
		{"SpeakerNotReady", func() { f.alive["n2"] = false; f.see() }},
		{"LessPreferred", func() { f.alive["n2"] = true; f.see() }},
		{"NodeUnknown", func() { delete(f.nodes, "n2"); f.lose("n2") }},
	} {
		before := f.owners()
		step.do()
		told := f.tells(before, step.why)
		require.NotEmpty(t, told, step.why)
		require.Equal(t, told, f.after(time.Minute), step.why)
	}
}

func TestVIPsThatNobodyHas(t *testing.T) {
	t.Parallel()
	f := newFleet(t, 3, 1)
	vip := netip.MustParseAddr("203.0.113.0")
	owner := f.owners()[vip]
	f.after(time.Minute)
	serving := func(yes bool) {
		web := f.services["default/web-0"]
		web.Serving = yes
		f.services["default/web-0"] = web
		f.see()
	}
	serving(false)
	require.Empty(t, f.after(time.Second))
	serving(true)
	require.Empty(t, f.after(time.Minute), "a rollout")
	serving(false)
	require.Equal(t, []string{fmt.Sprintf(`203.0.113.0 %q "" NoServingEndpoint`, owner)}, f.after(time.Minute))
	serving(true)
	require.Len(t, f.after(time.Minute), 1, "it has an owner again")

	t.Log("a Service that is new waits for its endpoints: its first owner is no news")
	late := plan.Service{Name: "default/late", VIPs: []netip.Addr{netip.MustParseAddr("203.0.113.99")}}
	f.services[late.Name] = late
	f.see()
	require.Empty(t, f.after(time.Minute))
	late.Serving = true
	f.services[late.Name] = late
	f.see()
	require.Empty(t, f.after(time.Minute))

	t.Log("a Service that is deleted while its VIP moves is nobody's business")
	f.exclude(owner, true)
	for _, s := range f.loops {
		s.planner.Put(plan.Service{Name: "default/web-0"})
	}
	delete(f.services, "default/web-0")
	f.see()
	require.NotContains(t, strings.Join(f.after(time.Minute), " "), "203.0.113.0 ")
}

// Whatever happens between two calm times: who owns a VIP at the second one and
// did not at the first is told once, and nobody else.
func TestWhatIsToldIsTheDifference(t *testing.T) {
	t.Parallel()
	told := 0
	rapid.Check(t, func(t *rapid.T) {
		const nodes = 4
		f := newFleet(t, nodes, 8)
		f.after(time.Minute)
		node := rapid.Custom(func(t *rapid.T) string { return fmt.Sprint("n", rapid.IntRange(0, nodes-2).Draw(t, "node")) }) // the last one stays
		pause := func() []string { return f.after(time.Duration(rapid.IntRange(0, 12).Draw(t, "seconds")) * time.Second) }
		for range rapid.IntRange(1, 5).Draw(t, "times") {
			before, said := f.owners(), []string{}
			if rapid.IntRange(0, 3).Draw(t, "restart") == 0 {
				n := node.Draw(t, "of")
				if !f.alive[n] {
					continue
				}
				f.lose(n)
				said = append(said, pause()...)
				f.begin(n, false)
				f.see()
				said = append(said, pause()...)
				f.alive[n] = true
				f.see()
				said = append(said, f.after(time.Minute)...)
				require.Zero(t, len(said)%2, "there and back: %q", said)
				continue
			}
			for range rapid.IntRange(1, 4).Draw(t, "changes") {
				switch n := node.Draw(t, "at"); rapid.IntRange(0, 2).Draw(t, "kind") {
				case 0:
					f.exclude(n, !f.nodes[n].Excluded)
				case 1:
					f.prefer(n)
				default:
					f.alive[n] = !f.alive[n]
					f.see()
				}
				// Changes are less than movesSettle apart, the first and the last, too.
				said = append(said, f.after(time.Duration(rapid.IntRange(0, 3).Draw(t, "pause"))*time.Second)...)
			}
			said = append(said, f.after(time.Minute)...)
			slices.Sort(said)
			expected := f.tells(before, "")
			require.Len(t, said, len(expected))
			for i := range said {
				require.True(t, strings.HasPrefix(said[i], expected[i]) && report.Reason(strings.Fields(said[i])[3]).Known(), "%q, not %q",
					said[i], expected[i])
			}
			told += len(said)
		}
	})
	require.Positive(t, told)
}

// Every reason for which a node can lose a VIP is one that people can read.
func TestReasonsAreKnown(t *testing.T) {
	t.Parallel()
	for _, r := range []plan.Reason{
		plan.NotOwner, plan.NoAdvertisement, plan.ServiceNotSelected, plan.NoServingEndpoint, plan.NoLocalEndpoint, plan.NodeNotSelected,
		plan.NotOnSegment,
		plan.NodeExcluded, plan.NetworkUnavailable, plan.LinkDown, plan.LessPreferred, plan.SpeakerNotReady, plan.NodeUnknown,
	} {
		require.True(t, report.Reason(r).Known(), r)
	}
}

// fakeLoop stands for the Speaker.
type fakeLoop struct {
	changes
	moves  []report.Move
	labels map[string]string
}

func (f *fakeLoop) Moves() []report.Move {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.moves
}

func (f *fakeLoop) Labels() (map[string]string, bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.labels, f.labels != nil
}

// An advertisement that matches no interface of a node is told, once it is
// certain, and told to be over.
func TestUnmatchedAdvertisements(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var log bytes.Buffer
		interfaces, cfg, loop := &fakeNetwork{}, &fakeConfig{}, &fakeLoop{}
		r := NewReporter(ReportOptions{Loop: loop, Interfaces: interfaces, Config: cfg, Log: slog.New(slog.NewTextHandler(&log, nil)),
			Registry: prometheus.NewPedanticRegistry()})
		look := func() []string { r.lookForUnmatched(time.Now()); return r.unmatched }
		interfaces.interfaces = []netstate.Interface{ethernet(2, "eth0", "198.18.0.11/24")}
		cfg.config = &config.Config{Advertisements: []config.Advertisement{
			{Name: "routed", BGP: &config.BGP{}},
			{Name: "every", Layer2: &config.Layer2{}},
			{Name: "storage", Layer2: &config.Layer2{Interfaces: []string{"bond*", "ens9"}}},
			{Name: "elsewhere", Layer2: &config.Layer2{Interfaces: []string{"ens9"}, NodeSelector: labelled("rack", "b")}},
		}}
		require.Empty(t, look(), "the node's labels are not known")
		require.False(t, r.judged)
		loop.labels = map[string]string{"rack": "a"}
		require.Empty(t, look())
		require.False(t, r.judged, "the interface may be late")
		time.Sleep(unmatchedFor)
		for range 3 {
			require.Equal(t, []string{"storage"}, look())
			require.True(t, r.judged)
		}
		require.Equal(t, 1, strings.Count(log.String(), "level=WARN"), log.String())
		require.Contains(t, log.String(), `no interface of this node matches the advertisement`)
		require.Contains(t, log.String(), `advertisement=storage interfaces="[bond* ens9]"`)

		down := ethernet(3, "bond0")
		down.Up = false
		interfaces.interfaces = append(interfaces.interfaces, down)
		require.Empty(t, look(), "one that is down is another matter")
		require.Contains(t, log.String(), "level=INFO")
		loop.labels = map[string]string{"rack": "b"}
		look()
		time.Sleep(unmatchedFor)
		require.Equal(t, []string{"elsewhere"}, look(), "the node has another label")
	})
}
