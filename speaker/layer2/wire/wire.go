// Package wire is how ARP and NDP look on Ethernet: frames in, messages out, and
// the other way round. It decides nothing.
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

// Protocol is what ARP and NDP differ in.
type Protocol interface {
	// Family is the one of its addresses, as status and metrics name it: IPv4 or IPv6.
	Family() string
	// Socket returns the EtherType and the kernel filter of a socket whose
	// own address is self.
	Socket(self MAC) (etherType int, filter []bpf.Instruction)
	// Parse reads a frame. It returns false if the frame breaks the protocol.
	Parse(frame []byte) (Message, bool)
	// Answer returns the frame that answers m, which asks for a VIP.
	Answer(s Statement, m Message) []byte
	// Announce returns the frames that announce to all neighbours where a VIP is. first
	// is set for the first ones of an ownership.
	Announce(s Statement, first bool) [][]byte
	// Probe returns the frame that asks who has a VIP, and claims nothing. It goes to
	// one host, or to all if to is zero.
	Probe(s Statement, to MAC) []byte
}

// Of returns the protocol that announces a VIP.
func Of(vip netip.Addr) Protocol {
	if vip.Is4() {
		return ARP{}
	}
	return NDP{}
}

// Statement is what a node says of a VIP: that it has it, or wants it. Without
// a seal it is what any host could say.
type Statement struct {
	Self MAC
	VIP  netip.Addr
	Seal seal.Seal
}

// Message is what a packet of a neighbour protocol says.
type Message struct {
	// To is the destination of the frame, From the address that the sender
	// says is its own.
	To, From MAC
	// Asks is the address whose owner shall answer. Invalid: it asks nothing.
	Asks netip.Addr
	// Claims is the address that the sender says it has. Invalid: it claims
	// nothing.
	Claims netip.Addr
	// Takes is set when the sender was given the address that it asks for,
	// and will use it if nobody answers.
	Takes bool
	// Answers is set when somebody answers this node alone, whose kernel or user
	// asked for the address.
	Answers bool
	// Seal is what a speaker added, not verified. Zero: nothing.
	Seal seal.Seal
}

// Probes reports whether the sender asks without claiming anything: a speaker
// or another host that looks whether the address is in use (RFC 5227 section
// 1.1, RFC 4862 section 5.4.2).
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

// test is one condition of a filter: what is loaded compares with val.
type test struct {
	load bpf.Instruction
	cond bpf.JumpTest
	val  uint32
}

// filter accepts what passes all tests, came in from the wire without a VLAN
// tag, and does not have self at the offset sender.
func filter(self MAC, sender uint32, tests []test) []bpf.Instruction {
	tests = append([]test{
		// Not what others on the wire say to others, which a promiscuous
		// interface shows, nor what this host sends (packet(7), sll_pkttype).
		{bpf.LoadExtension{Num: bpf.ExtType}, bpf.JumpLessThan, unix.PACKET_OTHERHOST},
		// A tagged frame is for the VLAN's interface.
		{bpf.LoadExtension{Num: bpf.ExtVLANTagPresent}, bpf.JumpEqual, 0},
	}, tests...)
	var program []bpf.Instruction
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
