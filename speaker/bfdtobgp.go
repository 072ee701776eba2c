package speaker

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/lodestone-lb/lodestone/pkg/config"
	"github.com/lodestone-lb/lodestone/pkg/diagnose"
	"github.com/lodestone-lb/lodestone/pkg/loglimit"
	"github.com/lodestone-lb/lodestone/pkg/notify"
	"github.com/lodestone-lb/lodestone/pkg/report"
	"github.com/lodestone-lb/lodestone/speaker/bfd"
	"github.com/lodestone-lb/lodestone/speaker/bgp"
	"github.com/lodestone-lb/lodestone/speaker/plan"
)

// bfdPause is how long BFD keeps a BGP session down. The BGP session does not wait until the BFD
// session is Up again: some routers have a BFD session only while they have a BGP session, and on
// a broken path TCP does not work anyway.
const bfdPause = time.Second

// firstSessions is how long a node that has started counts as one that its routers have yet to reach.
const firstSessions = 30 * time.Second

// BFD detects quickly that a router cannot be reached; bfd.Task is one.
type BFD interface {
	Set(ctx context.Context, want map[string]bfd.Session) error
	States() map[string]bfd.Status
	Changed() <-chan struct{}
}

// Peers are the existing BGP sessions; bgp.Announcer is one.
type Peers interface {
	Peers() []bgp.Peer
	// SetDown takes a session down for the reason why, and keeps it down until it is called
	// with false. It has no effect if it returns an error.
	SetDown(ctx context.Context, peer string, down bool, why string) error
	Changed() <-chan struct{}
}

// Detector is the task that ties BFD sessions to BGP sessions (RFC 5882), and knows the state of
// both.
type Detector struct {
	bfd      BFD
	peers    Peers
	outdated func(config.SecretKey) string // see NewDetector
	log      *slog.Logger
	wake     chan struct{}
	changed  notify.Signal

	// Owned by Run.
	want   map[string]bfd.Session  // what BFD was set to
	logged map[string]plan.Problem // the problems that were logged
	last   []report.Session        // the last answer of Sessions

	evaluating sync.Mutex
	down       map[string]string // the sessions that are kept down, and why; guarded by evaluating

	mu       sync.Mutex
	sessions map[string]plan.Session
	problems map[string]plan.Problem
	began    time.Time // when Set was called first
	reached  bool      // what Reached reports, once it is OK
}

// NewDetector returns a Detector that starts with Run. outdated returns why a password may not be its Secret's any more, or
// an empty text.
func NewDetector(b BFD, peers Peers, outdated func(config.SecretKey) string, log *slog.Logger) *Detector {
	return &Detector{bfd: b, peers: peers, outdated: outdated, log: loglimit.Logger(log), wake: make(chan struct{}, 1),
		down: map[string]string{}}
}

// String names the task.
func (d *Detector) String() string { return "detector" }

// Set replaces the sessions. It has to be called before these begin: one that is strict is kept down when it returns.
func (d *Detector) Set(ctx context.Context, want plan.BGP) {
	d.mu.Lock()
	d.sessions, d.problems = maps.Clone(want.Sessions), maps.Clone(want.Problems)
	if d.began.IsZero() {
		d.began = time.Now()
	}
	d.mu.Unlock()
	d.evaluate(ctx)
	notify.Wake(d.wake)
}

// Changed returns a channel that is closed when Sessions returns something else.
func (d *Detector) Changed() <-chan struct{} { return d.changed.Next() }

// Run works until ctx ends.
func (d *Detector) Run(ctx context.Context) error {
	for ctx.Err() == nil {
		// First the channels, then the state: no change is missed.
		states, peers := d.bfd.Changed(), d.peers.Changed()
		sessions, problems := d.current()
		d.watch(ctx, sessions)
		again := d.evaluate(ctx)
		d.logProblems(problems)
		if now := d.Sessions(); !slices.Equal(now, d.last) {
			d.last = now
			d.changed.Notify()
		}
		select {
		case <-ctx.Done():
		case <-states:
		case <-peers:
		case <-d.wake:
		case <-again:
		}
	}
	return nil
}

// current returns what was set.
func (d *Detector) current() (sessions map[string]plan.Session, problems map[string]plan.Problem) {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.sessions, d.problems
}

// logProblems logs each problem of a session once, and its end.
func (d *Detector) logProblems(problems map[string]plan.Problem) {
	for name, p := range problems {
		if d.logged[name] != p {
			d.log.Warn("BGP peer needs attention", "peer", name, "reason", p.Reason, "message", p.Message)
		}
	}
	for name, p := range d.logged {
		if _, still := problems[name]; !still {
			d.log.Info("BGP peer needs no attention any more", "peer", name, "reason", p.Reason)
		}
	}
	d.logged = problems
}

// paths returns the BFD sessions that the sessions need. The address of an unnumbered peer is known
// once BGP has found it.
func (d *Detector) paths(sessions map[string]plan.Session) map[string]bfd.Session {
	found := map[string]netip.Addr{}
	for _, p := range d.peers.Peers() {
		found[p.Name] = p.Address
	}
	want := map[string]bfd.Session{}
	for name, s := range sessions {
		remote := s.Peer.Address
		if !remote.IsValid() {
			remote = found[name]
		}
		if s.Peer.BFD != nil && remote.IsValid() {
			want[name] = bfdSession(s, remote)
		}
	}
	return want
}

// watch has BFD watch the routers of the sessions.
func (d *Detector) watch(ctx context.Context, sessions map[string]plan.Session) {
	want := d.paths(sessions)
	if maps.Equal(want, d.want) { // BFD's own changes come by here, too, and must not wake it
		return
	}
	d.want = want
	if err := d.bfd.Set(ctx, want); err != nil && ctx.Err() == nil {
		d.log.Error("BFD sessions refused", "err", err)
	}
}

func bfdSession(s plan.Session, remote netip.Addr) bfd.Session {
	b := s.Peer.BFD
	return bfd.Session{
		Local: s.Source, Remote: remote, Interface: s.Peer.Interface, Multihop: b.MinimumTTL > 0, MinTTL: b.MinimumTTL,
		Timers: bfd.Timers{TransmitInterval: b.TransmitInterval, ReceiveInterval: b.ReceiveInterval, DetectMultiplier: b.DetectMultiplier},
	}
}

// evaluate takes BGP sessions down by the state of their BFD sessions, and ends that. It has to be
// called again when the channel fires; the channel is nil if time alone changes nothing.
func (d *Detector) evaluate(ctx context.Context) (again <-chan time.Time) {
	d.evaluating.Lock()
	defer d.evaluating.Unlock()
	sessions, _ := d.current()
	paths, states, soonest := d.paths(sessions), d.bfd.States(), bfdPause
	for name := range d.down {
		if s, ok := sessions[name]; !ok || s.Peer.BFD == nil {
			d.setDown(ctx, name, "")
		}
	}
	for name, s := range sessions {
		if s.Peer.BFD == nil {
			continue
		}
		state := states[name]
		if !state.Session.SamePath(paths[name]) { // BFD has yet to begin on the new path
			state = bfd.Status{}
		}
		why := ""
		switch {
		case state.Up():
		case s.Peer.BFD.Strict:
			why = "waiting for BFD (strict)"
			switch {
			case state.Error != "":
				why += ": " + state.Error
			case state.Cause == bfd.PeerAdminDown:
				why += ": it is switched off on the router"
			}
		case state.Failed():
			// Not Since: a path that is still broken may have the session go from Down to Init and back, again and again.
			if wait := time.Until(state.Ended.Add(bfdPause)); wait > 0 {
				why, soonest = failure(state), min(soonest, wait)
			}
		}
		d.setDown(ctx, name, why)
	}
	if len(d.down) == 0 {
		return nil
	}
	return time.After(soonest)
}

// failure describes why a BFD session is not Up any more.
func failure(s bfd.Status) string {
	if s.Cause == bfd.Expired {
		return fmt.Sprintf("BFD: the router was not heard for %s", s.DetectionTime)
	}
	return "BFD: the router does not hear this node, or has started anew"
}

// setDown takes the session down for the reason why, if the reason is new. An empty reason ends that.
func (d *Detector) setDown(ctx context.Context, name, why string) {
	if d.down[name] == why || d.peers.SetDown(ctx, name, why != "", why) != nil {
		return
	}
	if why == "" {
		delete(d.down, name)
	} else {
		d.down[name] = why
	}
}

// lack describes why there is no session.
func lack(p bgp.Peer) string {
	if p.Ended == "" || p.Ended == p.LastError {
		return p.LastError
	}
	return p.Ended + "; now: " + p.LastError
}

// Reached is whether the BGP sessions of a speaker that has started are up, which a rolling update has to wait
// for: routers would lose one node after the other. It is OK for ever when all were up once, or after
// firstSessions: a router that is away holds up no update.
func (d *Detector) Reached() diagnose.Condition {
	peers := d.peers.Peers()
	d.mu.Lock()
	defer d.mu.Unlock()
	var down []string
	for name := range d.sessions {
		if !slices.ContainsFunc(peers, func(p bgp.Peer) bool { return p.Name == name && p.State == bgp.Established }) {
			down = append(down, name)
		}
	}
	d.reached = d.reached || !d.began.IsZero() && (len(down) == 0 || time.Since(d.began) > firstSessions)
	c := diagnose.Condition{Name: "routers", OK: d.reached, Message: "the sessions were up, or not within " + firstSessions.String()}
	if !c.OK {
		slices.Sort(down)
		c.Public = "waiting for BGP sessions, for " + firstSessions.String() + " at most"
		c.Message = c.Public + ": " + strings.Join(down, ", ")
	}
	return c
}

// Sessions returns the report of the node's BGP sessions, including the ones that cannot be set up.
func (d *Detector) Sessions() []report.Session {
	sessions, problems := d.current()
	states := d.bfd.States()
	var all []report.Session
	for _, p := range d.peers.Peers() {
		s := report.Session{Peer: p.Name, Router: p.Address, Established: p.State == bgp.Established, Since: p.Since}
		if s.Message = problems[p.Name].Message; !s.Established {
			s.Message = lack(p)
		}
		if peer := sessions[p.Name].Peer; peer != nil && peer.Password != nil {
			if outdated := d.outdated(*peer.Password); outdated != "" {
				s.Message = strings.TrimPrefix(s.Message+"; "+outdated, "; ")
			}
		}
		if state, ok := states[p.Name]; ok {
			s.BFD = state.State.String()
		}
		all = append(all, s)
	}
	for _, name := range slices.Sorted(maps.Keys(problems)) {
		if _, ok := sessions[name]; !ok {
			all = append(all, report.Session{Peer: name, Message: problems[name].Message})
		}
	}
	return all
}
