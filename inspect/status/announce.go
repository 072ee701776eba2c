package status

import (
	"cmp"
	"maps"
	"net/netip"
	"slices"
	"time"

	"github.com/lodestone-lb/lodestone/inspect/bgp"
	"github.com/lodestone-lb/lodestone/inspect/output"
	"github.com/lodestone-lb/lodestone/inspect/simulation"
	"github.com/lodestone-lb/lodestone/speaker/plan"
)

// VIPs is which nodes announce the VIPs, by the plan.
type VIPs struct {
	Total int `json:"total"`
	// Nodes are the nodes that announce VIPs.
	Nodes []Announcing `json:"nodes"`
	// Silent are the VIPs that no node announces, by reason.
	Silent []Silent `json:"silent,omitempty"`
	// Messages are why nobody announces each of the Silent.
	Messages map[netip.Addr]string `json:"-"`
}

// Announcing is how many VIPs a node announces.
type Announcing struct {
	Node string `json:"node"`
	// Layer2 counts those that it owns, BGP those that it announces to routers.
	Layer2 int `json:"layer2"`
	BGP    int `json:"bgp"`
}

// Silent are VIPs that nobody announces, or a node does not own, for the same reason.
type Silent struct {
	Reason plan.Reason `json:"reason"`
	// Message is that of the first of them.
	Message string       `json:"message"`
	VIPs    []netip.Addr `json:"vips"`
}

func (s *Status) sessions(n *simulation.Network, now time.Time) {
	sessions := bgp.Peers(n, now, "", "")
	s.Peers = sessions.ByPeer()
	type trouble struct{ peer, message string }
	nodes := map[trouble][]string{}
	for _, session := range sessions.Sessions {
		if !session.Up() || session.Message != "" { // one that is up may have a problem all the same
			t := trouble{session.Peer, cmp.Or(session.Message, "no session")}
			nodes[t] = append(nodes[t], session.Node)
		}
	}
	byPeer := func(a, b trouble) int { return cmp.Or(cmp.Compare(a.peer, b.peer), cmp.Compare(a.message, b.message)) }
	for _, t := range slices.SortedFunc(maps.Keys(nodes), byPeer) {
		s.warn("BGP", "peer %s on %s: %s", t.peer, output.List(nodes[t], 3), t.message)
	}
}

func (s *Status) vips(n *simulation.Network) {
	who := n.Who()
	nodes := map[string]*Announcing{}
	of := func(name string) *Announcing {
		if nodes[name] == nil {
			nodes[name] = &Announcing{Node: name}
		}
		return nodes[name]
	}
	var unheard []netip.Addr
	for _, vip := range slices.SortedFunc(maps.Keys(who), netip.Addr.Compare) {
		a := who[vip]
		if a.Owner != "" {
			of(a.Owner).Layer2++
		}
		for _, node := range a.Routers {
			of(node).BGP++
		}
		if a.Silent() {
			unheard = append(unheard, vip)
		}
	}
	why := n.Silences(unheard)
	s.VIPs = &VIPs{Total: len(who), Nodes: []Announcing{}, Messages: map[netip.Addr]string{},
		Silent: ByReason(unheard, func(vip netip.Addr) plan.Silence { return why[vip] })}
	for vip, silence := range why {
		s.VIPs.Messages[vip] = silence.Message
	}
	for _, name := range slices.Sorted(maps.Keys(nodes)) {
		s.VIPs.Nodes = append(s.VIPs.Nodes, *nodes[name])
	}
	for _, v := range s.VIPs.Silent {
		s.warn("VIPs", "nobody announces %s: %s: %s", output.List(output.Strings(v.VIPs), 3), v.Reason, v.Message)
	}
}

// ByReason groups the VIPs by the reason of their silence.
func ByReason(vips []netip.Addr, why func(netip.Addr) plan.Silence) (groups []Silent) {
	for _, vip := range vips {
		silence := why(vip)
		i := slices.IndexFunc(groups, func(g Silent) bool { return g.Reason == silence.Reason })
		if i < 0 {
			i, groups = len(groups), append(groups, Silent{Reason: silence.Reason, Message: silence.Message})
		}
		groups[i].VIPs = append(groups[i].VIPs, vip)
	}
	slices.SortFunc(groups, func(a, b Silent) int { return cmp.Compare(a.Reason, b.Reason) })
	return groups
}
