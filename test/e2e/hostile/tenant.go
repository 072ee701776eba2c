package hostile

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"sync"
	"time"

	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	coreinformers "k8s.io/client-go/informers/core/v1"
	"k8s.io/client-go/tools/cache"

	"github.com/lodestone-lb/lodestone/test/e2e/netns"
)

const (
	// tenant is the namespace of the other tenant.
	tenant = "shop"
	// pace is how long the tenant waits before the next Service.
	pace = 100 * time.Millisecond
	// atOnce is how many Services it waits for at most.
	atOnce = 8
)

// watcher knows when Services had addresses, and when addresses were announced.
type watcher struct {
	socket int

	mu        sync.Mutex
	addressed map[string]assignment
	lost      error // Services that had another address later, or none
	heard     map[netip.Addr][]time.Time
}

type assignment struct {
	at      time.Time
	address netip.Addr
}

// watch begins to watch the tenant's Services and the segment.
func (c *cluster) watch(ctx context.Context) (wait func() error, err error) {
	w := &watcher{addressed: map[string]assignment{}, heard: map[netip.Addr][]time.Time{}}
	c.watched = w
	err = netns.Do(c.host(control), func() (err error) {
		const arp = unix.ETH_P_ARP<<8&0xff00 | unix.ETH_P_ARP>>8 // in network byte order
		if w.socket, err = unix.Socket(unix.AF_PACKET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, arp); err != nil {
			return err
		}
		return unix.SetsockoptTimeval(w.socket, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Usec: 100_000}) // so that the end is noticed
	})
	if err != nil {
		return nil, fmt.Errorf("listen on the segment: %w", err)
	}
	services := coreinformers.NewServiceInformer(c.kube, tenant, 0, cache.Indexers{})
	if _, err := services.AddEventHandler(cache.ResourceEventHandlerFuncs{AddFunc: w.note,
		UpdateFunc: func(_, obj any) { w.note(obj) }}); err != nil {
		return nil, err
	}
	var running sync.WaitGroup
	running.Go(func() { services.RunWithContext(ctx) })
	running.Go(func() { w.listen(ctx) })
	return func() error { running.Wait(); return unix.Close(w.socket) }, nil
}

func (w *watcher) note(obj any) {
	s := obj.(*corev1.Service)
	var address netip.Addr
	if in := s.Status.LoadBalancer.Ingress; len(in) != 0 {
		address, _ = netip.ParseAddr(in[0].IP)
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	old, known := w.addressed[s.Name]
	switch {
	case !known && address.IsValid():
		w.addressed[s.Name] = assignment{time.Now(), address}
	case known && old.address != address && s.DeletionTimestamp == nil:
		w.lost = errors.Join(w.lost, fmt.Errorf("%s had %s, and then %s", s.Name, old.address, address))
	}
}

// changed returns which Services had another address later, or none.
func (w *watcher) changed() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.lost
}

// address is that of a Service which has one.
func (w *watcher) address(name string) netip.Addr {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.addressed[name].address
}

// listen records which addresses are announced. SOCK_DGRAM leaves out the Ethernet header, so
// the sender of an ARP packet is at 14.
func (w *watcher) listen(ctx context.Context) {
	buf := make([]byte, 128)
	for ctx.Err() == nil {
		n, _, err := unix.Recvfrom(w.socket, buf, 0)
		if err != nil || n < 28 {
			continue
		}
		sender := netip.AddrFrom4([4]byte(buf[14:18]))
		w.mu.Lock()
		if times := w.heard[sender]; len(times) == 0 || time.Since(times[len(times)-1]) > time.Millisecond {
			w.heard[sender] = append(times, time.Now())
		}
		w.mu.Unlock()
	}
}

// seen returns when the Service had its address, and when it was announced.
func (w *watcher) seen(name string, since time.Time) (addressed, announced time.Time) {
	w.mu.Lock()
	defer w.mu.Unlock()
	s := w.addressed[name]
	for _, at := range w.heard[s.address] {
		if at.After(since) {
			return s.at, at
		}
	}
	return s.at, time.Time{}
}

// serve lets the tenant create so many Services, one after the other, and returns how long
// they waited. They are deleted when all are there: no address is used twice.
func (c *cluster) serve(ctx context.Context, number int) (w Waits, err error) {
	var mu sync.Mutex
	first := c.tenants + 1
	var group sync.WaitGroup
	var failed error
	slots := make(chan struct{}, atOnce)
	for range number {
		c.tenants++
		name := nameOf(c.tenants)
		slots <- struct{}{}
		group.Go(func() {
			created, addressed, announced, err := c.serveOne(ctx, name)
			mu.Lock()
			defer mu.Unlock()
			w.Created, w.Address, w.Announced = append(w.Created, created), append(w.Address, addressed), append(w.Announced, announced)
			failed = errors.Join(failed, err)
			<-slots
		})
		if err := sleep(ctx, pace); err != nil {
			break
		}
	}
	group.Wait()
	for n := first; n <= c.tenants; n++ {
		failed = errors.Join(failed, c.kube.CoreV1().Services(tenant).Delete(ctx, nameOf(n), metav1.DeleteOptions{}))
	}
	if number > 1 && failed == nil {
		c.Progress("%d Services of another tenant: p99 %s until the API server answered, %s until the address, %s until it was announced",
			number, Quantile(w.Created, 0.99), Quantile(w.Address, 0.99), Quantile(w.Announced, 0.99))
	}
	return w, failed
}

func (c *cluster) serveOne(ctx context.Context, name string) (created, addressed, announced time.Duration, err error) {
	slice := &discoveryv1.EndpointSlice{
		ObjectMeta:  metav1.ObjectMeta{Name: name, Labels: map[string]string{discoveryv1.LabelServiceName: name}},
		AddressType: discoveryv1.AddressTypeIPv4,
		Endpoints:   []discoveryv1.Endpoint{{Addresses: []string{"10.244.1.2"}, NodeName: new(c.nodes[0])}},
	}
	if _, err := c.kube.DiscoveryV1().EndpointSlices(tenant).Create(ctx, slice, metav1.CreateOptions{}); err != nil {
		return 0, 0, 0, err
	}
	began := time.Now()
	_, err = c.kube.CoreV1().Services(tenant).Create(ctx, &corev1.Service{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: corev1.ServiceSpec{
		Type: corev1.ServiceTypeLoadBalancer, AllocateLoadBalancerNodePorts: new(false), Ports: []corev1.ServicePort{{Port: 80}},
	}}, metav1.CreateOptions{})
	created = time.Since(began)
	if err != nil {
		return created, 0, 0, err
	}
	err = wait(ctx, name+" is announced", func() error {
		has, is := c.watched.seen(name, began)
		if is.IsZero() {
			return fmt.Errorf("it is not; an address since creation: %t", !has.IsZero())
		}
		addressed, announced = has.Sub(began), is.Sub(began)
		return nil
	})
	return created, addressed, announced, err
}

func nameOf(n int) string { return fmt.Sprintf("web-%05d", n) }
