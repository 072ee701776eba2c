package speaker

import (
	"context"
	"log/slog"
	"net"
	"net/netip"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/lodestone-lb/lodestone/pkg/annotation"
	"github.com/lodestone-lb/lodestone/pkg/config"
	"github.com/lodestone-lb/lodestone/pkg/netstate"
	"github.com/lodestone-lb/lodestone/pkg/ownership"
	"github.com/lodestone-lb/lodestone/pkg/peering"
	"github.com/lodestone-lb/lodestone/speaker/layer2"
)

// fakeNetwork stands for what the kernel tells, of interfaces or of gateways.
type fakeNetwork struct {
	changes
	ready      chan struct{}
	interfaces []netstate.Interface
	gateways   []netip.Addr
}

func (f *fakeNetwork) Ready() <-chan struct{} { return f.ready }

func (f *fakeNetwork) Interfaces() []netstate.Interface {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.interfaces
}

func (f *fakeNetwork) Gateways() ([]netip.Addr, bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.gateways, f.gateways != nil
}

// fakeConflicts stands for what the announcer hears.
type fakeConflicts struct {
	changes
	conflicts []layer2.Conflict
}

func (f *fakeConflicts) ConflictsChanged() <-chan struct{} { return f.Changed() }

func (f *fakeConflicts) Conflicts() []layer2.Conflict {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.conflicts
}

// fakeProxy stands for the KubeProxy.
type fakeProxy struct {
	changes
	answers bool
}

func (f *fakeProxy) Answers() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.answers
}

// fakeSessions stands for the Detector.
type fakeSessions struct {
	changes
	sessions []peering.Session
}

func (f *fakeSessions) Sessions() []peering.Session {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.sessions
}

// ethernet returns an interface that can announce.
func ethernet(index int, name string, addrs ...string) netstate.Interface {
	i := netstate.Interface{Index: index, Name: name, Kind: "device", HardwareAddr: net.HardwareAddr{2, 0, 0, 0, 0, byte(index)}, Up: true, Ethernet: true}
	for _, a := range addrs {
		i.Addrs = append(i.Addrs, netip.MustParsePrefix(a))
	}
	return i
}

func TestReporterTellsTheNetwork(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		interfaces, gateways, cfg := &fakeNetwork{ready: make(chan struct{})}, &fakeNetwork{ready: make(chan struct{})}, &fakeConfig{}
		pods := &fakePodRouter{}
		conflicts, sessions, proxy := &fakeConflicts{}, &fakeSessions{}, &fakeProxy{}
		interfaces.interfaces = []netstate.Interface{
			{Index: 1, Name: "lo", Loopback: true, Up: true, Addrs: []netip.Prefix{netip.MustParsePrefix("127.0.0.1/8")}},
			ethernet(2, "eth0", "198.18.0.11/24", "198.18.0.99/32", "2001:db8::11/64", "fe80::1/64"),
			ethernet(3, "docker0", "172.17.0.1/16"),
		}
		var told []map[string]string
		report := func(a map[string]string) { told = append(told, a) }
		loop := &fakeLoop{}
		r := NewReporter(ReportOptions{Loop: loop, Log: slog.New(slog.DiscardHandler), Registry: prometheus.NewPedanticRegistry(), Interfaces: interfaces, Gateways: gateways, Config: cfg, Conflicts: conflicts, Sessions: sessions, PodRoutes: pods, KubeProxy: proxy, Report: report})
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error)
		go func() { done <- r.Run(ctx) }()
		last := func() map[string]string {
			t.Helper()
			time.Sleep(2 * reportDelay)
			synctest.Wait()
			require.NotEmpty(t, told)
			return told[len(told)-1]
		}

		close(interfaces.ready)
		synctest.Wait()
		assert.Empty(t, told, "the gateways are still being asked for")
		close(gateways.ready)
		assert.Equal(t, map[string]string{annotation.Segments: "198.18.0.0/24 eth0,2001:db8::/64 eth0", annotation.KubeProxy: "", annotation.Conflicts: "", annotation.BGPSessions: "", annotation.Moves: ""}, last(), "the kernel did not tell the gateways: what is there stays")

		gateways.change(func() {
			gateways.gateways = []netip.Addr{netip.MustParseAddr("198.18.0.1"), netip.MustParseAddr("fe80::2")}
		})
		assert.Equal(t, map[string]string{annotation.Segments: "198.18.0.0/24 eth0,2001:db8::/64 eth0", annotation.Gateways: "198.18.0.1", annotation.KubeProxy: "", annotation.Conflicts: "", annotation.BGPSessions: "", annotation.Moves: ""}, last())

		proxy.change(func() { proxy.answers = true })
		assert.Equal(t, annotation.KubeProxyAnswers, last()[annotation.KubeProxy])

		conflicts.change(func() {
			conflicts.conflicts = []layer2.Conflict{
				{VIP: netip.MustParseAddr("198.18.0.7"), HardwareAddr: "02:00:00:00:00:0c", Interface: "eth0"},
				{VIP: netip.MustParseAddr("2001:db8::7"), HardwareAddr: "02:00:00:00:00:0d", Announced: true},
			}
		})
		assert.Equal(t, "198.18.0.7 02:00:00:00:00:0c withheld,2001:db8::7 02:00:00:00:00:0d announced", last()[annotation.Conflicts])
		conflicts.change(func() { conflicts.conflicts = nil })
		assert.Empty(t, last()[annotation.Conflicts], "they are gone")

		sessions.change(func() { sessions.sessions = []peering.Session{{Peer: "tor", Message: "no password"}} })
		assert.JSONEq(t, `[{"peer":"tor","since":"0001-01-01T00:00:00Z","message":"no password"}]`, last()[annotation.BGPSessions])
		sessions.change(func() { sessions.sessions = nil })

		cfg.change(func() {
			cfg.config = &config.Config{Advertisements: []config.Advertisement{{Name: "routed"}, {Name: "l2", Layer2: &config.Layer2{Interfaces: []string{"docker*"}}}}}
		})
		assert.Equal(t, "172.17.0.0/16 docker0 if-named,198.18.0.0/24 eth0,2001:db8::/64 eth0", last()[annotation.Segments], "an advertisement names the interface")

		reports := len(told)
		for range 50 { // eth0 flaps for five seconds
			interfaces.change(func() { interfaces.interfaces = []netstate.Interface{ethernet(2, "eth0")} })
			time.Sleep(reportDelay / 100)
			interfaces.change(func() { interfaces.interfaces = []netstate.Interface{ethernet(2, "eth0", "198.18.0.11/24")} })
			time.Sleep(reportDelay / 100)
		}
		assert.Equal(t, "198.18.0.0/24 eth0", last()[annotation.Segments])
		assert.LessOrEqual(t, len(told)-reports, 2)

		loop.change(func() {
			loop.moves = []ownership.Move{{At: time.Unix(0, 0), From: "n1", Why: "LinkDown", To: map[string][]netip.Addr{"n2": {netip.MustParseAddr("198.18.0.7")}}}}
		})
		assert.JSONEq(t, `[{"at":"1970-01-01T00:00:00Z","from":"n1","why":"LinkDown","to":{"n2":["198.18.0.7"]}}]`, last()[annotation.Moves])
		assert.NotContains(t, last(), annotation.UnmatchedAdvertisements, "not known yet")
		loop.change(func() { loop.moves, loop.labels = nil, map[string]string{} })
		time.Sleep(2 * unmatchedFor)
		assert.Equal(t, "l2", last()[annotation.UnmatchedAdvertisements])
		cfg.change(func() { cfg.config = &config.Config{} })
		assert.Contains(t, last(), annotation.UnmatchedAdvertisements)
		assert.Empty(t, last()[annotation.UnmatchedAdvertisements])

		interfaces.change(func() { interfaces.interfaces = nil })
		gateways.change(func() { gateways.gateways = []netip.Addr{} })
		assert.Equal(t, map[string]string{annotation.Segments: "", annotation.Gateways: "", annotation.KubeProxy: annotation.KubeProxyAnswers, annotation.Conflicts: "", annotation.BGPSessions: "", annotation.Moves: "", annotation.UnmatchedAdvertisements: ""}, last(), "none is something to tell")
		cancel()
		require.NoError(t, <-done)
	})
}
