package membership

import (
	"context"
	"net/netip"
	"slices"
	"time"

	"k8s.io/client-go/tools/cache"

	"github.com/lodestone-lb/lodestone/pkg/netstate"
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

// watchLink has a speaker that lost all others with its link not be joined
// until it has met them again: they own its VIPs by then. Who does not answer is
// given up on as at the start.
func (t *Task) watchLink(ctx context.Context, leases cache.Store) {
	if t.options.Interfaces == nil {
		return
	}
	select {
	case <-t.options.Interfaces.Ready():
		wake(t.seek)
	case <-ctx.Done():
	}
	address := t.options.Address.Addr()
	for t.await(ctx, func() bool { return !t.linkUp() && len(t.Speakers()) == 1 }) {
		t.say("the link of %s is down, and no other speaker is heard", address)
		t.setApart(true)
		t.log.Warn("link down and all other speakers lost: this node owns no VIP until it is back", "address", address)
		if !t.await(ctx, t.linkUp) {
			return
		}
		t.log.Info("link up", "address", address)
		wake(t.seek)
		if lost := len(t.lost(leases)); lost > 0 {
			t.meet(ctx, lost, time.After(joinTimeout))
			t.meetAll(ctx, leases)
		}
		t.setApart(false)
	}
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

// await returns when the condition, which is about the link and the speakers,
// holds, and reports whether it did before ctx ended.
func (t *Task) await(ctx context.Context, holds func() bool) bool {
	for {
		interfaces, speakers := t.options.Interfaces.Changed(), t.Changed()
		if ctx.Err() != nil || holds() {
			return ctx.Err() == nil
		}
		select {
		case <-interfaces:
		case <-speakers:
		case <-ctx.Done():
		}
	}
}

// linkUp reports whether an interface that is up has the speaker's address.
func (t *Task) linkUp() bool {
	return t.options.Interfaces == nil || slices.ContainsFunc(t.options.Interfaces.Interfaces(), func(i netstate.Interface) bool {
		return i.Up && slices.ContainsFunc(i.Addrs, func(p netip.Prefix) bool {
			return p.Addr() == t.options.Address.Addr() && !slices.Contains(i.Tentative, p)
		})
	})
}

func (t *Task) setApart(apart bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.apart = apart
	t.changed.Notify()
}
