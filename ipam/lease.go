package ipam

import (
	"hash/maphash"
	"net/netip"
	"slices"
	"time"
)

// identity is an owner, its namespace, and the hashes of its UID and name.
type identity struct {
	owner             Owner
	namespace         string
	uidHash, nameHash uint64
}

// holder is an owner that holds at least one address.
type holder struct {
	identity
	leases []*lease
	room   [2]*lease
}

// holderIndex finds holders by UID. Its map has hashes for keys: one of strings
// hashes them anew whenever it makes room in place of what was deleted, and each
// is somewhere else in memory.
type holderIndex struct {
	byHash map[uint64]*holder
	// others are those whose hash another one had when they came.
	others map[string]*holder
}

func (x *holderIndex) of(uid string, hash uint64) *holder {
	if h := x.byHash[hash]; h != nil && h.owner.UID == uid {
		return h
	}
	return x.others[uid]
}

// add adds a holder whose UID has none.
func (x *holderIndex) add(h *holder) {
	if x.byHash[h.uidHash] == nil {
		x.byHash[h.uidHash] = h
	} else {
		x.others[h.owner.UID] = h
	}
}

func (x *holderIndex) remove(h *holder) {
	if x.byHash[h.uidHash] == h {
		delete(x.byHash, h.uidHash)
	} else {
		delete(x.others, h.owner.UID)
	}
}

// lease is an address that is not free: it has tenants or it rests.
type lease struct {
	addr  netip.Addr
	space *space
	// tenants hold the address, in the order in which they came.
	tenants []tenant
	room    [1]tenant

	// A lease that rests was released by name at since, on the allocator's
	// clock.
	resting bool
	name    string
	hash    uint64
	since   time.Duration
	// queue links the leases that rest in a space, namesake those that rest
	// under a name.
	queue, namesake struct{ prev, next *lease }
}

// tenant is one who holds an address, alone or with others.
type tenant struct {
	*holder
	terms *Sharing
	// asked is the pool that gave the address or, since then, the one by
	// whose name a request kept it: requests that name it ask for no move,
	// whatever became of the pool. Empty: restored from outside every pool,
	// and no request yet.
	asked string
	since time.Time
}

// anyPool is asked when the first request for such an address named no pool.
const anyPool = "*"

// spare are structs to use again. It is bounded, since memory follows use.
type spare struct {
	leases  []*lease
	holders []*holder
}

const maxSpare = 1024

func pop[T any](list *[]*T) *T {
	last := len(*list) - 1
	if last < 0 {
		return new(T)
	}
	t := (*list)[last]
	*list = (*list)[:last]
	return t
}

func push[T any](list *[]*T, t *T) {
	if len(*list) < maxSpare {
		*list = append(*list, t)
	}
}

func (a *Allocator) identify(o Owner) identity {
	return identity{o, namespaceOf(o.Name), a.hash(o.UID), a.hash(o.Name)}
}

func (a *Allocator) hash(s string) uint64 { return maphash.String(a.seed, s) }

func (a *Allocator) holder(uid string) *holder { return a.holders.of(uid, a.hash(uid)) }

func (a *Allocator) newHolder(id identity) *holder {
	h := pop(&a.spare.holders)
	h.identity, h.leases = id, h.room[:0]
	a.holders.add(h)
	return h
}

// forget ends a holder that holds nothing any more.
func (a *Allocator) forget(h *holder) {
	a.holders.remove(h)
	*h = holder{}
	push(&a.spare.holders, h)
}

// newLease makes a lease of an address that has none. It has no tenants yet.
func (a *Allocator) newLease(addr netip.Addr, s *space) *lease {
	a.occupy(addr, s)
	return a.leaseOf(addr, s)
}

// leaseOf makes the lease of an address that is out of its free space.
func (a *Allocator) leaseOf(addr netip.Addr, s *space) *lease {
	l := pop(&a.spare.leases)
	l.addr, l.space, l.tenants = addr, s, l.room[:0]
	a.leases[addr] = l
	return l
}

// free ends a lease that has no tenants and does not rest.
func (a *Allocator) free(l *lease) {
	delete(a.leases, l.addr)
	a.vacate(l.addr, l.space)
	*l = lease{}
	push(&a.spare.leases, l)
}

// enter makes somebody new hold a lease, which may have rested. The caller
// puts it among the holder's leases.
func (a *Allocator) enter(l *lease, t tenant) {
	if l.resting {
		a.unrest(l)
	}
	if len(l.tenants) == 0 {
		l.space.assigned++
	}
	l.space.counts(l, t.namespace, +1)
	a.enlist(l, t.terms, t.namespace)
	l.tenants = append(l.tenants, t)
}

// leave takes a lease from one of its holders, who has to forget it, too. With
// the last one it begins to rest.
func (a *Allocator) leave(l *lease, h *holder) {
	i := slices.IndexFunc(l.tenants, func(t tenant) bool { return t.holder == h })
	terms := l.tenants[i].terms
	l.tenants = slices.Delete(l.tenants, i, i+1)
	l.space.counts(l, h.namespace, -1)
	a.delist(l, terms, h.namespace)
	if len(l.tenants) > 0 {
		return
	}
	l.space.assigned--
	if l.space.rest <= 0 {
		a.free(l)
		return
	}
	l.name, l.hash, l.since = h.owner.Name, h.nameHash, a.clock.elapsed
	a.rest(l)
}

// tenant returns the holder's tenancy, nil if it has none.
func (l *lease) tenant(h *holder) *tenant {
	for i := range l.tenants {
		if l.tenants[i].holder == h {
			return &l.tenants[i]
		}
	}
	return nil
}

// inhabited reports whether a tenant other than one is of the namespace.
func (l *lease) inhabited(namespace string, except *holder) bool {
	for i := range l.tenants {
		if t := &l.tenants[i]; t.holder != except && t.namespace == namespace {
			return true
		}
	}
	return false
}

// fits reports whether a request for these pools lets the tenant keep the
// address.
func (t *tenant) fits(s *space, pools []string) bool {
	return len(pools) == 0 || t.asked == "" ||
		slices.Contains(pools, t.asked) || slices.Contains(pools, s.name())
}

// keep notes what the request that keeps the address asked for.
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
