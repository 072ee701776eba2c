package ipam

import (
	"fmt"
	"net/netip"
	"strconv"
	"strings"

	"github.com/lodestone-lb/lodestone/pkg/config"
)

// refuseAll refuses a request that gets no family. The reason is that of the family which came
// closest to an address.
func (p *proposal) refuseAll() *Refusal {
	var nearest *Refusal
	for i := range p.Families {
		r := p.refuseDraw(i)
		if nearest == nil || hope(r.Reason) > hope(nearest.Reason) {
			nearest = r
		}
	}
	return nearest
}

// refuseDraw returns why no pool gives an address of family i. It lists the obstacle at each pool
// that the Service may draw from.
func (p *proposal) refuseDraw(i int) *Refusal {
	if p.refused[i] != nil {
		return p.refused[i]
	}
	f, named := p.Families[i], len(p.Pools) > 0
	reason, considered, about := NoPool, 0, ""
	var w wording
	if n := p.wanted(i); n > 1 {
		w.add("%d %s addresses are requested: ", n, f)
	}
	for i := range p.candidates() {
		q := p.candidate(i)
		o := p.obstacle(q, f)
		if !named && o == PoolNotAllowed {
			continue
		}
		if hope(o) > hope(reason) {
			reason = o
		}
		if considered++; considered > listed {
			continue
		}
		if considered > 1 {
			w.add("; ")
		}
		if named {
			about = p.Pools[i]
		} else {
			about = q.Name
		}
		p.explain(&w, about, f)
	}
	switch {
	case considered == 0:
		return p.refuseNoPool()
	case considered > listed:
		w.add("; and %d more", considered-listed)
	}
	if considered > 1 {
		about = ""
	}
	return w.refuse(reason, about)
}

// refuseNoPool is for a Service that names no pool where none is open to all.
func (req *request) refuseNoPool() *Refusal {
	if len(req.pools.all) == 0 {
		return refuse(NoPool, "", "there are no pools")
	}
	off := len(req.pools.all) - len(req.pools.auto)
	return refuse(NoPool, "", "none of %d pools is open to the Service in namespace %q: %d with autoAssign off, %d for other namespaces "+
		"or labels",
		len(req.pools.all), req.Subject.Namespace, off, len(req.pools.auto))
}

// explain writes what a pool, which may not exist, does for the request.
func (p *proposal) explain(w *wording, name string, f Family) {
	q := p.pools.byName[name]
	switch o := p.obstacle(q, f); o {
	case PoolNotFound:
		w.add("there is no pool %q", name)
	case PoolNotNamed:
		w.add("pool %q is not among the requested %s", name, quoted(p.Pools))
	case NotAutoAssigned:
		w.add("pool %q is only for Services that name it (autoAssign is off)", name)
	case PoolNotAllowed:
		w.add("pool %q %s", name, q.closedTo(p.Subject))
	case FamilyUnavailable:
		w.add("pool %q has no %s addresses", name, f)
	case PoolDraining:
		w.add("pool %q is draining: it gives no new addresses", name)
	case QuotaExceeded:
		p.describeQuota(w, q.spaces[f.index()])
	default:
		if o != "" && q.DHCP != nil && p.Count > 1 {
			w.add("pool %q leases one address for a Service", name)
			return
		}
		if o != "" && q.DHCP != nil {
			w.add("pool %q has no lease for the Service yet", name)
			return
		}
		p.describeFree(w, q.spaces[f.index()])
	}
}

// describeFree writes how much of a space is free, and what became of the others.
func (a *addresses) describeFree(w *wording, s *space) {
	fmt.Fprintf(&w.fact, "pool %q has no %s address free", s.name(), s.family)
	w.counts = true
	defer func() { w.counts = false }()
	w.add("pool %q has %.0f of %.0f %s addresses free", s.name(), s.freeSize(), s.size, s.family)
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
	if n := len(s.quarantined); n > 0 && s.free.empty() {
		w.aside("%d in quarantine, the next is", n)
		w.describeFree(s.quarantined[0].until() - a.quarantine.clock.elapsed)
	}
	w.endAsides()
}

// refuseReserved refuses an address that is reserved for another Service.
func (req *request) refuseReserved(addr netip.Addr) *Refusal {
	return refuse(AddressReserved, req.pools.spaceOf(addr).name(), "%s is reserved for %s", addr, req.reservations.apart[addr].service)
}

// refuseQuarantined refuses an address that is in quarantine for another Service.
func (req *request) refuseQuarantined(r *quarantined) *Refusal {
	var w wording
	w.add("%s is in quarantine after its use by %s, it is", r.addr, r.name)
	w.describeFree(r.until() - req.quarantine.clock.elapsed)
	return w.refuse(AddressQuarantined, r.space.name())
}

// refuseClash returns why the party cannot come to an address that is held.
func refuseClash(p party, other *tenant, c clash, g *holding) *Refusal {
	pool, name := g.space.name(), other.owner.Name
	switch c.over {
	case overNamespaces:
		return refuse(SharingConflict, pool, "%s, held by %s, cannot be shared between namespaces %q and %q: each Service has to name the "+
			"other's namespace",
			g.addr, name, other.namespace, p.namespace)
	case overBackends:
		return refuse(SharingConflict, pool, "%s is held by %s, which has %s, this Service %s: let both have externalTrafficPolicy Cluster, "+
			"or the same selector, or use another sharing key",
			g.addr, name, backendsOf(other.terms), backendsOf(p.terms))
	case overPort:
		return refuse(SharingConflict, pool, "port %s of %s is used by %s: use another port or another sharing key", c.port, g.addr, name)
	case overNumber:
		return refuse(SharingConflict, pool, "%s is shared by %d Services, and more cannot: use another sharing key", g.addr, len(g.tenants))
	}
	return refuse(AddressInUse, pool, "%s is held by %s", g.addr, holdersText(g.tenants))
}

func backendsOf(s *Sharing) string {
	if s.Backends == "" {
		return "externalTrafficPolicy Cluster"
	}
	return fmt.Sprintf("externalTrafficPolicy Local with selector %.80q", s.Backends)
}

// holdersText names who holds an address. It does not have since when: a Service's object does not show that of each
// address, so that a controller that starts would write another time on all who wait.
func holdersText(tenants []tenant) string {
	var names []string
	for i := range tenants[:min(len(tenants), listed)] {
		names = append(names, tenants[i].owner.Name)
	}
	return strings.Join(names, ", ") + more(len(tenants))
}

// closedTo completes "pool NAME ..." with the rule by which it is closed to a Service.
func (p *pool) closedTo(s config.Subject) string {
	anyService := config.Pool{Namespaces: p.Namespaces, NamespaceSelector: p.NamespaceSelector}
	if anyService.Allows(s) {
		return "is only open to Services with the labels " + strconv.Quote(p.ServiceSelector.String())
	}
	var to []string
	if len(p.Namespaces) > 0 {
		to = append(to, "only to "+quoted(p.Namespaces))
	}
	if p.NamespaceSelector != nil {
		to = append(to, "only to namespaces with the labels "+strconv.Quote(p.NamespaceSelector.String()))
	}
	return fmt.Sprintf("is not open to namespace %q, %s", s.Namespace, strings.Join(to, " and "))
}

// requesters names the namespaces that may ask for particular addresses.
func requesters(namespaces []string) string {
	if len(namespaces) == 0 {
		return "nobody"
	}
	return "only " + quoted(namespaces)
}
