package detector

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"runtime"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/lodestone-lb/lodestone/pkg/testnet"
	"github.com/lodestone-lb/lodestone/speaker/detector/watch"
)

const (
	testTimeout = 20 * time.Second
	// defaultBuffer is the size that kernels allow a buffer by default.
	defaultBuffer = 212992
)

// slow is a timing by which speakers of one busy process are not taken for lost.
var slow = watch.Timing{Interval: 50 * time.Millisecond, Missed: 40}

// running is a Task that runs, beside a socket in memberlist's place.
type running struct {
	*Task
	memberlist net.PacketConn
	refused    atomic.Int64
	stop       func()
}

// run runs a Task on loopback, at an address of its own.
func run(t *testing.T, host byte, timing watch.Timing, keys ...string) *running {
	t.Helper()
	here := func(f func() error) error { return f() }
	return runAt(t, here, netip.AddrFrom4([4]byte{127, 9, byte(len(t.Name())), host}), host, timing, keys...)
}

// runAt runs a Task at the address, with sockets that are opened inside.
func runAt(t *testing.T, inside func(func() error) error, at netip.Addr, host byte, timing watch.Timing, keys ...string) *running {
	t.Helper()
	r := &running{}
	require.NoError(t, inside(func() (err error) {
		if r.memberlist, err = shared(netip.AddrPortFrom(at, 0)); err != nil {
			return err
		}
		self := watch.Member{Name: fmt.Sprint("n", host), Session: uint64(host) << 8, Addr: r.memberlist.LocalAddr().(*net.UDPAddr).AddrPort()}
		r.Task, err = Listen(Options{Self: self, Want: want(timing, keys), Log: slog.New(slog.DiscardHandler),
			Refused: func() { r.refused.Add(1) }})
		return err
	}))
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- r.Run(ctx) }()
	ended := false
	r.stop = func() {
		cancel()
		if !ended {
			require.NoError(t, <-done)
			require.NoError(t, r.memberlist.Close())
		}
		ended = true
	}
	t.Cleanup(r.stop)
	return r
}

func want(timing watch.Timing, keys []string, members ...watch.Member) Want {
	w := Want{Members: members, Timing: timing}
	for _, k := range keys {
		w.Keys = append(w.Keys, []byte(k))
	}
	return w
}

// send sends what anybody may send.
func (r *running) send(t *testing.T, b []byte) {
	t.Helper()
	c, err := net.Dial("udp", r.options.Self.Addr.String())
	require.NoError(t, err)
	defer c.Close()
	_, err = c.Write(b)
	require.NoError(t, err)
}

func (r *running) isRefused(t *testing.T, n int64) {
	t.Helper()
	require.Eventually(t, func() bool { return r.refused.Load() >= n }, testTimeout, time.Millisecond)
	require.Equal(t, n, r.refused.Load())
}

// Three sockets share a port: each packet reaches the one that it is for.
func TestPortIsShared(t *testing.T) {
	t.Parallel()
	r := run(t, 1, slow, "a")
	for i := range 50 {
		packet := fmt.Sprintf("%d of memberlist", i)
		r.send(t, []byte(packet))
		b := make([]byte, 100)
		require.NoError(t, r.memberlist.SetReadDeadline(time.Now().Add(testTimeout)))
		n, _, err := r.memberlist.ReadFrom(b)
		require.NoError(t, err)
		require.Equal(t, packet, string(b[:n]))
	}
	require.Zero(t, r.refused.Load())
	r.send(t, []byte("LoB1"))
	r.isRefused(t, 1)
}

// Packets without the key are refused; the loop goes on after a flood of them.
func TestStrangers(t *testing.T) {
	t.Parallel()
	r := run(t, 1, slow, "a")
	stranger := watch.NewSealer([][]byte{[]byte("b")})
	const flood = 2000
	for i := range flood {
		r.send(t, stranger.Seal(nil, watch.Packet{Kind: watch.Ask, Interval: time.Second / 10, Sequence: uint64(i)}, r.options.Self.Session))
	}
	require.Eventually(t, func() bool { return r.refused.Load() > flood/2 }, testTimeout, time.Millisecond) // some may be lost
	other := run(t, 2, slow, "a")
	meet(r, other, "a")
	ends(t, r, other)
}

// member is a speaker of the test's: it sends heartbeats, answers, and counts how often it is doubted.
type member struct {
	watch.Member
	doubts atomic.Int64
}

// newMember starts a member that r watches.
func newMember(t *testing.T, h *testnet.Host, at string, r *running, timing watch.Timing, key string) *member {
	t.Helper()
	var c *net.UDPConn
	require.NoError(t, h.Do(func() (err error) {
		c, err = net.ListenUDP("udp", net.UDPAddrFromAddrPort(netip.MustParseAddrPort(at)))
		return err
	}))
	t.Cleanup(func() { c.Close() })
	m := &member{Member: watch.Member{Name: "m", Session: 77, Addr: netip.MustParseAddrPort(at)}}
	var sequence atomic.Uint64
	send := func(s *watch.Sealer, kind watch.Kind) error {
		p := watch.Packet{Kind: kind, From: m.Session, Sequence: sequence.Add(1), Interval: timing.Interval}
		_, err := c.WriteToUDPAddrPort(s.Seal(nil, p, r.options.Self.Session), r.options.Self.Addr)
		return err
	}
	go func() {
		for s := watch.NewSealer([][]byte{[]byte(key)}); send(s, watch.Beat) == nil; time.Sleep(timing.Interval * 5 / 6) {
		}
	}()
	go func() {
		s, b := watch.NewSealer([][]byte{[]byte(key)}), make([]byte, 100)
		for {
			n, _, err := c.ReadFromUDPAddrPort(b)
			if err != nil {
				return
			}
			if p, ok := s.Open(b[:n], m.Session); ok && p.Kind == watch.Ask {
				m.doubts.Add(1)
				send(s, watch.Answer) //nolint:errcheck // it is closed
			}
		}
	}()
	return m
}

// A stranger who fills the sockets' buffers has nobody doubted: not with large packets, which take most of the room, and not
// with small ones on a node where few fill a buffer, as a small buffer stands for network cards that have a page for each.
func TestStrangersFillTheBuffers(t *testing.T) {
	t.Parallel()
	for name, of := range map[string]struct{ size, buffer int }{
		"large packets": {1400, defaultBuffer}, "a small buffer": {40, defaultBuffer / 13},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := testnet.NewSegment(t, 3)
			timing := watch.Timing{Interval: 100 * time.Millisecond, Missed: 5}
			r := runAt(t, s.Hosts[0].Do, netip.MustParseAddr("198.18.0.1"), 1, timing, "a")
			require.NoError(t, set(r.sockets.beats.fd, unix.SO_RCVBUF, of.buffer))
			m := newMember(t, s.Hosts[1], "198.18.0.2:9744", r, timing, "a")
			r.Set(want(timing, []string{"a"}, m.Member))
			hears := func() bool {
				w := r.Status().Watched
				return len(w) == 1 && w[0].Silent > 0 && w[0].Silent < 2*timing.Interval
			}
			require.Eventually(t, hears, testTimeout, 10*time.Millisecond)
			doubts := m.doubts.Load()
			require.NoError(t, s.Hosts[2].Do(func() error {
				c, err := net.Dial("udp", r.options.Self.Addr.String())
				if err != nil {
					return err
				}
				defer c.Close()
				packet := append([]byte("LoB1"), make([]byte, 1396)...)
				for end := time.Now().Add(3 * time.Second); time.Now().Before(end); {
					for i := range 40 {
						size := of.size
						if i%20 == 0 {
							size = 40 // for the room that no large one fits into
						}
						if _, err := c.Write(packet[:size]); err != nil {
							return err
						}
					}
					time.Sleep(time.Millisecond)
				}
				return nil
			}))
			assert.Empty(t, r.Verdicts())
			assert.Equal(t, doubts, m.doubts.Load())
		})
	}
}

// meet has the two count each other as members.
func meet(a, b *running, keys ...string) {
	a.Set(want(watch.Timing{Interval: 10 * time.Millisecond, Missed: 3}, keys, b.options.Self))
	b.Set(want(watch.Timing{Interval: 10 * time.Millisecond, Missed: 3}, keys, a.options.Self))
}

// ends stops b and waits until a knows.
func ends(t *testing.T, a, b *running) {
	t.Helper()
	time.Sleep(300 * time.Millisecond)
	b.stop()
	select {
	case v := <-a.Verdicts():
		assert.Equal(t, b.options.Self, v.Member)
	case <-time.After(testTimeout):
		t.Error("nobody is lost")
	}
}

// A speaker that was lost and counts again at once is watched again, although the detector never saw that it was not listed.
func TestLostSpeakerThatCountsAgainIsWatched(t *testing.T) {
	t.Parallel()
	a, b := run(t, 1, slow, "a"), run(t, 2, slow, "a")
	meet(a, b, "a")
	ends(t, a, b)
	again := b.options.Self
	again.Joined++
	timing := watch.Timing{Interval: 10 * time.Millisecond, Missed: 3}
	a.Set(want(timing, []string{"a"}))
	a.Set(want(timing, []string{"a"}, again))
	select {
	case v := <-a.Verdicts():
		assert.Equal(t, again, v.Member)
	case <-time.After(testTimeout):
		t.Error("it is not lost once more")
	}
}

// The key is replaced while heartbeats are sent: for a while both are understood. No packet is refused.
func TestKeyIsReplaced(t *testing.T) {
	t.Parallel()
	a, b := run(t, 1, slow, "old"), run(t, 2, slow, "old")
	for _, keys := range [][2][]string{
		{{"old"}, {"old"}}, {{"old", "new"}, {"old"}}, {{"old", "new"}, {"old", "new"}}, {{"new", "old"}, {"old", "new"}},
		{{"new", "old"}, {"new", "old"}}, {{"new"}, {"new", "old"}}, {{"new"}, {"new"}},
	} {
		a.Set(want(slow, keys[0], b.options.Self))
		b.Set(want(slow, keys[1], a.options.Self))
		time.Sleep(200 * time.Millisecond)
	}
	assert.Zero(t, a.refused.Load()+b.refused.Load())
	assert.Empty(t, a.Verdicts())
	meet(a, b, "new")
	ends(t, a, b)
}

// besideMemberlist returns the detector's sockets on a port that memberlist has as well.
func besideMemberlist(t *testing.T, address string) (netip.AddrPort, *sockets) {
	t.Helper()
	memberlist, err := shared(netip.MustParseAddrPort(address))
	require.NoError(t, err)
	t.Cleanup(func() { memberlist.Close() })
	at := memberlist.LocalAddr().(*net.UDPAddr).AddrPort()
	s, err := listen(at)
	require.NoError(t, err)
	t.Cleanup(s.close)
	return at, s
}

// The kernel's time of a packet counts, and not when it is read.
func TestPacketsHaveTheTimeOfTheirArrival(t *testing.T) {
	t.Parallel()
	at, s := besideMemberlist(t, "127.0.0.1:0")
	c, err := net.Dial("udp", at.String())
	require.NoError(t, err)
	defer c.Close()
	now := readLate(t, s, func() {
		_, err = c.Write([]byte("LoB1 a heartbeat"))
		require.NoError(t, err)
	})
	assert.Equal(t, "LoB1 a heartbeat", string(s.beats.payload(0)))
	assert.Equal(t, c.LocalAddr().String(), s.beats.source(0).String())
	s.beats.before = s.beats.wall.Add(-10 * time.Millisecond)
	assert.Equal(t, now.Add(-10*time.Millisecond), s.beats.arrival(0, now), "older than the read before")
}

// readLate sends a packet, reads it late, and checks that it has the time at which it came. It returns when it was read. The kernel
// begins to stamp packets some time after the first socket wants that, and gives those before the time at which they are read.
func readLate(t *testing.T, s *sockets, send func()) (now time.Time) {
	t.Helper()
	for range 100 {
		sent := time.Now()
		send()
		time.Sleep(100 * time.Millisecond)
		require.Equal(t, 1, s.beats.read())
		now = time.Now()
		if s.beats.arrival(0, now).Sub(sent).Abs() < 50*time.Millisecond {
			return now
		}
	}
	require.Fail(t, "packets have the time at which they are read")
	return now
}

// A kernel before 5.1 stamps packets, too. A filter of system calls stands in for one, on a thread that ends with the test.
func TestKernelsWithoutTheNewStamps(t *testing.T) {
	const nr, option = 0, 32 // in struct seccomp_data: the system call, and the lower half of its third argument
	filter := []unix.SockFilter{
		{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, K: nr},
		{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: unix.SYS_SETSOCKOPT, Jf: 3},
		{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, K: option},
		{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: unix.SO_TIMESTAMPNS_NEW, Jf: 1},
		{Code: unix.BPF_RET | unix.BPF_K, K: unix.SECCOMP_RET_ERRNO | uint32(unix.ENOPROTOOPT)},
		{Code: unix.BPF_RET | unix.BPF_K, K: unix.SECCOMP_RET_ALLOW},
	}
	program := unix.SockFprog{Len: uint16(len(filter)), Filter: &filter[0]}
	memberlist, err := shared(netip.MustParseAddrPort("127.0.0.1:0"))
	require.NoError(t, err)
	defer memberlist.Close()
	at := memberlist.LocalAddr().(*net.UDPAddr).AddrPort()
	var s *sockets
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread()
		assert.NoError(t, unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
		assert.NoError(t, unix.Prctl(unix.PR_SET_SECCOMP, unix.SECCOMP_MODE_FILTER, uintptr(unsafe.Pointer(&program)), 0, 0))
		s, err = listen(at)
	}()
	<-done
	require.NoError(t, err)
	defer s.close()
	readLate(t, s, func() { s.send(at, []byte("LoB1")) })
}

// Packets that are longer than any of a speaker take no room in the kernel, however many come. Those as long as the longest one come in.
func TestLongPacketsTakeNoRoom(t *testing.T) {
	t.Parallel()
	at, s := besideMemberlist(t, "127.0.0.1:0")
	require.NoError(t, set(s.beats.fd, unix.SO_RCVBUF, defaultBuffer))
	c, err := net.Dial("udp", at.String())
	require.NoError(t, err)
	defer c.Close()
	const short = 100
	for range short {
		for range 20 {
			_, err = c.Write(append([]byte("LoB1"), make([]byte, 1396)...))
			require.NoError(t, err)
		}
		_, err = c.Write(append([]byte("LoB1"), make([]byte, watch.MaxPacket-4)...))
		require.NoError(t, err)
	}
	n := 0
	for read := s.beats.read(); read > 0; read = s.beats.read() {
		n += read
	}
	assert.Equal(t, short, n)
	assert.False(t, s.beats.crowded())
}

// Nothing is allocated for a packet that is read.
func TestNoAllocations(t *testing.T) {
	at, s := besideMemberlist(t, "127.0.0.1:0")
	assert.Zero(t, testing.AllocsPerRun(100, func() {
		s.send(at, []byte("LoU1"))
		if s.urgent.read() != 1 || s.urgent.source(0) != at || s.urgent.arrival(0, time.Now()).IsZero() {
			t.Error("not received")
		}
	}))
}

func TestIPv6(t *testing.T) {
	t.Parallel()
	at, s := besideMemberlist(t, "[::1]:0")
	s.send(at, []byte("LoB1"))
	require.Eventually(t, func() bool { return s.beats.read() == 1 }, testTimeout, time.Millisecond)
	assert.Equal(t, at, s.beats.source(0))
}
