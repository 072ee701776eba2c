// Package sight tells the other speakers whether the API server answers this node.
//
// While it answers nobody, nothing changes: VIPs do not depend on it. But a node that
// alone is cut off from it, by a firewall, or because the proxy on it that leads to the
// API servers is gone, knows neither new Services nor where endpoints went, and the
// others would wait for it to announce what it has never heard of. It says then that it
// is blind, and the plan has others own its VIPs, where there are any.
package sight

import (
	"context"
	"errors"
	"log/slog"
	"math/rand/v2"
	"sync/atomic"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/client-go/rest"
)

const (
	// interval is how often the API server is asked, and patience how long it may take:
	// its version is what it tells everybody, from memory.
	interval, patience = 5 * time.Second, 4 * time.Second
	// share is the time between two questions from any node while it answers all of them.
	// Where there are so many that each would ask less often than every longest, it is less.
	share, longest = 50 * time.Millisecond, time.Minute
	// misses is how many questions in a row without an answer the others are told of.
	misses = 2
	// blindAfter is how long the API server has not answered when this node gives up,
	// and sureAfter how long it has answered others meanwhile: when it is gone, or back,
	// not all find out at once.
	blindAfter, sureAfter = 25 * time.Second, 15 * time.Second
	// seeingAfter is how long it has answered again when this node knows what it missed:
	// watches wait for as long before they try again.
	seeingAfter = time.Minute
)

// Peers are the other speakers; membership.Task is one.
type Peers interface {
	// See tells them whether the API server answers this node, and whether the node is
	// blind.
	See(sighted, blind bool)
	// OthersSee returns how many of them that are ready to own VIPs it answers, and how
	// many more are not blind: they are about to find out.
	OthersSee() (seeing, unsure int)
}

// Sight is the task that asks.
type Sight struct {
	ask   func(context.Context) error
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

// New returns a Sight that starts with Run. The client is one for any group of the API.
func New(client rest.Interface, peers Peers, log *slog.Logger) *Sight {
	return &Sight{peers: peers, log: log, ask: func(ctx context.Context) error {
		return client.Get().AbsPath("/version").Do(ctx).Error()
	}}
}

// String names the task.
func (s *Sight) String() string { return "sight" }

// Blind reports whether this node has given up on the API server, which answers others.
func (s *Sight) Blind() bool { return s.blind.Load() }

// Run asks until ctx ends.
func (s *Sight) Run(ctx context.Context) error {
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
func (s *Sight) due(now time.Time) bool {
	seeing, unsure := s.peers.OthersSee()
	pace := float64(min(time.Duration(seeing)*share, longest))
	return s.missed > 0 || s.Blind() || unsure > 0 || float64(now.Sub(s.asked).Round(time.Second)) >= s.wait*pace
}

func (s *Sight) look(ctx context.Context) {
	s.asked, s.wait = time.Now(), 0.75+rand.Float64()/2 // who found out together does not stay together
	if err := s.once(ctx); err == nil {
		s.noteAnswer(time.Now())
	} else {
		s.noteMiss(time.Now(), err)
	}
	s.peers.See(s.missed < misses, s.Blind())
}

// once returns nil if the API server answers, whatever it says.
func (s *Sight) once(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	err := s.ask(ctx)
	if status := apierrors.APIStatus(nil); errors.As(err, &status) {
		return nil
	}
	return err
}

func (s *Sight) noteAnswer(now time.Time) {
	if s.missed > 0 || s.since.IsZero() {
		s.since = now
	}
	s.missed, s.others = 0, time.Time{}
	if s.Blind() && now.Sub(s.since) >= seeingAfter {
		s.blind.Store(false)
		s.log.Info("the API server answers this node again, which may own VIPs")
	}
}

func (s *Sight) noteMiss(now time.Time, err error) {
	if s.missed++; s.missed == 1 {
		s.silent = now
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
