package servicelb

import (
	"fmt"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"go4.org/netipx"
	corev1 "k8s.io/api/core/v1"

	"github.com/lodestone-lb/lodestone/pkg/annotation"
	"github.com/lodestone-lb/lodestone/pkg/clusterfacts"
	"github.com/lodestone-lb/lodestone/pkg/kube"
)

func ports(ports ...int32) func(*corev1.Service) {
	return func(svc *corev1.Service) {
		svc.Spec.Ports = nil
		for _, p := range ports {
			svc.Spec.Ports = append(svc.Spec.Ports, corev1.ServicePort{Protocol: corev1.ProtocolTCP, Port: p})
		}
	}
}

func local(app string) func(*corev1.Service) {
	return func(svc *corev1.Service) {
		svc.Spec.ExternalTrafficPolicy = corev1.ServiceExternalTrafficPolicyLocal
		svc.Spec.Selector = map[string]string{"app": app}
	}
}

func shared(key string) func(*corev1.Service) { return annotated(annotation.SharingKey, key) }

func unannotated(key string) func(*corev1.Service) {
	return func(svc *corev1.Service) { delete(svc.Annotations, key) }
}

func TestServicesOfOneKeyShareAnAddress(t *testing.T) {
	t.Parallel()
	s := newStory(t)
	s.creates("web", shared("edge"), ports(80, 443))
	s.creates("mail", shared("edge"), ports(25))
	s.creates("alone", ports(80))
	s.has("web", "203.0.113.10", "True Allocated")
	s.has("mail", "203.0.113.10", "True Allocated")
	s.has("alone", "203.0.113.11", "True Allocated")

	s.creates("rival", shared("edge"), ports(443, 8443))
	s.has("rival", "", "False SharingConflict")
	s.mentions("rival", "TCP/443")
	s.mentions("rival", "default/web")
	s.silent("the controller restarts", func() { s.restart(); s.run() })
	s.has("mail", "203.0.113.10", "True Allocated")

	s.changes("web", ports(80))
	s.has("rival", "203.0.113.10", "True Allocated")
	s.deletes("web")
	s.has("mail", "203.0.113.10", "True Allocated")
	s.has("rival", "203.0.113.10", "True Allocated")
}

// An edited port may not take a neighbour's traffic: kube-proxy would send it
// to either.
func TestAnEditThatClashesCostsTheEditedServiceTheAddress(t *testing.T) {
	t.Parallel()
	s := newStory(t)
	s.creates("web", shared("edge"), ports(80))
	s.creates("mail", shared("edge"), ports(25))
	s.changes("mail", ports(25, 80))
	s.has("mail", "", "False SharingConflict")
	s.has("web", "203.0.113.10", "True Allocated")
	s.changes("mail", ports(25))
	s.has("mail", "203.0.113.10", "True Allocated")

	s.changes("mail", unannotated(annotation.SharingKey))
	s.has("mail", "203.0.113.11", "True Allocated")
	s.has("web", "203.0.113.10", "True Allocated")
}

// A mistake in another annotation is no way around the rules of sharing.
func TestAServiceThatCannotBeReadIsABadNeighbourAllTheSame(t *testing.T) {
	t.Parallel()
	s := newStory(t)
	s.creates("web", shared("edge"), ports(80))
	s.creates("mail", shared("edge"), ports(25))
	s.changes("mail", annotated(annotation.Addresses, "poison"))
	s.has("mail", "203.0.113.10", "False InvalidRequest")
	s.changes("mail", ports(80))
	s.has("mail", "", "False InvalidRequest")
	s.has("web", "203.0.113.10", "True Allocated")
	s.changes("mail", ports(25), unannotated(annotation.Addresses))
	s.has("mail", "203.0.113.10", "True Allocated")
}

func TestLocalTrafficIsSharedByTheSamePodsOnly(t *testing.T) {
	t.Parallel()
	s := newStory(t)
	s.creates("web", shared("edge"), ports(80), local("web"))
	s.creates("metrics", shared("edge"), ports(9090), local("web"))
	s.has("metrics", "203.0.113.10", "True Allocated")
	s.creates("mail", shared("edge"), ports(25), local("mail"))
	s.has("mail", "", "False SharingConflict")
	s.creates("cluster", shared("edge"), ports(53))
	s.has("cluster", "", "False SharingConflict")
}

func TestNamespacesShareWhenBothNameTheOther(t *testing.T) {
	t.Parallel()
	s := newStory(t)
	with := func(namespaces string) func(*corev1.Service) {
		return annotated(annotation.SharingNamespaces, namespaces)
	}
	s.creates("web", shared("edge"), ports(80), with("mail, other"))
	s.server.create("mail/smtp", s.clock, shared("edge"), ports(25))
	s.run()
	assert.Equal(t, "203.0.113.11", s.server.get("mail/smtp").Annotations[annotation.Assigned], "it does not name default")
	s.server.create("mail/imap", s.clock, shared("edge"), ports(143), with("default"))
	s.run()
	assert.Equal(t, "203.0.113.10", s.server.get("mail/imap").Annotations[annotation.Assigned])
}

// Who mistypes a list of namespaces has not asked for another address.
func TestAMistakeAmongNamespacesPartsNobody(t *testing.T) {
	t.Parallel()
	s := newStory(t)
	with := func(namespaces string) func(*corev1.Service) {
		return annotated(annotation.SharingNamespaces, namespaces)
	}
	s.creates("web", shared("edge"), ports(80), with("mail"))
	s.creates("api", shared("edge"), ports(8080))
	s.server.create("mail/smtp", s.clock, shared("edge"), ports(25), with("default"))
	s.changes("api", with("mail"))
	s.has("api", "203.0.113.10", "True Allocated")
	for range 2 {
		s.changes("web", with(",mail,,shop"))
		s.has("web", "203.0.113.10", "False InvalidRequest")
		s.mentions("web", `"" is not the name of a namespace`)
		s.changes("web", ports(80, 8081))
		s.has("web", "203.0.113.10", "False InvalidRequest")
		assert.Equal(t, "203.0.113.10", s.server.get("mail/smtp").Annotations[annotation.Assigned])
		s.restart()
		s.run()
	}
	s.changes("web", ports(80, 8080))
	s.has("web", "", "False InvalidRequest")
	s.has("api", "203.0.113.10", "True Allocated")
}

func TestPoolsOpenByLabels(t *testing.T) {
	t.Parallel()
	s := newStory(t)
	s.configure(`pools:
  - {name: prod, addresses: [203.0.113.10-203.0.113.19], namespaceSelector: {matchLabels: {env: prod}}}
  - {name: gold, addresses: [203.0.113.20-203.0.113.29], serviceSelector: {matchLabels: {tier: gold}}}
`)
	labelled := func(svc *corev1.Service) { svc.Labels = map[string]string{"tier": "gold"} }
	s.creates("gold", labelled)
	s.has("gold", "203.0.113.20", "True Allocated")
	s.creates("web")
	s.has("web", "", "False NoPool")
	s.around.labels["default"] = map[string]string{"env": "prod"}
	s.stale = true
	s.run()
	s.has("web", "203.0.113.10", "True Allocated")

	// What they hold stays until asked.
	s.around.labels["default"] = nil
	s.stale = true
	s.changes("gold", func(svc *corev1.Service) { svc.Labels = nil })
	s.has("gold", "203.0.113.20", "True Allocated")
	s.has("web", "203.0.113.10", "True Allocated")
	s.changes("web", labelled, annotated(annotation.Renumber, annotation.Renumbering))
	s.has("web", "203.0.113.21", "True Allocated")
	assert.NotContains(t, s.server.get("default/web").Annotations, annotation.Renumber)
}

// A Service may be heard of before its namespace. Without the labels it would get an address of a pool for all others.
func TestAServiceIsDecidedOnceItsNamespaceIsKnown(t *testing.T) {
	t.Parallel()
	s := newStory(t)
	s.configure(`pools:
  - {name: prod, addresses: [203.0.113.10-203.0.113.19], namespaceSelector: {matchLabels: {env: prod}}}
  - {name: test, addresses: [203.0.113.20-203.0.113.29], namespaceSelector: {matchExpressions: [{key: env, operator: DoesNotExist}]}}
`)
	s.around.unseen = "default"
	s.creates("web")
	s.has("web", "", "")
	_, err := s.Provide(t.Context(), s.server.get("default/web"))
	assert.ErrorIs(t, err, errNamespace)
	s.around.unseen, s.around.labels["default"] = "", map[string]string{"env": "prod"}
	s.queue.Add("default/web") // as after namespaceRetry
	s.run()
	s.has("web", "203.0.113.10", "True Allocated")
}

func TestNamespacesHaveQuotas(t *testing.T) {
	t.Parallel()
	s := newStory(t)
	s.configure("quarantine: 0s\npools: [{name: lan, addresses: [203.0.113.10-203.0.113.19], namespaceQuota: 2}]\n")
	s.creates("a")
	s.creates("b")
	s.creates("c")
	s.has("c", "", "False QuotaExceeded")
	s.mentions("c", "2 of its 2")
	s.server.create("other/d", s.clock)
	s.run()
	assert.Equal(t, "203.0.113.12", s.server.get("other/d").Annotations[annotation.Assigned])
	s.deletes("a")
	s.has("c", "203.0.113.10", "True Allocated")
}

func TestServicesLeaveADrainingPoolWhenAsked(t *testing.T) {
	t.Parallel()
	s := newStory(t)
	s.creates("web")
	s.configure(`quarantine: 30s
pools:
  - {name: lan, addresses: [203.0.113.10-203.0.113.19], state: draining}
  - {name: new, addresses: [198.51.100.10]}
`)
	s.has("web", "203.0.113.10", "True Draining")
	s.mentions("web", "lodestone.io/renumber=true")
	s.changes("web", annotated(annotation.Renumber, "yes"))
	s.has("web", "203.0.113.10", "False InvalidRequest")
	s.changes("web", annotated(annotation.Renumber, annotation.Renumbering))
	s.has("web", "198.51.100.10", "True Allocated")
	assert.NotContains(t, s.server.get("default/web").Annotations, annotation.Renumber)

	s.creates("late", annotated(annotation.AddressPool, "lan"))
	s.has("late", "", "False PoolDraining")
	s.silent("nothing is left to do", func() { s.restart(); s.run() })
}

func TestStrandedServicesAreRenumberedWhenAsked(t *testing.T) {
	t.Parallel()
	s := newStory(t)
	s.creates("web")
	s.configure("pools: [{name: other, addresses: [198.51.100.1]}]\n")
	s.has("web", "203.0.113.10", "True Stranded")
	s.creates("first")
	s.changes("web", annotated(annotation.Renumber, annotation.Renumbering))
	s.has("web", "203.0.113.10", "False PoolExhausted")
	s.mentions("web", "keeps 203.0.113.10")
	s.deletes("first")
	s.pass(30 * time.Second)
	s.has("web", "198.51.100.1", "True Allocated")
}

func TestReservedAddressesWaitForTheirService(t *testing.T) {
	t.Parallel()
	s := newStory(t)
	s.configure(`pools: [{name: lan, addresses: [203.0.113.10-203.0.113.12]}]
reservations: [{service: default/dns, addresses: [203.0.113.10]}]
`)
	s.creates("web")
	s.has("web", "203.0.113.11", "True Allocated")
	s.creates("thief", annotated(annotation.Addresses, "203.0.113.10"))
	s.has("thief", "", "False AddressReserved")
	s.mentions("thief", "default/dns")
	s.creates("dns")
	s.has("dns", "203.0.113.10", "True Allocated")
}

func TestAddressIsKeptForTheServiceThatComesBack(t *testing.T) {
	t.Parallel()
	s := newStory(t)
	s.configure("quarantine: 10s\npools: [{name: lan, addresses: [203.0.113.10-203.0.113.12], keepFor: 1h}]\n")
	s.creates("web")
	s.creates("other")
	s.deletes("web")
	s.pass(30 * time.Minute)
	s.restart() // nothing but the API knows any more
	s.clock = s.clock.Add(-20 * time.Minute)
	s.run()
	s.creates("stranger")
	s.has("stranger", "203.0.113.12", "True Allocated")
	s.creates("late")
	s.has("late", "", "False PoolExhausted")
	s.creates("web")
	s.has("web", "203.0.113.10", "True Allocated")
	s.deletes("web")
	s.pass(time.Hour)
	s.has("late", "203.0.113.10", "True Allocated")
}

// How long an address is kept follows the configuration, with and without a restart.
func TestKeptForLongerAfterARestart(t *testing.T) {
	t.Parallel()
	s := newStory(t)
	pool := "quarantine: 10s\npools: [{name: lan, addresses: [203.0.113.10], keepFor: %s}]\n"
	s.configure(fmt.Sprintf(pool, "1m"))
	s.creates("web")
	s.deletes("web")
	s.pass(30 * time.Second)
	s.configure(fmt.Sprintf(pool, "1h"))
	s.pass(30 * time.Minute)
	s.restart()
	s.creates("stranger")
	s.has("stranger", "", "False PoolExhausted")
	s.configure(fmt.Sprintf(pool, "20m"))
	s.has("stranger", "203.0.113.10", "True Allocated")
}

func TestQuarantineOutlivesTheController(t *testing.T) {
	t.Parallel()
	s := newStory(t)
	s.configure("quarantine: 30s\n" + single)
	s.creates("web")
	s.deletes("web")
	s.restart()
	s.creates("next")
	s.has("next", "", "False PoolExhausted")
	s.pass(30 * time.Second)
	s.has("next", "203.0.113.10", "True Allocated")
}

func TestTheClustersOwnAddressesAreNeverGiven(t *testing.T) {
	t.Parallel()
	s := newStory(t)
	s.creates("early")
	gateway := netip.MustParseAddr("203.0.113.11")
	s.around.facts = &clusterfacts.Facts{Forbidden: []clusterfacts.Forbidden{
		{Range: netipx.IPRangeFrom(gateway, gateway), Why: "the default gateway of node n1"},
		{Range: netipx.RangeOfPrefix(netip.MustParsePrefix("203.0.113.10/32")), Why: "the address of node n2"},
	}}
	s.stale = true
	s.run()
	s.has("early", "203.0.113.10", "True Stranded")
	s.mentions("early", "the address of node n2")
	s.creates("web")
	s.has("web", "203.0.113.12", "True Allocated")
	s.creates("bold", annotated(annotation.Addresses, "203.0.113.11"))
	s.has("bold", "", "False AddressForbidden")
	s.mentions("bold", "the default gateway of node n1")
}

func TestOneServiceHoldsSeveralAddressesOfAFamily(t *testing.T) {
	t.Parallel()
	s := newStory(t)
	s.creates("web", annotated(annotation.Addresses, "203.0.113.15,203.0.113.12"))
	s.has("web", "203.0.113.15,203.0.113.12", "True Allocated")
	s.silent("the controller restarts", func() { s.restart(); s.run() })
	s.changes("web", annotated(annotation.Addresses, "203.0.113.12"))
	s.has("web", "203.0.113.12", "True Allocated")
}

func TestOnlyRequestersAskForAddresses(t *testing.T) {
	t.Parallel()
	s := newStory(t)
	s.configure("pools: [{name: lan, addresses: [203.0.113.10-203.0.113.19], requesters: [infra]}]\n")
	s.creates("web", annotated(annotation.Addresses, "203.0.113.15"))
	s.has("web", "", "False RequestNotAllowed")
	s.mentions("web", "infra")
	s.server.create("infra/dns", s.clock, annotated(annotation.Addresses, "203.0.113.15"))
	s.run()
	assert.Equal(t, "203.0.113.15", s.server.get("infra/dns").Annotations[annotation.Assigned])
}

// Whatever a tenant writes, the pools decide what its namespace gets.
func TestATenantGetsWhatPoolsGiveItsNamespace(t *testing.T) {
	t.Parallel()
	wishes := map[string]func(*corev1.Service){
		"nothing":     func(*corev1.Service) {},
		"pool":        annotated(annotation.AddressPool, "lan"),
		"address":     annotated(annotation.Addresses, "203.0.113.10"),
		"assigned":    annotated(annotation.Assigned, "203.0.113.10"),
		"the field":   func(svc *corev1.Service) { svc.Spec.LoadBalancerIP = "203.0.113.10" },
		"with labels": func(svc *corev1.Service) { svc.Labels = map[string]string{"team": "infra", "env": "prod"} },
	}
	for rule, may := range map[string][]string{ // what a tenant gets an address by
		"namespaces: [infra]":                               nil,
		"namespaceSelector: {matchLabels: {team: infra}}":   nil,
		"serviceSelector: {matchLabels: {team: infra}}":     {"with labels"},
		"requesters: [infra], autoAssign: false":            {"pool"},
		"requesters: [infra], namespaces: [infra, default]": {"nothing", "pool", "assigned", "with labels"},
	} {
		for wish, write := range wishes {
			s := newStory(t)
			s.configure("pools: [{name: lan, addresses: [203.0.113.10-203.0.113.19], " + rule + "}]\n")
			s.creates("web", write)
			assert.Equal(t, slices.Contains(may, wish), len(kube.VIPs(s.server.get("default/web"))) > 0, "%s: %s", rule, wish)
			s.around.labels["infra"] = map[string]string{"team": "infra"}
			s.server.create("infra/web", s.clock, annotated(annotation.Addresses, "203.0.113.15"),
				func(svc *corev1.Service) { svc.Labels = map[string]string{"team": "infra"} })
			s.run()
			assert.Len(t, kube.VIPs(s.server.get("infra/web")), 1, rule)
		}
	}
}

func TestOddConfigurationIsWarnedOfOnce(t *testing.T) {
	t.Parallel()
	s := newStory(t)
	warnings := func() int { s.warn(nil); s.warn(nil); return len(s.config.warnings) }
	assert.Zero(t, warnings())
	node := netip.MustParseAddr("203.0.113.11")
	s.around.facts = &clusterfacts.Facts{Forbidden: []clusterfacts.Forbidden{{Range: netipx.IPRangeFrom(node, node),
		Why: "the address of node n1"}}}
	assert.Equal(t, 1, warnings(), "a node has joined")
	s.config.set(lan)
	assert.Equal(t, 1, warnings(), "an edit that does not matter")
	s.config.set("pools: [{name: other, addresses: [203.0.113.11/32, 203.0.113.12]}]\n")
	assert.Equal(t, 2, warnings(), "another pool has the node's address")
	assert.Equal(t, s.config.warnings[:1], s.config.over)
	s.around.facts = &clusterfacts.Facts{}
	assert.Equal(t, 2, warnings(), "the node has left")
	assert.Equal(t, s.config.warnings, s.config.over)
}
