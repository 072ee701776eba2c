package bgp

import (
	"net"
	"net/netip"
	"os"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// Strangers open connections to the port of passive sessions: each is closed at once. Of
// those from the router's address the newest one is kept, and the others are closed.
func TestStrangersAtTheBGPPort(t *testing.T) {
	t.Parallel()
	router := netip.MustParseAddr("127.0.0.2")
	l := newListeners(func(f func() error) error { return f() })
	s := &session{Peering: &Peering{ctx: t.Context()}, accepted: make(chan *net.TCPConn, 1)}
	port, err := net.ListenTCP("tcp", net.TCPAddrFromAddrPort(netip.MustParseAddrPort("127.0.0.1:0")))
	require.NoError(t, err)
	l.running.Go(func() { l.accept(port) })
	dial := func(from string) net.Conn {
		d := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(from)}, Timeout: 20 * time.Second}
		c, err := d.Dial("tcp", port.Addr().String())
		require.NoError(t, err)
		t.Cleanup(func() { c.Close() })
		require.NoError(t, c.SetReadDeadline(time.Now().Add(20*time.Second)))
		return c
	}
	_, err = dial(router.String()).Read(make([]byte, 1)) // the port is open before it is known who may come
	require.Error(t, err)
	require.NotErrorIs(t, err, os.ErrDeadlineExceeded)
	l.peers.Store(&map[netip.Addr]*session{router: s})
	var routers []net.Conn
	for i := range 200 {
		_, err := dial(netip.AddrFrom4([4]byte{127, 0, 1, byte(i + 1)}).String()).Read(make([]byte, 1))
		require.Error(t, err)
		require.NotErrorIs(t, err, os.ErrDeadlineExceeded, "a stranger's connection is open")
		if i%20 == 0 {
			routers = append(routers, dial(router.String()))
		}
	}
	for _, c := range routers[:len(routers)-1] {
		_, err := c.Read(make([]byte, 1))
		require.Error(t, err)
		require.NotErrorIs(t, err, os.ErrDeadlineExceeded, "more than one is kept")
	}
	kept := <-s.accepted
	assert.Equal(t, routers[len(routers)-1].LocalAddr().String(), kept.RemoteAddr().String())
	require.NoError(t, kept.Close())
	require.NoError(t, port.Close())
	l.running.Wait()
}

// A password that cannot be set is an error each time, in words, and is not taken for set.
func TestPasswordThatCannotBeSet(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 1)
	l := newListeners(w.node.Do)
	defer l.close()
	right := map[netip.Addr]string{tor4: "secret"}
	wrong := map[netip.Addr]string{tor4: "secret", tor6: "the kernel wants an IPv4 address here"}
	require.NoError(t, l.listen(node4, right))
	for range 2 {
		require.ErrorContains(t, l.listen(node4, wrong), "set the TCP-MD5 password for 2001:db8::2: invalid argument")
		require.Empty(t, l.open)
	}
	require.Eventually(t, func() bool { return l.listen(node4, right) == nil }, 30*time.Second, 50*time.Millisecond,
		"the kernel closes a socket a moment later")
}
