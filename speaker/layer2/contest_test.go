package layer2

import (
	"maps"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	arppacket "github.com/mdlayher/arp"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/lodestone-lb/lodestone/speaker/layer2/seal"
	"github.com/lodestone-lb/lodestone/speaker/layer2/segment"
	"github.com/lodestone-lb/lodestone/speaker/layer2/wire"
	"github.com/lodestone-lb/lodestone/speaker/plan"
)

// fakeMembers reports whether speakers are lost.
type fakeMembers struct {
	mu      sync.Mutex
	lost    bool
	crowd   int // 0: 1
	changed chan struct{}
}

func (f *fakeMembers) Crowd() int { return max(1, f.crowd) }

func (f *fakeMembers) Whole() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return !f.lost
}

func (f *fakeMembers) Changed() <-chan struct{} {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.changed
}

func (f *fakeMembers) lose(lost bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.lost = lost
	close(f.changed)
	f.changed = make(chan struct{})
}

// lan is a simulated broadcast domain with speakers, each with eth0.
type lan struct {
	t        *testing.T
	speakers []*world
	members  []*fakeMembers
	macs     []mac
	mu       sync.Mutex
	cut      map[int]bool // speakers on the other side of a partition
	deaf     int          // the speaker whose link carries nothing to it; 0: none
	received uint64
	sent     []frame // in order, since start
	lines    map[wireEnd]chan []byte
	carrying sync.WaitGroup
	start    time.Time
}

// onSegment runs a story of n speakers in simulated time.
func onSegment(t *testing.T, n int, story func(*testing.T, *lan)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		s := &lan{t: t, cut: map[int]bool{}, lines: map[wireEnd]chan []byte{}}
		defer s.close() // when all speakers have stopped
		for i := range n {
			m := &fakeMembers{changed: make(chan struct{})}
			w, stop := newWorld(t, func(o *Options) {
				o.Members = m
				o.Received = func(int) (uint64, error) { return s.comesIn(i), nil }
			}, eth(i+1, "eth0"))
			w.onWire(func(name string, frame []byte) { s.carry(i, name, frame) })
			defer func() { require.NoError(t, stop()) }()
			s.speakers, s.members, s.macs = append(s.speakers, w), append(s.members, m), append(s.macs, hardwareAddr(eth(i+1, "eth0").HardwareAddr))
		}
		story(t, s)
	})
}

// wireEnd leads to a socket of a speaker.
type wireEnd struct {
	speaker int
	name    string
}

// carry delivers a frame to all others on the same side.
func (s *lan) carry(from int, name string, b []byte) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.sent = append(s.sent, frame{at: time.Since(s.start), on: name, bytes: b})
	for i := range s.speakers {
		to := mac(b[:6])
		if i != from && s.cut[i] == s.cut[from] && !s.isDeaf(i) && (to.Group() || to == s.macs[i]) {
			s.line(wireEnd{i, name}) <- b
		}
	}
}

// line returns the line to the socket, which one goroutine serves: with a goroutine for each
// frame the race detector fails, see TestPartitionOfTheSegment.
func (s *lan) line(to wireEnd) chan []byte {
	l := s.lines[to]
	if l == nil {
		l = make(chan []byte, 1<<16)
		s.lines[to] = l
		w := s.speakers[to.speaker]
		s.carrying.Go(func() {
			for b := range l {
				if c := w.conn(to.name); c != nil {
					select {
					case c.in <- b:
					case <-c.closed:
					}
				}
			}
		})
	}
	return l
}

func (s *lan) close() {
	for _, l := range s.lines {
		close(l)
	}
	s.carrying.Wait()
}

func (s *lan) isDeaf(i int) bool { return s.deaf > 0 && s.deaf == i }

// comesIn returns how many frames have arrived. One more arrives with each call, as from other hosts.
func (s *lan) comesIn(i int) uint64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.isDeaf(i) {
		s.received++
		return s.received
	}
	return 0
}

func (s *lan) partition(cut map[int]bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.cut, s.sent, s.start = cut, nil, time.Now()
}

// heard returns what was sent since the last partition or its end, in order.
func (s *lan) heard() []frame {
	synctest.Wait()
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.sent)
}

func (s *lan) lose(lost bool) {
	for _, m := range s.members {
		m.lose(lost)
	}
	synctest.Wait()
}

// owners returns the speakers that announce the VIP.
func (s *lan) owners(vip netip.Addr) []int { return s.allOwners()[vip] }

func (s *lan) allOwners() map[netip.Addr][]int {
	synctest.Wait()
	owners := map[netip.Addr][]int{}
	for i, w := range s.speakers {
		for _, v := range w.Status().VIPs {
			if len(v.Interfaces) > 0 {
				owners[v.Addr] = append(owners[v.Addr], i)
			}
		}
	}
	return owners
}

// Gossip is blocked while the segment works: each of two speakers takes the
// other for dead, and takes over its VIPs. Each VIP ends up where it was, without
// a flap, and stays there; when its owner dies, it moves.
func TestSplitBrainIsDecidedOnTheWire(t *testing.T) {
	t.Parallel()
	onSegment(t, 2, func(t *testing.T, s *lan) {
		for i, vips := range [][]netip.Addr{{vipA, vip6}, {vipB, vip6B}} {
			s.speakers[i].set(claimed(true, vips...))
		}
		time.Sleep(time.Minute)
		s.lose(true)
		for i, taken := range [][]netip.Addr{{vipB, vip6B}, {vipA, vip6}} {
			want := claimed(true, [][]netip.Addr{{vipA, vip6}, {vipB, vip6B}}[i]...)
			for vip, l := range claimed(false, taken...) {
				want[vip] = l
			}
			s.speakers[i].set(want)
		}
		time.Sleep(time.Second)
		for step := range 120 {
			for i, vips := range [][]netip.Addr{{vipA, vip6}, {vipB, vip6B}} {
				for _, vip := range vips {
					require.Equal(t, []int{i}, s.owners(vip), "%s after %d s", vip, step)
				}
			}
			time.Sleep(time.Second)
		}
		lost := s.speakers[0].Status().VIPs[1]
		assert.Equal(t, VIPStatus{Addr: vipB, Since: lost.Since, Reason: Yielded, Holder: s.macs[1].String()}, lost)
		log := s.speakers[0].log.String()
		assert.Equal(t, 1, strings.Count(log, "another speaker with the same membership key has the VIP"+
			" and ranks above this one: not announced here\" vip=198.18.0.101"), "warnings")
		for _, name := range []string{"membership port", "Secret lodestone-membership", "clusterID"} {
			assert.Contains(t, log, name, "what the two may share")
		}
		for i, node := range s.macs { // the kernel or a user of a node asks
			for _, vip := range []netip.Addr{vipA, vipB} {
				s.carry(i, "eth0", arpFrame(arppacket.OperationRequest, broadcast, node, clientIP, mac{}, vip))
			}
			for _, vip := range []netip.Addr{vip6, vip6B} {
				s.carry(i, "eth0 IPv6", coldQuery(node, vip).frame())
			}
		}
		synctest.Wait()
		for _, w := range s.speakers {
			for _, family := range []string{"IPv4", "IPv6"} {
				assert.Zero(t, testutil.ToFloat64(w.metrics.conflicts.WithLabelValues("eth0", family)), "no foreign host is there")
			}
		}
		s.speakers[0].take()
		time.Sleep(time.Minute)
		toAll := slices.DeleteFunc(s.speakers[0].take(), func(f frame) bool { return !mac(f.bytes[:6]).Group() })
		assert.InDelta(t, int(time.Minute/beaconInterval)*3, len(toAll), 6,
			"frames that all hosts hear: a beacon in two ARP packets and one of NDP")

		// The other one dies.
		s.partition(map[int]bool{1: true})
		time.Sleep(maxMissed*pollInterval + pollInterval)
		for _, vip := range []netip.Addr{vipB, vip6B} {
			assert.Contains(t, s.owners(vip), 0, "the other speaker is silent")
		}
	})
}

// 1,000 speakers announce their beacons no more often than 100 do, and not all at once; 20
// of them are here. When a partition heals, clients are corrected nearly as soon: one beacon
// of any speaker is enough.
//
// TestPartitionOfTheSegment has the reason why it is not parallel, and short.
func TestBeaconsOfManySpeakers(t *testing.T) {
	const here, all, watched = 20, 1000, 2 * time.Minute
	onSegment(t, here, func(t *testing.T, s *lan) {
		homes, either := make([][2]netip.Addr, here), map[int]bool{}
		for i, vip := 0, vipA; i < here; i, vip = i+1, vip.Next().Next() {
			homes[i] = [2]netip.Addr{vip, vip.Next()}
			s.members[i].crowd = all / 50
			either[i] = i%2 == 1
			s.speakers[i].set(claimed(true, homes[i][:]...))
		}
		time.Sleep(10 * time.Second)
		s.partition(either)
		s.lose(true)
		for i := range here { // each takes over from two, which are on the other side
			want := claimed(true, homes[i][:]...)
			maps.Copy(want, claimed(false, homes[(i+1)%here][0], homes[(i+here-1)%here][1]))
			s.speakers[i].set(want)
		}
		time.Sleep(10 * time.Second)
		before := len(s.heard())
		time.Sleep(watched)
		busy, beacons := map[time.Duration]int{}, s.heard()[before:]
		for _, f := range beacons {
			busy[f.at.Truncate(beaconInterval)]++
		}
		second := float64(len(beacons)) / watched.Seconds() * all / here
		assert.LessOrEqual(t, second, 100/beaconInterval.Seconds()*2, "frames of all speakers in a second")
		assert.Greater(t, second, 0.0)
		assert.Greater(t, len(busy), int(watched/beaconInterval)/4, "moments at which there are beacons")
		t.Logf("%.0f frames of %d speakers in a second, at %d of %d moments", second, all, len(busy), watched/beaconInterval)

		s.partition(map[int]bool{})
		healed := time.Now()
		for _, vip := range slices.Concat(homes[0][:], homes[here/2][:], homes[here-1][:]) {
			for len(s.owners(vip)) != 1 {
				require.Less(t, time.Since(healed), 15*time.Second, "%s has %v", vip, s.owners(vip))
				time.Sleep(100 * time.Millisecond)
			}
		}
		t.Logf("healed after %s", time.Since(healed))
	})
}

// The link of one node carries nothing to it any more. The node takes the others for dead and
// announces their VIPs. As it receives nothing at all, it soon stops to announce, so that clients
// use the node that they can reach. When the link works again, all is as before.
//
// TestPartitionOfTheSegment has the reason why it is not parallel, and short.
func TestDeafNodeFallsSilent(t *testing.T) {
	onSegment(t, 2, func(t *testing.T, s *lan) {
		homes := [][]netip.Addr{{vipA, vip6}, {vipB, vip6B}}
		for i, vips := range homes {
			s.speakers[i].set(claimed(true, vips...))
		}
		time.Sleep(10 * time.Second)
		s.mu.Lock()
		s.deaf = 1
		s.mu.Unlock()
		time.Sleep(300 * time.Millisecond)
		s.lose(true)
		for i, vips := range homes {
			want := claimed(true, vips...)
			maps.Copy(want, claimed(false, homes[1-i]...))
			s.speakers[i].set(want)
		}
		time.Sleep(deafAfter + beaconInterval)
		claims := func(d time.Duration) (by [2]int) {
			before := len(s.heard())
			time.Sleep(d)
			for _, f := range s.heard()[before:] {
				p := wire.Protocol(wire.ARP{})
				if strings.HasSuffix(f.on, "IPv6") {
					p = wire.NDP{}
				}
				if m, ok := p.Parse(f.bytes); ok && m.Claims.IsValid() && m.To.Group() {
					by[slices.Index(s.macs, m.From)]++
				}
			}
			return by
		}
		assert.Zero(t, claims(10 * time.Second)[1], "the deaf node goes on to claim VIPs")
		assert.Contains(t, s.speakers[1].log.String(), "nothing comes in on the interface")
		s.members[1].lose(false)
		synctest.Wait()
		assert.Contains(t, s.speakers[1].log.String(), "no other speaker is lost any more")
		s.members[1].lose(true)
		time.Sleep(2 * deafAfter)
		synctest.Wait()
		assert.NotContains(t, s.speakers[1].log.String(), "a neighbour is heard on the interface again")
		s.speakers[1].receive("eth0", ask(clientIP, netip.MustParseAddr("198.18.0.77"), broadcast))
		time.Sleep(deafAfter)
		synctest.Wait()
		assert.Contains(t, s.speakers[1].log.String(), "a neighbour is heard on the interface again", "who asks for an address of others")

		s.mu.Lock()
		s.deaf = 0
		s.mu.Unlock()
		assert.NotZero(t, claims(5 * time.Second)[1])
		for i, vips := range homes {
			for _, vip := range vips {
				assert.Equal(t, []int{i}, s.owners(vip), "%s", vip)
			}
		}
	})
}

// While the segment is cut, each side has an owner. A second after it heals there
// is one owner, whose announcement is the last that clients hear.
//
// It is not parallel to the tests with real hosts, and not longer: in simulated time Go
// 1.26's race detector may end the process, by a check of its own (tsan_rtl.cpp) or in
// the runtime (timer.maybeRunChan), when a select meets a timer that is due.
func TestPartitionOfTheSegment(t *testing.T) {
	onSegment(t, 4, func(t *testing.T, s *lan) {
		vips := everywhere()
		for vip := vipA; len(vips) < 200; vip = vip.Next() {
			vips[vip] = plan.Layer2{}
		}
		s.lose(true)
		s.partition(map[int]bool{2: true, 3: true})
		for side, i := 0, 0; side < 2; side++ { // each VIP has one owner on each side
			sets := [2]map[netip.Addr]plan.Layer2{{}, {}}
			for vip := range vips {
				sets[i%2][vip] = plan.Layer2{}
				i++
			}
			s.speakers[2*side].set(sets[0])
			s.speakers[2*side+1].set(sets[1])
		}
		time.Sleep(time.Minute)
		s.partition(nil)
		time.Sleep(beaconInterval + 3*correction + 100*time.Millisecond)
		last := map[netip.Addr]mac{} // what clients believe
		at := map[netip.Addr]time.Duration{}
		for _, f := range s.heard() {
			if e, p := f.packet(t); hardwareAddr(e.Destination) == broadcast && hardwareAddr(p.SenderHardwareAddr) != last[p.SenderIP] {
				last[p.SenderIP], at[p.SenderIP] = hardwareAddr(p.SenderHardwareAddr), f.at
			}
		}
		for vip, owners := range s.allOwners() {
			require.Len(t, owners, 1, "%s", vip)
			require.Equal(t, s.macs[owners[0]], last[vip], "%s: what clients heard last", vip)
			require.LessOrEqual(t, at[vip], time.Second, "%s: when they heard it", vip)
		}
		s.lose(false)
		time.Sleep(10 * time.Second)
		require.Len(t, s.allOwners(), len(vips))
		before := len(s.heard())
		time.Sleep(10 * time.Second)
		for _, f := range s.heard()[before:] {
			require.False(t, mac(f.bytes[:6]).Group(), "the segment is not quiet though nobody is lost")
		}
	})
}

// While no speaker is lost, a claim is the next owner's: the old owner does not contradict it
// for as long as its own input may lag behind.
func TestHandOverAmongOurs(t *testing.T) {
	t.Parallel()
	for name, home := range map[string][2]bool{"to a better one": {false, true}, "to a worse one": {true, false}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			onSegment(t, 2, func(t *testing.T, s *lan) {
				s.speakers[0].set(claimed(home[0], vipA))
				time.Sleep(time.Minute)
				s.speakers[0].take()
				s.speakers[1].set(claimed(home[1], vipA))
				time.Sleep(lag - time.Second)
				s.speakers[0].set(nil)
				for _, f := range s.speakers[0].take() {
					_, p := f.packet(t)
					assert.True(t, p.SenderIP.IsUnspecified(), "the old owner claims the VIP: %+v", p)
				}
				for range 60 {
					require.Equal(t, []int{1}, s.owners(vipA))
					time.Sleep(time.Second)
				}
			})
		})
	}
}

// A new owner stops to repeat its announcement when it hears the next owner's.
func TestMovesInQuickSuccession(t *testing.T) {
	t.Parallel()
	onSegment(t, 2, func(t *testing.T, s *lan) {
		s.speakers[0].set(claimed(true, vipA))
		time.Sleep(900 * time.Millisecond)
		s.speakers[1].set(everywhere(vipA))
		for range 20 { // the repetition after a second and after two is due
			time.Sleep(100 * time.Millisecond)
			require.Contains(t, s.owners(vipA), 1)
		}
	})
}

// Speakers that disagree for longer than their inputs may differ have one answerer, too.
func TestDisagreementIsDecidedOnTheWire(t *testing.T) {
	t.Parallel()
	onSegment(t, 3, func(t *testing.T, s *lan) {
		for i, w := range s.speakers {
			w.set(claimed(i == 1, vipA))
		}
		time.Sleep(lag + time.Second)
		assert.Equal(t, []int{1}, s.owners(vipA))
		s.speakers[1].set(nil)
		time.Sleep((maxMissed + 1) * pollInterval)
		assert.NotEmpty(t, s.owners(vipA), "nobody answers")
		time.Sleep(lag + time.Second)
		assert.Len(t, s.owners(vipA), 1)
	})
}

// A new address is asked for three times before it is announced.
func TestNewAddressIsProbed(t *testing.T) {
	t.Parallel()
	inWorld(t, func(t *testing.T, w *world) {
		w.set(fresh(vipA, vip6))
		w.receive("eth0", ask(vipA, clientIP, broadcast))
		synctest.Wait()
		assert.Equal(t, Probing, w.Status().VIPs[0].Reason)
		arps, solicitations := 0, 0
		for _, f := range w.after(probes*probeWait - time.Millisecond) {
			var m wire.Message
			if f.on == "eth0" {
				m, _ = wire.ARP{}.Parse(f.bytes)
				assert.Equal(t, vipA, m.Asks)
				arps++
			} else {
				m, _ = wire.NDP{}.Parse(f.bytes)
				assert.Equal(t, vip6, m.Asks)
				solicitations++
			}
			assert.True(t, m.Probes() && m.To.Group(), "claimed before it was probed: %+v", m)
		}
		assert.Equal(t, [2]int{probes, probes}, [2]int{arps, solicitations})
		assert.Len(t, w.after(time.Millisecond), 2+2, "announcements at once")
		assert.Empty(t, w.Status().VIPs[0].Reason)
		w.after(time.Minute)

		// The next owner knows that the address is free, and so does this node.
		w.become()
		w.become(eth(1, "eth0"))
		assert.Len(t, w.after(0), 2+2, "announced at once when the link is back")
	}, eth(1, "eth0"))
}

// A host that has the new address keeps it until it is gone, however it shows that it has the
// address.
func TestConflictOfANewAddress(t *testing.T) {
	t.Parallel()
	for name, f := range map[string][]byte{
		"answers": arpFrame(arppacket.OperationReply, hardwareAddr(eth(1, "eth0").HardwareAddr), clientMAC, vipA, mac{},
			netip.IPv4Unspecified()),
		"announces":      arpFrame(arppacket.OperationRequest, broadcast, clientMAC, vipA, mac{}, vipA),
		"asks something": arpFrame(arppacket.OperationRequest, broadcast, clientMAC, vipA, mac{}, clientIP),
		"probes, too":    arpFrame(arppacket.OperationRequest, broadcast, clientMAC, netip.IPv4Unspecified(), mac{}, vipA),
		"of another cluster": wire.ARP{}.Announce(
			statement{Self: clientMAC, VIP: vipA, Seal: seal.Key("another").Seal(vipA, clientMAC, true)}, true)[0],
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			inWorld(t, func(t *testing.T, w *world) {
				var there atomic.Bool
				there.Store(true)
				w.onWire(func(name string, frame []byte) {
					if m, _ := (wire.ARP{}).Parse(frame); m.Probes() && there.Load() {
						go w.receive(name, f)
					}
				})
				w.set(fresh(vipA))
				for _, f := range w.after(10 * recheck) {
					_, p := f.packet(t)
					require.True(t, p.SenderIP.IsUnspecified(), "announced: %+v", p)
				}
				s := w.Status()
				assert.Equal(t, AddressConflict, s.VIPs[0].Reason)
				assert.Equal(t, clientMAC.String(), s.VIPs[0].Holder)
				require.Len(t, s.Conflicts, 1)
				assert.Equal(t, Conflict{VIP: vipA, Interface: "eth0", HardwareAddr: clientMAC.String(), OtherCluster: name == "of another cluster",
					Seen: s.Conflicts[0].Seen}, s.Conflicts[0])
				who := map[bool]string{true: "speaker of another cluster has", false: "foreign host has"}[name == "of another cluster"]
				assert.Contains(t, w.log.String(), who)
				assert.Zero(t, testutil.ToFloat64(w.metrics.conflicts.WithLabelValues("eth0", "IPv4")), "hosts of the segment reach one machine")

				// Withdrawn and owned again: the host still has it.
				w.set(nil)
				w.set(everywhere(vipA))
				w.after(time.Minute)
				assert.Equal(t, AddressConflict, w.Status().VIPs[0].Reason)

				// No Service has the address any more: that the host has it is no conflict.
				w.set(nil)
				changed := w.ConflictsChanged()
				w.Forget([]netip.Addr{vipB, vipA})
				<-changed
				assert.Empty(t, w.Conflicts())
				w.set(fresh(vipA))
				w.after(time.Minute)
				assert.Len(t, w.Conflicts(), 1)

				// The host is gone.
				there.Store(false)
				w.after(2 * recheck)
				assert.Empty(t, w.Status().VIPs[0].Reason)
				assert.Empty(t, w.Conflicts())
				w.receive("eth0", ask(vipA, clientIP, broadcast))
				assert.Len(t, w.after(0), 1, "answers")
			}, eth(1, "eth0"))
		})
	}
}

// The machine that has a VIP is in the status with the reason that belongs to it, whatever is wrong with another interface.
func TestConflictBesideAFailedInterface(t *testing.T) {
	t.Parallel()
	for _, failed := range []string{"eth0", "eth1"} {
		inWorld(t, func(t *testing.T, w *world) {
			w.onWire(func(name string, frame []byte) {
				if m, _ := (wire.ARP{}).Parse(frame); m.Probes() {
					go w.receive(name, arpFrame(arppacket.OperationReply, m.From, clientMAC, vipA, m.From, netip.IPv4Unspecified()))
				}
			})
			w.fail(failed, unix.EMFILE)
			w.set(fresh(vipA))
			w.after(time.Second)
			s := w.Status().VIPs[0]
			assert.Equal(t, AddressConflict, s.Reason)
			assert.Equal(t, clientMAC.String(), s.Holder)
		}, eth(1, "eth0"), eth(2, "eth1"))
	}
}

// While Services move here from another load balancer, a VIP that another machine has is probed
// each second, also if the machine was found before the move began.
func TestConflictInAMigration(t *testing.T) {
	t.Parallel()
	for name, hurry := range map[string]bool{"migration": true, "none": false} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			inWorld(t, func(t *testing.T, w *world) {
				var there atomic.Bool
				there.Store(true)
				w.onWire(func(name string, frame []byte) {
					if m, _ := (wire.ARP{}).Parse(frame); m.Probes() && there.Load() {
						go w.receive(name, arpFrame(arppacket.OperationReply, m.From, clientMAC, vipA, m.From, netip.IPv4Unspecified()))
					}
				})
				w.set(fresh(vipA))
				w.after(time.Second)
				assert.Equal(t, AddressConflict, w.Status().VIPs[0].Reason)
				w.set(map[netip.Addr]plan.Layer2{vipA: {New: true, Hurry: hurry}})
				w.after(recheck)
				there.Store(false)
				w.after(hurriedRecheck + 2*probes*probeWait)
				assert.Equal(t, hurry, w.Status().VIPs[0].Reason == "", "announced soon")
				w.after(recheck)
				assert.Empty(t, w.Status().VIPs[0].Reason)
			}, eth(1, "eth0"))
		})
	}
}

// Two speakers that both probe a new address report no conflict with each other, nor with a third
// one that announces it already: that one keeps it.
func TestOursIsNoConflict(t *testing.T) {
	t.Parallel()
	onSegment(t, 3, func(t *testing.T, s *lan) {
		s.speakers[0].set(fresh(vipA, vip6))
		s.speakers[1].set(fresh(vipA, vip6))
		time.Sleep(lag + time.Second)
		s.speakers[2].set(claimed(true, vipA, vip6))
		time.Sleep(lag + time.Second)
		for _, vip := range []netip.Addr{vipA, vip6} {
			assert.Equal(t, []int{2}, s.owners(vip))
		}
		for _, w := range s.speakers {
			assert.Empty(t, w.Conflicts())
		}
	})
}

// While the key is replaced, one speaker seals with the old key and another one with the new key:
// they recognize each other.
func TestClaimsWithTwoKeys(t *testing.T) {
	t.Parallel()
	for _, has := range [][]string{{"old", "new"}, {"new", "old"}} {
		for _, other := range []seal.Key{seal.Key("old"), seal.Key("new")} {
			synctest.Test(t, func(t *testing.T) {
				w, stop := newWorld(t, func(o *Options) { o.Keys = keys(has...) }, eth(1, "eth0"))
				w.set(claimed(false, vipA))
				w.after(time.Minute)
				w.onWire(func(name string, frame []byte) { // the other one answers
					if m, _ := (wire.ARP{}).Parse(frame); m.To == clientMAC && m.Probes() {
						s := statement{Self: clientMAC, VIP: vipA, Seal: other.Numbered(vipA, clientMAC, true, m.Seal.Nonce())}
						go w.receive(name, wire.ARP{}.Answer(s, m))
					}
				})
				w.receive("eth0", wire.ARP{}.Announce(statement{Self: clientMAC, VIP: vipA, Seal: other.Seal(vipA, clientMAC, true)}, true)[0])
				synctest.Wait()
				assert.Empty(t, w.Conflicts(), "%s of %q", other, has)
				assert.Equal(t, Yielded, w.Status().VIPs[0].Reason, "%s of %q", other, has)
				require.NoError(t, stop())
			})
		}
	}
}

// A host that repeats each second the recorded announcements, probes and answers of an earlier
// owner of the VIP silences nobody, and is reported.
func TestRecordedClaimSilencesNobody(t *testing.T) {
	t.Parallel()
	for _, vip := range []netip.Addr{vipA, vip6} {
		t.Run(vip.String(), func(t *testing.T) {
			t.Parallel()
			onSegment(t, 2, func(t *testing.T, s *lan) {
				name := "eth0"
				if vip.Is6() {
					name = "eth0 IPv6"
				}
				s.speakers[1].set(claimed(true, vip))
				s.speakers[0].set(claimed(false, vip)) // asks, and is answered
				time.Sleep(10 * time.Second)
				require.Equal(t, []int{1}, s.owners(vip))
				var recorded [][]byte
				for _, f := range s.heard() {
					if mac(f.bytes[offEtherSource:]) == s.macs[1] {
						recorded = append(recorded, f.bytes)
					}
				}
				require.Greater(t, len(recorded), 10)
				s.speakers[1].set(nil)
				s.speakers[0].set(nil)
				s.speakers[0].set(claimed(false, vip))
				time.Sleep(3 * nonceLife)
				w := s.speakers[0]
				w.take()
				for second := range 60 {
					for _, f := range recorded {
						w.receive(name, f)
					}
					require.Equal(t, []int{0}, s.owners(vip), "after %d s", second)
					time.Sleep(time.Second)
				}
				require.Len(t, w.Conflicts(), 1)
				c := w.Conflicts()[0]
				assert.Equal(t, Conflict{VIP: vip, Interface: "eth0", HardwareAddr: s.macs[1].String(), Silent: true, Announced: true, Seen: c.Seen}, c)
				assert.NotZero(t, testutil.ToFloat64(w.metrics.conflicts.WithLabelValues("eth0", family(vip))))
				assert.Contains(t, w.log.String(), "somebody claims a VIP in the name of another speaker")
				questions, announcements := 0, 0
				for _, f := range w.take() {
					if mac(f.bytes[:6]) == s.macs[1] {
						questions++
					} else {
						announcements++
					}
				}
				assert.LessOrEqual(t, questions, int(time.Minute/challengeWait), "questions")
				assert.NotZero(t, announcements, "clients hear where the VIP is")
				assert.LessOrEqual(t, announcements, 2*int(time.Minute/segment.DefendInterval)+2)
				w.set(map[netip.Addr]plan.Layer2{vip: {Leaving: true}})
				assert.Empty(t, w.Conflicts(), "that speaker may be the next owner")
			})
		})
	}
}

func family(vip netip.Addr) string { return wire.Of(vip).Family() }

// Questions to speakers that claim VIPs are bounded.
func TestQuestionsAreBounded(t *testing.T) {
	t.Parallel()
	inWorld(t, func(t *testing.T, w *world) {
		want := everywhere()
		for vip := netip.MustParseAddr("198.19.0.0"); len(want) < 2*challengesPerSecond; vip = vip.Next() {
			want[vip] = plan.Layer2{}
		}
		w.set(want)
		w.after(time.Minute)
		var claims [][]byte
		for vip := range want {
			claims = append(claims, wire.ARP{}.Announce(
				statement{Self: clientMAC, VIP: vip, Seal: seal.Key("the cluster's").Seal(vip, clientMAC, true)}, false)[0])
		}
		for range 3 {
			for _, c := range claims {
				w.receive("eth0", c)
			}
		}
		asked := slices.DeleteFunc(w.after(time.Second), func(f frame) bool { return mac(f.bytes[:6]) != clientMAC })
		assert.LessOrEqual(t, len(asked), challengesPerSecond+challengesPerSecond/2)
		assert.NotEmpty(t, asked)
	}, eth(1, "eth0"))
}

// A host that claims a VIP from several hardware addresses by turns, as itself and as a speaker of another cluster, is one
// conflict: each change of it would be a write of the Lease, and of Services. What is silent for long makes room for the others.
func TestManyHardwareAddressesAreOneConflict(t *testing.T) {
	t.Parallel()
	inWorld(t, func(t *testing.T, w *world) {
		w.set(everywhere(vipA))
		w.after(time.Minute)
		hosts := []mac{clientMAC, {2, 0, 0, 0, 0, 0xd}, {2, 0, 0, 0, 0, 0xe}}
		reports, changed := 0, w.ConflictsChanged()
		claim := func(times int, from ...mac) {
			for n := range times {
				s := statement{Self: from[n%len(from)], VIP: vipA}
				if n%2 == 0 {
					s.Seal = seal.Key("another").Seal(vipA, s.Self, true)
				}
				w.receive([]string{"eth0", "eth1"}[n/2%2], wire.ARP{}.Announce(s, true)[0])
				w.after(time.Second)
				select {
				case <-changed:
					reports, changed = reports+1, w.ConflictsChanged()
				default:
				}
			}
		}
		claim(300, hosts...)
		assert.Equal(t, 1, reports)
		require.Len(t, w.Conflicts(), 1)
		assert.Equal(t, clientMAC.String(), w.Conflicts()[0].HardwareAddr)
		claim(int(conflictMemory/time.Second)+10, hosts[1:]...)
		assert.Equal(t, 2, reports, "it was forgotten, and the one on the other interface is reported")
		require.Len(t, w.Conflicts(), 1)
		assert.Contains(t, []string{hosts[1].String(), hosts[2].String()}, w.Conflicts()[0].HardwareAddr)
	}, eth(1, "eth0"), eth(2, "eth1"))
}

// A VIP that a machine has on one interface, and that is announced on another one, is reported as one that is not announced,
// whoever claims it on the other one.
func TestConflictsOnTwoInterfaces(t *testing.T) {
	t.Parallel()
	c := newConflicts()
	report := func(on string, announced bool) (changed bool) {
		next := c.changed.Next()
		c.note(Conflict{VIP: vipA, Interface: on, HardwareAddr: clientMAC.String(), Announced: announced})
		select {
		case <-next:
			return true
		default:
			return false
		}
	}
	assert.True(t, report("eth0", true))
	assert.True(t, report("eth1", false))
	for range 10 {
		assert.False(t, report("eth0", true))
		assert.False(t, report("eth1", false))
	}
	assert.False(t, reported(c.of[vipA]).Announced)
	assert.True(t, report("eth1", true), "announced there, too")
	assert.True(t, report("eth1", false), "and not any more")
}

// hostsOn has a host on each of these interfaces that has vipA, until it is deleted from the returned set.
func (w *world) hostsOn(names ...string) (there *sync.Map) {
	there = &sync.Map{}
	for _, name := range names {
		there.Store(name, true)
	}
	w.onWire(func(name string, frame []byte) {
		if _, ok := there.Load(name); ok {
			if m, _ := (wire.ARP{}).Parse(frame); m.Probes() {
				go w.receive(name, arpFrame(arppacket.OperationReply, m.From, clientMAC, vipA, m.From, netip.IPv4Unspecified()))
			}
		}
	})
	return there
}

// A new VIP is free on one interface, and hosts have it on others. What one interface finds does not change what another one has
// found, in the report and when an interface comes back.
func TestFreeOnOneInterface(t *testing.T) {
	t.Parallel()
	eth0, eth1, eth2 := eth(1, "eth0"), eth(2, "eth1"), eth(3, "eth2")
	conflictOn := func(t *testing.T, w *world, names ...string) {
		t.Helper()
		conflicts := w.Conflicts()
		require.Len(t, conflicts, 1)
		assert.False(t, conflicts[0].Announced)
		assert.Contains(t, names, conflicts[0].Interface)
	}
	inWorld(t, func(t *testing.T, w *world) {
		there := w.hostsOn("eth1", "eth2")
		w.set(fresh(vipA))
		for range 20 {
			w.after(100 * time.Millisecond)
			conflictOn(t, w, "eth1", "eth2")
		}
		assert.Equal(t, []string{"eth0"}, w.Status().VIPs[0].Interfaces)

		w.become(eth0, eth2)
		w.become(eth0, eth1, eth2)
		for _, f := range w.after(time.Second) {
			m, _ := wire.ARP{}.Parse(f.bytes)
			assert.True(t, m.Probes() || f.on == "eth0", "announced on %s, where a host has it", f.on)
		}
		w.become(eth1, eth2)
		w.become(eth0, eth1, eth2)
		assert.Equal(t, []string{"eth0"}, w.Status().VIPs[0].Interfaces, "it is known to be free there")

		there.Delete("eth1")
		w.after(2 * recheck)
		assert.Equal(t, []string{"eth0", "eth1"}, w.Status().VIPs[0].Interfaces)
		conflictOn(t, w, "eth2")
		there.Delete("eth2")
		w.after(2 * recheck)
		assert.Equal(t, []string{"eth0", "eth1", "eth2"}, w.Status().VIPs[0].Interfaces)
		assert.Empty(t, w.Conflicts())
	}, eth0, eth1, eth2)
}

// A VIP that arrives is announced because no other speaker answers for it. That does not show that the host is gone which claimed it.
func TestConflictOfAVIPThatArrives(t *testing.T) {
	t.Parallel()
	inWorld(t, func(t *testing.T, w *world) {
		w.set(everywhere(vipA))
		w.receive("eth0", arpFrame(arppacket.OperationReply, broadcast, clientMAC, vipA, clientMAC, vipA))
		w.after(time.Minute)
		require.Len(t, w.Conflicts(), 1)
		w.set(nil)
		w.set(map[netip.Addr]plan.Layer2{vipA: {Arriving: true}})
		w.after(2 * time.Second)
		assert.Equal(t, []string{"eth0"}, w.Status().VIPs[0].Interfaces)
		assert.Len(t, w.Conflicts(), 1)
		assert.NotContains(t, w.log.String(), "nobody else has it")
	}, eth(1, "eth0"))
}

// While speakers are lost, the kernel takes a minute to count what the interface has received. Nothing waits for that: neither what is
// announced nor what is answered.
func TestSlowCountersHoldNothingUp(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		m := &fakeMembers{changed: make(chan struct{})}
		w, stop := newWorld(t, func(o *Options) {
			o.Members = m
			o.Received = func(int) (uint64, error) { time.Sleep(time.Minute); return 0, nil }
		}, eth(1, "eth0"))
		defer func() { require.NoError(t, stop()) }()
		w.set(everywhere(vipA))
		w.after(time.Second)
		m.lose(true)
		synctest.Wait()
		w.set(everywhere(vipA, vipB))
		sends := func(what string, is func(arppacket.Packet) bool) {
			t.Helper()
			require.True(t, slices.ContainsFunc(w.after(time.Millisecond), func(f frame) bool { _, p := f.packet(t); return is(p) }), what)
		}
		sends("the announcement", func(p arppacket.Packet) bool { return p.SenderIP == vipB })
		time.Sleep(time.Second)
		w.receive("eth0", arpFrame(arppacket.OperationRequest, broadcast, clientMAC, clientIP, mac{}, vipA))
		sends("the answer", func(p arppacket.Packet) bool { return p.SenderIP == vipA && p.TargetIP == clientIP })
	})
}

// A host has a VIP that is announced all the same, and answers the first question of a node to which the VIP moves. That is no
// reason for the node to withhold it: the VIP is not new.
func TestHostWithAVIPThatArrives(t *testing.T) {
	t.Parallel()
	inWorld(t, func(t *testing.T, w *world) {
		claims := func() {
			w.receive("eth0", arpFrame(arppacket.OperationReply, broadcast, clientMAC, vipA, clientMAC, vipA))
			w.after(500 * time.Millisecond)
		}
		w.set(map[netip.Addr]plan.Layer2{vipA: {Arriving: true}})
		claims()
		require.Len(t, w.Conflicts(), 1)
		assert.True(t, w.Conflicts()[0].Announced)
		w.set(everywhere(vipA))
		for range 20 {
			claims()
		}
		assert.Equal(t, []string{"eth0"}, w.Status().VIPs[0].Interfaces)
		assert.NotContains(t, w.log.String(), "not announced")
	}, eth(1, "eth0"))
}

// A host claims a VIP while somebody repeats recorded claims of it. When the VIP leaves, that speaker may be its next owner, and
// the host is still no speaker.
func TestTwoCausesOfAConflict(t *testing.T) {
	t.Parallel()
	inWorld(t, func(t *testing.T, w *world) {
		w.set(everywhere(vipA))
		w.after(time.Minute)
		recorded := statement{Self: nextMAC, VIP: vipA, Seal: seal.Key("the cluster's").Seal(vipA, nextMAC, true)}
		w.receive("eth0", wire.ARP{}.Announce(recorded, true)[0])
		w.after(4 * challengeWait)
		w.receive("eth0", arpFrame(arppacket.OperationReply, broadcast, clientMAC, vipA, clientMAC, vipA))
		w.after(time.Second)
		require.Len(t, w.Conflicts(), 1)
		assert.True(t, w.Conflicts()[0].Silent)
		changed := w.ConflictsChanged()
		w.set(nil)
		<-changed
		require.Len(t, w.Conflicts(), 1)
		assert.Equal(t, clientMAC.String(), w.Conflicts()[0].HardwareAddr)
	}, eth(1, "eth0"))
}

// A host that answers for every address fills no memory.
func TestConflictsAreBounded(t *testing.T) {
	t.Parallel()
	inWorld(t, func(t *testing.T, w *world) {
		want := everywhere()
		for vip := netip.MustParseAddr("198.19.0.0"); len(want) < 2*maxConflicts; vip = vip.Next() {
			want[vip] = plan.Layer2{}
		}
		w.set(want)
		w.after(time.Minute)
		for vip := range want {
			w.receive("eth0", arpFrame(arppacket.OperationReply, broadcast, clientMAC, vip, clientMAC, vip))
		}
		w.after(0)
		assert.Len(t, w.Conflicts(), maxConflicts)
		assert.Equal(t, maxConflicts, strings.Count(w.log.String(), "foreign host claims a VIP"))
	}, eth(1, "eth0"))
}

// Claims of VIPs that are announced all the same hide none of a VIP that is withheld.
func TestAWithheldVIPIsReportedFirst(t *testing.T) {
	t.Parallel()
	inWorld(t, func(t *testing.T, w *world) {
		want := everywhere()
		for vip := netip.MustParseAddr("198.19.0.0"); len(want) < maxConflicts; vip = vip.Next() {
			want[vip] = plan.Layer2{}
		}
		w.set(want)
		w.after(time.Minute)
		claim := func() {
			for vip := range want {
				w.receive("eth0", arpFrame(arppacket.OperationReply, broadcast, clientMAC, vip, clientMAC, vip))
			}
			w.after(0)
		}
		claim()
		require.Len(t, w.Conflicts(), maxConflicts)
		w.onWire(func(name string, frame []byte) {
			if m, _ := (wire.ARP{}).Parse(frame); m.Probes() {
				go w.receive(name, arpFrame(arppacket.OperationReply, m.From, clientMAC, m.Asks, m.From, netip.IPv4Unspecified()))
			}
		})
		withheld := func() (vips []netip.Addr) {
			for _, c := range w.Conflicts() {
				if c.withholds() {
					vips = append(vips, c.VIP)
				}
			}
			return vips
		}
		both := maps.Clone(want)
		both[vipA] = plan.Layer2{New: true}
		w.set(both)
		w.after(time.Second)
		claim()
		assert.Equal(t, []netip.Addr{vipA}, withheld())
		assert.Len(t, w.Conflicts(), maxConflicts)
		assert.Equal(t, 1, strings.Count(w.log.String(), "foreign host has the address of a VIP"))

		// Where there are too many of them, too, the log has the rest.
		for vip := netip.MustParseAddr("198.19.1.0"); len(both) < 2*maxConflicts+1; vip = vip.Next() {
			both[vip] = plan.Layer2{New: true}
		}
		w.set(both)
		w.after(time.Second)
		assert.Len(t, withheld(), maxConflicts)
		assert.Equal(t, maxConflicts+1, strings.Count(w.log.String(), "foreign host has the address of a VIP"))
	}, eth(1, "eth0"))
}
