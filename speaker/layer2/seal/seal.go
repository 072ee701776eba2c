// Package seal is what speakers add to the ARP and NDP packets in which they
// tell or ask who has a VIP. By it the speakers of a cluster know each other's
// packets from those of all other hosts, and two that claim the same VIP know
// without another word which of them yields, even when nothing but the segment
// connects them.
//
// A seal is valid for one VIP at one hardware address and is made with a key
// that the speakers share. It proves no more than that: whoever hears it may
// repeat it, as anybody on the segment may claim any address.
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

const (
	offFlags = 4
	offTag   = 6 // byte 5 is zero
)

const (
	// flagHome is set by the node that owns the VIP while all nodes are able.
	flagHome = 1 << iota
	// flagJoins is set by a node that has come to share the VIP.
	flagJoins
)

// magic are the first bytes: three letters and the version of the format.
var magic = []byte("LDS\x01")

// Seal is a seal in the form that goes over the wire. The zero value is none.
type Seal [Size]byte

// Find returns the seal that b begins with, if there is one.
func Find(b []byte) (s Seal, ok bool) {
	if len(b) < Size || !bytes.HasPrefix(b, magic) {
		return Seal{}, false
	}
	return Seal(b), true
}

// Outranks reports whether the sender of s has the better claim to the VIP
// than the one of t, if both seals are valid for it: the node that the election
// prefers to all others, alive or not, and otherwise any of the two, as long as
// everybody comes to the same answer.
func (s Seal) Outranks(t Seal) bool {
	if home, other := s[offFlags]&flagHome, t[offFlags]&flagHome; home != other {
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

// Joining returns the seal that Key.Joining makes.
func (k Keys) Joining(vip netip.Addr, hardware [6]byte) Seal {
	return Key(k()[0]).Joining(vip, hardware)
}

// Valid reports whether the seal is valid for one of the keys.
func (k Keys) Valid(s Seal, vip netip.Addr, hardware [6]byte) bool {
	return slices.ContainsFunc(k(), func(key []byte) bool { return Key(key).Valid(s, vip, hardware) })
}

// Key makes and verifies seals.
type Key []byte

// Seal returns the seal of the VIP at a hardware address. Home tells whether
// the node owns the VIP while all nodes are able.
func (k Key) Seal(vip netip.Addr, hardware [6]byte, home bool) Seal {
	if home {
		return k.seal(flagHome, vip, hardware)
	}
	return k.seal(0, vip, hardware)
}

// Joining returns the seal of a node that has come to share the VIP: it asks the
// others for their clients.
func (k Key) Joining(vip netip.Addr, hardware [6]byte) Seal { return k.seal(flagJoins, vip, hardware) }

func (k Key) seal(flags byte, vip netip.Addr, hardware [6]byte) (s Seal) {
	copy(s[:], magic)
	s[offFlags] = flags
	k.tag(&s, vip, hardware)
	return s
}

// Joins reports whether the sender has come to share the VIP.
func (s Seal) Joins() bool { return s[offFlags]&flagJoins != 0 }

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
	copy(s[offTag:], h.Sum(nil))
}
