package servicelb

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"

	"go4.org/netipx"
	corev1 "k8s.io/api/core/v1"

	"github.com/lodestone-lb/lodestone/ipam"
	"github.com/lodestone-lb/lodestone/pkg/clusterfacts"
	"github.com/lodestone-lb/lodestone/pkg/kube"
)

// foreigners are the Services that other load balancers serve. What their status
// shows is in use, and is not handed out. A status is written by load balancers;
// spec.externalIPs is written by every tenant, and forbids nothing.
type foreigners struct {
	// shown are the addresses of each, by "namespace/name".
	shown map[string][]netip.Addr
	// moved says that this has changed since the allocator was configured.
	moved bool
}

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
			all = append(all, clusterfacts.Forbidden{Range: netipx.IPRangeFrom(addr, addr), Why: fmt.Sprintf("the address of Service %s, which another load balancer serves", name)})
		}
	}
	return all
}

// shown returns what another load balancer gave to a Service that is not ours to
// serve, at most as many addresses as a Service may have here.
func (s Scope) shown(svc *corev1.Service) []netip.Addr {
	if svc.Spec.Type != corev1.ServiceTypeLoadBalancer || s.Covers(svc) {
		return nil
	}
	assigned := kube.Assigned(svc)
	addrs := slices.DeleteFunc(kube.StatusAddresses(svc), func(a netip.Addr) bool { return slices.Contains(assigned, a) })
	return addrs[:min(len(addrs), ipam.MaxAddresses)]
}

// SeeForeign takes over what a Service shows that another load balancer serves,
// or served until it was gone. It reports whether that changes what pools hand
// out.
func (l *Ledger) SeeForeign(svc *corev1.Service, gone bool) (changed bool) {
	var now []netip.Addr
	if !gone {
		now = l.scope.shown(svc)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	before := l.foreigners.shown[NameOf(svc)]
	if !l.foreigners.set(NameOf(svc), now) || l.config == nil {
		return false
	}
	if slices.ContainsFunc(slices.Concat(before, now), func(a netip.Addr) bool { _, ok := l.config.PoolOf(a); return ok }) {
		l.foreigners.moved = true
	}
	return l.foreigners.moved
}
