package servicelb

import (
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"

	"github.com/lodestone-lb/lodestone/ipam"
	"github.com/lodestone-lb/lodestone/pkg/annotation"
)

const (
	// maxQuoted is how much of a value a message repeats.
	maxQuoted = 64
	// maxPools is how many pools a Service may name.
	maxPools = 16
	// maxPoolName is the length of the longest pool name there is.
	maxPoolName = 63
)

// RequestOf reads what the Service asks for. What cannot be read is a refusal
// of this Service and harms no other.
func RequestOf(svc *corev1.Service) (ipam.Request, *ipam.Refusal) {
	req := ipam.Request{
		Owner:      ipam.Owner{UID: string(svc.UID), Name: svc.Namespace + "/" + svc.Name},
		Namespace:  svc.Namespace,
		RequireAll: svc.Spec.IPFamilyPolicy == nil || *svc.Spec.IPFamilyPolicy != corev1.IPFamilyPolicyPreferDualStack,
	}
	for _, f := range svc.Spec.IPFamilies {
		req.Families = append(req.Families, ipam.Family(f))
	}
	if len(req.Families) == 0 {
		req.Families = []ipam.Family{ipam.IPv4}
	}
	var err error
	if req.Pools, err = pools(svc.Annotations[annotation.AddressPool]); err != nil {
		return req, invalid("annotation %s: %v", annotation.AddressPool, err)
	}
	if req.Addresses, err = addresses(svc.Annotations[annotation.Addresses]); err != nil {
		return req, invalid("annotation %s: %v", annotation.Addresses, err)
	}
	if svc.Spec.LoadBalancerIP == "" {
		return req, nil
	}
	inSpec, err := addresses(svc.Spec.LoadBalancerIP)
	switch {
	case err != nil:
		return req, invalid("spec.loadBalancerIP: %v", err)
	case len(req.Addresses) == 0:
		req.Addresses = inSpec
	case !slices.Contains(req.Addresses, inSpec[0]):
		return req, invalid("spec.loadBalancerIP asks for %s, annotation %s for %s: let one of them go, or let them agree",
			inSpec[0], annotation.Addresses, join(req.Addresses))
	}
	return req, nil
}

func invalid(format string, args ...any) *ipam.Refusal {
	return &ipam.Refusal{Reason: ipam.InvalidRequest, Message: fmt.Sprintf(format, args...)}
}

// pools reads a comma-separated list of pool names; empty: no wish.
func pools(list string) ([]string, error) {
	if strings.TrimSpace(list) == "" {
		return nil, nil
	}
	var names []string
	for name := range strings.SplitSeq(list, ",") {
		name = strings.TrimSpace(name)
		switch {
		case name == "" || len(name) > maxPoolName:
			return nil, fmt.Errorf("%s is not the name of a pool", quote(name))
		case len(names) == maxPools:
			return nil, fmt.Errorf("%s names more than %d pools", quote(list), maxPools)
		}
		names = append(names, name)
	}
	return names, nil
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
		if err != nil || a.Zone() != "" {
			return nil, fmt.Errorf("%s is not an IP address", quote(text))
		}
		a = a.Unmap()
		if slices.ContainsFunc(addrs, func(b netip.Addr) bool { return a.Is4() == b.Is4() }) {
			return nil, fmt.Errorf("%s names two addresses of one family", quote(list))
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

// join is the addresses' text form in status order, as in the annotation.
func join(addrs []netip.Addr) string {
	texts := make([]string, len(addrs))
	for i, a := range addrs {
		texts[i] = a.String()
	}
	return strings.Join(texts, ",")
}
