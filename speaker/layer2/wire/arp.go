package wire

import (
	"encoding/binary"
	"net"
	"net/netip"

	arppacket "github.com/mdlayher/arp"
	"github.com/mdlayher/ethernet"
	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"

	"github.com/lodestone-lb/lodestone/speaker/layer2/seal"
)

// ARP is the Address Resolution Protocol (RFC 826) for IPv4 on Ethernet.
type ARP struct{}

// Offsets in an ARP frame on Ethernet (RFC 826, "Packet format").
const (
	offFormat    = 14 // hardware and protocol type
	offLengths   = 18
	offOperation = 20
	offSender    = 22
	arpLength    = 42

	formatEthernetIPv4  = 1<<16 | unix.ETH_P_IP
	lengthsEthernetIPv4 = 6<<8 | 4
)

func (ARP) Family() string { return "IPv4" }

func (ARP) Socket(self MAC) (int, []bpf.Instruction) {
	return unix.ETH_P_ARP, filter(self, offSender, []test{
		{bpf.LoadAbsolute{Off: offEtherType, Size: 2}, bpf.JumpEqual, unix.ETH_P_ARP},
		{bpf.LoadAbsolute{Off: offFormat, Size: 4}, bpf.JumpEqual, formatEthernetIPv4},
		{bpf.LoadAbsolute{Off: offLengths, Size: 2}, bpf.JumpEqual, lengthsEthernetIPv4},
		{bpf.LoadAbsolute{Off: offOperation, Size: 2}, bpf.JumpGreaterOrEqual, uint32(arppacket.OperationRequest)},
		{bpf.LoadAbsolute{Off: offOperation, Size: 2}, bpf.JumpLessOrEqual, uint32(arppacket.OperationReply)},
	})
}

func (ARP) Parse(frame []byte) (Message, bool) {
	var f ethernet.Frame
	var p arppacket.Packet
	if len(frame) < arpLength || f.UnmarshalBinary(frame) != nil || f.EtherType != ethernet.EtherTypeARP {
		return Message{}, false
	}
	// The library takes other lengths and returns other kinds of addresses.
	if len(f.Payload) < 8 || binary.BigEndian.Uint32(f.Payload) != formatEthernetIPv4 ||
		binary.BigEndian.Uint16(f.Payload[4:]) != lengthsEthernetIPv4 || p.UnmarshalBinary(f.Payload) != nil {
		return Message{}, false
	}
	m := Message{To: Hardware(f.Destination), From: Hardware(p.SenderHardwareAddr)}
	if m.From.Group() || m.From == (MAC{}) {
		return Message{}, false // an answer to such an address would go to everybody
	}
	m.Seal, _ = seal.Find(frame[arpLength:])
	if !p.SenderIP.IsUnspecified() { // a probe claims nothing (RFC 5227 section 1.1)
		m.Claims = p.SenderIP
	}
	switch p.Operation {
	case arppacket.OperationRequest:
		m.Asks = p.TargetIP
		return m, true
	case arppacket.OperationReply:
		// An answer to a probe is for 0.0.0.0, and an announcement for the address itself.
		m.Answers = !m.To.Group() && !p.TargetIP.IsUnspecified() && p.TargetIP != p.SenderIP
		return m, true
	}
	return Message{}, false
}

// Answer answers only to the sender of the request, with swapped addresses (RFC 826, "Packet Reception").
func (ARP) Answer(s Statement, m Message) []byte {
	to := m.Claims
	if m.Probes() {
		to = netip.IPv4Unspecified()
	}
	return s.sealed(arpFrame(arppacket.OperationReply, m.From, s.Self, s.VIP, m.From, to))
}

// Announce returns both forms of a gratuitous announcement, because some hosts accept only one of them: the
// request without a target hardware address (RFC 5227 section 3), and the reply, whose target hardware
// address has to be the sender's (RFC 5944 section 4.6; Linux demands it).
func (ARP) Announce(s Statement, _ bool) [][]byte {
	return [][]byte{
		s.sealed(arpFrame(arppacket.OperationRequest, Broadcast, s.Self, s.VIP, MAC{}, s.VIP)),
		s.sealed(arpFrame(arppacket.OperationReply, Broadcast, s.Self, s.VIP, s.Self, s.VIP)),
	}
}

// Probe returns an ARP probe (RFC 5227 section 2.1.1).
func (ARP) Probe(s Statement, to MAC) []byte {
	if to == (MAC{}) {
		to = Broadcast
	}
	return s.sealed(arpFrame(arppacket.OperationRequest, to, s.Self, netip.IPv4Unspecified(), MAC{}, s.VIP))
}

// sealed puts the seal into the padding of an ARP frame.
func (s Statement) sealed(frame []byte) []byte {
	copy(frame[arpLength:], s.Seal[:])
	return frame
}

// arpFrame returns a packet from sender about itself and target.
func arpFrame(op arppacket.Operation, to, sender MAC, senderIP netip.Addr, target MAC, targetIP netip.Addr) []byte {
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
	return ethernetFrame(to, sender, ethernet.EtherTypeARP, payload)
}
