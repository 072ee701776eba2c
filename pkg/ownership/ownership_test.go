package ownership_test

import (
	"fmt"
	"net/netip"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/lodestone-lb/lodestone/pkg/annotation"
	"github.com/lodestone-lb/lodestone/pkg/ownership"
)

var (
	morning = time.Date(2026, 11, 21, 8, 0, 0, 0, time.UTC)
	a, b    = netip.MustParseAddr("203.0.113.1"), netip.MustParseAddr("203.0.113.2")
	six     = netip.MustParseAddr("2001:db8::1")
)

func TestMovesSurviveTheLease(t *testing.T) {
	t.Parallel()
	moves := []ownership.Move{
		{At: morning, From: "n1", Why: ownership.SpeakerLost, To: map[string][]netip.Addr{"n2": {a, six}, "": {b}}},
		{At: morning.Add(time.Second), To: map[string][]netip.Addr{"n1": {b}}},
	}
	require.Equal(t, moves, ownership.Parse(ownership.Annotations([]ownership.Move{moves[1], moves[0]})))
	require.Empty(t, ownership.Parse(ownership.Annotations(nil)))
	require.Equal(t, map[string]string{annotation.Moves: ""}, ownership.Annotations(nil), "what was said before has to go")
	require.Equal(t, moves[1:], ownership.New(moves[:1], moves))
	require.Empty(t, ownership.New(moves, moves[1:]), "what is not told any more is no news")
}

// A node with 5,000 VIPs dies, among 1,000 others.
func TestALeaseIsBounded(t *testing.T) {
	t.Parallel()
	many := ownership.Move{At: morning, From: "n0", Why: ownership.SpeakerLost, To: map[string][]netip.Addr{}}
	vip := netip.MustParseAddr("2001:db8:1234:5678::1")
	for i := range 5000 {
		node := fmt.Sprintf("worker-%04d.rack-7.example.com", i%1000)
		many.To[node], vip = append(many.To[node], vip), vip.Next()
	}
	last := ownership.Move{At: morning.Add(time.Second), From: "n1", To: map[string][]netip.Addr{"n2": {a}}}
	text := ownership.Annotations([]ownership.Move{many, last})
	require.LessOrEqual(t, len(text[annotation.Moves]), 64<<10)
	told := ownership.Parse(text)
	require.Equal(t, last, told[len(told)-1], "the latest comes first")
	require.LessOrEqual(t, ownership.Count(told), ownership.MaxVIPs)
	require.Greater(t, ownership.Count(told), ownership.MaxVIPs/2)
	t.Logf("%d VIPs in %d bytes", ownership.Count(told), len(text[annotation.Moves]))
}

func TestTell(t *testing.T) {
	t.Parallel()
	for want, said := range map[string]string{
		"node n2 announces 203.0.113.1 instead of node n1: the speaker on node n1 is not heard any more: the node is down or cut off, or its speaker was killed": ownership.Tell("203.0.113.1", "n1", "n2", ownership.SpeakerLost),
		"node n2 announces 203.0.113.1 instead of node n1: node n2 is preferred, and is able to have it":                                                         ownership.Tell("203.0.113.1", "n1", "n2", "LessPreferred"),
		"node n2 announces 203.0.113.1 instead of node n1":                                                                                                       ownership.Tell("203.0.113.1", "n1", "n2", ""),
		"no node announces 203.0.113.1 by layer 2 any more, node n1 did: no endpoint of the Service takes traffic":                                               ownership.Tell("203.0.113.1", "n1", "", "NoServingEndpoint"),
		"node n1 announces 203.0.113.1 again, which no node did":                                                                                                 ownership.Tell("203.0.113.1", "", "n1", "NotOwner"),
	} {
		require.Equal(t, want, said)
	}
}

func FuzzParse(f *testing.F) {
	for _, text := range []string{
		"", "null", "{}", "[]", `[{"to":{"n1":["203.0.113.1"]}}]`, `[{"at":"x"}]`, `[{"at":"2026-11-21T08:00:00Z","from":"n1","why":"Because","to":{"":["::1%eth0"]}}]`,
		ownership.Annotations([]ownership.Move{{At: morning, From: "n1", Why: "LinkDown", To: map[string][]netip.Addr{"n2": {a, b}}}})[annotation.Moves],
	} {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		moves := ownership.Parse(map[string]string{annotation.Moves: text})
		if n := ownership.Count(moves); n > ownership.MaxVIPs {
			t.Fatalf("%d VIPs", n)
		}
		require.Equal(t, moves, ownership.Parse(ownership.Annotations(moves)))
	})
}
