// Package membership knows which speakers are alive and ready to own VIPs.
//
// memberlist, a SWIM protocol, keeps the membership: without the API server, and without comparing the clocks of
// machines. Package detector finds within 0.15 s by default which speaker is lost; memberlist finds those that
// only its packets do not reach, and those of v0.1.0. The traffic is encrypted, and heartbeats are sealed, with a
// key that all speakers share.
//
// The speakers find each other by Lease objects, one per speaker. Only addresses, keys and networks are
// read from them. The files, each with a part of the Task:
//
//	membership.go  Task: starts the parts, which all end together
//	settings.go    the settings of the first document, which count until the process ends
//	probe.go       asks all other speakers for an answer, for a diagnosis
//	apart.go       whether this speaker is apart: it lost others with the link of its address
//	join.go        when this speaker has joined
//	rejoin.go      tries to reach lost speakers again, so that partitions heal
//	rotation.go    replaces the key; package keys decides how
//	carrier.go     which links of this node are down
//	gossip.go      memberlist, whose messages package guard seals and opens
//	nodeloss.go    the failure detector: who takes part, and what follows when a node is lost
//	leases.go      the Leases of all speakers
//	renew.go       writes our own Lease, renews it, and gives it up
//	alive.go       one record per speaker: whether it is alive, and its network
//	published.go   what this speaker publishes now
//	unlisted.go    bounds how many speakers without a Lease count
//	peer.go        the type of a record
//	metadata.go    the encoding of what a speaker publishes
//	base.go        what the parts share
//	metrics.go     the metrics
//
// A speaker has joined when it has met another speaker, when it is sure that there is none, or when the
// others have not answered for joinTimeout. Then it settles, so that a speaker that crashes soon after
// each start does not take its VIPs and drop them each time. It settles for settleTime, doubled for each
// of the last starts that crashed. It settles at once if there are no others, and after the first
// settleTime if no other speaker is ready: otherwise nobody would announce the VIPs.
//
// A speaker that has lost others with its link is apart until it has met them again, or they have not
// answered for joinTimeout. A lost speaker counts again when it answers a packet.
package membership

import (
	"cmp"
	"context"
	"log/slog"
	"math/rand/v2"
	"net/netip"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sync/errgroup"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"

	"github.com/lodestone-lb/lodestone/pkg/config"
	"github.com/lodestone-lb/lodestone/pkg/diagnose"
	"github.com/lodestone-lb/lodestone/pkg/kube"
	"github.com/lodestone-lb/lodestone/pkg/loglimit"
	"github.com/lodestone-lb/lodestone/pkg/report"
	"github.com/lodestone-lb/lodestone/speaker/membership/keys"
	"github.com/lodestone-lb/lodestone/speaker/netstate"
)

// DefaultPort is the speakers' port, TCP and UDP.
const DefaultPort = 9744

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
	// Secret is the Secret at the start.
	Secret keys.Secret
	// ReadSecret reads the Secret again. Nil: it does not change.
	ReadSecret func() (keys.Secret, error)
	// Config has the clusterID, which may change, and the settings. Those of memberlist in the first valid
	// document count until the process ends, because memberlist cannot change them while it runs.
	Config Config
	// Namespace is where the speakers' Leases are.
	Namespace string
	Client    kubernetes.Interface
	// Interfaces are the node's interfaces, one of which has Address. Nil: its link is always up.
	Interfaces netstate.Interfaces
	Log        *slog.Logger
	Registry   prometheus.Registerer
	// SettleTime is how long a speaker lives before it has joined, if there are others. Zero:
	// DefaultSettleTime.
	SettleTime time.Duration
	// KeyInterval is how often the key is read again. Zero: DefaultKeyInterval.
	KeyInterval time.Duration
	// Zero: the constants of the same names. Tests on a busy machine wait longer.
	joinTimeout, meetTimeout, tcpTimeout, keyTimeout time.Duration
}

// Task is this speaker's membership.
type Task struct {
	*base
	*table
	published
	joiner   *joiner
	link     *ownLink
	links    *allLinks
	rejoiner *rejoiner
	rotation *rotation
	leases   *leases
	own      *ownLease
	gossip   *gossip
	beats    *detection
}

// New returns a Task that starts with Run.
func New(o Options) *Task {
	o.SettleTime = cmp.Or(o.SettleTime, DefaultSettleTime)
	o.KeyInterval = cmp.Or(o.KeyInterval, DefaultKeyInterval)
	o.joinTimeout, o.meetTimeout = cmp.Or(o.joinTimeout, joinTimeout), cmp.Or(o.meetTimeout, meetTimeout)
	o.tcpTimeout, o.keyTimeout = cmp.Or(o.tcpTimeout, tcpTimeout), cmp.Or(o.keyTimeout, keyTimeout)
	signal := func() chan struct{} { return make(chan struct{}, 1) }
	b := &base{options: o, log: loglimit.Logger(o.Log), ring: &ring{}, send: signal(), rejoin: signal(), verify: signal(),
		rewrite: signal()}
	t := &Task{base: b, table: &table{base: b, peers: peers{b.options.Node: {alive: true, network: &report.Network{}}}}}
	t.published = published{t.table}
	t.own = &ownLease{base: b, table: t.table}
	t.leases = &leases{base: b, table: t.table, own: t.own}
	t.gossip = &gossip{base: b, table: t.table, leases: t.leases}
	t.beats = &detection{base: b, table: t.table, own: t.published, lease: t.own}
	t.rotation = &rotation{base: b, table: t.table, leases: t.leases}
	t.rejoiner = &rejoiner{base: b, table: t.table, leases: t.leases, gossip: t.gossip}
	t.joiner = &joiner{base: b, table: t.table, leases: t.leases, rotation: t.rotation, joined: make(chan struct{}), status: "not started"}
	t.link = &ownLink{base: b, table: t.table, leases: t.leases, joiner: t.joiner}
	t.links = &allLinks{base: b, table: t.table, own: t.published}
	b.metrics = newMetrics(o.Registry, t)
	return t
}

// String names the task.
func (t *Task) String() string { return "membership" }

// Ready is closed once the speaker has joined.
func (t *Task) Ready() <-chan struct{} { return t.joiner.joined }

// Joined returns whether the speaker has joined, and a text about that for people.
func (t *Task) Joined() (bool, string) { return t.joiner.state() }

// Whole reports whether all speakers that have a Lease are alive. It becomes true up to lastRejoin late,
// and is false until the API server has listed the Leases.
func (t *Task) Whole() bool { return t.rejoiner.whole.Load() }

// Report has our Lease carry the report from now on. Parts that are unset in the report stay as they
// are. The Lease is written only if it does not carry the report already.
func (t *Task) Report(r report.Report) { t.own.set(r) }

// Detection returns how the failure detector fares. Nil: it does not run.
func (t *Task) Detection() *diagnose.Detection { return t.beats.diagnosis() }

// SealKeys returns the keys of seals that this speaker accepts. It seals with the first one. There is
// none before the speaker knows the clusterID.
func (t *Task) SealKeys() [][]byte { return t.ring.sealKeys() }

// Run takes part in the membership until ctx ends, then leaves.
func (t *Task) Run(ctx context.Context) error {
	if ok, err := t.readSettings(ctx); err != nil || !ok {
		return err
	}
	if err := t.gossip.listen(); err != nil {
		return err
	}
	defer t.list.Load().Shutdown() //nolint:errcheck // it always returns nil
	if err := t.beats.listen(rand.Uint64() | 1); err != nil {
		return err
	}
	group, ctx := errgroup.WithContext(ctx)
	left, leave := context.WithCancel(context.WithoutCancel(ctx))
	group.Go(func() error { return t.beats.run(left) }) // until the others know that this speaker leaves
	group.Go(func() error { return t.discover(ctx) })
	group.Go(func() error { t.gossip.sendMetadata(ctx, t.list.Load().UpdateNode); return nil })
	group.Go(func() error { t.rejoiner.verifyLost(ctx); return nil })
	group.Go(func() error { t.compareSettings(ctx); return nil })
	group.Go(func() error { t.links.watch(ctx); return nil })
	group.Go(func() error { t.leave(ctx); leave(); return nil })
	return group.Wait()
}

// discover publishes our Lease, finds the other speakers by their Leases, and joins them.
func (t *Task) discover(ctx context.Context) error {
	started, crashes := time.Now(), make(chan int, 1)
	informer, synced, err := t.leases.watch()
	if err != nil {
		return err
	}
	store := informer.GetStore()
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { informer.RunWithContext(ctx); return nil })
	group.Go(func() error {
		if cache.WaitForCacheSync(ctx.Done(), synced) { // then our Lease from before our start is known
			t.own.publish(ctx, started, crashes)
		}
		t.own.release() // after our last write, which would take the Lease again
		return nil
	})
	group.Go(func() error {
		t.joiner.setStatus("waiting for the API server to list the speakers")
		if !cache.WaitForCacheSync(ctx.Done(), synced) {
			return nil
		}
		group.Go(func() error { t.joiner.enter(ctx, store, started, crashes); return nil })
		group.Go(func() error { t.link.watch(ctx, store); return nil })
		group.Go(func() error { t.rotation.keep(ctx, store); return nil })
		t.rejoiner.joinLost(ctx, store)
		return nil
	})
	return group.Wait()
}

// leave waits until ctx ends, then leaves, so that the others take over at once.
func (t *Task) leave(ctx context.Context) {
	<-ctx.Done()
	if err := t.list.Load().Leave(leaveTimeout); err != nil {
		t.log.Warn("left without a message to the other speakers: they will notice it themselves", "err", err)
	}
}
