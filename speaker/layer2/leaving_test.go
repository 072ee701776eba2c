package layer2

import (
	"fmt"
	"net"
	"net/netip"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	arppacket "github.com/mdlayher/arp"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/lodestone-lb/lodestone/pkg/testnet"
	"github.com/lodestone-lb/lodestone/speaker/layer2/wire"
	"github.com/lodestone-lb/lodestone/speaker/plan"
)

// leavingVIP is a set with one VIP that leaves.
func leavingVIP(vip netip.Addr) map[netip.Addr]plan.Layer2 {
	return map[netip.Addr]plan.Layer2{vip: {Leaving: true}}
}

// answersFor reports whether an interface of the world answers for vipA.
func (w *world) answersFor(name string) bool {
	w.take()
	w.receive(name, ask(vipA, clientIP, broadcast))
	return len(w.after(0)) > 0
}

// claim has another host claim vipA in front of the interface.
func (w *world) claim(name string) {
	w.receive(name, wire.ARP{}.Announce(claimOf(mac{2, 0, 0, 0, 0, 0xb}, vipA), true)[0])
	synctest.Wait()
}

// A VIP that leaves is answered for, interface by interface, until its next
// owner is heard, and neither announced nor defended.
func TestLeaving(t *testing.T) {
	t.Parallel()
	inWorld(t, func(t *testing.T, w *world) {
		w.set(everywhere(vipA))
		w.after(500 * time.Millisecond)
		w.set(leavingVIP(vipA))
		assert.Empty(t, w.after(time.Minute), "announced although it leaves")
		assert.True(t, w.Status().VIPs[0].Leaving)
		assert.True(t, w.answersFor("eth0"))
		assert.Equal(t, 1, w.Leaving())

		w.claim("eth0")
		assert.False(t, w.answersFor("eth0"))
		assert.True(t, w.answersFor("eth1"), "the next owner was not heard here")
		assert.Equal(t, 1, w.Leaving())
		w.claim("eth1")
		assert.False(t, w.answersFor("eth1"))
		assert.Zero(t, w.Leaving())
		w.set(leavingVIP(vipA))
		assert.False(t, w.answersFor("eth0"), "it came back by itself")
		assert.Empty(t, w.after(time.Minute), "defended against its next owner")
		assert.Empty(t, w.Conflicts())
		assert.Zero(t, testutil.ToFloat64(w.metrics.conflicts.WithLabelValues("eth0", "IPv4")))

		w.set(everywhere(vipA))
		assert.Len(t, w.after(0), 4, "announcements of one that came back")
		assert.True(t, w.answersFor("eth0"))
	}, eth(1, "eth0"), eth(2, "eth1"))
}

// The next owner may hear of it first.
func TestClaimBeforeLeaving(t *testing.T) {
	t.Parallel()
	for ago, want := range map[time.Duration]bool{20 * time.Millisecond: false, time.Minute: true} {
		inWorld(t, func(t *testing.T, w *world) {
			w.set(claimed(true, vipA))
			w.after(2 * crossing)
			w.claim("eth0")
			assert.True(t, w.answersFor("eth0"))
			w.after(ago)
			w.set(leavingVIP(vipA))
			assert.Equal(t, want, w.answersFor("eth0"), "claimed %s ago", ago)
		}, eth(1, "eth0"))
	}
}

// Who claims the VIP in the moment in which we announce it may yield to that.
func TestClaimThatCrossedOurs(t *testing.T) {
	t.Parallel()
	inWorld(t, func(t *testing.T, w *world) {
		w.set(claimed(true, vipA))
		w.after(0)
		w.claim("eth0")
		w.set(leavingVIP(vipA))
		assert.True(t, w.answersFor("eth0"))
		w.after(2 * crossing)
		w.claim("eth0")
		assert.False(t, w.answersFor("eth0"))
	}, eth(1, "eth0"))
}

// A next owner that was contradicted, because the news of the move came late,
// has yielded: the old one does not hold it up, and clients have an answer at
// every moment.
func TestNextOwnerThatWasContradicted(t *testing.T) {
	t.Parallel()
	onSegment(t, 2, func(t *testing.T, s *lan) {
		old, next := s.speakers[0], s.speakers[1]
		s.lose(true)
		old.set(claimed(true, vipA))
		time.Sleep(time.Minute)
		next.set(claimed(false, vipA))
		time.Sleep(correction + 10*time.Millisecond)
		synctest.Wait()
		require.Equal(t, []int{0}, s.owners(vipA), "the next owner yields")
		old.set(leavingVIP(vipA))
		for range (maxMissed+1)*pollInterval/(10*time.Millisecond) + 1 {
			require.True(t, old.answersFor("eth0") || next.answersFor("eth0"), "nobody answers")
			time.Sleep(10 * time.Millisecond)
		}
		assert.Zero(t, old.Leaving(), "the next owner did not claim it")
		assert.False(t, old.answersFor("eth0"))
		assert.True(t, next.answersFor("eth0"))
	})
}

// A VIP that was yielded is answered for by the other speaker: nothing is to be
// handed over, nor contested.
func TestLeavingOfAYieldedVIP(t *testing.T) {
	t.Parallel()
	onSegment(t, 2, func(t *testing.T, s *lan) {
		s.speakers[0].set(claimed(true, vipA))
		time.Sleep(time.Minute)
		yielded := s.speakers[1]
		yielded.set(claimed(false, vipA))
		time.Sleep(lag + time.Second)
		require.Equal(t, []int{0}, s.owners(vipA))
		yielded.set(leavingVIP(vipA))
		assert.Zero(t, yielded.Leaving())
		assert.False(t, yielded.answersFor("eth0"))
		s.speakers[0].set(nil)
		yielded.take()
		assert.Empty(t, yielded.after(time.Minute), "it asks or claims although it leaves")
		yielded.set(claimed(false, vipA))
		time.Sleep(time.Second)
		assert.Equal(t, []int{1}, s.owners(vipA), "it came back")
	})
}

// What was never announced is not to be handed over.
func TestLeavingOfAProbedVIP(t *testing.T) {
	t.Parallel()
	inWorld(t, func(t *testing.T, w *world) {
		w.set(fresh(vipA))
		w.after(probeWait)
		w.set(leavingVIP(vipA))
		assert.Empty(t, w.after(time.Minute), "probed or announced although it leaves")
		assert.False(t, w.answersFor("eth0"))
		w.receive("eth0", arpFrame(arppacket.OperationRequest, broadcast, clientMAC, netip.IPv4Unspecified(), mac{}, vipA))
		synctest.Wait()
		assert.Empty(t, w.Conflicts(), "it contests an address that it gives up")
		assert.Zero(t, w.Leaving())
	}, eth(1, "eth0"))
}

// Somebody who claims a VIP at once after Set finds nobody who contradicts.
func TestLeavingIsNotDefended(t *testing.T) {
	t.Parallel()
	inWorld(t, func(t *testing.T, w *world) {
		w.set(everywhere(vipA))
		w.after(time.Minute)
		w.claim("eth0") // the next owner; this node hears later that it is
		w.after(500 * time.Millisecond)
		w.set(leavingVIP(vipA))
		assert.Empty(t, w.after(time.Hour))
	}, eth(1, "eth0"))
}

// serveUDP makes the node's kernel take packets for the VIP, as kube-proxy
// does, and answer datagrams to port 7, without answering for the VIP on the
// segment.
func (n *node) serveUDP(vip netip.Addr) {
	n.t.Helper()
	n.host.Run("sysctl", "-qw", "net.ipv4.conf.all.arp_ignore=1", "net.ipv4.conf.all.arp_announce=2")
	n.host.Run("ip", "addr", "add", netip.PrefixFrom(vip, vip.BitLen()).String(), "dev", "lo", "nodad")
	var conn net.PacketConn
	err := n.host.Do(func() (err error) {
		conn, err = net.ListenPacket("udp", netip.AddrPortFrom(vip, 7).String())
		return err
	})
	require.NoError(n.t, err)
	var serving sync.WaitGroup
	n.t.Cleanup(func() { conn.Close(); serving.Wait() })
	serving.Go(func() {
		for buf := make([]byte, 64); ; {
			k, from, err := conn.ReadFrom(buf)
			if err != nil {
				return
			}
			_, _ = conn.WriteTo(buf[:k], from)
		}
	})
}

// coldClient asks a VIP every 5 ms, each time as a host that does not know
// where it is: it depends on somebody's answer on the segment.
type coldClient struct {
	t          *testing.T
	conn       net.Conn
	neighbours *netlink.Handle
	entry      netlink.Neigh
	// sent and lost count probes. One is lost when it has no answer in
	// timeout: nobody answered for the VIP when it was sent.
	sent, lost int
	timeout    time.Duration
}

func newColdClient(t *testing.T, h *testnet.Host, vip netip.Addr, timeout time.Duration) *coldClient {
	t.Helper()
	c := &coldClient{t: t, entry: netlink.Neigh{IP: vip.AsSlice(), State: netlink.NUD_NONE}, timeout: timeout}
	err := h.Do(func() (err error) {
		i, err := net.InterfaceByName("eth0")
		if err == nil {
			c.entry.LinkIndex = i.Index
			c.conn, err = net.Dial("udp", netip.AddrPortFrom(vip, 7).String())
		}
		return err
	})
	require.NoError(t, err)
	t.Cleanup(func() { c.conn.Close() })
	c.neighbours, err = netlink.NewHandleAt(*h.Handle())
	require.NoError(t, err)
	t.Cleanup(c.neighbours.Close)
	return c
}

// ask probes for that long.
func (c *coldClient) ask(d time.Duration) {
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for end := time.Now().Add(d); time.Now().Before(end); <-tick.C {
		_ = c.neighbours.NeighDel(&c.entry) // there is none if the last probe was lost
		c.sent++
		probe, buf := fmt.Sprint(c.sent), make([]byte, 64)
		_, _ = c.conn.Write([]byte(probe))
		require.NoError(c.t, c.conn.SetReadDeadline(time.Now().Add(c.timeout)))
		for {
			k, err := c.conn.Read(buf)
			if err != nil {
				c.lost++
				break
			}
			if string(buf[:k]) == probe {
				break
			}
		}
	}
}

// during probes before, while and after the move happens.
func (c *coldClient) during(move func()) {
	c.ask(20 * time.Millisecond)
	done := make(chan struct{})
	go func() { defer close(done); move() }()
	for moving := true; moving; {
		c.ask(20 * time.Millisecond)
		select {
		case <-done:
			moving = false
		default:
		}
	}
	c.ask(settle)
}

// settle is how long a client goes on probing after a move: an owner that does not
// leave is seen to answer for as long.
const settle = 600 * time.Millisecond

// watch notes when each host spoke last or first for a VIP.
type watch struct {
	mu          sync.Mutex
	first, last map[mac]time.Time
}

func newWatch(t *testing.T, h *testnet.Host, vip netip.Addr) *watch {
	t.Helper()
	etherType := unix.ETH_P_ARP
	if vip.Is6() {
		etherType = unix.ETH_P_IPV6
	}
	conn, w := listenOn(t, h, etherType, nil), &watch{}
	w.reset()
	var reading sync.WaitGroup
	t.Cleanup(func() { conn.Close(); reading.Wait() })
	reading.Go(func() {
		for buf := make([]byte, 1514); ; {
			k, _, err := conn.ReadFrom(buf)
			if err != nil {
				return
			}
			if m, ok := wire.Of(vip).Parse(buf[:k]); ok && m.Claims == vip {
				w.note(m.From)
			}
		}
	})
	return w
}

func (w *watch) reset() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.first, w.last = map[mac]time.Time{}, map[mac]time.Time{}
}

func (w *watch) note(from mac) {
	w.mu.Lock()
	defer w.mu.Unlock()
	now := time.Now()
	if w.first[from].IsZero() {
		w.first[from] = now
	}
	w.last[from] = now
}

// overlap returns how long both spoke for the VIP when both had been told to whom
// it goes.
func (w *watch) overlap(old, next mac, told time.Time) time.Duration {
	w.mu.Lock()
	defer w.mu.Unlock()
	both := w.first[next]
	if told.After(both) {
		both = told
	}
	return max(0, w.last[old].Sub(both))
}

// A VIP moves between two nodes that hear of it at different times, while a
// client depends on an answer every 5 ms.
func TestMovesLoseNothing(t *testing.T) {
	const skew, moves = 300 * time.Millisecond, 5
	leave := func(from, _ *node, vip netip.Addr) { from.set(leavingVIP(vip)) }
	take := func(_, to *node, vip netip.Addr) { to.set(everywhere(vip)) }
	orders := map[string][]func(from, to *node, vip netip.Addr){
		"old owner first":  {leave, take},
		"next owner first": {take, leave},
	}
	for _, vip := range []netip.Addr{vipA, vip6} {
		t.Run(wire.Of(vip).Family(), func(t *testing.T) {
			t.Parallel()
			s := testnet.NewSegment(t, 3)
			from, to := startNode(t, s.Hosts[0], nil), startNode(t, s.Hosts[1], nil)
			for _, n := range []*node{to, from} {
				n.serveUDP(vip)
				n.announcing(vip)
				n.set(nil)
			}
			from.set(everywhere(vip))
			client, seen := newColdClient(t, s.Hosts[2], vip, skew/2), newWatch(t, s.Hosts[2], vip)
			for name, order := range orders {
				worst := time.Duration(0)
				client.sent, client.lost = 0, 0
				for range moves {
					var told time.Time
					seen.reset()
					client.during(func() {
						order[0](from, to, vip)
						time.Sleep(skew)
						told = time.Now()
						order[1](from, to, vip)
					})
					worst = max(worst, seen.overlap(from.mac("eth0"), to.mac("eth0"), told))
					from.set(nil)
					from, to = to, from
				}
				t.Logf("%s: %d of %d probes lost, both answered for up to %s", name, client.lost, client.sent, worst)
				assert.Zero(t, client.lost, name)
				assert.Less(t, worst, settle/2, name)
			}
			// The measurement notices what it is there to notice.
			client.lost = 0
			client.during(func() { from.set(nil); time.Sleep(skew); to.set(everywhere(vip)) })
			assert.NotZero(t, client.lost, "stopped before the next owner started")
		})
	}
}
