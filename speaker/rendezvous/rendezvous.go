// Package rendezvous has the arithmetic of owners: in which order the nodes that may own a VIP come to own it. Which ones may
// is for package plan. Speakers that know the same nodes choose the same owner without communication.
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
// The bound is computed over all nodes that may own the addresses, able at the moment or not. So every
// address has an order of nodes that does not depend on which nodes are able: first its owner, then its
// deputy, which has the address when only the owner is lost, then the other nodes by score. The deputies are
// bounded over all other nodes: strictly in a whole block, and if possible among its first addresses. The
// first node in the order that is able owns the address. So when a node is lost, only its own addresses move,
// and they come back with the node. When a node is added to the cluster or deleted from it, the bound costs
// 10 to 60 moves more for each 100 that rendezvous hashing needs; the tests print the figures.
package rendezvous

import (
	"encoding/binary"
	"hash/fnv"
	"maps"
	"math"
	"math/bits"
	"net/netip"
	"slices"
)

// blockBits is the size of a block as a power of two. Larger blocks spread
// more evenly in clusters of more than 25 nodes, but cost more when VIPs lie
// far apart.
const blockBits = 5

const blockSize = 1 << blockBits

// maxBlocks is how many blocks an electorate remembers, some 20 MB. It bounds the memory when VIPs come and
// go in a large pool; no cluster needs so many at once.
const maxBlocks = 1 << 16

// Electorate is a set of nodes that may own VIPs. It remembers its decisions, and is not safe for concurrent
// use. Electorates that With made from each other share the memory.
type Electorate struct {
	*voters
	able []bool
}

// voters is the part that does not depend on which nodes are able.
type voters struct {
	names  []string
	hashes []uint64 // of the names
	index  map[string]int32
	blocks map[netip.Addr]*block
	// deputies are the owners of a block without one of its nodes.
	deputies map[without]*[blockSize]int32
	tally    tally
}

// nobody is in the place of a node.
const nobody int32 = -1

// without is a block and a node that is lost.
type without struct {
	first netip.Addr
	node  int32
}

// block is who owns its addresses while all nodes are able, as far as somebody
// asked: where VIPs lie far apart, few of a block's addresses are in use.
type block struct {
	owners  [blockSize]int32
	decided int
}

// New returns the electorate of the nodes; the value is whether the node is able to own a VIP at the moment.
// Nodes that are not able belong in it, too.
func New(nodes map[string]bool) *Electorate {
	v := &voters{
		names:  slices.Sorted(maps.Keys(nodes)),
		index:  make(map[string]int32, len(nodes)),
		blocks: map[netip.Addr]*block{}, deputies: map[without]*[blockSize]int32{},
		tally: tally{make([]int, len(nodes)), make([]int, len(nodes))},
	}
	for i, name := range v.names {
		v.index[name] = int32(i)
		v.hashes = append(v.hashes, hashName(name))
	}
	return v.electorate(nodes)
}

// With returns the electorate of the nodes, like New. If the nodes are the same and only their ability
// differs, it keeps the decisions of e, and costs little.
func (e *Electorate) With(nodes map[string]bool) *Electorate {
	if len(nodes) != len(e.names) {
		return New(nodes)
	}
	for _, name := range e.names {
		if _, ok := nodes[name]; !ok {
			return New(nodes)
		}
	}
	return e.electorate(nodes)
}

func (v *voters) electorate(nodes map[string]bool) *Electorate {
	e := &Electorate{voters: v, able: make([]bool, len(v.names))}
	for i, name := range v.names {
		e.able[i] = nodes[name]
	}
	return e
}

// Owner returns the node that owns the address, or "" when no node is able.
func (e *Electorate) Owner(vip netip.Addr) string { return e.OwnerAmong(vip, nil) }

// OwnerAmong is Owner with the choice restricted to some nodes, such as those with a local endpoint: sorted names. Nil: all nodes. It
// returns the first node in the address's order that is able.
func (e *Electorate) OwnerAmong(vip netip.Addr, nodes []string) string {
	chosen := func(name string) bool {
		_, found := slices.BinarySearch(nodes, name)
		return found || nodes == nil
	}
	may := func(i int32) bool { return i != nobody && e.able[i] && chosen(e.names[i]) }
	block, offset := place(vip)
	owner := e.decide(block, offset+1).owners[offset]
	if owner != nobody && !may(owner) {
		owner = e.depute(block, owner)[offset]
	}
	if may(owner) {
		return e.names[owner]
	}
	hash, best, most := hashAddr(vip), nobody, uint64(0)
	offer := func(i int32) { // in any order
		if s := score(hash, e.hashes[i]); may(i) && (best == nobody || s > most || s == most && i < best) {
			best, most = i, s
		}
	}
	if nodes == nil {
		for i := range e.hashes {
			offer(int32(i))
		}
	}
	for _, name := range nodes {
		if i, known := e.index[name]; known {
			offer(i)
		}
	}
	if best == nobody {
		return ""
	}
	return e.names[best]
}

// decide returns the block. At least its first count addresses have an owner then.
func (v *voters) decide(first netip.Addr, count int) *block {
	b := v.blocks[first]
	if b == nil {
		b = &block{}
		for i := range b.owners {
			b.owners[i] = nobody
		}
		remember(v.blocks, first, b)
	}
	if b.decided < count {
		v.fill(&b.owners, first, count, nobody)
		b.decided = count
	}
	return b
}

// remember adds the block. If there are too many blocks, it forgets the others.
func remember[K comparable, B any](blocks map[K]*B, key K, b *B) {
	if len(blocks) >= maxBlocks {
		clear(blocks)
	}
	blocks[key] = b
}

// depute returns the owners of the whole block if only that node is lost.
func (v *voters) depute(first netip.Addr, lost int32) *[blockSize]int32 {
	key := without{first, lost}
	if known := v.deputies[key]; known != nil {
		return known
	}
	owners := v.decide(first, blockSize).owners
	for i, o := range owners {
		if o == lost {
			owners[i] = nobody
		}
	}
	v.fill(&owners, first, blockSize, lost)
	remember(v.deputies, key, &owners)
	return &owners
}

// fill gives each of the block's first limit addresses without an owner, in
// order, the best of the nodes that has room for it: among the first
// addresses, up to the next power of two, and in the whole block. Nodes that
// own addresses already may leave room only in the block. The lost node, if it is not nobody, gets none.
func (v *voters) fill(owners *[blockSize]int32, first netip.Addr, limit int, lost int32) {
	nodes, load, total := len(v.names), v.tally.load, v.tally.total
	if lost != nobody {
		nodes--
		total[lost] = math.MaxInt // it has no room
		defer func() { total[lost] = 0 }()
	}
	if nodes == 0 {
		return
	}
	for _, o := range owners {
		if o != nobody {
			total[o]++
		}
	}
	counted, blockRoom := 0, share(blockSize, nodes)
	for i, addr := 0, first; i < limit; i, addr = i+1, addr.Next() {
		count := 1 << bits.Len(uint(i)) // 1, 2, 4, 4, 8, ...
		for ; counted < count; counted++ {
			if o := owners[counted]; o != nobody {
				load[o]++
			}
		}
		if owners[i] != nobody {
			continue
		}
		hash := hashAddr(addr)
		best := v.best(hash, share(count, nodes), blockRoom)
		if best == nobody {
			best = v.best(hash, blockSize, blockRoom)
		}
		owners[i] = best
		load[best]++
		total[best]++
	}
	for _, o := range owners {
		if o != nobody {
			load[o], total[o] = 0, 0
		}
	}
}

// tally counts each node's addresses: among the first ones of a block and in
// the whole of it. All counts are zero except while a block is filled.
type tally struct{ load, total []int }

// best returns the node with the best score for the hash among those with room,
// or nobody. An election spends most of its time here, so the room of a node is looked at
// only if its score is good enough.
func (v *voters) best(hash uint64, room, blockRoom int) int32 {
	best, most := nobody, uint64(0)
	for i, h := range v.hashes {
		if s := score(hash, h); s > most || best == nobody {
			if v.tally.load[i] < room && v.tally.total[i] < blockRoom {
				best, most = int32(i), s
			}
		}
	}
	return best
}

// share is the most that each of n nodes may own of count addresses.
func share(count, n int) int { return (5*count + 4*n - 1) / (4 * n) }

// place returns the first address of the address's block and its place in it.
func place(a netip.Addr) (first netip.Addr, offset int) {
	raw := a.As16()
	block, _ := a.Prefix(a.BitLen() - blockBits)
	return block.Addr(), int(raw[len(raw)-1] % blockSize)
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
