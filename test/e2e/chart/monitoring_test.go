package chart_test

import (
	"encoding/json"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	monitoringv1 "github.com/prometheus-operator/prometheus-operator/pkg/apis/monitoring/v1"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/scheme"
	"sigs.k8s.io/yaml"
)

func init() {
	if err := monitoringv1.AddToScheme(scheme.Scheme); err != nil {
		panic(err)
	}
}

func fileOf(t *testing.T, name string) string {
	t.Helper()
	content, err := os.ReadFile(filepath.Join(chart, name))
	require.NoError(t, err)
	return string(content)
}

// TestMonitoringIsOff unless somebody wants it: its kinds are not in every
// cluster.
func TestMonitoringIsOff(t *testing.T) {
	out := render(t, "testdata/default.values.yaml")
	assert.NotContains(t, out, "monitoring.coreos.com")
	assert.NotContains(t, out, "lodestone-grafana-dashboard")
	assert.NotContains(t, out, "NetworkPolicy")
}

// TestServiceMonitors: they select the Services that the chart renders, by a
// port that these have, and add the labels that the alerts know.
func TestServiceMonitors(t *testing.T) {
	all := objects(t, render(t, "testdata/default.values.yaml", "--set=monitoring.serviceMonitor.enabled=true",
		"--set=monitoring.serviceMonitor.labels.release=prometheus", "--set=monitoring.serviceMonitor.interval=15s",
		"--set=monitoring.scraper.name=prometheus-k8s", "--set=monitoring.scraper.namespace=monitoring"))
	monitors, services := find[monitoringv1.ServiceMonitor](all), find[corev1.Service](all)
	require.Len(t, monitors, 2)
	withAdmission := find[corev1.Service](objects(t, render(t, "testdata/default.values.yaml", "--set=admission.enabled=true")))
	for _, component := range []string{"controller", "speaker"} {
		m, s := monitors["lodestone-"+component], services["lodestone-"+component+"-metrics"]
		require.NotNil(t, m)
		assert.Subset(t, s.Labels, m.Spec.Selector.MatchLabels)
		for name, other := range withAdmission { // else Prometheus would read everything twice
			assert.Equal(t, name == s.Name, labels.SelectorFromSet(m.Spec.Selector.MatchLabels).Matches(labels.Set(other.Labels)), name)
		}
		assert.Equal(t, "prometheus", m.Labels["release"])
		require.Len(t, m.Spec.Endpoints, 1)
		e := m.Spec.Endpoints[0]
		assert.Equal(t, s.Spec.Ports[0].Name, e.Port)
		assert.EqualValues(t, "https", *e.Scheme)
		assert.EqualValues(t, "15s", e.Interval)
		assert.True(t, *e.TLSConfig.InsecureSkipVerify)
		tokenOf(t, all, e.Authorization)
		assert.Empty(t, e.BearerTokenFile, "Prometheus' own token goes to whoever answers") //nolint:staticcheck // nobody may use it
		labelled(t, component, e.RelabelConfigs)
	}
	binding := find[rbacv1.ClusterRoleBinding](all)["lodestone-metrics-reader"]
	require.NotNil(t, binding)
	assert.Equal(t, []rbacv1.Subject{{Kind: "ServiceAccount", Name: "prometheus-k8s", Namespace: "monitoring"}}, binding.Subjects)
	assert.NotNil(t, find[rbacv1.ClusterRole](all)[binding.RoleRef.Name])

	all = objects(t, render(t, "testdata/default.values.yaml", "--set=monitoring.serviceMonitor.enabled=true",
		"--set=monitoring.tokenSecret.name=token"))
	e := find[monitoringv1.ServiceMonitor](all)["lodestone-speaker"].Spec.Endpoints[0]
	assert.Equal(t, "token", e.Authorization.Credentials.Name)
	assert.Nil(t, find[corev1.ServiceAccount](all)["lodestone-metrics"])
}

// tokenOf requires that the token is one of an account that may read metrics and no more.
func tokenOf(t *testing.T, all []runtime.Object, a *monitoringv1.SafeAuthorization) {
	t.Helper()
	require.NotNil(t, a)
	assert.Equal(t, corev1.ServiceAccountTokenKey, a.Credentials.Key)
	secret := find[corev1.Secret](all)[a.Credentials.Name]
	require.NotNil(t, secret)
	assert.Equal(t, corev1.SecretTypeServiceAccountToken, secret.Type)
	account := find[corev1.ServiceAccount](all)[secret.Annotations[corev1.ServiceAccountNameKey]]
	require.NotNil(t, account)
	bound := 0
	for _, b := range find[rbacv1.ClusterRoleBinding](all) {
		for _, s := range b.Subjects {
			if s.Name == account.Name {
				bound++
				assert.Equal(t, account.Namespace, s.Namespace)
				assert.Equal(t, "lodestone-metrics-reader", b.RoleRef.Name)
			}
		}
	}
	assert.Equal(t, 1, bound)
}

// TestPodMonitors: they select the pods that the chart runs.
func TestPodMonitors(t *testing.T) {
	all := objects(t, render(t, "testdata/default.values.yaml", "--set=monitoring.podMonitor.enabled=true", "--set=metrics.services=false"))
	for _, monitor := range []string{"lodestone-controller", "lodestone-speaker"} {
		tokenOf(t, all, find[monitoringv1.PodMonitor](all)[monitor].Spec.PodMetricsEndpoints[0].Authorization)
	}
	all = objects(t, render(t, "testdata/default.values.yaml", "--set=monitoring.podMonitor.enabled=true",
		"--set=monitoring.tokenSecret.name=token", "--set=metrics.services=false"))
	monitors := find[monitoringv1.PodMonitor](all)
	require.Len(t, monitors, 2)
	pods := map[string]corev1.PodTemplateSpec{"controller": deployment(t, all).Template, "speaker": daemonSet(t, all).Template}
	for component, pod := range pods {
		m := monitors["lodestone-"+component]
		require.NotNil(t, m)
		assert.Subset(t, pod.Labels, m.Spec.Selector.MatchLabels)
		e := m.Spec.PodMetricsEndpoints[0]
		var ports []string
		for _, p := range pod.Spec.Containers[0].Ports {
			ports = append(ports, p.Name)
		}
		assert.Contains(t, ports, *e.Port)
		assert.Equal(t, "token", e.Authorization.Credentials.Name)
		labelled(t, component, e.RelabelConfigs)
	}
}

// labelled checks that series have the labels that the alerts know.
func labelled(t *testing.T, component string, configs []monitoringv1.RelabelConfig) {
	t.Helper()
	targets := map[string]monitoringv1.RelabelConfig{}
	for _, c := range configs {
		targets[c.TargetLabel] = c
	}
	assert.Equal(t, "lodestone-"+component, *targets["job"].Replacement)
	assert.Equal(t, []monitoringv1.LabelName{"__meta_kubernetes_pod_node_name"}, targets["node"].SourceLabels)
}

func TestMonitorsThatCannotWorkAreRefused(t *testing.T) {
	tests := []struct{ set, want string }{
		{"monitoring.serviceMonitor.enabled=true,monitoring.podMonitor.enabled=true,monitoring.tokenSecret.name=a", "twice"},
		{"monitoring.serviceMonitor.enabled=true,metrics.services=false", "metrics.services"},
		{"monitoring.scraper.name=prometheus", "namespace"},
		{"monitoring.serviceMonitor.interval=often", "interval"},
		{"monitoring.podMonitor.interval=5m", "interval"},
		{"monitoring.rules.enabled=true", "rules"},
		{"speaker.digest=sha256:12", "digest"},
		{"networkPolicy.apiServerPorts={}", "apiServerPorts"},
	}
	for _, tt := range tests {
		t.Run(tt.set, func(t *testing.T) {
			_, err := template(t, "--set", tt.set)
			assert.ErrorContains(t, err, tt.want)
		})
	}
}

// TestPrometheusRule: it has the alerts of the rules file.
func TestPrometheusRule(t *testing.T) {
	all := objects(t, render(t, "testdata/default.values.yaml", "--set=monitoring.prometheusRule.enabled=true",
		"--set=monitoring.prometheusRule.labels.release=prometheus"))
	r := find[monitoringv1.PrometheusRule](all)["lodestone"]
	require.NotNil(t, r)
	assert.Equal(t, "prometheus", r.Labels["release"])
	var want monitoringv1.PrometheusRuleSpec
	require.NoError(t, yaml.UnmarshalStrict([]byte(fileOf(t, "monitoring/rules.yaml")), &want))
	assert.Greater(t, len(want.Groups), 3)
	assert.Equal(t, want, r.Spec)

	// Where nothing from the Internet can be reached, the pages are elsewhere.
	all = objects(t, render(t, "testdata/default.values.yaml", "--set=monitoring.prometheusRule.enabled=true",
		"--set=monitoring.prometheusRule.runbooks=https://wiki.example.com/lodestone"))
	for _, g := range find[monitoringv1.PrometheusRule](all)["lodestone"].Spec.Groups {
		for _, rule := range g.Rules {
			if rule.Alert != "" {
				assert.Equal(t, "https://wiki.example.com/lodestone/"+rule.Alert+".md", rule.Annotations["runbook_url"])
			}
		}
	}
}

// TestDashboard: Grafana's sidecar gets the file as it is.
func TestDashboard(t *testing.T) {
	all := objects(t, render(t, "testdata/default.values.yaml", "--set=monitoring.dashboard.enabled=true",
		"--set=monitoring.dashboard.annotations.grafana_folder=Network"))
	cm := find[corev1.ConfigMap](all)["lodestone-grafana-dashboard"]
	require.NotNil(t, cm)
	assert.Equal(t, "1", cm.Labels["grafana_dashboard"])
	assert.Equal(t, "Network", cm.Annotations["grafana_folder"])
	assert.JSONEq(t, fileOf(t, "monitoring/dashboard.json"), cm.Data["lodestone.json"])
	assert.Less(t, len(cm.Data["lodestone.json"]), 256<<10, "kubectl apply keeps a copy in an annotation, which has room for 262144 bytes")
}

// TestDigests: a digest pins the image, whatever the tag is.
func TestDigests(t *testing.T) {
	digest := "sha256:" + strings.Repeat("0123456789abcdef", 4)
	all := objects(t, render(t, "testdata/default.values.yaml", "--set=image.registry=registry.internal/lb", "--set=image.tag=v9",
		"--set=controller.digest="+digest, "--set=tests.digest="+digest))
	assert.Equal(t, "registry.internal/lb/lodestone-controller@"+digest, deployment(t, all).Template.Spec.Containers[0].Image)
	assert.Equal(t, "registry.internal/lb/lodestone-speaker:v9", daemonSet(t, all).Template.Spec.Containers[0].Image)
	assert.Equal(t, "registry.internal/lb/lodestone@"+digest, find[corev1.Pod](all)["lodestone-test"].Spec.Containers[0].Image)
}

// TestOneRegistry: no image comes from anywhere else, so that a mirror of the
// registry is all that an installation without the Internet needs.
func TestOneRegistry(t *testing.T) {
	for line := range strings.Lines(render(t, "testdata/default.values.yaml", "--set=image.registry=registry.internal/lb")) {
		if _, image, ok := strings.Cut(line, "image: "); ok {
			assert.True(t, strings.HasPrefix(image, "registry.internal/lb/"), line)
		}
	}
}

// TestHelmTest: what it runs may only read, may run in a namespace that is
// restricted, and is only there for the test.
func TestHelmTest(t *testing.T) {
	all := objects(t, render(t, "testdata/default.values.yaml", "--set=networkPolicy.enabled=true", "--set=image.pullSecrets[0].name=mine"))
	pod := find[corev1.Pod](all)["lodestone-test"]
	require.NotNil(t, pod)
	assert.Equal(t, "mine", pod.Spec.ImagePullSecrets[0].Name)
	assert.Equal(t, "status", pod.Spec.Containers[0].Args[0])
	assert.False(t, pod.Spec.HostNetwork)
	s := pod.Spec.Containers[0].SecurityContext
	assert.True(t, *pod.Spec.SecurityContext.RunAsNonRoot && *s.ReadOnlyRootFilesystem && !*s.AllowPrivilegeEscalation)
	assert.Equal(t, []corev1.Capability{"ALL"}, s.Capabilities.Drop)
	assert.Equal(t, corev1.SeccompProfileTypeRuntimeDefault, pod.Spec.SecurityContext.SeccompProfile.Type)

	rules := append(find[rbacv1.ClusterRole](all)["lodestone-test"].Rules, find[rbacv1.Role](all)["lodestone-test"].Rules...)
	assert.Len(t, rules, 7)
	for _, r := range rules {
		assert.False(t, mayWrite(r), "the test may write: %v", r)
	}
	sources := fileOf(t, "../../inspect/cluster/source.go")
	reads := regexp.MustCompile(`(get\()?of\(client, \w+, "?([\w.]+)"?,|verb: "(get)", resource: "(\w+)"`).FindAllStringSubmatch(sources, -1)
	assert.GreaterOrEqual(t, len(reads), 11, "what lodestone status reads")
	for _, m := range reads {
		verb, kind := "list", m[2]+m[4]
		if m[1]+m[3] != "" {
			verb = "get"
		}
		if name := regexp.MustCompile(`(?i)"(` + kind + `\.[a-z0-9.]+)"`).FindStringSubmatch(sources); name != nil { // a constant
			kind = name[1]
		}
		resource, group, _ := strings.Cut(kind, ".")
		assert.True(t, slices.ContainsFunc(rules, func(r rbacv1.PolicyRule) bool {
			return slices.Contains(r.Verbs, verb) && slices.Contains(r.Resources, resource) && slices.Contains(r.APIGroups, group)
		}), "lodestone status may not %s %s", verb, kind)
	}
	policy := find[networkingv1.NetworkPolicy](all)["lodestone-test"]
	require.NotNil(t, policy)
	assert.Subset(t, pod.Labels, policy.Spec.PodSelector.MatchLabels)
	assert.Empty(t, policy.Spec.Ingress)
	assert.NotSubset(t, deployment(t, all).Template.Labels, policy.Spec.PodSelector.MatchLabels)

	for _, o := range all {
		m, err := json.Marshal(o)
		require.NoError(t, err)
		if strings.Contains(string(m), `"name":"lodestone-test"`) && o.GetObjectKind().GroupVersionKind().Kind != "NetworkPolicy" {
			assert.Contains(t, string(m), `"helm.sh/hook":"test"`)
		}
	}
	assert.NotContains(t, render(t, "testdata/default.values.yaml", "--set=tests.enabled=false"), "lodestone-test")
}
