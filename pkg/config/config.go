// Package config is Lodestone's configuration: one YAML document in one
// ConfigMap. Parse turns its text into a Config or into every error it
// contains, each with line and column.
//
// A Config that exists is valid: addresses are netip values, ranges do not
// overlap, references resolve, defaults are filled in. Nobody downstream
// checks again. The package is a leaf: it imports nothing of ours and nothing
// of Kubernetes, so that the allocator, the plan and the CLI can share it.
//
// The files, from the outside in:
//
//	config.go      Config and its parts: what a document comes to
//	parse.go       Parse: from the text of a document, or a file of manifests, to a Config
//	decode.go      YAML to values that know their key and line, within bounds of size and depth
//	schema.go      the keys of the document, level by level
//	scalar.go      numbers, durations, names and lists of them, each with its bounds
//	address.go     addresses, CIDRs and ranges
//	selector.go    label selectors
//	compile.go     values to a Config: names, references, advertisements, membership
//	pools.go       pools, their DHCP, reservations, and pools that overlap
//	bgp.go         peers, BFD profiles, and how VIPs are announced to routers
//	crosscheck.go  peers, advertisements and pools that do not fit each other, as aggregates that announce more than pools have
//	errors.go      every error with its line and column, and hints for common ones
package config

import (
	"cmp"
	"errors"
	"net/netip"
	"slices"
	"time"

	"go4.org/netipx"
)

// Where the document lives in the cluster, unless flags name another place.
const (
	// Namespace is the namespace of Lodestone's own objects.
	Namespace = "lodestone-system"
	// ConfigMapName is the name of the ConfigMap that holds the document.
	ConfigMapName = "lodestone-config"
	// LastValidName is the name of the ConfigMap with a copy of the last valid
	// document, for programs that start while the document is not valid.
	LastValidName = "lodestone-config-last-valid"
	// Key is the ConfigMap key whose value is the document.
	Key = "config.yaml"
	// APIVersion is the only document version that Parse accepts.
	APIVersion = "lodestone.io/v1alpha1"
	// Kind is the only document kind that Parse accepts.
	Kind = "Config"
)

// DefaultQuarantine is how long a released address is in quarantine: long enough for neighbour
// caches and connections of the old Service's clients to end.
const DefaultQuarantine = 30 * time.Second

// Config is one valid configuration. It is immutable: a change of the
// document makes a new Config.
type Config struct {
	// ClusterID names this cluster in load balancer names and, on the wire,
	// against other clusters on the same segment. Default: "kubernetes".
	ClusterID string
	// Quarantine is how long no other Service is given a released address.
	Quarantine time.Duration
	// Membership has the timers by which speakers notice that one of them is lost.
	Membership Membership
	// Pools are the address pools in the order of the document.
	Pools []Pool
	// Reservations keep addresses of the pools for Services, in the order of
	// the document. No address is in two of them.
	Reservations []Reservation
	// Advertisements are how VIPs are made known. A document without the key
	// announces every pool by layer 2 from every node; one with an empty list
	// announces nothing, because something else does.
	Advertisements []Advertisement
	// Peers are the routers that speakers have BGP sessions with, in the order
	// of the document.
	Peers []Peer
	// Permit is all that speakers may announce by BGP, whatever else the document,
	// Services and nodes ask for. Nil: there is no such list.
	Permit *netipx.IPSet
	// Routes is how nodes reach each other's pods. Nil: Lodestone has no part in that.
	Routes *Routes
	// Compatibility names the load balancers whose annotations on Services are
	// understood, and whose Services are taken over only with their addresses.
	Compatibility []Compatibility
	// IgnoreExcludeLabel has nodes with the label node.kubernetes.io/exclude-from-external-load-balancers
	// announce VIPs all the same.
	IgnoreExcludeLabel bool
	// ExcludeTaints are the keys of taints that take a node out of load balancing as that label does.
	ExcludeTaints []string
	// Nodes is what the operator declares about machines; the first entry that
	// matches a node's name applies.
	Nodes []NodeRule
	// Digest identifies the document's text (hex SHA-256), for logs and
	// metrics.
	Digest string
}

// AnnouncedByOthers reports whether the document leaves it to something else to announce VIPs, by an empty list
// of advertisements. Without a document nobody knows.
func (c *Config) AnnouncedByOthers() bool { return c != nil && len(c.Advertisements) == 0 }

// Compatibility is another load balancer.
type Compatibility string

// Those that Lodestone understands.
const (
	MetalLB Compatibility = "metallb"
	KubeVIP Compatibility = "kube-vip"
)

// Failover is a choice between noticing a lost speaker soon and waiting long for a slow one.
type Failover string

// What the document can contain.
const (
	FailoverFast         Failover = "fast"
	FailoverNormal       Failover = "normal"
	FailoverConservative Failover = "conservative"
)

// Membership has the timers by which speakers notice that one of them is lost. Heartbeats show
// that at once. Beside them speakers probe each other at leisure, suspect one that does not answer,
// and declare it lost if it does not object.
type Membership struct {
	// Heartbeat is how often a speaker sends a heartbeat to each of those that watch it, and Missed
	// how many in a row they miss before they take it for lost. Both may change at any time.
	Heartbeat time.Duration
	Missed    int
	// ProbeInterval is how often a speaker probes one of the others.
	ProbeInterval time.Duration
	// ProbeTimeout is how long it waits before it asks others to probe, too.
	// It is shorter than ProbeInterval, which bounds the whole probe.
	ProbeTimeout time.Duration
	// SuspicionMultiplier times ProbeInterval is how long a suspect has to
	// object, longer where there are more than 10 speakers.
	SuspicionMultiplier int
	// GossipInterval is how often speakers pass on what they have learnt.
	GossipInterval time.Duration
	// GracePeriod is how long a speaker that is declared lost may still object.
	GracePeriod time.Duration
}

// Membership returns the timers that the setting stands for.
func (f Failover) Membership() Membership {
	const ms = time.Millisecond
	m := Membership{25 * ms, 3, 500 * ms, 200 * ms, 2, 50 * ms, 50 * ms}
	switch f {
	case FailoverFast:
		m.Heartbeat = 20 * ms
	case FailoverConservative:
		m.Heartbeat, m.Missed = 100*ms, 8
	case FailoverNormal:
	}
	return m
}

// SameStart reports whether the settings differ only in those that may change at any time.
func (m Membership) SameStart(o Membership) bool {
	o.Heartbeat, o.Missed = m.Heartbeat, m.Missed
	return m == o
}

// Pool is a named set of addresses that Services may be given.
type Pool struct {
	Name string
	// Free is every address the pool may hand out: the document's addresses
	// without its excludes and without the first and last address of each
	// IPv4 prefix (RFC 919, RFC 3021 prefixes of 31 and 32 bits keep theirs).
	// A pool with DHCP has none of its own.
	Free *netipx.IPSet
	// Withheld are addresses in the document's prefixes that the pool never hands out:
	// excludes, network and broadcast addresses.
	Withheld *netipx.IPSet
	// DHCP is where the pool leases its addresses. Nil: its addresses are not leased.
	DHCP *DHCP
	// AutoAssign lets Services that name no pool draw from this one.
	// Default: true.
	AutoAssign bool
	// Priority orders the pools that a Service without a wish draws from:
	// lower comes first, equal ones in the order of the document.
	// Default: 0.
	Priority int
	// Namespaces and NamespaceSelector are the only namespaces whose Services
	// may draw from the pool: those that are listed and those whose labels
	// match. Both empty (NamespaceSelector nil): all.
	Namespaces        []string
	NamespaceSelector Selector
	// ServiceSelector restricts the pool to Services with these labels.
	ServiceSelector Selector
	// NamespaceQuota is how many addresses of each family the Services of one
	// namespace may hold in the pool. 0: as many as there are.
	NamespaceQuota int
	// Requesters are the only namespaces whose Services may ask for
	// particular addresses of the pool. Nil: all that may draw from it; empty
	// but not nil: none.
	Requesters []string
	// KeepFor is how long a released address waits for a Service of the same
	// namespace and name to come back, if longer than the quarantine.
	KeepFor time.Duration
	// Draining pools give no new addresses. What is in use stays.
	Draining bool
	// Advertise names the advertisements that apply to the pool. Empty: all.
	Advertise []string
}

// DHCP is where a pool leases an IPv4 address for each Service.
type DHCP struct {
	// Interface is the name of the interface, on the node of the leading
	// controller, that is on the server's segment. No other pool has it.
	Interface string
}

// AdvertisedBy reports whether the advertisement of that name applies to the
// pool.
func (p *Pool) AdvertisedBy(name string) bool {
	return len(p.Advertise) == 0 || slices.Contains(p.Advertise, name)
}

// Subject is a Service as the rules of pools see it: its labels and those of its namespace.
type Subject struct {
	Namespace               string
	NamespaceLabels, Labels map[string]string
}

// Allows reports whether the Service may draw from the pool.
func (p *Pool) Allows(s Subject) bool {
	return p.admits(s) && p.ServiceSelector.Matches(s.Labels)
}

// admits reports whether the pool is open to the Service's namespace.
func (p *Pool) admits(s Subject) bool {
	return len(p.Namespaces) == 0 && p.NamespaceSelector == nil ||
		slices.Contains(p.Namespaces, s.Namespace) ||
		p.NamespaceSelector != nil && p.NamespaceSelector.Matches(s.NamespaceLabels)
}

// MayRequest reports whether the pool lets Services of the namespace ask for
// particular addresses.
func (p *Pool) MayRequest(namespace string) bool {
	return p.Requesters == nil || slices.Contains(p.Requesters, namespace)
}

// Reservation keeps addresses for one Service: nobody else gets them.
type Reservation struct {
	// Service is "namespace/name".
	Service   string
	Addresses []netip.Addr
}

// Size returns how many addresses the pool may hand out, rounded where it is
// more than an integer holds.
func (p *Pool) Size() float64 {
	var n float64
	for _, r := range p.Free.Ranges() {
		n += SizeOf(r)
	}
	return n
}

// Advertisement is one way of making VIPs known to the network.
type Advertisement struct {
	Name string
	// ServiceSelector restricts the advertisement to the VIPs of Services with
	// these labels.
	ServiceSelector Selector
	// Layer2 announces on the segment. Nil: not by layer 2.
	Layer2 *Layer2
	// BGP announces to routers. Nil: not by BGP.
	BGP *BGP
}

// Layer2 are the settings of a layer-2 advertisement.
type Layer2 struct {
	// NodeSelector restricts the advertisement to nodes with these labels.
	NodeSelector Selector
	// Interfaces are path.Match patterns of the names of the interfaces that
	// answer and announce. Empty: every suitable one.
	Interfaces []string
	// PreferredNodes are the nodes that are preferred as owners.
	PreferredNodes []Preference
	// AnySegment lets nodes own VIPs that are on no subnet of theirs.
	AnySegment bool
	// Refresh is how often VIPs are announced again without need. Zero: never.
	Refresh time.Duration
	// KeepOwner leaves VIPs with the node that took them over when a better
	// owner returns.
	KeepOwner bool
	// Direct has connections handed to a node that follows from the client, so that they
	// outlive the owner of the VIP (forwarding: direct).
	Direct bool
}

// Preference is how much the nodes with these labels are preferred.
type Preference struct {
	// Weight is from 1 to 100; the weights of a node add up.
	Weight       int
	NodeSelector Selector
}

// Weight returns how much the node with these labels is preferred, 0 if it is
// not.
func (l *Layer2) Weight(labels map[string]string) int {
	weight := 0
	for _, p := range l.PreferredNodes {
		if p.NodeSelector.Matches(labels) {
			weight += p.Weight
		}
	}
	return weight
}

// BGP are the settings of a BGP advertisement.
type BGP struct {
	// NodeSelector restricts the advertisement to nodes with these labels.
	NodeSelector Selector
	// Peers names the peers that hear of the VIPs. Empty: all.
	Peers []string
	// Communities are attached to the routes, sorted and without doubles.
	Communities []Community
	// LargeCommunities are those of RFC 8092.
	LargeCommunities []LargeCommunity
	// LocalPreference is sent to internal peers (RFC 4271, section 5.1.5).
	// Nil: the router's default.
	LocalPreference *uint32
	// MED is the MULTI_EXIT_DISC of the routes. Nil: none.
	MED *uint32
	// Prepend is how many times more than once the local AS number is in the
	// path to external peers.
	Prepend int
	// AggregationLength and AggregationLengthV6 are the prefix lengths that
	// VIPs are announced with. Default: 32 and 128. The prefixes of the VIPs of
	// a pool contain no other addresses.
	AggregationLength, AggregationLengthV6 int
	// AggregatePartly announces an aggregate from nodes that do not serve all
	// of its VIPs, too.
	AggregatePartly bool
}

// AdvertisesTo reports whether VIPs are announced to the peer of that name.
func (b *BGP) AdvertisesTo(peer string) bool {
	return len(b.Peers) == 0 || slices.Contains(b.Peers, peer)
}

// Aggregate returns the prefix that the VIP is announced with.
func (b *BGP) Aggregate(vip netip.Addr) netip.Prefix {
	bits := b.AggregationLengthV6
	if vip.Is4() {
		bits = b.AggregationLength
	}
	prefix, _ := vip.Prefix(bits) // lengths are valid
	return prefix
}

// Community is a standard community (RFC 1997).
type Community uint32

// LargeCommunity is a large community (RFC 8092).
type LargeCommunity struct{ GlobalAdmin, Data1, Data2 uint32 }

// Compare orders large communities as RFC 8092 has them in a message.
func (c LargeCommunity) Compare(other LargeCommunity) int {
	return cmp.Or(cmp.Compare(c.GlobalAdmin, other.GlobalAdmin), cmp.Compare(c.Data1, other.Data1), cmp.Compare(c.Data2, other.Data2))
}

// Peer is a router that speakers have BGP sessions with.
type Peer struct {
	Name string
	// NodeSelector restricts the peer to nodes with these labels.
	NodeSelector Selector
	// Address is the router's. It has a zone if it is link-local. Invalid: the
	// peer is unnumbered.
	Address netip.Addr
	// Interface is where the router of an unnumbered peer is: the only one that
	// sends router advertisements there. Empty: the peer has an Address.
	Interface string
	// Port is the router's TCP port. Default: 179.
	Port uint16
	// LocalASN is the node's AS number for this peer. 0: that of the node, see
	// annotation.BGPASN; without one the node has no session with the peer.
	LocalASN uint32
	// PeerASN is the router's AS number, or what it has to be.
	PeerASN ASN
	// SourceAddress is the node's end of the connection. Invalid: that of the
	// node's annotation, else what the kernel chooses.
	SourceAddress netip.Addr
	// RouterID is the node's BGP identifier. Invalid: that of the node's
	// annotation, else its first IPv4 address.
	RouterID netip.Addr
	// Passive peers open the connection themselves.
	Passive bool
	// Multihop is the TTL of packets to an external peer that is not on a
	// segment of the node. 0: the peer is on one.
	Multihop int
	// TTLSecurity drops packets of the peer that more than this many hops
	// forwarded (RFC 5082); 1 is a router on the segment. 0: off. A peer with
	// TTLSecurity has no Multihop.
	TTLSecurity int
	// Password is where the TCP-MD5 password (RFC 2385) is. Nil: there is none.
	Password *SecretKey
	// HoldTime is offered to the peer; both sides use the smaller. 0: sessions
	// end by BFD and TCP alone. Otherwise at least 3 s. Default: 90 s.
	HoldTime time.Duration
	// KeepaliveInterval is a third of the hold time by default.
	KeepaliveInterval time.Duration
	// ConnectRetry is the time between attempts to connect. Default: 5 s.
	ConnectRetry time.Duration
	// GracefulRestart is how long the router keeps the routes of a speaker that
	// restarts (RFC 4724). 0: not at all.
	GracefulRestart time.Duration
	// BFD detects soon that the router is unreachable. Nil: no BFD.
	BFD *BFD
}

// ASN is what a peer's AS number has to be. The zero value of each field
// leaves it to the others.
type ASN struct {
	// Number is the AS number.
	Number uint32
	// Internal accepts the local AS number alone, External every other one.
	Internal, External bool
}

// SecretKey is one value of a Secret in Lodestone's namespace.
type SecretKey struct{ Name, Key string }

// ErrNotRead is returned for a SecretKey that has not been read yet.
var ErrNotRead = errors.New("the API server has not answered yet")

// BFD are the settings of Bidirectional Forwarding Detection (RFC 5880) with a
// peer.
type BFD struct {
	// TransmitInterval is bfd.DesiredMinTxInterval, ReceiveInterval is
	// bfd.RequiredMinRxInterval. Default: 300 ms.
	TransmitInterval, ReceiveInterval time.Duration
	// DetectMultiplier is how many packets the other side misses before it
	// declares the session down. Default: 3.
	DetectMultiplier int
	// MinimumTTL is the least TTL of the packets of a router beyond the segment. By default it
	// is 255 less the distance that Multihop or TTLSecurity of the peer allows; an internal peer
	// has neither. 0: the router is on the segment, and BFD is single hop.
	MinimumTTL int
	// Strict keeps the BGP session down until BFD is up.
	Strict bool
}

// RouteMode is who makes pods of other nodes reachable.
type RouteMode string

// The modes.
const (
	// RoutesKernel: each speaker installs routes to the other nodes' pods in its node's
	// kernel.
	RoutesKernel RouteMode = "kernel"
	// RoutesBGP: each speaker announces its node's pods to routers.
	RoutesBGP RouteMode = "bgp"
)

// Routes is how nodes reach each other's pods.
type Routes struct {
	Mode RouteMode
	// CIDRs contain the pods of all nodes. There is no route to a pod CIDR of a node that is
	// not in them. Empty: nodes are trusted.
	CIDRs []netip.Prefix
	// Peers names the peers that hear of pods in mode RoutesBGP. Empty: all.
	Peers []string
}

// AdvertisesTo reports whether the node's pods are announced to the peer of that name.
func (r *Routes) AdvertisesTo(peer string) bool {
	return r.Mode == RoutesBGP && (len(r.Peers) == 0 || slices.Contains(r.Peers, peer))
}

// NodeRule is what the operator declares about the machines whose Node name
// matches one of the patterns.
type NodeRule struct {
	// Names are path.Match patterns of Node names.
	Names []string
	// Region and Zone become the topology.kubernetes.io labels of a new
	// node. Empty: no label.
	Region, Zone string
	// Gone is set when the operator declares that the machine no longer exists. Its Node object
	// may then be deleted.
	Gone bool
	// SystemUUID is the machine's, if Gone: another one may have the name later.
	SystemUUID string
}

// ContainsPrefix reports whether all addresses of the prefix are the pool's,
// withheld ones included.
func (p *Pool) ContainsPrefix(prefix netip.Prefix) bool { return p.Whole().ContainsPrefix(prefix) }

// PoolOf returns the pool whose addresses, withheld ones included, contain the address. It
// does not know leased addresses: see PoolOn. It looks at one pool after the other, because
// only the operator can make their number large.
func (c *Config) PoolOf(a netip.Addr) (*Pool, bool) {
	for i := range c.Pools {
		p := &c.Pools[i]
		if p.Free.Contains(a) || p.Withheld.Contains(a) {
			return p, true
		}
	}
	return nil, false
}

// PoolOn returns the pool that leases its addresses on the interface.
func (c *Config) PoolOn(name string) (*Pool, bool) {
	for i := range c.Pools {
		if p := &c.Pools[i]; p.DHCP != nil && p.DHCP.Interface == name {
			return p, true
		}
	}
	return nil, false
}
