package scenarios

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

// metalLB are the objects of a MetalLB that announces by layer 2.
const metalLB = `apiVersion: metallb.io/v1beta1
kind: IPAddressPool
metadata: {name: lan.v4, namespace: metallb-system}
spec: {addresses: [198.18.0.140-198.18.0.149]}
---
apiVersion: metallb.io/v1beta1
kind: L2Advertisement
metadata: {name: lan, namespace: metallb-system}
`

// Services of MetalLB change hands: they keep their addresses, and clients that
// talk to them lose nothing.
func TestServicesOfMetalLBAreTakenOverWithoutLoss(t *testing.T) {
	s := begin(t)
	s.config("\nquarantine: 1s\n") // step 2 of the guide: Lodestone is there, and has no pools
	s.echo(3)
	node := s.Lab.Nodes()[0]
	vips := map[string]string{"web": "198.18.0.141", "dns": "198.18.0.144", "mail": "198.18.0.144"}
	s.service("web", port("udp", corev1.ProtocolUDP, 80), annotated("metallb.io/loadBalancerIPs", vips["web"]), annotated("metallb.io/address-pool", "lan.v4"))
	s.service("dns", port("udp", corev1.ProtocolUDP, 80), annotated("metallb.universe.tf/allow-shared-ip", "both"))
	s.service("mail", port("smtp", corev1.ProtocolTCP, 25), annotated("metallb.universe.tf/allow-shared-ip", "both"))
	for name, vip := range vips {
		s.givenByMetalLB(name, vip)
	}
	for _, vip := range []string{vips["web"], vips["dns"]} {
		s.announcedByMetalLB(node, vip)
		s.eventually("MetalLB serves "+vip, func() error { return s.reachUDP(vip) })
	}
	s.always(2*time.Second, "Lodestone touches nothing", func() error { return s.showAll(vips) })
	document := s.migrated()

	s.losesNothing([]string{vips["web"], vips["dns"]}, func() { // step 4
		for _, vip := range []string{vips["web"], vips["dns"]} {
			s.withdrawnByMetalLB(node, vip)
		}
		require.NoError(s, s.WriteConfig(s.ctx, document))
		for name, vip := range vips {
			s.holds(name, vip)
		}
		for _, vip := range []string{vips["web"], vips["dns"]} {
			s.oneAnswerer(vip)
		}
	})
	require.NoError(t, s.showAll(vips))
	require.Contains(t, s.event(s.namespace, "Service", "web", "Adopted"), vips["web"])
}

// The wrong order: the old announcer still answers when Lodestone takes over.
// The Service keeps its address, and is served when the announcer is gone.
func TestOldAnnouncerThatStillAnswersMovesNobody(t *testing.T) {
	s := begin(t)
	s.config("\nquarantine: 1s\n")
	s.echo(2)
	const vip = "198.18.0.142"
	node := s.Lab.Nodes()[0]
	s.service("web", port("udp", corev1.ProtocolUDP, 80))
	s.givenByMetalLB("web", vip)
	s.announcedByMetalLB(node, vip)
	require.NoError(t, s.Configure(s.ctx, s.migrated()))
	s.holds("web", vip)
	s.refused("web", "AddressConflict")
	require.NoError(t, s.reachUDP(vip), "the old announcer goes on")
	s.withdrawnByMetalLB(node, vip)
	s.eventually("Lodestone announces the address", func() error {
		if text := conditionText(s.get("web")); !strings.HasPrefix(text, "True Allocated") {
			return errors.New(text)
		}
		return s.OneAnswerer(s.ctx, vip)
	})
	s.holds("web", vip)
}

// What no pool has, and what has another class, stays as it is.
func TestServicesThatCannotBeTakenOverAreLeftAlone(t *testing.T) {
	s := begin(t)
	s.config("\ncompatibility: [metallb]" + onePool("lan", "198.18.0.140-198.18.0.149"))
	s.service("classy", class("metallb.io/metallb"))
	s.givenByMetalLB("classy", "198.18.0.143")
	s.config("\nquarantine: 1s\n")
	s.service("outside")
	s.givenByMetalLB("outside", "198.18.0.199")
	s.config("\ncompatibility: [metallb]" + onePool("lan", "198.18.0.140-198.18.0.149"))
	require.Contains(t, s.refused("outside", "AddressOutsidePools"), "another load balancer has given it 198.18.0.199")
	s.always(2*time.Second, "both keep their status", func() error {
		return s.showAll(map[string]string{"classy": "198.18.0.143", "outside": "198.18.0.199"})
	})
	require.Empty(t, s.get("classy").Finalizers)
}

// migrated is what lodestone migrate makes of MetalLB's objects.
func (s *story) migrated() string {
	s.Helper()
	out, code, err := s.CLI(s.ctx, metalLB, "migrate", "metallb", "-", "-o", "json")
	require.NoError(s, err)
	require.Zero(s, code, out)
	var answer struct{ Configuration json.RawMessage }
	require.NoError(s, json.Unmarshal([]byte(out), &answer), out)
	return string(answer.Configuration) // JSON is YAML
}

// givenByMetalLB writes the status as MetalLB's controller does.
func (s *story) givenByMetalLB(name, vip string) {
	s.Helper()
	body := fmt.Sprintf(`{"metadata":{"annotations":{"metallb.io/ip-allocated-from-pool":"lan.v4"}},"status":{"loadBalancer":{"ingress":[{"ip":%q}]}}}`, vip)
	_, err := s.Kube.CoreV1().Services(s.namespace).Patch(s.ctx, name, types.MergePatchType, []byte(body), metav1.PatchOptions{}, "status")
	require.NoError(s, err)
}

// announcedByMetalLB has the node answer for the VIP: what matters of a speaker
// to clients and to ours.
func (s *story) announcedByMetalLB(node, vip string) {
	s.Helper()
	out, err := s.Lab.Command(s.ctx, node, "ip", "address", "add", vip+"/32", "dev", "eth0").CombinedOutput()
	require.NoError(s, err, "%s", out)
	s.Cleanup(func() { // a story may have done so
		_ = s.Lab.Command(context.WithoutCancel(s.ctx), node, "ip", "address", "delete", vip+"/32", "dev", "eth0").Run()
	})
}

func (s *story) withdrawnByMetalLB(node, vip string) {
	s.Helper()
	out, err := s.Lab.Command(s.ctx, node, "ip", "address", "delete", vip+"/32", "dev", "eth0").CombinedOutput()
	require.NoError(s, err, "%s", out)
}

// showAll checks what users of the Services see.
func (s *story) showAll(vips map[string]string) error {
	for name, vip := range vips {
		svc, err := s.Kube.CoreV1().Services(s.namespace).Get(s.ctx, name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		if got := addresses(svc); !slices.Equal(got, []string{vip}) {
			return fmt.Errorf("%s shows %q", name, got)
		}
	}
	return nil
}
