package bfd

import (
	"encoding/binary"
	"fmt"
	"math"
	"time"

	"github.com/lodestone-lb/lodestone/pkg/reason"
)

// State is the state of a session (RFC 5880, section 4.1).
type State uint8

// The states.
const (
	AdminDown State = iota
	Down
	Init
	Up
)

// String returns the name that RFC 5880 gives the state.
func (s State) String() string {
	return [...]string{"AdminDown", "Down", "Init", "Up"}[s&3]
}

// Diagnostic is why a session last left Up, or could not get there (RFC
// 5880, section 4.1).
type Diagnostic uint8

// The diagnostics that Lodestone gives. Peers may give others.
const (
	NoDiagnostic         Diagnostic = 0
	DetectionTimeExpired Diagnostic = 1
	NeighborSignaledDown Diagnostic = 3
	AdministrativelyDown Diagnostic = 7
)

// diagnostics are the words of RFC 5880.
var diagnostics = [...]string{
	"no diagnostic", "control detection time expired", "echo function failed",
	"neighbor signaled session down", "forwarding plane reset", "path down",
	"concatenated path down", "administratively down", "reverse concatenated path down",
}

// The layout of a packet.
const (
	version             = 1
	versionShift        = 5
	diagnosticBits      = 1<<versionShift - 1
	stateShift          = 6
	packetLength        = 24 // without an authentication section
	authenticatedLength = 26
	// longestInterval is what the fields have room for.
	longestInterval = math.MaxUint32 * time.Microsecond
)

// String returns the words of RFC 5880.
func (d Diagnostic) String() string {
	if int(d) < len(diagnostics) {
		return diagnostics[d]
	}
	return fmt.Sprintf("diagnostic %d", uint8(d))
}

// Discard is why a received packet was not used.
type Discard string

// The reasons of RFC 5880, section 6.8.6, in its order, and those of the
// transports (RFC 5881, section 5; RFC 5883, section 5).
const (
	used                 Discard = ""
	BadHops              Discard = "hops"               // TTL or hop limit is below what the session asks for
	BadVersion           Discard = "version"            // not 1
	BadLength            Discard = "length"             // too short, or the field exceeds the payload
	NoMultiplier         Discard = "multiplier"         // Detect Mult is zero
	MultipointSet        Discard = "multipoint"         // the M bit
	NoMyDiscriminator    Discard = "my_discriminator"   // My Discriminator is zero
	UnknownDiscriminator Discard = "your_discriminator" // Your Discriminator is of no session
	NoYourDiscriminator  Discard = "state"              // Your Discriminator is zero, and the state is Init or Up
	Unproven             Discard = "unproven"           // Your Discriminator is zero, and the session is Up
	UnknownPeer          Discard = "unknown_peer"       // no session with the sender
	WrongPath            Discard = "path"               // the discriminator's session has other addresses or another interface
	Authenticated        Discard = "authentication"     // the A bit, and no session has authentication
)

// discards are all reasons.
var discards = []Discard{
	BadHops, BadVersion, BadLength, NoMultiplier, MultipointSet, NoMyDiscriminator,
	UnknownDiscriminator, NoYourDiscriminator, Unproven, UnknownPeer, WrongPath, Authenticated,
}

// Discards explains each Discard.
func Discards() reason.Texts[Discard] {
	const faulty = "The peer's BFD is faulty, or somebody forges packets: capture them, and update the peer."
	return reason.Texts[Discard]{
		BadHops: {Cause: "The TTL or hop limit is not 255: the packet does not come from the segment. For a multihop peer: " +
			"less than bfd.minimumTTL.", Cure: "If the router is beyond the segment, configure multihop (for an internal peer: bfd.minimumTTL), " +
			"and bfd.minimumTTL if it sends less than 255, as BIRD does (64); otherwise somebody forges packets from afar.",
			Keys: []string{"peers[].multihop", "peers[].bfd.minimumTTL"}},
		BadVersion:        {Cause: "The packet is not of version 1.", Cure: faulty},
		BadLength:         {Cause: "The packet is shorter than it may be, or than its own length field demands.", Cure: faulty},
		NoMultiplier:      {Cause: "The detect multiplier is 0.", Cure: faulty},
		MultipointSet:     {Cause: "The multipoint bit is set.", Cure: faulty},
		NoMyDiscriminator: {Cause: "The sender's discriminator is 0.", Cure: faulty},
		UnknownDiscriminator: {Cause: "Our discriminator in the packet is of no session.",
			Cure: "Nothing: some follow each restart of a speaker."},
		NoYourDiscriminator: {Cause: "Our discriminator is missing, which only a peer in Down or AdminDown may do.", Cure: faulty},
		Unproven: {Cause: "Our discriminator is missing, and the session is Up: the peer has lost it, or somebody forges packets.",
			Cure: "If the session ends within its detection time, the router restarted: nothing. If it stays Up, somebody forges packets: find " +
				"out who."},
		UnknownPeer: {Cause: "There is no session with the sender: BFD is configured on the router only.",
			Cure: "Configure bfd on the peer, or remove it from the router.", Keys: []string{"peers[].bfd"}},
		WrongPath: {Cause: "The discriminator is of a session with another address, interface or port.",
			Cure: "See whether the router sends from the address that the peer has in the configuration."},
		Authenticated: {Cause: "The packet is authenticated, and no session is.", Cure: "Switch BFD authentication off on the router."},
	}
}

// The flags of the second byte.
const (
	flagPoll           = 1 << 5
	flagFinal          = 1 << 4
	flagAuthentication = 1 << 2
	flagDemand         = 1 << 1
	flagMultipoint     = 1 << 0
)

// Packet is a BFD Control packet (RFC 5880, section 4.1) with what Lodestone
// uses of it.
type Packet struct {
	diagnostic                     Diagnostic
	state                          State
	poll, final, authentic, demand bool
	multiplier                     uint8
	my, your                       uint32 // discriminators
	desiredMinTx, requiredMinRx    time.Duration
}

// marshal returns the packet on the wire. We have no Echo function, so
// Required Min Echo RX Interval is zero, and we are independent of no control
// plane, so C is clear.
func (p Packet) marshal() []byte {
	b := make([]byte, packetLength)
	b[0] = version<<versionShift | byte(p.diagnostic)&diagnosticBits
	b[1] = byte(p.state)<<stateShift | bit(p.poll, flagPoll) | bit(p.final, flagFinal) | bit(p.demand, flagDemand)
	b[2], b[3] = p.multiplier, packetLength
	binary.BigEndian.PutUint32(b[4:], p.my)
	binary.BigEndian.PutUint32(b[8:], p.your)
	binary.BigEndian.PutUint32(b[12:], uint32(p.desiredMinTx/time.Microsecond))
	binary.BigEndian.PutUint32(b[16:], uint32(p.requiredMinRx/time.Microsecond))
	return b
}

func bit(set bool, b byte) byte {
	if set {
		return b
	}
	return 0
}

// parse reads a packet and checks what can be checked without a session (RFC
// 5880, section 6.8.6).
func parse(b []byte) (p Packet, why Discard) {
	switch {
	case len(b) < packetLength:
		return p, BadLength
	case b[0]>>versionShift != version:
		return p, BadVersion
	}
	flags := b[1]
	p = Packet{
		diagnostic: Diagnostic(b[0] & diagnosticBits), state: State(flags >> stateShift),
		poll: flags&flagPoll != 0, final: flags&flagFinal != 0, authentic: flags&flagAuthentication != 0, demand: flags&flagDemand != 0,
		multiplier: b[2], my: binary.BigEndian.Uint32(b[4:]), your: binary.BigEndian.Uint32(b[8:]),
		desiredMinTx:  time.Duration(binary.BigEndian.Uint32(b[12:])) * time.Microsecond,
		requiredMinRx: time.Duration(binary.BigEndian.Uint32(b[16:])) * time.Microsecond,
	}
	length := int(b[3])
	switch {
	case length < packetLength, p.authentic && length < authenticatedLength, length > len(b):
		return p, BadLength
	case p.multiplier == 0:
		return p, NoMultiplier
	case flags&flagMultipoint != 0:
		return p, MultipointSet
	case p.my == 0:
		return p, NoMyDiscriminator
	case p.your == 0 && p.state != Down && p.state != AdminDown:
		return p, NoYourDiscriminator
	}
	return p, used
}
