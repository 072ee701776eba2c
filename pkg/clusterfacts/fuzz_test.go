package clusterfacts

import (
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"

	"github.com/lodestone-lb/lodestone/pkg/annotation"
	"github.com/lodestone-lb/lodestone/pkg/testcost"
)

// What kubelets, speakers and the API server report of addresses becomes valid ranges in order, each with a reason,
// whatever it is, and in whichever order it comes.
func FuzzCollect(f *testing.F) {
	f.Add("198.18.0.1,198.18.0.2,2001:db8::1", "10.244.0.0/24,fd00::/64", "198.18.0.1", "10.96.0.0/12", `{"gateways":["198.18.0.254"]}`)
	f.Add("::ffff:198.18.0.1,fe80::1%eth0,", "10.244.0.1/0,::ffff:0:0/96", "0.0.0.0", "0.0.0.0/0,::/0", "{")
	f.Add(strings.Repeat("198.18.0.1,", 1<<10), strings.Repeat("10.0.0.0/8,", 1<<10), strings.Repeat(",", 1<<10), strings.Repeat("/", 1<<10),
		`{"segments":["198.18.0.0/24 eth0"]}`)
	f.Fuzz(func(t *testing.T, addresses, pods, source, services, reported string) {
		list := func(text string) []string { return strings.Split(text, ",") }
		objects := func(nodes ...string) Objects {
			o := Objects{APIServer: nil, Kubernetes: apiService(list(source)...)}
			for _, name := range nodes {
				n := sourced(name, source)
				n.Spec.PodCIDRs = list(pods)
				for i, a := range list(addresses) {
					n.Status.Addresses = append(n.Status.Addresses, corev1.NodeAddress{Address: a,
						Type: []corev1.NodeAddressType{corev1.NodeInternalIP, corev1.NodeExternalIP, corev1.NodeHostName}[i%3]})
				}
				o.Nodes = append(o.Nodes, n)
				o.Leases = append(o.Leases, lease(name, map[string]string{annotation.Report: reported}))
			}
			o.ServiceCIDRs = append(o.ServiceCIDRs, serviceCIDR("a", list(services)...))
			o.APIServer = append(o.APIServer, endpoints(list(addresses)...))
			return o
		}
		var facts *Facts
		o := objects("n1", "n2")
		testcost.Within(t, "facts", 2*(len(addresses)+len(pods)+len(source)+len(services)+len(reported)), func() { facts = Collect(o) })
		require.True(t, slices.IsSortedFunc(facts.Forbidden, func(a, b Forbidden) int { return a.Range.From().Compare(b.Range.From()) }))
		for _, b := range facts.Forbidden {
			require.True(t, b.Range.IsValid() && b.Range.From().Zone() == "" && !b.Range.From().Is4In6(), b.Range)
			require.NotEmpty(t, b.Why)
		}
		require.True(t, facts.Equal(Collect(objects("n2", "n1"))))
	})
}
