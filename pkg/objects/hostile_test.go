package objects_test

import (
	"context"
	"fmt"
	"maps"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
	"unsafe"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/tools/cache"

	"github.com/stretchr/testify/require"

	"github.com/lodestone-lb/lodestone/pkg/annotation"
	"github.com/lodestone-lb/lodestone/pkg/kube"
	"github.com/lodestone-lb/lodestone/pkg/objects"
	"github.com/lodestone-lb/lodestone/pkg/testapi"
	"github.com/lodestone-lb/lodestone/pkg/testcost"
)

// huge is how much of a field one object can have: etcd takes 1.5 MiB.
const huge = 1200 << 10

// alphabets are what names and values are written in.
var alphabets = []string{"a", "é", "漢", "😀", "\x00", "\u202e", ",", "="}

// many returns as many labels as fit into an object.
func many() map[string]string {
	all := map[string]string{}
	for size, i := 0, 0; size < huge; i++ {
		name := fmt.Sprintf("%s.example.com/label-%06d", strings.Repeat("x", 10), i)
		all[name] = "v"
		size += len(name) + 1
	}
	return all
}

// few returns labels that are all kept, of so many bytes together.
func few(size int) map[string]string {
	all := map[string]string{}
	for i := range objects.MaxLabels {
		name := fmt.Sprintf("label-%02d", i)
		all[name] = strings.Repeat("v", size/objects.MaxLabels-len(name))
	}
	return all
}

// long returns a value of that alphabet that fills an object.
func long(alphabet string) string { return strings.Repeat(alphabet, huge/len(alphabet)) }

// hostileMeta are the worst metadata, by what is large in them.
func hostileMeta() map[string]metav1.ObjectMeta {
	metas := map[string]metav1.ObjectMeta{
		"labels": {Labels: many()},
	}
	var finalizers []string
	for i := range huge / 40 {
		finalizers = append(finalizers, fmt.Sprintf("finalizers.example.com/number-%08d", i))
	}
	metas["finalizers"] = metav1.ObjectMeta{Finalizers: finalizers}
	read := append([]string{annotation.Report}, annotation.Assigned, annotation.Leases, annotation.Addresses, annotation.SharingKey,
		annotation.SharingNamespaces, annotation.AddressPool, annotation.ConnectionRateLimit, annotation.Renumber, annotation.BGPASN)
	for i, alphabet := range alphabets {
		name := read[i%len(read)]
		metas[fmt.Sprintf("%s of %q", name, alphabet)] = metav1.ObjectMeta{Annotations: map[string]string{name: long(alphabet)}}
	}
	var list strings.Builder
	for i := 0; list.Len() < huge; i++ {
		fmt.Fprintf(&list, "10.%d.%d.%d=eth0,", i>>16, i>>8&255, i&255)
	}
	addresses := metav1.ObjectMeta{Annotations: map[string]string{}}
	for _, name := range read {
		addresses.Annotations[name] = list.String()
	}
	metas["annotations"] = addresses
	return metas
}

func hostileServices(metas map[string]metav1.ObjectMeta) map[string]*corev1.Service {
	all := map[string]*corev1.Service{}
	for name, meta := range metas {
		all[name] = &corev1.Service{ObjectMeta: meta}
	}
	ports, externals, selector, status := &corev1.Service{}, &corev1.Service{}, &corev1.Service{}, &corev1.Service{}
	for i := range 60_000 {
		ports.Spec.Ports = append(ports.Spec.Ports, corev1.ServicePort{Name: fmt.Sprint("p", i), Port: int32(i + 1)})
		externals.Spec.ExternalIPs = append(externals.Spec.ExternalIPs, fmt.Sprintf("10.0.%d.%d", i>>8&255, i&255))
		status.Status.LoadBalancer.Ingress = append(status.Status.LoadBalancer.Ingress,
			corev1.LoadBalancerIngress{IP: fmt.Sprintf("10.0.%d.%d", i>>8&255, i&255)})
	}
	selector.Spec.Selector = metas["labels"].Labels
	status.Status.Conditions = []metav1.Condition{{Type: annotation.ConditionAllocated, Message: long("é")}}
	status.Spec.LoadBalancerIP = long("1")
	all["ports"], all["external addresses"], all["selector"], all["status"] = ports, externals, selector, status
	every := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Labels: few(2 << 10), Annotations: metas["annotations"].Annotations}}
	every.Spec = corev1.ServiceSpec{Selector: few(1 << 10), Ports: ports.Spec.Ports,
		ExternalIPs: externals.Spec.ExternalIPs, LoadBalancerIP: long("1")}
	every.Status = corev1.ServiceStatus{LoadBalancer: status.Status.LoadBalancer, Conditions: status.Status.Conditions}
	all["everything"] = every
	for _, s := range all {
		s.Spec.Type = corev1.ServiceTypeLoadBalancer
	}
	return all
}

// looks are what a program does with the worst objects of each kind.
func looks() map[string]func() any {
	looks, metas := map[string]func() any{}, hostileMeta()
	for name, s := range hostileServices(metas) {
		looks["Service: "+name] = func() any { return objects.Services.Project(s) }
	}
	for name, meta := range metas {
		looks["Namespace: "+name] = func() any { return objects.Namespaces.Project(&corev1.Namespace{ObjectMeta: meta}) }
		looks["Node: "+name] = func() any { return objects.Nodes.Project(&corev1.Node{ObjectMeta: meta}) }
		looks["Lease: "+name] = func() any { return objects.Leases.Project(&coordinationv1.Lease{ObjectMeta: meta}) }
	}
	meta := metas["labels"]
	looks["Pod"] = func() any { return objects.Pods.Project(&corev1.Pod{ObjectMeta: meta}) }
	looks["ConfigMap"] = func() any { return objects.ConfigMaps.Project(&corev1.ConfigMap{ObjectMeta: meta}) }
	looks["ServiceCIDR"] = func() any { return objects.ServiceCIDRs.Project(&networkingv1.ServiceCIDR{ObjectMeta: meta}) }
	looks["EndpointSlice: labels"] = func() any { return objects.EndpointSlices.Project(&discoveryv1.EndpointSlice{ObjectMeta: meta}) }
	s := &discoveryv1.EndpointSlice{}
	for i := range 1000 {
		node := fmt.Sprintf("%s-%04d", strings.Repeat("n", 240), i)
		s.Endpoints = append(s.Endpoints, discoveryv1.Endpoint{NodeName: &node, Addresses: []string{fmt.Sprintf("10.0.%d.%d", i>>8, i&255)}})
	}
	looks["EndpointSlice: endpoints"] = func() any { return objects.EndpointSlices.Project(s) }
	return looks
}

// The size of a projection does not grow with the object. Nor does the cost of comparing it with the next version:
// it allocates little, and takes less than a millisecond of CPU time if nothing disturbs it. The garbage collector
// does at times, so the fastest of several runs counts. An EndpointSlice with 1,000 names of
// nodes that were never seen takes up to twice as long, to keep the names once for all slices.
func TestHostileObjects(t *testing.T) {
	// Not parallel: it measures.
	const looksEach, size = 5, 200 << 10
	for name, look := range looks() {
		kept := make([]any, looksEach)
		first := look() // keeps what all of them share
		most := uint64(100 << 10)
		if strings.HasPrefix(name, "EndpointSlice") {
			most = 1200 << 10
		}
		before, fastest := testcost.Live(), time.Hour
		for i := range kept {
			cost := testcost.Of(func() { kept[i] = look() })
			require.Less(t, cost.Bytes, most, "%s: bytes that a look allocates", name)
			fastest = min(fastest, cost.Time)
		}
		bytes := (testcost.Live() - before) / looksEach
		bound := int64(size)
		if s, is := kept[0].(*corev1.Service); is {
			bound = 24 << 10
			require.Equal(t, strings.HasSuffix(name, "everything"), len(s.Labels) == objects.MaxLabels && len(s.Spec.Selector) == objects.MaxLabels)
			for _, labels := range []map[string]string{s.Labels, s.Spec.Selector} {
				for k, v := range labels {
					bytes += int64(len(k) + len(v)) // the object that was looked at has them, too
				}
			}
		}
		require.Less(t, bytes, bound, "%s: bytes kept", name)
		// A text that is kept as it is has no memory of its own here, and keeps the object's.
		require.Less(t, kept[0].(interface{ Size() int }).Size(), int(most), "%s: bytes kept, encoded", name)
		require.Less(t, fastest, aLook, "%s: a look", name)
		runtime.KeepAlive(first)
		runtime.KeepAlive(kept)
	}
}

// Slices that come after a garbage collection share the names of nodes with those from before it, too.
func TestSlicesShareNamesOfNodes(t *testing.T) {
	t.Parallel()
	look := func() *string {
		node := strings.Repeat("n", 240)
		s := &discoveryv1.EndpointSlice{Endpoints: []discoveryv1.Endpoint{{NodeName: &node}}}
		return objects.EndpointSlices.Project(s).Endpoints[0].NodeName
	}
	first := look()
	for range 3 {
		runtime.GC()
		require.Same(t, unsafe.StringData(*first), unsafe.StringData(*look()))
	}
}

// Conditions of others do not hide those of the kubelet and the network plugin, which stand behind them.
func TestConditionsThatAreReadCount(t *testing.T) {
	t.Parallel()
	node := &corev1.Node{}
	for i := range 30 {
		node.Status.Conditions = append(node.Status.Conditions, corev1.NodeCondition{Type: corev1.NodeConditionType(fmt.Sprint("Other", i))})
	}
	read := []corev1.NodeCondition{{Type: corev1.NodeNetworkUnavailable, Status: "True"}, {Type: corev1.NodeReady, Status: "True"}}
	node.Status.Conditions = append(node.Status.Conditions, read...)
	for _, kept := range []*corev1.Node{objects.Nodes.Project(node), objects.WritableNodes.Project(node)} {
		require.Less(t, len(kept.Status.Conditions), 20)
		require.Equal(t, read, kept.Status.Conditions[:2])
	}
}

// Labels count up to a number and a size, and none of a Service with very many. A selector that is longer counts not at
// all, because a part of it would select other pods.
func TestFewLabelsOfAServiceCount(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		number, bytes int // of each
		kept          int
		selects       bool
	}{
		{32, 32, 32, true}, {33, 31, 32, false}, {32, 33, 32, false}, {32, 128, 16, false}, {1024, 10, 32, false}, {1025, 10, 0, false},
	} {
		all := map[string]string{}
		for i := range tt.number {
			all[fmt.Sprintf("label-%04d", i)] = strings.Repeat("v", tt.bytes-10)
		}
		s := objects.Services.Project(&corev1.Service{ObjectMeta: metav1.ObjectMeta{Labels: all}, Spec: corev1.ServiceSpec{Selector: all}})
		require.Len(t, s.Labels, tt.kept, "of %d labels of %d bytes", tt.number, tt.bytes)
		for i := range tt.kept {
			require.Contains(t, s.Labels, fmt.Sprintf("label-%04d", i), "the first by name count")
		}
		require.Equal(t, tt.selects, len(s.Spec.Selector) == tt.number, "a selector of %d labels of %d bytes", tt.number, tt.bytes)
		require.Equal(t, tt.selects, s.Spec.Selector != nil)
	}
}

// Few addresses that a kubelet writes on its Node are kept from being handed out.
func TestFewAddressesOfANodeCount(t *testing.T) {
	n := &corev1.Node{}
	for i := range 10_000 {
		addr := fmt.Sprintf("10.0.%d.%d", i>>8, i&255)
		n.Status.Addresses = append(n.Status.Addresses, corev1.NodeAddress{Type: corev1.NodeInternalIP, Address: addr})
		n.Spec.PodCIDRs = append(n.Spec.PodCIDRs, addr+"/32")
	}
	kept := objects.Nodes.Project(n)
	require.Len(t, kept.Status.Addresses, 17)
	require.Len(t, kept.Spec.PodCIDRs, objects.MaxAddresses+1)
}

// The controller keeps little of Services that other load balancers serve, or nobody.
func TestServicesOfOthersAreKeptInPart(t *testing.T) {
	t.Parallel()
	every := hostileServices(hostileMeta())["everything"]
	every.Annotations[annotation.Assigned] = "198.18.0.1"
	for name, c := range map[string]struct{ ours, finalizer, condition, whole bool }{
		"ours": {ours: true, whole: true}, "it was ours": {finalizer: true, whole: true}, "another's": {},
		"it was ours, and its owner has removed the finalizer": {condition: true, whole: true},
	} {
		s := every.DeepCopy()
		if !c.condition {
			s.Status.Conditions = nil
		}
		if s.Finalizers = nil; c.finalizer {
			s.Finalizers = []string{annotation.ClassFinalizer}
		}
		kept := objects.ServicesFor(func(*corev1.Service) bool { return c.ours }).Project(s)
		require.Equal(t, [3]bool{c.whole, c.whole, c.whole}, [3]bool{kept.Labels != nil, kept.Spec.Selector != nil, kept.Spec.Ports != nil}, name)
		require.Equal(t, "198.18.0.1", kept.Annotations[annotation.Assigned], "%s: what the controller takes back", name)
		require.Equal(t, c.whole, kept.Annotations[annotation.AddressPool] != "", name)
		require.NotEmpty(t, kept.Status.LoadBalancer.Ingress, "%s: what is in use", name)
	}
}

// The controller asks its cache whose a Service is. The cache keeps what the answer depends on, also of a Service that
// is not ours, such as the annotation that leaves it to others.
func TestTheCacheKnowsWhoseAServiceIs(t *testing.T) {
	t.Parallel()
	ours, others := annotation.DefaultClass, "example.com/other"
	for _, scope := range []kube.Scope{{Classless: true, Classes: []string{ours}}, {Classes: []string{ours}}} {
		for _, class := range []*string{nil, &ours, &others} {
			for _, marks := range []map[string]string{nil, {annotation.Assigned: "198.18.0.1"}} {
				for _, ignore := range []string{"", annotation.Ignored, "yes"} {
					svc := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Annotations: maps.Clone(marks)}}
					svc.Spec.Type, svc.Spec.LoadBalancerClass = corev1.ServiceTypeLoadBalancer, class
					svc.Status.LoadBalancer.Ingress = []corev1.LoadBalancerIngress{{IP: "198.18.0.1"}}
					if ignore != "" {
						metav1.SetMetaDataAnnotation(&svc.ObjectMeta, annotation.Ignore, ignore)
					}
					decides := func(svc *corev1.Service) []any {
						return []any{scope.Covers(svc), scope.Serves(svc), scope.Keeps(svc), scope.LeftBehind(svc), scope.Foreign(svc)}
					}
					kept := objects.ServicesFor(scope.Covers).Project(svc)
					require.Equal(t, decides(svc), decides(kept), "classless %v, %v", scope.Classless, svc)
				}
			}
		}
	}
}

// The controllers, the framework's too, ask a factory for their informers, and get those that keep projections.
func TestInformersOfAFactoryKeepProjections(t *testing.T) {
	t.Parallel()
	meta := func(name string) metav1.ObjectMeta {
		return metav1.ObjectMeta{Namespace: "shop", Name: name, Labels: map[string]string{"app": "web"}, Annotations: map[string]string{"a": "b"}}
	}
	node := &corev1.Node{ObjectMeta: meta("n1"), Status: corev1.NodeStatus{Images: []corev1.ContainerImage{{SizeBytes: 1}}}}
	node.Namespace = ""
	client := testapi.New(&corev1.Service{ObjectMeta: meta("ours")}, &corev1.Service{ObjectMeta: meta("foreign")},
		&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "shop", Annotations: map[string]string{"a": "b"}}}, node)
	factory := informers.NewSharedInformerFactory(client, 0)
	objects.Share(factory, func(s *corev1.Service) bool { return s.Name == "ours" })
	services, namespaces, nodes := factory.Core().V1().Services(), factory.Core().V1().Namespaces(), factory.Core().V1().Nodes()
	for _, i := range []cache.SharedIndexInformer{services.Informer(), namespaces.Informer(), nodes.Informer()} {
		require.NotNil(t, i)
	}
	factory.StartWithContext(t.Context())
	t.Cleanup(factory.Shutdown)
	factory.WaitForCacheSync(t.Context().Done())
	ours, err := services.Lister().Services("shop").Get("ours")
	require.NoError(t, err)
	require.Equal(t, map[string]string{"app": "web"}, ours.Labels)
	require.Empty(t, ours.Annotations)
	foreign, err := services.Lister().Services("shop").Get("foreign")
	require.NoError(t, err)
	require.Empty(t, foreign.Labels)
	namespace, err := namespaces.Lister().Get("shop")
	require.NoError(t, err)
	require.Empty(t, namespace.Annotations)
	n1, err := nodes.Lister().Get("n1")
	require.NoError(t, err)
	require.Equal(t, node.Annotations, n1.Annotations, "it is written back")
	require.Empty(t, n1.Status.Images)
}

// A Node that waits for something else, as for a configuration, is looked at again within a minute.
func TestNodesAreShownAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		client := testapi.New(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n1"}},
			&corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "web"}})
		factory := informers.NewSharedInformerFactory(client, 12*time.Hour)
		objects.Share(factory, func(*corev1.Service) bool { return true })
		var services, nodes atomic.Int64
		for counter, informer := range map[*atomic.Int64]cache.SharedIndexInformer{
			&services: factory.Core().V1().Services().Informer(), &nodes: factory.Core().V1().Nodes().Informer()} {
			_, err := informer.AddEventHandler(cache.ResourceEventHandlerFuncs{UpdateFunc: func(any, any) { counter.Add(1) }})
			require.NoError(t, err)
		}
		ctx, end := context.WithCancel(t.Context())
		factory.StartWithContext(ctx)
		defer factory.Shutdown()
		defer end()
		time.Sleep(10*time.Minute + time.Second)
		synctest.Wait()
		require.EqualValues(t, 10, nodes.Load())
		require.Zero(t, services.Load())
	})
}

// The only text in the spec of a cached Lease is its holder, cut to a bounded length.
func TestLeasesAreKeptInPart(t *testing.T) {
	t.Parallel()
	holder, strategy, now := long("é"), coordinationv1.CoordinatedLeaseStrategy(long("漢")), metav1.NowMicro()
	kept := objects.Leases.Project(&coordinationv1.Lease{Spec: coordinationv1.LeaseSpec{
		HolderIdentity: &holder, PreferredHolder: &holder, Strategy: &strategy, AcquireTime: &now, RenewTime: &now}}).Spec
	require.Less(t, len(*kept.HolderIdentity), 300)
	require.True(t, strings.HasSuffix(*kept.HolderIdentity, objects.Cut))
	kept.HolderIdentity = nil
	require.Equal(t, coordinationv1.LeaseSpec{AcquireTime: &now, RenewTime: &now}, kept)
}

// The writer of a Lease has to notice every other text that somebody else has added to it.
func TestMoreOnALeaseIsSeen(t *testing.T) {
	t.Parallel()
	honest := coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{
		Labels:      map[string]string{annotation.LabelComponent: annotation.ComponentSpeaker},
		Annotations: map[string]string{annotation.Report: "{}"}}}
	require.Equal(t, honest.ObjectMeta, objects.Leases.Project(&honest).ObjectMeta)
	for _, more := range []func(*coordinationv1.Lease){
		func(l *coordinationv1.Lease) { l.Labels["a"] = "b" },
		func(l *coordinationv1.Lease) { l.Labels = many() },
		func(l *coordinationv1.Lease) { l.Annotations["a"] = "b" },
		func(l *coordinationv1.Lease) { l.Annotations = many() },
		func(l *coordinationv1.Lease) { l.Finalizers = []string{"example.com/a"} },
	} {
		l := honest.DeepCopy()
		more(l)
		kept := objects.Leases.Project(l)
		require.NotEqual(t, honest.ObjectMeta, kept.ObjectMeta)
		require.LessOrEqual(t, len(kept.Labels)+len(kept.Annotations)+len(kept.Finalizers), 3)
	}
}
