// Package speaker runs the loop of a node: one goroutine gathers events, hands them to package core,
// which decides, and executes the effects. Informers, other speakers, the configuration and
// kube-proxy only wake the loop.
//
// All of this works while the API server is down: the caches keep their objects, and the VIPs of a
// dead node still move, because the speakers detect the death themselves.
//
// Planned moves are make-before-break: a node that gives up a VIP answers for it until it hears the
// next owner's announcement. A speaker that ends publishes that it is not ready, and gives up all
// its VIPs in this way.
//
// The files, from the outside in:
//
//	speaker.go      Speaker: the loop, and what it needs
//	informers.go    the API server's objects, as the plan needs them
//	effects.go      executes the effects of package core
//	report.go       Reporter: what the Lease reports about this speaker and its node
//	bfdtobgp.go     Detector: ties BFD sessions to BGP sessions
//	kubeproxy.go    KubeProxy: whether kube-proxy is healthy
//	nodeaddress.go  AddressWatch: whether the Node still has this speaker's address
//	status.go       the status page, and the conditions of being ready
//	metrics.go      the metrics
package speaker

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sync/errgroup"
	"golang.org/x/time/rate"
	"k8s.io/client-go/kubernetes"

	"github.com/lodestone-lb/lodestone/pkg/config"
	"github.com/lodestone-lb/lodestone/pkg/diagnose"
	"github.com/lodestone-lb/lodestone/pkg/kube"
	"github.com/lodestone-lb/lodestone/pkg/notify"
	"github.com/lodestone-lb/lodestone/pkg/report"
	"github.com/lodestone-lb/lodestone/speaker/core"
	"github.com/lodestone-lb/lodestone/speaker/plan"
	"github.com/lodestone-lb/lodestone/speaker/podroutes"
)

const (
	// heartbeat is how often the loop records that it is alive.
	heartbeat = 5 * time.Second
	// setTimeout bounds one call of the announcer or of the router.
	setTimeout = 5 * time.Second
	// DefaultHandOver is how long this node answers for a VIP that moves while the next owner is
	// not heard. Normally it is heard within some ten milliseconds. It takes longer when a watch
	// lags, a frame is lost, a thousand VIPs move together, or the next owner waits for its kube-proxy.
	DefaultHandOver = 6 * time.Second
	// DefaultDrain is how long routers have to prefer other nodes before this node withdraws its
	// routes (RFC 8326).
	DefaultDrain = 2 * time.Second
	// The loop pauses pauseFactor times as long as it worked, at most maxPause, before it looks at
	// the API's objects again, so that endless changes cost a tenth of a core. Changes of other
	// speakers do not wait, unless there were more than membersBurst: then there is one look each
	// membersInterval, because one node that changes its Lease all the time must not keep all others busy.
	pauseFactor     = 9
	maxPause        = 100 * time.Millisecond
	membersBurst    = 50
	membersInterval = 200 * time.Millisecond
)

// Config is the configuration in force; kube.ConfigWatcher is one.
type Config interface {
	Current() (*config.Config, kube.State)
	Changed() <-chan struct{}
}

// Members are the speakers; membership.Task is one.
type Members interface {
	// Speakers returns the speakers that are alive; the value is whether the speaker is ready.
	Speakers() map[string]bool
	// All returns Speakers, and the Networks of the same moment.
	All() (speakers map[string]bool, networks map[string]report.Network)
	Joined() (bool, string)
	SetReady(bool)
	// SetSick publishes whether the data plane of this node is sick, see DataPlane.
	SetSick(bool)
	// Claim publishes what this speaker owns and keeps. The claims of the others are in Networks.
	Claim(claims report.Claims)
	Changed() <-chan struct{}
}

// Networks knows the networks of all nodes; membership.Task is one.
type Networks interface {
	// Networks returns what each speaker has published, so that all choose the same owners.
	Networks() map[string]report.Network
}

// DataPlane carries the traffic from here to the endpoints; KubeProxy is one.
type DataPlane interface {
	// Health reports whether it takes traffic, with a text for people. It is sick if it answers that
	// it is not healthy: the rules that it has written may still work, so the node is ready, and is
	// the last choice.
	Health() (healthy, sick bool, status string)
	Changed() <-chan struct{}
}

// Announcer makes VIPs known; layer2.Announcer is one.
type Announcer interface {
	// Set replaces the whole set. The map is the loop's: Set must not keep it.
	Set(ctx context.Context, want map[netip.Addr]plan.Layer2) error
	// Leaving returns how many VIPs of the set are leaving and still answered for.
	Leaving() int
	// Forget removes all reports about VIPs that no Service has any more.
	Forget(vips []netip.Addr)
}

// Limiter caps new connections to VIPs; limit.Limiter is one.
type Limiter interface {
	// Set replaces the whole set and does not wait until it is in force: no VIP waits for a limit.
	Set(want map[plan.LimitKey]plan.Limit)
}

// Forwarder hands connections to the nodes that keep them; direct.Director is one.
type Forwarder interface {
	// Set replaces all that is forwarded and does not wait until it is in force.
	Set(want plan.Forwarding)
	// Ready is closed once the first is in force, or cannot be.
	Ready() <-chan struct{}
}

// Router announces the node's VIPs to routers; bgp.Announcer is one.
type Router interface {
	// Set replaces sessions and routes, and does not wait for routers. The maps are the loop's: Set
	// must not keep them.
	Set(ctx context.Context, want plan.BGP) error
	// Update is Set when only these routes have changed since.
	Update(ctx context.Context, want plan.BGP, changed []netip.Prefix) error
	// Drain asks routers to prefer other nodes, for these routes and those of later Sets.
	Drain(ctx context.Context, on bool) error
	// Stop closes the sessions. If the process will be back soon, routers that
	// agreed to graceful restart keep the routes.
	Stop(restarting bool)
}

// Passwords are those of the peers; kube.Passwords is one.
type Passwords interface {
	// Changed returns a channel that is closed when a password has changed.
	Changed() <-chan struct{}
}

// PodRouter keeps routes to the pods of other nodes; podroutes.Table is one.
type PodRouter interface {
	// Set replaces the whole set and does not wait until it is in force: no VIP waits for a route.
	Set(want plan.PodRoutes)
	Status() podroutes.Status
	// Changed returns a channel that is closed when Status returns something else.
	Changed() <-chan struct{}
}

// Options are what a Speaker needs.
type Options struct {
	Node   string
	Client kubernetes.Interface
	// Scope is which Services are Lodestone's.
	Scope     kube.Scope
	Config    Config
	Members   Members
	DataPlane DataPlane
	Announcer Announcer
	Limiter   Limiter
	Forwarder Forwarder
	Router    Router
	PodRoutes PodRouter
	Passwords Passwords
	Detector  *Detector
	Log       *slog.Logger
	Registry  prometheus.Registerer
	// VIPMetrics is up to how many VIPs of its own the speaker has a metric for each.
	VIPMetrics int
	// HandOver is how long at most this node answers for a VIP that moves to another one.
	HandOver time.Duration
	// Drain is how long routers have to prefer other nodes before this node withdraws its routes.
	Drain time.Duration
}

// Speaker is the task that runs the loop.
type Speaker struct {
	Options
	cluster *cluster
	metrics *metrics
	ready   chan struct{}
	changed notify.Signal // Moves, Labels or Addresses

	// Owned by Run.
	heard     <-chan struct{} // closed when the speakers or their networks have changed
	pace      *rate.Limiter   // of changes of other speakers that do not wait
	passwords <-chan struct{} // closed when passwords have changed

	beat atomic.Pointer[time.Time] // the loop's last sign of life

	// The loop holds mu for each step of the core, and others while they read the core's state. A
	// copy of all VIPs at each change would double the cost of a storm of changes.
	mu     sync.Mutex
	core   *core.Core
	checks []diagnose.Condition
}

// New returns a Speaker that starts with Run.
func New(o Options) (*Speaker, error) {
	c, err := newCluster(o.Client, o.Scope)
	if err != nil {
		return nil, fmt.Errorf("watch the cluster: %w", err)
	}
	s := &Speaker{Options: o, cluster: c, ready: make(chan struct{}), pace: newPace(),
		core: core.New(core.Options{Node: o.Node, HandOver: o.HandOver, Drain: o.Drain})}
	s.metrics = newMetrics(o.Registry, s)
	return s, nil
}

func newPace() *rate.Limiter { return rate.NewLimiter(rate.Every(membersInterval), membersBurst) }

// String names the task.
func (s *Speaker) String() string { return "speaker" }

// Ready is closed when the speaker is ready to own VIPs for the first time.
func (s *Speaker) Ready() <-chan struct{} { return s.ready }

// Run decides and announces until ctx ends, then hands over. Everything in the options must run longer.
func (s *Speaker) Run(ctx context.Context) error {
	var group errgroup.Group
	group.Go(func() error { s.cluster.run(ctx); return nil })
	for ctx.Err() == nil {
		// First the channels, then the state: no change is missed.
		config, members, dataPlane, passwords := s.Config.Changed(), s.Members.Changed(), s.DataPlane.Changed(), s.Passwords.Changed()
		forwards := s.Forwarder.Ready()
		start := time.Now()
		if s.gather(members, passwords).Forwards {
			forwards = nil
		}
		next, _ := s.apply(ctx, s.decide())
		resume := time.Now().Add(min(pauseFactor*time.Since(start), maxPause))
		s.wait(ctx, resume, next, config, members, dataPlane, passwords, forwards)
	}
	err := s.handOver()
	return errors.Join(err, group.Wait())
}

// wait returns when something may have changed, or the next decision is due. Changes of the
// cluster's objects wait until resume, and too many changes of other speakers for membersInterval.
func (s *Speaker) wait(ctx context.Context, resume, next time.Time, config, members, dataPlane, passwords, forwards <-chan struct{}) {
	var due, resumed, late <-chan time.Time
	if !next.IsZero() {
		due = time.After(time.Until(next))
	}
	beat := time.NewTicker(heartbeat)
	defer beat.Stop()
	for {
		now := time.Now()
		s.beat.Store(&now)
		select {
		case <-beat.C:
			continue
		case <-members:
			if !s.pace.Allow() {
				members, late = nil, time.After(membersInterval)
				continue
			}
		case <-late:
			s.pace.Allow() // what there is again by now
		case <-s.cluster.wake:
			if !time.Now().After(resume) {
				resumed = time.After(time.Until(resume))
				continue
			}
		case <-resumed:
		case <-config:
		case <-dataPlane:
		case <-passwords:
		case <-forwards:
		case <-due:
		case <-ctx.Done():
		}
		return
	}
}

// gather hands the core all events since the last time, and returns the speaker's health. Members and
// passwords are unchanged while the channel of their changes is the same.
func (s *Speaker) gather(members, passwords <-chan struct{}) core.Health {
	current, state := s.Config.Current()
	health, checks := s.health(current, state)
	s.setChecks(checks)
	s.Members.SetSick(health.Sick)
	s.step(health)
	s.step(core.Config{Config: current})
	if health.Synced {
		if s.cluster.refresh(func(svc plan.Service) { s.step(core.Service{Service: svc}) }) {
			s.step(core.Nodes(s.cluster.known))
		}
	}
	if members != s.heard {
		s.heard = members
		speakers, networks := s.Members.All()
		s.step(core.Members{Speakers: speakers, Networks: networks})
	}
	if passwords != s.passwords {
		s.passwords = passwords
		s.step(core.Passwords{})
	}
	return health
}

// step hands the core an event.
func (s *Speaker) step(event core.Event) core.Effects {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.core.Step(event, time.Now())
}

// decide has the core decide, and measures how long a new plan takes.
func (s *Speaker) decide() core.Effects {
	start := time.Now()
	e := s.step(core.Decide{})
	if e.NewPlan {
		s.metrics.duration.Observe(time.Since(start).Seconds())
	}
	return e
}

// handOver gives all VIPs to the others, then stops announcing.
func (s *Speaker) handOver() error {
	s.setChecks([]diagnose.Condition{{Name: "shutdown", Message: "handing over"}})
	var failed error // the last set, which withdraws what is left
	for e := s.step(core.Stop{}); ; e = s.step(core.StillLeaving(s.Announcer.Leaving())) {
		next, err := s.apply(context.Background(), e)
		if e.SetVIPs {
			failed = err
		}
		if e.Done {
			return failed
		}
		time.Sleep(time.Until(next))
	}
}

// Moves returns the VIPs that moved lately, as far as this node reports them.
func (s *Speaker) Moves() []report.Move {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.core.State().Moves
}

// Labels returns the node's labels, and whether they are known.
func (s *Speaker) Labels() (map[string]string, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	state := s.core.State()
	return state.Node.Labels, state.Known
}

// Addresses returns the internal addresses of the Node, none if they are not known.
func (s *Speaker) Addresses() []netip.Addr {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.core.State().Node.Addresses
}

// Changed returns a channel that is closed when Moves, Labels or Addresses return something else.
func (s *Speaker) Changed() <-chan struct{} { return s.changed.Next() }
