package ledger

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"time"

	"github.com/lodestone-lb/lodestone/ipam"
	"github.com/lodestone-lb/lodestone/pkg/annotation"
	"github.com/lodestone-lb/lodestone/pkg/clusterfacts"
)

const (
	// settling is how long after a Service was given an address a conflict may still take it
	// away. Speakers find and report a conflict within about 6 s, or 12 s when several reports
	// follow each other. The rest of the time is for a busy API server. Later no report moves
	// a Service, because an intruder on one node could report conflicts for all addresses.
	settling = 2 * time.Minute
	// withholding is how long an address that another host has is not drawn. Speakers ask only
	// for what Services hold, so nobody hears that the host is gone: the next Service that
	// draws the address finds out. That takes some 6 s, during which that Service has no
	// address that works.
	withholding = 24 * time.Hour
	// maxWithheld is how many addresses of a family are withheld of a pool, and never more
	// than half of them, so that false reports cannot exhaust the pool. Because of one node
	// half of that number is withheld, rounded up, so that it leaves room for other nodes.
	maxWithheld = 64
	// maxWithheldByNode is how many addresses of all pools are withheld because of what one node
	// reports. A report has no more at a time, but a node that lies could name others next.
	maxWithheldByNode = 32
)

// conflicts knows which of our addresses other hosts have.
type conflicts struct {
	held *holdings
	// since is when the ledger began. What Services had before that counts as old.
	since time.Time
	// reported are the conflicts that speakers report at present.
	reported map[netip.Addr]clusterfacts.Conflict
	// withheld are the addresses that nobody draws, and lapse is when the first of them may be
	// drawn again.
	withheld map[netip.Addr]withheld
	lapse    time.Time
	// counts are how many addresses are withheld, by each bound on them. Nil: not counted yet.
	counts map[bound]int
	// full are the bounds that are reached, with the most that they allow.
	full map[bound]int
}

// withheld is why and how long an address is not drawn.
type withheld struct {
	// node is the one whose report is the reason. Its bounds count the address.
	node  string
	until time.Time
}

// bound names what is bounded: a family of a pool, because of one node or (node "") of all;
// or all pools (pool "") because of one node.
type bound struct {
	pool   string
	family ipam.Family
	node   string
}

// follow takes over what speakers report.
func (c *conflicts) follow(facts *clusterfacts.Facts) {
	c.reported = map[netip.Addr]clusterfacts.Conflict{}
	if facts == nil {
		return
	}
	for _, d := range facts.Conflicts {
		c.reported[d.VIP] = d
	}
}

// about returns the conflicts over addresses that are held.
func (c *conflicts) about(held []ipam.Held) (found []clusterfacts.Conflict) {
	if len(c.reported) == 0 {
		return nil
	}
	for _, h := range held {
		if d, ok := c.reported[h.Addr]; ok {
			found = append(found, d)
		}
	}
	return found
}

// toLeave returns the conflicts because of which the Service is to leave an address. Those
// are all of them when it moves anyway. Otherwise they are those over an address that it was
// given moments ago and that is not announced, if the address can be withheld.
func (c *conflicts) toLeave(a *account, moves bool, now time.Time) []clusterfacts.Conflict {
	found := c.about(c.held.Holds(a.owner.UID))
	if moves || len(found) == 0 {
		return found
	}
	found = slices.DeleteFunc(found, func(d clusterfacts.Conflict) bool {
		return d.Announced || !slices.Contains(a.unsettled, d.VIP) && !c.settles(a, d.VIP, now)
	})
	a.unsettled = vips(found)
	return slices.DeleteFunc(found, func(d clusterfacts.Conflict) bool {
		_, room := c.room(d, now)
		return !room
	})
}

// settles reports whether the Service was given the address moments ago. An address that it
// had at the start counts only if the Service itself is that young. An address that another
// load balancer gave it never counts, because that load balancer may be the other host.
func (c *conflicts) settles(a *account, addr netip.Addr, now time.Time) bool {
	if slices.Contains(a.adopted, addr) {
		return false
	}
	since := c.held.HeldSince(a.owner.UID, addr)
	return now.Sub(since) < settling && (!since.Before(c.since) || now.Sub(a.created) < settling)
}

// refusal refuses a Service that has an address which is not announced because of a conflict,
// because such an address is as good as none. Nil: all are announced.
func (c *conflicts) refusal(found []clusterfacts.Conflict, now time.Time) *ipam.Refusal {
	for _, d := range found {
		if !d.Announced {
			s, _ := c.held.StatsOf(d.VIP, now)
			return &ipam.Refusal{Reason: AddressConflict, Pool: s.Pool, Message: silenced(d) +
				": take it away from that host, or let the Service ask for no particular address and move (" + moving + ")"}
		}
	}
	return nil
}

// withhold keeps the addresses of these conflicts from being drawn, as far as there is room for
// more such addresses. It reports whether that changes something.
func (c *conflicts) withhold(found []clusterfacts.Conflict, now time.Time) (changed bool) {
	for _, d := range found {
		if _, done := c.withheld[d.VIP]; done {
			continue
		}
		if node, room := c.room(d, now); room {
			c.withheld[d.VIP] = withheld{node, now.Add(withholding)}
			c.count(d.VIP, node, now)
			changed = true
		}
	}
	c.setLapse()
	return changed
}

// room reports whether the address of the conflict may be withheld, and because of which of the
// nodes that report it.
func (c *conflicts) room(d clusterfacts.Conflict, now time.Time) (node string, room bool) {
	s, ok := c.held.StatsOf(d.VIP, now)
	most := int(min(s.Size/2, maxWithheld))
	if !ok || !c.within(bound{s.Pool, s.Family, ""}, most, now) {
		return "", false
	}
	for _, n := range d.Nodes {
		if c.within(bound{node: n}, maxWithheldByNode, now) && c.within(bound{s.Pool, s.Family, n}, (most+1)/2, now) {
			return n, true
		}
	}
	return "", false
}

// within reports whether less is withheld than the bound allows.
func (c *conflicts) within(b bound, most int, now time.Time) bool {
	if c.counts == nil {
		c.counts = map[bound]int{}
		for addr, w := range c.withheld {
			c.count(addr, w.node, now)
		}
	}
	if c.counts[b] < most {
		return true
	}
	c.full[b] = most
	return false
}

// count counts an address that is withheld because of the node.
func (c *conflicts) count(addr netip.Addr, node string, now time.Time) {
	c.counts[bound{node: node}]++
	if s, ok := c.held.StatsOf(addr, now); ok {
		c.counts[bound{s.Pool, s.Family, ""}]++
		c.counts[bound{s.Pool, s.Family, node}]++
	}
}

// countAgain is called when there may be room again.
func (c *conflicts) countAgain() {
	c.counts = nil
	clear(c.full)
}

// setLapse finds out when the next address ceases to be withheld.
func (c *conflicts) setLapse() {
	c.lapse = time.Time{}
	for _, w := range c.withheld {
		if c.lapse.IsZero() || w.until.Before(c.lapse) {
			c.lapse = w.until
		}
	}
}

// withholdIdle withholds the addresses that speakers report and nobody holds: after a
// restart the reports are all that is known. It reports whether that changes something.
func (c *conflicts) withholdIdle(now time.Time) (changed bool) {
	c.countAgain()
	var idle []clusterfacts.Conflict
	for _, addr := range slices.SortedFunc(maps.Keys(c.reported), netip.Addr.Compare) {
		if len(c.held.HoldersOf(addr)) == 0 {
			idle = append(idle, c.reported[addr])
		}
	}
	return len(idle) > 0 && c.withhold(idle, now)
}

// expire ends the withholding of addresses whose time is over and that nobody reports any
// more, and reports whether there are any.
func (c *conflicts) expire(now time.Time) (ended bool) {
	if c.lapse.IsZero() || now.Before(c.lapse) {
		return false
	}
	var others []clusterfacts.Conflict // those that other nodes report now
	for addr, w := range c.withheld {
		d, reported := c.reported[addr]
		switch {
		case now.Before(w.until):
		case reported && slices.Contains(d.Nodes, w.node):
			c.withheld[addr] = withheld{w.node, now.Add(withholding)}
		default:
			delete(c.withheld, addr)
			ended = true
			if reported {
				others = append(others, d)
			}
		}
	}
	c.countAgain()
	slices.SortFunc(others, func(a, b clusterfacts.Conflict) int { return a.VIP.Compare(b.VIP) })
	c.withhold(others, now)
	return ended
}

// freed is called with what Services have given back. Addresses that another host
// has must not be drawn next. An address that was withheld, and that a Service has had
// without a conflict, may be drawn. It reports whether that changes something.
func (c *conflicts) freed(addrs []netip.Addr, now time.Time) (changed bool) {
	if len(c.reported)+len(c.withheld) == 0 {
		return false
	}
	for _, addr := range addrs {
		d, reported := c.reported[addr]
		_, withheld := c.withheld[addr]
		switch {
		case len(c.held.HoldersOf(addr)) > 0:
		case reported:
			changed = c.withhold([]clusterfacts.Conflict{d}, now) || changed
		case withheld:
			delete(c.withheld, addr)
			c.countAgain()
			changed = true
		}
	}
	if changed {
		c.setLapse()
	}
	return changed
}

// Overrun returns sentences about pools of which other hosts have more addresses than may be
// withheld, and about nodes that report more.
func (l *Ledger) Overrun() (sentences []string) {
	for b, most := range l.conflicts.full {
		pool, who, addresses, because := "", "speakers report", "addresses", ""
		if b.pool != "" {
			pool, addresses = fmt.Sprintf("pool %q: ", b.pool), fmt.Sprintf("%s addresses of it", b.family)
		}
		if b.node != "" {
			who, because = fmt.Sprintf("the speaker of node %q reports", b.node), " because of one node"
		}
		sentences = append(sentences, fmt.Sprintf("%s%s more %s in use by other hosts than are withheld from Services%s, which is at most %d; "+
			"exclude what other hosts use (conflicts in the annotation %s of the speakers' Leases lists it)", pool, who, addresses, because,
			most, annotation.Report))
	}
	slices.Sort(sentences)
	return sentences
}

// silenced says that another host has an address.
func silenced(d clusterfacts.Conflict) string {
	return fmt.Sprintf("%s has %s, which is therefore not announced", d, d.VIP)
}

// claimed says that another host claims an address that is announced.
func claimed(d clusterfacts.Conflict) string {
	return fmt.Sprintf("%s claims %s, too: the speakers defend it, and some clients may reach that host; "+
		"take the address away from it, or let the Service move (%s)", d, d.VIP, moving)
}

func vips(found []clusterfacts.Conflict) (vips []netip.Addr) {
	for _, d := range found {
		vips = append(vips, d.VIP)
	}
	return vips
}
