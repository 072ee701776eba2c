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

// The transforms also get objects that they have transformed already. They leave those as they
// are.

// maxSources is longer than any value of annotation.BGPSourceAddress, in bytes.
const maxSources = 128

func keepNode(obj any) (any, error) {
	n, ok := obj.(*corev1.Node)
	if !ok {
		return obj, nil
	}
	kept := &corev1.Node{ObjectMeta: identity(&n.ObjectMeta),
		Spec: corev1.NodeSpec{PodCIDRs: n.Spec.PodCIDRs}, Status: corev1.NodeStatus{Addresses: n.Status.Addresses}}
	if sources := n.Annotations[annotation.BGPSourceAddress]; sources != "" && len(sources) <= maxSources {
		kept.Annotations = map[string]string{annotation.BGPSourceAddress: sources}
	}
	if isDown(n) {
		kept.Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionUnknown}}
	}
	return kept, nil
}

func keepLease(obj any) (any, error) {
	l, ok := obj.(*coordinationv1.Lease)
	if !ok {
		return obj, nil
	}
	kept := &coordinationv1.Lease{ObjectMeta: identity(&l.ObjectMeta)}
	kept.Spec.HolderIdentity = l.Spec.HolderIdentity
	network := report.Of(l.Annotations).Network // bounded, whatever the Lease says
	network.KubeProxy = false                   // it is for the speakers, and no news here
	kept.Annotations = report.Report{Network: network}.Annotations()
	return kept, nil
}

func keepServiceCIDR(obj any) (any, error) {
	s, ok := obj.(*networkingv1.ServiceCIDR)
	if !ok {
		return obj, nil
	}
	return &networkingv1.ServiceCIDR{ObjectMeta: identity(&s.ObjectMeta), Spec: s.Spec}, nil
}

func keepSlice(obj any) (any, error) {
	s, ok := obj.(*discoveryv1.EndpointSlice)
	if !ok {
		return obj, nil
	}
	kept := &discoveryv1.EndpointSlice{ObjectMeta: identity(&s.ObjectMeta)}
	for i := range s.Endpoints {
		kept.Endpoints = append(kept.Endpoints, discoveryv1.Endpoint{Addresses: s.Endpoints[i].Addresses})
	}
	return kept, nil
}

func keepService(obj any) (any, error) {
	s, ok := obj.(*corev1.Service)
	if !ok {
		return obj, nil
	}
	return &corev1.Service{ObjectMeta: identity(&s.ObjectMeta), Spec: corev1.ServiceSpec{ClusterIPs: s.Spec.ClusterIPs}}, nil
}

func identity(m *metav1.ObjectMeta) metav1.ObjectMeta {
	return metav1.ObjectMeta{Namespace: m.Namespace, Name: m.Name, UID: m.UID, ResourceVersion: m.ResourceVersion}
}
