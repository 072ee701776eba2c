package bfd

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"slices"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// listenRetry is the interval of attempts to open receive sockets.
	listenRetry = time.Second
	// maxBatch bounds the packets read from a socket before deadlines are checked. A receive
	// buffer of the default size holds fewer, so that more are a flood. The loop then pauses,
	// because a flood must not keep a processor busy at real-time priority.
	maxBatch   = 512
	floodPause = 5 * time.Millisecond
	// idle is how long the loop waits when there is nothing to wait for.
	idle = time.Hour
)

// listener is the receive sockets of a transport.
type listener struct {
	fds   []int // none while they cannot be opened
	err   error
	retry time.Time
}

// loop runs the sessions. It reads the clock before the sockets, so that no packet that came
// in time is left to be read when a deadline is over. The times that begin with a packet count
// from when it was read, because this process may have been stopped since the clock was read.
func (t *Task) loop(ctx context.Context) error {
	fd, err := unix.Eventfd(0, unix.EFD_NONBLOCK|unix.EFD_CLOEXEC)
	if err != nil {
		return fmt.Errorf("open an eventfd: %w", err)
	}
	waker := os.NewFile(uintptr(fd), "eventfd")
	defer waker.Close() //nolint:errcheck // nothing is lost with it
	t.waker.Store(waker)
	defer context.AfterFunc(ctx, t.wake)()
	defer t.closeAll()
	close(t.ready)
	for {
		now := time.Now()
		flooded := t.receive()
		t.takeSets(now)
		ending := ctx.Err() != nil // asked once: a loop that returns has sent its last packets
		if ending {
			_ = t.apply(nil, now) // nothing to refuse
		}
		t.openMissing(now)
		t.transmit(now)
		t.publish()
		if ending && len(t.leaving) == 0 {
			return nil
		}
		if flooded {
			_ = unix.Nanosleep(new(unix.NsecToTimespec(floodPause.Nanoseconds())), nil)
		}
		t.wait(fd)
	}
}

// wait waits for a packet, a call of wake or the next deadline.
func (t *Task) wait(waker int) {
	fds := []unix.PollFd{{Fd: int32(waker), Events: unix.POLLIN}}
	deadline := time.Now().Add(idle)
	sooner := func(t time.Time) {
		if t.Before(deadline) {
			deadline = t
		}
	}
	for _, l := range t.listeners {
		for _, fd := range l.fds {
			fds = append(fds, unix.PollFd{Fd: int32(fd), Events: unix.POLLIN})
		}
		if len(l.fds) == 0 {
			sooner(l.retry)
		}
	}
	for _, s := range t.sessions {
		sooner(s.machine.Deadline())
	}
	for _, s := range t.leaving {
		sooner(s.machine.Deadline())
	}
	timeout := unix.NsecToTimespec(max(0, time.Until(deadline).Nanoseconds()))
	// The error is an interruption by a signal, or it occurs again in the next round.
	if n, err := unix.Ppoll(fds, &timeout, nil); err == nil && n > 0 && fds[0].Revents != 0 {
		_, _ = unix.Read(waker, make([]byte, 8))
	}
}

// receive takes all packets that have arrived, and reports whether they may
// not have been all.
func (t *Task) receive() (flooded bool) {
	for transport, l := range t.listeners {
		for i := range receiveSockets {
			read := 0
			for i < len(l.fds) && read < maxBatch && t.receiveOne(transport, l, l.fds[i]) {
				read++
			}
			flooded = flooded || read == maxBatch
		}
	}
	return flooded
}

// receiveOne takes a packet, if there is one.
func (t *Task) receiveOne(of transport, l *listener, fd int) bool {
	d, err := read(fd, of, &t.buffers)
	now := time.Now()
	switch {
	case err == nil:
		t.hear(d, now)
	case errors.Is(err, unix.EAGAIN):
		return false
	case !errors.Is(err, unix.EINTR):
		l.fail(fmt.Errorf("receive on %s: %w", of, err), now)
	}
	return true
}

// hear gives a datagram to its session.
func (t *Task) hear(d datagram, now time.Time) {
	s, p, why := t.classify(d)
	if why != used {
		t.discarded[slices.Index(discards, why)].Add(1)
		return
	}
	s.receive(p, now)
}

// classify finds the session of a datagram (RFC 5880, section 6.8.6; RFC 5881, sections 3 and
// 5; RFC 5883, sections 4 and 5).
func (t *Task) classify(d datagram) (*session, Packet, Discard) {
	if !d.multihop && d.hops != maxHops {
		return nil, Packet{}, BadHops
	}
	p, why := parse(d.payload)
	if why != used {
		return nil, p, why
	}
	s, why := t.find(d, p)
	switch {
	case why != used:
		return nil, p, why
	case d.hops < s.want.minHops():
		return nil, p, BadHops
	case p.authentic:
		return nil, p, Authenticated
	}
	return s, p, used
}

// find finds the session by the discriminator that the peer was sent, else by the path. A
// session that is Up is found by its discriminator alone, because a forger of the peer's
// address does not know it. A peer that has lost the discriminator in a restart sends no
// packet that has it, so that the session ends after its Detection Time.
func (t *Task) find(d datagram, p Packet) (*session, Discard) {
	if p.your == 0 {
		for _, s := range t.sessions {
			switch {
			case !s.accepts(d):
			case !s.machine.Accepts(p):
				return nil, Unproven
			default:
				return s, used
			}
		}
		return nil, UnknownPeer
	}
	for _, all := range [...][]*session{t.sessions, t.leaving} {
		for _, s := range all {
			switch {
			case !s.machine.Accepts(p):
			case !s.accepts(d):
				return nil, WrongPath
			default:
				return s, used
			}
		}
	}
	return nil, UnknownDiscriminator
}

// transmit sends what is due.
func (t *Task) transmit(now time.Time) {
	for _, s := range t.sessions {
		s.transmit(now)
	}
	t.leaving = slices.DeleteFunc(t.leaving, func(s *session) bool {
		s.transmit(now)
		if s.machine.Left() {
			s.link.close()
		}
		return s.machine.Left()
	})
}

// takeSets applies what Set got.
func (t *Task) takeSets(now time.Time) {
	for {
		select {
		case s := <-t.sets:
			err := t.apply(s.want, now)
			t.publish()
			s.err <- err
		default:
			return
		}
	}
}

// apply replaces the sessions by the wanted ones. Its error is what is wrong with those that
// cannot be.
func (t *Task) apply(want map[string]Session, now time.Time) error {
	if maps.Equal(want, t.want) {
		return t.refused
	}
	var possible map[string]Session
	possible, t.refused = admit(want)
	t.want = want
	old := t.sessions
	t.sessions = nil // others may read the old slice
	for _, s := range old {
		if w, ok := possible[s.name]; ok && w.SamePath(s.want) {
			s.want = w
			s.machine.Set(w.Timers)
			t.sessions = append(t.sessions, s)
			delete(possible, s.name)
		} else {
			t.leave(s, now)
		}
	}
	for name, w := range possible {
		t.sessions = append(t.sessions, t.begin(name, w, now))
	}
	t.openNeeded()
	return t.refused
}

// begin starts a session. A session that is leaving the same path sends no further packets: it
// has sent that to its peer once.
func (t *Task) begin(name string, w Session, now time.Time) *session {
	t.leaving = slices.DeleteFunc(t.leaving, func(s *session) bool {
		over := s.want.overlaps(w)
		if over {
			s.link.close()
		}
		return over
	})
	return &session{
		name: name, want: w, since: now, link: link{fd: -1},
		machine: NewMachine(w.Timers, t.newDiscriminator(), rand.Float64, now), counters: counters{gaps: newGaps(name)},
	}
}

// leave ends a session.
func (t *Task) leave(s *session, now time.Time) {
	s.machine.Leave(now)
	s.transmit(now)
	t.leaving = append(t.leaving, s) // for transmit to close
}

// newDiscriminator returns one that is random (RFC 5880, section 10) and free.
func (t *Task) newDiscriminator() uint32 {
	for {
		d := rand.Uint32()
		has := func(s *session) bool { return s.machine.local == d }
		if d != 0 && !slices.ContainsFunc(t.sessions, has) && !slices.ContainsFunc(t.leaving, has) {
			return d
		}
	}
}

// openNeeded closes the receive sockets that no session needs, and adds those that sessions
// need for openMissing to open. The others go by the sessions that there are now.
func (t *Task) openNeeded() {
	unused := maps.Clone(t.listeners)
	for _, s := range t.sessions {
		key := s.want.transport()
		if t.listeners[key] == nil {
			t.listeners[key] = &listener{}
		}
		delete(unused, key)
	}
	for key, l := range unused {
		l.close()
		delete(t.listeners, key)
	}
	for key, l := range t.listeners {
		t.separate(key, l)
	}
}

// separate has the kernel keep packets of the transport's peers apart from others.
func (t *Task) separate(of transport, l *listener) {
	if len(l.fds) > 0 {
		another := func(s *session) bool { return s.want.transport() != of }
		l.err = separate(of, l.fds[0], slices.DeleteFunc(slices.Clone(t.sessions), another))
	}
}

// openMissing opens the receive sockets that are missing.
func (t *Task) openMissing(now time.Time) {
	for key, l := range t.listeners {
		if len(l.fds) > 0 || now.Before(l.retry) {
			continue
		}
		if fds, err := listen(key); err != nil {
			l.fail(err, now)
		} else {
			l.fds = fds
			t.separate(key, l)
		}
	}
}

// fail closes the sockets until it is tried again.
func (l *listener) fail(err error, now time.Time) {
	l.close()
	l.err, l.retry = err, now.Add(listenRetry)
}

func (l *listener) close() {
	closeSockets(l.fds)
	l.fds = nil
}

// publish lets others see what has changed.
func (t *Task) publish() {
	before := *t.published.Load()
	changed := !slices.Equal(t.sessions, before)
	for _, s := range t.sessions {
		var listenError error
		if l := t.listeners[s.want.transport()]; l != nil {
			listenError = l.err
		}
		if now, old := s.status(listenError), s.published.Load(); old == nil || *old != now {
			s.published.Store(&now)
			changed = true
		}
	}
	if changed {
		t.published.Store(new(t.sessions))
		close(*t.changed.Swap(new(make(chan struct{}))))
	}
}

// closeAll closes all sockets.
func (t *Task) closeAll() {
	for _, l := range t.listeners {
		l.close()
	}
	for _, s := range slices.Concat(t.sessions, t.leaving) {
		s.link.close()
	}
}
