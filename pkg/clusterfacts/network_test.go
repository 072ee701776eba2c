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
	prefixes := func(all ...string) []Segment {
		parsed := []Segment{}
		for _, p := range all {
			parsed = append(parsed, Segment{Subnet: netip.MustParsePrefix(p), Interface: "eth0"})
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
		{"sorted, each once", Network{Segments: prefixes("2001:db8::/64", "198.18.0.0/24", "2001:db8::/64"), Gateways: addrs("2001:db8::1", "198.18.0.1", "198.18.0.1")},
			report("198.18.0.0/24 eth0,2001:db8::/64 eth0", "198.18.0.1,2001:db8::1")},
		{"on several interfaces", Network{Segments: []Segment{
			{Subnet: netip.MustParsePrefix("198.18.0.0/24"), Interface: "eth1", IfNamed: false}, {Subnet: netip.MustParsePrefix("198.18.0.0/24"), Interface: "docker0", IfNamed: true}, {Subnet: netip.MustParsePrefix("198.18.0.0/24"), Interface: "eth0", IfNamed: false},
		}}, map[string]string{annotation.Segments: "198.18.0.0/24 docker0 if-named,198.18.0.0/24 eth0,198.18.0.0/24 eth1"}},
		{"names that a list cannot have", Network{Segments: []Segment{
			{Subnet: netip.MustParsePrefix("198.18.0.0/24"), Interface: "eth0,eth1", IfNamed: false}, {Subnet: netip.MustParsePrefix("198.18.0.0/24"), Interface: "", IfNamed: true}, {Subnet: netip.MustParsePrefix("198.18.0.0/24"), Interface: "longer-than-linux", IfNamed: true},
		}}, map[string]string{annotation.Segments: ""}},
		{"what no pool can contain is left out", Network{Segments: prefixes("fe80::/64", "198.18.0.9/32", "2001:db8::9/128", "198.18.0.9/24", "10.0.0.0/31"), Gateways: addrs("fe80::1", "127.0.0.1")},
			report("10.0.0.0/31 eth0", "")},
		{"a kube-proxy", Network{KubeProxy: true}, map[string]string{annotation.KubeProxy: annotation.KubeProxyAnswers}},
		{"conflicts", Network{Conflicts: []Conflict{
			{netip.MustParseAddr("2001:db8::7"), [6]byte{2, 0, 0, 0, 0, 0xd}, true},
			{netip.MustParseAddr("198.18.0.7"), [6]byte{2, 0, 0, 0, 0, 0xc}, false},
		}}, map[string]string{annotation.Conflicts: "198.18.0.7 02:00:00:00:00:0c withheld,2001:db8::7 02:00:00:00:00:0d announced"}},
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
		n.Segments = append(n.Segments, Segment{Subnet: netip.PrefixFrom(netip.AddrFrom4([4]byte{10, byte(i / 256), byte(i), 0}), 24), Interface: "eth0", IfNamed: i%2 == 0})
		n.Gateways = append(n.Gateways, netip.AddrFrom4([4]byte{10, byte(i / 256), byte(i), 1}))
	}
	a := n.Annotations()
	back := ParseNetwork(a)
	assert.Equal(t, n.Segments[:MaxSegments], back.Segments)
	assert.Equal(t, n.Gateways[:MaxGateways], back.Gateways)
	a[annotation.Segments] = fmt.Sprint(a[annotation.Segments], ",192.0.2.0/24 eth0")
	a[annotation.Gateways] = fmt.Sprint(a[annotation.Gateways], ",192.0.2.1")
	assert.Equal(t, back, ParseNetwork(a))
	assert.Empty(t, ParseNetwork(report(strings.Repeat("x,", MaxSegments)+"192.0.2.0/24 eth0", strings.Repeat(",", MaxGateways)+"192.0.2.1")).Segments,
		"items that are not understood count, too")
}

// FuzzParseConflicts reads what somebody else may have written.
func FuzzParseConflicts(f *testing.F) {
	for _, seed := range []string{
		"", "198.18.0.7 02:00:00:00:00:0c withheld,2001:db8::7 02:00:00:00:00:0d announced", "198.18.0.7", "fe80::1%eth0 02:00:00:00:00:0c withheld",
		"198.18.0.7 02:00:00:00:00:00:00:0c withheld", "198.18.0.7 0200.0000.000c announced", "198.18.0.7 02:00:00:00:00:0c",
		strings.Repeat("198.18.0.7 02:00:00:00:00:0c withheld,", 100_000), strings.Repeat("7", 1<<20),
	} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, text string) {
		n := ParseNetwork(map[string]string{annotation.Conflicts: text})
		if len(n.Conflicts) > MaxConflicts || n.Conflicts == nil {
			t.Fatalf("%d conflicts", len(n.Conflicts))
		}
		for _, c := range n.Conflicts {
			if !isGateway(c.VIP) {
				t.Errorf("conflict %v", c)
			}
		}
		if again := ParseNetwork(n.Annotations()); fmt.Sprint(again) != fmt.Sprint(n) {
			t.Errorf("%v is read back as %v", n, again)
		}
	})
}

// Whoever takes over one node may write what it likes into every Lease.
func FuzzParseNetwork(f *testing.F) {
	for _, seed := range [][2]string{
		{"198.18.0.0/24 eth0,2001:db8::/64 docker0 if-named", "198.18.0.1"}, {"198.18.0.0/24 eth0 if-named if-named,198.18.0.0/24,10.0.0.0/8 eth0 x", ""}, {"", ""}, {",,,", " 1.2.3.4 , "}, {"0.0.0.0/0 eth0,::/0 eth0", "0.0.0.0,::"},
		{"198.18.0.1/24 eth0", "::ffff:198.18.0.1"}, {"fe80::/64 eth0", "fe80::1%eth0"}, {"1.2.3.4/33 eth0", "1.2.3.4.5"},
		{strings.Repeat("10.0.0.0/8 eth0,", 1000), strings.Repeat("9", 10000)}, {"::ffff:10.0.0.0/104 eth0", "255.255.255.255"},
	} {
		f.Add(seed[0], seed[1])
	}
	f.Fuzz(func(t *testing.T, segments, gateways string) {
		n := ParseNetwork(report(segments, gateways))
		if len(n.Segments) > MaxSegments || len(n.Gateways) > MaxGateways || n.Segments == nil || n.Gateways == nil {
			t.Fatalf("%d segments, %d gateways", len(n.Segments), len(n.Gateways))
		}
		for _, s := range n.Segments {
			if !s.Subnet.IsValid() || s.Subnet != s.Subnet.Masked() || s.Interface == "" || len(s.Interface) > maxInterface || s.Subnet.Bits() == 0 || s.Subnet.IsSingleIP() {
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
