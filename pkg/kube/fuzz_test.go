package kube_test

import (
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"

	"github.com/lodestone-lb/lodestone/pkg/annotation"
	"github.com/lodestone-lb/lodestone/pkg/config"
	"github.com/lodestone-lb/lodestone/pkg/kube"
	"github.com/lodestone-lb/lodestone/pkg/testcost"
)

// Whoever wrote the annotations, the addresses of a Service are bounded in number, and each is there once, in one form.
// The text that Lodestone writes of them is read back to the same addresses.
func FuzzVIPs(f *testing.F) {
	f.Add("203.0.113.1,2001:db8::1", "203.0.113.1=eth0", "203.0.113.1,2001:db8::1")
	f.Add("::ffff:203.0.113.1, 203.0.113.1,,fe80::1%eth0", "=,203.0.113.1", "203.0.113.1,::ffff:203.0.113.1,\x00")
	f.Add(strings.Repeat("203.0.113.1,", 4<<10), strings.Repeat("=", 4<<10), strings.Repeat(",", 4<<10))
	f.Fuzz(func(t *testing.T, assigned, leases, status string) {
		svc := &corev1.Service{Spec: corev1.ServiceSpec{Type: corev1.ServiceTypeLoadBalancer}}
		svc.Annotations = map[string]string{annotation.Assigned: assigned, annotation.Leases: leases}
		for ip := range strings.SplitSeq(status, ",") {
			svc.Status.LoadBalancer.Ingress = append(svc.Status.LoadBalancer.Ingress, corev1.LoadBalancerIngress{IP: ip})
		}
		var vips, foreign, held, shown []netip.Addr
		var leased map[netip.Addr]string
		testcost.Within(t, "a Service", len(assigned)+len(leases)+len(status), func() {
			vips, foreign, leased = kube.VIPs(svc), kube.Foreign(svc), kube.Leases(svc)
			held, shown = kube.Assigned(svc), kube.StatusAddresses(svc)
		})
		for _, addrs := range [][]netip.Addr{held, shown} {
			require.LessOrEqual(t, len(addrs), config.MaxServiceAddresses)
			for i, a := range addrs {
				require.True(t, a.IsValid() && a.Zone() == "" && !a.Is4In6() && slices.Index(addrs, a) == i, addrs)
			}
		}
		require.Len(t, shown, len(vips)+len(foreign))
		for _, a := range vips {
			require.True(t, slices.Contains(held, a) && slices.Contains(shown, a))
		}
		require.LessOrEqual(t, len(leased), config.MaxServiceAddresses)
		svc.Annotations[annotation.Assigned] = kube.JoinAddrs(held)
		require.Equal(t, held, kube.Assigned(svc))
	})
}
