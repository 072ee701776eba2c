package debughttp

import (
	"bufio"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"

	"github.com/lodestone-lb/lodestone/pkg/diagnose"
)

// However a request is written, nobody without a token that the Authorizer accepts for the path sees the status.
func FuzzRequest(f *testing.F) {
	for _, text := range []string{
		"GET /status HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer good\r\n\r\n", "GET /status HTTP/1.1\r\nHost: a\r\n\r\n",
		"GET //status HTTP/1.1\r\nHost: a\r\n\r\n", "GET /healthz/../status HTTP/1.1\r\nHost: a\r\n\r\n", "GET http://b/status HTTP/1.0\r\n\r\n",
		"HEAD /metrics HTTP/1.1\r\nHost: a\r\nAuthorization: bearer  good \r\n\r\n",
		"GET /diagnose HTTP/1.1\r\nHost: a\r\nAuthorization: Basic good\r\n" + diagnose.TokenHeader + ": good\r\n\r\n",
	} {
		f.Add(text)
	}
	const secret = "what only some may see"
	shown := http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write([]byte(secret)) })
	handler := New(Options{Authorizer: fakeAuthorizer{}, Gatherer: prometheus.NewRegistry(), Log: slog.New(slog.DiscardHandler),
		Status: func() any { return secret }, Diagnose: shown, Alive: func() error { return nil },
		Checks: func() []diagnose.Condition { return nil }}).handler()
	f.Fuzz(func(t *testing.T, text string) {
		r, err := http.ReadRequest(bufio.NewReader(strings.NewReader(text)))
		if err != nil {
			return
		}
		w := httptest.NewRecorder()
		handler.ServeHTTP(w, r)
		if strings.Contains(w.Body.String(), secret) {
			require.NoError(t, fakeAuthorizer{}.Authorize(t.Context(), sourceOf(r), token(r), r.URL.Path), "%q", text)
			require.Equal(t, http.MethodGet, r.Method)
		}
	})
}
