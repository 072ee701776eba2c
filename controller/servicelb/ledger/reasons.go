package ledger

import (
	"github.com/lodestone-lb/lodestone/ipam"
	"github.com/lodestone-lb/lodestone/pkg/annotation"
	"github.com/lodestone-lb/lodestone/pkg/reason"
)

// The reasons of refusals that are not the allocator's.
const (
	// ConfigUnavailable: there is no configuration at all.
	ConfigUnavailable ipam.Reason = "ConfigUnavailable"
	// AddressConflict ends when no other host has the address that the Service was
	// given. It is the reason of the condition of a Service, too, whose address another
	// host claims.
	AddressConflict ipam.Reason = "AddressConflict"
	// LeasePending ends when a DHCP server leases an address for the Service.
	LeasePending ipam.Reason = "LeasePending"
	// ReleasePending ends when the object of the Service has been written.
	ReleasePending ipam.Reason = "ReleasePending"
)

// EventReason is a stable code in the condition and the Events of a Service. The other codes
// there are reasons of refusals.
type EventReason string

// The states of a Service that has what it asks for.
const (
	ReasonAllocated EventReason = "Allocated"
	// ReasonPartial: one of two families, because no pool gives the other.
	ReasonPartial EventReason = "PartiallyAllocated"
	// ReasonDraining: the address stays, but its pool is to be emptied.
	ReasonDraining EventReason = "Draining"
	// ReasonLeaseOverdue: the address stays until its lease ends, which no DHCP
	// server extends.
	ReasonLeaseOverdue EventReason = "LeaseOverdue"
	// ReasonStranded: the address stays, but no pool gives it any more.
	ReasonStranded EventReason = "Stranded"
)

// What happens to a Service.
const (
	// ReasonLeaseLost: it loses a leased address.
	ReasonLeaseLost EventReason = "LeaseLost"
	// ReasonContested: somebody else writes to its status again and again.
	ReasonContested EventReason = "StatusContested"
	// ReasonDuplicate: it loses an address that another Service has, too.
	ReasonDuplicate EventReason = "DuplicateAddress"
	// ReasonAdopted: it keeps the addresses that another load balancer gave it.
	ReasonAdopted EventReason = "Adopted"
)

// EventReasons explains each EventReason.
func EventReasons() reason.Texts[EventReason] {
	return reason.Texts[EventReason]{
		ReasonAllocated: {Cause: "The Service has the addresses that it asks for.", Cure: "Nothing to do."},
		ReasonPartial: {Cause: "The Service prefers both address families, and no pool gives one of them.",
			Cure: "Add addresses of that family to a pool; or nothing, if one family is enough."},
		ReasonDraining: {Cause: "The Service keeps its address, whose pool has state: draining.",
			Cure: "Have the Service move when it suits (" + moving + ").", Keys: []string{"pools[].state", annotation.Renumber}},
		ReasonStranded: {Cause: "The Service keeps its address, which no pool gives any more after an edit of the configuration.",
			Cure: "Have the Service move (" + moving + "), or put the address back into a pool.", Keys: []string{annotation.Renumber}},
		ReasonLeaseOverdue: {Cause: "The DHCP server does not extend the lease of the address, which is withdrawn when the lease ends; the " +
			"message has the time.", Cure: "See to the DHCP server; the message has its answer, or that there is none."},
		ReasonLeaseLost: {Cause: "A leased address was withdrawn because its lease is over, or its pool is gone.",
			Cure: "The Service gets another address as soon as a pool gives one. See to the DHCP server."},
		ReasonContested: {Cause: "Somebody else has overwritten the Service's status several times in a row.",
			Cure: "Find the other load balancer that serves it, and let one of the two have it: give the Service a spec.loadBalancerClass."},
		ReasonDuplicate: {Cause: "When the controller started, two Services had the same address; the older one keeps it.",
			Cure: "Nothing, if any address will do: the Service is given another one. Clients that know the old one need the new one."},
		ReasonAdopted: {Cause: "Lodestone has taken the Service over with the addresses that another load balancer gave it.",
			Cure: "Nothing to do."},
	}
}

// Refusals explains the reasons of refusals that are not the allocator's.
func Refusals() reason.Texts[ipam.Reason] {
	return reason.Texts[ipam.Reason]{
		ConfigUnavailable: {Cause: "The controller has no configuration: there is no ConfigMap, it lacks the key config.yaml, or it is " +
			"invalid; and there is no copy of a valid one.", Cure: "Write a valid configuration; lodestone validate finds the mistakes."},
		AddressConflict: {Cause: "Another host has the address, or claims it, too.",
			Cure: "Find the other host by its hardware address and take the address away from it. Or exclude the address from the pool and " +
				"annotate the Service with " + annotation.Renumber + "=" + annotation.Renumbering +
				", which gives it another one, unless it asks for this one.", Keys: []string{annotation.Renumber}},
		LeasePending: {Cause: "The pool leases its addresses (dhcp), and the DHCP server has not leased one for the Service.",
			Cure: "Wait for the DHCP server, or see its answer in the Service's condition " + annotation.ConditionAllocated + ".",
			Keys: []string{"pools[].dhcp"}},
		ReleasePending: {Cause: "The Service was edited again and again while its object could not be written, and keeps what it has until " +
			"that is possible: others must not get what it may still show.",
			Cure: "See the controller's log for why it cannot be written, such as annotations that are full (256 KiB); or wait for the API " +
				"server."},
	}
}
