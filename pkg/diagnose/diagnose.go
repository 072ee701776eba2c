// Package diagnose decides, from facts of the nodes and of the API server, what keeps an
// installation from working, and what to do about it. It is pure: speakers gather the facts
// of their nodes, the CLI gathers those of the cluster and asks this package.
//
// The files, from the outside in:
//
//	diagnose.go   Check: findings, and what they have in common
//	catalogue.go  each check: what it looks at, and what to do
//	facts.go      what is checked: of a node, and of the cluster
//	node.go       checks of one node
//	cluster.go    checks of nodes with each other, and of the cluster
//	direct.go     the check of direct forwarding
//	detection.go  the check of the failure detector
package diagnose

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
)

// ID names a check: the same in tickets, documents and programs, for ever.
type ID string

// Severity is how bad a finding is.
type Severity string

// The severities, the worst first.
const (
	Error   Severity = "error"   // Services do not work, or will not when something moves
	Warning Severity = "warning" // some clients, or some day, will notice
	Unknown Severity = "unknown" // it could not be found out
	OK      Severity = "ok"
)

var bySeverity = []Severity{Error, Warning, Unknown, OK}

// Finding is what a check found.
type Finding struct {
	Check    ID       `json:"check"`
	Severity Severity `json:"severity"`
	// Nodes are those that it is about. None: the whole cluster.
	Nodes   []string `json:"nodes,omitempty"`
	Message string   `json:"message"`
	// Hint is what to do about it, a command if there is one.
	Hint string `json:"hint,omitempty"`
}

// Report is what the checks found.
type Report struct {
	// Findings are ordered by severity, then by check.
	Findings []Finding `json:"findings"`
	// NotRun are the checks that probe the network, which nobody asked for.
	NotRun []ID `json:"notRun,omitempty"`
}

// Check runs all checks of the cluster. A check that finds nothing reports that.
func Check(c *Cluster) Report {
	r := Report{Findings: []Finding{}}
	for _, check := range catalogue {
		if check.Active && !c.Active {
			r.NotRun = append(r.NotRun, check.ID)
			continue
		}
		all := c.notices(check.ID)
		if check.run != nil {
			all = append(all, check.run(c)...)
		}
		if len(all) == 0 {
			all = []Finding{check.nothing(c)}
		}
		for _, f := range merge(all) {
			f.Check = check.ID
			r.Findings = append(r.Findings, f)
		}
	}
	slices.SortStableFunc(r.Findings, func(a, b Finding) int {
		return cmp.Compare(slices.Index(bySeverity, a.Severity), slices.Index(bySeverity, b.Severity))
	})
	return r
}

// notices returns the notices for the check.
func (c *Cluster) notices(check ID) (all []Finding) {
	for _, n := range c.Notices {
		if n.Check == check {
			all = append(all, found(n.Severity, "", n.Hint, "%s", n.Message))
		}
	}
	return all
}

// nothing is what a check reports that finds nothing. It reports that all is well only if it knows
// enough.
func (e Entry) nothing(c *Cluster) Finding {
	known, nodes := len(c.Facts), len(c.Facts)+len(c.Mute)
	switch {
	case slices.Contains(c.Undecided, e.ID):
		return Finding{Severity: Unknown, Message: "undecided: what it takes could not be read"}
	case e.OfNodes && known == 0:
		return Finding{Severity: Unknown, Message: "undecided: no speaker reported on its node"}
	case e.OfNodes && known < nodes:
		return Finding{Severity: OK, Message: fmt.Sprintf("%s, by the reports of %d of %d nodes", e.Fine, known, nodes)}
	}
	return Finding{Severity: OK, Message: e.Fine}
}

// Has reports whether something has that severity.
func (r Report) Has(s Severity) bool {
	return slices.ContainsFunc(r.Findings, func(f Finding) bool { return f.Severity == s })
}

// merge joins findings that differ only in their nodes, in the order of the
// first ones.
func merge(all []Finding) []Finding {
	type key struct {
		Severity
		message, hint string
	}
	at := map[key]int{}
	var merged []Finding
	for _, f := range all {
		k := key{f.Severity, f.Message, f.Hint}
		if i, ok := at[k]; ok && len(f.Nodes) > 0 {
			merged[i].Nodes = append(merged[i].Nodes, f.Nodes...)
			continue
		}
		at[k] = len(merged)
		merged = append(merged, f)
	}
	for i := range merged {
		slices.Sort(merged[i].Nodes)
		merged[i].Nodes = slices.Compact(merged[i].Nodes)
	}
	return merged
}

// found returns a finding about a node; "" stands for the cluster.
func found(s Severity, node, hint, format string, args ...any) Finding {
	f := Finding{Severity: s, Message: fmt.Sprintf(format, args...), Hint: hint}
	if node != "" {
		f.Nodes = []string{node}
	}
	return f
}

// list joins the first few names and counts the others.
func list(names []string) string {
	const few = 4
	if len(names) <= few {
		return strings.Join(names, ", ")
	}
	return fmt.Sprintf("%s and %d more", strings.Join(names[:few], ", "), len(names)-few)
}
