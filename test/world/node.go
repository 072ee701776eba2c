package world

import (
	"cmp"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"time"
	"unsafe"

	corev1 "k8s.io/api/core/v1"

	"github.com/lodestone-lb/lodestone/pkg/config"
	"github.com/lodestone-lb/lodestone/pkg/kube"
	"github.com/lodestone-lb/lodestone/speaker/core"
	"github.com/lodestone-lb/lodestone/speaker/layer2/segment"
	"github.com/lodestone-lb/lodestone/speaker/plan"
	"github.com/lodestone-lb/lodestone/speaker/snapshot"
)

// handOver is the speaker's default, and so is drain.
const handOver, drain = 6 * time.Second, 2 * time.Second

// scope is which Services are Lodestone's.
var scope = kube.Scope{Classless: true}

// node is a node and its speaker. The real machines decide; what package speaker does around them (gather facts,
// apply effects) is done here in the time of the world.
type node struct {
	*World
	systemClock
	id   int
	name string

	// The speaker. life counts its starts.
	life                      int
	running, paused, stopping bool
	core                      *core.Core
	families                  []*family
	watch                     *watch
	queued                    []func() // frames that wait while the speaker is paused

	decides bool // a decision is due
	// How many faults keep the processor busy, and kube-proxy from being healthy; and how many have labelled the Node,
	// and set its condition NetworkUnavailable.
	busy, sick, labelled, unavailable int
	lies                              bool
	// forwards is when kube-proxy forwards to the pods of a Service on this node, by Service.
	forwards map[string]time.Duration

	services map[string]bool // that have changed since the last decision
	dirty    map[string]bool // what else has: config, node, members
	vips     map[netip.Addr]segment.VIP
	unprobed map[netip.Addr]bool // see layer2.Announcer
	answers  map[netip.Addr]bool // for what the node answers: true if it announces the VIP, false while that leaves

	plane     plane
	director  director
	detector  *detector  // nil: who is alive is modelled
	announcer *announcer // nil: no routers were sent anything yet
	reports   bool       // the Lease is about to show whether the rules are there

	keyring
	membership
}

func newNode(w *World, id int) *node {
	n := &node{World: w, id: id, name: nodeName(id),
		systemClock: systemClock{world: w, ahead: w.upTo(24 * time.Hour), drift: w.random.Int64N(401) - 200},
		forwards:    map[string]time.Duration{}, keyring: keyring{secretKey: keyOf(0)},
		membership: membership{view: make([]peer, w.Nodes)}}
	n.plane = newPlane(n)
	return n
}

// begin starts a speaker with empty caches.
func (n *node) begin() {
	if n.running || n.plane.off > 0 {
		return
	}
	n.life++
	n.running, n.paused, n.stopping, n.decides = true, false, false, false
	n.core = core.New(core.Options{Node: n.name, HandOver: handOver, Drain: drain})
	n.families = nil
	for _, l := range n.lans {
		for _, p := range n.protocols() {
			if n.isOn(n.id, l.number) {
				n.families = append(n.families, newFamily(n, l, p))
			}
		}
	}
	n.services, n.dirty, n.vips, n.unprobed, n.answers = map[string]bool{}, map[string]bool{"members": true}, map[netip.Addr]segment.VIP{},
		map[netip.Addr]bool{}, map[netip.Addr]bool{}
	n.watch = n.api.follow(n.name, n.heardOf)
	n.record("%s: speaker starts", n.name)
	n.startKeys()
	n.reportRules()
	n.checks.started = n.now
	n.detect()
	n.enter()
}

// end ends the speaker at once: it is killed, or has ended in order.
func (n *node) end() {
	n.life++
	n.running, n.paused, n.stopping = false, false, false
	n.watch.end()
	n.record("%s: speaker is gone", n.name)
	n.checks.started, n.plane.ended = n.now, n.now
	n.membership = membership{view: make([]peer, n.Nodes)}
	n.vips, n.families = nil, nil
	n.lookAtAnswers()
	n.closeConnections()
	n.reach()
}

// stop ends the speaker in order, and then calls done.
func (n *node) stop(done func()) {
	n.stopping = true
	life := n.life
	var step func(core.Effects)
	step = func(e core.Effects) {
		n.apply(e)
		if e.Done {
			n.end()
			done()
			return
		}
		n.after(max(n.until(e.Next), time.Millisecond), func() {
			if n.life == life && !n.paused {
				step(n.core.Step(core.StillLeaving(len(n.leaving())), n.clock()))
			} else if n.life == life {
				n.after(10*time.Millisecond, func() { step(core.Effects{}) })
			}
		})
	}
	n.record("%s: speaker is stopped", n.name)
	step(n.core.Step(core.Stop{}, n.clock()))
}

// heardOf is called when the node has seen an object change.
func (n *node) heardOf(key string) {
	kind, name, _ := strings.Cut(key, "/")
	switch kind {
	case "service", "pods", "terminating":
		n.services[name] = true
	case "lease":
		n.dirty["members"] = true
		n.lookAround()
	default:
		n.dirty[kind] = true
	}
	n.wake()
}

// wake schedules a decision of the speaker.
func (n *node) wake() {
	if !n.running || n.decides || n.stopping {
		return
	}
	n.decides = true
	life, delay := n.life, n.between(100*time.Microsecond, 2*time.Millisecond)
	if n.busy > 0 {
		delay += n.upTo(300 * time.Millisecond)
	}
	n.after(delay, func() {
		if n.life == life && !n.stopping {
			n.decides = false
			n.decide()
		}
	})
}

// decide gives the core the changed facts, and executes its effects, like the loop of package speaker.
func (n *node) decide() {
	if n.paused {
		n.decides = true // until it goes on
		return
	}
	now := n.clock()
	n.core.Step(core.Health{Synced: n.watch.synced, Joined: n.joined, Healthy: n.sick == 0, Sick: n.sick > 0,
		Forwards: !n.Direct || n.director.ready && n.director.life == n.life}, now)
	if c, ok := n.watch.seen["config"].(*config.Config); ok {
		n.core.Step(core.Config{Config: c}, now)
	}
	if n.watch.synced {
		for _, name := range slices.Sorted(maps.Keys(n.services)) {
			n.core.Step(core.Service{Service: *n.serviceIn(n.watch.seen, name)}, now)
		}
		n.services = map[string]bool{}
		if n.dirty["node"] {
			nodes := core.Nodes{}
			for _, name := range named(n.watch.seen, "node") {
				nodes[name] = n.watch.seen["node/"+name].(plan.Node) //nolint:errcheck // nothing else is there
			}
			n.core.Step(nodes, now)
		}
	}
	if n.dirty["members"] {
		n.core.Step(core.Members{Speakers: n.speakers(), Networks: n.networks()}, now)
	}
	n.dirty = map[string]bool{"node": n.dirty["node"] && !n.watch.synced}
	e := n.core.Step(core.Decide{}, now)
	n.apply(e)
	if !e.Next.IsZero() {
		life := n.life
		n.after(n.until(e.Next), func() {
			if n.life == life {
				n.wake()
			}
		})
	}
}

// version identifies the objects from which a Service is derived. Nobody modifies objects, so the addresses of two versions differ.
type version struct {
	svc        *corev1.Service
	pods, ends *string
	n          [2]int
}

// serviceIn returns a Service by these objects, as a client that has seen them knows it.
func (w *World) serviceIn(seen map[string]any, name string) *plan.Service {
	svc, ok := seen["service/"+name].(*corev1.Service)
	if !ok {
		return &plan.Service{Name: name}
	}
	pods, _ := seen["pods/"+name].([]string)
	ends, _ := seen["terminating/"+name].(terminating)
	v := version{svc, unsafe.SliceData(pods), unsafe.SliceData(ends), [2]int{len(pods), len(ends)}}
	if w.services[v] == nil {
		serving := slices.Concat(pods, ends)
		slices.Sort(serving)
		w.services[v] = new(snapshot.With(snapshot.Service(svc, scope), snapshot.Endpoints{Ready: pods, Serving: serving, NotReady: ends}))
	}
	return w.services[v]
}

// apply executes the core's effects.
func (n *node) apply(e core.Effects) {
	if e.Ready != n.ready || e.NewPlan && e.Claims != n.claims {
		if n.ready = e.Ready; e.NewPlan {
			n.claims = e.Claims
		}
		n.publish()
	}
	n.forward(e.Forwarding)
	if e.SetVIPs {
		n.assign(e.VIPs)
	}
	n.route(e)
	for _, vip := range e.Gone {
		delete(n.unprobed, vip)
	}
}

// assign sets the VIPs of the segments, as layer2.Announcer does.
func (n *node) assign(want map[netip.Addr]plan.Layer2) {
	vips := map[netip.Addr]segment.VIP{}
	for _, vip := range slices.SortedFunc(maps.Keys(want), netip.Addr.Compare) {
		l := want[vip]
		if before, had := n.vips[vip]; !had || before.Leaving && !l.Leaving || before.Arriving && !l.Arriving {
			n.unprobed[vip] = l.New
		}
		vips[vip] = segment.VIP{Probe: n.unprobed[vip], Home: l.Home, Apart: l.Apart, Hurry: l.Hurry, Leaving: l.Leaving, Arriving: l.Arriving,
			Refresh: l.Refresh}
	}
	if !maps.Equal(vips, n.vips) {
		n.recordVIPs(vips)
		for _, f := range n.families {
			f.assign(vips)
		}
		n.vips = vips
	}
}

// recordVIPs records which VIPs come, leave and go.
func (n *node) recordVIPs(vips map[netip.Addr]segment.VIP) {
	if n.story == nil {
		return
	}
	text := ""
	for _, vip := range slices.SortedFunc(maps.Keys(vips), netip.Addr.Compare) {
		if text += " " + vip.String(); vips[vip].Leaving {
			text += " (leaving)"
		}
	}
	n.record("%s: is to announce%s", n.name, cmp.Or(text, " nothing"))
}

// receive takes a frame from a segment.
func (n *node) receive(on *lan, frame []byte) {
	switch {
	case !n.running:
	case !n.paused:
		n.hear(on, frame)
	case len(n.queued) < 100:
		n.queued = append(n.queued, func() { n.hear(on, frame) })
	}
}

// goOn ends a pause. The speaker handles the events of that time.
func (n *node) goOn() {
	n.paused = false
	for _, hear := range n.queued {
		hear()
	}
	n.queued = nil
	n.lookAtAnswers()
	for _, f := range n.families {
		f.setAlarm()
	}
	if n.decides {
		n.decides = false
		n.wake()
	}
	for _, o := range n.nodes { // their gossip waits in the socket
		if o != n {
			o.contradict(n)
		}
	}
	n.reach()
}

// lookAtAnswers finds out for which VIPs the node answers now.
func (n *node) lookAtAnswers() {
	now := map[netip.Addr]bool{}
	for vip, v := range n.vips {
		if n.paused {
			break
		}
		if f := n.familyOf(vip); f != nil && !v.Leaving && f.machine.State(vip).Reason == "" {
			now[vip] = true
		}
	}
	if !n.paused {
		for _, vip := range n.leaving() {
			now[vip] = false
		}
	}
	if !maps.Equal(now, n.answers) {
		n.answers = now
		n.checks.answersChanged(n)
	}
}

// writeNode writes the node's object.
func (n *node) writeNode() {
	at := plan.Node{Labels: map[string]string{"name": n.name}, Labelled: n.labelled > 0, NetworkUnavailable: n.unavailable > 0}
	if n.Direct {
		at.Addresses = n.addresses()
	}
	n.routing.annotate(n, &at)
	n.api.put("node/"+n.name, at)
}

// podsChanged lets kube-proxy forward to the pods of a Service some time later: it updates its rules once a second, and
// later on a busy node. Until then it forwards to pods of other nodes if the policy is Cluster. If the policy becomes
// Local, the update with the policy also has the pods that came before it.
func (n *node) podsChanged(service string, here bool) {
	_, had := n.forwards[service]
	switch of := n.serviceIn(n.api.objects, service); {
	case !here:
		delete(n.forwards, service)
	case !had:
		n.forwards[service] = n.now + n.between(100*time.Millisecond, 3500*time.Millisecond)
		if of.Serving && !of.Local {
			n.forwards[service] = n.now
		}
	}
}

// healthChanged is called when kube-proxy becomes healthy or not.
func (n *node) healthChanged() {
	if n.routing != nil {
		n.routing.checks.learn() // it may last for a shorter time than that between two looks
	}
	n.publish()
	if n.running {
		n.membersChanged()
	}
}
