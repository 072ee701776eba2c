package plan

import (
	"net/netip"
	"slices"

	"github.com/lodestone-lb/lodestone/pkg/report"
)

// segments are the subnets of all nodes.
type segments struct {
	all  map[netip.Prefix]bool
	bits []int // the lengths of their prefixes, longest first
}

func newSegments(nodes map[string]Node) *segments {
	s := &segments{all: map[netip.Prefix]bool{}}
	for _, n := range nodes {
		for _, g := range n.Segments {
			s.all[g.Subnet] = true
		}
	}
	for p := range s.all {
		s.bits = append(s.bits, p.Bits())
	}
	slices.Sort(s.bits)
	s.bits = slices.Compact(s.bits)
	slices.Reverse(s.bits)
	return s
}

// smallest returns the smallest subnet that contains the address, or the zero value.
func (s *segments) smallest(addr netip.Addr) netip.Prefix {
	for _, b := range s.bits {
		if b > addr.BitLen() {
			continue // a prefix of IPv6: Prefix would make an error for each address
		}
		if p, _ := addr.Prefix(b); s.all[p] {
			return p
		}
	}
	return netip.Prefix{}
}

// contains reports whether one prefix contains the other.
func contains(outer, inner netip.Prefix) bool {
	return outer.Bits() <= inner.Bits() && outer.Contains(inner.Addr())
}

// Belongs reports whether a VIP is announced on the interface with one of these names. It is not if the interface has subnets,
// and another one has that of the VIP. An interface without a subnet may be on any segment.
func Belongs(vip netip.Addr, segments []report.Segment, names ...string) bool {
	known, elsewhere := false, false
	for _, s := range segments {
		here, has := slices.Contains(names, s.Interface), s.Subnet.Contains(vip)
		if here && has {
			return true
		}
		known, elsewhere = known || here, elsewhere || has
	}
	return !known || !elsewhere
}
