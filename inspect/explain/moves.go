package explain

import (
	"net/netip"

	"github.com/lodestone-lb/lodestone/inspect/output"
	"github.com/lodestone-lb/lodestone/inspect/simulation"
	"github.com/lodestone-lb/lodestone/speaker/plan"
)

// Shift is a VIP that other nodes would announce than do now.
type Shift struct {
	VIP      netip.Addr          `json:"vip"`
	Services []string            `json:"services"`
	Before   simulation.Audience `json:"before"`
	After    simulation.Audience `json:"after"`
}

// Orphan is a VIP that nobody would announce.
type Orphan struct {
	VIP      netip.Addr  `json:"vip"`
	Services []string    `json:"services"`
	Reason   plan.Reason `json:"reason"`
	Message  string      `json:"message"`
}

// movesOf returns the VIPs that other nodes would announce, and those that nobody would.
func movesOf(before, after *simulation.Network) (moved []Shift, orphaned []Orphan) {
	moved, orphaned = []Shift{}, []Orphan{}
	services := before.ServicesByVIP()
	for _, m := range before.Moves(after) {
		if m.Orphaned() {
			orphaned = append(orphaned, Orphan{m.VIP, services[m.VIP], m.Silence.Reason, m.Silence.Message})
		} else {
			moved = append(moved, Shift{m.VIP, services[m.VIP], m.Before, m.After})
		}
	}
	return moved, orphaned
}

func showMoves(c *output.Canvas, moved []Shift, orphaned []Orphan) {
	var rows [][]any
	for _, o := range orphaned {
		rows = append(rows, []any{output.Cell{Text: o.VIP.String(), Tone: output.Bad}, output.List(o.Services, 3), string(o.Reason) +
			": " + o.Message})
	}
	c.Table([]string{"NOBODY HAS", "SERVICES", "WHY"}, rows)
	rows = nil
	for _, m := range moved {
		rows = append(rows, []any{m.VIP, output.List(m.Services, 3), m.Before, m.After})
	}
	c.Table([]string{"MOVES", "SERVICES", "FROM", "TO"}, rows)
}
