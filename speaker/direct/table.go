package direct

import (
	"cmp"
	"hash/fnv"
	"math/bits"
	"slices"
	"strconv"

	"github.com/lodestone-lb/lodestone/speaker/plan"
)

// The number of buckets depends on the policy alone. If it grew with the number of nodes, it would move all
// flows when it does.
const (
	// clusterSize is for policy Cluster: the shares of ten nodes differ from their weights by 4.4 % at most in half
	// of all clusters, by 7.8 % in the worst. All speakers of a cluster must have the same size.
	clusterSize = 1 << 13
	// localSize is for policy Local. Each set of nodes has such a table, so there are many, with few nodes
	// in each.
	localSize = 1 << 10
)

// sizeOf returns how many buckets the Service's table has.
func sizeOf(s plan.Direct) int {
	if s.Local {
		return localSize
	}
	return clusterSize
}

// maxRing is how many nodes a segment of an unknown connection visits.
const maxRing = 6

// maxWeight bounds the slots of a node. If a node has more endpoints, a slot stands for several on all nodes.
const maxWeight = 16

// table has the nodes that keep the connections of a Service. It is computed from the Service's backends,
// with the same result on every node.
//
// It uses rendezvous hashing. Each bucket ranks all slots, and belongs to the best one that takes
// new connections. A node that joins takes buckets from lower-ranking nodes, and a node that leaves
// gives its buckets to them. So the nodes that rank high in a bucket are the ones that may have had
// it, and a speaker that has just started knows them, too.
// A node has a slot for each endpoint, so that its share is proportional to their number.
type table struct {
	nodes   []string // by number, in the order of the names
	first   []order  // of the first slot of each node
	buckets []bucket
}

// bucket has the nodes for the flows with one hash, by number: no cluster has 65,536.
type bucket struct {
	// open is the node that takes new connections.
	open uint16
	// ring are the nodes that may keep the older connections. Each node that does not know the
	// connection of a segment hands it to the node before it in the ring, until one knows the
	// connection or all were asked. The order depends only on the nodes in the ring, so that all
	// are asked even while nodes disagree about which one takes new connections.
	ring []uint16
}

// newTable returns the table of backends, which are sorted by node, with so many buckets.
func newTable(backends []plan.Backend, size int) *table {
	t := &table{}
	if len(backends) == 0 {
		return t
	}
	part, slots, open := partOf(backends), make([][]order, len(backends)), make([]int, len(backends))
	for i, b := range backends {
		for slot := range share(b.Open+b.Draining, part) {
			slots[i] = append(slots[i], newOrder(b.Node, slot, size))
		}
		t.nodes, t.first, open[i] = append(t.nodes, b.Node), append(t.first, newOrder(b.Node, 0, size)), share(b.Open, part)
	}
	t.buckets = make([]bucket, size)
	rings, ring := make([]uint16, 0, size*min(len(backends), maxRing)), make([]score, 0, maxRing)
	for i := range t.buckets {
		best := score{open: worst, any: worst}
		ring = ring[:0] // the best maxRing so far, in order: to sort all would cost more
		for node := range slots {
			s := rank(uint32(i), slots[node], open[node], node)
			if s.open < best.open || s.open == best.open && s.any < best.any {
				best = s
			}
			at := len(ring)
			for at > 0 && s.any < ring[at-1].any {
				at--
			}
			if at < maxRing {
				ring = slices.Insert(ring[:min(len(ring), maxRing-1)], at, s)
			}
		}
		slices.SortFunc(ring, func(a, b score) int { return cmp.Or(cmp.Compare(a.first, b.first), cmp.Compare(a.node, b.node)) })
		from := len(rings)
		for _, s := range ring {
			rings = append(rings, uint16(s.node))
		}
		t.buckets[i] = bucket{uint16(best.node), rings[from:len(rings):len(rings)]}
	}
	return t
}

// partOf returns for how many endpoints a slot stands.
func partOf(backends []plan.Backend) int {
	most := 0
	for _, b := range backends {
		most = max(most, b.Open+b.Draining)
	}
	return (most + maxWeight - 1) / maxWeight
}

// share returns how many slots stand for n endpoints.
func share(n, part int) int { return (n + part - 1) / part }

// score is the place of a node in a bucket's ranking: lower is better.
type score struct {
	node      int
	open, any uint32 // of its best slot that takes new connections, and of its best slot
	first     uint32 // of its first slot
}

const worst = ^uint32(0)

func rank(bucket uint32, slots []order, open, node int) score {
	s := score{node, worst, worst, worst}
	for slot := range slots {
		place := slots[slot].place(bucket)
		s.any = min(s.any, place)
		if slot < open {
			s.open = min(s.open, place)
		}
		if slot == 0 {
			s.first = place
		}
	}
	return s
}

// member is a node and its number in a table.
type member struct {
	name   string
	number int // -1: it has no backend
	first  order
}

func (t *table) member(name string) member {
	return member{name, slices.Index(t.nodes, name), newOrder(name, 0, len(t.buckets))}
}

// after returns the node to which m hands segments of unknown connections in bucket i: the next one before m in the ring
// that is not silent. -1: there is none. If m is not in the ring, it uses the place that it would have there: in the tables
// of other nodes it may be in the ring, and from another place it would skip nodes that were not asked.
func (t *table) after(i int, m *member, silent []bool) int {
	ring := t.buckets[i].ring
	at := slices.IndexFunc(ring, func(n uint16) bool { return int(n) == m.number })
	if at < 0 {
		at, _ = slices.BinarySearchFunc(ring, m.first.place(uint32(i)), func(n uint16, place uint32) int {
			return cmp.Or(cmp.Compare(t.first[n].place(uint32(i)), place), cmp.Compare(t.nodes[n], m.name))
		})
	}
	for j := range ring {
		if next := int(ring[(at+2*len(ring)-1-j)%len(ring)]); next != m.number && !silent[next] {
			return next
		}
	}
	return -1
}

// mix spreads the bits (the finalizer of MurmurHash3).
func mix(x uint64) uint64 {
	x ^= x >> 33
	x *= 0xff51afd7ed558ccd
	x ^= x >> 33
	x *= 0xc4ceb9fe1a85ec53
	return x ^ x>>33
}

// order is a slot's order of all buckets, whose number is a power of 2. It is a permutation, which makes shares more even
// than random scores do.
type order struct {
	mask, half uint32 // the bits of a place, and how many of them are the lower half
	rounds     [3]struct{ flip, factor uint32 }
}

func newOrder(node string, slot, size int) (o order) {
	h := fnv.New64a()
	h.Write([]byte(node + " " + strconv.Itoa(slot)))
	o.mask, o.half = uint32(size-1), uint32(bits.Len(uint(size)))/2
	key := mix(h.Sum64())
	for i := range o.rounds {
		o.rounds[i].flip, o.rounds[i].factor = uint32(key), uint32(key>>32)|1
		key = mix(key + 0x9e3779b97f4a7c15)
	}
	return o
}

// place returns the place of a bucket.
func (o *order) place(bucket uint32) uint32 {
	for _, r := range &o.rounds {
		bucket = (bucket ^ r.flip) & o.mask * r.factor & o.mask
		bucket ^= bucket >> o.half
	}
	return bucket
}
