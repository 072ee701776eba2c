// Package ipam decides which address a Service gets. It is pure: no
// Kubernetes, no clock, no I/O. The caller passes the time in and serializes
// the calls; the same history of calls gives the same answers.
//
// The rules, in one place:
//
//   - A pool gives its lowest free address. Pools come in the order of the
//     request; without one, by Priority, then in the order of the document.
//   - An address that is released rests for the quarantine time and is then
//     free like any other. While it rests only a Service of the same
//     namespace and name can have it, by asking for exactly that address.
//   - An address in use never moves because pools were edited. It moves when
//     the Service asks for another address, pool or family.
//   - Two families come out of one pool when one pool can give both: out of
//     the pool of the family that is already settled, else out of the first
//     with both. Only then are they split over pools.
//   - Every failure is a *Refusal and leaves everything as it was.
//
// IPv4 addresses written as IPv6 (::ffff:192.0.2.1) are taken as IPv4.
package ipam

import (
	"net/netip"
	"time"
)

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
	// Name is "namespace/name": for people, and to recognize a Service that
	// comes back for its resting address.
	Name string
}

// Request is what a Service asks for.
type Request struct {
	Owner Owner
	// Namespace is the namespace of the Service.
	Namespace string
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
	// Addresses are the exact addresses wanted, at most one per family: these
	// or a refusal, also when RequireAll is not set. To name an address is to
	// name its pool: AutoAssign does not matter. A family without an address
	// is filled from Pools.
	Addresses []netip.Addr
}

// Held is an address that an owner holds.
type Held struct {
	Addr netip.Addr
	// Pool is the pool that hands the address out. Empty: stranded, no pool
	// does any more.
	Pool string
}

// Allocator gives addresses out of pools. See New. It is not safe for
// concurrent use.
type Allocator struct {
	poolSet
	// leases has every address that is held or rests; all others are free.
	leases  map[netip.Addr]*lease
	holders map[string]*holder

	quarantine time.Duration
	resting    queue
}

// holder is an owner that holds at least one address.
type holder struct {
	owner  Owner
	leases []*lease
	room   [2]*lease
}

// New returns an allocator without pools.
func New() *Allocator {
	return &Allocator{leases: map[netip.Addr]*lease{}, holders: map[string]*holder{}}
}

// Restore records that owner already holds addr, without asking any pool: the
// state of a cluster is true before it is valid. The address may be stranded,
// withheld or resting. When another owner holds it Restore changes nothing
// and returns that owner and false. An address that is not valid is held by
// nobody: the zero owner and false. Zones are dropped.
func (a *Allocator) Restore(owner Owner, addr netip.Addr) (holder Owner, ok bool) {
	addr = canonical(addr)
	if !addr.IsValid() {
		return Owner{}, false
	}
	l := a.leases[addr]
	if l != nil && !l.resting {
		return l.holder.owner, l.holder.owner.UID == owner.UID
	}
	h := a.holderFor(owner)
	if l == nil {
		l = a.lease(addr, a.spaceOf(addr))
	}
	a.give(l, h)
	h.leases = append(h.leases, l)
	return owner, true
}

// Release frees everything that the owner holds and returns it; the addresses
// rest until now+quarantine.
func (a *Allocator) Release(uid string, now time.Time) []netip.Addr {
	a.tick(now)
	h := a.holders[uid]
	if h == nil {
		return nil
	}
	delete(a.holders, uid)
	freed := make([]netip.Addr, len(h.leases))
	for i, l := range h.leases {
		freed[i] = l.addr
		a.rest(l, now)
	}
	return freed
}

// Holds returns what the owner holds, in the order of the families of its
// last request (or of Restore).
func (a *Allocator) Holds(uid string) []Held {
	h := a.holders[uid]
	if h == nil {
		return nil
	}
	return h.held()
}

// OwnerOf returns who holds the address. A resting address has no owner.
func (a *Allocator) OwnerOf(addr netip.Addr) (Owner, bool) {
	l := a.leases[canonical(addr)]
	if l == nil || l.resting {
		return Owner{}, false
	}
	return l.holder.owner, true
}

// holderFor returns the owner's holder, a new one if it holds nothing yet.
func (a *Allocator) holderFor(o Owner) *holder {
	h := a.holders[o.UID]
	if h == nil {
		h = a.newHolder(o.UID)
	}
	h.owner = o
	return h
}

func (a *Allocator) newHolder(uid string) *holder {
	h := &holder{}
	h.leases = h.room[:0]
	a.holders[uid] = h
	return h
}

func (h *holder) held() []Held {
	held := make([]Held, len(h.leases))
	for i, l := range h.leases {
		held[i] = Held{l.addr, l.space.name()}
	}
	return held
}

func canonical(a netip.Addr) netip.Addr { return a.Unmap().WithZone("") }
