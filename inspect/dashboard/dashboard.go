// Package dashboard is the web page that shows an installation of Lodestone: pools, VIPs and the nodes that
// announce them, BGP sessions, and what happened lately. It has the same data as lodestone status, by the same
// code, and changes nothing.
//
// It costs nothing while nobody looks at the page: it follows the cluster from the first visitor to some minutes
// after the last, and works for at most a fifth of that time. Its memory is bounded: one State, the last
// transitions, and one View for each of at most MaxVisitors.
//
// The files, from the outside in:
//
//	dashboard.go  Dashboard, the task that follows the cluster while the page is open
//	serve.go      the page, and its stream of views, over HTTP
//	data.go       State: everything that can be shown at one moment, from the objects of the cluster
//	view.go       View: the part that one visitor asks for
//	timeline.go   what has changed between two States, in words
package dashboard

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"time"

	"github.com/lodestone-lb/lodestone/inspect/cluster"
	"github.com/lodestone-lb/lodestone/pkg/kube"
	"github.com/lodestone-lb/lodestone/pkg/notify"
)

// MaxVisitors is how many pages may be open at a time.
const MaxVisitors = 24

const (
	// linger is how long the cluster is followed after the last visitor, so that a
	// reloaded page does not wait.
	linger = 5 * time.Minute
	// pace is the shortest time between two looks. A look is followed by a pause of pauseFactor times its
	// duration.
	pace        = 500 * time.Millisecond
	pauseFactor = 4
	// refresh is how old a look may become without any change. A leader that ceases to renew its Lease is no change.
	refresh = 20 * time.Second
	// maxAnnouncements is how many announcements by BGP a look may consider: VIPs
	// times nodes. They are what a look's memory grows with.
	maxAnnouncements = 1_000_000
)

// errTooLarge is why a State has no VIPs.
var errTooLarge = errors.New("who announces the VIPs: too many VIPs and nodes for the dashboard, which must leave the controller " +
	"room: see lodestone status")

// Source is what the dashboard looks at; cluster.Watcher is one.
type Source interface {
	// Run follows the cluster until ctx ends.
	Run(ctx context.Context) error
	// Objects returns what there is; not ready: that is not known yet.
	Objects(ctx context.Context) (o *cluster.Objects, ready bool)
	// Changed is closed when Objects gives another answer.
	Changed() <-chan struct{}
}

// Options are what a Dashboard needs.
type Options struct {
	// Source returns a new Source, which is run once.
	Source func() Source
	// Version is that of Lodestone, for people.
	Version string
	Log     *slog.Logger
}

// Dashboard is the task that looks at the cluster while somebody looks at it.
type Dashboard struct {
	Options
	stopped  chan struct{}
	changed  notify.Signal // the state
	visited  notify.Signal // visitors
	mu       sync.Mutex
	visitors int
	state    *State
	past     []Transition
	looked   time.Time // the time of the last state
}

// New returns a Dashboard that starts with Run.
func New(o Options) *Dashboard { return &Dashboard{Options: o, stopped: make(chan struct{})} }

// Run looks at the cluster while somebody looks at the page, until ctx ends.
func (d *Dashboard) Run(ctx context.Context) error {
	defer close(d.stopped)
	for {
		visited := d.visited.Next()
		if d.count() > 0 {
			if err := d.watch(ctx); err != nil {
				d.Log.Error("dashboard", "err", err)
			}
		}
		select {
		case <-ctx.Done():
			return nil
		case <-visited:
		}
	}
}

// watch follows the cluster until nobody has looked for a while.
func (d *Dashboard) watch(ctx context.Context) error {
	source := d.Source()
	ctx, cancel := context.WithCancel(ctx)
	var err error
	var running sync.WaitGroup
	running.Go(func() { err = source.Run(ctx) })
	d.look(ctx, source)
	cancel()
	running.Wait()
	d.mu.Lock()
	defer d.mu.Unlock()
	d.state = nil
	return err
}

// look looks whenever something has changed, no more often than the pace allows,
// until ctx ends or nobody has looked at the page for a while.
func (d *Dashboard) look(ctx context.Context, source Source) {
	idle := time.NewTimer(linger)
	defer idle.Stop()
	for {
		changed, start := source.Changed(), time.Now()
		if o, ready := source.Objects(ctx); ready {
			d.show(newState(o))
		}
		paused := time.After(max(pace, pauseFactor*time.Since(start)))
		if !d.wait(ctx, changed, idle) {
			return
		}
		select {
		case <-ctx.Done():
			return
		case <-paused:
		}
	}
}

// wait returns true when something has changed, or what is shown is old. It returns false when ctx ends, or
// nobody has looked at the page for a while.
func (d *Dashboard) wait(ctx context.Context, changed <-chan struct{}, idle *time.Timer) bool {
	late := time.After(refresh)
	for {
		visited := d.visited.Next()
		if d.count() > 0 {
			idle.Reset(linger)
		}
		select {
		case <-ctx.Done():
			return false
		case <-idle.C:
			return false
		case <-visited:
		case <-changed:
			return true
		case <-late:
			return true
		}
	}
}

// newState is NewState for clusters of any size.
func newState(o *cluster.Objects) *State {
	vips := 0
	for _, svc := range o.Services {
		vips += len(kube.VIPs(svc))
	}
	if o.Config != nil && len(o.Config.Peers) > 0 && vips*len(o.Nodes) > maxAnnouncements {
		o.Omit(cluster.Slices, errTooLarge)
	}
	return NewState(o)
}

// show makes a state the present one.
func (d *Dashboard) show(s *State) {
	d.mu.Lock()
	defer d.mu.Unlock()
	switch {
	case d.state != nil:
		d.past = append(d.past, transitions(d.state, s)...)
	default: // nobody has looked since: of what has happened, objects have some
		for _, t := range s.records {
			if !t.Time.Before(d.looked) {
				d.past = append(d.past, t)
			}
		}
	}
	d.looked = s.Time.Truncate(time.Second)
	if more := len(d.past) - maxTransitions; more > 0 {
		d.past = append([]Transition{}, d.past[more:]...)
	}
	s.records = nil
	d.state = s
	d.changed.Notify()
}

// current returns the present state and what happened, nil if there is none yet.
// Neither changes.
func (d *Dashboard) current() (*State, []Transition) {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.state, d.past[:len(d.past):len(d.past)]
}

// enter lets a visitor in, unless there are too many.
func (d *Dashboard) enter() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.visitors == MaxVisitors {
		return false
	}
	d.visitors++
	d.visited.Notify()
	return true
}

func (d *Dashboard) leave() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.visitors--
	d.visited.Notify()
}

func (d *Dashboard) count() int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.visitors
}
