package ledger

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/lodestone-lb/lodestone/controller/quarantinestore"
	"github.com/lodestone-lb/lodestone/ipam"
	"github.com/lodestone-lb/lodestone/pkg/annotation"
	"github.com/lodestone-lb/lodestone/pkg/compat"
	"github.com/lodestone-lb/lodestone/pkg/config"
	"github.com/lodestone-lb/lodestone/pkg/kube"
)

// takeover is what is known of addresses that a Service had before the ledger knew it.
type takeover struct {
	// foreign are those in the Service's status that another load balancer gave and that it does
	// not hold. obstacle is why not. Nil: it was not tried yet.
	foreign  []netip.Addr
	obstacle *ipam.Refusal
	// claims are those that only the annotation names, as given by Lodestone. Whether the
	// Service may have them depends on the configuration.
	claims []netip.Addr
	// unreadable is set when the request cannot be read. All claims are then kept.
	unreadable bool
	// adopted are those that it was given because they were in its status.
	adopted []netip.Addr
	// shown is set while its object shows what it holds, or has before a change.
	shown bool
}

// takesOver reports whether Services of other load balancers are left alone until they can be
// taken over with their addresses. Without pools they always are, because there are no other
// addresses for them.
func takesOver(cfg *config.Config) bool {
	return cfg == nil || len(cfg.Pools) == 0 || len(cfg.Compatibility) > 0
}

// takeOver gives a Service that holds nothing, or nothing that its object has shown, what another load balancer wrote into its
// status; and at the first look, too, what it had by its annotation: it was restored
// from a backup, or created again from its manifest. It gets nothing that it would not be
// given on request.
func (l *Ledger) takeOver(a *account, req ipam.Request, svc *corev1.Service, first bool, now time.Time) {
	a.foreign, a.obstacle = nil, nil
	if takesOver(l.Config) && !a.shown && len(kube.Assigned(svc)) == 0 && len(l.Foreign(svc)) > 0 {
		// It was given what it holds when its object, as far as it was known, had no address yet, or another one.
		l.noteFreed(slices.Concat(l.held.Release(a.leaving.UID, now), l.held.Release(a.owner.UID, now)), now)
	}
	if !first && !takesOver(l.Config) || req.Renumber || len(l.held.Holds(a.owner.UID))+len(l.held.Holds(a.leaving.UID)) > 0 {
		return
	}
	if takesOver(l.Config) {
		a.foreign = kube.Foreign(svc)
	}
	if first {
		a.claims = kube.Assigned(svc)
	}
	if l.Config != nil {
		l.held.confirm(a, req, takesOver(l.Config), now)
	}
}

// confirmAll decides about the addresses that Services had before, older Services first. It
// runs before any new address is given.
func (h *holdings) confirmAll(accounts map[string]*account, takesOver bool, now time.Time) {
	var claimants []*account
	for _, a := range accounts {
		if len(a.claims)+len(a.foreign) > 0 {
			claimants = append(claimants, a)
		}
	}
	sortAccounts(claimants)
	for _, a := range claimants {
		h.confirm(a, a.asked, takesOver, now)
	}
}

// confirm gives the Service what it had before, as far as a request for it would be met. It
// gets the addresses of another load balancer all together or not at all. It gets each claimed
// address that its request would keep. A request that cannot be read keeps everything.
func (h *holdings) confirm(a *account, req ipam.Request, takesOver bool, now time.Time) {
	if takesOver {
		h.adopt(a, req, now)
	} else {
		a.claims, a.foreign = slices.Concat(a.foreign, a.claims), nil
	}
	for _, addr := range a.claims {
		otherFamily := func(b netip.Addr) bool { return b.Is4() != addr.Is4() }
		has := slices.DeleteFunc(Addrs(h.Holds(a.owner.UID)), otherFamily)
		asks := slices.DeleteFunc(slices.Clone(req.Addresses), otherFamily)
		kept := slices.Contains(asks, addr) || len(asks) == 0 && len(has) < max(1, req.Count)
		if kept || a.unreadable {
			h.Claim(req, []netip.Addr{addr}, a.created, now)
		}
	}
	a.claims = nil
}

// adopt gives the Service all that another load balancer gave it, or nothing.
func (h *holdings) adopt(a *account, req ipam.Request, now time.Time) {
	if a.obstacle = nil; len(a.foreign) == 0 {
		return
	}
	if r := h.Claim(req, a.foreign, a.created, now); r != nil {
		a.obstacle = r.Behind(r.Reason, fmt.Sprintf("another load balancer has given it %s, which stays in the status until Lodestone can "+
			"give it, too, or the Service asks for another address (%s): ", kube.JoinAddrs(a.foreign), moving))
		return
	}
	a.foreign, a.adopted = nil, append(a.adopted, a.foreign...)
}

// Start is what a controller has read when it starts.
type Start struct {
	Situation
	Services []*corev1.Service
	// NamespaceLabels returns the labels of a namespace.
	NamespaceLabels func(namespace string) map[string]string
	// Records are the addresses in quarantine.
	Records []quarantinestore.Record
}

// Duplicate is an address that two Services had at the start. The holder keeps
// it; the other is given another one.
type Duplicate struct {
	Service *corev1.Service
	Addr    netip.Addr
	// Holder is "namespace/name" of the Service that keeps the address.
	Holder string
}

// Prime imports what the cluster's Services already hold, older Services before younger and
// before those that are being deleted, and returns the duplicates among it. An address that a
// Service gave up while no controller ran stays its own until its object is cleaned, and goes
// into quarantine then.
//
// An address that a Service's status and annotation both name is its own, whatever the pools
// are, because users who may write a Service may not write its status. An address that only
// one of them names (the other was wiped, or another load balancer gave it) goes back to the
// Service only if the Service would be given it now on request, so that writing an annotation
// gains nothing. Other addresses in a status are replaced, unless the configuration names the load
// balancers whose Services are being taken over.
func (l *Ledger) Prime(s Start, now time.Time) (duplicates []Duplicate) {
	services := slices.DeleteFunc(slices.Clone(s.Services), func(svc *corev1.Service) bool {
		return !l.scope.Covers(svc) && !l.scope.Keeps(svc) && !l.scope.LeftBehind(svc)
	})
	slices.SortFunc(services, func(a, b *corev1.Service) int {
		return cmp.Or(deleting(a)-deleting(b), a.CreationTimestamp.Compare(b.CreationTimestamp.Time), cmp.Compare(a.Namespace, b.Namespace),
			cmp.Compare(a.Name, b.Name))
	})
	dialects := compat.For(s.Config)
	for _, svc := range services {
		req, refusal := RequestOf(svc, s.NamespaceLabels(svc.Namespace), dialects)
		duplicates = append(duplicates, l.importOne(svc, req, refusal != nil)...)
	}
	for _, svc := range s.Services {
		l.SeeForeign(svc, false)
	}
	l.primed, l.conflicts.since, l.held.records = true, now, s.Records
	l.Follow(s.Situation, now)
	return duplicates
}

// importOne gives the Service the addresses that are certainly its own, and notes those that may
// be.
func (l *Ledger) importOne(svc *corev1.Service, req ipam.Request, unreadable bool) (duplicates []Duplicate) {
	status, assigned := kube.StatusAddresses(svc), kube.Assigned(svc)
	if len(status)+len(assigned) == 0 || !l.scope.Covers(svc) && kube.Allocated(svc) == nil {
		return nil
	}
	a, _ := l.accounts.open(svc)
	a.asked, a.unreadable = req, unreadable
	leases, pools := kube.Leases(svc), assignedPools(svc)
	for _, addr := range status {
		if !slices.Contains(assigned, addr) {
			continue
		}
		g := ipam.Holding{Owner: a.owner, Addr: addr, Sharing: req.Sharing, Since: since(svc), Asked: pools[addr]}
		if holder, ok := l.held.Restore(g); !ok {
			if deleting(svc) == 0 {
				duplicates = append(duplicates, Duplicate{svc, addr, holder.Name})
			}
		} else {
			a.shown = true
			if on := leases[addr]; on != "" {
				l.leasing.restore(a, on, addr)
			}
		}
	}
	if deleting(svc) == 0 && !l.scope.Keeps(svc) {
		a.claims = without(assigned, status)
		if l.scope.Covers(svc) { // other Services are not taken over
			a.foreign = without(status, assigned)
		}
	}
	return duplicates
}

// without returns the addresses that are not among the others.
func without(addrs, others []netip.Addr) []netip.Addr {
	return slices.DeleteFunc(slices.Clone(addrs), func(addr netip.Addr) bool { return slices.Contains(others, addr) })
}

// assignedPools returns the pool of each address that the annotations name. A user who writes
// them gains nothing, because a pool only keeps an address that the Service has.
func assignedPools(svc *corev1.Service) map[netip.Addr]string {
	pools := strings.SplitN(svc.Annotations[annotation.AssignedPools], ",", ipam.MaxAddresses+1)
	of := map[netip.Addr]string{}
	for i, text := range strings.SplitN(svc.Annotations[annotation.Assigned], ",", ipam.MaxAddresses+1) {
		addr, err := netip.ParseAddr(strings.TrimSpace(text))
		if err == nil && i < min(len(pools), ipam.MaxAddresses) && len(pools[i]) <= config.MaxName {
			of[addr.Unmap()] = strings.Clone(pools[i])
		}
	}
	return of
}

// since is when the Service got what it holds, as far as its object shows.
func since(svc *corev1.Service) time.Time {
	if c := kube.Allocated(svc); c != nil && c.Status == metav1.ConditionTrue {
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
