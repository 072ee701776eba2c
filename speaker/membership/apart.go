package membership

import (
	"context"
	"net/netip"
	"slices"
	"time"

	"k8s.io/client-go/tools/cache"

	"github.com/lodestone-lb/lodestone/pkg/notify"
	"github.com/lodestone-lb/lodestone/speaker/netstate"
)

// meetTimeout is how long a speaker whose link is back waits for the others after it has met one of
// them. A starting speaker waits as long.
const meetTimeout = DefaultSettleTime

// lossWindow is the time within which the loss of another speaker and the loss of the link belong
// together: some drivers report the link late. A speaker that is still alive that long after the last
// loss is reachable by another link.
const lossWindow = 5 * time.Second

// apart finds out whether this speaker has lost others with the link of its address. A speaker without
// others is never apart: nobody takes over its VIPs.
type apart struct {
	link string    // the interface that has that address, or had it last
	down time.Time // since when the link is down; zero: it is up
	lost time.Time // when another speaker was lost last; zero: never
	is   bool
}

// lose records that another speaker is lost. While the link is down, it is lost with the link: this
// speaker must not take over its VIPs.
func (a *apart) lose(now time.Time) {
	a.lost = now
	a.is = a.is || !a.down.IsZero()
}

// check records whether the link is up and others are alive. It returns when to check again even if
// nothing changes. Zero: never.
func (a *apart) check(up, others bool, now time.Time) (next time.Time) {
	switch {
	case up:
		a.down = time.Time{}
		return next
	case a.down.IsZero():
		a.down = now
	}
	switch {
	case a.is && others:
		next = a.lost.Add(lossWindow)
	case !a.is && !a.lost.IsZero() && a.lost.Before(a.down) && a.down.Sub(a.lost) <= lossWindow:
		next = a.down.Add(downDelay) // the link may flap
	default:
		return time.Time{}
	}
	if now.Before(next) {
		return next
	}
	a.is = !a.is
	return time.Time{}
}

// from returns the interface with whose link others were lost, empty if the speaker is not apart.
func (a *apart) from() string {
	if !a.is {
		return ""
	}
	return a.link
}

// ownLink watches the link of this speaker's address.
type ownLink struct {
	*base
	table  *table
	leases *leases
	joiner *joiner
}

// watch finds out when this speaker is apart. Until it has met the others again, it does not publish
// that it is ready, because they own its VIPs, and its own plan knows that it is apart, see
// report.Network. It waits for the others as long as at the start.
func (l *ownLink) watch(ctx context.Context, store cache.Store) {
	if l.options.Interfaces == nil {
		return
	}
	select {
	case <-l.options.Interfaces.Ready():
		notify.Wake(l.rejoin)
	case <-ctx.Done():
	}
	logged := false
	for ctx.Err() == nil {
		interfaces, speakers := l.options.Interfaces.Changed(), l.table.Changed()
		up := l.linkUp()
		apart, next := l.table.checkLink(l.linkName(), up, time.Now())
		switch {
		case apart && up:
			l.meetOthers(ctx, store)
			logged = false
			continue
		case apart && !logged:
			l.log.Warn("link down and other speakers lost: other nodes take over this node's VIPs, except those that only this node can announce",
				"address", l.options.Address.Addr())
		}
		logged = apart
		select {
		case <-interfaces:
		case <-speakers:
		case <-at(next):
		case <-ctx.Done():
		}
	}
}

// meetOthers waits until the speaker, whose link is back, has met the others again. Then it is not apart
// any more, unless the link is down again.
func (l *ownLink) meetOthers(ctx context.Context, store cache.Store) {
	l.log.Info("link up", "address", l.options.Address.Addr())
	notify.Wake(l.rejoin)
	if lost := len(l.leases.lost(store)); lost > 0 {
		l.joiner.meet(ctx, lost, time.After(l.options.joinTimeout))
		// The first speaker that is met passes on who the others are. This speaker waits a moment for
		// them: before it knows them, it does not know what they own and keep.
		l.await(ctx, time.After(l.options.meetTimeout), func() bool { return len(l.leases.lost(store)) == 0 })
	}
	if l.linkUp() {
		l.table.reunited()
	}
}

// linkUp reports whether an interface that is up has the speaker's address.
func (b *base) linkUp() bool {
	return b.options.Interfaces == nil || slices.ContainsFunc(b.options.Interfaces.Interfaces(), func(i netstate.Interface) bool {
		return i.Up && b.isOwn(i)
	})
}

// linkChanged returns a channel that is closed before linkUp returns something else. Nil: never.
func (b *base) linkChanged() <-chan struct{} {
	if b.options.Interfaces == nil {
		return nil
	}
	return b.options.Interfaces.Changed()
}

// linkName returns the interface with the speaker's address, empty if there is none.
func (b *base) linkName() string {
	for _, i := range b.options.Interfaces.Interfaces() {
		if b.isOwn(i) {
			return i.Name
		}
	}
	return ""
}

// isOwn reports whether the interface has the speaker's address, and the address is not tentative.
func (b *base) isOwn(i netstate.Interface) bool {
	return slices.ContainsFunc(i.Addrs, func(p netip.Prefix) bool {
		return p.Addr() == b.options.Address.Addr() && !slices.Contains(i.Tentative, p)
	})
}
