package layer2

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	arppacket "github.com/mdlayher/arp"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/lodestone-lb/lodestone/speaker/layer2/segment"
	"github.com/lodestone-lb/lodestone/speaker/layer2/wire"
	"github.com/lodestone-lb/lodestone/speaker/netstate"
	"github.com/lodestone-lb/lodestone/speaker/plan"
)

// when returns the times of frames in milliseconds, by interface and VIP.
func when(t *testing.T, frames []frame) string {
	t.Helper()
	var s []string
	for _, f := range frames {
		s = append(s, fmt.Sprintf("%s %s %d", f.on, f.vip(t), f.at.Milliseconds()))
	}
	slices.Sort(s)
	return strings.Join(slices.Compact(s), ", ")
}

// A takeover is announced at once in both forms, repeated over four seconds, and
// then nothing is sent, however often Set is called.
func TestTakeover(t *testing.T) {
	t.Parallel()
	inWorld(t, func(t *testing.T, w *world) {
		w.set(everywhere(vipA))
		first := w.after(0)
		if len(first) != 4 {
			t.Fatalf("at once: %d frames, want a request and a reply on each of two interfaces", len(first))
		}
		slices.SortStableFunc(first, func(f, g frame) int { return cmp.Compare(f.on, g.on) }) // interfaces do not wait for each other
		for i, f := range first[:2] {
			e, p := f.packet(t)
			op := arppacket.Operation(i + 1)
			if hardwareAddr(e.Destination) != broadcast || e.Source.String() != p.SenderHardwareAddr.String() ||
				p.Operation != op || p.SenderIP != vipA || p.TargetIP != vipA {
				t.Errorf("not a gratuitous %v: %+v", op, p)
			}
			want := (map[bool]mac{true: {}, false: hardwareAddr(e.Source)})[op == arppacket.OperationRequest]
			if hardwareAddr(p.TargetHardwareAddr) != want {
				t.Errorf("%v has target %v, want %v", op, p.TargetHardwareAddr, want)
			}
		}
		for range 1000 {
			w.set(everywhere(vipA))
		}
		if got, want := when(t, w.after(time.Hour)),
			"eth0 198.18.0.100 100, eth0 198.18.0.100 1000, eth0 198.18.0.100 2000, eth0 198.18.0.100 4000, "+
				"eth1 198.18.0.100 100, eth1 198.18.0.100 1000, eth1 198.18.0.100 2000, eth1 198.18.0.100 4000"; got != want {
			t.Errorf("repeated at\n%s, want\n%s", got, want)
		}
		w.set(everywhere(vipA))
		if more := w.after(time.Hour); len(more) > 0 {
			t.Errorf("%d frames though nothing changed", len(more))
		}
		if n := strings.Count(w.log.String(), "level=INFO"); n != 1 {
			t.Errorf("%d lines of info for one transition:\n%s", n, &w.log)
		}
	}, eth(1, "eth0"), eth(2, "eth1"))
}

func TestWithdrawalEndsTheAnnouncement(t *testing.T) {
	t.Parallel()
	inWorld(t, func(t *testing.T, w *world) {
		w.set(everywhere(vipA, vipB))
		w.after(500 * time.Millisecond)
		w.set(everywhere(vipB))
		if got := when(t, w.after(time.Minute)); strings.Contains(got, vipA.String()) {
			t.Errorf("announced after withdrawal: %s", got)
		}
		w.set(nil)
		if len(w.conns) != 0 {
			t.Errorf("%d sockets open without a VIP", len(w.conns))
		}
		// Owned again half way through the old schedule: there is only the new one.
		w.restart()
		w.set(everywhere(vipA))
		w.after(500 * time.Millisecond)
		w.set(everywhere(vipB))
		w.set(everywhere(vipA, vipB))
		got := when(t, slices.DeleteFunc(w.after(time.Minute), func(f frame) bool { return f.vip(t) != vipA }))
		if want := "eth0 198.18.0.100 1500, eth0 198.18.0.100 2500, eth0 198.18.0.100 4500, eth0 198.18.0.100 500, eth0 198.18.0.100 " +
			"600"; got != want {
			t.Errorf("announced at %s, want %s", got, want)
		}
	}, eth(1, "eth0"))
}

// Five thousand VIPs are announced within the pace; first announcements come before repeated
// ones; one more VIP in the middle does not wait for the others' repetitions.
func TestPace(t *testing.T) {
	t.Parallel()
	inWorld(t, func(t *testing.T, w *world) {
		want := map[netip.Addr]plan.Layer2{}
		for vip := netip.MustParseAddr("198.19.0.0"); len(want) < 5000; vip = vip.Next() {
			want[vip] = plan.Layer2{}
		}
		w.set(want)
		time.Sleep(1500 * time.Millisecond)
		want[vipA] = plan.Layer2{}
		w.set(want)
		frames := w.after(time.Minute)

		seen := map[netip.Addr]int{}
		var all time.Duration
		for i, f := range frames {
			vip := f.vip(t)
			seen[vip]++
			if seen[vip] == 1 {
				if vip == vipA {
					if late := f.at - 1500*time.Millisecond; late > 2*time.Millisecond {
						t.Errorf("the late VIP waited %v", late)
					}
				} else if len(seen) == 5000 {
					all = f.at
				}
			}
			if n := len(seen); seen[vip] > 2 && n < 5000 {
				t.Fatalf("%s repeated when %d VIPs wait for their first announcement", vip, 5000-n)
			}
			// No window holds more than the rate and the burst.
			if back := i - 2*burstFrames; back >= 0 {
				if d := f.at - frames[back].at; d < burstFrames*time.Second/framesPerSecond {
					t.Fatalf("%d frames in %v", 2*burstFrames+1, d)
				}
			}
		}
		if all < 900*time.Millisecond || all > 1100*time.Millisecond {
			t.Errorf("all announced after %v, want about a second", all)
		}
		for vip := range want {
			if seen[vip] != 2*len(segment.Schedule) {
				t.Fatalf("%s: %d frames, want %d", vip, seen[vip], 2*len(segment.Schedule))
			}
		}
	}, eth(1, "eth0"))
}

// A VIP that is withdrawn before its turn holds up no other.
func TestWithdrawnMakeRoom(t *testing.T) {
	t.Parallel()
	inWorld(t, func(t *testing.T, w *world) {
		want := everywhere(vipB)
		for vip := netip.MustParseAddr("198.19.0.0"); len(want) < 5000; vip = vip.Next() {
			want[vip] = plan.Layer2{}
		}
		w.set(want)
		w.after(100 * time.Millisecond)
		w.set(everywhere(vipA, vipB))
		if got := w.after(5 * time.Millisecond); !slices.ContainsFunc(got, func(f frame) bool { return f.vip(t) == vipA }) {
			t.Errorf("not announced in 5 ms; %d frames were", len(got))
		}
	}, eth(1, "eth0"))
}

func TestRefresh(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w, stop := newWorld(t, nil, eth(1, "eth0"))
		defer stop()
		w.set(map[netip.Addr]plan.Layer2{vipA: {Refresh: 10 * time.Minute}})
		w.after(5 * time.Second)
		w.receive("eth0", arpFrame(arppacket.OperationReply, broadcast, clientMAC, vipA, clientMAC, vipA)) // defended once
		if got, want := when(t, w.after(25*time.Minute)),
			"eth0 198.18.0.100 1204000, eth0 198.18.0.100 6000, eth0 198.18.0.100 604000"; got != want {
			t.Errorf("refreshed and defended at %s, want %s", got, want)
		}
	})
}

// Intervals may differ, and end.
func TestRefreshOfSeveralVIPs(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w, stop := newWorld(t, nil, eth(1, "eth0"))
		defer stop()
		often, seldom := plan.Layer2{Refresh: 10 * time.Second}, plan.Layer2{Refresh: time.Hour}
		w.set(map[netip.Addr]plan.Layer2{vipA: seldom, vipB: often})
		since := w.Status().VIPs[1].Since
		w.after(6 * time.Second)
		count := func(frames []frame) map[netip.Addr]int {
			n := map[netip.Addr]int{}
			for _, f := range frames {
				n[f.vip(t)]++
			}
			return n
		}
		if got := count(w.after(time.Minute)); got[vipA] != 0 || got[vipB] != 2*6 {
			t.Errorf("frames in a minute: %v", got)
		}
		w.set(map[netip.Addr]plan.Layer2{vipA: seldom, vipB: {}})
		w.after(6 * time.Second)
		if got := count(w.after(2 * time.Hour)); got[vipA] != 2*2 || got[vipB] != 0 {
			t.Errorf("frames in two hours: %v", got)
		}
		if got := w.Status().VIPs[1].Since; got != since {
			t.Errorf("owned since %v, was %v", got, since)
		}
	})
}

// An interface that appears, comes up or changes its MAC gets the VIPs
// already owned, at once; the others hear nothing.
func TestInterfacesComeAndGo(t *testing.T) {
	t.Parallel()
	inWorld(t, func(t *testing.T, w *world) {
		expect := func(what, want string) {
			t.Helper()
			if got := when(t, w.after(0)); got != want {
				t.Errorf("%s: announced %q, want %q", what, got, want)
			}
			w.after(time.Minute)
		}
		w.set(map[netip.Addr]plan.Layer2{vipA: {Interfaces: []string{"eth*"}}})
		expect("no interface matches", "")
		if s := w.Status().VIPs[0]; s.Reason != NoInterface {
			t.Errorf("reason %q, want %q", s.Reason, NoInterface)
		}
		eth0, eth1 := eth(1, "eth0"), eth(2, "eth1")
		w.become(eth0)
		expect("eth0 appears", "eth0 198.18.0.100 0")
		w.become(eth0, eth1)
		expect("eth1 appears", "eth1 198.18.0.100 0")
		down := eth1
		down.Up = false
		w.become(eth0, down)
		expect("eth1 goes down", "")
		w.become(eth0, eth1)
		expect("eth1 comes up", "eth1 198.18.0.100 0")
		eth0.HardwareAddr = clientMAC[:]
		w.become(eth0, eth1)
		expect("eth0 changes its MAC", "eth0 198.18.0.100 0")
		eth1.MTU = 9000
		w.become(eth0, eth1, eth(3, "veth123"))
		expect("something else changes", "")
		w.become(eth1)
		w.restart()
		w.set(map[netip.Addr]plan.Layer2{vipA: {Interfaces: []string{"eth1", "veth*"}}})
		expect("patterns change but not where it is announced", "")
		w.become(eth1, eth(3, "veth123"))
		expect("the pattern names what is not announced on by default", "veth123 198.18.0.100 0")
	})
}

// Errors of one interface do not affect the others.
func TestOneInterfaceFails(t *testing.T) {
	t.Parallel()
	inWorld(t, func(t *testing.T, w *world) {
		w.set(everywhere(vipA))
		w.after(time.Minute)
		w.restart()
		w.fail("eth0", unix.ENXIO)
		w.conn("eth0").broken <- unix.ENETDOWN
		w.after(0)
		s := w.Status()
		if s.Interfaces[0].Error == "" || s.Interfaces[1].Error != "" || !slices.Equal(s.VIPs[0].Interfaces, []string{"eth1"}) {
			t.Errorf("status %+v", s)
		}
		w.receive("eth1", ask(vipA, clientIP, broadcast))
		if got := w.after(0); len(got) != 1 || got[0].on != "eth1" {
			t.Errorf("eth1 sent %d frames, want its answer", len(got))
		}
		before := w.opens.Load()
		w.after(10 * time.Minute)
		if n := w.opens.Load() - before; n < 20 || n > 35 {
			t.Errorf("opened %d times in ten minutes, want a back-off up to %v", n, lastRetry)
		}
		if n := strings.Count(w.log.String(), "level=WARN"); n != 1 {
			t.Errorf("%d warnings, want 1:\n%s", n, &w.log)
		}
		w.fail("eth0", nil)
		w.restart()
		if got := w.after(lastRetry); len(got) != 10 || got[0].on != "eth0" {
			t.Errorf("eth0 is back with %s", when(t, got))
		}
		if s := w.Status(); s.Interfaces[0].Error != "" || len(s.VIPs[0].Interfaces) != 2 {
			t.Errorf("status %+v", s)
		}
	}, eth(1, "eth0"), eth(2, "eth1"))
}

func TestAllInterfacesFail(t *testing.T) {
	t.Parallel()
	inWorld(t, func(t *testing.T, w *world) {
		w.fail("eth0", unix.EMFILE)
		w.set(everywhere(vipA))
		if s := w.Status().VIPs[0]; s.Reason != InterfaceFailed {
			t.Errorf("reason %q, want %q", s.Reason, InterfaceFailed)
		}
	}, eth(1, "eth0"))
}

func TestMissingCapabilityEndsRun(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w, stop := newWorld(t, nil, eth(1, "eth0"))
		w.fail("eth0", unix.EPERM)
		w.set(everywhere(vipA))
		if err := w.Set(t.Context(), nil); !errors.Is(err, ErrStopped) {
			t.Errorf("set after the end: %v", err)
		}
		if err := stop(); !errors.Is(err, unix.EPERM) || !strings.Contains(err.Error(), `"eth0"`) {
			t.Errorf("run: %v", err)
		}
	})
}

func TestConflict(t *testing.T) {
	t.Parallel()
	inWorld(t, func(t *testing.T, w *world) {
		w.set(everywhere(vipA))
		w.after(time.Minute)
		claim := arpFrame(arppacket.OperationReply, broadcast, clientMAC, vipA, clientMAC, vipA)
		w.restart()
		for range 25 {
			w.receive("eth0", claim)
			time.Sleep(time.Second)
			synctest.Wait()
		}
		assert.Equal(t, []Conflict{{VIP: vipA, Interface: "eth0", HardwareAddr: clientMAC.String(), Announced: true,
			Seen: time.Now().Add(-time.Second)}}, w.Conflicts())
		if n := strings.Count(w.log.String(), "level=WARN"); n != 3 {
			t.Errorf("%d warnings in 25 s, want 3", n)
		}
		if got, want := when(t, w.take()), "eth0 198.18.0.100 1000, eth0 198.18.0.100 11000, eth0 198.18.0.100 21000"; got != want {
			t.Errorf("defended at %s, want %s", got, want)
		}
		if n := testutil.ToFloat64(w.metrics.conflicts.WithLabelValues("eth0", "IPv4")); n != 25 {
			t.Errorf("%s is %v", metricConflicts, n)
		}
		// What this node sends on eth1 comes back on eth0 when both are on one
		// segment.
		m := hardwareAddr(eth(2, "eth1").HardwareAddr)
		for _, f := range (wire.ARP{}).Announce(statement{Self: m, VIP: vipA}, true) {
			w.receive("eth0", f)
		}
		w.receive("eth0", arpFrame(arppacket.OperationRequest, broadcast, m, clientIP, mac{}, vipA))
		assert.Empty(t, w.after(0), "the node's own packets are answered")
		assert.EqualValues(t, 25, testutil.ToFloat64(w.metrics.conflicts.WithLabelValues("eth0", "IPv4")), "they are no conflicts")
		w.after(conflictMemory + time.Second)
		assert.Empty(t, w.Conflicts(), "of long ago")
	}, eth(1, "eth0"), eth(2, "eth1"))
}

// A host asks whether the VIP is in use, and takes it although the node answers. The question is
// reported and does not count as a claim; the claim is contradicted like any other.
func TestClaimAfterAQuestion(t *testing.T) {
	t.Parallel()
	inWorld(t, func(t *testing.T, w *world) {
		w.set(everywhere(vip6))
		w.after(time.Minute)
		question := coldQuery(clientMAC, vip6)
		question.source, question.options = unspec, nil
		w.receive("eth0 IPv6", question.frame())
		assert.Len(t, w.after(3*time.Second), 1, "the answer, and nothing else")
		assert.Len(t, w.Conflicts(), 1)

		w.restart()
		for range 12 {
			w.receive("eth0 IPv6", wire.NDP{}.Announce(statement{Self: clientMAC, VIP: vip6}, false)[0])
			time.Sleep(time.Second)
			synctest.Wait()
		}
		var defended []time.Duration
		for _, f := range w.take() {
			defended = append(defended, f.at)
		}
		assert.Equal(t, []time.Duration{time.Second, 11 * time.Second}, defended)
	}, eth(1, "eth0"))
}

func TestStatus(t *testing.T) {
	t.Parallel()
	inWorld(t, func(t *testing.T, w *world) {
		w.set(everywhere(vip6, vipA))
		s := w.Status()
		require.Len(t, s.VIPs, 2)
		for i, vip := range []netip.Addr{vipA, vip6} {
			assert.Equal(t, VIPStatus{Addr: vip, Since: time.Now(), Interfaces: []string{"eth0"}}, s.VIPs[i])
		}
		hw := hardwareAddr(eth(1, "eth0").HardwareAddr).String()
		assert.Equal(t, []InterfaceStatus{
			{Name: "eth0", Family: "IPv4", HardwareAddr: hw, VIPs: 1},
			{Name: "eth0", Family: "IPv6", HardwareAddr: hw, VIPs: 1},
		}, s.Interfaces)
		want := "# HELP lodestone_layer2_owned_vips VIPs that this node owns on the local segment, also those that leave it or arrive.\n" +
			"# TYPE lodestone_layer2_owned_vips gauge\nlodestone_layer2_owned_vips 2\n"
		if err := testutil.GatherAndCompare(w.registry, strings.NewReader(want), metricOwned); err != nil {
			t.Error(err)
		}
	}, eth(1, "eth0"))
}

// A node that hands a VIP over hears the next owner's claim, and does not contradict
// it.
func TestHandOverIsNotDefended(t *testing.T) {
	t.Parallel()
	inWorld(t, func(t *testing.T, w *world) {
		w.set(everywhere(vipA, vipB))
		w.after(time.Minute)
		w.receive("eth0", arpFrame(arppacket.OperationReply, broadcast, clientMAC, vipA, clientMAC, vipA))
		w.after(300 * time.Millisecond)
		w.set(everywhere(vipB))
		if sent := w.after(time.Hour); len(sent) > 0 {
			t.Errorf("%d frames: %s", len(sent), when(t, sent))
		}
	}, eth(1, "eth0"))
}

// A transmit queue that is full does not hold up a withdrawal.
func TestStuckInterface(t *testing.T) {
	t.Parallel()
	inWorld(t, func(t *testing.T, w *world) {
		w.set(everywhere(vipA, vipB))
		w.after(time.Minute)
		stuck := make(chan struct{})
		w.conn("eth0").stuck.Store(&stuck)
		w.receive("eth0", ask(vipA, clientIP, broadcast))
		synctest.Wait()
		before := time.Now()
		w.set(everywhere(vipB))
		if d := time.Since(before); d < stuckAfter || d > 2*stuckAfter {
			t.Errorf("withdrawn after %v, want %v", d, stuckAfter)
		}
	}, eth(1, "eth0"))
}

// Two wait for a machine whose frame is stuck, and give that frame up. The first one gets the machine, and then a frame is stuck
// that came between them. The second one gives up that one, too.
func TestStuckTwice(t *testing.T) {
	t.Parallel()
	inWorld(t, func(t *testing.T, w *world) {
		w.set(everywhere(vipA))
		w.after(time.Minute)
		after := func(d time.Duration) {
			time.Sleep(d)
			synctest.Wait()
		}
		var used *socket
		for _, used = range w.published.Load().sockets {
		}
		used.owner <- struct{}{} // a task whose frame is stuck
		go w.Status()
		after(stuckAfter / 2)
		done := make(chan struct{})
		go func() { defer close(done); w.set(everywhere(vipA, vipB)) }()
		after(3 * stuckAfter / 4) // the first one has given the frame up, and the second one has not
		w.receive("eth0", ask(vipA, clientIP, broadcast))
		after(stuckAfter / 2)
		stuck := make(chan struct{})
		w.conn("eth0").stuck.Store(&stuck)
		<-used.owner
		after(2 * stuckAfter)
		select {
		case <-done:
		default:
			t.Error("Set waits")
			w.conn("eth0").SetWriteDeadline(time.Now())
			<-done
		}
	}, eth(1, "eth0"))
}

func TestSetWithoutRun(t *testing.T) {
	t.Parallel()
	a := New(Options{Log: slog.New(slog.DiscardHandler), Registry: prometheus.NewRegistry()})
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := a.Set(ctx, nil); !errors.Is(err, context.Canceled) {
		t.Errorf("set before run: %v", err)
	}
}

// When Set returns, no answer for what it withdrew is on its way, however
// many requests there are.
func TestNoAnswerAfterSet(t *testing.T) {
	t.Parallel()
	w, stop := newWorld(t, nil, eth(1, "eth0"))
	w.set(everywhere(vipA))
	var flood sync.WaitGroup
	quit := make(chan struct{})
	c := w.conn("eth0")
	flood.Go(func() {
		for {
			select {
			case c.in <- ask(vipB, clientIP, broadcast):
			case <-quit:
				return
			}
		}
	})
	for range 300 {
		w.set(everywhere(vipA, vipB))
		time.Sleep(100 * time.Microsecond)
		w.set(everywhere(vipA))
		w.take()
		time.Sleep(100 * time.Microsecond)
		for _, f := range w.take() {
			if f.vip(t) == vipB {
				t.Fatal("a frame for a VIP that was withdrawn")
			}
		}
	}
	close(quit)
	flood.Wait()
	if n := testutil.ToFloat64(w.metrics.replies.WithLabelValues("eth0", "IPv4")); n == 0 {
		t.Error("nothing was answered: the test tests nothing")
	}
	if err := stop(); err != nil {
		t.Error(err)
	}
}

// subnets returns the interface with addresses.
func subnets(i netstate.Interface, addrs ...string) netstate.Interface {
	for _, a := range addrs {
		i.Addrs = append(i.Addrs, netip.MustParsePrefix(a))
	}
	return i
}

// A node on two segments announces each VIP on the VIP's segment, also while the link to that segment is down, and on an
// interface of an unknown segment. When the VIP leaves, nobody on the other segment is waited for.
func TestVIPsStayOnTheirSegment(t *testing.T) {
	t.Parallel()
	eth0, eth1, bare := subnets(eth(1, "eth0"), "198.18.0.1/24", "2001:db8::1/64"), subnets(eth(2, "eth1"), "198.18.1.1/24"), eth(3, "eth2")
	vipC := netip.MustParseAddr("198.18.1.100")
	inWorld(t, func(t *testing.T, w *world) {
		expect := func(what string, want map[netip.Addr][]string) {
			t.Helper()
			got := map[netip.Addr][]string{}
			for _, v := range w.Status().VIPs {
				got[v.Addr] = v.Interfaces
			}
			assert.Equal(t, want, got, what)
		}
		far := netip.MustParseAddr("192.0.2.1")
		w.set(everywhere(vipA, vipC, vip6, far))
		one, all := []string{"eth0", "eth2"}, []string{"eth0", "eth1", "eth2"}
		expect("three interfaces", map[netip.Addr][]string{vipA: one, vipC: {"eth1", "eth2"}, vip6: one, far: all})
		down := eth1
		down.Up = false
		w.become(eth0, down, bare)
		expect("the link to the other segment is down", map[netip.Addr][]string{vipA: one, vipC: {"eth2"}, vip6: one, far: one})
		w.become(eth0, eth1, bare)
		w.set(map[netip.Addr]plan.Layer2{vipA: {Interfaces: []string{"eth1", "eth2"}}, vipC: {AnySegment: true}})
		expect("interfaces that are named, and any segment", map[netip.Addr][]string{vipA: {"eth1", "eth2"}, vipC: all})

		w.set(everywhere(vipA))
		w.after(time.Minute)
		w.set(map[netip.Addr]plan.Layer2{vipA: {Leaving: true}})
		assert.Equal(t, 1, w.Leaving())
		w.claim("eth0")
		w.claim("eth2")
		assert.Zero(t, w.Leaving(), "its next owner was heard")
	}, eth0, eth1, bare)
}

// The port of a bridge that an advertisement names answers on the subnets of the bridge, and on its own.
func TestPortsAreOnTheSegmentOfTheirMaster(t *testing.T) {
	t.Parallel()
	bridge, other := subnets(eth(1, "br0"), "198.18.0.1/24"), subnets(eth(3, "eth1"), "198.18.1.1/24")
	bridge.Kind = "bridge"
	for _, addrs := range [][]string{nil, {"198.18.0.2/24"}} {
		port := subnets(eth(2, "eth0"), addrs...)
		port.Master = bridge.Index
		inWorld(t, func(t *testing.T, w *world) {
			for _, patterns := range [][]string{{"eth0"}, {"br0", "eth*"}} {
				w.set(map[netip.Addr]plan.Layer2{vipA: {Interfaces: patterns}})
				assert.Contains(t, w.Status().VIPs[0].Interfaces, "eth0")
				assert.NotContains(t, w.Status().VIPs[0].Interfaces, "eth1")
			}
		}, bridge, port, other)
	}
}

func TestSegments(t *testing.T) {
	t.Parallel()
	down, port, bridge := subnets(eth(3, "eth1"), "198.18.3.1/24"), subnets(eth(4, "eth2"), "198.18.4.1/24"),
		subnets(eth(5, "br0"), "198.18.5.1/24")
	down.Up, bridge.Kind, port.Master = false, "bridge", 5
	all := []netstate.Interface{subnets(eth(2, "eth0"), "198.18.2.1/24", "2001:db8::1/64"), down, port, bridge,
		subnets(eth(6, "docker0"), "172.17.0.1/16")}
	for _, tt := range []struct {
		patterns [][]string
		want     string
	}{
		{[][]string{nil}, "[198.18.2.0/24 eth0 2001:db8::/64 eth0 198.18.3.0/24 eth1 " +
			"198.18.5.0/24 br0]"},
		{[][]string{{"eth1"}}, "[198.18.3.0/24 eth1]"},
		{[][]string{{"eth1"}, {"docker*"}, {"eth2"}},
			"[198.18.3.0/24 eth1 198.18.4.0/24 eth2 if-named 172.17.0.0/16 docker0 if-named]"},
		{nil, "[]"},
	} {
		if got := Segments(all, tt.patterns...); got == nil || fmt.Sprint(got) != tt.want {
			t.Errorf("segments of %v: %v, want %s", tt.patterns, got, tt.want)
		}
	}
	if all[1].Up {
		t.Error("the caller's interfaces were changed")
	}
}

func TestSuitable(t *testing.T) {
	t.Parallel()
	with := func(name string, f func(*netstate.Interface)) netstate.Interface {
		i := eth(1, name)
		if f != nil {
			f(&i)
		}
		return i
	}
	for _, c := range []struct {
		i              netstate.Interface
		enslaved       bool
		byDefault, all bool // without patterns, with the pattern *
	}{
		{with("eth0", nil), false, true, true},
		{with("br0", func(i *netstate.Interface) { i.Kind = "bridge" }), false, true, true},
		{with("bond0", func(i *netstate.Interface) { i.Kind = "bond" }), false, true, true},
		{with("eth0.10", func(i *netstate.Interface) { i.Kind = "vlan" }), false, true, true},
		{with("macvlan0", func(i *netstate.Interface) { i.Kind = "macvlan" }), false, true, true},
		{with("eth0", nil), true, false, true},
		{with("eth0", func(i *netstate.Interface) { i.NoARP = true }), false, false, true},
		{with("vpn", func(i *netstate.Interface) { i.Kind = "tuntap" }), false, false, true},
		{with("eth0", func(i *netstate.Interface) { i.Up = false }), false, false, false},
		{with("lo", func(i *netstate.Interface) { i.Loopback, i.Ethernet = true, false }), false, false, false},
		{with("ppp0", func(i *netstate.Interface) { i.Ethernet = false }), false, false, false},
		{with("eth0", func(i *netstate.Interface) { i.HardwareAddr = make([]byte, 6) }), false, false, false},
		{with("ib0", func(i *netstate.Interface) { i.HardwareAddr = make([]byte, 20) }), false, false, false},
		{with("docker0", nil), false, false, true},
		{with("br-1f2e3d4c5b6a", nil), false, false, true},
		{with("cni0", nil), false, false, true},
		{with("veth1a2b3c", nil), false, false, true},
		{with("cali12345", nil), false, false, true},
		{with("flannel.1", nil), false, false, true},
		{with("cilium_host", nil), false, false, true},
		{with("lxc123", nil), false, false, true},
		{with("kube-ipvs0", nil), false, false, true},
		{with("nodelocaldns", nil), false, false, true},
		{with("virbr0", nil), false, false, true},
		{with("tap0", nil), false, false, true},
	} {
		if got := suitable(c.i, c.enslaved, nil); got != c.byDefault {
			t.Errorf("%+v, enslaved %v: suitable is %v", c.i, c.enslaved, got)
		}
		if got := suitable(c.i, c.enslaved, []string{"x", "*"}); got != c.all {
			t.Errorf("%+v, enslaved %v: suitable is %v with a pattern", c.i, c.enslaved, got)
		}
		if suitable(c.i, c.enslaved, []string{"other*"}) {
			t.Errorf("%+v is not named", c.i)
		}
	}
}

func TestEnslaved(t *testing.T) {
	t.Parallel()
	eth0, vrf, bond := eth(1, "eth0"), eth(2, "red"), eth(3, "bond0")
	vrf.Kind, bond.Kind = "vrf", "bond"
	all := []netstate.Interface{eth0, vrf, bond}
	for master, want := range map[int]bool{0: false, 2: false, 3: true, 9: true} {
		eth0.Master = master
		if got := isPort(eth0, all); got != want {
			t.Errorf("master %d: a port is %v", master, got)
		}
		speaker := map[bool]int{false: eth0.Index, true: master}[want]
		if got := ipInterface(eth0, all).Index; got != speaker {
			t.Errorf("master %d: interface %d speaks, want %d", master, got, speaker)
		}
	}
}

func TestMetricNames(t *testing.T) {
	t.Parallel()
	inWorld(t, func(t *testing.T, w *world) {
		w.set(everywhere(vipA))
		w.after(0)
		problems, err := testutil.GatherAndLint(w.registry)
		if err != nil || len(problems) > 0 {
			t.Errorf("%v %v", problems, err)
		}
		if n, _ := testutil.GatherAndCount(w.registry); n != 16 {
			t.Errorf("%d time series, want 16", n)
		}
	}, eth(1, "eth0"))
}
