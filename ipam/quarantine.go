package ipam

import (
	"cmp"
	"container/heap"
	"math"
	"net/netip"
	"slices"
	"time"
)

// clock counts the time that has passed for the allocator. It never goes
// back: where the caller's clock does, none has passed, so that all that
// rests has as long to rest as before.
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

// at is the time of the caller's clock, as it goes now, for one of this clock.
func (c *clock) at(t time.Duration) time.Time { return c.last.Add(t - c.elapsed) }

// forever is how long addresses rest before anybody has said how long.
const forever = time.Duration(math.MaxInt64 / 2)

// rest is that of an address which was released by name at since, on the
// allocator's clock.
type rest struct {
	addr  netip.Addr
	page  *page // of the address
	space *space
	name  string
	hash  uint64 // of the name
	since time.Duration
	// queue links the rests in a space, namesake those under a name.
	queue, namesake struct{ prev, next *rest }
}

// waitsFor reports whether an address rests for the party.
func (r *rest) waitsFor(p party) bool { return r.name != "" && r.name == p.owner.Name }

// queue is the rests in a space, by the time of the release. All are equally long,
// so the first is the first to end.
type queue struct{ head, tail *rest }

// insert puts a rest in its place, which is at the end for one that just begins.
func (q *queue) insert(r *rest) {
	before := q.tail
	for before != nil && before.since > r.since {
		before = before.queue.prev
	}
	r.queue.prev = before
	if before == nil {
		r.queue.next, q.head = q.head, r
	} else {
		r.queue.next, before.queue.next = before.queue.next, r
	}
	if r.queue.next == nil {
		q.tail = r
	} else {
		r.queue.next.queue.prev = r
	}
}

func (q *queue) remove(r *rest) {
	b := &r.queue
	if b.prev == nil {
		q.head = b.next
	} else {
		b.prev.queue.next = b.next
	}
	if b.next == nil {
		q.tail = b.prev
	} else {
		b.next.queue.prev = b.prev
	}
	b.next, b.prev = nil, nil
}

// dueSpaces is a heap of the spaces in which something rests, by when the next
// address of each is free.
type dueSpaces []*space

// notDue is the place of a space that is not in the heap.
const notDue = -1

func (d dueSpaces) Len() int           { return len(d) }
func (d dueSpaces) Less(i, j int) bool { return d[i].due() < d[j].due() }
func (d dueSpaces) Swap(i, j int) {
	d[i], d[j] = d[j], d[i]
	d[i].place, d[j].place = i, j
}

// Push is part of heap.Interface.
func (d *dueSpaces) Push(x any) {
	s := x.(*space) //nolint:errcheck // the heap has nothing else
	s.place = len(*d)
	*d = append(*d, s)
}

// Pop is part of heap.Interface.
func (d *dueSpaces) Pop() any {
	last := len(*d) - 1
	s := (*d)[last]
	s.place = notDue
	(*d)[last] = nil
	*d = (*d)[:last]
	return s
}

// update puts a space whose queue has a new head in its place.
func (d *dueSpaces) update(s *space) {
	switch {
	case s.place == notDue:
		heap.Push(d, s)
	case s.queue.head == nil:
		heap.Remove(d, s.place)
	default:
		heap.Fix(d, s.place)
	}
}

// due is when the first address that rests in the space is free.
func (s *space) due() time.Duration { return s.queue.head.since + s.rest }

// tick brings the allocator to the present: who has rested out is free.
func (a *Allocator) tick(now time.Time) {
	a.clock.set(now)
	for len(a.due) > 0 && a.due[0].due() <= a.clock.elapsed {
		a.wake(a.due[0].queue.head)
	}
}

// rest begins a rest of an address that nobody holds.
func (a *Allocator) rest(begun rest) {
	r := pop(&a.spare.rests)
	*r = begun
	r.page.set(r.addr, use{rest: r})
	s := r.space
	s.resting++
	s.countRest(r, +1)
	s.queue.insert(r)
	if s.queue.head == r {
		a.due.update(s)
	}
	if first := a.namesakes.get(r.hash); first != nil {
		r.namesake.next, first.namesake.prev = first, r
	}
	a.namesakes.set(r.hash, r)
}

// wake ends a rest: the address is free.
func (a *Allocator) wake(r *rest) {
	addr, p, s := r.addr, r.page, r.space
	a.unrest(r)
	a.free(addr, p, s)
}

// unrest ends a rest. The caller says what the address is used for then.
func (a *Allocator) unrest(r *rest) {
	s := r.space
	first := s.queue.head == r
	s.resting--
	s.countRest(r, -1)
	s.queue.remove(r)
	if first {
		a.due.update(s)
	}
	b := &r.namesake
	if b.next != nil {
		b.next.namesake.prev = b.prev
	}
	switch {
	case b.prev != nil:
		b.prev.namesake.next = b.next
	case b.next != nil:
		a.namesakes.set(r.hash, b.next)
	default:
		a.namesakes.remove(r.hash)
	}
	*r = rest{}
	push(&a.spare.rests, r)
}

// Rest records that the Service of this name released addr at since, before
// this allocator knew of it: the address rests for what is left of its time.
// Nothing happens when it is held or rests already, or when its time is over.
// A release in the future counts as one now. It costs least oldest first.
func (a *Allocator) Rest(name string, addr netip.Addr, since, now time.Time) {
	a.tick(now)
	addr = canonical(addr)
	if !addr.IsValid() || a.uses.get(addr) != (use{}) {
		return
	}
	s, age := a.spaceOf(addr), max(0, now.Sub(since))
	if age < s.rest {
		a.occupy(addr, s)
		a.rest(rest{addr: addr, page: a.uses.page(addr), space: s, name: name, hash: a.hash(name), since: a.clock.elapsed - age})
	}
}

// Rested is an address that rests.
type Rested struct {
	Addr netip.Addr
	// Pool is empty if no pool hands the address out any more.
	Pool string
	// Name is the Service that released it, the only one that gets it before
	// Until.
	Name         string
	Since, Until time.Time
}

// Resting returns everything that rests, in the order of release. It is what
// Rest needs after a restart.
func (a *Allocator) Resting(now time.Time) []Rested {
	a.tick(now)
	var rested []Rested
	for _, s := range a.due {
		for r := s.queue.head; r != nil; r = r.queue.next {
			rested = append(rested, Rested{r.addr, s.name(), r.name, a.clock.at(r.since), a.clock.at(r.since + s.rest)})
		}
	}
	slices.SortFunc(rested, func(r, t Rested) int { return cmp.Or(r.Since.Compare(t.Since), r.Addr.Compare(t.Addr)) })
	return rested
}

// NextFree returns when the next address ends its rest, and false if none
// rests.
func (a *Allocator) NextFree(now time.Time) (time.Time, bool) {
	a.tick(now)
	if len(a.due) == 0 {
		return time.Time{}, false
	}
	return a.clock.at(a.due[0].due()), true
}
