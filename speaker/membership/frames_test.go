package membership

import (
	"log/slog"
	"math/rand/v2"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/lodestone-lb/lodestone/pkg/config"
)

// frames counts what speakers send on their segment: packets, connections, and the questions that their kernels
// broadcast for the hardware addresses of peers.
type frames struct {
	mu    sync.Mutex
	known map[string]map[string]time.Time // by speaker, when a peer was used last
	traffic
}

// traffic is what was sent.
type traffic struct{ packets, connections, broadcasts int }

// Linux keeps a neighbour that it has not used for that time only while it has no more than so many
// (gc_stale_time, gc_thresh1).
const (
	neighbourTime = time.Minute
	mostKept      = 128
)

func (f *frames) packet(from, to string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.packets++
	f.use(from, to)
}

func (f *frames) connection(from, to string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.connections++
	f.use(from, to)
}

// use has the kernel of a speaker know a peer, which then knows the speaker, too.
func (f *frames) use(from, to string) {
	if f.known == nil {
		f.known = map[string]map[string]time.Time{}
	}
	now := time.Now()
	if at, known := f.known[from][to]; !known || now.Sub(at) > neighbourTime && len(f.known[from]) > mostKept {
		f.broadcasts++
	}
	for _, pair := range [][2]string{{from, to}, {to, from}} {
		if f.known[pair[0]] == nil {
			f.known[pair[0]] = map[string]time.Time{}
		}
		f.known[pair[0]][pair[1]] = now
	}
}

// take returns what was sent since it was called last.
func (f *frames) take() traffic {
	f.mu.Lock()
	defer f.mu.Unlock()
	t := f.traffic
	f.traffic = traffic{}
	return t
}

// perSecond returns the traffic of that time as each speaker's in a second.
func (t traffic) perSecond(speakers int, d time.Duration) (packets, connections, broadcasts float64) {
	each := func(n int) float64 { return float64(n) / float64(speakers) / d.Seconds() }
	return each(t.packets), each(t.connections), each(t.broadcasts)
}

// Speakers start at once, as after a power cut, and know each other soon; then they are idle. What memberlist sends does
// not grow with the fleet, per speaker. Heartbeats are not here: see TestPacketsOfASpeaker of package watch.
func TestFramesOnTheSegment(t *testing.T) {
	for _, n := range []int{3, *speakers / 2} {
		synctest.Test(t, func(t *testing.T) {
			const start, idle = 10 * time.Second, time.Minute
			s, all := strangers(t, config.FailoverNormal.Membership(), n, slog.DiscardHandler)
			began, met := time.Now(), time.Duration(0)
			seekEachOther(t, all)
			for _, task := range all {
				go task.rejoiner.verifyLost(t.Context())
			}
			for met == 0 {
				time.Sleep(100 * time.Millisecond)
				require.Less(t, time.Since(began), time.Minute)
				if all[0].alive() == n && all[rand.IntN(n)].alive() == n && all[n-1].alive() == n {
					met = time.Since(began)
				}
			}
			time.Sleep(max(0, start-met))
			sent := s.take()
			t.Logf("%d speakers start: met after %s; %d packets, %d connections, %d broadcasts in %s", n, met, sent.packets,
				sent.connections, sent.broadcasts, max(start, met))

			assert.LessOrEqual(t, float64(sent.packets), float64(n)*(gossipNodes/0.2+5)*start.Seconds(), "gossip at each interval, and questions")
			assert.LessOrEqual(t, sent.connections, n*(rejoinAtOnce+1))
			assert.LessOrEqual(t, sent.broadcasts, n*(n-1)/2+n, "each pair of kernels learns of each other once")
			time.Sleep(neighbourTime + start)
			s.take()
			time.Sleep(idle)
			packets, connections, broadcasts := s.take().perSecond(n, idle)
			t.Logf("%d speakers are idle: each sends %.1f packets, %.3f connections, %.2f broadcasts a second", n, packets, connections,
				broadcasts)
			assert.LessOrEqual(t, packets, 5.0, "two questions and two answers")
			assert.LessOrEqual(t, connections, 0.05)
			assert.LessOrEqual(t, broadcasts, 2.2, "one for each question")
			s.end(all)
		})
	}
}
