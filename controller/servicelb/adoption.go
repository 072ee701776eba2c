package servicelb

import (
	"fmt"
	"net/netip"
	"slices"

	corev1 "k8s.io/api/core/v1"

	"github.com/lodestone-lb/lodestone/ipam"
	"github.com/lodestone-lb/lodestone/pkg/config"
	"github.com/lodestone-lb/lodestone/pkg/kube"
)

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
func takesOver(cfg *config.Config) bool {
	return cfg == nil || len(cfg.Pools) == 0 || len(cfg.Compatibility) > 0
}

// takeOver gives the Service what another load balancer wrote into its status,
// if it holds nothing and does not ask for something else.
func (l *Ledger) takeOver(a *account, req ipam.Request, svc *corev1.Service) {
	a.foreign, a.obstacle = nil, nil
	if !takesOver(l.config) || req.Renumber || len(l.held.Holds(a.owner.UID))+len(l.held.Holds(leaving(a.owner).UID)) > 0 {
		return
	}
	assigned := kube.Assigned(svc)
	a.foreign = slices.DeleteFunc(kube.StatusAddresses(svc), func(addr netip.Addr) bool { return slices.Contains(assigned, addr) })
	if l.config != nil && l.primed {
		l.held.adopt(a, req, a.foreign)
	}
}

// comeBack gives a Service that is new, and whose annotation says what it had (it
// was restored from a backup, or created again from its manifest), the same
// addresses, if it would be given them on request.
func (l *Ledger) comeBack(a *account, req ipam.Request, refusal *ipam.Refusal, svc *corev1.Service) {
	assigned := kube.Assigned(svc)
	if len(assigned) == 0 || req.Renumber || len(l.held.Holds(a.owner.UID)) > 0 {
		return
	}
	a.asked, a.unreadable = req, refusal != nil
	if a.claims = assigned[:min(len(assigned), ipam.MaxAddresses)]; l.config != nil && l.primed {
		l.held.confirm(a)
	}
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
		if takesOver(l.config) {
			l.held.adopt(a, a.asked, a.foreign)
		} else {
			a.claims, a.foreign = slices.Concat(a.foreign, a.claims), nil
		}
		l.held.confirm(a)
	}
}

// confirm gives the Service what it claims, as far as a request for it would be
// met, and as far as the request that it makes would keep it. One that cannot be
// read keeps everything.
func (h *holdings) confirm(a *account) {
	for _, addr := range a.claims {
		sameFamily := func(b netip.Addr) bool { return b.Is4() == addr.Is4() }
		kept := slices.Contains(a.asked.Addresses, addr) || !slices.ContainsFunc(a.asked.Addresses, sameFamily) &&
			!slices.ContainsFunc(addrsOf(h.Holds(a.owner.UID)), sameFamily)
		if kept || a.unreadable {
			h.Claim(a.asked, []netip.Addr{addr}, a.created, h.now())
		}
	}
	a.claims = nil
}

// adopt gives the Service all of the addresses or none.
func (h *holdings) adopt(a *account, req ipam.Request, addrs []netip.Addr) {
	a.foreign, a.obstacle = addrs, nil
	if r := h.Claim(req, addrs, a.created, h.now()); r != nil {
		a.obstacle = r.Behind(r.Reason, fmt.Sprintf("another load balancer has given it %s, which stays in the status until Lodestone can "+
			"give it, too, or the Service asks for another address (%s): ",
			join(addrs), moving))
		return
	}
	a.foreign, a.adopted = nil, append(a.adopted, addrs...)
}

// adoptions returns the addresses that the Service has, and had before Lodestone
// said so.
func adoptions(svc *corev1.Service, held []ipam.Held) []netip.Addr {
	assigned := kube.Assigned(svc)
	return slices.DeleteFunc(kube.StatusAddresses(svc),
		func(addr netip.Addr) bool { return slices.Contains(assigned, addr) || !holds(held, addr) })
}
