package servicelb

import (
	"bytes"
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/stretchr/testify/require"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
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
