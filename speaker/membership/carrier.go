package membership

import (
	"context"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"time"
)

// A node that has lost the link to a segment is no owner there, though its
// speaker lives and is heard on another one. The Leases have the subnets of a node;
// gossip carries which links are down, because that has to be known in no more time
// than the loss of a node, and while the API server is away.

const (
	// downDelay is how long a link has to be down before it is published:
	// one that flaps faster than others would miss its node changes nothing.
	downDelay = 200 * time.Millisecond
	// upDelay is how long it has to be up again: switches may not forward yet,
	// and a link that flaps must not pull VIPs back each time. The link of the
	// speaker's own address counts at once: a speaker that meets the others again
	// by it knows that it works, and all links of a switch that is on again must
	// count together.
	upDelay = 3 * time.Second
	// hearDelay is how long after that the link counts here. Where all nodes lost it, with
	// a switch that has no power, all publish that it is back at the same time: until a node
	// has heard of the others it would take itself for the only one, and announce all VIPs.
	hearDelay = 250 * time.Millisecond
)

// carrier is what counts of an interface that our Lease names, and what is so.
type carrier struct {
	counts bool // as up
	is     bool // up
	since  time.Time
}

// linkState is the state of such an interface now.
type linkState struct{ up, own bool } // own: it has the speaker's address

// carriers are those by the interface's name.
type carriers map[string]carrier

// check records which interfaces are up. It returns those that count as down, sorted, if
// they have to be up for upDelay, and when to check again although nothing has changed:
// zero, never.
func (c carriers) check(seen map[string]linkState, now time.Time, upDelay time.Duration) (down []string, next time.Time) {
	maps.DeleteFunc(c, func(name string, _ carrier) bool { _, ok := seen[name]; return !ok })
	for name, s := range seen {
		known, ok := c[name]
		switch {
		case !ok:
			known = carrier{counts: s.up, is: s.up, since: now}
		case known.is != s.up:
			known.is, known.since = s.up, now
		}
		if known.counts != known.is {
			due := known.since.Add(downDelay)
			switch {
			case known.is && s.own:
				due = known.since
			case known.is:
				due = known.since.Add(upDelay)
			}
			if !now.Before(due) {
				known.counts = known.is
			} else if next.IsZero() || due.Before(next) {
				next = due
			}
		}
		if c[name] = known; !known.counts {
			down = append(down, name)
		}
	}
	slices.Sort(down)
	return down, next
}

// allLinks publishes which of the interfaces are down that our Lease names.
type allLinks struct {
	*base
	table *table
	own   published
}

// watch publishes which of the interfaces that our Lease names
// are down, until ctx ends.
func (a *allLinks) watch(ctx context.Context) {
	if a.options.Interfaces == nil {
		return
	}
	select {
	case <-a.options.Interfaces.Ready():
	case <-ctx.Done():
		return
	}
	published, counted := carriers{}, carriers{}
	for {
		interfaces, leases := a.options.Interfaces.Changed(), a.table.Changed()
		seen, now := a.named(), time.Now()
		others, soon := published.check(seen, now, upDelay)
		down, next := counted.check(seen, now, upDelay+hearDelay)
		if next.IsZero() || !soon.IsZero() && soon.Before(next) {
			next = soon
		}
		if a.own.setDown(strings.Join(down, ","), strings.Join(others, ",")) {
			a.log.Warn("links went down or came up: VIPs belong to nodes whose link is up, if there are any", "down", down)
		}
		select {
		case <-ctx.Done():
			return
		case <-interfaces:
		case <-leases:
		case <-at(next):
		}
	}
}

// named returns the interfaces that our Lease names, and whether they are up.
// One that is gone is not.
func (a *allLinks) named() map[string]linkState {
	seen := map[string]linkState{}
	for _, s := range a.table.ownSegments() {
		seen[s.Interface] = linkState{}
	}
	for _, i := range a.options.Interfaces.Interfaces() {
		if _, ok := seen[i.Name]; ok {
			own := slices.ContainsFunc(i.Addrs, func(p netip.Prefix) bool { return p.Addr() == a.options.Address.Addr() })
			seen[i.Name] = linkState{i.Up, own}
		}
	}
	return seen
}
