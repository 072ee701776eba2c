package layer2

import (
	"encoding/binary"
	"net"
	"net/netip"

	arppacket "github.com/mdlayher/arp"
	"github.com/mdlayher/ethernet"
	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"
)

// protocol is what neighbour protocols differ in. ARP is one, NDP will be the
// other.
type protocol interface {
	// socket returns the EtherType and the kernel filter of a socket whose
	// own address is self.
	socket(self mac) (etherType int, filter []bpf.Instruction)
	// parse reads a frame.
	parse(frame []byte) (message, bool)
	// answer returns the frame that answers m, which asks for a VIP.
	answer(self mac, m message) []byte
	// announce returns the frames that tell everybody where a VIP is.
	announce(self mac, vip netip.Addr) [][]byte
}

// message is what a packet of a neighbour protocol says.
type message struct {
	// to is the destination of the frame, from the address that the sender
	// says is its own.
	to, from mac
	// asks is the address whose owner shall answer. Invalid: it asks nothing.
	asks netip.Addr
	// claims is the address that the sender says it has. Invalid: it claims
	// nothing.
	claims netip.Addr
}

// protocolOf returns the protocol that announces a VIP. Nil: none does yet.
func protocolOf(vip netip.Addr) protocol {
	if vip.Is4() {
		return arp{}
	}
	return nil
}

// arp is the Address Resolution Protocol (RFC 826) for IPv4 on Ethernet.
type arp struct{}

// Offsets in an ARP frame on Ethernet (RFC 826, "Packet format").
const (
	offEtherType = 12
	offFormat    = 14 // hardware and protocol type
	offLengths   = 18
	offOperation = 20
	offSender    = 22
	arpLength    = 42

	formatEthernetIPv4  = 1<<16 | unix.ETH_P_IP
	lengthsEthernetIPv4 = 6<<8 | 4
)

func (arp) socket(self mac) (int, []bpf.Instruction) {
	// Each test that fails jumps to the last instruction.
	tests := []struct {
		load bpf.Instruction
		cond bpf.JumpTest
		val  uint32
	}{
		// Not what others on the wire say to others, which a promiscuous
		// interface shows, nor what this host sends (packet(7), sll_pkttype).
		{bpf.LoadExtension{Num: bpf.ExtType}, bpf.JumpLessThan, unix.PACKET_OTHERHOST},
		// A tagged frame is for the VLAN's interface.
		{bpf.LoadExtension{Num: bpf.ExtVLANTagPresent}, bpf.JumpEqual, 0},
		{bpf.LoadAbsolute{Off: offEtherType, Size: 2}, bpf.JumpEqual, unix.ETH_P_ARP},
		{bpf.LoadAbsolute{Off: offFormat, Size: 4}, bpf.JumpEqual, formatEthernetIPv4},
		{bpf.LoadAbsolute{Off: offLengths, Size: 2}, bpf.JumpEqual, lengthsEthernetIPv4},
		{bpf.LoadAbsolute{Off: offOperation, Size: 2}, bpf.JumpGreaterOrEqual, uint32(arppacket.OperationRequest)},
		{bpf.LoadAbsolute{Off: offOperation, Size: 2}, bpf.JumpLessOrEqual, uint32(arppacket.OperationReply)},
	}
	var filter []bpf.Instruction
	for i, t := range tests {
		// Over the rest of the tests, the four that compare the sender and
		// the one that accepts.
		drop := uint8(2*(len(tests)-1-i) + 5)
		filter = append(filter, t.load, bpf.JumpIf{Cond: t.cond, Val: t.val, SkipFalse: drop})
	}
	return unix.ETH_P_ARP, append(filter,
		bpf.LoadAbsolute{Off: offSender, Size: 4},
		bpf.JumpIf{Cond: bpf.JumpNotEqual, Val: binary.BigEndian.Uint32(self[:4]), SkipTrue: 2},
		bpf.LoadAbsolute{Off: offSender + 4, Size: 2},
		bpf.JumpIf{Cond: bpf.JumpEqual, Val: uint32(binary.BigEndian.Uint16(self[4:])), SkipTrue: 1},
		bpf.RetConstant{Val: 1 << 16},
		bpf.RetConstant{Val: 0},
	)
}

func (arp) parse(frame []byte) (message, bool) {
	var f ethernet.Frame
	var p arppacket.Packet
	if len(frame) < arpLength || f.UnmarshalBinary(frame) != nil || f.EtherType != ethernet.EtherTypeARP {
		return message{}, false
	}
	// The library takes other lengths and returns other kinds of addresses.
	if len(f.Payload) < 8 || binary.BigEndian.Uint32(f.Payload) != formatEthernetIPv4 ||
		binary.BigEndian.Uint16(f.Payload[4:]) != lengthsEthernetIPv4 || p.UnmarshalBinary(f.Payload) != nil {
		return message{}, false
	}
	m := message{to: hardwareAddr(f.Destination), from: hardwareAddr(p.SenderHardwareAddr)}
	if m.from.group() || m.from == (mac{}) {
		return message{}, false // nobody's address: an answer would go to everybody
	}
	if !p.SenderIP.IsUnspecified() { // a probe claims nothing (RFC 5227 section 1.1)
		m.claims = p.SenderIP
	}
	switch p.Operation {
	case arppacket.OperationRequest:
		m.asks = p.TargetIP
		return m, true
	case arppacket.OperationReply:
		return m, true
	}
	return message{}, false
}

// answer answers to who asked alone, swapping the addresses (RFC 826, "Packet
// Reception").
func (arp) answer(self mac, m message) []byte {
	to := m.claims
	if !to.IsValid() {
		to = netip.IPv4Unspecified() // a probe
	}
	return arpFrame(arppacket.OperationReply, m.from, self, m.asks, m.from, to)
}

// announce returns both forms of a gratuitous announcement, because some
// hosts take only the one and some only the other: the request with no target
// hardware address (RFC 5227 section 3), and the reply, whose target hardware
// address is to equal the sender's (RFC 5944 section 4.6; Linux demands it).
func (arp) announce(self mac, vip netip.Addr) [][]byte {
	return [][]byte{
		arpFrame(arppacket.OperationRequest, broadcast, self, vip, mac{}, vip),
		arpFrame(arppacket.OperationReply, broadcast, self, vip, self, vip),
	}
}

// arpFrame returns a packet from sender about itself and target.
func arpFrame(op arppacket.Operation, to, sender mac, senderIP netip.Addr, target mac, targetIP netip.Addr) []byte {
	p := arppacket.Packet{
		HardwareType:       1, // Ethernet
		ProtocolType:       unix.ETH_P_IP,
		HardwareAddrLength: 6,
		IPLength:           4,
		Operation:          op,
		SenderHardwareAddr: net.HardwareAddr(sender[:]),
		SenderIP:           senderIP,
		TargetHardwareAddr: net.HardwareAddr(target[:]),
		TargetIP:           targetIP,
	}
	payload, _ := p.MarshalBinary() // never fails: the lengths are right
	f := ethernet.Frame{
		Destination: net.HardwareAddr(to[:]),
		Source:      net.HardwareAddr(sender[:]),
		EtherType:   ethernet.EtherTypeARP,
		Payload:     payload,
	}
	frame, _ := f.MarshalBinary() // never fails: there is no VLAN tag
	return frame
}
