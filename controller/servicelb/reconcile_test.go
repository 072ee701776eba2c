package servicelb

import (
	"encoding/json"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/strategicpatch"

	"github.com/lodestone-lb/lodestone/controller/servicelb/ledger"
	"github.com/lodestone-lb/lodestone/pkg/annotation"
	"github.com/lodestone-lb/lodestone/pkg/kube"
	"github.com/lodestone-lb/lodestone/pkg/notify"
	"github.com/lodestone-lb/lodestone/pkg/objects"
)

const single = "pools: [{name: single, addresses: [203.0.113.10]}]\n"

func TestServiceGetsAnAddressWithOneWriteAndOneEvent(t *testing.T) {
	t.Parallel()
	s := newStory(t)
	s.creates("web")
	s.has("web", "203.0.113.10", "True Allocated")
	s.mentions("web", `203.0.113.10 from pool "lan"`)
	s.wantEvents("Normal Allocated default/web: 203.0.113.10")
	if s.server.patches != 1 {
		t.Errorf("%d writes", s.server.patches)
	}
	if mode := s.server.get("default/web").Status.LoadBalancer.Ingress[0].IPMode; mode == nil || *mode != corev1.LoadBalancerIPModeVIP {
		t.Errorf("ipMode %v", mode)
	}
	s.silent("a label is added", func() { s.changes("web", func(svc *corev1.Service) { svc.Labels = map[string]string{"a": "b"} }) })
	s.silent("the controller restarts", func() { s.restart(); s.run() })
	s.wantEvents()
}

func TestFreedAddressGoesToTheServiceThatWaits(t *testing.T) {
	t.Parallel()
	s := newStory(t)
	s.configure("quarantine: 30s\n" + single)
	s.creates("first")
	s.creates("second")
	s.has("second", "", "False PoolExhausted")
	s.wantEvents("Normal Allocated default/first", `Warning PoolExhausted default/second: pool "single" has 0 of 1`)

	s.deletes("first")
	s.has("second", "", "False PoolExhausted")
	s.silent("nothing is free yet", func() { s.pass(29 * time.Second) })
	s.pass(time.Second)
	s.has("second", "203.0.113.10", "True Allocated")
	s.wantEvents("Normal Allocated default/second")

	s.creates("third")
	s.changes("second", ofType(corev1.ServiceTypeClusterIP))
	s.pass(30 * time.Second)
	s.has("third", "203.0.113.10", "True Allocated")
	s.has("second", "", "")
}

func TestRemovedPoolLeavesItsAddressesStranded(t *testing.T) {
	t.Parallel()
	s := newStory(t)
	s.creates("web")
	s.creates("bare", annotated(annotation.AddressPool, "lan"))
	s.events.take()
	s.configure("pools: [{name: other, addresses: [198.51.100.0/28]}]\n")
	s.has("web", "203.0.113.10", "True Stranded")
	s.has("bare", "203.0.113.11", "True Stranded")
	s.wantEvents("Warning Stranded default/web", "Warning Stranded default/bare")
	s.restart()
	s.run()
	s.has("web", "203.0.113.10", "True Stranded")
	s.wantEvents()
	s.configure(lan)
	s.has("web", "203.0.113.10", "True Allocated")
	s.silent("the same pools again", func() { s.configure(lan + "\n") })
}

func TestPreferredFamilyIsAddedWhenAPoolGivesIt(t *testing.T) {
	t.Parallel()
	s := newStory(t)
	s.configure("pools: [{name: four, addresses: [203.0.113.10]}]\n")
	s.creates("web", families(corev1.IPFamilyPolicyPreferDualStack, corev1.IPv4Protocol, corev1.IPv6Protocol))
	s.has("web", "203.0.113.10", "True PartiallyAllocated")
	s.mentions("web", "no pool gives it an IPv6 address")
	s.events.take()
	s.configure("pools: [{name: four, addresses: [203.0.113.10]}, {name: six, addresses: ['2001:db8::10']}]\n")
	s.has("web", "203.0.113.10,2001:db8::10", "True Allocated")
	s.wantEvents("Normal Allocated default/web")

	s.changes("web", families(corev1.IPFamilyPolicySingleStack, corev1.IPv6Protocol))
	s.has("web", "2001:db8::10", "True Allocated")
}

func TestRequestsAreMetOrRefusedWithTheFacts(t *testing.T) {
	t.Parallel()
	s := newStory(t)
	inSpec := func(address string) func(*corev1.Service) {
		return func(svc *corev1.Service) { svc.Spec.LoadBalancerIP = address }
	}
	asks := func(addresses string) func(*corev1.Service) { return annotated(annotation.Addresses, addresses) }
	s.creates("asked", asks(" 203.0.113.15 "))
	s.has("asked", "203.0.113.15", "True Allocated")
	s.creates("spec", inSpec("203.0.113.16"))
	s.has("spec", "203.0.113.16", "True Allocated")
	s.creates("agree", asks("203.0.113.17"), inSpec("203.0.113.17"))
	s.has("agree", "203.0.113.17", "True Allocated")

	for _, tt := range []struct {
		name   string
		change func(*corev1.Service)
		reason string
		words  string
	}{
		{"taken", asks("203.0.113.15"), "AddressInUse", "default/asked"},
		{"outside", asks("192.0.2.1"), "AddressOutsidePools", "192.0.2.1"},
		{"family", asks("2001:db8::11"), "WrongFamily", "IPv6"},
		{"two", asks("203.0.113.11,203.0.113.11"), "InvalidRequest", "names 203.0.113.11 twice"},
		{"many", asks("203.0.113.1,203.0.113.2,203.0.113.3,203.0.113.4,203.0.113.5,203.0.113.6,203.0.113.7,203.0.113.8,203.0.113.9"),
			"InvalidRequest", "more than 8 addresses"},
		{"key", shared(strings.Repeat("k", 300)), "InvalidRequest", "longer than 253 bytes"},
		{"partners", annotated(annotation.SharingNamespaces, "a,,b"), "InvalidRequest", "is not the name of a namespace"},
		{"half", asks("203.0.113."), "InvalidRequest", `"203.0.113." is not an IP address`},
		{"limit", annotated(annotation.ConnectionRateLimit, "fast"), "InvalidRequest", "not a whole number of connections"},
		{"host", asks("lb.example.com"), "InvalidRequest", "lb.example.com"},
		{"zone", asks("fe80::1%eth0"), "InvalidRequest", "is not an IP address"},
		{"unicode", asks("²03.0.113.1"), "InvalidRequest", "is not an IP address"},
		{"huge", asks(strings.Repeat("ü", 1<<19)), "InvalidRequest", "..."},
		{"hugepool", annotated(annotation.AddressPool, strings.Repeat("x", 1<<20)), "InvalidRequest", "is not the name of a pool"},
		{"pools", annotated(annotation.AddressPool, strings.Repeat("a,", 20)+"a"), "InvalidRequest", "more than 16 pools"},
		{"comma", annotated(annotation.AddressPool, "lan,"), "InvalidRequest", `"" is not the name of a pool`},
		{"nowhere", annotated(annotation.AddressPool, "nowhere"), "PoolNotFound", "nowhere"},
		{"badspec", inSpec("nonsense"), "InvalidRequest", "spec.loadBalancerIP"},
	} {
		s.creates(tt.name, tt.change)
		s.has(tt.name, "", "False "+tt.reason)
		s.mentions(tt.name, tt.words)
		if c := kube.Allocated(s.server.get("default/" + tt.name)); len(c.Message) > 300 {
			t.Errorf("%s: a message of %d bytes", tt.name, len(c.Message))
		}
	}
	s.creates("torn", asks("203.0.113.11"), inSpec("203.0.113.12"))
	s.has("torn", "", "False InvalidRequest")
	s.creates("healthy")
	s.has("healthy", "203.0.113.10", "True Allocated")
	s.silent("those that are refused stay so", func() { s.pass(time.Hour); notify.Wake(s.ledger.retry); s.run() })
}

func TestRefusedWishKeepsWhatTheServiceHas(t *testing.T) {
	t.Parallel()
	s := newStory(t)
	s.creates("web")
	s.creates("other")
	s.changes("web", annotated(annotation.Addresses, "203.0.113.11"))
	s.has("web", "203.0.113.10", "False AddressInUse")
	s.mentions("web", `; keeps 203.0.113.10 from pool "lan"`)
	s.deletes("other")
	s.has("web", "203.0.113.10", "False AddressQuarantined")
	s.pass(30 * time.Second)
	s.has("web", "203.0.113.11", "True Allocated")
}

// moving is a story whose Service mover goes from 203.0.113.10 to .11, and whose object cannot be written.
func moving(t *testing.T) *story {
	t.Helper()
	s := newStory(t)
	s.configure("quarantine: 0s\n" + "pools: [{name: lan, addresses: [203.0.113.10-203.0.113.11]}]\n")
	s.creates("mover")
	s.server.fault = func() fault { return lost }
	s.server.update("default/mover", annotated(annotation.Addresses, "203.0.113.11"))
	s.see("default/mover")
	s.once()
	return s
}

// A Service that moves shows its old address until its object is written.
func TestOldAddressOfAMoveIsFreeOnlyWhenNobodyShowsIt(t *testing.T) {
	t.Parallel()
	s := moving(t)
	s.has("mover", "203.0.113.10", "True Allocated")

	s.server.fault = nil
	s.server.create("default/next", s.clock)
	s.see("default/next")
	s.rotate() // before the mover's next attempt
	s.once()
	s.unique()
	s.run()
	s.has("mover", "203.0.113.11", "True Allocated")
	s.has("next", "203.0.113.10", "True Allocated")
}

// A Service that goes before its move to another address is written leaves neither address behind.
func TestAMoveThatIsNeverWrittenLeavesNothing(t *testing.T) {
	t.Parallel()
	s := moving(t)
	s.server.fault = nil
	s.server.update("default/mover", func(svc *corev1.Service) { svc.Finalizers = nil }) // by force
	s.deletes("mover")
	s.creates("next")
	s.has("next", "203.0.113.10", "True Allocated")
	s.creates("other")
	s.has("other", "203.0.113.11", "True Allocated")
}

func TestClassesAreServedOrLeftAlone(t *testing.T) {
	t.Parallel()
	s := newStory(t)
	s.silent("a foreign class", func() { s.creates("foreign", ofClass("example.com/other")) })
	s.creates("classed", ofClass(annotation.DefaultClass))
	s.creates("classless")
	s.has("classed", "203.0.113.10", "True Allocated")
	s.has("classless", "203.0.113.11", "True Allocated")

	s.scope.Classless = false
	s.restart()
	s.silent("no class-less ones any more", func() { s.run(); s.creates("ignored") })
	s.has("classless", "203.0.113.11", "True Allocated")
	s.creates("later", ofClass(annotation.DefaultClass))
	s.has("later", "203.0.113.12", "True Allocated")

	s.deletes("classless")
	if s.server.get("default/classless") != nil {
		t.Error("the finalizer of a Service that is not served any more was left on it")
	}
	s.deletes("ignored")
}

// An annotation leaves a single Service to others, where no class distinguishes them.
func TestIgnoredServicesAreLeftAlone(t *testing.T) {
	t.Parallel()
	s := newStory(t)
	ignored := annotated(annotation.Ignore, annotation.Ignored)
	s.silent("one that was never ours", func() { s.creates("theirs", ofClass(annotation.DefaultClass), ignored) })
	s.creates("web")
	s.has("web", "203.0.113.10", "True Allocated")
	s.silent("one that has an address keeps it", func() { s.changes("web", ignored); s.restart(); s.run() })
	s.has("web", "203.0.113.10", "True Allocated")

	s.changes("theirs", annotated(annotation.Ignore, "yes"))
	s.has("theirs", "", "False InvalidRequest")
	s.mentions("theirs", annotation.Ignore+`: "yes" is not "true"`)
	s.changes("theirs", func(svc *corev1.Service) { delete(svc.Annotations, annotation.Ignore) })
	s.has("theirs", "203.0.113.11", "True Allocated")
}

func TestForeignServicesAreLeftAlone(t *testing.T) {
	t.Parallel()
	s := newStory(t)
	finalizer := func(svc *corev1.Service) { svc.Finalizers = []string{annotation.Finalizer, "example.com/theirs"} }
	status := func(svc *corev1.Service) {
		svc.Status.LoadBalancer.Ingress = []corev1.LoadBalancerIngress{{IP: "203.0.113.10"}}
	}
	s.silent("none is ours", func() {
		s.creates("plain", ofType(corev1.ServiceTypeClusterIP), finalizer)
		s.creates("foreign", ofClass("example.com/other"), finalizer, status)
		s.restart()
		s.run()
		s.changes("plain", annotated("a", "b"))
		s.deletes("plain")
	})
	s.creates("ours") // not with an address that is in use
	s.has("ours", "203.0.113.11", "True Allocated")
}

// Whoever gives an address up while no controller runs gives it up all the same.
func TestAddressGivenUpWithoutAControllerRestsToo(t *testing.T) {
	t.Parallel()
	s := newStory(t)
	s.configure("quarantine: 30s\n" + single)
	s.creates("web")
	s.server.update("default/web", ofType(corev1.ServiceTypeClusterIP))
	s.restart()
	s.creates("other")
	s.has("web", "", "")
	s.has("other", "", "False PoolExhausted")
	s.restart()
	s.run()
	s.has("other", "", "False PoolExhausted")
	s.pass(30 * time.Second)
	s.has("other", "203.0.113.10", "True Allocated")
}

func TestRecreatedServiceIsAnotherOne(t *testing.T) {
	t.Parallel()
	s := newStory(t)
	s.configure("quarantine: 30s\n" + single)
	s.creates("web")
	// Deleted and created again before the controller looks.
	s.server.delete("default/web", s.clock)
	s.see("default/web")
	for s.server.get("default/web") != nil {
		s.once()
	}
	s.creates("other")
	s.has("other", "", "False PoolExhausted")
	s.creates("web")
	s.has("web", "203.0.113.10", "True Allocated") // its own quarantine is over when it comes back

	// Finalizers stripped by force: the new one comes under the same name.
	s.server.update("default/web", func(svc *corev1.Service) { svc.Finalizers = nil })
	s.server.delete("default/web", s.clock)
	s.server.create("default/web", s.clock)
	s.run()
	s.pass(30 * time.Second)
	s.has("web", "203.0.113.10", "True Allocated")
}

func TestLatePatchDoesNotLandOnARecreatedService(t *testing.T) {
	t.Parallel()
	s := newStory(t)
	s.server.create("default/web", s.clock)
	s.see("default/web")
	s.server.delete("default/web", s.clock)
	s.server.create("default/web", s.clock, annotated(annotation.Addresses, "203.0.113.15"))
	s.once() // decides on the first one
	if svc := s.server.get("default/web"); len(svc.Status.LoadBalancer.Ingress) > 0 {
		t.Errorf("the new Service was given %v", svc.Status)
	}
	s.run()
	s.has("web", "203.0.113.15", "True Allocated")
	if held := s.holds("uid-1"); len(held) > 0 {
		t.Errorf("the first Service still holds %v", held)
	}
}

func TestWhatHappensWhileTheControllerIsDown(t *testing.T) {
	t.Parallel()
	s := newStory(t)
	for _, name := range []string{"deleted", "turned", "kept", "wiped", "unmarked"} {
		s.creates(name)
	}
	s.server.delete("default/deleted", s.clock)
	s.server.update("default/turned", ofType(corev1.ServiceTypeClusterIP))
	s.server.update("default/wiped", wiped)
	s.server.update("default/unmarked", func(svc *corev1.Service) { delete(svc.Annotations, annotation.Assigned) })
	s.server.create("default/new", s.clock)
	s.restart()
	s.run()
	if s.server.get("default/deleted") != nil {
		t.Error("the finalizer holds the deleted Service")
	}
	s.has("turned", "", "")
	s.has("kept", "203.0.113.12", "True Allocated")
	s.has("wiped", "203.0.113.13", "True Allocated")
	s.has("unmarked", "203.0.113.14", "True Allocated")
	s.unique()

	s.changes("turned", ofType(corev1.ServiceTypeLoadBalancer))
	s.has("turned", s.assigned("turned"), "True Allocated")
}

func (s *story) assigned(name string) string {
	return s.server.get("default/" + name).Annotations[annotation.Assigned]
}

func TestObjectsEditedByHandAreRepaired(t *testing.T) {
	t.Parallel()
	s := newStory(t)
	s.creates("web")
	s.events.take()
	for _, edit := range []func(*corev1.Service){
		wiped,
		func(svc *corev1.Service) { svc.Status.LoadBalancer.Ingress[0].IP = "203.0.113.19" },
		func(svc *corev1.Service) { svc.Status.LoadBalancer.Ingress[0].IPMode = nil },
		func(svc *corev1.Service) { svc.Finalizers, svc.Status.Conditions = nil, nil },
	} {
		s.changes("web", edit)
		s.has("web", "203.0.113.10", "True Allocated")
	}
	s.changes("web", annotated(annotation.Assigned, "203.0.113.1"))
	s.has("web", "203.0.113.10", "True Allocated")
}

func TestTwoLoadBalancersDoNotFightAtFullSpeed(t *testing.T) {
	t.Parallel()
	s := newStory(t)
	s.creates("web")
	s.events.take()
	before := s.server.patches
	for range 600 { // ten minutes
		s.server.update("default/web", func(svc *corev1.Service) { svc.Status.LoadBalancer.Ingress[0].IP = "192.0.2.7" })
		s.pass(time.Second)
	}
	if n := s.server.patches - before; n > 30 {
		t.Errorf("%d writes in ten minutes", n)
	}
	s.wantEvents("Warning StatusContested default/web")
}

// An API server that takes no writes is not another load balancer.
func TestRepairsThatFailAreNotHeldAgainstAnybody(t *testing.T) {
	t.Parallel()
	s := newStory(t)
	s.creates("web")
	s.events.take()
	s.server.fault = func() fault { return lost }
	s.server.update("default/web", wiped)
	s.see("default/web")
	for range 2 * promptRepairs {
		s.once()
	}
	s.server.fault = nil
	s.run()
	s.has("web", "203.0.113.10", "True Allocated")
	s.wantEvents()
}

// Nobody gets an address by writing it on his Service while the controller is
// down.
func TestAnnotationAloneClaimsNoForeignAddress(t *testing.T) {
	t.Parallel()
	s := newStory(t)
	s.creates("victim")
	s.server.create("default/thief", s.clock, annotated(annotation.Assigned, "203.0.113.10"))
	s.server.create("default/gateway", s.clock, annotated(annotation.Assigned, "203.0.113.1"))
	s.restart()
	s.run()
	s.has("victim", "203.0.113.10", "True Allocated")
	s.has("gateway", "203.0.113.11", "True Allocated")
	s.has("thief", "203.0.113.12", "True Allocated")
}

func TestDuplicatesAreSettledAtStart(t *testing.T) {
	t.Parallel()
	s := newStory(t)
	has := func(svc *corev1.Service) {
		annotated(annotation.Assigned, "203.0.113.10")(svc)
		svc.Status.LoadBalancer.Ingress = []corev1.LoadBalancerIngress{{IP: "203.0.113.10"}}
	}
	s.server.create("default/a-younger", s.clock.Add(time.Minute), has)
	s.server.create("default/b-older", s.clock, has)
	s.restart()
	s.wantEvents("Warning DuplicateAddress default/a-younger: 203.0.113.10 also belongs to default/b-older")
	s.run()
	s.has("b-older", "203.0.113.10", "True Allocated")
	s.has("a-younger", "203.0.113.11", "True Allocated")
	s.unique()
}

// Taking over from another load balancer keeps the addresses that our pools
// have.
func TestAddressesOfAnotherLoadBalancerAreAdopted(t *testing.T) {
	t.Parallel()
	s := newStory(t)
	shows := func(ip string) func(*corev1.Service) {
		return func(svc *corev1.Service) {
			svc.Status.LoadBalancer.Ingress = []corev1.LoadBalancerIngress{{IP: ip}}
		}
	}
	s.server.create("default/a-new", s.clock)
	s.server.create("default/ours", s.clock, shows("203.0.113.10"))
	s.server.create("default/node-address", s.clock, shows("192.0.2.4"))
	s.restart()
	s.run()
	s.has("ours", "203.0.113.10", "True Allocated")
	s.has("a-new", "203.0.113.11", "True Allocated")
	s.has("node-address", "203.0.113.12", "True Allocated")
}

// Without a valid configuration at the start Services are imported, nothing is allocated, and the refusal is reported.
func TestWithoutConfigurationNothingIsAllocatedAndNothingIsLost(t *testing.T) {
	t.Parallel()
	s := newStory(t)
	s.creates("held")
	s.creates("wiped")
	s.creates("broken", annotated(annotation.Addresses, "nonsense"))
	s.config.config = nil
	s.config.put(nil, errors.New("config.yaml:1:1: bad"))
	s.server.update("default/held", wiped)
	s.server.update("default/wiped", wiped)
	s.server.update("default/wiped", annotated("a", "b"))
	s.server.create("default/new", s.clock)
	s.events.take()
	s.restart()
	s.run()
	s.has("new", "", "False ConfigUnavailable")
	s.mentions("new", "config.yaml:1:1: bad")
	s.wantEvents("Warning ConfigUnavailable default/new")

	s.configure(lan)
	s.has("held", "203.0.113.10", "True Allocated")
	s.has("wiped", "203.0.113.11", "True Allocated")
	s.has("new", "203.0.113.12", "True Allocated")
	s.wantEvents("Normal Allocated default/new")
}

func TestWithoutConfigurationTheStatusOfHeldAddressesIsStillRepaired(t *testing.T) {
	t.Parallel()
	s := newStory(t)
	s.creates("web")
	s.config.config = nil
	s.config.put(nil, errors.New("no configuration"))
	s.restart()
	s.run()
	s.changes("web", wiped)
	s.has("web", "203.0.113.10", "True Allocated")
}

// The resourceVersion keeps decisions on old objects from landing.
func TestDecisionOnAnOldObjectIsRepeated(t *testing.T) {
	t.Parallel()
	s := newStory(t)
	s.server.create("default/web", s.clock)
	s.see("default/web")
	s.server.update("default/web", annotated(annotation.Addresses, "203.0.113.15"))
	s.once()
	s.has("web", "", "")
	s.run()
	s.has("web", "203.0.113.15", "True Allocated")
	if n := s.server.patches; n > 3 {
		t.Errorf("%d writes", n)
	}
}

func TestWaitingServicesAreTriedOldestFirst(t *testing.T) {
	t.Parallel()
	s := newStory(t)
	s.configure("quarantine: 0s\n" + single)
	s.creates("holder")
	s.creates("z-first")
	s.creates("a-second")
	s.deletes("holder")
	s.has("z-first", "203.0.113.10", "True Allocated")
	s.has("a-second", "", "False PoolExhausted")
}

func TestNobodyWritesBecauseSecondsCountDown(t *testing.T) {
	t.Parallel()
	s := newStory(t)
	s.configure("quarantine: 1h\npools: [{name: few, addresses: [203.0.113.10-203.0.113.13]}]\n")
	for _, name := range []string{"a", "b", "c", "d"} {
		s.creates(name)
	}
	s.creates("waits")
	s.creates("wants", annotated(annotation.Addresses, "203.0.113.10"))
	s.deletes("a")
	s.mentions("wants", "in quarantine")
	for _, name := range []string{"b", "c"} {
		s.server.delete("default/"+name, s.clock)
		s.run()
		s.silent("time passes", func() { s.pass(time.Second); notify.Wake(s.ledger.retry); s.run() })
	}
}

// The cache keeps our condition and our finalizers alone, so a patch has to leave
// those of others where they are.
func TestWhatOthersWroteStays(t *testing.T) {
	t.Parallel()
	o := objectOf(ledger.Verdict{Held: nil}, 1)
	svc := &corev1.Service{}
	svc.Finalizers = []string{"example.com/other", annotation.ClassFinalizer}
	svc.Status.Conditions = []metav1.Condition{{Type: "example.com/Other"}, *o.condition}
	if change := o.change(svc, metav1.Now()); change != nil {
		t.Errorf("the same condition again: %v", change)
	}
	body := object{}.patch(objects.Services.Project(svc), metav1.Now())
	before, err := json.Marshal(svc)
	require.NoError(t, err)
	after, err := strategicpatch.StrategicMergePatch(before, body, corev1.Service{})
	require.NoError(t, err)
	got := &corev1.Service{}
	require.NoError(t, json.Unmarshal(after, got))
	require.Equal(t, []string{"example.com/other"}, got.Finalizers)
	require.Len(t, got.Status.Conditions, 1)
	require.Equal(t, "example.com/Other", got.Status.Conditions[0].Type)
}

func TestServiceThatIsGoneWaitsNoMore(t *testing.T) {
	t.Parallel()
	s := newStory(t)
	s.configure(single)
	s.creates("has")
	s.creates("waits")
	require.Equal(t, []string{"default/waits"}, s.due())
	s.deletes("waits")
	require.Empty(t, s.due())
}
