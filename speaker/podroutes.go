package speaker

import (
	"slices"

	"github.com/lodestone-lb/lodestone/pkg/annotation"
	"github.com/lodestone-lb/lodestone/pkg/config"
	"github.com/lodestone-lb/lodestone/pkg/peering"
	"github.com/lodestone-lb/lodestone/speaker/plan"
	"github.com/lodestone-lb/lodestone/speaker/route"
)

// PodRouter keeps routes to the pods of other nodes; route.Table is one.
type PodRouter interface {
	// Set replaces the whole set and does not wait for its effect: no VIP waits
	// for a route.
	Set(want plan.PodRoutes)
	Status() route.Status
	// Changed returns a channel that is closed when Status has something new.
	Changed() <-chan struct{}
}

// routePods tells which routes to pods there are to be. Without a configuration,
// or from an API server that does not know this node, nothing can be concluded:
// what is there stays.
func (s *Speaker) routePods() {
	if _, known := s.nodes[s.Node]; known && s.config != nil {
		s.PodRoutes.Set(plan.PodRoutesOf(s.Node, s.config, s.nodes))
	}
}

// routedPods returns what the Lease says of the node's pods. Of whether they
// have routes it says nothing new as long as that is not known: a speaker that
// is replaced, or a session that is down for a while, does not make a node's
// network unavailable.
func (r *Reporter) routedPods() map[string]string {
	status := r.PodRoutes.Status()
	if !status.Told {
		return nil
	}
	current, _ := r.Config.Current()
	said, known := map[string]string{annotation.PodRoutes: string(status.Mode)}, true
	switch {
	case status.Mode == config.RoutesKernel:
		// A route that the kernel refuses is no reason to give up the others.
		known = status.Error == "" || len(status.Routes) > 0
	case status.Mode == config.RoutesBGP:
		known = current != nil && current.Routes != nil && slices.ContainsFunc(r.Sessions.Sessions(), func(p peering.Session) bool {
			return p.Established && current.Routes.Tells(p.Peer)
		})
	}
	if known {
		said[annotation.RoutedPodCIDRs] = annotation.FormatRoutedPodCIDRs(status.Own)
	}
	return said
}
