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

// reportDelay is how long changes are gathered before the Lease is written: a
// link that flaps costs the API server little. What is for people alone, sessions and
// moves, waits longer on nodes of which there are many. When a router reboots, all of
// them have it to report, and each Lease goes to all of them.
const reportDelay = 5 * time.Second

// Gateways returns the node's default gateways; netstate.GatewayWatcher is one.
type Gateways interface {
	Ready() <-chan struct{}
	Gateways() (addrs []netip.Addr, known bool)
	Changed() <-chan struct{}
}

// Conflicts returns which VIPs others claim; layer2.Announcer is one.
type Conflicts interface {
	Conflicts() []layer2.Conflict
	ConflictsChanged() <-chan struct{}
}

// Sessions returns how the BGP sessions are; Detector is one.
type Sessions interface {
	Sessions() []report.Session
	Changed() <-chan struct{}
}

// Presence reports whether there is a kube-proxy; KubeProxy is one.
type Presence interface {
	Answers() bool
	Changed() <-chan struct{}
}

// Rules reports whether the rules of direct forwarding are there; direct.Director is one.
type Rules interface {
	InForce() bool
	NoRules() report.NoRules
	Changed() <-chan struct{}
}

// Loop returns what the loop has found out and the Lease is to have; Speaker is one.
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
	// Crowd returns by how much an interval of each speaker is longer than that of a few
	// speakers. It is membership.Task's.
	Crowd func() int
	// Report takes what the speaker's Lease is to say; it is membership.Task's.
	Report   func(report.Report)
	Log      *slog.Logger
	Registry prometheus.Registerer
}

// Reporter is the task that reports to the controller what the node's network looks
// like: which segments it is on, which addresses are its gateways', which of
// its VIPs other hosts claim, how its BGP sessions are, whether its pods have
// routes, whether it has a kube-proxy, and which VIPs changed hands.
type Reporter struct {
	ReportOptions
	metric prometheus.Gauge

	// Owned by Run: since when advertisements match no interface, those of which
	// it was told, and whether it is known of all.
	unmatchedSince map[string]time.Time
	unmatched      []string
	judged         bool
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

// Run reports once the kernel has answered, and then what changes, until ctx ends.
func (r *Reporter) Run(ctx context.Context) error {
	for _, ready := range []<-chan struct{}{r.Interfaces.Ready(), r.Gateways.Ready()} {
		select {
		case <-ctx.Done():
			return nil
		case <-ready:
		}
	}
	for ctx.Err() == nil {
		// First the channels, then the state: no change is missed.
		interfaces, gateways, config, proxy := r.Interfaces.Changed(), r.Gateways.Changed(), r.Config.Changed(), r.KubeProxy.Changed()
		loop, again := r.Loop.Changed(), r.lookForUnmatched(time.Now())
		conflicts, sessions, pods := r.Conflicts.ConflictsChanged(), r.Sessions.Changed(), r.PodRoutes.Changed()
		rules := r.Forwarding.Changed()
		said := r.urgent()
		said.Sessions, said.Moves = r.Sessions.Sessions(), r.Loop.Moves()
		if r.judged {
			said.Unmatched = append([]string{}, r.unmatched...)
		}
		r.Report(said)
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
		r.gather(ctx, said)
	}
	return nil
}

// urgent returns the part of the report by which others decide.
func (r *Reporter) urgent() (said report.Report) {
	said.Network = r.network()
	said.PodRoutes, said.RoutedPodCIDRs = r.routedPods()
	return said
}

// gather waits for more changes.
func (r *Reporter) gather(ctx context.Context, reported report.Report) {
	reported.Sessions, reported.Moves, reported.Unmatched = nil, nil, nil
	rest := reportDelay
	if crowd := time.Duration(r.Crowd()); crowd > 1 {
		rest = crowd*reportDelay/2 + rand.N(crowd*reportDelay)
	}
	for due := time.Now().Add(rest); ; {
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

// unmatchedFor is how long no interface may match an advertisement before
// somebody is told: some come late when a node starts.
const unmatchedFor = 10 * time.Second

// lookForUnmatched finds the advertisements that match no interface of the node,
// and tells the log of those that are new or that match one again. The channel
// fires when it is to be called again; nil: not by itself.
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
	r.unmatchedSince, r.unmatched, r.judged = since, unmatched, r.judged || again == nil
	r.metric.Set(float64(len(unmatched)))
	return again
}

// network returns what the kernel reports. Segments are those that VIPs are
// announced on by default or as some advertisement says.
func (r *Reporter) network() report.Network {
	patterns := [][]string{nil}
	if config, _ := r.Config.Current(); config != nil {
		for _, a := range config.Advertisements {
			if a.Layer2 != nil {
				patterns = append(patterns, a.Layer2.Interfaces)
			}
		}
	}
	n := report.Network{Segments: []report.Segment{}, KubeProxy: r.KubeProxy.Answers(), Forwards: r.Forwarding.InForce(),
		NoRules: r.Forwarding.NoRules()}
	for _, s := range layer2.Segments(r.Interfaces.Interfaces(), patterns...) {
		n.Segments = append(n.Segments, s)
	}
	for _, c := range r.Conflicts.Conflicts() {
		if hardware, err := net.ParseMAC(c.HardwareAddr); err == nil && len(hardware) == 6 {
			n.Conflicts = append(n.Conflicts, report.Conflict{VIP: c.VIP, HardwareAddr: [6]byte(hardware), Announced: c.Announced})
		}
	}
	if gateways, known := r.Gateways.Gateways(); known {
		n.Gateways = gateways
	}
	return n
}

// routedPods returns the mode of routes to pods and those of the node's pod CIDRs that
// have routes. While that is not known they are nil, and the last report about them
// stays: a speaker that is replaced, or a session that is down for a while, does not
// make a node's network unavailable.
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
