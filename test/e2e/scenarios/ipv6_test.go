package scenarios

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"

	"github.com/lodestone-lb/lodestone/test/e2e/lab"
)

const dualPools = `
quarantine: 0s
pools:
  - name: lan
    addresses: [198.18.0.200-198.18.0.250, "2001:db8:0:1::200-2001:db8:0:1::250"]
`

func families(policy corev1.IPFamilyPolicy, families ...corev1.IPFamily) option {
	return func(svc *corev1.Service) { svc.Spec.IPFamilyPolicy, svc.Spec.IPFamilies = &policy, families }
}

// have waits until the Service has exactly these addresses, in this order.
func (s *story) have(name string, want ...string) {
	s.Helper()
	s.eventually(fmt.Sprintf("Service %s has %q", name, want), func() error {
		svc := s.get(name)
		if got := addresses(svc); fmt.Sprint(got) != fmt.Sprint(want) {
			return fmt.Errorf("it has %q: %s", got, conditionText(svc))
		}
		return nil
	})
}

// A client that has never heard of the VIP finds it, one
// node answers, and the client's own checks of its neighbour are answered.
func TestIPv6ServiceIsReachedAndHasOneAnswerer(t *testing.T) {
	s := begin(t)
	s.config(dualPools)
	s.echo(3)
	// No other story's: a host that has taken it for its own keeps it from Services.
	s.service("six", families(corev1.IPFamilyPolicySingleStack, corev1.IPv6Protocol), annotated(addrAnnotation, "2001:db8:0:1::240"),
		port("http", corev1.ProtocolTCP, 80), port("udp", corev1.ProtocolUDP, 80))
	vip := s.assigned("six")
	require.True(t, netip.MustParseAddr(vip).Is6())
	s.eventually("the VIP answers by TCP", func() error { return s.reachTCP(vip) })
	s.eventually("the VIP answers by UDP", func() error { return s.reachUDP(vip) })
	s.oneAnswerer(vip)

	// A unicast solicitation: the client checks a neighbour that it knows, and
	// may not ask everybody.
	s.onClient("sysctl", "-w", "net.ipv6.neigh.eth0.mcast_solicit=0")
	s.Cleanup(func() { s.onClient("sysctl", "-w", "net.ipv6.neigh.eth0.mcast_solicit=3") })
	s.onClient("ip", "neighbor", "change", vip, "dev", "eth0", "nud", "probe")
	s.eventually("the client's check is answered", func() error {
		if out := s.onClient("ip", "-6", "neighbor", "show", vip); !strings.Contains(out, "REACHABLE") {
			return errors.New(out)
		}
		return nil
	})

	// A host that gives itself the VIP learns by duplicate address detection
	// that it is in use.
	for _, name := range []string{"all", "eth0"} { // the lab's hosts do without
		s.onClient("sysctl", "-w", "net.ipv6.conf."+name+".accept_dad=1")
		s.onClient("sysctl", "-w", "net.ipv6.conf."+name+".dad_transmits=5") // a busy machine may be late for one
		s.Cleanup(func() {
			s.onClient("sysctl", "-w", "net.ipv6.conf."+name+".accept_dad=0", "net.ipv6.conf."+name+".dad_transmits=1")
		})
	}
	s.onClient("ip", "address", "add", vip+"/64", "dev", "eth0")
	s.Cleanup(func() { s.onClient("ip", "address", "delete", vip+"/64", "dev", "eth0") })
	s.eventually("the client learns that the address is taken", func() error {
		if out := s.onClient("ip", "-6", "address", "show", "dev", "eth0"); !strings.Contains(out, "dadfailed") {
			return errors.New(out)
		}
		return nil
	})
	s.delete("six")
	s.eventually("nobody answers for the freed address", func() error { return s.silent(vip) })
}

// onClient runs a command on the client and returns what it prints.
func (s *story) onClient(args ...string) string {
	s.Helper()
	out, err := s.Lab.Command(context.WithoutCancel(s.ctx), lab.Client, args...).CombinedOutput()
	require.NoError(s, err, "%q: %s", args, out)
	return string(out)
}

func TestIPv6NodePowerLoss(t *testing.T) {
	s := begin(t)
	s.config(dualPools)
	s.echo(3)
	s.service("six", families(corev1.IPFamilyPolicySingleStack, corev1.IPv6Protocol), port("udp", corev1.ProtocolUDP, 80))
	vip := s.assigned("six")
	s.echoAway(3, vip)
	s.losePower(vip, 5)
}

// Families come and go with the Service and with the pools.
func TestDualStackInAllItsTransitions(t *testing.T) {
	s := begin(t)
	s.config(dualPools)
	s.echo(2)
	const four, six = "198.18.0.200", "2001:db8:0:1::200"
	both := []corev1.IPFamily{corev1.IPv4Protocol, corev1.IPv6Protocol}
	s.service("web", families(corev1.IPFamilyPolicyRequireDualStack, both...))
	s.have("web", four, six)
	for _, vip := range []string{four, six} {
		s.eventually(vip+" answers", func() error { return s.reachTCP(vip) })
		s.oneAnswerer(vip)
	}
	s.service("reversed", families(corev1.IPFamilyPolicyPreferDualStack, corev1.IPv6Protocol, corev1.IPv4Protocol))
	s.have("reversed", "2001:db8:0:1::201", "198.18.0.201")

	s.change("web", func(svc *corev1.Service) {
		single := corev1.IPFamilyPolicySingleStack
		svc.Spec.IPFamilyPolicy, svc.Spec.IPFamilies, svc.Spec.ClusterIPs = &single, both[:1], svc.Spec.ClusterIPs[:1]
	})
	s.have("web", four)
	require.NoError(t, s.reachTCP(four), "the family that stays is not disturbed")

	// A pool that has only one family, and gains the other.
	s.config("\nquarantine: 0s\npools:\n  - {name: lan, addresses: [198.18.0.200-198.18.0.250]}\n")
	s.service("waits", families(corev1.IPFamilyPolicyRequireDualStack, both...))
	s.refused("waits", "FamilyUnavailable")
	s.service("prefers", families(corev1.IPFamilyPolicyPreferDualStack, both...))
	s.have("prefers", "198.18.0.202")
	s.stands("prefers", "PartiallyAllocated")
	s.config(dualPools)
	s.eventually("both have both families", func() error {
		for _, name := range []string{"waits", "prefers"} {
			if got := addresses(s.get(name)); len(got) != 2 {
				return fmt.Errorf("%s has %q", name, got)
			}
		}
		return nil
	})
	s.stands("prefers", "Allocated")
}
