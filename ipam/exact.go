package ipam

import (
	"net/netip"
	"slices"
)

// wishReserved wishes for the addresses of family i that are reserved for the
// Service, unless it holds only others that it may keep.
func (p *proposal) wishReserved(i int, keeps bool) {
	reserved := p.reservations.of[p.service()]
	holds := func(addr netip.Addr) bool { return p.holds(p.holdings.at[addr]) }
	if keeps && !p.Renumber && !slices.ContainsFunc(reserved, func(addr netip.Addr) bool {
		return familyOf(addr) == p.Families[i] && holds(addr)
	}) {
		return
	}
	for _, addr := range reserved {
		if familyOf(addr) == p.Families[i] && p.asksFor(addr) {
			p.wishes[i] = append(p.wishes[i], addr)
		}
	}
}

// asksFor reports whether the pools that the request names, if any, contain the
// address.
func (req *request) asksFor(addr netip.Addr) bool {
	at := req.pools.find(addr)
	return len(req.Pools) == 0 || at != nil && slices.Contains(req.Pools, at.pool.Name)
}

// claim picks an address that the Service names or has reserved.
func (p *proposal) claim(addr netip.Addr) (pick, *Refusal) {
	g, inQuarantine := p.holdings.at[addr], p.quarantine.at[addr]
	mine := p.holds(g)
	if mine && !p.Renumber {
		return pick{holding: g, kept: true}, p.vacant(g, inQuarantine)
	}
	at, r := p.locate(addr)
	if r == nil {
		r = p.entitled(at, addr)
	}
	if r == nil {
		r = p.vacant(g, inQuarantine)
	}
	if r != nil {
		return pick{}, r
	}
	if p.reservations.apart[addr].service != p.service() && p.fills(at.space, g, inQuarantine) {
		return pick{}, p.refuseQuota(at.space)
	}
	return pick{holding: g, kept: mine, space: at.space, addr: addr}, nil
}

// locate returns the part of a pool that hands the address out.
func (req *request) locate(addr netip.Addr) (*segment, *Refusal) {
	at, named := req.pools.find(addr), req.Pools
	switch {
	case len(named) > 0 && !slices.ContainsFunc(named, req.pools.exists):
		return nil, refuse(PoolNotFound, named[0], "there is no pool %s", quoted(named))
	case at == nil:
		return nil, refuse(AddressOutsidePools, "", "%s is in no pool", addr)
	case len(named) > 0 && !slices.Contains(named, at.pool.Name):
		return nil, refuse(AddressOutsidePools, at.pool.Name, "%s is in pool %q, not in the requested %s",
			addr, at.pool.Name, quoted(named))
	}
	if why, forbidden := req.pools.forbidden.why(addr); forbidden {
		return nil, refuse(AddressForbidden, at.pool.Name, "%s is never handed out: it is %s", addr, why)
	}
	if at.space == nil {
		return nil, refuse(AddressWithheld, at.pool.Name, "%s is never handed out: it is %s", addr, at.pool.whyWithheld(addr))
	}
	return at, nil
}

// entitled returns nil if the Service may ask for the address. An address that is reserved for
// the Service is refused only while its pool drains, because the operator has decided about
// the rest.
func (req *request) entitled(at *segment, addr netip.Addr) *Refusal {
	q := at.pool
	reserved := req.reservations.apart[addr].service != ""
	mine := reserved && !req.reservedForOther(addr)
	switch {
	case !mine && !q.Allows(req.Subject):
		return refuse(PoolNotAllowed, q.Name, "%s is in pool %q, which %s", addr, q.Name, q.closedTo(req.Subject))
	case !mine && !q.MayRequest(req.Subject.Namespace):
		return refuse(RequestNotAllowed, q.Name, "%s is in pool %q, which lets %s ask for particular addresses, not namespace %q",
			addr, q.Name, requesters(q.Requesters), req.Subject.Namespace)
	case reserved && !mine:
		return req.refuseReserved(addr)
	case q.Draining:
		return refuse(PoolDraining, q.Name, "%s is in pool %q, which is draining: it gives no new addresses", addr, q.Name)
	}
	return nil
}

// vacant returns nil if the Service can share the address with its holders, if it has any, and if
// it is not in quarantine for another Service.
func (req *request) vacant(g *holding, inQuarantine *quarantined) *Refusal {
	if g != nil {
		if other, c := g.clash(req.me); c.is() {
			return refuseClash(req.me, other, c, g)
		}
	}
	if inQuarantine != nil && !inQuarantine.waitsFor(req.me) {
		return req.refuseQuarantined(inQuarantine)
	}
	return nil
}
