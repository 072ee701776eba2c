// Package apihealth publishes to the other speakers whether the API server answers this node.
//
// While the API server answers no node, nothing changes: VIPs do not depend on it. But one node
// alone may be cut off from it, by a firewall or because its proxy to the API servers is gone. That
// node learns neither of new Services nor of endpoints that have moved, and the others would wait
// for it to announce VIPs that it does not know. It therefore reports that it is blind, and the plan
// gives its VIPs to other nodes, if there are any.
//
// Where there are several API servers, one that is gone or hangs blinds nobody: a question
// without an answer is asked again over a connection of its own, which leads to another one.
package apihealth

import (
	"context"
	"log/slog"
	"math/rand/v2"
	"sync/atomic"
	"time"
)

const (
	// interval is how often the API server is asked for its version, which it answers everybody from
	// memory. askTimeout is how long the answer may take, over the existing connection and then over a
	// new one.
	interval, askTimeout = 5 * time.Second, 2 * time.Second
	// share is the time between two questions of all nodes together while all are answered. In a very
	// large cluster it is shorter: each node asks at least every longest.
	share, longest = 50 * time.Millisecond, time.Minute
	// misses is how many questions in a row without an answer are published.
	misses = 2
	// This node becomes blind when the API server has not answered it for blindAfter, and has answered
	// others for sureAfter in that time: not all nodes notice at once that it is gone, or back.
	blindAfter, sureAfter = 25 * time.Second, 15 * time.Second
	// seeingAfter is how long the API server has to answer again before this node is not blind any more:
	// the watches of its kube-proxy wait as long before they try again, and then the node knows what it missed.
	seeingAfter = time.Minute
)

// Peers are the other speakers; membership.Task is one.
type Peers interface {
	// See publishes whether the API server answers this node, and whether this node is blind.
	See(answered, blind bool)
	// OthersSee returns to how many of the other ready speakers the API server answers, and how many more
	// are not blind, because they do not know yet.
	OthersSee() (seeing, unsure int)
}

// API asks the API server; apiclient.Transport is one. A refusal is an answer, too.
type API interface {
	// Ask asks over the existing connection.
	Ask(context.Context) error
	// Renew asks over a new connection, and closes the others if it is answered.
	Renew(context.Context) error
}

// Checker is the task that asks.
type Checker struct {
	api   API
	peers Peers
	log   *slog.Logger
	blind atomic.Bool

	// Owned by Run.
	asked  time.Time // the last question
	wait   float64   // how long the next one waits, as a share of the pace
	missed int       // questions in a row
	silent time.Time // since when they are
	since  time.Time // of those that were answered in a row, the first
	others time.Time // since when others are answered while this node is not
}

// New returns a Checker that starts with Run.
func New(api API, peers Peers, log *slog.Logger) *Checker {
	return &Checker{api: api, peers: peers, log: log}
}

// String names the task.
func (s *Checker) String() string { return "API health" }

// Blind reports whether this node has given up on the API server while it answers others.
func (s *Checker) Blind() bool { return s.blind.Load() }

// Run asks until ctx ends.
func (s *Checker) Run(ctx context.Context) error {
	tick := time.NewTicker(interval)
	defer tick.Stop()
	for {
		if s.due(time.Now()) {
			s.look(ctx)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
	}
}

// due reports whether it is time for a question. In a large cluster that is not at each
// tick, unless somebody was not answered.
func (s *Checker) due(now time.Time) bool {
	seeing, unsure := s.peers.OthersSee()
	pace := float64(min(time.Duration(seeing)*share, longest))
	return s.missed > 0 || s.Blind() || unsure > 0 || float64(now.Sub(s.asked).Round(time.Second)) >= s.wait*pace
}

func (s *Checker) look(ctx context.Context) {
	s.asked, s.wait = time.Now(), 0.75+rand.Float64()/2 // so that nodes that asked at the same time do not next time
	if err := s.once(ctx); err == nil {
		s.noteAnswer(time.Now())
	} else {
		s.noteMiss(time.Now(), err)
	}
	s.peers.See(s.missed < misses, s.Blind())
}

// once asks the API server. If there is no answer, it asks over a new connection, which may lead to another
// API server.
func (s *Checker) once(ctx context.Context) error {
	first := within(ctx, s.api.Ask)
	if first == nil || ctx.Err() != nil {
		return first
	}
	err := within(ctx, s.api.Renew)
	if err == nil {
		s.log.Info("the API server did not answer, and does over a new connection: all others are closed", "err", first)
	}
	return err
}

func within(ctx context.Context, ask func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	return ask(ctx)
}

func (s *Checker) noteAnswer(now time.Time) {
	if s.missed >= misses {
		s.log.Info("the API server answers", "after", now.Sub(s.silent).Round(time.Second))
	}
	if s.missed > 0 || s.since.IsZero() {
		s.since = now
	}
	s.missed, s.others = 0, time.Time{}
	if s.Blind() && now.Sub(s.since) >= seeingAfter {
		s.blind.Store(false)
		s.log.Info("the API server answers this node again, which may own VIPs")
	}
}

func (s *Checker) noteMiss(now time.Time, err error) {
	if s.missed++; s.missed == 1 {
		s.silent = now
	}
	if s.missed == misses { // client-go is silent while connections are refused
		s.log.Warn("the API server does not answer: what this node announces stays as it is", "since", s.silent, "err", err)
	}
	seeing, _ := s.peers.OthersSee()
	switch {
	case seeing == 0:
		s.others = time.Time{}
	case s.others.IsZero():
		s.others = now
	case !s.Blind() && now.Sub(s.silent) >= blindAfter && now.Sub(s.others) >= sureAfter:
		s.blind.Store(true)
		s.log.Warn("the API server answers other nodes, and not this one: others own its VIPs at layer 2", "since", s.silent, "err", err)
	}
}
