package provider_test

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	cloudprovider "k8s.io/cloud-provider"
	"k8s.io/cloud-provider/api"

	"github.com/lodestone-lb/lodestone/ipam"
	"github.com/lodestone-lb/lodestone/pkg/annotation"
	"github.com/lodestone-lb/lodestone/pkg/kube"
)

const (
	allocated = " Allocated service.kubernetes.io/load-balancer-cleanup"
	exhausted = "PoolExhausted service.kubernetes.io/load-balancer-cleanup"
)

func annotated(key, value string) func(*corev1.Service) {
	return func(svc *corev1.Service) { svc.Annotations = map[string]string{key: value} }
}

// annotatedToo keeps the annotations that the Service has.
func annotatedToo(key, value string) func(*corev1.Service) {
	return func(svc *corev1.Service) { metav1.SetMetaDataAnnotation(&svc.ObjectMeta, key, value) }
}

func ofType(t corev1.ServiceType) func(*corev1.Service) {
	return func(svc *corev1.Service) { svc.Spec.Type, svc.Spec.LoadBalancerClass = t, nil }
}

func ofClass(class string) func(*corev1.Service) {
	return func(svc *corev1.Service) {
		svc.Spec.Type, svc.Spec.LoadBalancerClass = corev1.ServiceTypeLoadBalancer, &class
	}
}

func TestUpstreamGivesAnAddressThatIsAnnounced(t *testing.T) {
	t.Parallel()
	s := newStory(t, lan)
	s.start()
	s.creates("web")
	s.has("web", "203.0.113.10"+allocated)
	s.restart()
	s.creates("next")
	s.has("next", "203.0.113.11"+allocated)
	s.has("web", "203.0.113.10"+allocated)
	s.held(2)
}

// Kubernetes' own service controller does not know the annotation that leaves a Service to others.
func TestUpstreamLeavesAnIgnoredServiceAlone(t *testing.T) {
	t.Parallel()
	s := newStory(t, lan)
	s.start()
	s.creates("theirs", annotated(annotation.Ignore, annotation.Ignored))
	s.has("theirs", "service.kubernetes.io/load-balancer-cleanup")
	s.creates("web")
	s.has("web", "203.0.113.10"+allocated)
	s.changes("web", annotatedToo(annotation.Ignore, annotation.Ignored))
	s.creates("next")
	s.has("next", "203.0.113.11"+allocated)
	s.has("theirs", "service.kubernetes.io/load-balancer-cleanup")
	s.has("web", "203.0.113.10"+allocated)
	s.deletes("web")
	s.has("web", "gone")
	s.deletes("theirs")
	s.has("theirs", "gone")
	s.held(1)
}

// A Service that is left to others keeps to the rules of sharing, although Kubernetes' own service controller does nothing about it.
func TestUpstreamDoesNotHideAnIgnoredService(t *testing.T) {
	t.Parallel()
	s := newStory(t, lan)
	s.start()
	port := func(number int32) func(*corev1.Service) {
		return func(svc *corev1.Service) {
			svc.Spec.Ports = []corev1.ServicePort{{Protocol: corev1.ProtocolTCP, Port: number}}
		}
	}
	s.creates("web", annotated(annotation.SharingKey, "edge"), port(80))
	s.has("web", "203.0.113.10"+allocated)
	s.creates("mail", annotated(annotation.SharingKey, "edge"), port(25))
	s.has("mail", "203.0.113.10"+allocated)
	s.changes("mail", annotatedToo(annotation.Ignore, annotation.Ignored))
	s.has("mail", "203.0.113.10"+allocated)
	s.changes("mail", port(80))
	s.has("mail", "service.kubernetes.io/load-balancer-cleanup")
	s.has("web", "203.0.113.10"+allocated)
}

// An address that a Service moved away from is free.
func TestUpstreamMovesAServiceAndFreesWhatItLeaves(t *testing.T) {
	t.Parallel()
	s := newStory(t, lan)
	s.start()
	s.creates("web")
	s.has("web", "203.0.113.10"+allocated)
	s.changes("web", annotated(annotation.Addresses, "203.0.113.11"))
	s.has("web", "203.0.113.11"+allocated)
	s.held(1)
	s.creates("next")
	s.has("next", "203.0.113.10"+allocated)

	s.changes("web", annotated(annotation.Addresses, "203.0.113.10"))
	s.has("web", "203.0.113.11 AddressInUse service.kubernetes.io/load-balancer-cleanup")
	s.deletes("next")
	s.has("next", "gone")
	s.has("web", "203.0.113.10"+allocated)
	s.deletes("web")
	s.has("web", "gone")
	s.held(0)
}

func TestUpstreamRenumbersOnce(t *testing.T) {
	t.Parallel()
	s := newStory(t, strings.Replace(lan, ".11]", ".15]", 1))
	s.start()
	s.creates("web")
	s.has("web", "203.0.113.10"+allocated)
	s.config.set(parse(t, strings.Replace(lan, ".10-203.0.113.11]", ".11-203.0.113.15]", 1)))
	s.has("web", "203.0.113.10 Stranded service.kubernetes.io/load-balancer-cleanup")
	s.changes("web", annotated(annotation.Renumber, annotation.Renumbering))
	s.has("web", "203.0.113.11"+allocated)
	s.held(1)
	if _, still := s.get("web").Annotations[annotation.Renumber]; still {
		t.Error("the annotation that asks for another address stays")
	}
}

// An edit, and a restart after it, leave the Service where it is.
func TestUpstreamKeepsTheAddressOverEditAndRestart(t *testing.T) {
	t.Parallel()
	s := newStory(t, lan)
	s.start()
	s.creates("first")
	s.has("first", "203.0.113.10"+allocated)
	s.creates("web")
	s.has("web", "203.0.113.11"+allocated)
	s.deletes("first")
	s.has("first", "gone")
	s.config.set(parse(t, "clusterID: fra1\nquarantine: 0s\npools: [{name: lan, addresses: [203.0.113.10]}]\n"))
	s.has("web", "203.0.113.11 Stranded service.kubernetes.io/load-balancer-cleanup")
	s.restart()
	s.creates("later") // it has its turn after what was there
	s.has("later", "203.0.113.10"+allocated)
	s.has("web", "203.0.113.11 Stranded service.kubernetes.io/load-balancer-cleanup")
	s.changes("web", func(svc *corev1.Service) { svc.Spec.SessionAffinity = corev1.ServiceAffinityClientIP })
	s.deletes("later")
	s.has("later", "gone")
	s.has("web", "203.0.113.11 Stranded service.kubernetes.io/load-balancer-cleanup")
	s.held(0) // of the pool
}

func TestUpstreamRefusesAndRecoversAsSoonAsAnAddressIsFree(t *testing.T) {
	t.Parallel()
	s := newStory(t, lan)
	s.start()
	for name, want := range map[string]string{"one": "203.0.113.10", "two": "203.0.113.11"} {
		s.creates(name, annotated(annotation.Addresses, want))
		s.has(name, want+allocated)
	}
	s.creates("three")
	s.has("three", exhausted)
	s.deletes("one")
	s.has("three", "203.0.113.10"+allocated)
	s.creates("four")
	s.has("four", exhausted)
	s.config.set(parse(t, strings.Replace(lan, ".11]", ".12]", 1)))
	s.has("four", "203.0.113.12"+allocated)
	s.held(3)
}

func TestUpstreamTypeAndClassChanges(t *testing.T) {
	t.Parallel()
	s := newStory(t, lan)
	s.start()
	s.creates("web")
	s.has("web", "203.0.113.10"+allocated)
	s.changes("web", ofType(corev1.ServiceTypeClusterIP))
	s.has("web", "")
	s.held(0)
	s.changes("web", ofClass("lodestone.io/lb"))
	s.has("web", "203.0.113.10 Allocated "+annotation.ClassFinalizer)
	s.changes("web", ofType(corev1.ServiceTypeNodePort))
	s.has("web", "")
	s.changes("web", ofClass("example.com/other"))
	s.held(0)
	s.has("web", "")
	s.changes("web", ofType(corev1.ServiceTypeClusterIP))
	s.changes("web", ofType(corev1.ServiceTypeLoadBalancer))
	s.has("web", "203.0.113.10"+allocated)
	s.held(1)
}

func TestUpstreamDeletionAndRecreation(t *testing.T) {
	t.Parallel()
	s := newStory(t, lan)
	s.start()
	for range 3 {
		s.creates("web")
		s.has("web", "203.0.113.10"+allocated)
		s.deletes("web")
		s.has("web", "gone")
		s.held(0)
	}
	s.creates("web")
	s.has("web", "203.0.113.10"+allocated)
	s.vanishes("web")
	s.held(0)
	time.Sleep(200 * time.Millisecond) // Kubernetes' service controller writes by name, and may be about to
	s.creates("web", annotated(annotation.Addresses, "203.0.113.11"))
	s.has("web", "203.0.113.11"+allocated)
	s.held(1)
}

// Kubernetes' service controller may ask for a Service that is gone by now, and never asks again: nothing stays held.
func TestUpstreamAsksForAServiceThatIsGone(t *testing.T) {
	t.Parallel()
	s := newStory(t, lan)
	s.start()
	lb, _ := s.cloud.LoadBalancer()
	web := service("web")
	web.UID = "gone"
	if status, err := lb.EnsureLoadBalancer(t.Context(), "", web, nil); err != nil || len(status.Ingress) != 1 {
		t.Fatal(status, err)
	}
	s.held(0)
}

// A new controller catches up with the changes while none ran.
func TestUpstreamCatchesUpAfterARestart(t *testing.T) {
	t.Parallel()
	s := newStory(t, lan)
	s.start()
	s.creates("gone")
	s.has("gone", "203.0.113.10"+allocated)
	s.creates("internal")
	s.has("internal", "203.0.113.11"+allocated)
	s.creates("waits")
	s.has("waits", exhausted)
	s.stop()
	s.deletes("gone")
	s.changes("internal", ofType(corev1.ServiceTypeClusterIP))
	s.creates("new")
	s.start()
	s.has("gone", "gone")
	s.has("internal", "")
	s.held(2)
	s.deletes("new")
	s.has("new", "gone")
	eventually(s.T, "allocated", func() string { // either address
		if got := s.announced("waits"); got != "203.0.113.10"+allocated && got != "203.0.113.11"+allocated {
			return got
		}
		return "allocated"
	})
	s.held(1)
}

// Changes of our annotations and status by others are undone, as for any other Service.
func TestUpstreamServicesAreRepaired(t *testing.T) {
	t.Parallel()
	s := newStory(t, lan)
	s.start()
	s.creates("web")
	s.has("web", "203.0.113.10"+allocated)
	s.changes("web", func(svc *corev1.Service) {
		svc.Status.LoadBalancer.Ingress = []corev1.LoadBalancerIngress{{IP: "198.51.100.1"}}
		svc.Finalizers = nil
	})
	s.has("web", "203.0.113.10"+allocated)
}

// The interface leaves alone what the scope excludes.
func TestServicesOutOfScopeAreImplementedElsewhere(t *testing.T) {
	t.Parallel()
	for name, classless := range map[string]bool{"classed": true, "web": false} {
		s := newStory(t, lan)
		s.scope.Classless = classless
		s.start()
		lb, _ := s.cloud.LoadBalancer()
		svc := service(name)
		if classless {
			ofClass("lodestone.io/lb")(svc)
		}
		if _, err := lb.EnsureLoadBalancer(t.Context(), "", svc, nil); !errors.Is(err, cloudprovider.ImplementedElsewhere) {
			t.Errorf("ensure %s: %v", svc.Name, err)
		}
		if err := lb.UpdateLoadBalancer(t.Context(), "", svc, nil); !errors.Is(err, cloudprovider.ImplementedElsewhere) {
			t.Errorf("update %s: %v", svc.Name, err)
		}
		if _, exists, err := lb.GetLoadBalancer(t.Context(), "", svc); exists || err != nil {
			t.Errorf("get %s: %v, %v", svc.Name, exists, err)
		}
		if err := lb.EnsureLoadBalancerDeleted(t.Context(), "", svc); err != nil {
			t.Errorf("delete %s: %v", svc.Name, err)
		}
		s.held(0)
	}
}

func TestLoadBalancer(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	s := newStory(t, lan)
	s.config.set(given{}) // not read yet
	s.start()
	lb, ok := s.cloud.LoadBalancer()
	if !ok {
		t.Fatal("no load balancer")
	}
	s.creates("one", annotated(annotation.Addresses, "203.0.113.10"))
	s.creates("two", annotated(annotation.Addresses, "203.0.113.11"))
	one := s.get("one")
	var retry *api.RetryError
	early, cancel := context.WithTimeout(ctx, 20*time.Millisecond)
	defer cancel()
	if _, err := lb.EnsureLoadBalancer(early, "", one, nil); !errors.As(err, &retry) {
		t.Fatalf("before the configuration is read: %v", err)
	}
	if _, _, err := lb.GetLoadBalancer(early, "", one); !errors.As(err, &retry) {
		t.Fatalf("before the configuration is read: %v", err)
	}
	if err := lb.EnsureLoadBalancerDeleted(early, "", one); !errors.As(err, &retry) {
		t.Fatalf("before the configuration is read: %v", err)
	}
	s.config.set(parse(t, lan))
	s.has("one", "203.0.113.10"+allocated)
	s.has("two", "203.0.113.11"+allocated)
	s.creates("three")
	s.has("three", exhausted)
	one, three := s.get("one"), s.get("three")
	for range 2 {
		status, err := lb.EnsureLoadBalancer(ctx, "", one, nil)
		if err != nil || len(status.Ingress) != 1 || status.Ingress[0].IP != "203.0.113.10" ||
			*status.Ingress[0].IPMode != corev1.LoadBalancerIPModeVIP {
			t.Errorf("one: %v, %v", status, err)
		}
	}
	if got, exists, err := lb.GetLoadBalancer(ctx, "", one); !exists || err != nil || got.Ingress[0].IP != "203.0.113.10" {
		t.Errorf("get one: %v, %v, %v", got, exists, err)
	}
	var refusal *ipam.Refusal
	if _, err := lb.EnsureLoadBalancer(ctx, "", three, nil); !errors.As(err, &refusal) || refusal.Reason != ipam.PoolExhausted {
		t.Errorf("three: %v", err)
	}
	if _, exists, err := lb.GetLoadBalancer(ctx, "", three); exists || err != nil {
		t.Errorf("get three: %v, %v", exists, err)
	}
	if err := lb.UpdateLoadBalancer(ctx, "", one, nil); err != nil {
		t.Error(err)
	}
	s.deletes("one")
	for range 2 {
		if err := lb.EnsureLoadBalancerDeleted(ctx, "", one); err != nil {
			t.Error(err)
		}
	}
	s.has("three", "203.0.113.10"+allocated)
	if _, exists, _ := lb.GetLoadBalancer(ctx, "", one); exists {
		t.Error("one exists although it was deleted")
	}
	if name := lb.GetLoadBalancerName(ctx, "kubernetes", one); name != "fra1-default-one" {
		t.Errorf("name %q", name)
	}
}

// As long as the configuration cannot be read, no Service loses what it has.
func TestUpstreamWithoutAValidConfigurationChangesNothing(t *testing.T) {
	t.Parallel()
	s := newStory(t, lan)
	s.start()
	s.creates("web")
	s.has("web", "203.0.113.10"+allocated)
	s.stop()
	s.config.set(given{state: kube.State{Read: true, Err: errors.New("nonsense")}})
	s.start()
	s.creates("new")
	s.has("new", "ConfigUnavailable service.kubernetes.io/load-balancer-cleanup")
	s.has("web", "203.0.113.10"+allocated)
	s.config.set(parse(t, lan))
	s.has("new", "203.0.113.11"+allocated)
	s.has("web", "203.0.113.10"+allocated)
}
