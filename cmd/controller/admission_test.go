package main

import (
	"bytes"
	"encoding/json"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	admissionv1 "k8s.io/api/admission/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apiserver/pkg/server"

	"github.com/lodestone-lb/lodestone/pkg/clusterfacts"
	"github.com/lodestone-lb/lodestone/pkg/testapi"
)

// asker is a stranger who sends requests to the controller's handler, without credentials.
type asker struct {
	*process
	*testing.T
	http.Handler
	secure *server.SecureServingInfo
	logged *bytes.Buffer
}

// newAsker returns an asker whose requests of other paths are answered by 418.
func newAsker(t *testing.T, objects ...runtime.Object) asker {
	t.Helper()
	p, logged := newProcess(t.Context()), &bytes.Buffer{}
	p.flags.admission, p.flags.configNamespace, p.flags.configName = true, "ls", "lodestone-config"
	p.log, p.client, p.election = slog.New(slog.NewTextHandler(logged, nil)), testapi.New(objects...),
		&election{won: make(chan struct{}), ended: make(chan struct{})}
	p.facts = clusterfacts.NewWatcher(clusterfacts.Options{Client: p.client, Log: slog.New(slog.DiscardHandler)})
	secure := &server.SecureServingInfo{}
	handler, err := p.serveAdmission(secure,
		http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusTeapot) }))
	require.NoError(t, err)
	a := asker{p, t, handler, secure, logged}
	t.Cleanup(a.end)
	return a
}

func (a asker) end() { a.cancel(); _ = a.tasks.Wait() }

func (a asker) ask(method, path, body string) *httptest.ResponseRecorder {
	w := httptest.NewRecorder()
	a.ServeHTTP(w, httptest.NewRequest(method, path, strings.NewReader(body)))
	return w
}

// review returns the answer to a review of the document, which has no newlines but escaped ones.
func (a asker) review(document string) *admissionv1.AdmissionResponse {
	a.Helper()
	w := a.ask(http.MethodPost, "/admission/config",
		`{"apiVersion":"admission.k8s.io/v1","kind":"AdmissionReview","request":{"uid":"1","namespace":"ls","name":"lodestone-config",
		"operation":"UPDATE","userInfo":{"username":"`+strings.Repeat("x", 1000)+`"},
		"resource":{"version":"v1","resource":"configmaps"},"object":{"data":{"config.yaml":"`+document+`"}}}}`)
	require.Equal(a, http.StatusOK, w.Code, w.Body)
	var review admissionv1.AdmissionReview
	require.NoError(a, json.Unmarshal(w.Body.Bytes(), &review))
	return review.Response
}

const empty = `apiVersion: lodestone.io/v1alpha1\nkind: Config\n`

// Reviews are answered without credentials, which the API server does not show;
// everything else goes where it went before.
func TestAdmissionIsServedBesideTheRest(t *testing.T) {
	a := newAsker(t)
	require.Equal(t, []string{"lodestone-admission.ls.svc"}, a.secure.SNICerts[0].SNINames())
	assert.True(t, a.review(empty).Allowed)
	assert.False(t, a.review(`kind: Config\n`).Allowed)
	for _, path := range []string{"/metrics", "/dashboard/", "/admission/", "/admission/config/x"} {
		assert.Equal(t, http.StatusTeapot, a.ask(http.MethodGet, path, "").Code, path)
	}
	assert.Equal(t, http.StatusTeapot, a.ask(http.MethodGet, "/admission/config", "").Code, "a review is a POST")
}

// Whoever reaches the port learns nothing about the cluster from an answer, and leaves nothing in the
// log: warnings are about the document alone.
func TestAReviewRevealsNothingOfTheCluster(t *testing.T) {
	a := newAsker(t, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "node-of-the-cluster"},
		Status: corev1.NodeStatus{Addresses: []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: "192.0.2.17"}}}})
	a.start(a.facts.Run)
	require.Eventually(t, func() bool { _, known := a.facts.Current(); return known }, time.Minute, time.Millisecond, "no facts")
	guess := empty + `pools: [{name: a, addresses: [192.0.2.0/24]}]\npeers: [{name: tor, address: 192.0.2.9, peerASN: 64512}]\n`
	response := a.review(guess)
	require.True(t, response.Allowed, response.Result)
	warnings := strings.Join(response.Warnings, "\n")
	assert.NotContains(t, warnings, "node-of-the-cluster")
	assert.Contains(t, warnings, `the address of BGP peer "tor"`, "which the document contains")
	assert.False(t, a.review(`kind: Forged\n`).Allowed)
	a.end()
	assert.NotContains(t, a.logged.String(), "Forged")
	assert.NotContains(t, a.logged.String(), "xxx")
}
