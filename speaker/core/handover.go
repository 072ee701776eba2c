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
// A node that is not ready or has no link gives all up at once, because it does not carry the traffic. One
// with the condition NetworkUnavailable may: network plugins set it when they restart. A next
// owner that is not in known comes out of a partition, in which it owned the VIP all the time: it will
// not announce the VIP anew, so there is nothing to wait for. It did not own it if it has endpoints only
// since then: it waits for its kube-proxy (arriving.go).
func (c *Core) leave(known map[string]bool) (ended bool) {
	before, sound := len(c.leaving), c.ready || c.ending.began
	maps.DeleteFunc(c.leaving, func(_ netip.Addr, l leaving) bool { return !sound || !c.now.Before(l.until) })
	ended = len(c.leaving) < before
	for _, v := range c.out.Changes.VIPs {
		_, heard := known[v.After.Silence.Owner]
		heard = heard || c.gained[v.VIP][v.After.Silence.Owner]
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
	maps.DeleteFunc(c.gained, func(vip netip.Addr, nodes map[string]bool) bool {
		maps.DeleteFunc(nodes, func(node string, _ bool) bool { return c.facts.speakers[node] || !c.planner.Serves(vip, node) })
		return len(nodes) == 0
	})
	return ended
}

// noteGained notes the nodes that get endpoints for a VIP now, if their speakers are lost.
func (c *Core) noteGained(vip netip.Addr, serving map[string]bool) {
	for node := range serving {
		if _, alive := c.facts.speakers[node]; alive || !c.everReady || c.planner.Serves(vip, node) {
			continue
		}
		if c.gained[vip] == nil {
			c.gained[vip] = map[string]bool{}
		}
		c.gained[vip][node] = true
	}
}
