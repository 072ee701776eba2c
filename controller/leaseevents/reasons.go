package leaseevents

import "github.com/lodestone-lb/lodestone/pkg/reason"

// EventReason is a stable code in the Events.
type EventReason string

// The reasons of Events on Nodes.
const (
	ReasonSessionUp            EventReason = "BGPSessionUp"
	ReasonSessionDown          EventReason = "BGPSessionDown"
	ReasonSessionFlawed        EventReason = "BGPSessionFlawed"
	ReasonInterfaceMissing     EventReason = "InterfaceMissing"
	ReasonInterfaceMissingOver EventReason = "InterfaceMissingOver"
)

// The reasons of Events on Services.
const (
	ReasonAnnounced    EventReason = "Announced"
	ReasonOwnerChanged EventReason = "OwnerChanged"
	ReasonNoOwner      EventReason = "NoOwner"
)

// EventReasons explains each EventReason.
func EventReasons() reason.Texts[EventReason] {
	return reason.Texts[EventReason]{
		ReasonSessionUp: {Cause: "The node's BGP session with a router is established.", Cure: "Nothing to do."},
		ReasonSessionDown: {Cause: "The node has no BGP session with a router that it should have one with; the message has the reason.",
			Cure: "Follow the message; lodestone bgp peers shows all sessions. The router's log has the same event."},
		ReasonSessionFlawed: {Cause: "The node's BGP session with a router is established, and something is wrong with it, " +
			"which the message names.", Cure: "Follow the message, before a router takes offence at it."},
		ReasonInterfaceMissing: {Cause: "An advertisement announces on none of the node's interfaces, and so announces nothing there.",
			Cure: "Compare its layer2.interfaces with ip link on the node, or leave the node out by its nodeSelector.",
			Keys: []string{"advertisements[].layer2.interfaces", "advertisements[].layer2.nodeSelector"}},
		ReasonInterfaceMissingOver: {Cause: "The node has an interface for the advertisement again, or needs none any more.",
			Cure: "Nothing to do."},
		ReasonAnnounced: {Cause: "A new address of the Service is announced by layer 2, and has been for 10 seconds. The message names " +
			"the node. Of many that are new at a time not all have the Event.", Cure: "Nothing to do."},
		ReasonOwnerChanged: {Cause: "Another node announces an address of the Service by layer 2, and has for 10 seconds. The message names " +
			"the node that did before, and has the reason.",
			Cure: "Nothing to do for the Service. Look at the node that had it, if nobody meant it to move."},
		ReasonNoOwner: {Cause: "No node has announced an address of the Service by layer 2 for 10 seconds, and one did before.",
			Cure: "The message has the reason; lodestone explain service shows what every node lacks."},
	}
}
