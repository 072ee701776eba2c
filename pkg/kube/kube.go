// Package kube is what the controller and the speaker both read from
// Kubernetes: the configuration in its ConfigMap, the VIPs of a Service. It
// also writes Events, from a client of its own, so that they never slow
// anything else.
package kube

import (
	"net/netip"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/lodestone-lb/lodestone/pkg/annotation"
)

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

// Assigned returns the addresses that the Service's annotation says Lodestone
// gave to it.
func Assigned(svc *corev1.Service) []netip.Addr {
	var addrs []netip.Addr
	for text := range strings.SplitSeq(svc.Annotations[annotation.Assigned], ",") {
		addrs = appendAddr(addrs, strings.TrimSpace(text))
	}
	return addrs
}

// Leases returns, for the addresses that the Service's annotation says are
// leased from a DHCP server, the interface. Nil: there are none.
func Leases(svc *corev1.Service) map[netip.Addr]string {
	text, ok := svc.Annotations[annotation.Leases]
	if !ok {
		return nil
	}
	leases := map[netip.Addr]string{}
	for lease := range strings.SplitSeq(text, ",") {
		addr, name, _ := strings.Cut(strings.TrimSpace(lease), "=")
		for _, a := range appendAddr(nil, addr) {
			leases[a] = name
		}
	}
	return leases
}

// StatusAddresses returns the addresses in the Service's status, without
// those that only forward (ipMode Proxy).
func StatusAddresses(svc *corev1.Service) []netip.Addr {
	var addrs []netip.Addr
	for _, in := range svc.Status.LoadBalancer.Ingress {
		if in.IPMode == nil || *in.IPMode == corev1.LoadBalancerIPModeVIP {
			addrs = appendAddr(addrs, in.IP)
		}
	}
	return addrs
}

// WithoutManagedFields is an informer's transform: nobody here reads who wrote
// which field, and it is half of an object's size.
func WithoutManagedFields(obj any) (any, error) {
	if o, ok := obj.(metav1.Object); ok {
		o.SetManagedFields(nil)
	}
	return obj, nil
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
