package plan

import (
	"maps"
	"net/netip"
	"slices"
)

// Forwarding is what is forwarded directly, see config.Layer2.
type Forwarding struct {
	Services map[LimitKey]Direct
	// Nodes are the addresses of the cluster's nodes.
	Nodes map[string][]netip.Addr
	// Lost are the nodes whose speaker is not heard: they may be down.
	Lost map[string]bool
}

// Direct says where connections to a Service at one VIP are to be kept, on whichever node
// they come in.
type Direct struct {
	// Ports are those of the Service that take TCP.
	Ports []Port
	// ByClient keeps all connections of a client on one node (sessionAffinity: ClientIP).
	ByClient bool
	// Seed decides how its connections are spread: the same on all nodes, and not known to
	// clients.
	Seed uint32
	// Backends are the nodes that may keep them, by name.
	Backends []Backend
}

// Backend is a node that keeps connections to a Service.
type Backend struct {
	Node string
	// Open counts what takes new connections there: endpoints of a Service with policy
	// Local, and otherwise the node itself. Draining counts what keeps those that it has.
	Open, Draining int
}

// Equal reports whether both say the same.
func (d Direct) Equal(other Direct) bool {
	return d.ByClient == other.ByClient && d.Seed == other.Seed && slices.Equal(d.Ports, other.Ports) &&
		slices.Equal(d.Backends, other.Backends)
}

// steer brings up to date what of the VIP is forwarded directly. Nil: no Service has it.
func (p *Planner) steer(vip netip.Addr, s *scope) {
	before := p.direct[vip]
	if s == nil || !s.direct {
		delete(p.direct, vip)
		p.redirected = p.redirected || before != nil
		return
	}
	now := map[string]Direct{}
	for _, svc := range p.view.sharers[vip] {
		if len(svc.Ports) > 0 {
			now[svc.Name] = Direct{Ports: svc.Ports, ByClient: svc.ByClient, Seed: svc.Seed, Backends: p.view.backends(svc, vip)}
		}
	}
	if !maps.EqualFunc(before, now, Direct.Equal) {
		p.direct[vip], p.redirected = now, true
	}
}

// forward has the plan say what is forwarded directly.
func (p *Planner) forward() {
	if !p.redirected {
		return
	}
	snapshot := p.view.snapshot
	f := &Forwarding{Services: map[LimitKey]Direct{}, Nodes: map[string][]netip.Addr{}, Lost: map[string]bool{}}
	for vip, services := range p.direct {
		for name, d := range services {
			f.Services[LimitKey{vip, name}] = d
		}
	}
	for name, n := range snapshot.Nodes {
		f.Nodes[name] = n.Addresses
		if !snapshot.Speakers[name] {
			f.Lost[name] = true
		}
	}
	p.plan.Forwarding = f
}

// backends returns the nodes that may keep connections to the Service at a VIP: one without
// the rules would answer segments of connections that others keep by a reset.
func (v *view) backends(s *Service, vip netip.Addr) []Backend {
	if !s.Local {
		if v.everywhere == nil {
			for _, name := range slices.Sorted(maps.Keys(v.snapshot.Nodes)) {
				if v.snapshot.Nodes[name].Forwards {
					v.everywhere = append(v.everywhere, v.open(Backend{Node: name, Open: 1}))
				}
			}
		}
		return v.everywhere
	}
	var backends []Backend
	for _, b := range s.EndpointsAt(vip).Backends {
		if v.snapshot.Nodes[b.Node].Forwards {
			backends = append(backends, v.open(b))
		}
	}
	return backends
}

// open returns the backend as it is with what is known of its node: new connections go to a
// node that may own VIPs.
func (v *view) open(b Backend) Backend {
	n := v.snapshot.Nodes[b.Node]
	if !v.snapshot.Speakers[b.Node] || n.Excluded || n.NetworkUnavailable || n.impaired() {
		b.Open, b.Draining = 0, b.Open+b.Draining
	}
	return b
}
