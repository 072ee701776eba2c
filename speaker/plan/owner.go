package plan

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"time"

	"github.com/lodestone-lb/lodestone/pkg/config"
	"github.com/lodestone-lb/lodestone/pkg/report"
	"github.com/lodestone-lb/lodestone/speaker/election"
)

// maxScopes is how many scopes a view remembers. It bounds the memory when labels of Services change all
// the time; no cluster needs so many at once.
const maxScopes = 1 << 12

// scope has the nodes that may own the VIPs to which the same advertisements apply. A VIP that is outside
// all pools, because the pools have changed, has a scope without a pool, to which every advertisement
// applies.
type scope struct {
	Snapshot
	scopeKey
	advertisements []*config.Advertisement
	candidates     map[string]*candidate      // the selected nodes
	tiers          []tier                     // the most preferred first
	keeps          bool                       // owners are kept
	claimants      map[uint16]map[string]bool // if owners are kept: the nodes that claim a bucket
	direct         bool                       // connections are forwarded directly
	whole          []tier                     // the tiers if all nodes were able, see home
	impaired       bool                       // a selected node is impaired, and not able in the tiers
	resort         []tier                     // the tiers in which impaired nodes are able
	everywhere     []Backend                  // the nodes that keep connections of Services with policy Cluster
	everywhereAt   map[bool][]netip.Addr      // their addresses; the key is whether these are IPv4
	parts          map[partKey]part           // this node's part of their connections

	// The last answer of interfaces, and the node that it is about: Make asks for one node.
	node     string
	patterns []string
	refresh  time.Duration

	silences map[silenceKey]Silence // many VIPs share one, to save memory
}

// candidate is a node that an advertisement selects.
type candidate struct {
	weight    int
	elsewhere bool // on other segments
	unplugged bool // its link to the segment is down
	apart     bool // it lost the others with the link to this segment
}

type silenceKey struct {
	node, owner string
	reason      Reason
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

// tier has the nodes of one weight. Load is balanced within a tier: it does not overrule preference.
type tier struct {
	weight int
	*election.Electorate
}

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
	sc := &scope{Snapshot: s, scopeKey: key, candidates: map[string]*candidate{}, everywhereAt: map[bool][]netip.Addr{},
		parts: map[partKey]part{}, silences: map[silenceKey]Silence{}}
	for i, a := range advertisements {
		if key.applied == "" || key.applied[i] != 0 {
			sc.advertisements = append(sc.advertisements, a)
		}
	}
	for name, n := range s.Nodes {
		if weight, selected := sc.weigh(n); selected {
			sc.candidates[name] = &candidate{weight: weight}
		}
	}
	sc.locate()
	byWeight := map[int]map[string]bool{}
	for name, c := range sc.candidates {
		if c.elsewhere {
			continue
		}
		if byWeight[c.weight] == nil {
			byWeight[c.weight] = map[string]bool{}
		}
		byWeight[c.weight][name] = sc.able(name) && !s.Nodes[name].impaired()
		sc.impaired = sc.impaired || s.Nodes[name].impaired()
	}
	sc.keeps = slices.ContainsFunc(sc.advertisements, func(a *config.Advertisement) bool { return a.Layer2.KeepOwner })
	sc.direct = slices.ContainsFunc(sc.advertisements, func(a *config.Advertisement) bool { return a.Layer2.Direct })
	if sc.keeps {
		sc.claimants = sc.readClaims()
	}
	for _, weight := range slices.Backward(slices.Sorted(maps.Keys(byWeight))) {
		sc.tiers = append(sc.tiers, tier{weight, before.electorate(weight, byWeight[weight])})
	}
	return sc
}

// locate finds the selected nodes that are on other segments, and those whose link is down. If no node
// is known to be on the VIP's segment, all nodes count as on it: a router may have the subnet as
// directly connected. If all nodes have lost their links, the links count as up: they will come back
// together. So a node is never left out because something is unknown.
func (s *scope) locate() {
	known, linked := false, false
	for name, c := range s.candidates {
		n := s.Nodes[name]
		on, up := s.reaches(n)
		known = known || on
		c.elsewhere, c.unplugged, c.apart = !on && n.Segments != nil, on && !up, s.isApart(n)
		linked = linked || s.sound(name) && !c.elsewhere && !c.unplugged
	}
	for _, c := range s.candidates {
		c.elsewhere, c.unplugged = c.elsewhere && known, c.unplugged && linked
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

// isOf reports whether the VIPs are on the segment.
func (s *scope) isOf(g report.Segment) bool {
	return s.segment.IsValid() && contains(g.Subnet, s.segment)
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

// electorate returns the electorate of the nodes. It is made from the scope's electorate of that weight,
// if there is one. The scope may be nil.
func (s *scope) electorate(weight int, nodes map[string]bool) *election.Electorate {
	if s != nil {
		for _, t := range s.tiers {
			if t.weight == weight {
				return t.With(nodes)
			}
		}
	}
	return election.New(nodes)
}

// readClaims returns the nodes that claim a bucket, by bucket.
func (s *scope) readClaims() map[uint16]map[string]bool {
	claimants := map[uint16]map[string]bool{}
	for name := range s.candidates {
		claims := s.Nodes[name].Claims
		if claims == (report.Claims{}) {
			continue
		}
		for b := range report.Buckets {
			if claims.Has(b) {
				if claimants[b] == nil {
					claimants[b] = map[string]bool{}
				}
				claimants[b][name] = true
			}
		}
	}
	return claimants
}

// owner returns the owner of the VIP, "" if there is none. If owners are kept, it is the node that claims
// the VIP. If several nodes claim it, one of them is elected: the claims are not up to date, a partition
// has just ended, or the nodes claim other VIPs of the same bucket.
func (s *scope) owner(addr netip.Addr, v vip) string {
	if !v.serving {
		return ""
	}
	owner := s.ownerIn(s.tiers, addr, v)
	if owner == "" && s.impaired {
		owner = s.ownerIn(s.lastResort(), addr, v)
	}
	return owner
}

func (s *scope) ownerIn(tiers []tier, addr netip.Addr, v vip) string {
	if s.keeps {
		claimants := s.claimants[report.Bucket(addr)]
		if v.local != nil {
			claimants = maps.Clone(claimants)
			maps.DeleteFunc(claimants, func(name string, _ bool) bool { return !v.local[name] })
		}
		if len(claimants) > 0 {
			if owner := elect(tiers, addr, claimants); owner != "" {
				return owner
			}
		}
	}
	return elect(tiers, addr, v.local)
}

// lastResort returns the tiers in which impaired nodes are able, for VIPs that nobody else can own.
func (s *scope) lastResort() []tier {
	if s.resort == nil {
		s.resort = s.tiersOf(s.able)
	}
	return s.resort
}

// tiersOf returns the tiers in which the nodes are able that able reports.
func (s *scope) tiersOf(able func(name string) bool) (tiers []tier) {
	for _, t := range s.tiers {
		nodes := map[string]bool{}
		for name, c := range s.candidates {
			if c.weight == t.weight && !c.elsewhere {
				nodes[name] = able(name)
			}
		}
		tiers = append(tiers, tier{t.weight, t.With(nodes)})
	}
	return tiers
}

// elect returns the owner of the VIP, elected in the first tier that has a candidate. among are the
// candidates. Nil: all nodes.
func elect(tiers []tier, addr netip.Addr, among map[string]bool) string {
	for _, t := range tiers {
		if owner := t.OwnerAmong(addr, among); owner != "" {
			return owner
		}
	}
	return ""
}

// home reports whether the node would own the VIP if all selected nodes were able.
func (s *scope) home(node string, addr netip.Addr, v vip) bool {
	if s.whole == nil {
		s.whole = s.tiersOf(func(string) bool { return true })
	}
	whole := *s
	whole.tiers, whole.keeps, whole.impaired = s.whole, false, false
	return whole.owner(addr, v) == node
}

// interfaces returns the union of the patterns of the advertisements that select the node, empty if one
// of them names no pattern, and the shortest of their refresh intervals.
func (s *scope) interfaces(node string) (patterns []string, refresh time.Duration) {
	if s.node == node {
		return s.patterns, s.refresh
	}
	every := false
	for _, a := range s.advertisements {
		if !a.Layer2.NodeSelector.Matches(s.Nodes[node].Labels) {
			continue
		}
		every = every || len(a.Layer2.Interfaces) == 0
		patterns = append(patterns, a.Layer2.Interfaces...)
		if r := a.Layer2.Refresh; r > 0 && (refresh == 0 || r < refresh) {
			refresh = r
		}
	}
	if every {
		patterns = nil
	}
	slices.Sort(patterns)
	s.node, s.patterns, s.refresh = node, slices.Compact(patterns), refresh
	return s.patterns, s.refresh
}

// silence returns why the node does not own the VIP.
func (s *scope) silence(node, owner string, v vip) Silence {
	key := silenceKey{node, owner, s.reason(node, owner, v)}
	silence, ok := s.silences[key]
	if !ok {
		silence = Silence{Reason: key.reason, Owner: owner, Message: s.message(key.reason, node, owner)}
		s.silences[key] = silence
	}
	return silence
}

// reason returns why the node does not own the VIP. Reasons that hold for all nodes come first, then
// decisions of the operator, then temporary states.
func (s *scope) reason(node, owner string, v vip) Reason {
	n, known := s.Nodes[node]
	c, selected := s.candidates[node]
	switch {
	case !known:
		return NodeUnknown
	case s.Config.AnnouncedByOthers():
		return AnnouncedByOthers
	case len(s.advertisements) == 0 && s.applied != "":
		return ServiceNotSelected
	case len(s.advertisements) == 0:
		return NoAdvertisement
	case !v.serving:
		return NoServingEndpoint
	case !selected:
		return NodeNotSelected
	case c.elsewhere:
		return NotOnSegment
	case n.Excluded(s.Config):
		return NodeExcluded
	case n.NetworkUnavailable:
		return NetworkUnavailable
	case c.unplugged, c.apart:
		return LinkDown
	case v.local != nil && !v.local[node]:
		return NoLocalEndpoint
	case !s.Speakers[node], n.impaired():
		return SpeakerNotReady
	case owner != "" && c.weight < s.candidates[owner].weight:
		return LessPreferred
	}
	return NotOwner
}

var messages = map[Reason]string{
	AnnouncedByOthers:  "the configuration leaves it to others: advertisements: []",
	NoAdvertisement:    "no advertisement applies to its pool",
	ServiceNotSelected: "no serviceSelector of the advertisements selects its Service",
	NoServingEndpoint:  "no endpoint takes traffic",
	NoLocalEndpoint:    "externalTrafficPolicy is Local and no endpoint on this node takes traffic",
	NodeNotSelected:    "the advertisements select other nodes",
	NotOnSegment:       "the advertisements announce on no interface of this node that is on its subnet",
	NodeExcluded: "the node has the label node.kubernetes.io/exclude-from-external-load-balancers, or the taint " +
		"node.kubernetes.io/out-of-service or ToBeDeletedByClusterAutoscaler, or one of the configuration's excludeTaints",
	NetworkUnavailable: "the node's condition NetworkUnavailable is set",
	LinkDown:           "the node's interfaces on its subnet are down",
	SpeakerNotReady:    "the node's speaker is not ready",
	NodeUnknown:        "the API server has no such node",
	NoPeer:             "no BGP peer of the advertisements selects this node",
	NotPermitted:       "bgpPermit of the configuration does not contain it",
	NoSession:          "this node has no session with the BGP peers of the advertisements",
}

func (s *scope) message(r Reason, node, owner string) string {
	text := messages[r]
	switch {
	case s.Config == nil:
		text = "no configuration is in force"
	case r == NotOnSegment && s.segment.IsValid():
		text = fmt.Sprintf("the advertisements announce on no interface of this node that is on %s", s.segment)
	case r == NoAdvertisement && s.pool != nil:
		text = fmt.Sprintf("no advertisement applies to pool %q", s.pool.Name)
	case r == ServiceNotSelected && s.pool != nil:
		text = fmt.Sprintf("no serviceSelector of the advertisements for pool %q selects its Service", s.pool.Name)
	}
	owned := fmt.Sprintf("node %s owns it", owner)
	switch {
	case r == NotOwner:
		return owned
	case r == LessPreferred:
		return fmt.Sprintf("%s: it is preferred by %d, this node by %d", owned, s.candidates[owner].weight,
			s.candidates[node].weight)
	case r == AnnouncedByOthers, r == NoAdvertisement, r == ServiceNotSelected, r == NoServingEndpoint:
		return text
	case owner == "":
		return text + "; nobody owns it"
	}
	return text + "; " + owned
}
