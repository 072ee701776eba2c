package wire

import (
	"encoding/binary"
	"net"
	"net/netip"

	"github.com/mdlayher/ethernet"
	ndppacket "github.com/mdlayher/ndp"
	"golang.org/x/net/bpf"
	"golang.org/x/net/ipv6"
	"golang.org/x/sys/unix"

	"github.com/lodestone-lb/lodestone/speaker/layer2/seal"
)

// NDP is the Neighbor Discovery Protocol (RFC 4861) on Ethernet.
type NDP struct{}

// Offsets in an Ethernet frame with a Neighbor Solicitation or Advertisement
// (RFC 8200 section 3, RFC 4861 sections 4.3 and 4.4). Packets with an extension
// header are ignored: nobody sends them, and a fragment must be ignored (RFC 6980
// section 5).
const (
	offIPv6        = 14
	offPayloadSize = 18
	offNextHeader  = 20
	offHopLimit    = 21
	offSource      = 22
	offDestination = 38
	offType        = 54
	offCode        = 55
	offFlags       = 58
	offTarget      = 62
	offOptions     = 78

	flagSolicited = 0x40
)

// optionSeal is the type of the option with a seal. It is a type for experiments (RFC 4727): hosts ignore
// options that they do not know (RFC 4861 section 4.6).
const optionSeal = 253

var (
	allNodes   = netip.MustParseAddr("ff02::1")
	allRouters = netip.MustParseAddr("ff02::2")
)

func (NDP) Family() string { return "IPv6" }

func (NDP) Socket(self MAC) (int, []bpf.Instruction) {
	return unix.ETH_P_IPV6, filter(self, offEtherSource, []test{
		{bpf.LoadAbsolute{Off: offEtherType, Size: 2}, bpf.JumpEqual, unix.ETH_P_IPV6},
		{bpf.LoadAbsolute{Off: offNextHeader, Size: 1}, bpf.JumpEqual, unix.IPPROTO_ICMPV6},
		{bpf.LoadAbsolute{Off: offHopLimit, Size: 1}, bpf.JumpEqual, ndppacket.HopLimit},
		{bpf.LoadAbsolute{Off: offType, Size: 1}, bpf.JumpGreaterOrEqual, uint32(ipv6.ICMPTypeNeighborSolicitation)},
		{bpf.LoadAbsolute{Off: offType, Size: 1}, bpf.JumpLessOrEqual, uint32(ipv6.ICMPTypeNeighborAdvertisement)},
		{bpf.LoadAbsolute{Off: offCode, Size: 1}, bpf.JumpEqual, 0},
	})
}

// Parse validates the packet by RFC 4861 sections 7.1.1 and 7.1.2, including the checksum, because the
// kernel has not checked it yet. It does not use the library, which refuses messages with options that
// have to be ignored.
func (NDP) Parse(frame []byte) (Message, bool) {
	payload, ok := icmpv6(frame)
	if !ok {
		return Message{}, false
	}
	m := Message{To: MAC(frame[:6]), From: MAC(frame[offEtherSource:offEtherType])}
	source, destination := addrAt(frame, offSource), addrAt(frame, offDestination)
	target := addrAt(frame, offTarget)
	if source.IsMulticast() || target.IsMulticast() {
		return Message{}, false
	}
	options := payload[offOptions-offType:]
	switch ipv6.ICMPType(frame[offType]) {
	case ipv6.ICMPTypeNeighborSolicitation:
		ok = m.solicit(source, destination, target, options)
	case ipv6.ICMPTypeNeighborAdvertisement:
		m.Claims = target
		_, ok = m.linkLayer(options, ndppacket.Target)
		m.Answers = frame[offFlags]&flagSolicited != 0
		ok = ok && !(destination.IsMulticast() && m.Answers)
	default:
		ok = false
	}
	// An answer to a group address would go to everybody.
	return m, ok && !m.From.Group() && m.From != (MAC{})
}

// solicit reads a solicitation.
func (m *Message) solicit(source, destination, target netip.Addr, options []byte) bool {
	m.Asks = target
	given, ok := m.linkLayer(options, ndppacket.Source)
	if source.IsUnspecified() { // duplicate address detection
		m.Takes = true
		return ok && !given && destination == SolicitedNode(target)
	}
	m.Claims = source
	return ok && (destination == target || destination == SolicitedNode(target))
}

// linkLayer reads the options: the link-layer address of that direction, which becomes the sender's, and the
// seal. given is set if there is such an address, and ok is not set if an option has a wrong length.
func (m *Message) linkLayer(options []byte, d ndppacket.Direction) (given, ok bool) {
	for len(options) > 0 {
		if len(options) < 8 || options[1] == 0 || len(options) < 8*int(options[1]) {
			return false, false
		}
		size := 8 * int(options[1])
		if options[0] == byte(d) && !given {
			if size != 8 { // RFC 2464 section 6
				return false, false
			}
			given, m.From = true, MAC(options[2:8])
		}
		if options[0] == optionSeal && size == 2+seal.Size {
			m.Seal, _ = seal.Find(options[2:size])
		}
		options = options[size:]
	}
	return given, true
}

// icmpv6 returns the ICMPv6 message in a frame. ok is not set if it does not come from a neighbour, is
// damaged, or is shorter than a Neighbor Solicitation.
func icmpv6(frame []byte) (payload []byte, ok bool) {
	if len(frame) < offOptions || binary.BigEndian.Uint16(frame[offEtherType:]) != unix.ETH_P_IPV6 || frame[offIPv6]>>4 != 6 ||
		frame[offNextHeader] != unix.IPPROTO_ICMPV6 || frame[offHopLimit] != ndppacket.HopLimit || frame[offCode] != 0 {
		return nil, false
	}
	size := int(binary.BigEndian.Uint16(frame[offPayloadSize:]))
	end := offType + size
	if end < offOptions || end > len(frame) {
		return nil, false
	}
	// The sum over pseudo-header and message, its own checksum included
	// (RFC 8200 section 8.1): source and destination lie before the message.
	sum := uint32(size + unix.IPPROTO_ICMPV6)
	for b := frame[offSource:end]; len(b) > 0; b = b[min(2, len(b)):] {
		sum += uint32(b[0]) << 8
		if len(b) > 1 {
			sum += uint32(b[1])
		}
	}
	for sum > 0xffff {
		sum = sum>>16 + sum&0xffff
	}
	return frame[offType:end], sum == 0xffff
}

func addrAt(frame []byte, offset int) netip.Addr {
	return netip.AddrFrom16([16]byte(frame[offset:]))
}

// Answer answers only to the sender of the request, and to all nodes if the sender has no address yet (RFC
// 4861 section 7.2.4). If a speaker probes, the frame goes only to that speaker, which reads it although
// the packet is for all nodes.
func (NDP) Answer(s Statement, m Message) []byte {
	switch {
	case !m.Probes():
		return s.advertise(m.Claims, m.From, ndppacket.NeighborAdvertisement{Solicited: true, Override: true})
	case m.Seal != (seal.Seal{}):
		return s.advertise(allNodes, m.From, ndppacket.NeighborAdvertisement{Override: true})
	}
	return s.advertise(allNodes, multicast(allNodes), ndppacket.NeighborAdvertisement{Override: true})
}

// Announce returns the advertisement that overrides what all nodes know (RFC 4861 section 7.2.6). For the
// first announcement it also returns the one from which routers learn the VIP before its first packet
// comes (RFC 9131 section 6.1.2).
func (NDP) Announce(s Statement, first bool) [][]byte {
	frames := [][]byte{s.advertise(allNodes, multicast(allNodes), ndppacket.NeighborAdvertisement{Override: true})}
	if first {
		frames = append(frames, s.advertise(allRouters, multicast(allRouters), ndppacket.NeighborAdvertisement{}))
	}
	return frames
}

// Probe returns the solicitation of duplicate address detection (RFC 4862
// section 5.4.2).
func (NDP) Probe(s Statement, to MAC) []byte {
	group := SolicitedNode(s.VIP)
	if to == (MAC{}) {
		to = multicast(group)
	}
	ns := ndppacket.NeighborSolicitation{TargetAddress: s.VIP, Options: []ndppacket.Option{sealOption(s.Seal)}}
	return ndpFrame(to, s.Self, netip.IPv6Unspecified(), group, &ns)
}

// advertise returns a frame that claims the VIP for s.Self. Its source is the VIP, as for a host that
// announces its own address. The router flag is not set: a VIP is no next hop.
func (s Statement) advertise(destination netip.Addr, to MAC, na ndppacket.NeighborAdvertisement) []byte {
	na.TargetAddress = s.VIP
	na.Options = []ndppacket.Option{&ndppacket.LinkLayerAddress{Direction: ndppacket.Target, Addr: net.HardwareAddr(s.Self[:])}}
	if s.Seal != (seal.Seal{}) {
		na.Options = append(na.Options, sealOption(s.Seal))
	}
	return ndpFrame(to, s.Self, s.VIP, destination, &na)
}

func sealOption(s seal.Seal) ndppacket.Option {
	return &ndppacket.RawOption{Type: optionSeal, Length: (2 + seal.Size) / 8, Value: s[:]}
}

func ndpFrame(to, from MAC, source, destination netip.Addr, m ndppacket.Message) []byte {
	payload, _ := ndppacket.MarshalMessageChecksum(m, source, destination) // never fails: the addresses are IPv6 and Ethernet
	packet := make([]byte, 0, offType-offIPv6+len(payload))
	packet = append(packet, 6<<4, 0, 0, 0)
	packet = binary.BigEndian.AppendUint16(packet, uint16(len(payload)))
	packet = append(packet, unix.IPPROTO_ICMPV6, ndppacket.HopLimit)
	packet = append(packet, source.AsSlice()...)
	packet = append(packet, destination.AsSlice()...)
	return ethernetFrame(to, from, ethernet.EtherTypeIPv6, append(packet, payload...))
}

// multicast returns the hardware address of a group (RFC 2464 section 7).
func multicast(group netip.Addr) MAC {
	a := group.As16()
	return MAC{0x33, 0x33, a[12], a[13], a[14], a[15]}
}

// SolicitedNode returns the group in which hosts ask for an IPv6 address
// (RFC 4291 section 2.7.1).
func SolicitedNode(a netip.Addr) netip.Addr {
	group, _ := ndppacket.SolicitedNodeMulticast(a) // fails only for IPv4
	return group
}
