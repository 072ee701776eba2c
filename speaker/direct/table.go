package direct

import (
	"cmp"
	"hash/fnv"
	"math/bits"
	"slices"
	"strconv"

	"github.com/lodestone-lb/lodestone/speaker/plan"
)

// A table has as many buckets as follows from the policy, and no more when it has more nodes: one that
// grew would move all flows, to buckets that rank the nodes which had them anyhow.
const (
	// clusterSize is for policy Cluster: the shares of ten nodes differ from their weights by 4.4 % at most in half
	// of all clusters, by 7.8 % in the worst. Speakers of another size would have other tables.
	clusterSize = 1 << 13
	// localSize is for policy Local. There are many such tables, as each set of nodes has one, and the
	// nodes in each are few.
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

// maxWeight bounds the slots of a node: of more endpoints, all nodes have a part each.
const maxWeight = 16

// table is what follows from the backends of a Service, on every node the same.
//
// It is rendezvous hashing: each bucket ranks all slots, whichever there are, and the best
// one that takes new connections has it. So who comes takes buckets from those that rank
// below, and who goes leaves them to those: the nodes that rank high in a bucket are those
// that have had it, which a speaker knows that was just started, too.
// A node has a slot for each endpoint, so that its share follows their number.
type table struct {
	nodes   []string // by their numbers, which are in the order of the names
	first   []order  // of the first slot of each node
	buckets []bucket
}

// bucket is what flows have in common that have one hash. Its nodes are numbers: no cluster has 65,536.
type bucket struct {
	// open is the node that takes new connections.
	open uint16
	// ring are the nodes that the connections of all others are at, if it is not that one: a
	// segment is handed from each to the one before it, until somebody knows the connection
	// or all were asked. Their order depends on nothing but them, so that it ends well while
	// nodes disagree about who takes new connections.
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

// partOf returns how many endpoints a slot stands for.
func partOf(backends []plan.Backend) int {
	most := 0
	for _, b := range backends {
		most = max(most, b.Open+b.Draining)
	}
	return (most + maxWeight - 1) / maxWeight
}

// share returns how many slots stand for n endpoints.
func share(n, part int) int { return (n + part - 1) / part }

// score is where a node stands in a bucket's ranking: lower is better.
type score struct {
	node      int
	open, any uint32 // of its best slot that takes new connections, of its best slot
	first     uint32 // of its first slot, however many it has
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

// member is a node in view of a table.
type member struct {
	name   string
	number int // -1: it has no backend
	first  order
}

func (t *table) member(name string) member {
	return member{name, slices.Index(t.nodes, name), newOrder(name, 0, len(t.buckets))}
}

// after returns the node that a node hands segments to of connections in a bucket that it does not know: the one before
// it in the ring that is not silent. A node that is not in the ring has its place there all the same: by the tables of
// others it may be in it, and from elsewhere it would hand the segment past those that were not asked. -1: there is none.
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

// order is a slot's order of all buckets, whose number is a power of 2. Each place is had by one bucket, which makes
// shares more even than random scores do.
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

// place returns where a bucket stands.
func (o *order) place(bucket uint32) uint32 {
	for _, r := range &o.rounds {
		bucket = (bucket ^ r.flip) & o.mask * r.factor & o.mask
		bucket ^= bucket >> o.half
	}
	return bucket
}
