package speaker

import (
	"context"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/netip"
	"slices"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/lodestone-lb/lodestone/pkg/config"
	"github.com/lodestone-lb/lodestone/pkg/report"
	"github.com/lodestone-lb/lodestone/speaker/layer2"
	"github.com/lodestone-lb/lodestone/speaker/netstate"
)

// reportDelay is how long changes are gathered before the Lease is written, so that a flapping link
// costs the API server little. Sessions and moves, which only people read, wait longer in large
// clusters: when a router reboots, all speakers report it, and each Lease goes to all speakers.
const reportDelay = 5 * time.Second

// Gateways returns the node's default gateways; netstate.GatewayWatcher is one.
type Gateways interface {
	Ready() <-chan struct{}
	Gateways() (addrs []netip.Addr, known bool)
	Changed() <-chan struct{}
}

// Conflicts knows which VIPs other machines claim; layer2.Announcer is one.
type Conflicts interface {
	Conflicts() []layer2.Conflict
	ConflictsChanged() <-chan struct{}
}

// Sessions knows the state of the BGP sessions; Detector is one.
type Sessions interface {
	Sessions() []report.Session
	Changed() <-chan struct{}
}

// Presence reports whether there is a kube-proxy, and whether that is known; KubeProxy is one.
type Presence interface {
	Answers() (answers, known bool)
	Changed() <-chan struct{}
}

// Rules reports whether the rules of direct forwarding are in the kernel; direct.Director is one.
type Rules interface {
	InForce() bool
	NoRules() report.NoRules
	Changed() <-chan struct{}
}

// Loop has what the speaker's loop knows and the Lease reports; Speaker is one.
type Loop interface {
	Moves() []report.Move
	Labels() (labels map[string]string, known bool)
	Changed() <-chan struct{}
}

// ReportOptions are what a Reporter needs.
type ReportOptions struct {
	Loop       Loop
	Interfaces netstate.Interfaces
	Gateways   Gateways
	Config     Config
	Conflicts  Conflicts
	Sessions   Sessions
	PodRoutes  PodRouter
	KubeProxy  Presence
	Forwarding Rules
	// Crowd returns the factor by which speakers lengthen intervals in a large cluster. It is
	// membership.Task's.
	Crowd func() int
	// Report has the speaker's Lease carry the report; it is membership.Task's.
	Report   func(report.Report)
	Log      *slog.Logger
	Registry prometheus.Registerer
}

// Reporter is the task that reports the node's network on the Lease: its segments and gateways, the
// VIPs that other machines claim, its BGP sessions, whether its pods have routes, whether it has a
// kube-proxy, and which VIPs moved.
type Reporter struct {
	ReportOptions
	metric prometheus.Gauge

	// Owned by Run: since when advertisements match no interface, for which of them that was
	// logged, and whether every advertisement was checked for unmatchedFor.
	unmatchedSince map[string]time.Time
	unmatched      []string
	checked        bool
}

// NewReporter returns a Reporter that starts with Run.
func NewReporter(o ReportOptions) *Reporter {
	r := &Reporter{ReportOptions: o, unmatchedSince: map[string]time.Time{}, metric: prometheus.NewGauge(prometheus.GaugeOpts{
		Name: MetricUnmatched, Help: "Advertisements by layer 2 that select this node and name no interface that it has.",
	})}
	o.Registry.MustRegister(r.metric)
	return r
}

// String names the task.
func (r *Reporter) String() string { return "report" }

// Run reports once the kernel has answered and there is a document, and then what changes, until ctx ends. Without the
// document, segments that only an advertisement names would be off the Lease for a while, and their VIPs would move.
func (r *Reporter) Run(ctx context.Context) error {
	for _, ready := range []<-chan struct{}{r.Interfaces.Ready(), r.Gateways.Ready()} {
		select {
		case <-ctx.Done():
			return nil
		case <-ready:
		}
	}
	for {
		changed := r.Config.Changed()
		if current, _ := r.Config.Current(); current != nil {
			break
		}
		select {
		case <-ctx.Done():
			return nil
		case <-changed:
		}
	}
	for ctx.Err() == nil {
		// First the channels, then the state: no change is missed.
		interfaces, gateways, config, proxy := r.Interfaces.Changed(), r.Gateways.Changed(), r.Config.Changed(), r.KubeProxy.Changed()
		loop, again := r.Loop.Changed(), r.lookForUnmatched(time.Now())
		conflicts, sessions, pods := r.Conflicts.ConflictsChanged(), r.Sessions.Changed(), r.PodRoutes.Changed()
		rules := r.Forwarding.Changed()
		now := r.urgent()
		now.Sessions, now.Moves = r.Sessions.Sessions(), r.Loop.Moves()
		if r.checked {
			now.Unmatched = append([]string{}, r.unmatched...)
		}
		r.Report(now)
		select {
		case <-ctx.Done():
			return nil
		case <-interfaces:
		case <-gateways:
		case <-proxy:
		case <-rules:
		case <-config:
		case <-conflicts:
		case <-sessions:
		case <-pods:
		case <-loop:
		case <-again:
		}
		r.gather(ctx, now)
	}
	return nil
}

// urgent returns the part of the report that decisions of other speakers and the controller depend on.
func (r *Reporter) urgent() (now report.Report) {
	now.Network = r.network()
	now.PodRoutes, now.RoutedPodCIDRs = r.routedPods()
	return now
}

// movesDelay is how long moves wait at most. They are published for two minutes.
const movesDelay = 90 * time.Second

// gather waits for more changes: for reportDelay if the urgent part has changed, and longer otherwise.
func (r *Reporter) gather(ctx context.Context, reported report.Report) {
	moves := reported.Moves
	reported.Sessions, reported.Moves, reported.Unmatched = nil, nil, nil
	delay := reportDelay
	if crowd := time.Duration(r.Crowd()); crowd > 1 {
		delay = crowd*reportDelay/2 + rand.N(crowd*reportDelay)
	}
	soon := min(delay, movesDelay/3+rand.N(movesDelay*2/3))
	for due := time.Now().Add(delay); ; {
		if latest := time.Now().Add(soon); latest.Before(due) && len(report.NewMoves(moves, r.Loop.Moves())) > 0 {
			due = latest
		}
		left := min(reportDelay, time.Until(due))
		if left <= 0 {
			return
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(left):
		}
		if r.urgent().Over(reported).Tidy().String() != reported.Tidy().String() {
			return
		}
	}
}

// unmatchedFor is how long an advertisement matches no interface before that is reported: when a
// node starts, some interfaces come late.
const unmatchedFor = 10 * time.Second

// lookForUnmatched finds the advertisements that match no interface of the node, and logs the new
// ones and those that match one again. It has to be called again when the channel fires; the channel
// is nil if time alone changes nothing.
func (r *Reporter) lookForUnmatched(now time.Time) (again <-chan time.Time) {
	labels, known := r.Loop.Labels()
	config, _ := r.Config.Current()
	if !known || config == nil {
		return nil
	}
	soonest := unmatchedFor + 1
	interfaces, since, unmatched := r.Interfaces.Interfaces(), map[string]time.Time{}, []string(nil)
	for _, a := range config.Advertisements {
		if a.Layer2 == nil || !a.Layer2.NodeSelector.Matches(labels) || layer2.Matches(interfaces, a.Layer2.Interfaces) {
			continue
		}
		since[a.Name] = now
		if before, ok := r.unmatchedSince[a.Name]; ok {
			since[a.Name] = before
		}
		if left := since[a.Name].Add(unmatchedFor).Sub(now); left > 0 {
			soonest = min(soonest, left)
			continue
		}
		unmatched = append(unmatched, a.Name)
		if !slices.Contains(r.unmatched, a.Name) {
			r.Log.Warn("no interface of this node matches the advertisement: it announces nothing here; compare its interfaces with ip link, "+
				"or leave this node out by its nodeSelector",
				"advertisement", a.Name, "interfaces", a.Layer2.Interfaces)
		}
	}
	for _, name := range r.unmatched {
		if !slices.Contains(unmatched, name) {
			r.Log.Info("the advertisement matches an interface of this node again, or does not ask for one", "advertisement", name)
		}
	}
	if soonest <= unmatchedFor {
		again = time.After(soonest)
	}
	r.unmatchedSince, r.unmatched, r.checked = since, unmatched, r.checked || again == nil
	r.metric.Set(float64(len(unmatched)))
	return again
}

// network returns the node's network. Its segments are those on which VIPs are announced by default
// or by an advertisement.
func (r *Reporter) network() report.Network {
	patterns := [][]string{nil}
	if config, _ := r.Config.Current(); config != nil {
		for _, a := range config.Advertisements {
			if a.Layer2 != nil {
				patterns = append(patterns, a.Layer2.Interfaces)
			}
		}
	}
	n := report.Network{Segments: layer2.Segments(r.Interfaces.Interfaces(), patterns...),
		Forwards: r.Forwarding.InForce(), NoRules: r.Forwarding.NoRules()}
	answers, known := r.KubeProxy.Answers()
	n.KubeProxy, n.KubeProxyUnknown = answers, !known
	conflicts := slices.Clone(r.Conflicts.Conflicts())
	slices.SortStableFunc(conflicts, func(a, b layer2.Conflict) int { // if there are too many, those that withhold a VIP are reported
		switch {
		case a.Announced == b.Announced:
			return 0
		case b.Announced:
			return -1
		}
		return 1
	})
	for _, c := range conflicts[:min(len(conflicts), report.MaxConflicts)] {
		if hardware, err := net.ParseMAC(c.HardwareAddr); err == nil && len(hardware) == 6 {
			n.Conflicts = append(n.Conflicts, report.Conflict{VIP: c.VIP, HardwareAddr: [6]byte(hardware), Announced: c.Announced})
		}
	}
	if gateways, known := r.Gateways.Gateways(); known {
		n.Gateways = gateways
	}
	return n
}

// routedPods returns the mode of routes to pods, and the node's pod CIDRs that have routes. They are
// nil while that is unknown; then the last report about them stays. So a node's network does not
// become unavailable when its speaker is replaced or a session is down for a while.
func (r *Reporter) routedPods() (mode string, routed []netip.Prefix) {
	status := r.PodRoutes.Status()
	if !status.Known {
		return "", nil
	}
	current, _ := r.Config.Current()
	known := true
	switch {
	case status.Mode == config.RoutesKernel:
		// A route that the kernel refuses is no reason to give up the others.
		known = status.Error == "" || len(status.Routes) > 0
	case status.Mode == config.RoutesBGP:
		known = current != nil && current.Routes != nil && slices.ContainsFunc(r.Sessions.Sessions(), func(p report.Session) bool {
			return p.Established && current.Routes.AdvertisesTo(p.Peer)
		})
	}
	if !known {
		return string(status.Mode), nil
	}
	return string(status.Mode), append([]netip.Prefix{}, status.Own...)
}
