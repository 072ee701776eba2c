package plan

import (
	"maps"
	"net/netip"
	"slices"
)

// Forwarding is what is forwarded directly, see config.Layer2.
type Forwarding struct {
	Services map[LimitKey]Direct
	// Nodes are the addresses of the nodes whose speakers report that they have the rules: a Node
	// that somebody has made up does not count.
	Nodes map[string][]netip.Addr
	// Lost are those of them whose speaker is not heard, or is cut off from the API server: they may be down,
	// and have no rules for new Services.
	Lost map[string]bool
	// Heard are those of the Lost whose speaker is heard all the same: it starts, or is cut off from the API server.
	Heard map[string]bool
}

// Direct is where connections to a Service at one VIP are to be kept, on whichever node
// they come in.
type Direct struct {
	// Ports are those of the Service that take TCP.
	Ports []Port
	// ByClient keeps all connections of a client on one node (sessionAffinity: ClientIP).
	ByClient bool
	// Seed decides how its connections are spread: the same on all nodes.
	Seed uint32
	// Local is policy Local: the Backends are where the Service's endpoints are.
	Local bool
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

// Equal reports whether both are the same.
func (d Direct) Equal(other Direct) bool {
	return d.ByClient == other.ByClient && d.Seed == other.Seed && d.Local == other.Local && slices.Equal(d.Ports, other.Ports) &&
		slices.Equal(d.Backends, other.Backends)
}

// part is which part of the new connections a node keeps, as a fraction. All is 0 if nobody keeps them.
type part struct{ of, all int }

func (p *part) add(n int, own bool) {
	if p.all += n; own {
		p.of += n
	}
}

// everywhere are the backends of all Services with policy Cluster, which are the same for each VIP of a scope.
type everywhere struct {
	backends  []Backend
	addresses map[bool][]netip.Addr // of the backends; the key is whether these are IPv4
	parts     map[partKey]part      // this node's part of the connections
}

type partKey struct {
	owner string
	four  bool
}

func newEverywhere() everywhere { return everywhere{nil, map[bool][]netip.Addr{}, map[partKey]part{}} }

// part returns the node's part of the connections to a Service that the owner of a VIP hands over. All
// Services with policy Cluster have the same backends.
func (s *scope) part(node, owner string, vip netip.Addr, d Direct) part {
	four := vip.Is4()
	if d.Local {
		return s.partOf(node, owner, d.Backends, s.addresses(d.Backends, four))
	}
	e, key := s.everywhere, partKey{owner, four}
	if _, known := e.parts[key]; !known {
		if e.addresses[four] == nil {
			e.addresses[four] = s.addresses(d.Backends, four)
		}
		e.parts[key] = s.partOf(node, owner, d.Backends, e.addresses[four])
	}
	return e.parts[key]
}

// partOf returns the node's part of what the owner hands to backends at these addresses. A backend that the
// owner does not reach has no part.
func (s *scope) partOf(node, owner string, backends []Backend, addresses []netip.Addr) part {
	var p, drained part
	from := s.Nodes[owner]
	for i, b := range backends {
		if b.Node != owner && !from.onSegment(addresses[i]) {
			continue
		}
		p.add(b.Open, b.Node == node)
		if b.Draining > 0 && s.Speakers[b.Node] {
			drained.add(b.Draining, b.Node == node)
		}
	}
	if p.all == 0 { // then those that drain take new ones, see package direct
		return drained
	}
	return p
}

// addresses returns the address of each of the backends' nodes.
func (s *scope) addresses(backends []Backend, four bool) []netip.Addr {
	all := make([]netip.Addr, len(backends))
	for i, b := range backends {
		n := s.Nodes[b.Node]
		all[i] = n.address(four)
	}
	return all
}

// forward puts what is forwarded directly into the plan. It makes a new Forwarding only if something in it
// has changed, because each new one is written into the kernel.
func (p *Planner) forward() {
	services, changed := p.connections.direct.share()
	if !changed && !p.allStale {
		return
	}
	before, snapshot := p.plan.Forwarding, p.view.snapshot
	f := &Forwarding{services, before.Nodes, before.Lost, before.Heard}
	if p.allStale {
		f.Nodes, f.Lost, f.Heard = map[string][]netip.Addr{}, map[string]bool{}, map[string]bool{}
		for name, n := range snapshot.Nodes {
			if !n.Forwards {
				continue
			}
			f.Nodes[name] = n.Addresses
			ready, heard := snapshot.Speakers[name]
			if !ready || n.Blind {
				f.Lost[name] = true
				if heard {
					f.Heard[name] = true
				}
			}
		}
	}
	if changed || !maps.EqualFunc(f.Nodes, before.Nodes, slices.Equal) || !maps.Equal(f.Lost, before.Lost) ||
		!maps.Equal(f.Heard, before.Heard) {
		p.plan.Forwarding = f
	}
}

// maxAsked is how many nodes are asked for a connection that was begun under another table, see
// package direct.
const maxAsked = 6

// backends returns the nodes that may keep connections to the Service at a VIP.
func (s *scope) backends(svc *Service, vip netip.Addr) []Backend {
	if svc.Local {
		return s.keeping(svc.EndpointsAt(vip).Backends)
	}
	if s.everywhere.backends == nil {
		all := make([]Backend, 0, len(s.Nodes))
		for _, name := range slices.Sorted(maps.Keys(s.Nodes)) {
			all = append(all, Backend{Node: name, Open: 1})
		}
		s.everywhere.backends = s.keeping(all)
	}
	return s.everywhere.backends
}

// keeping returns the backends that may keep connections. A node without the rules is left out, because it
// would reset connections that other nodes keep. A node that may not own the VIP takes no new connections, and
// drains.
//
// A node that no advertisement selects drains, too: it may have been selected before. If there are more nodes
// than can be asked for a connection, it is left out. Otherwise nodes that never had a connection would be
// asked in place of those that had.
func (s *scope) keeping(all []Backend) []Backend {
	kept := make([]Backend, 0, len(all))
	for _, b := range all {
		if n := s.Nodes[b.Node]; n.Forwards {
			if s.candidates[b.Node] == nil || !s.sound(b.Node) || n.impaired() {
				b.Open, b.Draining = 0, b.Open+b.Draining
			}
			kept = append(kept, b)
		}
	}
	if len(kept) > maxAsked {
		kept = slices.DeleteFunc(kept, func(b Backend) bool { return s.candidates[b.Node] == nil })
	}
	return kept
}
