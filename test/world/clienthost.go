package world

import (
	"fmt"
	"net/netip"
	"time"

	"github.com/lodestone-lb/lodestone/speaker/layer2/seal"
	"github.com/lodestone-lb/lodestone/speaker/layer2/wire"
)

// hosts is the number of hosts: two that use VIPs, and one that takes addresses and repeats frames.
const hosts = 3

// How a host's neighbour table works (arp(7), with the defaults of Linux): an entry is good for 30 s, then it is asked
// for at the address that it has, three times, then it is asked for everywhere.
const (
	reachable  = 30 * time.Second
	askAgain   = time.Second
	unanswered = 3
)

// host is a machine on a segment that uses every VIP there all the time.
type host struct {
	*World
	lan      *lan
	id       int
	entries  map[netip.Addr]*neighbour
	spiteful map[netip.Addr]int // the addresses that it takes, by how many faults
}

// neighbour is an entry of the table.
type neighbour struct {
	mac       wire.MAC
	confirmed time.Duration
	asked     int
	changes   []time.Duration // when it changed
}

func newHost(l *lan, id int) *host {
	h := &host{World: l.World, lan: l, id: id, entries: map[netip.Addr]*neighbour{}, spiteful: map[netip.Addr]int{}}
	if !h.troubles() {
		h.after(beginning, h.use)
	}
	return h
}

// troubles reports whether the host is the one that takes addresses and repeats frames.
func (h *host) troubles() bool { return h.id == h.Nodes+hosts-1 }

// use makes the host use each VIP once.
func (h *host) use() {
	for _, vip := range h.checks.inOrder() {
		switch e := h.entries[vip]; {
		case h.lanOf(vip) != h.lan:
		case e == nil:
			h.ask(vip, wire.Broadcast)
		case h.now-e.confirmed < reachable:
		case e.asked < unanswered:
			e.asked++
			h.ask(vip, e.mac)
		default:
			delete(h.entries, vip)
		}
	}
	h.after(askAgain, h.use)
}

// ask sends an ordinary request, which claims the host's own address.
func (h *host) ask(vip netip.Addr, to wire.MAC) {
	if to == wire.Broadcast && vip.Is6() {
		to = wire.MAC{} // the group of the address
	}
	h.lan.send(h.id, asksFor(wire.Of(vip).Probe(wire.Statement{Self: h.lan.hardware(h.id), VIP: vip}, to), h.id))
}

func (h *host) receive(_ *lan, frame []byte) {
	m, ok := parse(frame)
	if !ok {
		return
	}
	if h.spiteful[m.Asks] > 0 {
		h.lan.send(h.id, wire.Of(m.Asks).Answer(wire.Statement{Self: h.lan.hardware(h.id), VIP: m.Asks}, m))
	}
	if h.troubles() || !m.Claims.IsValid() || !h.checks.known(m.Claims) {
		return
	}
	if e := h.entries[m.Claims]; e != nil || m.Answers {
		now := &neighbour{mac: m.From, confirmed: h.now}
		if e != nil {
			now.changes = e.changes
		}
		if e == nil || e.mac != m.From {
			h.record("host %d: finds %s at %s", h.id, m.Claims, h.who(m.From))
			now.changes = append(now.changes, h.now)
			h.checks.moved(h, m.Claims, now.changes)
		}
		h.entries[m.Claims] = now
	}
}

// who returns the name of the station with that address.
func (w *World) who(mac wire.MAC) string {
	if i := int(mac[5]) - 1; i < w.Nodes {
		return nodeName(i)
	} else if [4]byte(mac[:4]) == [4]byte{2} {
		return fmt.Sprintf("host %d", i)
	}
	return mac.String()
}

// takes makes the host take an address, as if it were configured with the address.
func (h *host) takes(vip netip.Addr) {
	h.spiteful[vip]++
	for _, frame := range wire.Of(vip).Announce(wire.Statement{Self: h.lan.hardware(h.id), VIP: vip, Seal: seal.Seal{}}, true) {
		h.lan.send(h.id, frame)
	}
}
