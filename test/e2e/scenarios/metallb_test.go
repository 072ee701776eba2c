//go:build long

package scenarios

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"

	"github.com/lodestone-lb/lodestone/test/e2e/metallb"
	"github.com/lodestone-lb/lodestone/test/e2e/program"
)

// unusedProfile cannot be deleted without MetalLB's webhook, which goes with its
// controller.
const unusedProfile = `---
apiVersion: metallb.io/v1beta1
kind: BFDProfile
metadata: {name: unused, namespace: metallb-system}
`

// Services of a real MetalLB are moved by the guide, word for word: they keep their
// addresses, and their clients lose nothing.
func TestServicesOfMetalLBAreTakenOverWithoutLoss(t *testing.T) {
	built(t, program.Builder.MetalLB)
	s := begin(t)
	s.uninstallLodestone() // it comes when MetalLB has been there for long
	old := s.runMetalLB(metalLB + unusedProfile)
	s.echo(3)
	const web, shared = "198.18.0.141", "198.18.0.140"
	vips := map[string]string{"web": web, "dns": shared, "mail": shared}
	s.service("web", port("udp", corev1.ProtocolUDP, 80), port("http", corev1.ProtocolTCP, 80),
		annotated("metallb.io/loadBalancerIPs", web), annotated("metallb.io/address-pool", "lan.v4"))
	s.service("dns", port("udp", corev1.ProtocolUDP, 80), annotated("metallb.universe.tf/allow-shared-ip", "both"))
	s.holds("dns", shared)
	s.service("mail", port("smtp", corev1.ProtocolTCP, 25), annotated("metallb.universe.tf/allow-shared-ip", "both"))
	for name, vip := range vips {
		s.holds(name, vip)
		s.oneAnswerer(vip)
	}
	s.steady(web)
	s.steady(shared)

	g, watched := s.openGuide("migrate.md", "kube-vip"), s.watchShown(vips)
	s.losesNothing([]string{web, shared}, func() {
		require.Contains(t, g.follow("1. The configuration"), "3 Services that have addresses keep them")
		g.installBeside("web")
		owner, flow, opened := s.owner(web), s.openStream(web), time.Now()
		g.follow("4. Layer 2: hand over at once")
		require.Contains(t, s.event(s.namespace, "Service", "web", "Adopted"), web)
		for _, vip := range vips {
			s.oneAnswerer(vip)
		}
		// A line every 10 ms, for five seconds more. MetalLB's speakers may take the address
		// over from each other while they end, which ends the connection; but the client must
		// not wait on a dead one.
		err := flow.lines(int(time.Since(opened)/(10*time.Millisecond)) + 500)
		t.Logf("a connection through %s, after %s took over, ended by: %v", owner, s.owner(web), err)
		require.True(t, err == nil || ended(err), "the client was left waiting: %v", err)
		g.follow("6. Look, and clean up")
	})
	require.Empty(t, watched(), "states in which a Service showed something else")
	left, err := old.Left(s.ctx)
	require.NoError(t, err)
	require.Empty(t, left, "the guide leaves something of MetalLB")
}

// runMetalLB runs MetalLB with the objects until the story ends, at the latest.
func (s *story) runMetalLB(objects string) *metallb.MetalLB {
	s.Helper()
	m, err := metallb.New(s.ctx, s.Lab)
	require.NoError(s, err)
	s.afterwards(func() {
		if s.Failed() {
			s.Log(m.Symptoms(s.ctx))
		}
		require.NoError(s, m.Remove(s.ctx))
	})
	require.NoError(s, m.Install(s.ctx))
	require.NoError(s, m.Apply(s.ctx, objects))
	return m
}
