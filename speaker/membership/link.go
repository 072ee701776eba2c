package membership

import (
	"cmp"
	"context"
	"net/netip"
	"slices"
	"time"

	"k8s.io/client-go/tools/cache"

	"github.com/lodestone-lb/lodestone/speaker/netstate"
)

// Interfaces is the live view of the node's interfaces; netstate.Watcher is
// one.
type Interfaces interface {
	Ready() <-chan struct{}
	// Changed returns a channel that is closed by the next change.
	Changed() <-chan struct{}
	Interfaces() []netstate.Interface
}

// meetTimeout is how long a speaker whose link is back waits for the others after
// it has met one: as long as one that starts.
const meetTimeout = DefaultSettleTime

// lately is how long before the link goes down another speaker may have been lost: it was
// lost with the link then, of which some drivers hear late. As long after the last one was
// lost, who is still heard is heard by another way.
const lately = 5 * time.Second

// severance finds out whether a speaker has lost others with the link of its address. Who had
// none before has lost none: nobody has taken over what it owns.
type severance struct {
	down  time.Time // since when the link is; zero: it is up
	lost  time.Time // when another speaker was lost last; zero: never
	apart bool
}

// lose notes that another speaker is lost. Those that follow are lost with the same link, and
// are no reason to take over what they own.
func (s *severance) lose(now time.Time) {
	s.lost = now
	s.apart = s.apart || !s.down.IsZero()
}

// look notes whether the link is up and others are heard. It returns when to look again
// although nothing has changed: zero, never.
func (s *severance) look(up, others bool, now time.Time) (next time.Time) {
	switch {
	case up:
		s.down = time.Time{}
		return next
	case s.down.IsZero():
		s.down = now
	}
	switch {
	case s.apart && others:
		next = s.lost.Add(lately)
	case !s.apart && !s.lost.IsZero() && s.lost.Before(s.down) && s.down.Sub(s.lost) <= lately:
		next = s.down.Add(downDelay) // it may flap after somebody was lost
	default:
		return time.Time{}
	}
	if now.Before(next) {
		return next
	}
	s.apart = !s.apart
	return time.Time{}
}

// watchLink finds out when this speaker has lost others with its link. Until it has met
// them again it says that it is not ready, since they own its VIPs, and its own plan
// takes it for apart, see plan.Node. Who does not answer is given up on as at the start.
func (t *Task) watchLink(ctx context.Context, leases cache.Store) {
	if t.options.Interfaces == nil {
		return
	}
	select {
	case <-t.options.Interfaces.Ready():
		wake(t.seek)
	case <-ctx.Done():
	}
	known := false // that it is apart
	for ctx.Err() == nil {
		interfaces, speakers := t.options.Interfaces.Changed(), t.Changed()
		apart, up, next := t.lookAtLink(time.Now())
		switch {
		case apart && up:
			t.rejoin(ctx, leases)
			known = false
			continue
		case apart && !known:
			address := t.options.Address.Addr()
			t.log.Warn("link down and other speakers lost: others own the VIPs of its segment, and all others that another node announces", "address", address)
		}
		known = apart
		var due <-chan time.Time
		if !next.IsZero() {
			due = time.After(time.Until(next))
		}
		select {
		case <-interfaces:
		case <-speakers:
		case <-due:
		case <-ctx.Done():
		}
	}
}

// lookAtLink looks at the interface that has the speaker's address, or had it last.
func (t *Task) lookAtLink(now time.Time) (apart, up bool, next time.Time) {
	link, up := t.link(), t.linkUp()
	t.mu.Lock()
	defer t.mu.Unlock()
	t.ownLink = cmp.Or(link, t.ownLink)
	before := t.severed.apart
	next = t.severed.look(up || t.ownLink == "", len(t.speakers) > 1, now)
	if t.severed.apart != before {
		wake(t.tell)
		t.changed.Notify()
	}
	return t.severed.apart, up, next
}

// rejoin has the speaker, whose link is back, be apart until it has met the others again.
func (t *Task) rejoin(ctx context.Context, leases cache.Store) {
	t.log.Info("link up", "address", t.options.Address.Addr())
	wake(t.seek)
	if lost := len(t.lost(leases)); lost > 0 {
		t.meet(ctx, lost, time.After(joinTimeout))
		t.meetAll(ctx, leases)
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.severed = severance{lost: t.severed.lost}
	wake(t.tell)
	t.changed.Notify()
}

// apart returns the interface with whose link others were lost, empty if they were not. The
// caller holds mu.
func (t *Task) apart() string {
	if !t.severed.apart {
		return ""
	}
	return t.ownLink
}

// meetAll waits a moment for the others, of whom the first one that is met tells:
// who has not heard of them does not know what they own and keep.
func (t *Task) meetAll(ctx context.Context, leases cache.Store) {
	giveUp := time.After(meetTimeout)
	for {
		changed := t.Changed()
		if len(t.lost(leases)) == 0 {
			return
		}
		select {
		case <-changed:
		case <-giveUp:
			return
		case <-ctx.Done():
			return
		}
	}
}

// linkUp reports whether an interface that is up has the speaker's address.
func (t *Task) linkUp() bool {
	return t.options.Interfaces == nil || slices.ContainsFunc(t.options.Interfaces.Interfaces(), func(i netstate.Interface) bool {
		return i.Up && t.isOwn(i)
	})
}

// link returns the interface with the speaker's address, empty if there is none.
func (t *Task) link() string {
	for _, i := range t.options.Interfaces.Interfaces() {
		if t.isOwn(i) {
			return i.Name
		}
	}
	return ""
}

// isOwn reports whether the interface has the speaker's address, and may use it.
func (t *Task) isOwn(i netstate.Interface) bool {
	return slices.ContainsFunc(i.Addrs, func(p netip.Prefix) bool {
		return p.Addr() == t.options.Address.Addr() && !slices.Contains(i.Tentative, p)
	})
}
