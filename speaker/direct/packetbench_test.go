package direct

import (
	"fmt"
	"log/slog"
	"math"
	"math/rand/v2"
	"net/netip"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/lodestone-lb/lodestone/pkg/testnet"
	"github.com/lodestone-lb/lodestone/speaker/plan"
)

// BenchmarkPacket measures the kernel's time for a packet of a connection: to receive it and drop it at
// once, to hand it to another node at the interface or after conntrack, and to send it to a pod of this
// node as kube-proxy does. The packets are sent one by one, and end where the node would give them to a
// driver, so that the work of the segment and of the next host is not measured.
func BenchmarkPacket(b *testing.B) {
	stranger := forged{netip.MustParseAddrPort("198.18.0.2:12345"), ack, 1, 1, 0}
	for _, c := range []struct {
		name, ends string // the hook of n1 where the packets end
		meet       func(w *world) forged
	}{
		{"drop", "ingress device eth0", func(*world) forged { return stranger }},
		{"direct", "egress device eth0", func(w *world) forged {
			w.start("n1", "n2")
			w.want(plan.Backend{Node: "n2", Open: 1})
			w.shortened("n1")
			return stranger
		}},
		{"after-conntrack", "egress device eth0", func(w *world) forged {
			w.start("n1", "n2")
			w.want(plan.Backend{Node: "n2", Open: 1})
			w.nodes["n1"].stop()
			for _, f := range shortcuts {
				w.nodes["n1"].Run("nft", fmt.Sprintf("add table %[1]s; delete table %[1]s", f.name()))
			}
			return stranger
		}},
		{"kube-proxy", "egress device pod0", func(w *world) forged {
			c := w.open(1)[0]
			next, expected := c.numbers(w.t)
			return forged{c.source(), ack, next, expected, 0}
		}},
	} {
		b.Run(c.name, func(b *testing.B) {
			w := newWorld(b, 2)
			w.own("n1")
			packet := c.meet(w).packet(vip4)
			w.nodes["n1"].Run("nft", fmt.Sprintf(`table netdev end {
				counter ended {}
				chain end { type filter hook %s priority 0; ip daddr { 198.18.0.200, 10.0.0.2 } counter name ended drop; }
			}`, c.ends))
			if err := w.client.Do(func() error {
				fd, err := unix.Socket(unix.AF_INET, unix.SOCK_RAW, unix.IPPROTO_RAW)
				if err != nil {
					return err
				}
				defer unix.Close(fd) //nolint:errcheck // nothing is lost with it
				for b.Loop() {
					if err := unix.Sendto(fd, packet, 0, &unix.SockaddrInet4{Addr: vip4.As4()}); err != nil {
						return err
					}
				}
				return nil
			}); err != nil {
				b.Fatal(err)
			}
			if ended := fields(b, w.nodes["n1"].Run("nft", "list", "counter", "netdev", "end", "ended"), "packets")[0]; ended < float64(b.N) {
				b.Fatalf("%.0f of %d packets came to the end of the way", ended, b.N)
			}
		})
	}
}

// fields returns the numbers that follow a word in the output of nft.
func fields(t testing.TB, printed, word string) (numbers []float64) {
	words := strings.Fields(printed)
	for i, w := range words {
		if w == word {
			number, err := strconv.ParseFloat(words[i+1], 64)
			require.NoError(t, err)
			numbers = append(numbers, number)
		}
	}
	return numbers
}

// BenchmarkSpread measures how evenly the kernel spreads new connections over ten nodes: the largest
// deviation from a tenth.
func BenchmarkSpread(b *testing.B) {
	const count, flows = 10, 100_000
	for b.Loop() {
		segment, owner, client := testnet.NewSegment(b, 0), testnet.NewHost(b, "owner"), testnet.NewHost(b, "client")
		segment.Plug(owner, "eth0")
		segment.Plug(client, "eth0")
		owner.Address("eth0", "198.18.0.1/16")
		client.Address("eth0", "198.18.0.2/16")
		client.Run("ip", "neigh", "add", vip4.String(), "lladdr", "02:00:00:00:00:01", "dev", "eth0")
		owner.Run("ip", "link", "set", "eth0", "address", "02:00:00:00:00:01")
		owner.Run("nft", `table netdev spread {
			set seen { type ether_addr; flags dynamic; counter; }
			chain out { type filter hook egress device eth0 priority 0;
				ip daddr 198.18.0.200 update @seen { ether daddr }
			}
		}`)
		all := backends(nodes(count), 1)
		want := plan.Forwarding{Nodes: map[string][]netip.Addr{},
			Services: map[plan.LimitKey]plan.Direct{{VIP: vip4, Service: "web"}: {Ports: web, Seed: rand.Uint32(), Backends: all}}}
		for i, node := range all[1:] {
			addr := netip.AddrFrom4([4]byte{198, 18, 1, byte(i)})
			want.Nodes[node.Node] = []netip.Addr{addr}
			owner.Run("ip", "neigh", "add", addr.String(), "lladdr", fmt.Sprintf("02:00:00:00:01:%02x", i), "dev", "eth0", "nud", "permanent")
		}
		if err := owner.Do(func() error {
			d := New(Options{Log: slog.New(slog.DiscardHandler), Node: all[0].Node, Gateways: func() []netip.Addr { return nil }})
			d.take(want)
			return d.err
		}); err != nil {
			b.Fatal(err)
		}
		if err := client.Do(func() error {
			fd, err := unix.Socket(unix.AF_INET, unix.SOCK_RAW, unix.IPPROTO_RAW)
			if err != nil {
				return err
			}
			defer unix.Close(fd) //nolint:errcheck // nothing is lost with it
			for range flows {
				from := netip.AddrPortFrom(netip.AddrFrom4([4]byte{198, 19, byte(rand.Uint32()), byte(rand.Uint32())}), uint16(1024+rand.IntN(60000)))
				if err := unix.Sendto(fd, forged{from, syn, 1, 0, 0}.packet(vip4), 0, &unix.SockaddrInet4{Addr: vip4.As4()}); err != nil {
					return err
				}
			}
			return nil
		}); err != nil {
			b.Fatal(err)
		}
		time.Sleep(100 * time.Millisecond)
		handed, worst := 0.0, 0.0
		deviates := func(packets float64) { worst = max(worst, math.Abs(packets/(flows/count)-1)*100) }
		for _, packets := range fields(b, owner.Run("nft", "list", "set", "netdev", "spread", "seen"), "packets") {
			handed += packets
			deviates(packets)
		}
		deviates(flows - handed) // those that stay
		b.ReportMetric(worst, "max-deviation-%")
	}
}
