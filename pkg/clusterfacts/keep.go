package clusterfacts

import (
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/lodestone-lb/lodestone/pkg/annotation"
	"github.com/lodestone-lb/lodestone/pkg/report"
)

// maxSources is longer than any value of annotation.BGPSourceAddress, in bytes.
const maxSources = 128

func keepNode(n *corev1.Node) *corev1.Node {
	kept := &corev1.Node{ObjectMeta: identity(&n.ObjectMeta),
		Spec: corev1.NodeSpec{PodCIDRs: n.Spec.PodCIDRs}, Status: corev1.NodeStatus{Addresses: n.Status.Addresses}}
	if sources := n.Annotations[annotation.BGPSourceAddress]; sources != "" && len(sources) <= maxSources {
		kept.Annotations = map[string]string{annotation.BGPSourceAddress: sources}
	}
	if isDown(n) {
		kept.Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionUnknown}}
	}
	return kept
}

func keepLease(l *coordinationv1.Lease) *coordinationv1.Lease {
	kept := &coordinationv1.Lease{ObjectMeta: identity(&l.ObjectMeta)}
	kept.Spec.HolderIdentity = l.Spec.HolderIdentity
	network := report.Of(l.Annotations).Network // bounded, whatever the Lease says
	network.KubeProxy = false                   // it is for the speakers, and no news here
	kept.Annotations = report.Report{Network: network}.Annotations()
	return kept
}

func keepServiceCIDR(s *networkingv1.ServiceCIDR) *networkingv1.ServiceCIDR {
	return &networkingv1.ServiceCIDR{ObjectMeta: identity(&s.ObjectMeta), Spec: s.Spec}
}

func keepSlice(s *discoveryv1.EndpointSlice) *discoveryv1.EndpointSlice {
	kept := &discoveryv1.EndpointSlice{ObjectMeta: identity(&s.ObjectMeta)}
	for i := range s.Endpoints {
		kept.Endpoints = append(kept.Endpoints, discoveryv1.Endpoint{Addresses: s.Endpoints[i].Addresses})
	}
	return kept
}

func keepService(s *corev1.Service) *corev1.Service {
	return &corev1.Service{ObjectMeta: identity(&s.ObjectMeta), Spec: corev1.ServiceSpec{ClusterIPs: s.Spec.ClusterIPs}}
}

func identity(m *metav1.ObjectMeta) metav1.ObjectMeta {
	return metav1.ObjectMeta{Namespace: m.Namespace, Name: m.Name, UID: m.UID, ResourceVersion: m.ResourceVersion}
}
