package segment

import (
	"time"

	"github.com/lodestone-lb/lodestone/speaker/layer2/seal"
	"github.com/lodestone-lb/lodestone/speaker/layer2/wire"
)

const (
	// DefendInterval is the shortest time between two reports of a conflict, and between two defences of a VIP
	// (RFC 5227 section 2.4, DEFEND_INTERVAL).
	DefendInterval = 10 * time.Second
	// defence is how long after the claim of a machine that is no speaker of this cluster a VIP is defended.
	defence = time.Second
)

// reportConflict reports that a machine that is no speaker of this cluster has the VIP, and whether this node announces it, or
// leaves it to a speaker that does. A VIP that was not found to be free is not announced.
func (m *Machine) reportConflict(v *vip, msg wire.Message) {
	announced := v.reason == "" || v.reason == Yielded && !v.unprobed
	if v.reason == Probing || v.reason == AddressConflict {
		v.reason, v.by, v.heard = AddressConflict, msg.From, true
	}
	m.noteConflict(v, Note{Other: msg.From, OtherCluster: msg.Seal != (seal.Seal{}), Announced: announced})
}

func (m *Machine) noteConflict(v *vip, n Note) {
	n.Kind, n.VIP, n.First = Conflict, v.addr, v.warned.IsZero() || m.now.Sub(v.warned) >= DefendInterval
	if n.First {
		v.warned = m.now
	}
	m.out.note(n)
	if n.Announced { // hosts of the segment reach one or the other; the withheld ones are a gauge
		m.out.Conflicts++
	}
}

// defend schedules an announcement of a VIP that another host claims, unless it was defended within
// DefendInterval. The last report of a conflict does not count as a defence: that conflict may have been a
// question, which was answered and not contradicted.
func (m *Machine) defend(v *vip, due time.Time) {
	if v.reason != "" || !v.defended.IsZero() && m.now.Sub(v.defended) < DefendInterval {
		return
	}
	v.defended = m.now
	m.queue.enter(pending{vip: v, step: stepDefence, due: due})
}
