// Package reason explains reasons: the codes by which conditions, Events,
// metrics, logs and the CLI explain why something is as it is. A package with a
// type of reasons has, beside the type, a function that returns its Texts;
// docs/reference/reasons.md is made of them, as docs/reference/metrics.md is of the metrics.
package reason

// Text explains one reason to people, in sentences without markup.
type Text struct {
	// Cause is what has happened.
	Cause string
	// Cure is what helps against it, or why nothing need be done.
	Cure string
	// Keys are the settings that the reason follows from: keys of the configuration,
	// annotations, values of the chart.
	Keys []string
}

// Texts has the Text of each reason of a type.
type Texts[R ~string] map[R]Text
