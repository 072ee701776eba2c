package servicelb

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/lodestone-lb/lodestone/ipam"
	"github.com/lodestone-lb/lodestone/pkg/annotation"
	"github.com/lodestone-lb/lodestone/pkg/clusterfacts"
)

// AddressConflict is the reason of a refusal that ends when no other host has
// the address that the Service was given, and of the condition of a Service
// whose address another host claims, too.
const AddressConflict ipam.Reason = "AddressConflict"

const (
	// settling is how long after a Service was given an address a conflict may
	// still take it away. Speakers find and report one within about 6 s, and
	// twice as long when several reports follow each other; the rest is for an
	// API server that is busy. Whoever takes over one node can report anything
	// for all of them, so that a report does not move anybody later.
	settling = 2 * time.Minute
	// withholding is how long an address that another host has is not drawn.
	// Speakers ask only for what Services hold, so nobody hears that the host
	// is gone: the next Service that draws the address finds out. While it
	// does, it is without an address that works, for some 6 s.
	withholding = 24 * time.Hour
	// maxWithheld is how many addresses of a family are withheld of a pool, and
	// not more than half of them: lies must not exhaust it.
	maxWithheld = 64
)

// conflicts is what the ledger knows of other hosts that have its addresses.
type conflicts struct {
	// disputes are what speakers report at present.
	disputes map[netip.Addr]clusterfacts.Dispute
	// withheld are the addresses that nobody draws, with the end of that, and
	// lapse is the first end.
	withheld map[netip.Addr]time.Time
	lapse    time.Time
	// full are the pools of which no more is withheld, by family.
	full map[share]int
}

// share is a family of a pool.
type share struct {
	pool   string
	family ipam.Family
}

// followDisputes takes over what speakers report.
func (l *Ledger) followDisputes() {
	l.disputes = map[netip.Addr]clusterfacts.Dispute{}
	if l.facts == nil {
		return
	}
	for _, d := range l.facts.Disputes {
		l.disputes[d.VIP] = d
	}
}

// disputesOf returns the disputes about addresses that are held.
func (l *Ledger) disputesOf(held []ipam.Held) (disputes []clusterfacts.Dispute) {
	if len(l.disputes) == 0 {
		return nil
	}
	for _, h := range held {
		if d, ok := l.disputes[h.Addr]; ok {
			disputes = append(disputes, d)
		}
	}
	return disputes
}

func vips(disputes []clusterfacts.Dispute) (vips []netip.Addr) {
	for _, d := range disputes {
		vips = append(vips, d.VIP)
	}
	return vips
}

// give allocates. A Service leaves an address that it was given just now and
// that turns out to be another host's; if there is no other, it stays.
func (l *Ledger) give(a *account, req ipam.Request) (left []clusterfacts.Dispute, refusal *ipam.Refusal) {
	if a.obstacle != nil && len(req.Addresses) == 0 {
		if l.adopt(a, req, a.foreign); a.obstacle != nil {
			return nil, a.obstacle
		}
	}
	leaves := l.leaves(a, req.Renumber)
	req.Avoid = vips(leaves)
	refusal = l.allocate(a, req)
	if refusal != nil && len(leaves) > 0 && !req.Renumber {
		req.Avoid = nil
		if again := l.allocate(a, req); again != nil {
			return nil, again
		}
		return nil, refusal.Behind(AddressConflict, silenced(leaves[0])+"; there is no other address: ")
	}
	held := l.alloc.Holds(a.owner.UID)
	left = slices.DeleteFunc(leaves, func(d clusterfacts.Dispute) bool { return holds(held, d.VIP) })
	if l.withhold(vips(left)...) {
		l.reconfigure()
	}
	return left, refusal
}

// leaves returns the disputes because of which the Service is to leave an
// address: those about an address that it has for a moment only and that is not
// announced, if that can be withheld; and all of them when it moves anyway.
func (l *Ledger) leaves(a *account, moves bool) []clusterfacts.Dispute {
	disputes := l.disputesOf(l.alloc.Holds(a.owner.UID))
	if moves || len(disputes) == 0 {
		return disputes
	}
	disputes = slices.DeleteFunc(disputes, func(d clusterfacts.Dispute) bool {
		return d.Announced || !slices.Contains(a.unsettled, d.VIP) && !l.settles(a, d.VIP)
	})
	a.unsettled = vips(disputes)
	return slices.DeleteFunc(disputes, func(d clusterfacts.Dispute) bool { return !l.room(d.VIP) })
}

// settles reports whether the Service was given the address moments ago. What
// it had at the start counts only if the Service itself is that young, and what
// another load balancer gave it never: that may be who has the address.
func (l *Ledger) settles(a *account, addr netip.Addr) bool {
	if slices.Contains(a.adopted, addr) {
		return false
	}
	now, since := l.Now(), l.alloc.HeldSince(a.owner.UID, addr)
	return now.Sub(since) < settling && (!since.Before(l.primedAt) || now.Sub(a.created) < settling)
}

// contest has the verdict say which addresses other hosts claim. One that is
// not announced for that reason is as good as none.
func (l *Ledger) contest(v *Verdict) {
	v.Disputes = l.disputesOf(v.Held)
	if v.Refusal != nil || v.Unjudged {
		return
	}
	for _, d := range v.Disputes {
		if !d.Announced {
			s, _ := l.alloc.StatsOf(d.VIP, l.Now())
			v.Refusal = &ipam.Refusal{Reason: AddressConflict, Pool: s.Pool, Message: silenced(d) +
				": take it away from that host, or let the Service ask for no particular address and move (" + moving + ")"}
			return
		}
	}
}

// silenced says that another host has an address.
func silenced(d clusterfacts.Dispute) string {
	return fmt.Sprintf("%s has %s, which is therefore not announced", d, d.VIP)
}

// contested says that another host claims an address that is announced.
func contested(d clusterfacts.Dispute) string {
	return fmt.Sprintf("%s claims %s, too: the speakers defend it, and some clients may reach that host; take the address away from it, or let the Service move (%s)", d, d.VIP, moving)
}

// withhold sees to it that nobody draws addresses, as far as there is room for
// more of them. It reports whether that changes something.
func (l *Ledger) withhold(addrs ...netip.Addr) (changed bool) {
	for _, addr := range addrs {
		if _, done := l.withheld[addr]; !done && l.room(addr) {
			l.withheld[addr] = l.Now().Add(withholding)
			changed = true
		}
	}
	l.setLapse()
	return changed
}

// room reports whether one more address of the pool may be withheld. It counts
// until there is none, and then not again before something has changed.
func (l *Ledger) room(addr netip.Addr) bool {
	s, ok := l.alloc.StatsOf(addr, l.Now())
	of := share{s.Pool, s.Family}
	if _, full := l.full[of]; full || !ok {
		return false
	}
	most, count := int(min(s.Size/2, maxWithheld)), 0
	for other := range l.withheld {
		if t, ok := l.alloc.StatsOf(other, l.Now()); ok && of == (share{t.Pool, t.Family}) {
			count++
		}
	}
	if count >= most {
		l.full[of] = most
	}
	return count < most
}

// setLapse finds out when the next address ceases to be withheld.
func (l *Ledger) setLapse() {
	l.lapse = time.Time{}
	for _, until := range l.withheld {
		if l.lapse.IsZero() || until.Before(l.lapse) {
			l.lapse = until
		}
	}
}

// withholdIdle withholds the disputed addresses that nobody holds: after a
// restart the reports are all that is known.
func (l *Ledger) withholdIdle() {
	l.full = map[share]int{}
	var idle []netip.Addr
	for _, addr := range slices.SortedFunc(maps.Keys(l.disputes), netip.Addr.Compare) {
		if len(l.alloc.HoldersOf(addr)) == 0 {
			idle = append(idle, addr)
		}
	}
	if len(idle) > 0 && l.withhold(idle...) {
		l.reconfigure()
	}
}

// endWithholding lets addresses be drawn again whose time is over, and reports
// whether there are any.
func (l *Ledger) endWithholding() (ended bool) {
	now := l.Now()
	if l.lapse.IsZero() || now.Before(l.lapse) {
		return false
	}
	for addr, until := range l.withheld {
		_, disputed := l.disputes[addr]
		switch {
		case now.Before(until):
		case disputed:
			l.withheld[addr] = now.Add(withholding)
		default:
			delete(l.withheld, addr)
			ended = true
		}
	}
	clear(l.full)
	l.setLapse()
	return ended
}

// noteFreed is told what Services have given back. Addresses that another host
// has must not be drawn next; one that was withheld, and that a Service has had
// without a dispute, may be.
func (l *Ledger) noteFreed(addrs []netip.Addr) {
	if l.config == nil || len(l.disputes)+len(l.withheld) == 0 {
		return
	}
	changed := false
	for _, addr := range addrs {
		_, disputed := l.disputes[addr]
		_, withheld := l.withheld[addr]
		switch {
		case len(l.alloc.HoldersOf(addr)) > 0:
		case disputed:
			changed = l.withhold(addr) || changed
		case withheld:
			delete(l.withheld, addr)
			clear(l.full)
			changed = true
		}
	}
	if changed {
		l.setLapse()
		l.reconfigure()
	}
}

// Overrun are sentences about pools of which other hosts have more addresses
// than are withheld.
func (l *Ledger) Overrun() []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	var said []string
	for of, most := range l.full {
		said = append(said, fmt.Sprintf("pool %q: speakers report more %s addresses of it in use by other hosts than are withheld from Services, which is at most %d; exclude what other hosts use (conflicts in the annotation %s of the speakers' Leases lists it)",
			of.pool, of.family, most, annotation.Report))
	}
	slices.Sort(said)
	return said
}

// tellLeft says to the log, to the Service's users and to the metrics that it
// gets another address instead of one that another host has.
func (c *Controller) tellLeft(svc *corev1.Service, left []clusterfacts.Dispute) {
	for _, d := range left {
		c.metrics.conflicts.Inc()
		c.Log.Warn("address conflict: the service gets another address", "service", NameOf(svc), "address", d.VIP, "host", d.String())
		c.Events.Event(svc, corev1.EventTypeWarning, string(AddressConflict),
			fmt.Sprintf("%s has %s. The Service gets another address, and no other Service is given this one.", d, d.VIP))
	}
}
