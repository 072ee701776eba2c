// Package config is Lodestone's configuration: one YAML document in one
// ConfigMap. Parse turns its text into a Config or into every error it
// contains, each with line and column.
//
// A Config that exists is valid: addresses are netip values, ranges do not
// overlap, references resolve, defaults are filled in. Nobody downstream
// checks again. The package is a leaf: it imports nothing of ours and nothing
// of Kubernetes, so that the allocator, the plan and the CLI can share it.
package config

import (
	"net/netip"
	"slices"
	"time"

	"go4.org/netipx"
)

// Where the document lives in the cluster, unless flags say otherwise.
const (
	// Namespace is the namespace of Lodestone's own objects.
	Namespace = "lodestone-system"
	// ConfigMapName is the name of the ConfigMap that holds the document.
	ConfigMapName = "lodestone-config"
	// Key is the ConfigMap key whose value is the document.
	Key = "config.yaml"
	// APIVersion is the only document version that Parse accepts.
	APIVersion = "lodestone.io/v1alpha1"
	// Kind is the only document kind that Parse accepts.
	Kind = "Config"
)

// DefaultQuarantine is how long a freed address rests before it is given to
// another Service: long enough for neighbour caches and connections of the
// old Service's clients to end.
const DefaultQuarantine = 30 * time.Second

// Config is one valid configuration. It is immutable: a change of the
// document makes a new Config.
type Config struct {
	// ClusterID names this cluster in load balancer names and, on the wire,
	// against other clusters on the same segment. Default: "kubernetes".
	ClusterID string
	// Quarantine is how long a freed address rests before it is reused by
	// another Service.
	Quarantine time.Duration
	// Membership says how speakers notice that one of them is lost.
	Membership Membership
	// Pools are the address pools in the order of the document.
	Pools []Pool
	// Reservations keep addresses of the pools for Services, in the order of
	// the document. No address is in two of them.
	Reservations []Reservation
	// Advertisements say how VIPs are made known. Never empty: a document
	// without any announces every pool by layer 2 from every node.
	Advertisements []Advertisement
	// Nodes is what the operator says about machines; the first entry that
	// matches a node's name applies.
	Nodes []NodeRule
	// Digest identifies the document's text (hex SHA-256), for logs and
	// metrics.
	Digest string
}

// Failover is how soon a lost speaker is noticed, against how long one that is
// slow is borne with.
type Failover string

// What the document can say.
const (
	FailoverFast         Failover = "fast"
	FailoverNormal       Failover = "normal"
	FailoverConservative Failover = "conservative"
)

// Membership is how speakers notice that one of them is lost: they probe each
// other, suspect who does not answer, and declare lost who does not object.
type Membership struct {
	// ProbeInterval is how often a speaker probes one of the others.
	ProbeInterval time.Duration
	// ProbeTimeout is how long it waits before it asks others to probe, too.
	// It is shorter than ProbeInterval, which bounds the whole probe.
	ProbeTimeout time.Duration
	// SuspicionMultiplier times ProbeInterval is how long a suspect has to
	// object, longer where there are more than 10 speakers.
	SuspicionMultiplier int
	// GossipInterval is how often news is passed on.
	GossipInterval time.Duration
	// GracePeriod is how long a speaker that is declared lost may still object.
	GracePeriod time.Duration
}

// Membership returns what the setting stands for.
func (f Failover) Membership() Membership {
	const ms = time.Millisecond
	switch f {
	case FailoverFast:
		return Membership{25 * ms, 12 * ms, 2, 10 * ms, 50 * ms}
	case FailoverConservative:
		return Membership{250 * ms, 125 * ms, 3, 50 * ms, 250 * ms}
	default:
		return Membership{50 * ms, 25 * ms, 2, 20 * ms, 50 * ms}
	}
}

// Pool is a named set of addresses that Services may be given.
type Pool struct {
	Name string
	// Free is every address the pool may hand out: the document's addresses
	// without its excludes and without the first and last address of each
	// IPv4 prefix (RFC 919, RFC 3021 prefixes of 31 and 32 bits keep theirs).
	// A pool with DHCP has none of its own.
	Free *netipx.IPSet
	// Withheld is what the document's prefixes contain but the pool never
	// hands out: excludes, network and broadcast addresses.
	Withheld *netipx.IPSet
	// DHCP says where the pool leases its addresses. Nil: it does not.
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

// Subject is what a pool may make its being open depend on: the labels of a
// Service and of its namespace.
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
		n += count(r)
	}
	return n
}

// Advertisement is one way of making VIPs known to the network.
type Advertisement struct {
	Name string
	// NodeSelector restricts the advertisement to nodes with these labels.
	NodeSelector Selector
	// ServiceSelector restricts the advertisement to the VIPs of Services with
	// these labels.
	ServiceSelector Selector
	// Layer2 announces on the segment. Nil: not by layer 2.
	Layer2 *Layer2
}

// Layer2 are the settings of a layer-2 advertisement.
type Layer2 struct {
	// Interfaces are path.Match patterns of the names of the interfaces that
	// answer and announce. Empty: every suitable one.
	Interfaces []string
	// PreferredNodes are the nodes to be owners rather than others.
	PreferredNodes []Preference
	// AnySegment lets nodes own VIPs that are on no subnet of theirs.
	AnySegment bool
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

// NodeRule is what the operator says about the machines whose Node name
// matches one of the patterns.
type NodeRule struct {
	// Names are path.Match patterns of Node names.
	Names []string
	// Region and Zone become the topology.kubernetes.io labels of a new
	// node. Empty: no label.
	Region, Zone string
	// Gone says positively that the machine no longer exists: its Node
	// object may be deleted.
	Gone bool
}

// PoolOf returns the pool whose addresses, withheld ones included, contain
// the address. It knows no leases: see PoolOn.
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
	i := slices.IndexFunc(c.Pools, func(p Pool) bool { return p.DHCP != nil && p.DHCP.Interface == name })
	if i < 0 {
		return nil, false
	}
	return &c.Pools[i], true
}
