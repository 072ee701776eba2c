package speaker

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"sync"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"
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
)

// byService is the index of EndpointSlices by the key of their Service.
const byService = "service"

// taintToBeDeleted marks a node that the cluster autoscaler is about to delete.
const taintToBeDeleted = "ToBeDeletedByClusterAutoscaler"

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
}

type slice struct {
	metav1.ObjectMeta
	service string
	// ready and serving are the nodes of endpoints in that condition, sorted;
	// "" stands for endpoints without a node.
	ready, serving []string
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
	c.note(func() { c.dirty[a.Service.Name] = true })
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
	same := slices.Equal(a.ready, b.ready) && slices.Equal(a.serving, b.serving)
	if !obj.(*service).Local {
		same = (len(a.ready) > 0) == (len(b.ready) > 0) && (len(a.serving) > 0) == (len(b.serving) > 0)
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
	return a.Excluded == b.Excluded && a.NetworkUnavailable == b.NetworkUnavailable && maps.Equal(a.Labels, b.Labels)
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
	ready, serving := map[string]bool{}, map[string]bool{}
	for _, obj := range objs {
		for _, n := range obj.(*slice).ready {
			ready[n] = true
		}
		for _, n := range obj.(*slice).serving {
			serving[n] = true
		}
	}
	if len(ready) == 0 {
		ready = serving // all terminate, or none is ready
	}
	s.Serving = len(ready) > 0
	if s.Local { // nobody asks for the nodes otherwise
		delete(ready, "")
		s.ServingNodes = ready
	}
	return s
}

// keepService, keepSlice and keepNode are given objects that they already saw,
// too: those pass.
func keepService(obj any) (any, error) {
	s, ok := obj.(*corev1.Service)
	if !ok {
		return obj, nil
	}
	kept := plan.Service{
		Name:   s.Namespace + "/" + s.Name,
		Labels: s.Labels,
		VIPs:   kube.VIPs(s),
		Leases: kube.Leases(s),
		Local:  s.Spec.ExternalTrafficPolicy == corev1.ServiceExternalTrafficPolicyLocal,
	}
	if value, ok := s.Annotations[annotation.ConnectionRateLimit]; ok {
		kept.Limit.PerSecond, kept.LimitErr = annotation.ParseConnectionRateLimit(value)
		kept.Limit.Ports = ports(s)
	}
	return &service{identity(&s.ObjectMeta), kept}, nil
}

// ports returns the Service's ports, of the protocols that there are.
func ports(s *corev1.Service) []plan.Port {
	numbers := map[corev1.Protocol]uint8{
		"": unix.IPPROTO_TCP, corev1.ProtocolTCP: unix.IPPROTO_TCP, corev1.ProtocolUDP: unix.IPPROTO_UDP, corev1.ProtocolSCTP: unix.IPPROTO_SCTP,
	}
	var ports []plan.Port
	for _, p := range s.Spec.Ports {
		if number, ok := numbers[p.Protocol]; ok {
			ports = append(ports, plan.Port{Protocol: number, Number: uint16(p.Port)})
		}
	}
	return ports
}

func keepSlice(obj any) (any, error) {
	s, ok := obj.(*discoveryv1.EndpointSlice)
	if !ok {
		return obj, nil
	}
	kept := &slice{ObjectMeta: identity(&s.ObjectMeta)}
	if name := s.Labels[discoveryv1.LabelServiceName]; name != "" {
		kept.service = s.Namespace + "/" + name
	}
	for i := range s.Endpoints {
		e := &s.Endpoints[i]
		name := ""
		if e.NodeName != nil {
			name = *e.NodeName
		}
		// An unknown condition counts as ready; serving is ready that ignores
		// termination.
		ready := e.Conditions.Ready == nil || *e.Conditions.Ready
		if ready {
			kept.ready = append(kept.ready, name)
		}
		if serving := e.Conditions.Serving; serving == nil && ready || serving != nil && *serving {
			kept.serving = append(kept.serving, name)
		}
	}
	kept.ready, kept.serving = sorted(kept.ready), sorted(kept.serving)
	if slices.Equal(kept.ready, kept.serving) {
		kept.serving = kept.ready
	}
	return kept, nil
}

// sorted returns the names without doubles, in no more memory than they need.
func sorted(names []string) []string {
	slices.Sort(names)
	return slices.Clone(slices.Compact(names))
}

func keepNode(obj any) (any, error) {
	n, ok := obj.(*corev1.Node)
	if !ok {
		return obj, nil
	}
	_, excluded := n.Labels[corev1.LabelNodeExcludeBalancers]
	excluded = excluded || slices.ContainsFunc(n.Spec.Taints, func(t corev1.Taint) bool {
		return t.Key == corev1.TaintNodeOutOfService || t.Key == taintToBeDeleted
	})
	kept := &node{identity(&n.ObjectMeta), plan.Node{Labels: n.Labels, Excluded: excluded}}
	for _, c := range n.Status.Conditions {
		if c.Type == corev1.NodeNetworkUnavailable && c.Status == corev1.ConditionTrue {
			kept.NetworkUnavailable = true
		}
	}
	return kept, nil
}

func identity(m *metav1.ObjectMeta) metav1.ObjectMeta {
	return metav1.ObjectMeta{Namespace: m.Namespace, Name: m.Name, UID: m.UID, ResourceVersion: m.ResourceVersion}
}
