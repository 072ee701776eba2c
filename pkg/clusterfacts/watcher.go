package clusterfacts

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"

	"github.com/lodestone-lb/lodestone/pkg/config"
	"github.com/lodestone-lb/lodestone/pkg/kube"
	"github.com/lodestone-lb/lodestone/pkg/notify"
	"github.com/lodestone-lb/lodestone/pkg/objects"
)

const (
	// gatherDelay is how long changes are gathered before the facts are computed. A thousand
	// nodes that join then cost a few computations.
	gatherDelay = 200 * time.Millisecond
	// lateAfter is how long the facts may take before the log has what is
	// missing.
	lateAfter = 10 * time.Second
)

// APIServer is the scope of the API servers' EndpointSlices: one of each family.
var APIServer = objects.Scope{Namespace: metav1.NamespaceDefault, Labels: discoveryv1.LabelServiceName + "=" + objects.KubernetesService}

// Options are what a Watcher needs.
type Options struct {
	Client kubernetes.Interface
	// Namespace is where the speakers' Leases are. Default: config's.
	Namespace string
	// Log gets what the facts wait for. Default: slog.Default().
	Log *slog.Logger
}

// Watcher is a task that keeps the facts up to date.
type Watcher struct {
	log     *slog.Logger
	wake    chan struct{}
	sources []*source
	// The sources, by what they watch.
	nodes, leases, serviceCIDRs, apiServer, kubernetes *source

	mu      sync.Mutex
	current *Facts
	// absent is set once it is known that there are no ServiceCIDRs: the API server lacks them still after all else was listed, which
	// was after refusals failures. A load balancer before API servers that start lacks everything.
	absent   bool
	refusals int
	changed  notify.Signal
}

// source is a kind of object that is watched, with its name for people.
type source struct {
	name string
	*kube.Follower
}

// NewWatcher returns a Watcher that starts with Run.
func NewWatcher(o Options) *Watcher {
	if o.Namespace == "" {
		o.Namespace = config.Namespace
	}
	if o.Log == nil {
		o.Log = slog.Default()
	}
	w := &Watcher{log: o.Log, wake: make(chan struct{}, 1)}
	all, none := objects.Scope{}, cache.SharedIndexInformerOptions{}
	w.nodes = w.watch("Nodes", objects.Informer(objects.Nodes, o.Client, all, view(keepNode), none))
	w.leases = w.watch("Leases of speakers",
		objects.Informer(objects.Leases, o.Client, objects.Speakers(o.Namespace), view(keepLease), none))
	w.serviceCIDRs = w.watch("ServiceCIDRs", objects.ServiceCIDRs.Informer(o.Client, all, none))
	w.serviceCIDRs.Optional = objects.ServiceCIDRs.Optional
	w.apiServer = w.watch("EndpointSlices of the Service default/kubernetes", objects.EndpointSlices.Informer(o.Client, APIServer, none))
	own := objects.Scope{Namespace: metav1.NamespaceDefault,
		Fields: fields.OneTermEqualSelector(metav1.ObjectNameField, objects.KubernetesService).String()}
	w.kubernetes = w.watch("Service default/kubernetes", objects.Services.Informer(o.Client, own, none))
	return w
}

func view[P any](keep func(P) P) objects.View[P, P] { return objects.View[P, P]{Derive: keep} }

func (w *Watcher) watch(name string, informer cache.SharedIndexInformer) *source {
	s := &source{name, kube.NewFollower(informer, func() { notify.Wake(w.wake) })}
	w.sources = append(w.sources, s)
	return s
}

// Current returns the facts; not ready, and nil, before all objects have been
// listed once.
func (w *Watcher) Current() (facts *Facts, ready bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.current, w.current != nil
}

// Changed returns a channel that is closed as soon as Current's answer
// changes. Take the channel first, then ask Current: no change is missed.
func (w *Watcher) Changed() <-chan struct{} { return w.changed.Next() }

// Waiting names the kinds of objects that have not been listed yet.
func (w *Watcher) Waiting() []string {
	names, _ := w.waiting()
	return names
}

// waiting names the kinds that have not been listed yet, and returns why, as far as that is
// known.
func (w *Watcher) waiting() (names []string, why error) {
	for _, s := range w.sources {
		if known, err := s.Standing(); !known || err != nil {
			names, why = append(names, s.name), errors.Join(why, err)
		}
	}
	if len(names) == 0 && !w.without(w.serviceCIDRs.Absent()) {
		names = append(names, w.serviceCIDRs.name)
	}
	return names, why
}

// without reports whether the ServiceCIDRs need not be waited for, which the API server has lacked so many times, when all else is
// listed.
func (w *Watcher) without(lacked int) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	if lacked == 0 || w.absent {
		return true
	}
	if w.refusals == 0 {
		w.refusals = lacked
	}
	if w.absent = lacked > w.refusals; w.absent {
		w.log.Info("the API server has no ServiceCIDRs (Kubernetes before v1.33): of the cluster IPs only its own is known; exclude " +
			"the Service CIDR from pools that overlap it")
	}
	return w.absent
}

// Run keeps the facts up to date until ctx ends. While the API server is down
// they stay as they are.
func (w *Watcher) Run(ctx context.Context) error {
	var group errgroup.Group
	for _, s := range w.sources {
		group.Go(func() error { return s.Run(ctx) })
	}
	group.Go(func() error { w.gather(ctx); return nil })
	return group.Wait()
}

// gather computes the facts when objects have changed.
func (w *Watcher) gather(ctx context.Context) {
	late := time.After(lateAfter)
	for {
		select {
		case <-ctx.Done():
			return
		case <-late:
			if missing, why := w.waiting(); len(missing) > 0 {
				w.log.Warn("nothing is allocated: which addresses the cluster itself uses is not known yet; may the controller list "+
					"these, and does the API server answer?", "missing", missing, "err", why)
			}
			continue
		case <-w.wake:
		}
		if _, ready := w.Current(); ready {
			select {
			case <-ctx.Done():
				return
			case <-time.After(gatherDelay):
			}
		}
		select {
		case <-w.wake:
		default:
		}
		w.look()
	}
}

// look computes the facts from the caches, and publishes them if they differ.
func (w *Watcher) look() {
	if len(w.Waiting()) > 0 {
		return
	}
	o := Objects{
		Nodes:        listed[*corev1.Node](w.nodes),
		Leases:       listed[*coordinationv1.Lease](w.leases),
		ServiceCIDRs: listed[*networkingv1.ServiceCIDR](w.serviceCIDRs),
		APIServer:    listed[*discoveryv1.EndpointSlice](w.apiServer),
	}
	if services := listed[*corev1.Service](w.kubernetes); len(services) > 0 {
		o.Kubernetes = services[0]
	}
	facts := Collect(o)
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.current != nil && w.current.Equal(facts) {
		return
	}
	w.current = facts
	w.changed.Notify()
}

func listed[T metav1.Object](s *source) []T { return kube.Listed[T](s.Follower) }
