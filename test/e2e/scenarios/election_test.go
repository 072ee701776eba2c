package scenarios

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
)

// ownedBy waits until the node owns the VIP.
func (s *story) ownedBy(vip, node string) {
	s.Helper()
	s.eventually(node+" owns "+vip, func() error {
		if now := s.owner(vip); now != node {
			return fmt.Errorf("%s does", now)
		}
		return nil
	})
}

// Scenario 10: a preferred node is chosen, fallen back from, and reclaimed;
// preference does not outweigh a selector.
func TestPreferredNodeOwnsTheVIP(t *testing.T) {
	s := begin(t)
	s.echo(3)
	s.service("web", port("udp", corev1.ProtocolUDP, 80))
	vip := s.assigned("web")
	s.echoAway(3, vip)
	const advertisement = `
advertisements:
  - name: lan
    layer2:
      nodeSelector: {matchExpressions: [{key: kubernetes.io/hostname, operator: NotIn, values: [n1]}]}
      preferredNodes:
        - {weight: 100, nodeSelector: {matchLabels: {kubernetes.io/hostname: n1}}}
        - {weight: 10, nodeSelector: {matchLabels: {kubernetes.io/hostname: %s}}}
`
	for _, preferred := range []string{"n2", "n3", "n2"} {
		s.config(usualPools + fmt.Sprintf(advertisement, preferred))
		s.ownedBy(vip, preferred)
		s.oneAnswerer(vip)
	}
	s.label("n2", "node.kubernetes.io/exclude-from-external-load-balancers", "true")
	s.ownedBy(vip, "n3")
	s.label("n2", "node.kubernetes.io/exclude-from-external-load-balancers", "")
	s.ownedBy(vip, "n2")
	s.oneAnswerer(vip)
}

// Scenario 9: an advertisement is for the Services that it selects.
func TestAdvertisementSelectsServices(t *testing.T) {
	s := begin(t)
	s.config(usualPools + `
advertisements:
  - name: public
    serviceSelector: {matchLabels: {public: "yes"}}
    layer2: {}
`)
	s.echo(2)
	s.service("inner")
	vip := s.assigned("inner")
	s.always(2*time.Second, "nobody answers for a Service that no advertisement selects", func() error { return s.silent(vip) })
	s.change("inner", labelled("public", "yes"))
	s.eventually("the VIP answers", func() error { return s.reachTCP(vip) })
	s.change("inner", labelled("public", ""))
	s.eventually("nobody answers any more", func() error { return s.silent(vip) })
	require.Equal(t, vip, s.assigned("inner"), "it keeps its address")
}
