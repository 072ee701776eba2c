package servicelb

import (
	"fmt"
	"log/slog"
	"net/netip"
	"slices"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/lodestone-lb/lodestone/controller/servicelb/ledger"
	"github.com/lodestone-lb/lodestone/ipam"
	"github.com/lodestone-lb/lodestone/pkg/annotation"
	"github.com/lodestone-lb/lodestone/pkg/clusterfacts"
	"github.com/lodestone-lb/lodestone/pkg/kube"
)

// emitter reports what happens to a Service: to the log, to its users, to the metrics.
type emitter struct {
	log     *slog.Logger
	events  kube.Events
	metrics metrics
}

// adopted reports that Lodestone serves the Service now, with addresses that another load
// balancer gave it.
func (e emitter) adopted(svc *corev1.Service, held []ipam.Held) {
	adopted := slices.DeleteFunc(kube.Foreign(svc), func(a netip.Addr) bool { return !slices.Contains(ledger.Addrs(held), a) })
	if len(adopted) == 0 {
		return
	}
	e.log.Info("service taken over", "service", ledger.NameOf(svc), "addresses", kube.JoinAddrs(adopted))
	e.events.Event(svc, corev1.EventTypeNormal, string(ledger.ReasonAdopted),
		fmt.Sprintf("Lodestone has taken this Service over with the addresses that its status had: %s.", kube.JoinAddrs(adopted)))
}

// left reports that the Service gets another address instead of one that another host has.
func (e emitter) left(svc *corev1.Service, left []clusterfacts.Conflict) {
	for _, d := range left {
		e.metrics.conflicts.Inc()
		e.log.Warn("address conflict: the service gets another address", "service", ledger.NameOf(svc), "address", d.VIP, "host", d.String())
		e.events.Event(svc, corev1.EventTypeWarning, string(ledger.AddressConflict),
			fmt.Sprintf("%s has %s. The Service gets another address, and no other Service is given this one.", d, d.VIP))
	}
}

// lost reports that a Service has lost an address; its object may be gone: nil.
func (e emitter) lost(svc *corev1.Service, l ledger.Loss) {
	e.metrics.lost.WithLabelValues(l.Pool).Inc()
	e.log.Warn("leased address lost", "service", l.Service, "address", l.Addr, "pool", l.Pool, "why", l.Why)
	if svc != nil {
		e.events.Event(svc, corev1.EventTypeWarning, string(ledger.ReasonLeaseLost),
			fmt.Sprintf("%s is withdrawn: %s. The Service gets another address as soon as a pool gives one.", l.Addr, l.Why))
	}
}

// duplicates reports addresses that two Services had.
func (e emitter) duplicates(duplicates []ledger.Duplicate) {
	for _, d := range duplicates {
		e.log.Warn("duplicate address", "service", ledger.NameOf(d.Service), "address", d.Addr, "holder", d.Holder)
		e.events.Event(d.Service, corev1.EventTypeWarning, string(ledger.ReasonDuplicate),
			fmt.Sprintf("%s also belongs to %s, which is older and keeps it. This Service is given another address (annotation %s can ask for one).",
				d.Addr, d.Holder, annotation.Addresses))
	}
}

// contested reports that somebody else writes to the Service's status again and again.
func (e emitter) contested(svc *corev1.Service, count int) {
	e.log.Warn("service contested", "service", ledger.NameOf(svc))
	e.events.Event(svc, corev1.EventTypeWarning, string(ledger.ReasonContested),
		fmt.Sprintf("Lodestone has restored the status of this Service %d times in a row. "+
			"Does another load balancer serve it, too? Lodestone now restores it less often.", count))
}

// condition reports how the Service stands now.
func (e emitter) condition(svc *corev1.Service, c *metav1.Condition, refused bool) {
	eventType := corev1.EventTypeNormal
	if c.Reason != string(ledger.ReasonAllocated) {
		eventType = corev1.EventTypeWarning
	}
	if refused {
		e.metrics.refusals.WithLabelValues(c.Reason).Inc()
	}
	e.events.Event(svc, eventType, c.Reason, c.Message)
	e.log.Info("service "+c.Reason, "service", ledger.NameOf(svc), "message", c.Message)
}

// event returns the condition if the change of the Service's object is worth an Event: another
// reason, or other addresses.
func (o object) event(svc *corev1.Service) *metav1.Condition {
	old := kube.Allocated(svc)
	if o.condition == nil || old != nil && old.Reason == o.condition.Reason &&
		svc.Annotations[annotation.Assigned] == kube.JoinAddrs(o.addrs) {
		return nil
	}
	return o.condition
}
