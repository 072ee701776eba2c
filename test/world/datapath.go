package world

import (
	"log/slog"
	"math/rand/v2"
	"slices"
	"strings"
	"time"

	"github.com/lodestone-lb/lodestone/speaker/direct"
)

// The kinds of faults of the path that packets take. They come beside the others, in fleets with direct forwarding.
const (
	Power     Kind = 100 + iota // the node has none
	Terminate                   // a pod of the Service terminates
	Flush                       // somebody flushes the node's rules
	Owner                       // the advertisement has no direct forwarding
)

var dataNames = map[Kind]string{Power: "power", Terminate: "terminate", Flush: "flush", Owner: "owner"}

// dataPath is the state of direct forwarding that all nodes share. It has a source of randomness of its own, so that a
// seed's fleet is otherwise the same as without direct forwarding.
type dataPath struct {
	*World
	random      *rand.Rand
	log         *slog.Logger
	tables      direct.Tables
	off         int               // how many edits have direct forwarding off
	switched    time.Duration     // when it was switched last
	ready       map[string][]*pod // the pods, by Service
	terminating map[string][]*pod
	changed     map[string]time.Duration // when the pods of a Service changed last
	edited      map[string]time.Duration // when its object did
	again       map[string]bool          // there was another Service of that name
	connections []*connection
	port        uint16
}

// dataThemes are themes of such faults, with others that have to do with them.
var dataThemes = [][]Kind{
	{Power, Terminate, Flush, Owner},
	{Kill, Create, Pods, Terminate, Exclude},
	{Kill, Owner, Terminate, Exclude, Power},
}

// drawData adds direct forwarding to the scenario of a seed, and faults that concern it.
func (s *Scenario) drawData() {
	r := rand.New(rand.NewPCG(s.Seed, 2))
	s.Dual = r.IntN(100) < 25
	s.Detector = s.Seed >= firstDetector && s.Nodes <= 8 && rand.New(rand.NewPCG(s.Seed, 4)).IntN(100) < 25
	if s.Direct = s.Nodes <= 8 && r.IntN(100) < 30; !s.Direct {
		return
	}
	s.add(r, dataThemes[r.IntN(len(dataThemes))])
}

func newDataPath(w *World) *dataPath {
	return &dataPath{World: w, random: rand.New(rand.NewPCG(w.Seed, 3)), log: slog.New(slog.DiscardHandler), tables: direct.Tables{},
		ready: map[string][]*pod{}, terminating: map[string][]*pod{}, again: map[string]bool{},
		changed: map[string]time.Duration{}, edited: map[string]time.Duration{}}
}

func (d *dataPath) upTo(most time.Duration) time.Duration {
	return time.Duration(d.random.Int64N(int64(most) + 1))
}

func (d *dataPath) between(a, b time.Duration) time.Duration { return a + d.upTo(b-a) }

// after delivers something to a station on the segment after a delay, unless it is lost.
func (d *dataPath) after(from *node, to int, arrive func()) { d.send(from.id, to, arrive) }

func (d *dataPath) send(from, to int, arrive func()) {
	if !d.lan.open(from, to) || d.lan.noise > 0 && d.random.IntN(100) < 10 {
		return
	}
	d.World.after(d.between(20*time.Microsecond, 300*time.Microsecond), func() {
		if d.lan.open(from, to) {
			arrive()
		}
	})
}

// pod is an endpoint of a Service.
type pod struct {
	node    int
	ready   bool
	gone    bool
	has     map[flow]bool // its connections
	service string
}

// answer returns what the pod answers to a segment, zero if nothing.
func (p *pod) answer(s *tcp, _ *node) byte {
	switch {
	case p.gone:
		return 0
	case s.Flags == syn:
		p.has[s.conn.flow] = true
		return data
	case !p.has[s.conn.flow]:
		return rst
	case s.Flags == fin:
		delete(p.has, s.conn.flow)
		return 0
	}
	return data
}

// podsChanged is called when the ready pods of a Service are on other nodes.
func (d *dataPath) podsChanged(service string, nodes []string) {
	var kept []*pod
	for i, n := range d.nodes {
		at := slices.IndexFunc(d.ready[service], func(p *pod) bool { return p.ready && p.node == i })
		switch wanted := slices.Contains(nodes, n.name); {
		case wanted && at >= 0:
			kept = append(kept, d.ready[service][at])
		case wanted:
			kept = append(kept, &pod{node: i, ready: true, has: map[flow]bool{}, service: service})
		case at >= 0:
			d.ready[service][at].gone = true
		}
	}
	d.ready[service] = kept
	d.syncAll()
}

// written is called when an object was written.
func (d *dataPath) written(key string, object any) {
	if !d.Direct {
		return
	}
	switch kind, name, _ := strings.Cut(key, "/"); kind {
	case "pods":
		nodes, _ := object.([]string)
		d.changed[name] = d.now
		d.podsChanged(name, nodes)
	case "service":
		d.again[name] = d.again[name] || object == nil
		d.edited[name] = d.now
		d.syncAll()
	}
}

// syncAll makes all kube-proxies read the changes.
func (d *dataPath) syncAll() {
	for _, n := range d.nodes {
		n.plane.sync()
	}
}

// podsOf returns all pods of a Service.
func (d *dataPath) podsOf(service string) []*pod {
	return slices.Concat(d.ready[service], d.terminating[service])
}

// dataFault begins a fault of the path of packets, and returns the function that ends it.
func (w *World) dataFault(f Fault, n *node) (end func()) {
	switch f.Kind {
	case Power:
		return w.power(n)
	case Flush:
		if n.plane.rules != nil {
			n.plane.rules.Forget()
			w.checks.connections.flushed = w.now
			if !n.running {
				n.plane.flushed = w.now
			}
		}
	case Owner:
		by := func(count int) {
			was := w.data.off
			if w.data.off += count; min(was, w.data.off) == 0 {
				w.data.switched = w.now
			}
			w.api.put("config", w.api.document(-1, 0))
		}
		by(1)
		return func() { by(-1) }
	case Terminate:
		return w.terminate(serviceName(f.Other%w.Services), f.Other/64)
	}
	return nil
}

// power takes a node's power away.
func (w *World) power(n *node) (back func()) {
	if n.plane.off++; n.plane.off == 1 {
		if n.running {
			n.end()
		}
		n.plane.crash()
		n.plane.crashed = w.now
		for _, name := range named(w.api.objects, "service") {
			for _, p := range w.data.podsOf(name) {
				if p.node == n.id {
					p.has = map[flow]bool{}
				}
			}
		}
		w.checks.connections.lose(n)
	}
	w.lan.unplugged[n.id]++
	w.reach()
	return func() {
		w.lan.unplugged[n.id]--
		if n.plane.off--; n.plane.off == 0 {
			n.plane.on = w.now
			n.plane.sync()
			w.after(w.data.between(100*time.Millisecond, 3*time.Second), n.begin)
		}
		w.reach()
	}
}

// terminate replaces a pod by another one, and returns the function that ends its termination.
func (w *World) terminate(service string, which int) (gone func()) {
	pods, _ := w.api.objects["pods/"+service].([]string)
	if len(pods) == 0 {
		return nil
	}
	name := pods[which%len(pods)]
	at := slices.IndexFunc(w.data.ready[service], func(p *pod) bool { return w.nodes[p.node].name == name })
	p := w.data.ready[service][at]
	p.ready = false
	w.data.terminating[service] = append(w.data.terminating[service], p)
	w.putTerminating(service)
	pods = slices.DeleteFunc(slices.Clone(pods), func(n string) bool { return n == name })
	if other := nodeName(w.data.random.IntN(w.Nodes)); len(pods) == 0 || !slices.Contains(pods, other) { // the one in its place
		pods = append(pods, other)
	}
	w.api.put("pods/"+service, pods)
	return func() {
		p.gone = true
		w.data.terminating[service] = slices.DeleteFunc(w.data.terminating[service], func(o *pod) bool { return o == p })
		w.putTerminating(service)
		w.data.syncAll()
	}
}

// terminating are the nodes of pods that terminate, once for each.
type terminating []string

func (w *World) putTerminating(service string) {
	var names terminating
	for _, p := range w.data.terminating[service] {
		names = append(names, w.nodes[p.node].name)
	}
	slices.Sort(names)
	w.api.put("terminating/"+service, names)
}
