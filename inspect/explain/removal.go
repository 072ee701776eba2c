package explain

import (
	"cmp"
	"fmt"
	"maps"
	"net/netip"
	"slices"

	"github.com/lodestone-lb/lodestone/inspect/bgp"
	"github.com/lodestone-lb/lodestone/inspect/cluster"
	"github.com/lodestone-lb/lodestone/inspect/output"
	"github.com/lodestone-lb/lodestone/inspect/simulation"
)

// Removal explains a node that leaves.
type Removal struct {
	Node string             `json:"node"`
	How  simulation.Removal `json:"how"`
	// Orphaned are the VIPs that nobody would announce.
	Orphaned []Orphan `json:"orphaned"`
	// Moved are those that other nodes would own by layer 2.
	Moved []Shift `json:"moved"`
	// Silent are those that nobody announces even now.
	Silent []netip.Addr `json:"silent,omitempty"`
	// Load is how many VIPs each node owns by layer 2.
	Load []Load `json:"load"`
	// Routes are the node's, each with the nodes that would still announce it.
	Routes []Remaining `json:"routes"`
	// Notice is how soon the router of each peer of the node notices; only with
	// simulation.Lose.
	Notice []Notice `json:"notice,omitempty"`
}

// Load is how many VIPs a node owns.
type Load struct {
	Node   string `json:"node"`
	Before int    `json:"before"`
	After  int    `json:"after"`
}

// Remaining is a route that the node announces to a peer now.
type Remaining struct {
	Prefix netip.Prefix `json:"prefix"`
	Peer   string       `json:"peer"`
	// Nodes would still announce it.
	Nodes []string `json:"nodes"`
}

// Notice is how soon a router notices that the node is gone.
type Notice struct {
	Peer string `json:"peer"`
	How  string `json:"how"`
}

// OfRemoval returns what would become of the VIPs without the node.
func OfRemoval(o *cluster.Objects, node string, how simulation.Removal) Removal {
	before := o.Network()
	after := before.Without(node, how)
	r := Removal{Node: node, How: how, Routes: []Remaining{}}
	r.Moved, r.Orphaned = movesOf(before, after)
	r.Moved = slices.DeleteFunc(r.Moved, func(s Shift) bool { return s.Before.Owner == s.After.Owner })
	r.weigh(before.Who(), after.Who())
	r.routes(before, after)
	if how == simulation.Lose {
		due, _ := before.Sessions(node)
		for _, peer := range slices.Sorted(maps.Keys(due)) {
			r.Notice = append(r.Notice, Notice{peer, Detection(due[peer].Peer)})
		}
	}
	return r
}

// weigh counts what each node owns, and notes what nobody announces even now.
func (r *Removal) weigh(before, after map[netip.Addr]simulation.Audience) {
	count := map[string]*Load{}
	of := func(node string) *Load {
		if count[node] == nil {
			count[node] = &Load{Node: node}
		}
		return count[node]
	}
	for vip, was := range before {
		if was.Owner != "" {
			of(was.Owner).Before++
		}
		if owner := after[vip].Owner; owner != "" {
			of(owner).After++
		}
		if was.Silent() {
			r.Silent = append(r.Silent, vip)
		}
	}
	for _, node := range slices.Sorted(maps.Keys(count)) {
		r.Load = append(r.Load, *count[node])
	}
	slices.SortFunc(r.Silent, netip.Addr.Compare)
}

// routes notes who would still announce what the node announces now.
func (r *Removal) routes(before, after *simulation.Network) {
	type announced struct {
		prefix netip.Prefix
		peer   string
	}
	left := map[announced][]string{}
	for _, route := range bgp.RoutesOf(after, bgp.Filter{}).Routes {
		at := announced{route.Prefix, route.Peer}
		left[at] = append(left[at], route.Node)
	}
	for _, route := range bgp.RoutesOf(before, bgp.Filter{Node: r.Node}).Routes {
		nodes := left[announced{route.Prefix, route.Peer}]
		r.Routes = append(r.Routes, Remaining{route.Prefix, route.Peer, append([]string{}, nodes...)})
	}
	slices.SortStableFunc(r.Routes, func(a, b Remaining) int { return cmp.Compare(min(len(a.Nodes), 1), min(len(b.Nodes), 1)) })
}

// Troubled implements Story.
func (r Removal) Troubled() bool { return len(r.Orphaned) > 0 }

// Show implements output.Page.
func (r Removal) Show(c *output.Canvas) {
	what := "drained"
	if r.How == simulation.Lose {
		what = "lost"
	}
	c.Line(output.Heading, "Node %s %s: %s to other nodes, %s announced by nobody.", r.Node, what,
		output.Count(len(r.Moved), "VIP moves", "VIPs move"), output.Count(len(r.Orphaned), "VIP is", "VIPs are"))
	c.Line(output.Plain, "Its pods are taken for gone, and none for started elsewhere.")

	showMoves(c, r.Moved, r.Orphaned)
	var rows [][]any
	for _, l := range r.Load {
		rows = append(rows, []any{l.Node, l.Before, l.After})
	}
	c.Table([]string{"NODE", "OWNS NOW", "OWNS THEN"}, rows)
	rows = nil
	for _, route := range r.Routes {
		nodes := output.Cell{Text: fmt.Sprintf("%d: %s", len(route.Nodes), output.List(route.Nodes, 3))}
		if len(route.Nodes) == 0 {
			nodes = output.Cell{Text: "none", Tone: output.Bad}
		}
		rows = append(rows, []any{route.Prefix, route.Peer, nodes})
	}
	c.Table([]string{"ROUTE OF THE NODE", "PEER", "NODES THAT STILL ANNOUNCE IT"}, rows)
	rows = nil
	for _, n := range r.Notice {
		rows = append(rows, []any{n.Peer, n.How})
	}
	c.Table([]string{"PEER", "NOTICES"}, rows)
	if len(r.Silent) > 0 {
		c.Blank()
		c.Line(output.Warning, "Announced by nobody even now: %s", output.List(output.Strings(r.Silent), 5))
	}
}
