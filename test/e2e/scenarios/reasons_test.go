package scenarios

import (
	"encoding/json"
	"fmt"
	"reflect"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// whyNot returns the reason of each node that does not announce the VIP, as
// lodestone explain shows it.
func (s *story) whyNot(vip string) (map[string]string, error) {
	out, _, err := s.CLI(s.ctx, "", "explain", "vip", vip, "-o", "json")
	if err != nil {
		return nil, err
	}
	var answer struct {
		Nodes []struct{ Node, Reason string }
	}
	if err := json.NewDecoder(strings.NewReader(out)).Decode(&answer); err != nil {
		return nil, fmt.Errorf("%w: %s", err, out)
	}
	reasons := map[string]string{}
	for _, n := range answer.Nodes {
		reasons[n.Node] = n.Reason
	}
	return reasons, nil
}

// isSilent waits until lodestone explain gives the reason why the node does not
// announce the Service's VIP.
func (s *story) isSilent(service, node, reason string) {
	s.Helper()
	s.eventually(fmt.Sprintf("%s does not announce Service %s: %s", node, service, reason), func() error {
		reasons, err := s.whyNot(addresses(s.get(service))[0])
		if err == nil && reasons[node] != reason {
			err = fmt.Errorf("the reasons are %v", reasons)
		}
		return err
	})
}

// hasEndpoint waits until Kubernetes has an endpoint of the Service that takes traffic. Before that no other reason counts.
func (s *story) hasEndpoint(service string) {
	s.Helper()
	s.eventually("Service "+service+" has an endpoint that takes traffic", func() error {
		list, err := s.Kube.DiscoveryV1().EndpointSlices(s.namespace).List(s.ctx,
			metav1.ListOptions{LabelSelector: discoveryv1.LabelServiceName + "=" + service})
		if err != nil {
			return err
		}
		var endpoints []discoveryv1.Endpoint
		for _, slice := range list.Items {
			endpoints = append(endpoints, slice.Endpoints...)
		}
		for _, endpoint := range endpoints {
			if ready := endpoint.Conditions.Ready; ready == nil || *ready {
				return nil
			}
		}
		pods, err := s.Kube.CoreV1().Pods(s.namespace).List(s.ctx, metav1.ListOptions{})
		if err != nil {
			return err
		}
		var found []string
		for _, pod := range pods.Items {
			found = append(found, fmt.Sprintf("%s on %s: %+v", pod.Name, pod.Spec.NodeName, pod.Status.Conditions))
		}
		return fmt.Errorf("%d EndpointSlices with %+v; the pods are %q", len(list.Items), endpoints, found)
	})
}

// The operator asks why a node does not announce a VIP, and gets each of the reasons.
// Nodes without a machine stand for those with a fault.
func TestEveryNodeReportsWhyItDoesNotAnnounce(t *testing.T) {
	s := begin(t)
	s.config(`
quarantine: 0s
pools:
  - {name: lan, addresses: [198.18.0.200-198.18.0.209], advertise: [lan]}
  - {name: chosen, addresses: [198.18.0.210], autoAssign: false, advertise: [chosen]}
  - {name: preferred, addresses: [198.18.0.211], autoAssign: false, advertise: [preferred]}
  - {name: picky, addresses: [198.18.0.212], autoAssign: false, advertise: [picky]}
  - {name: elsewhere, addresses: [192.0.2.10], autoAssign: false, advertise: [lan]}
  - {name: near, addresses: [198.18.17.0/28], autoAssign: false, advertise: [near]}
  - {name: far, addresses: [198.18.17.16/28], autoAssign: false, advertise: [far]}
advertisements:
  - {name: lan, layer2: {}}
  - {name: chosen, layer2: {nodeSelector: {matchLabels: {kubernetes.io/hostname: n1}}}}
  - {name: preferred, layer2: {preferredNodes: [{weight: 1, nodeSelector: {matchLabels: {kubernetes.io/hostname: n1}}}]}}
  - {name: picky, serviceSelector: {matchLabels: {tier: gold}}, layer2: {}}
  - {name: near, bgp: {peers: [tor]}}
  - {name: far, bgp: {peers: [unnumbered]}}
peers:
  - {name: tor, address: 198.18.0.254, localASN: 64512, peerASN: 64513, nodeSelector: {matchLabels: {kubernetes.io/hostname: n1}}}
  - {name: unnumbered, address: 198.18.0.252, peerASN: 64513}
`)
	s.on(s.ctx, "n1", "ip", "address", "add", "192.0.2.1/24", "dev", "eth0")
	s.afterwards(func() { s.on(s.ctx, "n1", "ip", "address", "delete", "192.0.2.1/24", "dev", "eth0") })
	s.register("spare", nil)
	s.register("excluded", func(n *corev1.Node) { n.Labels[excludeLabel] = "" })
	s.register("offline", func(n *corev1.Node) {
		n.Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeNetworkUnavailable, Status: corev1.ConditionTrue, Reason: "Test"}}
	})
	s.echo(1)
	nobody := func(svc *corev1.Service) { svc.Spec.Selector = map[string]string{"app": "nobody"} }
	for name, options := range map[string][]option{
		"plain": nil, "idle": {nobody}, "local": {localPolicy},
		"chosen": {annotated(poolAnnotation, "chosen")}, "preferred": {annotated(poolAnnotation, "preferred")},
		"picky":     {annotated(poolAnnotation, "picky")},
		"elsewhere": {annotated(poolAnnotation, "elsewhere")}, "near": {annotated(poolAnnotation, "near")},
		"far": {annotated(poolAnnotation, "far")},
	} {
		s.service(name, options...)
	}
	s.allAssigned()
	for _, service := range []string{"plain", "local", "chosen", "preferred", "picky", "elsewhere", "near", "far"} {
		s.hasEndpoint(service)
	}

	s.isSilent("plain", "spare", "SpeakerNotReady")
	s.isSilent("plain", "excluded", "NodeExcluded")
	s.isSilent("plain", "offline", "NetworkUnavailable")
	s.isSilent("idle", "n1", "NoServingEndpoint")
	s.isSilent("chosen", "n2", "NodeNotSelected")
	s.isSilent("preferred", "n2", "LessPreferred")
	s.isSilent("picky", "n1", "ServiceNotSelected")
	s.isSilent("elsewhere", "n2", "NotOnSegment")
	s.isSilent("near", "n2", "NoPeer")
	s.isSilent("far", "n1", "NoSession")
	s.eventually("each node has its reason", func() error {
		counted := map[string]map[string]int{}
		for _, service := range []string{"plain", "local"} {
			reasons, err := s.whyNot(addresses(s.get(service))[0])
			if err != nil {
				return err
			}
			counted[service] = map[string]int{}
			for _, node := range s.Lab.Nodes() {
				counted[service][reasons[node]]++
			}
		}
		if !reflect.DeepEqual(counted, map[string]map[string]int{"plain": {"": 1, "NotOwner": 2}, "local": {"": 1, "NoLocalEndpoint": 2}}) {
			return fmt.Errorf("they are %v", counted)
		}
		return nil
	})

	// The pools' addresses are permitted one after the other.
	s.config(`
quarantine: 0s
pools:
  - {name: near, addresses: [198.18.17.8/29], advertise: [near]}
advertisements:
  - {name: near, bgp: {}}
bgpPermit: [198.18.17.8/29]
peers:
  - {name: tor, address: 198.18.0.254, localASN: 64512, peerASN: 64513}
`)
	s.isSilent("near", "n1", "NotPermitted")
}
