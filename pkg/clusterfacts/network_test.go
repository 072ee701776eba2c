package clusterfacts

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"

	"github.com/lodestone-lb/lodestone/pkg/annotation"
)

func TestNetworkAnnotations(t *testing.T) {
	t.Parallel()
	prefixes := func(all ...string) []netip.Prefix {
		parsed := []netip.Prefix{}
		for _, p := range all {
			parsed = append(parsed, netip.MustParsePrefix(p))
		}
		return parsed
	}
	addrs := func(all ...string) []netip.Addr {
		parsed := []netip.Addr{}
		for _, a := range all {
			parsed = append(parsed, netip.MustParseAddr(a))
		}
		return parsed
	}
	for _, tt := range []struct {
		name    string
		network Network
		want    map[string]string
	}{
		{"nothing known", Network{}, map[string]string{}},
		{"none there", Network{Segments: prefixes(), Gateways: addrs()}, report("", "")},
		{"sorted, each once", Network{prefixes("2001:db8::/64", "198.18.0.0/24", "2001:db8::/64"), addrs("2001:db8::1", "198.18.0.1", "198.18.0.1")},
			report("198.18.0.0/24,2001:db8::/64", "198.18.0.1,2001:db8::1")},
		{"what no pool can contain is left out", Network{prefixes("fe80::/64", "198.18.0.9/32", "2001:db8::9/128", "198.18.0.9/24", "10.0.0.0/31"), addrs("fe80::1", "127.0.0.1")},
			report("10.0.0.0/31", "")},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			got := tt.network.Annotations()
			assert.Equal(t, tt.want, got)
			assert.Equal(t, got, ParseNetwork(got).Annotations(), "reading what was written")
		})
	}
}

func TestNetworkIsBounded(t *testing.T) {
	t.Parallel()
	n := Network{}
	for i := range 300 {
		n.Segments = append(n.Segments, netip.PrefixFrom(netip.AddrFrom4([4]byte{10, byte(i / 256), byte(i), 0}), 24))
		n.Gateways = append(n.Gateways, netip.AddrFrom4([4]byte{10, byte(i / 256), byte(i), 1}))
	}
	a := n.Annotations()
	back := ParseNetwork(a)
	assert.Equal(t, n.Segments[:MaxSegments], back.Segments)
	assert.Equal(t, n.Gateways[:MaxGateways], back.Gateways)
	a[annotation.Segments] = fmt.Sprint(a[annotation.Segments], ",192.0.2.0/24")
	a[annotation.Gateways] = fmt.Sprint(a[annotation.Gateways], ",192.0.2.1")
	assert.Equal(t, back, ParseNetwork(a))
	assert.Empty(t, ParseNetwork(report(strings.Repeat("x,", MaxSegments)+"192.0.2.0/24", strings.Repeat(",", MaxGateways)+"192.0.2.1")).Segments,
		"items that are not understood count, too")
}

// Whoever takes over one node may write what it likes into every Lease.
func FuzzParseNetwork(f *testing.F) {
	for _, seed := range [][2]string{
		{"198.18.0.0/24,2001:db8::/64", "198.18.0.1"}, {"", ""}, {",,,", " 1.2.3.4 , "}, {"0.0.0.0/0,::/0", "0.0.0.0,::"},
		{"198.18.0.1/24", "::ffff:198.18.0.1"}, {"fe80::/64", "fe80::1%eth0"}, {"1.2.3.4/33", "1.2.3.4.5"},
		{strings.Repeat("10.0.0.0/8,", 1000), strings.Repeat("9", 10000)}, {"::ffff:10.0.0.0/104", "255.255.255.255"},
	} {
		f.Add(seed[0], seed[1])
	}
	f.Fuzz(func(t *testing.T, segments, gateways string) {
		n := ParseNetwork(report(segments, gateways))
		if len(n.Segments) > MaxSegments || len(n.Gateways) > MaxGateways || n.Segments == nil || n.Gateways == nil {
			t.Fatalf("%d segments, %d gateways", len(n.Segments), len(n.Gateways))
		}
		for _, s := range n.Segments {
			if !s.IsValid() || s != s.Masked() || s.Bits() == 0 || s.IsSingleIP() {
				t.Errorf("segment %v", s)
			}
		}
		for _, g := range n.Gateways {
			if !g.IsValid() || g.Zone() != "" || g.Is4In6() || g.IsUnspecified() || g.IsMulticast() || g.IsLoopback() || g.IsLinkLocalUnicast() {
				t.Errorf("gateway %v", g)
			}
		}
		if again := ParseNetwork(n.Annotations()); fmt.Sprint(again) != fmt.Sprint(n) {
			t.Errorf("%v is read back as %v", n, again)
		}
	})
}
