package speaker

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/lodestone-lb/lodestone/pkg/report"
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
				w.Write([]byte(test.body)) //nolint:errcheck // the client would fail
			}))
			defer server.Close()
			proxy := NewKubeProxy(server.URL, "n1", nil, nil)
			healthy, status, err := proxy.ask(t.Context())
			for try := 0; os.IsTimeout(err) && try < 30; try++ { // it waits a second, which a busy machine may take
				healthy, status, err = proxy.ask(t.Context())
			}
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
	unsynced := func() (bool, string, error) { return false, unwritten, nil }
	absent := func() (bool, string, error) { return false, "", errors.New("connection refused") }
	synctest.Test(t, func(t *testing.T) {
		var answer atomic.Value
		answer.Store(absent)
		p := NewKubeProxy("http://127.0.0.1", "n1", &fakeMembers{}, slog.New(slog.DiscardHandler))
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
			{"it starts, but has no rules", unsynced, 3 * time.Second, false},
			{"it is well", yes, 2 * time.Second, true},
			{"it is replaced, as by an update", absent, 2 * time.Second, true},
			{"it reads what rules there are to be: those of before stay", unsynced, time.Minute, true},
			{"it is well", yes, 2 * time.Second, true},
			{"it stumbles once", no, time.Second, true},
			{"it is well again", yes, 2 * time.Second, true},
			{"it is sick", no, 3 * time.Second, false},
			{"it restarts: its rules stay", absent, 2 * time.Second, true},
			{"those that it had were not good", unsynced, 3 * time.Second, false},
		} {
			answer.Store(step.answer)
			time.Sleep(step.wait)
			synctest.Wait()
			healthy, sick, status := p.Health()
			if healthy != step.healthy || sick == step.healthy && step.what != "it may still start" {
				t.Errorf("%s: healthy %v, sick %v, %q", step.what, healthy, sick, status)
			}
		}
		cancel()
		synctest.Wait()
	})
}

// Images are pulled one after the other: on a new node a speaker may start long before
// kube-proxy does.
func TestKubeProxyIsWaitedForWhereOthersHaveOne(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var there atomic.Bool
		// n1's Lease is of its last life
		others := &fakeMembers{networks: map[string]report.Network{"n1": {KubeProxy: true}, "n2": {KubeProxy: true}}}
		p := NewKubeProxy("http://127.0.0.1", "n1", others, slog.New(slog.DiscardHandler))
		p.ask = func(context.Context) (bool, string, error) {
			if !there.Load() {
				return false, "", errors.New("connection refused")
			}
			return true, "healthy", nil
		}
		ctx, cancel := context.WithCancel(t.Context())
		go p.Run(ctx) //nolint:errcheck // it returns nil
		expect := func(what string, d time.Duration, healthy, answers bool) {
			t.Helper()
			time.Sleep(d)
			synctest.Wait()
			now, known := p.Answers()
			if h, sick, _ := p.Health(); h != healthy || now != answers || known != healthy || sick {
				t.Errorf("%s: healthy %v, answers %v, known %v, sick %v", what, h, now, known, sick)
			}
		}
		expect("it is still to come", 10*time.Minute, false, false)
		there.Store(true)
		expect("it has come", 2*time.Second, true, true)
		there.Store(false)
		expect("it restarts", 58*time.Second, true, true)
		expect("it is taken away: its rules stay, but others need not wait for theirs", 4*time.Second, true, false)
		cancel()
		synctest.Wait()
	})
	synctest.Test(t, func(t *testing.T) {
		others := &fakeMembers{networks: map[string]report.Network{"n1": {KubeProxy: true}, "n2": {KubeProxy: true}}}
		p := NewKubeProxy("http://127.0.0.1", "n1", others, slog.New(slog.DiscardHandler))
		p.ask = func(context.Context) (bool, string, error) { return false, "", errors.New("connection refused") }
		ctx, cancel := context.WithCancel(t.Context())
		go p.Run(ctx) //nolint:errcheck // it returns nil
		time.Sleep(time.Minute)
		others.change(func() { others.networks["n2"] = report.Network{} })
		time.Sleep(2 * time.Second)
		synctest.Wait()
		if healthy, _, status := p.Health(); !healthy {
			t.Errorf("no other node has one any more: %s", status)
		}
		cancel()
		synctest.Wait()
	})
}

// Somebody who has taken a node over, or who runs one kube-proxy too many, keeps no other node from taking traffic in a
// cluster without; and nobody takes it from nodes that have it.
func TestOneKubeProxyStopsNobody(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		others := &fakeMembers{networks: map[string]report.Network{"n2": {KubeProxy: true}, "n3": {}}}
		p := NewKubeProxy("http://127.0.0.1", "n1", others, slog.New(slog.DiscardHandler))
		p.ask = func(context.Context) (bool, string, error) { return false, "", errors.New("connection refused") }
		ctx, cancel := context.WithCancel(t.Context())
		go p.Run(ctx) //nolint:errcheck // it returns nil
		for _, all := range []bool{false, true} {
			others.change(func() { others.networks["n3"] = report.Network{KubeProxy: all} })
			time.Sleep(2 * proxyTimeout)
			synctest.Wait()
			if healthy, _, status := p.Health(); !healthy {
				t.Error(all, status)
			}
		}
		cancel()
		synctest.Wait()
	})
}

func TestWithoutURLNobodyIsAsked(t *testing.T) {
	t.Parallel()
	if healthy, _, _ := NewKubeProxy("", "n1", nil, nil).Health(); !healthy {
		t.Error("not healthy")
	}
}

// answerOf answers every request.
type answerOf func() *http.Response

func (a answerOf) RoundTrip(*http.Request) (*http.Response, error) { return a(), nil }

// Whatever kube-proxy answers, a node counts as sick only if the answer has "healthy": false.
func FuzzAsk(f *testing.F) {
	f.Add(200, `{"lastUpdated":"2026-11-21 16:00:00","healthy":true,"status":{"IPv4":{}}}`)
	f.Add(200, `{"healthy":false}`)
	f.Add(200, "ok")
	f.Add(503, "{")
	f.Fuzz(func(t *testing.T, code int, body string) {
		var read atomic.Int64
		client := &http.Client{Transport: answerOf(func() *http.Response {
			return &http.Response{StatusCode: code, Status: "status", Body: io.NopCloser(&counted{strings.NewReader(body), &read})}
		})}
		healthy, status, err := ask(t.Context(), client, "http://127.0.0.1/healthz")
		if err != nil {
			return // a redirect without a place
		}
		require.NotEmpty(t, status)
		require.LessOrEqual(t, read.Load(), int64(4096))
		require.Equal(t, code == http.StatusOK && status != unwritten, healthy)
	})
}

// counted counts what is read.
type counted struct {
	io.Reader
	n *atomic.Int64
}

func (c *counted) Read(b []byte) (int, error) {
	n, err := c.Reader.Read(b)
	c.n.Add(int64(n))
	return n, err
}
