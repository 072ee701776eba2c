package servicelb

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
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

// Whoever owns a Service can take away the annotation that marks its addresses, again and again. It does not have
// everybody who waits be looked at each time.
func TestWhatAServiceHoldsIsNotForeign(t *testing.T) {
	t.Parallel()
	s := newStory(t)
	s.configure("pools: [{name: lan, addresses: [203.0.113.10]}]\n")
	s.creates("web")
	s.creates("waits")
	s.has("waits", "", "False PoolExhausted")
	for range 2 {
		s.server.update("default/web", unmarked, annotated(annotation.Ignore, annotation.Ignored))
		s.see("default/web")
		names, _ := s.machine().Retry(s.clock)
		assert.Empty(t, names)
		s.run()
		s.see("default/web")
		names, _ = s.machine().Retry(s.clock)
		assert.Empty(t, names)
		s.changes("web", func(svc *corev1.Service) { delete(svc.Annotations, annotation.Ignore) })
		s.has("web", "203.0.113.10", "True Allocated")
	}
}

// prompt is an API whose changes are seen before it answers.
type prompt struct {
	API
	see func(name string)
}

func (p prompt) PatchStatus(ctx context.Context, namespace, name string, patch []byte) error {
	defer p.see(namespace + "/" + name)
	return p.API.PatchStatus(ctx, namespace, name, patch)
}

// Another load balancer may write its address beside the one that the Service has of Lodestone. Then both stay.
func TestWhatIsLeftInAStatusIsInUse(t *testing.T) {
	t.Parallel()
	s := newStory(t)
	s.configure("quarantine: 0s\npools: [{name: lan, addresses: [203.0.113.10]}]\n")
	s.creates("web")
	s.API = prompt{s.API, s.see}
	s.changes("web", annotated(annotation.Ignore, annotation.Ignored), func(svc *corev1.Service) {
		svc.Status.LoadBalancer.Ingress = append(svc.Status.LoadBalancer.Ingress, corev1.LoadBalancerIngress{IP: "198.51.100.1"})
	})
	assert.Equal(t, []string{"203.0.113.10", "198.51.100.1"}, s.inStatus("web"))
	s.creates("next")
	s.has("next", "", "False PoolExhausted")
	s.changes("web", func(svc *corev1.Service) { svc.Finalizers = nil }) // the other load balancer's
	s.deletes("web")
	s.has("next", "203.0.113.10", "True Allocated")
}

// The controller has moved a Service and has not seen yet that its object shows that, when it moves it back: the object that it
// knows is as it should be. What it has freed by that must not go to another Service while the present one shows it.
func TestAnAnswerOnAnOldObjectFreesNothing(t *testing.T) {
	t.Parallel()
	const pools = "quarantine: 0s\npools:\n  - {name: lan, addresses: [203.0.113.10-203.0.113.19]}\n"
	s := newStory(t)
	s.configure("compatibility: [kube-vip]\n" + pools)
	s.creates("web", annotated("kube-vip.io/loadbalancerIPs", "203.0.113.10"), annotated("metallb.io/loadBalancerIPs", "203.0.113.11"))
	s.has("web", "203.0.113.10", "True Allocated")
	s.config.set("compatibility: [metallb]\n" + pools)
	for s.stale = true; s.once(); {
	}
	s.has("web", "203.0.113.11", "True Allocated")
	s.config.set("compatibility: [kube-vip]\n" + pools)
	s.server.create("default/other", s.clock, annotated(annotation.Addresses, "203.0.113.11"))
	s.see("default/other")
	s.stale = true
	for range 20 {
		s.once()
		s.see("default/other")
	}
	s.unique()
	s.run()
	s.unique()
	s.has("web", "203.0.113.10", "True Allocated")
	s.has("other", "203.0.113.11", "True Allocated")
}
