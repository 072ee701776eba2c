package core

import (
	"maps"
	"net/netip"
	"time"

	"go4.org/netipx"

	"github.com/lodestone-lb/lodestone/speaker/plan"
)

// routing is what routers have been sent.
type routing struct {
	current bool      // the last routes were those of the plan, so that changes are enough
	due     bool      // sessions have to be set, for the first time or again
	retry   time.Time // when to send all again after a failure; zero: it was sent
	permit  *netipx.IPSet
	// draining are the routes that the node withdraws at until. Nil: it does not drain, and until
	// is zero.
	draining map[netip.Prefix]plan.Route
	until    time.Time
}

// routesAtExclusion returns the routes that the node is about to lose because it has just been excluded
// from load balancing: before they are withdrawn, routers are asked to prefer other nodes. It is called
// before the plan is updated.
func (c *Core) routesAtExclusion(before bool) map[netip.Prefix]plan.Route {
	if before || !c.excluded() || len(c.planner.Plan().BGP.VIPs) == 0 {
		return nil
	}
	return maps.Clone(c.planner.Plan().BGP.Routes)
}

// route decides what routers are sent. A node that has just been excluded keeps the routes to drain
// for a while, and asks routers to prefer other nodes.
//
// Nothing is sent before the node has been ready for the first time: after a restart routers wait for
// the first set, which must have all routes.
func (c *Core) route(toDrain map[netip.Prefix]plan.Route) {
	r, want := &c.routing, c.planner.Plan().BGP
	drained := r.draining != nil && !c.now.Before(r.until)
	due := r.due || drained || !r.retry.IsZero() || c.out.Changes.Sessions || len(c.out.Changes.Prefixes) > 0 || want.Permit != r.permit
	if !c.everReady || !due {
		return
	}
	r.due, r.permit = false, want.Permit
	switch {
	case len(toDrain) > 0:
		c.log(false, "draining: routers are asked to prefer other nodes", "routes", len(toDrain), "for", c.Drain)
		r.draining, r.until, c.out.BeginDrain = toDrain, c.now.Add(c.Drain), true
	case r.draining != nil && (drained || !c.excluded()):
		r.draining, r.until, c.out.EndDrain = nil, time.Time{}, true
	case !r.retry.IsZero():
		c.out.BeginDrain, c.out.EndDrain = r.draining != nil, r.draining == nil
	}
	r.retry = time.Time{}
	all := !r.current || r.draining != nil
	if r.current = r.draining == nil; r.draining != nil {
		want.Routes = r.draining
	}
	c.out.Routes = &Routes{BGP: want, All: all, Changed: c.out.Changes.Prefixes}
}
