package status

import (
	"fmt"
	"strings"

	"github.com/lodestone-lb/lodestone/inspect/output"
)

// Show implements output.Page.
func (s *Status) Show(c *output.Canvas) {
	s.showWarnings(c)
	c.Blank()
	s.showComponents(c)
	c.Table(PoolHeader, PoolRows(s.Pools))
	s.showServices(c)
	s.showVIPs(c)
	s.showPeers(c)
}

func (s *Status) showWarnings(c *output.Canvas) {
	var rows [][]any
	for _, text := range s.Unread {
		rows = append(rows, []any{output.Cell{Text: "!", Tone: output.Bad}, "not read", text})
	}
	for _, w := range s.Warnings {
		rows = append(rows, []any{output.Cell{Text: "!", Tone: output.Warning}, w.About, w.Message})
	}
	if len(rows) == 0 {
		c.Line(output.Good, "All is well.")
		return
	}
	c.Line(output.Heading, "%s", output.Count(len(rows), "WARNING", "WARNINGS"))
	c.Rows(nil, rows)
	if s.Configuration != nil {
		for _, e := range s.Configuration.Errors {
			c.Line(output.Bad, "  %s", e)
		}
	}
}

// unread stands for what could not be read.
const unread = "not read"

func (s *Status) showComponents(c *output.Canvas) {
	configuration, controller, speakers := unread, unread, unread
	if s.Configuration != nil {
		configuration = s.Configuration.String()
	}
	if f := s.Controller; f != nil {
		controller = fmt.Sprintf("%d of %d ready%s", f.Ready, f.Replicas, versionText(f.Versions))
		if f.Leader != "" {
			controller += ", " + f.Leader + " leads"
			if !f.LeaderSince.IsZero() {
				controller += " since " + output.Age(s.Time.Sub(f.LeaderSince))
			}
		}
	}
	if f := s.Speakers; f != nil {
		speakers = fmt.Sprintf("%d of %s ready%s", f.Ready, output.Count(f.Nodes, "node", "nodes"), versionText(f.Versions))
		if f.MembershipKey != "" {
			speakers += ", membership key " + f.MembershipKey
		}
	}
	rows := [][]any{
		{heading("CONFIGURATION"), configuration}, {heading("CONTROLLER"), controller}, {heading("SPEAKERS"), speakers},
	}
	if s.Detection != nil {
		rows = append(rows, []any{heading("DETECTION"), s.Detection})
	}
	c.Rows(nil, rows)
}

func heading(text string) output.Cell { return output.Cell{Text: text, Tone: output.Heading} }

func versionText(versions []string) string {
	if len(versions) == 0 {
		return ""
	}
	return ", version " + strings.Join(versions, " and ")
}

// PoolHeader is the header of PoolRows.
var PoolHeader = []string{"POOL", "FAMILY", "USED", "", "FREE", "QUARANTINE", "RESERVED", ""}

// Full reports whether the pool should have addresses and has none.
func (p Pool) Full() bool { return p.Free == 0 && !p.Draining && !p.Leased }

// PoolRows are the rows of a table of pools.
func PoolRows(pools []Pool) [][]any {
	var rows [][]any
	for _, p := range pools {
		if p.Leased {
			rows = append(rows, []any{p.Name, p.Family, "leased by DHCP", output.Number(p.Used), "", "", "", note(p)})
			continue
		}
		tone := output.Good
		switch share := 1 - p.Free/max(p.Size, 1); {
		case p.Full():
			tone = output.Bad
		case share >= 0.9:
			tone = output.Warning
		}
		rows = append(rows, []any{p.Name, p.Family, output.Cell{Text: output.Bar(p.Used, p.Size), Tone: tone},
			output.Number(p.Used) + " of " + output.Number(p.Size), output.Number(p.Free), output.Number(p.Quarantined),
			output.Number(p.Reserved), note(p)})
	}
	return rows
}

func note(p Pool) string {
	if p.Draining {
		return "draining: gives no new addresses"
	}
	return ""
}

func (s *Status) showServices(c *output.Canvas) {
	if s.Services == nil {
		return
	}
	waiting := 0
	for _, w := range s.Services.Waiting {
		waiting += len(w.Services)
	}
	c.Blank()
	c.Rows(nil, [][]any{{heading("SERVICES"),
		fmt.Sprintf("%d served, %d waiting, %d stranded", s.Services.Served, waiting, len(s.Services.Stranded))}})
	var rows [][]any
	for _, w := range s.Services.Waiting {
		rows = append(rows, []any{w.Reason, len(w.Services), output.List(w.Services, 3)})
	}
	c.Rows([]string{"WAITING FOR", "SERVICES", ""}, rows)
}

func (s *Status) showVIPs(c *output.Canvas) {
	if s.VIPs == nil {
		return
	}
	c.Blank()
	silent := 0
	for _, v := range s.VIPs.Silent {
		silent += len(v.VIPs)
	}
	c.Rows(nil, [][]any{{heading("VIPS"), fmt.Sprintf("%d, %d announced by nobody; by the plan, for speakers whose pods are ready",
		s.VIPs.Total, silent)}})
	var rows [][]any
	for _, n := range s.VIPs.Nodes {
		rows = append(rows, []any{n.Node, n.Layer2, n.BGP})
	}
	c.Rows([]string{"NODE", "OWNS (LAYER 2)", "ANNOUNCES (BGP)"}, rows)
}

func (s *Status) showPeers(c *output.Canvas) {
	var rows [][]any
	for _, p := range s.Peers {
		sessions, why := output.Cell{Text: fmt.Sprintf("%d of %d up", p.Up, p.Nodes), Tone: output.Good}, ""
		if len(p.Down) > 0 {
			sessions.Tone = output.Bad
			why = p.Down[0].Why()
		}
		rows = append(rows, []any{p.Name, sessions, why})
	}
	c.Table([]string{"BGP PEER", "SESSIONS", ""}, rows)
}
