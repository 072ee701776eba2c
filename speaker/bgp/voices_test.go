package bgp

import (
	"maps"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/lodestone-lb/lodestone/pkg/config"
	"github.com/lodestone-lb/lodestone/pkg/testnet"
	"github.com/lodestone-lb/lodestone/pkg/testnet/router"
	"github.com/lodestone-lb/lodestone/speaker/plan"
)

// reflection has the attributes that a reflector adds to a route (RFC 4456).
type reflection struct {
	Paths []struct {
		LocPrf       uint32
		OriginatorID string
		ClusterList  struct{ List []string }
		Nexthops     []struct{ IP string }
	}
}

// A node in the AS of the routers has a session with a route reflector alone. A
// router behind it, on another segment, takes the VIP from the reflector, and its
// packets reach the node.
func TestRouteReflector(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 1)
	behind := testnet.NewHost(t, "behind")
	testnet.Connect(w.tor, "eth1", behind, "eth0")
	for _, address := range []string{"198.19.0.1/24", "2001:db8:19::1/64"} {
		w.tor.Run("ip", "addr", "add", address, "dev", "eth1", "nodad")
	}
	for _, address := range []string{"198.19.0.2/24", "2001:db8:19::2/64"} {
		behind.Run("ip", "addr", "add", address, "dev", "eth0", "nodad")
	}
	w.tor.Run("sysctl", "-qw", "net.ipv4.ip_forward=1", "net.ipv6.conf.all.forwarding=1")
	behind.Run("ip", "route", "add", "198.18.0.0/24", "via", "198.19.0.1")
	behind.Run("ip", "route", "add", "2001:db8::/64", "via", "2001:db8:19::1")
	w.node.Run("ip", "route", "add", "198.19.0.0/24", "via", "198.18.0.2")
	w.node.Run("ip", "route", "add", "2001:db8:19::/64", "via", "2001:db8::2")
	for _, vip := range []netip.Prefix{vip4, vip6} { // in place of kube-proxy
		w.node.Run("ip", "addr", "add", vip.String(), "dev", "lo")
	}
	reflector := router.NewFRR(t, w.tor, `
router bgp 64512
 bgp router-id 198.18.0.2
 bgp cluster-id 10.0.0.1
 neighbor clients peer-group
 neighbor clients remote-as 64512
 neighbor 198.18.0.1 peer-group clients
 neighbor 198.19.0.2 peer-group clients
 address-family ipv4 unicast
  neighbor clients route-reflector-client
 exit-address-family
 address-family ipv6 unicast
  neighbor clients activate
  neighbor clients route-reflector-client
 exit-address-family
`, "zebra", "bgpd")
	client := router.NewFRR(t, behind, `
router bgp 64512
 bgp router-id 198.19.0.2
 no bgp network import-check
 neighbor 198.19.0.1 remote-as 64512
 neighbor 198.19.0.1 timers connect 1
 address-family ipv4 unicast
  network 192.0.2.0/24
 exit-address-family
 address-family ipv6 unicast
  neighbor 198.19.0.1 activate
 exit-address-family
`, "zebra", "bgpd")
	w.peer("reflector", func(p *config.Peer) { p.PeerASN = config.ASN{Internal: true} })
	w.route(vip4, "reflector", plan.Attributes{LocalPreference: new(uint32(200))})
	w.route(vip6, "reflector", plan.Attributes{})
	w.start()
	w.up("reflector")
	for _, c := range []struct {
		family     string
		prefix     netip.Prefix
		preference uint32
		nextHop    string
	}{{"ipv4", vip4, 200, "198.18.0.1"}, {"ipv6", vip6, 100, "2001:db8::1"}} {
		w.has(client, c.prefix)
		var got reflection
		client.Show("show bgp "+c.family+" unicast "+c.prefix.String()+" json", &got)
		p := got.Paths[0]
		require.Equal(t, c.preference, p.LocPrf)
		require.Equal(t, "198.18.0.1", p.OriginatorID, "our router ID")
		require.Equal(t, []string{"10.0.0.1"}, p.ClusterList.List)
		require.True(t, slices.ContainsFunc(p.Nexthops, func(n struct{ IP string }) bool { return n.IP == c.nextHop }),
			"the node, not the reflector: %+v", p.Nexthops)
		ping := func() bool {
			return behind.Command(t.Context(), "ping", "-c1", "-W1", c.prefix.Addr().String()).Run() == nil
		}
		w.until("answer from the VIP", ping, func() any { return behind.Run("ip", "route", "show", "table", "all") })
	}

	t.Log("the client's route is dropped, and so are ours, which FRR reflects to this node as well")
	w.until("the client's route", func() bool { return w.status("reflector").Dropped >= 3 }, func() any { return w.status("reflector") })
	require.NotContains(t, w.node.Run("ip", "route"), "192.0.2.0/24")

	t.Log("one VIP is withdrawn, then the node drains, then it goes")
	delete(w.want.Routes, vip4)
	w.set()
	w.lacks(client, vip4)
	require.NoError(t, w.announcer.Drain(t.Context(), true))
	w.until("no preference", func() bool { return *path(client, vip6).LocPrf == 0 }, func() any { return path(client, vip6) })
	require.Contains(t, path(client, vip6).Community.String, "graceful-shutdown")
	w.stop(false)
	w.lacks(client, vip6)
	require.Zero(t, neighbor(reflector, "198.19.0.2").ConnectionsDropped)
}

// learnt has the routes of ExaBGP, by prefix with their next hop, and the families
// whose End-of-RIB it has received.
func learnt(e *router.ExaBGP) (routes map[string]string, whole []string) {
	routes = map[string]string{}
	for _, m := range e.Heard() {
		for _, hops := range m.Neighbor.Message.Update.Announce {
			for hop, prefixes := range hops {
				for _, p := range prefixes {
					routes[p.NLRI] = hop
				}
			}
		}
		for _, prefixes := range m.Neighbor.Message.Update.Withdraw {
			for _, p := range prefixes {
				delete(routes, p.NLRI)
			}
		}
		if eor := m.Neighbor.Message.EOR; eor != nil {
			whole = append(whole, eor.AFI)
		}
	}
	return routes, whole
}

// ExaBGP, whose code has nothing in common with that of the other routers and with the
// library that encodes our messages, reads them.
func TestExaBGP(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 1)
	e := router.NewExaBGP(t, w.tor, tor4.String(), `
neighbor 198.18.0.1 {
 router-id 198.18.0.2;
 local-as 64513;
 peer-as 64512;
 hold-time 9;
 capability { graceful-restart 120; route-refresh; }
 family { ipv4 unicast; ipv6 unicast; }
}`)
	w.peer("exabgp", func(p *config.Peer) { p.GracefulRestart = 120 * time.Second })
	w.route(vip4, "exabgp", plan.Attributes{
		Communities:      []config.Community{64512<<16 | 7, 0xFFFFFF01},
		LargeCommunities: []config.LargeCommunity{{GlobalAdmin: 1, Data1: 2, Data2: 3}}, MED: new(uint32(9)), Prepend: 1,
	})
	w.route(vip6, "exabgp", plan.Attributes{})
	w.start()
	up := w.up("exabgp")
	require.Equal(t, 9*time.Second, up.HoldTime)
	require.Equal(t, []string{"IPv4", "IPv6"}, up.Families)
	require.Contains(t, up.Capabilities, "graceful restart")
	hears := func(want map[string]string) {
		t.Helper()
		w.until("routes at ExaBGP", func() bool { got, _ := learnt(e); return maps.Equal(got, want) },
			func() any { got, _ := learnt(e); return got })
	}
	hears(map[string]string{vip4.String(): "198.18.0.1", vip6.String(): "2001:db8::1"})
	w.until("End-of-RIB", func() bool { _, whole := learnt(e); return len(whole) == 2 }, func() any { _, whole := learnt(e); return whole })
	_, whole := learnt(e)
	require.ElementsMatch(t, []string{"ipv4", "ipv6"}, whole)

	for _, m := range e.Heard() {
		if m.Type == "open" {
			require.Equal(t, uint32(nodeASN), m.Neighbor.Open.ASN)
			require.Contains(t, m.Neighbor.Open.Capabilities, "64", "graceful restart")
			require.Contains(t, string(m.Neighbor.Open.Capabilities["64"]), "120")
		}
		if a := m.Neighbor.Message.Update.Attribute; len(m.Neighbor.Message.Update.Announce["ipv4 unicast"]) > 0 {
			require.Equal(t, "igp", a.Origin)
			require.Equal(t, []uint32{nodeASN, nodeASN}, a.ASPath)
			require.Equal(t, uint32(9), a.MED)
			require.Equal(t, [][2]uint32{{64512, 7}, {65535, 65281}}, a.Community)
			require.Equal(t, [][3]uint32{{1, 2, 3}}, a.LargeCommunity)
		}
	}

	delete(w.want.Routes, vip4)
	w.set()
	hears(map[string]string{vip6.String(): "2001:db8::1"})
	delete(w.want.Routes, vip6)
	w.set()
	hears(map[string]string{})
	time.Sleep(10 * time.Second) // longer than the hold time: both sides keep the session
	require.Equal(t, up.Since, w.status("exabgp").Since)

	w.stop(false)
	w.until("a last word", func() bool {
		heard := e.Heard()
		return slices.ContainsFunc(heard, func(m router.Message) bool {
			return m.Type == "notification" && m.Neighbor.Notification.Code == 6
		})
	}, func() any { return e.Log() })
}
