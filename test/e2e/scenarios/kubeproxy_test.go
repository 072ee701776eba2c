package scenarios

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"

	"github.com/lodestone-lb/lodestone/test/e2e/lab"
	"github.com/lodestone-lb/lodestone/test/e2e/probe"
)

// servedFrom waits until the VIP's port 80 is answered by a pod on that node.
func (s *story) servedFrom(vip, node string) {
	s.Helper()
	s.eventually("a pod on "+node+" answers at "+vip, func() error {
		ctx, cancel := context.WithTimeout(s.ctx, 10*time.Second)
		defer cancel()
		answer, err := probe.Get(ctx, s.Lab.Namespace(lab.Client), target(vip))
		if err == nil && answer.Node != node {
			err = fmt.Errorf("one on %s does", answer.Node)
		}
		return err
	})
}

// With policy Local the VIP is where its pod is, and moves with
// it; with policy Cluster it need not be. One node's kube-proxy is in mode iptables,
// those of the others in mode nftables, and it carries both families.
func TestPoliciesAndModesOfKubeProxy(t *testing.T) {
	s := begin(t)
	s.config(dualPools)
	s.echo(1)
	s.service("web", dualStack, localPolicy, port("http", corev1.ProtocolTCP, 80), port("udp", corev1.ProtocolUDP, 80))
	s.eventually("it has two addresses", func() error {
		if got := addresses(s.get("web")); len(got) != 2 {
			return fmt.Errorf("it has %q", got)
		}
		return nil
	})
	vips := addresses(s.get("web"))
	first := s.owner(vips[0])
	s.afterwards(func() { require.NoError(s, s.Lab.SetProxyMode(s.ctx, first, lab.NFTables)) })
	require.NoError(t, s.Lab.SetProxyMode(s.ctx, first, lab.IPTables))
	for _, vip := range vips {
		s.ownedBy(vip, first)
		s.servedFrom(vip, first)
		require.NoError(t, s.reachUDP(vip))
	}

	require.NoError(t, s.RunEcho(s.ctx, s.namespace, 1, first))
	s.eventually("the VIP follows the pod", func() error { return s.owned(vips[0], first, false) })
	second := s.owner(vips[0])
	for _, vip := range vips {
		s.ownedBy(vip, second)
		s.servedFrom(vip, second)
	}

	s.change("web", func(svc *corev1.Service) {
		svc.Spec.ExternalTrafficPolicy = corev1.ServiceExternalTrafficPolicyCluster
	})
	s.config(dualPools + fmt.Sprintf("advertisements:\n  - {name: lan, layer2: {preferredNodes: [{weight: 1, nodeSelector: {matchLabels: "+
		"{%s: %s}}}]}}\n", corev1.LabelHostname, first))
	for _, vip := range vips {
		s.ownedBy(vip, first)
		s.servedFrom(vip, second)
		s.eventually("it answers by UDP", func() error { return s.reachUDP(vip) })
	}
}

// A node whose kube-proxy has not started yet, which may take minutes on a new node, gets no
// VIP while other nodes have a kube-proxy.
func TestNodeWaitsForItsKubeProxy(t *testing.T) {
	s := begin(t)
	s.echo(3)
	s.service("web", port("http", corev1.ProtocolTCP, 80), port("udp", corev1.ProtocolUDP, 80))
	vip := s.assigned("web")
	s.steady(vip) // else what kube-proxy is to know when it goes on is of another story
	node := s.owner(vip)
	proxy, err := s.Lab.Process("kube-proxy-" + node)
	require.NoError(t, err)
	s.afterwards(func() { require.NoError(s, proxy.Thaw()) })
	require.NoError(t, proxy.Freeze())
	speaker := s.speakerOf(node)
	require.NoError(t, s.Terminate(s.ctx, &speaker))
	s.eventually("another node owns the VIP", func() error { return s.owned(vip, node, false) })
	s.eventually("the speaker that has started reports what it waits for", func() error {
		if !strings.Contains(s.logs(s.ctx, "speaker"), "does not answer, as it does on other nodes") {
			return errors.New("it does not")
		}
		return nil
	})
	s.always(3*time.Second, "the node gets no VIP", func() error {
		if now, err := s.Owner(s.ctx, vip); err == nil && now == node {
			return errors.New("it owns the VIP")
		}
		return nil
	})
	require.NoError(t, proxy.Thaw())
	s.eventually("the node has its VIP again", func() error { return s.owned(vip, node, true) })
	require.NoError(t, s.reachTCP(vip))
}
