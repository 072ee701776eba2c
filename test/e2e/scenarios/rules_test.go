package scenarios

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/lodestone-lb/lodestone/test/e2e/lab"
	"github.com/lodestone-lb/lodestone/test/e2e/lodestone"
	"github.com/lodestone-lb/lodestone/test/e2e/netns"
)

const (
	sharingKey = "lodestone.io/sharing-key"
	renumber   = "lodestone.io/renumber"
	rateLimit  = "lodestone.io/connection-rate-limit"
)

// labelled sets a label of the Service; an empty value removes it.
func labelled(key, value string) option {
	return func(svc *corev1.Service) {
		delete(svc.Labels, key)
		if value != "" {
			metav1.SetMetaDataLabel(&svc.ObjectMeta, key, value)
		}
	}
}

// labelNamespace sets a label of the story's namespace.
func (s *story) labelNamespace(key, value string) {
	s.Helper()
	ns, err := s.Kube.CoreV1().Namespaces().Get(s.ctx, s.namespace, metav1.GetOptions{})
	require.NoError(s, err)
	metav1.SetMetaDataLabel(&ns.ObjectMeta, key, value)
	_, err = s.Kube.CoreV1().Namespaces().Update(s.ctx, ns, metav1.UpdateOptions{})
	require.NoError(s, err)
}

// stands waits until the Service's condition has the reason and returns its
// sentence.
func (s *story) stands(name, reason string) (message string) {
	s.Helper()
	s.eventually("Service "+name+" is "+reason, func() error {
		text := conditionText(s.get(name))
		if !strings.Contains(text, " "+reason+": ") {
			return fmt.Errorf("its condition is %s", text)
		}
		message = text
		return nil
	})
	return message
}

func TestPoolsOpenByLabelsOfNamespaceAndService(t *testing.T) {
	s := begin(t)
	s.config(`
quarantine: 0s
pools:
  - {name: prod, addresses: [198.18.0.210-198.18.0.219], namespaceSelector: {matchLabels: {env: prod}}}
  - {name: gold, addresses: [198.18.0.220-198.18.0.229], serviceSelector: {matchLabels: {tier: gold}}}
  - {name: both, addresses: [198.18.0.230-198.18.0.239], namespaceSelector: {matchLabels: {env: prod}}, serviceSelector: {matchLabels: {tier: both}}}
`)
	s.service("gold", labelled("tier", "gold"))
	s.holds("gold", "198.18.0.220")
	s.service("both", labelled("tier", "both"), annotated(poolAnnotation, "both"))
	require.Contains(t, s.refused("both", "PoolNotAllowed"), `"both"`)
	s.service("plain")
	s.refused("plain", "NoPool")

	s.labelNamespace("env", "prod")
	s.holds("plain", "198.18.0.210")
	s.holds("both", "198.18.0.230")

	// They keep their addresses when the labels change, until they ask for others.
	s.labelNamespace("env", "test")
	s.change("gold", labelled("tier", ""))
	s.always(2*time.Second, "relabelled Services keep their addresses", func() error {
		for name, want := range map[string]string{"gold": "198.18.0.220", "plain": "198.18.0.210", "both": "198.18.0.230"} {
			if got := addresses(s.get(name)); len(got) != 1 || got[0] != want {
				return fmt.Errorf("%s has %q", name, got)
			}
		}
		return nil
	})
	s.change("plain", labelled("tier", "gold"), annotated(renumber, "true"))
	s.holds("plain", "198.18.0.221")
	s.eventually("it is not asked to move again", func() error {
		if _, still := s.get("plain").Annotations[renumber]; still {
			return fmt.Errorf("the annotation %s stays", renumber)
		}
		return nil
	})
}

// Services that share an address are reached at their own ports, and an edit
// that clashes affects only the edited Service.
func TestServicesShareAnAddress(t *testing.T) {
	s := begin(t)
	s.echo(3)
	s.service("web", annotated(sharingKey, "edge"), port("http", corev1.ProtocolTCP, 80))
	s.service("dns", annotated(sharingKey, "edge"), port("udp", corev1.ProtocolUDP, 80))
	vip := s.assigned("web")
	s.holds("dns", vip)
	s.eventually("the VIP answers by TCP", func() error { return s.reachTCP(vip) })
	s.eventually("the VIP answers by UDP", func() error { return s.reachUDP(vip) })
	s.oneAnswerer(vip)

	s.service("rival", annotated(sharingKey, "edge"), port("http", corev1.ProtocolTCP, 80))
	require.Contains(t, s.refused("rival", "SharingConflict"), s.namespace+"/web")
	s.restartController()
	s.holds("dns", vip)

	// The condition for sharing changes.
	s.delete("web")
	s.holds("rival", vip)
	s.eventually("the VIP answers for the new sharer", func() error { return s.reachTCP(vip) })
	require.NoError(t, s.reachUDP(vip), "a sharer that leaves disturbs nobody")

	s.change("dns", port("http", corev1.ProtocolTCP, 80))
	s.refused("dns", "SharingConflict")
	s.eventually("dns has no address any more", func() error {
		if got := addresses(s.get("dns")); len(got) > 0 {
			return fmt.Errorf("it has %q", got)
		}
		return nil
	})
	s.holds("rival", vip)
	// kube-proxy may have seen both at the port, and takes it away with dns then,
	// until its next sync.
	s.eventually("the VIP answers for the sharer that keeps it", func() error { return s.reachTCP(vip) })
}

func TestQuotaBoundsANamespace(t *testing.T) {
	s := begin(t)
	s.config("\nquarantine: 0s\npools:\n  - {name: lan, addresses: [198.18.0.210-198.18.0.219], namespaceQuota: 2, requesters: [elsewhere]}\n")
	s.service("bold", annotated(addrAnnotation, "198.18.0.215"))
	require.Contains(t, s.refused("bold", "RequestNotAllowed"), `"elsewhere"`)
	s.service("a")
	s.assigned("a")
	s.service("b")
	s.assigned("b")
	s.service("c")
	require.Contains(t, s.refused("c", "QuotaExceeded"), "2 of its 2")
	s.delete("a")
	s.assigned("c")
}

func TestPoolIsEmptiedWithoutMovingAnybodyUnasked(t *testing.T) {
	s := begin(t)
	s.config("\nquarantine: 0s\npools:\n  - {name: old, addresses: [198.18.0.210-198.18.0.219]}\n")
	s.service("web")
	s.holds("web", "198.18.0.210")
	s.config(`
quarantine: 0s
pools:
  - {name: old, addresses: [198.18.0.210-198.18.0.219], state: draining}
  - {name: new, addresses: [198.18.0.220-198.18.0.229]}
`)
	require.Contains(t, s.stands("web", "Draining"), "198.18.0.210")
	require.NoError(t, s.LeaderMetricBecomes(s.ctx, "lodestone_services", lodestone.Labels{"state": "draining"}, 1))
	s.service("next")
	s.holds("next", "198.18.0.220")
	s.service("late", annotated(poolAnnotation, "old"))
	require.Contains(t, s.refused("late", "PoolDraining"), `"old"`)
	s.change("web", annotated(renumber, "true"))
	s.holds("web", "198.18.0.221")
	require.NoError(t, s.LeaderMetricBecomes(s.ctx, "lodestone_pool_addresses",
		lodestone.Labels{"pool": "old", "family": "IPv4", "state": "assigned"}, 0))
}

// Kept and reserved addresses survive the Service, and the controller.
func TestAddressesAreKeptForTheServiceThatComesBack(t *testing.T) {
	s := begin(t)
	s.config(fmt.Sprintf(`
quarantine: 0s
pools:
  - {name: lan, addresses: [198.18.0.210-198.18.0.213], keepFor: 10m}
reservations:
  - {service: %s/dns, addresses: [198.18.0.213]}
`, s.namespace))
	s.service("web")
	s.holds("web", "198.18.0.210")
	s.service("other")
	s.holds("other", "198.18.0.211")
	s.delete("web")
	s.deleted("web")
	s.killController()
	s.service("stranger")
	s.holds("stranger", "198.18.0.212")
	s.service("late")
	s.refused("late", "PoolExhausted")
	s.service("heir", annotated(addrAnnotation, "198.18.0.210"))
	s.refused("heir", "AddressQuarantined")
	s.service("thief", annotated(addrAnnotation, "198.18.0.213"))
	require.Contains(t, s.refused("thief", "AddressReserved"), s.namespace+"/dns")
	s.service("dns")
	s.holds("dns", "198.18.0.213")
	s.service("web")
	s.holds("web", "198.18.0.210")
}

func TestTheClustersOwnAddressesAreNeverGiven(t *testing.T) {
	s := begin(t)
	node := s.Lab.Addresses("n1")[0]
	s.config(fmt.Sprintf("\nquarantine: 0s\npools:\n  - {name: careless, addresses: [%s-%s]}\n  - {name: elsewhere, addresses: "+
		"[192.0.2.0/28], autoAssign: false}\n",
		node, s.Lab.Addresses("n3")[0].Next()))
	warnings := s.event(lodestone.Namespace, "ConfigMap", lodestone.ConfigMap, "ConfigWarning")
	t.Log(warnings)
	require.NoError(t, s.LeaderMetricBecomes(s.ctx, "lodestone_config_warnings", nil, 4))
	s.service("web")
	s.holds("web", s.Lab.Addresses("n3")[0].Next().String())
	s.service("bold", annotated(addrAnnotation, node.String()))
	require.Contains(t, s.refused("bold", "AddressForbidden"), "the address of node n1")
	s.service("podlike")
	s.refused("podlike", "PoolExhausted")
}

// A pool for a year, and names of what does not exist.
func TestWidePoolsAndWrongNames(t *testing.T) {
	s := begin(t)
	s.config("\nquarantine: 0s\npools:\n  - {name: huge, addresses: [11.0.0.0/8]}\n")
	for i := range 5 {
		name := fmt.Sprintf("web-%d", i)
		s.service(name)
		s.holds(name, fmt.Sprintf("11.0.0.%d", i+1))
	}
	s.service("lost", annotated(poolAnnotation, "nowhere, neither"))
	require.Contains(t, s.refused("lost", "PoolNotFound"), `"nowhere"`)
}

func TestOperatorAsksWhyAndWhatIf(t *testing.T) {
	s := begin(t)
	s.config(onePool("pair", "198.18.0.210-198.18.0.211") + "  - {name: spare, addresses: [198.18.0.219], autoAssign: false}\n")
	for _, name := range []string{"a", "b"} {
		s.service(name)
		s.assigned(name)
	}
	s.service("c")
	s.refused("c", "PoolExhausted")
	s.service("d", annotated(poolAnnotation, "pair"))
	s.refused("d", "PoolExhausted")

	s.prints(2, []string{"explain", "service", s.namespace + "/c"}, "PoolExhausted", "What helps", "NotAutoAssigned: ",
		"Services that name them: spare.")
	s.prints(2, []string{"explain", "service", "d", "--namespace", s.namespace}, "PoolExhausted", "PoolNotNamed: ")
	// explain has the reason why nobody answers for an address.
	s.prints(2, []string{"explain", "service", s.namespace + "/a"}, "198.18.0.210 from pool \"pair\"",
		"NoServingEndpoint: no endpoint takes traffic")
	s.runsAsPlugin()
	s.delete("d")

	narrow := lodestone.Document(onePool("pair", "198.18.0.210"))
	out, code, err := s.CLI(s.ctx, narrow, "plan", "--config", "-")
	require.NoError(t, err)
	assert.Equal(t, 2, code, out)
	assert.Contains(t, out, "stranded  "+s.namespace+"/b")
	t.Log(out)
	wide := lodestone.Document(onePool("pair", "198.18.0.210-198.18.0.212"))
	out, code, err = s.CLI(s.ctx, wide, "plan", "--config", "-")
	require.NoError(t, err)
	assert.Equal(t, 0, code, out)
	assert.Contains(t, out, s.namespace+"/c")

	// The prediction was right.
	s.config(onePool("pair", "198.18.0.210"))
	s.stands("b", "Stranded")
	require.NoError(t, s.LeaderMetricBecomes(s.ctx, "lodestone_services", lodestone.Labels{"state": "stranded"}, 1))
	s.config(onePool("pair", "198.18.0.210-198.18.0.212"))
	s.holds("c", "198.18.0.212")
	s.stands("b", "Allocated")
}

// runsAsPlugin checks that kubectl runs the command, and completes it.
func (s *story) runsAsPlugin() {
	s.Helper()
	links := s.TempDir()
	for _, name := range []string{"kubectl-lodestone", "kubectl_complete-lodestone"} {
		require.NoError(s, os.Symlink(filepath.Join(s.Lab.Root, "bin", "lodestone"), filepath.Join(links, name)))
	}
	withPlugin := func(args ...string) *exec.Cmd {
		return s.Lab.Command(s.ctx, lab.ControlPlane, append([]string{"sh", "-c", `PATH="$PATH:$0" exec "$@"`, links}, args...)...)
	}
	out, err := withPlugin("kubectl", "lodestone", "explain", "service", "c", "--namespace", s.namespace).CombinedOutput()
	var exit *exec.ExitError
	require.ErrorAs(s, err, &exit, "%s", out)
	require.Equal(s, 2, exit.ExitCode(), "%s", out)
	require.Contains(s, string(out), "PoolExhausted")
	completed, err := withPlugin("kubectl", "__complete", "lodestone", "explain", "pool", "sp").CombinedOutput()
	require.NoError(s, err)
	require.Contains(s, string(completed), "spare\n")
}

// A limit on new connections holds on the owner, and goes without a trace.
func newConnectionsAreLimited(t *testing.T) {
	s := begin(t)
	s.echo(2)
	s.service("web", annotated(rateLimit, "5"))
	s.service("free")
	vip, free := s.assigned("web"), s.assigned("free")
	s.eventually("both answer", func() error {
		if err := s.reachTCP(free); err != nil {
			return err
		}
		return s.reachTCP(vip)
	})
	owner := s.owner(vip)
	s.eventually("the limit is in force", func() error {
		const attempts, rate = 40, 5
		began := time.Now()
		n := s.connections(vip, attempts, 100*time.Millisecond)
		if most := rate + int(time.Since(began).Seconds()*rate) + 1; n > min(most, attempts-1) {
			return fmt.Errorf("%d of %d connections pass, want at most %d", n, attempts, most)
		}
		return nil
	})
	require.Equal(t, 40, s.connections(free, 40, 10*time.Second), "the other VIP has no limit")
	pod := s.speakerOf(owner)
	dropped, err := s.Metric(s.ctx, &pod, "lodestone_limit_dropped_connections_total", lodestone.Labels{"vip": vip})
	require.NoError(t, err)
	require.Positive(t, dropped)

	s.change("web", func(svc *corev1.Service) { delete(svc.Annotations, rateLimit) })
	s.eventually("all connections pass", func() error {
		if n := s.connections(vip, 40, 900*time.Millisecond); n < 40 { // before a SYN is sent again
			return fmt.Errorf("%d of 40", n)
		}
		return nil
	})
	require.NotContains(t, s.tables(owner), "lodestone")
}

// connections returns how many of so many connections, tried one after the
// other each within that time, are accepted.
func (s *story) connections(vip string, attempts int, timeout time.Duration) (accepted int) {
	dial := netns.Dialer(s.Lab.Namespace(lab.Client))
	for range attempts {
		ctx, cancel := context.WithTimeout(s.ctx, timeout)
		if conn, err := dial(ctx, "tcp", target(vip).String()); err == nil {
			conn.Close()
			accepted++
		}
		cancel()
	}
	return accepted
}

func (s *story) speakerOf(node string) corev1.Pod {
	s.Helper()
	pods, err := s.Pods(s.ctx, "speaker")
	require.NoError(s, err)
	for _, pod := range pods {
		if pod.Spec.NodeName == node {
			return pod
		}
	}
	s.Fatalf("node %s has no speaker", node)
	return corev1.Pod{}
}
