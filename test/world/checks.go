package world

import (
	"maps"
	"math/bits"
	"net/netip"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/lodestone-lb/lodestone/pkg/annotation"
	"github.com/lodestone-lb/lodestone/pkg/config"
	"github.com/lodestone-lb/lodestone/pkg/kube"
	"github.com/lodestone-lb/lodestone/pkg/report"
	"github.com/lodestone-lb/lodestone/speaker/layer2/segment"
	"github.com/lodestone-lb/lodestone/speaker/layer2/wire"
	"github.com/lodestone-lb/lodestone/speaker/plan"
)

// checkInterval is how often bounds are checked. Whether somebody answers is noted whenever it changes.
const checkInterval = 50 * time.Millisecond

// The bounds. Each is counted from the last disturbance, which is the beginning or the end of a fault, or a change
// of what a speaker knows of others: after each of them all times begin anew.
const (
	// maxUnanswered: a VIP that somebody could serve has somebody who answers. A node that has yielded claims a VIP again
	// after three questions without an answer (1.5 s); a new VIP is asked for three times (0.6 s). Where another machine
	// has the address, it is looked for again after 10 s. A node that alone does not hear of a new VIP that it should
	// own leaves it to the others when it has not reached the API server for half a minute.
	maxUnanswered, maxTaken, maxUnheard = 3 * time.Second, 12 * time.Second, 36 * time.Second
	// calm is how long after a disturbance a planned move must be without any gap: the longest hand-over and search.
	calm = 15 * time.Second
	// maxGap is that gap: the time of a frame.
	maxGap = 5 * time.Millisecond
	// maxBoth: two nodes that hear each other do not both announce a VIP for longer than three beacons, a question and
	// a correction take. One that misses no speaker takes the other for the next owner (5 s) first. While somebody repeats
	// claims of the VIP, it gets no beacon, and the defence (10 s) comes instead.
	maxBoth, maxBothWhole, maxBothClaimed = 2 * time.Second, 6 * time.Second, 12 * time.Second
	// maxUnassigned: nobody who is in touch with the API server answers for an address that no Service has.
	// One that ends does so for the time of a hand-over.
	maxUnassigned = 3 * time.Second
	// maxIdleForwarder: with policy Local nobody announces a VIP whose kube-proxy does not forward it yet, while somebody
	// else could.
	maxIdleForwarder = 100 * time.Millisecond
	// minOwned is how long an owner must have had a VIP to be known as the one before: several changes of a Service reach a
	// speaker as one.
	minOwned = time.Second
	// maxForwarding is how long kube-proxy takes at most. A VIP that is younger is announced where it does not forward yet.
	maxForwarding = 4 * time.Second
	// maxHeal is how long after a cut segment is whole again all hosts know the owners: the speakers meet (4 s), and have
	// announced what they have (1 s).
	maxHeal = 6 * time.Second
	// A host does not find a VIP at another node more often than maxMoves times in movesIn.
	// Those in the first moments after a disturbance do not count: nodes that do not hear each other announce it five times
	// each then.
	maxMoves, movesIn, burst = 8, 10 * time.Second, 2 * time.Second
	// maxFrames bounds what a node sends in a second, altogether and for each VIP: that is announced by two frames, at
	// most ten times a second by all rules together, and each other node that has yielded asks for it twice a second.
	maxFrames, maxFramesOfVIP, maxFramesToEach = 100, 30, 6
	// maxIdle is for how long before the end no speaker may have anything to announce, without a refresh.
	maxIdle = 5 * time.Second
)

// checks watches the world.
type checks struct {
	*World
	disturbed time.Duration
	touched   time.Duration // when a fault or an edit began or ended last
	decreed   time.Duration // when the configuration or a Node was written last
	attacked  bool          // a host has claimed VIPs
	hostile   int           // how many faults have a host claim VIPs
	repeated  int           // how many of these repeat claims of speakers
	deaf      bool          // speakers may not have heard a question, or somebody claims VIPs: from now on
	whole     time.Duration // when the segment was whole again after speakers had lost each other; never: it was not
	vips      map[netip.Addr]*watched
	all       []netip.Addr // the same, in order
	ordered   []netip.Addr // those that Services have
	book      book
	restarted int // the controller's writes before its last restart
	second    time.Duration
	frames    map[int]int // in this second, by node
	announced time.Duration
	started   time.Duration // when a speaker started or ended last

	connections connections
}

// watched is what was seen of a VIP. Nodes are bits.
type watched struct {
	answering, announcing uint64
	// from are those that announced it before, or still do. since is when those that announce it began.
	from  uint64
	since time.Duration
	// early are those that announce it since no other one forwarded it, and do not forward it yet.
	early uint64
	// contested is set if two announced it when the segment was whole again.
	contested bool
	// none is since when nobody answers, both since when two nodes announce, able since when somebody could serve, and
	// unassigned since when no Service has the VIP. Negative: it is not so.
	none, both, able, unassigned time.Duration
	// heir is since when somebody could who does not answer.
	heir time.Duration
	// idle is since when who announces it does not forward it.
	idle time.Duration
	// lost is for how long nobody has answered since lostSince, taken together.
	lost, lostSince time.Duration
	// taken is when a machine that is no speaker had it last.
	taken time.Duration
	// planned is set if somebody answered when none began, long after the last disturbance.
	planned bool
}

const never = time.Duration(-1)

func newChecks(w *World) *checks {
	return &checks{World: w, connections: connections{World: w}, vips: map[netip.Addr]*watched{}, book: newBook(w),
		frames: map[int]int{}, whole: never}
}

// disturb begins all times anew.
func (c *checks) disturb() { c.disturbed = c.now }

// inOrder returns the VIPs that Services have.
func (c *checks) inOrder() []netip.Addr { return c.ordered }

// known reports whether a Service has the VIP.
func (c *checks) known(vip netip.Addr) bool { return slices.Contains(c.ordered, vip) }

func (c *checks) vip(vip netip.Addr) *watched {
	v := c.vips[vip]
	if v == nil {
		v = &watched{none: c.now, both: never, able: never, heir: never, idle: never, unassigned: c.now}
		c.vips[vip] = v
		at, _ := slices.BinarySearchFunc(c.all, vip, netip.Addr.Compare)
		c.all = slices.Insert(c.all, at, vip)
	}
	return v
}

// answersChanged is called when a node begins or ceases to answer for VIPs.
func (c *checks) answersChanged(n *node) {
	mask := uint64(1) << n.id
	for vip := range n.vips {
		c.vip(vip)
	}
	for _, vip := range c.all {
		v, before := c.vips[vip], c.vips[vip].answering
		announced := v.announcing
		v.answering, v.announcing = v.answering&^mask, v.announcing&^mask
		announces, answers := n.answers[vip]
		if answers {
			v.answering |= mask
		}
		if announces {
			v.announcing |= mask
		}
		if announced != v.announcing {
			if announced != 0 && c.now-v.since > minOwned {
				v.from = announced
			}
			v.since = c.now
		}
		if answers && before != v.answering {
			c.checkLiar(n, vip, before)
		}
		switch {
		case before != v.answering && answers:
			c.record("%s: answers for %s", n.name, vip)
		case before != v.answering:
			c.record("%s: answers no more for %s", n.name, vip)
		}
		c.note(vip, v)
	}
}

// note notes since when the VIP has nobody or two.
func (c *checks) note(vip netip.Addr, v *watched) {
	switch {
	case v.answering != 0:
		if v.none != never {
			c.checkGap(vip, v)
			if v.able != never {
				v.lost += c.now - max(v.none, v.able, c.disturbed)
			}
		}
		v.none = never
	case v.none == never:
		v.none, v.planned = c.now, c.now-c.disturbed > calm && v.heir != never && c.now-v.heir > calm && c.hostile == 0 && c.acquainted()
	}
	if bits.OnesCount64(v.announcing) < 2 {
		v.both = never
	} else if v.both == never {
		v.both = c.now
	}
}

// checkGap: a planned move leaves a VIP unanswered at no moment.
func (c *checks) checkGap(vip netip.Addr, v *watched) {
	if v.planned = v.planned && c.disturbed < v.none && v.unassigned == never && c.couldServe(vip) != 0; v.planned && c.now-v.none > maxGap {
		c.fail("no gap in a planned move", "nobody answers for %s for %s, and nothing was at fault", vip, c.now-v.none)
	}
}

// tick checks all bounds.
func (c *checks) tick() {
	for _, vip := range c.all {
		v := c.vips[vip]
		if v.none != never || c.now%time.Second == 0 {
			c.lookWhoIsAbleFor(vip, v)
		}
		if v.none != never {
			c.checkGap(vip, v)
		}
		c.checkBounds(vip, v)
		c.checkForwarder(vip, v)
	}
	c.checkHeal()
	c.checkDetection()
	if c.routing != nil {
		c.routing.checks.tick()
	}
	c.after(checkInterval, c.tick)
}

// someAway reports whether some node does not hear from the API server, or late.
func (c *checks) someAway() bool {
	return slices.ContainsFunc(c.nodes, func(n *node) bool { return !c.api.upToDate(n.name) })
}

// unwitnessed reports whether one speaker alone takes another one for alive that does not run: the failure detector demands two.
func (c *checks) unwitnessed() bool {
	return c.Detector && slices.ContainsFunc(c.nodes, func(o *node) bool {
		witnesses := 0
		for _, n := range c.nodes {
			if n.participates() && n.view[o.id].alive {
				witnesses++
			}
		}
		return !o.participates() && witnesses == 1
	})
}

// lookWhoIsAble notes which VIPs somebody could serve, as of now.
func (c *checks) lookWhoIsAble() {
	for vip, v := range c.vips {
		c.lookWhoIsAbleFor(vip, v)
	}
}

func (c *checks) lookWhoIsAbleFor(vip netip.Addr, v *watched) {
	since := func(is bool, before time.Duration) time.Duration {
		switch {
		case !is:
			return never
		case before == never:
			return c.now
		}
		return before
	}
	able := c.couldServe(vip)
	v.able, v.heir = since(able != 0, v.able), since(able&^v.answering != 0, v.heir)
}

// acquainted reports whether no speaker that runs takes another one for lost. If one does, it leaves no VIP to it.
func (c *checks) acquainted() bool {
	return !slices.ContainsFunc(c.nodes, func(n *node) bool {
		return n.participates() && slices.ContainsFunc(c.nodes, func(o *node) bool {
			return o != n && o.participates() && !n.view[o.id].alive
		})
	})
}

func (c *checks) checkBounds(vip netip.Addr, v *watched) {
	bound, l := maxUnanswered, c.lanOf(vip)
	switch {
	case l.hosts[hosts-1].spiteful[vip] > 0:
		return
	case v.taken != 0 && c.now-v.taken < maxTaken:
		bound = maxTaken
	case c.someAway():
		bound = maxUnheard
	case c.unwitnessed():
		bound += gossipMax
	}
	for _, n := range c.nodes {
		if l.unplugged[n.id] > 0 && v.answering == 1<<n.id {
			return // who answers is heard by nobody: this is a disturbance, which will end
		}
	}
	if v.able == never || v.able > v.lostSince || c.disturbed > v.lostSince {
		v.lost, v.lostSince = 0, max(v.able, c.disturbed)
	}
	if v.none != never && v.able != never && v.unassigned == never && v.lost+c.now-max(v.none, v.able, c.disturbed) > bound {
		c.fail("somebody answers", "nobody answers for %s since %.3fs, and %b could", vip, v.none.Seconds(), c.couldServe(vip))
	}
	if bound := c.boundOfBoth(l, v.announcing); v.both != never && bound > 0 && c.now-max(v.both, c.disturbed) > bound {
		c.fail("one announces", "%b announce %s since %.3fs", v.announcing, vip, v.both.Seconds())
	}
	for _, n := range c.nodes {
		bound := maxUnassigned
		if n.stopping {
			bound += handOver
		}
		if _, answers := n.answers[vip]; v.unassigned != never && answers && c.api.upToDate(n.name) &&
			c.now-max(v.unassigned, c.disturbed) > bound {
			c.fail("what is announced is assigned", "%s answers for %s, which no Service has since %.3fs", n.name, vip, v.unassigned.Seconds())
		}
	}
}

// checkForwarder: a node takes no VIP that its kube-proxy does not forward, if it takes it from one that does.
func (c *checks) checkForwarder(vip netip.Addr, v *watched) {
	holders := c.book.holders[vip]
	if len(holders) != 1 || v.able == never || c.now-v.able < maxForwarding ||
		!c.serviceIn(c.api.objects, holders[0]).Local {
		v.idle = never
		return
	}
	forwards := func(n *node) bool {
		since, here := n.forwards[holders[0]]
		return here && since <= c.now && n.sick == 0 // nobody waits where kube-proxy is not healthy: it may not forward
	}
	able, fit, idle := c.couldServe(vip), uint64(0), v.announcing // fit could go on, idle do not forward it
	v.from &= able | v.announcing                                 // one that has lost its pods and has others again is not the owner before
	for _, n := range c.nodes {
		if mask := uint64(1) << n.id; forwards(n) {
			idle &^= mask
			fit |= able & v.from & mask
		}
	}
	if fit == 0 {
		v.early |= idle
	}
	v.early &= idle
	switch {
	case idle == v.early || fit&^v.announcing == 0 || c.now-c.disturbed < calm || c.someAway():
		v.idle = never
	case v.idle == never:
		v.idle = c.now
	case c.now-v.idle > maxIdleForwarder:
		c.fail("who announces forwards", "%b announces %s, and kube-proxy there does not forward it yet, as it does on %b", v.announcing,
			vip, v.from)
	}
}

// checkHeal: when a segment that was cut is whole again, hosts know the owners soon.
func (c *checks) checkHeal() {
	if c.whole == never || c.now-max(c.whole, c.disturbed) < maxHeal {
		return
	}
	c.whole = never
	if !c.sound() || c.attacked {
		return
	}
	for _, vip := range c.ordered {
		if c.vip(vip).contested {
			c.checkHosts("after a cut hosts know the owner", vip)
		}
	}
}

// checkHosts checks that hosts find a VIP, of those that they use, where it is answered for.
func (c *checks) checkHosts(invariant string, vip netip.Addr) {
	for _, h := range c.lanOf(vip).hosts {
		if e := h.entries[vip]; e != nil && !h.troubles() && c.vip(vip).answering != 0 && !c.answersAt(e.mac, vip) {
			c.fail(invariant, "host %d looks for %s at %s, and %b answer", h.id, vip, c.who(e.mac), c.vip(vip).answering)
		}
	}
}

func (c *checks) answersAt(mac wire.MAC, vip netip.Addr) bool {
	i := int(mac[5]) - 1
	return i < len(c.nodes) && c.vip(vip).answering&(1<<i) != 0
}

// healed is called when a segment that was cut is whole again. Speakers promise something if all missed others, for
// VIPs that nodes on both sides announce.
func (c *checks) healed() {
	missing := func(n *node) bool { return n.participates() && !n.whole && n.lost() }
	if !c.Separate && c.sound() && !c.attacked && !slices.ContainsFunc(c.nodes, func(n *node) bool { return !missing(n) }) {
		c.whole = c.now
		for _, v := range c.vips {
			v.contested = bits.OnesCount64(v.announcing) > 1
		}
	}
}

// moved is called when a host finds a VIP somewhere else.
func (c *checks) moved(h *host, vip netip.Addr, at []time.Duration) {
	calm := max(c.touched, c.disturbed) + burst
	if n := len(at) - maxMoves; n > 0 && at[n-1] > max(calm, c.now-movesIn) && c.hostile == 0 && h.lan.noise == 0 {
		c.fail("hosts are not torn", "host %d has found %s at another node %d times in %s", h.id, vip, maxMoves+1, c.now-at[n-1])
	}
}

// noted is called when a node notes something. A conflict is reported only where a host makes one, or where questions
// do not arrive: then their answers may be missed.
func (c *checks) noted(n *node, note segment.Note) {
	if note.Kind == segment.Conflict && int(note.Other[5])-1 < len(c.nodes) && !c.deaf {
		c.fail("no conflict is made up", "%s reports that %s has %s", n.name, c.who(note.Other), note.VIP)
	}
}

// boundOfBoth returns for how long these nodes may all announce a VIP of the segment. Zero: they do not hear each other.
func (c *checks) boundOfBoth(l *lan, nodes uint64) time.Duration {
	bound := maxBoth
	if c.repeated > 0 {
		bound = maxBothClaimed
	}
	for _, n := range c.nodes {
		if nodes&(1<<n.id) == 0 {
			continue
		}
		if n.paused || l.noise > 0 {
			return 0
		}
		if n.whole {
			bound = max(bound, maxBothWhole)
		}
		for _, o := range c.nodes {
			if n != o && nodes&(1<<o.id) != 0 && !l.open(n.id, o.id) {
				return 0
			}
		}
	}
	return bound
}

// couldServe returns the nodes that could serve a VIP, as all is and not as somebody sees it.
func (c *checks) couldServe(vip netip.Addr) (nodes uint64) {
	l := c.lanOf(vip)
	for _, n := range c.nodes {
		at := c.api.objects["node/"+n.name].(plan.Node) //nolint:errcheck // nothing else is there
		if n.participates() && !n.stopping && n.published.ready && l.unplugged[n.id] == 0 && !n.down[l.number] &&
			!at.Labelled && !at.NetworkUnavailable {
			nodes |= 1 << n.id
		}
	}
	knows := uint64(0) // that some Service has it
	for _, name := range c.book.holders[vip] {
		now := c.serviceIn(c.api.objects, name)
		for _, n := range c.nodes {
			switch mask := uint64(1) << n.id; {
			case nodes&mask == 0:
			case !now.Serving || now.Local && !now.EndpointsAt(vip).ServesOn(n.name):
				nodes &^= mask
			case slices.Contains(c.serviceIn(n.watch.seen, name).VIPs, vip):
				knows |= mask
			}
		}
	}
	return nodes & knows
}

// sent is called for each frame that a speaker sends.
func (c *checks) sent(n *node, on *lan, frame []byte) {
	if m, _ := parse(frame); m.Claims.IsValid() && c.lanOf(m.Claims) != on {
		c.fail("VIPs stay on their segment", "%s claims %s on %s", n.name, m.Claims, on.nic())
	}
	if second := c.now.Truncate(time.Second); second != c.second {
		c.second, c.frames = second, map[int]int{}
	}
	if frame[0]&1 != 0 {
		c.announced = c.now
	}
	if c.frames[n.id]++; c.frames[n.id] > maxFrames+(maxFramesOfVIP+maxFramesToEach*c.Nodes)*len(n.vips) {
		c.fail("frames are bounded", "%s has sent %d frames in a second, for %d VIPs", n.name, c.frames[n.id], len(n.vips))
	}
}

// written is called when a Service was written.
func (c *checks) written(name string, before, after *corev1.Service, by writer) {
	if by == user {
		c.record("user: writes %s, which has %s", name, kube.JoinAddrs(shown(after)))
	} else {
		c.record("controller: gives %s %s: %s", name, kube.JoinAddrs(shown(after)), condition(after))
	}
	if fault := c.book.enter(name, before, after, by, c.now); fault != "" {
		c.fail("addresses are kept apart", "%s: %s", name, fault)
	}
	c.ordered = slices.SortedFunc(maps.Keys(c.book.holders), netip.Addr.Compare)
	for vip := range c.vips {
		if v := c.vips[vip]; !c.known(vip) && v.unassigned == never {
			v.unassigned, v.from = c.now, 0
		}
	}
	for _, vip := range c.ordered {
		if v := c.vip(vip); v.unassigned != never {
			v.unassigned, v.planned = never, false
			if v.none != never {
				v.none = c.now
			}
		}
	}
}

// controllerWrites: a controller writes while it has the lease, and not when another one may lead.
func (c *checks) controllerWrites(process string) {
	if holder := c.api.lease.holder; holder != process {
		c.fail("one controller writes", "%s has written, and the Lease is held by %q", process, holder)
	}
}

// atTheEnd: some time after the last fault all is as if there had been none.
func (c *checks) atTheEnd() {
	snapshot := c.truth()
	owners := plan.Owners(snapshot)
	for _, vip := range c.ordered {
		v, owner := c.vip(vip), owners[vip]
		if v.answering == 0 && c.couldServe(vip) == 0 { // its pods are on nodes that are not on its segment
			continue
		}
		if n := bits.OnesCount64(v.answering); n != 1 || v.answering != v.announcing {
			c.fail("in the end one answers", "%b answer for %s, %b announce it, and %s should", v.answering, vip, v.announcing, owner)
			return
		}
		n := c.nodes[bits.TrailingZeros64(v.answering)]
		if n.name != owner && !c.Keep {
			c.fail("in the end the owner answers", "%s answers for %s, and %s should", n.name, vip, owner)
		}
		for _, h := range c.lanOf(vip).hosts {
			if e := h.entries[vip]; !h.troubles() && (e == nil || e.mac != h.lan.hardware(n.id)) {
				c.fail("in the end hosts know the owner", "host %d does not know that %s has %s", h.id, n.name, vip)
			}
		}
	}
	for _, n := range c.nodes {
		if !n.ready || !n.whole || n.apart || n.withheld() > 0 {
			c.fail("in the end all is as if nothing had been", "%s: ready %t, whole %t, apart %t, withheld %v", n.name, n.ready, n.whole, n.apart,
				n.withheld())
		}
	}
	if !c.Refresh && c.now-c.announced < maxIdle {
		c.fail("in the end nobody has anything to announce", "a speaker has announced or asked at %.3fs", c.announced.Seconds())
	}
	if leaders := c.control.leaders(); len(leaders) != 1 {
		c.fail("in the end one controller leads", "%v", leaders)
	}
	if c.control.writes != c.restarted {
		c.fail("a restart changes nothing", "the controller has written %d times since it was replaced", c.control.writes-c.restarted)
	}
	c.tables()
	if c.routing != nil {
		c.routing.checks.atTheEnd()
	}
	if fault := c.book.apart(c.api); fault != "" {
		c.fail("in the end addresses are apart", "%s", fault)
	}
}

// truth is what a speaker should know in the end.
func (c *checks) truth() plan.Snapshot {
	s := plan.Snapshot{Nodes: map[string]plan.Node{}, Speakers: map[string]bool{}}
	s.Config, _ = c.api.objects["config"].(*config.Config)
	for _, n := range c.nodes {
		at := c.api.objects["node/"+n.name].(plan.Node) //nolint:errcheck // nothing else is there
		at.Network = report.Network{Segments: n.segments(), Forwards: c.Direct}
		s.Nodes[n.name], s.Speakers[n.name] = at, true
	}
	for _, name := range named(c.api.objects, "service") {
		s.Services = append(s.Services, *c.serviceIn(c.api.objects, name))
	}
	return s
}

// shown returns the addresses that a Service has: those that its status and its annotation both name, so that neither
// its owner nor another load balancer gives it one alone. The Service may be nil, or be about to be deleted.
func shown(svc *corev1.Service) []netip.Addr {
	if svc == nil {
		return nil
	}
	assigned := kube.Assigned(svc)
	return slices.DeleteFunc(kube.StatusAddresses(svc), func(a netip.Addr) bool { return !slices.Contains(assigned, a) })
}

// condition returns the reason and message of the Service's condition.
func condition(svc *corev1.Service) string {
	if svc == nil || kube.Allocated(svc) == nil {
		return "gone"
	}
	c := kube.Allocated(svc)
	return c.Reason + ": " + c.Message
}

// shares returns with whom the Service would share an address.
func shares(svc *corev1.Service) string { return svc.Annotations[annotation.SharingKey] }
