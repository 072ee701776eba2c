package plan_test

import (
	"fmt"
	"maps"
	"net/netip"
	"reflect"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/lodestone-lb/lodestone/pkg/config"
	"github.com/lodestone-lb/lodestone/pkg/report"
	"github.com/lodestone-lb/lodestone/speaker/plan"
)

// TestPlannerEqualsMake lets a Planner live through a random history. After
// each step its plan is the one that Make makes from the snapshot alone, and the
// Changes are the differences of the two last plans.
func TestPlannerEqualsMake(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		now, p := plan.Snapshot{}, plan.NewPlanner("n0")
		services, before := map[string]plan.Service{}, map[netip.Addr]string{}
		for chapter := range rapid.IntRange(1, 10).Draw(t, "chapters") {
			next := drawSnapshot(t)
			if rapid.IntRange(0, 2).Draw(t, "other cluster") == 0 {
				if rapid.Bool().Draw(t, "same document") {
					next.Config = now.Config
				}
				now.Config, now.Nodes, now.Speakers = next.Config, next.Nodes, next.Speakers
				p.Set(now.Config, now.Nodes, now.Speakers)
			}
			for _, s := range next.Services {
				if rapid.IntRange(0, 3).Draw(t, "gone") == 0 {
					s = plan.Service{Name: s.Name}
				}
				p.Put(s)
				services[s.Name] = s
			}
			for _, name := range slices.Sorted(maps.Keys(services)) {
				if s := services[name]; rapid.IntRange(0, 3).Draw(t, "relabelled") == 0 {
					s.Labels = map[string]string{"on": fmt.Sprint(rapid.IntRange(0, 2).Draw(t, "label"))}
					p.Put(s)
					services[name] = s
				}
			}
			now.Services = slices.Collect(maps.Values(services))

			owners := before
			before = plan.Owners(now)
			replay, routes, sessions := verdicts(p.Plan()), maps.Clone(p.Plan().BGP.Routes), p.Plan().BGP
			given := p.Plan()
			limits, limitErrs, forwarded := maps.Clone(given.Limits), maps.Clone(given.LimitErrs), maps.Clone(given.Forwarding.Services)
			changes := p.Update()
			require.Equal(t, limits, given.Limits, "others have it")
			require.Equal(t, limitErrs, given.LimitErrs)
			require.Equal(t, forwarded, given.Forwarding.Services)
			require.Equal(t, changes.Limits, !maps.EqualFunc(limits, p.Plan().Limits, plan.Limit.Equal) ||
				!maps.Equal(limitErrs, p.Plan().LimitErrs))
			require.Equal(t, withoutHistory(plan.Make("n0", now)), withoutHistory(p.Plan()))
			require.False(t, p.Stale())
			var moves []plan.Move
			for vip, owner := range before {
				was, known := owners[vip]
				if !known && chapter > 0 {
					moves = append(moves, plan.Move{VIP: vip, To: owner, New: true})
				}
				if known && was != owner {
					moves = append(moves, plan.Move{VIP: vip, From: was, To: owner})
					if why := p.Why(vip, was); was != "" {
						require.NotEmpty(t, why)
					}
				}
			}
			require.ElementsMatch(t, moves, changes.Moves)
			for _, c := range changes.VIPs {
				was := replay[c.VIP]
				if was.Peers != nil && !was.Owned {
					was.Silence.Owner = owners[c.VIP]
				}
				require.Equal(t, was, c.Before)
				if !c.After.Silent {
					c.After.Silence = plan.Silence{}
				}
				require.NotEqual(t, replay[c.VIP], c.After)
				replay[c.VIP] = c.After
			}
			maps.DeleteFunc(replay, func(_ netip.Addr, v plan.Verdict) bool { return !v.Owned && !v.Silent && v.Peers == nil })
			require.Equal(t, verdicts(p.Plan()), replay)
			checkRoutesChanged(t, routes, p.Plan().BGP.Routes, changes.Prefixes)
			require.Equal(t, changes.Sessions, !maps.Equal(sessions.Sessions, p.Plan().BGP.Sessions) ||
				!maps.Equal(sessions.Problems, p.Plan().BGP.Problems))
		}
	})
}

// checkRoutesChanged checks that exactly those prefixes have another route, and
// that the others have the same map.
func checkRoutesChanged(t *rapid.T, before, after map[netip.Prefix]plan.Route, changed []netip.Prefix) {
	for prefix := range before {
		if slices.Contains(changed, prefix) {
			require.NotEqual(t, before[prefix], after[prefix], "%s", prefix)
		} else {
			require.Equal(t, reflect.ValueOf(before[prefix]).Pointer(), reflect.ValueOf(after[prefix]).Pointer(), "%s", prefix)
		}
	}
	for prefix := range after {
		require.True(t, before[prefix] != nil || slices.Contains(changed, prefix), "%s is new", prefix)
	}
	slices.SortFunc(changed, netip.Prefix.Compare)
	require.Len(t, slices.Compact(changed), len(changed))
}

// withoutHistory returns the plan without what Make cannot know.
func withoutHistory(p plan.Plan) plan.Plan {
	p.Layer2 = maps.Clone(p.Layer2)
	for vip, l := range p.Layer2 {
		l.New = false
		p.Layer2[vip] = l
	}
	if len(p.Forwarding.Services) == 0 {
		p.Forwarding = nil // there are nodes in it as long as something may drain
	}
	return p
}

func verdicts(p plan.Plan) map[netip.Addr]plan.Verdict {
	all := map[netip.Addr]plan.Verdict{}
	for vip, l := range p.Layer2 {
		all[vip] = plan.Verdict{Owned: true, Layer2: l}
	}
	for vip, s := range p.Silent {
		all[vip] = plan.Verdict{Silent: true, Silence: s}
	}
	for vip, peers := range p.BGP.VIPs {
		v := all[vip]
		v.Peers = peers
		all[vip] = v
	}
	return all
}

// large is a snapshot of 10,000 VIPs, half of them with policy Local.
func large(nodes int) plan.Snapshot {
	s := plan.Snapshot{Nodes: map[string]plan.Node{}, Speakers: map[string]bool{}, Config: &config.Config{
		Pools:          []config.Pool{pool("lan", nil, "10.0.0.0/16")},
		Advertisements: []config.Advertisement{{Name: "all", Layer2: &config.Layer2{}}},
	}}
	for i := range nodes {
		name := fmt.Sprint("n", i)
		s.Nodes[name] = plan.Node{Network: report.Network{Segments: []report.Segment{segment("10.0.0.0/16", "eth0"),
			segment("2001:db8::/64", "eth0")}}}
		s.Speakers[name] = true
	}
	for i := range 10_000 {
		s.Services = append(s.Services, plan.Service{
			Name: fmt.Sprint("default/", i), VIPs: []netip.Addr{netip.AddrFrom4([4]byte{10, 0, byte(i >> 8), byte(i)})},
			Local: i%2 == 0, Serving: true, Backends: backends(fmt.Sprint("n", i%nodes), fmt.Sprint("n", i%(nodes-1))),
		})
	}
	return s
}

// routed is large with all VIPs announced by BGP to two routers, one by one and
// in aggregates.
func routed(nodes int) plan.Snapshot {
	s := large(nodes)
	for name, n := range s.Nodes {
		n.Addresses = []netip.Addr{netip.MustParseAddr("198.18.0.10")}
		s.Nodes[name] = n
	}
	s.Config.Advertisements = []config.Advertisement{
		{Name: "hosts", BGP: &config.BGP{AggregationLength: 32, AggregationLengthV6: 128, Communities: []config.Community{7}}},
		{Name: "aggregates", BGP: &config.BGP{AggregationLength: 24, AggregationLengthV6: 128, Communities: []config.Community{8}}},
	}
	for i := range 2 {
		s.Config.Peers = append(s.Config.Peers, config.Peer{
			Name: fmt.Sprint("tor-", i), Address: netip.AddrFrom4([4]byte{198, 18, 0, byte(i)}), LocalASN: 64512,
			PeerASN: config.ASN{Number: 64513}})
	}
	return s
}

// One change among 10,000 Services costs what that change is, and changes no
// route but its own.
func TestOneChangeAmongManyRoutes(t *testing.T) {
	s := routed(10)
	p := plan.NewPlanner("n7")
	p.Set(s.Config, s.Nodes, s.Speakers)
	for _, service := range s.Services {
		service.Local = false
		p.Put(service)
	}
	require.Equal(t, 10_000+40, len(p.Update().Prefixes), "hosts and aggregates")
	service := s.Services[1]
	service.Local = false
	change := func(serving bool) plan.Changes {
		service.Serving = serving
		p.Put(service)
		return p.Update()
	}
	require.Equal(t, 256+1, len(change(false).Prefixes), "the aggregate falls apart")
	require.Equal(t, 256+1, len(change(true).Prefixes), "and is whole again")
	s.Config.Advertisements[1].BGP.AggregatePartly = true
	config := *s.Config
	p.Set(&config, s.Nodes, s.Speakers)
	require.Empty(t, p.Update().Prefixes, "nothing was in parts")
	require.Equal(t, 1, len(change(false).Prefixes))
	require.Equal(t, 1, len(change(true).Prefixes))
	serving := false
	allocs := testing.AllocsPerRun(100, func() { change(serving); serving = !serving })
	require.Less(t, allocs, 100.0)
	change(true)

	speakers := maps.Clone(s.Speakers)
	delete(speakers, "n9")
	p.Set(&config, s.Nodes, speakers)
	require.Empty(t, p.Update().Prefixes, "another speaker is lost")
	delete(speakers, "n7")
	p.Set(&config, s.Nodes, speakers)
	require.Equal(t, 10_000+40, len(p.Update().Prefixes), "this one is not ready")
	require.Empty(t, p.Plan().BGP.Routes)
	p.Set(&config, s.Nodes, s.Speakers)
	require.Equal(t, 10_000+40, len(p.Update().Prefixes))
}

func BenchmarkPlan(b *testing.B) {
	for _, nodes := range []int{100, 1000} {
		benchmarkPlan(b, fmt.Sprintf("10000 VIPs/%d nodes", nodes), large(nodes))
	}
	benchmarkPlan(b, "10000 VIPs by BGP/1000 nodes", routed(1000))
	benchmarkPlan(b, "10000 VIPs directly/1000 nodes", direct(1000))
}

// direct is large with connections limited and forwarded directly.
func direct(nodes int) plan.Snapshot {
	s := large(nodes)
	s.Config.Advertisements[0].Layer2.Direct = true
	for name, n := range s.Nodes {
		n.Forwards, n.Addresses = true, []netip.Addr{netip.MustParseAddr("10.0.200.1")}
		s.Nodes[name] = n
	}
	for i := range s.Services {
		svc := &s.Services[i]
		svc.Ports = []plan.Port{{Protocol: 6, Number: 80}}
		svc.Limit = plan.Limit{PerSecond: 1000, Ports: svc.Ports}
	}
	return s
}

func benchmarkPlan(b *testing.B, name string, s plan.Snapshot) {
	b.Run(name+"/Make", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			plan.Make("n7", s)
		}
	})
	p := plan.NewPlanner("n7")
	p.Set(s.Config, s.Nodes, s.Speakers)
	for _, service := range s.Services {
		p.Put(service)
	}
	p.Update()
	run := func(what string, wantChange bool, change func(i int)) {
		b.Run(name+"/"+what, func(b *testing.B) {
			b.ReportAllocs()
			for i := 0; b.Loop(); i++ {
				change(i)
				if changes := p.Update(); len(changes.VIPs) > 0 != wantChange {
					b.Fatalf("changes: %v", changes)
				}
			}
		})
	}
	lost := maps.Clone(s.Speakers)
	delete(lost, "n9")
	run("speaker lost or back", s.Config.Advertisements[0].Layer2 != nil,
		func(i int) { p.Set(s.Config, s.Nodes, []map[string]bool{lost, s.Speakers}[i%2]) })
	service := s.Services[1]
	run("Service comes or goes", true, func(i int) {
		service.VIPs = s.Services[1].VIPs[:i%2]
		p.Put(service)
	})
	local := s.Services[0]
	elsewhere := [][]plan.Backend{backends("n0", "n20"), backends("n0", "n21")}
	run("endpoint on another node", false, func(i int) {
		local.Backends = elsewhere[i%2]
		p.Put(local)
	})
}

// An address that comes while the others are known is new until somebody has
// owned it; one that was there before, or comes from another Service, is not.
func TestNewAddresses(t *testing.T) {
	t.Parallel()
	before, added, shared := netip.MustParseAddr("203.0.113.1"), netip.MustParseAddr("203.0.113.2"), netip.MustParseAddr("203.0.113.3")
	of := func(name string, serving bool, vips ...netip.Addr) plan.Service {
		return plan.Service{Name: name, VIPs: vips, Serving: serving}
	}
	one, both := map[string]bool{"n0": true, "n1": false}, map[string]bool{"n0": true, "n1": true}
	cfg := &config.Config{Advertisements: []config.Advertisement{{Name: "all", Layer2: &config.Layer2{}}}}
	nodes := map[string]plan.Node{"n0": {}, "n1": {}}
	p := plan.NewPlanner("n0")
	isNew := func(vip netip.Addr) bool {
		p.Update()
		return p.Plan().Layer2[vip].New
	}
	p.Set(cfg, nodes, one)
	p.Put(of("a", true, before))
	require.False(t, isNew(before), "there at the start")

	p.Put(of("b", false, added))
	require.False(t, isNew(added), "nobody owns it yet")
	p.Put(of("b", true, added))
	require.True(t, isNew(added), "its first endpoint")
	p.Put(of("b", false, added))
	p.Update()
	p.Put(of("b", true, added))
	require.False(t, isNew(added), "it was announced before")

	p.Put(of("c", false, shared))
	p.Put(of("d", true, shared))
	p.Put(of("c", false))
	require.True(t, isNew(shared), "never announced, whoever has it")
	p.Put(of("d", true))
	p.Update()
	p.Put(of("d", true, shared))
	require.True(t, isNew(shared), "given back and given again")

	// A VIP that another node owned is known to be ours.
	p.Set(cfg, nodes, map[string]bool{"n0": false, "n1": true})
	p.Update()
	p.Put(of("e", true, netip.MustParseAddr("203.0.113.4")))
	p.Update()
	p.Set(cfg, nodes, one)
	require.False(t, isNew(netip.MustParseAddr("203.0.113.4")), "the other one announced it")

	// A VIP that its owner withholds because of another machine is new to the next owner, and so it is to an owner that
	// starts again. Reports of other nodes than the owner do not count.
	withheld := netip.MustParseAddr("203.0.113.5")
	p.Set(cfg, nodes, map[string]bool{"n0": false, "n1": true})
	p.Put(of("f", true, withheld))
	p.Update()
	reports := func(announced bool) plan.Node {
		return plan.Node{Network: report.Network{Conflicts: []report.Conflict{{VIP: withheld, Announced: announced}}}}
	}
	for who, by := range map[string]struct {
		nodes map[string]plan.Node
		isNew bool
	}{
		"the owner":             {map[string]plan.Node{"n0": {}, "n1": reports(false)}, true},
		"the owner, announced":  {map[string]plan.Node{"n0": {}, "n1": reports(true)}, false},
		"the speaker before":    {map[string]plan.Node{"n0": reports(false), "n1": {}}, true},
		"one that never had it": {map[string]plan.Node{"n0": {}, "n1": {}, "n2": reports(false)}, false},
	} {
		p.Set(cfg, by.nodes, map[string]bool{"n0": false, "n1": true})
		p.Update()
		p.Set(cfg, by.nodes, one)
		require.Equal(t, by.isNew, isNew(withheld), who)
	}
	p.Set(cfg, nodes, one)
	p.Update()

	// Home does not depend on which nodes are able.
	homes := 0
	for vip, l := range p.Plan().Layer2 {
		p.Set(cfg, nodes, both)
		p.Update()
		_, stays := p.Plan().Layer2[vip]
		require.Equal(t, stays, l.Home, "%s", vip)
		if l.Home {
			homes++
		}
		p.Set(cfg, nodes, one)
		p.Update()
	}
	require.Positive(t, homes)
}

// BenchmarkNodeLost is what one speaker computes when one of 1,000 others is
// lost, which moves the VIPs of that one among 5,000: next to each other, or
// scattered, each in a block of the election's own.
func BenchmarkNodeLost(b *testing.B) {
	const nodes, vips = 1000, 5000
	for name, stride := range map[string]int{"dense": 1, "scattered": 100} {
		b.Run(name, func(b *testing.B) {
			s := large(nodes)
			s.Config.Pools = []config.Pool{pool("lan", nil, "10.0.0.0/8")}
			p := plan.NewPlanner("n7")
			p.Set(s.Config, s.Nodes, s.Speakers)
			for i, service := range s.Services[:vips] {
				n := i * stride
				service.Local, service.VIPs = false, []netip.Addr{netip.AddrFrom4([4]byte{10, byte(n >> 16), byte(n >> 8), byte(n)})}
				p.Put(service)
			}
			p.Update()
			lost := maps.Clone(s.Speakers)
			delete(lost, "n9")
			moved := 0
			for b.Loop() {
				p.Set(s.Config, s.Nodes, lost)
				moved = len(p.Update().VIPs)
				b.StopTimer()
				p.Set(s.Config, s.Nodes, s.Speakers)
				p.Update()
				b.StartTimer()
			}
			if moved == 0 {
				b.Fatal("n9 owned nothing")
			}
			b.ReportMetric(float64(moved), "moved")
		})
	}
}

func TestPlannerHearsOfEndpointsOfIPv6Alone(t *testing.T) {
	t.Parallel()
	s := newStory(t)
	p := plan.NewPlanner("n3")
	p.Set(s.Config, s.Nodes, s.Speakers)
	for _, on := range []string{"n3", "n1", "n3"} {
		web := s.Services[0] // has IPv4 endpoints on n1 and n2
		web.Local, web.IPv6 = true, &plan.Endpoints{Serving: true, Backends: backends(on)}
		p.Put(web)
		require.True(t, p.Stale())
		p.Update()
		_, owned := p.Plan().Layer2[vip6]
		require.Equal(t, on == "n3", owned, on)
		require.Contains(t, p.Plan().Silent, vip)
		p.Put(web)
		require.False(t, p.Stale())
	}
}
