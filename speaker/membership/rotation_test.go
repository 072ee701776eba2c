package membership

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	coordinationv1 "k8s.io/api/coordination/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/cache"

	"github.com/lodestone-lb/lodestone/pkg/annotation"
	"github.com/lodestone-lb/lodestone/pkg/config"
	"github.com/lodestone-lb/lodestone/pkg/report"
	"github.com/lodestone-lb/lodestone/pkg/testnet"
	"github.com/lodestone-lb/lodestone/speaker/layer2/seal"
	"github.com/lodestone-lb/lodestone/speaker/membership/keys"
)

// mounted is the Secret as one node's kubelet has it.
type mounted struct {
	mu   sync.Mutex
	text string
}

func (m *mounted) put(text string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.text = text
}

func (m *mounted) read() (keys.Secret, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.text == "" {
		return keys.Secret{}, errors.New("no such file")
	}
	return keys.Parse([]byte(m.text))
}

// from has a speaker read its key from there.
func (m *mounted) from(t testing.TB) func(*Options) {
	return func(o *Options) {
		o.Secret, o.ReadSecret, o.KeyInterval = secretOf(t, m.text), m.read, 10*time.Millisecond
	}
}

// understands waits until the speaker has these keys.
func (s *speaker) understands(texts ...string) {
	s.t.Helper()
	want := ringOf(s.t, texts...)
	require.Eventually(s.t, func() bool { return slices.Equal(want, s.ring.current()) }, testTimeout, time.Millisecond,
		"%s has not %v", s.options.Node, texts)
}

func ringOf(t testing.TB, texts ...string) (r keys.Ring) {
	for _, text := range texts {
		r = append(r, keyOf(t, text))
	}
	return r
}

const firstKey, secondKey, thirdKey = "correct horse battery staple", "the key that comes after it", "and another one after that"

// Nodes read another Secret at different times, or another clusterID. Nobody is taken for
// dead at any moment, no packet is not understood, and what one speaker seals all others
// believe.
func TestRotation(t *testing.T) {
	t.Parallel()
	t.Run("Secret", func(t *testing.T) {
		t.Parallel()
		rotates(t, []string{firstKey, secondKey, thirdKey}, func(t *testing.T, text string) keys.Key { return keyOf(t, text) },
			func(task *Task) func(string) {
				m := &mounted{text: firstKey}
				task.options.ReadSecret = m.read
				return m.put
			})
	})
	t.Run("clusterID", func(t *testing.T) {
		t.Parallel()
		key := func(t *testing.T, id string) keys.Key { return keyIn(t, firstKey, id) }
		rotates(t, []string{ourCluster, "fra2", "fra3"}, key, func(task *Task) func(string) {
			d := with(task.settings)
			task.options.Config = d
			return func(id string) { d.set(&config.Config{ClusterID: id, Membership: task.settings}) }
		})
	})
}

// rotates changes from the first value to the others, one after another: keyOf returns the
// key that follows from one, and source has a speaker read what the function that it
// returns is given.
func rotates(t *testing.T, values []string, keyOf func(*testing.T, string) keys.Key, source func(*Task) func(value string)) {
	onSegment(t, config.FailoverNormal.Membership(), 3, slog.DiscardHandler, func(t *testing.T, _ *segment, all []*Task) {
		leases, put := cache.NewStore(cache.MetaNamespaceKeyFunc), make([]func(string), len(all))
		ctx, cancel := context.WithCancel(t.Context())
		var running sync.WaitGroup
		for i, task := range all {
			put[i] = source(task)
			require.NoError(t, leases.Add(task.onLease()))
			running.Go(func() { task.rotation.keep(ctx, leases) })
		}
		// The API server has Leases a moment after they are written.
		running.Go(func() {
			for ; ctx.Err() == nil; time.Sleep(300 * time.Millisecond) {
				for _, task := range all {
					assert.NoError(t, leases.Update(task.onLease()))
				}
			}
		})
		// looks for a while whether all is well, and then whether they have these keys.
		looks := func(d time.Duration, want ...[]string) {
			t.Helper()
			for end := time.Now().Add(d); time.Now().Before(end); time.Sleep(20 * time.Millisecond) {
				requireBelief(t, all)
			}
			for i, task := range all {
				var ring keys.Ring
				for _, value := range want[i] {
					ring = append(ring, keyOf(t, value))
				}
				require.Equal(t, ring, task.ring.current(), "%s at last", task.options.Node)
			}
			require.Zero(t, count(all), "taken for dead")
		}
		before := values[0]
		for i, next := range values[1:] {
			old, both, latest := []string{before}, []string{before, next}, []string{next}
			rings := [][]string{old, old, old}
			for n := range all {
				put[(i+n)%3](next)
				rings[(i+n)%3] = both
				if n < 2 {
					looks(2*DefaultKeyInterval, rings...)
				}
			}
			looks(6*DefaultKeyInterval, latest, latest, latest)
			before = next
		}
		cancel()
		running.Wait()
		for _, task := range all {
			require.Zero(t, refusedBy(task), "%s did not understand a packet", task.options.Node)
		}
	})
}

// Somebody with an old key invents a speaker, which has no Lease. The key is replaced without it.
func TestRotationWithoutTheInvented(t *testing.T) {
	t.Parallel()
	onSegment(t, config.FailoverNormal.Membership(), 4, slog.DiscardHandler, func(t *testing.T, _ *segment, all []*Task) {
		leases, honest := cache.NewStore(cache.MetaNamespaceKeyFunc), all[:3]
		ctx, cancel := context.WithCancel(t.Context())
		var running sync.WaitGroup
		for _, task := range honest {
			m := &mounted{text: firstKey}
			task.options.ReadSecret = m.read
			m.put(secondKey)
			task.table.mu.Lock()
			task.table.peers.at(all[3].options.Node).network = nil
			task.table.mu.Unlock()
			running.Go(func() { task.rotation.keep(ctx, leases) })
		}
		running.Go(func() {
			for ; ctx.Err() == nil; time.Sleep(300 * time.Millisecond) {
				for _, task := range honest {
					assert.NoError(t, leases.Add(task.onLease()))
				}
			}
		})
		have := func(d time.Duration, texts ...string) {
			t.Helper()
			time.Sleep(d)
			for _, task := range honest {
				var ring keys.Ring
				for _, text := range texts {
					ring = append(ring, keyOf(t, text))
				}
				require.Equal(t, ring, task.ring.current(), task.options.Node)
			}
		}
		have(keyTimeout-time.Second, firstKey, secondKey)
		have(10*DefaultKeyInterval, secondKey)
		cancel()
		running.Wait()
	})
}

// onLease returns the speaker's Lease.
func (t *Task) onLease() *lease {
	lease := &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Name: annotation.SpeakerLeasePrefix + t.options.Node}}
	t.own.take(lease, time.Now())
	t.own.carry(lease)
	return t.leases.keep(lease)
}

// requireBelief demands that all speakers believe what each other one seals. The last one to use a new key forgets the old one in the
// same moment, and no others do before.
func requireBelief(t *testing.T, all []*Task) {
	t.Helper()
	vip, hardware := netip.MustParseAddr("198.18.0.100"), [6]byte{2, 0, 0, 0, 0, 1}
	for _, task := range all {
		sealed := seal.Keys(task.SealKeys).First().Seal(vip, hardware, true)
		for _, other := range all {
			require.True(t, other == task || seal.Keys(other.SealKeys).Valid(sealed, vip, hardware),
				"%s does not believe %s", other.options.Node, task.options.Node)
		}
	}
}

// A speaker that starts with a key that not all have read does not go on alone: it would
// claim what the others announce. They learn on its Lease that it has no other.
func TestStartDuringRotation(t *testing.T) {
	c := newCluster(t, "n1", "n2", "n3")
	m1, m2, m3 := &mounted{text: firstKey}, &mounted{text: firstKey}, &mounted{text: secondKey}
	n1, n2 := c.start("n1", m1.from(t)), c.start("n2", m2.from(t))
	n1.waitJoined()
	n2.waitJoined()
	for _, node := range []string{"n1", "n2"} { // n3 has to find their Leases, which are written beside joining
		require.Eventually(t, func() bool {
			lease, err := c.client.CoordinationV1().Leases("lodestone-system").Get(t.Context(),
				annotation.SpeakerLeasePrefix+node, metav1.GetOptions{})
			return err == nil && holder(lease) == node
		}, testTimeout, time.Millisecond, "the Lease of %s", node)
	}
	n3 := c.start("n3", m3.from(t))
	n3.wait("waiting", func() bool {
		_, status := n3.Joined()
		return strings.HasPrefix(status, "waiting for 2 speakers that use another membership key, one on node n1")
	})
	m1.put(secondKey)
	n1.understands(firstKey, secondKey)
	time.Sleep(joinTimeout + time.Second)
	joined, status := n3.Joined()
	assert.False(t, joined, status)
	n1.understands(firstKey, secondKey)
	n2.understands(firstKey)
	m2.put(secondKey)
	n3.waitJoined()
	for _, s := range []*speaker{n1, n2, n3} {
		s.waitFor(map[string]bool{"n1": false, "n2": false, "n3": false})
		s.understands(secondKey)
	}

	for _, text := range []string{firstKey, secondKey} {
		packet, refused := c.packetOf(secretOf(t, text)), refusedBy(n1.Task)
		conn, err := net.Dial("udp", n1.address())
		require.NoError(t, err)
		_, err = conn.Write(packet)
		require.NoError(t, err)
		conn.Close()
		if text == firstKey {
			require.Eventually(t, func() bool { return refusedBy(n1.Task) > refused }, testTimeout, time.Millisecond,
				"the forgotten key is understood")
			require.NotContains(t, n1.Speakers(), "sender")
		} else {
			n1.wait("the sender is heard", func() bool { _, heard := n1.Speakers()["sender"]; return heard })
		}
	}
}

// A node that somebody has taken over listens, and reports on its Lease that it has a key of its own. Speakers that
// start go on without it.
func TestKeyThatNobodyElseHas(t *testing.T) {
	c := newCluster(t, "n1", "n2", "n3", "taken")
	n1, n2 := c.start("n1"), c.start("n2")
	for _, s := range []*speaker{n1, n2} {
		s.waitFor(map[string]bool{"n1": false, "n2": false})
		s.waitJoined()
	}
	listener, err := net.Listen("tcp", ownAddress().String())
	require.NoError(t, err)
	defer listener.Close()
	taken := report.Report{Address: netip.MustParseAddrPort(listener.Addr().String()), Keys: []string{"0123456789abcdef"}}
	node := "taken"
	_, err = c.client.CoordinationV1().Leases("lodestone-system").Create(t.Context(), &coordinationv1.Lease{
		ObjectMeta: metav1.ObjectMeta{Name: annotation.SpeakerLeasePrefix + node, Annotations: taken.Annotations(),
			Labels: map[string]string{annotation.LabelComponent: annotation.ComponentSpeaker}},
		Spec: coordinationv1.LeaseSpec{HolderIdentity: &node},
	}, metav1.CreateOptions{})
	require.NoError(t, err)
	n3 := c.start("n3", func(o *Options) { o.KeyInterval, o.keyTimeout = 10*time.Millisecond, 5*time.Second })
	n3.wait("waiting", func() bool {
		_, status := n3.Joined()
		return strings.HasPrefix(status, "waiting for 1 speakers that use another membership key, one on node taken")
	})
	n3.waitJoined()
	n3.waitFor(map[string]bool{"n1": false, "n2": false, "n3": false})
}

// A Secret without a valid key is logged once, and changes nothing.
func TestSecretWithoutAKey(t *testing.T) {
	c := newCluster(t, "n1", "n2")
	log := &testnet.Log{}
	m1, m2 := &mounted{text: firstKey}, &mounted{text: firstKey}
	n1 := c.start("n1", m1.from(t), func(o *Options) {
		o.Log = slog.New(slog.NewTextHandler(log, &slog.HandlerOptions{Level: slog.LevelError}))
	})
	n2 := c.start("n2", m2.from(t))
	n1.waitFor(map[string]bool{"n1": false, "n2": false})
	n1.waitJoined()
	refused := func(want string) func() bool {
		return func() bool {
			return testutil.GatherAndCompare(n1.options.Registry.(prometheus.Gatherer), strings.NewReader(`
# HELP lodestone_membership_key_refused Whether what the Secret has now is no membership key: then the one before stays in force.
# TYPE lodestone_membership_key_refused gauge
lodestone_membership_key_refused `+want+"\n"), MetricKeyRefused) == nil
		}
	}
	for i, text := range []string{"", "too short", " \n"} {
		m1.put(text)
		require.Eventually(t, refused("1"), testTimeout, time.Millisecond, "%q", text)
		time.Sleep(100 * time.Millisecond)
		n1.understands(firstKey)
		n1.waitFor(map[string]bool{"n1": false, "n2": false})
		m1.put(firstKey)
		require.Eventually(t, refused("0"), testTimeout, time.Millisecond)
		assert.Equal(t, i+1, strings.Count(log.String(), "membership key is not valid"), log.String())
	}
	m1.put(secondKey)
	m2.put(secondKey)
	n1.understands(secondKey)
	n2.understands(secondKey)
}

// Two clusters have a copy of one Secret, and one has a speaker of the other among its
// Leases. With one clusterID they are one cluster to each other; with one each, neither
// joins the other, nor believes its seals.
func TestClustersThatShareASecret(t *testing.T) {
	t.Parallel()
	meet := func(t *testing.T, other string) (n1, n2 *speaker) {
		a, b := makeCluster(t, "n1"), makeCluster(t, "n2")
		n2 = b.start("n2", func(o *Options) {
			o.Config = &document{config: &config.Config{ClusterID: other, Membership: config.FailoverNormal.Membership()}}
		})
		n2.waitJoined()
		// The cluster has had that address before, and then the other one.
		require.Eventually(t, func() bool {
			_, err := b.client.CoordinationV1().Leases("lodestone-system").Get(t.Context(), annotation.SpeakerLeasePrefix+"n2", metav1.GetOptions{})
			return err == nil
		}, testTimeout, time.Millisecond)
		stale := b.lease("n2")
		published := report.Of(stale.Annotations)
		published.Keys = []string{keyOf(t, firstKey).Mark()}
		stale.Annotations, stale.ResourceVersion = map[string]string{annotation.Report: published.String()}, ""
		_, err := a.client.CoordinationV1().Leases(stale.Namespace).Create(t.Context(), stale, metav1.CreateOptions{})
		require.NoError(t, err)
		n1 = a.start("n1")
		return n1, n2
	}
	both := map[string]bool{"n1": false, "n2": false}
	vip, hardware := netip.MustParseAddr("198.18.0.100"), [6]byte{2, 0, 0, 0, 0, 1}
	believes := func(a, b *speaker) bool {
		return seal.Keys(a.SealKeys).Valid(seal.Keys(b.SealKeys).First().Seal(vip, hardware, true), vip, hardware)
	}
	t.Run("and one clusterID", func(t *testing.T) {
		t.Parallel()
		n1, n2 := meet(t, ourCluster)
		n1.waitFor(both)
		n2.waitFor(both)
		require.True(t, believes(n1, n2) && believes(n2, n1))
	})
	t.Run("with a clusterID each", func(t *testing.T) {
		t.Parallel()
		n1, n2 := meet(t, "fra2")
		n1.waitJoined()
		require.Eventually(t, func() bool { return refusedBy(n2.Task) > 2 }, testTimeout, time.Millisecond, "n1 has not tried")
		require.Equal(t, map[string]bool{"n1": false}, n1.Speakers())
		require.Equal(t, map[string]bool{"n2": false}, n2.Speakers())
		require.False(t, believes(n1, n2) || believes(n2, n1))
	})
}
