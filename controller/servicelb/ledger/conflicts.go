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
	// than half of them, so that false reports cannot exhaust the pool.
	maxWithheld = 64
)

// conflicts is what is known of other hosts that have our addresses.
type conflicts struct {
	held *holdings
	// since is when the ledger began. What Services had before that counts as old.
	since time.Time
	// reported are the conflicts that speakers report at present.
	reported map[netip.Addr]clusterfacts.Conflict
	// withheld are the addresses that nobody draws, each with the time at which that ends, and
	// lapse is the first of these times.
	withheld map[netip.Addr]time.Time
	lapse    time.Time
	// full are the pools of which no more is withheld, by family.
	full map[poolFamily]int
}

// poolFamily is the part of a pool that has one family.
type poolFamily struct {
	pool   string
	family ipam.Family
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
	return slices.DeleteFunc(found, func(d clusterfacts.Conflict) bool { return !c.room(d.VIP, now) })
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

// refusal returns why an address of these conflicts is not announced: an address that is not
// announced is as good as none. Nil: all are announced.
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

// withhold keeps addresses from being drawn, as far as their pools have room for more such
// addresses. It reports whether that changes something.
func (c *conflicts) withhold(addrs []netip.Addr, now time.Time) (changed bool) {
	for _, addr := range addrs {
		if _, done := c.withheld[addr]; !done && c.room(addr, now) {
			c.withheld[addr] = now.Add(withholding)
			changed = true
		}
	}
	c.setLapse()
	return changed
}

// room reports whether one more address of the pool may be withheld. Once there is no room, it
// does not count again before something has changed.
func (c *conflicts) room(addr netip.Addr, now time.Time) bool {
	s, ok := c.held.StatsOf(addr, now)
	of := poolFamily{s.Pool, s.Family}
	if _, full := c.full[of]; full || !ok {
		return false
	}
	most, count := int(min(s.Size/2, maxWithheld)), 0
	for other := range c.withheld {
		if t, ok := c.held.StatsOf(other, now); ok && of == (poolFamily{t.Pool, t.Family}) {
			count++
		}
	}
	if count >= most {
		c.full[of] = most
	}
	return count < most
}

// setLapse finds out when the next address ceases to be withheld.
func (c *conflicts) setLapse() {
	c.lapse = time.Time{}
	for _, until := range c.withheld {
		if c.lapse.IsZero() || until.Before(c.lapse) {
			c.lapse = until
		}
	}
}

// withholdIdle withholds the addresses that speakers report and nobody holds: after a
// restart the reports are all that is known. It reports whether that changes something.
func (c *conflicts) withholdIdle(now time.Time) (changed bool) {
	c.full = map[poolFamily]int{}
	var idle []netip.Addr
	for _, addr := range slices.SortedFunc(maps.Keys(c.reported), netip.Addr.Compare) {
		if len(c.held.HoldersOf(addr)) == 0 {
			idle = append(idle, addr)
		}
	}
	return len(idle) > 0 && c.withhold(idle, now)
}

// expire ends the withholding of addresses whose time is over, and reports whether there
// are any.
func (c *conflicts) expire(now time.Time) (ended bool) {
	if c.lapse.IsZero() || now.Before(c.lapse) {
		return false
	}
	for addr, until := range c.withheld {
		_, reported := c.reported[addr]
		switch {
		case now.Before(until):
		case reported:
			c.withheld[addr] = now.Add(withholding)
		default:
			delete(c.withheld, addr)
			ended = true
		}
	}
	clear(c.full)
	c.setLapse()
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
		_, reported := c.reported[addr]
		_, withheld := c.withheld[addr]
		switch {
		case len(c.held.HoldersOf(addr)) > 0:
		case reported:
			changed = c.withhold([]netip.Addr{addr}, now) || changed
		case withheld:
			delete(c.withheld, addr)
			clear(c.full)
			changed = true
		}
	}
	if changed {
		c.setLapse()
	}
	return changed
}

// Overrun returns sentences about pools of which other hosts have more addresses than may be
// withheld.
func (l *Ledger) Overrun() (sentences []string) {
	for of, most := range l.conflicts.full {
		sentences = append(sentences, fmt.Sprintf("pool %q: speakers report more %s addresses of it in use by other hosts than are withheld "+
			"from Services, which is at most %d; "+
			"exclude what other hosts use (conflicts in the annotation %s of the speakers' Leases lists it)", of.pool, of.family, most,
			annotation.Report))
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
