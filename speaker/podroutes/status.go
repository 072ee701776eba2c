package podroutes

import (
	"net/netip"

	"github.com/lodestone-lb/lodestone/pkg/config"
	"github.com/lodestone-lb/lodestone/speaker/plan"
)

// Status is the state of the Table.
type Status struct {
	// Known is set once Set was called.
	Known bool `json:"-"`
	// Mode is the mode in the configuration. Empty: Lodestone makes no routes.
	Mode config.RouteMode `json:"mode,omitempty"`
	// Own are the node's own pod CIDRs to which others may have routes.
	Own []netip.Prefix `json:"own"`
	// Routes are in force in the kernel.
	Routes []RouteStatus `json:"routes"`
	// Problems are the pod CIDRs without a route.
	Problems []Problem `json:"problems"`
	// Error is why possible routes are not in force. The Table tries again.
	Error string `json:"error,omitempty"`
}

// RouteStatus is a route to the pods of a node.
type RouteStatus struct {
	CIDR      netip.Prefix `json:"cidr"`
	Node      string       `json:"node"`
	Via       netip.Addr   `json:"via"`
	Interface string       `json:"interface"`
}

// Problem is a pod CIDR of a node to which there is no route.
type Problem struct {
	CIDR    string          `json:"cidr"`
	Node    string          `json:"node"`
	Reason  plan.PodRefusal `json:"reason"`
	Message string          `json:"message"`
}

// Status returns the state of the Table.
func (t *Table) Status() Status {
	v := t.published.Load()
	s := Status{Known: v.set, Mode: v.want.Mode, Own: append([]netip.Prefix{}, v.want.Own...), Routes: []RouteStatus{}, Problems: []Problem{}}
	for _, prefix := range ordered(v.inForce) {
		r := v.inForce[prefix]
		s.Routes = append(s.Routes, RouteStatus{prefix, r.node, r.via, r.name})
	}
	for _, prefix := range ordered(v.problems) {
		p := v.problems[prefix]
		s.Problems = append(s.Problems, Problem{prefix.String(), v.want.Routes[prefix].Node, p.reason, p.message})
	}
	for _, r := range v.want.Refused {
		s.Problems = append(s.Problems, Problem{r.CIDR, r.Node, r.Reason, r.Message})
	}
	if v.err != nil {
		s.Error = v.err.Error()
	}
	return s
}
