// Package wire reads and writes ARP and NDP frames on Ethernet. It decides nothing.
//
//	wire.go  Protocol, Message and Statement, and the filter of the sockets
//	arp.go   IPv4
//	ndp.go   IPv6
package wire

import (
	"encoding/binary"
	"net"
	"net/netip"

	"github.com/mdlayher/ethernet"
	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"

	"github.com/lodestone-lb/lodestone/speaker/layer2/seal"
)

// Protocol is ARP or NDP.
type Protocol interface {
	// Family returns the family of its addresses as status and metrics name it: IPv4 or IPv6.
	Family() string
	// Socket returns the EtherType and the kernel filter of a socket whose
	// own address is self.
	Socket(self MAC) (etherType int, filter []bpf.Instruction)
	// Parse reads a frame. It returns false if the frame breaks the protocol.
	Parse(frame []byte) (Message, bool)
	// Answer returns the frame that answers m, which asks for a VIP.
	Answer(s Statement, m Message) []byte
	// Announce returns the frames that announce a VIP to all neighbours. first is set for the first
	// announcement after the node became the owner.
	Announce(s Statement, first bool) [][]byte
	// Probe returns the frame that asks who has a VIP, and claims nothing. It goes to one host, or to all
	// hosts if to is zero.
	Probe(s Statement, to MAC) []byte
}

// Of returns the protocol that announces a VIP.
func Of(vip netip.Addr) Protocol {
	if vip.Is4() {
		return ARP{}
	}
	return NDP{}
}

// Statement is a node's claim of a VIP, or its question for one. The seal may be zero.
type Statement struct {
	Self MAC
	VIP  netip.Addr
	Seal seal.Seal
}

// Message is the content of a packet.
type Message struct {
	// To is the destination of the frame. From is the hardware address that the sender claims to have.
	To, From MAC
	// Asks is the address for which the sender asks. Invalid: none.
	Asks netip.Addr
	// Claims is the address that the sender claims to have. Invalid: none.
	Claims netip.Addr
	// Takes is set if the sender was assigned the address that it asks for, and will use it if nobody
	// answers.
	Takes bool
	// Answers is set if the message answers a request that came from this node alone.
	Answers bool
	// Seal is the unverified seal of a speaker. Zero: none.
	Seal seal.Seal
}

// IsFor reports whether the message is for the machine, or for all.
func (m Message) IsFor(self MAC) bool { return m.To.Group() || m.To == self }

// Probes reports whether the sender asks without claiming anything: a speaker or another host that checks
// whether the address is in use (RFC 5227 section 1.1, RFC 4862 section 5.4.2).
func (m Message) Probes() bool { return m.Asks.IsValid() && !m.Claims.IsValid() }

// MAC is an EUI-48 hardware address, comparable.
type MAC [6]byte

// Broadcast is the address of all hosts.
var Broadcast = MAC{0xff, 0xff, 0xff, 0xff, 0xff, 0xff}

// Hardware returns the address as a MAC: zero if it is of another kind.
func Hardware(a net.HardwareAddr) (m MAC) {
	if len(a) == len(m) {
		copy(m[:], a)
	}
	return m
}

// Group reports whether the address is a multicast or the broadcast address.
func (m MAC) Group() bool { return m[0]&1 != 0 }

func (m MAC) String() string { return net.HardwareAddr(m[:]).String() }

// Offsets in an Ethernet frame.
const (
	offEtherSource = 6
	offEtherType   = 12
)

// test is one condition of a filter: it compares what it loads with val.
type test struct {
	load bpf.Instruction
	cond bpf.JumpTest
	val  uint32
}

// filter accepts frames that pass all tests, came from the wire, are of no VLAN, and do not have self at the
// offset sender.
func filter(self MAC, sender uint32, tests []test) []bpf.Instruction {
	tests = append([]test{
		// A frame of a VLAN is for the VLAN's interface. VLAN 0 is none: such a tag has only a priority.
		{bpf.LoadExtension{Num: bpf.ExtVLANTag}, bpf.JumpBitsNotSet, 0xfff},
		// Neither frames between other hosts, which a promiscuous interface receives, nor
		// frames that this host sends (packet(7), sll_pkttype).
		{bpf.LoadExtension{Num: bpf.ExtType}, bpf.JumpLessThan, unix.PACKET_OTHERHOST},
	}, tests...)
	// Without a tag the first test is skipped: some kernels load the tag that the frame had.
	program := []bpf.Instruction{
		bpf.LoadExtension{Num: bpf.ExtVLANTagPresent},
		bpf.JumpIf{Cond: bpf.JumpEqual, Val: 0, SkipTrue: 2},
	}
	for i, t := range tests {
		// Each test that fails jumps to the last instruction: over the rest of
		// the tests, the four that compare the sender and the one that accepts.
		drop := uint8(2*(len(tests)-1-i) + 5)
		program = append(program, t.load, bpf.JumpIf{Cond: t.cond, Val: t.val, SkipFalse: drop})
	}
	return append(program,
		bpf.LoadAbsolute{Off: sender, Size: 4},
		bpf.JumpIf{Cond: bpf.JumpNotEqual, Val: binary.BigEndian.Uint32(self[:4]), SkipTrue: 2},
		bpf.LoadAbsolute{Off: sender + 4, Size: 2},
		bpf.JumpIf{Cond: bpf.JumpEqual, Val: uint32(binary.BigEndian.Uint16(self[4:])), SkipTrue: 1},
		bpf.RetConstant{Val: 1 << 16},
		bpf.RetConstant{Val: 0},
	)
}

// ethernetFrame returns an untagged frame.
func ethernetFrame(to, from MAC, etherType ethernet.EtherType, payload []byte) []byte {
	f := ethernet.Frame{
		Destination: net.HardwareAddr(to[:]),
		Source:      net.HardwareAddr(from[:]),
		EtherType:   etherType,
		Payload:     payload,
	}
	frame, _ := f.MarshalBinary() // never fails: there is no VLAN tag
	return frame
}
