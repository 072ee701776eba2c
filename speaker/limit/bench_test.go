package limit

import (
	"fmt"
	"log/slog"
	"net/netip"
	"testing"
	"time"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/lodestone-lb/lodestone/pkg/testnet"
	"github.com/lodestone-lb/lodestone/speaker/nft"
	"github.com/lodestone-lb/lodestone/speaker/plan"
)

// BenchmarkDroppedPacket is what a packet above the limit costs from the
// sender's socket to the drop, among some limited VIPs: with our map to their
// chains, and as it would be with a rule for each. Baseline is the way
// without any limit, ending in a drop at the same place.
func BenchmarkDroppedPacket(b *testing.B) {
	flooded := at(vip4, "dns")
	b.Run("baseline", func(b *testing.B) {
		w := newFlooded(b)
		w.onNode(func(conn nft.Conn) error {
			conn.AddTable(table)
			name := chainName(flooded)
			conn.AddObj(counter(name))
			conn.AddRule(&nftables.Rule{Table: table, Chain: conn.AddChain(base), Exprs: []expr.Any{
				&expr.Ct{Register: unix.NFT_REG_1, Key: expr.CtKeySTATE},
				&expr.Objref{Type: unix.NFT_OBJECT_COUNTER, Name: name}, &expr.Verdict{Kind: expr.VerdictDrop},
			}})
			return conn.Flush()
		})
		w.flood(b, flooded)
	})
	for _, n := range []int{1, 100, 1000} {
		want := limits{flooded: {PerSecond: 1, Ports: dns}}
		for i := range n - 1 {
			want[at(netip.AddrFrom4([4]byte{203, 0, byte(i >> 8), byte(i)}), "dns")] = plan.Limit{PerSecond: 1, Ports: dns}
		}
		b.Run(fmt.Sprint("map/", n), func(b *testing.B) {
			w := newFlooded(b)
			w.apply(want)
			w.flood(b, flooded)
		})
		b.Run(fmt.Sprint("rules/", n), func(b *testing.B) {
			w := newFlooded(b)
			w.onNode(func(conn nft.Conn) error { return writeRules(conn.Conn, want) })
			w.flood(b, flooded)
		})
	}
}

// BenchmarkChange is what it takes to bring one changed limit into force, among some.
func BenchmarkChange(b *testing.B) {
	for _, n := range []int{1, 100} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			host := testnet.NewHost(b, "node")
			l := New(Options{Log: slog.New(slog.DiscardHandler), Registry: prometheus.NewRegistry()})
			require.NoError(b, host.Do(func() error {
				for i := uint32(1); b.Loop(); i++ {
					l.want = limits{}
					for k := range n {
						l.want[at(netip.AddrFrom4([4]byte{203, 0, 113, byte(k)}), "dns")] = plan.Limit{PerSecond: 1, Ports: dns}
					}
					l.want[at(vip4, "dns")] = plan.Limit{PerSecond: 1 + i, Ports: dns}
					l.reconcile()
					if l.err != nil {
						return l.err
					}
				}
				return nil
			}))
		})
	}
}

// writeRules is the straightforward form of the table: one rule per limit in
// the base chain. The flooded VIP is the last of them.
func writeRules(conn *nftables.Conn, want limits) error {
	conn.AddTable(table)
	conn.AddChain(base)
	match := families[0].first()
	for _, key := range keys(want) {
		port := &expr.Payload{DestRegister: unix.NFT_REG_2, Base: expr.PayloadBaseTransportHeader, Offset: 2, Len: 2}
		exprs := append(match[:len(match):len(match)],
			families[0].address, &expr.Cmp{Register: unix.NFT_REG_1, Data: key.VIP.AsSlice()},
			&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: unix.NFT_REG_1}, &expr.Cmp{Register: unix.NFT_REG_1, Data: []byte{unix.IPPROTO_UDP}},
			port, &expr.Cmp{Register: unix.NFT_REG_2, Data: []byte{0, 53}})
		conn.AddObj(counter(chainName(key)))
		conn.AddRule(&nftables.Rule{Table: table, Chain: base, Exprs: append(exprs, limitTo(want[key].PerSecond, chainName(key))...)})
	}
	return conn.Flush()
}

// newFlooded is a world in which no flow is ever let through.
func newFlooded(b *testing.B) *world {
	w := newWorld(b)
	w.client.Run("ping", "-c1", "-W5", pod4.String()) // who is where takes time once
	w.onNode(func(conn nft.Conn) error {
		drop := nftables.ChainPolicyDrop
		end := conn.AddTable(&nftables.Table{Name: "end", Family: table.Family})
		conn.AddChain(&nftables.Chain{
			Name: "forward", Table: end, Type: nftables.ChainTypeFilter, Policy: &drop,
			Hooknum: nftables.ChainHookForward, Priority: nftables.ChainPriorityFilter,
		})
		return conn.Flush()
	})
	return w
}

// inFlight packets are sent, then waited for: fewer than the kernel queues
// for a busy processor (net.core.netdev_max_backlog).
const inFlight = 500

// flood sends packets of one flow, each of which is its first one again, for
// the one before was dropped, and waits until the kernel has counted them.
func (w *world) flood(b *testing.B, key plan.LimitKey) {
	var conn *nftables.Conn
	require.NoError(b, w.node.Do(func() (err error) {
		conn, err = nftables.New(nftables.AsLasting())
		return err
	}))
	defer conn.CloseLasting() //nolint:errcheck // nothing is lost with it
	require.NoError(b, w.client.Do(func() error {
		fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return err
		}
		defer unix.Close(fd) //nolint:errcheck // nothing is lost with it
		to, payload := sockaddr(vip4, 53), []byte("question")
		sent, begin := 0, time.Now()
		for ; b.Loop(); sent++ {
			for sent%inFlight == 0 {
				object, err := conn.GetObject(counter(chainName(key)))
				if err != nil {
					return err
				}
				tokens := 2 + int(time.Since(begin).Seconds())
				if int(object.(*nftables.NamedObj).Obj.(*expr.Counter).Packets)+tokens >= sent {
					break
				}
			}
			if err := unix.Sendto(fd, payload, 0, to); err != nil {
				return err
			}
		}
		return nil
	}))
}
