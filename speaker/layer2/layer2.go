// Package layer2 announces VIPs on the local segment: it answers requests for the VIPs that this node
// owns, and announces a VIP to everybody when this node becomes its owner. The addresses are on no
// interface of the node; kube-proxy takes the traffic that arrives.
//
// This package has the interfaces, sockets, multicast groups, status and logs. Package segment decides
// what is answered, announced and asked, and which speaker yields, for each interface and family. Package
// wire has the frames.
//
// One goroutine, Run, keeps a socket for each interface in use and protocol. A socket has the segment's
// machine and three tasks: one receives, one sends what is due, and one joins the multicast groups in which
// IPv6 hosts ask. These tasks and Run share the machine; none of them holds it for longer than it takes to
// send a frame.
//
// The files, from the outside in:
//
//	layer2.go           Announcer: which VIPs are announced on which interfaces
//	interface.go        which interfaces are suitable
//	socket.go           a packet socket: carries frames to the segment's machine and back
//	multicast.go        the groups in which IPv6 hosts ask
//	conflictmemory.go   which other machines have had a VIP lately, as it is reported and logged
//	reasons.go          the reasons why a VIP is not announced, with cause and cure
//	status.go           the status
//	metrics.go          the metrics
//	segment/receive.go  who answers a request
//	segment/foreign.go  what is done when a foreign machine has a VIP
//	segment/contest.go  which of two speakers keeps a VIP
//	wire/arp.go         the frames of IPv4
//	wire/ndp.go         the frames of IPv6
//	seal/seal.go        how speakers of a cluster recognize each other
package layer2

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sys/unix"

	"github.com/lodestone-lb/lodestone/pkg/loglimit"
	"github.com/lodestone-lb/lodestone/speaker/layer2/seal"
	"github.com/lodestone-lb/lodestone/speaker/layer2/segment"
	"github.com/lodestone-lb/lodestone/speaker/layer2/wire"
	"github.com/lodestone-lb/lodestone/speaker/netstate"
	"github.com/lodestone-lb/lodestone/speaker/plan"
)

// A socket that failed is opened again after firstRetry. The delay doubles up to lastRetry. It starts anew
// if the socket has worked for longer than that.
const (
	firstRetry = 100 * time.Millisecond
	lastRetry  = 30 * time.Second
)

// ErrStopped is returned by Set when Run has ended.
var ErrStopped = errors.New("the layer-2 announcer has stopped")

var (
	errNoLinkLocal = errors.New("no IPv6 link-local address that can be used")
	errGroups      = errors.New("join IPv6 multicast groups")
)

// Members reports whether speakers are lost; membership.Task is one.
type Members interface {
	// Whole reports whether all speakers that have a Lease are alive.
	Whole() bool
	// Crowd returns the factor, at least 1, by which speakers lengthen intervals in a large cluster, so
	// that all together do not send more on the segment.
	Crowd() int
	// Changed returns a channel that is closed by the next change.
	Changed() <-chan struct{}
}

// Options are what an Announcer needs.
type Options struct {
	Interfaces netstate.Interfaces
	// Members may be nil: then no speaker is ever lost.
	Members Members
	// Keys are the keys that the speakers of the cluster share.
	Keys     seal.Keys
	Log      *slog.Logger
	Registry prometheus.Registerer
	// Listen opens sockets. Nil: ListenPacket.
	Listen Listen
	// Received returns how many frames the interface of that index has received. Nil: it is not known,
	// and no interface counts as deaf.
	Received func(index int) (uint64, error)
	// Groups opens sockets that join multicast groups. Nil: OpenGroups.
	Groups func() (GroupSocket, error)
	// Joined returns the multicast groups that the kernel has joined on the interface of that index. Nil: it is not
	// known, and a group that the kernel forgets is not joined again.
	Joined func(index int) (map[netip.Addr]bool, error)
}

// Announcer is the layer-2 announcer: a task with one verb, Set.
type Announcer struct {
	options   Options
	log       *slog.Logger
	bounded   *slog.Logger // for what others can cause
	metrics   *metrics
	conflicts *conflicts

	sets    chan setting
	exited  chan *socket
	ready   chan struct{}
	stopped chan struct{}

	// Owned by Run.
	vips     map[netip.Addr]*assignment
	groups   []group                                  // the same VIPs, by protocol and interfaces
	want     map[socketKey]map[netip.Addr]segment.VIP // the wanted sockets
	unfit    map[socketKey]error                      // wanted sockets that the interface does not allow
	sockets  map[socketKey]*socket                    // the open sockets
	failures map[socketKey]*failure
	around   segment.Surroundings
	fatal    error
	running  sync.WaitGroup // tasks of sockets, also of those that were closed

	published atomic.Pointer[state]             // read by everybody, immutable
	self      atomic.Pointer[map[wire.MAC]bool] // the node's hardware addresses, read by the sockets, immutable
}

// assignment is a VIP that this node owns. It is not modified.
type assignment struct {
	segment.VIP
	since      time.Time
	interfaces []string // see plan.Layer2
	anySegment bool
	// never is set if the VIP leaves before it was announced.
	never bool
}

// is reports whether the VIP is already assigned in the same way.
func (v *assignment) is(l plan.Layer2) bool {
	return slices.Equal(v.interfaces, l.Interfaces) && v.anySegment == l.AnySegment && v.VIP == onSegments(l, v.Probe)
}

// onSegments returns how segments announce the VIP.
func onSegments(l plan.Layer2, probe bool) segment.VIP {
	return segment.VIP{Probe: probe, Home: l.Home, Apart: l.Apart, Hurry: l.Hurry, Leaving: l.Leaving, Arriving: l.Arriving,
		Refresh: l.Refresh}
}

// setting is a call of Set.
type setting struct {
	want map[netip.Addr]plan.Layer2
	done chan struct{}
}

// failure is a socket that could not be opened or broke.
type failure struct {
	err   error
	delay time.Duration
	until time.Time
}

// New returns an Announcer that does nothing until it runs.
func New(o Options) *Announcer {
	if o.Listen == nil {
		o.Listen = ListenPacket
	}
	if o.Groups == nil {
		o.Groups = OpenGroups
	}
	a := &Announcer{
		options:   o,
		log:       o.Log,
		bounded:   loglimit.Logger(o.Log),
		conflicts: newConflicts(),
		sets:      make(chan setting),
		exited:    make(chan *socket),
		ready:     make(chan struct{}),
		stopped:   make(chan struct{}),
		sockets:   map[socketKey]*socket{},
		failures:  map[socketKey]*failure{},
		around:    segment.Surroundings{Whole: true, Crowd: 1},
	}
	a.published.Store(&state{})
	a.self.Store(&map[wire.MAC]bool{})
	a.metrics = newMetrics(o.Registry, a)
	return a
}

// String names the task.
func (a *Announcer) String() string { return "layer2" }

// Ready is closed once the interfaces are known, so that Set takes effect at once.
func (a *Announcer) Ready() <-chan struct{} { return a.ready }

// Set replaces the whole set of VIPs that this node announces. When it returns nil, no packet is sent for a
// VIP that left the set, and the new VIPs are being announced or probed. If a VIP cannot be announced (no
// such interface, no IPv6 on it, a socket that cannot be opened), that is no error: Status has the reason,
// and the announcer tries again itself. Set waits for Run, and after Run it returns ErrStopped.
func (a *Announcer) Set(ctx context.Context, want map[netip.Addr]plan.Layer2) error {
	s := setting{want, make(chan struct{})}
	select {
	case a.sets <- s:
	case <-a.stopped:
		return ErrStopped
	case <-ctx.Done():
		return fmt.Errorf("set layer-2 announcements: %w", ctx.Err())
	}
	<-s.done // soon, because Run does not wait for the network here
	return nil
}

// Run announces until ctx ends, then closes all sockets. It fails only if a socket can never be opened, see
// recoverable.
func (a *Announcer) Run(ctx context.Context) error {
	defer close(a.stopped)
	defer a.running.Wait()
	defer a.closeAll()
	changed, synced, members := a.options.Interfaces.Changed(), a.options.Interfaces.Ready(), a.lookForLost()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-synced:
			synced = nil
			a.reconcile(ctx)
			close(a.ready)
		case <-changed:
			changed = a.options.Interfaces.Changed()
			a.reconcile(ctx)
		case <-members:
			members = a.lookForLost()
		case <-a.ConflictsChanged(): // then expire has another time to wait for
		case <-a.conflicts.expire():
		case <-a.retry():
			a.reconcile(ctx)
		case s := <-a.exited:
			if a.sockets[s.key] == s { // unless Run has closed it meanwhile
				a.closeSocket(s)
				a.fail(s.key, s.err, time.Since(s.opened))
				a.publish()
			}
		case s := <-a.sets:
			old, changed := a.apply(ctx, s.want)
			close(s.done)
			if changed {
				a.logTransitions(old)
			}
		}
		if a.fatal != nil {
			return a.fatal
		}
	}
}

// lookForLost hands to the segments whether speakers are lost. It has to be called again when the returned
// channel is closed.
func (a *Announcer) lookForLost() (changed <-chan struct{}) {
	around := a.around
	if a.options.Members != nil {
		changed, around.Whole, around.Crowd = a.options.Members.Changed(), a.options.Members.Whole(), a.options.Members.Crowd()
	}
	if around != a.around {
		a.around = around
		for _, s := range a.sockets {
			s.step(around)
		}
	}
	return changed
}

// apply makes want the set of owned VIPs. It returns the previous set, without VIPs that were never announced, and whether
// the set has changed.
func (a *Announcer) apply(ctx context.Context, want map[netip.Addr]plan.Layer2) (old map[netip.Addr]*assignment, changed bool) {
	if maps.EqualFunc(a.vips, want, (*assignment).is) {
		return a.vips, false
	}
	old, a.vips = maps.Clone(a.vips), make(map[netip.Addr]*assignment, len(want))
	shown := a.published.Load()
	for vip, l := range want {
		before := old[vip]
		if before != nil && before.is(l) {
			a.vips[vip] = before
			continue
		}
		v := &assignment{interfaces: slices.Clone(l.Interfaces), anySegment: l.AnySegment, VIP: onSegments(l, false)}
		if before.stays(v) {
			v.since = before.since
		} else {
			v.since = time.Now()
			a.conflicts.begin(vip, l.New)
		}
		v.never = before != nil && l.Leaving && before.absent(vip, shown)
		v.Probe = a.conflicts.toProbe(vip)
		a.vips[vip] = v
	}
	for vip := range old {
		if now := a.vips[vip]; now == nil || now.Leaving {
			a.conflicts.end(vip)
		}
	}
	maps.DeleteFunc(old, func(vip netip.Addr, v *assignment) bool { return v.absent(vip, shown) })
	a.groups = grouped(a.vips)
	a.reconcile(ctx)
	return old, true
}

// absent reports whether the VIP was not announced since it was assigned.
func (v *assignment) absent(vip netip.Addr, shown *state) bool {
	return v.never || v.Arriving && shown.of(vip).Reason == Yielded
}

// stays reports whether the VIP continues to be assigned. A leaving VIP that comes back, and an arriving VIP that has
// arrived, do not: they are announced anew.
func (v *assignment) stays(now *assignment) bool {
	return v != nil && (now.Leaving || !v.Leaving && (now.Arriving || !v.Arriving))
}

// logTransitions logs the VIPs that came and went, in order.
func (a *Announcer) logTransitions(old map[netip.Addr]*assignment) {
	for _, vip := range sorted(old, func(vip netip.Addr) bool { return a.vips[vip] == nil }) {
		a.log.Info("withdrawn", "vip", vip)
	}
	now := a.published.Load()
	came := func(vip netip.Addr) bool { v := a.vips[vip]; return !v.Leaving && !v.Arriving && !old[vip].stays(v) }
	for _, vip := range sorted(a.vips, came) {
		if v := now.of(vip); v.Reason == Probing {
			a.log.Info("looking whether somebody else has the VIP", "vip", vip)
		} else if v.Reason != "" {
			text := Reasons()[v.Reason]
			a.log.Warn("owned but not announced: "+text.Cause+" "+text.Cure, "vip", vip, "reason", v.Reason, "interfaces", a.vips[vip].interfaces)
		} else {
			a.log.Info("announcing", "vip", vip, "interfaces", v.Interfaces)
		}
	}
}

// sorted returns some of the VIPs, by address.
func sorted(vips map[netip.Addr]*assignment, which func(netip.Addr) bool) (addrs []netip.Addr) {
	for vip := range vips {
		if which(vip) {
			addrs = append(addrs, vip)
		}
	}
	slices.SortFunc(addrs, netip.Addr.Compare)
	return addrs
}

// reconcile opens and closes sockets as VIPs and interfaces demand. It closes and withdraws before it
// opens.
func (a *Announcer) reconcile(ctx context.Context) {
	interfaces := a.options.Interfaces.Interfaces()
	own := hardwareAddrs(interfaces)
	a.self.Store(&own)
	a.wanted(interfaces)
	for key, s := range a.sockets {
		if vips := a.want[key]; vips != nil && a.unfit[key] == nil {
			s.set(vips)
		} else {
			a.closeSocket(s)
		}
	}
	maps.DeleteFunc(a.failures, func(key socketKey, _ *failure) bool { return a.want[key] == nil || a.unfit[key] != nil })
	for key, vips := range a.want {
		if f := a.failures[key]; a.sockets[key] != nil || a.unfit[key] != nil || f != nil && time.Until(f.until) > 0 {
			continue
		}
		if err := a.open(ctx, key, a.toProbe(key.name, vips)); err != nil {
			a.fail(key, err, 0)
		}
	}
	a.publish()
}

// toProbe returns the VIPs for a new segment. Those that another segment has found to be free are not probed, except those that
// another machine had on this interface last.
func (a *Announcer) toProbe(name string, vips map[netip.Addr]segment.VIP) map[netip.Addr]segment.VIP {
	now := maps.Clone(vips)
	for vip, v := range vips {
		v.Probe = a.conflicts.toProbeOn(name, vip)
		now[vip] = v
	}
	return now
}

// wanted sets the sockets that VIPs and interfaces demand, with their VIPs.
func (a *Announcer) wanted(interfaces []netstate.Interface) {
	before := a.unfit
	a.want, a.unfit = map[socketKey]map[netip.Addr]segment.VIP{}, map[socketKey]error{}
	for _, g := range a.groups {
		segments := Segments(interfaces, g.interfaces)
		for _, i := range interfaces {
			ip := ipInterface(i, interfaces)
			if !suitable(i, ip.Index != i.Index, g.interfaces) {
				continue
			}
			if vips := g.on(segments, i.Name, ip.Name); len(vips) > 0 {
				a.demand(g.protocol, i, ip, vips)
			}
		}
	}
	for key, err := range a.unfit {
		if before[key] == nil {
			a.log.Warn("interface cannot announce", "interface", key.name, "family", key.protocol.Family(), "err", err)
		}
	}
}

// demand adds a socket for these VIPs on an interface. ip is the one that has its IP addresses.
func (a *Announcer) demand(p wire.Protocol, i, ip netstate.Interface, vips map[netip.Addr]segment.VIP) {
	key := socketKey{p, i.Index, i.Name, wire.Hardware(i.HardwareAddr), ip.Index}
	if err := fit(p, ip); err != nil {
		a.unfit[key] = err
	}
	if others := a.want[key]; others != nil { // shared, never modified
		vips = maps.Clone(vips)
		maps.Copy(vips, others)
	}
	a.want[key] = vips
}

// fail records that a socket failed after it had worked for lived, and when to open it again.
func (a *Announcer) fail(key socketKey, err error, lived time.Duration) {
	if !recoverable(err) {
		a.fatal = err
	}
	f := a.failures[key]
	if f == nil || lived > lastRetry {
		f = &failure{delay: firstRetry}
		a.log.Warn("interface failed", "interface", key.name, "family", key.protocol.Family(), "err", err)
	}
	a.failures[key] = &failure{err: err, delay: min(2*f.delay, lastRetry), until: time.Now().Add(f.delay)}
}

// retry returns a channel that fires when the next failed socket has to be opened again. Nil: there is
// none.
func (a *Announcer) retry() <-chan time.Time {
	var next *failure
	for key, f := range a.failures {
		if a.sockets[key] == nil && (next == nil || f.until.Before(next.until)) {
			next = f
		}
	}
	if next == nil {
		return nil
	}
	return time.After(time.Until(next.until))
}

func (a *Announcer) closeSocket(s *socket) {
	s.close()
	delete(a.sockets, s.key)
}

func (a *Announcer) closeAll() {
	for _, s := range a.sockets {
		a.closeSocket(s)
	}
	a.vips, a.want = nil, nil
	a.publish()
}

// recoverable reports whether an error of a socket may pass. It does not if neither time nor another
// interface will change it.
func recoverable(err error) bool {
	switch {
	case errors.Is(err, errGroups): // without IPv6 on the node, IPv4 still works
		return true
	case errors.Is(err, unix.EPERM), errors.Is(err, unix.EACCES): // the process lacks NET_RAW
		return false
	case errors.Is(err, unix.EAFNOSUPPORT), errors.Is(err, unix.EPROTONOSUPPORT): // the kernel lacks packet sockets
		return false
	}
	return true // ENETDOWN, ENODEV, ENXIO, EMFILE, ENOBUFS, ...
}
