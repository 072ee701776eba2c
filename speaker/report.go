package speaker

import (
	"context"
	"maps"
	"net"
	"net/netip"
	"time"

	"github.com/lodestone-lb/lodestone/pkg/clusterfacts"
	"github.com/lodestone-lb/lodestone/pkg/netstate"
	"github.com/lodestone-lb/lodestone/pkg/peering"
	"github.com/lodestone-lb/lodestone/speaker/layer2"
)

// reportDelay is how long changes are gathered before the Lease is written: a
// link that flaps costs the API server little.
const reportDelay = 5 * time.Second

// Interfaces tells the node's interfaces; netstate.Watcher is one.
type Interfaces interface {
	Ready() <-chan struct{}
	Interfaces() []netstate.Interface
	Changed() <-chan struct{}
}

// Gateways tells the node's default gateways; netstate.GatewayWatcher is one.
type Gateways interface {
	Ready() <-chan struct{}
	Gateways() (addrs []netip.Addr, known bool)
	Changed() <-chan struct{}
}

// Conflicts tells which VIPs others claim; layer2.Announcer is one.
type Conflicts interface {
	Conflicts() []layer2.Conflict
	ConflictsChanged() <-chan struct{}
}

// Sessions tells how the BGP sessions are; Detector is one.
type Sessions interface {
	Sessions() []peering.Session
	Changed() <-chan struct{}
}

// ReportOptions are what a Reporter needs.
type ReportOptions struct {
	Interfaces Interfaces
	Gateways   Gateways
	Config     Config
	Conflicts  Conflicts
	Sessions   Sessions
	PodRoutes  PodRouter
	// Report is told what the speaker's Lease is to say; it is
	// membership.Task's.
	Report func(annotations map[string]string)
}

// Reporter is the task that tells the controller what the node's network looks
// like: which segments it is on, which addresses are its gateways', which of
// its VIPs other hosts claim, how its BGP sessions are, and whether its pods have
// routes.
type Reporter struct{ ReportOptions }

// NewReporter returns a Reporter that starts with Run.
func NewReporter(o ReportOptions) *Reporter { return &Reporter{o} }

// String names the task.
func (r *Reporter) String() string { return "report" }

// Run reports once the kernel has told, and then what changes, until ctx ends.
func (r *Reporter) Run(ctx context.Context) error {
	for _, ready := range []<-chan struct{}{r.Interfaces.Ready(), r.Gateways.Ready()} {
		select {
		case <-ctx.Done():
			return nil
		case <-ready:
		}
	}
	for {
		// First the channels, then the state: no change is missed.
		interfaces, gateways, config := r.Interfaces.Changed(), r.Gateways.Changed(), r.Config.Changed()
		conflicts, sessions, pods := r.Conflicts.ConflictsChanged(), r.Sessions.Changed(), r.PodRoutes.Changed()
		annotations := r.network().Annotations()
		maps.Copy(annotations, peering.Annotations(r.Sessions.Sessions()))
		maps.Copy(annotations, r.routedPods())
		r.Report(annotations)
		select {
		case <-ctx.Done():
			return nil
		case <-interfaces:
		case <-gateways:
		case <-config:
		case <-conflicts:
		case <-sessions:
		case <-pods:
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(reportDelay):
		}
	}
}

// network returns what the kernel tells. Segments are those that VIPs are
// announced on by default or as some advertisement says.
func (r *Reporter) network() clusterfacts.Network {
	patterns := [][]string{nil}
	if config, _ := r.Config.Current(); config != nil {
		for _, a := range config.Advertisements {
			if a.Layer2 != nil {
				patterns = append(patterns, a.Layer2.Interfaces)
			}
		}
	}
	n := clusterfacts.Network{Segments: []clusterfacts.Segment{}, Conflicts: []clusterfacts.Conflict{}}
	for _, s := range layer2.Segments(r.Interfaces.Interfaces(), patterns...) {
		n.Segments = append(n.Segments, clusterfacts.Segment(s))
	}
	for _, c := range r.Conflicts.Conflicts() {
		if hardware, err := net.ParseMAC(c.HardwareAddr); err == nil && len(hardware) == 6 {
			n.Conflicts = append(n.Conflicts, clusterfacts.Conflict{VIP: c.VIP, HardwareAddr: [6]byte(hardware), Announced: c.Announced})
		}
	}
	if gateways, known := r.Gateways.Gateways(); known {
		n.Gateways = gateways
	}
	return n
}
