// Package speaker is what a node does: one goroutine takes a snapshot of the
// cluster, asks the plan what this node announces, and tells the announcer.
// Informers, other speakers, the configuration and kube-proxy only wake it.
//
// While the API server is down everything goes on: the caches keep what they
// have, and a dead node's VIPs still move, for the speakers tell each other
// who is alive.
//
// Planned moves are make-before-break: a node that is to give up a VIP answers
// for it until it hears the next owner's announcement. A speaker that ends
// tells the others that it is not ready, and gives up all its VIPs like that.
package speaker

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sync/errgroup"
	"k8s.io/client-go/kubernetes"

	"github.com/lodestone-lb/lodestone/pkg/config"
	"github.com/lodestone-lb/lodestone/pkg/kube"
	"github.com/lodestone-lb/lodestone/pkg/report"
	"github.com/lodestone-lb/lodestone/speaker/plan"
	"github.com/lodestone-lb/lodestone/speaker/snapshot"
)

const (
	// heartbeat is how often the loop shows that it is alive.
	heartbeat = 5 * time.Second
	// setTimeout bounds one call of the announcer, setRetry is the wait after
	// one that failed.
	setTimeout = 5 * time.Second
	setRetry   = time.Second
	// DefaultHandOver is how long a VIP that moves is answered for here when the
	// next owner is not heard. Normally it is, within some ten milliseconds; this
	// is for a watch that lags, a frame that is lost, and a thousand VIPs that
	// move together.
	DefaultHandOver = 2 * time.Second
	// The loop rests restFactor times as long as it worked, at most maxRest,
	// before it looks at the API's objects again: changes without end cost a
	// tenth of a core. Other speakers never wait.
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
	// SetSick tells all whether the data plane of this node is sick, see DataPlane.
	SetSick(bool)
	Changed() <-chan struct{}
}

// Networks tells what the nodes' networks look like; membership.Task is one,
// too, and tells changes as those of Members.
type Networks interface {
	// Networks returns what each speaker has told all others, so that they
	// come to the same owners.
	Networks() map[string]report.Network
}

// Claimant tells all other speakers what this one owns and keeps;
// membership.Task is one, too. They tell it by their networks.
type Claimant interface {
	Claim(buckets [128]byte)
}

// DataPlane carries the traffic from here to the endpoints; KubeProxy is one.
type DataPlane interface {
	Healthy() (bool, string)
	// Sick reports whether it is there and not healthy, so that what it has written may
	// serve: the node is ready, and the last choice.
	Sick() bool
	Changed() <-chan struct{}
}

// Announcer makes VIPs known; layer2.Announcer is one.
type Announcer interface {
	// Set replaces the whole set. The map is the loop's: Set must not keep it.
	Set(ctx context.Context, want map[netip.Addr]plan.Layer2) error
	// Leaving returns how many VIPs of the set are leaving and still answered
	// for.
	Leaving() int
	// Forget takes back what was reported about VIPs that no Service has any
	// more.
	Forget(vips []netip.Addr)
}

// Limiter caps new connections to VIPs; limit.Limiter is one.
type Limiter interface {
	// Set replaces the whole set and does not wait for its effect: no VIP
	// waits for a limit.
	Set(want map[plan.LimitKey]plan.Limit)
}

// Options are what a Speaker needs.
type Options struct {
	Node   string
	Client kubernetes.Interface
	// Scope says which Services are Lodestone's.
	Scope     kube.Scope
	Config    Config
	Members   Members
	Networks  Networks
	Claimant  Claimant
	DataPlane DataPlane
	Announcer Announcer
	Limiter   Limiter
	Router    Router
	PodRoutes PodRouter
	Passwords Passwords
	Detector  *Detector
	Log       *slog.Logger
	Registry  prometheus.Registerer
	// HandOver is how long at most a VIP that moves to another node is answered
	// for here.
	HandOver time.Duration
	// Drain is how long routers are given to prefer other nodes before this one
	// withdraws its routes.
	Drain time.Duration
}

// Speaker is the task that runs the loop.
type Speaker struct {
	Options
	cluster *cluster
	metrics *metrics
	ready   chan struct{}

	// Owned by Run.
	planner  *plan.Planner
	config   *config.Config            // in the planner
	speakers map[string]bool           // in the planner
	nodes    map[string]plan.Node      // in the planner
	networks map[string]report.Network // in the nodes
	heard    <-chan struct{}           // closed when there are others
	retry    <-chan time.Time
	leaving  map[netip.Addr]leaving
	arriving map[netip.Addr]arriving
	// endpoints are since when this node has ready ones of VIPs, with policy Local.
	endpoints map[netip.Addr]time.Time
	routing   routing
	moves     moves

	beat atomic.Pointer[time.Time] // when the loop last showed that it is alive

	// The loop changes the state in place, and locks it only for that: a copy
	// of all VIPs for each change would be half of what a storm costs.
	mu    sync.Mutex
	state state
}

// state is what the loop decided last.
type state struct {
	checks  []Check
	plan    plan.Plan
	since   map[netip.Addr]time.Time // of the VIPs that are owned
	digest  string
	planned time.Time
	// labels are the node's, if it is known.
	labels   map[string]string
	labelled bool
	// addresses are the node's internal ones.
	addresses []netip.Addr
}

// New returns a Speaker that starts with Run.
func New(o Options) (*Speaker, error) {
	c, err := newCluster(o.Client, o.Scope)
	if err != nil {
		return nil, fmt.Errorf("watch the cluster: %w", err)
	}
	s := &Speaker{Options: o, cluster: c, ready: make(chan struct{}), planner: plan.NewPlanner(o.Node), leaving: map[netip.Addr]leaving{},
		arriving: map[netip.Addr]arriving{}, endpoints: map[netip.Addr]time.Time{}}
	s.moves.moving, s.moves.orphans = map[netip.Addr]moving{}, map[netip.Addr]bool{}
	s.state = state{plan: s.planner.Plan(), since: map[netip.Addr]time.Time{}}
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
		config, members, dataPlane, passwords := s.Config.Changed(), s.Members.Changed(), s.DataPlane.Changed(), s.Passwords.Changed()
		start := time.Now()
		s.reconcile(ctx, members, passwords)
		rested := time.Now().Add(min(restFactor*time.Since(start), maxRest))
		s.wait(ctx, rested, config, members, dataPlane, passwords)
	}
	err := s.handOver()
	return errors.Join(err, group.Wait())
}

// wait returns when there may be something new; news of the cluster wait until
// the loop has rested.
func (s *Speaker) wait(ctx context.Context, rested time.Time, config, members, dataPlane, passwords <-chan struct{}) {
	var news <-chan time.Time
	beat, end, drained, settled := time.NewTicker(heartbeat), s.handOversEnd(), s.routing.drainEnds(), s.movesDue()
	defer beat.Stop()
	for {
		now := time.Now()
		s.beat.Store(&now)
		select {
		case <-ctx.Done():
			return
		case <-config:
			return
		case <-members:
			return
		case <-dataPlane:
			return
		case <-passwords:
			return
		case <-s.retry:
			return
		case <-end:
			return
		case <-drained:
			return
		case <-settled:
			return
		case <-s.cluster.wake:
			if time.Now().After(rested) {
				return
			}
			news = time.After(time.Until(rested))
		case <-news:
			return
		case <-beat.C:
		}
	}
}

// reconcile brings what is announced up to date with what is known.
func (s *Speaker) reconcile(ctx context.Context, members, passwords <-chan struct{}) {
	checks := s.checks()
	sick := s.DataPlane.Sick()
	ready := mayOwn(checks, sick)
	s.Members.SetSick(sick)
	s.Members.SetReady(ready)
	if ready {
		s.declareReady()
	}
	s.setChecks(checks)
	if !s.cluster.hasSynced() {
		return
	}
	alive, excluded := s.speakers, s.excluded()
	s.observe(members)
	s.settleMoves(time.Now())
	due, routingDue := s.endLeaving(ready) || s.retry != nil, s.routingDue(passwords)
	if !s.planner.Stale() && !due && !routingDue && len(s.arriving) == 0 {
		return
	}
	unlimited, had := s.planner.Plan().LimitErrs, s.routesAtExclusion(excluded)
	changes := s.update()
	s.Claimant.Claim(s.planner.Plan().Claims)
	s.limit(s.planner.Plan().Limits)
	due = s.arrive(changes, time.Now()) || due
	if ready {
		due = s.leave(changes.VIPs, alive) || due
	}
	if due || slices.ContainsFunc(changes.VIPs, func(c plan.Change) bool { return c.Before.Owned || c.After.Owned }) {
		s.apply(ctx, s.want())
	}
	s.Announcer.Forget(changes.Gone())
	if routingDue || changes.Sessions || len(changes.Prefixes) > 0 || s.planner.Plan().BGP.Permit != s.routing.permit {
		s.route(ctx, had, changes.Prefixes)
	}
	s.noteMoves(changes, time.Now())
	s.logChanges(changes)
	s.logUnlimited(unlimited, s.planner.Plan().LimitErrs)
}

// observe tells the planner what is new. The speakers and their networks are
// the same as long as the channel of their changes is.
func (s *Speaker) observe(members <-chan struct{}) {
	changedNodes, changed := s.cluster.refresh(s.put), false
	if config, _ := s.Config.Current(); config != s.config {
		s.config, changed = config, true
	}
	routesDue := changedNodes || changed
	if members != s.heard {
		speakers, networks := s.Members.Speakers(), s.Networks.Networks()
		changed = changed || !maps.Equal(speakers, s.speakers)
		changedNodes = changedNodes || !maps.EqualFunc(networks, s.networks, equalNetworks)
		s.heard, s.speakers, s.networks = members, speakers, networks
	}
	if changedNodes {
		s.nodes = locate(s.cluster.known, s.networks)
		s.noteNode()
	}
	if changed || changedNodes {
		s.planner.Set(s.config, s.nodes, s.speakers)
	}
	if routesDue {
		s.routePods()
	}
}

// locate returns the nodes with what their speakers tell: segments and claims.
func locate(nodes map[string]plan.Node, networks map[string]report.Network) map[string]plan.Node {
	located := make(map[string]plan.Node, len(nodes))
	for name, n := range nodes {
		located[name] = snapshot.Locate(n, networks[name])
	}
	return located
}

// equalNetworks reports whether the plan takes the two for the same.
func equalNetworks(a, b report.Network) bool {
	return a.Claims == b.Claims && a.Blind == b.Blind && a.Sick == b.Sick && a.Apart == b.Apart && slices.Equal(a.Segments, b.Segments) &&
		(a.Segments == nil) == (b.Segments == nil)
}

// update brings the plan up to date and returns what that changed.
func (s *Speaker) update() plan.Changes {
	start := time.Now()
	s.mu.Lock()
	defer s.mu.Unlock()
	changes := s.planner.Update()
	for _, c := range changes.VIPs {
		switch {
		case !c.After.Owned:
			delete(s.state.since, c.VIP)
		case !c.Before.Owned:
			s.state.since[c.VIP] = start
		}
	}
	s.state.plan, s.state.planned, s.state.digest = s.planner.Plan(), start, ""
	if s.config != nil {
		s.state.digest = s.config.Digest
	}
	s.metrics.duration.Observe(time.Since(start).Seconds())
	return changes
}

// limit tells the limiter. Until the speaker has been ready, the limits of one
// that was killed stay: packets arrive here for as long as neighbours remember
// it.
func (s *Speaker) limit(want map[plan.LimitKey]plan.Limit) {
	select {
	case <-s.ready:
		s.Limiter.Set(want)
	default:
	}
}

// apply tells the announcer. What fails is tried again.
func (s *Speaker) apply(ctx context.Context, want map[netip.Addr]plan.Layer2) {
	ctx, cancel := context.WithTimeout(ctx, setTimeout)
	defer cancel()
	s.retry = nil
	if err := s.Announcer.Set(ctx, want); err != nil && !errors.Is(err, context.Canceled) {
		s.Log.Error("announcements not set", "err", err, "retry", setRetry)
		s.retry = time.After(setRetry)
	}
}

// logChanges logs and counts the VIPs that came and went. It comes after the deed:
// a failover does not wait for the log.
func (s *Speaker) logChanges(changes plan.Changes) {
	slices.SortFunc(changes.VIPs, func(a, b plan.Change) int { return a.VIP.Compare(b.VIP) })
	for _, c := range changes.VIPs {
		reason := []any{"vip", c.VIP, "message", "no Service has it any more"}
		if silence := c.After.Silence; silence.Reason != "" {
			reason = []any{"vip", c.VIP, "reason", silence.Reason, "owner", silence.Owner, "message", silence.Message}
		}
		switch {
		case c.Before.Owned == c.After.Owned:
		case c.After.Owned:
			s.metrics.gained.Inc()
			s.Log.Info("vip gained", "vip", c.VIP, "before", c.Before.Silence.Message)
		default:
			s.metrics.lost.Inc()
			s.Log.Info("vip lost", reason...)
		}
		switch {
		case slices.Equal(c.Before.Peers, c.After.Peers):
		case len(c.After.Peers) > 0:
			s.Log.Info("vip routed", "vip", c.VIP, "peers", c.After.Peers)
		default:
			s.Log.Info("vip not routed", reason...)
		}
	}
}

// logUnlimited logs the limits that are not understood.
func (s *Speaker) logUnlimited(before, after map[string]error) {
	for _, name := range slices.Sorted(maps.Keys(after)) {
		if err := after[name]; err != before[name] {
			s.Log.Warn("connections not limited: correct the Service's annotation", "service", name, "err", err)
		}
	}
}

func (s *Speaker) declareReady() {
	select {
	case <-s.ready:
	default:
		s.Log.Info("ready to own VIPs")
		close(s.ready)
	}
}
