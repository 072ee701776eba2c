package membership

import (
	"fmt"
	"net/netip"
	"slices"
	"sync"

	coordinationv1 "k8s.io/api/coordination/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/tools/cache"

	"github.com/lodestone-lb/lodestone/pkg/annotation"
	"github.com/lodestone-lb/lodestone/pkg/notify"
	"github.com/lodestone-lb/lodestone/pkg/objects"
	"github.com/lodestone-lb/lodestone/pkg/report"
)

// lease is what the store keeps of a speaker's Lease. Its size is bounded by report.MaxBytes.
type lease struct {
	objects.Meta
	node, holder string
	report.Report
	// Only of our own Lease: the text of the report, and whether other parts are not as we write them.
	text string
	odd  bool
}

// DeepCopyObject makes it an object. Nobody modifies it.
func (l *lease) DeepCopyObject() runtime.Object { return l }

// byAddress is the index of the Leases by the address on which a speaker listens.
const byAddress = "address"

func addressOf(obj any) ([]string, error) {
	if l, ok := obj.(*lease); ok && l.Address.IsValid() {
		return []string{l.Address.Addr().Unmap().String()}, nil
	}
	return nil, nil
}

// leases watches the Leases of all speakers.
type leases struct {
	*base
	table *table
	own   *ownLease
	mu    sync.Mutex
	store cache.Store // nil until they are watched
}

// watch returns the informer of the Leases, and the function that reports whether the first list is
// recorded.
func (l *leases) watch() (cache.SharedIndexInformer, cache.InformerSynced, error) {
	informer := objects.Informer(objects.Leases, l.options.Client, objects.Speakers(l.options.Namespace),
		objects.View[*coordinationv1.Lease, *lease]{Derive: l.keep},
		cache.SharedIndexInformerOptions{Indexers: cache.Indexers{byAddress: addressOf}})
	handler, err := informer.AddEventHandler(objects.Handler(func(before, after *lease) {
		if after == nil {
			l.forget(before)
		} else {
			l.record(before, after)
		}
	}))
	if err != nil {
		return nil, nil, fmt.Errorf("watch Leases: %w", err)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.store = informer.GetStore()
	return informer, handler.HasSynced, nil
}

// current returns the store, nil until the Leases are watched.
func (l *leases) current() cache.Store {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.store
}

// known reports whether a speaker's Lease has the address.
func (l *leases) known(source netip.Addr) bool {
	store := l.current()
	if store == nil {
		return false
	}
	of, err := store.(cache.Indexer).ByIndex(byAddress, source.String())
	return err == nil && len(of) > 0
}

// listed returns the address on the node's Lease, and whether the node has a Lease. The address is invalid if that cannot
// be read.
func (l *leases) listed(node string) (at netip.AddrPort, listed bool) {
	store := l.current()
	if store == nil {
		return netip.AddrPort{}, false
	}
	of, listed, err := store.GetByKey(l.options.Namespace + "/" + annotation.SpeakerLeasePrefix + node)
	if err != nil || !listed {
		return netip.AddrPort{}, false
	}
	at = of.(*lease).Address
	return netip.AddrPortFrom(at.Addr().Unmap(), at.Port()), true
}

// keep returns what the store keeps of a Lease.
func (l *leases) keep(of *coordinationv1.Lease) *lease {
	kept := &lease{Meta: objects.MetaOf(of), holder: holder(of)}
	kept.node, _ = report.NodeOf(of.Name)
	r := report.Of(of.Annotations)
	kept.Report = report.Report{Address: r.Address, Keys: r.Keys, Network: r.Network}
	kept.Conflicts, kept.Gateways = r.Withheld(), nil // only the controller needs the others, and they change often
	if kept.node == l.options.Node {
		kept.text = of.Annotations[annotation.Report]
		kept.odd = len(of.Annotations) != 1 || len(of.Labels) != 1 || len(of.OwnerReferences) != 1 || len(of.Finalizers) != 0 ||
			kept.holder != kept.node
	}
	return kept
}

func holder(l *coordinationv1.Lease) string {
	if l.Spec.HolderIdentity == nil {
		return ""
	}
	return *l.Spec.HolderIdentity
}

// others returns the addresses of the speakers of other nodes, by node, without those that left: they
// have released their Leases.
func (l *leases) others(all []any) map[string]netip.AddrPort {
	others := map[string]netip.AddrPort{}
	for _, obj := range all {
		if p := obj.(*lease); p.Address.IsValid() && p.node != "" && p.node != l.options.Node && p.holder == p.node {
			others[p.node] = p.Address
		}
	}
	return others
}

// lost returns the addresses of the speakers that have a Lease and are not alive.
func (l *leases) lost(store cache.Store) []string {
	var lost []string
	alive := l.table.Speakers()
	for node, addr := range l.others(store.List()) {
		if _, ok := alive[node]; !ok {
			lost = append(lost, addr.String())
		}
	}
	return lost
}

// record records the content of a Lease. It is also called for writes that changed nothing.
func (l *leases) record(before, now *lease) {
	if now.node == "" {
		return
	}
	if before == nil || before.holder != now.holder || before.Address != now.Address || !slices.Equal(before.Keys, now.Keys) {
		notify.Wake(l.rejoin)
	}
	if now.node == l.options.Node {
		l.table.setListed(true)
		l.own.compare(now)
	} else {
		l.table.setNetwork(now.node, now.Network)
	}
}

// forget forgets the content of a deleted Lease, and has the Lease written anew if it is ours.
func (l *leases) forget(gone *lease) {
	notify.Wake(l.rejoin)
	if gone.node == l.options.Node {
		l.table.setListed(false)
		l.own.spoil()
	} else {
		l.table.forgetLease(gone.node)
	}
}
