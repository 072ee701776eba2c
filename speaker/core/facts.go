package core

import (
	"maps"
	"net/netip"
	"slices"

	"github.com/lodestone-lb/lodestone/pkg/config"
	"github.com/lodestone-lb/lodestone/pkg/report"
	"github.com/lodestone-lb/lodestone/speaker/plan"
)

// facts are the facts that the machine was given, and those that the planner was given of them.
type facts struct {
	health  Health
	config  *config.Config
	cluster map[string]plan.Node // as the API server has them
	members Members
	// newCluster and newMembers are set if cluster and members are newer than the plan.
	newCluster, newMembers bool

	// What the planner was given.
	planConfig *config.Config
	nodes      map[string]plan.Node // with what their speakers publish
	speakers   map[string]bool
	networks   map[string]report.Network // those of nodes
}

// note notes a fact.
func (c *Core) note(event Event) {
	f := &c.facts
	switch e := event.(type) {
	case Health:
		f.health = e
	case Config:
		f.config = e.Config
	case Nodes:
		f.cluster, f.newCluster = e, true
	case Members:
		f.members, f.newMembers = e, true
	case Service:
		c.put(e.Service)
	case Passwords:
		c.routing.due = true
	}
}

// put gives a Service to the planner, and notes when this node got its endpoints: kube-proxy may not
// forward to new ones yet. Where it forwarded to those of other nodes before, they are not new.
func (c *Core) put(s plan.Service) {
	for _, vip := range s.VIPs {
		if !s.EndpointsAt(vip).ServesOn(c.Node) {
			delete(c.gained, vip)
		} else if !c.planner.Serves(vip, c.Node) {
			c.gained[vip] = c.now
		}
	}
	c.planner.Put(s)
}

// plan brings the plan up to date with the facts. It returns the routes of a node that has just been
// excluded, see routesAtExclusion.
func (c *Core) plan() (toDrain map[netip.Prefix]plan.Route) {
	excluded := c.excluded()
	c.inform()
	toDrain = c.routesAtExclusion(excluded)
	defer c.forward()
	if !c.planner.Stale() {
		return toDrain
	}
	unlimited := c.planner.Plan().LimitErrs
	c.update()
	p := c.planner.Plan()
	c.out.NewPlan, c.out.Claims, c.out.Gone = true, p.Claims, c.out.Changes.Gone()
	// Before this speaker is ready, the limits of the previous one stay: packets still arrive.
	if c.everReady && (c.out.Changes.Limits || !c.limitsSent) {
		c.out.Limits, c.limitsSent = p.Limits, true
	}
	if c.out.Changes.Limits {
		c.logLimitErrs(unlimited, p.LimitErrs)
	}
	return toDrain
}

func (c *Core) logLimitErrs(before, now map[string]error) {
	for _, name := range slices.Sorted(maps.Keys(now)) {
		if err := now[name]; err != before[name] {
			c.log(true, "connections are not limited: correct the Service's annotation", "service", name, "err", err)
		}
	}
}

// forward sets what is forwarded directly. It does so before the node is ready, so that the node takes
// connections that others forward to it. While a speaker does not know the others, the kernel's rules
// stay as they are.
func (c *Core) forward() {
	p := c.planner.Plan()
	if c.facts.health.Joined && c.facts.config != nil && p.Forwarding != c.forwarded {
		c.forwarded, c.out.Forwarding = p.Forwarding, p.Forwarding
	}
}

// inform gives the planner the new facts.
func (c *Core) inform() {
	f := &c.facts
	node, known := f.nodes[c.Node]
	routesDue := f.newCluster || f.config != f.planConfig
	changed, changedNodes := f.config != f.planConfig, f.newCluster
	// Whether this node is ready is decided here; members has it later.
	if f.newMembers || f.speakers[c.Node] != c.ready {
		speakers := map[string]bool{}
		maps.Copy(speakers, f.members.Speakers)
		speakers[c.Node] = c.ready
		changed, f.speakers = changed || !maps.Equal(speakers, f.speakers), speakers
	}
	if f.newMembers {
		changedNodes = changedNodes || !maps.EqualFunc(f.members.Networks, f.networks, equalNetworks)
		f.networks = f.members.Networks
	}
	f.planConfig, f.newCluster, f.newMembers = f.config, false, false
	if changedNodes {
		f.nodes = locate(f.cluster, f.networks)
	}
	if changed || changedNodes {
		c.planner.Set(f.planConfig, f.nodes, f.speakers)
	}
	n, knows := f.nodes[c.Node]
	if knows != known || !maps.Equal(n.Labels, node.Labels) || !slices.Equal(n.Addresses, node.Addresses) {
		c.out.StateChanged = true
	}
	// Without a configuration, or while the API server does not know this node, the routes to pods
	// stay as they are.
	if routesDue && knows && f.planConfig != nil {
		c.out.PodRoutes = new(plan.PodRoutesOf(c.Node, f.planConfig, f.nodes))
	}
}

// locate returns the nodes with what their speakers publish: segments and claims.
func locate(nodes map[string]plan.Node, networks map[string]report.Network) map[string]plan.Node {
	located := make(map[string]plan.Node, len(nodes))
	for name, n := range nodes {
		n.Network = networks[name]
		located[name] = n
	}
	return located
}

// equalNetworks reports whether the two are the same for the plan.
func equalNetworks(a, b report.Network) bool {
	return a.Claims == b.Claims && a.Blind == b.Blind && a.Sick == b.Sick && a.Apart == b.Apart && a.Forwards == b.Forwards &&
		slices.Equal(a.Conflicts, b.Conflicts) && slices.Equal(a.Segments, b.Segments) && (a.Segments == nil) == (b.Segments == nil)
}

// update updates the plan, and since when this node owns its VIPs.
func (c *Core) update() {
	c.out.Changes, c.plannedAt = c.planner.Update(), c.now
	for _, v := range c.out.Changes.VIPs {
		switch {
		case !v.After.Owned:
			delete(c.since, v.VIP)
		case !v.Before.Owned:
			c.since[v.VIP] = c.now
		}
	}
}

// excluded reports whether the node is taken out of load balancing, by what the planner was given.
func (c *Core) excluded() bool { return c.facts.nodes[c.Node].Excluded(c.facts.planConfig) }
