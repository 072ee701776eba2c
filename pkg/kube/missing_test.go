package kube

import (
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/stretchr/testify/require"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
)

// A page of a load balancer is no answer of the API server.
func TestMissing(t *testing.T) {
	t.Parallel()
	const ofKubernetes = `{"kind":"Status","apiVersion":"v1","status":"Failure","reason":"NotFound","code":404,` +
		`"message":"secrets \"bgp\" not found","details":{"name":"bgp","kind":"secrets"}}`
	for name, test := range map[string]struct {
		code       int
		kind, text string
		missing    bool
	}{
		"there is none":         {http.StatusNotFound, "application/json", ofKubernetes, true},
		"text":                  {http.StatusNotFound, "text/plain; charset=utf-8", "404 page not found\n", false},
		"a page":                {http.StatusNotFound, "text/html", "<html>not found</html>", false},
		"JSON of somebody else": {http.StatusNotFound, "application/json", `{"error":"no such backend"}`, false},
		"nothing":               {http.StatusNotFound, "", "", false},
		"another error":         {http.StatusServiceUnavailable, "text/plain", "busy", false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
				w.Header().Set("Content-Type", test.kind)
				w.WriteHeader(test.code)
				fmt.Fprint(w, test.text)
			}))
			t.Cleanup(server.Close)
			client, err := kubernetes.NewForConfig(&rest.Config{Host: server.URL})
			require.NoError(t, err)
			_, err = client.CoreV1().Secrets("default").Get(t.Context(), "bgp", metav1.GetOptions{})
			require.Error(t, err)
			require.Equal(t, test.missing, Missing(err))
			require.Equal(t, test.missing, Missing(fmt.Errorf("read: %w", err)))
		})
	}
	require.False(t, Missing(nil))
	require.False(t, Missing(errors.New("no answer")))
}
