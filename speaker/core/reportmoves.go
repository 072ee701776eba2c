package core

import (
	"maps"
	"net/netip"
	"slices"
	"time"

	"github.com/lodestone-lb/lodestone/pkg/report"
	"github.com/lodestone-lb/lodestone/speaker/plan"
)

const (
	// movesSettle is how long a VIP must have had the same owner before its move is reported. A
	// speaker that is replaced within that time, or a node that flaps, is not reported.
	movesSettle = 10 * time.Second
	// movesPublished is how long moves are published. The controller reads them seconds after they
	// are written.
	movesPublished = 2 * time.Minute
	// maxFirst bounds the VIPs whose first owner is published at a time. They are many when a cluster is
	// filled or an advertisement comes to apply to all, and must not cost what the loss of a node may.
	maxFirst = 64
)

// moves are the VIPs that change their owner. Every speaker sees all of them in its own plan, and one
// speaker reports them: see reporter.
type moves struct {
	moving    map[netip.Addr]moving
	orphans   map[netip.Addr]bool // the VIPs that nobody owned when they settled last
	fresh     map[netip.Addr]bool // the VIPs that came while this speaker ran and have had no owner for long enough
	published []report.Move
	next      time.Time // when a move may settle or its publication end; zero: never
}

// moving is a VIP that has not settled. from is its owner when it was settled, to its owner now. Empty:
// nobody.
type moving struct {
	from, to string
	why      report.Reason // as of the first move
	at       time.Time     // of the last move
}

// noteMoves notes which VIPs change their owner.
func (c *Core) noteMoves() {
	for _, vip := range c.out.Gone {
		delete(c.moves.moving, vip)
		delete(c.moves.orphans, vip)
		delete(c.moves.fresh, vip)
	}
	for _, m := range c.out.Changes.Moves {
		if m.New {
			c.moves.fresh[m.VIP] = true
		}
		vip, known := c.moves.moving[m.VIP]
		if !known {
			vip = moving{from: m.From, why: c.why(m)}
		}
		if vip.to, vip.at = m.To, c.now; vip.to == vip.from {
			delete(c.moves.moving, m.VIP)
			continue
		}
		c.moves.moving[m.VIP] = vip
	}
	if len(c.out.Changes.Moves) > 0 {
		c.moves.lookAt(c.now.Add(movesSettle))
	}
}

// why returns why the node lost the VIP.
func (c *Core) why(m plan.Move) report.Reason {
	why := report.Reason(c.planner.Why(m.VIP, m.From))
	if _, alive := c.facts.speakers[m.From]; why == report.Reason(plan.SpeakerNotReady) && !alive {
		return report.SpeakerLost
	}
	return why
}

// settleMoves publishes the moves that have settled and that this node reports, and forgets those that
// were published long ago.
func (c *Core) settleMoves() {
	if c.moves.next.IsZero() || c.now.Before(c.moves.next) {
		return
	}
	c.moves.next = time.Time{}
	settled, first := map[moving]report.Move{}, firstReady(c.facts.speakers)
	room := maxFirst - c.moves.countFirst()
	for vip, m := range c.moves.moving {
		if due := m.at.Add(movesSettle); c.now.Before(due) {
			c.moves.lookAt(due)
			continue
		}
		delete(c.moves.moving, vip)
		if c.moves.fresh[vip] {
			m.why = report.FirstOwner
		}
		if c.moves.settle(vip, m) && reporter(m, c.facts.speakers, first) == c.Node {
			if m.why == report.FirstOwner {
				if room--; room < 0 {
					continue
				}
			}
			key := moving{from: m.from, why: m.why}
			if settled[key].To == nil {
				settled[key] = report.Move{At: c.now, From: m.from, Why: m.why, To: map[string][]netip.Addr{}}
			}
			settled[key].To[m.to] = append(settled[key].To[m.to], vip)
		}
	}
	c.publishMoves(slices.Collect(maps.Values(settled)))
}

// lookAt has settleMoves called by then.
func (m *moves) lookAt(when time.Time) { m.next = earlier(m.next, when) }

// countFirst returns how many VIPs are published with their first owner. Those that are due to go count,
// too.
func (m *moves) countFirst() int {
	return report.CountVIPs(slices.DeleteFunc(slices.Clone(m.published), func(p report.Move) bool { return p.Why != report.FirstOwner }))
}

// settle notes whether nobody owns the VIP now, and reports whether the move counts. The owner of a VIP
// that was there when this speaker started may be its first one or not, and does not count.
func (m *moves) settle(vip netip.Addr, of moving) bool {
	had := m.orphans[vip] || m.fresh[vip]
	delete(m.fresh, vip)
	if delete(m.orphans, vip); of.to == "" {
		m.orphans[vip] = true
	}
	return of.from != "" || had
}

// publishMoves publishes the fresh moves, and removes the old ones.
func (c *Core) publishMoves(fresh []report.Move) {
	old := func(m report.Move) bool { return c.now.Sub(m.At) >= movesPublished }
	published := slices.DeleteFunc(slices.Clone(c.moves.published), old)
	if n := report.CountVIPs(fresh); n > report.MaxVIPs {
		c.log(true, "too many VIPs moved for an Event of each", "vips", n, "reported", report.MaxVIPs)
	}
	if published = append(published, fresh...); len(fresh) > 0 || len(published) < len(c.moves.published) {
		c.moves.published, c.out.StateChanged = published, true
	}
	for _, m := range published {
		c.moves.lookAt(m.At.Add(movesPublished))
	}
}

// reporter returns the node that reports a move. It is the previous owner if its speaker is ready.
// Otherwise it is the first ready speaker by name, so that one speaker reports the loss of a node, and
// not each new owner. The VIP's new owner reports only if there is no other: a speaker that has just
// started does not know the previous owner.
func reporter(m moving, speakers map[string]bool, first [2]string) string {
	switch {
	case m.from != "" && speakers[m.from]:
		return m.from
	case first[0] == m.to && first[1] != "":
		return first[1]
	}
	return first[0]
}

// firstReady returns the first two nodes, by name, whose speakers are ready.
func firstReady(speakers map[string]bool) (first [2]string) {
	for name, ready := range speakers {
		switch {
		case !ready:
		case first[0] == "" || name < first[0]:
			first[0], first[1] = name, first[0]
		case first[1] == "" || name < first[1]:
			first[1] = name
		}
	}
	return first
}
