package servicelb

import (
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"

	"github.com/lodestone-lb/lodestone/ipam"
	"github.com/lodestone-lb/lodestone/pkg/annotation"
	"github.com/lodestone-lb/lodestone/pkg/kube"
)

const (
	metalLB = "compatibility: [metallb]\n"
	kubeVIP = "compatibility: [kube-vip]\n"
)

// shows is the status that another load balancer writes.
func shows(ips ...string) func(*corev1.Service) {
	return func(svc *corev1.Service) {
		svc.Status.LoadBalancer.Ingress = nil
		for _, ip := range ips {
			svc.Status.LoadBalancer.Ingress = append(svc.Status.LoadBalancer.Ingress, corev1.LoadBalancerIngress{IP: ip})
		}
	}
}

func dual(svc *corev1.Service) {
	families(corev1.IPFamilyPolicyRequireDualStack, corev1.IPv4Protocol, corev1.IPv6Protocol)(svc)
}

func asks(ip string) func(*corev1.Service) {
	return func(svc *corev1.Service) { svc.Spec.LoadBalancerIP = ip }
}

// inStatus are the addresses that users of the Service see.
func (s *story) inStatus(name string) (ips []string) {
	for _, a := range kube.StatusAddresses(s.server.get("default/" + name)) {
		ips = append(ips, a.String())
	}
	return ips
}

const twoPools = "pools:\n  - {name: lan, addresses: [203.0.113.10-203.0.113.19, '2001:db8::10-2001:db8::19']}\n  - {name: prod-dmz, " +
	"autoAssign: false, addresses: [198.51.100.10-198.51.100.19]}\n"

func TestAnnotationsOfMetalLB(t *testing.T) {
	t.Parallel()
	for _, prefix := range []string{"metallb.io/", "metallb.universe.tf/"} {
		s := newStory(t)
		s.configure(metalLB + twoPools)
		s.creates("pool", annotated(prefix+"address-pool", "prod.dmz"))
		s.has("pool", "198.51.100.10", "True Allocated")
		s.creates("address", annotated(prefix+"loadBalancerIPs", "203.0.113.15"))
		s.has("address", "203.0.113.15", "True Allocated")
		s.creates("both", dual, annotated(prefix+"loadBalancerIPs", "203.0.113.16, 2001:db8::16"))
		s.has("both", "203.0.113.16,2001:db8::16", "True Allocated")
		s.creates("six", families(corev1.IPFamilyPolicySingleStack, corev1.IPv6Protocol), annotated(prefix+"loadBalancerIPs", "2001:db8::17"))
		s.has("six", "2001:db8::17", "True Allocated")

		s.creates("web", annotated(prefix+"allow-shared-ip", "edge"), ports(80))
		s.creates("mail", annotated(prefix+"allow-shared-ip", "edge"), ports(25))
		s.has("web", "203.0.113.10", "True Allocated")
		s.has("mail", "203.0.113.10", "True Allocated")
		s.creates("ours", shared("edge"), ports(53)) // the same key, whoever spells it
		s.has("ours", "203.0.113.10", "True Allocated")
		s.creates("rival", annotated(prefix+"allow-shared-ip", "edge"), ports(80))
		s.has("rival", "", "False SharingConflict")

		// An edit counts as an edit of ours does.
		s.changes("address", annotated(prefix+"loadBalancerIPs", "203.0.113.18"))
		s.has("address", "203.0.113.18", "True Allocated")
	}
}

func TestAnnotationsOfKubeVIP(t *testing.T) {
	t.Parallel()
	s := newStory(t)
	s.configure(kubeVIP + twoPools)
	s.creates("address", annotated("kube-vip.io/loadbalancerIPs", "203.0.113.15"), asks("203.0.113.15"), ports(80))
	s.has("address", "203.0.113.15", "True Allocated")
	s.creates("both", dual, annotated("kube-vip.io/loadbalancerIPs", "203.0.113.16,2001:db8::16"), asks("203.0.113.16"))
	s.has("both", "203.0.113.16,2001:db8::16", "True Allocated")
	// As kube-vip's cloud provider has Services share.
	s.creates("neighbour", annotated("kube-vip.io/loadbalancerIPs", "203.0.113.15"), ports(443))
	s.has("neighbour", "203.0.113.15", "True Allocated")
	s.creates("rival", annotated("kube-vip.io/loadbalancerIPs", "203.0.113.15"), ports(80))
	s.has("rival", "", "False SharingConflict")

	s.creates("lease", annotated("kube-vip.io/loadbalancerIPs", "0.0.0.0"))
	s.has("lease", "", "False InvalidRequest")
	s.mentions("lease", "no pool has dhcp")
}

func TestOursWinAndContradictionsAreRefused(t *testing.T) {
	t.Parallel()
	s := newStory(t)
	s.configure("compatibility: [metallb, kube-vip]\n" + twoPools)
	s.creates("ours", annotated(annotation.Addresses, "203.0.113.15"), annotated("metallb.io/loadBalancerIPs", "203.0.113.16"),
		annotated("kube-vip.io/loadbalancerIPs", "203.0.113.17"))
	s.has("ours", "203.0.113.15", "True Allocated")
	s.creates("quarrel", annotated("metallb.io/loadBalancerIPs", "203.0.113.16"), annotated("kube-vip.io/loadbalancerIPs", "203.0.113.17"))
	s.has("quarrel", "", "False InvalidRequest")
	s.mentions("quarrel", "annotation metallb.io/loadBalancerIPs asks for \"203.0.113.16\", annotation kube-vip.io/loadbalancerIPs for "+
		"\"203.0.113.17\"")
	s.changes("quarrel", annotated(annotation.Addresses, "203.0.113.18"))
	s.has("quarrel", "203.0.113.18", "True Allocated")

	s.creates("spec", annotated("metallb.io/loadBalancerIPs", "203.0.113.16"), asks("203.0.113.17"))
	s.has("spec", "", "False InvalidRequest")
	s.mentions("spec", "annotation metallb.io/loadBalancerIPs for 203.0.113.16")
	s.creates("nonsense", annotated("metallb.io/loadBalancerIPs", "none"))
	s.mentions("nonsense", `annotation metallb.io/loadBalancerIPs: "none" is not an IP address`)
	s.creates("outside", annotated("metallb.io/loadBalancerIPs", "192.0.2.1"))
	s.has("outside", "", "False AddressOutsidePools")
	s.creates("unknown", annotated("metallb.io/address-pool", "gone"))
	s.has("unknown", "", "False PoolNotFound")
}

// An edit of the configuration decides at once whether they count.
func TestCompatibilityIsSwitchedOnAndOff(t *testing.T) {
	t.Parallel()
	s := newStory(t)
	s.configure(twoPools)
	s.creates("web", annotated("metallb.io/address-pool", "prod-dmz"))
	s.has("web", "203.0.113.10", "True Allocated")
	s.configure(metalLB + twoPools)
	s.has("web", "198.51.100.10", "True Allocated")
	s.silent("it is off again: what the Service has is as good as any", func() { s.configure(twoPools) })
}

// A live migration: the Services are as MetalLB left them, the configuration
// comes when its controller is gone.
func TestServicesOfMetalLBAreTakenOver(t *testing.T) {
	t.Parallel()
	for _, before := range []string{"no configuration", "no pools", "no compatibility"} {
		t.Run(before, func(t *testing.T) {
			t.Parallel()
			s := newStory(t)
			switch before {
			case "no configuration":
				s.config.config = nil
				s.config.put(nil, errors.New("there is no ConfigMap"))
			case "no pools":
				s.config.set("quarantine: 1s\n")
			}
			s.restart()
			created := s.clock.Add(-time.Hour)
			s.server.create("default/a-new", s.clock)
			s.server.create("default/plain", created, shows("203.0.113.10"))
			s.server.create("default/dmz", created, shows("198.51.100.17"), annotated("metallb.io/address-pool", "prod.dmz"))
			s.server.create("default/dual", created, dual, shows("2001:db8::15", "203.0.113.15"))
			s.server.create("default/web", created, shows("203.0.113.12"), annotated("metallb.io/allow-shared-ip", "edge"), ports(80))
			s.server.create("default/mail", created, shows("203.0.113.12"), annotated("metallb.universe.tf/allow-shared-ip", "edge"), ports(25))
			s.server.create("default/foreign", created, shows("203.0.113.13"), ofClass("metallb.io/metallb"))
			if before == "no compatibility" { // what we promise begins when the controller starts with it
				s.config.set(metalLB + twoPools)
				s.restart()
			}
			s.run()
			s.events.take()
			s.configure(metalLB + twoPools)

			s.has("plain", "203.0.113.10", "True Allocated")
			s.has("dmz", "198.51.100.17", "True Allocated")
			s.has("dual", "203.0.113.15,2001:db8::15", "True Allocated") // in the order of its families
			s.has("web", "203.0.113.12", "True Allocated")
			s.has("mail", "203.0.113.12", "True Allocated")
			s.has("a-new", "203.0.113.11", "True Allocated")
			s.has("foreign", "", "")
			require.Equal(t, []string{"203.0.113.13"}, s.inStatus("foreign"))
			s.silent("the controller restarts", func() { s.restart(); s.run() })
		})
	}
}

func TestATakeOverIsTold(t *testing.T) {
	t.Parallel()
	s := newStory(t)
	s.configure(metalLB + twoPools)
	s.server.create("default/web", s.clock, shows("203.0.113.12"))
	s.restart()
	s.run()
	s.wantEvents("Normal Adopted default/web: Lodestone has taken this Service over with the addresses that its status had: 203.0.113.12.",
		"Normal Allocated default/web")
	s.silent("nothing is left to tell", func() { s.restart(); s.run() })
	s.wantEvents()
}

// A pool that was forgotten is a message and no outage.
func TestAnAddressThatNoPoolGivesStaysWhereItIs(t *testing.T) {
	t.Parallel()
	s := newStory(t)
	s.configure(metalLB + "pools:\n  - {name: lan, addresses: [203.0.113.10-203.0.113.19], exclude: [203.0.113.19]}\n  - {name: edge, " +
		"namespaces: [edge], addresses: [198.51.100.1]}\n")
	for name, c := range map[string]struct{ ip, reason, says string }{
		"outside":  {"192.0.2.4", string(ipam.AddressOutsidePools), "192.0.2.4 is in no pool"},
		"withheld": {"203.0.113.19", string(ipam.AddressWithheld), `it is excluded from pool "lan"`},
		"closed":   {"198.51.100.1", string(ipam.PoolNotAllowed), `is in pool "edge", which is not open to namespace "default"`},
	} {
		s.server.create("default/"+name, s.clock, shows(c.ip))
		s.restart()
		s.run()
		s.has(name, "", "False "+c.reason)
		s.mentions(name, c.says)
		s.mentions(name, "lodestone.io/renumber=true")
		require.Equal(t, []string{c.ip}, s.inStatus(name))
	}
	// kube-vip's cloud provider has the conventional finalizer on its Services.
	s.server.create("default/theirs", s.clock, shows("192.0.2.5"),
		func(svc *corev1.Service) { svc.Finalizers = []string{annotation.Finalizer} })
	s.run()
	require.Equal(t, []string{annotation.Finalizer}, s.server.get("default/theirs").Finalizers)
	// One of two is not enough.
	s.server.create("default/half", s.clock, dual, shows("203.0.113.14", "2001:db8::99"))
	s.run()
	s.has("half", "", "False AddressOutsidePools")
	require.Equal(t, []string{"203.0.113.14", "2001:db8::99"}, s.inStatus("half"))
	s.silent("time passes, others come and go", func() { s.pass(time.Hour); s.restart(); s.run() })

	s.configure(metalLB + "pools:\n  - {name: lan, addresses: [203.0.113.10-203.0.113.19, '2001:db8::90-2001:db8::99', 192.0.2.4]}\n  - " +
		"{name: edge, addresses: [198.51.100.1]}\n")
	s.has("outside", "192.0.2.4", "True Allocated")
	s.has("withheld", "203.0.113.19", "True Allocated")
	s.has("closed", "198.51.100.1", "True Allocated")
	s.has("half", "203.0.113.14,2001:db8::99", "True Allocated")
}

func TestAServiceThatMayMoveDoes(t *testing.T) {
	t.Parallel()
	s := newStory(t)
	s.configure(metalLB + twoPools)
	s.creates("asks", shows("192.0.2.4"), annotated(annotation.Addresses, "203.0.113.15"))
	s.has("asks", "203.0.113.15", "True Allocated")
	s.creates("moves", shows("192.0.2.5"))
	s.has("moves", "", "False AddressOutsidePools")
	s.changes("moves", annotated(annotation.Renumber, annotation.Renumbering))
	s.has("moves", "203.0.113.10", "True Allocated")
}

// MetalLB still gives addresses while Lodestone has no pools: whatever it
// writes stays.
func TestWithoutPoolsNobodysStatusIsTouched(t *testing.T) {
	t.Parallel()
	s := newStory(t)
	s.configure("quarantine: 1s\n")
	s.creates("web")
	s.has("web", "", "False NoPool")
	s.changes("web", shows("203.0.113.12"))
	require.Equal(t, []string{"203.0.113.12"}, s.inStatus("web"))
	s.changes("web", shows("203.0.113.13"))
	require.Equal(t, []string{"203.0.113.13"}, s.inStatus("web"))
	s.configure(metalLB + twoPools)
	s.has("web", "203.0.113.13", "True Allocated")
}

// The configuration may come to know before what MetalLB has just written: the Service is given an address then, and has it no more when
// its status is seen.
func TestAnAddressOfMetalLBIsSeenLate(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct{ first, last, reported, condition string }{
		"of a pool":       {last: "203.0.113.12", condition: "True Allocated"},
		"of no pool":      {last: "192.0.2.4", condition: "False AddressOutsidePools"},
		"another of ours": {first: "203.0.113.13", last: "203.0.113.12", condition: "True Allocated"},
		"after a move":    {last: "203.0.113.12", reported: "203.0.113.10 withheld", condition: "True Allocated"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newStory(t)
			s.configure("quarantine: 1s\n")
			s.creates("web")
			if c.first != "" {
				s.changes("web", shows(c.first))
			}
			s.server.update("default/web", shows(c.last))
			s.config.set(metalLB + twoPools)
			for s.stale = true; s.stale || len(s.holds("uid-1")) == 0; {
				s.once()
			}
			if c.reported != "" {
				s.around.report(c.reported)
				for s.stale = true; s.stale || len(s.holds("uid-1/leaving")) == 0; {
					s.once()
				}
			}
			s.run()
			s.has("web", map[bool]string{true: c.last}[c.condition == "True Allocated"], c.condition)
			require.Equal(t, []string{c.last}, s.inStatus("web"))
			s.silent("the controller restarts", func() { s.restart(); s.run() })
		})
	}
}

// Two Services that another load balancer had share an address need a sharing key.
func TestAddressThatIsNotSharedHere(t *testing.T) {
	t.Parallel()
	s := newStory(t)
	s.configure(metalLB + twoPools)
	s.server.create("default/first", s.clock, shows("203.0.113.12"), ports(80))
	s.server.create("default/second", s.clock.Add(time.Second), shows("203.0.113.12"), ports(81))
	s.restart()
	s.run()
	s.has("first", "203.0.113.12", "True Allocated")
	s.has("second", "", "False AddressInUse")
	s.mentions("second", "is held by default/first")
	require.Equal(t, []string{"203.0.113.12"}, s.inStatus("second"))
	s.changes("first", shared("k"))
	s.changes("second", shared("k"))
	s.has("second", "203.0.113.12", "True Allocated")
}

// The old announcer still answers: that is no reason to leave the address, even
// of a Service that is new.
func TestTheOldAnnouncerIsNoReasonToMove(t *testing.T) {
	t.Parallel()
	s := newStory(t)
	s.configure(metalLB + twoPools)
	s.creates("web", shows("203.0.113.12"))
	s.reports("203.0.113.12 withheld")
	s.has("web", "203.0.113.12", "False AddressConflict")
	s.reports()
	s.has("web", "203.0.113.12", "True Allocated")
}

// A mistake in a wish does not cost the address that is there already.
func TestAServiceThatCannotBeReadIsTakenOverAllTheSame(t *testing.T) {
	t.Parallel()
	s := newStory(t)
	s.configure(metalLB + twoPools)
	s.creates("web", shows("203.0.113.12"), annotated("metallb.io/loadBalancerIPs", "poison"))
	s.has("web", "203.0.113.12", "False InvalidRequest")
	s.mentions("web", "keeps 203.0.113.12")
}

// A Service that waits for an address gets it when the holder ceases to share it, also
// if its sharing key was removed while the controller was down.
func TestAHolderThatPartsWhileTheControllerIsDown(t *testing.T) {
	t.Parallel()
	s := newStory(t)
	s.creates("holder", shared("k"), ports(25))
	s.creates("waits", shared("k"), ports(25))
	s.has("waits", "", "False SharingConflict")
	s.restart()
	s.server.update("default/holder", unannotated(annotation.SharingKey))
	s.rotate() // the one who waits is looked at first
	s.run()
	s.has("waits", "203.0.113.11", "True Allocated")
}
