// Package example is an invented cluster of any size with Lodestone in it, in
// memory: what the dashboard is tested, measured and worked at with.
package example

import (
	"context"
	"fmt"
	"net/netip"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes/fake"

	"github.com/lodestone-lb/lodestone/inspect/cluster"
	"github.com/lodestone-lb/lodestone/pkg/annotation"
	"github.com/lodestone-lb/lodestone/pkg/config"
	"github.com/lodestone-lb/lodestone/pkg/kube"
	"github.com/lodestone-lb/lodestone/pkg/report"
	"github.com/lodestone-lb/lodestone/pkg/testapi"
)

// Hostile is a text that no page may take for HTML. It is in the names, labels
// and messages of a cluster with Trouble.
const Hostile = `<img src=x onerror="document.title='owned'">&"'`

// Size is how large a cluster is, and how well it is.
type Size struct {
	Nodes, Services int
	// Trouble has some of everything that can be wrong.
	Trouble bool
}

// document is the configuration. Services draw from lan, and every fourth is announced by BGP.
const document = `apiVersion: lodestone.io/v1alpha1
kind: Config
clusterID: fra1
pools:
  - {name: lan, addresses: [10.64.0.0/17], advertise: [segment]}
  - {name: lan-v6, addresses: ["2001:db8:1::/112"], autoAssign: false, advertise: [segment]}
  - {name: edge, addresses: [198.18.0.0/19], autoAssign: false, advertise: [tor]}
  - {name: old, addresses: [10.64.200.0/29], state: draining, autoAssign: false, advertise: [segment]}
advertisements:
  - {name: segment, layer2: {}}
  - {name: tor, bgp: {peers: [tor-a, tor-b]}}
peers:
  - {name: tor-a, localASN: 64512, peerASN: 64513, address: 172.16.0.1, bfd: {}}
  - {name: tor-b, localASN: 64512, peerASN: 64513, address: 172.16.0.2, bfd: {}}
`

// Place is where Lodestone is in it.
var Place = cluster.Place{Namespace: config.Namespace, ConfigName: config.ConfigMapName, Scope: kube.Scope{Classless: true}}

// Cluster is an invented cluster. Whoever has it may change its objects.
type Cluster struct {
	*fake.Clientset
	size Size
	// began is when it was made.
	began time.Time
}

// New returns a Cluster of the size.
func New(s Size) *Cluster {
	objects := []runtime.Object{
		&corev1.ConfigMap{ObjectMeta: meta(config.Namespace, config.ConfigMapName), Data: map[string]string{config.Key: document}},
		&coordinationv1.Lease{ObjectMeta: meta(config.Namespace, cluster.ElectionLease),
			Spec: coordinationv1.LeaseSpec{HolderIdentity: new("lodestone-controller-7d9f-x2x4q_1"),
				AcquireTime: &metav1.MicroTime{Time: ago(50 * time.Hour)}, RenewTime: &metav1.MicroTime{Time: time.Now()}}},
		pod("controller", NodeName(0), true), pod("controller", NodeName(1), true),
	}
	c := &Cluster{size: s, began: time.Now()}
	for i := range s.Nodes {
		objects = append(objects, node(i), c.lease(i, ""), pod("speaker", NodeName(i), true))
	}
	for i := range s.Services {
		svc := service(i)
		objects = append(objects, svc, c.endpoints(svc, i))
	}
	if s.Trouble {
		objects = append(objects, troubled(s)...)
	}
	c.Clientset = testapi.New(objects...)
	return c
}

// Source returns what follows the cluster.
func (c *Cluster) Source() *cluster.Watcher { return cluster.NewWatcher(c, Place) }

// NodeName is the name of the ith node.
func NodeName(i int) string { return fmt.Sprintf("worker-%02d", i+1) }

// SetSpeaker makes the speaker of the ith node ready, or not.
func (c *Cluster) SetSpeaker(ctx context.Context, i int, ready bool) error {
	p := pod("speaker", NodeName(i), ready)
	p.Status.Conditions[0].LastTransitionTime = metav1.Now()
	_, err := c.CoreV1().Pods(config.Namespace).Update(ctx, p, metav1.UpdateOptions{})
	return err
}

// SetSession has the ith node's session with tor-b go down, for a reason, or come
// back without one.
func (c *Cluster) SetSession(ctx context.Context, i int, reason string) error {
	_, err := c.CoordinationV1().Leases(config.Namespace).Update(ctx, c.lease(i, reason), metav1.UpdateOptions{})
	return err
}

// troubled are objects with which something is wrong.
func troubled(s Size) []runtime.Object {
	waiting := service(s.Services)
	waiting.Name, waiting.Annotations, waiting.Status = "waits", map[string]string{annotation.AddressPool: "nowhere"}, corev1.ServiceStatus{}
	waiting.Status.Conditions = []metav1.Condition{{Type: annotation.ConditionAllocated, Status: metav1.ConditionFalse, Reason: "NoSuchPool",
		Message: `pool "nowhere" does not exist`, LastTransitionTime: metav1.NewTime(ago(20 * time.Minute))}}
	idle := service(s.Services + 1)
	idle.Name = "idle" // without endpoints
	hostile := service(s.Services + 2)
	hostile.Name = Hostile
	hostile.Annotations["example.com/note"] = Hostile
	dead := pod("speaker", Hostile, false)
	crashing := corev1.ContainerState{Waiting: &corev1.ContainerStateWaiting{Reason: Hostile}}
	dead.Status.ContainerStatuses = []corev1.ContainerStatus{{State: crashing}}
	unwell := node(s.Nodes)
	unwell.Name = Hostile
	c := &Cluster{size: s, began: time.Now()}
	report := c.lease(s.Nodes, Hostile)
	report.Name = annotation.SpeakerLeasePrefix + Hostile
	return []runtime.Object{waiting, idle, hostile, dead, unwell, report}
}

// ago is a time that long before now.
func ago(d time.Duration) time.Time { return time.Now().Add(-d) }

func meta(namespace, name string) metav1.ObjectMeta {
	return metav1.ObjectMeta{Namespace: namespace, Name: name, UID: types.UID(namespace + "/" + name),
		CreationTimestamp: metav1.NewTime(ago(90 * 24 * time.Hour))}
}

func node(i int) *corev1.Node {
	address := netip.AddrFrom4([4]byte{10, 64, 250, byte(i)})
	return &corev1.Node{ObjectMeta: meta("", NodeName(i)),
		Status: corev1.NodeStatus{Addresses: []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: address.String()}}}}
}

// lease is the ith node's Lease, by which its session with tor-b is down if there is a reason.
func (c *Cluster) lease(i int, reason string) *coordinationv1.Lease {
	up := c.began.Add(-time.Duration(3+i) * 7 * time.Hour)
	sessions := []report.Session{
		{Peer: "tor-a", Router: netip.MustParseAddr("172.16.0.1"), Established: true, Since: up, BFD: "Up"},
		{Peer: "tor-b", Router: netip.MustParseAddr("172.16.0.2"), Established: true, Since: up, BFD: "Up"},
	}
	if reason != "" {
		sessions[1].Established, sessions[1].Message, sessions[1].BFD, sessions[1].Since = false, reason, "Down", time.Now()
	}
	l := &coordinationv1.Lease{ObjectMeta: meta(config.Namespace, annotation.SpeakerLeasePrefix+NodeName(i))}
	l.Annotations = report.Report{Sessions: sessions, Network: report.Network{Segments: []report.Segment{
		{Subnet: netip.MustParsePrefix("10.64.0.0/16"), Interface: "eth0"}, {Subnet: netip.MustParsePrefix("2001:db8:1::/64"), Interface: "eth0"},
	}}}.Annotations()
	l.Labels = map[string]string{annotation.LabelComponent: annotation.ComponentSpeaker}
	return l
}

func pod(component, node string, ready bool) *corev1.Pod {
	status := corev1.ConditionFalse
	if ready {
		status = corev1.ConditionTrue
	}
	p := &corev1.Pod{ObjectMeta: meta(config.Namespace, "lodestone-"+component+"-"+node)}
	p.Labels = map[string]string{"app.kubernetes.io/name": "lodestone", "app.kubernetes.io/component": component}
	p.Spec = corev1.PodSpec{NodeName: node,
		Containers: []corev1.Container{{Name: component, Image: "ghcr.io/lodestone-lb/lodestone-" + component + ":v0.9.0"}}}
	p.Status = corev1.PodStatus{Phase: corev1.PodRunning,
		Conditions: []corev1.PodCondition{{Type: corev1.PodReady, Status: status, LastTransitionTime: metav1.NewTime(ago(49 * time.Hour))}}}
	return p
}

var teams, apps = []string{"shop", "media", "billing", "search", "observability"},
	[]string{"web", "api", "gateway", "ingest", "cache", "push"}

func service(i int) *corev1.Service {
	n := i / 4
	pool, vip := "lan", netip.AddrFrom4([4]byte{10, 64, byte(i / 200), byte(10 + i%200)})
	switch {
	case i%4 == 3:
		pool, vip = "edge", netip.AddrFrom4([4]byte{198, 18, byte(n / 200), byte(10 + n%200)})
	case i%40 == 5:
		pool, vip = "lan-v6", netip.MustParseAddr(fmt.Sprintf("2001:db8:1::%x", 0x10+n))
	case i == 4:
		pool, vip = "old", netip.MustParseAddr("10.64.200.3")
	}
	family := corev1.IPv4Protocol
	if vip.Is6() {
		family = corev1.IPv6Protocol
	}
	svc := &corev1.Service{ObjectMeta: meta(teams[i%len(teams)], fmt.Sprintf("%s-%04d", apps[i%len(apps)], i))}
	svc.Annotations = map[string]string{annotation.AddressPool: pool, annotation.Assigned: vip.String()}
	svc.Spec = corev1.ServiceSpec{Type: corev1.ServiceTypeLoadBalancer, IPFamilies: []corev1.IPFamily{family},
		Ports: []corev1.ServicePort{{Port: 443, Protocol: corev1.ProtocolTCP}}}
	svc.Status.LoadBalancer.Ingress = []corev1.LoadBalancerIngress{{IP: vip.String(), IPMode: new(corev1.LoadBalancerIPModeVIP)}}
	return svc
}

// endpoints are on up to three nodes.
func (c *Cluster) endpoints(svc *corev1.Service, i int) *discoveryv1.EndpointSlice {
	s := &discoveryv1.EndpointSlice{ObjectMeta: meta(svc.Namespace, svc.Name+"-abcde")}
	s.Labels = map[string]string{discoveryv1.LabelServiceName: svc.Name}
	for k := range min(3, c.size.Nodes) {
		s.Endpoints = append(s.Endpoints,
			discoveryv1.Endpoint{Addresses: []string{"10.244.0.1"}, NodeName: new(NodeName((i + k*k) % c.size.Nodes))})
	}
	return s
}
