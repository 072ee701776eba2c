package bfd

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"

	"golang.org/x/sys/unix"
)

const (
	// The ports (RFC 5881, section 4; RFC 5883, section 5).
	singleHopPort = 3784
	multihopPort  = 4784
	// firstSourcePort is the first of those that a session may send from (RFC
	// 5881, section 4).
	firstSourcePort = 49152
	sourcePorts     = 1<<16 - firstSourcePort
	portAttempts    = 64
	// maxHops is the TTL or hop limit that every packet is sent with. A packet from the same
	// link still has it on arrival (RFC 5881, section 5).
	maxHops = 255
	// classSelector6 is the traffic class of network control (RFC 2474, section
	// 4.2.2), priorityControl the first band of the interface's queue.
	classSelector6  = 0xc0
	priorityControl = 6
	// maxPayload is more than the Length field of a packet can hold.
	maxPayload = 512
)

// transport is a kind of session that shares receive sockets.
type transport struct{ v6, multihop bool }

func (t transport) port() int {
	if t.multihop {
		return multihopPort
	}
	return singleHopPort
}

func (t transport) String() string {
	if t.v6 {
		return fmt.Sprintf("UDP port %d, IPv6", t.port())
	}
	return fmt.Sprintf("UDP port %d, IPv4", t.port())
}

// datagram is what a receive socket got.
type datagram struct {
	transport
	from, to netip.Addr // without zones
	ifindex  int
	hops     int // TTL or hop limit on arrival; -1 if the kernel did not report it
	payload  []byte
}

// option is a socket option with an integer.
type option struct{ level, name, value int }

func setOptions(fd int, options ...option) error {
	for _, o := range options {
		if err := unix.SetsockoptInt(fd, o.level, o.name, o.value); err != nil {
			return fmt.Errorf("set option %d of level %d: %w", o.name, o.level, err)
		}
	}
	return nil
}

// The receive sockets of a transport share its port, and a program in the kernel chooses one for each packet, so that what strangers
// send takes no room of what peers send. Both are read alike: nothing depends on the choice but the room. The sockets are in the
// order in which they are bound, by which the program names them. One that ends early names the first.
const (
	ofStrangers = iota
	ofPeers
	receiveSockets
)

// mostSeparated bounds the sessions in a program: as many fit into 20 KiB, which older kernels allow by default
// (net.core.optmem_max). Packets of further peers wait among those of strangers.
const mostSeparated = 128

// listen opens the receive sockets of a transport.
func listen(t transport) (fds []int, err error) {
	for len(fds) < receiveSockets && err == nil {
		var fd int
		if fd, err = newSocket(t.v6); err == nil {
			fds = append(fds, fd)
			err = bindTo(t, fd, len(fds) > 1)
		}
	}
	if err != nil {
		closeSockets(fds)
		return nil, fmt.Errorf("listen on %s: %w", t, err)
	}
	return fds, nil
}

// bindTo binds a receive socket. The first one shares the port only once it is bound, so that it finds the port in use if another
// process has it: two that both receive would each miss packets.
func bindTo(t transport, fd int, shares bool) error {
	share := option{unix.SOL_SOCKET, unix.SO_REUSEPORT, 1}
	options := []option{{unix.IPPROTO_IP, unix.IP_RECVTTL, 1}, {unix.IPPROTO_IP, unix.IP_PKTINFO, 1}}
	if t.v6 {
		options = []option{{unix.IPPROTO_IPV6, unix.IPV6_RECVHOPLIMIT, 1}, {unix.IPPROTO_IPV6, unix.IPV6_RECVPKTINFO, 1}}
	}
	if shares {
		options = append(options, share)
	}
	err := setOptions(fd, options...)
	if err == nil {
		err = unix.Bind(fd, wildcard(t.v6, t.port()))
	}
	if errors.Is(err, unix.EADDRINUSE) {
		err = fmt.Errorf("%w: another BFD daemon runs on this node", err)
	}
	if err == nil {
		err = setOptions(fd, share)
	}
	return err
}

// separate has the kernel choose a receive socket: that of peers for a packet from the address of a session, unless its TTL or
// hop limit is below the least one of the session. A program of one socket is that of all that share the port.
func separate(t transport, fd int, sessions []*session) error {
	const header = 1<<32 - 0x100000 // where programs find the IP header: SKF_NET_OFF
	hops, source, words := uint32(8), uint32(12), uint32(1)
	if t.v6 {
		hops, source, words = 7, 8, 4
	}
	program := []unix.SockFilter{
		{Code: unix.BPF_LD | unix.BPF_B | unix.BPF_ABS, K: header + hops}, {Code: unix.BPF_ST, K: words},
	}
	for i := range words {
		program = append(program,
			unix.SockFilter{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, K: header + source + 4*i}, unix.SockFilter{Code: unix.BPF_ST, K: i})
	}
	for _, s := range sessions[:min(len(sessions), mostSeparated)] {
		remote := s.want.Remote.AsSlice()
		for i := range words {
			program = append(program,
				unix.SockFilter{Code: unix.BPF_LD | unix.BPF_MEM, K: i},
				unix.SockFilter{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: binary.BigEndian.Uint32(remote[4*i:]), Jf: uint8(2*(words-i) + 1)})
		}
		program = append(program,
			unix.SockFilter{Code: unix.BPF_LD | unix.BPF_MEM, K: words},
			unix.SockFilter{Code: unix.BPF_JMP | unix.BPF_JGE | unix.BPF_K, K: uint32(s.want.minHops()), Jf: 1},
			unix.SockFilter{Code: unix.BPF_RET | unix.BPF_K, K: ofPeers})
	}
	program = append(program, unix.SockFilter{Code: unix.BPF_RET | unix.BPF_K, K: ofStrangers})
	all := unix.SockFprog{Len: uint16(len(program)), Filter: &program[0]}
	if err := unix.SetsockoptSockFprog(fd, unix.SOL_SOCKET, unix.SO_ATTACH_REUSEPORT_CBPF, &all); err != nil {
		return fmt.Errorf("keep strangers' packets apart on %s: %w", t, err)
	}
	return nil
}

func closeSockets(fds []int) {
	for _, fd := range fds {
		_ = unix.Close(fd)
	}
}

func newSocket(v6 bool) (fd int, err error) {
	family := unix.AF_INET
	if v6 {
		family = unix.AF_INET6
	}
	fd, err = unix.Socket(family, unix.SOCK_DGRAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return -1, fmt.Errorf("open a UDP socket: %w", err)
	}
	if v6 {
		if err := setOptions(fd, option{unix.IPPROTO_IPV6, unix.IPV6_V6ONLY, 1}); err != nil {
			_ = unix.Close(fd)
			return -1, err
		}
	}
	return fd, nil
}

// link is the sending side of a session: a socket with a port of its own, by
// which the kernel fixes the source address.
type link struct {
	fd      int
	ifindex int // of the session's interface, if it has one
	local   netip.AddrPort
}

// dial opens the sending side of a session, from port if that is not zero and
// still free.
func dial(s Session, port uint16) (l link, err error) {
	t := s.transport()
	l.fd, err = newSocket(t.v6)
	if err != nil {
		return link{fd: -1}, err
	}
	if err = l.open(s, port); err != nil {
		_ = unix.Close(l.fd)
		return link{fd: -1}, err
	}
	return l, nil
}

func (l *link) open(s Session, port uint16) (err error) {
	t := s.transport()
	options := []option{
		{unix.IPPROTO_IP, unix.IP_TTL, maxHops}, {unix.IPPROTO_IP, unix.IP_TOS, classSelector6},
	}
	if t.v6 {
		options = []option{
			{unix.IPPROTO_IPV6, unix.IPV6_UNICAST_HOPS, maxHops}, {unix.IPPROTO_IPV6, unix.IPV6_TCLASS, classSelector6},
		}
	}
	if err = setOptions(l.fd, append(options, option{unix.SOL_SOCKET, unix.SO_PRIORITY, priorityControl})...); err != nil {
		return err
	}
	if s.Interface != "" {
		if l.ifindex, err = interfaceIndex(l.fd, s.Interface); err != nil {
			return err
		}
		if err = unix.BindToDevice(l.fd, s.Interface); err != nil {
			return fmt.Errorf("send by interface %q only: %w", s.Interface, err)
		}
	}
	if err = l.bind(s, port); err != nil {
		return err
	}
	if err = unix.Connect(l.fd, sockaddr(s.Remote, t.port(), l.ifindex)); err != nil {
		return fmt.Errorf("find the way to %s: %w", s.Remote, err)
	}
	name, err := unix.Getsockname(l.fd)
	if err != nil {
		return fmt.Errorf("read the source address of %s: %w", s.Remote, err)
	}
	l.local = addrPort(name)
	if l.local.Addr().IsUnspecified() {
		// The interface has no address yet, so the kernel took the peer to be on its link. It would keep
		// 0.0.0.0 as the source of this socket's packets when there is an address.
		return fmt.Errorf("find the way to %s: interface %q has no address to send from", s.Remote, s.Interface)
	}
	return nil
}

// bind takes a source port that no other session on this machine has.
func (l *link) bind(s Session, port uint16) (err error) {
	local := func(port uint16) unix.Sockaddr {
		if s.Local.IsValid() {
			return sockaddr(s.Local, int(port), l.ifindex)
		}
		return wildcard(s.Remote.Is6(), int(port))
	}
	if port == 0 {
		port = randomPort()
	}
	for range portAttempts {
		if err = unix.Bind(l.fd, local(port)); !errors.Is(err, unix.EADDRINUSE) {
			break
		}
		port = randomPort()
	}
	if err != nil {
		return fmt.Errorf("bind to a source port from %d, address %s: %w", firstSourcePort, s.Local, err)
	}
	return nil
}

func randomPort() uint16 { return uint16(firstSourcePort + rand.IntN(sourcePorts)) }

func interfaceIndex(fd int, name string) (int, error) {
	request, err := unix.NewIfreq(name)
	if err == nil {
		err = unix.IoctlIfreq(fd, unix.SIOCGIFINDEX, request)
	}
	if err != nil {
		return 0, fmt.Errorf("look up interface %q: %w", name, err)
	}
	return int(request.Uint32()), nil
}

func wildcard(v6 bool, port int) unix.Sockaddr {
	if v6 {
		return &unix.SockaddrInet6{Port: port}
	}
	return &unix.SockaddrInet4{Port: port}
}

// sockaddr returns the kernel's form of an address. The index is that of its
// link, which only link-local ones need.
func sockaddr(a netip.Addr, port, ifindex int) unix.Sockaddr {
	if a.Is4() {
		return &unix.SockaddrInet4{Port: port, Addr: a.As4()}
	}
	s := &unix.SockaddrInet6{Port: port, Addr: a.As16()}
	if a.IsLinkLocalUnicast() {
		s.ZoneId = uint32(ifindex)
	}
	return s
}

func addrPort(s unix.Sockaddr) netip.AddrPort {
	switch s := s.(type) {
	case *unix.SockaddrInet4:
		return netip.AddrPortFrom(netip.AddrFrom4(s.Addr), uint16(s.Port))
	case *unix.SockaddrInet6:
		return netip.AddrPortFrom(netip.AddrFrom16(s.Addr), uint16(s.Port))
	}
	return netip.AddrPort{}
}

// read receives a datagram if one is there, else it returns EAGAIN. The payload
// is valid until the buffers are used again.
func read(fd int, t transport, b *buffers) (datagram, error) {
	n, nc, _, from, err := unix.Recvmsg(fd, b.payload[:], b.control[:], unix.MSG_DONTWAIT)
	if err != nil {
		return datagram{}, err
	}
	d := datagram{transport: t, from: addrPort(from).Addr(), hops: -1, payload: b.payload[:n]}
	messages, err := unix.ParseSocketControlMessage(b.control[:nc])
	if err != nil {
		return datagram{}, fmt.Errorf("read control messages: %w", err)
	}
	for _, m := range messages {
		d.note(m)
	}
	return d, nil
}

// buffers are those of read.
type buffers struct {
	payload [maxPayload]byte
	control [256]byte
}

// note takes over the data of a control message: ip(7) and ipv6(7).
func (d *datagram) note(m unix.SocketControlMessage) {
	type kind struct{ level, name int32 }
	switch (kind{m.Header.Level, m.Header.Type}) {
	case kind{unix.IPPROTO_IP, unix.IP_TTL}, kind{unix.IPPROTO_IPV6, unix.IPV6_HOPLIMIT}:
		if len(m.Data) >= 4 {
			d.hops = int(binary.NativeEndian.Uint32(m.Data))
		}
	case kind{unix.IPPROTO_IP, unix.IP_PKTINFO}: // struct in_pktinfo
		if len(m.Data) >= 12 {
			d.ifindex = int(binary.NativeEndian.Uint32(m.Data))
			d.to = netip.AddrFrom4([4]byte(m.Data[8:12]))
		}
	case kind{unix.IPPROTO_IPV6, unix.IPV6_PKTINFO}: // struct in6_pktinfo
		if len(m.Data) >= 20 {
			d.to = netip.AddrFrom16([16]byte(m.Data[:16]))
			d.ifindex = int(binary.NativeEndian.Uint32(m.Data[16:]))
		}
	}
}

// send sends a packet. A full queue is a loss like any other.
func (l link) send(b []byte) error {
	_, err := unix.Write(l.fd, b)
	if errors.Is(err, unix.EAGAIN) || errors.Is(err, unix.ENOBUFS) || errors.Is(err, unix.EINTR) {
		return nil
	}
	return err
}

func (l *link) close() {
	if l.fd >= 0 {
		_ = unix.Close(l.fd)
	}
	l.fd = -1
}
