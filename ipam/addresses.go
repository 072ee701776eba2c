package ipam

import (
	"net/netip"
	"time"
)

// addresses knows the state of every address: free, set apart, held or in quarantine.
type addresses struct {
	pools        pools
	reservations reservations
	holdings     holdings
	quarantine   quarantine
}

// tick brings the addresses to the present: those whose quarantine is over are free.
func (a *addresses) tick(now time.Time) {
	q := &a.quarantine
	q.clock.set(now)
	for r := q.first(); r != nil && r.until() <= q.clock.elapsed; r = q.first() {
		a.free(r)
	}
}

// idle reports whether an address is neither held nor in quarantine.
func (a *addresses) idle(addr netip.Addr) bool {
	return a.holdings.at[addr] == nil && a.quarantine.at[addr] == nil
}

// hold makes a holding of an address that has none. It has no tenants yet.
func (a *addresses) hold(addr netip.Addr, s *space) *holding {
	if r := a.quarantine.at[addr]; r != nil {
		a.quarantine.end(r)
	} else {
		a.reservations.take(addr, s)
	}
	return a.holdings.begin(addr, s)
}

// leave takes an address from one of its holders. The caller removes it from what that one holds.
// When the last holder leaves, the quarantine begins.
func (a *addresses) leave(g *holding, h *holder) {
	a.holdings.leave(g, h)
	if len(g.tenants) > 0 {
		return
	}
	addr, s := g.addr, g.space
	a.holdings.end(g)
	if s.quarantine > 0 {
		a.quarantine.begin(quarantined{addr: addr, name: h.owner.Name, since: a.quarantine.clock.elapsed, space: s})
		for _, r := range a.quarantine.excess(h.namespace) {
			a.free(r)
		}
	} else {
		a.reservations.put(addr, s)
	}
}

// free ends a quarantine: the address is free.
func (a *addresses) free(r *quarantined) {
	addr, s := r.addr, r.space
	a.quarantine.end(r)
	a.reservations.put(addr, s)
}
