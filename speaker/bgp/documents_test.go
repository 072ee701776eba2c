package bgp

import (
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/lodestone-lb/lodestone/pkg/annotation"
	"github.com/lodestone-lb/lodestone/pkg/config"
	"github.com/lodestone-lb/lodestone/pkg/migrate"
	"github.com/lodestone-lb/lodestone/speaker/plan"
	"github.com/lodestone-lb/lodestone/speaker/snapshot"
)

// planned returns the plan for BGP of node n1 with these annotations, for a document. Each
// Service has one of the VIPs; those in silent have no endpoints.
func planned(cfg *config.Config, annotations map[string]string, vips []netip.Addr, silent ...netip.Addr) plan.BGP {
	n1 := corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n1", Annotations: annotations, Labels: map[string]string{"rack": "a"}}}
	n1.Status.Addresses = []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: node4.String()}}
	s := plan.Snapshot{Config: cfg, Nodes: map[string]plan.Node{"n1": snapshot.Node(&n1)}, Speakers: map[string]bool{"n1": true}}
	for _, vip := range vips {
		s.Services = append(s.Services, plan.Service{Name: "shop/" + vip.String(), VIPs: []netip.Addr{vip},
			Serving: !slices.Contains(silent, vip)})
	}
	return plan.Make("n1", s).BGP
}

// A router sees the aggregate of a document, and the AS number in the node's
// annotation; and the single routes when one of the addresses is not served.
func TestAggregateAndAnnotationAtARouter(t *testing.T) {
	t.Parallel()
	cfg, err := config.Parse([]byte(`
apiVersion: lodestone.io/v1alpha1
kind: Config
pools:
  - {name: lan, addresses: [203.0.113.0/27], useFirstAndLast: true}
advertisements:
  - {name: tor, bgp: {aggregationLength: 28}}
peers:
  - {name: tor, address: 198.18.0.2, peerASN: 64513, connectRetry: 1s}
`))
	require.NoError(t, err)
	const asn = "4200000012"
	w := newWorld(t, 1)
	f := w.frr(w.tor, "198.18.0.1", "neighbor 198.18.0.1 remote-as "+asn)
	first, second := netip.MustParseAddr("203.0.113.1"), netip.MustParseAddr("203.0.113.2")
	other := netip.MustParseAddr("203.0.113.17")
	vips := []netip.Addr{first, second, other}
	w.want = planned(cfg, map[string]string{annotation.BGPASN: asn}, vips)
	w.start()
	w.up("tor")
	low, high := netip.MustParsePrefix("203.0.113.0/28"), netip.MustParsePrefix("203.0.113.16/28")
	require.Equal(t, asn, w.has(f, low).AsPath.String)
	w.has(f, high)
	for _, vip := range vips {
		require.Nil(t, path(f, netip.PrefixFrom(vip, 32)), "%s has a route of its own", vip)
	}

	t.Log("one of the addresses is not served")
	w.want = planned(cfg, map[string]string{annotation.BGPASN: asn}, vips, second)
	w.set()
	w.has(f, netip.PrefixFrom(first, 32))
	w.lacks(f, low)
	require.Nil(t, path(f, netip.PrefixFrom(second, 32)))
	require.NotNil(t, path(f, high), "the other aggregate is not concerned")

	t.Log("a node without AS number")
	require.Equal(t, plan.NoLocalASN, planned(cfg, nil, vips).Problems["tor"].Reason)
}

// The configuration that comes of MetalLB's objects gives a router what MetalLB gave it.
func TestMigratedConfigurationAtARouter(t *testing.T) {
	t.Parallel()
	objects, err := migrate.Read("metallb.yaml", strings.NewReader(`
apiVersion: metallb.io/v1beta1
kind: IPAddressPool
metadata: {name: edge, namespace: metallb-system}
spec: {addresses: [203.0.113.0/27]}
---
apiVersion: metallb.io/v1beta1
kind: Community
metadata: {name: communities, namespace: metallb-system}
spec: {communities: [{name: web, value: "64512:80"}]}
---
apiVersion: metallb.io/v1beta1
kind: BGPAdvertisement
metadata: {name: edge, namespace: metallb-system}
spec:
  ipAddressPools: [edge]
  aggregationLength: 28
  communities: [web, "64512:100", "large:64512:1:2"]
---
apiVersion: metallb.io/v1beta2
kind: BGPPeer
metadata: {name: tor, namespace: metallb-system}
spec:
  myASN: 64512
  peerASN: 64513
  peerAddress: 198.18.0.2
  holdTime: 9s
  connectTime: 1s
  bfdProfile: slow
  nodeSelectors: [{matchLabels: {rack: a}}]
---
apiVersion: metallb.io/v1beta1
kind: BFDProfile
metadata: {name: slow, namespace: metallb-system}
spec: {receiveInterval: 500, transmitInterval: 500}
`))
	require.NoError(t, err)
	r, err := migrate.MetalLB(objects)
	require.NoError(t, err)
	cfg, err := config.Parse([]byte(r.Document))
	require.NoError(t, err)
	w := newWorld(t, 1)
	f := w.frr(w.tor, "198.18.0.1", "neighbor 198.18.0.1 timers 3 9")
	w.want = planned(cfg, nil, []netip.Addr{netip.MustParseAddr("203.0.113.1"), netip.MustParseAddr("203.0.113.2")})
	w.start()
	w.up("tor")
	// MetalLB announces the aggregate of what is served, whatever else is in it.
	got := w.has(f, netip.MustParsePrefix("203.0.113.0/28"))
	require.Equal(t, "64512", got.AsPath.String)
	require.ElementsMatch(t, []string{"64512:80", "64512:100"}, strings.Fields(got.Community.String))
	require.Equal(t, "64512:1:2", got.Large.String)
	require.Equal(t, "9s", w.status("tor").HoldTime.String())
}
