package explain

import (
	"fmt"
	"maps"
	"net/netip"
	"strings"

	"github.com/lodestone-lb/lodestone/inspect/cluster"
	"github.com/lodestone-lb/lodestone/inspect/output"
	"github.com/lodestone-lb/lodestone/inspect/simulation"
	"github.com/lodestone-lb/lodestone/pkg/clusterfacts"
	"github.com/lodestone-lb/lodestone/pkg/config"
	"github.com/lodestone-lb/lodestone/pkg/config/change"
)

// Edit explains an edit of the configuration.
type Edit struct {
	// Edits are sentences about changes of the pools. Warnings are about what makes no sense in this cluster.
	Edits    []string `json:"edits"`
	Warnings []string `json:"warnings,omitempty"`
	// Services are ordered by what becomes of them, the worst first. Services that keep what they have are only
	// counted, unless all were asked for.
	Services []Outcome                 `json:"services"`
	Counts   map[simulation.Change]int `json:"counts"`
	// Nobody would announce the VIPs in Orphaned any more. Other nodes would announce those in Moved.
	Orphaned []Orphan `json:"orphaned"`
	Moved    []Shift  `json:"moved"`
	// Unread is what could not be read, so that Orphaned and Moved are not known.
	Unread []string `json:"unread,omitempty"`
}

// Outcome is what the edit does to a Service.
type Outcome struct {
	Service string            `json:"service"`
	Change  simulation.Change `json:"change"`
	// Message is how it would stand.
	Message string `json:"message"`
}

// outcomes are what an edit can do to a Service, the worst first, each with its name for people.
var outcomes = []struct {
	change simulation.Change
	text   string
}{
	{simulation.Lost, "without their leased address"},
	{simulation.Stranded, "stranded"},
	{simulation.Refused, "refused what they ask for"},
	{simulation.Pending, "still waiting"},
	{simulation.Satisfied, "newly satisfied"},
	{simulation.Settled, "not stranded any more"},
	{simulation.Kept, "unchanged"},
}

// OfEdit returns what another configuration would do to the cluster, of which cluster.ForAddresses
// has been read. With all, Services that nothing changes for are listed, too.
func OfEdit(o *cluster.Objects, next *config.Config, all bool) Edit {
	c := o.Cluster()
	e := Edit{Edits: []string{}, Warnings: clusterfacts.Warnings(next, c.Facts), Services: []Outcome{}, Counts: map[simulation.Change]int{},
		Orphaned: []Orphan{}, Moved: []Shift{}}
	for _, d := range change.Diff(o.Config, next) {
		e.Edits = append(e.Edits, d.Message)
	}
	planned := c.Plan(next)
	for _, kind := range outcomes {
		for _, p := range planned {
			if p.Change != kind.change {
				continue
			}
			e.Counts[p.Change]++
			if all || p.Change != simulation.Kept {
				e.Services = append(e.Services, Outcome{p.Service, p.Change, p.After.String()})
			}
		}
	}
	if !o.Has(cluster.ForVIPs...) {
		e.Unread = o.Unread()
		return e
	}
	lost, before := lostIn(planned), o.Network()
	e.Moved, e.Orphaned = movesOf(before, before.Under(next, func(vip netip.Addr) bool { return lost[vip] }))
	return e
}

// lostIn returns the addresses that their Services would not hold any more.
func lostIn(planned []simulation.Outcome) map[netip.Addr]bool {
	lost, held := map[netip.Addr]bool{}, map[netip.Addr]bool{}
	for _, p := range planned {
		for _, h := range p.Before.Held {
			lost[h.Addr] = true
		}
		for _, h := range p.After.Held {
			held[h.Addr] = true
		}
	}
	maps.DeleteFunc(lost, func(vip netip.Addr, _ bool) bool { return held[vip] })
	return lost
}

// Troubled implements Story.
func (e Edit) Troubled() bool {
	return e.Counts[simulation.Lost]+e.Counts[simulation.Stranded] > 0 || len(e.Orphaned) > 0
}

// Show implements output.Page.
func (e Edit) Show(c *output.Canvas) {
	var rows [][]any
	for _, text := range e.Edits {
		rows = append(rows, []any{"edit", text})
	}
	for _, text := range e.Warnings {
		rows = append(rows, []any{output.Cell{Text: "warning", Tone: output.Warning}, text})
	}
	for _, s := range e.Services {
		cell := output.Cell{Text: string(s.Change)}
		if s.Change == simulation.Lost || s.Change == simulation.Stranded {
			cell.Tone = output.Bad
		}
		rows = append(rows, []any{cell, s.Service, s.Message})
	}
	c.Rows(nil, rows)
	var counts []string
	for _, kind := range outcomes {
		if n := e.Counts[kind.change]; n > 0 {
			counts = append(counts, fmt.Sprintf("%d %s", n, kind.text))
		}
	}
	if len(counts) == 0 {
		counts = []string{"none"}
	}
	c.Line(output.Heading, "Services: %s", strings.Join(counts, ", "))
	if len(e.Unread) > 0 {
		c.Line(output.Bad, "VIPs: who would announce them is not known: %s", strings.Join(e.Unread, "; "))
		return
	}
	c.Line(output.Heading, "VIPs: %d announced by others than now, %d by nobody any more", len(e.Moved), len(e.Orphaned))
	showMoves(c, e.Moved, e.Orphaned)
}
