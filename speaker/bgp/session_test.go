package bgp

import (
	"context"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	packet "github.com/osrg/gobgp/v3/pkg/packet/bgp"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"

	"github.com/lodestone-lb/lodestone/pkg/config"
	"github.com/lodestone-lb/lodestone/pkg/testnet"
	"github.com/lodestone-lb/lodestone/speaker/plan"
)

// Pauses between attempts, without their jitter of up to a quarter less.
func TestPauses(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		to := target{Session: plan.Session{Peer: &config.Peer{ConnectRetry: 5 * time.Second}}}
		s := &session{Peering: &Peering{target: to}}
		pauses := func(want time.Duration, lasted time.Duration) {
			t.Helper()
			got := s.pause(lasted)
			require.LessOrEqual(t, got, want)
			require.GreaterOrEqual(t, got, want*3/4)
		}
		t.Log("a router that was up for hours reboots: it is tried soon, and then steadily for as long as it takes")
		pauses(time.Second, 3*time.Hour)
		for range 100 {
			pauses(5*time.Second, 0)
			time.Sleep(5 * time.Second)
		}
		t.Log("while it starts it ends the first sessions: the pause doubles after each; failed attempts between them do not count")
		pauses(10*time.Second, 3*time.Second)
		pauses(5*time.Second, 0)
		pauses(20*time.Second, time.Second)
		pauses(40*time.Second, steady-1)
		t.Log("a router that does nothing else is tried once a minute")
		for range 10 {
			pauses(time.Minute, time.Millisecond)
			time.Sleep(time.Minute)
		}
		t.Log("after a session that lasts, or five minutes without one, the pause is the first one again")
		pauses(time.Second, steady)
		pauses(10*time.Second, time.Second)
		pauses(20*time.Second, time.Second)
		time.Sleep(forgiven + time.Second)
		pauses(10*time.Second, time.Second)
	})
}

// wired is one end of a pipe, with the addresses of a TCP connection.
type wired struct{ net.Conn }

func (wired) LocalAddr() net.Addr { return net.TCPAddrFromAddrPort(netip.AddrPortFrom(node4, 179)) }

// overPipe runs the sending side of a session over a pipe until the test ends. ask has the router ask for all routes of a family,
// updates returns how many messages it has got since the last call.
func overPipe(t *testing.T, log io.Writer, routes map[netip.Prefix]plan.Route) (s *session, ask func(afi byte), updates func() int64) {
	t.Helper()
	ours, theirs := net.Pipe()
	p := newPeering(NewMachine(nil, false), "tor", target{Session: plan.Session{Peer: &config.Peer{}}})
	a := New(Options{Log: slog.New(slog.NewTextHandler(log, nil)), Registry: prometheus.NewRegistry(),
		NextHops: func(netip.Addr) ([]netip.Addr, error) { return []netip.Addr{node6}, nil }})
	s = newSession(a, p)
	for prefix, route := range routes {
		s.rib.set(prefix, route)
	}
	s.rib.start()
	ctx, cancel := context.WithCancel(t.Context())
	w := &writer{session: s, ctx: ctx, conn: wired{ours}, timeout: time.Minute, negotiated: negotiated{ipv4: true, ipv6: true},
		encoding: encoding{localASN: nodeASN, fourOctet: true, next4: node4, next6: node6}}
	var received atomic.Int64
	var running sync.WaitGroup
	t.Cleanup(running.Wait)
	t.Cleanup(func() { cancel(); ours.Close() })
	running.Go(func() { w.run() }) //nolint:errcheck // it ends with ctx
	running.Go(func() {
		for {
			if _, err := readMessage(theirs); err != nil {
				return
			}
			received.Add(1)
		}
	})
	ask = func(afi byte) {
		_, err := s.handle(message{packet.BGP_MSG_ROUTE_REFRESH, []byte{0, afi, 0, packet.SAFI_UNICAST}})
		require.NoError(t, err)
	}
	return s, ask, func() int64 { synctest.Wait(); return received.Swap(0) }
}

// A router is sent all routes of a family at once when it asks for them, and again after a second at the earliest. What it asks
// for meanwhile is one request of each family.
func TestRequestsForAllRoutes(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		_, ask, updates := overPipe(t, io.Discard, map[netip.Prefix]plan.Route{vip4: {"tor": {}}, vip6: {"tor": {}}})
		require.EqualValues(t, 2, updates())
		for range 3 {
			time.Sleep(3 * refreshPause)
			ask(packet.AFI_IP)
			require.EqualValues(t, 1, updates(), "it waits")
			ask(packet.AFI_IP6)
			require.EqualValues(t, 1, updates(), "it waits for the other family")
		}
		for range 1000 {
			ask(packet.AFI_IP)
			ask(packet.AFI_IP6)
		}
		time.Sleep(refreshPause - 1)
		require.Zero(t, updates())
		time.Sleep(10 * refreshPause)
		require.EqualValues(t, 2, updates())
		for range 1000 {
			ask(packet.AFI_IP)
			time.Sleep(refreshPause / 100)
		}
		require.LessOrEqual(t, updates(), int64(11))
	})
}

// That a prefix cannot be announced is logged once, however often the router asks for all routes, and again once it could be.
func TestWhatCannotBeAnnouncedIsLoggedOnce(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		log := &testnet.Log{}
		tooLong := plan.Route{"tor": {Prepend: maxPath}}
		s, ask, updates := overPipe(t, log, map[netip.Prefix]plan.Route{vip4: tooLong})
		logged := func(n int) {
			t.Helper()
			updates()
			require.Equal(t, n, strings.Count(log.String(), "BGP cannot announce"), log.String())
		}
		for range 5 {
			logged(1)
			ask(packet.AFI_IP)
			time.Sleep(2 * refreshPause)
		}
		_, withheld := s.rib.count()
		require.Equal(t, map[Withholding]int{withheldTooLong: 1}, withheld)
		s.rib.set(more4, tooLong)
		s.rib.flush()
		logged(2)
		require.Contains(t, log.String(), "first="+more4.String())
		s.rib.set(vip4, plan.Route{"tor": {}})
		s.rib.flush()
		logged(2)
		s.rib.set(vip4, tooLong)
		s.rib.flush()
		logged(3)
	})
}
