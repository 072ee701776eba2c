package world

import (
	"maps"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"time"

	"github.com/lodestone-lb/lodestone/speaker/plan"
)

// The bounds of the routes in routers.
const (
	// maxUnrouted: a router has a route to a VIP, to a node that serves it, when a node was able to announce it for that time.
	// Events of the API server take 80 ms, and those of the membership that have to do with kube-proxy that is sick, a few seconds.
	maxUnrouted, maxUnroutedSick = 3 * time.Second, 10 * time.Second
	// maxSession: a session is established once node, router and the path between them have worked for that time: a node waits for
	// 20 s for the router's OPEN, and its pause is 5 s.
	maxSession = 30 * time.Second
	// maxMisrouted: a router does not send to a node that does not serve for longer than that after the node has learnt of it. If
	// the node is gone, the time until that is noticed counts, too (detection).
	maxMisrouted = 2 * time.Second
	// bfdDetection is the detection time of BFD: three intervals of 300 ms, and a packet under way.
	bfdDetection = 1200 * time.Millisecond
	// slowBFD is the detection time of one that has come up less than a second ago: its end agrees on shorter intervals than a
	// second with the next packet (RFC 5880 section 6.8.3).
	slowBFD = 3300 * time.Millisecond
	// minAvoided is for how long routers are asked to prefer other nodes before a planned withdrawal: the speaker's two seconds, less
	// the delay of the messages.
	minAvoided = 1900 * time.Millisecond
	// maxWithdrawal is how long a route may stay once no Service has the VIP.
	maxWithdrawal = 3 * time.Second
)

// routeChecks watch the tables of routers.
type routeChecks struct {
	*routing
	truth    map[string]plan.BGP // by node: what it should announce by the real state of everything
	written  int                 // the history when truth was made
	sick     uint64              // the nodes whose kube-proxy is not healthy, and when these were others
	sickened time.Duration
	// Since when nodes rightly announce a prefix, could have a session, and serve a VIP; and since when routers send to a
	// node that does not serve.
	right    map[rightKey]time.Duration
	path     map[[2]int]time.Duration
	able     map[ableKey]time.Duration
	misroute map[ableKey]time.Duration
	absent   map[ableKey]time.Duration // the same for a node that is gone
	strange  map[rightKey]time.Duration
	looked   time.Duration
}

type rightKey struct {
	node, router int
	prefix       netip.Prefix
}

type ableKey struct {
	node, router int
	vip          netip.Addr
}

func newRouteChecks(g *routing) routeChecks {
	return routeChecks{routing: g, right: map[rightKey]time.Duration{}, path: map[[2]int]time.Duration{}, able: map[ableKey]time.Duration{},
		misroute: map[ableKey]time.Duration{}, absent: map[ableKey]time.Duration{}, strange: map[rightKey]time.Duration{}}
}

// snapshot returns the snapshot that a speaker should have now.
func (c *routeChecks) snapshot() plan.Snapshot {
	s := c.World.checks.truth()
	for _, n := range c.World.nodes {
		at := s.Nodes[n.name]
		at.Sick = n.sick > 0
		s.Nodes[n.name] = at
	}
	return s
}

// wrote is called when an object was written.
func (g *routing) wrote(key string) {
	if g != nil && g.now > 0 && !strings.HasPrefix(key, "lease/") {
		g.checks.learn()
	}
}

// learn computes what each node should announce.
func (c *routeChecks) learn() {
	sick := uint64(0)
	for _, n := range c.World.nodes {
		if n.sick > 0 {
			sick |= 1 << n.id
		}
	}
	if c.written == len(c.api.history) && sick == c.sick {
		return
	}
	if sick != c.sick {
		c.sickened = c.now
	}
	c.written, c.sick = len(c.api.history), sick
	c.truth = map[string]plan.BGP{}
	s := c.snapshot()
	for _, n := range c.World.nodes {
		c.truth[n.name] = plan.Make(n.name, s).BGP
	}
	maps.DeleteFunc(c.able, func(key ableKey, _ time.Duration) bool {
		return !slices.Contains(c.truth[nodeName(key.node)].VIPs[key.vip], c.routers[key.router].name)
	})
	for key := range c.right {
		if _, is := c.truth[nodeName(key.node)].Routes[key.prefix][c.routers[key.router].name]; !is {
			delete(c.right, key)
		}
	}
	for _, n := range c.World.nodes {
		for prefix, route := range c.truth[n.name].Routes {
			for _, r := range c.routers {
				key := rightKey{n.id, r.id, prefix}
				if _, is := route[r.name]; is {
					if _, known := c.right[key]; !known {
						c.right[key] = c.now
					}
				}
			}
		}
	}
}

// attends reports whether the node learns of all changes, and can act.
func (c *routeChecks) attends(n *node) bool {
	return n.participates() && !n.stopping && n.busy == 0 && c.api.upToDate(n.name)
}

// hops returns the nodes to which a router sends packets for a VIP: those of the longest prefix, and of these the most
// preferred.
func (r *router) hops(vip netip.Addr) (best []*node) {
	longest, lowest := 0, true
	for _, bits := range []int{vip.BitLen(), vip.BitLen() - 1} {
		prefix := netip.PrefixFrom(vip, bits).Masked()
		for _, a := range r.neighbours {
			e, ok := a.table[prefix]
			if !ok || longest > bits {
				continue
			}
			switch avoided := e.avoided != never; {
			case longest == 0, lowest && !avoided:
				longest, lowest, best = bits, avoided, []*node{a.n}
			case avoided == lowest:
				best = append(best, a.n)
			}
		}
	}
	return best
}

// serves reports whether packets that a router sends to the node for a VIP are served.
func (c *routeChecks) serves(r *router, n *node, vip netip.Addr) bool {
	if n.plane.off > 0 || !c.open(r.station, n.id) {
		return false
	}
	for _, name := range c.World.checks.book.holders[vip] {
		svc := c.serviceIn(c.api.objects, name)
		since, here := n.forwards[name]
		if !svc.Serving || svc.Local && (!here || since > c.now) {
			return false
		}
	}
	return true
}

// tick checks all bounds. It is called every 50 ms, and computes everything anew only after a change.
func (c *routeChecks) tick() {
	if c.changed || c.written != len(c.api.history) || c.now-c.looked >= 250*time.Millisecond {
		c.look()
	}
}

// look updates since when each state lasts, and checks the bounds.
func (c *routeChecks) look() {
	c.changed, c.looked = false, c.now
	c.learn()
	gone := func(key ableKey, _ time.Duration) bool { return !c.World.checks.known(key.vip) }
	maps.DeleteFunc(c.able, gone)
	maps.DeleteFunc(c.misroute, gone)
	maps.DeleteFunc(c.absent, gone)
	for _, r := range c.routers {
		for _, n := range c.World.nodes {
			c.lookAtSession(r, n)
		}
		if r.on() {
			for _, vip := range c.World.checks.ordered {
				c.lookAtVIP(r, vip)
			}
			c.lookAtStrangers(r)
		}
	}
}

// note records since when a state lasts, and removes it when it is over.
func note[K comparable](since map[K]time.Duration, key K, is bool, now time.Duration) time.Duration {
	at, was := since[key]
	switch {
	case !is:
		delete(since, key)
		return never
	case !was:
		since[key] = now
		return now
	}
	return at
}

// lookAtSession: a session comes up when it can.
func (c *routeChecks) lookAtSession(r *router, n *node) {
	key := [2]int{n.id, r.id}
	_, wanted := c.truth[n.name].Sessions[r.name]
	could := wanted && r.on() && r.slow == 0 && n.ready && c.attends(n) && c.calm() &&
		c.open(n.id, r.station) && c.open(r.station, n.id)
	if n.announcer != nil && n.announcer.life == n.life {
		q := n.announcer.peerings[r.name]
		could = could && (q == nil || q.late < c.now)
	}
	if since := note(c.path, key, could && !c.established(r, n), c.now); since != never && c.now-since > maxSession {
		c.fail("a session comes up", "%s and %s have none since %.3fs", n.name, r.name, since.Seconds())
	}
}

// established reports whether both ends have the session, and TCP has nothing to retransmit.
func (c *routeChecks) established(r *router, n *node) bool {
	a := r.neighbours[n.id]
	return a.up && c.hasEnd(n, a) && n.announcer.peerings[r.name].up && a.conn.streams[ofNode].rto == 0
}

// hasEnd reports whether the node has the other end of the router's connection.
func (c *routeChecks) hasEnd(n *node, a *adjacency) bool {
	if n.announcer == nil || n.announcer.life != n.life || !n.running {
		return false
	}
	q := n.announcer.peerings[a.r.name]
	return q != nil && q.conn == a.conn
}

// lookAtVIP: a router has a route to somebody who serves the VIP, and none to others.
func (c *routeChecks) lookAtVIP(r *router, vip netip.Addr) {
	// A route to a node that does not serve counts if the router does not know yet that the node is gone, or was, if kube-proxy is
	// late, if the router keeps the route for a restart, or if the speaker ends; see docs/explanation/found-by.md.
	served := c.edited(netip.PrefixFrom(vip, vip.BitLen()))
	hops := r.hops(vip)
	for _, n := range hops {
		serves := c.serves(r, n, vip)
		a := r.neighbours[n.id]
		served = served || serves || !c.there(r, n) || !c.hasEnd(n, a) || c.late(n, vip) || !a.up || n.stopping
		c.lookAtHop(r, n, vip, serves)
	}
	for _, n := range c.World.nodes {
		if !slices.Contains(hops, n) {
			delete(c.misroute, ableKey{n.id, r.id, vip})
			delete(c.absent, ableKey{n.id, r.id, vip})
		}
		able := slices.Contains(c.truth[n.name].VIPs[vip], r.name) && n.ready && c.attends(n) && r.slow == 0 && c.calm() &&
			c.established(r, n) && c.open(n.id, r.station) && c.serves(r, n, vip)
		since := note(c.able, ableKey{n.id, r.id, vip}, able, c.now)
		if since != never && c.now-max(since, c.sickened) > c.unrouted() && !served {
			c.fail("routers have a route", "%s sends %s to %v, and %s could serve it since %.3fs", r.name, vip, nodeNames(hops), n.name,
				since.Seconds())
		}
	}
}

func nodeNames(nodes []*node) (all []string) {
	for _, n := range nodes {
		all = append(all, n.name)
	}
	return all
}

// unrouted returns how long a router may have no route.
func (c *routeChecks) unrouted() time.Duration {
	if c.sick != 0 {
		return maxUnroutedSick
	}
	return maxUnrouted
}

// forget removes what a node could serve, because it has no session with the router any more.
func (c *routeChecks) forget(a *adjacency) {
	maps.DeleteFunc(c.able, func(key ableKey, _ time.Duration) bool { return key.node == a.n.id && key.router == a.r.id })
}

// lookForGaps: if some node was able to announce a route all the time, the router is never without it when a route goes.
func (c *routeChecks) lookForGaps(r *router) {
	c.learn()
	for _, vip := range c.World.checks.ordered {
		for _, n := range c.World.nodes {
			since, able := c.able[ableKey{n.id, r.id, vip}]
			if able && c.now-max(since, c.sickened) > c.unrouted() && len(r.hops(vip)) == 0 {
				c.fail("no gap in the routes", "%s has no route to %s, and %s could serve it since %.3fs", r.name, vip, n.name, since.Seconds())
			}
		}
	}
}

// lookAtHop: a router does not send to a node that does not serve.
func (c *routeChecks) lookAtHop(r *router, n *node, vip netip.Addr, serves bool) {
	a, key, there := r.neighbours[n.id], ableKey{n.id, r.id, vip}, c.there(r, n)
	attends := c.attends(n) && n.ready && r.slow == 0 && c.calm() && c.open(n.id, r.station) && c.established(r, n)
	fails := func(since, bound time.Duration) {
		if since != never && c.now-since > bound {
			c.fail("routers send to who serves", "%s sends %s to %s, which does not serve it, since %.3fs", r.name, vip, n.name, since.Seconds())
		}
	}
	fails(note(c.misroute, key, there && !serves && attends, c.now), maxMisrouted+maxForwarding)
	gone := note(c.absent, key, !there, c.now)
	fails(gone, c.detection(a, gone))
}

// late reports whether kube-proxy does not forward yet to endpoints that the node has.
func (c *routeChecks) late(n *node, vip netip.Addr) bool {
	return slices.ContainsFunc(c.World.checks.book.holders[vip], func(name string) bool { return n.forwards[name] > c.now })
}

// there reports whether the router's packets arrive at the node.
func (c *routeChecks) there(r *router, n *node) bool {
	return n.plane.off == 0 && c.open(r.station, n.id)
}

// detection returns how long a router may keep routes of a node that is not there since then.
func (c *routeChecks) detection(a *adjacency, since time.Duration) (bound time.Duration) {
	r, fast := a.r, a.r.bfd && a.up && a.watch.status.Up()
	switch {
	case !fast:
		bound = r.hold + 3*time.Second + maxMisrouted // some documents have three seconds more
	case a.idle > since-time.Second:
		bound = slowBFD
	default:
		bound = bfdDetection
	}
	if !c.open(a.n.id, r.station) { // one direction after the other: the node notices first, and cannot make that known
		bound *= 2
	}
	if r.restart > 0 && !fast {
		bound += r.restart
	}
	if r.slow > 0 || !c.calm() {
		bound += 10 * time.Second
	}
	return bound
}

// lookAtStrangers: no address is announced that no Service has.
func (c *routeChecks) lookAtStrangers(r *router) {
	maps.DeleteFunc(c.strange, func(key rightKey, _ time.Duration) bool {
		_, is := r.neighbours[key.node].table[key.prefix]
		return key.router == r.id && !is
	})
	for _, a := range r.neighbours {
		for _, prefix := range slices.SortedFunc(maps.Keys(a.table), netip.Prefix.Compare) {
			known := slices.ContainsFunc(c.World.checks.ordered, prefix.Contains)
			since := note(c.strange, rightKey{a.n.id, r.id, prefix}, !known && c.attends(a.n) && a.n.ready && c.established(r, a.n) && r.slow == 0 &&
				c.calm() && c.open(a.n.id, r.station), c.now)
			if !known && since != never && c.now-since > maxWithdrawal {
				c.fail("what is announced to routers is assigned", "%s has %s of %s, which no Service has", r.name, prefix, a.n.name)
			}
		}
	}
}

// notified is called when a router drops routes because of a node's NOTIFICATION. A speaker that stops will be back.
func (c *routeChecks) notified(a *adjacency, m message) {
	if a.agreed && m.code == shutdown {
		c.fail("a restart keeps the routes", "%s has dropped all of %s, whose speaker has stopped", a.r.name, a.n.name)
	}
}

// withdrawn is called when a node has withdrawn a route, or not announced it again. An aggregate of the node may have taken its place.
func (c *routeChecks) withdrawn(a *adjacency, prefix netip.Prefix, e entry, at time.Duration) {
	c.learn()
	n, r := a.n, a.r
	since, right := c.right[rightKey{n.id, r.id, prefix}]
	for other := range a.table {
		right = right && !(other.Bits() < prefix.Bits() && other.Contains(prefix.Addr()))
	}
	if right && at-since > maxUnroutedSick && at-c.sickened > maxUnroutedSick && c.attends(n) {
		c.fail("no route is withdrawn that is right", "%s has %s no more of %s, which should announce it since %.3fs", r.name, prefix, n.name,
			since.Seconds())
	}
	labelled := c.api.objects["node/"+n.name].(plan.Node).Labelled //nolint:errcheck // nothing else is there
	hasty := e.avoided == never || at-e.avoided < minAvoided && e.avoided > e.came
	if (n.stopping || labelled) && hasty && !e.stale && at-c.sickened > maxUnroutedSick && c.leaves(n, r, prefix) {
		c.fail("who leaves is avoided first", "%s has no %s of %s any more, and was not asked to prefer others", r.name, prefix, n.name)
	}
}

// leaves reports whether the node withdraws a route because of the label alone.
func (c *routeChecks) leaves(n *node, r *router, prefix netip.Prefix) bool {
	s := c.snapshot()
	at := s.Nodes[n.name]
	at.Labelled = false
	s.Nodes = maps.Clone(s.Nodes)
	s.Nodes[n.name] = at
	_, is := plan.Make(n.name, s).BGP.Routes[prefix][r.name]
	return is && c.api.upToDate(n.name) && !c.edited(prefix)
}

// unseen is how long a write may take to have an effect on a node.
const unseen = 200 * time.Millisecond

// edited reports whether a Service with an address of the prefix, or its pods, were written just now.
func (c *routeChecks) edited(prefix netip.Prefix) bool {
	for i := len(c.api.history) - 1; i >= 0 && c.now-c.api.history[i].at < unseen; i-- {
		_, name, _ := strings.Cut(c.api.history[i].key, "/")
		for vip, holders := range c.World.checks.book.holders {
			if prefix.Contains(vip) && slices.Contains(holders, name) {
				return true
			}
		}
	}
	return false
}

// atTheEnd: routers have what they should have, and it does not change.
func (c *routeChecks) atTheEnd() {
	c.learn()
	for _, r := range c.routers {
		for _, a := range r.neighbours {
			c.compare(a)
			if a.up && c.now-a.idle < maxIdle {
				c.fail("in the end routers are sent nothing", "%s was sent something by %s at %.3fs", r.name, a.n.name, a.idle.Seconds())
			}
		}
	}
}

// compare compares the routes that a router has from a node with those that it should have.
func (c *routeChecks) compare(a *adjacency) {
	routes := c.truth[a.n.name].Routes
	for _, prefix := range slices.SortedFunc(maps.Keys(a.table), netip.Prefix.Compare) {
		e := a.table[prefix]
		if _, is := routes[prefix][a.r.name]; !is || e.stale {
			c.fail("in the end routers have the right routes", "%s has %s of %s, stale: %t", a.r.name, prefix, a.n.name, e.stale)
		}
	}
	for _, prefix := range slices.SortedFunc(maps.Keys(routes), netip.Prefix.Compare) {
		want, is := routes[prefix][a.r.name]
		if e, has := a.table[prefix]; is && (!has || !reflect.DeepEqual(e.Attributes, want)) {
			c.fail("in the end routers have the right routes", "%s should have %s of %s, with communities %v, and has %v", a.r.name, prefix,
				a.n.name, want.Communities, e.Communities)
		}
	}
}
