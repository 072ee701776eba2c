package speaker

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"testing"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/client-go/kubernetes/fake"

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
			got := c.derive("default/web")
			if nodes := slices.Sorted(maps.Keys(got.ServingNodes)); got.Serving != test.serving || !slices.Equal(nodes, test.nodes) {
				t.Errorf("serving %v on %q, want %v on %q", got.Serving, nodes, test.serving, test.nodes)
			}
		})
	}
}

func TestPutKeepsTheListInStep(t *testing.T) {
	t.Parallel()
	c := mustCluster(t)
	vips := plan.Service{VIPs: make([]netip.Addr, 1)}
	for i, step := range []struct {
		key     string
		there   bool
		changed bool
	}{{"a", true, true}, {"b", true, true}, {"c", true, true}, {"a", true, false}, {"a", false, true}, {"a", false, false}, {"c", false, true}, {"b", false, true}, {"a", true, true}} {
		s := plan.Service{}
		if step.there {
			s = vips
			s.Name = step.key
		}
		if changed := c.put(step.key, s); changed != step.changed {
			t.Errorf("step %d: changed %v", i, changed)
		}
		if len(c.list) != len(c.place) {
			t.Fatalf("step %d: %d in the list, %d placed", i, len(c.list), len(c.place))
		}
		for key, at := range c.place {
			if c.list[at].Name != key {
				t.Fatalf("step %d: %s is at the place of %s", i, c.list[at].Name, key)
			}
		}
	}
}

func mustCluster(t testing.TB) *cluster {
	c, err := newCluster(fake.NewClientset())
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// add puts an object into its informer's store.
func (c *cluster) add(obj any) {
	var err error
	switch obj := obj.(type) {
	case *corev1.Service:
		kept, _ := keepService(obj)
		err = c.services.GetStore().Add(kept)
		c.noteService(nil, kept)
	case *discoveryv1.EndpointSlice:
		kept, _ := keepSlice(obj)
		err = c.slices.GetStore().Add(kept)
		c.noteSlice(nil, kept)
	}
	if err != nil {
		panic(err)
	}
}

func BenchmarkEndpointFlap(b *testing.B) {
	c := mustCluster(b)
	for i := range 10_000 {
		s := serviceObject(fmt.Sprint("s", i), fmt.Sprintf("10.0.%d.%d", i>>8, i&255))
		s.Spec.ExternalTrafficPolicy = corev1.ServiceExternalTrafficPolicyLocal
		c.add(s)
		c.add(endpoints(s.Name, on("n1")))
	}
	c.refresh()
	b.Run("10000 Services", func(b *testing.B) {
		for i := 0; b.Loop(); i++ {
			c.add(endpoints("s7", on(fmt.Sprint("n", i))))
			if !c.refresh() {
				b.Fatal("nothing changed")
			}
		}
	})
}
