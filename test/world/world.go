// Package world is a whole fleet in one process and in a time of its own: the real machines of the speakers and the
// real ledger of the controller, in a world of seeded faults, watched by invariants. It is for finding defects: no
// person and no scenario thinks of what a hundred thousand seeds combine. (Package inspect/simulation is something
// else: it runs decisions for the command lodestone.)
//
// A seed decides everything. Nothing here reads the clock, the scheduler or the order of a map, so the same seed gives
// the same story, to the byte.
//
// The files, from the outside in:
//
//	world.go         World: the time, and what is due in it
//	draw.go          what a seed decides beforehand: the size of the world, and which faults come when
//	inflict.go       how each fault begins and ends
//	node.go          a node: its speaker with core, plan, election and segment machine
//	membership.go    who is alive, as the speakers' membership finds out
//	detector.go      the same by the real failure detector, in some fleets
//	layer2.go        what a speaker does on the segment, in each family
//	lan.go           the segment, or both: frames are lost, delayed, repeated, reordered and cut off
//	clienthost.go    hosts with neighbour tables, one that takes an address, and one that repeats what it received
//	datapath.go      direct forwarding: pods, and what goes wrong on the path of packets
//	direct.go        what a speaker's Director does, with its real machine
//	nodekernel.go    a node's kernel: the real rules, conntrack, kube-proxy, and its neighbour table
//	connections.go   connections of clients, and their invariants
//	routers.go       routers, and what goes wrong with them
//	bgpsessions.go   what a speaker does with routers, with its real Announcer and BFD
//	routechecks.go   the invariants of routes
//	api.go           the API server, and which version each client has seen
//	replicas.go      the replicas of the controller, and which of them leads
//	leader.go        what the leader does, with its ledger
//	apirequests.go   requests to the API server, some of which fail
//	dhcp.go          a DHCP server, and what the leader has of its leases
//	keyring.go       the key that speakers share is replaced
//	hostile.go       tenants, and nodes that somebody has taken over
//	clock.go         clocks drift, and are set
//	checks.go        the invariants, with bounds and reasons
//	addresses.go     the invariants of addresses: who shows which one, and who may
//	shrink.go        makes a failing scenario smaller
package world

import (
	"container/heap"
	"fmt"
	"io"
	"math/rand/v2"
	"net/netip"
	"time"

	"github.com/lodestone-lb/lodestone/speaker/plan"
)

// epoch is when the world begins.
var epoch = time.Unix(1_000_000_000, 0)

// Failure is an invariant that did not hold.
type Failure struct {
	// Invariant is its name. Story is what happened instead.
	Invariant, Story string
	At               time.Duration
}

func (f *Failure) String() string {
	return fmt.Sprintf("%9.3fs %s: %s", f.At.Seconds(), f.Invariant, f.Story)
}

// World is a fleet and its surroundings.
type World struct {
	Scenario
	random  *rand.Rand
	now     time.Duration
	queue   queue
	entered int
	story   io.Writer // nil: nobody reads it
	failure *Failure

	secret int // the edition of the speakers' Secret

	api     *api
	lan     *lan   // the first segment, and the only one with direct forwarding and routers
	lans    []*lan // all segments
	nodes   []*node
	control *control
	checks  *checks
	data    *dataPath
	routing *routing    // nil: there are no routers
	dhcp    *dhcpServer // nil: there is none

	services map[version]*plan.Service // see serviceIn
}

// Run lives through a scenario, and returns the first invariant that did not hold, nil if all did. The story, in
// which each line has its time, may be nil.
func Run(s Scenario, story io.Writer) *Failure {
	w := &World{Scenario: s, random: rand.New(rand.NewPCG(s.Seed, 1)), story: story, services: map[version]*plan.Service{}}
	if s.DHCP {
		w.dhcp = &dhcpServer{World: w, grants: map[netip.Addr]grant{}}
	}
	w.api, w.checks, w.data = newAPI(w), newChecks(w), newDataPath(w)
	for i := range s.Segments {
		w.lans = append(w.lans, newLAN(w, i))
	}
	w.lan = w.lans[0]
	w.control = newControl(w)
	for i := range s.Nodes {
		w.nodes = append(w.nodes, newNode(w, i))
	}
	for _, l := range w.lans {
		for i := range hosts {
			l.hosts = append(l.hosts, newHost(l, s.Nodes+i))
		}
	}
	w.routing = newRouting(w)
	w.api.fill()
	w.data.use()
	w.control.begin()
	w.routing.begin()
	for _, n := range w.nodes {
		w.after(w.upTo(3*time.Second), n.begin)
	}
	for _, f := range s.Faults {
		w.after(f.At, func() { w.inflict(f) })
	}
	w.after(checkInterval, w.checks.tick)
	w.after(s.End()-5*time.Second, func() {
		w.checks.restarted = w.control.writes
		w.control.replace()
	})
	for w.failure == nil && len(w.queue) > 0 && w.queue[0].at <= s.End() {
		e := heap.Pop(&w.queue).(event) //nolint:errcheck // the heap has nothing else
		w.now = e.at
		e.do()
	}
	if w.failure == nil {
		w.checks.atTheEnd()
	}
	return w.failure
}

// after calls do after a time. Of two calls at the same time, the first one to be entered comes first.
func (w *World) after(d time.Duration, do func()) {
	w.entered++
	heap.Push(&w.queue, event{w.now + max(0, d), w.entered, do})
}

// upTo returns a random time.
func (w *World) upTo(d time.Duration) time.Duration {
	return time.Duration(w.random.Int64N(int64(d) + 1))
}

// between returns a random time.
func (w *World) between(a, b time.Duration) time.Duration { return a + w.upTo(b-a) }

// chance returns true with that probability, in percent.
func (w *World) chance(percent int) bool { return percent > 0 && w.random.IntN(100) < percent }

// record adds a line to the story.
func (w *World) record(format string, args ...any) {
	if w.story != nil {
		fmt.Fprintf(w.story, "%9.3fs "+format+"\n", append([]any{w.now.Seconds()}, args...)...)
	}
}

// fail ends the world. The first failure counts.
func (w *World) fail(invariant, format string, args ...any) {
	if w.failure == nil {
		w.failure = &Failure{invariant, fmt.Sprintf(format, args...), w.now}
		w.record("FAILED %s: %s", invariant, w.failure.Story)
	}
}

// event is something that is due.
type event struct {
	at  time.Duration
	seq int
	do  func()
}

// queue is a heap of events.
type queue []event

func (q queue) Len() int { return len(q) }
func (q queue) Less(i, j int) bool {
	return q[i].at < q[j].at || q[i].at == q[j].at && q[i].seq < q[j].seq
}
func (q queue) Swap(i, j int) { q[i], q[j] = q[j], q[i] }

// Push implements heap.Interface.
func (q *queue) Push(x any) { *q = append(*q, x.(event)) } //nolint:errcheck // the heap has nothing else

// Pop implements heap.Interface.
func (q *queue) Pop() any {
	last := len(*q) - 1
	e := (*q)[last]
	(*q)[last] = event{}
	*q = (*q)[:last]
	return e
}
