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

// leave decides which VIPs leave, and reports whether a VIP does not leave any more. known are the
// speakers that were alive at the last plan.
//
// A node that is not ready or has no link gives all up at once, because it does not carry the traffic. A node
// with the condition NetworkUnavailable may carry it: network plugins set the condition when they restart.
//
// A next owner that is not in known comes out of a partition, in which it owned the VIP all the time. It will
// not announce the VIP again, so this node gives the VIP up at once. The exception is a next owner that has got
// its endpoints in the partition (gained): it did not own the VIP, and announces it once its kube-proxy may
// serve it (arriving.go).
func (c *Core) leave(known map[string]bool) (ended bool) {
	before, sound := len(c.leaving), c.ready || c.ending.began
	maps.DeleteFunc(c.leaving, func(_ netip.Addr, l leaving) bool { return !sound || !c.now.Before(l.until) })
	ended = len(c.leaving) < before
	for _, v := range c.out.Changes.VIPs {
		_, heard := known[v.After.Silence.Owner]
		heard = heard || c.gained[v.After.Silence.Owner][v.VIP]
		_, arrives := c.arriving[v.VIP]
		_, leaves := c.leaving[v.VIP]
		reason := v.After.Silence.Reason
		orderly := sound && heard && reason != plan.LinkDown
		switch {
		case orderly && v.Before.Owned && !arrives:
			v.Before.Layer2.Leaving = true
			c.leaving[v.VIP] = leaving{v.Before.Layer2, c.now.Add(c.HandOver)}
		case !orderly && leaves: // it is back, or has nowhere to go
			delete(c.leaving, v.VIP)
			ended = true
		}
	}
	maps.DeleteFunc(c.gained, func(node string, _ map[netip.Addr]bool) bool {
		_, alive := c.facts.speakers[node]
		return alive
	})
	return ended
}
