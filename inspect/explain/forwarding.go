package explain

import (
	"cmp"
	"fmt"
	"maps"
	"net/netip"
	"slices"

	"github.com/lodestone-lb/lodestone/inspect/output"
	"github.com/lodestone-lb/lodestone/inspect/simulation"
	"github.com/lodestone-lb/lodestone/pkg/report"
	"github.com/lodestone-lb/lodestone/speaker/plan"
)

// Forwarding is which nodes keep the connections to a Service at a VIP (forwarding: direct).
type Forwarding struct {
	Service string `json:"service"`
	// Open are the nodes that take new connections, Draining those that keep what they have.
	Open     []string `json:"open,omitempty"`
	Draining []string `json:"draining,omitempty"`
	// LeftOut are the nodes that would serve, and are handed no connections.
	LeftOut []LeftOut `json:"leftOut,omitempty"`
}

// LeftOut is a node that is handed no connections, and why.
type LeftOut struct {
	Node string `json:"node"`
	Why  string `json:"why"`
}

// forwardingOf returns which nodes keep the connections to the VIP, for each of its Services with direct forwarding.
// A node that does not answer its neighbours is among them: only the neighbours know that.
func forwardingOf(n *simulation.Network, vip netip.Addr, owner string) (all []Forwarding) {
	names := slices.Sorted(maps.Keys(n.Nodes))
	if len(names) == 0 {
		return nil
	}
	of := n.View(names[0]).Forwarding
	if of == nil {
		return nil
	}
	for _, s := range n.SharersOf(vip) {
		direct, ok := of.Services[plan.LimitKey{VIP: vip, Service: s.Name}]
		if !ok {
			continue
		}
		f := Forwarding{Service: s.Name}
		for _, node := range candidatesOf(s, vip, owner, names) {
			at := slices.IndexFunc(direct.Backends, func(b plan.Backend) bool { return b.Node == node })
			why := leftOut(n, node, owner, vip)
			switch {
			case why != "":
				f.LeftOut = append(f.LeftOut, LeftOut{node, why})
			case at < 0: // the owner, which has no endpoint
			case direct.Backends[at].Open > 0:
				f.Open = append(f.Open, node)
			default:
				f.Draining = append(f.Draining, node)
			}
		}
		all = append(all, f)
	}
	return all
}

// candidatesOf returns the nodes that might keep connections to the Service, and the owner of the VIP.
func candidatesOf(s plan.Service, vip netip.Addr, owner string, all []string) []string {
	candidates := all
	if s.Local {
		candidates = nil
		for _, b := range s.EndpointsAt(vip).Backends {
			candidates = append(candidates, b.Node)
		}
	}
	if owner != "" && !slices.Contains(candidates, owner) {
		candidates = append(slices.Clone(candidates), owner)
	}
	return candidates
}

// withoutRules are the reasons in words.
var withoutRules = map[report.NoRules]string{
	report.RulesForbidden: "its speaker may not write packet filter rules: set speaker.directForwarding in the values of the chart",
	report.RulesWithIPVS:  "kube-proxy there is in mode IPVS",
	report.RulesOnBond:    "it is on a bond that sends with other hardware addresses than it answers with",
}

// noRules returns why a node has no rules of direct forwarding although it should. Empty: it does
// not report that.
func noRules(n report.Network) string {
	if n.NoRules == "" {
		return ""
	}
	return cmp.Or(withoutRules[n.NoRules], "the kernel there refuses the rules: the log of its speaker has the reason")
}

// leftOut returns why a node is handed no connections, or hands none over. Empty: it is.
func leftOut(n *simulation.Network, node, owner string, vip netip.Addr) string {
	of, known := n.Nodes[node]
	switch {
	case !known:
		return "there is no such Node"
	case !of.Forwards:
		return cmp.Or(noRules(of.Network), "its speaker does not report that it has the rules: it is of an older version, or has not begun")
	case owner == "" || owner == node:
		return ""
	}
	from := n.Nodes[owner]
	switch at, ok := from.Reaches(&of, vip); {
	case ok:
		return ""
	case !at.IsValid():
		return "it has no address of the VIP's family"
	default:
		return fmt.Sprintf("it is no neighbour of %s: its address %s is on no segment of that", owner, at)
	}
}

// String describes it for people.
func (f Forwarding) String() string {
	text := f.Service + ": no node takes new ones"
	if len(f.Open) > 0 {
		text = f.Service + ": kept by " + output.List(f.Open, 5)
	}
	if len(f.Draining) > 0 {
		text += "; existing ones also by " + output.List(f.Draining, 5)
	}
	return text
}

// show adds the lines of a VIP with that owner.
func (f Forwarding) show(to *facts, label, owner string) {
	at := slices.IndexFunc(f.LeftOut, func(l LeftOut) bool { return l.Node == owner })
	if at >= 0 {
		to.bad(label, fmt.Sprintf("%s: %s keeps all that it takes in: %s", f.Service, owner, f.LeftOut[at].Why))
	} else {
		to.add(label, f.String())
	}
	for i, l := range f.LeftOut {
		if i != at {
			to.bad("", l.Node+" is handed none: "+l.Why)
		}
	}
}
