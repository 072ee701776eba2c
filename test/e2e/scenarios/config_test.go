package scenarios

import (
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/lodestone-lb/lodestone/test/e2e/lab"
	"github.com/lodestone-lb/lodestone/test/e2e/lodestone"
)

// usualPools is the configuration of a story that does not care.
const usualPools = `
quarantine: 1s
pools:
  - name: lan
    addresses: [198.18.0.200-198.18.0.250]
`

// onePool is a configuration whose only pool has the addresses given.
func onePool(name, addresses string) string {
	return fmt.Sprintf("\nquarantine: 0s\npools:\n  - {name: %s, addresses: [%s]}\n", name, addresses)
}

// failover is how soon speakers take each other for lost: late, because the machine of the stories is as
// overloaded as those for which the configuration's reference recommends that. The benchmarks and the stories of
// the fleet measure the default.
const failover = "conservative"

// config puts a configuration in force.
func (s *story) config(body string) {
	s.Helper()
	require.NoError(s, s.Configure(s.ctx, lodestone.Document("failover: "+failover+"\n"+body)))
}

func TestInvalidConfigurationChangesNothing(t *testing.T) {
	s := begin(t)
	s.service("before")
	address := s.assigned("before")

	for name, c := range map[string]struct{ document, message string }{
		"typo": {"apiVersion: lodestone.io/v1alpha1\nkind: Config\npols: []\n", "config.yaml:3:1"},
		"overlap": {"apiVersion: lodestone.io/v1alpha1\nkind: Config\npools:\n- {name: a, addresses: [198.18.0.0/24]}\n- {name: b, " +
			"addresses: [198.18.0.128/25]}\n", "overlaps"},
		"empty":  {"", "config.yaml"},
		"binary": {"\x00\x01\x02", "config.yaml"},
	} {
		t.Run(name, func(t *testing.T) {
			s := s.part(t)
			require.NoError(t, s.WriteConfig(s.ctx, c.document))
			require.NoError(t, s.LeaderMetricBecomes(s.ctx, "lodestone_config_valid", nil, 0))
			s.eventually("the Event on the ConfigMap names the fault", func() error {
				if text := s.event(lodestone.Namespace, "ConfigMap", lodestone.ConfigMap, "ConfigInvalid"); !strings.Contains(text, c.message) {
					return fmt.Errorf("the Event has %q", text)
				}
				return nil
			})
			s.service("during-" + name)
			s.assigned("during-" + name)
			require.Equal(t, []string{address}, addresses(s.get("before")))
			s.publicPagesLack("198.18.0.128", "config.yaml:", "pols")
		})
	}

	s.finds("configuration", "")
	s.config(usualPools)
	require.NoError(t, s.LeaderMetricBecomes(s.ctx, "lodestone_config_valid", nil, 1))
	s.event(lodestone.Namespace, "ConfigMap", lodestone.ConfigMap, "ConfigValid")
}

// A pool that is removed while in use keeps its Services' addresses.
func TestPoolRemovedWhileInUseMovesNobody(t *testing.T) {
	s := begin(t)
	s.service("web")
	address := s.assigned("web")
	s.config(onePool("other", "198.18.0.120-198.18.0.130"))
	s.eventually("the Service reports that its address is stranded", func() error {
		if c := conditionText(s.get("web")); !strings.Contains(c, "Stranded") {
			return fmt.Errorf("its condition is %s", c)
		}
		return nil
	})
	s.always(time.Second, "the address stays", func() error {
		if got := addresses(s.get("web")); len(got) != 1 || got[0] != address {
			return fmt.Errorf("it became %q", got)
		}
		return nil
	})
	s.restartController()
	s.service("new")
	s.holds("new", "198.18.0.120")
	s.holds("web", address)
}

// Without a configuration nothing is allocated, everything is kept, and both
// the user and the operator see the reason.
func TestMissingConfigurationIsReported(t *testing.T) {
	s := begin(t)
	s.service("before")
	address := s.assigned("before")
	s.stopController()
	for _, name := range []string{lodestone.ConfigMap, lastValid} {
		require.NoError(t, s.Kube.CoreV1().ConfigMaps(lodestone.Namespace).Delete(s.ctx, name, metav1.DeleteOptions{}))
	}
	s.runController()
	out, code, err := s.CLI(s.ctx, "", "explain", "vip", address)
	require.NoError(t, err)
	require.Equal(t, 3, code, out)
	require.Contains(t, out, "that run go by the last valid one", "the speakers run")
	s.startSpeakersAnew()
	s.isSilent("before", s.Lab.Nodes()[0], "NoAdvertisement")
	s.service("during")
	s.refused("during", "ConfigUnavailable")
	s.holds("before", address)
	s.responds("/readyz", http.StatusServiceUnavailable, "[-] configuration: nothing is allocated until there is a valid one")
	s.responds("/healthz", http.StatusOK, "ok")
	require.NoError(t, s.WriteConfig(s.ctx, lodestone.Document(usualPools)))
	s.assigned("during")
	s.holds("before", address)
	s.responds("/readyz", http.StatusOK, "[+] lease: this process leads")
	s.eventually("the speakers are ready again", func() error { return s.speakersReady(true) })
}

// lastValid is the ConfigMap with the copy of the last valid document.
const lastValid = "lodestone-config-last-valid"

// A document that is broken by an edit has no effect, even when all programs restart with it:
// they use the copy of the last valid one, and report that.
func TestProgramsThatStartTakeTheLastValidConfiguration(t *testing.T) {
	s := begin(t)
	vip := s.serveUDP("web")
	s.steady(vip)
	require.NoError(t, s.WriteConfig(s.ctx, "pools: none\n"))
	s.restartController()
	s.replaceSpeakers()
	s.eventually("the speakers are ready", func() error { return s.speakersReady(true) })
	s.eventually("the VIP answers", func() error { return s.reachUDP(vip) })
	s.service("during")
	s.assigned("during")
	s.holds("web", vip)
	require.Contains(t, s.event(lodestone.Namespace, "ConfigMap", lodestone.ConfigMap, "ConfigRestored"), lastValid)
	require.NoError(t, s.LeaderMetricBecomes(s.ctx, "lodestone_config_restored", nil, 1))
	s.config(usualPools)
	require.NoError(t, s.LeaderMetricBecomes(s.ctx, "lodestone_config_restored", nil, 0))
	s.holds("web", vip)
}

// startSpeakersAnew replaces all speakers by some that find no configuration.
func (s *story) startSpeakersAnew() {
	s.Helper()
	s.replaceSpeakers()
	s.eventually("no speaker is ready", func() error { return s.speakersReady(false) })
}

// replaceSpeakers ends all speakers' pods at once; kubelets start others.
func (s *story) replaceSpeakers() {
	s.Helper()
	require.NoError(s, s.Kube.CoreV1().Pods(lodestone.Namespace).DeleteCollection(s.ctx,
		metav1.DeleteOptions{GracePeriodSeconds: new(int64(0))},
		metav1.ListOptions{LabelSelector: "app.kubernetes.io/component=speaker"}))
}

// publicPagesLack checks that the pages of all programs that need no authorization have none of
// the words.
func (s *story) publicPagesLack(words ...string) {
	s.Helper()
	for _, component := range []string{"controller", "speaker"} {
		pods, err := s.Pods(s.ctx, component)
		require.NoError(s, err)
		require.NotEmpty(s, pods)
		for _, pod := range pods {
			for _, path := range []string{"readyz", "healthz"} {
				response, err := s.Get(s.ctx, lodestone.URL(&pod, path), "")
				require.NoError(s, err)
				text, err := io.ReadAll(response.Body)
				response.Body.Close()
				require.NoError(s, err)
				require.NotEmpty(s, text)
				for _, word := range words {
					require.NotContains(s, string(text), word, "%s of %s", path, pod.Name)
				}
			}
		}
	}
}

// speakersReady checks that there is a speaker on each node, and that each is ready, or
// that none is.
func (s *story) speakersReady(want bool) error {
	pods, err := s.Pods(s.ctx, "speaker")
	if err == nil && len(pods) != len(s.Lab.Nodes()) {
		err = fmt.Errorf("there are %d", len(pods))
	}
	for i := range pods {
		if lodestone.Ready(&pods[i]) != want {
			err = fmt.Errorf("the one on %s is ready: %v", pods[i].Spec.NodeName, !want)
		}
	}
	return err
}

// responds waits until the controller that runs beside the cluster gives that answer,
// without authorization.
func (s *story) responds(path string, code int, text string) {
	s.Helper()
	url := fmt.Sprintf("https://%s:10258%s", s.Lab.Addresses(lab.ControlPlane)[0], path)
	s.eventually("the controller answers "+text, func() error {
		response, err := s.Get(s.ctx, url, "")
		if err != nil {
			return err
		}
		defer response.Body.Close()
		body, err := io.ReadAll(response.Body)
		if err == nil && (response.StatusCode != code || !strings.Contains(string(body), text)) {
			err = fmt.Errorf("%s answers %s: %s", path, response.Status, body)
		}
		return err
	})
}
