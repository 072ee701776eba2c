package ipam

import (
	"encoding/binary"
	"net/netip"
	"slices"

	"github.com/google/btree"
)

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

// next and prev wrap around: whoever calls them knows of a neighbour there.
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

// freeSpace is the free addresses of one family of one pool: a B-tree of
// disjoint runs, so that its memory follows the number of holes and not the number
// of addresses. Ordered by their ends: taking the lowest address leaves a run's key
// as it is. No two runs touch.
//
// What is given back is mostly below what was never given, and so taken next. It
// stays out of the tree, which costs ten times as much, as long as it is little.
type freeSpace struct {
	runs *btree.BTreeG[run]
	// back is what was given back last, highest first, and in no run.
	back []num
}

// maxBack bounds what inserting into back moves in memory.
const maxBack = 64

// degree of the B-tree: measured, 16 to 64 are alike, 8 and 128 are slower.
const degree = 32

func newFreeSpace(runs []run) freeSpace {
	t := btree.NewG(degree, func(a, b run) bool { return a.to.less(b.to) })
	for _, r := range runs {
		t.ReplaceOrInsert(r)
	}
	return freeSpace{runs: t}
}

func (s *freeSpace) empty() bool { return s.runs.Len() == 0 && len(s.back) == 0 }

// takeLowest takes the lowest free address of a space that is not empty.
func (s *freeSpace) takeLowest() num {
	r, ok := s.runs.Min()
	if last := len(s.back) - 1; last >= 0 && (!ok || s.back[last].less(r.from)) {
		n := s.back[last]
		s.back = s.back[:last]
		return n
	}
	n := r.from
	s.cut(r, n)
	return n
}

// take takes one address and reports whether it was free.
func (s *freeSpace) take(n num) bool {
	if i, ok := s.seekBack(n); ok {
		s.back = slices.Delete(s.back, i, i+1)
		return true
	}
	r, ok := s.seek(n)
	if !ok || n.less(r.from) {
		return false
	}
	s.cut(r, n)
	return true
}

// cut takes n out of the run r.
func (s *freeSpace) cut(r run, n num) {
	if n == r.to {
		s.runs.Delete(r)
	} else {
		s.runs.ReplaceOrInsert(run{n.next(), r.to})
	}
	if r.from.less(n) {
		s.runs.ReplaceOrInsert(run{r.from, n.prev()})
	}
}

// put gives back an address that was taken.
func (s *freeSpace) put(n num) {
	if len(s.back) == maxBack {
		s.joinBack()
	}
	i, _ := s.seekBack(n)
	s.back = slices.Insert(s.back, i, n)
}

// seekBack returns where an address is in back, or would be.
func (s *freeSpace) seekBack(n num) (int, bool) {
	return slices.BinarySearchFunc(s.back, n, func(m, n num) int { return n.compare(m) })
}

// joinBack moves what was given back into the tree.
func (s *freeSpace) joinBack() {
	for _, n := range s.back {
		s.join(n)
	}
	s.back = s.back[:0]
}

// join adds an address that is in no run, and joins the runs beside it.
func (s *freeSpace) join(n num) {
	r := run{n, n}
	if after, ok := s.seek(n); ok && after.from == n.next() {
		r.to = after.to
	}
	if n != (num{}) {
		if before, ok := s.runs.Delete(run{to: n.prev()}); ok {
			r.from = before.from
		}
	}
	s.runs.ReplaceOrInsert(r)
}

// seek returns the first run that does not end below n.
func (s *freeSpace) seek(n num) (found run, ok bool) {
	s.runs.AscendGreaterOrEqual(run{to: n}, func(r run) bool {
		found, ok = r, true
		return false
	})
	return found, ok
}
