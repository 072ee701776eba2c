package clusterfacts

import (
	"context"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	coordinationinformers "k8s.io/client-go/informers/coordination/v1"
	coreinformers "k8s.io/client-go/informers/core/v1"
	discoveryinformers "k8s.io/client-go/informers/discovery/v1"
	networkinginformers "k8s.io/client-go/informers/networking/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"

	"github.com/lodestone-lb/lodestone/pkg/annotation"
	"github.com/lodestone-lb/lodestone/pkg/config"
	"github.com/lodestone-lb/lodestone/pkg/news"
)

const (
	// gatherDelay is how long changes are gathered before they are looked at:
	// a thousand nodes that join cost a few looks.
	gatherDelay = 200 * time.Millisecond
	// patience is how long the facts may take before the log says what is
	// missing.
	patience = 10 * time.Second
	// askRetry is the wait after the API server did not say whether it has
	// ServiceCIDRs, askAgain after it said no: it is upgraded some day.
	askRetry, askAgain = 2 * time.Second, 10 * time.Minute
	// kubernetesService is the API server's own Service.
	kubernetesService = "kubernetes"
)

// Options are what a Watcher needs.
type Options struct {
	Client kubernetes.Interface
	// Namespace is where the speakers' Leases are. Default: config's.
	Namespace string
	// Log hears what the facts wait for. Default: slog.Default().
	Log *slog.Logger
}

// Watcher is a task that keeps the facts up to date.
type Watcher struct {
	client  kubernetes.Interface
	log     *slog.Logger
	wake    chan struct{}
	sources []*source
	// The sources, by what they watch.
	nodes, leases, serviceCIDRs, apiServer, kubernetes *source

	mu      sync.Mutex
	current *Facts
	changed news.Signal
}

// NewWatcher returns a Watcher that starts with Run.
func NewWatcher(o Options) (*Watcher, error) {
	if o.Namespace == "" {
		o.Namespace = config.Namespace
	}
	if o.Log == nil {
		o.Log = slog.Default()
	}
	w := &Watcher{client: o.Client, log: o.Log, wake: make(chan struct{}, 1)}
	none := cache.Indexers{}
	w.nodes = &source{name: "Nodes", keep: keepNode, informer: coreinformers.NewNodeInformer(o.Client, 0, none)}
	w.leases = &source{name: "Leases of speakers", keep: keepLease,
		informer: coordinationinformers.NewFilteredLeaseInformer(o.Client, o.Namespace, 0, none, func(l *metav1.ListOptions) {
			l.LabelSelector = annotation.LabelComponent + "=" + annotation.ComponentSpeaker
		})}
	w.serviceCIDRs = &source{name: "ServiceCIDRs", keep: keepServiceCIDR, informer: networkinginformers.NewServiceCIDRInformer(o.Client, 0, none)}
	// One slice of each family; newer API servers have both.
	w.apiServer = &source{name: "EndpointSlices of the Service default/kubernetes", keep: keepSlice,
		informer: discoveryinformers.NewFilteredEndpointSliceInformer(o.Client, metav1.NamespaceDefault, 0, none, func(l *metav1.ListOptions) {
			l.LabelSelector = discoveryv1.LabelServiceName + "=" + kubernetesService
		})}
	w.kubernetes = &source{name: "Service default/kubernetes", keep: keepService,
		informer: coreinformers.NewFilteredServiceInformer(o.Client, metav1.NamespaceDefault, 0, none, func(l *metav1.ListOptions) {
			l.FieldSelector = fields.OneTermEqualSelector(metav1.ObjectNameField, kubernetesService).String()
		})}
	w.sources = []*source{w.nodes, w.leases, w.serviceCIDRs, w.apiServer, w.kubernetes}
	for _, s := range w.sources {
		if err := s.follow(w.notify); err != nil {
			return nil, fmt.Errorf("watch %s: %w", s.name, err)
		}
	}
	return w, nil
}

// String names the task.
func (w *Watcher) String() string { return "cluster facts" }

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
	var names []string
	for _, s := range w.sources {
		if !s.absent.Load() && !s.handler.HasSynced() {
			names = append(names, s.name)
		}
	}
	return names
}

// Run keeps the facts up to date until ctx ends. While the API server is down
// they stay as they are.
func (w *Watcher) Run(ctx context.Context) error {
	var group errgroup.Group
	for _, s := range w.sources {
		group.Go(func() error {
			if s == w.serviceCIDRs && !w.haveServiceCIDRs(ctx) {
				return nil
			}
			s.informer.RunWithContext(ctx)
			return nil
		})
		group.Go(func() error {
			if cache.WaitFor(ctx, "", s.handler.HasSyncedChecker()) {
				w.notify()
			}
			return nil
		})
	}
	group.Go(func() error { w.gather(ctx); return nil })
	return group.Wait()
}

// haveServiceCIDRs returns when the API server has the kind, which came with
// Kubernetes v1.33; false: ctx ended first.
func (w *Watcher) haveServiceCIDRs(ctx context.Context) bool {
	failed := "" // the last failure, logged once
	for {
		_, err := w.client.NetworkingV1().ServiceCIDRs().List(ctx, metav1.ListOptions{Limit: 1})
		wait := askRetry
		switch {
		case err == nil:
			return true
		case !apierrors.IsNotFound(err):
			if failed != err.Error() {
				failed = err.Error()
				w.log.Warn("ServiceCIDRs not listed", "err", err, "retry", wait)
			}
		default:
			wait = askAgain
			if w.serviceCIDRs.absent.CompareAndSwap(false, true) {
				w.log.Info("the API server has no ServiceCIDRs (Kubernetes before v1.33): of the cluster IPs only its own is known; exclude the Service CIDR from pools that overlap it")
				w.notify()
			}
		}
		select {
		case <-ctx.Done():
			return false
		case <-time.After(wait):
		}
	}
}

// gather looks at the objects when they have changed.
func (w *Watcher) gather(ctx context.Context) {
	late := time.After(patience)
	for {
		select {
		case <-ctx.Done():
			return
		case <-late:
			if missing := w.Waiting(); len(missing) > 0 {
				w.log.Warn("what must not be handed out is not known yet: may the controller list these, and does the API server answer?", "missing", missing)
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

// look makes what the caches hold the current facts, if they differ.
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

func (w *Watcher) notify() {
	select {
	case w.wake <- struct{}{}:
	default:
	}
}
