package servicelb

import (
	"cmp"
	"fmt"
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
		l.foreigners.set(NameOf(svc), l.scope.shown(svc))
	}
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
		l.restAll()
		l.confirmAll()
		l.withholdIdle()
	}
	l.follow()
	return conflicts
}

// restAll has the released addresses rest that are on record. It needs to know
// how long.
func (l *Ledger) restAll() {
	for _, r := range l.records {
		l.alloc.Rest(r.Service, r.Addr, r.Since, l.Now())
	}
	l.records = nil
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
		if holder, ok := l.alloc.Restore(g); !ok {
			if deleting(svc) == 0 {
				conflicts = append(conflicts, Conflict{svc, addr, holder.Name})
			}
		} else if on := leases[addr]; on != "" && !a.leased[on].IsValid() {
			a.lease(on, addr)
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
		l.confirm(a)
	}
}

// confirm gives the Service what it claims, as far as a request for it would be
// met, and as far as the request that it makes would keep it. One that cannot be
// read keeps everything.
func (l *Ledger) confirm(a *account) {
	for _, addr := range a.claims {
		sameFamily := func(b netip.Addr) bool { return b.Is4() == addr.Is4() }
		kept := slices.Contains(a.asked.Addresses, addr) || !slices.ContainsFunc(a.asked.Addresses, sameFamily) &&
			!slices.ContainsFunc(addrsOf(l.alloc.Holds(a.owner.UID)), sameFamily)
		if kept || a.unreadable {
			l.alloc.Claim(a.asked, []netip.Addr{addr}, a.created, l.Now())
		}
	}
	a.claims = nil
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

// comeBack gives a Service that is new, and whose annotation says what it had (it
// was restored from a backup, or created again from its manifest), the same
// addresses, if it would be given them on request.
func (l *Ledger) comeBack(a *account, req ipam.Request, refusal *ipam.Refusal, svc *corev1.Service) {
	assigned := kube.Assigned(svc)
	if len(assigned) == 0 || req.Renumber || len(l.alloc.Holds(a.owner.UID)) > 0 {
		return
	}
	a.asked, a.unreadable = req, refusal != nil
	if a.claims = assigned[:min(len(assigned), ipam.MaxAddresses)]; l.config != nil && l.primed {
		l.confirm(a)
	}
}

// adopt gives the Service all of the addresses or none.
func (l *Ledger) adopt(a *account, req ipam.Request, addrs []netip.Addr) {
	a.foreign, a.obstacle = addrs, nil
	if r := l.alloc.Claim(req, addrs, a.created, l.Now()); r != nil {
		a.obstacle = r.Behind(r.Reason, fmt.Sprintf("another load balancer has given it %s, which stays in the status until Lodestone can give it, too, or the Service asks for another address (%s): ",
			join(addrs), moving))
		return
	}
	a.foreign, a.adopted = nil, append(a.adopted, addrs...)
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
