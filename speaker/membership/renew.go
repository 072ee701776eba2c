package membership

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync"
	"time"

	"golang.org/x/time/rate"
	coordinationv1 "k8s.io/api/coordination/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/client-go/util/retry"

	"github.com/lodestone-lb/lodestone/pkg/annotation"
	"github.com/lodestone-lb/lodestone/pkg/kube"
	"github.com/lodestone-lb/lodestone/pkg/notify"
	"github.com/lodestone-lb/lodestone/pkg/report"
)

const (
	// refresh is how often a Lease is written without a change, so that people see that the speaker is
	// alive. No program depends on the Lease's age.
	refresh = 10 * time.Minute
	// writeInterval and writeBurst bound how often the Lease is written if somebody else writes it,
	// too: two speakers of one node would write without end.
	writeInterval, writeBurst = time.Second, 10
	// conflictMemory is how long a conflict on the Lease from before the start counts for this speaker.
	conflictMemory = 10 * time.Minute
	// releaseTimeout bounds the wait for the API server when leaving.
	releaseTimeout = time.Second
	// firstRetry and lastRetry bound the wait after a failed write.
	firstRetry, lastRetry = time.Second, time.Minute
	// youth is how old a speaker has to become so that its death does not count as a failed start.
	youth = 10 * time.Minute
	// maxCrashes bounds the settle time: 2 s doubled seven times is 256 s.
	maxCrashes = 7
)

// ownLease writes the Lease of this speaker.
type ownLease struct {
	*base
	table  *table
	mu     sync.Mutex
	report report.Report // what the Lease is to carry
	before report.Report // what it carried before our first write
	late   report.Late
	// carried is the text that we wrote last. overwritten is the text before it, until the watch has
	// caught up.
	carried, overwritten string
	written              bool // at least once
	spoiled              bool // somebody else has written or deleted the Lease
}

// set has the Lease carry the report from now on. Parts that are unset in the report stay as they are.
// The Lease is written only if it does not carry the report already.
func (o *ownLease) set(r report.Report) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.report = r.Over(o.report).Tidy()
	notify.Wake(o.rewrite)
}

// setLate has the Lease carry how late the failure detector was.
func (o *ownLease) setLate(l report.Late) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.late = l
	notify.Wake(o.rewrite)
}

// ours returns the report that our Lease is to carry. The caller holds mu.
func (o *ownLease) ours() report.Report {
	r := o.report.Over(o.before)
	r.Address, r.Keys, r.Late = o.options.Address, o.ring.current().Marks(), o.late
	return r
}

// outdated reports whether our Lease does not carry the report, or somebody else wrote
// or deleted it.
func (o *ownLease) outdated() bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.spoiled || o.carried != o.ours().String()
}

// compare has the Lease written anew if it is not as we wrote it. Before the first write the node's
// network is read from the Lease. After that the network that we wrote last counts.
func (o *ownLease) compare(now *lease) {
	o.mu.Lock()
	defer o.mu.Unlock()
	switch {
	case o.carried == "":
		o.table.setNetwork(now.node, now.Network)
	case now.text == o.carried && !now.odd:
		o.overwritten = "" // the watch has caught up
	case now.text == o.overwritten && !now.odd: // by us; the watch lags
	default:
		o.spoiled = true
		notify.Wake(o.rewrite)
	}
}

// spoil has the Lease written anew.
func (o *ownLease) spoil() {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.spoiled = true
	notify.Wake(o.rewrite)
}

// publish writes our Lease at the start, when somebody else changed it, when the report has changed, and
// every refresh. After the first write it sends how often this speaker crashed.
func (o *ownLease) publish(ctx context.Context, started time.Time, crashes chan<- int) {
	pause, pace := firstRetry, rate.NewLimiter(rate.Every(writeInterval), writeBurst)
	for pace.Wait(ctx) == nil {
		n, err := o.write(ctx, started)
		wait := spread(refresh * time.Duration(o.table.Crowd()))
		if err != nil {
			o.log.Warn("Lease not written: speakers that start now may not find this one, and its loss may be noticed late", "err", err)
			wait, pause = pause, min(2*pause, lastRetry)
		} else {
			pause = firstRetry
			select {
			case crashes <- n:
			default:
			}
		}
		if !o.awaitWrite(ctx, wait) {
			return
		}
	}
}

// awaitWrite waits until our Lease has to be written. It returns false if ctx ends before.
func (o *ownLease) awaitWrite(ctx context.Context, wait time.Duration) bool {
	timeout := time.After(wait)
	for {
		select {
		case <-ctx.Done():
			return false
		case <-timeout:
			return true
		case <-o.rewrite:
			if o.outdated() {
				return true
			}
		}
	}
}

// write creates or updates our Lease, and returns how many of the last starts crashed: they ended early
// and without a clean leave.
func (o *ownLease) write(ctx context.Context, started time.Time) (crashes int, err error) {
	o.mu.Lock()
	o.spoiled = false // if somebody else writes from now on, we have to write again
	o.mu.Unlock()
	leases, name := o.options.Client.CoordinationV1().Leases(o.options.Namespace), annotation.SpeakerLeasePrefix+o.options.Node
	lease, err := leases.Get(ctx, name, metav1.GetOptions{})
	exists := err == nil
	if kube.Missing(err) {
		lease = &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: o.options.Namespace}}
	} else if err != nil {
		return 0, fmt.Errorf("get our Lease: %w", err)
	}
	owner, err := o.owner(ctx)
	if err != nil {
		return 0, err
	}
	crashes, written := o.take(lease, started), o.carry(lease)
	lease.OwnerReferences, lease.Finalizers = owner, nil
	if exists {
		_, err = leases.Update(ctx, lease, metav1.UpdateOptions{})
	} else {
		_, err = leases.Create(ctx, lease, metav1.CreateOptions{})
	}
	if err != nil {
		return 0, fmt.Errorf("write our Lease: %w", err)
	}
	o.mu.Lock()
	o.written = true
	o.mu.Unlock()
	written.Conflicts, written.Gateways = o.withheldBefore(started), nil
	o.table.setNetwork(o.options.Node, written.Network)
	o.table.setListed(true)
	return crashes, nil
}

// carry makes the Lease carry our report and nothing else, and returns the report. Parts that are still
// unknown stay as they were before our start.
func (o *ownLease) carry(lease *coordinationv1.Lease) report.Report {
	o.mu.Lock()
	defer o.mu.Unlock()
	if !o.written {
		o.before = report.Of(lease.Annotations)
	}
	r := o.ours().Tidy()
	if text := r.String(); text != o.carried {
		o.carried, o.overwritten = text, o.carried
	}
	lease.Labels = map[string]string{annotation.LabelComponent: annotation.ComponentSpeaker}
	lease.Annotations = map[string]string{annotation.Report: o.carried}
	return r
}

// withheldBefore returns the conflicts that this node's last speaker has left, for as long as a speaker remembers its own.
func (o *ownLease) withheldBefore(started time.Time) []report.Conflict {
	o.mu.Lock()
	defer o.mu.Unlock()
	if time.Since(started) > conflictMemory {
		return nil
	}
	return o.before.Withheld()
}

// take makes this node the Lease's holder since the start, and returns how many of the last starts
// crashed. The Lease's transitions count them.
func (o *ownLease) take(lease *coordinationv1.Lease, started time.Time) (crashes int) {
	acquired, renewed, before := lease.Spec.AcquireTime, lease.Spec.RenewTime, lease.Spec.LeaseTransitions
	switch {
	case holder(lease) == "" || acquired == nil:
	case before != nil && acquired.Equal(&metav1.MicroTime{Time: started.Truncate(time.Microsecond)}):
		crashes = min(max(int(*before), 0), maxCrashes) // ours already
	case started.Sub(acquired.Time) > youth:
	case renewed != nil && renewed.Sub(acquired.Time) > youth: // now the clock may be behind, as at a boot without a battery
	case before == nil:
		crashes = 1
	default:
		crashes = min(max(int(*before)+1, 0), maxCrashes)
	}
	lease.Spec = coordinationv1.LeaseSpec{
		HolderIdentity: &o.options.Node, AcquireTime: &metav1.MicroTime{Time: started.Truncate(time.Microsecond)},
		RenewTime: &metav1.MicroTime{Time: time.Now()}, LeaseTransitions: new(int32(crashes)),
	}
	return crashes
}

// owner returns the reference to our Node, so that the Lease is deleted with the Node.
func (o *ownLease) owner(ctx context.Context) ([]metav1.OwnerReference, error) {
	nodes, err := o.options.Client.CoreV1().Nodes().List(ctx, metav1.ListOptions{
		FieldSelector: fields.OneTermEqualSelector(metav1.ObjectNameField, o.options.Node).String()})
	if err != nil {
		return nil, fmt.Errorf("find our Node: %w", err)
	}
	for _, n := range nodes.Items {
		if n.Name == o.options.Node {
			return []metav1.OwnerReference{{APIVersion: "v1", Kind: "Node", Name: n.Name, UID: n.UID}}, nil
		}
	}
	return nil, fmt.Errorf("find our Node: the API server knows no node %q", o.options.Node)
}

// release gives our Lease up, so that nobody looks for this speaker, which has left.
func (o *ownLease) release() {
	ctx, cancel := context.WithTimeout(context.Background(), releaseTimeout)
	defer cancel()
	leases := o.options.Client.CoordinationV1().Leases(o.options.Namespace)
	// An earlier write whose answer we did not wait for may arrive in between.
	err := retry.RetryOnConflict(retry.DefaultRetry, func() error {
		lease, err := leases.Get(ctx, annotation.SpeakerLeasePrefix+o.options.Node, metav1.GetOptions{})
		if err != nil {
			return err
		}
		lease.Spec.HolderIdentity, lease.Spec.LeaseTransitions = nil, nil
		_, err = leases.Update(ctx, lease, metav1.UpdateOptions{})
		return err
	})
	if err != nil {
		o.log.Warn("Lease not released", "err", err)
	}
}

// spread returns a random duration around d.
func spread(d time.Duration) time.Duration { return d/2 + rand.N(d) }
