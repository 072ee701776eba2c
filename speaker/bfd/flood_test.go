package bfd

import (
	"fmt"
	"net"
	"os"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

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

// TestFloodOfEveryPort: strangers send to every port as fast as they can, from addresses of
// their own, what the peers could have sent, for one and a half times as long as the sessions wait for a
// packet. The bound is the queue of each port in the kernel, which drops some packets of the peers,
// too: the sessions with ten packets in a Detection Time go on, on both sides.
func TestFloodOfEveryPort(t *testing.T) {
	s, a, b := pair(t)
	const flood = 10_000
	sessions := func(four, six string) map[string]Session {
		timers := every(detection/10, 10)
		return map[string]Session{
			"single":     {Remote: addr(four), Timers: timers},
			"single 6":   {Remote: addr(six), Interface: "eth0", Timers: timers},
			"multihop":   {Remote: addr(four), Multihop: true, MinTTL: 250, Timers: timers},
			"multihop 6": {Remote: addr(six), Multihop: true, MinTTL: 250, Timers: timers},
		}
	}
	a.set(sessions("198.18.0.2", "2001:db8::2"))
	b.set(sessions("198.18.0.1", "2001:db8::1"))
	for name := range sessions("198.18.0.2", "2001:db8::2") {
		a.awaitUp(name)
		b.awaitUp(name)
	}
	var flooding sync.WaitGroup
	var sent [4]int
	for i, to := range []string{"198.18.0.1:3784", "[2001:db8::1]:3784", "198.18.0.1:4784", "[2001:db8::1]:4784"} {
		forged := Packet{state: Down, multiplier: 3, my: 1, your: a.States()["single"].Discriminator}.marshal()
		flooding.Go(func() {
			require.NoError(t, s.Hosts[2].Do(func() error {
				c, err := net.Dial("udp", to)
				if err != nil {
					return err
				}
				defer c.Close()
				raw, err := c.(*net.UDPConn).SyscallConn()
				if err != nil {
					return err
				}
				if err := raw.Control(func(fd uintptr) {
					o := option{unix.IPPROTO_IP, unix.IP_TTL, maxHops}
					if i%2 == 1 {
						o = option{unix.IPPROTO_IPV6, unix.IPV6_UNICAST_HOPS, maxHops}
					}
					require.NoError(t, setOptions(int(fd), o))
				}); err != nil {
					return err
				}
				for end := time.Now().Add(detection * 3 / 2); time.Now().Before(end) || sent[i] <= flood; sent[i]++ {
					if _, err := c.Write(forged); err != nil {
						return err
					}
				}
				return nil
			}))
		})
	}
	flooding.Wait()
	t.Logf("sent %d, dropped by the kernel %v, accepted or refused %d", sent, drops(t, s.Hosts[0]), a.discards(WrongPath))
	for name := range sessions("198.18.0.2", "2001:db8::2") {
		for _, n := range []*node{a, b} {
			require.True(t, n.States()[name].Up(), name)
			require.EqualValues(t, 1, n.States()[name].Transitions, name)
		}
		received := a.States()[name].Received
		require.Eventually(t, func() bool { return a.States()[name].Received > received+5 }, answerTimeout, 10*ms, name)
	}
	for i, n := range sent {
		require.Greater(t, n, flood, "of flood %d", i)
	}
}
