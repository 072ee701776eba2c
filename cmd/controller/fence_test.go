package main

import (
	"context"
	"net/http"
	"net/http/httptest"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"k8s.io/client-go/tools/leaderelection"
	"k8s.io/client-go/tools/leaderelection/resourcelock"

	"github.com/lodestone-lb/lodestone/controller/servicelb"
)

func TestFenceLetsReadsThroughAndWritesOnlyWithTheLease(t *testing.T) {
	var served []string
	server := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) { served = append(served, r.Method) }))
	defer server.Close()
	holds := false
	client := http.Client{Transport: fence{http.DefaultTransport, func() bool { return holds }}}
	do := func(ctx context.Context, method string) error {
		r, err := http.NewRequestWithContext(ctx, method, server.URL, http.NoBody)
		require.NoError(t, err)
		response, err := client.Do(r)
		if err == nil {
			response.Body.Close()
		}
		return err
	}
	for _, method := range []string{http.MethodPatch, http.MethodPut, http.MethodPost, http.MethodDelete} {
		ctx, cancel := context.WithTimeout(t.Context(), 3*look)
		assert.ErrorIs(t, do(ctx, method), errFenced, method)
		cancel()
	}
	require.NoError(t, do(t.Context(), http.MethodGet))
	holds = true
	require.NoError(t, do(t.Context(), http.MethodPatch))
	assert.Equal(t, []string{http.MethodGet, http.MethodPatch}, served)
}

// A write that the fence lets through is over before another process can lead.
func TestFenceClosesBeforeTheLeaseEnds(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct{ lease, renewal time.Duration }{{10 * time.Second, 7 * time.Second}, {15 * time.Second, 10 * time.Second},
		{60 * time.Second, 40 * time.Second}} {
		if last := tt.lease - marginOf(tt.lease, tt.renewal); last+servicelb.PatchTimeout > tt.lease {
			t.Errorf("lease of %s: a write that begins after %s may end after it", tt.lease, last)
		}
	}
}

// Whatever the lease is, most of it is there to write in: with a margin as long as the lease no write would go
// through, although this process leads.
func TestTheMarginLeavesTimeToWrite(t *testing.T) {
	t.Parallel()
	for _, lease := range []time.Duration{2 * time.Second, 5 * time.Second, 10 * time.Second, 15 * time.Second, time.Minute} {
		for _, renewal := range []time.Duration{lease / 10, lease / 2, lease * 7 / 10, lease - 1} {
			margin := marginOf(lease, renewal)
			assert.Positive(t, margin)
			assert.LessOrEqual(t, margin, lease/2, "lease %s, renewed for %s", lease, renewal)
		}
	}
}

// stuck is a lock that the process takes, and that hangs when it is renewed, whatever its context
// says: the process is suspended.
type stuck struct {
	resourcelock.Interface
	suspended atomic.Bool
}

func (*stuck) Identity() string { return "us" }
func (*stuck) Describe() string { return "the leader lease" }
func (*stuck) Get(context.Context) (*resourcelock.LeaderElectionRecord, []byte, error) {
	return &resourcelock.LeaderElectionRecord{}, nil, nil
}
func (*stuck) RecordEvent(string) {}
func (s *stuck) Update(context.Context, resourcelock.LeaderElectionRecord) error {
	if s.suspended.Load() {
		time.Sleep(time.Hour)
	}
	return nil
}

// A process that leads, and does not know that it has not renewed its lease, writes nothing that might end
// after the lease.
func TestALeaseThatIsNotRenewedIsNotHeldToItsEnd(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const lease, renewal = 15 * time.Second, 10 * time.Second
		e := &election{margin: marginOf(lease, renewal), won: make(chan struct{}), ended: make(chan struct{})}
		e.ctx, e.cancel = context.WithCancel(t.Context())
		lock := &stuck{}
		var err error
		e.elector, err = leaderelection.NewLeaderElector(leaderelection.LeaderElectionConfig{
			Lock: lock, Name: "us", LeaseDuration: lease, RenewDeadline: renewal, RetryPeriod: time.Second,
			Callbacks: leaderelection.LeaderCallbacks{
				OnStartedLeading: func(context.Context) { close(e.won) }, OnStoppedLeading: func() {}},
		})
		require.NoError(t, err)
		require.False(t, e.holds(), "before it leads")
		go e.run()
		<-e.won
		began := time.Now()
		lock.suspended.Store(true)
		const step = 10 * time.Millisecond
		for e.holds() {
			time.Sleep(step)
		}
		assert.True(t, e.elector.IsLeader(), "it does not know")
		assert.LessOrEqual(t, time.Since(began)+servicelb.PatchTimeout, lease+step)
		e.resign()
	})
}
