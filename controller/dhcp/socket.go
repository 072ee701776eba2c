package dhcp

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"time"

	"github.com/mdlayher/packet"
	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"
)

// sendTime is how long a full transmit queue may keep a message.
const sendTime = time.Second

// Interface is a network interface at one moment.
type Interface struct {
	net.Interface
	// Addrs are its IPv4 addresses with their networks.
	Addrs []netip.Prefix
}

// usable returns why the interface cannot be used.
func (i Interface) usable(name string) error {
	switch {
	case i.Flags&net.FlagUp == 0:
		return fmt.Errorf("interface %q is down", name)
	case i.Flags&net.FlagRunning == 0:
		return fmt.Errorf("interface %q has no carrier", name)
	case len(i.HardwareAddr) != 6 || i.Flags&net.FlagLoopback != 0:
		return fmt.Errorf("interface %q is not Ethernet", name)
	}
	return nil
}

// Network is what a Source needs of the machine.
type Network interface {
	// Interface looks an interface up.
	Interface(name string) (Interface, error)
	// Listen opens a socket that carries whole Ethernet frames of one
	// EtherType.
	Listen(i *net.Interface, etherType int, filter []bpf.RawInstruction) (net.PacketConn, error)
}

// host is this process's network namespace.
type host struct{}

func (host) Interface(name string) (Interface, error) {
	i, err := net.InterfaceByName(name)
	if err != nil {
		return Interface{}, fmt.Errorf("look up interface %q on this node: %w", name, err)
	}
	addrs, err := i.Addrs()
	if err != nil {
		return Interface{}, fmt.Errorf("list addresses of interface %q: %w", name, err)
	}
	found := Interface{Interface: *i}
	for _, a := range addrs {
		if p, err := netip.ParsePrefix(a.String()); err == nil && p.Addr().Is4() {
			found.Addrs = append(found.Addrs, p)
		}
	}
	return found, nil
}

func (host) Listen(i *net.Interface, etherType int, filter []bpf.RawInstruction) (net.PacketConn, error) {
	return packet.Listen(i, packet.Raw, etherType, &packet.Config{Filter: filter})
}

// socket sends and receives on an interface. A task of its own reads it.
type socket struct {
	Interface
	conn   net.PacketConn
	cancel context.CancelFunc
	done   chan struct{}
}

// event is an answer that a socket received, or why it will receive no more.
type event struct {
	socket *socket
	answer answer
	err    error
}

func openSocket(ctx context.Context, n Network, i Interface, heard chan<- event) (*socket, error) {
	raw, err := bpf.Assemble(filter(i.HardwareAddr))
	if err != nil {
		return nil, fmt.Errorf("assemble the filter of interface %q: %w", i.Name, err)
	}
	conn, err := n.Listen(&i.Interface, unix.ETH_P_IP, raw)
	if err != nil {
		return nil, fmt.Errorf("open a packet socket on interface %q: %w", i.Name, err)
	}
	ctx, cancel := context.WithCancel(ctx)
	s := &socket{Interface: i, conn: conn, cancel: cancel, done: make(chan struct{})}
	go s.read(ctx, heard) // close waits for it
	return s, nil
}

// replacedBy returns why the socket cannot be used with the interface as it is now.
func (s *socket) replacedBy(i Interface) error {
	if i.Index != s.Index || !slices.Equal(i.HardwareAddr, s.HardwareAddr) {
		return fmt.Errorf("interface %q was replaced or has another hardware address", s.Name)
	}
	return i.usable(s.Name)
}

// read reports answers until ctx or the socket ends.
func (s *socket) read(ctx context.Context, heard chan<- event) {
	defer close(s.done)
	buf := make([]byte, 14+max(s.MTU, 576)) // RFC 791: what every host accepts
	for {
		n, _, err := s.conn.ReadFrom(buf)
		e := event{socket: s, err: err}
		if err == nil {
			var ok bool
			if e.answer, ok = parse(buf[:n]); !ok || !bytes.Equal(e.answer.hardware[:], s.HardwareAddr) {
				continue
			}
		}
		select {
		case heard <- e:
		case <-ctx.Done():
			return
		}
		if err != nil {
			return
		}
	}
}

// send sends a message in a frame of its own.
func (s *socket) send(m *message) error {
	frame, err := m.frame(s.HardwareAddr)
	if err != nil {
		return err
	}
	_ = s.conn.SetWriteDeadline(time.Now().Add(sendTime))
	_, err = s.conn.WriteTo(frame, &packet.Addr{HardwareAddr: frame[:6]})
	if errors.Is(err, unix.ENOBUFS) {
		return nil // a full queue, which is a loss like any other
	}
	return err
}

// close closes the socket and waits for the reader.
func (s *socket) close() {
	s.cancel()
	_ = s.conn.Close()
	<-s.done
}

// filter passes DHCP answers to this hardware address, and keeps all other
// traffic of the node in the kernel.
func filter(self net.HardwareAddr) []bpf.Instruction {
	// Each test that fails jumps to the last instruction.
	tests := []struct {
		load bpf.Instruction
		cond bpf.JumpTest
		val  uint32
	}{
		// Neither frames between other hosts, which a promiscuous interface receives, nor
		// frames that this host sends (packet(7), sll_pkttype).
		{bpf.LoadExtension{Num: bpf.ExtType}, bpf.JumpLessThan, unix.PACKET_OTHERHOST},
		// A tagged frame is for the VLAN's interface.
		{bpf.LoadExtension{Num: bpf.ExtVLANTagPresent}, bpf.JumpEqual, 0},
		{bpf.LoadAbsolute{Off: offEtherType, Size: 2}, bpf.JumpEqual, unix.ETH_P_IP},
		{bpf.LoadAbsolute{Off: offIP + 9, Size: 1}, bpf.JumpEqual, unix.IPPROTO_UDP},
		{bpf.LoadAbsolute{Off: offIP + 6, Size: 2}, bpf.JumpBitsNotSet, fragmentBits},
	}
	relative := []struct { // to the end of the IP header
		off, size int
		val       uint32
	}{
		{offIP + 2, 2, clientPort},
		{offIP + udpLength, 1, bootReply},
		{offIP + udpLength + offHardwareAddr, 4, binary.BigEndian.Uint32(self[:4])},
		{offIP + udpLength + offHardwareAddr + 4, 2, uint32(binary.BigEndian.Uint16(self[4:]))},
	}
	var filter []bpf.Instruction
	left := 2*(len(tests)+len(relative)) + 2 // instructions until the one that drops
	jump := func(load bpf.Instruction, cond bpf.JumpTest, val uint32) {
		left -= 2
		filter = append(filter, load, bpf.JumpIf{Cond: cond, Val: val, SkipFalse: uint8(left)})
	}
	for _, t := range tests {
		jump(t.load, t.cond, t.val)
	}
	filter = append(filter, bpf.LoadMemShift{Off: offIP})
	left--
	for _, r := range relative {
		jump(bpf.LoadIndirect{Off: uint32(r.off), Size: r.size}, bpf.JumpEqual, r.val)
	}
	return append(filter, bpf.RetConstant{Val: 1 << 16}, bpf.RetConstant{Val: 0})
}
