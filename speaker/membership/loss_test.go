package membership

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"regexp"
	"slices"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hashicorp/memberlist"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"k8s.io/client-go/tools/cache"

	"github.com/lodestone-lb/lodestone/pkg/config"
	"github.com/lodestone-lb/lodestone/pkg/notify"
	"github.com/lodestone-lb/lodestone/pkg/report"
	"github.com/lodestone-lb/lodestone/pkg/testnet"
)

// segment carries packets after a moment, and loses some of them. Connections lose
// nothing, as TCP sends again.
type segment struct {
	loss  atomic.Uint32 // of 100
	dead  atomic.Value  // the address of a speaker without power
	deaf  atomic.Value  // that of one that only hears answers to connections of its own
	dials atomic.Int64  // of connections to the speaker that is counted
	count atomic.Value  // its address
	frames
	ends  map[string]*end
	ended chan struct{}
}

const latency = 200 * time.Microsecond

// end is a speaker's transport on the segment.
type end struct {
	*segment
	address netip.AddrPort
	packets chan *memberlist.Packet
	streams chan net.Conn
}

func (s *segment) plug(address netip.AddrPort) *end {
	e := &end{s, address, make(chan *memberlist.Packet), make(chan net.Conn)}
	s.ends[address.String()] = e
	return e
}

func (e *end) FinalAdvertiseAddr(string, int) (net.IP, int, error) {
	return e.address.Addr().AsSlice(), int(e.address.Port()), nil
}

// cut reports whether the speaker or the other one has no power.
func (e *end) cut(other string) bool {
	dead := e.dead.Load()
	return dead == e.address.String() || dead == other || e.deaf.Load() == other
}

func (e *end) WriteTo(b []byte, address string) (time.Time, error) {
	e.frames.packet(e.address.String(), address)
	if rand.Uint32N(100) >= e.loss.Load() && !e.cut(address) {
		p := &memberlist.Packet{Buf: bytes.Clone(b), From: net.UDPAddrFromAddrPort(e.address)}
		go func() {
			p.Timestamp = time.Now().Add(latency)
			time.Sleep(latency)
			select {
			case e.ends[address].packets <- p:
			case <-e.ended:
			}
		}()
	}
	return time.Now(), nil
}

func (e *end) PacketCh() <-chan *memberlist.Packet { return e.packets }

func (e *end) DialTimeout(address string, wait time.Duration) (net.Conn, error) {
	if e.count.Load() == address {
		e.dials.Add(1)
	}
	e.frames.connection(e.address.String(), address)
	if e.cut(address) {
		time.Sleep(wait)
		return nil, os.ErrDeadlineExceeded
	}
	here, there := net.Pipe()
	select {
	case e.ends[address].streams <- there:
		return here, nil
	case <-e.ended:
		return nil, io.ErrClosedPipe
	}
}

func (e *end) StreamCh() <-chan net.Conn { return e.streams }

func (e *end) Shutdown() error { return nil }

// living has speakers live on a segment for some simulated time. It returns how
// often memberlist takes one for dead, and how often at least that outlives the grace
// period at any of the others, so that its VIPs move. Each of the others may log the same loss.
func living(t *testing.T, m config.Membership, speakers int, loss uint32, d time.Duration) (verdicts, losses int) {
	t.Helper()
	log := &testnet.Log{}
	onSegment(t, m, speakers, slog.NewTextHandler(log, nil), func(_ *testing.T, s *segment, all []*Task) {
		before := count(all)
		log.Reset()
		s.loss.Store(loss)
		time.Sleep(d)
		for _, task := range all {
			gone := regexp.MustCompile(`"speaker gone" at=\S+ node=` + task.options.Node + "\n")
			logged := len(gone.FindAllString(log.String(), -1))
			losses += (logged + speakers - 2) / (speakers - 1)
		}
		verdicts = count(all) - before
	})
	return verdicts, losses
}

// onSegment runs the story of speakers that have joined, in simulated time.
func onSegment(t *testing.T, m config.Membership, speakers int, log slog.Handler, story func(*testing.T, *segment, []*Task)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		s, all := strangers(t, m, speakers, log)
		for _, task := range all[1:] {
			_, err := task.list.Load().Join([]string{all[0].options.Address.String()})
			require.NoError(t, err)
		}
		ctx, end := context.WithCancel(t.Context())
		for _, task := range all {
			go task.rejoiner.verifyLost(ctx)
		}
		for joined := time.Now(); slices.ContainsFunc(all, func(task *Task) bool { return task.alive() < speakers }); {
			require.Less(t, time.Since(joined), 10*time.Second)
			time.Sleep(100 * time.Millisecond)
		}
		story(t, s, all)
		end()
		s.end(all)
	})
}

// strangers returns speakers on a segment, of which none has met another one.
func strangers(t *testing.T, m config.Membership, speakers int, log slog.Handler) (*segment, []*Task) {
	t.Helper()
	s := &segment{ends: map[string]*end{}, ended: make(chan struct{})}
	c := makeCluster(t)
	var all []*Task
	leases := cache.NewStore(cache.MetaNamespaceKeyFunc)
	for i := range speakers {
		o := c.options(fmt.Sprint("n", i+1))
		require.NoError(t, leases.Add(leaseOf(o.Node)))
		o.Log, o.Config, o.tcpTimeout = slog.New(log).With("at", o.Node), with(m), 0
		o.Address = netip.AddrPortFrom(netip.AddrFrom4([4]byte{198, 18, byte(i >> 8), byte(i)}), DefaultPort)
		task := New(o)
		task.leases.store = leases
		_, err := task.readSettings(t.Context())
		require.NoError(t, err)
		for n := range speakers {
			task.setNetwork(fmt.Sprint("n", n+1), report.Network{})
			task.setListed(true)
		}
		list, err := memberlist.Create(task.gossip.config(s.plug(o.Address)))
		require.NoError(t, err)
		task.list.Store(list)
		all = append(all, task)
	}
	return s, all
}

// end ends the speakers.
func (s *segment) end(all []*Task) {
	close(s.ended)
	for _, task := range all {
		task.list.Load().Shutdown() //nolint:errcheck // it always returns nil
	}
	time.Sleep(2 * time.Second) // until the last probes have ended
}

func count(all []*Task) (verdicts int) {
	for _, task := range all {
		verdicts += int(testutil.ToFloat64(task.metrics.changes.WithLabelValues("leave")))
	}
	return verdicts
}

// Packets get lost, and memberlist takes no speaker for dead. Where a tenth is lost, and it probes as often as for these
// tests, it may take one for dead in ten minutes or more: one in three is let pass, two are not. TestPacketsThatGetLostForLong,
// which is long, goes on for three minutes, and for ten.
func TestPacketsThatGetLost(t *testing.T) {
	t.Parallel()
	packetsGetLost(t, time.Minute, 3*time.Minute)
}

// packetsGetLost has a tenth of the packets get lost for that time, where memberlist probes often, and where it does as usual.
func packetsGetLost(t *testing.T, often, usual time.Duration) {
	for _, tt := range []struct {
		config.Membership
		percent uint32
		lasts   time.Duration
		most    int
	}{
		{quick(), 1, 30 * time.Second, 0},
		{quick(), 10, often, 1},
		{config.FailoverNormal.Membership(), 10, usual, 1}, // mostly 0; who takes part in the detection is asked before
	} {
		verdicts, losses := living(t, tt.Membership, 3, tt.percent, tt.lasts)
		t.Logf("a probe each %s, %d %% lost, in %s: %d times taken for dead, %d times for longer than the grace period", tt.ProbeInterval,
			tt.percent, tt.lasts, verdicts, losses)
		require.LessOrEqual(t, losses, tt.most, "a probe each %s, %d %% lost", tt.ProbeInterval, tt.percent)
	}
	_, losses := living(t, quick(), 3, 90, 10*time.Second)
	require.NotZero(t, losses)
}

// A firewall around one speaker lets out all and in nothing but answers of TCP. Its
// connections make it known again and again, and what it learns by them soon turns
// out to be wrong: after a moment no other follows that any more, because a ready speaker is asked first. It may itself
// take another for alive, by its connections, for some seconds of each half a minute.
func TestDeafSpeaker(t *testing.T) {
	t.Parallel()
	const speakers = 3
	for name, m := range map[string]config.Membership{"quick": quick(), "normal": config.FailoverNormal.Membership()} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			log := &testnet.Log{}
			onSegment(t, m, speakers, slog.NewTextHandler(log, nil), func(t *testing.T, s *segment, all []*Task) {
				seekEachOther(t, all)
				for i, task := range all {
					task.publish(func(m *metadata) { m.ready, m.session = true, uint64(i+1) })
					require.NoError(t, task.list.Load().UpdateNode(time.Second))
				}
				time.Sleep(time.Second)
				deaf := all[1]
				s.deaf.Store(deaf.options.Address.String())
				time.Sleep(10 * time.Second)
				log.Reset()
				time.Sleep(time.Minute)
				assert.NotRegexp(t, `"speaker joined" at=n[13]`, log)
				assert.Len(t, all[0].Speakers(), speakers-1)
				assert.Len(t, all[2].Speakers(), speakers-1)
				assert.Len(t, deaf.Speakers(), 1)

				s.deaf.Store("")
				time.Sleep(10 * time.Second)
				for _, task := range all {
					assert.Len(t, task.Speakers(), speakers, task.options.Node)
				}
			})
		})
	}
}

// One of 1,000 speakers is lost, and writes its Lease when it is back, which all others hear
// of at once. Of 30 that are here few try to reach it by a connection, and none needs to: it
// joins some, and they pass that on.
func TestManySeekOneThatIsBack(t *testing.T) {
	t.Parallel()
	const here, all = 30, 1000
	onSegment(t, quick(), here, slog.DiscardHandler, func(t *testing.T, s *segment, tasks []*Task) {
		lost, others := tasks[here-1], tasks[:here-1]
		for _, task := range others {
			for i := range all - here {
				*task.peers.at(fmt.Sprint("elsewhere-", i)) = peer{alive: true, metadata: metadata{ready: true}}
			}
		}
		seekEachOther(t, tasks)
		address := lost.options.Address.String()
		s.count.Store(address)
		s.dead.Store(address)
		time.Sleep(5 * time.Second)
		synctest.Wait()
		require.Len(t, others[0].Speakers(), all-1)
		require.False(t, others[0].Whole())
		t.Logf("%d connections to it in the first 5 s", s.dials.Load())
		assert.LessOrEqual(t, s.dials.Load(), int64(here))

		s.dead.Store("")
		s.dials.Store(0)
		back := time.Now()
		for _, task := range tasks {
			notify.Wake(task.rejoin)
		}
		for _, task := range others {
			for !task.knows(lost.options.Node) {
				require.Less(t, time.Since(back), 5*time.Second, "%s does not know", task.options.Node)
				time.Sleep(time.Millisecond)
			}
		}
		known := time.Since(back)
		time.Sleep(5 * time.Second)
		t.Logf("all know after %s, by %d connections to it", known, s.dials.Load())
		assert.LessOrEqual(t, s.dials.Load(), int64(5))
		for !others[0].Whole() { // it looks when it would try again, which in a cluster of that size is late
			require.Less(t, time.Since(back), 5*time.Minute)
			time.Sleep(100 * time.Millisecond)
		}
	})
}

// One of 1,000 speakers stays away. The others try to reach it less and less often, down to an interval that grows
// with their number: each attempt is a broadcast on the segment.
func TestManySeekOneThatStaysAway(t *testing.T) {
	t.Parallel()
	const all, watched = 1000, 20 * time.Minute
	onSegment(t, config.FailoverConservative.Membership(), 2, slog.DiscardHandler, func(t *testing.T, s *segment, tasks []*Task) {
		seeks, lost := tasks[0], tasks[1]
		seeks.mu.Lock()
		for i := range all - 2 {
			*seeks.peers.at(fmt.Sprint("elsewhere-", i)) = peer{alive: true, metadata: metadata{ready: true}}
		}
		seeks.mu.Unlock()
		seekEachOther(t, tasks)
		address := lost.options.Address.String()
		s.dead.Store(address)
		time.Sleep(10 * time.Minute)
		s.count.Store(address)
		time.Sleep(watched)
		least, most := watched/(2*lastRejoin*all/crowdSize), 2*watched/(lastRejoin*all/crowdSize)+1
		t.Logf("%d connections to it in %s", s.dials.Load(), watched)
		assert.GreaterOrEqual(t, s.dials.Load(), int64(least))
		assert.LessOrEqual(t, s.dials.Load(), int64(most))

		// Leases that change all the time have it try sooner, but neither at once nor never.
		s.dials.Store(0)
		for end := time.Now().Add(watched); time.Now().Before(end); time.Sleep(time.Second) {
			notify.Wake(seeks.rejoin)
		}
		t.Logf("%d connections to it in %s in which Leases change", s.dials.Load(), watched)
		assert.Greater(t, s.dials.Load(), int64(most))
		assert.LessOrEqual(t, s.dials.Load(), int64(2*watched/(firstRejoin*all/crowdSize)))

		s.dead.Store("") // no attempt is under way when the test ends
		for back := time.Now(); !seeks.Whole() || !lost.Whole(); time.Sleep(100 * time.Millisecond) {
			require.Less(t, time.Since(back), 5*time.Minute)
		}
	})
}

// seekEachOther has speakers look for those that they lose, until the test ends.
func seekEachOther(t *testing.T, all []*Task) {
	t.Helper()
	leases := cache.NewStore(cache.MetaNamespaceKeyFunc)
	for _, task := range all {
		require.NoError(t, leases.Add(task.onLease()))
	}
	for _, task := range all {
		go task.rejoiner.joinLost(t.Context(), leases)
	}
}
