package guard

import (
	"bytes"
	"io"
	"net"
	"net/netip"
	"os"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/hashicorp/memberlist"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// from opens a connection from one of loopback's addresses.
func (m *member) from(source string) net.Conn {
	m.t.Helper()
	d := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(source)}, Timeout: testTimeout}
	c, err := d.Dial("tcp", m.address())
	require.NoError(m.t, err)
	m.t.Cleanup(func() { c.Close() })
	return c
}

// openNow returns how many connections the member has.
func (m *member) openNow() int { return m.sockets.limiter.Count() }

// isClosed waits until the other side has closed the connection.
func isClosed(t *testing.T, c net.Conn) {
	t.Helper()
	require.NoError(t, c.SetReadDeadline(time.Now().Add(testTimeout)))
	_, err := c.Read(make([]byte, 1))
	require.Error(t, err)
	require.NotErrorIs(t, err, os.ErrDeadlineExceeded, "it is open still")
}

// Strangers from many addresses have four connections, the others of which are closed,
// the oldest first; speakers join and are joined all the while.
func TestStrangersShareOnePlace(t *testing.T) {
	t.Parallel()
	var asked atomic.Int64 // it is asked about each connection
	speakers := func(a netip.Addr) bool { asked.Add(1); return a == netip.MustParseAddr("127.0.0.2") }
	m := newMember(t, "n1", "127.0.0.1", speakers)
	var all []net.Conn
	for i := range 3 * MaxOfSource {
		all = append(all, m.from(netip.AddrFrom4([4]byte{127, 0, 1, byte(i + 1)}).String()))
	}
	require.Eventually(t, func() bool { return asked.Load() == int64(len(all)) }, testTimeout, time.Millisecond)
	assert.LessOrEqual(t, m.openNow(), MaxOfSource, "they make room, and do not wait for the time that ends the silent ones")
	for _, c := range all[:len(all)-MaxOfSource] {
		isClosed(t, c)
	}
	m.isWell(newMember(t, "n2", "127.0.0.2", anybody))
	m.isWell(newMember(t, "n3", "127.0.0.3", anybody)) // which no Lease names yet
}

// A known address, behind which a pod may be, has four connections, and the port has 32.
func TestBoundsOfConnections(t *testing.T) {
	t.Parallel()
	var asked atomic.Int64 // it is asked about each connection
	m := newMember(t, "n1", "127.0.0.1", func(netip.Addr) bool { asked.Add(1); return true }, func(c *memberlist.Config) {
		c.TCPTimeout = time.Hour // the silent ones are left to the guard
	})
	first := m.from("127.0.1.1")
	for range 3*MaxOfSource - 1 {
		m.from("127.0.1.1")
	}
	require.Eventually(t, func() bool { return asked.Load() == 3*MaxOfSource }, testTimeout, time.Millisecond)
	assert.LessOrEqual(t, m.openNow(), MaxOfSource, "they make room at once")
	isClosed(t, first)
	for i := range 3 * MaxStreams {
		m.from(netip.AddrFrom4([4]byte{127, 0, 2, byte(i/2 + 1)}).String())
		require.LessOrEqual(t, m.openNow(), MaxStreams)
	}
	m.isWell(newMember(t, "n2", "127.0.0.2", anybody))
	// A connection on which nothing comes is closed in time, and its place is free.
	require.Eventually(t, func() bool { return m.openNow() == 0 }, testTimeout, time.Millisecond)
}

// A stranger gets to send as much as the sealed length of a message. Then its connection is closed, while one that
// sends nothing is still open.
func TestStrangersSendALength(t *testing.T) {
	t.Parallel()
	m := newMember(t, "n1", "127.0.0.1", anybody)
	require.Eventually(t, func() bool { // a process that does not run for streamTime finds both closed
		began := time.Now()
		silent, short, c := m.from("127.0.1.1"), m.from("127.0.1.2"), m.from("127.0.1.3")
		length := bytes.Repeat([]byte{0, 0, 16, 0}, headerSize/4) // anywhere it names a length that is allowed
		_, err := short.Write(length[1:])
		require.NoError(t, err)
		_, err = c.Write(length)
		require.NoError(t, err)
		isClosed(t, c)
		return isOpen(t, silent) && isOpen(t, short) && time.Since(began) < streamTime
	}, 2*testTimeout, time.Millisecond)
}

// Nobody waits for a message that is longer than any: its connection is closed as soon as the length is read, and what
// comes after it is not kept.
func TestTooLongMessagesAreNotAwaited(t *testing.T) {
	t.Parallel()
	m := newMember(t, "n1", "127.0.0.1", anybody)
	for _, length := range []int{MaxMessage + Overhead + 1, 1<<32 - 1} {
		require.Eventually(t, func() bool { // a process that does not run for streamTime finds it closed for that
			began, c := time.Now(), m.from("127.0.1.1")
			_, err := c.Write(streamOf(t, nil, length)[:headerSize])
			require.NoError(t, err)
			isClosed(t, c)
			return time.Since(began) < streamTime
		}, testTimeout, time.Millisecond, "length %d", length)
	}
}

// isOpen reports whether the other side has not closed the connection.
func isOpen(t *testing.T, c net.Conn) (open bool) {
	t.Helper()
	raw, err := c.(*net.TCPConn).SyscallConn()
	require.NoError(t, err)
	require.NoError(t, raw.Control(func(fd uintptr) {
		_, _, err := unix.Recvfrom(int(fd), make([]byte, 1), unix.MSG_DONTWAIT|unix.MSG_PEEK)
		open = err == unix.EAGAIN
	}))
	return open
}

// Strangers send as much as they can, by connections and packets, for two seconds: the
// speaker keeps little of it, and another one joins and pings it all the while.
func TestFlood(t *testing.T) {
	m := newMember(t, "n1", "127.0.0.1", func(netip.Addr) bool { return false })
	other := newMember(t, "n2", "127.0.0.2", anybody, func(c *memberlist.Config) {
		c.TCPTimeout, c.ProbeInterval, c.ProbeTimeout = time.Second, time.Second, time.Second/2 // it asks again soon
	})
	third := newMember(t, "n3", "127.0.0.2", anybody)
	m.isWell(third)
	junk := bytes.Repeat([]byte{0xff}, 64<<10)
	runtime.GC()
	var before, now runtime.MemStats
	runtime.ReadMemStats(&before)
	stop := make(chan struct{})
	var running sync.WaitGroup
	for i := range 40 {
		running.Go(func() {
			d := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.IPv4(127, 0, 3, byte(i+1))}, Timeout: time.Second}
			for {
				select {
				case <-stop:
					return
				case <-time.After(20 * time.Millisecond):
				}
				c, err := d.Dial("tcp", m.address())
				if err != nil {
					continue // the kernel's queue is full, which is the bound
				}
				_, _ = c.Write(junk)
				c.Close()
			}
		})
	}
	running.Go(func() {
		c, err := net.Dial("udp", m.address())
		if !assert.NoError(t, err) {
			return
		}
		defer c.Close()
		tick := time.NewTicker(time.Millisecond)
		defer tick.Stop()
		for {
			select {
			case <-stop:
				return
			case <-tick.C:
				for _, n := range []int{0, 1, 1400, MaxPacket, MaxPacket + 1, 60_000} {
					_, _ = c.Write(junk[:n])
				}
			}
		}
	})
	most := uint64(0)
	asked, joined, pinged := 0, 0, 0
	for began := time.Now(); joined < 10 || pinged < 10 || time.Since(began) < 2*time.Second; asked++ {
		require.Less(t, time.Since(began), time.Minute, "%d connections and %d packets of %d were answered", joined, pinged, asked)
		// One of them may lose its place or its packet, and is repeated, as speakers do.
		if _, err := other.Join([]string{m.address()}); err == nil {
			joined++
		}
		if _, err := other.Ping("n1", net.UDPAddrFromAddrPort(m.sockets.Address())); err == nil {
			pinged++
		}
		runtime.ReadMemStats(&now)
		most = max(most, now.HeapAlloc-min(now.HeapAlloc, before.HeapAlloc))
		require.LessOrEqual(t, m.openNow(), MaxOfSource)
	}
	close(stop)
	running.Wait()
	t.Logf("%d connections and %d packets of %d were answered", joined, pinged, asked)
	assert.Less(t, most, uint64(32<<20), "of heap")
	assert.Positive(t, m.refused.Load())
	m.isWell(third)
}

// An attacker who replays the sealed length of a recorded message can make a speaker wait for
// at most the longest message.
func TestRecordedLength(t *testing.T) {
	t.Parallel()
	m := newMember(t, "n1", "127.0.0.1", anybody)
	c := m.from("127.0.1.1")
	_, err := c.Write(streamOf(t, nil, MaxMessage+Overhead)[:headerSize])
	require.NoError(t, err)
	_, err = io.CopyN(c, zeros{}, MaxMessage+Overhead)
	require.NoError(t, err)
	require.Eventually(t, func() bool { return m.refused.Load() == 1 }, testTimeout, time.Millisecond)
	m.isWell(newMember(t, "n2", "127.0.0.2", anybody))
}

type zeros struct{}

func (zeros) Read(b []byte) (int, error) { clear(b); return len(b), nil }
