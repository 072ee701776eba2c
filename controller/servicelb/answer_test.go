package servicelb

import (
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
)

// An API server answers a patch with the whole Service, which is as large as its owner made
// it. The answer is not read to its end, which never comes here.
func TestTheAnswerToAPatchIsNotKept(t *testing.T) {
	t.Parallel()
	conflict := false
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		if conflict {
			w.WriteHeader(http.StatusConflict)
			_, _ = w.Write([]byte(`{"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "Conflict", "code": 409}`))
			return
		}
		_, _ = w.Write([]byte(`{"kind": "Service", "apiVersion": "v1", "metadata": {"annotations": {"example.com/a": "` +
			strings.Repeat("x", 256<<10)))
		_ = http.NewResponseController(w).Flush()
		<-r.Context().Done()
	}))
	t.Cleanup(server.Close)
	client, err := kubernetes.NewForConfig(&rest.Config{Host: server.URL})
	require.NoError(t, err)
	api, began := RESTAPI{Client: client.CoreV1().RESTClient()}, time.Now()
	require.NoError(t, api.PatchStatus(t.Context(), "shop", "web", []byte("{}")))
	require.Less(t, time.Since(began), PatchTimeout/2)
	conflict = true
	require.True(t, apierrors.IsConflict(api.PatchStatus(t.Context(), "shop", "web", []byte("{}"))), "a refusal is read")
}
