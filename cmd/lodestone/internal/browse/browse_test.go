package browse_test

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"regexp"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/httpstream"
	"k8s.io/apimachinery/pkg/util/httpstream/spdy"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/lodestone-lb/lodestone/cmd/lodestone/internal/browse"
	"github.com/lodestone-lb/lodestone/inspect/dashboard"
	"github.com/lodestone-lb/lodestone/inspect/dashboard/example"
)

// apiServer is as much of an API server as it takes: it lists a pod, gives tokens
// to the administrator, and forwards ports.
type apiServer struct {
	*testing.T
	*httptest.Server
	// controller is where the pod's port is. pods are what there is.
	controller string
	pods       []corev1.Pod
	tokens     atomic.Int32
	life       time.Duration
}

const admin = "Bearer of the administrator"

func newAPIServer(t *testing.T, controller http.Handler) *apiServer {
	pod := httptest.NewTLSServer(controller)
	t.Cleanup(pod.Close)
	a := &apiServer{T: t, controller: pod.Listener.Addr().String(), life: time.Hour}
	a.pods = []corev1.Pod{{
		ObjectMeta: metav1.ObjectMeta{Name: "lodestone-controller-1"},
		Spec:       corev1.PodSpec{Containers: []corev1.Container{{Ports: []corev1.ContainerPort{{Name: "https", ContainerPort: 10258}}}}},
		Status:     corev1.PodStatus{Conditions: []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue}}},
	}}
	mux := http.NewServeMux()
	mux.HandleFunc("GET /api/v1/namespaces/ls/pods", func(w http.ResponseWriter, _ *http.Request) {
		answer(w, &corev1.PodList{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "PodList"}, Items: a.pods})
	})
	mux.HandleFunc("POST /api/v1/namespaces/ls/serviceaccounts/lodestone-dashboard/token", func(w http.ResponseWriter, _ *http.Request) {
		answer(w, &authenticationv1.TokenRequest{
			TypeMeta: metav1.TypeMeta{APIVersion: "authentication.k8s.io/v1", Kind: "TokenRequest"},
			Status: authenticationv1.TokenRequestStatus{Token: fmt.Sprintf("dashboard-%d", a.tokens.Add(1)),
				ExpirationTimestamp: metav1.NewTime(time.Now().Add(a.life))},
		})
	})
	mux.HandleFunc("POST /api/v1/namespaces/ls/pods/lodestone-controller-1/portforward", a.forward)
	a.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Authorization") != admin {
			w.Header().Set("Content-Type", "application/json")
			w.WriteHeader(http.StatusForbidden)
			answer(w, &metav1.Status{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Status"}, Status: "Failure",
				Reason: metav1.StatusReasonForbidden, Code: 403, Message: "no"})
			return
		}
		mux.ServeHTTP(w, r)
	}))
	t.Cleanup(a.Close)
	return a
}

func answer(w http.ResponseWriter, object any) {
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(object)
}

// forward is what kubelet does: pairs of streams for each connection.
func (a *apiServer) forward(w http.ResponseWriter, r *http.Request) {
	if _, err := httpstream.Handshake(r, w, []string{"portforward.k8s.io"}); err != nil {
		return
	}
	var wait sync.WaitGroup
	failures := make(chan httpstream.Stream, 1)
	connection := spdy.NewResponseUpgrader().UpgradeResponse(w, r, func(s httpstream.Stream, _ <-chan struct{}) error {
		if s.Headers().Get(corev1.StreamType) == corev1.StreamTypeError {
			failures <- s
			return nil
		}
		wait.Go(func() {
			defer s.Close()
			failure := <-failures
			defer failure.Close()
			c, err := net.Dial("tcp", a.controller)
			if s.Headers().Get(corev1.PortHeader) != "10258" || err != nil {
				fmt.Fprintf(failure, "failed to connect to port %s", s.Headers().Get(corev1.PortHeader))
				return
			}
			defer c.Close()
			wait.Go(func() { _, _ = io.Copy(c, s); c.Close() })
			_, _ = io.Copy(s, c)
		})
		return nil
	})
	if connection == nil {
		return
	}
	<-connection.CloseChan()
	wait.Wait()
}

// options are for who has the credentials.
func (a *apiServer) options(credentials string, out io.Writer) browse.Options {
	config := &rest.Config{Host: a.URL, BearerToken: strings.TrimPrefix(credentials, "Bearer ")}
	client, err := kubernetes.NewForConfig(config)
	require.NoError(a, err)
	tunnel := &browse.Tunnel{Client: client, Config: config, Namespace: "ls"}
	return browse.Options{Target: tunnel.Transport(), Token: &browse.Account{Client: client, Namespace: "ls"}, Timeout: time.Minute, Out: out}
}

// controller serves the dashboard of an invented cluster to the account, and
// notes what it is shown.
type controller struct {
	http.Handler
	mu    sync.Mutex
	shown []http.Header
}

func newController(t *testing.T) *controller {
	c := example.New(example.Size{Nodes: 3, Services: 8})
	d := dashboard.New(dashboard.Options{Source: func() dashboard.Source { return c.Source() }, Log: slog.New(slog.DiscardHandler)})
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error)
	go func() { ended <- d.Run(ctx) }()
	t.Cleanup(func() { cancel(); <-ended })
	return &controller{Handler: d.Handler()}
}

func (c *controller) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	c.mu.Lock()
	c.shown = append(c.shown, r.Header.Clone())
	c.mu.Unlock()
	if !strings.HasPrefix(r.Header.Get("Authorization"), "Bearer dashboard-") {
		http.Error(w, "no", http.StatusForbidden)
		return
	}
	c.Handler.ServeHTTP(w, r)
}

// start runs browse.Serve until the test ends and returns the address that it prints.
func start(t *testing.T, o browse.Options) *url.URL {
	t.Helper()
	reader, writer := io.Pipe()
	o.Out = writer
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { defer close(ended); defer writer.Close(); ended <- browse.Serve(ctx, o) }()
	t.Cleanup(func() { cancel(); require.NoError(t, <-ended) })
	lines := bufio.NewScanner(reader)
	for lines.Scan() {
		if u, err := url.Parse(strings.TrimSpace(lines.Text())); err == nil && u.Scheme == "http" {
			go func() { _, _ = io.Copy(io.Discard, reader) }()
			return u
		}
	}
	require.FailNow(t, "no address", <-ended)
	return nil
}

func request(t *testing.T, method, address, host string, header http.Header) (int, string) {
	t.Helper()
	r, err := http.NewRequestWithContext(t.Context(), method, address, nil)
	require.NoError(t, err)
	r.Host = host
	r.Header = header
	response, err := http.DefaultClient.Do(r)
	require.NoError(t, err)
	defer response.Body.Close()
	body, err := io.ReadAll(response.Body)
	require.NoError(t, err)
	return response.StatusCode, string(body)
}

func TestDashboardComesThroughTheAPIServer(t *testing.T) {
	t.Parallel()
	c := newController(t)
	u := start(t, newAPIServer(t, c).options(admin, nil))
	require.Equal(t, "127.0.0.1", u.Hostname())
	code, body := request(t, http.MethodGet, u.String(), u.Host, nil)
	require.Equal(t, http.StatusOK, code, body)
	require.Contains(t, body, "<title>Lodestone</title>")
	code, body = request(t, http.MethodGet, u.JoinPath("view").String()+"?q=api", u.Host, nil)
	require.Equal(t, http.StatusOK, code, body)
	require.Contains(t, body, `"sections"`)

	// Events come one by one.
	response, err := http.Get(u.JoinPath("events").String())
	require.NoError(t, err)
	defer response.Body.Close()
	line, err := bufio.NewReader(response.Body).ReadString('\n')
	require.NoError(t, err)
	require.Equal(t, "retry: 2000\n", line)

	c.mu.Lock()
	defer c.mu.Unlock()
	for _, h := range c.shown {
		assert.Equal(t, "Bearer dashboard-1", h.Get("Authorization"), "the administrator's credentials stay with the API server")
	}
}

// Other users of the machine, and web pages that the browser has open, get
// nothing.
func TestOthersSeeNothing(t *testing.T) {
	t.Parallel()
	c := newController(t)
	u := start(t, newAPIServer(t, c).options(admin, nil))
	base := "http://" + u.Host
	secret := strings.Split(u.Path, "/")[1]
	require.Regexp(t, regexp.MustCompile(`^[A-Z2-7]{26,}$`), secret)
	before := len(c.shown)
	for _, test := range []struct {
		name, method, url, host string
		want                    int
	}{
		{"without the secret", "GET", base + "/", u.Host, 404},
		{"without the secret", "GET", base + "/dashboard/", u.Host, 404},
		{"with a wrong one", "GET", base + "/" + strings.Repeat("A", len(secret)) + "/dashboard/", u.Host, 404},
		{"with a part of it", "GET", base + "/" + secret[:5] + "/dashboard/", u.Host, 404},
		{"by another name (DNS rebinding)", "GET", u.String(), "evil.example.com:" + u.Port(), 421},
		{"by another port", "GET", u.String(), "127.0.0.1:1", 421},
		{"without a name", "GET", u.String(), "127.0.0.1", 421},
		{"another path", "GET", base + "/" + secret + "/metrics", u.Host, 404},
		{"another path", "GET", base + "/" + secret + "/dashboard/%2e%2e/metrics", u.Host, 404},
		{"a write", "POST", u.String(), u.Host, 405},
	} {
		code, body := request(t, test.method, test.url, test.host, nil)
		assert.Equal(t, test.want, code, "%s: %s", test.name, body)
		assert.NotContains(t, body, secret, test.name)
	}
	assert.Len(t, c.shown, before, "the controller was asked nothing")

	code, _ := request(t, "GET", u.String(), "localhost:"+u.Port(),
		http.Header{"Cookie": {"a=b"}, "Authorization": {"Basic x"}, "X-Forwarded-For": {"y"}, "Impersonate-User": {"root"}})
	require.Equal(t, http.StatusOK, code)
	last := c.shown[len(c.shown)-1]
	for _, name := range []string{"Cookie", "Impersonate-User"} {
		assert.Empty(t, last.Get(name), name)
	}
	assert.Equal(t, "Bearer dashboard-1", last.Get("Authorization"))
}

func TestNothingIsOpenedWithoutTheRight(t *testing.T) {
	t.Parallel()
	c := newController(t)
	for name, test := range map[string]struct {
		options func(*apiServer, io.Writer) browse.Options
		says    string
	}{
		"no right to tokens": {func(a *apiServer, w io.Writer) browse.Options { return a.options("Bearer of somebody", w) },
			"lodestone-dashboard-user"},
		"no pod": {func(a *apiServer, w io.Writer) browse.Options {
			a.pods = nil
			return a.options(admin, w)
		}, "no pod of the controller that is ready"},
		"the controller is not there": {func(a *apiServer, w io.Writer) browse.Options {
			a.controller = "127.0.0.1:1"
			return a.options(admin, w)
		}, "failed to connect to port 10258"},
	} {
		var out bytes.Buffer
		err := browse.Serve(t.Context(), test.options(newAPIServer(t, c), &out))
		require.ErrorContains(t, err, test.says, name)
		require.Empty(t, out.String(), name)
	}
	hanging := make(chan struct{})
	a := newAPIServer(t, http.HandlerFunc(func(http.ResponseWriter, *http.Request) { <-hanging }))
	o := a.options(admin, io.Discard)
	o.Timeout = 5 * time.Second // enough for the way there on a busy machine
	require.ErrorContains(t, browse.Serve(t.Context(), o), "the controller cannot be reached: context deadline exceeded")
	close(hanging)
	for code, says := range map[int]string{401: "ClusterRole lodestone-dashboard-reader", 403: "ClusterRole lodestone-dashboard-reader",
		404: "--dashboard=false", 500: "500"} {
		a := newAPIServer(t, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(code) }))
		require.ErrorContains(t, browse.Serve(t.Context(), a.options(admin, io.Discard)), says)
	}
}

// A token is used until shortly before its end.
func TestTokensAreRenewed(t *testing.T) {
	t.Parallel()
	a := newAPIServer(t, http.NotFoundHandler())
	account := a.options(admin, nil).Token
	for range 3 {
		token, err := account.Token(t.Context())
		require.NoError(t, err)
		require.Equal(t, "dashboard-1", token)
	}
	a.life = time.Minute
	short := a.options(admin, nil).Token
	for i := range 3 {
		token, err := short.Token(t.Context())
		require.NoError(t, err)
		require.Equal(t, fmt.Sprintf("dashboard-%d", i+2), token)
	}
	a.Close()
	_, err := a.options(admin, nil).Token.Token(t.Context())
	require.Error(t, err)
	require.False(t, errors.Is(err, context.Canceled))
}
