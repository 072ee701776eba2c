package speaker

import (
	"maps"
	"net/netip"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/assert"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/lodestone-lb/lodestone/pkg/config"
	"github.com/lodestone-lb/lodestone/pkg/report"
	"github.com/lodestone-lb/lodestone/speaker/plan"
	"github.com/lodestone-lb/lodestone/speaker/podroutes"
)

// fakePodRouter records the sets that it was given.
type fakePodRouter struct {
	changes
	sets   []plan.PodRoutes
	status podroutes.Status
}

func (f *fakePodRouter) Set(want plan.PodRoutes) {
	f.change(func() { f.sets = append(f.sets, want) })
}

func (f *fakePodRouter) Status() podroutes.Status {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.status
}

// wantPodRoutes waits until the last set has exactly these routes, in order.
func (s *story) wantPodRoutes(mode config.RouteMode, routes map[string]string) {
	s.t.Helper()
	want := map[netip.Prefix]plan.PodRoute{}
	for cidr, via := range routes {
		want[netip.MustParsePrefix(cidr)] = plan.PodRoute{Node: "n2", Via: netip.MustParseAddr(via)}
	}
	timeout := time.After(testTimeout)
	for {
		changed := s.pods.Changed()
		s.pods.mu.Lock()
		got := plan.PodRoutes{Mode: "nothing"}
		if n := len(s.pods.sets); n > 0 {
			got = s.pods.sets[n-1]
		}
		s.pods.mu.Unlock()
		if got.Mode == mode && maps.Equal(got.Routes, want) {
			return
		}
		select {
		case <-changed:
		case <-timeout:
			s.t.Fatalf("the last set is %+v, want %v", got, want)
		}
	}
}

func podNode(name, cidr, address string) *corev1.Node {
	return &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: corev1.NodeSpec{PodCIDRs: []string{cidr}},
		Status: corev1.NodeStatus{Addresses: []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: address}}},
	}
}

func TestRoutesToPodsFollowNodesAndConfiguration(t *testing.T) {
	s := newStory(t, podNode("n2", "10.244.2.0/24", "198.18.0.2"))
	s.config.config.Routes = &config.Routes{Mode: config.RoutesKernel}
	s.start()
	s.wantPodRoutes(config.RoutesKernel, map[string]string{"10.244.2.0/24": "198.18.0.2"})
	s.apply(podNode("n2", "10.244.2.0/24", "198.18.0.22"))
	s.wantPodRoutes(config.RoutesKernel, map[string]string{"10.244.2.0/24": "198.18.0.22"})
	s.apply(podNode("n2", "10.244.7.0/24", "198.18.0.22"))
	s.wantPodRoutes(config.RoutesKernel, map[string]string{"10.244.7.0/24": "198.18.0.22"})

	s.config.change(func() { s.config.config = &config.Config{Digest: "d2"} })
	s.wantPodRoutes("", nil)
	s.config.change(func() {
		s.config.config = &config.Config{Digest: "d3", Routes: &config.Routes{Mode: config.RoutesKernel}}
	})
	s.wantPodRoutes(config.RoutesKernel, map[string]string{"10.244.7.0/24": "198.18.0.22"})
}

// The Lease has which pods have routes, once that is known.
func TestReporterReportsRoutedPods(t *testing.T) {
	t.Parallel()
	own := []netip.Prefix{netip.MustParsePrefix("10.244.1.0/24"), netip.MustParsePrefix("fd00:10:244:1::/64")}
	type result struct {
		mode   config.RouteMode
		routed []netip.Prefix
	}
	reported := func(mode config.RouteMode) result { return result{mode, own} }
	nothingNew := func(mode config.RouteMode) result { return result{mode, nil} }
	bgp := &config.Config{Routes: &config.Routes{Mode: config.RoutesBGP, Peers: []string{"tor-a"}}}
	kernel := podroutes.Status{Known: true, Mode: config.RoutesKernel, Own: own}
	refused := kernel
	refused.Error = "operation not permitted"
	partly := refused
	partly.Routes = []podroutes.RouteStatus{{Node: "n2"}}
	tests := map[string]struct {
		status   podroutes.Status
		config   *config.Config
		sessions []report.Session
		want     result
	}{
		"no set yet":               {podroutes.Status{}, nil, nil, result{}},
		"switched off":             {podroutes.Status{Known: true}, &config.Config{}, nil, result{"", []netip.Prefix{}}},
		"kernel":                   {kernel, nil, nil, reported("kernel")},
		"kernel without the right": {refused, nil, nil, nothingNew("kernel")},
		"one route refused":        {partly, nil, nil, reported("kernel")},
		"bgp, no session": {podroutes.Status{Known: true, Mode: config.RoutesBGP, Own: own}, bgp, []report.Session{{Peer: "tor-a"}},
			nothingNew("bgp")},
		"bgp, another session": {podroutes.Status{Known: true, Mode: config.RoutesBGP, Own: own}, bgp,
			[]report.Session{{Peer: "tor-b", Established: true}}, nothingNew("bgp")},
		"bgp": {podroutes.Status{Known: true, Mode: config.RoutesBGP, Own: own}, bgp,
			[]report.Session{{Peer: "tor-a", Established: true}}, reported("bgp")},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := NewReporter(ReportOptions{Registry: prometheus.NewRegistry(), Config: &fakeConfig{config: tt.config},
				PodRoutes: &fakePodRouter{status: tt.status}, Sessions: &fakeSessions{sessions: tt.sessions}})
			mode, routed := r.routedPods()
			assert.Equal(t, tt.want, result{config.RouteMode(mode), routed})
		})
	}
}
