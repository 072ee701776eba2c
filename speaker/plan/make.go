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
	p := NewPlanner(node)
	p.Set(s.Config, s.Nodes, s.Speakers)
	for _, service := range s.Services {
		p.Put(service)
	}
	p.Update()
	return p.Plan()
}

// Owners returns the owner of each VIP of the snapshot, "" for those that
// nobody announces: what Make decides for all nodes at once.
func Owners(s Snapshot) map[netip.Addr]string {
	view := newView(s)
	for i := range s.Services {
		view.add(&s.Services[i])
	}
	owners := make(map[netip.Addr]string, len(view.sharers))
	for addr := range view.sharers {
		v, _ := view.demand(addr)
		owners[addr] = view.scopeOf(addr).owner(addr, v)
	}
	return owners
}

// view is a Snapshot by VIP.
type view struct {
	snapshot Snapshot // without the Services
	sharers  map[netip.Addr][]*Service
	scopes   map[*config.Pool]*scope // nil: outside all pools
	before   map[*config.Pool]*scope // of the view that this one was made from
}

func newView(s Snapshot) *view {
	return &view{snapshot: s, sharers: map[netip.Addr][]*Service{}, scopes: map[*config.Pool]*scope{}}
}

// in returns the view of the same Services in another snapshot.
func (v *view) in(s Snapshot) *view {
	return &view{snapshot: s, sharers: v.sharers, scopes: map[*config.Pool]*scope{}, before: v.scopes}
}

func (v *view) add(s *Service) {
	for _, addr := range s.VIPs {
		v.sharers[addr] = append(v.sharers[addr], s)
	}
}

func (v *view) remove(s *Service) {
	for _, addr := range s.VIPs {
		rest := slices.DeleteFunc(v.sharers[addr], func(t *Service) bool { return t == s })
		if len(rest) > 0 {
			v.sharers[addr] = rest
		} else {
			delete(v.sharers, addr)
		}
	}
}

// demand returns what the VIP's Services demand, and whether there are any.
func (v *view) demand(addr netip.Addr) (vip, bool) {
	var demand vip
	for _, s := range v.sharers[addr] {
		demand = demand.with(s)
	}
	return demand, len(v.sharers[addr]) > 0
}

// lease returns the interface that the VIP is leased on, empty if it is not.
// Should Services contradict each other, everybody believes the same one.
func (v *view) lease(addr netip.Addr) (on string) {
	for _, s := range v.sharers[addr] {
		on = max(on, s.Leases[addr])
	}
	return on
}

// vip is what the Services that share a VIP demand of its owner.
type vip struct {
	// serving is set when some endpoint of some Service takes traffic.
	serving bool
	// local are the nodes that have endpoints of every Service with policy
	// Local. Nil: there is no such Service.
	local map[string]bool
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

// scopeOf returns the scope that the VIP belongs to: that of the pool that
// contains it, or else of the one that leases it.
func (v *view) scopeOf(addr netip.Addr) *scope {
	var pool *config.Pool
	if cfg := v.snapshot.Config; cfg != nil {
		var listed bool
		if pool, listed = cfg.PoolOf(addr); !listed {
			pool, _ = cfg.PoolOn(v.lease(addr))
		}
	}
	s := v.scopes[pool]
	if s == nil {
		s = newScope(v.snapshot, pool, v.before[pool])
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

// newScope returns the scope of the pool. What its electorate decided is taken
// over from the scope before, if there is one.
func newScope(s Snapshot, pool *config.Pool, before *scope) *scope {
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
	if before == nil {
		sc.electorate = election.New(nodes)
	} else {
		sc.electorate = before.electorate.With(nodes)
	}
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
	NodeExcluded:       "the node has the label node.kubernetes.io/exclude-from-external-load-balancers, or the taint node.kubernetes.io/out-of-service or ToBeDeletedByClusterAutoscaler",
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
