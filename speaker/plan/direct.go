package plan

import (
	"slices"
)

// Direct says where connections to a Service at one VIP are to be kept, on whichever node
// they come in.
type Direct struct {
	// Ports are those of the Service that take TCP.
	Ports []Port
	// ByClient keeps all connections of a client on one node (sessionAffinity: ClientIP).
	ByClient bool
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
	return d.ByClient == other.ByClient && slices.Equal(d.Ports, other.Ports) && slices.Equal(d.Backends, other.Backends)
}
