package main

import (
	"slices"

	"github.com/lodestone-lb/lodestone/pkg/diagnose"
	"github.com/lodestone-lb/lodestone/speaker"
	"github.com/lodestone-lb/lodestone/speaker/bfd"
	"github.com/lodestone-lb/lodestone/speaker/bgp"
	"github.com/lodestone-lb/lodestone/speaker/direct"
	"github.com/lodestone-lb/lodestone/speaker/layer2"
	"github.com/lodestone-lb/lodestone/speaker/limit"
	"github.com/lodestone-lb/lodestone/speaker/podroutes"
)

// status is what /status shows.
type status struct {
	speaker.Status
	Layer2 layer2.Status         `json:"layer2"`
	Limit  limit.Status          `json:"limit"`
	Direct direct.Status         `json:"directForwarding"`
	BGP    []bgp.Peer            `json:"bgp"`
	BFD    map[string]bfd.Status `json:"bfd"`
	Pods   podroutes.Status      `json:"podRoutes"`
	// Detection is how the failure detector fares. Null: it does not run yet.
	Detection *diagnose.Detection `json:"detection"`
}

// checks returns what /readyz shows: the conditions of owning VIPs, and the one that a rolling update waits for besides. A blind
// speaker has one more, because it cannot write to its Lease that it is blind: /readyz is the only place that shows it.
func checks(all []diagnose.Condition, routers diagnose.Condition, blind bool) []diagnose.Condition {
	all = append(slices.Clone(all), routers)
	if !blind {
		return all
	}
	return append(all, diagnose.Condition{Name: "api-server",
		Message: "it answers other nodes, and not this one: others own its VIPs at layer 2"})
}

// forwarding returns what /diagnose shows of direct forwarding.
func forwarding(s *direct.Status) diagnose.Forwarding {
	f := diagnose.Forwarding{Error: s.Error, WithoutTable: s.Without, ConntrackFull: s.ConntrackFull}
	for _, n := range s.Neighbours {
		if n.State != direct.Reachable {
			f.Unreachable = append(f.Unreachable, diagnose.Unreachable{Node: n.Node, Address: n.Address, State: string(n.State)})
		}
	}
	return f
}
