package speaker

import (
	"context"
	"errors"
	"maps"
	"net/netip"
	"slices"
	"time"

	"go4.org/netipx"

	"github.com/lodestone-lb/lodestone/pkg/config"
	"github.com/lodestone-lb/lodestone/pkg/report"
	"github.com/lodestone-lb/lodestone/speaker/bgp"
	"github.com/lodestone-lb/lodestone/speaker/plan"
	"github.com/lodestone-lb/lodestone/speaker/podroutes"
)

// DefaultDrain is how long routers are given to prefer other nodes before this
// one withdraws its routes (RFC 8326).
const DefaultDrain = 2 * time.Second

// Router tells routers which VIPs the node takes traffic for; bgp.Announcer is
// one.
type Router interface {
	// Set replaces sessions and routes, and does not wait for routers. The maps
	// are the loop's: Set must not keep them.
	Set(ctx context.Context, want plan.BGP) error
	// Update is Set when only these routes have changed since.
	Update(ctx context.Context, want plan.BGP, changed []netip.Prefix) error
	// Drain has routers prefer other nodes, for these routes and those of later
	// Sets.
	Drain(ctx context.Context, on bool) error
	// Stop closes the sessions. If the process will be back soon, routers that
	// agreed to graceful restart keep the routes.
	Stop(restarting bool)
}

// Passwords are those of the peers; kube.Passwords is one.
type Passwords interface {
	// Changed returns a channel that is closed when sessions have to be set
	// again for their passwords.
	Changed() <-chan struct{}
}

// routing is what routers have been told.
type routing struct {
	told      bool // anything at all
	current   bool // the routes of the plan, until its last change
	passwords <-chan struct{}
	permit    *netipx.IPSet // see plan.BGP
	// draining are the routes that the node is about to withdraw, at until. Nil:
	// it does not drain.
	draining map[netip.Prefix]plan.Route
	until    time.Time
}

// drainEnds returns a channel that fires when the node has drained. Nil: it
// does not drain.
func (r *routing) drainEnds() <-chan time.Time {
	if r.draining == nil {
		return nil
	}
	return time.After(time.Until(r.until))
}

// excluded reports whether the node is taken out of load balancing.
func (s *Speaker) excluded() bool { return s.nodes[s.Node].Excluded }

// routesAtExclusion returns the routes that the node is about to lose because it
// has been taken out since: they are drained. The plan does not know yet.
func (s *Speaker) routesAtExclusion(before bool) map[netip.Prefix]plan.Route {
	if before || !s.excluded() || len(s.planner.Plan().BGP.VIPs) == 0 {
		return nil
	}
	return maps.Clone(s.planner.Plan().BGP.Routes)
}

// routingDue reports whether routers have to be told something though the plan
// is the same: passwords changed, or the node has drained.
func (s *Speaker) routingDue(passwords <-chan struct{}) bool {
	due := !s.routing.told || passwords != s.routing.passwords || s.routing.draining != nil && !time.Now().Before(s.routing.until)
	s.routing.passwords = passwords
	return due
}

// route tells routers what the plan says. A node that has just been taken out
// first asks them to prefer others for the routes that it had.
//
// Nothing is told before the speaker has been ready for the first time: the
// first set has all routes, which is what routers wait for after a restart.
func (s *Speaker) route(ctx context.Context, had map[netip.Prefix]plan.Route, changed []netip.Prefix) {
	select {
	case <-s.ready:
	default:
		return
	}
	ctx, cancel := context.WithTimeout(ctx, setTimeout)
	defer cancel()
	want := s.planner.Plan().BGP
	s.routing.told, s.routing.permit = true, want.Permit
	s.Detector.Set(want)
	switch {
	case len(had) > 0:
		s.Log.Info("draining: routers are asked to prefer other nodes", "routes", len(had), "for", s.Drain)
		s.routing.draining, s.routing.until = had, time.Now().Add(s.Drain)
		s.logRouterError("drain", s.Router.Drain(ctx, true))
	case s.routing.draining != nil && (!s.excluded() || !time.Now().Before(s.routing.until)):
		s.routing.draining = nil
		defer func() { s.logRouterError("end of drain", s.Router.Drain(ctx, false)) }()
	}
	if s.routing.draining != nil {
		want.Routes = s.routing.draining
	}
	var err error
	if s.routing.current && s.routing.draining == nil {
		err = s.Router.Update(ctx, want, changed)
	} else {
		err = s.Router.Set(ctx, want)
	}
	s.routing.current = err == nil && s.routing.draining == nil
	s.logRouterError("routes", err)
}

// logRouterError logs what the BGP announcer did not take. It fails only at the end.
func (s *Speaker) logRouterError(what string, err error) {
	if err != nil && !errors.Is(err, bgp.ErrStopped) && !errors.Is(err, context.Canceled) {
		s.Log.Error("routers not told", "what", what, "err", err)
	}
}

// leaveRouters has routers prefer other nodes, then closes the sessions. Those
// that agreed to graceful restart keep the routes for the next speaker.
func (s *Speaker) leaveRouters(ctx context.Context, vips int) {
	if vips > 0 {
		s.Log.Info("handing over: routers are asked to prefer other nodes", "vips", vips, "for", s.Drain)
		s.logRouterError("drain", s.Router.Drain(ctx, true))
		select {
		case <-time.After(s.Drain):
		case <-ctx.Done():
		}
	}
	s.Router.Stop(true)
}

// PodRouter keeps routes to the pods of other nodes; route.Table is one.
type PodRouter interface {
	// Set replaces the whole set and does not wait for its effect: no VIP waits
	// for a route.
	Set(want plan.PodRoutes)
	Status() podroutes.Status
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

// routedPods returns the mode of routes to pods and those of the node's pod CIDRs that
// have routes. While that is not known they are nil, and the last report about them
// stays: a speaker that is replaced, or a session that is down for a while, does not
// make a node's network unavailable.
func (r *Reporter) routedPods() (mode string, routed []netip.Prefix) {
	status := r.PodRoutes.Status()
	if !status.Told {
		return "", nil
	}
	current, _ := r.Config.Current()
	known := true
	switch {
	case status.Mode == config.RoutesKernel:
		// A route that the kernel refuses is no reason to give up the others.
		known = status.Error == "" || len(status.Routes) > 0
	case status.Mode == config.RoutesBGP:
		known = current != nil && current.Routes != nil && slices.ContainsFunc(r.Sessions.Sessions(), func(p report.Session) bool {
			return p.Established && current.Routes.Tells(p.Peer)
		})
	}
	if !known {
		return string(status.Mode), nil
	}
	return string(status.Mode), append([]netip.Prefix{}, status.Own...)
}
