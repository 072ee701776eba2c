package core

import (
	"maps"
	"net/netip"
	"time"

	"github.com/lodestone-lb/lodestone/speaker/plan"
)

// kubeProxyLag is how long kube-proxy takes to forward to a new endpoint: it updates its rules once a
// second (minSyncPeriod), and the update took 0.6 s on a busy node. Nobody waits for it, since the previous
// owner answers: the hand-over is longer.
const kubeProxyLag = 4 * time.Second

// hastyLag takes the place of kubeProxyLag where the previous owner is hasty, see report.Network: nobody would answer
// after it has stopped. It is what speakers of v0.1.0 have.
const hastyLag = 1500 * time.Millisecond

// arriving is a VIP that moves to this node because the node has a new endpoint, while its owner has
// endpoints, too. The owner keeps the VIP until that time.
type arriving struct {
	from  string
	until time.Time
}

// arrive decides which VIPs are not announced yet because kube-proxy may not serve them on this node.
// It reports whether a VIP has arrived, or does not move to this node any more.
func (c *Core) arrive() (ended bool) {
	for _, vip := range c.out.Gone {
		delete(c.endpoints, vip)
		for _, gained := range c.gained {
			delete(gained, vip)
		}
	}
	for _, v := range c.out.Changes.VIPs {
		began, local := c.endpoints[v.VIP]
		if _, late := c.arriving[v.VIP]; local && v.Before.Owned && !v.After.Owned && !late {
			c.endpoints[v.VIP] = time.Time{} // it was announced here, and may be back before its next owner has it
		}
		from, lag := v.Before.Silence.Owner, kubeProxyLag
		if c.facts.networks[from].Hasty {
			lag = hastyLag
		}
		a := arriving{from, began.Add(min(lag, c.HandOver/4*3))}
		if local && !v.Before.Owned && v.After.Owned && c.waits(v.VIP, a) {
			c.arriving[v.VIP] = a
		}
	}
	before := len(c.arriving)
	maps.DeleteFunc(c.arriving, func(vip netip.Addr, a arriving) bool { return !c.waits(vip, a) })
	return len(c.arriving) < before
}

// waits reports whether the previous owner should keep the VIP for now.
func (c *Core) waits(vip netip.Addr, a arriving) bool {
	_, owned := c.planner.Plan().Layer2[vip]
	if !owned || !c.now.Before(a.until) || !c.facts.speakers[a.from] {
		return false
	}
	why := c.planner.Why(vip, a.from)
	return why == plan.NotOwner || why == plan.LessPreferred
}
