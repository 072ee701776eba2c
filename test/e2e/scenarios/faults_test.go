package scenarios

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
)

// witness watches every state of the cluster's Services, one after the other, and
// records those that must not be.
type witness struct {
	stop func()
	// bad is written until stop has returned.
	bad []string
}

// watchAddresses starts a witness. Its stop is called when the story ends, at the
// latest.
func (s *story) watchAddresses() *witness {
	s.Helper()
	ctx, cancel := context.WithCancel(s.ctx)
	list, err := s.Kube.CoreV1().Services("").List(ctx, metav1.ListOptions{})
	require.NoError(s, err)
	// A watch, because an informer may show the changes of two objects in
	// another order.
	w, err := s.Kube.CoreV1().Services("").Watch(ctx, metav1.ListOptions{ResourceVersion: list.ResourceVersion})
	require.NoError(s, err)
	seen := &witness{}
	var watching sync.WaitGroup
	watching.Go(func() { seen.follow(ctx, list.Items, w.ResultChan()) })
	seen.stop = sync.OnceFunc(func() { cancel(); w.Stop(); watching.Wait() })
	s.Cleanup(seen.stop)
	return seen
}

func (w *witness) follow(ctx context.Context, services []corev1.Service, events <-chan watch.Event) {
	shown := map[types.UID][]string{}
	for _, svc := range services {
		shown[svc.UID] = addresses(&svc)
	}
	for event := range events {
		svc, ok := event.Object.(*corev1.Service)
		switch {
		case ctx.Err() != nil:
			return
		case !ok:
			w.bad = append(w.bad, fmt.Sprintf("the watch ended: %v", event.Object))
			return
		}
		delete(shown, svc.UID)
		if event.Type == watch.Deleted {
			continue
		}
		for _, a := range addresses(svc) {
			for uid, others := range shown {
				if slices.Contains(others, a) {
					w.bad = append(w.bad, fmt.Sprintf("%s: %s/%s (%s) and %s", a, svc.Namespace, svc.Name, svc.UID, uid))
				}
			}
		}
		shown[svc.UID] = addresses(svc)
	}
}

// saw ends the watch and checks that no address belonged to two at any time.
func (s *story) saw(w *witness) {
	s.Helper()
	w.stop()
	require.Empty(s, w.bad, "addresses that two Services had at one time")
}

// allAssigned waits until every Service of the story has an address.
func (s *story) allAssigned() {
	s.Helper()
	s.eventually("every Service has an address", func() error {
		if n := s.count(func(svc *corev1.Service) bool { return len(addresses(svc)) == 0 }); n > 0 {
			return fmt.Errorf("%d have none", n)
		}
		return nil
	})
}

// A leader is suspended while another one takes over, and then continues as if it
// still led.
func TestLeaderThatSleepsThroughItsLeaseGivesNoAddressTwice(t *testing.T) {
	s := begin(t)
	s.config("\nquarantine: 1s\npools:\n  - {name: narrow, addresses: [198.18.0.200-198.18.0.219]}\n")
	seen := s.watchAddresses()
	for i := range 10 {
		s.service(fmt.Sprintf("before-%d", i))
	}
	s.allAssigned()
	leader, err := s.Leader(s.ctx)
	require.NoError(t, err)
	for i := range 5 { // it falls asleep with work before it
		s.delete(fmt.Sprintf("before-%d", i))
		s.service(fmt.Sprintf("between-%d", i))
	}
	wakeUp := func() error { return s.Signal(context.WithoutCancel(s.ctx), leader, unix.SIGCONT) }
	require.NoError(t, s.Signal(s.ctx, leader, unix.SIGSTOP))
	t.Cleanup(func() { require.NoError(t, wakeUp()) })
	for i := range 5 {
		s.service(fmt.Sprintf("during-%d", i))
	}
	s.allAssigned() // by the other one
	for i := range 5 {
		s.delete(fmt.Sprintf("between-%d", i))
		s.service(fmt.Sprintf("after-%d", i))
	}
	require.NoError(t, wakeUp())
	s.allAssigned()
	s.always(5*time.Second, "no address belongs to two", func() error { s.noAddressTwice(); return nil })
	s.saw(seen)
	s.eventually("the leader that slept has ended, and another process is in its place", func() error {
		pod, err := s.Kube.CoreV1().Pods(leader.Namespace).Get(s.ctx, leader.Name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		before, now := leader.Status.ContainerStatuses[0], pod.Status.ContainerStatuses[0]
		if now.RestartCount == before.RestartCount || !now.Ready {
			return fmt.Errorf("restarts %d, were %d, ready %t", now.RestartCount, before.RestartCount, now.Ready)
		}
		return nil
	})
}

// The API server refuses or forgets every third request of the controller
// while Services come and go.
func TestControllerConvergesThroughAFaultyAPIServer(t *testing.T) {
	s := begin(t)
	s.config("\nquarantine: 1s\npools:\n  - {name: narrow, addresses: [198.18.0.200-198.18.0.219]}\n")
	s.stopController()
	api, err := s.NewFaultyAPI(33, 1)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, api.Close()) })
	stop := s.runController("--kubeconfig=" + api.Kubeconfig)
	seen := s.watchAddresses()
	const services = 15
	name := func(i int) string { return fmt.Sprintf("web-%d", i%services) }
	for i := range services {
		s.service(name(i))
	}
	for i, end := 0, time.Now().Add(15*time.Second); time.Now().Before(end); i++ {
		s.delete(name(i))
		s.deleted(name(i))
		s.service(name(i))
	}
	t.Logf("faults: %s", api.Faults())
	api.Heal()
	s.allAssigned()
	s.saw(seen)
	s.noAddressTwice()
	stop()
}
