package kube

import "github.com/lodestone-lb/lodestone/pkg/reason"

// EventReason is a stable code in the Events on the ConfigMap.
type EventReason string

// The reasons.
const (
	ReasonConfigInvalid     EventReason = "ConfigInvalid"
	ReasonConfigValid       EventReason = "ConfigValid"
	ReasonConfigWarning     EventReason = "ConfigWarning"
	ReasonConfigWarningOver EventReason = "ConfigWarningOver"
	ReasonConfigRestored    EventReason = "ConfigRestored"
)

// EventReasons explains each EventReason.
func EventReasons() reason.Texts[EventReason] {
	return reason.Texts[EventReason]{
		ReasonConfigInvalid: {Cause: "The new document has mistakes, which the message names; the last good one stays in force.",
			Cure: "Correct the document; lodestone validate finds the mistakes before it is applied."},
		ReasonConfigValid: {Cause: "The document is valid again, and in force.", Cure: "Nothing to do."},
		ReasonConfigWarning: {Cause: "The document is in force, and something in it makes no sense in this cluster, such as a pool that " +
			"contains addresses of nodes.",
			Cure: "Follow the message. The addresses that it names are not handed out, or neighbours do not ask for them."},
		ReasonConfigRestored: {Cause: "A program has started while the document is missing or has mistakes. It works by the copy of the " +
			"last valid document in the ConfigMap lodestone-config-last-valid.",
			Cure: "Correct the document."},
		ReasonConfigWarningOver: {Cause: "A warning about the document no longer applies.", Cure: "Nothing to do."},
	}
}
