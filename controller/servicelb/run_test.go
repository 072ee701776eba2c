package servicelb

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/watch"
	coreinformers "k8s.io/client-go/informers/core/v1"
	corelisters "k8s.io/client-go/listers/core/v1"
	"k8s.io/client-go/tools/cache"

	"github.com/lodestone-lb/lodestone/controller/quarantinestore"
	"github.com/lodestone-lb/lodestone/controller/servicelb/ledger"
	"github.com/lodestone-lb/lodestone/pkg/annotation"
	"github.com/lodestone-lb/lodestone/pkg/clusterfacts"
	"github.com/lodestone-lb/lodestone/pkg/kube"
	"github.com/lodestone-lb/lodestone/pkg/notify"
)

// watched is a ServiceInformer that watches a server.
type watched struct {
	coreinformers.ServiceInformer
	informer cache.SharedIndexInformer
}

func (w watched) Informer() cache.SharedIndexInformer { return w.informer }
func (w watched) Lister() corelisters.ServiceLister {
	return corelisters.NewServiceLister(w.informer.GetIndexer())
}

// running is a controller that runs against a server.
type running struct {
	*testing.T
	server     *server
	config     *document
	controller *Controller
	stop       func()
}

// listWatch watches the server from the moment that it is listed.
func listWatch(s *server) *cache.ListWatch {
	changes := watch.NewFakeWithChanSize(1<<16, false)
	return &cache.ListWatch{
		ListWithContextFunc: func(context.Context, metav1.ListOptions) (runtime.Object, error) {
			s.mu.Lock()
			defer s.mu.Unlock()
			list := &corev1.ServiceList{ListMeta: metav1.ListMeta{ResourceVersion: strconv.Itoa(s.version)}}
			for _, svc := range s.services {
				list.Items = append(list.Items, *svc)
			}
			s.watch = func(before, svc *corev1.Service) {
				switch {
				case svc == nil:
					changes.Delete(before)
				case before == nil:
					changes.Add(svc)
				default:
					changes.Modify(svc)
				}
			}
			return list, nil
		},
		WatchFuncWithContext: func(_ context.Context, o metav1.ListOptions) (watch.Interface, error) {
			if o.SendInitialEvents != nil {
				return nil, apierrors.NewInvalid(schema.GroupKind{}, "", nil)
			}
			return changes, nil
		},
	}
}

func startRunning(t *testing.T, server *server, config *document) *running {
	return startAmong(t, server, config, newSurroundings())
}

// startAmong starts a controller in a cluster of which other facts are known, or none yet.
func startAmong(t *testing.T, server *server, config *document, facts Facts) *running {
	informer := cache.NewSharedIndexInformer(listWatch(server), &corev1.Service{}, 0,
		cache.Indexers{cache.NamespaceIndex: cache.MetaNamespaceIndexFunc})
	scope := kube.Scope{Classless: true}
	ctl, err := New(Options{
		Scope: scope, Services: watched{informer: informer}, Namespaces: newSurroundings(), Config: config, Facts: facts,
		Quarantine: &shelf{records: map[netip.Addr]quarantinestore.Record{}},
		API:        server, Events: &events{}, Workers: 16, Log: slog.New(slog.DiscardHandler),
	})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	watching, blind := context.WithCancel(context.Background())
	var controller, watch sync.WaitGroup
	controller.Go(func() {
		if err := ctl.Run(ctx); err != nil {
			t.Error(err)
		}
	})
	watch.Go(func() { informer.RunWithContext(watching) })
	// The controller first: what it still writes goes through the watch.
	stop := func() { cancel(); controller.Wait(); blind(); watch.Wait() }
	t.Cleanup(stop)
	return &running{t, server, config, ctl, stop}
}

func (r *running) eventually(what string, holds func() bool) {
	r.Helper()
	for deadline := time.Now().Add(time.Minute); !holds(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			r.Fatalf("waited in vain until %s", what)
		}
	}
}

func (r *running) assigned() (n int) {
	for _, svc := range r.server.all() {
		n += len(kube.VIPs(svc))
	}
	return n
}

func unread() *document { return &document{changed: make(chan struct{})} }

func TestNothingIsAllocatedBeforeTheLedgerIsPrimed(t *testing.T) {
	t.Parallel()
	server, config := newServer(), unread()
	server.create("default/old", time.Unix(1e9, 0), annotated(annotation.Assigned, "203.0.113.10"), func(svc *corev1.Service) {
		svc.Status.LoadBalancer.Ingress = []corev1.LoadBalancerIngress{{IP: "203.0.113.10"}}
	})
	server.create("default/a-new", time.Unix(1e9, 0))
	r := startRunning(t, server, config)
	if notify.Closed(r.controller.Primed()) {
		t.Error("primed without a configuration")
	}
	time.Sleep(100 * time.Millisecond)
	if server.wrote() > 0 {
		t.Fatal("something was written before the configuration was read")
	}
	config.set(lan)
	r.eventually("both have addresses", func() bool { return r.assigned() == 2 })
	if got := server.get("default/a-new").Annotations[annotation.Assigned]; got != "203.0.113.11" {
		t.Errorf("the new Service has %s", got)
	}
}

// late are facts that become known when ready is closed.
type late struct {
	*surroundings
	ready chan struct{}
}

func (f late) Current() (*clusterfacts.Facts, bool) {
	if !notify.Closed(f.ready) {
		return nil, false
	}
	return f.surroundings.Current()
}

func (f late) Changed() <-chan struct{} { return f.ready }

// A new leader knows what speakers report before it gives the first address.
func TestNothingIsAllocatedBeforeReportsAreRead(t *testing.T) {
	t.Parallel()
	server, config, facts := newServer(), unread(), late{newSurroundings(), make(chan struct{})}
	config.set(lan)
	facts.report("203.0.113.10 withheld", "203.0.113.11 withheld")
	server.create("default/new", time.Unix(1e9, 0))
	r := startAmong(t, server, config, facts)
	time.Sleep(100 * time.Millisecond)
	if notify.Closed(r.controller.Primed()) || server.wrote() > 0 {
		t.Fatal("the reports of speakers were not waited for")
	}
	close(facts.ready)
	r.eventually("it has an address", func() bool { return r.assigned() == 1 })
	if got := server.get("default/new").Annotations[annotation.Assigned]; got != "203.0.113.12" {
		t.Errorf("the new Service has %s", got)
	}
	if server.wrote() != 1 {
		t.Errorf("%d writes", server.wrote())
	}
}

func TestThousandPendingServicesTakeOneWriteEach(t *testing.T) {
	t.Parallel()
	const n = 1000
	server, config := newServer(), unread()
	config.set("pools: [{name: lan, addresses: [10.0.0.0/20]}]\n")
	for i := range n {
		server.create(fmt.Sprintf("default/s%d", i), time.Unix(1e9, 0))
	}
	r := startRunning(t, server, config)
	r.eventually("all have addresses", func() bool {
		time.Sleep(100 * time.Millisecond) // the look at all of them takes from their share of the machine
		return r.assigned() == n
	})
	r.stop()
	if server.wrote() != n {
		t.Errorf("%d writes for %d Services", server.wrote(), n)
	}
}

func TestWaitingServicesWakeByThemselves(t *testing.T) {
	t.Parallel()
	server, config := newServer(), unread()
	config.put(nil, errors.New("no document"))
	server.create("default/first", time.Unix(1e9, 0))
	r := startRunning(t, server, config)
	reason := func(name string) string {
		if svc := server.get("default/" + name); svc != nil && kube.Allocated(svc) != nil {
			return kube.Allocated(svc).Reason
		}
		return ""
	}
	r.eventually("the first one says what is missing", func() bool { return reason("first") == string(ledger.ConfigUnavailable) })
	config.set("quarantine: 300ms\n" + single)
	r.eventually("the configuration wakes it", func() bool { return reason("first") == string(ledger.ReasonAllocated) })
	server.create("default/second", time.Unix(1e9, 0))
	r.eventually("the second one is refused", func() bool { return reason("second") == "PoolExhausted" })
	server.delete("default/first", time.Now())
	r.eventually("the end of the quarantine wakes it", func() bool { return reason("second") == string(ledger.ReasonAllocated) })
}

func TestServicesFlappingUnderLoadEndWithUniqueAddresses(t *testing.T) {
	t.Parallel()
	server, config := newServer(), unread()
	config.set("quarantine: 0s\npools: [{name: lan, addresses: [10.0.0.0/27]}]\n")
	r := startRunning(t, server, config)
	for i := range 600 {
		name := fmt.Sprintf("default/s%d", i%40)
		server.create(name, time.Unix(1e9, 0))
		if i%3 == 0 {
			server.delete(fmt.Sprintf("default/s%d", (i*7)%40), time.Now())
		}
	}
	r.eventually("every name is there to stay", func() bool {
		for i := range 40 {
			server.create(fmt.Sprintf("default/s%d", i), time.Unix(1e9, 0))
		}
		all := server.all()
		return len(all) == 40 && !slices.ContainsFunc(all, func(svc *corev1.Service) bool { return svc.DeletionTimestamp != nil })
	})
	r.eventually("every address is in use", func() bool { return r.assigned() == 30 })
	seen := map[string]bool{}
	for _, svc := range server.all() {
		for _, a := range kube.VIPs(svc) {
			if seen[a.String()] {
				t.Errorf("%s twice", a)
			}
			seen[a.String()] = true
		}
	}
}

func TestMetrics(t *testing.T) {
	t.Parallel()
	s := newStory(t)
	reg := prometheus.NewPedanticRegistry()
	reg.MustRegister(s.Controller)
	s.configure("quarantine: 30s\npools:\n  - {name: lan, addresses: [203.0.113.10-203.0.113.12]}\n  - {name: gone, addresses: " +
		"[198.51.100.1/32], autoAssign: false}\n")
	s.creates("a")
	s.creates("b")
	s.creates("c")
	s.creates("moves", annotated(annotation.AddressPool, "gone"))
	s.creates("refused")
	s.creates("bad", annotated(annotation.Addresses, "poison"))
	s.configure("quarantine: 30s\npools:\n  - {name: lan, addresses: [203.0.113.10-203.0.113.12]}\n")
	s.deletes("a")

	want := `
# HELP lodestone_pool_addresses Addresses of the pool by what becomes of them: free, assigned, quarantined, conflicted (another host has them), reserved.
# TYPE lodestone_pool_addresses gauge
lodestone_pool_addresses{family="IPv4",pool="lan",state="assigned"} 2
lodestone_pool_addresses{family="IPv4",pool="lan",state="conflicted"} 0
lodestone_pool_addresses{family="IPv4",pool="lan",state="free"} 0
lodestone_pool_addresses{family="IPv4",pool="lan",state="quarantined"} 1
lodestone_pool_addresses{family="IPv4",pool="lan",state="reserved"} 0
# HELP lodestone_pool_size Addresses that the pool may hand out.
# TYPE lodestone_pool_size gauge
lodestone_pool_size{family="IPv4",pool="lan"} 3
# HELP lodestone_primed Whether the ledger knows what the cluster's Services hold, so that addresses are allocated.
# TYPE lodestone_primed gauge
lodestone_primed 1
# HELP lodestone_refusals_total Requests that came to be refused, or refused for another reason.
# TYPE lodestone_refusals_total counter
lodestone_refusals_total{reason="InvalidRequest"} 1
lodestone_refusals_total{reason="PoolExhausted"} 1
# HELP lodestone_services Services served, by how they stand: allocated, partial, draining, stranded, conflicting (another host claims the address, too), refused, unjudged.
# TYPE lodestone_services gauge
lodestone_services{state="allocated"} 2
lodestone_services{state="conflicting"} 0
lodestone_services{state="draining"} 0
lodestone_services{state="partial"} 0
lodestone_services{state="refused"} 2
lodestone_services{state="stranded"} 1
lodestone_services{state="unjudged"} 0
# HELP lodestone_services_refused Services whose request is refused at present.
# TYPE lodestone_services_refused gauge
lodestone_services_refused{reason="InvalidRequest"} 1
lodestone_services_refused{reason="PoolExhausted"} 1
`
	if err := testutil.GatherAndCompare(reg, strings.NewReader(want),
		MetricPoolAddresses, MetricPoolSize, MetricPrimed, MetricRefusals, MetricServices, MetricRefused); err != nil {
		t.Error(err)
	}
	if problems, err := testutil.GatherAndLint(reg); err != nil || len(problems) > 0 {
		t.Errorf("lint: %v %v", problems, err)
	}
}
