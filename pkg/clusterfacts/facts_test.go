package clusterfacts

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go4.org/netipx"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/lodestone-lb/lodestone/pkg/annotation"
	"github.com/lodestone-lb/lodestone/pkg/config"
	"github.com/lodestone-lb/lodestone/pkg/report"
)

func node(name string, podCIDRs []string, addresses ...corev1.NodeAddress) *corev1.Node {
	return &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: corev1.NodeSpec{PodCIDRs: podCIDRs},
		Status: corev1.NodeStatus{Addresses: addresses}}
}

func sourced(name, addresses string) *corev1.Node {
	n := node(name, nil)
	n.Annotations = map[string]string{annotation.BGPSourceAddress: addresses}
	return n
}

func internal(a string) corev1.NodeAddress {
	return corev1.NodeAddress{Type: corev1.NodeInternalIP, Address: a}
}

func external(a string) corev1.NodeAddress {
	return corev1.NodeAddress{Type: corev1.NodeExternalIP, Address: a}
}

func lease(node string, annotations map[string]string) *coordinationv1.Lease {
	return &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Namespace: "lodestone-system",
		Name: annotation.SpeakerLeasePrefix + node, Annotations: annotations}}
}

func said(segments, gateways string) map[string]string {
	return map[string]string{annotation.Report: fmt.Sprintf(`{"segments": [%s], "gateways": [%s]}`, quoted(segments), quoted(gateways))}
}

// quoted returns a list in JSON of what commas separate.
func quoted(list string) string {
	if list == "" {
		return ""
	}
	return `"` + strings.ReplaceAll(list, ",", `", "`) + `"`
}

func serviceCIDR(name string, cidrs ...string) *networkingv1.ServiceCIDR {
	return &networkingv1.ServiceCIDR{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: networkingv1.ServiceCIDRSpec{CIDRs: cidrs}}
}

func endpoints(addresses ...string) *discoveryv1.EndpointSlice {
	s := &discoveryv1.EndpointSlice{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "kubernetes",
		Labels: map[string]string{discoveryv1.LabelServiceName: "kubernetes"}}}
	for _, a := range addresses {
		s.Endpoints = append(s.Endpoints, discoveryv1.Endpoint{Addresses: []string{a}})
	}
	return s
}

func apiService(ips ...string) *corev1.Service {
	return &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "kubernetes"},
		Spec: corev1.ServiceSpec{ClusterIPs: ips}}
}

// sentences returns what is forbidden, a sentence for each.
func sentences(f *Facts) []string {
	var all []string
	for _, x := range f.Forbidden {
		all = append(all, config.RangeText(x.Range)+" is "+x.Why)
	}
	return all
}

func TestCollect(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name     string
		objects  Objects
		want     []string
		segments string
	}{
		{name: "an empty cluster", segments: "[]"},
		{
			name: "a node's addresses and pods, both families",
			objects: Objects{Nodes: []*corev1.Node{node("n1", []string{"10.244.1.0/24", "fd00:1::/64"},
				internal("198.18.0.11"), internal("2001:DB8:0::11"), external("203.0.113.11"), external("198.18.0.11"),
				corev1.NodeAddress{Type: corev1.NodeHostName, Address: "192.0.2.1"})}},
			want: []string{
				"10.244.1.0/24 is in the pod CIDR 10.244.1.0/24 of node n1",
				"198.18.0.11 is the address of node n1",
				"203.0.113.11 is the address of node n1",
				"2001:db8::11 is the address of node n1",
				"fd00:1::/64 is in the pod CIDR fd00:1::/64 of node n1",
			},
		},
		{
			name: "a node's ends of BGP sessions",
			objects: Objects{Nodes: []*corev1.Node{keepNode(sourced("n1", "198.18.0.21, 2001:db8::21")), keepNode(sourced("n2", "nonsense")),
				keepNode(sourced("n3", "fe80::1")), keepNode(sourced("n4", strings.Repeat("198.18.0.22,", 1000)))}},
			want: []string{
				"198.18.0.21 is the source address of BGP sessions of node n1",
				"2001:db8::21 is the source address of BGP sessions of node n1",
			},
		},
		{
			name: "what the API server tells of itself and of cluster IPs",
			objects: Objects{
				ServiceCIDRs: []*networkingv1.ServiceCIDR{serviceCIDR("kubernetes", "10.96.0.0/12", "fd00:2::/112"),
					serviceCIDR("more", "10.64.0.0/16")},
				APIServer:  []*discoveryv1.EndpointSlice{endpoints("198.18.0.2", "198.18.0.3"), endpoints("2001:db8::2")},
				Kubernetes: apiService("10.96.0.1"),
			},
			want: []string{
				"10.64.0.0/16 is in the Service CIDR 10.64.0.0/16",
				"10.96.0.0/12 is in the Service CIDR 10.96.0.0/12",
				"198.18.0.2 is an endpoint of the API server",
				"198.18.0.3 is an endpoint of the API server",
				"2001:db8::2 is an endpoint of the API server",
				"fd00:2::/112 is in the Service CIDR fd00:2::/112",
			},
		},
		{
			name:    "an API server without ServiceCIDRs",
			objects: Objects{Kubernetes: apiService("10.96.0.1", "fd00:2::1")},
			want:    []string{"10.96.0.1 is the cluster IP of the API server", "fd00:2::1 is the cluster IP of the API server"},
		},
		{
			name: "what speakers report",
			objects: Objects{
				Nodes: []*corev1.Node{node("n2", nil), node("n1", nil), node("n3", nil), node("old", nil)},
				Leases: []*coordinationv1.Lease{
					lease("n2", said("198.18.0.0/24 eth0,2001:db8::/64 eth0", "198.18.0.1")),
					lease("n1", said("198.18.0.0/24 eth0", "198.18.0.1,2001:db8::1")),
					lease("n3", said("198.18.3.0/24 eth0", "198.18.0.1")),
					lease("old", nil),
					lease("deleted", said("192.0.2.0/24 eth0", "192.0.2.1")),
					{ObjectMeta: metav1.ObjectMeta{Name: "n1", Annotations: said("192.0.2.0/24 eth0", "192.0.2.1")}},
				},
			},
			want: []string{
				"198.18.0.0 is the network address of 198.18.0.0/24",
				"198.18.0.1 is the default gateway of node n1 and 2 more",
				"198.18.0.255 is the broadcast address of 198.18.0.0/24",
				"198.18.3.0 is the network address of 198.18.3.0/24",
				"198.18.3.255 is the broadcast address of 198.18.3.0/24",
				"2001:db8:: is the subnet-router anycast address of 2001:db8::/64",
				"2001:db8::1 is the default gateway of node n1",
			},
			segments: "[198.18.0.0/24 198.18.3.0/24 2001:db8::/64]",
		},
		{
			name: "a segment between two hosts has no other addresses",
			objects: Objects{
				Nodes:  []*corev1.Node{node("n1", nil)},
				Leases: []*coordinationv1.Lease{lease("n1", said("198.18.0.0/31 eth0,2001:db8::/127 eth0", ""))},
			},
			segments: "[198.18.0.0/31 2001:db8::/127]",
		},
		{
			name: "one address, several reasons",
			objects: Objects{
				Nodes:     []*corev1.Node{node("n1", nil, internal("198.18.0.11"))},
				APIServer: []*discoveryv1.EndpointSlice{endpoints("198.18.0.11")},
			},
			want: []string{"198.18.0.11 is an endpoint of the API server, the address of node n1"},
		},
		{
			name: "one external address for all nodes",
			objects: Objects{Nodes: []*corev1.Node{
				node("n3", nil, external("203.0.113.1")), node("n1", nil, external("203.0.113.1")),
				node("n2", nil, external("203.0.113.1"))}},
			want: []string{"203.0.113.1 is the address of node n1 and 2 more"},
		},
		{
			name: "garbage is ignored",
			objects: Objects{
				Nodes: []*corev1.Node{node("n%d1", []string{"10.244.0.0", "10.244.7.9/24", "", "::ffff:10.0.0.0/104"},
					internal(""), internal("fe80::1%eth0"), internal("n1"))},
				Leases:       []*coordinationv1.Lease{lease("n%d1", said("0.0.0.0/0 eth0", "0.0.0.0,::,127.0.0.1,224.0.0.1,fe80::1"))},
				ServiceCIDRs: []*networkingv1.ServiceCIDR{serviceCIDR("x", "no", "10.96.0.0/99")},
				APIServer:    []*discoveryv1.EndpointSlice{endpoints("api.example")},
				Kubernetes:   apiService("None"),
			},
			want: []string{"10.244.7.0/24 is in the pod CIDR 10.244.7.0/24 of node n%d1"}, segments: "[]",
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			f := Collect(tt.objects)
			assert.Equal(t, tt.want, sentences(f))
			if tt.segments == "" || len(tt.objects.Leases) == 0 {
				assert.Nil(t, f.Segments, "no speaker has reported")
			} else {
				assert.NotNil(t, f.Segments)
				assert.Equal(t, tt.segments, fmt.Sprint(f.Segments))
			}
		})
	}
}

// large is a cluster of n nodes with everything.
func large(n int) Objects {
	o := Objects{
		ServiceCIDRs: []*networkingv1.ServiceCIDR{serviceCIDR("a", "10.96.0.0/12"), serviceCIDR("b", "fd00:2::/112")},
		APIServer:    []*discoveryv1.EndpointSlice{endpoints("198.18.0.1", "198.18.0.2", "198.18.0.3")},
		Kubernetes:   apiService("10.96.0.1"),
	}
	for i := range n {
		name := fmt.Sprintf("n%d", i)
		o.Nodes = append(o.Nodes, node(name, []string{fmt.Sprintf("10.%d.%d.0/24", 128+i/256, i%256)},
			internal(fmt.Sprintf("198.18.%d.%d", i/256, i%256)), external("203.0.113.1")))
		o.Leases = append(o.Leases, lease(name, said(fmt.Sprintf("198.18.%d.0/24 eth0", i/256), "198.18.255.254,2001:db8::1")))
	}
	return o
}

func TestCollectDoesNotDependOnTheOrder(t *testing.T) {
	t.Parallel()
	o := large(300)
	want := Collect(o)
	require.Equal(t, 300+300+3+2+1, len(want.Forbidden), "pod CIDRs, addresses, what nodes share, Service CIDRs, 198.18.1.255")
	r := rand.New(rand.NewPCG(1, 2))
	for range 20 {
		r.Shuffle(len(o.Nodes), func(i, j int) { o.Nodes[i], o.Nodes[j] = o.Nodes[j], o.Nodes[i] })
		r.Shuffle(len(o.Leases), func(i, j int) { o.Leases[i], o.Leases[j] = o.Leases[j], o.Leases[i] })
		r.Shuffle(len(o.ServiceCIDRs), func(i, j int) { o.ServiceCIDRs[i], o.ServiceCIDRs[j] = o.ServiceCIDRs[j], o.ServiceCIDRs[i] })
		e := o.APIServer[0].Endpoints
		r.Shuffle(len(e), func(i, j int) { e[i], e[j] = e[j], e[i] })
		got := Collect(o)
		require.Equal(t, want, got)
		require.True(t, want.Equal(got))
	}
	o.Nodes = o.Nodes[1:]
	assert.False(t, want.Equal(Collect(o)))
}

// conflicting is what a speaker that runs reports of its VIPs.
func conflicting(node, conflicts string) *coordinationv1.Lease {
	l := lease(node, map[string]string{annotation.Report: `{"conflicts": [` + quoted(conflicts) + `]}`})
	l.Spec.HolderIdentity = &node
	return l
}

func TestConflicts(t *testing.T) {
	t.Parallel()
	const c, d = "02:00:00:00:00:0c", "02:00:00:00:00:0d"
	down := node("n4", nil)
	down.Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionFalse}}
	stopped := conflicting("n3", "198.18.0.9 "+d+" withheld")
	stopped.Spec.HolderIdentity = nil
	f := Collect(Objects{
		Nodes: []*corev1.Node{node("n1", nil), node("n2", nil), node("n3", nil), down},
		Leases: []*coordinationv1.Lease{
			conflicting("n2", "198.18.0.7 "+d+" announced,2001:db8::7 "+d+" withheld"), stopped,
			conflicting("n4", "198.18.0.9 "+d+" withheld"), conflicting("n5", "198.18.0.9 "+d+" withheld"),
			conflicting("n1", "198.18.0.8 "+c+" withheld,198.18.0.7 "+c+" withheld,198.18.0.7 "+d+" withheld"),
		},
	})
	var said []string
	for _, d := range f.Conflicts {
		said = append(said, fmt.Sprintf("%s %v: %s", d.VIP, d.Announced, d))
	}
	assert.Equal(t, []string{
		"198.18.0.7 true: the host " + c + " (seen by node n1 and 1 more)",
		"198.18.0.8 false: the host " + c + " (seen by node n1)",
		"2001:db8::7 false: the host " + d + " (seen by node n2)",
	}, said, "neither of a speaker that has stopped, nor of a node that is down or unknown")
	assert.False(t, f.Equal(&Facts{}))
}

// A node that lies keeps few addresses from being handed out, however many segments it
// reports.
func TestOneNodeForbidsFewAddresses(t *testing.T) {
	t.Parallel()
	var segments, gateways []string
	for i := range 64 {
		segments = append(segments, fmt.Sprintf("203.0.113.%d/30 eth0", 4*i), fmt.Sprintf("203.0.113.%d/31 eth1", 2*i))
		gateways = append(gateways, fmt.Sprintf("203.0.113.%d", 4*i+1))
	}
	lies := lease("n1", said(strings.Join(segments, ","), strings.Join(gateways, ",")))
	o := Objects{Nodes: []*corev1.Node{node("n1", nil), node("n2", nil)}, Leases: []*coordinationv1.Lease{lies}}
	for i := range 100 { // of no Node
		ghost := lies.DeepCopy()
		ghost.Name += fmt.Sprint("-ghost-", i)
		o.Leases = append(o.Leases, ghost)
	}
	assert.LessOrEqual(t, len(Collect(o).Forbidden), report.MaxGateways+2*maxAlone)
	o.Leases = append(o.Leases, lease("n2", said("203.0.113.252/30 eth0", "")))
	assert.Contains(t, sentences(Collect(o)), "203.0.113.255 is the broadcast address of 203.0.113.252/30", "another node agrees")
}

// closed is how many addresses of the pool are not handed out.
func closed(t *testing.T, o Objects, document string) (n int) {
	t.Helper()
	cfg, err := config.Parse([]byte("apiVersion: lodestone.io/v1alpha1\nkind: Config\n" + document))
	require.NoError(t, err)
	var b netipx.IPSetBuilder
	for _, f := range Forbid(cfg, Collect(o)) {
		b.AddRange(f.Range)
	}
	set, err := b.IPSet()
	require.NoError(t, err)
	for _, r := range cfg.Pools[0].Free.Ranges() {
		for a := r.From(); a.Compare(r.To()) <= 0; a = a.Next() {
			if set.Contains(a) {
				n++
			}
		}
	}
	return n
}

// A node that lies about its gateways and segments closes no pool, however small.
func TestOneNodeClosesNoPool(t *testing.T) {
	t.Parallel()
	var gateways, segments []string
	for i := range 64 {
		gateways = append(gateways, fmt.Sprintf("203.0.113.%d", i), fmt.Sprintf("2001:db8::%x", i))
		segments = append(segments, fmt.Sprintf("203.0.113.%d/30 eth0", 4*i))
	}
	for _, c := range []struct {
		pool      string
		most, two int
	}{
		{"203.0.113.0-203.0.113.0", 1, 1}, // it may be true
		{"203.0.113.0/31", 1, 2},
		{"203.0.113.0/29", 3, 6},
		{"203.0.113.0-203.0.113.7", 4, 8},
		{"2001:db8::/125", 4, 8},
	} {
		lies := said(strings.Join(segments, ","), strings.Join(gateways[:report.MaxGateways], ","))
		o := Objects{Nodes: []*corev1.Node{node("n1", nil), node("n2", nil)}, Leases: []*coordinationv1.Lease{lease("n1", lies)}}
		document := "pools: [{name: lan, addresses: ['" + c.pool + "']}]\n"
		assert.Equal(t, c.most, closed(t, o, document), c.pool)
		o.Leases = append(o.Leases, lease("n2", lies))
		assert.Equal(t, c.two, closed(t, o, document), "%s: two agree", c.pool)
	}
}

// A kubelet that gives its Node all addresses of a pool does not close it, unless the pool is
// very small. Those that honest Nodes have are never handed out.
func TestOneKubeletClosesNoPool(t *testing.T) {
	t.Parallel()
	var many []corev1.NodeAddress
	var gateways []string
	for i := range 8 {
		many = append(many, internal(fmt.Sprintf("203.0.113.%d", i)), external(fmt.Sprintf("203.0.113.%d", 8+i)),
			internal(fmt.Sprintf("2001:db8::%x", i)), external(fmt.Sprintf("2001:db8::%x", 8+i)))
		gateways = append(gateways, fmt.Sprintf("203.0.113.%d", i), fmt.Sprintf("2001:db8::%x", i))
	}
	for _, c := range []struct {
		pool string
		most int
	}{
		{"203.0.113.0-203.0.113.0", 1},   // it may be true
		{"203.0.113.5-203.0.113.6", 1},   // neither is the first
		{"203.0.113.0-203.0.113.7", 5},   // the first, and half of the pool
		{"203.0.113.0-203.0.113.15", 10}, // the first internal and the first external one, and half
		{"2001:db8::/125", 5},
		{"2001:db8::/124", 10},
	} {
		n := node("n1", nil, many...)
		n.Annotations = map[string]string{annotation.BGPSourceAddress: "203.0.113.5"}
		o := Objects{Nodes: []*corev1.Node{n, node("n2", nil)}}
		document := "pools: [{name: lan, addresses: ['" + c.pool + "']}]\n"
		assert.Equal(t, c.most, closed(t, o, document), c.pool)
		o.Leases = []*coordinationv1.Lease{lease("n1", said("203.0.113.0/30 eth0,2001:db8::/126 eth0", strings.Join(gateways, ",")))}
		assert.Equal(t, c.most, closed(t, o, document), "%s: the report is within the same half", c.pool)
	}
}

// What an honest node needs is never handed out, however small the pool is.
func TestWhatANodeNeedsCountsFirst(t *testing.T) {
	t.Parallel()
	n1 := node("n1", nil, internal("203.0.113.1"), internal("203.0.113.1"), external("203.0.113.2"), internal("203.0.113.5"),
		internal("2001:db8::1"), external("2001:db8::2"))
	n1.Annotations = map[string]string{annotation.BGPSourceAddress: "203.0.113.3"}
	o := Objects{Nodes: []*corev1.Node{n1, node("n2", nil)},
		Leases: []*coordinationv1.Lease{lease("n1", said("203.0.113.0/29 eth0", "203.0.113.4"))}}
	for pool, want := range map[string]int{
		"203.0.113.1-203.0.113.2": 2, "2001:db8::1-2001:db8::2": 2, // the node's own
		"203.0.113.1-203.0.113.3": 3, // and the source address
		"203.0.113.1-203.0.113.4": 4, // and the gateway
		"203.0.113.4-203.0.113.7": 2, // the gateway and the broadcast address; the node's fifth address is beyond half
	} {
		assert.Equal(t, want, closed(t, o, "pools: [{name: lan, addresses: ['"+pool+"']}]\n"), pool)
	}
	assert.Contains(t, sentences(Collect(o)), "203.0.113.1 is the address of node n1", "once, though it is there twice")
	o.Nodes[1] = node("n2", nil, internal("203.0.113.6"), internal("203.0.113.5"))
	assert.Equal(t, 4, closed(t, o, "pools: [{name: lan, addresses: [203.0.113.4-203.0.113.7]}]\n"), "two Nodes have the address")
}

// Of a pool so small that one of them counts it is the one that does most harm.
func TestWhatDoesMostHarmCountsFirst(t *testing.T) {
	t.Parallel()
	cfg := parsed(t, "pools: [{name: lan, addresses: [203.0.113.0-203.0.113.3]}]")
	n1, n2 := node("n1", nil, internal("192.0.2.1"), internal("203.0.113.1"), internal("203.0.113.2")), node("n2", nil)
	o := Objects{Nodes: []*corev1.Node{n1, n2}, Leases: []*coordinationv1.Lease{lease("n1", said("203.0.113.0/30 eth0", "203.0.113.2"))}}
	withheld := func() (all []string) {
		for _, f := range Forbid(cfg, Collect(o)) {
			all = append(all, f.Range.From().String())
		}
		return all
	}
	assert.Equal(t, []string{"192.0.2.1", "203.0.113.0", "203.0.113.2"}, withheld(), "the gateway and the network address")
	n1.Annotations = map[string]string{annotation.BGPSourceAddress: "203.0.113.3"}
	assert.Equal(t, []string{"192.0.2.1", "203.0.113.2", "203.0.113.3"}, withheld(), "the source address, and the gateway")
}

// Where routes.cidrs has the ranges of pods, the ranges that a Node registers with do not count.
func TestPodCIDRsOfNodesBesideRoutes(t *testing.T) {
	t.Parallel()
	o := Objects{Nodes: []*corev1.Node{node("n1", []string{"203.0.113.0/24", "no prefix", "10.244.1.0/24"}, internal("203.0.113.9"))}}
	const pool = "pools: [{name: lan, addresses: [203.0.113.8-203.0.113.15]}]\n"
	assert.Equal(t, 8, closed(t, o, pool))
	assert.Equal(t, 8, closed(t, o, pool+"routes: {mode: kernel}\n"))
	assert.Equal(t, 1, closed(t, o, pool+"routes: {mode: kernel, cidrs: [10.244.0.0/16]}\n"), "the node's own address")
}

func TestSegmentsThatAreNotKnownAreNotNone(t *testing.T) {
	t.Parallel()
	assert.False(t, (&Facts{}).Equal(&Facts{Segments: []netip.Prefix{}}))
}

func BenchmarkCollect(b *testing.B) {
	o := large(1000)
	b.ReportAllocs()
	for b.Loop() {
		Collect(o)
	}
}
