package ipam

import (
	"encoding/binary"
	"hash/maphash"
	"iter"
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

// holderIndex finds holders by UID.
type holderIndex struct {
	byHash table[holder]
	// others are those whose hash another one had when they came.
	others map[string]*holder
}

func (x *holderIndex) of(uid string, hash uint64) *holder {
	if h := x.byHash.get(hash); h != nil && h.owner.UID == uid {
		return h
	}
	return x.others[uid]
}

// add adds a holder whose UID has none.
func (x *holderIndex) add(h *holder) {
	if x.byHash.get(h.uidHash) == nil {
		x.byHash.set(h.uidHash, h)
	} else {
		x.others[h.owner.UID] = h
	}
}

func (x *holderIndex) remove(h *holder) {
	if x.byHash.get(h.uidHash) == h {
		x.byHash.remove(h.uidHash)
	} else {
		delete(x.others, h.owner.UID)
	}
}

// lease is an address that is held.
type lease struct {
	addr  netip.Addr
	page  *page // of the address
	space *space
	// tenants hold the address, in the order in which they came.
	tenants []tenant
	room    [1]tenant
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
	rests   []*rest
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

// newLease makes a lease of an address that has none, which may rest. It has no
// tenants yet.
func (a *Allocator) newLease(addr netip.Addr, s *space) *lease {
	if r := a.uses.get(addr).rest; r != nil {
		a.unrest(r)
	} else {
		a.occupy(addr, s)
	}
	return a.leaseOf(addr, s)
}

// leaseOf makes the lease of an address that is out of its free space.
func (a *Allocator) leaseOf(addr netip.Addr, s *space) *lease {
	l := pop(&a.spare.leases)
	l.addr, l.page, l.space, l.tenants = addr, a.uses.page(addr), s, l.room[:0]
	l.page.set(addr, use{lease: l})
	return l
}

// enter makes somebody new hold a lease. The caller puts it among the holder's
// leases.
func (a *Allocator) enter(l *lease, t tenant) {
	if len(l.tenants) == 0 {
		l.space.assigned++
	}
	l.space.counts(l, t.namespace, +1)
	a.enlist(l, t.terms, t.namespace)
	l.tenants = append(l.tenants, t)
}

// leave takes a lease from one of its holders, who has to forget it, too. With
// the last one it ends, and its address begins to rest.
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
	if l.space.rest > 0 {
		a.rest(rest{addr: l.addr, page: l.page, space: l.space, name: h.owner.Name, hash: h.nameHash, since: a.clock.elapsed})
	} else {
		a.free(l.addr, l.page, l.space)
	}
	*l = lease{}
	push(&a.spare.leases, l)
}

// free frees an address that is neither held nor rests any more.
func (a *Allocator) free(addr netip.Addr, p *page, s *space) {
	a.uses.remove(p, addr)
	a.vacate(addr, s)
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

// table is a hash table of pointers, for keys that are good hashes. It has open
// addressing with linear probing: a search reads one place in memory, mostly,
// and what is removed leaves nothing behind that would have to be cleaned up.
//
// No slot is empty between the one that is a hash's own and the one where it is.
type table[T any] struct {
	slots []slot[T] // a power of two of them, or none
	used  int
}

// slot is empty without a value.
type slot[T any] struct {
	hash  uint64
	value *T
}

func (t *table[T]) get(hash uint64) *T {
	if t.used == 0 {
		return nil
	}
	return t.slots[t.seek(hash)].value
}

// set replaces the value of a hash.
func (t *table[T]) set(hash uint64, value *T) {
	if t.used >= len(t.slots)/4*3 {
		t.grow()
	}
	s := &t.slots[t.seek(hash)]
	if s.value == nil {
		t.used++
	}
	*s = slot[T]{hash, value}
}

// remove removes a hash that has a value.
func (t *table[T]) remove(hash uint64) {
	gap, mask := t.seek(hash), len(t.slots)-1
	for i := (gap + 1) & mask; t.slots[i].value != nil; i = (i + 1) & mask {
		// It moves up unless its own slot is behind the gap.
		if own := int(t.slots[i].hash) & mask; (i-own)&mask >= (i-gap)&mask {
			t.slots[gap], gap = t.slots[i], i
		}
	}
	t.slots[gap] = slot[T]{}
	t.used--
}

// seek returns the slot of a hash, or the empty one where it would be.
func (t *table[T]) seek(hash uint64) int {
	mask := len(t.slots) - 1
	i := int(hash) & mask
	for t.slots[i].value != nil && t.slots[i].hash != hash {
		i = (i + 1) & mask
	}
	return i
}

func (t *table[T]) grow() {
	old := t.slots
	t.slots, t.used = make([]slot[T], max(8, 2*len(old))), 0
	for _, s := range old {
		if s.value != nil {
			t.set(s.hash, s.value)
		}
	}
}

// use is what an address that is not free is used for: it is held or it rests.
type use struct {
	lease *lease
	rest  *rest
}

// useIndex finds what addresses are used for, in pages of neighbours: pools give
// their lowest address, so those in use lie close together. No page is empty.
type useIndex map[num]*page

// pageSize is how many neighbours share a page. Measured: 16 save 3 bytes of an
// address with neighbours, and cost 144 more of one that is alone.
const pageSize = 8

type page struct {
	uses [pageSize]use
	used int
}

// pageOf is the key of an address's page. IPv4 addresses are written as IPv6, as
// which they are not in use.
func pageOf(a netip.Addr) num {
	b := a.As16()
	return num{binary.BigEndian.Uint64(b[:8]), binary.BigEndian.Uint64(b[8:]) / pageSize}
}

// at is the place of an address in its page.
func (p *page) at(a netip.Addr) *use {
	b := a.As16()
	return &p.uses[b[15]%pageSize]
}

// set replaces what an address is used for.
func (p *page) set(a netip.Addr, u use) {
	at := p.at(a)
	if *at == (use{}) {
		p.used++
	}
	*at = u
}

// get returns the zero use for an address that is not in use, or not valid.
func (x useIndex) get(a netip.Addr) use {
	if p := x[pageOf(a)]; p != nil && a.IsValid() {
		return *p.at(a)
	}
	return use{}
}

// page returns the page of an address, to set its use there.
func (x useIndex) page(a netip.Addr) *page {
	key := pageOf(a)
	p := x[key]
	if p == nil {
		p = &page{}
		x[key] = p
	}
	return p
}

// remove removes an address that is in use from its page.
func (x useIndex) remove(p *page, a netip.Addr) {
	*p.at(a) = use{}
	if p.used--; p.used == 0 {
		delete(x, pageOf(a))
	}
}

// all is every use there is, in no order.
func (x useIndex) all() iter.Seq[use] {
	return func(yield func(use) bool) {
		for _, p := range x {
			for _, u := range p.uses {
				if u != (use{}) && !yield(u) {
					return
				}
			}
		}
	}
}
