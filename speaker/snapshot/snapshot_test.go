package snapshot

import (
	"net/netip"
	"testing"

	"github.com/stretchr/testify/assert"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/lodestone-lb/lodestone/pkg/annotation"
	"github.com/lodestone-lb/lodestone/pkg/kube"
	"github.com/lodestone-lb/lodestone/speaker/plan"
)

func TestNodeReportsWhatKeepsItOut(t *testing.T) {
	t.Parallel()
	labelled := corev1.Node{ObjectMeta: metav1.ObjectMeta{Labels: map[string]string{corev1.LabelNodeExcludeBalancers: ""}}}
	assert.True(t, Node(&labelled).Labelled)
	for key, excluded := range map[string]bool{
		corev1.TaintNodeOutOfService: true, "ToBeDeletedByClusterAutoscaler": true, corev1.TaintNodeUnschedulable: false,
	} {
		assert.Equal(t, excluded, Node(&corev1.Node{Spec: corev1.NodeSpec{Taints: []corev1.Taint{{Key: key}}}}).Leaving, key)
	}
	assert.Equal(t, []string{corev1.TaintNodeUnschedulable, "maintenance"}, Node(&corev1.Node{Spec: corev1.NodeSpec{Taints: []corev1.Taint{
		{Key: corev1.TaintNodeNotReady}, {Key: corev1.TaintNodeUnschedulable}, {Key: "maintenance"}}}}).Taints)
	for status, unavailable := range map[corev1.ConditionStatus]bool{corev1.ConditionTrue: true, corev1.ConditionFalse: false,
		corev1.ConditionUnknown: false} {
		n := corev1.Node{Status: corev1.NodeStatus{Conditions: []corev1.NodeCondition{{Type: corev1.NodeNetworkUnavailable, Status: status}}}}
		assert.Equal(t, unavailable, Node(&n).NetworkUnavailable, status)
	}
}

func TestNodeReportsItsSessions(t *testing.T) {
	t.Parallel()
	object := &corev1.Node{
		Spec: corev1.NodeSpec{PodCIDRs: []string{"10.244.1.0/24"}},
		ObjectMeta: metav1.ObjectMeta{Annotations: map[string]string{
			annotation.BGPASN: "64512", annotation.BGPRouterID: "none", annotation.BGPSourceAddress: "2001:db8::1,203.0.113.1",
		}},
		Status: corev1.NodeStatus{Addresses: []corev1.NodeAddress{
			{Type: corev1.NodeHostName, Address: "n1"}, {Type: corev1.NodeInternalIP, Address: "198.51.100.1"},
			{Type: corev1.NodeExternalIP, Address: "192.0.2.1"},
		}},
	}
	n := Node(object)
	assert.True(t, n.BGP == Node(object).BGP, "errors of the same text differ, which would be taken for changes")
	assert.Equal(t, []string{"10.244.1.0/24"}, n.PodCIDRs)
	assert.Equal(t, []netip.Addr{netip.MustParseAddr("198.51.100.1")}, n.Addresses)
	assert.EqualValues(t, 64512, n.BGP.ASN)
	assert.Equal(t, "203.0.113.1", n.BGP.Source4.String())
	assert.Equal(t, "2001:db8::1", n.BGP.Source6.String())
	assert.ErrorContains(t, n.BGP.RouterIDErr, `"none"`)
	assert.NoError(t, n.BGP.ASNErr)
}

// The owner of a Service of another class can write our annotation, and another load balancer its status. In the
// snapshot, also that of the CLI, which lists all Services, it has no VIPs.
func TestServiceOfAnotherClassHasNoVIPs(t *testing.T) {
	t.Parallel()
	s := &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "web", Annotations: map[string]string{annotation.Assigned: "203.0.113.1"}},
		Spec:       corev1.ServiceSpec{Type: corev1.ServiceTypeLoadBalancer},
		Status:     corev1.ServiceStatus{LoadBalancer: corev1.LoadBalancerStatus{Ingress: []corev1.LoadBalancerIngress{{IP: "203.0.113.1"}}}},
	}
	assert.Len(t, Service(s, kube.Scope{Classless: true}).VIPs, 1)
	s.Spec.LoadBalancerClass = new("example.com/other")
	assert.Equal(t, plan.Service{Name: "shop/web"}, Service(s, kube.Scope{Classless: true}))
}

func TestLimitIsAtThePortsOfTheService(t *testing.T) {
	t.Parallel()
	s := Service(&corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "web", Annotations: map[string]string{annotation.ConnectionRateLimit: "5"}},
		Spec: corev1.ServiceSpec{Type: corev1.ServiceTypeLoadBalancer, Ports: []corev1.ServicePort{
			{Port: 80}, {Protocol: corev1.ProtocolUDP, Port: 53}, {Protocol: corev1.ProtocolSCTP, Port: 9}, {Protocol: "DCCP", Port: 1},
		}},
	}, kube.Scope{Classless: true})
	assert.Equal(t, plan.Limit{PerSecond: 5,
		Ports: []plan.Port{{Protocol: 6, Number: 80}, {Protocol: 17, Number: 53}, {Protocol: 132, Number: 9}}}, s.Limit)
}

func TestSliceOfNoServiceIsOfNone(t *testing.T) {
	t.Parallel()
	service, e := EndpointsOf(&discoveryv1.EndpointSlice{Endpoints: []discoveryv1.Endpoint{{}}})
	assert.Empty(t, service)
	assert.Equal(t, Endpoints{Ready: []string{""}, Serving: []string{""}}, e)
	assert.True(t, With(plan.Service{}, e).Serving)
	assert.Empty(t, With(plan.Service{Local: true}, e).Backends, "nobody knows where it is")
}
