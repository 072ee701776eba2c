package direct

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/lodestone-lb/lodestone/pkg/testcost"
	"github.com/lodestone-lb/lodestone/pkg/testnet"
	"github.com/lodestone-lb/lodestone/speaker/plan"
)

// shortened waits until a node hands over before conntrack.
func (w *world) shortened(name string) {
	w.t.Helper()
	d := w.nodes[name].director
	w.until(func() bool { return d.Status().Shortcuts == 2 }, func() any { return w.nodes[name].log })
}

// The owner keeps its connections, although the table has them at other nodes by now, and hands over
// the rest, whatever the table was before, and whichever node owns the VIPs. Once the shortcut is
// there, packets are handed over by it, as its counter shows.
func TestShortcut(t *testing.T) {
	t.Parallel()
	for _, byClient := range []bool{false, true} {
		t.Run(fmt.Sprint("byClient=", byClient), func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, 3)
			w.byClient, w.cluster = byClient, byClient
			w.begin(moved[0]...)
			all := w.open(24)
			for i, backends := range moved {
				owner := w.names[i%3]
				w.own(owner)
				w.want(backends...)
				w.live(all, fmt.Sprint("after the change to ", backends))
				w.shortened(owner)
				asked := func(c *conn) bool {
					before := w.handed()
					require.NoError(t, c.ask())
					return w.handed() > before
				}
				for _, c := range all {
					text := fmt.Sprintf("%s keeps %s; it is at %s, with %v", c.node, c.LocalAddr(), owner, backends)
					if c.node == owner { // late acknowledgements and keepalives of others may be counted, too
						w.until(func() bool { return !asked(c) }, func() any { return text })
						continue
					}
					short := w.nodes[owner].short(t)
					for range 3 {
						require.True(t, asked(c), text)
					}
					require.Greater(t, w.nodes[owner].short(t), short, text)
				}
			}
		})
	}
}

// short counts the packets that a node has handed over before conntrack.
func (n *node) short(t testing.TB) (packets int) {
	require.NoError(t, n.Do(func() error {
		counted, err := counts(shortcuts)
		for _, counters := range counted {
			packets += int(counters[handedCounter])
		}
		return err
	}))
	return packets
}

// Fragments of a segment are not handed over at the interface: they go to conntrack, which reassembles them.
func TestFragmentsAreHandedOver(t *testing.T) {
	t.Parallel()
	w := startWorld(t, 2, some("n2")...)
	w.shortened("n1")
	whole := forged{netip.MustParseAddrPort("198.18.0.2:12345"), syn, 1, 0, 0}.packet(vip4)
	whole = append(whole, make([]byte, 1480-len(whole)%8)...)
	handed := w.handed()
	require.NoError(t, w.client.Do(func() error {
		fd, err := unix.Socket(unix.AF_INET, unix.SOCK_RAW, unix.IPPROTO_RAW)
		if err != nil {
			return err
		}
		defer unix.Close(fd) //nolint:errcheck // nothing is lost with it
		const first = 20 + 800
		for _, part := range []struct {
			payload []byte
			offset  uint16
		}{{whole[20:first], 1 << 13}, {whole[first:], 800 / 8}} {
			packet := append(append([]byte{}, whole[:20]...), part.payload...)
			binary.BigEndian.PutUint16(packet[2:], uint16(len(packet)))
			binary.BigEndian.PutUint16(packet[4:], 4711)
			binary.BigEndian.PutUint16(packet[6:], part.offset)
			if err := unix.Sendto(fd, packet, 0, &unix.SockaddrInet4{Addr: vip4.As4()}); err != nil {
				return err
			}
		}
		return nil
	}))
	w.until(func() bool { return w.handed() > handed }, func() any { return w.nodes["n1"].Run("nft", "list ruleset") })
	require.Zero(t, w.nodes["n1"].short(t), "it is not the shortcut that has handed it over")
}

// Segments with the addresses and ports of a connection that has ended are handed over: conntrack remembers it
// for longer than the client does.
func TestConnectionsThatHaveEndedAreNotKept(t *testing.T) {
	t.Parallel()
	w := startWorld(t, 2, some("n1")...)
	all := w.open(10)
	const over = 4
	for _, c := range all[:over] {
		require.NoError(t, c.Close())
	}
	n := w.nodes["n1"]
	w.until(func() bool { return strings.Count(n.Run("cat", "/proc/net/nf_conntrack"), "TIME_WAIT") >= over },
		func() any { return n.Run("cat", "/proc/net/nf_conntrack") })
	w.want(some("n2")...)
	w.shortened("n1")
	kept := n.Run("nft", "list", "set", "netdev", "lodestone-direct-ip", keptSet) +
		n.Run("nft", "list", "set", "netdev", "lodestone-direct-ip6", keptSet)
	require.Equal(t, len(all)-over, strings.Count(kept, " . 80"), kept)
	w.live(all[over:], "those that have not ended")
}

// A Service has no shortcut if this node keeps too many of its connections that the table has at other
// nodes. Other Services have one.
func TestCrowdedService(t *testing.T) {
	t.Parallel()
	k := newKept()
	for i := range maxKept {
		k.add("many", "default/many", fmt.Sprint(i))
		k.add("many", "default/many", fmt.Sprint(i)) // conntrack may list one twice
	}
	require.Len(t, k.flows(), maxKept)
	k.add("few", "default/few", "1")
	require.Equal(t, map[string]bool{"many": true}, k.crowded)
	require.Equal(t, map[string]bool{"1": true}, k.flows())
}

// A namespace with many Services takes no shortcut from another one whose Service has more connections than each of them.
// The same connections always have the same outcome.
func TestNamespacesShareWhatIsExcepted(t *testing.T) {
	t.Parallel()
	crowd := func() map[string]bool {
		k := newKept()
		for i := range 1000 {
			k.add("few", "few/web", fmt.Sprint("few", i))
		}
		for i := range 2 * maxKept {
			at := fmt.Sprint("many", i%100)
			if !k.crowded[at] {
				k.add(at, "many/"+at, fmt.Sprint(i))
			}
			require.LessOrEqual(t, k.n, maxKept)
		}
		require.Len(t, k.flows(), k.n)
		require.Greater(t, k.n, maxKept/2)
		return k.crowded
	}
	first := crowd()
	require.NotEmpty(t, first)
	require.NotContains(t, first, "few")
	for range 3 {
		require.Equal(t, first, crowd())
	}
}

// Many Services with some connections each cost no more than in proportion to their number.
func TestManyCrowdedServices(t *testing.T) {
	testcost.Grows(t, "connections", 2*maxKept, 8*maxKept, func(n int) {
		k := newKept()
		for i := range n {
			if at := fmt.Sprint(i % (n / 4)); !k.crowded[at] {
				k.add(at, "default/"+at, fmt.Sprint(i))
			}
		}
	})
}

// No connection ends if the rules at the interface are removed, or if a Director starts while there are some.
func TestShortcutIsBack(t *testing.T) {
	t.Parallel()
	w := startWorld(t, 2, some("n1")...)
	all := w.open(10)
	w.want(some("n2")...)
	all = append(all, w.open(10)...)
	require.Equal(t, map[string]int{"n1": 10, "n2": 10}, at(all))
	n := w.nodes["n1"]
	w.shortened("n1")
	n.Run("nft", "delete table netdev lodestone-direct-ip")
	w.live(all, "the rules are away")
	w.until(func() bool {
		return n.Command(t.Context(), "nft", "list", "table", "netdev", "lodestone-direct-ip").Run() == nil
	}, func() any { return n.log })
	w.shortened("n1")
	w.live(all, "the rules are back")
	n.stop()
	w.live(all, "there is no Director")
	w.start("n1")
	w.wantAt([]string{"n1"}, plan.Backend{Node: "n1", Open: 1}, plan.Backend{Node: "n2", Draining: 1})
	w.live(all, "there is another one, with other backends")
	require.Equal(t, map[string]int{"n1": 10}, at(w.open(10)))
	w.shortened("n1")
	w.live(all, "it has the rules")
	w.want()
	w.live(all, "it is switched off")
	require.NotContains(t, n.log.String(), "level=WARN")
}

// BenchmarkKept measures a look-up of 100,000 connections in conntrack.
func BenchmarkKept(b *testing.B) {
	const n = 100_000
	host := testnet.NewHost(b, "node")
	s := testnet.NewSegment(b, 0)
	s.Plug(host, "eth0")
	require.NoError(b, host.Do(func() error {
		host.Run("nft", "table ip x { chain y { type filter hook prerouting priority 0; ct state new; }; }")
		if err := track(n - 1000); err != nil {
			return err
		}
		for b.Loop() {
			if _, err := keptBy([2]*ruleset{newRuleset()}); err != nil {
				return err
			}
		}
		return nil
	}))
}

// Rules at the interface that cannot be removed hand packets over by a table that is no longer. It is an error until they are
// removed, which is tried less and less often. Meanwhile the other rules follow the plan.
func TestShortcutThatCannotBeRemoved(t *testing.T) {
	t.Parallel()
	host, d := alone(t)
	table := shortcuts[0].name()
	require.NoError(t, host.Do(func() error {
		d.take(plan.Forwarding{Services: map[plan.LimitKey]plan.Direct{{VIP: vip4, Service: "default/web"}: {Ports: web, Backends: some("n1")}}})
		require.True(t, d.shortcut.extend(time.Now(), d.have))
		return errors.Join(d.err, d.shortcut.err)
	}))
	host.Run("nft", "delete table "+table)
	release := (&node{Host: host}).occupy(t, shortcuts[0])
	onHost := func(do func()) { require.NoError(t, host.Do(func() error { do(); return nil })) }
	onHost(func() { d.take(plan.Forwarding{}) })
	require.ErrorIs(t, d.err, unix.EPERM)
	for range 3 {
		onHost(d.reconcile)
		require.ErrorIs(t, d.err, unix.EPERM, "it is still there")
		require.Contains(t, d.Status().Error, table)
		require.True(t, d.have[0].services[serviceKey(vip4, 80)].switchedOff)
	}
	left := &d.shortcut.left[0]
	for _, want := range []time.Duration{2, 4, 8, 16, 32, 60, 60} {
		now, early := left.next, left.next.Add(-time.Millisecond)
		for _, at := range []time.Time{early, now} {
			require.Equal(t, now, left.next)
			onHost(func() { d.shortcut.clear(at) })
			require.Error(t, left.err)
		}
		require.Equal(t, now.Add(want*time.Second), left.next)
	}
	release()
	host.Run("nft", "add table "+table)
	require.NoError(t, host.Do(func() error {
		d.shortcut.left[0].next = time.Time{}
		d.reconcile()
		return d.err
	}))
	require.NotContains(t, host.Run("nft", "list tables"), table)
}

// A question to the kernel that fails is no answer.
func TestTablesThatMayBeThere(t *testing.T) {
	t.Parallel()
	require.NoError(t, testnet.NewHost(t, "node").Do(func() error {
		k, err := dial()
		require.NoError(t, err)
		defer k.Close()
		there, err := k.exists(families[0])
		require.NoError(t, err)
		require.False(t, there)
		require.NoError(t, k.Socket.Close())
		_, err = k.exists(families[0])
		require.ErrorContains(t, err, "look for the nftables table ip lodestone-direct")
		return nil
	}))
}
