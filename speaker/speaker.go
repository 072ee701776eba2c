// Package speaker is what a node does: one goroutine gathers what has happened, has
// package core decide, and does what that wants done. Informers, other speakers, the
// configuration and kube-proxy only wake it.
//
// While the API server is down everything goes on: the caches keep what they
// have, and a dead node's VIPs still move, for the speakers tell each other
// who is alive.
//
// Planned moves are make-before-break: a node that is to give up a VIP answers
// for it until it hears the next owner's announcement. A speaker that ends
// tells the others that it is not ready, and gives up all its VIPs like that.
//
// The files, from the outside in:
//
//	speaker.go    Speaker: the loop, and what it needs
//	cluster.go    what the plan needs of the API server's objects
//	effects.go    what package core wants done is done
//	report.go     Reporter: what the Lease says of this speaker and its node
//	bfd.go        Detector: BFD sessions and BGP sessions are tied
//	kubeproxy.go  whether kube-proxy is well
//	address.go    whether the Node still has this speaker's address
//	status.go, metrics.go  what people see
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
	// heartbeat is how often the loop shows that it is alive.
	heartbeat = 5 * time.Second
	// setTimeout bounds one call of the announcer or of the router.
	setTimeout = 5 * time.Second
	// DefaultHandOver is how long a VIP that moves is answered for here when the
	// next owner is not heard. Normally it is, within some ten milliseconds; this
	// is for a watch that lags, a frame that is lost, and a thousand VIPs that
	// move together.
	DefaultHandOver = 2 * time.Second
	// DefaultDrain is how long routers are given to prefer other nodes before this
	// one withdraws its routes (RFC 8326).
	DefaultDrain = 2 * time.Second
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
	// All returns Speakers, and the Networks of the same moment.
	All() (speakers map[string]bool, networks map[string]report.Network)
	Joined() (bool, string)
	SetReady(bool)
	// SetSick tells all whether the data plane of this node is sick, see DataPlane.
	SetSick(bool)
	Changed() <-chan struct{}
}

// Networks tells what the nodes' networks look like; membership.Task is one, too.
type Networks interface {
	// Networks returns what each speaker has told all others, so that they
	// come to the same owners.
	Networks() map[string]report.Network
}

// Claimant tells all other speakers what this one owns and keeps;
// membership.Task is one, too. They tell it by their networks.
type Claimant interface {
	Claim(claims report.Claims)
}

// DataPlane carries the traffic from here to the endpoints; KubeProxy is one.
type DataPlane interface {
	// Health reports whether it takes traffic, with a sentence for people. It is sick if it is
	// there and not healthy, so that what it has written may serve: the node is ready, and the
	// last choice.
	Health() (healthy, sick bool, status string)
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

// Forwarder hands connections to the nodes that keep them; direct.Director is one.
type Forwarder interface {
	// Set replaces all that is forwarded and does not wait for its effect.
	Set(want plan.Forwarding)
	// Ready is closed once the first is in force, or cannot be.
	Ready() <-chan struct{}
}

// Router tells routers which VIPs the node takes traffic for; bgp.Announcer is
// one.
type Router interface {
	// Set replaces sessions and routes, and does not wait for routers. The maps
	// are the loop's: Set must not keep them.
	Set(ctx context.Context, want plan.BGP) error
	// Update is Set when only these routes have changed since.
	Update(ctx context.Context, want plan.BGP, changed []netip.Prefix) error
	// Drain has routers prefer other nodes, for these routes and those of later
	// Sets.
	Drain(ctx context.Context, on bool) error
	// Stop closes the sessions. If the process will be back soon, routers that
	// agreed to graceful restart keep the routes.
	Stop(restarting bool)
}

// Passwords are those of the peers; kube.Passwords is one.
type Passwords interface {
	// Changed returns a channel that is closed when sessions have to be set
	// again for their passwords.
	Changed() <-chan struct{}
}

// PodRouter keeps routes to the pods of other nodes; route.Table is one.
type PodRouter interface {
	// Set replaces the whole set and does not wait for its effect: no VIP waits
	// for a route.
	Set(want plan.PodRoutes)
	Status() podroutes.Status
	// Changed returns a channel that is closed when Status has something new.
	Changed() <-chan struct{}
}

// Options are what a Speaker needs.
type Options struct {
	Node   string
	Client kubernetes.Interface
	// Scope says which Services are Lodestone's.
	Scope     kube.Scope
	Config    Config
	Members   Members
	Claimant  Claimant
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
	changed notify.Signal // Moves, Labels or Addresses

	// Owned by Run.
	heard     <-chan struct{} // closed when there are other speakers than the core knows
	passwords <-chan struct{} // closed when there are other passwords

	beat atomic.Pointer[time.Time] // when the loop last showed that it is alive

	// The loop locks the core for each step, and others while they read its state: a
	// copy of all VIPs for each change would be half of what a storm costs.
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
	s := &Speaker{Options: o, cluster: c, ready: make(chan struct{}),
		core: core.New(core.Options{Node: o.Node, HandOver: o.HandOver, Drain: o.Drain})}
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
		forwards := s.Forwarder.Ready()
		start := time.Now()
		if s.gather(members, passwords).Forwards {
			forwards = nil
		}
		next, _ := s.apply(ctx, s.decide())
		rested := time.Now().Add(min(restFactor*time.Since(start), maxRest))
		s.wait(ctx, rested, next, config, members, dataPlane, passwords, forwards)
	}
	err := s.handOver()
	return errors.Join(err, group.Wait())
}

// wait returns when there may be something new, or it is time for the next decision;
// news of the cluster wait until the loop has rested.
func (s *Speaker) wait(ctx context.Context, rested, next time.Time, config, members, dataPlane, passwords, forwards <-chan struct{}) {
	var due, news <-chan time.Time
	if !next.IsZero() {
		due = time.After(time.Until(next))
	}
	beat := time.NewTicker(heartbeat)
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
		case <-due:
			return
		case <-forwards:
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

// gather has the core note what has happened, and returns how the speaker is. The speakers and their networks are the
// same as long as the channel of their changes is.
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

// step has the core take an event, now.
func (s *Speaker) step(event core.Event) core.Effects {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.core.Step(event, time.Now())
}

// decide has the core decide by what it knows.
func (s *Speaker) decide() core.Effects {
	start := time.Now()
	e := s.step(core.Decide{})
	if e.Planned {
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

// Moves returns the VIPs that changed hands lately, as far as this node tells of
// them.
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

// Addresses returns the internal addresses of the Node; none: they are not known.
func (s *Speaker) Addresses() []netip.Addr {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.core.State().Node.Addresses
}

// Changed returns a channel that is closed when Moves, Labels or Addresses have another
// answer.
func (s *Speaker) Changed() <-chan struct{} { return s.changed.Next() }
