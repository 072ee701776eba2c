package servicelb

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"

	"github.com/lodestone-lb/lodestone/controller/servicelb/ledger"
	"github.com/lodestone-lb/lodestone/ipam"
	"github.com/lodestone-lb/lodestone/pkg/annotation"
	"github.com/lodestone-lb/lodestone/pkg/kube"
	"github.com/lodestone-lb/lodestone/pkg/notify"
)

// What is freed goes to the oldest who can use it, whatever the others ask for.
func TestWhatIsFreedGoesToTheOldestWhoCanUseIt(t *testing.T) {
	t.Parallel()
	s := newStory(t)
	s.configure("quarantine: 0s\npools:\n  - {name: lan, addresses: [203.0.113.10-203.0.113.12]}\n  - {name: dmz, addresses: " +
		"[198.51.100.1/32]}\n")
	for _, name := range []string{"a", "b", "c", "d"} {
		s.creates(name)
	}
	s.creates("names-10", annotated(annotation.Addresses, "203.0.113.10"))
	s.creates("first")
	s.creates("dmz-only", annotated(annotation.AddressPool, "dmz"))
	s.creates("names-11", annotated(annotation.Addresses, "203.0.113.11"))
	s.creates("second")
	s.creates("both", families(corev1.IPFamilyPolicyRequireDualStack, corev1.IPv4Protocol, corev1.IPv6Protocol))
	s.creates("third")
	s.deletes("b")
	s.has("first", "203.0.113.11", "True Allocated") // names-11 is younger
	s.deletes("first")
	s.has("names-11", "203.0.113.11", "True Allocated")
	s.deletes("d")
	s.has("dmz-only", "198.51.100.1", "True Allocated")
	s.silent("nobody else is looked at twice", func() { notify.Wake(s.ledger.retry); s.run() })
	s.deletes("a")
	s.has("names-10", "203.0.113.10", "True Allocated")
	s.deletes("c")
	s.has("second", "203.0.113.12", "True Allocated")
	s.has("third", "", "False PoolExhausted")
	s.has("both", "", "False PoolExhausted")
}

func TestWhoWaitsForMoreThanOthers(t *testing.T) {
	t.Parallel()
	s := newStory(t)
	s.configure(`
quarantine: 10s
pools:
  - {name: lan, addresses: [203.0.113.10-203.0.113.12], namespaceQuota: 2}
  - {name: gold, addresses: [203.0.113.20], serviceSelector: {matchLabels: {tier: gold}}}
reservations: [{service: default/vip, addresses: [203.0.113.10]}]
`)
	gold := func(svc *corev1.Service) { svc.Labels = map[string]string{"tier": "gold"} }
	s.creates("vip-before", annotated(annotation.AddressPool, "none"))
	s.creates("x")
	s.creates("gilded", gold)
	s.has("gilded", "203.0.113.12", "True Allocated")
	s.creates("golden", gold)
	s.has("golden", "203.0.113.20", "True Allocated")
	s.creates("plain")
	s.has("plain", "", "False QuotaExceeded")
	s.creates("more-gold", gold)
	s.has("more-gold", "", "False QuotaExceeded")
	s.creates("vip")
	s.has("vip", "203.0.113.10", "True Allocated")
	s.deletes("golden")
	s.pass(time.Minute)
	s.has("more-gold", "203.0.113.20", "True Allocated")
	s.has("plain", "", "False QuotaExceeded")
	s.deletes("gilded")
	s.has("plain", "", "False QuotaExceeded") // vip and x
	s.deletes("x")
	s.has("plain", "", "False QuotaExceeded") // what is in quarantine counts
	s.pass(time.Minute)
	s.has("plain", "203.0.113.11", "True Allocated")
}

func TestAQuotaThatIsReleasedIsThatOfANamespace(t *testing.T) {
	t.Parallel()
	s := newStory(t)
	s.configure("quarantine: 0s\npools: [{name: lan, addresses: [203.0.113.0/24], namespaceQuota: 1}]\n")
	for _, name := range []string{"shop/holds", "shop/waits", "team/holds", "team/waits", "shop/waits-too"} {
		s.server.create(name, s.clock)
		s.clock = s.clock.Add(time.Second)
		s.run()
	}
	s.server.delete("team/holds", s.clock)
	s.run()
	assert.Equal(t, string(ledger.ReasonAllocated), kube.Allocated(s.server.get("team/waits")).Reason)
	s.server.delete("shop/holds", s.clock)
	s.run()
	assert.Equal(t, string(ledger.ReasonAllocated), kube.Allocated(s.server.get("shop/waits")).Reason)
	assert.Equal(t, "QuotaExceeded", kube.Allocated(s.server.get("shop/waits-too")).Reason)
}

// One that waits for its own address is not held up by others.
func TestAReturnIsNotHeldUp(t *testing.T) {
	t.Parallel()
	s := newStory(t)
	s.configure("quarantine: 30s\npools: [{name: lan, addresses: [203.0.113.10], keepFor: 1h}]\n")
	s.creates("holder")
	s.creates("older")
	s.deletes("holder")
	s.has("older", "", "False PoolExhausted")
	s.creates("holder")
	s.has("holder", "203.0.113.10", "True Allocated")
}

// In a full pool whose addresses come and go, Services that wait are left
// alone.
func TestWhoeverWaitsIsNotToldNumbers(t *testing.T) {
	t.Parallel()
	s := newStory(t)
	s.configure("quarantine: 10s\npools: [{name: lan, addresses: [203.0.113.10-203.0.113.13]}]\n")
	for _, name := range []string{"a", "b", "c", "d", "waits", "waits-too"} {
		s.creates(name)
	}
	s.has("waits", "", "False PoolExhausted")
	before := s.server.get("default/waits-too").ResourceVersion
	s.deletes("a")
	s.deletes("b")
	s.pass(5 * time.Second)
	assert.Equal(t, before, s.server.get("default/waits-too").ResourceVersion)
	s.pass(10 * time.Second)
	s.has("waits", "203.0.113.10", "True Allocated")
	s.has("waits-too", "203.0.113.11", "True Allocated")
	assert.Equal(t, ipam.PoolStats{Pool: "lan", Family: ipam.IPv4, Size: 4, Assigned: 4}, s.machine().Stats(s.clock).Pools[0])
}

// Services that lack the same family are asked for as one, and the oldest gets what is
// freed. Those that hold an address of another pool may get another answer.
func TestServicesThatLackAFamilyWaitTogether(t *testing.T) {
	t.Parallel()
	s := newStory(t)
	s.configure("quarantine: 0s\npools:\n  - {name: four, addresses: [203.0.113.0/24]}\n  - {name: more, addresses: [198.51.100.0/24], " +
		"autoAssign: false}\n  - {name: six, addresses: ['2001:db8::1/128']}\n")
	prefers := families(corev1.IPFamilyPolicyPreferDualStack, corev1.IPv4Protocol, corev1.IPv6Protocol)
	s.creates("six-only", families(corev1.IPFamilyPolicySingleStack, corev1.IPv6Protocol))
	s.has("six-only", "2001:db8::1", "True Allocated")
	for i := range 50 {
		s.creates(fmt.Sprintf("web-%d", i), prefers)
	}
	s.creates("elsewhere", prefers, annotated(annotation.AddressPool, "more,six"))
	s.deletes("six-only")
	s.has("web-0", "203.0.113.1,2001:db8::1", "True Allocated")
	s.has("web-1", "203.0.113.2", "True PartiallyAllocated")
	s.silent("nobody else is looked at twice", func() { notify.Wake(s.ledger.retry); s.run() })
	s.deletes("web-0")
	s.has("web-1", "203.0.113.2,2001:db8::1", "True Allocated")
}

// When the labels of a namespace change, only Services of that namespace are asked for.
func TestLabelsOfANamespaceWakeItsServices(t *testing.T) {
	t.Parallel()
	s := newStory(t)
	s.configure("pools:\n  - {name: lan, addresses: [203.0.113.10-203.0.113.19], namespaceSelector: {matchLabels: {tier: gold}}}\n")
	s.creates("web")
	s.has("web", "", "False NoPool")
	assert.Empty(t, s.machine().Relabeled(s.around.Labels))
	s.around.labels["other"] = map[string]string{"tier": "gold"}
	assert.Empty(t, s.machine().Relabeled(s.around.Labels))
	s.around.labels["default"] = map[string]string{"tier": "gold"}
	assert.Equal(t, []string{"default/web"}, s.machine().Relabeled(s.around.Labels))
}

// The labels change while a Service waits for its turn: it is decided about by the new ones.
func TestLabelsThatChangeBeforeADecision(t *testing.T) {
	t.Parallel()
	s := newStory(t)
	gold := map[string]string{"tier": "gold"}
	s.around.labels["default"] = gold
	s.configure("pools:\n  - {name: lan, addresses: [203.0.113.10-203.0.113.19], namespaceSelector: {matchLabels: {tier: gold}}}\n")
	s.creates("web")
	s.around.labels["default"] = nil
	s.server.update("default/web", func(svc *corev1.Service) { svc.Finalizers = nil })
	s.server.delete("default/web", s.clock)
	s.server.create("default/web", s.clock) // what the one before held is recorded first
	s.see("default/web")
	s.Quarantine = &meanwhile{s, func() { s.around.labels["default"] = gold }}
	require.NoError(t, s.reconcile(t.Context(), "default/web"))
	s.has("web", "203.0.113.10", "True Allocated")
}

// An address may become free at the moment at which the labels of a namespace change, which a new namespace does, too.
func TestWhatIsFreedWhileANamespaceChangesIsGiven(t *testing.T) {
	t.Parallel()
	s := newStory(t)
	s.configure("quarantine: 0s\npools: [{name: lan, addresses: [203.0.113.10]}]\n")
	s.creates("holder")
	s.creates("waits")
	s.has("waits", "", "False PoolExhausted")
	changed := make(chan struct{})
	close(changed)
	l, now := s.ledger.open()
	l.Release("default/holder", "", now)
	s.ledger.close()
	<-s.ledger.retry
	retried, _ := finderAfter(nil, nil, changed, s.around.Labels)(s.machine(), s.clock)
	assert.Equal(t, []string{"default/waits"}, retried)
}

// Without a configuration all dialects are understood. What a Service asks for in one of them is
// read again when the first configuration comes, which may not understand it.
func TestTheFirstConfigurationSaysWhatAnnotationsMean(t *testing.T) {
	t.Parallel()
	s := newStory(t)
	s.config.config = nil
	s.restart()
	s.creates("web", annotated("kube-vip.io/loadbalancerIPs", "0.0.0.0"))
	s.has("web", "", "False InvalidRequest")
	s.configure(lan)
	s.has("web", "203.0.113.10", "True Allocated")
}

// What an edit of the reservations has made impossible, the next one can make possible again.
func TestWhoAsksForMoreThanIsReserved(t *testing.T) {
	t.Parallel()
	s := newStory(t)
	pools := "pools: [{name: lan, addresses: [203.0.113.0/24, \"2001:db8::/64\"]}]\n" +
		"reservations: [{service: default/web, addresses: [203.0.113.1, 203.0.113.2%s]}]\n"
	s.configure(fmt.Sprintf(pools, ", 203.0.113.3, 203.0.113.4, 203.0.113.5"))
	s.creates("web", annotated(annotation.AddressCount, "4"), func(svc *corev1.Service) {
		svc.Spec.IPFamilies = []corev1.IPFamily{corev1.IPv4Protocol, corev1.IPv6Protocol}
	})
	s.has("web", "", "False InvalidRequest")
	s.configure(fmt.Sprintf(pools, ""))
	s.has("web", "203.0.113.1,203.0.113.2,203.0.113.3,203.0.113.4,2001:db8::,2001:db8::1,2001:db8::2,2001:db8::3", "True Allocated")
}

// A Service moves again and again while its object cannot be written. What it gives back stays its own until then, and is bounded.
func TestWhoMovesWithoutBeingWritten(t *testing.T) {
	t.Parallel()
	s := newStory(t)
	s.configure("quarantine: 10s\npools: [{name: lan, addresses: [203.0.113.0/24]}]\n")
	s.creates("web")
	s.server.fault = func() fault { return lost }
	for i := range 50 {
		s.server.update("default/web", annotated(annotation.Addresses, fmt.Sprint("203.0.113.", 20+i)))
		s.see("default/web")
		assert.Error(t, s.reconcile(t.Context(), "default/web"))
	}
	assert.LessOrEqual(t, s.machine().Stats(s.clock).Pools[0].Assigned, 3.*ipam.MaxAddresses)
	s.server.fault = nil
	s.run()
	s.pass(time.Minute)
	s.has("web", "203.0.113.69", "True Allocated")
	assert.Equal(t, 1., s.machine().Stats(s.clock).Pools[0].Assigned)
	assert.Equal(t, 253., s.machine().Stats(s.clock).Pools[0].Free)
}
