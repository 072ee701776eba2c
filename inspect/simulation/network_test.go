package simulation

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"pgregory.net/rapid"

	"github.com/lodestone-lb/lodestone/pkg/annotation"
	"github.com/lodestone-lb/lodestone/pkg/config"
	"github.com/lodestone-lb/lodestone/pkg/kube"
	"github.com/lodestone-lb/lodestone/pkg/report"
	"github.com/lodestone-lb/lodestone/speaker/plan"
)

const announced = `pools:
  - {name: lan, addresses: [203.0.113.10-203.0.113.19], advertise: [segment]}
  - {name: edge, addresses: [198.51.100.0/28], advertise: [tor]}
  - {name: both, addresses: [192.0.2.0/28]}
advertisements: [{name: segment, layer2: {}}, {name: tor, bgp: {}}]
peers: [{name: tor, address: 192.0.2.254, localASN: 64512, peerASN: 64513}]
`

func local(svc *corev1.Service) {
	svc.Spec.ExternalTrafficPolicy = corev1.ServiceExternalTrafficPolicyLocal
}

func slice(service string, nodes ...string) *discoveryv1.EndpointSlice {
	s := &discoveryv1.EndpointSlice{ObjectMeta: metav1.ObjectMeta{Namespace: "shop",
		Labels: map[string]string{discoveryv1.LabelServiceName: service}}}
	for i := range nodes {
		s.Endpoints = append(s.Endpoints, discoveryv1.Endpoint{NodeName: &nodes[i]})
	}
	return s
}

// announcers are nodes with ready speakers, and Services.
func announcers(cfg *config.Config, nodes ...string) Announcers {
	a := Announcers{Scope: kube.Scope{Classless: true}, Config: cfg, Ready: map[string]bool{}}
	for i, name := range nodes {
		a.Ready[name] = true
		a.Nodes = append(a.Nodes, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}, Status: corev1.NodeStatus{
			Addresses: []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: fmt.Sprintf("203.0.113.%d", i+1)}}}})
	}
	return a
}

func (a *Announcers) serve(svc *corev1.Service, nodes ...string) {
	a.Services, a.Slices = append(a.Services, svc), append(a.Slices, slice(svc.Name, nodes...))
}

func TestANodeThatLeaves(t *testing.T) {
	t.Parallel()
	a := announcers(parse(t, announced), "n1", "n2")
	a.serve(service("local", "203.0.113.10", local), "n1")
	a.serve(service("routed", "198.51.100.1"), "n2")
	a.serve(service("near", "198.51.100.2", local), "n1")
	a.serve(service("both", "192.0.2.1", local), "n1", "n2")
	a.serve(service("idle", "203.0.113.11"))
	for _, how := range []Removal{Drain, Lose} {
		before := NewNetwork(a)
		after := before.Without("n1", how)
		moves := map[string]Move{}
		for _, m := range before.Moves(after) {
			moves[m.VIP.String()] = m
		}
		require.Len(t, moves, 4, "%s: the idle one does not move: %v", how, moves)
		assert.Equal(t, Audience{Owner: "n1"}, moves["203.0.113.10"].Before, how)
		assert.True(t, moves["203.0.113.10"].Orphaned(), how)
		assert.Equal(t, plan.NoServingEndpoint, moves["203.0.113.10"].Silence.Reason, how)
		assert.Equal(t, []string{"n1", "n2"}, moves["198.51.100.1"].Before.Routers, how)
		assert.Equal(t, []string{"n2"}, moves["198.51.100.1"].After.Routers, how)
		assert.True(t, moves["198.51.100.2"].Orphaned(), how)
		assert.Equal(t, Audience{Owner: "n2", Routers: []string{"n2"}}, moves["192.0.2.1"].After, how)

		assert.True(t, before.Speakers["n1"], "the present stays as it is")
		assert.False(t, before.Nodes["n1"].Leaving)
	}
}

// The prediction for the removal of a node equals the Network of the same cluster without the node's speaker and
// pods.
func TestRemovalComesTrue(t *testing.T) {
	t.Parallel()
	cfg := parse(t, announced)
	edits := []*config.Config{
		cfg,
		parse(t, strings.Replace(announced, "layer2: {}", "layer2: {nodeSelector: {matchLabels: {rack: b}}}", 1)),
	}
	rapid.Check(t, func(t *rapid.T) {
		nodes := []string{"n1", "n2", "n3", "n4"}[:rapid.IntRange(1, 4).Draw(t, "nodes")]
		a, then := announcers(cfg, nodes...), announcers(cfg, nodes...)
		gone := rapid.SampledFrom(nodes).Draw(t, "gone")
		delete(then.Ready, gone)
		for i := range rapid.IntRange(0, 6).Draw(t, "services") {
			vip := rapid.SampledFrom([]string{"203.0.113.1%d", "198.51.100.%d", "192.0.2.%d"}).Draw(t, "pool")
			svc := service(fmt.Sprint("s", i), fmt.Sprintf(vip, i+1))
			if rapid.Bool().Draw(t, "local") {
				local(svc)
			}
			on := rapid.SliceOfDistinct(rapid.SampledFrom(nodes), rapid.ID).Draw(t, "endpoints")
			a.serve(svc, on...)
			then.serve(svc, slices.DeleteFunc(slices.Clone(on), func(n string) bool { return n == gone })...)
		}
		now, want := NewNetwork(a), NewNetwork(then).Who()
		require.Equal(t, want, now.Without(gone, Lose).Who())
		require.Equal(t, want, now.Without(gone, Drain).Who(), "who is drained announces nothing either")
		require.Equal(t, NewNetwork(a).Who(), now.Who())

		// Another configuration is as good as it would be from the start, and
		// the other Services make no difference.
		edit := edits[rapid.IntRange(0, len(edits)-1).Draw(t, "edit")]
		edited := a
		edited.Config = edit
		require.Equal(t, NewNetwork(edited).Who(), now.Under(edit, func(netip.Addr) bool { return false }).Who())
		for vip, audience := range NewNetwork(edited).Who() {
			part := NewNetwork(edited).Of(vip)
			require.Equal(t, audience, part.Who()[vip])
			for _, name := range nodes {
				require.Equal(t, NewNetwork(edited).View(name).Verdicts[vip], part.View(name).Verdicts[vip])
			}
		}

		// Who announces a VIP follows from the plans of the nodes.
		for vip, audience := range now.Who() {
			for _, name := range nodes {
				v := now.View(name).Verdicts[vip]
				require.Equal(t, audience.Owner == name, v.Owned)
				require.Equal(t, slices.Contains(audience.Routers, name), len(v.Peers) > 0)
			}
			if audience.Silent() {
				require.NotEmpty(t, now.Silence(vip).Message)
				require.Equal(t, now.Silence(vip), now.Silences([]netip.Addr{vip})[vip], "the others make no difference")
			}
		}
	})
}

func TestSilenceIsThatOfTheClosestNode(t *testing.T) {
	t.Parallel()
	a := announcers(parse(t, announced), "n1", "n2", "n3")
	a.serve(service("local", "203.0.113.10", local), "n2", "n3")
	a.Nodes[1].Labels = map[string]string{corev1.LabelNodeExcludeBalancers: ""}
	delete(a.Ready, "n3")
	vip := netip.MustParseAddr("203.0.113.10")
	silence := NewNetwork(a).Silence(vip)
	assert.Equal(t, plan.SpeakerNotReady, silence.Reason, "n1 has no endpoint, n2 is taken out, n3 lacks its speaker alone")
	assert.Contains(t, silence.Message, "node n3: ")

	a.Nodes = nil
	assert.Equal(t, "there are no nodes", NewNetwork(a).Silence(vip).Message)
}

func TestReportsAreOfSpeakersAlone(t *testing.T) {
	t.Parallel()
	a := announcers(parse(t, announced), "n1")
	a.Leases = append(a.Leases, lease(annotation.SpeakerLeasePrefix+"n1", "203.0.113.0/24 eth0"),
		lease("lodestone-controller", "198.51.100.0/24 eth0"))
	n := NewNetwork(a)
	require.Len(t, n.Reports, 1)
	assert.Equal(t, []report.Segment{{Subnet: netip.MustParsePrefix("203.0.113.0/24"), Interface: "eth0"}}, n.Nodes["n1"].Segments)
}

func TestPoolsAreCounted(t *testing.T) {
	t.Parallel()
	c := cluster(t, "pools: [{name: lan, addresses: [203.0.113.10-203.0.113.12]}, {name: office, dhcp: {interface: eth1}}]\n",
		service("has", "203.0.113.10"), service("waits", ""))
	a := c.Allocation()
	require.Len(t, a.Pools, 1, "how much of a leasing pool is free only the server knows")
	assert.EqualValues(t, 2, a.Pools[0].Assigned, "the one that waits is about to get one")
	assert.EqualValues(t, 1, a.Pools[0].Free)
	assert.Nil(t, a.Verdicts["shop/waits"].Refusal)
	c.Config = nil
	assert.Empty(t, c.Allocation().Pools)
}

func lease(name, segments string) *coordinationv1.Lease {
	return &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Name: name,
		Annotations: map[string]string{annotation.Report: `{"segments": ["` + segments + `"]}`}}}
}
