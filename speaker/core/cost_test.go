package core

import (
	"fmt"
	"net/netip"
	"testing"
	"time"

	"go4.org/netipx"

	"github.com/lodestone-lb/lodestone/pkg/config"
	"github.com/lodestone-lb/lodestone/pkg/testcost"
	"github.com/lodestone-lb/lodestone/speaker/plan"
)

// crowd is a core that knows so many Services on 100 nodes.
type crowd struct {
	*Core
	services int
}

func newCrowd(services int) crowd {
	c, nodes, speakers := crowd{New(Options{"node-7", handOver, drain}), services}, Nodes{}, map[string]bool{}
	for i := range 100 {
		name := fmt.Sprint("node-", i)
		nodes[name], speakers[name] = plan.Node{}, true
	}
	for i := range services {
		c.set(i, true)
	}
	for _, e := range []Event{well, nodes, Members{speakers, nil}, Config{&config.Config{
		Pools:          []config.Pool{{Name: "lan", Free: prefix("10.0.0.0/16"), Withheld: &netipx.IPSet{}}},
		Advertisements: []config.Advertisement{{Name: "all", Layer2: &config.Layer2{}}},
	}}, Decide{}} {
		c.Step(e, time.Unix(1e9, 0))
	}
	return c
}

// set sets whether a Service has endpoints.
func (c crowd) set(i int, serving bool) {
	c.Step(Service{plan.Service{Name: fmt.Sprint("default/web-", i), Serving: serving,
		VIPs: []netip.Addr{netip.AddrFrom4([4]byte{10, 0, byte(i >> 8), byte(i)})}}}, time.Unix(1e9, 0))
}

// change changes a Service, another one each time, and has the core decide.
func (c crowd) change(i int) {
	c.set(i/2%c.services, i%2 == 1)
	c.Step(Decide{}, time.Unix(1e9, 0))
}

// A change costs the same however many Services there are.
func TestCostOfOneChange(t *testing.T) {
	testcost.Grows(t, "changes", newCrowd(100), newCrowd(10_000), func(c crowd) {
		for i := range 2000 {
			c.change(i)
		}
	})
}

// BenchmarkOneChange is one Service that changes, and the decision. "nothing" is a decision without a change.
func BenchmarkOneChange(b *testing.B) {
	for _, services := range []int{100, 10_000} {
		c := newCrowd(services)
		b.Run(fmt.Sprintf("%d Services/one", services), func(b *testing.B) {
			b.ReportAllocs()
			for i := 0; b.Loop(); i++ {
				c.change(i)
			}
		})
		b.Run(fmt.Sprintf("%d Services/nothing", services), func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				c.Step(Decide{}, time.Unix(1e9, 0))
			}
		})
	}
}
