package layer2

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/time/rate"
)

// schedule says when a VIP is announced after this node became its owner.
var schedule = [...]time.Duration{
	// At once: traffic is lost until neighbours hear of it.
	0,
	// A frame that was lost in the burst of a failover, and neighbours that
	// an old owner answered a moment before it stopped.
	100 * time.Millisecond,
	// Busy hosts and routers that limit the ARP packets they take, and links
	// that came up a moment ago. RFC 5227 section 1.1 has two announcements
	// two seconds apart (ANNOUNCE_NUM, ANNOUNCE_INTERVAL).
	time.Second,
	2 * time.Second,
	// The end of a switch's relearning after a topology change.
	4 * time.Second,
}

// defence is how long after a foreign claim the VIP is announced again, if it
// is still ours: while a speaker hands a VIP over, the next owner claims it,
// which is no reason to take it back.
const defence = time.Second

// The pace of announcements on one interface: every host on the segment
// handles each of these broadcasts, and routers drop ARP above some rate.
// 5,000 VIPs take one second.
const (
	framesPerSecond = 10_000
	burstFrames     = 10
)

// announce sends announcements, paced, until ctx ends: first ones before
// repeated ones.
func (p *port) announce(ctx context.Context) error {
	q, pace := queue{refresh: p.refresh}, rate.NewLimiter(framesPerSecond, burstFrames)
	for {
		select {
		case <-ctx.Done():
			return nil
		case fresh := <-p.fresh:
			q.add(fresh)
			continue
		case o := <-p.contested:
			q.defend(o)
			continue
		case <-q.due():
		}
		t := q.pop()
		if !p.announces(t.ownership) {
			continue // and no repetition
		}
		frames := p.key.protocol.announce(p.key.mac, t.vip, t.step == 0)
		if pace.WaitN(ctx, len(frames)) != nil {
			return nil
		}
		p.tell(t.ownership, frames)
		q.again(t)
	}
}

// tell sends an announcement, unless the VIP was withdrawn or is leaving.
func (p *port) tell(o *ownership, frames [][]byte) {
	p.announcing.enter()
	defer p.announcing.leave()
	if !p.announces(o) {
		return
	}
	for _, f := range frames {
		if p.send(f) {
			p.counters.announcements.Inc()
		}
	}
}

func (p *port) announces(o *ownership) bool {
	return (*p.owned.Load())[o.vip] == o && !o.leaving.is()
}

// turn is one announcement to come.
type turn struct {
	*ownership
	step       int
	first, due time.Time // of the first announcement, of this one
}

// queue orders announcements. Each step of the schedule, and the two after
// them, is a line whose first turn is due first.
type queue struct {
	refresh time.Duration
	lines   [len(schedule) + 2][]turn
}

// The steps after the schedule.
const (
	stepRefresh = len(schedule) + iota
	stepDefence
)

func (q *queue) add(fresh []*ownership) {
	for _, o := range fresh {
		q.lines[0] = append(q.lines[0], turn{ownership: o})
	}
}

// defend enters one turn, soon.
func (q *queue) defend(o *ownership) {
	q.lines[stepDefence] = append(q.lines[stepDefence], turn{ownership: o, step: stepDefence, due: time.Now().Add(defence)})
}

// next returns the line whose turn it is. Negative: there is none.
func (q *queue) next() int {
	next := -1
	for i, line := range q.lines {
		if len(line) > 0 && (next < 0 || line[0].due.Before(q.lines[next][0].due)) {
			next = i // a first turn has no due time, which is before all others
		}
	}
	return next
}

// due returns a channel that fires at the next turn. Nil: there is none.
func (q *queue) due() <-chan time.Time {
	next := q.next()
	if next < 0 {
		return nil
	}
	return time.After(time.Until(q.lines[next][0].due))
}

func (q *queue) pop() turn {
	line := &q.lines[q.next()]
	t := (*line)[0]
	*line = (*line)[1:]
	return t
}

// again enters the turn after t, which was taken just now.
func (q *queue) again(t turn) {
	now := time.Now()
	if t.step == 0 {
		t.first = now
	}
	if t.step == stepDefence {
		return
	}
	switch t.step = min(t.step+1, stepRefresh); {
	case t.step < stepRefresh:
		t.due = t.first.Add(schedule[t.step])
	case q.refresh > 0:
		t.due = now.Add(q.refresh)
	default:
		return
	}
	q.lines[t.step] = append(q.lines[t.step], t)
}

// leaving is what an ownership knows of its end when its VIP moves to another
// node: on which ports that node has claimed it. A port answers until then, so
// that at every moment one of the two does, and not after, so that both never
// do for longer than a frame takes.
//
// The next owner may be faster than this node hears that it is the next one.
// Claims are therefore noted all the time.
type leaving struct {
	begun  atomic.Bool
	mu     sync.Mutex
	claims map[portKey]time.Time // the last one
}

// begin says that the VIP leaves. Claims so old that they were contradicted
// are not the next owner's.
func (l *leaving) begin() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.begun.Load() {
		return
	}
	for key, at := range l.claims {
		if time.Since(at) > defence {
			delete(l.claims, key)
		}
	}
	l.begun.Store(true)
}

// is reports whether the VIP leaves.
func (l *leaving) is() bool { return l.begun.Load() }

// claimed notes that another host claims the VIP on the port and reports
// whether the VIP leaves.
func (l *leaving) claimed(on portKey) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.claims == nil {
		l.claims = map[portKey]time.Time{}
	}
	l.claims[on] = time.Now()
	return l.begun.Load()
}

// left reports whether the VIP has gone from the port to another host.
func (l *leaving) left(on portKey) bool {
	if !l.begun.Load() {
		return false
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	_, claimed := l.claims[on]
	return claimed
}
