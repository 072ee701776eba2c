package membership

import (
	"context"
	"fmt"
	"sync"
	"time"

	"k8s.io/client-go/tools/cache"

	"github.com/lodestone-lb/lodestone/pkg/notify"
)

const (
	joinTimeout = 3 * time.Second
	// keyTimeout is how long a starting speaker waits at least for speakers that use another key. A key reaches all
	// nodes within that time.
	keyTimeout = 2 * time.Minute
	// A starting speaker waits at most arrivalTime for each of the others, and at most lastArrival for
	// all. Up to 300 speakers arrive during the other waits.
	arrivalTime, lastArrival = 10 * time.Millisecond, 10 * time.Second

	// DefaultSettleTime is how long a speaker lives before it is ready, if there are others and it did
	// not crash before.
	DefaultSettleTime = 2 * time.Second
)

// joiner decides when this speaker has joined.
type joiner struct {
	*base
	table    *table
	leases   *leases
	rotation *rotation
	joined   chan struct{} // closed when joined and settled
	mu       sync.Mutex
	status   string // why it has not joined yet
	unlike   string // a remark if the document has other settings than this speaker
}

// state returns whether the speaker has joined, and a text about that for people.
func (j *joiner) state() (bool, string) {
	alive, apart, down := j.table.summary()
	j.mu.Lock()
	defer j.mu.Unlock()
	switch {
	case !notify.Closed(j.joined):
		return false, j.status
	case apart && down:
		return true, fmt.Sprintf("apart: other speakers were lost with the link of %s, which is down", j.options.Address.Addr())
	case apart:
		return true, "apart: " + j.status
	}
	return true, fmt.Sprintf("joined: %d speakers are alive%s", alive, j.unlike)
}

// setStatus records why the speaker has not joined yet.
func (j *joiner) setStatus(format string, args ...any) {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.status = fmt.Sprintf(format, args...)
	j.changed.Notify()
}

// enter waits until the speaker has joined and settled, and declares it joined.
func (j *joiner) enter(ctx context.Context, store cache.Store, started time.Time, crashes <-chan int) {
	j.awaitKey(ctx, store)
	others, giveUp := len(j.leases.others(store.List())), time.After(j.options.joinTimeout)
	met := time.Now()
	if others > 0 && j.meet(ctx, others, giveUp) {
		j.settle(ctx, started, crashes, giveUp)
	}
	j.awaitMost(ctx, others, met.Add(min(time.Duration(others)*arrivalTime, lastArrival)))
	if ctx.Err() != nil {
		return
	}
	j.mu.Lock()
	defer j.mu.Unlock()
	close(j.joined)
	j.changed.Notify()
}

// awaitKey waits until this speaker and all others understand each other. While the key is replaced,
// some may not have read it yet. A speaker that joined without them would claim their VIPs. But a few speakers with
// another key must not keep all others from starting. So after keyTimeout this speaker goes on if it has met more
// speakers with a Lease than there are with another key, which do not understand the met ones either.
func (j *joiner) awaitKey(ctx context.Context, store cache.Store) {
	until := time.Now().Add(j.options.keyTimeout)
	for waited := false; ctx.Err() == nil; waited = true {
		nodes := j.rotation.strangers(ctx, store.List())
		if len(nodes) == 0 {
			return
		}
		if len(nodes) < j.metWithLease() && !time.Now().Before(until) {
			j.log.Warn("joining without speakers that use another membership key: they do not change to the key of the Secret and the clusterID",
				"nodes", nodes)
			return
		}
		j.setStatus("waiting for %d speakers that use another membership key, one on node %s: "+
			"each changes when all have read the Secret and the clusterID, within two minutes", len(nodes), nodes[0])
		if !waited {
			j.log.Warn("waiting for speakers that use another membership key, until they change to the key of the Secret and the clusterID",
				"nodes", nodes)
		}
		select {
		case <-ctx.Done():
		case <-time.After(j.options.KeyInterval):
		}
	}
}

// metWithLease returns how many other speakers are alive and have a Lease.
func (j *joiner) metWithLease() (n int) {
	speakers, networks := j.table.All()
	delete(speakers, j.options.Node)
	for node := range speakers {
		if _, has := networks[node]; has {
			n++
		}
	}
	return n
}

// meet waits until this speaker has met another one, and reports whether it has.
func (j *joiner) meet(ctx context.Context, others int, giveUp <-chan time.Time) bool {
	j.setStatus("joining %d other speakers", others)
	met := j.await(ctx, giveUp, func() bool { return j.table.alive() > 1 })
	if !met && ctx.Err() == nil {
		j.log.Warn("no other speaker answers, going on alone: "+
			"is the port open between nodes, for TCP and UDP, and the key the same everywhere?",
			"others", others, "port", j.options.Address.Port())
	}
	return met
}

// settle waits until the speaker has lived long enough to be relied on. It waits longer than SettleTime
// only while another speaker is ready: otherwise nobody would announce the VIPs.
func (j *joiner) settle(ctx context.Context, started time.Time, crashes <-chan int, giveUp <-chan time.Time) {
	crashed := 0
	select {
	case crashed = <-crashes:
	case <-giveUp: // the API server does not answer
	case <-ctx.Done():
	}
	settle := j.options.SettleTime << crashed
	j.setStatus("joined %d other speakers, settling for %s after %d crashes", j.table.alive()-1, settle, crashed)
	select {
	case <-time.After(time.Until(started.Add(j.options.SettleTime))):
	case <-ctx.Done():
		return
	}
	j.await(ctx, at(started.Add(settle)), func() bool { return !j.table.othersReady() })
}

// awaitMost waits until half of the others are alive, or one of them is ready, but not beyond until.
// Without it, after a power cut the first of many speakers would announce all VIPs, and each speaker
// that follows would take its part over.
func (j *joiner) awaitMost(ctx context.Context, others int, until time.Time) {
	most := func() bool { return 2*(j.table.alive()-1) >= others || j.table.othersReady() }
	if !most() {
		j.setStatus("waiting for half of %d other speakers, at most for %s", others, time.Until(until).Round(time.Second))
		j.await(ctx, at(until), most)
	}
}

// setUnlike records and logs whether the document has other settings than this speaker.
func (j *joiner) setUnlike(unlike bool) {
	text := ""
	if unlike {
		text = "; membership settings have changed: restart the speakers, one after another"
	}
	j.mu.Lock()
	differs := j.unlike != text
	if j.unlike = text; differs {
		j.changed.Notify()
	}
	j.mu.Unlock()
	if differs && unlike {
		j.log.Warn("membership settings have changed and wait for a restart of the speakers",
			"help", "kubectl -n "+j.options.Namespace+" rollout restart daemonset/lodestone-speaker")
	}
}
