package main_test

import (
	"bytes"
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/kubernetes/scheme"

	"github.com/lodestone-lb/lodestone/inspect/cluster"
	"github.com/lodestone-lb/lodestone/inspect/dashboard/example"
	"github.com/lodestone-lb/lodestone/pkg/config"
)

// program is the file of the command, as it is shipped.
var program = sync.OnceValues(func() (string, error) {
	file := filepath.Join(os.TempDir(), fmt.Sprintf("lodestone-test-%d", os.Getpid()))
	build := exec.Command("go", "build", "-ldflags=-s -w", "-o", file, ".")
	build.Env = append(os.Environ(), "CGO_ENABLED=0") // as it is shipped, and so that it shares what is built for that
	out, err := build.CombinedOutput()
	if err != nil {
		err = fmt.Errorf("%w: %s", err, out)
	}
	return file, err
})

func TestMain(m *testing.M) {
	code := m.Run()
	if file, err := program(); err == nil {
		os.Remove(file)
	}
	os.Exit(code)
}

// server is an API server over an invented cluster: it answers in protobuf, large
// answers compressed, as real ones do.
type server struct {
	*httptest.Server
	cluster *example.Cluster
	// fault answers in place of the server if it returns true.
	fault func(w http.ResponseWriter, r *http.Request) bool

	mu      sync.Mutex
	answers map[string]answer // by URI
}

// answer is one that was encoded before.
type answer struct {
	code       int
	body       []byte
	compressed bool
}

func serve(tb testing.TB, size example.Size) *server {
	s := &server{cluster: example.New(size), answers: map[string]answer{}}
	s.Server = httptest.NewServer(s)
	tb.Cleanup(s.Close)
	return s
}

// ServeHTTP implements http.Handler.
func (s *server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if s.fault != nil && s.fault(w, r) {
		return
	}
	s.mu.Lock()
	a, known := s.answers[r.RequestURI]
	if !known {
		a = s.answer(r)
		if !strings.HasSuffix(r.URL.Path, cluster.ElectionLease) { // which is renewed
			s.answers[r.RequestURI] = a
		}
	}
	s.mu.Unlock()
	w.Header().Set("Content-Type", runtime.ContentTypeProtobuf)
	if a.compressed {
		w.Header().Set("Content-Encoding", "gzip")
	}
	w.WriteHeader(a.code)
	_, _ = w.Write(a.body) // who hangs up has his reasons
}

func (s *server) answer(r *http.Request) answer {
	object, version, err := s.read(r.Context(), r.URL.Path, metav1.ListOptions{LabelSelector: r.URL.Query().Get("labelSelector")})
	code := http.StatusOK
	if err != nil {
		code, version = http.StatusNotFound, schema.GroupVersion{Version: "v1"}
		object = &metav1.Status{Status: metav1.StatusFailure, Reason: metav1.StatusReasonNotFound, Code: http.StatusNotFound,
			Message: err.Error()}
	}
	info, _ := runtime.SerializerInfoForMediaType(scheme.Codecs.SupportedMediaTypes(), runtime.ContentTypeProtobuf)
	var body bytes.Buffer
	if err := scheme.Codecs.EncoderForVersion(info.Serializer, version).Encode(object, &body); err != nil {
		panic(err)
	}
	const large = 128 << 10 // what Kubernetes compresses from
	if body.Len() < large || !strings.Contains(r.Header.Get("Accept-Encoding"), "gzip") {
		return answer{code, body.Bytes(), false}
	}
	var packed bytes.Buffer
	z, _ := gzip.NewWriterLevel(&packed, gzip.BestSpeed)
	_, err = z.Write(body.Bytes())
	if err = errors.Join(err, z.Close()); err != nil {
		panic(err)
	}
	return answer{code, packed.Bytes(), true}
}

// read returns what a path is about.
func (s *server) read(ctx context.Context, path string, o metav1.ListOptions) (object runtime.Object, _ schema.GroupVersion, err error) {
	core, of := schema.GroupVersion{Version: "v1"}, func(group string) schema.GroupVersion {
		return schema.GroupVersion{Group: group, Version: "v1"}
	}
	const ours = "/namespaces/" + config.Namespace
	switch path {
	case "/api/v1/services":
		object, err = s.cluster.CoreV1().Services("").List(ctx, o)
	case "/api/v1/nodes":
		object, err = s.cluster.CoreV1().Nodes().List(ctx, o)
	case "/api/v1/namespaces":
		object, err = s.cluster.CoreV1().Namespaces().List(ctx, o)
	case "/api/v1" + ours + "/pods":
		object, err = s.cluster.CoreV1().Pods(config.Namespace).List(ctx, o)
	case "/api/v1" + ours + "/configmaps/" + config.ConfigMapName:
		object, err = s.cluster.CoreV1().ConfigMaps(config.Namespace).Get(ctx, config.ConfigMapName, metav1.GetOptions{})
	case "/apis/coordination.k8s.io/v1" + ours + "/leases":
		object, err = s.cluster.CoordinationV1().Leases(config.Namespace).List(ctx, o)
		return object, of("coordination.k8s.io"), err
	case "/apis/coordination.k8s.io/v1" + ours + "/leases/" + cluster.ElectionLease:
		lease, err := s.cluster.CoordinationV1().Leases(config.Namespace).Get(ctx, cluster.ElectionLease, metav1.GetOptions{})
		if err == nil {
			lease.Spec.RenewTime = new(metav1.NowMicro())
		}
		return lease, of("coordination.k8s.io"), err
	case "/apis/discovery.k8s.io/v1/endpointslices":
		object, err = s.cluster.DiscoveryV1().EndpointSlices("").List(ctx, o)
		return object, of("discovery.k8s.io"), err
	case "/apis/discovery.k8s.io/v1/namespaces/default/endpointslices":
		object, err = s.cluster.DiscoveryV1().EndpointSlices("default").List(ctx, o)
		return object, of("discovery.k8s.io"), err
	case "/apis/networking.k8s.io/v1/servicecidrs":
		object, err = s.cluster.NetworkingV1().ServiceCIDRs().List(ctx, o)
		return object, of("networking.k8s.io"), err
	default:
		err = errors.New("the server could not find the requested resource")
	}
	return object, core, err
}

// run runs the command as an operator does, with a kubeconfig for the server.
func (s *server) run(tb testing.TB, args ...string) (code int, stdout, stderr string) {
	tb.Helper()
	return start(tb, s.kubeconfig(tb), args...)
}

func (s *server) kubeconfig(tb testing.TB) string {
	file := filepath.Join(tb.TempDir(), "kubeconfig")
	require.NoError(tb, os.WriteFile(file, []byte(`apiVersion: v1
kind: Config
current-context: test
contexts: [{name: test, context: {cluster: test, user: test, namespace: shop}}]
clusters: [{name: test, cluster: {server: "`+s.URL+`"}}]
users: [{name: test, user: {}}]
`), 0o600))
	return file
}

func start(tb testing.TB, kubeconfig string, args ...string) (code int, stdout, stderr string) {
	tb.Helper()
	file, err := program()
	require.NoError(tb, err)
	var out, errs bytes.Buffer
	cmd := exec.CommandContext(tb.Context(), file, args...)
	cmd.Env = append(os.Environ(), "KUBECONFIG="+kubeconfig)
	cmd.Stdout, cmd.Stderr = &out, &errs
	err = cmd.Run()
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		return exit.ExitCode(), out.String(), errs.String()
	}
	require.NoError(tb, err)
	return 0, out.String(), errs.String()
}

// questions are the commands that ask a cluster, but for those that ask speakers.
var questions = [][]string{
	{"status"}, {"explain", "service", "shop/web-0000"}, {"explain", "vip", "10.64.0.10"}, {"explain", "node", "worker-01"},
	{"explain", "pool", "lan"}, {"explain", "peer", "tor-a"}, {"bgp", "peers"}, {"bgp", "routes"}, {"simulate", "drain", "worker-01"},
	{"validate", "--live"}, {"diagnose"}, {"migrate", "metallb"},
}

// Without a cluster, every command soon prints a sentence about what it tried, and
// exits with 3.
func TestNoCluster(t *testing.T) {
	t.Parallel()
	s := serve(t, example.Size{})
	s.Close()
	s.URL = "http://127.0.0.1:1" // nobody takes it meanwhile, as with the one it had
	kubeconfig := s.kubeconfig(t)
	for _, args := range questions {
		code, out, errs := start(t, kubeconfig, args...)
		assert.Equal(t, 3, code, "%q", args)
		assert.Empty(t, out, "%q", args)
		assert.Contains(t, errs, "connection refused", "%q", args)
		assert.Contains(t, errs, strings.TrimPrefix(s.URL, "http://"), "%q: where it looked", args)
		assert.LessOrEqual(t, strings.Count(errs, "\n"), 1, "%q: once is enough: %s", args, errs)
	}
}

// forbid has the server refuse a resource, or everything, as RBAC does.
func (s *server) forbid(resource string) {
	s.fault = func(w http.ResponseWriter, r *http.Request) bool {
		if resource != "" && !strings.Contains(r.URL.Path+"/", "/"+resource+"/") {
			return false
		}
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(http.StatusForbidden)
		fmt.Fprintf(w, `{"kind":"Status","apiVersion":"v1","status":"Failure","reason":"Forbidden","code":403,"message":"%s is forbidden: \u001b[31mno\u001b[0m"}`, resource)
		return true
	}
}

// Each right that may be missing: the answer names it and has everything else, and
// by the exit code it is not complete.
func TestNoPermission(t *testing.T) {
	t.Parallel()
	const missing = "the answer is not complete: "
	for resource, want := range map[string]struct{ right, rest string }{
		"services":       {"list services in the whole cluster", "SPEAKERS       5 of 5 nodes ready"},
		"endpointslices": {"list endpointslices.discovery.k8s.io in the whole cluster", "SERVICES  20 served"},
		"nodes":          {"list nodes in the whole cluster", "SERVICES  20 served"},
		"configmaps":     {"get configmaps in namespace lodestone-system", "SPEAKERS       5 of 5 nodes ready"},
		"leases":         {"list leases.coordination.k8s.io in namespace lodestone-system", "SERVICES  20 served"},
		"pods":           {"list pods in namespace lodestone-system", "SERVICES  20 served"},
		"servicecidrs":   {"list servicecidrs.networking.k8s.io in the whole cluster", "SPEAKERS       5 of 5 nodes ready"},
	} {
		s := serve(t, example.Size{Nodes: 5, Services: 20})
		s.forbid(resource)
		code, out, errs := s.run(t, "status")
		assert.Equal(t, 3, code, "%s: %s", resource, out)
		assert.Contains(t, out, "you need the right to "+want.right, resource)
		assert.Contains(t, out, want.rest, resource)
		assert.NotContains(t, out, "All is well", resource)
		assert.Contains(t, errs, missing, resource)
		assert.NotContains(t, out+errs, "\x1b", resource)
	}
	s := serve(t, example.Size{Nodes: 5, Services: 20})
	s.forbid("")
	for _, args := range questions {
		code, out, errs := s.run(t, args...)
		assert.Equal(t, 3, code, "%q: %s", args, out)
		assert.Contains(t, errs, "you need the right to ", "%q", args)
		assert.NotContains(t, out+errs, "\x1b", "%q", args)
	}
}

// The kubeconfig, its contexts and namespaces are chosen as kubectl does.
func TestContextsAndNamespaces(t *testing.T) {
	t.Parallel()
	one, other := serve(t, example.Size{Nodes: 1, Services: 5}), serve(t, example.Size{Nodes: 2, Services: 10})
	file := filepath.Join(t.TempDir(), "kubeconfig")
	require.NoError(t, os.WriteFile(file, []byte(`apiVersion: v1
kind: Config
current-context: one
contexts:
- {name: one, context: {cluster: one, user: nobody}}
- {name: other, context: {cluster: other, user: nobody, namespace: media}}
clusters:
- {name: one, cluster: {server: "`+one.URL+`"}}
- {name: other, cluster: {server: "`+other.URL+`"}}
users: [{name: nobody, user: {}}]
`), 0o600))
	const environment = "/does/not/exist"
	for want, args := range map[string][]string{
		"1 of 1 node ready":  {"status", "--kubeconfig", file},
		"2 of 2 nodes ready": {"status", "--kubeconfig", file, "--context", "other"},
		"media/api-0001":     {"explain", "service", "api-0001", "--kubeconfig", file, "--context", "other"},
		"shop/push-0005":     {"explain", "service", "push-0005", "--kubeconfig", file, "--context=other", "-n", "shop"},
		"shop/web-0000":      {"explain", "service", "shop/web-0000", "--kubeconfig=" + file, "--context=other"},
	} {
		code, out, errs := start(t, environment, args...)
		assert.Zero(t, code, "%q: %s", args, errs)
		assert.Contains(t, out, want, "%q", args)
	}
	code, _, errs := start(t, file, "explain", "service", "api-0001", "--context", "other", "-n", "shop")
	assert.Equal(t, 3, code)
	assert.Equal(t, "lodestone: there is no Service shop/api-0001\n", errs)
	code, _, errs = start(t, file, "status", "--context", "third")
	assert.Equal(t, 3, code)
	assert.Contains(t, errs, `kubeconfig: context "third" does not exist`)
}

// Before Kubernetes v1.33 there were no ServiceCIDRs.
func TestOldServer(t *testing.T) {
	t.Parallel()
	s := serve(t, example.Size{Nodes: 2, Services: 4})
	s.fault = func(w http.ResponseWriter, r *http.Request) bool {
		if strings.HasSuffix(r.URL.Path, "/servicecidrs") {
			http.NotFound(w, r)
			return true
		}
		return false
	}
	code, out, errs := s.run(t, "status")
	assert.Zero(t, code, out+errs)
	assert.Contains(t, out, "All is well.")
}

// An API server that does not answer, or whose answers make no sense, is reported.
func TestServersThatMakeNoSense(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		answer string
		length int // that is promised
		want   string
	}{
		"a proxy":    {"<html>502 Bad Gateway</html>", 28, "invalid character"},
		"half of it": {`{"kind": "ServiceList", "items": [`, 34, "unexpected"},
		"cut off":    {`{"kind": "ServiceList"`, 34, "unexpected EOF"},
	} {
		s := serve(t, example.Size{})
		s.fault = func(w http.ResponseWriter, _ *http.Request) bool {
			w.Header().Set("Content-Type", "application/json")
			w.Header().Set("Content-Length", strconv.Itoa(c.length))
			fmt.Fprint(w, c.answer)
			return true
		}
		code, out, errs := s.run(t, "status")
		assert.Equal(t, 3, code, name)
		assert.Empty(t, out, name)
		assert.Contains(t, errs, c.want, name)
		assert.Equal(t, 1, strings.Count(errs, "\n"), "%s: once is enough: %s", name, errs)
	}
}

// Size of the cluster that the figures are of.
var large = example.Size{Nodes: 50, Services: 10_000}

// BenchmarkCommands measures commands from start to end: the process starts, reads
// the cluster by HTTP, decides and prints.
func BenchmarkCommands(b *testing.B) {
	s := serve(b, large)
	kubeconfig := s.kubeconfig(b)
	for _, args := range [][]string{
		{"status"}, {"explain", "service", "shop/web-0000"}, {"explain", "vip", "10.64.0.10"}, {"explain", "node", "worker-01"},
		{"explain", "pool", "lan"}, {"explain", "peer", "tor-a"}, {"simulate", "lose", "worker-01"},
	} {
		b.Run(strings.Join(args[:min(2, len(args))], "-"), func(b *testing.B) {
			_, _, _ = start(b, kubeconfig, args...) // the answers are encoded now
			var children unix.Rusage
			require.NoError(b, unix.Getrusage(unix.RUSAGE_CHILDREN, &children))
			before := unix.TimevalToNsec(children.Utime) + unix.TimevalToNsec(children.Stime)
			for b.Loop() {
				code, out, errs := start(b, kubeconfig, args...)
				require.Zero(b, code, "%s%s", out, errs)
				require.NotEmpty(b, out)
			}
			require.NoError(b, unix.Getrusage(unix.RUSAGE_CHILDREN, &children))
			took := unix.TimevalToNsec(children.Utime) + unix.TimevalToNsec(children.Stime) - before
			b.ReportMetric(float64(took)/1e6/float64(b.N), "cpu-ms")
		})
	}
}

// No command waits for ever.
func TestHangingServerIsGivenUp(t *testing.T) {
	t.Parallel()
	s := serve(t, example.Size{})
	release := make(chan struct{})
	s.fault = func(_ http.ResponseWriter, r *http.Request) bool {
		select {
		case <-release:
		case <-r.Context().Done():
		}
		return true
	}
	defer close(release)
	file, err := program()
	require.NoError(t, err)
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Second) // less than the usual timeout
	defer cancel()
	var errs bytes.Buffer
	cmd := exec.CommandContext(ctx, file, "status", "--request-timeout=2s", "--kubeconfig", s.kubeconfig(t))
	cmd.Stderr = &errs
	err = cmd.Run()
	var exit *exec.ExitError
	require.ErrorAs(t, err, &exit)
	assert.Equal(t, 3, exit.ExitCode())
	assert.Contains(t, errs.String(), "the API server did not answer within 2s")
}
