package core

import (
	"maps"
	"net/netip"
	"time"

	"github.com/lodestone-lb/lodestone/speaker/plan"
)

// leaving is a VIP that moves to another node. This node answers for it until that node is heard, but
// not longer than until.
type leaving struct {
	plan.Layer2
	until time.Time
}

// leave decides which VIPs leave, and reports whether a VIP does not leave any more.
//
// A node that is not ready or has no link gives all up at once, because it does not carry the traffic. A node
// with the condition NetworkUnavailable may carry it: network plugins set the condition when they restart.
//
// The next owner may have announced the VIP before, if it comes out of a partition: the segment finds that out.
func (c *Core) leave() (ended bool) {
	before, sound := len(c.leaving), c.ready || c.ending.began
	maps.DeleteFunc(c.leaving, func(_ netip.Addr, l leaving) bool { return !sound || !c.now.Before(l.until) })
	ended = len(c.leaving) < before
	for _, v := range c.out.Changes.VIPs {
		l, leaves := c.leaving[v.VIP]
		next := v.After.Silence
		orderly := sound && next.Owner != "" && next.Reason != plan.LinkDown
		switch {
		case orderly && v.Before.Owned:
			v.Before.Layer2.Leaving = true
			c.leaving[v.VIP] = leaving{v.Before.Layer2, c.now.Add(c.HandOver)}
		case orderly && leaves && next.Owner != v.Before.Silence.Owner: // which may wait for its kube-proxy, too
			l.until = c.now.Add(c.HandOver)
			c.leaving[v.VIP] = l
		case !orderly && leaves: // it is back, or has nowhere to go
			delete(c.leaving, v.VIP)
			ended = true
		}
	}
	return ended
}
