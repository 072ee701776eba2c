package world

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/lodestone-lb/lodestone/speaker/bfd"
	"github.com/lodestone-lb/lodestone/speaker/plan"
)

// The kinds of faults of routers and of the ways to them. They come beside the others, in fleets with routers. Nothing on
// the segment notices them, except for those from Peers on.
const (
	Reboot   Kind = 200 + iota // the router has no power for a while
	Daemon                     // the router's BGP daemon ends, and is started again
	Link                       // packets between the node and the router are lost
	LinkIn                     // those from the router are
	LinkOut                    // those from the node are
	Sluggish                   // the router is slow
	Peers                      // another configuration of peers and advertisements
	Rack                       // the node has the label of another rack
	Clear                      // people reset the router's sessions
	Late                       // packets of BFD are late, between all nodes and routers
)

var routerNames = [...]string{"reboot", "daemon", "link", "link-in", "link-out", "sluggish", "peers", "rack", "clear", "late"}

// firstEdits is the first seed with edits of peers and of racks, and with loss of power in fleets with routers. With lower
// seeds the segment is the same as without routers.
const firstEdits = 10_000

// settledRouters takes the place of settled: a session that has failed again and again is tried once a minute.
const settledRouters = 90 * time.Second

// drawRouters adds routers to the scenario of a seed, and faults that concern them.
func (s *Scenario) drawRouters() {
	r := rand.New(rand.NewPCG(s.Seed, 5))
	if r.IntN(100) >= 25 || s.Nodes > 8 {
		return
	}
	s.Routers = 1 + r.IntN(3)
	all := []Kind{Reboot, Daemon, Link, LinkIn, LinkOut, Sluggish}
	if s.Seed >= firstEdits {
		all = append(all, Peers, Rack, Power, Stop, Exclude, Sick, Clear, Late)
	}
	s.add(r, all)
}

// routing is the state of a fleet's routers. It has a source of randomness of its own, so that a seed's fleet is otherwise
// the same as without routers. Nil: there are no routers.
type routing struct {
	*World
	random  *rand.Rand
	routers []*router
	cut     map[[2]int]int // by sender and receiver: how many faults cut the path, beside those of the segment
	edition int            // which documents are in force
	racks   []int          // by node: how many faults have changed its label
	late    int            // how many faults delay packets of BFD
	calms   time.Duration  // when the delayed packets have arrived
	changed bool           // the tables, or what they should have, may have changed
	checks  routeChecks
}

func newRouting(w *World) *routing {
	if w.Routers == 0 {
		return nil
	}
	g := &routing{World: w, random: rand.New(rand.NewPCG(w.Seed, 6)), cut: map[[2]int]int{}, racks: make([]int, w.Nodes)}
	for i := range w.Routers {
		g.routers = append(g.routers, newRouter(g, i))
	}
	g.checks = newRouteChecks(g)
	return g
}

func (g *routing) upTo(most time.Duration) time.Duration {
	return time.Duration(g.random.Int64N(int64(most) + 1))
}

func (g *routing) percent(p int) bool { return g.random.IntN(100) < p }

// router is a router on the segment: what it is set to, and a neighbour for each node.
type router struct {
	*routing
	id, station          int
	name                 string
	hold, restart, retry time.Duration
	// hard is set if it keeps routes after a NOTIFICATION that is no hard reset (RFC 8538). Rack: it has sessions with nodes of
	// that rack alone.
	bfd, strict, internal, hard bool
	rack                        string
	// What is advertised follows from the first router.
	communities, aggregation, more, preferred bool

	off, down, slow int           // how many faults take its power, stop its daemon, and slow it down
	boot            int           // counts the starts of the daemon
	lost            time.Duration // when it last lost its power
	neighbours      []*adjacency
}

func newRouter(g *routing, id int) *router {
	seconds := func(all ...int) time.Duration { return time.Duration(all[g.random.IntN(len(all))]) * time.Second }
	r := &router{routing: g, id: id, station: g.Nodes + hosts + id, name: fmt.Sprintf("tor-%d", id), hold: seconds(3, 9, 9, 30),
		retry: seconds(1, 2, 5), bfd: g.percent(50), internal: g.percent(30), hard: g.percent(30), communities: g.percent(50),
		aggregation: g.percent(30), more: g.percent(30), preferred: g.percent(50), lost: never}
	if g.percent(45) {
		r.restart = seconds(10, 20, 30)
	}
	r.strict = r.bfd && g.percent(20)
	if g.percent(25) {
		r.rack = [...]string{"a", "b"}[id%2]
	}
	for _, n := range g.World.nodes {
		r.neighbours = append(r.neighbours, &adjacency{r: r, n: n, table: map[netip.Prefix]entry{}})
	}
	return r
}

// begin starts the routers.
func (g *routing) begin() {
	if g == nil {
		return
	}
	for _, r := range g.routers {
		r.start()
	}
}

// on reports whether the daemon runs.
func (r *router) on() bool { return r.off+r.down == 0 }

// start starts the daemon.
func (r *router) start() {
	r.boot++
	r.record("%s: starts", r.name)
	for _, a := range r.neighbours {
		a.startBFD()
	}
}

// end ends the daemon. The kernel closes its connections, if the machine still runs.
func (r *router) end() {
	r.boot++
	r.record("%s: is gone", r.name)
	for _, a := range r.neighbours {
		if c := a.conn; c != nil && r.off == 0 {
			c.send(ofRouter, message{kind: closes})
		}
		r.routing.checks.forget(a)
		a.conn, a.up, a.watch, a.table = nil, false, nil, map[netip.Prefix]entry{}
	}
	r.routing.changed = true
}

// rackOf returns the rack that the node is labelled with.
func (g *routing) rackOf(n *node) string {
	if (n.id+min(g.racks[n.id], 1))%2 == 0 {
		return "a"
	}
	return "b"
}

// annotate sets the annotations of a Node about BGP.
func (g *routing) annotate(n *node, at *plan.Node) {
	if g != nil {
		at.Labels["rack"], at.BGP.RouterID = g.rackOf(n), addressOf(n.id)
	}
}

// document returns the part of the configuration for routers. even is set if prefixes of two addresses do not cut a pool.
func (g *routing) document(even bool) string {
	if g == nil {
		return ""
	}
	first, bgp, peers := g.routers[0], []string{}, ""
	if first.communities != (g.edition%8 == 1) {
		bgp = append(bgp, `communities: ["64512:100"]`)
	}
	if even && first.aggregation != (g.edition%8 == 2) {
		bgp = append(bgp, "aggregationLength: 31, aggregationLengthV6: 127")
	}
	if first.internal && first.preferred {
		bgp = append(bgp, "localPreference: 200")
	}
	text := "  - {name: routed, bgp: {" + strings.Join(bgp, ", ") + "}}\n"
	if first.more != (g.edition%8 == 3) {
		text += "  - {name: more, bgp: {peers: [tor-0], nodeSelector: {matchLabels: {rack: a}}, communities: [\"64512:200\"]}}\n"
	}
	for i, r := range g.routers {
		hold, asn, more := r.hold, 64513, ""
		if i == len(g.routers)-1 && g.edition%8 == 4 {
			hold += 3 * time.Second
		}
		if i > 0 && i == len(g.routers)-1 && g.edition%8 == 5 {
			continue
		}
		if r.internal {
			asn = 64512
		}
		if r.restart > 0 {
			more += fmt.Sprintf(", gracefulRestart: {restartTime: %s}", r.restart)
		}
		if r.bfd {
			more += fmt.Sprintf(", bfd: {strict: %t}", r.strict)
		}
		if r.rack != "" {
			more += fmt.Sprintf(", nodeSelector: {matchLabels: {rack: %s}}", r.rack)
		}
		peers += fmt.Sprintf("  - {name: %s, address: %s, localASN: 64512, peerASN: %d, holdTime: %s, connectRetry: %s%s}\n", r.name,
			addressOf(r.station), asn, hold, r.retry, more)
	}
	return text + "peers:\n" + peers
}

// open reports whether packets go from one station to another.
func (g *routing) open(from, to int) bool {
	return g.lan.open(from, to) && g.cut[[2]int{from, to}] == 0
}

// inflict begins a fault, and ends it after its duration.
func (g *routing) inflict(f Fault) {
	if g == nil {
		return
	}
	n, r := g.World.nodes[f.Node%g.Nodes], g.routers[f.Other%len(g.routers)]
	end := g.faultOf(f, n, r)
	g.changed = true
	g.World.after(f.For, func() {
		g.record("-- over: %s", f)
		end()
		g.changed = true
	})
}

func (g *routing) faultOf(f Fault, n *node, r *router) (end func()) {
	daemon := func(faults *int) (end func()) {
		was := r.on()
		if *faults++; was {
			r.end()
		}
		if r.off > 0 {
			r.lost = g.now
		}
		return func() {
			if *faults--; r.on() {
				r.start()
			}
		}
	}
	cut := func(pairs ...[2]int) (end func()) {
		by := func(count int) {
			for _, p := range pairs {
				g.cut[p] += count
			}
		}
		by(1)
		return func() { by(-1) }
	}
	in, out := [2]int{r.station, n.id}, [2]int{n.id, r.station}
	switch f.Kind {
	case Reboot:
		return daemon(&r.off)
	case Daemon:
		return daemon(&r.down)
	case Link:
		return cut(in, out)
	case LinkIn:
		return cut(in)
	case LinkOut:
		return cut(out)
	case Sluggish:
		return g.delay(&r.slow)
	case Peers:
		change := func(by int) {
			g.edition += by
			g.api.put("config", g.api.document(-1, 0))
		}
		by := 1 + f.Other/64%5
		change(by)
		return func() { change(-by) }
	case Clear:
		for _, a := range r.neighbours {
			if c := a.conn; c != nil {
				c.send(ofRouter, message{kind: notification})
				a.end("is reset", false)
			}
		}
		return func() {}
	case Late:
		return g.delay(&g.late)
	}
	return g.count(&g.racks[n.id], n.writeNode) // Rack
}

// delay begins a fault that delays messages. Those that were sent before its end may arrive after it.
func (g *routing) delay(faults *int) (end func()) {
	return g.count(faults, func() { g.calms = g.now + farOff })
}

// adjacency is a node as a router sees it: the session, and the routes.
type adjacency struct {
	r     *router
	n     *node
	conn  *conn // the last accepted one; nil: none
	up    bool
	heard time.Duration
	// agreed is set for graceful restart, and kept with routes of a session that has ended, until stale.
	agreed bool
	stale  time.Duration
	table  map[netip.Prefix]entry
	watch  *bfdEnd
	// idle is when the session was established, or when a route of it last changed.
	idle time.Duration
}

// entry is a route of a router.
type entry struct {
	plan.Attributes
	stale   bool
	came    time.Duration // when it was sent first in the session
	avoided time.Duration // since when the node asks to avoid it (RFC 8326); never: it does not
}

// take handles a message of the node.
func (a *adjacency) take(c *conn, m message) {
	if m.kind == open {
		a.greet(c, m)
		return
	}
	if a.conn != c {
		return
	}
	a.heard = a.r.now
	switch m.kind {
	case keepalive:
		if !a.up {
			a.up, a.idle = true, a.r.now
			a.r.record("%s: session with %s", a.r.name, a.n.name)
			a.r.routing.changed = true
		}
	case update:
		a.update(m)
	case endOfRIB:
		for _, prefix := range slices.SortedFunc(maps.Keys(a.table), netip.Prefix.Compare) {
			if e := a.table[prefix]; e.stale {
				a.r.routing.checks.withdrawn(a, prefix, e, m.sent)
				delete(a.table, prefix)
				a.r.routing.changed = true
			}
		}
	case notification:
		a.r.routing.checks.notified(a, m)
		a.end("has a NOTIFICATION", a.agreed && a.r.hard && m.code != hardReset)
	case closes:
		a.end("sees the connection end", a.agreed)
	}
}

// greet handles an OPEN. With graceful restart a new connection replaces an established one (RFC 4724 section 5). Otherwise it
// is refused (RFC 4271 section 6.8).
func (a *adjacency) greet(c *conn, m message) {
	if a.conn != nil && a.conn != c {
		if !a.agreed {
			c.send(ofRouter, message{kind: notification})
			c.close(ofRouter)
			return
		}
		a.end("has another connection", true)
	}
	a.conn, a.heard, a.up = c, a.r.now, false
	a.agreed = m.restart && a.r.restart > 0
	for prefix, e := range a.table {
		if e.stale && !m.kept {
			delete(a.table, prefix)
			a.r.routing.changed = true
		}
	}
	c.hold = min(m.hold, a.r.hold)
	c.send(ofRouter, message{kind: open, restart: a.r.restart > 0, hold: a.r.hold})
	c.send(ofRouter, message{kind: keepalive})
	c.beat(ofRouter)
	a.expire(c)
}

// expire ends the session when the hold time is over.
func (a *adjacency) expire(c *conn) {
	a.r.World.after(a.heard+c.hold-a.r.now, func() {
		switch {
		case a.conn != c:
		case a.r.now < a.heard+c.hold:
			a.expire(c)
		default:
			c.send(ofRouter, message{kind: notification})
			a.end("has not heard the node for the hold time", a.agreed)
		}
	})
}

func (a *adjacency) update(m message) {
	for _, prefix := range m.prefixes {
		before, was := a.table[prefix]
		if m.attributes == nil {
			if was {
				a.r.routing.checks.withdrawn(a, prefix, before, m.sent)
			}
			delete(a.table, prefix)
			continue
		}
		e := entry{Attributes: *m.attributes, came: m.sent, avoided: never}
		if was && !before.stale {
			e.came = before.came
		}
		if slices.Contains(e.Communities, gracefulShutdown) {
			if e.avoided = m.sent; was && before.avoided != never && !before.stale {
				e.avoided = before.avoided
			}
		}
		a.table[prefix] = e
	}
	a.idle = a.r.now
	if a.r.story != nil {
		a.r.record("%s: from %s %s", a.r.name, a.n.name, m)
	}
	a.r.routing.changed = true
	if m.attributes == nil {
		a.r.routing.checks.lookForGaps(a.r)
	}
}

// end ends the session. The routes are kept or not.
func (a *adjacency) end(why string, keep bool) {
	c := a.conn
	a.conn = nil
	if a.up {
		a.r.record("%s: %s: session with %s ends, keeps routes: %t", a.r.name, why, a.n.name, keep)
	}
	if a.up = false; !keep {
		a.table = map[netip.Prefix]entry{}
	}
	for prefix, e := range a.table {
		e.stale = true
		a.table[prefix] = e
	}
	if c != nil {
		c.close(ofRouter)
	}
	a.r.routing.checks.forget(a)
	if a.stale = a.r.now + a.r.restart; keep {
		boot, stale := a.r.boot, a.stale
		a.r.World.after(a.r.restart, func() {
			if a.r.boot == boot && a.stale == stale {
				a.drop()
			}
		})
	}
	a.r.routing.changed = true
}

// drop removes the stale routes of the previous session.
func (a *adjacency) drop() {
	for prefix, e := range a.table {
		if e.stale {
			delete(a.table, prefix)
		}
	}
	a.r.routing.changed = true
}

// startBFD begins the router's end of BFD.
func (a *adjacency) startBFD() {
	if !a.r.bfd {
		return
	}
	boot := a.r.boot
	a.watch = newBFD(a.r.routing, func() bool { return a.r.boot == boot }, func() bool { return false })
	a.watch.send = func(p bfd.Packet) {
		a.r.packet(a.r.station, a.n.id, func() {
			if s := a.n.announcer; s != nil && s.life == a.n.life && a.n.running {
				if q := s.peerings[a.r.name]; q != nil && q.watch != nil {
					q.watch.receive(p)
				}
			}
		})
	}
	a.watch.changed = func(s bfd.Status) {
		if a.r.record("%s: BFD with %s is %s", a.r.name, a.n.name, s.State); s.Failed() && a.up {
			c := a.conn
			c.send(ofRouter, message{kind: notification})
			a.end("BFD is down", false)
		}
	}
	a.watch.advance()
}

// calm reports whether no packet is lost or late except on cut paths.
func (g *routing) calm() bool { return g.lan.noise == 0 && g.late == 0 && g.now >= g.calms }

// packet delivers a packet of BFD.
func (g *routing) packet(from, to int, arrive func()) {
	if !g.open(from, to) || g.lan.noise > 0 && g.percent(10) {
		return
	}
	latest := 500 * time.Microsecond
	if g.late > 0 {
		latest = farOff
	}
	g.World.after(50*time.Microsecond+g.upTo(latest), arrive)
}
