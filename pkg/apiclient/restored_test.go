package apiclient

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
)

// revisions is an API server with one ConfigMap, which has the name of the revision that etcd has reached.
type revisions struct {
	mu      sync.Mutex
	current int
	watches int
	asked   map[string]int // by the version that a watch began at
}

func (s *revisions) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	s.mu.Lock()
	current, query := s.current, r.URL.Query()
	from, _ := strconv.Atoi(query.Get("resourceVersion"))
	switch {
	case query.Get("sendInitialEvents") != "": // older than those that do this
		s.mu.Unlock()
		refuse(w, apierrors.NewInvalid(schema.GroupKind{Kind: "ListOptions"}, "", nil).Status())
	case query.Get("watch") != "":
		s.watches++
		s.asked[query.Get("resourceVersion")]++
		s.mu.Unlock()
		w.Header().Set("Content-Type", "application/json")
		_ = http.NewResponseController(w).Flush()
		<-r.Context().Done() // nothing changes but by a new history
	case from > current:
		s.mu.Unlock()
		tooLarge := apierrors.NewTimeoutError(fmt.Sprintf("Too large resource version: %d, current: %d", from, current), 1)
		tooLarge.ErrStatus.Details.Causes = []metav1.StatusCause{{Type: metav1.CauseTypeResourceVersionTooLarge}}
		w.Header().Set("Retry-After", "1")
		refuse(w, tooLarge.Status())
	default:
		s.mu.Unlock()
		version := strconv.Itoa(current)
		answer(w, http.StatusOK, corev1.ConfigMapList{
			TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "ConfigMapList"}, ListMeta: metav1.ListMeta{ResourceVersion: version},
			Items: []corev1.ConfigMap{{ObjectMeta: metav1.ObjectMeta{Name: version, Namespace: "default", ResourceVersion: version}}},
		})
	}
}

func refuse(w http.ResponseWriter, refusal metav1.Status) {
	refusal.TypeMeta = metav1.TypeMeta{APIVersion: "v1", Kind: "Status"}
	answer(w, int(refusal.Code), refusal)
}

func answer(w http.ResponseWriter, code int, object any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(code)
	_ = json.NewEncoder(w).Encode(object)
}

// Etcd is restored from a backup. Whoever watches knows what is there now as soon as its connection is back, and a
// watch that goes on from a version that the API server knows lists nothing anew.
func TestWatchesAfterARestore(t *testing.T) {
	t.Parallel()
	s := &revisions{current: 100, asked: map[string]int{}}
	server := httptest.NewUnstartedServer(s)
	server.EnableHTTP2 = true
	server.StartTLS()
	defer server.Close()
	config := &rest.Config{Host: server.URL, TLSClientConfig: rest.TLSClientConfig{Insecure: true}}
	transport, err := Use(config)
	require.NoError(t, err)
	client, err := kubernetes.NewForConfig(config)
	require.NoError(t, err)
	factory := informers.NewSharedInformerFactory(client, 0)
	known := factory.Core().V1().ConfigMaps().Informer().GetStore()
	stop := make(chan struct{})
	factory.Start(stop)
	defer factory.Shutdown()
	defer transport.conns.CloseAll()
	defer close(stop)
	knows := func(revision string, watches int) {
		t.Helper()
		require.Eventually(t, func() bool {
			s.mu.Lock()
			defer s.mu.Unlock()
			return len(known.ListKeys()) == 1 && known.ListKeys()[0] == "default/"+revision && s.watches == watches
		}, 3*late, 10*time.Millisecond)
	}
	knows("100", 1)

	disconnect := func() {
		time.Sleep(1500 * time.Millisecond) // client-go lists anew what it has watched for less than a second
		server.CloseClientConnections()
	}
	restored := transport.Rewound()
	disconnect()
	knows("100", 2)
	select {
	case <-restored:
		require.Fail(t, "nothing has changed")
	default:
	}
	s.mu.Lock()
	s.current = 50
	s.mu.Unlock()
	disconnect()
	knows("50", 3)
	<-restored
	select {
	case <-transport.Rewound():
		require.Fail(t, "nothing has changed since")
	default:
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	assert.Equal(t, map[string]int{"100": 2, "50": 1}, s.asked)
}

// roundTrip is an http.RoundTripper.
type roundTrip func(*http.Request) (*http.Response, error)

func (f roundTrip) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

// An API server finds the one object of the list before a watch at once, also if the watch selects none of thousands. Whoever
// has the right to one name keeps to that.
func TestTheListBeforeAWatchSelectsNothing(t *testing.T) {
	t.Parallel()
	for asked, listed := range map[string]string{
		"fieldSelector=spec.type%3DLoadBalancer&labelSelector=app%3Dweb": "",
		"fieldSelector=metadata.name%3Dweb":                              "fieldSelector=metadata.name%3Dweb&",
	} {
		var queries []string
		through := rewound{RoundTripper: roundTrip(func(r *http.Request) (*http.Response, error) {
			queries = append(queries, r.URL.RawQuery)
			return &http.Response{StatusCode: http.StatusOK, Body: http.NoBody}, nil
		})}
		watch := asked + "&resourceVersion=100&watch=true"
		r, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://api/api/v1/services?"+watch, nil)
		require.NoError(t, err)
		answer, err := through.RoundTrip(r)
		require.NoError(t, err)
		answer.Body.Close()
		assert.Equal(t, []string{listed + "limit=1&resourceVersion=100&resourceVersionMatch=NotOlderThan", watch}, queries)
	}
}
