package main

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/leaderelection"
	"k8s.io/client-go/tools/leaderelection/resourcelock"

	"github.com/lodestone-lb/lodestone/controller/leader"
	"github.com/lodestone-lb/lodestone/controller/servicelb"
)

// hung is an API server that never answers.
type hung struct{}

func (hung) RoundTrip(r *http.Request) (*http.Response, error) {
	<-r.Context().Done()
	return nil, r.Context().Err()
}

// A write that the fence lets through is over before another process can lead, however late it begins and however short
// the lease is.
func TestTheLastWriteIsOverBeforeTheLeaseEnds(t *testing.T) {
	for _, tt := range []struct{ lease, renewal time.Duration }{{4 * time.Second, 3 * time.Second}, {10 * time.Second, 7 * time.Second},
		{15 * time.Second, 10 * time.Second}, {60 * time.Second, 40 * time.Second}} {
		synctest.Test(t, func(t *testing.T) {
			e, granted := unelected(tt.lease, tt.renewal), time.Now()
			e.term.Granted(granted)
			for e.term.Holds(time.Now().Add(time.Millisecond)) {
				time.Sleep(time.Millisecond)
			}
			write, err := http.NewRequestWithContext(t.Context(), http.MethodPatch, "http://api", http.NoBody)
			require.NoError(t, err)
			_, err = e.fence.Wrap(hung{}).RoundTrip(write) //nolint:bodyclose // there is none
			require.ErrorIs(t, err, context.DeadlineExceeded)
			assert.LessOrEqual(t, time.Since(granted), tt.lease)
		})
	}
}

// The margin is at most half of the lease, however short that is. With a longer one the leader could never write.
func TestTheMarginLeavesTimeToWrite(t *testing.T) {
	t.Parallel()
	for _, lease := range []time.Duration{2 * time.Second, 5 * time.Second, 10 * time.Second, 15 * time.Second, time.Minute} {
		for _, renewal := range []time.Duration{lease / 10, lease / 2, lease * 7 / 10, lease - 1} {
			margin := leader.Margin(lease, renewal, servicelb.PatchTimeout)
			assert.Positive(t, margin)
			assert.LessOrEqual(t, margin, lease/2, "lease %s, renewed for %s", lease, renewal)
		}
	}
}

// slow is a Lease that this process takes, and whose answers take their time. While it is suspended none comes,
// even if the context has ended.
type slow struct {
	resourcelock.Interface
	suspended atomic.Bool
	answer    time.Duration
	// holder is on the Lease since written.
	mu      sync.Mutex
	holder  string
	written time.Time
}

func (*slow) Identity() string { return "us" }
func (*slow) Describe() string { return "the leader lease" }
func (s *slow) Get(context.Context) (*resourcelock.LeaderElectionRecord, []byte, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return &resourcelock.LeaderElectionRecord{HolderIdentity: s.holder}, nil, nil
}
func (*slow) RecordEvent(string) {}
func (s *slow) Update(_ context.Context, r resourcelock.LeaderElectionRecord) error {
	if s.suspended.Load() && r.HolderIdentity != "" {
		time.Sleep(time.Hour)
	}
	s.mu.Lock()
	s.holder, s.written = r.HolderIdentity, time.Now()
	s.mu.Unlock()
	time.Sleep(s.answer)
	return nil
}

func (s *slow) is() (holder string, since time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.holder, s.written
}

const lease, renewal = 15 * time.Second, 10 * time.Second

// stand has a process stand for election, and returns when it leads.
func stand(t *testing.T, lock resourcelock.Interface) *election {
	t.Helper()
	e := unelected(lease, renewal)
	var err error
	e.elector, err = leaderelection.NewLeaderElector(leaderelection.LeaderElectionConfig{
		Lock: &leader.Lock{Interface: lock, Term: e.term}, Name: "us", ReleaseOnCancel: true,
		LeaseDuration: lease, RenewDeadline: renewal, RetryPeriod: time.Second,
		Callbacks: leaderelection.LeaderCallbacks{
			OnStartedLeading: func(context.Context) { close(e.won) }, OnStoppedLeading: func() {}},
	})
	require.NoError(t, err)
	require.False(t, e.holds(), "before it leads")
	go e.run()
	<-e.won
	return e
}

// A process that leads, and does not know that it has not renewed its lease, writes nothing that might end
// after the lease. Others count the lease from when it was written, which is before the answer.
func TestALeaseThatIsNotRenewedIsNotHeldToItsEnd(t *testing.T) {
	for _, answer := range []time.Duration{0, 3 * time.Second} {
		synctest.Test(t, func(t *testing.T) {
			lock := &slow{answer: answer}
			e := stand(t, lock)
			lock.suspended.Store(true)
			const step = 10 * time.Millisecond
			for e.holds() {
				time.Sleep(step)
			}
			_, written := lock.is()
			assert.True(t, e.elector.IsLeader(), "it does not know")
			assert.LessOrEqual(t, time.Since(written)+servicelb.PatchTimeout, lease+step, "answers after %s", answer)
			lock.suspended.Store(false)
			time.Sleep(time.Hour)
			e.resign()
		})
	}
}

// A process that is stopped gives the lease back once its last write, which may be one of the framework's, is over.
func TestTheLeaseIsNotGivenBackDuringAWrite(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		lock := &slow{}
		e := stand(t, lock)
		write, err := http.NewRequestWithContext(t.Context(), http.MethodPatch, "http://api", http.NoBody)
		require.NoError(t, err)
		over := make(chan time.Time, 1)
		go func() {
			_, _ = e.fence.Wrap(hung{}).RoundTrip(write) //nolint:bodyclose // there is none
			over <- time.Now()
		}()
		synctest.Wait()
		e.resign()
		holder, since := lock.is()
		assert.Empty(t, holder)
		assert.False(t, since.Before(<-over))
	})
}

// broken is a Lease that cannot be renewed any more.
type broken struct {
	slow
	fails atomic.Bool
}

func (b *broken) Update(ctx context.Context, r resourcelock.LeaderElectionRecord) error {
	if b.fails.Load() && r.HolderIdentity != "" {
		return errors.New("the API server is ill")
	}
	return b.slow.Update(ctx, r)
}

// A process that could not renew its lease does not give it back, because another one would lead while what this one
// has begun to write is on its way. One that is stopped has ended its work.
func TestALeaseThatIsLostIsNotGivenBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		lock := &broken{}
		e := stand(t, lock)
		lock.fails.Store(true)
		<-e.ended
		holder, _ := lock.is()
		assert.Equal(t, "us", holder, "lost")

		lock = &broken{}
		e = stand(t, lock)
		e.resign()
		holder, _ = lock.is()
		assert.Empty(t, holder, "stopped in order")

		lock = &broken{}
		e = stand(t, lock)
		synctest.Wait() // it renews its lease as soon as it has it
		lock.mu.Lock()
		lock.holder = "another" // this process stood still for longer than its lease
		lock.mu.Unlock()
		e.resign()
		holder, _ = lock.is()
		assert.Equal(t, "another", holder, "stopped before it knew")
	})
}

// renewed is a Lease that another replica has renewed at some time.
type renewed struct {
	slow
	at time.Time
}

func (r *renewed) Get(context.Context) (*resourcelock.LeaderElectionRecord, []byte, error) {
	record := &resourcelock.LeaderElectionRecord{HolderIdentity: "another", RenewTime: metav1.Time{Time: r.at}}
	raw, err := json.Marshal(record)
	return record, raw, err
}

// A candidate counts the lease from the last renewal that it has seen. It sees each one, also two within a second.
func TestEveryRenewalIsSeen(t *testing.T) {
	t.Parallel()
	lock := &leader.Lock{Interface: &renewed{at: time.Unix(1e9, 1e8)}}
	_, first, err := lock.Get(t.Context())
	require.NoError(t, err)
	_, same, err := lock.Get(t.Context())
	require.NoError(t, err)
	lock.Interface = &renewed{at: time.Unix(1e9, 6e8)}
	_, second, err := lock.Get(t.Context())
	require.NoError(t, err)
	assert.Equal(t, first, same)
	assert.NotEqual(t, first, second)
}
