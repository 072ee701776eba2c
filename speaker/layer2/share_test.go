package layer2

import (
	"fmt"
	"net/netip"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	arppacket "github.com/mdlayher/arp"
	ndppacket "github.com/mdlayher/ndp"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/lodestone-lb/lodestone/speaker/election"
	"github.com/lodestone-lb/lodestone/speaker/layer2/clients"
	"github.com/lodestone-lb/lodestone/speaker/layer2/seal"
	"github.com/lodestone-lb/lodestone/speaker/plan"
)

func nodeName(i int) string { return fmt.Sprint("n", i) }

// town is a segment with speakers that share a VIP, and hosts that use it.
type town struct {
	*segment
	vip   netip.Addr
	hosts []mac
	// knows is where each host sends its packets for the VIP, got how many frames
	// it had to look at since the last look.
	knows map[mac]mac
	got   map[mac]int
	read  int // of what was said
}

const hosts = 60

// inTown runs a story in simulated time, for a VIP of each family.
func inTown(t *testing.T, speakers int, story func(*testing.T, *town)) {
	t.Helper()
	for _, vip := range []netip.Addr{vipA, vip6} {
		onSegment(t, speakers, func(t *testing.T, s *segment) {
			c := &town{segment: s, vip: vip, knows: map[mac]mac{}, got: map[mac]int{}}
			for i := range hosts {
				c.hosts = append(c.hosts, mac{2, 0xc, 0, 0, 0, byte(i)})
			}
			story(t, c)
		})
	}
}

// among has the speakers share the VIP, those that share it already in the order
// of their numbers.
func (c *town) among(speakers ...int) {
	c.t.Helper()
	for _, i := range speakers {
		c.speakers[i].set(map[netip.Addr]plan.Layer2{c.vip: {Sharers: names(speakers)}})
	}
	synctest.Wait()
}

func names(speakers []int) []string {
	var all []string
	for _, i := range speakers {
		all = append(all, nodeName(i))
	}
	slices.Sort(all)
	return all
}

// of returns the hardware address of the speaker that has the host.
func (c *town) of(host mac, speakers ...int) mac {
	name := election.NewShare(c.vip, names(speakers)).NodeOf(host)
	for _, i := range speakers {
		if nodeName(i) == name {
			return c.macs[i]
		}
	}
	c.t.Fatalf("%s has the host %s", name, host)
	return mac{}
}

func (c *town) addr(host mac) netip.Addr {
	if c.vip.Is4() {
		return netip.AddrFrom4([4]byte{198, 18, 2, host[5]})
	}
	a := vip6.As16()
	a[12], a[15] = 0xc, host[5]
	return netip.AddrFrom16(a)
}

// question is what a host asks, of all or, to verify what it knows, of one.
func (c *town) question(host, to mac) []byte {
	if c.vip.Is4() {
		return arpFrame(arppacket.OperationRequest, to, host, c.addr(host), mac{}, c.vip)
	}
	if to == broadcast {
		to = multicast(solicitedNode(c.vip))
	}
	return ndpFrame(to, host, c.addr(host), solicitedNode(c.vip), &ndppacket.NeighborSolicitation{
		TargetAddress: c.vip, Options: []ndppacket.Option{sourceOption(host)},
	})
}

// say brings a frame of a host to the speakers that are not cut off.
func (c *town) say(f []byte) {
	name := map[bool]string{true: "eth0", false: "eth0 IPv6"}[c.vip.Is4()]
	for i, w := range c.speakers {
		if to := mac(f[:6]); w.conn(name) != nil && !c.cut[i] && (to.group() || to == c.macs[i]) {
			w.receive(name, f)
		}
	}
	synctest.Wait()
}

// ask has the host ask, and returns who answers it.
func (c *town) ask(host, to mac) (answers []mac) {
	c.look()
	before := c.read
	c.say(c.question(host, to))
	for _, f := range c.heard()[before:] {
		if m, ok := protocolOf(c.vip).parse(f.bytes); ok && m.to == host && m.claims == c.vip {
			answers = append(answers, m.from)
		}
	}
	c.look()
	return answers
}

// look lets the hosts hear what was said.
func (c *town) look() {
	said := c.heard()
	for _, f := range said[c.read:] {
		m, ok := protocolOf(c.vip).parse(f.bytes)
		require.True(c.t, ok, "%x", f.bytes)
		for _, h := range c.hosts {
			if !m.to.group() && m.to != h {
				continue
			}
			c.got[h]++
			if m.claims == c.vip {
				c.knows[h] = m.from
			}
		}
	}
	c.read = len(said)
}

// settle waits until the speakers have no more to say.
func (c *town) settle() {
	time.Sleep(10 * time.Second)
	c.look()
	clear(c.got)
}

// spread demands that each host sends to the speaker that has it.
func (c *town) spread(what string, speakers ...int) {
	c.t.Helper()
	c.look()
	for _, h := range c.hosts {
		require.Equal(c.t, c.of(h, speakers...), c.knows[h], "%s: host %s", what, h)
	}
}

func (c *town) everybodyAsks() {
	for _, h := range c.hosts {
		c.ask(h, broadcast)
	}
}

// Each host has exactly one answer, always from the same node, and nothing is
// ever announced to all.
func TestSharedVIPHasOneAnswerForEachHost(t *testing.T) {
	t.Parallel()
	inTown(t, 3, func(t *testing.T, c *town) {
		c.among(0, 1, 2)
		parts := map[mac]int{}
		for _, h := range c.hosts {
			mine := c.of(h, 0, 1, 2)
			parts[mine]++
			require.Equal(t, []mac{mine}, c.ask(h, broadcast), "host %s", h)
			for _, node := range c.macs {
				want := map[bool][]mac{true: {mine}}[node == mine]
				require.Equal(t, want, c.ask(h, node), "host %s verifies what it knows with %s", h, node)
			}
		}
		for _, node := range c.macs {
			assert.Greater(t, parts[node], hosts/6, "%v", parts)
		}
		c.settle()
		for _, f := range c.heard() {
			m, ok := protocolOf(c.vip).parse(f.bytes)
			require.True(t, ok)
			assert.False(t, m.to.group() && m.claims.IsValid(), "announced: %x", f.bytes)
		}
		for i, w := range c.speakers {
			v := w.Status().VIPs[0]
			assert.Equal(t, names([]int{0, 1, 2}), v.Sharers)
			assert.Equal(t, parts[c.macs[i]], v.Clients)
			assert.Equal(t, hosts, v.KnownClients)
			assert.Empty(t, w.Conflicts())
		}
	})
}

// The kernel of a node asks for the VIP: it would forward what no Service takes, and
// so would the next one. Nobody answers it; and an answer that came before all knew
// each other is no foreign host's.
func TestKernelOfASharerIsNotAnswered(t *testing.T) {
	t.Parallel()
	inTown(t, 3, func(t *testing.T, c *town) {
		c.among(0, 1, 2)
		c.settle()
		for _, node := range c.macs {
			require.Empty(t, c.ask(node, broadcast))
		}
		name, address := "eth0", clientIP
		if c.vip.Is6() {
			name, address = "eth0 IPv6", clientIP6
		}
		kernel := message{to: broadcast, from: c.macs[0], asks: c.vip, claims: address}
		c.speakers[0].receive(name, protocolOf(c.vip).answer(statement{self: c.macs[1], vip: c.vip}, kernel))
		synctest.Wait()
		require.Empty(t, c.speakers[0].Conflicts())
	})
}

// A node is lost: each of its hosts is told by its heir, soon, and no other host
// sees a packet.
func TestLostSharer(t *testing.T) {
	t.Parallel()
	inTown(t, 3, func(t *testing.T, c *town) {
		c.among(0, 1, 2)
		c.everybodyAsks()
		c.settle()
		c.partition(map[int]bool{1: true})
		c.read = 0
		c.among(0, 2)
		time.Sleep(20 * time.Millisecond)
		c.spread("after 20 ms", 0, 2)
		time.Sleep(time.Minute)
		c.look()
		frames := len(protocolOf(c.vip).announce(statement{vip: c.vip}, false))
		for _, h := range c.hosts {
			if c.of(h, 0, 1, 2) == c.macs[1] {
				assert.Equal(t, 2*frames, c.got[h], "told twice")
			} else {
				assert.Zero(t, c.got[h], "host %s of another node", h)
			}
		}
		require.Equal(t, []mac{c.of(c.hosts[0], 0, 2)}, c.ask(c.hosts[0], broadcast))
	})
}

// A node comes that has never heard a host. It is told of all, takes its part, and
// when another one is lost, also has the hosts of that one.
func TestJoiningSharer(t *testing.T) {
	t.Parallel()
	for _, first := range []int{0, 2} { // who hears first that 2 shares the VIP: the others, or itself
		inTown(t, 3, func(t *testing.T, c *town) {
			c.among(0, 1)
			c.everybodyAsks()
			c.settle()
			set := func(i int) {
				c.speakers[i].set(map[netip.Addr]plan.Layer2{c.vip: {Sharers: names([]int{0, 1, 2})}})
			}
			set(first)
			synctest.Wait()
			time.Sleep(30 * time.Millisecond)
			for i := range c.speakers {
				set(i)
			}
			time.Sleep(50 * time.Millisecond)
			c.spread("it came", 0, 1, 2)
			time.Sleep(10 * time.Second)
			c.look()
			for _, h := range c.hosts {
				if c.of(h, 0, 1, 2) != c.macs[2] {
					assert.LessOrEqual(t, c.got[h], 2, "host %s of another node hears no more than two questions", h)
				}
			}
			c.settle()
			c.partition(map[int]bool{0: true})
			c.read = 0
			c.among(1, 2)
			time.Sleep(20 * time.Millisecond)
			c.spread("another one was lost", 1, 2)
		})
	}
}

// A node goes: it answers its hosts until its heirs have them, and at every moment
// each host has an answer. That holds also for a heir that has never heard them.
func TestLeavingSharer(t *testing.T) {
	t.Parallel()
	inTown(t, 3, func(t *testing.T, c *town) {
		c.among(0, 1, 2)
		c.everybodyAsks()
		c.settle()
		c.speakers[2].set(nil) // it starts anew, and nobody has noticed
		c.among(2, 0, 1)
		c.settle()
		goes := map[netip.Addr]plan.Layer2{c.vip: {Sharers: names([]int{0, 1, 2}), Leaving: true}}
		c.speakers[0].set(goes)
		assert.Equal(t, 1, c.speakers[0].Leaving())
		for _, h := range c.hosts {
			require.Equal(t, []mac{c.of(h, 0, 1, 2)}, c.ask(h, broadcast), "the heirs have not heard of it")
		}
		c.speakers[1].set(map[netip.Addr]plan.Layer2{c.vip: {Sharers: names([]int{1, 2})}})
		time.Sleep(200 * time.Millisecond)
		assert.Equal(t, 1, c.speakers[0].Leaving(), "one of two heirs has not heard of it")
		c.among(1, 2)
		for start := time.Now(); c.speakers[0].Leaving() > 0; time.Sleep(5 * time.Millisecond) {
			require.Less(t, time.Since(start), 500*time.Millisecond, "the heirs were not heard")
			require.NotEmpty(t, c.ask(c.hosts[0], broadcast))
		}
		for _, h := range c.hosts {
			require.Equal(t, []mac{c.of(h, 1, 2)}, c.ask(h, broadcast), "it has gone")
		}
		c.speakers[0].set(nil)
		time.Sleep(10 * time.Second)
		c.spread("it has gone", 1, 2)
	})
}

// What a node had before it left is not true any more when it comes back.
func TestSharerComesBack(t *testing.T) {
	t.Parallel()
	inTown(t, 2, func(t *testing.T, c *town) {
		c.among(0, 1)
		c.everybodyAsks()
		c.settle()
		c.speakers[0].set(map[netip.Addr]plan.Layer2{c.vip: {Sharers: names([]int{0, 1}), Leaving: true}})
		c.among(1)
		time.Sleep(500 * time.Millisecond)
		c.spread("it leaves", 1)
		c.among(0, 1)
		time.Sleep(10 * time.Second)
		c.spread("it is back", 0, 1)
	})
}

// A change that is undone before the hosts were told costs them nothing but time.
func TestSharersThatFlap(t *testing.T) {
	t.Parallel()
	inTown(t, 3, func(t *testing.T, c *town) {
		c.among(0, 1, 2)
		c.everybodyAsks()
		c.settle()
		for range 20 {
			c.among(0, 1)
			time.Sleep(3 * time.Millisecond)
			c.among(2, 0, 1)
			time.Sleep(3 * time.Millisecond)
		}
		time.Sleep(10 * time.Second)
		c.spread("after all", 0, 1, 2)
	})
}

// A new VIP is looked for by all that share it: they do not take each other for
// who has it, but do so with another host.
func TestNewSharedVIP(t *testing.T) {
	t.Parallel()
	inTown(t, 3, func(t *testing.T, c *town) {
		for _, w := range c.speakers {
			w.set(map[netip.Addr]plan.Layer2{c.vip: {Sharers: names([]int{0, 1, 2}), New: true}})
		}
		time.Sleep(probes*probeWait + 10*time.Millisecond)
		require.Len(t, c.owners(c.vip), 3)
		require.Equal(t, []mac{c.of(c.hosts[0], 0, 1, 2)}, c.ask(c.hosts[0], broadcast))
		for _, w := range c.speakers {
			w.set(nil)
			w.set(map[netip.Addr]plan.Layer2{c.vip: {Sharers: names([]int{0, 1, 2}), New: true}})
		}
		c.say(protocolOf(c.vip).announce(statement{self: c.hosts[1], vip: c.vip}, false)[0])
		time.Sleep(time.Second)
		assert.Empty(t, c.owners(c.vip), "a host has it")
	})
}

// Another host claims a VIP that is shared: each node tells its own hosts that it
// is not so.
func TestForeignClaimToASharedVIP(t *testing.T) {
	t.Parallel()
	inTown(t, 3, func(t *testing.T, c *town) {
		c.among(0, 1, 2)
		c.everybodyAsks()
		c.settle()
		claim := protocolOf(c.vip).announce(statement{self: mac{2, 0xe, 0, 0, 0, 0xe}, vip: c.vip}, false)[0]
		c.say(claim)
		for _, h := range c.hosts {
			c.knows[h] = mac(claim[6:12])
		}
		for _, w := range c.speakers {
			require.Len(t, w.Conflicts(), 1)
			assert.True(t, w.Conflicts()[0].Announced)
		}
		time.Sleep(defence + 20*time.Millisecond)
		c.spread("defended", 0, 1, 2)
	})
}

// Who looks whether the address is free is told by one node that it is not, and
// nobody else believes anything because of the answer.
func TestProbeForASharedVIP(t *testing.T) {
	t.Parallel()
	inTown(t, 3, func(t *testing.T, c *town) {
		c.among(0, 1, 2)
		c.everybodyAsks()
		c.settle()
		stranger := mac{2, 0xe, 0, 0, 0, 0xe}
		c.say(protocolOf(c.vip).probe(statement{self: stranger, vip: c.vip}, mac{}))
		said := c.heard()[c.read:]
		require.Len(t, said, 1)
		m, ok := protocolOf(c.vip).parse(said[0].bytes)
		require.True(t, ok)
		assert.Equal(t, stranger, m.to)
		assert.Equal(t, c.of(stranger, 0, 1, 2), m.from)
		assert.Equal(t, c.vip, m.claims)
		if c.vip.Is6() {
			_, destination, na := advertised(t, said[0].bytes)
			assert.Equal(t, allNodes, destination)
			assert.False(t, na.Solicited)
		}
		assert.Zero(t, c.speakers[0].Status().VIPs[0].KnownClients-hosts, "it uses nothing")
	})
}

// From one owner to many and back: nobody yields, nobody is taken for a stranger.
func TestSharingBeginsAndEnds(t *testing.T) {
	t.Parallel()
	inTown(t, 2, func(t *testing.T, c *town) {
		c.speakers[0].set(claimed(true, c.vip))
		c.everybodyAsks()
		c.among(1, 0)
		c.settle()
		c.everybodyAsks()
		c.spread("shared", 0, 1)
		late := statement{c.macs[0], c.vip, seal.Key("the cluster's").Seal(c.vip, c.macs[0], true)}
		c.say(protocolOf(c.vip).announce(late, false)[0])
		require.Len(t, c.owners(c.vip), 2, "yielded to a claim of before")
		c.speakers[1].set(map[netip.Addr]plan.Layer2{c.vip: {Sharers: names([]int{0, 1}), Leaving: true}})
		c.speakers[0].set(claimed(true, c.vip))
		time.Sleep(time.Second)
		assert.Zero(t, c.speakers[1].Leaving(), "the owner was not heard")
		c.look()
		for _, h := range c.hosts {
			assert.Equal(t, c.macs[0], c.knows[h])
		}
		for _, w := range c.speakers {
			assert.Empty(t, w.Conflicts())
		}
	})
}

// Nodes that each believe to be alone both answer. A host keeps to the one that it
// knows, and both carry its packets; the end brings back the shares.
func TestSharersThatDoNotSeeEachOther(t *testing.T) {
	t.Parallel()
	inTown(t, 2, func(t *testing.T, c *town) {
		c.among(0, 1)
		c.everybodyAsks()
		c.settle()
		c.lose(true)
		c.among(0)
		c.among(1)
		time.Sleep(time.Minute)
		assert.ElementsMatch(t, c.macs, c.ask(c.hosts[0], broadcast))
		c.look()
		said := c.read
		time.Sleep(time.Hour)
		assert.Len(t, c.heard(), said, "they fight")
		c.lose(false)
		c.among(0, 1)
		time.Sleep(10 * time.Second)
		c.spread("they see each other", 0, 1)
		for _, w := range c.speakers {
			assert.Empty(t, w.Conflicts())
		}
	})
}

// Who is not announced to all has no turn when all are told.
func TestBeaconsAreOfOwnersAlone(t *testing.T) {
	t.Parallel()
	onSegment(t, 1, func(t *testing.T, s *segment) {
		w := s.speakers[0]
		w.set(map[netip.Addr]plan.Layer2{vipA: {Sharers: names([]int{0})}, vipB: {}})
		w.after(time.Minute)
		s.lose(true)
		w.restart()
		for _, f := range w.after(10*beaconInterval + time.Millisecond) {
			assert.Equal(t, vipB, f.vip(t))
		}
		w.restart()
		assert.Len(t, w.after(10*beaconInterval), 2*10, "one in each interval, in two forms")
	})
}

// What is withdrawn is forgotten.
func TestWithdrawnVIPHasNoClients(t *testing.T) {
	t.Parallel()
	inWorld(t, func(t *testing.T, w *world) {
		want := map[netip.Addr]plan.Layer2{vipA: {Sharers: names([]int{0})}, vipB: {}}
		w.set(want)
		w.receive("eth0", ask(vipA, clientIP, broadcast))
		synctest.Wait()
		require.Equal(t, 1, w.Status().VIPs[0].KnownClients)
		w.set(everywhere(vipB))
		w.set(want)
		assert.Zero(t, w.Status().VIPs[0].KnownClients)
	}, eth(1, "eth0"))
}

// Other requests do not wait for a thousand hosts that are told, which are told at
// the pace of all announcements.
func TestCorrectionsArePaced(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w, stop := newWorld(t, func(o *Options) { o.Node = nodeName(0) }, eth(1, "eth0"))
		shared := func(sharers ...int) { w.set(map[netip.Addr]plan.Layer2{vipA: {Sharers: names(sharers)}}) }
		shared(0, 1)
		gone := election.NewShare(vipA, names([]int{0, 1}))
		lost := 0
		for i := range 4000 {
			host := mac{2, 0xc, 0, 0, byte(i >> 8), byte(i)}
			w.receive("eth0", arpFrame(arppacket.OperationRequest, broadcast, host, clientIP, mac{}, vipA))
			if gone.NodeOf(host) == nodeName(1) {
				lost++
			}
		}
		w.after(time.Minute)
		w.restart()
		shared(0)
		first := w.after(correctAgain - time.Millisecond)
		require.Len(t, first, 2*lost)
		last := first[len(first)-1].at
		assert.InDelta(t, float64(2*lost)/framesPerSecond, last.Seconds(), 0.02)
		assert.Len(t, w.after(time.Minute), 2*lost, "once more")
		assert.EqualValues(t, 4*lost, testutil.ToFloat64(w.metrics.corrections.WithLabelValues("eth0", "IPv4")))
		require.NoError(t, stop())
	})
}

// Who is asked while it looks whether the VIP is in use has nothing to tell, and
// tells when it is asked again.
func TestQuestionWhileProbing(t *testing.T) {
	t.Parallel()
	inWorld(t, func(t *testing.T, w *world) {
		other := mac{2, 0, 0, 0, 0, 2}
		asks := arp{}.probe(statement{self: other, vip: vipA, seal: seal.Key("the cluster's").Joining(vipA, other)}, mac{})
		w.set(map[netip.Addr]plan.Layer2{vipA: {Sharers: []string{""}, New: true}})
		w.receive("eth0", asks)
		w.after(time.Minute)
		w.receive("eth0", ask(vipA, clientIP, broadcast))
		w.after(time.Minute)
		w.receive("eth0", asks)
		told := w.after(time.Minute)
		require.Len(t, told, 2)
		m, ok := arp{}.parse(told[0].bytes)
		require.True(t, ok)
		assert.Equal(t, clientMAC, m.from)
		assert.Equal(t, other, m.to)
	}, eth(1, "eth0"))
}

// repeated is the frame in which a sharer repeats what a client asked.
func repeated(from mac, vip netip.Addr, c clients.Client, to mac) []byte {
	s := statement{from, vip, seal.Key("the cluster's").Repeating(vip, from, seal.Client{Hardware: c.Hardware, Addr: c.Addr})}
	return protocolOf(vip).repeat(s, c, to)
}

// A recorded seal tells of the client that it was made for, and of no other.
func TestForgedClientsAreNotTold(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w, stop := newWorld(t, func(o *Options) { o.Node = nodeName(0) }, eth(1, "eth0"))
		w.set(map[netip.Addr]plan.Layer2{vipA: {Sharers: names([]int{0})}})
		w.after(time.Minute)
		other, self := mac{2, 0, 0, 0, 0, 2}, hardwareAddr(eth(1, "eth0").HardwareAddr)
		f := repeated(other, vipA, clients.Client{Hardware: clientMAC, Addr: clientIP}, self)
		for i := range 10_000 {
			forged := slices.Clone(f)
			copy(forged[offSender:], []byte{2, 0xc, 1, 0, byte(i >> 8), byte(i)})
			w.receive("eth0", forged)
		}
		for _, f := range w.after(time.Minute) {
			m, ok := arp{}.parse(f.bytes)
			require.True(t, ok)
			require.NotEqual(t, m.via, m.to, "%+v", m)
			require.False(t, m.seal != (seal.Seal{}) && m.claims == vipA && !m.answers && m.asks == vipA, "a forged client is told: %+v", m)
		}
		w.receive("eth0", f)
		assert.NotEmpty(t, w.after(time.Minute), "the client of the seal is told")
		require.NoError(t, stop())
	})
}

// What waits for the task that announces is bounded.
func TestContentionsAreBounded(t *testing.T) {
	t.Parallel()
	i := inbox{news: make(chan struct{}, 1)}
	for n := range 2 * maxContentions {
		i.put(contention{kind: gained, client: clients.Client{Hardware: mac{2, 0, 0, byte(n >> 16), byte(n >> 8), byte(n)}}})
	}
	assert.Len(t, i.take(), maxContentions)
}

// Seals can be recorded and repeated: whoever does so has each host told at the pace
// of all announcements, and nothing grows.
func TestRepeatedSealsAreAnsweredOnce(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w, stop := newWorld(t, func(o *Options) { o.Node = nodeName(0) }, eth(1, "eth0"))
		w.set(map[netip.Addr]plan.Layer2{vipA: {Sharers: names([]int{0})}})
		for i := range hosts {
			w.receive("eth0", arpFrame(arppacket.OperationRequest, broadcast, mac{2, 0xc, 0, 0, 0, byte(i)}, clientIP, mac{}, vipA))
		}
		w.after(time.Minute)
		other := mac{2, 0, 0, 0, 0, 2}
		asks := statement{self: other, vip: vipA, seal: seal.Key("the cluster's").Joining(vipA, other)}
		often := func(frames ...[]byte) {
			for i := range 1000 {
				w.receive("eth0", frames[i%len(frames)])
				time.Sleep(100 * time.Microsecond)
			}
		}
		meanwhile := framesPerSecond / 10
		often(arp{}.probe(asks, mac{}))
		assert.LessOrEqual(t, len(w.after(time.Minute)), meanwhile+2*(hosts+1))
		var told [][]byte
		for i := range hosts {
			f := repeated(other, vipA, clients.Client{Hardware: mac{2, 0xc, 0, 0, 1, byte(i)}, Addr: clientIP}, nodeMAC)
			copy(f, eth(1, "eth0").HardwareAddr)
			told = append(told, f)
		}
		often(told...)
		assert.LessOrEqual(t, len(w.after(time.Minute)), 2*(meanwhile+2*hosts+2*burstFrames))
		w.receive("eth0", told[0])
		assert.Len(t, w.after(time.Minute), 4)
		require.NoError(t, stop())
	})
}

// What a speaker repeats is read as what the client said, by who knows the key.
func TestRepeatedRequest(t *testing.T) {
	t.Parallel()
	client := clients.Client{Hardware: clientMAC, Addr: clientIP}
	for _, vip := range []netip.Addr{vipA, vip6} {
		if vip.Is6() {
			client.Addr = clientIP6
		}
		s := claimOf(nodeMAC, vip)
		m, ok := protocolOf(vip).parse(protocolOf(vip).repeat(s, client, mac{2, 0, 0, 0, 0, 2}))
		require.True(t, ok)
		assert.Equal(t, message{to: mac{2, 0, 0, 0, 0, 2}, from: clientMAC, via: nodeMAC, asks: vip, claims: client.Addr, seal: s.seal}, m)
	}
}
