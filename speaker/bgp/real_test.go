package bgp

import (
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/lodestone-lb/lodestone/pkg/config"
	"github.com/lodestone-lb/lodestone/pkg/testnet"
	"github.com/lodestone-lb/lodestone/pkg/testnet/router"
	"github.com/lodestone-lb/lodestone/speaker/plan"
)

// soon is longer than a busy machine takes for what is done without waiting.
const soon = 20 * time.Second

// An external peer over IPv4 is sent routes of both families, with all
// attributes, and later changes.
func TestExternalPeer(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 1)
	f := w.frr(w.tor, "198.18.0.1", "address-family ipv6 unicast\n  neighbor 198.18.0.1 activate\n exit-address-family")
	w.peer("tor", nil)
	w.route(vip4, "tor", plan.Attributes{
		Communities:      []config.Community{64512<<16 | 100, 0xFFFFFF01},
		LargeCommunities: []config.LargeCommunity{{GlobalAdmin: 64512, Data1: 1, Data2: 2}},
		LocalPreference:  new(uint32(200)), MED: new(uint32(50)), Prepend: 2,
	})
	w.route(vip6, "tor", plan.Attributes{})
	begin := time.Now()
	w.start()
	p := w.up("tor")
	took := time.Since(begin)
	t.Logf("up after %s", took)
	require.Less(t, took, soon)
	require.Equal(t, []string{"IPv4", "IPv6"}, p.Families)
	require.Equal(t, uint32(peerASN), p.PeerASN)
	require.Equal(t, node4, p.LocalAddress)
	require.Equal(t, 90*time.Second, p.HoldTime)
	require.Equal(t, 30*time.Second, p.Keepalive)

	got := w.has(f, vip4)
	require.True(t, got.Valid)
	require.Equal(t, "64512 64512 64512", got.AsPath.String)
	require.Equal(t, "64512:100 no-export", got.Community.String)
	require.Equal(t, "64512:1:2", got.Large.String)
	require.Equal(t, uint32(50), *got.Metric)
	require.Nil(t, got.LocPrf, "external peers are sent no local preference")
	require.Equal(t, []string{"198.18.0.1"}, got.nextHop("ipv4"))
	require.Equal(t, "IGP", got.Origin)

	got = w.has(f, vip6)
	require.True(t, got.Valid)
	require.Equal(t, []string{"2001:db8::1"}, got.nextHop("ipv6"))
	require.Equal(t, "64512", got.AsPath.String)

	w.route(vip4, "tor", plan.Attributes{MED: new(uint32(7))})
	delete(w.want.Routes, vip6)
	w.set()
	w.lacks(f, vip6)
	w.until("the new MED", func() bool { return *path(f, vip4).Metric == 7 }, func() any { return path(f, vip4) })
	require.Empty(t, path(f, vip4).Community.String)

	w.want = plan.BGP{}
	w.set()
	w.until("end of the session", func() bool { return neighbor(f, "198.18.0.1").BgpState != "Established" },
		func() any { return neighbor(f, "198.18.0.1") })
	w.lacks(f, vip4)
	require.Empty(t, w.announcer.Peers())
}

// A session survives changes of the node's addresses: an IPv6 address may come minutes
// after the session came up, and go or be replaced while it lasts.
func TestNextHopsFollowTheNode(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 1)
	f := w.frr(w.tor, "198.18.0.1", "address-family ipv6 unicast\n  neighbor 198.18.0.1 activate\n exit-address-family")
	w.peer("tor", nil)
	w.route(vip4, "tor", plan.Attributes{})
	w.route(vip6, "tor", plan.Attributes{})
	w.node.Run("ip", "-6", "addr", "del", "2001:db8::1/64", "dev", "eth0")
	w.start()
	w.has(f, vip4)
	require.Equal(t, map[Withholding]int{withheldNextHop: 1}, w.status("tor").Withheld)

	for _, address := range []string{"2001:db8::1", "2001:db8::7"} {
		w.node.Run("ip", "-6", "addr", "add", address+"/64", "dev", "eth0", "nodad")
		w.until("next hop "+address, func() bool {
			p := path(f, vip6)
			return p != nil && slices.Equal(p.nextHop("ipv6"), []string{address})
		}, func() any { return path(f, vip6) })
		require.Empty(t, w.status("tor").Withheld)
		w.node.Run("ip", "-6", "addr", "del", address+"/64", "dev", "eth0")
	}
	w.lacks(f, vip6)
	w.has(f, vip4)
	require.Zero(t, neighbor(f, "198.18.0.1").ConnectionsDropped)
}

// Each peer is sent its own routes. A change for one is a single UPDATE to it
// and nothing to the other, whose session stays.
func TestPeersAreIndependent(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 2)
	a, b := w.frr(w.segment.Hosts[1], "198.18.0.1", ""), w.frr(w.segment.Hosts[2], "198.18.0.1", "bgp router-id 198.18.0.3")
	w.peer("a", nil)
	w.peer("b", func(p *config.Peer) { p.Address = other4 })
	for i := range 100 {
		prefix := netip.PrefixFrom(netip.AddrFrom4([4]byte{198, 51, 100, byte(i)}), 32)
		w.route(prefix, "a", plan.Attributes{})
		w.route(prefix, "b", plan.Attributes{})
	}
	w.route(vip4, "a", plan.Attributes{Communities: []config.Community{1}})
	w.route(vip4, "b", plan.Attributes{Communities: []config.Community{2}})
	w.start()
	w.up("a")
	w.up("b")
	require.Equal(t, "0:1", w.has(a, vip4).Community.String)
	require.Equal(t, "0:2", w.has(b, vip4).Community.String)
	advertised := func() bool { return w.status("a").Advertised == 101 && w.status("b").Advertised == 101 }
	w.until("101 routes", advertised, func() any { return w.announcer.Peers() })
	updates := func(f *router.FRR) int { return neighbor(f, "198.18.0.1").MessageStats.UpdatesRecv }
	w.until("UPDATEs", func() bool { return updates(a) == 2 && updates(b) == 2 }, func() any { return []int{updates(a), updates(b)} })

	t.Log("one more prefix for one peer")
	w.route(more4, "b", plan.Attributes{})
	w.set()
	w.has(b, more4)
	require.Equal(t, 3, updates(b))
	require.Equal(t, 2, updates(a))

	t.Log("the same again")
	w.set()
	t.Log("one peer gets another hold time, which takes a new session")
	w.peer("a", func(p *config.Peer) { p.HoldTime = 30 * time.Second })
	w.set()
	w.until("the new hold time", func() bool { return w.status("a").HoldTime == 30*time.Second }, func() any { return w.status("a") })
	w.has(a, vip4)
	require.Contains(t, w.log.String(), "the configuration of the session has changed")

	t.Log("the other gets what takes none")
	w.peer("b", func(p *config.Peer) {
		p.Address, p.BFD, p.ConnectRetry, p.KeepaliveInterval = other4, &config.BFD{}, 3*time.Second, time.Second
	})
	w.set()
	got := neighbor(b, "198.18.0.1")
	require.Zero(t, got.ConnectionsDropped)
	require.Equal(t, 3, got.MessageStats.UpdatesRecv)
	w.unbroken("b")
}

func TestPasswords(t *testing.T) {
	t.Parallel()
	key := config.SecretKey{Name: "tor", Key: "password"}
	w := newWorld(t, 2)
	f := w.frr(w.tor, "198.18.0.1", "neighbor 198.18.0.1 password pw-right")
	open := w.frr(w.segment.Hosts[2], "198.18.0.1", "bgp router-id 198.18.0.3")
	w.peer("tor", func(p *config.Peer) { p.Password = &key })
	w.peer("open", func(p *config.Peer) { p.Address = other4 })
	w.route(vip4, "tor", plan.Attributes{})
	w.route(vip4, "open", plan.Attributes{})
	w.start()

	t.Log("the Secret is missing, or empty, or too long")
	w.down("tor", `no password: Secret "tor" does not exist`)
	w.passwords.set(key, "")
	w.set()
	w.down("tor", `the password in key "password" of Secret "tor" is empty`)
	w.passwords.set(key, strings.Repeat("x", 81))
	w.set()
	w.down("tor", "81 bytes")
	require.Zero(t, neighbor(f, "198.18.0.1").MessageStats.NotificationsRecv)

	t.Log("the password is another than the router's")
	w.passwords.set(key, "pw-wrong")
	w.set()
	w.down("tor", "TCP-MD5 password", "suspected")

	t.Log("right")
	w.passwords.set(key, "pw-right")
	w.set()
	w.up("tor")
	w.has(f, vip4)

	t.Log("rotated, at the router first")
	f.Configure("router bgp 64513", "neighbor 198.18.0.1 password pw-other")
	w.down("tor")
	w.passwords.set(key, "pw-other")
	w.set()
	w.up("tor")

	t.Log("rotated, here first")
	w.passwords.set(key, "pw-third")
	w.set()
	w.down("tor", "no answer")
	f.Configure("router bgp 64513", "neighbor 198.18.0.1 password pw-third")
	w.up("tor")
	w.has(f, vip4)

	t.Log("another Secret with the same password, which is read after the document")
	dropped, same := neighbor(f, "198.18.0.1").ConnectionsDropped, config.SecretKey{Name: "tor-2", Key: "password"}
	w.peer("tor", func(p *config.Peer) { p.Password = &same })
	w.passwords.fail(same, config.ErrNotRead)
	w.set()
	w.passwords.set(same, "pw-third")
	w.set()
	w.route(more4, "tor", plan.Attributes{})
	w.set()
	w.has(f, more4)
	require.Equal(t, dropped, neighbor(f, "198.18.0.1").ConnectionsDropped)

	require.Zero(t, neighbor(open, "198.18.0.1").ConnectionsDropped)
	w.unbroken("open")
	for _, password := range []string{"right", "wrong", "other", "third"} {
		require.NotContains(t, w.log.String(), "pw-"+password)
	}
}

// A passive peer opens the connection itself, with password and TTL security.
// Without one nobody listens.
func TestPassivePeer(t *testing.T) {
	t.Parallel()
	key := config.SecretKey{Name: "tor", Key: "password"}
	w := newWorld(t, 2)
	w.passwords.set(key, "secret")
	f := w.frr(w.tor, "198.18.0.1", "neighbor 198.18.0.1 password secret\n neighbor 198.18.0.1 ttl-security hops 1")
	second := w.frr(w.segment.Hosts[2], "2001:db8::1", "bgp router-id 198.18.0.3")
	w.route(vip4, "tor", plan.Attributes{})
	w.route(vip4, "second", plan.Attributes{})
	w.start()
	listening := func() string { return w.node.Run("ss", "-Hltn") }
	require.Empty(t, listening())

	w.peer("tor", func(p *config.Peer) { p.Passive, p.Password, p.TTLSecurity = true, &key, 1 })
	w.peer("second", func(p *config.Peer) { p.Passive, p.Address = true, netip.MustParseAddr("2001:db8::3") })
	w.set()
	w.up("tor")
	w.up("second")
	w.has(f, vip4)
	w.has(second, vip4)
	require.Contains(t, listening(), "198.18.0.1:179")
	require.Contains(t, listening(), "[2001:db8::1]:179")
	require.Equal(t, 2, strings.Count(listening(), "LISTEN"))

	t.Log("the router crashes, and comes back over another connection")
	f.Kill()
	w.down("tor")
	f.Start()
	w.up("tor")
	w.has(f, vip4)

	t.Log("the password is rotated")
	w.passwords.set(key, "rotated")
	w.set()
	f.Configure("router bgp 64513", "neighbor 198.18.0.1 password rotated")
	w.until("the end of the session in the log", // the router may be back before anybody looks
		func() bool { return strings.Contains(w.log.String(), "the password has changed") }, func() any { return w.log.String() })
	w.up("tor")
	w.has(f, vip4)

	t.Log("a connection from elsewhere is closed")
	out, err := w.segment.Hosts[2].Command(t.Context(), "timeout", "5", "bash", "-c",
		"exec 3<>/dev/tcp/198.18.0.1/179; cat <&3").CombinedOutput()
	require.NoError(t, err, "%s", out)
	require.Empty(t, out)

	delete(w.want.Sessions, "tor")
	w.set()
	require.NotContains(t, listening(), "198.18.0.1:179")
	require.Contains(t, listening(), "[2001:db8::1]:179")
}

// What a passive peer needs may come later.
func TestPassivePeerWithoutAddress(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 1)
	f := w.frr(w.tor, "198.18.7.7", "neighbor 198.18.7.7 ebgp-multihop 2")
	w.tor.Run("ip", "route", "add", "198.18.7.7/32", "via", "198.18.0.1")
	w.peer("tor", func(p *config.Peer) { p.Passive, p.Multihop = true, 2 })
	s := w.want.Sessions["tor"]
	s.Source = netip.MustParseAddr("198.18.7.7")
	w.want.Sessions["tor"] = s
	w.route(vip4, "tor", plan.Attributes{})
	w.start()
	w.down("tor", "listen on 198.18.7.7:179: cannot assign requested address")
	w.node.Run("ip", "addr", "add", "198.18.7.7/32", "dev", "lo")
	w.up("tor")
	require.Equal(t, []string{"198.18.7.7"}, w.has(f, vip4).nextHop("ipv4"))

	t.Log("or be unusable")
	s.Source = node6
	w.want.Sessions["tor"] = s
	w.set()
	w.down("tor", "2001:db8::1 and the router's are not of the same family")
	s.Source, s.RouterID = netip.Addr{}, netip.Addr{}
	w.want.Sessions["tor"] = s
	w.set()
	w.down("tor", "no router ID")
}

func TestTTLSecurity(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 1)
	f := w.frr(w.tor, "198.18.0.1", "neighbor 198.18.0.1 ttl-security hops 1\n neighbor 2001:db8::1 remote-as 64512\n neighbor "+
		"2001:db8::1 ttl-security hops 1")
	w.route(vip4, "v4", plan.Attributes{})
	w.peer("v4", func(p *config.Peer) { p.HoldTime = 3 * time.Second })
	w.peer("v6", func(p *config.Peer) { p.Address, p.TTLSecurity = tor6, 1 })
	w.start()
	w.up("v6")
	// The router does not accept the TTL of 1, once it checks TTLs: that may be after
	// the first packets.
	w.until("error", func() bool {
		why := w.status("v4").LastError
		return strings.Contains(why, "Perhaps it has TTL security") || strings.Contains(why, "hold timer expired")
	}, func() any { return w.status("v4") })

	w.peer("v4", func(p *config.Peer) { p.TTLSecurity = 1 })
	w.set()
	w.up("v4")
	w.has(f, vip4)

	t.Log("nor does the node accept packets of a router that may be far away")
	f.Configure("router bgp 64513", "no neighbor 2001:db8::1 ttl-security hops 1")
	w.peer("v6", func(p *config.Peer) { p.Address, p.TTLSecurity, p.HoldTime = tor6, 1, 3*time.Second })
	w.set()
	w.down("v6", "the router has not")
}

// The router is behind another one, and the node's end is a separate address.
// The session has its own router ID and AS number.
func TestMultihop(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 1)
	far := testnet.NewHost(t, "far")
	testnet.Connect(w.tor, "eth1", far, "eth0")
	w.tor.Run("ip", "addr", "add", "198.18.9.1/24", "dev", "eth1")
	w.tor.Run("sysctl", "-qw", "net.ipv4.ip_forward=1")
	far.Run("ip", "addr", "add", "198.18.9.2/24", "dev", "eth0")
	far.Run("ip", "route", "add", "default", "via", "198.18.9.1")
	w.node.Run("ip", "route", "add", "198.18.9.0/24", "via", "198.18.0.2")
	w.node.Run("ip", "addr", "add", "198.18.7.7/32", "dev", "lo")
	w.tor.Run("ip", "route", "add", "198.18.7.7/32", "via", "198.18.0.1")
	f := router.NewFRR(t, far, `
router bgp 64513
 bgp router-id 198.18.9.2
 no bgp ebgp-requires-policy
 neighbor 198.18.7.7 remote-as 4200000001
 neighbor 198.18.7.7 ebgp-multihop 2
 neighbor 198.18.7.7 port 1179
`)
	w.peer("far", func(p *config.Peer) { p.Address = netip.MustParseAddr("198.18.9.2") })
	source := func() {
		s := w.want.Sessions["far"]
		s.Source, s.LocalASN, s.RouterID = netip.MustParseAddr("198.18.7.7"), 4200000001, netip.MustParseAddr("10.1.2.3")
		w.want.Sessions["far"] = s
	}
	source()
	w.route(vip4, "far", plan.Attributes{})
	w.start()
	w.down("far", "multihop")

	w.peer("far", func(p *config.Peer) { p.Address, p.Multihop = netip.MustParseAddr("198.18.9.2"), 2 })
	source()
	w.set()
	require.Equal(t, netip.MustParseAddr("198.18.7.7"), w.up("far").LocalAddress)
	got := w.has(f, vip4)
	require.Equal(t, "4200000001", got.AsPath.String)
	require.Equal(t, []string{"198.18.7.7"}, got.nextHop("ipv4"))
	require.Contains(t, f.Ask("show bgp neighbors 198.18.7.7"), "remote router ID 10.1.2.3")
}

// What an AS number has to be, on either side.
func TestASNumbers(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 1)
	f := w.frr(w.tor, "198.18.0.1", "")
	w.route(vip4, "tor", plan.Attributes{})
	w.peer("tor", func(p *config.Peer) { p.PeerASN = config.ASN{Internal: true} })
	w.start()
	w.down("tor", "the router is in AS 64513", "configured as internal", "the node is in AS 64512")
	w.peer("tor", func(p *config.Peer) { p.PeerASN = config.ASN{Number: 65000} })
	w.set()
	w.down("tor", "the router is in AS 64513", "configured as 65000")
	w.peer("tor", func(p *config.Peer) { p.PeerASN = config.ASN{External: true} })
	w.set()
	w.up("tor")
	w.has(f, vip4)

	t.Log("the router expects another")
	f.Configure("router bgp 64513", "no neighbor 198.18.0.1", "neighbor 198.18.0.1 remote-as 65001", "neighbor 198.18.0.1 passive")
	w.down("tor", "it expects another AS number of this node", "2/2")
}

// A router that moves to another AS is no longer the one of the configuration.
func TestRouterChangesItsASNumber(t *testing.T) {
	t.Parallel()
	w, f, other := twoRouters(t)
	f.Configure("no router bgp 64513", "router bgp 64999", "bgp router-id 198.18.0.2", "no bgp ebgp-requires-policy",
		"neighbor 198.18.0.1 remote-as 64512", "neighbor 198.18.0.1 passive")
	w.down("tor", "the router is in AS 64999", "configured as 64513")
	require.Zero(t, neighbor(other, "198.18.0.1").ConnectionsDropped)
	w.peer("tor", func(p *config.Peer) { p.PeerASN = config.ASN{Number: 64999} })
	w.set()
	w.up("tor")
	w.has(f, vip4)
}
