package segment

import (
	"time"

	"github.com/lodestone-lb/lodestone/speaker/layer2/wire"
)

// Schedule has the times at which a VIP is announced after this node became its owner.
var Schedule = [...]time.Duration{
	// At once: traffic is lost until neighbours hear of it.
	0,
	// For lost frames, and for neighbours that the old owner answered just before.
	100 * time.Millisecond,
	// For busy hosts, for routers that limit ARP packets, and for links that came up a moment ago.
	// RFC 5227 section 1.1 has two announcements with two seconds between them (ANNOUNCE_NUM,
	// ANNOUNCE_INTERVAL).
	time.Second,
	2 * time.Second,
	// For switches that learn again after a topology change.
	4 * time.Second,
}

// announce returns the frames of an announcement, if it is due still, and enters the next one.
func (m *Machine) announce(p pending) [][]byte {
	v := p.vip
	switch {
	case p.step > 0 && !m.Whole && m.hearing.deaf:
		return m.askInstead(p)
	case p.step.scheduled() && p.edition != v.edition: // announced or probed anew since
		return nil
	case v.reason != "":
		return nil
	case v.contested() && (p.step > 0 && p.step.scheduled() || p.step == stepRound):
		m.queue.again(p, m.now) // the correction of the rival's claim comes instead
		return nil
	}
	frames := m.Protocol.Announce(m.statement(v), p.step == 0)
	m.out.Announcements += len(frames)
	m.queue.again(p, m.now)
	return frames
}

// announceAnew announces the VIP as if it were new. One that was not found to be free is probed before.
func (m *Machine) announceAnew(v *vip) {
	v.edition++
	p := pending{vip: v, edition: v.edition}
	if v.unprobed {
		v.reason, v.by, v.heard = Probing, wire.MAC{}, false
		p.step, p.due = stepProbe, m.now
	}
	m.queue.enter(p)
}

// again enters the announcement that follows p, which was sent just now.
func (q *queue) again(p pending, now time.Time) {
	if !p.step.scheduled() {
		return
	}
	if p.step == 0 {
		p.first = now
	}
	switch p.step = min(p.step+1, stepRefresh); {
	case p.step < stepRefresh:
		p.due = p.first.Add(Schedule[p.step])
	case p.vip.Refresh > 0:
		p.due = now.Add(p.vip.Refresh)
	default:
		return
	}
	q.enter(p)
}
