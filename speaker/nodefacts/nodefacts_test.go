package nodefacts

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/lodestone-lb/lodestone/pkg/diagnose"
	"github.com/lodestone-lb/lodestone/pkg/report"
	"github.com/lodestone-lb/lodestone/pkg/testnet"
	"github.com/lodestone-lb/lodestone/speaker"
	"github.com/lodestone-lb/lodestone/speaker/membership"
	"github.com/lodestone-lb/lodestone/speaker/netstate"
	"github.com/lodestone-lb/lodestone/speaker/plan"
)

// TestMain makes the test binary listen on an address instead, for a test that
// needs another process.
func TestMain(m *testing.M) {
	if address := os.Getenv("DIAGNOSIS_TEST_LISTEN"); address != "" {
		l, err := net.Listen("tcp", address)
		if err != nil {
			fmt.Println(err)
			os.Exit(1)
		}
		fmt.Println("listening")
		_, _ = os.Stdin.Read(make([]byte, 1)) // until the test ends
		l.Close()
		return
	}
	os.Exit(m.Run())
}

// members are other speakers that answer, or not.
type members []membership.Reach

func (m members) Speakers() map[string]bool {
	all := map[string]bool{"n0": true}
	for _, r := range m {
		all[r.Node] = true
	}
	return all
}

func (m members) Detection() *diagnose.Detection { return &diagnose.Detection{Heartbeat: 25} }

func (m members) Probe(context.Context) ([]membership.Reach, int) { return m, 0 }

// node is a host of a segment with a Gatherer in it.
type node struct {
	*testnet.Host
	t       *testing.T
	watcher *netstate.Watcher
	d       *Gatherer
}

var vip = netip.MustParseAddr("198.18.0.100")

// newNode is node n0, which knows n1 at 198.18.0.2, and the VIP to be n1's.
func newNode(t *testing.T, h *testnet.Host) *node {
	w := netstate.New(netstate.Options{Namespace: h.Handle()})
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- w.Run(ctx) }()
	t.Cleanup(func() { cancel(); assert.NoError(t, <-done) })
	<-w.Ready()
	others := members{{Node: "n1", Address: netip.MustParseAddrPort("198.18.0.2:9744")}}
	return &node{h, t, w, New(Options{
		Node: "n0", Interfaces: w, Members: others, Log: slog.New(slog.DiscardHandler),
		Status: func() speaker.Status {
			return speaker.Status{Silent: []speaker.Silent{{VIP: vip, Reason: plan.NotOwner, Owner: "n1"}}}
		},
	})}
}

// linked waits until the interface can carry packets.
func (n *node) linked(name string) {
	n.t.Helper()
	for end := time.After(30 * time.Second); ; {
		changed := n.watcher.Changed()
		if slices.ContainsFunc(n.watcher.Interfaces(), func(i netstate.Interface) bool {
			return i.Name == name && i.Up && len(i.Tentative) == 0 && len(i.Addrs) > 2
		}) {
			return
		}
		select {
		case <-changed:
		case <-end:
			n.t.Fatalf("%s does not come up: %+v", name, n.watcher.Interfaces())
		}
	}
}

// ask asks the node.
func (n *node) ask(q question) (f diagnose.Facts) {
	n.t.Helper()
	require.NoError(n.t, n.Do(func() error { f = n.d.facts(n.t.Context(), q); return nil }))
	return f
}

// asked asks until the facts are right, because who gets to run late answers after the window.
func (n *node) asked(q question, right func(diagnose.Facts) bool) diagnose.Facts {
	n.t.Helper()
	for end := time.Now().Add(30 * time.Second); ; {
		f := n.ask(q)
		if right(f) {
			return f
		}
		require.True(n.t, time.Now().Before(end), "%+v", f)
	}
}

// findings returns what is found about the node, by check.
func findings(f diagnose.Facts) map[diagnose.ID]diagnose.Finding {
	found := map[diagnose.ID]diagnose.Finding{}
	c := &diagnose.Cluster{
		Active: f.Active, Facts: map[string]diagnose.Facts{"n0": f}, APIServer: &diagnose.Clock{}, Passive: map[string][]string{"n0": {"tor-a"}},
		VIPs:     []diagnose.VIP{{Addr: vip, Owner: "n1", Port: 80}},
		Segments: map[string][]report.Segment{"n0": {{Subnet: netip.MustParsePrefix("198.18.0.0/24"), Interface: "eth0"}}},
	}
	for _, finding := range diagnose.Check(c).Findings {
		if finding.Severity != diagnose.OK {
			found[finding.Check] = finding
		}
	}
	return found
}

// listenElsewhere has another process listen inside the namespace.
func listenElsewhere(t *testing.T, h *testnet.Host, address string) {
	t.Helper()
	cmd := h.Command(context.Background(), os.Args[0])
	cmd.Env = append(os.Environ(), "DIAGNOSIS_TEST_LISTEN="+address)
	stdin, err := cmd.StdinPipe()
	require.NoError(t, err)
	stdout, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	t.Cleanup(func() { stdin.Close(); assert.NoError(t, cmd.Wait()) })
	line, err := bufio.NewReader(stdout).ReadString('\n')
	require.NoError(t, err)
	require.Equal(t, "listening\n", line)
}

func TestKernelSettingsAreFoundWhereTheyAreWrong(t *testing.T) {
	t.Parallel()
	s := testnet.NewSegment(t, 1)
	h := s.Hosts[0]
	h.Run("sysctl", "-qw", "net.ipv4.ip_forward=1")
	h.Run("ip", "route", "add", "default", "via", "198.18.0.254")
	n := newNode(t, h)
	var own net.Listener
	require.NoError(t, h.Do(func() (err error) { own, err = net.Listen("tcp", "198.18.0.1:179"); return err }))

	// A healthy node is silent.
	assert.Empty(t, findings(n.ask(question{})))

	// Nobody listens; then somebody else does. A process that another test is about to
	// start has a copy of the socket until it runs.
	own.Close()
	require.Eventually(t, func() bool {
		return strings.Contains(findings(n.ask(question{}))[diagnose.BGPPort].Message, "nobody listens on port 179")
	}, 30*time.Second, 10*time.Millisecond)
	listenElsewhere(t, h, "198.18.0.1:179")
	assert.Contains(t, findings(n.ask(question{}))[diagnose.BGPPort].Message, "another BGP daemon listens on 198.18.0.1:179")

	h.Run("sysctl", "-qw", "net.ipv4.ip_forward=0")
	assert.Contains(t, findings(n.ask(question{}))[diagnose.IPForward].Message, "net/ipv4/ip_forward is 0")
	h.Run("sysctl", "-qw", "net.ipv4.ip_forward=1", "net.ipv4.conf.eth0.forwarding=0")
	assert.Contains(t, findings(n.ask(question{}))[diagnose.IPForward].Message, "net/ipv4/conf/eth0/forwarding is 0")
	h.Run("sysctl", "-qw", "net.ipv4.conf.eth0.forwarding=1")

	// Strict filtering hurts when the way back leads elsewhere.
	h.Run("sysctl", "-qw", "net.ipv4.conf.eth0.rp_filter=1")
	assert.NotContains(t, findings(n.ask(question{})), diagnose.RPFilter)
	s.Plug(h, "mgmt")
	h.Run("ip", "addr", "add", "192.0.2.1/24", "dev", "mgmt")
	h.Run("ip", "route", "replace", "default", "via", "192.0.2.254")
	assert.Contains(t, findings(n.ask(question{}))[diagnose.RPFilter].Message,
		"rp_filter is 1 (strict) on eth0, and the default route leads through mgmt")
	h.Run("sysctl", "-qw", "net.ipv4.conf.eth0.rp_filter=2")
	assert.NotContains(t, findings(n.ask(question{})), diagnose.RPFilter)

	// kube-proxy in mode IPVS, without strictARP, half of it, and with it.
	h.Run("ip", "link", "add", "kube-ipvs0", "type", "bridge") // in place of a dummy, which not all kernels have
	h.Run("ip", "addr", "add", vip.String()+"/32", "dev", "kube-ipvs0")
	n.sees("kube-ipvs0")
	assert.Contains(t, findings(n.ask(question{}))[diagnose.KubeProxy].Message, "arp_ignore is 0 on eth0")
	h.Run("sysctl", "-qw", "net.ipv4.conf.all.arp_ignore=1")
	found := findings(n.ask(question{}))
	assert.NotContains(t, found, diagnose.KubeProxy)
	assert.Contains(t, found[diagnose.ARP].Message, "arp_announce is 0 on eth0")
	h.Run("sysctl", "-qw", "net.ipv4.conf.all.arp_announce=2")
	assert.NotContains(t, findings(n.ask(question{})), diagnose.ARP)

	// Somebody has put the VIP on an interface that answers for it.
	h.Run("ip", "addr", "add", vip.String()+"/32", "dev", "eth0")
	n.sees("eth0")
	assert.Contains(t, findings(n.ask(question{}))[diagnose.ARP].Message, "VIP 198.18.0.100 is configured on eth0")
}

// sees waits until the node knows that the interface has the VIP.
func (n *node) sees(name string) {
	n.t.Helper()
	for end := time.After(30 * time.Second); ; {
		changed := n.watcher.Changed()
		if slices.ContainsFunc(n.watcher.Interfaces(), func(i netstate.Interface) bool {
			return i.Name == name && slices.ContainsFunc(i.Addrs, func(p netip.Prefix) bool { return p.Addr() == vip })
		}) {
			return
		}
		select {
		case <-changed:
		case <-end:
			n.t.Fatalf("%s is not seen", name)
		}
	}
}

// answered returns how the address was answered.
func answered(t *testing.T, f diagnose.Facts) diagnose.Neighbour {
	t.Helper()
	require.Len(t, f.Neighbours, 1, "%+v", f)
	return f.Neighbours[0]
}

func TestNeighboursAnswerOrNot(t *testing.T) {
	t.Parallel()
	for name, other := range map[string]string{"ARP": "198.18.0.2", "NDP": "2001:db8::2"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := testnet.NewSegment(t, 3)
			n := newNode(t, s.Hosts[0])
			n.linked("eth0")
			n.d.options.Members = members{{Node: "n1", Address: netip.AddrPortFrom(netip.MustParseAddr(other), 9744)}}

			answer := func(want ...string) diagnose.Facts {
				t.Helper()
				slices.Sort(want)
				return n.asked(question{active: true}, func(f diagnose.Facts) bool {
					return slices.Equal(slices.Sorted(slices.Values(answered(t, f).Answers)), want)
				})
			}
			assert.Equal(t, "eth0", answered(t, answer(hardwareAddr(s.Hosts[1]))).Interface)

			// A second machine has the address, too.
			bits := "/24"
			if name == "NDP" {
				bits = "/64"
			}
			add := []string{"addr", "add", other + bits, "dev", "eth0"}
			if name == "NDP" {
				add = append(add, "nodad")
			}
			s.Hosts[2].Run("ip", add...)
			both := answer(hardwareAddr(s.Hosts[1]), hardwareAddr(s.Hosts[2]))
			assert.Contains(t, findings(both)[diagnose.Neighbours].Message, "2 hardware addresses answer "+name)

			// The wire is cut.
			s.Switch.Run("ip", "link", "set", "p2", "down")
			s.Switch.Run("ip", "link", "set", "p3", "down")
			got := answered(t, n.ask(question{active: true}))
			assert.Empty(t, got.Answers)
			assert.Empty(t, got.Error)
			assert.Contains(t, findings(n.ask(question{active: true}))[diagnose.Neighbours].Message, "nobody answers "+name)
		})
	}
}

func hardwareAddr(h *testnet.Host) string {
	var mac string
	for _, word := range strings.Fields(h.Run("ip", "-o", "link", "show", "eth0")) {
		if _, err := net.ParseMAC(word); err == nil && mac == "" {
			mac = word
		}
	}
	return mac
}

// A VIP is tried at its owner, though this node would deliver it to itself.
func TestVIPIsTriedAtItsOwner(t *testing.T) {
	t.Parallel()
	for name, address := range map[string]netip.Addr{"IPv4": vip, "IPv6": netip.MustParseAddr("2001:db8::100")} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := testnet.NewSegment(t, 2)
			owner := s.Hosts[1]
			single := fmt.Sprintf("%s/%d", address, address.BitLen())
			owner.Run("ip", "addr", "add", single, "dev", "eth0")
			s.Hosts[0].Run("ip", "addr", "add", single, "dev", "lo") // as kube-proxy in mode IPVS does
			n := newNode(t, s.Hosts[0])
			n.linked("eth0")
			n.d.options.Members = members{}
			n.d.options.Status = func() speaker.Status {
				return speaker.Status{Silent: []speaker.Silent{{VIP: address, Reason: plan.NotOwner, Owner: "n1"}}}
			}
			try := func(port uint16, want diagnose.Reply) {
				t.Helper()
				n.asked(question{active: true, vips: []netip.AddrPort{netip.AddrPortFrom(address, port)}}, func(f diagnose.Facts) bool {
					require.Len(t, f.VIPs, 1)
					return f.VIPs[0].Reply == want && slices.Equal(f.VIPs[0].Answers, []string{hardwareAddr(owner)})
				})
			}
			waitForAddress(t, owner, address)

			var l net.Listener
			require.NoError(t, owner.Do(func() (err error) {
				l, err = net.Listen("tcp", netip.AddrPortFrom(address, 80).String())
				return err
			}))
			defer l.Close()
			try(80, diagnose.Accepted)
			try(81, diagnose.Refused)
			try(0, "") // no port was asked for

			// No connection came of it.
			require.NoError(t, l.(*net.TCPListener).SetDeadline(time.Now().Add(100*time.Millisecond)))
			_, err := l.Accept()
			assert.ErrorIs(t, err, os.ErrDeadlineExceeded)

			owner.Run("nft", "add table inet faults; add chain inet faults input { type filter hook input priority 0; }; add rule inet faults "+
				"input tcp dport 80 drop")
			try(80, diagnose.Silence)
		})
	}
}

// waitForAddress waits until the address has passed duplicate address detection.
func waitForAddress(t *testing.T, h *testnet.Host, a netip.Addr) {
	t.Helper()
	require.Eventually(t, func() bool {
		return h.Do(func() error {
			l, err := net.Listen("tcp", netip.AddrPortFrom(a, 0).String())
			if err == nil {
				err = l.Close()
			}
			return err
		}) == nil
	}, 30*time.Second, 50*time.Millisecond)
}

// Nobody has the node send to where he likes.
func TestOnlyVIPsOfOtherNodesAreTried(t *testing.T) {
	t.Parallel()
	s := testnet.NewSegment(t, 2)
	n := newNode(t, s.Hosts[0])
	n.linked("eth0")
	n.d.options.Members = members{{Node: "far", Address: netip.MustParseAddrPort("203.0.113.7:9744"), TCP: errors.New("no route"),
		UDP: errors.New("no response")}}
	f := n.ask(question{active: true, vips: []netip.AddrPort{netip.MustParseAddrPort("198.18.0.2:22"),
		netip.MustParseAddrPort("203.0.113.10:80")}})
	require.Len(t, f.VIPs, 2)
	for _, v := range f.VIPs {
		assert.Contains(t, v.Error, "does not know another node that owns it")
		assert.Empty(t, v.Reply)
	}
	assert.Empty(t, f.Neighbours, "it is on no segment of this node")

	// Its own are not tried, either, nor those that it has no interface for.
	n.d.options.Status = func() speaker.Status {
		return speaker.Status{Silent: []speaker.Silent{{VIP: netip.MustParseAddr("203.0.113.10"), Owner: "n1"}}}
	}
	far := n.ask(question{active: true, vips: []netip.AddrPort{netip.MustParseAddrPort("203.0.113.10:80")}})
	assert.Contains(t, far.VIPs[0].Error, "has no interface that is up on its segment")
	assert.Equal(t, []diagnose.Member{{Node: "far", Address: netip.MustParseAddrPort("203.0.113.7:9744"), UDP: "no response",
		TCP: "no route"}}, f.Members)
}

// If there are too many neighbours, the node asks for those that follow it by name.
func TestFewNeighboursAreAskedFor(t *testing.T) {
	t.Parallel()
	n := newNode(t, testnet.NewSegment(t, 1).Hosts[0])
	n.linked("eth0")
	n.d.options.Node = "n05"
	var all members
	for i := range 20 {
		if i != 5 {
			all = append(all, membership.Reach{Node: fmt.Sprintf("n%02d", i),
				Address: netip.AddrPortFrom(netip.AddrFrom4([4]byte{198, 18, 0, byte(50 + i)}), 9744)})
		}
	}
	n.d.options.Members = all
	var asked []string
	for _, neighbour := range n.ask(question{active: true}).Neighbours {
		asked = append(asked, neighbour.Node)
	}
	assert.Equal(t, []string{"n06", "n07", "n08", "n09", "n10", "n11", "n12", "n13"}, asked)
}

// A bond may answer by a port's address; what leads to pods is nobody's business.
func TestInterfacesAreThoseOfTheNode(t *testing.T) {
	t.Parallel()
	lan, pods := []netip.Prefix{netip.MustParsePrefix("198.18.0.1/24")}, []netip.Prefix{netip.MustParsePrefix("10.244.1.1/24")}
	var names []string
	for _, i := range interfaces([]netstate.Interface{
		{Index: 1, Name: "eth0", Kind: "device", Master: 3}, {Index: 2, Name: "eth1", Kind: "device", Master: 3},
		{Index: 3, Name: "bond0", Kind: "bond", Addrs: lan},
		{Index: 4, Name: "cni0", Kind: "bridge", Addrs: pods}, {Index: 5, Name: "veth1", Kind: "veth", Master: 4},
		{Index: 6, Name: "cali1", Kind: "veth", Addrs: []netip.Prefix{netip.MustParsePrefix("fe80::1/64")}},
		{Index: 7, Name: "eth2", Kind: "device"},
	}) {
		names = append(names, i.Name)
	}
	assert.Equal(t, []string{"eth0", "eth1", "bond0", "cni0"}, names)
}

// A file that cannot be read is reported, and its facts stay unknown.
func TestUnreadableKernelIsReported(t *testing.T) {
	t.Parallel()
	proc := t.TempDir()
	require.NoError(t, os.MkdirAll(filepath.Join(proc, "sys", "net", "ipv4"), 0o755))
	require.NoError(t, os.WriteFile(filepath.Join(proc, "sys", diagnose.SysctlForward4), []byte("yes\n"), 0o644))
	f := diagnose.Facts{Unread: map[string]string{}, Sysctls: map[string]int{}}
	kernel(proc).addTo(&f, []string{"all", "eth0"})
	assert.Empty(t, f.Sysctls)
	assert.Contains(t, f.Unread[diagnose.SysctlForward4], `is "yes\n", not a number`)
	for _, what := range []string{diagnose.Sysctl("eth0", "rp_filter"), "default routes", "capabilities", "bgp listeners"} {
		assert.Contains(t, f.Unread[what], "no such file or directory", what)
	}
	found := findings(f)
	for _, id := range []diagnose.ID{diagnose.IPForward, diagnose.RPFilter, diagnose.Capabilities, diagnose.BGPPort} {
		assert.Equal(t, diagnose.Unknown, found[id].Severity, id)
	}
}

func TestKernelTextsAreRead(t *testing.T) {
	t.Parallel()
	routes, err := parseRoutes(strings.NewReader("Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT\n" +
		"eth1\t00000000\tFE0212C6\t0003\t0\t0\t100\t00000000\t0\t0\t0\n" +
		"eth0\t000012C6\t00000000\t0001\t0\t0\t0\t00FFFFFF\t0\t0\t0\nwg0\t00000000\t00000000\t0001\t0\t0\t0\t00000080\t0\t0\t0\n"))
	require.NoError(t, err)
	assert.Equal(t, []string{"eth1"}, routes, "0.0.0.0/1 is no default route")

	_, err = parseListeners(strings.NewReader("head\n 0: 0100007F:XX 00000000:0000 0A 0:0 00:0 0 0 0 77\n"))
	require.ErrorContains(t, err, "is not an address and a port")
	value, err := kernel("/proc").capabilities()
	require.NoError(t, err)
	assert.NotZero(t, value, "tests in namespaces run as root")
}

func TestProxyModeIsAskedFor(t *testing.T) {
	t.Parallel()
	answer := http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, "ipvs\n") })
	server := httptest.NewServer(answer)
	t.Cleanup(server.Close)
	f := diagnose.Facts{Unread: map[string]string{}}
	assert.Eventually(t, func() bool { // within the second that it has
		New(Options{ProxyModeURL: server.URL}).proxyMode(t.Context(), &f)
		return f.ProxyMode == "ipvs"
	}, 30*time.Second, time.Millisecond)
	f = diagnose.Facts{Unread: map[string]string{}}
	New(Options{ProxyModeURL: "http://127.0.0.1:1"}).proxyMode(t.Context(), &f)
	assert.Empty(t, f.ProxyMode)
	assert.Contains(t, f.Unread["proxy mode"], "connection refused")
}

func TestQuestionsOverHTTP(t *testing.T) {
	t.Parallel()
	d := New(Options{Node: "n0", Interfaces: netstate.New(netstate.Options{}), Members: members{}, Status: func() speaker.Status {
		return speaker.Status{Checks: []diagnose.Condition{{Name: "caches", OK: true, Message: "synced"}}}
	}, Log: slog.New(slog.DiscardHandler)})
	get := func(query string) *httptest.ResponseRecorder {
		w := httptest.NewRecorder()
		d.ServeHTTP(w, httptest.NewRequest(http.MethodGet, diagnose.Path+query, nil))
		return w
	}
	w := get("")
	require.Equal(t, http.StatusOK, w.Code)
	var f diagnose.Facts
	require.NoError(t, json.Unmarshal(w.Body.Bytes(), &f))
	assert.Equal(t, "n0", f.Node)
	assert.Equal(t, []diagnose.Condition{{Name: "caches", OK: true, Message: "synced"}}, f.Conditions)
	assert.False(t, f.Active)
	assert.WithinDuration(t, time.Now(), f.Sent, time.Minute)
	assert.False(t, f.Sent.Before(f.Received))

	assert.Equal(t, http.StatusBadRequest, get("?vip=example.com").Code)
	assert.Equal(t, http.StatusBadRequest, get("?vip="+url.QueryEscape("[fe80::1%eth0]:80")).Code)
	assert.Equal(t, http.StatusBadRequest, get("?"+strings.Repeat("vip=203.0.113.1:1&", diagnose.MaxVIPs+1)).Code)

	d.running.Lock()
	assert.Equal(t, http.StatusTooManyRequests, get("").Code)
	d.running.Unlock()
}

// Segments that come back are read as those are written that go out.
func TestSegmentsAreReadAsWritten(t *testing.T) {
	t.Parallel()
	for _, pair := range [][2]string{{"198.18.0.1:61001", "198.18.0.2:80"}, {"[2001:db8::1]:61001", "[2001:db8::2]:80"}} {
		from, to := netip.MustParseAddrPort(pair[0]), netip.MustParseAddrPort(pair[1])
		etherType := []byte{0x08, 0x00}
		if from.Addr().Is6() {
			etherType = []byte{0x86, 0xdd}
		}
		frame := append(append(make([]byte, 12), etherType...), segment(from, to, 7, flagSYN)...)
		got, ack, flags, ok := parseSegment(frame)
		require.True(t, ok)
		assert.Equal(t, from, got)
		assert.Zero(t, ack)
		assert.EqualValues(t, flagSYN, flags)
		for n := range frame {
			_, _, _, ok := parseSegment(frame[:n])
			assert.False(t, ok, "%d bytes", n)
		}
	}
}

func FuzzParseSegment(f *testing.F) {
	head := append(make([]byte, 12), 0x08, 0x00)
	f.Add(append(head, segment(netip.MustParseAddrPort("198.18.0.1:1"), netip.MustParseAddrPort("198.18.0.2:2"), 1, flagSYN)...))
	f.Add(append(append(make([]byte, 12), 0x86, 0xdd),
		segment(netip.MustParseAddrPort("[2001:db8::1]:1"), netip.MustParseAddrPort("[2001:db8::2]:2"), 1, flagRST)...))
	f.Fuzz(func(t *testing.T, frame []byte) {
		from, _, _, ok := parseSegment(frame)
		if ok && !from.IsValid() {
			t.Errorf("a segment of nobody: %x", frame)
		}
	})
}

func FuzzParseListeners(f *testing.F) {
	f.Add("  sl  local_address rem_address   st\n   0: 0100007F:00B3 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0       " +
		" 0 77 1\n")
	f.Add("h\n 0: 00000000000000000000000000000000:00B3 0:0 0A 0:0 00:0 0 0 0 78\n")
	f.Fuzz(func(t *testing.T, text string) {
		all, err := parseListeners(strings.NewReader(text))
		for _, s := range all {
			if err == nil && !s.address.IsValid() {
				t.Errorf("a socket nowhere: %q", text)
			}
		}
	})
}

func FuzzParseRoutes(f *testing.F) {
	f.Add("Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\neth0\t00000000\t010011AC\t0003\t0\t0\t0\t00000000\t0\t0\t0\n")
	f.Add("eth0 00000000 0 0 0 0 0 00000000 0 0 0\neth0 00000000 0 0 0 0 0 00000000\n\n")
	f.Fuzz(func(t *testing.T, text string) {
		names, err := parseRoutes(strings.NewReader(text))
		if err != nil && len(names) > 0 {
			t.Errorf("an error, and yet %q", names)
		}
		for i, name := range names {
			if name == "" || slices.Index(names, name) != i {
				t.Errorf("%q of %q", names, text)
			}
		}
	})
}

func FuzzParseQuery(f *testing.F) {
	for _, text := range []string{"", "active=true&vip=203.0.113.1:80&vip=[2001:db8::1]:443",
		"vip=[fe80::1%25eth0]:1", "vip=[::ffff:203.0.113.1]:0"} {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		values, err := url.ParseQuery(text)
		if err != nil {
			return
		}
		asked, err := parse(values)
		if err != nil {
			require.LessOrEqual(t, len(err.Error()), 400)
			return
		}
		require.LessOrEqual(t, len(asked.vips), diagnose.MaxVIPs)
		for _, vip := range asked.vips {
			require.True(t, vip.IsValid() && vip.Addr().Zone() == "" && !vip.Addr().Is4In6(), vip)
		}
	})
}
