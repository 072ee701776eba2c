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

// queue is the leases that rest in a space, by the time of their release. All
// rest equally long, so the first is the first to be free.
type queue struct{ head, tail *lease }

// insert puts a lease in its place, which is at the end for one that was just
// released.
func (q *queue) insert(l *lease) {
	before := q.tail
	for before != nil && before.since > l.since {
		before = before.queue.prev
	}
	l.queue.prev = before
	if before == nil {
		l.queue.next, q.head = q.head, l
	} else {
		l.queue.next, before.queue.next = before.queue.next, l
	}
	if l.queue.next == nil {
		q.tail = l
	} else {
		l.queue.next.queue.prev = l
	}
}

func (q *queue) remove(l *lease) {
	b := &l.queue
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

// due is when the first lease that rests in the space is free.
func (s *space) due() time.Duration { return s.queue.head.since + s.rest }

// tick brings the allocator to the present: who has rested out is free.
func (a *Allocator) tick(now time.Time) {
	a.clock.set(now)
	for len(a.due) > 0 && a.due[0].due() <= a.clock.elapsed {
		l := a.due[0].queue.head
		a.unrest(l)
		a.free(l)
	}
}

// rest makes a lease rest that nobody holds, and that says for whom and since
// when.
func (a *Allocator) rest(l *lease) {
	l.resting = true
	s := l.space
	s.resting++
	s.queue.insert(l)
	if s.queue.head == l {
		a.due.update(s)
	}
	if first := a.namesakes[l.hash]; first != nil {
		l.namesake.next, first.namesake.prev = first, l
	}
	a.namesakes[l.hash] = l
}

// unrest takes a lease out of quarantine. It is neither held nor free then.
func (a *Allocator) unrest(l *lease) {
	s := l.space
	first := s.queue.head == l
	s.resting--
	s.queue.remove(l)
	if first {
		a.due.update(s)
	}
	b := &l.namesake
	if b.next != nil {
		b.next.namesake.prev = b.prev
	}
	switch {
	case b.prev != nil:
		b.prev.namesake.next = b.next
	case b.next != nil:
		a.namesakes[l.hash] = b.next
	default:
		delete(a.namesakes, l.hash)
	}
	b.next, b.prev = nil, nil
	l.resting, l.name = false, ""
}

// Rest records that the Service of this name released addr at since, before
// this allocator knew of it: the address rests for what is left of its time.
// Nothing happens when it is held or rests already, or when its time is over.
// A release in the future counts as one now. It costs least oldest first.
func (a *Allocator) Rest(name string, addr netip.Addr, since, now time.Time) {
	a.tick(now)
	addr = canonical(addr)
	if !addr.IsValid() || a.leases[addr] != nil {
		return
	}
	s, age := a.spaceOf(addr), max(0, now.Sub(since))
	if age < s.rest {
		l := a.newLease(addr, s)
		l.name, l.hash, l.since = name, a.hash(name), a.clock.elapsed-age
		a.rest(l)
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
		for l := s.queue.head; l != nil; l = l.queue.next {
			rested = append(rested, Rested{l.addr, s.name(), l.name, a.clock.at(l.since), a.clock.at(l.since + s.rest)})
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
