package ipam

import (
	"cmp"
	"container/heap"
	"math"
	"net/netip"
	"slices"
	"time"
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

// quarantine keeps the addresses that were released a short time ago.
type quarantine struct {
	clock  clock
	at     map[netip.Addr]*quarantined
	byName map[string]*quarantined
	queues map[*space]*queue
	due    dueQueues
	spare  spare[quarantined]
}

// forever is the length of quarantines before the first setup.
const forever = time.Duration(math.MaxInt64 / 2)

// quarantined is an address in quarantine, released by name at since on the
// allocator's clock.
type quarantined struct {
	addr  netip.Addr
	name  string
	since time.Duration
	queue *queue
	// inQueue links those of a queue, namesake those under a name.
	inQueue, namesake struct{ prev, next *quarantined }
}

// waitsFor reports whether the address is kept for the party.
func (r *quarantined) waitsFor(p party) bool { return r.name != "" && r.name == p.owner.Name }

func (r *quarantined) until() time.Duration { return r.since + r.queue.length }

// count changes by how much the namespace that released the address uses its quota.
func (r *quarantined) count(change int) {
	r.queue.space.usages.add(namespaceOf(r.name), usage{quarantined: change})
}

// of returns the queue of a space.
func (q *quarantine) of(s *space) *queue {
	c := q.queues[s]
	if c == nil {
		c = &queue{space: s, place: notDue}
		q.queues[s] = c
	}
	return c
}

// rehome finds the present space of every address whose space is gone, and of
// stranded ones, and counts what namespaces have in quarantine.
func (q *quarantine) rehome(ps *pools) {
	var homeless []*quarantined
	for _, r := range q.at {
		if r.queue.space.pool == nil {
			homeless = append(homeless, r)
		} else {
			r.count(+1)
		}
	}
	c := q.of(&ps.nowhere)
	c.head, c.tail, c.space.quarantined = nil, nil, 0
	slices.SortFunc(homeless, func(r, t *quarantined) int {
		return cmp.Or(cmp.Compare(r.since, t.since), r.addr.Compare(t.addr))
	})
	for _, r := range homeless {
		s := ps.spaceOf(r.addr)
		s.take(r.addr)
		s.quarantined++
		r.queue = q.of(s)
		r.count(+1)
		r.queue.insert(r)
	}
}

// setLengths gives every space the length of its quarantine. A leased address goes
// back to the server, which decides how long nobody gets it.
func (q *quarantine) setLengths(ps *pools, length time.Duration) {
	old := q.queues
	q.queues, q.due = make(map[*space]*queue, len(old)), q.due[:0]
	set := func(s *space, length time.Duration) {
		if c := old[s]; c != nil {
			q.queues[s] = c
		}
		c := q.of(s)
		c.length, c.place = length, notDue
		if c.head != nil {
			q.due.update(c)
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

// begin puts an address that nobody holds into quarantine, in the space of its queue.
func (q *quarantine) begin(begun quarantined) {
	r := q.spare.pop()
	*r = begun
	q.at[r.addr] = r
	r.queue.space.quarantined++
	r.count(+1)
	r.queue.insert(r)
	if r.queue.head == r {
		q.due.update(r.queue)
	}
	if first := q.byName[r.name]; first != nil {
		r.namesake.next, first.namesake.prev = first, r
	}
	q.byName[r.name] = r
}

// end ends a quarantine. The caller says what becomes of the address.
func (q *quarantine) end(r *quarantined) {
	first := r.queue.head == r
	r.queue.space.quarantined--
	r.count(-1)
	r.queue.remove(r)
	if first {
		q.due.update(r.queue)
	}
	b := &r.namesake
	if b.next != nil {
		b.next.namesake.prev = b.prev
	}
	switch {
	case b.prev != nil:
		b.prev.namesake.next = b.next
	case b.next != nil:
		q.byName[r.name] = b.next
	default:
		delete(q.byName, r.name)
	}
	delete(q.at, r.addr)
	q.spare.push(r)
}

// over returns the first address whose quarantine is over, nil if there is none.
func (q *quarantine) over() *quarantined {
	if len(q.due) == 0 || q.due[0].due() > q.clock.elapsed {
		return nil
	}
	return q.due[0].head
}

// list returns all that is in quarantine, in the order of release.
func (q *quarantine) list() (all []Quarantined) {
	for _, r := range q.at {
		all = append(all, Quarantined{r.addr, r.queue.space.name(), r.name, q.clock.at(r.since), q.clock.at(r.until())})
	}
	slices.SortFunc(all, func(r, t Quarantined) int { return cmp.Or(r.Since.Compare(t.Since), r.Addr.Compare(t.Addr)) })
	return all
}

// queue is the addresses of a space in quarantine, by the time of the release. All
// stay equally long, so the first is the first to be free.
type queue struct {
	space      *space
	length     time.Duration
	head, tail *quarantined
	place      int // in dueQueues
}

// due is when the first address is free.
func (q *queue) due() time.Duration { return q.head.until() }

// insert puts an address in its place, which is at the end for one just released.
func (q *queue) insert(r *quarantined) {
	before := q.tail
	for before != nil && before.since > r.since {
		before = before.inQueue.prev
	}
	r.inQueue.prev = before
	if before == nil {
		r.inQueue.next, q.head = q.head, r
	} else {
		r.inQueue.next, before.inQueue.next = before.inQueue.next, r
	}
	if r.inQueue.next == nil {
		q.tail = r
	} else {
		r.inQueue.next.inQueue.prev = r
	}
}

func (q *queue) remove(r *quarantined) {
	b := &r.inQueue
	if b.prev == nil {
		q.head = b.next
	} else {
		b.prev.inQueue.next = b.next
	}
	if b.next == nil {
		q.tail = b.prev
	} else {
		b.next.inQueue.prev = b.prev
	}
	b.next, b.prev = nil, nil
}

// dueQueues is a heap of the queues that are not empty, by when their first address
// is free.
type dueQueues []*queue

// notDue is the place of a queue that is not in the heap.
const notDue = -1

func (d dueQueues) Len() int           { return len(d) }
func (d dueQueues) Less(i, j int) bool { return d[i].due() < d[j].due() }
func (d dueQueues) Swap(i, j int) {
	d[i], d[j] = d[j], d[i]
	d[i].place, d[j].place = i, j
}

// Push is part of heap.Interface.
func (d *dueQueues) Push(x any) {
	q := x.(*queue) //nolint:errcheck // the heap has nothing else
	q.place = len(*d)
	*d = append(*d, q)
}

// Pop is part of heap.Interface.
func (d *dueQueues) Pop() any {
	last := len(*d) - 1
	q := (*d)[last]
	q.place = notDue
	(*d)[last] = nil
	*d = (*d)[:last]
	return q
}

// update puts a queue that has a new head in its place.
func (d *dueQueues) update(q *queue) {
	switch {
	case q.place == notDue:
		heap.Push(d, q)
	case q.head == nil:
		heap.Remove(d, q.place)
	default:
		heap.Fix(d, q.place)
	}
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
