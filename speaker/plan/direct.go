package plan

import (
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
