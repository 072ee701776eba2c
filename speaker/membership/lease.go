package membership

import (
	"context"
	"fmt"
	"net/netip"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	coordinationinformers "k8s.io/client-go/informers/coordination/v1"
	"k8s.io/client-go/tools/cache"
)

// What marks a speaker's Lease.
const (
	// LeasePrefix and the node's name are the name of a speaker's Lease.
	LeasePrefix = "lodestone-speaker-"
	// LabelComponent keeps other Leases of the namespace, which are renewed
	// all the time, out of the speakers' watch.
	LabelComponent = "lodestone.io/component"
	// AnnotationAddress is where the speaker listens, as address:port.
	AnnotationAddress = "lodestone.io/speaker-address"

	component = "speaker"
)

const (
	// refresh is how often a Lease is written without need, so that people
	// see who is there. Nobody concludes anything from its age.
	refresh = 10 * time.Minute
	// releaseTimeout bounds the wait for the API server when leaving.
	releaseTimeout = time.Second
	// firstRetry and lastRetry bound the wait after a failed write.
	firstRetry, lastRetry = time.Second, time.Minute

	// DefaultSettleTime is how long a speaker among others lives before it is
	// ready, if it did not crash before.
	DefaultSettleTime = 2 * time.Second
	// youth is the age at which a speaker that dies did not die of its start.
	youth = 10 * time.Minute
	// maxCrashes bounds the settle time: 2 s doubled seven times is 256 s.
	maxCrashes = 7
)

func (t *Task) informer() cache.SharedIndexInformer {
	return coordinationinformers.NewFilteredLeaseInformer(t.options.Client, t.options.Namespace, 0, cache.Indexers{},
		func(o *metav1.ListOptions) { o.LabelSelector = LabelComponent + "=" + component })
}

// others returns where the speakers of other nodes listen, by node. A speaker
// that left has released its Lease.
func (t *Task) others(leases []any) map[string]netip.AddrPort {
	others := map[string]netip.AddrPort{}
	for _, l := range leases {
		lease := l.(*coordinationv1.Lease)
		node := holder(lease)
		addr, err := netip.ParseAddrPort(lease.Annotations[AnnotationAddress])
		if err == nil && node != "" && node != t.options.Node && lease.Name == LeasePrefix+node {
			others[node] = addr
		}
	}
	return others
}

func holder(l *coordinationv1.Lease) string {
	if l.Spec.HolderIdentity == nil {
		return ""
	}
	return *l.Spec.HolderIdentity
}

// publish writes our Lease: at the start, when it is gone, and now and then.
// The first answer of the API server tells how often we crashed.
func (t *Task) publish(ctx context.Context, started time.Time, crashes chan<- int) {
	retry := firstRetry
	for {
		n, err := t.write(ctx, started)
		wait := refresh
		if err != nil {
			t.log.Warn("lease not written: speakers that start now may not find this one", "err", err)
			wait, retry = retry, min(2*retry, lastRetry)
		} else {
			retry = firstRetry
			select {
			case crashes <- n:
			default:
			}
		}
		select {
		case <-ctx.Done():
			return
		case <-t.missing:
		case <-time.After(wait):
		}
	}
}

// write creates or updates our Lease and returns how many of our last starts
// ended early and without a clean leave.
func (t *Task) write(ctx context.Context, started time.Time) (crashes int, err error) {
	leases := t.options.Client.CoordinationV1().Leases(t.options.Namespace)
	lease, err := leases.Get(ctx, LeasePrefix+t.options.Node, metav1.GetOptions{})
	exists := err == nil
	if apierrors.IsNotFound(err) {
		lease = &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Name: LeasePrefix + t.options.Node, Namespace: t.options.Namespace}}
	} else if err != nil {
		return 0, fmt.Errorf("get our Lease: %w", err)
	}
	if lease.OwnerReferences, err = t.owner(ctx); err != nil {
		return 0, err
	}
	crashes = t.take(lease, started)
	if exists {
		_, err = leases.Update(ctx, lease, metav1.UpdateOptions{})
	} else {
		_, err = leases.Create(ctx, lease, metav1.CreateOptions{})
	}
	if err != nil {
		return 0, fmt.Errorf("write our Lease: %w", err)
	}
	return crashes, nil
}

// take makes the Lease say that we hold it since we started. Its transitions
// count the starts that ended early, up to this one.
func (t *Task) take(lease *coordinationv1.Lease, started time.Time) (crashes int) {
	acquired := lease.Spec.AcquireTime
	switch {
	case holder(lease) == "" || acquired == nil || started.Sub(acquired.Time) > youth:
	case acquired.Equal(&metav1.MicroTime{Time: started.Truncate(time.Microsecond)}):
		crashes = int(*lease.Spec.LeaseTransitions) // ours already
	case lease.Spec.LeaseTransitions != nil:
		crashes = min(int(*lease.Spec.LeaseTransitions)+1, maxCrashes)
	default:
		crashes = 1
	}
	transitions := int32(crashes)
	lease.Labels = map[string]string{LabelComponent: component}
	if lease.Annotations == nil {
		lease.Annotations = map[string]string{}
	}
	lease.Annotations[AnnotationAddress] = t.options.Address.String()
	lease.Spec.HolderIdentity = &t.options.Node
	lease.Spec.AcquireTime = &metav1.MicroTime{Time: started.Truncate(time.Microsecond)}
	lease.Spec.RenewTime = &metav1.MicroTime{Time: time.Now()}
	lease.Spec.LeaseTransitions = &transitions
	return crashes
}

// owner makes the Lease go when the Node goes.
func (t *Task) owner(ctx context.Context) ([]metav1.OwnerReference, error) {
	nodes, err := t.options.Client.CoreV1().Nodes().List(ctx, metav1.ListOptions{
		FieldSelector: fields.OneTermEqualSelector(metav1.ObjectNameField, t.options.Node).String()})
	if err != nil {
		return nil, fmt.Errorf("find our Node: %w", err)
	}
	for _, n := range nodes.Items {
		if n.Name == t.options.Node {
			return []metav1.OwnerReference{{APIVersion: "v1", Kind: "Node", Name: n.Name, UID: n.UID}}, nil
		}
	}
	return nil, fmt.Errorf("find our Node: the API server knows no node %q", t.options.Node)
}

// release says in our Lease that we left and are not to be looked for.
func (t *Task) release() {
	ctx, cancel := context.WithTimeout(context.Background(), releaseTimeout)
	defer cancel()
	leases := t.options.Client.CoordinationV1().Leases(t.options.Namespace)
	lease, err := leases.Get(ctx, LeasePrefix+t.options.Node, metav1.GetOptions{})
	if err == nil {
		lease.Spec.HolderIdentity, lease.Spec.LeaseTransitions = nil, nil
		_, err = leases.Update(ctx, lease, metav1.UpdateOptions{})
	}
	if err != nil {
		t.log.Warn("lease not released", "err", err)
	}
}
