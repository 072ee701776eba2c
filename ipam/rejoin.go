package ipam

import (
	"cmp"
	"net/netip"
	"slices"
)

// rejoined picks the address of the family that the Service has before any free
// one: the one that others hold under its key, or one in quarantine that it had before.
func (p *proposal) rejoined(f Family) (pick, *Refusal) {
	if g, r := p.join(f); g != nil || r != nil {
		return pick{holding: g}, r
	}
	if r := p.comeback(f); r != nil {
		return pick{space: r.space, addr: r.addr}, nil
	}
	return pick{}, nil
}

// join returns the address of the family that the request has to share. It is the first, in
// the order of pools and then by address, that is held under its key and on which it clashes
// with nobody. If it clashes on all addresses that are held under its key, it is refused.
func (p *proposal) join(f Family) (*holding, *Refusal) {
	if p.me.terms == nil {
		return nil, nil
	}
	var joined, missed *holding
	consider := func(g *holding) {
		switch {
		case familyOf(g.addr) != f || !g.knows(p.me) || p.open(g.space.pool, f) != "" || p.fills(g.space, g, nil):
		case p.sharable(g):
			joined = p.first(joined, g)
		default:
			missed = p.first(missed, g)
		}
	}
	for _, n := range append([]string{p.me.namespace}, p.me.terms.Namespaces...) {
		under := p.holdings.groups[group{p.me.terms.Key, n}]
		for _, g := range under[:min(len(under), MaxJoinable)] {
			consider(g)
		}
	}
	if joined == nil && missed != nil {
		return nil, p.refuseShare(missed)
	}
	return joined, nil
}

// sharable reports whether the request may share an address that is held.
func (req *request) sharable(g *holding) bool {
	_, c := g.clash(req.me)
	return !c.is() && !req.reservedForOther(g.addr)
}

// refuseShare returns why the request may not share an address that is held.
func (req *request) refuseShare(g *holding) *Refusal {
	if req.reservedForOther(g.addr) {
		return req.refuseReserved(g.addr)
	}
	other, c := g.clash(req.me)
	return refuseClash(req.me, other, c, g)
}

// first returns one of two holdings, of which g may be nil: the first in the order in which
// the request asks the pools, and then by address.
func (req *request) first(g, other *holding) *holding {
	if g == nil || cmp.Or(
		cmp.Compare(req.rank(other.space.pool), req.rank(g.space.pool)),
		other.addr.Compare(g.addr)) < 0 {
		return other
	}
	return g
}

// comeback returns an address that the Service released, that is still in quarantine, and that
// the Service could draw now. Of several it returns that of the first pool, and of that pool
// the last one released.
func (p *proposal) comeback(f Family) *quarantined {
	var best *quarantined
	taken := func(addr netip.Addr) bool {
		return slices.ContainsFunc(p.picks, func(k pick) bool { return k.addr == addr })
	}
	for r := p.quarantine.byName[p.service()]; r != nil; r = r.earlier { // the last are the best, mostly
		switch {
		case !r.waitsFor(p.me) || familyOf(r.addr) != f || p.open(r.space.pool, f) != "":
		case best != nil && cmp.Or(
			cmp.Compare(p.rank(r.space.pool), p.rank(best.space.pool)),
			cmp.Compare(best.since, r.since),
			r.addr.Compare(best.addr)) > 0:
		case taken(r.addr) || p.reservations.apart[r.addr].conflict || p.reservedForOther(r.addr) || p.fills(r.space, nil, r):
		default:
			best = r
		}
	}
	return best
}
