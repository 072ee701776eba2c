package apiclient

import (
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
)

// What a load balancer answers in place of API servers that are away is not their answer.
func TestAskIsAnsweredByAnAPIServer(t *testing.T) {
	t.Parallel()
	for code, answered := range map[int]bool{
		http.StatusOK: true, http.StatusUnauthorized: true, http.StatusForbidden: true, http.StatusTooManyRequests: true,
		http.StatusFound: false, http.StatusNotFound: false, http.StatusBadGateway: false, http.StatusServiceUnavailable: false,
	} {
		server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(code) }))
		defer server.Close()
		transport, err := Use(&rest.Config{Host: server.URL})
		require.NoError(t, err)
		for _, ask := range []error{transport.Ask(t.Context()), transport.Renew(t.Context())} {
			require.Equal(t, answered, ask == nil, "%d: %v", code, ask)
		}
		transport.conns.CloseAll()
	}
}

// A write counts as done only if an API server has answered it.
func TestWritesThatReachNoAPIServer(t *testing.T) {
	t.Parallel()
	service := &corev1.Service{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Service"}, ObjectMeta: metav1.ObjectMeta{Name: "web"}}
	conflict := apierrors.NewConflict(corev1.Resource("services"), "web", nil).Status()
	for name, c := range map[string]struct {
		answer http.HandlerFunc
		check  func(error) bool // nil: there is none
	}{
		"written":  {func(w http.ResponseWriter, _ *http.Request) { answer(w, http.StatusOK, service) }, nil},
		"conflict": {func(w http.ResponseWriter, _ *http.Request) { refuse(w, conflict) }, apierrors.IsConflict},
		"elsewhere": {func(w http.ResponseWriter, r *http.Request) {
			http.Redirect(w, r, "/there"+r.URL.Path, http.StatusTemporaryRedirect) // the client writes there
		}, nil},
		"redirect": {func(w http.ResponseWriter, r *http.Request) {
			http.Redirect(w, r, "/there"+r.URL.Path, http.StatusFound)
		}, isForeign},
		"moved": {func(w http.ResponseWriter, r *http.Request) {
			http.Redirect(w, r, "/there"+r.URL.Path, http.StatusMovedPermanently)
		}, isForeign},
		"page":  {func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write([]byte("<html>welcome</html>")) }, isForeign},
		"empty": {func(http.ResponseWriter, *http.Request) {}, isForeign},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			mux := http.NewServeMux()
			mux.HandleFunc("/", c.answer)
			mux.HandleFunc("/there/", func(w http.ResponseWriter, _ *http.Request) { answer(w, http.StatusOK, service) })
			server := httptest.NewServer(mux)
			defer server.Close()
			config := &rest.Config{Host: server.URL}
			transport, err := Use(config)
			require.NoError(t, err)
			defer transport.conns.CloseAll()
			client, err := kubernetes.NewForConfig(config)
			require.NoError(t, err)
			services := client.CoreV1().Services("shop")
			_, created := services.Create(t.Context(), service, metav1.CreateOptions{})
			_, updated := services.Update(t.Context(), service, metav1.UpdateOptions{})
			_, patched := services.Patch(t.Context(), "web", types.MergePatchType, []byte("{}"), metav1.PatchOptions{})
			answer, stream := client.CoreV1().RESTClient().Patch(types.MergePatchType).Namespace("shop").Resource("services").Name("web").
				Body([]byte("{}")).Stream(t.Context())
			if stream == nil {
				answer.Close()
			}
			for i, err := range []error{created, updated, patched, stream} {
				if c.check == nil {
					require.NoError(t, err, i)
				} else {
					require.True(t, c.check(err), "%d: %v", i, err)
				}
			}
		})
	}
}

func isForeign(err error) bool {
	return err != nil && apierrors.ReasonForError(err) == metav1.StatusReasonUnknown
}
