// Package seal makes and verifies the seals that speakers add to the ARP and NDP packets in which they
// claim a VIP or ask for it. With seals, speakers can distinguish each other's packets from those of all other
// machines. Two speakers that claim the same VIP know from the seals which of them yields, even if only
// the segment connects them.
//
// A seal is valid for one VIP at one hardware address, and is made with a key that the speakers share.
// Everybody who receives a seal can repeat it. So a claim does not count before its speaker has answered a
// question. The question has an unpredictable number, the nonce, which the seal of the answer repeats.
package seal

import (
	"bytes"
	"crypto/hmac"
	"crypto/sha256"
	"net/netip"
	"slices"
)

// Size is the length of a seal in bytes. It fits into the padding of ARP packets, from 42 to 60 bytes. With
// the two bytes before it, it fills an NDP option of 16 bytes.
const Size = 14

// The layout: two letters, the version of the format and the flags, the nonce, and the tag.
const (
	offVersion = 2
	offNonce   = 3
	offTag     = 7

	version = 2 << 4
	flags   = 0xf
)

const (
	// flagHome is set by the node that owns the VIP when all nodes are able to.
	flagHome = 1
	// flagReturned is set in a question that goes back to the speaker that has asked it.
	flagReturned = 2
	// flagApart is set by a node that has lost the other speakers with a link.
	flagApart = 8
)

// reserved follows the other input of the tag. It is part of the format.
var reserved [22]byte

// magic are the first bytes.
var magic = []byte("LS")

// Seal is a seal as it is in packets. The zero value is no seal.
type Seal [Size]byte

// Nonce is the number of a question and its answer. The zero value is no nonce.
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

// Returned reports whether the question is one of the receiver that is returned.
func (s Seal) Returned() bool { return s[offVersion]&flagReturned != 0 }

// Outranks reports whether the sender of s has the better claim to the VIP than the sender of t. Both seals
// have to be valid and without a nonce. A node that is not apart has the better claim, then the node that
// owns the VIP when all nodes are able to. Otherwise the tags decide, so that all nodes have the same answer.
func (s Seal) Outranks(t Seal) bool {
	if apart, other := s[offVersion]&flagApart, t[offVersion]&flagApart; apart != other {
		return apart < other
	}
	if home, other := s[offVersion]&flagHome, t[offVersion]&flagHome; home != other {
		return home > other
	}
	return bytes.Compare(s[offTag:], t[offTag:]) > 0
}

// Keys returns the keys that the speakers of the cluster share. Seals are made with the first one, and
// verified with all: while the key is replaced, speakers make seals with different keys.
type Keys func() [][]byte

// First returns the key that makes seals.
func (k Keys) First() Key { return k()[0] }

// Valid reports whether the seal is valid for one of the keys.
func (k Keys) Valid(s Seal, vip netip.Addr, hardware [6]byte) bool {
	return slices.ContainsFunc(k(), func(key []byte) bool { return Key(key).Valid(s, vip, hardware) })
}

// Key makes and verifies seals.
type Key []byte

// Seal returns the seal of the VIP at a hardware address. home is set if the node owns the VIP when all
// nodes are able to.
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

// Returned returns the seal of a question that is returned.
func (k Key) Returned(vip netip.Addr, hardware [6]byte, n Nonce) Seal {
	return k.seal(flagReturned, n, vip, hardware)
}

// Apart is Seal for a node that has lost the other speakers with a link. Perhaps it does not reach the pods
// either.
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

// tag writes the tag, which covers the bytes before it, the VIP and the hardware address.
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
