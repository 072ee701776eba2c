package ledger

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"

	"go4.org/netipx"
	corev1 "k8s.io/api/core/v1"

	"github.com/lodestone-lb/lodestone/pkg/clusterfacts"
	"github.com/lodestone-lb/lodestone/pkg/kube"
)

// foreignServices are the Services that other load balancers serve. What their status
// shows is in use, and is not handed out. A status is written by load balancers;
// spec.externalIPs is written by every tenant, and forbids nothing.
type foreignServices struct {
	// shown are the addresses of each, by "namespace/name".
	shown map[string][]netip.Addr
	// moved is set when shown has changed since the allocator was configured.
	moved bool
}

// set replaces what a Service shows.
func (f *foreignServices) set(name string, addrs []netip.Addr) (changed bool) {
	if slices.Equal(f.shown[name], addrs) {
		return false
	}
	if f.shown[name] = addrs; len(addrs) == 0 {
		delete(f.shown, name)
	}
	return true
}

// forbidden returns all that is shown, in order.
func (f *foreignServices) forbidden() []clusterfacts.Forbidden {
	var all []clusterfacts.Forbidden
	for _, name := range slices.Sorted(maps.Keys(f.shown)) {
		for _, addr := range f.shown[name] {
			all = append(all, clusterfacts.Forbidden{Range: netipx.IPRangeFrom(addr, addr),
				Why: fmt.Sprintf("the address of Service %s, which another load balancer serves", name)})
		}
	}
	return all
}

// Foreign returns the addresses in the Service's status that another load balancer gave. Those that the Service
// holds are none, whatever its owner has done to the annotation.
func (l *Ledger) Foreign(svc *corev1.Service) []netip.Addr {
	return l.held.without(NameOf(svc), kube.Foreign(svc))
}

// SeeForeign records which addresses a Service of another load balancer shows, or that it is
// gone. kube-proxy sends the traffic there as long as the object exists, also if it is being
// deleted.
func (l *Ledger) SeeForeign(svc *corev1.Service, gone bool) {
	var now []netip.Addr
	if !gone && svc.Spec.Type == corev1.ServiceTypeLoadBalancer && !l.scope.Serves(svc) {
		if now = kube.Foreign(svc); kube.Allocated(svc) == nil { // the annotation is its owner's alone
			now = kube.StatusAddresses(svc)
		}
		now = l.held.without(NameOf(svc), now)
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
