package lodestone

import (
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestEveryWriteIsCounted(t *testing.T) {
	served := 0
	c := &CountingAPI{writes: map[string]int{}}
	handler := c.counting(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { served++ }))
	for _, r := range [][2]string{
		{http.MethodGet, "/api/v1/services"},
		{http.MethodPatch, "/api/v1/namespaces/bench/services/web/status"},
		{http.MethodPatch, "/api/v1/namespaces/bench/services/web/status"},
		{http.MethodPatch, "/api/v1/nodes/n1"},
		{http.MethodPost, "/api/v1/namespaces/bench/events"},
		{http.MethodPost, "/apis/events.k8s.io/v1/namespaces/bench/events"},
		{http.MethodPut, "/api/v1/namespaces/lodestone-system/configmaps/lodestone-quarantine"},
		{http.MethodPut, "/apis/coordination.k8s.io/v1/namespaces/lodestone-system/leases/lodestone-controller"},
		{http.MethodPost, "/apis/authorization.k8s.io/v1/subjectaccessreviews"},
		{http.MethodDelete, "/unknown"},
	} {
		handler.ServeHTTP(httptest.NewRecorder(), httptest.NewRequest(r[0], r[1], http.NoBody))
	}
	require.Equal(t, 10, served)
	require.Equal(t, map[string]int{
		"PATCH services/status": 2, "PATCH nodes": 1, "POST events": 2, "PUT configmaps": 1, "DELETE /unknown": 1,
	}, c.Writes())
}
