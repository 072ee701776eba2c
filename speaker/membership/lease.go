package membership

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"reflect"
	"slices"
	"time"

	"golang.org/x/time/rate"
	coordinationv1 "k8s.io/api/coordination/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/tools/cache"

	"github.com/lodestone-lb/lodestone/pkg/annotation"
	"github.com/lodestone-lb/lodestone/pkg/objects"
	"github.com/lodestone-lb/lodestone/pkg/report"
)

const (
	// refresh is how often a Lease is written without need, so that people
	// see who is there. Nobody concludes anything from its age.
	refresh = 10 * time.Minute
	// writeInterval and writeBurst bound how often a Lease is written that somebody
	// else writes, too: two speakers of one node would not end.
	writeInterval, writeBurst = time.Second, 10
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
	if p, ok := obj.(*peer); ok && p.Address.IsValid() {
		return []string{p.Address.Addr().Unmap().String()}, nil
	}
	return nil, nil
}

// peer is what the store keeps of a speaker's Lease, whatever the Lease says: it is
// bounded by report.MaxBytes.
type peer struct {
	metav1.ObjectMeta
	node, holder string
	report.Report
	// Of our own Lease alone: the report as it is written, and whether the rest is not
	// what we write.
	text string
	odd  bool
}

// GetObjectKind and DeepCopyObject make it an object. Nobody changes one.
func (*peer) GetObjectKind() schema.ObjectKind { return schema.EmptyObjectKind }
func (p *peer) DeepCopyObject() runtime.Object { return p }

func (t *Task) informer() cache.SharedIndexInformer {
	return objects.Informer(objects.Leases, t.options.Client, objects.Speakers(t.options.Namespace), objects.View[*coordinationv1.Lease, *peer]{Derive: t.keepLease},
		cache.SharedIndexInformerOptions{Indexers: cache.Indexers{byAddress: addressOf}})
}

func (t *Task) keepLease(l *coordinationv1.Lease) *peer {
	kept := &peer{ObjectMeta: metav1.ObjectMeta{Namespace: l.Namespace, Name: l.Name, UID: l.UID, ResourceVersion: l.ResourceVersion}, holder: holder(l)}
	kept.node, _ = report.NodeOf(l.Name)
	said := report.Of(l.Annotations)
	kept.Report = report.Report{Address: said.Address, Keys: said.Keys, Network: said.Network}
	kept.Conflicts, kept.Gateways = nil, nil // they are for the controller, and no news here
	if kept.node == t.options.Node {
		kept.text = l.Annotations[annotation.Report]
		kept.odd = len(l.Annotations) != 1 || len(l.Labels) != 1 || len(l.OwnerReferences) != 1 || len(l.Finalizers) != 0 || kept.holder != kept.node
	}
	return kept
}

// others returns where the speakers of other nodes listen, by node. A speaker
// that left has released its Lease.
func (t *Task) others(leases []any) map[string]netip.AddrPort {
	others := map[string]netip.AddrPort{}
	for _, l := range leases {
		if p := l.(*peer); p.Address.IsValid() && p.node != "" && p.node != t.options.Node && p.holder == p.node {
			others[p.node] = p.Address
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

// Report has our Lease carry the report from now on. What it does not know stays as
// it was. It is written only if the Lease does not carry it already.
func (t *Task) Report(r report.Report) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.report = r.Over(t.report).Tidy()
	wake(t.rewrite)
}

// ours returns the report that our Lease is to carry. The caller holds mu.
func (t *Task) ours() report.Report {
	r := t.report.Over(t.before)
	r.Address, r.Keys = t.options.Address, t.ring.current().Marks()
	return r
}

// outdated reports whether our Lease does not carry the report, or somebody else wrote
// or deleted it.
func (t *Task) outdated() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.spoiled || t.carried != t.ours().String()
}

// noteLease notes what the Lease says now. Events of those that say the same as before
// come every few minutes, of all speakers.
func (t *Task) noteLease(before, p *peer) {
	if p.node == "" {
		return
	}
	if before == nil || before.holder != p.holder || before.Address != p.Address || !slices.Equal(before.Keys, p.Keys) {
		wake(t.seek)
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if p.node == t.options.Node && t.carried != "" {
		t.noteOwn(p)
		return
	}
	t.noteNetwork(p.node, p.Network)
}

// noteOwn has our Lease written anew if it is not as we wrote it. Nobody learns of our
// node from it but others: what we wrote last is what counts here.
func (t *Task) noteOwn(p *peer) {
	switch {
	case p.text == t.carried && !p.odd:
		t.overwritten = "" // the watch has caught up
	case p.text == t.overwritten && !p.odd: // by us; the watch lags
	default:
		t.spoil()
	}
}

func (t *Task) spoil() {
	t.spoiled = true
	wake(t.rewrite)
}

// noteNetwork records the node's network. The caller holds mu.
func (t *Task) noteNetwork(node string, network report.Network) {
	if before, known := t.networks[node]; !known || !reflect.DeepEqual(before, network) {
		t.networks[node] = network
		t.changed.Notify()
	}
}

// noteDeleted forgets what the Lease said and has it written anew if it is
// ours.
func (t *Task) noteDeleted(p *peer) {
	wake(t.seek)
	t.mu.Lock()
	defer t.mu.Unlock()
	delete(t.unmet, p.node)
	if p.node == t.options.Node {
		t.spoil()
		return
	}
	delete(t.networks, p.node)
	t.changed.Notify()
}

// publish writes our Lease: at the start, when it is gone or the report has
// changed, and now and then. The first answer of the API server tells how
// often we crashed.
func (t *Task) publish(ctx context.Context, started time.Time, crashes chan<- int) {
	retry, pace := firstRetry, rate.NewLimiter(rate.Every(writeInterval), writeBurst)
	for pace.Wait(ctx) == nil {
		n, err := t.write(ctx, started)
		wait := spread(refresh * t.crowd())
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
	t.spoiled = false // what somebody else writes from here on asks for another write
	t.mu.Unlock()
	leases := t.options.Client.CoordinationV1().Leases(t.options.Namespace)
	lease, err := leases.Get(ctx, annotation.SpeakerLeasePrefix+t.options.Node, metav1.GetOptions{})
	exists := err == nil
	if apierrors.IsNotFound(err) {
		lease = &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Name: annotation.SpeakerLeasePrefix + t.options.Node, Namespace: t.options.Namespace}}
	} else if err != nil {
		return 0, fmt.Errorf("get our Lease: %w", err)
	}
	owner, err := t.owner(ctx)
	if err != nil {
		return 0, err
	}
	crashes, said := t.take(lease, started), t.carry(lease)
	lease.OwnerReferences, lease.Finalizers = owner, nil
	if exists {
		_, err = leases.Update(ctx, lease, metav1.UpdateOptions{})
	} else {
		_, err = leases.Create(ctx, lease, metav1.CreateOptions{})
	}
	if err != nil {
		return 0, fmt.Errorf("write our Lease: %w", err)
	}
	said.Conflicts, said.Gateways = nil, nil // as others know us
	t.mu.Lock()
	defer t.mu.Unlock()
	t.noteNetwork(t.options.Node, said.Network)
	return crashes, nil
}

// carry makes the Lease carry our report, and nothing else, and returns it. What the
// first Lease that we see says of the time before our start stays until we know better.
func (t *Task) carry(lease *coordinationv1.Lease) report.Report {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.carried == "" {
		t.before = report.Of(lease.Annotations)
	}
	said := t.ours().Tidy()
	if text := said.String(); text != t.carried {
		t.carried, t.overwritten = text, t.carried
	}
	lease.Labels = map[string]string{annotation.LabelComponent: annotation.ComponentSpeaker}
	lease.Annotations = map[string]string{annotation.Report: t.carried}
	return said
}

// take makes the Lease say that we hold it since we started. Its transitions
// count the starts that ended early, up to this one.
func (t *Task) take(lease *coordinationv1.Lease, started time.Time) (crashes int) {
	acquired := lease.Spec.AcquireTime
	switch {
	case holder(lease) == "" || acquired == nil || started.Sub(acquired.Time) > youth:
	case lease.Spec.LeaseTransitions == nil:
		crashes = 1
	case acquired.Equal(&metav1.MicroTime{Time: started.Truncate(time.Microsecond)}):
		crashes = min(max(int(*lease.Spec.LeaseTransitions), 0), maxCrashes) // ours already
	default:
		crashes = min(max(int(*lease.Spec.LeaseTransitions)+1, 0), maxCrashes)
	}
	transitions := int32(crashes)
	lease.Spec = coordinationv1.LeaseSpec{
		HolderIdentity: &t.options.Node, AcquireTime: &metav1.MicroTime{Time: started.Truncate(time.Microsecond)},
		RenewTime: &metav1.MicroTime{Time: time.Now()}, LeaseTransitions: &transitions,
	}
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

// crowdSize is how many speakers act as often as each alone would: of more, each waits
// longer, so that all together cost the segment and the API server no more.
const crowdSize = 50

// Crowd returns by how much an interval is longer than that of a speaker alone.
func (t *Task) Crowd() int {
	t.mu.Lock()
	defer t.mu.Unlock()
	return max(1, len(t.speakers)/crowdSize)
}

func (t *Task) crowd() time.Duration { return time.Duration(t.Crowd()) }

// spread returns about d, not the same for all.
func spread(d time.Duration) time.Duration { return d/2 + rand.N(d) }
