package membership

import (
	"fmt"
	"log/slog"
	"net/netip"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hashicorp/memberlist"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"k8s.io/client-go/tools/cache"

	"github.com/lodestone-lb/lodestone/pkg/annotation"
	"github.com/lodestone-lb/lodestone/pkg/objects"
	"github.com/lodestone-lb/lodestone/pkg/testnet"
)

// leaseOf is the Lease of the node's speaker, with nothing but its name.
func leaseOf(node string) *lease {
	return &lease{Meta: objects.Meta{Namespace: "lodestone-system", Name: annotation.SpeakerLeasePrefix + node}, node: node}
}

// Somebody who has the key makes up speakers, with another name each, as many as it likes.
// A few count, and those that have a Lease all the same.
func TestMadeUpSpeakers(t *testing.T) {
	c := newCluster(t, "n1", "n2")
	n1 := c.mute("n1", netip.MustParseAddrPort("127.0.0.1:0"))
	leases := cache.NewStore(cache.MetaNamespaceKeyFunc)
	for i := range 100 {
		require.NoError(t, leases.Add(leaseOf(fmt.Sprint("honest-", i))))
	}
	n1.leases.mu.Lock()
	n1.leases.store = leases
	n1.leases.mu.Unlock()
	meets := func(name string) *mute {
		t.Helper()
		sender := c.mute(name, netip.MustParseAddrPort("127.0.0.1:0"))
		_, err := sender.list.Load().Join([]string{n1.options.Address.String()})
		require.NoError(t, err)
		return sender
	}
	for i := range 2 * maxUnlisted {
		meets(fmt.Sprint("made-up-", i)).kill()
	}
	assert.LessOrEqual(t, len(n1.Speakers()), 1+maxUnlisted)
	assert.LessOrEqual(t, n1.list.Load().NumMembers(), 1+maxUnlisted)
	meets("honest-7") // memberlist answers before it takes in what it has received
	require.Eventually(t, func() bool { return n1.knows("honest-7") }, testTimeout, time.Millisecond)
}

// Somebody who has the key publishes in the name of a speaker without an end: the log has a bound.
func TestChangesWithoutEnd(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		log := &testnet.Log{}
		task := New(Options{Node: "n1", Log: slog.New(slog.NewTextHandler(log, nil)), Registry: prometheus.NewRegistry()})
		task.gossip.NotifyJoin(&memberlist.Node{Name: "n2", Meta: []byte{metaVersion, 0}})
		for i := range 30_000 {
			task.gossip.NotifyUpdate(&memberlist.Node{Name: "n2", Meta: []byte{metaVersion, []byte{metaReady, 0}[i%2]}})
		}
		assert.Equal(t, 10_000, strings.Count(log.String(), `"speaker changed"`))
	})
}

// 20,000 names cost what a few do, also when each of them leaves before the next one
// comes.
func TestMadeUpSpeakersThatComeAndGo(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		log := &testnet.Log{}
		task := New(Options{Node: "n1", Log: slog.New(slog.NewTextHandler(log, nil)), Registry: prometheus.NewRegistry()})
		heard, counted := task.gossip, 0
		for i := range 20_000 {
			n := &memberlist.Node{Name: fmt.Sprint("made-up-", i), Meta: []byte{metaVersion, metaReady}}
			if task.gossip.NotifyAlive(n) == nil {
				counted++
				heard.NotifyJoin(n)
				heard.NotifyLeave(n)
			}
			if i%20 == 0 {
				time.Sleep(time.Second)
			}
		}
		t.Logf("%d of 20,000 counted in %d s", counted, 1000)
		assert.LessOrEqual(t, counted, 1000/60*maxUnlisted+2*maxUnlisted)
		assert.Positive(t, counted)
		for name, n := range map[string]int{"speakers": len(task.Speakers()), "records": len(task.peers)} {
			assert.LessOrEqual(t, n, 1+maxUnlisted, name)
		}
		assert.LessOrEqual(t, strings.Count(log.String(), "too many speakers without a Lease"), 2)

		for task.gossip.NotifyAlive(&memberlist.Node{Name: fmt.Sprint("filler-", task.peers.count((*peer).isUnlisted))}) == nil {
		}
		late := &memberlist.Node{Name: "late"}
		require.Error(t, task.gossip.NotifyAlive(late))
		task.leases.store, task.options.Namespace = cache.NewStore(cache.MetaNamespaceKeyFunc), "lodestone-system"
		require.NoError(t, task.leases.store.Add(leaseOf("late")))
		require.NoError(t, task.gossip.NotifyAlive(late), "its Lease is there")
	})
}
