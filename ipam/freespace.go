package ipam

import (
	"slices"

	"github.com/google/btree"
)

// freeSpace is the free addresses of one family of one pool: a B-tree of
// disjoint runs, so that its memory follows the number of holes and not the number
// of addresses. Ordered by their ends: taking the lowest address leaves a run's key
// as it is. No two runs touch.
//
// An address that was given back is mostly lower than those that were never given, so it is
// taken next. A few of them are kept in a list, because the tree costs ten times as much.
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
