package explain

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/lodestone-lb/lodestone/inspect/bgp"
	"github.com/lodestone-lb/lodestone/inspect/cluster"
	"github.com/lodestone-lb/lodestone/inspect/output"
	"github.com/lodestone-lb/lodestone/inspect/status"
	"github.com/lodestone-lb/lodestone/pkg/report"
	"github.com/lodestone-lb/lodestone/speaker/plan"
)

// Node explains a node.
type Node struct {
	Name string `json:"name"`
	// Obstacles are sentences about what keeps it from every VIP.
	Obstacles []string `json:"obstacles,omitempty"`
	// Segments and Gateways are from its speaker's report, which was last renewed at
	// Reported.
	Reported time.Time    `json:"reported,omitzero"`
	Segments []string     `json:"segments,omitempty"`
	Gateways []netip.Addr `json:"gateways,omitempty"`
	// Watchers are the nodes whose speakers find out when its speaker is lost, Watches those that it watches.
	Watchers []string `json:"watchers,omitempty"`
	Watches  []string `json:"watches,omitempty"`
	// Late is how late its failure detector was, if that was so late that others may have taken it for lost.
	Late report.Late `json:"late,omitzero"`
	// Owns are the VIPs that it announces by layer 2, Routed counts those that
	// it announces by BGP.
	Owns []Owned `json:"owns"`
	// NoRules is why it hands no connections over although it should (forwarding: direct).
	NoRules  string       `json:"noRules,omitempty"`
	Routed   int          `json:"routed"`
	Sessions bgp.Sessions `json:"sessions"`
	// Out is what keeps it from owning the other VIPs, Keys what this and the
	// problems of sessions follow from.
	Out       []status.Silent   `json:"out,omitempty"`
	Keys      []string          `json:"keys,omitempty"`
	Conflicts []status.Conflict `json:"conflicts,omitempty"`
}

// Owned is a VIP with its Services.
type Owned struct {
	VIP      netip.Addr `json:"vip"`
	Services []string   `json:"services"`
}

// OfNode explains a node that is there.
func OfNode(o *cluster.Objects, name string) Node {
	network := o.Network()
	view, last := network.View(name), network.Reports[name]
	n := Node{Name: name, Owns: []Owned{}, Routed: len(view.BGP.VIPs), Gateways: last.Gateways, Segments: output.Strings(last.Segments),
		NoRules: noRules(last.Network)}
	for _, m := range status.SpeakersOf(o).Missing {
		if m.Node == name {
			n.Obstacles = append(n.Obstacles, m.Message)
		}
	}
	if network.Nodes[name].Excluded(network.Config) {
		n.Obstacles = append(n.Obstacles, "it is taken out of load balancing, by its label "+
			"node.kubernetes.io/exclude-from-external-load-balancers or a taint")
	}
	if network.Nodes[name].NetworkUnavailable {
		n.Obstacles = append(n.Obstacles, "its condition NetworkUnavailable is true: its network plugin is not ready")
	}
	if last.Segments == nil {
		n.Obstacles = append(n.Obstacles, "its speaker has not reported which segments it is on")
	}
	for _, l := range o.Leases {
		if of, _ := report.NodeOf(l.Name); of == name && l.Spec.RenewTime != nil {
			n.Reported = l.Spec.RenewTime.UTC().Truncate(time.Second)
		}
	}
	if d := status.DetectionOf(o); d != nil {
		n.Watchers, n.Watches = d.Watchers[name], d.Watched(name)
		if i := slices.IndexFunc(d.Late, func(l status.Late) bool { return l.Node == name }); i >= 0 {
			n.Late = d.Late[i].Late
		}
	}
	n.vips(network.ServicesByVIP(), view.Verdicts)
	n.Sessions = bgp.Peers(network, o.Now, name, "")
	n.Keys = union(n.Keys, sessionKeys(n.Sessions))
	n.Conflicts = slices.DeleteFunc(status.ConflictsOf(network), func(c status.Conflict) bool { return c.Node != name })
	return n
}

// vips notes the VIPs that the node owns, and, by reason, those that it does not own.
func (n *Node) vips(services map[netip.Addr][]string, verdicts map[netip.Addr]plan.Verdict) {
	var out []netip.Addr
	for _, vip := range slices.SortedFunc(maps.Keys(verdicts), netip.Addr.Compare) {
		switch v := verdicts[vip]; {
		case v.Owned:
			n.Owns = append(n.Owns, Owned{vip, services[vip]})
		case !forRoutersOnly(v):
			out = append(out, vip)
		}
	}
	n.Out = status.ByReason(out, func(vip netip.Addr) plan.Silence { return verdicts[vip].Silence })
	for _, o := range n.Out {
		n.Keys = union(n.Keys, plan.Reasons()[o.Reason].Keys)
	}
}

// Troubled implements Story.
func (n Node) Troubled() bool {
	return n.NoRules != "" || len(n.Obstacles)+len(n.Conflicts) > 0 || !n.Sessions.Healthy()
}

// Show implements output.Page.
func (n Node) Show(c *output.Canvas) {
	var f facts
	f.add("Node", n.Name)
	f.bad("Kept out", n.Obstacles...)
	if !n.Reported.IsZero() {
		f.add("Reported", output.Age(n.Sessions.Time.Sub(n.Reported))+" ago")
	}
	if len(n.Segments) > 0 {
		f.add("Segments", strings.Join(n.Segments, ", "))
	}
	if len(n.Gateways) > 0 {
		f.add("Gateways", strings.Join(output.Strings(n.Gateways), ", "))
	}
	if len(n.Watchers) > 0 {
		f.add("Watched by", strings.Join(n.Watchers, ", ")+", if all speakers are alive")
		f.add("Watches", strings.Join(n.Watches, ", "))
	}
	if n.Late.Milliseconds > 0 {
		f.add("Late", fmt.Sprintf("its heartbeats, %s, %d or more times in the hour", n.Late, n.Late.Times))
	}
	f.add("Layer 2", fmt.Sprintf("owns %s, by the plan", output.Count(len(n.Owns), "VIP", "VIPs")))
	if n.NoRules != "" {
		f.bad("Connections", "it hands none over: "+n.NoRules)
	}
	f.add("BGP", fmt.Sprintf("announces %s over %s, by the plan", output.Count(n.Routed, "VIP", "VIPs"),
		output.Count(len(n.Sessions.Sessions), "session", "sessions")))
	f.bad("Conflict", output.Strings(n.Conflicts)...)
	Help{Keys: n.Keys}.show(&f)
	c.Rows(nil, f)

	var rows [][]any
	for _, o := range n.Owns {
		rows = append(rows, []any{o.VIP, strings.Join(o.Services, ", ")})
	}
	c.Table([]string{"OWNS", "SERVICES"}, rows)
	rows = nil
	for _, o := range n.Out {
		rows = append(rows, []any{string(o.Reason), len(o.VIPs), output.List(output.Strings(o.VIPs), 3), o.Message})
	}
	c.Table([]string{"DOES NOT OWN", "VIPS", "", "FOR EXAMPLE"}, rows)
	if len(n.Sessions.Sessions) > 0 {
		c.Blank()
		n.Sessions.Show(c)
	}
}
