package routing

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"

	"github.com/lodestone-lb/lodestone/pkg/screen"
	"github.com/lodestone-lb/lodestone/pkg/simulation"
	"github.com/lodestone-lb/lodestone/speaker/plan"
)

// Route is a prefix that a node announces to a peer, as the router is told it.
type Route struct {
	Node   string       `json:"node"`
	Peer   string       `json:"peer"`
	Prefix netip.Prefix `json:"prefix"`
	// Communities are standard and large ones, by their names where they have
	// some.
	Communities []string `json:"communities,omitempty"`
	// LocalPreference is told to internal peers alone, Prepend to external ones.
	LocalPreference *uint32 `json:"localPreference,omitempty"`
	MED             *uint32 `json:"med,omitempty"`
	// Prepend is how many times more than once the local AS number is in the
	// path.
	Prepend int `json:"prepend,omitempty"`
}

// Unrouted is a VIP of which no router hears.
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

// Filter says which routes are asked for. The zero value: all.
type Filter struct {
	Node, Peer string
	// Within is an address or a prefix: routes that contain it, or are in it.
	Within netip.Prefix
}

func (f Filter) matches(r Route) bool {
	return (f.Node == "" || r.Node == f.Node) && (f.Peer == "" || r.Peer == f.Peer) && f.covers(r.Prefix)
}

func (f Filter) covers(p netip.Prefix) bool { return !f.Within.IsValid() || f.Within.Overlaps(p) }

// RoutesOf returns the routes that the filter lets pass.
func RoutesOf(n *simulation.Network, f Filter) Routes {
	all := Routes{[]Route{}, []Unrouted{}}
	heard := map[netip.Addr]bool{}
	for _, node := range slices.Sorted(maps.Keys(n.Nodes)) {
		b := n.View(node).BGP
		for vip := range b.VIPs {
			heard[vip] = true
		}
		for prefix, route := range b.Routes {
			for peer, attributes := range route {
				if r := newRoute(b.Sessions[peer], attributes); f.matches(r.at(node, prefix)) {
					all.Routes = append(all.Routes, r.at(node, prefix))
				}
			}
		}
	}
	slices.SortFunc(all.Routes, Route.compare)
	if f.Node == "" && f.Peer == "" {
		all.unrouted(n, f, heard)
	}
	return all
}

// unrouted adds the VIPs of which no router hears.
func (all *Routes) unrouted(n *simulation.Network, f Filter, heard map[netip.Addr]bool) {
	vips := slices.SortedFunc(maps.Keys(n.ServicesByVIP()), netip.Addr.Compare)
	for _, vip := range vips {
		if heard[vip] || !f.covers(netip.PrefixFrom(vip, vip.BitLen())) || !n.ForRouters(vip) {
			continue
		}
		why := n.Silence(vip)
		all.Unrouted = append(all.Unrouted, Unrouted{vip, why.Reason, why.Message})
	}
}

// newRoute returns what the router of the session is told.
func newRoute(s plan.Session, a plan.Attributes) Route {
	r := Route{Peer: s.Peer.Name, MED: a.MED}
	if internal(s) {
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

// internal reports whether the session is within an AS (iBGP).
func internal(s plan.Session) bool {
	return s.Peer.PeerASN.Internal || s.Peer.PeerASN.Number == s.LocalASN
}

func (r Route) at(node string, prefix netip.Prefix) Route {
	r.Node, r.Prefix = node, prefix
	return r
}

func (r Route) compare(other Route) int {
	if c := r.Prefix.Compare(other.Prefix); c != 0 {
		return c
	}
	return strings.Compare(r.Node+" "+r.Peer, other.Node+" "+other.Peer)
}

// Show implements screen.Page.
func (all Routes) Show(c *screen.Canvas) {
	if len(all.Routes) == 0 {
		c.Line(screen.Plain, "No node announces such a route by BGP.")
	}
	var rows [][]any
	for _, r := range all.Routes {
		rows = append(rows, []any{r.Prefix, r.Node, r.Peer, optional(r.LocalPreference), optional(r.MED), prepended(r.Prepend), dash(strings.Join(r.Communities, " "))})
	}
	c.Rows([]string{"PREFIX", "NODE", "PEER", "LOCAL PREF", "MED", "PREPEND", "COMMUNITIES"}, rows)
	if len(all.Unrouted) == 0 {
		return
	}
	c.Blank()
	rows = nil
	for _, u := range all.Unrouted {
		rows = append(rows, []any{u.VIP, screen.Cell{Text: string(u.Reason), Tone: screen.Bad}, u.Message})
	}
	c.Rows([]string{"NOT ROUTED", "REASON", ""}, rows)
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

func dash(text string) string {
	if text == "" {
		return "-"
	}
	return text
}
