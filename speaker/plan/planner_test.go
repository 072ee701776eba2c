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
			now.Services = slices.Collect(maps.Values(services))

			replay := verdicts(p.Plan())
			changes := p.Update()
			require.Equal(t, plan.Make("n0", now), p.Plan())
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
		s.Nodes[name], s.Speakers[name] = plan.Node{}, true
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
