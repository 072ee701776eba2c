package plan_test

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/lodestone-lb/lodestone/pkg/config"
	"github.com/lodestone-lb/lodestone/speaker/plan"
)

// TestPlannerSaysWhatMakeSays lets a Planner live through a random history.
// After each chapter its plan is the one that Make makes from the snapshot
// alone, and what it says has changed is what has changed.
func TestPlannerSaysWhatMakeSays(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		now, p := plan.Snapshot{}, plan.NewPlanner("n0")
		services := map[string]plan.Service{}
		for range rapid.IntRange(1, 10).Draw(t, "chapters") {
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

			replay := verdicts(p.Plan())
			changes := p.Update()
			require.Equal(t, plan.Make("n0", now), withoutHistory(p.Plan()))
			require.False(t, p.Stale())
			for _, c := range changes {
				require.Equal(t, replay[c.VIP], c.Before)
				require.NotEqual(t, c.Before, c.After)
				replay[c.VIP] = c.After
			}
			maps.DeleteFunc(replay, func(_ netip.Addr, v plan.Verdict) bool { return !v.Owned && !v.Silent })
			require.Equal(t, verdicts(p.Plan()), replay)
		}
	})
}

// withoutHistory returns the plan without what Make cannot know.
func withoutHistory(p plan.Plan) plan.Plan {
	p.Layer2 = maps.Clone(p.Layer2)
	for vip, l := range p.Layer2 {
		l.New = false
		p.Layer2[vip] = l
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
		s.Nodes[name], s.Speakers[name] = plan.Node{Segments: []plan.Segment{segment("10.0.0.0/16", "eth0"), segment("2001:db8::/64", "eth0")}}, true
	}
	for i := range 10_000 {
		s.Services = append(s.Services, plan.Service{
			Name: fmt.Sprint("default/", i), VIPs: []netip.Addr{netip.AddrFrom4([4]byte{10, 0, byte(i >> 8), byte(i)})},
			Local: i%2 == 0, Serving: true, ServingNodes: map[string]bool{fmt.Sprint("n", i%nodes): true, fmt.Sprint("n", i%(nodes-1)): true},
		})
	}
	return s
}

func BenchmarkPlan(b *testing.B) {
	for _, nodes := range []int{100, 1000} {
		s := large(nodes)
		b.Run(fmt.Sprintf("10000 VIPs/%d nodes/Make", nodes), func(b *testing.B) {
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
		run := func(name string, wantChange bool, change func(i int)) {
			b.Run(fmt.Sprintf("10000 VIPs/%d nodes/%s", nodes, name), func(b *testing.B) {
				b.ReportAllocs()
				for i := 0; b.Loop(); i++ {
					change(i)
					if changes := p.Update(); len(changes) > 0 != wantChange {
						b.Fatalf("changes: %v", changes)
					}
				}
			})
		}
		lost := maps.Clone(s.Speakers)
		delete(lost, "n9")
		run("speaker lost or back", true, func(i int) { p.Set(s.Config, s.Nodes, []map[string]bool{lost, s.Speakers}[i%2]) })
		service := s.Services[1]
		run("Service comes or goes", true, func(i int) {
			service.VIPs = s.Services[1].VIPs[:i%2]
			p.Put(service)
		})
		local := s.Services[0]
		elsewhere := []map[string]bool{{"n0": true, "n20": true}, {"n0": true, "n21": true}}
		run("endpoint on another node", false, func(i int) {
			local.ServingNodes = elsewhere[i%2]
			p.Put(local)
		})
	}
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

	// Whose home it is does not depend on who is able.
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
