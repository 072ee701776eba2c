package speaker

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"reflect"
	"slices"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	coreinformers "k8s.io/client-go/informers/core/v1"
	discoveryinformers "k8s.io/client-go/informers/discovery/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"

	"github.com/lodestone-lb/lodestone/pkg/annotation"
	"github.com/lodestone-lb/lodestone/pkg/kube"
	"github.com/lodestone-lb/lodestone/speaker/plan"
	"github.com/lodestone-lb/lodestone/speaker/snapshot"
)

// byService is the index of EndpointSlices by the key of their Service.
const byService = "service"

// cluster is what the plan needs of the API server's objects. Informers fill
// their stores and note what changed; the loop takes the changes over, each
// Service on its own, so that a flapping endpoint costs one Service's work.
// While the API server is down the stores keep what they have.
type cluster struct {
	services, slices, nodes cache.SharedIndexInformer
	synced                  []cache.InformerSynced
	wake                    chan struct{}

	mu         sync.Mutex
	dirty      map[string]bool // keys of Services
	dirtyNodes bool

	known map[string]plan.Node // owned by the loop
}

// service, slice and node are what the informers' stores keep of the objects.
type service struct {
	metav1.ObjectMeta
	plan.Service
	// unmarked are the addresses in its status, if no annotation says whose they
	// are.
	unmarked []netip.Addr
}

// unmarkedFor is how long the VIPs of a Service are kept that has only lost the
// annotation: who replaces a Service by its manifest takes it away, and the
// controller puts it back at once.
const unmarkedFor = 5 * time.Second

type slice struct {
	metav1.ObjectMeta
	service string
	snapshot.Endpoints
}

type node struct {
	metav1.ObjectMeta
	plan.Node
}

func newCluster(client kubernetes.Interface) (*cluster, error) {
	c := &cluster{
		services: coreinformers.NewFilteredServiceInformer(client, metav1.NamespaceAll, 0, cache.Indexers{}, func(o *metav1.ListOptions) {
			o.FieldSelector = fields.OneTermEqualSelector("spec.type", string(corev1.ServiceTypeLoadBalancer)).String()
		}),
		slices: discoveryinformers.NewEndpointSliceInformer(client, metav1.NamespaceAll, 0, cache.Indexers{
			byService: func(obj any) ([]string, error) { return []string{obj.(*slice).service}, nil },
		}),
		nodes: coreinformers.NewNodeInformer(client, 0, cache.Indexers{}),
		wake:  make(chan struct{}, 1),
		dirty: map[string]bool{}, known: map[string]plan.Node{},
	}
	return c, errors.Join(
		c.follow(c.services, keepService, c.noteService),
		c.follow(c.slices, keepSlice, c.noteSlice),
		c.follow(c.nodes, keepNode, c.noteNode),
	)
}

// follow makes the informer keep only what keep returns, and note what
// changes. Before and after are nil when the object comes and goes.
func (c *cluster) follow(informer cache.SharedIndexInformer, keep cache.TransformFunc, note func(before, after any)) error {
	if err := informer.SetTransform(keep); err != nil {
		return fmt.Errorf("set transform: %w", err)
	}
	handler, err := informer.AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc:    func(obj any) { note(nil, obj) },
		UpdateFunc: note,
		DeleteFunc: func(obj any) {
			if gone, ok := obj.(cache.DeletedFinalStateUnknown); ok {
				obj = gone.Obj
			}
			note(obj, nil)
		},
	})
	if err != nil {
		return fmt.Errorf("add event handler: %w", err)
	}
	c.synced = append(c.synced, handler.HasSynced)
	return nil
}

// run keeps the stores up to date until ctx ends.
func (c *cluster) run(ctx context.Context) {
	var group errgroup.Group
	for _, i := range []cache.SharedIndexInformer{c.services, c.slices, c.nodes} {
		group.Go(func() error { i.RunWithContext(ctx); return nil })
	}
	if cache.WaitForCacheSync(ctx.Done(), c.synced...) {
		c.notify()
	}
	group.Wait() //nolint:errcheck // they return nil
}

func (c *cluster) hasSynced() bool {
	return !slices.ContainsFunc(c.synced, func(synced cache.InformerSynced) bool { return !synced() })
}

func (c *cluster) notify() {
	select {
	case c.wake <- struct{}{}:
	default:
	}
}

func (c *cluster) note(f func()) {
	c.mu.Lock()
	f()
	c.mu.Unlock()
	c.notify()
}

func (c *cluster) noteService(before, after any) {
	b, _ := before.(*service)
	a, _ := after.(*service)
	if a != nil && b != nil && reflect.DeepEqual(a.Service, b.Service) {
		return
	}
	if a == nil {
		a = b
	}
	note := func() { c.note(func() { c.dirty[a.Service.Name] = true }) }
	if b != nil && len(b.VIPs) > 0 && slices.Equal(a.unmarked, b.VIPs) {
		time.AfterFunc(unmarkedFor, note)
		return
	}
	note()
}

func (c *cluster) noteSlice(before, after any) {
	b, a := &slice{}, &slice{}
	if before != nil {
		b = before.(*slice)
	}
	if after != nil {
		a = after.(*slice)
	}
	if a.service == b.service {
		c.noteEndpoints(a.service, b, a)
		return
	}
	c.noteEndpoints(b.service, b, &slice{})
	c.noteEndpoints(a.service, &slice{}, a)
}

// noteEndpoints notes the Service if the plan could care: most slices are of
// Services without a VIP, and policy Cluster asks only whether there are
// endpoints. A Service that begins to care is noted itself, and then the slice
// is in its store already.
func (c *cluster) noteEndpoints(key string, b, a *slice) {
	obj, ok, err := c.services.GetStore().GetByKey(key)
	if err != nil || !ok || len(obj.(*service).VIPs) == 0 {
		return
	}
	same := slices.Equal(a.Ready, b.Ready) && slices.Equal(a.Serving, b.Serving)
	if !obj.(*service).Local {
		same = (len(a.Ready) > 0) == (len(b.Ready) > 0) && (len(a.Serving) > 0) == (len(b.Serving) > 0)
	}
	if !same {
		c.note(func() { c.dirty[key] = true })
	}
}

func (c *cluster) noteNode(before, after any) {
	b, _ := before.(*node)
	a, _ := after.(*node)
	if a != nil && b != nil && equalNode(a.Node, b.Node) {
		return
	}
	c.note(func() { c.dirtyNodes = true })
}

func equalNode(a, b plan.Node) bool {
	return a.Excluded == b.Excluded && a.NetworkUnavailable == b.NetworkUnavailable && maps.Equal(a.Labels, b.Labels) &&
		a.BGP == b.BGP && slices.Equal(a.Addresses, b.Addresses) && slices.Equal(a.PodCIDRs, b.PodCIDRs) && a.Created.Equal(b.Created)
}

// refresh hands the Services that changed to put, and reports whether the
// nodes changed.
func (c *cluster) refresh(put func(plan.Service)) bool {
	c.mu.Lock()
	dirty, dirtyNodes := c.dirty, c.dirtyNodes
	c.dirty, c.dirtyNodes = map[string]bool{}, false
	c.mu.Unlock()

	for key := range dirty {
		put(c.derive(key))
	}
	if !dirtyNodes {
		return false
	}
	before := c.known
	c.known = map[string]plan.Node{}
	for _, obj := range c.nodes.GetStore().List() {
		c.known[obj.(*node).Name] = obj.(*node).Node
	}
	return !maps.EqualFunc(c.known, before, equalNode)
}

// derive returns the plan's view of the Service of that key, without VIPs when
// there is none.
func (c *cluster) derive(key string) plan.Service {
	obj, ok, err := c.services.GetStore().GetByKey(key)
	if err != nil || !ok || len(obj.(*service).VIPs) == 0 {
		return plan.Service{Name: key}
	}
	s := obj.(*service).Service
	objs, err := c.slices.GetIndexer().ByIndex(byService, key)
	if err != nil {
		return s // the index exists
	}
	all := make([]snapshot.Endpoints, len(objs))
	for i, obj := range objs {
		all[i] = obj.(*slice).Endpoints
	}
	return snapshot.With(s, all...)
}

// keepService, keepSlice and keepNode are given objects that they already saw,
// too: those pass.
func keepService(obj any) (any, error) {
	s, ok := obj.(*corev1.Service)
	if !ok {
		return obj, nil
	}
	kept := &service{ObjectMeta: identity(&s.ObjectMeta), Service: snapshot.Service(s)}
	if _, marked := s.Annotations[annotation.Assigned]; !marked && s.DeletionTimestamp == nil {
		kept.unmarked = kube.StatusAddresses(s)
	}
	return kept, nil
}

func keepSlice(obj any) (any, error) {
	s, ok := obj.(*discoveryv1.EndpointSlice)
	if !ok {
		return obj, nil
	}
	of, endpoints := snapshot.EndpointsOf(s)
	return &slice{identity(&s.ObjectMeta), of, endpoints}, nil
}

func keepNode(obj any) (any, error) {
	n, ok := obj.(*corev1.Node)
	if !ok {
		return obj, nil
	}
	return &node{identity(&n.ObjectMeta), snapshot.Node(n)}, nil
}

func identity(m *metav1.ObjectMeta) metav1.ObjectMeta {
	return metav1.ObjectMeta{Namespace: m.Namespace, Name: m.Name, UID: m.UID, ResourceVersion: m.ResourceVersion}
}
