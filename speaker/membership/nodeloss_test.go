package membership

import (
	"context"
	"log/slog"
	"math/rand/v2"
	"net"
	"testing"
	"time"

	"github.com/hashicorp/memberlist"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/lodestone-lb/lodestone/pkg/annotation"
	"github.com/lodestone-lb/lodestone/pkg/config"
	"github.com/lodestone-lb/lodestone/pkg/notify"
	"github.com/lodestone-lb/lodestone/pkg/report"
	"github.com/lodestone-lb/lodestone/speaker/detector/watch"
)

// beating has memberlist find out nothing during a test.
func beating(o *Options) { heartbeats(o, 10) }

// unhurried is beating for tests in which nobody may be away for a moment on a busy machine.
func unhurried(o *Options) { heartbeats(o, 60) }

func heartbeats(o *Options, missed int) {
	m := config.FailoverNormal.Membership()
	m.Heartbeat, m.Missed = 50*time.Millisecond, missed
	m.ProbeInterval, m.ProbeTimeout = 10*time.Second, 5*time.Second
	o.Config = with(m)
}

// takePart waits until all know the sessions of all others.
func takePart(t *testing.T, all ...*speaker) {
	t.Helper()
	for _, s := range all {
		s.waitJoined()
		s.wait("sessions", func() bool { return len(s.members()) == len(all)-1 })
	}
	time.Sleep(200 * time.Millisecond) // heartbeats are sent
}

// both waits until n1 and n2 know each other: on a busy machine one may be away for a moment.
func both(n1, n2 *speaker) {
	for _, s := range []*speaker{n1, n2} {
		s.t.Helper()
		s.waitFor(map[string]bool{"n1": false, "n2": false})
	}
}

// beats is a speaker that sends heartbeats and answers, and does nothing else by itself. kill takes its power.
func (c *cluster) beats(t *testing.T, node string, met *speaker, change ...func(*Options)) (kill func()) {
	t.Helper()
	return c.beatsAs(t, node, rand.Uint64(), met, change...)
}

// beatsAs is beats with a session.
func (c *cluster) beatsAs(t *testing.T, node string, session uint64, met *speaker, change ...func(*Options)) (kill func()) {
	t.Helper()
	m := c.mute(node, ownAddress(), append(change, beating)...)
	for node := range met.Speakers() { // it watches no Leases
		m.setNetwork(node, report.Network{})
	}
	require.NoError(t, m.Task.beats.listen(session))
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- m.Task.beats.run(ctx) }()
	require.NoError(t, m.list.Load().UpdateNode(updateTimeout))
	_, err := m.list.Load().Join([]string{met.address()})
	require.NoError(t, err)
	_, err = m.own.write(t.Context(), time.Now())
	require.NoError(t, err)
	return func() {
		cancel()
		m.kill()
		require.NoError(t, <-done)
	}
}

// An attacker with the key invents speakers, which would agree that any other one is lost. They have no Leases, so they take no
// part in the failure detection.
func TestInventedSpeakersLoseNobody(t *testing.T) {
	c := newCluster(t, "n1", "n2")
	n1, n2 := c.start("n1", beating), c.start("n2", beating)
	takePart(t, n1, n2)
	for _, name := range []string{"invented-1", "invented-2"} {
		invented := c.mute(name, ownAddress())
		invented.publish(func(m *metadata) { m.ready, m.session = true, 7 })
		require.NoError(t, invented.list.Load().UpdateNode(updateTimeout))
		_, err := invented.list.Load().Join([]string{n1.address()})
		require.NoError(t, err)
		n1.wait("the invented one", func() bool { return n1.Speakers()[name] })
	}
	names := func() (all []string) {
		for _, m := range n1.members() {
			all = append(all, m.Name)
		}
		return all
	}
	require.Equal(t, []string{"n2"}, names())
	n1.setNetwork("invented-2", report.Network{})
	require.Equal(t, []string{"invented-2", "n2"}, names(), "its Lease is there")
}

// A speaker that is lost is known by its heartbeats, long before memberlist finds out.
func TestHeartbeatsEnd(t *testing.T) {
	c := newCluster(t, "n1", "n2", "n3")
	n1, n2 := c.start("n1", beating), c.start("n2", beating)
	takePart(t, n1, n2)
	kill := c.beats(t, "n3", n1)
	for _, s := range []*speaker{n1, n2} {
		s.wait("the session of n3", func() bool { return len(s.members()) == 2 })
	}
	time.Sleep(200 * time.Millisecond)
	kill()
	start := time.Now()
	n1.waitFor(map[string]bool{"n1": false, "n2": false})
	n2.waitFor(map[string]bool{"n1": false, "n2": false})
	t.Logf("known after %s", time.Since(start))
	assert.Less(t, time.Since(start), 15*time.Second)
}

// The heartbeats of a speaker are late, and it answers memberlist: it counts again at once.
func TestSilentSpeakerThatAnswersCountsAgain(t *testing.T) {
	c := newCluster(t, "n1", "n2", "n3")
	n1, n2, n3 := c.start("n1", beating), c.start("n2", beating), c.start("n3", beating)
	takePart(t, n1, n2, n3)
	all := map[string]bool{"n1": false, "n2": false, "n3": false}
	n1.declare(watch.Verdict{Member: watch.NewMember("n3", 1, n3.options.Address)})
	assert.Equal(t, all, n1.Speakers(), "that is about another session")
	changed := n1.Changed()
	for _, m := range n1.members() {
		if m.Name == "n3" {
			n1.declare(watch.Verdict{Member: m})
		}
	}
	<-changed
	n1.waitFor(all)
	takePart(t, n1, n2, n3)
	time.Sleep(2 * time.Second)
	n1.waitFor(all) // on a busy machine one may be away for a moment
}

// The pace of heartbeats changes without a restart, on one speaker after the other.
func TestPaceChanges(t *testing.T) {
	c := newCluster(t, "n1", "n2")
	n1, n2 := c.start("n1", beating), c.start("n2", beating)
	takePart(t, n1, n2)
	for _, s := range []*speaker{n1, n2} {
		d := s.options.Config.(*document)
		now, _ := d.Current()
		m := now.Membership
		m.Heartbeat = 100 * time.Millisecond
		d.set(&config.Config{ClusterID: ourCluster, Membership: m})
		time.Sleep(time.Second)
		both(n1, n2)
	}
	assert.Equal(t, 100*time.Millisecond, n1.beats.want().Timing.Interval)
}

// The key is replaced, and heartbeats go on.
func TestHeartbeatsDuringRotation(t *testing.T) {
	values := &mounted{text: firstKey}
	slowly := func(o *Options) { o.KeyInterval = 300 * time.Millisecond } // heartbeats wait for the next tick
	c := newCluster(t, "n1", "n2")
	n1, n2 := c.start("n1", beating, values.from(t), slowly), c.start("n2", beating, values.from(t), slowly)
	takePart(t, n1, n2)
	values.put(secondKey)
	n1.understands(secondKey)
	n2.understands(secondKey)
	time.Sleep(time.Second)
	both(n1, n2)
	assert.Zero(t, refusedBy(n1.Task)+refusedBy(n2.Task))
}

// A speaker of v0.1.0 sends no heartbeats: memberlist finds out when it is lost. It takes the session for an interface
// that it does not know.
func TestSpeakerWithoutHeartbeats(t *testing.T) {
	t.Parallel()
	o := makeCluster(t).options("n1")
	o.Log, o.Registry = slog.New(slog.DiscardHandler), prometheus.NewRegistry()
	task := New(o)
	task.gossip.NotifyJoin(&memberlist.Node{Name: "n2", Meta: []byte{metaVersion, metaReady, 'e', 't', 'h', '0'}})
	assert.Len(t, task.Speakers(), 2)
	assert.Empty(t, task.members())

	task.published.publish(func(m *metadata) { m.session = 0xabc })
	task.setDown("eth0", "eth0")
	meta := task.gossip.NodeMeta(memberlist.MetaMaxSize)
	assert.Equal(t, "/abc,eth0", string(meta[2:]))
	assert.Equal(t, uint64(0xabc), decode(meta).session)
	assert.Equal(t, "eth0", decode(meta).down)
}

// A speaker takes part as long as its own Lease is there: without it, it is no member for the others, who would not answer.
func TestSpeakerWithoutALeaseOfItsOwn(t *testing.T) {
	t.Parallel()
	o := makeCluster(t).options("n1")
	o.Log, o.Registry = slog.New(slog.DiscardHandler), prometheus.NewRegistry()
	task := New(o)
	task.setNetwork("n2", report.Network{})
	task.gossip.NotifyJoin(&memberlist.Node{Name: "n2", Addr: net.IPv4(192, 0, 2, 2), Port: 9744,
		Meta: metadata{session: 7}.encode(memberlist.MetaMaxSize)})
	assert.Empty(t, task.members())

	ours := &lease{node: "n1", holder: "n1"}
	for range 2 {
		changed := task.Changed()
		task.leases.record(nil, ours)
		assert.Len(t, task.members(), 1)
		assert.True(t, notify.Closed(changed))
		task.leases.forget(ours)
		assert.Empty(t, task.members())
	}
}

// The status of the detector is available for a diagnosis, and our Lease has how late it was.
func TestDetectionIsReported(t *testing.T) {
	c := newCluster(t, "n1", "n2")
	n1, n2 := c.start("n1", beating), c.start("n2", beating)
	takePart(t, n1, n2)
	require.Eventually(t, func() bool { return len(n1.Detection().Watched) == 1 }, testTimeout, 10*time.Millisecond)
	d := n1.Detection()
	assert.Equal(t, []string{"n2"}, d.Watchers)
	assert.Equal(t, "n2", d.Watched[0].Node)
	assert.Equal(t, int64(50), d.Watched[0].Heartbeat)
	assert.Equal(t, int64(510), d.Silence)

	late := report.Late{Milliseconds: 412, At: time.Unix(1e9, 0).UTC(), Times: 4}
	n1.own.setLate(late)
	require.Eventually(t, func() bool {
		l, err := c.client.CoordinationV1().Leases(n1.options.Namespace).Get(t.Context(), annotation.SpeakerLeasePrefix+"n1", metav1.GetOptions{})
		return err == nil && report.Of(l.Annotations).Late == late
	}, testTimeout, 10*time.Millisecond)
}

// A Lease carries only what matters to others, and changes seldom.
func TestLatenessOnTheLease(t *testing.T) {
	t.Parallel()
	at := time.Unix(1e9, 123e6)
	of := func(most time.Duration, times int) report.Late {
		return reported(watch.Status{Timing: watch.Timing{Interval: 25 * time.Millisecond, Missed: 3},
			Hour: watch.Lateness{Most: most, At: at, Times: times}})
	}
	assert.Equal(t, report.Late{Milliseconds: 412, At: at, Times: 4}, of(412*time.Millisecond, 7))
	assert.Equal(t, of(412*time.Millisecond, 4), of(412*time.Millisecond, 7))
	assert.Zero(t, of(85*time.Millisecond, 7), "nobody takes it for lost")
	assert.Zero(t, of(412*time.Millisecond, 0), "the timing has changed since")
}

// Somebody deletes the Lease of a speaker that lives: what is known of its node stays, since it writes the Lease anew. It takes
// no part in the failure detection until then, and if it is lost before, nothing stays.
func TestADeletedLeaseOfALivingSpeaker(t *testing.T) {
	c := newCluster(t, "n1", "n2")
	n1 := c.start("n1") // its memberlist finds out who is lost
	n1.waitJoined()
	kill := c.beats(t, "n2", n1)
	leases := c.client.CoordinationV1().Leases("lodestone-system")
	lease := c.lease("n2")
	onLink := onSegments("198.18.0.0/24 eth0")
	onLink.Address = report.Of(lease.Annotations).Address
	lease.Annotations = onLink.Annotations()
	_, err := leases.Update(t.Context(), lease, metav1.UpdateOptions{})
	require.NoError(t, err)
	known := func() bool { return len(n1.Networks()["n2"].Segments) == 1 }
	watched := func() bool {
		n1.table.mu.Lock()
		defer n1.table.mu.Unlock()
		return n1.table.peers["n2"] != nil && n1.table.peers["n2"].takesPart()
	}
	n1.wait("n2 on its segment", func() bool { return known() && watched() })

	for range 2 {
		require.NoError(t, leases.Delete(t.Context(), lease.Name, metav1.DeleteOptions{}))
		n1.wait("n2 without a Lease", func() bool { return !watched() })
		assert.True(t, known(), "its network stays")
		if _, alive := n1.Speakers()["n2"]; !assert.True(t, alive) {
			return
		}
		lease.ResourceVersion = ""
		_, err = leases.Create(t.Context(), lease, metav1.CreateOptions{})
		require.NoError(t, err)
		n1.wait("n2 with its Lease again", watched)
	}
	require.NoError(t, leases.Delete(t.Context(), lease.Name, metav1.DeleteOptions{}))
	n1.wait("n2 without a Lease", func() bool { return !watched() })
	kill()
	n1.wait("nothing is known of n2", func() bool { _, there := n1.Networks()["n2"]; return !there })
}
