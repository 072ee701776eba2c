package layer2

import (
	"cmp"
	"context"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"golang.org/x/time/rate"
)

// schedule says when a VIP is announced after this node became its owner.
var schedule = [...]time.Duration{
	// At once: traffic is lost until neighbours hear of it.
	0,
	// A frame that was lost, and neighbours that an old owner answered just before.
	100 * time.Millisecond,
	// Busy hosts and routers that limit the ARP packets they take, and links
	// that came up a moment ago. RFC 5227 section 1.1 has two announcements
	// two seconds apart (ANNOUNCE_NUM, ANNOUNCE_INTERVAL).
	time.Second,
	2 * time.Second,
	// The end of a switch's relearning after a topology change.
	4 * time.Second,
}

// When a VIP that somebody else claims is announced again, if it is still
// ours.
const (
	// defence answers a foreign host.
	defence = time.Second
	// correction answers a speaker of this cluster that ranks below us. It may
	// yet be the next owner: then the news that the VIP leaves us comes before,
	// unless a watch lags.
	correction = 400 * time.Millisecond
	// indulgence answers it while all speakers see each other: then it is the
	// next owner, and we have not heard yet that it is.
	indulgence = 5 * time.Second
)

// probes is how often it is asked whether a new VIP is in use, and probeWait
// how long each time an answer is waited for. RFC 5227 section 2.2 permits to
// wait less than its 4 to 7 s where the network is known to answer faster.
// Hosts on Ethernet answer within a millisecond; 200 ms are for links that
// sleep, and three questions, as there, for frames that are lost.
const (
	probes    = 3
	probeWait = 200 * time.Millisecond
)

// recheck is how long a VIP that somebody else has is left to him, before the
// next look whether he is gone, and hurriedRecheck what it is of plan.Layer2.Hurry.
const recheck, hurriedRecheck = 10 * time.Second, time.Second

// Who yields to another speaker asks that one, and it alone, each pollInterval,
// and claims the VIP when maxMissed times in a row there was no answer.
const (
	pollInterval   = 500 * time.Millisecond
	maxMissed      = 2
	pollsPerSecond = 500
)

// While speakers are lost, one VIP in turn is announced each beaconInterval, for
// the other side of a partition to hear when it heals. Of many speakers each waits longer,
// and not as long as the next one: one beacon of any is enough. Who meets a rival announces
// all that it has, but what he claims just then, at most once in roundInterval. So
// clients are right within a second: a beacon, a round, a correction of that.
const (
	beaconInterval = 400 * time.Millisecond
	roundWait      = 100 * time.Millisecond
	roundInterval  = 10 * time.Second
)

// The pace of announcements on one interface: every host on the segment
// handles each of these broadcasts, and routers drop ARP above some rate.
// 5,000 VIPs take one second.
const (
	framesPerSecond = 10_000
	burstFrames     = 10
)

// announce sends announcements, probes and polls, paced, until ctx ends: first
// ones before repeated ones.
func (p *port) announce(ctx context.Context) error {
	q, pace := newQueue(), rate.NewLimiter(framesPerSecond, burstFrames)
	for {
		select {
		case <-ctx.Done():
			return nil
		case fresh := <-p.fresh:
			for _, o := range fresh {
				p.begin(q, o)
			}
			continue
		case <-p.contested.news:
			for _, c := range p.contested.take() {
				p.contend(q, c)
			}
			continue
		case <-p.membersChanged:
			p.lookAround(q)
			continue
		case <-q.due():
		}
		t := q.pop()
		frames := p.take(q, &t)
		if len(frames) == 0 {
			continue
		}
		if pace.WaitN(ctx, len(frames)) != nil {
			return nil
		}
		p.tell(t, frames)
		q.again(t)
	}
}

// begin enters what is new here: its announcement, or probes before that.
func (p *port) begin(q *queue, o *ownership) {
	if _, held := p.holds.get(o); held {
		q.enter(o, stepProbe, 0)
	} else {
		q.lines[0] = append(q.lines[0], turn{ownership: o, resumed: q.resumed[o]})
	}
}

// contend answers a claim, later.
func (p *port) contend(q *queue, c contention) {
	switch {
	case c.kind == foreign:
		q.enter(c.ownership, stepDefence, defence)
		return
	case c.kind == higher:
		q.challenge(c.ownership, c.by)
		return
	case c.kind == yielded:
		q.enter(c.ownership, stepPoll, pollInterval)
	case p.whole.Load():
		q.once(c.ownership, stepLag, indulgence)
		return
	default:
		q.once(c.ownership, stepCorrection, correction)
	}
	p.round(q)
}

// round announces everything once more when a rival was met: he may claim more
// than we have heard.
func (p *port) round(q *queue) {
	if p.whole.Load() || time.Since(q.round) < roundInterval {
		return
	}
	q.round = time.Now()
	for _, o := range (*p.owned.Load()).without(nil) {
		q.enter(o, stepRound, roundWait)
	}
}

// lookAround starts the beacon when speakers are lost. Next owners are rivals then.
func (p *port) lookAround(q *queue) {
	if p.whole.Load() {
		return
	}
	if len(q.lines[stepLag]) > 0 {
		p.round(q)
	}
	if len(q.lines[stepBeacon]) == 0 {
		q.enter(nil, stepBeacon, p.beaconWait())
	}
}

// take returns the frames for a turn, if any are to be sent.
func (p *port) take(q *queue, t *turn) [][]byte {
	if t.step == stepBeacon && !p.beacon(q, t) {
		return nil
	}
	if !p.announces(t.ownership) {
		delete(q.resumed, t.ownership)
		return nil // and no repetition
	}
	switch {
	case t.step > 1 && t.claims() && p.deaf(&q.hearing):
		return p.ask(q, t)
	case t.step == stepPoll:
		return p.poll(q, t.ownership)
	case t.step == stepChallenge:
		return p.challenge(q, *t)
	case t.step == stepRecheck:
		p.holds.recheck(t.ownership)
		q.enter(t.ownership, stepProbe, 0)
		return nil
	case t.step >= stepProbe && t.step <= stepProbed:
		return p.probe(q, *t)
	case t.step <= stepRefresh && t.resumed != q.resumed[t.ownership]:
		return nil // announced anew since
	}
	if _, held := p.holds.get(t.ownership); held {
		return nil
	}
	if (t.step > 0 && t.step <= stepRefresh || t.step == stepRound) && q.disputed(t.ownership) {
		q.again(*t) // a rival hears us when his claim is answered
		return nil
	}
	return p.key.protocol.announce(p.statement(t.ownership), t.step == 0)
}

// beacon makes t the turn of the next VIP in the ring, and says whether there
// is one. Those that somebody else claimed just now wait for their correction.
func (p *port) beacon(q *queue, t *turn) bool {
	if p.whole.Load() {
		return false
	}
	q.enter(nil, stepBeacon, p.beaconWait())
	for range 2 { // the rest of the ring, and once around
		for len(q.ring) > 0 {
			t.ownership, q.ring = q.ring[0], q.ring[1:]
			if _, held := p.holds.get(t.ownership); !held && p.announces(t.ownership) && !q.disputed(t.ownership) {
				return true
			}
		}
		q.ring = (*p.owned.Load()).without(nil)
	}
	return false
}

// beaconWait returns how long to wait for the next beacon.
func (p *port) beaconWait() time.Duration {
	crowd := time.Duration(p.crowd.Load())
	if crowd <= 1 {
		return beaconInterval
	}
	return crowd*beaconInterval/2 + rand.N(crowd*beaconInterval)
}

// probe asks everybody, or ends the questions: nobody answered, or somebody.
func (p *port) probe(q *queue, t turn) [][]byte {
	h, held := p.holds.get(t.ownership)
	switch {
	case !held || h.reason == Yielded:
		return nil
	case h.heard:
		if t.hurry.Load() {
			q.enter(t.ownership, stepRecheck, hurriedRecheck)
		} else {
			q.enter(t.ownership, stepRecheck, recheck)
		}
		return nil
	case t.step < stepProbed:
		q.enter(t.ownership, t.step+1, probeWait)
		return [][]byte{p.key.protocol.probe(p.statement(t.ownership), mac{})}
	}
	if p.holds.free(t.ownership) {
		p.freed(t.ownership)
		p.log.Info("announcing", "vip", t.vip, "interface", p.key.name, "message", "nobody else has it")
		q.resume(t.ownership)
	} else { // at the last moment
		q.enter(t.ownership, stepProbe, 0)
	}
	return nil
}

// poll asks the speaker that we yielded to whether it still has the VIP, or
// claims it.
func (p *port) poll(q *queue, o *ownership) [][]byte {
	if !q.polls.Allow() {
		q.enter(o, stepPoll, pollInterval)
		return nil
	}
	h, ok := p.holds.poll(o)
	switch {
	case !ok:
		return nil
	case h.missed > maxMissed:
		p.log.Info("announcing again: the other speaker is silent", "vip", o.vip, "interface", p.key.name, "hardware_addr", h.by)
		q.resume(o)
		return nil
	case h.polls == 1:
		p.log.Warn("another speaker of this cluster has the VIP and ranks above this one: not announced here. "+
			"Do the speakers reach each other at the membership port, TCP and UDP?",
			"vip", o.vip, "interface", p.key.name, "hardware_addr", h.by)
	}
	q.enter(o, stepPoll, pollInterval)
	return [][]byte{p.question(o, h.by)}
}

// tell sends the frames of a turn, unless the VIP was withdrawn, withheld,
// or is leaving.
func (p *port) tell(t turn, frames [][]byte) {
	p.announcing.enter()
	defer p.announcing.leave()
	_, held := p.holds.get(t.ownership)
	if !p.announces(t.ownership) || held && t.claims() {
		return
	}
	for _, f := range frames {
		if sent := p.send(f); sent && t.claims() {
			p.counters.announcements.Inc()
			t.leaving.contradicted(p.key)
		}
	}
}

func (p *port) statement(o *ownership) statement {
	if o.apart.Load() {
		return statement{p.key.mac, o.vip, p.seals.Apart(o.vip, p.key.mac, o.home.Load())}
	}
	return statement{p.key.mac, o.vip, p.seals.Seal(o.vip, p.key.mac, o.home.Load())}
}

func (p *port) announces(o *ownership) bool {
	return (*p.owned.Load())[o.vip] == o && !o.leaving.is()
}

// contention is a claim of somebody else to one of our VIPs.
type contention struct {
	*ownership
	kind claimant
	by   mac // who claims it
}

// claimant is who claims it.
type claimant int

const (
	nothing claimant = iota // that anything follows from
	foreign                 // a host that is none of ours
	lower                   // a speaker of this cluster that ranks below us
	higher                  // one that ranks above us, says a seal that may be recorded
	yielded                 // one that ranks above us, to which we yielded
)

// maxContentions bounds what waits: more than all VIPs of a node, and hosts on a
// segment. What does not fit is said again.
const maxContentions = 1 << 16

// inbox holds the contentions that the announcing task has not seen, each once:
// whoever receives does not wait for it, however many come.
type inbox struct {
	mu   sync.Mutex
	all  []contention
	has  map[contention]bool
	news chan struct{}
}

func (i *inbox) put(c contention) {
	i.mu.Lock()
	defer i.mu.Unlock()
	if i.has[c] || len(i.all) >= maxContentions {
		return
	}
	if i.has == nil {
		i.has = map[contention]bool{}
	}
	i.all, i.has[c] = append(i.all, c), true
	wake(i.news)
}

func (i *inbox) take() (all []contention) {
	i.mu.Lock()
	defer i.mu.Unlock()
	all, i.all, i.has = i.all, nil, nil
	return all
}

// turn is something to be sent, soon.
type turn struct {
	*ownership
	step       int
	first, due time.Time // of the first announcement, of this one
	resumed    int       // how often the VIP had been announced anew
	to         mac       // who is asked
	asked      int       // how often it was
}

// The steps after the schedule.
const (
	stepRefresh = len(schedule) + iota
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

// queue orders what is to be sent. Each step is a line whose first turn is due
// first.
type queue struct {
	lines   [steps][]turn
	waiting map[line]bool      // what is in a line at most once
	resumed map[*ownership]int // how often a VIP was announced anew
	ring    []*ownership       // whose turn for a beacon it is
	round   time.Time          // of the last one
	polls   *rate.Limiter
	// challenges bounds the questions, challenged counts the speakers that are
	// asked about a VIP.
	challenges *rate.Limiter
	challenged map[*ownership]int
	hearing    hearing
	now        chan time.Time // closed
}

// line is a place in one of the queue's lines.
type line struct {
	*ownership
	step int
	to   mac
}

func newQueue() *queue {
	now := make(chan time.Time)
	close(now)
	return &queue{now: now, waiting: map[line]bool{}, resumed: map[*ownership]int{}, challenged: map[*ownership]int{},
		polls: rate.NewLimiter(pollsPerSecond, pollsPerSecond/10), challenges: rate.NewLimiter(challengesPerSecond, challengesPerSecond/2)}
}

// enter enters one turn.
func (q *queue) enter(o *ownership, step int, wait time.Duration) {
	q.lines[step] = append(q.lines[step], turn{ownership: o, step: step, due: time.Now().Add(wait)})
}

// once enters one turn unless there is one.
func (q *queue) once(o *ownership, step int, wait time.Duration) {
	if at := (line{ownership: o, step: step}); !q.waiting[at] {
		q.waiting[at] = true
		q.enter(o, step, wait)
	}
}

// disputed reports whether somebody else claimed the VIP just now.
func (q *queue) disputed(o *ownership) bool {
	return q.challenged[o] > 0 || q.waiting[line{ownership: o, step: stepCorrection}] || q.waiting[line{ownership: o, step: stepLag}]
}

// resume has the VIP announced as if it were new.
func (q *queue) resume(o *ownership) {
	q.resumed[o]++
	q.lines[0] = append(q.lines[0], turn{ownership: o, resumed: q.resumed[o]})
}

func (q *queue) next() int {
	next := -1 // there is none
	for i, line := range q.lines {
		if len(line) > 0 && (next < 0 || line[0].due.Before(q.lines[next][0].due)) {
			next = i // a first turn has no due time, which is before all others
		}
	}
	return next
}

// due returns a channel that fires at the next turn. Nil: there is none. Most turns of a
// burst are due: they cost no timer.
func (q *queue) due() <-chan time.Time {
	next := q.next()
	if next < 0 {
		return nil
	}
	if wait := time.Until(q.lines[next][0].due); wait > 0 {
		return time.After(wait)
	}
	return q.now
}

func (q *queue) pop() turn {
	next := &q.lines[q.next()]
	t := (*next)[0]
	*next = (*next)[1:]
	delete(q.waiting, line{t.ownership, t.step, t.to})
	if t.step == stepChallenge {
		if q.challenged[t.ownership]--; q.challenged[t.ownership] == 0 {
			delete(q.challenged, t.ownership)
		}
	}
	return t
}

// again enters the announcement after t, which was sent just now.
func (q *queue) again(t turn) {
	if t.step > stepRefresh {
		return
	}
	now := time.Now()
	if t.step == 0 {
		t.first = now
	}
	switch t.step = min(t.step+1, stepRefresh); {
	case t.step < stepRefresh:
		t.due = t.first.Add(schedule[t.step])
	case t.refresh > 0:
		t.due = now.Add(t.refresh)
	default:
		delete(q.resumed, t.ownership)
		return
	}
	line := q.lines[t.step]
	at, _ := slices.BinarySearchFunc(line, t.due, func(u turn, due time.Time) int { return cmp.Or(u.due.Compare(due), -1) })
	q.lines[t.step] = slices.Insert(line, at, t) // at the end, but for refresh intervals that differ
}
