package scenarios

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/lodestone-lb/lodestone/test/e2e/lodestone"
)

// An upgrade brings a ConfigMap and a Secret of the operator's own and all options
// of the chart, and is undone: no client notices, no address changes, and all that it
// brought is gone. A rolling update takes long, so the options that have to be switched
// on first are checked between the two.
func TestNextVersionComesAndGoes(t *testing.T) {
	s := begin(t)
	s.echo(3)
	held, vips := map[string]string{}, []string(nil)
	for _, name := range []string{"a", "b", "c", "d"} { // not all on one node
		s.service(name, port("udp", corev1.ProtocolUDP, 80))
		held[name] = s.assigned(name)
		vips = append(vips, held[name])
		s.steady(held[name])
	}
	rolls := func(roll func() error) {
		t.Helper()
		before := s.podNames()
		s.losesNothing(vips, func() { require.NoError(s, roll()) })
		for _, pod := range s.podNames() {
			require.NotContains(t, before, pod, "it was not replaced")
		}
		require.NoError(t, s.showAll(held))
		for _, vip := range vips {
			s.oneAnswerer(vip)
		}
	}
	s.own()
	there := true
	s.afterwards(func() { // whatever happened, the next story finds what it knows
		if there {
			require.NoError(s, s.Upgrade(s.ctx, s.Lab.Chart()))
		}
		s.ConfigMapName = lodestone.ConfigMap
	})
	for _, set := range []string{"membership.existingSecret=lodestone-membership", "existingConfigMap=" + lodestone.ConfigMap} {
		err := s.Upgrade(s.ctx, s.Lab.Chart(), "--set="+set)
		require.ErrorContains(t, err, "has the name of the release's own, and the upgrade would delete that")
	}
	for values, has := range map[string]bool{"config.failover=normal": true, "config.pools=null": false} { // as the guide has it
		rendered, err := s.Lab.Helm(s.ctx, "upgrade", "lodestone", s.Lab.Chart(), "--namespace", lodestone.Namespace,
			"--reset-then-reuse-values", "--dry-run=client", "--set="+values)
		require.NoError(t, err)
		require.Equal(t, has, strings.Contains(rendered, "198.18.0.200-"), "with %s: %s", values, rendered)
	}
	rolls(func() error {
		return s.Upgrade(s.ctx, s.nextChart(), "--set=existingConfigMap=own-config", "--set=membership.existingSecret=own-key",
			"--set=admission.enabled=true", "--set=controller.dhcp.enabled=true",
			"--set=speaker.connectionRateLimits=true", "--set=speaker.podRoutes=true", "--set=networkPolicy.enabled=true")
	})
	s.ConfigMapName = "own-config"
	require.Contains(t, s.objects(), "ConfigMap/lodestone-next")
	require.Contains(t, s.objects(), "NetworkPolicy/lodestone-test")
	for _, replaced := range []string{"ConfigMap/lodestone-config", "Secret/lodestone-membership"} {
		assert.NotContains(t, s.objects(), replaced)
	}
	t.Run("limits", newConnectionsAreLimited)
	t.Run("routes", routesToPodsAreOurs)
	t.Run("dhcp", poolLeasesItsAddressesFromADHCPServer)
	t.Run("admission", brokenConfigurationIsRefusedAtOnce)

	s.config(usualPools)
	s.change("a", annotated(rateLimit, "100000"))
	s.eventually("a limit is in force on the owner", func() error {
		if tables := s.tables(s.owner(held["a"])); !strings.Contains(tables, "lodestone") {
			return fmt.Errorf("it has tables %q", tables)
		}
		return nil
	})
	rolls(func() error { return s.Rollback(s.ctx) })
	there = false
	for _, kept := range []string{"ConfigMap/own-config", "Secret/own-key"} {
		assert.Contains(t, s.objects(), kept, "it is the operator's")
	}
	for _, object := range []string{"ConfigMap/lodestone-next", "NetworkPolicy/lodestone-test", "Secret/lodestone-admission",
		"ValidatingWebhookConfiguration/lodestone-config"} {
		assert.NotContains(t, s.objects(), object)
	}
	for _, node := range s.Lab.Nodes() {
		assert.NotContains(t, s.tables(node), "lodestone", "packet filter of %s", node)
	}
}

// own makes the operator's own ConfigMap and Secret, with what the chart's have.
// The speakers are replaced one after the other: the key has to be the same.
func (s *story) own() {
	s.Helper()
	maps, secrets := s.Kube.CoreV1().ConfigMaps(lodestone.Namespace), s.Kube.CoreV1().Secrets(lodestone.Namespace)
	config, err := maps.Get(s.ctx, lodestone.ConfigMap, metav1.GetOptions{})
	require.NoError(s, err)
	key, err := secrets.Get(s.ctx, "lodestone-membership", metav1.GetOptions{})
	require.NoError(s, err)
	s.afterwards(func() {
		require.NoError(s, maps.Delete(s.ctx, "own-config", metav1.DeleteOptions{}))
		require.NoError(s, secrets.Delete(s.ctx, "own-key", metav1.DeleteOptions{}))
	})
	_, err = maps.Create(s.ctx, &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "own-config"}, Data: config.Data},
		metav1.CreateOptions{})
	require.NoError(s, err)
	_, err = secrets.Create(s.ctx, &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Name: "own-key"}, Data: key.Data}, metav1.CreateOptions{})
	require.NoError(s, err)
}

// nextChart returns the chart of a version to come: all objects have another
// label, and there is one more.
func (s *story) nextChart() string {
	s.Helper()
	dir := filepath.Join(s.TempDir(), "chart")
	require.NoError(s, os.CopyFS(dir, os.DirFS(s.Lab.Chart())))
	about := filepath.Join(dir, "Chart.yaml")
	raw, err := os.ReadFile(about)
	require.NoError(s, err)
	raw = regexp.MustCompile(`(?m)^(version|appVersion): .*$`).ReplaceAll(raw, []byte("$1: 99.0.0"))
	require.NoError(s, os.WriteFile(about, raw, 0o600))
	require.NoError(s, os.WriteFile(filepath.Join(dir, "templates", "next.yaml"), []byte(
		"apiVersion: v1\nkind: ConfigMap\nmetadata: {name: lodestone-next, namespace: {{ .Release.Namespace }}}\n"), 0o600))
	return dir
}

// objects lists objects of the release, as kind/name.
func (s *story) objects() []string {
	s.Helper()
	out, err := s.Lab.Kubectl(s.ctx, "--namespace", lodestone.Namespace, "get",
		"configmaps,networkpolicies,secrets,validatingwebhookconfigurations",
		"--output", `jsonpath={range .items[*]}{.kind}/{.metadata.name}{"\n"}{end}`)
	require.NoError(s, err)
	return strings.Fields(out)
}

// podNames are the names of our pods.
func (s *story) podNames() []string {
	s.Helper()
	var names []string
	for _, component := range []string{"controller", "speaker"} {
		pods, err := s.Pods(s.ctx, component)
		require.NoError(s, err)
		for _, pod := range pods {
			names = append(names, pod.Name)
		}
	}
	require.NotEmpty(s, names)
	return names
}

// tables lists the tables of the node's packet filter.
func (s *story) tables(node string) string {
	s.Helper()
	out, err := s.Lab.Command(s.ctx, node, "nft", "list", "tables").CombinedOutput()
	require.NoError(s, err, "%s", out)
	return string(out)
}
