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

// meetTimeout is how long a speaker whose link is back waits for the others after
// it has met one: as long as one that starts.
const meetTimeout = DefaultSettleTime

// lately is the time within which the loss of another speaker belongs to the loss of the
// link, which some drivers notice late. A speaker that is still heard that long after the
// last loss is heard by another way.
const lately = 5 * time.Second

// apart finds out whether a speaker has lost others with the link of its address. A
// speaker without others loses none: nobody takes over what it owns.
type apart struct {
	link string    // the interface with that address, also while no interface has it
	down time.Time // since when the link is; zero: it is up
	lost time.Time // when another speaker was lost last; zero: never
	is   bool
}

// lose records that another speaker is lost. The speakers that are lost after it are lost
// with the same link: this speaker must not take over what they own.
func (a *apart) lose(now time.Time) {
	a.lost = now
	a.is = a.is || !a.down.IsZero()
}

// check records whether the link is up and others are heard. It returns when to check again
// although nothing has changed: zero, never.
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
		next = a.lost.Add(lately)
	case !a.is && !a.lost.IsZero() && a.lost.Before(a.down) && a.down.Sub(a.lost) <= lately:
		next = a.down.Add(downDelay) // it may flap after somebody was lost
	default:
		return time.Time{}
	}
	if now.Before(next) {
		return next
	}
	a.is = !a.is
	return time.Time{}
}

// from returns the interface with whose link others were lost, empty if they were not.
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

// watch finds out when this speaker has lost others with its link. Until it has met
// them again it does not publish that it is ready, since they own its VIPs, and its own plan
// takes it for apart, see report.Network. It waits for the others as long as at the start.
func (l *ownLink) watch(ctx context.Context, store cache.Store) {
	if l.options.Interfaces == nil {
		return
	}
	select {
	case <-l.options.Interfaces.Ready():
		notify.Wake(l.rejoin)
	case <-ctx.Done():
	}
	known := false // that it is apart
	for ctx.Err() == nil {
		interfaces, speakers := l.options.Interfaces.Changed(), l.table.Changed()
		up := l.linkUp()
		apart, next := l.table.checkLink(l.linkName(), up, time.Now())
		switch {
		case apart && up:
			l.meetOthers(ctx, store)
			known = false
			continue
		case apart && !known:
			l.log.Warn("link down and other speakers lost: others own the VIPs of its segment, and all others that another node announces",
				"address", l.options.Address.Addr())
		}
		known = apart
		select {
		case <-interfaces:
		case <-speakers:
		case <-at(next):
		case <-ctx.Done():
		}
	}
}

// meetOthers has the speaker, whose link is back, be apart until it has met the others again.
func (l *ownLink) meetOthers(ctx context.Context, store cache.Store) {
	l.log.Info("link up", "address", l.options.Address.Addr())
	notify.Wake(l.rejoin)
	if lost := len(l.leases.lost(store)); lost > 0 {
		l.joiner.meet(ctx, lost, time.After(joinTimeout))
		// The first one that is met passes on who else is there. This speaker waits a moment
		// for the others: before it knows them, it does not know what they own and keep.
		l.await(ctx, time.After(meetTimeout), func() bool { return len(l.leases.lost(store)) == 0 })
	}
	l.table.reunited()
}

// linkUp reports whether an interface that is up has the speaker's address.
func (b *base) linkUp() bool {
	return b.options.Interfaces == nil || slices.ContainsFunc(b.options.Interfaces.Interfaces(), func(i netstate.Interface) bool {
		return i.Up && b.isOwn(i)
	})
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

// isOwn reports whether the interface has the speaker's address, and may use it.
func (b *base) isOwn(i netstate.Interface) bool {
	return slices.ContainsFunc(i.Addrs, func(p netip.Prefix) bool {
		return p.Addr() == b.options.Address.Addr() && !slices.Contains(i.Tentative, p)
	})
}
