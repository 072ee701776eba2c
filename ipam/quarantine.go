package ipam

import "time"

// A resting lease stands in two queues, the one of the allocator and the one
// of its space, both in the order of release. Nobody rests longer than
// now+quarantine (tick sees to it), so each release goes to the end and the
// queues stay sorted by the end of rest, also when the clock is set back.
const (
	inAllocator = iota
	inSpace
)

// queue is a list of resting leases, linked through beside[which].
type queue struct{ head, tail *lease }

func (q *queue) push(l *lease, which int) {
	l.beside[which].prev = q.tail
	if q.tail == nil {
		q.head = l
	} else {
		q.tail.beside[which].next = l
	}
	q.tail = l
}

func (q *queue) remove(l *lease, which int) {
	b := &l.beside[which]
	if b.prev == nil {
		q.head = b.next
	} else {
		b.prev.beside[which].next = b.next
	}
	if b.next == nil {
		q.tail = b.prev
	} else {
		b.next.beside[which].prev = b.prev
	}
	b.next, b.prev = nil, nil
}

// tick brings the quarantine to the present: nobody rests longer than
// quarantine from now (the clock was set back, or the time was shortened),
// and who has rested out is free.
func (a *Allocator) tick(now time.Time) {
	longest := now.Add(a.quarantine)
	for l := a.resting.tail; l != nil && l.until.After(longest); l = l.beside[inAllocator].prev {
		l.until = longest
	}
	for l := a.resting.head; l != nil && !l.until.After(now); l = a.resting.head {
		a.unrest(l)
		a.free(l)
	}
}

// rest takes a lease from its holder, who has to forget it, too.
func (a *Allocator) rest(l *lease, now time.Time) {
	l.space.assigned--
	if a.quarantine <= 0 {
		a.free(l)
		return
	}
	l.resting, l.until = true, now.Add(a.quarantine)
	l.space.resting++
	l.space.queue.push(l, inSpace)
	a.resting.push(l, inAllocator)
}

// unrest takes a lease out of quarantine. It is neither held nor free then.
func (a *Allocator) unrest(l *lease) {
	l.resting = false
	l.space.resting--
	l.space.queue.remove(l, inSpace)
	a.resting.remove(l, inAllocator)
}

// free ends a lease that is neither held nor rests.
func (a *Allocator) free(l *lease) {
	delete(a.leases, l.addr)
	l.space.put(l.addr)
}

// NextFree returns when the next address leaves quarantine, and false if none
// rests. The time has passed when no call since has told the allocator so.
func (a *Allocator) NextFree() (time.Time, bool) {
	if a.resting.head == nil {
		return time.Time{}, false
	}
	return a.resting.head.until, true
}
