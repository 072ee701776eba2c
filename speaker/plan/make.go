package plan

import (
	"fmt"
	"net/netip"
	"slices"

	"github.com/lodestone-lb/lodestone/pkg/config"
	"github.com/lodestone-lb/lodestone/speaker/election"
)

// Make decides what the node announces. Each VIP of the snapshot is either in
// the plan's Layer2 or, with the reason, in Silent.
//
// The decision is per VIP: Services that share one have one owner, a node that
// each of them accepts. Those without any serving endpoint have no say, or one
// of them would silence the others.
func Make(node string, s Snapshot) Plan {
	p := Plan{Layer2: map[netip.Addr]Layer2{}, Silent: map[netip.Addr]Silence{}}
	view := newView(s)
	silences := map[silenceKey]Silence{} // few differ: VIPs share their messages
	for addr, v := range view.vips {
		scope := view.scopeOf(addr)
		owner := scope.owner(addr, v)
		if owner == node && node != "" {
			p.Layer2[addr] = Layer2{Interfaces: scope.interfaces(node)}
			continue
		}
		key := silenceKey{scope, scope.reason(node, v), owner}
		silence, ok := silences[key]
		if !ok {
			silence = Silence{Reason: key.reason, Owner: owner, Message: scope.message(key.reason, owner)}
			silences[key] = silence
		}
		p.Silent[addr] = silence
	}
	p.Limits, p.LimitErrs = limits(s.Services, p.Layer2)
	return p
}

// limits returns the limits at the VIPs that are owned, and the errors of
// those that cannot be in force.
func limits(services []Service, owned map[netip.Addr]Layer2) (map[LimitKey]Limit, map[string]error) {
	limits, errs := map[LimitKey]Limit{}, map[string]error{}
	for i := range services {
		s := &services[i]
		if s.Limit.PerSecond == 0 && s.LimitErr == nil {
			continue
		}
		for _, addr := range s.VIPs {
			switch _, ok := owned[addr]; {
			case !ok:
			case s.LimitErr != nil:
				errs[s.Name] = s.LimitErr
			default:
				limits[LimitKey{addr, s.Name}] = s.Limit
			}
		}
	}
	return limits, errs
}

// Owners returns the owner of each VIP of the snapshot, "" for those that
// nobody announces: what Make decides for all nodes at once.
func Owners(s Snapshot) map[netip.Addr]string {
	view := newView(s)
	owners := make(map[netip.Addr]string, len(view.vips))
	for addr, v := range view.vips {
		owners[addr] = view.scopeOf(addr).owner(addr, v)
	}
	return owners
}

type silenceKey struct {
	scope  *scope
	reason Reason
	owner  string
}

// view is a Snapshot by VIP.
type view struct {
	snapshot Snapshot
	vips     map[netip.Addr]vip
	scopes   map[*config.Pool]*scope // nil: outside all pools
}

// vip is what the Services that share a VIP demand of its owner.
type vip struct {
	// serving is set when some endpoint of some Service takes traffic.
	serving bool
	// local are the nodes that have endpoints of every Service with policy
	// Local. Nil: there is no such Service.
	local map[string]bool
}

func newView(s Snapshot) *view {
	v := &view{snapshot: s, vips: make(map[netip.Addr]vip, len(s.Services)), scopes: map[*config.Pool]*scope{}}
	for i := range s.Services {
		for _, addr := range s.Services[i].VIPs {
			v.vips[addr] = v.vips[addr].with(&s.Services[i])
		}
	}
	return v
}

// with returns the VIP shared with one Service more.
func (v vip) with(s *Service) vip {
	if !s.Serving {
		return v
	}
	v.serving = true
	switch {
	case !s.Local:
	case v.local == nil:
		v.local = s.ServingNodes
		if v.local == nil {
			v.local = map[string]bool{}
		}
	default:
		both := map[string]bool{}
		for node, ok := range v.local {
			both[node] = ok && s.ServingNodes[node]
		}
		v.local = both
	}
	return v
}

// scopeOf returns the scope that the VIP belongs to.
func (v *view) scopeOf(addr netip.Addr) *scope {
	var pool *config.Pool
	if v.snapshot.Config != nil {
		pool, _ = v.snapshot.Config.PoolOf(addr)
	}
	s := v.scopes[pool]
	if s == nil {
		s = newScope(v.snapshot, pool)
		v.scopes[pool] = s
	}
	return s
}

// scope is what all VIPs of a pool have in common: the advertisements and the
// nodes that they select. A VIP whose address left its pool belongs to the
// scope of no pool, to which every advertisement applies.
type scope struct {
	Snapshot
	pool           *config.Pool
	advertisements []*config.Advertisement
	electorate     *election.Electorate

	// What interfaces returned last: Make asks for one node.
	node     string
	patterns []string
}

func newScope(s Snapshot, pool *config.Pool) *scope {
	sc := &scope{Snapshot: s, pool: pool}
	if s.Config != nil {
		for i := range s.Config.Advertisements {
			a := &s.Config.Advertisements[i]
			if a.Layer2 != nil && (pool == nil || len(pool.Advertise) == 0 || slices.Contains(pool.Advertise, a.Name)) {
				sc.advertisements = append(sc.advertisements, a)
			}
		}
	}
	nodes := map[string]bool{}
	for name, n := range s.Nodes {
		if sc.selects(n) {
			nodes[name] = s.Speakers[name] && !n.Excluded && !n.NetworkUnavailable
		}
	}
	sc.electorate = election.New(nodes)
	return sc
}

func (s *scope) selects(n Node) bool {
	return slices.ContainsFunc(s.advertisements, func(a *config.Advertisement) bool { return a.NodeSelector.Matches(n.Labels) })
}

func (s *scope) owner(addr netip.Addr, v vip) string {
	switch {
	case !v.serving:
		return ""
	case v.local != nil:
		return s.electorate.OwnerAmong(addr, v.local)
	}
	return s.electorate.Owner(addr)
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

// reason returns why the node, which does not own the VIP, does not: what
// holds for all nodes first, then what the operator decided, then what passes.
func (s *scope) reason(node string, v vip) Reason {
	n, known := s.Nodes[node]
	switch {
	case !known:
		return NodeUnknown
	case len(s.advertisements) == 0:
		return NoAdvertisement
	case !v.serving:
		return NoServingEndpoint
	case !s.selects(n):
		return NodeNotSelected
	case n.Excluded:
		return NodeExcluded
	case n.NetworkUnavailable:
		return NetworkUnavailable
	case v.local != nil && !v.local[node]:
		return NoLocalEndpoint
	case !s.Speakers[node]:
		return SpeakerNotReady
	}
	return NotOwner
}

var messages = map[Reason]string{
	NoAdvertisement:    "no layer-2 advertisement applies to its pool",
	NoServingEndpoint:  "no endpoint takes traffic",
	NoLocalEndpoint:    "externalTrafficPolicy is Local and no endpoint on this node takes traffic",
	NodeNotSelected:    "the advertisements select other nodes",
	NodeExcluded:       "the node has the label node.kubernetes.io/exclude-from-external-load-balancers",
	NetworkUnavailable: "the node's condition NetworkUnavailable is set",
	SpeakerNotReady:    "the node's speaker is not ready",
	NodeUnknown:        "the API server has no such node",
}

func (s *scope) message(r Reason, owner string) string {
	text := messages[r]
	switch {
	case s.Config == nil:
		text = "no configuration is in force"
	case r == NoAdvertisement && s.pool != nil:
		text = fmt.Sprintf("no layer-2 advertisement applies to pool %q", s.pool.Name)
	}
	switch {
	case r == NotOwner:
		return fmt.Sprintf("node %s owns it", owner)
	case r == NoAdvertisement, r == NoServingEndpoint:
		return text
	case owner == "":
		return text + "; nobody announces it"
	}
	return fmt.Sprintf("%s; node %s announces it", text, owner)
}
