//go:build long

package hostile_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/lodestone-lb/lodestone/test/e2e/hostile"
)

// A tenth of the load of `make bench BENCH=hostile_cluster`, which has the largest possible load.
// It is enough to find defects: with whole objects in memory and lists read at once, the
// controller needed 464 MB, and a speaker 377 MB.
func TestHostileCluster(t *testing.T) {
	r, err := hostile.Run(t.Context(), hostile.Options{Small: 1000, Large: 100, Slices: 25, Leases: 20, Progress: t.Logf})
	require.NoError(t, err)
	for _, p := range []struct {
		name  string
		peaks hostile.Peaks
		limit int64
	}{{"speaker", r.Speaker, r.SpeakerLimit}, {"controller", r.Controller, r.ControllerLimit}} {
		require.Len(t, p.peaks, 4)
		for phase, peak := range p.peaks {
			require.Positive(t, peak)
			require.Less(t, peak, p.limit/2, "%s: bytes of the %s", phase, p.name)
		}
	}
	for phase, waits := range map[string]hostile.Waits{"usual": r.Usual, "quiet": r.Quiet, "busy": r.Busy, "relisted": r.Relisted} {
		require.Len(t, waits.Announced, 100)
		t.Logf("%s: p99 %s", phase, hostile.Quantile(waits.Announced, 0.99))
	}
	// The time of the API server's own answer is not included; a VIP is probed for 0.6 s.
	usual := hostile.Quantile(r.Usual.Own(), 0.99)
	require.Less(t, hostile.Quantile(r.Quiet.Own(), 0.99), usual+2*time.Second)
	// While every object changes, programs and API server share the cores: 3 s on two of them, 13 s on a busy machine.
	require.Less(t, hostile.Quantile(r.Busy.Own(), 0.99), usual+30*time.Second)
	require.Less(t, hostile.Quantile(r.Relisted.Own(), 0.99), usual+2*time.Second)
	require.GreaterOrEqual(t, r.Lists["/api/v1/services"], 3, "the controller and each speaker list them anew: %v", r.Lists)
	require.GreaterOrEqual(t, r.Lists["/apis/discovery.k8s.io/v1/endpointslices"], 2, "each speaker lists them anew: %v", r.Lists)
	for phase, ended := range r.Ended {
		require.Zero(t, ended, "%s: programs that ended by themselves", phase)
	}
}
