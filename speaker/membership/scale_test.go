package membership

import (
	"flag"
	"log/slog"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

var speakers = flag.Int("speakers", 40, "how many TestOneOfManyIsLost has, and TestFramesOnTheSegment half as many")

// One of many speakers loses power that takes no part in failure detection. memberlist lets all others know, and none is
// taken for dead that is not.
func TestOneOfManyIsLost(t *testing.T) {
	const watched = 3 * time.Second
	n := *speakers
	onSegment(t, quick(), n, slog.DiscardHandler, func(t *testing.T, s *segment, all []*Task) {
		verdicts := count(all)
		time.Sleep(watched)
		require.Equal(t, verdicts, count(all), "taken for dead")

		known := s.noticed(t, all)
		for _, task := range all[:n-1] {
			require.Len(t, task.Speakers(), n-1, "taken for dead")
		}
		t.Logf("%d speakers: the first one knows after %s, the last one after %s", n, known[0], known[len(known)-1])
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
