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
	// movesSettle is how long a VIP must have had the same owner before anybody
	// hears that it is another one: a speaker that is replaced within that time,
	// or a node that flaps, is no news.
	movesSettle = 10 * time.Second
	// movesPublished is how long moves are published. The controller notes them when
	// they are written, which is seconds later.
	movesPublished = 2 * time.Minute
)

// moves are the VIPs that change hands. Every speaker sees them all, in its own
// plan, and one of them reports: see reporter.
type moves struct {
	moving    map[netip.Addr]moving
	orphans   map[netip.Addr]bool // that nobody had when they settled last
	published []report.Move
	next      time.Time // when moves may have settled, or have been published for long enough; zero: none
}

// moving is a VIP that changes hands, and that somebody had, or nobody, as long
// as it stayed.
type moving struct {
	from, to string
	why      report.Reason // as of the first move
	at       time.Time     // of the last move
}

// noteMoves notes what changes hands.
func (c *Core) noteMoves() {
	for _, vip := range c.out.Gone {
		delete(c.moves.moving, vip)
		delete(c.moves.orphans, vip)
	}
	for _, m := range c.out.Changes.Moves {
		at, known := c.moves.moving[m.VIP]
		if !known {
			at = moving{from: m.From, why: c.why(m)}
		}
		if at.to, at.at = m.To, c.now; at.to == at.from {
			delete(c.moves.moving, m.VIP)
			continue
		}
		c.moves.moving[m.VIP] = at
	}
	if len(c.out.Changes.Moves) > 0 {
		c.moves.lookAt(c.now.Add(movesSettle))
	}
}

// why returns why the node that had a VIP has it no more.
func (c *Core) why(m plan.Move) report.Reason {
	why := report.Reason(c.planner.Why(m.VIP, m.From))
	if _, alive := c.facts.speakers[m.From]; why == report.Reason(plan.SpeakerNotReady) && !alive {
		return report.SpeakerLost
	}
	return why
}

// settleMoves publishes what has moved for good, as far as this node is to report it, and
// forgets what was published long ago.
func (c *Core) settleMoves() {
	if c.moves.next.IsZero() || c.now.Before(c.moves.next) {
		return
	}
	c.moves.next = time.Time{}
	fresh, first := map[moving]report.Move{}, firstReady(c.facts.speakers)
	for vip, m := range c.moves.moving {
		if due := m.at.Add(movesSettle); c.now.Before(due) {
			c.moves.lookAt(due)
			continue
		}
		delete(c.moves.moving, vip)
		if c.moves.again(vip, m) && reporter(m, c.facts.speakers, first) == c.Node {
			key := moving{from: m.from, why: m.why}
			if fresh[key].To == nil {
				fresh[key] = report.Move{At: c.now, From: m.from, Why: m.why, To: map[string][]netip.Addr{}}
			}
			fresh[key].To[m.to] = append(fresh[key].To[m.to], vip)
		}
	}
	c.publishMoves(slices.Collect(maps.Values(fresh)))
}

// lookAt has the moves looked at by then.
func (m *moves) lookAt(when time.Time) {
	if m.next.IsZero() || when.Before(m.next) {
		m.next = when
	}
}

// again notes what nobody has, and reports whether the move is one: a VIP that
// nobody has had yet does not move to its first owner.
func (m *moves) again(vip netip.Addr, of moving) bool {
	had := m.orphans[vip]
	if delete(m.orphans, vip); of.to == "" {
		m.orphans[vip] = true
	}
	return of.from != "" || had
}

// publishMoves adds the fresh ones to what is published, and takes the old ones away.
func (c *Core) publishMoves(fresh []report.Move) {
	old := func(m report.Move) bool { return c.now.Sub(m.At) >= movesPublished }
	published := slices.DeleteFunc(slices.Clone(c.moves.published), old)
	if n := report.CountVIPs(fresh); n > report.MaxVIPs {
		c.log(true, "too many VIPs moved for an Event of each", "vips", n, "reported", report.MaxVIPs)
	}
	if published = append(published, fresh...); len(fresh) > 0 || len(published) < len(c.moves.published) {
		c.moves.published, c.out.News = published, true
	}
	for _, m := range published {
		c.moves.lookAt(m.At.Add(movesPublished))
	}
}

// reporter returns the node that reports a move. It is the one that had the VIP,
// if its speaker is ready: it knows since when. Otherwise the first of the others
// by name: so the loss of a node is reported by one, and not by each heir; and not by
// the VIP's owner if there are others, since a speaker that has just started does
// not know who had it before.
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
