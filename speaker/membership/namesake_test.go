package membership

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
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

// Whoever has the key speaks for a speaker that has left, from another address. It does not count, and the speaker is met
// when it is back, also at an address that it did not have before.
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
		require.Equal(t, without, n1.Speakers())
		require.Equal(t, without, n2.Speakers())
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
	assert.Equal(t, map[string]bool{"n1": false, "n2": false, "n9": true}, n1.Speakers())
}

// Whoever has the key publishes the session of another speaker as its own. The other speakers do not lose each other, and still
// hear at once when that one is lost.
func TestSessionOfAnotherSpeaker(t *testing.T) {
	c := newCluster(t, "n1", "n2", "n3", "n9")
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
	assert.Less(t, time.Since(start), 5*time.Second)
}
