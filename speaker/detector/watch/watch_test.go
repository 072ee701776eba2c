package watch

import (
	"flag"
	"fmt"
	"math"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// With 1,000 speakers it takes ten seconds of a processor, and longer with the race detector.
var speakers = flag.Int("speakers", 300, "how many the largest fleet of TestOneIsLost has")

// One speaker loses power. All others know within 150 ms, in a fleet of any size.
func TestOneIsLost(t *testing.T) {
	t.Parallel()
	for n, tries := range map[int]int{2: 20, 3: 20, 10: 20, 100: 3, *speakers: 1} {
		t.Run(fmt.Sprint(n), func(t *testing.T) {
			t.Parallel()
			var worst time.Duration
			for try := range tries {
				w := newWorld(t, n)
				w.run(time.Duration(try) * ms)
				dead := w.nodes[try%n]
				since, sent := w.now, w.sent
				w.kill(dead)
				w.run(300 * ms)
				worst = max(worst, w.known(t, since, w.living(), dead))
				t.Logf("%d packets of each speaker in 0.3 s", (w.sent-sent)/n)
			}
			t.Logf("%d speakers: the last one knows after %s", n, worst)
			assert.LessOrEqual(t, worst, 150*ms)
		})
	}
}

// BenchmarkOneIsLost has when the first, half and all of the others know, and how many packets a speaker sends.
func BenchmarkOneIsLost(b *testing.B) {
	for _, n := range []int{3, 100, 1000} {
		b.Run(fmt.Sprint("speakers=", n), func(b *testing.B) {
			w := newWorld(b, n)
			sent := w.sent
			w.run(time.Second)
			packets := float64(w.sent-sent) / float64(n)
			dead, since := w.nodes[n/2], w.now
			w.kill(dead)
			w.run(300 * ms)
			w.known(b, since, w.living(), dead)
			var known []float64
			for _, x := range w.living() {
				known = append(known, float64(x.lost[dead.Name].Sub(since))/float64(ms))
			}
			slices.Sort(known)
			require.LessOrEqual(b, known[len(known)-1], 150.0)
			b.ReportMetric(known[0], "first-ms")
			b.ReportMetric(known[len(known)/2], "median-ms")
			b.ReportMetric(known[len(known)-1], "last-ms")
			b.ReportMetric(packets, "packets/s")
		})
	}
}

// What each speaker sends and receives does not grow with the fleet.
func TestPacketsOfASpeaker(t *testing.T) {
	t.Parallel()
	const perSecond = 3 * 1000 / 25 // at 25 ms, to three others
	for _, n := range []int{3, 100, *speakers} {
		w := newWorld(t, n)
		w.run(time.Second)
		before := map[*node]uint64{}
		for _, x := range w.nodes {
			before[x] = x.sequence
		}
		w.run(time.Second)
		sent, received := 0, 0 // by one of them, at most
		for _, x := range w.nodes {
			sent = max(sent, int(x.sequence-before[x]))
			received = max(received, len(x.watched)*1000/25)
		}
		t.Logf("%d speakers: each sends %d packets a second at most, and receives %d", n, sent, received)
		assert.LessOrEqual(t, sent, perSecond+3)
		assert.LessOrEqual(t, received, 5*perSecond, "hashing is not even")
	}
}

// A tenth of all packets is lost, and nobody is taken for lost.
func TestPacketsGetLost(t *testing.T) {
	t.Parallel()
	for _, n := range []int{3, 10} {
		w := newWorld(t, n)
		w.loss = 0.1
		w.run(time.Hour / time.Duration(n))
		w.quiet(t)
		dead := w.nodes[0]
		since := w.now
		w.kill(dead)
		w.run(time.Second)
		t.Logf("%d speakers: the last one knows after %s", n, w.known(t, since, w.living(), dead))
	}
}

// Some speakers lose power, and then a flood begins. As long as it goes on nobody else is taken for lost, and when it ends, those that are
// lost are soon known, however long it was.
func TestLostInAFlood(t *testing.T) {
	t.Parallel()
	for _, flood := range []time.Duration{100 * ms, time.Second, time.Minute} {
		w := newWorld(t, 10)
		w.kill(w.nodes[:3]...)
		w.run(70 * ms) // they are in doubt
		w.flooded = true
		w.run(flood)
		w.quiet(t)
		w.flooded = false
		since := w.now
		w.run(300 * ms)
		last := w.known(t, since, w.living(), w.nodes[:3]...)
		t.Logf("the last one knows %s after a flood of %s", last, flood)
		assert.LessOrEqual(t, last, 150*ms)
	}
}

// Packets pass from one speaker to another, and not back. The others hear both, and nobody is lost.
func TestOneWayLink(t *testing.T) {
	t.Parallel()
	for _, n := range []int{3, 10} {
		w := newWorld(t, n)
		a, b := w.nodes[0], w.nodes[1]
		w.cut = func(from, to *node) bool { return from == a && to == b }
		w.run(time.Minute)
		w.quiet(t)
	}
}

// Nothing that a speaker sends arrives anywhere. It is lost, and takes nobody else with it.
func TestMuteSpeaker(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 10)
	mute, since := w.nodes[4], w.now
	w.cut = func(from, _ *node) bool { return from == mute }
	w.run(time.Minute)
	mute.dead = true
	assert.LessOrEqual(t, w.known(t, since, w.living(), mute), 150*ms)
	assert.NotZero(t, mute.accused, "it does not hear that")
}

// A speaker and all of its watchers lose power at once: new watchers notice it.
func TestAllWatchersAreLost(t *testing.T) {
	t.Parallel()
	for _, n := range []int{10, 100} {
		w := newWorld(t, n)
		dead := []*node{w.nodes[0]}
		for _, m := range w.nodes[0].self.watchers {
			dead = append(dead, w.named(m.Name))
		}
		since := w.now
		w.kill(dead...)
		w.run(3 * time.Second)
		known := w.known(t, since, w.living(), dead...)
		t.Logf("%d speakers: the last one knows of the last one after %s", n, known)
		assert.LessOrEqual(t, known, time.Second)
	}
}

// A rack of 10 of 30 loses power.
func TestRackIsLost(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 30)
	since := w.now
	w.kill(w.nodes[5:15]...)
	w.run(3 * time.Second)
	known := w.known(t, since, w.living(), w.nodes[5:15]...)
	t.Logf("the last one knows of the last one after %s", known)
	assert.LessOrEqual(t, known, time.Second)
}

// All but one lose power at once: nobody is left to agree with it.
func TestLastSurvivor(t *testing.T) {
	t.Parallel()
	for _, n := range []int{3, 10, 100} {
		w := newWorld(t, n)
		since := w.now
		w.kill(w.nodes[1:]...)
		w.run(3 * time.Second)
		known := w.known(t, since, w.living(), w.nodes[1:]...)
		t.Logf("%d speakers: the survivor knows after %s", n, known)
		assert.LessOrEqual(t, known, time.Second)
	}
}

// The network is cut into two. Each side takes the other one for lost.
func TestPartition(t *testing.T) {
	t.Parallel()
	for _, sides := range [][2]int{{1, 1}, {1, 2}, {2, 2}, {5, 5}, {3, 17}} {
		w := newWorld(t, sides[0]+sides[1])
		left := w.nodes[:sides[0]]
		since := w.now
		w.cut = func(from, to *node) bool { return slices.Contains(left, from) != slices.Contains(left, to) }
		w.run(5 * time.Second)
		a, b := w.known(t, since, left, w.nodes[sides[0]:]...), w.known(t, since, w.nodes[sides[0]:], left...)
		t.Logf("%d of %d: the last one knows of the last one after %s on one side, %s on the other", sides[0], len(w.nodes), a, b)
		assert.LessOrEqual(t, max(a, b), 2*time.Second)
	}
}

// A speaker with the key sends that all others are dead, again and again. None of them is taken down: two must agree.
func TestLiar(t *testing.T) {
	t.Parallel()
	for _, n := range []int{3, 4, 10} {
		w := newWorld(t, n)
		liar := w.nodes[n-1]
		var lie func()
		lie = func() {
			for _, about := range w.nodes[:n-1] {
				for _, to := range w.nodes[:n-1] {
					for _, kind := range []Kind{Silent, Dead} {
						liar.sequence++
						p := Packet{Kind: kind, From: liar.Session, Sequence: liar.sequence, Subject: about.Session, Interval: 25 * ms}
						w.in(latency, func() { to.receive(&Received{p, liar.Addr, w.now}) })
					}
				}
			}
			w.in(10*ms, lie)
		}
		lie()
		sent := w.sent
		w.run(10 * time.Second)
		w.quiet(t)
		t.Logf("%d speakers: each sends %d packets per second", n, (w.sent-sent)/n/10)
	}
}

// A speaker with the key sends that it hears one that is dead. The watchers do not agree then, and memberlist decides.
func TestLiarThatDenies(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 4)
	liar, dead := w.nodes[1], w.nodes[0]
	var lie func()
	lie = func() {
		for _, to := range w.nodes[2:] {
			liar.sequence++
			p := Packet{Kind: Heard, From: liar.Session, Sequence: liar.sequence, Subject: dead.Session, Interval: 25 * ms}
			w.in(latency, func() { to.receive(&Received{p, liar.Addr, w.now}) })
		}
		w.in(10*ms, lie)
	}
	lie()
	w.kill(dead)
	w.run(10 * time.Second)
	assert.Empty(t, w.nodes[3].lost)
	lie = func() {}
	w.run(time.Second)
	assert.Contains(t, w.nodes[3].lost, dead.Name)
}

// A speaker is stopped for a while. For 50 ms, nobody notices. For longer, it is lost, and it counts again soon after
// it goes on. It never takes the others for lost, although it has not heard from them.
func TestStopped(t *testing.T) {
	t.Parallel()
	for stop, lost := range map[time.Duration]bool{50 * ms: false, 150 * ms: true, 500 * ms: true, 5 * time.Second: true} {
		for _, n := range []int{2, 3, 10} {
			w := newWorld(t, n)
			w.heal = 50 * ms
			if stop > 150*ms {
				w.heal = 3 * time.Second // in a large fleet it takes as long
			}
			x := w.nodes[0]
			x.stopped = w.now.Add(stop)
			w.run(stop + 30*ms)
			for _, o := range w.nodes[1:] {
				assert.Equal(t, lost, o.verdict > 0, "%s stopped, %d speakers", stop, n)
			}
			w.run(4 * time.Second)
			w.quiet(t)
			assert.Zero(t, x.verdict, "it takes others for lost")
			verdicts := w.nodes[1].verdict
			w.run(10 * time.Second)
			assert.Equal(t, verdicts, w.nodes[1].verdict, "it is lost again")
		}
	}
}

// While a speaker is stopped another one starts anew, and it has not heard of that yet. The one that it knows is silent, and
// others do not know that one any more. They answer, so that it does not take itself to be alone.
func TestStoppedWhileAnotherOneStartsAnew(t *testing.T) {
	t.Parallel()
	for _, n := range []int{3, 10} {
		w := newWorld(t, n)
		w.heal = 50 * ms
		for _, o := range w.nodes {
			o.timing = Timing{100 * ms, 3} // as with failover: conservative; heartbeats each 25 ms come before it is sure
			o.update()
		}
		w.run(time.Second)
		x, anew := w.nodes[0], w.nodes[1]
		x.stopped = w.now.Add(5 * time.Second)
		anew.Session = w.random.Uint64() | 1
		anew.Machine = New(anew.Member, anew.timing, w.now)
		for _, o := range w.nodes[1:] {
			o.update()
		}
		w.run(9 * time.Second)
		w.quiet(t)
		assert.Zero(t, x.verdict, "%d speakers", n)
	}
}

// A speaker that is stopped for 150 ms again and again is lost once: its watchers know from then on how late it may be. So
// its VIPs move twice, and not with each pause.
func TestStoppedAgainAndAgain(t *testing.T) {
	t.Parallel()
	for _, n := range []int{2, 3, 10} {
		w := newWorld(t, n)
		w.heal = 50 * ms
		for range 20 {
			w.nodes[0].stopped = w.now.Add(150 * ms)
			w.run(3 * time.Second)
		}
		w.quiet(t)
		for _, o := range w.nodes[1:] {
			assert.Equal(t, 1, o.verdict, "%d speakers", n)
		}
	}
}

// The loops of all speakers are late, more and more, as beside compilers. Their watchers wait longer, and within 300 ms
// all notice a real loss.
func TestLateLoops(t *testing.T) {
	t.Parallel()
	for _, n := range []int{3, 10} {
		w := newWorld(t, n)
		for late := 5 * ms; late <= 110*ms; late += 5 * ms {
			w.late = late
			w.run(10 * time.Second)
		}
		w.quiet(t)
		dead, since := w.nodes[0], w.now
		w.kill(dead)
		w.run(2 * time.Second)
		known := w.known(t, since, w.living(), dead)
		t.Logf("%d speakers: the last one knows after %s", n, known)
		assert.LessOrEqual(t, known, 300*ms)
		w.late = ms
		w.run(3 * lateWindow)
		dead, since = w.nodes[1], w.now
		for _, x := range w.living() {
			clear(x.lost)
		}
		w.kill(dead)
		w.run(time.Second)
		assert.LessOrEqual(t, w.known(t, since, w.living(), dead), 150*ms, "lateness is not forgotten")
	}
}

// A speaker that has just come, or come back, is noticed as soon as any other one when it is lost: from its first
// heartbeat on it is given no more time.
func TestOneIsLostSoonAfterItCame(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 3)
	dead := w.add(3)
	for _, x := range w.nodes {
		x.knows[dead.Name], dead.knows[x.Name] = true, true
		x.update()
	}
	dead.update()
	w.run(100 * ms)
	since := w.now
	w.kill(dead)
	w.run(time.Second)
	assert.LessOrEqual(t, w.known(t, since, w.living(), dead), 150*ms)
}

// A fleet starts: 1 % of it is up first. The rest follows, and each hears late of the others.
func TestColdStart(t *testing.T) {
	t.Parallel()
	const n = 100
	w := emptyWorld()
	for i := range n {
		w.in(max(0, time.Duration(i-n/100)*20*ms), func() {
			x := w.add(i)
			for _, o := range w.nodes {
				for _, pair := range [][2]*node{{x, o}, {o, x}} {
					w.in(time.Duration(w.random.Int64N(int64(800*ms))), func() {
						pair[0].knows[pair[1].Name] = true
						pair[0].update()
					})
				}
			}
		})
	}
	w.run(5 * time.Second)
	w.quiet(t)
	t.Logf("each speaker sent %d packets a second", w.sent/n/5)
	assert.LessOrEqual(t, w.sent/n/5, 2*watchers*1000/25)
	dead, since := w.nodes[17], w.now
	w.kill(dead)
	w.run(time.Second)
	assert.LessOrEqual(t, w.known(t, since, w.living(), dead), 150*ms)
}

// A speaker restarts faster than others notice: they hear of its new session late. All restart at once.
func TestRestarts(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 10)
	restart := func(x *node) {
		x.Session = w.random.Uint64() | 1
		x.Machine = New(x.Member, x.timing, w.now)
		x.update()
		for _, o := range w.nodes {
			if o != x {
				w.in(time.Duration(w.random.Int64N(int64(80*ms))), o.update)
			}
		}
	}
	restart(w.nodes[3])
	w.run(2 * time.Second)
	w.quiet(t)
	for _, x := range w.nodes {
		restart(x)
	}
	w.run(2 * time.Second)
	w.quiet(t)
}

// The interval changes in a running fleet, one speaker after another. Each of them has the pace that it sends.
func TestIntervalChanges(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 6)
	for _, timing := range []Timing{{100 * ms, 5}, {20 * ms, 3}, normal} {
		for _, x := range w.nodes {
			x.timing = timing
			x.update()
			w.run(time.Second)
			w.quiet(t)
		}
	}
}

// What was received once, or comes from another address, or from before a restart, counts for nothing.
func TestReplay(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 2)
	a, b := w.nodes[0], w.nodes[1]
	p := Packet{Kind: Beat, From: b.Session, Sequence: b.sequence + 10, Interval: 25 * ms}
	assert.False(t, a.Step(&Received{p, b.Addr, w.now}, w.now).Replayed)
	assert.True(t, a.Step(&Received{p, b.Addr, w.now}, w.now).Replayed)
	p.Sequence++
	assert.True(t, a.Step(&Received{p, a.Addr, w.now}, w.now).Replayed)
	p.From++
	require.Empty(t, a.Step(&Received{p, b.Addr, w.now}, w.now).Packets)
}

// forge sends packets in the name of each speaker of some to each other one, with the highest number.
func (w *world) forge(some ...*node) {
	for _, from := range some {
		for _, to := range w.nodes {
			for kind := Beat; kind <= lastKind && to != from; kind++ {
				to.receive(&Received{Packet{Kind: kind, From: from.Session, Sequence: math.MaxUint64, Interval: 25 * ms}, from.Addr, w.now})
			}
		}
	}
}

// Somebody who has the key forges a packet with the highest number. The speaker in whose name it is goes on with its own numbers, and
// counts: nobody is taken for lost, and losses are noticed as before. So it is if all are forged at once.
func TestAForgedNumberSilencesNobody(t *testing.T) {
	t.Parallel()
	for _, n := range []int{2, 3, 10, 100} {
		for _, some := range []int{1, n} {
			w := newWorld(t, n)
			w.forge(w.nodes[:some]...)
			w.run(10 * time.Second)
			w.quiet(t)
			since := w.now
			w.kill(w.nodes[n-1])
			w.run(2 * time.Second)
			known := w.known(t, since, w.living(), w.nodes[n-1])
			assert.LessOrEqual(t, known, 250*ms, "%d speakers, of which %d were forged", n, some)
		}
	}
}

// A forged number does not let anybody repeat what was sent before it, or after it.
func TestReplayAfterAForgedNumber(t *testing.T) {
	t.Parallel()
	for _, n := range []int{2, 10} {
		w := newWorld(t, n)
		dead := w.nodes[0]
		recorded := map[*node][]*Received{}
		w.tap = func(to *node, e *Received) {
			if e.From == dead.Addr {
				recorded[to] = append(recorded[to], e)
			}
		}
		w.run(time.Second)
		w.forge(w.nodes...)
		w.run(time.Second)
		w.kill(dead)
		since := w.now
		var repeat func()
		repeat = func() {
			for _, to := range w.nodes {
				for _, e := range recorded[to] {
					to.receive(&Received{e.Packet, e.From, w.now})
				}
			}
			w.in(5*ms, repeat)
		}
		repeat()
		w.run(2 * time.Second)
		assert.LessOrEqual(t, w.known(t, since, w.living(), dead), 300*ms)
	}
}

// A heartbeat, a tick and what follows from them allocate nothing.
func TestNoAllocations(t *testing.T) {
	w := newWorld(t, 2)
	a, b := w.nodes[0], w.nodes[1]
	e := &Received{Packet{Kind: Beat, From: b.Session, Sequence: b.sequence + 1, Interval: 25 * ms}, b.Addr, w.now}
	s, buf := NewSealer([][]byte{make([]byte, 32)}), make([]byte, 0, MaxPacket)
	assert.Zero(t, testing.AllocsPerRun(100, func() {
		w.now = w.now.Add(25 * ms)
		e.Packet.Sequence++
		e.At = w.now
		a.Step(e, w.now)
		for _, out := range a.Step(Due{}, w.now).Packets {
			sealed := s.Seal(buf[:0], out.Packet, out.Session)
			if _, ok := s.Open(sealed, out.Session); !ok {
				t.Error("not opened")
			}
		}
	}))
}

// All speakers choose the same watchers, and few change when one comes or goes.
func TestWatchersAreChosenAlike(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 100)
	watched := map[string]int{}
	for i, s := range w.nodes {
		chosen := w.nodes[0].sessions[s.Session]
		if chosen == nil {
			chosen = w.nodes[0].self
		}
		for _, x := range w.nodes {
			of := x.sessions[s.Session]
			if x == s {
				of = x.self
			}
			require.Equal(t, names(chosen.watchers), names(of.watchers))
		}
		near := slices.ContainsFunc(chosen.watchers, func(o *member) bool { return w.named(o.Name).segment == s.segment })
		require.True(t, near, "%d", i)
		for _, o := range chosen.watchers {
			watched[o.Name]++
		}
	}
	for name, n := range watched {
		assert.Less(t, n, 12, "%s watches too many", name)
	}
}

func names(all []*member) (names []string) {
	for _, m := range all {
		names = append(names, m.Name)
	}
	return names
}
