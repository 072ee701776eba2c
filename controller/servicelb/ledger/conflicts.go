package ledger

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"time"

	"github.com/lodestone-lb/lodestone/ipam"
	"github.com/lodestone-lb/lodestone/pkg/clusterfacts"
)

// settling is how long after a Service was given an address a conflict may still take it
// away. Speakers find and report a conflict within about 6 s, or 12 s when several reports
// follow each other. The rest of the time is for a busy API server. Later no report moves
// a Service, because an intruder on one node could report conflicts for all addresses.
const settling = 2 * time.Minute

// conflicts knows which of our addresses other hosts have.
type conflicts struct {
	held *holdings
	// since is when the ledger began. What Services had before that counts as old.
	since time.Time
	// reported are the conflicts that speakers report at present.
	reported map[netip.Addr]clusterfacts.Conflict
	withheld withheld
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

// toLeave returns the conflicts because of which the Service is to leave an address. Those
// are all of them when it moves anyway. Otherwise they are those over an address that it was
// given moments ago and that is not announced, if the address can be withheld. If it cannot,
// the Service stays for that reason, and the operator is warned.
func (c *conflicts) toLeave(a *account, moves bool, now time.Time) (leave []clusterfacts.Conflict) {
	found, before := c.about(c.held.Holds(a.owner.UID)), a.unsettled
	a.unsettled = nil // a conflict that ends and begins again is a new one
	if moves {
		return found
	}
	for _, d := range found {
		if d.Announced || !slices.Contains(before, d.VIP) && !c.settles(a, d.VIP, now) {
			continue
		}
		a.unsettled = append(a.unsettled, d.VIP)
		if _, ok := c.withheld.findRoom(d, now); ok {
			leave = append(leave, d)
		}
	}
	return leave
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

// withholdIdle withholds the addresses that speakers report and nobody holds: after a
// restart the reports are all that is known. It reports whether that changes something.
func (c *conflicts) withholdIdle(now time.Time) (changed bool) {
	var idle []clusterfacts.Conflict
	for _, addr := range slices.SortedFunc(maps.Keys(c.reported), netip.Addr.Compare) {
		if len(c.held.HoldersOf(addr)) == 0 {
			idle = append(idle, c.reported[addr])
		}
	}
	c.withheld.countAgain()
	return c.withheld.add(idle, now)
}

// freed is called with what Services have given back. Addresses that another host
// has must not be drawn next. An address that was withheld, and that a Service has had
// without a conflict, may be drawn. It reports whether that changes something.
func (c *conflicts) freed(addrs []netip.Addr, now time.Time) (changed bool) {
	for _, addr := range addrs {
		if len(c.held.HoldersOf(addr)) > 0 {
			continue
		}
		if d, reported := c.reported[addr]; reported {
			changed = c.withheld.add([]clusterfacts.Conflict{d}, now) || changed
		} else {
			changed = c.withheld.remove(addr) || changed
		}
	}
	return changed
}

// silenced is the sentence about an address that another host has.
func silenced(d clusterfacts.Conflict) string {
	return fmt.Sprintf("%s has %s, which is therefore not announced", d, d.VIP)
}

// claimed is the sentence about an address that is announced and that another host claims.
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
