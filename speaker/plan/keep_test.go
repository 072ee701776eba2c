package plan

import (
	"fmt"
	"maps"
	"net/netip"
	"testing"

	"go4.org/netipx"
	"pgregory.net/rapid"

	"github.com/lodestone-lb/lodestone/pkg/config"
	"github.com/lodestone-lb/lodestone/pkg/report"
)

// gathering is a number of speakers that keep owners and publish their claims. The claims arrive
// late and in any order. It calls the plan as the loop does.
type gathering struct {
	t     *rapid.T
	names []string
	vips  []netip.Addr
	up    map[string]bool
	own   map[string]report.Claims // what each has published
	// What each has heard: who is up, and what those claim.
	heard  map[string]map[string]report.Claims
	config *config.Config
	local  []Backend // of the last VIP, which has policy Local
}

func drawGathering(t *rapid.T) *gathering {
	g := &gathering{t: t, up: map[string]bool{}, own: map[string]report.Claims{},
		heard: map[string]map[string]report.Claims{}}
	for i := range rapid.IntRange(2, 5).Draw(t, "nodes") {
		g.names = append(g.names, fmt.Sprint("n", i))
		if rapid.Bool().Draw(t, "endpoint") {
			g.local = append(g.local, Backend{Node: g.names[i], Open: 1})
		}
	}
	taken := map[uint16]bool{}
	for i := range 12 { // in buckets of their own: see Claims
		vip := netip.AddrFrom4([4]byte{203, 0, 113, byte(i)})
		if !taken[report.Bucket(vip)] {
			taken[report.Bucket(vip)] = true
			g.vips = append(g.vips, vip)
		}
	}
	var b netipx.IPSetBuilder
	b.AddPrefix(netip.MustParsePrefix("203.0.113.0/24"))
	free, _ := b.IPSet()
	g.config = &config.Config{
		Pools:          []config.Pool{{Name: "lan", Free: free, Withheld: &netipx.IPSet{}}},
		Advertisements: []config.Advertisement{{Name: "all", Layer2: &config.Layer2{KeepOwner: true}}},
	}
	return g
}

// snapshot is what a node knows.
func (g *gathering) snapshot(node string) Snapshot {
	s := Snapshot{Config: g.config, Nodes: map[string]Node{}, Speakers: map[string]bool{}}
	for _, name := range g.names {
		s.Nodes[name] = Node{Network: report.Network{Claims: g.heard[node][name]}}
		_, s.Speakers[name] = g.heard[node][name]
	}
	for i, vip := range g.vips {
		last := i == len(g.vips)-1
		s.Services = append(s.Services, Service{Name: vip.String(), VIPs: []netip.Addr{vip}, Serving: true, Local: last, Backends: g.local})
	}
	return s
}

// decide makes a node's plan, which changes what it claims.
func (g *gathering) decide(node string) {
	if g.up[node] {
		g.own[node] = Make(node, g.snapshot(node)).Claims
		g.heard[node][node] = g.own[node]
	}
}

// hear lets a node hear how another one is.
func (g *gathering) hear(node, of string) {
	if !g.up[node] {
		return
	}
	delete(g.heard[node], of)
	if g.up[of] {
		g.heard[node][of] = g.own[of]
	}
}

// start starts a speaker, which is ready once it has heard of all others.
func (g *gathering) start(node string) {
	if g.up[node] {
		return
	}
	g.up[node], g.own[node], g.heard[node] = true, report.Claims{}, map[string]report.Claims{node: {}}
	for _, other := range g.names {
		g.hear(node, other)
	}
}

func (g *gathering) crash(node string) {
	delete(g.up, node)
	delete(g.heard, node)
}

// settle delivers all claims, and returns the owners, on which all nodes agree.
func (g *gathering) settle() map[netip.Addr]string {
	for range 4 { // as often as a change can cause another one
		for _, node := range g.names {
			for _, of := range g.names {
				g.hear(node, of)
			}
		}
		for _, node := range g.names {
			g.decide(node)
		}
	}
	var owners map[netip.Addr]string
	for _, node := range g.names {
		if !g.up[node] {
			continue
		}
		if view := Owners(g.snapshot(node)); owners == nil {
			owners = view
		} else if !maps.Equal(owners, view) {
			g.t.Fatalf("%s has %v, another one %v", node, view, owners)
		}
	}
	return owners
}

// Whatever happened before, all nodes agree in the end. Then a loss moves only the VIPs of
// the lost node, and its return moves none.
func TestOwnersAreKept(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		g := drawGathering(t)
		one := func(label string) string { return rapid.SampledFrom(g.names).Draw(t, label) }
		t.Repeat(map[string]func(*rapid.T){
			"start":  func(*rapid.T) { g.start(one("node")) },
			"crash":  func(*rapid.T) { g.crash(one("node")) },
			"hear":   func(*rapid.T) { g.hear(one("node"), one("of")) },
			"decide": func(*rapid.T) { g.decide(one("node")) },
		})
		for _, node := range g.names {
			g.start(node)
		}
		before := g.settle()
		lost := one("lost")
		g.crash(lost)
		without := g.settle()
		for vip, owner := range without {
			if owner != before[vip] && before[vip] != lost {
				t.Fatalf("%s was lost, %s moved from %q to %q", lost, vip, before[vip], owner)
			}
		}
		g.start(lost)
		returned := g.settle()
		for vip, owner := range returned {
			if owner != without[vip] && without[vip] != "" { // some had nowhere to go
				t.Fatalf("%s is back, %s moved from %q to %q", lost, vip, without[vip], owner)
			}
		}
	})
}

// Two sides of a partition have an owner each; when it ends, the one whose VIP
// it is has it, and the other one's claim is over.
func TestKeptOwnersAfterAPartition(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		g := drawGathering(t)
		for _, node := range g.names {
			g.start(node)
		}
		before := g.settle()
		alone := rapid.SampledFrom(g.names).Draw(t, "alone")
		for range 2 {
			for _, node := range g.names {
				if node != alone {
					delete(g.heard[node], alone)
					delete(g.heard[alone], node)
				}
				g.decide(node)
			}
		}
		if after := g.settle(); !maps.Equal(before, after) {
			t.Fatalf("owners were %v, are %v", before, after)
		}
	})
}
