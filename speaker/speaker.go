// Package speaker is what a node does: one goroutine takes a snapshot of the
// cluster, asks the plan what this node announces, and tells the announcer.
// Informers, other speakers, the configuration and kube-proxy only wake it.
//
// While the API server is down everything goes on: the caches keep what they
// have, and a dead node's VIPs still move, for the speakers tell each other
// who is alive.
//
// Planned moves are make-before-break. A speaker that ends first tells the
// others that it is not ready, goes on announcing while they take over, then
// stops.
package speaker

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sync/errgroup"
	"k8s.io/client-go/kubernetes"

	"github.com/lodestone-lb/lodestone/pkg/config"
	"github.com/lodestone-lb/lodestone/pkg/kube"
	"github.com/lodestone-lb/lodestone/speaker/plan"
)

const (
	// heartbeat is how often the loop shows that it is alive.
	heartbeat = 5 * time.Second
	// setTimeout bounds one call of the announcer, setRetry is the wait after
	// one that failed.
	setTimeout = 5 * time.Second
	setRetry   = time.Second
	// DefaultHandOver is how long an ending speaker goes on announcing: others
	// hear of it within some ten milliseconds and announce at once.
	DefaultHandOver = 300 * time.Millisecond
	// After a plan the loop rests restFactor times as long as the plan took,
	// at most maxRest, before it looks at the API's objects again: changes
	// without end cost a tenth of a core. Other speakers never wait.
	restFactor = 9
	maxRest    = 100 * time.Millisecond
)

// Config is the configuration in force; kube.ConfigWatcher is one.
type Config interface {
	Current() (*config.Config, kube.State)
	Changed() <-chan struct{}
}

// Members are the speakers; membership.Task is one.
type Members interface {
	// Speakers returns the speakers that are alive; the value tells who is
	// ready.
	Speakers() map[string]bool
	Joined() (bool, string)
	SetReady(bool)
	Changed() <-chan struct{}
}

// DataPlane carries the traffic from here to the endpoints; KubeProxy is one.
type DataPlane interface {
	Healthy() (bool, string)
	Changed() <-chan struct{}
}

// Announcer makes VIPs known; layer2.Announcer is one.
type Announcer interface {
	// Set replaces the whole set.
	Set(ctx context.Context, want map[netip.Addr]plan.Layer2) error
}

// Limiter caps new connections to VIPs; limit.Limiter is one.
type Limiter interface {
	// Set replaces the whole set and does not wait for its effect: no VIP
	// waits for a limit.
	Set(want map[plan.LimitKey]plan.Limit)
}

// Options are what a Speaker needs.
type Options struct {
	Node      string
	Client    kubernetes.Interface
	Config    Config
	Members   Members
	DataPlane DataPlane
	Announcer Announcer
	Limiter   Limiter
	Log       *slog.Logger
	Registry  prometheus.Registerer
	// HandOver is how long an ending speaker goes on announcing.
	HandOver time.Duration
}

// Speaker is the task that runs the loop.
type Speaker struct {
	Options
	cluster *cluster
	metrics *metrics
	ready   chan struct{}

	// Owned by Run.
	snapshot plan.Snapshot
	retry    <-chan time.Time

	beat      atomic.Int64 // when the loop last showed that it is alive, in Unix seconds
	published atomic.Pointer[state]
}

// state is what the loop decided last. It is immutable.
type state struct {
	checks  []Check
	plan    plan.Plan
	since   map[netip.Addr]time.Time // of the VIPs that are owned
	digest  string
	planned time.Time
}

// New returns a Speaker that starts with Run.
func New(o Options) (*Speaker, error) {
	c, err := newCluster(o.Client)
	if err != nil {
		return nil, fmt.Errorf("watch the cluster: %w", err)
	}
	s := &Speaker{Options: o, cluster: c, ready: make(chan struct{})}
	s.published.Store(&state{})
	s.metrics = newMetrics(o.Registry, s)
	return s, nil
}

// String names the task.
func (s *Speaker) String() string { return "speaker" }

// Ready is closed when the speaker is ready to own VIPs for the first time.
func (s *Speaker) Ready() <-chan struct{} { return s.ready }

// Run decides and announces until ctx ends, then hands over. What the options
// name must live longer.
func (s *Speaker) Run(ctx context.Context) error {
	var group errgroup.Group
	group.Go(func() error { s.cluster.run(ctx); return nil })
	for ctx.Err() == nil {
		// First the channels, then the state: no change is missed.
		config, members, dataPlane := s.Config.Changed(), s.Members.Changed(), s.DataPlane.Changed()
		rest := s.reconcile(ctx)
		s.wait(ctx, rest, config, members, dataPlane)
	}
	err := s.handOver()
	return errors.Join(err, group.Wait())
}

// wait returns when there may be something new.
func (s *Speaker) wait(ctx context.Context, rest time.Duration, config, members, dataPlane <-chan struct{}) {
	var cluster <-chan struct{}
	rested, beat := time.After(rest), time.NewTicker(heartbeat)
	defer beat.Stop()
	for {
		s.beat.Store(time.Now().Unix())
		select {
		case <-ctx.Done():
			return
		case <-config:
			return
		case <-members:
			return
		case <-dataPlane:
			return
		case <-cluster:
			return
		case <-s.retry:
			return
		case <-rested:
			cluster = s.cluster.wake
		case <-beat.C:
		}
	}
}

// reconcile brings what is announced up to date with what is known, and
// returns how long to rest.
func (s *Speaker) reconcile(ctx context.Context) time.Duration {
	checks := s.checks()
	ready := !slices.ContainsFunc(checks, func(c Check) bool { return !c.OK })
	s.Members.SetReady(ready)
	if ready {
		s.declareReady()
	}
	before := s.published.Load()
	after := *before
	after.checks = checks
	defer s.published.Store(&after)
	if !s.cluster.hasSynced() || !s.observe() && s.retry == nil {
		return 0
	}
	start := time.Now()
	after.plan, after.planned, after.digest = plan.Make(s.Node, s.snapshot), start, ""
	if s.snapshot.Config != nil {
		after.digest = s.snapshot.Config.Digest
	}
	took := time.Since(start)
	s.metrics.duration.Observe(took.Seconds())

	s.apply(ctx, after.plan)
	after.since = since(before.since, after.plan.Layer2, start)
	s.tell(before, &after)
	return min(restFactor*took, maxRest)
}

// observe updates the snapshot and reports whether it changed.
func (s *Speaker) observe() bool {
	changed := s.cluster.refresh()
	config, _ := s.Config.Current()
	speakers := s.Members.Speakers()
	changed = changed || config != s.snapshot.Config || !maps.Equal(speakers, s.snapshot.Speakers)
	s.snapshot = plan.Snapshot{Config: config, Services: s.cluster.list, Nodes: s.cluster.known, Speakers: speakers}
	return changed
}

// apply tells the limiter and the announcer. What fails is tried again. Until
// the speaker has been ready, the limits of one that was killed stay: packets
// arrive here for as long as neighbours remember it.
func (s *Speaker) apply(ctx context.Context, p plan.Plan) {
	select {
	case <-s.ready:
		s.Limiter.Set(p.Limits)
	default:
	}
	ctx, cancel := context.WithTimeout(ctx, setTimeout)
	defer cancel()
	s.retry = nil
	if err := s.Announcer.Set(ctx, p.Layer2); err != nil && !errors.Is(err, context.Canceled) {
		s.Log.Error("announcements not set", "err", err, "retry", setRetry)
		s.retry = time.After(setRetry)
	}
}

// since returns when each owned VIP came to this node.
func since(before map[netip.Addr]time.Time, owned map[netip.Addr]plan.Layer2, now time.Time) map[netip.Addr]time.Time {
	after := make(map[netip.Addr]time.Time, len(owned))
	for vip := range owned {
		if t, ok := before[vip]; ok {
			after[vip] = t
		} else {
			after[vip] = now
		}
	}
	return after
}

// tell logs and counts the VIPs that came and went, and logs the limits that
// are not understood. It comes after the deed: a failover does not wait for
// the log.
func (s *Speaker) tell(before, after *state) {
	for _, name := range slices.Sorted(maps.Keys(after.plan.LimitErrs)) {
		if err := after.plan.LimitErrs[name]; err != before.plan.LimitErrs[name] {
			s.Log.Warn("connections not limited: correct the Service's annotation", "service", name, "err", err)
		}
	}
	for _, vip := range missing(before.since, after.since) {
		s.metrics.lost.Inc()
		if silence, ok := after.plan.Silent[vip]; ok {
			s.Log.Info("vip lost", "vip", vip, "reason", silence.Reason, "owner", silence.Owner, "message", silence.Message)
		} else {
			s.Log.Info("vip lost", "vip", vip, "message", "no Service has it any more")
		}
	}
	for _, vip := range missing(after.since, before.since) {
		s.metrics.gained.Inc()
		s.Log.Info("vip gained", "vip", vip, "before", before.plan.Silent[vip].Message)
	}
}

// missing returns, in order, the VIPs of a that b lacks.
func missing(a, b map[netip.Addr]time.Time) []netip.Addr {
	var vips []netip.Addr
	for vip := range a {
		if _, ok := b[vip]; !ok {
			vips = append(vips, vip)
		}
	}
	slices.SortFunc(vips, netip.Addr.Compare)
	return vips
}

// handOver lets the others take over, then stops announcing.
func (s *Speaker) handOver() error {
	last := *s.published.Load()
	last.checks = []Check{{Name: "shutdown", Message: "handing over"}}
	s.published.Store(&last)
	s.Members.SetReady(false)
	s.Log.Info("handing over", "vips", len(last.since))
	if len(last.since) > 0 && len(s.Members.Speakers()) > 1 {
		time.Sleep(s.HandOver)
	}
	ctx, cancel := context.WithTimeout(context.Background(), setTimeout)
	defer cancel()
	if err := s.Announcer.Set(ctx, nil); err != nil {
		return fmt.Errorf("withdraw all: %w", err)
	}
	return nil
}

func (s *Speaker) declareReady() {
	select {
	case <-s.ready:
	default:
		s.Log.Info("ready to own VIPs")
		close(s.ready)
	}
}
