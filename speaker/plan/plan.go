// Package plan decides what a node announces. It is pure: a Snapshot goes in,
// a Plan comes out, with a typed reason for every VIP that the node does not
// announce. Every speaker and the CLI get the same answer from the same
// snapshot.
//
// The files, from the outside in:
//
//	plan.go         Snapshot and Plan
//	make.go         Make: a plan from a snapshot, for who has no use for changes
//	planner.go      Planner: the plan follows the changes of Services and nodes
//	owner.go        which nodes may own a VIP, and the one that does
//	segments.go     which segment a VIP is on
//	connections.go  what is forwarded of connections to it, and this node's part of their limits
//	direct.go       which nodes keep its connections, with direct forwarding, and what part of them
//	routes.go       which prefixes a BGP router is sent, with which attributes
//	sessions.go     which sessions the node has with BGP routers
//	bgp.go          the types of both
//	podroutes.go    the node's routes to pods, and those to its own pods for routers
package plan

import (
	"net/netip"
	"path"
	"slices"
	"time"

	"github.com/lodestone-lb/lodestone/pkg/config"
	"github.com/lodestone-lb/lodestone/pkg/reason"
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
	// Speakers are the nodes whose speaker is alive and ready to own VIPs,
	// this node included when it is.
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
	// Leases names, for each of them that is leased from a DHCP server, the
	// interface by which the configuration knows the pool.
	Leases map[netip.Addr]string
	// Local is set with externalTrafficPolicy: Local.
	Local bool
	// Serving is set when some endpoint of the Service takes traffic.
	Serving bool
	// ServingNodes are the nodes that have an endpoint that takes traffic:
	// a ready one, or a serving one when all are terminating.
	ServingNodes map[string]bool
	// IPv6 is what of that is different at IPv6 VIPs: an endpoint serves one
	// family. Nil: nothing.
	IPv6 *Endpoints
	// Backends are the nodes that have endpoints, by name, with policy Local.
	Backends []Backend
	// Ports are those that take TCP.
	Ports []Port
	// ByClient is set with sessionAffinity: ClientIP.
	ByClient bool
	// Seed decides how its connections are spread: the same on all nodes.
	Seed uint32
	// Limit caps new connections to each of its VIPs. The zero value: no cap.
	Limit Limit
	// LimitErr is why there is no cap although the Service asks for one.
	LimitErr error
}

// Endpoints are those of a Service for one family; see Service.
type Endpoints struct {
	Serving      bool
	ServingNodes map[string]bool
	Backends     []Backend
}

// EndpointsAt returns what the endpoints are for the VIP.
func (s *Service) EndpointsAt(vip netip.Addr) Endpoints {
	if s.IPv6 != nil && vip.Is6() {
		return *s.IPv6
	}
	return Endpoints{s.Serving, s.ServingNodes, s.Backends}
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
	// Excluded is set by the label
	// node.kubernetes.io/exclude-from-external-load-balancers, and by the taints
	// of a node that is or will be gone.
	Excluded bool
	// NetworkUnavailable is the condition of that name.
	NetworkUnavailable bool
	// Addresses are those of the type InternalIP, in the order of its status.
	Addresses []netip.Addr
	// BGP is what its annotations say about its sessions.
	BGP NodeBGP
	// PodCIDRs are those of its spec, as it says.
	PodCIDRs []string
	// Created is when the Node came to be.
	Created time.Time
	// Network is what its speaker says; all else is from the API server.
	report.Network
}

// impaired reports whether the node is the last choice.
func (n Node) impaired() bool { return n.Blind || n.Sick }

// answers reports whether VIPs with these patterns are announced on the segment; see
// config.Layer2.
func answers(s report.Segment, patterns []string) bool {
	if len(patterns) == 0 {
		return !s.IfNamed
	}
	return slices.ContainsFunc(patterns, func(p string) bool {
		ok, _ := path.Match(p, s.Interface) // the configuration has only good patterns
		return ok
	})
}

// Layer2 says how a VIP is announced by layer 2 on this node.
type Layer2 struct {
	// Interfaces are path.Match patterns of the interfaces to answer on.
	// Empty: every suitable one.
	Interfaces []string
	// Hurry is set while Services move here from another load balancer: whether
	// the one who has the VIP is gone is asked each second.
	Hurry bool
	// Refresh is how often the VIP is announced again without need. Zero: never.
	Refresh time.Duration
	// Keep is set if the node keeps the VIP when a better owner returns.
	Keep bool
	// Home is set if the node owns the VIP while all selected nodes are able
	// to: of two that claim a VIP, that one is right.
	Home bool
	// Apart is set if the node has lost the other speakers with its link to them: of two
	// that claim a VIP, the other one is right.
	Apart bool
	// New is set if the address came to a Service while this node's Planner
	// knew the others, and since then nobody else has owned it: who announces
	// it first has to find out whether another host has it. Make, which knows
	// no history, never sets it, except on a node that is apart: there, another speaker may
	// have each VIP that the node does not have already.
	New bool
	// Leaving is set while the VIP moves to another node: this one answers for
	// it until it hears that one claim it, and neither announces nor defends
	// it. Make never sets it.
	Leaving bool
}

// Plan is what one node announces.
type Plan struct {
	// Layer2 are the VIPs this node owns on the segment.
	Layer2 map[netip.Addr]Layer2
	// BGP is what it announces to routers, VIPs that other nodes own included.
	BGP BGP
	// Claims are those of Layer2 that the node keeps.
	Claims report.Claims
	// Silent has, for each VIP that it announces by neither, why not.
	Silent map[netip.Addr]Silence
	// Limits are in force on this node. With direct forwarding it has its part of each. They are never
	// modified.
	Limits map[LimitKey]Limit
	// Forwarding is what is forwarded directly, whichever node owns it. It is never modified.
	Forwarding *Forwarding
	// LimitErrs has, for Services at the VIPs that it takes connections for, by name, why the limit that
	// they ask for is not in force.
	LimitErrs map[string]error
}

// LimitKey says where a Limit applies: Services that share a VIP have each
// their own.
type LimitKey struct {
	VIP     netip.Addr
	Service string
}

// Silence is why a node does not announce a VIP.
type Silence struct {
	Reason Reason
	// Owner is the node that announces it by layer 2 instead. Empty: nobody does.
	Owner string
	// Unowned is set if nobody announces it at all: it is for layer 2 alone, and
	// no node can own it.
	Unowned bool
	// Message is a sentence for people.
	Message string
}

// Reason is a stable code for why a node does not announce a VIP: the same
// string in logs, metrics and the CLI.
type Reason string

// The reasons, which Reasons explains.
const (
	NotOwner           Reason = "NotOwner"
	NoAdvertisement    Reason = "NoAdvertisement"
	ServiceNotSelected Reason = "ServiceNotSelected"
	NoServingEndpoint  Reason = "NoServingEndpoint"
	NoLocalEndpoint    Reason = "NoLocalEndpoint"
	NodeNotSelected    Reason = "NodeNotSelected"
	NotOnSegment       Reason = "NotOnSegment"
	NodeExcluded       Reason = "NodeExcluded"
	NetworkUnavailable Reason = "NetworkUnavailable"
	LinkDown           Reason = "LinkDown"
	LessPreferred      Reason = "LessPreferred"
	SpeakerNotReady    Reason = "SpeakerNotReady"
	NodeUnknown        Reason = "NodeUnknown"
	NoPeer             Reason = "NoPeer"
	NoSession          Reason = "NoSession"
	NotPermitted       Reason = "NotPermitted"
)

// Reasons explains each Reason.
func Reasons() reason.Texts[Reason] {
	return reason.Texts[Reason]{
		NotPermitted: {Cause: "The configuration lists in bgpPermit what may be announced by BGP, and the VIP is not in it.",
			Cure: "Add it to bgpPermit, or take the address out of the pools that are advertised by BGP.", Keys: []string{"bgpPermit"}},
		NotOwner: {Cause: "Another node, which the message names, announces the VIP by layer 2.",
			Cure: "Not a fault: one node answers for each VIP."},
		NoAdvertisement: {Cause: "No advertisement is for the pool.", Cure: "Add one, or name one in the pool's advertise.",
			Keys: []string{"pools[].advertise"}},
		ServiceNotSelected: {Cause: "Every advertisement for the pool has a serviceSelector that matches no Service with the VIP.",
			Cure: "Compare the selectors with kubectl get service NAME --show-labels.",
			Keys: []string{"advertisements[].serviceSelector"}},
		NoServingEndpoint: {Cause: "The Service has no endpoint that takes traffic, on any node.",
			Cure: "Find out why no pod is ready, or why the Service's selector matches none."},
		NoLocalEndpoint: {Cause: "The Service has externalTrafficPolicy Local, and this node runs none of its ready pods.",
			Cure: "Not a fault if another node does."},
		NodeNotSelected: {Cause: "The nodeSelector of the advertisements leaves the node out.",
			Cure: "Not a fault if other nodes announce the VIP; otherwise change the nodeSelector or the node's labels.",
			Keys: []string{"advertisements[].layer2.nodeSelector"}},
		NotOnSegment: {Cause: "The node has no interface on the VIP's subnet, and others have.",
			Cure: "Not a fault if another node announces it. If a router takes the VIP to the node all the same: anySegment in the advertisement.",
			Keys: []string{"advertisements[].layer2.anySegment"}},
		NodeExcluded: {Cause: "A label or a taint excludes the node from load balancing.",
			Cure: "Remove node.kubernetes.io/exclude-from-external-load-balancers if the node is to announce VIPs."},
		NetworkUnavailable: {Cause: "The node's condition NetworkUnavailable is true: its network plugin is not ready.",
			Cure: "See to the network plugin on the node."},
		LinkDown: {Cause: "The node's interfaces on the VIP's subnet are down or without a carrier, or the one by which its speaker " +
			"lost the others was, and it has not met them again.", Cure: "See to the cable, the switch port, or ip link on the node."},
		LessPreferred: {Cause: "The advertisements prefer another node for the VIP.", Cure: "Not a fault: preferredNodes says so.",
			Keys: []string{"advertisements[].layer2.preferredNodes"}},
		SpeakerNotReady: {Cause: "The node's speaker is starting, does not run, has lost the others, or is cut off from the API server " +
			"while others are not; or kube-proxy on the node is not healthy, and is on others.",
			Cure: "See kubectl -n lodestone-system get pods -o wide, and the speaker's log."},
		NodeUnknown: {Cause: "The API server has no Node of the name that the speaker was started with.",
			Cure: "Compare NODE_NAME of the speaker with kubectl get nodes."},
		NoPeer: {Cause: "The VIP is announced by BGP, and the nodeSelector of each peer leaves the node out.",
			Cure: "Not a fault if other nodes announce it.", Keys: []string{"peers[].nodeSelector"}},
		NoSession: {Cause: "The VIP is announced by BGP, and the node lacks something for its sessions with all peers.",
			Cure: "The message says what it lacks; lodestone bgp peers shows it for all nodes."},
	}
}
