package membership

import (
	"bytes"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/hashicorp/memberlist"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
	"k8s.io/client-go/tools/cache"

	"github.com/lodestone-lb/lodestone/pkg/report"
	"github.com/lodestone-lb/lodestone/speaker/membership/guard"
	"github.com/lodestone-lb/lodestone/speaker/membership/keys"
)

// packetOf returns a packet that a speaker with the key sends: it asks n1
// whether it is alive.
func (c *cluster) packetOf(secret keys.Secret) []byte {
	c.t.Helper()
	socket, err := net.ListenPacket("udp", "127.0.0.1:0")
	require.NoError(c.t, err)
	defer socket.Close()
	o := *c
	o.secret = secret
	sender := o.mute("sender", netip.MustParseAddrPort("127.0.0.1:0"))
	_, err = sender.list.Load().Ping("n1", socket.LocalAddr())
	require.Error(c.t, err, "nobody answers")
	packet := make([]byte, 1<<16)
	require.NoError(c.t, socket.SetReadDeadline(time.Now().Add(testTimeout)))
	n, _, err := socket.ReadFrom(packet)
	require.NoError(c.t, err)
	return packet[:n]
}

func refusedBy(t *Task) float64 { return testutil.ToFloat64(t.metrics.refused) }

// FuzzStranger sends a speaker what anybody may send: it is counted, and changes
// nothing.
func FuzzStranger(f *testing.F) {
	c := makeCluster(f)
	n1 := c.mute("n1", netip.MustParseAddrPort("127.0.0.1:0"))
	conn, err := net.Dial("udp", n1.options.Address.String())
	require.NoError(f, err)
	f.Cleanup(func() { conn.Close() })
	ours := c.packetOf(c.secret)
	for _, packet := range [][]byte{ours, []byte("a stranger's")} {
		_, err = conn.Write(packet)
		require.NoError(f, err)
	}
	require.Eventually(f, func() bool { return refusedBy(n1.Task) > 0 }, testTimeout, time.Millisecond)
	require.EqualValues(f, 1, refusedBy(n1.Task), "who has the key is no stranger")
	require.Eventually(f, func() bool { return len(n1.Speakers()) == 2 }, testTimeout, time.Millisecond, "but a speaker")

	f.Add(c.packetOf(secretOf(f, "wrong horse battery staple")))
	f.Add([]byte{})
	f.Add(make([]byte, 1400))
	for n := range ours {
		f.Add(ours[:n])
		flipped := bytes.Clone(ours)
		flipped[n] ^= 1
		f.Add(flipped)
	}
	f.Add(append(bytes.Clone(ours), 0))
	f.Fuzz(func(t *testing.T, b []byte) {
		if len(b) > 65507 || bytes.Equal(b, ours) { // the largest datagram
			return
		}
		refused, before := refusedBy(n1.Task), n1.Speakers()
		_, err := conn.Write(b)
		require.NoError(t, err)
		for end := time.Now().Add(testTimeout); refusedBy(n1.Task) == refused; time.Sleep(20 * time.Microsecond) {
			require.True(t, time.Now().Before(end), "not refused: %q", b)
		}
		require.Equal(t, refused+1, refusedBy(n1.Task))
		for name, ready := range n1.Speakers() { // the one above is forgotten after some minutes
			was, there := before[name]
			require.True(t, there && was == ready, "%s is there", name)
		}
	})
}

// Connections without the key, or with half a message, are counted and change
// nothing.
func TestStrangersConnect(t *testing.T) {
	c := newCluster(t)
	n1 := c.mute("n1", netip.MustParseAddrPort("127.0.0.1:0"))
	for i, sent := range []string{"", "\xf4\xff", "GET / HTTP/1.1\r\n\r\n", strings.Repeat("x", 43), strings.Repeat("x", 44),
		strings.Repeat("x", 1<<20)} {
		conn, err := net.Dial("tcp", n1.options.Address.String())
		require.NoError(t, err)
		// The connection may be refused and reset before all is written, or closed.
		_, _ = conn.Write([]byte(sent))
		_ = conn.(*net.TCPConn).CloseWrite()
		require.Eventually(t, func() bool { return refusedBy(n1.Task) == float64(i+1) }, testTimeout, time.Millisecond, "%q", sent)
		conn.Close()
	}
	require.Len(t, n1.Speakers(), 1)
}

// Strangers, whose addresses no Lease has, share the places of one address, and take none from a speaker.
func TestStrangersTakeNoPlaceOfASpeaker(t *testing.T) {
	c := newCluster(t)
	n1 := c.mute("n1", netip.MustParseAddrPort("127.0.0.1:0"))
	require.False(t, n1.leases.known(netip.MustParseAddr("127.0.9.9")), "no Lease is known")
	store, n2 := cache.NewIndexer(cache.MetaNamespaceKeyFunc, cache.Indexers{byAddress: addressOf}), leaseOf("n2")
	n2.Address = netip.MustParseAddrPort("127.0.9.9:9744")
	require.NoError(t, store.Add(n2))
	n1.leases.mu.Lock()
	n1.leases.store = store
	n1.leases.mu.Unlock()
	from := func(source string) net.Conn {
		d := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(source)}, Timeout: testTimeout}
		conn, err := d.Dial("tcp", n1.options.Address.String())
		require.NoError(t, err)
		t.Cleanup(func() { conn.Close() })
		return conn
	}
	require.Eventually(t, func() bool { // a process that does not run for 3 s closes all of them
		speaker, strangers := from("127.0.9.9"), []net.Conn{}
		for i := range guard.MaxOfSource + 1 {
			strangers = append(strangers, from(fmt.Sprintf("127.0.9.%d", 10+i)))
		}
		closed := make([]byte, 1)
		require.NoError(t, strangers[0].SetReadDeadline(time.Now().Add(testTimeout)))
		_, err := strangers[0].Read(closed)
		require.Error(t, err)
		require.NotErrorIs(t, err, os.ErrDeadlineExceeded)
		return !slices.ContainsFunc(append(strangers[1:], speaker), func(conn net.Conn) bool {
			raw, err := conn.(*net.TCPConn).SyscallConn()
			require.NoError(t, err)
			require.NoError(t, raw.Control(func(fd uintptr) { _, _, err = unix.Recvfrom(int(fd), closed, unix.MSG_DONTWAIT) }))
			return err != unix.EAGAIN
		})
	}, testTimeout, time.Millisecond)
}

// FuzzMetadata reads what a speaker of another version may publish.
func FuzzMetadata(f *testing.F) {
	for _, claimed := range []report.Claims{{}, {0: 1, 127: 0x80}} {
		for _, down := range []string{"", "eth0", "eth0,eth1"} {
			task := New(makeCluster(f).options("n1"))
			task.Claim(claimed)
			task.setDown(down, down)
			meta := task.gossip.NodeMeta(memberlist.MetaMaxSize)
			for n := range meta {
				f.Add(meta[:n])
			}
			f.Add(meta)
		}
	}
	f.Add(bytes.Repeat([]byte{','}, memberlist.MetaMaxSize))
	segments := []report.Segment{{Interface: "eth0"}, {Interface: "eth1"}}
	f.Fuzz(func(t *testing.T, meta []byte) {
		got := decode(meta)
		made := len(meta) >= 2 && meta[1]&metaClaims != 0
		assert.False(t, !made && got.claims != (report.Claims{}), "claims that were not made")
		network := withLinks(report.Network{Segments: segments}, got.down)
		for i, s := range network.Segments {
			assert.Equal(t, segments[i].Interface, s.Interface)
			assert.Equal(t, strings.Contains(","+got.down+",", ","+s.Interface+","), s.Down)
		}
		assert.False(t, segments[0].Down || segments[1].Down, "the segments of the Lease were modified")
	})
}
