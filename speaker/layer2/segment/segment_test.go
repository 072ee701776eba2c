package segment

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/lodestone-lb/lodestone/speaker/layer2/seal"
	"github.com/lodestone-lb/lodestone/speaker/layer2/wire"
)

// crossing is longer than frames take that cross on the wire.
const crossing = 20 * time.Millisecond

var (
	vipA   = netip.MustParseAddr("198.18.0.100")
	vipB   = netip.MustParseAddr("198.18.0.101")
	vip6   = netip.MustParseAddr("2001:db8::100")
	client = wire.MAC{2, 0, 0, 0, 0, 0xc}
)

// lan is a broadcast domain with machines, in simulated time.
type lan struct {
	now   time.Time
	nodes []*Machine
	// blocked reports whether nothing gets from one node to the other. Nil: all does.
	blocked func(from, to int) bool
	wire    []sent // not arrived yet
	story   bytes.Buffer
	notes   []Note
}

type sent struct {
	from  int
	frame []byte
}

// newLAN returns a LAN with n nodes, none of which is lost.
func newLAN(n int, family wire.Protocol) *lan {
	l := &lan{now: time.Unix(0, 0)}
	for i := range n {
		l.nodes = append(l.nodes, New(Config{Protocol: family, Self: wire.MAC{2, 0, 0, 0, 0, byte(i)}, Secret: sha256.Sum256([]byte{byte(i)}),
			Keys: func() [][]byte { return [][]byte{[]byte("the cluster's")} }}, l.now))
	}
	return l
}

// step gives an event to a node, and delivers what the nodes send until all is quiet.
func (l *lan) step(i int, e Event) {
	l.act(i, e)
	for len(l.wire) > 0 {
		next := l.wire[0]
		l.wire = l.wire[1:]
		for to := range l.nodes {
			e := received(next.frame)
			if to != next.from && e.Message.IsFor(l.nodes[to].Self) && (l.blocked == nil || !l.blocked(next.from, to)) {
				l.act(to, e)
			}
		}
	}
}

// received is the frame as a machine receives it.
func received(frame []byte) Received {
	var protocol wire.Protocol = wire.ARP{}
	if [2]byte(frame[12:]) == [2]byte{0x86, 0xdd} { // EtherType
		protocol = wire.NDP{}
	}
	m, ok := protocol.Parse(frame)
	if !ok {
		panic(fmt.Sprintf("%x breaks the protocol", frame))
	}
	return Received{m}
}

func (l *lan) act(i int, e Event) {
	effects := l.nodes[i].Step(e, l.now)
	l.notes = append(l.notes, effects.Notes...)
	for _, f := range effects.Frames {
		fmt.Fprintf(&l.story, "%s node %d: %x\n", l.now.Sub(time.Unix(0, 0)), i, f)
		l.wire = append(l.wire, sent{i, f})
	}
}

// pass lets time pass.
func (l *lan) pass(d time.Duration) {
	for end := l.now.Add(d); ; {
		node, at := -1, end
		for i, m := range l.nodes {
			if next, ok := m.Next(); ok && !next.After(at) && (node < 0 || next.Before(at)) {
				node, at = i, next
			}
		}
		if l.now = latest(l.now, at); node < 0 {
			return
		}
		l.step(node, Due{})
	}
}

func latest(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}

func (l *lan) assign(i int, vips map[netip.Addr]VIP) { l.step(i, Assigned{vips}) }

// lose reports to all nodes that speakers are lost.
func (l *lan) lose() {
	for i := range l.nodes {
		l.step(i, Surroundings{Crowd: 1})
	}
}

// announcers returns the nodes that announce the VIP.
func (l *lan) announcers(vip netip.Addr) (nodes []int) {
	for i, m := range l.nodes {
		if v := m.vips[vip]; v != nil && v.reason == "" {
			nodes = append(nodes, i)
		}
	}
	return nodes
}

// Three speakers that do not see each other all announce a VIP. Within two seconds one is
// left: its home. When that one dies another one takes over, and yields when it is back.
func TestThreeSpeakersAndOneVIP(t *testing.T) {
	t.Parallel()
	for _, vip := range []netip.Addr{vipA, vip6} {
		play := func() *lan {
			l := newLAN(3, wire.Of(vip))
			l.lose()
			for i := range l.nodes {
				l.assign(i, map[netip.Addr]VIP{vip: {Home: i == 1}})
			}
			l.pass(2 * time.Second)
			require.Equal(t, []int{1}, l.announcers(vip), "the home keeps it")
			l.pass(time.Minute)
			require.Equal(t, []int{1}, l.announcers(vip), "no flap")

			l.blocked = func(from, to int) bool { return from == 1 || to == 1 }
			l.pass((maxMissed+2)*pollInterval + time.Second)
			require.Len(t, l.announcers(vip), 2, "it is silent, and one of the others takes over")

			l.blocked = nil
			l.pass(5 * time.Second)
			require.Equal(t, []int{1}, l.announcers(vip), "it is back")
			return l
		}
		// The same events give the same frames.
		assert.Equal(t, play().story.String(), play().story.String())
	}
}

// A rival is heard before this node knows that speakers are lost: it might be the next owner.
// Once speakers are lost it cannot be, and its claim is corrected as soon as any other.
func TestRivalHeardBeforeTheLoss(t *testing.T) {
	t.Parallel()
	l := newLAN(2, wire.ARP{})
	l.assign(0, map[netip.Addr]VIP{vipA: {Home: true}})
	l.pass(time.Minute)
	l.step(1, Surroundings{Crowd: 1})
	l.assign(1, map[netip.Addr]VIP{vipA: {}})
	l.pass(time.Second)
	require.Equal(t, []int{0, 1}, l.announcers(vipA))
	l.step(0, Surroundings{Crowd: 1})
	l.pass(correction)
	assert.Equal(t, []int{0}, l.announcers(vipA))
}

// Speakers that stop hearing each other notice it one after the other, and claim each VIP
// in every order. A speaker that claimed a VIP and has yielded it to a third one does not
// answer a question. That is no conflict, which would cost the Service its address.
func TestNobodyIsTakenForAStranger(t *testing.T) {
	t.Parallel()
	for seed := range uint64(50) {
		random := rand.New(rand.NewPCG(seed, 0))
		l := newLAN(3, wire.ARP{})
		vips := make([]map[netip.Addr]VIP, len(l.nodes))
		for i := range vips {
			vips[i] = map[netip.Addr]VIP{}
		}
		for vip, n := vipA, 0; n < 10; vip, n = vip.Next(), n+1 {
			vips[random.IntN(len(vips))][vip] = VIP{Home: true}
		}
		for i := range l.nodes {
			l.assign(i, vips[i])
		}
		l.pass(time.Minute)
		for _, i := range random.Perm(len(l.nodes)) {
			all := map[netip.Addr]VIP{}
			for _, v := range vips {
				for vip := range v {
					all[vip] = VIP{Home: vips[i][vip].Home}
				}
			}
			l.step(i, Surroundings{Crowd: 1})
			l.assign(i, all)
			l.pass(time.Duration(random.Int64N(int64(time.Second))))
		}
		l.pass(10 * time.Second)
		for vip := range vips[0] {
			require.Equal(t, []int{0}, l.announcers(vip))
		}
		for _, n := range l.notes {
			require.NotEqual(t, Conflict, n.Kind, "seed %d: %+v", seed, n)
		}
	}
}

// A speaker that has yielded a VIP hears when the other one yields it to a third. It does not
// take the silence of the second for the absence of both.
func TestYieldedToWhoYields(t *testing.T) {
	t.Parallel()
	l := newLAN(3, wire.ARP{})
	for i := range 2 {
		l.assign(i, map[netip.Addr]VIP{vipA: {}})
	}
	l.pass(10 * time.Second)
	require.Len(t, l.announcers(vipA), 1)
	l.assign(2, map[netip.Addr]VIP{vipA: {Home: true}})
	for range 100 {
		l.pass(pollInterval / 5)
		require.Equal(t, []int{2}, l.announcers(vipA))
	}
}

// Two speakers have the VIP in turn, and both answer the question whether they have it. When they have given it up the first one
// is asked again, and its silence is no conflict.
func TestWhoHasAnsweredMakesNoConflict(t *testing.T) {
	t.Parallel()
	l := newLAN(3, wire.ARP{})
	l.assign(0, map[netip.Addr]VIP{vipA: {}})
	for _, i := range []int{1, 2} {
		l.pass(2 * crossing)
		l.assign(3-i, nil)
		l.assign(i, map[netip.Addr]VIP{vipA: {Home: true}})
		l.pass(0)
		require.Equal(t, State{Yielded, l.nodes[i].Self}, l.nodes[0].State(vipA))
	}
	l.assign(2, map[netip.Addr]VIP{vipA: {Home: true, Leaving: true}})
	l.pass(10 * time.Second)
	require.Equal(t, []int{0}, l.answerers(vipA))
	for _, n := range l.notes {
		require.NotEqual(t, Conflict, n.Kind, "%+v", n)
	}
}

// A speaker claims the VIP and gives it up before it is asked. It returns the question, and its silence after that is no conflict.
// (Seed 330003377 of make simulate, with three nodes.)
func TestWhoGivesUpAtOnceMakesNoConflict(t *testing.T) {
	t.Parallel()
	l := newLAN(2, wire.ARP{})
	l.assign(0, map[netip.Addr]VIP{vipA: {}})
	l.pass(time.Minute)
	l.act(1, Assigned{map[netip.Addr]VIP{vipA: {Home: true}}})
	l.act(1, Due{})
	require.NotEmpty(t, l.wire, "the claim has not arrived yet")
	l.assign(1, map[netip.Addr]VIP{vipA: {Home: true, Leaving: true}})
	l.pass(10 * time.Second)
	require.Equal(t, []int{0}, l.answerers(vipA))
	for _, n := range l.notes {
		require.NotEqual(t, Conflict, n.Kind, "%+v", n)
	}
}

// A speaker claims the VIP while the answer to a question that it asked before is on its way, yields to that answer, and is asked about
// its claim. It returns the question, so there is no conflict, and hosts that heard its claim last hear the other one again.
// (Seed 360002801 of make simulate, with three nodes.)
func TestWhoYieldsAtOnceMakesNoConflict(t *testing.T) {
	t.Parallel()
	l := newLAN(2, wire.ARP{})
	l.assign(0, map[netip.Addr]VIP{vipA: {}})
	l.pass(time.Minute)
	l.act(1, Assigned{map[netip.Addr]VIP{vipA: {Home: true, Leaving: true}}})
	l.act(1, Due{})
	for _, to := range []int{0, 1, 0} { // it looks for the next owner, hears a claim, and asks a question
		require.Len(t, l.wire, 1)
		frame := l.wire[0].frame
		l.wire = nil
		l.act(to, received(frame))
	}
	require.Len(t, l.wire, 1, "the answer has not arrived yet")
	l.act(1, Assigned{map[netip.Addr]VIP{vipA: {Home: true}}})
	before := len(l.story.String())
	l.step(1, Due{})
	require.Equal(t, State{Yielded, l.nodes[0].Self}, l.nodes[1].State(vipA))
	l.pass(0)
	l.assign(1, nil)
	l.pass(10 * time.Second)
	require.Equal(t, []int{0}, l.answerers(vipA))
	announcement := (wire.ARP{}).Announce(l.nodes[0].statement(l.nodes[0].vips[vipA]), false)[0]
	require.Contains(t, l.story.String()[before:], fmt.Sprintf("node 0: %x", announcement))
	for _, n := range l.notes {
		require.NotEqual(t, Conflict, n.Kind, "%+v", n)
	}
}

// When a VIP moves by plan, a node answers for it at every moment, and both do for no longer
// than a few frames take, whichever hears of the move first.
func TestMoveByPlan(t *testing.T) {
	t.Parallel()
	for _, oldFirst := range []bool{true, false} {
		l := newLAN(2, wire.ARP{})
		l.assign(0, map[netip.Addr]VIP{vipA: {}})
		l.pass(time.Minute)
		leave := func() { l.assign(0, map[netip.Addr]VIP{vipA: {Leaving: true}}); l.pass(0) }
		take := func() { l.assign(1, map[netip.Addr]VIP{vipA: {}}); l.pass(0) }
		if oldFirst {
			leave()
			l.pass(300 * time.Millisecond)
			assert.Equal(t, []int{0}, l.answerers(vipA))
			take()
		} else {
			take()
			assert.Equal(t, []int{0, 1}, l.answerers(vipA), "the old owner has not heard of it")
			l.pass(300 * time.Millisecond)
			leave()
		}
		assert.Equal(t, []int{1}, l.answerers(vipA))
		assert.Empty(t, l.nodes[0].Leaving())
	}
}

// answerers returns the nodes that answer a client that asks for the VIP.
func (l *lan) answerers(vip netip.Addr) (nodes []int) {
	question := wire.Of(vip).Probe(wire.Statement{Self: client, VIP: vip}, wire.MAC{})
	for i, m := range l.nodes {
		if effects := m.Step(received(question), l.now); effects.Replies > 0 {
			nodes = append(nodes, i)
		}
	}
	return nodes
}

// A VIP with Hurry is probed each second, although others without it wait before it in the queue.
func TestHurryWaitsForNobody(t *testing.T) {
	t.Parallel()
	l := newLAN(1, wire.ARP{})
	taken := func(vip netip.Addr) {
		claim := wire.ARP{}.Announce(wire.Statement{Self: client, VIP: vip}, true)[0]
		l.step(0, received(claim))
	}
	l.assign(0, map[netip.Addr]VIP{vipA: {Probe: true}, vipB: {Probe: true, Hurry: true}})
	taken(vipA)
	taken(vipB)
	l.pass(3 * time.Second) // the host is gone
	assert.Equal(t, AddressConflict, l.nodes[0].State(vipA).Reason)
	assert.Empty(t, l.nodes[0].State(vipB).Reason)
	l.pass(10 * time.Second)
	assert.Empty(t, l.nodes[0].State(vipA).Reason)
}

// Whatever others claim, with their own or with recorded seals, the state is bounded by the
// number of VIPs.
func TestPendingIsBounded(t *testing.T) {
	t.Parallel()
	l := newLAN(1, wire.ARP{})
	l.assign(0, map[netip.Addr]VIP{vipA: {Probe: true}, vipB: {}})
	l.pass(time.Minute)
	l.step(0, Surroundings{Crowd: 1})
	key := seal.Key("the cluster's")
	for n := range 2_000 {
		from := wire.MAC{2, 1, 0, 0, 0, byte(n % 3)} // three speakers
		for _, s := range []seal.Seal{{}, key.Seal(vipB, from, true), key.Seal(vipB, from, false),
			key.Numbered(vipB, from, true, seal.Nonce{1})} {
			claim := wire.Statement{Self: from, VIP: vipB, Seal: s}
			l.step(0, received(wire.ARP{}.Announce(claim, true)[n%2]))
			l.step(0, received(wire.ARP{}.Probe(claim, wire.MAC{})))
		}
		l.pass(time.Millisecond)
		waiting := 0
		for _, line := range l.nodes[0].queue.lines {
			waiting += len(line)
		}
		require.LessOrEqual(t, waiting, 20)
	}
}

// A VIP moves to another node while this one still probes it. If it is free, this node answers for it until the next
// owner is heard; if another machine has it, this node does not. In seed 301397 of make simulate nobody answered.
func TestProbesOfAVIPThatLeavesGoOn(t *testing.T) {
	t.Parallel()
	for _, taken := range []bool{false, true} {
		l := newLAN(2, wire.ARP{})
		l.assign(0, map[netip.Addr]VIP{vipA: {Probe: true}})
		l.pass(probeWait)
		if taken {
			l.step(0, received(wire.ARP{}.Announce(wire.Statement{Self: client, VIP: vipA}, true)[0]))
		}
		l.assign(0, map[netip.Addr]VIP{vipA: {Probe: true, Leaving: true}})
		require.Empty(t, l.answerers(vipA), "it may be taken")
		l.pass(probes * probeWait)
		if taken {
			require.Empty(t, l.answerers(vipA))
			continue
		}
		require.Equal(t, []int{0}, l.answerers(vipA), "the next owner waits")
		require.Equal(t, []netip.Addr{vipA}, l.nodes[0].Leaving())
		l.assign(1, map[netip.Addr]VIP{vipA: {}})
		l.pass(time.Millisecond)
		require.Equal(t, []int{1}, l.answerers(vipA))
		require.Empty(t, l.nodes[0].Leaving())
	}
}

// An arriving VIP stays where it is while its old owner answers, whether that node knows that the VIP leaves or not. It is
// claimed if nobody answers.
func TestWhatArrivesIsLeftToWhoAnswers(t *testing.T) {
	t.Parallel()
	const silence = (maxMissed + 2) * pollInterval
	for _, vip := range []netip.Addr{vipA, vip6} {
		for name, owner := range map[string]VIP{"it knows nothing": {}, "it leaves": {Leaving: true}} {
			for _, goes := range []bool{false, true} {
				l := newLAN(2, wire.Of(vip))
				l.assign(0, map[netip.Addr]VIP{vip: {}})
				l.pass(time.Minute)
				l.assign(1, map[netip.Addr]VIP{vip: {Arriving: true, Home: true}})
				l.pass(time.Second)
				l.assign(0, map[netip.Addr]VIP{vip: owner})
				l.pass(5 * time.Second)
				require.Equal(t, []int{0}, l.announcers(vip), name)
				require.Empty(t, l.nodes[1].Withheld(), "it is expected to have nothing yet")
				if goes {
					l.assign(0, nil)
					l.pass(silence)
				} else {
					l.assign(1, map[netip.Addr]VIP{vip: {Home: true}})
					l.pass(0)
				}
				require.Empty(t, l.nodes[1].State(vip).Reason, name)
				require.Empty(t, l.nodes[0].Leaving(), name)
				l.assign(1, map[netip.Addr]VIP{vip: {Home: true}})
				require.Empty(t, l.nodes[1].State(vip).Reason, "it has arrived")
			}
		}
	}
	l := newLAN(1, wire.ARP{})
	l.assign(0, map[netip.Addr]VIP{vipA: {Arriving: true}})
	l.pass(silence)
	require.Equal(t, []int{0}, l.announcers(vipA), "nobody had it")
	require.Equal(t, []Note{{Kind: Arrived, VIP: vipA}}, l.notes)
}

// A speaker of v0.1.0 answers no question about a leaving VIP, and stops answering clients after 2 s. The VIP is claimed
// before that.
func TestWhatArrivesFromASpeakerOfV010(t *testing.T) {
	t.Parallel()
	l := newLAN(2, wire.ARP{})
	l.assign(0, map[netip.Addr]VIP{vipA: {}})
	l.pass(time.Minute)
	l.blocked = func(from, _ int) bool { return from == 0 }
	l.assign(1, map[netip.Addr]VIP{vipA: {Arriving: true}})
	l.assign(0, map[netip.Addr]VIP{vipA: {Leaving: true}})
	l.pass(1400 * time.Millisecond)
	require.Equal(t, []int{0}, l.answerers(vipA), "kube-proxy has some time")
	l.pass(400 * time.Millisecond)
	require.Contains(t, l.answerers(vipA), 1)
}

// A speaker with many VIPs died while it handed some of them over. The next owner asks about each, and claims all for which
// nobody answers before their clients give up. About the others it asks no more often than usual.
func TestManyThatArriveFromNobody(t *testing.T) {
	t.Parallel()
	many := func(v VIP) map[netip.Addr]VIP {
		want := map[netip.Addr]VIP{}
		for vip := vipA; len(want) < 1000; vip = vip.Next() {
			want[vip] = v
		}
		return want
	}
	l := newLAN(1, wire.ARP{})
	l.assign(0, many(VIP{Arriving: true}))
	l.pass(1400 * time.Millisecond)
	require.Empty(t, l.announcers(vipA), "it may be late")
	l.pass(400 * time.Millisecond)
	for vip := range many(VIP{}) {
		require.Equal(t, []int{0}, l.announcers(vip), vip)
	}
}

// A leaving VIP comes back to its node as an arriving one. If that node still answers for it, only that node does. If the
// next owner has taken it, it stays there.
func TestWhatComesBackWhileItArrives(t *testing.T) {
	t.Parallel()
	for _, taken := range []bool{false, true} {
		l := newLAN(2, wire.ARP{})
		l.assign(0, map[netip.Addr]VIP{vipA: {}})
		l.pass(time.Minute)
		l.assign(0, map[netip.Addr]VIP{vipA: {Leaving: true}})
		want := []int{0}
		if taken {
			want = []int{1}
			l.assign(1, map[netip.Addr]VIP{vipA: {}})
			l.pass(0)
		}
		l.assign(0, map[netip.Addr]VIP{vipA: {Arriving: true}})
		require.Equal(t, want, l.answerers(vipA))
		l.pass(4 * time.Second)
		require.Equal(t, want, l.answerers(vipA))
	}
}

// A leaving VIP comes back, and has to be probed because another machine was seen to have it. This node still answers for it,
// and continues without probes.
func TestWhatComesBackIsNotProbedWhileItIsAnsweredFor(t *testing.T) {
	t.Parallel()
	l := newLAN(1, wire.ARP{})
	for _, v := range []VIP{{}, {Leaving: true}, {Probe: true}} {
		l.assign(0, map[netip.Addr]VIP{vipA: v})
		require.Equal(t, []int{0}, l.answerers(vipA))
	}
}

// An arriving VIP that was not announced is not answered for when it leaves.
func TestWhatHasNotArrivedIsNotAnsweredFor(t *testing.T) {
	t.Parallel()
	l := newLAN(1, wire.ARP{})
	l.assign(0, map[netip.Addr]VIP{vipA: {Arriving: true}})
	l.assign(0, map[netip.Addr]VIP{vipA: {Leaving: true}})
	l.pass(time.Minute)
	require.Empty(t, l.nodes[0].Leaving())
	require.Empty(t, l.answerers(vipA))
	require.Empty(t, l.story)
}

// Both sides of a partition have a VIP. The partition ends, and one side gives the VIP up. No client finds it at both nodes,
// and clients of that side hear the other node, although speakers may agree before anybody has announced anything again.
func TestNextOwnerOutOfAPartition(t *testing.T) {
	t.Parallel()
	for _, whole := range []bool{false, true} {
		l := newLAN(3, wire.ARP{})
		l.lose()
		l.blocked = func(from, to int) bool { return from == 0 || to == 0 }
		for i := range 2 {
			l.assign(i, map[netip.Addr]VIP{vipA: {Home: i == 1}})
		}
		l.pass(time.Minute + beaconInterval/2)
		l.blocked = nil
		for i := range l.nodes {
			l.step(i, Surroundings{Whole: whole, Crowd: 1})
		}
		l.assign(0, map[netip.Addr]VIP{vipA: {Leaving: true}})
		l.pass(0)
		require.Equal(t, []int{1}, l.answerers(vipA))
		l.story.Reset()
		l.pass(correction)
		require.Contains(t, l.story.String(), "node 1: ffffffffffff", "whole: %t", whole)
	}
}

// A VIP moves to another node and back at once. The old owner hears of neither move before the other node asks about the VIP,
// and yields to the answer. So the other node's claim does not count when the old owner hears of the first move. (Seed 1865
// of make simulate.)
func TestWhoHasAnsweredGoesOn(t *testing.T) {
	t.Parallel()
	l := newLAN(2, wire.ARP{})
	l.assign(0, map[netip.Addr]VIP{vipA: {Home: true}})
	l.pass(time.Minute)
	l.assign(1, map[netip.Addr]VIP{vipA: {}})
	l.pass(2 * crossing)
	l.assign(1, map[netip.Addr]VIP{vipA: {Leaving: true}})
	l.pass(crossing)
	l.assign(0, map[netip.Addr]VIP{vipA: {Home: true, Leaving: true}})
	require.Equal(t, []int{0}, l.answerers(vipA))
}

// A machine that is no speaker of the cluster is not the next owner.
func TestOnlyASpeakerIsTheNextOwner(t *testing.T) {
	t.Parallel()
	l := newLAN(1, wire.ARP{})
	l.assign(0, map[netip.Addr]VIP{vipA: {}})
	l.pass(time.Minute)
	l.assign(0, map[netip.Addr]VIP{vipA: {Leaving: true}})
	for _, frame := range (wire.ARP{}).Announce(wire.Statement{Self: client, VIP: vipA}, true) {
		l.step(0, received(frame))
	}
	require.Equal(t, []int{0}, l.answerers(vipA))
}

// own returns the frames that the node has sent.
func (l *lan) own(node int) (frames [][]byte) {
	for line := range strings.Lines(l.story.String()) {
		if _, frame, ok := strings.Cut(line, fmt.Sprintf(" node %d: ", node)); ok {
			b, _ := hex.DecodeString(strings.TrimSpace(frame))
			frames = append(frames, b)
		}
	}
	return frames
}

// A VIP leaves for a node that has had it before, and is not there yet. Somebody repeats all that this node has sent, which ends no
// hand-over: this node answers until the other one has the VIP.
func TestRecordedClaimEndsNoHandOver(t *testing.T) {
	t.Parallel()
	for _, vip := range []netip.Addr{vipA, vip6} {
		l := newLAN(2, wire.Of(vip))
		l.assign(0, map[netip.Addr]VIP{vip: {}})
		l.pass(time.Minute)
		l.assign(0, map[netip.Addr]VIP{vip: {Leaving: true}})
		l.assign(1, map[netip.Addr]VIP{vip: {}}) // asks, is asked, and answers
		l.pass(time.Minute)
		require.Equal(t, []int{1}, l.answerers(vip))
		recorded := l.own(1)
		require.Greater(t, len(recorded), 5)
		l.assign(0, map[netip.Addr]VIP{vip: {}})
		l.assign(1, nil)
		l.pass(time.Minute)
		l.assign(1, map[netip.Addr]VIP{vip: {Arriving: true}})
		repeat := func() {
			for _, frame := range recorded {
				l.step(0, received(frame))
			}
			require.Equal(t, []int{0}, l.answerers(vip))
		}
		repeat()
		l.assign(0, map[netip.Addr]VIP{vip: {Leaving: true}})
		for range 50 {
			repeat()
			l.pass(100 * time.Millisecond)
		}
		l.assign(1, map[netip.Addr]VIP{vip: {}})
		l.pass(0)
		require.Equal(t, []int{1}, l.answerers(vip))
	}
}

// A machine that has the key claims a VIP for one hardware address after the other. Few of them are asked, and a speaker that
// can answer still gets the VIP when it is over.
func TestClaimsOfManyHardwareAddresses(t *testing.T) {
	t.Parallel()
	for _, vip := range []netip.Addr{vipA, vip6} {
		l := newLAN(2, wire.Of(vip))
		l.assign(0, map[netip.Addr]VIP{vip: {}})
		l.pass(time.Minute)
		m, key := l.nodes[0], seal.Key("the cluster's")
		for i := range 10_000 {
			mac := wire.MAC{2, 1, 0, 0, byte(i >> 8), byte(i)}
			claim := wire.Of(vip).Announce(wire.Statement{Self: mac, VIP: vip, Seal: key.Seal(vip, mac, true)}, false)[0]
			m.Step(received(claim), l.now)
			require.LessOrEqual(t, len(m.queue.lines[stepChallenge])+len(m.queue.lines[stepChallengeAgain]), maxChallenged)
			if i%100 == 0 {
				l.pass(50 * time.Millisecond)
			}
		}
		require.Equal(t, []int{0}, l.answerers(vip))
		l.pass(challenges * challengeWait)
		l.assign(1, map[netip.Addr]VIP{vip: {Home: true}})
		l.pass(time.Minute)
		require.Equal(t, []int{1}, l.answerers(vip))
	}
}

// A VIP leaves two nodes. One that is asked by the other one, because of a recorded claim, returns the question, which is not
// returned again.
func TestNoQuestionGoesBackAndForth(t *testing.T) {
	t.Parallel()
	l := newLAN(2, wire.ARP{})
	l.assign(1, map[netip.Addr]VIP{vipA: {}})
	l.pass(0)
	claim := l.own(1)[0]
	l.blocked = func(int, int) bool { return true }
	l.assign(0, map[netip.Addr]VIP{vipA: {}})
	for i := range l.nodes {
		l.assign(i, map[netip.Addr]VIP{vipA: {Leaving: true}})
	}
	l.pass(time.Minute)
	require.Equal(t, []int{0, 1}, l.answerers(vipA))
	step := func(i int, frames ...[]byte) [][]byte {
		require.Len(t, frames, 1)
		return l.nodes[i].Step(received(frames[0]), l.now).Frames
	}
	require.Empty(t, step(0, step(1, step(0, claim)...)...))

	// One that was recorded before both had the VIP goes back once.
	question := l.nodes[1].question(l.nodes[1].vips[vipA], wire.MAC{})
	l.pass(time.Minute)
	require.Empty(t, step(1, step(0, question)...))
}

// Somebody repeats the probes of a speaker that had a VIP before. A node that probes the VIP leaves it to that speaker once, for as
// long as that one may take to answer, and announces it then. A speaker that has the VIP still gets it.
func TestRecordedProbeDelaysANewVIPOnce(t *testing.T) {
	t.Parallel()
	for _, vip := range []netip.Addr{vipA, vip6} {
		l := newLAN(2, wire.Of(vip))
		l.assign(1, map[netip.Addr]VIP{vip: {Probe: true, Home: true}})
		l.pass(probes * probeWait / 2)
		recorded := l.own(1)
		require.NotEmpty(t, recorded)
		l.assign(1, nil)
		l.assign(0, map[netip.Addr]VIP{vip: {Probe: true}})
		pass := func(d time.Duration) {
			for range d / (50 * time.Millisecond) {
				for _, frame := range recorded {
					l.step(0, received(frame))
				}
				l.pass(50 * time.Millisecond)
			}
		}
		pass((maxMissed+1)*pollInterval + (probes+1)*probeWait)
		require.Equal(t, []int{0}, l.announcers(vip))
		pass(time.Minute)
		require.Equal(t, []int{0}, l.announcers(vip))
		l.assign(1, map[netip.Addr]VIP{vip: {Home: true}})
		pass(time.Second)
		require.Equal(t, []int{1}, l.announcers(vip))
	}
}

// A node has yielded to a speaker that gives the VIP up. It claims the VIP with its next question, and does not wait until
// that speaker is silent.
func TestYieldedHearsThatTheVIPLeaves(t *testing.T) {
	t.Parallel()
	l := newLAN(2, wire.ARP{})
	l.lose()
	l.assign(0, map[netip.Addr]VIP{vipA: {Home: true}})
	l.assign(1, map[netip.Addr]VIP{vipA: {}})
	l.pass(time.Minute)
	require.Equal(t, []int{0}, l.announcers(vipA))
	l.assign(0, map[netip.Addr]VIP{vipA: {Home: true, Leaving: true}})
	l.pass(pollInterval)
	require.Equal(t, []int{1}, l.answerers(vipA))
}

// Two speakers that do not see each other both get a new VIP that a host has. One yields it to the other, which
// does not announce it, and so does not answer. Neither announces it before the host is gone; the same holds if the
// first one waits for its kube-proxy.
func TestYieldedWhileItWasProbed(t *testing.T) {
	t.Parallel()
	for _, arriving := range []bool{false, true} {
		l := newLAN(2, wire.ARP{})
		taken := wire.ARP{}.Announce(wire.Statement{Self: client, VIP: vipA}, true)[0]
		pass := func(d time.Duration, host bool) {
			for range d / probeWait {
				for i := range l.nodes {
					if host {
						l.step(i, received(taken))
					}
				}
				l.pass(probeWait)
			}
		}
		l.assign(0, map[netip.Addr]VIP{vipA: {Probe: true, Home: true}})
		l.assign(1, map[netip.Addr]VIP{vipA: {Probe: true, Arriving: arriving}})
		for range 20 {
			pass(time.Second, true)
			require.Empty(t, l.announcers(vipA))
		}
		require.LessOrEqual(t, bytes.Count(l.story.Bytes(), []byte("node 1:")), 6) // the probes before have ended
		l.assign(0, map[netip.Addr]VIP{})
		pass(2*recheck, false)
		require.Equal(t, []int{1}, l.announcers(vipA))
	}
}

// Services come and go, or are announced anew, all the time: of their VIPs, which would be announced again in an hour, nothing is
// kept until then. The refresh of one that stays is not lost.
func TestRefreshesOfGoneVIPsAreForgotten(t *testing.T) {
	t.Parallel()
	l := newLAN(1, wire.ARP{})
	refreshed := VIP{Refresh: time.Hour}
	l.assign(0, map[netip.Addr]VIP{vipA: refreshed})
	l.pass(10 * time.Second)
	vip := netip.MustParseAddr("198.19.0.0")
	for i := range 20 * fewRefreshes {
		vip = vip.Next()
		l.assign(0, map[netip.Addr]VIP{vipA: refreshed, vip: refreshed, vipB: {Refresh: time.Hour - time.Duration(i)}})
		l.pass(10 * time.Second)
	}
	require.LessOrEqual(t, len(l.nodes[0].queue.lines[stepRefresh]), 2*3+fewRefreshes+2)
	before := len(l.own(0))
	l.assign(0, map[netip.Addr]VIP{vipA: refreshed})
	l.pass(time.Hour)
	require.Equal(t, before+framesAtOnce, len(l.own(0)))
}

// While speakers are lost and nothing comes in, a VIP that this node takes over is announced once. When no speaker is lost any more,
// that is noted, though nothing comes in yet.
func TestDeafInterface(t *testing.T) {
	t.Parallel()
	l := newLAN(1, wire.ARP{})
	pass := func(d time.Duration) {
		for range d / hearingInterval {
			l.step(0, Counted{Frames: 1, Known: true})
			l.pass(hearingInterval)
		}
	}
	lost := func() {
		l.lose()
		pass(2 * deafAfter)
	}
	lost()
	require.Equal(t, []Note{{Kind: Deaf}}, l.notes)
	l.assign(0, map[netip.Addr]VIP{vipA: {Refresh: time.Second}})
	pass(time.Minute)
	claims := 0
	for _, frame := range l.own(0) {
		if m, _ := (wire.ARP{}).Parse(frame); m.Claims.IsValid() {
			claims++
		}
	}
	require.Len(t, wire.ARP{}.Announce(wire.Statement{VIP: vipA}, true), claims)
	l.step(0, Surroundings{Whole: true, Crowd: 1})
	require.Equal(t, []Note{{Kind: Deaf}, {Kind: AllBack}}, l.notes)
	lost()
	require.Equal(t, []Note{{Kind: Deaf}, {Kind: AllBack}, {Kind: Deaf}}, l.notes)
}
