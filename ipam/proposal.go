package ipam

import (
	"net/netip"
	"time"
)

// proposal is how a request will be met.
type proposal struct {
	request
	// refused is, for every family, why the Service may not draw an address of it.
	refused [len(families)]*Refusal
	picks   []pick
}

// pick is one address to hold. It is a holding that the owner has already (kept) or joins, or
// an address to take out of a space: addr, or the lowest free one. The zero pick is none.
type pick struct {
	family  int // in the request
	holding *holding
	kept    bool
	space   *space
	addr    netip.Addr
}

func (k pick) is() bool { return k.holding != nil || k.space != nil }

// pool is nil for an address that no pool hands out.
func (k pick) pool() *pool {
	if k.holding != nil {
		return k.holding.space.pool
	}
	return k.space.pool
}

// begin begins the proposal for a request, which it reads first.
func (p *proposal) begin(a *addresses, req Request, now time.Time) *Refusal {
	a.tick(now)
	*p = proposal{
		request: request{Request: req, addresses: a, now: now, wishes: [...][]netip.Addr{p.wishes[0][:0], p.wishes[1][:0]}},
		picks:   p.picks[:0],
	}
	return p.read()
}

// settled reports whether there are all picks for family i.
func (p *proposal) settled(i int) bool {
	n := 0
	for _, k := range p.picks {
		if k.family == i {
			n++
		}
	}
	return n >= p.wanted(i)
}

// obstacle returns why a pool does not give the request a free address of the
// family, empty if it does.
func (p *proposal) obstacle(q *pool, f Family) Reason {
	if o := p.open(q, f); o != "" {
		return o
	}
	switch s := q.spaces[f.index()]; {
	case p.fills(s, nil, nil):
		return QuotaExceeded
	case p.exhausts(s):
		return PoolExhausted
	}
	return ""
}

// exhausts reports whether the proposal leaves nothing free in the space.
func (p *proposal) exhausts(s *space) bool {
	drawn := 0
	for _, k := range p.picks {
		if k.space == s && k.holding == nil && !k.addr.IsValid() {
			drawn++
		}
	}
	return s.free.empty() || drawn > 0 && s.freeSize() <= float64(drawn)
}
