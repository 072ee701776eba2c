package ipam

import (
	"fmt"
	"net/netip"
	"slices"
	"time"
)

// PoolStats are a pool's counters for one family. The counts of an IPv6 pool
// may exceed what an integer holds, hence float64.
type PoolStats struct {
	Pool   string
	Family Family
	// Size is how many addresses the pool may hand out, without what is
	// forbidden; Free those of them that can be given to anybody now; Assigned
	// those that are held, Quarantined those that rest, Conflicted the others
	// that other hosts have, Reserved those of the rest that are reserved.
	// Stranded addresses are in no pool and not counted.
	Size, Free, Assigned, Quarantined, Conflicted, Reserved float64
}

// Stats returns counters of every pool and family the pool has, in the order
// of the document, at a cost that does not depend on the pools' sizes.
func (a *Allocator) Stats(now time.Time) []PoolStats {
	a.tick(now)
	stats := make([]PoolStats, 0, len(families)*len(a.pools))
	for _, p := range a.pools {
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
	if s := a.spaceOf(canonical(addr)); s.pool != nil {
		return s.stats(), true
	}
	return PoolStats{}, false
}

func (s *space) stats() PoolStats {
	return PoolStats{
		Pool: s.name(), Family: s.family, Size: s.size, Free: s.freeSize(),
		Assigned: float64(s.assigned), Quarantined: float64(s.resting),
		Conflicted: float64(s.conflicted), Reserved: float64(s.reserved),
	}
}

// Consideration is what one pool means for one family of a request.
type Consideration struct {
	Family Family
	Pool   string
	// Free is how many addresses of the family the pool can give now.
	Free float64
	// Reason is why the pool would not give the request an address. Empty: it
	// would. Message says the same in words.
	Reason  Reason
	Message string
}

// Consider says what every pool would do for the request, if it were a new
// one: for each family first the pools that the request may draw from, in the
// order in which they are asked, then the others in the order of the document.
// It changes nothing. A request that cannot be read has no considerations:
// Allocate says why.
func (a *Allocator) Consider(req Request, now time.Time) []Consideration {
	p, r := a.read(req, now)
	if r != nil {
		return nil
	}
	p.req.Renumber = true // nothing that it holds counts
	var all []Consideration
	for i, f := range req.Families {
		if len(p.wishes[i]) == 0 {
			a.wishReserved(p, i, false)
		}
		joined, r := a.rejoined(p, f)
		if len(p.wishes[i]) > 0 {
			r = a.claimAll(p, i)
		}
		p.refused[i] = r
		for _, q := range a.inOrder(p) {
			all = append(all, a.consider(p, q, i, joined))
		}
	}
	return all
}

// claimAll says which address of family i that the request names it may not
// have.
func (a *Allocator) claimAll(p *plan, i int) *Refusal {
	for _, addr := range p.wishes[i] {
		if _, r := a.claim(p, addr); r != nil {
			return r
		}
	}
	return nil
}

// inOrder returns all pools, those first that the request may draw from.
func (a *Allocator) inOrder(p *plan) []*pool {
	var pools []*pool
	for i := range a.candidates(p) {
		if q := a.candidate(p, i); q != nil && !slices.Contains(pools, q) {
			pools = append(pools, q)
		}
	}
	for _, q := range a.pools {
		if a.rank(p, q) < 0 {
			pools = append(pools, q)
		}
	}
	return pools
}

// consider considers a pool for family i. joined is what the Service has before
// any free address, if it is one.
func (a *Allocator) consider(p *plan, q *pool, i int, joined pick) Consideration {
	f, r := p.req.Families[i], p.refused[i]
	c := Consideration{Family: f, Pool: q.Name}
	if s := q.spaces[f.index()]; s != nil {
		c.Free = s.freeSize()
	}
	say := func(reason Reason, format string, args ...any) Consideration {
		c.Reason, c.Message = reason, fmt.Sprintf(format, args...)
		return c
	}
	wished := slices.DeleteFunc(slices.Clone(p.wishes[i]), func(addr netip.Addr) bool { return a.spaceOf(addr).pool != q })
	switch {
	case r != nil && (len(p.wishes[i]) > 0 || a.open(p, q, f) == ""):
		return say(r.Reason, "%s", r.Message)
	case len(wished) > 0:
		return say("", "pool %q gives %s", q.Name, wished)
	case len(p.wishes[i]) > 0:
		return say(AddressOutsidePools, "pool %q does not contain %s", q.Name, p.wishes[i])
	case joined.is() && joined.pool() == q && joined.lease == nil:
		return say("", "%s waits for the Service to come back", joined.addr)
	case joined.is() && joined.pool() == q:
		return say("", "%s is shared with %s", joined.lease.addr, holdersText(joined.lease.tenants))
	}
	var w wording
	a.explain(&w, p, q.Name, f)
	return say(a.obstacle(p, q, f), "%s", w.message.String())
}

// candidates is how many pools the request may draw from, if it is let in.
func (a *Allocator) candidates(p *plan) int {
	if len(p.req.Pools) > 0 {
		return len(p.req.Pools)
	}
	return len(a.auto)
}

// candidate returns pool i of the request, nil if there is none of the name.
func (a *Allocator) candidate(p *plan, i int) *pool {
	if len(p.req.Pools) > 0 {
		return a.byName[p.req.Pools[i]]
	}
	return a.auto[i]
}

// rank is the place of a pool among the candidates, negative if it is none.
func (a *Allocator) rank(p *plan, q *pool) int {
	if len(p.req.Pools) > 0 {
		return slices.Index(p.req.Pools, q.Name)
	}
	return q.rank
}

// open returns why a pool, which may not exist, gives the request nothing new
// of the family at all, empty if nothing stands against it.
func (a *Allocator) open(p *plan, q *pool, f Family) Reason {
	switch {
	case q == nil:
		return PoolNotFound
	case a.rank(p, q) < 0 && len(p.req.Pools) > 0:
		return PoolNotNamed
	case a.rank(p, q) < 0:
		return NotAutoAssigned
	case !q.Allows(p.req.Subject):
		return PoolNotAllowed
	case q.spaces[f.index()] == nil:
		return FamilyUnavailable
	case q.Draining:
		return PoolDraining
	}
	return ""
}

// obstacle returns why a pool does not give the request a free address of the
// family, empty if it does.
func (a *Allocator) obstacle(p *plan, q *pool, f Family) Reason {
	if o := a.open(p, q, f); o != "" {
		return o
	}
	switch s := q.spaces[f.index()]; {
	case a.fills(p, s, use{}):
		return QuotaExceeded
	case s.free.empty():
		return PoolExhausted
	}
	return ""
}

// fills reports whether the namespace may have no more addresses of the space,
// not even the one that is used like this.
func (a *Allocator) fills(p *plan, s *space, u use) bool {
	l := u.lease
	if s.perNamespace == nil || l != nil && (l.inhabited(p.me.namespace, p.holder) || p.holds(l) && p.wants(l)) {
		return false
	}
	used := a.used(p, s)
	if u.rest != nil && namespaceOf(u.rest.name) == p.me.namespace {
		used-- // it counts already
	}
	return used >= s.pool.NamespaceQuota
}

// used is how many addresses of the space the namespace uses up by the plan:
// what it holds now and what rests, without what the plan gives back, with what
// it takes.
func (a *Allocator) used(p *plan, s *space) int {
	now := s.perNamespace[p.me.namespace]
	used := now.held + now.resting
	if p.holder != nil {
		for _, l := range p.holder.leases {
			if l.space == s && !p.wants(l) && !l.inhabited(p.me.namespace, p.holder) {
				used--
			}
		}
	}
	for _, k := range p.picks {
		switch {
		case k.space != s, k.lease != nil && k.lease.inhabited(p.me.namespace, nil):
		case k.lease == nil && a.uses.get(k.addr).rest != nil: // it counts already
		default:
			used++
		}
	}
	return used
}

// wants reports whether the plan keeps what the Service holds.
func (p *plan) wants(l *lease) bool {
	return slices.Contains(p.wishes[0], l.addr) || slices.Contains(p.wishes[1], l.addr) ||
		slices.ContainsFunc(p.picks, func(k pick) bool { return k.kept && k.lease == l })
}

// explain says what a pool, which may not exist, does for the request.
func (a *Allocator) explain(w *wording, p *plan, name string, f Family) {
	q := a.byName[name]
	switch o := a.obstacle(p, q, f); o {
	case PoolNotFound:
		w.say("there is no pool %q", name)
	case PoolNotNamed:
		w.say("pool %q is not among the requested %s", name, quoted(p.req.Pools))
	case NotAutoAssigned:
		w.say("pool %q is only for Services that name it (autoAssign is off)", name)
	case PoolNotAllowed:
		w.say("pool %q %s", name, q.closedTo(p.req.Subject))
	case FamilyUnavailable:
		w.say("pool %q has no %s addresses", name, f)
	case PoolDraining:
		w.say("pool %q is draining: it gives no new addresses", name)
	case QuotaExceeded:
		a.sayQuota(w, p, q.spaces[f.index()])
	default:
		if o != "" && q.DHCP != nil {
			w.say("pool %q has no lease for the Service yet", name)
			return
		}
		a.sayFree(w, q.spaces[f.index()])
	}
}

// sayFree says how much of a space is free, and what became of the rest.
func (a *Allocator) sayFree(w *wording, s *space) {
	fmt.Fprintf(&w.fact, "pool %q has no %s address free", s.name(), s.family)
	w.counts = true
	defer func() { w.counts = false }()
	w.say("pool %q has %.0f of %.0f %s addresses free", s.name(), s.freeSize(), s.size, s.family)
	if s.size == 0 {
		w.fact.WriteString(", forbidden")
		w.aside("%.0f forbidden", s.forbidden)
	}
	if s.reserved > 0 {
		w.fact.WriteString(", reserved")
		w.aside("%d reserved", s.reserved)
	}
	if s.conflicted > 0 {
		w.fact.WriteString(", in use by other hosts")
		w.aside("%d in use by other hosts", s.conflicted)
	}
	if s.resting > 0 && s.free.empty() {
		w.aside("%d in quarantine, the next is", s.resting)
		w.sayFree(s.due() - a.clock.elapsed)
	}
	w.endAsides()
}
