// Package explain explains why something is as it is: a Service, a VIP, a node, a pool,
// a BGP peer; and what would become of it. The reasons are those of the code that decides.
//
// The files, from the outside in:
//
//	explain.go     what all explanations have: facts, and help by reason
//	service.go     a Service: its addresses, or why it has none
//	vip.go         a VIP: who announces it, and why the others do not
//	forwarding.go  which nodes keep its connections, with direct forwarding
//	node.go        a node: what it announces, and what keeps it from the rest
//	pool.go        a pool: what is free, and who holds what
//	peer.go        a BGP peer: its sessions and routes, and how soon it notices a loss
//	edit.go        what an edit of the configuration changes
//	removal.go     what the loss or the drain of a node changes
//	moves.go       which VIPs move then, and which nobody announces
package explain

import (
	"slices"
	"strings"

	"github.com/lodestone-lb/lodestone/inspect/output"
	"github.com/lodestone-lb/lodestone/speaker/plan"
)

// Story is the explanation of one thing.
type Story interface {
	output.Page
	// Troubled reports whether somebody should look at it.
	Troubled() bool
}

// Help is what helps against the reasons of an explanation.
type Help struct {
	// Advice are sentences.
	Advice []string `json:"advice,omitempty"`
	// Keys are what the reasons follow from: keys of the configuration, annotations, values of the chart.
	Keys []string `json:"keys,omitempty"`
}

// add adds what is not there yet.
func (h *Help) add(advice, keys []string) {
	h.Advice, h.Keys = union(h.Advice, advice), union(h.Keys, keys)
}

// union adds to the texts those that are not among them.
func union(texts, more []string) []string {
	for _, text := range more {
		if !slices.Contains(texts, text) {
			texts = append(texts, text)
		}
	}
	return texts
}

func (h Help) show(f *facts) {
	f.add("What helps", h.Advice...)
	if len(h.Keys) > 0 {
		f.add("Keys", strings.Join(h.Keys, ", "))
	}
}

// facts are rows of a label and a sentence; several rows may follow one label.
type facts [][]any

// add adds the sentences under the label; nothing if there are none.
func (f *facts) add(label string, sentences ...string) { f.addToned(output.Plain, label, sentences) }

// bad adds sentences that somebody should look at.
func (f *facts) bad(label string, sentences ...string) { f.addToned(output.Bad, label, sentences) }

func (f *facts) addToned(tone output.Tone, label string, sentences []string) {
	for _, text := range sentences {
		*f = append(*f, []any{output.Cell{Text: label, Tone: output.Heading}, output.Cell{Text: text, Tone: tone}})
		label = ""
	}
}

// spelled is a reason with its message, for people.
func spelled(s plan.Silence) string {
	if s.Reason == "" {
		return s.Message
	}
	return string(s.Reason) + ": " + s.Message
}
