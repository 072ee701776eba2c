package ipam

import (
	"cmp"
	"encoding/binary"
	"net/netip"

	"go4.org/netipx"
)

// Family is an IP address family.
type Family string

// The address families, spelled as in Kubernetes' spec.ipFamilies.
const (
	IPv4 Family = "IPv4"
	IPv6 Family = "IPv6"
)

// families lists the families in the order of their index.
var families = [...]Family{IPv4, IPv6}

// index is the family's place in families, -1 for one that does not exist.
func (f Family) index() int {
	switch f {
	case IPv4:
		return 0
	case IPv6:
		return 1
	}
	return -1
}

// familyOf is the family of a valid address that is not 4in6.
func familyOf(a netip.Addr) Family {
	if a.Is4() {
		return IPv4
	}
	return IPv6
}

func canonical(a netip.Addr) netip.Addr { return a.Unmap().WithZone("") }

// ranges returns the ranges of a set, which may be nil.
func ranges(s *netipx.IPSet) []netipx.IPRange {
	if s == nil {
		return nil
	}
	return s.Ranges()
}

// num is an address of one family as a number.
type num struct{ hi, lo uint64 }

func numOf(a netip.Addr) num {
	if a.Is4() {
		b := a.As4()
		return num{0, uint64(binary.BigEndian.Uint32(b[:]))}
	}
	b := a.As16()
	return num{binary.BigEndian.Uint64(b[:8]), binary.BigEndian.Uint64(b[8:])}
}

func (n num) addr(f Family) netip.Addr {
	if f == IPv4 {
		return netip.AddrFrom4([4]byte{byte(n.lo >> 24), byte(n.lo >> 16), byte(n.lo >> 8), byte(n.lo)})
	}
	var b [16]byte
	binary.BigEndian.PutUint64(b[:8], n.hi)
	binary.BigEndian.PutUint64(b[8:], n.lo)
	return netip.AddrFrom16(b)
}

func (n num) less(m num) bool { return n.hi < m.hi || n.hi == m.hi && n.lo < m.lo }

func (n num) compare(m num) int { return cmp.Or(cmp.Compare(n.hi, m.hi), cmp.Compare(n.lo, m.lo)) }

// next and prev wrap around. The callers know that there is a neighbour.
func (n num) next() num {
	n.lo++
	if n.lo == 0 {
		n.hi++
	}
	return n
}

func (n num) prev() num {
	if n.lo == 0 {
		n.hi--
	}
	n.lo--
	return n
}

// run is every address from one to another, both included.
type run struct{ from, to num }

// size is exact up to 2^53 addresses.
func (r run) size() float64 {
	hi, lo := r.to.hi-r.from.hi, r.to.lo-r.from.lo
	if r.to.lo < r.from.lo {
		hi--
	}
	return float64(hi)*(1<<64) + float64(lo) + 1
}

func (r run) has(n num) bool { return !n.less(r.from) && !r.to.less(n) }
