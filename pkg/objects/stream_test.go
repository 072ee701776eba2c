package objects_test

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"runtime"
	"runtime/debug"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	kruntime "k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer/protobuf"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"

	"github.com/lodestone-lb/lodestone/pkg/annotation"
	"github.com/lodestone-lb/lodestone/pkg/objects"
	"github.com/lodestone-lb/lodestone/pkg/testcost"
)

// lister is an API server without streaming lists: one list, in protobuf, and a
// watch that never delivers anything.
func lister(t *testing.T, list []byte) kubernetes.Interface {
	t.Helper()
	return api(t, func() []byte { return list }, func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", kruntime.ContentTypeProtobuf+";stream=watch")
		w.WriteHeader(http.StatusOK)
		_ = http.NewResponseController(w).Flush()
		<-r.Context().Done()
	})
}

// api is an API server without streaming lists.
func api(t *testing.T, list func() []byte, watch http.HandlerFunc) kubernetes.Interface {
	t.Helper()
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch {
		case r.URL.Query().Get("sendInitialEvents") == "true":
			http.Error(w, "no streaming lists", http.StatusBadRequest)
		case r.URL.Query().Get("watch") != "":
			watch(w, r)
		default:
			assert.False(t, r.URL.Query().Has("limit"), "the API server has whole lists in memory, and reads pages from etcd")
			w.Header().Set("Content-Type", kruntime.ContentTypeProtobuf)
			_, _ = w.Write(list())
		}
	}))
	t.Cleanup(server.Close)
	client, err := kubernetes.NewForConfig(&rest.Config{Host: server.URL,
		ContentConfig: rest.ContentConfig{ContentType: kruntime.ContentTypeProtobuf}})
	require.NoError(t, err)
	return client
}

// An API server that refuses connections or requests is an error that an informer reports, and for which it does not wait
// when it is to end: the process would be killed before its other parts have ended.
func TestListThatIsRefused(t *testing.T) {
	t.Parallel()
	gone := httptest.NewServer(http.NotFoundHandler())
	gone.Close()
	busy := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		http.Error(w, "too many requests", http.StatusTooManyRequests)
	}))
	t.Cleanup(busy.Close)
	for what, host := range map[string]string{"connection refused": gone.URL, "too many requests": busy.URL} {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			client, err := kubernetes.NewForConfig(&rest.Config{Host: host})
			require.NoError(t, err)
			informer := objects.Services.Informer(client, objects.Scope{}, cache.SharedIndexInformerOptions{})
			ctx, cancel := context.WithCancel(t.Context())
			failed := make(chan error, 100)
			require.NoError(t, informer.SetWatchErrorHandlerWithContext(func(_ context.Context, _ *cache.Reflector, err error) { failed <- err }))
			ended := make(chan struct{})
			go func() { informer.RunWithContext(ctx); close(ended) }()
			select {
			case err := <-failed:
				require.ErrorContains(t, err, what)
			case <-time.After(30 * time.Second):
				t.Fatal("not reported")
			}
			cancel()
			select {
			case <-ended:
			case <-time.After(30 * time.Second):
				t.Fatal("did not end")
			}
		})
	}
}

// roundTrip is the transport of a client.
type roundTrip func(*http.Request) (*http.Response, error)

func (r roundTrip) RoundTrip(q *http.Request) (*http.Response, error) { return r(q) }

// However long an API server was away, or ill, what has changed is known a few seconds after it is back.
func TestChangesAreKnownSoonAfterTheAPIServerIsBack(t *testing.T) {
	const ill, foreign, cut = 1, 2, 3 // 0: it refuses connections
	for i := range 12 {
		away, how := []time.Duration{10 * time.Second, time.Minute, time.Hour}[i%3], i/3
		synctest.Test(t, func(t *testing.T) {
			list := func(version string) []byte {
				return encoded(t, &corev1.ServiceList{ListMeta: metav1.ListMeta{ResourceVersion: version},
					Items: []corev1.Service{{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "web", ResourceVersion: version}}}})
			}
			var gone atomic.Bool
			ends, current := make(chan struct{}), "1"
			attempts := 0
			transport := roundTrip(func(q *http.Request) (*http.Response, error) {
				answer := func(code int, body io.ReadCloser, kind string) (*http.Response, error) {
					return &http.Response{StatusCode: code, Body: body, Header: http.Header{"Content-Type": {kind}}, Request: q}, nil
				}
				switch query := q.URL.Query(); {
				case gone.Load() && how == ill:
					attempts++
					return answer(http.StatusServiceUnavailable, http.NoBody, "text/plain")
				case gone.Load() && how == foreign: // by a load balancer
					attempts++
					return answer(http.StatusNotFound, io.NopCloser(strings.NewReader("404 page not found")), "text/plain")
				case gone.Load() && how == cut && query.Get("watch") == "":
					attempts++
					all := list(current)
					return answer(http.StatusOK, io.NopCloser(bytes.NewReader(all[:len(all)-1])), kruntime.ContentTypeProtobuf)
				case gone.Load() && how == cut && query.Get("sendInitialEvents") == "":
					return answer(http.StatusGone, http.NoBody, "text/plain")
				case gone.Load() && how != cut:
					attempts++
					return nil, &net.OpError{Op: "dial", Err: syscall.ECONNREFUSED}
				case query.Get("sendInitialEvents") == "true":
					return answer(http.StatusBadRequest, http.NoBody, "text/plain")
				case query.Get("watch") == "":
					return answer(http.StatusOK, io.NopCloser(bytes.NewReader(list(current))), kruntime.ContentTypeProtobuf)
				case query.Get("resourceVersion") != current:
					return answer(http.StatusGone, http.NoBody, "text/plain")
				}
				r, w := io.Pipe()
				go func() {
					select {
					case <-ends:
					case <-q.Context().Done():
					}
					w.Close()
				}()
				return answer(http.StatusOK, r, kruntime.ContentTypeProtobuf+";stream=watch")
			})
			client, err := kubernetes.NewForConfig(&rest.Config{Host: "http://api", Transport: transport,
				ContentConfig: rest.ContentConfig{ContentType: kruntime.ContentTypeProtobuf}})
			require.NoError(t, err)
			informer := objects.Services.Informer(client, objects.Scope{}, cache.SharedIndexInformerOptions{})
			ctx, end := context.WithCancel(t.Context())
			done := make(chan struct{})
			go func() { defer close(done); informer.RunWithContext(ctx) }()
			defer func() { end(); <-done }()
			version := func() string {
				synctest.Wait()
				obj, _, err := informer.GetStore().GetByKey("shop/web")
				require.NoError(t, err)
				return obj.(*corev1.Service).ResourceVersion
			}
			time.Sleep(time.Minute)
			require.Equal(t, "1", version())
			gone.Store(true)
			close(ends)
			time.Sleep(away)
			require.Equal(t, "1", version())
			require.Less(t, attempts, int(away/time.Second)+5)
			current, ends = "2", make(chan struct{})
			gone.Store(false)
			time.Sleep(10 * time.Second)
			require.Equal(t, "2", version(), "after %s, case %d", away, how)
		})
	}
}

// A server that forgets what was before has informers list everything anew. What has not
// changed is not held twice meanwhile.
func TestListAnewKeepsWhatHasNotChanged(t *testing.T) {
	t.Parallel()
	service := func(name, version string) corev1.Service {
		return corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: name, UID: types.UID(name), ResourceVersion: version}}
	}
	var lists atomic.Pointer[[]byte]
	serve := func(services ...corev1.Service) {
		list := encoded(t, &corev1.ServiceList{ListMeta: metav1.ListMeta{ResourceVersion: "9"}, Items: services})
		lists.Store(&list)
	}
	forgets := make(chan struct{})
	client := api(t, func() []byte { return *lists.Load() }, func(w http.ResponseWriter, r *http.Request) {
		select {
		case <-forgets:
			http.Error(w, "too old", http.StatusGone)
		case <-r.Context().Done():
		}
	})
	serve(service("same", "1"), service("changed", "2"))
	informer := objects.Services.Informer(client, objects.Scope{}, cache.SharedIndexInformerOptions{})
	ctx, end := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() { defer close(done); informer.RunWithContext(ctx) }()
	defer func() { end(); <-done }()
	require.True(t, cache.WaitForCacheSync(ctx.Done(), informer.HasSynced))
	get := func(name string) *corev1.Service {
		obj, _, err := informer.GetStore().GetByKey("shop/" + name)
		require.NoError(t, err)
		return obj.(*corev1.Service)
	}
	same, changed := get("same"), get("changed")
	serve(service("same", "1"), service("changed", "3"))
	forgets <- struct{}{}
	require.Eventually(t, func() bool { return get("changed").ResourceVersion == "3" }, 20*time.Second, 10*time.Millisecond)
	require.Same(t, same, get("same"))
	require.NotSame(t, changed, get("changed"))
}

// encoded returns a list as API servers send it.
func encoded(t *testing.T, list kruntime.Object) []byte {
	t.Helper()
	var out strings.Builder
	codec := scheme.Codecs.EncoderForVersion(protobuf.NewSerializer(scheme.Scheme, scheme.Scheme), corev1.SchemeGroupVersion)
	require.NoError(t, codec.Encode(list, &out))
	return []byte(out.String())
}

// hostileList is a list of so many Services with a megabyte each, and one of ours.
func hostileList(number int) *corev1.ServiceList {
	big := strings.Repeat("203.0.113.1,", 1<<20/12)
	list := &corev1.ServiceList{ListMeta: metav1.ListMeta{ResourceVersion: "7"}}
	for i := range number {
		list.Items = append(list.Items, corev1.Service{
			ObjectMeta: metav1.ObjectMeta{Namespace: "tenant", Name: fmt.Sprint("s", i),
				Annotations: map[string]string{annotation.Leases: big, "example.com/note": "x"}},
			Spec: corev1.ServiceSpec{Type: corev1.ServiceTypeLoadBalancer},
		})
	}
	list.Items = append(list.Items, corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "web",
		Labels: map[string]string{"app": "web"}}})
	return list
}

func TestListIsReadOneByOne(t *testing.T) {
	t.Parallel()
	client := lister(t, encoded(t, hostileList(2)))
	all, err := objects.Services.List(t.Context(), client, objects.Scope{})
	require.NoError(t, err)
	require.Len(t, all, 3)
	require.Equal(t, "shop/web", all[2].Namespace+"/"+all[2].Name)
	require.Equal(t, map[string]string{"app": "web"}, all[2].Labels)
	require.Less(t, len(all[0].Annotations[annotation.Leases]), 5<<10)
	require.True(t, strings.HasSuffix(all[0].Annotations[annotation.Leases], objects.Cut))
	require.NotContains(t, all[0].Annotations, "example.com/note")
}

func TestListThatEndsTooEarlyIsAnError(t *testing.T) {
	t.Parallel()
	whole := encoded(t, hostileList(0))
	for end := range whole {
		list, err := objects.Services.List(t.Context(), lister(t, whole[:end]), objects.Scope{})
		if err == nil && len(list) == 1 {
			continue // what is missing comes after the objects, and is empty
		}
		require.Error(t, err, "the first %d of %d bytes", end, len(whole))
	}
}

// A start on a server without streaming lists holds one raw object at a time.
func TestListOfLargeObjectsNeedsTheMemoryOfOne(t *testing.T) {
	// Not parallel: it measures.
	const number = 150
	client := lister(t, encoded(t, hostileList(number)))
	informer := objects.Services.Informer(client, objects.Scope{}, cache.SharedIndexInformerOptions{})
	defer debug.SetGCPercent(debug.SetGCPercent(5)) // the test's server has the whole list
	base := testcost.Live()
	ctx, end := context.WithCancel(t.Context())
	var peak atomic.Int64
	done, measured := make(chan struct{}), make(chan struct{})
	go func() { defer close(done); informer.RunWithContext(ctx) }()
	go func() {
		defer close(measured)
		tick := time.NewTicker(5 * time.Millisecond)
		defer tick.Stop()
		for ctx.Err() == nil {
			var m runtime.MemStats
			runtime.GC() // which may be late by itself on a busy machine
			runtime.ReadMemStats(&m)
			peak.Store(max(peak.Load(), int64(m.HeapAlloc)-base))
			<-tick.C
		}
	}()
	require.True(t, cache.WaitForCacheSync(ctx.Done(), informer.HasSynced))
	end()
	<-done
	<-measured
	require.Len(t, informer.GetStore().List(), number+1)
	require.Less(t, peak.Load(), int64(40<<20), "of %d bytes", base)
	require.Less(t, testcost.Live()-base, int64(4<<20), "what is kept")
}
