package speaker

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/lodestone-lb/lodestone/pkg/annotation"
	"github.com/lodestone-lb/lodestone/pkg/kube"
	"github.com/lodestone-lb/lodestone/pkg/objects"
	"github.com/lodestone-lb/lodestone/pkg/testapi"
	"github.com/lodestone-lb/lodestone/speaker/plan"
)

func TestEndpointsThatTakeTraffic(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		endpoints []discoveryv1.Endpoint
		serving   bool
		nodes     []string
	}{
		"none":                            {nil, false, nil},
		"ready":                           {[]discoveryv1.Endpoint{on("n1"), on("n1"), on("n2")}, true, []string{"n1", "n2"}},
		"not ready":                       {[]discoveryv1.Endpoint{endpoint("n1", "")}, false, nil},
		"unknown counts as ready":         {[]discoveryv1.Endpoint{endpoint("n1", "unknown")}, true, []string{"n1"}},
		"terminating beside a ready one":  {[]discoveryv1.Endpoint{endpoint("n1", "serving"), on("n2")}, true, []string{"n2"}},
		"all terminating":                 {[]discoveryv1.Endpoint{endpoint("n1", "serving"), endpoint("n2", "")}, true, []string{"n1"}},
		"without node: for Cluster only":  {[]discoveryv1.Endpoint{on("")}, true, nil},
		"without node beside one with it": {[]discoveryv1.Endpoint{on(""), on("n3")}, true, []string{"n3"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c := mustCluster(t)
			web := serviceObject("web", "203.0.113.1")
			web.Spec.ExternalTrafficPolicy = corev1.ServiceExternalTrafficPolicyLocal
			// Each endpoint in a slice of its own: the union counts.
			for i, e := range test.endpoints {
				s := endpoints("web", e)
				s.Name = fmt.Sprint("web-", i)
				c.add(s)
			}
			c.add(endpoints("other", on("n9")))
			c.add(web)
			for _, name := range []string{"n1", "n2", "n3", "n9"} {
				c.add(nodeObject(name))
			}
			c.refresh(func(plan.Service) {})
			got := c.derive("default/web")
			if nodes := servingNodes(got); got.Serving != test.serving || !slices.Equal(nodes, test.nodes) {
				t.Errorf("serving %v on %q, want %v on %q", got.Serving, nodes, test.serving, test.nodes)
			}
			for _, name := range []string{"n1", "n2", "n3", "n9"} {
				require.Equal(t, slices.Contains(test.nodes, name), got.EndpointsAt(netip.IPv4Unspecified()).ServesOn(name), name)
			}
		})
	}
}

// servingNodes returns the nodes with endpoints that take the traffic to IPv4 VIPs.
func servingNodes(s plan.Service) []string {
	return s.EndpointsAt(netip.IPv4Unspecified()).ServingNodes()
}

// A node takes new connections by the number of its endpoints.
func TestEachEndpointCounts(t *testing.T) {
	t.Parallel()
	c, web := mustCluster(t), serviceObject("web", "203.0.113.1")
	web.Spec.ExternalTrafficPolicy = corev1.ServiceExternalTrafficPolicyLocal
	c.add(web)
	c.add(endpoints("web", on("n1"), on("n1"), endpoint("n1", ""), on("n2")))
	c.add(nodeObject("n1"))
	c.add(nodeObject("n2"))
	c.refresh(func(plan.Service) {})
	require.Equal(t, []plan.Backend{{Node: "n1", Open: 2, Draining: 1}, {Node: "n2", Open: 1}}, c.derive("default/web").Backends)
}

// A cluster that has just got IPv6 has pods of before, which have none.
func TestEndpointsOfEachFamily(t *testing.T) {
	t.Parallel()
	c := mustCluster(t)
	web := serviceObject("web", "203.0.113.1")
	web.Spec.ExternalTrafficPolicy = corev1.ServiceExternalTrafficPolicyLocal
	four, six, names := endpoints("web", on("n1"), on("n2")), endpoints("web", on("n2")), endpoints("web", on("n3"))
	four.Name, four.AddressType = "web-4", discoveryv1.AddressTypeIPv4
	six.Name, six.AddressType = "web-6", discoveryv1.AddressTypeIPv6
	names.Name, names.AddressType = "web-names", discoveryv1.AddressTypeFQDN
	c.add(web)
	c.add(four)
	c.add(names)
	c.add(nodeObject("n1"))
	c.add(nodeObject("n2"))
	c.refresh(func(plan.Service) {})
	require.Nil(t, c.derive("default/web").IPv6, "nobody asks")

	web.Annotations[annotation.Assigned] += ",2001:db8::1"
	web.Status.LoadBalancer.Ingress = append(web.Status.LoadBalancer.Ingress, corev1.LoadBalancerIngress{IP: "2001:db8::1"})
	c.add(web)
	require.Equal(t, []string{"n1", "n2"}, servingNodes(c.derive("default/web")))
	require.Equal(t, &plan.Endpoints{}, c.derive("default/web").IPv6)
	c.add(six)
	require.Equal(t, []string{"n1", "n2"}, servingNodes(c.derive("default/web")))
	require.Equal(t, &plan.Endpoints{Serving: true, Backends: []plan.Backend{{Node: "n2", Open: 1}}}, c.derive("default/web").IPv6)
}

func TestOnlyWhatThePlanAsksWakesTheLoop(t *testing.T) {
	t.Parallel()
	local := serviceObject("local", "203.0.113.2")
	local.Spec.ExternalTrafficPolicy = corev1.ServiceExternalTrafficPolicyLocal
	pending := serviceObject("pending", "")
	labelled := serviceObject("web", "203.0.113.1")
	labelled.Labels = map[string]string{"new": "label"}
	moved := endpoints("web", on("n1"))
	moved.Labels[discoveryv1.LabelServiceName] = "local"
	for name, event := range map[string]struct {
		before, after runtime.Object
		dirty         []string
	}{
		"policy Cluster: an endpoint beside others": {endpoints("web", on("n1")), endpoints("web", on("n1"), on("n2")), nil},
		"policy Cluster: the last endpoint goes":    {endpoints("web", on("n1")), endpoints("web"), []string{"default/web"}},
		"policy Cluster: the last endpoint terminates": {endpoints("web", on("n1")), endpoints("web", endpoint("n1", "serving")),
			[]string{"default/web"}},
		"policy Cluster: the slice goes": {endpoints("web", on("n1")), nil, []string{"default/web"}},
		"policy Local: an endpoint on another node": {endpoints("local", on("n1")), endpoints("local", on("n2")),
			[]string{"default/local"}},
		"policy Local: another endpoint on the same node": {endpoints("local", on("n1")), endpoints("local", on("n1"), on("n1")),
			[]string{"default/local"}},
		"policy Local: an endpoint that is not ready goes": {endpoints("local", on("n1"), endpoint("n2", "")), endpoints("local", on("n1")),
			[]string{"default/local"}},
		"policy Cluster: an endpoint that is not ready goes": {endpoints("web", on("n1"), endpoint("n2", "")), endpoints("web", on("n1")), nil},
		"the slice goes over to another Service":             {endpoints("web", on("n1")), moved, []string{"default/local", "default/web"}},
		"a Service without a VIP":                            {endpoints("pending"), endpoints("pending", on("n1")), nil},
		"a Service that does not exist":                      {nil, endpoints("other", on("n1")), nil},
		"a Service that gets a label":                        {serviceObject("web", "203.0.113.1"), labelled, []string{"default/web"}},
		"a Service that gets a VIP":                          {pending, serviceObject("pending", "203.0.113.3"), []string{"default/pending"}},
		"a Service that goes":                                {labelled, nil, []string{"default/web"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c := mustCluster(t)
			for _, s := range []*corev1.Service{serviceObject("web", "203.0.113.1"), local, pending} {
				c.add(s)
			}
			c.refresh(func(plan.Service) {})
			<-c.wake
			if _, ok := event.before.(*corev1.Service); ok {
				c.noteService(kept[service](c, event.before), kept[service](c, event.after))
			} else {
				c.noteSlice(kept[slice](c, event.before), kept[slice](c, event.after))
			}
			require.Equal(t, event.dirty, slices.Sorted(maps.Keys(c.dirty)))
			require.Len(t, c.wake, min(1, len(event.dirty)))
		})
	}
}

// A tool that replaces a Service by its manifest (kubectl replace, Terraform) removes
// Lodestone's annotation. The controller sets it again at once.
func TestABriefLossOfTheAnnotationIsNoChange(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		marked, bare := serviceObject("web", "203.0.113.1"), serviceObject("web", "203.0.113.1")
		bare.Annotations = nil
		edited := bare.DeepCopy()
		edited.Labels = map[string]string{"a": "b"}
		vips := func(c *cluster) (vips []netip.Addr) {
			c.refresh(func(s plan.Service) { vips = append(vips, s.VIPs...) })
			return vips
		}
		for name, test := range map[string]struct {
			next  *corev1.Service
			after time.Duration
			gone  bool
		}{
			"put back":          {marked, time.Second, false},
			"taken away":        {bare, unmarkedFor, true},
			"changed meanwhile": {edited, time.Second, true},
			"without addresses": {serviceObject("web", ""), 0, true},
		} {
			c := mustCluster(t)
			c.add(marked)
			require.Len(t, vips(c), 1)
			<-c.wake
			c.replace(marked, bare)
			require.Empty(t, c.wake, name)
			time.Sleep(test.after)
			c.replace(bare, test.next)
			synctest.Wait()
			require.Equal(t, test.next == edited, len(c.wake) == 0, name)
			time.Sleep(unmarkedFor)
			synctest.Wait()
			require.NotEmpty(t, c.wake, name)
			require.Equal(t, test.gone, len(vips(c)) == 0, name)
		}
	})
}

// Each loss of the annotation has the whole time, and it counts from when the annotation was lost last.
func TestALossOfTheAnnotationHasItsOwnTime(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		c, marked, bare := mustCluster(t), serviceObject("web", "203.0.113.1"), serviceObject("web", "203.0.113.1")
		bare.Annotations = nil
		has := []netip.Addr{}
		refresh := func() {
			synctest.Wait()
			c.refresh(func(s plan.Service) { has = s.VIPs })
		}
		c.add(marked)
		refresh()
		for range 3 { // lost, and back, and lost again
			c.replace(marked, bare)
			refresh()
			time.Sleep(unmarkedFor / 2)
			c.replace(bare, marked)
			refresh()
		}
		c.replace(marked, bare)
		for range 4 {
			time.Sleep(unmarkedFor / 5)
			refresh()
			require.Len(t, has, 1)
		}
		time.Sleep(unmarkedFor / 5)
		refresh()
		require.Empty(t, has)
		require.Empty(t, c.unmarked)

		c.replace(bare, marked) // lost before the loop has seen that it is back
		refresh()
		c.replace(marked, bare)
		c.replace(bare, marked)
		c.replace(marked, bare)
		refresh()
		require.Len(t, has, 1)
		c.noteService(kept[service](c, bare), nil)
		require.NoError(t, c.services.GetStore().Delete(kept[service](c, bare)))
		refresh()
		require.Empty(t, has, "it was deleted")
		require.Empty(t, c.unmarked)
		time.Sleep(unmarkedFor)
	})
}

// What sessions need of a Node is a change. What a kubelet writes all the time is
// none.
func TestChangesOfNodes(t *testing.T) {
	t.Parallel()
	for name, change := range map[string]func(*corev1.Node){
		"annotation": func(n *corev1.Node) { n.Annotations = map[string]string{annotation.BGPASN: "64512"} },
		"address": func(n *corev1.Node) {
			n.Status.Addresses = []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: "198.18.0.1"}}
		},
		"label":  func(n *corev1.Node) { n.Labels = map[string]string{"rack": "a"} },
		"images": func(n *corev1.Node) { n.Status.Images = []corev1.ContainerImage{{SizeBytes: 1}} },
	} {
		c, before, after := mustCluster(t), nodeObject("n1"), nodeObject("n1")
		change(after)
		c.noteNode(kept[node](c, before), kept[node](c, after))
		require.Equal(t, name != "images", c.dirtyNodes, name)
	}
}

func mustCluster(t testing.TB) *cluster {
	c, err := newCluster(testapi.New(), testScope)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// testScope serves the Services of the tests.
var testScope = kube.Scope{Classless: true}

// kept returns what the informer's store keeps of an object, nil of none.
func kept[T any](c *cluster, o any) *T {
	var view any
	switch o := o.(type) {
	case nil:
		return nil
	case *corev1.Service:
		view = services(testScope).Derive(objects.Services.Project(o))
	case *discoveryv1.EndpointSlice:
		view = c.keepSlice(objects.EndpointSlices.Project(o))
	case *corev1.Node:
		view = keepNode(objects.Nodes.Project(o))
	}
	return view.(*T)
}

// replace puts a Service's next version into its informer's store.
func (c *cluster) replace(before, after *corev1.Service) {
	b, a := kept[service](c, before), kept[service](c, after)
	if err := c.services.GetStore().Update(a); err != nil {
		panic(err)
	}
	c.noteService(b, a)
}

// add puts an object into its informer's store.
func (c *cluster) add(obj any) {
	var err error
	switch obj := obj.(type) {
	case *corev1.Service:
		s := kept[service](c, obj)
		err = c.services.GetStore().Add(s)
		c.noteService(nil, s)
	case *discoveryv1.EndpointSlice:
		s := kept[slice](c, obj)
		err = c.slices.GetStore().Add(s)
		c.noteSlice(nil, s)
	case *corev1.Node:
		n := kept[node](c, obj)
		err = c.nodes.GetStore().Add(n)
		c.noteNode(nil, n)
	}
	if err != nil {
		panic(err)
	}
}
