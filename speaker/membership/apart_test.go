package membership

import (
	"fmt"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/lodestone-lb/lodestone/speaker/netstate"
)

// link is the interface of the speakers on loopback.
type link struct {
	ready   chan struct{}
	mu      sync.Mutex
	up      bool
	changed chan struct{}
}

func newLink() *link {
	l := &link{ready: make(chan struct{}), up: true, changed: make(chan struct{})}
	close(l.ready)
	return l
}

func (l *link) Ready() <-chan struct{} { return l.ready }

func (l *link) Changed() <-chan struct{} {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.changed
}

func (l *link) Interfaces() []netstate.Interface {
	l.mu.Lock()
	defer l.mu.Unlock()
	return []netstate.Interface{{Name: "eth0", Up: l.up, Addrs: []netip.Prefix{netip.MustParsePrefix("127.0.0.1/8")}}}
}

func (l *link) set(up bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.up = up
	close(l.changed)
	l.changed = make(chan struct{})
}

// cutOff is n1, joined, beside n2, which is lost as n1's link goes down.
func cutOff(t *testing.T, change ...func(*Options)) (c *cluster, n1 *speaker, l *link, n2 *mute) {
	c, l = newCluster(t, "n1", "n2", "n3"), newLink()
	n1 = c.start("n1", append(change, func(o *Options) { o.Interfaces = l })...)
	n1.waitJoined()
	n1.SetReady(true)
	n2 = c.mute("n2", ownAddress())
	_, err := n2.own.write(t.Context(), time.Now())
	require.NoError(t, err)
	n1.waitFor(map[string]bool{"n1": true, "n2": false})
	l.set(false)
	joined, _ := n1.Joined()
	require.True(t, joined, "a link that flaps is no reason while the others are heard")
	n2.kill()
	n1.waitApart("eth0")
	joined, _ = n1.Joined()
	require.True(t, joined, "it may own VIPs of other segments")
	require.Zero(t, n1.Task.gossip.NodeMeta(512)[1]&metaReady, "whoever meets it waits until it has met all")
	return c, n1, l, n2
}

// withTestTimeouts has a speaker give up on nobody during a test.
func withTestTimeouts(o *Options) { o.joinTimeout, o.meetTimeout = testTimeout, testTimeout }

// waitApart waits until the speaker is apart by the loss of that interface; "": until it
// is not any more.
func (s *speaker) waitApart(from string) {
	s.t.Helper()
	s.wait("being apart: "+from, func() bool { return s.Networks()[s.options.Node].Apart == from })
}

func TestSpeakerThatWasCutOffMeetsTheOthersFirst(t *testing.T) {
	c, n1, l, n2 := cutOff(t, withTestTimeouts)
	_, status := n1.Joined()
	require.Contains(t, status, "lost with the link of 127.0.0.1, which is down")
	c.mute("n2", n2.options.Address) // it looks for nobody
	start := time.Now()
	l.set(true)
	n1.waitApart("")
	t.Logf("together %s after the link was back", time.Since(start))
	require.Len(t, n1.Speakers(), 2)
}

// A speaker that has met one of the others again waits for those that answer a moment later,
// because it does not know yet what they own and keep.
func TestSpeakerThatWasCutOffMeetsAllTheOthers(t *testing.T) {
	c, n1, l, n2 := cutOff(t, withTestTimeouts)
	c.mute("n2", n2.options.Address)
	n3 := c.mute("n3", ownAddress())
	_, err := n3.own.write(t.Context(), time.Now())
	require.NoError(t, err)
	n1.wait("knowing of n3", func() bool { _, known := n1.Networks()["n3"]; return known })
	n3.kill()
	l.set(true)
	n1.wait("meeting n2", func() bool { return len(n1.Speakers()) == 2 })
	time.Sleep(700 * time.Millisecond) // as long as two lost packets take
	n1.waitApart("eth0")
	n3 = c.mute("n3", n3.options.Address)
	_, err = n3.list.Load().Join([]string{n1.address()})
	require.NoError(t, err)
	n1.waitApart("")
	require.Len(t, n1.Speakers(), 3)
}

func TestSpeakerThatWasCutOffGivesUpOnTheLost(t *testing.T) {
	_, n1, l, _ := cutOff(t)
	l.set(true)
	n1.wait("looking for the others", func() bool {
		_, status := n1.Joined()
		return strings.Contains(status, "apart: joining 1 other")
	})
	n1.waitApart("")
	require.Len(t, n1.Speakers(), 1)
}

// Two nodes of one switch have started while it is dead, or have lost each other long before it is restarted. They look for each
// other when their links are up.
func TestSpeakersWithoutALinkMeetOnceItIsUp(t *testing.T) {
	c, links := newCluster(t, "n1", "n2"), []*link{newLink(), newLink()}
	var all []*speaker
	for i, l := range links {
		l.set(false)
		all = append(all, c.start(fmt.Sprint("n", i+1), func(o *Options) { o.Interfaces = l }))
	}
	for _, s := range all {
		s.waitJoined()
		s.wait("knowing of the other one", func() bool { return len(s.Networks()) == 2 })
		require.Len(t, s.Speakers(), 1)
	}
	time.Sleep(time.Second) // each has seen that there is no link
	for _, l := range links {
		l.set(true)
	}
	for _, s := range all {
		s.waitFor(map[string]bool{"n1": false, "n2": false})
	}
}

// The link is up for a moment, and down again before anybody answers. Others have what the node owned, so it is still apart.
func TestSpeakerIsApartWhileItsLinkFlaps(t *testing.T) {
	c, n1, l, n2 := cutOff(t)
	l.set(true)
	n1.wait("looking for the others", func() bool {
		_, status := n1.Joined()
		return strings.Contains(status, "apart: joining 1 other")
	})
	l.set(false)
	for end := time.Now().Add(joinTimeout + meetTimeout + time.Second); time.Now().Before(end); time.Sleep(10 * time.Millisecond) {
		require.Equal(t, "eth0", n1.Networks()["n1"].Apart)
	}
	c.mute("n2", n2.options.Address)
	l.set(true)
	n1.waitApart("")
	require.Len(t, n1.Speakers(), 2)
}

// linkStep is a step of a story of a speaker's link.
type linkStep struct {
	at         time.Duration
	lose       bool // another speaker, before the look
	up, others bool
	apart      bool
	next       time.Duration
}

func TestApart(t *testing.T) {
	t.Parallel()
	for what, steps := range map[string][]linkStep{
		"the others are lost with the link, one after the other": {
			{0, false, true, true, false, 0}, {10 * time.Second, false, false, true, false, 0},
			{10*time.Second + 300*time.Millisecond, true, false, true, true, 10*time.Second + 300*time.Millisecond + lossWindow},
			{10*time.Second + 400*time.Millisecond, true, false, false, true, 0}, {time.Hour, false, false, false, true, 0}},
		"the link is back: they are to be met first": {{0, false, false, true, false, 0}, {time.Second, true, false, false, true, 0},
			{time.Minute, false, true, false, true, 0}},
		"the link flaps, and nobody is lost": {{0, false, true, true, false, 0}, {time.Second, false, false, true, false, 0},
			{time.Second + 5*time.Millisecond, false, true, true, false, 0}},
		"a node that is alone": {{0, false, true, false, false, 0}, {time.Second, false, false, false, false, 0},
			{time.Hour, false, false, false, false, 0}},
		"the last survivor": {{0, true, true, false, false, 0}, {time.Minute, false, false, false, false, 0},
			{time.Minute + 5*time.Millisecond, false, true, false, false, 0},
			{time.Hour, false, false, false, false, 0}, {2 * time.Hour, false, false, false, false, 0}},
		"the driver notices late": {{0, true, true, false, false, 0},
			{lossWindow, false, false, false, false, lossWindow + downDelay}, {lossWindow + downDelay, false, false, false, true, 0}},
		"the link flaps after another one was lost": {{0, true, true, false, false, 0},
			{time.Second, false, false, false, false, time.Second + downDelay}, {time.Second + downDelay/2, false, true, false, false, 0}},
		"the others are heard by another way, and one is lost": {{0, false, false, true, false, 0},
			{time.Minute, true, false, true, true, time.Minute + lossWindow}, {time.Minute + lossWindow, false, false, true, false, 0}},
	} {
		s, start := apart{}, time.Now()
		for _, step := range steps {
			if step.lose {
				s.lose(start.Add(step.at))
			}
			next := s.check(step.up, step.others, start.Add(step.at))
			require.Equal(t, step.apart, s.is, "%s, after %s", what, step.at)
			var want time.Time
			if step.next != 0 {
				want = start.Add(step.next)
			}
			require.Equal(t, want, next, "%s, after %s", what, step.at)
		}
	}
}
