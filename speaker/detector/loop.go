package detector

import (
	"context"
	"errors"
	"fmt"
	"time"

	"golang.org/x/sys/unix"

	"github.com/lodestone-lb/lodestone/speaker/detector/watch"
)

const (
	// mostRounds bounds how many batches are read from a socket at a time. Honest speakers send less. After a flood the loop
	// pauses, because that must not keep a processor busy, and takes nobody for silent: the packets of others are lost in it.
	mostRounds = 8
	floodPause = 5 * time.Millisecond
	// publishInterval is the time between two Statuses.
	publishInterval = time.Second
)

// loop runs the machine. It reads what has arrived before the machine takes anybody for silent by the time.
func (t *Task) loop(ctx context.Context, wait func(time.Time) error) error {
	var published time.Time
	for ctx.Err() == nil {
		flooded := t.receive(&t.sockets.urgent)
		now := time.Now()
		if w := t.want.Swap(nil); w != nil {
			t.sealer = watch.NewSealer(w.Keys)
			t.act(t.machine.Step(watch.Members{List: w.Members, Timing: w.Timing}, now))
		}
		if !now.Before(t.machine.Deadline()) {
			flooded = t.receive(&t.sockets.beats) || flooded
			t.act(t.machine.Step(watch.Due{Flooded: flooded}, time.Now()))
			if !now.Before(published.Add(publishInterval)) {
				published = now
				t.publish(now)
			}
		}
		if flooded {
			time.Sleep(floodPause)
		}
		if err := wait(t.machine.Deadline()); err != nil {
			return err
		}
	}
	return nil
}

// poll waits in the kernel until that time, or until there is an urgent packet. That is for a thread with real-time
// priority, which must not wait for others of the process. Go's runtime looks after a thread in a system call for a
// while each time, which costs as much as all the rest.
func (t *Task) poll(deadline time.Time) error {
	fds := [...]unix.PollFd{{Fd: int32(t.sockets.urgent.fd), Events: unix.POLLIN}}
	timeout := unix.NsecToTimespec(max(0, time.Until(deadline).Nanoseconds()))
	if _, err := unix.Ppoll(fds[:], &timeout, nil); err != nil && !errors.Is(err, unix.EINTR) {
		return fmt.Errorf("wait for heartbeats: %w", err)
	}
	return nil
}

// receive takes all packets that have arrived at a socket, and reports whether they may not have been all.
func (t *Task) receive(s *socket) (flooded bool) {
	flooded = s.crowded()
	for range mostRounds {
		n := s.read()
		now := time.Now()
		for i := range n {
			t.take(s, i, now)
		}
		if n < batch {
			return flooded
		}
	}
	return true
}

// take hands a packet to the machine.
func (t *Task) take(s *socket, i int, now time.Time) {
	var ok bool
	if t.received.Packet, ok = t.sealer.Open(s.payload(i), t.options.Self.Session); !ok {
		t.options.Refused()
		return
	}
	t.received.From, t.received.At = s.source(i), s.arrival(i, now)
	t.act(t.machine.Step(&t.received, now))
}

// act does what the machine wants.
func (t *Task) act(out *watch.Effects) {
	for i := range out.Packets {
		p := &out.Packets[i]
		t.sockets.send(p.To, t.sealer.Seal(t.sealed[:0], p.Packet, p.Session))
	}
	for _, v := range out.Lost {
		select {
		case t.verdicts <- v:
		default: // nobody reads them: memberlist finds out
		}
	}
	if out.Replayed {
		t.options.Refused()
	}
}
