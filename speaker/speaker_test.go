package speaker

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"
	"go4.org/netipx"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"

	"github.com/lodestone-lb/lodestone/pkg/annotation"
	"github.com/lodestone-lb/lodestone/pkg/config"
	"github.com/lodestone-lb/lodestone/pkg/kube"
	"github.com/lodestone-lb/lodestone/pkg/report"
	"github.com/lodestone-lb/lodestone/pkg/testapi"
	"github.com/lodestone-lb/lodestone/speaker/plan"
)

const testTimeout = 20 * time.Second

// changes is what the fakes have in common with what they stand for.
type changes struct {
	mu sync.Mutex
	ch chan struct{}
}

func (c *changes) Changed() <-chan struct{} {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.ch == nil {
		c.ch = make(chan struct{})
	}
	return c.ch
}

func (c *changes) change(f func()) {
	c.mu.Lock()
	defer c.mu.Unlock()
	f()
	if c.ch != nil {
		close(c.ch)
	}
	c.ch = make(chan struct{})
}

type fakeConfig struct {
	changes
	config *config.Config
	state  kube.State
}

func (f *fakeConfig) Current() (*config.Config, kube.State) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.config, f.state
}

type fakeMembers struct {
	changes
	joined   bool
	self     string
	speakers map[string]bool
	networks map[string]report.Network
	ready    []bool // the arguments of SetReady
}

func (f *fakeMembers) Speakers() map[string]bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return maps.Clone(f.speakers)
}

func (f *fakeMembers) Networks() map[string]report.Network {
	f.mu.Lock()
	defer f.mu.Unlock()
	return maps.Clone(f.networks)
}

func (f *fakeMembers) All() (map[string]bool, map[string]report.Network) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return maps.Clone(f.speakers), maps.Clone(f.networks)
}

func (f *fakeMembers) Joined() (bool, string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.joined, "joining"
}

func (f *fakeMembers) SetSick(sick bool) {
	if n := f.Networks()[f.self]; n.Sick != sick {
		n.Sick = sick
		f.change(func() {
			if f.networks == nil {
				f.networks = map[string]report.Network{}
			}
			f.networks[f.self] = n
		})
	}
}

func (f *fakeMembers) SetReady(ready bool) {
	if f.Speakers()[f.self] != ready {
		f.change(func() { f.speakers[f.self] = ready; f.ready = append(f.ready, ready) })
	}
}

func (f *fakeMembers) Claim(claims report.Claims) {
	if f.Networks()[f.self].Claims != claims {
		f.change(func() { f.claim(f.self, claims) })
	}
}

// claim publishes for a node what it owns and keeps.
func (f *fakeMembers) claim(node string, claims report.Claims) {
	networks := maps.Clone(f.networks)
	if networks == nil {
		networks = map[string]report.Network{}
	}
	n := networks[node]
	n.Claims = claims
	networks[node] = n
	f.networks = networks
}

type fakeDataPlane struct {
	changes
	sick   bool // it is not there yet
	ailing bool // it answers that it is not healthy
	// recovers makes it healthy again after the first answer that it is not.
	recovers bool
	looks    int // how often it was asked
}

func (f *fakeDataPlane) Health() (healthy, sick bool, status string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	healthy, sick = !f.sick && !f.ailing, f.ailing
	f.looks++
	f.ailing = f.ailing && !f.recovers
	return healthy, sick, "503 Service Unavailable"
}

// fakeAnnouncer records the sets that it was given.
type fakeAnnouncer struct {
	changes
	sets []map[netip.Addr]plan.Layer2
	fail int
	// lost makes the next owners' announcements never arrive.
	lost      bool
	forgotten []netip.Addr
}

func (f *fakeAnnouncer) Set(_ context.Context, want map[netip.Addr]plan.Layer2) error {
	var err error
	f.change(func() {
		if f.fail > 0 {
			f.fail--
			err = errors.New("no such luck")
			return
		}
		f.sets = append(f.sets, maps.Clone(want))
	})
	return err
}

func (f *fakeAnnouncer) Leaving() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	left := 0
	if len(f.sets) == 0 {
		return 0
	}
	for _, l := range f.sets[len(f.sets)-1] {
		if l.Leaving && f.lost {
			left++
		}
	}
	return left
}

func (f *fakeAnnouncer) Forget(vips []netip.Addr) {
	if len(vips) > 0 {
		f.change(func() { f.forgotten = append(f.forgotten, vips...) })
	}
}

func (f *fakeAnnouncer) calls() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return len(f.sets)
}

// fakeForwarder is ready once something was set, and remembers what was set last.
type fakeForwarder struct {
	mu    sync.Mutex
	want  plan.Forwarding
	ready chan struct{}
	once  sync.Once
}

func newFakeForwarder() *fakeForwarder { return &fakeForwarder{ready: make(chan struct{})} }

func (f *fakeForwarder) Set(want plan.Forwarding) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.want = want
	f.once.Do(func() { close(f.ready) })
}

func (f *fakeForwarder) Ready() <-chan struct{} { return f.ready }

// fakeLimiter records the sets that it was given.
type fakeLimiter struct {
	changes
	sets []map[plan.LimitKey]plan.Limit
}

func (f *fakeLimiter) Set(want map[plan.LimitKey]plan.Limit) {
	f.change(func() { f.sets = append(f.sets, want) })
}

func (f *fakeLimiter) recorded() (sets int, last map[plan.LimitKey]plan.Limit) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if len(f.sets) == 0 {
		return 0, nil
	}
	return len(f.sets), f.sets[len(f.sets)-1]
}

// story is a running speaker on n1, whose world is all fake.
type story struct {
	t         *testing.T
	client    *fake.Clientset
	config    fakeConfig
	members   fakeMembers
	dataPlane fakeDataPlane
	announcer fakeAnnouncer
	limiter   fakeLimiter
	forwarder *fakeForwarder
	pods      fakePodRouter
	router    fakeRouter
	passwords changes
	drain     time.Duration
	// vipMetrics is the speaker's option.
	vipMetrics int
	registry   *prometheus.Registry
	handOver   time.Duration
	log        bytes.Buffer // written by the loop: read it after stop
	speaker    *Speaker
	stop       func()
}

// newStory begins with the node n1, whose speaker is the only one, and with
// everything well.
func newStory(t *testing.T, objects ...runtime.Object) *story {
	t.Parallel()
	s := &story{t: t, client: testapi.New(append(objects, nodeObject("n1"))...), registry: prometheus.NewPedanticRegistry(),
		handOver: time.Millisecond, forwarder: newFakeForwarder()}
	s.config.config = &config.Config{
		Digest:         "d1",
		Pools:          []config.Pool{{Name: "lan", Free: prefix("203.0.113.0/24"), Withheld: &netipx.IPSet{}}},
		Advertisements: []config.Advertisement{{Name: "all", Layer2: &config.Layer2{}}},
	}
	s.members = fakeMembers{joined: true, self: "n1", speakers: map[string]bool{"n1": false}}
	return s
}

func (s *story) start() {
	s.t.Helper()
	var err error
	s.speaker, err = New(Options{Node: "n1", Scope: testScope, Client: s.client, Config: &s.config, Members: &s.members,
		DataPlane: &s.dataPlane,
		Announcer: &s.announcer, Limiter: &s.limiter, Forwarder: s.forwarder, Router: &s.router, PodRoutes: &s.pods,
		Passwords: &s.passwords, Drain: s.drain,
		Detector: NewDetector(&fakeBFD{}, &fakePeers{}, upToDate, slog.New(slog.DiscardHandler)), Log: slog.New(slog.NewTextHandler(&s.log, nil)),
		Registry: s.registry, HandOver: s.handOver, VIPMetrics: s.vipMetrics})
	if err != nil {
		s.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- s.speaker.Run(ctx) }()
	s.stop = sync.OnceFunc(func() {
		cancel()
		if err := <-done; err != nil {
			s.t.Error(err)
		}
	})
	s.t.Cleanup(s.stop)
}

// announced waits until exactly these VIPs are announced, "leaving" after
// those that are.
func (s *story) announced(vips ...string) {
	s.t.Helper()
	timeout := time.After(testTimeout)
	for {
		changed, got := s.announcer.Changed(), []string{}
		s.announcer.mu.Lock()
		if n := len(s.announcer.sets); n > 0 {
			for vip, l := range s.announcer.sets[n-1] {
				got = append(got, vip.String()+map[bool]string{true: " leaving"}[l.Leaving])
			}
		}
		s.announcer.mu.Unlock()
		slices.Sort(got)
		if slices.Equal(got, vips) {
			return
		}
		select {
		case <-changed:
		case <-timeout:
			s.t.Fatalf("announced are %q, want %q; status %+v", got, vips, s.speaker.Status())
		}
	}
}

// apply creates or updates objects.
func (s *story) apply(objects ...runtime.Object) {
	s.t.Helper()
	for _, o := range objects {
		var err error
		switch o := o.(type) {
		case *corev1.Service:
			if _, err = s.client.CoreV1().Services(o.Namespace).Update(s.t.Context(), o, metav1.UpdateOptions{}); err != nil {
				_, err = s.client.CoreV1().Services(o.Namespace).Create(s.t.Context(), o, metav1.CreateOptions{})
			}
		case *discoveryv1.EndpointSlice:
			if _, err = s.client.DiscoveryV1().EndpointSlices(o.Namespace).Update(s.t.Context(), o, metav1.UpdateOptions{}); err != nil {
				_, err = s.client.DiscoveryV1().EndpointSlices(o.Namespace).Create(s.t.Context(), o, metav1.CreateOptions{})
			}
		case *corev1.Node:
			_, err = s.client.CoreV1().Nodes().Update(s.t.Context(), o, metav1.UpdateOptions{})
		}
		if err != nil {
			s.t.Fatal(err)
		}
	}
}

func prefix(text string) *netipx.IPSet {
	var b netipx.IPSetBuilder
	b.AddPrefix(netip.MustParsePrefix(text))
	set, _ := b.IPSet()
	return set
}

func nodeObject(name string) *corev1.Node {
	return &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}}
}

// serviceObject is a Service with its VIP; serviceObject and endpoints with
// the same name belong together.
func serviceObject(name, vip string) *corev1.Service {
	return &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name, Annotations: map[string]string{annotation.Assigned: vip}},
		Spec:       corev1.ServiceSpec{Type: corev1.ServiceTypeLoadBalancer},
		Status:     corev1.ServiceStatus{LoadBalancer: corev1.LoadBalancerStatus{Ingress: []corev1.LoadBalancerIngress{{IP: vip}}}},
	}
}

func endpoints(service string, eps ...discoveryv1.Endpoint) *discoveryv1.EndpointSlice {
	return &discoveryv1.EndpointSlice{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: service + "-1",
			Labels: map[string]string{discoveryv1.LabelServiceName: service}},
		Endpoints: eps,
	}
}

func on(node string) discoveryv1.Endpoint { return endpoint(node, "ready serving") }

func endpoint(node, conditions string) discoveryv1.Endpoint {
	e := discoveryv1.Endpoint{Addresses: []string{"10.0.0.1"}}
	if node != "" {
		e.NodeName = &node
	}
	if conditions != "unknown" {
		e.Conditions.Ready, e.Conditions.Serving = new(strings.Contains(conditions, "ready")), new(strings.Contains(conditions, "serving"))
	}
	return e
}

func TestServicesComeAndGo(t *testing.T) {
	s := newStory(t, serviceObject("web", "203.0.113.1"), endpoints("web", on("n1")))
	s.start()
	s.announced("203.0.113.1")
	s.apply(endpoints("dns", on("n2")), serviceObject("dns", "203.0.113.2"))
	s.announced("203.0.113.1", "203.0.113.2")
	s.apply(endpoints("dns"))
	s.announced("203.0.113.1")

	// Deleted and re-created with another address.
	if err := s.client.CoreV1().Services("default").Delete(t.Context(), "web", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	s.apply(serviceObject("web", "203.0.113.9"))
	s.announced("203.0.113.9")

	leaving := serviceObject("web", "203.0.113.9")
	leaving.DeletionTimestamp = &metav1.Time{Time: time.Now()}
	s.apply(leaving)
	s.announced()
}

func TestStatusOfAnotherLoadBalancerIsNotAnnounced(t *testing.T) {
	foreign := serviceObject("foreign", "203.0.113.3")
	foreign.Annotations = nil
	s := newStory(t, foreign, endpoints("foreign", on("n1")), serviceObject("web", "203.0.113.1"), endpoints("web", on("n1")))
	s.start()
	s.announced("203.0.113.1")
}

func TestEndpointChurnSendsNothing(t *testing.T) {
	s := newStory(t, serviceObject("web", "203.0.113.1"), endpoints("web", on("n1"), on("n2")))
	s.start()
	s.announced("203.0.113.1")
	calls := s.announcer.calls()
	for i := range 50 {
		s.apply(endpoints("web", on("n1"), on(fmt.Sprint("n", i%7))))
	}
	s.apply(serviceObject("end", "203.0.113.2"), endpoints("end", on("n1")))
	s.announced("203.0.113.1", "203.0.113.2")
	if more := s.announcer.calls() - calls; more > 2 {
		t.Errorf("the announcer was called %d times for endpoints that changed nothing", more-1)
	}
}

func TestLocalPolicyFollowsEndpoints(t *testing.T) {
	web := serviceObject("web", "203.0.113.1")
	web.Spec.ExternalTrafficPolicy = corev1.ServiceExternalTrafficPolicyLocal
	s := newStory(t, web, endpoints("web", on("n1")), nodeObject("n2"))
	s.members.speakers["n2"] = true
	s.start()
	s.announced("203.0.113.1")
	s.apply(endpoints("web", on("n2"), endpoint("n1", "serving"))) // ours terminates
	s.announced()
	s.silent(plan.NoLocalEndpoint, "n2")
	s.apply(endpoints("web", endpoint("n1", "serving"))) // all terminate
	s.announced("203.0.113.1")
}

func TestNodeLabelMovesVIPs(t *testing.T) {
	s := newStory(t, serviceObject("web", "203.0.113.1"), endpoints("web", on("n1")))
	s.start()
	s.announced("203.0.113.1")
	excluded := nodeObject("n1")
	excluded.Labels = map[string]string{corev1.LabelNodeExcludeBalancers: ""}
	s.apply(excluded)
	s.announced()
	s.apply(nodeObject("n1"))
	s.announced("203.0.113.1")
}

// The reports about an address are removed with the last Service that has it.
func TestAddressesWithoutAServiceAreForgotten(t *testing.T) {
	s := newStory(t, serviceObject("web", "203.0.113.1"), endpoints("web", on("n1")), serviceObject("dns", "203.0.113.2"),
		endpoints("dns", on("n1")))
	s.start()
	<-s.speaker.Ready()
	forgotten := func(vips ...netip.Addr) {
		t.Helper()
		for timeout := time.After(testTimeout); ; {
			changed := s.announcer.Changed()
			s.announcer.mu.Lock()
			got := slices.Clone(s.announcer.forgotten)
			s.announcer.mu.Unlock()
			if slices.Equal(got, vips) {
				return
			}
			select {
			case <-changed:
			case <-timeout:
				t.Fatalf("forgotten are %v, not %v", got, vips)
			}
		}
	}
	web, dns := netip.MustParseAddr("203.0.113.1"), netip.MustParseAddr("203.0.113.2")
	s.apply(endpoints("web")) // withdrawn, and still the Service's
	s.silent(plan.NoServingEndpoint, "")
	s.apply(serviceObject("web", "203.0.113.3"))
	forgotten(web)
	if err := s.client.CoreV1().Services("default").Delete(t.Context(), "dns", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	forgotten(web, dns)
}

func TestNothingIsOwnedBeforeAllIsReady(t *testing.T) {
	s := newStory(t, serviceObject("web", "203.0.113.1"), endpoints("web", on("n1")))
	configuration := s.config.config
	s.config.config, s.config.state.Err = nil, errors.New("config.yaml:3: no")
	s.members.joined = false
	s.dataPlane.sick = true
	s.start()
	for _, step := range []struct {
		waitsFor []string
		then     func()
	}{
		{[]string{"configuration", "membership", "kube-proxy", "direct forwarding"},
			func() { s.members.change(func() { s.members.joined = true }) }},
		{[]string{"configuration", "kube-proxy", "direct forwarding"}, func() { s.config.change(func() { s.config.config = configuration }) }},
		{[]string{"kube-proxy"}, func() { s.dataPlane.change(func() { s.dataPlane.sick = false }) }},
	} {
		s.waitsFor(step.waitsFor...)
		step.then()
	}
	s.announced("203.0.113.1")
	<-s.speaker.Ready()
	s.dataPlane.change(func() { s.dataPlane.sick = true })
	s.announced()
	s.silent(plan.SpeakerNotReady, "")
}

// The first rules may be in force while the loop still decides: it looks again.
func TestRulesThatAreThereAtOnceAreSeen(t *testing.T) {
	s := newStory(t, serviceObject("web", "203.0.113.1"), endpoints("web", on("n1")))
	configuration := s.config.config
	s.config.config = nil
	s.start()
	s.waitsFor("configuration", "direct forwarding")
	time.Sleep(200 * time.Millisecond) // until nothing else has the loop look again
	s.config.change(func() { s.config.config = configuration })
	s.announced("203.0.113.1")
}

// A node whose kube-proxy is sick hands its VIPs over to one where it is not, and takes them
// back when there is none any more: what is in the kernel serves.
func TestASickDataPlaneIsTheLastChoice(t *testing.T) {
	s, vip := newPair(t, "n1")
	s.start()
	s.announced(vip)
	s.dataPlane.change(func() { s.dataPlane.ailing = true })
	s.announced(vip + " leaving")
	if !s.members.Speakers()["n1"] || s.speaker.Status().Checks[3].OK {
		t.Errorf("it is ready, and its check of kube-proxy fails: %+v", s.speaker.Status())
	}
	s.members.change(func() { s.members.networks = map[string]report.Network{"n1": {Sick: true}, "n2": {Sick: true}} })
	s.announced(vip)
	s.dataPlane.change(func() { s.dataPlane.ailing, s.dataPlane.sick = false, true })
	s.announced()
}

// A kube-proxy that recovers between two looks at it has been sick or well, and never absent.
func TestADataPlaneThatRecoversKeepsItsVIPs(t *testing.T) {
	s, vip := newPair(t, "n1")
	s.members.change(func() { s.members.networks = map[string]report.Network{"n2": {Sick: true}} })
	s.start()
	s.announced(vip)
	s.dataPlane.change(func() { s.dataPlane.ailing, s.dataPlane.recovers, s.dataPlane.looks = true, true, 0 })
	require.Eventually(t, func() bool {
		looks := 0
		s.dataPlane.change(func() { looks = s.dataPlane.looks })
		return looks > 4 // it has decided by the first
	}, testTimeout, time.Millisecond)
	s.members.change(func() { require.Equal(t, []bool{true}, s.members.ready, "what it has published") })
}

// silent waits until the only VIP is silent for the reason: the status comes
// after the deed.
func (s *story) silent(reason plan.Reason, owner string) {
	s.t.Helper()
	for deadline := time.Now().Add(testTimeout); ; time.Sleep(time.Millisecond) {
		silent := s.speaker.Status().Silent
		if len(silent) == 1 && silent[0].Reason == reason && silent[0].Owner == owner {
			return
		}
		if time.Now().After(deadline) {
			s.t.Fatalf("silent are %+v, want %s, owner %q", silent, reason, owner)
		}
	}
}

// waitsFor waits until exactly these checks fail, and nothing is announced.
func (s *story) waitsFor(names ...string) {
	s.t.Helper()
	deadline := time.Now().Add(testTimeout)
	for {
		var failing []string
		for _, c := range s.speaker.Checks() {
			if !c.OK {
				failing = append(failing, c.Name)
			}
		}
		if slices.Equal(failing, names) {
			break
		}
		if time.Now().After(deadline) {
			s.t.Fatalf("checks %+v, want failing %q", s.speaker.Checks(), names)
		}
		time.Sleep(time.Millisecond) // the loop notifies nobody after a check
	}
	if owned := s.speaker.Status().Owned; len(owned) > 0 {
		s.t.Errorf("owned before ready: %+v", owned)
	}
}

func TestVIPsOfADeadSpeakerComeHere(t *testing.T) {
	var objects []runtime.Object
	var all []string
	for i := range 8 {
		vip := fmt.Sprint("203.0.113.", i)
		all = append(all, vip)
		objects = append(objects, serviceObject(fmt.Sprint("s", i), vip), endpoints(fmt.Sprint("s", i), on("n1")))
	}
	s := newStory(t, append(objects, nodeObject("n2"))...)
	s.members.speakers["n2"] = true
	s.start()
	<-s.speaker.Ready()
	s.members.change(func() { delete(s.members.speakers, "n2") })
	s.announced(all...)
	s.stop()
	if got := testutil.ToFloat64(s.speaker.metrics.gained); got != float64(len(all)) {
		t.Errorf("%v VIPs gained, want %d", got, len(all))
	}
}

func TestAPIServerDownWithdrawsNothing(t *testing.T) {
	s := newStory(t, serviceObject("web", "203.0.113.1"), endpoints("web", on("n1")), nodeObject("n2"))
	s.members.speakers["n2"] = true
	var watches sync.Map
	s.client.PrependWatchReactor("*", func(a clienttesting.Action) (bool, watch.Interface, error) {
		w := watch.NewRaceFreeFake()
		watches.Store(w, nil)
		return true, w, nil
	})
	s.start()
	<-s.speaker.Ready()
	failed := make(chan struct{}, 100)
	fail := func(clienttesting.Action) (bool, runtime.Object, error) {
		failed <- struct{}{}
		return true, nil, errors.New("the API server is down")
	}
	s.client.PrependReactor("list", "*", fail)
	s.client.PrependWatchReactor("*", func(clienttesting.Action) (bool, watch.Interface, error) {
		return true, nil, errors.New("the API server is down")
	})
	watches.Range(func(w, _ any) bool { w.(*watch.RaceFreeFakeWatcher).Stop(); return true })
	<-failed
	s.members.change(func() { delete(s.members.speakers, "n2") })
	s.announced("203.0.113.1")
	if !s.speaker.Status().Ready {
		t.Errorf("not ready: %+v", s.speaker.Checks())
	}
}

func TestHandOverPublishesBeforeItWithdraws(t *testing.T) {
	s := newStory(t, serviceObject("web", "203.0.113.1"), endpoints("web", on("n1")))
	s.start()
	s.announced("203.0.113.1")
	calls := s.announcer.calls()
	s.stop()
	s.announced()
	if got := s.announcer.calls() - calls; got != 1 {
		t.Errorf("the announcer was called %d times", got)
	}
	if want := []bool{true, false}; !slices.Equal(s.members.ready, want) {
		t.Errorf("published ready %v, want %v", s.members.ready, want)
	}
	if s.speaker.Status().Ready {
		t.Error("ready after the end")
	}
}

func TestFailedSetIsTriedAgain(t *testing.T) {
	s := newStory(t, serviceObject("web", "203.0.113.1"), endpoints("web", on("n1")))
	s.announcer.fail = 1
	s.start()
	s.announced("203.0.113.1")
}

// limited waits until these are the limits per second, by VIP and Service.
func (s *story) limited(want map[string]uint32) {
	s.t.Helper()
	timeout := time.After(testTimeout)
	for {
		changed, got := s.limiter.Changed(), map[string]uint32{}
		sets, last := s.limiter.recorded()
		for key, l := range last {
			got[key.VIP.String()+" "+key.Service] = l.PerSecond
		}
		if sets > 0 && maps.Equal(got, want) {
			return
		}
		select {
		case <-changed:
		case <-timeout:
			s.t.Fatalf("limited are %v, want %v; status %+v", got, want, s.speaker.Status())
		}
	}
}

func limitedService(name, vip, limit string) *corev1.Service {
	svc := serviceObject(name, vip)
	svc.Annotations[annotation.ConnectionRateLimit] = limit
	svc.Spec.Ports = []corev1.ServicePort{{Port: 80}, {Port: 53, Protocol: corev1.ProtocolUDP}, {Port: 9899, Protocol: corev1.ProtocolSCTP},
		{Port: 1, Protocol: "QUIC"}}
	return svc
}

func TestLimitsFollowTheAnnotation(t *testing.T) {
	s := newStory(t, limitedService("web", "203.0.113.1", "100"), endpoints("web", on("n1")), serviceObject("dns", "203.0.113.2"),
		endpoints("dns", on("n1")))
	s.start()
	s.limited(map[string]uint32{"203.0.113.1 default/web": 100})
	_, last := s.limiter.recorded()
	if ports, want := last[plan.LimitKey{VIP: netip.MustParseAddr("203.0.113.1"), Service: "default/web"}].Ports,
		[]plan.Port{{Protocol: 6, Number: 80}, {Protocol: 17, Number: 53}, {Protocol: 132, Number: 9899}}; !slices.Equal(ports, want) {
		t.Errorf("limited at ports %v, want %v", ports, want)
	}
	s.apply(limitedService("web", "203.0.113.1", "7"))
	s.limited(map[string]uint32{"203.0.113.1 default/web": 7})
	s.apply(serviceObject("web", "203.0.113.1"))
	s.limited(map[string]uint32{})
	s.announced("203.0.113.1", "203.0.113.2")

	s.apply(limitedService("web", "203.0.113.1", "8"))
	s.limited(map[string]uint32{"203.0.113.1 default/web": 8})
	s.apply(endpoints("web")) // the VIP goes elsewhere, and its limit
	s.limited(map[string]uint32{})
}

func TestAWrongLimitIsReportedAndLimitsNothing(t *testing.T) {
	s := newStory(t, limitedService("web", "203.0.113.1", "fast"), endpoints("web", on("n1")))
	s.start()
	s.announced("203.0.113.1")
	s.apply(limitedService("web", "203.0.113.1", "1"))
	s.limited(map[string]uint32{"203.0.113.1 default/web": 1})
	s.apply(limitedService("web", "203.0.113.1", "0"))
	s.limited(map[string]uint32{})
	s.announced("203.0.113.1")
	if got := s.speaker.Status().Unlimited; len(got) != 1 || got[0].Service != "default/web" || !strings.Contains(got[0].Message, `"0"`) {
		t.Errorf("unlimited are %+v", got)
	}
	s.stop()
	if n := strings.Count(s.log.String(), "connections are not limited"); n != 2 {
		t.Errorf("two wrong values gave %d lines of the log:\n%s", n, s.log.String())
	}
}

// A node has a metric for each of its VIPs, or for none of them.
func TestMetricOfEachVIP(t *testing.T) {
	s := newStory(t, serviceObject("a", "203.0.113.1"), endpoints("a", on("n1")), serviceObject("b", "203.0.113.2"), endpoints("b", on("n1")))
	s.vipMetrics = 2
	s.start()
	s.announced("203.0.113.1", "203.0.113.2")
	const help = "# HELP lodestone_speaker_vip_owner Always 1: this node owns the VIP.\n# TYPE lodestone_speaker_vip_owner gauge\n"
	has := func(series string) {
		t.Helper()
		if err := testutil.GatherAndCompare(s.registry, strings.NewReader(series), MetricVIPOwner); err != nil {
			t.Error(err)
		}
	}
	has(help + `lodestone_speaker_vip_owner{vip="203.0.113.1"} 1
lodestone_speaker_vip_owner{vip="203.0.113.2"} 1
`)
	s.apply(serviceObject("c", "203.0.113.3"), endpoints("c", on("n1")))
	s.announced("203.0.113.1", "203.0.113.2", "203.0.113.3")
	has("")
}

func TestMetrics(t *testing.T) {
	excluded := nodeObject("n2")
	s := newStory(t, serviceObject("web", "203.0.113.1"), endpoints("web", on("n1")), serviceObject("empty", "203.0.113.2"), excluded)
	s.start()
	s.announced("203.0.113.1")
	for testutil.ToFloat64(s.speaker.metrics.gained) == 0 { // it is counted after the deed
		time.Sleep(time.Millisecond)
	}
	if err := testutil.GatherAndCompare(s.registry, strings.NewReader(`
# HELP lodestone_speaker_ready Whether the speaker is ready to own VIPs.
# TYPE lodestone_speaker_ready gauge
lodestone_speaker_ready 1
# HELP lodestone_speaker_vips_owned VIPs that this node owns.
# TYPE lodestone_speaker_vips_owned gauge
lodestone_speaker_vips_owned 1
# HELP lodestone_speaker_vips_silent VIPs that this node does not announce, by reason.
# TYPE lodestone_speaker_vips_silent gauge
lodestone_speaker_vips_silent{reason="NoServingEndpoint"} 1
# HELP lodestone_speaker_vips_unowned VIPs for layer 2 alone that no node owns, by the reason of this node.
# TYPE lodestone_speaker_vips_unowned gauge
lodestone_speaker_vips_unowned{reason="NoServingEndpoint"} 1
# HELP lodestone_speaker_ownership_transitions_total VIPs that this node gained or lost.
# TYPE lodestone_speaker_ownership_transitions_total counter
lodestone_speaker_ownership_transitions_total{transition="gained"} 1
lodestone_speaker_ownership_transitions_total{transition="lost"} 0
`), MetricReady, MetricVIPsOwned, MetricVIPsSilent, MetricVIPsUnowned, MetricTransitions); err != nil {
		t.Error(err)
	}
	if problems, err := testutil.GatherAndLint(s.registry); err != nil || len(problems) > 0 {
		t.Error(problems, err)
	}
}
