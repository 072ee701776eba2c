// Package layer2 announces VIPs on the local segment: it answers who asks for
// a VIP that this node owns, and tells everybody when ownership comes here.
// The addresses are on no interface of the node; kube-proxy takes the traffic
// once it arrives.
//
// One goroutine, Run, owns all state. For each interface in use it keeps a
// port for each protocol: a packet socket, a task that answers, one that
// announces, and one that joins the multicast groups in which IPv6 hosts ask.
// They read an immutable set of owned VIPs through an atomic pointer, so
// answering takes no lock while no VIP is held back.
//
// Each port decides for its segment whether a VIP is held back there: a new one
// while others are asked whether they have it and for as long as one does, and
// one that another speaker of the cluster claims, which has the better right to
// it.
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

	"github.com/lodestone-lb/lodestone/speaker/layer2/seal"
	"github.com/lodestone-lb/lodestone/speaker/netstate"
	"github.com/lodestone-lb/lodestone/speaker/plan"
)

// A socket that failed is opened again after the first delay, which doubles
// up to the last one. A port that lived longer than that starts afresh.
const (
	firstRetry = 100 * time.Millisecond
	lastRetry  = 30 * time.Second
)

// defendInterval is how often at most a VIP that somebody else claims is
// defended and the log tells of it (RFC 5227 section 2.4, DEFEND_INTERVAL).
const defendInterval = 10 * time.Second

// ErrStopped is returned by Set when Run has ended.
var ErrStopped = errors.New("the layer-2 announcer has stopped")

var (
	errNoLinkLocal = errors.New("no IPv6 link-local address that can be used")
	errGroups      = errors.New("join IPv6 multicast groups")
)

// Interfaces is the live view of the node's interfaces; netstate.Watcher is
// one.
type Interfaces interface {
	Ready() <-chan struct{}
	// Changed returns a channel that is closed by the next change.
	Changed() <-chan struct{}
	Interfaces() []netstate.Interface
}

// Members tells whether speakers are lost; membership.Task is one.
type Members interface {
	// Whole reports whether all speakers that there should be are alive.
	Whole() bool
	// Crowd returns by how much an interval of each speaker is longer than that of a few
	// speakers, so that all together do no more on the segment. It is at least 1.
	Crowd() int
	// Changed returns a channel that is closed by the next change.
	Changed() <-chan struct{}
}

// Options are what an Announcer needs.
type Options struct {
	Interfaces Interfaces
	// Members may be nil: then no speaker is ever lost.
	Members Members
	// Keys are what the speakers of the cluster share, and nobody else.
	Keys     seal.Keys
	Log      *slog.Logger
	Registry prometheus.Registerer
	// Listen opens sockets. Nil: ListenPacket.
	Listen Listen
	// Received returns how many frames have come in on the interface of that index.
	// Nil: it is not known, and no interface is taken for deaf.
	Received func(index int) (uint64, error)
	// Groups opens sockets that join multicast groups. Nil: OpenGroups.
	Groups func() (GroupSocket, error)
}

// Announcer is the layer-2 announcer: a task with one verb, Set.
type Announcer struct {
	interfaces Interfaces
	members    Members
	seals      seal.Keys
	log        *slog.Logger
	listen     Listen
	openGroups func() (GroupSocket, error)
	received   func(index int) (uint64, error)
	metrics    *metrics
	conflicts  *conflicts

	sets    chan setting
	exited  chan *port
	ready   chan struct{}
	stopped chan struct{}

	// Owned by Run.
	set      map[netip.Addr]plan.Layer2
	vips     owned             // those of set
	groups   []group           // the same by where they are announced
	want     map[portKey]owned // the ports that there should be
	unfit    map[portKey]error // those of want that the interface does not allow
	ports    map[portKey]*port // those that there are
	failures map[portKey]*failure
	fatal    error
	running  sync.WaitGroup // tasks of ports, also of those that were closed

	// Read by everybody, immutable.
	whole     atomic.Bool                  // no speaker is lost
	crowd     atomic.Int64                 // see Members
	own       atomic.Pointer[map[mac]bool] // the node's own hardware addresses
	published atomic.Pointer[state]
}

// owned is a set of VIPs. It is never modified once a port or a state has it.
type owned map[netip.Addr]*ownership

// without returns what is in s and not in other, by address.
func (s owned) without(other owned) []*ownership {
	var rest []*ownership
	for vip, o := range s {
		if other[vip] != o {
			rest = append(rest, o)
		}
	}
	slices.SortFunc(rest, func(a, b *ownership) int { return a.vip.Compare(b.vip) })
	return rest
}

// ownership is one uninterrupted time of owning a VIP; its pointer is its
// identity.
type ownership struct {
	vip     netip.Addr
	since   time.Time
	refresh time.Duration             // see plan.Layer2
	warned  atomic.Pointer[time.Time] // when the last conflict was logged
	home    atomic.Bool               // see plan.Layer2
	apart   atomic.Bool               // as home
	hurry   atomic.Bool               // see plan.Layer2
	// probe is set until the VIP was found free on some interface, if that has
	// to be found out.
	probe   atomic.Bool
	leaving leaving
}

// setting is a call of Set.
type setting struct {
	want map[netip.Addr]plan.Layer2
	done chan struct{}
}

// failure is a port that could not be opened or broke.
type failure struct {
	err   error
	delay time.Duration
	until time.Time
}

// New returns an Announcer that does nothing until it runs.
func New(o Options) *Announcer {
	a := &Announcer{
		interfaces: o.Interfaces,
		members:    o.Members,
		seals:      o.Keys,
		log:        o.Log,
		listen:     o.Listen,
		openGroups: o.Groups,
		received:   o.Received,
		conflicts:  newConflicts(),
		sets:       make(chan setting),
		exited:     make(chan *port),
		ready:      make(chan struct{}),
		stopped:    make(chan struct{}),
		ports:      map[portKey]*port{},
		failures:   map[portKey]*failure{},
	}
	if a.listen == nil {
		a.listen = ListenPacket
	}
	if a.openGroups == nil {
		a.openGroups = OpenGroups
	}
	a.own.Store(&map[mac]bool{})
	a.published.Store(&state{})
	a.metrics = newMetrics(o.Registry, a)
	return a
}

// String names the task.
func (a *Announcer) String() string { return "layer2" }

// Ready is closed once the interfaces are known and Set has its effect at
// once.
func (a *Announcer) Ready() <-chan struct{} { return a.ready }

// Set replaces the whole set of VIPs that this node announces. When it
// returns nil, no packet for a VIP that is no longer in the set will be sent,
// and the announcement of the new ones has begun, or the question whether
// somebody else has them. What keeps a VIP from being
// announced (no such interface, no IPv6 on it, a socket that cannot be opened)
// is no error: Status tells it, and the announcer keeps trying by itself. Set
// waits for Run, and after Run it returns ErrStopped.
func (a *Announcer) Set(ctx context.Context, want map[netip.Addr]plan.Layer2) error {
	s := setting{want, make(chan struct{})}
	select {
	case a.sets <- s:
	case <-a.stopped:
		return ErrStopped
	case <-ctx.Done():
		return fmt.Errorf("set layer-2 announcements: %w", ctx.Err())
	}
	<-s.done // soon: what Run does here never waits for the network
	return nil
}

// Run announces until ctx ends, then closes all sockets. It fails only if no
// socket can ever be opened, see recoverable.
func (a *Announcer) Run(ctx context.Context) error {
	defer close(a.stopped)
	defer a.running.Wait()
	defer a.closeAll()
	changed, synced, members := a.interfaces.Changed(), a.interfaces.Ready(), a.lookForLost()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-synced:
			synced = nil
			a.reconcile(ctx)
			close(a.ready)
		case <-changed:
			changed = a.interfaces.Changed()
			a.reconcile(ctx)
		case <-members:
			members = a.lookForLost()
		case <-a.ConflictsChanged(): // one more may expire
		case <-a.conflicts.expire():
		case <-a.retry():
			a.reconcile(ctx)
		case p := <-a.exited:
			if a.ports[p.key] == p { // or Run closed it meanwhile
				a.closePort(p)
				a.fail(p.key, p.err, time.Since(p.opened))
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

// lookForLost tells the ports whether speakers are lost, and returns what is
// closed when that may have changed.
func (a *Announcer) lookForLost() (changed <-chan struct{}) {
	whole, crowd := true, 1
	if a.members != nil {
		changed, whole, crowd = a.members.Changed(), a.members.Whole(), a.members.Crowd()
	}
	a.crowd.Store(int64(crowd))
	if a.whole.Swap(whole) != whole {
		for _, p := range a.ports {
			wake(p.membersChanged)
		}
	}
	return changed
}

// apply makes want the set of owned VIPs. A VIP that stays keeps its
// ownership, so that only interfaces that are new to it hear of it. It
// returns the set before, and whether something changed.
func (a *Announcer) apply(ctx context.Context, want map[netip.Addr]plan.Layer2) (old owned, changed bool) {
	same := func(a, b plan.Layer2) bool {
		return slices.Equal(a.Interfaces, b.Interfaces) && a.Home == b.Home && a.Apart == b.Apart && a.Leaving == b.Leaving &&
			a.Hurry == b.Hurry && a.Refresh == b.Refresh
	}
	if maps.EqualFunc(a.set, want, same) {
		return a.vips, false
	}
	old, now := a.vips, time.Now()
	a.vips, a.set = make(owned, len(want)), make(map[netip.Addr]plan.Layer2, len(want))
	for vip, l := range want {
		a.set[vip] = plan.Layer2{Interfaces: slices.Clone(l.Interfaces), Home: l.Home, Apart: l.Apart, Hurry: l.Hurry, Leaving: l.Leaving,
			Refresh: l.Refresh}
		o := old[vip]
		switch {
		case o == nil, o.leaving.is() && !l.Leaving: // who comes back is announced anew
			o = &ownership{vip: vip, since: now, refresh: l.Refresh}
			o.probe.Store(l.New || a.conflicts.withheld(vip))
		case o.refresh != l.Refresh && !l.Leaving: // announced now, and from now on each interval
			probe := o.probe.Load()
			o = &ownership{vip: vip, since: o.since, refresh: l.Refresh}
			o.probe.Store(probe)
		}
		if l.Leaving {
			o.leaving.begin()
		}
		o.home.Store(l.Home)
		o.apart.Store(l.Apart)
		o.hurry.Store(l.Hurry)
		a.vips[vip] = o
	}
	a.groups = grouped(a.set, a.vips)
	a.reconcile(ctx)
	return old, true
}

// logTransitions logs what changed hands, in order.
func (a *Announcer) logTransitions(old owned) {
	for _, o := range old.without(a.vips) {
		a.log.Info("withdrawn", "vip", o.vip)
	}
	now := a.published.Load()
	for _, o := range a.vips.without(old) {
		if o.leaving.is() {
			continue
		}
		if v := now.of(o); v.Reason == Probing {
			a.log.Info("looking whether somebody else has the VIP", "vip", o.vip)
		} else if v.Reason != "" {
			text := Reasons()[v.Reason]
			a.log.Warn("owned but not announced: "+text.Cause+" "+text.Cure, "vip", o.vip, "reason", v.Reason, "interfaces", a.set[o.vip].Interfaces)
		} else {
			a.log.Info("announcing", "vip", o.vip, "interfaces", v.Interfaces)
		}
	}
}

// reconcile makes the ports what VIPs and interfaces demand. It closes and
// withdraws before it opens.
func (a *Announcer) reconcile(ctx context.Context) {
	interfaces := a.interfaces.Interfaces()
	own := hardwareAddrs(interfaces)
	a.own.Store(&own)
	a.wanted(interfaces)
	for key, p := range a.ports {
		if vips := a.want[key]; vips != nil && a.unfit[key] == nil {
			p.set(vips)
		} else {
			a.closePort(p)
		}
	}
	maps.DeleteFunc(a.failures, func(key portKey, _ *failure) bool { return a.want[key] == nil || a.unfit[key] != nil })
	for key, vips := range a.want {
		if f := a.failures[key]; a.ports[key] != nil || a.unfit[key] != nil || f != nil && time.Until(f.until) > 0 {
			continue
		}
		if err := a.open(ctx, key, vips); err != nil {
			a.fail(key, err, 0)
		}
	}
	a.publish()
}

// wanted finds the ports that there should be, with their VIPs.
func (a *Announcer) wanted(interfaces []netstate.Interface) {
	want, unfit := map[portKey]owned{}, map[portKey]error{}
	for _, i := range interfaces {
		ip := speaks(i, interfaces)
		for _, g := range a.groups {
			key := portKey{g.protocol, i.Index, i.Name, hardwareAddr(i.HardwareAddr), ip.Index}
			if !suitable(i, key.enslaved(), g.interfaces) {
				continue
			}
			if err := g.protocol.fit(ip); err != nil {
				unfit[key] = err
				if a.unfit[key] == nil {
					a.log.Warn("interface cannot announce", "interface", i.Name, "family", g.protocol.family(), "err", err)
				}
			}
			if want[key] == nil {
				want[key] = g.vips // shared, never modified
			} else {
				both := maps.Clone(want[key])
				maps.Copy(both, g.vips)
				want[key] = both
			}
		}
	}
	a.want, a.unfit = want, unfit
}

// fail records that a port broke after it lived, and when to try again.
func (a *Announcer) fail(key portKey, err error, lived time.Duration) {
	if !recoverable(err) {
		a.fatal = err
	}
	f := a.failures[key]
	if f == nil || lived > lastRetry {
		f = &failure{delay: firstRetry}
		a.log.Warn("interface failed", "interface", key.name, "family", key.protocol.family(), "err", err)
	}
	a.failures[key] = &failure{err: err, delay: min(2*f.delay, lastRetry), until: time.Now().Add(f.delay)}
}

// retry returns a channel that fires when the next failed port is to be
// opened again. Nil: there is none.
func (a *Announcer) retry() <-chan time.Time {
	var next *failure
	for key, f := range a.failures {
		if a.ports[key] == nil && (next == nil || f.until.Before(next.until)) {
			next = f
		}
	}
	if next == nil {
		return nil
	}
	return time.After(time.Until(next.until))
}

// reportConflict counts nothing and logs little: somebody may claim a VIP a
// thousand times a second. It returns whether this is the first conflict of
// the VIP in defendInterval.
func (a *Announcer) reportConflict(o *ownership, c Conflict) (first bool) {
	now, last := time.Now(), o.warned.Load()
	if first = (last == nil || now.Sub(*last) >= defendInterval) && o.warned.CompareAndSwap(last, &now); first {
		who := "foreign host"
		if c.OtherCluster {
			who = "speaker of another cluster"
		}
		message := who + " claims a VIP: find the host by its hardware address, or exclude the address from the pool"
		if !c.Announced {
			message = who + " has the address of a VIP: not announced; find the host by its hardware address, or exclude the address from the pool"
		}
		if c.Silent {
			message = "somebody claims a VIP in the name of another speaker, which does not answer for it: a recorded packet is repeated on " +
				"the segment, or nothing reaches that speaker"
		}
		a.log.Warn(message, "vip", c.VIP, "interface", c.Interface, "hardware_addr", c.HardwareAddr)
	}
	a.conflicts.note(c)
	return first
}

// noteFree notes that nobody else has the VIP.
func (a *Announcer) noteFree(o *ownership) {
	o.probe.Store(false)
	a.conflicts.clear(o.vip)
}

func (a *Announcer) closePort(p *port) {
	p.close()
	delete(a.ports, p.key)
}

func (a *Announcer) closeAll() {
	for _, p := range a.ports {
		a.closePort(p)
	}
	a.vips, a.want = nil, nil
	a.publish()
}

// recoverable is the one place that says which errors of a socket pass: all
// but those that no interface and no time will change.
func recoverable(err error) bool {
	switch {
	case errors.Is(err, errGroups): // a node may be unable to do IPv6, and IPv4 goes on
		return true
	case errors.Is(err, unix.EPERM), errors.Is(err, unix.EACCES): // the process lacks NET_RAW
		return false
	case errors.Is(err, unix.EAFNOSUPPORT), errors.Is(err, unix.EPROTONOSUPPORT): // the kernel lacks packet sockets
		return false
	}
	return true // ENETDOWN, ENODEV, ENXIO, EMFILE, ENOBUFS, ...
}
