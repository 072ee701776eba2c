package ipam

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
)

// Sharing are the terms on which a Service shares its addresses. Those who
// hold one address all have the same key, which is not empty, no port in
// common, the same backends, and, if they are of different namespaces, each
// name the other's.
//
// A Service that draws an address joins the one that is held under its key,
// and is refused when it does not fit in there: the same key means the same
// address. Only addresses of pools that it could draw from count, and only
// holders who would share with its namespace.
type Sharing struct {
	// Key is what those who share an address have in common. Empty: the
	// Service shares with nobody.
	Key string
	// Ports are what the Service uses of the address.
	Ports []Port
	// Backends is, under externalTrafficPolicy Local, the Service's selector
	// in a canonical form: a node that has backends of one Service gets the
	// traffic of all. Under Cluster it is empty.
	Backends string
	// Namespaces are the other namespaces with whose Services it shares.
	Namespaces []string
}

// Port is a port of one protocol.
type Port struct {
	Protocol string // as in Kubernetes: TCP, UDP or SCTP
	Number   uint16
}

// String returns the port as in "TCP/80".
func (p Port) String() string { return fmt.Sprintf("%s/%d", p.Protocol, p.Number) }

func (p Port) compare(q Port) int {
	return cmp.Or(cmp.Compare(p.Number, q.Number), cmp.Compare(p.Protocol, q.Protocol))
}

// terms returns a copy of its own with sorted ports, nil for somebody who
// does not share.
func (s *Sharing) terms() *Sharing {
	if s == nil || s.Key == "" {
		return nil
	}
	t := &Sharing{Key: s.Key, Ports: slices.Clone(s.Ports), Backends: s.Backends, Namespaces: slices.Clone(s.Namespaces)}
	slices.SortFunc(t.Ports, Port.compare)
	slices.Sort(t.Namespaces)
	t.Namespaces = slices.Compact(t.Namespaces)
	return t
}

// commonPort returns a port that both use.
func (s *Sharing) commonPort(t *Sharing) (Port, bool) {
	for i, j := 0, 0; i < len(s.Ports) && j < len(t.Ports); {
		switch c := s.Ports[i].compare(t.Ports[j]); {
		case c < 0:
			i++
		case c > 0:
			j++
		default:
			return s.Ports[i], true
		}
	}
	return Port{}, false
}

// party is who wants an address or holds it, and on which terms.
type party struct {
	*identity
	terms *Sharing
}

func (t *tenant) party() party { return party{&t.identity, t.terms} }

// sameService reports whether both are one Service to people.
func (p party) sameService(q party) bool {
	return p.owner.UID == q.owner.UID || p.owner.Name != "" && p.owner.Name == q.owner.Name
}

func (p party) sameKey(q party) bool {
	return p.terms != nil && q.terms != nil && p.terms.Key == q.terms.Key
}

// meets reports whether the namespaces of both let them share.
func (p party) meets(q party) bool {
	return p.namespace == q.namespace ||
		slices.Contains(p.terms.Namespaces, q.namespace) && slices.Contains(q.terms.Namespaces, p.namespace)
}

// clash is why two parties cannot share an address; the zero clash: they can.
type clash struct {
	over clashOver
	port Port // the common port
}

type clashOver uint8

const (
	noClash clashOver = iota
	overKey
	overNamespaces
	overBackends
	overPort
)

func (c clash) is() bool { return c.over != noClash }

func (p party) clash(q party) clash {
	switch {
	case p.sameService(q):
		return clash{}
	case !p.sameKey(q):
		return clash{over: overKey}
	case !p.meets(q):
		return clash{over: overNamespaces}
	case p.terms.Backends != q.terms.Backends:
		return clash{over: overBackends}
	}
	if common, ok := p.terms.commonPort(q.terms); ok {
		return clash{overPort, common}
	}
	return clash{}
}

// clash returns the first tenant with whom somebody clashes.
func (l *lease) clash(p party) (*tenant, clash) {
	for i := range l.tenants {
		if c := p.clash(l.tenants[i].party()); c.is() {
			return &l.tenants[i], c
		}
	}
	return nil, clash{}
}

// group is who may share with each other without naming namespaces.
type group struct{ key, namespace string }

// enlist notes that a tenant with these terms comes to the lease.
func (a *Allocator) enlist(l *lease, terms *Sharing, namespace string) {
	if terms == nil {
		return
	}
	g := group{terms.Key, namespace}
	if leases := a.groups[g]; !slices.Contains(leases, l) {
		a.groups[g] = append(leases, l)
	}
}

// delist notes that a tenant with these terms has gone from the lease.
func (a *Allocator) delist(l *lease, terms *Sharing, namespace string) {
	if terms == nil {
		return
	}
	g := group{terms.Key, namespace}
	for i := range l.tenants {
		if t := &l.tenants[i]; t.terms != nil && (group{t.terms.Key, t.namespace}) == g {
			return
		}
	}
	left := slices.DeleteFunc(a.groups[g], func(m *lease) bool { return m == l })
	if len(left) > 0 {
		a.groups[g] = left
	} else {
		delete(a.groups, g)
	}
}

// setTerms changes the terms of one who holds the lease.
func (a *Allocator) setTerms(l *lease, h *holder, terms *Sharing) {
	t := l.tenant(h)
	before := t.terms
	t.terms = terms
	if before != terms {
		a.enlist(l, terms, h.namespace)
		a.delist(l, before, h.namespace)
	}
}

// join returns the address of the family that the request has to share: the
// first, in the order of pools and then by address, that is held under its
// key and on which it clashes with nobody. It is refused when there are only
// others.
func (a *Allocator) join(p *plan, f Family) (*lease, *Refusal) {
	if p.me.terms == nil {
		return nil, nil
	}
	var joined, missed *lease
	consider := func(l *lease) {
		switch {
		case familyOf(l.addr) != f || !p.me.knows(l) || a.open(p, l.space.pool, f) != "" || a.fills(p, l.space, use{lease: l}):
		case a.sharable(p, l):
			joined = a.first(p, joined, l)
		default:
			missed = a.first(p, missed, l)
		}
	}
	for _, l := range a.groups[group{p.me.terms.Key, p.me.namespace}] {
		consider(l)
	}
	for _, n := range p.me.terms.Namespaces {
		for _, l := range a.groups[group{p.me.terms.Key, n}] {
			consider(l)
		}
	}
	if joined == nil && missed != nil {
		return nil, a.refuseShare(p, missed)
	}
	return joined, nil
}

// knows reports whether somebody else who would share with the party's
// namespace holds the lease under its key.
func (p party) knows(l *lease) bool {
	for i := range l.tenants {
		if t := l.tenants[i].party(); !p.sameService(t) && p.sameKey(t) && p.meets(t) {
			return true
		}
	}
	return false
}

// sharable reports whether the request may come to a lease that is held.
func (a *Allocator) sharable(p *plan, l *lease) bool {
	_, c := l.clash(p.me)
	return !c.is() && !a.reservedForOther(p, l.addr)
}

// refuseShare says why it may not.
func (a *Allocator) refuseShare(p *plan, l *lease) *Refusal {
	if a.reservedForOther(p, l.addr) {
		return a.refuseReserved(l.addr)
	}
	other, c := l.clash(p.me)
	return refuseClash(p.me, other, c, l)
}

// first returns the lease, or the other, which may be nil, that comes first:
// by the order in which the request asks the pools, then by address.
func (a *Allocator) first(p *plan, l, m *lease) *lease {
	if l == nil || cmp.Or(
		cmp.Compare(a.rank(p, m.space.pool), a.rank(p, l.space.pool)),
		m.addr.Compare(l.addr)) < 0 {
		return m
	}
	return l
}

// refuseClash says why the party cannot come to an address that is held.
func refuseClash(p party, other *tenant, c clash, l *lease) *Refusal {
	pool, name := l.space.name(), other.owner.Name
	switch c.over {
	case overNamespaces:
		return refuse(SharingConflict, pool, "%s, held by %s, cannot be shared between namespaces %q and %q: each Service has to name the other's namespace",
			l.addr, name, other.namespace, p.namespace)
	case overBackends:
		return refuse(SharingConflict, pool, "%s is held by %s, which has %s, this Service %s: let both have externalTrafficPolicy Cluster, or the same selector, or use another sharing key",
			l.addr, name, backendsOf(other.terms), backendsOf(p.terms))
	case overPort:
		return refuse(SharingConflict, pool, "port %s of %s is used by %s: use another port or another sharing key", c.port, l.addr, name)
	}
	return refuse(AddressInUse, pool, "%s is held by %s", l.addr, holdersText(l.tenants))
}

func backendsOf(s *Sharing) string {
	if s.Backends == "" {
		return "externalTrafficPolicy Cluster"
	}
	return fmt.Sprintf("externalTrafficPolicy Local with selector %.80q", s.Backends)
}

// holdersText names who holds an address, and since when.
func holdersText(tenants []tenant) string {
	var said []string
	for i := range tenants[:min(len(tenants), listed)] {
		t := &tenants[i]
		text := t.owner.Name
		if !t.since.IsZero() {
			text += " since " + stamp(t.since)
		}
		said = append(said, text)
	}
	return strings.Join(said, ", ") + more(len(tenants))
}
