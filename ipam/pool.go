package ipam

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"sort"
	"time"

	"go4.org/netipx"

	"github.com/lodestone-lb/lodestone/pkg/config"
)

// pool is a pool of the configuration with the state of its addresses.
type pool struct {
	config.Pool
	// rank is the place in the order in which Services that name no pool draw,
	// notAuto for a pool without AutoAssign.
	rank int
	// spaces has one space per family that the pool has.
	spaces [len(families)]*space
}

const notAuto = -1

// space is one family of one pool.
type space struct {
	// pool is nil for addresses that no pool hands out.
	pool   *pool
	family Family
	// runs is what can be handed out: all but what is forbidden.
	runs            []run
	size, forbidden float64
	free            freeSpace
	// assigned and resting count what is held and what rests; conflicted and
	// reserved what is neither and set apart.
	assigned, resting, conflicted, reserved int
	// perNamespace counts the addresses that are held and that rest, for a pool
	// with a quota.
	perNamespace map[string]usage

	rest  time.Duration // how long a released address rests
	queue queue
	place int // in dueSpaces
}

// poolSet is the setup in force and the ways to find things in it.
type poolSet struct {
	pools  []*pool
	byName map[string]*pool
	// auto is the pools with AutoAssign in the order to draw from them.
	auto      []*pool
	segments  []segment
	forbidden forbiddenSet
	// apart is what nobody draws, reserved the addresses of a Service.
	apart    map[netip.Addr]apart
	reserved map[string][]netip.Addr
	// nowhere is the space of stranded addresses.
	nowhere space
}

// segment is a range of a pool, sorted by address. space is nil where the
// pool withholds.
type segment struct {
	from, to netip.Addr
	pool     *pool
	space    *space
}

// apart is why an address is not drawn.
type apart struct {
	service  string // that it is reserved for; empty: for none
	conflict bool   // another host has it
}

// Configure replaces the setup. What is held stays with its holders, also
// when no pool hands it out any more (it is then stranded), and what rests
// rests as long as the new setup says, counted from its release. It costs a
// look at every pool, every address not free and everything forbidden; only
// what a changed pool contains is built anew.
func (a *Allocator) Configure(s Setup) {
	a.rejoinAll()
	a.quarantine = s.Quarantine
	a.forbidden.set(s.Forbidden)
	old := a.byName
	for _, p := range a.pools {
		p.detach()
	}
	a.pools, a.byName = make([]*pool, len(s.Pools)), make(map[string]*pool, len(s.Pools))
	for i, c := range s.Pools {
		p := &pool{Pool: c, rank: notAuto}
		p.attach(old[c.Name], &a.forbidden)
		a.pools[i], a.byName[c.Name] = p, p
	}
	a.sortPools()
	a.rehome()
	a.setApart(s)
	a.time()
}

// detach marks the spaces of a pool that is replaced.
func (p *pool) detach() {
	for _, s := range p.spaces {
		if s != nil {
			s.pool = nil
		}
	}
}

// attach gives the pool its spaces: those of the pool that had its name
// before, where their addresses are the same, and new ones otherwise.
func (p *pool) attach(old *pool, forbidden *forbiddenSet) {
	var runs [len(families)][]run
	var size [len(families)]float64
	for _, r := range ranges(p.Free) {
		i, all := familyOf(r.From()).index(), run{numOf(r.From()), numOf(r.To())}
		size[i] += all.size()
		runs[i] = forbidden.bans[i].subtract(runs[i], all)
	}
	for i, f := range families {
		if size[i] == 0 && (p.DHCP == nil || f != IPv4) {
			continue
		}
		var s *space
		if old != nil {
			s = old.spaces[i]
		}
		if s == nil || !slices.Equal(s.runs, runs[i]) {
			s = newSpace(f, runs[i])
		}
		s.pool, s.forbidden, s.perNamespace = p, size[i]-s.size, nil
		if p.NamespaceQuota > 0 {
			s.perNamespace = map[string]usage{}
		}
		p.spaces[i] = s
	}
}

func newSpace(f Family, runs []run) *space {
	s := &space{family: f, runs: runs, free: newFreeSpace(runs), place: notDue}
	for _, r := range runs {
		s.size += r.size()
	}
	return s
}

// sortPools puts the pools and their ranges in order.
func (ps *poolSet) sortPools() {
	ps.auto, ps.segments = nil, nil
	for _, p := range ps.pools {
		if p.AutoAssign {
			ps.auto = append(ps.auto, p)
		}
		for _, r := range ranges(p.Free) {
			ps.segments = append(ps.segments, segment{r.From(), r.To(), p, p.spaces[familyOf(r.From()).index()]})
		}
		for _, r := range ranges(p.Withheld) {
			ps.segments = append(ps.segments, segment{r.From(), r.To(), p, nil})
		}
	}
	slices.SortStableFunc(ps.auto, func(p, q *pool) int { return cmp.Compare(p.Priority, q.Priority) })
	for i, p := range ps.auto {
		p.rank = i
	}
	slices.SortFunc(ps.segments, func(s, t segment) int { return s.from.Compare(t.from) })
}

// rehome finds the present space of every address in use whose space is gone, and
// of stranded ones, and counts what namespaces hold.
func (a *Allocator) rehome() {
	var resting []*rest
	for u := range a.uses.all() {
		if r := u.rest; r != nil {
			if r.space.pool == nil {
				resting = append(resting, r)
			} else {
				r.space.countRest(r, +1)
			}
			continue
		}
		if u.lease.space.pool == nil {
			a.moveTo(u.lease, a.spaceOf(u.lease.addr))
		}
		u.lease.space.countAll(u.lease)
	}
	a.nowhere.queue, a.nowhere.resting = queue{}, 0
	slices.SortFunc(resting, func(r, q *rest) int { return cmp.Or(cmp.Compare(r.since, q.since), r.addr.Compare(q.addr)) })
	for _, r := range resting {
		r.space = a.spaceOf(r.addr)
		r.space.take(r.addr)
		r.space.resting++
		r.space.countRest(r, +1)
		r.space.queue.insert(r)
	}
}

// moveTo puts a lease that is held into another space.
func (a *Allocator) moveTo(l *lease, s *space) {
	l.space.assigned--
	l.space = s
	s.assigned++
	s.take(l.addr)
	for i := range l.tenants {
		if t := &l.tenants[i]; t.asked == "" {
			t.asked = s.name()
		}
	}
}

// time gives every space its time of rest, and puts what rests in order.
func (a *Allocator) time() {
	a.due = a.due[:0]
	add := func(s *space, rest time.Duration) {
		s.rest, s.place = rest, notDue
		if s.queue.head != nil {
			a.due.update(s)
		}
	}
	add(&a.nowhere, a.quarantine)
	for _, p := range a.pools {
		for _, s := range p.spaces {
			if s != nil {
				add(s, a.restIn(p))
			}
		}
	}
}

// restIn is how long a released address of the pool rests. A leased one goes
// back to the server, which decides that.
func (a *Allocator) restIn(p *pool) time.Duration {
	if p.DHCP != nil {
		return 0
	}
	return max(a.quarantine, p.KeepFor)
}

// rejoinAll gives back what is set apart and idle.
func (a *Allocator) rejoinAll() {
	for addr, why := range a.apart {
		if s := a.spaceOf(addr); s.pool != nil && a.uses.get(addr) == (use{}) {
			*s.counter(why)--
			s.put(addr)
		}
	}
}

// setApart takes what is reserved or conflicted, and idle, out of the free
// space.
func (a *Allocator) setApart(s Setup) {
	a.apart, a.reserved = map[netip.Addr]apart{}, map[string][]netip.Addr{}
	for _, addr := range s.Conflicted {
		a.apart[canonical(addr)] = apart{conflict: true}
	}
	for _, r := range s.Reservations {
		for _, addr := range r.Addresses {
			addr = canonical(addr)
			why := a.apart[addr]
			if why.service != "" || !addr.IsValid() {
				continue
			}
			why.service = r.Service
			a.apart[addr] = why
			a.reserved[r.Service] = append(a.reserved[r.Service], addr)
		}
	}
	for addr, why := range a.apart {
		if s := a.spaceOf(addr); s.pool != nil && a.uses.get(addr) == (use{}) {
			s.take(addr)
			*s.counter(why)++
		}
	}
}

// counter counts the idle addresses of the space that are set apart for the
// reason.
func (s *space) counter(why apart) *int {
	if why.conflict {
		return &s.conflicted
	}
	return &s.reserved
}

// occupy takes an address that is free, or set apart and idle.
func (a *Allocator) occupy(addr netip.Addr, s *space) {
	if why, ok := a.apart[addr]; ok && s.pool != nil {
		*s.counter(why)--
	} else {
		s.take(addr)
	}
}

// vacate undoes occupy.
func (a *Allocator) vacate(addr netip.Addr, s *space) {
	if why, ok := a.apart[addr]; ok && s.pool != nil {
		*s.counter(why)++
	} else {
		s.put(addr)
	}
}

func (ps *poolSet) exists(name string) bool { return ps.byName[name] != nil }

// find returns the segment that contains the address, nil if none does.
func (ps *poolSet) find(addr netip.Addr) *segment {
	i := sort.Search(len(ps.segments), func(i int) bool { return addr.Less(ps.segments[i].from) }) - 1
	if i < 0 || ps.segments[i].to.Less(addr) {
		return nil
	}
	return &ps.segments[i]
}

// spaceOf returns the space that hands the address out, or nowhere.
func (ps *poolSet) spaceOf(addr netip.Addr) *space {
	at := ps.find(addr)
	if at == nil || at.space == nil {
		return &ps.nowhere
	}
	if _, forbidden := ps.forbidden.why(addr); forbidden {
		return &ps.nowhere
	}
	return at.space
}

// whyStranded completes "ADDR is ..." for an address that no pool hands out.
func (ps *poolSet) whyStranded(addr netip.Addr) string {
	at := ps.find(addr)
	if at == nil {
		return "in no pool"
	}
	if why, forbidden := ps.forbidden.why(addr); forbidden {
		return why
	}
	return at.pool.whyWithheld(addr)
}

func (p *pool) whyWithheld(addr netip.Addr) string {
	why := fmt.Sprintf("excluded from pool %q", p.Name)
	if addr.Is4() {
		why += ", or the first or last address of one of its prefixes"
	}
	return why
}

// name is the name of the space's pool, empty for nowhere.
func (s *space) name() string {
	if s.pool == nil {
		return ""
	}
	return s.pool.Name
}

func (s *space) take(addr netip.Addr) {
	if s.pool != nil {
		s.free.take(numOf(addr))
	}
}

func (s *space) put(addr netip.Addr) {
	if s.pool != nil {
		s.free.put(numOf(addr))
	}
}

// freeSize is how many addresses can be given now.
func (s *space) freeSize() float64 {
	return s.size - float64(s.assigned+s.resting+s.conflicted+s.reserved)
}

// usage is what counts for the quota of a namespace: addresses that its Services
// hold, and those that rest after their last use by one of them. A namespace
// could otherwise take one address after the other, and give each back.
type usage struct{ held, resting int }

// counts counts for the quota that a tenant of the namespace, who is not among
// those of the lease, comes or goes.
func (s *space) counts(l *lease, namespace string, change int) {
	if s.perNamespace != nil && !l.inhabited(namespace, nil) {
		s.count(namespace, usage{held: change})
	}
}

// countRest counts for the quota that a rest begins or ends.
func (s *space) countRest(r *rest, change int) {
	if s.perNamespace != nil {
		s.count(namespaceOf(r.name), usage{resting: change})
	}
}

func (s *space) count(namespace string, change usage) {
	u := s.perNamespace[namespace]
	u.held, u.resting = u.held+change.held, u.resting+change.resting
	if s.perNamespace[namespace] = u; u == (usage{}) {
		delete(s.perNamespace, namespace)
	}
}

// countAll counts the tenants of a lease.
func (s *space) countAll(l *lease) {
	if s.perNamespace == nil {
		return
	}
	for i := range l.tenants {
		first := func(t tenant) bool { return t.namespace == l.tenants[i].namespace }
		if slices.IndexFunc(l.tenants, first) == i {
			s.count(l.tenants[i].namespace, usage{held: +1})
		}
	}
}

// ranges returns the ranges of a set, which may be nil.
func ranges(s *netipx.IPSet) []netipx.IPRange {
	if s == nil {
		return nil
	}
	return s.Ranges()
}
