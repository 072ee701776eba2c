package segment

import (
	"time"

	"github.com/lodestone-lb/lodestone/speaker/layer2/wire"
)

// probes is how often it is asked whether a new VIP is in use, and probeWait
// how long each time an answer is waited for. RFC 5227 section 2.2 permits to
// wait less than its 4 to 7 s where the network is known to answer faster.
// Hosts on Ethernet answer within a millisecond; 200 ms are for links that
// sleep, and three questions, as there, for frames that are lost.
const (
	probes    = 3
	probeWait = 200 * time.Millisecond
)

// recheck is how long a VIP that somebody else has is left to him, before the
// next look whether he is gone, and hurriedRecheck what it is of VIP.Hurry.
const recheck, hurriedRecheck = 10 * time.Second, time.Second

// probe asks all whether they have the VIP, or ends the questions: nobody answered, or
// somebody.
func (m *Machine) probe(p pending) [][]byte {
	v := p.vip
	switch {
	case v.reason != Probing && v.reason != AddressConflict:
		return nil
	case v.heard:
		wait := recheck
		if v.Hurry {
			wait = hurriedRecheck
		}
		m.queue.enter(pending{vip: v, step: stepRecheck, due: m.now.Add(wait)})
		return nil
	case p.step < stepProbed:
		m.queue.enter(pending{vip: v, step: p.step + 1, due: m.now.Add(probeWait)})
		return [][]byte{m.Protocol.Probe(m.statement(v), wire.MAC{})}
	}
	v.reason, v.by = "", wire.MAC{}
	m.out.note(Note{Kind: Free, VIP: v.addr})
	m.announceAnew(v)
	return nil
}
