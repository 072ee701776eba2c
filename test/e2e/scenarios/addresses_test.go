package scenarios

import (
	"errors"
	"fmt"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"

	"github.com/lodestone-lb/lodestone/test/e2e/lodestone"
)

func TestFreedAddressGoesToTheWaitingService(t *testing.T) {
	s := begin(t)
	s.config(onePool("single", "198.18.0.210"))
	s.service("first")
	s.holds("first", "198.18.0.210")

	s.service("second")
	require.Contains(t, s.refused("second", "PoolExhausted"), `"single"`)
	s.event(s.namespace, "Service", "second", "PoolExhausted")

	s.delete("first")
	s.holds("second", "198.18.0.210")

	s.service("third")
	s.refused("third", "PoolExhausted")
	s.change("second", ofType(corev1.ServiceTypeClusterIP), func(svc *corev1.Service) { svc.Spec.AllocateLoadBalancerNodePorts = nil })
	s.holds("third", "198.18.0.210")
}

func TestAddressesSurviveTwentyControllerRestarts(t *testing.T) {
	s := begin(t)
	s.stopController() // one beside the cluster starts sooner than a pod
	stop := s.slowAPIServer()
	want := map[string]string{}
	for i := range 20 {
		name := fmt.Sprintf("web-%d", i)
		s.service(name)
		end := s.runController()
		want[name] = s.assigned(name)
		end()
	}
	stop()
	for name, address := range want {
		assert.Equal(t, []string{address}, addresses(s.get(name)), "address of Service %s", name)
	}
	s.noAddressTwice()
}

func TestServicesDrawFromThePoolOfTheLowestPriorityFirst(t *testing.T) {
	s := begin(t)
	s.config(`
quarantine: 0s
pools:
  - {name: later, addresses: [198.18.0.220-198.18.0.221], priority: 10}
  - {name: first, addresses: [198.18.0.230], priority: -1}
  - {name: manual, addresses: [198.18.0.240], priority: -5, autoAssign: false}
`)
	for i, address := range []string{"198.18.0.230", "198.18.0.220", "198.18.0.221"} {
		name := fmt.Sprintf("web-%d", i)
		s.service(name)
		s.holds(name, address)
	}
	s.service("none-left")
	s.refused("none-left", "PoolExhausted")
	s.service("by-name", annotated(poolAnnotation, "manual"))
	s.holds("by-name", "198.18.0.240")
	s.eventually("kubectl shows how full the pools are", func() error {
		table, err := s.Lab.Kubectl(s.ctx, "-n", lodestone.Namespace, "get", "configmap", "lodestone-status", "-o", "jsonpath={.data.pools}")
		if err == nil && !regexp.MustCompile(`(?m)^later +IPv4 +100% +2 +2 `).MatchString(table) {
			err = fmt.Errorf("it shows\n%s", table)
		}
		return err
	})
}

func TestRequestedAddressIsGivenOrRefusedWithTheFacts(t *testing.T) {
	s := begin(t)
	s.service("by-annotation", annotated(addrAnnotation, "198.18.0.233"))
	s.holds("by-annotation", "198.18.0.233")
	s.service("by-spec", func(svc *corev1.Service) { svc.Spec.LoadBalancerIP = "198.18.0.234" })
	s.holds("by-spec", "198.18.0.234")

	s.service("taken", annotated(addrAnnotation, "198.18.0.233"))
	require.Contains(t, s.refused("taken", "AddressInUse"), s.namespace+"/by-annotation")
	s.service("outside", annotated(addrAnnotation, "203.0.113.9"))
	require.Contains(t, s.refused("outside", "AddressOutsidePools"), "203.0.113.9")
	s.service("family", annotated(addrAnnotation, "2001:db8::1"))
	s.refused("family", "WrongFamily")
	s.service("torn", annotated(addrAnnotation, "198.18.0.235"), func(svc *corev1.Service) { svc.Spec.LoadBalancerIP = "198.18.0.236" })
	s.refused("torn", "InvalidRequest")
	s.service("no-pool", annotated(poolAnnotation, "nowhere"))
	require.Contains(t, s.refused("no-pool", "PoolNotFound"), "nowhere")

	s.delete("by-annotation")
	s.holds("taken", "198.18.0.233")

	s.service("several", annotated("lodestone.io/address-count", "2"))
	s.allAddresses("several", 2)
}

func TestClassesAreServedOrLeftAlone(t *testing.T) {
	s := begin(t)
	foreign := s.service("foreign", class("example.com/other"))
	left := s.service("left", annotated("lodestone.io/ignore", "true"))
	s.service("ours", class(ourClass))
	s.assigned("ours")
	require.Contains(t, s.get("ours").Finalizers, "lodestone.io/load-balancer-cleanup")
	s.service("classless")
	s.assigned("classless")
	require.Contains(t, s.get("classless").Finalizers, "service.kubernetes.io/load-balancer-cleanup")
	s.untouched(foreign)
	s.untouched(left)

	s.stopController()
	s.runController("--handle-classless=false")
	ignored := s.service("ignored")
	s.service("ours-too", class(ourClass))
	s.assigned("ours-too")
	s.untouched(ignored)
	require.NotEmpty(t, addresses(s.get("classless")), "a Service keeps its address when its class is no longer served")
}

func TestExcludedFirstAndLastAddressesAreNeverGiven(t *testing.T) {
	s := begin(t)
	s.config(`
quarantine: 0s
pools:
  - name: tiny
    addresses: [198.18.0.208/29]
    exclude: [198.18.0.210-198.18.0.213]
`)
	for i, address := range []string{"198.18.0.209", "198.18.0.214"} {
		name := fmt.Sprintf("web-%d", i)
		s.service(name)
		s.holds(name, address)
	}
	s.service("more")
	s.refused("more", "PoolExhausted")
	for name, address := range map[string]string{"network": "198.18.0.208", "broadcast": "198.18.0.215", "excluded": "198.18.0.211"} {
		s.service(name, annotated(addrAnnotation, address))
		require.Contains(t, s.refused(name, "AddressWithheld"), address)
	}
}

func TestServiceRecreatedWithinASecondIsANewService(t *testing.T) {
	s := begin(t)
	s.config(onePool("single", "198.18.0.210"))
	for range 5 {
		s.service("web")
		s.holds("web", "198.18.0.210")
		s.delete("web")
		s.deleted("web")
	}
}

func TestServiceDeletedWhileTheControllerIsDownFreesItsAddress(t *testing.T) {
	s := begin(t)
	s.config(onePool("single", "198.18.0.210"))
	s.service("web")
	s.holds("web", "198.18.0.210")
	s.stopController()
	s.delete("web")
	s.service("next")
	s.always(time.Second, "the finalizer holds the Service", func() error {
		s.get("web")
		return nil
	})
	s.startController()
	s.deleted("web")
	s.holds("next", "198.18.0.210")
}

func TestServiceTurnsClusterIPAndBack(t *testing.T) {
	s := begin(t)
	s.config(onePool("single", "198.18.0.210"))
	s.service("web")
	s.holds("web", "198.18.0.210")

	s.change("web", ofType(corev1.ServiceTypeClusterIP), func(svc *corev1.Service) { svc.Spec.AllocateLoadBalancerNodePorts = nil })
	s.eventually("every trace of us is gone", func() error {
		svc := s.get("web")
		if len(svc.Finalizers)+len(svc.Status.LoadBalancer.Ingress)+len(svc.Annotations)+len(svc.Status.Conditions) > 0 {
			return fmt.Errorf("finalizers %q, annotations %v, status %+v", svc.Finalizers, svc.Annotations, svc.Status)
		}
		return nil
	})
	s.service("other")
	s.holds("other", "198.18.0.210")
	s.delete("other")
	s.deleted("other")

	s.change("web", ofType(corev1.ServiceTypeLoadBalancer))
	s.holds("web", "198.18.0.210")
}

func TestStatusWipedByHandIsRepaired(t *testing.T) {
	s := begin(t)
	s.service("web")
	address := s.assigned("web")
	s.wipeStatus("web")
	s.holds("web", address)
	s.change("web", func(svc *corev1.Service) { svc.Finalizers, svc.Annotations = nil, nil })
	s.eventually("finalizer and annotation are back", func() error {
		if svc := s.get("web"); len(svc.Finalizers) == 0 || len(svc.Annotations) == 0 {
			return fmt.Errorf("finalizers %q, annotations %v", svc.Finalizers, svc.Annotations)
		}
		return nil
	})
	s.holds("web", address)
}

func TestHostileAnnotationsHurtOnlyTheirOwnService(t *testing.T) {
	s := begin(t)
	poison := map[string]string{
		"half":     "198.18.0.",
		"unicode":  "١٩٨.18.0.210\u202e",
		"hostname": "lb.example.com",
		"binary":   "\x00\x01\x02",
		"list":     strings.Repeat("198.18.0.210,", 1000),
		"huge":     strings.Repeat("9", 250<<10), // 256 KiB is all that the API server takes
	}
	for name, value := range poison {
		s.service(name, annotated(addrAnnotation, value))
		s.service(name+"-pool", annotated(poolAnnotation, value))
	}
	s.service("innocent")
	s.assigned("innocent")
	for name := range poison {
		assert.Less(t, len(s.refused(name, "InvalidRequest")), 400, "the message stays readable")
		c := conditionText(s.get(name + "-pool"))
		s.eventually("the hostile pool name is refused", func() error {
			if c = conditionText(s.get(name + "-pool")); !strings.HasPrefix(c, "False") {
				return fmt.Errorf("condition: %s", c)
			}
			return nil
		})
		assert.Less(t, len(c), 500)
	}
	s.restartController()
	s.service("after-restart")
	s.assigned("after-restart")
}

// A controller that is killed between allocation and status write leaks no address and
// gives none twice. It writes a few addresses; its further writes are held on the way to
// the API server until it is dead.
func TestControllerKilledWhileAssigning(t *testing.T) {
	s := begin(t)
	s.stopController()
	seen := s.watchAddresses()
	const services, written = 40, 7
	for round := range 2 {
		name := func(i int) string { return fmt.Sprintf("web-%d-%d", round, i) }
		for i := range services {
			s.service(name(i))
		}
		api, err := s.NewGatedAPI("PATCH services/status", written)
		require.NoError(t, err)
		end, err := s.RunController(s.ctx, "--kubeconfig="+api.Kubeconfig)
		require.NoError(t, err)
		held := false
		select {
		case <-api.Held():
			held = true
		case <-time.After(lodestone.Timeout):
		}
		require.NoError(t, errors.Join(end(unix.SIGKILL), api.Close(), s.ForgetLeader(s.ctx)))
		require.True(t, held, "it was killed between an allocation and its write")
		have := s.count(func(svc *corev1.Service) bool { return len(addresses(svc)) > 0 })
		require.True(t, 0 < have && have <= written, "%d of %d have an address when it is dead", have, services)
		stop := s.runController()
		s.allAssigned()
		s.noAddressTwice()
		for i := range services {
			s.delete(name(i))
		}
		for i := range services {
			s.deleted(name(i))
		}
		stop()
	}
	s.saw(seen)
}
