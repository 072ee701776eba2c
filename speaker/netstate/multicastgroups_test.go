package netstate

import (
	"net"
	"net/netip"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/lodestone-lb/lodestone/pkg/testnet"
)

// The kernel forgets the groups of an interface that is too small for IPv6, whoever joined them.
func TestGroups(t *testing.T) {
	t.Parallel()
	h := testnet.NewSegment(t, 1).Hosts[0]
	group := netip.MustParseAddr("ff02::4711")
	in := func(name string) (groups map[netip.Addr]bool) {
		require.NoError(t, h.Do(func() error {
			i, err := net.InterfaceByName(name)
			if err == nil {
				groups, err = Groups(i.Index)
			}
			return err
		}))
		return groups
	}
	require.True(t, in("eth0")[netip.IPv6LinkLocalAllNodes()])
	require.False(t, in("eth0")[group])
	var listener *net.UDPConn
	require.NoError(t, h.Do(func() error {
		eth0, err := net.InterfaceByName("eth0")
		if err == nil {
			listener, err = net.ListenMulticastUDP("udp6", eth0, &net.UDPAddr{IP: group.AsSlice(), Port: 4711})
		}
		return err
	}))
	defer listener.Close()
	require.True(t, in("eth0")[group])
	require.False(t, in("lo")[group])
	h.Run("ip", "link", "set", "eth0", "mtu", "1000")
	require.Empty(t, in("eth0"))
	h.Run("ip", "link", "set", "eth0", "mtu", "1500")
	require.True(t, in("eth0")[netip.IPv6LinkLocalAllNodes()])
	require.False(t, in("eth0")[group])
}
