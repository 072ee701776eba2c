package servicelb

import (
	"net/netip"
	"slices"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"github.com/lodestone-lb/lodestone/pkg/annotation"
)

// Kubernetes' own service controller takes its finalizer off as soon as Withdraw has returned, and this process may end
// then: what was ours is gone from the object, and the quarantine of the address is on record.
func TestWhatWasWithdrawnIsFreeAndOnRecord(t *testing.T) {
	t.Parallel()
	for what, leaves := range map[string]func(*story){
		"it has another type": func(s *story) {
			s.server.update("default/web", func(svc *corev1.Service) { svc.Spec.Type = corev1.ServiceTypeClusterIP })
		},
		"it is being deleted": func(s *story) { s.server.delete("default/web", s.clock) },
		"it is gone": func(s *story) {
			s.server.update("default/web", func(svc *corev1.Service) { svc.Finalizers = nil })
			s.server.delete("default/web", s.clock)
		},
	} {
		s := newStory(t)
		s.creates("web")
		s.has("web", "203.0.113.10", "True Allocated")
		svc := s.server.get("default/web")
		s.Upstream = true
		leaves(s)
		s.see("default/web")
		if err := s.Withdraw(t.Context(), svc); err != nil {
			t.Errorf("%s: %v", what, err)
		}
		if held := s.Holds(svc); len(held) > 0 {
			t.Errorf("%s: it holds %v", what, held)
		}
		if _, kept := s.shelf.records[netip.MustParseAddr("203.0.113.10")]; !kept {
			t.Errorf("%s: on record are %v", what, s.shelf.records)
		}
		now := s.server.get("default/web")
		if now == nil {
			continue
		}
		if _, assigned := now.Annotations[annotation.Assigned]; assigned || !slices.Equal(now.Finalizers, []string{annotation.Finalizer}) {
			t.Errorf("%s: it has annotations %q and finalizers %q", what, now.Annotations, now.Finalizers)
		}
	}
}
