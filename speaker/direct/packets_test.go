package direct

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"math/rand/v2"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/nftables"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/lodestone-lb/lodestone/pkg/report"
	"github.com/lodestone-lb/lodestone/pkg/testnet"
	"github.com/lodestone-lb/lodestone/speaker/plan"
)

// forged is a segment that the client's kernel did not send.
type forged struct {
	from     netip.AddrPort
	flags    byte
	seq, ack uint32
	// hops is how many routers it has passed: its TTL is 64 less that.
	hops byte
}

// TCP's other flags (RFC 9293 section 3.1).
const (
	fin = 0x01
	rst = 0x04
	ack = 0x10
)

// inject sends segments from the client to the VIP of their sources' family.
func (w *world) inject(all ...forged) {
	w.t.Helper()
	require.NoError(w.t, w.client.Do(func() error {
		fd4, err := unix.Socket(unix.AF_INET, unix.SOCK_RAW, unix.IPPROTO_RAW)
		if err != nil {
			return err
		}
		defer unix.Close(fd4) //nolint:errcheck // nothing is lost with it
		fd6, err := unix.Socket(unix.AF_INET6, unix.SOCK_RAW, unix.IPPROTO_RAW)
		if err != nil {
			return err
		}
		defer unix.Close(fd6) //nolint:errcheck // nothing is lost with it
		for _, s := range all {
			if s.from.Addr().Is4() {
				err = unix.Sendto(fd4, s.packet(vip4), 0, &unix.SockaddrInet4{Addr: vip4.As4()})
			} else {
				err = unix.Sendto(fd6, s.packet(vip6), 0, &unix.SockaddrInet6{Addr: vip6.As16()})
			}
			if err != nil {
				return err
			}
		}
		return nil
	}))
}

func (s forged) packet(to netip.Addr) []byte {
	tcp := binary.BigEndian.AppendUint16(nil, s.from.Port())
	tcp = binary.BigEndian.AppendUint16(tcp, 80)
	tcp = binary.BigEndian.AppendUint32(tcp, s.seq)
	tcp = binary.BigEndian.AppendUint32(tcp, s.ack)
	tcp = append(tcp, 5<<4, s.flags, 0x10, 0, 0, 0, 0, 0)
	pseudo := append(s.from.Addr().AsSlice(), to.AsSlice()...)
	binary.BigEndian.PutUint16(tcp[16:], ^checksum(append(append(pseudo, 0, unix.IPPROTO_TCP, 0, 20), tcp...)))
	ip := []byte{6 << 4, 0, 0, 0, 0, 20, unix.IPPROTO_TCP, 64 - s.hops}
	if to.Is4() {
		ip = []byte{4<<4 | 5, 0, 0, 40, 0, 0, 0, 0, 64 - s.hops, unix.IPPROTO_TCP, 0, 0}
	}
	return append(append(append(ip, s.from.Addr().AsSlice()...), to.AsSlice()...), tcp...)
}

// numbers returns the next sequence numbers that the client sends and expects.
func (c *conn) numbers(t testing.TB) (next, expected uint32) {
	raw, err := c.Conn.(*net.TCPConn).SyscallConn()
	require.NoError(t, err)
	require.NoError(t, raw.Control(func(fd uintptr) {
		require.NoError(t, unix.SetsockoptInt(int(fd), unix.SOL_TCP, unix.TCP_REPAIR, 1))
		for queue, number := range map[int]*uint32{1: &expected, 2: &next} {
			require.NoError(t, unix.SetsockoptInt(int(fd), unix.SOL_TCP, unix.TCP_REPAIR_QUEUE, queue))
			n, err := unix.GetsockoptInt(int(fd), unix.SOL_TCP, unix.TCP_QUEUE_SEQ)
			require.NoError(t, err)
			*number = uint32(n)
		}
		require.NoError(t, unix.SetsockoptInt(int(fd), unix.SOL_TCP, unix.TCP_REPAIR, unix.TCP_REPAIR_OFF_NO_WP))
	}))
	return next, expected
}

func (c *conn) source() netip.AddrPort {
	return netip.MustParseAddrPort(c.LocalAddr().String())
}

// sockets counts the connections in the kernel of the node's pod, in any state.
func (n *node) sockets() int {
	return strings.Count(n.pod.Run("ss", "-Htn", "sport = :80"), "\n")
}

// ended waits until no connection is left on the servers.
func (w *world) ended() {
	w.t.Helper()
	for _, n := range w.nodes {
		w.until(func() bool { return n.connections() == 0 && n.sockets() == 0 },
			func() any { return n.pod.Run("ss", "-tnoe", "sport = :80") })
	}
}

// moved are the tables before and after the changes that tests make, which leave connections
// on nodes that take no new ones.
var moved = [][]plan.Backend{
	some("n1", "n2", "n3"),
	{{Node: "n1", Open: 1}, {Node: "n2", Draining: 1}, {Node: "n3", Open: 1}},
	{{Node: "n1", Open: 1}, {Node: "n2", Open: 1}, {Node: "n3", Draining: 1}},
	{{Node: "n1", Draining: 1}, {Node: "n2", Open: 1}, {Node: "n3", Draining: 1}},
}

// Connections that were idle since before the VIP moved and the backends changed end on the
// server as on the client: by FIN, by RST, and by halves.
func TestIdleConnectionsEnd(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 3)
	w.start(w.names...)
	for _, after := range moved {
		w.own("n1")
		w.want(moved[0]...)
		closed, reset, half := w.open(16), w.open(16), w.open(16)
		for _, c := range half {
			require.NoError(t, c.send("late"))
			require.NoError(t, c.Conn.(*net.TCPConn).CloseWrite())
		}
		w.own("n3")
		w.want(after...)
		for _, c := range half {
			require.True(t, c.lines.Scan(), "of %s at %s: %v", c.LocalAddr(), c.node, c.lines.Err())
			require.Equal(t, "the end", c.lines.Text())
			require.False(t, c.lines.Scan())
			require.NoError(t, c.lines.Err())
		}
		for _, c := range closed {
			require.NoError(t, c.Close())
		}
		for _, c := range reset {
			require.NoError(t, c.Conn.(*net.TCPConn).SetLinger(0))
			require.NoError(t, c.Close())
		}
		w.ended()
	}
}

// A client's keepalives find the connection, wherever it is.
func TestKeepalivesAreAnswered(t *testing.T) {
	t.Parallel()
	w := startWorld(t, 3, moved[0]...)
	all := w.open(16)
	for _, c := range all {
		require.NoError(t, c.Conn.(*net.TCPConn).SetKeepAliveConfig(net.KeepAliveConfig{Enable: true, Idle: time.Second,
			Interval: time.Second, Count: 2}))
	}
	w.own("n2")
	w.want(moved[3]...)
	time.Sleep(5 * time.Second)
	w.live(all, "after keepalives")
}

// Connections that carry much in both directions lose nothing while the VIP moves and the
// backends change.
func TestBulkOutlivesMoves(t *testing.T) {
	t.Parallel()
	w := startWorld(t, 3, moved[0]...)
	all := w.open(12)
	const chunk = 128 << 10
	var sent atomic.Int64
	var worst atomic.Int64
	var ended atomic.Bool
	var done sync.WaitGroup
	errs := make(chan error, len(all))
	for i, c := range all {
		require.NoError(t, c.send("echo"))
		random, data := rand.NewChaCha8([32]byte{byte(i)}), make([]byte, 2*chunk)
		random.Read(data) //nolint:errcheck // it cannot fail
		done.Go(func() {
			for i := 0; !ended.Load(); i++ {
				began := time.Now()
				if err := c.echo(data[i%chunk:][:chunk]); err != nil {
					errs <- fmt.Errorf("%s at %s: %w", c.LocalAddr(), c.node, err)
					return
				}
				sent.Add(chunk)
				worst.Store(max(worst.Load(), int64(time.Since(began))))
				time.Sleep(100 * time.Millisecond) // without a pause the transfer would delay the moves
			}
		})
	}
	for i := 0; (i < 24 || sent.Load() <= 12<<20) && len(errs) == 0; i++ {
		w.own(w.names[i%3])
		w.want(moved[i%len(moved)]...)
	}
	ended.Store(true)
	done.Wait()
	close(errs)
	for err := range errs {
		require.NoError(t, err)
	}
	t.Logf("%d MB each way, the slowest 128 kB took %v", sent.Load()>>20, time.Duration(worst.Load()))
}

// echo sends data and checks that it comes back, however often TCP retransmits.
func (c *conn) echo(data []byte) error {
	got := make([]byte, len(data))
	c.SetDeadline(time.Now().Add(time.Minute)) //nolint:errcheck // it cannot fail
	failed := make(chan error, 1)
	go func() { _, err := c.Write(data); failed <- err }()
	if _, err := io.ReadFull(c, got); err != nil {
		return err
	}
	if !bytes.Equal(data, got) {
		return fmt.Errorf("got something else than was sent")
	}
	return <-failed
}

// A segment out of the window of a connection is handed to no node that would reset the
// connection because of it. A forged SYN is, if another node than the connection's takes new
// ones: it cannot be recognized.
func TestOutOfTheWindow(t *testing.T) {
	t.Parallel()
	w := startWorld(t, 3, moved[0]...)
	all := w.open(24)
	for i, backends := range moved {
		w.own(w.names[i%3])
		w.want(backends...)
		flags := []byte{ack, ack | fin, rst, ack | rst, syn | ack, 0}
		if i == 0 {
			flags = append(flags, syn)
		}
		for _, c := range all {
			next, expected := c.numbers(t)
			for _, flags := range flags {
				for _, off := range []uint32{1 << 30, 1 << 31, 3 << 30} {
					w.inject(forged{c.source(), flags, next + off, expected, 0})
				}
			}
		}
		time.Sleep(200 * time.Millisecond)
		w.live(all, fmt.Sprint("backends ", backends))
	}
}

// A client uses a port again before the nodes have forgotten its last connection from there.
// That one was on another node, which is asked before the node that keeps the new connection.
func TestPortsAreUsedAgain(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 3)
	w.start(w.names...)
	w.own("n1")
	dial := func(vip netip.Addr, port int) (c *conn) {
		require.NoError(t, w.client.Do(func() error {
			d := net.Dialer{LocalAddr: &net.TCPAddr{Port: port}, Timeout: 10 * time.Second}
			got, err := d.Dial("tcp", netip.AddrPortFrom(vip, 80).String())
			if err == nil {
				c = &conn{Conn: got, lines: bufio.NewScanner(got)}
			}
			return err
		}))
		t.Cleanup(func() { c.Close() })
		require.NoError(t, c.ask())
		return c
	}
	each := func(do func(vip netip.Addr, port int)) {
		for port := range 10 {
			do(vip4, 20000+port)
			do(vip6, 21000+port)
		}
	}
	w.want(plan.Backend{Node: "n2", Open: 1}, plan.Backend{Node: "n3", Draining: 1})
	each(func(vip netip.Addr, port int) {
		c := dial(vip, port)
		end, _ := w.nodes["n2"].served.Load(c.LocalAddr().String())
		require.NoError(t, end.(net.Conn).Close()) // the first side to close keeps the port: not the client
		_, err := io.ReadAll(c)
		require.NoError(t, err)
		require.NoError(t, c.Close())
	})
	w.want(plan.Backend{Node: "n2", Draining: 1}, plan.Backend{Node: "n3", Open: 1})
	var all []*conn
	each(func(vip netip.Addr, port int) { all = append(all, dial(vip, port)) })
	require.Equal(t, map[string]int{"n3": len(all)}, at(all))
	for _, backends := range [][]plan.Backend{{{Node: "n2", Open: 1}, {Node: "n3", Draining: 1}}, some("n1", "n2", "n3"), some("n2", "n3")} {
		for _, owner := range w.names {
			w.own(owner)
			w.want(backends...)
			w.live(all, fmt.Sprint(owner, " owns the VIPs, backends ", backends))
		}
	}
}

// A segment of a flood with forged sources is handed on no more often than the ring has nodes,
// and leaves no state on the node that hands it on.
func TestFloods(t *testing.T) {
	t.Parallel()
	w := startWorld(t, 3, some("n2", "n3")...)
	live := w.open(20)
	for _, n := range w.nodes {
		n.Run("nft", `table inet count {
			counter seen { }
			chain in { type filter hook prerouting priority -300;
				iifname eth0 tcp dport 80 counter name seen
			}
		}`)
	}
	for round, flood := range []struct {
		flags byte
		most  int // packets for each
	}{{syn, 2}, {ack, 1 + 1 + 2}, {fin | ack, 1 + 1 + 2}, {rst, 1 + 1 + 2}, {syn | ack, 2}, {0, 1 + 1 + 2}} {
		t.Run(fmt.Sprintf("flags %#x", flood.flags), func(t *testing.T) {
			before, tracked := w.seen(), w.nodes["n1"].tracked(t)
			var all []forged
			for i := range 2000 {
				// Few neighbours: all network namespaces share the machine's neighbour tables.
				from := netip.AddrFrom4([4]byte{198, 18, 0, byte(100 + i%50)})
				if i%2 == 1 {
					from = netip.MustParseAddr(fmt.Sprintf("2001:db8::1:%x", i%100))
				}
				all = append(all, forged{netip.AddrPortFrom(from, uint16(1024+2000*round+i)), flood.flags, rand.Uint32(), rand.Uint32(), 0})
			}
			w.flood(all, w.seen)
			time.Sleep(500 * time.Millisecond)
			seen := w.seen() - before
			t.Logf("%d packets on the segment for %d sent; %d, %d and %d tracked", seen, len(all), w.nodes["n1"].tracked(t)-tracked,
				w.nodes["n2"].tracked(t), w.nodes["n3"].tracked(t))
			require.LessOrEqual(t, seen, flood.most*len(all))
			require.LessOrEqual(t, w.nodes["n1"].tracked(t), tracked)
			w.live(live, "a flood is over")
		})
	}
}

// flood injects segments, and waits until the nodes have received them. It injects fewer at a time than the kernel
// queues for a busy processor (net.core.netdev_max_backlog).
func (w *world) flood(all []forged, seen func() int) {
	w.t.Helper()
	before, sent := seen(), 0
	for batch := range slices.Chunk(all, 200) {
		w.inject(batch...)
		sent += len(batch)
		w.until(func() bool { return seen()-before >= sent }, func() any { return seen() - before })
	}
}

// countTable is the table of nodes whose packets are counted.
var countTable = &nftables.Table{Name: "count", Family: nftables.TableFamilyINet}

// seen counts the packets for VIPs that came to the nodes from the segment.
func (w *world) seen() (packets int) {
	for _, n := range w.nodes {
		require.NoError(w.t, n.Do(func() error {
			counted, err := counts([]*family{{table: countTable}})
			for _, counters := range counted {
				packets += int(counters["seen"])
			}
			return err
		}))
	}
	return packets
}

// tracked counts the connections that the node's kernel tracks.
func (n *node) tracked(t testing.TB) int {
	count, err := strconv.Atoi(strings.TrimSpace(n.Run("sysctl", "-n", "net.netfilter.nf_conntrack_count")))
	require.NoError(t, err)
	return count
}

// Nodes that send with other hardware addresses than those that they answer with are not
// recognized. Packets that they hand to each other still end.
func TestUnknownHardwareAddresses(t *testing.T) {
	t.Parallel()
	w := startWorld(t, 3, moved[0]...)
	for _, n := range w.nodes {
		n.Run("nft", `table netdev bond {
			chain out { type filter hook egress device "eth0" priority 0;
				tcp dport 80 ether saddr set 02:00:00:00:00:99
			}
		}`)
	}
	for _, disagree := range []bool{false, true} {
		if disagree {
			w.wantAt([]string{"n1"}, some("n2")...)
			w.wantAt([]string{"n2"}, some("n1")...)
		}
		before := w.handed()
		var all []forged
		for i := range 50 {
			from := netip.AddrPortFrom(netip.MustParseAddr("198.18.0.2"), uint16(2000+i))
			all = append(all, forged{from, ack, 1, 1, 0}, forged{from, syn, 1, 1, 0}, forged{from, rst, 1, 1, 0})
		}
		w.inject(all...)
		time.Sleep(time.Second)
		sent := w.handed() - before
		t.Logf("%d packets were handed on for %d", sent, len(all))
		require.LessOrEqual(t, sent, mostHanded*len(all))
		time.Sleep(time.Second)
		require.Equal(t, sent, w.handed()-before, "it ends")
	}
}

// Whatever TTL a client chooses, nodes hand its segments to each other no more often: neither if
// their tables are the same, nor if they differ, nor if the nodes also do not know each other's
// hardware addresses.
func TestTTLsOfClients(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 3)
	w.start(w.names...)
	w.own("n1")
	for _, n := range w.nodes {
		n.Run("nft", `table inet count {
			set seen { type inet_service; flags dynamic; size 65535; counter; }
			chain in { type filter hook prerouting priority -300; iifname eth0 tcp dport 80 update @seen { tcp sport }; }
		}`)
	}
	bySource := func() map[uint16]int { // of packets, by their source port
		seen := map[uint16]int{}
		for _, n := range w.nodes {
			require.NoError(t, n.Do(func() error {
				k, err := dial()
				if err != nil {
					return err
				}
				defer k.Close()
				ports, err := k.GetSetElements(&nftables.Set{Table: countTable, Name: "seen"})
				for _, p := range ports {
					seen[binary.BigEndian.Uint16(p.Key)] += int(p.Counter.Packets)
				}
				return err
			}))
		}
		return seen
	}
	for step, meet := range []func(){
		func() { w.want(some("n2", "n3")...) },
		func() {
			for i, name := range w.names {
				w.wantAt([]string{name}, some(w.names[(i+1)%3])...)
			}
		},
		func() {
			for _, n := range w.nodes {
				n.Run("nft", `table netdev bond {
					chain out { type filter hook egress device "eth0" priority 0; tcp dport 80 ether saddr set 02:00:00:00:00:99; }
				}`)
			}
		},
	} {
		meet()
		var all []forged
		for i := range 256 {
			for j, from := range []string{"198.18.0.2", "2001:db8::2"} {
				port := uint16(10000 + 2048*step + 8*i + j)
				all = append(all, forged{netip.AddrPortFrom(netip.MustParseAddr(from), port), ack, 1, 1, byte(i)},
					forged{netip.AddrPortFrom(netip.MustParseAddr(from), port+4), rst, 1, 1, byte(i)})
			}
		}
		w.flood(all, func() int { return len(bySource()) })
		time.Sleep(time.Second)
		most, sum, seen := 0, 0, bySource()
		for _, s := range all {
			handed := seen[s.from.Port()] - 1
			require.GreaterOrEqual(t, handed, 0)
			require.LessOrEqual(t, handed, mostHanded, "step %d: TTL %d, flags %#x", step, 64-s.hops, s.flags)
			most, sum = max(most, handed), sum+handed
		}
		t.Logf("step %d: %d times at most, %d on average", step, most, sum/len(all))
	}
}

// A node that is no neighbour on the VIPs' segment takes no part in direct forwarding: the other
// nodes go on, and no connection fails.
func TestNodesElsewhere(t *testing.T) {
	t.Parallel()
	v4, v6 := netip.MustParseAddr, netip.MustParseAddr
	for _, test := range []struct {
		name  string
		addrs map[string][]netip.Addr // that are not those on the segment
		peers int                     // of n1
		third [2]bool                 // whether n3 has connections that n1 takes in, by family
		moves bool                    // whether connections of n2 outlive a move
	}{
		{"one on the other segment", map[string][]netip.Addr{"n3": {v4("192.0.2.3"), v6("2001:db8:1::3")}}, 4, [2]bool{}, true},
		{"all on the other segment", map[string][]netip.Addr{"n1": {v4("192.0.2.1"), v6("2001:db8:1::1")},
			"n2": {v4("192.0.2.2"), v6("2001:db8:1::2")}, "n3": {v4("192.0.2.3"), v6("2001:db8:1::3")}}, 4, [2]bool{}, false},
		{"one is no neighbour", map[string][]netip.Addr{"n3": {v4("203.0.113.3"), v6("2001:db8:3::3")}}, 2, [2]bool{}, true},
		{"one has no IPv6", map[string][]netip.Addr{"n3": {v4("198.18.0.13")}}, 3, [2]bool{true, false}, true},
		{"one does not answer in IPv6", map[string][]netip.Addr{"n3": {v4("198.18.0.13"), v6("2001:db8::333")}}, 3, [2]bool{true, false}, true},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, 3)
			other := testnet.NewSegment(t, 0)
			for i, name := range w.names {
				n := w.nodes[name]
				other.Plug(n.Host, "eth1")
				n.Address("eth1", fmt.Sprintf("192.0.2.%d/24", i+1), fmt.Sprintf("2001:db8:1::%d/64", i+1))
				n.Run("sysctl", "-qw", "net.ipv4.conf.eth1.rp_filter=1")
				if addrs := test.addrs[name]; addrs != nil {
					n.addrs = addrs
				}
			}
			w.start(w.names...)
			w.own("n1")
			for _, name := range w.names {
				w.setOn(name, moved[0])
			}
			w.until(func() bool { return w.nodes["n1"].director.Status().Peers == test.peers },
				func() any { return w.nodes["n1"].director.Status() })
			time.Sleep(2 * interval)
			all := w.open(60)
			third, kept := [2]bool{}, []*conn(nil)
			for i, c := range all {
				third[i%2] = third[i%2] || c.node == "n3"
				if c.node == "n2" {
					kept = append(kept, c)
				}
			}
			require.Equal(t, test.third, third)
			w.live(all, "while the VIP stays")
			require.Equal(t, test.moves, len(kept) > 0)
			w.own("n2")
			w.live(kept, "after a move")
		})
	}
}

// A node that has two interfaces on one segment hands packets over by the one that its routes have.
func TestTwoInterfacesOnOneSegment(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 2)
	n := w.nodes["n1"]
	w.segment.Plug(n.Host, "eth1")
	n.Address("eth1", "198.18.0.111/24", "2001:db8::111/64")
	w.begin(some("n2")...)
	require.Equal(t, map[string]int{"n2": 10}, at(w.open(10)))
}

// An operator can list the rules with nft, which stops at expressions that it does not
// know. It cannot load its own listing, as it has no name for the type of a hash.
func TestRulesCanBeListed(t *testing.T) {
	t.Parallel()
	for _, byClient := range []bool{false, true} {
		w := newWorld(t, 2)
		w.byClient = byClient
		w.start(w.names...)
		w.want(some("n1", "n2")...)
		require.Contains(t, w.nodes["n1"].Run("nft", "list", "ruleset"), "jhash ip6 saddr . ip6 daddr")
		w.want()
		require.Contains(t, w.nodes["n1"].Run("nft", "list", "ruleset"), "drains")
	}
}

// Rules that no Director refreshes have no effect after a while: the VIP works as without them.
func TestRulesNeedADirector(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 2)
	w.guard = 15 * time.Second // they are refreshed every 3 s or 4 s
	w.begin(some("n2")...)
	w.shortened("n1")
	time.Sleep(w.guard + 2*time.Second)
	require.Equal(t, map[string]int{"n2": 10}, at(w.open(10)), "it is refreshed")
	for _, f := range allTables { // any of them would hand over
		require.Contains(t, w.nodes["n1"].Run("nft", "list set "+f.name()+" "+guardSet), "expires", "that of %s is refreshed", f.name())
	}
	w.nodes["n1"].stop()
	require.Equal(t, map[string]int{"n2": 10}, at(w.open(10)), "it works for a while")
	time.Sleep(w.guard + time.Second)
	require.Equal(t, map[string]int{"n1": 10}, at(w.open(10)))
	for _, f := range families { // what an operator removes by hand after an uninstallation
		require.Contains(t, w.nodes["n1"].Run("nft", "list", "tables"), "table "+f.name()+"\n")
		w.nodes["n1"].Run("nft", "delete table "+f.name())
	}
	require.Equal(t, map[string]int{"n1": 10}, at(w.open(10)))
	w.start("n1")
	w.wantAt([]string{"n1"}, some("n2")...)
	require.Equal(t, map[string]int{"n2": 10}, at(w.open(10)))

	for _, n := range w.nodes { // all speakers are gone for good, and the rules are not
		n.stop()
	}
	time.Sleep(w.guard + time.Second)
	for _, name := range w.names {
		w.own(name)
		require.Equal(t, map[string]int{name: 10}, at(w.open(10)))
	}
}

// A Director without the right to change rules logs that once, and the VIP works without rules. It
// logs nothing while there is nothing to do.
func TestWithoutRights(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 2)
	w.powers = func() error {
		header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
		var powers [2]unix.CapUserData
		if err := unix.Capget(&header, &powers[0]); err != nil {
			return err
		}
		powers[0].Effective &^= 1 << unix.CAP_NET_ADMIN
		powers[0].Permitted &^= 1 << unix.CAP_NET_ADMIN
		return unix.Capset(&header, &powers[0])
	}
	n := w.nodes["n1"]
	w.start("n1")
	n.director.Set(plan.Forwarding{})
	<-n.director.Ready()
	n.director.Set(plan.Forwarding{})
	time.Sleep(2 * interval)
	require.Empty(t, n.log.String())
	require.NoError(t, n.director.Status().Err)
	n.stop()

	w.start("n1")
	w.own("n1")
	n.director.Set(plan.Forwarding{Nodes: map[string][]netip.Addr{"n1": n.addrs, "n2": w.nodes["n2"].addrs},
		Services: map[plan.LimitKey]plan.Direct{{VIP: vip4, Service: "default/web"}: {Ports: web, Backends: some("n2")}}})
	<-n.director.Ready()
	time.Sleep(4 * interval)
	require.ErrorIs(t, n.director.Status().Err, unix.EPERM)
	require.Equal(t, 1, strings.Count(n.log.String(), "\n"), n.log)
	require.Contains(t, n.log.String(), "level=ERROR")
	require.Contains(t, n.log.String(), "NET_ADMIN")
	require.Equal(t, report.RulesForbidden, n.director.NoRules())
	require.NotContains(t, n.Run("nft", "list", "tables"), tableName)
	require.Equal(t, map[string]int{"n1": 10}, at(w.open(10)))
	w.setOn("n1", nil) // without an error
}

// No more than the allowed number of tables are made, which is logged once. Names of nodes are as
// long as Kubernetes allows.
func TestTooManyTables(t *testing.T) {
	t.Parallel()
	host, log := testnet.NewHost(t, "node"), &testnet.Log{}
	testnet.NewSegment(t, 0).Plug(host, "eth0")
	host.Address("eth0", "198.18.0.1/16")
	long := strings.Repeat("n", 250)
	want := plan.Forwarding{Services: map[plan.LimitKey]plan.Direct{}, Nodes: map[string][]netip.Addr{}}
	all := []plan.Backend{}
	for i := range 10 {
		name, addr := fmt.Sprintf("%s%03d", long, i), netip.AddrFrom4([4]byte{198, 18, 1, byte(i)})
		want.Nodes[name] = []netip.Addr{addr}
		all = append(all, plan.Backend{Node: name, Open: 1})
		host.Run("ip", "neigh", "add", addr.String(), "lladdr", fmt.Sprintf("02:00:00:00:01:%02x", i), "dev", "eth0", "nud", "permanent")
	}
	for i := range 200 {
		var some []plan.Backend
		for bit, b := range all {
			if (i+1)>>bit&1 == 1 {
				some = append(some, b)
			}
		}
		key := plan.LimitKey{VIP: netip.AddrFrom4([4]byte{203, 0, 113, byte(i)}), Service: fmt.Sprint(i)}
		want.Services[key] = plan.Direct{Ports: web, Seed: uint32(i), Local: true, Backends: some}
	}
	d := New(Options{Log: slog.New(slog.NewTextHandler(log, nil)), Node: all[0].Node, Gateways: func() []netip.Addr { return nil }})
	take := func(want plan.Forwarding) int {
		require.NoError(t, host.Do(func() error {
			d.take(want)
			clear(d.switchedOff)
			d.take(want)
			return d.err
		}))
		if d.have[0] == nil {
			return 0
		}
		return len(d.have[0].services)
	}
	require.Equal(t, maxBuckets/localSize, take(want))
	require.Equal(t, 1, strings.Count(log.String(), "too many tables"), log)
	few := want
	few.Services = maps.Clone(want.Services)
	maps.DeleteFunc(few.Services, func(_ plan.LimitKey, s plan.Direct) bool { return s.Seed >= 50 })
	require.Equal(t, 50, take(few))
	require.Zero(t, take(plan.Forwarding{}))
	require.NotContains(t, host.Run("nft", "list", "tables"), tableName)
}

// The node that hands connections over need not forward: it may be set not to, and its
// firewall to drop all that it would forward.
func TestHandingOverNeedsNoForwarding(t *testing.T) {
	t.Parallel()
	w := startWorld(t, 3, some("n2", "n3")...)
	n := w.nodes["n1"]
	n.Run("sysctl", "-qw", "net.ipv4.ip_forward=0", "net.ipv6.conf.all.forwarding=0", "net.ipv4.conf.eth0.rp_filter=1")
	n.Run("nft", "flush chain inet proxy forward")
	all := w.open(20)
	w.want(plan.Backend{Node: "n2", Open: 1}, plan.Backend{Node: "n3", Draining: 1})
	w.live(all, "the backends changed")
}

// If conntrack does not pick up established connections, those on other nodes are still found by
// the ring, and segments out of the window reset no connection.
func TestStrictConntrack(t *testing.T) {
	t.Parallel()
	w := startWorld(t, 3, moved[0]...)
	for _, n := range w.nodes {
		n.Run("sysctl", "-qw", "net.netfilter.nf_conntrack_tcp_loose=0")
	}
	all := w.open(20)
	for i, backends := range moved {
		w.own(w.names[i%3])
		w.want(backends...)
		for _, c := range all {
			next, expected := c.numbers(t)
			w.inject(forged{c.source(), ack, next + 1<<30, expected, 0}, forged{c.source(), ack | fin, next + 1<<31, expected, 0})
		}
		time.Sleep(200 * time.Millisecond)
		w.live(all, fmt.Sprint("backends ", backends))
	}
}
