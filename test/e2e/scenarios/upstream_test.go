package scenarios

import (
	"testing"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
)

// Kubernetes' own service controller drives our LoadBalancer implementation:
// the interface is implemented to the letter.
func TestUpstreamServiceControllerDrivesTheProvider(t *testing.T) {
	s := begin(t)
	s.service("existing")
	address := s.assigned("existing")
	s.stopController()
	stop := s.runController("--controllers=*,service-lb-controller,-lodestone-service")

	s.service("web")
	web := s.assigned("web")
	require.NotEqual(t, address, web)
	s.holds("existing", address)
	s.event(s.namespace, "Service", "web", "EnsuredLoadBalancer")

	s.change("web", ofType(corev1.ServiceTypeClusterIP), func(svc *corev1.Service) { svc.Spec.AllocateLoadBalancerNodePorts = nil })
	s.event(s.namespace, "Service", "web", "DeletedLoadBalancer")
	s.delete("existing")
	s.deleted("existing")
	stop()
	s.startController()
}
