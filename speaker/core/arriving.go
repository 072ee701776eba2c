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

// arriving is a VIP that moves to this node because the node has a new endpoint. Its owner so far (from) has
// endpoints, too, and goes on answering until that time. The segment checks that it does: if nobody answers,
// this node announces the VIP at once.
type arriving struct {
	from  string
	until time.Time
}

// arrive decides which VIPs should stay where they are because kube-proxy may not serve them on this node
// yet. It reports whether a VIP has arrived, or does not move to this node any more.
func (c *Core) arrive() (ended bool) {
	for _, vip := range c.out.Gone {
		delete(c.gained, vip)
	}
	for _, v := range c.out.Changes.VIPs {
		if gained, local := c.gained[v.VIP]; local && !v.Before.Owned && v.After.Owned {
			a := arriving{v.Before.Silence.Owner, gained.Add(min(kubeProxyLag, c.HandOver/4*3))}
			// A previous owner that cannot keep it may not have had it yet, either. Then the one before it answers.
			m := c.moves.moving[v.VIP]
			if m.to == a.from && c.now.Sub(m.at) < kubeProxyLag && c.facts.speakers[a.from] && !c.waits(v.VIP, a) {
				a.from = m.from
			}
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
