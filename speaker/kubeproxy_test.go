package speaker

import (
	"context"
	"errors"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

func TestAskKubeProxy(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		code    int
		body    string
		healthy bool
	}{
		"1.36, synced":         {200, `{"lastUpdated":"2026-01-01T00:00:00Z","healthy":true,"status":{"IPv4":{"healthy":true}}}`, true},
		"1.36, not synced yet": {200, `{"lastUpdated":"2026-01-01T00:00:00Z","healthy":true}`, false},
		"1.36, unhealthy":      {503, `{"healthy":false}`, false},
		"old or a replacement": {200, `{"lastUpdated": "2026-01-01 00:00:00 +0000 UTC"}`, true},
		"not JSON":             {200, `ok`, true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
				w.WriteHeader(test.code)
				w.Write([]byte(test.body)) //nolint:errcheck // the client would tell
			}))
			defer server.Close()
			healthy, status, err := NewKubeProxy(server.URL, nil).ask(t.Context())
			if healthy != test.healthy || status == "" || err != nil {
				t.Errorf("healthy %v, %q, %v", healthy, status, err)
			}
		})
	}
}

func TestKubeProxyIsBelievedWhenItAnswers(t *testing.T) {
	t.Parallel()
	yes := func() (bool, string, error) { return true, "healthy", nil }
	no := func() (bool, string, error) { return false, "503", nil }
	absent := func() (bool, string, error) { return false, "", errors.New("connection refused") }
	synctest.Test(t, func(t *testing.T) {
		var answer atomic.Value
		answer.Store(absent)
		p := NewKubeProxy("http://127.0.0.1", slog.New(slog.DiscardHandler))
		p.ask = func(context.Context) (bool, string, error) { return answer.Load().(func() (bool, string, error))() }
		ctx, cancel := context.WithCancel(t.Context())
		go p.Run(ctx) //nolint:errcheck // it returns nil
		for _, step := range []struct {
			what    string
			answer  func() (bool, string, error)
			wait    time.Duration
			healthy bool
		}{
			{"it may still start", absent, 9 * time.Second, false},
			{"it is not there", absent, 2 * time.Second, true},
			{"it starts, but has no rules", no, 3 * time.Second, false},
			{"it is well", yes, 2 * time.Second, true},
			{"it stumbles once", no, time.Second, true},
			{"it is well again", yes, 2 * time.Second, true},
			{"it is sick", no, 3 * time.Second, false},
			{"it restarts: its rules stay", absent, 2 * time.Second, true},
		} {
			answer.Store(step.answer)
			time.Sleep(step.wait)
			synctest.Wait()
			if healthy, status := p.Healthy(); healthy != step.healthy {
				t.Errorf("%s: healthy %v, %q", step.what, healthy, status)
			}
		}
		cancel()
		synctest.Wait()
	})
}

func TestWithoutURLNobodyIsAsked(t *testing.T) {
	t.Parallel()
	if healthy, _ := NewKubeProxy("", nil).Healthy(); !healthy {
		t.Error("not healthy")
	}
}
