package ipam

import (
	"cmp"
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

// MaxQuarantined is how many addresses that one namespace has released are in quarantine. Without a bound a namespace
// without a quota could fill the memory with addresses of a large pool.
const MaxQuarantined = 1 << 16

// quarantine keeps the addresses that were released a short time ago.
type quarantine struct {
	clock  clock
	at     map[netip.Addr]*quarantined
	byName map[string][]*quarantined
	counts map[string]int // by namespace
	queues map[*space]*queue
	// next is when the first quarantine ends, or a time before that.
	next time.Duration
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
}

// waitsFor reports whether the address is kept for the party.
func (r *quarantined) waitsFor(p party) bool { return r.name != "" && r.name == p.owner.Name }

func (r *quarantined) until() time.Duration { return r.since + r.queue.length }

func (r *quarantined) compare(other *quarantined) int {
	return cmp.Or(cmp.Compare(r.since, other.since), r.addr.Compare(other.addr))
}

func (r *quarantined) namespace() string { return namespaceOf(r.name) }

// count changes by how much the namespace that released the address uses its quota.
func (r *quarantined) count(change int) {
	r.queue.space.usages.add(r.namespace(), usage{quarantined: change})
}

// of returns the queue of a space.
func (q *quarantine) of(s *space) *queue {
	c := q.queues[s]
	if c == nil {
		c = &queue{space: s}
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
	c.all, c.space.quarantined = nil, 0
	slices.SortFunc(homeless, (*quarantined).compare)
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
	q.queues, q.next = make(map[*space]*queue, len(old)), 0
	set := func(s *space, length time.Duration) {
		if c := old[s]; c != nil {
			q.queues[s] = c
		}
		q.of(s).length = length
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
	r := &begun
	q.at[r.addr] = r
	r.queue.space.quarantined++
	r.count(+1)
	r.queue.insert(r)
	q.next = min(q.next, r.until())
	q.byName[r.name] = append(q.byName[r.name], r)
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
	r.queue.space.quarantined--
	r.count(-1)
	r.queue.remove(r)
	left := slices.DeleteFunc(q.byName[r.name], func(other *quarantined) bool { return other == r })
	if len(left) > 0 {
		q.byName[r.name] = left
	} else {
		delete(q.byName, r.name)
	}
	delete(q.at, r.addr)
	if q.counts[r.namespace()]--; q.counts[r.namespace()] == 0 {
		delete(q.counts, r.namespace())
	}
}

// over returns the addresses whose quarantine is over.
func (q *quarantine) over() (all []*quarantined) {
	for _, c := range q.queues {
		for _, r := range c.all {
			if r.until() > q.clock.elapsed {
				break
			}
			all = append(all, r)
		}
	}
	return all
}

// first returns when the first quarantine ends.
func (q *quarantine) first() time.Duration {
	first := time.Duration(math.MaxInt64)
	for _, c := range q.queues {
		if len(c.all) > 0 {
			first = min(first, c.due())
		}
	}
	return first
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
	space  *space
	length time.Duration
	all    []*quarantined
}

// due is when the first address is free.
func (q *queue) due() time.Duration { return q.all[0].until() }

func (q *queue) insert(r *quarantined) {
	i, _ := slices.BinarySearchFunc(q.all, r, (*quarantined).compare)
	q.all = slices.Insert(q.all, i, r)
}

func (q *queue) remove(r *quarantined) {
	i, _ := slices.BinarySearchFunc(q.all, r, (*quarantined).compare)
	if i > 0 {
		q.all = slices.Delete(q.all, i, i+1)
		return
	}
	q.all[0] = nil
	q.all = q.all[1:] // most end at the front, and then nothing is moved
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
