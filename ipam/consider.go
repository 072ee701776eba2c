package ipam

import (
	"fmt"
	"net/netip"
	"slices"
	"time"
)

// Consideration is what one pool means for one family of a request.
type Consideration struct {
	Family Family
	Pool   string
	// Free is how many addresses of the family the pool can give now.
	Free float64
	// Reason is why the pool would not give the request an address. Empty: it
	// would. Message is the same in words.
	Reason  Reason
	Message string
}

// Consider returns what every pool would do for the request, if it were a new
// one: for each family first the pools that the request may draw from, in the
// order in which they are asked, then the others in the order of the document.
// It changes nothing. A request that cannot be read has no considerations:
// Allocate returns why.
func (a *Allocator) Consider(req Request, now time.Time) []Consideration {
	p := &a.proposal
	if p.begin(&a.addresses, req, now) != nil {
		return nil
	}
	p.Renumber = true // nothing that it holds counts
	var all []Consideration
	for i, f := range req.Families {
		if !p.named[i] {
			p.wishReserved(i, false)
		}
		var joined pick
		joined, p.refused[i] = p.rejoined(f)
		if len(p.wishes[i]) > 0 {
			p.refused[i] = nil
		}
		for _, addr := range p.wishes[i] {
			if _, p.refused[i] = p.claim(addr); p.refused[i] != nil {
				break
			}
		}
		for _, q := range p.inOrder() {
			all = append(all, p.consider(q, i, joined))
		}
	}
	return all
}

// inOrder returns all pools, those first that the request may draw from.
func (req *request) inOrder() []*pool {
	var pools []*pool
	for i := range req.candidates() {
		if q := req.candidate(i); q != nil && !slices.Contains(pools, q) {
			pools = append(pools, q)
		}
	}
	for _, q := range req.pools.all {
		if req.rank(q) < 0 {
			pools = append(pools, q)
		}
	}
	return pools
}

// consider considers a pool for family i. joined is what the Service has before
// any free address, if it is one.
func (p *proposal) consider(q *pool, i int, joined pick) Consideration {
	f, r := p.Families[i], p.refused[i]
	c := Consideration{Family: f, Pool: q.Name}
	if s := q.spaces[f.index()]; s != nil {
		c.Free = s.freeSize()
	}
	consideration := func(reason Reason, format string, args ...any) Consideration {
		c.Reason, c.Message = reason, fmt.Sprintf(format, args...)
		return c
	}
	wished := slices.DeleteFunc(slices.Clone(p.wishes[i]), func(addr netip.Addr) bool { return p.pools.spaceOf(addr).pool != q })
	switch {
	case r != nil && (len(p.wishes[i]) > 0 || p.open(q, f) == ""):
		return consideration(r.Reason, "%s", r.Message)
	case len(wished) > 0:
		return consideration("", "pool %q gives %s", q.Name, wished)
	case len(p.wishes[i]) > 0:
		return consideration(AddressOutsidePools, "pool %q does not contain %s", q.Name, p.wishes[i])
	case joined.is() && joined.pool() == q && joined.holding == nil:
		return consideration("", "%s waits for the Service to come back", joined.addr)
	case joined.is() && joined.pool() == q:
		return consideration("", "%s is shared with %s", joined.holding.addr, holdersText(joined.holding.tenants))
	}
	var w wording
	p.explain(&w, q.Name, f)
	return consideration(p.obstacle(q, f), "%s", w.message.String())
}
