package segment

import (
	"time"

	"github.com/lodestone-lb/lodestone/speaker/layer2/wire"
)

// probes is how often all hosts are asked whether a new VIP is in use. probeWait is how long an answer may
// take. RFC 5227 section 2.2 takes 4 to 7 s, and permits less where the network answers faster. Hosts on
// Ethernet answer within a millisecond; 200 ms are for links that sleep, and three questions for lost
// frames.
const (
	probes    = 3
	probeWait = 200 * time.Millisecond
)

// recheck is how often all hosts are asked again for a VIP that another machine has. hurriedRecheck is for
// VIPs with Hurry.
const recheck, hurriedRecheck = 10 * time.Second, time.Second

// probe asks all hosts whether they have the VIP. If one has it, the next question comes after recheck. If
// none has answered the last question, the VIP is announced.
//
// A VIP that leaves is probed, too. Its next owner may have announced it only to the other side of a partition. The probe
// shows that owner that clients on this side may still look for the VIP here, and it announces the VIP again.
func (m *Machine) probe(p pending) [][]byte {
	v := p.vip
	switch {
	case v.answersAtLast():
	case v.reason != Probing && v.reason != AddressConflict:
		return nil
	case v.heard:
		wait := recheck
		if v.Hurry {
			wait = hurriedRecheck
		}
		p.step, p.due = stepRecheck, m.now.Add(wait)
		m.queue.enter(p)
		return nil
	case p.step == stepProbed:
		v.reason, v.by, v.unprobed = "", wire.MAC{}, false
		m.out.note(Note{Kind: Free, VIP: v.addr})
		m.announceAnew(v)
	}
	if p.step == stepProbed {
		return nil
	}
	p.step, p.due = p.step+1, m.now.Add(probeWait)
	m.queue.enter(p)
	return [][]byte{m.Protocol.Probe(m.statement(v), wire.MAC{})}
}

// probedAtLast reports whether the step is one of the probes of a VIP that leaves. The probes of a new VIP continue when it
// leaves: if it is free, this node answers for it until the next owner is heard, which may have to wait for its kube-proxy.
func (v *vip) probedAtLast(s step) bool {
	return (v.reason == Probing || v.answersAtLast()) && s >= stepProbe && s <= stepProbed
}
