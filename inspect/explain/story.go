// Package explain tells why something is as it is: a Service, a VIP, a node, a pool,
// a BGP peer; and what would become of it. The reasons are those of the code that decides.
package explain

import (
	"net"
	"net/netip"
	"slices"
	"strings"

	"github.com/lodestone-lb/lodestone/inspect/output"
	"github.com/lodestone-lb/lodestone/inspect/simulation"
	"github.com/lodestone-lb/lodestone/pkg/report"
	"github.com/lodestone-lb/lodestone/speaker/plan"
)

// Story is what there is to tell.
type Story interface {
	output.Page
	// Troubled reports whether somebody should look at it.
	Troubled() bool
}

// Claim is a VIP that a host has that is no speaker of the cluster.
type Claim struct {
	VIP netip.Addr `json:"vip"`
	// Node is where it was heard.
	Node         string `json:"node"`
	HardwareAddr string `json:"hardwareAddr"`
	// Announced tells whether the VIP is announced in spite of it.
	Announced bool `json:"announced"`
}

// claims returns what the nodes have heard, in order.
func claims(n *simulation.Network, want func(node string, c report.Conflict) bool) []Claim {
	var all []Claim
	for node, r := range n.Reports {
		for _, c := range r.Conflicts {
			if want(node, c) {
				all = append(all, Claim{c.VIP, node, net.HardwareAddr(c.HardwareAddr[:]).String(), c.Announced})
			}
		}
	}
	slices.SortFunc(all, func(a, b Claim) int {
		if c := a.VIP.Compare(b.VIP); c != 0 {
			return c
		}
		return strings.Compare(a.Node, b.Node)
	})
	return all
}

func (c Claim) String() string {
	state := "and it is not announced"
	if c.Announced {
		state = "and it is announced all the same"
	}
	return c.HardwareAddr + " has " + c.VIP.String() + " as well, as heard on node " + c.Node + ", " + state
}

// facts are rows of a label and what there is to say; several rows may follow
// one label.
type facts [][]any

// add adds what there is to say under the label; nothing if there is nothing.
func (f *facts) add(label string, said ...string) {
	for i, text := range said {
		if i > 0 {
			label = ""
		}
		*f = append(*f, []any{output.Cell{Text: label, Tone: output.Heading}, text})
	}
}

// bad adds what somebody should look at.
func (f *facts) bad(label string, said ...string) {
	for i, text := range said {
		if i > 0 {
			label = ""
		}
		*f = append(*f, []any{output.Cell{Text: label, Tone: output.Heading}, output.Cell{Text: text, Tone: output.Bad}})
	}
}

func strung[T interface{ String() string }](all []T) []string {
	texts := make([]string, len(all))
	for i, v := range all {
		texts[i] = v.String()
	}
	return texts
}

// reason is a reason with its message, for people.
func reason(s plan.Silence) string {
	if s.Reason == "" {
		return s.Message
	}
	return string(s.Reason) + ": " + s.Message
}
