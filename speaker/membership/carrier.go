package membership

import (
	"context"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"time"
)

// A node that has lost the link to a segment owns no VIPs there, even if its speaker is alive and
// reachable on another segment. The Leases have the subnets of a node. Which links are down is carried
// by gossip: it has to be known as fast as the loss of a node, and while the API server is away.

const (
	// downDelay is how long a link has to be down before that is published. A flap that is shorter
	// than the time in which others would notice the loss of the node changes nothing.
	downDelay = 200 * time.Millisecond
	// upDelay is how long a link has to be up again before that is published: switches may not forward
	// yet, and a flapping link must not pull VIPs back each time. The link of the speaker's own address
	// counts at once: a speaker that meets the others again by it knows that it works, and all links
	// of a switch that is on again must count together.
	upDelay = 3 * time.Second
	// hearDelay is how much later the link counts on this node itself. If all nodes lost their links
	// with a switch, all publish at the same time that they are back. A node that has not heard of the
	// others yet would take itself for the only one, and announce all VIPs.
	hearDelay = 250 * time.Millisecond
)

// onIPv6 follows the name of an interface that is down for IPv6 alone: it has no link-local address that can be used, perhaps
// because another host has it. Without one it announces no IPv6 VIP. No interface has a slash in its name, and speakers
// that do not know this take no notice of it.
const onIPv6 = "/6"

// carrier is the state of an interface that our Lease names.
type carrier struct {
	counts bool      // it counts as up
	is     bool      // it is up
	since  time.Time // since when it is so
}

// linkState is what the kernel reports of an interface.
type linkState struct{ up, own bool } // own: it has the speaker's address

// carriers are the states by interface name.
type carriers map[string]carrier

// check records which interfaces are up. A link has to be up for upDelay to count as up again. check
// returns the interfaces that count as down, sorted, and when to check again even if nothing changes.
// Zero: never.
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

// watch publishes the interfaces that are down until ctx ends.
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
			a.log.Warn("links went down or came up: nodes whose link is up own the VIPs of a segment, if there are such nodes", "down", down)
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

// named returns the interfaces that our Lease names, and whether they are up, and those with IPv6 subnets once more, and whether
// they are up for IPv6. An interface that is gone is down.
func (a *allLinks) named() map[string]linkState {
	a.table.mu.Lock()
	segments := a.table.peers[a.options.Node].network.Segments // never modified
	a.table.mu.Unlock()
	seen := map[string]linkState{}
	for _, s := range segments {
		seen[s.Interface] = linkState{}
		if s.Subnet.Addr().Is6() {
			seen[s.Interface+onIPv6] = linkState{up: true} // one that is gone is down anyway
		}
	}
	for _, i := range a.options.Interfaces.Interfaces() {
		if _, ok := seen[i.Name]; ok {
			own := slices.ContainsFunc(i.Addrs, func(p netip.Prefix) bool { return p.Addr() == a.options.Address.Addr() })
			seen[i.Name] = linkState{i.Up, own}
		}
		if _, ok := seen[i.Name+onIPv6]; ok && i.Up {
			_, usable := i.LinkLocal()
			seen[i.Name+onIPv6] = linkState{up: usable}
		}
	}
	return seen
}
