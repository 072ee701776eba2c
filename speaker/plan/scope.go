package plan

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"

	"github.com/lodestone-lb/lodestone/pkg/config"
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
	weights        map[string]int  // of the nodes that are selected
	elsewhere      map[string]bool // those of them that are on other segments
	tiers          []tier          // the most preferred first
	whole          []tier          // the same while all are able, see home

	// What interfaces returned last: Make asks for one node.
	node     string
	patterns []string
	silences map[silenceKey]Silence // few differ: VIPs share their messages
}

type silenceKey struct {
	node, owner string
	reason      Reason
}

// scopeKey tells scopes apart.
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

// scopeOf returns the scope that the VIP belongs to: one of the pool that
// contains it, or else of the one that leases it.
func (v *view) scopeOf(addr netip.Addr) *scope {
	var key scopeKey
	if cfg := v.snapshot.Config; cfg != nil {
		var listed bool
		if key.pool, listed = cfg.PoolOf(addr); !listed {
			key.pool, _ = cfg.PoolOn(v.lease(addr))
		}
	}
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
		if a.Layer2 != nil && (pool == nil || len(pool.Advertise) == 0 || slices.Contains(pool.Advertise, a.Name)) {
			all = append(all, a)
		}
	}
	v.advertised[pool] = all
	return all
}

// applied tells which of the advertisements apply to a VIP of these Services:
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
	sc := &scope{Snapshot: s, scopeKey: key, weights: map[string]int{}, elsewhere: map[string]bool{}, silences: map[silenceKey]Silence{}}
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
		n := s.Nodes[name]
		byWeight[weight][name] = s.Speakers[name] && !n.Excluded && !n.NetworkUnavailable
	}
	for _, weight := range slices.Backward(slices.Sorted(maps.Keys(byWeight))) {
		sc.tiers = append(sc.tiers, tier{weight, before.electorate(weight, byWeight[weight])})
	}
	return sc
}

// locate finds the selected nodes that are on other segments. If no node is
// known to be on the right one, every one is as good: a router may have the
// subnet as directly connected. Nobody suffers for what is not known.
func (s *scope) locate() {
	known := false
	for name := range s.weights {
		switch n := s.Nodes[name]; {
		case s.isOnSegment(n):
			known = true
		case n.Segments != nil:
			s.elsewhere[name] = true
		}
	}
	if !known {
		clear(s.elsewhere)
	}
}

// isOnSegment reports whether the node announces on an interface whose subnet
// contains the VIP, or need not.
func (s *scope) isOnSegment(n Node) bool {
	return slices.ContainsFunc(s.advertisements, func(a *config.Advertisement) bool {
		return a.NodeSelector.Matches(n.Labels) && (a.Layer2.AnySegment || slices.ContainsFunc(n.Segments, func(g Segment) bool {
			return s.segment.IsValid() && g.Subnet.Bits() <= s.segment.Bits() && g.Subnet.Contains(s.segment.Addr()) && g.answers(a.Layer2.Interfaces)
		}))
	})
}

// weigh returns how much the node is preferred, and whether some advertisement
// selects it.
func (s *scope) weigh(n Node) (weight int, selected bool) {
	for _, a := range s.advertisements {
		if a.NodeSelector.Matches(n.Labels) {
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

// owner returns the owner of the VIP: of the most preferred nodes that there
// are, as the election has it.
func (s *scope) owner(addr netip.Addr, v vip) string {
	if !v.serving {
		return ""
	}
	for _, t := range s.tiers {
		owner := ""
		if v.local == nil {
			owner = t.Owner(addr)
		} else {
			owner = t.OwnerAmong(addr, v.local)
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
		for _, t := range s.tiers {
			nodes := map[string]bool{}
			for name, weight := range s.weights {
				if weight == t.weight && !s.elsewhere[name] {
					nodes[name] = true
				}
			}
			s.whole = append(s.whole, tier{t.weight, t.With(nodes)})
		}
	}
	whole := *s
	whole.tiers = s.whole
	return whole.owner(addr, v) == node
}

// interfaces returns the union of the patterns of the advertisements that
// select the node, empty when one of them names none.
func (s *scope) interfaces(node string) []string {
	if s.node == node {
		return s.patterns
	}
	s.node, s.patterns = node, nil
	for _, a := range s.advertisements {
		if !a.NodeSelector.Matches(s.Nodes[node].Labels) {
			continue
		}
		if len(a.Layer2.Interfaces) == 0 {
			s.patterns = nil
			break
		}
		s.patterns = append(s.patterns, a.Layer2.Interfaces...)
	}
	slices.Sort(s.patterns)
	s.patterns = slices.Compact(s.patterns)
	return s.patterns
}

// silence tells why the node, which does not own the VIP, does not.
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
	case v.local != nil && !v.local[node]:
		return NoLocalEndpoint
	case !s.Speakers[node]:
		return SpeakerNotReady
	case owner != "" && weight < s.weights[owner]:
		return LessPreferred
	}
	return NotOwner
}

var messages = map[Reason]string{
	NoAdvertisement:    "no layer-2 advertisement applies to its pool",
	ServiceNotSelected: "no serviceSelector of the advertisements selects its Service",
	NoServingEndpoint:  "no endpoint takes traffic",
	NoLocalEndpoint:    "externalTrafficPolicy is Local and no endpoint on this node takes traffic",
	NodeNotSelected:    "the advertisements select other nodes",
	NotOnSegment:       "the advertisements announce on no interface of this node that is on its subnet",
	NodeExcluded:       "the node has the label node.kubernetes.io/exclude-from-external-load-balancers, or the taint node.kubernetes.io/out-of-service or ToBeDeletedByClusterAutoscaler",
	NetworkUnavailable: "the node's condition NetworkUnavailable is set",
	SpeakerNotReady:    "the node's speaker is not ready",
	NodeUnknown:        "the API server has no such node",
}

func (s *scope) message(r Reason, node, owner string) string {
	text := messages[r]
	switch {
	case s.Config == nil:
		text = "no configuration is in force"
	case r == NotOnSegment && s.segment.IsValid():
		text = fmt.Sprintf("the advertisements announce on no interface of this node that is on %s", s.segment)
	case r == NoAdvertisement && s.pool != nil:
		text = fmt.Sprintf("no layer-2 advertisement applies to pool %q", s.pool.Name)
	case r == ServiceNotSelected && s.pool != nil:
		text = fmt.Sprintf("no serviceSelector of the advertisements for pool %q selects its Service", s.pool.Name)
	}
	switch {
	case r == NotOwner:
		return fmt.Sprintf("node %s owns it", owner)
	case r == LessPreferred:
		return fmt.Sprintf("node %s owns it: it is preferred by %d, this node by %d", owner, s.weights[owner], s.weights[node])
	case r == NoAdvertisement, r == ServiceNotSelected, r == NoServingEndpoint:
		return text
	case owner == "":
		return text + "; nobody announces it"
	}
	return fmt.Sprintf("%s; node %s announces it", text, owner)
}
