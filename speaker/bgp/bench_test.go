package bgp

import (
	"net"
	"net/netip"
	"os"
	"regexp"
	"strconv"
	"testing"
	"time"

	packet "github.com/osrg/gobgp/v3/pkg/packet/bgp"
	"github.com/stretchr/testify/require"

	"github.com/lodestone-lb/lodestone/pkg/config"
	"github.com/lodestone-lb/lodestone/pkg/testcost"
	"github.com/lodestone-lb/lodestone/pkg/testnet/router"
	"github.com/lodestone-lb/lodestone/speaker/plan"
)

// resident returns the resident memory of this process, in MB.
func resident(b *testing.B) float64 {
	status, err := os.ReadFile("/proc/self/status")
	require.NoError(b, err)
	m := regexp.MustCompile(`VmRSS:\s+(\d+) kB`).FindSubmatch(status)
	require.NotNil(b, m)
	kb, err := strconv.Atoi(string(m[1]))
	require.NoError(b, err)
	return float64(kb) / 1024
}

// BenchmarkAnnounce measures how long 10,000 prefixes take from Set to the
// tables of two FRRs (all), from a change that takes a new session to the table
// of its router (session), one more prefix (one), and Set when nothing has
// changed (none); and the process's resident memory when the first ones are out.
func BenchmarkAnnounce(b *testing.B) {
	const prefixes = 10_000
	w := newWorld(b, 2)
	routers := []*router.FRR{w.frr(w.segment.Hosts[1], "198.18.0.1", ""), w.frr(w.segment.Hosts[2], "198.18.0.1", "bgp router-id 198.18.0.3")}
	w.peer("a", nil)
	w.peer("b", func(p *config.Peer) { p.Address = other4 })
	w.start()
	w.up("a")
	w.up("b")
	known := func(n int) func() bool {
		return func() bool {
			for _, f := range routers {
				var summary struct {
					Peers map[string]struct{ PfxRcd int }
				}
				f.Show("show bgp ipv4 unicast summary json", &summary)
				if summary.Peers["198.18.0.1"].PfxRcd != n {
					return false
				}
			}
			return true
		}
	}
	attributes := plan.Attributes{Communities: []config.Community{64512<<16 | 1}}
	routes := map[netip.Prefix]plan.Route{}
	for i := range prefixes {
		routes[netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 0, byte(i >> 8), byte(i)}), 32)] = plan.Route{"a": attributes, "b": attributes}
	}
	wait := func(n int) { w.until("routes", known(n), func() any { return w.announcer.Peers() }) }
	var all, fresh, one, same time.Duration
	memory := 0.0
	for b.Loop() {
		w.want.Routes = routes
		begin := time.Now()
		w.set()
		wait(prefixes)
		all += time.Since(begin)
		if memory == 0 {
			memory = resident(b)
		}

		begin = time.Now()
		w.set()
		same += time.Since(begin)

		updates := neighbor(routers[0], "198.18.0.1").MessageStats.UpdatesRecv
		begin = time.Now()
		routes[vip4] = plan.Route{"a": attributes, "b": attributes}
		w.set()
		wait(prefixes + 1)
		one += time.Since(begin)
		require.Equal(b, updates+1, neighbor(routers[0], "198.18.0.1").MessageStats.UpdatesRecv)

		holdTime := 120*time.Second - w.status("a").HoldTime // 30 s and 90 s in turns
		w.peer("a", func(p *config.Peer) { p.HoldTime = holdTime })
		begin = time.Now()
		w.set()
		w.until("a new session", func() bool { return w.status("a").HoldTime == holdTime }, func() any { return w.status("a") })
		wait(prefixes + 1)
		fresh += time.Since(begin)
		delete(routes, vip4)
		w.want.Routes = nil
		w.set()
		wait(0)
	}
	ms := func(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 / float64(b.N) }
	b.ReportMetric(memory, "MB")
	b.ReportMetric(ms(all), "ms/all")
	b.ReportMetric(ms(fresh), "ms/session")
	b.ReportMetric(ms(one), "ms/one")
	b.ReportMetric(ms(same), "ms/none")
}

// BenchmarkSend measures the same without a router's work: from Set until 10,000
// prefixes (all), and one more (one), have arrived at two peers that only count;
// and the memory for them, what Set is given included.
func BenchmarkSend(b *testing.B) {
	const prefixes = 10_000
	w := newWorld(b, 2)
	arrived := make(chan int, 1000)
	for _, host := range w.segment.Hosts[1:] {
		address := tor4
		if host != w.tor {
			address = other4
		}
		fake(b, host, address, func(conn net.Conn) {
			conn.Write(opened(b, 90, packet.NewCapFourOctetASNumber(peerASN)))
			conn.Write(keepalive)
			for {
				m, err := readMessage(conn)
				if err != nil {
					return
				}
				if m.kind != packet.BGP_MSG_UPDATE {
					continue
				}
				if n, err := countPrefixes(m.body); err != nil || n > 0 { // a withdrawal has none
					arrived <- n
				}
			}
		})
	}
	w.peer("a", nil)
	w.peer("b", func(p *config.Peer) { p.Address = other4 })
	w.start()
	w.up("a")
	w.up("b")
	attributes := plan.Attributes{Communities: []config.Community{64512<<16 | 1}}
	wait := func(n int) (updates int) {
		for n > 0 {
			n -= <-arrived
			updates++
		}
		return updates
	}
	before := testcost.Live()
	var all, one time.Duration
	for b.Loop() {
		w.want.Routes = map[netip.Prefix]plan.Route{}
		w.set()
		w.until("withdrawal", func() bool { return w.status("a").Advertised+w.status("b").Advertised == 0 },
			func() any { return w.announcer.Peers() })
		for i := range prefixes {
			w.want.Routes[netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 0, byte(i >> 8), byte(i)}), 32)] = plan.Route{"a": attributes,
				"b": attributes}
		}
		begin := time.Now()
		w.set()
		wait(2 * prefixes)
		all += time.Since(begin)

		w.want.Routes[vip4] = plan.Route{"a": attributes, "b": attributes}
		begin = time.Now()
		w.set()
		require.Equal(b, 2, wait(2))
		one += time.Since(begin)
	}
	b.ReportMetric(float64(testcost.Live()-before)/(1<<20), "MB")
	b.ReportMetric(float64(all.Microseconds())/1000/float64(b.N), "ms/all")
	b.ReportMetric(float64(one.Microseconds())/1000/float64(b.N), "ms/one")
}

// BenchmarkOneMore measures what one more VIP among 10,000 costs the announcer with
// two peers before anything is sent: when it has to find the change (Set), and when
// the caller names it (Update).
func BenchmarkOneMore(b *testing.B) {
	const prefixes = 10_000
	attributes := plan.Attributes{Communities: []config.Community{64512<<16 | 1}}
	route := plan.Route{"a": attributes, "b": attributes}
	for name, setTarget := range map[string]func(*Announcer, plan.BGP) error{
		"Set":    func(a *Announcer, want plan.BGP) error { return a.Set(b.Context(), want) },
		"Update": func(a *Announcer, want plan.BGP) error { return a.Update(b.Context(), want, []netip.Prefix{vip4}) },
	} {
		b.Run(name, func(b *testing.B) {
			w := newWorld(b, 1)
			w.peer("a", nil)
			w.peer("b", func(p *config.Peer) { p.Address = other4 })
			for i := range prefixes {
				w.want.Routes[netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 0, byte(i >> 8), byte(i)}), 32)] = route
			}
			w.start()
			for i := 0; b.Loop(); i++ {
				if i%2 == 0 {
					w.want.Routes[vip4] = route
				} else {
					delete(w.want.Routes, vip4)
				}
				require.NoError(b, setTarget(w.announcer, w.want))
			}
		})
	}
}
