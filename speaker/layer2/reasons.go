package layer2

import (
	"github.com/lodestone-lb/lodestone/pkg/reason"
	"github.com/lodestone-lb/lodestone/speaker/layer2/segment"
)

// Reason is a stable code for why an owned VIP is not announced.
type Reason = segment.Reason

// The reasons.
const (
	// NoInterface: no interface that is up may announce the VIP.
	NoInterface segment.Reason = "NoInterface"
	// NoLinkLocalAddress: the interfaces that may announce the IPv6 VIP have no usable link-local
	// address; InterfaceStatus has the details.
	NoLinkLocalAddress segment.Reason = "NoLinkLocalAddress"
	// InterfaceFailed: the interfaces that may announce the VIP cannot be used; InterfaceStatus has the
	// error.
	InterfaceFailed segment.Reason = "InterfaceFailed"
	// The others are the reasons of a segment.
	Probing         = segment.Probing
	AddressConflict = segment.AddressConflict
	Yielded         = segment.Yielded
)

// Reasons explains each Reason.
func Reasons() reason.Texts[Reason] {
	return reason.Texts[Reason]{
		NoInterface: {Cause: "No interface that is up may announce the VIP.",
			Cure: "Compare interfaces of its advertisements with ip link on the node.",
			Keys: []string{"advertisements[].layer2.interfaces"}},
		NoLinkLocalAddress: {Cause: "No interface that may announce the VIP has an IPv6 link-local address that can be used.",
			Cure: "See ip -6 addr on the node: IPv6 is switched off, or another host has the same link-local address."},
		InterfaceFailed: {Cause: "The interfaces cannot be used, and are tried again.",
			Cure: "The speaker's log has the error, and so has its /status."},
		Probing: {Cause: "The address is new, and whether another machine has it is being asked.",
			Cure: "Nothing to do: it takes 0.6 s."},
		AddressConflict: {Cause: "Another host has the address.",
			Cure: "Find it by its hardware address, and take the address away from it or exclude it from the pool."},
		Yielded: {Cause: "Another speaker with the same Secret and clusterID announces the VIP, too, and ranks above this one: the two do " +
			"not see each other, or they belong to two clusters.",
			Cure: "Open port 9744, TCP and UDP, between the nodes, in both directions; if the other one is of another cluster, give each " +
				"cluster a clusterID or a Secret of its own, and pools that do not overlap.",
			Keys: []string{"clusterID"}},
	}
}
