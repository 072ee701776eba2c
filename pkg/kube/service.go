package kube

import (
	"fmt"
	"iter"
	"net/netip"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/lodestone-lb/lodestone/pkg/annotation"
	"github.com/lodestone-lb/lodestone/pkg/config"
	"github.com/lodestone-lb/lodestone/pkg/objects"
)

// ConnectionRateLimit returns how many new connections per second the Service takes at each of
// its VIPs; 0: there is no limit.
func ConnectionRateLimit(svc *corev1.Service) (perSecond uint32, err error) {
	value, ok := svc.Annotations[annotation.ConnectionRateLimit]
	if !ok {
		return 0, nil
	}
	if len(svc.Spec.Ports) > objects.MaxPorts {
		return 0, tooManyPorts{annotation.ConnectionRateLimit}
	}
	return annotation.ParseConnectionRateLimit(value)
}

// tooManyPorts is the error of a Service that has more ports than the annotation
// is for. Two of them are equal.
type tooManyPorts struct{ annotation string }

// Error implements error.
func (t tooManyPorts) Error() string {
	return fmt.Sprintf("annotation %s is for a Service with at most %d ports, and this one has more: split it", t.annotation, objects.MaxPorts)
}

// VIPs returns the addresses that Lodestone gave to the Service, in the order
// of its status: those that its status and its annotation both name. A
// Service that is being deleted, or is not of type LoadBalancer, has none;
// what is not an address is ignored.
func VIPs(svc *corev1.Service) []netip.Addr {
	if svc.Spec.Type != corev1.ServiceTypeLoadBalancer || svc.DeletionTimestamp != nil {
		return nil
	}
	assigned := Assigned(svc)
	return slices.DeleteFunc(StatusAddresses(svc), func(a netip.Addr) bool { return !slices.Contains(assigned, a) })
}

// Assigned returns the addresses that Lodestone gave to the Service, as its annotation has them.
// Lodestone writes at most config.MaxServiceAddresses there, and no more are read.
func Assigned(svc *corev1.Service) []netip.Addr {
	var addrs []netip.Addr
	for text := range members(svc.Annotations[annotation.Assigned]) {
		addrs = appendAddr(addrs, text)
	}
	return addrs
}

// Leases returns the interfaces of the addresses that are leased from a DHCP server, as the
// Service's annotation has them; as many as Assigned returns. Nil: there are none.
func Leases(svc *corev1.Service) map[netip.Addr]string {
	text, ok := svc.Annotations[annotation.Leases]
	if !ok {
		return nil
	}
	leases := map[netip.Addr]string{}
	for lease := range members(text) {
		addr, name, _ := strings.Cut(lease, "=")
		for _, a := range appendAddr(nil, addr) {
			leases[a] = strings.Clone(name)
		}
	}
	return leases
}

// StatusAddresses returns the addresses in the Service's status, without
// those that only forward (ipMode Proxy): the first config.MaxServiceAddresses.
func StatusAddresses(svc *corev1.Service) []netip.Addr {
	var addrs []netip.Addr
	for _, in := range svc.Status.LoadBalancer.Ingress {
		if len(addrs) == config.MaxServiceAddresses {
			break
		}
		if in.IPMode == nil || *in.IPMode == corev1.LoadBalancerIPModeVIP {
			addrs = appendAddr(addrs, in.IP)
		}
	}
	return addrs
}

// Foreign returns the addresses in the Service's status that its annotation does not
// name: another load balancer gave them.
func Foreign(svc *corev1.Service) []netip.Addr {
	assigned := Assigned(svc)
	return slices.DeleteFunc(StatusAddresses(svc), func(addr netip.Addr) bool { return slices.Contains(assigned, addr) })
}

// JoinAddrs returns the text of the annotation that Assigned reads.
func JoinAddrs(addrs []netip.Addr) string {
	texts := make([]string, len(addrs))
	for i, a := range addrs {
		texts[i] = a.String()
	}
	return strings.Join(texts, ",")
}

// Ports returns the ports of the Service that count.
func Ports(svc *corev1.Service) []corev1.ServicePort {
	return svc.Spec.Ports[:min(len(svc.Spec.Ports), objects.MaxPorts)]
}

// Allocated returns the condition that shows whether the Service has its addresses, nil
// for none.
func Allocated(svc *corev1.Service) *metav1.Condition {
	return meta.FindStatusCondition(svc.Status.Conditions, annotation.ConditionAllocated)
}

// Refused returns the condition by which the controller refuses the Service addresses, nil if it does not.
func Refused(svc *corev1.Service) *metav1.Condition {
	if c := Allocated(svc); c != nil && c.Status == metav1.ConditionFalse {
		return c
	}
	return nil
}

// members are the first config.MaxServiceAddresses of a list.
func members(list string) iter.Seq[string] {
	return func(yield func(string) bool) {
		n := 0
		for text := range strings.SplitSeq(list, ",") {
			if n++; n > config.MaxServiceAddresses || !yield(strings.TrimSpace(text)) {
				return
			}
		}
	}
}

// appendAddr appends the address that the text spells, if it spells one that
// is not there yet. No VIP has a zone.
func appendAddr(addrs []netip.Addr, text string) []netip.Addr {
	a, err := netip.ParseAddr(text)
	if err != nil || a.Zone() != "" || slices.Contains(addrs, a.Unmap()) {
		return addrs
	}
	return append(addrs, a.Unmap())
}
