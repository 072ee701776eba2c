package objects_test

import (
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"runtime"
	"runtime/debug"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	kruntime "k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer/protobuf"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"

	"github.com/lodestone-lb/lodestone/pkg/annotation"
	"github.com/lodestone-lb/lodestone/pkg/objects"
)

// lister is an API server without streaming lists: one list, in protobuf, and a
// watch that never says anything.
func lister(t *testing.T, list []byte) kubernetes.Interface {
	t.Helper()
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch {
		case r.URL.Query().Get("sendInitialEvents") == "true":
			http.Error(w, "no streaming lists", http.StatusBadRequest)
		case r.URL.Query().Get("watch") != "":
			w.Header().Set("Content-Type", kruntime.ContentTypeProtobuf+";stream=watch")
			w.WriteHeader(http.StatusOK)
			_ = http.NewResponseController(w).Flush()
			<-r.Context().Done()
		default:
			w.Header().Set("Content-Type", kruntime.ContentTypeProtobuf)
			_, _ = w.Write(list)
		}
	}))
	t.Cleanup(server.Close)
	client, err := kubernetes.NewForConfig(&rest.Config{Host: server.URL,
		ContentConfig: rest.ContentConfig{ContentType: kruntime.ContentTypeProtobuf}})
	require.NoError(t, err)
	return client
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
	base := live()
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
	require.Less(t, live()-base, int64(4<<20), "what is kept")
}
