package membership

import (
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hashicorp/memberlist"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/lodestone-lb/lodestone/pkg/report"
	"github.com/lodestone-lb/lodestone/speaker/netstate"
)

func TestLinksCountAsDownSoonAndAsUpLate(t *testing.T) {
	t.Parallel()
	all, start := carriers{}, time.Now()
	for _, step := range []struct {
		what string
		at   time.Duration
		up   map[string]bool
		down []string
		next time.Duration
	}{
		{"what is seen first counts at once", 0, map[string]bool{"eth0": true, "eth1": false}, []string{"eth1"}, 0},
		{"a link is lost", 1 * time.Second, map[string]bool{"eth0": false, "eth1": false}, []string{"eth1"}, 1*time.Second + downDelay},
		{"it flaps", 1*time.Second + downDelay - 1, map[string]bool{"eth0": true, "eth1": false}, []string{"eth1"}, 0},
		{"it is lost again", 2 * time.Second, map[string]bool{"eth0": false, "eth1": false}, []string{"eth1"}, 2*time.Second + downDelay},
		{"and stays so", 2*time.Second + downDelay, map[string]bool{"eth0": false, "eth1": false}, []string{"eth0", "eth1"}, 0},
		{"both are back", 3 * time.Second, map[string]bool{"eth0": true, "eth1": true}, []string{"eth0", "eth1"}, 3*time.Second + upDelay},
		{"one flaps", 4 * time.Second, map[string]bool{"eth0": true, "eth1": false}, []string{"eth0", "eth1"}, 3*time.Second + upDelay},
		{"and is back", 5 * time.Second, map[string]bool{"eth0": true, "eth1": true}, []string{"eth0", "eth1"}, 3*time.Second + upDelay},
		{"one has proved itself", 3*time.Second + upDelay, map[string]bool{"eth0": true, "eth1": true}, []string{"eth1"},
			5*time.Second + upDelay},
		{"the other, too", 5*time.Second + upDelay, map[string]bool{"eth0": true, "eth1": true}, nil, 0},
		{"one is named no more", 10 * time.Second, map[string]bool{"eth0": false}, nil, 10*time.Second + downDelay},
	} {
		seen := map[string]linkState{}
		for name, up := range step.up {
			seen[name] = linkState{up: up}
		}
		down, next := all.check(seen, start.Add(step.at), upDelay)
		assert.Equal(t, step.down, down, step.what)
		var want time.Time
		if step.next != 0 {
			want = start.Add(step.next)
		}
		assert.Equal(t, want, next, step.what)
	}
	assert.Len(t, all, 1)
}

// A speaker that meets the others again by the link of its address knows that the link works.
func TestTheLinkOfTheSpeakersAddressCountsAtOnce(t *testing.T) {
	t.Parallel()
	all, now := carriers{}, time.Now()
	all.check(map[string]linkState{"eth0": {true, true}}, now, upDelay)
	all.check(map[string]linkState{"eth0": {false, true}}, now, upDelay)
	down, _ := all.check(map[string]linkState{"eth0": {false, true}}, now.Add(downDelay), upDelay)
	assert.Equal(t, []string{"eth0"}, down)
	down, next := all.check(map[string]linkState{"eth0": {true, true}}, now.Add(time.Second), upDelay)
	assert.Empty(t, down)
	assert.Zero(t, next)
}

// The speakers reach each other by another interface.
func TestSpeakersReportToEachOtherWhichLinksAreDown(t *testing.T) {
	c, eth1 := newCluster(t, "n1", "n2", "n3"), newLink()
	n1 := c.start("n1", func(o *Options) { o.Interfaces = twoInterfaces{eth1} })
	n2 := c.start("n2")
	n1.waitJoined()
	n2.waitJoined()
	n1.SetReady(true)
	n1.Report(onSegments("198.18.0.0/24 eth0", "198.18.1.0/24 eth1"))
	knows := func(s *speaker, known, down bool) {
		t.Helper()
		s.wait(fmt.Sprintf("eth1 down: %v", down), func() bool {
			segments := s.Networks()["n1"].Segments
			return s.Speakers()["n1"] && (len(segments) == 2) == known && (!known || !segments[0].Down && segments[1].Down == down)
		})
	}
	for _, s := range []*speaker{n1, n2} {
		knows(s, true, false)
	}
	start := time.Now()
	eth1.set(false)
	knows(n1, true, true)
	knows(n2, true, true)
	t.Logf("the other speaker knew %s after the link was lost", time.Since(start))
	joined, _ := n1.Joined()
	require.True(t, joined, "it is not the link of its own address")
	late := c.start("n3")
	late.waitJoined()
	knows(late, true, true)
	back := time.Now()
	eth1.set(true)
	knows(n2, true, false)
	require.GreaterOrEqual(t, time.Since(back), upDelay)
	knows(n1, true, false)
	require.GreaterOrEqual(t, time.Since(back), upDelay+hearDelay, "here it counts once the others have been heard")
}

// twoInterfaces are those of a node whose eth1 is the link.
type twoInterfaces struct{ *link }

func (i twoInterfaces) Interfaces() []netstate.Interface {
	eth1 := i.link.Interfaces()[0]
	eth1.Name, eth1.Addrs = "eth1", nil
	return []netstate.Interface{{Name: "eth0", Up: true, Addrs: []netip.Prefix{netip.MustParsePrefix("127.0.0.1/8")}}, eth1}
}

// Another host has the link-local address of an interface, as a cloned machine: there the node announces no IPv6 VIP, and other nodes
// know that. IPv4 VIPs stay.
func TestWithoutALinkLocalAddressTheLinkIsDownForIPv6(t *testing.T) {
	c, eth1 := newCluster(t, "n1", "n2"), newLink()
	n1 := c.start("n1", func(o *Options) { o.Interfaces = duplicated{eth1} })
	n2 := c.start("n2")
	n1.waitJoined()
	n2.waitJoined()
	n1.Report(onSegments("198.18.1.0/24 eth1", "2001:db8::/64 eth1", "2001:db8:1::/64 eth2"))
	knows := func(ipv6Down bool) {
		t.Helper()
		for _, s := range []*speaker{n1, n2} {
			s.wait(fmt.Sprintf("down for IPv6: %v", ipv6Down), func() bool {
				all := s.Networks()["n1"].Segments
				return len(all) == 3 && !all[0].Down && all[1].Down == ipv6Down && all[2].Down
			})
		}
	}
	knows(false)
	eth1.set(false)
	knows(true)
	eth1.set(true)
	knows(false)
}

// duplicated is a node whose eth1 is up all the time. While the link is down, its link-local address cannot be used. There is no eth2.
type duplicated struct{ *link }

func (i duplicated) Interfaces() []netstate.Interface {
	eth1, local := i.link.Interfaces()[0], netip.MustParsePrefix("fe80::1/64")
	eth1.Name, eth1.Addrs = "eth1", []netip.Prefix{netip.MustParsePrefix("2001:db8::1/64"), local}
	if !eth1.Up {
		eth1.Up, eth1.Tentative = true, []netip.Prefix{local}
	}
	return []netstate.Interface{{Name: "eth0", Up: true, Addrs: []netip.Prefix{netip.MustParsePrefix("127.0.0.1/8")}}, eth1}
}

func TestMetadataHasRoomForSomeLinks(t *testing.T) {
	t.Parallel()
	task := New(makeCluster(t).options("n1"))
	task.SetReady(true)
	links := strings.Join([]string{"enp129s0f0np0", "enp129s0f1np1", "eth0"}, ",")
	task.setDown(links, links)
	for limit, want := range map[int]string{512: "enp129s0f0np0,enp129s0f1np1,eth0", 33: "enp129s0f0np0,enp129s0f1np1",
		28: "enp129s0f0np0", 10: ""} {
		meta := task.gossip.NodeMeta(limit)
		assert.Equal(t, append([]byte{metaVersion, metaReady}, want...), meta, "limit %d", limit)
	}
}

// Claims are known as soon as the speaker is that makes them.
func TestSpeakersReportToEachOtherWhatTheyKeep(t *testing.T) {
	c := newCluster(t, "n1", "n2", "n3")
	n1, n2 := c.start("n1"), c.start("n2")
	n1.waitJoined()
	n2.waitJoined()
	n1.SetReady(true)
	mine := report.Claims{0: 1, 127: 0x80}
	n1.Claim(mine)
	n1.setDown("eth1,eth2", "eth1,eth2")
	assert.Equal(t, mine, n1.Networks()["n1"].Claims, "they count here at once")
	knows := func(s *speaker, want report.Claims) {
		t.Helper()
		s.wait("what n1 claims", func() bool { return s.Networks()["n1"].Claims == want })
	}
	knows(n2, mine)
	late := c.start("n3")
	late.wait("n1", func() bool { return late.Speakers()["n1"] })
	knows(late, mine)
	n1.Claim(report.Claims{})
	knows(n2, report.Claims{})
}

// Whether the API server answers a speaker is published together with its readiness.
func TestViewsAreKnown(t *testing.T) {
	c := newCluster(t, "n1", "n2")
	n1, n2 := c.start("n1"), c.start("n2")
	n1.waitJoined()
	n2.waitJoined()
	n1.See(true, false)
	n2.wait("n1", func() bool { _, there := n2.Speakers()["n1"]; return there })
	sees := func(s *speaker, seeing, unsure int) func() bool {
		return func() bool { see, wonder := s.OthersSee(); return see == seeing && wonder == unsure }
	}
	assert.True(t, sees(n2, 0, 0)(), "one that is not ready")
	n1.SetReady(true)
	n2.wait("n1 sees", sees(n2, 1, 0))
	assert.True(t, sees(n1, 0, 0)(), "it counts itself")
	for _, blind := range []bool{true, false} {
		n1.See(false, blind)
		assert.Equal(t, blind, n1.Networks()["n1"].Blind, "it counts here at once")
		n2.wait("n1 is blind, or not", func() bool { return n2.Networks()["n1"].Blind == blind })
		assert.True(t, sees(n2, 0, map[bool]int{false: 1}[blind])())
	}
}

// memberlist's queue forgets one of two messages of the same length. So what a speaker
// sends is sent twice: see sendMetadata, which need not do so when this test fails.
func TestQueueForgetsABroadcast(t *testing.T) {
	t.Parallel()
	q := memberlist.TransmitLimitedQueue{RetransmitMult: retransmitMult, NumNodes: func() int { return 2 }}
	for _, text := range []string{"n1 alive", "n1 view", "n1 ready", "n2 alive"} { // each of n1 replaces the one before
		q.QueueBroadcast(named(text))
	}
	var sent []string
	for _, message := range q.GetBroadcasts(0, 1000) {
		sent = append(sent, string(message))
	}
	assert.Equal(t, []string{"n2 alive"}, sent)
}

// named is a broadcast about the node that its first two letters name.
type named string

func (n named) Name() string                            { return string(n[:2]) }
func (n named) Invalidates(o memberlist.Broadcast) bool { return o.(named).Name() == n.Name() }
func (n named) Message() []byte                         { return []byte(n) }
func (n named) Finished()                               {}

// A speaker publishes its metadata again until memberlist has it, which drops it where
// it objects to a suspicion at the same moment.
func TestDroppedMessageIsRepeated(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		task, tries := New(makeCluster(t).options("n1")), 0
		go task.gossip.sendMetadata(t.Context(), func(wait time.Duration) error {
			if tries++; tries < 3 {
				time.Sleep(wait)
				return errors.New("timeout waiting for update broadcast")
			}
			task.gossip.NotifyUpdate(&memberlist.Node{Name: "n1", Meta: task.gossip.NodeMeta(memberlist.MetaMaxSize)})
			return nil
		})
		task.SetReady(true)
		time.Sleep(time.Minute)
		synctest.Wait()
		assert.Equal(t, 4, tries, "two that fail, one that does not, and its repetition")
	})
}

func TestMetadataIsReadAsWritten(t *testing.T) {
	t.Parallel()
	for _, want := range []struct {
		claims report.Claims
		down   string
		view   view
	}{{report.Claims{}, "", view{}}, {report.Claims{}, "eth0", view{answered: true}}, {report.Claims{5: 1}, "", view{blind: true, sick: true}},
		{report.Claims{0: 0xff}, "eth0,eth1", view{true, true, false}}} {
		task := New(makeCluster(t).options("n1"))
		task.See(want.view.answered, want.view.blind)
		task.SetSick(want.view.sick)
		task.Claim(want.claims)
		task.setDown(want.down, want.down)
		n := &memberlist.Node{Meta: task.gossip.NodeMeta(memberlist.MetaMaxSize)}
		got := decode(n.Meta)
		assert.Equal(t, want.view, got.view)
		assert.Equal(t, want.claims, got.claims)
		assert.Equal(t, want.down, got.down)
	}
	for _, meta := range [][]byte{nil, {metaVersion}, {metaVersion, metaReady}, {metaVersion, metaClaims, 1, 2, 3}} {
		assert.Zero(t, decode(meta).claims, "%v", meta)
	}
}
