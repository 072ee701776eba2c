package membership

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/lodestone-lb/lodestone/pkg/config"
	"github.com/lodestone-lb/lodestone/pkg/kube"
)

// ourCluster is the clusterID.
const ourCluster = "fra1"

// document is a configuration that can be replaced.
type document struct {
	mu      sync.Mutex
	config  *config.Config
	changed chan struct{}
}

func with(m config.Membership) *document {
	return &document{config: &config.Config{ClusterID: ourCluster, Membership: m}, changed: make(chan struct{})}
}

func (d *document) Current() (*config.Config, kube.State) {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.config, kube.State{}
}

func (d *document) Changed() <-chan struct{} {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.changed
}

func (d *document) set(c *config.Config) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.config = c
	close(d.changed)
	d.changed = make(chan struct{})
}

var failovers = []config.Failover{config.FailoverFast, config.FailoverNormal, config.FailoverConservative}

func setting(f config.Failover) func(*Options) {
	return func(o *Options) { o.Config = with(f.Membership()) }
}

// noticed lets one more speaker join and kills it, and returns how long each of
// the others takes to notice.
func (c *cluster) noticed(t testing.TB, speakers []*speaker) []time.Duration {
	t.Helper()
	c.deaths++ // a name that comes back at once with another address is refused
	name := fmt.Sprint("dying-", c.deaths)
	dying := c.mute(name, netip.MustParseAddrPort("127.0.0.1:0"))
	_, err := dying.list.Load().Join([]string{speakers[0].address()})
	require.NoError(t, err)
	for _, s := range speakers {
		s.wait("meeting", func() bool { _, ok := s.Speakers()[name]; return ok })
	}
	start, took := time.Now(), make([]time.Duration, len(speakers))
	dying.kill()
	var all sync.WaitGroup
	for i, s := range speakers {
		all.Go(func() {
			for {
				changed := s.Changed()
				if _, alive := s.Speakers()[name]; !alive {
					took[i] = time.Since(start)
					return
				}
				select {
				case <-changed:
				case <-time.After(testTimeout):
					t.Errorf("speaker %s does not notice", s.options.Node)
					return
				}
			}
		})
	}
	all.Wait()
	return took
}

// No setting declares a speaker lost before its suspicion and grace are over.
func TestFailoverBearsWithTheSlow(t *testing.T) {
	t.Parallel()
	for _, f := range failovers {
		t.Run(string(f), func(t *testing.T) {
			t.Parallel()
			m := f.Membership()
			onSegment(t, m, 4, slog.DiscardHandler, func(t *testing.T, s *segment, all []*Task) {
				took := s.noticed(t, all)
				t.Logf("noticed after %s", took)
				assert.GreaterOrEqual(t, took[0], time.Duration(m.SuspicionMultiplier)*m.ProbeInterval+m.GracePeriod)
			})
		})
	}
}

// While speakers are restarted one after another, those with the old settings
// and those with the new ones know each other, and a loss is noticed.
func TestSettingsChangeByRollingRestart(t *testing.T) {
	nodes := []string{"n1", "n2", "n3"}
	c := newCluster(t, nodes...)
	speakers := make([]*speaker, len(nodes))
	all := map[string]bool{"n1": true, "n2": true, "n3": true}
	start := func(i int, f config.Failover) {
		speakers[i] = c.start(nodes[i], setting(f))
		speakers[i].SetReady(true)
		speakers[i].waitJoined()
	}
	meet := func() {
		t.Helper()
		for _, s := range speakers {
			s.waitFor(all)
		}
	}
	for i := range nodes {
		start(i, config.FailoverFast)
	}
	meet()
	for i, node := range nodes {
		speakers[i].leave()
		others := maps.Clone(all)
		delete(others, node)
		speakers[(i+1)%len(nodes)].waitFor(others)
		start(i, config.FailoverConservative)
		meet()
		t.Logf("with %d of %d restarted, a loss is noticed after %s", i+1, len(nodes), c.noticed(t, speakers))
	}
}

func TestChangedSettingsWaitForARestart(t *testing.T) {
	c := newCluster(t, "n1")
	d := &document{changed: make(chan struct{})}
	n1 := c.start("n1", func(o *Options) { o.Config = d })
	status := func(want string, joined bool) {
		t.Helper()
		n1.wait(want, func() bool { ok, status := n1.Joined(); return ok == joined && status == want })
	}
	status("waiting for the configuration", false)
	d.set(&config.Config{Membership: config.FailoverFast.Membership()})
	status("joined: 1 speakers are alive", true)
	d.set(&config.Config{Membership: quick()})
	status("joined: 1 speakers are alive; membership settings have changed: restart the speakers, one after another", true)
	assert.Equal(t, config.FailoverFast.Membership(), n1.settings)
	d.set(&config.Config{Membership: config.FailoverConservative.Membership()}) // that counts at once
	status("joined: 1 speakers are alive", true)
	d.set(nil) // the document is gone: the last one stays
	d.set(&config.Config{ClusterID: "other", Membership: config.FailoverFast.Membership()})
	status("joined: 1 speakers are alive", true)
}

func TestASpeakerWithoutConfigurationCanStop(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	task := New(Options{Node: "n1", Config: &document{}, Log: slog.New(slog.DiscardHandler), Registry: prometheus.NewRegistry()})
	require.NoError(t, task.Run(ctx))
}

// BenchmarkDetection measures how long speakers on loopback take to notice that
// one of them is dead.
func BenchmarkDetection(b *testing.B) {
	for _, f := range failovers {
		b.Run(string(f), func(b *testing.B) {
			c := makeCluster(b, "n1", "n2", "n3")
			var speakers []*speaker
			for i := range 3 {
				s := c.start(fmt.Sprint("n", i+1), setting(f))
				s.waitJoined()
				speakers = append(speakers, s)
			}
			var first, last time.Duration
			for b.Loop() {
				took := c.noticed(b, speakers)
				first, last = first+min(took[0], took[1], took[2]), last+max(took[0], took[1], took[2])
			}
			b.ReportMetric(first.Seconds()*1e3/float64(b.N), "first-ms/op")
			b.ReportMetric(last.Seconds()*1e3/float64(b.N), "last-ms/op")
		})
	}
}

// BenchmarkFalseLosses lets five speakers live, for one second per operation,
// and counts how often memberlist declares one of them lost, and for how long
// one is missing after the grace period. Put load on the machine.
func BenchmarkFalseLosses(b *testing.B) {
	for _, f := range failovers {
		b.Run(string(f), func(b *testing.B) {
			names := []string{"n1", "n2", "n3", "n4", "n5"}
			c := makeCluster(b, names...)
			var speakers []*speaker
			for _, n := range names {
				speakers = append(speakers, c.start(n, setting(f)))
			}
			for _, s := range speakers {
				s.wait("meeting all", func() bool { return len(s.Speakers()) == len(names) })
			}
			verdicts := func() (sum float64) {
				for _, s := range speakers {
					sum += testutil.ToFloat64(s.metrics.changes.WithLabelValues("leave"))
				}
				return sum
			}
			before, missing := verdicts(), time.Duration(0)
			const sample = 5 * time.Millisecond
			for b.Loop() {
				for range time.Second / sample {
					time.Sleep(sample)
					if slices.ContainsFunc(speakers, func(s *speaker) bool { return len(s.Speakers()) < len(names) }) {
						missing += sample
					}
				}
			}
			b.ReportMetric((verdicts()-before)/float64(b.N), "verdicts/op")
			b.ReportMetric(float64(missing.Milliseconds())/float64(b.N), "missing-ms/op")
		})
	}
}
