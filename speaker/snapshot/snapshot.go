// Package snapshot derives the input of the plan from the API server's objects. It is pure: speakers, which
// watch the objects, and the CLI, which lists them, get the same snapshot.
package snapshot

import (
	"hash/fnv"
	"maps"
	"net/netip"
	"reflect"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"

	"github.com/lodestone-lb/lodestone/pkg/annotation"
	"github.com/lodestone-lb/lodestone/pkg/kube"
	"github.com/lodestone-lb/lodestone/speaker/plan"
)

// taintToBeDeleted marks a node that the cluster autoscaler is about to delete.
const taintToBeDeleted = "ToBeDeletedByClusterAutoscaler"

// nodeTaints is the prefix of the taints that Kubernetes sets itself. The configuration can name only one of them.
const nodeTaints = "node.kubernetes.io/"

// protocols are the numbers in the IP header (RFC 5237) of the protocols of a Service's port.
var protocols = map[corev1.Protocol]uint8{"": 6, corev1.ProtocolTCP: 6, corev1.ProtocolUDP: 17, corev1.ProtocolSCTP: 132}

// Service returns the Service without its endpoints. If it is not Lodestone's, it has no VIPs.
func Service(s *corev1.Service, scope kube.Scope) plan.Service {
	of := plan.Service{Name: s.Namespace + "/" + s.Name}
	if !scope.Announces(s) {
		return of
	}
	of.Labels, of.VIPs, of.Leases = s.Labels, kube.VIPs(s), kube.Leases(s)
	of.Local = s.Spec.ExternalTrafficPolicy == corev1.ServiceExternalTrafficPolicyLocal
	of.ByClient, of.Seed = s.Spec.SessionAffinity == corev1.ServiceAffinityClientIP, seed(string(s.UID))
	for _, p := range kube.Ports(s) {
		if protocols[p.Protocol] == protocols[corev1.ProtocolTCP] {
			of.Ports = append(of.Ports, plan.Port{Protocol: protocols[p.Protocol], Number: uint16(p.Port)})
		}
	}
	if of.Limit.PerSecond, of.LimitErr = kube.ConnectionRateLimit(s); of.Limit.PerSecond > 0 {
		for _, p := range s.Spec.Ports {
			if number, ok := protocols[p.Protocol]; ok {
				of.Limit.Ports = append(of.Limit.Ports, plan.Port{Protocol: number, Number: uint16(p.Port)})
			}
		}
	}
	return of
}

// seed returns a number that is derived from the UID, which clients do not know.
func seed(uid string) uint32 {
	h := fnv.New32a()
	h.Write([]byte(uid))
	return h.Sum32()
}

// Endpoints has the nodes of endpoints: sorted names, once for each endpoint; "" stands for an endpoint
// without a node.
type Endpoints struct {
	// Family is the family of the addresses. Empty: both.
	Family discoveryv1.AddressType
	// Ready endpoints take traffic. Serving ones take it if none is ready: they terminate, but still
	// answer.
	Ready, Serving []string
	// NotReady endpoints take no new traffic, unless they are in Serving.
	NotReady []string
}

// EndpointsOf returns the endpoints of a slice, and "namespace/name" of its Service, empty if it has none.
func EndpointsOf(s *discoveryv1.EndpointSlice) (service string, e Endpoints) {
	if name := s.Labels[discoveryv1.LabelServiceName]; name != "" {
		service = s.Namespace + "/" + name
	}
	e.Family = s.AddressType
	for i := range s.Endpoints {
		endpoint, node := &s.Endpoints[i], ""
		if endpoint.NodeName != nil {
			node = *endpoint.NodeName
		}
		// An unknown condition counts as ready. Serving is like ready, but ignores termination.
		ready := endpoint.Conditions.Ready == nil || *endpoint.Conditions.Ready
		if ready {
			e.Ready = append(e.Ready, node)
		} else {
			e.NotReady = append(e.NotReady, node)
		}
		if serving := endpoint.Conditions.Serving; serving == nil && ready || serving != nil && *serving {
			e.Serving = append(e.Serving, node)
		}
	}
	e.Ready, e.Serving, e.NotReady = sorted(e.Ready), sorted(e.Serving), sorted(e.NotReady)
	if slices.Equal(e.Ready, e.Serving) {
		e.Serving = e.Ready
	}
	return service, e
}

// sorted returns the sorted names, in no more memory than they need.
func sorted(names []string) []string {
	slices.Sort(names)
	return slices.Clone(names)
}

// With returns the Service with the endpoints of all its slices.
func With(s plan.Service, all ...Endpoints) plan.Service {
	at := endpointsAt(discoveryv1.AddressTypeIPv4, s.Local, all)
	s.Serving, s.Backends = at.Serving, at.Backends
	if slices.ContainsFunc(s.VIPs, netip.Addr.Is6) {
		if at6 := endpointsAt(discoveryv1.AddressTypeIPv6, s.Local, all); !reflect.DeepEqual(at, at6) {
			s.IPv6 = &at6
		}
	}
	return s
}

// endpointsAt returns the endpoints of VIPs of the family, because kube-proxy forwards a VIP only to
// endpoints of its own family. A pod has only one family if it is older than the second family of
// its cluster, or if its node has only one.
func endpointsAt(family discoveryv1.AddressType, local bool, parts []Endpoints) (at plan.Endpoints) {
	ready, serving := map[string]int{}, map[string]int{}
	all := map[string]int{}
	for _, e := range parts {
		if e.Family != "" && e.Family != family {
			continue
		}
		for _, n := range e.Ready {
			ready[n]++
			all[n]++
		}
		for _, n := range e.Serving {
			serving[n]++
		}
		for _, n := range e.NotReady {
			all[n]++
		}
	}
	if len(ready) == 0 {
		ready = serving // all terminate, or none is ready
	}
	at.Serving = len(ready) > 0
	if local { // otherwise the nodes are not needed
		delete(all, "")
		at.Backends = slices.Grow(at.Backends, len(all))
		for _, n := range slices.Sorted(maps.Keys(all)) {
			at.Backends = append(at.Backends, plan.Backend{Node: n, Open: ready[n], Draining: all[n] - ready[n]})
		}
	}
	return at
}

// Node returns a node without what its speaker publishes.
func Node(n *corev1.Node) plan.Node {
	of := plan.Node{Labels: n.Labels, BGP: nodeBGP(n.Annotations), PodCIDRs: n.Spec.PodCIDRs, Created: n.CreationTimestamp.Time}
	_, of.Labelled = n.Labels[corev1.LabelNodeExcludeBalancers]
	for _, t := range n.Spec.Taints {
		switch {
		case t.Key == corev1.TaintNodeOutOfService, t.Key == taintToBeDeleted:
			of.Leaving = true
		case t.Key == corev1.TaintNodeUnschedulable, !strings.HasPrefix(t.Key, nodeTaints):
			of.Taints = append(of.Taints, t.Key)
		}
	}
	for _, a := range n.Status.Addresses {
		if addr, err := netip.ParseAddr(a.Address); a.Type == corev1.NodeInternalIP && err == nil {
			of.Addresses = append(of.Addresses, addr.Unmap())
		}
	}
	for _, c := range n.Status.Conditions {
		if c.Type == corev1.NodeNetworkUnavailable && c.Status == corev1.ConditionTrue {
			of.NetworkUnavailable = true
		}
	}
	return of
}

// nodeBGP reads a Node's annotations about BGP.
func nodeBGP(annotations map[string]string) (b plan.NodeBGP) {
	if value, ok := annotations[annotation.BGPASN]; ok {
		b.ASN, b.ASNErr = annotation.ParseBGPASN(value)
	}
	if value, ok := annotations[annotation.BGPRouterID]; ok {
		b.RouterID, b.RouterIDErr = annotation.ParseBGPRouterID(value)
	}
	if value, ok := annotations[annotation.BGPSourceAddress]; ok {
		var addrs []netip.Addr
		addrs, b.SourceErr = annotation.ParseBGPSourceAddress(value)
		for _, a := range addrs {
			if a.Is4() {
				b.Source4 = a
			} else {
				b.Source6 = a
			}
		}
	}
	return b
}
