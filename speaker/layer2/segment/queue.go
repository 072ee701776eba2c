package segment

import (
	"cmp"
	"slices"
	"time"

	"golang.org/x/time/rate"

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

// The pace of announcements on one interface: every host on the segment has to handle these broadcasts, and
// routers drop ARP packets above some rate. 5,000 VIPs take one second.
const (
	framesPerSecond = 10_000
	burstFrames     = 10
	// framesAtOnce is how many frames one pending has at most.
	framesAtOnce = 2
	// pendingAtOnce bounds the duration of one Step, during which requests wait.
	pendingAtOnce = 64
)

// step is the kind of a pending frame. Steps below stepRefresh are the announcements of Schedule.
type step int

const (
	stepRefresh step = step(len(Schedule)) + iota
	stepDefence
	stepCorrection
	stepLag
	stepRound
	stepBeacon
	stepProbe
	stepProbed    = stepProbe + probes
	stepRecheck   = stepProbed + 1
	stepPoll      = stepRecheck + 1
	stepChallenge = stepPoll + 1
	steps         = stepChallenge + 1
)

// claims reports whether the step announces the VIP. The others ask for it.
func (s step) claims() bool { return s < stepProbe }

// pending is something that has to be sent when it is due.
type pending struct {
	vip        *vip // nil: a beacon, whose VIP is chosen when it is due
	step       step
	first, due time.Time // when the first announcement was sent, and when this one is due. Zero: before all others
	edition    int       // of the VIP when it was entered
	to         wire.MAC  // the speaker that is asked
	asked      int       // how often it was asked
}

// queue has a line for each step. The first of a line is due first.
type queue struct {
	lines [steps][]pending
	pace  *rate.Limiter
	free  time.Time // when the pace allows the next frames
}

// enter enters p behind those that are due before it. That is the end of the line, unless refresh intervals
// differ.
func (q *queue) enter(p pending) {
	line := q.lines[p.step]
	if n := len(line); n == 0 || !line[n-1].due.After(p.due) {
		q.lines[p.step] = append(line, p)
		return
	}
	at, _ := slices.BinarySearchFunc(line, p.due, func(q pending, due time.Time) int { return cmp.Or(q.due.Compare(due), -1) })
	q.lines[p.step] = slices.Insert(line, at, p)
}

func (q *queue) waits(s step) bool { return len(q.lines[s]) > 0 }

// first returns the line whose first is due first. Nil: all lines are empty.
func (q *queue) first() (first *[]pending) {
	for s := range q.lines {
		if line := &q.lines[s]; len(*line) > 0 && (first == nil || (*line)[0].due.Before((*first)[0].due)) {
			first = line
		}
	}
	return first
}

// next returns when something may be sent.
func (q *queue) next() (at time.Time, ok bool) {
	line := q.first()
	if line == nil {
		return time.Time{}, false
	}
	if at = (*line)[0].due; at.Before(q.free) {
		at = q.free
	}
	return at, true
}

// pop removes and returns something that may be sent now.
func (q *queue) pop(now time.Time) (p pending, ok bool) {
	if at, ok := q.next(); !ok || at.After(now) {
		return pending{}, false
	}
	line := q.first()
	p, *line = (*line)[0], (*line)[1:]
	return p, true
}

// spend counts frames that are sent now towards the pace.
func (q *queue) spend(frames int, now time.Time) {
	q.pace.AllowN(now, frames)
	if lacking := framesAtOnce - q.pace.TokensAt(now); lacking > 0 {
		q.free = now.Add(time.Duration(lacking/framesPerSecond*float64(time.Second)) + 1)
	}
}

// sendDue sends what is due, within the pace.
func (m *Machine) sendDue() {
	for range pendingAtOnce {
		p, ok := m.queue.pop(m.now)
		if !ok {
			return
		}
		p.done()
		frames := m.frames(&p)
		if len(frames) == 0 {
			continue
		}
		m.out.send(frames...)
		m.queue.spend(len(frames), m.now)
		if p.step.claims() {
			m.out.Announcements += len(frames)
			p.vip.claimed, p.vip.announced = time.Time{}, m.now // our announcement overrides earlier claims
		}
		m.again(p)
	}
}

// done notes that p is not pending any more.
func (p pending) done() {
	switch p.step {
	case stepCorrection:
		p.vip.correcting = false
	case stepLag:
		p.vip.lagging = false
	case stepChallenge:
		delete(p.vip.challenged, p.to)
	}
}

// frames returns the frames of p, if there are any.
func (m *Machine) frames(p *pending) [][]byte {
	if p.step == stepBeacon && !m.Whole {
		m.queue.enter(pending{step: stepBeacon, due: m.now.Add(m.beacons.wait(m.Crowd))})
		p.vip = m.beacons.next(m.vips)
	}
	v := p.vip
	switch {
	case v == nil, v.gone, v.Leaving && !v.probedAtLast(p.step):
		return nil // and no repetition
	case p.step > 1 && p.step.claims() && !m.Whole && m.hearing.deaf:
		frames := m.askInstead(*p)
		p.step = stepProbe
		return frames
	case p.step == stepPoll:
		return m.poll(v)
	case p.step == stepChallenge:
		return m.askChallenged(*p)
	case (p.step <= stepRefresh || p.step >= stepProbe) && p.edition != v.edition:
		return nil // announced or probed anew since
	case p.step == stepRecheck:
		v.heard = false // set again if the other machine still has it
		p.step, p.due = stepProbe, m.now
		m.queue.enter(*p)
		return nil
	case p.step >= stepProbe:
		return m.probe(*p)
	case v.reason != "":
		return nil
	case (p.step > 0 && p.step <= stepRefresh || p.step == stepRound) && v.contested():
		m.again(*p) // the correction of the rival's claim comes instead
		return nil
	}
	return m.Protocol.Announce(m.statement(v), p.step == 0)
}

// announces reports whether this node may announce the VIP.
func (v *vip) announces() bool { return !v.gone && !v.Leaving }

// probedAtLast reports whether the step is one of the probes of a VIP that leaves. Those of a new VIP go on: if the VIP
// is free, this node answers for it until the next owner is heard, which may wait for its kube-proxy.
func (v *vip) probedAtLast(s step) bool {
	return (v.reason == Probing || v.answersAtLast()) && s >= stepProbe && s <= stepProbed
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
func (m *Machine) again(p pending) {
	if p.step > stepRefresh {
		return
	}
	if p.step == 0 {
		p.first = m.now
	}
	switch p.step = min(p.step+1, stepRefresh); {
	case p.step < stepRefresh:
		p.due = p.first.Add(Schedule[p.step])
	case p.vip.Refresh > 0:
		p.due = m.now.Add(p.vip.Refresh)
	default:
		return
	}
	m.queue.enter(p)
}
