package limit

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"net/netip"
	"os"
	"strings"
	"sync"
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

const timeout = 20 * time.Second

var (
	vip4   = netip.MustParseAddr("203.0.113.1")
	vip6   = netip.MustParseAddr("2001:db8:203::1")
	other4 = netip.MustParseAddr("203.0.113.2")
	other6 = netip.MustParseAddr("2001:db8:203::2")
	pod4   = netip.MustParseAddr("10.0.0.2")
	pod6   = netip.MustParseAddr("fd00::2")

	http = plan.Port{Protocol: unix.IPPROTO_TCP, Number: 80}
	web  = []plan.Port{http, {Protocol: unix.IPPROTO_TCP, Number: 443}}
	dns  = []plan.Port{{Protocol: unix.IPPROTO_UDP, Number: 53}}
)

// limits is a set to be limited at a VIP.
type limits = map[plan.LimitKey]plan.Limit

func at(vip netip.Addr, service string) plan.LimitKey {
	return plan.LimitKey{VIP: vip, Service: "default/" + service}
}

// world is a client, a node and a pod behind the node. The node sends what
// comes for any address in the VIPs' networks to the pod, by DNAT as
// kube-proxy does, the ports as they are.
type world struct {
	t                 testing.TB
	client, node, pod *testnet.Host
	registry          *prometheus.Registry
	limiter           *Limiter
	log               *testnet.Log
	stop              func()
}

func newWorld(t testing.TB) *world {
	t.Helper()
	w := &world{t: t, client: testnet.NewHost(t, "client"), node: testnet.NewHost(t, "node"), pod: testnet.NewHost(t, "pod")}
	testnet.Connect(w.client, "eth0", w.node, "eth0")
	testnet.Connect(w.pod, "eth0", w.node, "pod0")
	for _, a := range []struct {
		host        *testnet.Host
		addr, iface string
	}{
		{w.client, "198.18.0.1/24", "eth0"}, {w.client, "2001:db8::1/64", "eth0"},
		{w.node, "198.18.0.2/24", "eth0"}, {w.node, "2001:db8::2/64", "eth0"},
		{w.node, "10.0.0.1/24", "pod0"}, {w.node, "fd00::1/64", "pod0"},
		{w.pod, "10.0.0.2/24", "eth0"}, {w.pod, "fd00::2/64", "eth0"},
	} {
		args := []string{"addr", "add", a.addr, "dev", a.iface}
		if strings.Contains(a.addr, ":") {
			args = append(args, "nodad")
		}
		a.host.Run("ip", args...)
	}
	w.client.Run("ip", "route", "add", "default", "via", "198.18.0.2")
	w.client.Run("ip", "route", "add", "default", "via", "2001:db8::2")
	w.pod.Run("ip", "route", "add", "default", "via", "10.0.0.1")
	w.pod.Run("ip", "route", "add", "default", "via", "fd00::1")
	w.node.Run("sysctl", "-qw", "net.ipv4.ip_forward=1", "net.ipv6.conf.all.forwarding=1")
	w.dnat()
	return w
}

// dnat does kube-proxy's work, at its priority.
func (w *world) dnat() {
	w.t.Helper()
	w.onNode(func(conn nft.Conn) error {
		proxy := conn.AddTable(&nftables.Table{Name: "proxy", Family: nftables.TableFamilyINet})
		chain := conn.AddChain(&nftables.Chain{
			Name: "services", Table: proxy, Type: nftables.ChainTypeNAT,
			Hooknum: nftables.ChainHookPrerouting, Priority: nftables.ChainPriorityNATDest,
		})
		for _, f := range []struct {
			family
			network, pod netip.Addr
			prefix       uint32 // bytes
		}{{families[0], vip4, pod4, 3}, {families[1], vip6, pod6, 6}} {
			network := *f.address
			network.Len = f.prefix
			conn.AddRule(&nftables.Rule{Table: proxy, Chain: chain, Exprs: []expr.Any{
				&expr.Meta{Key: expr.MetaKeyNFPROTO, Register: unix.NFT_REG_1},
				&expr.Cmp{Register: unix.NFT_REG_1, Op: expr.CmpOpEq, Data: []byte{f.protocol}},
				&network,
				&expr.Cmp{Register: unix.NFT_REG_1, Op: expr.CmpOpEq, Data: f.network.AsSlice()[:f.prefix]},
				&expr.Immediate{Register: unix.NFT_REG_1, Data: f.pod.AsSlice()},
				&expr.NAT{Type: expr.NATTypeDestNAT, Family: uint32(f.protocol), RegAddrMin: unix.NFT_REG_1},
			}})
		}
		return conn.Flush()
	})
}

// onNode calls f with a connection to the node's nftables.
func (w *world) onNode(f func(conn nft.Conn) error) {
	w.t.Helper()
	require.NoError(w.t, w.node.Do(func() error {
		conn, err := nft.Dial()
		if err != nil {
			return err
		}
		defer conn.CloseLasting() //nolint:errcheck // nothing is lost with it
		return f(conn)
	}))
}

// inside is a registry whose collectors work on a host.
type inside struct {
	*prometheus.Registry
	host *testnet.Host
}

func (r inside) MustRegister(cs ...prometheus.Collector) {
	for _, c := range cs {
		r.Registry.MustRegister(onHost{c, r.host})
	}
}

type onHost struct {
	prometheus.Collector
	host *testnet.Host
}

func (c onHost) Collect(ch chan<- prometheus.Metric) {
	c.host.Do(func() error { c.Collector.Collect(ch); return nil }) //nolint:errcheck // the test misses the metrics
}

// start starts a limiter on the node, which looks often at its rules.
func (w *world) start() {
	w.t.Helper()
	w.log, w.registry = &testnet.Log{}, prometheus.NewPedanticRegistry()
	w.limiter = New(Options{Log: slog.New(slog.NewTextHandler(w.log, nil)), Registry: inside{w.registry, w.node},
		Check: 20 * time.Millisecond})
	w.run(func(ctx context.Context) error { return w.node.Do(func() error { return w.limiter.Run(ctx) }) })
}

func (w *world) run(f func(context.Context) error) {
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- f(ctx) }()
	w.stop = sync.OnceFunc(func() {
		cancel()
		require.NoError(w.t, <-done)
	})
	w.t.Cleanup(w.stop)
}

// set sets limits and waits until they are in force.
func (w *world) set(want limits) {
	w.t.Helper()
	w.limiter.Set(want)
	w.until(func() bool {
		s := w.limiter.published.Load()
		return s.err == nil && maps.EqualFunc(s.want, want, plan.Limit.Equal)
	}, func() any { return w.limiter.Status() })
}

// until waits until it is so, or ends the test with what is so instead.
func (w *world) until(so func() bool, instead func() any) {
	w.t.Helper()
	for deadline := time.Now().Add(timeout); !so(); time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			w.t.Fatalf("it never came to be; there is %+v", instead())
		}
	}
}

// table is our table as nft(8) shows it, with handles and without the time that the guard has left. Empty: there is none.
func (w *world) table() string {
	out, _ := w.node.Command(w.t.Context(), "nft", "-a", "list", "table", "inet", tableName).Output()
	return expiry.ReplaceAllString(string(out), "")
}

// dropped is what the kernel counted.
func (w *world) dropped(key plan.LimitKey) int {
	w.t.Helper()
	var dropped int
	w.onNode(func(conn nft.Conn) error {
		counters, err := readCounters(conn)
		dropped = int(counters[chainName(key)])
		return err
	})
	return dropped
}

// serve lets the pod take TCP connections at a port, of both families.
func (w *world) serve(port uint16) {
	w.t.Helper()
	require.NoError(w.t, w.pod.Do(func() error {
		l, err := net.Listen("tcp", fmt.Sprint(":", port)) // the kernel accepts up to somaxconn by itself
		if err == nil {
			w.t.Cleanup(func() { l.Close() })
		}
		return err
	}))
}

// storm is a number of clients that open TCP connections at once.
type storm struct {
	sockets []int
	began   time.Time
}

// connect starts n connections from a host.
func (w *world) connect(from *testnet.Host, to netip.Addr, port uint16, n int) *storm {
	w.t.Helper()
	s := &storm{began: time.Now()}
	w.t.Cleanup(s.close)
	require.NoError(w.t, from.Do(func() error {
		for range n {
			fd, err := unix.Socket(domain(to), unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
			if err != nil {
				return err
			}
			s.sockets = append(s.sockets, fd)
			if err := unix.Connect(fd, sockaddr(to, port)); err != nil && !errors.Is(err, unix.EINPROGRESS) {
				return err
			}
		}
		return nil
	}))
	return s
}

// connected returns how many connections are open.
func (s *storm) connected() int {
	n := 0
	for _, fd := range s.sockets {
		if _, err := unix.Getpeername(fd); err == nil {
			n++
		}
	}
	return n
}

func (s *storm) close() {
	for _, fd := range s.sockets {
		unix.Close(fd) //nolint:errcheck // nothing is lost with it
	}
	s.sockets = nil
}

func domain(a netip.Addr) int {
	if a.Is4() {
		return unix.AF_INET
	}
	return unix.AF_INET6
}

func sockaddr(a netip.Addr, port uint16) unix.Sockaddr {
	if a.Is4() {
		return &unix.SockaddrInet4{Port: int(port), Addr: a.As4()}
	}
	return &unix.SockaddrInet6{Port: int(port), Addr: a.As16()}
}

// all opens n connections from the client and wants all of them.
func (w *world) all(to netip.Addr, port uint16, n int) {
	w.t.Helper()
	s := w.connect(w.client, to, port, n)
	w.until(func() bool { return s.connected() == n }, func() any { return s.connected() })
	s.close()
}

// capped opens n connections from the client and wants those that the limit
// admits, all others dropped and counted. The bucket is full at first, or
// else has least tokens.
func (w *world) capped(key plan.LimitKey, port uint16, n, rate, least int) {
	w.t.Helper()
	before := w.dropped(key)
	s := w.connect(w.client, key.VIP, port, n)
	w.until(func() bool { return s.connected()+w.dropped(key)-before >= n }, func() any { return s.connected() })
	connected := s.connected()
	most := rate + int(time.Since(s.began).Seconds()*float64(rate)) + 1
	require.GreaterOrEqual(w.t, connected, least, "the limit lets too few pass")
	require.LessOrEqual(w.t, connected, most, "the limit lets too many pass")
	require.Greater(w.t, w.dropped(key), before, "nothing was dropped: %d of %d connected", connected, n)
	s.close()
}

func TestMain(m *testing.M) {
	// Storms need more sockets than the usual soft limit.
	var limit unix.Rlimit
	if unix.Getrlimit(unix.RLIMIT_NOFILE, &limit) == nil {
		limit.Cur = limit.Max
		unix.Setrlimit(unix.RLIMIT_NOFILE, &limit) //nolint:errcheck // a test would fail
	}
	os.Exit(m.Run())
}
