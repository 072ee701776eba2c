package main

import (
	"context"
	"encoding/json"
	"fmt"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	coreinformers "k8s.io/client-go/informers/core/v1"
	"k8s.io/client-go/tools/cache"

	"github.com/lodestone-lb/lodestone/test/e2e/lodestone"
)

const (
	namespace = "bench"
	// parallel is how many requests the benchmark itself keeps in flight.
	parallel = 16
	// timeout is how long Services may take to get their addresses, and
	// timeoutEach how much longer for each of them: a limit for giving up.
	timeout, timeoutEach = 2 * time.Minute, 180 * time.Millisecond
	// widePool has room for every Service of any benchmark. Nothing in the
	// lab has these addresses.
	widePool = `
quarantine: 0s
pools:
  - {name: wide, addresses: [198.19.0.0/18]}
`
)

// load is a number of Services in the lab.
type load struct {
	*lodestone.Installation
	services int
}

// nameOf is the name of Service number n.
func nameOf(n int) string { return fmt.Sprintf("web-%05d", n) }

func (l load) names() []string {
	names := make([]string, l.services)
	for n := range names {
		names[n] = nameOf(n)
	}
	return names
}

// each calls do for every Service's name, parallel at a time.
func (l load) each(ctx context.Context, do func(ctx context.Context, name string) error) error {
	return inParallel(ctx, l.names(), do)
}

func inParallel(ctx context.Context, names []string, do func(ctx context.Context, name string) error) error {
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(parallel)
	for _, name := range names {
		group.Go(func() error { return do(ctx, name) })
	}
	return group.Wait()
}

// create makes the Services, in a namespace that is made when it is missing.
func (l load) create(ctx context.Context) error {
	if err := l.makeNamespace(ctx); err != nil {
		return err
	}
	return l.each(ctx, l.createOne)
}

func (l load) createOne(ctx context.Context, name string) error {
	_, err := l.Kube.CoreV1().Services(namespace).Create(ctx, service(name), metav1.CreateOptions{})
	return err
}

func (l load) deleteOne(ctx context.Context, name string) error {
	return l.Kube.CoreV1().Services(namespace).Delete(ctx, name, metav1.DeleteOptions{})
}

func (l load) makeNamespace(ctx context.Context) error {
	ns := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: namespace}}
	_, err := l.Kube.CoreV1().Namespaces().Create(ctx, ns, metav1.CreateOptions{})
	if apierrors.IsAlreadyExists(err) {
		return nil
	}
	return err
}

// service has no selector: endpoints are not what is measured, and would cost
// more than all the rest.
func service(name string) *corev1.Service {
	return &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: namespace},
		Spec: corev1.ServiceSpec{
			Type:                          corev1.ServiceTypeLoadBalancer,
			Ports:                         []corev1.ServicePort{{Port: 80}},
			AllocateLoadBalancerNodePorts: new(false), // there are only 2,768
		},
	}
}

// delete removes the Services and waits until they are gone.
func (l load) delete(ctx context.Context) error {
	if err := l.each(ctx, l.deleteOne); err != nil {
		return err
	}
	return l.left(ctx, 0)
}

// left waits until the namespace has no more than n Services.
func (l load) left(ctx context.Context, n int) error {
	return lodestone.Wait(ctx, "the deleted Services are gone", func() error {
		list, err := l.Kube.CoreV1().Services(namespace).List(ctx, metav1.ListOptions{Limit: 1})
		if err != nil {
			return err
		}
		count := len(list.Items)
		if more := list.RemainingItemCount; more != nil {
			count += int(*more)
		}
		if count > n {
			err = fmt.Errorf("there are %d, want %d", count, n)
		}
		return err
	})
}

// bareStatus writes an address and a condition into the status of every
// Service, as a controller would that does nothing else, and returns how long
// that took: what the API server itself can do.
func (l load) bareStatus(ctx context.Context) (time.Duration, error) {
	start := time.Now()
	err := l.each(ctx, func(ctx context.Context, name string) error {
		_, err := l.Kube.CoreV1().Services(namespace).Patch(ctx, name, types.MergePatchType, statusPatch(name), metav1.PatchOptions{}, "status")
		return err
	})
	return time.Since(start), err
}

// clear takes everything that a controller wrote off the Services, and lets
// those who watch them catch up.
func (l load) clear(ctx context.Context) error {
	const settling = 3 * time.Second
	blank := []byte(`{"metadata":{"finalizers":null,"annotations":null},"status":{"loadBalancer":null,"conditions":null}}`)
	err := l.each(ctx, func(ctx context.Context, name string) error {
		_, err := l.Kube.CoreV1().Services(namespace).Patch(ctx, name, types.MergePatchType, blank, metav1.PatchOptions{}, "status")
		return err
	})
	time.Sleep(settling)
	return err
}

func statusPatch(name string) []byte {
	raw, err := json.Marshal(map[string]any{"status": corev1.ServiceStatus{
		LoadBalancer: corev1.LoadBalancerStatus{Ingress: []corev1.LoadBalancerIngress{
			{IP: "198.19.63.1" + name[len(name)-2:], IPMode: new(corev1.LoadBalancerIPModeVIP)}}},
		Conditions: []metav1.Condition{{
			Type: "example.com/Bare", Status: metav1.ConditionTrue, Reason: "Bare", LastTransitionTime: metav1.Now(),
			Message: "an address and a sentence of the usual length",
		}},
	}})
	if err != nil {
		panic(err) // constants and a name
	}
	return raw
}

// assignments watches until every Service has an address, and returns when
// each was first seen with one. started is called once the watch stands.
func (l load) assignments(ctx context.Context, started func() error) (map[string]time.Time, error) {
	ctx, cancel := context.WithTimeout(ctx, timeout+time.Duration(l.services)*timeoutEach)
	defer cancel()
	seen := newArrivals(l.services)
	informer := coreinformers.NewServiceInformer(l.Kube, namespace, 0, cache.Indexers{})
	_, err := informer.AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc:    seen.note,
		UpdateFunc: func(_, svc any) { seen.note(svc) },
	})
	if err != nil {
		return nil, err
	}
	var watching sync.WaitGroup
	watching.Go(func() { informer.RunWithContext(ctx) })
	defer watching.Wait()
	defer cancel()
	if !cache.WaitForCacheSync(ctx.Done(), informer.HasSynced) {
		return nil, fmt.Errorf("watch Services: %w", ctx.Err())
	}
	if err := started(); err != nil {
		return nil, err
	}
	select {
	case <-seen.all:
		return seen.at, nil
	case <-ctx.Done():
		return nil, fmt.Errorf("not all of %d Services have an address: %w", l.services, ctx.Err())
	}
}

// arrivals are when each Service was first seen with an address.
type arrivals struct {
	want int
	at   map[string]time.Time // the informer's until all is closed
	all  chan struct{}
}

func newArrivals(want int) *arrivals {
	return &arrivals{want: want, at: map[string]time.Time{}, all: make(chan struct{})}
}

// note is called by the informer, one call at a time.
func (s *arrivals) note(object any) {
	svc := object.(*corev1.Service)
	if _, known := s.at[svc.Name]; known || len(svc.Status.LoadBalancer.Ingress) == 0 {
		return
	}
	s.at[svc.Name] = time.Now()
	if len(s.at) == s.want {
		close(s.all)
	}
}
