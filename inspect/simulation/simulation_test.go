package simulation

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/lodestone-lb/lodestone/controller/servicelb/ledger"
	"github.com/lodestone-lb/lodestone/ipam"
	"github.com/lodestone-lb/lodestone/pkg/annotation"
	"github.com/lodestone-lb/lodestone/pkg/clusterfacts"
	"github.com/lodestone-lb/lodestone/pkg/config"
	"github.com/lodestone-lb/lodestone/pkg/kube"
	"github.com/lodestone-lb/lodestone/pkg/report"
)

func parse(t *testing.T, body string) *config.Config {
	t.Helper()
	cfg, err := config.Parse([]byte("apiVersion: lodestone.io/v1alpha1\nkind: Config\n" + body))
	require.NoError(t, err)
	return cfg
}

// service is a Service of namespace shop; with an address it has been served.
func service(name, address string, changes ...func(*corev1.Service)) *corev1.Service {
	svc := &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: name, UID: types.UID(name), CreationTimestamp: metav1.Unix(1e9, 0)},
		Spec:       corev1.ServiceSpec{Type: corev1.ServiceTypeLoadBalancer, IPFamilies: []corev1.IPFamily{corev1.IPv4Protocol}},
	}
	if address != "" {
		svc.Annotations = map[string]string{annotation.Assigned: address}
		svc.Status.LoadBalancer.Ingress = []corev1.LoadBalancerIngress{{IP: address}}
	}
	for _, change := range changes {
		change(svc)
	}
	return svc
}

func annotated(key, value string) func(*corev1.Service) {
	return func(svc *corev1.Service) { metav1.SetMetaDataAnnotation(&svc.ObjectMeta, key, value) }
}

func cluster(t *testing.T, body string, services ...*corev1.Service) *Cluster {
	return &Cluster{
		Scope:    kube.Scope{Classless: true, Classes: []string{annotation.DefaultClass}},
		Services: services, Config: parse(t, body), Facts: &clusterfacts.Facts{}, Now: time.Unix(2e9, 0),
	}
}

func TestPlanShowsWhatAnEditDoes(t *testing.T) {
	t.Parallel()
	c := cluster(t, "pools: [{name: lan, addresses: [203.0.113.10-203.0.113.12]}]\n",
		service("stays", "203.0.113.10"),
		service("loses", "203.0.113.12"),
		service("asks", "203.0.113.11", annotated(annotation.AddressPool, "lan"), annotated(annotation.Addresses, "203.0.113.11")),
		service("waits", ""),
		service("lost", "", annotated(annotation.AddressPool, "nowhere")),
		service("foreign", "192.0.2.1", func(svc *corev1.Service) { other := "example.com/other"; svc.Spec.LoadBalancerClass = &other }),
	)
	outcomes := c.Plan(parse(t, `pools:
  - {name: lan, addresses: [203.0.113.10]}
  - {name: other, addresses: [203.0.113.11]}
  - {name: new, addresses: [198.51.100.1]}
`))
	got := map[string]Change{}
	for _, o := range outcomes {
		got[o.Service] = o.Change
	}
	assert.Equal(t, map[string]Change{
		"shop/stays": Kept, "shop/loses": Stranded, "shop/asks": Kept, "shop/waits": Satisfied, "shop/lost": Pending,
	}, got)
	assert.Equal(t, "203.0.113.12", outcomes[1].After.Held[0].Addr.String(), "%v", outcomes[1])

	back := c.Plan(c.Config)
	for _, o := range back {
		assert.Contains(t, []Change{Kept, Pending}, o.Change, "the same configuration changes nothing: %v", o)
	}
}

func TestLeasesAreThoseThatServicesShow(t *testing.T) {
	t.Parallel()
	const office = "pools: [{name: office, dhcp: {interface: eth1}}]\n"
	c := cluster(t, office,
		service("has", "198.18.0.240", annotated(annotation.Leases, "198.18.0.240=eth1")),
		service("waits", ""),
	)
	s := c.Explain(c.Services[0])
	assert.Equal(t, []string{`198.18.0.240 from pool "office"`}, s.Has)
	assert.Nil(t, s.Verdict.Refusal)
	s = c.Explain(c.Services[1])
	assert.Equal(t, `LeasePending: pool "office" has no lease for the Service yet`, s.Verdict.Refusal.Error())
	assert.Equal(t, []string{remedy(ledger.LeasePending).Cure}, s.Advice)

	for next, want := range map[string]Change{
		office: Kept,
		"pools: [{name: floor, dhcp: {interface: eth1}}]\n":                   Kept,
		"pools: [{name: office, dhcp: {interface: eth1}, state: draining}]\n": Kept,
		"pools: [{name: office, dhcp: {interface: eth2}}]\n":                  Lost,
		"pools: []\n": Lost,
		"pools: [{name: lan, addresses: [198.51.100.1]}]\n":              Lost,
		"pools: [{name: lan, addresses: [198.18.0.240-198.18.0.243]}]\n": Kept,
	} {
		assert.Equal(t, want, c.Plan(parse(t, next))[0].Change, next)
	}
}

func TestExplainReportsOtherHosts(t *testing.T) {
	t.Parallel()
	c := cluster(t, "pools: [{name: lan, addresses: [203.0.113.10-203.0.113.13]}]\n",
		service("later", "203.0.113.10"), service("first", "203.0.113.11"), service("new", ""))
	for i, announced := range []bool{true, false, false} {
		vip := c.Config.Pools[0].Free.Ranges()[0].From()
		for range i {
			vip = vip.Next()
		}
		c.Facts.Conflicts = append(c.Facts.Conflicts, clusterfacts.Conflict{
			Nodes: []string{"n1"}, Conflict: report.Conflict{VIP: vip, HardwareAddr: [6]byte{2, 5: 12}, Announced: announced}})
	}
	const host = "the host 02:00:00:00:00:0c (seen by node n1)"
	s := c.Explain(c.Services[0])
	assert.Equal(t, []string{`203.0.113.10 from pool "lan", which ` + host + " has, too"}, s.Has)
	assert.Nil(t, s.Verdict.Refusal)
	assert.Equal(t, []string{remedy(ledger.AddressConflict).Cure}, s.Advice)
	s = c.Explain(c.Services[1])
	require.NotNil(t, s.Verdict.Refusal)
	assert.Contains(t, s.Verdict.Refusal.Error(), "AddressConflict: "+host+" has 203.0.113.11, which is therefore not announced")
	assert.Equal(t, []string{remedy(ledger.AddressConflict).Cure}, s.Advice)
	s = c.Explain(c.Services[2])
	assert.Equal(t, []string{`203.0.113.13 from pool "lan"`}, s.Has)
	assert.Equal(t, `pool "lan" has 0 of 4 IPv4 addresses free (1 in use by other hosts)`, s.Considered[0].Message)
}

func TestExplainShowsTheStory(t *testing.T) {
	t.Parallel()
	c := cluster(t, `pools:
  - {name: lan, addresses: [203.0.113.10]}
  - {name: edge, addresses: [198.51.100.0/28], autoAssign: false}
  - {name: prod, addresses: [198.51.100.16/28], namespaces: [prod]}
`, service("has", "203.0.113.10"), service("waits", ""),
		service("internal", "", func(svc *corev1.Service) { svc.Spec.Type = corev1.ServiceTypeClusterIP }))

	s := c.Explain(c.Services[1])
	assert.Equal(t, []string{"one address of the family IPv4"}, s.Asks)
	assert.Equal(t, []string{"nothing"}, s.Has)
	require.NotNil(t, s.Verdict.Refusal)
	assert.Equal(t, ipam.PoolExhausted, s.Verdict.Refusal.Reason)
	reasons := map[string]ipam.Reason{}
	for _, p := range s.Considered {
		reasons[p.Pool] = p.Reason
	}
	assert.Equal(t, map[string]ipam.Reason{"lan": ipam.PoolExhausted, "edge": ipam.NotAutoAssigned, "prod": ipam.PoolNotAllowed}, reasons)
	assert.Equal(t, []string{remedy(ipam.PoolExhausted).Cure, "These pools have addresses for Services that name them: edge."}, s.Advice)

	assert.Empty(t, c.Explain(c.Services[0]).Advice)
	assert.Equal(t, "its spec.type is ClusterIP, not LoadBalancer", c.Explain(c.Services[2]).Foreign)
}
