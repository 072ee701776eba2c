package bgp

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/lodestone-lb/lodestone/pkg/config"
	"github.com/lodestone-lb/lodestone/pkg/testnet"
	"github.com/lodestone-lb/lodestone/pkg/testnet/router"
	"github.com/lodestone-lb/lodestone/speaker/plan"
)

// known is a path as a router shows it. External peers have none with a
// preference.
type known struct{ nextHop, asPath, preference, med, community, large string }

// start starts a router whose neighbour is the node. It returns a function for
// the router's path to a prefix; false: there is none.
type start func(t testing.TB, host *testnet.Host, asn int, local, node netip.Addr) func(netip.Prefix) (known, bool)

func startFRR(t testing.TB, host *testnet.Host, asn int, _, node netip.Addr) func(netip.Prefix) (known, bool) {
	f := router.NewFRR(t, host, fmt.Sprintf(`
router bgp %[1]d
 bgp router-id 198.18.0.2
 no bgp ebgp-requires-policy
 neighbor %[2]s remote-as %[3]d
 neighbor %[2]s timers connect 1
 address-family ipv6 unicast
  neighbor %[2]s activate
 exit-address-family
`, asn, node, nodeASN))
	return func(prefix netip.Prefix) (k known, ok bool) {
		p := path(f, prefix)
		if p == nil || !p.Valid {
			return k, false
		}
		k = known{nextHop: p.Nexthops[0].IP, asPath: strings.TrimPrefix(p.AsPath.String, "Local"), community: p.Community.String,
			large: p.Large.String}
		if asn == nodeASN {
			k.preference = fmt.Sprint(*p.LocPrf)
		}
		if p.Metric != nil && *p.Metric != 0 {
			k.med = fmt.Sprint(*p.Metric)
		}
		return k, true
	}
}

func startBIRD(t testing.TB, host *testnet.Host, asn int, local, node netip.Addr) func(netip.Prefix) (known, bool) {
	b := router.NewBIRD(t, host, fmt.Sprintf(`
router id 198.18.0.2;
protocol device { scan time 1; }
protocol bgp node {
  local %s as %d;
  neighbor %s as %d;
  connect retry time 1;
  ipv4 { import all; export none; };
  ipv6 { import all; export none; };
}
`, local, asn, node, nodeASN))
	plain := strings.NewReplacer(", ", ":", ",", ":", "(", "", ")", "")
	return func(prefix netip.Prefix) (k known, ok bool) {
		inside := false
		for line := range strings.Lines(b.Ask("show route all")) {
			name, value, _ := strings.Cut(strings.TrimSpace(line), ": ")
			switch {
			case !strings.HasPrefix(line, "\t"):
				inside = strings.HasPrefix(line, prefix.String()+" ")
				ok = ok || inside
			case !inside:
			case name == "BGP.next_hop":
				k.nextHop = value
			case name == "BGP.as_path":
				k.asPath = value
			case name == "BGP.local_pref" && asn == nodeASN:
				k.preference = value
			case name == "BGP.med":
				k.med = value
			case name == "BGP.community":
				k.community = plain.Replace(value)
			case name == "BGP.large_community":
				k.large = plain.Replace(value)
			}
		}
		return k, ok
	}
}

// Routers of both makes get the same, whether they are internal or external,
// over IPv4 and IPv6: routes of both families, with all attributes for such a
// peer.
func TestEverySessionCarriesBothFamilies(t *testing.T) {
	t.Parallel()
	for name, start := range map[string]start{"FRR": startFRR, "BIRD": startBIRD} {
		for kind, asn := range map[string]int{"external": peerASN, "internal": nodeASN} {
			for transport, ends := range map[string][2]netip.Addr{"IPv4": {node4, tor4}, "IPv6": {node6, tor6}} {
				t.Run(fmt.Sprintf("%s, %s, over %s", name, kind, transport), func(t *testing.T) {
					t.Parallel()
					w := newWorld(t, 1)
					knows := start(t, w.tor, asn, ends[1], ends[0])
					w.peer("tor", func(p *config.Peer) { p.Address, p.PeerASN = ends[1], config.ASN{Number: uint32(asn)} })
					w.route(vip4, "tor", plan.Attributes{
						Communities: []config.Community{64512<<16 | 7}, LargeCommunities: []config.LargeCommunity{{GlobalAdmin: 1, Data1: 2, Data2: 3}},
						LocalPreference: new(uint32(200)), MED: new(uint32(9)), Prepend: 1,
					})
					w.route(vip6, "tor", plan.Attributes{})
					want4 := known{nextHop: "198.18.0.1", asPath: "64512 64512", med: "9", community: "64512:7", large: "1:2:3"}
					want6 := known{nextHop: "2001:db8::1", asPath: "64512"}
					if asn == nodeASN {
						want4.asPath, want4.preference, want6.asPath, want6.preference = "", "200", "", "100"
					}
					w.start()
					p := w.up("tor")
					require.Equal(t, []string{"IPv4", "IPv6"}, p.Families)
					require.Contains(t, p.Capabilities, "four-octet AS numbers")
					for prefix, want := range map[netip.Prefix]known{vip4: want4, vip6: want6} {
						w.until("path", func() bool { _, ok := knows(prefix); return ok }, func() any { return w.status("tor") })
						got, _ := knows(prefix)
						require.Equal(t, want, got, prefix)
					}
					delete(w.want.Routes, vip4)
					w.set()
					w.until("withdrawal", func() bool { _, ok := knows(vip4); return !ok }, func() any { got, _ := knows(vip4); return got })
					_, ok := knows(vip6)
					require.True(t, ok)
				})
			}
		}
	}
}

// A router that accepts one family only is sent no other, and the operator sees
// which one is missing.
func TestSessionOfOneFamily(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 1)
	f := w.frr(w.tor, "198.18.0.1", "")
	w.peer("tor", nil)
	w.route(vip4, "tor", plan.Attributes{})
	w.route(vip6, "tor", plan.Attributes{})
	w.start()
	require.Equal(t, []string{"IPv4"}, w.up("tor").Families)
	w.has(f, vip4)
	require.Equal(t, map[Withholding]int{"family_not_negotiated": 1}, w.status("tor").Withheld)

	f.Configure("router bgp 64513", "address-family ipv4 unicast", "no neighbor 198.18.0.1 activate", "exit-address-family",
		"address-family ipv6 unicast", "neighbor 198.18.0.1 activate")
	w.has(f, vip6)
	require.Equal(t, []string{"IPv6"}, w.status("tor").Families)
	require.Equal(t, map[Withholding]int{"family_not_negotiated": 1}, w.status("tor").Withheld)
	require.Nil(t, path(f, vip4))
}
