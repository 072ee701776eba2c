package plan_test

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/lodestone-lb/lodestone/pkg/config"
	"github.com/lodestone-lb/lodestone/speaker/plan"
)

// podNode is a node that came to be in some minute.
func podNode(minute int, cidrs []string, addrs ...string) plan.Node {
	n := plan.Node{PodCIDRs: cidrs, Created: time.Date(2026, 1, 1, 0, minute, 0, 0, time.UTC)}
	for _, a := range addrs {
		n.Addresses = append(n.Addresses, netip.MustParseAddr(a))
	}
	return n
}

func kernelRoutes(cidrs ...string) *config.Config {
	r := &config.Routes{Mode: config.RoutesKernel}
	for _, c := range cidrs {
		r.CIDRs = append(r.CIDRs, netip.MustParsePrefix(c))
	}
	return &config.Config{Routes: r}
}

// threeNodes are a sound cluster.
func threeNodes() map[string]plan.Node {
	nodes := map[string]plan.Node{}
	for i := 1; i <= 3; i++ {
		nodes[fmt.Sprintf("n%d", i)] = podNode(i,
			[]string{fmt.Sprintf("10.244.%d.0/24", i), fmt.Sprintf("fd00:10:244:%d::/64", i)}, fmt.Sprintf("198.18.0.%d", i),
			fmt.Sprintf("2001:db8::%d", i))
	}
	return nodes
}

func TestPodRoutesOfASoundCluster(t *testing.T) {
	prefix, addr := netip.MustParsePrefix, netip.MustParseAddr
	got := plan.PodRoutesOf("n1", kernelRoutes(), threeNodes())
	assert.Equal(t, map[netip.Prefix]plan.PodRoute{
		prefix("10.244.2.0/24"):      {Node: "n2", Via: addr("198.18.0.2")},
		prefix("10.244.3.0/24"):      {Node: "n3", Via: addr("198.18.0.3")},
		prefix("fd00:10:244:2::/64"): {Node: "n2", Via: addr("2001:db8::2")},
		prefix("fd00:10:244:3::/64"): {Node: "n3", Via: addr("2001:db8::3")},
	}, got.Routes)
	assert.Equal(t, []netip.Prefix{prefix("10.244.1.0/24"), prefix("fd00:10:244:1::/64")}, got.Own)
	assert.Empty(t, got.Refused)

	bgp := &config.Config{Routes: &config.Routes{Mode: config.RoutesBGP}}
	got = plan.PodRoutesOf("n1", bgp, threeNodes())
	assert.Empty(t, got.Routes)
	assert.Len(t, got.Own, 2)

	assert.Equal(t, plan.PodRoutes{}, plan.PodRoutesOf("n1", &config.Config{}, threeNodes()), "no routes in the document")
	assert.Equal(t, plan.PodRoutes{}, plan.PodRoutesOf("n1", nil, threeNodes()), "no document")
}

// One node more, evil or mistaken, has no route, and takes none from the others.
func TestPodRoutesRefuse(t *testing.T) {
	tests := map[string]struct {
		node    plan.Node
		config  *config.Config
		reason  plan.PodRefusal
		message string
	}{
		"everything": {podNode(9, []string{"0.0.0.0/0"}, "198.18.0.9"), nil, plan.CIDRTooWide,
			"the pod CIDR 0.0.0.0/0 of node n9 is wider than /8: its route would take the traffic of others"},
		"half of everything": {podNode(9, []string{"128.0.0.0/1"}, "198.18.0.9"), nil, plan.CIDRTooWide,
			"the pod CIDR 128.0.0.0/1 of node n9 is wider than /8: its route would take the traffic of others"},
		"all of IPv6": {podNode(9, []string{"::/0"}, "2001:db8::9"), nil, plan.CIDRTooWide,
			"the pod CIDR ::/0 of node n9 is wider than /32: its route would take the traffic of others"},
		"all unique local ones": {podNode(9, []string{"fd00::/8"}, "2001:db8::9"), nil, plan.CIDRTooWide,
			"the pod CIDR fd00::/8 of node n9 is wider than /32: its route would take the traffic of others"},
		"IPv4 in IPv6 form": {podNode(9, []string{"::ffff:10.9.0.0/120"}, "198.18.0.9"), nil, plan.CIDRInvalid,
			"the pod CIDR ::ffff:10.9.0.0/120 of node n9 is an IPv4 prefix in IPv6 form"},
		"no prefix": {podNode(9, []string{"10.9.0.0"}, "198.18.0.9"), nil, plan.CIDRInvalid,
			`the pod CIDR "10.9.0.0" of node n9 is not a prefix`},
		"a zone": {podNode(9, []string{"fe80::%eth0/64"}, "2001:db8::9"), nil, plan.CIDRInvalid,
			`the pod CIDR "fe80::%eth0/64" of node n9 is not a prefix`},
		"link-local": {podNode(9, []string{"fe80::/64"}, "2001:db8::9"), nil, plan.CIDRInvalid,
			"the pod CIDR fe80::/64 of node n9 is none of pods: it is link-local, multicast, loopback or unspecified"},
		"loopback": {podNode(9, []string{"127.0.0.0/24"}, "198.18.0.9"), nil, plan.CIDRInvalid,
			"the pod CIDR 127.0.0.0/24 of node n9 is none of pods: it is link-local, multicast, loopback or unspecified"},
		"the nodes' LAN": {podNode(9, []string{"198.18.0.0/24"}, "198.18.0.9"), nil, plan.CIDROfNodes,
			"node n1 has the address 198.18.0.1 within the pod CIDR 198.18.0.0/24 of node n9: their networks must not overlap"},
		"one other node": {podNode(9, []string{"198.18.0.2/32"}, "198.18.0.9"), nil, plan.CIDROfNodes,
			"node n2 has the address 198.18.0.2 within the pod CIDR 198.18.0.2/32 of node n9: their networks must not overlap"},
		"that of another": {podNode(9, []string{"10.244.2.0/24"}, "198.18.0.9"), nil, plan.CIDRTaken,
			"the pod CIDR 10.244.2.0/24 of node n9 overlaps 10.244.2.0/24 of node n2, which is older: give one of them another"},
		"part of another's": {podNode(9, []string{"10.244.2.128/25"}, "198.18.0.9"), nil, plan.CIDRTaken,
			"the pod CIDR 10.244.2.128/25 of node n9 overlaps 10.244.2.0/24 of node n2, which is older: give one of them another"},
		"those of all others": {podNode(9, []string{"10.244.0.0/16"}, "198.18.0.9"), nil, plan.CIDRTaken,
			"the pod CIDR 10.244.0.0/16 of node n9 overlaps 10.244.1.0/24 of node n1, which is older: give one of them another"},
		"no address": {podNode(9, []string{"10.244.9.0/24"}, "2001:db8::9"), nil, plan.NoAddressOfNodes,
			"node n9 has no InternalIP of the family of its pod CIDR 10.244.9.0/24: routes have no next hop"},
		"outside of cidrs": {podNode(9, []string{"203.0.113.0/24"}, "198.18.0.9"), kernelRoutes("10.244.0.0/16", "fd00:10:244::/48"),
			plan.CIDROutside,
			"the pod CIDR 203.0.113.0/24 of node n9 is outside of routes.cidrs of the configuration: [10.244.0.0/16 fd00:10:244::/48]"},
		"wider than cidrs": {podNode(9, []string{"10.244.0.0/15"}, "198.18.0.9"), kernelRoutes("10.244.0.0/16", "fd00:10:244::/48"),
			plan.CIDROutside,
			"the pod CIDR 10.244.0.0/15 of node n9 is outside of routes.cidrs of the configuration: [10.244.0.0/16 fd00:10:244::/48]"},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			c := tt.config
			if c == nil {
				c = kernelRoutes()
			}
			nodes := threeNodes()
			before := plan.PodRoutesOf("n1", c, nodes).Routes
			nodes["n9"] = tt.node
			got := plan.PodRoutesOf("n1", c, nodes)
			assert.Equal(t, before, got.Routes)
			require.Len(t, got.Refused, 1)
			assert.Equal(t, plan.RefusedCIDR{Node: "n9", CIDR: tt.node.PodCIDRs[0], Reason: tt.reason, Message: tt.message}, got.Refused[0])
			if tt.reason != plan.NoAddressOfNodes {
				assert.Empty(t, plan.PodRoutesOf("n9", &config.Config{Routes: &config.Routes{Mode: config.RoutesBGP, CIDRs: c.Routes.CIDRs}},
					nodes).Own, "nor does it announce it")
			}
		})
	}
}

// A node that claims the address of a pod of another node gets no route for it, either.
func TestPodRoutesOutliveAddresses(t *testing.T) {
	nodes := threeNodes()
	before := plan.PodRoutesOf("n1", kernelRoutes(), nodes).Routes
	nodes["n9"] = podNode(9, nil, "10.244.2.1")
	assert.Equal(t, before, plan.PodRoutesOf("n1", kernelRoutes(), nodes).Routes)
}

// An older node that claims the addresses of pods of many others takes the route of one, by the first address of the family.
func TestAnOlderNodeTakesFewPodRoutes(t *testing.T) {
	nodes := map[string]plan.Node{}
	claims := []string{}
	for i := 2; i <= 9; i++ {
		nodes[fmt.Sprint("n", i)] = podNode(i, []string{fmt.Sprintf("10.244.%d.0/24", i)}, fmt.Sprintf("198.18.0.%d", i))
		claims = append(claims, fmt.Sprintf("10.244.%d.1", i))
	}
	nodes["n1"] = podNode(1, nil, append([]string{"198.18.0.1"}, claims...)...)
	require.Empty(t, plan.PodRoutesOf("n1", kernelRoutes(), nodes).Refused)
	nodes["n1"] = podNode(1, nil, claims...)
	refused := plan.PodRoutesOf("n1", kernelRoutes(), nodes).Refused
	require.Len(t, refused, 1)
	require.Equal(t, "n2", refused[0].Node)
}

// Whatever is in Nodes: all nodes agree, prefixes that have a route do not overlap, and a new node
// does not change the routes of the others.
func TestPodRoutesProperties(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		byte4 := rapid.Byte()
		cidr := rapid.Custom(func(t *rapid.T) string {
			switch rapid.IntRange(0, 9).Draw(t, "kind") {
			case 0:
				return rapid.StringN(0, 20, 40).Draw(t, "text")
			case 1:
				return fmt.Sprintf("fd00:10:%x::/%d", rapid.IntRange(0, 3).Draw(t, "net"), rapid.IntRange(0, 128).Draw(t, "bits"))
			default:
				return fmt.Sprintf("10.%d.%d.%d/%d", rapid.IntRange(0, 1).Draw(t, "b"), rapid.IntRange(0, 3).Draw(t, "c"), byte4.Draw(t, "d"),
					rapid.IntRange(6, 32).Draw(t, "bits"))
			}
		})
		nodes := map[string]plan.Node{}
		draw := func(minute int) plan.Node {
			n := podNode(minute, rapid.SliceOfN(cidr, 0, 3).Draw(t, "cidrs"))
			n.Addresses = append(n.Addresses, netip.AddrFrom4([4]byte{10, rapid.SampledFrom([]byte{0, 9}).Draw(t, "lan"), 0, byte4.Draw(t, "host")}),
				netip.MustParseAddr("fd01::1"))
			return n
		}
		for i := range rapid.IntRange(2, 6).Draw(t, "nodes") {
			nodes[fmt.Sprintf("n%d", i)] = draw(rapid.IntRange(0, 3).Draw(t, "minute"))
		}
		whole := map[netip.Prefix]string{}
		for self := range nodes {
			got := plan.PodRoutesOf(self, kernelRoutes(), nodes)
			for prefix, route := range got.Routes {
				claim(t, whole, prefix, route.Node)
			}
			for _, prefix := range got.Own {
				claim(t, whole, prefix, self)
			}
		}
		for prefix := range whole {
			for other := range whole {
				require.True(t, prefix == other || !prefix.Overlaps(other), "%s and %s", prefix, other)
			}
			require.Equal(t, prefix.Masked(), prefix)
			require.GreaterOrEqual(t, prefix.Bits(), 8)
		}
		for _, r := range plan.PodRoutesOf("n0", kernelRoutes(), nodes).Refused {
			if r.Reason == plan.CIDRTaken {
				overlaps := func(other netip.Prefix) bool { return other.Overlaps(netip.MustParsePrefix(r.CIDR)) }
				require.True(t, slices.ContainsFunc(slices.Collect(maps.Keys(whole)), overlaps), "%s overlaps nothing that a node has", r.CIDR)
			}
		}
		for self := range nodes {
			announced := plan.PodRoutesOf(self, &config.Config{Routes: &config.Routes{Mode: config.RoutesBGP}}, nodes)
			require.Equal(t, plan.PodRoutesOf(self, kernelRoutes(), nodes).Own, announced.Own, "what %s announces", self)
		}
		before := plan.PodRoutesOf("n0", kernelRoutes(), nodes).Routes
		nodes["z"] = draw(9)
		after := plan.PodRoutesOf("n0", kernelRoutes(), nodes).Routes
		for prefix, route := range before {
			require.Equal(t, route, after[prefix], "%s", prefix)
		}
	})
}

func claim(t require.TestingT, whole map[netip.Prefix]string, prefix netip.Prefix, node string) {
	before, ok := whole[prefix]
	require.True(t, !ok || before == node, "%s leads to %s and to %s", prefix, before, node)
	whole[prefix] = node
}

// Routers hear of the node's own pods whatever becomes of its VIPs.
func TestPodCIDRsAreAnnounced(t *testing.T) {
	s := newRoutedStory(t)
	const v4, v6 = "10.244.1.0/24", "fd00:10:244:1::/64"
	s.node("n1", func(n *plan.Node) { n.PodCIDRs = []string{v4, v6} })
	s.wantRoute(v4, "n1")

	s.Config.Routes = &config.Routes{Mode: config.RoutesBGP}
	s.wantRoute(v4, "n1", "tor-a", "tor-b")
	s.wantRoute(v6, "n1", "tor-a", "tor-b")
	s.wantRoute(v4, "n2")
	assert.Equal(t, plan.Route{"tor-a": {}, "tor-b": {}}, s.bgp("n1").Routes[netip.MustParsePrefix(v4)])

	s.node("n1", func(n *plan.Node) { n.Labelled, n.NetworkUnavailable = true, true })
	s.Speakers["n1"] = false
	s.wantRoute(v4, "n1", "tor-a", "tor-b")
	assert.Len(t, s.bgp("n1").Routes, 2, "and of no VIP")

	s.Config.Routes.Peers = []string{"tor-b"}
	s.wantRoute(v4, "n1", "tor-b")
	s.Config.Routes = &config.Routes{Mode: config.RoutesKernel}
	s.wantRoute(v4, "n1")
	assert.Empty(t, s.bgp("n1").Routes)
}

// A Planner updates the routes, and returns which prefixes have changed.
func TestPlannerFollowsPodCIDRs(t *testing.T) {
	s := newRoutedStory(t)
	s.Config.Routes = &config.Routes{Mode: config.RoutesBGP}
	p := plan.NewPlanner("n1")
	update := func(cidrs ...string) []netip.Prefix {
		nodes := map[string]plan.Node{"n1": {Addresses: s.Nodes["n1"].Addresses, PodCIDRs: cidrs}}
		p.Set(s.Config, nodes, s.Speakers)
		return p.Update().Prefixes
	}
	before, after := netip.MustParsePrefix("10.244.1.0/24"), netip.MustParsePrefix("10.244.7.0/24")
	assert.Empty(t, update())
	assert.Equal(t, []netip.Prefix{before}, update(before.String()))
	assert.Empty(t, update(before.String()))
	assert.ElementsMatch(t, []netip.Prefix{before, after}, update(after.String()))
	assert.Contains(t, p.Plan().BGP.Routes, after)
	assert.Equal(t, []netip.Prefix{after}, update())
	assert.Empty(t, p.Plan().BGP.Routes)
}
