package bfd

import (
	"fmt"
	"maps"
	"net"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/lodestone-lb/lodestone/pkg/testnet"
)

// drops returns how many datagrams the kernel had no room for, by local port and family.
func drops(t *testing.T, h *testnet.Host) map[string]int {
	t.Helper()
	all := map[string]int{}
	require.NoError(t, h.Do(func() error {
		for _, file := range []string{"udp", "udp6"} {
			table, err := os.ReadFile(fmt.Sprintf("/proc/thread-self/net/%s", file))
			if err != nil {
				return err
			}
			for line := range strings.Lines(string(table)) {
				f := strings.Fields(line)
				_, port, found := strings.Cut(f[1], ":")
				number, err := strconv.ParseUint(port, 16, 16)
				if !found || err != nil {
					continue // the header
				}
				dropped, err := strconv.Atoi(f[len(f)-1])
				if err != nil {
					return err
				}
				all[fmt.Sprint(file, " ", number)] += dropped
			}
		}
		return nil
	}))
	return all
}

// TestFloodOfEveryPort: strangers send to every port as fast as they can, small packets and large ones, from addresses of
// their own and, from too far away, from the peer's. The peers' packets find room: none is lost, and the strangers' are counted.
func TestFloodOfEveryPort(t *testing.T) {
	s, a, b := pair(t)
	const flood = 10_000
	sessions := func(four, six string) map[string]Session {
		timers := within(50 * ms)
		return map[string]Session{
			"single":     {Remote: addr(four), Timers: timers},
			"single 6":   {Remote: addr(six), Interface: "eth0", Timers: timers},
			"multihop":   {Remote: addr(four), Multihop: true, MinTTL: 250, Timers: timers},
			"multihop 6": {Remote: addr(six), Multihop: true, MinTTL: 250, Timers: timers},
		}
	}
	names := slices.Sorted(maps.Keys(sessions("198.18.0.2", "2001:db8::2")))
	a.set(sessions("198.18.0.2", "2001:db8::2"))
	b.set(sessions("198.18.0.1", "2001:db8::1"))
	for _, name := range names {
		a.awaitUp(name)
		b.awaitUp(name)
	}
	counts := func(name string) (sent, received uint64) {
		received = a.States()[name].Received // first, so that a packet under way counts as lost
		return b.States()[name].Sent, received
	}
	sentBefore, receivedBefore := map[string]uint64{}, map[string]uint64{}
	for _, name := range names {
		sentBefore[name], receivedBefore[name] = counts(name)
	}
	var flooding sync.WaitGroup
	var sent [4]int
	forged := Packet{state: Down, multiplier: 3, my: 1, your: a.States()["single"].Discriminator}.marshal()
	for i, to := range []string{"198.18.0.1:3784", "[2001:db8::1]:3784", "198.18.0.1:4784", "[2001:db8::1]:4784"} {
		near, afar := dialWithHops(t, s.Hosts[2], to, maxHops, ""), dialWithHops(t, s.Hosts[1], to, 249, "")
		flooding.Go(func() {
			large := append(slices.Clone(forged), make([]byte, 1400-len(forged))...)
			for end := time.Now().Add(detection * 3 / 2); time.Now().Before(end) || sent[i] <= flood; sent[i] += 4 {
				for _, c := range []net.Conn{near, afar} {
					for _, packet := range [][]byte{forged, large} {
						if _, err := c.Write(packet); !assert.NoError(t, err) {
							return
						}
					}
				}
			}
		})
	}
	flooding.Wait()
	t.Logf("sent %d, dropped by the kernel %v, refused %d and %d", sent, drops(t, s.Hosts[0]), a.discards(WrongPath), a.discards(BadHops))
	for _, name := range names {
		for _, n := range []*node{a, b} {
			require.True(t, n.States()[name].Up(), name)
			require.EqualValues(t, 1, n.States()[name].Transitions, name)
		}
		var sent, received uint64
		assert.Eventually(t, func() bool { // lost ones remain missing, those under way do not
			sent, received = counts(name)
			sent, received = sent-sentBefore[name], received-receivedBefore[name]
			return received+1 >= sent
		}, answerTimeout, 10*ms, name)
		t.Logf("%s: %d of %d packets of the peer came", name, received, sent)
		assert.Greater(t, sent, uint64(20), name)
	}
	require.NotZero(t, a.discards(BadHops))
	require.NotZero(t, a.discards(WrongPath)+a.discards(UnknownDiscriminator))
}

// The kernel keeps apart what is from a peer and not from too far away, also with more sessions than a program has. The port
// can be had once.
func TestStrangersAreSeparated(t *testing.T) {
	t.Parallel()
	h := testnet.NewHost(t, "node")
	h.Run("ip", "link", "set", "lo", "up")
	h.Run("ip", "addr", "add", "2001:db8::1/128", "dev", "lo")
	h.Run("ip", "addr", "add", "2001:db8:9::1/128", "dev", "lo")
	for name, of := range map[string]struct {
		transport
		to, peer, stranger string
		minTTL             int
	}{
		"single":     {transport{}, "127.0.0.1:3784", "127.1.0.1", "127.1.0.2", 0},
		"single 6":   {transport{v6: true}, "[::1]:3784", "2001:db8::1", "2001:db8:9::1", 0},
		"multihop":   {transport{multihop: true}, "127.0.0.1:4784", "127.1.0.1", "127.1.0.2", 250},
		"multihop 6": {transport{v6: true, multihop: true}, "[::1]:4784", "2001:db8::1", "2001:db8:9::1", 250},
	} {
		t.Run(name, func(t *testing.T) {
			var fds []int
			require.NoError(t, h.Do(func() (err error) {
				fds, err = listen(of.transport)
				return err
			}))
			defer closeSockets(fds)
			require.NoError(t, h.Do(func() error {
				_, err := listen(of.transport)
				require.ErrorIs(t, err, unix.EADDRINUSE)
				return nil
			}))
			var sessions []*session
			add := func(remote netip.Addr) {
				sessions = append(sessions, &session{want: Session{Remote: remote, Multihop: of.multihop, MinTTL: of.minTTL}})
			}
			arrives := func(at int, from string, hops int) {
				t.Helper()
				c := dialWithHops(t, h, of.to, hops, from)
				_, err := c.Write([]byte("packet"))
				require.NoError(t, err)
				var n [receiveSockets]int
				require.Eventually(t, func() bool {
					for i, fd := range fds {
						for _, err := read(fd, of.transport, &buffers{}); err == nil; _, err = read(fd, of.transport, &buffers{}) {
							n[i]++
						}
					}
					return n[ofStrangers]+n[ofPeers] > 0
				}, answerTimeout, ms)
				require.Equal(t, 1, n[at])
			}
			least := maxHops
			if of.multihop {
				least = of.minTTL
			}
			require.NoError(t, separate(of.transport, fds[0], nil))
			arrives(ofStrangers, of.peer, maxHops)
			for other := addr(of.stranger).Next(); len(sessions) < mostSeparated-1; other = other.Next() {
				add(other)
			}
			add(addr(of.peer))
			add(addr(of.stranger)) // one too many
			require.NoError(t, separate(of.transport, fds[0], sessions))
			arrives(ofPeers, of.peer, maxHops)
			arrives(ofPeers, of.peer, least)
			arrives(ofStrangers, of.peer, least-1)
			arrives(ofStrangers, of.stranger, maxHops)
			require.NoError(t, separate(of.transport, fds[0], sessions[:1]))
			arrives(ofStrangers, of.peer, maxHops)
		})
	}
}
