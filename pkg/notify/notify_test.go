package notify_test

import (
	"sync"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/assert"

	"github.com/lodestone-lb/lodestone/pkg/notify"
)

func TestSignal(t *testing.T) {
	t.Parallel()
	var s notify.Signal
	s.Notify() // nobody listens
	first, second := s.Next(), s.Next()
	assert.False(t, notify.Closed(first))
	s.Notify()
	assert.True(t, notify.Closed(first))
	assert.True(t, notify.Closed(second))
	assert.False(t, notify.Closed(s.Next()), "an earlier change does not notify again")
}

// A goroutine that takes the channel before it reads the state misses no change.
func TestNoChangeIsMissed(t *testing.T) {
	t.Parallel()
	var s notify.Signal
	var value atomic.Int64
	const last = 10_000
	var readers sync.WaitGroup
	for range 4 {
		readers.Go(func() {
			for {
				next := s.Next()
				if value.Load() == last {
					return
				}
				<-next
			}
		})
	}
	for range last {
		value.Add(1)
		s.Notify()
	}
	readers.Wait()
}

// A slow receiver gets the last value alone, and the sender does not wait.
func TestReplace(t *testing.T) {
	t.Parallel()
	ch := make(chan int, 1)
	for i := range 3 {
		notify.Replace(ch, i)
	}
	assert.Equal(t, 2, <-ch)
	assert.Empty(t, ch)
}
