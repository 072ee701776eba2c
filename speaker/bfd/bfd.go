// Package bfd is Bidirectional Forwarding Detection in Asynchronous mode, over one hop (RFC
// 5880, RFC 5881) and over several (RFC 5883), for IPv4 and IPv6, without Demand mode, Echo
// and authentication of our own. It detects within some 100 ms that a peer cannot be reached
// any more.
//
// Three layers: packet is the codec, machine the state machine of one session,
// which knows neither clock nor socket, and Task runs machines.
//
// One goroutine, Run, owns all sessions and all sockets. It waits in ppoll(2) for a packet or
// the next deadline. Before it checks deadlines it reads every packet that has arrived: if
// this process did not run for a while, packets wait in the sockets, and the peer has not
// failed. Run takes no lock that others hold, and waits for nobody. Others read its state as
// immutable values behind atomic pointers, or as counters.
//
// The files, from the outside in:
//
//	bfd.go      Task: which sessions there are to be
//	loop.go     the goroutine: packets, deadlines, changes
//	session.go  one session: what it accepts, and its counters
//	machine.go  its state machine (RFC 5880 section 6.8)
//	packet.go   the codec
//	socket.go   sockets, and their TTL and ports (RFC 5881, RFC 5883)
//	status.go   what people see of it, log.go and metrics.go
package bfd

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"sync"
	"sync/atomic"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/lodestone-lb/lodestone/pkg/loglimit"
	"github.com/lodestone-lb/lodestone/speaker/realtime"
)

// ErrStopped is returned by Set when Run has ended.
var ErrStopped = errors.New("BFD has stopped")

// Options are what a Task needs.
type Options struct {
	Log      *slog.Logger
	Registry prometheus.Registerer
}

// Task runs sessions: a task with one verb, Set.
type Task struct {
	log     *slog.Logger
	sets    chan setting
	waker   atomic.Pointer[os.File] // an eventfd(2), since Run began
	ready   chan struct{}
	stopped chan struct{}

	// Owned by Run.
	want      map[string]Session // as Set got it
	refused   error              // what is wrong with some of want
	sessions  []*session         // those of the rest
	leaving   []*session         // those removed that still send AdminDown
	listeners map[transport]*listener
	buffers   buffers

	// Read by everybody.
	published atomic.Pointer[[]*session]
	changed   atomic.Pointer[chan struct{}]
	discarded []atomic.Uint64 // by the index of discards
}

// setting is a call of Set.
type setting struct {
	want map[string]Session
	err  chan error
}

// New returns a Task that does nothing until it runs.
func New(o Options) *Task {
	t := &Task{
		log: loglimit.Logger(o.Log), sets: make(chan setting, 1), ready: make(chan struct{}), stopped: make(chan struct{}),
		listeners: map[transport]*listener{}, discarded: make([]atomic.Uint64, len(discards)),
	}
	t.published.Store(&[]*session{})
	t.changed.Store(new(make(chan struct{})))
	o.Registry.MustRegister(collector{t})
	return t
}

// String names the task.
func (t *Task) String() string { return "bfd" }

// Ready is closed once calls of Set take effect at once.
func (t *Task) Ready() <-chan struct{} { return t.ready }

// Set replaces the sessions, by peer name. The same set again is silent and cheap. A session
// whose timers or MinTTL change goes on; one whose path changes ends, and another begins. A
// session that is not in the set any more ends, and its peer is sent that it was switched off,
// which the peer does not count as a failure.
//
// The error names sessions that cannot exist: their values are bad, or their packets cannot be
// distinguished from those of another session. Set leaves these out and takes the others. A
// session that the node cannot have at present (no route, no such interface, the port taken by
// another process) is no error: Status has it, and it is tried again. Set waits for Run, and
// returns ErrStopped when Run has ended.
func (t *Task) Set(ctx context.Context, want map[string]Session) error {
	s := setting{maps.Clone(want), make(chan error, 1)}
	select {
	case t.sets <- s:
	case <-t.stopped:
		return ErrStopped
	case <-ctx.Done():
		return fmt.Errorf("set BFD sessions: %w", ctx.Err())
	}
	t.wake()
	select {
	case err := <-s.err:
		return err
	case <-t.stopped:
		return ErrStopped
	case <-ctx.Done():
		return fmt.Errorf("set BFD sessions: %w", ctx.Err())
	}
}

// States returns the sessions that there are, by peer name. It never waits.
func (t *Task) States() map[string]Status {
	states := map[string]Status{}
	for _, s := range *t.published.Load() {
		states[s.name] = s.snapshot()
	}
	return states
}

// Changed returns a channel that is closed as soon as States has another answer. Counters do
// not matter. Take the channel first, then ask: no change is missed, though a session may have
// changed twice (see Status.Transitions).
func (t *Task) Changed() <-chan struct{} { return *t.changed.Load() }

// wake ends the wait of Run.
func (t *Task) wake() {
	if f := t.waker.Load(); f != nil {
		_, _ = f.Write([]byte{7: 1}) // fails when Run has ended
	}
}

// Run runs sessions until ctx ends, then sends all peers that they were
// switched off, which takes up to 0.2 s. It fails only if there are no file
// descriptors. All sockets are opened by its goroutine, which has a thread of
// its own with real-time priority if the process has CAP_SYS_NICE.
func (t *Task) Run(ctx context.Context) error {
	defer close(t.stopped)
	var logging sync.WaitGroup
	defer logging.Wait()
	over := make(chan struct{})
	defer close(over)
	logging.Go(func() { t.logChanges(over) })
	if restore, err := realtime.Lock(); err != nil {
		t.log.Debug("BFD runs at normal priority", "err", err)
	} else {
		defer restore()
	}
	return t.loop(ctx)
}
