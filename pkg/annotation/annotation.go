// Package annotation names every annotation, label, finalizer and class that
// Lodestone reads from or writes to Kubernetes objects. The ledger reads those of Services
// (controller/servicelb/ledger/request.go), and package compat those of other load balancers.
//
//	annotation.go  the names
//	values.go      values that several packages read
package annotation

// Annotations that a user writes on a Service.
const (
	// AddressPool names the pool, or a comma-separated list of pools in order
	// of preference, that the Service draws from.
	AddressPool = "lodestone.io/address-pool"
	// Addresses is a comma-separated list of the addresses that the Service
	// asks for, of one family or both.
	Addresses = "lodestone.io/addresses"
	// AddressCount is how many addresses the Service asks for of each family of which Addresses
	// names none; ParseAddressCount reads it.
	AddressCount = "lodestone.io/address-count"
	// SharingKey makes Services with the same key have the same address, as
	// long as their ports differ.
	SharingKey = "lodestone.io/sharing-key"
	// SharingNamespaces is a comma-separated list of the other namespaces with
	// whose Services the address may be shared, if they name this one.
	SharingNamespaces = "lodestone.io/sharing-namespaces"
	// Renumber, set to Renumbering, asks for new addresses in place of those that a new
	// Service would not be given: stranded ones, and those of pools that are draining or not
	// open to the Service any more. The controller removes it when that is done.
	Renumber = "lodestone.io/renumber"
	// ConnectionRateLimit caps the new connections per second that each VIP of
	// the Service takes; ParseConnectionRateLimit reads it.
	ConnectionRateLimit = "lodestone.io/connection-rate-limit"
	// Ignore, set to Ignored, leaves the Service to others, whatever its class.
	Ignore = "lodestone.io/ignore"
)

// Renumbering is the value of Renumber.
const Renumbering = "true"

// Ignored is the value of Ignore.
const Ignored = "true"

// What Lodestone writes on a Service.
const (
	// Assigned is the comma-separated list of the addresses that Lodestone
	// gave to the Service, in the order of its status. It marks the status as
	// ours: speakers announce an address only when both name it, so the
	// status of another load balancer's Service is never announced.
	Assigned = "lodestone.io/assigned-addresses"
	// AssignedPools is a comma-separated list of pools: for each assigned address the one by
	// whose name the Service got or kept it. A pool may be renamed or split. A Service that
	// goes on naming the old pool keeps its address, after a restart, too.
	AssignedPools = "lodestone.io/assigned-pools"
	// Leases is a comma-separated list of the assigned addresses that a DHCP server leases to
	// Lodestone, each followed by "=" and the interface in the configuration of its pool.
	Leases = "lodestone.io/leases"
	// Finalizer keeps a class-less Service until its address is released.
	// Kubernetes' own tests and tools look for this name.
	Finalizer = "service.kubernetes.io/load-balancer-cleanup"
	// ClassFinalizer keeps a Service of one of our classes until its address
	// is released. It is a name of our own, because another provider's
	// service controller strips the conventional one from classed Services.
	ClassFinalizer = "lodestone.io/load-balancer-cleanup"
	// ConditionAllocated is the Service condition that shows whether it has
	// the addresses it asks for, and why not.
	ConditionAllocated = "lodestone.io/Allocated"
)

// Annotations that a user writes on a Node. They are for BGP peers that do not have the same
// setting.
const (
	// BGPASN is the node's AS number; ParseBGPASN reads it.
	BGPASN = "lodestone.io/bgp-asn"
	// BGPRouterID is the node's BGP identifier; ParseBGPRouterID reads it.
	BGPRouterID = "lodestone.io/bgp-router-id"
	// BGPSourceAddress is the node's end of its sessions, one address or one of
	// each family; ParseBGPSourceAddress reads it.
	BGPSourceAddress = "lodestone.io/bgp-source-address"
)

// What a speaker writes on its Lease, for the other speakers and for the
// controller.
const (
	// LabelComponent marks the Leases that are speakers'. It keeps others of
	// the namespace, which are renewed all the time, out of watches.
	LabelComponent = "lodestone.io/component"
	// ComponentSpeaker is the label's value.
	ComponentSpeaker = "speaker"
	// SpeakerLeasePrefix and the node's name are the Lease's name.
	SpeakerLeasePrefix = "lodestone-speaker-"
	// Report is the speaker's report about itself and its node; package report writes and
	// reads it.
	Report = "lodestone.io/report"
)

// OfServices returns the names of the annotations that are read from a Service, those that
// Lodestone writes first. A cache keeps no others.
func OfServices() []string {
	return []string{
		Ignore, Assigned, AssignedPools, Leases, Addresses, AddressCount, AddressPool, SharingKey, Renumber, ConnectionRateLimit,
		SharingNamespaces,
	}
}

// DefaultClass is the spec.loadBalancerClass served by default.
const DefaultClass = "lodestone.io/lodestone"
