// Package core decides what a speaker does next. It is a deterministic machine with one owner: an
// event and the time go into Step, effects come out. It has no goroutine, no clock, no lock and no
// log of its own. The cost of a step follows what has changed.
//
// Most events are facts, which are only noted. Decide decides by all facts, so that a burst of them
// costs one plan. The results of effects come back as events: VIPsFailed, RoutesFailed, StillLeaving.
//
// Decide decides in this order:
//
//  1. Whether this node is ready to own VIPs (ready.go). This is first because only a ready node is a
//     candidate in its own plan. While the API server's objects are unknown, nothing else is
//     decided: an empty plan would withdraw what the previous speaker of this node has announced.
//  2. The plan (facts.go): who owns which VIP, and what routers are sent. The next steps compare the
//     plan with the one before.
//  3. Which VIPs leave (handover.go). This node answers for a VIP that it gives up until the next
//     owner is heard.
//  4. Which VIPs arrive (arriving.go): kube-proxy may not serve them yet, and the node announces them
//     if nobody else answers.
//  5. What is announced on the segment (core.go): the VIPs of the plan and those that leave. This is
//     before the routes because in a failover hosts wait for it; routers have other paths.
//  6. What routers are sent (routers.go), and whether they are first asked to prefer other nodes.
//  7. Which moves are reported (reportmoves.go). This is last because nobody waits for it.
//
// After Stop (stop.go) all VIPs leave as in step 3, routers are asked to prefer other nodes, and Done
// is set when both are over.
package core

import (
	"maps"
	"net/netip"
	"slices"
	"time"

	"github.com/lodestone-lb/lodestone/pkg/config"
	"github.com/lodestone-lb/lodestone/pkg/report"
	"github.com/lodestone-lb/lodestone/speaker/plan"
)

// Event is the input of the machine. Nobody may modify its maps after that.
type Event interface{ event() }

// The events.
type (
	// Health has the conditions of owning VIPs.
	Health struct {
		// Synced is set once the API server's objects are known.
		Synced bool
		// Joined is set once the other speakers are known.
		Joined bool
		// Healthy is set if the data plane takes traffic. Sick is set if it answers that it is not
		// healthy; the rules that it has written may still work.
		Healthy, Sick bool
		// Forwards is set once the first Forwarding of the effects is in force.
		Forwards bool
	}
	// Config is the configuration in force. Nil: there is none.
	Config struct{ *config.Config }
	// Nodes are all Nodes, as the API server has them.
	Nodes map[string]plan.Node
	// Members are the speakers that are alive, with whether they are ready, and what each has
	// published about its node.
	Members struct {
		Speakers map[string]bool
		Networks map[string]report.Network
	}
	// Service replaces the Service of that name. Without VIPs it is gone.
	Service struct{ plan.Service }
	// Passwords is sent when a password has changed, so that sessions have to be set again.
	Passwords struct{}
	// VIPsFailed is sent if the VIPs of the last effects were not set.
	VIPsFailed struct{}
	// RoutesFailed is sent if routers were not sent what was in the last effects.
	RoutesFailed struct{}

	// Decide has the machine decide by all facts.
	Decide struct{}
	// Stop has the machine give everything up. After it, only StillLeaving may come.
	Stop struct{}
	// StillLeaving is for how many of the leaving VIPs this node still answers.
	StillLeaving int
)

func (Health) event()       {}
func (Config) event()       {}
func (Nodes) event()        {}
func (Members) event()      {}
func (Service) event()      {}
func (Passwords) event()    {}
func (VIPsFailed) event()   {}
func (RoutesFailed) event() {}
func (Decide) event()       {}
func (Stop) event()         {}
func (StillLeaving) event() {}

// Effects are the actions to execute, in the order of the fields. Facts have none. The maps belong to
// the machine and are valid until the next step.
type Effects struct {
	// Ready is published to the other speakers: whether this node may own VIPs.
	Ready bool
	// BecameReady is set when the node is ready for the first time.
	BecameReady bool
	// StateChanged is set when State has other moves, labels or addresses than before.
	StateChanged bool
	// PodRoutes replace the routes to the pods of other nodes. Nil: they stay.
	PodRoutes *plan.PodRoutes
	// NewPlan is set when there is a new plan: Claims, Changes and Gone belong to it.
	NewPlan bool
	// Claims are published to the other speakers: the VIPs that the node owns and keeps.
	Claims report.Claims
	// Limits replace the limits of connections. Nil: they stay.
	Limits map[plan.LimitKey]plan.Limit
	// Forwarding replaces what is forwarded directly. Nil: it stays.
	Forwarding *plan.Forwarding
	// VIPs replace what is announced on the segment, if SetVIPs is set.
	SetVIPs bool
	VIPs    map[netip.Addr]plan.Layer2
	// Gone are the VIPs that no Service has any more.
	Gone []netip.Addr
	// BeginDrain asks routers to prefer other nodes, before the Routes are sent.
	BeginDrain bool
	// Routes are what routers are sent. Nil: nothing new.
	Routes *Routes
	// EndDrain takes back what BeginDrain asked for, after the Routes are sent.
	EndDrain bool
	// StopRouters closes the sessions with routers.
	StopRouters bool
	// Changes are the changes of the plan, which are logged. Log is what else is logged.
	Changes plan.Changes
	Log     []Line

	// Next is when Decide is due if nothing happens before, or StillLeaving after a Stop. Zero:
	// never.
	Next time.Time
	// Done is set when everything that follows a Stop is over.
	Done bool
}

// Routes are what routers are sent.
type Routes struct {
	plan.BGP
	// All is set if all routes have to be set. Otherwise only the routes to Changed are different.
	All     bool
	Changed []netip.Prefix
}

// Line is a line of the log.
type Line struct {
	Warn bool
	Text string
	Args []any
}

// RetryAfter is how long after a failure the VIPs or the routes are set again.
const RetryAfter = time.Second

// Options are the settings of a Core, which never change.
type Options struct {
	Node string
	// HandOver is how long at most this node answers for a VIP that leaves.
	HandOver time.Duration
	// Drain is how long routers have to prefer other nodes.
	Drain time.Duration
}

// Core is the machine. It is not safe for concurrent use.
type Core struct {
	Options
	now time.Time // of this step
	out Effects   // of this step

	facts      facts
	planner    *plan.Planner
	forwarded  *plan.Forwarding // the last Forwarding of the effects
	ready      bool             // this node may own VIPs
	everReady  bool
	limitsSent bool      // some effects had Limits
	retry      time.Time // when to set the VIPs again after a failure; zero: they were set
	leaving    map[netip.Addr]leaving
	arriving   map[netip.Addr]arriving
	gained     map[netip.Addr]time.Time // when this node got its endpoints, of VIPs with policy Local
	routing    routing
	moves      moves
	ending     ending

	since     map[netip.Addr]time.Time // of the VIPs that the plan has this node own
	plannedAt time.Time
}

// New returns a Core that knows nothing yet.
func New(o Options) *Core {
	return &Core{
		Options: o, planner: plan.NewPlanner(o.Node), leaving: map[netip.Addr]leaving{}, arriving: map[netip.Addr]arriving{},
		gained: map[netip.Addr]time.Time{}, since: map[netip.Addr]time.Time{}, routing: routing{due: true},
		moves: moves{moving: map[netip.Addr]moving{}, orphans: map[netip.Addr]bool{}, fresh: map[netip.Addr]bool{}},
	}
}

// Step takes an event at a time, which never goes back.
func (c *Core) Step(event Event, now time.Time) Effects {
	c.now, c.out.Ready = now, c.ready
	switch e := event.(type) {
	case Decide:
		c.decide()
	case Stop:
		c.stop()
	case StillLeaving:
		c.end(int(e))
	case VIPsFailed:
		c.retry = now.Add(RetryAfter)
	case RoutesFailed:
		c.routing.current, c.routing.retry = false, now.Add(RetryAfter)
	default:
		c.note(event)
		return Effects{Ready: c.ready}
	}
	c.out.Next = c.next()
	out := c.out
	c.out = Effects{} // keep no changes in memory
	return out
}

// decide decides in the order that the package's comment explains.
func (c *Core) decide() {
	c.decideReady()
	if !c.facts.health.Synced {
		return
	}
	toDrain := c.plan()
	changed := c.leave()
	changed = c.arrive() || changed
	c.announce(changed)
	c.route(toDrain)
	c.noteMoves()
	c.settleMoves()
}

// announce sets what is announced on the segment, if the plan or VIPs that leave or arrive changed
// it, or if it was not set the last time.
func (c *Core) announce(changed bool) {
	owned := func(v plan.Change) bool { return v.Before.Owned || v.After.Owned }
	if changed || !c.retry.IsZero() || slices.ContainsFunc(c.out.Changes.VIPs, owned) {
		c.retry = time.Time{}
		c.out.SetVIPs, c.out.VIPs = true, c.want()
	}
}

// want returns what is announced: the VIPs of the plan, some of which arrive, and those that leave.
func (c *Core) want() map[netip.Addr]plan.Layer2 {
	owned := c.planner.Plan().Layer2
	if len(c.leaving)+len(c.arriving) == 0 {
		return owned
	}
	want := maps.Clone(owned)
	for vip := range c.arriving {
		l := want[vip]
		l.Arriving = true
		want[vip] = l
	}
	for vip, l := range c.leaving {
		want[vip] = l.Layer2
	}
	return want
}

// next returns the first time at which there is something to decide.
func (c *Core) next() time.Time {
	if c.ending.began {
		return c.ending.next
	}
	first := earlier(earlier(c.retry, c.routing.retry), earlier(c.routing.until, c.moves.next))
	for _, l := range c.leaving {
		first = earlier(first, l.until)
	}
	for _, a := range c.arriving {
		first = earlier(first, a.until)
	}
	return first
}

// earlier returns the earlier of two times. Zero is never.
func earlier(a, b time.Time) time.Time {
	if a.IsZero() || !b.IsZero() && b.Before(a) {
		return b
	}
	return a
}

// log adds a line to the log.
func (c *Core) log(warn bool, text string, args ...any) {
	c.out.Log = append(c.out.Log, Line{warn, text, args})
}

// State is the last decision. Nobody may modify its maps, and they are valid until the next step.
type State struct {
	Plan plan.Plan
	// Since is since when this node owns each of its VIPs.
	Since map[netip.Addr]time.Time
	// Digest identifies the document of the plan. Planned is when the plan was made.
	Digest  string
	Planned time.Time
	// Node is this node. Known is set if the API server has it.
	Node  plan.Node
	Known bool
	// Moves are the VIPs that moved lately, as far as this node reports them. The slice is never
	// modified.
	Moves []report.Move
}

// State returns the last decision.
func (c *Core) State() State {
	s := State{Plan: c.planner.Plan(), Since: c.since, Planned: c.plannedAt, Moves: c.moves.published}
	s.Node, s.Known = c.facts.nodes[c.Node]
	if c.facts.planConfig != nil {
		s.Digest = c.facts.planConfig.Digest
	}
	return s
}
