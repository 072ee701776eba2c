package provider

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	cloudproviderapi "k8s.io/cloud-provider/api"

	"github.com/lodestone-lb/lodestone/pkg/testcost"
)

func provided(texts string) *corev1.Node {
	n := &corev1.Node{}
	n.Name, n.Annotations = "n1", map[string]string{cloudproviderapi.AnnotationAlphaProvidedIPAddr: texts}
	return n
}

// A kubelet can make its annotation as long as the API server takes it.
func FuzzAddressesOf(f *testing.F) {
	var long strings.Builder
	for i := range 20_000 {
		fmt.Fprintf(&long, "10.0.%d.%d,", i/256, i%256)
	}
	f.Add("198.18.0.1,2001:db8::1", "198.18.0.1")
	f.Add(" 198.18.0.1, ::ffff:198.18.0.1,fe80::1%eth0,,", "::ffff:198.18.0.1")
	f.Add(long.String(), "10.0.0.1")
	f.Fuzz(func(t *testing.T, texts, address string) {
		n := provided(texts)
		n.Status.Addresses = []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: address}}
		var addresses []corev1.NodeAddress
		testcost.Within(t, "an annotation", len(texts)+len(address), func() { addresses = addressesOf(n) })
		require.Equal(t, n.Status.Addresses, addresses[:1])
		require.Equal(t, corev1.NodeAddress{Type: corev1.NodeHostName, Address: "n1"}, addresses[len(addresses)-1])
		require.LessOrEqual(t, len(addresses), 1+maxProvided+1)
		for _, a := range addresses[1 : len(addresses)-1] {
			_, err := netip.ParseAddr(a.Address)
			require.NoError(t, err)
		}
	})
}

// What a speaker names as routed is compared as a prefix.
func FuzzHas(f *testing.F) {
	f.Add("10.244.1.0/24")
	f.Add("10.244.1.7/24")
	f.Add("::ffff:10.244.1.0/120")
	of := reported{known: true, cidrs: []netip.Prefix{netip.MustParsePrefix("10.244.1.0/24")}}
	f.Fuzz(func(t *testing.T, cidr string) {
		p, err := netip.ParsePrefix(cidr)
		require.Equal(t, err == nil && p.Masked() == of.cidrs[0], of.has(cidr))
	})
}
