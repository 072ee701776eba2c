package servicelb

import (
	"errors"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/lodestone-lb/lodestone/pkg/annotation"
	"github.com/lodestone-lb/lodestone/pkg/kube"
)

// Two workers take two Services that share an address at the same time, and each of them still holds it when the other one is
// looked at. Whoever gives it back last leaves a record.
func TestSharersThatGoTogetherLeaveARecord(t *testing.T) {
	t.Parallel()
	s := newStory(t)
	s.creates("a", shared("k"), ports(80))
	s.creates("b", shared("k"), ports(443))
	s.has("b", "203.0.113.10", "True Allocated")
	for _, name := range []string{"default/a", "default/b"} {
		s.server.delete(name, s.clock)
		s.see(name)
	}
	s.API = &meanwhile{s, func() {
		if err := s.reconcile(t.Context(), "default/b"); err != nil {
			t.Error(err)
		}
	}}
	if err := s.reconcile(t.Context(), "default/a"); err != nil {
		t.Error(err)
	}
	s.onRecord("203.0.113.10", true)
}

func TestSharersThatMoveTogetherLeaveARecord(t *testing.T) {
	t.Parallel()
	s := newStory(t)
	s.creates("a", shared("k"), ports(80))
	s.creates("b", shared("k"), ports(443))
	s.server.update("default/a", annotated(annotation.Addresses, "203.0.113.12"), unannotated(annotation.SharingKey))
	s.server.update("default/b", annotated(annotation.Addresses, "203.0.113.13"), unannotated(annotation.SharingKey))
	s.see("default/a")
	s.see("default/b")
	s.API = &meanwhile{s, func() {
		if err := s.reconcile(t.Context(), "default/b"); err != nil {
			t.Error(err)
		}
	}}
	if err := s.reconcile(t.Context(), "default/a"); err != nil {
		t.Error(err)
	}
	s.run()
	s.has("a", "203.0.113.12", "True Allocated")
	s.has("b", "203.0.113.13", "True Allocated")
	s.onRecord("203.0.113.10", true)
}

// A wish that is taken back before it was written costs no address.
func TestAWishThatIsTakenBack(t *testing.T) {
	t.Parallel()
	for name, wish := range map[string][2]func(*corev1.Service){
		"pool":   {annotated(annotation.AddressPool, "dmz"), unannotated(annotation.AddressPool)},
		"count":  {annotated(annotation.AddressCount, "1"), annotated(annotation.AddressCount, "2")},
		"family": {families(corev1.IPFamilyPolicySingleStack, corev1.IPv4Protocol), dual},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newStory(t)
			s.configure("quarantine: 30s\npools:\n  - {name: lan, addresses: [203.0.113.10-203.0.113.19, '2001:db8::10-2001:db8::19']}\n" +
				"  - {name: dmz, addresses: [198.51.100.1], autoAssign: false}\n")
			s.creates("first", dual, annotated(annotation.AddressCount, "2"))
			s.creates("web", wish[1])
			s.deletes("first") // lower addresses than those of the other one are free
			s.pass(time.Hour)
			before := kube.JoinAddrs(kube.VIPs(s.server.get("default/web")))
			s.changes("web", annotated("edit", "1"))
			s.server.update("default/web", wish[0])
			s.see("default/web")
			s.API = &meanwhile{s, func() { s.server.update("default/web", wish[1]) }}
			s.once()
			s.run()
			s.has("web", before, "True Allocated")
			s.silent("the controller restarts", func() { s.restart(); s.run() })
		})
	}
}

// Nobody knows how long the quarantine is then. It counts from the release all the same.
func TestWhatIsFreedWithoutAConfigurationIsOnRecord(t *testing.T) {
	t.Parallel()
	s := newStory(t)
	s.creates("web")
	s.config.config = nil
	s.config.put(nil, errors.New("broken"))
	s.restart()
	s.run()
	s.deletes("web")
	if s.server.get("default/web") != nil {
		t.Error("the Service is still there")
	}
	s.config.set(lan)
	s.restart()
	s.creates("other")
	s.has("other", "203.0.113.11", "True Allocated")
	s.pass(time.Minute) // and no longer than the configuration has it
	s.creates("another")
	s.has("another", "203.0.113.10", "True Allocated")
}
