//go:build long

package scenarios

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/lodestone-lb/lodestone/test/e2e/lab"
	"github.com/lodestone-lb/lodestone/test/e2e/lodestone"
	"github.com/lodestone-lb/lodestone/test/e2e/probe"
	"github.com/lodestone-lb/lodestone/test/e2e/program"
)

// acrossVersions is a configuration that the last release understands. Services of the pool "late" prefer a node.
const acrossVersions = `
quarantine: 1s
pools:
  - {name: lan, addresses: [198.18.0.200-198.18.0.230], advertise: [segment]}
  - {name: late, addresses: [198.18.0.231-198.18.0.239], autoAssign: false, advertise: [late]}
  - {name: kept, addresses: [198.18.0.240-198.18.0.250], autoAssign: false, advertise: [kept]}
  - {name: routed, addresses: [198.18.17.0/24], autoAssign: false, advertise: [routers]}
advertisements:
  - {name: segment, layer2: {interfaces: ["[^w]*"]}}
  - {name: late, layer2: {preferredNodes: [{weight: 1, nodeSelector: {matchLabels: {kubernetes.io/hostname: "%s"}}}]}}
  - {name: kept, layer2: {forwarding: direct}}
  - {name: routers, bgp: {}}
peers:` + tor + "}\n"

// The last release is upgraded to this version by the guide, with a stop half way; rolled back; and upgraded again.
// Clients on the segment and behind a router lose no datagram, no address changes, no VIP has two owners or none, and
// no connection hangs.
func TestLastReleaseIsUpgradedAndComesBack(t *testing.T) {
	c := lastRelease(t)
	c.install(fmt.Sprintf(acrossVersions, "nobody"))
	c.traffic()
	watched := c.watchShown(c.held)
	c.openGuide("upgrade.md", "uninstall").follow("Before")
	kept := c.connect(c.held["kept"], 20, usual)
	for round := range 2 {
		g := c.openGuide("upgrade.md", "uninstall", "v0.2.0", "dev")
		g.before["rollout status deployment"] = func() {
			c.stopHalfway("dev", func(node string) {
				c.bothAreRead()
				if round == 0 {
					c.endpointOnTheNewSpeakersNode(node)
				}
				c.oneOwnerEach(time.Minute)
			})
		}
		c.unnoticed(func() {
			g.follow("The upgrade")
			c.allAre("dev")
		})
		if round == 0 {
			c.unnoticed(func() {
				g.follow("The way back")
				c.allAre(c.version)
			})
		}
	}
	c.askAll(kept)
	require.Empty(t, kept.Snapshot().Broken, "connections that are forwarded directly")
	require.Empty(t, watched(), "states in which a Service showed something else")
	c.prints(0, []string{"status"}, "All is well.", "version dev")
	c.prints(0, []string{"bgp", "peers"}, "established")
}

// Upgrades that fail: values that a chart does not accept; a configuration that the new version refuses; and a
// node that is unreachable meanwhile, and comes back with the old speaker. Each is reported, nothing is announced
// twice, and clients lose nothing.
func TestHalfAnUpgrade(t *testing.T) {
	c := lastRelease(t)
	understood := fmt.Sprintf(acrossVersions, "nobody")
	c.install(understood)
	c.traffic()
	for _, part := range []struct {
		name string
		run  func(c *crossing)
	}{
		{"values", (*crossing).valuesOfAnotherChart},
		{"configuration", func(c *crossing) { c.configurationIsRefused(understood) }},
		{"node", (*crossing).nodeIsUnreachable},
	} {
		if !t.Run(part.name, func(t *testing.T) {
			there := *c
			there.story = c.part(t)
			part.run(&there)
		}) {
			return
		}
	}
}

func (c *crossing) valuesOfAnotherChart() {
	before := c.podNames()
	const rules = "--set=monitoring.prometheusRule.enabled=true"
	require.ErrorContains(c, c.helm("upgrade", "lodestone", c.Lab.Chart(), "--reuse-values", "--set=image.tag=dev", rules),
		"upgrade with --reset-then-reuse-values")
	require.ErrorContains(c, c.helm("upgrade", "lodestone", c.chart(), "--reuse-values",
		"--set=monitoring.prometheusRule.runbooks=https://wiki.example.com"), "runbooks", "the old chart does not know it")
	require.Equal(c, before, c.podNames())
	c.prints(0, []string{"status"}, "All is well.")
}

func (c *crossing) configurationIsRefused(understood string) {
	c.unnoticed(func() {
		c.install(strings.Replace(understood, "peers:", "  - {name: regex, layer2: {interfaces: [\"^eth0$\"]}}\npeers:", 1))
		const why = "is a regular expression"
		c.prints(1, []string{"validate", "--live"}, why)
		c.Log(c.upgradeFails("1m"))
		require.Len(c, c.nodesOf("dev"), 1)
		c.prints(1, []string{"status"}, why, halfway)
		c.oneOwnerEach(10 * time.Second)
		require.NoError(c, c.helm("rollback", "lodestone", "--wait", "--timeout=3m"))
		c.allAre(c.version)
	})
	c.install(understood)
}

func (c *crossing) nodeIsUnreachable() {
	vip := c.held["a"]
	lost := c.owner(vip)
	c.echoAway(3, vip)
	for _, vip := range c.onSegment() {
		c.steady(vip)
	}
	c.steadyFrom(lab.Remote, c.held["routed"])
	c.afterwards(func() { require.NoError(c, c.Lab.HealNode(lost)) })
	require.NoError(c, c.Lab.NodeLoss(lost))
	for _, vip := range c.onSegment() {
		c.eventually("another node owns its VIPs", func() error { return c.owned(vip, lost, false) })
	}
	c.learnt(lab.Router, c.held["routed"], c.nodesBut(lost)...)
	c.unnoticed(func() {
		c.Log(c.upgradeFails("90s"))
		c.Logf("%q have new speakers, and %s is unreachable with its old one", c.nodesOf("dev"), lost)
		require.NotContains(c, c.nodesOf("dev"), lost)
		c.prints(2, []string{"status"}, lost, halfway)
		c.oneOwnerEach(10 * time.Second)
	})
	c.unnoticed(func() {
		require.NoError(c, c.Lab.HealNode(lost))
		require.NoError(c, c.helm(append(upgrade, c.Lab.Chart(), "--wait", "--timeout=4m")...))
		c.allAre("dev")
	})
	c.prints(0, []string{"status"}, "All is well.")
}

// halfway is in the status while versions differ.
const halfway = "an upgrade is under way, or has stopped half way"

// upgrade has the commands of the guide.
var upgrade = []string{"upgrade", "lodestone", "--reset-then-reuse-values", "--set=image.tag=dev"}

// upgradeFails runs an upgrade that helm gives up after that time, and returns its output.
func (c *crossing) upgradeFails(timeout string) error {
	c.Helper()
	err := c.helm(append(upgrade, c.Lab.Chart(), "--wait", "--timeout="+timeout)...)
	require.Error(c, err)
	return err
}

// crossing is the story of an upgrade from the last release.
type crossing struct {
	*story
	version string
	dir     string            // the release's sources, with its binaries in bin
	held    map[string]string // the addresses of the Services
}

// lastRelease builds the last release from the history, and begins a story in a lab without this version.
func lastRelease(t *testing.T) *crossing {
	t.Helper()
	var version, commit string
	built(t, func(b program.Builder, ctx context.Context) (string, error) {
		raw, err := os.ReadFile(filepath.Join(b.Root, "hack", "released.txt"))
		require.NoError(t, err)
		lines := strings.Split(strings.TrimSpace(string(raw)), "\n")
		version, commit, _ = strings.Cut(lines[len(lines)-1], " ")
		return b.Release(ctx, version, commit)
	})
	s := begin(t)
	dir, err := s.Lab.Release(s.ctx, version, commit)
	require.NoError(s, err)
	s.afterwards(s.forgetForwarding)
	s.uninstallLodestone()
	s.afterwards(func() {
		if s.Failed() {
			s.dump(s.ctx) // what these speakers have logged, before others are there
		}
	})
	return &crossing{story: s, version: version, dir: dir, held: map[string]string{}}
}

func (c *crossing) chart() string { return filepath.Join(c.dir, "deploy", "chart") }

// install installs the release, or changes its configuration.
func (c *crossing) install(config string) {
	c.Helper()
	values := filepath.Join(c.TempDir(), "values.yaml")
	text := "speaker: {directForwarding: true}\nconfig:" + strings.ReplaceAll(config, "\n", "\n  ") + "\n"
	require.NoError(c, os.WriteFile(values, []byte(text), 0o600))
	require.NoError(c, c.Upgrade(c.ctx, c.chart(), "--install", "--values="+values, "--set=image.tag="+c.version))
	c.allAre(c.version)
}

// helm runs helm in Lodestone's namespace.
func (c *crossing) helm(args ...string) error {
	_, err := c.Lab.Helm(c.ctx, append(slices.Clip(args), "--namespace", lodestone.Namespace)...)
	return err
}

// traffic makes Services on the segment and behind the router.
func (c *crossing) traffic() {
	c.Helper()
	c.echo(3)
	c.latePod(c.Lab.Nodes()[0])
	udp, http := port("udp", corev1.ProtocolUDP, 80), port("http", corev1.ProtocolTCP, 80)
	for name, pool := range map[string]string{"a": "lan", "b": "lan", "c": "lan", "kept": "kept", "routed": "routed"} {
		c.service(name, udp, http, annotated(poolAnnotation, pool))
		c.held[name] = c.assigned(name)
	}
	c.service("late", udp, localPolicy, annotated(poolAnnotation, "late"), func(svc *corev1.Service) { svc.Spec.Selector["app"] = "late" })
	c.held["late"] = c.assigned("late")
	for _, vip := range c.onSegment() {
		c.steady(vip)
	}
	c.learnt(lab.Router, c.held["routed"], c.Lab.Nodes()...)
	c.steadyFrom(lab.Remote, c.held["routed"])
}

// onSegment are the VIPs that every node may own on the segment.
func (c *crossing) onSegment() (vips []string) {
	for _, name := range []string{"a", "b", "c", "kept"} {
		vips = append(vips, c.held[name])
	}
	return vips
}

// unnoticed checks that no datagram is lost while move happens, that connections go on or end, and that all is as
// it was afterwards.
func (c *crossing) unnoticed(move func()) {
	c.Helper()
	connections := map[string]*probe.Connections{}
	for host, name := range map[string]string{lab.Client: "a", lab.Remote: "routed"} {
		options := probe.Options{Namespace: c.Lab.Namespace(host), Target: target(c.held[name]), Interval: usual.interval}
		opened, err := probe.Connect(c.ctx, options, 10)
		require.NoError(c, err)
		defer opened.Stop()
		connections[name] = opened
	}
	client, remote := c.FromClient(), c.FromRemote()
	client.Interval, remote.Interval = 20*time.Millisecond, 20*time.Millisecond
	began := time.Now()
	c.losesNothingFrom(client, c.onSegment(), func() { c.losesNothingFrom(remote, []string{c.held["routed"]}, move) })
	for name, opened := range connections {
		c.askAll(opened)
		record := opened.Snapshot()
		c.Logf("after %s, %d of %d connections to %s have ended; the longest pause was %s", time.Since(began).Round(time.Second),
			len(record.Broken), record.Opened, name, record.WorstPause.Round(time.Millisecond))
		for _, broken := range record.Broken {
			assert.True(c, ended(broken.Err) || errors.Is(broken.Err, unix.EPIPE), "the client was left waiting: %v", broken)
		}
	}
	require.NoError(c, c.showAll(c.held))
	c.oneOwnerEach(0)
}

// oneOwnerEach waits until each VIP on the segment has one owner, and checks for that long that it has.
func (c *crossing) oneOwnerEach(d time.Duration) {
	c.Helper()
	for _, vip := range c.onSegment() {
		c.oneAnswerer(vip)
	}
	c.mostly(d, "each has one owner", func() (err error) {
		for _, vip := range c.onSegment() {
			err = errors.Join(err, c.OneAnswerer(c.ctx, vip))
		}
		return err
	})
}

// nodesOf are the nodes whose speakers have the version.
func (c *crossing) nodesOf(version string) (nodes []string) {
	c.Helper()
	pods, err := c.Pods(c.ctx, "speaker")
	require.NoError(c, err)
	for _, pod := range pods {
		if strings.HasSuffix(pod.Spec.Containers[0].Image, ":"+version) {
			nodes = append(nodes, pod.Spec.NodeName)
		}
	}
	return nodes
}

// allAre waits until all speakers have the version, and the router all routes.
func (c *crossing) allAre(version string) {
	c.Helper()
	c.eventually("all speakers are of "+version, func() error {
		if of := c.nodesOf(version); len(of) != len(c.Lab.Nodes()) {
			return fmt.Errorf("those of %q are", of)
		}
		return c.speakersReady(true)
	})
	if vip, ok := c.held["routed"]; ok {
		c.learnt(lab.Router, vip, c.Lab.Nodes()...)
	}
}

// stopHalfway keeps the roll-out of the speakers at the first new one, while between does what it does.
func (c *crossing) stopHalfway(version string, between func(node string)) {
	c.Helper()
	c.eventually("the first speaker is replaced", func() error {
		if len(c.nodesOf(version)) == 0 {
			return errors.New("none is")
		}
		return nil
	})
	strategy := func(strategy string) {
		c.Helper()
		_, err := c.Kube.AppsV1().DaemonSets(lodestone.Namespace).Patch(c.ctx, lodestone.Speaker, types.MergePatchType,
			[]byte(`{"spec":{"updateStrategy":`+strategy+`}}`), metav1.PatchOptions{})
		require.NoError(c, err)
	}
	strategy(`{"type":"OnDelete","rollingUpdate":null}`)
	c.eventually("the speakers are ready", func() error { return c.speakersReady(true) })
	c.learnt(lab.Router, c.held["routed"], c.Lab.Nodes()...)
	fresh := c.nodesOf(version)
	require.Less(c, len(fresh), len(c.Lab.Nodes()), "it was stopped too late")
	began := time.Now()
	between(fresh[0])
	c.Logf("%d of %d speakers were of %s for %s", len(fresh), len(c.Lab.Nodes()), version, time.Since(began).Round(time.Second))
	strategy(`{"type":"RollingUpdate","rollingUpdate":{"maxUnavailable":1}}`)
}

// bothAreRead checks that the commands of both versions read the Leases and reports of both.
func (c *crossing) bothAreRead() {
	c.Helper()
	for _, bin := range []string{filepath.Join(c.dir, "bin"), filepath.Join(c.Lab.Root, "bin")} {
		for command, want := range map[string][]string{
			"status":                     {"3 of 3 nodes ready, version dev and " + c.version, "3 of 3 up", halfway},
			"bgp peers":                  append(c.Lab.Nodes(), "established"),
			"explain vip " + c.held["a"]: {c.owner(c.held["a"])},
		} {
			c.eventually(fmt.Sprintf("%s %s reports of both versions", bin, command), func() error {
				args := append([]string{filepath.Join(bin, "lodestone")}, strings.Fields(command)...)
				out, _ := c.Lab.Command(c.ctx, lab.ControlPlane, args...).CombinedOutput() // the exit code is a warning's
				for _, text := range want {
					if !strings.Contains(string(out), text) {
						return fmt.Errorf("no %q: %s", text, out)
					}
				}
				return nil
			})
		}
	}
}

// endpointOnTheNewSpeakersNode moves a VIP with policy Local from a node with an old speaker to the one with the new
// speaker, because a pod has become ready there. The new speaker waits for its kube-proxy, but not for longer than the
// old one answers. That may be too short for a busy kube-proxy, which is why new speakers answer for longer.
func (c *crossing) endpointOnTheNewSpeakersNode(node string) {
	c.Helper()
	c.config(fmt.Sprintf(acrossVersions, node))
	old, vip := c.nodesOf(c.version)[0], c.held["late"]
	pods := c.Kube.CoreV1().Pods(c.namespace)
	require.NoError(c, pods.DeleteCollection(c.ctx, metav1.DeleteOptions{}, metav1.ListOptions{LabelSelector: "app=late"}))
	c.latePod(old)
	c.eventually("the node with the pod serves", func() error { return errors.Join(c.owned(vip, old, true), c.reachUDP(vip)) })
	var silence time.Duration
	records, err := lodestone.During(c.ctx, c.FromClient(), []netip.AddrPort{target(vip)}, func() error {
		c.latePod(node)
		return lodestone.Wait(c.ctx, node+" owns the VIP", func() error {
			asked := time.Now()
			defer func() { silence = max(silence, time.Since(asked)) }()
			return c.owned(vip, node, true) // asks until somebody answers
		})
	})
	require.NoError(c, err)
	record := records[target(vip)]
	c.Logf("the VIP moved to the new pod: nobody answered for %s; %s", silence.Round(time.Millisecond), record.Losses())
	require.Less(c, silence, 3*time.Second, "a client's kernel asks for as long")
	require.Less(c, record.Lost(), 600, "three seconds'")
}

// latePod runs an echo pod on the node, for Services with the selector app=late.
func (c *crossing) latePod(node string) {
	c.Helper()
	pods := c.Kube.CoreV1().Pods(c.namespace)
	pod, err := pods.Create(c.ctx, lodestone.EchoPod("late", node), metav1.CreateOptions{})
	require.NoError(c, err)
	c.eventually("the pod on "+node+" is ready", func() error {
		now, err := pods.Get(c.ctx, pod.Name, metav1.GetOptions{})
		if err == nil && !lodestone.Ready(now) {
			err = errors.New("it is not")
		}
		return err
	})
}
