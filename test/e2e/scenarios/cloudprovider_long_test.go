//go:build long

package scenarios

import "testing"

// Which address a Service gets is the same with Kubernetes' own service controller.
func TestUpstreamServiceControllerGivesTheSameAddresses(t *testing.T) {
	begin(t).servedByUpstream()
	t.Run("Priorities", TestServicesDrawFromThePoolOfTheLowestPriorityFirst)
	t.Run("Withheld", TestExcludedFirstAndLastAddressesAreNeverGiven)
	t.Run("Selectors", TestPoolsOpenByLabelsOfNamespaceAndService)
	t.Run("Sharing", TestServicesShareAnAddress)
	t.Run("Quota", TestQuotaBoundsANamespace)
}
