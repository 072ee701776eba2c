package servicelb

import (
	"cmp"
	"net/netip"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/lodestone-lb/lodestone/controller/quarantine"
	"github.com/lodestone-lb/lodestone/ipam"
	"github.com/lodestone-lb/lodestone/pkg/annotation"
	"github.com/lodestone-lb/lodestone/pkg/kube"
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

// Prime imports what the cluster's Services already hold, older Services
// before younger and before those that are being deleted, and returns the
// duplicates among it. What a Service has given up while nobody looked is its
// own until its object is cleaned: then it rests. The records say which
// addresses do already.
//
// An address that a Service's status and annotation both name is its own,
// whatever the pools say: who may write a Service may not write its status. An
// address that only one of them names (the other was wiped, or another load
// balancer gave it) it gets back if the Service would be given it now if it asked
// for it, and not otherwise: nobody gains anything by writing an annotation. What
// else is in a status is replaced, unless the configuration says whose Services
// are being taken over.
func (l *Ledger) Prime(services []*corev1.Service, records []quarantine.Record) []Conflict {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, svc := range services {
		l.foreign.set(NameOf(svc), l.scope.shown(svc))
	}
	services = slices.DeleteFunc(slices.Clone(services), func(svc *corev1.Service) bool {
		return !l.scope.Covers(svc) && !l.scope.Keeps(svc) && !l.scope.LeftBehind(svc)
	})
	slices.SortFunc(services, func(a, b *corev1.Service) int {
		return cmp.Or(deleting(a)-deleting(b), a.CreationTimestamp.Compare(b.CreationTimestamp.Time), cmp.Compare(a.Namespace, b.Namespace),
			cmp.Compare(a.Name, b.Name))
	})
	var conflicts []Conflict
	for _, svc := range services {
		conflicts = append(conflicts, l.importOne(svc)...)
	}
	l.primed, l.conflicts.since = true, l.Now()
	l.held.records = records
	if l.config != nil {
		l.reconfigure()
		l.held.quarantineRecorded()
		l.confirmAll()
		if l.conflicts.withholdIdle() {
			l.reconfigure()
		}
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
	a, _ := l.open(svc)
	var unreadable *ipam.Refusal
	a.asked, unreadable = l.request(svc)
	a.unreadable = unreadable != nil
	leases, pools := kube.Leases(svc), assignedPools(svc)
	for _, addr := range status {
		if !slices.Contains(assigned, addr) {
			if l.scope.Covers(svc) { // what others give to theirs is no concern of ours
				a.foreign = append(a.foreign, addr)
			}
			continue
		}
		g := ipam.Holding{Owner: a.owner, Addr: addr, Sharing: a.asked.Sharing, Since: since(svc), Asked: pools[addr]}
		if holder, ok := l.held.Restore(g); !ok {
			if deleting(svc) == 0 {
				conflicts = append(conflicts, Conflict{svc, addr, holder.Name})
			}
		} else if on := leases[addr]; on != "" {
			l.leasing.restore(a, on, addr)
		}
	}
	for _, addr := range assigned[:min(len(assigned), ipam.MaxAddresses)] {
		if !slices.Contains(status, addr) {
			a.claims = append(a.claims, addr)
		}
	}
	if deleting(svc) == 1 {
		a.claims, a.foreign = nil, nil
	}
	return conflicts
}

// assignedPools returns the pool of each address that the annotations name. Who
// writes them gains nothing: the name keeps an address that the Service has.
func assignedPools(svc *corev1.Service) map[netip.Addr]string {
	pools := strings.SplitN(svc.Annotations[annotation.AssignedPools], ",", ipam.MaxAddresses+1)
	of := map[netip.Addr]string{}
	for i, text := range strings.SplitN(svc.Annotations[annotation.Assigned], ",", ipam.MaxAddresses+1) {
		addr, err := netip.ParseAddr(strings.TrimSpace(text))
		if err == nil && i < min(len(pools), ipam.MaxAddresses) && len(pools[i]) <= maxName {
			of[addr.Unmap()] = strings.Clone(pools[i])
		}
	}
	return of
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
