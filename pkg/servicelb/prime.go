package servicelb

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/lodestone-lb/lodestone/ipam"
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
// duplicates among it. What a Service has given up while nobody looked is its
// own until its object is cleaned: then it rests. The records say which
// addresses do already.
//
// An address that a Service's status and annotation both name is its own,
// whatever the pools say. An address that only one of them names (the other
// was wiped, or another load balancer gave it) is its own if a pool open to
// the Service hands it out and nobody else holds it: nobody can claim, say,
// the gateway by writing an annotation. What else is in a status is replaced,
// unless the configuration says whose Services are being taken over.
func (l *Ledger) Prime(services []*corev1.Service, records []released.Record) []Conflict {
	l.mu.Lock()
	defer l.mu.Unlock()
	services = slices.DeleteFunc(slices.Clone(services), func(svc *corev1.Service) bool {
		return !l.scope.Covers(svc) && !l.scope.Keeps(svc) && !l.scope.LeftBehind(svc)
	})
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
			if l.scope.Covers(svc) { // what others give to theirs is no concern of ours
				a.foreign = append(a.foreign, addr)
			}
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
		a.claims, a.foreign = nil, nil
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

// confirmAll decides about all claims, older Services first, before anybody is
// given anything.
func (l *Ledger) confirmAll() {
	var claimants []*account
	for _, a := range l.accounts {
		if len(a.claims)+len(a.foreign) > 0 {
			claimants = append(claimants, a)
		}
	}
	sortAccounts(claimants)
	for _, a := range claimants {
		if l.takesOver() {
			l.adopt(a, a.asked, a.foreign)
		} else {
			a.claims, a.foreign = slices.Concat(a.foreign, a.claims), nil
		}
		for _, addr := range a.claims {
			if l.obstacle(a.asked, addr) == nil {
				l.alloc.Restore(a.owner, addr, a.asked.Sharing, a.created)
			}
		}
		a.claims = nil
	}
}

// takeover is what becomes of addresses that another load balancer gave.
type takeover struct {
	// foreign are those in the Service's status that it does not hold, and
	// obstacle is why not; nil while nobody has looked.
	foreign  []netip.Addr
	obstacle *ipam.Refusal
	// adopted are those that it was given because they were in its status.
	adopted []netip.Addr
}

// takesOver reports whether Services of other load balancers are left alone
// until they can be taken over with the addresses that they have. Before there
// are pools they always are: there is nothing better for them.
func (l *Ledger) takesOver() bool {
	return l.config == nil || len(l.config.Pools) == 0 || len(l.config.Compatibility) > 0
}

// takeOver gives the Service what another load balancer wrote into its status,
// if it holds nothing and does not ask for something else.
func (l *Ledger) takeOver(a *account, req ipam.Request, svc *corev1.Service) {
	a.foreign, a.obstacle = nil, nil
	if !l.takesOver() || req.Renumber || len(l.alloc.Holds(a.owner.UID))+len(l.alloc.Holds(leaving(a.owner).UID)) > 0 {
		return
	}
	assigned := kube.Assigned(svc)
	a.foreign = slices.DeleteFunc(kube.StatusAddresses(svc), func(addr netip.Addr) bool { return slices.Contains(assigned, addr) })
	if l.config != nil && l.primed {
		l.adopt(a, req, a.foreign)
	}
}

// adopt gives the Service all of the addresses or none.
func (l *Ledger) adopt(a *account, req ipam.Request, addrs []netip.Addr) {
	a.foreign, a.obstacle = addrs, nil
	for _, addr := range addrs {
		if a.obstacle = l.obstacle(req, addr); a.obstacle != nil {
			return
		}
	}
	for _, addr := range addrs {
		if holder, ok := l.alloc.Restore(a.owner, addr, req.Sharing, a.created); !ok {
			l.alloc.Release(a.owner.UID, l.Now())
			a.obstacle = foreignRefusal(ipam.AddressInUse, addr, "is held by "+holder.Name+", which does not share it with this Service", "let both share it (annotation "+annotation.SharingKey+")")
			return
		}
	}
	a.foreign, a.adopted = nil, append(a.adopted, addrs...)
}

// obstacle says why no pool gives the Service the address.
func (l *Ledger) obstacle(req ipam.Request, addr netip.Addr) *ipam.Refusal {
	p, ok := l.config.PoolOf(addr)
	switch {
	case !ok:
		return foreignRefusal(ipam.AddressOutsidePools, addr, "is in no pool", "add it to one")
	case !p.Free.Contains(addr):
		return foreignRefusal(ipam.AddressWithheld, addr, fmt.Sprintf("is withheld by pool %q", p.Name), "change the pool's exclude or useFirstAndLast")
	case !p.Allows(req.Subject):
		return foreignRefusal(ipam.PoolNotAllowed, addr, fmt.Sprintf("is in pool %q, which is not open to this Service", p.Name), "open the pool to it")
	}
	return nil
}

// foreignRefusal refuses to take a Service over without its address.
func foreignRefusal(reason ipam.Reason, addr netip.Addr, why, remedy string) *ipam.Refusal {
	return &ipam.Refusal{Reason: reason, Message: fmt.Sprintf("another load balancer has given it %s, which stays in the status and %s: to take the Service over, %s, or ask for another address (%s)",
		addr, why, remedy, moving)}
}

// adoptions returns the addresses that the Service has, and had before Lodestone
// said so.
func adoptions(svc *corev1.Service, held []ipam.Held) []netip.Addr {
	assigned := kube.Assigned(svc)
	return slices.DeleteFunc(kube.StatusAddresses(svc), func(addr netip.Addr) bool { return slices.Contains(assigned, addr) || !holds(held, addr) })
}

// tellAdopted says to the log and to the Service's users that it is Lodestone's
// now.
func (c *Controller) tellAdopted(svc *corev1.Service, v Verdict) {
	adopted := adoptions(svc, v.Held)
	if len(adopted) == 0 {
		return
	}
	c.Log.Info("service taken over", "service", NameOf(svc), "addresses", join(adopted))
	c.Events.Event(svc, corev1.EventTypeNormal, string(ReasonAdopted), fmt.Sprintf("Lodestone has taken this Service over with the addresses that its status had: %s.", join(adopted)))
}

// message says what becomes of the Service.
func (c Conflict) message() string {
	return c.Addr.String() + " also belongs to " + c.Holder + ", which is older and keeps it. " +
		"This Service is given another address (annotation " + annotation.Addresses + " can ask for one)."
}
