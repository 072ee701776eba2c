package servicelb

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go4.org/netipx"
	corev1 "k8s.io/api/core/v1"
	"pgregory.net/rapid"

	"github.com/lodestone-lb/lodestone/controller/servicelb/ledger"
	"github.com/lodestone-lb/lodestone/ipam"
	"github.com/lodestone-lb/lodestone/pkg/annotation"
	"github.com/lodestone-lb/lodestone/pkg/clusterfacts"
	"github.com/lodestone-lb/lodestone/pkg/compat"
	"github.com/lodestone-lb/lodestone/pkg/kube"
)

// TestNoHistoryGivesAnAddressTwice runs random histories: users create,
// change, delete and break Services, the configuration changes, time passes,
// patches fail or their answers are lost, the controller lags behind what the
// server knows, and dies at any point. At no time may two Services show one
// address that do not share it; at the end every Service has what it asks for, or a refusal, and
// every address that nobody shows is free. Services share an address only with
// the same key and different ports.
func TestNoHistoryGivesAnAddressTwice(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) { history(t) })
}

// TestTheSameHistoryEndsTheSame replays histories: every object that was written and every
// Event is the same, to the byte.
func TestTheSameHistoryEndsTheSame(t *testing.T) {
	t.Parallel()
	histories := rapid.Custom(history)
	total := 0
	for seed := range 50 {
		first := histories.Example(seed)
		require.Equal(t, first, histories.Example(seed), "seed %d", seed)
		total += len(first)
	}
	require.Greater(t, total, 50_000, "something happens")
}

// history is one random history. It returns all that was written.
func history(t *rapid.T) string {
	configs := []string{
		lan,
		"quarantine: 0s\npools:\n  - {name: lan, addresses: [203.0.113.10-203.0.113.12]}\n",
		"quarantine: 10s\npools:\n  - {name: lan, addresses: [203.0.113.11-203.0.113.13]}\n  - {name: six, addresses: " +
			"['2001:db8::10-2001:db8::11'], priority: 5}\n",
		"quarantine: 5s\npools:\n  - {name: six, addresses: ['2001:db8::10-2001:db8::19']}\n",
		office,
		office + "  - {name: six, addresses: ['2001:db8::10-2001:db8::12']}\n  - {name: lan, addresses: [203.0.113.10]}\n  - {name: lab, " +
			"dhcp: {interface: eth2}}\n",
		"quarantine: 20s\npools:\n  - {name: lan, addresses: [203.0.113.10-203.0.113.14], keepFor: 1m, namespaceQuota: 2}\nreservations: " +
			"[{service: default/s1, addresses: [203.0.113.12]}]\n",
		"quarantine: 20s\npools:\n  - {name: lan, addresses: [203.0.113.10-203.0.113.12], state: draining}\n  - {name: new, addresses: " +
			"[203.0.113.13-203.0.113.14], namespaceSelector: {matchLabels: {env: prod}}}\n",
		"quarantine: 5s\npools:\n  - {name: legacy, addresses: [203.0.113.10-203.0.113.11]}\n  - {name: lan, addresses: " +
			"[203.0.113.12-203.0.113.19, '2001:db8::10-2001:db8::19']}\n",
		"compatibility: [metallb]\n" + lan,
		"compatibility: [metallb, kube-vip]\nquarantine: 5s\npools:\n  - {name: lan, addresses: [203.0.113.10-203.0.113.12]}\n  - {name: " +
			"office, dhcp: {interface: eth1}}\n",
	}
	wishes := []func(*corev1.Service){
		func(*corev1.Service) {},
		families(corev1.IPFamilyPolicyPreferDualStack, corev1.IPv6Protocol, corev1.IPv4Protocol),
		families(corev1.IPFamilyPolicyRequireDualStack, corev1.IPv4Protocol, corev1.IPv6Protocol),
		families(corev1.IPFamilyPolicySingleStack, corev1.IPv6Protocol),
		annotated(annotation.Addresses, "203.0.113.11"),
		annotated(annotation.Addresses, "203.0.113.12"),
		annotated(annotation.Addresses, ""),
		annotated(annotation.Addresses, "poison"),
		annotated(annotation.AddressPool, "six"),
		annotated(annotation.AddressPool, "lan"),
		annotated(annotation.AddressPool, ""),
		annotated(annotation.Addresses, "203.0.113.12,203.0.113.10"),
		annotated(annotation.AddressCount, "2"),
		unannotated(annotation.AddressCount),
		annotated(annotation.Renumber, annotation.Renumbering),
		shared("k"),
		shared("k"),
		unannotated(annotation.SharingKey),
		ports(80),
		ports(443),
		ports(80, 443),
		local("web"),
		annotated("metallb.io/loadBalancerIPs", "203.0.113.11"),
		annotated("metallb.io/allow-shared-ip", "k"),
		annotated("kube-vip.io/loadbalancerIPs", "203.0.113.12"),
		annotated("kube-vip.io/loadbalancerIPs", "0.0.0.0"),
		unannotated("metallb.io/loadBalancerIPs"),
		unannotated("metallb.io/allow-shared-ip"),
		unannotated("kube-vip.io/loadbalancerIPs"),
	}
	damage := []func(*corev1.Service){
		wiped,
		func(svc *corev1.Service) { delete(svc.Annotations, annotation.Assigned) },
		func(svc *corev1.Service) { delete(svc.Annotations, annotation.Leases) },
		func(svc *corev1.Service) { delete(svc.Annotations, annotation.AssignedPools) },
		assignedTo("203.0.113.11"),
		assignedTo("203.0.113.10,203.0.113.12,2001:db8::10"),
		annotated(annotation.AssignedPools, "six,new"),
		func(svc *corev1.Service) { svc.Status = corev1.ServiceStatus{} },
		func(svc *corev1.Service) { svc.Finalizers = nil },
		ofType(corev1.ServiceTypeClusterIP),
		ofType(corev1.ServiceTypeLoadBalancer),
		shows("203.0.113.11"),
		shows("192.0.2.1"),
	}
	s := newStory(t)
	s.since = map[held]time.Time{}
	var transcript strings.Builder
	s.server.watch = func(_, svc *corev1.Service) {
		text, _ := json.Marshal(svc)
		transcript.Write(append(text, '\n'))
	}
	s.lessor.serves("eth1", "198.18.0.240", "198.18.0.241", "198.18.0.242")
	s.lessor.serves("eth2", "198.18.2.240")
	service := rapid.Custom(func(t *rapid.T) string { return fmt.Sprintf("default/s%d", rapid.IntRange(0, 5).Draw(t, "service")) })
	pick := func(from []func(*corev1.Service)) func(*corev1.Service) {
		return from[rapid.IntRange(0, len(from)-1).Draw(t, "which")]
	}
	s.server.fault = func() fault {
		return fault(max(0, rapid.IntRange(-6, 2).Draw(t, "fault")))
	}
	s.shelf.fault = s.server.fault
	t.Repeat(map[string]func(*rapid.T){
		"create": func(t *rapid.T) { s.server.create(service.Draw(t, "name"), s.clock, pick(wishes)) },
		"create a sharer": func(t *rapid.T) {
			s.server.create(service.Draw(t, "name"), s.clock, shared("k"), pick([]func(*corev1.Service){ports(80), ports(443), ports(25)}))
		},
		"change": func(t *rapid.T) { s.server.update(service.Draw(t, "name"), pick(wishes)) },
		"damage": func(t *rapid.T) { s.server.update(service.Draw(t, "name"), pick(damage)) },
		"delete": func(t *rapid.T) { s.server.delete(service.Draw(t, "name"), s.clock) },
		"configure": func(t *rapid.T) {
			s.config.set(rapid.SampledFrom(configs).Draw(t, "config"))
			s.stale = true
		},
		"relabel": func(t *rapid.T) {
			s.around.labels["default"] = rapid.SampledFrom([]map[string]string{nil, {"env": "prod"}}).Draw(t, "labels")
			s.stale = true
		},
		"facts": func(t *rapid.T) {
			facts := &clusterfacts.Facts{Conflicts: s.around.facts.Conflicts}
			if rapid.Bool().Draw(t, "a node has an address of a pool") {
				a := netip.MustParseAddr("203.0.113.11")
				facts.Forbidden = []clusterfacts.Forbidden{{Range: netipx.IPRangeFrom(a, a), Why: "the address of node n1"}}
			}
			s.around.facts = facts
			s.stale = true
		},
		"conflicts": func(t *rapid.T) {
			settled := s.settledAddresses()
			report := rapid.SampledFrom([]string{"203.0.113.10 withheld", "203.0.113.11 withheld", "203.0.113.12 announced",
				"198.18.0.240 withheld", "2001:db8::10 withheld"})
			s.around.report(rapid.SliceOfNDistinct(report, 0, 5, rapid.ID[string]).Draw(t, "reports")...)
			s.stale = true
			s.keeps(settled)
		},
		"break the configuration": func(*rapid.T) { s.config.put(nil, errors.New("broken")) },
		"time": func(t *rapid.T) {
			s.clock = s.clock.Add(time.Duration(rapid.IntRange(0, 40).Draw(t, "seconds")) * time.Second)
		},
		"leases": func(t *rapid.T) {
			s.lessor.mute = rapid.IntRange(0, 3).Draw(t, "mute") == 0
			s.lessor.notify()
			s.followedLeases()
		},
		"lose a lease": func(t *rapid.T) {
			s.lessor.ends("eth1", fmt.Sprintf("198.18.0.%d", rapid.IntRange(240, 242).Draw(t, "address")), "it ended")
			s.followedLeases()
		},
		"see": func(t *rapid.T) { s.see(service.Draw(t, "name")) },
		"see all": func(*rapid.T) {
			for i := range 6 {
				s.see(fmt.Sprintf("default/s%d", i))
			}
		},
		"work": func(t *rapid.T) {
			for range rapid.IntRange(1, 6).Draw(t, "times") {
				if rapid.Bool().Draw(t, "another first") {
					s.rotate()
				}
				s.once()
				s.followedLeases()
			}
		},
		"crash": func(t *rapid.T) {
			if rapid.Bool().Draw(t, "without configuration") {
				s.config.config = nil
			}
			s.restart()
		},
		"come to rest": func(*rapid.T) {
			fault := s.server.fault
			s.server.fault, s.shelf.fault = nil, nil
			s.rings()
			s.run()
			s.content()
			s.restartChangesNothing()
			s.server.fault, s.shelf.fault = fault, fault
		},
		"": func(*rapid.T) { s.unique() },
	})
	s.server.fault, s.shelf.fault = nil, nil
	s.around.facts = &clusterfacts.Facts{}
	s.config.set(configs[0])
	s.stale = true
	for range 5 {
		s.pass(calm + time.Minute)
		for _, name := range s.server.names() {
			s.see(name)
		}
		s.run()
		s.content()
	}
	s.unique()
	s.settled(t)
	s.restartChangesNothing()
	for _, event := range s.events.take() {
		transcript.WriteString(event + "\n")
	}
	return transcript.String()
}

// restartChangesNothing checks that a controller that starts now, and every reader
// who builds the same ledger from the same objects (the CLI, the dashboard, another
// replica), comes to the answers that the controller has written, also to Services that
// wait. It does not hold for objects that wait for a repair, and while other hosts have
// addresses: which ones are withheld is in memory alone.
func (s *story) restartChangesNothing() {
	s.Helper()
	if s.config.config == nil || s.config.state.Err != nil || len(s.around.facts.Conflicts) > 0 ||
		slices.ContainsFunc(s.machine().Stats(s.clock).Pools, func(p ipam.PoolStats) bool { return p.Conflicted > 0 }) {
		return
	}
	pending := func(reason string) bool { return reason == string(ledger.LeasePending) }
	fresh := ledger.New(s.scope)
	records, _ := s.shelf.Load(context.Background())
	fresh.Prime(ledger.Start{Situation: s.ledger.situation(), Services: s.server.all(), NamespaceLabels: s.around.Labels, Records: records},
		s.clock)
	services := slices.DeleteFunc(s.server.all(), func(svc *corev1.Service) bool { return !s.scope.Serves(svc) })
	slices.SortFunc(services, func(a, b *corev1.Service) int {
		return cmp.Or(a.CreationTimestamp.Compare(b.CreationTimestamp.Time), cmp.Compare(ledger.NameOf(a), ledger.NameOf(b)))
	})
	for _, svc := range services {
		c, before := kube.Allocated(svc), s.holds(string(svc.UID))
		repaired := kube.JoinAddrs(kube.VIPs(svc)) == kube.JoinAddrs(ledger.Addrs(before)) &&
			svc.Annotations[annotation.AssignedPools] == poolText(before)
		v := fresh.Ensure(svc, s.around.Labels(svc.Namespace), s.clock)
		now := objectOf(v, 0).condition.Reason
		switch {
		case c == nil || !repaired || len(kube.Leases(svc)) > 0:
		case !slices.Equal(v.Held, before):
			s.Fatalf("%s holds %v, after a restart %v", ledger.NameOf(svc), before, v.Held)
		// A leased address is not shared. Whether a Service with the same key waits because of that, or of the family that its
		// pools lack, depends on which of the two came first.
		case svc.Annotations[annotation.SharingKey] != "" && now == string(ipam.AddressReserved):
		case pending(c.Reason) || pending(now): // which addresses a DHCP server leases is known to its client alone
		case now != c.Reason:
			s.Fatalf("%s is told %q, after a restart %q", ledger.NameOf(svc), c.Reason+": "+c.Message, v)
		}
	}
}

// content checks that none of those who wait could be given something, now that
// the controller has nothing left to do.
func (s *story) content() {
	for _, name := range s.due() {
		svc := s.server.get(name)
		before := s.holds(string(svc.UID))
		if v := s.ensures(svc); !slices.Equal(v.Held, before) {
			s.Fatalf("%s waited though it could have %v", name, v.Held)
		}
	}
}

// held is an address that a Service holds.
type held struct {
	uid  string
	addr netip.Addr
}

// note notes since when Services hold what they do.
func (s *story) note() {
	if s.since == nil {
		return
	}
	now := map[held]time.Time{}
	for _, svc := range s.server.all() {
		for _, h := range s.holds(string(svc.UID)) {
			key := held{string(svc.UID), h.Addr}
			if now[key] = s.clock; s.since[key] != (time.Time{}) {
				now[key] = s.since[key]
			}
		}
	}
	s.since = now
}

// settledAddresses returns what Services that have not changed have had for a
// while.
func (s *story) settledAddresses() map[string][]netip.Addr {
	settled := map[string][]netip.Addr{}
	for _, name := range s.server.names() {
		svc := s.server.get(name)
		uid := string(svc.UID)
		if _, known := s.machine().Holds(svc); s.seen(name) != svc || !known || svc.Annotations[annotation.Renumber] != "" {
			continue
		}
		s.ensures(svc)
		s.queue.Add(name) // the answer is not written yet
		for _, h := range s.holds(uid) {
			if since, ok := s.since[held{uid, h.Addr}]; ok && s.clock.Sub(since) >= settling {
				settled[name] = append(settled[name], h.Addr)
			}
		}
	}
	return settled
}

// keeps checks that the Services keep these addresses when they are looked at.
func (s *story) keeps(settled map[string][]netip.Addr) {
	for _, name := range slices.Sorted(maps.Keys(settled)) {
		svc, addrs := s.server.get(name), settled[name]
		s.ensures(svc)
		s.queue.Add(name)
		for _, a := range addrs {
			if !slices.Contains(ledger.Addrs(s.holds(string(svc.UID))), a) {
				s.Fatalf("a report moved %s from %s", name, a)
			}
		}
	}
}

// settled checks that every Service has what it asks for, or a refusal, and
// that the ledger agrees with the objects.
func (s *story) settled(t *rapid.T) {
	shown := 0.0
	for _, name := range s.server.names() {
		svc := s.server.get(name)
		vips, c := kube.VIPs(svc), kube.Allocated(svc)
		held := ledger.Addrs(s.holds(string(svc.UID)))
		shown += float64(len(vips))
		if kube.JoinAddrs(vips) != kube.JoinAddrs(held) {
			t.Errorf("%s shows %v, the ledger says %v", name, vips, held)
		}
		switch {
		case svc.Spec.Type != corev1.ServiceTypeLoadBalancer:
			if s.scope.LeftBehind(svc) || c != nil || len(vips) > 0 {
				t.Errorf("%s is not served and carries %v %v %v", name, svc.Annotations, svc.Finalizers, svc.Status)
			}
		case c == nil:
			t.Errorf("%s says nothing", name)
		case c.Status == "True" && len(vips) == 0, c.Status == "False" && c.Message == "":
			t.Errorf("%s has %v and says %v", name, vips, c)
		}
	}
	s.fitted(t)
	assigned := 0.0
	for _, p := range s.machine().Stats(s.clock).Pools {
		assigned += p.Assigned
		if p.Quarantined > 0 {
			t.Errorf("pool %s: %v addresses are still in quarantine", p.Pool, p.Quarantined)
		}
	}
	if assigned > shown {
		t.Errorf("%v addresses are assigned, %v are shown", assigned, shown)
	}
}

// fitted checks that Services that show one address fit in with each other.
func (s *story) fitted(t *rapid.T) {
	by := map[netip.Addr][]ipam.Request{}
	for _, name := range s.server.names() {
		svc := s.server.get(name)
		req, _ := ledger.RequestOf(svc, nil, compat.For(s.config.config))
		for _, a := range kube.VIPs(svc) {
			for _, other := range by[a] {
				clash := req.Sharing == nil || other.Sharing == nil || req.Sharing.Key != other.Sharing.Key ||
					req.Sharing.Backends != other.Sharing.Backends
				for i := 0; !clash && i < len(req.Sharing.Ports); i++ {
					clash = slices.Contains(other.Sharing.Ports, req.Sharing.Ports[i])
				}
				if clash {
					t.Errorf("%s: %s with %+v and %s with %+v", a, name, req.Sharing, other.Owner.Name, other.Sharing)
				}
			}
			by[a] = append(by[a], req)
		}
	}
}
