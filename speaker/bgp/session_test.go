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
		t.Log("a router that was up for hours reboots: it is asked soon, and then steadily for as long as it takes")
		pauses(time.Second, 3*time.Hour)
		for range 100 {
			pauses(5*time.Second, 0)
			time.Sleep(5 * time.Second)
		}
		t.Log("on its way up it ends the first sessions: each pause is twice as long, attempts that fail between them not")
		pauses(10*time.Second, 3*time.Second)
		pauses(5*time.Second, 0)
		pauses(20*time.Second, time.Second)
		pauses(40*time.Second, steady-1)
		t.Log("a router that does nothing else is asked once a minute")
		for range 10 {
			pauses(time.Minute, time.Millisecond)
			time.Sleep(time.Minute)
		}
		t.Log("a session that lasts, or five minutes without one, and all is forgotten")
		pauses(time.Second, steady)
		pauses(10*time.Second, time.Second)
		pauses(20*time.Second, time.Second)
		time.Sleep(forgiven + time.Second)
		pauses(10*time.Second, time.Second)
	})
}
