// Package ipam decides which addresses a Service gets. It is pure: no
// Kubernetes, no clock, no I/O. The caller passes the time in and serializes
// the calls; the same history of calls gives the same answers.
//
// The rules, in one place:
//
//   - A pool gives its lowest free address. Pools come in the order of the
//     request; without one, by Priority, then in the order of the document.
//     Pools that are closed to the Service, that drain, that have nothing
//     free or whose quota the namespace has used up are passed over.
//   - Two families come out of one pool when one pool can give both: out of
//     the pool of the family that is already settled, else out of the first
//     with both. Only then are they split over pools.
//   - An address that is released rests, for the quarantine time or for the
//     KeepFor of its pool, whichever is longer, and is then free like any
//     other. While it rests only a Service of the same namespace and name can
//     have it, and such a Service gets it before any other address that it
//     could draw. It counts for the quota of the namespace until its rest is
//     over.
//   - A reserved address goes to the Service that it is reserved for, and to
//     that one before any other address. A forbidden one goes to nobody. A
//     conflicted one, which another host was found to have, goes only to who
//     asks for exactly this one or has it reserved.
//   - The addresses of a pool with DHCP are those that the caller has leased.
//     They do not rest, and the caller reserves each for the Service that it
//     was leased for.
//   - Services with the same sharing key share an address, on the terms that
//     Sharing explains.
//   - What a Service holds does not move because the configuration was
//     edited. It moves when the Service asks for another address, pool or
//     family, to avoid one or to be renumbered, and when its own change of
//     terms makes it clash with those that it shares an address with.
//   - Every failure is a *Refusal, and what the Service held before stays
//     with it, with one exception: it leaves an address on which it would
//     clash with others by its new terms, whether or not it gets another.
//     Its ports are what they are: if it stayed, it would take the traffic of
//     its neighbours, who have changed nothing.
//
// IPv4 addresses written as IPv6 (::ffff:192.0.2.1) are taken as IPv4.
package ipam

import (
	"cmp"
	"hash/maphash"
	"net/netip"
	"slices"
	"strings"
	"time"

	"go4.org/netipx"

	"github.com/lodestone-lb/lodestone/pkg/config"
)

// MaxAddresses is how many exact addresses one request may name.
const MaxAddresses = config.MaxServiceAddresses

// Family is an IP address family.
type Family string

// The address families, spelled as in Kubernetes' spec.ipFamilies.
const (
	IPv4 Family = "IPv4"
	IPv6 Family = "IPv6"
)

// families lists the families in the order of their index.
var families = [...]Family{IPv4, IPv6}

// index is the family's place in families, -1 for one that does not exist.
func (f Family) index() int {
	switch f {
	case IPv4:
		return 0
	case IPv6:
		return 1
	}
	return -1
}

// familyOf is the family of a valid address that is not 4in6.
func familyOf(a netip.Addr) Family {
	if a.Is4() {
		return IPv4
	}
	return IPv6
}

// Owner is who holds addresses: one incarnation of a Service.
type Owner struct {
	// UID identifies the owner. A re-created Service is another owner.
	UID string
	// Name is "namespace/name" and never changes for a UID. Owners of one
	// name never stand in each other's way on an address: they are the same
	// Service to people, before and after a change.
	Name string
}

// Request is what a Service asks for.
type Request struct {
	Owner Owner
	// Subject is what pools may make their being open depend on. Its
	// namespace is that of the owner's name.
	Subject config.Subject
	// Families are the families wanted, primary first; one or two.
	Families []Family
	// RequireAll refuses the request when not every family can be had
	// (SingleStack, RequireDualStack). Otherwise (PreferDualStack) one family
	// is enough, the primary one if there is a choice, and the other is added
	// by a later call when it can be had.
	RequireAll bool
	// Pools are the only pools to draw from, in order of preference. Names
	// that do not exist are passed over as long as another pool can give the
	// address. Empty: every pool with AutoAssign, by priority.
	Pools []string
	// Addresses are the exact addresses wanted, at most MaxAddresses: these
	// or a refusal, also when RequireAll is not set. To name an address is to
	// name its pool: AutoAssign does not matter. A family without an address
	// is filled from Pools.
	Addresses []netip.Addr
	// Sharing are the terms on which the Service shares its addresses. Nil:
	// each is for this Service alone.
	Sharing *Sharing
	// Renumber gives up what a new Service in its place would not be given:
	// addresses that are stranded, reserved for another Service, or of a pool
	// that drains, is closed to it or is not among those to draw from; any
	// address when others are reserved for it; and one that it has for itself
	// while others share one under its key. If there is no replacement, the
	// request is refused and everything stays.
	Renumber bool
	// Avoid are addresses that the Service is to leave for others, unless it
	// names them, has them reserved or shares them. If there is no other, the
	// request is refused and everything stays.
	Avoid []netip.Addr
}

// Held is an address that an owner holds.
type Held struct {
	Addr netip.Addr
	// Pool is the pool that hands the address out. Empty: stranded, no pool
	// does any more, and Why completes "ADDR is ...": "in no pool".
	Pool, Why string
	// Draining says that the pool gives no new addresses: the Service should
	// move when it can.
	Draining bool
	// Asked is what Restore has to be given for the holding to be the same
	// after a restart.
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

// Forbidden are addresses that no pool may hand out, whatever it contains.
type Forbidden struct {
	Range netipx.IPRange
	// Why completes "ADDR is ...": "the address of node n1". Where ranges
	// overlap, the narrowest says why.
	Why string
}

// Setup is all that an operator and the cluster lay down for addresses.
type Setup struct {
	// Pools must not overlap.
	Pools []config.Pool
	// Quarantine is how long a released address rests at least.
	Quarantine time.Duration
	// Reservations keep addresses for Services, in or out of pools. Of two
	// for one address the first counts.
	Reservations []config.Reservation
	// Forbidden may be in any order and overlap anything. Ranges that are
	// not valid forbid nothing.
	Forbidden []Forbidden
	// Conflicted are addresses that other hosts were found to have, in or out
	// of pools. Nobody draws them.
	Conflicted []netip.Addr
}

// Allocator gives addresses out of pools. See New. It is not safe for
// concurrent use.
type Allocator struct {
	poolSet
	// uses has every address that is held or rests.
	uses    useIndex
	holders holderIndex
	// groups and namesakes find what a request without addresses may go to:
	// what is held under its key, and what rests under its name, by the name's
	// hash.
	groups    map[group][]*lease
	namesakes table[rest]
	// seed is that of all hashes. It is random, but no answer depends on it.
	seed maphash.Seed

	clock      clock
	quarantine time.Duration
	due        dueSpaces

	spare spare
	// plan is the one being made. It is here to be reused.
	plan plan
}

// New returns an allocator without pools. Until the first call of Configure
// what rests does not become free.
func New() *Allocator {
	a := &Allocator{
		uses:       useIndex{},
		holders:    holderIndex{others: map[string]*holder{}},
		groups:     map[group][]*lease{},
		seed:       maphash.MakeSeed(),
		quarantine: forever,
	}
	a.nowhere = space{rest: forever, place: notDue}
	return a
}

// Restore records that an owner holds an address, without asking any pool: the
// state of a cluster is true before it is valid. The address may be
// stranded, withheld, forbidden, reserved or resting. When it clashes with
// others who hold the address, or the owner's UID is known by another name,
// Restore changes nothing and returns the first of those and false. An address
// that is not valid is held by nobody: the zero owner and false. Zones are
// dropped.
func (a *Allocator) Restore(g Holding) (holder Owner, ok bool) {
	owner, addr := g.Owner, canonical(g.Addr)
	if !addr.IsValid() {
		return Owner{}, false
	}
	id, terms := a.identify(owner), g.Sharing.terms()
	h := a.holders.of(owner.UID, id.uidHash)
	if h != nil && h.owner != owner {
		return h.owner, false
	}
	l := a.uses.get(addr).lease
	if l != nil {
		if other, c := l.clash(party{&id, terms}); c.is() {
			return other.owner, false
		}
	}
	if h == nil {
		h = a.newHolder(id)
	}
	if l != nil && l.tenant(h) != nil {
		a.setTerms(l, h, terms)
		return owner, true
	}
	if l == nil {
		l = a.newLease(addr, a.spaceOf(addr))
	}
	a.enter(l, tenant{holder: h, terms: terms, asked: cmp.Or(g.Asked, l.space.name()), since: g.Since})
	h.leases = append(h.leases, l)
	return owner, true
}

// Claim gives the owner of the request addresses that it had before, in addition
// to what it holds: all of them, if a request for exactly these would be given
// them now, else none. The refusal is nil, or what such a request would be told.
// Families that have no address among them do not matter, and nothing is drawn.
func (a *Allocator) Claim(req Request, addrs []netip.Addr, since, now time.Time) *Refusal {
	req.Addresses, req.Renumber, req.Avoid = addrs, false, nil
	p, r := a.read(req, now)
	if r != nil {
		return r
	}
	if p.holder != nil {
		for _, l := range p.holder.leases {
			p.picks = append(p.picks, pick{lease: l, kept: true})
		}
	}
	kept := len(p.picks)
	for i := range req.Families {
		for _, addr := range p.wishes[i] {
			k, r := a.claim(p, addr)
			if r != nil {
				return r
			}
			if !k.kept {
				p.picks = append(p.picks, k)
			}
		}
	}
	if p.now = since; len(p.picks) > kept {
		h := p.holder
		if h == nil {
			h = a.newHolder(p.self)
		}
		for _, k := range p.picks[kept:] {
			h.leases = append(h.leases, a.grant(p, k, h))
		}
	}
	return nil
}

// Abide makes an owner, whose request cannot be read, live with its present
// terms: it keeps all that it holds but addresses on which it clashes with
// others.
func (a *Allocator) Abide(owner Owner, sharing *Sharing, now time.Time) {
	a.tick(now)
	p := &a.plan
	*p = plan{self: a.identify(owner)}
	p.me = party{&p.self, sharing.terms()}
	p.holder = a.holders.of(owner.UID, p.self.uidHash)
	a.abide(p)
}

// Release takes from the owner everything that it holds and returns it.
// Addresses that nobody else shares rest from now on.
func (a *Allocator) Release(uid string, now time.Time) []netip.Addr {
	a.tick(now)
	h := a.holder(uid)
	if h == nil {
		return nil
	}
	freed := make([]netip.Addr, len(h.leases))
	for i, l := range h.leases {
		freed[i] = l.addr
		a.leave(l, h)
	}
	a.forget(h)
	return freed
}

// Revoke takes an address from all who hold it: it was leased, and the lease is
// over. It does not rest.
func (a *Allocator) Revoke(addr netip.Addr, now time.Time) {
	a.tick(now)
	addr = canonical(addr)
	l := a.uses.get(addr).lease
	if l == nil {
		return
	}
	for len(l.tenants) > 0 {
		h := l.tenants[0].holder
		a.leave(l, h)
		if h.leases = slices.DeleteFunc(h.leases, func(m *lease) bool { return m == l }); len(h.leases) == 0 {
			a.forget(h)
		}
	}
	if r := a.uses.get(addr).rest; r != nil {
		a.wake(r)
	}
}

// Holds returns what the owner holds, in the order of the families of its
// last request and, in a family, of the addresses that it asked for (or of
// Restore).
func (a *Allocator) Holds(uid string) []Held {
	h := a.holder(uid)
	if h == nil {
		return nil
	}
	return a.held(h)
}

// HeldSince returns since when the owner holds the address; the zero time: it
// does not.
func (a *Allocator) HeldSince(uid string, addr netip.Addr) time.Time {
	h, l := a.holder(uid), a.uses.get(canonical(addr)).lease
	if h != nil && l != nil {
		if t := l.tenant(h); t != nil {
			return t.since
		}
	}
	return time.Time{}
}

// Expects reports whether there are addresses for Services of this name only:
// reserved or resting ones.
func (a *Allocator) Expects(name string) bool {
	return len(a.reserved[name]) > 0 || a.namesakes.get(a.hash(name)) != nil
}

// HoldersOf returns who holds the address, in the order in which they came to
// it. Nobody holds a resting address.
func (a *Allocator) HoldersOf(addr netip.Addr) []Owner {
	l := a.uses.get(canonical(addr)).lease
	if l == nil {
		return nil
	}
	var owners []Owner
	for i := range l.tenants {
		owners = append(owners, l.tenants[i].owner)
	}
	return owners
}

func (a *Allocator) held(h *holder) []Held {
	held := make([]Held, len(h.leases))
	for i, l := range h.leases {
		held[i].Addr, held[i].Asked = l.addr, l.tenant(h).asked
		if p := l.space.pool; p != nil {
			held[i].Pool, held[i].Draining = p.Name, p.Draining
		} else {
			held[i].Why = a.whyStranded(l.addr)
		}
	}
	return held
}

func canonical(a netip.Addr) netip.Addr { return a.Unmap().WithZone("") }

// namespaceOf is the namespace in "namespace/name".
func namespaceOf(name string) string {
	namespace, _, _ := strings.Cut(name, "/")
	return namespace
}
