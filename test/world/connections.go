package world

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/lodestone-lb/lodestone/pkg/config"
	"github.com/lodestone-lb/lodestone/test/nft"
)

// clients is how many connections the hosts have at a time.
const clients = 8

// A client sends a segment each second. It repeats the SYN after these times (RFC 6298), and gives up after the last one.
var synAgain = []time.Duration{0, time.Second, 3 * time.Second, 7 * time.Second}

// The bounds of connections.
const (
	// maxCopies is how often a segment is handed on: all of a ring are asked twice, and the table names one before, see
	// docs/explanation/direct-forwarding.md. Where nodes do not know each other's hardware addresses it is mostCopies.
	maxCopies, mostCopies = 13, 66
	// steady is for how long nothing must have happened before the bounds count. Then a SYN is answered at the second
	// attempt, as a frame may be lost while a neighbour is asked for, and no connection is without an answer for maxStall.
	steady   = 8 * time.Second
	maxOpen  = 1500 * time.Millisecond
	maxStall = 3500 * time.Millisecond
	// maxHold is how long a node may not be heard by some other one: its connections may be given up then.
	maxHold = hold - 2*time.Second
	// maxUnnoticed is how long a Director that has begun takes to give up the connections of a node without power: it finds
	// out (4 s), and waits for hold.
	maxUnnoticed = hold + 5*time.Second
	// maxDead is how long after a node has lost its power its connections are reset: the others find out, wait for hold,
	// and the client sends.
	maxDead = 22 * time.Second
	// noticing is how long before a look at all nodes a speaker may have been lost.
	noticing = time.Second
	// maxFlushed is how long after rules were flushed they are back. Until then connections of other nodes are reset.
	maxFlushed = (verifyRounds + 1) * lookInterval
)

// connection is a connection of a client, which opens another one when it is over.
type connection struct {
	*World
	flow
	host    *host
	number  int
	service string
	until   time.Duration // when the client closes it
	begun   time.Duration
	tries   int
	opened  time.Duration // when it was answered first; never: not yet
	heard   time.Duration // when the last answer came
	over    bool
	keeper  *node
	pod     *pod
	promise
}

// promise is under which conditions a connection has to live on.
type promise struct {
	// kept is set if it is to live as long as its pod, its keeper and the way to them: direct forwarding was in force
	// on all nodes since, and its policy is the same.
	kept   bool
	broken string // why it may end
	dead   time.Duration
}

func (c *connection) String() string {
	return fmt.Sprintf("connection %d (%s to %s)", c.number, c.client, c.vip)
}

// connections are the checks of connections.
type connections struct {
	*World
	flushed time.Duration // when rules were flushed last
}

// use makes the hosts open connections.
func (d *dataPath) use() {
	if !d.Direct {
		return
	}
	for i := range clients {
		d.World.after(beginning+d.upTo(10*time.Second), func() { d.open(d.lan.hosts[i%(hosts-1)]) })
	}
	d.World.after(beginning, d.World.checks.connections.tick)
}

// open opens a connection.
func (d *dataPath) open(h *host) {
	vips := d.checks.inOrder()
	if len(vips) == 0 {
		d.World.after(time.Second, func() { d.open(h) })
		return
	}
	vip := vips[d.random.IntN(len(vips))]
	service := d.checks.book.holders[vip][0]
	svc := d.api.service(service)
	d.port++
	c := &connection{World: d.World, host: h, number: int(d.port), service: service, begun: d.now, opened: never,
		until: d.now + d.between(2*time.Second, 90*time.Second), flow: flow{netip.AddrPortFrom(address(h.id, vip.Is4()), 20000+d.port),
			netip.AddrPortFrom(vip, uint16(svc.Spec.Ports[0].Port))}}
	c.dead = never
	d.connections = append(d.connections, c)
	c.try()
}

// try sends the first segment.
func (c *connection) try() {
	if c.opened != never || c.over {
		return
	}
	if c.tries == len(synAgain) {
		c.end("gives up")
		return
	}
	c.transmit(syn)
	wait := synAgain[c.tries]
	if c.tries++; c.tries < len(synAgain) {
		wait = synAgain[c.tries] - wait
	}
	c.after(max(wait, time.Second), c.try)
}

// transmit sends a segment to where the host finds the VIP.
func (c *connection) transmit(flags byte) {
	e := c.host.entries[c.vip.Addr()]
	if e == nil {
		return
	}
	to := int(e.mac[5]) - 1
	if to >= len(c.nodes) {
		return
	}
	c.data.send(c.host.id, to, func() {
		c.nodes[to].plane.take(&tcp{conn: c, Segment: nft.Segment{Client: c.client, To: c.vip, Flags: flags, TTL: linuxTTL,
			From: hardware(c.host.id), Device: device}})
	})
}

// run sends a segment each second.
func (c *connection) run() {
	switch {
	case c.over:
	case c.now >= c.until || c.pod.gone:
		c.transmit(fin)
		c.end("ends")
	default:
		c.transmit(data)
		c.after(time.Second, c.run)
	}
}

// answered is called when an answer arrives.
func (c *connection) answered(by *node, p *pod, handed int) {
	if c.over {
		return
	}
	if c.heard = c.now; c.opened == never {
		c.opened, c.keeper, c.pod = c.now, by, p
		if (c.checks.attacked || by.plane.bare()) && c.strayed(by, handed) { // hosts remember what an attacker has claimed
			c.broken = "it went to a node that does not answer for the VIP"
		}
		c.record("%s: is open, %s keeps it", c, by.name)
		c.after(time.Second, c.run)
	}
}

// strayed reports whether a segment went to a node that does not answer for the VIP, because of a repeated claim
// or of what the host found before.
func (c *connection) strayed(by *node, handed int) bool {
	return handed == 0 && !c.checks.answersAt(hardware(by.id), c.vip.Addr())
}

// reset is called when a reset arrives.
func (c *connection) reset(by *node, handed int) {
	if c.over {
		return
	}
	if c.opened != never && c.kept && c.mayEnd() == "" && !c.strayed(by, handed) && !by.plane.mayReset(c) {
		c.fail("connections outlive the owner", "%s resets %s, and %s keeps it", by.name, c, c.keeper.name)
	}
	c.end("is reset by " + by.name)
}

func (c *connection) end(how string) {
	c.over = true
	c.record("%s: %s", c, how)
	c.data.connections = slices.DeleteFunc(c.data.connections, func(o *connection) bool { return o == c })
	c.after(c.data.upTo(time.Second), func() { c.data.open(c.host) })
}

// mayEnd returns why the connection may be reset. Empty: it may not.
func (c *connection) mayEnd() string {
	switch {
	case c.broken != "":
		return c.broken
	case c.checks.book.edited[c.service] > c.opened:
		return "its Service was edited"
	case c.pod.gone:
		return "its pod is gone"
	case len(c.nodes) > 6:
		return "not all nodes are asked"
	case c.unsettled():
		return "its endpoints have changed while speakers were lost"
	case c.passedOver():
		return "a node passes over its node"
	case c.checks.connections.flushed > 0 && c.now-c.checks.connections.flushed < maxFlushed:
		return "rules were flushed"
	}
	return ""
}

// unsettled reports whether the endpoints have changed, or the option was switched on, since the connection's node was lost,
// or since one of two nodes was, and these have not caught up; or whether its Service came between the end of a speaker and the
// moment at which the others noticed. Known: see docs/explanation/found-by.md.
func (c *connection) unsettled() bool {
	changed := c.data.changed[c.service]
	if c.data.off == 0 {
		changed = max(changed, c.data.switched)
	}
	lost, first := 0, c.now
	for _, n := range c.nodes {
		if n.plane.absent.over(c.now) {
			continue
		}
		edited := c.data.edited[c.service]
		if n == c.keeper && changed > n.plane.absent.since || edited > n.plane.ended && edited < n.plane.absent.since+noticing {
			return true
		}
		lost, first = lost+1, min(first, n.plane.absent.since)
	}
	return lost > 1 && changed > first
}

// passedOver reports whether a node whose speaker ended when it did not reach the connection's node has stayed with that.
// Known: see docs/explanation/found-by.md.
func (c *connection) passedOver() bool {
	return slices.ContainsFunc(c.nodes, func(n *node) bool {
		return !n.running && n.plane.rules != nil && n.plane.rules.PassesOver(address(c.keeper.id, c.vip.Addr().Is4()))
	})
}

// absence is the time during which another speaker does not hear that of a node.
type absence struct{ since, last time.Duration }

// over reports whether the speaker has caught up, as package direct has it.
func (a absence) over(now time.Duration) bool {
	return a.last == 0 || now-a.last > min(max(catchUp, a.last-a.since), longestCatchUp)+time.Second
}

// lose notes that a node has lost its power.
func (s *connections) lose(n *node) {
	for _, c := range s.data.connections {
		if c.opened != never && (c.keeper == n || c.nodes[c.pod.node] == n) {
			c.broken, c.dead = "its node had no power", c.now
		}
	}
}

// tick looks at all connections.
func (s *connections) tick() {
	s.World.after(500*time.Millisecond, s.tick)
	for _, n := range s.nodes {
		heard := !slices.ContainsFunc(s.nodes, func(o *node) bool {
			return o != n && o.plane.off == 0 && !(s.lan.open(n.id, o.id) && s.lan.open(o.id, n.id))
		})
		if heard || n.plane.off > 0 {
			n.plane.apart = never
		} else if n.plane.apart == never {
			n.plane.apart = s.now
		}
		// Known: it is not asked until its speaker is heard. See docs/explanation/found-by.md.
		heard = heard && !slices.ContainsFunc(s.nodes, func(o *node) bool { return o != n && o.running && !o.view[n.id].ready })
		n.plane.gone = n.plane.apart != never && s.now-n.plane.apart > maxHold || n.plane.gone && !heard
	}
	for _, n := range s.nodes {
		a := &n.plane.absent
		if !slices.ContainsFunc(s.nodes, func(o *node) bool { return o != n && o.running && !o.view[n.id].ready }) {
			continue
		}
		if a.over(s.now) {
			a.since = s.now - noticing
		}
		a.last = s.now
	}
	for _, c := range slices.Clone(s.data.connections) {
		s.look(c)
	}
}

func (s *connections) look(c *connection) {
	svc := s.api.service(c.service)
	if svc == nil || !slices.Contains(shown(svc), c.vip.Addr()) {
		c.end("has no VIP any more")
		return
	}
	quiet := s.quietSince() && s.vipAnswered(c)
	if c.opened == never {
		if quiet && s.now-c.begun > maxOpen && c.begun-s.busyUntil() > steady && len(s.data.podsOf(c.service)) > 0 {
			s.fail("new connections are answered", "%s is not open after %s", c, s.now-c.begun)
		}
		return
	}
	local := svc.Spec.ExternalTrafficPolicy == corev1.ServiceExternalTrafficPolicyLocal
	switch {
	case c.broken != "":
	case c.keeper.plane.gone:
		c.broken = "its node was not heard"
	case local && c.keeper.id != c.pod.node:
		c.broken = "its pod is elsewhere, and the policy is Local"
	case !c.kept && s.inForce(c):
		c.kept = true
	}
	if c.dead != never && c.dead > s.checks.disturbed-time.Second && s.now-c.dead > maxDead && quiet {
		s.fail("connections of a dead node end", "%s is not reset %s after %s lost its power", c, s.now-c.dead, c.keeper.name)
	}
	if c.kept && c.mayEnd() == "" && quiet && s.now-max(c.heard, s.busyUntil()) > max(maxStall, steady) {
		s.fail("connections go on", "%s has no answer since %.3fs, and %s keeps it", c, c.heard.Seconds(), c.keeper.name)
	}
}

// busyUntil is when something last happened that may delay segments.
func (s *connections) busyUntil() time.Duration {
	return max(s.checks.disturbed, s.checks.touched, s.flushed, s.data.switched)
}

// quietSince reports whether nothing has delayed segments since then: all frames arrive, and all nodes have power.
func (s *connections) quietSince() bool {
	return s.sound() && !slices.ContainsFunc(s.nodes, func(n *node) bool { return n.plane.off > 0 || s.api.away[n.name] > 0 })
}

// vipAnswered reports whether the client has found the VIP where somebody answers for it for some time.
func (s *connections) vipAnswered(c *connection) bool {
	e := c.host.entries[c.vip.Addr()]
	return e != nil && s.checks.answersAt(e.mac, c.vip.Addr()) && s.now-e.changes[len(e.changes)-1] > steady
}

// inForce reports whether direct forwarding is in force for the connection's Service, on all nodes that have
// a speaker.
func (s *connections) inForce(c *connection) bool {
	return s.data.off == 0 && s.now-s.data.switched > steady && s.now-c.opened > time.Second &&
		!slices.ContainsFunc(s.nodes, func(n *node) bool {
			if !n.running && n.plane.off == 0 {
				return false // it has missed the Service, perhaps, and is not asked then
			}
			return n.plane.rules == nil || n.plane.rules.Program(c.vip, false) == nil || n.plane.rules.SwitchedOff(c.vip)
		})
}

// handed checks what a node hands on.
func (c *checks) handed(n *node, s *tcp) {
	most := maxCopies
	if c.now-c.disturbed < steady {
		most = mostCopies
	}
	if s.handed > most {
		c.fail("copies are bounded", "%s hands a segment of %s on for the %dth time", n.name, s.conn, s.handed)
	}
}

// tables checks that the tables of all nodes are the same.
func (c *checks) tables() {
	if cfg, _ := c.api.objects["config"].(*config.Config); !c.Direct || cfg == nil {
		return
	}
	for _, vip := range c.ordered {
		svc := c.api.service(c.book.holders[vip][0])
		at := netip.AddrPortFrom(vip, uint16(svc.Spec.Ports[0].Port))
		var first []netip.Addr
		for _, n := range c.nodes {
			if n.plane.rules == nil || n.plane.rules.SwitchedOff(at) {
				c.fail("in the end all forward", "%s has no rules for %s, or those of a switched-off one", n.name, at)
				return
			}
			table := n.plane.rules.Open(at)
			for i := range table {
				table[i] = cmp.Or(table[i], address(n.id, vip.Is4()))
			}
			if first == nil {
				first = table
			} else if !slices.Equal(first, table) {
				c.fail("in the end tables are the same", "%s has another one for %s than %s", n.name, at, c.nodes[0].name)
			}
		}
	}
}
