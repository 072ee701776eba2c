package servicelb

import (
	"net/netip"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/lodestone-lb/lodestone/pkg/annotation"
)

// recreates takes the finalizers of a Service away by force, deletes it, and creates another one of its name.
func (s *story) recreates(name string, changes ...func(*corev1.Service)) {
	s.server.update("default/"+name, func(svc *corev1.Service) { svc.Finalizers = nil })
	s.server.delete("default/"+name, s.clock)
	s.server.create("default/"+name, s.clock, changes...)
	s.see("default/" + name)
}

// onRecord checks that the quarantine of the address is on record.
func (s *story) onRecord(address string, want bool) {
	s.Helper()
	if _, kept := s.shelf.records[netip.MustParseAddr(address)]; kept != want {
		s.Errorf("on record are %v; %s among them: want %t", s.shelf.records, address, want)
	}
}

// What a Service held whose object went without the controller is free, too, only once that is on record. The new one of its
// name asks for another address, and the controller dies as soon as it has looked at it.
func TestQuarantineOfAFormerServiceOutlivesTheController(t *testing.T) {
	t.Parallel()
	for what, looks := range map[string]func(*story){
		"the queue": func(s *story) { s.once() },
		"Kubernetes' own service controller": func(s *story) {
			if _, err := s.Provide(t.Context(), s.server.get("default/web")); err != nil {
				t.Error(err)
			}
		},
	} {
		s := newStory(t)
		s.creates("web")
		s.has("web", "203.0.113.10", "True Allocated")
		s.recreates("web", annotated(annotation.Addresses, "203.0.113.12"))
		s.server.fault = func() fault { return lost }
		looks(s)
		s.onRecord("203.0.113.10", true)
		s.server.fault = nil
		s.restart()
		s.run()
		s.has("web", "203.0.113.12", "True Allocated")
		if s.creates("other"); t.Failed() {
			t.Fatal(what)
		}
		s.has("other", "203.0.113.11", "True Allocated")
	}
}

// The new Service may have nothing to be written on it.
func TestQuarantineOfAFormerServiceIsOnRecordThoughNothingIsWritten(t *testing.T) {
	t.Parallel()
	s := newStory(t)
	s.creates("web")
	s.configure(lan + "  - {name: office, dhcp: {interface: eth1}}\n")
	s.recreates("web", annotated(annotation.AddressPool, "office"))
	s.silent("it waits for a DHCP server", func() { s.once() })
	s.onRecord("203.0.113.10", true)
}

// While the record cannot be written, what the former Service held stays its own.
func TestFormerServiceKeepsItsAddressUntilThatIsOnRecord(t *testing.T) {
	t.Parallel()
	s := newStory(t)
	s.creates("web")
	s.recreates("web", annotated(annotation.Addresses, "203.0.113.12"))
	s.shelf.fault = func() fault { return lost }
	for range 3 {
		s.once()
	}
	if _, err := s.Provide(t.Context(), s.server.get("default/web")); err == nil {
		t.Error("the new Service is served before the record")
	}
	s.clock = s.clock.Add(time.Minute)
	if held := s.holds("uid-1"); len(held) != 1 {
		t.Errorf("the former Service holds %v", held)
	}
	s.has("web", "", "")
	s.shelf.fault = nil
	s.run()
	s.onRecord("203.0.113.10", true)
	s.has("web", "203.0.113.12", "True Allocated")
	s.creates("other")
	s.has("other", "203.0.113.11", "True Allocated")
}

// The former Service may be one that was not served any more, and the new one another load balancer's.
func TestFormerServiceIsFreedThoughTheNewOneIsNotServed(t *testing.T) {
	t.Parallel()
	for what, now := range map[string][]func(*corev1.Service){
		"plain":              {ofType(corev1.ServiceTypeClusterIP)},
		"ignored":            {annotated(annotation.Ignore, annotation.Ignored)},
		"ignored and marked": {annotated(annotation.Ignore, annotation.Ignored), assignedTo("203.0.113.10")},
	} {
		for _, was := range []string{"served", "kept"} {
			s := newStory(t)
			s.creates("web")
			if was == "kept" {
				s.changes("web", annotated(annotation.Ignore, annotation.Ignored))
			}
			s.recreates("web", now...)
			s.run()
			if held := s.holds("uid-1"); len(held) > 0 {
				t.Errorf("%s, now %s: the former Service holds %v", was, what, held)
			}
			s.onRecord("203.0.113.10", true)
		}
	}
}

// Kubernetes' own service controller may come with an object that has been replaced.
func TestAStaleServiceTakesNothingFromItsSuccessor(t *testing.T) {
	t.Parallel()
	s := newStory(t)
	s.Upstream = true
	s.server.create("default/web", s.clock)
	s.see("default/web")
	former := s.server.get("default/web")
	s.recreates("web")
	if _, err := s.Provide(t.Context(), s.server.get("default/web")); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Provide(t.Context(), former); err == nil {
		t.Error("a Service that is gone is provided for")
	}
	if held := s.Holds(s.server.get("default/web")); len(held) != 1 {
		t.Errorf("the Service, which was provided for, holds %v", held)
	}
}

// Kubernetes' own service controller does not wait for the queue. The new Service of the name may come while the record about the
// former one is being written.
func TestAServiceThatIsCreatedWhileTheFormerOneIsFreed(t *testing.T) {
	t.Parallel()
	s := newStory(t)
	s.Upstream = true
	s.server.create("default/web", s.clock)
	s.see("default/web")
	if _, err := s.Provide(t.Context(), s.server.get("default/web")); err != nil {
		t.Fatal(err)
	}
	s.run()
	s.server.update("default/web", func(svc *corev1.Service) { svc.Finalizers = nil })
	s.server.delete("default/web", s.clock)
	s.see("default/web")
	s.Quarantine = &meanwhile{s, func() {
		s.server.create("default/web", s.clock)
		s.see("default/web")
		if _, err := s.Provide(t.Context(), s.server.get("default/web")); err != nil {
			t.Error(err)
		}
	}}
	if err := s.reconcile(t.Context(), "default/web"); err != nil {
		t.Error(err)
	}
	if held := s.Holds(s.server.get("default/web")); len(held) != 1 {
		t.Errorf("the Service, which was provided for, holds %v", held)
	}
}

// The new Service of the name asks for an address anew: the former one's lease is about to be given back.
func TestLeaseOfAFormerServiceIsNotTaken(t *testing.T) {
	t.Parallel()
	s := newOffice(t)
	s.creates("web")
	s.leases("web", "198.18.0.240=eth1")
	s.recreates("web")
	for s.once() {
		s.has("web", "", "") // before anybody has asked for a lease
	}
	s.run()
	s.has("web", "198.18.0.240", "True Allocated")
	s.leases("web", "198.18.0.240=eth1")
	if got := s.wanted()["eth1"]; len(got) != 1 {
		t.Errorf("wanted are %v", got)
	}
	s.silent("all is settled", func() { s.restart(); s.run() })
}
