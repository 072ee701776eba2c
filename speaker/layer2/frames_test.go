package layer2

import (
	"net"
	"net/netip"
	"time"

	arppacket "github.com/mdlayher/arp"
	"github.com/mdlayher/ethernet"
	ndppacket "github.com/mdlayher/ndp"
	"golang.org/x/sys/unix"

	"github.com/lodestone-lb/lodestone/speaker/layer2/seal"
	"github.com/lodestone-lb/lodestone/speaker/layer2/wire"
)

type (
	mac       = wire.MAC
	statement = wire.Statement
)

var (
	broadcast  = wire.Broadcast
	allNodes   = netip.MustParseAddr("ff02::1")
	allRouters = netip.MustParseAddr("ff02::2")
)

// Offsets in frames, as the RFCs have them (826; 8200 section 3, 4861 section 4.3).
const (
	offEtherSource = 6
	offEtherType   = 12

	offFormat    = 14
	offLengths   = 18
	offOperation = 20
	offSender    = 22
	arpLength    = 42

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
)

// What the segment's machine promises about time and pace.
const (
	beaconInterval = 400 * time.Millisecond
	probeWait      = 200 * time.Millisecond
	pollInterval   = 500 * time.Millisecond
	maxMissed      = 2
	correction     = 400 * time.Millisecond
	lag            = 5 * time.Second
	deafAfter      = time.Second
	probes         = 3
	recheck        = 10 * time.Second
	hurriedRecheck = time.Second
	nonceLife      = 2 * time.Second
	challengeWait  = pollInterval

	challengesPerSecond = 2_000
	framesPerSecond     = 10_000
	burstFrames         = 10
)

func hardwareAddr(a net.HardwareAddr) mac { return wire.Hardware(a) }

func solicitedNode(a netip.Addr) netip.Addr { return wire.SolicitedNode(a) }

// multicast returns the hardware address of a group (RFC 2464 section 7).
func multicast(group netip.Addr) mac {
	a := group.As16()
	return mac{0x33, 0x33, a[12], a[13], a[14], a[15]}
}

// arpFrame returns a packet from sender about itself and target.
func arpFrame(op arppacket.Operation, to, sender mac, senderIP netip.Addr, target mac, targetIP netip.Addr) []byte {
	p := arppacket.Packet{HardwareType: 1, ProtocolType: unix.ETH_P_IP, HardwareAddrLength: 6, IPLength: 4, Operation: op,
		SenderHardwareAddr: sender[:], SenderIP: senderIP, TargetHardwareAddr: target[:], TargetIP: targetIP}
	payload, err := p.MarshalBinary()
	if err != nil {
		panic(err)
	}
	return ethernetFrame(to, sender, ethernet.EtherTypeARP, payload)
}

// ndpFrame returns a packet of NDP.
func ndpFrame(to, from mac, source, destination netip.Addr, m ndppacket.Message) []byte {
	payload, err := ndppacket.MarshalMessageChecksum(m, source, destination)
	if err != nil {
		panic(err)
	}
	header := []byte{6 << 4, 0, 0, 0, byte(len(payload) >> 8), byte(len(payload)), unix.IPPROTO_ICMPV6, ndppacket.HopLimit}
	for _, a := range []netip.Addr{source, destination} {
		header = append(header, a.AsSlice()...)
	}
	return ethernetFrame(to, from, ethernet.EtherTypeIPv6, append(header, payload...))
}

func ethernetFrame(to, from mac, etherType ethernet.EtherType, payload []byte) []byte {
	f := ethernet.Frame{Destination: to[:], Source: from[:], EtherType: etherType, Payload: payload}
	b, err := f.MarshalBinary()
	if err != nil {
		panic(err)
	}
	return b
}

// sealOption is the option that carries a seal: a type for experiments (RFC 4727).
func sealOption(s seal.Seal) ndppacket.Option {
	return &ndppacket.RawOption{Type: 253, Length: 2, Value: s[:]}
}

func addrAt(frame []byte, offset int) netip.Addr { return netip.AddrFrom16([16]byte(frame[offset:])) }
