package watch

import (
	"container/heap"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"
	"time"
)

const (
	ms      = time.Millisecond
	latency = 200 * time.Microsecond
)

var normal = Timing{25 * ms, 3}

// world is speakers in simulated time, on a network that can lose packets and cut links.
type world struct {
	now    time.Time
	random *rand.Rand
	nodes  []*node
	byAddr map[netip.AddrPort]*node
	queue  queue
	loss   float64
	late   time.Duration // of one of ten rounds of a loop, at most
	cut    func(from, to *node) bool
	// flooded is set while strangers send so much to all speakers that no other packet arrives.
	flooded bool
	// heal has a speaker that was taken for lost wrongly count again, after that time.
	heal time.Duration
	sent int
	ids  int
	// tap sees what arrives, if it is set.
	tap func(to *node, e *Received)
}

// node is a speaker and its loop.
type node struct {
	Member
	*Machine
	world   *world
	dead    bool
	stopped time.Time // its loop does not run until then
	waiting []*Received
	round   int // numbers the calls of its loop, of which the last one counts
	knows   map[string]bool
	lost    map[string]time.Time // when it took them for lost, wrongly or not
	verdict int
	segment int
	timing  Timing
}

// event is something that will happen.
type event struct {
	at time.Time
	id int
	do func()
}

type queue []event

func (q queue) Len() int { return len(q) }
func (q queue) Less(i, j int) bool {
	return q[i].at.Before(q[j].at) || q[i].at.Equal(q[j].at) && q[i].id < q[j].id
}
func (q queue) Swap(i, j int) { q[i], q[j] = q[j], q[i] }
func (q *queue) Push(e any)   { *q = append(*q, e.(event)) }
func (q *queue) Pop() any {
	old := *q
	e := old[len(old)-1]
	*q = old[:len(old)-1]
	return e
}

func (w *world) in(d time.Duration, do func()) {
	w.ids++
	heap.Push(&w.queue, event{w.now.Add(d), w.ids, do})
}

// run lets time pass.
func (w *world) run(d time.Duration) {
	end := w.now.Add(d)
	for len(w.queue) > 0 && !w.queue[0].at.After(end) {
		e := heap.Pop(&w.queue).(event)
		w.now = e.at
		e.do()
	}
	w.now = end
}

// newWorld returns n speakers, 40 on each segment, of which all know each other.
func newWorld(t testing.TB, n int) *world {
	t.Helper()
	w := emptyWorld()
	for i := range n {
		w.add(i)
	}
	for _, x := range w.nodes {
		for _, o := range w.nodes {
			x.knows[o.Name] = true
		}
		x.update()
	}
	w.run(2 * time.Second)
	w.quiet(t)
	return w
}

func emptyWorld() *world {
	return &world{
		now: time.Now(), random: rand.New(rand.NewPCG(1, 2)), byAddr: map[netip.AddrPort]*node{}, late: ms,
		cut: func(*node, *node) bool { return false },
	}
}

// add starts a speaker that knows nobody.
func (w *world) add(i int) *node {
	addr := netip.AddrFrom4([4]byte{10, 0, byte(i / 40), byte(i%40 + 1)})
	x := &node{
		Member: Member{Name: fmt.Sprint("n", i), Session: w.random.Uint64() | 1, Addr: netip.AddrPortFrom(addr, 9744)}, world: w, segment: i / 40,
		knows: map[string]bool{}, lost: map[string]time.Time{}, timing: normal,
	}
	x.Machine = New(x.Member, x.timing, w.now)
	w.nodes = append(w.nodes, x)
	w.byAddr[x.Addr] = x
	w.in(time.Duration(w.random.Int64N(int64(25*ms))), x.loop)
	return x
}

func (w *world) named(name string) *node {
	return w.nodes[slices.IndexFunc(w.nodes, func(x *node) bool { return x.Name == name })]
}

// update hands the machine the members that its owner knows.
func (x *node) update() {
	var list []Member
	for _, o := range x.world.nodes {
		if x.knows[o.Name] {
			list = append(list, o.Member)
		}
	}
	x.act(x.Step(Members{list, x.timing}, x.world.now))
}

// loop is the shell: what has arrived, then what is due.
func (x *node) loop() {
	w := x.world
	switch {
	case x.dead:
		return
	case w.now.Before(x.stopped):
		x.again(x.stopped.Sub(w.now))
		return
	}
	waiting := x.waiting
	x.waiting = nil
	for _, e := range waiting {
		x.act(x.Step(e, w.now))
	}
	x.act(x.Step(Due{Flooded: w.flooded}, w.now))
	late := time.Duration(w.random.Int64N(int64(ms)))
	if w.random.IntN(10) == 0 {
		late = time.Duration(w.random.Int64N(int64(w.late)))
	}
	x.again(max(0, x.Deadline().Sub(w.now)) + late)
}

func (x *node) again(d time.Duration) {
	x.round++
	round := x.round
	x.world.in(d, func() {
		if round == x.round {
			x.loop()
		}
	})
}

// act does what the machine wants.
func (x *node) act(out *Effects) {
	w := x.world
	for _, p := range out.Packets {
		to := w.byAddr[p.To]
		w.sent++
		if w.flooded || to.Session != p.Session || w.random.Float64() < w.loss || w.cut(x, to) {
			continue
		}
		w.in(latency, func() {
			e := &Received{p.Packet, x.Addr, w.now}
			if w.tap != nil {
				w.tap(to, e)
			}
			to.receive(e)
		})
	}
	if len(out.Lost) == 0 {
		return
	}
	for _, v := range slices.Clone(out.Lost) {
		x.verdict++
		x.lost[v.Name] = w.now
		delete(x.knows, v.Name)
		if w.heal > 0 {
			w.in(w.heal, func() { x.verify(w.named(v.Name)) })
		}
	}
	w.in(0, x.update)
}

// verify has a member count again that answers.
func (x *node) verify(o *node) {
	if o.dead || x.world.now.Before(o.stopped) || x.world.cut(x, o) || x.world.cut(o, x) {
		x.world.in(100*ms, func() { x.verify(o) })
		return
	}
	x.knows[o.Name] = true
	delete(x.lost, o.Name)
	x.update()
}

// receive takes a packet from the network. Heartbeats wait for the next tick, as in the shell.
func (x *node) receive(e *Received) {
	if x.dead {
		return
	}
	if e.Packet.Kind == Beat || x.world.now.Before(x.stopped) {
		x.waiting = append(x.waiting, e)
		return
	}
	x.act(x.Step(e, x.world.now))
	x.again(max(0, x.Deadline().Sub(x.world.now)))
}

// quiet fails if any speaker takes another for lost.
func (w *world) quiet(t testing.TB) {
	t.Helper()
	for _, x := range w.nodes {
		if len(x.lost) > 0 {
			t.Fatalf("%s takes %v for lost", x.Name, x.lost)
		}
	}
}

// kill takes the power of speakers.
func (w *world) kill(all ...*node) {
	for _, x := range all {
		x.dead = true
	}
}

// living are the speakers with power.
func (w *world) living() (all []*node) {
	for _, x := range w.nodes {
		if !x.dead {
			all = append(all, x)
		}
	}
	return all
}

// known returns how long after that time the last of the speakers knew that the others are lost. It fails if one does
// not, or takes another one for lost.
func (w *world) known(t testing.TB, since time.Time, of []*node, others ...*node) (last time.Duration) {
	t.Helper()
	for _, x := range of {
		for _, o := range others {
			at, ok := x.lost[o.Name]
			if !ok {
				t.Fatalf("%s does not know that %s is lost", x.Name, o.Name)
			}
			last = max(last, at.Sub(since))
		}
		if len(x.lost) != len(others) {
			t.Fatalf("%s takes %d for lost, of which %d are", x.Name, len(x.lost), len(others))
		}
	}
	return last
}
