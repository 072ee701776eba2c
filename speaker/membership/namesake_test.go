package membership

import (
	"bytes"
	"log/slog"
	"net"
	"slices"
	"testing"
	"time"

	"github.com/hashicorp/go-msgpack/v2/codec"
	"github.com/hashicorp/memberlist"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/lodestone-lb/lodestone/pkg/config"
	"github.com/lodestone-lb/lodestone/speaker/detector/watch"
	"github.com/lodestone-lb/lodestone/speaker/membership/guard"
)

// waitAt waits until the speaker is alive at its address for the others, as one that is ready.
func waitAt(victim *speaker, others ...*speaker) {
	for _, s := range others {
		s.wait("the right one counts", func() bool {
			s.mu.Lock()
			defer s.mu.Unlock()
			p := s.peers[victim.options.Node]
			return p != nil && p.ready && p.met != nil && addressIn(p.met) == victim.options.Address
		})
	}
}

// An attacker with the key uses the name of a speaker that has left, at another address. It does not count. The speaker is met
// when it is back, also at a new address.
func TestNameOfASpeakerThatIsAway(t *testing.T) {
	c := newCluster(t, "n1", "n2", "n3")
	n1, n2, n3 := c.start("n1", beating), c.start("n2", beating), c.start("n3", beating)
	takePart(t, n1, n2, n3)
	for _, s := range []*speaker{n1, n2, n3} {
		s.waitCaughtUp()
	}
	n3.leave()
	without := map[string]bool{"n1": false, "n2": false}
	n1.waitFor(without)
	n2.waitFor(without)

	fake := c.mute("n3", ownAddress())
	fake.SetReady(true)
	require.NoError(t, fake.list.Load().UpdateNode(updateTimeout))
	for end := time.Now().Add(time.Second); time.Now().Before(end); time.Sleep(10 * time.Millisecond) {
		_, err := fake.list.Load().Join([]string{n1.address()})
		require.NoError(t, err)
		require.NotContains(t, n1.Speakers(), "n3") // on a busy machine the others may be away for a moment
		require.NotContains(t, n2.Speakers(), "n3")
	}
	for range 2 {
		again := c.start("n3", beating)
		again.SetReady(true)
		waitAt(again, n1, n2)
		again.leave()
		n1.waitFor(without)
	}
}

// The name is that of a node that is new: as soon as its speaker has a Lease, that one counts alone, although whoever has
// the key goes on answering.
func TestNameOfASpeakerThatIsNew(t *testing.T) {
	c := newCluster(t, "n1", "n2", "n9")
	n1, n2 := c.start("n1", beating), c.start("n2", beating)
	takePart(t, n1, n2)
	fake := c.mute("n9", ownAddress())
	_, err := fake.list.Load().Join([]string{n1.address()})
	require.NoError(t, err)
	taken := map[string]bool{"n1": false, "n2": false, "n9": false}
	n1.waitFor(taken)
	n2.waitFor(taken)
	n9 := c.start("n9", beating)
	n9.SetReady(true)
	waitAt(n9, n1, n2)
	n9.wait("others", func() bool { return len(n9.Speakers()) == 3 })
	time.Sleep(time.Second)
	assert.True(t, n1.Speakers()["n9"])
	n1.waitFor(map[string]bool{"n1": false, "n2": false, "n9": true}) // on a busy machine n2 may be away for a moment
}

// An attacker with the key publishes the session of another speaker as its own. The other speakers do not lose each other, and
// still notice at once when that speaker is lost.
func TestSessionOfAnotherSpeaker(t *testing.T) {
	c := newCluster(t, "n1", "n2", "n3", "z-n1", "z-n3")
	n1, n2 := c.start("n1", beating), c.start("n2", beating)
	takePart(t, n1, n2)
	kill := c.beats(t, "n3", n1)
	all := map[string]bool{"n1": false, "n2": false, "n3": false}
	n1.waitFor(all)
	n2.waitFor(all)
	for _, victim := range []string{"n1", "n3"} {
		var session uint64
		n2.wait("a session", func() bool {
			n2.mu.Lock()
			defer n2.mu.Unlock()
			session = n2.peers[victim].session
			return session != 0
		})
		defer c.beatsAs(t, "z-"+victim, session, n1)()
		for _, s := range []*speaker{n1, n2} {
			s.wait("the session", func() bool { return s.knows("z-" + victim) })
		}
	}
	for end := time.Now().Add(3 * time.Second); time.Now().Before(end); time.Sleep(10 * time.Millisecond) {
		require.True(t, n1.knows("n2") && n1.knows("n3"), "%v", n1.Speakers())
		require.True(t, n2.knows("n1") && n2.knows("n3"), "%v", n2.Speakers())
	}
	kill()
	start := time.Now()
	for _, s := range []*speaker{n1, n2} {
		s.wait("the loss of n3", func() bool { return !s.knows("n3") })
	}
	assert.Less(t, time.Since(start), 15*time.Second)
}

// liar is a transport of somebody who has the key: what it sends arrives, whoever it speaks for.
type liar struct{ *end }

func (l liar) WriteTo(b []byte, address string) (time.Time, error) {
	p := &memberlist.Packet{Buf: bytes.Clone(b), From: net.UDPAddrFromAddrPort(l.address), Timestamp: time.Now()}
	select {
	case l.ends[address].packets <- p:
	case <-l.ended:
	}
	return time.Now(), nil
}

// A speaker has no power. Whoever has the key publishes in its name that it is alive, all the time, so that memberlist never
// takes it for dead. It counts for some seconds of three minutes, until the others miss its heartbeats, or not at all.
func TestSpeakerThatOthersSpeakFor(t *testing.T) {
	t.Parallel()
	for name, session := range map[string]func(i int) uint64{
		"has another session":   func(int) uint64 { return 9 },
		"has another each time": func(i int) uint64 { return uint64(i) },
		"takes no part":         func(int) uint64 { return 0 },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			onSegment(t, config.FailoverNormal.Membership(), 3, slog.DiscardHandler, func(t *testing.T, s *segment, all []*Task) {
				honest, lost := all[:2], all[2]
				lost.publish(func(m *metadata) { m.ready, m.session = true, 7 })
				require.NoError(t, lost.list.Load().UpdateNode(time.Second))
				time.Sleep(time.Second)
				lose := func(task *Task) {
					for _, m := range task.members() {
						task.declare(watch.Verdict{Member: m})
					}
				}
				s.dead.Store(lost.options.Address.String())
				sender := guard.New(liar{s.ends[lost.options.Address.String()]}, lost.ring.gossipKeys, func() {})
				var counted, since time.Duration
				var watched []watch.Member
				const step, lasts = 250 * time.Millisecond, 3 * time.Minute
				for i := range int(lasts / step) {
					b := bytes.NewBuffer([]byte{aliveType})
					require.NoError(t, codec.NewEncoder(b, &codec.MsgpackHandle{}).Encode(map[string]any{
						"Incarnation": 100 + i, "Node": "n3", "Addr": lost.options.Address.Addr().AsSlice(),
						"Port": lost.options.Address.Port(), "Meta": metadata{ready: true, session: session(i)}.encode(memberlist.MetaMaxSize),
						"Vsn": []byte{1, 5, 2, 0, 0, 0}}))
					for _, task := range honest {
						_, err := sender.WriteTo(b.Bytes(), task.options.Address.String())
						require.NoError(t, err)
					}
					time.Sleep(step)
					if !honest[0].knows("n3") {
						continue
					}
					counted += step
					if since += step; !slices.Equal(honest[0].members(), watched) {
						watched, since = honest[0].members(), 0
					}
					if since >= time.Second { // the watchers miss the heartbeats of that session
						lose(honest[0])
						lose(honest[1])
					}
				}
				t.Logf("counted for %s of %s", counted, lasts)
				assert.Less(t, counted, 10*time.Second)
				s.dead.Store("")
				time.Sleep(5 * time.Second)
				assert.True(t, honest[0].knows("n3"), "it is back")
				require.NoError(t, sender.Shutdown())
			})
		})
	}
}
