package bgp

import (
	"context"
	"log/slog"
	"math/rand/v2"
	"net"
	"sync"
	"sync/atomic"
	"time"
)

// session is a task that keeps a session with a peer.
type session struct {
	*Peering
	announcer *Announcer
	log       *slog.Logger

	accepted chan *net.TCPConn
	steps    chan Peer

	state       atomic.Pointer[Peer]
	received    atomic.Uint64 // prefixes, dropped
	updatesSent atomic.Uint64
	transitions transitions

	// Owned by run.
	collision  *collision // nil: none
	collisions sync.WaitGroup
	next       *incoming // takes the place of the session that ended
}

func newSession(a *Announcer, p *Peering) *session {
	s := &session{Peering: p, announcer: a, log: a.log.With("peer", p.name), accepted: make(chan *net.TCPConn, 1), steps: make(chan Peer)}
	s.state.Store(&Peer{Name: p.name, State: Idle, Since: time.Now()})
	return s
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

// refuseAccepted closes the connection that waits, if there is one.
func (s *session) refuseAccepted() {
	select {
	case conn := <-s.accepted:
		conn.Close()
	default:
	}
}

// take takes over what is wanted now; see Peering. The connection that waits is none of a session with another password, or
// whose connections have other properties.
func (s *session) take(next target) *failure {
	if s.target.password != next.password || s.target.wire() != next.wire() {
		s.refuseAccepted()
	}
	return s.Peering.take(next)
}

// run keeps the session until its context ends.
func (s *session) run() {
	defer func() {
		s.forgetConnections()
		s.collisions.Wait()
		s.refuseAccepted()
	}()
	s.Take() // what listeners have found out
	var pause time.Duration
	for {
		conn, ok := s.wait(pause)
		if !ok {
			return
		}
		pause = s.attempt(conn)
	}
}

// wait waits until an attempt may begin: nothing holds the session down, the pause is over, and a router that is to connect
// has done so. One that connects before waits, too. It returns false when the session is removed.
func (s *session) wait(pause time.Duration) (*incoming, bool) {
	due, over := time.After(pause), false
	for s.ctx.Err() == nil {
		why := s.target.held()
		var accepted chan *net.TCPConn
		switch {
		case why != nil:
			s.fail(why)
			s.forgetConnections()
		case s.next != nil:
			next := s.next
			s.next = nil
			return next, true
		case over && !s.target.Peer.Passive:
			return nil, true
		case over:
			s.step(Peer{State: Active, Address: s.target.Peer.Address})
			accepted = s.accepted
		}
		select {
		case <-s.ctx.Done():
			return nil, false
		case next := <-s.targets:
			if s.take(next) != nil || why != nil {
				over = true
				s.forgetConnections()
			}
		case conn := <-accepted:
			s.dismiss()
			return &incoming{conn: conn}, true
		case open := <-s.collided():
			s.conclude(open)
		case <-due:
			over = true
		}
	}
	return nil, false
}

// attempt opens a session and keeps it while the target lasts. It returns how
// long to pause.
func (s *session) attempt(from *incoming) time.Duration {
	ctx, cancel := context.WithCancelCause(s.ctx)
	defer cancel(nil)
	ended := make(chan error, 1)
	fixed := s.target
	ours, err := s.ourOpen(&fixed)
	if err != nil {
		if from != nil {
			from.conn.Close()
		}
		s.ended(err)
		return s.pause(0)
	}
	go func() { ended <- s.runFSM(ctx, &fixed, from, ours) }()
	var accepted chan *net.TCPConn
	lasts := time.After(steady) // no router has its sessions replaced more often
	for {
		select {
		case <-ctx.Done(): // we end it
			s.ended(context.Cause(ctx))
			<-ended // within lastWord
			return 0
		case next := <-s.targets:
			if why := s.take(next); why != nil {
				s.forgetConnections()
				cancel(why)
			}
		case <-lasts:
			accepted = s.accepted
		case again := <-accepted:
			s.collide(s.target, again)
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
			return s.pause(s.ended(err))
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

// pause returns how long to pause, with jitter as RFC 4271 section 10 wants it.
func (s *session) pause(lasted time.Duration) time.Duration {
	pause := s.longestPause(lasted, time.Now())
	return pause*3/4 + rand.N(pause/4+1)
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
	case causeConfigured, causePassword, causeRemoved, causeStopped: // intended
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
