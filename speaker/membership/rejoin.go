package membership

import (
	"context"
	"math/rand/v2"
	"net"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"
	"k8s.io/client-go/tools/cache"
)

const (
	// firstRejoin and lastRejoin bound the wait between two attempts to reach the
	// speakers that are lost, of a speaker alone: crowd has the others.
	firstRejoin, lastRejoin = 250 * time.Millisecond, 4 * time.Second
	// rejoinAtOnce is how many lost speakers are tried at a time; one that
	// answers brings all that it knows.
	rejoinAtOnce = 8

	// firstVerify and lastVerify bound the wait until one is asked again that does
	// not answer: the first packets after a link is up are lost often.
	firstVerify, lastVerify = 50 * time.Millisecond, 500 * time.Millisecond
	// unansweredMost is how many questions may be lost, in some two seconds, before
	// that is logged.
	unansweredMost = 8
	// A speaker that does not answer us, although others take it for alive, is held for heldTime plus
	// heldProbes intervals between probes.
	heldTime, heldProbes = 15 * time.Second, 20
)

// rejoiner joins the speakers that are lost again.
type rejoiner struct {
	*base
	table  *table
	leases *leases
	whole  atomic.Bool // nobody is lost
}

// joinLost joins the speakers that have a Lease but are not among the living:
// those that started before us, and those that a partition took away.
//
// Of many speakers each waits before it tries to reach one: by then the first of them, or
// the one that was lost, has made it known to all.
func (r *rejoiner) joinLost(ctx context.Context, store cache.Store) {
	at, delay := time.Now(), firstRejoin*time.Duration(r.table.Crowd()) // at: of the next attempt
	for {
		lost := r.leases.lost(store)
		if whole := len(lost) == 0; r.whole.Swap(whole) != whole {
			r.changed.Notify()
		}
		var next <-chan time.Time
		// An attempt without a link would hold up the one that comes with it.
		if len(lost) > 0 && r.linkUp() {
			if !time.Now().Before(at) {
				r.contact(lost)
				at, delay = time.Now().Add(spread(delay)), min(2*delay, lastRejoin*time.Duration(r.table.Crowd()))
			}
			next = time.After(time.Until(at))
		}
		select {
		case <-ctx.Done():
			return
		case <-next:
		case <-r.rejoin:
			soon := time.Now()
			if delay = firstRejoin * time.Duration(r.table.Crowd()); delay > firstRejoin {
				soon = soon.Add(spread(delay))
			}
			if at.Before(time.Now()) || soon.Before(at) {
				at = soon
			}
		}
	}
}

// contact tries to join some of the addresses. Who does not answer is tried
// again later.
func (r *rejoiner) contact(addresses []string) {
	rand.Shuffle(len(addresses), func(i, j int) { addresses[i], addresses[j] = addresses[j], addresses[i] })
	var group errgroup.Group
	for _, a := range addresses[:min(len(addresses), rejoinAtOnce)] {
		group.Go(func() error {
			if _, err := r.list.Load().Join([]string{a}); err != nil {
				r.log.Debug("speaker does not answer", "address", a, "err", err)
			}
			return nil
		})
	}
	group.Wait() //nolint:errcheck // they return nil
}

// verifyLost counts those that were lost when they answer us.
func (r *rejoiner) verifyLost(ctx context.Context) {
	delay := firstVerify
	for {
		var next <-chan time.Time
		if r.askHeld() > 0 {
			next = time.After(delay)
		}
		select {
		case <-ctx.Done():
			return
		case <-r.verify:
			delay = firstVerify
		case <-next:
			delay = min(2*delay, lastVerify)
		}
	}
}

// askHeld counts those of the held that answer, and returns how many are left.
func (r *rejoiner) askHeld() int {
	var group errgroup.Group
	group.SetLimit(probeAtOnce)
	for name, h := range r.table.held() {
		group.Go(func() error {
			_, err := r.list.Load().Ping(name, &net.UDPAddr{IP: h.node.Addr, Port: int(h.node.Port)})
			if err == nil || time.Since(h.since) > heldTime+heldProbes*r.settings.ProbeInterval {
				r.table.admit(name)
			} else {
				r.table.unanswered(name)
			}
			return nil
		})
	}
	group.Wait() //nolint:errcheck // they return nil
	return len(r.table.held())
}
