package segment

import (
	"cmp"
	"slices"
	"time"

	"golang.org/x/time/rate"

	"github.com/lodestone-lb/lodestone/speaker/layer2/wire"
)

// The pace of announcements on one interface: every host on the segment has to handle these broadcasts, and
// routers drop ARP packets above some rate. 5,000 VIPs take one second.
const (
	framesPerSecond = 10_000
	burstFrames     = 10
	// framesAtOnce is how many frames one pending has at most.
	framesAtOnce = 2
	// pendingAtOnce bounds the duration of one Step, during which requests wait.
	pendingAtOnce = 64
	// fewRefreshes is how many announcements that will not be sent may wait for a refresh in any case.
	fewRefreshes = 64
)

// sendDue sends what is due, within the pace.
func (m *Machine) sendDue() {
	for range pendingAtOnce {
		p, ok := m.queue.pop(m.now)
		if !ok {
			return
		}
		p.done()
		if frames := m.frames(p); len(frames) > 0 {
			m.out.send(frames...)
			m.queue.spend(len(frames), m.now)
		}
	}
}

// frames returns the frames of p, if there are any, and enters what follows p.
func (m *Machine) frames(p pending) [][]byte {
	if p.step == stepBeacon && !m.Whole {
		m.queue.enter(pending{step: stepBeacon, due: m.now.Add(m.beacons.wait(m.Crowd))})
		p.vip = m.beacons.next(m.vips)
	}
	v := p.vip
	switch {
	case v == nil, v.gone, v.Leaving && !v.probedAtLast(p.step):
		return nil
	case p.step.claims():
		return m.announce(p)
	case p.step == stepPoll:
		return m.poll(v)
	case p.step >= stepChallenge:
		return m.askChallenged(p)
	case p.edition != v.edition: // announced or probed anew since
		return nil
	case p.step == stepRecheck:
		v.heard = false // set again if the other machine still has it
		p.step, p.due = stepProbe, m.now
		m.queue.enter(p)
		return nil
	}
	return m.probe(p)
}

// done notes that p is not pending any more.
func (p *pending) done() {
	switch p.step {
	case stepCorrection:
		p.vip.correcting = false
	case stepLag:
		p.vip.lagging = false
	case stepChallenge, stepChallengeAgain:
		p.answered = p.vip.challenged[p.to]
		delete(p.vip.challenged, p.to)
	}
}

// step is the kind of a pending frame. Steps below stepRefresh are the announcements of Schedule. Steps from
// stepProbe to below stepProbed are the probes of a VIP. At stepProbed the time to answer the last one is over.
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
	// stepChallengeAgain has a line of its own. What enters a line is due after all that is in it, so that nothing is moved.
	stepChallengeAgain = stepChallenge + 1
	steps              = stepChallengeAgain + 1
)

// claims reports whether the step announces the VIP. The others ask for it.
func (s step) claims() bool { return s < stepProbe }

// scheduled reports whether another announcement may follow this step.
func (s step) scheduled() bool { return s <= stepRefresh }

// pending is something that has to be sent when it is due.
type pending struct {
	vip        *vip // nil: a beacon, whose VIP is chosen when it is due
	step       step
	first, due time.Time // when the first announcement was sent, and when this one is due. Zero: before all others
	edition    int       // of the VIP when it was entered
	to         wire.MAC  // the speaker that is asked
	asked      int       // how often it was asked
	answered   bool      // whether it has answered once
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

// tidy forgets announcements that will not be sent, once they are most of those that wait for a refresh. That can be in an hour, and
// the VIPs of Services that come and go all the time would be kept until then.
func (q *queue) tidy(vips int) {
	if line := q.lines[stepRefresh]; len(line) > 2*vips+fewRefreshes {
		q.lines[stepRefresh] = slices.DeleteFunc(line, func(p pending) bool { return p.vip.gone || p.edition != p.vip.edition })
	}
}

// spend counts frames that are sent now towards the pace.
func (q *queue) spend(frames int, now time.Time) {
	q.pace.AllowN(now, frames)
	if lacking := framesAtOnce - q.pace.TokensAt(now); lacking > 0 {
		q.free = now.Add(time.Duration(lacking/framesPerSecond*float64(time.Second)) + 1)
	}
}
