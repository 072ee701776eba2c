package speaker

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"

	"github.com/lodestone-lb/lodestone/pkg/config"
	"github.com/lodestone-lb/lodestone/pkg/report"
	"github.com/lodestone-lb/lodestone/pkg/testnet"
	"github.com/lodestone-lb/lodestone/speaker/bfd"
	"github.com/lodestone-lb/lodestone/speaker/bgp"
	"github.com/lodestone-lb/lodestone/speaker/plan"
)

// fakeRouter records its calls as lines of text.
type fakeRouter struct {
	changes
	sent   []string
	routes map[netip.Prefix]plan.Route
}

func (f *fakeRouter) note(what string) { f.change(func() { f.sent = append(f.sent, what) }) }

func (f *fakeRouter) Set(_ context.Context, want plan.BGP) error {
	f.mu.Lock()
	f.routes = maps.Clone(want.Routes)
	f.mu.Unlock()
	f.note(fmt.Sprint("set ", slices.Sorted(maps.Keys(want.Sessions)), prefixes(want.Routes)))
	return nil
}

// Update records the same line as Set, so that what routers are sent does not depend on which of the two was
// called. It checks that prefixes that are not in changed have the routes that the routers know.
func (f *fakeRouter) Update(ctx context.Context, want plan.BGP, changed []netip.Prefix) error {
	f.mu.Lock()
	routes := maps.Clone(f.routes)
	f.mu.Unlock()
	for _, prefix := range changed {
		if route, ok := want.Routes[prefix]; ok {
			routes[prefix] = route
		} else {
			delete(routes, prefix)
		}
	}
	if !slices.Equal(prefixes(routes), prefixes(want.Routes)) {
		f.note(fmt.Sprintf("not sent all changes: %q, not %q", prefixes(routes), prefixes(want.Routes)))
	}
	return f.Set(ctx, want)
}

func prefixes(routes map[netip.Prefix]plan.Route) []string {
	all := []string{}
	for prefix := range routes {
		all = append(all, prefix.String())
	}
	slices.Sort(all)
	return all
}

func (f *fakeRouter) Drain(_ context.Context, on bool) error {
	f.note(fmt.Sprint("drain ", on))
	return nil
}

func (f *fakeRouter) Stop(restarting bool) { f.note(fmt.Sprint("stop, restarting ", restarting)) }

// hears waits until that is what the routers were sent last, in this order, and
// forgets it.
func (s *story) hears(want ...string) {
	s.t.Helper()
	timeout := time.After(testTimeout)
	for {
		changed := s.router.Changed()
		s.router.mu.Lock()
		sent := slices.Clone(s.router.sent)
		if n := len(sent) - len(want); n >= 0 && slices.Equal(sent[n:], want) {
			s.router.sent = nil
			s.router.mu.Unlock()
			return
		}
		s.router.mu.Unlock()
		select {
		case <-changed:
		case <-timeout:
			s.t.Fatalf("routers were sent %q, want %q", sent, want)
		}
	}
}

// hearsNothing checks that the routers are sent nothing for a while.
func (s *story) hearsNothing() {
	s.t.Helper()
	time.Sleep(50 * time.Millisecond)
	s.router.mu.Lock()
	defer s.router.mu.Unlock()
	require.Empty(s.t, s.router.sent)
}

// routed is a configuration with a peer for all nodes.
func (s *story) routed() {
	s.config.config.Peers = []config.Peer{{Name: "tor", Address: netip.MustParseAddr("198.18.0.254"), LocalASN: 64512,
		PeerASN: config.ASN{Number: 64513}, RouterID: netip.MustParseAddr("198.18.0.1")}}
	s.config.config.Advertisements = []config.Advertisement{{Name: "routed",
		BGP: &config.BGP{AggregationLength: 32, AggregationLengthV6: 128}}}
}

// newRoutedStory begins with a Service that has endpoints.
func newRoutedStory(t *testing.T) *story {
	s := newStory(t, serviceObject("web", "203.0.113.1"), endpoints("web", on("n1")))
	s.drain = 20 * time.Millisecond
	s.routed()
	return s
}

func TestRoutersHearOfServices(t *testing.T) {
	s := newRoutedStory(t)
	s.start()
	s.hears("set [tor] [203.0.113.1/32]")
	s.apply(endpoints("web"))
	s.hears("set [tor] []")
	s.apply(endpoints("web", on("n2")))
	s.hears("set [tor] [203.0.113.1/32]")
	s.apply(endpoints("web", on("n2"), on("n1")))
	s.hearsNothing()
	s.config.change(func() {
		changed := *s.config.config
		changed.Peers = nil
		s.config.config = &changed
	})
	s.hears("set [] []")
}

func TestRoutersAreAskedToPreferOthersFirst(t *testing.T) {
	s := newRoutedStory(t)
	s.start()
	s.hears("set [tor] [203.0.113.1/32]")
	node := nodeObject("n1")
	node.Labels = map[string]string{corev1.LabelNodeExcludeBalancers: ""}
	s.apply(node)
	s.hears("drain true", "set [tor] [203.0.113.1/32]", "set [tor] []", "drain false")
	s.apply(nodeObject("n1"))
	s.hears("set [tor] [203.0.113.1/32]")
}

func TestNewPasswordsSetTheSessionsAgain(t *testing.T) {
	s := newRoutedStory(t)
	s.start()
	s.hears("set [tor] [203.0.113.1/32]")
	s.passwords.change(func() {})
	s.hears("set [tor] [203.0.113.1/32]")
}

func TestEndOfTheSpeakerDrainsAndLeavesRoutes(t *testing.T) {
	s := newRoutedStory(t)
	s.start()
	s.hears("set [tor] [203.0.113.1/32]")
	s.stop()
	s.hears("drain true", "stop, restarting true")
}

// fakeBFD and fakePeers stand for what the Detector ties together.
type fakeBFD struct {
	changes
	want   map[string]bfd.Session
	sets   int
	states map[string]bfd.Status
}

func (f *fakeBFD) Set(_ context.Context, want map[string]bfd.Session) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.want, f.sets = want, f.sets+1
	return nil
}

func (f *fakeBFD) wanted() map[string]bfd.Session {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.want
}

func (f *fakeBFD) States() map[string]bfd.Status {
	f.mu.Lock()
	defer f.mu.Unlock()
	return maps.Clone(f.states)
}

type fakePeers struct {
	changes
	peers []bgp.Peer
	down  map[string]string
}

func (f *fakePeers) Peers() []bgp.Peer {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.peers
}

func (f *fakePeers) SetDown(ctx context.Context, peer string, down bool, why string) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	delete(f.down, peer)
	if down {
		f.down[peer] = why
	}
	return ctx.Err()
}

func (f *fakePeers) downs() map[string]string {
	f.mu.Lock()
	defer f.mu.Unlock()
	return maps.Clone(f.down)
}

// upToDate stands for passwords that are their Secrets'.
func upToDate(config.SecretKey) string { return "" }

// A session stays up with the last password when its Secret may not be read any more, and its report has that.
func TestOutdatedPasswordsAreReported(t *testing.T) {
	t.Parallel()
	peers := &fakePeers{peers: []bgp.Peer{{Name: "tor", State: bgp.Established}, {Name: "other", State: bgp.Connect, LastError: "refused"},
		{Name: "plain", State: bgp.Established}, {Name: "gone"}}}
	d := NewDetector(&fakeBFD{}, peers, func(key config.SecretKey) string { return key.Name + " may not be read" },
		slog.New(slog.DiscardHandler))
	d.Set(t.Context(), plan.BGP{Sessions: map[string]plan.Session{
		"tor":   {Peer: &config.Peer{Password: &config.SecretKey{Name: "a"}}},
		"other": {Peer: &config.Peer{Password: &config.SecretKey{Name: "b"}}},
		"plain": {Peer: &config.Peer{}},
	}})
	assert.Equal(t, []report.Session{
		{Peer: "tor", Established: true, Message: "a may not be read"}, {Peer: "other", Message: "refused; b may not be read"},
		{Peer: "plain", Established: true}, {Peer: "gone"},
	}, d.Sessions())
}

func TestDetectorTiesBFDToBGP(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		router, found := netip.MustParseAddr("198.18.0.254"), netip.MustParseAddr("fe80::1%eth1")
		timers := &config.BFD{TransmitInterval: 100 * time.Millisecond, ReceiveInterval: 50 * time.Millisecond, DetectMultiplier: 3}
		strict := *timers
		strict.Strict, strict.MinimumTTL = true, 253
		b, peers := &fakeBFD{states: map[string]bfd.Status{}}, &fakePeers{down: map[string]string{}}
		d := NewDetector(b, peers, upToDate, slog.New(slog.DiscardHandler))
		state := func(peer string, s bfd.Status) {
			b.change(func() { s.Session, s.Since = b.want[peer], time.Now(); b.states[peer] = s })
			synctest.Wait()
		}
		d.Set(t.Context(), plan.BGP{
			Sessions: map[string]plan.Session{
				"tor":        {Peer: &config.Peer{Name: "tor", Address: router, BFD: timers}, Source: netip.MustParseAddr("198.18.0.11")},
				"far":        {Peer: &config.Peer{Name: "far", Address: router, Multihop: 3, BFD: &strict}},
				"unnumbered": {Peer: &config.Peer{Name: "unnumbered", Interface: "eth1", BFD: timers}},
				"plain":      {Peer: &config.Peer{Name: "plain", Address: router}},
			},
			Problems: map[string]plan.Problem{"other": {Reason: plan.NoLocalASN, Message: "no AS number"}},
		})
		assert.Equal(t, map[string]string{"far": "waiting for BFD (strict)"}, peers.downs(), "the sessions begin when Set has returned")
		go d.Run(t.Context())
		synctest.Wait()
		want := bfd.Timers{TransmitInterval: 100 * time.Millisecond, ReceiveInterval: 50 * time.Millisecond, DetectMultiplier: 3}
		assert.Equal(t, map[string]bfd.Session{
			"tor": {Local: netip.MustParseAddr("198.18.0.11"), Remote: router, Timers: want},
			"far": {Remote: router, Multihop: true, MinTTL: 253, Timers: want},
		}, b.wanted(), "nobody has found the unnumbered peer yet")
		assert.Equal(t, map[string]string{"far": "waiting for BFD (strict)"}, peers.downs())

		peers.change(func() {
			peers.peers = []bgp.Peer{{Name: "unnumbered", Address: found}, {Name: "tor", State: bgp.Established},
				{Name: "plain", State: bgp.Connect, LastError: "refused", Ended: "hold timer expired"}}
		})
		synctest.Wait()
		assert.Equal(t, bfd.Session{Remote: found, Interface: "eth1", Timers: want}, b.wanted()["unnumbered"])

		state("far", bfd.Status{State: bfd.Up, Cause: bfd.CameUp})
		changed := d.Changed()
		state("tor", bfd.Status{State: bfd.Up, Cause: bfd.CameUp})
		<-changed
		assert.Empty(t, peers.downs())
		assert.ElementsMatch(t, []report.Session{
			{Peer: "unnumbered", Router: found}, {Peer: "tor", Established: true, BFD: "Up"},
			{Peer: "plain", Message: "hold timer expired; now: refused"}, {Peer: "other", Message: "no AS number"},
		}, d.Sessions())

		state("far", bfd.Status{State: bfd.Down, Cause: bfd.PeerAdminDown})
		state("tor", bfd.Status{State: bfd.Down, Cause: bfd.PeerAdminDown})
		assert.Equal(t, map[string]string{"far": "waiting for BFD (strict): it is switched off on the router"}, peers.downs(),
			"what people switched off is no failure")

		state("tor", bfd.Status{State: bfd.Down, Cause: bfd.Expired, DetectionTime: 300 * time.Millisecond, Ended: time.Now()})
		assert.Equal(t, "BFD: the router was not heard for 300ms", peers.downs()["tor"])
		time.Sleep(bfdPause + time.Millisecond)
		synctest.Wait()
		assert.NotContains(t, peers.downs(), "tor", "BGP tries again by itself")
		ended := time.Now().Add(-bfdPause)
		state("tor", bfd.Status{State: bfd.Init, Cause: bfd.Expired, Ended: ended})
		state("tor", bfd.Status{State: bfd.Down, Cause: bfd.Expired, Ended: ended})
		assert.NotContains(t, peers.downs(), "tor", "BFD was not up in between")
		state("tor", bfd.Status{State: bfd.Down, Cause: bfd.PeerDown, Ended: time.Now()})
		assert.Contains(t, peers.downs(), "tor")
		d.Set(t.Context(), plan.BGP{})
		synctest.Wait()
		assert.Empty(t, peers.downs(), "peers that are gone")
		assert.Empty(t, b.wanted())
	})
}

// A peer that gets another path is not held down, nor let up, by the state of BFD on the path before.
func TestBFDOnThePathBefore(t *testing.T) {
	t.Parallel()
	tor := func(strict bool, change func(*plan.Session)) plan.BGP {
		s := plan.Session{Peer: &config.Peer{Name: "tor", Address: netip.MustParseAddr("fe80::1"), Interface: "eth1",
			BFD: &config.BFD{DetectMultiplier: 3, Strict: strict}}}
		change(&s)
		return plan.BGP{Sessions: map[string]plan.Session{"tor": s}}
	}
	path := bfd.Session{Remote: netip.MustParseAddr("fe80::1"), Interface: "eth1"}
	up, failed := bfd.Status{Session: path, State: bfd.Up}, bfd.Status{Session: path, Cause: bfd.Expired, Ended: time.Now().Add(time.Hour)}
	failed.Error = "send to fe80::1"
	for name, change := range map[string]func(*plan.Session){
		"router":     func(s *plan.Session) { s.Peer.Address = netip.MustParseAddr("fe80::2") },
		"interface":  func(s *plan.Session) { s.Peer.Interface = "eth2" },
		"source":     func(s *plan.Session) { s.Source = netip.MustParseAddr("fe80::11") },
		"multihop":   func(s *plan.Session) { s.Peer.BFD.MinimumTTL = 253 },
		"unnumbered": func(s *plan.Session) { s.Peer.Address = netip.Addr{} },
	} {
		t.Run(name, func(t *testing.T) {
			b, peers := &fakeBFD{states: map[string]bfd.Status{"tor": up}}, &fakePeers{down: map[string]string{}}
			d := NewDetector(b, peers, upToDate, slog.New(slog.DiscardHandler))
			d.Set(t.Context(), tor(true, func(s *plan.Session) { s.Peer.BFD.DetectMultiplier = 5 }))
			assert.Empty(t, peers.downs(), "the same path with other timers")
			d.Set(t.Context(), tor(true, change))
			assert.Equal(t, map[string]string{"tor": "waiting for BFD (strict)"}, peers.downs())
			b.states["tor"] = failed
			d.Set(t.Context(), tor(true, change))
			assert.Equal(t, map[string]string{"tor": "waiting for BFD (strict)"}, peers.downs())
			d.Set(t.Context(), tor(false, change))
			assert.Empty(t, peers.downs(), "the path before has failed")
			d.Set(t.Context(), tor(false, func(*plan.Session) {}))
			assert.Len(t, peers.downs(), 1, "this one has failed")
		})
	}
}

// A node that starts is not reached before all its sessions were up once, or time is up. What happens to
// them later changes nothing.
func TestReached(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		begin := func(names ...string) (*Detector, *fakePeers) {
			peers := &fakePeers{down: map[string]string{}}
			d := NewDetector(&fakeBFD{}, peers, upToDate, slog.New(slog.DiscardHandler))
			assert.False(t, d.Reached().OK, "nobody knows yet which sessions there are")
			sessions := map[string]plan.Session{}
			for _, name := range names {
				sessions[name] = plan.Session{Peer: &config.Peer{Name: name}}
			}
			d.Set(t.Context(), plan.BGP{Sessions: sessions})
			return d, peers
		}
		d, _ := begin()
		assert.True(t, d.Reached().OK, "there are no routers")

		d, peers := begin("tor1", "tor2")
		peers.peers = []bgp.Peer{{Name: "tor1", State: bgp.Established}, {Name: "tor2", State: bgp.Connect}}
		time.Sleep(firstSessions / 2)
		d.Set(t.Context(), plan.BGP{Sessions: d.sessions})
		c := d.Reached()
		assert.False(t, c.OK)
		assert.Equal(t, "waiting for BGP sessions, for 30s at most: tor2", c.Message)
		assert.NotContains(t, c.Public, "tor")
		peers.peers = []bgp.Peer{{Name: "tor1", State: bgp.Established}, {Name: "tor2", State: bgp.Established}}
		assert.True(t, d.Reached().OK)
		peers.peers = nil
		assert.True(t, d.Reached().OK, "what ends later")

		d, _ = begin("tor")
		time.Sleep(firstSessions)
		assert.False(t, d.Reached().OK)
		time.Sleep(1)
		assert.True(t, d.Reached().OK, "the router is away")
	})
}

// The problem of a session that is up is published and logged once. Events that change nothing wake
// neither BFD nor the Reporter.
func TestDetectorPublishesChangesOnce(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		log := &testnet.Log{}
		b := &fakeBFD{states: map[string]bfd.Status{"tor": {State: bfd.Up}}}
		peers := &fakePeers{down: map[string]string{}, peers: []bgp.Peer{{Name: "tor", State: bgp.Established}}}
		d := NewDetector(b, peers, upToDate, slog.New(slog.NewTextHandler(log, nil)))
		go d.Run(t.Context())
		want := plan.BGP{
			Sessions: map[string]plan.Session{"tor": {Peer: &config.Peer{Name: "tor", Address: netip.MustParseAddr("198.18.0.254"),
				BFD: &config.BFD{DetectMultiplier: 3}}}},
			Problems: map[string]plan.Problem{"tor": {Reason: plan.RouterIDShared, Message: "node n2 has it, too"}},
		}
		d.Set(t.Context(), want)
		synctest.Wait()
		assert.Equal(t, []report.Session{{Peer: "tor", Established: true, BFD: "Up", Message: "node n2 has it, too"}}, d.Sessions())
		changed, sets := d.Changed(), b.sets
		for range 20 {
			d.Set(t.Context(), want)
			b.change(func() {})
			peers.change(func() {})
			time.Sleep(50 * time.Millisecond)
			synctest.Wait()
		}
		assert.Equal(t, 1, strings.Count(log.String(), "BGP peer needs attention"))
		assert.Equal(t, sets, b.sets)
		select {
		case <-changed:
			t.Error("notified although nothing has changed")
		default:
		}
		b.change(func() { b.states["tor"] = bfd.Status{State: bfd.Down} })
		<-changed
		want.Problems = nil
		d.Set(t.Context(), want)
		synctest.Wait()
		assert.Contains(t, log.String(), "BGP peer needs no attention any more")
		assert.Empty(t, d.Sessions()[0].Message)
	})
}
