package plan

import (
	"net/netip"
	"slices"

	"github.com/lodestone-lb/lodestone/pkg/config"
)

// view is a Snapshot by VIP.
type view struct {
	snapshot   Snapshot // without the Services
	sharers    map[netip.Addr][]*Service
	advertised advertised
	segments   *segments
	scopes     map[scopeKey]*scope
	before     map[scopeKey]*scope // of the view that this one was made from
	withheld   map[withheld]bool
}

// withheld is a VIP that a node does not announce because another machine has it.
type withheld struct {
	node string
	vip  netip.Addr
}

func withheldBy(nodes map[string]Node) map[withheld]bool {
	all := map[withheld]bool{}
	for name, n := range nodes {
		for _, c := range n.Withheld() {
			all[withheld{name, c.VIP}] = true
		}
	}
	return all
}

func newView(s Snapshot) *view {
	return (&view{sharers: map[netip.Addr][]*Service{}}).in(s)
}

// in returns the view of the same Services in another snapshot.
func (v *view) in(s Snapshot) *view {
	return &view{
		snapshot: s, sharers: v.sharers, advertised: advertised{},
		segments: newSegments(s.Nodes), scopes: map[scopeKey]*scope{}, before: v.scopes, withheld: withheldBy(s.Nodes),
	}
}

// migrates reports whether Services may be moving to Lodestone from another load balancer.
func (v *view) migrates() bool { return len(v.snapshot.Config.Compatibility) > 0 }

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
	sharers := v.sharers[addr]
	return demandOf(sharers, addr), len(sharers) > 0
}

func demandOf(sharers []*Service, addr netip.Addr) (demand vip) {
	for _, s := range sharers {
		demand = demand.with(s.EndpointsAt(addr), s.Local)
	}
	return demand
}

// lease returns the interface on which the VIP is leased, empty if it is not leased. If Services
// contradict each other, all nodes choose the same one.
func (v *view) lease(addr netip.Addr) (on string) {
	for _, s := range v.sharers[addr] {
		on = max(on, s.Leases[addr])
	}
	return on
}

// poolOf returns the pool that contains the VIP, or the pool that leases it, or nil.
func (v *view) poolOf(addr netip.Addr) *config.Pool {
	c := v.snapshot.Config
	if c == nil {
		return nil
	}
	pool, listed := c.PoolOf(addr)
	if !listed {
		pool, _ = c.PoolOn(v.lease(addr))
	}
	return pool
}

// vip is what the Services that share a VIP demand of a node that announces it.
type vip struct {
	// serving is set when an endpoint of one of the Services takes traffic.
	serving bool
	// local are the nodes that have endpoints of every Service with policy Local, sorted. Nil: no Service
	// has that policy.
	local []string
}

// acceptedBy reports whether the node has the endpoints that policy Local asks for.
func (v vip) acceptedBy(node string) bool { return v.local == nil || contained(v.local, node) }

// with adds a Service to those that share the VIP.
func (v vip) with(e Endpoints, local bool) vip {
	if !e.Serving {
		return v
	}
	v.serving = true
	switch {
	case !local:
	case v.local == nil:
		v.local = e.ServingNodes()
	default:
		v.local = common(v.local, e.ServingNodes())
	}
	return v
}
