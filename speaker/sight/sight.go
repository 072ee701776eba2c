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
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/client-go/rest"
)

const (
	// interval is how often the API server is asked, and patience how long it may take:
	// its version is what it tells everybody, from memory.
	interval, patience = 5 * time.Second, 4 * time.Second
	// misses is how many questions in a row without an answer the others are told of.
	misses = 2
	// blindAfter is how long the API server has not answered when this node gives up,
	// and sureAfter how long it has answered others meanwhile: when it is gone, or back,
	// not all find out at once.
	blindAfter, sureAfter = 30 * time.Second, 15 * time.Second
	// seeingAfter is how long it has answered again when this node knows what it missed:
	// watches wait for as long before they try again.
	seeingAfter = time.Minute
)

// Peers are the other speakers; membership.Task is one.
type Peers interface {
	// See tells them whether the API server answers this node, and whether the node is
	// blind.
	See(sighted, blind bool)
	// OthersSee reports whether it answers one of them that is ready to own VIPs.
	OthersSee() bool
}

// Sight is the task that asks.
type Sight struct {
	ask   func(context.Context) error
	peers Peers
	log   *slog.Logger

	// Owned by Run.
	blind    bool
	missed   int       // questions in a row
	answered time.Time // the last one
	since    time.Time // of those that were answered in a row, the first
	others   time.Time // since when others are answered while this node is not
}

// New returns a Sight that starts with Run. The client is one for any group of the API.
func New(client rest.Interface, peers Peers, log *slog.Logger) *Sight {
	return &Sight{peers: peers, log: log, ask: func(ctx context.Context) error {
		return client.Get().AbsPath("/version").Do(ctx).Error()
	}}
}

// String names the task.
func (s *Sight) String() string { return "sight" }

// Run asks until ctx ends.
func (s *Sight) Run(ctx context.Context) error {
	tick := time.NewTicker(interval)
	defer tick.Stop()
	s.answered = time.Now()
	for {
		if err := s.once(ctx); err == nil {
			s.noteAnswer(time.Now())
		} else {
			s.noteMiss(time.Now(), err)
		}
		s.peers.See(s.missed < misses, s.blind)
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
	}
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
	s.missed, s.answered, s.others = 0, now, time.Time{}
	if s.blind && now.Sub(s.since) >= seeingAfter {
		s.blind = false
		s.log.Info("the API server answers this node again, which may own VIPs")
	}
}

func (s *Sight) noteMiss(now time.Time, err error) {
	s.missed++
	switch {
	case !s.peers.OthersSee():
		s.others = time.Time{}
	case s.others.IsZero():
		s.others = now
	case !s.blind && now.Sub(s.answered) >= blindAfter && now.Sub(s.others) >= sureAfter:
		s.blind = true
		s.log.Warn("the API server answers other nodes, and not this one: others own its VIPs at layer 2", "since", s.answered, "err", err)
	}
}
