package ipam

import (
	"cmp"
	"net/netip"
	"slices"
	"sort"

	"go4.org/netipx"
)

// Forbidden are addresses that no pool may hand out, whatever it contains.
type Forbidden struct {
	Range netipx.IPRange
	// Why completes "ADDR is ...": "the address of node n1". Where ranges
	// overlap, that of the narrowest counts.
	Why string
}

// forbiddenSet is what no pool may hand out.
type forbiddenSet struct {
	list []Forbidden
	bans [len(families)]bans
}

// ban is a range of forbidden addresses: entry n of the list.
type ban struct {
	run
	n int
}

// block is a range all of whose addresses are forbidden by bans[first:next],
// the only ones that reach into it.
type block struct {
	run
	first, next int
}

// bans are the forbidden addresses of one family, by their first address.
type bans struct {
	bans   []ban
	blocks []block
}

// set replaces what is forbidden. Most edits of a setup do not touch it.
func (fs *forbiddenSet) set(list []Forbidden) {
	if slices.Equal(fs.list, list) {
		return
	}
	*fs = forbiddenSet{list: slices.Clone(list)}
	for n, f := range list {
		from, to := f.Range.From().Unmap(), f.Range.To().Unmap()
		if f.Range.IsValid() && from.BitLen() == to.BitLen() {
			b := &fs.bans[familyOf(from).index()]
			if b.bans == nil {
				b.bans = make([]ban, 0, len(list))
			}
			b.bans = append(b.bans, ban{run{numOf(from), numOf(to)}, n})
		}
	}
	for i := range fs.bans {
		fs.bans[i].join()
	}
}

// join makes blocks of the bans that overlap.
func (b *bans) join() {
	slices.SortFunc(b.bans, func(x, y ban) int { return cmp.Or(x.from.compare(y.from), cmp.Compare(x.n, y.n)) })
	b.blocks = make([]block, 0, len(b.bans))
	for i, x := range b.bans {
		if last := len(b.blocks) - 1; last >= 0 && !b.blocks[last].to.less(x.from) {
			k := &b.blocks[last]
			k.next = i + 1
			if k.to.less(x.to) {
				k.to = x.to
			}
			continue
		}
		b.blocks = append(b.blocks, block{x.run, i, i + 1})
	}
}

// from returns the blocks that do not end below n.
func (b *bans) from(n num) []block {
	return b.blocks[sort.Search(len(b.blocks), func(i int) bool { return !b.blocks[i].to.less(n) }):]
}

// subtract appends to a list of runs what is left of r.
func (b *bans) subtract(runs []run, r run) []run {
	for _, k := range b.from(r.from) {
		if r.to.less(k.from) {
			break
		}
		if r.from.less(k.from) {
			runs = append(runs, run{r.from, k.from.prev()})
		}
		if !k.to.less(r.to) {
			return runs
		}
		r.from = k.to.next()
	}
	return append(runs, r)
}

// why returns the Why of the narrowest ban of an address; of two, the one that
// begins lower, then the one that is listed first.
func (fs *forbiddenSet) why(addr netip.Addr) (why string, forbidden bool) {
	b, n := &fs.bans[familyOf(addr).index()], numOf(addr)
	over := b.from(n)
	if len(over) == 0 || n.less(over[0].from) {
		return "", false
	}
	narrowest := -1.
	for _, x := range b.bans[over[0].first:over[0].next] {
		if size := x.size(); x.has(n) && (narrowest < 0 || size < narrowest) {
			why, narrowest = fs.list[x.n].Why, size
		}
	}
	return why, true
}
