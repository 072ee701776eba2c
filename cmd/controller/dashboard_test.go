package main

import (
	"bufio"
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"testing/synctest"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"
	utilerrors "k8s.io/apimachinery/pkg/util/errors"
	"k8s.io/apiserver/pkg/authentication/authenticator"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/authorization/authorizer"
	"k8s.io/apiserver/pkg/authorization/authorizerfactory"
	"k8s.io/apiserver/pkg/server"
	"k8s.io/apiserver/pkg/server/mux"

	"github.com/lodestone-lb/lodestone/inspect/dashboard"
	"github.com/lodestone-lb/lodestone/inspect/dashboard/example"
)

// Nobody reads anything of the dashboard without the right to it. A request without
// credentials is anonymous, as the framework has it.
func TestDashboardIsForWhoMayReadIt(t *testing.T) {
	authenticate := authenticator.RequestFunc(func(r *http.Request) (*authenticator.Response, bool, error) {
		name := "system:anonymous"
		switch token := r.Header.Get("Authorization"); {
		case token == "Bearer wrong":
			return nil, false, errors.New("invalid bearer token")
		case token != "":
			name = token[len("Bearer "):]
		case r.TLS != nil && len(r.TLS.PeerCertificates) > 0:
			name = "reader"
		}
		return &authenticator.Response{User: &user.DefaultInfo{Name: name}}, true, nil
	})
	authorize := authorizer.AuthorizerFunc(func(_ context.Context, a authorizer.Attributes) (authorizer.Decision, string, error) {
		if a.GetUser().GetName() == "reader" && a.GetVerb() == "get" {
			return authorizer.DecisionAllow, "", nil
		}
		return authorizer.DecisionNoOpinion, "", nil
	})
	m := mux.NewPathRecorderMux("test")
	p := newProcess(t.Context())
	p.flags.dashboard, p.log = true, slog.New(slog.DiscardHandler)
	p.serveDashboard(m)
	t.Cleanup(func() { p.cancel(); _ = p.tasks.Wait() })
	handler := guard(m, &server.AuthenticationInfo{Authenticator: authenticate}, &server.AuthorizationInfo{Authorizer: authorize},
		slog.New(slog.DiscardHandler))

	ask := func(path, token string, certified bool) int {
		w, r := httptest.NewRecorder(), httptest.NewRequest(http.MethodGet, path, nil)
		r.RemoteAddr = fmt.Sprintf("192.0.2.%d:1000", 1+len(token)) // each asks from a place of its own, and has its share
		if token != "" {
			r.Header.Set("Authorization", "Bearer "+token)
		}
		if certified {
			r.TLS = &tls.ConnectionState{PeerCertificates: []*x509.Certificate{{}}}
		}
		handler.ServeHTTP(w, r)
		return w.Code
	}
	for _, path := range []string{dashboard.Path, "/dashboard/", "/dashboard/view", "/dashboard/events", "/dashboard/dashboard.js",
		"/dashboard/dashboard.css", "/dashboard/icon.svg", "/dashboard/nothing"} {
		assert.Equal(t, http.StatusUnauthorized, ask(path, "", false), "%s without a token", path)
		assert.Equal(t, http.StatusUnauthorized, ask(path, "wrong", false), "%s with a token of nobody", path)
		assert.Equal(t, http.StatusForbidden, ask(path, "somebody", false), "%s without the right", path)
	}
	assert.Equal(t, http.StatusOK, ask("/dashboard/", "reader", false))
	assert.Equal(t, http.StatusOK, ask("/dashboard/", "", true), "with a client certificate")
	assert.Equal(t, http.StatusOK, ask("/dashboard/dashboard.js", "reader", false))
	assert.Equal(t, http.StatusMovedPermanently, ask(dashboard.Path, "reader", false))
	assert.Equal(t, http.StatusForbidden, ask("/metrics", "", false), "the rest is as the framework has it")
}

// Tokens that somebody makes up cost the API server few questions, whatever is asked for by them, and keep nobody out
// who was accepted lately.
func TestTokensOfStrangersAreThrottled(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		asked := 0
		authenticate := authenticator.RequestFunc(func(r *http.Request) (*authenticator.Response, bool, error) {
			if asked++; r.Header.Get("Authorization") != "Bearer reader" {
				return nil, false, errors.New("invalid bearer token")
			}
			return &authenticator.Response{User: &user.DefaultInfo{Name: "reader"}}, true, nil
		})
		authorize := authorizer.AuthorizerFunc(func(context.Context, authorizer.Attributes) (authorizer.Decision, string, error) {
			return authorizer.DecisionAllow, "", nil
		})
		m := mux.NewPathRecorderMux("test")
		m.HandleFunc("/metrics", func(http.ResponseWriter, *http.Request) {})
		handler := guard(m, &server.AuthenticationInfo{Authenticator: authenticate}, &server.AuthorizationInfo{Authorizer: authorize},
			slog.New(slog.DiscardHandler))
		ask := func(token string) int {
			w, r := httptest.NewRecorder(), httptest.NewRequest(http.MethodGet, "/metrics", nil)
			r.Header.Set("Authorization", "Bearer "+token)
			handler.ServeHTTP(w, r)
			return w.Code
		}
		require.Equal(t, http.StatusOK, ask("reader"))
		for i := range 1000 {
			require.NotEqual(t, http.StatusOK, ask(fmt.Sprint("made-up-", i)))
		}
		require.Less(t, asked, 100)
		require.Equal(t, http.StatusOK, ask("reader"))
	})
}

// Strangers' tokens are no questions on paths that are open to everybody, and few beside a certificate that anybody can make.
func TestTokensWhereNoneIsWantedAreThrottled(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		asked := 0
		authenticate := authenticator.RequestFunc(func(r *http.Request) (*authenticator.Response, bool, error) {
			if r.Header.Get("Authorization") != "" || r.Header.Get("Sec-WebSocket-Protocol") != "" {
				asked++
			}
			return &authenticator.Response{User: &user.DefaultInfo{Name: user.Anonymous}}, true, nil
		})
		handler := guard(mux.NewPathRecorderMux("test"), &server.AuthenticationInfo{Authenticator: authenticate},
			&server.AuthorizationInfo{Authorizer: authorizerfactory.NewAlwaysDenyAuthorizer()}, slog.New(slog.DiscardHandler))
		for i := range 1000 {
			for _, path := range []string{"/readyz", "/healthz", "/metrics"} {
				r := httptest.NewRequest(http.MethodGet, path, nil)
				header := []string{"Authorization", "Sec-WebSocket-Protocol"}[i%2]
				r.Header.Set(header, fmt.Sprint("Bearer made-up-", i))
				r.TLS = &tls.ConnectionState{PeerCertificates: []*x509.Certificate{{}}}
				handler.ServeHTTP(httptest.NewRecorder(), r)
			}
		}
		require.Less(t, asked, 100)
	})
}

// Whoever operates the controller learns that its account may not review tokens. Mistakes of clients are no warnings.
func TestTokensThatCannotBeReviewedAreAWarning(t *testing.T) {
	forbidden := apierrors.NewForbidden(schema.GroupResource{Group: "authentication.k8s.io", Resource: "tokenreviews"}, "", errors.New("no"))
	for want, errs := range [][]error{
		{errors.New("invalid bearer token")},
		{errors.New("no certificate"), fmt.Errorf("review: %w", forbidden)},
	} {
		var log bytes.Buffer
		authenticate := authenticator.RequestFunc(func(*http.Request) (*authenticator.Response, bool, error) {
			return nil, false, utilerrors.NewAggregate(errs)
		})
		handler := guard(mux.NewPathRecorderMux("test"), &server.AuthenticationInfo{Authenticator: authenticate},
			&server.AuthorizationInfo{Authorizer: authorizerfactory.NewAlwaysDenyAuthorizer()}, slog.New(slog.NewTextHandler(&log, nil)))
		for range 3 {
			handler.ServeHTTP(httptest.NewRecorder(), httptest.NewRequest(http.MethodGet, "/metrics", nil))
		}
		require.Equal(t, want, strings.Count(log.String(), "tokenreviews"), log.String())
		require.Equal(t, want, strings.Count(log.String(), "\n"), log.String())
	}
}

// Events come one by one through all that the framework puts around the page, by
// HTTP/1.1 and HTTP/2.
func TestEventsComeThroughTheFramework(t *testing.T) {
	m := mux.NewPathRecorderMux("test")
	p := newProcess(t.Context())
	p.flags.dashboard, p.flags.configNamespace, p.flags.configName = true, example.Place.Namespace, example.Place.ConfigName
	p.scope, p.log, p.client = example.Place.Scope, slog.New(slog.DiscardHandler), example.New(example.Size{Nodes: 2, Services: 4})
	p.serveDashboard(m)
	everybody := authenticator.RequestFunc(func(*http.Request) (*authenticator.Response, bool, error) {
		return &authenticator.Response{User: &user.DefaultInfo{Name: "reader"}}, true, nil
	})
	everything := authorizer.AuthorizerFunc(func(context.Context, authorizer.Attributes) (authorizer.Decision, string, error) {
		return authorizer.DecisionAllow, "", nil
	})
	handler := guard(m, &server.AuthenticationInfo{Authenticator: everybody}, &server.AuthorizationInfo{Authorizer: everything},
		slog.New(slog.DiscardHandler))
	for version, h2 := range map[string]bool{"HTTP/1.1": false, "HTTP/2.0": true} {
		s := httptest.NewUnstartedServer(handler)
		s.EnableHTTP2 = h2
		s.StartTLS()
		t.Cleanup(s.Close)
		request, err := http.NewRequestWithContext(t.Context(), http.MethodGet, s.URL+"/dashboard/events", nil)
		require.NoError(t, err)
		request.Header.Set("Authorization", "Bearer x")
		response, err := s.Client().Do(request)
		require.NoError(t, err)
		defer response.Body.Close()
		require.Equal(t, version, response.Proto)
		lines := bufio.NewScanner(response.Body)
		for _, want := range []string{"retry: 2000", ": connected", "", "event: change", `data: {"time":`} {
			require.True(t, lines.Scan(), "%s: %v", version, lines.Err())
			require.True(t, strings.HasPrefix(lines.Text(), want), "%s: %q", version, lines.Text())
		}
	}
	p.cancel()
	require.NoError(t, p.tasks.Wait())
}

func TestDashboardCanBeSwitchedOff(t *testing.T) {
	m := mux.NewPathRecorderMux("test")
	newProcess(t.Context()).serveDashboard(m)
	w := httptest.NewRecorder()
	m.ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/dashboard/", nil))
	assert.Equal(t, http.StatusNotFound, w.Code)
}
