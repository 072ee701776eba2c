package ledger

import corev1 "k8s.io/api/core/v1"

// NameOf is "namespace/name", by which people and the ledger know a Service.
func NameOf(svc *corev1.Service) string { return svc.Namespace + "/" + svc.Name }

// LoadBalancerName is the name of the Service's load balancer in the cloud provider interface.
func LoadBalancerName(cluster string, svc *corev1.Service) string {
	return cluster + "-" + svc.Namespace + "-" + svc.Name
}
