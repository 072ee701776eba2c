package bfd

import (
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	dto "github.com/prometheus/client_model/go"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/lodestone-lb/lodestone/pkg/testnet"
)

func TestAdmit(t *testing.T) {
	t.Parallel()
	good := Session{Remote: addr("198.18.0.2"), Timers: every(300*ms, 3)}
	with := func(change func(*Session)) map[string]Session {
		s := good
		change(&s)
		return map[string]Session{"a": good, "b": s}
	}
	for want, sessions := range map[string]map[string]Session{
		`remote address "invalid IP": want a unicast address`: with(func(
			s *Session) {
			*s = Session{Timers: s.Timers}
		}),
		`remote address "224.0.0.1": want a unicast address`: with(func(
			s *Session) {
			s.Remote = addr("224.0.0.1")
		}),
		"local address 2001:db8::1 and remote address 198.18.0.2 are of different " +
			"families": with(func(s *Session) { s.Local = addr("2001:db8::1") }),
		"remote address fe80::1 is link-local: want an interface": with(func(s *Session) { s.Remote = addr("fe80::1") }),
		"minimum TTL 255: want 0 to 255, and 0 for single " +
			"hop": with(func(s *Session) { s.Remote = addr("198.18.0.3"); s.MinTTL = 255 }),
		"interval 999µs: want 1ms to 1h11m34.967295s, in whole " +
			"microseconds": with(func(s *Session) { s.Remote = addr("198.18.0.3"); s.ReceiveInterval = 999 * time.Microsecond }),
		"detect multiplier 256: want 1 to " +
			"255": with(func(s *Session) { s.Remote = addr("198.18.0.3"); s.DetectMultiplier = 256 }),
		`packets cannot be distinguished from those of peer "a"`: with(func(s *Session) { s.Interface = "eth0" }),
	} {
		possible, err := admit(sessions)
		require.ErrorContains(t, err, `BFD session of peer "b": `+want)
		require.Equal(t, map[string]Session{"a": good}, possible, "the other one is not concerned")
	}
	for name, change := range map[string]func(*Session){
		"multihop":             func(s *Session) { s.Multihop = true; s.MinTTL = 250 },
		"another remote":       func(s *Session) { s.Remote = addr("198.18.0.3") },
		"another family":       func(s *Session) { s.Remote = addr("fe80::1%eth0") },
		"the longest and most": func(s *Session) { s.Remote = addr("198.18.0.3"); s.Timers = every(longestInterval, 255) },
	} {
		possible, err := admit(with(change))
		require.NoError(t, err, name)
		require.Len(t, possible, 2)
	}
}

// heard is a Task without sockets, with a session of each kind that is Up.
func heard(t testing.TB) *Task {
	task := New(Options{Log: slog.New(slog.NewTextHandler(io.Discard, nil)), Registry: prometheus.NewRegistry()})
	require.NoError(t, task.apply(map[string]Session{
		"link":     {Remote: addr("fe80::2%eth0"), Timers: every(300*ms, 3)},
		"single":   {Remote: addr("198.18.0.2"), Local: addr("198.18.0.1"), Timers: every(300*ms, 3)},
		"multihop": {Remote: addr("198.18.0.2"), Multihop: true, MinTTL: 250, Timers: every(300*ms, 3)},
	}, epoch))
	for i, s := range task.sessions {
		s.link.ifindex = 5
		for _, state := range []State{Down, Init, Up} {
			s.receive(Packet{state: state, multiplier: 3, my: uint32(90 + i), your: s.machine.local, desiredMinTx: 300 * ms,
				requiredMinRx: 300 * ms}, epoch)
			s.machine.Advance(epoch)
		}
		require.Equal(t, Up, s.machine.state)
	}
	return task
}

func (t *Task) session(name string) *session {
	return t.sessions[slices.IndexFunc(t.sessions, func(s *session) bool { return s.name == name })]
}

// from is a datagram that ends a session: its peer is Down.
func (t *Task) from(name string) datagram {
	s := t.session(name)
	d := datagram{transport: s.want.transport(), from: s.want.Remote.WithZone(""), to: addr("198.18.0.1"), ifindex: 5, hops: maxHops}
	d.payload = Packet{state: Down, multiplier: 3, my: 91, your: s.machine.local, desiredMinTx: time.Second,
		requiredMinRx: time.Second}.marshal()
	return d
}

// forgeries are what somebody else could send, and why it changes nothing.
var forgeries = []struct {
	name, session string
	change        func(*datagram)
	why           Discard
}{
	{"one hop away", "single", func(d *datagram) { d.hops = 254 }, BadHops},
	{"unknown hops", "single", func(d *datagram) { d.hops = -1 }, BadHops},
	{"too many hops", "multihop", func(d *datagram) { d.hops = 249 }, BadHops},
	{"another sender", "single", func(d *datagram) { d.from = addr("198.18.0.3") }, WrongPath},
	{"another of our addresses", "single", func(d *datagram) { d.to = addr("198.18.0.9") }, WrongPath},
	{"another interface", "link", func(d *datagram) { d.ifindex = 6 }, WrongPath},
	{"the other port", "single", func(d *datagram) { d.multihop = true }, WrongPath},
	{"guessed discriminator", "single", func(d *datagram) { d.payload[9]++ }, UnknownDiscriminator},
	{"stranger without discriminator", "single", func(d *datagram) { clear(d.payload[8:12]); d.from = addr("198.18.0.3") }, UnknownPeer},
	{"peer's address, single hop", "single", func(d *datagram) { clear(d.payload[8:12]) }, Unproven},
	{"peer's address, multihop", "multihop", func(d *datagram) { clear(d.payload[8:12]) }, Unproven},
	{"peer's address, link-local", "link", func(d *datagram) { clear(d.payload[8:12]) }, Unproven},
	{"AdminDown without discriminator", "single",
		func(d *datagram) { clear(d.payload[8:12]); d.payload[1] = byte(AdminDown) << stateShift }, Unproven},
	{"link-local stranger", "link", func(d *datagram) { clear(d.payload[8:12]); d.ifindex = 6 }, UnknownPeer},
	{"Up without discriminator", "single", func(d *datagram) { clear(d.payload[8:12]); d.payload[1] = byte(Up) << stateShift },
		NoYourDiscriminator},
	{"authenticated", "single", func(d *datagram) {
		d.payload = append(d.payload, 1, 2)
		d.payload[1] |= flagAuthentication
		d.payload[3] = 26
	}, Authenticated},
	{"another version", "single", func(d *datagram) { d.payload[0] = 2 << versionShift }, BadVersion},
	{"cut off", "single", func(d *datagram) { d.payload = d.payload[:20] }, BadLength},
	{"no multiplier", "single", func(d *datagram) { d.payload[2] = 0 }, NoMultiplier},
	{"multipoint", "single", func(d *datagram) { d.payload[1] |= flagMultipoint }, MultipointSet},
	{"no discriminator of its own", "single", func(d *datagram) { clear(d.payload[4:8]) }, NoMyDiscriminator},
}

func TestForgeriesChangeNothing(t *testing.T) {
	t.Parallel()
	counted := map[Discard]bool{}
	for _, test := range forgeries {
		task := heard(t)
		d := task.from(test.session)
		test.change(&d)
		before := task.machines()
		task.hear(d, epoch.Add(time.Second))
		require.Equal(t, before, task.machines(), test.name)
		for i, why := range discards {
			want := uint64(0)
			if why == test.why {
				want = 1
			}
			require.Equal(t, want, task.discarded[i].Load(), "%s: %s", test.name, why)
		}
		counted[test.why] = true
	}
	require.Len(t, counted, len(discards), "every reason is tried")

	for _, name := range []string{"single", "multihop", "link"} {
		task := heard(t)
		task.hear(task.from(name), epoch)
		require.Equal(t, Down, task.session(name).machine.state, "the packet itself is good")
	}
}

// machines are copies of all state machines, without what cannot be compared.
func (t *Task) machines() map[string]Machine {
	all := map[string]Machine{}
	for _, s := range t.sessions {
		m := *s.machine
		m.random = nil
		all[s.name] = m
	}
	return all
}

// FuzzReceive: whatever comes, only the session that it is for may change, and
// only if the packet has no fault.
func FuzzReceive(f *testing.F) {
	task := heard(f)
	for _, test := range forgeries {
		d := task.from(test.session)
		test.change(&d)
		f.Add(d.payload, d.multihop, d.hops, d.ifindex, d.from.AsSlice(), uint8(0))
	}
	for i, b := range corpus() {
		f.Add(b, i%2 == 0, maxHops, 5, task.session("single").want.Remote.AsSlice(), uint8(i))
	}
	f.Fuzz(func(t *testing.T, payload []byte, multihop bool, hops, ifindex int, from []byte, known uint8) {
		task := heard(t)
		d := task.from([]string{"link", "single", "multihop"}[known%3])
		if len(payload) >= packetLength && known&0x80 == 0 { // else no guess ever hits
			copy(payload[8:12], d.payload[8:12])
		}
		if a, ok := netip.AddrFromSlice(from); ok && known&0x40 != 0 {
			d.from, d.v6 = a, a.Is6()
		}
		d.payload, d.multihop, d.hops, d.ifindex = payload, multihop, hops, ifindex
		before := task.machines()
		s, p, why := task.classify(d)
		now := epoch.Add(time.Second)
		task.hear(d, now)
		for name, m := range task.machines() {
			if s == nil || s.name != name {
				require.Equal(t, before[name], m, "%s: %s", name, why)
			}
		}
		if s == nil {
			require.NotEqual(t, used, why)
			return
		}
		require.True(t, d.hops == maxHops || s.want.Multihop && d.hops >= 250)
		require.True(t, p.your == s.machine.local || p.your == 0 && p.state <= Down)
		require.Equal(t, s.want.Remote.WithZone(""), d.from)
		require.Equal(t, p.my, s.machine.remote)
		answers := 0
		for ; answers < 3; answers++ {
			if _, sent := s.machine.Advance(now); !sent {
				break
			}
		}
		require.LessOrEqual(t, answers, 1, "one packet makes at most one")
		require.False(t, s.machine.Deadline().Before(now) && answers == 0, "the loop does not spin")
	})
}

func pair(t *testing.T) (s *testnet.Segment, a, b *node) {
	t.Helper()
	s = testnet.NewSegment(t, 3)
	a, b = startNode(t, s.Hosts[0]), startNode(t, s.Hosts[1])
	return s, a, b
}

func TestSet(t *testing.T) {
	t.Parallel()
	_, a, b := pair(t)
	v4 := func(last int, timers Timers) Session {
		return Session{Remote: addr(fmt.Sprintf("198.18.0.%d", last)), Timers: timers}
	}
	v6 := func(last int, timers Timers) Session {
		return Session{Remote: addr(fmt.Sprintf("2001:db8::%d", last)), Timers: timers}
	}
	want := map[string]Session{"four": v4(2, within(50*ms)), "six": v6(2, within(50*ms))}
	a.set(want)
	b.set(map[string]Session{"four": v4(1, within(50*ms)), "six": v6(1, within(50*ms))})
	four, six := a.awaitUp("four"), a.awaitUp("six")
	b.awaitUp("four")
	b.awaitUp("six")

	changed := a.Changed()
	a.set(maps.Clone(want))
	select {
	case <-changed:
		t.Fatal("the same set changes nothing")
	default:
	}

	want["four"] = v4(2, every(80*ms, 60))
	a.set(want)
	now := a.await("four", "go by the new timers", func(s Status) bool { return s.DetectionTime == 60*80*ms && s.TransmitInterval == 80*ms })
	require.Equal(t, four.Discriminator, now.Discriminator)
	require.EqualValues(t, 1, now.Transitions)

	delete(want, "four")
	a.set(want)
	require.NotContains(t, a.States(), "four")
	end := b.await("four", "hear that the session was removed", func(s Status) bool { return !s.Up() })
	require.Equal(t, PeerAdminDown, end.Cause)
	require.False(t, end.Failed())
	require.Equal(t, AdministrativelyDown, end.RemoteDiagnostic)

	want["four"] = v4(2, within(50*ms))
	a.set(want)
	again := a.awaitUp("four")
	require.NotEqual(t, four.Discriminator, again.Discriminator)
	b.awaitUp("four")

	now = a.States()["six"]
	require.Equal(t, six.Discriminator, now.Discriminator)
	require.EqualValues(t, 1, now.Transitions, "the other session is not concerned")

	err := a.Set(t.Context(), map[string]Session{"six": want["six"], "bad": {}})
	require.ErrorContains(t, err, `BFD session of peer "bad"`)
	require.True(t, a.States()["six"].Up())
	a.set(want)

	start := time.Now()
	a.stop()
	require.Less(t, time.Since(start), answerTimeout)
	for _, name := range []string{"four", "six"} {
		s := b.await(name, "hear of the planned end", func(s Status) bool { return !s.Up() })
		require.Equal(t, PeerAdminDown, s.Cause)
	}
	require.ErrorIs(t, a.Set(t.Context(), nil), ErrStopped)
}

// dialWithHops opens a connection whose packets have that TTL or hop limit, and are from an address if one is given.
func dialWithHops(t *testing.T, h *testnet.Host, to string, hops int, from string) (c net.Conn) {
	t.Helper()
	require.NoError(t, h.Do(func() (err error) {
		if c, err = (&net.Dialer{LocalAddr: &net.UDPAddr{IP: net.ParseIP(from)}}).Dial("udp", to); err != nil {
			return err
		}
		raw, err := c.(*net.UDPConn).SyscallConn()
		require.NoError(t, err)
		return raw.Control(func(fd uintptr) {
			o := option{unix.IPPROTO_IP, unix.IP_TTL, hops}
			if strings.HasPrefix(to, "[") {
				o = option{unix.IPPROTO_IPV6, unix.IPV6_UNICAST_HOPS, hops}
			}
			require.NoError(t, setOptions(int(fd), o))
		})
	}))
	t.Cleanup(func() { c.Close() })
	return c
}

// TestForgedOnTheWire: what the kernel tells of a packet's way is used.
func TestForgedOnTheWire(t *testing.T) {
	t.Parallel()
	s, a, b := pair(t)
	for _, v6 := range []bool{false, true} {
		remote, local := "198.18.0.2", "198.18.0.1"
		if v6 {
			remote, local = "2001:db8::2", "2001:db8::1"
		}
		a.set(map[string]Session{"b": {Remote: addr(remote), Timers: within(100 * ms)}})
		b.set(map[string]Session{"a": {Remote: addr(local), Timers: within(100 * ms)}})
		up := a.awaitUp("b")
		forged := Packet{state: Down, multiplier: 3, my: up.RemoteDiscriminator, your: up.Discriminator}
		sendTo := func(h *testnet.Host, hops int) {
			c := dialWithHops(t, h, net.JoinHostPort(local, "3784"), hops, "")
			defer c.Close()
			_, err := c.Write(forged.marshal())
			require.NoError(t, err)
		}
		hops, path := a.discards(BadHops), a.discards(WrongPath)
		sendTo(s.Hosts[1], 254) // from the peer's address, by way of a router
		sendTo(s.Hosts[2], 255) // from a neighbour
		require.Eventually(t, func() bool {
			return a.discards(BadHops) == hops+1 && a.discards(WrongPath) == path+1
		}, answerTimeout, ms)
		require.True(t, a.States()["b"].Up())
		require.EqualValues(t, 1, a.States()["b"].Transitions)

		unproven := a.discards(Unproven)
		for _, state := range []State{Down, AdminDown} {
			forged.my, forged.your, forged.state = 77, 0, state
			sendTo(s.Hosts[1], 255) // by a neighbour that forges the peer's address and does not know the discriminator
		}
		require.Eventually(t, func() bool { return a.discards(Unproven) == unproven+2 }, answerTimeout, ms)
		require.True(t, a.States()["b"].Up())
		require.EqualValues(t, 1, a.States()["b"].Transitions)

		forged.your, forged.state = up.Discriminator, Down
		sendTo(s.Hosts[1], 255) // as if from the peer itself
		require.Equal(t, PeerDown, a.await("b", "believe its peer", func(s Status) bool { return s.Transitions > 1 }).Cause)
	}
}

func (n *node) discards(why Discard) uint64 { return n.discarded[slices.Index(discards, why)].Load() }

// TestFlood: a neighbour that sends as fast as it can ends no session.
func TestFlood(t *testing.T) {
	t.Parallel()
	s, a, b := pair(t)
	a.set(map[string]Session{"b": {Remote: addr("198.18.0.2"), Timers: within(100 * ms)}})
	b.set(map[string]Session{"a": {Remote: addr("198.18.0.1"), Timers: within(100 * ms)}})
	a.awaitUp("b")
	b.awaitUp("a")
	forged := Packet{state: Down, multiplier: 3, my: 1, your: a.States()["b"].Discriminator}.marshal()
	require.NoError(t, s.Hosts[2].Do(func() error {
		c, err := net.Dial("udp", "198.18.0.1:3784")
		if err != nil {
			return err
		}
		defer c.Close()
		for range 50_000 {
			if _, err := c.Write(forged); err != nil {
				return err
			}
		}
		return nil
	}))
	require.Eventually(t, func() bool { return a.discards(BadHops) > 100 }, answerTimeout, ms)
	received := a.States()["b"].Received
	require.Eventually(t, func() bool { return a.States()["b"].Received > received+5 }, answerTimeout, 10*ms)
	require.EqualValues(t, 1, a.States()["b"].Transitions)
}

// TestStalled: a process that did not get to run for longer than the Detection
// Time reads what its peer sent meanwhile before it decides.
func TestStalled(t *testing.T) {
	t.Parallel()
	s := testnet.NewSegment(t, 2)
	patient := Timers{TransmitInterval: 100 * ms, ReceiveInterval: 100 * ms, DetectMultiplier: 100}
	hasty := Timers{TransmitInterval: 100 * ms, ReceiveInterval: 100 * ms, DetectMultiplier: 25}
	// The stalled node goes by the peer's multiplier, and the peer by its.
	peer := startNode(t, s.Hosts[1])
	peer.set(map[string]Session{"peer": {Remote: addr("198.18.0.1"), Timers: hasty}})
	stalled := startChild(t, s.Hosts[0], map[string]Session{"peer": {Remote: addr("198.18.0.2"), Timers: patient}})
	peer.awaitUp("peer")
	sent := func() uint64 { return peer.States()["peer"].Sent }
	stalled.signal(unix.SIGSTOP)
	for start := sent(); sent() < start+35; {
		time.Sleep(10 * ms)
	}
	stalled.signal(unix.SIGCONT)
	received := peer.States()["peer"].Received
	require.Eventually(t, func() bool { return peer.States()["peer"].Received > received+5 }, answerTimeout, 10*ms)
	require.EqualValues(t, 1, peer.States()["peer"].Transitions)
	require.Equal(t, map[string]uint64{"peer": 1}, stalled.end())
}

// TestTrouble: what the node lacks is told, and used once it is there.
func TestTrouble(t *testing.T) {
	t.Parallel()
	s, a, b := pair(t)
	a.set(map[string]Session{"b": {Remote: addr("198.18.0.2"), Interface: "eth1", Timers: every(50*ms, 10)}})
	complains := func(text string) func(Status) bool {
		return func(s Status) bool { return assert.ObjectsAreEqual(text, s.Error) }
	}
	a.await("b", "miss the interface", complains(`look up interface "eth1": no such device`))
	host := s.Hosts[0]
	host.Run("ip", "addr", "flush", "dev", "eth0")
	s.Plug(host, "eth1")
	noAddress := complains(`find the way to 198.18.0.2: interface "eth1" has no address to send from`)
	a.await("b", "miss the address", noAddress)
	host.Run("ip", "addr", "add", "198.18.0.1/24", "dev", "eth1")
	a.await("b", "find nobody", complains("198.18.0.2 refuses packets to UDP port 3784, IPv4: BFD does not run there, or not for this "+
		"session"))

	var squatter net.PacketConn
	require.NoError(t, s.Hosts[1].Do(func() (err error) {
		squatter, err = net.ListenPacket("udp4", ":3784")
		return err
	}))
	b.set(map[string]Session{"a": {Remote: addr("198.18.0.1"), Timers: every(50*ms, 10)}})
	b.await("a", "miss the port", complains("listen on UDP port 3784, IPv4: address already in use: another BFD daemon runs on this node"))
	require.NoError(t, squatter.Close())
	require.Empty(t, a.awaitUp("b").Error)
	require.Empty(t, b.awaitUp("a").Error)

	// The interface is replaced by another one of the same name.
	host.Run("ip", "link", "del", "eth1")
	a.await("b", "notice", func(s Status) bool { return s.Failed() && s.Error != "" })
	s.Plug(host, "eth1")
	a.await("b", "miss the address again", noAddress)
	host.Run("ip", "addr", "add", "198.18.0.1/24", "dev", "eth1")
	require.Empty(t, a.awaitUp("b").Error)
}

func TestMetrics(t *testing.T) {
	t.Parallel()
	_, a, b := pair(t)
	a.set(map[string]Session{"b": {Remote: addr("198.18.0.2"), Timers: within(50 * ms)}})
	b.set(map[string]Session{"a": {Remote: addr("198.18.0.1"), Timers: within(50 * ms)}})
	a.awaitUp("b")
	problems, err := testutil.GatherAndLint(a.registry)
	require.NoError(t, err)
	require.Empty(t, problems)
	b.set(nil)
	a.await("b", "hear that it is over", func(s Status) bool { return !s.Up() })
	value := func(name string, labels map[string]string) float64 {
		families, err := a.registry.Gather()
		require.NoError(t, err)
		for _, f := range families {
			for _, m := range f.GetMetric() {
				has := map[string]string{}
				for _, l := range m.GetLabel() {
					has[l.GetName()] = l.GetValue()
				}
				if f.GetName() == name && maps.Equal(has, labels) {
					return m.GetCounter().GetValue() + m.GetGauge().GetValue() + float64(m.GetHistogram().GetSampleCount())
				}
			}
		}
		t.Fatalf("there is no metric %s %v", name, labels)
		return 0
	}
	require.Zero(t, value(metricUp, map[string]string{"peer": "b"}))
	require.EqualValues(t, 1, value(metricTransitions, map[string]string{"peer": "b", "reason": "up"}))
	require.EqualValues(t, 1, value(metricTransitions, map[string]string{"peer": "b", "reason": "peer_admin_down"}))
	require.Zero(t, value(metricTransitions, map[string]string{"peer": "b", "reason": "detection_time_expired"}))
	require.NotZero(t, value(metricPackets, map[string]string{"peer": "b", "direction": "received"}))
	require.NotZero(t, value(metricPackets, map[string]string{"peer": "b", "direction": "sent"}))
	require.NotZero(t, value(metricGaps, map[string]string{"peer": "b"}))
	require.Zero(t, value(metricDiscarded, map[string]string{"reason": "hops"}))
}

// Gaps between packets count while the session is Up, as shares of the interval.
func TestGaps(t *testing.T) {
	t.Parallel()
	s := &session{machine: NewMachine(every(100*ms, 3), 1, func() float64 { return 0 }, epoch), counters: counters{gaps: newGaps("b")}}
	now := epoch
	hear := func(after time.Duration, state State) {
		now = now.Add(after)
		s.receive(Packet{state: state, my: 2, your: 1, multiplier: 3, desiredMinTx: 100 * ms, requiredMinRx: 100 * ms}, now)
	}
	hear(0, Down)
	hear(900*ms, Init)
	require.Equal(t, Up, s.machine.state)
	for _, gap := range []time.Duration{75, 100, 120, 250, 290} {
		hear(gap*ms, Up)
	}
	var got dto.Metric
	require.NoError(t, s.counters.gaps.Write(&got))
	h := got.GetHistogram()
	require.EqualValues(t, 5, h.GetSampleCount())
	require.InDelta(t, 8.35, h.GetSampleSum(), 1e-9)
	var buckets []uint64
	for _, b := range h.GetBucket() {
		buckets = append(buckets, b.GetCumulativeCount())
	}
	require.Equal(t, []uint64{0, 1, 1, 2, 2, 3, 3, 3, 4, 5}, buckets)
}
