package servicelb

import (
	"bytes"
	"context"
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/stretchr/testify/require"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
)

// An API server answers a patch with the whole Service, which is as large as its owner made
// it. The answer is not read to its end, which is far away here.
func TestTheAnswerToAPatchIsNotKept(t *testing.T) {
	t.Parallel()
	conflict, refused := false, make(chan error, 1)
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		if conflict {
			w.WriteHeader(http.StatusConflict)
			_, _ = w.Write([]byte(`{"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "Conflict", "code": 409}`))
			return
		}
		_, err := w.Write([]byte(`{"kind": "Service", "apiVersion": "v1", "metadata": {"annotations": {"example.com/a": "`))
		for range 256 { // in all more than the sockets hold, and less than a client that goes on reads until PatchTimeout
			if err == nil {
				_, err = w.Write(bytes.Repeat([]byte("x"), 256<<10))
			}
		}
		refused <- err
	}))
	t.Cleanup(server.Close)
	client, err := kubernetes.NewForConfig(&rest.Config{Host: server.URL})
	require.NoError(t, err)
	api := RESTAPI{Client: client.CoreV1().RESTClient()}
	require.NoError(t, api.PatchStatus(t.Context(), "shop", "web", []byte("{}")))
	require.Error(t, <-refused)
	conflict = true
	require.True(t, apierrors.IsConflict(api.PatchStatus(t.Context(), "shop", "web", []byte("{}"))), "a refusal is read")
}

// misled is an API that a load balancer does not reach: it answers for it.
type misled struct{}

func (misled) PatchStatus(context.Context, string, string, []byte) error {
	return apierrors.NewGenericServerResponse(http.StatusNotFound, "patch", schema.GroupResource{Resource: "services"}, "web", "a page", 0,
		true)
}

// A Service whose object was not written because of such an answer is not taken for one that is gone.
func TestAPageIsNoAnswer(t *testing.T) {
	t.Parallel()
	s := newStory(t)
	api := s.API
	s.API = misled{}
	s.server.create("default/web", s.clock)
	s.see("default/web")
	require.ErrorContains(t, s.reconcile(t.Context(), "default/web"), "could not find")
	s.API = api
	s.run()
	s.has("web", "203.0.113.10", "True Allocated")
}
