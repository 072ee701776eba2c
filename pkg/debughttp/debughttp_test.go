package debughttp

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"
	authenticationv1 "k8s.io/api/authentication/v1"
	authorizationv1 "k8s.io/api/authorization/v1"
	"k8s.io/apimachinery/pkg/runtime"
	clienttesting "k8s.io/client-go/testing"

	"github.com/lodestone-lb/lodestone/pkg/diagnose"
	"github.com/lodestone-lb/lodestone/pkg/testapi"
)

// fakeAuthorizer knows tokens by what becomes of them.
type fakeAuthorizer struct{}

func (fakeAuthorizer) Authorize(_ context.Context, _ netip.Addr, token, path string) error {
	switch token {
	case "good":
		return nil
	case "poor":
		return ErrForbidden
	case "good for " + path:
		return nil
	case "no API server":
		return errors.New("connection refused")
	}
	return ErrUnauthenticated
}

func start(t *testing.T, change ...func(*Options)) *Server {
	t.Helper()
	o := Options{
		Address: "127.0.0.1:0", Authorizer: fakeAuthorizer{}, Gatherer: prometheus.NewRegistry(), Log: slog.New(slog.DiscardHandler),
		Status: func() any { return map[string]string{"node": "n1"} },
		Alive:  func() error { return nil },
		Checks: func() []diagnose.Condition {
			return []diagnose.Condition{{Name: "caches", OK: true, Message: "synced"}}
		},
	}
	for _, f := range change {
		f(&o)
	}
	s := New(o)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- s.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	<-s.Ready()
	return s
}

func get(t *testing.T, s *Server, path, authorization string) (int, string) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "https://"+s.Addr().String()+path, nil)
	if err != nil {
		t.Fatal(err)
	}
	if authorization != "" {
		req.Header.Set("Authorization", authorization)
	}
	config := &tls.Config{InsecureSkipVerify: true} //nolint:gosec // it is self-signed
	client := &http.Client{Transport: &http.Transport{TLSClientConfig: config}}
	defer client.CloseIdleConnections()
	resp, err := client.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp.StatusCode, string(body)
}

func TestWhoMayReadWhat(t *testing.T) {
	t.Parallel()
	s := start(t)
	for _, test := range []struct {
		path, authorization string
		code                int
	}{
		{"/metrics", "", 401},
		{"/metrics", "Bearer", 401},
		{"/metrics", "Bearer ", 401},
		{"/metrics", "Basic good", 401},
		{"/metrics", "Bearer bad", 401},
		{"/metrics", "Bearer poor", 403},
		{"/metrics", "Bearer no API server", 503},
		{"/metrics", "Bearer good", 200},
		{"/metrics", "bearer good", 200},
		{"/metrics", "Bearer good for /metrics", 200},
		{"/status", "Bearer good for /metrics", 401},
		{"/status", "", 401},
		{"/status", "Bearer good", 200},
		{"/diagnose", "Bearer good", 404}, // nobody serves it here
		{"/healthz", "", 200},
		{"/readyz", "", 200},
		{"/debug/pprof/", "Bearer good", 404},
		{"/", "", 404},
	} {
		if code, body := get(t, s, test.path, test.authorization); code != test.code {
			t.Errorf("%s with %q: %d %s, want %d", test.path, test.authorization, code, body, test.code)
		}
	}
	if _, body := get(t, s, "/status", "Bearer good"); !strings.Contains(body, `"node": "n1"`) {
		t.Errorf("status is %s", body)
	}
}

// counter counts the records of a log.
type counter struct {
	slog.Handler
	n atomic.Int32
}

func (c *counter) Handle(context.Context, slog.Record) error { c.n.Add(1); return nil }

// While the API server does not answer, anybody with an invented token could fill the log.
func TestStrangersDoNotFillTheLog(t *testing.T) {
	t.Parallel()
	c := &counter{Handler: slog.NewTextHandler(io.Discard, nil)}
	s := start(t, func(o *Options) { o.Log = slog.New(c) })
	for range 20 {
		if code, body := get(t, s, "/metrics", "Bearer no API server"); code != http.StatusServiceUnavailable {
			t.Fatal(code, body)
		}
		raw, err := net.Dial("tcp", s.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		io.WriteString(raw, "no TLS\n") //nolint:errcheck // the answer is what counts
		io.Copy(io.Discard, raw)        //nolint:errcheck // until the server has closed it
		raw.Close()
	}
	if n := c.n.Load(); n != 1 {
		t.Errorf("%d lines", n)
	}
}

// A panic while a request is served is in the log, but not as often as somebody who has found out how to cause it likes.
func TestPanicsAreLogged(t *testing.T) {
	t.Parallel()
	c := &counter{Handler: slog.NewTextHandler(io.Discard, nil)}
	server := httptest.NewUnstartedServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { panic("a defect") }))
	server.Config.ErrorLog = ErrorLog(slog.New(c))
	server.Start()
	for range 20 {
		if answer, err := server.Client().Get(server.URL); err == nil {
			answer.Body.Close()
		}
	}
	server.Close()
	if n := c.n.Load(); n != 1 {
		t.Errorf("%d lines", n)
	}
}

// Names and annotations that others choose are data to whoever shows the status.
func TestStatusIsNeverAPage(t *testing.T) {
	t.Parallel()
	const hostile = "<script>alert(1)</script>\x1b[2J"
	h := New(Options{Authorizer: fakeAuthorizer{}, Log: slog.New(slog.DiscardHandler), Gatherer: prometheus.NewRegistry(),
		Status: func() any { return map[string]string{hostile: hostile} },
	}).handler()
	r, w := httptest.NewRequest(http.MethodGet, "/status", nil), httptest.NewRecorder()
	r.Header.Set("Authorization", "Bearer good")
	h.ServeHTTP(w, r)
	var back map[string]string
	if err := json.Unmarshal(w.Body.Bytes(), &back); err != nil || back[hostile] != hostile {
		t.Errorf("%v: %q", err, back)
	}
	if body := w.Body.String(); strings.ContainsAny(body, "<>\x1b") {
		t.Errorf("it is not escaped: %s", body)
	}
	if kind, sniff := w.Header().Get("Content-Type"), w.Header().Get("X-Content-Type-Options"); kind != "application/json" ||
		sniff != "nosniff" {
		t.Errorf("Content-Type %q, X-Content-Type-Options %q", kind, sniff)
	}
}

// Through the API server's proxy a token comes in a header of ours.
func TestDiagnosisIsForThoseWhoMayReadIt(t *testing.T) {
	t.Parallel()
	h := New(Options{Authorizer: fakeAuthorizer{}, Log: slog.New(slog.DiscardHandler), Gatherer: prometheus.NewRegistry(),
		Diagnose: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { io.WriteString(w, r.URL.RawQuery) }),
		//nolint:errcheck // a recorder
	}).handler()
	for _, test := range []struct {
		header, value string
		code          int
	}{
		{"Authorization", "Bearer good", 200},
		{diagnose.TokenHeader, "good", 200},
		{diagnose.TokenHeader, "good for /diagnose", 200},
		{diagnose.TokenHeader, "good for /metrics", 401},
		{diagnose.TokenHeader, "poor", 403},
		{diagnose.TokenHeader, "", 401},
	} {
		r := httptest.NewRequest(http.MethodGet, diagnose.Path+"?active=true", nil)
		r.Header.Set(test.header, test.value)
		w := httptest.NewRecorder()
		h.ServeHTTP(w, r)
		if w.Code != test.code || test.code == 200 && w.Body.String() != "active=true" {
			t.Errorf("%s %q: %d %s, want %d", test.header, test.value, w.Code, w.Body, test.code)
		}
	}
}

func TestProbesSayWhy(t *testing.T) {
	t.Parallel()
	checks := []diagnose.Condition{{Name: "caches", OK: true, Message: "synced"}, {Name: "kube-proxy", Message: "503 Service Unavailable"}}
	s := start(t, func(o *Options) {
		o.Alive = func() error { return errors.New("the loop has not moved for 61s") }
		o.Checks = func() []diagnose.Condition { return checks }
	})
	if code, body := get(t, s, "/healthz", ""); code != 503 || !strings.Contains(body, "61s") {
		t.Errorf("/healthz: %d %s", code, body)
	}
	if code, body := get(t, s, "/readyz", ""); code != 503 || body != "[+] caches: synced\n[-] kube-proxy: 503 Service Unavailable\n" {
		t.Errorf("/readyz: %d %s", code, body)
	}
	checks = nil
	if code, _ := get(t, s, "/readyz", ""); code != 503 {
		t.Errorf("ready before the first check: %d", code)
	}
}

func TestCertificateFromFilesIsReadAnew(t *testing.T) {
	t.Parallel()
	certFile, keyFile := filepath.Join(t.TempDir(), "tls.crt"), filepath.Join(t.TempDir(), "tls.key")
	first := write(t, certFile, keyFile)
	s := start(t, func(o *Options) { o.CertFile, o.KeyFile = certFile, keyFile })
	if got := served(t, s); !got.Equal(first) {
		t.Error("another certificate than that of the file")
	}
	second := write(t, certFile, keyFile)
	if got := served(t, s); !got.Equal(second) {
		t.Error("the certificate was not read anew")
	}
	if err := New(Options{CertFile: certFile + "x", KeyFile: keyFile}).Run(t.Context()); err == nil {
		t.Error("no error without certificate")
	}
}

// write makes a new certificate and writes it to the files.
func write(t *testing.T, certFile, keyFile string) *x509.Certificate {
	t.Helper()
	cert, err := selfSigned()
	if err != nil {
		t.Fatal(err)
	}
	key, err := x509.MarshalPKCS8PrivateKey(cert.PrivateKey)
	if err != nil {
		t.Fatal(err)
	}
	for file, block := range map[string]*pem.Block{certFile: {Type: "CERTIFICATE", Bytes: cert.Certificate[0]},
		keyFile: {Type: "PRIVATE KEY", Bytes: key}} {
		if err := os.WriteFile(file, pem.EncodeToMemory(block), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	parsed, err := x509.ParseCertificate(cert.Certificate[0])
	if err != nil {
		t.Fatal(err)
	}
	return parsed
}

func served(t *testing.T, s *Server) *x509.Certificate {
	t.Helper()
	conn, err := tls.Dial("tcp", s.Addr().String(), &tls.Config{InsecureSkipVerify: true}) //nolint:gosec // it is self-signed
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	return conn.ConnectionState().PeerCertificates[0]
}

func TestDelegateAsksTheAPIServer(t *testing.T) {
	t.Parallel()
	client, asked := testapi.New(), 0
	client.PrependReactor("create", "tokenreviews", func(a clienttesting.Action) (bool, runtime.Object, error) {
		asked++
		r := a.(clienttesting.CreateAction).GetObject().(*authenticationv1.TokenReview).DeepCopy()
		if r.Spec.Token == "down" {
			return true, nil, errors.New("connection refused")
		}
		r.Status.Authenticated = r.Spec.Token != "unknown"
		r.Status.User = authenticationv1.UserInfo{Username: r.Spec.Token, Groups: []string{"scrapers"}}
		return true, r, nil
	})
	client.PrependReactor("create", "subjectaccessreviews", func(a clienttesting.Action) (bool, runtime.Object, error) {
		r := a.(clienttesting.CreateAction).GetObject().(*authorizationv1.SubjectAccessReview).DeepCopy()
		s := r.Spec
		r.Status.Allowed = s.User == "prometheus" && s.Groups[0] == "scrapers" && s.NonResourceAttributes.Path == "/metrics" &&
			s.NonResourceAttributes.Verb == "get"
		return true, r, nil
	})
	d := NewDelegate(client)
	for _, test := range []struct {
		token, path string
		want        error
		asks        int
	}{
		{"unknown", "/metrics", ErrUnauthenticated, 1},
		{"unknown", "/metrics", ErrUnauthenticated, 0},
		{"somebody", "/metrics", ErrForbidden, 1},
		{"somebody", "/metrics", ErrForbidden, 0},
		{"prometheus", "/status", ErrForbidden, 1},
		{"prometheus", "/metrics", nil, 1},
		{"prometheus", "/metrics", nil, 0},
	} {
		asked = 0
		if err := d.Authorize(t.Context(), netip.Addr{}, test.token, test.path); !errors.Is(err, test.want) || asked != test.asks {
			t.Errorf("%s about %s: %v after %d questions, want %v after %d", test.token, test.path, err, asked, test.want, test.asks)
		}
	}
	if err := d.Authorize(t.Context(), netip.Addr{}, "down", "/metrics"); err == nil || errors.Is(err, ErrForbidden) ||
		errors.Is(err, ErrUnauthenticated) {
		t.Errorf("no API server: %v", err)
	}
}

// While the API server cannot be asked, those whom it has accepted within the hour go on reading, and nobody else.
func TestMonitoringOutlivesTheAPIServer(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		client, away, answer := testapi.New(), false, true
		client.PrependReactor("create", "tokenreviews", func(a clienttesting.Action) (bool, runtime.Object, error) {
			if away {
				return true, nil, errors.New("connection refused")
			}
			r := a.(clienttesting.CreateAction).GetObject().(*authenticationv1.TokenReview).DeepCopy()
			r.Status.Authenticated = answer
			return true, r, nil
		})
		client.PrependReactor("create", "subjectaccessreviews", func(a clienttesting.Action) (bool, runtime.Object, error) {
			r := a.(clienttesting.CreateAction).GetObject().(*authorizationv1.SubjectAccessReview).DeepCopy()
			r.Status.Allowed = true
			return true, r, nil
		})
		d := NewDelegate(client)
		asks := func(token, path string) error { return d.Authorize(t.Context(), netip.Addr{}, token, path) }
		require.NoError(t, asks("prometheus", "/metrics"))
		away = true
		for range 5 {
			time.Sleep(10 * time.Minute)
			require.NoError(t, asks("prometheus", "/metrics"))
		}
		require.Error(t, asks("prometheus", "/status"), "it was accepted for another path")
		require.Error(t, asks("stranger", "/metrics"))
		time.Sleep(11 * time.Minute)
		require.Error(t, asks("prometheus", "/metrics"), "for an hour")

		away = false
		require.NoError(t, asks("prometheus", "/metrics"))
		time.Sleep(2 * rememberYes)
		answer = false
		require.ErrorIs(t, asks("prometheus", "/metrics"), ErrUnauthenticated)
		away = true
		time.Sleep(2 * rememberNo)
		require.Error(t, asks("prometheus", "/metrics"), "it was refused since")
	})
}
