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

// maxScopes is how many scopes a view remembers. More are in nobody's use;
// labels of Services that change without end could leave more behind.
const maxScopes = 1 << 12

// scope is what VIPs have in common to which the same advertisements apply:
// the nodes that may own them. A VIP whose address left its pool belongs to
// the scopes of no pool, to which every advertisement applies.
type scope struct {
	Snapshot
	scopeKey
	advertisements []*config.Advertisement
	weights        map[string]int             // of the nodes that are selected
	elsewhere      map[string]bool            // those of them that are on other segments
	unplugged      map[string]bool            // those whose link to the segment is down
	severed        map[string]bool            // those that are apart, and whose link to the segment is that one
	tiers          []tier                     // the most preferred first
	keeps          bool                       // owners are kept
	direct         bool                       // connections are forwarded directly
	claimants      map[uint16]map[string]bool // if so: who claims a bucket
	whole          []tier                     // the same while all are able, see home
	impaired       bool                       // some node is, and not in the tiers
	resort         []tier                     // those with the impaired
	everywhere     []Backend                  // the nodes that keep connections of Services with policy Cluster
	everywhereAt   map[bool][]netip.Addr      // their addresses, by whether these are of IPv4
	parts          map[partKey]part           // what this node has of their connections

	// What interfaces returned last: Make asks for one node.
	node     string
	patterns []string
	refresh  time.Duration          // for the same node
	silences map[silenceKey]Silence // few differ: VIPs share their messages
}

type silenceKey struct {
	node, owner string
	reason      Reason
}

// scopeKey identifies a scope.
type scopeKey struct {
	pool *config.Pool // nil: outside all pools
	// applied has a byte for each of the pool's advertisements, which tells
	// whether it applies. Empty: all of them do.
	applied string
	// segment is the smallest of the nodes' subnets that contains the VIP: a
	// node is on a subnet that contains the one if it contains the other. The
	// zero value: there is none.
	segment netip.Prefix
}

// tier is the nodes of one weight: bounded load does not overrule preference.
type tier struct {
	weight int
	*election.Electorate
}

// scopeOf returns the scope that the VIP of the pool belongs to.
func (v *view) scopeOf(addr netip.Addr, pool *config.Pool) *scope {
	key := scopeKey{pool: pool}
	advertisements := v.advertisements(key.pool)
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

// advertisements returns those that announce VIPs of the pool by layer 2.
func (v *view) advertisements(pool *config.Pool) []*config.Advertisement {
	all, ok := v.advertised[pool]
	if ok || v.snapshot.Config == nil {
		return all
	}
	for i := range v.snapshot.Config.Advertisements {
		a := &v.snapshot.Config.Advertisements[i]
		if a.Layer2 != nil && (pool == nil || pool.AdvertisedBy(a.Name)) {
			all = append(all, a)
		}
	}
	v.advertised[pool] = all
	return all
}

// applied returns which of the advertisements apply to a VIP of these Services:
// those that select one of them. So no Service silences those that share its
// address. See scopeKey for the form.
func applied(advertisements []*config.Advertisement, services []*Service) string {
	if !slices.ContainsFunc(advertisements, func(a *config.Advertisement) bool { return len(a.ServiceSelector) > 0 }) {
		return ""
	}
	each := make([]byte, len(advertisements))
	for i, a := range advertisements {
		if slices.ContainsFunc(services, func(s *Service) bool { return a.ServiceSelector.Matches(s.Labels) }) {
			each[i] = 1
		}
	}
	return string(each)
}

// newScope returns the scope of the key, which tells what of the
// advertisements applies. What the election decided is taken over from the
// scope before, if there is one.
func newScope(s Snapshot, key scopeKey, advertisements []*config.Advertisement, before *scope) *scope {
	sc := &scope{Snapshot: s, scopeKey: key, weights: map[string]int{}, elsewhere: map[string]bool{}, unplugged: map[string]bool{},
		severed: map[string]bool{}, everywhereAt: map[bool][]netip.Addr{}, parts: map[partKey]part{}, silences: map[silenceKey]Silence{}}
	for i, a := range advertisements {
		if key.applied == "" || key.applied[i] != 0 {
			sc.advertisements = append(sc.advertisements, a)
		}
	}
	for name, n := range s.Nodes {
		if weight, selected := sc.weigh(n); selected {
			sc.weights[name] = weight
		}
	}
	sc.locate()
	byWeight := map[int]map[string]bool{}
	for name, weight := range sc.weights {
		if sc.elsewhere[name] {
			continue
		}
		if byWeight[weight] == nil {
			byWeight[weight] = map[string]bool{}
		}
		byWeight[weight][name] = sc.able(name) && !s.Nodes[name].impaired()
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

// locate finds the selected nodes that are on other segments, and those whose
// link is down. If no node is known to be on the right one, every one is as
// good: a router may have the subnet as directly connected. Nor does a link
// count that all have lost: they will have it back together. Nobody suffers for
// what is not known.
func (s *scope) locate() {
	known, linked := false, false
	for name := range s.weights {
		n := s.Nodes[name]
		on, up := s.reaches(n)
		known = known || on
		s.unplugged[name], s.severed[name] = on && !up, s.severs(n)
		s.elsewhere[name] = !on && n.Segments != nil
		linked = linked || s.sound(name) && !s.elsewhere[name] && !s.unplugged[name]
	}
	if !known {
		clear(s.elsewhere)
	}
	if !linked {
		clear(s.unplugged)
	}
}

// sound reports whether the node may own whatever VIPs are on its segments.
func (s *scope) sound(name string) bool {
	n := s.Nodes[name]
	return s.Speakers[name] && !n.Excluded && !n.NetworkUnavailable
}

// able reports whether the node may own the scope's VIPs.
func (s *scope) able(name string) bool {
	return !s.elsewhere[name] && s.sound(name) && !s.unplugged[name] && !s.severed[name]
}

// severs reports whether the node is apart and all its interfaces that could announce the
// VIPs are down, or the one by which it lost the others: a link that is back may be
// that of a segment where they own the VIPs.
func (s *scope) severs(n Node) bool {
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

// reaches reports whether the node announces on an interface whose subnet
// contains the VIP, or need not, and whether one of those is up on which it does.
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
	return s.segment.IsValid() && g.Subnet.Bits() <= s.segment.Bits() && g.Subnet.Contains(s.segment.Addr())
}

// weigh returns how much the node is preferred, and whether some advertisement
// selects it.
func (s *scope) weigh(n Node) (weight int, selected bool) {
	for _, a := range s.advertisements {
		if a.Layer2.NodeSelector.Matches(n.Labels) {
			weight, selected = weight+a.Layer2.Weight(n.Labels), true
		}
	}
	return weight, selected
}

// electorate returns the electorate of the nodes, made from the scope's one of
// that weight, if there is one. The scope may be nil.
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

// readClaims returns which nodes claim each bucket that is claimed.
func (s *scope) readClaims() map[uint16]map[string]bool {
	claimants := map[uint16]map[string]bool{}
	for name := range s.weights {
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

// owner returns the owner of the VIP: who has it, if it is kept, and else who
// is elected. Of several who say that they have it, the election's choice does:
// they are news on their way, the end of a partition, or share a bucket.
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

// lastResort returns the tiers with the impaired nodes, for VIPs that nobody else can own.
func (s *scope) lastResort() []tier {
	if s.resort == nil {
		s.resort = s.but(s.able)
	}
	return s.resort
}

// but returns the tiers with other nodes that are able.
func (s *scope) but(able func(name string) bool) (tiers []tier) {
	for _, t := range s.tiers {
		nodes := map[string]bool{}
		for name, weight := range s.weights {
			if weight == t.weight && !s.elsewhere[name] {
				nodes[name] = able(name)
			}
		}
		tiers = append(tiers, tier{t.weight, t.With(nodes)})
	}
	return tiers
}

// elect returns the owner of the VIP: of the most preferred nodes that there
// are, as the election has it. Nil: among all.
func elect(tiers []tier, addr netip.Addr, among map[string]bool) string {
	for _, t := range tiers {
		owner := ""
		if among == nil {
			owner = t.Owner(addr)
		} else {
			owner = t.OwnerAmong(addr, among)
		}
		if owner != "" {
			return owner
		}
	}
	return ""
}

// home reports whether the node owns the VIP while all nodes that may own it
// are able to.
func (s *scope) home(node string, addr netip.Addr, v vip) bool {
	if s.whole == nil {
		s.whole = s.but(func(string) bool { return true })
	}
	whole := *s
	whole.tiers, whole.keeps, whole.impaired = s.whole, false, false
	return whole.owner(addr, v) == node
}

// interfaces returns the union of the patterns of the advertisements that
// select the node, empty when one of them names none. It finds the shortest of
// their refresh intervals, too.
func (s *scope) interfaces(node string) []string {
	if s.node == node {
		return s.patterns
	}
	s.node, s.patterns, s.refresh = node, nil, 0
	every := false
	for _, a := range s.advertisements {
		if !a.Layer2.NodeSelector.Matches(s.Nodes[node].Labels) {
			continue
		}
		every = every || len(a.Layer2.Interfaces) == 0
		s.patterns = append(s.patterns, a.Layer2.Interfaces...)
		if r := a.Layer2.Refresh; r > 0 && (s.refresh == 0 || r < s.refresh) {
			s.refresh = r
		}
	}
	if every {
		s.patterns = nil
	}
	slices.Sort(s.patterns)
	s.patterns = slices.Compact(s.patterns)
	return s.patterns
}

// silence returns why the node, which does not own the VIP, does not.
func (s *scope) silence(node, owner string, v vip) Silence {
	key := silenceKey{node, owner, s.reason(node, owner, v)}
	silence, ok := s.silences[key]
	if !ok {
		silence = Silence{Reason: key.reason, Owner: owner, Message: s.message(key.reason, node, owner)}
		s.silences[key] = silence
	}
	return silence
}

// reason returns why the node, which does not own the VIP, does not: what
// holds for all nodes first, then what the operator decided, then what passes.
func (s *scope) reason(node, owner string, v vip) Reason {
	n, known := s.Nodes[node]
	weight, selected := s.weights[node]
	switch {
	case !known:
		return NodeUnknown
	case len(s.advertisements) == 0 && s.applied != "":
		return ServiceNotSelected
	case len(s.advertisements) == 0:
		return NoAdvertisement
	case !v.serving:
		return NoServingEndpoint
	case !selected:
		return NodeNotSelected
	case s.elsewhere[node]:
		return NotOnSegment
	case n.Excluded:
		return NodeExcluded
	case n.NetworkUnavailable:
		return NetworkUnavailable
	case s.unplugged[node], s.severed[node]:
		return LinkDown
	case v.local != nil && !v.local[node]:
		return NoLocalEndpoint
	case !s.Speakers[node], n.impaired():
		return SpeakerNotReady
	case owner != "" && weight < s.weights[owner]:
		return LessPreferred
	}
	return NotOwner
}

var messages = map[Reason]string{
	NoAdvertisement:    "no advertisement applies to its pool",
	ServiceNotSelected: "no serviceSelector of the advertisements selects its Service",
	NoServingEndpoint:  "no endpoint takes traffic",
	NoLocalEndpoint:    "externalTrafficPolicy is Local and no endpoint on this node takes traffic",
	NodeNotSelected:    "the advertisements select other nodes",
	NotOnSegment:       "the advertisements announce on no interface of this node that is on its subnet",
	NodeExcluded: "the node has the label node.kubernetes.io/exclude-from-external-load-balancers, or the taint " +
		"node.kubernetes.io/out-of-service or ToBeDeletedByClusterAutoscaler",
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
		return fmt.Sprintf("%s: it is preferred by %d, this node by %d", owned, s.weights[owner], s.weights[node])
	case r == NoAdvertisement, r == ServiceNotSelected, r == NoServingEndpoint:
		return text
	case owner == "":
		return text + "; nobody owns it"
	}
	return text + "; " + owned
}
