package speaker

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"hash/maphash"
	"maps"
	"net/netip"
	"reflect"
	"slices"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/fields"
	kruntime "k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"

	"github.com/lodestone-lb/lodestone/pkg/annotation"
	"github.com/lodestone-lb/lodestone/pkg/kube"
	"github.com/lodestone-lb/lodestone/pkg/notify"
	"github.com/lodestone-lb/lodestone/pkg/objects"
	"github.com/lodestone-lb/lodestone/speaker/plan"
	"github.com/lodestone-lb/lodestone/speaker/snapshot"
)

// byService is the index of EndpointSlices by the key of their Service.
const byService = "service"

// cluster keeps what the plan needs of the API server's objects. Informers fill their stores and
// note what changed. The loop takes the changes over, one Service at a time, so that a flapping
// endpoint costs the work of one Service. While the API server is down, the stores keep their objects.
type cluster struct {
	services, slices, nodes cache.SharedIndexInformer
	synced                  []cache.InformerSynced
	wake                    chan struct{}

	seed maphash.Seed // of the hashes of nodes' names

	mu         sync.Mutex
	dirty      map[string]bool // keys of Services
	dirtyNodes bool
	unmarked   map[string]time.Time // until when Services keep their VIPs, by key; see unmarkedFor

	// Owned by the loop.
	known map[string]plan.Node
	names map[uint64]string // of the known nodes, by hash
}

// service, slice and node are what the informers' stores keep of the objects.
type service struct {
	objects.Meta
	plan.Service
	unmarked []netip.Addr // see the function unmarked
}

// unmarkedFor is how long a Service keeps its VIPs after it has lost the annotation, while its status
// still has the addresses. Somebody who replaces a Service by its manifest removes the annotation,
// and the controller sets it again at once.
const unmarkedFor = 5 * time.Second

// slice keeps the nodes of endpoints as the sorted hashes of their names: a node costs 8 bytes,
// whatever name an EndpointSlice has for it. 0 stands for endpoints without a node.
type slice struct {
	objects.Meta
	service        string
	family         discoveryv1.AddressType
	ready, serving []uint64
	notReady       []uint64
}

type node struct {
	objects.Meta
	plan.Node
}

// DeepCopyObject makes them objects. Nobody changes them.
func (s *service) DeepCopyObject() kruntime.Object { return s }
func (s *slice) DeepCopyObject() kruntime.Object   { return s }
func (n *node) DeepCopyObject() kruntime.Object    { return n }

func newCluster(client kubernetes.Interface, scope kube.Scope) (*cluster, error) {
	c := &cluster{
		wake: make(chan struct{}, 1), seed: maphash.MakeSeed(),
		dirty: map[string]bool{}, unmarked: map[string]time.Time{}, known: map[string]plan.Node{}, names: map[uint64]string{},
	}
	balanced := objects.Scope{Fields: fields.OneTermEqualSelector("spec.type", string(corev1.ServiceTypeLoadBalancer)).String()}
	c.services = objects.Informer(objects.Services, client, balanced, services(scope), cache.SharedIndexInformerOptions{})
	c.slices = objects.Informer(objects.EndpointSlices, client, objects.Scope{},
		objects.View[*discoveryv1.EndpointSlice, *slice]{Derive: c.keepSlice}, cache.SharedIndexInformerOptions{
			Indexers: cache.Indexers{byService: func(obj any) ([]string, error) { return []string{obj.(*slice).service}, nil }},
		})
	c.nodes = objects.Informer(objects.Nodes, client, objects.Scope{}, objects.View[*corev1.Node, *node]{Derive: keepNode},
		cache.SharedIndexInformerOptions{})
	return c, errors.Join(follow(c, c.services, c.noteService), follow(c, c.slices, c.noteSlice), follow(c, c.nodes, c.noteNode))
}

// follow calls note for each change of an object of the informer; see objects.Handler.
func follow[T any](c *cluster, informer cache.SharedIndexInformer, note func(before, after *T)) error {
	handler, err := informer.AddEventHandler(objects.Handler(note))
	if err != nil {
		return fmt.Errorf("add event handler: %w", err)
	}
	c.synced = append(c.synced, handler.HasSynced)
	return nil
}

// run keeps the stores up to date until ctx ends.
func (c *cluster) run(ctx context.Context) {
	var group sync.WaitGroup
	for _, i := range []cache.SharedIndexInformer{c.services, c.slices, c.nodes} {
		group.Go(func() { i.RunWithContext(ctx) })
	}
	if cache.WaitForCacheSync(ctx.Done(), c.synced...) {
		notify.Wake(c.wake)
	}
	group.Wait()
}

func (c *cluster) hasSynced() bool {
	return !slices.ContainsFunc(c.synced, func(synced cache.InformerSynced) bool { return !synced() })
}

// noteDirty has the loop derive the Service anew. A Service that keeps its VIPs is not derived before that time is over.
func (c *cluster) noteDirty(key string) {
	c.mu.Lock()
	c.dirty[key] = true
	c.mu.Unlock()
	notify.Wake(c.wake)
}

func (c *cluster) noteService(before, after *service) {
	named := cmp.Or(after, before)
	key := named.Namespace + "/" + named.Meta.Name
	changed := before != nil && after != nil
	switch {
	case changed && reflect.DeepEqual(after.Service, before.Service):
	case changed && len(before.unmarked) > 0 && slices.Equal(after.unmarked, before.unmarked): // it is derived when that time is over
	case changed && len(before.VIPs) > 0 && slices.Equal(after.unmarked, before.VIPs):
		c.keepUntil(key, time.Now().Add(unmarkedFor))
		time.AfterFunc(unmarkedFor, func() { c.noteDirty(key) })
	default:
		c.keepUntil(key, time.Time{})
		c.noteDirty(key)
	}
}

// keepUntil has a Service keep its VIPs until then, whatever changes; zero: no longer.
func (c *cluster) keepUntil(key string, until time.Time) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if until.IsZero() {
		delete(c.unmarked, key)
	} else {
		c.unmarked[key] = until
	}
}

func (c *cluster) noteSlice(before, after *slice) {
	b, a := cmp.Or(before, &slice{}), cmp.Or(after, &slice{})
	if a.service == b.service {
		c.noteEndpoints(a.service, b, a)
		return
	}
	c.noteEndpoints(b.service, b, &slice{})
	c.noteEndpoints(a.service, &slice{}, a)
}

// noteEndpoints notes the Service if the plan may change with its endpoints: most slices belong to
// Services without a VIP, and with policy Cluster it counts only whether there are endpoints. When
// a Service itself changes so that endpoints count, the loop finds the slice in its store.
func (c *cluster) noteEndpoints(key string, b, a *slice) {
	obj, ok, err := c.services.GetStore().GetByKey(key)
	if err != nil || !ok || len(obj.(*service).VIPs) == 0 {
		return
	}
	same := slices.Equal(a.ready, b.ready) && slices.Equal(a.serving, b.serving) && slices.Equal(a.notReady, b.notReady)
	if !obj.(*service).Local {
		same = (len(a.ready) > 0) == (len(b.ready) > 0) && (len(a.serving) > 0) == (len(b.serving) > 0)
	}
	if !same {
		c.noteDirty(key)
	}
}

func (c *cluster) noteNode(before, after *node) {
	if before != nil && after != nil && equalNode(after.Node, before.Node) {
		return
	}
	c.mu.Lock()
	c.dirtyNodes = true
	c.mu.Unlock()
	notify.Wake(c.wake)
}

func equalNode(a, b plan.Node) bool {
	return a.Labelled == b.Labelled && a.Leaving == b.Leaving && a.NetworkUnavailable == b.NetworkUnavailable &&
		slices.Equal(a.Taints, b.Taints) && maps.Equal(a.Labels, b.Labels) && a.BGP == b.BGP && slices.Equal(a.Addresses, b.Addresses) &&
		slices.Equal(a.PodCIDRs, b.PodCIDRs) && a.Created.Equal(b.Created)
}

// refresh calls put for each Service that changed, and reports whether the nodes changed.
func (c *cluster) refresh(put func(plan.Service)) bool {
	c.mu.Lock()
	dirty, dirtyNodes := c.dirty, c.dirtyNodes
	c.dirty, c.dirtyNodes = map[string]bool{}, false
	for key := range dirty {
		if time.Now().Before(c.unmarked[key]) {
			delete(dirty, key) // it is noted again when that time is over
		} else {
			delete(c.unmarked, key)
		}
	}
	c.mu.Unlock()

	changed := dirtyNodes && c.learnNodes(dirty)
	for key := range dirty {
		put(c.derive(key))
	}
	return changed
}

// learnNodes takes the nodes over and reports whether they changed. When a node comes or goes, it
// marks all Services with policy Local as dirty.
func (c *cluster) learnNodes(dirty map[string]bool) bool {
	before := c.known
	c.known = map[string]plan.Node{}
	for _, obj := range c.nodes.GetStore().List() {
		c.known[obj.(*node).Name] = obj.(*node).Node
	}
	same := func(plan.Node, plan.Node) bool { return true }
	if !maps.EqualFunc(c.known, before, same) {
		c.names = map[uint64]string{}
		for name := range c.known {
			c.names[c.hash(name)] = name
		}
		for _, obj := range c.services.GetStore().List() {
			if s := obj.(*service); s.Local && len(s.VIPs) > 0 {
				dirty[s.Service.Name] = true
			}
		}
	}
	return !maps.EqualFunc(c.known, before, equalNode)
}

// derive returns the Service as the plan needs it. A Service that does not exist has no VIPs.
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
		of := obj.(*slice)
		all[i] = snapshot.Endpoints{Family: of.family, Ready: c.named(of.ready), Serving: c.named(of.serving),
			NotReady: c.named(of.notReady)}
	}
	return snapshot.With(s, all...)
}

// named returns the names of the nodes. Endpoints on an unknown node count as endpoints without a node.
func (c *cluster) named(nodes []uint64) []string {
	names := make([]string, len(nodes))
	for i, n := range nodes {
		names[i] = c.names[n]
	}
	return names
}

// hash returns the hash of a node's name.
func (c *cluster) hash(name string) uint64 {
	if name == "" {
		return 0
	}
	return maphash.String(c.seed, name)
}

// services is the view of the Services. It keeps our Services that have VIPs, or had them until
// somebody removed the annotation.
func services(scope kube.Scope) objects.View[*corev1.Service, *service] {
	return objects.View[*corev1.Service, *service]{
		Keep: func(s *corev1.Service) bool {
			return scope.Announces(s) && (len(kube.VIPs(s)) > 0 || len(unmarked(s)) > 0)
		},
		Derive: func(s *corev1.Service) *service {
			return &service{Meta: objects.MetaOf(s), Service: snapshot.Service(s, scope), unmarked: unmarked(s)}
		},
	}
}

// unmarked returns the addresses in the status of a Service without the annotation.
func unmarked(s *corev1.Service) []netip.Addr {
	if _, marked := s.Annotations[annotation.Assigned]; marked || s.DeletionTimestamp != nil {
		return nil
	}
	return kube.StatusAddresses(s)
}

func (c *cluster) keepSlice(s *discoveryv1.EndpointSlice) *slice {
	of, endpoints := snapshot.EndpointsOf(s)
	kept := &slice{Meta: objects.MetaOf(s), service: of, family: endpoints.Family, ready: c.hashes(endpoints.Ready),
		notReady: c.hashes(endpoints.NotReady)}
	if kept.serving = kept.ready; !slices.Equal(endpoints.Ready, endpoints.Serving) {
		kept.serving = c.hashes(endpoints.Serving)
	}
	return kept
}

func (c *cluster) hashes(names []string) []uint64 {
	all := make([]uint64, len(names))
	for i, name := range names {
		all[i] = c.hash(name)
	}
	slices.Sort(all)
	return all
}

func keepNode(n *corev1.Node) *node {
	return &node{objects.MetaOf(n), snapshot.Node(n)}
}
