package podroutes_test

import (
	"context"
	"fmt"
	"log/slog"
	"net/netip"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/lodestone-lb/lodestone/pkg/config"
	"github.com/lodestone-lb/lodestone/pkg/testnet"
	"github.com/lodestone-lb/lodestone/speaker/netstate"
	"github.com/lodestone-lb/lodestone/speaker/plan"
	"github.com/lodestone-lb/lodestone/speaker/podroutes"
)

// testTimeout is how long anything may take in the end.
const testTimeout = 30 * time.Second

// world is a segment with nodes, each with a pod.
type world struct {
	t     *testing.T
	nodes []*node
	api   map[string]plan.Node // what the API server has of them
}

// node is a host with a pod behind it and a speaker's Table.
type node struct {
	*testnet.Host
	name     string
	pod      *testnet.Host
	table    *podroutes.Table
	registry *prometheus.Registry
	log      *testnet.Log
	stop     func()
}

// newWorld makes n nodes: number i, from 1, is at 198.18.0.<i> and
// 2001:db8::<i>, and its pod at 10.244.<i>.2 and fd00:10:244:<i>::2.
func newWorld(t *testing.T, n int) *world {
	w := &world{t: t, api: map[string]plan.Node{}}
	for i, h := range testnet.NewSegment(t, n).Hosts {
		i++
		pod := testnet.NewHost(t, fmt.Sprintf("pod%d", i))
		testnet.Connect(h, "pod0", pod, "eth0")
		for _, f := range []string{"10.244.%d.%d/24", "fd00:10:244:%d::%d/64"} {
			h.Run("ip", "addr", "add", fmt.Sprintf(f, i, 1), "dev", "pod0", "nodad")
			pod.Run("ip", "addr", "add", fmt.Sprintf(f, i, 2), "dev", "eth0", "nodad")
		}
		pod.Run("ip", "route", "add", "default", "via", fmt.Sprintf("10.244.%d.1", i))
		pod.Run("ip", "route", "add", "default", "via", fmt.Sprintf("fd00:10:244:%d::1", i))
		h.Run("sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward; echo 1 > /proc/sys/net/ipv6/conf/all/forwarding")
		name := fmt.Sprintf("n%d", i)
		w.nodes = append(w.nodes, &node{Host: h, name: name, pod: pod})
		w.api[name] = plan.Node{
			Addresses: []netip.Addr{netip.MustParseAddr(fmt.Sprintf("198.18.0.%d", i)), netip.MustParseAddr(fmt.Sprintf("2001:db8::%d", i))},
			PodCIDRs:  []string{fmt.Sprintf("10.244.%d.0/24", i), fmt.Sprintf("fd00:10:244:%d::/64", i)},
			Created:   time.Unix(int64(i), 0),
		}
	}
	return w
}

// start starts the speakers of the nodes.
func (w *world) start(nodes ...*node) {
	w.t.Helper()
	for _, n := range nodes {
		ctx, cancel := context.WithCancel(w.t.Context())
		watcher := netstate.New(netstate.Options{Namespace: n.Handle()})
		n.log, n.registry = &testnet.Log{}, prometheus.NewPedanticRegistry()
		n.table = podroutes.New(podroutes.Options{
			Interfaces: watcher, Namespace: n.Handle(), Registry: n.registry,
			Log: slog.New(slog.NewTextHandler(n.log, &slog.HandlerOptions{Level: slog.LevelDebug})),
		})
		var group sync.WaitGroup
		group.Go(func() { assert.NoError(w.t, watcher.Run(ctx)) })
		group.Go(func() { assert.NoError(w.t, n.table.Run(ctx)) })
		n.stop = func() { cancel(); group.Wait() }
		w.t.Cleanup(n.stop)
	}
}

// set gives the speakers of the nodes the present objects of the API server.
func (w *world) set(mode config.RouteMode, nodes ...*node) {
	c := &config.Config{}
	if mode != "" {
		c.Routes = &config.Routes{Mode: mode}
	}
	for _, n := range nodes {
		n.table.Set(plan.PodRoutesOf(n.name, c, w.api))
	}
}

// edit changes a Node.
func (w *world) edit(name string, f func(*plan.Node)) {
	n := w.api[name]
	f(&n)
	w.api[name] = n
}

// wantRoutes waits until the node has these routes of ours, in the words of ip
// route, and no others.
func (n *node) wantRoutes(t *testing.T, want ...string) {
	t.Helper()
	var got []string
	if !assert.Eventually(t, func() bool {
		got = n.routes()
		return strings.Join(got, "\n") == strings.Join(want, "\n")
	}, testTimeout, 10*time.Millisecond) {
		t.Fatalf("%s has\n%s\nnot\n%s\nlog:\n%s", n.name, strings.Join(got, "\n"), strings.Join(want, "\n"), n.log)
	}
}

// routes returns the routes of ours, as "destination via next hop".
func (n *node) routes() []string {
	var all []string
	for _, family := range []string{"-4", "-6"} {
		for line := range strings.Lines(n.Run("ip", family, "route", "show", "proto", fmt.Sprint(podroutes.Protocol))) {
			f := strings.Fields(line)
			all = append(all, strings.Join(f[:min(3, len(f))], " "))
		}
	}
	return all
}

// wantProblem waits until the status has this problem and no other.
func (n *node) wantProblem(t *testing.T, reason plan.PodRefusal, message string) {
	t.Helper()
	require.Eventually(t, func() bool {
		p := n.table.Status().Problems
		return len(p) == 1 && p[0].Reason == reason && p[0].Message == message
	}, testTimeout, 10*time.Millisecond, "%+v", n.table.Status())
}

// toOthers are the routes of the node to two others.
func toOthers(a, b int) []string {
	return []string{
		fmt.Sprintf("10.244.%d.0/24 via 198.18.0.%d", a, a), fmt.Sprintf("10.244.%d.0/24 via 198.18.0.%d", b, b),
		fmt.Sprintf("fd00:10:244:%d::/64 via 2001:db8::%d", a, a), fmt.Sprintf("fd00:10:244:%d::/64 via 2001:db8::%d", b, b),
	}
}

// ping waits until a pod reaches another one: neighbours have to find each
// other first.
func (n *node) ping(t *testing.T, to string) {
	t.Helper()
	require.Eventually(t, func() bool {
		return n.pod.Command(t.Context(), "ping", "-n", "-c", "1", "-W", "1", to).Run() == nil
	}, testTimeout, time.Millisecond, "%s does not reach %s", n.name, to)
}

// flood is many pings from one pod to another.
type flood struct {
	to   string
	out  testnet.Log
	stop func()
}

// flood pings until it is ended.
func (n *node) flood(t *testing.T, to string) *flood {
	t.Helper()
	f := &flood{to: to}
	ping := n.pod.Command(context.Background(), "ping", "-n", "-i", "0.002", "-W", "1", to)
	ping.Stdout, ping.Stderr = &f.out, &f.out
	require.NoError(t, ping.Start())
	f.stop = sync.OnceFunc(func() {
		_ = ping.Process.Signal(interrupt)
		_ = ping.Wait() // the output is checked
	})
	t.Cleanup(f.stop)
	return f
}

// answers returns the sequence numbers of the pings that were answered.
func (f *flood) answers(t *testing.T) (sequences []int) {
	t.Helper()
	for _, m := range regexp.MustCompile(`bytes from .* icmp_seq=(\d+) `).FindAllStringSubmatch(f.out.String(), -1) {
		sequences = append(sequences, number(t, m[1]))
	}
	slices.Sort(sequences)
	return sequences
}

// end ends the flood and wants an answer to every ping before the last that was
// answered: what came later may have been on its way.
func (f *flood) end(t *testing.T) {
	t.Helper()
	f.stop()
	answers := f.answers(t)
	require.NotEmpty(t, answers, f.out.String())
	require.Len(t, answers, answers[len(answers)-1], "answers from %s: %v", f.to, answers)
}
