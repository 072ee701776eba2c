package layer2

import (
	"net"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/mdlayher/packet"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/lodestone-lb/lodestone/pkg/testnet"
	"github.com/lodestone-lb/lodestone/speaker/layer2/seal"
	"github.com/lodestone-lb/lodestone/speaker/layer2/wire"
	"github.com/lodestone-lb/lodestone/speaker/plan"
)

// answerers asks until it has several answers, and returns their senders, each once.
func answerers(t *testing.T, from *testnet.Host, vip netip.Addr) []string {
	t.Helper()
	all := arping(t, from, vip, "-c", "30", "-C", "3")
	slices.Sort(all)
	return slices.Compact(all)
}

// Two speakers take each other for dead, on real interfaces: both kernels and
// the client see one answerer. The segment is cut, which gives each side an
// owner, and heals: the client, which believed the other one, is corrected
// within a second.
func TestSplitBrainReal(t *testing.T) {
	t.Parallel()
	s := testnet.NewSegment(t, 3)
	lost := &fakeMembers{lost: true, changed: make(chan struct{})}
	home, other := startNode(t, s.Hosts[0], lost), startNode(t, s.Hosts[1], lost)
	client := s.Hosts[2]
	settled(t, s.Hosts[0], "eth0")
	settled(t, s.Hosts[1], "eth0")
	want := map[netip.Addr]plan.Layer2{vipA: {Home: true}, vip6: {Home: true}}
	home.set(want)
	other.set(everywhere(vipA, vip6))
	yields := func() bool {
		return !slices.ContainsFunc(other.Status().VIPs, func(v VIPStatus) bool {
			return v.Reason != Yielded || v.Holder != home.mac("eth0").String()
		})
	}
	eventually(t, "one owner", yields)
	assert.Equal(t, []string{home.mac("eth0").String()}, answerers(t, client, vipA))

	s.Switch.Run("ip", "link", "set", "p1", "type", "bridge_slave", "isolated", "on")
	s.Switch.Run("ip", "link", "set", "p2", "type", "bridge_slave", "isolated", "on")
	eventually(t, "an owner on each side", func() bool {
		return !slices.ContainsFunc(other.Status().VIPs, func(v VIPStatus) bool { return len(v.Interfaces) == 0 })
	})
	resolve(t, client, vipA)
	client.Run("ip", "neigh", "replace", vipA.String(), "lladdr", other.mac("eth0").String(), "dev", "eth0", "nud", "stale")

	healed := time.Now()
	s.Switch.Run("ip", "link", "set", "p1", "type", "bridge_slave", "isolated", "off")
	s.Switch.Run("ip", "link", "set", "p2", "type", "bridge_slave", "isolated", "off")
	eventually(t, "one owner again", yields)
	eventually(t, "the client is corrected", func() bool {
		hw, _ := neighbour(t, client, vipA)
		return hw == home.mac("eth0").String()
	})
	t.Logf("healed in %v", time.Since(healed))
	assert.Equal(t, []string{home.mac("eth0").String()}, answerers(t, client, vipA))
}

// A host on the segment records what a speaker announces, and repeats it when another
// speaker has the VIP. That speaker continues to answer, and reports a conflict.
func TestRecordedClaimReal(t *testing.T) {
	t.Parallel()
	s := testnet.NewSegment(t, 3)
	first, second, client := startNode(t, s.Hosts[0], nil), startNode(t, s.Hosts[1], nil), s.Hosts[2]
	for _, h := range s.Hosts {
		settled(t, h, "eth0")
	}
	var iface *net.Interface
	conns := map[int]net.PacketConn{}
	require.NoError(t, client.Do(func() (err error) {
		if iface, err = net.InterfaceByName("eth0"); err != nil {
			return err
		}
		for _, etherType := range []int{unix.ETH_P_ARP, unix.ETH_P_IPV6} {
			if conns[etherType], err = packet.Listen(iface, packet.Raw, etherType, nil); err != nil {
				return err
			}
		}
		return nil
	}))
	from := first.mac("eth0")
	recorded := map[int][]byte{}
	first.set(map[netip.Addr]plan.Layer2{vipA: {Home: true}, vip6: {Home: true}})
	for etherType, conn := range conns {
		t.Cleanup(func() { conn.Close() })
		for frame := make([]byte, 1514); recorded[etherType] == nil; {
			n, _, err := conn.ReadFrom(frame)
			require.NoError(t, err)
			p := wire.Protocol(wire.ARP{})
			if etherType == unix.ETH_P_IPV6 {
				p = wire.NDP{}
			}
			if m, ok := p.Parse(frame[:n]); ok && m.From == from && m.Claims.IsValid() && m.Seal != (seal.Seal{}) {
				recorded[etherType] = slices.Clone(frame[:n])
			}
		}
	}
	first.set(nil)
	second.set(everywhere(vipA, vip6))
	eventually(t, "announced", func() bool {
		return !slices.ContainsFunc(second.Status().VIPs, func(v VIPStatus) bool { return len(v.Interfaces) == 0 })
	})
	for repeated := 0; repeated < 50 || len(second.Conflicts()) < 2; repeated++ {
		require.Less(t, repeated, 500, "conflicts: %+v", second.Conflicts())
		for etherType, conn := range conns {
			_, err := conn.WriteTo(recorded[etherType], &packet.Addr{HardwareAddr: net.HardwareAddr(recorded[etherType][:6])})
			require.NoError(t, err)
		}
		time.Sleep(20 * time.Millisecond) // the pace of the repetitions
		for _, v := range second.Status().VIPs {
			require.Len(t, v.Interfaces, 1, "silenced: %+v", v)
		}
	}
	for _, c := range second.Conflicts() {
		assert.True(t, c.Silent && c.Announced && c.HardwareAddr == from.String(), "%+v", c)
	}
	assert.Equal(t, []string{second.mac("eth0").String()}, answerers(t, client, vipA))
}

// A host's kernel has the new addresses already. The speaker detects that and leaves
// them to it, and no other traffic is disturbed.
func TestConflictWithAKernel(t *testing.T) {
	t.Parallel()
	s := testnet.NewSegment(t, 3)
	n, squatter, client := startNode(t, s.Hosts[0], nil), s.Hosts[1], s.Hosts[2]
	settled(t, s.Hosts[0], "eth0")
	settled(t, squatter, "eth0")
	squatter.Run("ip", "addr", "add", vipA.String()+"/24", "dev", "eth0")
	squatter.Run("ip", "addr", "add", vip6.String()+"/64", "dev", "eth0", "nodad")
	resolve(t, client, vipA)
	n.set(fresh(vipA, vip6, vipB))
	eventually(t, "both conflicts, and the free one announced", func() bool {
		v := n.Status().VIPs
		return v[0].Reason == AddressConflict && len(v[1].Interfaces) == 1 && v[2].Reason == AddressConflict
	})
	has := macOf(t, squatter, "eth0").String()
	require.Len(t, n.Conflicts(), 2)
	for _, c := range n.Conflicts() {
		assert.Equal(t, has, c.HardwareAddr)
		assert.False(t, c.Announced || c.OtherCluster)
	}
	assert.Equal(t, []string{has}, answerers(t, client, vipA))
	hw, _ := neighbour(t, client, vipA)
	assert.Equal(t, has, hw, "the client has another address")
	assert.Equal(t, []string{n.mac("eth0").String()}, answerers(t, client, vipB))
}

// Two clusters on one segment give out the same addresses. The second one leaves
// them to the first. Where both announce them, as when the segments are connected
// later, each recognizes the other one as a speaker of another cluster.
func TestTwoClustersOnASegment(t *testing.T) {
	t.Parallel()
	s := testnet.NewSegment(t, 3)
	first, second, client := startNode(t, s.Hosts[0], nil), startNode(t, s.Hosts[1], nil), s.Hosts[2]
	second.options.Keys = keys("another cluster's")
	for _, h := range s.Hosts {
		settled(t, h, "eth0")
	}
	first.set(everywhere(vipA, vip6))
	resolve(t, client, vipA)
	second.set(fresh(vipA, vip6, vipB))
	eventually(t, "both conflicts, and the free one announced", func() bool {
		v := second.Status().VIPs
		return v[0].Reason == AddressConflict && len(v[1].Interfaces) == 1 && v[2].Reason == AddressConflict
	})
	assert.Equal(t, []string{first.mac("eth0").String()}, answerers(t, client, vipA))
	reports := func(n, other *node, announced bool) bool {
		return len(n.Conflicts()) == 2 && !slices.ContainsFunc(n.Conflicts(), func(c Conflict) bool {
			return !c.OtherCluster || c.Announced != announced || c.HardwareAddr != other.mac("eth0").String()
		})
	}
	assert.True(t, reports(second, first, false), "%+v", second.Conflicts())
	eventually(t, "a conflict about the address of duplicate address detection; an ARP request does not show its purpose", func() bool {
		return len(first.Conflicts()) == 1
	})
	assert.Equal(t, vip6, first.Conflicts()[0].VIP)

	second.set(nil)
	second.Forget([]netip.Addr{vipA, vip6})
	second.set(everywhere(vipA, vip6))
	eventually(t, "each reports the other", func() bool { return reports(first, second, true) && reports(second, first, true) })
}

// The seal disturbs no kernel: one that probes whether the address is in use learns
// that it is.
func TestKernelSeesSealedPackets(t *testing.T) {
	t.Parallel()
	s := testnet.NewSegment(t, 2)
	n, client := startNode(t, s.Hosts[0], nil), s.Hosts[1]
	settled(t, s.Hosts[0], "eth0")
	settled(t, client, "eth0")
	n.set(fresh(vip6))
	eventually(t, "announced", func() bool { return len(n.Status().VIPs[0].Interfaces) == 1 })
	// An answer may take longer than the second that one question has.
	client.Run("sysctl", "-qw", "net.ipv6.conf.eth0.dad_transmits=5")
	client.Run("ip", "addr", "add", vip6.String()+"/64", "dev", "eth0")
	eventually(t, "the kernel's duplicate address detection fails", func() bool {
		return client.Run("ip", "-6", "addr", "show", "dev", "eth0", "dadfailed") != ""
	})
}
