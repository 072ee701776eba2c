package watch

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/binary"
	"hash"
	"net/netip"
	"time"
)

// NewMember returns a speaker whose session is a hash of its name and of the number that it publishes. Everybody can read the
// number, and whoever publishes the number of another speaker has another session.
func NewMember(name string, number uint64, addr netip.AddrPort) Member {
	sum := sha256.Sum256(binary.BigEndian.AppendUint64([]byte(name), number))
	return Member{Name: name, Session: binary.BigEndian.Uint64(sum[:]), Addr: addr}
}

// Kind is what a packet is for.
type Kind byte

// The kinds.
const (
	// Beat is a heartbeat.
	Beat Kind = iota + 1
	// Ask asks for an Answer.
	Ask
	Answer
	// Silent is sent by a speaker that does not hear the subject, to those who may hear it.
	Silent
	// Heard answers it.
	Heard
	// Dead is a verdict about the subject.
	Dead
	lastKind = Dead
)

// class separates heartbeats, which are read at the next tick, from packets that are read at once: each have
// sequence numbers that grow.
func (k Kind) class() int {
	if k == Beat {
		return 0
	}
	return 1
}

const classes = 2

// Packet is what one speaker sends to another.
type Packet struct {
	Kind     Kind
	From     uint64 // the sender's session
	Sequence uint64 // grows with each packet that the sender sends
	Subject  uint64 // the session that Silent, Heard and Dead are about, or the Sequence of the Ask that an Answer is for
	Interval time.Duration
	Late     time.Duration // how late the sender was lately, at most
}

// The encoding: a magic number, kind, interval and lateness in milliseconds, session, sequence, the subject if the
// kind has one, and the seal. The magic number of heartbeats is another one, so that a filter in the kernel can
// separate them. A later version with another format needs other magic numbers.
const (
	MagicBeat, MagicUrgent = 0x4c6f4231, 0x4c6f5531 // "LoB1", "LoU1"

	headSize    = 24
	subjectSize = 8
	sealSize    = 16
	// MaxPacket is the longest packet. A heartbeat has 40 bytes.
	MaxPacket = headSize + subjectSize + sealSize
)

func (k Kind) hasSubject() bool { return k != Beat && k != Ask }

func (k Kind) magic() uint32 {
	if k == Beat {
		return MagicBeat
	}
	return MagicUrgent
}

// encode appends the packet without a seal.
func (p Packet) encode(b []byte) []byte {
	b = binary.BigEndian.AppendUint32(b, p.Kind.magic())
	b = append(b, byte(p.Kind), byte(p.Interval.Milliseconds()))
	b = binary.BigEndian.AppendUint16(b, uint16(min(p.Late.Milliseconds(), 1<<16-1)))
	b = binary.BigEndian.AppendUint64(b, p.From)
	b = binary.BigEndian.AppendUint64(b, p.Sequence)
	if p.Kind.hasSubject() {
		b = binary.BigEndian.AppendUint64(b, p.Subject)
	}
	return b
}

// decode reads a packet without its seal, and reports whether a speaker may have sent it.
func decode(b []byte) (p Packet, ok bool) {
	if len(b) < headSize {
		return Packet{}, false
	}
	const ms = time.Millisecond
	p = Packet{
		Kind: Kind(b[4]), Interval: time.Duration(b[5]) * ms, Late: time.Duration(binary.BigEndian.Uint16(b[6:])) * ms,
		From: binary.BigEndian.Uint64(b[8:]), Sequence: binary.BigEndian.Uint64(b[16:]),
	}
	size := headSize
	if p.Kind.hasSubject() {
		size += subjectSize
	}
	if len(b) != size || p.Kind < Beat || p.Kind > lastKind || binary.BigEndian.Uint32(b) != p.Kind.magic() ||
		p.Interval < MinInterval || p.Interval > MaxInterval {
		return Packet{}, false
	}
	if p.Kind.hasSubject() {
		p.Subject = binary.BigEndian.Uint64(b[headSize:])
	}
	return p, true
}

// Sealer seals and opens packets with the keys that the speakers share. A seal is an HMAC-SHA256 of the packet and the
// receiver's session: a packet to one speaker, or to the one before its restart, is none to another. It allocates
// nothing per packet, and has one owner.
type Sealer struct {
	macs []hash.Hash
	sum  [sha256.Size]byte
}

// NewSealer returns one that opens with any of the keys and seals with the first one.
func NewSealer(keys [][]byte) *Sealer {
	s := &Sealer{}
	for _, k := range keys {
		s.macs = append(s.macs, hmac.New(sha256.New, k))
	}
	return s
}

// Seal appends the packet to b, sealed for the receiver. Without a key it appends nothing.
func (s *Sealer) Seal(b []byte, p Packet, receiver uint64) []byte {
	if len(s.macs) == 0 {
		return b
	}
	start := len(b)
	b = p.encode(b)
	return append(b, s.mac(s.macs[0], b[start:], receiver)...)
}

// Open returns the packet, and reports whether it is one that was sealed for the receiver.
func (s *Sealer) Open(b []byte, receiver uint64) (Packet, bool) {
	if len(b) < headSize+sealSize {
		return Packet{}, false
	}
	packet, seal := b[:len(b)-sealSize], b[len(b)-sealSize:]
	p, ok := decode(packet)
	if !ok {
		return Packet{}, false
	}
	for _, mac := range s.macs {
		if hmac.Equal(s.mac(mac, packet, receiver), seal) {
			return p, true
		}
	}
	return Packet{}, false
}

func (s *Sealer) mac(mac hash.Hash, packet []byte, receiver uint64) []byte {
	mac.Reset()
	mac.Write(packet) //nolint:errcheck // a hash never fails
	binary.BigEndian.PutUint64(s.sum[:], receiver)
	mac.Write(s.sum[:8]) //nolint:errcheck // a hash never fails
	return mac.Sum(s.sum[:0])[:sealSize]
}
