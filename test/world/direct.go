package world

import (
	"net/netip"
	"time"

	"github.com/lodestone-lb/lodestone/pkg/report"
	"github.com/lodestone-lb/lodestone/speaker/direct"
	"github.com/lodestone-lb/lodestone/speaker/plan"
)

// The times of the Director, see package direct.
const (
	lookInterval   = time.Second
	verifyRounds   = 3
	longestSettle  = 2 * time.Second
	settleInterval = 50 * time.Millisecond
	hold           = 10 * time.Second
	catchUp        = 2 * time.Second
	longestCatchUp = time.Minute
)

// director is the Director of a speaker: the real machine, and its loop in the time of the world. The kernel takes the
// rules over at once.
type director struct {
	*node
	life    int
	began   time.Duration
	machine *direct.Simulated // nil: nothing was set yet
	next    *plan.Forwarding  // that Run has not taken yet
	rests   bool
	ready   bool
	rounds  int
}

// forward takes over the core's Forwarding.
func (n *node) forward(want *plan.Forwarding) {
	if !n.Direct || want == nil {
		return
	}
	if n.director.life != n.life {
		n.director = director{node: n, life: n.life, began: n.now}
	}
	d := &n.director
	if d.next = want; d.machine != nil {
		d.take()
		return
	}
	d.machine = direct.NewSimulated(direct.Options{Node: n.name, Hold: hold, Log: n.data.log}, n.data.tables)
	d.machine.Begin(*want, n.plane.rules, n.clock())
	d.next = nil
	d.settle(n.now + longestSettle)
}

// later runs do after a time, unless the speaker has ended by then. A paused speaker runs it when it continues.
func (d *director) later(after time.Duration, do func()) {
	n, life := d.node, d.life
	n.World.after(after, func() {
		switch {
		case n.life != life:
		case n.paused:
			n.director.later(settleInterval, do)
		default:
			do()
		}
	})
}

// settle waits for the neighbours, and then has the rules written for the first time.
func (d *director) settle(until time.Duration) {
	d.ask(d.machine.Look(d.plane.seen(), d.clock()))
	if !d.machine.Settled() && d.now < until {
		d.later(settleInterval, func() { d.node.director.settle(until) })
		return
	}
	d.reconcile()
	d.ready = true
	d.node.wake()
	d.later(lookInterval, d.node.director.tick)
}

// take takes over the latest Forwarding, and pauses after that.
func (d *director) take() {
	if !d.ready || d.rests || d.paused || d.next == nil {
		return
	}
	d.machine.Set(*d.next, d.clock())
	d.next, d.rests = nil, true
	d.reconcile()
	d.later(d.data.upTo(300*time.Millisecond), func() { d := &d.node.director; d.rests = false; d.take() })
}

func (d *director) tick() {
	if d.rounds++; d.rounds%verifyRounds == 0 {
		d.machine.Notice()
	}
	d.reconcile()
	d.machine.Extend(d.plane.connections, d.clock())
	d.take()
	d.later(lookInterval, d.node.director.tick)
}

func (d *director) reconcile() {
	d.ask(d.machine.Reconcile(d.plane.seen(), d.clock()))
	if d.plane.rules == nil {
		d.plane.ruled = d.now
	}
	d.plane.rules = d.machine
	d.node.reportRules()
}

func (d *director) ask(addrs []netip.Addr) {
	for _, a := range addrs {
		if o := d.nodeAt(a); o != nil {
			d.plane.neighbour(o.id).ask()
		} else {
			d.plane.neighbour(len(d.nodes)).ask()
		}
	}
}

// reportRules writes on the node's Lease, some time later, whether the rules are there.
func (n *node) reportRules() {
	life := n.life
	forwards := func() bool { return n.plane.rules != nil && n.plane.rules.InForce() }
	lease, _ := n.api.objects["lease/"+n.name].(report.Network)
	if !n.Direct || lease.Forwards == forwards() || n.reports {
		return
	}
	n.reports = true
	n.World.after(n.data.between(10*time.Millisecond, time.Second), func() {
		if n.reports = false; n.life != life || n.api.away[n.name] > 0 || n.paused {
			return // it is tried again with the next look
		}
		lease, _ := n.api.objects["lease/"+n.name].(report.Network)
		if lease.Forwards = forwards(); lease.Segments != nil {
			n.api.put("lease/"+n.name, lease)
		}
	})
}
