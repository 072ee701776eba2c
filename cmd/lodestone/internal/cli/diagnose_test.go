package cli

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/netip"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/kubernetes"

	"github.com/lodestone-lb/lodestone/inspect/diagnosis"
	"github.com/lodestone-lb/lodestone/pkg/annotation"
	"github.com/lodestone-lb/lodestone/pkg/config"
	"github.com/lodestone-lb/lodestone/pkg/diagnose"
	"github.com/lodestone-lb/lodestone/pkg/report"
)

// fakePods are speakers that answer.
type fakePods struct {
	facts map[string]diagnose.Facts
	// texts are answers at /status, logs the logs, by pod.
	texts, logs map[string]string
	refused     error // what asking for a token ends with
	ahead       time.Duration

	mu    sync.Mutex
	asked map[string]url.Values // by node
}

func (p *fakePods) ask(context.Context, kubernetes.Interface, string) (diagnosis.Pods, *diagnose.Clock, error) {
	if p.refused != nil {
		return p, nil, p.refused
	}
	return p, &diagnose.Clock{Uncertainty: time.Second}, nil
}

func (p *fakePods) Get(_ context.Context, pod *corev1.Pod, path string, query url.Values) ([]byte, error) {
	if path == "/status" {
		return []byte(p.texts[pod.Name]), nil
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.asked[pod.Spec.NodeName] = query
	f, ok := p.facts[pod.Spec.NodeName]
	if !ok {
		return nil, apierrors.NewGenericServerResponse(http.StatusNotFound, "get", schema.GroupResource{Resource: "pods"}, pod.Name,
			"404 page not found", 0, true)
	}
	f.Received, f.Sent = time.Now().Add(p.ahead), time.Now().Add(p.ahead)
	f.Active = query.Get(diagnose.ParamActive) == "true"
	return json.Marshal(f)
}

func (p *fakePods) Log(_ context.Context, pod *corev1.Pod, previous bool) ([]byte, error) {
	if previous {
		return nil, errors.New("previous terminated container not found")
	}
	return []byte(p.logs[pod.Name]), nil
}

// diagnosed is newWorld with speakers that report healthy nodes.
func diagnosed(t *testing.T) *world {
	w := newWorld(t)
	w.pods = &fakePods{facts: map[string]diagnose.Facts{}, texts: map[string]string{}, logs: map[string]string{},
		asked: map[string]url.Values{}}
	for i, name := range []string{"n1", "n2", "n3"} {
		f := diagnose.Facts{
			Node: name, Version: "v0.4.0", Alive: []string{"n1", "n2", "n3"}, Capabilities: 1 << 13, DefaultRoutes: []string{"eth0"},
			Conditions: []diagnose.Condition{{Name: "caches", OK: true, Message: "synced"}},
			Interfaces: []diagnose.Interface{{Name: "eth0", HardwareAddr: fmt.Sprintf("02:00:00:00:00:0%d", i+1), Up: true, MTU: 1500,
				Addrs: []netip.Prefix{netip.PrefixFrom(netip.AddrFrom4([4]byte{203, 0, 113, byte(i + 1)}), 24)}}},
			Sysctls: map[string]int{diagnose.SysctlForward4: 1},
		}
		for _, of := range []string{"all", "eth0"} {
			for _, setting := range diagnose.InterfaceSettings {
				f.Sysctls[diagnose.Sysctl(of, setting)] = 1
			}
		}
		w.pods.facts[name] = f
		w.pods.texts["lodestone-speaker-"+name] = `{"node":"` + name + `"}`
	}
	return w
}

func (w *world) change(node string, f func(*diagnose.Facts)) {
	facts := w.pods.facts[node]
	f(&facts)
	w.pods.facts[node] = facts
}

func TestDiagnosisOfAHealthyCluster(t *testing.T) {
	t.Parallel()
	w := diagnosed(t)
	w.ask("diagnose-healthy.txt", ExitOK, "diagnose")
	assert.Empty(t, w.pods.asked["n1"], "nothing is probed unless somebody asks for it")

	// Each VIP is tried by the node after its owner, at a port if it has one.
	w.ask("diagnose-active.txt", ExitOK, "diagnose", "--active")
	tried := 0
	for _, query := range w.pods.asked {
		assert.Equal(t, "true", query.Get(diagnose.ParamActive))
		tried += len(query[diagnose.ParamVIP])
	}
	assert.Equal(t, 2, tried, "198.51.100.1 is the routers'")
}

func TestDiagnosisOfABadNight(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) { // clocks are compared
		w := diagnosed(t)
		off := func(f *diagnose.Facts) { f.Sysctls[diagnose.SysctlForward4] = 0 }
		w.change("n1", off)
		w.change("n2", off)
		w.change("n2", func(f *diagnose.Facts) { f.Alive = []string{"n1", "n2"} })
		w.change("n3", func(f *diagnose.Facts) { f.Interfaces[0].MTU = 9000 })
		w.change("n3", func(f *diagnose.Facts) {
			f.Detection = &diagnose.Detection{Heartbeat: 25, Silence: 85, AccusedAt: time.Now().UTC(),
				Late: report.Late{Milliseconds: 412, At: time.Now().UTC(), Times: 7}}
		})
		w.pods.ahead = 5 * time.Second
		w.add(&appsv1.DaemonSet{ObjectMeta: metav1.ObjectMeta{Namespace: "metallb-system", Name: "speaker"}, Spec: appsv1.DaemonSetSpec{
			Template: corev1.PodTemplateSpec{Spec: corev1.PodSpec{Containers: []corev1.Container{{Image: "quay.io/metallb/speaker:v0.15.2"}}}}}})
		w.ask("diagnose-bad-night.txt", ExitFound, "diagnose", "--active")
	})
}

// What keeps nodes from direct forwarding is found: the capability that the chart gives, and what
// a speaker reports of itself.
func TestDiagnosisOfDirectForwarding(t *testing.T) {
	t.Parallel()
	w := diagnosed(t)
	object[*corev1.ConfigMap](w, config.ConfigMapName).Data[config.Key] = strings.Replace(configured, "layer2: {}",
		"layer2: {forwarding: direct}", 1)
	w.change("n1", func(f *diagnose.Facts) { f.Forwarding = &diagnose.Forwarding{Error: "operation not permitted"} })
	text := w.ask("", ExitFound, "diagnose")
	assert.Contains(t, text, "the speaker lacks NET_ADMIN, as is needed for direct forwarding")
	assert.Contains(t, text, "WARNING  direct-forwarding  node n1\n")
}

// A speaker that does not answer is named, and what it alone knows is not taken
// for well.
func TestDiagnosisNamesWhoIsMissing(t *testing.T) {
	t.Parallel()
	w := diagnosed(t)
	delete(w.pods.facts, "n2")
	text := w.ask("", ExitFailed, "diagnose")
	assert.Contains(t, text, "2 of 3 speakers answered")
	assert.Contains(t, text, "UNKNOWN  complete  node n2")
	assert.Contains(t, text, "pod lodestone-speaker-n2 does not answer")
	assert.Contains(t, text, "a speaker of an older version cannot be diagnosed")
	assert.Contains(t, text, "the diagnosis is not complete")

	// Its pod is gone altogether: that is worse.
	w.drop("lodestone-speaker-n2")
	w.client = nil
	w.add(lease("n2", map[string]string{annotation.Report: `{"segments": ["203.0.113.0/24 eth0"]}`}))
	text = w.ask("", ExitFailed, "diagnose")
	assert.Contains(t, text, "node n2: no speaker pod")
	assert.Contains(t, text, "nothing is known of the node itself: no speaker pod")
}

func TestDiagnosisReportsWhichRightIsMissing(t *testing.T) {
	t.Parallel()
	w := diagnosed(t)
	w.pods.refused = errors.New("you may not ask the speakers: you need the right to create serviceaccounts/token")
	text := w.ask("", ExitFailed, "diagnose")
	assert.Contains(t, text, "you may not ask the speakers")
	assert.Contains(t, text, "UNKNOWN  ip-forward  cluster\n  undecided: no speaker reported on its node")
	assert.NotContains(t, text, "ok: arp")

	w = diagnosed(t)
	w.refuse("list", "daemonsets")
	text = w.ask("", ExitFailed, "diagnose")
	assert.Contains(t, text, "you need the right to list daemonsets.apps in the whole cluster")
	assert.Contains(t, text, "UNKNOWN  other-implementation")

	w.refuse("list", "pods")
	text = w.ask("", ExitFailed, "diagnose")
	assert.Contains(t, text, "you need the right to list pods in namespace lodestone-system")
	assert.NotContains(t, text, "no speaker pod")

	w.refuse("*", "*")
	text = w.ask("", ExitFailed, "diagnose")
	assert.Contains(t, text, "you need the right to ")
	assert.Equal(t, 1, strings.Count(text, "\n"), "nothing could be read: one sentence is enough: %s", text)
}

func TestDiagnosisWithAnInvalidConfiguration(t *testing.T) {
	t.Parallel()
	w := diagnosed(t)
	object[*corev1.ConfigMap](w, config.ConfigMapName).Data[config.Key] = header + "pool: []\n"
	text := w.ask("", ExitFailed, "diagnose")
	assert.Contains(t, text, "WARNING  configuration  cluster\n  ConfigMap lodestone-system/lodestone-config is invalid")
	assert.Contains(t, text, "UNKNOWN  bgp  cluster\n  undecided")
}

func TestDiagnosisForPrograms(t *testing.T) {
	t.Parallel()
	w := diagnosed(t)
	w.change("n1", func(f *diagnose.Facts) { f.Sysctls[diagnose.SysctlForward4] = 0 })
	var d diagnosis.Diagnosis
	require.NoError(t, json.Unmarshal([]byte(w.ask("", ExitFound, "diagnose", "-o", "json")), &d))
	assert.Equal(t, diagnose.Finding{Check: diagnose.IPForward, Severity: diagnose.Error, Nodes: []string{"n1"},
		Message: "net/ipv4/ip_forward is 0: packets to VIPs are not forwarded to pods", Hint: "sysctl -w net/ipv4/ip_forward=1"}, d.Findings[0])
	assert.Equal(t, 3, d.Answered)
	assert.Equal(t, []diagnose.ID{diagnose.MembershipPort, diagnose.Neighbours, diagnose.Reach}, d.NotRun)
}

// Others are found by what they leave on Services, or by their pods; what is
// left of one that is gone is no evidence.
func TestOtherImplementationsAreFound(t *testing.T) {
	t.Parallel()
	deployment := func(image string, args ...string) *appsv1.Deployment {
		return &appsv1.Deployment{ObjectMeta: metav1.ObjectMeta{Namespace: "lb", Name: "other"}, Spec: appsv1.DeploymentSpec{
			Template: corev1.PodTemplateSpec{Spec: corev1.PodSpec{Containers: []corev1.Container{{Image: image, Args: args}}}}}}
	}
	marked := func(w *world) {
		object[*corev1.Service](w, "web").Annotations["metallb.io/ip-allocated-from-pool"] = "old"
	}
	for name, c := range map[string]struct {
		plant func(w *world)
		want  string
	}{
		"runs": {func(w *world) { w.add(deployment("quay.io/metallb/controller:v1")) },
			"WARNING  other-implementation  cluster\n  MetalLB is installed, and may handle Services that Lodestone serves: Deployment lb/other"},
		"has its class": {func(w *world) { w.add(deployment("quay.io/metallb/controller:v1", "--lb-class=metallb")) }, ""},
		"left a mark":   {marked, ""},
		"runs and marked": {func(w *world) { marked(w); w.add(deployment("metallb/controller")) },
			"ERROR  other-implementation  cluster\n  MetalLB handles Services that Lodestone serves: it has left its mark on shop/web"},
		"gave an address": {func(w *world) {
			svc := object[*corev1.Service](w, "web")
			svc.Status.Conditions = []metav1.Condition{{Type: "cilium.io/IPAMRequestSatisfied"}}
			svc.Status.LoadBalancer.Ingress = append(svc.Status.LoadBalancer.Ingress, corev1.LoadBalancerIngress{IP: "192.0.2.99"})
		}, "ERROR  other-implementation  cluster\n  the LB IPAM of Cilium handles"},
	} {
		w := diagnosed(t)
		c.plant(w)
		want := ExitOK
		if c.want != "" {
			want = ExitFound
		}
		assert.Contains(t, w.ask("", want, "diagnose"), c.want, name)
	}
}

// What somebody hands on with a ticket has no secrets: not those of Secrets,
// which are not read, and not those that people wrote where they do not belong.
func TestBundleHasNoSecrets(t *testing.T) {
	t.Parallel()
	const password, key, token = "hunter2-of-tor-a", "correct-horse-battery-staple", "eyJhbGciOiJSUzI1NiJ9.eyJzdWIiOiJhZG1pbiJ9.c2lnbmF0dXJl"
	w := diagnosed(t)
	w.add(
		&corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: config.Namespace, Name: "lodestone-membership"},
			Data: map[string][]byte{"key": []byte(key)}},
		&corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: config.Namespace, Name: "tor-a"},
			Data: map[string][]byte{"password": []byte(password)}},
		&corev1.Event{ObjectMeta: metav1.ObjectMeta{Namespace: config.Namespace, Name: "e1"},
			InvolvedObject: corev1.ObjectReference{Kind: "ConfigMap", Name: "lodestone-config"},
			Reason:         "Invalid", Message: "password: " + password + " is not a key"},
		&corev1.Event{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "e2"}, Source: corev1.EventSource{Component: "lodestone-controller"},
			InvolvedObject: corev1.ObjectReference{Kind: "Service", Namespace: "shop", Name: "web"}, Reason: "Allocated",
			Message: "gave 203.0.113.10"},
	)
	// Who mistook the configuration for the place of a password.
	cm := object[*corev1.ConfigMap](w, config.ConfigMapName)
	cm.Data[config.Key] = strings.Replace(configured, "address: 192.0.2.1,", "address: 192.0.2.1, password: "+password+",", 1) +
		"# the membership key: " + key + "\nmembershipKey: |\n  " + key + "\n"
	cm.Annotations = map[string]string{"kubectl.kubernetes.io/last-applied-configuration": `{"password":"` + password + `"}`}
	web := object[*corev1.Service](w, "web")
	web.Annotations["example.com/api-token"] = token
	speaker := object[*corev1.Pod](w, "lodestone-speaker-n1")
	speaker.Spec.Containers[0].Env = []corev1.EnvVar{{Name: "LODESTONE_MEMBERSHIP_KEY", Value: key}}
	speaker.Status.ContainerStatuses = []corev1.ContainerStatus{{RestartCount: 1}}
	w.pods.logs["lodestone-speaker-n1"] = "msg=starting LODESTONE_MEMBERSHIP_KEY=" + key + "\nlevel=WARN err=\"Authorization: Bearer " +
		token + "\"\n" +
		"msg=\"dial https://admin:" + password + "@api:6443\" vip=203.0.113.10\n-----BEGIN RSA PRIVATE KEY-----\n" + key +
		"\n-----END RSA PRIVATE KEY-----\nmsg=ready\n"
	w.pods.texts["lodestone-speaker-n1"] = `{"node":"n1","bgp":[{"Name":"tor-a","Password":"` + password +
		`","token":null,"LastError":"password=\"` + password + `\" refused"}]}`

	name := filepath.Join(t.TempDir(), "ticket.tar.gz")
	text := w.ask("", ExitFailed, "diagnose", "--bundle", name) // the configuration is invalid now
	assert.Contains(t, text, "wrote "+name)
	files := unpack(t, name)
	for file, content := range files {
		for _, secret := range []string{password, key, token, "c2lnbmF0dXJl"} {
			assert.NotContains(t, content, secret, file)
		}
		if strings.HasSuffix(file, ".json") {
			assert.True(t, json.Valid([]byte(content)), "%s: %s", file, content)
		}
	}
	for _, a := range w.client.Actions() {
		assert.NotEqual(t, "secrets", a.GetResource().Resource, "Secrets are not read")
	}

	// What helps is there.
	for file, want := range map[string]string{
		"README.txt": "REDACTED", "diagnosis.txt": "configuration", "diagnosis.json": `"check": "configuration"`, "status.txt": "CONFIGURATION",
		"facts/n2.json": diagnose.SysctlForward4, "versions.json": "v0.4.0", "config.yaml": "address: 192.0.2.1", "services.json": "203.0.113.10",
		"leases.json": "203.0.113.0/24 eth0", "events.json": "gave 203.0.113.10", "pods.json": "lodestone-speaker-n2",
		"speakers/n1.json":              "tor-a",
		"logs/lodestone-speaker-n1.log": "msg=ready",
		"missing.txt":                   "logs/lodestone-speaker-n1.before.log: previous terminated container not found",
	} {
		assert.Contains(t, files[file], want, file)
	}

	// An archive is not overwritten, and half of one does not stay.
	assert.Equal(t, "lodestone: "+name+" is there already: name another file for the archive\n",
		w.ask("", ExitFailed, "diagnose", "--bundle", name), "before anybody waits")
	assert.Regexp(t, "^lodestone: no place for the archive: .*: no such file or directory\n$",
		w.ask("", ExitFailed, "diagnose", "--bundle", filepath.Join(t.TempDir(), "no", "such")))
	info, err := os.Stat(name)
	require.NoError(t, err)
	assert.Equal(t, os.FileMode(0o600), info.Mode().Perm())
}

// unpack returns the files of an archive, without the folder they are in.
func unpack(t *testing.T, name string) map[string]string {
	t.Helper()
	raw, err := os.ReadFile(name)
	require.NoError(t, err)
	compressed, err := gzip.NewReader(bytes.NewReader(raw))
	require.NoError(t, err)
	files := map[string]string{}
	for r := tar.NewReader(compressed); ; {
		header, err := r.Next()
		if errors.Is(err, io.EOF) {
			return files
		}
		require.NoError(t, err)
		content, err := io.ReadAll(r)
		require.NoError(t, err)
		_, file, _ := strings.Cut(header.Name, "/")
		files[file] = string(content)
	}
}
