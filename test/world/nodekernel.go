package world

import (
	"maps"
	"net/netip"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/lodestone-lb/lodestone/speaker/direct"
	"github.com/lodestone-lb/lodestone/test/nft"
)

// plane is the kernel of a node, as far as connections through VIPs need it: the rules that the node's Director has
// written, which are the real ones and are interpreted, conntrack, what kube-proxy has made of Services, and the
// neighbour table. It works without a speaker. A node that loses its power loses all of it.
//
// Its conntrack has the connections that the node keeps. A segment in the middle of an unknown connection counts as a new
// connection, and as invalid if the SYN was not answered. There are no windows, the table is never full, and no entry outlives its
// connection. kube-proxy is one that replaces the address (modes iptables and nftables).
type plane struct {
	*node
	off        int           // how many faults keep the node without power
	crashed    time.Duration // when it lost its power last
	on         time.Duration // when it got it again
	ruled      time.Duration // when it had rules again
	ended      time.Duration // when its speaker ended last
	flushed    time.Duration // when its rules were flushed last while its speaker did not run
	rules      *direct.Simulated
	flows      map[flow]*tracked
	proxied    map[netip.AddrPort]*proxied
	syncs      bool          // kube-proxy is about to read the changes
	synced     time.Duration // when it did last
	neighbours map[int]*arpEntry
	absent     absence
	apart      time.Duration // since when some other node with power does not hear it; never: all do
	gone       bool          // apart for longer than maxHold, and its speaker is not heard by all again
}

// flow is a connection, as both ends have it.
type flow struct{ client, vip netip.AddrPort }

// tracked is an entry of conntrack. Until the pod has answered nothing but another SYN fits.
type tracked struct {
	pod      *pod
	answered bool
}

// proxied is a Service at a VIP and port, as kube-proxy has it.
type proxied struct {
	service string
	local   bool
	pods    []*pod
}

func newPlane(n *node) plane {
	p := plane{node: n}
	p.crash()
	return p
}

// crash clears the state of the kernel.
func (p *plane) crash() {
	p.rules, p.apart = nil, never
	p.flows, p.proxied, p.neighbours = map[flow]*tracked{}, map[netip.AddrPort]*proxied{}, map[int]*arpEntry{}
}

// The segments of a connection. Which one it is decides about the flags.
const (
	syn  = 0x02
	data = 0x10
	fin  = 0x11
	rst  = 0x04
)

// linuxTTL is the TTL of the clients' packets.
const linuxTTL = 64

// device is the interface to the segment.
const device = 2

// tcp is a segment from a client, on its way from node to node.
type tcp struct {
	nft.Segment
	conn   *connection
	handed int
}

// take receives a TCP segment from the network.
func (p *plane) take(s *tcp) {
	if p.off > 0 {
		return
	}
	entry := p.flows[s.conn.flow]
	switch {
	case entry != nil && (entry.answered || s.Flags == syn):
		s.Known = nft.Established
	case entry != nil || s.Flags&(rst|fin&^data) != 0:
		s.Known = nft.Invalid
	default:
		s.Known = nft.New
	}
	for _, shortcut := range []bool{true, false} {
		if p.rules == nil {
			break
		}
		program := p.rules.Program(s.To, shortcut)
		if program == nil {
			continue
		}
		s.Jhash = program.Hash
		v := nft.Rules{Chains: program.Chains, Lookup: program.Lookup}.Run(program.Chain, &s.Segment)
		if to, ok := netip.AddrFromSlice(v.To); ok {
			p.handOver(s, to)
			return
		}
		if v.Dropped {
			p.recordSegment(s, "drops "+v.Counter)
			return
		}
	}
	p.serve(s, entry)
}

// handOver sends a segment to another node.
func (p *plane) handOver(s *tcp, to netip.Addr) {
	o := p.nodeAt(to)
	if s.TTL--; s.TTL == 0 || o == nil || !p.neighbour(o.id).use() {
		p.recordSegment(s, "cannot hand on to "+to.String())
		return
	}
	s.handed++
	p.checks.handed(p.node, s)
	p.recordSegment(s, "hands to "+o.name)
	p.data.after(p.node, o.id, func() {
		s.From = hardware(p.id)
		o.plane.take(s)
	})
}

// serve is kube-proxy and the pod behind it.
func (p *plane) serve(s *tcp, entry *tracked) {
	switch {
	case entry != nil && s.Known == nft.Invalid:
		p.recordSegment(s, "drops what does not fit")
		return
	case entry == nil:
		of := p.proxied[s.To]
		if of == nil {
			p.recordSegment(s, "does not serve it")
			return
		}
		pod := of.choose(p)
		if pod == nil {
			p.recordSegment(s, "has no endpoint for it")
			return
		}
		entry = &tracked{pod: pod}
		p.flows[s.conn.flow] = entry
	}
	at := p.nodes[entry.pod.node]
	if at != p.node && (at.plane.off > 0 || !p.lan.open(p.id, at.id) || !p.lan.open(at.id, p.id)) {
		p.recordSegment(s, "does not reach the pod")
		return
	}
	switch answer := entry.pod.answer(s, p.node); {
	case answer == rst:
		delete(p.flows, s.conn.flow)
		p.recordSegment(s, "has it reset")
		p.data.after(p.node, s.conn.host.id, func() { s.conn.reset(p.node, s.handed) })
	case answer != 0:
		entry.answered = true
		p.data.after(p.node, s.conn.host.id, func() { s.conn.answered(p.node, entry.pod, s.handed) })
	case s.Flags == fin:
		delete(p.flows, s.conn.flow)
	}
}

func (p *plane) recordSegment(s *tcp, text string) {
	if p.story != nil {
		p.record("%s: %s, TTL %d, of %s", p.name, text, s.TTL, s.conn)
	}
}

// mayReset reports whether the node may reset connections that others keep, because it lacks the rules. These cases are known, see
// docs/explanation/found-by.md: direct forwarding was switched off before the node had rules again; a Director began while the
// node had none; or there was another Service of that name and VIP.
func (p *plane) mayReset(c *connection) bool {
	lost, back := max(p.crashed, p.flushed), max(p.on, p.flushed)
	unnoticed := slices.ContainsFunc(p.nodes, func(o *node) bool {
		began := o.director.began
		return o != p.node && began > lost && back-began < maxUnnoticed
	})
	lacking := p.on > 0 && p.rules == nil
	return p.on > 0 && p.data.off > 0 && (lacking || p.ruled > p.data.switched) ||
		(lacking || p.director.began < p.flushed) && unnoticed ||
		!p.running && p.data.again[c.service] && p.rules != nil && p.rules.Program(c.vip, false) == nil
}

// bare reports whether no speaker has begun since the node had no power. Hosts may send to it all the same, see
// docs/explanation/found-by.md.
func (p *plane) bare() bool { return p.director.began < p.crashed }

// choose returns the pod for a new connection, nil if there is none: ready ones come first.
func (of *proxied) choose(p *plane) *pod {
	for _, ready := range []bool{true, false} {
		var all []*pod
		for _, pod := range of.pods {
			if pod.ready == ready && (!of.local || pod.node == p.id) {
				all = append(all, pod)
			}
		}
		if len(all) > 0 {
			return all[p.data.random.IntN(len(all))]
		}
	}
	return nil
}

// sync makes kube-proxy read the changes, at most once a second, and later on a busy node.
func (p *plane) sync() {
	if p.syncs || p.off > 0 || !p.Direct {
		return
	}
	p.syncs = true
	at := max(p.now+p.data.upTo(100*time.Millisecond), p.synced+time.Second) + p.data.upTo(600*time.Millisecond)
	p.World.after(at-p.now, func() {
		p.syncs, p.synced = false, p.now
		if p.off > 0 {
			return
		}
		if p.api.away[p.name] > 0 {
			p.sync()
			return
		}
		p.proxied = map[netip.AddrPort]*proxied{}
		for _, name := range named(p.api.objects, "service") {
			svc := p.api.service(name)
			for _, vip := range shown(svc) {
				at := netip.AddrPortFrom(vip, uint16(svc.Spec.Ports[0].Port))
				p.proxied[at] = &proxied{name, svc.Spec.ExternalTrafficPolicy == corev1.ServiceExternalTrafficPolicyLocal, p.data.podsOf(name)}
			}
		}
	})
}

// connections returns the entries of conntrack.
func (p *plane) connections() (all []direct.Connection) {
	for f := range p.flows {
		all = append(all, direct.Connection{Client: f.client, VIP: f.vip})
	}
	return all
}

// arpEntry is an entry of a node's neighbour table (arp(7)). If it is used and older than reachable, the neighbour is asked three
// times in three seconds, and without an answer the entry has failed.
type arpEntry struct {
	*plane
	other             int // station
	known             bool
	asked, failed     bool
	confirmed         time.Duration
	probes, willProbe bool
}

func (p *plane) neighbour(station int) *arpEntry {
	e := p.neighbours[station]
	if e == nil {
		e = &arpEntry{plane: p, other: station}
		p.neighbours[station] = e
	}
	return e
}

// use reports whether packets can be sent to the neighbour now.
func (e *arpEntry) use() bool {
	if !e.known {
		e.ask()
		return false
	}
	if !e.probes && !e.willProbe && e.now-e.confirmed > reachable {
		e.willProbe = true
		e.World.after(5*time.Second, func() { e.willProbe = false; e.ask() })
	}
	return true
}

// ask asks for the neighbour.
func (e *arpEntry) ask() {
	if e.probes || e.neighbours[e.other] != e {
		return
	}
	e.probes, e.asked, e.failed = true, !e.known, false
	e.probe(unanswered)
}

func (e *arpEntry) probe(times int) {
	there := e.other >= len(e.nodes) || e.nodes[e.other].plane.off == 0
	switch {
	case e.neighbours[e.other] != e: // the node has lost its power, or its link
	case there && e.off == 0 && e.lan.open(e.id, e.other) && e.lan.open(e.other, e.id):
		e.known, e.asked, e.failed, e.probes, e.confirmed = true, false, false, false, e.now
		if e.other < len(e.nodes) {
			if back := e.nodes[e.other].plane.neighbour(e.id); !back.known { // it has learnt by the question
				back.known, back.asked, back.failed = true, false, false
			}
		}
	case times == 0:
		e.known, e.asked, e.failed, e.probes = false, false, true, false
	default:
		e.World.after(askAgain, func() { e.probe(times - 1) })
	}
}

// seen returns the kernel's neighbours and routers.
func (p *plane) seen() direct.Seen {
	seen := direct.Seen{Subnets: map[netip.Prefix]int{subnet: device}, Gateways: []netip.Addr{addressOf(len(p.nodes))}}
	if p.Dual {
		seen.Subnets[subnet6], seen.Gateways = device, append(seen.Gateways, address(len(p.nodes), false))
	}
	if p.lan.unplugged[p.id] > 0 { // without a carrier the kernel forgets them
		p.neighbours = map[int]*arpEntry{}
	}
	for _, station := range slices.Sorted(maps.Keys(p.neighbours)) {
		e, mac := p.neighbours[station], hardware(station)
		if !e.known && !e.asked && !e.failed {
			continue
		}
		n := direct.SeenNeighbour{Address: addressOf(station), Device: device, Asked: e.asked}
		if e.known {
			n.Hardware = mac[:]
		}
		seen.Neighbours = append(seen.Neighbours, n)
		if p.Dual {
			n.Address = address(station, false)
			seen.Neighbours = append(seen.Neighbours, n)
		}
	}
	return seen
}

// addressOf is the address of a station.
func addressOf(station int) netip.Addr {
	return netip.AddrFrom4([4]byte{203, 0, 113, byte(10 + station)})
}

// nodeAt returns the node with that address, nil if there is none.
func (w *World) nodeAt(a netip.Addr) *node {
	bytes := a.AsSlice()
	if i := int(bytes[len(bytes)-1]) - 10; i >= 0 && i < len(w.nodes) {
		return w.nodes[i]
	}
	return nil
}
