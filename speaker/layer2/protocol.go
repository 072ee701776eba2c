package layer2

import (
	"encoding/binary"
	"net"
	"net/netip"

	"github.com/mdlayher/ethernet"
	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"

	"github.com/lodestone-lb/lodestone/speaker/layer2/seal"
	"github.com/lodestone-lb/lodestone/speaker/netstate"
)

// protocol is what ARP and NDP differ in.
type protocol interface {
	// family is the one of its addresses, as status and metrics name it.
	family() string
	// fit says why it cannot work on an interface that is up. Nil: it can.
	fit(i netstate.Interface) error
	// socket returns the EtherType and the kernel filter of a socket whose
	// own address is self.
	socket(self mac) (etherType int, filter []bpf.Instruction)
	// parse reads a frame.
	parse(frame []byte) (message, bool)
	// answer returns the frame that answers m, which asks for a VIP.
	answer(s statement, m message) []byte
	// announce returns the frames that tell everybody where a VIP is. first
	// is set for the first ones of an ownership.
	announce(s statement, first bool) [][]byte
	// probe returns the frame that asks who has a VIP, of one host or of all,
	// and claims nothing.
	probe(s statement, to mac) []byte
}

// statement is what a node says of a VIP: that it has it, or wants it. Without
// a seal it is what any host could say.
type statement struct {
	self mac
	vip  netip.Addr
	seal seal.Seal
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
	// takes is set when the sender was given the address that it asks for,
	// and will use it if nobody answers.
	takes bool
	// answers is set when somebody answers this node alone, whose kernel or user
	// asked for the address.
	answers bool
	// seal is what a speaker added, not verified. Zero: nothing.
	seal seal.Seal
}

// probes reports whether the sender asks without claiming anything: a speaker
// or another host that looks whether the address is in use (RFC 5227 section
// 1.1, RFC 4862 section 5.4.2).
func (m message) probes() bool { return m.asks.IsValid() && !m.claims.IsValid() }

// protocolOf returns the protocol that announces a VIP.
func protocolOf(vip netip.Addr) protocol {
	if vip.Is4() {
		return arp{}
	}
	return ndp{}
}

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
func filter(self mac, sender uint32, tests []test) []bpf.Instruction {
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
func ethernetFrame(to, from mac, etherType ethernet.EtherType, payload []byte) []byte {
	f := ethernet.Frame{
		Destination: net.HardwareAddr(to[:]),
		Source:      net.HardwareAddr(from[:]),
		EtherType:   etherType,
		Payload:     payload,
	}
	frame, _ := f.MarshalBinary() // never fails: there is no VLAN tag
	return frame
}
