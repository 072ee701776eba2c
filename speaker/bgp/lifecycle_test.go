package bgp

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/mdlayher/ndp"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"
	"go4.org/netipx"

	"github.com/lodestone-lb/lodestone/pkg/config"
	"github.com/lodestone-lb/lodestone/pkg/testnet/router"
	"github.com/lodestone-lb/lodestone/speaker/plan"
)

// unnumberedFRR knows the node by its interface alone.
const unnumberedFRR = `
interface eth0
 ipv6 nd ra-interval 1
 no ipv6 nd suppress-ra
router bgp 64513
 bgp router-id 198.18.0.2
 no bgp ebgp-requires-policy
 neighbor eth0 interface remote-as external
 neighbor eth0 timers connect 1
 address-family ipv6 unicast
  neighbor eth0 activate
 exit-address-family
`

// An unnumbered peer is known by its interface alone: both sides find each
// other by router advertisements, and IPv4 routes have an IPv6 next hop
// (RFC 8950).
func TestUnnumberedPeer(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 1)
	f := router.NewFRR(t, w.tor, unnumberedFRR, "zebra", "bgpd")
	w.peer("tor", func(p *config.Peer) {
		p.Address, p.Interface, p.PeerASN = netip.Addr{}, "eth0", config.ASN{External: true}
	})
	w.route(vip4, "tor", plan.Attributes{})
	w.route(vip6, "tor", plan.Attributes{})
	w.start()
	p := w.up("tor")
	require.True(t, p.Address.IsLinkLocalUnicast())
	require.Equal(t, "eth0", p.Address.Zone())
	require.Contains(t, p.Capabilities, "IPv4 over IPv6 next hops")

	got := w.has(f, vip4)
	w.until("valid IPv4 route", func() bool { return path(f, vip4).Valid },
		func() any { return f.Ask("show bgp ipv4 unicast 203.0.113.1/32") })
	require.Empty(t, got.nextHop("ipv4"))
	require.Contains(t, got.nextHop("ipv6"), p.LocalAddress.WithZone("").String())
	w.until("valid IPv6 route", func() bool { v6 := path(f, vip6); return v6 != nil && v6.Valid },
		func() any { return f.Ask("show bgp ipv6 unicast") })
	w.until("routes in the router's kernel", func() bool {
		return strings.Contains(w.tor.Run("ip", "route"), "203.0.113.1 ") && strings.Contains(w.tor.Run("ip", "-6", "route"), "2001:db8:203::1 ")
	}, func() any { return w.tor.Run("ip", "route") + w.tor.Run("ip", "-6", "route") })
	require.Contains(t, w.tor.Run("ip", "route"), "via inet6 fe80::")

	// The router hears of another hardware address, and never of the former one again.
	const mac = "02:00:00:00:00:99"
	neighbour := func() string {
		return w.tor.Run("ip", "-6", "neigh", "show", p.LocalAddress.WithZone("").String(), "dev", "eth0")
	}
	_, former, _ := strings.Cut(neighbour(), "lladdr ")
	former = former[:len(mac)]
	w.node.Run("ip", "link", "set", "eth0", "address", mac)
	w.until("the hardware address", func() bool { return strings.Contains(neighbour(), mac) }, func() any { return neighbour() })
	for end := time.Now().Add(advertiseAfter + 2*time.Second); time.Now().Before(end); time.Sleep(100 * time.Millisecond) {
		require.NotContains(t, neighbour(), former)
	}

	w.tor.Run("ip", "link", "set", "eth0", "down")
	w.tor.Run("ip", "link", "set", "eth0", "up")
	w.up("tor")
}

// The interface is made anew, with its name, and hardware address, and another index. Package net knows the former one for a minute.
func TestInterfaceIsMadeAnew(t *testing.T) {
	t.Parallel()
	const node = "fe80::ff:fe00:77" // of the hardware address
	for name, address := range map[string]string{"unnumbered": "", "link-local": "fe80::2%lan0"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, 1)
			w.tor.Run("ip", "addr", "add", "fe80::2/64", "dev", "eth0", "nodad")
			w.addLAN0()
			if address == "" {
				router.NewFRR(t, w.tor, unnumberedFRR, "zebra", "bgpd")
			} else {
				w.frr(w.tor, node, "neighbor "+node+" interface eth0", "zebra", "bgpd")
			}
			w.peer("tor", func(p *config.Peer) {
				if p.HoldTime = 6 * time.Second; address != "" {
					p.Address = netip.MustParseAddr(address)
				} else {
					p.Address, p.Interface, p.PeerASN = netip.Addr{}, "lan0", config.ASN{External: true}
				}
			})
			w.route(vip6, "tor", plan.Attributes{})
			w.start()
			before := w.up("tor")
			w.node.Run("ip", "link", "delete", "lan0")
			w.addLAN0()
			for end := time.Now().Add(30 * time.Second); !w.up("tor").Since.After(before.Since); time.Sleep(50 * time.Millisecond) {
				require.True(t, time.Now().Before(end), "%+v", w.status("tor"))
			}
		})
	}
	t.Run("passive", func(t *testing.T) {
		t.Parallel()
		w := newWorld(t, 1)
		w.addLAN0()
		w.peer("tor", func(p *config.Peer) { p.Address, p.Passive = netip.MustParseAddr("fe80::2%lan0"), true })
		w.start()
		reached := func() (err error) {
			return w.tor.Do(func() error {
				conn, err := net.DialTimeout("tcp", "["+node+"%eth0]:179", time.Second)
				if err == nil {
					conn.Close()
				}
				return err
			})
		}
		w.until("the listener", func() bool { return reached() == nil }, func() any { return reached() })
		w.node.Run("ip", "link", "delete", "lan0")
		w.addLAN0()
		w.until("the next one", func() bool { return reached() == nil }, func() any { return reached() })
	})
}

// addLAN0 adds an interface to the node, with an address at once.
func (w *world) addLAN0() {
	w.node.Run("ip", "link", "add", "lan0", "link", "eth0", "address", "02:00:00:00:00:77", "type", "macvlan", "mode", "bridge")
	w.node.Run("sysctl", "-w", "net.ipv6.conf.lan0.accept_dad=0")
	w.node.Run("ip", "link", "set", "lan0", "up")
}

// Anybody on the link can advertise a router. While there is a session, no other router is
// accepted, and after it the same router is preferred.
func TestAnotherRouterOnTheLink(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 2)
	f := router.NewFRR(t, w.tor, unnumberedFRR, "zebra", "bgpd")
	w.peer("tor", func(p *config.Peer) {
		p.Address, p.Interface, p.PeerASN = netip.Addr{}, "eth0", config.ASN{External: true}
	})
	w.start()
	// FRR opens a connection at the same time, and ends one of the two, which takes seconds on a
	// busy machine.
	w.until("a session that lasts", func() bool { return time.Since(w.up("tor").Since) > 10*time.Second },
		func() any { return w.status("tor") })
	first := w.up("tor")

	rival := w.segment.Hosts[2]
	linkLocal := func() string { return rival.Run("ip", "-6", "addr", "show", "dev", "eth0", "scope", "link") }
	// No socket can be bound to an address before duplicate address detection is over.
	w.until("a link-local address of the rival", func() bool {
		return strings.Contains(linkLocal(), "fe80:") && !strings.Contains(linkLocal(), "tentative")
	}, func() any { return linkLocal() })
	var conn *ndp.Conn
	require.NoError(t, rival.Do(func() error {
		iface, err := net.InterfaceByName("eth0")
		if err == nil {
			conn, _, err = ndp.Listen(iface, ndp.LinkLocal)
		}
		return err
	}))
	// To the node alone: FRR accepts the last router that advertised itself.
	to := first.LocalAddress.WithZone("eth0")
	over := make(chan struct{})
	t.Cleanup(func() { conn.Close(); <-over })
	go func() {
		defer close(over)
		for conn.WriteTo(&ndp.RouterAdvertisement{RouterLifetime: time.Hour}, nil, to) == nil {
			time.Sleep(20 * time.Millisecond)
		}
	}()
	w.until("word of the rival", func() bool { return strings.Contains(w.log.String(), "another router advertises itself") },
		func() any { return w.log.String() })
	require.Equal(t, 1, strings.Count(w.log.String(), "another router advertises itself"), "once, however often it does")
	require.Equal(t, first.Since, w.up("tor").Since)

	t.Log("the router restarts its session")
	f.Ask("clear bgp *")
	w.until("a new session", func() bool { return w.up("tor").Since.After(first.Since) }, func() any { return w.status("tor") })
	require.Equal(t, first.Address, w.status("tor").Address)
}

// Which router is chosen after advertisements, sessions and their ends.
func TestChoiceOfRouter(t *testing.T) {
	t.Parallel()
	tor, rival := netip.MustParseAddr("fe80::1%eth0"), netip.MustParseAddr("fe80::2%eth0")
	at := func(seconds float64) time.Time {
		return time.Unix(0, 0).Add(time.Duration(seconds * float64(time.Second)))
	}
	c := &choice{}
	hear := func(from netip.Addr, seconds float64) (changed, rival bool) { return c.hear(from, at(seconds)) }
	expect := func(want netip.Addr, why string) { t.Helper(); require.Equal(t, want, c.get(), why) }

	changed, _ := hear(rival, 0)
	require.True(t, changed)
	_, ignored := hear(tor, 1)
	require.True(t, ignored)
	_, ignored = hear(tor, 2)
	require.False(t, ignored, "once")
	_, ignored = hear(netip.MustParseAddr("fe80::3%eth0"), 3)
	require.False(t, ignored, "somebody makes routers up")
	expect(rival, "the first one")
	hear(tor, 10)
	expect(tor, "a router without a session is replaced, also while a session is not tried because of BFD")

	hear(rival, 11)
	expect(tor, "not at once")
	c.end(tor, at(12))
	hear(rival, 12)
	expect(rival, "an attempt has failed")
	c.end(tor, at(12))
	hear(tor, 13)
	expect(rival, "an attempt with another one does not count against this one")
	c.end(rival, at(13))
	hear(tor, 13)
	expect(tor, "")

	c.confirm(tor)
	hear(rival, 1000)
	expect(tor, "while there is a session")
	c.end(tor, at(1000))
	hear(rival, 1009)
	hear(tor, 1009.5)
	hear(rival, 1019)
	expect(tor, "it still advertises itself")
	c.confirm(tor)
	hear(rival, 1040)
	expect(tor, "it is back")
	c.end(tor, at(1040))
	hear(rival, 1049.9)
	expect(tor, "")
	hear(rival, 1050)
	expect(rival, "the router was replaced")
}

func TestUnnumberedPeerWithoutRouter(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 1)
	w.peer("quiet", func(p *config.Peer) { p.Address, p.Interface = netip.Addr{}, "eth0" })
	w.peer("absent", func(p *config.Peer) { p.Address, p.Interface = netip.Addr{}, "eth7" })
	w.start()
	w.down("quiet", "no router advertises itself on eth0")
	w.down("absent", "look for the router on eth7", "no such network interface")
}

// A link-local address with a zone, and a password.
func TestLinkLocalPeer(t *testing.T) {
	t.Parallel()
	key := config.SecretKey{Name: "tor", Key: "password"}
	w := newWorld(t, 1)
	w.passwords.set(key, "secret")
	w.node.Run("ip", "addr", "add", "fe80::1/64", "dev", "eth0", "nodad")
	w.tor.Run("ip", "addr", "add", "fe80::2/64", "dev", "eth0", "nodad")
	f := w.frr(w.tor, "fe80::1", "neighbor fe80::1 interface eth0\n neighbor fe80::1 password secret\n address-family ipv6 unicast\n "+
		"neighbor fe80::1 activate\n exit-address-family", "zebra", "bgpd")
	w.peer("tor", func(p *config.Peer) { p.Address, p.Password = netip.MustParseAddr("fe80::2%eth0"), &key })
	s := w.want.Sessions["tor"]
	s.Source = netip.MustParseAddr("fe80::1")
	w.want.Sessions["tor"] = s
	w.route(vip6, "tor", plan.Attributes{})
	w.start()
	require.Equal(t, netip.MustParseAddr("fe80::1"), w.up("tor").LocalAddress.WithZone(""))
	got := w.has(f, vip6)
	require.ElementsMatch(t, []string{"2001:db8::1", "fe80::1"}, got.nextHop("ipv6"))
}

// The router keeps the routes over a restart of the speaker, and drops those
// that it does not announce again.
func TestGracefulRestart(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name string
		stop func(w *world)
	}{
		{"planned", func(w *world) { w.stop(true) }},
		{"as after a crash", func(w *world) { w.cancel() }},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, 1)
			f := w.frr(w.tor, "198.18.0.1", "bgp graceful-restart\n neighbor 198.18.0.1 graceful-restart")
			w.peer("tor", func(p *config.Peer) { p.GracefulRestart = time.Minute })
			w.route(vip4, "tor", plan.Attributes{})
			w.route(more4, "tor", plan.Attributes{})
			w.start()
			require.Contains(t, w.up("tor").Capabilities, "graceful restart")
			w.has(f, vip4)
			w.has(f, more4)

			c.stop(w)
			w.until("a stale route", func() bool { p := path(f, vip4); require.NotNil(t, p); return p.Stale }, func() any { return path(f, vip4) })
			require.Zero(t, neighbor(f, "198.18.0.1").MessageStats.NotificationsRecv)

			delete(w.want.Routes, more4)
			w.options.Restarting = true
			w.start()
			w.up("tor")
			w.until("a fresh route", func() bool { p := path(f, vip4); require.NotNil(t, p); return !p.Stale }, func() any { return path(f, vip4) })
			w.lacks(f, more4)
			about := f.Ask("show bgp ipv4 neighbors 198.18.0.1 graceful-restart")
			for _, want := range []string{"R bit: True", "N bit: True", "F bit: True", "End-of-RIB received: Yes"} {
				require.Contains(t, about, want)
			}
		})
	}
}

// A change of the session's settings leaves the routes with a router that keeps
// them; a change of the router does not.
func TestConfigurationAndGracefulRestart(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 2)
	f := w.frr(w.tor, "198.18.0.1", "bgp graceful-restart\n neighbor 198.18.0.1 graceful-restart\n neighbor 198.18.0.1 passive")
	other := w.frr(w.segment.Hosts[2], "198.18.0.1", "bgp router-id 198.18.0.3")
	w.peer("tor", func(p *config.Peer) { p.GracefulRestart = time.Minute })
	w.route(vip4, "tor", plan.Attributes{})
	w.start()
	w.has(f, vip4)
	w.peer("tor", func(p *config.Peer) { p.GracefulRestart = 2 * time.Minute })
	w.set()
	w.until("new restart time", func() bool {
		require.NotNil(t, path(f, vip4))
		return strings.Contains(f.Ask("show bgp ipv4 neighbors 198.18.0.1 graceful-restart"), "Received Restart Time(sec): 120")
	}, func() any { return f.Ask("show bgp ipv4 neighbors 198.18.0.1 graceful-restart") })
	w.up("tor")
	w.peer("tor", func(p *config.Peer) { p.Address = other4 })
	w.set()
	w.has(other, vip4)
	w.lacks(f, vip4)
}

// BIRD keeps the routes as well.
func TestGracefulRestartWithBIRD(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 1)
	b := router.NewBIRD(t, w.tor, `
router id 198.18.0.2;
protocol device {}
protocol bgp node {
  local 198.18.0.2 as 64513;
  neighbor 198.18.0.1 as 64512;
  graceful restart on;
  ipv4 { import all; export none; };
}
`)
	w.peer("tor", func(p *config.Peer) { p.GracefulRestart = time.Minute })
	w.route(vip4, "tor", plan.Attributes{})
	w.route(more4, "tor", plan.Attributes{})
	w.start()
	routes := func(n int) {
		t.Helper()
		w.until(fmt.Sprintf("%d routes", n), func() bool {
			return strings.Contains(b.Ask("show route count"),
				fmt.Sprintf("%d of %d routes", n, n))
		}, func() any { return b.Ask("show route all") })
	}
	routes(2)
	w.stop(true)
	w.until("graceful restart", func() bool {
		return strings.Contains(b.Ask("show protocols all node"), "Neighbor graceful restart active")
	}, func() any { return b.Ask("show protocols all node") })
	routes(2)
	delete(w.want.Routes, more4)
	w.options.Restarting = true
	w.start()
	w.up("tor")
	routes(1)
	require.Contains(t, b.Ask("show route"), "203.0.113.1/32")
	w.stop(false)
	routes(0)
}

// A stop for good takes the routes away at once, also from a router that keeps
// them for restarts.
func TestStop(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 2)
	f := w.frr(w.tor, "198.18.0.1", "bgp graceful-restart\n neighbor 198.18.0.1 graceful-restart")
	plain := w.frr(w.segment.Hosts[2], "198.18.0.1", "bgp router-id 198.18.0.3")
	w.peer("tor", func(p *config.Peer) { p.GracefulRestart = time.Minute })
	w.peer("plain", func(p *config.Peer) { p.Address = other4 })
	w.route(vip4, "tor", plan.Attributes{})
	w.route(vip4, "plain", plan.Attributes{})
	w.start()
	w.has(f, vip4)
	w.has(plain, vip4)
	w.stop(false)
	w.lacks(f, vip4)
	w.lacks(plain, vip4)
	require.Contains(t, f.Ask("show bgp neighbors 198.18.0.1"), "Notification received (Cease/Administrative Shutdown/Hard Reset)")
	require.Contains(t, plain.Ask("show bgp neighbors 198.18.0.1"), "Notification received (Cease/Administrative Shutdown)")
}

// A failure that BFD reports takes a session down and holds it there.
func TestSetDown(t *testing.T) {
	t.Parallel()
	w, f, other := twoRouters(t)

	changed := w.announcer.Changed()
	w.setDown("tor", true, "BFD: no packet for 300ms")
	select {
	case <-changed:
	case <-time.After(timeout):
		t.Fatal("Changed is not closed")
	}
	require.Equal(t, "BFD: no packet for 300ms", w.down("tor").LastError)
	w.lacks(f, vip4)
	w.set() // changes nothing about it
	require.Never(t, func() bool { return w.status("tor").State != Idle }, 3*time.Second, 20*time.Millisecond)
	require.Contains(t, f.Ask("show bgp neighbors 198.18.0.1"), "Cease")

	begin := time.Now()
	w.setDown("tor", false, "")
	w.up("tor")
	require.Less(t, time.Since(begin), soon)
	w.has(f, vip4)
	require.Zero(t, neighbor(other, "198.18.0.1").ConnectionsDropped)

	t.Log("it holds for peers that come later")
	w.setDown("late", true, "BFD is not up yet")
	w.peer("late", nil)
	delete(w.want.Sessions, "tor")
	w.set()
	w.down("late", "BFD is not up yet")
	w.setDown("late", false, "")
	w.up("late")
}

// Routers are asked to prefer other paths before routes are withdrawn (RFC 8326).
func TestDrain(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 2)
	external := w.frr(w.tor, "198.18.0.1", "")
	internal := router.NewFRR(t, w.segment.Hosts[2], "router bgp 64512\n bgp router-id 198.18.0.3\n neighbor 198.18.0.1 remote-as 64512\n")
	w.peer("external", nil)
	w.peer("internal", func(p *config.Peer) { p.Address, p.PeerASN = other4, config.ASN{Internal: true} })
	for _, peer := range []string{"external", "internal"} {
		w.route(vip4, peer, plan.Attributes{Communities: []config.Community{7}, LocalPreference: new(uint32(300))})
	}
	w.start()
	require.Equal(t, uint32(300), *w.has(internal, vip4).LocPrf)
	w.has(external, vip4)

	require.NoError(t, w.announcer.Drain(context.Background(), true))
	for _, f := range []*router.FRR{internal, external} {
		w.until("graceful shutdown", func() bool { return path(f, vip4).Community.String == "0:7 graceful-shutdown" },
			func() any { return path(f, vip4) })
	}
	require.Zero(t, *path(internal, vip4).LocPrf)
	w.route(more4, "external", plan.Attributes{})
	w.set()
	require.Equal(t, "graceful-shutdown", w.has(external, more4).Community.String)

	require.NoError(t, w.announcer.Drain(context.Background(), false))
	w.until("preference again", func() bool { return *path(internal, vip4).LocPrf == 300 }, func() any { return path(internal, vip4) })
	require.Zero(t, neighbor(external, "198.18.0.1").ConnectionsDropped)
}

// A router that comes back has the routes again soon.
func TestRouterRestarts(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 1)
	f := w.frr(w.tor, "198.18.0.1", "")
	w.peer("tor", nil)
	w.route(vip4, "tor", plan.Attributes{})
	w.start()
	w.has(f, vip4)
	f.Kill()
	w.down("tor", "refused", "nobody listens there")
	f.Start()
	begin := time.Now()
	w.up("tor")
	t.Logf("up %s after the router", time.Since(begin))
	require.Less(t, time.Since(begin), soon, "connect retry is 1 s")
	w.has(f, vip4)

	t.Log("its administrator asks for the routes again, and shuts the session down with a message")
	updates := neighbor(f, "198.18.0.1").MessageStats.UpdatesRecv
	f.Ask("clear bgp 198.18.0.1 soft in")
	w.until("the routes again", func() bool { return neighbor(f, "198.18.0.1").MessageStats.UpdatesRecv == updates+1 },
		func() any { return neighbor(f, "198.18.0.1") })
	f.Configure("router bgp 64513", "neighbor 198.18.0.1 shutdown message maintenance until noon")
	w.until("the router's word", func() bool { return strings.Contains(w.log.String(), "maintenance until noon") },
		func() any { return w.status("tor") })
	require.Contains(t, w.log.String(), "its administrator shut the session down")
}

func permitting(prefixes ...netip.Prefix) *netipx.IPSet {
	var b netipx.IPSetBuilder
	for _, p := range prefixes {
		b.AddPrefix(p)
	}
	set, _ := b.IPSet()
	return set
}

// Prefixes that may not be announced are not, whatever Set is given, and prefixes
// that are withheld are counted.
func TestWithheld(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 1)
	f := w.frr(w.tor, "198.18.0.1", "")
	w.want.Permit = permitting(vip4)
	w.peer("tor", nil)
	w.route(vip4, "tor", plan.Attributes{})
	w.route(more4, "tor", plan.Attributes{})
	w.route(netip.MustParsePrefix("0.0.0.0/0"), "elsewhere", plan.Attributes{})
	w.route(vip6, "tor", plan.Attributes{})
	w.start()
	w.has(f, vip4)
	require.Equal(t, map[Withholding]int{"not_permitted": 2}, w.status("tor").Withheld)
	require.Equal(t, 1, w.status("tor").Advertised)
	require.Nil(t, path(f, more4))
	require.Contains(t, w.log.String(), "BGP holds back what bgpPermit of the configuration does not contain")

	t.Log("a prefix that is permitted later is announced, one that is no longer permitted is withdrawn")
	w.want.Permit = permitting(netip.MustParsePrefix("203.0.113.2/31"))
	w.set()
	w.has(f, more4)
	w.until("withdrawal", func() bool { return path(f, vip4) == nil }, func() any { return path(f, vip4) })
	w.want.Permit = permitting(vip4)
	require.NoError(t, w.announcer.Update(t.Context(), w.want, nil))
	w.has(f, vip4)
	w.until("withdrawal", func() bool { return path(f, more4) == nil }, func() any { return path(f, more4) })
	require.Equal(t, map[Withholding]int{"not_permitted": 2}, w.status("tor").Withheld)
	sent := &(*w.announcer.published.Load())["tor"].updatesSent // counted once sent
	w.until("the last UPDATE's count", func() bool { return sent.Load() >= 5 }, func() any { return sent.Load() })
	problems, err := testutil.GatherAndLint(w.registry)
	require.NoError(t, err)
	require.Empty(t, problems)
	require.NoError(t, testutil.GatherAndCompare(w.registry, strings.NewReader(fmt.Sprintf(`
# HELP %[1]s 1 while the session with the peer is established, else 0.
# TYPE %[1]s gauge
%[1]s{peer="tor"} 1
# HELP %[2]s Prefixes withheld from the peer, by reason.
# TYPE %[2]s gauge
%[2]s{peer="tor",reason="not_permitted"} 2
# HELP %[3]s UPDATE messages with routes sent.
# TYPE %[3]s counter
%[3]s{peer="tor"} 5
# HELP %[4]s Sessions that came up (cause established) or went down, by cause.
# TYPE %[4]s counter
%[4]s{cause="established",peer="tor"} 1
`, metricEstablished, metricWithheld, metricUpdates, metricTransitions)), metricEstablished, metricWithheld, metricUpdates,
		metricTransitions))

	t.Log("an IPv6 route has no next hop where the node has no IPv6 address")
	w.want.Permit = nil
	w.stop(false)
	w.node.Run("ip", "-6", "addr", "flush", "dev", "eth0")
	f.Configure("router bgp 64513", "address-family ipv6 unicast", "neighbor 198.18.0.1 activate")
	w.start()
	w.has(f, more4)
	require.Equal(t, map[Withholding]int{"no_next_hop": 1}, w.status("tor").Withheld)
}

// Changes that result in no UPDATE do not delay keepalives.
func TestKeepalivesDuringChanges(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 1)
	f := w.frr(w.tor, "198.18.0.1", "")
	w.want.Permit = permitting()
	w.peer("tor", func(p *config.Peer) { p.HoldTime = 9 * time.Second })
	w.start()
	w.up("tor")
	for end := time.Now().Add(12 * time.Second); time.Now().Before(end); time.Sleep(100 * time.Millisecond) {
		w.route(vip4, "tor", plan.Attributes{MED: new(uint32(time.Now().UnixNano()))})
		w.set()
	}
	require.Zero(t, neighbor(f, "198.18.0.1").ConnectionsDropped)
	w.unbroken("tor")
}
