package ipam

import (
	"cmp"
	"math"
	"net/netip"
	"slices"
	"time"

	"github.com/google/btree"
)

// Quarantined is an address in quarantine.
type Quarantined struct {
	Addr netip.Addr
	// Pool is empty if no pool hands the address out any more.
	Pool string
	// Name is the Service that released it, the only one that gets it before
	// Until.
	Name         string
	Since, Until time.Time
}

// MaxQuarantined is how many addresses that one namespace has released are in quarantine. Without a bound a namespace
// without a quota could fill the memory with addresses of a large pool.
const MaxQuarantined = 1 << 16

// quarantine keeps the addresses that were released a short time ago.
type quarantine struct {
	clock  clock
	at     map[netip.Addr]*quarantined
	byName map[string]*quarantined // what each name has released last
	counts map[string]int          // by namespace
	// spaces has those with addresses in quarantine. The first is the one of which an address is free next.
	spaces *btree.BTreeG[*space]
}

func newQuarantine() quarantine {
	return quarantine{
		at: map[netip.Addr]*quarantined{}, byName: map[string]*quarantined{}, counts: map[string]int{},
		spaces: btree.NewG(degree, func(s, t *space) bool {
			r, other := s.quarantined[0], t.quarantined[0]
			return cmp.Or(cmp.Compare(r.until(), other.until()), r.addr.Compare(other.addr)) < 0
		}),
	}
}

// forever is the length of quarantines before the first setup.
const forever = time.Duration(math.MaxInt64 / 2)

// quarantined is an address in quarantine, released by name at since on the
// allocator's clock.
type quarantined struct {
	addr  netip.Addr
	name  string
	since time.Duration
	space *space
	// later and earlier are what the same name has released after and before it.
	later, earlier *quarantined
}

// waitsFor reports whether the address is kept for the party.
func (r *quarantined) waitsFor(p party) bool { return r.name != "" && r.name == p.owner.Name }

func (r *quarantined) until() time.Duration { return r.since + r.space.quarantine }

func (r *quarantined) compare(other *quarantined) int {
	return cmp.Or(cmp.Compare(r.since, other.since), r.addr.Compare(other.addr))
}

func (r *quarantined) namespace() string { return namespaceOf(r.name) }

// count changes by how much the namespace that released the address uses its quota.
func (r *quarantined) count(change int) {
	if r.space.usages != nil {
		r.space.usages.add(r.namespace(), usage{quarantined: change})
	}
}

// rehome finds the present space of every address whose space is gone, and of
// stranded ones, and counts what namespaces have in quarantine.
func (q *quarantine) rehome(ps *pools) {
	var homeless []*quarantined
	for _, r := range q.at {
		if r.space.pool == nil {
			homeless = append(homeless, r)
		} else {
			r.count(+1)
		}
	}
	ps.nowhere.quarantined = nil
	slices.SortFunc(homeless, (*quarantined).compare)
	for _, r := range homeless {
		s := ps.spaceOf(r.addr)
		s.take(r.addr)
		r.space = s
		r.count(+1)
		s.insertQuarantined(r)
	}
}

// setLengths gives every space the length of its quarantine. A leased address goes
// back to the server, which decides how long nobody gets it.
func (q *quarantine) setLengths(ps *pools, length time.Duration) {
	q.spaces.Clear(false)
	set := func(s *space, length time.Duration) {
		if s.quarantine = length; len(s.quarantined) > 0 {
			q.spaces.ReplaceOrInsert(s)
		}
	}
	set(&ps.nowhere, length)
	for _, p := range ps.all {
		of := max(length, p.KeepFor)
		if p.DHCP != nil {
			of = 0
		}
		for _, s := range p.spaces {
			if s != nil {
				set(s, of)
			}
		}
	}
}

// begin puts an address that nobody holds into quarantine.
func (q *quarantine) begin(begun quarantined) {
	r := &begun
	q.at[r.addr] = r
	r.count(+1)
	q.change(r, (*space).insertQuarantined)
	if r.earlier = q.byName[r.name]; r.earlier != nil {
		r.earlier.later = r
	}
	q.byName[r.name] = r
	q.counts[r.namespace()]++
}

// excess returns the addresses that are free because the namespace has released too many: those that would be free
// first. They are an eighth of all, as it looks at everything in quarantine.
func (q *quarantine) excess(namespace string) (all []*quarantined) {
	if q.counts[namespace] <= MaxQuarantined {
		return nil
	}
	for _, r := range q.at {
		if r.namespace() == namespace {
			all = append(all, r)
		}
	}
	slices.SortFunc(all, func(r, other *quarantined) int {
		return cmp.Or(cmp.Compare(r.until(), other.until()), r.compare(other))
	})
	return all[:len(all)/8]
}

// end ends a quarantine. The caller decides what becomes of the address.
func (q *quarantine) end(r *quarantined) {
	r.count(-1)
	q.change(r, (*space).removeQuarantined)
	if r.earlier != nil {
		r.earlier.later = r.later
	}
	switch {
	case r.later != nil:
		r.later.earlier = r.earlier
	case r.earlier != nil:
		q.byName[r.name] = r.earlier
	default:
		delete(q.byName, r.name)
	}
	delete(q.at, r.addr)
	namespace := r.namespace()
	if left := q.counts[namespace] - 1; left > 0 {
		q.counts[namespace] = left
	} else {
		delete(q.counts, namespace)
	}
}

// change adds an address to those in quarantine of its space, or removes it.
func (q *quarantine) change(r *quarantined, how func(*space, *quarantined)) {
	s := r.space
	switch {
	case len(s.quarantined) == 0:
	case s.quarantined[0].compare(r) < 0: // the first one stays, and with it the place of the space
		how(s, r)
		return
	default:
		q.spaces.Delete(s)
	}
	if how(s, r); len(s.quarantined) > 0 {
		q.spaces.ReplaceOrInsert(s)
	}
}

// first returns the address that is free next, nil if there is none.
func (q *quarantine) first() *quarantined {
	if s, ok := q.spaces.Min(); ok {
		return s.quarantined[0]
	}
	return nil
}

// list returns all that is in quarantine, in the order of release.
func (q *quarantine) list() (all []Quarantined) {
	for _, r := range q.at {
		all = append(all, Quarantined{r.addr, r.space.name(), r.name, q.clock.at(r.since), q.clock.at(r.until())})
	}
	slices.SortFunc(all, func(r, t Quarantined) int { return cmp.Or(r.Since.Compare(t.Since), r.Addr.Compare(t.Addr)) })
	return all
}

// insertQuarantined adds an address to those of the space that are in quarantine.
func (s *space) insertQuarantined(r *quarantined) {
	i := len(s.quarantined) // most come last, and end first: then there is nothing to search for
	if i > 0 && s.quarantined[i-1].compare(r) > 0 {
		i, _ = slices.BinarySearchFunc(s.quarantined, r, (*quarantined).compare)
	}
	s.quarantined = slices.Insert(s.quarantined, i, r)
}

// removeQuarantined undoes insertQuarantined.
func (s *space) removeQuarantined(r *quarantined) {
	if s.quarantined[0] == r {
		s.quarantined[0] = nil
		s.quarantined = s.quarantined[1:]
		return
	}
	i, _ := slices.BinarySearchFunc(s.quarantined, r, (*quarantined).compare)
	s.quarantined = slices.Delete(s.quarantined, i, i+1)
}

// clock counts the time that has passed for the allocator. It never goes back. When the
// caller's clock is set back, no time has passed, and a quarantine lasts as long as before.
type clock struct {
	last    time.Time
	elapsed time.Duration
}

func (c *clock) set(now time.Time) {
	if passed := now.Sub(c.last); passed > 0 && !c.last.IsZero() {
		c.elapsed += passed
	}
	c.last = now
}

// at converts a time of this clock to the caller's clock as that goes now.
func (c *clock) at(t time.Duration) time.Time { return c.last.Add(t - c.elapsed) }
