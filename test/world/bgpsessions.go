package world

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"time"

	"github.com/lodestone-lb/lodestone/pkg/config"
	"github.com/lodestone-lb/lodestone/speaker/bfd"
	"github.com/lodestone-lb/lodestone/speaker/bgp"
	"github.com/lodestone-lb/lodestone/speaker/core"
	"github.com/lodestone-lb/lodestone/speaker/plan"
)

// gracefulShutdown is the community that asks routers to prefer other nodes (RFC 8326).
const gracefulShutdown config.Community = 0xFFFF0000

// The times of a session, see package bgp, and of TCP.
const (
	openTimeout       = 20 * time.Second
	dialAgain         = time.Second
	firstRTO, longRTO = 200 * time.Millisecond, 10 * time.Second
	bfdPause          = time.Second // see speaker.Detector
	latency           = 300 * time.Microsecond
	farOff            = 2 * time.Second // the delay of messages to a slow router, and of late packets of BFD
	stopped           = 20 * time.Millisecond
	// Subcodes of Cease (RFC 4486, RFC 8538).
	shutdown, hardReset byte = 2, 9
)

// kindOfMessage is a kind of message on a connection.
type kindOfMessage int

const (
	open kindOfMessage = iota
	keepalive
	update
	endOfRIB
	notification
	closes // the end of the connection
)

type message struct {
	kind       kindOfMessage
	sent       time.Duration
	hold       time.Duration // of an OPEN
	restart    bool          // it has the capability of graceful restart
	kept       bool
	code       byte // the subcode of a NOTIFICATION
	prefixes   []netip.Prefix
	attributes *plan.Attributes // nil: withdrawn
}

func (m message) String() string {
	if m.attributes == nil {
		return fmt.Sprintf("no more %v", m.prefixes)
	}
	return fmt.Sprintf("%v with %v", m.prefixes, m.attributes.Communities)
}

// side is an end of a connection.
type side int

const (
	ofNode side = iota
	ofRouter
)

// conn is a TCP connection between a speaker and a router.
type conn struct {
	*routing
	n          *node
	r          *router
	life, boot int // of the processes
	began      time.Duration
	hold       time.Duration
	closed     [2]bool
	streams    [2]stream
}

// stream has the messages under way from one end.
type stream struct {
	queue []message
	busy  bool
	rto   time.Duration
}

// owned reports whether the process that has this end still runs.
func (c *conn) owned(s side) bool {
	if s == ofNode {
		return !c.closed[s] && c.n.running && c.n.life == c.life
	}
	return !c.closed[s] && c.r.on() && c.r.boot == c.boot
}

// powered reports whether the machine at this end runs, and knows the connection.
func (c *conn) powered(s side) (runs, knows bool) {
	if s == ofNode {
		return c.n.plane.off == 0, c.n.plane.off == 0 && (c.n.plane.crashed == 0 || c.n.plane.crashed < c.began)
	}
	return c.r.off == 0, c.r.off == 0 && (c.r.lost == never || c.r.lost < c.began)
}

func (c *conn) reaches(to side) bool {
	if to == ofRouter {
		return c.open(c.n.id, c.r.station)
	}
	return c.open(c.r.station, c.n.id)
}

// send sends a message from one end.
func (c *conn) send(from side, m message) {
	if c.closed[from] {
		return
	}
	s := &c.streams[from]
	m.sent = c.now
	if s.queue = append(s.queue, m); !s.busy {
		s.busy = true
		c.carry(from, c.wait(from))
	}
}

func (c *conn) wait(from side) time.Duration {
	if from == ofNode && c.r.slow > 0 {
		return c.upTo(farOff)
	}
	return c.upTo(latency)
}

// close closes an end. What was sent still arrives.
func (c *conn) close(s side) {
	c.send(s, message{kind: closes})
	c.closed[s] = true
}

// carry delivers the next message from one end to the other, some time later.
func (c *conn) carry(from side, after time.Duration) {
	c.World.after(after, func() {
		s, to := &c.streams[from], 1-from
		_, knows := c.powered(from)
		runs, _ := c.powered(to)
		switch {
		case !knows:
			s.queue, s.busy = nil, false
			return
		case !runs || !c.reaches(to) || c.lan.noise > 0 && c.percent(10):
			s.rto = min(max(2*s.rto, firstRTO), longRTO)
			c.carry(from, s.rto)
			return
		case to == ofNode && c.owned(to) && c.n.paused:
			c.carry(from, stopped)
			return
		}
		m := s.queue[0]
		s.queue, s.rto = s.queue[1:], 0
		switch {
		case !c.owned(to):
			if m.kind != closes && c.reaches(from) {
				c.deliver(from, message{kind: closes}) // a reset
			}
		default:
			c.deliver(to, m)
		}
		if s.busy = len(s.queue) > 0; s.busy {
			c.carry(from, c.wait(from))
		}
	})
}

func (c *conn) deliver(to side, m message) {
	switch {
	case !c.owned(to):
	case to == ofRouter:
		c.r.neighbours[c.n.id].take(c, m)
	default:
		if q := c.n.announcer.peerings[c.r.name]; q != nil && q.conn == c {
			q.take(m)
		}
	}
}

// beat sends keepalives from one end as long as its process runs.
func (c *conn) beat(from side) {
	c.World.after(c.hold/3*9/10+c.upTo(c.hold/3/10), func() {
		if !c.owned(from) {
			return
		}
		if from == ofRouter || !c.n.paused {
			c.send(from, message{kind: keepalive})
		}
		c.beat(from)
	})
}

// announcer is the part of a speaker for routers: the real Announcer, the real machines of BFD, and models of their sockets.
type announcer struct {
	*node
	life     int
	machine  *bgp.Machine
	peerings map[string]*peering
	leaving  map[string]*bfdEnd
	flushes  bool
}

// peering is a session of a speaker.
type peering struct {
	*announcer
	name    string
	r       *router
	session *bgp.Peering
	attempt int   // counts them
	trying  bool  // an attempt is under way, or waits for its turn
	conn    *conn // nil: none
	opened  bool  // the router's OPEN has come
	up      bool
	agreed  bgp.Agreed
	heard   time.Duration
	late    time.Duration // until when there is a pause after a session
	watch   *bfdEnd
	down    bool
	failed  time.Duration
}

// route executes the core's effects on routers.
func (n *node) route(e core.Effects) {
	g := n.routing
	if g == nil || !e.BeginDrain && e.Routes == nil && !e.EndDrain && !e.StopRouters {
		return
	}
	if n.announcer == nil || n.announcer.life != n.life {
		n.announcer = &announcer{node: n, life: n.life, peerings: map[string]*peering{}, leaving: map[string]*bfdEnd{},
			machine: bgp.NewMachine(nil, true)}
	}
	s := n.announcer
	if e.BeginDrain {
		s.machine.Drain(true)
	}
	if r := e.Routes; r != nil {
		if r.All {
			s.machine.Set(r.BGP)
		} else {
			s.machine.Update(r.BGP, r.Changed)
		}
	}
	if e.EndDrain {
		s.machine.Drain(false)
	}
	if e.StopRouters {
		s.machine.Stop(true)
	}
	s.follow()
}

// follow brings the sessions to the wanted state.
func (s *announcer) follow() {
	sessions := s.machine.Peerings()
	for _, name := range slices.Sorted(maps.Keys(s.peerings)) {
		if q := s.peerings[name]; sessions[name] != q.session {
			q.look()
			q.leave()
			delete(s.peerings, name)
			s.machine.SetDown(name, false, "")
		}
	}
	for _, name := range slices.Sorted(maps.Keys(sessions)) {
		q := s.peerings[name]
		if q == nil {
			i := slices.IndexFunc(s.routing.routers, func(r *router) bool { return r.name == name })
			q = &peering{announcer: s, name: name, r: s.routing.routers[i], session: sessions[name], failed: never}
			s.peerings[name] = q
			q.startBFD()
		}
		q.look()
	}
	s.flush()
}

// later runs do after a time, unless the speaker has ended by then. A paused speaker runs it when it continues.
func (s *announcer) later(after time.Duration, do func()) {
	s.World.after(after, func() {
		switch {
		case s.node.life != s.life || !s.running:
		case s.paused:
			s.later(stopped, do)
		default:
			do()
		}
	})
}

// flush makes the sessions send their changes soon.
func (s *announcer) flush() {
	if s.flushes {
		return
	}
	s.flushes = true
	s.later(s.routing.upTo(time.Millisecond), func() {
		s.flushes = false
		for _, name := range slices.Sorted(maps.Keys(s.peerings)) {
			s.peerings[name].update()
		}
	})
}

// closeConnections is called when a speaker has ended: the kernel closes its connections, if the node still runs.
func (n *node) closeConnections() {
	if n.routing == nil || n.announcer == nil || n.plane.off > 0 {
		return
	}
	for _, name := range slices.Sorted(maps.Keys(n.announcer.peerings)) {
		if q := n.announcer.peerings[name]; q.conn != nil {
			q.conn.close(ofNode)
		}
	}
	n.routing.changed = true
}

// look takes over the wanted state of the session.
func (q *peering) look() {
	held := q.session.Held()
	end := q.session.Take()
	if end != nil && q.conn != nil {
		q.record("%s: ends the session with %s", q.node.name, q.name)
		if m := end.Message(q.agreed); m != nil {
			q.conn.send(ofNode, message{kind: notification, code: m[1]})
		}
		q.conn.close(ofNode)
		q.session.Ended(q.clock())
		q.conn, q.up = nil, false
		q.routing.changed = true
	}
	if end != nil || held && !q.session.Held() { // at once
		q.attempt++
		q.trying = false
	}
	if q.conn == nil && !q.trying && !q.session.Held() {
		q.trying = true
		q.try(0)
	}
}

// try begins an attempt some time later.
func (q *peering) try(after time.Duration) {
	q.attempt++
	attempt := q.attempt
	q.later(after, func() {
		if q.attempt == attempt && !q.session.Held() {
			q.connect(q.now+max(q.session.Session().Peer.ConnectRetry, time.Second), attempt)
		}
	})
}

// connect sends a SYN, and repeats it until the time for an attempt is over.
func (q *peering) connect(until time.Duration, attempt int) {
	if q.attempt != attempt {
		return
	}
	g := q.routing
	reaches := g.open(q.id, q.r.station) && g.open(q.r.station, q.id) && q.r.off == 0
	switch {
	case reaches && !q.r.on(): // refused
		q.fail()
	case reaches:
		q.trying = false
		q.conn = &conn{routing: g, n: q.node, r: q.r, life: q.life, boot: q.r.boot, began: q.now, hold: openTimeout}
		q.opened, q.up, q.heard = false, false, q.now
		restart := q.session.Session().Peer.GracefulRestart > 0
		_, kept := q.session.Restarts()
		q.conn.send(ofNode, message{kind: open, hold: q.session.Session().Peer.HoldTime, restart: restart, kept: kept})
		q.expire(q.conn)
	case q.now >= until:
		q.fail()
	default:
		q.later(dialAgain, func() { q.connect(until, attempt) })
	}
}

// fail begins the next attempt after a pause.
func (q *peering) fail() {
	pause := q.session.Ended(q.clock())
	if q.up {
		q.late = q.now + pause
	}
	q.conn, q.up, q.trying = nil, false, true
	q.routing.changed = true
	q.try(pause*3/4 + q.routing.upTo(pause/4))
}

// take handles a message of the router.
func (q *peering) take(m message) {
	q.heard = q.now
	switch m.kind {
	case open:
		q.opened = true
		q.conn.hold = min(m.hold, q.session.Session().Peer.HoldTime)
		restart := m.restart && q.session.Session().Peer.GracefulRestart > 0
		q.agreed = bgp.Agreed{Restart: restart, Notify: restart && q.r.hard}
		q.conn.send(ofNode, message{kind: keepalive})
		q.conn.beat(ofNode)
		q.expire(q.conn)
	case keepalive:
		if !q.up && q.opened {
			q.up = true
			q.session.Established(q.clock())
			q.record("%s: session with %s", q.node.name, q.name)
			q.update()
			if q.agreed.Restart {
				q.conn.send(ofNode, message{kind: endOfRIB})
			}
			q.routing.changed = true
		}
	case notification, closes:
		if q.up {
			q.record("%s: session with %s has ended", q.node.name, q.name)
		}
		q.conn.close(ofNode)
		q.fail()
	}
}

// update sends the changed routes.
func (q *peering) update() {
	if !q.up {
		return
	}
	for _, u := range q.session.Updates() {
		q.conn.send(ofNode, message{kind: update, prefixes: u.Prefixes, attributes: u.Attributes})
	}
}

// expire ends the session when the router was not heard for the hold time.
func (q *peering) expire(c *conn) {
	q.later(q.heard+c.hold-q.now, func() {
		switch {
		case q.conn != c:
		case q.now < q.heard+c.hold:
			q.expire(c)
		default:
			q.record("%s: has not heard %s for the hold time", q.node.name, q.name)
			c.send(ofNode, message{kind: notification})
			c.close(ofNode)
			q.fail()
		}
	})
}

// startBFD begins the node's end of BFD.
func (q *peering) startBFD() {
	b := q.session.Session().Peer.BFD
	if b == nil {
		return
	}
	s := q.announcer
	if before := s.leaving[q.name]; before != nil {
		before.round++ // it sends nothing more
	}
	q.watch = newBFD(q.routing, func() bool { return s.node.life == s.life && s.running }, func() bool { return s.paused })
	q.watch.send = func(p bfd.Packet) {
		q.routing.packet(q.id, q.r.station, func() {
			if a := q.r.neighbours[q.id]; a.watch != nil {
				a.watch.receive(p)
			}
		})
	}
	q.watch.changed = func(status bfd.Status) {
		q.record("%s: BFD with %s is %s", q.node.name, q.name, status.State)
		if q.failed = never; status.Failed() {
			q.failed = q.now
			q.later(bfdPause, q.evaluate)
		}
		q.evaluate()
	}
	q.watch.advance()
	q.evaluate()
}

// evaluate takes the session down by the state of BFD, as speaker.Detector does.
func (q *peering) evaluate() {
	down := !q.watch.status.Up() && (q.session.Session().Peer.BFD.Strict || q.failed != never && q.now < q.failed+bfdPause)
	if down != q.down && q.peerings[q.name] == q {
		q.down = down
		q.machine.SetDown(q.name, down, "BFD")
		q.look()
	}
}

// leave ends BFD.
func (q *peering) leave() {
	if q.watch != nil {
		q.watch.changed = func(bfd.Status) {}
		q.leaving[q.name] = q.watch
		q.watch.machine.Leave(epoch.Add(q.now))
		q.watch.advance()
	}
}

// bfdEnd is an end of a session of BFD: the real machine, and its loop in the time of the world.
type bfdEnd struct {
	*routing
	machine *bfd.Machine
	status  bfd.Status
	lives   func() bool
	paused  func() bool
	waiting []bfd.Packet
	round   int
	send    func(bfd.Packet)
	changed func(bfd.Status)
}

var bfdTimers = bfd.Timers{TransmitInterval: 300 * time.Millisecond, ReceiveInterval: 300 * time.Millisecond, DetectMultiplier: 3}

func newBFD(g *routing, lives, paused func() bool) *bfdEnd {
	return &bfdEnd{routing: g, machine: bfd.NewMachine(bfdTimers, 1+g.random.Uint32N(1<<31), g.random.Float64, epoch.Add(g.now)),
		lives: lives, paused: paused}
}

func (b *bfdEnd) receive(p bfd.Packet) {
	switch {
	case !b.lives():
	case b.paused():
		if len(b.waiting) < 100 {
			b.waiting = append(b.waiting, p)
		}
	default:
		b.hear(p)
		b.advance()
	}
}

func (b *bfdEnd) hear(p bfd.Packet) {
	if b.machine.Accepts(p) {
		b.machine.Receive(p, epoch.Add(b.now))
	}
}

// advance runs the machine's timers that are due.
func (b *bfdEnd) advance() {
	b.round++
	round := b.round
	if !b.lives() || b.machine.Left() {
		return
	}
	wait := stopped
	if !b.paused() {
		for _, p := range b.waiting {
			b.hear(p)
		}
		b.waiting = nil
		if p, send := b.machine.Advance(epoch.Add(b.now)); send {
			b.send(p)
		}
		if status := (bfd.Status{State: b.machine.State(), Cause: b.machine.Cause()}); status != b.status {
			b.status = status
			b.changed(status)
		}
		wait = max(b.machine.Deadline().Sub(epoch.Add(b.now)), 10*time.Microsecond)
	}
	b.World.after(wait, func() {
		if b.round == round {
			b.advance()
		}
	})
}
