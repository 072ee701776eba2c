package membership

import (
	"context"
	"math/rand/v2"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"
	"k8s.io/client-go/tools/cache"
)

const (
	// firstRejoin and lastRejoin bound the wait between two attempts to reach lost speakers. In a large
	// cluster they are multiplied by Crowd.
	firstRejoin, lastRejoin = 250 * time.Millisecond, 4 * time.Second
	// rejoinAtOnce is how many lost speakers are tried at a time. A speaker that answers passes on all
	// speakers that it knows.
	rejoinAtOnce = 8

	// firstVerify and lastVerify bound the wait until a speaker that did not answer is asked again. The
	// first packets after a link comes up are often lost.
	firstVerify, lastVerify = 50 * time.Millisecond, 500 * time.Millisecond
	// unansweredMost is how many packets may be unanswered, in some two seconds, before that is logged.
	unansweredMost = 8
	// questions is how many packets in a row may be unanswered by a speaker that memberlist takes for dead.
	questions = 3
	// A speaker that does not answer us, although others take it for alive, is held for heldTime plus
	// heldProbes probe intervals.
	heldTime, heldProbes = 15 * time.Second, 20
	// mostUnproven is how often that time is doubled at most.
	mostUnproven = 6
)

// rejoiner joins lost speakers again.
type rejoiner struct {
	*base
	table  *table
	leases *leases
	gossip *gossip
	whole  atomic.Bool // no speaker is lost
}

// joinLost joins the speakers that have a Lease but are not alive: those that started before this one,
// and those that a partition took away.
//
// In a large cluster each speaker waits before it tries: by then another speaker, or the lost one itself,
// may have made it known to all.
func (r *rejoiner) joinLost(ctx context.Context, store cache.Store) {
	at, delay := time.Now(), firstRejoin*time.Duration(r.table.Crowd()) // at: of the next attempt
	for {
		r.expel()
		lost := r.leases.lost(store)
		if whole := len(lost) == 0; r.whole.Swap(whole) != whole {
			r.changed.Notify()
		}
		var next <-chan time.Time
		var link <-chan struct{}
		if len(lost) > 0 {
			link = r.linkChanged() // before the look, so that no change is missed
		}
		// An attempt while the link is down would delay the one after it comes up.
		if len(lost) > 0 && r.linkUp() {
			if !time.Now().Before(at) {
				r.contact(lost)
				at, delay = time.Now().Add(spread(delay)), min(2*delay, lastRejoin*time.Duration(r.table.Crowd()))
			}
			next, link = time.After(time.Until(at)), nil
		}
		select {
		case <-ctx.Done():
			return
		case <-next:
		case <-link:
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

// expel removes the speakers that memberlist has at other addresses than their Leases: an attacker with the key has used
// their names before their Leases were known. memberlist takes them for left, so that the real ones can be met.
func (r *rejoiner) expel() {
	for _, node := range r.strays() {
		r.gossip.guard.Forget(node)
	}
}

// strays removes them from the table and returns their names.
func (r *rejoiner) strays() (nodes []string) {
	r.table.mu.Lock()
	defer r.table.mu.Unlock()
	for node, p := range r.table.peers {
		n := p.met
		if p.held != nil {
			n = &p.held.node
		}
		if n == nil {
			continue
		}
		if at, _ := r.leases.listed(node); elsewhere(n, at) {
			r.log.Warn("speaker was met elsewhere than its Lease has it, and does not count there", "node", node, "address", n.Address(),
				"lease", at)
			p.trust()
			p.held = nil
			r.table.lose(node, p)
			nodes = append(nodes, node)
		}
	}
	return nodes
}

// contact tries to join some of the addresses. The others, and those that do not answer, are tried again
// later.
func (r *rejoiner) contact(addresses []string) {
	rand.Shuffle(len(addresses), func(i, j int) { addresses[i], addresses[j] = addresses[j], addresses[i] })
	var group sync.WaitGroup
	for _, a := range addresses[:min(len(addresses), rejoinAtOnce)] {
		group.Go(func() {
			if _, err := r.list.Load().Join([]string{a}); err != nil {
				r.log.Debug("speaker does not answer", "address", a, "err", err)
			}
		})
	}
	group.Wait()
}

// verifyLost asks the held speakers for an answer. A speaker that memberlist has met again counts once it answers. One
// that memberlist has lost does not count any more if it does not answer.
func (r *rejoiner) verifyLost(ctx context.Context) {
	delay := firstVerify
	for {
		var next <-chan time.Time
		if r.askHeld(ctx) > 0 {
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

// askHeld asks the held speakers for an answer, until ctx ends. Those that answer count as alive. It returns how many are
// still held.
func (r *rejoiner) askHeld(ctx context.Context) int {
	var group errgroup.Group
	group.SetLimit(probeAtOnce)
	for name, h := range r.table.held() {
		if time.Now().Before(h.next) {
			continue
		}
		group.Go(func() error {
			if ctx.Err() != nil {
				return nil
			}
			_, err := r.list.Load().Ping(name, &net.UDPAddr{IP: h.node.Addr, Port: int(h.node.Port)})
			if err == nil {
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
