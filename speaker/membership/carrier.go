package membership

import (
	"context"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/lodestone-lb/lodestone/pkg/report"
)

// A node that has lost the link to a segment is no owner there, though its
// speaker lives and is heard on another one. Which subnets a node is on stands
// in Leases; that a link is down is told by gossip, because it has to be known
// in no more time than the loss of a node, and while the API server is away.

const (
	// downDelay is how long a link has to be down before that is told: one
	// that flaps faster than others would miss its node changes nothing.
	downDelay = 200 * time.Millisecond
	// upDelay is how long it has to be up again: switches may not forward yet,
	// and a link that flaps must not pull VIPs back each time. It is not for the
	// link of the speaker's own address: who meets the others again by it knows
	// that it works, and all links of a switch that is on again must count at
	// once.
	upDelay = 3 * time.Second
)

// carrier is the state of an interface that our Lease names.
type carrier struct {
	counts bool // as up
	is     bool // up
	since  time.Time
}

// sight is what is seen of one now.
type sight struct{ up, own bool } // own: it has the speaker's address

// carriers are those by the interface's name.
type carriers map[string]carrier

// look notes which interfaces are up. It returns those that count as down,
// sorted, and when to look again although nothing has changed: zero, never.
func (c carriers) look(seen map[string]sight, now time.Time) (down []string, next time.Time) {
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

// watchLinks tells all speakers which of the interfaces that our Lease names
// are down, until ctx ends.
func (t *Task) watchLinks(ctx context.Context) {
	if t.options.Interfaces == nil {
		return
	}
	select {
	case <-t.options.Interfaces.Ready():
	case <-ctx.Done():
		return
	}
	all := carriers{}
	for {
		interfaces, leases := t.options.Interfaces.Changed(), t.Changed()
		down, next := all.look(t.named(), time.Now())
		if t.setDown(t.options.Node, strings.Join(down, ",")) {
			wake(t.tell)
			t.log.Warn("links went down or came up: VIPs belong to nodes whose link is up, if there are any", "down", down)
		}
		var due <-chan time.Time
		if !next.IsZero() {
			due = time.After(time.Until(next))
		}
		select {
		case <-ctx.Done():
			return
		case <-interfaces:
		case <-leases:
		case <-due:
		}
	}
}

// named returns the interfaces that our Lease names, and whether they are up.
// One that is gone is not.
func (t *Task) named() map[string]sight {
	seen := map[string]sight{}
	t.mu.Lock()
	for _, s := range t.networks[t.options.Node].Segments {
		seen[s.Interface] = sight{}
	}
	t.mu.Unlock()
	for _, i := range t.options.Interfaces.Interfaces() {
		if _, ok := seen[i.Name]; ok {
			own := slices.ContainsFunc(i.Addrs, func(p netip.Prefix) bool { return p.Addr() == t.options.Address.Addr() })
			seen[i.Name] = sight{i.Up, own}
		}
	}
	return seen
}

// withLinks returns the network with what is down marked.
func withLinks(n report.Network, down string) report.Network {
	if down == "" {
		return n
	}
	names := strings.Split(down, ",")
	n.Segments = slices.Clone(n.Segments)
	for i, s := range n.Segments {
		n.Segments[i].Down = slices.Contains(names, s.Interface)
	}
	return n
}
