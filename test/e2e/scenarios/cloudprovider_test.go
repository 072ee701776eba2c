package scenarios

import (
	"testing"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
)

// Kubernetes' own service controller drives Lodestone by one value of the chart and
// with the chart's rights. Whatever Services go through has the same result then.
func TestUpstreamServiceControllerDrivesTheProvider(t *testing.T) {
	s := begin(t)
	s.service("existing")
	before := s.assigned("existing")
	s.servedByUpstream()
	s.service("web")
	require.NotEqual(t, before, s.assigned("web"))
	s.event(s.namespace, "Service", "web", "EnsuredLoadBalancer")
	s.holds("existing", before)

	for _, story := range []struct {
		name string
		run  func(*testing.T)
	}{
		{"Answers", TestServiceIsReachableByTCPAndUDPAndHasOneAnswerer},
		{"Exhaustion", TestFreedAddressGoesToTheWaitingService},
		{"Requests", TestRequestedAddressIsGivenOrRefusedWithTheFacts},
		{"Recreation", TestServiceRecreatedWithinASecondIsANewService},
		{"DeletedWhileDown", TestServiceDeletedWhileTheControllerIsDownFreesItsAddress},
		{"TypeChange", TestServiceTurnsClusterIPAndBack},
		{"Repair", TestStatusWipedByHandIsRepaired},
		{"Killed", TestControllerKilledWhileAssigning},
		{"PoolRemoved", TestPoolRemovedWhileInUseMovesNobody},
		{"Draining", TestPoolIsEmptiedWithoutMovingAnybodyUnasked},
		{"Kept", TestAddressesAreKeptForTheServiceThatComesBack},
	} {
		t.Run(story.name, story.run)
	}

	s.config(usualPools) // the stories' own are gone
	s.restartController()
	s.holds("existing", before)
	s.change("web", ofType(corev1.ServiceTypeClusterIP), func(svc *corev1.Service) { svc.Spec.AllocateLoadBalancerNodePorts = nil })
	s.event(s.namespace, "Service", "web", "DeletedLoadBalancer")
	s.delete("existing")
	s.deleted("existing")
}

// servedByUpstream has Kubernetes' own service controller serve Services, until the test ends.
func (s *story) servedByUpstream() {
	s.Helper()
	s.afterwards(func() { require.NoError(s, s.Upgrade(s.ctx, s.Lab.Chart())) })
	require.NoError(s, s.Upgrade(s.ctx, s.Lab.Chart(), "--set=controller.serviceController=upstream"))
}

// Kubernetes' controller serves Services without a class: it cannot be switched on where
// these are somebody else's.
func TestUpstreamServiceControllerNeedsServicesWithoutAClass(t *testing.T) {
	s := begin(t)
	err := s.Upgrade(s.ctx, s.Lab.Chart(), "--set=controller.serviceController=upstream", "--set=controller.handleClassless=false")
	require.ErrorContains(t, err, "controller.handleClassless=false excludes")
}
