package core

import (
	"fmt"
	"net/netip"
	"testing"
	"time"

	"go4.org/netipx"

	"github.com/lodestone-lb/lodestone/pkg/config"
	"github.com/lodestone-lb/lodestone/speaker/plan"
)

// BenchmarkOneChange is one Service that changes, and the decision: it costs the same
// however many Services there are. "nothing" is a decision without a change.
func BenchmarkOneChange(b *testing.B) {
	for _, services := range []int{100, 10_000} {
		c, now, nodes, speakers := New(Options{"node-7", handOver, drain}), time.Unix(1e9, 0), Nodes{}, map[string]bool{}
		for i := range 100 {
			name := fmt.Sprint("node-", i)
			nodes[name], speakers[name] = plan.Node{}, true
		}
		service := func(i int, serving bool) Service {
			return Service{plan.Service{Name: fmt.Sprint("default/web-", i), Serving: serving,
				VIPs: []netip.Addr{netip.AddrFrom4([4]byte{10, 0, byte(i >> 8), byte(i)})}}}
		}
		for i := range services {
			c.Step(service(i, true), now)
		}
		for _, e := range []Event{well, nodes, Members{speakers, nil}, Config{&config.Config{
			Pools:          []config.Pool{{Name: "lan", Free: prefix("10.0.0.0/16"), Withheld: &netipx.IPSet{}}},
			Advertisements: []config.Advertisement{{Name: "all", Layer2: &config.Layer2{}}},
		}}, Decide{}} {
			c.Step(e, now)
		}
		b.Run(fmt.Sprintf("%d Services/one", services), func(b *testing.B) {
			b.ReportAllocs()
			for i := 0; b.Loop(); i++ {
				c.Step(service(i/2%services, i%2 == 1), now)
				c.Step(Decide{}, now)
			}
		})
		b.Run(fmt.Sprintf("%d Services/nothing", services), func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				c.Step(Decide{}, now)
			}
		})
	}
}
