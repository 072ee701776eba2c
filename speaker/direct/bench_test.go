package direct

import (
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/lodestone-lb/lodestone/pkg/testnet"
	"github.com/lodestone-lb/lodestone/speaker/plan"
)

func BenchmarkTable(b *testing.B) {
	for _, n := range []int{3, 10, 100} {
		b.Run(fmt.Sprint("nodes=", n), func(b *testing.B) {
			all := backends(nodes(n), 1)
			for b.Loop() {
				newTable(all)
			}
		})
	}
}

// BenchmarkChange is what the kernel and the Director need from the plan to rules in force
// with 1,000 VIPs of policy Cluster: for the first time, when a node drains and returns, when
// one Service comes and goes, and to see that all is as it was.
func BenchmarkChange(b *testing.B) {
	for _, n := range []int{10, 100} {
		for _, change := range []string{"first", "node", "service", "verify"} {
			b.Run(fmt.Sprintf("nodes=%d/%s", n, change), func(b *testing.B) {
				host := testnet.NewHost(b, "node")
				s := testnet.NewSegment(b, 0)
				s.Plug(host, "eth0")
				address(host, "eth0", "198.18.0.1/16")
				all := backends(nodes(n), 1)
				want := plan.Forwarding{Services: map[plan.LimitKey]plan.Direct{}, Nodes: map[string][]netip.Addr{}}
				for i, node := range all {
					addr := netip.AddrFrom4([4]byte{198, 18, 1, byte(i)})
					want.Nodes[node.Node] = []netip.Addr{addr}
					host.Run("ip", "neigh", "add", addr.String(), "lladdr", fmt.Sprintf("02:00:00:00:01:%02x", i), "dev", "eth0", "nud", "permanent")
				}
				require.NoError(b, host.Do(func() error {
					d := New(Options{Log: slog.New(slog.DiscardHandler), Node: all[0].Node, Gateways: func() []netip.Addr { return nil }})
					for i := range 1000 {
						key := plan.LimitKey{VIP: netip.AddrFrom4([4]byte{203, 0, byte(i >> 8), byte(i)}), Service: fmt.Sprint(i)}
						want.Services[key] = plan.Direct{Ports: web, Seed: uint32(i), Backends: all}
					}
					if d.take(want); d.err != nil {
						return d.err
					}
					for i := 0; b.Loop(); i++ {
						switch change {
						case "first":
							d.have, d.keys, d.stale, d.tables = [2]*ruleset{}, [2]map[int]string{}, true, map[string]table{}
							d.reconcile()
							continue
						case "verify":
							d.verify(true)
							continue
						case "service":
							now := want
							now.Services = maps.Clone(want.Services)
							if i%2 == 0 {
								delete(now.Services, plan.LimitKey{VIP: netip.MustParseAddr("203.0.0.0"), Service: "0"})
							}
							d.take(now)
							continue
						}
						now := append([]plan.Backend(nil), all...)
						if i%2 == 0 {
							now[n-1] = plan.Backend{Node: now[n-1].Node, Draining: 1}
						}
						for key, s := range want.Services {
							s.Backends = now
							want.Services[key] = s
						}
						d.take(want)
					}
					return d.err
				}))
			})
		}
	}
}
