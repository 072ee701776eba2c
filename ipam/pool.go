package ipam

import (
	"cmp"
	"net/netip"
	"slices"
	"sort"
	"time"

	"go4.org/netipx"

	"github.com/lodestone-lb/lodestone/pkg/config"
)

// pool is a pool of the configuration with the state of its addresses.
type pool struct {
	config.Pool
	// spaces has one space per family that the pool has.
	spaces [len(families)]*space
}

// space is one family of one pool.
type space struct {
	// pool is nil for addresses that no pool hands out.
	pool              *pool
	family            Family
	runs              []run
	size              float64
	free              freeSpace
	assigned, resting int
	queue             queue
}

// poolSet is the pools in force and the ways to find one.
type poolSet struct {
	pools  []*pool
	byName map[string]*pool
	// auto is the pools with AutoAssign in the order to draw from them.
	auto     []*pool
	segments []segment
	// nowhere is the space of stranded addresses.
	nowhere space
}

// segment is a range of a pool, sorted by address. space is nil where the
// pool withholds.
type segment struct {
	from, to netip.Addr
	pool     *pool
	space    *space
}

// SetPools replaces the pools, which must not overlap, and the quarantine
// time. Addresses in use stay with their owners, also when no pool contains
// them any more (they are then stranded), and addresses in quarantine stay
// there, but from the next call on never longer than the new time. It costs a
// look at every pool and every address not free; only what a changed pool
// contains is built anew.
func (a *Allocator) SetPools(pools []config.Pool, quarantine time.Duration) {
	a.quarantine = quarantine
	old := a.byName
	for _, p := range a.pools {
		p.detach()
	}
	a.pools, a.byName = make([]*pool, len(pools)), make(map[string]*pool, len(pools))
	for i, c := range pools {
		p := &pool{Pool: c}
		p.attach(old[c.Name])
		a.pools[i], a.byName[c.Name] = p, p
	}
	a.sortPools()
	a.rehome()
}

// detach marks the spaces of a pool that is replaced.
func (p *pool) detach() {
	for _, s := range p.spaces {
		if s != nil {
			s.pool = nil
		}
	}
}

// attach gives the pool its spaces: those of the pool that had its name
// before, where their addresses are the same, and new ones otherwise.
func (p *pool) attach(old *pool) {
	var runs [len(families)][]run
	for _, r := range ranges(p.Free) {
		i := familyOf(r.From()).index()
		runs[i] = append(runs[i], run{numOf(r.From()), numOf(r.To())})
	}
	for i, f := range families {
		switch {
		case len(runs[i]) == 0:
		case old != nil && old.spaces[i] != nil && slices.Equal(old.spaces[i].runs, runs[i]):
			p.spaces[i] = old.spaces[i]
			p.spaces[i].pool = p
		default:
			p.spaces[i] = newSpace(p, f, runs[i])
		}
	}
}

func newSpace(p *pool, f Family, runs []run) *space {
	s := &space{pool: p, family: f, runs: runs, free: newFreeSpace(runs)}
	for _, r := range runs {
		s.size += r.size()
	}
	return s
}

// sortPools puts the pools and their ranges in order.
func (ps *poolSet) sortPools() {
	ps.auto, ps.segments = nil, nil
	for _, p := range ps.pools {
		if p.AutoAssign {
			ps.auto = append(ps.auto, p)
		}
		for _, r := range ranges(p.Free) {
			ps.segments = append(ps.segments, segment{r.From(), r.To(), p, p.spaces[familyOf(r.From()).index()]})
		}
		for _, r := range ranges(p.Withheld) {
			ps.segments = append(ps.segments, segment{r.From(), r.To(), p, nil})
		}
	}
	slices.SortStableFunc(ps.auto, func(p, q *pool) int { return cmp.Compare(p.Priority, q.Priority) })
	slices.SortFunc(ps.segments, func(s, t segment) int { return s.from.Compare(t.from) })
}

// rehome finds the present space of every lease whose space is gone, and of
// stranded ones. Held leases may come in any order, resting ones may not.
func (a *Allocator) rehome() {
	for _, l := range a.leases {
		if l.space.pool == nil && !l.resting {
			l.space.assigned--
			l.moveTo(a.spaceOf(l.addr))
			l.space.assigned++
		}
	}
	for l := a.resting.head; l != nil; l = l.beside[inAllocator].next {
		if l.space.pool == nil {
			l.space.resting--
			l.space.queue.remove(l, inSpace)
			l.moveTo(a.spaceOf(l.addr))
			l.space.queue.push(l, inSpace)
			l.space.resting++
		}
	}
}

func (l *lease) moveTo(s *space) {
	l.space = s
	s.take(l.addr)
	if l.asked == "" {
		l.asked = s.name()
	}
}

func (ps *poolSet) exists(name string) bool { return ps.byName[name] != nil }

// find returns the segment that contains the address, nil if none does.
func (ps *poolSet) find(addr netip.Addr) *segment {
	i := sort.Search(len(ps.segments), func(i int) bool { return addr.Less(ps.segments[i].from) }) - 1
	if i < 0 || ps.segments[i].to.Less(addr) {
		return nil
	}
	return &ps.segments[i]
}

// spaceOf returns the space that hands the address out, or nowhere.
func (ps *poolSet) spaceOf(addr netip.Addr) *space {
	if s := ps.find(addr); s != nil && s.space != nil {
		return s.space
	}
	return &ps.nowhere
}

// gives reports whether the pool has a free address of each family of the
// set.
func (p *pool) gives(set familySet) bool {
	for i, s := range p.spaces {
		if set&(1<<i) != 0 && (s == nil || s.free.empty()) {
			return false
		}
	}
	return true
}

// name is the name of the space's pool, empty for nowhere.
func (s *space) name() string {
	if s.pool == nil {
		return ""
	}
	return s.pool.Name
}

func (s *space) take(addr netip.Addr) {
	if s.pool != nil {
		s.free.take(numOf(addr))
	}
}

func (s *space) put(addr netip.Addr) {
	if s.pool != nil {
		s.free.put(numOf(addr))
	}
}

// ranges returns the ranges of a set, which may be nil.
func ranges(s *netipx.IPSet) []netipx.IPRange {
	if s == nil {
		return nil
	}
	return s.Ranges()
}
