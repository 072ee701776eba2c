package hostile

import (
	"fmt"
	"strings"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// What a tenant may write, at the bounds that the API server has.
const (
	hostile = "hostile" // the namespace
	// annotationBytes is what an object's annotations may have together.
	annotationBytes = 256 << 10
	smallBytes      = 20 << 10
	// largeBytes is somewhat less than what etcd takes in one request.
	largeBytes = 1200 << 10
	addresses  = 1000
	// reportBytes is what a speaker's Lease may have, by the policy of the chart.
	reportBytes = 64 << 10
)

// alphabets are what values are written in.
var alphabets = []string{"a", "é", "漢", "😀", "\x00", "\u202e", ",", "=", "\"", "\n", "203.0.113.7,", "[", "{\"a\":"}

// read are the annotations of a Service that Lodestone reads. They are spelled out: a test
// of a promise must not change with the code.
var read = []string{
	"lodestone.io/leases", "lodestone.io/assigned-pools", "lodestone.io/sharing-key", "lodestone.io/sharing-namespaces",
	"lodestone.io/addresses", "lodestone.io/address-pool", "lodestone.io/renumber", "lodestone.io/connection-rate-limit",
	"lodestone.io/assigned-addresses",
}

// fill returns a text of that many bytes, or some less.
func text(alphabet string, bytes int) string { return strings.Repeat(alphabet, bytes/len(alphabet)) }

// pairs returns labels of that many bytes in all, as long as names and values may be.
func pairs(bytes int) map[string]string {
	all := map[string]string{}
	for i := 0; bytes >= 126; i++ {
		all[fmt.Sprintf("%s%06d", strings.Repeat("n", 57), i)] = fmt.Sprintf("%s%06d", strings.Repeat("v", 57), i)
		bytes -= 126
	}
	return all
}

// Classes of Services, by their number. Those with an empty class are ours, and so is the
// next; the others are of other controllers, or not balanced at all.
var classes = []string{"", "lodestone.io/lodestone", "example.com/other", clusterIP}

const clusterIP = "ClusterIP"

// service is Service number i with that much in it.
func service(i, bytes int) *corev1.Service {
	class := classes[i%len(classes)]
	s := &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("s-%d-%06d", bytes>>10, i), Namespace: hostile, Annotations: map[string]string{}},
		Spec: corev1.ServiceSpec{
			Type: corev1.ServiceTypeLoadBalancer, AllocateLoadBalancerNodePorts: new(false), Ports: []corev1.ServicePort{{Name: "p", Port: 80}}},
	}
	switch class {
	case "":
	case clusterIP:
		s.Spec.Type, s.Spec.AllocateLoadBalancerNodePorts = corev1.ServiceTypeClusterIP, nil
	default:
		s.Spec.LoadBalancerClass = &class
	}
	if bytes > smallBytes {
		enlarge(s, i/len(classes), bytes)
	} else {
		bloat(s, i/len(classes), bytes)
	}
	return s
}

// bloat fills a small Service with as much of what Lodestone reads as it keeps, and more.
// Every other one asks for nothing that is invalid, and so gets an address.
func bloat(s *corev1.Service, i, bytes int) {
	s.Labels, s.Spec.Selector = pairs(3<<10), pairs(2<<10)
	for p := range 65 {
		s.Spec.Ports = append(s.Spec.Ports, corev1.ServicePort{Name: fmt.Sprint("port-", p), Port: int32(1000 + p)})
	}
	for a := range 64 {
		s.Spec.ExternalIPs = append(s.Spec.ExternalIPs, fmt.Sprintf("192.0.2.%d", a+1))
	}
	names := read[:1]
	if i%2 == 1 {
		names = read
	}
	for n, name := range names {
		s.Annotations[name] = text(alphabets[(i+n)%len(alphabets)], 1<<10)
	}
	s.Annotations["example.com/note"] = text(alphabets[i%len(alphabets)], max(0, bytes-2*s.Size()))
}

// enlarge fills a Service with one thing, as far as the API server takes it.
func enlarge(s *corev1.Service, i, bytes int) {
	s.Annotations[read[i%len(read)]] = text(alphabets[i%len(alphabets)], annotationBytes-(8<<10))
	rest := bytes - annotationBytes
	switch i % 4 {
	case 0:
		s.Spec.Selector = pairs(rest)
	case 1:
		s.Labels = pairs(rest / 2) // the API server notes who wrote each of them
	case 2:
		s.Spec.Selector = pairs(rest - (64 << 10))
		for a := range addresses {
			s.Spec.ExternalIPs = append(s.Spec.ExternalIPs, fmt.Sprintf("192.0.2.%d", a%250+1))
		}
	default:
		for p := range rest / 250 { // who wrote each of them is noted, too
			s.Spec.Ports = append(s.Spec.Ports, corev1.ServicePort{Name: fmt.Sprint("port-", p), Port: int32(1000 + p)})
		}
	}
}

// status is a hostile status of a Service, by somebody who may write statuses.
func status() corev1.ServiceStatus {
	var s corev1.ServiceStatus
	for a := range addresses {
		s.LoadBalancer.Ingress = append(s.LoadBalancer.Ingress, corev1.LoadBalancerIngress{IP: fmt.Sprintf("198.19.%d.%d", 32+a/250, a%250+1)})
	}
	s.Conditions = []metav1.Condition{{Type: "example.com/Long", Status: metav1.ConditionTrue, Reason: "Long", Message: text("é", 32<<10),
		LastTransitionTime: metav1.Now()}}
	return s
}

// slice is an EndpointSlice of 1,000 addresses of a hostile Service, each on a node of its
// own, whose name is as long as may be.
func slice(i int) *discoveryv1.EndpointSlice {
	s := &discoveryv1.EndpointSlice{
		ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("slice-%06d", i), Namespace: hostile,
			Labels: map[string]string{discoveryv1.LabelServiceName: service(i*len(classes), smallBytes).Name}},
		AddressType: discoveryv1.AddressTypeIPv4,
	}
	label := strings.Repeat("n", 60)
	for a := range addresses {
		node := fmt.Sprintf("%s.%s.%s.%d.%d", label, label, label, i, a)
		s.Endpoints = append(s.Endpoints, discoveryv1.Endpoint{Addresses: []string{fmt.Sprintf("10.1.%d.%d", a>>8, a&255)}, NodeName: &node})
	}
	return s
}

// lease is the Lease of a speaker on a node with the longest report there is.
func lease(node *corev1.Node, i int) *coordinationv1.Lease {
	var segments []string
	for n := range 128 {
		segments = append(segments, fmt.Sprintf("%q", fmt.Sprintf("198.18.%d.0/24 eth%d", n, n)))
	}
	report := `{"address": "198.18.0.99:9744", "segments": [` + strings.Join(segments, ", ") + `], "more": "`
	alphabet := []string{"a", "é", "漢", "😀"}[i%4]
	report += text(alphabet, reportBytes-len(report)-2) + `"}`
	return &coordinationv1.Lease{
		ObjectMeta: metav1.ObjectMeta{
			Name: "lodestone-speaker-" + node.Name, Labels: map[string]string{"lodestone.io/component": "speaker"},
			Annotations:     map[string]string{"lodestone.io/report": report},
			OwnerReferences: []metav1.OwnerReference{{APIVersion: "v1", Kind: "Node", Name: node.Name, UID: node.UID}},
		},
		Spec: coordinationv1.LeaseSpec{HolderIdentity: &node.Name},
	}
}
