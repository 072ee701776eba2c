package guard

import (
	"bytes"
	"io"
	"log"
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/hashicorp/memberlist"
	"github.com/stretchr/testify/require"
)

// member is a memberlist, with the guard or without.
func member(t *testing.T, name string, guarded bool) *memberlist.Memberlist {
	t.Helper()
	c := memberlist.DefaultLANConfig()
	c.Name, c.BindAddr, c.BindPort, c.AdvertisePort, c.Label = name, "127.0.0.1", 0, 0, "lodestone"
	c.SecretKey, c.Logger = bytes.Repeat([]byte{1}, 32), log.New(io.Discard, "", 0)
	if guarded {
		transport, err := New(c, func() {})
		require.NoError(t, err)
		c.Transport = transport
	}
	m, err := memberlist.Create(c)
	require.NoError(t, err)
	t.Cleanup(func() { _ = m.Shutdown() })
	return m
}

func addressOf(m *memberlist.Memberlist) string { return m.LocalNode().Address() }

// Speakers of the version before have no guard: both kinds are one cluster.
func TestWithAndWithoutAGuard(t *testing.T) {
	t.Parallel()
	for _, join := range [][2]bool{{true, true}, {true, false}, {false, true}} {
		a, b := member(t, "a", join[0]), member(t, "b", join[1])
		_, err := a.Join([]string{addressOf(b)})
		require.NoError(t, err)
		require.Eventually(t, func() bool { return b.NumMembers() == 2 }, 10*time.Second, time.Millisecond)
		_, err = a.Ping("b", net.UDPAddrFromAddrPort(netip.MustParseAddrPort(addressOf(b))))
		require.NoError(t, err)
	}
}

// A packet of a speaker comes again, with another byte for how it is encrypted:
// memberlist alone would panic.
func TestRepeatedAsPadded(t *testing.T) {
	t.Parallel()
	refused := make(chan struct{}, 1)
	c := memberlist.DefaultLANConfig()
	c.BindAddr, c.BindPort, c.Label, c.Logger = "127.0.0.1", 0, "lodestone", log.New(io.Discard, "", 0)
	g, err := New(c, func() { refused <- struct{}{} })
	require.NoError(t, err)
	defer g.Shutdown() //nolint:errcheck // it returns nil
	conn, err := net.Dial("udp", netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"), uint16(c.BindPort)).String())
	require.NoError(t, err)
	defer conn.Close()
	packet := append([]byte("\xf4\x09lodestone\x01"), bytes.Repeat([]byte{9}, 60)...)
	_, err = conn.Write(packet)
	require.NoError(t, err)
	require.Equal(t, packet, (<-g.PacketCh()).Buf)
	packet[11] = 0
	_, err = conn.Write(packet)
	require.NoError(t, err)
	select {
	case <-refused:
	case <-g.PacketCh():
		t.Fatal("it passed")
	case <-time.After(10 * time.Second):
		t.Fatal("nothing comes")
	}
}

// Nobody reads any more, and Shutdown ends all the same.
func TestShutdown(t *testing.T) {
	t.Parallel()
	c := memberlist.DefaultLANConfig()
	c.BindAddr, c.BindPort, c.Label, c.Logger = "127.0.0.1", 0, "lodestone", log.New(io.Discard, "", 0)
	g, err := New(c, func() {})
	require.NoError(t, err)
	conn, err := net.Dial("tcp", netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"), uint16(c.BindPort)).String())
	require.NoError(t, err)
	defer conn.Close()
	require.NoError(t, g.Shutdown())
	require.NoError(t, conn.SetReadDeadline(time.Now().Add(10*time.Second)))
	_, err = conn.Read(make([]byte, 1))
	require.Error(t, err)
}
