package servicelb

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"

	"github.com/lodestone-lb/lodestone/pkg/annotation"
	"github.com/lodestone-lb/lodestone/pkg/kube"
)

// A Service that was served, and is left to others, keeps its addresses until others serve it.

func ignored(svc *corev1.Service) { annotated(annotation.Ignore, annotation.Ignored)(svc) }

// A kept Service whose terms clash with those of a neighbour loses the address, as any other does, now and not at the
// next start; its neighbour keeps it.
func TestAKeptServiceAbidesByTheRulesOfSharing(t *testing.T) {
	t.Parallel()
	for name, edit := range map[string]func(*corev1.Service){
		"port": ports(80), "key": unannotated(annotation.SharingKey), "another key": shared("else"),
	} {
		for _, oldest := range []string{"web", "mail"} {
			t.Run(name+", older "+oldest, func(t *testing.T) {
				t.Parallel()
				s := newStory(t)
				for _, name := range map[string][]string{"web": {"web", "mail"}, "mail": {"mail", "web"}}[oldest] {
					s.creates(name, shared("edge"), ports(map[string]int32{"web": 80, "mail": 25}[name]))
					s.pass(time.Second)
				}
				s.changes("mail", ignored)
				s.silent("it keeps the address", func() { s.restart(); s.run() })
				s.has("mail", "203.0.113.10", "True Allocated")
				s.silent("without the finalizer, too", func() {
					s.changes("mail", func(svc *corev1.Service) { svc.Finalizers = nil })
					s.restart()
					s.run()
				})
				assert.Equal(t, "203.0.113.10", kube.JoinAddrs(kube.VIPs(s.server.get("default/mail"))))
				s.has("web", "203.0.113.10", "True Allocated")

				s.changes("mail", edit)
				s.has("mail", "", "")
				s.has("web", "203.0.113.10", "True Allocated")
				s.silent("all is settled", func() { s.restart(); s.run() })
				s.deletes("web")
				s.pass(time.Hour)
				s.creates("stranger")
				s.has("stranger", "203.0.113.10", "True Allocated")
				s.has("mail", "", "")
			})
		}
	}
}

// What a kept Service was waiting for is for others.
func TestAKeptServiceWaitsForNothing(t *testing.T) {
	t.Parallel()
	s := newStory(t)
	s.creates("web")
	s.creates("holder")
	s.changes("web", annotated(annotation.Addresses, "203.0.113.11"))
	s.has("web", "203.0.113.10", "False AddressInUse")
	s.changes("web", ignored)
	s.deletes("holder")
	s.pass(time.Hour)
	s.creates("waits", annotated(annotation.Addresses, "203.0.113.11"))
	s.has("waits", "203.0.113.11", "True Allocated")
	s.has("web", "203.0.113.10", "True Allocated") // or nobody would announce it
	assert.True(t, s.scope.Announces(s.server.get("default/web")))
	assert.Empty(t, s.machine().Stats(s.clock).Refused)
	s.silent("all is settled", func() { s.restart(); s.run() })
	held := s.holds(string(s.server.get("default/web").UID))
	assert.Equal(t, "203.0.113.10", held[0].Addr.String())
	assert.Len(t, held, 1)
}

// Of several addresses it loses the one that clashes.
func TestAKeptServiceLosesTheAddressThatClashes(t *testing.T) {
	t.Parallel()
	s := newStory(t)
	s.configure("pools: [{name: lan, addresses: [203.0.113.0/24, \"2001:db8::/64\"]}]\n")
	dual := func(svc *corev1.Service) {
		svc.Spec.IPFamilies = []corev1.IPFamily{corev1.IPv4Protocol, corev1.IPv6Protocol}
	}
	s.creates("web", shared("edge"), ports(80))
	s.creates("mail", shared("edge"), ports(25), dual)
	s.has("mail", "203.0.113.1,2001:db8::", "True Allocated")
	s.changes("mail", ignored)
	s.changes("mail", ports(80))
	s.has("mail", "2001:db8::", "True Allocated")
	s.mentions("mail", "2001:db8::")
	s.silent("all is settled", func() { s.restart(); s.run() })
	s.has("web", "203.0.113.1", "True Allocated")
}

// While its object cannot be written, an address that it has lost is nobody else's.
func TestAKeptServiceThatCannotBeWritten(t *testing.T) {
	t.Parallel()
	s := newStory(t)
	s.creates("web", shared("edge"), ports(80))
	s.creates("mail", shared("edge"), ports(25))
	s.changes("mail", ignored)
	s.server.fault = func() fault { return lost }
	s.server.update("default/mail", ports(80))
	s.see("default/mail")
	for range 3 {
		require.Error(t, s.reconcile(t.Context(), "default/mail"))
	}
	s.server.fault = nil
	s.server.update("default/web", annotated(annotation.Addresses, "203.0.113.12"))
	s.see("default/web")
	require.NoError(t, s.reconcile(t.Context(), "default/web"))
	s.clock = s.clock.Add(time.Hour)
	s.server.create("default/stranger", s.clock, annotated(annotation.Addresses, "203.0.113.10"))
	s.see("default/stranger")
	require.NoError(t, s.reconcile(t.Context(), "default/stranger"))
	s.has("stranger", "", "False AddressInUse")
	s.run()
	s.has("mail", "", "")
	s.pass(time.Hour)
	s.has("stranger", "203.0.113.10", "True Allocated")
}

// A Service that is left to others while it is about to leave its address keeps that.
func TestAKeptServiceThatWasAboutToMove(t *testing.T) {
	t.Parallel()
	s := newStory(t)
	s.creates("web")
	s.server.fault = func() fault { return lost }
	s.server.update("default/web", annotated(annotation.Addresses, "203.0.113.11"))
	s.see("default/web")
	require.Error(t, s.reconcile(t.Context(), "default/web"))
	s.server.fault = nil
	s.changes("web", ignored)
	s.has("web", "203.0.113.10", "True Allocated")
	s.restart()
	s.run()
	s.has("web", "203.0.113.10", "True Allocated")
}

// A Service whose object takes no write moves again and again, and is left to others. It keeps the address that its object shows, and
// shares it on, by the terms that it has now.
func TestAKeptServiceThatWasAboutToMoveShares(t *testing.T) {
	t.Parallel()
	for name, clashes := range map[string]bool{"it stays as it is": false, "it takes the port of its neighbour": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newStory(t)
			s.creates("mail", shared("edge"), ports(25))
			s.creates("web", shared("edge"), ports(80))
			s.has("web", "203.0.113.10", "True Allocated")
			s.server.fault = func() fault { return lost }
			for _, wish := range []string{"203.0.113.11", "203.0.113.12"} {
				s.server.update("default/mail", annotated(annotation.Addresses, wish))
				s.see("default/mail")
				require.Error(t, s.reconcile(t.Context(), "default/mail"))
			}
			s.server.fault = nil
			s.changes("mail", ignored)
			s.has("mail", "203.0.113.10", "True Allocated")
			assert.Len(t, s.holds(string(s.server.get("default/mail").UID)), 1)
			if clashes {
				s.changes("mail", ports(80))
			}
			s.deletes("web")
			s.pass(time.Hour)
			s.creates("other", annotated(annotation.Addresses, "203.0.113.11"))
			s.has("other", "203.0.113.11", "True Allocated") // nothing else of it stays taken
			s.creates("stranger", annotated(annotation.Addresses, "203.0.113.10"))
			if clashes {
				s.has("mail", "", "")
				s.has("stranger", "203.0.113.10", "True Allocated")
				return
			}
			s.has("stranger", "", "False AddressInUse")
			s.has("mail", "203.0.113.10", "True Allocated")
		})
	}
}

// A kept Service gets nothing more at a start, whatever its owner writes into the annotation.
func TestAKeptServiceClaimsNothing(t *testing.T) {
	t.Parallel()
	s := newStory(t)
	s.creates("web")
	s.changes("web", ignored, annotated(annotation.AddressCount, "2"), assignedTo("203.0.113.10,203.0.113.12"))
	s.restart()
	s.run()
	assert.Len(t, s.holds(string(s.server.get("default/web").UID)), 1)
}
