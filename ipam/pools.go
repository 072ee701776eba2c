package ipam

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"sort"
	"time"

	"github.com/lodestone-lb/lodestone/pkg/config"
)

// Setup is all that an operator and the cluster lay down for addresses.
type Setup struct {
	// Pools must not overlap.
	Pools []config.Pool
	// Quarantine is how long a released address is in quarantine at least.
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

// PoolStats are a pool's counters for one family. The counts of an IPv6 pool
// may exceed what an integer holds, hence float64.
type PoolStats struct {
	Pool   string
	Family Family
	// Size counts the addresses that the pool may hand out, without those that are forbidden.
	// Each is in one of the others: Assigned if it is held, Quarantined if it is in
	// quarantine, else Conflicted if another host has it, else Reserved, else Free. Stranded
	// addresses are in no pool and not counted.
	Size, Free, Assigned, Quarantined, Conflicted, Reserved float64
	// Draining is set if the pool gives no new addresses, the free ones included.
	Draining bool
}

// pools are the pools of the setup in force.
type pools struct {
	all    []*pool
	byName map[string]*pool
	// auto is the pools with AutoAssign in the order to draw from them.
	auto      []*pool
	segments  []segment
	forbidden forbiddenSet
	// nowhere is the space of stranded addresses.
	nowhere space
}

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
	// quarantine is how long addresses are in quarantine, and quarantined are those that are, by the time of the
	// release: the first is free first.
	quarantine  time.Duration
	quarantined []*quarantined
	// assigned counts the addresses that are held; conflicted and reserved count those of the
	// others that are set apart and not in quarantine.
	assigned, conflicted, reserved int
	usages                         usages
}

// segment is a range of a pool, sorted by address. space is nil where the
// pool withholds.
type segment struct {
	from, to netip.Addr
	pool     *pool
	space    *space
}

// set replaces the pools and what is forbidden. The spaces that a changed pool no
// longer has belong to no pool then.
func (ps *pools) set(setup Setup) {
	ps.forbidden.set(setup.Forbidden)
	old := ps.byName
	for _, p := range ps.all {
		p.detach()
	}
	ps.all, ps.byName = make([]*pool, len(setup.Pools)), make(map[string]*pool, len(setup.Pools))
	for i, c := range setup.Pools {
		p := &pool{Pool: c, rank: notAuto}
		p.attach(old[c.Name], &ps.forbidden)
		ps.all[i], ps.byName[c.Name] = p, p
	}
	ps.sort()
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
		s.pool, s.forbidden, s.usages = p, size[i]-s.size, nil
		if p.NamespaceQuota > 0 {
			s.usages = usages{}
		}
		p.spaces[i] = s
	}
}

func newSpace(f Family, runs []run) *space {
	s := &space{family: f, runs: runs, free: newFreeSpace(runs)}
	for _, r := range runs {
		s.size += r.size()
	}
	return s
}

// sort puts the pools and their ranges in order.
func (ps *pools) sort() {
	ps.auto, ps.segments = nil, nil
	for _, p := range ps.all {
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

// exists reports whether there is a pool of the name.
func (ps *pools) exists(name string) bool { return ps.byName[name] != nil }

// find returns the segment that contains the address, nil if none does.
func (ps *pools) find(addr netip.Addr) *segment {
	i := sort.Search(len(ps.segments), func(i int) bool { return addr.Less(ps.segments[i].from) }) - 1
	if i < 0 || ps.segments[i].to.Less(addr) {
		return nil
	}
	return &ps.segments[i]
}

// spaceOf returns the space that hands the address out, or nowhere.
func (ps *pools) spaceOf(addr netip.Addr) *space {
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
func (ps *pools) whyStranded(addr netip.Addr) string {
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

// take takes an address out of the free ones, if a pool hands it out.
func (s *space) take(addr netip.Addr) {
	if s.pool != nil {
		s.free.take(numOf(addr))
	}
}

// put undoes take.
func (s *space) put(addr netip.Addr) {
	if s.pool != nil {
		s.free.put(numOf(addr))
	}
}

// freeSize is how many addresses can be given now.
func (s *space) freeSize() float64 {
	return s.size - float64(s.assigned+len(s.quarantined)+s.conflicted+s.reserved)
}

// stats returns the counters of the space.
func (s *space) stats() PoolStats {
	return PoolStats{
		Pool: s.name(), Family: s.family, Size: s.size, Free: s.freeSize(),
		Assigned: float64(s.assigned), Quarantined: float64(len(s.quarantined)),
		Conflicted: float64(s.conflicted), Reserved: float64(s.reserved), Draining: s.pool.Draining,
	}
}
