package plan

import (
	"net/netip"
	"slices"
)

// segments are the subnets of all nodes.
type segments struct {
	all map[netip.Prefix]bool
	// bits4 and bits6 are the lengths of their prefixes, longest first.
	bits4, bits6 []int
}

func newSegments(nodes map[string]Node) *segments {
	s := &segments{all: map[netip.Prefix]bool{}}
	for _, n := range nodes {
		for _, g := range n.Segments {
			s.all[g.Subnet] = true
		}
	}
	for p := range s.all {
		bits := &s.bits6
		if p.Addr().Is4() {
			bits = &s.bits4
		}
		if !slices.Contains(*bits, p.Bits()) {
			*bits = append(*bits, p.Bits())
		}
	}
	for _, bits := range [][]int{s.bits4, s.bits6} {
		slices.Sort(bits)
		slices.Reverse(bits)
	}
	return s
}

// smallest returns the smallest subnet that contains the address, or the zero value.
func (s *segments) smallest(addr netip.Addr) netip.Prefix {
	bits := s.bits6
	if addr.Is4() {
		bits = s.bits4
	}
	for _, b := range bits {
		if p, err := addr.Prefix(b); err == nil && s.all[p] {
			return p
		}
	}
	return netip.Prefix{}
}
