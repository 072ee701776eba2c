package ipam

import (
	"net/netip"
	"slices"
	"time"
)

// lease is an address that is not free: somebody holds it, or it rests.
type lease struct {
	addr  netip.Addr
	space *space
	// holder holds the address or, when it rests, held it last.
	holder *holder
	// asked is the pool that gave the address or, since then, the one by
	// whose name a request kept it: requests that name it ask for no move,
	// whatever became of the pool. Empty: restored from outside every pool,
	// and no request yet.
	asked string

	resting bool
	until   time.Time
	beside  [2]struct{ next, prev *lease }
}

// anyPool is asked when the first request for such an address named no pool.
const anyPool = "*"

// lease makes a lease of an address that has none, held by nobody yet.
func (a *Allocator) lease(addr netip.Addr, s *space) *lease {
	l := &lease{addr: addr, space: s}
	a.leases[addr] = l
	s.take(addr)
	return l
}

// give makes the holder hold a lease that is new or rests. The caller puts it
// among the holder's leases.
func (a *Allocator) give(l *lease, h *holder) {
	if l.resting {
		a.unrest(l)
	}
	l.space.assigned++
	l.holder, l.asked = h, l.space.name()
}

// fits reports whether a request for these pools lets the holder keep the
// address.
func (l *lease) fits(pools []string) bool {
	return len(pools) == 0 || l.asked == "" ||
		slices.Contains(pools, l.asked) || slices.Contains(pools, l.space.name())
}

// keep notes what the request that keeps the lease asked for.
func (l *lease) keep(pools []string) {
	switch name := l.space.name(); {
	case slices.Contains(pools, name):
		l.asked = name
	case l.asked == "" && len(pools) > 0:
		l.asked = pools[0]
	case l.asked == "":
		l.asked = anyPool
	}
}
