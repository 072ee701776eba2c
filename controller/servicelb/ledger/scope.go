package ledger

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"

	"go4.org/netipx"
	corev1 "k8s.io/api/core/v1"

	"github.com/lodestone-lb/lodestone/pkg/annotation"
	"github.com/lodestone-lb/lodestone/pkg/clusterfacts"
	"github.com/lodestone-lb/lodestone/pkg/kube"
)

// NameOf is "namespace/name", by which people and the ledger know a Service.
func NameOf(svc *corev1.Service) string { return svc.Namespace + "/" + svc.Name }

// LoadBalancerName is the name of the Service's load balancer in the cloud provider interface.
func LoadBalancerName(cluster string, svc *corev1.Service) string {
	return cluster + "-" + svc.Namespace + "-" + svc.Name
}

// Scope decides which Services Lodestone serves.
type Scope kube.Scope

// Covers reports whether the Service is of a kind that Lodestone serves. It may be about to be
// deleted.
func (s Scope) Covers(svc *corev1.Service) bool {
	return kube.Scope(s).Covers(svc)
}

// Serves reports whether the Service is to have addresses.
func (s Scope) Serves(svc *corev1.Service) bool {
	return s.Covers(svc) && svc.DeletionTimestamp == nil
}

// Foreign says why the Service is not served, empty if it is.
func (s Scope) Foreign(svc *corev1.Service) string {
	class := svc.Spec.LoadBalancerClass
	switch {
	case svc.Spec.Type != corev1.ServiceTypeLoadBalancer:
		return fmt.Sprintf("its spec.type is %s, not LoadBalancer", svc.Spec.Type)
	case svc.DeletionTimestamp != nil:
		return "it is being deleted"
	case class != nil && !s.Covers(svc):
		return fmt.Sprintf("its spec.loadBalancerClass is %q, and Lodestone serves %q", *class, s.Classes)
	case !s.Covers(svc):
		return fmt.Sprintf("it has no spec.loadBalancerClass, and Lodestone serves only %q", s.Classes)
	}
	return ""
}

// Keeps reports whether a Service that is no longer served keeps its addresses, because nobody
// else has taken it over.
func (s Scope) Keeps(svc *corev1.Service) bool {
	return !s.Covers(svc) && len(kube.VIPs(svc)) > 0
}

// LeftBehind reports whether the Service, which is not served, carries
// something that Lodestone wrote on it. The conventional finalizer alone is
// proof only on a Service that Lodestone would serve: others use it, too.
func (s Scope) LeftBehind(svc *corev1.Service) bool {
	_, assigned := svc.Annotations[annotation.Assigned]
	return assigned || kube.Allocated(svc) != nil || slices.Contains(svc.Finalizers, annotation.ClassFinalizer) ||
		s.Covers(svc) && slices.Contains(svc.Finalizers, annotation.Finalizer)
}

// foreigners are the Services that other load balancers serve. What their status
// shows is in use, and is not handed out. A status is written by load balancers;
// spec.externalIPs is written by every tenant, and forbids nothing.
type foreigners struct {
	// shown are the addresses of each, by "namespace/name".
	shown map[string][]netip.Addr
	// moved is set when shown has changed since the allocator was configured.
	moved bool
}

func newForeigners() foreigners { return foreigners{shown: map[string][]netip.Addr{}} }

// set replaces what a Service shows.
func (f *foreigners) set(name string, addrs []netip.Addr) (changed bool) {
	if slices.Equal(f.shown[name], addrs) {
		return false
	}
	if f.shown[name] = addrs; len(addrs) == 0 {
		delete(f.shown, name)
	}
	return true
}

// forbidden returns all that is shown, in order.
func (f *foreigners) forbidden() []clusterfacts.Forbidden {
	var all []clusterfacts.Forbidden
	for _, name := range slices.Sorted(maps.Keys(f.shown)) {
		for _, addr := range f.shown[name] {
			all = append(all, clusterfacts.Forbidden{Range: netipx.IPRangeFrom(addr, addr),
				Why: fmt.Sprintf("the address of Service %s, which another load balancer serves", name)})
		}
	}
	return all
}

// shown returns what another load balancer gave to a Service that is not ours to
// serve.
func (s Scope) shown(svc *corev1.Service) []netip.Addr {
	if svc.Spec.Type != corev1.ServiceTypeLoadBalancer || s.Covers(svc) {
		return nil
	}
	return kube.Foreign(svc)
}

// SeeForeign records which addresses a Service of another load balancer shows, or that it is
// gone.
func (l *Ledger) SeeForeign(svc *corev1.Service, gone bool) {
	var now []netip.Addr
	if !gone {
		now = l.scope.shown(svc)
	}
	before := l.foreign.shown[NameOf(svc)]
	if !l.foreign.set(NameOf(svc), now) || l.Config == nil {
		return
	}
	if slices.ContainsFunc(slices.Concat(before, now), func(a netip.Addr) bool { _, ok := l.Config.PoolOf(a); return ok }) {
		l.foreign.moved = true
	}
	l.retry = l.retry || l.foreign.moved
}
