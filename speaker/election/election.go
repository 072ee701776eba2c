// Package election decides which node owns a VIP. It is arithmetic over names
// and addresses: nodes that know the same nodes come to the same owner without
// talking to each other.
//
// Every pair of address and node has a score (rendezvous hashing): the best
// node owns the address, and when a node goes only its own addresses move. The
// load is bounded, for rendezvous alone is uneven where VIPs are few: of three
// VIPs on three nodes all end up on one node in one case of nine.
//
// The usual bound counts the VIPs in use. Then every new Service can move the
// VIP of an unrelated one (measured: in 10 to 40 of 100 cases), and two nodes
// whose caches differ by one Service disagree on the owners of others. So here
// the bound counts addresses, used or not. Addresses form blocks of 32; within
// a block they choose in order, and of the first P = 1, 2, 4, ... 32 no node
// gets more than ceil(5/4 * P/n): the fair share plus one quarter. Pools are
// filled from the lowest address, so the first addresses of a block are those
// in use. An owner depends on its address and on the nodes, and on no other
// Service: adding or deleting Services moves nothing, ever.
//
// The bound is computed over all nodes that may own the addresses, able at the
// moment or not: an address whose node is able stays there, whatever happens
// to other nodes. Only the addresses of a node that is unable go to others,
// bounded over the able ones (strictly in a whole block, where it can be among
// its first addresses), and they come back with it. When a node is added to
// the cluster, or deleted from it for good, the bound costs 10 to 60 moves
// more for each 100 that rendezvous needs; the tests print the figures.
package election

import (
	"encoding/binary"
	"hash/fnv"
	"maps"
	"math/bits"
	"net/netip"
	"slices"
)

// blockBits is the size of a block as a power of two. Larger blocks spread
// more evenly in clusters of more than 25 nodes, but cost more when VIPs lie
// far apart.
const blockBits = 5

const blockSize = 1 << blockBits

// Electorate is a set of nodes that may own VIPs. It is not safe for
// concurrent use: it remembers the blocks it has decided.
type Electorate struct {
	names  []string
	hashes []uint64
	able   []bool
	index  map[string]int
	blocks map[netip.Addr]*[blockSize]int
}

// New returns the electorate of the nodes; the value tells whether the node is
// able to own a VIP at the moment. Nodes belong in it whether able or not.
func New(nodes map[string]bool) *Electorate {
	e := &Electorate{
		names:  slices.Sorted(maps.Keys(nodes)),
		index:  make(map[string]int, len(nodes)),
		blocks: map[netip.Addr]*[blockSize]int{},
	}
	for i, name := range e.names {
		e.index[name] = i
		e.able = append(e.able, nodes[name])
		e.hashes = append(e.hashes, hashName(name))
	}
	return e
}

// Owner returns the node that owns the address, or "" when no node is able.
func (e *Electorate) Owner(vip netip.Addr) string {
	if owner := e.owner(vip); owner >= 0 {
		return e.names[owner]
	}
	return ""
}

// OwnerAmong is Owner with the choice restricted to some nodes: those with a
// local endpoint. The owner of the whole electorate is preferred, so that the
// restriction moves as few VIPs as the loss of a node does.
func (e *Electorate) OwnerAmong(vip netip.Addr, nodes map[string]bool) string {
	if owner := e.Owner(vip); nodes[owner] {
		return owner
	}
	hash, best := hashAddr(vip), ranking{node: -1}
	for name, in := range nodes {
		if i, ok := e.index[name]; ok && in && e.able[i] {
			best.offer(i, score(hash, e.hashes[i]))
		}
	}
	if best.node < 0 {
		return ""
	}
	return e.names[best.node]
}

func (e *Electorate) owner(vip netip.Addr) int {
	first, offset := block(vip)
	owners := e.blocks[first]
	if owners == nil {
		owners = e.decide(first)
		e.blocks[first] = owners
	}
	return owners[offset]
}

// decide gives every address of the block an owner: first one of all nodes,
// then, if that one is unable, one of the able nodes.
func (e *Electorate) decide(first netip.Addr) *[blockSize]int {
	var hashes [blockSize]uint64
	var owners [blockSize]int
	for i, a := 0, first; i < blockSize; i, a = i+1, a.Next() {
		hashes[i], owners[i] = hashAddr(a), -1
	}
	var all, able []int
	for i := range e.names {
		all = append(all, i)
		if e.able[i] {
			able = append(able, i)
		}
	}
	e.fill(&owners, &hashes, all)
	if len(able) < len(all) {
		for i, o := range owners {
			if !e.able[o] {
				owners[i] = -1
			}
		}
		e.fill(&owners, &hashes, able)
	}
	return &owners
}

// fill gives each address without an owner, in order, the best of the nodes
// that has room for it: among the first addresses, up to the next power of
// two, and in the whole block. Nodes that own addresses already may leave room
// only in the block.
func (e *Electorate) fill(owners *[blockSize]int, hashes *[blockSize]uint64, nodes []int) {
	if len(nodes) == 0 {
		return
	}
	load, total := make([]int, len(e.names)), make([]int, len(e.names))
	for _, o := range owners {
		if o >= 0 {
			total[o]++
		}
	}
	counted := 0
	for i := range owners {
		count := 1 << bits.Len(uint(i)) // 1, 2, 4, 4, 8, ...
		for ; counted < count; counted++ {
			if o := owners[counted]; o >= 0 {
				load[o]++
			}
		}
		if owners[i] >= 0 {
			continue
		}
		room, blockRoom := share(count, len(nodes)), share(blockSize, len(nodes))
		best, second := ranking{node: -1}, ranking{node: -1}
		for _, node := range nodes {
			s := score(hashes[i], e.hashes[node])
			if total[node] >= blockRoom {
				continue
			}
			if load[node] < room {
				best.offer(node, s)
			} else if best.node < 0 {
				second.offer(node, s)
			}
		}
		if best.node < 0 {
			best = second
		}
		owners[i] = best.node
		load[best.node]++
		total[best.node]++
	}
}

// share is the most that each of n nodes may own of count addresses.
func share(count, n int) int { return (5*count + 4*n - 1) / (4 * n) }

// ranking keeps the best of the nodes offered to it, whatever their order.
type ranking struct {
	node  int
	score uint64
}

func (r *ranking) offer(node int, score uint64) {
	if r.node < 0 || score > r.score || score == r.score && node < r.node {
		r.node, r.score = node, score
	}
}

// block returns the first address of the address's block and its place in it.
func block(a netip.Addr) (first netip.Addr, offset int) {
	raw := a.AsSlice()
	last := len(raw) - 1
	offset = int(raw[last] & (blockSize - 1))
	raw[last] &^= blockSize - 1
	first, _ = netip.AddrFromSlice(raw)
	return first, offset
}

func hashName(name string) uint64 {
	h := fnv.New64a()
	h.Write([]byte(name))
	return mix(h.Sum64())
}

func hashAddr(a netip.Addr) uint64 {
	raw := a.As16()
	return mix(mix(binary.BigEndian.Uint64(raw[:8])+1) ^ binary.BigEndian.Uint64(raw[8:]))
}

func score(vip, node uint64) uint64 { return mix(vip ^ node) }

// mix is the finalizer of SplitMix64: every bit of x changes every bit of the
// result.
func mix(x uint64) uint64 {
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}
