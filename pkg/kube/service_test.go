package kube_test

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/lodestone-lb/lodestone/pkg/annotation"
	"github.com/lodestone-lb/lodestone/pkg/config"
	"github.com/lodestone-lb/lodestone/pkg/kube"
	"github.com/lodestone-lb/lodestone/pkg/testcost"
)

func TestVIPs(t *testing.T) {
	t.Parallel()
	vip, proxy := corev1.LoadBalancerIPModeVIP, corev1.LoadBalancerIPModeProxy
	now := metav1.Now()
	service := func(assigned string, ingress ...corev1.LoadBalancerIngress) *corev1.Service {
		svc := &corev1.Service{}
		svc.Annotations = map[string]string{annotation.Assigned: assigned}
		svc.Spec.Type = corev1.ServiceTypeLoadBalancer
		svc.Status.LoadBalancer.Ingress = ingress
		return svc
	}
	for _, tt := range []struct {
		name string
		svc  *corev1.Service
		edit func(*corev1.Service)
		want string
	}{
		{"both families in the status's order", service("203.0.113.4,2001:db8::4",
			corev1.LoadBalancerIngress{IP: "2001:DB8:0::4", IPMode: &vip}, corev1.LoadBalancerIngress{IP: "203.0.113.4"}), nil,
			"[2001:db8::4 203.0.113.4]"},
		{"spaces, garbage and repetition are ignored", service(" 203.0.113.4 ,, no, 203.0.113.400,fe80::1%eth0",
			corev1.LoadBalancerIngress{IP: "203.0.113.4"}, corev1.LoadBalancerIngress{IP: "203.0.113.4"},
			corev1.LoadBalancerIngress{IP: "fe80::1%eth0"}, corev1.LoadBalancerIngress{Hostname: "lb.example"}), nil, "[203.0.113.4]"},
		{"another load balancer's status is not ours", service("", corev1.LoadBalancerIngress{IP: "203.0.113.4"}), nil, "[]"},
		{"what the status does not name is not served", service("203.0.113.4,203.0.113.5", corev1.LoadBalancerIngress{IP: "203.0.113.5"}), nil,
			"[203.0.113.5]"},
		{"a proxied address is not a VIP", service("203.0.113.4", corev1.LoadBalancerIngress{IP: "203.0.113.4", IPMode: &proxy}), nil, "[]"},
		{"an IPv4-mapped address is the IPv4 address", service("::ffff:203.0.113.4", corev1.LoadBalancerIngress{IP: "203.0.113.4"}), nil,
			"[203.0.113.4]"},
		{"a Service being deleted has none", service("203.0.113.4", corev1.LoadBalancerIngress{IP: "203.0.113.4"}),
			func(s *corev1.Service) { s.DeletionTimestamp = &now }, "[]"},
		{"a ClusterIP Service has none", service("203.0.113.4", corev1.LoadBalancerIngress{IP: "203.0.113.4"}),
			func(s *corev1.Service) { s.Spec.Type = corev1.ServiceTypeClusterIP }, "[]"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			if tt.edit != nil {
				tt.edit(tt.svc)
			}
			if got := fmt.Sprint(kube.VIPs(tt.svc)); got != tt.want {
				t.Errorf("VIPs: %s, want %s", got, tt.want)
			}
		})
	}
}

func TestLeasesAreReadAsFarAsTheyMakeSense(t *testing.T) {
	t.Parallel()
	svc := &corev1.Service{}
	if got := kube.Leases(svc); got != nil {
		t.Errorf("a Service without the annotation has leases %v", got)
	}
	svc.Annotations = map[string]string{annotation.Leases: " 203.0.113.4=eth1 ,, no=eth1,203.0.113.5,fe80::1%eth0=eth1,203.0.113.6=bond0=x"}
	if got, want := fmt.Sprint(kube.Leases(svc)), "map[203.0.113.4:eth1 203.0.113.5: 203.0.113.6:bond0=x]"; got != want {
		t.Errorf("leases %s, want %s", got, want)
	}
}

// A list is read only up to the number of addresses that Lodestone writes at most.
func TestLongListsAreNotReadToTheEnd(t *testing.T) {
	// Not parallel: it measures.
	var list strings.Builder
	for i := range 60_000 {
		fmt.Fprintf(&list, "10.%d.%d.%d=eth0,", i>>16, i>>8&255, i&255)
	}
	svc := &corev1.Service{Spec: corev1.ServiceSpec{Type: corev1.ServiceTypeLoadBalancer}}
	svc.Annotations = map[string]string{annotation.Leases: list.String(), annotation.Assigned: strings.ReplaceAll(list.String(), "=eth0", "")}
	for i := range 60_000 {
		svc.Status.LoadBalancer.Ingress = append(svc.Status.LoadBalancer.Ingress,
			corev1.LoadBalancerIngress{IP: fmt.Sprintf("10.%d.%d.%d", i>>16, i>>8&255, i&255)})
	}
	fastest := time.Hour // of the processor
	for range 20 {
		var vips []netip.Addr
		var leases map[netip.Addr]string
		fastest = min(fastest, testcost.Of(func() { vips, leases = kube.VIPs(svc), kube.Leases(svc) }).Time)
		if len(vips) != config.MaxServiceAddresses || len(leases) != config.MaxServiceAddresses {
			t.Fatalf("%d VIPs and %d leases", len(vips), len(leases))
		}
	}
	if fastest > time.Millisecond {
		t.Errorf("a look takes %v", fastest)
	}
}

// The annotation is the tenant's to write; class and condition are not.
func TestSpeakersAnnounceWhatTheControllerServes(t *testing.T) {
	t.Parallel()
	foreign, ours := "example.com/other", annotation.DefaultClass
	scope := kube.Scope{Classless: true, Classes: []string{ours}}
	for _, tt := range []struct {
		name      string
		class     *string
		condition metav1.ConditionStatus
		scope     kube.Scope
		want      bool
	}{
		{"without a class", nil, "", scope, true},
		{"of our class", &ours, "", scope, true},
		{"of a foreign class", &foreign, "", scope, false},
		{"of a foreign class, and refused", &foreign, metav1.ConditionFalse, scope, false},
		{"without a class, which is not served", nil, "", kube.Scope{Classes: []string{ours}}, false},
		{"without a class, which was served when it got its address", nil, metav1.ConditionTrue, kube.Scope{Classes: []string{ours}}, true},
	} {
		svc := &corev1.Service{Spec: corev1.ServiceSpec{Type: corev1.ServiceTypeLoadBalancer, LoadBalancerClass: tt.class}}
		svc.Annotations = map[string]string{annotation.Assigned: "203.0.113.4"}
		svc.Status.LoadBalancer.Ingress = []corev1.LoadBalancerIngress{{IP: "203.0.113.4"}}
		if tt.condition != "" {
			svc.Status.Conditions = []metav1.Condition{{Type: annotation.ConditionAllocated, Status: tt.condition}}
		}
		if got := tt.scope.Announces(svc); got != tt.want {
			t.Errorf("a Service %s is announced: %v", tt.name, got)
		}
	}
}
