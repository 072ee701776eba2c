package speaker

import (
	"context"
	"encoding/binary"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	kruntime "k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"

	"github.com/lodestone-lb/lodestone/pkg/config"
	"github.com/lodestone-lb/lodestone/pkg/testcost"
)

// What a speaker costs is measured in a large cluster.
const (
	manyServices = 10_000
	manyNodes    = 1000
	churning     = 1000 // Services that change, one after the other
)

// BenchmarkStorm changes one object after the other, at a steady pace, and
// reports the CPU time of each change, of the benchmark's server and the speaker
// together. The share of a server and of a client that only reads is "wire".
func BenchmarkStorm(b *testing.B) {
	for name, storm := range map[string]struct {
		resource string
		policy   corev1.ServiceExternalTrafficPolicy
		change   func(i, round int) metav1.Object
	}{
		"wire": {resource: "endpointslices", change: storedSlice},
		"status": {resource: "services", change: func(i, round int) metav1.Object {
			s := storedService(i, corev1.ServiceExternalTrafficPolicyCluster)
			if round%2 == 1 {
				s.Status = corev1.ServiceStatus{}
			}
			return s
		}},
		"endpoints":            {resource: "endpointslices", change: storedSlice},
		"endpoints of a Local": {resource: "endpointslices", policy: corev1.ServiceExternalTrafficPolicyLocal, change: storedSlice},
	} {
		for _, perSecond := range []int{100, 1000} {
			b.Run(fmt.Sprintf("%s/%d a second", name, perSecond), func(b *testing.B) {
				api := newAPIServer(b, storm.policy, nil)
				var frames [][]byte
				for round := range 2 {
					for i := range churning {
						frames = append(frames, api.frame(b, watch.Modified, storm.change(i, round+1)))
					}
				}
				if name == "wire" {
					api.read(b, storm.resource)
				} else {
					startSpeaker(b, api)
				}
				before, pace := cpuTime(), time.NewTicker(time.Second/time.Duration(perSecond))
				defer pace.Stop()
				for i := 0; b.Loop(); i++ {
					api.more[storm.resource] <- frames[i%len(frames)]
					<-pace.C
				}
				b.ReportMetric(float64((cpuTime()-before).Microseconds())/float64(b.N), "cpu-µs/op")
			})
		}
	}
}

// BenchmarkMemory is what a synced speaker keeps.
func BenchmarkMemory(b *testing.B) {
	for _, policy := range []corev1.ServiceExternalTrafficPolicy{corev1.ServiceExternalTrafficPolicyCluster,
		corev1.ServiceExternalTrafficPolicyLocal} {
		b.Run(string(policy), func(b *testing.B) {
			api := newAPIServer(b, policy, nil)
			for b.Loop() {
				before := testcost.Live()
				startSpeaker(b, api)
				b.ReportMetric(float64(testcost.Live()-before)/1e6, "MB")
			}
		})
	}
}

// startSpeaker returns when the speaker has decided about all VIPs, and waits for what comes.
func startSpeaker(b *testing.B, api *apiServer) {
	o, err := manyOptions(api.URL)
	require.NoError(b, err)
	s, err := New(o)
	require.NoError(b, err)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error)
	go func() { done <- s.Run(ctx) }()
	b.Cleanup(func() { cancel(); <-done })
	require.Eventually(b, func() bool {
		s.mu.Lock()
		defer s.mu.Unlock()
		p := s.core.State().Plan
		return len(p.Layer2)+len(p.Silent) == manyServices
	}, testTimeout, 10*time.Millisecond)
	require.Eventually(b, func() bool { return time.Since(*s.beat.Load()) > 500*time.Millisecond }, testTimeout, 10*time.Millisecond,
		"the loop waits")
}

// manyOptions are those of a speaker in the large cluster of an API server.
// Routers and all that is not the loop's are fakes.
func manyOptions(url string) (Options, error) {
	client, err := kubernetes.NewForConfig(&rest.Config{Host: url,
		ContentConfig: rest.ContentConfig{ContentType: kruntime.ContentTypeProtobuf}})
	members := &fakeMembers{joined: true, self: "node-7", speakers: map[string]bool{}}
	for i := range manyNodes {
		members.speakers[fmt.Sprint("node-", i)] = true
	}
	log := slog.New(slog.DiscardHandler)
	return Options{
		Node: members.self, Client: client, Scope: testScope, Members: members, DataPlane: &fakeDataPlane{},
		Announcer: &fakeAnnouncer{},
		Limiter:   &fakeLimiter{}, Forwarder: newFakeForwarder(), Router: &fakeRouter{}, PodRoutes: &fakePodRouter{}, Passwords: &changes{},
		Detector: NewDetector(&fakeBFD{}, &fakePeers{}, upToDate, log),
		Config: &fakeConfig{config: &config.Config{
			Pools:          []config.Pool{{Name: "lan", Free: prefix("10.0.0.0/16"), Withheld: prefix("10.1.0.0/32")}},
			Advertisements: []config.Advertisement{{Name: "all", Layer2: &config.Layer2{}}},
		}},
		Log: log, Registry: prometheus.NewRegistry(),
	}, err
}

// apiServer streams objects to watchers as an API server does, in protobuf,
// all of them encoded before.
type apiServer struct {
	*httptest.Server
	first   map[string][]byte      // by resource: what there is at the beginning
	more    map[string]chan []byte // by resource: what comes later
	version int
}

// newAPIServer starts one, where the listener is or on loopback.
func newAPIServer(b *testing.B, policy corev1.ServiceExternalTrafficPolicy, listener net.Listener) *apiServer {
	a := &apiServer{first: map[string][]byte{}, more: map[string]chan []byte{}}
	add := func(resource string, event watch.EventType, o metav1.Object) {
		a.first[resource] = append(a.first[resource], a.frame(b, event, o)...)
	}
	for i := range manyServices {
		add("services", watch.Added, storedService(i, policy))
		add("endpointslices", watch.Added, storedSlice(i, 0))
	}
	for i := range manyNodes {
		add("nodes", watch.Added, nodeObject(fmt.Sprint("node-", i)))
	}
	end := metav1.ObjectMeta{Annotations: map[string]string{metav1.InitialEventsAnnotationKey: "true"}}
	add("services", watch.Bookmark, &corev1.Service{ObjectMeta: end})
	add("endpointslices", watch.Bookmark, &discoveryv1.EndpointSlice{ObjectMeta: end})
	add("nodes", watch.Bookmark, &corev1.Node{ObjectMeta: end})
	for resource := range maps.Keys(a.first) {
		a.more[resource] = make(chan []byte)
	}
	a.Server = httptest.NewUnstartedServer(a)
	if listener != nil {
		a.Listener.Close()
		a.Listener = listener
	}
	a.Start()
	b.Cleanup(func() { a.CloseClientConnections(); a.Close() })
	return a
}

// ServeHTTP answers a watch that begins with what there is.
func (a *apiServer) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	resource := r.URL.Path[strings.LastIndex(r.URL.Path, "/")+1:]
	w.Header().Set("Content-Type", kruntime.ContentTypeProtobuf+";stream=watch")
	frame := a.first[resource]
	for {
		if _, err := w.Write(frame); err != nil {
			return
		}
		w.(http.Flusher).Flush()
		select {
		case frame = <-a.more[resource]:
		case <-r.Context().Done():
			return
		}
	}
}

// read is a client that only reads.
func (a *apiServer) read(b *testing.B, resource string) {
	response, err := http.Get(a.URL + "/" + resource)
	require.NoError(b, err)
	done := make(chan struct{})
	go func() {
		defer close(done)
		_, _ = io.Copy(io.Discard, response.Body)
	}()
	b.Cleanup(func() { response.Body.Close(); <-done })
}

// frame returns an event as it is on the wire.
func (a *apiServer) frame(b *testing.B, event watch.EventType, o metav1.Object) []byte {
	a.version++
	o.SetResourceVersion(fmt.Sprint(a.version))
	info, _ := kruntime.SerializerInfoForMediaType(scheme.Codecs.SupportedMediaTypes(), kruntime.ContentTypeProtobuf)
	versions := schema.GroupVersions{corev1.SchemeGroupVersion, discoveryv1.SchemeGroupVersion}
	raw, err := kruntime.Encode(scheme.Codecs.EncoderForVersion(info.Serializer, versions), o.(kruntime.Object))
	require.NoError(b, err)
	body, err := (&metav1.WatchEvent{Type: string(event), Object: kruntime.RawExtension{Raw: raw}}).Marshal()
	require.NoError(b, err)
	return append(binary.BigEndian.AppendUint32(nil, uint32(len(body))), body...)
}

// storedService is a Service with what an API server stores with one.
func storedService(i int, policy corev1.ServiceExternalTrafficPolicy) *corev1.Service {
	s := serviceObject(fmt.Sprint("service-", i), netip.AddrFrom4([4]byte{10, 0, byte(i >> 8), byte(i)}).String())
	s.Labels = map[string]string{"app.kubernetes.io/name": "web", "app.kubernetes.io/instance": s.Name}
	s.Annotations["kubectl.kubernetes.io/last-applied-configuration"] = strings.Repeat("x", 600)
	s.UID, s.ManagedFields = someUID, managedFields(3)
	s.Spec.ExternalTrafficPolicy = policy
	s.Spec.ClusterIP, s.Spec.Selector = "10.96.0.1", s.Labels
	s.Spec.Ports = []corev1.ServicePort{{Name: "http", Protocol: "TCP", Port: 80, NodePort: 30080},
		{Name: "https", Protocol: "TCP", Port: 443, NodePort: 30443}}
	return s
}

// storedSlice is the Service's slice of ten endpoints, whose nodes depend on
// the round.
func storedSlice(i, round int) metav1.Object {
	var pods []discoveryv1.Endpoint
	for k := range 10 {
		pod := on(fmt.Sprint("node-", (i+7*k+round)%manyNodes))
		pod.TargetRef = &corev1.ObjectReference{Kind: "Pod", Namespace: "default", Name: fmt.Sprintf("web-%d-7d9c5b8f6d-%d", i, k), UID: someUID}
		pods = append(pods, pod)
	}
	s := endpoints(fmt.Sprint("service-", i), pods...)
	s.UID, s.ManagedFields = someUID, managedFields(1)
	s.OwnerReferences = []metav1.OwnerReference{{APIVersion: "v1", Kind: "Service", Name: s.Name, UID: someUID}}
	return s
}

const someUID = "6bb4e5b4-6c0f-4a0b-8f0c-0b9b7c6f2b4d"

func managedFields(n int) []metav1.ManagedFieldsEntry {
	var entries []metav1.ManagedFieldsEntry
	for range n {
		entries = append(entries, metav1.ManagedFieldsEntry{
			Manager: "kubectl", Operation: "Update", APIVersion: "v1", FieldsType: "FieldsV1",
			FieldsV1: metav1.NewFieldsV1(strings.Repeat("y", 500)),
		})
	}
	return entries
}

// cpuTime returns the CPU time of this process.
func cpuTime() time.Duration {
	var r syscall.Rusage
	_ = syscall.Getrusage(syscall.RUSAGE_SELF, &r)
	return time.Duration(r.Utime.Nano() + r.Stime.Nano())
}
