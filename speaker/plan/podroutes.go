package plan

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"

	"github.com/google/btree"

	"github.com/lodestone-lb/lodestone/pkg/config"
	"github.com/lodestone-lb/lodestone/pkg/reason"
)

// PodRoutes are the routes to pods that concern a node.
type PodRoutes struct {
	// Mode is the mode in the configuration. Empty: Lodestone makes no routes.
	Mode config.RouteMode
	// Routes are the routes in the node's kernel to the pods of other nodes.
	Routes map[netip.Prefix]PodRoute
	// Own are the node's own pod CIDRs to which other nodes or routers may have routes.
	Own []netip.Prefix
	// Refused are the pod CIDRs without a route, in order: in mode kernel those of all nodes, in mode
	// bgp those of this node.
	Refused []RefusedCIDR
}

// PodRoute is the next hop of the pods of a node.
type PodRoute struct {
	Node string
	// Via is the node's address.
	Via netip.Addr
}

// RefusedCIDR is a pod CIDR of a node to which there is no route.
type RefusedCIDR struct {
	Node   string
	CIDR   string // as the Node has it
	Reason PodRefusal
	// Message is a sentence for people, with what to do.
	Message string
}

// PodRefusal is a stable code for why there is no route to a pod CIDR.
type PodRefusal string

// The refusals that follow from Nodes and the configuration. PodRefusals explains them.
const (
	CIDRInvalid      PodRefusal = "CIDRInvalid"
	CIDRTooWide      PodRefusal = "CIDRTooWide"
	CIDROutside      PodRefusal = "CIDROutside"
	CIDRNotPermitted PodRefusal = "CIDRNotPermitted"
	CIDRTaken        PodRefusal = "CIDRTaken"
	CIDROfNodes      PodRefusal = "CIDROfNodes"
	NoAddressOfNodes PodRefusal = "NoAddressOfNodes"
)

// PodRefusals explains the refusals that follow from Nodes and the configuration.
func PodRefusals() reason.Texts[PodRefusal] {
	return reason.Texts[PodRefusal]{
		CIDRInvalid: {Cause: "The pod CIDR is not a prefix that pods can have: unreadable, IPv4 in IPv6 form, link-local, multicast, " +
			"loopback.", Cure: "Correct the Node's spec.podCIDRs, which takes deleting and registering it anew."},
		CIDRTooWide: {Cause: "The pod CIDR is wider than /8, or /32 in IPv6: such a route takes the traffic of others.",
			Cure: "Correct the Node's spec.podCIDRs, which takes deleting and registering it anew."},
		CIDRNotPermitted: {Cause: "Pods are announced to routers, and the configuration's bgpPermit does not contain the pod CIDR.",
			Cure: "Correct the Node, or bgpPermit.", Keys: []string{"bgpPermit"}},
		CIDROutside: {Cause: "The configuration's routes.cidrs do not contain the pod CIDR.", Cure: "Correct the Node, or routes.cidrs.",
			Keys: []string{"routes.cidrs"}},
		CIDRTaken: {Cause: "The pod CIDR overlaps that of an older Node, which keeps its route.",
			Cure: "Give the younger node another one."},
		CIDROfNodes: {Cause: "The pod CIDR contains the address of its own node or of an older one.",
			Cure: "The networks of pods and nodes must not overlap: change one of them."},
		NoAddressOfNodes: {Cause: "The node has no InternalIP of the CIDR's family, so the route has no next hop.",
			Cure: "Correct the kubelet's --node-ip."},
	}
}

// The largest pod CIDR of a node is an IPv4 /8 or an IPv6 /32. A larger one is a mistake, or an attempt to
// get the traffic of others.
const minPodBits4, minPodBits6 = 8, 32

// podCIDR is a pod CIDR in a Node's spec.
type podCIDR struct {
	node    string
	text    string
	prefix  netip.Prefix // invalid: refused
	refused PodRefusal
	message string
}

// PodRoutesOf returns the routes to pods that concern the node. It is pure: all speakers decide the same
// about a CIDR.
func PodRoutesOf(self string, c *config.Config, nodes map[string]Node) PodRoutes {
	if c == nil || c.Routes == nil {
		return PodRoutes{}
	}
	routes := PodRoutes{Mode: c.Routes.Mode, Routes: map[netip.Prefix]PodRoute{}}
	for _, p := range podCIDRs(c, nodes) {
		n, other := nodes[p.node], p.node != self
		via := n.address(p.prefix.Addr().Is4())
		if other && c.Routes.Mode != config.RoutesKernel {
			continue
		}
		if other && p.refused == "" && !via.IsValid() {
			p.refuse(NoAddressOfNodes, "node %s has no InternalIP of the family of its pod CIDR %s: routes have no next hop", p.node, p.text)
		}
		switch {
		case p.refused != "":
			routes.Refused = append(routes.Refused, RefusedCIDR{p.node, p.text, p.refused, p.message})
		case other:
			routes.Routes[p.prefix] = PodRoute{p.node, via}
		default:
			routes.Own = append(routes.Own, p.prefix)
		}
	}
	return routes
}

// podCIDRs returns the pod CIDRs of all nodes, checked and ordered by node.
func podCIDRs(c *config.Config, nodes map[string]Node) []*podCIDR {
	var all, sound []*podCIDR
	for name, n := range nodes {
		for _, text := range n.PodCIDRs {
			p := readPodCIDR(name, text, c)
			if all = append(all, p); p.refused == "" {
				sound = append(sound, p)
			}
		}
	}
	refuseNodes(sound, nodes)
	refuseTaken(sound, nodes)
	slices.SortFunc(all, func(a, b *podCIDR) int { return cmp.Or(cmp.Compare(a.node, b.node), cmp.Compare(a.text, b.text)) })
	return all
}

func (p *podCIDR) refuse(why PodRefusal, format string, args ...any) {
	p.refused, p.message = why, fmt.Sprintf(format, args...)
}

// readPodCIDR reads the CIDR and refuses what no node should have.
func readPodCIDR(node, text string, c *config.Config) *podCIDR {
	r := c.Routes
	p := &podCIDR{node: node, text: text}
	prefix, err := netip.ParsePrefix(text)
	p.prefix = prefix.Masked()
	minBits := minPodBits4
	if p.prefix.Addr().Is6() {
		minBits = minPodBits6
	}
	switch a := p.prefix.Addr(); {
	case err != nil:
		p.refuse(CIDRInvalid, "the pod CIDR %.60q of node %s is not a prefix", p.text, p.node)
	case a.Is4In6():
		p.refuse(CIDRInvalid, "the pod CIDR %s of node %s is an IPv4 prefix in IPv6 form", p.text, p.node)
	case p.prefix.Bits() < minBits:
		p.refuse(CIDRTooWide, "the pod CIDR %s of node %s is wider than /%d: its route would take the traffic of others", p.text, p.node, minBits)
	case !a.IsGlobalUnicast():
		p.refuse(CIDRInvalid, "the pod CIDR %s of node %s is none of pods: it is link-local, multicast, loopback or unspecified", p.text, p.node)
	case len(r.CIDRs) > 0 && !slices.ContainsFunc(r.CIDRs, func(c netip.Prefix) bool { return contains(c, p.prefix) }):
		p.refuse(CIDROutside, "the pod CIDR %s of node %s is outside of routes.cidrs of the configuration: %v", p.text, p.node, r.CIDRs)
	case r.Mode == config.RoutesBGP && c.Permit != nil && !c.Permit.ContainsPrefix(p.prefix):
		p.refuse(CIDRNotPermitted, "the pod CIDR %s of node %s is not in bgpPermit of the configuration, which lists all that may be announced",
			p.text, p.node)
	}
	return p
}

// older orders nodes by age: a younger node must not take the traffic of an older one.
func older(nodes map[string]Node, a, b string) int {
	return cmp.Or(nodes[a].Created.Compare(nodes[b].Created), cmp.Compare(a, b))
}

// refuseNodes refuses the CIDRs that contain the address of their own node or of an older one: the route
// would cut that node off. The first address of each family counts, which routes use: whoever has taken a node over can have it
// report more, one in the CIDR of each younger node.
func refuseNodes(all []*podCIDR, nodes map[string]Node) {
	byPrefix, lengths := map[netip.Prefix][]*podCIDR{}, map[int]bool{}
	for _, p := range all {
		byPrefix[p.prefix] = append(byPrefix[p.prefix], p)
		lengths[p.prefix.Bits()] = true
	}
	for name, n := range nodes {
		for _, a := range [...]netip.Addr{n.address(true), n.address(false)} {
			for bits := range lengths {
				prefix, _ := a.Prefix(bits)
				if !prefix.IsValid() {
					continue // IPv4 does not have so many bits, and a node may have one family alone
				}
				for _, p := range byPrefix[prefix] {
					if older(nodes, name, p.node) <= 0 {
						p.refuseNode(name, a)
					}
				}
			}
		}
	}
}

// refuseNode refuses the CIDR because of the address. Of several addresses the message names the same
// one, whatever their order.
func (p *podCIDR) refuseNode(name string, a netip.Addr) {
	message := fmt.Sprintf("node %s has the address %s within the pod CIDR %s of node %s: their networks must not overlap", name, a,
		p.text, p.node)
	if p.refused == "" || message < p.message {
		p.refused, p.message = CIDROfNodes, message
	}
}

// refuseTaken refuses the CIDRs that overlap the CIDR of an older node which is not refused itself.
func refuseTaken(all []*podCIDR, nodes map[string]Node) {
	all = slices.DeleteFunc(all, func(p *podCIDR) bool { return p.refused != "" })
	slices.SortFunc(all, func(a, b *podCIDR) int { return cmp.Or(older(nodes, a.node, b.node), cmp.Compare(a.text, b.text)) })
	// None of these overlaps another one, so what overlaps a prefix begins next before or after its beginning, or there.
	taken := btree.NewG(32, func(a, b *podCIDR) bool { return a.prefix.Addr().Less(b.prefix.Addr()) })
	for _, p := range all {
		refuseOverlap := func(old *podCIDR) bool {
			if p.refused == "" && old.prefix.Overlaps(p.prefix) {
				p.refuse(CIDRTaken, "the pod CIDR %s of node %s overlaps %s of node %s, which is older: give one of them another", p.text, p.node,
					old.text, old.node)
			}
			return false
		}
		taken.DescendLessOrEqual(p, refuseOverlap)
		taken.AscendGreaterOrEqual(p, refuseOverlap)
		if p.refused == "" {
			taken.ReplaceOrInsert(p)
		}
	}
}

// announcedPods returns the node's own pod CIDRs, if they are announced by BGP.
func announcedPods(node string, s Snapshot) []netip.Prefix {
	if s.Config == nil || s.Config.Routes == nil || s.Config.Routes.Mode != config.RoutesBGP {
		return nil
	}
	return PodRoutesOf(node, s.Config, s.Nodes).Own
}

// announcePods announces the node's pod CIDRs to the peers that the configuration names. Only the end of
// a session withdraws them: the pods of a node that takes no traffic for VIPs need their routes, too.
func (r *router) announcePods() {
	if len(r.pods) == 0 {
		return
	}
	o := &offer{Advertisement: &config.Advertisement{BGP: &config.BGP{}}, index: len(r.config.Advertisements)}
	for name := range r.sessions {
		if r.config.Routes.AdvertisesTo(name) {
			o.peers = append(o.peers, name)
		}
	}
	if len(o.peers) == 0 {
		return
	}
	for _, prefix := range r.pods {
		r.table.announce(prefix, o)
	}
}
