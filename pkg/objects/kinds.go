package objects

import (
	"slices"
	"strings"
	"unique"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/lodestone-lb/lodestone/pkg/annotation"
	"github.com/lodestone-lb/lodestone/pkg/compat"
	"github.com/lodestone-lb/lodestone/pkg/config"
)

// The bounds. Of a list one more than the bound is kept, so that a reader sees that there were
// more.
const (
	// MaxLabels and maxLabelBytes bound the labels of a Service or a namespace. The first ones
	// by name count.
	MaxLabels     = 32
	maxLabelBytes = 2 << 10
	// tooManyLabels is the number from which on no label counts. Nobody needs so many, and it
	// takes long to read them.
	tooManyLabels = 1024
	// maxNodeLabels and maxNodeLabelBytes bound those of a Node, on which feature
	// discovery writes a hundred and more.
	maxNodeLabels     = 512
	maxNodeLabelBytes = 32 << 10
	// maxAnnotationBytes bounds the annotations of a Service that are read, all
	// together.
	maxAnnotationBytes = 4 << 10
	// MaxPorts is how many ports of a Service count.
	MaxPorts = 64
	// MaxAddresses is how many addresses of a Service count, in its status and in
	// its spec.
	MaxAddresses = config.MaxServiceAddresses
	// maxSelectors and maxSelectorBytes bound the selector of a Service.
	maxSelectors     = 32
	maxSelectorBytes = 1 << 10
	// MaxMessage bounds the message of a Service's condition.
	MaxMessage = 1 << 10
	// maxText bounds what else is text.
	maxText = 256
	// maxEndpoints is the API server's own bound on the endpoints of a slice.
	maxEndpoints = 1000
	// maxNodeAddresses, maxTaints and maxConditions bound what a kubelet writes.
	maxNodeAddresses = 16
	maxTaints        = 64
	maxConditions    = 16
	// maxLeaseBytes bounds the annotations of a speaker's Lease, all together.
	maxLeaseBytes = 64 << 10
)

// Services are kept with what allocation and announcement read. Annotations, finalizers and
// conditions of others are not kept.
var Services = Kind[corev1.Service, *corev1.Service]{
	Name: "Services", Resource: "services", rest: core, project: service,
	client: func(c kubernetes.Interface, namespace string) kindClient {
		return untyped(c.CoreV1().Services(namespace))
	},
}

// ServicesFor are Services for a program that serves some of them.
func ServicesFor(ours func(*corev1.Service) bool) Kind[corev1.Service, *corev1.Service] {
	k := Services
	k.project = func(s *corev1.Service) *corev1.Service {
		kept := service(s)
		if ours(s) || len(kept.Finalizers)+len(kept.Status.Conditions) > 0 {
			return kept
		}
		kept.Labels, kept.Spec.Selector, kept.Spec.Ports = nil, nil, nil
		kept.Annotations = annotations(s.Annotations, maxAnnotationBytes,
			[]string{annotation.Ignore, annotation.Assigned, annotation.AssignedPools, annotation.Leases})
		return kept
	}
	return k
}

// Namespaces are kept with their labels.
var Namespaces = Kind[corev1.Namespace, *corev1.Namespace]{
	Name: "Namespaces", Resource: "namespaces", rest: core, project: func(n *corev1.Namespace) *corev1.Namespace {
		kept := &corev1.Namespace{ObjectMeta: Identity(n)}
		kept.Labels = labels(n.Labels, MaxLabels, maxLabelBytes)
		return kept
	},
	client: func(c kubernetes.Interface, _ string) kindClient { return untyped(c.CoreV1().Namespaces()) },
}

// ConfigMaps are kept with their data. Only a few of Lodestone's own namespace are read, by
// name.
var ConfigMaps = Kind[corev1.ConfigMap, *corev1.ConfigMap]{
	Name: "ConfigMaps", Resource: "configmaps", rest: core, project: func(c *corev1.ConfigMap) *corev1.ConfigMap {
		return &corev1.ConfigMap{ObjectMeta: Identity(c), Data: c.Data}
	},
	client: func(c kubernetes.Interface, namespace string) kindClient {
		return untyped(c.CoreV1().ConfigMaps(namespace))
	},
}

// Nodes are kept with what the plan, the sessions and the forbidden addresses are
// made from.
var Nodes = Kind[corev1.Node, *corev1.Node]{
	Name: "Nodes", Resource: "nodes", rest: core, project: node,
	client: func(c kubernetes.Interface, _ string) kindClient { return untyped(c.CoreV1().Nodes()) },
}

// WritableNodes are Nodes for the controllers of the cloud-provider framework. These write
// metadata, spec and the list of addresses back as they were cached, so that all three are whole.
// A kubelet can make its own Node as large as etcd takes it, and no other.
var WritableNodes = func() Kind[corev1.Node, *corev1.Node] {
	k := Nodes
	k.project = writableNode
	return k
}()

// Leases are kept with what speakers report on theirs.
var Leases = Kind[coordinationv1.Lease, *coordinationv1.Lease]{
	Name: "Leases", Resource: "leases", project: lease,
	rest: func(c kubernetes.Interface) rest.Interface { return c.CoordinationV1().RESTClient() },
	client: func(c kubernetes.Interface, namespace string) kindClient {
		return untyped(c.CoordinationV1().Leases(namespace))
	},
}

// Speakers is the scope of the speakers' Leases.
func Speakers(namespace string) Scope {
	return Scope{Namespace: namespace, Labels: annotation.LabelComponent + "=" + annotation.ComponentSpeaker}
}

// EndpointSlices are kept with the nodes of their endpoints. Only those of the API servers are
// kept with addresses.
var EndpointSlices = Kind[discoveryv1.EndpointSlice, *discoveryv1.EndpointSlice]{
	Name: "EndpointSlices", Resource: "endpointslices", project: slice,
	rest: func(c kubernetes.Interface) rest.Interface { return c.DiscoveryV1().RESTClient() },
	client: func(c kubernetes.Interface, namespace string) kindClient {
		return untyped(c.DiscoveryV1().EndpointSlices(namespace))
	},
}

// ServiceCIDRs are an administrator's; API servers before v1.33 have none.
var ServiceCIDRs = Kind[networkingv1.ServiceCIDR, *networkingv1.ServiceCIDR]{
	Name: "ServiceCIDRs", Resource: "servicecidrs", Optional: true, // since Kubernetes v1.33
	project: func(s *networkingv1.ServiceCIDR) *networkingv1.ServiceCIDR {
		kept := &networkingv1.ServiceCIDR{ObjectMeta: Identity(s)}
		kept.Spec.CIDRs = texts(s.Spec.CIDRs, MaxAddresses)
		return kept
	},
	rest:   func(c kubernetes.Interface) rest.Interface { return c.NetworkingV1().RESTClient() },
	client: func(c kubernetes.Interface, _ string) kindClient { return untyped(c.NetworkingV1().ServiceCIDRs()) },
}

// Pods are Lodestone's own, kept with their state.
var Pods = Kind[corev1.Pod, *corev1.Pod]{
	Name: "the Pods of Lodestone", Resource: "pods", rest: core, project: pod,
	client: func(c kubernetes.Interface, namespace string) kindClient { return untyped(c.CoreV1().Pods(namespace)) },
}

func core(c kubernetes.Interface) rest.Interface { return c.CoreV1().RESTClient() }

// serviceAnnotations are the annotations of a Service that are read, ours first.
var serviceAnnotations = append(annotation.OfServices(), compat.Annotations()...)

func service(s *corev1.Service) *corev1.Service {
	kept := &corev1.Service{ObjectMeta: Identity(s)}
	kept.Generation, kept.CreationTimestamp, kept.DeletionTimestamp = s.Generation, s.CreationTimestamp, s.DeletionTimestamp
	kept.Labels = labels(s.Labels, MaxLabels, maxLabelBytes)
	kept.Annotations = annotations(s.Annotations, maxAnnotationBytes, serviceAnnotations)
	for _, f := range []string{annotation.Finalizer, annotation.ClassFinalizer} {
		if slices.Contains(s.Finalizers, f) {
			kept.Finalizers = append(kept.Finalizers, f)
		}
	}
	kept.Spec = corev1.ServiceSpec{
		Type: s.Spec.Type, ClusterIP: cut(s.Spec.ClusterIP), ClusterIPs: texts(s.Spec.ClusterIPs, MaxAddresses),
		ExternalIPs: texts(s.Spec.ExternalIPs, MaxAddresses), LoadBalancerIP: cut(s.Spec.LoadBalancerIP),
		LoadBalancerClass: s.Spec.LoadBalancerClass,
		IPFamilyPolicy:    s.Spec.IPFamilyPolicy, IPFamilies: head(s.Spec.IPFamilies, MaxAddresses), SessionAffinity: s.Spec.SessionAffinity,
		ExternalTrafficPolicy: s.Spec.ExternalTrafficPolicy,
		HealthCheckNodePort:   s.Spec.HealthCheckNodePort, // Kubernetes' service controller reads it
	}
	// A selector that is cut would be another selector. Without any, a Service counts as one
	// that selects other pods than all others.
	if some := labels(s.Spec.Selector, maxSelectors, maxSelectorBytes); len(some) == len(s.Spec.Selector) {
		kept.Spec.Selector = some
	}
	for _, p := range head(s.Spec.Ports, MaxPorts) {
		kept.Spec.Ports = append(kept.Spec.Ports, corev1.ServicePort{Protocol: p.Protocol, Port: p.Port, NodePort: p.NodePort})
	}
	for _, in := range head(s.Status.LoadBalancer.Ingress, MaxAddresses) {
		kept.Status.LoadBalancer.Ingress = append(kept.Status.LoadBalancer.Ingress,
			corev1.LoadBalancerIngress{IP: cut(in.IP), Hostname: cut(in.Hostname), IPMode: in.IPMode})
	}
	if found := meta.FindStatusCondition(s.Status.Conditions, annotation.ConditionAllocated); found != nil {
		c := *found
		c.Reason, c.Message = cut(c.Reason), Message(c.Message)
		kept.Status.Conditions = []metav1.Condition{c}
	}
	return kept
}

func node(n *corev1.Node) *corev1.Node {
	kept := &corev1.Node{ObjectMeta: Identity(n)}
	kept.CreationTimestamp, kept.DeletionTimestamp = n.CreationTimestamp, n.DeletionTimestamp
	kept.Labels = labels(n.Labels, maxNodeLabels, maxNodeLabelBytes)
	kept.Annotations = annotations(n.Annotations, maxAnnotationBytes,
		[]string{annotation.BGPASN, annotation.BGPRouterID, annotation.BGPSourceAddress})
	kept.Spec = corev1.NodeSpec{PodCIDR: cut(n.Spec.PodCIDR), PodCIDRs: texts(n.Spec.PodCIDRs, MaxAddresses),
		ProviderID: cut(n.Spec.ProviderID), Unschedulable: n.Spec.Unschedulable}
	for _, t := range head(n.Spec.Taints, maxTaints) {
		kept.Spec.Taints = append(kept.Spec.Taints, corev1.Taint{Key: cut(t.Key), Value: cut(t.Value), Effect: t.Effect})
	}
	kept.Status = nodeStatus(&n.Status)
	return kept
}

func writableNode(n *corev1.Node) *corev1.Node {
	meta := n.ObjectMeta
	meta.ManagedFields = nil // nobody changes them by leaving them out
	status := nodeStatus(&n.Status)
	status.Addresses = n.Status.Addresses
	return &corev1.Node{ObjectMeta: meta, Spec: n.Spec, Status: status}
}

func nodeStatus(s *corev1.NodeStatus) (kept corev1.NodeStatus) {
	for _, a := range head(s.Addresses, maxNodeAddresses) {
		kept.Addresses = append(kept.Addresses, corev1.NodeAddress{Type: a.Type, Address: cut(a.Address)})
	}
	// Those that somebody reads come first: programs that add conditions put theirs before the kubelet's.
	for _, read := range []bool{true, false} {
		for _, c := range s.Conditions {
			if read != (c.Type == corev1.NodeReady || c.Type == corev1.NodeNetworkUnavailable) || len(kept.Conditions) > maxConditions {
				continue
			}
			c.LastHeartbeatTime = metav1.Time{} // a kubelet writes it all the time
			c.Type, c.Reason, c.Message = corev1.NodeConditionType(cut(string(c.Type))), cut(c.Reason), cut(c.Message)
			kept.Conditions = append(kept.Conditions, c)
		}
	}
	i := s.NodeInfo
	kept.NodeInfo = corev1.NodeSystemInfo{
		MachineID: cut(i.MachineID), SystemUUID: cut(i.SystemUUID), KernelVersion: cut(i.KernelVersion), OSImage: cut(i.OSImage),
		ContainerRuntimeVersion: cut(i.ContainerRuntimeVersion), KubeletVersion: cut(i.KubeletVersion), Architecture: cut(i.Architecture),
	}
	return kept
}

func lease(l *coordinationv1.Lease) *coordinationv1.Lease {
	kept := &coordinationv1.Lease{ObjectMeta: Identity(l)}
	kept.CreationTimestamp, kept.DeletionTimestamp = l.CreationTimestamp, l.DeletionTimestamp
	if c, ok := l.Labels[annotation.LabelComponent]; ok {
		kept.Labels = map[string]string{annotation.LabelComponent: cut(c)}
	}
	for _, o := range head(l.OwnerReferences, MaxAddresses) {
		kept.OwnerReferences = append(kept.OwnerReferences,
			metav1.OwnerReference{APIVersion: cut(o.APIVersion), Kind: cut(o.Kind), Name: cut(o.Name), UID: o.UID})
	}
	kept.Annotations = annotations(l.Annotations, maxLeaseBytes, []string{annotation.Report})
	// A speaker writes no others, and has to notice if somebody else does.
	kept.Labels, kept.Annotations = andMore(kept.Labels, l.Labels), andMore(kept.Annotations, l.Annotations)
	kept.Finalizers = texts(l.Finalizers, 0)
	kept.Spec.AcquireTime, kept.Spec.RenewTime = l.Spec.AcquireTime, l.Spec.RenewTime // nobody reads the rest
	if h := l.Spec.HolderIdentity; h != nil {
		kept.Spec.HolderIdentity = new(cut(*h))
	}
	return kept
}

// KubernetesService is the name of the API server's own Service.
const KubernetesService = "kubernetes"

func slice(s *discoveryv1.EndpointSlice) *discoveryv1.EndpointSlice {
	kept := &discoveryv1.EndpointSlice{ObjectMeta: Identity(s), AddressType: s.AddressType}
	service, of := s.Labels[discoveryv1.LabelServiceName]
	if of {
		service = cut(service)
		kept.Labels = map[string]string{discoveryv1.LabelServiceName: service}
	}
	api := s.Namespace == metav1.NamespaceDefault && service == KubernetesService
	endpoints := head(s.Endpoints, maxEndpoints-1)
	kept.Endpoints = slices.Grow(kept.Endpoints, len(endpoints))
	for _, e := range endpoints {
		end := discoveryv1.Endpoint{Conditions: discoveryv1.EndpointConditions{Ready: e.Conditions.Ready, Serving: e.Conditions.Serving}}
		if e.NodeName != nil {
			end.NodeName = shared(cut(*e.NodeName))
		}
		if api {
			end.Addresses = texts(e.Addresses, MaxAddresses)
		}
		kept.Endpoints = append(kept.Endpoints, end)
	}
	return kept
}

// shared returns the text, which all who keep it have in memory once: a thousand slices name the same nodes.
func shared(text string) *string {
	handle := unique.Make(text)
	// The handle has to be kept, too: the next one to share gets a copy when nobody has it any more.
	kept := &struct {
		text   string
		handle unique.Handle[string]
	}{handle.Value(), handle}
	return &kept.text
}

func pod(p *corev1.Pod) *corev1.Pod {
	kept := &corev1.Pod{ObjectMeta: Identity(p)}
	kept.CreationTimestamp, kept.DeletionTimestamp = p.CreationTimestamp, p.DeletionTimestamp
	kept.Labels = labels(p.Labels, MaxLabels, maxLabelBytes)
	kept.Spec.NodeName = cut(p.Spec.NodeName)
	kept.Spec.NodeSelector = labels(p.Spec.NodeSelector, MaxLabels, maxLabelBytes)
	for _, t := range head(p.Spec.Tolerations, maxTaints) {
		kept.Spec.Tolerations = append(kept.Spec.Tolerations,
			corev1.Toleration{Key: cut(t.Key), Operator: t.Operator, Value: cut(t.Value), Effect: t.Effect})
	}
	for _, c := range head(p.Spec.Containers, maxConditions) {
		container := corev1.Container{Name: cut(c.Name), Image: shorten(c.Image, MaxMessage)}
		for _, arg := range head(c.Args, MaxPorts) {
			container.Args = append(container.Args, shorten(arg, MaxMessage))
		}
		kept.Spec.Containers = append(kept.Spec.Containers, container)
	}
	kept.Status = corev1.PodStatus{Phase: p.Status.Phase, Reason: cut(p.Status.Reason), Message: Message(p.Status.Message),
		PodIP: cut(p.Status.PodIP), HostIP: cut(p.Status.HostIP), StartTime: p.Status.StartTime}
	for _, c := range head(p.Status.Conditions, maxConditions) {
		kept.Status.Conditions = append(kept.Status.Conditions, corev1.PodCondition{
			Type: corev1.PodConditionType(cut(string(c.Type))), Status: c.Status, LastTransitionTime: c.LastTransitionTime,
			Reason: cut(c.Reason), Message: Message(c.Message)})
	}
	for _, c := range head(p.Status.ContainerStatuses, maxConditions) {
		kept.Status.ContainerStatuses = append(kept.Status.ContainerStatuses,
			corev1.ContainerStatus{Name: cut(c.Name), Ready: c.Ready, Started: c.Started, RestartCount: c.RestartCount, State: state(c.State),
				LastTerminationState: state(c.LastTerminationState),
				Image:                shorten(c.Image, MaxMessage), ImageID: shorten(c.ImageID, MaxMessage)})
	}
	return kept
}

func state(s corev1.ContainerState) corev1.ContainerState {
	if w := s.Waiting; w != nil {
		s.Waiting = &corev1.ContainerStateWaiting{Reason: cut(w.Reason), Message: Message(w.Message)}
	}
	if t := s.Terminated; t != nil {
		ended := *t
		ended.Reason, ended.Message, ended.ContainerID = cut(t.Reason), Message(t.Message), cut(t.ContainerID)
		s.Terminated = &ended
	}
	return s
}

// Identity returns what an informer needs of an object.
func Identity(o metav1.Object) metav1.ObjectMeta {
	return MetaOf(o).full()
}

// labels returns as many labels as the bounds allow, the first by name, so that all readers of
// the object keep the same.
func labels(all map[string]string, number, size int) map[string]string {
	if len(all) == 0 || len(all) > tooManyLabels {
		return nil
	}
	names := make([]string, 0, min(len(all), number))
	for name := range all {
		if len(names) == number && name > names[number-1] {
			continue
		}
		i, _ := slices.BinarySearch(names, name)
		if len(names) == number {
			names = names[:number-1]
		}
		names = slices.Insert(names, i, name)
	}
	kept := make(map[string]string, len(names))
	for _, name := range names {
		if size -= len(name) + len(all[name]); size < 0 {
			break
		}
		kept[name] = all[name]
	}
	return kept
}

// annotations returns those that are read, of no more than size bytes together.
func annotations(all map[string]string, size int, names []string) (kept map[string]string) {
	if len(all) == 0 {
		return nil
	}
	for _, name := range names {
		value, ok := all[name]
		if !ok {
			continue
		}
		if kept == nil {
			kept = map[string]string{}
		}
		kept[name] = shorten(value, size)
		size -= min(size, len(value))
	}
	return kept
}

// andMore returns what is kept of a map, with Cut as a name if there is more.
func andMore(kept, all map[string]string) map[string]string {
	if len(all) == len(kept) {
		return kept
	}
	if kept == nil {
		kept = map[string]string{}
	}
	kept[Cut] = ""
	return kept
}

// Cut ends a text that is not whole. It has no meaning in any value, so that a part is not
// taken for the whole.
const Cut = "…"

// shorten returns the text, or as much of it as the bound allows and Cut.
func shorten(text string, size int) string {
	if len(text) <= size {
		return text
	}
	return strings.ToValidUTF8(text[:size], "") + Cut // a copy: the rest is not kept
}

func cut(text string) string { return shorten(text, maxText) }

// Message returns the message of a condition as it is kept.
func Message(text string) string {
	if len(text) <= MaxMessage {
		return text
	}
	return shorten(text, MaxMessage-len(Cut))
}

// head returns the first items of a list: up to the bound, and one more if there are more.
func head[T any](all []T, bound int) []T { return all[:min(len(all), bound+1)] }

func texts(all []string, bound int) (kept []string) {
	for _, text := range head(all, bound) {
		kept = append(kept, cut(text))
	}
	return kept
}
