package world

import (
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/lodestone-lb/lodestone/pkg/annotation"
	"github.com/lodestone-lb/lodestone/speaker/layer2/wire"
)

// inflict begins a fault, and ends it after its duration.
func (w *World) inflict(f Fault) {
	w.record("-- %s", f)
	if f.Kind >= Reboot && f.Kind < Unserved {
		w.routing.inflict(f)
		return
	}
	if !f.Kind.planned() {
		w.checks.disturb()
	}
	attacks := slices.Contains([]Kind{Foreign, Replay, Forger}, f.Kind)
	w.checks.touched, w.checks.attacked = w.now, w.checks.attacked || attacks
	w.checks.deaf = w.checks.deaf || attacks || slices.Contains([]Kind{Pause, Kill, Cable, Deaf, Mute, Noise, Power}, f.Kind)
	end := w.faultOf(f)
	if end == nil {
		return
	}
	w.after(f.For, func() {
		w.record("-- over: %s", f)
		w.checks.touched = w.now
		if !f.Kind.planned() {
			w.checks.disturb()
		}
		end()
	})
}

// faultOf begins a fault, and returns the function that ends it. Nil: it has no end.
func (w *World) faultOf(f Fault) (end func()) {
	n := w.nodes[f.Node%len(w.nodes)]
	switch f.Kind {
	case Kill, Pause, Stop:
		return w.speakerFault(f.Kind, n)
	case Cable, Backbone, Switch, Split, Deaf, Mute, Noise:
		return w.networkFault(f, n)
	case Flap:
		for _, o := range w.nodes {
			if o != n && o.participates() && o.view[n.id].alive {
				o.see(n, false)
			}
		}
		return w.reach
	case Away:
		return w.away(n)
	case AllAway:
		clients := []string{}
		for _, r := range w.control.replicas {
			clients = append(clients, r.name)
		}
		for _, n := range w.nodes {
			clients = append(clients, n.name)
		}
		return w.api.leave(clients...)
	case Slow:
		return w.count(&n.busy, func() {})
	case Sick:
		return w.count(&n.sick, n.healthChanged)
	case Foreign, Replay, Forger:
		return w.hostileFault(f, n)
	case Leader, Crash, Suspend, Cutoff, SetClock:
		return w.controllerFault(f)
	case Ill, Stale, Server:
		return w.serverFault(f)
	case Clock:
		by := time.Duration(f.Other%7200-3600) * time.Second
		n.set += by
		return func() { n.set -= by }
	case Power, Terminate, Flush, Owner:
		return w.dataFault(f, n)
	case Unserved, Range:
		return w.dhcp.inflict(f)
	}
	return w.edit(f, n)
}

// clients returns the clients that are connected to one of two API servers, by the bits.
func (w *World) clients(bits int) (some []string) {
	for i, r := range w.control.replicas {
		if bits>>i&1 > 0 {
			some = append(some, r.name)
		}
	}
	for i, n := range w.nodes {
		if bits>>(2+i%14)&1 > 0 {
			some = append(some, n.name)
		}
	}
	return some
}

// serverFault begins a fault of the API server, or of one of several.
func (w *World) serverFault(f Fault) (end func()) {
	switch f.Kind {
	case Stale:
		by, some := w.upTo(maxLag), w.clients(f.Other)
		change := func(by time.Duration, behind int) {
			for _, c := range some {
				w.api.lag[c] += by
				w.api.behind[c] += behind
			}
			w.checks.disturb()
		}
		change(by, 1)
		w.checks.hostile++
		return func() {
			longest := by // together with others
			for _, c := range some {
				longest = max(longest, w.api.lag[c])
			}
			change(-by, 0)
			w.after(longest+time.Second, func() { change(0, -1); w.checks.hostile-- }) // what is late still comes
		}
	case Server:
		return w.api.leave(w.clients(f.Other)...)
	}
	return w.count(&w.api.illness[min(f.Other%6, illSlow)], func() {})
}

// maxLag is how far an API server lags behind at most.
const maxLag = 8 * time.Second

func (w *World) controllerFault(f Fault) (end func()) {
	r := w.control.leader(f.Other)
	if !r.running || r.paused {
		return nil
	}
	switch f.Kind {
	case Leader:
		r.stop(func() { r.World.after(f.For, r.begin) })
		return nil
	case Crash:
		r.kill()
		return r.begin
	case Suspend:
		return r.pause()
	case Cutoff:
		return w.api.leave(r.name)
	}
	by := time.Duration(f.Other%7200-3600) * time.Second
	r.set += by
	w.checks.book.clocksOff = true
	return func() { r.set -= by }
}

func (w *World) speakerFault(k Kind, n *node) (end func()) {
	if !n.running || n.paused || n.stopping {
		return nil
	}
	switch k {
	case Kill:
		n.end()
		return n.begin
	case Stop:
		n.stop(func() { w.after(w.upTo(3*time.Second), n.begin) })
		return nil
	}
	n.paused = true
	n.lookAtAnswers()
	life := n.life
	w.reach()
	return func() {
		if n.life == life {
			n.goOn()
		}
	}
}

// networkFault begins a fault of a network. A node that is cut off on the API server's segment does not reach the API server.
func (w *World) networkFault(f Fault, n *node) (end func()) {
	l := w.lans[f.Other%w.Segments]
	if !w.isOn(n.id, l.number) {
		l = w.lans[1-l.number]
	}
	mend := l.fault(f.Kind, n)
	var cut []*node
	switch {
	case l.number+1 != w.API:
	case f.Kind == Split:
		cut = slices.DeleteFunc(slices.Clone(w.nodes[n.id+1:]), func(o *node) bool { return !w.isOn(o.id, l.number) })
	case slices.Contains([]Kind{Cable, Deaf, Mute}, f.Kind):
		cut = []*node{n}
	}
	back := w.away(cut...)
	return func() { mend(); back() }
}

func (l *lan) fault(k Kind, n *node) (end func()) {
	mend, w := func() {}, l.World
	w.checks.whole = never
	switch k {
	case Cable:
		return w.count(&l.unplugged[n.id], n.linkChanged)
	case Backbone:
		return w.count(&w.lan.backbone[n.id], n.linkChanged)
	case Switch:
		for _, o := range w.nodes {
			w.count(&w.lan.backbone[o.id], o.linkChanged)
		}
		return func() {
			for _, o := range w.nodes {
				w.lan.backbone[o.id]--
				o.linkChanged()
			}
		}
	case Split:
		side := func(i int) bool { return i <= n.id || i == w.Nodes }
		heal := l.cutOff(func(from, to int) bool { return side(from) != side(to) })
		mend = func() { heal(); w.checks.healed() }
	case Deaf:
		mend = l.cutOff(func(_, to int) bool { return to == n.id })
	case Mute:
		mend = l.cutOff(func(from, _ int) bool { return from == n.id })
	case Noise:
		l.noise++
		mend = func() { l.noise-- }
	}
	w.reach()
	return func() { mend(); w.reach() }
}

// away keeps the API server from answering some nodes.
func (w *World) away(nodes ...*node) (back func()) {
	names := []string{}
	for _, n := range nodes {
		names = append(names, n.name)
	}
	again, over := w.api.leave(names...), false
	for _, n := range nodes {
		w.blind(n, &over)
	}
	return func() {
		again()
		over = true
		for _, n := range nodes {
			w.seeing(n)
		}
	}
}

// blind makes a node notice that it alone does not reach the API server, unless that is over; see package apihealth.
func (w *World) blind(n *node, over *bool) {
	reaches := func(o *node) bool { return o.running && w.api.away[o.name] == 0 }
	life := n.life
	w.after(30*time.Second, func() {
		if n.life == life && n.running && !*over && slices.ContainsFunc(w.nodes, reaches) {
			n.metadata.blind = true
			n.publish()
			n.membersChanged()
		}
	})
}

func (w *World) seeing(n *node) {
	if n.running && n.metadata.blind && w.api.away[n.name] == 0 {
		n.metadata.blind = false
		n.publish()
		n.membersChanged()
	}
}

func (w *World) hostileFault(f Fault, n *node) (end func()) {
	w.checks.hostile++
	if f.Kind != Foreign {
		w.checks.repeated++
	}
	if f.Kind == Replay {
		l := w.lans[f.Other%w.Segments]
		frames, over := l.claims(), false
		var again func()
		again = func() {
			if over {
				return
			}
			for _, frame := range frames {
				l.send(l.hosts[hosts-1].id, frame)
			}
			w.after(time.Second, again)
		}
		again()
		return func() { over = true; w.checks.hostile--; w.checks.repeated-- }
	}
	if f.Kind == Forger {
		end := w.forge(n)
		return func() { end(); w.checks.hostile--; w.checks.repeated-- }
	}
	vips := w.checks.inOrder()
	if len(vips) == 0 {
		return func() { w.checks.hostile-- }
	}
	vip := vips[f.Other%len(vips)]
	h := w.lanOf(vip).hosts[hosts-1]
	delay := time.Duration(0)
	if f.Other&1 > 0 { // it asks first, and takes the address all the same
		h.lan.send(h.id, wire.Of(vip).Probe(wire.Statement{Self: h.lan.hardware(h.id), VIP: vip}, wire.MAC{}))
		delay = min(2*time.Second, f.For/2)
	}
	w.after(delay, func() { h.takes(vip) })
	w.checks.vip(vip).taken = w.now
	return func() { h.spiteful[vip]--; w.checks.hostile--; w.checks.vip(vip).taken = w.now }
}

// edit makes an edit that people make: of the configuration, a Node or a Service.
func (w *World) edit(f Fault, n *node) (end func()) {
	name := serviceName(f.Other % w.Services)
	switch f.Kind {
	case Exclude:
		return w.count(&n.labelled, n.writeNode)
	case Plugin:
		return w.count(&n.unavailable, n.writeNode)
	case Prefer:
		w.api.put("config", w.api.document(n.id, 0))
		return func() { w.api.put("config", w.api.document(-1, 0)) }
	case Pools:
		w.api.put("config", w.api.document(-1, 1+f.Other))
		return func() { w.api.put("config", w.api.document(-1, 0)) }
	case Pods:
		w.api.put("pods/"+name, w.api.somePods())
	case Local:
		w.api.edit(name, func(svc *corev1.Service) {
			if svc.Spec.ExternalTrafficPolicy != corev1.ServiceExternalTrafficPolicyLocal {
				svc.Spec.ExternalTrafficPolicy = corev1.ServiceExternalTrafficPolicyLocal
			} else {
				svc.Spec.ExternalTrafficPolicy = corev1.ServiceExternalTrafficPolicyCluster
			}
		})
	case Tenant:
		w.tenant(f, name)
	case Liar:
		return w.lie(f, n)
	case Rekey:
		w.rekey()
	case Create:
		w.api.create(serviceName(w.Services + f.Other%4))
	case Delete:
		w.api.remove(name)
		return func() { w.api.create(name) }
	case Ask:
		wish := wishes[f.Other/64%len(wishes)]
		w.api.ask(name, wish[0], wish[1])
	}
	return nil
}

// count counts one fault more, and returns the function that counts it off. Both call changed.
func (w *World) count(faults *int, changed func()) (end func()) {
	by := func(n int) { *faults += n; changed() }
	by(1)
	return func() { by(-1) }
}

// wishes are annotations of Services.
var wishes = [][2]string{
	{annotation.Addresses, "203.0.113.103"}, {annotation.Addresses, "203.0.113.112"}, {annotation.Addresses, "poison"},
	{annotation.Addresses, ""}, {annotation.SharingKey, "k"}, {annotation.SharingKey, ""}, {annotation.AddressPool, "lan"},
	{annotation.AddressPool, "legacy"}, {annotation.Renumber, annotation.Renumbering}, {annotation.Assigned, "203.0.113.101"},
}
