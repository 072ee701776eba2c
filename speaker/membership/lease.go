package membership

import (
	"context"
	"fmt"
	"maps"
	"net/netip"
	"reflect"
	"strings"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	coordinationinformers "k8s.io/client-go/informers/coordination/v1"
	"k8s.io/client-go/tools/cache"

	"github.com/lodestone-lb/lodestone/pkg/annotation"
	"github.com/lodestone-lb/lodestone/pkg/clusterfacts"
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

// byAddress is the index of the Leases by the address on which a speaker listens.
const byAddress = "address"

func addressOf(obj any) ([]string, error) {
	at, err := netip.ParseAddrPort(obj.(*coordinationv1.Lease).Annotations[annotation.SpeakerAddress])
	if err != nil {
		return nil, nil
	}
	return []string{at.Addr().Unmap().WithZone("").String()}, nil
}

func (t *Task) informer() cache.SharedIndexInformer {
	return coordinationinformers.NewFilteredLeaseInformer(t.options.Client, t.options.Namespace, 0, cache.Indexers{byAddress: addressOf},
		func(o *metav1.ListOptions) {
			o.LabelSelector = annotation.LabelComponent + "=" + annotation.ComponentSpeaker
		})
}

// others returns where the speakers of other nodes listen, by node. A speaker
// that left has released its Lease.
func (t *Task) others(leases []any) map[string]netip.AddrPort {
	others := map[string]netip.AddrPort{}
	for _, l := range leases {
		lease := l.(*coordinationv1.Lease)
		node := holder(lease)
		addr, err := netip.ParseAddrPort(lease.Annotations[annotation.SpeakerAddress])
		if err == nil && node != "" && node != t.options.Node && lease.Name == annotation.SpeakerLeasePrefix+node {
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

// Report has our Lease carry the annotations from now on, beside its own. It
// is written only if it does not carry them already.
func (t *Task) Report(annotations map[string]string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.report = maps.Clone(annotations)
	wake(t.rewrite)
}

// outdated reports whether our Lease was deleted or does not carry the report or
// the keys.
func (t *Task) outdated() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	for name, value := range t.report {
		if carried, ok := t.carried[name]; !ok || carried != value {
			return true
		}
	}
	return t.deleted || t.carried[annotation.MembershipKeys] != t.ring.current().String()
}

// noteLease notes what the Lease says.
func (t *Task) noteLease(l *coordinationv1.Lease) {
	wake(t.seek)
	node, ok := strings.CutPrefix(l.Name, annotation.SpeakerLeasePrefix)
	if !ok {
		return
	}
	network := clusterfacts.ParseNetwork(l.Annotations)
	network.Conflicts = nil // they are for the controller, and no news here
	t.mu.Lock()
	defer t.mu.Unlock()
	if before, known := t.networks[node]; !known || !reflect.DeepEqual(before, network) {
		t.networks[node] = network
		t.changed.Notify()
	}
}

// noteDeleted forgets what the Lease said and has it written anew if it is
// ours.
func (t *Task) noteDeleted(l *coordinationv1.Lease) {
	node := strings.TrimPrefix(l.Name, annotation.SpeakerLeasePrefix)
	t.mu.Lock()
	defer t.mu.Unlock()
	delete(t.networks, node)
	delete(t.unmet, node)
	t.changed.Notify()
	if node == t.options.Node {
		t.deleted = true
		wake(t.rewrite)
	}
}

// publish writes our Lease: at the start, when it is gone or the report has
// changed, and now and then. The first answer of the API server tells how
// often we crashed.
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
		if !t.rest(ctx, wait) {
			return
		}
	}
}

// rest waits until our Lease is to be written and reports whether it is ever.
func (t *Task) rest(ctx context.Context, wait time.Duration) bool {
	timeout := time.After(wait)
	for {
		select {
		case <-ctx.Done():
			return false
		case <-timeout:
			return true
		case <-t.rewrite:
			if t.outdated() {
				return true
			}
		}
	}
}

// write creates or updates our Lease and returns how many of our last starts
// ended early and without a clean leave.
func (t *Task) write(ctx context.Context, started time.Time) (crashes int, err error) {
	t.mu.Lock()
	t.deleted = false // a deletion from here on asks for another write
	t.mu.Unlock()
	leases := t.options.Client.CoordinationV1().Leases(t.options.Namespace)
	lease, err := leases.Get(ctx, annotation.SpeakerLeasePrefix+t.options.Node, metav1.GetOptions{})
	exists := err == nil
	if apierrors.IsNotFound(err) {
		lease = &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Name: annotation.SpeakerLeasePrefix + t.options.Node, Namespace: t.options.Namespace}}
	} else if err != nil {
		return 0, fmt.Errorf("get our Lease: %w", err)
	}
	if lease.OwnerReferences, err = t.owner(ctx); err != nil {
		return 0, err
	}
	crashes = t.take(lease, started)
	if exists {
		lease, err = leases.Update(ctx, lease, metav1.UpdateOptions{})
	} else {
		lease, err = leases.Create(ctx, lease, metav1.CreateOptions{})
	}
	if err != nil {
		return 0, fmt.Errorf("write our Lease: %w", err)
	}
	t.mu.Lock()
	t.carried = lease.Annotations
	t.mu.Unlock()
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
	lease.Labels = map[string]string{annotation.LabelComponent: annotation.ComponentSpeaker}
	if lease.Annotations == nil {
		lease.Annotations = map[string]string{}
	}
	lease.Annotations[annotation.SpeakerAddress] = t.options.Address.String()
	lease.Annotations[annotation.MembershipKeys] = t.ring.current().String()
	t.mu.Lock()
	maps.Copy(lease.Annotations, t.report)
	t.mu.Unlock()
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
	lease, err := leases.Get(ctx, annotation.SpeakerLeasePrefix+t.options.Node, metav1.GetOptions{})
	if err == nil {
		lease.Spec.HolderIdentity, lease.Spec.LeaseTransitions = nil, nil
		_, err = leases.Update(ctx, lease, metav1.UpdateOptions{})
	}
	if err != nil {
		t.log.Warn("lease not released", "err", err)
	}
}
