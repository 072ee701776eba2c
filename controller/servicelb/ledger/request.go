package ledger

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/labels"

	"github.com/lodestone-lb/lodestone/ipam"
	"github.com/lodestone-lb/lodestone/pkg/annotation"
	"github.com/lodestone-lb/lodestone/pkg/compat"
	"github.com/lodestone-lb/lodestone/pkg/config"
	"github.com/lodestone-lb/lodestone/pkg/kube"
	"github.com/lodestone-lb/lodestone/pkg/objects"
)

const (
	// maxQuoted is how much of a value a message repeats.
	maxQuoted = 64
	// maxPools is how many pools a Service may name.
	maxPools = 16
	// maxKey is the length of the longest sharing key.
	maxKey = 253
	// maxNamespaces is how many namespaces a Service may share with.
	maxNamespaces = 64
)

// RequestOf reads what the Service asks for from our annotations and those of the dialects. It
// begins with the sharing terms. An annotation that cannot be read makes a refusal for this
// Service and affects no other.
func RequestOf(svc *corev1.Service, namespaceLabels map[string]string, dialects compat.Dialects) (ipam.Request, *ipam.Refusal) {
	req := ipam.Request{
		Owner:      ipam.Owner{UID: string(svc.UID), Name: NameOf(svc)},
		Subject:    config.Subject{Namespace: svc.Namespace, NamespaceLabels: namespaceLabels, Labels: svc.Labels},
		RequireAll: svc.Spec.IPFamilyPolicy == nil || *svc.Spec.IPFamilyPolicy != corev1.IPFamilyPolicyPreferDualStack,
	}
	for _, f := range svc.Spec.IPFamilies {
		req.Families = append(req.Families, ipam.Family(f))
	}
	if len(req.Families) == 0 {
		req.Families = []ipam.Family{ipam.IPv4}
	}
	wishes, contradiction := dialects.Read(svc)
	for _, err := range []error{
		readSharing(svc, wishes.SharingKey, &req), contradiction, readPools(wishes.Pools, &req), readAddresses(wishes, &req),
		readCount(svc, &req), readRenumber(svc, &req), checkLimit(svc), checkIgnore(svc),
	} {
		if err != nil {
			return req, &ipam.Refusal{Reason: ipam.InvalidRequest, Message: err.Error()}
		}
	}
	return req, nil
}

func readPools(wish compat.Wish, req *ipam.Request) error {
	pools, err := names(wish.Text, "pool", maxPools)
	if err == nil {
		req.Pools = pools
	}
	return in(wish.Annotation, err)
}

func readAddresses(wishes compat.Wishes, req *ipam.Request) (err error) {
	if req.Addresses, err = addresses(wishes.Addresses.Text); err != nil {
		return in(wishes.Addresses.Annotation, err)
	}
	if wishes.LoadBalancerIP == "" {
		return nil
	}
	inSpec, err := addresses(wishes.LoadBalancerIP)
	switch {
	case err != nil:
		return fmt.Errorf("spec.loadBalancerIP: %w", err)
	case len(inSpec) != 1:
		return fmt.Errorf("spec.loadBalancerIP: %s is not one address: annotation %s takes several", quote(wishes.LoadBalancerIP),
			annotation.Addresses)
	case len(req.Addresses) == 0:
		req.Addresses = inSpec
	case !slices.Contains(req.Addresses, inSpec[0]):
		return fmt.Errorf("spec.loadBalancerIP asks for %s, annotation %s for %s: let one of them go, or let them agree",
			inSpec[0], wishes.Addresses.Annotation, kube.JoinAddrs(req.Addresses))
	}
	return nil
}

func readCount(svc *corev1.Service, req *ipam.Request) (err error) {
	if value, ok := svc.Annotations[annotation.AddressCount]; ok {
		req.Count, err = annotation.ParseAddressCount(value)
	}
	return err
}

// readSharing reads the terms on which the Service shares its addresses. Of the namespaces it
// takes those that can be read, because a mistake in one must not end the sharing with the
// others.
func readSharing(svc *corev1.Service, wish compat.Wish, req *ipam.Request) error {
	key := wish.Text
	others, err := names(svc.Annotations[annotation.SharingNamespaces], "namespace", maxNamespaces)
	switch {
	case len(key) > maxKey:
		return in(wish.Annotation, fmt.Errorf("%s is longer than %d bytes", quote(key), maxKey))
	case key != "" && len(svc.Spec.Ports) > objects.MaxPorts:
		return in(wish.Annotation, fmt.Errorf("a Service that shares its address has at most %d ports, and this one has more: split it",
			objects.MaxPorts))
	case key != "":
		req.Sharing = &ipam.Sharing{Key: key, Ports: portsOf(svc), Backends: backendsOf(svc), Namespaces: others}
	}
	return in(annotation.SharingNamespaces, err)
}

func portsOf(svc *corev1.Service) []ipam.Port {
	ports := make([]ipam.Port, len(svc.Spec.Ports))
	for i, p := range svc.Spec.Ports {
		ports[i] = ipam.Port{Protocol: string(cmp.Or(p.Protocol, corev1.ProtocolTCP)), Number: uint16(p.Port)}
	}
	return ports
}

// backendsOf returns a name for the set of pods that must be on the node that answers for the
// address. Under the policy Local these are the pods that the Service selects, or, without a
// selector, the endpoints that somebody else writes for it.
func backendsOf(svc *corev1.Service) string {
	switch {
	case svc.Spec.ExternalTrafficPolicy != corev1.ServiceExternalTrafficPolicyLocal:
		return ""
	case len(svc.Spec.Selector) == 0:
		return "the endpoints of " + NameOf(svc)
	default:
		return "pods of " + svc.Namespace + " with " + labels.FormatLabels(svc.Spec.Selector)
	}
}

func readRenumber(svc *corev1.Service, req *ipam.Request) error {
	switch value, ok := svc.Annotations[annotation.Renumber]; {
	case !ok:
		return nil
	case value != annotation.Renumbering:
		return in(annotation.Renumber, fmt.Errorf("%s is not %q", quote(value), annotation.Renumbering))
	}
	req.Renumber = true
	return nil
}

// checkLimit reads the annotation that the speakers will read, so that a mistake is reported
// on the Service.
func checkLimit(svc *corev1.Service) error {
	_, err := kube.ConnectionRateLimit(svc)
	return err
}

// checkIgnore finds the annotation with a value that does not leave the Service to others.
func checkIgnore(svc *corev1.Service) error {
	if value, ok := svc.Annotations[annotation.Ignore]; ok {
		return in(annotation.Ignore, fmt.Errorf("%s is not %q", quote(value), annotation.Ignored))
	}
	return nil
}

// in adds to an error the annotation that it is about.
func in(annotation string, err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("annotation %s: %w", annotation, err)
}

// names reads a comma-separated list of names, which may be empty. Besides the first error it
// returns the names that can be read.
func names(list, what string, limit int) (names []string, err error) {
	if strings.TrimSpace(list) == "" {
		return nil, nil
	}
	for name := range strings.SplitSeq(list, ",") {
		name = strings.TrimSpace(name)
		switch {
		case name != "" && len(name) <= config.MaxName && len(names) < limit:
			names = append(names, name)
		case err != nil: // there is one to correct already
		case len(names) == limit:
			err = fmt.Errorf("%s names more than %d %ss", quote(list), limit, what)
		default:
			err = fmt.Errorf("%s is not the name of a %s", quote(name), what)
		}
	}
	return names, err
}

// addresses reads a comma-separated list of addresses; empty: no wish.
func addresses(list string) ([]netip.Addr, error) {
	if strings.TrimSpace(list) == "" {
		return nil, nil
	}
	var addrs []netip.Addr
	for text := range strings.SplitSeq(list, ",") {
		text = strings.TrimSpace(text)
		a, err := netip.ParseAddr(text)
		switch a = a.Unmap(); {
		case err != nil || a.Zone() != "":
			return nil, fmt.Errorf("%s is not an IP address", quote(text))
		case slices.Contains(addrs, a):
			return nil, fmt.Errorf("%s names %s twice", quote(list), a)
		case len(addrs) == ipam.MaxAddresses:
			return nil, fmt.Errorf("%s names more than %d addresses", quote(list), ipam.MaxAddresses)
		}
		addrs = append(addrs, a)
	}
	return addrs, nil
}

// quote quotes what a user wrote, or as much of it as helps.
func quote(text string) string {
	if len(text) > maxQuoted {
		return strconv.Quote(strings.ToValidUTF8(text[:maxQuoted], "")) + "..."
	}
	return strconv.Quote(text)
}
