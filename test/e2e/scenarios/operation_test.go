package scenarios

import (
	"context"
	"fmt"
	"net/http"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	authorizationv1 "k8s.io/api/authorization/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/lodestone-lb/lodestone/test/e2e/lodestone"
)

// What a user sees after the installation: the chart's own test passes. Its pod
// would run in any namespace.
func TestHelmTest(t *testing.T) {
	s := begin(t)
	const enforce = "pod-security.kubernetes.io/enforce"
	label := func(level string) {
		_, err := s.Lab.Kubectl(s.ctx, "label", "--overwrite", "namespace", lodestone.Namespace, enforce+level)
		require.NoError(s, err)
	}
	s.afterwards(func() { label("-") })
	label("=restricted")
	out, err := s.Lab.Helm(s.ctx, "test", "lodestone", "--namespace", lodestone.Namespace, "--timeout", "3m")
	require.NoError(t, err, out)
	require.Regexp(t, `Phase:\s+Succeeded`, out)
}

// The API server's reasons for keeping the components out of namespaces of the levels
// "baseline" and "restricted" are those in the guide.
func TestPodSecurityRefusesWhatTheGuideLists(t *testing.T) {
	s := begin(t)
	for level, want := range map[string]map[string]string{
		"baseline": {
			"controller": "host namespaces, hostPort",
			"speaker":    "host namespaces, hostPort, non-default capabilities",
		},
		"restricted": {
			"controller": "host namespaces, hostPort",
			"speaker":    "host namespaces, hostPort, runAsNonRoot != true, runAsUser=0, unrestricted capabilities",
		},
	} {
		out, err := s.Lab.Kubectl(s.ctx, "label", "--dry-run=server", "--overwrite", "namespace", lodestone.Namespace,
			"pod-security.kubernetes.io/enforce="+level)
		require.NoError(t, err)
		got := map[string]string{}
		for _, warning := range regexp.MustCompile(`Warning: lodestone-([a-z]+)-.*: (.*)`).FindAllStringSubmatch(out, -1) {
			reasons := strings.Split(warning[2], ", ")
			slices.Sort(reasons)
			got[warning[1]] = strings.Join(reasons, ", ")
		}
		assert.Equal(t, want, got, "%s:\n%s", level, out)
	}
}

// The rights of each component, and some that it must not have.
func TestComponentsMayDoTheirWorkAndNothingBeyond(t *testing.T) {
	s := begin(t)
	const ours, elsewhere, apiServer = lodestone.Namespace, "kube-system", "default"
	type rule struct {
		verb, resource, namespace, name string
	}
	for account, rules := range map[string]map[rule]bool{
		"lodestone-controller": {
			{"patch", "services/status", s.namespace, ""}:                          true,
			{"watch", "services", "", ""}:                                          true,
			{"patch", "nodes/status", "", ""}:                                      true,
			{"create", "events", s.namespace, ""}:                                  true,
			{"watch", "configmaps", ours, lodestone.ConfigMap}:                     true,
			{"update", "leases.coordination.k8s.io", ours, "lodestone-controller"}: true,
			{"watch", "nodes", "", ""}:                                             true,
			{"watch", "namespaces", "", ""}:                                        true,
			{"update", "namespaces", "", ""}:                                       false,
			{"watch", "servicecidrs.networking.k8s.io", "", ""}:                    true,
			{"watch", "leases.coordination.k8s.io", ours, ""}:                      true,
			{"watch", "endpointslices.discovery.k8s.io", apiServer, ""}:            true,
			{"watch", "endpointslices.discovery.k8s.io", s.namespace, ""}:          true, // for the dashboard
			{"list", "leases.coordination.k8s.io", elsewhere, ""}:                  true,
			{"watch", "leases.coordination.k8s.io", elsewhere, ""}:                 false,
			{"update", "leases.coordination.k8s.io", elsewhere, ""}:                false,
			{"list", "leases.coordination.k8s.io", "kube-node-lease", ""}:          false,
			{"update", "leases.coordination.k8s.io", ours, "lodestone-speaker-n1"}: false,
			{"update", "servicecidrs.networking.k8s.io", "", ""}:                   false,
			{"get", "configmaps", ours, "lodestone-quarantine"}:                    true,
			{"update", "configmaps", ours, "lodestone-quarantine"}:                 true,
			{"update", "configmaps", ours, "lodestone-config-last-valid"}:          true,
			{"update", "configmaps", ours, "lodestone-status"}:                     true,
			{"create", "configmaps", ours, ""}:                                     true,
			{"delete", "configmaps", ours, "lodestone-quarantine"}:                 false,
			{"update", "configmaps", elsewhere, "lodestone-quarantine"}:            false,
			{"create", "configmaps", elsewhere, ""}:                                false,
			{"patch", "services", s.namespace, ""}:                                 false,
			{"get", "secrets", ours, ""}:                                           false,
			{"get", "secrets", elsewhere, ""}:                                      false,
			{"update", "configmaps", ours, lodestone.ConfigMap}:                    false,
			{"delete", "services", s.namespace, ""}:                                false,
			{"create", "services", s.namespace, ""}:                                false,
			{"list", "pods", ours, ""}:                                             true, // for the dashboard
			{"list", "pods", s.namespace, ""}:                                      false,
			{"update", "leases.coordination.k8s.io", elsewhere, "kube-scheduler"}:  false,
			{"create", "clusterrolebindings.rbac.authorization.k8s.io", "", ""}:    false,
		},
		"lodestone-speaker": {
			{"watch", "services", "", ""}:                                 true,
			{"watch", "endpointslices.discovery.k8s.io", "", ""}:          true,
			{"watch", "nodes", "", ""}:                                    true,
			{"watch", "configmaps", ours, lodestone.ConfigMap}:            true,
			{"update", "leases.coordination.k8s.io", ours, ""}:            true,
			{"patch", "services", s.namespace, ""}:                        false,
			{"patch", "services/status", s.namespace, ""}:                 false,
			{"patch", "nodes", "", ""}:                                    false,
			{"patch", "nodes/status", "", ""}:                             false,
			{"update", "configmaps", ours, lodestone.ConfigMap}:           false,
			{"get", "configmaps", ours, "lodestone-quarantine"}:           false,
			{"get", "configmaps", ours, "lodestone-config-last-valid"}:    true,
			{"update", "configmaps", ours, "lodestone-config-last-valid"}: false,
			{"create", "configmaps", ours, ""}:                            false,
			{"get", "configmaps", elsewhere, ""}:                          false,
			{"get", "secrets", ours, ""}:                                  false,
			{"get", "secrets", ours, "lodestone-membership"}:              false,
			{"get", "secrets", ours, "tor"}:                               true, // by the chart's values
			{"update", "leases.coordination.k8s.io", elsewhere, ""}:       false,
			{"list", "pods", "", ""}:                                      false,
		},
		"lodestone-diagnose": { // it opens two paths of speakers, and nothing of the API
			{"get", "pods", ours, ""}:                                           false,
			{"get", "secrets", ours, "lodestone-membership"}:                    false,
			{"get", "configmaps", ours, lodestone.ConfigMap}:                    false,
			{"list", "leases.coordination.k8s.io", ours, ""}:                    false,
			{"list", "services", "", ""}:                                        false,
			{"create", "serviceaccounts", ours, ""}:                             false,
			{"create", "clusterrolebindings.rbac.authorization.k8s.io", "", ""}: false,
		},
	} {
		for r, want := range rules {
			assert.Equal(t, want, s.may(account, r.verb, r.resource, r.namespace, r.name), "%s: %+v", account, r)
		}
	}
	for _, component := range []string{"controller", "speaker"} {
		for line := range strings.Lines(s.logs(s.ctx, component)) {
			if strings.Contains(line, "forbidden") {
				assert.True(t, s.allowedNow(line), "the %s lacks a permission: %s", component, line)
			}
		}
	}
}

// refusal is what an API server answers to a request that its roles do not allow.
var refusal = regexp.MustCompile(`(?:"([^"]*)" is )?forbidden: User "system:serviceaccount:` + lodestone.Namespace + `:([^"]*)" ` +
	`cannot (\w+) resource "([^"/]*)(/[^"]*)?" in API group "([^"]*)" (?:in the namespace "([^"]*)"|at the cluster scope)`)

// allowedNow reports whether the line of a log has only a refusal of what is allowed. An API server that starts, or that has just been
// given the roles, refuses everything until it has read them. The later, the busier the machine is.
func (s *story) allowedNow(line string) bool {
	s.Helper()
	r := refusal.FindStringSubmatch(strings.ReplaceAll(line, `\`, ""))
	if r == nil {
		return false
	}
	name, account, verb, resource, sub, group, namespace := r[1], r[2], r[3], r[4], r[5], r[6], r[7]
	return s.may(account, verb, strings.TrimSuffix(resource+"."+group, ".")+sub, namespace, name)
}

// may asks the API server whether the service account is allowed to do it.
func (s *story) may(account, verb, resource, namespace, name string) bool {
	s.Helper()
	attributes := resourceAttributes(resource)
	attributes.Verb, attributes.Namespace, attributes.Name = verb, namespace, name
	review, err := s.Kube.AuthorizationV1().SubjectAccessReviews().Create(s.ctx, &authorizationv1.SubjectAccessReview{
		Spec: authorizationv1.SubjectAccessReviewSpec{
			User:               fmt.Sprintf("system:serviceaccount:%s:%s", lodestone.Namespace, account),
			Groups:             []string{"system:serviceaccounts", "system:serviceaccounts:" + lodestone.Namespace, "system:authenticated"},
			ResourceAttributes: &attributes,
		},
	}, metav1.CreateOptions{})
	require.NoError(s, err)
	return review.Status.Allowed
}

func TestStandbyTakesOverFromTheLeader(t *testing.T) {
	s := begin(t)
	for name, end := range map[string]func(context.Context, *corev1.Pod) error{
		"terminated": s.Terminate,
		"killed":     s.Kill,
	} {
		leader, err := s.Leader(s.ctx)
		require.NoError(t, err)
		start := time.Now()
		require.NoError(t, end(s.ctx, leader))
		s.service("web-" + name)
		s.assigned("web-" + name)
		t.Logf("leader %s: a new Service had its address after %s", name, time.Since(start).Round(time.Millisecond))
		require.NoError(t, s.ScaleController(s.ctx, 2))
	}
	s.noAddressTwice()
}

func TestMetricsNeedAuthorization(t *testing.T) {
	s := begin(t)
	var anybody string
	s.eventually("the namespace has its default account", func() (err error) {
		anybody, err = s.Token(s.ctx, s.namespace, "default")
		return err
	})
	monitoring, err := s.MetricsToken(s.ctx)
	require.NoError(t, err)
	for _, component := range []string{"controller", "speaker"} {
		pods, err := s.Pods(s.ctx, component)
		require.NoError(t, err)
		for _, pod := range pods {
			url := lodestone.MetricsURL(&pod)
			assert.Contains(t, []int{http.StatusUnauthorized, http.StatusForbidden}, s.status(url, ""), "without a token: %s", url)
			assert.Equal(t, http.StatusForbidden, s.status(url, anybody), "with anybody's token: %s", url)
			assert.Equal(t, http.StatusOK, s.status(url, monitoring), "with the right to read metrics: %s", url)
		}
	}
}

// status fetches the URL and returns the answer's code.
func (s *story) status(url, token string) int {
	s.Helper()
	response, err := s.Get(s.ctx, url, token)
	require.NoError(s, err)
	response.Body.Close()
	return response.StatusCode
}

// The counters follow what happens.
func TestMetricsFollowTheServices(t *testing.T) {
	s := begin(t)
	s.config(onePool("pair", "198.18.0.210-198.18.0.211"))
	require.NoError(t, s.LeaderMetricBecomes(s.ctx, "lodestone_pool_addresses",
		lodestone.Labels{"pool": "pair", "family": "IPv4", "state": "free"}, 2))
	for _, name := range []string{"a", "b", "c"} {
		s.service(name)
	}
	require.NoError(t, s.LeaderMetricBecomes(s.ctx, "lodestone_pool_addresses",
		lodestone.Labels{"pool": "pair", "family": "IPv4", "state": "free"}, 0))
	require.NoError(t, s.LeaderMetricBecomes(s.ctx, "lodestone_pool_addresses",
		lodestone.Labels{"pool": "pair", "family": "IPv4", "state": "assigned"}, 2))
	require.NoError(t, s.LeaderMetricBecomes(s.ctx, "lodestone_services_refused", lodestone.Labels{"reason": "PoolExhausted"}, 1))
	for _, name := range []string{"a", "b", "c"} {
		s.delete(name)
	}
	require.NoError(t, s.LeaderMetricBecomes(s.ctx, "lodestone_pool_addresses",
		lodestone.Labels{"pool": "pair", "family": "IPv4", "state": "free"}, 2))
}
