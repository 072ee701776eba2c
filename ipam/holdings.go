package ipam

import (
	"net/netip"
	"slices"
	"time"
)

// Held is an address that an owner holds.
type Held struct {
	Addr netip.Addr
	// Pool is the pool that hands the address out. Empty: no pool does any more, the address
	// is stranded, and Why completes "ADDR is ...": "in no pool".
	Pool, Why string
	// Draining is set if the pool gives no new addresses: the Service should
	// move when it can.
	Draining bool
	// Asked is Holding.Asked, which restores the same holding after a restart.
	Asked string
}

// Holding is an address that an owner has had since some time.
type Holding struct {
	Owner   Owner
	Addr    netip.Addr
	Sharing *Sharing
	Since   time.Time
	// Asked is the pool by whose name the owner got or kept the address:
	// requests that name this pool keep the address, whatever became of the
	// pool. Empty: not known, which is the pool that hands the address out.
	Asked string
}

// holdings records who holds which addresses.
type holdings struct {
	at map[netip.Addr]*holding
	// byUID has the holders.
	byUID  map[string]*holder
	groups groups
}

// holder is an owner that holds at least one address.
type holder struct {
	identity
	holdings []*holding
	room     [2]*holding
}

// holding is an address that is held.
type holding struct {
	addr  netip.Addr
	space *space
	// tenants hold the address, in the order in which they came.
	tenants []tenant
	room    [1]tenant
	users   users
}

// tenant is a holder of an address, alone or with others.
type tenant struct {
	*holder
	terms *Sharing
	// asked is the pool that gave the address or, since then, the pool by whose name a request
	// kept it. A request that names this pool keeps the address, whatever became of the pool.
	// Empty: the address was restored from outside every pool, and there was no request yet.
	asked string
	since time.Time
}

// anyPool is asked when the first request for such an address named no pool.
const anyPool = "*"

// newHolder begins a holder, who holds nothing yet.
func (hs *holdings) newHolder(id identity) *holder {
	h := &holder{identity: id}
	h.holdings = h.room[:0]
	hs.byUID[id.owner.UID] = h
	return h
}

// forget ends a holder that holds nothing any more.
func (hs *holdings) forget(h *holder) { delete(hs.byUID, h.owner.UID) }

// drop takes an address that a holder has left from what it holds.
func (hs *holdings) drop(h *holder, g *holding) {
	if h.holdings = slices.DeleteFunc(h.holdings, func(other *holding) bool { return other == g }); len(h.holdings) == 0 {
		hs.forget(h)
	}
}

// begin makes a holding of an address that has none. It has no tenants yet.
func (hs *holdings) begin(addr netip.Addr, s *space) *holding {
	g := &holding{addr: addr, space: s}
	g.tenants = g.room[:0]
	hs.at[addr] = g
	s.assigned++
	return g
}

// end ends a holding that has no tenants any more.
func (hs *holdings) end(g *holding) {
	g.space.assigned--
	delete(hs.at, g.addr)
}

// enter adds a tenant to an address. The caller adds the address to the holdings of the
// holder.
func (hs *holdings) enter(g *holding, t tenant) {
	g.count(t.namespace, +1)
	hs.groups.add(g, t.terms, t.namespace)
	g.tenants = append(g.tenants, t)
	g.users.add(t.holder, t.terms)
}

// leave takes an address from one of its holders. The caller removes it from what that one holds.
func (hs *holdings) leave(g *holding, h *holder) {
	i := slices.IndexFunc(g.tenants, func(t tenant) bool { return t.holder == h })
	terms := g.tenants[i].terms
	g.tenants = slices.Delete(g.tenants, i, i+1)
	g.users.remove(h, terms)
	g.count(h.namespace, -1)
	hs.groups.remove(g, terms, h.namespace)
}

// setTerms changes the terms of a tenant.
func (hs *holdings) setTerms(g *holding, h *holder, terms *Sharing) {
	t := g.tenant(h)
	before := t.terms
	t.terms = terms
	if before != terms {
		g.users.remove(h, before)
		g.users.add(h, terms)
		hs.groups.add(g, terms, h.namespace)
		hs.groups.remove(g, before, h.namespace)
	}
}

// rehome finds the present space of every address whose space is gone, and of
// stranded ones, and counts what namespaces hold.
func (hs *holdings) rehome(ps *pools) {
	for _, g := range hs.at {
		if g.space.pool == nil {
			g.moveTo(ps.spaceOf(g.addr))
		}
		g.countAll()
	}
}

// of returns what a holder holds.
func (hs *holdings) of(h *holder, ps *pools) []Held {
	held := make([]Held, len(h.holdings))
	for i, g := range h.holdings {
		held[i].Addr, held[i].Asked = g.addr, g.tenant(h).asked
		if p := g.space.pool; p != nil {
			held[i].Pool, held[i].Draining = p.Name, p.Draining
		} else {
			held[i].Why = ps.whyStranded(g.addr)
		}
	}
	return held
}

// moveTo puts an address that is held into another space.
func (g *holding) moveTo(s *space) {
	g.space.assigned--
	g.space = s
	s.assigned++
	s.take(g.addr)
	for i := range g.tenants {
		if t := &g.tenants[i]; t.asked == "" {
			t.asked = s.name()
		}
	}
}

// count changes by how much the namespace uses its quota. It is called while the tenant that
// comes or goes is not among the tenants. An address counts once for a namespace, so that
// nothing changes if another tenant is of the same namespace.
func (g *holding) count(namespace string, change int) {
	if g.space.usages != nil && !g.inhabited(namespace, nil) {
		g.space.usages.add(namespace, usage{held: change})
	}
}

// countAll adds the address to the usage of every namespace that has a tenant here.
func (g *holding) countAll() {
	if g.space.usages == nil {
		return
	}
	var room [4]string
	counted := room[:0] // few namespaces share an address, be there many tenants
	for i := range g.tenants {
		if namespace := g.tenants[i].namespace; !slices.Contains(counted, namespace) {
			counted = append(counted, namespace)
			g.space.usages.add(namespace, usage{held: +1})
		}
	}
}

// tenant returns the holder's tenancy, nil if it has none.
func (g *holding) tenant(h *holder) *tenant {
	for i := range g.tenants {
		if g.tenants[i].holder == h {
			return &g.tenants[i]
		}
	}
	return nil
}

// inhabited reports whether a tenant is of the namespace. The holder except does not count.
func (g *holding) inhabited(namespace string, except *holder) bool {
	for i := range g.tenants {
		if t := &g.tenants[i]; t.holder != except && t.namespace == namespace {
			return true
		}
	}
	return false
}

// clash returns the first tenant whose terms clash with those of the party. If the address has
// MaxSharers tenants already, that is the first of them.
func (g *holding) clash(p party) (*tenant, clash) {
	users, in := g.users.of(p), false
	for i := range g.tenants {
		t := &g.tenants[i]
		if p.sameService(t.party()) {
			in = true
			continue
		}
		if c := p.clash(t.party()); c.is() {
			return t, c
		}
		if slices.Contains(users, t.holder) {
			return t, clash{overPort, p.terms.commonPort(t.terms)}
		}
	}
	if !in && len(g.tenants) >= MaxSharers {
		return &g.tenants[0], clash{over: overNumber}
	}
	return nil, clash{}
}

// knows reports whether the address has a tenant of another Service with the party's key that
// would share with the party's namespace.
func (g *holding) knows(p party) bool {
	for i := range g.tenants {
		if t := g.tenants[i].party(); !p.sameService(t) && p.sameKey(t) && p.meets(t) {
			return true
		}
	}
	return false
}

func (t *tenant) party() party { return party{&t.identity, t.terms} }

// fits reports whether a request for these pools lets the tenant keep the
// address.
func (t *tenant) fits(s *space, pools []string) bool {
	return len(pools) == 0 || t.asked == "" ||
		slices.Contains(pools, t.asked) || slices.Contains(pools, s.name())
}

// keep notes by which pool name a request has kept the address.
func (t *tenant) keep(s *space, pools []string) {
	switch name := s.name(); {
	case slices.Contains(pools, name):
		t.asked = name
	case t.asked == "" && len(pools) > 0:
		t.asked = pools[0]
	case t.asked == "":
		t.asked = anyPool
	}
}

// users are the tenants of an address by their ports. Those who clash are looked up in it, since
// many Services with many ports may wait for an address that as many share. A port has one user,
// or several that are one Service to people.
type users map[Port][]*holder

// of returns who uses a port of the party, other Services than its own.
func (us users) of(p party) (others []*holder) {
	for _, port := range p.terms.ports() {
		for _, h := range us[port] {
			if !p.sameService(party{identity: &h.identity}) {
				others = append(others, h)
			}
		}
	}
	return others
}

// add notes that a tenant comes to the address with these terms.
func (us *users) add(h *holder, terms *Sharing) {
	if *us == nil && terms != nil {
		*us = users{}
	}
	for _, port := range terms.ports() {
		(*us)[port] = append((*us)[port], h)
	}
}

// remove undoes add.
func (us users) remove(h *holder, terms *Sharing) {
	for _, port := range terms.ports() {
		left := slices.DeleteFunc(us[port], func(other *holder) bool { return other == h })
		if us[port] = left; len(left) == 0 {
			delete(us, port)
		}
	}
}

// groups finds the addresses that are held under a sharing key.
type groups map[group][]*holding

// group identifies the Services that may share with each other without naming namespaces.
type group struct{ key, namespace string }

// add notes that a tenant with these terms comes to the address.
func (gs groups) add(g *holding, terms *Sharing, namespace string) {
	if terms == nil {
		return
	}
	key := group{terms.Key, namespace}
	if holdings := gs[key]; !slices.Contains(holdings, g) {
		gs[key] = append(holdings, g)
	}
}

// remove notes that a tenant with these terms has gone from the address.
func (gs groups) remove(g *holding, terms *Sharing, namespace string) {
	if terms == nil {
		return
	}
	key := group{terms.Key, namespace}
	for i := range g.tenants {
		if t := &g.tenants[i]; t.terms != nil && (group{t.terms.Key, t.namespace}) == key {
			return
		}
	}
	left := slices.DeleteFunc(gs[key], func(other *holding) bool { return other == g })
	if len(left) > 0 {
		gs[key] = left
	} else {
		delete(gs, key)
	}
}
