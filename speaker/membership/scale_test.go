package membership

import (
	"flag"
	"fmt"
	"log/slog"
	"slices"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/lodestone-lb/lodestone/pkg/config"
)

var speakers = flag.Int("speakers", 40, "how many TestOneOfManyIsLost has")

// One of many speakers loses power. All others know soon, and none is taken for
// dead that is not. What it costs is printed as a benchmark's line.
func TestOneOfManyIsLost(t *testing.T) {
	const watched = 10 * time.Second
	n := *speakers
	onSegment(t, config.FailoverNormal.Membership(), n, slog.DiscardHandler, func(t *testing.T, s *segment, all []*Task) {
		sent, verdicts, cpu := s.sent.Load(), count(all), cpuTime(t)
		time.Sleep(watched)
		packets := float64(s.sent.Load()-sent) / float64(n) / watched.Seconds()
		cpu = (cpuTime(t) - cpu) / time.Duration(n)
		require.Equal(t, verdicts, count(all), "taken for dead")

		known := s.noticed(t, all)
		for _, task := range all[:n-1] {
			require.Len(t, task.Speakers(), n-1, "taken for dead")
		}
		fmt.Printf("BenchmarkMembership/speakers=%d 1 %d first-ms %d median-ms %d last-ms %.1f packets/s %.3f cpu-percent\n",
			n, known[0].Milliseconds(), known[len(known)/2].Milliseconds(), known[len(known)-1].Milliseconds(), packets,
			100*cpu.Seconds()/watched.Seconds())
	})
}

// noticed takes the power of the last one, and returns how long each of the others takes to know, in order.
func (s *segment) noticed(t *testing.T, all []*Task) (known []time.Duration) {
	t.Helper()
	dead, rest := all[len(all)-1], slices.Clone(all[:len(all)-1])
	s.dead.Store(dead.options.Address.String())
	for died := time.Now(); len(rest) > 0; {
		require.Less(t, time.Since(died), 5*time.Second, "%d do not know", len(rest))
		time.Sleep(5 * time.Millisecond)
		rest = slices.DeleteFunc(rest, func(task *Task) bool {
			if task.knows(dead.options.Node) {
				return false
			}
			known = append(known, time.Since(died))
			return true
		})
	}
	return known
}

// knows reports whether the speaker is alive.
func (t *Task) knows(name string) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	p, known := t.peers[name]
	return known && p.alive
}

// cpuTime is what this process has used.
func cpuTime(t *testing.T) time.Duration {
	var used syscall.Rusage
	require.NoError(t, syscall.Getrusage(syscall.RUSAGE_SELF, &used))
	return time.Duration(used.Utime.Nano() + used.Stime.Nano())
}
