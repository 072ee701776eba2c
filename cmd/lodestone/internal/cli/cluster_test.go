package cli

import (
	"context"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"

	"github.com/lodestone-lb/lodestone/controller/quarantinestore"
	"github.com/lodestone-lb/lodestone/controller/servicelb/ledger"
	"github.com/lodestone-lb/lodestone/inspect/cluster"
	"github.com/lodestone-lb/lodestone/inspect/simulation"
	"github.com/lodestone-lb/lodestone/pkg/annotation"
	"github.com/lodestone-lb/lodestone/pkg/config"
	"github.com/lodestone-lb/lodestone/pkg/kube"
	"github.com/lodestone-lb/lodestone/pkg/testapi"
	speakers "github.com/lodestone-lb/lodestone/speaker/plan"
)

func configMap(name, key, text string) *corev1.ConfigMap {
	return &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: config.Namespace, Name: name}, Data: map[string]string{key: text}}
}

func service(name, address string) *corev1.Service {
	svc := &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: name, UID: types.UID("uid-" + name)},
		Spec:       corev1.ServiceSpec{Type: corev1.ServiceTypeLoadBalancer, IPFamilies: []corev1.IPFamily{corev1.IPv4Protocol}},
	}
	if address != "" {
		svc.Annotations = map[string]string{annotation.Assigned: address}
		svc.Status.LoadBalancer.Ingress = []corev1.LoadBalancerIngress{{IP: address}}
	}
	return svc
}

// readCluster reads a cluster as the commands do.
func readCluster(t *testing.T, objects ...runtime.Object) (*simulation.Cluster, error) {
	t.Helper()
	target := &target{timeout: time.Minute,
		place: cluster.Place{Namespace: config.Namespace, ConfigName: config.ConfigMapName, Scope: kube.Scope{Classless: true}}}
	return target.read(t.Context(), testapi.New(objects...))
}

// Everything that the controller would decide by is read: a node's address is
// never handed out, one in quarantine is not free, labels of namespaces count.
func TestOperatorSeesWhatTheControllerSees(t *testing.T) {
	t.Parallel()
	w := &world{t: t}
	const pool = header + "quarantine: 1h\npools: [{name: lan, addresses: [203.0.113.10-203.0.113.12], namespaceSelector: {matchLabels: " +
		"{env: prod}}}]\n"
	w.add(
		configMap(config.ConfigMapName, config.Key, pool),
		configMap(quarantinestore.ConfigMapName, quarantinestore.Key,
			"version 1\n2999-01-01T00:00:00Z shop/gone 203.0.113.11 until 2999-01-01T01:00:00Z\n"),
		&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "shop", Labels: map[string]string{"env": "prod"}}},
		node("n1", "203.0.113.10", nil),
		service("has", "203.0.113.12"), service("waits", ""),
	)
	out := w.ask("", ExitFound, "explain", "service", "shop/waits")
	assert.Contains(t, out, "Refused     PoolExhausted: pool \"lan\" has 0 of 2 IPv4 addresses free (1 in quarantine, the next is free in")
	assert.Contains(t, out, "What helps  Widen a pool")

	next := filepath.Join(t.TempDir(), "next.yaml")
	require.NoError(t, os.WriteFile(next, []byte(header+"pools: [{name: lan, addresses: [203.0.113.13]}]\n"), 0o600))
	out = w.ask("", ExitFound, "plan", "--config", next)
	assert.Contains(t, out, "stranded   shop/has")
	assert.Contains(t, out, "satisfied  shop/waits")
	assert.Contains(t, out, "Services: 1 stranded, 1 newly satisfied\n")
	require.NoError(t, os.WriteFile(next, []byte(pool), 0o600))
	assert.NotContains(t, w.ask("", ExitOK, "plan", "--config", next), "kept")
	assert.Contains(t, w.ask("", ExitOK, "plan", "--config", next, "--all"), "kept")
}

// The classes are those that the controller which runs serves, unless a flag names others.
func TestClassesAreThoseOfTheControllerThatRuns(t *testing.T) {
	t.Parallel()
	w := &world{t: t}
	class := "example.com/edge"
	edge := service("edge", "")
	edge.Spec.LoadBalancerClass = &class
	controller := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: config.Namespace, Name: "lodestone-controller-1",
		Labels: map[string]string{"app.kubernetes.io/name": "lodestone", "app.kubernetes.io/component": "controller"}}}
	controller.Spec.Containers = []corev1.Container{{Args: []string{"--handle-classless=false",
		"--load-balancer-classes=lodestone.io/lodestone,example.com/edge"}}}
	w.add(configMap(config.ConfigMapName, config.Key, header+"pools: [{name: lan, addresses: [203.0.113.10]}]\n"),
		controller, service("classless", ""), edge)
	_, out := w.run("explain", "service", "shop/edge")
	assert.NotContains(t, out, "Served")
	_, out = w.run("explain", "service", "shop/classless")
	assert.Contains(t, out, "Served   no: ")
	_, out = w.run("explain", "service", "shop/edge", "--load-balancer-classes=lodestone.io/lodestone")
	assert.Contains(t, out, "Served   no: ")

	// migrate reads less of the cluster.
	c, err := readCluster(t, controller, edge)
	require.NoError(t, err)
	assert.Equal(t, kube.Scope{Classes: []string{annotation.DefaultClass, class}}, c.Scope)
}

// Who announces an address is decided by the speakers' own code.
func TestExplainShowsWhoAnnounces(t *testing.T) {
	var objects []runtime.Object
	for i, name := range []string{"n1", "n2", "n3", "n4", "n5", "n6", "n7"} {
		n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{"rack": "a"}}}
		n.Status.Addresses = []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: "198.18.0.1" + strconv.Itoa(i)}}
		if name == "n7" {
			n.Labels["rack"] = "b"
		}
		objects = append(objects, n, pod("speaker", name, "v0.4.0", true))
	}
	explain := func(code int, advertisements string) string {
		w := &world{t: t}
		w.add(objects...)
		w.add(service("web", "203.0.113.10"), endpoints("web", "n1"), configMap(config.ConfigMapName, config.Key, header+`
pools: [{name: lan, addresses: [203.0.113.10-203.0.113.12]}]
peers:
  - {name: tor-a, address: 198.18.0.1, localASN: 64512, peerASN: 64513}
  - {name: tor-b, address: 198.18.0.2, localASN: 64512, peerASN: 64513, nodeSelector: {matchLabels: {rack: b}}}
  - {name: tor-c, address: 198.18.0.3, peerASN: 64513}
advertisements: [`+advertisements+"]\n"))
		return w.ask("", code, "explain", "service", "web")
	}
	assert.Regexp(t, `Announced +203.0.113.10 by layer 2 from n\d\n`, explain(ExitOK, "{name: l2, layer2: {}}"))
	both := explain(ExitOK, "{name: both, layer2: {}, bgp: {}}")
	assert.Regexp(t, `Announced +203.0.113.10 by layer 2 from n\d\n`, both)
	assert.Contains(t, both, "           203.0.113.10 by BGP from n1, n2, n3, n4, n5 and 1 more to tor-a\n")
	assert.Contains(t, both, "           203.0.113.10 by BGP from n7 to tor-a, tor-b\n")
	none := explain(ExitFound, "{name: b, bgp: {peers: [tor-c], nodeSelector: {matchLabels: {rack: b}}}}")
	assert.Contains(t, none, "Silent      203.0.113.10 not from n7: NoSession: this node has no session with the BGP peers of the "+
		"advertisements: "+
		"peer \"tor-c\" has no localASN and node n7 no annotation lodestone.io/bgp-asn: set one of them\n"+
		"            203.0.113.10 not from n1, n2, n3, n4, n5 and 1 more: NodeNotSelected: the advertisements select other nodes\n")
	assert.Contains(t, none, "What helps  NoSession: "+speakers.Reasons()[speakers.NoSession].Cure)
	assert.Contains(t, explain(ExitFound, "{name: mail, serviceSelector: {matchLabels: {tier: mail}}, layer2: {}}"),
		"and 2 more: ServiceNotSelected: no serviceSelector")
}

func TestWithoutAConfigurationNothingIsAllocated(t *testing.T) {
	c, err := readCluster(t, service("web", ""))
	require.NoError(t, err)
	require.Equal(t, ledger.ConfigUnavailable, c.Explain(c.Services[0]).Verdict.Refusal.Reason)
}

// Whatever answers in the place of the API server, each command names what is wrong and what to do, in one line on the
// standard error, within the time that it may take.
func TestWhateverAnswersInThePlaceOfTheAPIServer(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "config.yaml")
	require.NoError(t, os.WriteFile(file, []byte(header+"pools: [{name: lan, addresses: [203.0.113.10]}]\n"), 0o600))
	commands := [][]string{{"status"}, {"validate", "--live"}, {"plan", "--config", file}, {"explain", "service", "web"},
		{"explain", "vip", "203.0.113.1"}, {"bgp", "peers"}, {"simulate", "lose", "n1"}, {"migrate", "metallb"}, {"migrate", "kube-vip"},
		{"diagnose"}, {"dashboard"}}
	const page, otherCluster = "text/html; charset=utf-8", "is it the right cluster (--context, --kubeconfig)"
	for name, is := range map[string]struct {
		code    int
		content string
		want    []string
	}{
		"who":         {http.StatusUnauthorized, "application/json", []string{"does not accept your credentials", "log in again"}},
		"not allowed": {http.StatusForbidden, "application/json", []string{"you need the right to"}},
		"broken":      {http.StatusInternalServerError, "application/json", []string{"error on the server"}},
		"login page":  {http.StatusOK, page, []string{"the answer is a web page (200 OK)", otherCluster}},
		"web server":  {http.StatusNotFound, page, []string{"the answer is a web page (404 Not Found)", otherCluster}},
		"balancer":    {http.StatusBadGateway, page, []string{"the answer is a web page (502 Bad Gateway)", otherCluster}},
		"hangs":       {0, "", []string{"did not answer"}},
		"gone":        {-1, "", []string{"connection refused", otherCluster}},
	} {
		ended := make(chan struct{})
		server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			if is.code == 0 {
				<-ended
				return
			}
			w.Header().Set("Content-Type", is.content)
			w.WriteHeader(is.code)
			_, _ = io.WriteString(w, "no")
		}))
		t.Cleanup(server.Close)
		t.Cleanup(func() { close(ended) })
		if is.code < 0 {
			server.Close()
		}
		kubeconfig := filepath.Join(t.TempDir(), "kubeconfig")
		require.NoError(t, os.WriteFile(kubeconfig, []byte(`{apiVersion: v1, kind: Config, current-context: a,
  clusters: [{name: a, cluster: {server: "`+server.URL+`"}}], contexts: [{name: a, context: {cluster: a}}]}`), 0o600))
		for _, args := range commands {
			code, out, err := run(t, "", append(args, "--kubeconfig", kubeconfig, "--request-timeout=300ms")...)
			assert.Equal(t, ExitFailed, code, "%s: %q", name, args)
			assert.Empty(t, out, "%s: %q", name, args)
			assert.Equal(t, 1, strings.Count(err, "\n"), "%s: %q: %s", name, args, err)
			assert.Equal(t, 1, strings.Count(err, "lodestone: "), "%s: %q: %s", name, args, err)
			for _, want := range is.want {
				assert.Contains(t, err, want, "%s: %q", name, args)
			}
		}
	}
}

// A proxy may redirect to the API server, or be overloaded for a moment, and send a page with that for people to read.
func TestPagesThatAreNotTheLastAnswer(t *testing.T) {
	t.Parallel()
	var busy atomic.Bool
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		path, moved := strings.CutPrefix(r.URL.Path, "/moved")
		switch {
		case moved:
			http.Redirect(w, r, path+"?"+r.URL.RawQuery, http.StatusMovedPermanently)
		case busy.CompareAndSwap(false, true):
			w.Header().Set("Content-Type", "text/html")
			w.Header().Set("Retry-After", "0")
			w.WriteHeader(http.StatusServiceUnavailable)
		default:
			w.Header().Set("Content-Type", "application/json")
			w.WriteHeader(http.StatusUnauthorized)
		}
	}))
	t.Cleanup(server.Close)
	kubeconfig := filepath.Join(t.TempDir(), "kubeconfig")
	require.NoError(t, os.WriteFile(kubeconfig, []byte(`{apiVersion: v1, kind: Config, current-context: a,
  clusters: [{name: a, cluster: {server: "`+server.URL+`/moved"}}], contexts: [{name: a, context: {cluster: a}}]}`), 0o600))
	code, _, err := run(t, "", "status", "--kubeconfig", kubeconfig)
	require.Equal(t, ExitFailed, code)
	require.Contains(t, err, "the API server does not accept your credentials")
	require.NotContains(t, err, "web page")
}

// As with kubectl, the timeout 0 is none.
func TestTimeoutZeroIsWithoutALimit(t *testing.T) {
	t.Parallel()
	free := &target{}
	require.NoError(t, free.within(t.Context(), func(ctx context.Context) error {
		_, bound := ctx.Deadline()
		require.False(t, bound)
		return ctx.Err()
	}))
	short := &target{timeout: time.Millisecond}
	err := short.within(t.Context(), func(ctx context.Context) error {
		<-ctx.Done()
		return ctx.Err()
	})
	require.EqualError(t, err, "the API server did not answer within 1ms (--request-timeout): context deadline exceeded")
	w := &world{t: t}
	w.add(configMap(config.ConfigMapName, config.Key, header+"pools: [{name: lan, addresses: [203.0.113.10]}]\n"))
	w.ask("", ExitOK, "validate", "--live", "--request-timeout=0")
}

func TestUnreachableClusterIsAnError(t *testing.T) {
	t.Setenv("KUBECONFIG", t.TempDir()+"/missing")
	code, out, err := run(t, "", "explain", "service", "web", "--kubeconfig", t.TempDir()+"/none")
	assert.Equal(t, ExitFailed, code)
	assert.Empty(t, out)
	assert.Contains(t, err, "none: no such file or directory")
	code, _, err = run(t, "", "validate", "--live", "--kubeconfig", t.TempDir()+"/none")
	assert.Equal(t, ExitFailed, code)
	assert.Contains(t, err, "none: no such file or directory")
	code, _, err = run(t, "", "status")
	assert.Equal(t, ExitFailed, code)
	assert.Equal(t, "lodestone: which cluster? There is no kubeconfig, or nothing in it: see --kubeconfig, or the variable KUBECONFIG\n", err)
	code, _, err = run(t, "", "status", "--context", "other")
	assert.Equal(t, ExitFailed, code)
	assert.Contains(t, err, `lodestone: kubeconfig: context "other" does not exist`)
	code, _, err = run(t, "", "plan")
	assert.Equal(t, ExitFailed, code)
	assert.Contains(t, err, "which configuration?")
}
