package core

import (
	"crypto/sha256"
	"net/netip"
	"testing"
	"time"

	"github.com/lodestone-lb/lodestone/speaker/layer2/segment"
	"github.com/lodestone-lb/lodestone/speaker/layer2/wire"
	"github.com/lodestone-lb/lodestone/speaker/plan"
)

// lan is a segment with the machine of each node, which hear each other at once.
type lan struct {
	*fleet
	machines map[string]*segment.Machine
	onWire   []frame
}

type frame struct {
	from  string
	bytes []byte
}

func (l *lan) begin(node string) {
	l.machines[node] = segment.New(segment.Config{Protocol: wire.ARP{}, Self: wire.MAC{2, 0, 0, 0, 0, node[1]},
		Keys: func() [][]byte { return [][]byte{[]byte("the cluster's")} }, Secret: sha256.Sum256([]byte(node))}, l.now)
}

func (l *lan) end(node string) { delete(l.machines, node) }

func (l *lan) hear(node string) {
	l.step(node, segment.Surroundings{Whole: len(l.heard(node)) == len(l.nodes), Crowd: 1})
}

func (l *lan) leaving(node string) int { return len(l.machines[node].Leaving()) }

func (l *lan) announce(node string, vips map[netip.Addr]plan.Layer2) {
	want := map[netip.Addr]segment.VIP{}
	for vip, v := range vips {
		want[vip] = segment.VIP{Home: v.Home, Apart: v.Apart, Leaving: v.Leaving, Arriving: v.Arriving}
	}
	l.step(node, segment.Assigned{VIPs: want})
	l.pass()
}

// step takes an event to a node's machine, and what it sends to the others.
func (l *lan) step(node string, e segment.Event) {
	for _, f := range l.machines[node].Step(e, l.now).Frames {
		l.onWire = append(l.onWire, frame{node, f})
	}
	for len(l.onWire) > 0 {
		f := l.onWire[0]
		l.onWire = l.onWire[1:]
		for to := range l.machines {
			if m, _ := (wire.ARP{}).Parse(f.bytes); to != f.from && m.IsFor(l.machines[to].Self) {
				l.step(to, segment.Received{Message: m})
			}
		}
	}
}

func (l *lan) pass() {
	for node, m := range l.machines {
		for at, due := m.Next(); due && !at.After(l.now); at, due = m.Next() {
			l.step(node, segment.Due{})
		}
	}
}

// answerers returns the nodes that answer a host that asks for the VIP.
func (l *lan) answerers(vip netip.Addr) (nodes []string) {
	question, _ := wire.ARP{}.Parse(wire.ARP{}.Probe(wire.Statement{Self: wire.MAC{2, 0, 0, 0, 0, 0xc}, VIP: vip}, wire.MAC{}))
	for node, m := range l.machines {
		if m.Step(segment.Received{Message: question}, l.now).Replies > 0 {
			nodes = append(nodes, node)
		}
	}
	return nodes
}

// Three speakers on a segment: at every moment a node answers for each VIP, whatever moves
// by plan, and two do for no longer than it takes to repeat an announcement that crossed
// another one. When the speakers cease to hear each other, all own all VIPs, and the segment
// decides: within two seconds one node answers for each, and no VIP moves back and forth.
func TestThreeCoresOnASegment(t *testing.T) {
	t.Parallel()
	const repeated = 120 * time.Millisecond
	f := newFleet(t, 3, 12)
	l := &lan{fleet: f, machines: map[string]*segment.Machine{}}
	f.segment, f.grain = l, 10*time.Millisecond
	f.start()
	f.after(10 * time.Second)
	both := map[netip.Addr]time.Time{} // since when two nodes answer
	answered := func() {
		for _, svc := range f.services {
			vip, by := svc.VIPs[0], l.answerers(svc.VIPs[0])
			if len(by) == 0 {
				t.Fatalf("nobody answers for %s at %s", vip, f.now)
			}
			if len(by) == 1 {
				delete(both, vip)
				continue
			}
			if both[vip].IsZero() {
				both[vip] = f.now
			}
			if f.now.Sub(both[vip]) >= repeated {
				t.Fatalf("%s has %v at %s", vip, by, f.now)
			}
		}
	}
	f.check = answered
	for _, change := range f.changes() {
		change()
		f.after(20 * time.Second)
	}
	for _, alone := range []map[string]bool{{"n0": true, "n1": true}, {}, {"n2": true}, {}} {
		f.check = func() {}
		f.alone = alone
		f.see()
		f.after(2 * time.Second)
		f.check = answered
		f.after(20 * time.Second)
	}
}
