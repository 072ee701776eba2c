package peering_test

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/lodestone-lb/lodestone/pkg/annotation"
	"github.com/lodestone-lb/lodestone/pkg/peering"
)

var morning = time.Date(2026, 11, 21, 8, 0, 0, 0, time.UTC)

func TestSessionsSurviveTheLease(t *testing.T) {
	sessions := []peering.Session{
		{Peer: "tor-a", Router: netip.MustParseAddr("203.0.113.254"), Established: true, Since: morning, BFD: "Up"},
		{Peer: "tor-b", Router: netip.MustParseAddr("fe80::1%eth0"), Since: morning, Message: "connection refused"},
	}
	require.Equal(t, sessions, peering.Parse(peering.Annotations([]peering.Session{sessions[1], sessions[0]})))
	require.Empty(t, peering.Parse(peering.Annotations(nil)))
	require.Equal(t, map[string]string{annotation.BGPSessions: ""}, peering.Annotations(nil), "what was said before has to go")
}

func TestALeaseIsBounded(t *testing.T) {
	var sessions []peering.Session
	for i := range 1000 {
		sessions = append(sessions, peering.Session{Peer: fmt.Sprintf("tor-%04d", i), Message: strings.Repeat("é", 1000), Since: morning})
	}
	kept := peering.Parse(peering.Annotations(sessions))
	require.Len(t, kept, peering.MaxSessions)
	require.LessOrEqual(t, len(kept[0].Message), peering.MaxMessage)
	require.True(t, strings.HasSuffix(kept[0].Message, "é..."), kept[0].Message)
}

func FuzzParse(f *testing.F) {
	for _, text := range []string{
		"", "null", "{}", "[]", `[{"peer":"tor"}]`, `[{"peer":"tor","router":"x"}]`, `[{"peer":"tor","since":"2026"}]`, `[{"peer":"a"},{"peer":"a"}]`,
		`[{"peer":"tor","router":"203.0.113.254","established":true,"since":"2026-11-21T08:00:00Z","bfd":"Up","message":"m"}]`,
	} {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		sessions := peering.Parse(map[string]string{annotation.BGPSessions: text})
		if len(sessions) > peering.MaxSessions {
			t.Fatalf("%d sessions", len(sessions))
		}
		again := peering.Parse(peering.Annotations(sessions))
		require.Equal(t, sessions, again)
	})
}
