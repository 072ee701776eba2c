package provider_test

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer/protobuf"
	"k8s.io/apimachinery/pkg/types"
	utilfeature "k8s.io/apiserver/pkg/util/feature"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	cloudprovider "k8s.io/cloud-provider"
	routecontroller "k8s.io/cloud-provider/controllers/route"
	controllersmetrics "k8s.io/component-base/metrics/prometheus/controllers"
	"k8s.io/controller-manager/pkg/features"

	"github.com/lodestone-lb/lodestone/controller/provider"
	"github.com/lodestone-lb/lodestone/pkg/annotation"
	"github.com/lodestone-lb/lodestone/pkg/config"
	"github.com/lodestone-lb/lodestone/pkg/kube"
	"github.com/lodestone-lb/lodestone/pkg/report"
	"github.com/lodestone-lb/lodestone/pkg/testapi"
	"github.com/lodestone-lb/lodestone/pkg/testcost"
)

const ns = "lodestone-system"

// editable is a configuration that somebody edits.
type editable struct {
	mu     sync.Mutex
	config *config.Config
}

func (e *editable) Current() (*config.Config, kube.State) {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.config, kube.State{Read: true}
}

func (e *editable) set(c *config.Config) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.config = c
}

// routed is a cluster whose routes the framework's controller looks after.
type routed struct {
	*testing.T
	client *fake.Clientset
	config *editable
	log    *strings.Builder
	start  func() // once
}

// registerFeatures does what the framework's command does.
var registerFeatures = sync.OnceValue(func() error {
	return features.SetupCurrentKubernetesSpecificFeatureGates(utilfeature.DefaultMutableFeatureGate)
})

// period is the framework's --route-reconciliation-period.
const period = 10 * time.Second

// newRouted has the framework's own route controller with our provider, which the
// first pass starts. It is for a synctest bubble.
func newRouted(t *testing.T, objects ...*corev1.Node) *routed {
	r := &routed{T: t, client: testapi.New(),
		config: &editable{config: &config.Config{Routes: &config.Routes{Mode: config.RoutesKernel}}}, log: &strings.Builder{}}
	require.NoError(t, registerFeatures())
	for _, n := range objects {
		r.node(n)
	}
	cloud := provider.New(provider.Options{Config: r.config, Client: r.client, Namespace: ns, ClusterCIDR: "10.244.0.0/16",
		Log: slog.New(slog.NewTextHandler(r.log, nil))})
	factory := informers.NewSharedInformerFactory(r.client, 0)
	cloud.SetInformers(factory)
	routes, ok := cloud.Routes()
	require.True(t, ok)
	_, cidr4, _ := net.ParseCIDR("10.244.0.0/16")
	_, cidr6, _ := net.ParseCIDR("fd00:10:244::/48")
	ctl, err := routecontroller.New(routes, r.client, factory.Core().V1().Nodes(), "kubernetes", []*net.IPNet{cidr4, cidr6})
	require.NoError(t, err)
	r.start = sync.OnceFunc(func() {
		ctx, cancel := context.WithCancel(t.Context())
		var group sync.WaitGroup
		factory.Start(ctx.Done())
		group.Go(func() { ctl.Run(ctx, period, controllersmetrics.NewControllerManagerMetrics("test")) })
		t.Cleanup(func() { cancel(); group.Wait(); factory.Shutdown() })
	})
	return r
}

// pass lets the controller look at everything again.
func (r *routed) pass() {
	r.start()
	time.Sleep(2 * period)
	synctest.Wait()
}

func (r *routed) node(n *corev1.Node) {
	r.Helper()
	_, err := r.client.CoreV1().Nodes().Create(r.Context(), n, metav1.CreateOptions{})
	require.NoError(r, err)
}

// reports has the node's speaker write its Lease.
func (r *routed) reports(node, mode, cidrs string) {
	r.Helper()
	r.lease(node, onLease(mode, cidrs))
}

// onLease are the annotations of the Lease then. The CIDRs are separated by commas.
func onLease(mode, cidrs string) map[string]string {
	of := report.Report{PodRoutes: mode, RoutedPodCIDRs: []netip.Prefix{}}
	for cidr := range strings.SplitSeq(cidrs, ",") {
		if p, err := netip.ParsePrefix(cidr); err == nil {
			of.RoutedPodCIDRs = append(of.RoutedPodCIDRs, p)
		}
	}
	return of.Annotations()
}

func (r *routed) lease(node string, annotations map[string]string) {
	r.Helper()
	l := &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: annotation.SpeakerLeasePrefix + node,
		Labels: map[string]string{annotation.LabelComponent: annotation.ComponentSpeaker}, Annotations: annotations}}
	leases := r.client.CoordinationV1().Leases(ns)
	if _, err := leases.Update(r.Context(), l, metav1.UpdateOptions{}); err != nil {
		_, err = leases.Create(r.Context(), l, metav1.CreateOptions{})
		require.NoError(r, err)
	}
}

// wantNetwork checks the condition NetworkUnavailable of the node.
func (r *routed) wantNetwork(node string, unavailable corev1.ConditionStatus) {
	r.Helper()
	n, err := r.client.CoreV1().Nodes().Get(r.Context(), node, metav1.GetOptions{})
	require.NoError(r, err)
	var got corev1.ConditionStatus
	for _, c := range n.Status.Conditions {
		if c.Type == corev1.NodeNetworkUnavailable {
			got = c.Status
		}
	}
	assert.Equal(r, unavailable, got, "NetworkUnavailable of %s", node)
}

func (r *routed) wantEvent(node, message string) {
	r.Helper()
	list, err := r.client.CoreV1().Events("default").List(r.Context(), metav1.ListOptions{})
	require.NoError(r, err)
	for _, e := range list.Items {
		if e.InvolvedObject.Name == node && e.Reason == "FailedToCreateRoute" && strings.Contains(e.Message, message) {
			return
		}
	}
	assert.Fail(r, "no Event", "on %s with %q among %+v", node, message, list.Items)
}

func podNode(name string, cidrs ...string) *corev1.Node {
	return &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name, UID: types.UID(name)}, Spec: corev1.NodeSpec{PodCIDRs: cidrs}}
}

// The framework's own route controller lists, creates, deletes and sets
// conditions through our provider.
func TestUpstreamRouteController(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRouted(t, podNode("n1", "10.244.1.0/24", "fd00:10:244:1::/64"), podNode("n2", "10.244.2.0/24"), podNode("n3"))
		r.pass()
		r.wantNetwork("n1", corev1.ConditionTrue)
		r.wantEvent("n1", "node n1 has no speaker, and so no routes to its pods: does the DaemonSet lodestone-speaker run there?")
		r.wantNetwork("n3", "") // it has no pods yet

		r.reports("n1", "kernel", "10.244.1.0/24,fd00:10:244:1::/64")
		r.reports("n2", "kernel", "")
		r.pass()
		r.wantNetwork("n1", corev1.ConditionFalse)
		r.wantNetwork("n2", corev1.ConditionTrue)
		r.wantEvent("n2", "the speaker of node n2 does not report routes to 10.244.2.0/24: its log and /status have the reason")

		r.reports("n1", "kernel", "10.244.1.0/24") // one family of two
		r.reports("n2", "kernel", "10.244.2.0/24")
		r.pass()
		r.wantNetwork("n1", corev1.ConditionTrue)
		r.wantNetwork("n2", corev1.ConditionFalse)

		r.node(podNode("n4", "10.244.4.0/24"))
		r.reports("n4", "kernel", "10.244.4.0/24")
		require.NoError(t, r.client.CoreV1().Nodes().Delete(t.Context(), "n2", metav1.DeleteOptions{}))
		r.pass()
		r.wantNetwork("n4", corev1.ConditionFalse)

		// Nobody takes anything back because the document is gone.
		r.config.set(&config.Config{})
		r.reports("n4", "", "")
		r.pass()
		r.wantNetwork("n4", corev1.ConditionFalse)
	})
}

// Speakers of an older version, and those that have not read the configuration
// yet, report nothing: then all stays as it is.
func TestAnUpgradeMakesNoNetworkUnavailable(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		lost := podNode("n2", "10.244.2.0/24")
		lost.Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeNetworkUnavailable, Status: corev1.ConditionTrue}}
		r := newRouted(t, podNode("n1", "10.244.1.0/24"), lost)
		r.lease("n1", nil)
		r.lease("n2", onLease("", ""))
		r.pass()
		r.wantNetwork("n1", corev1.ConditionFalse)
		r.wantNetwork("n2", corev1.ConditionTrue)
		r.reports("n1", "bgp", "")
		r.reports("n2", "bgp", "10.244.2.0/24")
		r.pass()
		r.wantNetwork("n1", corev1.ConditionTrue)
		r.wantNetwork("n2", corev1.ConditionFalse)
	})
}

// However large the Leases of speakers are, only their reports about routes are kept.
func TestRoutesKeepLittleOfLeases(t *testing.T) {
	// Not parallel: it measures.
	const number, each = 200, 100 << 10
	list := &coordinationv1.LeaseList{ListMeta: metav1.ListMeta{ResourceVersion: "7"}}
	for i := range number {
		l := coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: fmt.Sprint(annotation.SpeakerLeasePrefix, "n", i),
			Annotations: onLease("kernel", fmt.Sprintf("10.244.%d.0/24", i))}}
		l.Annotations["example.com/note"] = strings.Repeat("x", each)
		list.Items = append(list.Items, l)
	}
	var encoded bytes.Buffer
	require.NoError(t, scheme.Codecs.EncoderForVersion(protobuf.NewSerializer(scheme.Scheme, scheme.Scheme),
		coordinationv1.SchemeGroupVersion).Encode(list, &encoded))
	list = nil
	var asked string
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		asked = r.URL.String()
		w.Header().Set("Content-Type", runtime.ContentTypeProtobuf)
		_, _ = w.Write(encoded.Bytes())
	}))
	defer server.Close()
	client, err := kubernetes.NewForConfig(&rest.Config{Host: server.URL,
		ContentConfig: rest.ContentConfig{ContentType: runtime.ContentTypeProtobuf}})
	require.NoError(t, err)
	cloud := provider.New(provider.Options{Config: &editable{config: &config.Config{Routes: &config.Routes{Mode: config.RoutesKernel}}},
		Client: client, Namespace: ns, ClusterCIDR: "10.244.0.0/16", Log: slog.New(slog.DiscardHandler)})
	nodes := informers.NewSharedInformerFactory(testapi.New(podNode("n7", "10.244.7.0/24")), 0)
	cloud.SetInformers(nodes)
	nodes.Start(t.Context().Done())
	nodes.WaitForCacheSync(t.Context().Done())
	routes, ok := cloud.Routes()
	require.True(t, ok)

	before := testcost.Live()
	listed, err := routes.ListRoutes(t.Context(), "kubernetes")
	require.NoError(t, err)
	kept := testcost.Live() - before
	require.Equal(t, []*cloudprovider.Route{{Name: "n7 10.244.7.0/24", TargetNode: "n7", DestinationCIDR: "10.244.7.0/24"}}, listed)
	require.NoError(t, routes.CreateRoute(t.Context(), "", "", listed[0]))
	require.Less(t, kept, int64(4<<20), "of %d bytes", number*each)
	require.Contains(t, asked, "resourceVersion=0", "it is asked again and again, and the API server's cache will do")
}

func TestRoutesAreOptional(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		config *config.Config
		cidr   string
		ok     bool
		log    string
	}{
		"no configuration": {nil, "10.244.0.0/16", false, "the configuration has no routes"},
		"none in it":       {&config.Config{}, "10.244.0.0/16", false, "the configuration has no routes"},
		"no --cluster-cidr": {&config.Config{Routes: &config.Routes{Mode: config.RoutesBGP}}, "", false,
			"set --cluster-cidr to the pod CIDRs of the cluster"},
		"all there": {&config.Config{Routes: &config.Routes{Mode: config.RoutesBGP}}, "10.244.0.0/16", true, ""},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var log strings.Builder
			cloud := provider.New(provider.Options{Config: given{config: tt.config}, ClusterCIDR: tt.cidr,
				Log: slog.New(slog.NewTextHandler(&log, nil))})
			_, ok := cloud.Routes()
			assert.Equal(t, tt.ok, ok)
			assert.Contains(t, log.String(), tt.log)
		})
	}
}
