package bfd

import (
	"errors"
	"fmt"
	"maps"
	"math"
	"net/netip"
	"slices"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sys/unix"
)

// Session is a session that there should be.
type Session struct {
	// Local is the node's address. Invalid: the kernel chooses it by the route,
	// and packets to any address of the node count.
	Local netip.Addr
	// Remote is the peer's address. It has a zone if it is link-local IPv6.
	Remote netip.Addr
	// Interface is the interface that the peer is behind. Packets are sent through it, and
	// only those that arrive on it count. Empty: the zone of Remote, or any.
	Interface string
	// Multihop sessions are those of RFC 5883. Others are single hop: the peer
	// is on a link of the node.
	Multihop bool
	// MinTTL is the least TTL or hop limit that packets of a multihop session may arrive with;
	// most peers send 255, BIRD 64. Nothing else protects a session that is not Up from
	// forgeries (RFC 5883, section 7). 0: any.
	MinTTL int
	Timers
}

// Bounds of intervals: the shortest that the loop can keep, and the longest that a packet can
// carry.
const (
	minInterval = time.Millisecond
	maxInterval = longestInterval
)

// normal returns the session with the fields set that follow from others.
func (s Session) normal() Session {
	s.Local, s.Remote = s.Local.Unmap(), s.Remote.Unmap()
	if s.Local.IsUnspecified() {
		s.Local = netip.Addr{}
	}
	if s.Interface == "" {
		s.Interface = s.Remote.Zone()
	}
	return s
}

// validate returns what is wrong with the session.
func (s Session) validate() error {
	var errs []error
	wrong := func(format string, args ...any) { errs = append(errs, fmt.Errorf(format, args...)) }
	switch {
	case !s.Remote.IsValid() || s.Remote.IsUnspecified() || s.Remote.IsMulticast():
		wrong("remote address %q: want a unicast address", s.Remote)
	case s.Local.IsValid() && s.Local.Is4() != s.Remote.Is4():
		wrong("local address %s and remote address %s are of different families", s.Local, s.Remote)
	case s.Remote.Is6() && s.Remote.IsLinkLocalUnicast() && s.Interface == "":
		wrong("remote address %s is link-local: want an interface", s.Remote)
	}
	if s.MinTTL < 0 || s.MinTTL > maxHops || s.MinTTL != 0 && !s.Multihop {
		wrong("minimum TTL %d: want 0 to %d, and 0 for single hop", s.MinTTL, maxHops)
	}
	for _, interval := range []time.Duration{s.TransmitInterval, s.ReceiveInterval} {
		if interval < minInterval || interval > maxInterval || interval%time.Microsecond != 0 {
			wrong("interval %s: want %s to %s, in whole microseconds", interval, minInterval, maxInterval)
		}
	}
	if s.DetectMultiplier < 1 || s.DetectMultiplier > math.MaxUint8 {
		wrong("detect multiplier %d: want 1 to %d", s.DetectMultiplier, math.MaxUint8)
	}
	return errors.Join(errs...)
}

// overlaps reports whether a packet could belong to both sessions.
func (s Session) overlaps(o Session) bool {
	return s.transport() == o.transport() && s.Remote.WithZone("") == o.Remote.WithZone("") &&
		(s.Interface == o.Interface || s.Interface == "" || o.Interface == "") &&
		(s.Local == o.Local || !s.Local.IsValid() || !o.Local.IsValid())
}

// admit returns the valid sessions, and an error about the others. Of two that overlap, it
// admits the first by name.
func admit(want map[string]Session) (map[string]Session, error) {
	var errs []error
	possible := make(map[string]Session, len(want))
	for _, name := range slices.Sorted(maps.Keys(want)) {
		s := want[name].normal()
		err := s.validate()
		for other, o := range possible {
			if err == nil && s.overlaps(o) {
				err = fmt.Errorf("packets cannot be distinguished from those of peer %q", other)
			}
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("BFD session of peer %q: %w", name, err))
			continue
		}
		possible[name] = s
	}
	return possible, errors.Join(errs...)
}

// SamePath reports whether the two differ only in fields that can change while a session is
// Up.
func (s Session) SamePath(o Session) bool {
	s, o = s.normal(), o.normal()
	s.Timers, s.MinTTL = o.Timers, o.MinTTL
	return s == o
}

// minHops is the least TTL that packets may arrive with.
func (s Session) minHops() int {
	if s.Multihop {
		return s.MinTTL
	}
	return maxHops
}

func (s Session) transport() transport { return transport{s.Remote.Is6(), s.Multihop} }

// session is a session that there is. Run owns all but the atomics.
type session struct {
	name    string
	want    Session
	machine *Machine
	link    link
	port    uint16    // that packets were sent from last
	since   time.Time // of the state
	ended   time.Time // when it was Up last
	changes uint64    // transitions to Up and from it
	failure error     // to send the last packet
	refused bool      // nobody receives at the peer, as its kernel answers

	counters  counters
	published atomic.Pointer[Status]
}

// counters change with every packet, which is not worth a new Status.
type counters struct {
	received, sent, lost, sendErrors atomic.Uint64
	lastReceived                     atomic.Int64 // Unix nanoseconds
	transitions                      [len(causes)]atomic.Uint64
	gaps                             prometheus.Histogram
}

// accepts reports whether a datagram came by the session's path (RFC 5881,
// section 3; RFC 5883, section 4).
func (s *session) accepts(d datagram) bool {
	w := s.want
	return d.transport == w.transport() && d.from == w.Remote.WithZone("") &&
		(w.Interface == "" || d.ifindex == s.link.ifindex) &&
		(!w.Local.IsValid() || d.to == w.Local.WithZone(""))
}

// receive takes a packet.
func (s *session) receive(p Packet, now time.Time) {
	s.counters.received.Add(1)
	s.counters.lastReceived.Store(now.UnixNano())
	s.refused = false
	if gap, interval := s.machine.gap(now); interval > 0 {
		s.counters.gaps.Observe(float64(gap) / float64(interval))
	}
	s.step(now, func() { s.machine.Receive(p, now) })
	s.counters.lost.Store(s.machine.lost)
}

// transmit sends what is due.
func (s *session) transmit(now time.Time) {
	var p Packet
	var due bool
	s.step(now, func() { p, due = s.machine.Advance(now) })
	if !due {
		return
	}
	if s.failure = s.write(p.marshal()); s.failure != nil {
		s.counters.sendErrors.Add(1)
	} else {
		s.counters.sent.Add(1)
	}
}

// step counts the transition to Up or from it, if one follows.
func (s *session) step(now time.Time, do func()) {
	before := s.machine.state
	do()
	after := s.machine.state
	if before == after {
		return
	}
	s.since = now
	if before == Up {
		s.ended = now
	}
	if before == Up || after == Up {
		s.changes++
		if i := slices.Index(causes[:], s.machine.cause); i >= 0 {
			s.counters.transitions[i].Add(1)
		}
	}
}

// write sends a packet. If there is no link, it first tries to open one, so that attempts are
// as far apart as packets. There is no link while the interface or the route is missing, and
// after they have changed.
func (s *session) write(b []byte) (err error) {
	if s.link.fd < 0 {
		if s.link, err = dial(s.want, s.port); err != nil {
			return err
		}
		s.port = s.link.local.Port()
	}
	err = s.link.send(b)
	if errors.Is(err, unix.ECONNREFUSED) { // which is about an earlier packet
		s.refused = true
		err = s.link.send(b)
	}
	if err != nil && !errors.Is(err, unix.ECONNREFUSED) {
		s.link.close()
		return fmt.Errorf("send to %s: %w", s.want.Remote, err)
	}
	return nil
}
