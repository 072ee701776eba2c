package core

import "time"

// A speaker that ends takes these steps:
//
//  1. stop: it is not ready any more, so that each VIP gets another owner, and routers are asked to prefer other nodes.
//  2. leave: it answers for each VIP until the next owner is heard, for HandOver at most.
//  3. end: it withdraws what it still announces on the segment.
//  4. end: it closes the sessions with routers when Drain is over. If the node drains because it has been excluded, it withdraws
//     the routes before that: routers would keep them, as for a speaker that restarts.

const (
	// leavingPoll is how often an ending speaker asks whether all its VIPs have arrived.
	leavingPoll = 10 * time.Millisecond
	// withdrawal is how long routers have to process withdrawals before the sessions are closed. All have been sent by then, but
	// FRR drops what it has read and not processed yet when a session ends, and keeps those routes.
	withdrawal = 100 * time.Millisecond
)

// ending is the progress after a Stop.
type ending struct {
	began bool
	// vips is when leaving VIPs are withdrawn although their next owners are not heard. routers is
	// when the sessions are closed.
	vips, routers      time.Time
	withdrawn, stopped bool
	next               time.Time
}

// stop makes the plan of a node that may not own VIPs, so that all its VIPs leave. Meanwhile routers
// are asked to prefer other nodes. Routers that agreed to graceful restart keep the routes for the next
// speaker.
func (c *Core) stop() {
	sound, had := c.ready, c.planner.Plan()
	c.log(false, "handing over", "vips", len(had.Layer2))
	c.ending = ending{began: true, vips: c.now, routers: c.now, next: c.now}
	if n := len(had.BGP.VIPs); c.routing.draining != nil {
		c.ending.routers = c.routing.until
	} else if n > 0 {
		c.log(false, "handing over: routers are asked to prefer other nodes", "vips", n, "for", c.Drain)
		c.out.BeginDrain, c.ending.routers = true, c.now.Add(c.Drain)
	}
	c.ready, c.out.Ready = false, false
	if !sound {
		return
	}
	c.inform()
	c.update()
	clear(c.arriving)
	if c.leave(); len(c.leaving) > 0 {
		c.out.SetVIPs, c.out.VIPs, c.ending.vips = true, c.want(), c.now.Add(c.HandOver)
	}
}

// end withdraws what is still announced once all next owners are heard, or the time for that is over,
// and closes the sessions with routers.
func (c *Core) end(left int) {
	e, over := &c.ending, !c.now.Before(c.ending.vips)
	if !e.withdrawn && (left == 0 || over) {
		if left > 0 {
			c.log(true, "next owners not heard, stopping all the same", "vips", left, "waited", c.HandOver)
		}
		e.withdrawn, c.out.SetVIPs = true, true
	}
	switch {
	case e.stopped || c.now.Before(e.routers):
	case c.routing.draining != nil:
		c.routing.draining, e.routers = nil, c.now.Add(withdrawal)
		c.out.Routes = &Routes{BGP: c.planner.Plan().BGP, All: true}
	default:
		e.stopped, c.out.StopRouters = true, true
	}
	c.out.Done = e.withdrawn && e.stopped
	e.next = e.routers
	if !e.withdrawn {
		e.next = c.now.Add(leavingPoll)
	}
}
