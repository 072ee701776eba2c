package election

import (
	"encoding/binary"
	"net/netip"
)

// Share is how nodes share one address: each host on the segment has one of
// them, by rendezvous hashing over the address, the host and the nodes. When a
// node goes, only its hosts move, each to the node that is the next best for it,
// and when one comes, only those that it gets.
//
// A host is known by its hardware address, and not by an address of IP: it
// remembers one place for the shared address, whichever of its own addresses it
// asks from.
type Share struct {
	vip   uint64
	names []string
	nodes []uint64
}

// NewShare returns how the nodes share the address. Their order does not matter.
func NewShare(vip netip.Addr, nodes []string) *Share {
	s := &Share{vip: hashAddr(vip), names: nodes}
	for _, name := range nodes {
		s.nodes = append(s.nodes, hashName(name))
	}
	return s
}

// NodeOf returns the node that answers the host with the hardware address, ""
// when there is none.
func (s *Share) NodeOf(host [6]byte) string {
	raw := [8]byte{}
	copy(raw[2:], host[:])
	hash, best, most := mix(mix(binary.BigEndian.Uint64(raw[:])+1)^s.vip), "", uint64(0)
	for i, name := range s.names {
		if n := score(hash, s.nodes[i]); best == "" || n > most || n == most && name < best {
			best, most = name, n
		}
	}
	return best
}
