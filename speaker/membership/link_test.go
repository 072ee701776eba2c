package membership

import (
	"net/netip"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/lodestone-lb/lodestone/pkg/netstate"
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
func cutOff(t *testing.T) (c *cluster, n1 *speaker, l *link, n2 *mute) {
	c, l = newCluster(t, "n1", "n2", "n3"), newLink()
	n1 = c.start("n1", func(o *Options) { o.Interfaces = l })
	n1.waitJoined()
	n2 = c.mute("n2", netip.MustParseAddrPort("127.0.0.1:0"))
	_, err := n2.write(t.Context(), time.Now())
	require.NoError(t, err)
	n1.waitFor(map[string]bool{"n1": false, "n2": false})
	l.set(false)
	joined, _ := n1.Joined()
	require.True(t, joined, "a link that flaps is no reason while the others are heard")
	n2.kill()
	n1.wait("being apart", func() bool { joined, _ := n1.Joined(); return !joined })
	return c, n1, l, n2
}

func TestSpeakerThatWasCutOffMeetsTheOthersFirst(t *testing.T) {
	c, n1, l, n2 := cutOff(t)
	_, status := n1.Joined()
	require.Contains(t, status, "127.0.0.1 is down")
	c.mute("n2", n2.options.Address) // it looks for nobody
	start := time.Now()
	l.set(true)
	n1.waitJoined()
	t.Logf("joined %s after the link was back", time.Since(start))
	require.Len(t, n1.Speakers(), 2)
}

// Who has met one of the others waits for those that answer a moment later: it does not
// know yet what they own and keep.
func TestSpeakerThatWasCutOffMeetsAllTheOthers(t *testing.T) {
	c, n1, l, n2 := cutOff(t)
	c.mute("n2", n2.options.Address)
	n3 := c.mute("n3", netip.MustParseAddrPort("127.0.0.1:0"))
	_, err := n3.write(t.Context(), time.Now())
	require.NoError(t, err)
	n1.wait("knowing of n3", func() bool { _, known := n1.Networks()["n3"]; return known })
	n3.kill()
	l.set(true)
	n1.wait("meeting n2", func() bool { return len(n1.Speakers()) == 2 })
	time.Sleep(700 * time.Millisecond) // as long as two lost packets take
	n3 = c.mute("n3", n3.options.Address)
	_, err = n3.list.Load().Join([]string{n1.address()})
	require.NoError(t, err)
	n1.waitJoined()
	require.Len(t, n1.Speakers(), 3)
}

func TestSpeakerThatWasCutOffGivesUpOnTheLost(t *testing.T) {
	_, n1, l, _ := cutOff(t)
	l.set(true)
	n1.wait("looking for the others", func() bool {
		joined, status := n1.Joined()
		return !joined && strings.Contains(status, "joining 1 other")
	})
	n1.waitJoined()
	require.Len(t, n1.Speakers(), 1)
}

func TestLinkOfALoneSpeaker(t *testing.T) {
	c, l := newCluster(t, "n1"), newLink()
	n1 := c.start("n1", func(o *Options) { o.Interfaces = l })
	n1.waitJoined()
	l.set(false)
	n1.wait("being apart", func() bool { joined, _ := n1.Joined(); return !joined })
	l.set(true)
	n1.waitJoined()
}
