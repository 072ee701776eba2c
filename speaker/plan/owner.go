package plan

import (
	"net/netip"
	"slices"

	"github.com/lodestone-lb/lodestone/pkg/config"
	"github.com/lodestone-lb/lodestone/pkg/report"
)

// scope decides which node owns a VIP. All VIPs of a pool to which the same advertisements apply, on one
// segment, have the same scope. A VIP that is outside all pools, because the pools have changed, has a scope
// without a pool, to which every advertisement applies.
type scope struct {
	Snapshot
	scopeKey
	advertisements []*config.Advertisement
	candidates     map[string]*candidate // the selected nodes

	current  *ballot // among the nodes that are able, and not impaired
	impaired bool    // a selected node is impaired
	resort   *ballot // among all that are able. See lastResort
	whole    *ballot // among all selected nodes. See home

	anywhere   bool // no selected node is known to be on the segment: all are. See locate
	direct     bool // connections are forwarded directly
	everywhere everywhere
	silences   map[silenceKey]Silence // many VIPs share one, to save memory
}

// scopeKey identifies a scope.
type scopeKey struct {
	pool *config.Pool // nil: outside all pools
	// applied has a byte for each of the pool's advertisements: 1 if it applies. Empty: all apply.
	applied string
	// segment is the smallest of the nodes' subnets that contains the VIP. A subnet contains the VIP
	// if it contains this one. The zero value: there is none.
	segment netip.Prefix
}

// candidate is a node that an advertisement selects.
type candidate struct {
	weight    int
	elsewhere bool    // on other segments
	unplugged bool    // its links to the segment are down
	apart     bool    // it lost the others with the link to this segment
	layer2    *Layer2 // see scope.layer2
}

// owner returns the owner of the VIP, "" if there is none.
func (s *scope) owner(addr netip.Addr, v vip) string {
	if !v.serving {
		return ""
	}
	owner := s.current.elect(addr, v.local)
	if owner == "" && s.impaired {
		owner = s.lastResort().elect(addr, v.local)
	}
	return owner
}

// lastResort returns the ballot for VIPs that only an impaired node can own.
func (s *scope) lastResort() *ballot {
	if s.resort == nil {
		s.resort = &ballot{s.tiers(s.current, s.able), s.current.claimants}
	}
	return s.resort
}

// home reports whether the node would own the VIP if all selected nodes were able.
func (s *scope) home(node string, addr netip.Addr, v vip) bool {
	if s.whole == nil {
		s.whole = &ballot{tiers: s.tiers(s.current, func(string) bool { return true })}
	}
	return s.whole.elect(addr, v.local) == node
}

// layer2 returns how the candidate announces VIPs, by the advertisements that select it: on the union of their
// interfaces, or on all if one of them names none; on any segment if one of them has anySegment; and after the shortest of
// their refresh intervals.
func (s *scope) layer2(node string) Layer2 {
	c := s.candidates[node]
	if c.layer2 != nil {
		return *c.layer2
	}
	l := Layer2{Keep: s.keeps()}
	every := false
	for _, a := range s.advertisements {
		if !a.Layer2.NodeSelector.Matches(s.Nodes[node].Labels) {
			continue
		}
		every = every || len(a.Layer2.Interfaces) == 0
		l.Interfaces = append(l.Interfaces, a.Layer2.Interfaces...)
		l.AnySegment = l.AnySegment || a.Layer2.AnySegment
		if r := a.Layer2.Refresh; r > 0 && (l.Refresh == 0 || r < l.Refresh) {
			l.Refresh = r
		}
	}
	if every {
		l.Interfaces = nil
	}
	slices.Sort(l.Interfaces)
	l.Interfaces = slices.Compact(l.Interfaces)
	c.layer2 = &l
	return l
}

// keeps reports whether an owner keeps its VIPs when a better one returns.
func (s *scope) keeps() bool {
	return slices.ContainsFunc(s.advertisements, func(a *config.Advertisement) bool { return a.Layer2.KeepOwner })
}

// maxScopes is how many scopes a view remembers. It bounds the memory when labels of Services change all
// the time; no cluster needs so many at once.
const maxScopes = 1 << 12

// scopeOf returns the scope that the VIP of the pool belongs to.
func (v *view) scopeOf(addr netip.Addr, pool *config.Pool) *scope {
	key := scopeKey{pool: pool}
	byLayer2 := func(a *config.Advertisement) bool { return a.Layer2 != nil }
	advertisements := v.advertised.of(pool, v.snapshot.Config, byLayer2)
	key.applied, key.segment = applied(advertisements, v.sharers[addr]), v.segments.smallest(addr)
	if s := v.scopes[key]; s != nil {
		return s
	}
	if len(v.scopes) >= maxScopes {
		clear(v.scopes)
	}
	s := newScope(v.snapshot, key, advertisements, v.before[key])
	v.scopes[key] = s
	return s
}

// newScope returns the scope of the key. The results of the election come from the scope before, if
// there is one.
func newScope(s Snapshot, key scopeKey, advertisements []*config.Advertisement, before *scope) *scope {
	sc := &scope{Snapshot: s, scopeKey: key, candidates: map[string]*candidate{}, everywhere: newEverywhere(),
		silences: map[silenceKey]Silence{}}
	for i, a := range advertisements {
		if key.applied == "" || key.applied[i] != 0 {
			sc.advertisements = append(sc.advertisements, a)
			sc.direct = sc.direct || a.Layer2.Direct
		}
	}
	for name, n := range s.Nodes {
		if weight, selected := sc.weigh(n); selected {
			sc.candidates[name] = &candidate{weight: weight}
		}
	}
	sc.locate()
	for name, c := range sc.candidates {
		sc.impaired = sc.impaired || !c.elsewhere && s.Nodes[name].impaired()
	}
	last := &ballot{}
	if before != nil {
		last = before.current
	}
	sc.current = &ballot{tiers: sc.tiers(last, func(name string) bool { return sc.able(name) && !s.Nodes[name].impaired() })}
	if sc.keeps() {
		sc.current.claimants = sc.readClaims()
	}
	return sc
}

// locate finds the selected nodes that are on other segments, and those whose link is down. If no node
// is known to be on the VIP's segment, all nodes count as on it, with all interfaces that the advertisements
// announce on: a router may have the subnet as directly connected. If all nodes have lost their links, the
// links count as up: they will come back together. So a node is never left out because something is unknown.
func (s *scope) locate() {
	linked, anywhere := false, true
	for name := range s.candidates {
		if on, _ := s.reaches(s.Nodes[name]); on {
			anywhere = false
			break
		}
	}
	s.anywhere = anywhere
	for name, c := range s.candidates {
		n := s.Nodes[name]
		on, up := s.reaches(n)
		c.elsewhere, c.unplugged, c.apart = !on && n.Segments != nil, on && !up, s.isApart(n)
		c.elsewhere = c.elsewhere && !anywhere
		linked = linked || s.sound(name) && !c.elsewhere && !c.unplugged
	}
	for _, c := range s.candidates {
		c.unplugged = c.unplugged && linked
	}
}

// able reports whether the candidate may own the scope's VIPs.
func (s *scope) able(name string) bool {
	c := s.candidates[name]
	return !c.elsewhere && s.sound(name) && !c.unplugged && !c.apart
}

// isApart reports whether the node is apart from the others on the scope's segment: it has lost the
// others with a link, and each of its interfaces that could announce the VIPs is down or has that link.
// Such a link may be back, but on that segment the others own the VIPs.
func (s *scope) isApart(n Node) bool {
	if n.Apart == "" {
		return false
	}
	works := func(g report.Segment) bool { return g.Interface != n.Apart && !g.Down }
	on := false
	for _, a := range s.advertisements {
		for _, g := range n.Segments {
			if a.Layer2.NodeSelector.Matches(n.Labels) && answers(g, a.Layer2.Interfaces) && (a.Layer2.AnySegment || s.isOf(g)) {
				if works(g) {
					return false
				}
				on = true
			}
		}
	}
	return on || !slices.ContainsFunc(n.Segments, works)
}

// reaches reports whether the node has an interface on which it announces the VIPs, and whether one of
// these interfaces is up. With anySegment the subnet of the interface does not matter.
func (s *scope) reaches(n Node) (on, up bool) {
	down := false
	for _, a := range s.advertisements {
		if !a.Layer2.NodeSelector.Matches(n.Labels) {
			continue
		}
		on = on || a.Layer2.AnySegment
		for _, g := range n.Segments {
			if answers(g, a.Layer2.Interfaces) && (a.Layer2.AnySegment || s.isOf(g)) {
				on, up, down = true, up || !g.Down, down || g.Down
			}
		}
	}
	return on, up || !down
}

// isOf reports whether the VIPs are on the segment, or may be.
func (s *scope) isOf(g report.Segment) bool {
	return s.anywhere || s.segment.IsValid() && contains(g.Subnet, s.segment)
}

// weigh returns the weight of the node, and whether an advertisement selects it.
func (s *scope) weigh(n Node) (weight int, selected bool) {
	for _, a := range s.advertisements {
		if a.Layer2.NodeSelector.Matches(n.Labels) {
			weight, selected = weight+a.Layer2.Weight(n.Labels), true
		}
	}
	return weight, selected
}
