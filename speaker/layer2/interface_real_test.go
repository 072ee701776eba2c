package layer2

import (
	"net"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/lodestone-lb/lodestone/pkg/testnet"
	"github.com/lodestone-lb/lodestone/speaker/layer2/segment"
	"github.com/lodestone-lb/lodestone/speaker/layer2/wire"
	"github.com/lodestone-lb/lodestone/speaker/plan"
)

// announcedOn waits until the VIP is announced on these interfaces, in order.
func (n *node) announcedOn(what string, want ...string) {
	n.t.Helper()
	eventually(n.t, what, func() bool { return slices.Equal(n.Status().VIPs[0].Interfaces, want) })
}

// claims reads frames until one claims the VIP, and returns its sender.
func claims(t *testing.T, c net.PacketConn, vip netip.Addr) mac {
	t.Helper()
	buf := make([]byte, 1500)
	require.NoError(t, c.SetReadDeadline(time.Now().Add(30*time.Second)))
	for {
		n, _, err := c.ReadFrom(buf)
		require.NoError(t, err)
		if m, ok := (wire.ARP{}).Parse(buf[:n]); ok && m.Claims == vip {
			require.Equal(t, m.From, hardwareAddr(buf[6:12]), "the frame comes from another address than the one in the packet")
			return m.From
		}
	}
}

// After its interface has got another hardware address, the next frame about the VIP
// announces the new address, and no frame with the old one follows.
func TestMACChangeIsAnnouncedAtOnce(t *testing.T) {
	t.Parallel()
	s := testnet.NewSegment(t, 2)
	n, client := startNode(t, s.Hosts[0], nil), s.Hosts[1]
	n.set(everywhere(vipA))
	since := n.Status().VIPs[0].Since
	n.announcedTwice(1)
	resolve(t, client, vipA)
	c, want := listenOn(t, client, unix.ETH_P_ARP, nil), mac{2, 0, 0, 0, 0, 0x77}
	n.host.Run("ip", "link", "set", "eth0", "address", want.String())
	start := time.Now()
	require.Equal(t, want, claims(t, c, vipA))
	t.Logf("announced %s after the change", time.Since(start))
	eventually(t, "the client's kernel knows", func() bool { hw, _ := neighbour(t, client, vipA); return hw == want.String() })
	assert.Equal(t, []string{want.String()}, answerers(t, client, vipA))
	for range 2 * len(segment.Schedule) { // the rest of the announcement, and answers
		require.Equal(t, want, claims(t, c, vipA))
	}
	assert.Equal(t, since, n.Status().VIPs[0].Since, "the node has owned the VIP all the time")
}

func TestRenamedInterface(t *testing.T) {
	t.Parallel()
	s := testnet.NewSegment(t, 2)
	n, client := startNode(t, s.Hosts[0], nil), s.Hosts[1]
	node := []string{n.mac("eth0").String()}
	n.set(everywhere(vipA))
	for _, step := range []struct {
		patterns  []string
		name      string
		announced bool
	}{
		{nil, "lan0", true},
		{nil, "veth9", false}, // as container runtimes name theirs
		{nil, "eth0", true},
		{[]string{"eth*"}, "lan0", false},
		{[]string{"eth*"}, "eth7", true},
		{[]string{"cni0", "veth*"}, "veth9", true},
	} {
		n.set(map[netip.Addr]plan.Layer2{vipA: {Interfaces: step.patterns}})
		before, _, _ := n.link()
		n.host.Run("ip", "link", "set", before, "name", step.name) // while it is up, as Linux 6.2 and later allow
		if step.announced {
			n.announcedOn("announced on "+step.name, step.name)
			assert.Equal(t, node, answerers(t, client, vipA), step.name)
			continue
		}
		n.announcedOn("not announced on " + step.name)
		assert.Equal(t, NoInterface, n.Status().VIPs[0].Reason)
		assert.Empty(t, arping(t, client, vipA), step.name)
	}
}

// link returns the name, the index and the address of the node's link to the
// segment.
func (n *node) link() (name string, index int, addr mac) {
	n.t.Helper()
	err := n.host.Do(func() error {
		all, err := net.Interfaces()
		for _, i := range all {
			if i.Flags&net.FlagLoopback == 0 {
				name, index, addr = i.Name, i.Index, hardwareAddr(i.HardwareAddr)
			}
		}
		return err
	})
	require.NoError(n.t, err)
	return name, index, addr
}

// A macvlan has its own hardware address on the segment of the interface below
// it, and its carrier.
func TestMacvlan(t *testing.T) {
	t.Parallel()
	s := testnet.NewSegment(t, 2)
	n, client := startNode(t, s.Hosts[0], nil), s.Hosts[1]
	n.host.Run("ip", "link", "add", "link", "eth0", "name", "shim", "type", "macvlan", "mode", "bridge")
	n.host.Run("ip", "link", "set", "shim", "up")
	n.set(map[netip.Addr]plan.Layer2{vipA: {Interfaces: []string{"shim"}}})
	n.announcedOn("announced on the macvlan", "shim")
	shim := []string{n.mac("shim").String()}
	assert.Equal(t, shim, answerers(t, client, vipA))
	s.Switch.Run("ip", "link", "set", "p1", "down")
	n.announcedOn("no carrier below")
	s.Switch.Run("ip", "link", "set", "p1", "up")
	n.announcedOn("carrier below again", "shim")
	assert.Equal(t, shim, answerers(t, client, vipA))
	n.set(everywhere(vipA))
	n.announcedOn("by default both announce", "eth0", "shim")
	assert.Zero(t, testutil.ToFloat64(n.metrics.conflicts.WithLabelValues("eth0", "IPv4")), "one took the other for a foreign host")
	assert.Zero(t, testutil.ToFloat64(n.metrics.conflicts.WithLabelValues("shim", "IPv4")))
}

// A bridge that gets its port and loses it: the bridge answers as long as it
// has a port with a carrier, and only the bridge.
func TestBridgeGetsAndLosesItsPort(t *testing.T) {
	t.Parallel()
	s := testnet.NewSegment(t, 2)
	n, client := startNode(t, s.Hosts[0], nil), s.Hosts[1]
	n.set(everywhere(vipA))
	n.announcedOn("at first", "eth0")
	n.host.Run("ip", "link", "add", "br0", "address", "02:00:00:00:00:b0", "type", "bridge", "forward_delay", "0")
	n.host.Run("ip", "link", "set", "br0", "up")
	for range 3 {
		n.host.Run("ip", "link", "set", "eth0", "master", "br0")
		n.announcedOn("the bridge has a port", "br0")
		assert.Equal(t, []string{n.mac("br0").String()}, answerers(t, client, vipA))
		s.Switch.Run("ip", "link", "set", "p1", "down")
		n.announcedOn("the port has no carrier")
		s.Switch.Run("ip", "link", "set", "p1", "up")
		n.announcedOn("the port has a carrier", "br0")
		n.host.Run("ip", "link", "set", "eth0", "nomaster")
		n.announcedOn("the bridge has no port", "eth0")
		assert.Equal(t, []string{n.mac("eth0").String()}, answerers(t, client, vipA))
	}
}

// Two segments: what happens on one does not affect the other.
func TestSeveralSegments(t *testing.T) {
	t.Parallel()
	lan, dmz := testnet.NewSegment(t, 2), testnet.NewSegment(t, 1)
	n := startNode(t, lan.Hosts[0], nil)
	port := dmz.Plug(n.host, "eth1")
	n.set(everywhere(vipA))
	n.announcedOn("on both", "eth0", "eth1")
	eth0, eth1 := []string{n.mac("eth0").String()}, []string{n.mac("eth1").String()}
	assert.Equal(t, eth0, answerers(t, lan.Hosts[1], vipA))
	assert.Equal(t, eth1, answerers(t, dmz.Hosts[0], vipA))

	announced := func() float64 { return testutil.ToFloat64(n.metrics.announcements.WithLabelValues("eth0", "IPv4")) }
	n.announcedTwice(1)
	dmz.Switch.Run("ip", "link", "set", port, "down")
	n.announcedOn("on the other one", "eth0")
	assert.Equal(t, eth0, answerers(t, lan.Hosts[1], vipA))
	assert.Empty(t, arping(t, dmz.Hosts[0], vipA))
	dmz.Switch.Run("ip", "link", "set", port, "up")
	n.announcedOn("on both again", "eth0", "eth1")
	assert.Equal(t, eth1, answerers(t, dmz.Hosts[0], vipA))
	assert.InDelta(t, 2*len(segment.Schedule), announced(), 0, "announced on the segment where nothing happened")
}
