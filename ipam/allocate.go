package ipam

import (
	"slices"
	"time"
)

// Allocate makes the owner hold what the request asks for and returns what it
// holds, in the order of req.Families and, in a family, of the addresses that
// are requested or reserved.
//
// What the owner holds already and what still fits the request stays: an edit
// of the configuration never moves an address. What does not fit is given
// back: a dropped family, an address where another is requested, an address of
// a pool that the request no longer names, all but the first Count of a family for
// which it names none. An address whose pool is gone or shrunk fits as long as
// the request names the pool that it named before. Calling Allocate again with
// the same request changes nothing, except that it adds a preferred family
// which has become available.
//
// Addresses that are reserved for the Service are as good as requested, if the request names
// none itself and no other pools. A Service that holds another address keeps that one until it
// renumbers.
//
// It costs O(log n) for n addresses, a look at the pools that come before the
// one that gives, and a look at everybody on an address that is shared.
//
// The error is always a *Refusal. The owner then keeps exactly what it held before, except
// addresses on which its new terms clash with those of others.
func (a *Allocator) Allocate(req Request, now time.Time) ([]Held, error) {
	p := &a.proposal
	r := p.begin(&a.addresses, req, now)
	if r == nil {
		r = p.decide()
	}
	if r != nil {
		p.applyTerms()
		return nil, r
	}
	return p.apply(), nil
}

// decide picks the addresses of every family: those that leave no choice, then
// those that the Service shares or comes back to, then any that can be drawn.
func (p *proposal) decide() *Refusal {
	for i := range p.Families {
		if r := p.settle(i); r != nil {
			return r
		}
	}
	if r := p.count(); r != nil {
		return r
	}
	for i, f := range p.Families {
		for !p.settled(i) {
			var k pick
			if k, p.refused[i] = p.rejoined(f); !k.is() {
				break
			}
			k.family = i
			p.picks = append(p.picks, k)
		}
	}
	return p.draw()
}

// settle picks what leaves no choice: the addresses that the Service names or
// has reserved, or what it keeps.
func (p *proposal) settle(i int) *Refusal {
	var room [MaxAddresses]*holding
	kept := room[:0]
	if !p.named[i] {
		kept = p.kept(i, kept)
		p.wishReserved(i, len(kept) >= p.wanted(i))
	}
	for _, addr := range p.wishes[i] {
		k, r := p.claim(addr)
		if r != nil {
			return r
		}
		k.family = i
		p.picks = append(p.picks, k)
	}
	for _, g := range kept {
		if !p.settled(i) && !slices.Contains(p.wishes[i], g.addr) {
			p.picks = append(p.picks, pick{family: i, holding: g, kept: true})
		}
	}
	return nil
}

// kept appends the holdings of family i that may stay, as many as are wanted.
func (p *proposal) kept(i int, kept []*holding) []*holding {
	if p.holder == nil {
		return kept
	}
	for _, g := range p.holder.holdings {
		if len(kept) == p.wanted(i) {
			break
		}
		if familyOf(g.addr) != p.Families[i] || !g.tenant(p.holder).fits(g.space, p.Pools) || p.avoids(g) {
			continue
		}
		if _, c := g.clash(p.me); !c.is() && (!p.Renumber || p.renews(g)) {
			kept = append(kept, g)
		}
	}
	return kept
}

// avoids reports whether the owner, who holds the address, is to leave it.
func (req *request) avoids(g *holding) bool {
	return len(g.tenants) == 1 && slices.Contains(req.Avoid, g.addr)
}

// renews reports whether a new Service in the owner's place could be given the
// address.
func (p *proposal) renews(g *holding) bool {
	f := familyOf(g.addr)
	if p.open(g.space.pool, f) != "" || p.reservedForOther(g.addr) {
		return false
	}
	shared, r := p.join(f)
	return g.knows(p.me) || shared == nil && r == nil
}

// draw picks pools for the families that are not settled.
func (p *proposal) draw() *Refusal {
	home := p.home()
	for i := range p.Families {
		if r := p.drawFamily(i, home); r != nil {
			return r
		}
	}
	if len(p.picks) > 0 {
		return nil
	}
	return p.refuseAll()
}

// drawFamily picks pools for a family until it is settled, home first. If no pool gives what is missing, it
// refuses the request, or leaves the family out if the request can do without.
func (p *proposal) drawFamily(i int, home *pool) *Refusal {
	f := p.Families[i]
	for !p.settled(i) && p.refused[i] == nil {
		from := home
		if from == nil || !p.gives(from, f) {
			from = p.firstPool(f)
		}
		if from == nil {
			if p.wanted(i) > 1 { // what is picked already belongs to the reason
				p.refused[i] = p.refuseDraw(i)
			}
			break
		}
		p.picks = append(p.picks, pick{family: i, space: from.spaces[f.index()]})
	}
	if p.settled(i) {
		return nil
	}
	if p.RequireAll || (p.Renumber || len(p.Avoid) > 0) && p.has(f) ||
		slices.ContainsFunc(p.picks, func(k pick) bool { return k.family == i && k.kept }) {
		return p.refuseDraw(i)
	}
	p.picks = slices.DeleteFunc(p.picks, func(k pick) bool { return k.family == i })
	return nil
}

// home returns a pool that gives every family which is missing and not refused: the pool of the settled
// family if that one does, otherwise the first that does.
func (p *proposal) home() *pool {
	var room [2]Family
	missing := room[:0]
	for i, f := range p.Families {
		if !p.settled(i) && p.refused[i] == nil {
			missing = append(missing, f)
		}
	}
	if len(missing) == 0 {
		return nil
	}
	if q := p.settledPool(); q != nil && p.gives(q, missing...) {
		return q
	}
	return p.firstPool(missing...)
}

// settledPool returns the pool of what is settled, nil if nothing is.
func (p *proposal) settledPool() *pool {
	for _, k := range p.picks {
		if q := k.pool(); q != nil {
			return q
		}
	}
	return nil
}

// firstPool returns the first pool that gives the request each of the families.
func (p *proposal) firstPool(of ...Family) *pool {
	for i := range p.candidates() {
		if q := p.candidate(i); p.gives(q, of...) {
			return q
		}
	}
	return nil
}

// gives reports whether a pool gives the request each of the families.
func (p *proposal) gives(q *pool, of ...Family) bool {
	return !slices.ContainsFunc(of, func(f Family) bool { return p.obstacle(q, f) != "" })
}

// apply carries a proposal out: it takes what is new, then gives back what is not
// kept.
func (p *proposal) apply() []Held {
	h := p.holder
	if h == nil {
		h = p.holdings.newHolder(p.self)
	}
	before := len(h.holdings)
	for i := range p.Families {
		for _, k := range p.picks {
			if k.family == i {
				h.holdings = append(h.holdings, p.grant(k, h))
			}
		}
	}
	old, now := h.holdings[:before], h.holdings[before:]
	for _, g := range old {
		if !slices.Contains(now, g) {
			p.leave(g, h)
		}
	}
	h.holdings = slices.Delete(h.holdings, 0, before)
	return p.holdings.of(h, &p.pools)
}

// grant makes the holder hold a pick.
func (p *proposal) grant(k pick, h *holder) *holding {
	g := k.holding
	switch {
	case k.kept:
		p.holdings.setTerms(g, h, p.me.terms)
		g.tenant(h).keep(g.space, p.Pools)
		return g
	case g != nil:
	case k.addr.IsValid():
		g = p.hold(k.addr, k.space)
	default:
		g = p.holdings.begin(k.space.free.takeLowest().addr(k.space.family), k.space)
	}
	p.holdings.enter(g, tenant{holder: h, terms: p.me.terms, asked: g.space.name(), since: p.now})
	return g
}

// applyTerms applies the terms of a refused request to what the holder has. It takes away the
// addresses on which these terms clash with those of others.
func (req *request) applyTerms() {
	h := req.holder
	if h == nil {
		return
	}
	stays := h.holdings[:0]
	for _, g := range h.holdings {
		if _, c := g.clash(req.me); c.is() {
			req.leave(g, h)
			continue
		}
		req.holdings.setTerms(g, h, req.me.terms)
		stays = append(stays, g)
	}
	if h.holdings = stays; len(stays) == 0 {
		req.holdings.forget(h)
	}
}
