package bgp

import (
	"context"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"github.com/lodestone-lb/lodestone/pkg/config"
	"github.com/lodestone-lb/lodestone/speaker/plan"
)

const (
	// reconnect is the pause after a session of at least steady. After shorter sessions it
	// doubles, up to the longest one: RFC 4271 section 8.1 (DampPeerOscillations,
	// IdleHoldTime) leaves the figures open. A router that flaps is thus tried less and less
	// often. Failed attempts do not lengthen the pause, so that a router that reboots is found
	// as soon as it answers.
	reconnect, steady = time.Second, 10 * time.Second
	longestPause      = time.Minute
	maxDoublings      = 6
	// forgiven is how long after the last short session the pause is back at its first value,
	// because the router may have been repaired or rebooted.
	forgiven = 5 * time.Minute
)

// target is what a session shall be.
type target struct {
	plan.Session
	password string
	// down is why there must be no session with the peer, unfit why there can be none, and
	// unheard why the peer cannot connect. Each is empty if there is no such reason.
	down, unfit, unheard string
}

// wire has the properties that cannot change in a session that is up.
type wire struct {
	address, source, routerID netip.Addr
	iface                     string
	port                      uint16
	localASN                  uint32
	peerASN                   config.ASN
	passive                   bool
	multihop, security        int
	holdTime, restart         time.Duration
}

func (t *target) wire() wire {
	p := t.Peer
	return wire{p.Address, t.Source, t.RouterID, p.Interface, p.Port, t.LocalASN, p.PeerASN, p.Passive, p.Multihop, p.TTLSecurity, p.HoldTime,
		p.GracefulRestart}
}

// differs returns why a session must end to reach the next target; nil: it need not.
func (t *target) differs(next *target) *failure {
	switch held := next.held(); {
	case held != nil && held.cause != causeConnection: // that its router cannot connect ends no session that is up
		return held
	case t.password != next.password:
		return ending(causePassword, false)
	case t.wire() != next.wire():
		f := ending(causeConfigured, false)
		// A router that is no peer any more must not keep the routes.
		f.final = t.Peer.Address != next.Peer.Address || t.Peer.Interface != next.Peer.Interface
		return f
	}
	return nil
}

// session is a task that keeps a session with a peer.
type session struct {
	name      string
	announcer *Announcer
	log       *slog.Logger
	rib       *rib
	newest    *target // owned by the Announcer's Run

	ctx      context.Context
	cancel   context.CancelCauseFunc
	targets  chan target
	accepted chan *net.TCPConn
	steps    chan Peer

	latest      atomic.Pointer[target] // for what may change in a session that is up
	state       atomic.Pointer[Peer]
	received    atomic.Uint64 // prefixes, dropped
	updatesSent atomic.Uint64
	transitions transitions

	// Owned by run.
	was     bool      // established before
	short   int       // sessions in a row that did not last
	shortAt time.Time // when the last of them ended

	collision  *collision // nil: none
	collisions sync.WaitGroup
	next       *incoming // takes the place of the session that ended
}

func newSession(a *Announcer, name string, t target) *session {
	s := &session{
		name: name, announcer: a, newest: &t,
		log:      a.log.With("peer", name),
		rib:      newRIB(name),
		targets:  make(chan target, 1),
		accepted: make(chan *net.TCPConn, 1),
		steps:    make(chan Peer),
	}
	s.ctx, s.cancel = context.WithCancelCause(a.ctx)
	s.state.Store(&Peer{Name: name, State: Idle, Since: time.Now()})
	s.setTarget(t)
	return s
}

// setTarget replaces the target. Only the Announcer's Run calls it.
func (s *session) setTarget(t target) {
	s.newest = &t
	select {
	case <-s.targets: // one that the session has not seen yet
	default:
	}
	s.targets <- t
}

// accept takes a connection that the router opened. It replaces one that waits: only the last
// is one that the router still knows of.
func (s *session) accept(conn *net.TCPConn) {
	for {
		select {
		case s.accepted <- conn:
			return
		case before := <-s.accepted:
			before.Close()
		case <-s.ctx.Done():
			conn.Close()
			return
		}
	}
}

// run keeps the session until its context ends.
func (s *session) run() {
	defer func() {
		s.forgetConnections()
		s.collisions.Wait()
		select {
		case conn := <-s.accepted:
			conn.Close()
		default:
		}
	}()
	t := <-s.targets
	first := t
	s.latest.Store(&first)
	var pause time.Duration
	for {
		conn, ok := s.wait(&t, pause)
		if !ok {
			return
		}
		pause = s.attempt(&t, conn)
	}
}

// wait waits until there may be an attempt: nothing stands against a session, and the pause is
// over or the router has connected. It returns false when the session is removed.
func (s *session) wait(t *target, pause time.Duration) (*incoming, bool) {
	due := time.After(pause)
	for s.ctx.Err() == nil {
		why := t.held()
		ready, accepted := due, s.accepted
		if why != nil {
			s.fail(why)
			ready, accepted = nil, nil
			s.forgetConnections()
		} else if s.next != nil {
			next := s.next
			s.next = nil
			return next, true
		} else if t.Peer.Passive {
			s.step(Peer{State: Active, Address: t.Peer.Address})
			ready = nil
		}
		select {
		case <-s.ctx.Done():
			return nil, false
		case next := <-s.targets:
			if t.held() != nil || t.differs(&next) != nil {
				due = time.After(0)
				s.forgetConnections()
			}
			*t = next
			s.latest.Store(&next)
		case conn := <-accepted:
			s.dismiss()
			return &incoming{conn: conn}, true
		case open := <-s.collided():
			s.conclude(open)
		case <-ready:
			return nil, true
		}
	}
	return nil, false
}

// attempt opens a session and keeps it while the target lasts. It returns how
// long to pause.
func (s *session) attempt(t *target, from *incoming) time.Duration {
	ctx, cancel := context.WithCancelCause(s.ctx)
	defer cancel(nil)
	ended := make(chan error, 1)
	fixed := *t
	ours, err := s.ourOpen(&fixed)
	if err != nil {
		if from != nil {
			from.conn.Close()
		}
		s.ended(err)
		return s.pause(t, 0)
	}
	go func() { ended <- s.runFSM(ctx, &fixed, from, ours) }()
	for {
		select {
		case <-ctx.Done(): // we end it
			s.ended(context.Cause(ctx))
			<-ended // within lastWord
			return 0
		case next := <-s.targets:
			why := t.differs(&next)
			*t = next
			s.latest.Store(&next)
			if why != nil {
				s.forgetConnections()
				cancel(why)
			}
		case again := <-s.accepted:
			s.collide(*t, again)
		case open := <-s.collided():
			if s.conclude(open) {
				cancel(ending(causeReplaced, false))
			}
		case step := <-s.steps:
			s.step(step)
		case err := <-ended:
			if ctx.Err() != nil {
				s.ended(context.Cause(ctx))
				return 0
			}
			return s.pause(t, s.ended(err))
		}
	}
}

// step publishes the state of the session.
func (s *session) step(to Peer) {
	before := s.state.Load()
	if before.State == to.State && before.Address == to.Address {
		return
	}
	to.Name, to.Since, to.LastError, to.LastErrorAt, to.Ended = s.name, before.Since, before.LastError, before.LastErrorAt, before.Ended
	if to.State == Established {
		to.Since, to.Ended = time.Now(), ""
	}
	s.state.Store(&to)
	if to.State == Established {
		s.was = true
		s.log.Info("BGP session established", "router", to.Address, "asn", to.PeerASN, "local", to.LocalAddress,
			"hold_time", to.HoldTime, "families", to.Families, "capabilities", to.Capabilities)
		s.transitions.count(causeEstablished)
		s.announcer.changes.Notify()
	}
}

// ended records why a session or an attempt ended, and returns how long the session lasted; 0:
// there was none.
func (s *session) ended(err error) (lasted time.Duration) {
	f := brokenConnection(err)
	if before := s.state.Load(); before.State == Established {
		lasted = max(time.Since(before.Since), 1)
		s.transitions.count(f.cause)
	}
	s.fail(f)
	return lasted
}

// pause returns how long to pause after an attempt that failed, or after a session that lasted
// so long and that this node did not end.
func (s *session) pause(t *target, lasted time.Duration) time.Duration {
	pause := t.Peer.ConnectRetry
	switch {
	case lasted >= steady:
		s.short = 0
		return min(reconnect, pause)
	case lasted > 0:
		if time.Since(s.shortAt) > forgiven {
			s.short = 0
		}
		s.short, s.shortAt = s.short+1, time.Now()
		pause = max(pause, min(pause<<min(s.short, maxDoublings), longestPause))
	}
	return pause*3/4 + rand.N(pause/4+1) // jitter as RFC 4271 section 10 wants it
}

// fail publishes that there is no session, and logs the failure if it is a new one.
func (s *session) fail(f *failure) {
	before := s.state.Load()
	now := Peer{Name: s.name, Address: before.Address, State: Idle, Since: before.Since, LastError: f.text, LastErrorAt: time.Now(),
		Ended: before.Ended}
	if before.State == Established {
		now.Since, now.Ended = time.Now(), f.text
	}
	s.state.Store(&now)
	level := slog.LevelWarn
	switch f.cause {
	case causeConfigured, causePassword, causeRemoved, causeStopped: // somebody wants it
		level = slog.LevelInfo
	}
	switch {
	case before.State == Established:
		s.log.Log(s.ctx, level, "BGP session ended", "router", before.Address, "cause", f.cause, "reason", f.text, "lasted",
			time.Since(before.Since).Round(time.Millisecond))
	case before.LastError != f.text && s.ctx.Err() == nil:
		s.log.Warn("no BGP session", "router", before.Address, "reason", f.text)
	default:
		return
	}
	s.announcer.changes.Notify()
}
