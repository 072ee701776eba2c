package bfd

import (
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// wire is two machines, a cable between them, and a clock. The cable takes its
// time, loses packets and can be cut.
type wire struct {
	t         *rapid.T
	random    *rand.Rand
	now       time.Time
	ends      [2]*Machine
	published [2]State // by the last packet sent; AdminDown: none was
	polls     [2]int   // that arrived
	finals    [2]int   // sent
	changes   [2]int   // transitions to Up and from it
	flying    []flight // by arrival
	delay     [2]time.Duration
	loss      float64
	deaf      [2]bool // nothing that is sent to this end arrives
}

// flight is a packet on its way to an end.
type flight struct {
	Packet
	to int
	at time.Time
}

func newWire(t *rapid.T) *wire {
	seed := rapid.Uint64().Draw(t, "seed")
	w := &wire{t: t, random: rand.New(rand.NewPCG(seed, 1)), now: epoch}
	for i := range w.ends {
		w.delay[i] = time.Duration(rapid.IntRange(0, 3000).Draw(t, "delay in µs")) * time.Microsecond
		w.ends[i] = NewMachine(drawTimers(t), uint32(i+1), w.random.Float64, w.now)
	}
	return w
}

func drawTimers(t *rapid.T) Timers {
	interval := rapid.SampledFrom([]time.Duration{10, 17, 50, 100, 300, 999, 1000, 1500})
	return Timers{
		TransmitInterval: interval.Draw(t, "transmit") * ms, ReceiveInterval: interval.Draw(t, "receive") * ms,
		DetectMultiplier: rapid.SampledFrom([]int{1, 2, 3, 5}).Draw(t, "multiplier"),
	}
}

// run lets time pass.
func (w *wire) run(d time.Duration) {
	for end := w.now.Add(d); ; {
		next := end
		for _, m := range w.ends {
			next = earliest(next, m.Deadline())
		}
		if len(w.flying) > 0 {
			next = earliest(next, w.flying[0].at)
		}
		if next.After(w.now) {
			w.now = next
		}
		for len(w.flying) > 0 && !w.flying[0].at.After(w.now) {
			f := w.flying[0]
			w.flying = w.flying[1:]
			if f.poll {
				w.polls[f.to]++
			}
			before := w.ends[f.to].state
			w.ends[f.to].Receive(f.Packet, w.now)
			w.count(f.to, before)
			w.advance(f.to)
		}
		for i, m := range w.ends {
			if !m.Deadline().After(w.now) {
				w.advance(i)
			}
		}
		if !w.now.Before(end) {
			return
		}
	}
}

func earliest(a, b time.Time) time.Time {
	if b.Before(a) {
		return b
	}
	return a
}

// count counts a transition from the state before.
func (w *wire) count(i int, before State) {
	if after := w.ends[i].state; before != after && (before == Up || after == Up) {
		w.changes[i]++
	}
}

// advance sends what an end has to send, and checks that it may.
func (w *wire) advance(i int) {
	m := w.ends[i]
	before, sentBefore, interval := m.state, m.sent, m.transmitInterval()
	p, sent := m.Advance(w.now)
	w.count(i, before)
	if !sent {
		return
	}
	if p.final {
		w.finals[i]++
	}
	// No storm: a packet answers a Poll, tells a new state, or is a periodic one
	// (section 6.8.7). There are a million packets, so package require is called for none.
	if !p.final && p.state == w.published[i] {
		least := time.Duration(0.75*float64(min(interval, m.transmitInterval()))) - time.Microsecond
		if after := w.now.Sub(sentBefore); after < least {
			w.t.Fatalf("end %d sends %+v %s after the last packet, and may after %s", i, p, after, least)
		}
	}
	if w.finals[i] > w.polls[i] {
		w.t.Fatalf("end %d has sent %d Finals for %d Polls", i, w.finals[i], w.polls[i])
	}
	w.published[i] = p.state
	if w.deaf[1-i] || w.random.Float64() < w.loss {
		return
	}
	w.flying = append(w.flying, flight{p, 1 - i, w.now.Add(w.delay[i])})
	slices.SortStableFunc(w.flying, func(a, b flight) int { return a.at.Compare(b.at) })
}

func (w *wire) requireUp(why string) {
	for i, m := range w.ends {
		require.Equal(w.t, Up, m.state, "end %d: %s", i, why)
		require.Equal(w.t, CameUp, m.cause)
	}
}

// settle is enough for two sides that hear each other to come up: three steps
// at the slowest interval of the model, after a Detection Time at the longest.
const settle = 5*1500*ms + 4*1500*ms

// TestModel: whatever happened before, two ends that hear each other come up,
// stay up whatever timers they get, and go down by the Detection Time when they
// do not hear each other.
func TestModel(t *testing.T) { // not beside those that depend on time
	rapid.Check(t, func(t *rapid.T) {
		w := newWire(t)
		w.run(settle)
		w.requireUp("from the start")
		t.Repeat(map[string]func(*rapid.T){
			"new timers": func(t *rapid.T) {
				before := w.changes
				for range rapid.IntRange(1, 4).Draw(t, "changes") {
					w.ends[rapid.IntRange(0, 1).Draw(t, "end")].Set(drawTimers(t))
					w.run(time.Duration(rapid.IntRange(10, 4000).Draw(t, "pause")) * ms)
				}
				w.run(settle)
				w.requireUp("with new timers")
				require.Equal(t, before, w.changes, "new timers end no session")
				for i, m := range w.ends {
					other := w.ends[1-i]
					require.False(t, m.polling)
					require.Equal(t, max(m.timers.TransmitInterval, other.timers.ReceiveInterval), m.transmitInterval())
					require.Equal(t, m.transmitInterval(), other.receiveInterval())
					require.Equal(t, time.Duration(m.timers.DetectMultiplier)*m.transmitInterval(), other.detectionTime())
				}
			},
			"cut": func(t *rapid.T) {
				before, heard := w.changes, [2]time.Time{}
				detection := [2]time.Duration{w.ends[0].detectionTime(), w.ends[1].detectionTime()}
				w.deaf = [2]bool{true, true}
				w.run(max(w.delay[0], w.delay[1])) // what is on its way arrives
				for i, m := range w.ends {
					heard[i] = m.heard
				}
				for i := range w.ends {
					if !heard[i].IsZero() { // else its Detection Time is over already
						w.run(max(0, heard[i].Add(detection[i]).Sub(w.now)))
					}
				}
				for i, m := range w.ends {
					require.Equal(t, Down, m.state)
					require.Equal(t, Expired, m.cause)
					require.Equal(t, DetectionTimeExpired, m.diag)
					require.Equal(t, before[i]+1, w.changes[i])
				}
				w.run(time.Duration(rapid.IntRange(0, 20000).Draw(t, "cut for")) * ms)
				w.deaf = [2]bool{}
				w.run(settle)
				w.requireUp("after a cut")
			},
			"one way": func(t *rapid.T) {
				deaf := rapid.IntRange(0, 1).Draw(t, "deaf end")
				w.deaf[deaf] = true
				w.run(w.ends[deaf].detectionTime() + w.ends[1-deaf].detectionTime() + settle)
				require.NotEqual(t, Up, w.ends[0].state)
				require.NotEqual(t, Up, w.ends[1].state)
				w.deaf[deaf] = false
				w.run(settle)
				w.requireUp("after one direction was cut")
			},
			"loss": func(t *rapid.T) {
				w.loss = rapid.Float64Range(0.01, 0.99).Draw(t, "loss")
				w.run(time.Duration(rapid.IntRange(1, 20000).Draw(t, "for")) * ms)
				w.loss = 0
				w.run(settle)
				w.requireUp("after losses")
			},
			"peer restarts": func(t *rapid.T) {
				i := rapid.IntRange(0, 1).Draw(t, "end")
				m := w.ends[i]
				w.ends[i] = NewMachine(m.timers, m.local+2, w.random.Float64, w.now)
				w.published[i] = AdminDown
				w.run(settle)
				w.requireUp("after a restart")
			},
		})
	})
}
