// Package podroutes keeps routes to the pods of other nodes in the kernel's main table. It
// touches only routes with Protocol, its mark. A destination for which others have a route is
// left to them and reported as a problem.
//
// One goroutine, Run, owns all state. It compares the kernel's table with the wanted routes
// and changes what differs, additions before deletions, a next hop by replacement. A restarted
// speaker therefore goes on with the routes that it finds, no packet is lost when a node gets
// another address, and a route that somebody else removes comes back at once. Routes outlive
// the process: Clear, or a Set without routes, removes them.
//
// The files, from the outside in:
//
//	podroutes.go  Table, the task that keeps the wanted routes in the kernel
//	decide.go     the steps from the kernel's routes to the wanted ones
//	kernel.go     netlink
//	status.go     the status
//	metrics.go    the metrics
package podroutes

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
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/lodestone-lb/lodestone/pkg/loglimit"
	"github.com/lodestone-lb/lodestone/pkg/notify"
	"github.com/lodestone-lb/lodestone/speaker/netstate"
	"github.com/lodestone-lb/lodestone/speaker/plan"
)

const (
	// minPause is the least pause between two looks at the kernel's table.
	minPause = 100 * time.Millisecond
	// settle is how long after a change of an interface the table is looked at again. An interface that
	// goes down loses its IPv4 routes somewhat later and without a notification.
	settle = time.Second
	// check is how often the table is looked at without a notification.
	check = 30 * time.Second
	// After a failure there is a new attempt after firstRetry. The delay doubles up to lastRetry.
	firstRetry, lastRetry = time.Second, 30 * time.Second
)

// Options are what a Table needs.
type Options struct {
	Interfaces netstate.Interfaces
	// Namespace is the network namespace of the routes. Nil: this process's own.
	Namespace *netns.NsHandle
	Log       *slog.Logger
	Registry  prometheus.Registerer
}

// Table is a task that keeps routes.
type Table struct {
	Options
	kernel   kernel
	restored prometheus.Counter
	sets     chan plan.PodRoutes

	// Owned by Run.
	state     state
	due       time.Time       // of the next look at the kernel's table; zero: none
	resume    time.Time       // when the table may be looked at again
	seen      <-chan struct{} // closed when interfaces have changed
	unsettled bool            // interfaces have changed since the last look
	delay     time.Duration

	published atomic.Pointer[state]
	changed   notify.Signal
}

// state is the state of Run. The maps of a published state are immutable.
type state struct {
	set      bool // want is what Set was called with
	want     plan.PodRoutes
	inForce  map[netip.Prefix]target
	problems map[netip.Prefix]problem
	err      error // why possible routes are not in force
}

// New returns a Table that does nothing until it runs.
func New(o Options) *Table {
	o.Log = loglimit.Logger(o.Log)
	t := &Table{Options: o, kernel: kernel{netns.None()}, sets: make(chan plan.PodRoutes, 1)}
	if o.Namespace != nil {
		t.kernel.namespace = *o.Namespace
	}
	t.restored = prometheus.NewCounter(prometheus.CounterOpts{Name: metricRestored, Help: "Routes to pods that were gone and came back."})
	t.published.Store(&state{})
	o.Registry.MustRegister(t.restored, collector{t})
	return t
}

// String names the task.
func (t *Table) String() string { return "pod routes" }

// Set replaces the whole set of routes. It does not wait: Run brings the set into force, and tries again if
// that fails. Before the first call the kernel's table stays as it is. Set is for one goroutine, and keeps
// want.
func (t *Table) Set(want plan.PodRoutes) { notify.Replace(t.sets, want) }

// Changed returns a channel that is closed when Status returns something else. Take the channel first, then
// ask, and no change is missed.
func (t *Table) Changed() <-chan struct{} { return t.changed.Next() }

// Run keeps the routes until ctx ends. It does not remove them then, so that traffic continues while a
// speaker is replaced. After a failure it tries again.
func (t *Table) Run(ctx context.Context) error {
	select {
	case <-ctx.Done():
		return nil
	case <-t.Interfaces.Ready():
	}
	t.seen = t.Interfaces.Changed()
	for before := ""; ctx.Err() == nil; {
		lost, err := t.follow(ctx)
		switch {
		case err != nil:
			if err.Error() != before {
				t.Log.Warn("pod routes that somebody deletes are restored late", "err", err, "check", check)
			}
			before = err.Error()
			t.wait(ctx, nil)
		case ctx.Err() == nil:
			t.Log.Debug("looking at all routes", "cause", lost)
			t.look()
		}
	}
	return nil
}

// follow keeps the routes until notifications are lost.
func (t *Table) follow(ctx context.Context) (lost, err error) {
	s, err := netstate.SubscribeRoutes(t.kernel.namespace, receiveBuffer)
	if err != nil {
		return nil, err
	}
	defer s.Close()
	for ctx.Err() == nil {
		if !t.wait(ctx, s.Updates) {
			return <-s.Lost, nil
		}
	}
	return nil, nil
}

// wait waits for one event and handles it. It returns false when the notifications have ended.
func (t *Table) wait(ctx context.Context, routes <-chan netlink.RouteUpdate) bool {
	var due <-chan time.Time
	if !t.due.IsZero() {
		due = time.After(time.Until(t.due))
	}
	select {
	case <-ctx.Done():
	case want := <-t.sets:
		if !t.state.set || !equal(want, t.state.want) {
			t.set(want)
		}
	case u, ok := <-routes:
		if !ok {
			return false
		}
		if t.concerns(u) {
			t.look()
		}
	case <-t.seen:
		t.seen, t.unsettled = t.Interfaces.Changed(), true
		t.look()
	case <-due:
		t.reconcile()
	}
	return true
}

// set takes over what Set was called with.
func (t *Table) set(want plan.PodRoutes) {
	for _, r := range want.Refused {
		if !slices.Contains(t.state.want.Refused, r) {
			t.Log.Warn("no pod route", "cidr", r.CIDR, "node", r.Node, "reason", r.Reason, "message", r.Message)
		}
	}
	t.state.set, t.state.want = true, want
	t.reconcile()
}

// look schedules the next look at the kernel's table as early as allowed.
func (t *Table) look() {
	if t.state.set {
		t.due = t.resume
	}
}

func equal(a, b plan.PodRoutes) bool {
	return a.Mode == b.Mode && maps.Equal(a.Routes, b.Routes) && slices.Equal(a.Own, b.Own) && slices.Equal(a.Refused, b.Refused)
}

// concerns reports whether the notification is about a change that Run did not make itself.
func (t *Table) concerns(u netlink.RouteUpdate) bool {
	if u.Table != unix.RT_TABLE_MAIN || !t.state.set {
		return false
	}
	e := entryOf(u.Route)
	_, wanted := t.state.want.Routes[e.prefix]
	if u.Type == unix.RTM_NEWROUTE && e.ours {
		return !e.is(t.state.inForce[e.prefix])
	}
	return wanted
}

// reconcile brings want into force.
func (t *Table) reconcile() {
	start, before := time.Now(), t.state
	table, err := t.kernel.list(before.want.Routes)
	if err == nil {
		s := decide(before.want.Routes, t.Interfaces.Interfaces(), table)
		t.state.problems = s.problems
		t.state.inForce, s.removes, err = t.kernel.apply(s)
		t.logChanges(before, s)
	}
	now := time.Now()
	t.state.err, t.resume, t.due = err, now.Add(netstate.Pause(minPause, now.Sub(start))), time.Time{}
	switch {
	case err != nil:
		t.fail(before.err)
	case len(before.want.Routes) == 0:
	case t.unsettled:
		t.due = now.Add(settle)
	default:
		t.due = now.Add(check)
	}
	t.unsettled = false
	t.published.Store(new(t.state))
	t.changed.Notify()
}

func (t *Table) fail(before error) {
	err := t.state.err
	if before == nil || before.Error() != err.Error() {
		t.Log.Error("pod routes not up to date", "wanted", len(t.state.want.Routes), "in_force", len(t.state.inForce), "err", err,
			"hint", hint(err))
		t.delay = firstRetry
	}
	t.due = time.Now().Add(t.delay)
	t.delay = min(2*t.delay, lastRetry)
}

// hint returns what an operator can do about the error.
func hint(err error) string {
	switch {
	case errors.Is(err, unix.EPERM):
		return "the speaker needs the capability NET_ADMIN: set the chart's speaker.podRoutes"
	case errors.Is(err, unix.ENETUNREACH), errors.Is(err, unix.EHOSTUNREACH), errors.Is(err, unix.EINVAL):
		return "the kernel does not reach the next hop: does the interface have a route to its own subnet?"
	}
	return "it is tried again"
}

// logChanges logs and counts the changes of routes and problems, in order. Removals that failed are left out.
func (t *Table) logChanges(before state, s steps) {
	for _, prefix := range ordered(before.inForce) {
		now, ok := t.state.inForce[prefix]
		switch was := before.inForce[prefix]; {
		case !ok:
			t.Log.Info("pod route no longer in force", "cidr", prefix, "node", was.node, "via", was.via)
		case now != was:
			t.Log.Info("pod route changed", "cidr", prefix, "node", now.node, "via", now.via, "interface", now.name, "before", was.via)
		case s.puts[prefix] == now:
			t.restored.Inc()
			t.Log.Warn("pod route restored: somebody had removed it, or its interface was down", "cidr", prefix, "node", now.node, "via", now.via)
		}
	}
	for _, prefix := range ordered(t.state.inForce) {
		if _, ok := before.inForce[prefix]; !ok {
			now := t.state.inForce[prefix]
			t.Log.Info("pod route in force", "cidr", prefix, "node", now.node, "via", now.via, "interface", now.name)
		}
	}
	for _, r := range s.removes {
		if e := entryOf(r); before.inForce[e.prefix] == (target{}) {
			t.Log.Info("pod route of an earlier speaker removed", "cidr", e.prefix, "via", e.via)
		}
	}
	for _, prefix := range ordered(t.state.problems) {
		if p := t.state.problems[prefix]; before.problems[prefix] != p {
			t.Log.Warn("no pod route", "cidr", prefix, "node", t.state.want.Routes[prefix].Node, "reason", p.reason, "message", p.message)
		}
	}
}

// ordered returns the prefixes in order.
func ordered[T any](of map[netip.Prefix]T) []netip.Prefix {
	return slices.SortedFunc(maps.Keys(of), netip.Prefix.Compare)
}

// Clear removes all routes with Protocol from the namespace, and returns how many there were. Nil: this
// process's own namespace.
func Clear(namespace *netns.NsHandle) (int, error) {
	k := kernel{netns.None()}
	if namespace != nil {
		k.namespace = *namespace
	}
	table, err := k.list(nil)
	if err != nil {
		return 0, err
	}
	s := decide(nil, nil, table)
	if _, _, err := k.apply(s); err != nil {
		return 0, fmt.Errorf("%w: %s", err, hint(err))
	}
	return len(s.removes), nil
}
