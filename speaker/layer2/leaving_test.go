package layer2

import (
	"encoding/binary"
	"maps"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	arppacket "github.com/mdlayher/arp"
	"github.com/mdlayher/packet"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/lodestone-lb/lodestone/pkg/testnet"
	"github.com/lodestone-lb/lodestone/speaker/layer2/seal"
	"github.com/lodestone-lb/lodestone/speaker/layer2/wire"
	"github.com/lodestone-lb/lodestone/speaker/plan"
)

// leavingVIP is a set with one VIP that leaves.
func leavingVIP(vip netip.Addr) map[netip.Addr]plan.Layer2 {
	return map[netip.Addr]plan.Layer2{vip: {Leaving: true}}
}

// answersFor reports whether an interface of the world answers for vipA.
func (w *world) answersFor(name string) bool {
	w.take()
	w.receive(name, ask(vipA, clientIP, broadcast))
	return len(w.after(0)) > 0
}

// crossing is longer than frames take that cross on the wire.
const crossing = 20 * time.Millisecond

// nextMAC is the hardware address of the next owner.
var nextMAC = mac{2, 0, 0, 0, 0, 0xb}

// repeat has a claim of vipA that the next owner has sent before arrive at the interface.
func (w *world) repeat(name string) {
	w.receive(name, wire.ARP{}.Announce(claimOf(nextMAC, vipA), true)[0])
	synctest.Wait()
}

// claim has the next owner claim vipA in front of the interface, and answer questions there from then on.
func (w *world) claim(name string) {
	before := w.carrier()
	w.onWire(func(on string, frame []byte) {
		m, ok := (wire.ARP{}).Parse(frame)
		switch {
		case on != name && before != nil:
			before(on, frame)
		case on == name && ok && m.Asks == vipA && m.Probes() && (m.To == nextMAC || m.To.Group()):
			s := statement{Self: nextMAC, VIP: vipA, Seal: seal.Key("the cluster's").Numbered(vipA, nextMAC, false, m.Seal.Nonce())}
			go w.receive(name, wire.ARP{}.Answer(s, m))
		}
	})
	w.repeat(name)
}

// A node answers for a leaving VIP on each interface until it hears the next owner there. It
// neither announces nor defends the VIP, and probes for the next owner.
func TestLeaving(t *testing.T) {
	t.Parallel()
	inWorld(t, func(t *testing.T, w *world) {
		w.set(everywhere(vipA))
		w.after(500 * time.Millisecond)
		w.set(leavingVIP(vipA))
		for _, s := range w.after(time.Minute) {
			m, ok := wire.ARP{}.Parse(s.bytes)
			assert.True(t, ok && m.Probes(), "announced although it leaves")
		}
		assert.True(t, w.Status().VIPs[0].Leaving)
		assert.True(t, w.answersFor("eth0"))
		assert.Equal(t, 1, w.Leaving())

		w.claim("eth0")
		assert.False(t, w.answersFor("eth0"))
		assert.True(t, w.answersFor("eth1"), "the next owner was not heard here")
		assert.Equal(t, 1, w.Leaving())
		w.claim("eth1")
		assert.False(t, w.answersFor("eth1"))
		assert.Zero(t, w.Leaving())
		w.set(leavingVIP(vipA))
		assert.False(t, w.answersFor("eth0"), "it came back by itself")
		assert.Empty(t, w.after(time.Minute), "defended against its next owner")
		assert.Empty(t, w.Conflicts())
		assert.Zero(t, testutil.ToFloat64(w.metrics.conflicts.WithLabelValues("eth0", "IPv4")))

		w.set(everywhere(vipA))
		assert.Len(t, w.after(0), 4, "announcements of one that came back")
		assert.True(t, w.answersFor("eth0"))
	}, eth(1, "eth0"), eth(2, "eth1"))
}

// An arriving VIP is not in the status before it is announced: nothing is wrong with it.
func TestArriving(t *testing.T) {
	t.Parallel()
	arriving := map[netip.Addr]plan.Layer2{vipA: {Arriving: true}}
	for _, answered := range []bool{false, true} {
		inWorld(t, func(t *testing.T, w *world) {
			w.set(arriving)
			assert.Empty(t, w.after(400*time.Millisecond))
			assert.Empty(t, w.Status().VIPs)
			if answered {
				w.set(everywhere(vipA))
			} else {
				w.after(2 * time.Second)
			}
			assert.True(t, w.answersFor("eth0"))
			assert.Equal(t, []string{"eth0"}, w.Status().VIPs[0].Interfaces)
			w.set(everywhere(vipA))
			assert.Empty(t, w.take(), "it is announced already")
		}, eth(1, "eth0"))
	}
}

// A VIP that leaves before it was announced is not logged as withdrawn. One that was announced is.
func TestArrivingAndLeaving(t *testing.T) {
	t.Parallel()
	for _, silent := range []bool{false, true} {
		for _, between := range []map[netip.Addr]plan.Layer2{nil, leavingVIP(vipA)} {
			inWorld(t, func(t *testing.T, w *world) {
				w.set(map[netip.Addr]plan.Layer2{vipA: {Arriving: true}})
				logged := 0
				if silent {
					w.after(2 * time.Second)
					logged = 2
				}
				w.set(between)
				w.after(time.Second)
				w.set(nil)
				w.after(time.Second)
				assert.Equal(t, logged, strings.Count(w.log.String(), "level="), w.log.String())
				assert.Equal(t, silent, strings.Contains(w.log.String(), "msg=withdrawn"), w.log.String())
			}, eth(1, "eth0"))
		}
	}
}

// An interface that cannot be used does not make it withdrawn either.
func TestArrivingAndLeavingWithAFailedInterface(t *testing.T) {
	t.Parallel()
	inWorld(t, func(t *testing.T, w *world) {
		w.fail("eth1", unix.EMFILE)
		w.set(map[netip.Addr]plan.Layer2{vipA: {Arriving: true}})
		w.set(nil)
		assert.NotContains(t, w.log.String(), "msg=withdrawn")
	}, eth(1, "eth0"), eth(2, "eth1"))
}

// The next owner may hear of the move first. It has the VIP if it answers, and not if its claim is a recorded one.
func TestClaimBeforeLeaving(t *testing.T) {
	t.Parallel()
	for _, recorded := range []bool{false, true} {
		for _, ago := range []time.Duration{20 * time.Millisecond, time.Minute} {
			inWorld(t, func(t *testing.T, w *world) {
				w.set(claimed(true, vipA))
				w.after(2 * crossing)
				if recorded {
					w.repeat("eth0")
				} else {
					w.claim("eth0")
				}
				assert.True(t, w.answersFor("eth0"))
				w.after(ago)
				w.set(leavingVIP(vipA))
				w.after(0)
				assert.Equal(t, recorded, w.answersFor("eth0"), "claimed %s ago", ago)
			}, eth(1, "eth0"))
		}
	}
}

// A speaker whose claim crosses an announcement on the wire may yield to it. Then it answers no question.
func TestClaimThatCrossedOurs(t *testing.T) {
	t.Parallel()
	inWorld(t, func(t *testing.T, w *world) {
		w.set(claimed(true, vipA))
		w.after(0)
		w.repeat("eth0")
		w.set(leavingVIP(vipA))
		assert.True(t, w.answersFor("eth0"))
		w.claim("eth0")
		assert.False(t, w.answersFor("eth0"))
	}, eth(1, "eth0"))
}

// A next owner that was contradicted, because the old owner heard of the move late,
// has yielded. The old one does not hold it up, and clients have an answer at
// every moment.
func TestNextOwnerThatWasContradicted(t *testing.T) {
	t.Parallel()
	onSegment(t, 2, func(t *testing.T, s *lan) {
		old, next := s.speakers[0], s.speakers[1]
		s.lose(true)
		old.set(claimed(true, vipA))
		time.Sleep(time.Minute)
		next.set(claimed(false, vipA))
		time.Sleep(correction + 10*time.Millisecond)
		synctest.Wait()
		require.Equal(t, []int{0}, s.owners(vipA), "the next owner yields")
		old.set(leavingVIP(vipA))
		for range (maxMissed+1)*pollInterval/(10*time.Millisecond) + 1 {
			require.True(t, old.answersFor("eth0") || next.answersFor("eth0"), "nobody answers")
			time.Sleep(10 * time.Millisecond)
		}
		assert.Zero(t, old.Leaving(), "the next owner did not claim it")
		assert.False(t, old.answersFor("eth0"))
		assert.True(t, next.answersFor("eth0"))
	})
}

// A next owner whose claim crossed that of this node asks whether this node has the VIP, and
// yields to the answer. So that claim does not end the answers, although it is recent.
func TestNextOwnerThatAsked(t *testing.T) {
	t.Parallel()
	inWorld(t, func(t *testing.T, w *world) {
		w.set(claimed(true, vipA))
		w.after(2 * crossing) // on a busy machine frames that cross take longer than that
		w.repeat("eth0")
		question := statement{Self: nextMAC, VIP: vipA, Seal: seal.Key("the cluster's").Numbered(vipA, nextMAC, false, seal.Nonce{1})}
		w.take()
		w.receive("eth0", wire.ARP{}.Probe(question, hardwareAddr(eth(1, "eth0").HardwareAddr)))
		require.Len(t, w.after(0), 1, "the answer")
		w.after(300 * time.Millisecond)
		w.set(leavingVIP(vipA))
		assert.True(t, w.answersFor("eth0"), "nobody answers: the next owner has yielded")
		w.claim("eth0")
		assert.False(t, w.answersFor("eth0"))
	}, eth(1, "eth0"))
}

// The other speaker answers for a VIP that was yielded to it. When it leaves, nothing is handed
// over or contested.
func TestLeavingOfAYieldedVIP(t *testing.T) {
	t.Parallel()
	onSegment(t, 2, func(t *testing.T, s *lan) {
		s.speakers[0].set(claimed(true, vipA))
		time.Sleep(time.Minute)
		yielded := s.speakers[1]
		yielded.set(claimed(false, vipA))
		time.Sleep(lag + time.Second)
		require.Equal(t, []int{0}, s.owners(vipA))
		yielded.set(leavingVIP(vipA))
		assert.Zero(t, yielded.Leaving())
		assert.False(t, yielded.answersFor("eth0"))
		s.speakers[0].set(nil)
		yielded.take()
		assert.Empty(t, yielded.after(time.Minute), "it asks or claims although it leaves")
		yielded.set(claimed(false, vipA))
		time.Sleep(time.Second)
		assert.Equal(t, []int{1}, s.owners(vipA), "it came back")
	})
}

// A VIP leaves while it is probed. It is not announced, but the probes go on. Once it is found to be free, this node answers
// for it until the next owner is heard, which may have to wait for its kube-proxy.
func TestLeavingOfAProbedVIP(t *testing.T) {
	t.Parallel()
	inWorld(t, func(t *testing.T, w *world) {
		w.set(fresh(vipA))
		w.after(probeWait)
		w.set(leavingVIP(vipA))
		assert.Len(t, w.after(time.Minute), 1, "the last probe, and no announcement")
		assert.Equal(t, 1, w.Leaving())
		assert.True(t, w.answersFor("eth0"), "the next owner waits")
		w.claim("eth0")
		assert.False(t, w.answersFor("eth0"), "it contests an address that it gives up")
		assert.Zero(t, w.Leaving())
		assert.Empty(t, w.Conflicts())
	}, eth(1, "eth0"))
}

// A claim at once after Set is not contradicted.
func TestLeavingIsNotDefended(t *testing.T) {
	t.Parallel()
	inWorld(t, func(t *testing.T, w *world) {
		w.set(everywhere(vipA))
		w.after(time.Minute)
		w.claim("eth0") // the next owner; this node hears later that it is
		w.after(500 * time.Millisecond)
		w.set(leavingVIP(vipA))
		for _, f := range w.after(time.Hour) {
			m, ok := wire.ARP{}.Parse(f.bytes)
			assert.True(t, ok && m.Probes(), "it asks whether that one has the VIP, and nothing else")
		}
		assert.Zero(t, w.Leaving())
	}, eth(1, "eth0"))
}

// coldClient asks for VIPs, each time as another host that does not know where they are.
// The hardware address of that host contains the number of the question, so that a late
// answer counts, too. On a busy machine a speaker runs late, which is no loss: it still
// answers the questions from before it had to stop.
type coldClient struct {
	t    *testing.T
	vip  netip.Addr
	conn net.PacketConn

	mu        sync.Mutex
	questions []question
	announced map[mac][]time.Time // when each speaker announced vip
}

// question is one that was asked.
type question struct {
	vip      netip.Addr
	asked    time.Time
	answered map[mac]int // how often, by each speaker
}

func newColdClient(t *testing.T, h *testnet.Host, vip netip.Addr) *coldClient {
	t.Helper()
	etherType := unix.ETH_P_ARP
	if vip.Is6() {
		etherType = unix.ETH_P_IPV6
	}
	c := &coldClient{t: t, conn: listenOn(t, h, etherType, nil), vip: vip, announced: map[mac][]time.Time{}}
	var reading sync.WaitGroup
	t.Cleanup(func() { c.conn.Close(); reading.Wait() })
	reading.Go(func() {
		for buf := make([]byte, 1514); ; {
			k, _, err := c.conn.ReadFrom(buf)
			if err != nil {
				return
			}
			if m, ok := wire.Of(vip).Parse(buf[:k]); ok && m.Claims.IsValid() {
				c.note(m)
			}
		}
	})
	return c
}

// note takes an announcement, or the answer to a question.
func (c *coldClient) note(m wire.Message) {
	c.mu.Lock()
	defer c.mu.Unlock()
	n := int(binary.BigEndian.Uint32(m.To[2:]))
	switch {
	case m.To.Group():
		if m.Claims == c.vip {
			c.announced[m.From] = append(c.announced[m.From], time.Now())
		}
	case n < len(c.questions) && m.To == hostOf(n) && m.Claims == c.questions[n].vip:
		c.questions[n].answered[m.From]++
	}
}

// hostOf is the hardware address of the host that asks a question.
func hostOf(number int) (m mac) {
	m[0] = 2
	binary.BigEndian.PutUint32(m[2:], uint32(number))
	return m
}

// ask asks for a VIP once.
func (c *coldClient) ask(vip netip.Addr) (number int) {
	c.mu.Lock()
	number = len(c.questions)
	c.questions = append(c.questions, question{vip, time.Now(), map[mac]int{}})
	c.mu.Unlock()
	var f []byte
	if vip.Is6() {
		f = coldQuery(hostOf(number), vip).frame()
	} else {
		f = arpFrame(arppacket.OperationRequest, broadcast, hostOf(number), clientIP, mac{}, vip)
	}
	_, err := c.conn.WriteTo(f, &packet.Addr{HardwareAddr: f[:6]})
	require.NoError(c.t, err)
	return number
}

// answered reports whether a speaker has answered a question.
func (c *coldClient) answered(number int, by mac) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.questions[number].answered[by] > 0
}

// marks are VIPs that a node has at all times. When it answers for one, it has read all earlier frames.
var mark, mark6 = netip.MustParseAddr("198.18.0.199"), netip.MustParseAddr("2001:db8::199")

// answers asks for the VIP that many times, and returns the node of each answer. All nodes that
// may answer have the mark.
func (c *coldClient) answers(times int, all ...mac) (by []string) {
	c.t.Helper()
	first := c.ask(c.vip)
	for range times - 1 {
		c.ask(c.vip)
	}
	last := c.ask(mark)
	for _, m := range all {
		eventually(c.t, "an answer for the mark by "+m.String(), func() bool { return c.answered(last, m) })
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, q := range c.questions[first:last] {
		for m, often := range q.answered {
			by = append(by, slices.Repeat([]string{m.String()}, often)...)
		}
	}
	slices.Sort(by)
	return by
}

// asks asks for the VIP every 5 ms for that long.
func (c *coldClient) asks(d time.Duration) {
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for end := time.Now().Add(d); time.Now().Before(end); <-tick.C {
		c.ask(c.vip)
	}
}

// during asks before, while and after the move happens, until it is over. It returns the number of
// the first question.
func (c *coldClient) during(move func(), over func() bool) (first int) {
	c.mu.Lock()
	first = len(c.questions)
	c.mu.Unlock()
	c.asks(20 * time.Millisecond)
	done := make(chan struct{})
	go func() { defer close(done); move() }()
	for moving := true; moving; {
		c.asks(20 * time.Millisecond)
		select {
		case <-done:
			moving = false
		default:
		}
	}
	c.asks(settle)
	eventually(c.t, "the old owner has heard the next one", func() bool { c.asks(20 * time.Millisecond); return over() })
	return first
}

// settle is how long a client goes on asking after a move. For as long, the client can
// notice an old owner that does not stop to answer.
const settle = 600 * time.Millisecond

// lost counts the questions for the VIP that nobody answered, from the first.
func (c *coldClient) lost(first int) (lost, all int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, q := range c.questions[first:] {
		if q.vip == c.vip {
			all++
			if len(q.answered) == 0 {
				lost++
			}
		}
	}
	return lost, all
}

// overlap returns for how long both nodes answered questions that were asked after both were
// informed of the move and old had heard the next owner. Two kinds of claims do not count, and
// old waits for another one: claims of more than a second before old was informed, which were
// contradicted as far as old knows, and claims just after an announcement of old, to which the
// other one yields as far as old knows.
func (c *coldClient) overlap(first int, old, next mac, informed time.Time) time.Duration {
	c.mu.Lock()
	defer c.mu.Unlock()
	var own time.Time // when old announced the VIP last
	if n := len(c.announced[old]); n > 0 {
		own = c.announced[old][n-1]
	}
	heard := slices.IndexFunc(c.announced[next], func(at time.Time) bool {
		return at.After(c.questions[first].asked) && informed.Sub(at) < time.Second && at.Sub(own) > 5*crossing
	})
	if heard < 0 {
		return 0
	}
	both, overlap := c.announced[next][heard], time.Duration(0)
	if informed.After(both) {
		both = informed
	}
	for _, q := range c.questions[first:] {
		if q.vip == c.vip && q.answered[old] > 0 && q.answered[next] > 0 {
			overlap = max(overlap, q.asked.Sub(both))
		}
	}
	return overlap
}

// A VIP moves between two nodes that hear of it at different times, while clients
// depend on an answer every 5 ms.
func TestMovesLoseNothing(t *testing.T) {
	const skew, moves = 300 * time.Millisecond, 5
	for _, vip := range []netip.Addr{vipA, vip6} {
		t.Run(wire.Of(vip).Family(), func(t *testing.T) {
			t.Parallel()
			s := testnet.NewSegment(t, 3)
			from, to := startNode(t, s.Hosts[0], nil), startNode(t, s.Hosts[1], nil)
			// VIPs that a node has at all times. When it answers for one, it has read all earlier frames.
			marks := map[*node]netip.Addr{from: vip.Next(), to: vip.Next().Next()}
			set := func(n *node, want map[netip.Addr]plan.Layer2) {
				all := everywhere(marks[n])
				maps.Copy(all, want)
				n.set(all)
			}
			leave := func(from, _ *node) { set(from, leavingVIP(vip)) }
			take := func(_, to *node) { set(to, everywhere(vip)) }
			orders := map[string][]func(from, to *node){
				"old owner first":  {leave, take},
				"next owner first": {take, leave},
			}
			for n, mark := range marks {
				n.announcing(vip, mark)
				set(n, nil)
			}
			client := newColdClient(t, s.Hosts[2], vip)
			caughtUp := func() {
				for n, mark := range marks {
					number := client.ask(mark)
					eventually(t, "an answer for what the node has at all times", func() bool { return client.answered(number, n.mac("eth0")) })
				}
			}
			caughtUp() // so that neither takes an announcement from before for one of the move
			set(from, everywhere(vip))
			for name, order := range orders {
				worst, lost, asked := time.Duration(0), 0, 0
				for range moves {
					var informed time.Time
					first := client.during(func() {
						order[0](from, to)
						time.Sleep(skew)
						order[1](from, to)
						informed = time.Now()
					}, func() bool { return from.Leaving() == 0 })
					caughtUp()
					l, a := client.lost(first)
					lost, asked = lost+l, asked+a
					worst = max(worst, client.overlap(first, from.mac("eth0"), to.mac("eth0"), informed))
					set(from, nil)
					from, to = to, from
				}
				t.Logf("%s: %d of %d questions without an answer, both answered for up to %s", name, lost, asked, worst)
				assert.Zero(t, lost, name)
				assert.Less(t, worst, settle/2, name)
			}
			// The measurement detects a loss.
			first := client.during(func() { set(from, nil); time.Sleep(skew); set(to, everywhere(vip)) }, func() bool { return true })
			caughtUp()
			lost, _ := client.lost(first)
			assert.NotZero(t, lost, "stopped before the next owner started")
		})
	}
}
