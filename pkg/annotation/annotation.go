// Package annotation names every annotation, label, finalizer and class that
// Lodestone reads from or writes to Kubernetes objects.
package annotation

// Annotations that a user writes on a Service.
const (
	// AddressPool names the pool, or a comma-separated list of pools in order
	// of preference, that the Service draws from.
	AddressPool = "lodestone.io/address-pool"
	// Addresses is a comma-separated list of the addresses that the Service
	// asks for, at most one per family.
	Addresses = "lodestone.io/addresses"
)

// What Lodestone writes on a Service.
const (
	// Assigned is the comma-separated list of the addresses that Lodestone
	// gave to the Service, in the order of its status. It marks the status as
	// ours: speakers announce an address only when both name it, so the
	// status of another load balancer's Service is never announced.
	Assigned = "lodestone.io/assigned-addresses"
	// Finalizer keeps a class-less Service until its address is released.
	// Kubernetes' own tests and tools look for this name.
	Finalizer = "service.kubernetes.io/load-balancer-cleanup"
	// ClassFinalizer keeps a Service of one of our classes until its address
	// is released. It is a name of our own, because another provider's
	// service controller strips the conventional one from classed Services.
	ClassFinalizer = "lodestone.io/load-balancer-cleanup"
	// ConditionAllocated is the Service condition that tells whether it has
	// the addresses it asks for, and why not.
	ConditionAllocated = "lodestone.io/Allocated"
)

// DefaultClass is the spec.loadBalancerClass served by default.
const DefaultClass = "lodestone.io/lodestone"
