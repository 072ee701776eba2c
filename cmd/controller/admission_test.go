package main

import (
	"encoding/json"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	admissionv1 "k8s.io/api/admission/v1"
	"k8s.io/apiserver/pkg/server"

	"github.com/lodestone-lb/lodestone/pkg/clusterfacts"
	"github.com/lodestone-lb/lodestone/pkg/testapi"
)

// Reviews are answered without credentials, which the API server does not show;
// everything else goes where it went before.
func TestAdmissionIsServedBesideTheRest(t *testing.T) {
	p := newProcess(t.Context())
	p.flags.admission, p.flags.configNamespace, p.flags.configName = true, "ls", "lodestone-config"
	p.log, p.client, p.election = slog.New(slog.DiscardHandler), testapi.New(),
		&election{won: make(chan struct{}), ended: make(chan struct{})}
	p.facts = clusterfacts.NewWatcher(clusterfacts.Options{Client: p.client, Log: p.log})
	t.Cleanup(func() { p.cancel(); _ = p.tasks.Wait() })
	secure := &server.SecureServingInfo{}
	handler, err := p.serveAdmission(secure,
		http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusTeapot) }))
	require.NoError(t, err)
	require.Equal(t, []string{"lodestone-admission.ls.svc"}, secure.SNICerts[0].SNINames())

	ask := func(method, path, body string) *httptest.ResponseRecorder {
		w := httptest.NewRecorder()
		handler.ServeHTTP(w, httptest.NewRequest(method, path, strings.NewReader(body)))
		return w
	}
	for document, allowed := range map[string]bool{`apiVersion: lodestone.io/v1alpha1\nkind: Config\n`: true, `kind: Config\n`: false} {
		w := ask(http.MethodPost, "/admission/config",
			`{"apiVersion":"admission.k8s.io/v1","kind":"AdmissionReview","request":{"uid":"1","namespace":"ls","name":"lodestone-config",
			"operation":"UPDATE","resource":{"version":"v1","resource":"configmaps"},"object":{"data":{"config.yaml":"`+document+`"}}}}`)
		require.Equal(t, http.StatusOK, w.Code, w.Body)
		var review admissionv1.AdmissionReview
		require.NoError(t, json.Unmarshal(w.Body.Bytes(), &review))
		assert.Equal(t, allowed, review.Response.Allowed, document)
	}
	for _, path := range []string{"/metrics", "/dashboard/", "/admission/", "/admission/config/x"} {
		assert.Equal(t, http.StatusTeapot, ask(http.MethodGet, path, "").Code, path)
	}
	assert.Equal(t, http.StatusTeapot, ask(http.MethodGet, "/admission/config", "").Code, "a review is a POST")
}
