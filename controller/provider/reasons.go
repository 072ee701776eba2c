package provider

import "github.com/lodestone-lb/lodestone/pkg/reason"

// EventReason is a stable code in the Events of Nodes.
type EventReason string

// ReasonNotInitialized is the reason of Events on a Node that keeps its taint.
const ReasonNotInitialized EventReason = "NotInitialized"

// EventReasons explains each EventReason.
func EventReasons() reason.Texts[EventReason] {
	return reason.Texts[EventReason]{
		ReasonNotInitialized: {Cause: "Lodestone does not initialize the new node: another cloud controller manager is at work, which " +
			"does, or something is missing, which the message names.",
			Cure: "Follow the message. Which nodes Lodestone initializes is the chart's controller.nodeInitialization."},
	}
}
