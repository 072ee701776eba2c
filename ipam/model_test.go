package ipam_test

import (
	"net/netip"
	"slices"
	"time"

	"github.com/lodestone-lb/lodestone/ipam"
	"github.com/lodestone-lb/lodestone/pkg/config"
)

// model is the allocator once more, obviously correct and slow: one map of
// addresses that are not free, and loops over small pools.
type model struct {
	layout     layout
	quarantine time.Duration
	taken      map[netip.Addr]*record
	holds      map[string][]netip.Addr // by UID, in order
}

// record is why an address is not free.
type record struct {
	owner   ipam.Owner
	asked   string
	resting bool
	until   time.Time
}

// layout is a configuration with the addresses of its pools spelled out.
type layout struct {
	pools    []config.Pool
	byRank   []int
	free     [][]netip.Addr // by pool, sorted
	poolOf   map[netip.Addr]int
	withheld map[netip.Addr]int
}

func (m *model) tick(now time.Time) {
	for a, r := range m.taken {
		if r.resting && r.until.After(now.Add(m.quarantine)) {
			r.until = now.Add(m.quarantine)
		}
		if r.resting && !r.until.After(now) {
			delete(m.taken, a)
		}
	}
}

// pool is the name of the pool that hands the address out.
func (m *model) pool(a netip.Addr) string {
	if i, ok := m.layout.poolOf[a]; ok {
		return m.layout.pools[i].Name
	}
	return ""
}

func (m *model) setPools(l layout, quarantine time.Duration) {
	m.layout, m.quarantine = l, quarantine
	for a, r := range m.taken {
		if r.asked == "" {
			r.asked = m.pool(a)
		}
	}
}

func (m *model) restore(o ipam.Owner, a netip.Addr) (ipam.Owner, bool) {
	if r := m.taken[a]; r != nil && !r.resting {
		return r.owner, r.owner.UID == o.UID
	}
	m.taken[a] = &record{owner: o, asked: m.pool(a)}
	m.holds[o.UID] = append(m.holds[o.UID], a)
	m.rename(o)
	return o, true
}

func (m *model) rename(o ipam.Owner) {
	for _, a := range m.holds[o.UID] {
		m.taken[a].owner = o
	}
}

func (m *model) drop(a netip.Addr, now time.Time) {
	r := m.taken[a]
	r.resting, r.until = true, now.Add(m.quarantine)
	if m.quarantine <= 0 {
		delete(m.taken, a)
	}
}

func (m *model) release(uid string, now time.Time) []netip.Addr {
	m.tick(now)
	freed := m.holds[uid]
	for _, a := range freed {
		m.drop(a, now)
	}
	delete(m.holds, uid)
	return freed
}

func (m *model) held(uid string) []ipam.Held {
	var held []ipam.Held
	for _, a := range m.holds[uid] {
		held = append(held, ipam.Held{Addr: a, Pool: m.pool(a)})
	}
	return held
}

func family(a netip.Addr) ipam.Family {
	if a.Is4() {
		return ipam.IPv4
	}
	return ipam.IPv6
}

// allocate returns a reason if it refuses.
func (m *model) allocate(req ipam.Request, now time.Time) ([]ipam.Held, ipam.Reason) {
	m.tick(now)
	chosen := map[ipam.Family]netip.Addr{}
	for _, w := range req.Addresses {
		f := family(w)
		if !slices.Contains(req.Families, f) {
			return nil, ipam.WrongFamily
		}
		if chosen[f].IsValid() && chosen[f] != w {
			return nil, ipam.InvalidRequest
		}
		chosen[f] = w
	}
	for _, f := range req.Families {
		if w := chosen[f]; w.IsValid() {
			if reason := m.claim(req, w); reason != "" {
				return nil, reason
			}
		} else if a := m.kept(req, f); a.IsValid() {
			chosen[f] = a
		}
	}
	if reason := m.draw(req, chosen); reason != "" {
		return nil, reason
	}
	m.settle(req, chosen, now)
	return m.held(req.Owner.UID), ""
}

// kept is the first address of the family that may stay.
func (m *model) kept(req ipam.Request, f ipam.Family) netip.Addr {
	for _, a := range m.holds[req.Owner.UID] {
		asked := m.taken[a].asked
		if family(a) == f && (len(req.Pools) == 0 || asked == "" ||
			slices.Contains(req.Pools, asked) || slices.Contains(req.Pools, m.pool(a))) {
			return a
		}
	}
	return netip.Addr{}
}

func (m *model) claim(req ipam.Request, a netip.Addr) ipam.Reason {
	r := m.taken[a]
	if r != nil && !r.resting && r.owner.UID == req.Owner.UID {
		return ""
	}
	if len(req.Pools) > 0 && !slices.ContainsFunc(req.Pools, m.exists) {
		return ipam.PoolNotFound
	}
	i, gives := m.layout.poolOf[a]
	if !gives {
		w, withheld := m.layout.withheld[a]
		if !withheld {
			return ipam.AddressOutsidePools
		}
		i = w
	}
	p := m.layout.pools[i]
	switch {
	case len(req.Pools) > 0 && !slices.Contains(req.Pools, p.Name):
		return ipam.AddressOutsidePools
	case !gives:
		return ipam.AddressWithheld
	case !p.Allows(config.Subject{Namespace: req.Namespace}):
		return ipam.PoolNotAllowed
	case r != nil && !r.resting:
		return ipam.AddressInUse
	case r != nil && r.owner.Name != req.Owner.Name:
		return ipam.AddressQuarantined
	}
	return ""
}

func (m *model) exists(name string) bool {
	return slices.ContainsFunc(m.layout.pools, func(p config.Pool) bool { return p.Name == name })
}

// open is the pools that the request may draw from, best first.
func (m *model) open(req ipam.Request) (open []int) {
	for _, i := range m.layout.byRank {
		if p := m.layout.pools[i]; len(req.Pools) == 0 && p.AutoAssign && p.Allows(config.Subject{Namespace: req.Namespace}) {
			open = append(open, i)
		}
	}
	for _, name := range req.Pools {
		for i, p := range m.layout.pools {
			if p.Name == name && p.Allows(config.Subject{Namespace: req.Namespace}) {
				open = append(open, i)
			}
		}
	}
	return open
}

// lowest is the pool's lowest free address of the family.
func (m *model) lowest(pool int, f ipam.Family) netip.Addr {
	for _, a := range m.layout.free[pool] {
		if family(a) == f && m.taken[a] == nil {
			return a
		}
	}
	return netip.Addr{}
}

func (m *model) draw(req ipam.Request, chosen map[ipam.Family]netip.Addr) ipam.Reason {
	home := -1
	var missing []ipam.Family
	for _, f := range req.Families {
		if !chosen[f].IsValid() {
			missing = append(missing, f)
		} else if i, ok := m.layout.poolOf[chosen[f]]; ok {
			home = i
		}
	}
	order := m.open(req)
	if slices.Contains(order, home) {
		order = append([]int{home}, order...)
	}
	// Pools with everything that is missing come first.
	slices.SortStableFunc(order, func(i, j int) int { return m.lacks(i, missing) - m.lacks(j, missing) })
	for _, f := range missing {
		for _, i := range order {
			if a := m.lowest(i, f); a.IsValid() {
				chosen[f] = a
				break
			}
		}
		if !chosen[f].IsValid() && req.RequireAll {
			return m.why(req, f)
		}
	}
	if len(chosen) > 0 && slices.ContainsFunc(req.Families, func(f ipam.Family) bool { return chosen[f].IsValid() }) {
		return ""
	}
	best := m.why(req, missing[0])
	if len(missing) > 1 {
		if r := m.why(req, missing[1]); hope(r) > hope(best) {
			best = r
		}
	}
	return best
}

// lacks is 0 if the pool can give all families, and 1 if not.
func (m *model) lacks(pool int, families []ipam.Family) int {
	for _, f := range families {
		if !m.lowest(pool, f).IsValid() {
			return 1
		}
	}
	return 0
}

func hope(r ipam.Reason) int {
	return slices.Index([]ipam.Reason{ipam.NoPool, ipam.PoolNotFound, ipam.FamilyUnavailable, ipam.PoolNotAllowed, ipam.PoolExhausted}, r)
}

// why is the most hopeful reason why no pool gives an address of the family.
func (m *model) why(req ipam.Request, f ipam.Family) ipam.Reason {
	best := ipam.NoPool
	if len(req.Pools) > 0 {
		best = ipam.PoolNotFound
	}
	better := func(r ipam.Reason) {
		if hope(r) > hope(best) {
			best = r
		}
	}
	for _, i := range m.open(req) {
		better(ipam.FamilyUnavailable)
		if slices.ContainsFunc(m.layout.free[i], func(a netip.Addr) bool { return family(a) == f }) {
			better(ipam.PoolExhausted)
		}
	}
	for _, p := range m.layout.pools {
		if slices.Contains(req.Pools, p.Name) && !p.Allows(config.Subject{Namespace: req.Namespace}) {
			better(ipam.PoolNotAllowed)
		}
	}
	return best
}

// settle makes the owner hold exactly what was chosen.
func (m *model) settle(req ipam.Request, chosen map[ipam.Family]netip.Addr, now time.Time) {
	uid := req.Owner.UID
	before := m.holds[uid]
	m.holds[uid] = nil
	for _, f := range req.Families {
		a := chosen[f]
		if !a.IsValid() {
			continue
		}
		m.holds[uid] = append(m.holds[uid], a)
		if !slices.Contains(before, a) {
			m.taken[a] = &record{asked: m.pool(a)}
			continue
		}
		r := m.taken[a]
		switch {
		case slices.Contains(req.Pools, m.pool(a)):
			r.asked = m.pool(a)
		case r.asked == "" && len(req.Pools) > 0:
			r.asked = req.Pools[0]
		case r.asked == "":
			r.asked = "no wish"
		}
	}
	m.rename(req.Owner)
	for _, a := range before {
		if !slices.Contains(m.holds[uid], a) {
			m.taken[a].owner = req.Owner
			m.drop(a, now)
		}
	}
}

func (m *model) stats(now time.Time) (stats []ipam.PoolStats) {
	m.tick(now)
	for i, p := range m.layout.pools {
		for _, f := range []ipam.Family{ipam.IPv4, ipam.IPv6} {
			s := ipam.PoolStats{Pool: p.Name, Family: f}
			for _, a := range m.layout.free[i] {
				if family(a) != f {
					continue
				}
				s.Size++
				switch r := m.taken[a]; {
				case r == nil:
					s.Free++
				case r.resting:
					s.Quarantined++
				default:
					s.Assigned++
				}
			}
			if s.Size > 0 {
				stats = append(stats, s)
			}
		}
	}
	return stats
}

func (m *model) nextFree() (next time.Time, any bool) {
	for _, r := range m.taken {
		if r.resting && (!any || r.until.Before(next)) {
			next, any = r.until, true
		}
	}
	return next, any
}
