package plan_test

import (
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"github.com/lodestone-lb/lodestone/pkg/config"
	"github.com/lodestone-lb/lodestone/pkg/report"
	"github.com/lodestone-lb/lodestone/speaker/plan"
)

func drawLayer2(t *rapid.T, nodes ...string) *config.Layer2 {
	l := &config.Layer2{
		NodeSelector: labelled(nodes...),
		Interfaces:   rapid.SampledFrom([][]string{nil, nil, {"eth0"}, {"eth*", "docker*"}}).Draw(t, "interfaces"),
		AnySegment:   rapid.IntRange(0, 7).Draw(t, "any segment") == 0,
		KeepOwner:    rapid.Bool().Draw(t, "keep owner"),
		Direct:       rapid.Bool().Draw(t, "direct"),
	}
	for range rapid.IntRange(0, 2).Draw(t, "preferences") {
		l.PreferredNodes = append(l.PreferredNodes, config.Preference{
			Weight: rapid.IntRange(1, 2).Draw(t, "weight"), NodeSelector: labelled(fmt.Sprint(rapid.IntRange(0, 3).Draw(t, "preferred"))),
		})
	}
	return l
}

func drawSegments(t *rapid.T) []report.Segment {
	switch rapid.IntRange(0, 4).Draw(t, "segments known") {
	case 0:
		return nil
	case 1, 2: // the segment of most VIPs
		s := segment("203.0.113.0/27", "eth0")
		s.Down = rapid.IntRange(0, 3).Draw(t, "down") == 0
		return []report.Segment{s}
	}
	return append([]report.Segment{}, rapid.SliceOfN(rapid.Custom(func(t *rapid.T) report.Segment {
		name := rapid.SampledFrom([]string{"eth0", "eth1", "docker0"}).Draw(t, "interface")
		s := segment(rapid.SampledFrom([]string{"203.0.113.0/24", "203.0.113.0/27", "203.0.113.16/29", "2001:db8::/64"}).Draw(t, "subnet"), name)
		s.IfNamed, s.Down = name == "docker0", rapid.IntRange(0, 3).Draw(t, "down") == 0
		return s
	}), 0, 3).Draw(t, "segments")...)
}

var errLimit = errors.New("no number")

func drawSnapshot(t *rapid.T) plan.Snapshot {
	some := func(label string) bool { return rapid.IntRange(0, 3).Draw(t, label) > 0 }
	s := plan.Snapshot{Nodes: map[string]plan.Node{}, Speakers: map[string]bool{}, Config: &config.Config{
		Pools: []config.Pool{pool("a", []string{"a"}, "203.0.113.0/28"), pool("b", nil, "203.0.113.16/28")},
		Advertisements: []config.Advertisement{
			{Name: "a", Layer2: drawLayer2(t, "0", "1")},
			{Name: "b", Layer2: drawLayer2(t, "1", "2")},
			{Name: "c"},
		},
		Peers:              drawPeers(t),
		IgnoreExcludeLabel: !some("the label counts"), ExcludeTaints: []string{"out"},
	}}
	for i := range s.Config.Advertisements {
		if i > 1 || !some("layer 2 alone") {
			s.Config.Advertisements[i].BGP = drawBGP(t)
		}
	}
	if !some("every Service") {
		s.Config.Advertisements[1].ServiceSelector = labelled("0", "1")
	}
	var names []string
	for i := range rapid.IntRange(1, 6).Draw(t, "nodes") {
		name := fmt.Sprint("n", i)
		names = append(names, name)
		s.Speakers[name] = some("speaker")
		s.Nodes[name] = plan.Node{Labels: map[string]string{"on": fmt.Sprint(i % 4)}, Labelled: !some("included"), Leaving: !some("stays"),
			Taints:             rapid.SampledFrom([][]string{nil, nil, nil, {"in"}, {"in", "out"}}).Draw(t, "taints"),
			NetworkUnavailable: !some("network"), BGP: drawNodeBGP(t),
			Network: report.Network{Segments: drawSegments(t), Blind: !some("sees"), Sick: rapid.IntRange(0, 2).Draw(t, "sick") == 0,
				Forwards: some("rules")}}
	}
	if name := rapid.SampledFrom(names).Draw(t, "claims all"); !some("no claims") {
		n := s.Nodes[name]
		for i := range n.Claims {
			n.Claims[i] = 0xff
		}
		s.Nodes[name] = n
	}
	for i := range rapid.IntRange(0, 20).Draw(t, "services") {
		svc := plan.Service{Name: fmt.Sprint("default/", i), Local: some("local"), Serving: some("serving")}
		if some("labelled") {
			svc.Labels = map[string]string{"on": fmt.Sprint(i % 3)}
		}
		for range rapid.IntRange(0, 2).Draw(t, "vips") {
			svc.VIPs = append(svc.VIPs, netip.AddrFrom4([4]byte{203, 0, 113, byte(rapid.IntRange(0, 47).Draw(t, "vip"))}))
		}
		for _, n := range names {
			if svc.Serving && some("endpoint") {
				svc.Backends = append(svc.Backends, plan.Backend{Node: n, Open: rapid.IntRange(0, 3).Draw(t, "open"), Draining: 1})
			}
		}
		if some("tcp") {
			svc.Ports = []plan.Port{{Protocol: 6, Number: 80}}
		}
		if some("limit") {
			svc.Limit = plan.Limit{PerSecond: 100, Ports: svc.Ports}
			if !some("right") {
				svc.LimitErr = errLimit
			}
		}
		s.Services = append(s.Services, svc)
	}
	return s
}

// takesTraffic reports whether an endpoint of the Service, which has policy Local, takes traffic on the node.
func takesTraffic(svc plan.Service, node string) bool {
	return slices.ContainsFunc(svc.Backends, func(b plan.Backend) bool { return b.Node == node && b.Open > 0 })
}

func TestEveryVIPHasOneOwnerOrAReasonOnEveryNode(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		s := drawSnapshot(t)
		owners := plan.Owners(s)
		for _, svc := range s.Services {
			for _, vip := range svc.VIPs {
				if _, ok := owners[vip]; !ok {
					t.Fatalf("%s is missing", vip)
				}
			}
		}
		for node := range s.Nodes {
			p := plan.Make(node, s)
			if all := verdicts(p); len(all) != len(owners) {
				t.Fatalf("node %s: %d verdicts about %d VIPs", node, len(all), len(owners))
			}
			for vip, owner := range owners {
				silence, silent := p.Silent[vip]
				_, owned := p.Layer2[vip]
				_, routed := p.BGP.VIPs[vip]
				if owned != (node == owner) || silent == (owned || routed) {
					t.Fatalf("node %s about %s: owned %v, routed %v, silent %v, owner %q", node, vip, owned, routed, silent, owner)
				}
				if silent && (silence.Owner != owner || silence.Reason == "" || silence.Message == "") {
					t.Fatalf("node %s about %s: %+v, owner %q", node, vip, silence, owner)
				}
				if silence.Reason == plan.NotOwner && owner == "" {
					t.Fatalf("node %s could own %s, but nobody does", node, vip)
				}
			}
		}
	})
}

func TestMakeIgnoresTheOrderOfServices(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		s := drawSnapshot(t)
		before := plan.Owners(s)
		s.Services = rapid.Permutation(s.Services).Draw(t, "order")
		if after := plan.Owners(s); !maps.Equal(before, after) {
			t.Fatalf("owners were %v, are %v", before, after)
		}
	})
}

// best returns the nodes that may own the VIP, by the rules as the reference
// has them: from all nodes down, without what the plan remembers.
func best(s plan.Snapshot, vip netip.Addr) map[string]bool {
	var sharers []plan.Service
	for _, svc := range s.Services {
		if slices.Contains(svc.VIPs, vip) {
			sharers = append(sharers, svc)
		}
	}
	pool, inPool := s.Config.PoolOf(vip)
	concerns := func(a config.Advertisement) bool {
		return a.Layer2 != nil && (!inPool || len(pool.Advertise) == 0 || slices.Contains(pool.Advertise, a.Name)) &&
			slices.ContainsFunc(sharers, func(svc plan.Service) bool { return a.ServiceSelector.Matches(svc.Labels) })
	}
	kept, owners := false, map[string]bool{}
	selected, here, weights := map[string]bool{}, map[string]bool{}, map[string]int{}
	links, all := map[string][]bool{}, map[string][]bool{}
	for name, n := range s.Nodes {
		for _, a := range s.Config.Advertisements {
			if !concerns(a) {
				continue
			}
			kept = kept || a.Layer2.KeepOwner
			if !a.Layer2.NodeSelector.Matches(n.Labels) {
				continue
			}
			selected[name] = true
			weights[name] += a.Layer2.Weight(n.Labels)
			here[name] = here[name] || a.Layer2.AnySegment
			for _, g := range n.Segments {
				named := slices.Contains(a.Layer2.Interfaces, g.Interface) || slices.Contains(a.Layer2.Interfaces, g.Interface[:len(g.Interface)-1]+"*")
				if !named && (len(a.Layer2.Interfaces) > 0 || g.IfNamed) {
					continue
				}
				all[name] = append(all[name], !g.Down)
				if a.Layer2.AnySegment || g.Subnet.Contains(vip) {
					here[name], links[name] = true, append(links[name], !g.Down)
				}
			}
		}
	}
	nobody := !slices.Contains(slices.Collect(maps.Values(here)), true)
	if nobody {
		links = all
	}
	sound := func(name string) bool {
		n := s.Nodes[name]
		return announces(s, name) && (here[name] || n.Segments == nil || nobody)
	}
	unplugged := func(name string) bool { return len(links[name]) > 0 && !slices.Contains(links[name], true) }
	linked := false
	for name := range selected {
		linked = linked || sound(name) && !unplugged(name)
	}
	serving := slices.ContainsFunc(sharers, func(svc plan.Service) bool { return svc.Serving })
	for _, blind := range []bool{false, true} { // the blind and the unfit only if there is nobody else
		heaviest := 0
		for name := range selected {
			accepted := !slices.ContainsFunc(sharers, func(svc plan.Service) bool {
				return svc.Serving && svc.Local && !takesTraffic(svc, name)
			})
			if !serving || !accepted || !sound(name) || linked && unplugged(name) || (s.Nodes[name].Blind || unfit(s, name)) && !blind {
				continue
			}
			if kept && s.Nodes[name].Claims != (report.Claims{}) {
				return map[string]bool{name: true} // no other node claims anything
			}
			if weights[name] > heaviest {
				heaviest = weights[name]
				clear(owners)
			}
			if weights[name] == heaviest {
				owners[name] = true
			}
		}
		if len(owners) > 0 {
			break
		}
	}
	return owners
}

func TestTheOwnerIsOneOfTheBest(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		s := drawSnapshot(t)
		for vip, owner := range plan.Owners(s) {
			want := best(s, vip)
			if !want[owner] && (owner != "" || len(want) > 0) {
				t.Fatalf("%s is owned by %q, the best are %v", vip, owner, want)
			}
		}
	})
}

func TestALostNodeMovesOnlyItsOwnVIPs(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		s := drawSnapshot(t)
		before := plan.Owners(s)
		lost := rapid.SampledFrom(slices.Sorted(maps.Keys(s.Nodes))).Draw(t, "lost")
		s.Speakers[lost] = false
		for vip, owner := range plan.Owners(s) {
			if owner != before[vip] && before[vip] != lost && before[vip] != "" { // links count no more when nobody has one
				t.Fatalf("%s was lost, %s moved from %q to %q", lost, vip, before[vip], owner)
			}
		}
	})
}
