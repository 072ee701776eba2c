package report

import (
	"cmp"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"time"

	"github.com/lodestone-lb/lodestone/pkg/reason"
)

// Move is VIPs that a node has lost at one time and for one reason.
type Move struct {
	// At distinguishes the moves of a node.
	At time.Time `json:"at"`
	// From is the node that had the VIPs. Empty: none had.
	From string `json:"from,omitempty"`
	// Why is the reason for which it lost them. Empty: not known.
	Why Reason `json:"why,omitempty"`
	// To are the VIPs by the node that has them now. VIPs under the empty name have no owner.
	To map[string][]netip.Addr `json:"to"`
}

// Reason is why a node lost VIPs: a reason of the plan, or SpeakerLost.
type Reason string

// SpeakerLost is the reason if the other speakers receive nothing from the node's speaker.
const SpeakerLost Reason = "SpeakerLost"

// FirstOwner is the reason if no node lost the VIPs, because they are new.
const FirstOwner Reason = "FirstOwner"

// Reasons explains each Reason that is not the plan's.
func Reasons() reason.Texts[Reason] {
	return reason.Texts[Reason]{
		SpeakerLost: {Cause: "The other speakers do not hear the speaker of the node that had the VIP: the node is down or cut off, or its " +
			"speaker was killed.", Cure: "Look at the node; the VIP has another owner already, if any node can be one."},
		FirstOwner: {Cause: "The VIP is new, and no node had it before.", Cure: "Nothing to do."},
	}
}

// reasons is what each Reason means, of the node that had a VIP (%[1]s) and
// the one that has it (%[2]s).
var reasons = map[Reason]string{
	SpeakerLost:          "the speaker on node %[1]s is not heard any more: the node is down or cut off, or its speaker was killed",
	FirstOwner:           "no node announced it before",
	"SpeakerNotReady":    "the speaker on node %[1]s ends, or is not ready",
	"NodeUnknown":        "node %[1]s was deleted",
	"NodeExcluded":       "node %[1]s was taken out of load balancing by a label or a taint",
	"NetworkUnavailable": "node %[1]s has the condition NetworkUnavailable",
	"LinkDown":           "the links of node %[1]s to its segment are down",
	"NotOnSegment":       "node %[1]s has no interface on its segment that announces",
	"NodeNotSelected":    "the advertisements do not select node %[1]s any more",
	"NoAdvertisement":    "no advertisement by layer 2 applies to its pool any more",
	"ServiceNotSelected": "the advertisements do not select its Service any more",
	"NoServingEndpoint":  "no endpoint of the Service takes traffic",
	"NoLocalEndpoint":    "externalTrafficPolicy is Local and no endpoint on node %[1]s takes traffic",
	"LessPreferred":      "node %[2]s is preferred, and is able to have it",
	"NotOwner":           "node %[2]s is the better owner, and is new or able to have it again",
}

// Known reports whether Describe has a sentence for the reason.
func (r Reason) Known() bool { return reasons[r] != "" }

// Describe returns, for people, what happened to VIPs of one Service.
func Describe(vips, from, to string, why Reason) string {
	text := fmt.Sprintf("node %s announces %s instead of node %s", to, vips, from)
	switch {
	case why == FirstOwner:
		return fmt.Sprintf("node %s announces %s by layer 2", to, vips)
	case from == "":
		return fmt.Sprintf("node %s announces %s again, which no node did", to, vips)
	case to == "":
		text = fmt.Sprintf("no node announces %s by layer 2 any more, node %s did", vips, from)
	}
	if format := reasons[why]; format != "" {
		// %.0s takes the names that a reason does not need.
		text += ": " + fmt.Sprintf(format+"%.0[1]s%.0[2]s", from, to)
	}
	return text
}

// NewMoves returns the moves in after that before does not have.
func NewMoves(before, after []Move) []Move {
	known := make(map[moveID]bool, len(before))
	for _, m := range before {
		known[m.id()] = true
	}
	return slices.DeleteFunc(slices.Clone(after), func(m Move) bool { return known[m.id()] })
}

// moveID distinguishes the moves of a node.
type moveID struct {
	at   int64 // in milliseconds, as in a report
	from string
	why  Reason
}

func (m Move) id() moveID { return moveID{m.At.UnixMilli(), m.From, m.Why} }

// tidyMoves returns the moves by time, the latest ones if there are too many.
func tidyMoves(moves []Move) []Move {
	var kept []Move
	for _, m := range moves {
		m.At = m.At.UTC().Truncate(time.Millisecond)
		if m.To = tidyTo(m.To); len(m.To) > 0 && (m.From == "" || isName(m.From, maxName)) && isTime(m.At) && (m.Why == "" || m.Why.Known()) {
			kept = append(kept, m)
		}
	}
	slices.SortStableFunc(kept, func(a, b Move) int {
		return cmp.Or(a.At.Compare(b.At), cmp.Compare(a.From, b.From), cmp.Compare(a.Why, b.Why))
	})
	kept = slices.CompactFunc(kept, func(m, other Move) bool { return m.id() == other.id() })
	room := MaxVIPs
	for i, m := range slices.Backward(kept) {
		if room -= m.count(); room < 0 {
			return trim(kept[i:], MaxVIPs)
		}
	}
	return kept
}

// tidyTo returns the valid VIPs, sorted, by the nodes with valid names.
func tidyTo(to map[string][]netip.Addr) map[string][]netip.Addr {
	kept := map[string][]netip.Addr{}
	for node, vips := range to {
		vips = slices.DeleteFunc(slices.Clone(vips), func(a netip.Addr) bool { return !a.IsValid() || a.Zone() != "" })
		slices.SortFunc(vips, netip.Addr.Compare)
		if vips = slices.Compact(vips); len(vips) > 0 && (node == "" || isName(node, maxName)) {
			kept[node] = vips
		}
	}
	return kept
}

// CountVIPs returns how many VIPs the moves are about.
func CountVIPs(moves []Move) (n int) {
	for _, m := range moves {
		n += m.count()
	}
	return n
}

func (m Move) count() (n int) {
	for _, vips := range m.To {
		n += len(vips)
	}
	return n
}

// halve returns the later half of the moves.
func halve(moves []Move) []Move {
	if len(moves) > 1 {
		return moves[len(moves)/2:]
	}
	return trim(moves, moves[0].count()/2)
}

// trim leaves VIPs of the first move out until there are no more than limit.
func trim(moves []Move, limit int) []Move {
	excess := CountVIPs(moves) - limit
	first := moves[0]
	first.To = maps.Clone(first.To)
	for _, node := range slices.Sorted(maps.Keys(first.To)) {
		vips := first.To[node]
		n := min(excess, len(vips))
		if excess -= n; n < len(vips) {
			first.To[node] = vips[n:]
		} else {
			delete(first.To, node)
		}
	}
	rest := slices.Clone(moves)
	if rest[0] = first; len(first.To) == 0 {
		return rest[1:]
	}
	return rest
}
