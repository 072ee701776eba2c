package segment

import (
	"time"

	"github.com/lodestone-lb/lodestone/speaker/layer2/wire"
)

// deafAfter is how long nothing comes in on an interface that carries one way only: on
// one that works, the other half of a split brain has announced a VIP by then, or clients
// have answered an announcement.
const (
	deafAfter       = time.Second
	hearingInterval = 100 * time.Millisecond
)

// hearing is what is known of what comes in on the interface. While speakers are lost and
// nothing comes in, this node must not repeat that it has the VIPs. A cable, a
// transceiver or a switch may carry one way only; what is sent to this node is lost, and
// it would not hear who contradicts. It announces once what it takes over, and goes on to
// answer: who asks is heard.
//
// That some neighbour speaks ends it. A frame does not: a switch may send its own.
type hearing struct {
	messages                 uint64 // of neighbours
	lastFrames, lastMessages uint64
	counted, heard           time.Time
	deaf                     bool
}

// WantsCount reports whether the machine wants to know how many frames have come in.
// Without an answer no interface is taken for deaf.
func (m *Machine) WantsCount(now time.Time) bool {
	return !m.Whole && now.Sub(m.hearing.counted) >= hearingInterval
}

// count takes over how many frames have come in.
func (h *hearing) count(c Counted, now time.Time, out *Effects) {
	h.counted = now
	if !c.Known || h.heard.IsZero() || h.messages != h.lastMessages || c.Frames != h.lastFrames && !h.deaf {
		h.lastFrames, h.lastMessages, h.heard = c.Frames, h.messages, now
	}
	before := h.deaf
	h.deaf = now.Sub(h.heard) >= deafAfter
	switch {
	case h.deaf && !before:
		out.note(Note{Kind: Deaf})
	case before && !h.deaf:
		out.note(Note{Kind: Hears})
	}
}

// askInstead makes of a beacon a question, which clients learn nothing from: two halves of
// a split brain that are both silent must hear each other when it heals. What else would
// claim a VIP is left out, and comes again.
func (m *Machine) askInstead(p pending) [][]byte {
	if p.step != stepBeacon {
		m.again(p)
		return nil
	}
	return [][]byte{m.Protocol.Probe(m.statement(p.vip), wire.MAC{})}
}
