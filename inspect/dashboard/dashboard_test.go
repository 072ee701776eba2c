package dashboard_test

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"net/url"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/lodestone-lb/lodestone/inspect/dashboard"
	"github.com/lodestone-lb/lodestone/inspect/dashboard/example"
	"github.com/lodestone-lb/lodestone/pkg/testcost"
)

// site is a dashboard of an invented cluster that is served.
type site struct {
	*testing.T
	*httptest.Server
	cluster *example.Cluster
	// started counts how often the cluster was followed, running how many
	// follow it now.
	started, running atomic.Int32
}

func serve(t *testing.T, size example.Size) *site {
	s := &site{T: t, cluster: example.New(size)}
	d := dashboard.New(dashboard.Options{Source: s.source, Version: "v1", Log: slog.New(slog.DiscardHandler)})
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error)
	go func() { ended <- d.Run(ctx) }()
	s.Server = httptest.NewServer(d.Handler())
	t.Cleanup(func() {
		cancel()
		require.NoError(t, <-ended)
		s.Close() // waits for the streams: they end with the task
		require.Zero(t, s.running.Load(), "nobody follows the cluster any more")
	})
	return s
}

// counted is a source that is counted while it runs.
type counted struct {
	dashboard.Source
	s *site
}

func (c counted) Run(ctx context.Context) error {
	c.s.started.Add(1)
	c.s.running.Add(1)
	defer c.s.running.Add(-1)
	return c.Source.Run(ctx)
}

func (s *site) source() dashboard.Source { return counted{s.cluster.Source(), s} }

// section is a section of the page, as it is sent.
type section struct {
	Order       []string
	Rows        map[string]json.RawMessage
	Total, Page int
}

type sections map[string]section

func (s *site) get(path string) (int, http.Header, string) {
	s.Helper()
	response, err := s.Client().Get(s.URL + path)
	require.NoError(s, err)
	defer response.Body.Close()
	body, err := io.ReadAll(response.Body)
	require.NoError(s, err)
	return response.StatusCode, response.Header, string(body)
}

// view asks for the whole page once.
func (s *site) view(query string) sections {
	s.Helper()
	code, _, body := s.get("/dashboard/view?" + query)
	require.Equal(s, http.StatusOK, code, body)
	var u struct{ Sections sections }
	require.NoError(s, json.Unmarshal([]byte(body), &u))
	return u.Sections
}

// stream follows the page. The channel has what is sent, one update each.
func (s *site) stream(query string) (updates <-chan sections, stop func()) {
	s.Helper()
	ctx, cancel := context.WithCancel(s.Context())
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, s.URL+"/dashboard/events?"+query, nil)
	require.NoError(s, err)
	response, err := s.Client().Do(request)
	require.NoError(s, err)
	require.Equal(s, "text/event-stream", response.Header.Get("Content-Type"))
	out := make(chan sections, 100)
	go func() {
		defer close(out)
		defer response.Body.Close()
		lines := bufio.NewScanner(response.Body)
		lines.Buffer(nil, 1<<20)
		for lines.Scan() {
			if data, ok := strings.CutPrefix(lines.Text(), "data: "); ok {
				var u struct{ Sections sections }
				if json.Unmarshal([]byte(data), &u) == nil {
					out <- u.Sections
				}
			}
		}
	}()
	return out, cancel
}

// await returns the first update that is like that.
func (s *site) await(updates <-chan sections, like func(sections) bool) sections {
	s.Helper()
	late := time.After(30 * time.Second)
	for {
		select {
		case u, ok := <-updates:
			require.True(s, ok, "the stream has ended")
			if like(u) {
				return u
			}
		case <-late:
			require.FailNow(s, "no such update")
		}
	}
}

func TestPageIsSelfContained(t *testing.T) {
	t.Parallel()
	s := serve(t, example.Size{Nodes: 3, Services: 8})
	for path, kind := range map[string]string{
		"/dashboard/": "text/html", "/dashboard/dashboard.js": "text/javascript", "/dashboard/dashboard.css": "text/css",
		"/dashboard/icon.svg": "image/svg+xml",
	} {
		code, header, body := s.get(path)
		assert.Equal(t, http.StatusOK, code, path)
		assert.Contains(t, header.Get("Content-Type"), kind)
		assert.Contains(t, header.Get("Content-Security-Policy"), "default-src 'none'")
		assert.NotContains(t, header.Get("Content-Security-Policy"), "unsafe")
		assert.Equal(t, "nosniff", header.Get("X-Content-Type-Options"))
		assert.Less(t, len(body), 16<<10, path)
		if path != "/dashboard/icon.svg" { // which names the SVG namespace
			assert.NotContains(t, body, "//www.", "%s has nothing from outside", path)
			assert.NotContains(t, body, "https:", "%s has nothing from outside", path)
		}
	}
	code, _, _ := s.get("/dashboard/index.html")
	assert.Equal(t, http.StatusNotFound, code)
	response, err := s.Client().Post(s.URL+"/dashboard/view", "text/plain", nil)
	require.NoError(t, err)
	response.Body.Close()
	assert.Equal(t, http.StatusMethodNotAllowed, response.StatusCode, "it is there to be read")
	assert.Zero(t, s.started.Load(), "the page alone costs nothing")
}

func TestViewShowsWhatThereIs(t *testing.T) {
	t.Parallel()
	s := serve(t, example.Size{Nodes: 6, Services: 40, Trouble: true})
	v := s.view("")
	text := func(name string) string {
		b, err := json.Marshal(v[name])
		require.NoError(t, err)
		return string(b)
	}
	assert.Contains(t, text("head"), `"clusterID":"fra1"`)
	assert.Contains(t, text("head"), `"services":{"good":43,"bad":1}`)
	assert.Equal(t, []string{"lan IPv4", "lan-v6 IPv6", "edge IPv4", "old IPv4"}, v["pools"].Order)
	assert.Contains(t, text("pools"), `"note":"draining"`)
	assert.Equal(t, 7, v["nodes"].Total)
	assert.Equal(t, example.Hostile, v["nodes"].Order[0], "who has a problem comes first")
	assert.Contains(t, text("warnings"), `shop/waits`)
	assert.Equal(t, 42, v["vips"].Total)
	assert.Contains(t, text("events"), "waits: NoSuchPool", "what happened before somebody looked")
	_, _, raw := s.get("/dashboard/view")
	assert.NotContains(t, raw, "<img", "no text can end a script")

	trouble := s.view("trouble=1")["vips"]
	assert.Equal(t, 2, trouble.Total)
	assert.Contains(t, string(trouble.Rows[trouble.Order[0]]), `"reason":"NoServingEndpoint"`)
	assert.Equal(t, 1, s.view("q=API-0001")["vips"].Total)
	assert.Equal(t, 0, s.view("q=" + url.QueryEscape("no such thing"))["vips"].Total)
	assert.Equal(t, 1, s.view("vips=999&nodes=999")["vips"].Page, "there are two pages")
}

// A page is sent what changes, and no more.
func TestStreamSendsDifferences(t *testing.T) {
	t.Parallel()
	s := serve(t, example.Size{Nodes: 6, Services: 40})
	updates, stop := s.stream("")
	first := s.await(updates, func(u sections) bool { return len(u["vips"].Rows) > 0 })
	assert.Len(t, first["vips"].Rows, 25)
	assert.Len(t, first["nodes"].Rows, 6)
	require.NoError(t, s.cluster.SetSession(t.Context(), 2, "hold timer expired"))
	next := s.await(updates, func(u sections) bool { return len(u["nodes"].Rows) > 0 })
	assert.Len(t, next["nodes"].Rows, 1, "only the node that changed")
	assert.Contains(t, string(next["nodes"].Rows[example.NodeName(2)]), "hold timer expired")
	assert.Equal(t, example.NodeName(2), next["nodes"].Order[0])
	assert.NotContains(t, next, "pools", "nothing of them changed")
	assert.Len(t, next["events"].Rows, 1)
	require.NoError(t, s.cluster.SetSpeaker(t.Context(), 4, false))
	moved := s.await(updates, func(u sections) bool { return len(u["vips"].Rows) > 0 })
	assert.Less(t, len(moved["vips"].Rows), 25)
	assert.Contains(t, fmt.Sprint(moved["events"].Order), "the speaker of "+example.NodeName(4)+" is not ready")
	assert.Contains(t, fmt.Sprint(moved["events"].Order), "from "+example.NodeName(4))
	stop()
	require.Eventually(t, func() bool { _, open := <-updates; return !open }, 30*time.Second, time.Millisecond)
}

func TestVisitorsAreBounded(t *testing.T) {
	t.Parallel()
	s := serve(t, example.Size{Nodes: 2, Services: 4})
	var stops []func()
	for range dashboard.MaxVisitors {
		updates, stop := s.stream("")
		s.await(updates, func(u sections) bool { return true })
		stops = append(stops, stop)
	}
	code, header, body := s.get("/dashboard/view")
	assert.Equal(t, http.StatusServiceUnavailable, code)
	assert.NotEmpty(t, header.Get("Retry-After"))
	assert.Contains(t, body, fmt.Sprint(dashboard.MaxVisitors))
	assert.EqualValues(t, 1, s.started.Load(), "all look at the same")
	stops[0]()
	require.Eventually(t, func() bool {
		code, _, _ := s.get("/dashboard/view")
		return code == http.StatusOK
	}, 30*time.Second, 5*time.Millisecond, "who leaves makes room")
	for _, stop := range stops {
		stop()
	}
}

// A visitor without credentials is asked for them. Whether credentials are valid, others decide.
func TestChallenge(t *testing.T) {
	t.Parallel()
	next := http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusForbidden) })
	for _, test := range []struct {
		path, authorization string
		want                int
	}{
		{"/dashboard", "", 401}, {"/dashboard/", "", 401}, {"/dashboard/events", "", 401}, {"/dashboard/events", "Bearer x", 403},
		{"/dashboards", "", 403}, {"/metrics", "", 403}, {"/", "", 403},
	} {
		w, r := httptest.NewRecorder(), httptest.NewRequest(http.MethodGet, test.path, nil)
		r.Header.Set("Authorization", test.authorization)
		dashboard.Challenge(next).ServeHTTP(w, r)
		assert.Equal(t, test.want, w.Code, test)
	}
}

// One look at 10,000 Services, which all pages share.
func BenchmarkLook(b *testing.B) {
	c := example.New(example.Size{Nodes: 50, Services: 10_000})
	source := c.Source()
	ctx, cancel := context.WithCancel(b.Context())
	ended := make(chan error)
	go func() { ended <- source.Run(ctx) }()
	defer func() { cancel(); <-ended }()
	objects, ready := source.Objects(ctx)
	for !ready {
		changed := source.Changed()
		if objects, ready = source.Objects(ctx); !ready {
			<-changed
		}
	}
	states := make([]*dashboard.State, 8) // what one takes is lost in what else changes
	start, looks := time.Now(), 0
	for b.Loop() {
		objects, _ = source.Objects(ctx)
		states[looks%len(states)] = dashboard.NewState(objects)
		looks++
	}
	b.ReportMetric(float64(time.Since(start).Microseconds())/1e3/float64(looks), "look-ms")
	for i := range states {
		states[i] = dashboard.NewState(objects)
	}
	with := testcost.Live()
	runtime.KeepAlive(states)
	b.ReportMetric(float64(with-testcost.Live())/8, "state-B")
	runtime.KeepAlive(objects)
}

// BenchmarkPage measures the time and the bytes of opening the page, and of turning to the next page, when the cluster
// has been read.
func BenchmarkPage(b *testing.B) {
	d := dashboard.New(dashboard.Options{
		Source: func() dashboard.Source {
			return example.New(example.Size{Nodes: 50, Services: 10_000}).Source()
		}, Log: slog.New(slog.DiscardHandler),
	})
	ctx, cancel := context.WithCancel(b.Context())
	ended := make(chan error)
	go func() { ended <- d.Run(ctx) }()
	defer func() { cancel(); <-ended }()
	server, size := httptest.NewServer(d.Handler()), 0
	defer server.Close()
	load := func(path string) int {
		response, err := server.Client().Get(server.URL + path)
		require.NoError(b, err)
		defer response.Body.Close()
		body, err := io.ReadAll(response.Body)
		require.NoError(b, err)
		require.Equal(b, http.StatusOK, response.StatusCode)
		require.NotEmpty(b, body, path)
		return len(body)
	}
	load("/dashboard/view") // waits for the first look
	for b.Loop() {
		size = load("/dashboard/") + load("/dashboard/dashboard.js") + load("/dashboard/dashboard.css") + load("/dashboard/view")
	}
	b.ReportMetric(float64(size)/1e3, "kB")
}
