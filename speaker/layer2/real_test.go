package layer2

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"log/slog"
	"maps"
	"net"
	"net/netip"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	arppacket "github.com/mdlayher/arp"
	"github.com/mdlayher/packet"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/vishvananda/netlink"
	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"

	"github.com/lodestone-lb/lodestone/pkg/testnet"
	"github.com/lodestone-lb/lodestone/speaker/layer2/wire"
	"github.com/lodestone-lb/lodestone/speaker/netstate"
	"github.com/lodestone-lb/lodestone/speaker/plan"
)

// node is an announcer on a host, with real sockets.
type node struct {
	t    testing.TB
	host *testnet.Host
	*Announcer
}

// startNode starts a node. If members is nil, no speaker is lost.
func startNode(t testing.TB, h *testnet.Host, members Members) *node {
	t.Helper()
	watcher := netstate.New(netstate.Options{Namespace: h.Handle()})
	a := New(Options{
		Interfaces: watcher,
		Members:    members,
		Keys:       keys("the cluster's"),
		Log:        slog.New(slog.NewTextHandler(t.Output(), &slog.HandlerOptions{Level: slog.LevelWarn})),
		Registry:   prometheus.NewPedanticRegistry(),
		Listen: func(i *net.Interface, etherType int, filter []bpf.RawInstruction) (c net.PacketConn, err error) {
			err = h.Do(func() error { c, err = ListenPacket(i, etherType, filter); return err })
			return c, err
		},
		Groups: func() (s GroupSocket, err error) {
			err = h.Do(func() error { s, err = OpenGroups(); return err })
			return s, err
		},
		Joined: func(index int) (groups map[netip.Addr]bool, err error) {
			err = h.Do(func() error { groups, err = netstate.Groups(index); return err })
			return groups, err
		},
	})
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 2)
	go func() { done <- watcher.Run(ctx) }()
	go func() { done <- a.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		for range 2 {
			if err := <-done; err != nil {
				t.Error(err)
			}
		}
	})
	<-a.Ready()
	return &node{t, h, a}
}

func (n *node) set(want map[netip.Addr]plan.Layer2) {
	n.t.Helper()
	if err := n.Set(n.t.Context(), want); err != nil {
		n.t.Fatal(err)
	}
}

// setWith returns set with a VIP that the node has at all times.
func (n *node) setWith(always netip.Addr) func(map[netip.Addr]plan.Layer2) {
	return func(want map[netip.Addr]plan.Layer2) {
		n.t.Helper()
		all := everywhere(always)
		maps.Copy(all, want)
		n.set(all)
	}
}

// mac returns the address of one of the node's interfaces.
func (n *node) mac(name string) mac { return macOf(n.t, n.host, name) }

func macOf(t testing.TB, h *testnet.Host, name string) (m mac) {
	t.Helper()
	err := h.Do(func() error {
		i, err := net.InterfaceByName(name)
		if err == nil {
			m = hardwareAddr(i.HardwareAddr)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return m
}

// listenOn opens a packet socket on a host's eth0.
func listenOn(t testing.TB, h *testnet.Host, etherType int, filter []bpf.RawInstruction) (c net.PacketConn) {
	t.Helper()
	err := h.Do(func() error {
		i, err := net.InterfaceByName("eth0")
		if err == nil {
			c, err = ListenPacket(i, etherType, filter)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

// Only requests and replies of others reach user space, even through a socket
// for all EtherTypes on a promiscuous interface.
func TestKernelFilter(t *testing.T) {
	t.Parallel()
	s := testnet.NewSegment(t, 2)
	node, client := macOf(t, s.Hosts[0], "eth0"), macOf(t, s.Hosts[1], "eth0")
	s.Hosts[0].Run("ip", "link", "set", "eth0", "promisc", "on")
	_, filter := wire.ARP{}.Socket(node)
	raw, err := bpf.Assemble(filter)
	if err != nil {
		t.Fatal(err)
	}
	here, there := listenOn(t, s.Hosts[0], unix.ETH_P_ALL, raw), listenOn(t, s.Hosts[1], unix.ETH_P_ALL, nil)
	frameOf := func(op uint16, to, sender mac) []byte {
		return arpFrame(arppacket.Operation(op), to, sender, clientIP, mac{}, vipA)
	}
	with := func(at int, b byte) []byte {
		f := frameOf(1, broadcast, client)
		f[at] = b
		return f
	}
	tagged := func(tag ...byte) []byte {
		return slices.Concat(with(0, 0xff)[:12], []byte{0x81, 0}, tag, with(0, 0xff)[12:])
	}
	for _, c := range []struct {
		what  string
		frame []byte
		from  net.PacketConn
		want  bool
	}{
		{"broadcast request", frameOf(1, broadcast, client), there, true},
		{"unicast request", frameOf(1, node, client), there, true},
		{"reply", frameOf(2, node, client), there, true},
		{"request to another host", frameOf(1, mac{2, 2, 2, 2, 2, 2}, client), there, false},
		{"what this host sends", frameOf(1, broadcast, client), here, false},
		{"sender is this host", frameOf(1, broadcast, node), there, false},
		{"sender differs in the first byte", frameOf(1, broadcast, mac{node[0] ^ 4, node[1], node[2], node[3], node[4], node[5]}), there, true},
		{"sender differs in the last byte", frameOf(1, broadcast, mac{node[0], node[1], node[2], node[3], node[4], node[5] ^ 1}), there, true},
		{"operation 0", frameOf(0, broadcast, client), there, false},
		{"operation 3", frameOf(3, broadcast, client), there, false},
		{"other EtherType", with(offEtherType+1, 0x99), there, false},
		{"other hardware type", with(offFormat+1, 7), there, false},
		{"other protocol type", with(offFormat+2, 7), there, false},
		{"other lengths", with(offLengths, 8), there, false},
		{"VLAN tag", tagged(0, 7), there, false},
		{"VLAN tag with a priority", tagged(0xe0, 7), there, false},
		{"priority alone", tagged(0xe0, 0), there, true},
		{"too short", with(0, 0xff)[:20], there, false},
	} {
		if _, err := c.from.WriteTo(c.frame, &packet.Addr{HardwareAddr: c.frame[:6]}); err != nil {
			t.Fatal(err)
		}
		// A request that passes ends the wait for one that does not.
		end := frameOf(1, broadcast, mac{2, 0xe, 0xe, 0xe, 0xe, 0xe})
		if _, err := there.WriteTo(end, &packet.Addr{HardwareAddr: end[:6]}); err != nil {
			t.Fatal(err)
		}
		passed := 0
		for buf := make([]byte, 1500); ; passed++ {
			n, _, err := here.ReadFrom(buf)
			if err != nil {
				t.Fatal(err)
			}
			if bytes.Equal(buf[:n], end) {
				break
			}
		}
		if want := map[bool]int{true: 1}[c.want]; passed != want {
			t.Errorf("%s: %d frames passed, want %d", c.what, passed, want)
		}
	}
}

func TestAnswersReal(t *testing.T) {
	t.Parallel()
	s := testnet.NewSegment(t, 2)
	n, client := startNode(t, s.Hosts[0], nil), s.Hosts[1]
	// A promiscuous interface sees also what is for others.
	n.host.Run("ip", "link", "set", "eth0", "promisc", "on")
	n.announcing(mark)
	c := listenOn(t, client, unix.ETH_P_ARP, nil)
	end := mac{2, 0xe, 0xe, 0xe, 0xe, 0xe}
	answers(t, stage{
		node:   n.mac("eth0"),
		client: macOf(t, client, "eth0"),
		set:    n.setWith(mark),
		exchange: func(f []byte) (got []frame) {
			for _, f := range [][]byte{f, arpFrame(arppacket.OperationRequest, broadcast, end, clientIP, mac{}, mark)} {
				if _, err := c.WriteTo(f, &packet.Addr{HardwareAddr: f[:6]}); err != nil {
					t.Fatal(err)
				}
			}
			buf := make([]byte, 1500)
			for c.SetReadDeadline(time.Now().Add(30 * time.Second)); ; {
				k, _, err := c.ReadFrom(buf)
				if err != nil {
					t.Fatal(err)
				}
				g := frame{bytes: slices.Clone(buf[:k])}
				switch to := hardwareAddr(g.bytes[:6]); {
				case to == end:
					return got
				case k >= arpLength && to != broadcast: // not the repetitions of the announcement, which come meanwhile
					got = append(got, g)
				}
			}
		},
	})
}

// arping asks with the arping of Debian and returns the senders of the answers. It stops after three
// questions, unless the arguments set another number.
func arping(t *testing.T, from *testnet.Host, vip netip.Addr, args ...string) []string {
	t.Helper()
	args = append([]string{"-r", "-i", "eth0", "-W", "0.3", "-c", "3"}, append(args, vip.String())...)
	out, err := from.Command(t.Context(), "arping", args...).Output()
	if exit := (*exec.ExitError)(nil); err != nil && (!errors.As(err, &exit) || exit.ExitCode() != 1) {
		t.Fatalf("arping: %v", err)
	}
	return strings.Fields(string(out))
}

// neighbour is a host's neighbour entry for a VIP, "" if it has none.
func neighbour(t *testing.T, h *testnet.Host, vip netip.Addr) (hw, state string) {
	t.Helper()
	f := strings.Fields(h.Run("ip", "neigh", "show", vip.String(), "dev", "eth0"))
	if at := slices.Index(f, "lladdr"); at >= 0 {
		hw = f[at+1]
	}
	if len(f) > 0 {
		state = f[len(f)-1]
	}
	return hw, state
}

// eventually waits for something that the kernel will do, for 30 seconds.
func eventually(t testing.TB, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(30 * time.Second); time.Now().Before(deadline); time.Sleep(10 * time.Millisecond) {
		if ok() {
			return
		}
	}
	t.Errorf("never: %s", what)
}

// resolve makes a host's kernel learn where a VIP is.
func resolve(t *testing.T, h *testnet.Host, vip netip.Addr) {
	t.Helper()
	_ = h.Command(t.Context(), "ping", "-c1", "-W0.1", vip.String()).Run() // nobody has the VIP
}

func TestArping(t *testing.T) {
	t.Parallel()
	s := testnet.NewSegment(t, 3)
	n, client := startNode(t, s.Hosts[0], nil), s.Hosts[2]
	startNode(t, s.Hosts[1], nil).set(everywhere(vipB)) // another speaker, with another VIP
	n.announcing(vipA, mark)
	want := n.mac("eth0")
	if got := answerers(t, client, vipA); !slices.Equal(got, []string{want.String()}) {
		t.Errorf("answered by %v, want %v", got, want)
	}
	cold := newColdClient(t, client, vipA)
	if got, want := cold.answers(5, want), slices.Repeat([]string{want.String()}, 5); !slices.Equal(got, want) {
		t.Errorf("answers %v, want exactly one for each request: %v", got, want)
	}
	n.set(everywhere(mark))
	if got := arping(t, client, vipA); len(got) > 0 {
		t.Errorf("answered after withdrawal by %v", got)
	}
	if got := cold.answers(5, want); len(got) > 0 {
		t.Errorf("answered after withdrawal by %v", got)
	}
}

// A VIP moves, and the client's kernel knows at once.
func TestTakeoverFlipsTheNeighbourEntry(t *testing.T) {
	t.Parallel()
	s := testnet.NewSegment(t, 3)
	a, b, client := startNode(t, s.Hosts[0], nil), startNode(t, s.Hosts[1], nil), s.Hosts[2]
	var flips []time.Duration
	updates, quit := make(chan netlink.NeighUpdate, 100), make(chan struct{})
	if err := netlink.NeighSubscribeAt(*client.Handle(), updates, quit); err != nil {
		t.Fatal(err)
	}
	defer close(quit)
	a.set(everywhere(vipA))
	eventually(t, "the client knows the first owner", func() bool {
		resolve(t, client, vipA)
		hw, _ := neighbour(t, client, vipA)
		return hw == a.mac("eth0").String()
	})
	for i := range 10 {
		from, to := a, b
		if i%2 == 1 {
			from, to = b, a
		}
		from.set(nil)
		start, want := time.Now(), to.mac("eth0")
		to.set(everywhere(vipA))
		for deadline := time.After(30 * time.Second); len(flips) <= i; {
			select {
			case u := <-updates:
				if u.IP.Equal(vipA.AsSlice()) && hardwareAddr(u.HardwareAddr) == want {
					flips = append(flips, time.Since(start))
				}
			case <-deadline:
				t.Fatalf("takeover %d: the entry never flipped", i)
			}
		}
	}
	slices.Sort(flips)
	t.Logf("neighbour entry flips %v (median) %v (worst) after Set", flips[5], flips[9])
	if flips[5] > 2*time.Second { // a machine that runs something else delays some, and not most
		t.Errorf("flips took %v", flips)
	}
}

// The kernel verifies a neighbour by unicast requests (NUD, RFC 4861 section
// 7.3 done with ARP). With broadcasts forbidden only an answer keeps it.
func TestNeighbourUnreachabilityDetection(t *testing.T) {
	t.Parallel()
	s := testnet.NewSegment(t, 2)
	n, client := startNode(t, s.Hosts[0], nil), s.Hosts[1]
	n.set(everywhere(vipA))
	resolve(t, client, vipA)
	eventually(t, "resolved", func() bool { hw, _ := neighbour(t, client, vipA); return hw != "" })
	before := testutil.ToFloat64(n.metrics.replies.WithLabelValues("eth0", "IPv4"))
	client.Run("sysctl", "-qw", "net.ipv4.neigh.eth0.mcast_solicit=0")
	client.Run("ip", "neigh", "change", vipA.String(), "dev", "eth0", "nud", "probe")
	eventually(t, "reachable by a unicast probe", func() bool { _, state := neighbour(t, client, vipA); return state == "REACHABLE" })
	if after := testutil.ToFloat64(n.metrics.replies.WithLabelValues("eth0", "IPv4")); after <= before {
		t.Error("not an answer to the probe: the kernel has asked otherwise")
	}
}

// The client learns every change of the node's interfaces from the node's
// announcements.
func TestInterfaceChanges(t *testing.T) {
	t.Parallel()
	s := testnet.NewSegment(t, 2)
	n, client := startNode(t, s.Hosts[0], nil), s.Hosts[1]
	n.set(map[netip.Addr]plan.Layer2{vipA: {Interfaces: []string{"eth*"}}})
	resolve(t, client, vipA)
	knows := func(what, name string) {
		t.Helper()
		want := n.mac(name).String()
		eventually(t, what, func() bool { hw, _ := neighbour(t, client, vipA); return hw == want })
		eventually(t, what+": answered", func() bool { return slices.Contains(answerers(t, client, vipA), want) })
	}
	announced := func() float64 { return testutil.ToFloat64(n.metrics.announcements.WithLabelValues("eth0", "IPv4")) }
	knows("at first", "eth0")

	n.host.Run("ip", "link", "set", "eth0", "down")
	eventually(t, "eth0 unused", func() bool { return n.Status().VIPs[0].Reason == NoInterface })
	before := announced()
	n.host.Run("ip", "link", "set", "eth0", "up")
	eventually(t, "announced on eth0 again", func() bool { return announced() >= before+2 })
	knows("down and up", "eth0")

	for range 5 { // faster than the announcer follows
		n.host.Run("ip", "link", "set", "eth0", "down")
		n.host.Run("ip", "link", "set", "eth0", "up")
	}
	eventually(t, "announced after flapping",
		func() bool { return len(n.Status().VIPs[0].Interfaces) == 1 && n.Status().Interfaces[0].Error == "" })
	knows("flapped", "eth0")

	before = announced()
	s.Switch.Run("ip", "link", "set", "p1", "down")
	eventually(t, "carrier lost", func() bool { return n.Status().VIPs[0].Reason == NoInterface })
	s.Switch.Run("ip", "link", "set", "p1", "up")
	eventually(t, "carrier back", func() bool { return announced() >= before+2 })

	n.host.Run("ip", "link", "set", "eth0", "address", "02:00:00:00:00:99")
	knows("MAC changed", "eth0")

	s.Plug(n.host, "eth1")
	knows("hot-plugged", "eth1")
	n.host.Run("ip", "link", "del", "eth1")
	eventually(t, "eth1 gone", func() bool { return len(n.Status().Interfaces) == 1 })
	if got := answerers(t, client, vipA); !slices.Equal(got, []string{n.mac("eth0").String()}) {
		t.Errorf("unplugged: answered by %v", got)
	}
	if s := n.Status(); len(s.VIPs[0].Interfaces) != 1 {
		t.Errorf("status %+v", s)
	}
}

func TestInterfacePatterns(t *testing.T) {
	t.Parallel()
	s := testnet.NewSegment(t, 2)
	n, client := startNode(t, s.Hosts[0], nil), s.Hosts[1]
	s.Plug(n.host, "eth1")
	s.Plug(n.host, "veth7")
	eth0, eth1, veth7 := n.mac("eth0").String(), n.mac("eth1").String(), n.mac("veth7").String()
	marked := plan.Layer2{Interfaces: []string{"eth*", "veth*"}}
	cold := newColdClient(t, client, vipA)
	for patterns, want := range map[string][]string{
		"eth1": {eth1}, "eth0": {eth0}, "eth*": {eth0, eth1}, "": {eth0, eth1}, "veth?": {veth7}, "none": nil,
	} {
		n.set(map[netip.Addr]plan.Layer2{vipA: {Interfaces: strings.Fields(patterns)}, mark: marked})
		eventually(t, "right interfaces for "+patterns, func() bool {
			return len(n.Status().VIPs[0].Interfaces) == len(want) && len(n.Status().VIPs[1].Interfaces) == 3
		})
		got := cold.answers(1, n.mac("eth0"), n.mac("eth1"), n.mac("veth7"))
		slices.Sort(want)
		if !slices.Equal(got, want) {
			t.Errorf("patterns %q: answered by %v, want %v", patterns, got, want)
		}
	}
	// Each of the node's interfaces hears what the others announce.
	if c := testutil.ToFloat64(n.metrics.conflicts.WithLabelValues("eth0", "IPv4")); c != 0 {
		t.Errorf("%v conflicts with ourselves", c)
	}
}

// The bridge answers for its port, unless the port is named.
func TestBridgePort(t *testing.T) {
	t.Parallel()
	s := testnet.NewSegment(t, 2)
	n, client := startNode(t, s.Hosts[0], nil), s.Hosts[1]
	n.host.Run("ip", "link", "add", "br0", "address", "02:00:00:00:00:b0", "type", "bridge", "forward_delay", "0")
	n.host.Run("ip", "link", "set", "br0", "up")
	n.host.Run("ip", "link", "set", "eth0", "master", "br0")
	for pattern, answerer := range map[string]string{"": "br0", "eth0": "eth0", "br*": "br0"} {
		n.set(map[netip.Addr]plan.Layer2{vipA: {Interfaces: strings.Fields(pattern)}})
		eventually(t, pattern+" in use", func() bool { return slices.Equal(n.Status().VIPs[0].Interfaces, []string{answerer}) })
		if got, want := answerers(t, client, vipA), []string{n.mac(answerer).String()}; !slices.Equal(got, want) {
			t.Errorf("pattern %q: answered by %v, want %v", pattern, got, want)
		}
	}
}

// capture runs tcpdump on a host until stop, which returns its lines.
func capture(t *testing.T, h *testnet.Host, filter ...string) (stop func() []string) {
	t.Helper()
	c := h.Command(t.Context(), "tcpdump", append([]string{"-i", "eth0", "-n", "-e", "-tt", "-s", "100", "-B", "8192", "--immediate-mode"},
		filter...)...)
	stderr, err := c.StderrPipe()
	if err != nil {
		t.Fatal(err)
	}
	var out strings.Builder
	c.Stdout = &out
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	for lines := bufio.NewScanner(stderr); lines.Scan() && !strings.HasPrefix(lines.Text(), "listening"); {
	}
	return func() []string {
		time.Sleep(300 * time.Millisecond) // for tcpdump to read what came
		_ = c.Process.Signal(unix.SIGINT)  // it execs: nsenter's process is tcpdump's
		_ = c.Wait()
		return strings.Split(strings.TrimSpace(out.String()), "\n")
	}
}

// Nothing is sent when nothing changed.
func TestQuiet(t *testing.T) {
	t.Parallel()
	s := testnet.NewSegment(t, 2)
	n := startNode(t, s.Hosts[0], nil)
	n.set(everywhere(vipA, vipB))
	n.announcedTwice(2)
	stop := capture(t, s.Hosts[1], "ether", "src", n.mac("eth0").String(), "and", "arp")
	for range 1000 {
		n.set(everywhere(vipA, vipB))
	}
	if lines := stop(); len(lines) != 1 || lines[0] != "" {
		t.Errorf("%d frames, the first: %s", len(lines), lines[0])
	}
}

// Five thousand VIPs, as another host on the segment sees them.
func TestManyVIPs(t *testing.T) {
	t.Parallel()
	s := testnet.NewSegment(t, 2)
	n := startNode(t, s.Hosts[0], nil)
	stop := capture(t, s.Hosts[1], "ether", "src", n.mac("eth0").String(), "and", "arp")
	want := map[netip.Addr]plan.Layer2{}
	for vip := netip.MustParseAddr("198.19.0.0"); len(want) < 5000; vip = vip.Next() {
		want[vip] = plan.Layer2{}
	}
	start := time.Now()
	n.set(want)
	set := time.Since(start)
	for range 20 { // the machine may be busy with other things
		if testutil.ToFloat64(n.metrics.announcements.WithLabelValues("eth0", "IPv4")) >= 2*2*5000 { // a lost frame is made up for
			break
		}
		time.Sleep(time.Second)
	}
	n.set(nil)
	seen, last, worst, window := map[string]bool{}, 0.0, 0, []float64(nil)
	for _, line := range stop() {
		f := strings.Fields(line)
		at, _ := strconv.ParseFloat(f[0], 64)
		for window = append(window, at); at-window[0] > 0.1; window = window[1:] {
		}
		worst = max(worst, len(window))
		if i := slices.Index(f, "Reply"); i >= 0 && !seen[f[i+1]] {
			seen[f[i+1]] = true
			last = at - float64(start.UnixNano())/1e9
		}
	}
	t.Logf("Set took %v; all announced after %.2f s; at most %d frames in 100 ms", set, last, worst)
	if len(seen) != 5000 || worst > framesPerSecond/10*5/4+burstFrames {
		t.Errorf("%d VIPs seen, %d frames in 100 ms", len(seen), worst)
	}
}
