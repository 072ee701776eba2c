package bgp

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strconv"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// listenPort is where passive peers find the node (RFC 4271 section 8.2.1.1).
	listenPort = 179
	// maxPassword is the longest key of TCP-MD5 in Linux, TCP_MD5SIG_MAXKEYLEN.
	maxPassword = 80
	// securityTTL is the TTL of packets that nobody forwarded (RFC 5082).
	securityTTL = 255
	// acceptRetry is the pause after a failed accept.
	acceptRetry = 100 * time.Millisecond
)

// ttl returns the TTL of packets to the peer; 0 is the kernel's default.
func (t *target) ttl() int {
	switch {
	case t.Peer.TTLSecurity > 0:
		return securityTTL
	case t.Internal():
		return 0
	case t.Peer.Multihop > 0:
		return t.Peer.Multihop
	case t.Peer.PeerASN.Number == 0 && !t.Peer.PeerASN.External: // it may be internal
		return 0
	}
	return 1
}

// leastTTL returns the least TTL that packets of the peer may have; 0 is any.
func (t *target) leastTTL() int {
	if t.Peer.TTLSecurity == 0 {
		return 0
	}
	return securityTTL + 1 - t.Peer.TTLSecurity
}

// dial opens a connection to the peer at the address, within the time.
func dial(ctx context.Context, inside func(func() error) error, t *target, router netip.Addr, timeout time.Duration) (net.Conn, error) {
	d := net.Dialer{
		Timeout: timeout,
		Control: func(_, _ string, c syscall.RawConn) error {
			return onSocket(c, func(fd int) error {
				if err := setTTL(fd, router, t); err != nil || t.password == "" {
					return err
				}
				return setPassword(fd, router, t.password)
			})
		},
	}
	d.SetMultipathTCP(false) // which has no TCP-MD5
	var conn net.Conn
	err := inside(func() (err error) {
		to, _, err := scoped(router)
		if err != nil {
			return err
		}
		if t.Source.IsValid() {
			d.LocalAddr = net.TCPAddrFromAddrPort(netip.AddrPortFrom(t.Source.WithZone(to.Zone()), 0))
		}
		conn, err = d.DialContext(ctx, "tcp", netip.AddrPortFrom(to, t.Peer.Port).String())
		return err
	})
	return conn, err
}

// scoped returns the address with the index of its interface in place of the name, and the index: package net goes by the index that
// an interface of the name had up to a minute ago. Zero: the address has no interface.
func scoped(a netip.Addr) (netip.Addr, int, error) {
	if a.Zone() == "" {
		return a, 0, nil
	}
	link, err := net.InterfaceByName(a.Zone())
	if err != nil {
		return a, 0, err
	}
	return a.WithZone(strconv.Itoa(link.Index)), link.Index, nil
}

// onSocket runs f on a socket.
func onSocket(c syscall.RawConn, f func(fd int) error) error {
	var inner error
	if err := c.Control(func(fd uintptr) { inner = f(int(fd)) }); err != nil {
		return err
	}
	return inner
}

func setTTL(fd int, router netip.Addr, t *target) error {
	level, send, receive := unix.IPPROTO_IP, unix.IP_TTL, unix.IP_MINTTL
	if router.Is6() {
		level, send, receive = unix.IPPROTO_IPV6, unix.IPV6_UNICAST_HOPS, unix.IPV6_MINHOPCOUNT
	}
	if ttl := t.ttl(); ttl != 0 {
		if err := unix.SetsockoptInt(fd, level, send, ttl); err != nil {
			return fmt.Errorf("set TTL %d: %w", ttl, err)
		}
	}
	if least := t.leastTTL(); least != 0 {
		if err := unix.SetsockoptInt(fd, level, receive, least); err != nil {
			return fmt.Errorf("set least TTL %d: %w", least, err)
		}
	}
	return nil
}

// setPassword sets the TCP-MD5 key for a router; none if it is empty.
func setPassword(fd int, router netip.Addr, password string) error {
	sig := unix.TCPMD5Sig{Keylen: uint16(len(password))}
	copy(sig.Key[:], password)
	if router.Is4() { // struct sockaddr_in: behind the port
		sig.Addr.Family = unix.AF_INET
		copy(sig.Addr.Data[2:], router.AsSlice())
	} else { // struct sockaddr_in6: behind port and flow
		sig.Addr.Family = unix.AF_INET6
		copy(sig.Addr.Data[6:], router.AsSlice())
	}
	if err := unix.SetsockoptTCPMD5Sig(fd, unix.IPPROTO_TCP, unix.TCP_MD5SIG, &sig); err != nil {
		return fmt.Errorf("set the TCP-MD5 password for %s: %w", router, err)
	}
	return nil
}

// source returns the address of the node that the kernel would use towards the
// router. It sends nothing.
func source(router netip.Addr) (netip.Addr, error) {
	router, _, err := scoped(router)
	if err != nil {
		return netip.Addr{}, plain(err)
	}
	conn, err := new(net.Dialer).DialContext(context.Background(), "udp", netip.AddrPortFrom(router, listenPort).String())
	if err != nil {
		return netip.Addr{}, plain(err)
	}
	defer conn.Close()
	return conn.LocalAddr().(*net.UDPAddr).AddrPort().Addr().Unmap(), nil
}

// nextHopAddrs are the first addresses of the session's interface that routers can use as next hop.
type nextHopAddrs struct{ ipv4, ipv6 netip.Addr }

// take keeps the first address of each family.
func (n *nextHopAddrs) take(addr netip.Addr) {
	slot := &n.ipv6
	switch {
	case addr.IsLoopback(), addr.IsLinkLocalUnicast():
		return
	case addr.Is4():
		slot = &n.ipv4
	}
	if !slot.IsValid() {
		*slot = addr
	}
}

// nextHops sets the next hops of this node's routes. That is the node's end of the session,
// and for the other family an address of the same interface. Over a link-local session all
// next hops are IPv6 addresses if the router can do that (RFC 8950), because an IPv4 address
// may mean nothing there.
func (e *encoding) nextHops(local netip.Addr, n nextHopAddrs, ipv4OverIPv6 bool) {
	local = local.WithZone("")
	switch {
	case local.Is4():
		e.next4, e.next6 = local, n.ipv6
	case local.IsLinkLocalUnicast():
		e.next6, e.link6 = n.ipv6, local
		if !e.next6.IsValid() {
			e.next6, e.link6 = local, netip.Addr{}
		}
		e.next4 = n.ipv4
		if ipv4OverIPv6 {
			e.next4 = local
		}
	default:
		e.next4, e.next6 = n.ipv4, local
		if !e.next4.IsValid() && ipv4OverIPv6 {
			e.next4 = local
		}
	}
}

// listeners accept the connections of passive peers: on the node's address of each
// session, and on no other. They belong to Run.
type listeners struct {
	inside func(func() error) error
	// peers are the passive ones by their addresses; read when one connects.
	peers   atomic.Pointer[map[netip.Addr]*session]
	open    map[netip.Addr]*listener
	locals  map[netip.Addr]netip.Addr // the node's address towards each router, when it was known last
	running sync.WaitGroup
}

type listener struct {
	*net.TCPListener
	passwords map[netip.Addr]string // by router
	link      int                   // the index of the interface of a link-local address. Zero: it is none
}

func newListeners(inside func(func() error) error) *listeners {
	l := &listeners{inside: inside, open: map[netip.Addr]*listener{}}
	l.peers.Store(&map[netip.Addr]*session{}) // the first listener accepts before set has all
	return l
}

// set replaces the sessions. It notes the error on those for which listening fails.
func (l *listeners) set(sessions map[string]*session) {
	peers, passwords := map[netip.Addr]*session{}, map[netip.Addr]map[netip.Addr]string{}
	locals, unknown := map[netip.Addr]netip.Addr{}, map[netip.Addr]bool{}
	for _, s := range sessions {
		t := s.newest
		if !t.Peer.Passive || t.down != "" || t.unfit != "" {
			continue
		}
		router := t.Peer.Address
		local, err := l.localFor(t, router)
		if err != nil { // the route is away, for a moment perhaps
			l.note(s, err)
			local = l.locals[router]
			if unknown[router] = true; l.open[local] == nil {
				continue
			}
		}
		locals[router] = local
		peers[router] = s
		if passwords[local] == nil {
			passwords[local] = map[netip.Addr]string{}
		}
		passwords[local][router] = t.password
	}
	for local, open := range l.open {
		if passwords[local] == nil {
			open.Close()
			delete(l.open, local)
		}
	}
	for local, want := range passwords {
		err := l.listen(local, want)
		for router := range want {
			if !unknown[router] {
				l.note(peers[router], err)
			}
			if err != nil {
				delete(peers, router)
			}
		}
	}
	l.locals = locals
	l.peers.Store(&peers)
}

// note sets why the router of a session cannot connect, if it cannot.
func (l *listeners) note(s *session, err error) {
	unheard := ""
	if err != nil {
		unheard = err.Error()
	}
	if s.newest.unheard != unheard {
		t := *s.newest
		t.unheard = unheard
		s.setTarget(t)
	}
}

func (l *listeners) localFor(t *target, router netip.Addr) (local netip.Addr, err error) {
	if t.Source.IsValid() {
		return t.Source.WithZone(router.Zone()), nil
	}
	if err := l.inside(func() error { local, err = source(router); return err }); err != nil {
		return local, fmt.Errorf("find the node's address towards %s: %w", router, err)
	}
	return local, nil
}

// listen opens a listener, or changes the passwords of the open one. A router with a password
// cannot connect without it.
func (l *listeners) listen(local netip.Addr, passwords map[netip.Addr]string) error {
	var at netip.Addr
	var link int
	away := l.inside(func() (err error) { at, link, err = scoped(local); return err })
	if open := l.open[local]; open != nil && away == nil && open.link != link { // which is another interface of that name
		open.Close()
		delete(l.open, local)
	}
	if open := l.open[local]; open != nil {
		c, err := open.SyscallConn()
		if err != nil {
			return err
		}
		if err = onSocket(c, func(fd int) error { return setPasswords(fd, open.passwords, passwords) }); err != nil {
			open.Close() // nobody knows which passwords it has: the next one begins without any
			delete(l.open, local)
			return err
		}
		open.passwords = passwords
		return nil
	}
	c := net.ListenConfig{Control: func(_, _ string, c syscall.RawConn) error {
		return onSocket(c, func(fd int) error {
			// A router with TTL security drops an answer to its SYN whose TTL is too low.
			level, option := unix.IPPROTO_IP, unix.IP_TTL
			if local.Is6() {
				level, option = unix.IPPROTO_IPV6, unix.IPV6_UNICAST_HOPS
			}
			if err := unix.SetsockoptInt(fd, level, option, securityTTL); err != nil {
				return fmt.Errorf("set TTL %d: %w", securityTTL, err)
			}
			return setPasswords(fd, nil, passwords)
		})
	}}
	c.SetMultipathTCP(false) // which has no TCP-MD5
	var opened net.Listener
	err := l.inside(func() (err error) {
		if err = away; err == nil {
			opened, err = c.Listen(context.Background(), "tcp", netip.AddrPortFrom(at, listenPort).String())
		}
		return err
	})
	if err != nil {
		hint := ""
		switch {
		case errors.Is(err, unix.EACCES):
			hint = ": passive peers need the capability NET_BIND_SERVICE"
		case errors.Is(err, unix.EADDRINUSE):
			hint = ": another BGP daemon runs on the node"
		case errors.Is(err, unix.EADDRNOTAVAIL):
			hint = ": the node does not have the source address"
		}
		return fmt.Errorf("listen on %s: %w%s", netip.AddrPortFrom(local, listenPort), plain(err), hint)
	}
	open := &listener{opened.(*net.TCPListener), passwords, link}
	l.open[local] = open
	l.running.Go(func() { l.accept(open.TCPListener) })
	return nil
}

// setPasswords sets those that differ, by router.
func setPasswords(fd int, before, want map[netip.Addr]string) error {
	for router, password := range before {
		if password != "" && want[router] == "" {
			if err := setPassword(fd, router, ""); err != nil {
				return err
			}
		}
	}
	for router, password := range want {
		if password != before[router] && password != "" {
			if err := setPassword(fd, router, password); err != nil {
				return err
			}
		}
	}
	return nil
}

// close closes all listeners and waits until none accepts any more.
func (l *listeners) close() {
	l.set(nil)
	l.running.Wait()
}

// accept hands connections to the sessions that they are for.
func (l *listeners) accept(from *net.TCPListener) {
	for {
		conn, err := from.AcceptTCP()
		switch {
		case errors.Is(err, net.ErrClosed):
			return
		case err != nil: // out of descriptors, or the router gave up
			time.Sleep(acceptRetry)
			continue
		}
		router := conn.RemoteAddr().(*net.TCPAddr).AddrPort().Addr().Unmap()
		if s := (*l.peers.Load())[router]; s != nil {
			s.accept(conn)
		} else {
			conn.Close()
		}
	}
}
