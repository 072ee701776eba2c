package scenarios

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
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

// A VIP moves to its preferred node, away when that is lost, and back when
// it returns, which costs clients nothing. A selector outweighs the preference.
func TestPreferredNodeOwnsTheVIP(t *testing.T) {
	s := begin(t)
	vip := s.serveUDP("web")
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
	s.afterwards(func() { s.label("n2", excludeLabel, "") })
	s.losesNothing([]string{vip}, func() {
		s.label("n2", excludeLabel, "true")
		s.ownedBy(vip, "n3")
		s.label("n2", excludeLabel, "")
		s.ownedBy(vip, "n2")
	})
	s.oneAnswerer(vip)
}

// kubeadm labels each node of the control plane, and there may be no others.
func TestClusterOfControlPlaneNodesAloneHasVIPs(t *testing.T) {
	s := begin(t)
	s.afterwards(func() {
		for _, node := range s.Lab.Nodes() {
			s.label(node, excludeLabel, "")
		}
	})
	for _, node := range s.Lab.Nodes() {
		s.label(node, excludeLabel, "true")
	}
	s.echo(1)
	s.service("web")
	vip := s.assigned("web")
	s.prints(2, []string{"status"}, "nobody announces "+vip+": NodeExcluded")
	s.prints(2, []string{"explain", "vip", vip}, "ignoreExcludeLabel")
	s.config(usualPools + "\nignoreExcludeLabel: true\n")
	s.oneAnswerer(vip)
	s.prints(0, []string{"status"}, "")
}

// An advertisement is for the Services that it selects, on the
// interfaces that it names. Changes of owners are reported once.
func TestAdvertisementSelectsServices(t *testing.T) {
	s := begin(t)
	s.config(usualPools + `
advertisements:
  - name: public
    serviceSelector: {matchLabels: {public: "yes"}}
    layer2: {}
  - name: fibre
    serviceSelector: {matchLabels: {public: "yes"}}
    layer2: {interfaces: ["fibre*"], nodeSelector: {matchLabels: {kubernetes.io/hostname: n1}}}
`)
	s.echo(2)
	s.service("inner")
	vip := s.assigned("inner")
	s.mostly(2*time.Second, "nobody answers for a Service that no advertisement selects", func() error { return s.silent(vip) })
	s.change("inner", labelled("public", "yes"))
	s.eventually("the VIP answers", func() error { return s.reachTCP(vip) })
	s.service("web", labelled("public", "yes"))
	web := s.assigned("web")
	before, first := s.owner(vip), s.owner(web)
	time.Sleep(20 * time.Second) // an owner of less than ten seconds is not reported
	s.ownedBy(vip, before)
	s.ownedBy(web, first)
	require.Equal(t, fmt.Sprintf("node %s announces %s by layer 2", first, web), s.event(s.namespace, "Service", "web", "Announced"))

	s.change("inner", labelled("public", ""))
	s.afterwards(func() { s.label(first, excludeLabel, "") })
	s.label(first, excludeLabel, "true")
	s.eventually("nobody answers any more", func() error { return s.silent(vip) })
	require.Equal(t, vip, s.assigned("inner"), "it keeps its address")
	s.eventually("another node owns the other VIP", func() error { return s.owned(web, first, false) })
	second := s.owner(web)
	require.Equal(t, fmt.Sprintf("no node announces %s by layer 2 any more, node %s did: the advertisements do not select its Service "+
		"any more", vip, before),
		s.reportedOnce("inner", "NoOwner"))
	require.Equal(t, fmt.Sprintf("node %s announces %s instead of node %s: node %[3]s was taken out of load balancing by a label or a taint",
		second, web, first),
		s.reportedOnce("web", "OwnerChanged"))
	require.Contains(t, s.event("default", "Node", "n1", "InterfaceMissing"), `advertisement "fibre"`)
}

// reportedOnce waits for an Event about the Service with the reason, and returns its
// message. There is no second one, and no other of its owners.
func (s *story) reportedOnce(name, reason string) string {
	s.Helper()
	message := s.event(s.namespace, "Service", name, reason)
	list, err := s.Kube.CoreV1().Events(s.namespace).List(s.ctx,
		metav1.ListOptions{FieldSelector: "involvedObject.kind=Service,involvedObject.name=" + name})
	require.NoError(s, err)
	for _, e := range list.Items {
		if e.Reason == "OwnerChanged" || e.Reason == "NoOwner" {
			require.Equal(s, []any{reason, message, int32(1)}, []any{e.Reason, e.Message, max(e.Count, 1)})
		}
	}
	return message
}
