package ipam

import (
	"net/netip"
	"slices"
	"time"

	"github.com/lodestone-lb/lodestone/pkg/config"
)

// plan is how a request will be met, one pick per family of the request.
type plan struct {
	req    Request
	holder *holder
	now    time.Time
	wishes [len(families)]netip.Addr
	picks  [len(families)]pick
}

// pick is a lease to keep; or a space to draw from, the lowest address unless
// addr says which; or nothing: the family is not to be had.
type pick struct {
	keep  *lease
	space *space
	addr  netip.Addr
}

func (p *pick) settled() bool { return p.keep != nil || p.space != nil }

// familySet is a set of families: bit i for families[i].
type familySet uint8

// Allocate makes the owner hold what the request asks for and returns what it
// holds, in the order of req.Families.
//
// What the owner holds already and what still fits the request stays: pool
// edits never move an address, nor does a pool that was closed to the
// namespace. What does not fit is given back: a dropped family, an address
// where another is requested, an address of a pool that the request no longer
// names. An address whose pool is gone or shrunk fits as long as the request
// names the pool that it named before. Calling Allocate again with the same
// request changes nothing, except that it adds a preferred family which has
// become available.
//
// On refusal, always a *Refusal, the owner keeps exactly what it held before.
func (a *Allocator) Allocate(req Request, now time.Time) ([]Held, error) {
	a.tick(now)
	p := plan{req: req, holder: a.holders[req.Owner.UID], now: now}
	r := p.read()
	if r == nil {
		r = a.settle(&p)
	}
	if r == nil {
		r = a.draw(&p)
	}
	if r != nil {
		return nil, r
	}
	return a.apply(&p), nil
}

// read checks the request and sorts its addresses by family.
func (p *plan) read() *Refusal {
	req := &p.req
	switch n := len(req.Families); {
	case req.Owner.UID == "":
		return refuse(InvalidRequest, "", "the request has no owner")
	case n == 0 || n > len(families) || n == 2 && req.Families[0] == req.Families[1]:
		return refuse(InvalidRequest, "", "the request has families %q, not one or two different ones", req.Families)
	}
	for _, f := range req.Families {
		if f.index() < 0 {
			return refuse(InvalidRequest, "", "the request has family %q, neither IPv4 nor IPv6", string(f))
		}
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
	switch {
	case i < 0:
		return refuse(WrongFamily, "", "%s is an %s address, the Service has only %s", addr, familyOf(addr), p.req.Families[0])
	case p.wishes[i].IsValid() && p.wishes[i] != addr:
		return refuse(InvalidRequest, "", "%s and %s are requested, two %s addresses", p.wishes[i], addr, familyOf(addr))
	}
	p.wishes[i] = addr
	return nil
}

// settle picks what leaves no choice: what the owner keeps and the addresses
// that it names.
func (a *Allocator) settle(p *plan) *Refusal {
	for i, f := range p.req.Families {
		if l := p.kept(f, p.wishes[i]); l != nil {
			p.picks[i].keep = l
		} else if p.wishes[i].IsValid() {
			s, r := a.claim(p, p.wishes[i])
			if r != nil {
				return r
			}
			p.picks[i] = pick{space: s, addr: p.wishes[i]}
		}
	}
	return nil
}

// kept returns the first lease of the family that fits the request.
func (p *plan) kept(f Family, wish netip.Addr) *lease {
	if p.holder == nil {
		return nil
	}
	for _, l := range p.holder.leases {
		if l.addr == wish || !wish.IsValid() && familyOf(l.addr) == f && l.fits(p.req.Pools) {
			return l
		}
	}
	return nil
}

// claim returns the space of a requested address that the owner can have.
func (a *Allocator) claim(p *plan, addr netip.Addr) (*space, *Refusal) {
	at := a.find(addr)
	switch {
	case len(p.req.Pools) > 0 && !slices.ContainsFunc(p.req.Pools, a.exists):
		return nil, refuse(PoolNotFound, p.req.Pools[0], "there is no pool %s", quoted(p.req.Pools))
	case at == nil:
		return nil, refuse(AddressOutsidePools, "", "%s is in no pool", addr)
	case len(p.req.Pools) > 0 && !slices.Contains(p.req.Pools, at.pool.Name):
		return nil, refuse(AddressOutsidePools, at.pool.Name, "%s is in pool %q, not in the requested %s",
			addr, at.pool.Name, quoted(p.req.Pools))
	case at.space == nil:
		return nil, refuseWithheld(addr, at.pool)
	case !at.pool.Allows(config.Subject{Namespace: p.req.Namespace}):
		return nil, refuse(PoolNotAllowed, at.pool.Name, "%s is in pool %q, which %s",
			addr, at.pool.Name, at.pool.closedTo(p.req.Namespace))
	}
	l := a.leases[addr]
	switch {
	case l == nil:
	case !l.resting:
		return nil, refuse(AddressInUse, at.pool.Name, "%s is held by %s", addr, l.holder.owner.Name)
	case l.holder.owner.Name != p.req.Owner.Name || p.req.Owner.Name == "":
		return nil, refuse(AddressQuarantined, at.pool.Name, "%s is in quarantine after its use by %s, it is free in %s",
			addr, l.holder.owner.Name, wait(l.until, p.now))
	}
	return at.space, nil
}

// draw finds pools for the families that are not settled.
func (a *Allocator) draw(p *plan) *Refusal {
	var missing familySet
	for i, f := range p.req.Families {
		if !p.picks[i].settled() {
			missing |= 1 << f.index()
		}
	}
	if missing == 0 {
		return nil
	}
	home := a.firstPool(&p.req, missing, p.settledPool())
	if home == nil {
		home = a.firstPool(&p.req, missing, nil)
	}
	for i, f := range p.req.Families {
		if p.picks[i].settled() {
			continue
		}
		from := home
		if from == nil {
			from = a.firstPool(&p.req, 1<<f.index(), nil)
		}
		if from != nil {
			p.picks[i].space = from.spaces[f.index()]
		} else if p.req.RequireAll {
			return a.refuseDraw(p, f)
		}
	}
	if p.picks[0].settled() || p.picks[1].settled() {
		return nil
	}
	return a.refuseAll(p)
}

// settledPool returns the pool of a family that is settled, nil if none is.
func (p *plan) settledPool() *pool {
	for _, k := range p.picks {
		switch {
		case k.keep != nil:
			return k.keep.space.pool
		case k.space != nil:
			return k.space.pool
		}
	}
	return nil
}

// firstPool returns the first pool open to the request that can give every
// family of the set; only, if not nil, is the only pool that counts.
func (a *Allocator) firstPool(req *Request, set familySet, only *pool) *pool {
	for i := range a.candidates(req) {
		p := a.candidate(req, i)
		if p != nil && (only == nil || p == only) && p.gives(set) && p.Allows(config.Subject{Namespace: req.Namespace}) {
			return p
		}
	}
	return nil
}

// candidates is how many pools the request may draw from, if it is let in.
func (a *Allocator) candidates(req *Request) int {
	if len(req.Pools) > 0 {
		return len(req.Pools)
	}
	return len(a.auto)
}

// candidate returns pool i of the request, nil if there is none of the name.
func (a *Allocator) candidate(req *Request, i int) *pool {
	if len(req.Pools) > 0 {
		return a.byName[req.Pools[i]]
	}
	return a.auto[i]
}

// apply carries a plan out: it takes what is new, then gives back what is not
// kept.
func (a *Allocator) apply(p *plan) []Held {
	h := p.holder
	if h == nil {
		h = a.newHolder(p.req.Owner.UID)
	}
	h.owner = p.req.Owner
	var mine [len(families)]*lease
	n := 0
	for _, k := range p.picks {
		switch {
		case k.keep != nil:
			k.keep.keep(p.req.Pools)
			mine[n] = k.keep
			n++
		case k.space != nil:
			mine[n] = a.take(k, h)
			n++
		}
	}
	for _, l := range h.leases {
		if !slices.Contains(mine[:n], l) {
			a.rest(l, p.now)
		}
	}
	h.leases = append(h.leases[:0], mine[:n]...)
	return h.held()
}

// take makes the lease of a pick.
func (a *Allocator) take(k pick, h *holder) *lease {
	var l *lease
	if !k.addr.IsValid() {
		l = &lease{addr: k.space.free.takeLowest().addr(k.space.family), space: k.space}
		a.leases[l.addr] = l
	} else if l = a.leases[k.addr]; l == nil {
		l = a.lease(k.addr, k.space)
	}
	a.give(l, h)
	return l
}
