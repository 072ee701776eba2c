package bgp

import (
	"bufio"
	"bytes"
	"encoding/hex"
	"net"
	"net/netip"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	packet "github.com/osrg/gobgp/v3/pkg/packet/bgp"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/lodestone-lb/lodestone/pkg/config"
	"github.com/lodestone-lb/lodestone/pkg/testcost"
	"github.com/lodestone-lb/lodestone/pkg/testnet"
	"github.com/lodestone-lb/lodestone/speaker/plan"
)

// fake is a router at the address. It calls the function with each connection.
func fake(t testing.TB, host *testnet.Host, address netip.Addr, serve func(net.Conn)) {
	t.Helper()
	fakeAt(t, host, netip.AddrPortFrom(address, 179), serve)
}

func fakeAt(t testing.TB, host *testnet.Host, at netip.AddrPort, serve func(net.Conn)) {
	t.Helper()
	var l net.Listener
	require.NoError(t, host.Do(func() (err error) {
		l, err = net.Listen("tcp", at.String())
		return err
	}))
	t.Cleanup(func() { l.Close() })
	go func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer conn.Close()
				serve(conn)
			}()
		}
	}()
}

func raw(t testing.TB, m *packet.BGPMessage) []byte {
	t.Helper()
	b, err := m.Serialize()
	require.NoError(t, err)
	return b
}

// header is a message of a kind with any body.
func header(kind uint8, body []byte) []byte {
	n := headerLength + len(body)
	return append(append(append([]byte{}, marker...), byte(n>>8), byte(n), kind), body...)
}

// opened is an OPEN of AS peerASN with a hold time in seconds.
func opened(t testing.TB, holdTime uint16, capabilities ...packet.ParameterCapabilityInterface) []byte {
	t.Helper()
	capabilities = append(capabilities, packet.NewCapMultiProtocol(packet.RF_IPv4_UC))
	return raw(t, packet.NewBGPOpenMessage(peerASN, holdTime, "198.18.0.2",
		[]packet.OptionParameterInterface{packet.NewOptionParameterCapability(capabilities)}))
}

// answer reads messages until the other side closes, and returns all
// NOTIFICATIONs.
func answer(conn net.Conn) (all string) {
	for r := bufio.NewReader(conn); ; {
		m, err := readMessage(r)
		if err != nil {
			return all
		}
		if m.kind == packet.BGP_MSG_NOTIFICATION {
			all += hex.EncodeToString(m.body)
		}
	}
}

// Whatever a router sends, only its own session suffers: it ends with a reason
// for the operator, and a NOTIFICATION for the router's log.
func TestHostileRouters(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 2)
	f := w.frr(w.segment.Hosts[2], "198.18.0.1", "")
	cases := []struct {
		name, words, notification string
		sends                     [][]byte
	}{
		{"garbage", "not BGP", "0101", [][]byte{[]byte("HTTP/1.1 400 Bad Request\r\n\r\n")}},
		{"too long", "4097 bytes", "01021001", [][]byte{append(append([]byte{}, marker...), 0x10, 0x01, 2)}},
		{"too short", "18 bytes", "01020012", [][]byte{append(append([]byte{}, marker...), 0, 18, 4)}},
		{"unknown type", "unknown type 9", "010309", [][]byte{header(9, nil)}},
		{"keepalive first", "type 4 where one of type 1 was due", "050104", [][]byte{keepalive}},
		{"update before keepalive", "type 2 where one of type 4 was due", "050202", [][]byte{opened(t, 90), header(2, make([]byte, 4))}},
		{"version", "version 3", "02010004", [][]byte{header(1, []byte{3, 0xfc, 1, 0, 90, 1, 1, 1, 1, 0})}},
		{"no identifier", "BGP identifier is 0.0.0.0", "0203", [][]byte{header(1, []byte{4, 0xfc, 1, 0, 90, 0, 0, 0, 0, 0})}},
		{"hold time", "a hold time of 2s", "0206", [][]byte{opened(t, 2)}},
		{"parameters beyond the end", "cannot be read", "0200", [][]byte{header(1, []byte{4, 0xfc, 1, 0, 90, 1, 1, 1, 1, 9, 2})}},
		{"no family", "neither IPv4 nor IPv6", "0207",
			[][]byte{raw(t, packet.NewBGPOpenMessage(peerASN, 90, "1.1.1.1", []packet.OptionParameterInterface{
				packet.NewOptionParameterCapability([]packet.ParameterCapabilityInterface{packet.NewCapMultiProtocol(packet.RF_EVPN)})}))}},
		{"reserved AS", "the router is in AS 0", "0202", [][]byte{header(1, []byte{4, 0, 0, 0, 90, 1, 1, 1, 1, 0})}},
		{"update beyond its end", "malformed UPDATE", "0301", [][]byte{opened(t, 90), keepalive, header(2, []byte{0, 200, 0, 0})}},
		{"prefix beyond its end", "malformed UPDATE", "030a", [][]byte{opened(t, 90), keepalive, header(2, []byte{0, 0, 0, 0, 32, 1})}},
		{"second OPEN", "type 1 in a session that was up", "050301", [][]byte{opened(t, 90), keepalive, opened(t, 90)}},
		{"closes", "the connection without giving a reason", "", [][]byte{opened(t, 90), keepalive, nil}},
		{"notification", "out of resources [NOTIFICATION 6/8]", "", [][]byte{opened(t, 90), keepalive, header(3, []byte{6, 8})}},
		{"silence", "not heard for 3s", "0400", [][]byte{opened(t, 3), keepalive}},
		{"slow bytes", "not heard for 3s", "0400", [][]byte{opened(t, 3), keepalive, marker}},
	}
	got := make([]chan string, len(cases))
	names := make([]string, len(cases))
	for i, c := range cases {
		got[i] = make(chan string, 100)
		address := netip.AddrFrom4([4]byte{198, 18, 0, byte(100 + i)})
		w.tor.Run("ip", "addr", "add", address.String()+"/24", "dev", "eth0")
		fake(t, w.tor, address, func(conn net.Conn) {
			for _, b := range c.sends {
				if b == nil {
					return
				}
				if _, err := conn.Write(b); err != nil {
					return
				}
			}
			got[i] <- answer(conn)
		})
		names[i] = strings.ReplaceAll(c.name, " ", "-")
		w.peer(names[i], func(p *config.Peer) { p.Address, p.ConnectRetry = address, 500*time.Millisecond })
		w.route(vip4, names[i], plan.Attributes{})
	}
	w.peer("good", func(p *config.Peer) { p.Address, p.HoldTime = other4, 9*time.Second })
	w.route(vip4, "good", plan.Attributes{})
	w.start()
	for i, c := range cases {
		w.down(names[i], c.words)
		if c.notification != "" {
			require.Equal(t, c.notification, <-got[i], c.name)
		}
	}
	w.has(f, vip4)
	w.until("a hold time of the good one", func() bool { return time.Since(w.up("good").Since) > 10*time.Second },
		func() any { return w.status("good") })
	w.unbroken("good")
	require.Zero(t, neighbor(f, "198.18.0.1").ConnectionsDropped)
	require.NotContains(t, w.log.String(), "panic")
	w.stop(false)
}

// A router that sends all the routes that there are costs no memory, and one
// that sends what ends gobgp's server (an AS4_PATH before its AS_PATH,
// CVE-2026-41643) costs nothing.
func TestReceivedRoutesAreDropped(t *testing.T) {
	// Not parallel: it measures.
	const prefixes, each = 300_000, 500
	w := newWorld(t, 1)
	deadly, err := hex.DecodeString("0000" + "0012" + "c0110602010000fc01" + "40020602010000fc01")
	require.NoError(t, err)
	done := make(chan struct{})
	fake(t, w.tor, tor4, func(conn net.Conn) {
		go answer(conn)
		conn.Write(opened(t, 90, packet.NewCapFourOctetASNumber(peerASN)))
		conn.Write(keepalive)
		conn.Write(header(packet.BGP_MSG_UPDATE, deadly))
		for n := 0; n < prefixes; n += each {
			var nlri []*packet.IPAddrPrefix
			for i := n; i < n+each; i++ {
				nlri = append(nlri, packet.NewIPAddrPrefix(32, netip.AddrFrom4([4]byte{20, byte(i >> 16), byte(i >> 8), byte(i)}).String()))
			}
			conn.Write(raw(t, packet.NewBGPUpdateMessage(nil, []packet.PathAttributeInterface{packet.NewPathAttributeOrigin(0)}, nlri)))
		}
		<-done
	})
	defer close(done)
	w.peer("tor", nil)
	w.start()
	w.up("tor")
	before := testcost.Live()
	w.until("300,000 prefixes", func() bool { return w.status("tor").Dropped == prefixes }, func() any { return w.status("tor") })
	require.Less(t, testcost.Live()-before, int64(20<<20))
	require.Equal(t, Established, w.status("tor").State)
	w.unbroken("tor")
	require.Empty(t, w.node.Run("ip", "route", "show", "20.0.0.0/8"))
}

// A router that stops reading loses its session after two hold times; it
// holds up nobody else meanwhile, nor Set.
func TestRouterThatDoesNotRead(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 2)
	f := w.frr(w.segment.Hosts[2], "198.18.0.1", "")
	fake(t, w.tor, tor4, func(conn net.Conn) {
		conn.(*net.TCPConn).SetReadBuffer(4096)
		conn.Write(opened(t, 9))
		for {
			if _, err := conn.Write(keepalive); err != nil {
				return
			}
			time.Sleep(time.Second)
		}
	})
	w.peer("deaf", nil)
	w.peer("good", func(p *config.Peer) { p.Address = other4 })
	w.start()
	w.up("deaf")
	w.up("good")
	begin := time.Now()
	for i := 0; w.status("deaf").State == Established; i++ {
		require.Less(t, time.Since(begin), timeout)
		for j := range 5000 {
			prefix := netip.PrefixFrom(netip.AddrFrom4([4]byte{20, byte(j % 3), byte(j >> 8), byte(j)}), 32)
			w.route(prefix, "deaf", plan.Attributes{MED: new(uint32(i))})
		}
		w.route(vip4, "good", plan.Attributes{MED: new(uint32(i))})
		set := time.Now()
		w.set()
		w.until("MED", func() bool { p := path(f, vip4); return p != nil && *p.Metric == uint32(i) }, func() any { return path(f, vip4) })
		require.Less(t, time.Since(set), 15*time.Second, "it waited for the one that does not read")
	}
	w.down("deaf", "send hold timer expired: the router has taken nothing for 18s")
	require.Zero(t, neighbor(f, "198.18.0.1").ConnectionsDropped)
}

// refresh is a ROUTE-REFRESH of IPv4.
var refresh = header(packet.BGP_MSG_ROUTE_REFRESH, []byte{0, packet.AFI_IP, 0, packet.SAFI_UNICAST})

// A router that asks for all routes again and again is sent them once a second, and delays no other router's.
func TestRouterThatAsksWithoutEnd(t *testing.T) {
	// Not parallel: it measures.
	const routes, fit = 20_000, 809 // so many prefixes fit into an UPDATE
	const each = (routes + fit - 1) / fit
	w := newWorld(t, 2)
	var updates [2]atomic.Int64
	serve := func(received *atomic.Int64, sends []byte) func(net.Conn) {
		return func(conn net.Conn) {
			conn.Write(opened(t, 90))
			conn.Write(keepalive)
			go func() {
				for ; sends != nil; time.Sleep(50 * time.Millisecond) {
					if _, err := conn.Write(sends); err != nil {
						return
					}
				}
			}()
			for r := bufio.NewReader(conn); ; {
				m, err := readMessage(r)
				if err != nil {
					return
				}
				if m.kind == packet.BGP_MSG_UPDATE {
					received.Add(1)
				}
			}
		}
	}
	fake(t, w.tor, tor4, serve(&updates[0], bytes.Repeat(refresh, 1000)))
	fake(t, w.segment.Hosts[2], other4, serve(&updates[1], nil))
	w.peer("asks", nil)
	w.peer("good", func(p *config.Peer) { p.Address = other4 })
	set := func(med uint32) {
		for i := range routes {
			prefix := netip.PrefixFrom(netip.AddrFrom4([4]byte{20, 0, byte(i >> 8), byte(i)}), 32)
			w.want.Routes[prefix] = plan.Route{"asks": {}, "good": {MED: &med}}
		}
	}
	set(0)
	w.start()
	w.up("asks")
	w.up("good")
	w.until("all routes", func() bool { return updates[1].Load() == each }, func() any { return updates[1].Load() })
	before, began := updates[0].Load(), time.Now()
	for med := uint32(1); time.Since(began) < 2*refreshPause; med++ {
		set(med)
		changed := time.Now()
		w.set()
		w.until("the change", func() bool { return updates[1].Load() == each*int64(1+med) }, func() any { return updates[1].Load() })
		require.Less(t, time.Since(changed), 20*time.Second, "the other router's change waits")
	}
	answers, most := (updates[0].Load()-before)/each, int64(time.Since(began)/refreshPause)+2
	require.Positive(t, answers)
	require.LessOrEqual(t, answers, most)
}

// forget ends a connection as a loss of power does: nothing is sent, and the
// kernel knows nothing of it any more.
func forget(t testing.TB, conn net.Conn) {
	t.Helper()
	c, err := conn.(*net.TCPConn).SyscallConn()
	require.NoError(t, err)
	require.NoError(t, onSocket(c, func(fd int) error { return unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_REPAIR, 1) }))
	require.NoError(t, conn.Close())
}

// accepted is a router's side of a session that comes up.
func accepted(t testing.TB, conn net.Conn) {
	t.Helper()
	for _, b := range [][]byte{opened(t, 90), keepalive} {
		_, err := conn.Write(b)
		require.NoError(t, err)
	}
}

// A router that lost its power has forgotten the connection. The node learns that
// from its next keepalive, or from the router's new connection, and does not wait
// for the hold time.
func TestHalfOpenConnection(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 1)
	connections := make(chan net.Conn)
	fakeAt(t, w.tor, netip.AddrPortFrom(tor4, 1179), func(conn net.Conn) {
		connections <- conn
		answer(conn)
	})
	w.peer("active", func(p *config.Peer) { p.Port, p.KeepaliveInterval = 1179, time.Second })
	w.start()
	first := <-connections
	accepted(t, first)
	up := w.up("active")
	require.Equal(t, 90*time.Second, up.HoldTime)
	forget(t, first)
	begin := time.Now()
	accepted(t, <-connections)
	w.until("a new session", func() bool { return w.up("active").Since.After(up.Since) }, func() any { return w.status("active") })
	require.Less(t, time.Since(begin), 30*time.Second, "the hold time is 90 s")
	require.Contains(t, w.log.String(), "the router reset the connection without giving a reason: it restarted")

	t.Log("the router connects")
	delete(w.want.Sessions, "active")
	w.peer("passive", func(p *config.Peer) { p.Passive = true })
	w.set()
	connect := func() (conn net.Conn) {
		w.until("connection", func() bool {
			return w.tor.Do(func() (err error) {
				conn, err = net.Dial("tcp", netip.AddrPortFrom(node4, 179).String())
				return err
			}) == nil
		}, func() any { return w.status("passive") })
		accepted(t, conn)
		return conn
	}
	first = connect()
	up = w.up("passive")
	time.Sleep(time.Until(up.Since.Add(steady))) // from then on the session may be replaced
	forget(t, first)
	again := connect()
	defer again.Close()
	go answer(again)
	w.until("a new session", func() bool { return w.up("passive").Since.After(up.Since) }, func() any { return w.status("passive") })
	w.until("the end of the first one in the log", // which may be written while the new one comes up
		func() bool { return strings.Contains(w.log.String(), "the router opened another connection") }, func() any { return w.log.String() })
}

// Connections from the router's address alone do not end the session, and two of
// them at most stay open.
func TestSecondConnectionOfAPassivePeer(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 1)
	w.peer("tor", func(p *config.Peer) { p.Passive = true })
	w.start()
	connect := func() (conn net.Conn) {
		t.Helper()
		w.until("connection", func() bool {
			return w.tor.Do(func() (err error) {
				conn, err = net.Dial("tcp", netip.AddrPortFrom(node4, 179).String())
				return err
			}) == nil
		}, func() any { return w.status("tor") })
		t.Cleanup(func() { conn.Close() })
		return conn
	}
	first := connect()
	accepted(t, first)
	go answer(first)
	up := w.up("tor")

	t.Log("connections without an OPEN")
	var closed atomic.Int64
	const many = 200
	for range many {
		conn := connect()
		go func() {
			answer(conn)
			closed.Add(1)
		}()
	}
	w.until("end of all but two", func() bool { return closed.Load() >= many-2 }, func() any { return closed.Load() })
	require.Equal(t, up.Since, w.up("tor").Since)

	t.Log("an OPEN of another AS")
	wrong := connect()
	_, err := wrong.Write(raw(t, packet.NewBGPOpenMessage(peerASN+1, 90, "198.18.0.2", nil)))
	require.NoError(t, err)
	require.Equal(t, "0202", answer(wrong)[:4], "bad peer AS")
	require.Equal(t, up.Since, w.up("tor").Since)

	t.Log("the router itself")
	again := connect()
	accepted(t, again)
	go answer(again)
	w.until("a new session", func() bool { return w.up("tor").Since.After(up.Since) }, func() any { return w.status("tor") })
}

// A connection that a passive peer opened under the old password, and that waits, does not become a session when the password
// has changed.
func TestConnectionFromBeforeANewPassword(t *testing.T) {
	t.Parallel()
	key := config.SecretKey{Name: "tor", Key: "password"}
	w := newWorld(t, 1)
	w.passwords.set(key, "old")
	w.peer("tor", func(p *config.Peer) { p.Passive, p.Password = true, &key })
	w.start()
	connect := func(password string) (closed chan struct{}) {
		t.Helper()
		var conn net.Conn
		d := net.Dialer{Timeout: time.Second, Control: func(_, _ string, c syscall.RawConn) error {
			return onSocket(c, func(fd int) error { return setPassword(fd, node4, password) })
		}}
		d.SetMultipathTCP(false)
		w.until("connection", func() bool {
			return w.tor.Do(func() (err error) {
				conn, err = d.Dial("tcp", netip.AddrPortFrom(node4, 179).String())
				return err
			}) == nil
		}, func() any { return w.status("tor") })
		t.Cleanup(func() { conn.Close() })
		accepted(t, conn)
		closed = make(chan struct{})
		go func() {
			defer close(closed)
			answer(conn)
		}()
		return closed
	}
	connect("old")
	first := w.up("tor")
	waiting := (*w.announcer.published.Load())["tor"].accepted
	second := connect("old")
	w.until("a connection that waits", func() bool { return len(waiting) == 1 }, func() any { return len(waiting) })

	w.passwords.set(key, "new")
	w.set()
	w.until("end of the second connection", func() bool {
		now := w.status("tor")
		require.False(t, now.State == Established && now.Since.After(first.Since), "a session with the old password")
		select {
		case <-second:
			return true
		default:
			return false
		}
	}, func() any { return w.status("tor") })
	connect("new")
	w.until("a session with the new password", func() bool { return w.up("tor").Since.After(first.Since) },
		func() any { return w.status("tor") })
}

// A session that is up survives a moment without a route to the router.
func TestRouteOfAPassivePeerIsAway(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 1)
	f := w.frr(w.tor, "198.18.0.1", "")
	w.peer("tor", func(p *config.Peer) { p.Passive = true })
	w.start()
	up := w.up("tor")
	w.node.Run("ip", "route", "del", "198.18.0.0/24", "dev", "eth0")
	w.set() // looks for the route
	w.route(vip4, "tor", plan.Attributes{})
	w.set()
	require.Equal(t, Established, w.status("tor").State)
	require.Contains(t, w.node.Run("ss", "-Hltn"), "198.18.0.1:179", "who loses the session meanwhile can come back")
	w.node.Run("ip", "route", "add", "198.18.0.0/24", "dev", "eth0", "src", "198.18.0.1")
	w.has(f, vip4)
	require.Equal(t, up.Since, w.status("tor").Since)
}

// The node has another address. A passive peer that has learnt of it can connect.
func TestAnotherAddressTowardsAPassivePeer(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 1)
	w.peer("tor", func(p *config.Peer) { p.Passive = true })
	w.start()
	require.Contains(t, w.node.Run("ss", "-Hltn"), "198.18.0.1:179")
	w.node.Run("ip", "address", "del", "198.18.0.1/24", "dev", "eth0")
	w.node.Run("ip", "address", "add", "198.18.0.77/24", "dev", "eth0")
	w.frr(w.tor, "198.18.0.77", "")
	w.up("tor")
}

// A router that keeps the routes for a restart is sent first what was set before the stop, however soon the stop follows.
func TestStopSendsWhatWasSet(t *testing.T) {
	t.Parallel()
	const routes = 500
	w := newWorld(t, 1)
	var updates atomic.Int64
	ended := make(chan struct{})
	fake(t, w.tor, tor4, func(conn net.Conn) {
		defer close(ended)
		conn.Write(opened(t, 90, packet.NewCapGracefulRestart(false, false, 60, nil)))
		conn.Write(keepalive)
		for r := bufio.NewReader(conn); ; {
			m, err := readMessage(r)
			if err != nil {
				return
			}
			if m.kind == packet.BGP_MSG_UPDATE {
				updates.Add(1)
			}
		}
	})
	w.peer("tor", func(p *config.Peer) { p.GracefulRestart = time.Minute })
	w.route(vip4, "tor", plan.Attributes{})
	w.start()
	w.until("the route and its end", func() bool { return updates.Load() == 2 }, func() any { return updates.Load() })
	for i := range routes { // each has an UPDATE of its own, and the withdrawal comes last
		prefix := netip.PrefixFrom(netip.AddrFrom4([4]byte{20, 0, byte(i >> 8), byte(i)}), 32)
		w.route(prefix, "tor", plan.Attributes{MED: new(uint32(i))})
	}
	delete(w.want.Routes, vip4)
	w.set()
	w.stop(true)
	<-ended
	require.EqualValues(t, 2+routes+1, updates.Load())
}

// A process that will be back ends only when its routers have seen the sessions end:
// what it does last must not come before that.
func TestStopWaitsForRouters(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 1)
	const slow = 300 * time.Millisecond
	notifications := make(chan string, 1)
	fake(t, w.tor, tor4, func(conn net.Conn) {
		conn.Write(opened(t, 90, packet.NewCapGracefulRestart(false, true, 60, nil)))
		conn.Write(keepalive)
		notifications <- answer(conn) // until the node's end is closed
		time.Sleep(slow)
	})
	w.peer("tor", func(p *config.Peer) { p.GracefulRestart = time.Minute })
	w.start()
	w.up("tor")
	begin := time.Now()
	w.stop(true)
	require.GreaterOrEqual(t, time.Since(begin), slow)
	require.Empty(t, <-notifications, "NOTIFICATIONs")
}

// Attempts at a router whose sessions do not last become less frequent.
func TestFlappingRouter(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 1)
	var sessions atomic.Int64
	fake(t, w.tor, tor4, func(conn net.Conn) {
		conn.Write(opened(t, 90))
		conn.Write(keepalive)
		r := bufio.NewReader(conn)
		for range 2 { // OPEN, KEEPALIVE
			if _, err := readMessage(r); err != nil {
				return
			}
		}
		sessions.Add(1)
	})
	w.peer("tor", func(p *config.Peer) { p.ConnectRetry = 100 * time.Millisecond })
	w.start()
	// With jitter after at least 0, 0.15, 0.3, 0.6, 1.2, 2.4 and 4.8 s.
	time.Sleep(5 * time.Second)
	n := sessions.Load()
	require.LessOrEqual(t, n, int64(7))
	require.GreaterOrEqual(t, n, int64(4))
}

// A router that opens the connections itself gets no more sessions, whether it ends them or only begins others.
func TestFlappingPassivePeer(t *testing.T) {
	t.Parallel()
	for name, ends := range map[string]bool{"ends its sessions": true, "begins others": false} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, 1)
			w.peer("tor", func(p *config.Peer) { p.Passive, p.ConnectRetry = true, 100*time.Millisecond })
			w.start()
			sessions, end := 0, time.Now().Add(5*time.Second)
			connect := func() {
				var conn net.Conn
				err := w.tor.Do(func() (err error) {
					conn, err = net.DialTimeout("tcp", netip.AddrPortFrom(node4, 179).String(), time.Second)
					return err
				})
				if err != nil {
					return
				}
				t.Cleanup(func() { conn.Close() })
				conn.Write(append(opened(t, 90), keepalive...))
				conn.SetReadDeadline(end)
				r := bufio.NewReader(conn)
				for range 2 { // OPEN, KEEPALIVE
					if _, err := readMessage(r); err != nil {
						return
					}
				}
				sessions++
				if ends {
					conn.Close()
				}
			}
			for time.Now().Before(end) {
				connect()
			}
			require.LessOrEqual(t, sessions, 8)
			require.Positive(t, sessions)
		})
	}
}

// Neither side sends keepalives when one wants none.
func TestNoHoldTime(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 2)
	f := w.frr(w.tor, "198.18.0.1", "")
	second := w.frr(w.segment.Hosts[2], "198.18.0.1", "bgp router-id 198.18.0.3\n neighbor 198.18.0.1 timers 0 0")
	w.peer("tor", func(p *config.Peer) { p.HoldTime = 0 })
	w.peer("second", func(p *config.Peer) { p.Address, p.HoldTime = other4, 9*time.Second })
	w.route(vip4, "tor", plan.Attributes{})
	w.route(vip4, "second", plan.Attributes{})
	w.start()
	require.Zero(t, w.up("tor").HoldTime)
	require.Zero(t, w.up("second").HoldTime)
	w.has(f, vip4)
	w.has(second, vip4)
	w.route(more4, "tor", plan.Attributes{})
	w.set()
	w.has(f, more4)
}
