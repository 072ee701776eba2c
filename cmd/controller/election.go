package main

import (
	"context"
	"fmt"
	"os"
	"time"

	"github.com/google/uuid"
	"k8s.io/client-go/tools/leaderelection"
	"k8s.io/client-go/tools/leaderelection/resourcelock"
	"k8s.io/cloud-provider/app/config"
	_ "k8s.io/component-base/metrics/prometheus/clientgo" // of the client: leader_election_, rest_client_, workqueue_

	"github.com/lodestone-lb/lodestone/controller/leader"
	"github.com/lodestone-lb/lodestone/controller/servicelb"
	"github.com/lodestone-lb/lodestone/pkg/notify"
)

// election is the leader election, by the framework's flags. The framework
// runs its own for ever and leaves the lease behind when it stops; this one
// gives the lease back.
type election struct {
	// elector is nil when there is no election: --leader-elect=false.
	elector *leaderelection.LeaderElector
	health  *leaderelection.HealthzAdaptor
	// term is for how long this process certainly has the lease.
	term *leader.Term
	// fence holds back the writes of this process, but not those of the election.
	fence *leader.Fence
	// won is closed when this process leads, ended when it does not any more.
	won, ended chan struct{}
	// ctx is the election's: it outlives the tasks of the leader.
	ctx    context.Context
	cancel context.CancelFunc
}

// identity is the name of this process on the Lease. It begins with the name of the pod,
// because pods on the host's network have the node's host name. The rest of it distinguishes a
// restarted process from the one before.
func identity() string {
	name := os.Getenv("POD_NAME")
	if name == "" {
		name, _ = os.Hostname() // for people only
	}
	return name + "_" + uuid.NewString()
}

// unelected returns the election of a process that has not stood for it.
func unelected(lease, renewal time.Duration) *election {
	margin := leader.Margin(lease, renewal, servicelb.PatchTimeout)
	e := &election{term: leader.NewTerm(lease, margin), health: leaderelection.NewLeaderHealthzAdaptor(lease),
		won: make(chan struct{}), ended: make(chan struct{})}
	e.fence = leader.NewFence(e.holds, min(servicelb.PatchTimeout, margin))
	e.ctx, e.cancel = context.WithCancel(context.Background())
	return e
}

// newElection takes the election over from the framework.
func newElection(c *config.CompletedConfig) (*election, error) {
	by := c.ComponentConfig.Generic.LeaderElection
	e := unelected(by.LeaseDuration.Duration, by.RenewDeadline.Duration)
	if !by.LeaderElect {
		return e, nil
	}
	c.ComponentConfig.Generic.LeaderElection.LeaderElect = false
	lock, err := resourcelock.NewFromKubeconfig(by.ResourceLock, by.ResourceNamespace, by.ResourceName,
		resourcelock.ResourceLockConfig{Identity: identity(), EventRecorder: c.EventRecorder},
		c.Kubeconfig, by.RenewDeadline.Duration)
	if err != nil {
		return nil, err
	}
	e.elector, err = leaderelection.NewLeaderElector(leaderelection.LeaderElectionConfig{
		Lock: &leader.Lock{Interface: lock, Term: e.term}, Name: by.ResourceName, WatchDog: e.health, ReleaseOnCancel: true,
		LeaseDuration: by.LeaseDuration.Duration, RenewDeadline: by.RenewDeadline.Duration, RetryPeriod: by.RetryPeriod.Duration,
		Callbacks: leaderelection.LeaderCallbacks{
			OnStartedLeading: func(context.Context) { close(e.won) },
			OnStoppedLeading: func() {},
		},
	})
	if err != nil {
		return nil, fmt.Errorf("--leader-elect-lease-duration %s, --leader-elect-renew-deadline %s, --leader-elect-retry-period %s: %w",
			by.LeaseDuration.Duration, by.RenewDeadline.Duration, by.RetryPeriod.Duration, err)
	}
	e.health.SetLeaderElection(e.elector)
	return e, nil
}

// run stands for election, leads, and returns when it is over.
func (e *election) run() {
	defer close(e.ended)
	if e.elector == nil {
		close(e.won)
		<-e.ctx.Done()
		return
	}
	e.elector.Run(e.ctx)
}

// alive returns an error for a leader that does not renew its lease and has not noticed that
// it lost it.
func (e *election) alive() error {
	if e.over() {
		return nil
	}
	return e.health.Check(nil)
}

// over reports whether this process has led and does not any more.
func (e *election) over() bool { return notify.Closed(e.ended) }

// leads reports whether this process leads.
func (e *election) leads() bool { return notify.Closed(e.won) && !e.over() }

// holds reports whether this process certainly has the lease, because it renewed the lease so
// recently that nobody else can have taken it.
func (e *election) holds() bool {
	return e.elector == nil || e.elector.IsLeader() && e.term.Holds(time.Now())
}

// resign gives the lease back, if this process has it, once none of its writes is under way.
func (e *election) resign() {
	e.fence.Close()
	e.term.Resign()
	e.cancel()
	<-e.ended
}
