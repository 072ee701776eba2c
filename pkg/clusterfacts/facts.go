// Package clusterfacts finds in the cluster what the pools must not hand out:
// addresses of nodes, their default gateways, the API server's endpoints, the
// Services' and the pods' addresses; and the segments that nodes are on.
//
// Collect and Warnings are pure, so that the controller and the CLI come to
// the same answer. The Watcher keeps the answer up to date from caches that
// hold only what Collect reads.
//
// What nodes report counts within bounds, because a node may lie. A Lease counts only if its
// Node exists. It keeps at most report.MaxGateways addresses from being handed out, and two
// for each of maxAlone segments. Of a Node the first internal and the first external address of
// each family always count: whoever got one of them for a Service would get the node's traffic.
// All else that one node reports keeps half of a pool at most.
// controller/servicelb/ledger bounds what follows from the conflicts that a node reports.
//
// The files, from the outside in:
//
//	facts.go     Collect: from objects to Facts
//	warnings.go  what of a configuration makes no sense in this cluster
//	watcher.go   Watcher, the task: it keeps the Facts up to date
//	keep.go      what its caches keep of Nodes and Leases
package clusterfacts

import (
	"cmp"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"slices"

	"go4.org/netipx"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"

	"github.com/lodestone-lb/lodestone/pkg/annotation"
	"github.com/lodestone-lb/lodestone/pkg/config"
	"github.com/lodestone-lb/lodestone/pkg/report"
)

// maxAlone is how many segments count that a node reports and no other node does. The network
// and broadcast addresses of these are not handed out.
const maxAlone = 16

// Facts are what is known of the cluster's addresses. They are immutable.
type Facts struct {
	// Forbidden is what must never be handed out, sorted; ranges may overlap.
	Forbidden []Forbidden
	// Segments are the subnets that nodes announce VIPs on, sorted, each once.
	// Nil: no speaker has reported yet.
	Segments []netip.Prefix
	// Conflicts are the VIPs that other hosts claim, sorted, each once.
	Conflicts []Conflict
}

// Conflict is a VIP that another host claims according to the reports of speakers.
type Conflict struct {
	// Conflict is as the first node reports it. Announced is set if any node reports that.
	report.Conflict
	// Nodes are those that report it, by name.
	Nodes []string
}

// Equal reports whether both are the same.
func (d Conflict) Equal(other Conflict) bool {
	return d.Conflict == other.Conflict && slices.Equal(d.Nodes, other.Nodes)
}

// String names the host that claims the VIP, as in "the host 02:00:00:00:00:0c (seen by
// node n1)".
func (d Conflict) String() string {
	others := ""
	if n := len(d.Nodes) - 1; n > 0 {
		others = fmt.Sprintf(" and %d more", n)
	}
	return fmt.Sprintf("the host %s (seen by node %s%s)", net.HardwareAddr(d.HardwareAddr[:]), d.Nodes[0], others)
}

// Forbidden is a range of addresses that must never be handed out.
type Forbidden struct {
	Range netipx.IPRange
	// Why completes the sentence "203.0.113.1 is ...".
	Why string
	// Node is the one that reports it, if nothing else shows it and it may be a lie.
	Node string
	// rank orders what one node reports: of a pool the lower ones count first.
	rank rank
	// Pods is set if the reason is the pod CIDR of Nodes, and nothing else.
	Pods bool
}

// rank is how much harm it does to hand out an address that a node has reported as its own.
type rank int

const (
	sourceRank  rank = iota // breaks the sessions of a node
	gatewayRank             // breaks a segment
	segmentRank             // breaks the Service that gets it
	othersRank              // a Node's second address of a kind, which few have
)

// Forbid returns all that the pools of the configuration must not hand out: the addresses that
// the cluster uses, and those that the configuration names as used by others. The slice is the
// caller's; cfg and f may be nil.
func Forbid(cfg *config.Config, f *Facts) []Forbidden {
	var all []Forbidden
	if f != nil {
		all = append(all, f.Forbidden...)
	}
	if cfg == nil {
		return all
	}
	if cfg.Routes != nil && len(cfg.Routes.CIDRs) > 0 { // where pods are, whatever Nodes have
		all = slices.DeleteFunc(all, func(x Forbidden) bool { return x.Pods })
	}
	all = withinShares(cfg.Pools, all)
	for _, p := range cfg.Peers {
		if p.Address.IsValid() && p.Address.Zone() == "" {
			all = append(all, Forbidden{Range: netipx.IPRangeFrom(p.Address, p.Address), Why: fmt.Sprintf("the address of BGP peer %q", p.Name)})
		}
		if p.SourceAddress.IsValid() {
			all = append(all, Forbidden{Range: netipx.IPRangeFrom(p.SourceAddress, p.SourceAddress),
				Why: fmt.Sprintf("a node's end of the sessions with BGP peer %q", p.Name)})
		}
	}
	if cfg.Routes != nil {
		for _, cidr := range cfg.Routes.CIDRs {
			all = append(all, Forbidden{Range: netipx.RangeOfPrefix(cidr), Why: "among the pods' addresses, by routes.cidrs " + cidr.String()})
		}
	}
	return all
}

// withinShares leaves out what one node alone reports, beyond half of a pool, so that a node that lies
// cannot close a pool.
func withinShares(pools []config.Pool, all []Forbidden) []Forbidden {
	if !slices.ContainsFunc(all, func(f Forbidden) bool { return f.Node != "" }) {
		return all
	}
	type share struct {
		pool   int
		isIPv4 bool
		node   string
	}
	var pieces []piece
	sizes, taken := map[share]float64{}, map[share]float64{}
	for i := range pools {
		for _, p := range piecesOf(pools[i].Free, i) {
			pieces = append(pieces, p)
			sizes[share{i, p.From().Is4(), ""}] += config.SizeOf(p.IPRange)
		}
	}
	slices.SortFunc(pieces, func(p, q piece) int { return p.From().Compare(q.From()) })
	beyond := map[netipx.IPRange]bool{} // each range is there once
	for r := sourceRank; r <= othersRank; r++ {
		for _, f := range all {
			if f.Node == "" || f.rank != r {
				continue
			}
			for _, p := range overlapping(pieces, f.Range) {
				s := share{p.pool, p.From().Is4(), f.Node}
				taken[s]++
				beyond[f.Range] = beyond[f.Range] || taken[s] > max(1, sizes[share{s.pool, s.isIPv4, ""}]/2)
			}
		}
	}
	return slices.DeleteFunc(all, func(f Forbidden) bool { return beyond[f.Range] })
}

// Objects are what Collect reads, in any order. Each kind may be missing.
type Objects struct {
	Nodes []*corev1.Node
	// Leases are those of the speakers; others are ignored.
	Leases       []*coordinationv1.Lease
	ServiceCIDRs []*networkingv1.ServiceCIDR
	// APIServer are the EndpointSlices of the Service default/kubernetes.
	APIServer []*discoveryv1.EndpointSlice
	// Kubernetes is the Service default/kubernetes. It has the first address of the Service
	// CIDR. API servers before v1.33 have no ServiceCIDR objects.
	Kubernetes *corev1.Service
}

// Collect returns the facts that follow from the objects. The same objects in any order give
// the same answer. Malformed parts are ignored.
func Collect(o Objects) *Facts {
	var all bans
	f := &Facts{}
	nodes, reporters := map[string]*corev1.Node{}, map[netip.Prefix]map[string]bool{}
	for _, n := range o.Nodes {
		nodes[n.Name] = n
		all.node(n)
	}
	for _, l := range o.Leases {
		node, ok := report.NodeOf(l.Name)
		if !ok || nodes[node] == nil {
			continue
		}
		n := report.Of(l.Annotations)
		for _, g := range n.Gateways {
			all.add(netipx.IPRangeFrom(g, g), "the default gateway", node)
			all[len(all)-1].by, all[len(all)-1].rank = node, gatewayRank
		}
		if n.Segments != nil && f.Segments == nil {
			f.Segments = []netip.Prefix{}
		}
		for _, s := range n.Segments {
			f.Segments = append(f.Segments, s.Subnet)
			if reporters[s.Subnet] == nil {
				reporters[s.Subnet] = map[string]bool{}
			}
			reporters[s.Subnet][node] = true
		}
		if l.Spec.HolderIdentity == nil || isDown(nodes[node]) {
			continue // its speaker no longer probes whether other hosts have its VIPs
		}
		for _, c := range n.Conflicts {
			f.Conflicts = append(f.Conflicts, Conflict{Conflict: c, Nodes: []string{node}})
		}
	}
	f.Conflicts = mergeConflicts(f.Conflicts)
	slices.SortFunc(f.Segments, netip.Prefix.Compare)
	f.Segments = slices.Compact(f.Segments)
	all.segments(f.Segments, reporters)
	for _, s := range o.APIServer {
		for _, e := range s.Endpoints {
			for _, text := range e.Addresses {
				all.addr(text, "an endpoint of the API server", "")
			}
		}
	}
	all.services(o.ServiceCIDRs, o.Kubernetes)
	f.Forbidden = all.merge()
	return f
}

// Equal reports whether both are the same.
func (f *Facts) Equal(other *Facts) bool {
	return slices.Equal(f.Forbidden, other.Forbidden) && slices.Equal(f.Segments, other.Segments) &&
		slices.EqualFunc(f.Conflicts, other.Conflicts, Conflict.Equal) &&
		(f.Segments == nil) == (other.Segments == nil)
}

// isDown reports whether the node is known not to be ready.
func isDown(n *corev1.Node) bool {
	return slices.ContainsFunc(n.Status.Conditions, func(c corev1.NodeCondition) bool {
		return c.Type == corev1.NodeReady && c.Status != corev1.ConditionTrue
	})
}

// mergeConflicts sorts the conflicts and joins those over one VIP.
func mergeConflicts(all []Conflict) []Conflict {
	slices.SortFunc(all, func(d, e Conflict) int {
		return cmp.Or(d.VIP.Compare(e.VIP), cmp.Compare(d.Nodes[0], e.Nodes[0]), d.Conflict.Compare(e.Conflict))
	})
	var merged []Conflict
	for i, d := range all {
		if i == 0 || all[i-1].VIP != d.VIP {
			merged = append(merged, d)
			continue
		}
		m := &merged[len(merged)-1]
		m.Announced = m.Announced || d.Announced
		if all[i-1].Nodes[0] != d.Nodes[0] {
			m.Nodes = append(m.Nodes, d.Nodes[0])
		}
	}
	return merged
}

// ban is one reason not to hand out a range.
type ban struct {
	netipx.IPRange
	// what the range is, of the node if it is one of a node.
	what, node string
	// by is the only node that reports it, rank how much that counts.
	by   string
	rank rank
	// isPods is set for a pod CIDR.
	isPods bool
}

func (b ban) compare(c ban) int {
	if n := b.From().Compare(c.From()); n != 0 { // nearly always
		return n
	}
	return cmp.Or(b.To().Compare(c.To()), cmp.Compare(b.what, c.what), cmp.Compare(b.node, c.node))
}

// ownOf returns the addresses of a segment that are not those of a single host.
func ownOf(segment netip.Prefix) bans {
	all := netipx.RangeOfPrefix(segment)
	first, last := netipx.IPRangeFrom(all.From(), all.From()), netipx.IPRangeFrom(all.To(), all.To())
	switch {
	case segment.Addr().BitLen()-segment.Bits() < 2: // between two hosts: RFC 3021, RFC 6164
		return nil
	case segment.Addr().Is4():
		return bans{{IPRange: first, what: "the network address of " + segment.String()},
			{IPRange: last, what: "the broadcast address of " + segment.String()}}
	default: // RFC 4291, section 2.6.1: every router has it, and a node that forwards IPv6 is one
		return bans{{IPRange: first, what: "the subnet-router anycast address of " + segment.String()}}
	}
}

type bans []ban

func (all *bans) add(r netipx.IPRange, what, node string) {
	*all = append(*all, ban{IPRange: r, what: what, node: node})
}

// addr adds the address that the text spells, if it spells one.
func (all *bans) addr(text, what, node string) {
	if a, err := netip.ParseAddr(text); err == nil && a.Zone() == "" {
		all.add(netipx.IPRangeFrom(a.Unmap(), a.Unmap()), what, node)
	}
}

// prefix adds the prefix that the text spells, if it spells one.
func (all *bans) prefix(text, what, node string) {
	if p, err := netip.ParsePrefix(text); err == nil && !p.Addr().Is4In6() {
		all.add(netipx.RangeOfPrefix(p), what+" "+p.Masked().String(), node)
	}
}

func (all *bans) node(n *corev1.Node) {
	sources, _ := annotation.ParseBGPSourceAddress(n.Annotations[annotation.BGPSourceAddress]) // the speaker reports what is wrong with it
	for _, a := range sources {
		if a.IsGlobalUnicast() {
			*all = append(*all, ban{IPRange: netipx.IPRangeFrom(a, a), what: "the source address of BGP sessions", node: n.Name, by: n.Name})
		}
	}
	all.addresses(n)
	before := len(*all)
	for _, cidr := range n.Spec.PodCIDRs {
		all.prefix(cidr, "in the pod CIDR", n.Name)
	}
	for i := range (*all)[before:] {
		(*all)[before+i].isPods = true
	}
}

// addresses adds the addresses of a Node. The first ones of their type and family always count.
func (all *bans) addresses(n *corev1.Node) {
	type kind struct {
		corev1.NodeAddressType
		isIPv4 bool
	}
	first, certain := map[kind]bool{}, map[netip.Addr]bool{}
	var others []netip.Addr
	for _, a := range n.Status.Addresses {
		addr, err := netip.ParseAddr(a.Address)
		if err != nil || addr.Zone() != "" || a.Type != corev1.NodeInternalIP && a.Type != corev1.NodeExternalIP {
			continue
		}
		addr = addr.Unmap()
		if k := (kind{a.Type, addr.Is4()}); !first[k] {
			first[k], certain[addr] = true, true
		} else {
			others = append(others, addr)
		}
	}
	const what = "the address"
	for addr := range certain {
		all.add(netipx.IPRangeFrom(addr, addr), what, n.Name)
	}
	for _, addr := range others {
		if !certain[addr] {
			*all = append(*all, ban{IPRange: netipx.IPRangeFrom(addr, addr), what: what, node: n.Name, by: n.Name, rank: othersRank})
		}
	}
}

// segments adds the addresses of the segments that are not those of a single host. Of the segments that one
// node alone reports only the first ones count.
func (all *bans) segments(segments []netip.Prefix, reporters map[netip.Prefix]map[string]bool) {
	alone := map[string]int{} // segments of one node alone, by node
	for _, s := range segments {
		own := ownOf(s)
		if len(reporters[s]) == 1 {
			node := slices.Collect(maps.Keys(reporters[s]))[0]
			if alone[node]++; alone[node] > maxAlone {
				continue
			}
			for i := range own {
				own[i].by, own[i].rank = node, segmentRank
			}
		}
		*all = append(*all, own...)
	}
}

// services adds the Service CIDRs or, if there are no such objects, what else is known of
// them.
func (all *bans) services(cidrs []*networkingv1.ServiceCIDR, kubernetes *corev1.Service) {
	for _, s := range cidrs {
		for _, cidr := range s.Spec.CIDRs {
			all.prefix(cidr, "in the Service CIDR", "")
		}
	}
	if len(cidrs) == 0 && kubernetes != nil {
		for _, text := range kubernetes.Spec.ClusterIPs {
			all.addr(text, "the cluster IP of the API server", "")
		}
	}
}

// merge returns each range once, with all reasons for it. If several nodes are the same
// reason, it names the first.
func (all bans) merge() []Forbidden {
	slices.SortFunc(all, ban.compare)
	all = slices.Compact(all)
	var merged []Forbidden
	for len(all) > 0 {
		first, n := all[0], 1
		for n < len(all) && all[n].IPRange == first.IPRange && all[n].what == first.what {
			n++
		}
		all = all[n:]
		why := first.what
		if first.node != "" {
			why += " of node " + first.node
		}
		if n > 1 {
			why += fmt.Sprintf(" and %d more", n-1)
		}
		f := Forbidden{Range: first.IPRange, Why: why, Node: first.by, rank: first.rank, Pods: first.isPods}
		if n > 1 {
			f.Node = ""
		}
		if last := len(merged) - 1; last >= 0 && merged[last].Range == f.Range {
			same := &merged[last]
			same.Why += ", " + why
			same.Pods, same.rank = same.Pods && f.Pods, min(same.rank, f.rank)
			if same.Node != f.Node {
				same.Node = ""
			}
		} else {
			merged = append(merged, f)
		}
	}
	return merged
}
