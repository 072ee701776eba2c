package nodefacts

import (
	"context"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"

	"github.com/mdlayher/ethernet"
	"github.com/mdlayher/packet"
	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"

	"github.com/lodestone-lb/lodestone/pkg/diagnose"
)

// A connection from this node to a VIP does not reach the VIP's owner: this node's own kube-proxy sends it to
// an endpoint. So the probe writes the first packet of a connection directly onto the wire, to the owner's
// hardware address. If there is an answer, the probe resets the connection at once.

// firstPort and lastPort bound the source port: above those that Linux gives to
// connections (ip_local_port_range).
const firstPort, lastPort = 61001, 65535

// Flags of a TCP segment (RFC 9293 section 3.1).
const (
	flagSYN = 1 << 1
	flagRST = 1 << 2
)

// probePorts tries the ports of the VIPs for which one machine answers.
func (l *link) probePorts(ctx context.Context) {
	var tried []*diagnose.Trial
	for i := range l.trials {
		if t := &l.trials[i]; t.Port != 0 && len(t.Answers) == 1 {
			tried = append(tried, t)
		}
	}
	if len(tried) == 0 {
		return
	}
	if err := l.probePortsOf(ctx, tried); err != nil {
		for _, t := range tried {
			if t.Reply == "" {
				t.Error = err.Error()
			}
		}
		return
	}
	for _, t := range tried {
		if t.Reply == "" {
			t.Reply = diagnose.Silence
		}
	}
}

func (l *link) etherType() int {
	if l.v4 {
		return unix.ETH_P_IP
	}
	return unix.ETH_P_IPV6
}

func (l *link) probePortsOf(ctx context.Context, tried []*diagnose.Trial) error {
	port := uint16(firstPort + rand.N(lastPort-firstPort+1))
	filter, err := bpf.Assemble(repliesTo(port, l.v4))
	if err != nil {
		return fmt.Errorf("assemble a filter: %w", err)
	}
	conn, err := packet.Listen(l.device(), packet.Raw, l.etherType(), &packet.Config{Filter: filter})
	if err != nil {
		return fmt.Errorf("open a packet socket on %s: %w", l.Name, err)
	}
	defer conn.Close()
	p := portProbe{l, conn, port, rand.Uint32(), tried}
	return exchange(ctx, conn, conversation{due: p.due, send: p.open, receive: p.receive})
}

// portProbe tries TCP ports of VIPs: it sends a SYN to each, and resets what is accepted.
type portProbe struct {
	*link
	conn     *packet.Conn
	port     uint16 // the own one
	sequence uint32
	tried    []*diagnose.Trial
}

// due returns the VIPs that have not replied.
func (p *portProbe) due() (due []netip.Addr) {
	for _, t := range p.tried {
		if t.Reply == "" {
			due = append(due, t.Address)
		}
	}
	return due
}

// open sends the SYN to a VIP.
func (p *portProbe) open(a netip.Addr) error { return p.send(p.trial(a), p.sequence, flagSYN) }

// receive reads a segment, and records the reply in it, if it is one.
func (p *portProbe) receive() error {
	buf := make([]byte, 256)
	n, _, err := p.conn.ReadFrom(buf)
	if err != nil {
		return err //nolint:wrapcheck // exchange does
	}
	from, ack, flags, ok := parseSegment(buf[:n])
	t := p.trial(from.Addr())
	switch {
	case !ok || t == nil || t.Port != from.Port() || ack != p.sequence+1:
	case flags&flagRST != 0:
		t.Reply = diagnose.Refused
	case flags&flagSYN != 0:
		t.Reply = diagnose.Accepted
		return p.send(t, ack, flagRST)
	}
	return nil
}

// trial returns the trial of the VIP. Nil: there is none.
func (p *portProbe) trial(vip netip.Addr) *diagnose.Trial {
	for _, t := range p.tried {
		if t.Address == vip {
			return t
		}
	}
	return nil
}

// send sends a segment to the port of the trial.
func (p *portProbe) send(t *diagnose.Trial, sequence uint32, flags byte) error {
	to, err := net.ParseMAC(t.Answers[0])
	if err != nil {
		return err //nolint:wrapcheck // exchange does
	}
	etherType := p.etherType()
	from := netip.AddrPortFrom(p.source(t.Address), p.port)
	raw := append(append(append([]byte(nil), to...), p.HardwareAddr...), byte(etherType>>8), byte(etherType))
	raw = append(raw, segment(from, netip.AddrPortFrom(t.Address, t.Port), sequence, flags)...)
	_, err = p.conn.WriteTo(raw, &packet.Addr{HardwareAddr: to})
	return err //nolint:wrapcheck // exchange does
}

// repliesTo accepts TCP segments to the port.
func repliesTo(port uint16, v4 bool) []bpf.Instruction {
	protocol, toPort := []bpf.Instruction{bpf.LoadAbsolute{Off: 20, Size: 1}}, []bpf.Instruction{bpf.LoadAbsolute{Off: 56, Size: 2}}
	if v4 {
		protocol = []bpf.Instruction{bpf.LoadAbsolute{Off: 23, Size: 1}}
		toPort = []bpf.Instruction{bpf.LoadMemShift{Off: 14}, bpf.LoadIndirect{Off: 16, Size: 2}}
	}
	program := append(protocol, bpf.JumpIf{Cond: bpf.JumpNotEqual, Val: unix.IPPROTO_TCP, SkipTrue: uint8(len(toPort) + 2)})
	program = append(program, toPort...)
	return append(program,
		bpf.JumpIf{Cond: bpf.JumpNotEqual, Val: uint32(port), SkipTrue: 1},
		bpf.RetConstant{Val: 256},
		bpf.RetConstant{Val: 0},
	)
}

const (
	ipv4Header, ipv6Header, tcpHeader = 20, 40, 20
	hops                              = 64
)

// segment returns an IP packet with a TCP segment without data.
func segment(from, to netip.AddrPort, sequence uint32, flags byte) []byte {
	tcp := make([]byte, tcpHeader)
	binary.BigEndian.PutUint16(tcp, from.Port())
	binary.BigEndian.PutUint16(tcp[2:], to.Port())
	binary.BigEndian.PutUint32(tcp[4:], sequence)
	tcp[12], tcp[13] = tcpHeader/4<<4, flags
	binary.BigEndian.PutUint16(tcp[14:], 1024) // the window
	source, destination := from.Addr().AsSlice(), to.Addr().AsSlice()
	// RFC 9293 section 3.1 and RFC 8200 section 8.1: the pseudo-headers have the
	// same sum.
	binary.BigEndian.PutUint16(tcp[16:], checksum(unix.IPPROTO_TCP+tcpHeader, source, destination, tcp))
	var ip []byte
	if from.Addr().Is4() {
		ip = []byte{0x45, 0, 0, ipv4Header + tcpHeader, 0, 0, 0x40, 0, hops, unix.IPPROTO_TCP, 0, 0}
		binary.BigEndian.PutUint16(ip[10:], checksum(0, ip, source, destination))
	} else {
		ip = []byte{0x60, 0, 0, 0, 0, tcpHeader, unix.IPPROTO_TCP, hops}
	}
	return append(append(append(ip, source...), destination...), tcp...)
}

// checksum is the checksum of RFC 1071 over texts of even length.
func checksum(sum uint32, texts ...[]byte) uint16 {
	for _, text := range texts {
		for i := 0; i+1 < len(text); i += 2 {
			sum += uint32(binary.BigEndian.Uint16(text[i:]))
		}
	}
	for sum > 0xffff {
		sum = sum>>16 + sum&0xffff
	}
	return ^uint16(sum)
}

// parseSegment reads an Ethernet frame with a TCP segment: its sender, acknowledged number and flags.
func parseSegment(frame []byte) (from netip.AddrPort, ack uint32, flags byte, ok bool) {
	var f ethernet.Frame
	if f.UnmarshalBinary(frame) != nil {
		return
	}
	var source netip.Addr
	ip, size := f.Payload, 0
	switch {
	case f.EtherType == ethernet.EtherTypeIPv4 && len(ip) >= ipv4Header && ip[9] == unix.IPPROTO_TCP:
		source, size = netip.AddrFrom4([4]byte(ip[12:])), int(ip[0]&0xf)*4
	case f.EtherType == ethernet.EtherTypeIPv6 && len(ip) >= ipv6Header && ip[6] == unix.IPPROTO_TCP:
		source, size = netip.AddrFrom16([16]byte(ip[8:])), ipv6Header
	default:
		return
	}
	if size < ipv4Header || len(ip) < size+tcpHeader {
		return
	}
	tcp := ip[size:]
	return netip.AddrPortFrom(source, binary.BigEndian.Uint16(tcp)), binary.BigEndian.Uint32(tcp[8:]), tcp[13], true
}
