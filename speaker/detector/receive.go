package detector

import (
	"encoding/binary"
	"net/netip"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/lodestone-lb/lodestone/speaker/detector/watch"
)

// batch is how many packets are read by one system call.
const batch = 32

// stampSize is the size of a control message with a time of 64-bit seconds and nanoseconds.
const stampSize = 64

// socket is a socket with room for a batch of packets.
type socket struct {
	fd       int
	headers  [batch]header
	vectors  [batch]unix.Iovec
	names    [batch]unix.RawSockaddrAny
	payloads [batch][watch.MaxPacket]byte
	controls [batch][stampSize]byte
	memory   [unix.SK_MEMINFO_VARS]uint32
	wall     time.Time // when the batch was read
	before   time.Time // when the one before was read
}

// header is struct mmsghdr of recvmmsg(2).
type header struct {
	unix.Msghdr
	length uint32
}

// prepare points the headers to the buffers.
func (s *socket) prepare(fd int) {
	s.fd, s.wall = fd, time.Now()
	for i := range s.headers {
		h, v := &s.headers[i].Msghdr, &s.vectors[i]
		v.Base = &s.payloads[i][0]
		v.SetLen(len(s.payloads[i]))
		h.Iov, h.Name, h.Control = v, (*byte)(unsafe.Pointer(&s.names[i])), &s.controls[i][0]
		h.SetIovlen(1)
	}
}

// read reads a batch and returns how many packets it has.
func (s *socket) read() int {
	for i := range s.headers {
		h := &s.headers[i].Msghdr
		h.Namelen = unix.SizeofSockaddrAny
		h.SetControllen(stampSize)
	}
	n, err := raw(unix.SYS_RECVMMSG, s.fd, unsafe.Pointer(&s.headers), batch, unix.MSG_DONTWAIT, nil, 0)
	s.before, s.wall = s.wall, time.Now()
	if err != 0 {
		return 0 // there is none, or the error occurs again
	}
	return n
}

// crowded reports whether packets have taken more than half of the kernel's buffer. Some may then have found no room. How many fill
// it depends on the network card: a packet may take as much as a page.
func (s *socket) crowded() bool {
	size := uint32(unsafe.Sizeof(s.memory))
	_, _, err := unix.RawSyscall6(unix.SYS_GETSOCKOPT, uintptr(s.fd), unix.SOL_SOCKET, unix.SO_MEMINFO,
		uintptr(unsafe.Pointer(&s.memory)), uintptr(unsafe.Pointer(&size)), 0)
	return err == 0 && s.memory[unix.SK_MEMINFO_RMEM_ALLOC] > s.memory[unix.SK_MEMINFO_RCVBUF]/2
}

// payload returns the bytes of a packet. They are valid until the next read.
func (s *socket) payload(i int) []byte { return s.payloads[i][:s.headers[i].length] }

// source returns where a packet comes from.
func (s *socket) source(i int) netip.AddrPort {
	name := unsafe.Slice((*byte)(unsafe.Pointer(&s.names[i])), unix.SizeofSockaddrInet6)
	port := binary.BigEndian.Uint16(name[2:])
	switch s.names[i].Addr.Family {
	case unix.AF_INET:
		return netip.AddrPortFrom(netip.AddrFrom4([4]byte(name[4:8])), port)
	case unix.AF_INET6:
		return netip.AddrPortFrom(netip.AddrFrom16([16]byte(name[8:24])).Unmap(), port)
	}
	return netip.AddrPort{}
}

// arrival returns when the kernel got a packet, which was read now. The kernel stamps it by the wall clock, which may
// jump: only the packet's age is used, and the packet is not older than the read before it.
func (s *socket) arrival(i int, now time.Time) time.Time {
	control := s.controls[i][:min(int(s.headers[i].Controllen), stampSize)]
	if len(control) < syscall.CmsgLen(16) {
		return now
	}
	stamp := control[syscall.CmsgLen(0):]
	age := s.wall.Sub(time.Unix(int64(binary.NativeEndian.Uint64(stamp)), int64(binary.NativeEndian.Uint64(stamp[8:]))))
	return now.Add(-min(max(0, age), s.wall.Sub(s.before)))
}
