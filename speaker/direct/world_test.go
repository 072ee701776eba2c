package direct

import (
	"bufio"
	"cmp"
	"context"
	"encoding/binary"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"reflect"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/lodestone-lb/lodestone/pkg/testnet"
	"github.com/lodestone-lb/lodestone/speaker/plan"
)

var (
	vip4 = netip.MustParseAddr("198.18.0.200")
	vip6 = netip.MustParseAddr("2001:db8::200")
	web  = []plan.Port{{Protocol: unix.IPPROTO_TCP, Number: 80}}
)

// world is a segment with a client and nodes. Behind each node is a pod that serves a VIP. The
// node sends packets for the VIP to its pod, as kube-proxy does for policy Local.
type world struct {
	t       testing.TB
	segment *testnet.Segment
	client  *testnet.Host
	nodes   map[string]*node
	names   []string
	lost    map[string]bool // nodes whose speakers are not heard
	// gateways are the routers that the nodes know.
	gateways atomic.Pointer[[]netip.Addr]
	extra    map[string][]netip.Addr // Node objects without a node
	byClient bool
	ports    []plan.Port // of the Service; nil: web
	cluster  bool        // the Services have policy Cluster, whose tables are eight times as large
	guard    time.Duration
	hold     time.Duration
	most     int          // the largest number of buckets
	powers   func() error // takes capabilities from the Directors' threads
}

type node struct {
	*testnet.Host
	pod      *testnet.Host
	name     string
	addrs    []netip.Addr
	director *Director
	log      *testnet.Log
	stop     func()
	served   sync.Map // connections of the pod
}

func newWorld(t testing.TB, nodes int) *world {
	t.Helper()
	w := &world{t: t, client: testnet.NewHost(t, "client"), nodes: map[string]*node{}}
	w.segment = testnet.NewSegment(t, 0)
	w.plug(w.segment, w.client, "198.18.0.2/24", "2001:db8::2/64")
	for i := range nodes {
		name := fmt.Sprint("n", i+1)
		n := &node{Host: testnet.NewHost(t, name), pod: testnet.NewHost(t, "pod"), name: name}
		w.plug(w.segment, n.Host, fmt.Sprintf("198.18.0.%d/24", 11+i), fmt.Sprintf("2001:db8::%d/64", 11+i))
		n.addrs = []netip.Addr{netip.MustParseAddr(fmt.Sprintf("198.18.0.%d", 11+i)), netip.MustParseAddr(fmt.Sprintf("2001:db8::%d", 11+i))}
		testnet.Connect(n.pod, "eth0", n.Host, "pod0")
		n.Address("pod0", "10.0.0.1/24", "fd00::1/64")
		n.pod.Address("eth0", "10.0.0.2/24", "fd00::2/64")
		n.pod.Run("ip", "route", "add", "default", "via", "10.0.0.1")
		n.pod.Run("ip", "route", "add", "default", "via", "fd00::1")
		// The rest of what kube-proxy and an ordinary host have.
		n.Run("sysctl", "-qw", "net.ipv4.ip_forward=1", "net.ipv6.conf.all.forwarding=1", "net.ipv4.conf.all.rp_filter=1",
			"net.ipv4.conf.eth0.rp_filter=1")
		n.Run("nft", `table inet proxy {
			chain services { type nat hook prerouting priority -100;
				ip daddr 198.18.0.200 tcp dport 80 dnat ip to 10.0.0.2
				ip6 daddr 2001:db8::200 tcp dport 80 dnat ip6 to fd00::2
			}
			chain forward { type filter hook forward priority 0; policy drop;
				ct state invalid drop
				ct status dnat accept
			}
		}`)
		n.serve(t)
		w.nodes[name], w.names = n, append(w.names, name)
	}
	return w
}

// startWorld returns a world whose nodes all forward directly to the backends. n1 owns the VIPs.
func startWorld(t testing.TB, nodes int, backends ...plan.Backend) *world {
	t.Helper()
	w := newWorld(t, nodes)
	w.begin(backends...)
	return w
}

// begin is startWorld for a world that the test has changed before.
func (w *world) begin(backends ...plan.Backend) {
	w.t.Helper()
	w.start(w.names...)
	w.own("n1")
	w.want(backends...)
}

func (w *world) plug(s *testnet.Segment, h *testnet.Host, addrs ...string) {
	s.Plug(h, "eth0")
	h.Address("eth0", addrs...)
}

// serve lets the pod answer each line with the node's name. After "echo" it sends back what it
// gets, and after "late" it sends "the end" a second after the client has ended.
func (n *node) serve(t testing.TB) {
	require.NoError(t, n.pod.Do(func() error {
		l, err := net.Listen("tcp", ":80")
		if err != nil {
			return err
		}
		ended := make(chan struct{})
		t.Cleanup(func() { l.Close(); <-ended })
		go func() {
			defer close(ended)
			for {
				c, err := l.Accept()
				if err != nil {
					return
				}
				n.served.Store(c.RemoteAddr().String(), c)
				go func() {
					defer c.Close()
					defer n.served.Delete(c.RemoteAddr().String())
					for lines := bufio.NewReader(c); ; {
						line, err := lines.ReadString('\n')
						if err != nil {
							return
						}
						fmt.Fprintln(c, n.name, c.RemoteAddr())
						switch line {
						case "echo\n":
							io.Copy(c, lines) //nolint:errcheck // the client notices
							return
						case "late\n": // the server still sends when the client has closed its direction
							io.Copy(io.Discard, lines) //nolint:errcheck // the client notices
							time.Sleep(time.Second)
							fmt.Fprintln(c, "the end")
							return
						}
					}
				}()
			}
		}()
		return nil
	}))
}

// connections returns how many connections the node's pod has.
func (n *node) connections() (count int) {
	n.served.Range(func(any, any) bool { count++; return true })
	return count
}

// start starts the Directors of nodes.
func (w *world) start(names ...string) {
	w.t.Helper()
	for _, name := range names {
		n := w.nodes[name]
		n.log = &testnet.Log{}
		n.director = New(Options{Log: slog.New(slog.NewTextHandler(n.log, nil)), Node: name, Gateways: w.routers,
			Hold: cmp.Or(w.hold, 5*time.Second), Guard: w.guard})
		n.director.most = cmp.Or(w.most, maxBuckets)
		ctx, cancel := context.WithCancel(context.Background())
		done := make(chan error, 1)
		go func() {
			done <- n.Do(func() error {
				if w.powers != nil {
					if err := w.powers(); err != nil {
						return err
					}
				}
				return n.director.Run(ctx)
			})
		}()
		n.stop = sync.OnceFunc(func() {
			cancel()
			require.NoError(w.t, <-done)
		})
		w.t.Cleanup(n.stop)
	}
}

// want lets all Directors forward directly to these backends, and waits until they do.
func (w *world) want(backends ...plan.Backend) {
	w.t.Helper()
	w.wantAt(w.names, backends...)
}

func (w *world) wantAt(names []string, backends ...plan.Backend) {
	w.t.Helper()
	for _, name := range names {
		w.setOn(name, backends)
	}
	for _, name := range names { // neighbours are known a moment later
		d := w.nodes[name].director
		w.until(func() bool { return backends == nil || d.Status().Peers >= 2*(len(w.nodes)-1) }, func() any { return d.Status() })
	}
}

// setOn sets the backends of one Director, and waits until it forwards to them.
func (w *world) setOn(name string, backends []plan.Backend) {
	w.t.Helper()
	want := w.forwarding(backends)
	d := w.nodes[name].director
	d.Set(want)
	w.until(func() bool {
		s := d.Status()
		return s.Err == nil && reflect.DeepEqual(s.Want, want)
	}, func() any { return w.nodes[name].log })
}

func (w *world) routers() []netip.Addr {
	if addrs := w.gateways.Load(); addrs != nil {
		return *addrs
	}
	return nil
}

// handed counts the packets that nodes handed to others.
func (w *world) handed() (packets int) {
	for _, n := range w.nodes {
		require.NoError(w.t, n.Do(func() error {
			counted, err := counts(allTables)
			for _, counters := range counted {
				packets += int(counters[handedCounter])
			}
			return err
		}))
	}
	return packets
}

// strangers sends segments of connections that no node keeps.
func (w *world) strangers(n int) {
	w.t.Helper()
	require.NoError(w.t, w.client.Do(func() error {
		fd, err := unix.Socket(unix.AF_INET, unix.SOCK_RAW, unix.IPPROTO_TCP)
		if err != nil {
			return err
		}
		defer unix.Close(fd) //nolint:errcheck // nothing is lost with it
		for i := range n {
			segment := make([]byte, 20)
			binary.BigEndian.PutUint16(segment, uint16(10000+i))
			binary.BigEndian.PutUint16(segment[2:], 80)
			segment[12], segment[13] = 5<<4, 0x10 // ACK
			sum := ^checksum(append([]byte{198, 18, 0, 2, 198, 18, 0, 200, 0, unix.IPPROTO_TCP, 0, 20}, segment...))
			binary.BigEndian.PutUint16(segment[16:], sum)
			if err := unix.Sendto(fd, segment, 0, &unix.SockaddrInet4{Addr: vip4.As4()}); err != nil {
				return err
			}
		}
		return nil
	}))
}

// checksum is the sum of RFC 1071.
func checksum(b []byte) uint16 {
	var sum uint32
	for i := 0; i < len(b); i += 2 {
		sum += uint32(binary.BigEndian.Uint16(b[i:]))
	}
	for sum>>16 != 0 {
		sum = sum>>16 + sum&0xffff
	}
	return uint16(sum)
}

// own moves both VIPs to a node.
func (w *world) own(name string) {
	w.t.Helper()
	mac, err := net.ParseMAC(w.nodes[name].hardware(w.t))
	require.NoError(w.t, err)
	require.NoError(w.t, w.client.Do(func() error {
		eth0, err := net.InterfaceByName("eth0")
		for _, vip := range []netip.Addr{vip4, vip6} {
			if err == nil {
				err = netlink.NeighSet(&netlink.Neigh{LinkIndex: eth0.Index, State: netlink.NUD_PERMANENT, IP: vip.AsSlice(), HardwareAddr: mac})
			}
		}
		return err
	}))
}

// hardware returns the hardware address that the node has on the segment.
func (n *node) hardware(t testing.TB) (mac string) {
	t.Helper()
	require.NoError(t, n.Do(func() error {
		i, err := net.InterfaceByName("eth0")
		if err == nil {
			mac = i.HardwareAddr.String()
		}
		return err
	}))
	return mac
}

func (w *world) until(so func() bool, instead func() any) {
	w.t.Helper()
	pause := 5 * time.Millisecond
	// On a busy machine a Director looks into conntrack once in a keptInterval.
	for deadline := time.Now().Add(2 * keptInterval); !so(); time.Sleep(pause) {
		if time.Now().After(deadline) {
			w.t.Fatalf("it never came to be; there is %+v", instead())
		}
		pause = min(pause*5/4, 50*time.Millisecond) // some look by programs
	}
}

// conn is a connection of the client.
type conn struct {
	net.Conn
	lines *bufio.Scanner
	node  string // that it ended at
	// timeout is how long it waits for an answer. Zero: 15 s.
	timeout time.Duration
}

// open opens connections to the VIPs in turn.
func (w *world) open(n int) (all []*conn) {
	w.t.Helper()
	require.NoError(w.t, w.client.Do(func() error {
		for i := range n {
			vip := [...]netip.Addr{vip4, vip6}[i%2]
			c, err := net.DialTimeout("tcp", netip.AddrPortFrom(vip, 80).String(), 30*time.Second)
			if err != nil {
				return err
			}
			w.t.Cleanup(func() { c.Close() })
			all = append(all, &conn{Conn: c, lines: bufio.NewScanner(c)})
		}
		return nil
	}))
	for _, c := range all {
		require.NoError(w.t, c.ask())
	}
	return all
}

// ask sends a line, and checks that the same node as before answers.
func (c *conn) ask() error {
	return c.send("who")
}

// send is ask for any line.
func (c *conn) send(line string) error {
	c.SetDeadline(time.Now().Add(cmp.Or(c.timeout, 15*time.Second))) //nolint:errcheck // it cannot fail
	if _, err := fmt.Fprintln(c, line); err != nil {
		return err
	}
	if !c.lines.Scan() {
		return fmt.Errorf("no answer of %s: %w", c.node, c.lines.Err())
	}
	node, client, _ := strings.Cut(c.lines.Text(), " ")
	if c.node == "" {
		c.node = node
	}
	if node != c.node || client != c.LocalAddr().String() {
		return fmt.Errorf("%s answers %s, and not %s", node, client, c.node)
	}
	return nil
}

// live checks that all connections live.
func (w *world) live(all []*conn, when string) {
	w.t.Helper()
	for _, c := range all {
		require.NoError(w.t, c.ask(), "%s: %s", when, c.LocalAddr())
	}
}

// at counts the connections by node.
func at(all []*conn) map[string]int {
	count := map[string]int{}
	for _, c := range all {
		count[c.node]++
	}
	return count
}
