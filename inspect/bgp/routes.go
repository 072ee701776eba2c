package bgp

import (
	"cmp"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"

	"github.com/lodestone-lb/lodestone/inspect/output"
	"github.com/lodestone-lb/lodestone/inspect/simulation"
	"github.com/lodestone-lb/lodestone/pkg/config"
	"github.com/lodestone-lb/lodestone/speaker/plan"
)

// Route is a prefix that a node announces to a peer, with the attributes that it sends.
type Route struct {
	Node   string       `json:"node"`
	Peer   string       `json:"peer"`
	Prefix netip.Prefix `json:"prefix"`
	// Communities are standard and large ones, by their names where they have
	// some.
	Communities []string `json:"communities,omitempty"`
	// LocalPreference is sent to internal peers alone, and the path is prepended for external ones alone.
	LocalPreference *uint32 `json:"localPreference,omitempty"`
	MED             *uint32 `json:"med,omitempty"`
	// Prepend is how many times more than once the local AS number is in the
	// path.
	Prepend int `json:"prepend,omitempty"`
}

// Unrouted is a VIP that is announced to no router.
type Unrouted struct {
	VIP     netip.Addr  `json:"vip"`
	Reason  plan.Reason `json:"reason"`
	Message string      `json:"message"`
}

// Routes are what the nodes announce by the plan.
type Routes struct {
	Routes []Route `json:"routes"`
	// Unrouted are the VIPs that nobody announces by BGP though an advertisement
	// by BGP is for them, or nobody announces at all.
	Unrouted []Unrouted `json:"unrouted"`
}

// Filter selects routes. The zero value: all.
type Filter struct {
	Node, Peer string
	// Within is an address or a prefix: routes that contain it, or are in it.
	Within netip.Prefix
}

func (f Filter) covers(p netip.Prefix) bool { return !f.Within.IsValid() || f.Within.Overlaps(p) }

// concerned returns the VIPs on which routes within the filter depend: an aggregate depends on all VIPs in it.
func (f Filter) concerned(n *simulation.Network) (vips []netip.Addr) {
	for vip := range n.ServicesByVIP() {
		if f.covers(netip.PrefixFrom(vip, vip.BitLen())) || slices.ContainsFunc(n.Config.Advertisements, func(a config.Advertisement) bool {
			return a.BGP != nil && f.covers(a.BGP.Aggregate(vip))
		}) {
			vips = append(vips, vip)
		}
	}
	return vips
}

// RoutesOf returns the routes that the filter lets pass.
func RoutesOf(n *simulation.Network, f Filter) Routes {
	all := Routes{[]Route{}, []Unrouted{}}
	if f.Within.IsValid() && n.Config != nil {
		n = n.Of(f.concerned(n)...)
	}
	heard := map[netip.Addr]bool{}
	nodes := maps.Keys(n.Nodes)
	if f.Node != "" {
		nodes = slices.Values([]string{f.Node})
	}
	n.EachBGP(nodes, func(node string, b plan.BGP) {
		for vip := range b.VIPs {
			heard[vip] = true
		}
		for prefix, route := range b.Routes {
			for peer, attributes := range route {
				if (f.Peer == "" || f.Peer == peer) && f.covers(prefix) {
					r := newRoute(b.Sessions[peer], attributes)
					r.Node, r.Prefix = node, prefix
					all.Routes = append(all.Routes, r)
				}
			}
		}
	})
	slices.SortFunc(all.Routes, Route.compare)
	if f.Node == "" && f.Peer == "" {
		all.unrouted(n, f, heard)
	}
	return all
}

// unrouted adds the VIPs that are announced to no router.
func (all *Routes) unrouted(n *simulation.Network, f Filter, heard map[netip.Addr]bool) {
	var vips []netip.Addr
	for vip := range n.ServicesByVIP() {
		if !heard[vip] && f.covers(netip.PrefixFrom(vip, vip.BitLen())) && n.ForRouters(vip) {
			vips = append(vips, vip)
		}
	}
	why := n.Silences(vips)
	slices.SortFunc(vips, netip.Addr.Compare)
	for _, vip := range vips {
		all.Unrouted = append(all.Unrouted, Unrouted{vip, why[vip].Reason, why[vip].Message})
	}
}

// newRoute returns what is sent to the router of the session.
func newRoute(s plan.Session, a plan.Attributes) Route {
	r := Route{Peer: s.Peer.Name, MED: a.MED}
	if s.Internal() {
		r.LocalPreference = a.LocalPreference
	} else {
		r.Prepend = a.Prepend
	}
	for _, c := range a.Communities {
		r.Communities = append(r.Communities, c.String())
	}
	for _, c := range a.LargeCommunities {
		r.Communities = append(r.Communities, c.String())
	}
	return r
}

func (r Route) compare(other Route) int {
	return cmp.Or(r.Prefix.Compare(other.Prefix), cmp.Compare(r.Node, other.Node), cmp.Compare(r.Peer, other.Peer))
}

// Show implements output.Page.
func (all Routes) Show(c *output.Canvas) {
	if len(all.Routes) == 0 {
		c.Line(output.Plain, "No node announces such a route by BGP.")
	}
	var rows [][]any
	for _, r := range all.Routes {
		rows = append(rows, []any{r.Prefix, r.Node, r.Peer, optional(r.LocalPreference), optional(r.MED), prepended(r.Prepend),
			cmp.Or(strings.Join(r.Communities, " "), "-")})
	}
	c.Rows([]string{"PREFIX", "NODE", "PEER", "LOCAL PREF", "MED", "PREPEND", "COMMUNITIES"}, rows)
	rows = nil
	for _, u := range all.Unrouted {
		rows = append(rows, []any{u.VIP, output.Cell{Text: string(u.Reason), Tone: output.Bad}, u.Message})
	}
	c.Table([]string{"NOT ROUTED", "REASON", ""}, rows)
}

func optional(n *uint32) string {
	if n == nil {
		return "-"
	}
	return fmt.Sprint(*n)
}

func prepended(n int) string {
	if n == 0 {
		return "-"
	}
	return fmt.Sprintf("%dx", n)
}
