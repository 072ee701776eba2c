package podroutes

import (
	"net/netip"

	"github.com/lodestone-lb/lodestone/pkg/config"
	"github.com/lodestone-lb/lodestone/speaker/plan"
)

// Status is what the Table does at one moment.
type Status struct {
	// Known is set once there is a set of routes to bring into force.
	Known bool `json:"-"`
	// Mode is the configuration's. Empty: there are to be no routes.
	Mode config.RouteMode `json:"mode,omitempty"`
	// Own are the node's pod CIDRs that others may have routes to.
	Own []netip.Prefix `json:"own"`
	// Routes are in force in the kernel.
	Routes []RouteStatus `json:"routes"`
	// Problems are the pod CIDRs that there is no route to.
	Problems []Problem `json:"problems"`
	// Error is why routes are not in force although nothing stands against them. They are
	// tried again.
	Error string `json:"error,omitempty"`
}

// RouteStatus is a route to the pods of a node.
type RouteStatus struct {
	CIDR      netip.Prefix `json:"cidr"`
	Node      string       `json:"node"`
	Via       netip.Addr   `json:"via"`
	Interface string       `json:"interface"`
}

// Problem is a pod CIDR of a node that there is no route to.
type Problem struct {
	CIDR    string          `json:"cidr"`
	Node    string          `json:"node"`
	Reason  plan.PodRefusal `json:"reason"`
	Message string          `json:"message"`
}

// Status returns what the Table does now.
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
