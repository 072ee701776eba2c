package limit

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"github.com/mdlayher/netlink"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
	"pgregory.net/rapid"

	"github.com/lodestone-lb/lodestone/pkg/annotation"
	"github.com/lodestone-lb/lodestone/pkg/testnet"
	"github.com/lodestone-lb/lodestone/speaker/nft"
	"github.com/lodestone-lb/lodestone/speaker/plan"
)

// Connections of both families to a VIP that DNAT sends on, from the first
// limit to the last.
func TestConnectionsAreCapped(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.serve(80)
	w.serve(443)
	w.start()
	w.all(vip4, 80, 100)
	w.all(vip6, 80, 100)

	four, six := at(vip4, "web"), at(vip6, "web")
	w.set(limits{four: {PerSecond: 50, Ports: web}, six: {PerSecond: 20, Ports: web}})
	w.capped(four, 80, 300, 50, 50)
	w.capped(six, 80, 300, 20, 20)
	w.all(other4, 80, 300) // the Service's other addresses are other Services'
	w.all(other6, 80, 300)
	w.capped(four, 443, 300, 50, 0) // the ports share the bucket

	// Another rate goes on with the count, and a Service that comes beside
	// changes nothing.
	before := w.dropped(four)
	w.set(limits{four: {PerSecond: 100, Ports: web}, six: {PerSecond: 20, Ports: web}, at(vip4, "dns"): {PerSecond: 1, Ports: dns}})
	require.GreaterOrEqual(t, w.dropped(four), before)
	w.capped(four, 80, 300, 100, 100)

	// Each without the other, then none.
	w.set(limits{six: {PerSecond: 20, Ports: web}})
	w.all(vip4, 80, 300)
	w.capped(six, 80, 300, 20, 0)
	w.set(limits{})
	w.all(vip6, 80, 300)
	require.Empty(t, w.table(), "nobody is limited and the table is there")
}

func TestMetricsAreTheKernelsCounters(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.serve(80)
	w.start()
	key := at(vip4, "web")
	w.set(limits{key: {PerSecond: 1, Ports: web}, at(vip6, "web"): {PerSecond: 1, Ports: web}})
	w.capped(key, 80, 50, 1, 1)
	dropped := float64(w.dropped(key))
	problems, err := testutil.GatherAndLint(w.registry)
	require.NoError(t, err)
	require.Empty(t, problems)

	got := w.metrics()
	series := metricDropped + " default/web 203.0.113.1"
	require.GreaterOrEqual(t, got[series], dropped)
	delete(got, series)
	require.Equal(t, map[string]float64{metricDropped + " default/web 2001:db8:203::1": 0, metricWanted: 2, metricActive: 2}, got)

	w.set(limits{})
	require.Equal(t, map[string]float64{metricWanted: 0, metricActive: 0}, w.metrics(), "a deleted Service's series stays")
}

// metrics returns the values by name and labels.
func (w *world) metrics() map[string]float64 {
	w.t.Helper()
	families, err := w.registry.Gather()
	require.NoError(w.t, err)
	values := map[string]float64{}
	for _, f := range families {
		for _, m := range f.Metric {
			name := f.GetName()
			for _, l := range m.Label {
				name += " " + l.GetValue()
			}
			values[name] = m.GetCounter().GetValue() + m.GetGauge().GetValue()
		}
	}
	return values
}

// The rules of a killed speaker stay in force for the next one, with their handles, tokens
// and counters.
func TestARestartLeavesNoGap(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.serve(80)
	key := at(vip4, "web")
	want := limits{key: {PerSecond: 1, Ports: web}, at(other4, "gone"): {PerSecond: 1, Ports: web}}
	w.apply(want)
	w.capped(key, 80, 50, 1, 1)
	dropped := w.dropped(key)
	rule := line(t, w.table(), "limit rate over", chainName(key))

	w.start()
	require.GreaterOrEqual(t, w.dropped(key), dropped)
	delete(want, at(other4, "gone"))
	w.set(want)
	require.Equal(t, rule, line(t, w.table(), "limit rate over", chainName(key)), "the rule was replaced")
	require.GreaterOrEqual(t, w.dropped(key), dropped)
	require.NotContains(t, w.table(), "gone")

	w.stop()
	require.Empty(t, w.table(), "the table outlives the speaker")
}

// Limits of a killed speaker that nobody wants any more end. That is no change by somebody else.
func TestARestartEndsLimits(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.apply(limits{at(vip4, "web"): {PerSecond: 1, Ports: web}})
	w.start()
	w.set(limits{})
	w.until(func() bool { return w.table() == "" }, func() any { return w.table() })
	w.stop()
	require.NotContains(t, w.log.String(), "somebody else")
}

// apply does what a speaker does that is killed afterwards.
func (w *world) apply(want limits) (changed bool) {
	w.t.Helper()
	require.NoError(w.t, w.node.Do(func() (err error) {
		var l nft.Line
		defer l.End()
		changed, err = apply(&l, want, guardTime)
		return err
	}))
	return changed
}

// If the next speaker has no right to change the rules of a killed one, they limit nothing once they have not been refreshed
// for a while.
func TestLimitsEndWithoutASpeaker(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.serve(80)
	key := at(vip4, "web")
	want := limits{key: {PerSecond: 1, Ports: web}}
	w.apply(want)
	w.capped(key, 80, 50, 1, 1)
	w.onNode(func(conn nft.Conn) error { // as when the guard's time is nearly over
		return errors.Join(refresh(conn.Conn, time.Millisecond), conn.Flush())
	})
	guard := func() string { return w.node.Run("nft", "list", "set", "inet", tableName, "guard") }
	w.until(func() bool { return !strings.Contains(guard(), "expires") }, func() any { return guard() })
	w.all(vip4, 80, 50)
	require.False(t, w.apply(want))
	w.capped(key, 80, 50, 1, 0)
}

// line returns the line of the text that has all the parts.
func line(t *testing.T, text string, parts ...string) string {
	t.Helper()
	for l := range strings.Lines(text) {
		found := 0
		for _, p := range parts {
			if strings.Contains(l, p) {
				found++
			}
		}
		if found == len(parts) {
			return l
		}
	}
	t.Fatalf("no line has %q:\n%s", parts, text)
	return ""
}

// One flow is one connection, however many packets it has and although nobody
// answers; many flows are many.
func TestUDPFlowsAreConnections(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.start()
	for _, vip := range []netip.Addr{vip4, vip6} {
		key := at(vip, "dns")
		w.set(limits{key: {PerSecond: 10, Ports: dns}})
		received := w.listenUDP(vip)
		w.sendUDP(vip, 1, 300)
		w.until(func() bool { return received.Load() == 300 }, func() any { return received.Load() })
		require.Zero(t, w.dropped(key))

		begin := time.Now()
		w.sendUDP(vip, 300, 1)
		w.until(func() bool { return int(received.Load())-300+w.dropped(key) == 300 }, func() any { return received.Load() })
		most := 10 + int(time.Since(begin).Seconds()*10) + 1
		require.GreaterOrEqual(t, received.Load(), int64(300+9)) // the flow before took a token
		require.LessOrEqual(t, received.Load(), int64(300+most))
	}
}

// listenUDP counts what arrives at the pod for the VIP.
func (w *world) listenUDP(vip netip.Addr) *atomic.Int64 {
	w.t.Helper()
	network, received := "udp4", &atomic.Int64{}
	if vip.Is6() {
		network = "udp6"
	}
	require.NoError(w.t, w.pod.Do(func() error {
		c, err := net.ListenPacket(network, ":53")
		if err != nil {
			return err
		}
		if err := roomy(c); err != nil {
			return err
		}
		ended := make(chan struct{})
		w.t.Cleanup(func() { c.Close(); <-ended })
		go func() {
			defer close(ended)
			for b := make([]byte, 16); err == nil; received.Add(1) {
				_, _, err = c.ReadFrom(b)
			}
		}()
		return nil
	}))
	// Neighbours hold back only a few packets while they resolve an address.
	w.client.Run("ping", "-c1", "-W5", map[bool]string{false: pod4.String(), true: pod6.String()}[vip.Is6()])
	return received
}

// roomy gives the socket room for all that comes before somebody reads.
func roomy(c net.PacketConn) error {
	raw, err := c.(*net.UDPConn).SyscallConn()
	if err != nil {
		return err
	}
	var refused error
	err = raw.Control(func(fd uintptr) { refused = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, 4<<20) })
	return errors.Join(err, refused)
}

// sendUDP sends packets to port 53 in flows.
func (w *world) sendUDP(vip netip.Addr, flows, packets int) {
	w.t.Helper()
	require.NoError(w.t, w.client.Do(func() error {
		for range flows {
			fd, err := unix.Socket(domain(vip), unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
			if err != nil {
				return err
			}
			defer unix.Close(fd) //nolint:errcheck // nothing is lost with it
			for range packets {
				if err := unix.Sendto(fd, []byte("question"), 0, sockaddr(vip, 53)); err != nil {
					return err
				}
			}
		}
		return nil
	}))
}

// The node's own connections are not limited, also where its VIP is local, as
// kube-proxy in IPVS mode has it, and they come in by lo.
func TestConnectionsOfTheNodeAreNotCapped(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.node.Run("ip", "addr", "add", vip4.String()+"/32", "dev", "lo")
	w.serve(80)
	require.NoError(t, w.node.Do(func() error {
		l, err := net.Listen("tcp4", ":80")
		if err == nil {
			t.Cleanup(func() { l.Close() })
		}
		return err
	}))
	w.start()
	key := at(vip4, "web")
	w.set(limits{key: {PerSecond: 1, Ports: web}})
	s := w.connect(w.node, vip4, 80, 100)
	w.until(func() bool { return s.connected() == 100 }, func() any { return s.connected() })
	require.Zero(t, w.dropped(key))
	w.capped(key, 80, 50, 1, 1) // others are
}

// Every change of the table by somebody else is undone, and without such a change nothing
// is written.
func TestWhatSomebodyElseTakesAwayComesBack(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.serve(80)
	w.start()
	key := at(vip4, "web")
	w.set(limits{key: {PerSecond: 5, Ports: web}})
	sound := handle.ReplaceAllString(w.table(), "")
	for name, spoil := range map[string]func(conn *nftables.Conn) error{
		"flush ruleset": func(conn *nftables.Conn) error { conn.FlushRuleset(); return nil },
		"delete table":  func(conn *nftables.Conn) error { conn.DelTable(table); return nil },
		"flush table":   func(conn *nftables.Conn) error { conn.FlushTable(table); return nil },
		"flush map":     func(conn *nftables.Conn) error { conn.FlushSet(families[0].vips); return nil },
		"flush chain": func(conn *nftables.Conn) error {
			conn.FlushChain(&nftables.Chain{Table: table, Name: chainName(key)})
			return nil
		},
		"a map that leads elsewhere": func(conn *nftables.Conn) error {
			chain := conn.AddChain(&nftables.Chain{Table: table, Name: "elsewhere"})
			element := []nftables.SetElement{{Key: []byte(elementKey(vip4, http)),
				VerdictData: &expr.Verdict{Kind: expr.VerdictGoto, Chain: chain.Name}}}
			return errors.Join(conn.SetDeleteElements(families[0].vips, element), conn.SetAddElements(families[0].vips, element))
		},
		"more in the table": func(conn *nftables.Conn) error {
			conn.AddChain(&nftables.Chain{Table: table, Name: "more"})
			conn.AddObj(counter("more"))
			return nil
		},
	} {
		before := len(mended.FindAllString(w.log.String(), -1))
		w.onNode(func(conn nft.Conn) error { return errors.Join(spoil(conn.Conn), conn.Flush()) })
		w.until(func() bool {
			return len(mended.FindAllString(w.log.String(), -1)) > before && handle.ReplaceAllString(w.table(), "") == sound
		}, func() any { return "after " + name + " " + w.table() })
	}
	w.dnat() // the flush took it
	w.capped(key, 80, 100, 5, 5)
	intact := w.table()
	require.False(t, w.apply(limits{key: {PerSecond: 5, Ports: web}}), "the same set is written again")
	require.Equal(t, handle.FindAllString(intact, -1), handle.FindAllString(w.table(), -1))
}

// mended matches the log line of the repair. It is the second one if the table was changed between
// reading and writing it.
var mended = regexp.MustCompile("rate limits (restored|up to date again)")

// handle is what differs between two tables that do the same.
var handle = regexp.MustCompile(`# handle \d+|packets \d+ bytes \d+`)

// expiry is what differs from one moment to the next.
var expiry = regexp.MustCompile(`( timeout \S+)? expires [^ ,]+`)

// Others' tables are none of our business, and ours survives being saved and
// loaded with them.
func TestTheRulesetCanBeSavedAndLoaded(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	others := w.node.Run("nft", "-a", "list", "table", "inet", "proxy")
	w.start()
	long := plan.LimitKey{VIP: vip6, Service: "1-" + strings.Repeat("n", 61) + "/" + strings.Repeat("s", 63)}
	w.set(limits{at(vip4, "web"): {PerSecond: 1, Ports: web}, long: {PerSecond: annotation.MaxConnectionRateLimit, Ports: dns}})
	saved := filepath.Join(t.TempDir(), "nftables.conf")
	ruleset := func() string { return expiry.ReplaceAllString(w.node.Run("nft", "list", "ruleset"), "") }
	sound := ruleset()
	require.NoError(t, os.WriteFile(saved, []byte("flush ruleset\n"+sound), 0o600))
	w.node.Run("nft", "-f", saved)
	require.Equal(t, sound, ruleset())

	w.stop()
	require.Equal(t, handle.ReplaceAllString(others, ""),
		handle.ReplaceAllString(w.node.Run("nft", "-a", "list", "table", "inet", "proxy"), ""))
}

// A table of another version of Lodestone is replaced.
func TestATableOfAnotherFormatIsReplaced(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.serve(80)
	w.node.Run("nft", `
		table inet lodestone {
			map vips4 { type ipv4_addr : verdict; elements = { 203.0.113.1 : drop } }
			chain prerouting { type filter hook prerouting priority 10; ip daddr vmap @vips4 comment "format 0"; }
		}`)
	w.start()
	w.set(limits{at(vip4, "web"): {PerSecond: 5, Ports: web}})
	w.capped(at(vip4, "web"), 80, 100, 5, 5)
}

// Two Services with one port, which the allocator never allows, are no reason
// to limit nobody.
func TestServicesThatClaimOnePort(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.serve(80)
	w.start()
	w.set(limits{at(vip4, "a"): {PerSecond: 5, Ports: web}, at(vip4, "b"): {PerSecond: 1, Ports: web},
		at(other4, "c"): {PerSecond: 7, Ports: web}})
	w.capped(at(vip4, "a"), 80, 100, 5, 5)
	w.capped(at(other4, "c"), 80, 100, 7, 7)
}

// Without the right the Services work on. One log line names what is missing, the metrics show it,
// and a cluster without limits is not affected.
func TestWithoutTheRight(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.serve(80)
	w.startWith(unix.CAP_NET_RAW)
	w.set(limits{})
	require.Empty(t, w.log.String())

	w.limiter.Set(limits{at(vip4, "web"): {PerSecond: 1, Ports: web}})
	w.until(func() bool { return w.limiter.Status().Error != "" }, func() any { return w.limiter.Status() })
	w.all(vip4, 80, 50)
	require.Contains(t, w.log.String(), "the speaker needs the capability NET_ADMIN")
	require.Equal(t, 1, strings.Count(w.log.String(), "\n"), w.log.String())
	require.Equal(t, map[string]float64{metricWanted: 1, metricActive: 0}, w.metrics())
	require.Len(t, w.limiter.Status().Limits, 1)

	w.set(limits{})
	w.stop()
}

// NET_ADMIN beside NET_RAW is enough, as the guide promises.
func TestWithNoOtherRight(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.serve(80)
	w.startWith(unix.CAP_NET_RAW, unix.CAP_NET_ADMIN)
	want := limits{at(vip4, "web"): {PerSecond: 5, Ports: web}}
	for i := range 500 {
		want[at(netip.AddrFrom4([4]byte{203, 0, byte(i >> 8), byte(i)}), "many")] = plan.Limit{PerSecond: 1, Ports: web}
	}
	w.set(want)
	w.capped(at(vip4, "web"), 80, 100, 5, 5)
	w.stop()
	require.Empty(t, w.table())
}

// startWith starts a limiter with no other capabilities. They are a thread's,
// and this one ends with the limiter.
func (w *world) startWith(capabilities ...uint) {
	w.log, w.registry = &testnet.Log{}, prometheus.NewPedanticRegistry()
	w.limiter = New(Options{Log: slog.New(slog.NewTextHandler(w.log, nil)), Registry: inside{w.registry, w.node}})
	w.run(func(ctx context.Context) error {
		return w.node.Do(func() error { return errors.Join(withCapabilities(capabilities...), w.limiter.Run(ctx)) })
	})
}

// withCapabilities leaves the thread these capabilities of its own.
func withCapabilities(keep ...uint) error {
	var mask uint32
	for _, c := range keep {
		mask |= 1 << c
	}
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data [2]unix.CapUserData
	if err := unix.Capget(&header, &data[0]); err != nil {
		return err
	}
	data[0].Effective &= mask
	data[0].Permitted &= mask
	data[1] = unix.CapUserData{}
	return unix.Capset(&header, &data[0])
}

// Limits that could not be set are set once that is possible.
func TestWhatFailedIsTriedAgain(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.serve(80)
	w.start()
	// A table that only its owner may change, and that goes with its owner.
	owner := w.node.Command(t.Context(), "nft", "-i")
	input, err := owner.StdinPipe()
	require.NoError(t, err)
	require.NoError(t, owner.Start())
	_, err = io.WriteString(input, "add table inet lodestone { flags owner; }\n")
	require.NoError(t, err)
	w.until(func() bool { return w.table() != "" }, func() any { return "no table" })
	w.limiter.Set(limits{at(vip4, "web"): {PerSecond: 5, Ports: web}})
	w.until(func() bool { return w.limiter.Status().Error != "" }, func() any { return w.limiter.Status() })
	require.NoError(t, input.Close())
	require.NoError(t, owner.Wait())
	w.until(func() bool { return w.limiter.Status().Error == "" }, func() any { return w.limiter.Status() })
	w.capped(at(vip4, "web"), 80, 100, 5, 5)
}

// The socket to the kernel stays open. Each change has the whole time, and a change begins anew without a socket, or after
// one that failed.
func TestSocketThatStaysOpen(t *testing.T) {
	t.Parallel()
	l := New(Options{Log: slog.New(slog.DiscardHandler), Registry: prometheus.NewRegistry()})
	require.NoError(t, testnet.NewHost(t, "node").Do(func() error {
		var sockets []*netlink.Conn
		limit := func(perSecond uint32) error {
			l.want = limits{at(vip4, "web"): {PerSecond: perSecond, Ports: web}}
			l.reconcile()
			c, err := l.line.Open()
			require.NoError(t, err)
			sockets = append(sockets, c.Socket)
			return l.err
		}
		require.NoError(t, limit(1))
		require.NoError(t, sockets[0].SetDeadline(time.Now().Add(-time.Hour)))
		require.NoError(t, limit(2), "its deadline has passed")
		require.Same(t, sockets[0], sockets[1])
		require.NoError(t, sockets[0].Close())
		require.NoError(t, limit(3))
		l.want = limits{at(vip4, strings.Repeat("x", 1000)): {PerSecond: 1, Ports: web}} // a name that is too long
		l.reconcile()
		require.Error(t, l.err)
		require.NoError(t, limit(4))
		require.NotSame(t, sockets[2], sockets[3])
		l.line.End()
		return nil
	}))
}

// Any set leads to any other one, whatever the kernel holds.
func TestAnySetFollowsAnyOther(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	rapid.Check(t, func(t *rapid.T) {
		want := limits{}
		for range rapid.IntRange(0, 6).Draw(t, "limits") {
			key := at(rapid.SampledFrom([]netip.Addr{vip4, vip6, other4, other6}).Draw(t, "vip"),
				rapid.SampledFrom([]string{"a", "b"}).Draw(t, "service"))
			limit := plan.Limit{PerSecond: rapid.SampledFrom([]uint32{1, 2, 1_000_000}).Draw(t, "rate")}
			for range rapid.IntRange(0, 3).Draw(t, "ports") {
				limit.Ports = append(limit.Ports, plan.Port{Protocol: rapid.SampledFrom([]uint8{6, 17, 132}).Draw(t, "protocol"),
					Number: uint16(rapid.IntRange(1, 3).Draw(t, "port"))})
			}
			want[key] = limit
		}
		w.apply(want)
		if w.apply(want) {
			t.Fatalf("%v is written twice", want)
		}
		w.onNode(func(conn nft.Conn) error {
			there, err := exists(conn)
			if err != nil || !there {
				if len(want) > 0 {
					t.Fatalf("the table for %v is there: %v, %v", want, there, err)
				}
				return err
			}
			have, sound, err := read(conn, there)
			if wanted := desired(want); !sound || !have.equal(wanted) {
				t.Fatalf("%v became %+v, want %+v", want, have, wanted)
			}
			return err
		})
	})
}

// One transaction carries more than a node will own.
func TestManyLimits(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	want := limits{}
	var many []plan.Port
	for i := range 1000 {
		many = append(many, plan.Port{Protocol: unix.IPPROTO_TCP, Number: uint16(1 + i)})
	}
	for i := range 5000 {
		want[at(netip.AddrFrom4([4]byte{203, 0, byte(i >> 8), byte(i)}), strings.Repeat("s", 63))] = plan.Limit{PerSecond: 100, Ports: web}
	}
	want[at(vip6, "many")] = plan.Limit{PerSecond: 1, Ports: many}
	w.apply(want)
	require.False(t, w.apply(want))
	w.apply(nil)
	require.Empty(t, w.table())
}
