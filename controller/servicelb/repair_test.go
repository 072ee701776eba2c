package servicelb

import (
	"fmt"
	"slices"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/lodestone-lb/lodestone/pkg/annotation"
)

// A user who mistypes a request again and again is no other load balancer: what
// somebody else then does to the object is undone at once.
func TestTypingErrorsAreNoContest(t *testing.T) {
	t.Parallel()
	s := newStory(t)
	s.creates("web")
	for i := range 3 * promptRepairs {
		s.changes("web", annotated(annotation.Addresses, fmt.Sprintf("203.0.113.1%dx", i)))
		s.has("web", "203.0.113.10", "False InvalidRequest")
		s.mentions("web", fmt.Sprintf("1%dx", i))
	}
	s.changes("web", func(svc *corev1.Service) { delete(svc.Annotations, annotation.Addresses) })
	s.has("web", "203.0.113.10", "True Allocated")
	s.events.take()
	s.changes("web", wiped)
	s.has("web", "203.0.113.10", "True Allocated")
	s.wantEvents()
}

// A Service that waits is not written to because of figures: what others hold, what
// is in quarantine.
func TestFiguresOfARefusalCauseNoWrite(t *testing.T) {
	t.Parallel()
	s := newStory(t)
	s.configure("quarantine: 1h\npools: [{name: small, addresses: [203.0.113.10-203.0.113.13]}]\n")
	for i := range 4 {
		s.creates(fmt.Sprint("has-", i))
	}
	for i := range 3 {
		s.creates(fmt.Sprint("waits-", i))
	}
	s.mentions("waits-2", "0 of 4 IPv4 addresses free")
	for i := range 3 {
		s.deletes(fmt.Sprint("has-", i))
		s.pass(time.Minute)
		s.silent("a namespace is created", func() { s.stale = true; s.run() })
	}
	s.mentions("waits-2", "0 of 4 IPv4 addresses free")
	s.events.take()
	s.changes("waits-2", func(svc *corev1.Service) { svc.Status.Conditions = nil })
	s.has("waits-2", "", "False PoolExhausted")
	s.wantEvents() // that was a repair
}

// A tenant who writes what Lodestone writes is treated as any other who does.
func TestEditsOfTheAnnotationAreRepairs(t *testing.T) {
	t.Parallel()
	s := newStory(t)
	s.creates("web")
	s.events.take()
	var writes []time.Duration // after the first edit
	began := s.clock
	edit := func(i int, then time.Duration) {
		before := s.server.patches
		s.server.update("default/web", annotated(annotation.Assigned, fmt.Sprintf("203.0.113.%d", 1+i%200)))
		s.pass(then)
		for range s.server.patches - before {
			writes = append(writes, s.clock.Sub(began))
		}
	}
	for i := range 200 {
		edit(i, 0)
	}
	if len(writes) != promptRepairs {
		t.Errorf("%d writes for 200 edits at once, not %d", len(writes), promptRepairs)
	}
	for i := range 3600 {
		edit(i, time.Second)
	}
	last := time.Duration(0)
	for i, at := range writes[promptRepairs:] {
		if pause := at - last; pause < min(lastDelay, firstDelay<<i) || pause > lastDelay+2*time.Second {
			t.Errorf("write %d comes %s after the one before", promptRepairs+i+1, pause)
		}
		last = at
	}
	if n := len(writes); n > promptRepairs+6+60 {
		t.Errorf("%d writes for an edit a second in an hour", n)
	}
	s.wantEvents("Warning StatusContested default/web")
	s.pass(lastDelay)
	s.changes("web", func(svc *corev1.Service) { svc.Labels = map[string]string{"a": "b"} }) // a look
	s.has("web", "203.0.113.10", "True Allocated")
}

// A Service without a class that another load balancer has taken over keeps the finalizer,
// which is that one's now.
func TestFinalizerOfAnotherLoadBalancerStays(t *testing.T) {
	t.Parallel()
	s := newStory(t)
	s.creates("web")
	s.scope.Classless = false
	s.restart()
	s.changes("web", func(svc *corev1.Service) { svc.Status.LoadBalancer.Ingress[0].IP = "192.0.2.7" })
	svc := s.server.get("default/web")
	if len(svc.Finalizers) != 1 || svc.Finalizers[0] != annotation.Finalizer {
		t.Errorf("finalizers %q", svc.Finalizers)
	}
	if _, ours := svc.Annotations[annotation.Assigned]; ours || svc.Status.LoadBalancer.Ingress[0].IP != "192.0.2.7" {
		t.Errorf("annotations %q, status %v", svc.Annotations, svc.Status)
	}
}

// The conventional finalizer of a Service that we serve is ours, also if the annotation is lost: nobody else takes it
// off, and the Service could never be deleted.
func TestAServiceThatHasLostItsMarkCanBeDeleted(t *testing.T) {
	t.Parallel()
	s := newStory(t)
	s.creates("web")
	s.server.update("default/web", func(svc *corev1.Service) { delete(svc.Annotations, annotation.Assigned) })
	s.server.delete("default/web", s.clock)
	s.restart()
	s.run()
	if svc := s.server.get("default/web"); svc != nil {
		t.Errorf("it has finalizers %q", svc.Finalizers)
	}
}

// A Service of a class that is refused has the conventional finalizer from somebody else, because
// Lodestone marks Services of a class by another one.
func TestConventionalFinalizerOfAClassStays(t *testing.T) {
	t.Parallel()
	s := newStory(t)
	s.creates("web", ofClass(annotation.DefaultClass), annotated(annotation.Addresses, "192.0.2.7"), func(svc *corev1.Service) {
		svc.Finalizers = []string{annotation.Finalizer, annotation.ClassFinalizer}
	})
	s.has("web", "", "False AddressOutsidePools")
	if got := s.server.get("default/web").Finalizers; !slices.Equal(got, []string{annotation.Finalizer}) {
		t.Errorf("finalizers %q", got)
	}
}
