package netstate

import (
	"context"
	"fmt"
	"log/slog"
	"net/netip"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/lodestone-lb/lodestone/pkg/testnet"
)

// watchGateways runs a GatewayWatcher in the host's namespace until the test
// ends.
func watchGateways(t *testing.T, h *testnet.Host, log slog.Handler, buffer int) *GatewayWatcher {
	t.Helper()
	g := NewGatewayWatcher(watch(t, h, log, receiveBuffer))
	g.buffer = buffer
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error)
	go func() { done <- g.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		require.NoError(t, <-done)
	})
	<-g.Ready()
	return g
}

// awaitGateways waits until the view is as wanted, woken by changes alone.
func awaitGateways(t *testing.T, g *GatewayWatcher, what, want string) {
	t.Helper()
	deadline := time.After(30 * time.Second)
	for {
		changed := g.Changed()
		got, known := g.Gateways()
		if known && fmt.Sprint(got) == want {
			return
		}
		select {
		case <-changed:
		case <-deadline:
			require.Failf(t, "never seen", "%s: have %v, want %s", what, got, want)
		}
	}
}

func TestGatewaysFollowTheKernel(t *testing.T) {
	t.Parallel()
	h := testnet.NewSegment(t, 1).Hosts[0]
	g := watchGateways(t, h, slog.DiscardHandler, receiveBuffer)
	awaitGateways(t, g, "a host without default routes", "[]")
	for _, step := range []struct{ what, command, want string }{
		{"an IPv4 default route", "route add default via 198.18.0.254", "[198.18.0.254]"},
		{"an IPv6 one", "route add default via 2001:db8::fe", "[198.18.0.254 2001:db8::fe]"},
		{"one as a router advertisement makes it", "-6 route add default via fe80::1 dev eth0 proto ra metric 100 expires 1800",
			"[198.18.0.254 2001:db8::fe fe80::1]"},
		{"the same gateway twice counts once", "route add default via 198.18.0.254 metric 100", "[198.18.0.254 2001:db8::fe fe80::1]"},
		{"a replaced route takes its gateway away", "route replace default via 198.18.0.253", "[198.18.0.253 198.18.0.254 2001:db8::fe fe80::1]"},
		{"and the other one", "route del default via 198.18.0.254 metric 100", "[198.18.0.253 2001:db8::fe fe80::1]"},
		{"two next hops", "route replace default nexthop via 198.18.0.251 nexthop via 198.18.0.252",
			"[198.18.0.251 198.18.0.252 2001:db8::fe fe80::1]"},
		{"an IPv6 router for IPv4 (RFC 5549)", "-4 route replace default via inet6 2001:db8::fd dev eth0", "[2001:db8::fd 2001:db8::fe fe80::1]"},
		{"another table does not count", "route add default via 198.18.0.254 table 7", "[2001:db8::fd 2001:db8::fe fe80::1]"},
		{"nor a route to somewhere", "route add 10.0.0.0/8 via 198.18.0.254", "[2001:db8::fd 2001:db8::fe fe80::1]"},
		{"nor to nowhere", "route add unreachable default metric 9", "[2001:db8::fd 2001:db8::fe fe80::1]"},
		{"a last one to see that the others were seen", "route replace default via 198.18.0.254", "[198.18.0.254 2001:db8::fe fe80::1]"},
		{"an interface takes its routes along, silently", "link set eth0 down", "[]"},
	} {
		h.Run("ip", strings.Fields(step.command)...)
		awaitGateways(t, g, step.what, step.want)
	}
}

// Changes of other routes than default routes wake nobody.
func TestOtherRoutesAreNoChange(t *testing.T) {
	t.Parallel()
	h := testnet.NewSegment(t, 1).Hosts[0]
	g := watchGateways(t, h, slog.DiscardHandler, receiveBuffer)
	changed := g.Changed()
	h.Run("ip", "route", "add", "10.0.0.0/8", "via", "198.18.0.254")
	h.Run("ip", "route", "add", "default", "via", "198.18.0.254")
	<-changed
	got, _ := g.Gateways()
	assert.Equal(t, []netip.Addr{netip.MustParseAddr("198.18.0.254")}, got)
}

// The smallest buffer loses most notifications of a burst, as a BGP daemon
// makes it; the view ends up right nevertheless.
func TestGatewaysAfterOverrun(t *testing.T) {
	t.Parallel()
	h := testnet.NewSegment(t, 1).Hosts[0]
	var lost resyncs
	g := watchGateways(t, h, &lost, 1)
	var batch strings.Builder
	for i := range 2000 {
		fmt.Fprintf(&batch, "route add 10.%d.%d.0/24 via 198.18.0.9\n", i/250, i%250)
	}
	batch.WriteString("route add default via 198.18.0.254\n")
	c := h.Command(t.Context(), "ip", "-batch", "-")
	c.Stdin = strings.NewReader(batch.String())
	out, err := c.CombinedOutput()
	require.NoError(t, err, "%s", out)
	awaitGateways(t, g, "everything", "[198.18.0.254]")
	assert.Positive(t, lost.n.Load(), "no notification was lost: the test tests nothing")
}

// A kernel that does not answer costs the gateways and nothing else.
func TestGatewaysOfAnUnusableNamespace(t *testing.T) {
	t.Parallel()
	h := testnet.NewHost(t, "unusable")
	var warned warnings
	w := watch(t, h, slog.DiscardHandler, receiveBuffer)
	g := NewGatewayWatcher(w)
	g.log, g.namespace = slog.New(&warned), -2 // no file descriptor
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error)
	go func() { done <- g.Run(ctx) }()
	<-g.Ready()
	_, known := g.Gateways()
	assert.False(t, known)
	cancel()
	require.NoError(t, <-done)
	assert.Positive(t, warned.n.Load())
}

// warnings counts the log lines of a level that somebody is to see.
type warnings struct {
	slog.Handler
	n atomic.Int64
}

func (w *warnings) Enabled(_ context.Context, l slog.Level) bool { return l >= slog.LevelWarn }

func (w *warnings) Handle(context.Context, slog.Record) error { w.n.Add(1); return nil }
