package core

import (
	"maps"
	"net/netip"
	"time"

	"github.com/lodestone-lb/lodestone/speaker/plan"
)

// kubeProxyLag is how long kube-proxy may take until it forwards to an endpoint that
// is new: it brings its rules up to date once a second (minSyncPeriod), which takes
// a moment. It is shorter than the hand-over, for which the owner waits.
const kubeProxyLag = 1500 * time.Millisecond

// arriving is a VIP that this node is to own because of an endpoint here that is new,
// while its owner has endpoints, too: the owner keeps it until then.
type arriving struct {
	from  string
	until time.Time
}

// arrive decides which VIPs are not announced yet, because kube-proxy may not serve them
// here. It reports whether any has arrived, or is this node's no longer.
func (c *Core) arrive() (ended bool) {
	for _, vip := range c.out.Gone {
		delete(c.endpoints, vip)
	}
	for _, v := range c.out.Changes.VIPs {
		began, local := c.endpoints[v.VIP]
		a := arriving{v.Before.Silence.Owner, began.Add(min(kubeProxyLag, c.HandOver/4*3))}
		if local && !v.Before.Owned && v.After.Owned && c.waits(v.VIP, a) {
			c.arriving[v.VIP] = a
		}
	}
	before := len(c.arriving)
	maps.DeleteFunc(c.arriving, func(vip netip.Addr, a arriving) bool { return !c.waits(vip, a) })
	return len(c.arriving) < before
}

// waits reports whether the VIP is better off where it is.
func (c *Core) waits(vip netip.Addr, a arriving) bool {
	_, owned := c.planner.Plan().Layer2[vip]
	return owned && c.now.Before(a.until) && c.facts.speakers[a.from] && c.planner.Why(vip, a.from) == plan.NotOwner
}
