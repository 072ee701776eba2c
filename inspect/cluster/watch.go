package cluster

import (
	"context"
	"log/slog"
	"slices"
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

	"github.com/lodestone-lb/lodestone/controller/quarantine"
	"github.com/lodestone-lb/lodestone/pkg/annotation"
	"github.com/lodestone-lb/lodestone/pkg/config"
	"github.com/lodestone-lb/lodestone/pkg/kube"
	"github.com/lodestone-lb/lodestone/pkg/notify"
	"github.com/lodestone-lb/lodestone/pkg/objects"
)

const (
	// recordsAge is how old the addresses in quarantine may be. They are read now and then, not watched.
	recordsAge = 10 * time.Second
	// recordsTimeout bounds the reading of it.
	recordsTimeout = 2 * time.Second
)

// Watcher is a task that follows what All reads. Its caches keep only what is needed of the objects.
type Watcher struct {
	place   Place
	client  kubernetes.Interface
	sources []*watched
	// The sources, by what they watch.
	services, namespaces, configMap, nodes, leases, apiServer, serviceCIDRs, slices, pods *watched
	changed                                                                               notify.Signal

	mu sync.Mutex
	// parsed is the configuration in the document; nil: there is none.
	document  *string
	parsed    *config.Config
	parsedErr error
	// records are the addresses in quarantine at the time recordsAt.
	records    []quarantine.Record
	recordsErr error
	recordsAt  time.Time
}

// watched is a kind of object that is watched.
type watched struct {
	source
	*kube.Follower
}

// NewWatcher returns a Watcher that starts with Run.
func NewWatcher(client kubernetes.Interface, p Place) *Watcher {
	w := &Watcher{client: client, place: p}
	none := cache.SharedIndexInformerOptions{}
	all, ours := objects.Scope{}, objects.Scope{Namespace: p.Namespace}
	document, api, pods := ours, objects.Scope{Namespace: metav1.NamespaceDefault, Labels: discoveryv1.LabelServiceName + "=kubernetes"}, ours
	document.Fields = fields.OneTermEqualSelector(metav1.ObjectNameField, p.ConfigName).String()
	pods.Labels = labelName + "=lodestone"
	w.services = w.watch(Services, "services", "", objects.Services.Informer(client, all, none))
	w.namespaces = w.watch(namespaces, "namespaces", "", objects.Namespaces.Informer(client, all, none))
	w.configMap = w.watch(ConfigMaps, "configmaps", p.Namespace, objects.ConfigMaps.Informer(client, document, none))
	w.nodes = w.watch(Nodes, "nodes", "", objects.Nodes.Informer(client, all, none))
	w.leases = w.watch(Leases, "leases.coordination.k8s.io", p.Namespace, objects.Leases.Informer(client, ours, none))
	w.apiServer = w.watch(apiServer, "endpointslices.discovery.k8s.io", metav1.NamespaceDefault,
		objects.EndpointSlices.Informer(client, api, none))
	w.serviceCIDRs = w.watch(serviceCIDRs, "servicecidrs.networking.k8s.io", "", objects.ServiceCIDRs.Informer(client, all, none))
	w.slices = w.watch(Slices, "endpointslices.discovery.k8s.io", "", objects.EndpointSlices.Informer(client, all, none))
	w.pods = w.watch(Pods, "pods", p.Namespace, objects.Pods.Informer(client, pods, none))
	return w
}

func (w *Watcher) watch(kind, resource, namespace string, informer cache.SharedIndexInformer) *watched {
	s := &watched{source{kind: kind, verb: "list", resource: resource, namespace: namespace},
		kube.NewFollower(informer, asIs, w.changed.Notify)}
	w.sources = append(w.sources, s)
	return s
}

// String names the task.
func (w *Watcher) String() string { return "cluster" }

// Changed returns a channel that is closed as soon as Objects gives another
// answer. Take the channel first, then ask: no change is missed.
func (w *Watcher) Changed() <-chan struct{} { return w.changed.Next() }

// Run follows the objects until ctx ends.
func (w *Watcher) Run(ctx context.Context) error {
	var group errgroup.Group
	for _, s := range w.sources {
		group.Go(func() error { return s.Run(ctx) })
	}
	return group.Wait()
}

// Objects returns what there is, as All does. It is not ready until each kind has been read, or why it cannot be
// is known.
func (w *Watcher) Objects(ctx context.Context) (o *Objects, ready bool) {
	o = newObjects(w.place)
	for _, s := range w.sources {
		known, err := s.Standing()
		if !known {
			return nil, false
		}
		if err != nil {
			o.unread[s.kind] = refused(s.source, err)
		}
	}
	o.Services, o.Namespaces, o.Nodes = stored[*corev1.Service](w.services), stored[*corev1.Namespace](w.namespaces),
		stored[*corev1.Node](w.nodes)
	o.Slices, o.facts.APIServer = stored[*discoveryv1.EndpointSlice](w.slices), stored[*discoveryv1.EndpointSlice](w.apiServer)
	o.facts.ServiceCIDRs = stored[*networkingv1.ServiceCIDR](w.serviceCIDRs)
	for _, l := range stored[*coordinationv1.Lease](w.leases) {
		switch {
		case l.Name == ElectionLease:
			o.Election = l
		case l.Labels[annotation.LabelComponent] == annotation.ComponentSpeaker:
			o.Leases = append(o.Leases, l)
		}
	}
	o.sortPods(stored[*corev1.Pod](w.pods))
	w.mu.Lock()
	defer w.mu.Unlock()
	w.parse(stored[*corev1.ConfigMap](w.configMap))
	w.read(ctx)
	o.Config, o.ConfigErr, o.Records = w.parsed, w.parsedErr, w.records
	if w.recordsErr != nil {
		o.unread[releasedAddresses] = w.recordsErr
	}
	return o, true
}

// parse reads the document, unless it is the one that was read last.
func (w *Watcher) parse(all []*corev1.ConfigMap) {
	i := slices.IndexFunc(all, func(cm *corev1.ConfigMap) bool { return cm.Name == w.place.ConfigName })
	if i < 0 {
		w.parsed, w.parsedErr, w.document = nil, nil, nil
		return
	}
	if document := all[i].Data[config.Key]; w.document == nil || document != *w.document {
		w.parsed, w.parsedErr = config.Parse([]byte(document))
		w.document = &document
	}
}

// read reads which addresses are in quarantine, unless that was done lately.
func (w *Watcher) read(ctx context.Context) {
	if time.Since(w.recordsAt) < recordsAge {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, recordsTimeout)
	defer cancel()
	records, err := quarantine.New(w.client, w.place.Namespace, slog.New(slog.DiscardHandler)).Load(ctx)
	if w.recordsAt, w.recordsErr = time.Now(), err; err == nil {
		w.records = records
	}
}

func stored[T metav1.Object](s *watched) []T { return kube.Listed[T](s.Follower) }

// asIs is the transform of a cache that keeps projections as they are, but for
// Services that are no concern of ours: of them the addresses are known.
func asIs(obj any) (any, error) {
	o, ok := obj.(*corev1.Service)
	if !ok {
		return obj, nil
	}
	if _, assigned := o.Annotations[annotation.Assigned]; !assigned && o.Spec.Type != corev1.ServiceTypeLoadBalancer &&
		len(o.Finalizers) == 0 {
		meta := metav1.ObjectMeta{Namespace: o.Namespace, Name: o.Name, UID: o.UID, ResourceVersion: o.ResourceVersion}
		return &corev1.Service{ObjectMeta: meta,
			Spec: corev1.ServiceSpec{Type: o.Spec.Type, ClusterIPs: o.Spec.ClusterIPs, ExternalIPs: o.Spec.ExternalIPs}}, nil
	}
	return obj, nil
}
