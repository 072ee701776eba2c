package bgp

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/lodestone-lb/lodestone/pkg/config"
	"github.com/lodestone-lb/lodestone/speaker/plan"
)

// Pauses between attempts, without their jitter of up to a quarter less.
func TestPauses(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		to := target{Session: plan.Session{Peer: &config.Peer{ConnectRetry: 5 * time.Second}}}
		s := &session{Peering: &Peering{target: to}}
		pauses := func(want time.Duration, lasted time.Duration) {
			t.Helper()
			got := s.pause(lasted)
			require.LessOrEqual(t, got, want)
			require.GreaterOrEqual(t, got, want*3/4)
		}
		t.Log("a router that was up for hours reboots: it is tried soon, and then steadily for as long as it takes")
		pauses(time.Second, 3*time.Hour)
		for range 100 {
			pauses(5*time.Second, 0)
			time.Sleep(5 * time.Second)
		}
		t.Log("while it starts it ends the first sessions: the pause doubles after each; failed attempts between them do not count")
		pauses(10*time.Second, 3*time.Second)
		pauses(5*time.Second, 0)
		pauses(20*time.Second, time.Second)
		pauses(40*time.Second, steady-1)
		t.Log("a router that does nothing else is tried once a minute")
		for range 10 {
			pauses(time.Minute, time.Millisecond)
			time.Sleep(time.Minute)
		}
		t.Log("after a session that lasts, or five minutes without one, the pause is the first one again")
		pauses(time.Second, steady)
		pauses(10*time.Second, time.Second)
		pauses(20*time.Second, time.Second)
		time.Sleep(forgiven + time.Second)
		pauses(10*time.Second, time.Second)
	})
}
