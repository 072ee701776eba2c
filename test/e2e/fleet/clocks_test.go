//go:build long

package fleet

import (
	"net/netip"
	"os"
	"regexp"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/lodestone-lb/lodestone/test/e2e/lab"
	"github.com/lodestone-lb/lodestone/test/e2e/probe"
	"github.com/lodestone-lb/lodestone/test/e2e/program"
)

// The wall clocks of nodes jump by an hour, one after the other, forward and back. No
// VIP moves, no datagram is lost, and a node that is lost then is replaced as ever.
func TestClockJumpsMoveNoVIP(t *testing.T) {
	root, err := lab.Root()
	require.NoError(t, err)
	jumping, err := program.Builder{Root: root, Progress: t.Logf}.JumpingSpeaker(t.Context())
	require.NoError(t, err)
	f := startFleetWith(t, Options{Nodes: 3, VIPs: vips, Document: document(""), Speaker: jumping})
	f.steady(t)
	before, moves := f.Owners(), f.Moves()
	asking := probe.UDP(t.Context(), probe.Options{Namespace: f.Client, Target: netip.AddrPortFrom(vips[0], 80)})
	require.NoError(t, asking.WaitAnswers(t.Context(), 10))
	for _, to := range []unix.Signal{unix.SIGUSR1, unix.SIGUSR2} {
		for _, node := range f.names {
			require.NoError(t, f.speakers[node].Process.Signal(to))
			// Longer than anything takes that could be mistaken: a probe, its answer, the
			// grace, the distance of announcements.
			time.Sleep(2 * time.Second)
			require.Equal(t, before, f.Owners(), "the clock of %s jumped", node)
		}
	}
	record, err := asking.Finish()
	require.NoError(t, err)
	require.Zero(t, record.Lost(), record.Losses())
	require.Equal(t, moves, f.Moves())
	lost := f.lose(t)

	// The clocks did jump: what the others log of the loss is from an hour ago.
	for _, node := range f.names {
		if node == lost {
			continue
		}
		log, err := os.ReadFile(f.Log(node))
		require.NoError(t, err)
		times := regexp.MustCompile(`(?m)^time=(\S+)`).FindAllStringSubmatch(string(log), -1)
		require.NotEmpty(t, times, node)
		last, err := time.Parse(time.RFC3339, times[len(times)-1][1])
		require.NoError(t, err)
		require.WithinDuration(t, time.Now().Add(-time.Hour), last, time.Minute, node)
	}
}
