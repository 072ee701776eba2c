package migrate

import (
	"encoding/json"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"

	"github.com/lodestone-lb/lodestone/pkg/annotation"
	"github.com/lodestone-lb/lodestone/pkg/compat"
	"github.com/lodestone-lb/lodestone/pkg/config"
)

// Service is one whose annotations have counterparts of ours.
type Service struct {
	Namespace string `json:"namespace"`
	Name      string `json:"name"`
	// Annotations are ours that mean the same as theirs.
	Annotations map[string]string `json:"annotations"`
}

// Command returns the command that gives the Service our annotations.
func (s Service) Command() string {
	args := []string{"kubectl", "-n", s.Namespace, "annotate", "service", s.Name}
	for _, key := range sortedKeys(s.Annotations) {
		args = append(args, key+"="+shell(s.Annotations[key]))
	}
	return strings.Join(args, " ")
}

// shell quotes a word for a POSIX shell, if it needs that.
func shell(word string) string {
	plain := func(r rune) bool {
		return r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' || strings.ContainsRune(".,:/_-", r)
	}
	if word != "" && !strings.ContainsFunc(word, func(r rune) bool { return !plain(r) }) {
		return word
	}
	return "'" + strings.ReplaceAll(word, "'", `'\''`) + "'"
}

// unread are annotations of kube-vip without counterpart, and what to do about each.
var unread = map[string]string{
	"kube-vip.io/ignore": "kube-vip leaves the Service alone, and Lodestone would serve it: annotate it with " +
		"lodestone.io/ignore=true before the configuration is applied",
	"kube-vip.io/egress": "Lodestone does not give connections of pods a VIP as their source: keep kube-vip " +
		"for this Service, or use what the network plugin has",
	"kube-vip.io/serviceInterface": "the interface is chosen by an advertisement: give one the interface and a " +
		"serviceSelector, or the pool's advertise",
	"kube-vip.io/serviceVLAN": "the interface is chosen by an advertisement: create the VLAN's interface on the " +
		"nodes, and name it there",
	"kube-vip.io/loadbalancerHostname": "Lodestone sends the DHCP server no host name of a Service: give the record in " +
		"the DNS the address",
	"kube-vip.io/ddns":                              "Lodestone registers no names: give the record in the DNS the address",
	"kube-vip.io/forwardUPNP":                       "Lodestone opens no ports of gateways by UPnP: forward the port there",
	"kube-vip.io/macvlanName":                       "Lodestone leases addresses without interfaces of their own",
	"kube-vip.io/allow-reconcile-without-endpoints": "Lodestone withdraws the addresses of a Service without endpoints",
	"kube-vip.io/hwaddr": "an address leased by kube-vip ends with it: Lodestone asks as another client, " +
		"and is given another one, unless the DHCP server reserves it",
}

// decisive are those whose loss users would notice.
var decisive = []string{"kube-vip.io/ignore", "kube-vip.io/egress", "kube-vip.io/serviceInterface", "kube-vip.io/serviceVLAN",
	"kube-vip.io/forwardUPNP", "kube-vip.io/hwaddr"}

// service notes what a Service asks of the other load balancer.
func (m *migration) service(o *Object, c config.Compatibility) {
	var svc corev1.Service
	if err := json.Unmarshal(o.JSON, &svc); err != nil {
		field, message := whereOf(err)
		m.errorf(o, field, "%s", message)
		return
	}
	if svc.Spec.Type != corev1.ServiceTypeLoadBalancer {
		return
	}
	if class := svc.Spec.LoadBalancerClass; class != nil && *class != annotation.DefaultClass && !m.classes[*class] {
		if m.classes == nil {
			m.classes = map[string]bool{}
		}
		m.classes[*class] = true
		m.decidef(o, "spec.loadBalancerClass", "Services of the class %s are not Lodestone's, and a class cannot be changed: list it "+
			"in the chart's controller.loadBalancerClasses if they are to be", config.Quote(*class))
	}
	for _, key := range sortedKeys(svc.Annotations) {
		switch remedy, known := unread[key]; {
		case c != config.KubeVIP || !known:
		case slices.Contains(decisive, key):
			m.decidef(o, "metadata.annotations["+key+"]", "%s", remedy)
		default:
			m.notef(o, "metadata.annotations["+key+"]", "%s", remedy)
		}
	}
	m.services = append(m.services, found{o, &svc})
}

// found is a Service and where it was.
type found struct {
	object *Object
	*corev1.Service
}

// translate notes our annotations that mean the same as theirs, as the controller will read
// them.
func (m *migration) translate(f found, c config.Compatibility, dialects compat.Dialects) {
	wishes, err := dialects.Read(f.Service)
	if err != nil {
		m.decidef(f.object, "metadata.annotations", "%s", err)
		wishes.Addresses = compat.Wish{}
	}
	s := Service{Namespace: f.Namespace, Name: f.Name, Annotations: map[string]string{}}
	for key, wish := range map[string]compat.Wish{annotation.AddressPool: wishes.Pools, annotation.Addresses: wishes.Addresses,
		annotation.SharingKey: wishes.SharingKey} {
		if wish.Text != "" && wish.Annotation != key {
			s.Annotations[key] = strings.Join(strings.Fields(wish.Text), " ") // a list over several lines is one line in a command
		}
	}
	if c == config.KubeVIP { // whether it shares is not on the Service
		delete(s.Annotations, annotation.SharingKey)
	}
	if len(s.Annotations) > 0 {
		m.result.Services = append(m.result.Services, s)
	}
}

// decideShared notes that Services share addresses, which only kube-vip's own configuration
// shows.
func (m *migration) decideShared(o *Object, field string) {
	m.notef(o, field, "Services of one namespace that ask for the same addresses (%s) share them while compatibility has kube-vip; "+
		"those of several namespaces need %s and %s",
		compat.KubeVIPAddresses, annotation.SharingKey, annotation.SharingNamespaces)
}
