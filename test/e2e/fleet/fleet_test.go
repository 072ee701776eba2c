package fleet

import (
	"context"
	"maps"
	"net/netip"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/lodestone-lb/lodestone/test/e2e/lab"
	"github.com/lodestone-lb/lodestone/test/e2e/netns"
	"github.com/lodestone-lb/lodestone/test/e2e/probe"
	"github.com/lodestone-lb/lodestone/test/e2e/program"
)

var vips = []netip.Addr{netip.MustParseAddr("198.18.1.1"), netip.MustParseAddr("198.18.1.2"), netip.MustParseAddr("198.18.1.3")}

// fleetOf starts three nodes, and returns when they announce the VIPs.
func fleetOf(t *testing.T, advertisement string) *Fleet {
	t.Helper()
	f := startFleet(t, advertisement)
	f.steady(t)
	return f
}

// startFleet starts three nodes.
func startFleet(t *testing.T, advertisement string) *Fleet {
	t.Helper()
	return startFleetWith(t, Options{Nodes: 3, VIPs: vips, Document: document(advertisement)})
}

// document is a configuration with a pool that has the VIPs.
func document(more string) string {
	return "apiVersion: lodestone.io/v1alpha1\nkind: Config\npools:\n  - {name: lan, addresses: [198.18.0.0/17]}\n" + more
}

// startFleetWith starts a fleet of the program as it is now, whose first VIP
// answers.
func startFleetWith(t *testing.T, o Options) *Fleet {
	t.Helper()
	root, err := lab.Root()
	require.NoError(t, err)
	if o.Speaker == "" {
		bin, err := program.Builder{Root: root, Progress: t.Logf}.Lodestone(t.Context())
		require.NoError(t, err)
		o.Speaker = filepath.Join(bin, "lodestone-speaker")
	}
	o.Served = o.VIPs[:1]
	f, err := Start(t.Context(), o)
	require.NoError(t, err)
	t.Cleanup(func() {
		logs := map[string]string{}
		for _, n := range f.names {
			logs[n] = f.Log(n)
		}
		if f.Router != nil {
			logs["bgpd"] = f.Router.Log("bgpd")
		}
		for name, file := range logs {
			if log, err := os.ReadFile(file); t.Failed() && err == nil {
				t.Logf("%s:\n%s", name, log)
			}
		}
		require.NoError(t, f.Stop())
	})
	return f
}

// The next fleet removes what one left whose program was killed: processes, namespaces and files.
func TestFleetAfterAKilledOne(t *testing.T) {
	t.Parallel()
	const number = most + 1 // no other fleet's
	killed, next := &Fleet{}, &Fleet{}
	require.NoError(t, killed.take(t.Context(), number, number))
	router := killed.host("router")
	require.NoError(t, netns.Create(router))
	daemon := netns.Command(t.Context(), router, "sh", "-c", "echo; exec sleep 1000")
	out, err := daemon.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, daemon.Start())
	_, err = out.Read(make([]byte, 1)) // it is inside
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(killed.Log("n1"), nil, 0o600))
	killed.lock.Release() // as the kernel does

	require.NoError(t, next.take(t.Context(), number, number))
	t.Cleanup(func() { require.NoError(t, next.remove()); next.lock.Release() })
	require.ErrorContains(t, daemon.Wait(), "killed")
	require.NoFileExists(t, netns.Path(router))
	require.NoFileExists(t, killed.Log("n1"))
	require.DirExists(t, next.routerDir())
}

func (f *Fleet) steady(t *testing.T) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	require.NoError(t, f.Steady(ctx))
}

// owned waits until the owners are as they should be.
func (f *Fleet) owned(t *testing.T, what string, holds func(map[netip.Addr]string) bool) {
	t.Helper()
	require.Eventually(t, func() bool { return holds(f.Owners()) }, 30*time.Second, 10*time.Millisecond, what)
}

// lose unplugs the owner of the first VIP, whose VIPs and no others move.
func (f *Fleet) lose(t *testing.T) (lost string) {
	t.Helper()
	before := f.Owners()
	lost = before[vips[0]]
	require.NoError(t, f.Unplug(lost))
	f.owned(t, "what the lost node had, and no more, has moved", func(o map[netip.Addr]string) bool {
		for vip, owner := range o {
			if (owner == before[vip]) == (before[vip] == lost) {
				return false
			}
		}
		return true
	})
	return lost
}

// A fleet does what the lab does: VIPs are announced, a node that is lost loses
// its own, and takes them back.
func TestFleet(t *testing.T) {
	t.Parallel()
	f := fleetOf(t, "")
	before := f.Owners()
	asking := probe.UDP(t.Context(), probe.Options{Namespace: f.Client, Target: netip.AddrPortFrom(vips[0], 80)})
	require.NoError(t, asking.WaitAnswers(t.Context(), 10))
	lost := f.lose(t)
	require.NoError(t, asking.WaitAnswers(t.Context(), 10))
	require.NoError(t, f.PlugIn(lost))
	f.owned(t, "it is back", func(o map[netip.Addr]string) bool { return maps.Equal(o, before) })
	record, err := asking.Stop()
	require.NoError(t, err)
	t.Logf("%s; %d API writes, %+v", record.Outage(), f.API.Writes(), f.Traffic())
	assert.NotZero(t, f.Traffic().Membership)
	assert.NotZero(t, f.Traffic().VIPs)
	assert.GreaterOrEqual(t, f.API.Writes(), 3, "a Lease each")
	assert.GreaterOrEqual(t, f.Moves(), 2)
	cpu, err := f.CPU()
	require.NoError(t, err)
	assert.NotZero(t, cpu)
}

// With keepOwner, what moved stays, and moves on when its new owner is lost.
func TestKeptOwnerStays(t *testing.T) {
	t.Parallel()
	f := fleetOf(t, "failover: conservative\nadvertisements:\n  - {name: all, layer2: {keepOwner: true}}\n")
	for range 2 {
		lost := f.lose(t)
		without := f.Owners()
		time.Sleep(5 * time.Second) // it has noticed: a shorter cut is a partition, after which the election decides
		require.NoError(t, f.PlugIn(lost))
		f.steady(t)
		require.Equal(t, without, f.Owners(), "%s is back", lost)
	}
}

// A node gets another address. Its speaker, which others expect at the old one, ends and logs the reason, so that
// the kubelet starts one with the new address.
func TestSpeakerOfANodeWithAnotherAddressEnds(t *testing.T) {
	t.Parallel()
	f := startFleetWith(t, Options{Nodes: 1, VIPs: vips, Document: document("")})
	f.steady(t)
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n1"}}
	node.Status.Addresses = []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: "198.18.255.99"}}
	speaker, ended := f.speakers["n1"], make(chan error, 1)
	delete(f.speakers, "n1")
	go func() { ended <- speaker.Wait() }()
	require.NoError(t, f.put("nodes", node))
	select {
	case err := <-ended:
		require.Error(t, err)
	case <-time.After(30 * time.Second):
		require.NoError(t, speaker.Process.Kill())
		<-ended
		t.Error("it goes on")
	}
	log, err := os.ReadFile(f.Log("n1"))
	require.NoError(t, err)
	require.Contains(t, string(log), "the Node has left the address "+f.nodeIP("n1").String())
}
