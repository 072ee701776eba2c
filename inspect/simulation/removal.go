package simulation

import (
	"maps"
	"net/netip"
	"slices"

	"github.com/lodestone-lb/lodestone/speaker/plan"
)

// Removal is how a node leaves.
type Removal string

// The removals. In both the node's pods end with it, and no pod that starts elsewhere in their place is
// foreseen.
const (
	// Drain takes the node out of load balancing by its label, then its pods:
	// other nodes take over before this one stops.
	Drain Removal = "drain"
	// Lose is a node that fails: the others notice.
	Lose Removal = "lose"
)

// Without returns the Network after the node has left.
func (n *Network) Without(node string, how Removal) *Network {
	after := n.derive()
	after.Nodes, after.Speakers = maps.Clone(n.Nodes), maps.Clone(n.Speakers)
	switch how {
	case Drain:
		left := after.Nodes[node]
		left.Labelled = true
		after.Nodes[node] = left
	case Lose:
		delete(after.Speakers, node)
	}
	after.Services = after.serve(func(name string) bool { return name == node })
	return after
}

// Move is what the removal of a node, or an edit of the configuration, does to a
// VIP.
type Move struct {
	VIP           netip.Addr
	Before, After Audience
	// Silence is why nobody announces it afterwards.
	Silence plan.Silence
}

// Orphaned reports whether somebody announced the VIP before, and nobody does
// afterwards.
func (m Move) Orphaned() bool { return m.After.Silent() && !m.Before.Silent() }

// Moves returns the VIPs of both that other nodes announce afterwards than
// before, in order.
func (n *Network) Moves(after *Network) []Move {
	before, then := n.Who(), after.Who()
	var moves []Move
	var orphans []netip.Addr
	for vip, is := range then {
		was, known := before[vip]
		if !known || was.Owner == is.Owner && slices.Equal(was.Routers, is.Routers) {
			continue
		}
		m := Move{VIP: vip, Before: was, After: is}
		if m.Orphaned() {
			orphans = append(orphans, vip)
		}
		moves = append(moves, m)
	}
	why := after.Silences(orphans)
	for i := range moves {
		moves[i].Silence = why[moves[i].VIP]
	}
	slices.SortFunc(moves, func(a, b Move) int { return a.VIP.Compare(b.VIP) })
	return moves
}
