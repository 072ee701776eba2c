// Package membership knows which speakers are alive and ready to own VIPs.
//
// Liveness is learnt from peer to peer traffic (memberlist, a SWIM protocol),
// never from the API server and never by comparing clocks of two machines: a
// dead node is noticed within 0.3 s by default, also while the API server is
// down. The traffic is encrypted with a key that all speakers share.
//
// The speakers find each other by Lease objects, one per speaker, from which only
// addresses, keys and networks are read. The parts of the Task, file by file:
//
//	membership.go  starts the parts, which all end together
//	settings.go    the settings of the document, which count until the process ends
//	probe.go       a diagnosis asks all other speakers for an answer
//	apart.go       whether we are apart: we lost the others with the link of our address
//	join.go        when we have joined
//	rejoin.go      lost speakers are tried again, so that partitions heal
//	rotation.go    how the key is replaced; package keys decides
//	carrier.go     which of our links are down
//	gossip.go      memberlist, which notices who dies; package guard seals and opens what it sends
//	leases.go      the Leases of all speakers
//	lease.go       our own Lease
//	table.go       one record per speaker: who is alive, and on which network
//	published.go   what this speaker publishes now
//	unlisted.go    how many speakers without a Lease may have one
//	peer.go        the record
//	metadata.go    what a speaker publishes about itself
//	base.go        what the parts share
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
// again, or they have not answered for joinTimeout. A lost speaker counts again when it
// answers a packet.
package membership

import (
	"cmp"
	"context"
	"log/slog"
	"net/netip"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sync/errgroup"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"

	"github.com/lodestone-lb/lodestone/pkg/config"
	"github.com/lodestone-lb/lodestone/pkg/kube"
	"github.com/lodestone-lb/lodestone/pkg/report"
	"github.com/lodestone-lb/lodestone/speaker/membership/keys"
	"github.com/lodestone-lb/lodestone/speaker/netstate"
)

// DefaultPort is the port on which speakers hear each other, TCP and UDP.
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
	// Interfaces are those of the node, one of which has Address. Nil: its link is always up.
	Interfaces netstate.Interfaces
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
}

// New returns a Task that starts with Run.
func New(o Options) *Task {
	o.SettleTime = cmp.Or(o.SettleTime, DefaultSettleTime)
	o.KeyInterval = cmp.Or(o.KeyInterval, DefaultKeyInterval)
	signal := func() chan struct{} { return make(chan struct{}, 1) }
	b := &base{options: o, log: o.Log, ring: &ring{}, send: signal(), rejoin: signal(), verify: signal(), rewrite: signal()}
	t := &Task{base: b, table: &table{base: b, peers: peers{b.options.Node: {alive: true, network: &report.Network{}}}}}
	t.published = published{t.table}
	t.own = &ownLease{base: b, table: t.table}
	t.leases = &leases{base: b, table: t.table, own: t.own}
	t.gossip = &gossip{base: b, table: t.table, leases: t.leases}
	t.rotation = &rotation{base: b, table: t.table, leases: t.leases}
	t.rejoiner = &rejoiner{base: b, table: t.table, leases: t.leases}
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

// Joined returns whether the speaker has joined the others, or knows that there
// are none, and a text about that for people.
func (t *Task) Joined() (bool, string) { return t.joiner.state() }

// Whole reports whether all speakers that have a Lease are alive. It turns true
// up to lastRejoin late, and is false until the API server has listed the Leases.
func (t *Task) Whole() bool { return t.rejoiner.whole.Load() }

// Report has our Lease carry the report from now on. What it does not know stays as
// it was. It is written only if the Lease does not carry it already.
func (t *Task) Report(r report.Report) { t.own.set(r) }

// SealKeys returns the keys of seals that this speaker believes. It seals with the first
// one. There is none before the speaker knows its cluster's ID.
func (t *Task) SealKeys() [][]byte { return t.ring.sealKeys() }

// Run takes part until ctx ends, then has the others know that it leaves.
func (t *Task) Run(ctx context.Context) error {
	if ok, err := t.readSettings(ctx); err != nil || !ok {
		return err
	}
	if err := t.gossip.listen(); err != nil {
		return err
	}
	defer t.list.Load().Shutdown() //nolint:errcheck // it always returns nil
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return t.discover(ctx) })
	group.Go(func() error { t.gossip.sendMetadata(ctx, t.list.Load().UpdateNode); return nil })
	group.Go(func() error { t.rejoiner.verifyLost(ctx); return nil })
	group.Go(func() error { t.compareSettings(ctx); return nil })
	group.Go(func() error { t.links.watch(ctx); return nil })
	group.Go(func() error { t.leave(ctx); return nil })
	return group.Wait()
}

// discover publishes our Lease, finds the other speakers by theirs, and joins them.
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
		if cache.WaitForCacheSync(ctx.Done(), synced) { // then the content of the Lease from before our start is known
			t.own.publish(ctx, started, crashes)
		}
		t.own.release() // after our last write, which would undo it
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

// leave waits until ctx ends, then leaves: the others take over at once.
func (t *Task) leave(ctx context.Context) {
	<-ctx.Done()
	if err := t.list.Load().Leave(leaveTimeout); err != nil {
		t.log.Warn("left without a message to the other speakers: they notice by themselves", "err", err)
	}
}
