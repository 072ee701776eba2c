// Package seal is what speakers add to the ARP and NDP packets in which they
// say or ask who has a VIP. By it the speakers of a cluster know each other's
// packets from those of all other hosts, and two that claim the same VIP know
// without another word which of them yields, even when nothing but the segment
// connects them.
//
// A seal is valid for one VIP at one hardware address and is made with a key
// that the speakers share. Whoever hears it may repeat it. So a claim is not
// believed before its speaker has answered a question: the question has a number
// that nobody can know before, the nonce, and the seal of the answer has it, too.
package seal

import (
	"bytes"
	"crypto/hmac"
	"crypto/sha256"
	"net/netip"
	"slices"
)

// Size is the length of a seal in bytes. ARP packets of 42 bytes are padded to
// 60: a seal fits in. With the two bytes before it, it fills an NDP option of
// 16 bytes.
const Size = 14

// The layout: two letters, the version of the format and the flags, the nonce, and
// the tag.
const (
	offVersion = 2
	offNonce   = 3
	offTag     = 7

	version = 2 << 4
	flags   = 0xf
)

const (
	// flagHome is set by the node that owns the VIP while all nodes are able.
	flagHome = 1
	// flagApart is set by a node that has lost the other speakers with its link to them.
	flagApart = 8
)

// reserved is the end of what the tag covers. It is part of the format.
var reserved [22]byte

// magic are the first bytes.
var magic = []byte("LS")

// Seal is a seal in the form that goes over the wire. The zero value is none.
type Seal [Size]byte

// Nonce is a number that a question has, and its answer. The zero value is none.
type Nonce [offTag - offNonce]byte

// Find returns the seal that b begins with, if there is one.
func Find(b []byte) (s Seal, ok bool) {
	if len(b) < Size || !bytes.HasPrefix(b, magic) || b[offVersion]&^flags != version {
		return Seal{}, false
	}
	return Seal(b), true
}

// Nonce returns the number of the question, or of the question that is answered.
func (s Seal) Nonce() Nonce { return Nonce(s[offNonce:offTag]) }

// Outranks reports whether the sender of s has the better claim to the VIP
// than the one of t, if both seals are valid for it and have no nonce: the node that
// has its link to the other speakers, then the one that the election prefers to all
// others, alive or not, and otherwise any of the two, as long as everybody comes to the
// same answer.
func (s Seal) Outranks(t Seal) bool {
	if apart, other := s[offVersion]&flagApart, t[offVersion]&flagApart; apart != other {
		return apart < other
	}
	if home, other := s[offVersion]&flagHome, t[offVersion]&flagHome; home != other {
		return home > other
	}
	return bytes.Compare(s[offTag:], t[offTag:]) > 0
}

// Keys returns the keys that the speakers of the cluster share. The first one makes
// seals, and all verify them: while the key is replaced, not all make them with the same.
type Keys func() [][]byte

// Seal returns the seal that Key.Seal makes.
func (k Keys) Seal(vip netip.Addr, hardware [6]byte, home bool) Seal {
	return Key(k()[0]).Seal(vip, hardware, home)
}

// Numbered returns the seal that Key.Numbered makes.
func (k Keys) Numbered(vip netip.Addr, hardware [6]byte, home bool, n Nonce) Seal {
	return Key(k()[0]).Numbered(vip, hardware, home, n)
}

// Apart returns the seal that Key.Apart makes.
func (k Keys) Apart(vip netip.Addr, hardware [6]byte, home bool) Seal {
	return Key(k()[0]).Apart(vip, hardware, home)
}

// Valid reports whether the seal is valid for one of the keys.
func (k Keys) Valid(s Seal, vip netip.Addr, hardware [6]byte) bool {
	return slices.ContainsFunc(k(), func(key []byte) bool { return Key(key).Valid(s, vip, hardware) })
}

// Key makes and verifies seals.
type Key []byte

// Seal returns the seal of the VIP at a hardware address. Home is whether
// the node owns the VIP while all nodes are able.
func (k Key) Seal(vip netip.Addr, hardware [6]byte, home bool) Seal {
	return k.Numbered(vip, hardware, home, Nonce{})
}

// Numbered returns the seal of a question, or of the answer to it.
func (k Key) Numbered(vip netip.Addr, hardware [6]byte, home bool, n Nonce) Seal {
	if home {
		return k.seal(flagHome, n, vip, hardware)
	}
	return k.seal(0, n, vip, hardware)
}

// Apart returns the seal that Seal returns of a node that has lost the other speakers with
// its link to them: perhaps it reaches no pods either.
func (k Key) Apart(vip netip.Addr, hardware [6]byte, home bool) Seal {
	if home {
		return k.seal(flagApart|flagHome, Nonce{}, vip, hardware)
	}
	return k.seal(flagApart, Nonce{}, vip, hardware)
}

func (k Key) seal(flags byte, n Nonce, vip netip.Addr, hardware [6]byte) (s Seal) {
	copy(s[:], magic)
	s[offVersion] = version | flags
	copy(s[offNonce:], n[:])
	k.tag(&s, vip, hardware)
	return s
}

// Valid reports whether the seal was made with this key for the VIP at the
// hardware address.
func (k Key) Valid(s Seal, vip netip.Addr, hardware [6]byte) bool {
	want := s
	k.tag(&want, vip, hardware)
	return bytes.HasPrefix(s[:], magic) && hmac.Equal(s[:], want[:])
}

// tag writes the tag of what stands before it.
func (k Key) tag(s *Seal, vip netip.Addr, hardware [6]byte) {
	h := hmac.New(sha256.New, k)
	address := vip.As16()
	h.Write([]byte("lodestone layer-2 seal"))
	h.Write(s[:offTag])
	h.Write(address[:])
	h.Write(hardware[:])
	h.Write(reserved[:])
	copy(s[offTag:], h.Sum(nil))
}
