// Package leader keeps a replica of the controller from writing while another one may lead. The
// election itself is client-go's (cmd/controller); this package bounds by the clock for how long its
// result may be relied on.
//
//	term.go   Term: for how long this replica certainly has the leader Lease
//	lock.go   notes in the Term what the election does with the Lease
//	fence.go  holds writes back until this replica certainly has it
package leader

import (
	"sync"
	"time"
)

// Margin returns how long before its end a lease ceases to count. A write that began before that has ended, or was given up,
// when the lease ends, however long it takes. At most half of the lease is margin.
func Margin(lease, renewal, write time.Duration) time.Duration {
	return min(max(lease-renewal, write), lease/2)
}

// Term is what this replica knows of its own lease.
type Term struct {
	lease, margin time.Duration

	mu sync.Mutex
	// asked is when this replica asked for the lease that it was given last. Zero: it has none.
	asked    time.Time
	resigned bool
}

// NewTerm returns the Term of a replica that does not lead.
func NewTerm(lease, margin time.Duration) *Term { return &Term{lease: lease, margin: margin} }

// Granted records that the replica was given the lease for which it asked at that time. The lease counts from then
// on: others count it from when they see it, which may be long before the answer arrives here.
func (t *Term) Granted(asked time.Time) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.asked = asked
}

// Holds reports whether the replica certainly has the lease, and has time for a write.
func (t *Term) Holds(now time.Time) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	// The monotonic clock stands still while the machine is suspended, and the wall clock may be set: the longer time counts.
	passed := max(now.Sub(t.asked), now.Round(0).Sub(t.asked.Round(0)))
	return !t.asked.IsZero() && passed < t.lease-t.margin
}

// Resign records that no write of this replica is under way, and that none will be.
func (t *Term) Resign() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.asked, t.resigned = time.Time{}, true
}

// GivesBack reports whether the replica may give the lease back before its end. A replica that could not renew it may not:
// its last writes may still be applied until the lease ends.
func (t *Term) GivesBack() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.resigned
}
