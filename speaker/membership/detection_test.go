package membership

import (
	"context"
	"log/slog"
	"testing"
	"time"

	"github.com/hashicorp/memberlist"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/lodestone-lb/lodestone/pkg/config"
	"github.com/lodestone-lb/lodestone/speaker/detector/watch"
)

// beating has memberlist find out nothing during a test.
func beating(o *Options) {
	m := config.FailoverNormal.Membership()
	m.Heartbeat, m.Missed = 50*time.Millisecond, 10
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

// beats is a speaker that sends heartbeats and answers, and does nothing else by itself. kill takes its power.
func (c *cluster) beats(t *testing.T, node string, met *speaker, change ...func(*Options)) (kill func()) {
	t.Helper()
	m := c.mute(node, ownAddress())
	for _, f := range append(change, beating) {
		f(&m.options)
	}
	require.NoError(t, m.Task.beats.listen())
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- m.Task.beats.run(ctx) }()
	require.NoError(t, m.list.Load().UpdateNode(updateTimeout))
	_, err := m.list.Load().Join([]string{met.address()})
	require.NoError(t, err)
	return func() {
		cancel()
		m.kill()
		require.NoError(t, <-done)
	}
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
	assert.Less(t, time.Since(start), 5*time.Second)
}

// The heartbeats of a speaker are late, and it answers memberlist: it counts again at once.
func TestSilentSpeakerThatAnswersCountsAgain(t *testing.T) {
	c := newCluster(t, "n1", "n2", "n3")
	n1, n2, n3 := c.start("n1", beating), c.start("n2", beating), c.start("n3", beating)
	takePart(t, n1, n2, n3)
	all := map[string]bool{"n1": false, "n2": false, "n3": false}
	n1.declare(watch.Verdict{Member: watch.Member{Name: "n3", Session: 1}})
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
	assert.Equal(t, all, n1.Speakers())
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
		assert.Len(t, n1.Speakers(), 2)
		assert.Len(t, n2.Speakers(), 2)
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
	assert.Len(t, n1.Speakers(), 2)
	assert.Len(t, n2.Speakers(), 2)
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
