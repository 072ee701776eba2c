// Package detector finds out within a tenth of a second that another speaker is lost. Package watch decides; this one
// has the sockets and the clock.
//
//	detector.go  Task: which members there are, and what it has found out
//	loop.go      what has arrived, what is due, and how to wait
//	socket.go    the sockets, on a UDP port that is shared with memberlist
//	poller.go    a clock and a socket that Go's runtime waits for as one
//	receive.go   reads many packets at once, with the times at which the kernel got them
//
// One goroutine does all, and a packet costs no other one and no allocation. It wakes once per interval, sends its
// heartbeats and reads those of all others, which have waited in a socket of their own. All other packets are rare
// and wake it at once. The kernel stamps packets when they arrive: a loop that is late takes nobody for silent by that.
package detector

import (
	"bytes"
	"context"
	"log/slog"
	"net/netip"
	"slices"
	"sync/atomic"
	"time"

	"github.com/lodestone-lb/lodestone/speaker/detector/watch"
	"github.com/lodestone-lb/lodestone/speaker/realtime"
)

// mostVerdicts is how many verdicts may wait to be read.
const mostVerdicts = 4096

// Options are what a Task needs.
type Options struct {
	// Self is this speaker. Its address is the one that memberlist listens on, with Share.
	Self watch.Member
	// Want is what counts at the start, see Set.
	Want Want
	Log  *slog.Logger
	// Refused is called for each packet that is dropped: without the key, damaged, or replayed. It must not wait.
	Refused func()
}

// Want is what the detector works with.
type Want struct {
	// Members are the speakers that count as alive. One that is lost stays lost until it was not among them once.
	Members []watch.Member
	Timing  watch.Timing
	// Keys open packets. The first one seals them.
	Keys [][]byte
}

// Equal reports whether the two are the same.
func (w Want) Equal(o Want) bool {
	return w.Timing == o.Timing && slices.Equal(w.Members, o.Members) && slices.EqualFunc(w.Keys, o.Keys, bytes.Equal)
}

// Status is that of the machine, a second ago at most.
type Status struct {
	watch.Status
	// RealTime is set if the loop has real-time priority.
	RealTime bool
}

// Task is the detector of this speaker.
type Task struct {
	options  Options
	machine  *watch.Machine
	sealer   *watch.Sealer
	sockets  *sockets
	verdicts chan watch.Verdict
	want     atomic.Pointer[Want]
	status   atomic.Pointer[Status]
	realTime bool
	received watch.Received
	sealed   [watch.MaxPacket]byte
}

// Listen opens the sockets of a Task. Run closes them.
func Listen(o Options) (*Task, error) {
	s, err := listen(o.Self.Addr)
	if err != nil {
		return nil, err
	}
	t := &Task{options: o, sockets: s, sealer: watch.NewSealer(o.Want.Keys), verdicts: make(chan watch.Verdict, mostVerdicts)}
	t.options.Self.Addr = netip.AddrPortFrom(o.Self.Addr.Addr().Unmap(), o.Self.Addr.Port())
	t.machine = watch.New(t.options.Self, o.Want.Timing, time.Now())
	t.want.Store(&o.Want)
	t.publish(time.Now())
	return t, nil
}

// Set replaces what the detector works with, from the next interval on. It never waits.
func (t *Task) Set(w Want) { t.want.Store(&w) }

// Verdicts are the members that are lost.
func (t *Task) Verdicts() <-chan watch.Verdict { return t.verdicts }

// Status returns how the detector fares.
func (t *Task) Status() Status { return *t.status.Load() }

func (t *Task) publish(now time.Time) { t.status.Store(&Status{t.machine.Status(now), t.realTime}) }

// Run finds out who is lost until ctx ends, which it notices at the end of the interval. Its goroutine has a thread of
// its own with real-time priority if the process has CAP_SYS_NICE.
func (t *Task) Run(ctx context.Context) error {
	defer t.sockets.close()
	restore, err := realtime.Lock()
	if err != nil {
		t.options.Log.Debug("the failure detector runs at normal priority", "err", err)
		return t.loop(ctx, t.sockets.alarm.wait)
	}
	defer restore()
	t.realTime = true
	return t.loop(ctx, t.poll)
}
