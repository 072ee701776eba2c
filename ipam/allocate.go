package ipam

import (
	"cmp"
	"net/netip"
	"slices"
	"time"
)

// plan is how a request will be met.
type plan struct {
	req    Request
	self   identity
	me     party
	holder *holder // nil for somebody who holds nothing
	now    time.Time
	// wishes are, for every family of the request, the addresses that it has
	// to be given: requested or reserved ones.
	wishes [len(families)][]netip.Addr
	// refused are, for every family, why it may not even draw.
	refused [len(families)]*Refusal
	picks   []pick
}

// pick is one address to hold: a lease that the owner has (kept) or comes to;
// or one to take out of a space, the lowest free one unless addr says which. The
// zero pick is none.
type pick struct {
	family int // in the request
	lease  *lease
	kept   bool
	space  *space
	addr   netip.Addr
}

func (k pick) is() bool { return k.lease != nil || k.space != nil }

// pool is nil for a lease of an address that no pool hands out.
func (k pick) pool() *pool {
	if k.lease != nil {
		return k.lease.space.pool
	}
	return k.space.pool
}

// familySet is a set of families: bit i for families[i].
type familySet uint8

// Allocate makes the owner hold what the request asks for and returns what it
// holds, in the order of req.Families and, in a family, of the addresses that
// are requested or reserved.
//
// What the owner holds already and what still fits the request stays: an edit
// of the configuration never moves an address. What does not fit is given
// back: a dropped family, an address where another is requested, an address of
// a pool that the request no longer names, all but the first of a family for
// which it names none. An address whose pool is gone or shrunk fits as long as
// the request names the pool that it named before. Calling Allocate again with
// the same request changes nothing, except that it adds a preferred family
// which has become available.
//
// Addresses that are reserved for the Service are as good as requested, if the
// request names none itself and no other pools. One that holds another address
// keeps it, however, until it renumbers.
//
// It costs O(log n) for n addresses, a look at the pools that come before the
// one that gives, and a look at everybody on an address that is shared.
//
// On refusal, always a *Refusal, the owner keeps exactly what it held before,
// but for addresses on which it clashes with others by its new terms.
func (a *Allocator) Allocate(req Request, now time.Time) ([]Held, error) {
	p, r := a.read(req, now)
	if r == nil {
		r = a.decide(p)
	}
	if r != nil {
		a.abide(p)
		return nil, r
	}
	return a.apply(p), nil
}

// read checks the request and sorts its addresses by family.
func (a *Allocator) read(req Request, now time.Time) (*plan, *Refusal) {
	a.tick(now)
	p := &a.plan
	*p = plan{
		req: req, self: a.identify(req.Owner), me: party{&p.self, req.Sharing.terms()}, now: now,
		wishes: [...][]netip.Addr{p.wishes[0][:0], p.wishes[1][:0]}, picks: p.picks[:0],
	}
	if req.Owner.UID == "" {
		return p, refuse(InvalidRequest, "", "the request has no owner")
	}
	h := a.holders.of(req.Owner.UID, p.self.uidHash)
	if h != nil && h.owner != req.Owner {
		return p, refuse(InvalidRequest, "", "the owner %q is %s and cannot become %s", h.owner.UID, h.owner.Name, req.Owner.Name)
	}
	p.holder = h
	return p, p.read()
}

func (p *plan) read() *Refusal {
	req := &p.req
	if n := len(req.Families); n == 0 || n > len(families) || n == 2 && req.Families[0] == req.Families[1] {
		return refuse(InvalidRequest, "", "the request has families %.40q, not one or two different ones", req.Families[:min(n, 3)])
	}
	for _, f := range req.Families {
		if f.index() < 0 {
			return refuse(InvalidRequest, "", "the request has family %.40q, neither IPv4 nor IPv6", string(f))
		}
	}
	if n := len(req.Addresses); n > MaxAddresses {
		return refuse(InvalidRequest, "", "%d addresses are requested, at most %d can be", n, MaxAddresses)
	}
	for _, addr := range req.Addresses {
		if r := p.wish(addr); r != nil {
			return r
		}
	}
	return nil
}

// wish notes a requested address.
func (p *plan) wish(addr netip.Addr) *Refusal {
	if !addr.IsValid() || addr.Zone() != "" {
		return refuse(InvalidRequest, "", "%q is not an address without a zone", addr)
	}
	addr = addr.Unmap()
	i := slices.Index(p.req.Families, familyOf(addr))
	if i < 0 {
		return refuse(WrongFamily, "", "%s is an %s address, the Service has only %s", addr, familyOf(addr), p.req.Families[0])
	}
	if !slices.Contains(p.wishes[i], addr) {
		p.wishes[i] = append(p.wishes[i], addr)
	}
	return nil
}

// decide picks the addresses of every family: those that leave no choice, then
// those that the Service shares or comes back to, then any that can be drawn.
func (a *Allocator) decide(p *plan) *Refusal {
	for i := range p.req.Families {
		if r := a.settle(p, i); r != nil {
			return r
		}
	}
	for i, f := range p.req.Families {
		if p.settled(i) {
			continue
		}
		var k pick
		if k, p.refused[i] = a.rejoined(p, f); k.is() {
			k.family = i
			p.picks = append(p.picks, k)
		}
	}
	return a.draw(p)
}

func (p *plan) settled(i int) bool {
	return slices.ContainsFunc(p.picks, func(k pick) bool { return k.family == i })
}

// settle picks what leaves no choice: the addresses that the Service names or
// has reserved, or what it keeps.
func (a *Allocator) settle(p *plan, i int) *Refusal {
	if len(p.wishes[i]) == 0 {
		kept := a.kept(p, p.req.Families[i])
		if a.wishReserved(p, i, kept != nil); len(p.wishes[i]) == 0 && kept != nil {
			p.picks = append(p.picks, pick{family: i, lease: kept, kept: true})
		}
	}
	for _, addr := range p.wishes[i] {
		k, r := a.claim(p, addr)
		if r != nil {
			return r
		}
		k.family = i
		p.picks = append(p.picks, k)
	}
	return nil
}

// kept returns the first lease of the family that may stay.
func (a *Allocator) kept(p *plan, f Family) *lease {
	if p.holder == nil {
		return nil
	}
	for _, l := range p.holder.leases {
		if familyOf(l.addr) != f || !l.tenant(p.holder).fits(l.space, p.req.Pools) || p.avoids(l) {
			continue
		}
		if _, c := l.clash(p.me); !c.is() && (!p.req.Renumber || a.renews(p, l)) {
			return l
		}
	}
	return nil
}

// avoids reports whether the owner, who holds the lease, is to leave it.
func (p *plan) avoids(l *lease) bool {
	return len(l.tenants) == 1 && slices.Contains(p.req.Avoid, l.addr)
}

// renews reports whether a new Service in the owner's place could be given the
// lease.
func (a *Allocator) renews(p *plan, l *lease) bool {
	f := familyOf(l.addr)
	if a.open(p, l.space.pool, f) != "" || a.reservedForOther(p, l.addr) {
		return false
	}
	shared, r := a.join(p, f)
	return p.me.knows(l) || shared == nil && r == nil
}

// wishReserved wishes for the addresses of family i that are reserved for the
// Service, unless it holds only others that it may keep.
func (a *Allocator) wishReserved(p *plan, i int, keeps bool) {
	reserved := a.reserved[p.me.owner.Name]
	holds := func(addr netip.Addr) bool { return p.holds(a.uses.get(addr).lease) }
	if keeps && !p.req.Renumber && !slices.ContainsFunc(reserved, func(addr netip.Addr) bool {
		return familyOf(addr) == p.req.Families[i] && holds(addr)
	}) {
		return
	}
	for _, addr := range reserved {
		if familyOf(addr) == p.req.Families[i] && a.asksFor(p, addr) {
			p.wishes[i] = append(p.wishes[i], addr)
		}
	}
}

// asksFor reports whether the pools that the request names, if any, contain the
// address.
func (a *Allocator) asksFor(p *plan, addr netip.Addr) bool {
	at := a.find(addr)
	return len(p.req.Pools) == 0 || at != nil && slices.Contains(p.req.Pools, at.pool.Name)
}

func (p *plan) holds(l *lease) bool { return l != nil && p.holder != nil && l.tenant(p.holder) != nil }

// claim picks an address that the Service names or has reserved.
func (a *Allocator) claim(p *plan, addr netip.Addr) (pick, *Refusal) {
	u := a.uses.get(addr)
	l, mine := u.lease, p.holds(u.lease)
	if mine && !p.req.Renumber {
		return pick{lease: l, kept: true}, a.vacant(p, u)
	}
	at, r := a.locate(p, addr)
	if r == nil {
		r = a.entitled(p, at, addr)
	}
	if r == nil {
		r = a.vacant(p, u)
	}
	if r != nil {
		return pick{}, r
	}
	if a.apart[addr].service != p.me.owner.Name && a.fills(p, at.space, u) {
		return pick{}, a.refuseQuota(p, at.space)
	}
	return pick{lease: l, kept: mine, space: at.space, addr: addr}, nil
}

// locate returns the part of a pool that hands the address out.
func (a *Allocator) locate(p *plan, addr netip.Addr) (*segment, *Refusal) {
	at, named := a.find(addr), p.req.Pools
	switch {
	case len(named) > 0 && !slices.ContainsFunc(named, a.exists):
		return nil, refuse(PoolNotFound, named[0], "there is no pool %s", quoted(named))
	case at == nil:
		return nil, refuse(AddressOutsidePools, "", "%s is in no pool", addr)
	case len(named) > 0 && !slices.Contains(named, at.pool.Name):
		return nil, refuse(AddressOutsidePools, at.pool.Name, "%s is in pool %q, not in the requested %s",
			addr, at.pool.Name, quoted(named))
	}
	if why, forbidden := a.forbidden.why(addr); forbidden {
		return nil, refuse(AddressForbidden, at.pool.Name, "%s is never handed out: it is %s", addr, why)
	}
	if at.space == nil {
		return nil, refuse(AddressWithheld, at.pool.Name, "%s is never handed out: it is %s", addr, at.pool.whyWithheld(addr))
	}
	return at, nil
}

// entitled returns nil if the Service may ask for the address. For one that is
// reserved for it only draining counts: the operator has decided.
func (a *Allocator) entitled(p *plan, at *segment, addr netip.Addr) *Refusal {
	q := at.pool
	reserved := a.apart[addr].service != ""
	mine := reserved && !a.reservedForOther(p, addr)
	switch {
	case !mine && !q.Allows(p.req.Subject):
		return refuse(PoolNotAllowed, q.Name, "%s is in pool %q, which %s", addr, q.Name, q.closedTo(p.req.Subject))
	case !mine && !q.MayRequest(p.req.Subject.Namespace):
		return refuse(RequestNotAllowed, q.Name, "%s is in pool %q, which lets %s ask for particular addresses, not namespace %q",
			addr, q.Name, requesters(q.Requesters), p.req.Subject.Namespace)
	case reserved && !mine:
		return a.refuseReserved(addr)
	case q.Draining:
		return refuse(PoolDraining, q.Name, "%s is in pool %q, which is draining: it gives no new addresses", addr, q.Name)
	}
	return nil
}

// vacant returns nil if nobody on the address is in the way.
func (a *Allocator) vacant(p *plan, u use) *Refusal {
	if u.lease != nil {
		if other, c := u.lease.clash(p.me); c.is() {
			return refuseClash(p.me, other, c, u.lease)
		}
	}
	if u.rest != nil && !u.rest.waitsFor(p.me) {
		return a.refuseResting(u.rest)
	}
	return nil
}

func (a *Allocator) reservedForOther(p *plan, addr netip.Addr) bool {
	service := a.apart[addr].service
	return service != "" && service != p.me.owner.Name
}

// rejoined picks the address of the family that the Service has before any free
// one: the one that others hold under its key, or one that rests for it.
func (a *Allocator) rejoined(p *plan, f Family) (pick, *Refusal) {
	if l, r := a.join(p, f); l != nil || r != nil {
		return pick{lease: l}, r
	}
	if r := a.comeback(p, f); r != nil {
		return pick{space: r.space, addr: r.addr}, nil
	}
	return pick{}, nil
}

// comeback returns the rest of the address of the family that the Service
// released and could draw now: of the first pool, there the last one released.
func (a *Allocator) comeback(p *plan, f Family) *rest {
	var best *rest
	for r := a.namesakes.get(p.me.nameHash); r != nil; r = r.namesake.next {
		switch {
		case !r.waitsFor(p.me) || familyOf(r.addr) != f || a.open(p, r.space.pool, f) != "":
		case a.apart[r.addr].conflict || a.reservedForOther(p, r.addr) || a.fills(p, r.space, use{rest: r}):
		case best == nil || cmp.Or(
			cmp.Compare(a.rank(p, r.space.pool), a.rank(p, best.space.pool)),
			cmp.Compare(best.since, r.since),
			r.addr.Compare(best.addr)) < 0:
			best = r
		}
	}
	return best
}

// draw finds pools for the families that are not settled.
func (a *Allocator) draw(p *plan) *Refusal {
	missing := p.missing()
	home := a.home(p, missing)
	for i, f := range p.req.Families {
		if p.settled(i) {
			continue
		}
		from, set := home, familySet(1)<<f.index()
		if from == nil && p.refused[i] == nil && missing != set {
			from = a.firstPool(p, set)
		}
		switch {
		case from != nil && p.refused[i] == nil:
			p.picks = append(p.picks, pick{family: i, space: from.spaces[f.index()]})
		case p.req.RequireAll || (p.req.Renumber || len(p.req.Avoid) > 0) && p.has(f):
			return a.refuseDraw(p, i)
		}
	}
	if len(p.picks) > 0 {
		return nil
	}
	return a.refuseAll(p)
}

// missing is the families that may be drawn and have to be.
func (p *plan) missing() (missing familySet) {
	for i, f := range p.req.Families {
		if !p.settled(i) && p.refused[i] == nil {
			missing |= 1 << f.index()
		}
	}
	return missing
}

// has reports whether the owner holds an address of the family.
func (p *plan) has(f Family) bool {
	return p.holder != nil && slices.ContainsFunc(p.holder.leases, func(l *lease) bool { return familyOf(l.addr) == f })
}

// home returns the pool that gives all that is missing: the one of what is
// settled if it does, else the first.
func (a *Allocator) home(p *plan, missing familySet) *pool {
	if missing == 0 {
		return nil
	}
	if q := p.settledPool(); q != nil && a.gives(p, q, missing) {
		return q
	}
	return a.firstPool(p, missing)
}

// settledPool returns the pool of what is settled, nil if nothing is.
func (p *plan) settledPool() *pool {
	for _, k := range p.picks {
		if q := k.pool(); q != nil {
			return q
		}
	}
	return nil
}

// firstPool returns the first pool that gives the request every family of the
// set.
func (a *Allocator) firstPool(p *plan, set familySet) *pool {
	for i := range a.candidates(p) {
		if q := a.candidate(p, i); a.gives(p, q, set) {
			return q
		}
	}
	return nil
}

func (a *Allocator) gives(p *plan, q *pool, set familySet) bool {
	for i, f := range families {
		if set&(1<<i) != 0 && a.obstacle(p, q, f) != "" {
			return false
		}
	}
	return true
}

// apply carries a plan out: it takes what is new, then gives back what is not
// kept.
func (a *Allocator) apply(p *plan) []Held {
	h := p.holder
	if h == nil {
		h = a.newHolder(p.self)
	}
	before := len(h.leases)
	for i := range p.req.Families {
		for _, k := range p.picks {
			if k.family == i {
				h.leases = append(h.leases, a.grant(p, k, h))
			}
		}
	}
	old, now := h.leases[:before], h.leases[before:]
	for _, l := range old {
		if !slices.Contains(now, l) {
			a.leave(l, h)
		}
	}
	h.leases = slices.Delete(h.leases, 0, before)
	return a.held(h)
}

// grant makes the holder hold a pick.
func (a *Allocator) grant(p *plan, k pick, h *holder) *lease {
	l := k.lease
	switch {
	case k.kept:
		a.setTerms(l, h, p.me.terms)
		l.tenant(h).keep(l.space, p.req.Pools)
		return l
	case l != nil:
	case k.addr.IsValid():
		l = a.newLease(k.addr, k.space)
	default:
		l = a.leaseOf(k.space.free.takeLowest().addr(k.space.family), k.space)
	}
	a.enter(l, tenant{holder: h, terms: p.me.terms, asked: l.space.name(), since: p.now})
	return l
}

// abide makes the holder live with a refusal: what it holds it holds on its
// new terms, where nobody is in the way.
func (a *Allocator) abide(p *plan) {
	h := p.holder
	if h == nil {
		return
	}
	stays := h.leases[:0]
	for _, l := range h.leases {
		if _, c := l.clash(p.me); c.is() {
			a.leave(l, h)
			continue
		}
		a.setTerms(l, h, p.me.terms)
		stays = append(stays, l)
	}
	if h.leases = stays; len(stays) == 0 {
		a.forget(h)
	}
}
