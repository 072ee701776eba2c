// Package ipam decides which addresses a Service gets. It is pure: no
// Kubernetes, no clock, no I/O. The caller passes the time in and serializes
// the calls; the same history of calls gives the same answers.
//
// The way of a request, file by file; each uses only those below it:
//
//	ipam.go             Allocator: what a caller can do
//	allocate.go         Allocate: a Service gets its addresses
//	consider.go         Consider: what each pool would do for a Service
//	exact.go            the addresses that a Service names or has reserved
//	rejoin.go           the address that it shares, or had before
//	refuse.go           why it gets none, in words
//	proposal.go         the proposal: what is picked
//	quota.go            how much of a pool a namespace uses, and may use
//	request.go          Request: what a Service asks for, and which pools are open to it
//
// What the Allocator knows:
//
//	addresses.go        what became of every address: its parts follow
//	quarantine.go       which addresses are in quarantine, and until when (controller/quarantinestore records it)
//	holdings.go         who holds what, and under which sharing key
//	reservations.go     which addresses nobody draws
//	pools.go            Setup: the pools and their free addresses
//
// What these are made of:
//
//	sharing.go          Owner, Sharing: who can hold an address together
//	reasons.go          Reason, with cause and cure, and Refusal
//	forbiddenranges.go  ranges that no pool hands out
//	freespace.go        the free addresses of one family of one pool: the lowest is taken
//	address.go          Family; addresses as numbers
//
// The rules, in one place:
//
//   - A pool gives its lowest free address. Pools come in the order of the
//     request; without one, by Priority, then in the order of the document.
//     Pools that are closed to the Service, that drain, that have nothing
//     free or whose quota the namespace has used up are passed over.
//   - Two families come out of one pool when one pool can give both: out of
//     the pool of the family that is already settled, else out of the first
//     with both. Only then are they split over pools.
//   - An address that is released goes into quarantine, for the quarantine time
//     or for the KeepFor of its pool, whichever is longer, and is then free like
//     any other. During the quarantine only a Service of the same namespace and
//     name can have it, and such a Service gets it before any other address that
//     it could draw. It counts for the quota of the namespace until the
//     quarantine is over.
//   - A reserved address goes only to its Service, which gets it before any other
//     address. A forbidden address goes to nobody. A conflicted address, which
//     another host uses, goes only to a Service that asks for exactly this one or
//     has it reserved.
//   - The addresses of a pool with DHCP are those that the caller has leased.
//     They have no quarantine, and the caller reserves each for the Service that it
//     was leased for.
//   - Services with the same sharing key share an address, on the terms that
//     Sharing explains.
//   - What a Service holds does not move because the configuration was
//     edited. It moves when the Service asks for another address, pool or
//     family, to avoid one or to be renumbered, and when its own change of
//     terms makes it clash with those that it shares an address with.
//   - Every failure is a *Refusal, and what the Service held before stays
//     with it, with one exception: it leaves an address on which it would
//     clash with others by its new terms, whether or not it gets another. If it
//     stayed, it would take traffic from those others, who have changed nothing.
//
// IPv4 addresses written as IPv6 (::ffff:192.0.2.1) are taken as IPv4.
package ipam

import (
	"cmp"
	"net/netip"
	"time"
)

// Allocator gives addresses out of pools. See New. It is not safe for
// concurrent use.
type Allocator struct {
	addresses
	// proposal is the one being made. It is here to be reused.
	proposal proposal
}

// New returns an allocator without pools. Until the first call of Configure
// no quarantine ends.
func New() *Allocator {
	a := &Allocator{addresses: addresses{
		holdings:   holdings{at: map[netip.Addr]*holding{}, byUID: map[string]*holder{}, groups: groups{}},
		quarantine: newQuarantine(),
	}}
	a.pools.nowhere.quarantine = forever
	return a
}

// Configure replaces the setup. What is held stays with its holders, also when no pool hands
// it out any more (it is then stranded), and what is in quarantine stays there for the time
// of the new setup, counted from its release. It looks at every pool, every address that is not
// free and every forbidden range. It builds anew only the contents of changed pools.
func (a *Allocator) Configure(setup Setup) {
	for addr := range a.reservations.apart {
		if s := a.pools.spaceOf(addr); s.pool != nil && a.idle(addr) {
			a.reservations.take(addr, s)
			s.put(addr)
		}
	}
	a.pools.set(setup)
	a.holdings.rehome(&a.pools)
	a.quarantine.rehome(&a.pools)
	a.reservations = newReservations(setup)
	for addr := range a.reservations.apart {
		if s := a.pools.spaceOf(addr); s.pool != nil && a.idle(addr) {
			s.take(addr)
			a.reservations.put(addr, s)
		}
	}
	a.quarantine.setLengths(&a.pools, setup.Quarantine)
}

// Restore records that an owner holds an address, without asking any pool: the state of a
// cluster is true before it is valid. The address may be stranded, withheld, forbidden,
// reserved or in quarantine, or shared by more than MaxSharers. If the owner clashes otherwise
// with a holder of the address, or if its UID is known by another name, Restore changes
// nothing and returns the first such holder and false. For an address that is not valid it
// returns the zero owner and false. It drops zones.
func (a *Allocator) Restore(was Holding) (holder Owner, ok bool) {
	owner, addr := was.Owner, canonical(was.Addr)
	if !addr.IsValid() {
		return Owner{}, false
	}
	id, terms := identify(owner), was.Sharing.terms()
	h := a.holdings.byUID[owner.UID]
	if h != nil && h.owner != owner {
		return h.owner, false
	}
	g := a.holdings.at[addr]
	if g != nil {
		if other, c := g.clash(party{&id, terms}); c.is() && c.over != overNumber {
			return other.owner, false
		}
	}
	if h == nil {
		h = a.holdings.newHolder(id)
	}
	if g != nil && g.tenant(h) != nil {
		a.holdings.setTerms(g, h, terms)
		return owner, true
	}
	if g == nil {
		g = a.hold(addr, a.pools.spaceOf(addr))
	}
	a.holdings.enter(g, tenant{holder: h, terms: terms, asked: cmp.Or(was.Asked, g.space.name()), since: was.Since})
	h.holdings = append(h.holdings, g)
	return owner, true
}

// Claim gives the owner of the request addresses that it had before, in addition to what it
// holds: all of them, if a request for exactly these would be given them now, else none. The
// refusal is that of such a request, nil if it is met. Families that have no address among
// them do not matter, and nothing is drawn.
func (a *Allocator) Claim(req Request, addrs []netip.Addr, since, now time.Time) *Refusal {
	req.Addresses, req.Renumber, req.Avoid = addrs, false, nil
	p := &a.proposal
	if r := p.begin(&a.addresses, req, now); r != nil {
		return r
	}
	if p.holder != nil {
		for _, g := range p.holder.holdings {
			p.picks = append(p.picks, pick{holding: g, kept: true})
		}
	}
	kept := len(p.picks)
	for i := range req.Families {
		for _, addr := range p.wishes[i] {
			k, r := p.claim(addr)
			if r != nil {
				return r
			}
			if !k.kept {
				p.picks = append(p.picks, k)
			}
		}
	}
	if p.now = since; len(p.picks) > kept {
		h := p.holder
		if h == nil {
			h = a.holdings.newHolder(p.self)
		}
		for _, k := range p.picks[kept:] {
			h.holdings = append(h.holdings, p.grant(k, h))
		}
	}
	return nil
}

// Abide applies terms to an owner whose request cannot be read. The owner keeps what it holds,
// except addresses on which it clashes with others.
func (a *Allocator) Abide(owner Owner, sharing *Sharing, now time.Time) {
	a.tick(now)
	req := request{Request: Request{Owner: owner, Sharing: sharing}, addresses: &a.addresses, holder: a.holdings.byUID[owner.UID]}
	req.identify()
	req.applyTerms()
}

// Release takes from the owner everything that it holds and returns it.
// The quarantine of addresses that nobody else shares begins.
func (a *Allocator) Release(uid string, now time.Time) []netip.Addr {
	a.tick(now)
	h := a.holdings.byUID[uid]
	if h == nil {
		return nil
	}
	freed := make([]netip.Addr, len(h.holdings))
	for i, g := range h.holdings {
		freed[i] = g.addr
		a.leave(g, h)
	}
	a.holdings.forget(h)
	return freed
}

// Leave takes one address from the owner, as Release takes all, and reports whether it held it.
func (a *Allocator) Leave(uid string, addr netip.Addr, now time.Time) bool {
	a.tick(now)
	h, g := a.holdings.byUID[uid], a.holdings.at[canonical(addr)]
	if h == nil || g == nil || g.tenant(h) == nil {
		return false
	}
	a.leave(g, h)
	a.holdings.drop(h, g)
	return true
}

// Transfer makes another owner hold an address in place of the first, with its terms, since when it did, and by the pool for which
// it asked. The two are one Service to others: they have the same name. What the other one holds already stays as it is. Nothing
// happens if the first does not hold the address.
func (a *Allocator) Transfer(addr netip.Addr, uid string, to Owner) {
	h, g := a.holdings.byUID[uid], a.holdings.at[canonical(addr)]
	if h == nil || g == nil || g.tenant(h) == nil {
		return
	}
	heir := a.holdings.byUID[to.UID]
	if heir == nil {
		heir = a.holdings.newHolder(identify(to))
	}
	if g.tenant(heir) == nil {
		t := g.tenant(h)
		g.users.remove(h, t.terms)
		g.users.add(heir, t.terms)
		t.holder = heir
		heir.holdings = append(heir.holdings, g)
	} else {
		a.holdings.leave(g, h)
	}
	a.holdings.drop(h, g)
}

// Revoke takes an address whose lease is over from all its holders. It is free at once.
func (a *Allocator) Revoke(addr netip.Addr, now time.Time) {
	a.tick(now)
	addr = canonical(addr)
	g := a.holdings.at[addr]
	if g == nil {
		return
	}
	for len(g.tenants) > 0 {
		h := g.tenants[0].holder
		a.leave(g, h)
		a.holdings.drop(h, g)
	}
	if r := a.quarantine.at[addr]; r != nil {
		a.free(r)
	}
}

// Quarantine records that the Service of this name released addr at since, before this
// allocator knew of it: the address is in quarantine for what is left of its time. Nothing
// happens when it is held or in quarantine already, or when its time is over. A release in the
// future counts as one now. Calls cost least in the order of the releases.
func (a *Allocator) Quarantine(name string, addr netip.Addr, since, now time.Time) {
	a.tick(now)
	addr = canonical(addr)
	if !addr.IsValid() || !a.idle(addr) {
		return
	}
	s, age := a.pools.spaceOf(addr), max(0, now.Sub(since))
	if age < s.quarantine {
		a.reservations.take(addr, s)
		a.quarantine.begin(quarantined{addr: addr, name: name, since: a.quarantine.clock.elapsed - age, space: s})
	}
}

// QuarantineOf returns how long the address is in quarantine once nobody holds it any more.
func (a *Allocator) QuarantineOf(addr netip.Addr) time.Duration {
	return a.pools.spaceOf(canonical(addr)).quarantine
}

// InQuarantine returns everything in quarantine, in the order of release. It is what
// Quarantine needs after a restart.
func (a *Allocator) InQuarantine(now time.Time) []Quarantined {
	a.tick(now)
	return a.quarantine.list()
}

// NextFree returns when the next quarantine ends, and false if nothing is in
// quarantine.
func (a *Allocator) NextFree(now time.Time) (time.Time, bool) {
	a.tick(now)
	if r := a.quarantine.first(); r != nil {
		return a.quarantine.clock.at(r.until()), true
	}
	return time.Time{}, false
}

// Holds returns what the owner holds, in the order of the families of its
// last request and, in a family, of the addresses that it asked for (or of
// Restore).
func (a *Allocator) Holds(uid string) []Held {
	h := a.holdings.byUID[uid]
	if h == nil {
		return nil
	}
	return a.holdings.of(h, &a.pools)
}

// HeldSince returns since when the owner holds the address; the zero time: it
// does not.
func (a *Allocator) HeldSince(uid string, addr netip.Addr) time.Time {
	h, g := a.holdings.byUID[uid], a.holdings.at[canonical(addr)]
	if h != nil && g != nil {
		if t := g.tenant(h); t != nil {
			return t.since
		}
	}
	return time.Time{}
}

// Expects reports whether an address is reserved for the Service of this name, or in
// quarantine for it.
func (a *Allocator) Expects(name string) bool {
	return len(a.reservations.of[name]) > 0 || a.quarantine.byName[name] != nil
}

// HoldersOf returns who holds the address, in the order in which they came to
// it. Nobody holds an address in quarantine.
func (a *Allocator) HoldersOf(addr netip.Addr) []Owner {
	g := a.holdings.at[canonical(addr)]
	if g == nil {
		return nil
	}
	var owners []Owner
	for i := range g.tenants {
		owners = append(owners, g.tenants[i].owner)
	}
	return owners
}

// Stats returns counters of every pool and family the pool has, in the order
// of the document, at a cost that does not depend on the pools' sizes.
func (a *Allocator) Stats(now time.Time) []PoolStats {
	a.tick(now)
	stats := make([]PoolStats, 0, len(families)*len(a.pools.all))
	for _, p := range a.pools.all {
		for _, s := range p.spaces {
			if s != nil {
				stats = append(stats, s.stats())
			}
		}
	}
	return stats
}

// StatsOf returns the counters of the pool that hands the address out; false:
// there is none.
func (a *Allocator) StatsOf(addr netip.Addr, now time.Time) (PoolStats, bool) {
	a.tick(now)
	if s := a.pools.spaceOf(canonical(addr)); s.pool != nil {
		return s.stats(), true
	}
	return PoolStats{}, false
}
