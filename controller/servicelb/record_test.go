package servicelb

import (
	"errors"
	"testing"
	"time"

	"github.com/lodestone-lb/lodestone/pkg/annotation"
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
