package core

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/lodestone-lb/lodestone/pkg/config"
	"github.com/lodestone-lb/lodestone/pkg/report"
	"github.com/lodestone-lb/lodestone/speaker/plan"
)

// fleet is the cores of all nodes, which hear of each other at once, in a time of their own.
type fleet struct {
	t        require.TestingT
	now      time.Time
	config   *config.Config
	nodes    Nodes
	services map[string]plan.Service
	health   map[string]Health
	cores    map[string]*Core
	alive    map[string]bool // the speakers, and which of them publish that they are ready
	networks map[string]report.Network
	vips     map[string]map[netip.Addr]plan.Layer2 // what each node announces
	read     map[string][]report.Move              // by node, as the controller has read them
	// published are the moves of each node as it published them last.
	published map[string][]report.Move
	cut       map[string]bool // the nodes that nobody hears
	alone     map[string]bool // the nodes that hear nobody, and that nobody hears
	check     func()          // at every moment
	grain     time.Duration   // of time
	segment   segmentOf
}

// segmentOf is the segment that the nodes are on.
type segmentOf interface {
	begin(node string)
	end(node string)
	// hear is called when the node may hear other speakers than before.
	hear(node string)
	announce(node string, vips map[netip.Addr]plan.Layer2)
	// leaving returns how many VIPs leave the node and are still answered for.
	leaving(node string) int
	// pass does what is due by now.
	pass()
}

// noSegment is none: a VIP that leaves is answered for until another node announces it.
type noSegment struct{ *fleet }

func (noSegment) begin(string)                                {}
func (noSegment) end(string)                                  {}
func (noSegment) announce(string, map[netip.Addr]plan.Layer2) {}
func (noSegment) hear(string)                                 {}
func (noSegment) pass()                                       {}

func (f noSegment) leaving(node string) (left int) {
	for vip, l := range f.vips[node] {
		if _, taken := f.vips[f.owners()[vip]][vip]; l.Leaving && !taken {
			left++
		}
	}
	return left
}

func newFleet(t require.TestingT, nodes, vips int) *fleet {
	f := &fleet{t: t, now: time.Unix(1e9, 0), nodes: Nodes{}, services: map[string]plan.Service{}, health: map[string]Health{},
		cores: map[string]*Core{}, alive: map[string]bool{}, networks: map[string]report.Network{},
		vips: map[string]map[netip.Addr]plan.Layer2{}, read: map[string][]report.Move{}, published: map[string][]report.Move{},
		cut: map[string]bool{}, alone: map[string]bool{}, check: func() {}, grain: time.Second}
	f.segment = noSegment{f}
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
	}
	return f
}

// start starts all speakers.
func (f *fleet) start() *fleet {
	for node := range f.nodes {
		f.begin(node, true)
	}
	f.see()
	return f
}

// begin starts a speaker that knows nothing, on a node that is ready or not.
func (f *fleet) begin(node string, ready bool) {
	f.cores[node], f.alive[node], f.vips[node] = New(Options{node, handOver, drain}), ready, nil
	f.health[node] = Health{Synced: true, Joined: ready, Healthy: true, Forwards: true}
	delete(f.read, node)
	f.segment.begin(node)
}

// join has a node be ready, or not.
func (f *fleet) join(node string, ready bool) {
	f.health[node] = Health{Synced: true, Joined: ready, Healthy: true, Forwards: true}
	f.see()
}

// lose takes a node down.
func (f *fleet) lose(node string) {
	delete(f.cores, node)
	delete(f.alive, node)
	delete(f.vips, node)
	f.segment.end(node)
	f.see()
}

// stop ends a speaker.
func (f *fleet) stop(node string) {
	c := f.cores[node]
	e := c.Step(Stop{}, f.now)
	delete(f.cores, node) // the others are stepped by see and after
	for f.apply(node, e); !e.Done; f.apply(node, e) {
		f.see()
		f.after(max(0, e.Next.Sub(f.now)))
		e = c.Step(StillLeaving(f.segment.leaving(node)), f.now)
	}
	f.lose(node)
}

// see gives all cores the cluster as it is, until none has anything to publish.
func (f *fleet) see() {
	for changed := true; changed; {
		changed = false
		for node, c := range f.cores {
			c.Step(f.health[node], f.now)
			c.Step(Config{f.config}, f.now)
			c.Step(maps.Clone(f.nodes), f.now)
			c.Step(Members{f.heard(node), maps.Clone(f.networks)}, f.now)
			f.segment.hear(node)
			for _, svc := range f.services {
				c.Step(Service{svc}, f.now)
			}
			changed = f.apply(node, c.Step(Decide{}, f.now)) || changed
		}
	}
	f.check()
}

// apply does what a core wants done, and reports whether the others are to hear of it.
func (f *fleet) apply(node string, e Effects) (changed bool) {
	if f.alive[node] != e.Ready {
		f.alive[node], changed = e.Ready, true
	}
	if n := f.networks[node]; e.NewPlan && n.Claims != e.Claims {
		n.Claims = e.Claims
		f.networks[node], changed = n, true
	}
	if e.SetVIPs {
		f.vips[node] = maps.Clone(e.VIPs)
		f.segment.announce(node, e.VIPs)
	}
	return changed
}

// after lets time pass and returns the moves that were published
// meanwhile: "203.0.113.1 n1 n2 SpeakerLost" for each VIP.
func (f *fleet) after(d time.Duration) []string {
	all := []string{}
	for end := f.now.Add(d); f.now.Before(end); f.check() {
		f.now = f.now.Add(min(f.grain, end.Sub(f.now)))
		f.segment.pass()
		for node, c := range f.cores {
			f.apply(node, c.Step(Decide{}, f.now))
			published := c.State().Moves
			if len(published) == 0 || len(f.published[node]) > 0 && &published[0] == &f.published[node][0] {
				continue // it is not changed: see State
			}
			f.published[node] = published
			moves := report.Of(report.Report{Moves: published}.Annotations()).Moves
			for _, m := range report.NewMoves(f.read[node], moves) {
				for to, vips := range m.To {
					for _, vip := range vips {
						all = append(all, fmt.Sprintf("%s %q %q %s", vip, m.From, to, m.Why))
					}
				}
			}
			f.read[node] = moves
		}
	}
	slices.Sort(all)
	return all
}

// heard returns the speakers that a node hears.
func (f *fleet) heard(by string) map[string]bool {
	heard := maps.Clone(f.alive)
	maps.DeleteFunc(heard, func(node string, _ bool) bool {
		return f.cut[node] || node != by && (f.alone[node] || f.alone[by])
	})
	return heard
}

// owners returns the owner of each VIP.
func (f *fleet) owners() map[netip.Addr]string {
	s := plan.Snapshot{Config: f.config, Nodes: f.nodes, Speakers: f.heard("")}
	for _, svc := range f.services {
		s.Services = append(s.Services, svc)
	}
	return plan.Owners(s)
}

func (f *fleet) exclude(node string, excluded bool) {
	n := f.nodes[node]
	n.Labelled = excluded
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

// Three speakers agree: at every moment each VIP is announced by one of them, or by one
// while another one leaves it.
func TestThreeCoresAgree(t *testing.T) {
	t.Parallel()
	f, handed := newFleet(t, 3, 12).start(), 0
	f.check = func() {
		for _, svc := range f.services {
			owned, leaving := []string{}, []string{}
			for node, vips := range f.vips {
				switch l, announced := vips[svc.VIPs[0]]; {
				case announced && l.Leaving:
					leaving = append(leaving, node)
				case announced:
					owned = append(owned, node)
				}
			}
			require.Len(t, owned, 1, "%s at %s, leaving %v", svc.VIPs[0], f.now, leaving)
			require.LessOrEqual(t, len(leaving), 1, "%s at %s", svc.VIPs[0], f.now)
			handed += len(leaving)
		}
	}
	before := f.owners()
	for _, change := range f.changes() {
		change()
		f.after(time.Minute)
		for vip, owner := range f.owners() {
			require.Contains(t, f.vips[owner], vip, "it is where all expect it")
		}
	}
	require.NotZero(t, handed, "some VIPs were handed over")
	require.NotEqual(t, before, f.owners())
}

// changes are what happens to a cluster: a node is lost and comes back, is updated, is excluded for a
// while, or is preferred.
func (f *fleet) changes() []func() {
	return []func(){
		func() { f.lose("n0") },
		func() { f.begin("n0", false); f.see(); f.join("n0", true) },
		func() { f.stop("n1") },
		func() { f.begin("n1", false); f.see(); f.join("n1", true) },
		func() { f.exclude("n2", true) },
		func() { f.exclude("n2", false) },
		func() { f.prefer("n2") },
	}
}
