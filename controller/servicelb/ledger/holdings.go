package ledger

import (
	"errors"
	"net/netip"
	"slices"
	"time"

	"github.com/lodestone-lb/lodestone/controller/quarantinestore"
	"github.com/lodestone-lb/lodestone/ipam"
	"github.com/lodestone-lb/lodestone/pkg/config"
)

// holdings is what is allocated: which Service holds which addresses. What a Service
// has given back stays held, by the owner account.leaving, until its object ceases to
// show it.
type holdings struct {
	*ipam.Allocator
	// records are the addresses in quarantine before the start. They wait for the
	// first configuration.
	records []quarantinestore.Record
}

// quarantineRecorded puts the addresses on record into quarantine.
func (h *holdings) quarantineRecorded(now time.Time) {
	for _, r := range h.records {
		h.Quarantine(r.Service, r.Addr, r.Since, now)
	}
	h.records = nil
}

// allocate gives the Service what it asks for, or returns the refusal.
func (h *holdings) allocate(a *account, req ipam.Request, now time.Time) (refusal *ipam.Refusal) {
	before := h.Holds(a.owner.UID)
	_, err := h.Allocate(req, now)
	h.keepLeaving(a, before, now)
	errors.As(err, &refusal)
	return refusal
}

// abide lets a Service whose request cannot be read keep what it holds, on those of its sharing
// terms that can be read. It returns the addresses that it loses by them.
func (h *holdings) abide(a *account, req ipam.Request, now time.Time) (lost []netip.Addr) {
	before := h.Holds(a.owner.UID)
	h.Abide(a.owner, req.Sharing, now)
	return h.keepLeaving(a, before, now)
}

// keepLeaving keeps others from getting the addresses that the owner held before and has given
// back, and returns them.
func (h *holdings) keepLeaving(a *account, before []ipam.Held, now time.Time) (left []netip.Addr) {
	after := h.Holds(a.owner.UID)
	for _, b := range before {
		if !holds(after, b.Addr) {
			h.Restore(ipam.Holding{Owner: a.leaving, Addr: b.Addr, Sharing: a.asked.Sharing, Since: now})
			left = append(left, b.Addr)
		}
	}
	return left
}

// settle frees the addresses that the owner has given back, and returns them. An address that
// its object shows is not freed: the Service may have moved back to it.
func (h *holdings) settle(a *account, shows []ipam.Held, now time.Time) (freed []netip.Addr) {
	leaving := h.Holds(a.leaving.UID)
	if len(leaving) == 0 {
		return nil
	}
	has := h.Holds(a.owner.UID)
	for _, left := range leaving {
		if holds(shows, left.Addr) && !holds(has, left.Addr) {
			continue
		}
		h.Leave(a.leaving.UID, left.Addr, now)
		freed = append(freed, left.Addr)
	}
	return freed
}

// follow makes the owner hold what its object shows of all that it holds or has given back, except what it is barred from, and no more.
func (h *holdings) follow(a *account, shows []netip.Addr) {
	for _, g := range h.Holds(a.owner.UID) {
		if !slices.Contains(shows, g.Addr) {
			h.Transfer(g.Addr, a.owner.UID, a.leaving)
		}
	}
	for _, g := range h.Holds(a.leaving.UID) {
		if slices.Contains(shows, g.Addr) && !slices.Contains(a.barred, g.Addr) {
			h.Transfer(g.Addr, a.leaving.UID, a.owner)
		}
	}
}

// turnBack gives the Service back what its object shows, if it was about to leave that for a wish that it has no more.
func (h *holdings) turnBack(a *account, req ipam.Request, shows []netip.Addr) {
	was := a.asked
	same := slices.Equal(was.Families, req.Families) && was.RequireAll == req.RequireAll && slices.Equal(was.Pools, req.Pools) &&
		slices.Equal(was.Addresses, req.Addresses) && was.Count == req.Count
	if !same && !a.verdict.Renumbered && len(shows) > 0 && len(h.Holds(a.leaving.UID)) > 0 {
		h.follow(a, shows)
	}
}

// departing returns the addresses that go into quarantine once the owner has given them back. Those that others hold, too,
// are among them: the others may be about to give them back as well, and then nobody knows who is the last. A record of an
// address that is held means nothing. all is set when the owner gives back everything.
func (h *holdings) departing(a *account, all bool, now time.Time) (records []quarantinestore.Record) {
	held := h.Holds(a.leaving.UID)
	if all {
		held = append(held, h.Holds(a.owner.UID)...)
	}
	for _, g := range held {
		if length := min(h.QuarantineOf(g.Addr), config.LongestQuarantine); length > 0 {
			records = append(records, quarantinestore.Record{Addr: g.Addr, Service: a.owner.Name, Since: now, Until: now.Add(length)})
		}
	}
	return records
}

// hasOrShows reports whether the Service holds an address, or its object still shows it.
func (h *holdings) hasOrShows(service string, addr netip.Addr) bool {
	return slices.ContainsFunc(h.HoldersOf(addr), func(o ipam.Owner) bool { return o.Name == service })
}

// without returns the addresses that the Service neither holds nor shows as given back.
func (h *holdings) without(service string, addrs []netip.Addr) []netip.Addr {
	return slices.DeleteFunc(addrs, func(addr netip.Addr) bool { return h.hasOrShows(service, addr) })
}

// holds reports whether the address is among those held.
func holds(held []ipam.Held, addr netip.Addr) bool {
	return slices.ContainsFunc(held, func(h ipam.Held) bool { return h.Addr == addr })
}

// Addrs returns the addresses held.
func Addrs(held []ipam.Held) []netip.Addr {
	addrs := make([]netip.Addr, len(held))
	for i, h := range held {
		addrs[i] = h.Addr
	}
	return addrs
}
