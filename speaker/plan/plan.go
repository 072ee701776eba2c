// Package plan decides what a node announces. It is pure: a Snapshot goes in, a Plan comes out, with a
// typed reason for every VIP that the node does not announce. Every speaker and the CLI get the same
// answer from the same snapshot.
//
// The files, from the outside in:
//
//	plan.go         Snapshot and Plan; Make decides one from the other
//	view.go         the Services of a snapshot by VIP
//	planner.go      Planner: keeps a plan up to date when Services and nodes change
//	owner.go        which nodes may own a VIP: none that is excluded, drained, cut off or without an endpoint
//	ballot.go       elects the owner among them; package rendezvous ranks them
//	silence.go      which reason a node has for not owning a VIP
//	reasons.go      all reasons for not announcing a VIP, with cause and cure
//	advertised.go   which advertisements are for a VIP
//	segments.go     which segment a VIP is on, and which interfaces
//	connections.go  which connections to a VIP are forwarded, and this node's part of their limits
//	direct.go       with direct forwarding: which nodes keep the connections to a VIP, and which part of them
//	bgproutes.go    which VIPs are announced to which BGP routers
//	bgptable.go     which prefixes these are sent for the VIPs, with which attributes
//	sessions.go     which sessions the node has with BGP routers
//	bgptypes.go     the types of routes and sessions
//	podroutes.go    the node's routes to pods of other nodes, and the routes to its own pods for routers
package plan

import (
	"net/netip"
	"path"
	"slices"
	"strings"
	"time"

	"github.com/lodestone-lb/lodestone/pkg/config"
	"github.com/lodestone-lb/lodestone/pkg/report"
)

// Snapshot is everything that the decision depends on.
type Snapshot struct {
	// Config is the configuration in force.
	Config *config.Config
	// Services are the LoadBalancer Services with an address of ours.
	Services []Service
	// Nodes are the cluster's nodes by name.
	Nodes map[string]Node
	// Speakers are the nodes whose speaker is alive; the value is whether it is ready to own VIPs.
	Speakers map[string]bool
}

// Service is what the plan needs of a Service and its EndpointSlices.
type Service struct {
	// Name is "namespace/name".
	Name string
	// Labels are its labels.
	Labels map[string]string
	// VIPs are the addresses in its status that Lodestone assigned.
	VIPs []netip.Addr
	// Leases has, for each VIP that is leased from a DHCP server, the interface of its pool.
	Leases map[netip.Addr]string
	// Local is set with externalTrafficPolicy: Local.
	Local bool
	// Serving is set when some endpoint of the Service takes traffic.
	Serving bool
	// IPv6 are the endpoints of IPv6 VIPs, because an endpoint serves one family. Nil: they are the
	// same as those of IPv4 VIPs.
	IPv6 *Endpoints
	// Backends are the nodes that have endpoints, by name, with policy Local. Open counts those that take traffic: ready
	// ones, or serving ones when all are terminating.
	Backends []Backend
	// Ports are the TCP ports.
	Ports []Port
	// ByClient is set with sessionAffinity: ClientIP.
	ByClient bool
	// Seed decides how connections are spread. It is the same on all nodes.
	Seed uint32
	// Limit caps new connections to each of the VIPs. The zero value: no cap.
	Limit Limit
	// LimitErr is why there is no cap although the Service asks for one.
	LimitErr error
}

// Endpoints are the endpoints of a Service for one family; see Service.
type Endpoints struct {
	Serving  bool
	Backends []Backend
}

// ServesOn reports whether the node has an endpoint that takes traffic, with policy Local.
func (e Endpoints) ServesOn(node string) bool {
	at, found := slices.BinarySearchFunc(e.Backends, node, func(b Backend, name string) int { return strings.Compare(b.Node, name) })
	return found && e.Backends[at].Open > 0
}

// ServingNodes returns the nodes that have an endpoint that takes traffic, sorted, with policy Local. It is never nil.
func (e Endpoints) ServingNodes() []string {
	names := make([]string, 0, len(e.Backends))
	for _, b := range e.Backends {
		if b.Open > 0 {
			names = append(names, b.Node)
		}
	}
	return names
}

// common returns the names that are in both lists, which are sorted. It is never nil.
func common(a, b []string) []string {
	both := []string{}
	for _, name := range a {
		if contained(b, name) {
			both = append(both, name)
		}
	}
	return both
}

// contained reports whether the name is one of these, which are sorted.
func contained(names []string, name string) bool {
	_, found := slices.BinarySearch(names, name)
	return found
}

// EndpointsAt returns the endpoints for the VIP.
func (s *Service) EndpointsAt(vip netip.Addr) Endpoints {
	if s.IPv6 != nil && vip.Is6() {
		return *s.IPv6
	}
	return Endpoints{s.Serving, s.Backends}
}

// Limit caps the new connections to a Service at one VIP.
type Limit struct {
	// PerSecond is how many connections may be opened in a second, at all
	// ports together.
	PerSecond uint32
	// Ports are those of the Service.
	Ports []Port
}

// Port is where a Service takes connections at its VIPs.
type Port struct {
	Protocol uint8 // the number of TCP, UDP or SCTP in the IP header
	Number   uint16
}

// onlyTCP reports whether all connections that it caps are of TCP.
func (l Limit) onlyTCP() bool {
	return !slices.ContainsFunc(l.Ports, func(p Port) bool { return p.Protocol != protocolTCP })
}

// protocolTCP is its number in the IP header (RFC 5237).
const protocolTCP = 6

// Equal reports whether both are the same limit at the same ports.
func (l Limit) Equal(other Limit) bool {
	return l.PerSecond == other.PerSecond && slices.Equal(l.Ports, other.Ports)
}

// Node is what the plan needs of a Node.
type Node struct {
	Labels map[string]string
	// Labelled is set by the label node.kubernetes.io/exclude-from-external-load-balancers, Leaving by the
	// taints of a node that is or will be gone.
	Labelled, Leaving bool
	// Taints are the keys of its taints that an operator may have chosen for the same.
	Taints []string
	// NetworkUnavailable is the condition of that name.
	NetworkUnavailable bool
	// Addresses are the addresses of type InternalIP, in the order of the Node's status. None is IPv4 in IPv6 form.
	Addresses []netip.Addr
	// BGP has the Node's annotations about BGP sessions.
	BGP NodeBGP
	// PodCIDRs are the pod CIDRs in the Node's spec, unchecked.
	PodCIDRs []string
	// Created is when the Node was created.
	Created time.Time
	// Network is what the node's speaker publishes; everything else is from the API server.
	report.Network
}

// Excluded reports whether the node is taken out of load balancing. Without a configuration the label counts.
func (n Node) Excluded(c *config.Config) bool {
	if n.Leaving || c == nil {
		return n.Leaving || n.Labelled
	}
	return n.Labelled && !c.IgnoreExcludeLabel ||
		len(c.ExcludeTaints) > 0 && slices.ContainsFunc(n.Taints, func(key string) bool { return slices.Contains(c.ExcludeTaints, key) })
}

// impaired reports whether the node is the last choice.
func (n Node) impaired() bool { return n.Blind || n.unfit() }

// unfit reports whether what comes to the node may not reach pods.
func (n Node) unfit() bool { return n.Sick || n.NetworkUnavailable }

// sound reports whether the node may own VIPs of its segments, and announce VIPs to routers.
func (s *Snapshot) sound(name string) bool {
	n := s.Nodes[name]
	return s.Speakers[name] && !n.Excluded(s.Config)
}

// Reaches reports whether the node can hand packets for a VIP to the other node: the other node's address is
// on a segment of this node, or this node's segments are not known. It returns that address, the zero value
// if the other node has none of the VIP's family.
func (n *Node) Reaches(other *Node, vip netip.Addr) (at netip.Addr, ok bool) {
	at = other.address(vip.Is4())
	return at, n.onSegment(at)
}

// address returns the node's address of IPv4, or of IPv6: the zero value if it has none.
func (n *Node) address(four bool) netip.Addr {
	for _, a := range n.Addresses {
		if a.Is4() == four {
			return a
		}
	}
	return netip.Addr{}
}

// onSegment reports whether the address is on a segment of the node, or the node's segments are not known.
func (n *Node) onSegment(at netip.Addr) bool {
	return n.Segments == nil || slices.ContainsFunc(n.Segments, func(g report.Segment) bool { return g.Subnet.Contains(at) })
}

// answers reports whether VIPs with these patterns are announced on the segment; see config.Layer2.
func answers(s report.Segment, patterns []string) bool {
	if len(patterns) == 0 {
		return !s.IfNamed
	}
	return MatchesAny(patterns, s.Interface)
}

// MatchesAny reports whether the name of an interface matches one of these patterns; see config.Layer2.
func MatchesAny(patterns []string, name string) bool {
	return slices.ContainsFunc(patterns, func(p string) bool {
		ok, _ := path.Match(p, name) // the configuration has only good patterns
		return ok
	})
}

// Layer2 is how a VIP is announced by layer 2 on this node.
type Layer2 struct {
	// Interfaces are path.Match patterns of the interfaces to answer on. Empty: all suitable
	// interfaces.
	Interfaces []string
	// AnySegment is set if the VIP is announced on all of these. Else it is not announced on those of other segments.
	AnySegment bool
	// Hurry is set while Services move to Lodestone from another load balancer. Then the segment is
	// asked each second whether the machine that has the VIP is gone.
	Hurry bool
	// Refresh is how often the VIP is announced again without a cause. Zero: never.
	Refresh time.Duration
	// Keep is set if the node keeps the VIP when a better owner returns.
	Keep bool
	// Home is set if the node would own the VIP if all selected nodes were able. Of two speakers that
	// claim a VIP, the one with Home is right.
	Home bool
	// Apart is set if the node has lost the other speakers with a link. Of two speakers that claim a
	// VIP, the one that is not apart is right.
	Apart bool
	// New is set if the VIP is new to the cluster and this node is its first owner, or if the owner before,
	// or this node's speaker before this one, has not announced it because another machine has the
	// address: the node must find out whether one has before it announces it. Make knows no history
	// and does not set it, except on a node that is apart: another speaker may have its VIPs.
	New bool
	// Leaving is set while the VIP moves to another node. Until this node hears that the other node
	// claims the VIP, it answers for it, but neither announces nor defends it. Make never sets it.
	Leaving bool
	// Arriving is set while the node that had the VIP should keep it, because kube-proxy may not serve it on
	// this one yet. If no other speaker answers for it, this node announces it all the same. Make never sets it.
	Arriving bool
}

// Plan is what one node announces.
type Plan struct {
	// Layer2 are the VIPs this node owns on the segment.
	Layer2 map[netip.Addr]Layer2
	// BGP is what the node announces to routers, including VIPs that other nodes own.
	BGP BGP
	// Claims are the VIPs of Layer2 that the node keeps.
	Claims report.Claims
	// Silent are the VIPs that the node announces neither by layer 2 nor by BGP.
	Silent map[netip.Addr]Silence
	// Limits are in force on this node. With direct forwarding the node has its part of each. The map is
	// never modified.
	Limits map[LimitKey]Limit
	// Forwarding is what is forwarded directly, whichever node owns the VIP. It is never modified.
	Forwarding *Forwarding
	// LimitErrs has, by Service name, why the limit that a Service asks for is not in force. It has the
	// Services for which this node takes connections.
	LimitErrs map[string]error
}

// LimitKey is where a Limit applies: each Service has its own at a VIP, also if they share the VIP.
type LimitKey struct {
	VIP     netip.Addr
	Service string
}

// Silence is why a node does not announce a VIP.
type Silence struct {
	Reason Reason
	// Owner is the node that announces it by layer 2 instead. Empty: nobody does.
	Owner string
	// Unowned is set if no node announces the VIP: it is only for layer 2, and no node can own it.
	Unowned bool
	// Message is a sentence for people.
	Message string
}

// Make decides what the node announces. Each VIP of the snapshot is in the plan's Layer2, in the VIPs of
// its BGP, in both, or in Silent with the reason.
//
// The decision is per VIP. Services that share a VIP have one owner, a node that each of them accepts; by
// BGP all such nodes announce the VIP. Services without a serving endpoint are ignored: otherwise one of
// them would silence the others.
func Make(node string, s Snapshot) Plan {
	p := NewPlanner(node)
	p.Set(s.Config, s.Nodes, s.Speakers)
	for _, service := range s.Services {
		p.Put(service)
	}
	p.Update()
	return p.Plan()
}

// Owners returns the owner of each VIP of the snapshot, "" for a VIP that nobody announces by layer 2. It
// decides for all nodes at once what Make decides for one.
func Owners(s Snapshot) map[netip.Addr]string {
	owners, view := make(map[netip.Addr]string, len(s.Services)), newView(s)
	for i := range s.Services {
		view.add(&s.Services[i])
	}
	for addr := range view.sharers {
		v, _ := view.demand(addr)
		owners[addr] = view.scopeOf(addr, view.poolOf(addr)).owner(addr, v)
	}
	return owners
}
