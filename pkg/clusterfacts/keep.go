package clusterfacts

import (
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"

	"github.com/lodestone-lb/lodestone/pkg/annotation"
	"github.com/lodestone-lb/lodestone/pkg/objects"
	"github.com/lodestone-lb/lodestone/pkg/report"
)

// maxSources is longer than any value of annotation.BGPSourceAddress, in bytes.
const maxSources = 128

func keepNode(n *corev1.Node) *corev1.Node {
	kept := &corev1.Node{ObjectMeta: objects.Identity(n),
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
	kept := &coordinationv1.Lease{ObjectMeta: objects.Identity(l)}
	kept.Spec.HolderIdentity = l.Spec.HolderIdentity
	network := report.Of(l.Annotations).Network // bounded, whatever the Lease has
	network.KubeProxy = false                   // only speakers use it
	kept.Annotations = report.Report{Network: network}.Annotations()
	return kept
}
