package bfd

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/lodestone-lb/lodestone/pkg/testnet"
	"github.com/lodestone-lb/lodestone/pkg/testnet/router"
)

// late is how much later than the detection time a process that shares two
// cores with all other tests may notice.
const late = 3 * time.Second

// interop is a node and somebody else's router, with sessions of every kind
// between them. Multihop sessions go through a third host.
type interop struct {
	*node
	t        *testing.T
	router   other
	segment  *testnet.Segment
	wire     *capture           // at the router
	sessions map[string]Session // the node's, by name
}

func newInterop(t *testing.T, start func(testing.TB, *testnet.Host, ...string) other, minTTL int) *interop {
	t.Helper()
	s := testnet.NewSegment(t, 3)
	node, there, hop := s.Hosts[0], s.Hosts[1], s.Hosts[2]
	for i, h := range []*testnet.Host{node, there} {
		h.Run("ip", "addr", "add", fmt.Sprintf("198.18.10.%d/32", i+1), "dev", "lo")
		h.Run("ip", "addr", "add", fmt.Sprintf("2001:db8:10::%d/128", i+1), "dev", "lo", "nodad")
		h.Run("ip", "addr", "add", fmt.Sprintf("fe80::%d/64", i+1), "dev", "eth0", "nodad")
		h.Run("ip", "route", "add", fmt.Sprintf("198.18.10.%d", 2-i), "via", "198.18.0.3", "src", fmt.Sprintf("198.18.10.%d", i+1))
		h.Run("ip", "route", "add", fmt.Sprintf("2001:db8:10::%d", 2-i), "via", "2001:db8::3", "src", fmt.Sprintf("2001:db8:10::%d", i+1))
		hop.Run("ip", "route", "add", fmt.Sprintf("198.18.10.%d", i+1), "via", fmt.Sprintf("198.18.0.%d", i+1))
		hop.Run("ip", "route", "add", fmt.Sprintf("2001:db8:10::%d", i+1), "via", fmt.Sprintf("2001:db8::%d", i+1))
	}
	hop.Run("sysctl", "-qw", "net.ipv4.ip_forward=1", "net.ipv6.conf.all.forwarding=1",
		"net.ipv4.conf.all.send_redirects=0", "net.ipv4.conf.eth0.send_redirects=0")
	return &interop{
		t: t, node: startNode(t, node), router: start(t, there, router.OwnProcessor...), segment: s, wire: startCapture(t, there, "eth0"),
		sessions: map[string]Session{
			"v4":          {Remote: addr("198.18.0.2")},
			"v6":          {Remote: addr("2001:db8::2"), Interface: "eth0"},
			"link-local":  {Remote: addr("fe80::2%eth0"), Local: addr("fe80::1")},
			"multihop v4": {Remote: addr("198.18.10.2"), Local: addr("198.18.10.1"), Multihop: true, MinTTL: minTTL},
			"multihop v6": {Remote: addr("2001:db8:10::2"), Multihop: true, MinTTL: minTTL},
		},
	}
}

// local is the node's address in a session.
func local(s Session) netip.Addr {
	b := s.Remote.WithZone("").AsSlice()
	b[len(b)-1] = 1
	a, _ := netip.AddrFromSlice(b)
	return a
}

// others returns the router's side of the sessions.
func (i *interop) others() (all []Session) {
	for _, name := range slices.Sorted(maps.Keys(i.sessions)) {
		s := i.sessions[name]
		o := s
		o.Remote, o.Local, o.Interface = local(s), s.Remote.WithZone(""), "eth0"
		if s.Multihop {
			o.Interface = ""
		}
		all = append(all, o)
	}
	return all
}

// retime changes the timers of both sides.
func (i *interop) retime(timers Timers) {
	i.t.Helper()
	for name, s := range i.sessions {
		s.Timers = timers
		i.sessions[name] = s
	}
	i.router.configure(i.others()...)
	i.set(i.sessions)
}

// awaitAll waits until all sessions go by the timers, on both sides.
func (i *interop) awaitAll(timers Timers) {
	i.t.Helper()
	for name := range i.sessions {
		i.await(name, fmt.Sprintf("be up with %v", timers), func(s Status) bool {
			return s.Up() && s.TransmitInterval == timers.TransmitInterval && s.ReceiveInterval == timers.ReceiveInterval &&
				s.DetectionTime == time.Duration(timers.DetectMultiplier)*timers.ReceiveInterval
		})
	}
	require.Eventually(i.t, func() bool {
		return !slices.ContainsFunc(i.others(), func(o Session) bool { return !i.router.up(o.Remote) })
	}, answerTimeout, 20*time.Millisecond, "the router is up, too")
	require.Eventually(i.t, func() bool {
		for _, s := range i.sessions {
			if !i.agreed(s, timers, true) || !i.agreed(s, timers, false) {
				return false
			}
		}
		return true
	}, answerTimeout, 20*time.Millisecond, "no Poll Sequence goes on: until it ends, a detection time may be that of the timers before")
}

// agreed reports whether the last packet of the router, or of the node, is a periodic one with these timers.
func (i *interop) agreed(s Session, timers Timers, router bool) bool {
	packets := i.wire.since(time.Time{}, func(p captured) bool {
		return p.outgoing == router && (router && p.to.Addr() == local(s) || !router && p.from.Addr() == local(s))
	})
	if len(packets) == 0 {
		return false
	}
	last := packets[len(packets)-1]
	return last.state == Up && !last.poll && !last.final &&
		last.desiredMinTx == timers.TransmitInterval && last.requiredMinRx == timers.ReceiveInterval
}

// transitions returns those of all sessions.
func (i *interop) transitions() map[string]uint64 {
	all := map[string]uint64{}
	for name, s := range i.States() {
		all[name] = s.Transitions
	}
	return all
}

// cut cuts the router's cable, and mends it. Links stay up: nobody hears of it
// but by silence.
func (i *interop) cut(timers Timers) {
	i.t.Helper()
	before := time.Now()
	i.segment.Switch.Run("ip", "link", "set", "p2", "nomaster")
	for name, session := range i.sessions {
		s := i.await(name, "notice that the link is cut", func(s Status) bool { return s.State == Down })
		require.Equal(i.t, Expired, s.Cause, name)
		require.True(i.t, s.Failed(), name)
		require.Equal(i.t, s.Since, s.Ended, name)
		require.Equal(i.t, DetectionTimeExpired, s.Diagnostic, name)
		detection := time.Duration(timers.DetectMultiplier) * timers.ReceiveInterval
		require.Equal(i.t, detection, s.DetectionTime, name)
		i.near(name, s.Since.Sub(s.LastReceived), detection)

		var down []captured
		require.Eventually(i.t, func() bool {
			down = i.wire.since(before, func(p captured) bool {
				return p.outgoing && p.to.Addr() == local(session) && p.state == Down
			})
			return len(down) > 0
		}, answerTimeout, 10*time.Millisecond, "%s: the router notices", name)
		ours := i.wire.since(time.Time{}, func(p captured) bool {
			return !p.outgoing && p.from.Addr() == local(session)
		})
		require.Equal(i.t, DetectionTimeExpired, down[0].diagnostic, name)
		i.near("the router of "+name, down[0].at.Sub(ours[len(ours)-1].at), detection)
	}
	i.segment.Switch.Run("ip", "link", "set", "p2", "master", "br0")
	i.awaitAll(timers)
}

// near fails unless a silence ended the session in time.
func (i *interop) near(name string, silence, detection time.Duration) {
	i.t.Helper()
	i.t.Logf("%s: down after %s of silence, detection time %s", name, silence.Round(time.Millisecond), detection)
	require.GreaterOrEqual(i.t, silence, detection-5*time.Millisecond, name) // two clocks
	require.Less(i.t, silence, detection+late, name)
}

func TestInterop(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		name   string
		start  func(testing.TB, *testnet.Host, ...string) other
		minTTL int   // of multihop sessions, with one host between
		off    Cause // when people switch BFD off
	}{
		{"FRR", startFRR, maxHops - 1, PeerAdminDown},
		// Multihop packets have the kernel's usual TTL, and BIRD never says AdminDown.
		{"BIRD", startBIRD, 64 - 1, Expired},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			i := newInterop(t, test.start, test.minTTL)
			for n, interval := range []time.Duration{300, 100, 50, 300} {
				timers := every(interval*time.Millisecond, 10) // a session outlives the moments in which a busy machine does other things
				before := i.transitions()
				i.retime(timers)
				i.awaitAll(timers)
				if n > 0 {
					require.Equal(t, before, i.transitions(), "new timers end no session")
				}
				i.cut(timers)
			}
			i.restart(every(300*time.Millisecond, 3))
			i.theySwitchOff(test.off)
			i.weSwitchOff()
			i.look()
		})
	}
}

// comesBack bounds the return of a session whose peer has lost it: the detection
// time, a packet of the slow rate, and what the handshake takes beside other tests.
const comesBack = 15 * time.Second

// restart: the router's BFD is killed and starts anew, with other discriminators
// and none of the node's. The sessions end by the detection time at the latest, and
// are back soon.
func (i *interop) restart(timers Timers) {
	i.t.Helper()
	i.retime(timers)
	i.awaitAll(timers)
	before := i.States()
	i.router.restart(i.others()...)
	started := time.Now()
	for name := range i.sessions {
		i.await(name, "come back after the restart", func(s Status) bool {
			return s.Up() && s.RemoteDiscriminator != before[name].RemoteDiscriminator
		})
	}
	i.awaitAll(timers)
	require.Less(i.t, time.Since(started), comesBack)
}

// theySwitchOff: people end the session on the router.
func (i *interop) theySwitchOff(cause Cause) {
	i.t.Helper()
	for _, o := range i.others() {
		i.router.switchOff(o)
	}
	for name := range i.sessions {
		s := i.await(name, "hear that the router switches off", func(s Status) bool { return !s.Up() })
		require.Equal(i.t, cause, s.Cause, name)
		require.Equal(i.t, cause != PeerAdminDown, s.Failed(), name)
	}
	i.retime(every(50*time.Millisecond, 3))
	i.awaitAll(every(50*time.Millisecond, 3))
}

// weSwitchOff: the same, from the node.
func (i *interop) weSwitchOff() {
	i.t.Helper()
	before := time.Now()
	i.set(nil)
	require.Empty(i.t, i.States())
	for name, s := range i.sessions {
		require.Eventually(i.t, func() bool {
			return !i.router.up(local(s))
		}, answerTimeout, 20*time.Millisecond, name)
		require.Eventually(i.t, func() bool {
			return len(i.wire.since(before, func(p captured) bool {
				return !p.outgoing && p.from.Addr() == local(s) && p.state == AdminDown && p.diagnostic == AdministrativelyDown
			})) == farewells
		}, answerTimeout, 20*time.Millisecond, name)
		answers := i.wire.since(before, func(p captured) bool {
			return p.outgoing && p.to.Addr() == local(s) && p.state != Up
		})
		require.NotEmpty(i.t, answers, name)
		require.Equal(i.t, Down, answers[0].state, name)
		require.Equal(i.t, NeighborSignaledDown, answers[0].diagnostic, name)
	}
	i.set(i.sessions)
	i.awaitAll(every(50*time.Millisecond, 3))
}

// look checks what RFC 5881 asks for of the node's packets.
func (i *interop) look() {
	i.t.Helper()
	for name, s := range i.sessions {
		status := i.States()[name]
		ours := i.wire.since(status.Since, func(p captured) bool { return !p.outgoing && p.from.Addr() == local(s) && p.state == Up })
		require.NotEmpty(i.t, ours, name)
		for _, p := range ours {
			require.Equal(i.t, status.Local.Port(), p.from.Port(), name)
			require.GreaterOrEqual(i.t, p.from.Port(), uint16(firstSourcePort), name)
			require.Equal(i.t, classSelector6, p.class, name)
			require.Equal(i.t, uint16(s.transport().port()), p.to.Port(), name)
			hops := maxHops
			if s.Multihop {
				hops--
			}
			require.Equal(i.t, hops, p.hops, name)
		}
	}
}
