package watch

import (
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// The hour has how late the loop was at most, when, and how often it left heartbeats out. What is older is forgotten.
func TestLatenessOfAnHour(t *testing.T) {
	t.Parallel()
	start := time.Unix(0, 0)
	l := newLateness(hourParts, hourPart)
	assert.Equal(t, Lateness{}, l.all(start))
	l.record(20*ms, 25*ms, start)
	assert.Equal(t, Lateness{20 * ms, start, 0}, l.all(start))
	worst := start.Add(6 * time.Minute)
	l.record(400*ms, 25*ms, worst)
	for i := range 3 {
		l.record(30*ms, 25*ms, start.Add(time.Duration(20+i)*time.Minute))
	}
	assert.Equal(t, Lateness{400 * ms, worst, 4}, l.all(start.Add(time.Hour)))
	// Its part of the hour has ended.
	assert.Equal(t, Lateness{30 * ms, start.Add(20 * time.Minute), 3}, l.all(start.Add(76*time.Minute)))
	assert.Equal(t, Lateness{}, l.all(start.Add(100*time.Minute)))
	l.record(30*ms, 25*ms, start.Add(100*time.Minute))
	assert.Equal(t, Lateness{}, l.all(start.Add(24*time.Hour)))
}

// Status has who watches whom, which is what Watchers computes of the list alone; the speakers that were lost; and that
// others took this one for lost.
func TestStatus(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 10)
	var list []Member
	for _, x := range w.nodes {
		list = append(list, x.Member)
	}
	w.run(time.Second)
	by := Watchers(list)
	for _, x := range w.nodes {
		s := x.Status(w.now)
		assert.Equal(t, by[x.Name], s.Watchers)
		assert.Len(t, s.Watchers, watchers)
		for _, o := range w.nodes {
			i := slices.IndexFunc(s.Watched, func(of Watched) bool { return of.Name == o.Name })
			require.Equal(t, slices.Contains(by[o.Name], x.Name), i >= 0)
			if i >= 0 {
				assert.Equal(t, 25*ms, s.Watched[i].Interval)
				assert.Less(t, s.Watched[i].Silent, 50*ms)
			}
		}
		assert.Empty(t, s.Lost)
	}

	stopped, since := w.nodes[0], w.now
	stopped.stopped = since.Add(500 * ms)
	w.run(time.Second)
	s := stopped.Status(w.now)
	assert.InDelta(t, 500*ms, s.Hour.Most, float64(30*ms))
	assert.Equal(t, 1, s.Hour.Times)
	assert.NotZero(t, s.Accused)
	assert.WithinDuration(t, since.Add(500*ms), s.AccusedAt, 30*ms)
	for _, x := range w.nodes[1:] {
		lost := x.Status(w.now).Lost
		require.Len(t, lost, 1)
		assert.Equal(t, stopped.Name, lost[0].Name)
		assert.Empty(t, x.Status(lost[0].At.Add(time.Hour)).Lost, "it is not of the last hour")
	}
	for range 100 {
		stopped.note(Verdict{})
	}
	assert.Len(t, stopped.Status(w.now).Lost, mostLosses)
}
