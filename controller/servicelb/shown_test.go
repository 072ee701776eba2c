package servicelb

import (
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/lodestone-lb/lodestone/pkg/annotation"
	"github.com/lodestone-lb/lodestone/pkg/kube"
)

func unmarked(svc *corev1.Service) { delete(svc.Annotations, annotation.Assigned) }

func kept(svc *corev1.Service) { svc.Finalizers = append(svc.Finalizers, "example.com/theirs") }

// Whoever owns a Service can take away the annotation that marks its addresses, and can keep the object. It must not
// show an address that another Service has: kube-proxy would send the traffic to both.
func TestNoServiceShowsWhatItHasGivenBack(t *testing.T) {
	t.Parallel()
	for what, leave := range map[string]func(s *story){
		"deleted": func(s *story) { s.server.update("default/web", unmarked); s.deletes("web") },
		"deleted, and not all unmarked": func(s *story) {
			s.server.update("default/web", annotated(annotation.Assigned, "203.0.113.10"))
			s.deletes("web")
		},
		"left to others": func(s *story) { s.changes("web", unmarked, annotated(annotation.Ignore, annotation.Ignored)) },
		"left to others, and not all unmarked": func(s *story) {
			s.changes("web", annotated(annotation.Assigned, "203.0.113.10"), annotated(annotation.Ignore, annotation.Ignored))
		},
	} {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			s := newStory(t)
			s.creates("web", kept, annotated(annotation.AddressCount, "2"))
			s.has("web", "203.0.113.10,203.0.113.11", "True Allocated")
			leave(s)
			if shown := kube.StatusAddresses(s.server.get("default/web")); len(shown) > 0 {
				t.Errorf("the Service has nothing any more, and shows %v", shown)
			}
			s.restart()
			s.pass(time.Minute)
			s.creates("next")
			s.has("next", "203.0.113.10", "True Allocated")
		})
	}
}

// A controller that starts knows no better than the objects. What a Service shows that is about to be deleted is not
// given to another one before it has gone.
func TestWhatATerminatingServiceShowsIsInUse(t *testing.T) {
	t.Parallel()
	s := newStory(t)
	s.creates("web", kept)
	s.server.update("default/web", unmarked)
	s.server.delete("default/web", s.clock)
	s.restart()
	s.pass(time.Minute)
	s.creates("next")
	s.has("next", "203.0.113.11", "True Allocated")
	s.changes("web", func(svc *corev1.Service) { svc.Finalizers = nil })
	s.creates("last")
	s.has("last", "203.0.113.10", "True Allocated")
}
