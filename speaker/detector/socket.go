package detector

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/lodestone-lb/lodestone/speaker/detector/watch"
)

// The detector shares memberlist's UDP port, so that no other port has to be opened between nodes. Three sockets are
// bound to it, and a filter in the kernel chooses one of them by the first four bytes of a packet. Memberlist's
// packets begin with random bytes: one in 2^31 is lost.

// The sockets in the order in which they are bound, by which the filter names them.
const (
	ofMemberlist = iota
	ofBeats
	ofUrgent
)

const (
	// receiveBuffer is the size of the kernel's buffer of a socket, if the kernel allows it.
	receiveBuffer = 1 << 20
	// headerSize is the size of UDP's header.
	headerSize = 8
)

// Share prepares memberlist's UDP socket, before it is bound, for a port that it shares with the detector. It is a
// net.ListenConfig's Control.
func Share(_, _ string, c syscall.RawConn) error {
	var err error
	if e := c.Control(func(fd uintptr) { err = share(int(fd)) }); e != nil {
		return e //nolint:wrapcheck // it names the socket
	}
	return err
}

func share(fd int) error {
	if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEPORT, 1); err != nil {
		return os.NewSyscallError("setsockopt SO_REUSEPORT", err)
	}
	// A packet that is shorter than four bytes is memberlist's, too: the program ends with 0.
	return attach(fd, unix.SO_ATTACH_REUSEPORT_CBPF,
		unix.SockFilter{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS},
		unix.SockFilter{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: watch.MagicBeat, Jf: 1},
		unix.SockFilter{Code: unix.BPF_RET | unix.BPF_K, K: ofBeats},
		unix.SockFilter{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: watch.MagicUrgent, Jf: 1},
		unix.SockFilter{Code: unix.BPF_RET | unix.BPF_K, K: ofUrgent},
		unix.SockFilter{Code: unix.BPF_RET | unix.BPF_K, K: ofMemberlist},
	)
}

// refuseLong has the kernel drop packets that are longer than any that a speaker sends, before they take the room of others.
func refuseLong(fd int) error {
	const all = 1<<32 - 1
	return attach(fd, unix.SO_ATTACH_FILTER,
		unix.SockFilter{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_LEN},
		unix.SockFilter{Code: unix.BPF_JMP | unix.BPF_JGT | unix.BPF_K, K: headerSize + watch.MaxPacket, Jf: 1},
		unix.SockFilter{Code: unix.BPF_RET | unix.BPF_K, K: 0},
		unix.SockFilter{Code: unix.BPF_RET | unix.BPF_K, K: all},
	)
}

// attach attaches a program to a socket.
func attach(fd, option int, filter ...unix.SockFilter) error {
	program := unix.SockFprog{Len: uint16(len(filter)), Filter: &filter[0]}
	return os.NewSyscallError("setsockopt of a filter", unix.SetsockoptSockFprog(fd, unix.SOL_SOCKET, option, &program))
}

// sockets are those of a detector.
type sockets struct {
	beats, urgent socket
	to4           unix.RawSockaddrInet4
	to6           unix.RawSockaddrInet6
	alarm         *alarm
}

// listen opens the sockets on the port of memberlist's.
func listen(at netip.AddrPort) (*sockets, error) {
	s := &sockets{}
	s.to4.Family, s.to6.Family, s.to6.Scope_id = unix.AF_INET, unix.AF_INET6, zone(at.Addr())
	err := s.beats.open(at)
	if err == nil {
		if err = s.urgent.open(at); err != nil {
			_ = unix.Close(s.beats.fd)
		}
	}
	if err != nil {
		return nil, fmt.Errorf("listen for heartbeats on %s: %w", at, err)
	}
	if s.alarm, err = newAlarm(s.urgent.fd); err != nil {
		_, _ = unix.Close(s.beats.fd), unix.Close(s.urgent.fd)
		return nil, err
	}
	return s, nil
}

// open binds the socket.
func (s *socket) open(at netip.AddrPort) error {
	family, address := unix.AF_INET, unix.Sockaddr(nil)
	if ip := at.Addr().Unmap(); ip.Is4() {
		address = &unix.SockaddrInet4{Port: int(at.Port()), Addr: ip.As4()}
	} else {
		family, address = unix.AF_INET6, &unix.SockaddrInet6{Port: int(at.Port()), Addr: ip.As16(), ZoneId: zone(ip)}
	}
	fd, err := unix.Socket(family, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return os.NewSyscallError("socket", err)
	}
	for option, value := range map[int]int{unix.SO_REUSEPORT: 1, unix.SO_TIMESTAMPNS_NEW: 1, unix.SO_RCVBUF: receiveBuffer} {
		if err == nil {
			err = set(fd, option, value)
		}
	}
	if err == nil {
		err = refuseLong(fd)
	}
	if err == nil && family == unix.AF_INET6 { // as Go's sockets: sockets that share a port must be alike
		err = os.NewSyscallError("setsockopt IPV6_V6ONLY", unix.SetsockoptInt(fd, unix.IPPROTO_IPV6, unix.IPV6_V6ONLY, 0))
	}
	if err == nil {
		err = os.NewSyscallError("bind", unix.Bind(fd, address))
	}
	if err != nil {
		_ = unix.Close(fd)
		return err
	}
	s.prepare(fd)
	return nil
}

// set sets an option of a socket. Kernels before 5.1 stamp packets by another one, in the same form if they have 64 bits.
func set(fd, option, value int) error {
	err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, option, value)
	if option == unix.SO_TIMESTAMPNS_NEW && errors.Is(err, unix.ENOPROTOOPT) {
		return set(fd, unix.SO_TIMESTAMPNS_OLD, value)
	}
	return os.NewSyscallError("setsockopt", err)
}

// zone returns the index of the interface of a link-local address.
func zone(ip netip.Addr) uint32 {
	if i, err := net.InterfaceByName(ip.Zone()); err == nil {
		return uint32(i.Index)
	}
	return 0
}

// send sends a packet. One that cannot be sent is lost as any other may be. The urgent socket would wake Go's runtime
// after each packet, as soon as it could send another one.
func (s *sockets) send(to netip.AddrPort, b []byte) {
	name, size, port := unsafe.Pointer(&s.to4), unix.SizeofSockaddrInet4, &s.to4.Port
	if ip := to.Addr().Unmap(); ip.Is4() {
		s.to4.Addr = ip.As4()
	} else {
		s.to6.Addr = ip.As16()
		name, size, port = unsafe.Pointer(&s.to6), unix.SizeofSockaddrInet6, &s.to6.Port
	}
	binary.BigEndian.PutUint16((*[2]byte)(unsafe.Pointer(port))[:], to.Port())
	raw(unix.SYS_SENDTO, s.beats.fd, unsafe.Pointer(unsafe.SliceData(b)), len(b), unix.MSG_DONTWAIT, name, size)
}

// raw is a system call that does not wait, without Go's scheduler knowing of it: the thread that looks after system
// calls would wake for each interval's first one, and stay awake, which costs more than what they do.
func raw(call uintptr, fd int, buffer unsafe.Pointer, size, flags int, name unsafe.Pointer, length int) (int, unix.Errno) {
	n, _, err := unix.RawSyscall6(call, uintptr(fd), uintptr(buffer), uintptr(size), uintptr(flags), uintptr(name), uintptr(length))
	return int(n), err
}

func (s *sockets) close() {
	_ = unix.Close(s.beats.fd)
	_ = unix.Close(s.urgent.fd)
	s.alarm.close()
}
