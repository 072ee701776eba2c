package segment

import (
	"time"

	"github.com/lodestone-lb/lodestone/speaker/layer2/wire"
)

// An interface counts as deaf when nothing has come in for deafAfter. On an interface that works, the other
// side of a partition has announced a VIP by then, or clients have answered an announcement.
const (
	deafAfter       = time.Second
	hearingInterval = 100 * time.Millisecond
)

// hearing finds out whether the interface is deaf. While speakers are lost and nothing comes in, this node
// must not repeat its announcements: if a cable, a transceiver or a switch carries one way only, this node
// does not hear the speakers that contradict. It still announces a VIP once when it takes it over, and
// still answers: a request that arrives shows that the interface works.
//
// A message of a neighbour ends the deafness. Other frames do not: the switch itself may send them.
type hearing struct {
	lastFrames, lastMessages uint64
	counted, heard           time.Time
	deaf                     bool
}

// WantsCount reports whether the machine needs a Counted event. Without these events no interface counts as
// deaf.
func (m *Machine) WantsCount(now time.Time) bool {
	return !m.Whole && now.Sub(m.hearing.counted) >= hearingInterval
}

// count takes over the number of received frames.
func (h *hearing) count(c Counted, now time.Time, out *Effects) {
	h.counted = now
	if !c.Known || h.heard.IsZero() || c.Messages != h.lastMessages || c.Frames != h.lastFrames && !h.deaf {
		h.lastFrames, h.lastMessages, h.heard = c.Frames, c.Messages, now
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

// askInstead replaces an announcement on a deaf interface. A beacon becomes a question, from which clients
// learn nothing, so that two sides of a partition that are both deaf hear each other when it heals. Other
// announcements are left out until the next one is due.
func (m *Machine) askInstead(p pending) [][]byte {
	if p.step != stepBeacon {
		m.queue.again(p, m.now)
		return nil
	}
	return [][]byte{m.Protocol.Probe(m.statement(p.vip), wire.MAC{})}
}
