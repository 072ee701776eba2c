package ipam_test

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/lodestone-lb/lodestone/ipam"
	"github.com/lodestone-lb/lodestone/pkg/config"
)

// model is the allocator once more, obviously correct and slow: every address
// there is, who is on it or for how long it has been in quarantine, and loops over them.
type model struct {
	layout *layout
	last   time.Time
	places []*place
	holds  map[string][]*place // by UID, in order
}

// place is one address of the world.
type place struct {
	n          int // in the world
	addr       netip.Addr
	family     ipam.Family
	stays      []*stay
	quarantine *quarantined
}

// stay is one who holds an address.
type stay struct {
	owner ipam.Owner
	terms *ipam.Sharing
	asked string
	since time.Time
}

// quarantined is an address in quarantine: for whom, and how long already.
type quarantined struct {
	name string
	time time.Duration
}

// layout is a setup, and what follows from it for each place.
type layout struct {
	ipam.Setup
	at       []spot
	families map[string][]ipam.Family // of each pool
}

// spot is what a layout has for one place.
type spot struct {
	pool     int // -1: none
	withheld bool
	bans     []ban
	reserved string
	conflict bool
}

type ban struct {
	size, from int
	why        string
}

// has reports whether the pool has addresses of the family, forbidden ones
// included.
func (l *layout) has(q *config.Pool, f ipam.Family) bool {
	return slices.Contains(l.families[q.Name], f)
}

func newModel() *model {
	m := &model{layout: &layout{at: make([]spot, len(world))}, holds: map[string][]*place{}}
	for n, a := range world {
		m.layout.at[n].pool = -1
		m.places = append(m.places, &place{n: n, addr: a, family: family(a)})
	}
	return m
}

func family(a netip.Addr) ipam.Family {
	if a.Is4() {
		return ipam.IPv4
	}
	return ipam.IPv6
}

func (m *model) at(a netip.Addr) *place { return m.places[worldIndex[a]] }

// pool is the pool that hands the address out, nil for none.
func (m *model) pool(p *place) *config.Pool {
	s := m.layout.at[p.n]
	if s.pool < 0 || s.withheld || len(s.bans) > 0 {
		return nil
	}
	return &m.layout.Pools[s.pool]
}

func (m *model) poolName(p *place) string {
	if q := m.pool(p); q != nil {
		return q.Name
	}
	return ""
}

func (m *model) quarantineTime(p *place) time.Duration {
	if q := m.pool(p); q != nil {
		return max(m.layout.Quarantine, q.KeepFor)
	}
	return m.layout.Quarantine
}

func (m *model) tick(now time.Time) {
	passed := max(0, now.Sub(m.last))
	m.last = now
	for _, p := range m.places {
		if p.quarantine == nil {
			continue
		}
		if p.quarantine.time += passed; p.quarantine.time >= m.quarantineTime(p) {
			p.quarantine = nil
		}
	}
}

func (m *model) configure(l *layout) {
	m.layout = l
	for _, p := range m.places {
		for _, s := range p.stays {
			if s.asked == "" {
				s.asked = m.poolName(p)
			}
		}
	}
}

// restart is what the rebuilt allocator cannot know: who came first.
func (m *model) restart() {
	for _, p := range m.places {
		slices.SortFunc(p.stays, func(s, t *stay) int { return cmp.Compare(s.owner.UID, t.owner.UID) })
	}
}

func (p *place) stay(uid string) *stay {
	for _, s := range p.stays {
		if s.owner.UID == uid {
			return s
		}
	}
	return nil
}

func namespace(name string) string { return name[:strings.Index(name, "/")] }

// clash is why two cannot share: "key", "terms" or nothing.
func clash(o ipam.Owner, mine *ipam.Sharing, p ipam.Owner, theirs *ipam.Sharing) string {
	if o.Name == p.Name {
		return ""
	}
	if mine == nil || theirs == nil || mine.Key == "" || mine.Key != theirs.Key {
		return "key"
	}
	if !meets(o, mine, p, theirs) || mine.Backends != theirs.Backends {
		return "terms"
	}
	for _, port := range mine.Ports {
		if slices.Contains(theirs.Ports, port) {
			return "terms"
		}
	}
	return ""
}

func meets(o ipam.Owner, mine *ipam.Sharing, p ipam.Owner, theirs *ipam.Sharing) bool {
	a, b := namespace(o.Name), namespace(p.Name)
	return a == b || slices.Contains(mine.Namespaces, b) && slices.Contains(theirs.Namespaces, a)
}

// clashAt is the first clash on an address.
func clashAt(o ipam.Owner, terms *ipam.Sharing, p *place) (*stay, string) {
	for _, s := range p.stays {
		if c := clash(o, terms, s.owner, s.terms); c != "" {
			return s, c
		}
	}
	return nil, ""
}

func (m *model) restore(o ipam.Owner, a netip.Addr, terms *ipam.Sharing, since time.Time) (ipam.Owner, bool) {
	p := m.at(a)
	if s, c := clashAt(o, terms, p); c != "" {
		return s.owner, false
	}
	if s := p.stay(o.UID); s != nil {
		s.terms = terms
	} else {
		p.quarantine = nil
		p.stays = append(p.stays, &stay{o, terms, m.poolName(p), since})
		m.holds[o.UID] = append(m.holds[o.UID], p)
	}
	return o, true
}

func (m *model) restFrom(name string, a netip.Addr, since, now time.Time) {
	m.tick(now)
	p, age := m.at(a), max(0, now.Sub(since))
	if len(p.stays) == 0 && p.quarantine == nil && age < m.quarantineTime(p) {
		p.quarantine = &quarantined{name, age}
	}
}

// claimAll gives an owner addresses in addition to what it holds, all of them or
// none: those that it could name.
func (m *model) claimAll(req *ipam.Request, addrs []netip.Addr, since, now time.Time) ipam.Reason {
	m.tick(now)
	chosen, claimed := choice{}, choice{}
	for _, p := range m.holds[req.Owner.UID] {
		chosen[p.family] = append(chosen[p.family], p)
	}
	for _, a := range addrs {
		if p := m.at(a); !slices.Contains(req.Families, p.family) {
			return ipam.WrongFamily
		} else if !slices.Contains(claimed[p.family], p) {
			claimed[p.family] = append(claimed[p.family], p)
		}
	}
	again := *req
	again.Renumber = false
	for _, f := range req.Families {
		for _, p := range claimed[f] {
			if reason := m.claim(&again, p, chosen, nil); reason != "" {
				return reason
			}
			chosen[f] = append(chosen[f], p)
		}
	}
	for _, f := range req.Families {
		for _, p := range claimed[f] {
			if p.stay(req.Owner.UID) == nil {
				p.quarantine = nil
				p.stays = append(p.stays, &stay{req.Owner, req.Sharing, m.poolName(p), since})
				m.holds[req.Owner.UID] = append(m.holds[req.Owner.UID], p)
			}
		}
	}
	return ""
}

// leave takes an address from an owner.
func (m *model) leave(o ipam.Owner, p *place) {
	p.stays = slices.DeleteFunc(p.stays, func(s *stay) bool { return s.owner == o })
	if len(p.stays) == 0 && m.quarantineTime(p) > 0 {
		p.quarantine = &quarantined{name: o.Name}
	}
}

func (m *model) release(o ipam.Owner, now time.Time) (freed []netip.Addr) {
	m.tick(now)
	for _, p := range m.holds[o.UID] {
		freed = append(freed, p.addr)
		m.leave(o, p)
	}
	delete(m.holds, o.UID)
	return freed
}

func (m *model) revoke(a netip.Addr, now time.Time) {
	m.tick(now)
	p := m.at(a)
	for _, s := range p.stays {
		uid := s.owner.UID
		if m.holds[uid] = slices.DeleteFunc(m.holds[uid], func(q *place) bool { return q == p }); len(m.holds[uid]) == 0 {
			delete(m.holds, uid)
		}
	}
	p.stays = nil
}

func (m *model) held(uid string) (held []ipam.Held) {
	for _, p := range m.holds[uid] {
		h := ipam.Held{Addr: p.addr, Asked: p.stay(uid).asked}
		if q := m.pool(p); q != nil {
			h.Pool, h.Draining = q.Name, q.Draining
		} else {
			h.Why = m.whyStranded(p)
		}
		held = append(held, h)
	}
	return held
}

func (m *model) whyStranded(p *place) string {
	s := m.layout.at[p.n]
	switch {
	case s.pool < 0:
		return "in no pool"
	case len(s.bans) > 0:
		return slices.MinFunc(s.bans, func(a, b ban) int {
			return cmp.Or(cmp.Compare(a.size, b.size), cmp.Compare(a.from, b.from))
		}).why
	case p.family == ipam.IPv4:
		return fmt.Sprintf("excluded from pool %q, or the first or last address of one of its prefixes", m.layout.Pools[s.pool].Name)
	}
	return fmt.Sprintf("excluded from pool %q", m.layout.Pools[s.pool].Name)
}

// choice is what a request will hold.
type choice map[ipam.Family][]*place

// allocate returns a reason if it refuses.
func (m *model) allocate(req *ipam.Request, now time.Time) ([]ipam.Held, ipam.Reason) {
	m.tick(now)
	chosen := choice{}
	if reason := m.decide(req, chosen); reason != "" {
		m.abide(req)
		return nil, reason
	}
	m.settle(req, chosen, now)
	return m.held(req.Owner.UID), ""
}

func (m *model) decide(req *ipam.Request, chosen choice) ipam.Reason {
	wishes, want, all := choice{}, map[ipam.Family]int{}, 0
	for _, a := range req.Addresses {
		p := m.at(a)
		if !slices.Contains(req.Families, p.family) {
			return ipam.WrongFamily
		}
		if !slices.Contains(wishes[p.family], p) {
			wishes[p.family] = append(wishes[p.family], p)
		}
	}
	for _, f := range req.Families {
		if want[f] = len(wishes[f]); want[f] == 0 {
			want[f] = max(1, req.Count)
		}
	}
	for _, f := range req.Families {
		named, keeps, reserved := len(wishes[f]) > 0, m.kept(req, f), m.reserved(req, f)
		if !named && (len(keeps) < want[f] || req.Renumber || m.holdsReserved(req, f)) {
			wishes[f] = reserved
			want[f] = max(want[f], len(reserved))
		}
		for _, p := range wishes[f] {
			if reason := m.claim(req, p, chosen, wishes[f]); reason != "" {
				return reason
			}
			chosen[f] = append(chosen[f], p)
		}
		for _, p := range keeps {
			if !named && len(chosen[f]) < want[f] && !slices.Contains(chosen[f], p) {
				chosen[f] = append(chosen[f], p)
			}
		}
		all += want[f]
	}
	if all > ipam.MaxAddresses || req.Count > 1 && req.Sharing != nil && req.Sharing.Key != "" {
		return ipam.InvalidRequest
	}
	refused := map[ipam.Family]ipam.Reason{}
	for _, f := range req.Families {
		for len(chosen[f]) < want[f] {
			p, reason := m.join(req, f, chosen)
			if refused[f] = reason; p == nil && reason == "" {
				p = m.comeback(req, f, chosen)
			}
			if p == nil {
				break
			}
			chosen[f] = append(chosen[f], p)
		}
	}
	return m.draw(req, want, chosen, refused)
}

// kept are the addresses of the family that may stay.
func (m *model) kept(req *ipam.Request, f ipam.Family) (kept []*place) {
	for _, p := range m.holds[req.Owner.UID] {
		asked := p.stay(req.Owner.UID).asked
		named := len(req.Pools) == 0 || asked == "" || slices.Contains(req.Pools, asked) || slices.Contains(req.Pools, m.poolName(p))
		_, c := clashAt(req.Owner, req.Sharing, p)
		if p.family == f && named && c == "" && !avoids(req, p) && (!req.Renumber || m.renews(req, p)) {
			kept = append(kept, p)
		}
	}
	return kept
}

func avoids(req *ipam.Request, p *place) bool {
	return slices.Contains(req.Avoid, p.addr) && len(p.stays) == 1
}

// renews: a new Service could be given the address, and would not have to
// share another one.
func (m *model) renews(req *ipam.Request, p *place) bool {
	if !slices.Contains(m.open(req), m.pool(p)) || m.reservedForOther(req, p) {
		return false
	}
	shared, reason := m.join(req, p.family, choice{})
	return m.knows(req, p) || shared == nil && reason == ""
}

func (m *model) reserved(req *ipam.Request, f ipam.Family) (reserved []*place) {
	for _, r := range m.layout.Reservations {
		for _, a := range r.Addresses {
			p := m.at(a)
			if r.Service == req.Owner.Name && p.family == f && (len(req.Pools) == 0 || m.asksFor(req, p)) {
				reserved = append(reserved, p)
			}
		}
	}
	return reserved
}

// asksFor: a pool that the request names contains the address.
func (m *model) asksFor(req *ipam.Request, p *place) bool {
	i := m.layout.at[p.n].pool
	return i >= 0 && slices.Contains(req.Pools, m.layout.Pools[i].Name)
}

func (m *model) holdsReserved(req *ipam.Request, f ipam.Family) bool {
	return slices.ContainsFunc(m.holds[req.Owner.UID], func(p *place) bool {
		return p.family == f && m.layout.at[p.n].reserved == req.Owner.Name
	})
}

func (m *model) reservedForOther(req *ipam.Request, p *place) bool {
	name := m.layout.at[p.n].reserved
	return name != "" && name != req.Owner.Name
}

func (m *model) exists(name string) bool {
	return slices.ContainsFunc(m.layout.Pools, func(p config.Pool) bool { return p.Name == name })
}

func (m *model) claim(req *ipam.Request, p *place, chosen choice, wishes []*place) ipam.Reason {
	if p.stay(req.Owner.UID) == nil || req.Renumber {
		if reason := m.mayHave(req, p); reason != "" {
			return reason
		}
	}
	if _, c := clashAt(req.Owner, req.Sharing, p); c != "" {
		return conflict(c)
	}
	switch {
	case p.stay(req.Owner.UID) != nil:
		return ""
	case p.quarantine != nil && p.quarantine.name != req.Owner.Name:
		return ipam.AddressQuarantined
	case m.layout.at[p.n].reserved != req.Owner.Name && m.fills(req, p, m.pool(p), p.family, chosen, wishes):
		return ipam.QuotaExceeded
	}
	return ""
}

func conflict(c string) ipam.Reason {
	if c == "key" {
		return ipam.AddressInUse
	}
	return ipam.SharingConflict
}

// mayHave returns why the setup keeps a requested address from the request. Empty: it does not.
func (m *model) mayHave(req *ipam.Request, p *place) ipam.Reason {
	s := m.layout.at[p.n]
	mine := s.reserved == req.Owner.Name
	switch {
	case len(req.Pools) > 0 && !slices.ContainsFunc(req.Pools, m.exists):
		return ipam.PoolNotFound
	case s.pool < 0, len(req.Pools) > 0 && !slices.Contains(req.Pools, m.layout.Pools[s.pool].Name):
		return ipam.AddressOutsidePools
	case len(s.bans) > 0:
		return ipam.AddressForbidden
	case s.withheld:
		return ipam.AddressWithheld
	}
	q := &m.layout.Pools[s.pool]
	switch {
	case !mine && !q.Allows(req.Subject):
		return ipam.PoolNotAllowed
	case !mine && !q.MayRequest(req.Subject.Namespace):
		return ipam.RequestNotAllowed
	case s.reserved != "" && !mine:
		return ipam.AddressReserved
	case q.Draining:
		return ipam.PoolDraining
	}
	return ""
}

// fills: the namespace would hold more addresses of the pool than it may. p
// is the address that it would hold in addition, nil for one that is free.
func (m *model) fills(req *ipam.Request, p *place, q *config.Pool, f ipam.Family, chosen choice, wishes []*place) bool {
	if q.NamespaceQuota == 0 {
		return false
	}
	holds := map[*place]bool{}
	for _, other := range m.places {
		for _, s := range other.stays {
			stays := s.owner.UID != req.Owner.UID || slices.Contains(wishes, other) || slices.Contains(chosen[f], other)
			if stays && namespace(s.owner.Name) == namespace(req.Owner.Name) && m.pool(other) == q && other.family == f {
				holds[other] = true
			}
		}
	}
	for _, c := range chosen[f] {
		if m.pool(c) == q {
			holds[c] = true
		}
	}
	for _, other := range m.places {
		if other.quarantine != nil && other != p && namespace(other.quarantine.name) == namespace(req.Owner.Name) &&
			m.pool(other) == q && other.family == f {
			holds[other] = true
		}
	}
	return !holds[p] && len(holds) >= q.NamespaceQuota
}

// candidates is the pools that the request names, or may draw from without,
// best first; nil for one that does not exist.
func (m *model) candidates(req *ipam.Request) (pools []*config.Pool) {
	for _, name := range req.Pools {
		var found *config.Pool
		for i := range m.layout.Pools {
			if m.layout.Pools[i].Name == name {
				found = &m.layout.Pools[i]
			}
		}
		pools = append(pools, found)
	}
	if len(req.Pools) > 0 {
		return pools
	}
	for i := range m.layout.Pools {
		if m.layout.Pools[i].AutoAssign {
			pools = append(pools, &m.layout.Pools[i])
		}
	}
	slices.SortStableFunc(pools, func(p, q *config.Pool) int { return p.Priority - q.Priority })
	return pools
}

// open is the candidates that give anything.
func (m *model) open(req *ipam.Request) (pools []*config.Pool) {
	for _, q := range m.candidates(req) {
		if q != nil && q.Allows(req.Subject) && !q.Draining {
			pools = append(pools, q)
		}
	}
	return pools
}

// first is the place whose pool is asked first, there the lowest.
func (m *model) first(req *ipam.Request, places []*place) *place {
	for _, q := range m.open(req) {
		for _, p := range places {
			if m.pool(p) == q {
				return p
			}
		}
	}
	return nil
}

// knows: somebody who shares with the namespace is there under the key.
func (m *model) knows(req *ipam.Request, p *place) bool {
	return slices.ContainsFunc(p.stays, func(s *stay) bool {
		return s.owner.Name != req.Owner.Name && clash(req.Owner, req.Sharing, s.owner, s.terms) != "key" &&
			meets(req.Owner, req.Sharing, s.owner, s.terms)
	})
}

func (m *model) join(req *ipam.Request, f ipam.Family, chosen choice) (*place, ipam.Reason) {
	var fitting, others []*place
	open := m.open(req)
	for _, p := range m.places {
		if q := m.pool(p); p.family == f && slices.Contains(open, q) && m.knows(req, p) && !m.fills(req, p, q, f, chosen, nil) {
			if _, c := clashAt(req.Owner, req.Sharing, p); c == "" && !m.reservedForOther(req, p) {
				fitting = append(fitting, p)
			} else {
				others = append(others, p)
			}
		}
	}
	if len(fitting) > 0 {
		return m.first(req, fitting), ""
	}
	if len(others) == 0 {
		return nil, ""
	}
	p := m.first(req, others)
	if m.reservedForOther(req, p) {
		return nil, ipam.AddressReserved
	}
	_, c := clashAt(req.Owner, req.Sharing, p)
	return nil, conflict(c)
}

// comeback is the address of the family that waits for the Service.
func (m *model) comeback(req *ipam.Request, f ipam.Family, chosen choice) *place {
	var waiting []*place
	open := m.open(req)
	for _, p := range m.places {
		if p.family == f && !slices.Contains(chosen[f], p) && p.quarantine != nil && p.quarantine.name == req.Owner.Name &&
			slices.Contains(open, m.pool(p)) && !m.layout.at[p.n].conflict && !m.reservedForOther(req, p) &&
			!m.fills(req, p, m.pool(p), f, chosen, nil) {
			waiting = append(waiting, p)
		}
	}
	slices.SortStableFunc(waiting, func(p, q *place) int { return cmp.Compare(p.quarantine.time, q.quarantine.time) })
	return m.first(req, waiting)
}

// lowest is the pool's lowest free address of the family that is not chosen.
func (m *model) lowest(q *config.Pool, f ipam.Family, chosen choice) *place {
	for _, p := range m.places {
		if !slices.Contains(chosen[f], p) && p.family == f && m.pool(p) == q && len(p.stays) == 0 && p.quarantine == nil &&
			m.layout.at[p.n].reserved == "" && !m.layout.at[p.n].conflict {
			return p
		}
	}
	return nil
}

// obstacle is why a pool does not give a free address.
func (m *model) obstacle(req *ipam.Request, q *config.Pool, f ipam.Family, chosen choice) ipam.Reason {
	switch {
	case q == nil:
		return ipam.PoolNotFound
	case !q.Allows(req.Subject):
		return ipam.PoolNotAllowed
	case !m.layout.has(q, f):
		return ipam.FamilyUnavailable
	case q.Draining:
		return ipam.PoolDraining
	case m.fills(req, nil, q, f, chosen, nil):
		return ipam.QuotaExceeded
	case m.lowest(q, f, chosen) == nil:
		return ipam.PoolExhausted
	}
	return ""
}

func (m *model) draw(req *ipam.Request, want map[ipam.Family]int, chosen choice, refused map[ipam.Family]ipam.Reason) ipam.Reason {
	order := m.candidates(req)
	var missing []ipam.Family
	for _, f := range req.Families {
		if len(chosen[f]) < want[f] && refused[f] == "" {
			missing = append(missing, f)
		}
	}
	// The pool of what is settled comes first, if it is one to draw from.
	for _, f := range req.Families {
		i := slices.IndexFunc(chosen[f], func(p *place) bool { return m.pool(p) != nil })
		if i < 0 {
			continue
		}
		if q := m.pool(chosen[f][i]); slices.Contains(order, q) {
			order = append([]*config.Pool{q}, order...)
		}
		break
	}
	// The first pool with everything that is missing comes before all others, which come in the
	// order in which they are asked.
	gives := func(q *config.Pool) int {
		for _, f := range missing {
			if m.obstacle(req, q, f, chosen) != "" {
				return 1
			}
		}
		return 0
	}
	if i := slices.IndexFunc(order, func(q *config.Pool) bool { return gives(q) == 0 }); i >= 0 {
		order = append([]*config.Pool{order[i]}, m.candidates(req)...)
	} else {
		order = m.candidates(req)
	}
	why := map[ipam.Family]ipam.Reason{}
	for _, f := range req.Families {
		why[f] = refused[f]
		for len(chosen[f]) < want[f] && why[f] == "" {
			why[f] = m.drawFrom(req, order, f, chosen)
		}
		if why[f] == "" {
			continue
		}
		holds := slices.ContainsFunc(m.holds[req.Owner.UID], func(p *place) bool { return p.family == f })
		keeps := slices.ContainsFunc(chosen[f], func(p *place) bool { return p.stay(req.Owner.UID) != nil })
		if req.RequireAll || (req.Renumber || len(req.Avoid) > 0) && holds || keeps {
			return why[f]
		}
		chosen[f] = nil
	}
	best := why[req.Families[0]]
	for _, f := range req.Families {
		if len(chosen[f]) > 0 {
			return ""
		}
		if hope(why[f]) > hope(best) {
			best = why[f]
		}
	}
	return best
}

// drawFrom draws from the first pool that gives an address of the family, or
// returns why none does.
func (m *model) drawFrom(req *ipam.Request, order []*config.Pool, f ipam.Family, chosen choice) ipam.Reason {
	best := ipam.NoPool
	for _, q := range order {
		o := m.obstacle(req, q, f, chosen)
		if o == "" {
			chosen[f] = append(chosen[f], m.lowest(q, f, chosen))
			return ""
		}
		if hope(o) > hope(best) && (len(req.Pools) > 0 || o != ipam.PoolNotAllowed) {
			best = o
		}
	}
	return best
}

// hope is how close the reason is to an address.
func hope(r ipam.Reason) int {
	return slices.Index([]ipam.Reason{
		ipam.NoPool, ipam.PoolNotFound, ipam.FamilyUnavailable, ipam.PoolNotAllowed, ipam.PoolDraining,
		ipam.PoolExhausted, ipam.QuotaExceeded, ipam.AddressInUse, ipam.SharingConflict, ipam.AddressReserved,
	}, r)
}

// settle makes the owner hold exactly what was chosen.
func (m *model) settle(req *ipam.Request, chosen choice, now time.Time) {
	uid := req.Owner.UID
	before := m.holds[uid]
	m.holds[uid] = nil
	for _, f := range req.Families {
		for _, p := range chosen[f] {
			m.holds[uid] = append(m.holds[uid], p)
			s := p.stay(uid)
			if s == nil {
				p.quarantine = nil
				p.stays = append(p.stays, &stay{req.Owner, req.Sharing, m.poolName(p), now})
				continue
			}
			s.terms = req.Sharing
			switch name := m.poolName(p); {
			case slices.Contains(req.Pools, name):
				s.asked = name
			case s.asked == "" && len(req.Pools) > 0:
				s.asked = req.Pools[0]
			case s.asked == "":
				s.asked = "*"
			}
		}
	}
	for _, p := range before {
		if !slices.Contains(m.holds[uid], p) {
			m.leave(req.Owner, p)
		}
	}
}

// abide is what a refusal changes, and a request that cannot be read: the terms
// are those of the request, and where they clash the owner has gone.
func (m *model) abide(req *ipam.Request) {
	uid := req.Owner.UID
	m.holds[uid] = slices.DeleteFunc(m.holds[uid], func(p *place) bool {
		_, c := clashAt(req.Owner, req.Sharing, p)
		if c != "" {
			m.leave(req.Owner, p)
			return true
		}
		p.stay(uid).terms = req.Sharing
		return false
	})
}

func (m *model) stats(now time.Time) (stats []ipam.PoolStats) {
	m.tick(now)
	for i := range m.layout.Pools {
		q := &m.layout.Pools[i]
		for _, f := range []ipam.Family{ipam.IPv4, ipam.IPv6} {
			s := ipam.PoolStats{Pool: q.Name, Family: f, Draining: q.Draining}
			for _, p := range m.places {
				if p.family != f || m.pool(p) != q {
					continue
				}
				s.Size++
				switch {
				case len(p.stays) > 0:
					s.Assigned++
				case p.quarantine != nil:
					s.Quarantined++
				case m.layout.at[p.n].conflict:
					s.Conflicted++
				case m.layout.at[p.n].reserved != "":
					s.Reserved++
				default:
					s.Free++
				}
			}
			if m.layout.has(q, f) {
				stats = append(stats, s)
			}
		}
	}
	return stats
}

func (m *model) inQuarantine(now time.Time) (all []ipam.Quarantined) {
	m.tick(now)
	for _, p := range m.places {
		if p.quarantine != nil {
			since := now.Add(-p.quarantine.time)
			all = append(all, ipam.Quarantined{Addr: p.addr, Pool: m.poolName(p), Name: p.quarantine.name, Since: since,
				Until: since.Add(m.quarantineTime(p))})
		}
	}
	slices.SortStableFunc(all, func(r, s ipam.Quarantined) int { return r.Since.Compare(s.Since) })
	return all
}
