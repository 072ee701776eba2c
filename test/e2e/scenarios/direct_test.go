package scenarios

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/lodestone-lb/lodestone/test/e2e/lab"
	"github.com/lodestone-lb/lodestone/test/e2e/lan"
	"github.com/lodestone-lb/lodestone/test/e2e/lodestone"
	"github.com/lodestone-lb/lodestone/test/e2e/probe"
)

const directForwarding = `
advertisements:
  - name: lan
    layer2: {forwarding: direct%s}
`

// preferring is the part of directForwarding that prefers a node.
func preferring(node string) string {
	return fmt.Sprintf(", preferredNodes: [{weight: 1, nodeSelector: {matchLabels: {kubernetes.io/hostname: %s}}}]", node)
}

// With direct forwarding no TCP connection ends because the VIP moves: by label, by the
// configuration, while the speakers are replaced, when one is killed, when it is switched on
// or off. Pods see the client's address with policy Local, and more nodes than the owner
// serve. The nodes' kube-proxies are in different modes.
func TestConnectionsOutliveMovesOfTheVIP(t *testing.T) {
	s := begin(t)
	s.forwardDirectly()
	s.echo(6)
	for _, policy := range []corev1.ServiceExternalTrafficPolicy{"Local", "Cluster"} {
		t.Run(string(policy), func(t *testing.T) {
			s, name := s.part(t), strings.ToLower(string(policy))
			s.service(name, func(svc *corev1.Service) { svc.Spec.ExternalTrafficPolicy = policy })
			vip := s.assigned(name)
			s.eventually("the VIP answers", func() error { return s.reachTCP(vip) })
			before := s.connect(vip, 20)
			s.config(usualPools + fmt.Sprintf(directForwarding, ""))
			s.forwards()
			all := s.connect(vip, 60)
			if policy == "Local" {
				require.Greater(t, len(all.Snapshot().Nodes), 1, "the owner alone serves")
			}
			lives := func(what string) {
				time.Sleep(500 * time.Millisecond) // each asks again
				for _, c := range []*probe.Connections{before, all} {
					require.Empty(t, c.Snapshot().Broken, what)
				}
			}
			lives("switched on")

			owner := s.owner(vip)
			s.afterwards(func() { s.label(owner, excludeLabel, "") })
			s.label(owner, excludeLabel, "true")
			s.eventually("the VIP moves", func() error { return s.owned(vip, owner, false) })
			lives("excluded the owner")
			s.label(owner, excludeLabel, "")
			s.ownedBy(vip, owner)
			lives("the owner is back")

			for _, node := range s.nodesBut(owner) {
				s.config(usualPools + fmt.Sprintf(directForwarding, preferring(node)))
				s.ownedBy(vip, node)
				lives("preferred " + node)
			}
			require.NoError(t, s.RollSpeakers(s.ctx))
			lives("replaced the speakers")
			s.killSpeaker(s.owner(vip))
			lives("killed the owner's speaker")
			s.eventually("somebody owns the VIP", func() error { return s.OneAnswerer(s.ctx, vip) })
			lives("it is back")

			s.config(usualPools)
			time.Sleep(2 * time.Second)
			lives("switched off")
			for _, c := range []*probe.Connections{before, all} {
				record := c.Stop()
				require.Empty(t, record.Broken)
				t.Logf("%d connections on %v, %d requests, the longest pause %s", record.Opened, record.Nodes, record.Requests, record.WorstPause)
			}
		})
	}
}

// When the owner loses its power, connections whose pod is elsewhere go on. Those of its own
// pods go on, too, if it is back soon, and end otherwise. Endpoints that come change nothing.
func TestConnectionsOutliveTheOwner(t *testing.T) {
	s := begin(t)
	s.forwardDirectly()
	s.echo(3)
	s.config(usualPools + fmt.Sprintf(directForwarding, ""))
	s.service("web", func(svc *corev1.Service) { svc.Spec.ExternalTrafficPolicy = "Local" })
	vip := s.assigned("web")
	s.eventually("the VIP answers", func() error { return s.reachTCP(vip) })
	s.forwards()
	before := s.connect(vip, 20)
	s.echo(6)
	all := s.connect(vip, 60)
	require.Empty(t, before.Snapshot().Broken, "endpoints were added")
	nodes := all.Snapshot().Nodes
	owner := s.owner(vip)
	require.True(t, len(nodes) > 1 && nodes[owner] > 0, "%v, owner %s", nodes, owner)
	s.afterwards(func() { require.NoError(s, lan.PlugIn(owner)) })
	require.NoError(t, lan.Unplug(owner))
	s.eventually("the VIP moves", func() error { return s.owned(vip, owner, false) })
	time.Sleep(3 * time.Second)
	require.NoError(t, lan.PlugIn(owner))
	s.ownedBy(vip, owner)
	time.Sleep(10 * time.Second) // TCP retransmits late by then
	require.Empty(t, all.Snapshot().Broken, "the owner was back soon")

	require.NoError(t, lan.Unplug(owner))
	s.eventually("connections to its pods end", func() error {
		if broken := len(all.Snapshot().Broken); broken < nodes[owner] {
			return fmt.Errorf("%d of %d have", broken, nodes[owner])
		}
		return nil
	})
	time.Sleep(2 * time.Second)
	require.Len(t, all.Snapshot().Broken, nodes[owner], "no other one has")
	require.Less(t, s.connect(vip, 20).Snapshot().Nodes[owner], 1, "new connections go elsewhere")
	require.NoError(t, lan.PlugIn(owner))
	s.ownedBy(vip, owner)
	require.Len(t, all.Snapshot().Broken, nodes[owner], "it is back")
}

// forwardDirectly gives the speakers the right to, until the test ends.
func (s *story) forwardDirectly() {
	s.Helper()
	s.afterwards(func() {
		if s.Failed() {
			s.dump(s.ctx) // what these speakers have logged, before others are there
		}
		require.NoError(s, s.Upgrade(s.ctx, s.Lab.Chart()))
	})
	require.NoError(s, s.Upgrade(s.ctx, s.Lab.Chart(), "--set=speaker.directForwarding=true"))
}

// forwards waits until all nodes say that they have the rules, and have heard it of each other.
func (s *story) forwards() {
	s.Helper()
	s.eventually("all nodes forward", func() error {
		leases, err := s.Kube.CoordinationV1().Leases(lodestone.Namespace).List(s.ctx, metav1.ListOptions{})
		if err != nil {
			return err
		}
		var forward []string
		for _, l := range leases.Items {
			if strings.Contains(l.Annotations["lodestone.io/report"], `"forwards":true`) {
				forward = append(forward, l.Name)
			}
		}
		if len(forward) < len(s.Lab.Nodes()) {
			return fmt.Errorf("of %q alone the Leases say so", forward)
		}
		return nil
	})
	time.Sleep(time.Second)
}

// connect opens TCP connections to the VIP, with ten requests a second on each, until the
// test ends.
func (s *story) connect(vip string, n int) *probe.Connections {
	s.Helper()
	c, err := probe.Connect(s.ctx, probe.Options{Namespace: "ls-" + lab.Client, Target: target(vip), Interval: 100 * time.Millisecond}, n)
	require.NoError(s, err)
	s.Cleanup(func() { c.Stop() })
	return c
}
