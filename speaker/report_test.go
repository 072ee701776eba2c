package speaker

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/lodestone-lb/lodestone/pkg/config"
	"github.com/lodestone-lb/lodestone/pkg/report"
	"github.com/lodestone-lb/lodestone/speaker/layer2"
	"github.com/lodestone-lb/lodestone/speaker/netstate"
)

// fakeNetwork stands for the kernel's interfaces or gateways.
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

func (f *fakeProxy) Answers() (answers, known bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.answers, true
}

// InForce has it stand for the Director.
func (f *fakeProxy) InForce() bool {
	answers, _ := f.Answers()
	return answers
}

func (f *fakeProxy) NoRules() report.NoRules { return "" }

// fakeSessions stands for the Detector.
type fakeSessions struct {
	changes
	sessions []report.Session
}

func (f *fakeSessions) Sessions() []report.Session {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.sessions
}

// ethernet returns an interface that can announce.
func ethernet(index int, name string, addrs ...string) netstate.Interface {
	i := netstate.Interface{Index: index, Name: name, Kind: "device", HardwareAddr: net.HardwareAddr{2, 0, 0, 0, 0, byte(index)}, Up: true,
		Ethernet: true}
	for _, a := range addrs {
		i.Addrs = append(i.Addrs, netip.MustParsePrefix(a))
	}
	return i
}

func TestReporterReportsTheNetwork(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		interfaces, gateways, cfg := &fakeNetwork{ready: make(chan struct{})}, &fakeNetwork{ready: make(chan struct{})}, &fakeConfig{}
		pods := &fakePodRouter{}
		conflicts, sessions, proxy, rules := &fakeConflicts{}, &fakeSessions{}, &fakeProxy{}, &fakeProxy{}
		interfaces.interfaces = []netstate.Interface{
			{Index: 1, Name: "lo", Loopback: true, Up: true, Addrs: []netip.Prefix{netip.MustParsePrefix("127.0.0.1/8")}},
			ethernet(2, "eth0", "198.18.0.11/24", "198.18.0.99/32", "2001:db8::11/64", "fe80::1/64"),
			ethernet(3, "docker0", "172.17.0.1/16"),
		}
		named := &config.Config{Advertisements: []config.Advertisement{{Name: "routed"},
			{Name: "l2", Layer2: &config.Layer2{Interfaces: []string{"docker*"}}}}}
		var reports []report.Report
		loop := &fakeLoop{}
		r := NewReporter(ReportOptions{Loop: loop, Log: slog.New(slog.DiscardHandler), Registry: prometheus.NewPedanticRegistry(),
			Interfaces: interfaces, Gateways: gateways, Config: cfg, Conflicts: conflicts, Sessions: sessions, PodRoutes: pods, KubeProxy: proxy,
			Forwarding: rules,
			Crowd:      func() int { return 1 }, Report: func(r report.Report) { reports = append(reports, r) }})
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error)
		go func() { done <- r.Run(ctx) }()
		last := func() report.Report {
			t.Helper()
			time.Sleep(2 * reportDelay)
			synctest.Wait()
			require.NotEmpty(t, reports)
			return reports[len(reports)-1]
		}
		reported := func(want string, note ...any) {
			t.Helper()
			assert.Equal(t, want, strings.ReplaceAll(last().String(), "\n", ""), note...)
		}

		close(interfaces.ready)
		synctest.Wait()
		assert.Empty(t, reports, "the gateways are still being asked for")
		close(gateways.ready)
		synctest.Wait()
		assert.Empty(t, reports, "without the document it is not known which interfaces are named")
		cfg.change(func() { cfg.config = named })
		synctest.Wait()
		require.NotEmpty(t, reports)
		assert.Equal(t, "[172.17.0.0/16 docker0 if-named 198.18.0.0/24 eth0 2001:db8::/64 eth0]", fmt.Sprint(reports[0].Tidy().Segments),
			"an advertisement names the interface")
		cfg.change(func() { cfg.config = &config.Config{} })
		reported(`{"segments":["198.18.0.0/24 eth0","2001:db8::/64 eth0"]}`, "the kernel could not list the gateways: the last ones stay")

		gateways.change(func() {
			gateways.gateways = []netip.Addr{netip.MustParseAddr("198.18.0.1"), netip.MustParseAddr("fe80::2")}
		})
		reported(`{"segments":["198.18.0.0/24 eth0","2001:db8::/64 eth0"], "gateways":["198.18.0.1"]}`)

		proxy.change(func() { proxy.answers = true })
		assert.True(t, last().KubeProxy)

		rules.change(func() { rules.answers = true })
		assert.True(t, last().Forwards)
		rules.change(func() { rules.answers = false })
		assert.False(t, last().Forwards, "whoever hands connections here is to hear of it")

		conflicts.change(func() {
			conflicts.conflicts = []layer2.Conflict{
				{VIP: netip.MustParseAddr("198.18.0.7"), HardwareAddr: "02:00:00:00:00:0c", Interface: "eth0"},
				{VIP: netip.MustParseAddr("2001:db8::7"), HardwareAddr: "02:00:00:00:00:0d", Announced: true},
			}
		})
		assert.Equal(t, "[198.18.0.7 02:00:00:00:00:0c withheld 2001:db8::7 02:00:00:00:00:0d announced]", fmt.Sprint(last().Conflicts))
		conflicts.change(func() {
			conflicts.conflicts = nil
			for vip := netip.MustParseAddr("198.18.1.0"); len(conflicts.conflicts) <= report.MaxConflicts; vip = vip.Next() {
				conflicts.conflicts = append(conflicts.conflicts, layer2.Conflict{VIP: vip, HardwareAddr: "02:00:00:00:00:0c",
					Announced: len(conflicts.conflicts) < report.MaxConflicts})
			}
		})
		assert.Len(t, last().Network.Withheld(), 1, "one that withholds a VIP is reported even where there are too many others")
		assert.Len(t, last().Conflicts, report.MaxConflicts)
		conflicts.change(func() { conflicts.conflicts = nil })
		assert.Empty(t, last().Conflicts, "they are gone")

		sessions.change(func() { sessions.sessions = []report.Session{{Peer: "tor", Message: "no password"}} })
		assert.Equal(t, []report.Session{{Peer: "tor", Message: "no password"}}, last().Sessions)
		sessions.change(func() { sessions.sessions = nil })

		cfg.change(func() { cfg.config = named })
		assert.Contains(t, fmt.Sprint(last().Tidy().Segments), "docker0 if-named")

		before := len(reports)
		for range 50 { // eth0 flaps for five seconds
			interfaces.change(func() { interfaces.interfaces = []netstate.Interface{ethernet(2, "eth0")} })
			time.Sleep(reportDelay / 100)
			interfaces.change(func() { interfaces.interfaces = []netstate.Interface{ethernet(2, "eth0", "198.18.0.11/24")} })
			time.Sleep(reportDelay / 100)
		}
		assert.Equal(t, "[198.18.0.0/24 eth0]", fmt.Sprint(last().Segments))
		assert.LessOrEqual(t, len(reports)-before, 2)

		loop.change(func() {
			loop.moves = []report.Move{{At: time.Unix(0, 0), From: "n1", Why: "LinkDown",
				To: map[string][]netip.Addr{"n2": {netip.MustParseAddr("198.18.0.7")}}}}
		})
		assert.Equal(t, loop.moves, last().Moves)
		assert.Nil(t, last().Unmatched, "not known yet")
		loop.change(func() { loop.moves, loop.labels = nil, map[string]string{} })
		time.Sleep(2 * unmatchedFor)
		assert.Equal(t, []string{"l2"}, last().Unmatched)
		cfg.change(func() { cfg.config = &config.Config{} })
		assert.Equal(t, []string{}, last().Unmatched)

		interfaces.change(func() { interfaces.interfaces = nil })
		gateways.change(func() { gateways.gateways = []netip.Addr{} })
		reported(`{"segments":[], "gateways":[], "kubeProxy":true, "unmatchedAdvertisements":[]}`, "an empty list is reported, too")
		cancel()
		require.NoError(t, <-done)
	})
}

// A router of 1,000 nodes reboots: what they write because of that, which goes to all of them,
// is spread over two minutes, and is nothing if the router is back within 20 s. Who loses a
// segment in the meantime is known at once.
func TestReportsOfManySpeakers(t *testing.T) {
	t.Parallel()
	const here, all = 50, 1000
	synctest.Test(t, func(t *testing.T) {
		var mu sync.Mutex
		var writes []time.Time // of Leases, which are not written if nothing has changed
		var networks, sessions []*changes
		up, down := []report.Session{{Peer: "tor", Established: true}}, []report.Session{{Peer: "tor", Message: "connection refused"}}
		all50 := make([]*fakeSessions, here)
		links := make([]*fakeNetwork, here)
		ready := make(chan struct{})
		close(ready)
		ctx, cancel := context.WithCancel(t.Context())
		var running sync.WaitGroup
		for i := range here {
			all50[i] = &fakeSessions{sessions: up}
			links[i] = &fakeNetwork{ready: ready, interfaces: []netstate.Interface{ethernet(2, "eth0", "198.18.0.11/24")}}
			lease := ""
			r := NewReporter(ReportOptions{Loop: &fakeLoop{}, Log: slog.New(slog.DiscardHandler), Registry: prometheus.NewPedanticRegistry(),
				Interfaces: links[i],
				Gateways:   &fakeNetwork{ready: ready}, Config: &fakeConfig{config: &config.Config{}}, Conflicts: &fakeConflicts{}, Sessions: all50[i],
				PodRoutes: &fakePodRouter{},
				KubeProxy: &fakeProxy{}, Forwarding: &fakeProxy{}, Crowd: func() int { return all / 50 }, Report: func(r report.Report) {
					mu.Lock()
					defer mu.Unlock()
					if text := r.Tidy().String(); text != lease {
						lease, writes = text, append(writes, time.Now())
					}
				}})
			running.Go(func() { assert.NoError(t, r.Run(ctx)) })
			networks, sessions = append(networks, &links[i].changes), append(sessions, &all50[i].changes)
		}
		set := func(to []report.Session) {
			for i, s := range all50 {
				sessions[i].change(func() { s.sessions = to })
			}
		}
		// most returns how many are written, and how many of them within half a minute at most.
		most := func(d time.Duration) (written, within int) {
			time.Sleep(d)
			synctest.Wait()
			mu.Lock()
			defer mu.Unlock()
			for i := range writes {
				n := 0
				for _, w := range writes[i:] {
					if w.Sub(writes[i]) < 30*time.Second {
						n++
					}
				}
				within = max(within, n)
			}
			written, writes = len(writes), nil
			return written, within
		}
		written, _ := most(time.Minute)
		require.Equal(t, here, written, "at the start")

		set(down)
		written, within := most(5 * time.Minute)
		t.Logf("a router is gone: %d of %d Leases, %d within half a minute", written, here, within)
		assert.Equal(t, here, written)
		assert.LessOrEqual(t, within, here*7/10, "a random spread has 12, or some more")

		set(up)
		time.Sleep(5 * time.Minute)
		most(0)
		set(down)
		time.Sleep(20 * time.Second)
		set(up)
		written, _ = most(5 * time.Minute)
		t.Logf("it is gone for 20 s: %d of %d Leases", written, here)
		assert.Zero(t, written)

		set(down)
		networks[7].change(func() { links[7].interfaces = nil })
		written, _ = most(2 * reportDelay)
		assert.Equal(t, 1, written, "the loss of a segment is reported at once")
		cancel()
		running.Wait()
	})
}

// In the largest clusters, too, moves are reported while they are published: else nobody would have an Event of the loss of a node.
func TestMovesOfManySpeakers(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		ready := make(chan struct{})
		close(ready)
		loop, sessions := &fakeLoop{}, &fakeSessions{}
		seen := make(chan time.Time, 1)
		r := NewReporter(ReportOptions{Loop: loop, Log: slog.New(slog.DiscardHandler), Registry: prometheus.NewPedanticRegistry(),
			Interfaces: &fakeNetwork{ready: ready}, Gateways: &fakeNetwork{ready: ready}, Config: &fakeConfig{config: &config.Config{}},
			Conflicts: &fakeConflicts{}, Sessions: sessions, PodRoutes: &fakePodRouter{}, KubeProxy: &fakeProxy{}, Forwarding: &fakeProxy{},
			Crowd: func() int { return 5000 / 50 }, Report: func(r report.Report) {
				if len(r.Moves) > 0 {
					seen <- time.Now()
				}
			}})
		ctx, cancel := context.WithCancel(t.Context())
		var running sync.WaitGroup
		running.Go(func() { assert.NoError(t, r.Run(ctx)) })
		for range 100 { // the waits are drawn by lot
			synctest.Wait()
			sessions.changes.change(func() { sessions.sessions = []report.Session{{Peer: "tor"}} })
			time.Sleep(time.Second) // a session's change waits already
			moved := time.Now()
			loop.change(func() { loop.moves = []report.Move{{At: moved, From: "n1", Why: report.SpeakerLost}} })
			require.Less(t, (<-seen).Sub(moved), 110*time.Second) // they are published for 120 s
			loop.change(func() { loop.moves = nil })
			sessions.changes.change(func() { sessions.sessions = nil })
			time.Sleep(time.Hour)
		}
		cancel()
		running.Wait()
	})
}
