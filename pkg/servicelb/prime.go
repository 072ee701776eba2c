package servicelb

import (
	"cmp"
	"net/netip"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/lodestone-lb/lodestone/pkg/annotation"
	"github.com/lodestone-lb/lodestone/pkg/kube"
	"github.com/lodestone-lb/lodestone/pkg/released"
)

// Conflict is an address that two Services had at the start. The holder keeps
// it; the other is given another one.
type Conflict struct {
	Service *corev1.Service
	Addr    netip.Addr
	// Holder is "namespace/name" of the Service that keeps the address.
	Holder string
}

// Primed reports whether the ledger knows what the cluster's Services hold.
// Before, nothing may be allocated.
func (l *Ledger) Primed() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.primed
}

// Informed reports whether everything is known that decisions depend on,
// beside the Services: whether there is a configuration, and the facts.
func (l *Ledger) Informed() bool {
	_, state := l.Config.Current()
	ready := true
	if l.Facts != nil {
		_, ready = l.Facts.Current()
	}
	return state.Read && ready
}

// Prime imports what the cluster's Services already hold, older Services
// before younger and before those that are being deleted, and returns the
// duplicates among it. The records say which addresses rest.
//
// An address that a Service's status and annotation both name is its own,
// whatever the pools say. An address that only one of them names (the other
// was wiped, or another load balancer gave it) is its own if a pool open to
// the Service hands it out and nobody else holds it: nobody can claim, say,
// the gateway by writing an annotation.
func (l *Ledger) Prime(services []*corev1.Service, records []released.Record) []Conflict {
	l.mu.Lock()
	defer l.mu.Unlock()
	services = slices.DeleteFunc(slices.Clone(services), func(svc *corev1.Service) bool { return !l.scope.Covers(svc) && !l.scope.Keeps(svc) })
	slices.SortFunc(services, func(a, b *corev1.Service) int {
		return cmp.Or(deleting(a)-deleting(b), a.CreationTimestamp.Compare(b.CreationTimestamp.Time), cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Name, b.Name))
	})
	var conflicts []Conflict
	for _, svc := range services {
		conflicts = append(conflicts, l.importOne(svc)...)
	}
	l.primed, l.primedAt = true, l.Now()
	l.records = records
	if l.config != nil {
		l.reconfigure()
		l.confirmAll()
		l.withholdIdle()
	}
	l.follow()
	return conflicts
}

// importOne gives the Service what is certainly its own and notes what may
// be.
func (l *Ledger) importOne(svc *corev1.Service) (conflicts []Conflict) {
	status, assigned := kube.StatusAddresses(svc), kube.Assigned(svc)
	if len(status)+len(assigned) == 0 {
		return nil
	}
	a := l.open(svc)
	a.asked, _ = l.request(svc)
	leases := kube.Leases(svc)
	for _, addr := range status {
		if !slices.Contains(assigned, addr) {
			a.claims = append(a.claims, addr)
			continue
		}
		if holder, ok := l.alloc.Restore(a.owner, addr, a.asked.Sharing, since(svc)); !ok {
			if deleting(svc) == 0 {
				conflicts = append(conflicts, Conflict{svc, addr, holder.Name})
			}
		} else if on := leases[addr]; on != "" && !a.leased[on].IsValid() {
			a.lease(on, addr)
		}
	}
	for _, addr := range assigned {
		if !slices.Contains(status, addr) {
			a.claims = append(a.claims, addr)
		}
	}
	if deleting(svc) == 1 {
		a.claims = nil
	}
	return conflicts
}

// since is when the Service got what it holds, as far as its object tells.
func since(svc *corev1.Service) time.Time {
	if c := conditionOf(svc); c != nil && c.Status == metav1.ConditionTrue {
		return c.LastTransitionTime.Time
	}
	return svc.CreationTimestamp.Time
}

// deleting is 1 for a Service that is being deleted, else 0.
func deleting(svc *corev1.Service) int {
	if svc.DeletionTimestamp != nil {
		return 1
	}
	return 0
}

// confirmAll decides about all claims, older Services first.
func (l *Ledger) confirmAll() {
	var claimants []*account
	for _, a := range l.accounts {
		if len(a.claims) > 0 {
			claimants = append(claimants, a)
		}
	}
	sortAccounts(claimants)
	for _, a := range claimants {
		for _, addr := range a.claims {
			if p, ok := l.config.PoolOf(addr); ok && p.Free.Contains(addr) && p.Allows(a.asked.Subject) {
				l.alloc.Restore(a.owner, addr, a.asked.Sharing, a.created)
			}
		}
		a.claims = nil
	}
}

// eventDuplicate is the reason of the Event on a Service that loses an address
// which another one has, too.
const eventDuplicate = "DuplicateAddress"

// message says what becomes of the Service.
func (c Conflict) message() string {
	return c.Addr.String() + " also belongs to " + c.Holder + ", which is older and keeps it. " +
		"This Service is given another address (annotation " + annotation.Addresses + " can ask for one)."
}
