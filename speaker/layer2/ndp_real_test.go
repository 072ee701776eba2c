package layer2

import (
	"bytes"
	"encoding/hex"
	"fmt"
	"net"
	"net/netip"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/mdlayher/packet"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/vishvananda/netlink"
	"golang.org/x/net/bpf"
	"golang.org/x/net/ipv6"
	"golang.org/x/sys/unix"

	"github.com/lodestone-lb/lodestone/pkg/testnet"
	"github.com/lodestone-lb/lodestone/speaker/layer2/seal"
	"github.com/lodestone-lb/lodestone/speaker/layer2/segment"
	"github.com/lodestone-lb/lodestone/speaker/layer2/wire"
	"github.com/lodestone-lb/lodestone/speaker/plan"
)

// announcing waits until the node announces these VIPs on one interface each:
// duplicate address detection of its link-local address takes a second or two.
func (n *node) announcing(want ...netip.Addr) {
	n.t.Helper()
	n.set(everywhere(want...))
	eventually(n.t, fmt.Sprintf("announced: %v", want), func() bool {
		return !slices.ContainsFunc(n.Status().VIPs, func(v VIPStatus) bool { return len(v.Interfaces) == 0 })
	})
}

// announced waits until the announcements of one IPv6 VIP are over.
func (n *node) announced() {
	n.t.Helper()
	eventually(n.t, "all announcements", func() bool {
		return testutil.ToFloat64(n.metrics.announcements.WithLabelValues("eth0", "IPv6")) == float64(len(segment.Schedule)+1)
	})
}

// announcedTwice waits until the announcements of so many IPv4 VIPs are over, which are two frames each.
func (n *node) announcedTwice(vips int) {
	n.t.Helper()
	eventually(n.t, "all announcements", func() bool {
		return testutil.ToFloat64(n.metrics.announcements.WithLabelValues("eth0", "IPv4")) == float64(2*len(segment.Schedule)*vips)
	})
}

// settled waits until the addresses of a host's interface can be used.
func settled(t *testing.T, h *testnet.Host, name string) {
	t.Helper()
	eventually(t, "settled: "+name, func() bool {
		var addrs []netlink.Addr
		require.NoError(t, h.Do(func() error {
			link, err := netlink.LinkByName(name)
			if err == nil {
				addrs, err = netlink.AddrList(link, netlink.FAMILY_V6)
			}
			return err
		}))
		addrs = slices.DeleteFunc(addrs, func(a netlink.Addr) bool { return !a.IP.IsLinkLocalUnicast() })
		return len(addrs) > 0 && !slices.ContainsFunc(addrs, func(a netlink.Addr) bool { return a.Flags&unix.IFA_F_TENTATIVE != 0 })
	})
}

// serve makes the node's kernel take packets for a VIP, as kube-proxy does,
// without answering for it on the segment.
func (n *node) serve(vip netip.Addr) {
	n.t.Helper()
	n.host.Run("ip", "addr", "add", vip.String()+"/128", "dev", "lo")
}

// kernelGroups returns the solicited-node groups of a host's interface that
// end in 1:xx, as those of the VIPs do: the groups of IPv6 (/proc/net/igmp6), and
// those of the network card (/proc/net/dev_mcast).
func kernelGroups(t *testing.T, h *testnet.Host, name string) (ip, card []string) {
	t.Helper()
	for _, line := range strings.Split(h.Run("cat", "/proc/net/igmp6"), "\n") {
		if f := strings.Fields(line); len(f) > 2 && f[1] == name && strings.HasPrefix(f[2], "ff0200000000000000000001ff0001") {
			b, err := hex.DecodeString(f[2])
			require.NoError(t, err)
			ip = append(ip, netip.AddrFrom16([16]byte(b)).String())
		}
	}
	for _, line := range strings.Split(h.Run("cat", "/proc/net/dev_mcast"), "\n") {
		if f := strings.Fields(line); len(f) > 4 && f[1] == name && strings.HasPrefix(f[4], "3333ff0001") {
			card = append(card, f[4])
		}
	}
	slices.Sort(ip)
	slices.Sort(card)
	return ip, card
}

// Only well-formed questions and claims of neighbours reach user space, even
// through a socket for all EtherTypes on a promiscuous interface.
func TestNDPKernelFilter(t *testing.T) {
	t.Parallel()
	s := testnet.NewSegment(t, 2)
	node, client := macOf(t, s.Hosts[0], "eth0"), macOf(t, s.Hosts[1], "eth0")
	s.Hosts[0].Run("ip", "link", "set", "eth0", "promisc", "on")
	_, filter := wire.NDP{}.Socket(node)
	raw, err := bpf.Assemble(filter)
	require.NoError(t, err)
	here, there := listenOn(t, s.Hosts[0], unix.ETH_P_ALL, raw), listenOn(t, s.Hosts[1], unix.ETH_P_ALL, nil)
	cold := coldQuery(client, vip6)
	with := func(change func(*query)) []byte {
		q := cold
		change(&q)
		return q.frame()
	}
	f := cold.frame()
	claim := wire.NDP{}.Announce(claimOf(client, vip6), false)[0]
	for _, c := range []struct {
		what  string
		frame []byte
		from  net.PacketConn
		want  bool
	}{
		{"solicitation", f, there, true},
		{"unicast solicitation", with(func(q *query) { q.to = node }), there, true},
		{"advertisement", claim, there, true},
		{"to another host", with(func(q *query) { q.to = mac{2, 2, 2, 2, 2, 2} }), there, false},
		{"what this host sends", f, here, false},
		{"sender is this host", with(func(q *query) { q.from = node }), there, false},
		{"sender differs in the last byte", with(func(q *query) { q.from[5] ^= 1 }), there, true},
		{"Router Advertisement", cold.but(offType, byte(ipv6.ICMPTypeRouterAdvertisement)), there, false},
		{"Redirect", cold.but(offType, byte(ipv6.ICMPTypeRedirect)), there, false},
		{"echo", cold.but(offType, byte(ipv6.ICMPTypeEchoRequest)), there, false},
		{"code 1", cold.but(offCode, 1), there, false},
		{"hop limit 254", cold.but(offHopLimit, 254), there, false},
		{"UDP", cold.but(offNextHeader, unix.IPPROTO_UDP), there, false},
		{"fragment", fragment(f), there, false},
		{"IPv4", cold.but(offEtherType, 0x08), there, false},
		{"VLAN tag", slices.Concat(f[:12], []byte{0x81, 0, 0, 7}, f[12:]), there, false},
		{"too short", f[:20], there, false},
	} {
		_, err := c.from.WriteTo(c.frame, &packet.Addr{HardwareAddr: c.frame[:6]})
		require.NoError(t, err)
		// A frame that passes ends the wait for one that does not.
		end := with(func(q *query) { q.from = mac{2, 0xe, 0xe, 0xe, 0xe, 0xe} })
		_, err = there.WriteTo(end, &packet.Addr{HardwareAddr: end[:6]})
		require.NoError(t, err)
		passed := 0
		for buf := make([]byte, 1500); ; {
			n, _, err := here.ReadFrom(buf)
			require.NoError(t, err)
			if bytes.Equal(buf[:n], end) {
				break
			}
			if bytes.Equal(buf[:n], c.frame) { // not what the kernels of both send meanwhile
				passed++
			}
		}
		assert.Equal(t, c.want, passed == 1, "%s: %d passed", c.what, passed)
	}
}

func TestNDPAnswersReal(t *testing.T) {
	t.Parallel()
	s := testnet.NewSegment(t, 2)
	n, client := startNode(t, s.Hosts[0], nil), s.Hosts[1]
	n.host.Run("ip", "link", "set", "eth0", "promisc", "on")
	n.announcing(mark6) // lets its link-local address settle
	n.announced()
	c := listenOn(t, client, unix.ETH_P_IPV6, nil)
	self, end := n.mac("eth0"), mac{2, 0xe, 0xe, 0xe, 0xe, 0xe}
	announcements := n.metrics.announcements.WithLabelValues("eth0", "IPv6")
	ndpAnswers(t, stage{
		node:   self,
		client: macOf(t, client, "eth0"),
		set: func(want map[netip.Addr]plan.Layer2) {
			before := testutil.ToFloat64(announcements)
			n.setWith(mark6)(want)
			if len(want) > 0 { // an announcement looks like an answer
				eventually(t, "all announcements", func() bool {
					return testutil.ToFloat64(announcements) == before+float64(len(segment.Schedule)+1)
				})
			}
		},
		exchange: func(f []byte) (got []frame) {
			for _, f := range [][]byte{f, coldQuery(end, mark6).frame()} {
				_, err := c.WriteTo(f, &packet.Addr{HardwareAddr: f[:min(6, len(f))]})
				if len(f) >= 14 {
					require.NoError(t, err)
				}
			}
			buf := make([]byte, 1514)
			for c.SetReadDeadline(time.Now().Add(30 * time.Second)); ; {
				k, _, err := c.ReadFrom(buf)
				require.NoError(t, err)
				if mac(buf[:6]) == end {
					return got
				}
				// Neither what the node's kernel advertises of its own addresses, nor the announcements
				// that contradict questions which claim the VIP: those have a seal.
				b := buf[:k]
				if m, ok := (wire.NDP{}).Parse(b); ok && m.Seal != (seal.Seal{}) {
					continue
				}
				if k >= offOptions && mac(b[6:12]) == self && b[offType] == byte(ipv6.ICMPTypeNeighborAdvertisement) &&
					slices.Contains([]netip.Addr{vip6, vip6B}, addrAt(b, offTarget)) {
					got = append(got, frame{bytes: slices.Clone(b)})
				}
			}
		},
	})
}

// The kernel of another host finds a VIP, keeps it, and follows it when it
// moves, through a switch that forwards only what was asked for by MLD.
func TestNDPClientBehindASnoopingSwitch(t *testing.T) {
	t.Parallel()
	s := testnet.NewSegment(t, 3)
	settled(t, s.Switch, "br0") // a querier asks from it
	s.Switch.Run("ip", "link", "set", "br0", "type", "bridge", "mcast_snooping", "1",
		"mcast_query_response_interval", "10", "mcast_last_member_interval", "10")
	s.Switch.Run("ip", "link", "set", "br0", "type", "bridge", "mcast_querier", "1")
	a, b, client := startNode(t, s.Hosts[0], nil), startNode(t, s.Hosts[1], nil), s.Hosts[2]
	for _, n := range []*node{a, b} {
		n.serve(vip6)
	}
	memberOf := func(port, group string) bool {
		return regexp.MustCompile(`port ` + port + ` grp ` + group + ` `).MatchString(s.Switch.Run("bridge", "mdb", "show"))
	}
	member := func(port string) bool { return memberOf(port, "ff02::1:ff00:100") }
	a.announcing(vip6)
	eventually(t, "the switch knows the member", func() bool { return member("p1") && !member("p2") })
	eventually(t, "the switch knows the client, which the node asks for", func() bool { return memberOf("p3", "ff02::1:ff00:3") })

	// The switch does not forward groups that nobody has joined.
	in, out := listenOn(t, a.host, unix.ETH_P_IPV6, nil), listenOn(t, client, unix.ETH_P_IPV6, nil)
	heard := func(vip netip.Addr) bool {
		f, end := coldQuery(macOf(t, client, "eth0"), vip).frame(), coldQuery(mac{2, 0xe, 0xe, 0xe, 0xe, 0xe}, vip6).frame()
		for _, f := range [][]byte{f, end} { // what the node has joined ends the wait for what it has not
			_, err := out.WriteTo(f, &packet.Addr{HardwareAddr: f[:6]})
			require.NoError(t, err)
		}
		passed, buf := false, make([]byte, 1514)
		for in.SetReadDeadline(time.Now().Add(30 * time.Second)); ; {
			n, _, err := in.ReadFrom(buf)
			require.NoError(t, err)
			switch {
			case bytes.Equal(buf[:n], f):
				passed = true
			case bytes.Equal(buf[:n], end):
				return passed
			}
		}
	}
	eventually(t, "the switch holds back what a has not joined", func() bool { return !heard(vip6B) })
	assert.True(t, heard(vip6), "and forwards what it has")

	client.Run("ip", "neigh", "flush", "dev", "eth0")
	client.Run("ping", "-c1", "-W10", vip6.String()) // cold
	hw, _ := neighbour(t, client, vip6)
	assert.Equal(t, a.mac("eth0").String(), hw)

	replies := a.metrics.replies.WithLabelValues("eth0", "IPv6")
	before := testutil.ToFloat64(replies)
	client.Run("sysctl", "-qw", "net.ipv6.neigh.eth0.mcast_solicit=0")
	client.Run("ip", "neigh", "change", vip6.String(), "dev", "eth0", "nud", "probe")
	eventually(t, "reachable by a unicast probe", func() bool { _, state := neighbour(t, client, vip6); return state == "REACHABLE" })
	assert.Greater(t, testutil.ToFloat64(replies), before, "answers to the probe")

	updates, quit := make(chan netlink.NeighUpdate, 1000), make(chan struct{})
	require.NoError(t, netlink.NeighSubscribeAt(*client.Handle(), updates, quit))
	defer close(quit)
	b.announcing() // its link-local address is settled
	a.set(nil)
	start, want := time.Now(), b.mac("eth0")
	b.set(everywhere(vip6))
	for deadline := time.After(30 * time.Second); ; {
		var u netlink.NeighUpdate
		select {
		case u = <-updates:
		case <-deadline:
			t.Fatal("the client's entry never flipped")
		}
		if u.IP.Equal(vip6.AsSlice()) && hardwareAddr(u.HardwareAddr) == want {
			break
		}
	}
	t.Logf("neighbour entry flips %v after Set", time.Since(start))
	client.Run("ping", "-c1", "-W10", vip6.String())
	eventually(t, "the switch knows the new member alone", func() bool { return member("p2") && !member("p1") })
}

// A host that is given the VIP learns that it is in use, and the node reports a conflict.
func TestNDPDuplicateAddressDetection(t *testing.T) {
	t.Parallel()
	s := testnet.NewSegment(t, 2)
	n, thief := startNode(t, s.Hosts[0], nil), s.Hosts[1]
	n.announcing(vip6)
	n.announced() // which would end the detection before it asks
	// An answer may take longer than the second that one question has.
	thief.Run("sysctl", "-qw", "net.ipv6.conf.eth0.dad_transmits=5")
	thief.Run("ip", "addr", "add", vip6.String()+"/64", "dev", "eth0")
	eventually(t, "dadfailed", func() bool {
		return strings.Contains(thief.Run("ip", "-6", "addr", "show", "dev", "eth0", "to", vip6.String()), "dadfailed")
	})
	conflicts := n.metrics.conflicts.WithLabelValues("eth0", "IPv6")
	eventually(t, "the attempt is reported", func() bool { return testutil.ToFloat64(conflicts) > 0 })
	before := testutil.ToFloat64(conflicts)

	// With detection off it has the VIP, and asks for others as its owner.
	thief.Run("ip", "addr", "del", vip6.String()+"/64", "dev", "eth0")
	thief.Run("ip", "addr", "add", vip6.String()+"/64", "dev", "eth0", "nodad")
	_ = thief.Command(t.Context(), "ping", "-c1", "-W1", "-I", vip6.String(), "2001:db8::1").Run() // the answer may come to us
	eventually(t, "the claim is reported", func() bool { return testutil.ToFloat64(conflicts) > before })
}

// The tools of ndisc6 ask as a user would.
func TestNDisc6(t *testing.T) {
	t.Parallel()
	s := testnet.NewSegment(t, 2)
	n, client := startNode(t, s.Hosts[0], nil), s.Hosts[1]
	n.announcing(vip6, vipA)
	settled(t, client, "eth0")
	n.announced()
	ask := func(program string, args ...string) string {
		out, _ := client.Command(t.Context(), program, args...).CombinedOutput() // no answer is status 2
		return string(out)
	}
	out := ask("ndisc6", "-m", "-r", "1", "-w", "5000", vip6.String(), "eth0")
	assert.Regexp(t, `(?i)target link-layer address: `+n.mac("eth0").String(), out)
	assert.Equal(t, 1, strings.Count(out, " from "+vip6.String()), "answers to one question:\n%s", out)
	assert.Contains(t, ask("ndisc6", "-r", "1", "-w", "300", vip6B.String(), "eth0"), "No response")
	assert.Contains(t, ask("rdisc6", "-r", "1", "-w", "300", "eth0"), "No response", "a VIP's owner is no router")
	n.set(everywhere(vipA))
	assert.Contains(t, ask("ndisc6", "-r", "1", "-w", "300", vip6.String(), "eth0"), "No response", "withdrawn")
}

// The kernel has joined the groups after each change of an interface.
func TestGroupsInTheKernel(t *testing.T) {
	t.Parallel()
	s := testnet.NewSegment(t, 2)
	n, client := startNode(t, s.Hosts[0], nil), s.Hosts[1]
	shares := netip.MustParseAddr("2001:db8:1::100")
	both, cards := []string{"ff02::1:ff00:100", "ff02::1:ff00:101"}, []string{"3333ff000100", "3333ff000101"}
	in := func(what, name string, ip, card []string) {
		t.Helper()
		ok := func() bool {
			gotIP, gotCard := kernelGroups(t, n.host, name)
			return slices.Equal(gotIP, ip) && slices.Equal(gotCard, card)
		}
		eventually(t, what, ok)
	}
	in("none before", "eth0", nil, nil)
	n.announcing(vip6, shares, vip6B)
	in("two for three VIPs", "eth0", both, cards)
	n.set(everywhere(shares, vip6B))
	in("one VIP of a shared group goes", "eth0", both, cards)

	for range 5 {
		n.host.Run("ip", "link", "set", "eth0", "down")
		n.host.Run("ip", "link", "set", "eth0", "up")
	}
	eventually(t, "announced again", func() bool { return len(n.Status().VIPs[0].Interfaces) == 1 })
	in("flapped", "eth0", both, cards)

	n.host.Run("ip", "link", "del", "eth0")
	s.Plug(n.host, "eth0")
	in("replaced", "eth0", both, cards)
	s.Plug(n.host, "eth1")
	in("one more", "eth1", both, cards)
	n.host.Run("ip", "link", "set", "eth1", "down")

	n.host.Run("sysctl", "-qw", "net.ipv6.conf.eth0.disable_ipv6=1")
	eventually(t, "no IPv6", func() bool { return n.Status().VIPs[0].Reason == NoLinkLocalAddress })
	n.host.Run("sysctl", "-qw", "net.ipv6.conf.eth0.disable_ipv6=0")
	in("IPv6 again", "eth0", both, cards)
	resolve(t, client, vip6B)
	eventually(t, "resolved", func() bool { hw, _ := neighbour(t, client, vip6B); return hw == n.mac("eth0").String() })

	n.set(nil)
	in("none after", "eth0", nil, nil)
}

// The kernel removes IPv6 from an interface whose MTU is too small for it, together with the groups, which it does not join again.
// To an observer who misses the moment in between, the interface looks unchanged.
func TestGroupsAfterASmallMTU(t *testing.T) {
	t.Parallel()
	s := testnet.NewSegment(t, 2)
	n, client := startNode(t, s.Hosts[0], nil), s.Hosts[1]
	n.host.Run("sysctl", "-qw", "net.ipv6.conf.eth0.accept_dad=0", "net.ipv6.conf.default.accept_dad=0")
	n.announcing(vip6)
	joined := func() bool {
		ip, card := kernelGroups(t, n.host, "eth0")
		return slices.Equal(ip, []string{"ff02::1:ff00:100"}) && slices.Equal(card, []string{"3333ff000100"})
	}
	eventually(t, "joined", joined)
	var eth0 *net.Interface
	var before GroupSocket
	require.NoError(t, n.host.Do(func() (err error) { eth0, err = net.InterfaceByName("eth0"); return err }))
	require.NoError(t, n.host.Do(func() (err error) { before, err = OpenGroups(); return err }))
	defer before.Close()
	require.NoError(t, before.Join(eth0.Index, wire.SolicitedNode(vip6)))
	for range 5 {
		c := n.host.Command(t.Context(), "ip", "-batch", "-")
		c.Stdin = strings.NewReader("link set eth0 mtu 1000\nlink set eth0 mtu 1500\n")
		out, err := c.CombinedOutput()
		require.NoError(t, err, "%s", out)
		eventually(t, "joined again", joined)
	}
	// A socket that joined before leaves the group for all.
	require.NoError(t, before.Leave(eth0.Index, wire.SolicitedNode(vip6)))
	eventually(t, "joined after another socket left", joined)
	resolve(t, client, vip6)
	eventually(t, "resolved", func() bool { hw, _ := neighbour(t, client, vip6); return hw == n.mac("eth0").String() })
}

// A socket holds few groups where the kernel gives it little memory.
func TestManyGroupsInTheKernel(t *testing.T) {
	t.Parallel()
	s := testnet.NewSegment(t, 1)
	n := startNode(t, s.Hosts[0], nil)
	n.host.Run("sysctl", "-qw", "net.core.optmem_max=4096")
	n.announcing(vip6)
	want := map[netip.Addr]plan.Layer2{}
	for vip := vip6; len(want) < 2000; vip = vip.Next() {
		want[vip] = plan.Layer2{}
	}
	joined := func() int {
		return strings.Count(n.host.Run("cat", "/proc/net/igmp6"), "ff0200000000000000000001ff000")
	}
	eventually(t, "the first is joined", func() bool { return joined() > 0 }) // the address may be announced a moment before
	before, start := joined()-1, time.Now()
	n.set(want)
	eventually(t, "all joined", func() bool { return joined()-before == len(want) })
	t.Logf("2000 groups joined after %v", time.Since(start))
	n.set(nil)
	eventually(t, "all left", func() bool { return joined() == before })
}

// The kernel needs a link-local address to find the way back to a client:
// without one, an announced VIP would draw traffic that is never answered.
func TestKernelNeedsALinkLocalAddress(t *testing.T) {
	t.Parallel()
	s := testnet.NewSegment(t, 2)
	n, client := startNode(t, s.Hosts[0], nil), s.Hosts[1]
	n.serve(vip6)
	n.announcing(vip6)
	client.Run("ping", "-c1", "-W10", vip6.String())
	ll := strings.Fields(n.host.Run("ip", "-6", "-o", "addr", "show", "dev", "eth0", "scope", "link"))[3]
	n.host.Run("ip", "addr", "del", ll, "dev", "eth0")
	eventually(t, "not announced", func() bool { return n.Status().VIPs[0].Reason == NoLinkLocalAddress })
	assert.Contains(t, n.Status().Interfaces[0].Error, "no IPv6 link-local address")
	// A client that knows where the VIP is, as if we had answered.
	client.Run("ip", "neigh", "replace", vip6.String(), "lladdr", n.mac("eth0").String(), "dev", "eth0", "nud", "permanent")
	n.host.Run("ip", "neigh", "flush", "dev", "eth0")
	assert.Error(t, client.Command(t.Context(), "ping", "-c1", "-W1", vip6.String()).Run(), "answered without a link-local address")
	n.host.Run("ip", "addr", "add", ll, "dev", "eth0")
	eventually(t, "announced again", func() bool { return len(n.Status().VIPs[0].Interfaces) == 1 })
	client.Run("ping", "-c3", "-W10", vip6.String()) // the kernel may be giving up its first attempt just now
}

// Each address of a dual-stack Service has an owner of its own.
func TestDualStackIsDecidedPerVIP(t *testing.T) {
	t.Parallel()
	s := testnet.NewSegment(t, 3)
	a, b, client := startNode(t, s.Hosts[0], nil), startNode(t, s.Hosts[1], nil), s.Hosts[2]
	a.announcing(vipA)
	b.announcing(vip6)
	for vip, owner := range map[netip.Addr]*node{vipA: a, vip6: b} {
		resolve(t, client, vip)
		eventually(t, vip.String()+" resolved", func() bool { hw, _ := neighbour(t, client, vip); return hw == owner.mac("eth0").String() })
	}
	for family, n := range map[string]*node{"IPv6": a, "IPv4": b} {
		assert.Zero(t, testutil.ToFloat64(n.metrics.replies.WithLabelValues("eth0", family)))
		assert.Zero(t, testutil.ToFloat64(n.metrics.conflicts.WithLabelValues("eth0", family)))
	}
}
