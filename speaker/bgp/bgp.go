// Package bgp announces prefixes to routers by BGP-4 (RFC 4271). It only
// announces: what routers send is counted and dropped, and nothing is ever
// installed.
//
// Messages are encoded and decoded by gobgp's packet library; the sessions are
// ours. docs/explanation/decisions.md has why gobgp's server is not used.
//
// One goroutine, Run, owns what the node wants (Machine): the sessions, their routes, and which peers
// are kept down. Each session is a task of its own. It shares only its adj-RIB-out with Run:
// Run marks changes in it, and the session sends them. A router that is slow, broken or
// hostile therefore delays no other.
//
// The files, from the outside in:
//
//	bgp.go         Announcer: the task that has the sessions
//	peerings.go    Machine: which sessions are wanted, what each sends, and how long it pauses; without a clock and sockets
//	session.go     a session: it connects, waits and tries again
//	connect.go     its TCP connection; collision.go: one more, that the router opened
//	open.go        OPEN messages, and what both sides can
//	fsm.go         the states of RFC 4271, from a connection to its end: which NOTIFICATION ends it
//	rib.go         what the router has been sent, and is to be sent
//	message.go     messages that are read
//	update.go      UPDATE messages, written: prefixes and path attributes
//	unnumbered.go  routers that are found on a link, and not by address
//	status.go, metrics.go, reasons.go: status, metrics, and reasons in words
package bgp

import (
	"context"
	"errors"
	"log/slog"
	"maps"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/lodestone-lb/lodestone/pkg/config"
	"github.com/lodestone-lb/lodestone/pkg/loglimit"
	"github.com/lodestone-lb/lodestone/pkg/notify"
	"github.com/lodestone-lb/lodestone/speaker/plan"
)

// listenRetry is the pause between attempts to listen for passive peers. Where it listens it looks, too: the node's addresses
// towards them may have changed.
const listenRetry = 5 * time.Second

// ErrStopped is returned when Run has ended.
var ErrStopped = errors.New("the BGP announcer has stopped")

// Options are what an Announcer needs.
type Options struct {
	Log      *slog.Logger
	Registry prometheus.Registerer
	// Passwords returns a TCP-MD5 password. Every Set calls it. An error or an empty password
	// keeps the sessions down that need it. With config.ErrNotRead the existing sessions stay
	// as they are.
	Passwords func(config.SecretKey) (string, error)
	// Restarting is set when another process announced before this one. Routers that keep
	// routes over a restart (RFC 4724) may have those of that process until this one has
	// announced its own.
	Restarting bool
	// NextHops returns the addresses of the interface that has the one given, the
	// best next hops first; netstate.NextHops is one.
	NextHops func(local netip.Addr) ([]netip.Addr, error)
	// Inside runs what opens sockets and looks up addresses, in another network
	// namespace for instance. Nil: here.
	Inside func(func() error) error
}

// Announcer is the BGP announcer: a task with one verb, Set.
type Announcer struct {
	options Options
	log     *slog.Logger
	changes notify.Signal

	calls   chan func()
	end     chan bool // whether the process will be back soon
	stopped chan struct{}

	// Owned by Run.
	machine   *Machine
	sessions  map[string]*session
	listeners *listeners
	discovery *discovery
	running   sync.WaitGroup // sessions, also those of peers that are gone

	published atomic.Pointer[map[string]*session]
}

// New returns an Announcer that does nothing until it runs.
func New(o Options) *Announcer {
	if o.Inside == nil {
		o.Inside = func(f func() error) error { return f() }
	}
	a := &Announcer{
		options:  o,
		log:      loglimit.Logger(o.Log),
		calls:    make(chan func()),
		end:      make(chan bool),
		stopped:  make(chan struct{}),
		machine:  NewMachine(o.Passwords, o.Restarting),
		sessions: map[string]*session{},
	}
	a.published.Store(&map[string]*session{})
	o.Registry.MustRegister(collector{a})
	return a
}

// String names the task.
func (a *Announcer) String() string { return "bgp" }

// Run keeps the sessions until Stop is called or ctx ends. The end of ctx is
// taken for a restart: routers that agreed to graceful restart keep the routes.
func (a *Announcer) Run(ctx context.Context) error {
	defer close(a.stopped)
	a.listeners = newListeners(a.options.Inside)
	a.discovery = newDiscovery(a.machine.ctx, a.options.Inside, a.log, a.changes.Notify)
	for {
		restarting := true
		select {
		case f := <-a.calls:
			f()
			continue
		case <-time.After(listenRetry):
			a.listeners.set(a.sessions)
			continue
		case <-ctx.Done():
		case restarting = <-a.end:
		}
		a.machine.Stop(restarting)
		a.running.Wait()
		a.listeners.close()
		a.discovery.running.Wait()
		return nil
	}
}

// Stop ends Run, which must have been started, and waits until all sessions are closed. When
// the process will be back soon (restarting), routers that agreed to graceful restart (RFC
// 4724) are sent no NOTIFICATION and keep the routes meanwhile. All others are sent one, and
// drop the routes.
func (a *Announcer) Stop(restarting bool) {
	select {
	case a.end <- restarting:
	case <-a.stopped:
	}
	<-a.stopped
}

// do runs f in Run.
func (a *Announcer) do(ctx context.Context, f func()) error {
	done := make(chan struct{})
	select {
	case a.calls <- func() { f(); close(done) }:
		<-done
		return nil
	case <-ctx.Done():
		return ctx.Err()
	case <-a.stopped:
		return ErrStopped
	}
}

// Set replaces all sessions and routes. No session is opened before the first call. That call
// must have all routes: routers that wait for the End-of-RIB marker after a restart are sent it
// after them. A session goes on unless something has changed that is in its OPEN or a
// property of its TCP connection, such as the password. Set does not wait for routers. The
// values in the maps belong to the Announcer from now on.
func (a *Announcer) Set(ctx context.Context, want plan.BGP) error {
	return a.do(ctx, func() {
		a.machine.Set(want)
		a.follow()
	})
}

// Update is Set for a caller that knows which routes have changed since the last call that
// returned nil. It looks at these alone: the cost of one more VIP does not depend on how many
// there are.
func (a *Announcer) Update(ctx context.Context, want plan.BGP, changed []netip.Prefix) error {
	return a.do(ctx, func() {
		a.machine.Update(want, changed)
		a.follow()
	})
}

// SetDown takes the session with a peer down and keeps it down, with the reason why, or lets
// it come up again. It applies to peers that are added later, too. It waits for Run.
func (a *Announcer) SetDown(ctx context.Context, peer string, down bool, why string) error {
	return a.do(ctx, func() {
		a.machine.SetDown(peer, down, why)
		a.listeners.set(a.sessions)
	})
}

// Drain asks all routers to prefer other paths, if they have any, before the
// routes are withdrawn (RFC 8326): all routes get the community
// GRACEFUL_SHUTDOWN, and local preference 0 at internal peers. Routes of later
// Sets do, too, until Drain(ctx, false). It does not wait for routers.
func (a *Announcer) Drain(ctx context.Context, on bool) error {
	return a.do(ctx, func() { a.machine.Drain(on) })
}

// follow starts and ends sessions, so that there is one for each peering.
func (a *Announcer) follow() {
	var fresh []*session
	gone := false
	for name, s := range a.sessions {
		if a.machine.peerings[name] != s.Peering {
			delete(a.sessions, name)
			gone = true
		}
	}
	for name, p := range a.machine.peerings {
		if a.sessions[name] == nil {
			s := newSession(a, p)
			a.sessions[name] = s
			fresh = append(fresh, s)
		}
	}
	published := maps.Clone(a.sessions)
	a.published.Store(&published)
	a.listeners.set(a.sessions)
	a.discovery.set(a.sessions)
	for _, s := range fresh {
		a.running.Go(s.run)
	}
	if gone || len(fresh) > 0 {
		a.changes.Notify()
	}
}

// Changed returns a channel that is closed when there is another session, when
// one comes up or goes down, or has another error. Take the channel before you
// call Peers, and no change is missed.
func (a *Announcer) Changed() <-chan struct{} { return a.changes.Next() }
