// Package membership knows which speakers are alive and ready to own VIPs.
//
// Liveness is learnt from peer to peer traffic (memberlist, a SWIM protocol),
// never from the API server and never by comparing clocks of two machines: a
// dead node is noticed within 0.3 s by default, also while the API server is
// down. The traffic is encrypted with a key that all speakers share; package keys
// says how it is replaced.
//
// The speakers find each other by Lease objects, one per speaker, which only
// tell addresses. Who is found is joined, who is lost is tried again, so that
// partitions heal.
//
// A speaker has joined once another one has answered, once it is sure that
// there is none, or once those that should be there did not answer for
// joinTimeout. After that it settles: a speaker that dies soon after its start
// must not take its VIPs and drop them each time. It waits for settleTime,
// doubled by each start of the last ones that did not end with a clean leave.
// A speaker without others settles at once: there is nobody who could serve
// in the meantime. So does one, after the first settleTime, while no other one is ready.
//
// A speaker that lost all others with its link is apart until it has met them
// again, as far as they answer soon. Who was lost counts again when it answers a packet.
package membership

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hashicorp/memberlist"
	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sync/errgroup"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"

	"github.com/lodestone-lb/lodestone/pkg/config"
	"github.com/lodestone-lb/lodestone/pkg/kube"
	"github.com/lodestone-lb/lodestone/pkg/notify"
	"github.com/lodestone-lb/lodestone/pkg/report"
	"github.com/lodestone-lb/lodestone/speaker/membership/guard"
	"github.com/lodestone-lb/lodestone/speaker/membership/keys"
)

// DefaultPort is the port that speakers talk to each other on, TCP and UDP.
const DefaultPort = 9744

const (
	// retransmitMult is how often news are passed on, times the logarithm of the
	// speakers. memberlist's 4 are two packets to each of three speakers: where a
	// tenth is lost, a suspect did not hear of it, or was not heard, each ten
	// minutes or so.
	retransmitMult = 10

	joinTimeout = 3 * time.Second
	// leaveTimeout and updateTimeout bound the wait until some other speaker
	// has been told.
	leaveTimeout  = 500 * time.Millisecond
	updateTimeout = 500 * time.Millisecond
	// repeatAfter is when our metadata is sent once more: by then what waited beside it
	// has been sent as often as it is going to be.
	repeatAfter = 500 * time.Millisecond
)

// Config is the configuration in force; kube.ConfigWatcher is one.
type Config interface {
	Current() (*config.Config, kube.State)
	Changed() <-chan struct{}
}

// Options are what a Task needs.
type Options struct {
	// Node is the name of this speaker's node.
	Node string
	// Address is the node's address and the port to listen on.
	Address netip.AddrPort
	// Secret is what it is at the start.
	Secret keys.Secret
	// ReadSecret reads it again. Nil: it does not change.
	ReadSecret func() (keys.Secret, error)
	// Config has the clusterID, which may change, and the settings. Those of the first
	// document that is valid count until the process ends: memberlist cannot change
	// them while it runs.
	Config Config
	// Namespace is where the speakers' Leases are.
	Namespace string
	Client    kubernetes.Interface
	// Interfaces tell whether the link of Address is up. Nil: it always is.
	Interfaces Interfaces
	Log        *slog.Logger
	Registry   prometheus.Registerer
	// SettleTime is how long a speaker lives before it is joined if there are
	// others. Zero: DefaultSettleTime.
	SettleTime time.Duration
	// KeyInterval is how often the key is read again. Zero: DefaultKeyInterval.
	KeyInterval time.Duration
}

// Task is this speaker's membership.
type Task struct {
	options  Options
	settings config.Membership // since Run has read them
	// clusterID is that of the key which Secret and configuration give now: Run sets it,
	// and keepKeys follows it.
	clusterID string
	log       *slog.Logger
	list      atomic.Pointer[memberlist.Memberlist]
	joined    chan struct{} // closed when joined and settled
	tell      chan struct{} // wakes the one who tells others whether we are ready
	seek      chan struct{} // wakes the one who looks for lost speakers
	rewrite   chan struct{} // wakes the one who writes our Lease
	verify    chan struct{} // wakes the one who asks those that were lost
	metrics   *metrics
	ring      *ring
	mu        sync.Mutex
	speakers  map[string]bool        // the alive ones; the value tells who is ready
	doubtful  map[string]*time.Timer // those of them that memberlist takes for dead
	held      map[string]held        // those that memberlist takes for alive and that do not count yet
	// unlisted are the speakers without a Lease that count, and since when; overrun is when
	// it was logged last that there are more.
	unlisted map[string]time.Time
	overrun  time.Time
	unmet    map[string]int            // those that were lost and have not answered since, and how often
	leases   cache.Store               // of all speakers; nil until they are watched
	networks map[string]report.Network // what the Leases say, by node
	down     map[string]string         // the nodes' interfaces that are down, as noteDown takes them
	claims   map[string]claims         // what the nodes own and keep
	views    map[string]view           // what they see of the API server
	changed  notify.Signal
	whole    bool // nobody is lost, see Whole
	status   string
	severed  severance
	ownLink  string        // the interface with our address, also while it has none
	unlike   string        // says that the settings are not the document's, if so
	report   report.Report // what our Lease is to say
	before   report.Report // what it said before we started
	// carried is the text on our Lease as we wrote it last, overwritten the one before
	// until the watch has caught up.
	carried, overwritten string
	spoiled              bool   // somebody else has written or deleted our Lease
	metadata             []byte // ours, as memberlist has it
}

// New returns a Task that starts with Run.
func New(o Options) *Task {
	if o.SettleTime == 0 {
		o.SettleTime = DefaultSettleTime
	}
	if o.KeyInterval == 0 {
		o.KeyInterval = DefaultKeyInterval
	}
	t := &Task{
		options: o, log: o.Log, ring: &ring{},
		joined: make(chan struct{}), tell: make(chan struct{}, 1), seek: make(chan struct{}, 1), rewrite: make(chan struct{}, 1), verify: make(chan struct{}, 1),
		speakers: map[string]bool{o.Node: false}, doubtful: map[string]*time.Timer{}, held: map[string]held{}, unmet: map[string]int{}, unlisted: map[string]time.Time{},
		networks: map[string]report.Network{o.Node: {}}, down: map[string]string{}, claims: map[string]claims{}, views: map[string]view{}, status: "not started",
	}
	t.metrics = newMetrics(o.Registry, t)
	return t
}

// String names the task.
func (t *Task) String() string { return "membership" }

// Ready is closed once the speaker has joined.
func (t *Task) Ready() <-chan struct{} { return t.joined }

// Joined tells whether the speaker has joined the others, or knows that there
// are none, and says it in words.
func (t *Task) Joined() (bool, string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	select {
	case <-t.joined:
		if t.apart() != "" {
			if !t.severed.down.IsZero() {
				return true, fmt.Sprintf("apart: other speakers were lost with the link of %s, which is down", t.options.Address.Addr())
			}
			return true, "apart: " + t.status
		}
		return true, fmt.Sprintf("joined: %d speakers are alive%s", len(t.speakers), t.unlike)
	default:
		return false, t.status
	}
}

// Speakers returns the speakers that are alive, this one included; the value
// tells whether the speaker is ready to own VIPs.
func (t *Task) Speakers() map[string]bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return maps.Clone(t.speakers)
}

// Whole reports whether all speakers that have a Lease are alive. It turns true
// up to lastSeek late, and is false until the API server has listed the Leases.
func (t *Task) Whole() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.whole
}

// setWhole records whether nobody is lost.
func (t *Task) setWhole(whole bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.whole != whole {
		t.whole = whole
		t.changed.Notify()
	}
}

// Networks returns what the Leases say of the networks of nodes, whether their
// speakers are alive or not, and which links are down and which VIPs are kept, as
// the speakers say. A speaker that has joined knows all Leases.
func (t *Task) Networks() map[string]report.Network {
	t.mu.Lock()
	defer t.mu.Unlock()
	networks := maps.Clone(t.networks)
	for node, down := range t.down {
		if n, ok := networks[node]; ok {
			networks[node] = withLinks(n, down)
		}
	}
	for node, v := range t.views {
		if n, ok := networks[node]; ok {
			n.Blind, n.Sick = v.blind, v.sick
			networks[node] = n
		}
	}
	if link := t.apart(); link != "" {
		n := networks[t.options.Node]
		n.Apart = link
		networks[t.options.Node] = n
	}
	for node, c := range t.claims {
		if n, ok := networks[node]; ok {
			n.Claims = c
			networks[node] = n
		}
	}
	return networks
}

// Changed returns a channel that is closed as soon as the answer of Speakers,
// Networks, Joined or Whole changes. Take the channel first, then ask: no change
// is missed.
func (t *Task) Changed() <-chan struct{} { return t.changed.Next() }

// SetReady tells all speakers whether this one is ready to own VIPs. The
// others know some ten milliseconds later.
func (t *Task) SetReady(ready bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.noteReady(t.options.Node, ready) {
		wake(t.tell)
	}
}

// Run takes part until ctx ends, then tells the others that it leaves.
func (t *Task) Run(ctx context.Context) error {
	if ok, err := t.readSettings(ctx); err != nil || !ok {
		return err
	}
	if err := t.listen(); err != nil {
		return err
	}
	defer t.list.Load().Shutdown() //nolint:errcheck // it always returns nil
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return t.discover(ctx) })
	group.Go(func() error { t.tellOthers(ctx, t.list.Load().UpdateNode); return nil })
	group.Go(func() error { t.verifyLost(ctx); return nil })
	group.Go(func() error { t.compareSettings(ctx); return nil })
	group.Go(func() error { t.watchLinks(ctx); return nil })
	group.Go(func() error { return t.leave(ctx) })
	return group.Wait()
}

// listen opens the sockets. Whoever knows our address may talk to us from here.
func (t *Task) listen() error {
	sockets, err := guard.Listen(t.options.Address, t.known, t.metrics.refused.Inc)
	if err != nil {
		return fmt.Errorf("listen for other speakers on %s: %w", t.options.Address, err)
	}
	// The kernel chose the port if none was given.
	t.options.Address = netip.AddrPortFrom(t.options.Address.Addr(), sockets.Address().Port())
	config := t.config(sockets)
	list, err := memberlist.Create(config)
	if err != nil {
		_ = config.Transport.Shutdown()
		return fmt.Errorf("take part in the membership: %w", err)
	}
	t.list.Store(list)
	return nil
}

// known reports whether some speaker's Lease has the address.
func (t *Task) known(source netip.Addr) bool {
	t.mu.Lock()
	leases := t.leases
	t.mu.Unlock()
	if leases == nil {
		return false
	}
	of, err := leases.(cache.Indexer).ByIndex(byAddress, source.String())
	return err == nil && len(of) > 0
}

// tellOthers spreads our metadata when it changes, by update, until memberlist has it:
// where it objects to a suspicion at the same moment it drops it, and repeats what
// was true before. And once more after that: of two messages of one length that wait,
// memberlist 0.7 may forget the older one, because its numbers begin anew whenever its
// queue is empty for a moment.
func (t *Task) tellOthers(ctx context.Context, update func(time.Duration) error) {
	var again <-chan time.Time
	for {
		repeat := true
		select {
		case <-ctx.Done():
			return
		case <-t.tell:
		case <-again:
			repeat = false
		}
		again = nil
		if err := update(updateTimeout); err != nil {
			t.log.Debug("metadata not yet sent", "err", err)
		}
		switch {
		case !t.isSaid():
			wake(t.tell)
		case repeat:
			again = time.After(repeatAfter)
		}
	}
}

// leave waits until ctx ends, then says goodbye: the others take over at once.
func (t *Task) leave(ctx context.Context) error {
	<-ctx.Done()
	if err := t.list.Load().Leave(leaveTimeout); err != nil {
		t.log.Warn("left without telling: others notice by themselves", "err", err)
	}
	t.release()
	return nil
}

// config returns memberlist's settings. What it sends and receives by the transport, the
// guard seals and opens.
func (t *Task) config(transport memberlist.Transport) *memberlist.Config {
	c := memberlist.DefaultLANConfig()
	c.Name = t.options.Node
	c.BindAddr, c.BindPort = t.options.Address.Addr().String(), int(t.options.Address.Port())
	c.AdvertiseAddr, c.AdvertisePort = c.BindAddr, c.BindPort
	c.Transport = guard.New(transport, t.gossipKeys, t.metrics.refused.Inc)
	c.UDPBufferSize -= guard.Overhead
	c.EnableCompression = false // which lets a few bytes become many
	c.ProbeInterval, c.ProbeTimeout = t.settings.ProbeInterval, t.settings.ProbeTimeout
	c.SuspicionMult, c.SuspicionMaxTimeoutMult = t.settings.SuspicionMultiplier, 2
	c.AwarenessMaxMultiplier = 2
	c.GossipInterval = t.settings.GossipInterval
	c.RetransmitMult = retransmitMult
	c.DisableTcpPings = true
	c.TCPTimeout = time.Second
	c.DeadNodeReclaimTime = time.Second // a node may come back with another address
	c.Logger = bridge(t.log)
	c.Delegate = (*delegate)(t)
	c.Alive = (*delegate)(t)
	c.Events = (*events)(t)
	return c
}

// arrive counts the speaker that memberlist has met, unless it was lost before: then
// it has to answer first.
//
// A firewall around one, or around us, may let out packets and in nothing but answers
// of TCP. Each connection makes it known again, and a moment later its silence makes
// it lost: VIPs must not come and go with it.
func (t *Task) arrive(n *memberlist.Node) {
	t.mu.Lock()
	defer t.mu.Unlock()
	_, lost := t.unmet[n.Name]
	switch {
	case t.trust(n.Name):
		t.note(n)
		t.log.Debug("speaker was slow to answer", "node", n.Name)
	case lost:
		t.held[n.Name] = held{*n, time.Now()}
		wake(t.verify)
	default:
		t.count(n)
	}
}

func (t *Task) count(n *memberlist.Node) {
	t.note(n)
	t.log.Info("speaker joined", "node", n.Name)
}

// update records what a speaker says now.
func (t *Task) update(n *memberlist.Node) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if h, ok := t.held[n.Name]; ok {
		t.held[n.Name] = held{*n, h.since}
		return
	}
	if t.note(n) {
		_, down := details(n)
		t.metrics.changes.WithLabelValues("update").Inc()
		t.log.Info("speaker changed", "node", n.Name, "ready", ready(n), "links_down", down)
	}
}

// suspect removes the speaker unless it is trusted within the grace period.
// When this process did not get to run for a while, its timers fire before it
// reads the answers that wait in the socket.
func (t *Task) suspect(name string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if _, ok := t.held[name]; ok {
		delete(t.held, name)
		return
	}
	t.doubtful[name] = time.AfterFunc(t.settings.GracePeriod, func() { t.remove(name) })
}

// trust ends the doubt, if there is one, and reports whether there was.
func (t *Task) trust(name string) bool {
	timer, doubted := t.doubtful[name]
	delete(t.doubtful, name)
	return doubted && timer.Stop()
}

func (t *Task) remove(name string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if _, doubted := t.doubtful[name]; !doubted {
		return // it objected at the last moment
	}
	delete(t.doubtful, name)
	delete(t.speakers, name)
	delete(t.down, name)
	delete(t.claims, name)
	delete(t.views, name)
	t.unmet[name] = 0
	t.severed.lose(time.Now())
	wake(t.tell)
	t.changed.Notify()
	t.log.Info("speaker gone", "node", name)
	wake(t.seek)
}

// say records why the speaker has not joined yet.
func (t *Task) say(format string, args ...any) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.status = fmt.Sprintf(format, args...)
	t.changed.Notify()
}

// wake makes one receive from the channel succeed, now or later.
func wake(ch chan struct{}) {
	select {
	case ch <- struct{}{}:
	default:
	}
}

// events hears from memberlist, which holds its locks meanwhile. What others
// say about this speaker is memberlist's to refute.
type events Task

func (e *events) NotifyJoin(n *memberlist.Node) {
	if n.Name == e.options.Node {
		(*Task)(e).noteSaid(n)
		return
	}
	e.metrics.changes.WithLabelValues("join").Inc()
	(*Task)(e).arrive(n)
}

func (e *events) NotifyUpdate(n *memberlist.Node) {
	if n.Name == e.options.Node {
		(*Task)(e).noteSaid(n)
		return
	}
	(*Task)(e).update(n)
}

func (e *events) NotifyLeave(n *memberlist.Node) {
	if n.Name != e.options.Node {
		e.metrics.changes.WithLabelValues("leave").Inc()
		(*Task)(e).suspect(n.Name)
	}
}
