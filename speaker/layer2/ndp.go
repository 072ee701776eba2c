package layer2

import (
	"encoding/binary"
	"fmt"
	"net"
	"net/netip"
	"slices"

	"github.com/mdlayher/ethernet"
	ndppacket "github.com/mdlayher/ndp"
	"golang.org/x/net/bpf"
	"golang.org/x/net/ipv6"
	"golang.org/x/sys/unix"

	"github.com/lodestone-lb/lodestone/speaker/layer2/seal"
	"github.com/lodestone-lb/lodestone/speaker/netstate"
)

// ndp is the Neighbor Discovery Protocol (RFC 4861) on Ethernet.
type ndp struct{}

// Offsets in an Ethernet frame with a Neighbor Solicitation or Advertisement
// (RFC 8200 section 3, RFC 4861 sections 4.3 and 4.4). There is no extension
// header between: nobody sends one, and a fragment must be ignored (RFC 6980
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

// optionSeal carries a seal: an option type for experiments (RFC 4727), which
// hosts ignore as they do all that they do not know (RFC 4861 section 4.6).
const optionSeal = 253

var (
	allNodes   = netip.MustParseAddr("ff02::1")
	allRouters = netip.MustParseAddr("ff02::2")
)

func (ndp) family() string { return "IPv6" }

// fit demands a link-local address. The kernel asks its neighbours from it
// when a packet's own source is on no interface, as a VIP is not: without one
// it takes what clients send, but cannot find the way back to them.
func (ndp) fit(i netstate.Interface) error {
	var tentative netip.Addr
	for _, p := range i.Addrs {
		switch {
		case !p.Addr().Is6() || !p.Addr().IsLinkLocalUnicast():
		case slices.Contains(i.Tentative, p):
			tentative = p.Addr()
		default:
			return nil
		}
	}
	if tentative.IsValid() {
		return fmt.Errorf("%w: %s is tentative, which passes in seconds unless `ip -6 addr show dev %s` says dadfailed: "+
			"then another host has it", errNoLinkLocal, tentative, i.Name)
	}
	return fmt.Errorf("%w: is IPv6 switched off by the sysctl net.ipv6.conf.%s.disable_ipv6, or addr_gen_mode none?", errNoLinkLocal, i.Name)
}

func (ndp) socket(self mac) (int, []bpf.Instruction) {
	return unix.ETH_P_IPV6, filter(self, offEtherSource, []test{
		{bpf.LoadAbsolute{Off: offEtherType, Size: 2}, bpf.JumpEqual, unix.ETH_P_IPV6},
		{bpf.LoadAbsolute{Off: offNextHeader, Size: 1}, bpf.JumpEqual, unix.IPPROTO_ICMPV6},
		{bpf.LoadAbsolute{Off: offHopLimit, Size: 1}, bpf.JumpEqual, ndppacket.HopLimit},
		{bpf.LoadAbsolute{Off: offType, Size: 1}, bpf.JumpGreaterOrEqual, uint32(ipv6.ICMPTypeNeighborSolicitation)},
		{bpf.LoadAbsolute{Off: offType, Size: 1}, bpf.JumpLessOrEqual, uint32(ipv6.ICMPTypeNeighborAdvertisement)},
		{bpf.LoadAbsolute{Off: offCode, Size: 1}, bpf.JumpEqual, 0},
	})
}

// parse validates as RFC 4861 sections 7.1.1 and 7.1.2 demand, down to the
// checksum, since the kernel has not seen the packet yet. It reads the packet
// itself: the library refuses a message for an option that is to be ignored.
func (n ndp) parse(frame []byte) (message, bool) {
	payload, ok := icmpv6(frame)
	if !ok {
		return message{}, false
	}
	m := message{to: mac(frame[:6]), from: mac(frame[offEtherSource:offEtherType])}
	source, destination := addrAt(frame, offSource), addrAt(frame, offDestination)
	target := addrAt(frame, offTarget)
	if source.IsMulticast() || target.IsMulticast() {
		return message{}, false
	}
	options := payload[offOptions-offType:]
	switch ipv6.ICMPType(frame[offType]) {
	case ipv6.ICMPTypeNeighborSolicitation:
		ok = m.solicit(source, destination, target, options)
	case ipv6.ICMPTypeNeighborAdvertisement:
		m.claims = target
		_, ok = m.linkLayer(options, ndppacket.Target)
		m.answers = frame[offFlags]&flagSolicited != 0
		ok = ok && !(destination.IsMulticast() && m.answers)
	default:
		ok = false
	}
	// Nobody's hardware address: an answer would go to everybody.
	return m, ok && !m.from.group() && m.from != (mac{})
}

// solicit reads a solicitation.
func (m *message) solicit(source, destination, target netip.Addr, options []byte) bool {
	m.asks = target
	given, ok := m.linkLayer(options, ndppacket.Source)
	if source.IsUnspecified() { // duplicate address detection
		m.takes = true
		return ok && !given && destination == solicitedNode(target)
	}
	m.claims = source
	return ok && (destination == target || destination == solicitedNode(target))
}

// linkLayer makes the address in the option of that direction, if there is
// one, the sender's, and takes the seal. ok is not set if some option has a
// wrong length.
func (m *message) linkLayer(options []byte, d ndppacket.Direction) (given, ok bool) {
	for len(options) > 0 {
		if len(options) < 8 || options[1] == 0 || len(options) < 8*int(options[1]) {
			return false, false
		}
		size := 8 * int(options[1])
		if options[0] == byte(d) && !given {
			if size != 8 { // RFC 2464 section 6
				return false, false
			}
			given, m.from = true, mac(options[2:8])
		}
		if options[0] == optionSeal && size == 2+seal.Size {
			m.seal, _ = seal.Find(options[2:size])
		}
		options = options[size:]
	}
	return given, true
}

// icmpv6 returns the ICMPv6 message in a frame, at least as long as a
// Neighbor Solicitation, if it came from a neighbour and is intact.
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

// answer answers to who asked alone, and to all nodes if that one has no
// address yet (RFC 4861 section 7.2.4). A speaker that probes is answered
// alone too: it looks at the packet, whomever that is for.
func (ndp) answer(s statement, m message) []byte {
	switch {
	case !m.probes():
		return s.advertise(m.claims, m.from, ndppacket.NeighborAdvertisement{Solicited: true, Override: true})
	case m.seal != (seal.Seal{}):
		return s.advertise(allNodes, m.from, ndppacket.NeighborAdvertisement{Override: true})
	}
	return s.advertise(allNodes, multicast(allNodes), ndppacket.NeighborAdvertisement{Override: true})
}

// announce returns the advertisement that overrides what all nodes know
// (RFC 4861 section 7.2.6), and for the first time the one that makes routers
// know the VIP before the first packet for it comes (RFC 9131 section 6.1.2).
func (ndp) announce(s statement, first bool) [][]byte {
	frames := [][]byte{s.advertise(allNodes, multicast(allNodes), ndppacket.NeighborAdvertisement{Override: true})}
	if first {
		frames = append(frames, s.advertise(allRouters, multicast(allRouters), ndppacket.NeighborAdvertisement{}))
	}
	return frames
}

// probe returns the solicitation of duplicate address detection (RFC 4862
// section 5.4.2).
func (ndp) probe(s statement, to mac) []byte {
	group := solicitedNode(s.vip)
	if to == (mac{}) {
		to = multicast(group)
	}
	ns := ndppacket.NeighborSolicitation{TargetAddress: s.vip, Options: []ndppacket.Option{sealOption(s.seal)}}
	return ndpFrame(to, s.self, netip.IPv6Unspecified(), group, &ns)
}

// advertise returns a frame that says that self has the VIP. Its source is
// the VIP, as that of a host that speaks of its own address. The router flag
// is not set: nobody shall send through a VIP.
func (s statement) advertise(destination netip.Addr, to mac, na ndppacket.NeighborAdvertisement) []byte {
	na.TargetAddress = s.vip
	na.Options = []ndppacket.Option{&ndppacket.LinkLayerAddress{Direction: ndppacket.Target, Addr: net.HardwareAddr(s.self[:])}}
	if s.seal != (seal.Seal{}) {
		na.Options = append(na.Options, sealOption(s.seal))
	}
	return ndpFrame(to, s.self, s.vip, destination, &na)
}

func sealOption(s seal.Seal) ndppacket.Option {
	return &ndppacket.RawOption{Type: optionSeal, Length: (2 + seal.Size) / 8, Value: s[:]}
}

func ndpFrame(to, from mac, source, destination netip.Addr, m ndppacket.Message) []byte {
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
func multicast(group netip.Addr) mac {
	a := group.As16()
	return mac{0x33, 0x33, a[12], a[13], a[14], a[15]}
}
