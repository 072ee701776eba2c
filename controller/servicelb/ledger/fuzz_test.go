package ledger

import (
	"net/netip"
	"strings"
	"testing"
	"unicode/utf8"

	corev1 "k8s.io/api/core/v1"

	"github.com/lodestone-lb/lodestone/ipam"
	"github.com/lodestone-lb/lodestone/pkg/annotation"
	"github.com/lodestone-lb/lodestone/pkg/compat"
	"github.com/lodestone-lb/lodestone/pkg/config"
	"github.com/lodestone-lb/lodestone/pkg/testcost"
)

// FuzzRequestOf: whatever a user writes on a Service is read or refused, with a
// sentence that fits a condition, and harms nobody.
func FuzzRequestOf(f *testing.F) {
	f.Add("lan, dmz", "203.0.113.10,2001:db8::10", "edge", "a,b", "true", "100", "203.0.113.10", "2")
	f.Add("", "fe80::1%eth0", " ", ",", "yes", "1e9", "::ffff:203.0.113.10", "0")
	f.Add("a,,", "203.0.113.10 203.0.113.11", "\xff\xfe", "a b", "", "-1", "lb.example.com", "\x009")
	long := func(item string) string { return strings.Repeat(item, 32<<10/len(item)) }
	f.Add(long("a,"), "", "", long("b,"), "", "", "", "")
	f.Add("", long("203.0.113.10,"), long("k"), long(","), long("true"), long("9"), long("203.0.113.10,"), long("1"))
	f.Fuzz(func(t *testing.T, pools, addresses, key, namespaces, renumber, limit, spec, count string) {
		svc := &corev1.Service{}
		svc.Namespace, svc.Name, svc.UID = "default", "web", "1"
		svc.Spec.LoadBalancerIP = spec
		svc.Annotations = map[string]string{
			annotation.AddressPool: pools, annotation.Addresses: addresses, annotation.SharingKey: key,
			annotation.SharingNamespaces: namespaces, annotation.Renumber: renumber, annotation.ConnectionRateLimit: limit,
			annotation.AddressCount: count,
		}
		var req ipam.Request
		var refusal *ipam.Refusal
		length := len(pools) + len(addresses) + len(key) + len(namespaces) + len(renumber) + len(limit) + len(spec) + len(count)
		testcost.Within(t, "annotations", length, func() { req, refusal = RequestOf(svc, nil, compat.For(nil)) })
		if refusal != nil {
			if refusal.Reason != ipam.InvalidRequest || refusal.Message == "" || len(refusal.Message) > 1024 || !utf8.ValidString(refusal.Message) {
				t.Errorf("refusal %q", refusal)
			}
			return
		}
		if req.Count < 1 || req.Count > ipam.MaxAddresses {
			t.Errorf("count %d", req.Count)
		}
		if len(req.Pools) > maxPools || len(req.Addresses) > ipam.MaxAddresses || req.Sharing != nil &&
			len(req.Sharing.Namespaces) > maxNamespaces {
			t.Errorf("request %+v", req)
		}
		for _, a := range req.Addresses {
			if !a.IsValid() || a.Zone() != "" || a.Is4In6() {
				t.Errorf("address %v", a)
			}
		}
	})
}

// The pools that a Service names for its addresses are bounded, whoever wrote them.
func FuzzAssignedPools(f *testing.F) {
	f.Add("203.0.113.1,2001:db8::1", "lan,lan-v6")
	f.Add(strings.Repeat("203.0.113.1,", 2<<10), strings.Repeat(",", 2<<10))
	f.Fuzz(func(t *testing.T, addresses, pools string) {
		svc := &corev1.Service{}
		svc.Annotations = map[string]string{annotation.Assigned: addresses, annotation.AssignedPools: pools}
		var of map[netip.Addr]string
		testcost.Within(t, "annotations", len(addresses)+len(pools), func() { of = assignedPools(svc) })
		if len(of) > ipam.MaxAddresses {
			t.Errorf("%d addresses", len(of))
		}
		for a, pool := range of {
			if len(pool) > config.MaxName || a.Is4In6() {
				t.Errorf("%s is of %q", a, pool)
			}
		}
	})
}
