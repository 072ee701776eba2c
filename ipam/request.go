package ipam

import (
	"net/netip"
	"slices"
	"time"

	"github.com/lodestone-lb/lodestone/pkg/config"
)

// MaxAddresses is how many exact addresses one request may name.
const MaxAddresses = config.MaxServiceAddresses

// Request is what a Service asks for.
type Request struct {
	Owner Owner
	// Subject is what rules of pools select Services by. Its namespace is that of the owner's
	// name.
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
	// Count is how many addresses the Service wants of each family of which Addresses has none, one at least.
	// It gets them all, or none of the family. Several are not shared. All addresses are at most MaxAddresses.
	Count int
	// Sharing are the terms on which the Service shares its addresses. Nil:
	// each is for this Service alone.
	Sharing *Sharing
	// Renumber gives up the addresses that a new Service in its place would not get: those that
	// are stranded, reserved for another Service, or of a pool that drains, is closed to the
	// Service or is not among those to draw from. If addresses are reserved for the Service, it
	// gives up all others. If others share an address under its key, it gives up an address
	// that it has for itself. If there is no replacement, the request is refused and
	// everything stays.
	Renumber bool
	// Avoid are addresses that the Service is to leave for others, unless it
	// names them, has them reserved or shares them. If there is no other, the
	// request is refused and everything stays.
	Avoid []netip.Addr
}

// request is a Request that was read.
type request struct {
	Request
	*addresses
	self   identity
	me     party
	holder *holder // nil: the owner holds nothing
	now    time.Time
	// wishes are, for every family of the request, the addresses that it has
	// to be given: requested or reserved ones.
	wishes [len(families)][]netip.Addr
	// named are the families of which addresses are requested.
	named [len(families)]bool
}

// read checks the request and sorts its addresses by family.
func (req *request) read() *Refusal {
	req.identify()
	if req.Owner.UID == "" {
		return refuse(InvalidRequest, "", "the request has no owner")
	}
	h := req.holdings.byUID[req.Owner.UID]
	if h != nil && h.owner != req.Owner {
		return refuse(InvalidRequest, "", "the owner %q is %s and cannot become %s", h.owner.UID, h.owner.Name, req.Owner.Name)
	}
	req.holder = h
	if n := len(req.Families); n == 0 || n > len(families) || n == 2 && req.Families[0] == req.Families[1] {
		return refuse(InvalidRequest, "", "the request has families %.40q, not one or two different ones", req.Families[:min(n, 3)])
	}
	for _, f := range req.Families {
		if f.index() < 0 {
			return refuse(InvalidRequest, "", "the request has family %.40q, neither IPv4 nor IPv6", string(f))
		}
	}
	if n := len(req.Addresses); n > MaxAddresses {
		return refuse(InvalidRequest, "", "%d addresses are requested, at most %d can be", n, MaxAddresses)
	}
	for _, addr := range req.Addresses {
		if r := req.wish(addr); r != nil {
			return r
		}
	}
	for i := range req.Families {
		req.named[i] = len(req.wishes[i]) > 0
	}
	return nil
}

// count checks how many addresses are wanted.
func (req *request) count() *Refusal {
	all := 0
	for i := range req.Families {
		all += req.wanted(i)
	}
	switch {
	case all > MaxAddresses:
		return refuse(InvalidRequest, "", "%d addresses are requested or reserved, at most %d can be", all, MaxAddresses)
	case req.Count > 1 && req.me.terms != nil:
		return refuse(InvalidRequest, "", "%d addresses of a family are requested, and a Service with a sharing key has one", req.Count)
	}
	return nil
}

// wanted is how many addresses of family i the Service is to have.
func (req *request) wanted(i int) int {
	if req.named[i] {
		return len(req.wishes[i])
	}
	return max(1, req.Count, len(req.wishes[i]))
}

// identify notes the owner and its terms.
func (req *request) identify() {
	req.self = identify(req.Owner)
	req.me = party{&req.self, req.Sharing.terms()}
}

// wish notes a requested address.
func (req *request) wish(addr netip.Addr) *Refusal {
	if !addr.IsValid() || addr.Zone() != "" {
		return refuse(InvalidRequest, "", "%q is not an address without a zone", addr)
	}
	addr = addr.Unmap()
	i := slices.Index(req.Families, familyOf(addr))
	if i < 0 {
		return refuse(WrongFamily, "", "%s is an %s address, the Service has only %s", addr, familyOf(addr), req.Families[0])
	}
	if !slices.Contains(req.wishes[i], addr) {
		req.wishes[i] = append(req.wishes[i], addr)
	}
	return nil
}

// service is the name of the Service that asks.
func (req *request) service() string { return req.me.owner.Name }

// has reports whether the owner holds an address of the family.
func (req *request) has(f Family) bool {
	return req.holder != nil && slices.ContainsFunc(req.holder.holdings, func(g *holding) bool { return familyOf(g.addr) == f })
}

// reservedForOther reports whether the address is reserved for another Service.
func (req *request) reservedForOther(addr netip.Addr) bool {
	service := req.reservations.apart[addr].service
	return service != "" && service != req.service()
}

// holds reports whether the owner holds the address, which may be held by nobody.
func (req *request) holds(g *holding) bool {
	return g != nil && req.holder != nil && g.tenant(req.holder) != nil
}

// candidates is how many pools the request may draw from, if it is let in.
func (req *request) candidates() int {
	if len(req.Pools) > 0 {
		return len(req.Pools)
	}
	return len(req.pools.auto)
}

// candidate returns pool i of the request, nil if there is none of the name.
func (req *request) candidate(i int) *pool {
	if len(req.Pools) > 0 {
		return req.pools.byName[req.Pools[i]]
	}
	return req.pools.auto[i]
}

// rank is the place of a pool among the candidates. It is negative for other pools.
func (req *request) rank(q *pool) int {
	if len(req.Pools) > 0 {
		return slices.Index(req.Pools, q.Name)
	}
	return q.rank
}

// open returns why a pool is closed to the request for new addresses of the family, and
// nothing if it is open. The pool may not exist.
func (req *request) open(q *pool, f Family) Reason {
	switch {
	case q == nil:
		return PoolNotFound
	case req.rank(q) < 0 && len(req.Pools) > 0:
		return PoolNotNamed
	case req.rank(q) < 0:
		return NotAutoAssigned
	case !q.Allows(req.Subject):
		return PoolNotAllowed
	case q.spaces[f.index()] == nil:
		return FamilyUnavailable
	case q.Draining:
		return PoolDraining
	}
	return ""
}
