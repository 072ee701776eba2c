package servicelb

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go4.org/netipx"
	corev1 "k8s.io/api/core/v1"

	"github.com/lodestone-lb/lodestone/ipam"
	"github.com/lodestone-lb/lodestone/pkg/annotation"
	"github.com/lodestone-lb/lodestone/pkg/clusterfacts"
	"github.com/lodestone-lb/lodestone/pkg/kube"
)

func assignedTo(addresses string) func(*corev1.Service) {
	return annotated(annotation.Assigned, addresses)
}

// contestedAddresses are addresses that a Service of namespace default may not
// have, each for another reason.
const contestedAddresses = `quarantine: 10m
pools:
  - {name: lan, addresses: [203.0.113.0/28], exclude: [203.0.113.7]}
  - {name: asked, addresses: [203.0.113.16/30], requesters: [], autoAssign: false}
  - {name: small, addresses: [203.0.113.20/30], namespaceQuota: 1, autoAssign: false}
  - {name: old, addresses: [203.0.113.24/30], state: draining}
  - {name: closed, addresses: [203.0.113.28/30], namespaces: [infra]}
reservations: [{service: infra/dns, addresses: [203.0.113.5]}]
`

// Everybody who may write a Service may write its annotations, at any time: also
// when no controller leads.
func TestAnAnnotationClaimsNothingThatARequestWouldNotGet(t *testing.T) {
	t.Parallel()
	for reason, addr := range map[ipam.Reason]string{
		ipam.AddressForbidden:    "203.0.113.1", // the gateway
		ipam.AddressReserved:     "203.0.113.5",
		ipam.AddressQuarantined:  "203.0.113.9",
		ipam.AddressInUse:        "203.0.113.8",
		ipam.AddressWithheld:     "203.0.113.7",
		ipam.RequestNotAllowed:   "203.0.113.17",
		ipam.QuotaExceeded:       "203.0.113.22",
		ipam.PoolDraining:        "203.0.113.25",
		ipam.PoolNotAllowed:      "203.0.113.29",
		ipam.AddressOutsidePools: "198.51.100.1",
	} {
		for when, claims := range map[string]func(s *story, forgery func(*corev1.Service)){
			"while no controller leads": func(s *story, forgery func(*corev1.Service)) {
				s.server.create("default/thief", s.clock.Add(-time.Hour), forgery)
				s.restart()
				s.run()
			},
			"while one leads": func(s *story, forgery func(*corev1.Service)) { s.creates("thief", forgery) },
			"before there is a configuration": func(s *story, forgery func(*corev1.Service)) {
				s.server.create("default/thief", s.clock.Add(-time.Hour), forgery)
				cfg := s.config.config
				s.config.config = nil
				s.restart()
				s.run()
				s.config.put(cfg, nil)
				s.stale = true
				s.run()
			},
		} {
			for what, forgery := range map[string]func(*corev1.Service){"annotation": assignedTo(addr), "status": shows(addr)} {
				t.Run(fmt.Sprintf("%s %s %s", reason, what, when), func(t *testing.T) {
					t.Parallel()
					s := newStory(t)
					s.configure(contestedAddresses)
					gateway := netip.MustParseAddr("203.0.113.1")
					s.around.facts = &clusterfacts.Facts{Forbidden: []clusterfacts.Forbidden{{Range: netipx.IPRangeFrom(gateway, gateway),
						Why: "the default gateway of node n1"}}}
					s.stale = true
					s.creates("mine", annotated(annotation.Addresses, "203.0.113.8"))
					s.creates("gone", annotated(annotation.Addresses, "203.0.113.9"))
					s.creates("quota", annotated(annotation.AddressPool, "small"))
					s.deletes("gone")

					s.creates("asks", annotated(annotation.Addresses, addr))
					s.has("asks", "", "False "+string(reason))
					s.deletes("asks")
					claims(s, forgery)
					s.has("thief", "203.0.113.2", "True Allocated")
					s.server.create("infra/dns", s.clock)
					s.run()
					assert.Equal(t, "203.0.113.5", kube.JoinAddrs(kube.VIPs(s.server.get("infra/dns"))), "the reservation's owner")
				})
			}
		}
	}
}

// What a Service had it has again after its status or its annotation was wiped,
// or after it was restored from a backup, which has no status.
func TestAServiceGetsBackWhatItHad(t *testing.T) {
	t.Parallel()
	s := newStory(t)
	s.creates("other")
	s.creates("web", annotated(annotation.Addresses, ""))
	s.deletes("other")
	s.pass(time.Hour)
	s.server.create("default/early", s.clock.Add(-24*time.Hour))
	s.server.update("default/web", wiped)
	s.restart()
	s.run()
	s.has("web", "203.0.113.11", "True Allocated")
	s.server.update("default/web", unannotated(annotation.Assigned), unannotated(annotation.AssignedPools))
	s.server.create("default/earlier", s.clock.Add(-48*time.Hour))
	s.restart()
	s.run()
	s.has("web", "203.0.113.11", "True Allocated")

	s.creates("restored", assignedTo("203.0.113.17"), func(svc *corev1.Service) { svc.Finalizers = []string{annotation.Finalizer} })
	s.has("restored", "203.0.113.17", "True Allocated")
	s.creates("two", assignedTo("203.0.113.15,203.0.113.14,2001:db8::14"))
	s.has("two", "203.0.113.15", "True Allocated")
	s.creates("several", annotated(annotation.AddressCount, "2"), assignedTo("203.0.113.18,203.0.113.16"))
	s.has("several", "203.0.113.18,203.0.113.16", "True Allocated")
	s.server.create("default/copy", s.clock, assignedTo("203.0.113.17"))
	s.run()
	s.has("copy", "203.0.113.13", "True Allocated")
}

// A long annotation costs no more than a short one.
func TestAnAnnotationClaimsAtMostWhatARequestMayName(t *testing.T) {
	t.Parallel()
	s := newStory(t)
	s.configure("pools: [{name: lan, addresses: [203.0.113.0/24]}]\n")
	var all []string
	for i := range 200 {
		all = append(all, fmt.Sprintf("203.0.113.%d", 1+i))
	}
	s.server.create("default/greedy", s.clock, assignedTo(strings.Join(all, ",")), annotated(annotation.Addresses, "poison"),
		annotated(annotation.AssignedPools, strings.Repeat("lan,", 100_000)))
	s.restart()
	require.Len(t, s.holds(string(s.server.get("default/greedy").UID)), ipam.MaxAddresses)
}

// The quota of a namespace bounds what it takes from others, however often its
// Services come and go.
func TestWhatRestsCountsForTheQuota(t *testing.T) {
	t.Parallel()
	s := newStory(t)
	s.configure("quarantine: 30s\npools: [{name: lan, addresses: [203.0.113.10-203.0.113.19], namespaceQuota: 1, keepFor: 48h}]\n")
	for i := range 10 {
		s.creates(fmt.Sprintf("round-%d", i))
		s.deletes(fmt.Sprintf("round-%d", i))
		if i == 4 {
			s.restart()
			s.run()
		}
	}
	s.server.create("other/web", s.clock)
	s.run()
	assert.Equal(t, "203.0.113.11", kube.JoinAddrs(kube.VIPs(s.server.get("other/web"))))
	s.creates("late")
	s.has("late", "", "False QuotaExceeded")
	s.mentions("late", "holds 0 of its 1 IPv4 addresses of pool \"lan\" (1 in quarantine after their last use, which count, too)")
	s.creates("round-0") // the one that it is kept for
	s.has("round-0", "203.0.113.10", "True Allocated")
	s.deletes("round-0")
	s.pass(48 * time.Hour)
	s.has("late", "203.0.113.10", "True Allocated")

	// Nor by moves: one is possible, the next when the first address is free.
	s.changes("late", annotated(annotation.Addresses, "203.0.113.12"))
	s.has("late", "203.0.113.12", "True Allocated")
	s.changes("late", annotated(annotation.Addresses, "203.0.113.13"))
	s.has("late", "203.0.113.12", "False QuotaExceeded")
	s.pass(48 * time.Hour)
	s.has("late", "203.0.113.13", "True Allocated")
}

// An edit of the configuration moves no address, and neither does a controller
// that starts after it, or during it.
func TestAPoolThatIsSplitMovesNobodyEver(t *testing.T) {
	t.Parallel()
	const split = "pools:\n  - {name: legacy, addresses: [203.0.113.10-203.0.113.14]}\n  - {name: lan, addresses: " +
		"[203.0.113.15-203.0.113.19]}\n"
	for name, edit := range map[string]func(s *story){
		"before the restart": func(s *story) { s.configure(split) },
		"at the restart":     func(s *story) { s.config.set(split) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newStory(t)
			s.configure("pools: [{name: lan, addresses: [203.0.113.10-203.0.113.19]}]\n")
			s.creates("web", annotated(annotation.AddressPool, "lan"))
			s.has("web", "203.0.113.10", "True Allocated")
			edit(s)
			for range 3 {
				s.restart()
				s.run()
				s.has("web", "203.0.113.10", "True Allocated")
			}
			s.silent("another restart", func() { s.restart(); s.run() })
			s.changes("web", annotated(annotation.AddressPool, "legacy"))
			s.changes("web", annotated(annotation.AddressPool, "lan"))
			s.has("web", "203.0.113.15", "True Allocated")
		})
	}
}

// The annotation with the pools keeps what a Service has, and gives nothing.
func TestForgedPoolsGiveNothing(t *testing.T) {
	t.Parallel()
	s := newStory(t)
	s.configure("pools:\n  - {name: lan, addresses: [203.0.113.10-203.0.113.19]}\n  - {name: dmz, addresses: " +
		"[198.51.100.10-198.51.100.19], namespaces: [infra]}\n")
	s.creates("web")
	s.server.update("default/web", annotated(annotation.AssignedPools, "dmz"), annotated(annotation.AddressPool, "dmz"))
	s.restart()
	s.run()
	s.has("web", "203.0.113.10", "True Allocated") // which it would have without the edit, too
	for _, forged := range []string{",,,,", strings.Repeat("x", 1000), "lan,lan,lan", "\x00"} {
		s.server.update("default/web", annotated(annotation.AssignedPools, forged))
		s.restart()
		s.run()
		assert.Equal(t, "203.0.113.10", kube.JoinAddrs(kube.VIPs(s.server.get("default/web"))))
	}
}

// A mistake in a wish costs nothing, whatever happens until it is corrected.
func TestAMistakeInAWishCostsNoAddress(t *testing.T) {
	t.Parallel()
	s := newStory(t)
	s.creates("web", dual, annotated(annotation.Addresses, "203.0.113.12,203.0.113.15,2001:db8::12,2001:db8::15"))
	s.changes("web", annotated(annotation.Addresses, "203.0.113.12,203.0.113.l5"))
	for range 2 {
		s.has("web", "203.0.113.12,203.0.113.15,2001:db8::12,2001:db8::15", "False InvalidRequest")
		s.restart()
		s.run()
	}
	s.server.update("default/web", wiped)
	s.restart()
	s.run()
	s.has("web", "203.0.113.12,203.0.113.15,2001:db8::12,2001:db8::15", "False InvalidRequest")
	s.changes("web", annotated(annotation.Addresses, "203.0.113.12,203.0.113.15"))
	s.has("web", "203.0.113.12,203.0.113.15,2001:db8::12", "True Allocated")
}

// A Service may ask for several addresses by their number. It keeps what it has while they cannot be had.
func TestSeveralAddresses(t *testing.T) {
	t.Parallel()
	s := newStory(t)
	s.creates("web", dual, annotated(annotation.AddressCount, "2"))
	s.has("web", "203.0.113.10,203.0.113.11,2001:db8::10,2001:db8::11", "True Allocated")
	for _, wrong := range []string{"0", "9", "-1", "many", "", "1.5"} {
		s.changes("web", annotated(annotation.AddressCount, wrong))
		s.has("web", "203.0.113.10,203.0.113.11,2001:db8::10,2001:db8::11", "False InvalidRequest")
	}
	s.changes("web", annotated(annotation.AddressCount, "5"))
	s.has("web", "203.0.113.10,203.0.113.11,2001:db8::10,2001:db8::11", "False InvalidRequest")
	s.restart()
	s.run()
	s.has("web", "203.0.113.10,203.0.113.11,2001:db8::10,2001:db8::11", "False InvalidRequest")
	s.changes("web", unannotated(annotation.AddressCount))
	s.has("web", "203.0.113.10,2001:db8::10", "True Allocated")
}

// What another load balancer has given is in use, and so is what routers and nodes
// have by the document.
func TestAddressesOfOthersAreNeverGiven(t *testing.T) {
	t.Parallel()
	s := newStory(t)
	s.server.create("default/theirs", s.clock, ofClass("metallb.io/metallb"), shows("203.0.113.10"))
	s.restart()
	s.run()
	s.creates("web")
	s.has("web", "203.0.113.11", "True Allocated")
	s.creates("asks", annotated(annotation.Addresses, "203.0.113.10"))
	s.has("asks", "", "False AddressForbidden")
	s.mentions("asks", "203.0.113.10 is never handed out: it is the address of Service default/theirs, which another load balancer serves")

	s.changes("theirs", assignedTo("203.0.113.10")) // as anybody may write who owns it
	s.has("asks", "", "False AddressForbidden")

	s.creates("more", ofClass("metallb.io/metallb"), shows("203.0.113.12", "198.51.100.1"))
	s.creates("next")
	s.has("next", "203.0.113.13", "True Allocated")
	s.changes("more", shows("203.0.113.14"))
	s.creates("after")
	s.has("after", "203.0.113.12", "True Allocated")
	s.deletes("theirs")
	s.has("asks", "203.0.113.10", "True Allocated")

	s.changes("more", shows("203.0.113.11"))
	s.has("web", "203.0.113.11", "True Stranded") // it keeps it, and its condition names who has it, too
	s.mentions("web", "the address of Service default/more")
	s.server.create("default/older", s.clock.Add(-24*time.Hour), ofClass("metallb.io/metallb"), shows("203.0.113.11"),
		assignedTo("203.0.113.11"))
	s.restart()
	s.run()
	s.has("web", "203.0.113.11", "True Stranded") // whatever the owner of another one's Service writes
	s.deletes("older")

	// Every tenant writes externalIPs: they forbid nothing.
	s.creates("outer", ofClass("metallb.io/metallb"), func(svc *corev1.Service) { svc.Spec.ExternalIPs = []string{"203.0.113.15"} })
	s.creates("fifth", annotated(annotation.Addresses, "203.0.113.15"))
	s.has("fifth", "203.0.113.15", "True Allocated")
}

func TestAddressesThatTheDocumentGivesToOthersAreNeverGiven(t *testing.T) {
	t.Parallel()
	s := newStory(t)
	s.configure(`pools: [{name: lan, addresses: [203.0.113.0/24, 10.1.0.0/30], useFirstAndLast: true}]
peers: [{name: tor, address: 203.0.113.0, sourceAddress: 203.0.113.1, localASN: 64512, peerASN: 64513}]
routes: {mode: kernel, cidrs: [10.1.0.0/16]}
`)
	s.creates("web")
	s.has("web", "203.0.113.2", "True Allocated")
	for addr, why := range map[string]string{
		"203.0.113.0": `the address of BGP peer "tor"`,
		"203.0.113.1": `a node's end of the sessions with BGP peer "tor"`,
		"10.1.0.2":    "among the pods' addresses, by routes.cidrs 10.1.0.0/16",
	} {
		s.changes("web", annotated(annotation.Addresses, addr))
		s.has("web", "203.0.113.2", "False AddressForbidden")
		s.mentions("web", why)
	}
	cfg, _ := s.config.Current()
	assert.Len(t, clusterfacts.PoolWarnings(cfg, &clusterfacts.Facts{}), 3)
}

// A Service that moves twice before its object is written, and the second time back
// to what it had, leaves nothing behind.
func TestAServiceThatMovesBackLeavesNothing(t *testing.T) {
	t.Parallel()
	s := newStory(t)
	s.creates("web")
	s.server.update("default/web", annotated(annotation.Addresses, "203.0.113.11"))
	s.ensures(s.server.get("default/web")) // and the controller does not come to write it
	s.changes("web", annotated(annotation.Addresses, "203.0.113.12,203.0.113.10"))
	s.has("web", "203.0.113.12,203.0.113.10", "True Allocated")
	s.pass(time.Hour)
	s.creates("next", annotated(annotation.Addresses, "203.0.113.11"))
	s.has("next", "203.0.113.11", "True Allocated")
}
