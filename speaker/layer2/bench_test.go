package layer2

import (
	"net"
	"net/netip"
	"slices"
	"syscall"
	"testing"
	"time"

	"github.com/mdlayher/packet"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/lodestone-lb/lodestone/pkg/testnet"
	"github.com/lodestone-lb/lodestone/speaker/layer2/segment"
	"github.com/lodestone-lb/lodestone/speaker/layer2/wire"
	"github.com/lodestone-lb/lodestone/speaker/plan"
)

// asker asks by ARP from a host of its own, as clients' kernels do.
type asker struct {
	b    *testing.B
	conn net.PacketConn
	mac  mac
	ip   netip.Addr
	buf  []byte
}

// newAsker returns an asker beside a node that owns 5,000 VIPs, vipA among
// them, and whose kernel has the address 198.18.0.1. Without announced, no
// speaker runs there.
func newAsker(b *testing.B, announced bool) *asker {
	b.Helper()
	s := testnet.NewSegment(b, 2)
	if announced {
		want := everywhere(vipA)
		for vip := netip.MustParseAddr("198.19.0.0"); len(want) < 5000; vip = vip.Next() {
			want[vip] = plan.Layer2{}
		}
		n := startNode(b, s.Hosts[0], nil)
		n.set(want)
		time.Sleep(segment.Schedule[len(segment.Schedule)-1] + time.Second) // all is announced
	}
	return &asker{
		b: b, conn: listenOn(b, s.Hosts[1], unix.ETH_P_ARP, nil), mac: macOf(b, s.Hosts[1], "eth0"),
		ip: netip.MustParseAddr("198.18.0.2"), buf: make([]byte, 128),
	}
}

func (a *asker) ask(target netip.Addr) {
	f := arpFrame(1, broadcast, a.mac, a.ip, mac{}, target)
	_, err := a.conn.WriteTo(f, &packet.Addr{HardwareAddr: broadcast[:]})
	require.NoError(a.b, err)
}

// hear waits for the next answer for the target and reports whether it came.
func (a *asker) hear(target netip.Addr) bool {
	require.NoError(a.b, a.conn.SetReadDeadline(time.Now().Add(time.Second)))
	for {
		n, _, err := a.conn.ReadFrom(a.buf)
		if err != nil {
			return false
		}
		if m, ok := (wire.ARP{}).Parse(a.buf[:n]); ok && m.Claims == target && m.To == a.mac {
			return true
		}
	}
}

// quantile is the smallest value that at least the share q does not exceed.
func quantile(all []time.Duration, q float64) time.Duration {
	slices.Sort(all)
	return all[min(int(q*float64(len(all))), len(all)-1)]
}

// BenchmarkARPLatency asks for a VIP and for an address of the same host's
// kernel, by turns.
func BenchmarkARPLatency(b *testing.B) {
	a := newAsker(b, true)
	var ours, kernels []time.Duration
	for b.Loop() {
		for target, took := range map[netip.Addr]*[]time.Duration{vipA: &ours, netip.MustParseAddr("198.18.0.1"): &kernels} {
			start := time.Now()
			a.ask(target)
			require.True(b, a.hear(target), "no answer for %s", target)
			*took = append(*took, time.Since(start))
		}
	}
	us := func(d time.Duration) float64 { return float64(d) / float64(time.Microsecond) }
	b.ReportMetric(us(quantile(ours, 0.5)), "p50-us")
	b.ReportMetric(us(quantile(ours, 0.99)), "p99-us")
	b.ReportMetric(us(quantile(kernels, 0.5)), "kernel-p50-us")
	b.ReportMetric(us(quantile(kernels, 0.99)), "kernel-p99-us")
}

// BenchmarkARPRate asks as fast as answers come, with up to 64 questions on
// their way.
func BenchmarkARPRate(b *testing.B) {
	for name, target := range map[string]netip.Addr{"ours": vipA, "kernel": netip.MustParseAddr("198.18.0.1")} {
		b.Run(name, func(b *testing.B) {
			a := newAsker(b, true)
			ahead := make(chan struct{}, 64)
			asked := make(chan struct{})
			b.ResetTimer()
			go func() {
				defer close(asked)
				for range b.N {
					ahead <- struct{}{}
					a.ask(target)
				}
			}()
			for range b.N {
				require.True(b, a.hear(target), "an answer was lost")
				<-ahead
			}
			<-asked
			b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "answers/s")
		})
	}
}

// BenchmarkARPOfOthers sends 10,000 requests a second for addresses that the speaker
// does not own, for one second per operation. It reports the CPU time of the speaker:
// that of the process, less that of the requests alone.
func BenchmarkARPOfOthers(b *testing.B) {
	const perSecond = 10_000
	cost := map[bool]float64{} // percent of a CPU
	for _, announced := range []bool{false, true} {
		a := newAsker(b, announced)
		before, start := cpuTime(), time.Now()
		for sent := 0; sent < b.N*perSecond; {
			for due := int(time.Since(start).Seconds() * perSecond); sent < min(due, b.N*perSecond); sent++ {
				a.ask(netip.AddrFrom4([4]byte{198, 18, 1, byte(sent)}))
			}
			time.Sleep(time.Millisecond)
		}
		cost[announced] = 100 * float64(cpuTime()-before) / float64(time.Since(start))
	}
	b.ReportMetric(cost[true]-cost[false], "cpu-percent")
}

// cpuTime returns the CPU time of this process.
func cpuTime() time.Duration {
	var r syscall.Rusage
	_ = syscall.Getrusage(syscall.RUSAGE_SELF, &r)
	return time.Duration(r.Utime.Nano() + r.Stime.Nano())
}
