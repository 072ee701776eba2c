// Package chart_test holds the Helm chart to what it promises: the output is
// reviewed in testdata, every object is a valid one of its kind, bad values
// are refused, and nobody is given more rights than they need.
package chart_test

import (
	"bytes"
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/client-go/kubernetes/scheme"
	"sigs.k8s.io/yaml"

	"github.com/lodestone-lb/lodestone/test/e2e/program"
)

var update = flag.Bool("update", false, "write the rendered files instead of comparing with them")

const (
	root      = "../../.."
	chart     = root + "/deploy/chart"
	manifests = root + "/deploy/manifests"
)

var builder = program.Builder{Root: absolute(root), Progress: func(format string, args ...any) {
	fmt.Fprintf(os.Stderr, format+"\n", args...)
}}

var helmBinary = sync.OnceValues(func() (string, error) { return builder.Helm(context.Background()) })

func absolute(path string) string {
	abs, err := filepath.Abs(path)
	if err != nil {
		panic(err)
	}
	return abs
}

// helm runs helm and returns what it printed.
func helm(t *testing.T, args ...string) (string, error) {
	t.Helper()
	binary, err := helmBinary()
	if err != nil {
		t.Fatalf("build helm: %v", err)
	}
	var stdout, stderr bytes.Buffer
	cmd := exec.Command(binary, args...)
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if err := cmd.Run(); err != nil {
		return "", fmt.Errorf("helm %s: %w\n%s%s", args[0], err, stdout.Bytes(), stderr.Bytes())
	}
	return stdout.String(), nil
}

// template renders the chart as `helm install` in a cluster would.
func template(t *testing.T, args ...string) (string, error) {
	t.Helper()
	return helm(t, append([]string{"template", "lodestone", chart, "--namespace", "lodestone-system", "--kube-version",
		"v1.36.0"}, args...)...)
}

// renderings are what render has returned, by its arguments. The tests are not parallel.
var renderings = map[string]string{}

// render renders the chart with a file of values, once for the same file and flags: most of the tests look at the
// same rendering, and helm takes longer than all that they look at.
func render(t *testing.T, values string, flags ...string) string {
	t.Helper()
	args := append([]string{"--values", values}, flags...)
	key := strings.Join(args, "\n")
	if renderings[key] == "" {
		out, err := template(t, args...)
		if err != nil {
			t.Fatal(err)
		}
		renderings[key] = out
	}
	return renderings[key]
}

func TestLint(t *testing.T) {
	if _, err := helm(t, "lint", "--strict", chart); err != nil {
		t.Error(err)
	}
}

// membershipKey is random in every rendering.
var membershipKey = regexp.MustCompile(`(?m)^  key: [A-Za-z0-9+/]{64}$`)

func TestRender(t *testing.T) {
	for _, name := range []string{"default", "existing", "single"} {
		t.Run(name, func(t *testing.T) {
			out := render(t, filepath.Join("testdata", name+".values.yaml"))
			compare(t, filepath.Join("testdata", name+".golden.yaml"), membershipKey.ReplaceAllString(out, "  key: RANDOM"))
			if n := len(objects(t, out)); n < 10 {
				t.Errorf("%d objects", n)
			}
		})
	}
	t.Run("a configuration of comments alone", func(t *testing.T) {
		compare(t, filepath.Join("testdata", "default.golden.yaml"),
			membershipKey.ReplaceAllString(render(t, filepath.Join("testdata", "default.values.yaml"), "--set=config=null"), "  key: RANDOM"))
	})
	t.Run("manifests", func(t *testing.T) {
		header, err := os.ReadFile(filepath.Join(manifests, "header.txt"))
		if err != nil {
			t.Fatal(err)
		}
		out := render(t, filepath.Join(manifests, "values.yaml"))
		compare(t, filepath.Join(manifests, "lodestone.yaml"), string(header)+out)
		all := objects(t, out)
		for name := range find[corev1.Secret](all) {
			t.Errorf("applying the manifests again would overwrite the operator's Secret %s", name)
		}
		for name, cm := range find[corev1.ConfigMap](all) {
			if len(cm.Data) > 0 {
				t.Errorf("applying the manifests again would overwrite what is in ConfigMap %s", name)
			}
		}
	})
}

func compare(t *testing.T, path, got string) {
	t.Helper()
	if *update {
		if err := os.WriteFile(path, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if got != string(want) {
		t.Errorf("%s is not what the chart renders: run `make manifests` and review the difference", path)
	}
}

// objects decodes a rendering; a field that its kind does not have is an error.
func objects(t *testing.T, rendered string) []runtime.Object {
	t.Helper()
	decoder := serializer.NewCodecFactory(scheme.Scheme, serializer.EnableStrict).UniversalDeserializer()
	var decoded []runtime.Object
	for _, doc := range strings.Split(rendered, "\n---\n") {
		if strings.TrimSpace(doc) == "" {
			continue
		}
		o, _, err := decoder.Decode([]byte(doc), nil, nil)
		if err != nil {
			t.Fatalf("%v in\n%s", err, doc)
		}
		decoded = append(decoded, o)
	}
	return decoded
}

// find returns the objects of a type by name.
func find[T any, P interface {
	*T
	GetName() string
}](all []runtime.Object) map[string]P {
	found := map[string]P{}
	for _, o := range all {
		if p, ok := o.(P); ok {
			found[p.GetName()] = p
		}
	}
	return found
}

func TestBadValuesAreRefused(t *testing.T) {
	tests := []struct{ set, want string }{
		{"speakers.port=1", "speakers"},
		{"controller.replica=3", "replica"},
		{"controller.replicas=two", "replicas"},
		{"controller.replicas=-1", "replicas"},
		{"controller.port=443", "port"},
		{"controller.port=70000", "port"},
		{"controller.port=9743", "controller.port and speaker.port are both 9743"},
		{"membership.port=10258", "controller.port and membership.port are both 10258"},
		{"speaker.port=9744", "speaker.port and membership.port are both 9744"},
		{"controller.handleClassless=maybe", "handleClassless"},
		{"controller.dhcp.enabled=maybe", "enabled"},
		{"controller.loadBalancerClasses={a b}", "loadBalancerClasses"},
		{"controller.handleClassless=false,controller.loadBalancerClasses=null", "would serve no Service at all"},
		{"controller.extraArgs={v=4}", "extraArgs"},
		{"controller.nodeSelector.a=1", "nodeSelector"},
		{"image.pullPolicy=Sometimes", "pullPolicy"},
		{"image.registry=", "registry"},
		{"image.tag=a/b", "tag"},
		{"dashboard.enabled=maybe", "enabled"},
		{"admission.enabled=maybe", "enabled"},
		{"admission.failurePolicy=Fail", "failurePolicy"},
		{"config=none", "config"},
		{"config.kind=Pool", "kind"},
		{"config.pools=lan", "pools"},
		{"config.peers=tor", "peers"},
		{"monitoring.prometheusRule.runbooks=docs/", "runbooks"},
		{"monitoring.prometheusRule.enabled=true,monitoring.prometheusRule.runbooks=null", "upgrade with --reset-then-reuse-values"},
		{"flowControl=null", "upgrade with --reset-then-reuse-values"},
		{"controller=null", "missing property 'controller'"},
		{"existingConfigMap=My_Config", "existingConfigMap"},
		{"existingConfigMap=mine,config.peers[0].passwordSecretRef.name=tor", "list Secret tor in speaker.bgp.passwordSecrets"},
		{"membership.key=secret", "key"},
		{"speaker.updateStrategy.maxUnavailable=0", "maxUnavailable"},
		{"speaker.terminationGracePeriodSeconds=0", "terminationGracePeriodSeconds"},
		{"speaker.terminationGracePeriodSeconds=7", "a speaker with --hand-over=6s (speaker.extraArgs) cannot hand over and end"},
		{"speaker.extraArgs={--hand-over=1m}", "terminationGracePeriodSeconds: in 20 s a speaker with --hand-over=1m"},
		{"speaker.extraArgs={--hand-over=1s,-hand-over=18.5s}", "--hand-over=18.5s (speaker.extraArgs) cannot hand over and end, and " +
			"would be killed before: set it to 21 or more, or shorten --hand-over"},
		{"speaker.extraArgs={--drain=19s}", "set it to 21 or more, or shorten --drain"},
		{"speaker.tolerations[0].operator=Is", "operator"},
	}
	for _, tt := range tests {
		t.Run(tt.set, func(t *testing.T) {
			_, err := template(t, "--set", tt.set)
			if err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("err = %v, want one that names %q", err, tt.want)
			}
		})
	}
}

// An upgrade with a Secret or a ConfigMap that has the name of the chart's own would delete it, unless Helm keeps it. An object that
// was made by hand in place of the chart's has none of Helm's annotations, and is deleted as well.
func TestUpgradesDoNotDeleteWhatTheyName(t *testing.T) {
	const keep = `"annotations": {"helm.sh/resource-policy": "keep"}`
	const installed = `"annotations": {"meta.helm.sh/release-name": "lodestone", "meta.helm.sh/release-namespace": "lodestone-system"}`
	for _, value := range []struct{ key, path, own string }{
		{"membership.existingSecret", "secrets", "lodestone-membership"},
		{"existingConfigMap", "configmaps", "lodestone-config"},
	} {
		for _, test := range []struct {
			title, name, metadata string
			upgrade, refused      bool
		}{
			{"the chart's", value.own, installed, true, true},
			{"made by hand", value.own, `"labels": {}`, true, true},
			{"not there", value.own, "", true, true},
			{"kept", value.own, keep, true, false},
			{"a copy with all that the chart's has", "mine", installed, true, false},
			{"the first installation", value.own, `"labels": {}`, false, false},
		} {
			t.Run(value.key+"/"+test.title, func(t *testing.T) {
				flags := []string{"--dry-run=server", "--kube-apiserver=" + apiServer(t, value.path+"/"+test.name, test.metadata),
					"--set=" + value.key + "=" + test.name}
				if test.upgrade {
					flags = append(flags, "--is-upgrade")
				}
				_, err := template(t, flags...)
				if refused := err != nil && strings.Contains(err.Error(), "has the name of the release's own"); refused != test.refused ||
					err != nil && !refused {
					t.Errorf("err = %v, want it refused: %v", err, test.refused)
				}
			})
		}
	}
}

// apiServer is an API server with one object of the namespace, or without it if it has no metadata, and returns its address.
func apiServer(t *testing.T, object, metadata string) string {
	t.Helper()
	answers := map[string]string{"/api/v1": `{"kind": "APIResourceList", "groupVersion": "v1", "resources": [
		{"name": "secrets", "namespaced": true, "kind": "Secret"}, {"name": "configmaps", "namespaced": true, "kind": "ConfigMap"}]}`}
	if kind, name, _ := strings.Cut(object, "/"); metadata != "" {
		answers["/api/v1/namespaces/lodestone-system/"+object] = fmt.Sprintf(`{"apiVersion": "v1", "kind": %q, "metadata": {"name": %q, %s}}`,
			map[string]string{"secrets": "Secret", "configmaps": "ConfigMap"}[kind], name, metadata)
	}
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		answer, found := answers[r.URL.Path]
		if !found {
			w.WriteHeader(http.StatusNotFound)
			answer = `{"apiVersion": "v1", "kind": "Status", "status": "Failure", "reason": "NotFound", "code": 404}`
		}
		fmt.Fprint(w, answer)
	}))
	t.Cleanup(server.Close)
	return server.URL
}

// TestEveryValueIsDescribed compares values.yaml with the schema, key by key.
func TestEveryValueIsDescribed(t *testing.T) {
	var values map[string]any
	content, err := os.ReadFile(filepath.Join(chart, "values.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	if err := yaml.Unmarshal(content, &values); err != nil {
		t.Fatal(err)
	}
	var schema map[string]any
	content, err = os.ReadFile(filepath.Join(chart, "values.schema.json"))
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(content, &schema); err != nil {
		t.Fatal(err)
	}
	var walk func(path string, schema, values map[string]any)
	walk = func(path string, schema, values map[string]any) {
		properties, _ := schema["properties"].(map[string]any)
		for key := range values {
			if _, ok := properties[key]; !ok {
				t.Errorf("values.yaml has %s%s, which the schema refuses", path, key)
			}
		}
		for key, property := range properties {
			value, ok := values[key]
			if !ok && key != "global" {
				t.Errorf("the schema has %s%s, which values.yaml does not show", path, key)
			}
			p := property.(map[string]any)
			if v, ok := value.(map[string]any); ok && p["additionalProperties"] == false {
				walk(path+key+".", p, v)
			}
		}
	}
	walk("", schema, values)
}

// TestRights checks that bindings name roles and accounts that exist, that
// the pods use those accounts, and that nobody may do more than their part.
func TestRights(t *testing.T) {
	all := objects(t, render(t, "testdata/default.values.yaml"))
	accounts := find[corev1.ServiceAccount](all)
	roles, clusterRoles := find[rbacv1.Role](all), find[rbacv1.ClusterRole](all)

	check := func(name string, ref rbacv1.RoleRef, subjects []rbacv1.Subject) {
		known := roles[ref.Name] != nil && ref.Kind == "Role" || clusterRoles[ref.Name] != nil && ref.Kind == "ClusterRole" ||
			ref.Name == "extension-apiserver-authentication-reader"
		if !known {
			t.Errorf("binding %s: no %s %s", name, ref.Kind, ref.Name)
		}
		for _, s := range subjects {
			if accounts[s.Name] == nil || s.Namespace != "lodestone-system" {
				t.Errorf("binding %s: no account %s/%s", name, s.Namespace, s.Name)
			}
		}
	}
	for name, b := range find[rbacv1.RoleBinding](all) {
		check(name, b.RoleRef, b.Subjects)
	}
	for name, b := range find[rbacv1.ClusterRoleBinding](all) {
		check(name, b.RoleRef, b.Subjects)
	}
	for _, pod := range []corev1.PodSpec{deployment(t, all).Template.Spec, daemonSet(t, all).Template.Spec} {
		if accounts[pod.ServiceAccountName] == nil {
			t.Errorf("no account %q", pod.ServiceAccountName)
		}
	}

	var rules []rbacv1.PolicyRule
	for _, r := range roles {
		rules = append(rules, r.Rules...)
	}
	for _, r := range clusterRoles {
		rules = append(rules, r.Rules...)
	}
	for _, r := range rules {
		if slices.Contains(slices.Concat(r.Verbs, r.Resources, r.APIGroups), "*") {
			t.Errorf("wildcard in %v", r)
		}
		if slices.Contains(r.Resources, "secrets") {
			t.Errorf("nobody needs to read Secrets through the API: %v", r)
		}
		released := slices.Equal(r.ResourceNames, []string{"lodestone-quarantine", "lodestone-config-last-valid", "lodestone-status"}) ||
			slices.Equal(r.Verbs, []string{"create"})
		if slices.Contains(r.Resources, "configmaps") && !released && (len(r.ResourceNames) != 1 || mayWrite(r)) {
			t.Errorf("only our configuration to read, and what the controller writes: %v", r)
		}
	}
	for _, r := range clusterRoles["lodestone-speaker"].Rules {
		reviews := slices.Equal(r.Resources, []string{"tokenreviews"}) || slices.Equal(r.Resources, []string{"subjectaccessreviews"})
		if mayWrite(r) && !reviews {
			t.Errorf("a speaker may write: %v", r)
		}
	}
}

// The controller may change Nodes only if it initializes them, and their status only then or if it writes there which have
// routes.
func TestRightsToNodes(t *testing.T) {
	never := "--set=controller.nodeInitialization=never"
	for _, test := range []struct {
		flags         []string
		nodes, status bool
	}{
		{nil, true, true},
		{[]string{never}, false, false},
		{[]string{never, "--set=controller.clusterCIDR=10.0.0.0/8"}, false, true},
	} {
		may := map[string]bool{}
		role := find[rbacv1.ClusterRole](objects(t, render(t, "testdata/default.values.yaml", test.flags...)))["lodestone-controller"]
		for _, r := range role.Rules {
			for _, resource := range r.Resources {
				may[resource] = may[resource] || mayWrite(r)
			}
		}
		if may["nodes"] != test.nodes || may["nodes/status"] != test.status {
			t.Errorf("with %v it may change nodes: %v, nodes/status: %v", test.flags, may["nodes"], may["nodes/status"])
		}
	}
}

// A speaker may read the Secrets with the passwords of its peers, whether the configuration
// or the list names them, and no others.
func TestPasswordsOfPeers(t *testing.T) {
	for _, test := range []struct {
		name, values string
		want         []string
	}{
		{"of the configuration", "config: {peers: [{passwordSecretRef: {name: b, key: x}}, {name: open}, {passwordSecretRef: {name: a}}]}",
			[]string{"a", "b"}},
		{"and listed", "speaker: {bgp: {passwordSecrets: [c, a]}}\nconfig: {peers: [{passwordSecretRef: {name: a}}]}",
			[]string{"a", "c"}},
		{"of a ConfigMap that the chart cannot see", "existingConfigMap: mine\nspeaker: {bgp: {passwordSecrets: [a]}}\n" +
			"config: {peers: [{passwordSecretRef: {name: a}}]}", []string{"a"}},
		{"of a configuration that the controller will refuse", "config: {peers: [{passwordSecretRef: a}, {passwordSecretRef: {name: 1}}, {}]}",
			nil},
	} {
		t.Run(test.name, func(t *testing.T) {
			values := filepath.Join(t.TempDir(), "values.yaml")
			if err := os.WriteFile(values, []byte(test.values), 0o600); err != nil {
				t.Fatal(err)
			}
			var names []string
			for _, r := range find[rbacv1.Role](objects(t, render(t, values)))["lodestone-speaker"].Rules {
				if slices.Contains(r.Resources, "secrets") {
					names = append(names, r.ResourceNames...)
					if mayWrite(r) || len(r.ResourceNames) == 0 {
						t.Errorf("rule %v", r)
					}
				}
			}
			if !slices.Equal(names, test.want) {
				t.Errorf("it may read %q, want %q", names, test.want)
			}
		})
	}
}

func mayWrite(r rbacv1.PolicyRule) bool {
	return slices.ContainsFunc(r.Verbs, func(v string) bool { return !slices.Contains([]string{"get", "list", "watch"}, v) })
}

func deployment(t *testing.T, all []runtime.Object) appsv1.DeploymentSpec {
	t.Helper()
	d := find[appsv1.Deployment](all)["lodestone-controller"]
	if d == nil {
		t.Fatal("no Deployment lodestone-controller")
	}
	return d.Spec
}

func daemonSet(t *testing.T, all []runtime.Object) appsv1.DaemonSetSpec {
	t.Helper()
	d := find[appsv1.DaemonSet](all)["lodestone-speaker"]
	if d == nil {
		t.Fatal("no DaemonSet lodestone-speaker")
	}
	return d.Spec
}

// TestFlagsExist: the chart passes only flags that the binaries have.
func TestFlagsExist(t *testing.T) {
	dir, err := builder.Lodestone(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	all := objects(t, render(t, "testdata/default.values.yaml"))
	for binary, pod := range map[string]corev1.PodSpec{
		"lodestone-controller": deployment(t, all).Template.Spec,
		"lodestone-speaker":    daemonSet(t, all).Template.Spec,
	} {
		help, err := exec.CommandContext(t.Context(), filepath.Join(dir, binary), "--help").CombinedOutput()
		if err != nil {
			t.Fatalf("%s --help: %v\n%s", binary, err, help)
		}
		for _, arg := range pod.Containers[0].Args {
			name, _, _ := strings.Cut(arg, "=")
			if !regexp.MustCompile(`(?m)^\s*(-\w, )?` + name + `\b`).Match(help) {
				t.Errorf("%s has no flag %s", binary, name)
			}
		}
	}
}

// TestPodsAreConfined: read-only, no privilege that is not named, and only
// the speaker is root, and the controller if it asks for leases.
func TestPodsAreConfined(t *testing.T) {
	all := objects(t, render(t, "testdata/default.values.yaml"))
	limiting := objects(t, render(t, "testdata/default.values.yaml", "--set=speaker.connectionRateLimits=true"))
	routing := objects(t, render(t, "testdata/default.values.yaml", "--set=speaker.podRoutes=true"))
	forwarding := objects(t, render(t, "testdata/default.values.yaml", "--set=speaker.directForwarding=true"))
	bgp := objects(t, render(t, "testdata/default.values.yaml", "--set=speaker.bgp.passivePeers=true", "--set=speaker.bgp.realTimeBFD=true"))
	withDHCP := objects(t, render(t, "testdata/single.values.yaml"))
	tests := []struct {
		name string
		pod  corev1.PodSpec
		uid  int64
		adds []corev1.Capability
	}{
		{"controller", deployment(t, all).Template.Spec, 65532, nil},
		{"controller with DHCP", deployment(t, withDHCP).Template.Spec, 0, []corev1.Capability{"NET_RAW"}},
		{"speaker", daemonSet(t, all).Template.Spec, 0, []corev1.Capability{"NET_RAW"}},
		{"speaker with limits", daemonSet(t, limiting).Template.Spec, 0, []corev1.Capability{"NET_RAW", "NET_ADMIN"}},
		{"speaker with routes to pods", daemonSet(t, routing).Template.Spec, 0, []corev1.Capability{"NET_RAW", "NET_ADMIN"}},
		{"speaker that forwards directly", daemonSet(t, forwarding).Template.Spec, 0, []corev1.Capability{"NET_RAW", "NET_ADMIN"}},
		{"speaker with passive peers and BFD", daemonSet(t, bgp).Template.Spec, 0,
			[]corev1.Capability{"NET_RAW", "NET_BIND_SERVICE", "SYS_NICE"}},
	}
	for _, tt := range tests {
		c := tt.pod.Containers[0]
		t.Run(tt.name, func(t *testing.T) {
			s := c.SecurityContext
			uid := s.RunAsUser
			if uid == nil {
				uid = tt.pod.SecurityContext.RunAsUser
			}
			if *uid != tt.uid {
				t.Errorf("uid %d, want %d", *uid, tt.uid)
			}
			if n := s.RunAsNonRoot; tt.uid == 0 && tt.pod.SecurityContext.RunAsNonRoot != nil && (n == nil || *n) {
				t.Error("the kubelet would refuse to run it as root")
			}
			if !*s.ReadOnlyRootFilesystem || *s.AllowPrivilegeEscalation || s.Privileged != nil {
				t.Errorf("not confined: %+v", s)
			}
			if !slices.Equal(s.Capabilities.Drop, []corev1.Capability{"ALL"}) || !slices.Equal(s.Capabilities.Add, tt.adds) {
				t.Errorf("capabilities %+v, want only %v", s.Capabilities, tt.adds)
			}
			if tt.pod.SecurityContext.SeccompProfile.Type != corev1.SeccompProfileTypeRuntimeDefault {
				t.Error("no seccomp profile")
			}
		})
	}
}

// TestImagesRunAsThePodsDo: what the Dockerfile makes is what the chart runs.
func TestImagesRunAsThePodsDo(t *testing.T) {
	content, err := os.ReadFile(filepath.Join(root, "Dockerfile"))
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{
		" AS controller\nCOPY --from=build /src/bin/lodestone-controller /lodestone-controller\nUSER 65532:65532\nENTRYPOINT " +
			"[\"/lodestone-controller\"]\n",
		" AS speaker\nCOPY --from=build /src/bin/lodestone-speaker /lodestone-speaker\nUSER 0:0\nENTRYPOINT [\"/lodestone-speaker\"]\n",
	} {
		if !strings.Contains(string(content), want) {
			t.Errorf("Dockerfile without\n%s", want)
		}
	}
}

// TestControllerRunsOnUninitializedNodes: the controller initializes them.
func TestControllerRunsOnUninitializedNodes(t *testing.T) {
	all := objects(t, render(t, "testdata/default.values.yaml"))
	for _, pod := range []corev1.PodSpec{deployment(t, all).Template.Spec, daemonSet(t, all).Template.Spec} {
		for _, key := range []string{
			"node.cloudprovider.kubernetes.io/uninitialized",
			corev1.TaintNodeNotReady,
			corev1.TaintNodeNetworkUnavailable,
			"node-role.kubernetes.io/control-plane",
		} {
			taint := &corev1.Taint{Key: key, Value: "true", Effect: corev1.TaintEffectNoSchedule}
			if !slices.ContainsFunc(pod.Tolerations, func(tol corev1.Toleration) bool { return tolerates(tol, taint) }) {
				t.Errorf("%s does not tolerate %s", pod.Containers[0].Name, key)
			}
		}
		if !pod.HostNetwork {
			t.Errorf("%s waits for the pod network", pod.Containers[0].Name)
		}
	}
}

func tolerates(tol corev1.Toleration, taint *corev1.Taint) bool {
	return tol.Operator == corev1.TolerationOpExists && (tol.Key == "" || tol.Key == taint.Key) &&
		(tol.Effect == "" || tol.Effect == taint.Effect)
}

// TestUpgradesLeaveTheRecordAlone: what the chart does not set, helm and
// kubectl apply do not reset.
func TestUpgradesLeaveTheRecordAlone(t *testing.T) {
	all := find[corev1.ConfigMap](objects(t, render(t, "testdata/default.values.yaml")))
	for _, name := range []string{"lodestone-quarantine", "lodestone-config-last-valid", "lodestone-status"} {
		if record := all[name]; record == nil || record.Data != nil || record.BinaryData != nil {
			t.Errorf("%s is rendered as %v, want it without data", name, record)
		}
	}
}

// TestConfigDoesNotRestartPods: the configuration is watched.
func TestConfigDoesNotRestartPods(t *testing.T) {
	before := objects(t, render(t, "testdata/default.values.yaml"))
	out, err := template(t, "--set", "config.clusterID=other")
	if err != nil {
		t.Fatal(err)
	}
	after := objects(t, out)
	if find[corev1.ConfigMap](before)["lodestone-config"].Data["config.yaml"] ==
		find[corev1.ConfigMap](after)["lodestone-config"].Data["config.yaml"] {
		t.Error("the document did not change")
	}
	for _, pair := range [][2]any{
		{deployment(t, before), deployment(t, after)},
		{daemonSet(t, before), daemonSet(t, after)},
	} {
		a, _ := json.Marshal(pair[0])
		b, _ := json.Marshal(pair[1])
		if !bytes.Equal(a, b) {
			t.Errorf("a change of the configuration changes the pods:\n%s\n%s", a, b)
		}
	}
}

// TestAdmissionIsACourtesy: it delays writes of our ConfigMap only, prevents none if
// it does not answer, and gives the controller rights to its own objects only.
func TestAdmissionIsACourtesy(t *testing.T) {
	if all := objects(t, render(t, "testdata/default.values.yaml")); len(find[admissionv1.ValidatingWebhookConfiguration](all)) > 0 ||
		find[corev1.Secret](all)["lodestone-admission"] != nil {
		t.Error("nobody has asked for it")
	}
	all := objects(t, render(t, "testdata/existing.values.yaml"))
	webhook := find[admissionv1.ValidatingWebhookConfiguration](all)["lodestone-config"].Webhooks[0]
	if *webhook.FailurePolicy != admissionv1.Ignore || *webhook.TimeoutSeconds > 5 ||
		*webhook.SideEffects != admissionv1.SideEffectClassNone || webhook.ClientConfig.CABundle != nil {
		t.Errorf("webhook %+v", webhook)
	}
	if len(webhook.Rules) != 1 || !slices.Equal(webhook.Rules[0].Resources, []string{"configmaps"}) ||
		webhook.NamespaceSelector.MatchLabels["kubernetes.io/metadata.name"] != "lodestone-system" ||
		webhook.MatchConditions[0].Expression != `request.name == "my-config"` {
		t.Errorf("it is sent more than our ConfigMap: %+v", webhook)
	}
	service := find[corev1.Service](all)[webhook.ClientConfig.Service.Name]
	if service == nil || service.Spec.ClusterIP != "" || service.Spec.PublishNotReadyAddresses {
		t.Errorf("the API server finds no replica that is ready by %+v", service)
	}
	if s := find[corev1.Secret](all)["lodestone-admission"]; s == nil || s.Data != nil {
		t.Errorf("Secret %v, want one without data", s)
	}
	for _, rule := range slices.Concat(find[rbacv1.Role](all)["lodestone-controller-admission"].Rules,
		find[rbacv1.ClusterRole](all)["lodestone-controller-admission"].Rules) {
		if len(rule.ResourceNames) != 1 {
			t.Errorf("more than one object: %v", rule)
		}
	}
}

// TestDashboardRights: without the dashboard nothing is granted for it, and its
// account may read the dashboard and nothing else.
func TestDashboardRights(t *testing.T) {
	without := objects(t, render(t, "testdata/single.values.yaml"))
	for name := range find[rbacv1.ClusterRole](without) {
		if strings.Contains(name, "dashboard") {
			t.Errorf("ClusterRole %s", name)
		}
	}
	all := objects(t, render(t, "testdata/default.values.yaml"))
	roles := map[string]string{}
	for name, b := range find[rbacv1.ClusterRoleBinding](all) {
		for _, s := range b.Subjects {
			if s.Name == "lodestone-dashboard" {
				roles[name] = b.RoleRef.Name
			}
		}
	}
	for name, b := range find[rbacv1.RoleBinding](all) {
		for _, s := range b.Subjects {
			if s.Name == "lodestone-dashboard" || b.RoleRef.Name == "lodestone-dashboard-user" {
				t.Errorf("binding %s", name)
			}
		}
	}
	if len(roles) != 1 || roles["lodestone-dashboard"] != "lodestone-dashboard-reader" {
		t.Errorf("the account has roles %v", roles)
	}
	for _, r := range find[rbacv1.ClusterRole](all)["lodestone-dashboard-reader"].Rules {
		if len(r.Resources) > 0 || !slices.Equal(r.Verbs, []string{"get"}) {
			t.Errorf("it may do more than look: %v", r)
		}
	}
}
