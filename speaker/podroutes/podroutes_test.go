package podroutes_test

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"os"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/lodestone-lb/lodestone/pkg/config"
	"github.com/lodestone-lb/lodestone/pkg/testnet"
	"github.com/lodestone-lb/lodestone/speaker/netstate"
	"github.com/lodestone-lb/lodestone/speaker/plan"
	"github.com/lodestone-lb/lodestone/speaker/podroutes"
)

var interrupt = os.Interrupt

func number(t *testing.T, text string) int {
	t.Helper()
	n, err := strconv.Atoi(text)
	require.NoError(t, err)
	return n
}

// A cluster without any other pod network: pods reach each other, and nothing
// is left when the mode is switched off.
func TestPodsReachEachOther(t *testing.T) {
	w := newWorld(t, 3)
	w.start(w.nodes...)
	w.set(config.RoutesKernel, w.nodes...)
	for i, others := range [][2]int{{2, 3}, {1, 3}, {1, 2}} {
		w.nodes[i].wantRoutes(t, toOthers(others[0], others[1])...)
	}
	for _, from := range w.nodes {
		for i := 1; i <= 3; i++ {
			from.ping(t, fmt.Sprintf("10.244.%d.2", i))
			from.ping(t, fmt.Sprintf("fd00:10:244:%d::2", i))
		}
	}
	for _, mode := range []config.RouteMode{config.RoutesBGP, config.RoutesKernel, ""} {
		w.set(mode, w.nodes...)
		for i, others := range [][2]int{{2, 3}, {1, 3}, {1, 2}} {
			if mode == config.RoutesKernel {
				w.nodes[i].wantRoutes(t, toOthers(others[0], others[1])...)
			} else {
				w.nodes[i].wantRoutes(t)
			}
		}
	}
}

// Deleted routes come back, routes of others are not touched, and unwanted routes with
// our mark are removed.
func TestOthersAtTheTable(t *testing.T) {
	w := newWorld(t, 3)
	n := w.nodes[0]
	foreign := []string{
		"10.99.0.0/24 via 198.18.0.2 dev eth0 proto static metric 76",
		"10.244.2.128/25 via 198.18.0.3 dev eth0 proto static",
		"unreachable 203.0.113.0/24 proto static",
	}
	for _, f := range foreign {
		n.Run("ip", append([]string{"route", "add"}, strings.Fields(f)...)...)
	}
	n.Run("ip", "route", "add", "10.77.0.0/16", "via", "198.18.0.2", "proto", "76", "table", "100")
	kept := func() {
		t.Helper()
		all := n.Run("ip", "route", "show")
		for _, f := range foreign {
			require.Contains(t, all, f)
		}
		require.Contains(t, n.Run("ip", "route", "show", "table", "100"), "10.77.0.0/16")
	}
	w.start(w.nodes...)
	w.set(config.RoutesKernel, w.nodes...)
	n.wantRoutes(t, toOthers(2, 3)...)
	kept()

	restored := func(want map[string]int) {
		t.Helper()
		require.Eventually(t, func() bool {
			got := map[string]int{}
			for _, cidr := range regexp.MustCompile(`pod route restored.* cidr=(\S+)`).FindAllStringSubmatch(n.log.String(), -1) {
				got[cidr[1]]++
			}
			return maps.Equal(got, want)
		}, testTimeout, 10*time.Millisecond, n.log)
	}
	n.Run("ip", "route", "del", "10.244.2.0/24")
	n.Run("ip", "-6", "route", "del", "fd00:10:244:3::/64")
	n.wantRoutes(t, toOthers(2, 3)...)
	restored(map[string]int{"10.244.2.0/24": 1, "fd00:10:244:3::/64": 1})
	// One command for all of them, which `ip route flush` is not: it goes on until none is left, those that are back
	// among them.
	n.Run("sh", "-c", `ip route show proto 76 | sed 's/^/route del /' | ip -batch -`)
	n.wantRoutes(t, toOthers(2, 3)...)
	restored(map[string]int{"10.244.2.0/24": 2, "10.244.3.0/24": 1, "fd00:10:244:3::/64": 1})

	n.Run("ip", "route", "add", "10.88.0.0/24", "via", "198.18.0.2", "proto", "76")
	n.Run("ip", "route", "add", "10.244.2.0/24", "via", "198.18.0.3", "proto", "76", "metric", "5")
	n.Run("ip", "route", "replace", "10.244.3.0/24", "via", "198.18.0.2", "proto", "76", "metric", "76")
	n.Run("ip", "-6", "route", "append", "fd00:10:244:2::/64", "via", "2001:db8::3", "proto", "76", "metric", "76")
	n.wantRoutes(t, toOthers(2, 3)...)
	kept()

	// A network plugin comes with a route to the same pods: it is theirs now.
	n.Run("ip", "route", "add", "10.244.2.0/24", "via", "198.18.0.2", "proto", "bird")
	n.wantRoutes(t, toOthers(2, 3)[1:]...)
	n.wantProblem(t, podroutes.RoutedByOthers,
		"somebody else has a route to 10.244.2.0/24 already (proto bird via 198.18.0.2 interface 2 metric 0): remove that one, or switch "+
			"off routes in the configuration")
	n.ping(t, "10.244.2.2")
	n.Run("ip", "route", "del", "10.244.2.0/24", "proto", "bird")
	n.wantRoutes(t, toOthers(2, 3)...)
	require.Eventually(t, func() bool { return len(n.table.Status().Problems) == 0 }, testTimeout, 10*time.Millisecond)

	// One that takes our place is not pushed out, either.
	n.Run("ip", "route", "replace", "10.244.2.0/24", "via", "198.18.0.3", "proto", "static", "metric", "76")
	n.wantRoutes(t, toOthers(2, 3)[1:]...)
	require.Eventually(t, func() bool { return len(n.table.Status().Problems) == 1 }, testTimeout, 10*time.Millisecond)
	require.Contains(t, n.Run("ip", "route", "show", "10.244.2.0/24"), "via 198.18.0.3 dev eth0 proto static metric 76")
	n.Run("ip", "route", "del", "10.244.2.0/24")
	n.wantRoutes(t, toOthers(2, 3)...)

	w.set("", n)
	n.wantRoutes(t)
	kept()
}

// Traffic is not interrupted when a speaker is replaced, or when the API server's objects are late: routes
// stay until the first Set of the new speaker, and those in it stay as they are.
func TestRestartLeavesNoGap(t *testing.T) {
	w := newWorld(t, 3)
	w.start(w.nodes...)
	w.set(config.RoutesKernel, w.nodes...)
	for i, others := range [][2]int{{2, 3}, {1, 3}, {1, 2}} {
		w.nodes[i].wantRoutes(t, toOthers(others[0], others[1])...)
	}
	n := w.nodes[0]
	n.ping(t, "10.244.2.2")
	n.ping(t, "fd00:10:244:2::2")
	v4, v6 := n.flood(t, "10.244.2.2"), n.flood(t, "fd00:10:244:2::2")
	for range 20 {
		n.stop()
		n.wantRoutes(t, toOthers(2, 3)...)
		w.start(n)
		n.wantRoutes(t, toOthers(2, 3)...)
		w.set(config.RoutesKernel, n)
		require.Eventually(t, func() bool { return len(n.table.Status().Routes) == 4 }, testTimeout, 5*time.Millisecond)
		require.NotContains(t, n.log.String(), "restored")
	}
	// Node n3 went while no speaker was there.
	n.stop()
	delete(w.api, "n3")
	w.start(n)
	w.set(config.RoutesKernel, n)
	n.wantRoutes(t, "10.244.2.0/24 via 198.18.0.2", "fd00:10:244:2::/64 via 2001:db8::2")
	v4.end(t)
	v6.end(t)
}

// A node that gets another address is reached all the time.
func TestMoveLeavesNoGap(t *testing.T) {
	w := newWorld(t, 2)
	n, other := w.nodes[0], w.nodes[1]
	w.start(w.nodes...)
	w.set(config.RoutesKernel, w.nodes...)
	n.wantRoutes(t, "10.244.2.0/24 via 198.18.0.2", "fd00:10:244:2::/64 via 2001:db8::2")
	other.Run("ip", "addr", "add", "198.18.0.22/24", "dev", "eth0")
	other.Run("ip", "addr", "add", "2001:db8::22/64", "dev", "eth0", "nodad")
	n.ping(t, "10.244.2.2")
	n.ping(t, "fd00:10:244:2::2")
	v4, v6 := n.flood(t, "10.244.2.2"), n.flood(t, "fd00:10:244:2::2")
	for i := 0; i < 20 || i%2 == 1 || len(v4.answers(t)) < 50 || len(v6.answers(t)) < 50; i++ { // it ends where it began
		addrs := []netip.Addr{netip.MustParseAddr("198.18.0.22"), netip.MustParseAddr("2001:db8::22")}
		if i%2 == 1 {
			addrs = []netip.Addr{netip.MustParseAddr("198.18.0.2"), netip.MustParseAddr("2001:db8::2")}
		}
		w.edit("n2", func(n *plan.Node) { n.Addresses = addrs })
		w.set(config.RoutesKernel, n)
		n.wantRoutes(t, "10.244.2.0/24 via "+addrs[0].String(), "fd00:10:244:2::/64 via "+addrs[1].String())
	}
	v4.end(t)
	v6.end(t)
	w.edit("n2", func(n *plan.Node) { n.PodCIDRs = []string{"10.244.7.0/24"} })
	w.set(config.RoutesKernel, n)
	n.wantRoutes(t, "10.244.7.0/24 via 198.18.0.2")
}

// The kernel takes the routes away without a word when a link goes down.
func TestLinkFlap(t *testing.T) {
	w := newWorld(t, 3)
	n := w.nodes[0]
	w.start(n)
	w.set(config.RoutesKernel, n)
	n.wantRoutes(t, toOthers(2, 3)...)
	n.Run("ip", "link", "set", "eth0", "down")
	require.Eventually(t, func() bool { return len(n.table.Status().Problems) == 4 }, testTimeout, 10*time.Millisecond)
	n.wantRoutes(t)
	assert.Equal(t, "node n2 is at 198.18.0.2 on the segment of eth0, which is down", n.table.Status().Problems[0].Message)
	n.Run("ip", "link", "set", "eth0", "up")
	n.Run("ip", "addr", "replace", "2001:db8::1/64", "dev", "eth0", "nodad") // lost with the link
	n.wantRoutes(t, toOthers(2, 3)...)
	require.Eventually(t, func() bool { return len(n.table.Status().Problems) == 0 }, testTimeout, 10*time.Millisecond)
}

// A Node with forbidden values harms no other node.
func TestHostileNodes(t *testing.T) {
	tests := map[string]struct {
		node    plan.Node
		reason  plan.PodRefusal
		message string
	}{
		"another's CIDR": {plan.Node{PodCIDRs: []string{"10.244.2.0/24"}, Addresses: addrs("198.18.0.3")}, plan.CIDRTaken,
			"the pod CIDR 10.244.2.0/24 of node n9 overlaps 10.244.2.0/24 of node n2, which is older: give one of them another"},
		"everything": {plan.Node{PodCIDRs: []string{"0.0.0.0/0"}, Addresses: addrs("198.18.0.3")}, plan.CIDRTooWide,
			"the pod CIDR 0.0.0.0/0 of node n9 is wider than /8: its route would take the traffic of others"},
		"behind a router": {plan.Node{PodCIDRs: []string{"10.244.9.0/24"}, Addresses: addrs("192.0.2.9")}, podroutes.NotOnSegment,
			"node n9 is at 192.0.2.9, which is on no subnet of this node: a router is between them, so use mode bgp"},
		"part of the segment": {plan.Node{PodCIDRs: []string{"198.18.0.128/25"}, Addresses: addrs("198.18.0.3")}, podroutes.CIDROfSegment,
			"the pod CIDR 198.18.0.128/25 of node n9 overlaps the subnet 198.18.0.0/24 of eth0: their networks must not overlap"},
		"our other network": {plan.Node{PodCIDRs: []string{"10.244.1.0/28"}, Addresses: addrs("198.18.0.3"), Created: time.Unix(0, 0)},
			podroutes.CIDROfSegment,
			"the pod CIDR 10.244.1.0/28 of node n9 contains this node's address 10.244.1.1 on pod0: their networks must not overlap"},
		"part of our other network": {
			plan.Node{PodCIDRs: []string{"10.244.1.128/28"}, Addresses: addrs("198.18.0.3"), Created: time.Unix(0, 0)}, podroutes.CIDROfSegment,
			"the pod CIDR 10.244.1.128/28 of node n9 overlaps the subnet 10.244.1.0/24 of pod0: their networks must not overlap"},
		"our address": {plan.Node{PodCIDRs: []string{"10.244.9.0/24"}, Addresses: addrs("198.18.0.1")}, podroutes.NextHopIsSelf,
			"node n9 reports the address 198.18.0.1, which is this node's on eth0: correct the Node's InternalIP"},
		"IPv4 in IPv6 form": {plan.Node{PodCIDRs: []string{"::ffff:10.9.0.0/120"}, Addresses: addrs("198.18.0.3")}, plan.CIDRInvalid,
			"the pod CIDR ::ffff:10.9.0.0/120 of node n9 is an IPv4 prefix in IPv6 form"},
	}
	w := newWorld(t, 2)
	n := w.nodes[0]
	w.start(n)
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			if tt.node.Created.IsZero() {
				tt.node.Created = time.Unix(9, 0)
			}
			w.api["n9"] = tt.node
			w.set(config.RoutesKernel, n)
			n.wantRoutes(t, "10.244.2.0/24 via 198.18.0.2", "fd00:10:244:2::/64 via 2001:db8::2")
			require.Eventually(t, func() bool {
				for _, p := range n.table.Status().Problems {
					if p.Node == "n9" {
						return p.Reason == tt.reason && p.Message == tt.message
					}
				}
				return false
			}, testTimeout, 10*time.Millisecond, "%+v", n.table.Status())
			require.NotContains(t, n.Run("ip", "route", "show"), "default")
		})
	}
}

func addrs(texts ...string) []netip.Addr {
	var all []netip.Addr
	for _, a := range texts {
		all = append(all, netip.MustParseAddr(a))
	}
	return all
}

// Clear is what is left to do after an uninstall.
func TestClear(t *testing.T) {
	w := newWorld(t, 3)
	n := w.nodes[0]
	w.start(n)
	w.set(config.RoutesKernel, n)
	n.wantRoutes(t, toOthers(2, 3)...)
	n.stop()
	n.Run("ip", "route", "add", "10.99.0.0/24", "via", "198.18.0.2", "proto", "static")
	removed, err := podroutes.Clear(n.Handle())
	require.NoError(t, err)
	assert.Equal(t, 4, removed)
	n.wantRoutes(t)
	require.Contains(t, n.Run("ip", "route", "show"), "10.99.0.0/24")
	removed, err = podroutes.Clear(n.Handle())
	require.NoError(t, err)
	assert.Zero(t, removed)
}

// Many nodes cost little, and a set that is the same costs nothing.
func TestManyNodes(t *testing.T) {
	w := newWorld(t, 1)
	n := w.nodes[0]
	const many = 2000
	for i := range many {
		w.api[fmt.Sprintf("m%d", i)] = plan.Node{
			PodCIDRs: []string{fmt.Sprintf("10.%d.%d.0/24", 100+i/250, i%250)}, Addresses: addrs(fmt.Sprintf("198.18.0.%d", 2+i%250)),
			Created: time.Unix(int64(i), 0),
		}
	}
	w.start(n)
	start := time.Now()
	w.set(config.RoutesKernel, n)
	require.Eventually(t, func() bool { return len(n.table.Status().Routes) == many }, 2*testTimeout, time.Millisecond)
	t.Logf("%d routes in %v", many, time.Since(start))
	require.Len(t, n.routes(), many)
	log := n.log.String()
	w.set(config.RoutesKernel, n)
	n.Run("ip", "route", "del", "10.100.0.0/24")
	require.Eventually(t, func() bool { return strings.Contains(n.log.String(), "pod route restored") }, testTimeout, time.Millisecond)
	assert.Equal(t, 1, strings.Count(n.log.String()[len(log):], "\n"), n.log.String()[len(log):])
}

// Without the right to change routes, the status has an error that names what is missing.
func TestWithoutTheRight(t *testing.T) {
	if os.Getenv("LODESTONE_TEST_CLEAR") != "" {
		_, err := podroutes.Clear(nil)
		fmt.Println(err)
		return
	}
	h := testnet.NewHost(t, "node")
	h.Run("ip", "route", "add", "10.244.2.0/24", "dev", "lo", "proto", "76")
	test, err := os.Executable()
	require.NoError(t, err)
	cmd := h.Command(t.Context(), "setpriv", "--bounding-set=-net_admin", "--inh-caps=-net_admin", test, "-test.run=TestWithoutTheRight")
	cmd.Env = append(os.Environ(), "LODESTONE_TEST_CLEAR=1")
	out, err := cmd.CombinedOutput()
	require.NoError(t, err, "%s", out)
	assert.Contains(t, string(out), "remove the route to 10.244.2.0/24: operation not permitted: the speaker needs the capability "+
		"NET_ADMIN: set the chart's speaker.podRoutes")
}

// A lasting failure is logged once, and its routes not as set.
func TestWhatStaysWrongIsLoggedOnce(t *testing.T) {
	if os.Getenv("LODESTONE_TEST_TABLE") != "" {
		ctx, cancel := context.WithTimeout(t.Context(), 4*time.Second) // of looks there are at 0, 1 and 3 s
		defer cancel()
		interfaces := netstate.New(netstate.Options{})
		go interfaces.Run(ctx) //nolint:errcheck // the process ends
		table := podroutes.New(podroutes.Options{Interfaces: interfaces, Log: slog.New(slog.NewTextHandler(os.Stdout, nil)),
			Registry: prometheus.NewRegistry()})
		table.Set(plan.PodRoutes{})
		require.NoError(t, table.Run(ctx))
		return
	}
	t.Parallel()
	h := testnet.NewHost(t, "node")
	h.Run("ip", "route", "add", "10.244.2.0/24", "dev", "lo", "proto", "76")
	test, err := os.Executable()
	require.NoError(t, err)
	cmd := h.Command(t.Context(), "setpriv", "--bounding-set=-net_admin", "--inh-caps=-net_admin", test,
		"-test.run=TestWhatStaysWrongIsLoggedOnce")
	cmd.Env = append(os.Environ(), "LODESTONE_TEST_TABLE=1")
	out, err := cmd.CombinedOutput()
	require.NoError(t, err, "%s", out)
	assert.Equal(t, 1, strings.Count(string(out), "level="), "%s", out)
	assert.Contains(t, string(out), "pod routes not up to date")
}

func TestMetrics(t *testing.T) {
	w := newWorld(t, 2)
	n := w.nodes[0]
	w.start(n)
	w.api["n9"] = plan.Node{PodCIDRs: []string{"0.0.0.0/0", "10.9.0.0/24"}, Addresses: addrs("192.0.2.9"), Created: time.Unix(9, 0)}
	w.set(config.RoutesKernel, n)
	require.Eventually(t, func() bool { return len(n.table.Status().Problems) == 2 }, testTimeout, 10*time.Millisecond)
	require.NoError(t, testutil.GatherAndCompare(n.registry, strings.NewReader(`
# HELP lodestone_route_in_force Routes to pods that the kernel has.
# TYPE lodestone_route_in_force gauge
lodestone_route_in_force 2
# HELP lodestone_route_problems Pod CIDRs of nodes that there is no route to, by reason.
# TYPE lodestone_route_problems gauge
lodestone_route_problems{reason="CIDRTooWide"} 1
lodestone_route_problems{reason="NotOnSegment"} 1
# HELP lodestone_route_restored_total Routes to pods that were gone and came back.
# TYPE lodestone_route_restored_total counter
lodestone_route_restored_total 0
# HELP lodestone_route_wanted Routes to pods of other nodes that there should be on this node.
# TYPE lodestone_route_wanted gauge
lodestone_route_wanted 3
`)))
	problems, err := testutil.GatherAndLint(n.registry)
	require.NoError(t, err)
	assert.Empty(t, problems)
}
