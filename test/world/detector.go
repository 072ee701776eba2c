package world

import (
	"net/netip"
	"time"

	heartbeat "github.com/lodestone-lb/lodestone/speaker/detector/watch"
)

// heartbeats are slower than in a cluster (25 ms), so that a fleet takes less of a processor.
var heartbeats = heartbeat.Timing{Interval: 100 * time.Millisecond, Missed: 3}

const (
	// firstDetector is the first seed whose fleet may have the detector: those below find old defects, and stay what they are.
	firstDetector = 10_000
	// memberlist finds out later than the detector. It also finds what the detector does not: a speaker that sends and receives nothing else.
	gossipMin, gossipMax = 2 * time.Second, 6 * time.Second
	// maxDetection is how long a speaker that does not run is taken for alive by those that hear each other. One that has
	// just been met has a second for its first heartbeat.
	maxDetection = 2 * time.Second
)

// detector is the failure detector of a speaker: the real machine, and its loop in the time of the world. A speaker
// that was paused finds the packets of that time, as far as the socket had room.
type detector struct {
	*node
	life     int
	machine  *heartbeat.Machine
	waiting  []*heartbeat.Received
	round    int
	sessions []int // of the others: their lives
}

func (n *node) session(life int) uint64 { return uint64(n.id+1)<<32 | uint64(life) }

// member returns the node in one of its lives, as others know it.
func (n *node) member(life int) heartbeat.Member {
	return heartbeat.Member{Name: n.name, Session: n.session(life), Addr: netip.AddrPortFrom(addressOf(n.id), 9744)}
}

// detect starts the detector of a speaker that starts.
func (n *node) detect() {
	if !n.Detector {
		return
	}
	n.detector = &detector{node: n, life: n.life, machine: heartbeat.New(n.member(n.life), heartbeats, n.clock()),
		sessions: make([]int, n.Nodes)}
	n.detector.loop()
}

// meet makes the detector watch the speakers that are alive. met is one that was just met, nil if there is none.
func (n *node) meet(met *node) {
	d := n.detector
	if d == nil || d.life != n.life {
		return
	}
	if met != nil {
		d.sessions[met.id] = met.life
	}
	var members []heartbeat.Member
	for _, o := range n.nodes {
		if o != n && n.view[o.id].alive {
			members = append(members, o.member(d.sessions[o.id]))
		}
	}
	d.act(d.machine.Step(heartbeat.Members{List: members, Timing: heartbeats}, n.clock()))
	d.again()
}

func (d *detector) loop() {
	switch {
	case d.node.life != d.life || !d.running:
		return
	case d.paused:
		d.round++
		round := d.round
		d.data.World.after(10*time.Millisecond, func() {
			if d.round == round {
				d.loop()
			}
		})
		return
	}
	waiting := d.waiting
	d.waiting = nil
	for _, r := range waiting {
		d.act(d.machine.Step(r, d.clock()))
	}
	d.act(d.machine.Step(heartbeat.Due{}, d.clock()))
	d.again()
}

// again runs the loop when something is due. On a busy node it runs late.
func (d *detector) again() {
	late := d.data.upTo(time.Millisecond)
	if d.busy > 0 {
		late = d.data.upTo(60 * time.Millisecond)
	}
	d.round++
	round := d.round
	d.data.World.after(d.until(d.machine.Deadline())+late, func() {
		if d.round == round {
			d.loop()
		}
	})
}

func (d *detector) act(e *heartbeat.Effects) {
	for _, p := range e.Packets {
		to, packet := d.nodeAt(p.To.Addr()), p.Packet
		session := p.Session
		d.data.carry(d.node, to, func() {
			if o := to.detector; o != nil && to.running && o.life == to.life && to.session(to.life) == session && len(o.waiting) < 1000 {
				o.waiting = append(o.waiting, &heartbeat.Received{Packet: packet, From: netip.AddrPortFrom(addressOf(d.id), 9744), At: to.clock()})
				if !to.paused {
					o.loop()
				}
			}
		})
	}
	for _, v := range append([]heartbeat.Verdict(nil), e.Lost...) {
		o := d.nodeAt(v.Addr.Addr())
		if !d.view[o.id].alive || v.Session != o.session(d.sessions[o.id]) {
			continue
		}
		d.checks.detected(d.node, o)
		d.see(o, false)
		d.World.after(0, d.reach)
	}
}

// carry delivers a packet of the membership after a delay, unless it is lost.
func (d *dataPath) carry(from, to *node, arrive func()) {
	if from.Separate && (d.lan.backbone[from.id] > 0 || d.lan.backbone[to.id] > 0) || !from.Separate && !d.home().open(from.id, to.id) {
		return
	}
	delay := d.between(50*time.Microsecond, time.Millisecond)
	if !from.Separate && d.home().noise > 0 {
		if d.random.IntN(100) < 10 {
			return
		}
		delay += d.upTo(30 * time.Millisecond)
	}
	d.World.after(delay, arrive)
}

// detected checks a verdict: a speaker that is heard is not taken for lost, unless packets are lost or late.
func (c *checks) detected(n, o *node) {
	if n.meets(o) && o.sessionIs(n) && c.home().noise == 0 && c.now-c.touched > maxDetection && n.busy == 0 && o.busy == 0 {
		c.fail("nobody alive is taken for lost", "%s takes %s for lost, and hears it", n.name, o.name)
	}
}

// sessionIs reports whether the other node knows the life that the node has.
func (n *node) sessionIs(o *node) bool { return o.detector.sessions[n.id] == n.life }

// checkDetection: a speaker that does not run is soon taken for lost by all that run and hear each other.
func (c *checks) checkDetection() {
	if !c.Detector || c.now-max(c.touched, c.started) < maxDetection || !c.sound() {
		return
	}
	if c.now-c.disturbed < gossipMax { // some have the verdict already, and are no witnesses any more: others have it by gossip
		return
	}
	for _, o := range c.nodes {
		for _, n := range c.nodes {
			if !o.participates() && n.participates() && n.busy == 0 && n.view[o.id].alive {
				c.fail("who is dead is taken for lost", "%s takes %s for alive", n.name, o.name)
			}
		}
	}
}
