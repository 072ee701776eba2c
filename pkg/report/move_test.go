package report_test

import (
	"fmt"
	"net/netip"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/lodestone-lb/lodestone/pkg/report"
)

var (
	morning = time.Date(2026, 11, 21, 8, 0, 0, 0, time.UTC)
	a, b    = netip.MustParseAddr("203.0.113.1"), netip.MustParseAddr("203.0.113.2")
	six     = netip.MustParseAddr("2001:db8::1")
)

func TestMoves(t *testing.T) {
	t.Parallel()
	moves := []report.Move{
		{At: morning, From: "n1", Why: report.SpeakerLost, To: map[string][]netip.Addr{"n2": {a, six}, "": {b}}},
		{At: morning.Add(time.Second), To: map[string][]netip.Addr{"n1": {b}}},
	}
	require.Equal(t, moves, again(t, report.Report{Moves: []report.Move{moves[1], moves[0]}}).Moves)
	require.Equal(t, moves[1:], report.NewMoves(moves[:1], moves))
	require.Empty(t, report.NewMoves(moves, moves[1:]), "a move that has left the report is not new")
}

// A node with 5,000 VIPs dies, among 1,000 others.
func TestMovesAreBounded(t *testing.T) {
	t.Parallel()
	many := report.Move{At: morning, From: "n0", Why: report.SpeakerLost, To: map[string][]netip.Addr{}}
	vip := netip.MustParseAddr("2001:db8:1234:5678::1")
	for i := range 5000 {
		node := fmt.Sprintf("worker-%04d.rack-7.example.com", i%1000)
		many.To[node], vip = append(many.To[node], vip), vip.Next()
	}
	last := report.Move{At: morning.Add(time.Second), From: "n1", To: map[string][]netip.Addr{"n2": {a}}}
	text := report.Report{Moves: []report.Move{many, last}}.String()
	require.LessOrEqual(t, len(text), report.MaxBytes)
	read, err := report.Parse(text)
	require.NoError(t, err)
	reported := read.Moves
	require.Equal(t, last, reported[len(reported)-1], "the latest comes first")
	require.LessOrEqual(t, report.CountVIPs(reported), report.MaxVIPs)
	require.Greater(t, report.CountVIPs(reported), report.MaxVIPs/2)
	t.Logf("%d VIPs in %d bytes", report.CountVIPs(reported), len(text))
}

func TestDescribe(t *testing.T) {
	t.Parallel()
	for want, got := range map[string]string{
		"node n2 announces 203.0.113.1 instead of node n1: the speaker on node n1 is not heard any more: the node is down or cut off, or " +
			"its speaker was killed": report.Describe("203.0.113.1", "n1", "n2", report.SpeakerLost),
		"node n2 announces 203.0.113.1 instead of node n1: node n2 is preferred, and is able to have it": report.Describe("203.0.113.1",
			"n1", "n2", "LessPreferred"),
		"node n2 announces 203.0.113.1 instead of node n1": report.Describe("203.0.113.1",
			"n1", "n2", ""),
		"no node announces 203.0.113.1 by layer 2 any more, node n1 did: no endpoint of the Service takes traffic": report.Describe("203.0.113.1",
			"n1", "", "NoServingEndpoint"),
		"node n1 announces 203.0.113.1 by layer 2":               report.Describe("203.0.113.1", "", "n1", report.FirstOwner),
		"node n1 announces 203.0.113.1 again, which no node did": report.Describe("203.0.113.1", "", "n1", "NotOwner"),
	} {
		require.Equal(t, want, got)
	}
}
