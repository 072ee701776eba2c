package bgp

import (
	"net/netip"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/lodestone-lb/lodestone/inspect/simulation"
	"github.com/lodestone-lb/lodestone/pkg/annotation"
	"github.com/lodestone-lb/lodestone/pkg/config"
	"github.com/lodestone-lb/lodestone/pkg/kube"
	"github.com/lodestone-lb/lodestone/speaker/plan"
)

// network is one of the node n1, with a Service at each of the VIPs.
func network(t *testing.T, document string, vips ...string) *simulation.Network {
	t.Helper()
	c, err := config.Parse([]byte("apiVersion: lodestone.io/v1alpha1\nkind: Config\n" + document))
	require.NoError(t, err)
	a := simulation.Announcers{Scope: kube.Scope{Classless: true}, Config: c, Ready: map[string]bool{"n1": true}}
	a.Nodes = []*corev1.Node{{ObjectMeta: metav1.ObjectMeta{Name: "n1"}, Status: corev1.NodeStatus{
		Addresses: []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: "203.0.113.1"}}}}}
	node := "n1"
	for _, vip := range vips {
		a.Slices = append(a.Slices, &discoveryv1.EndpointSlice{
			ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Labels: map[string]string{discoveryv1.LabelServiceName: "at-" + vip}},
			Endpoints:  []discoveryv1.Endpoint{{NodeName: &node}},
		})
		a.Services = append(a.Services, &corev1.Service{
			ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "at-" + vip, Annotations: map[string]string{annotation.Assigned: vip}},
			Spec:       corev1.ServiceSpec{Type: corev1.ServiceTypeLoadBalancer},
			Status:     corev1.ServiceStatus{LoadBalancer: corev1.LoadBalancerStatus{Ingress: []corev1.LoadBalancerIngress{{IP: vip}}}},
		})
	}
	return simulation.NewNetwork(a)
}

const aggregated = `pools: [{name: edge, addresses: [198.51.100.0/24]}]
advertisements: [{name: tor, bgp: {aggregationLength: 26}}]
peers: [{name: tor, address: 203.0.113.254, localASN: 64512, peerASN: 64513}]
`

// The filter by an address finds the aggregate that contains it, and the one by a prefix the routes that overlap it, also
// if no VIP is there.
func TestRoutesWithinAnAggregate(t *testing.T) {
	t.Parallel()
	n := network(t, aggregated, "198.51.100.1", "198.51.100.2", "198.51.100.130")
	for within, want := range map[string][]string{
		"":                  {"198.51.100.0/26", "198.51.100.128/26"},
		"198.51.100.1/32":   {"198.51.100.0/26"},
		"198.51.100.60/32":  {"198.51.100.0/26"},
		"198.51.100.128/25": {"198.51.100.128/26"},
		"198.51.0.0/16":     {"198.51.100.0/26", "198.51.100.128/26"},
		"198.51.100.200/32": {},
		"192.0.2.0/24":      {},
	} {
		f := Filter{}
		if within != "" {
			f.Within = netip.MustParsePrefix(within)
		}
		got := []string{}
		for _, r := range RoutesOf(n, f).Routes {
			got = append(got, r.Prefix.String())
		}
		assert.Equal(t, want, got, within)
	}
}

// A session that is left over is none of those that there should be: 1 of 1 is up, not 2 of 1.
func TestLeftoverSessionsAreNotCounted(t *testing.T) {
	t.Parallel()
	s := Sessions{Sessions: []Session{
		{Node: "n1", Peer: "tor", State: Established},
		{Node: "n2", Peer: "tor", State: Leftover, Since: time.Now()},
		{Node: "n3", Peer: "spine", State: Down, Message: "the hold timer has expired"},
		{Node: "n4", Peer: "spine", State: Established},
		{Node: "n5", Peer: "old", State: Leftover},
	}}
	all := s.ByPeer()
	require.Len(t, all, 3)
	for i, want := range []Peer{{Name: "old"}, {Name: "spine", Up: 1, Nodes: 2}, {Name: "tor", Up: 1, Nodes: 1}} {
		got := all[i]
		assert.Len(t, got.Down, 1, got.Name)
		got.Down = nil
		assert.Equal(t, want, got)
		assert.LessOrEqual(t, got.Up, got.Nodes)
	}
}

// A session that is up and has something wrong with it is not healthy.
func TestHealthy(t *testing.T) {
	t.Parallel()
	for want, all := range map[bool][][]Session{
		true: {nil, {{State: Established}, {State: Established}}},
		false: {
			{{State: Established}, {State: Established, Message: "the router does not accept IPv6"}},
			{{State: Established}, {State: Down}}, {{State: Unknown}}, {{State: Impossible}}, {{State: Leftover}},
		},
	} {
		for _, s := range all {
			assert.Equal(t, want, Sessions{Sessions: s}.Healthy(), s)
		}
	}
}

// Whether a session is internal follows from the AS number of the node, which an annotation may give.
func TestInternalSessions(t *testing.T) {
	t.Parallel()
	session := func(local uint32, peer config.ASN) plan.Session {
		return plan.Session{Peer: &config.Peer{Name: "tor", PeerASN: peer}, LocalASN: local}
	}
	for _, c := range []struct {
		session plan.Session
		want    bool
	}{
		{session(64512, config.ASN{Internal: true}), true},
		{session(64512, config.ASN{Number: 64512}), true},
		{session(64513, config.ASN{Number: 64512}), false},
		{session(64512, config.ASN{}), false},
	} {
		r := newRoute(c.session, plan.Attributes{LocalPreference: new(uint32(200)), Prepend: 2})
		assert.Equal(t, c.want, r.LocalPreference != nil, c.session)
		assert.Equal(t, !c.want, r.Prepend == 2, c.session)
	}
}
