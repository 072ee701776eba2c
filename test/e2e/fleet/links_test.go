package fleet

import (
	"maps"
	"net/netip"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/lodestone-lb/lodestone/test/e2e/probe"
)

// The nodes have two interfaces: eth0 is on the segment of the VIPs, eth1 on that of the
// API server and of the packets between speakers.

// twoLinks is nodes with two interfaces that announce the VIPs by layer 2, and a client.
type twoLinks struct {
	*Fleet
	t      *testing.T
	asking *probe.Probe
}

func startTwoLinks(t *testing.T, nodes int) *twoLinks {
	t.Helper()
	o := Options{Nodes: nodes, VIPs: vips, Management: true, Document: document("failover: conservative\n")}
	f := &twoLinks{startFleetWith(t, o), t, nil}
	f.steady(t)
	f.asking = probe.UDP(t.Context(), probe.Options{Namespace: f.Client, Target: netip.AddrPortFrom(vips[0], 80)})
	require.NoError(t, f.asking.WaitAnswers(t.Context(), 50))
	return f
}

// keeps checks that every VIP stays where it is for a while: nobody else announces any.
func (f *twoLinks) keeps(owners map[netip.Addr]string, d time.Duration, what string) {
	f.t.Helper()
	moves := f.Moves()
	for end := time.Now().Add(d); time.Now().Before(end); time.Sleep(20 * time.Millisecond) {
		require.Equal(f.t, owners, f.Owners(), what)
	}
	require.Equal(f.t, moves, f.Moves(), what)
}

// answered ends the questions, and checks how long there was no answer at most.
func (f *twoLinks) answered(most time.Duration) {
	f.t.Helper()
	require.NoError(f.t, f.asking.WaitAnswers(f.t.Context(), 50))
	record, err := f.asking.Stop()
	require.NoError(f.t, err)
	f.t.Log(record.Outage())
	assert.LessOrEqual(f.t, record.Outage().Duration(), most)
}

// lostNothing ends the questions, and checks that all were answered.
func (f *twoLinks) lostNothing() {
	f.t.Helper()
	require.NoError(f.t, f.asking.WaitAnswers(f.t.Context(), 50))
	record, err := f.asking.Finish()
	require.NoError(f.t, err)
	assert.Zero(f.t, record.Lost(), record.Losses())
}

// One node loses the link to the others: they own its VIPs within the usual time, and it
// yields to them. When the link is back it has them again.
func TestManagementLinkOfOneNode(t *testing.T) {
	t.Parallel()
	f := startTwoLinks(t, 3)
	before := f.Owners()
	lost := before[vips[0]]
	require.NoError(t, f.UnplugManagement(lost))
	f.owned(t, "others own what the node had", func(o map[netip.Addr]string) bool {
		for vip, owner := range o {
			if owner == lost || before[vip] != lost && owner != before[vip] {
				return false
			}
		}
		return true
	})
	time.Sleep(5 * time.Second) // what both announced at first is over
	f.keeps(f.Owners(), 5*time.Second, "it yields to them")
	require.NoError(t, f.PlugInManagement(lost))
	f.owned(t, "it is back", func(o map[netip.Addr]string) bool { return maps.Equal(o, before) })
	f.answered(10 * time.Second)
}

// The switch for management dies: every VIP stays where it is. A node that dies meanwhile is
// followed, since the segment of the VIPs knows.
func TestManagementSwitch(t *testing.T) {
	t.Parallel()
	f := startTwoLinks(t, 3)
	before := f.Owners()
	require.NoError(t, f.UnplugManagement(f.names...))
	f.keeps(before, 8*time.Second, "all have lost the link to the others")
	f.lostNothing()

	lost := before[vips[0]]
	f.asking = probe.UDP(t.Context(), probe.Options{Namespace: f.Client, Target: netip.AddrPortFrom(vips[0], 80)})
	require.NoError(t, f.Unplug(lost))
	f.owned(t, "others follow", func(o map[netip.Addr]string) bool { return o[vips[0]] != lost })
	f.answered(20 * time.Second)
	require.NoError(t, f.PlugIn(lost))
	require.NoError(t, f.PlugInManagement(f.names...))
	f.owned(t, "all is as before", func(o map[netip.Addr]string) bool { return maps.Equal(o, before) })
}

// A cluster of one node: there is nobody else.
func TestManagementLinkOfALoneNode(t *testing.T) {
	t.Parallel()
	f := startTwoLinks(t, 1)
	require.NoError(t, f.UnplugManagement("n1"))
	f.keeps(f.Owners(), 3*time.Second, "the only node")
	require.NoError(t, f.PlugInManagement("n1"))
	f.keeps(f.Owners(), 3*time.Second, "the only node")
	f.lostNothing()
}

// The last survivor of two, whose link to the others blips, or is down for longer, goes on.
func TestManagementLinkOfTheLastSurvivor(t *testing.T) {
	t.Parallel()
	f := startTwoLinks(t, 2)
	require.NoError(t, f.EndSpeaker("n2", unix.SIGKILL))
	require.NoError(t, f.Unplug("n2"))
	f.owned(t, "n1 owns all", func(o map[netip.Addr]string) bool { return all(o, "n1") })
	_, err := f.asking.Stop()
	require.NoError(t, err)
	time.Sleep(6 * time.Second) // it is a while since
	f.asking = probe.UDP(t.Context(), probe.Options{Namespace: f.Client, Target: netip.AddrPortFrom(vips[0], 80)})
	require.NoError(t, f.asking.WaitAnswers(t.Context(), 50))
	for _, down := range []time.Duration{5 * time.Millisecond, 2 * time.Second} {
		require.NoError(t, f.UnplugManagement("n1"))
		time.Sleep(down)
		require.NoError(t, f.PlugInManagement("n1"))
		f.keeps(f.Owners(), 2*time.Second, "nobody else is there")
	}
	f.lostNothing()
}

func all(owners map[netip.Addr]string, node string) bool {
	for _, owner := range owners {
		if owner != node {
			return false
		}
	}
	return len(owners) > 0
}

// One node loses the link to the VIPs' segment, and is heard by the others: they own its VIPs.
// All lose it: they have them again at once when it is back.
func TestLinkToTheVIPs(t *testing.T) {
	t.Parallel()
	f := startTwoLinks(t, 3)
	before := f.Owners()
	lost := f.lose(t)
	require.NoError(t, f.PlugIn(lost))
	f.owned(t, "it is back", func(o map[netip.Addr]string) bool { return maps.Equal(o, before) })
	f.answered(10 * time.Second)

	f.steady(t)
	moves := f.Moves()
	for _, node := range f.names {
		require.NoError(t, f.Unplug(node))
	}
	time.Sleep(2 * time.Second)
	for _, node := range f.names {
		require.NoError(t, f.PlugIn(node))
	}
	f.asking = probe.UDP(t.Context(), probe.Options{Namespace: f.Client, Target: netip.AddrPortFrom(vips[0], 80)})
	f.steady(t)
	assert.Equal(t, before, f.Owners())
	assert.Equal(t, moves, f.Moves(), "nobody else has announced any")
	f.answered(10 * time.Second)
}

// Routers know themselves whether they reach a node: whoever loses the link to the other
// speakers, the routes stay, and packets arrive.
func TestRoutesOutliveTheManagementLink(t *testing.T) {
	t.Parallel()
	f := startRoutedWith(t, fastBFD, Options{Management: true})
	f.losesNothing(func() {
		require.NoError(t, f.UnplugManagement("n1"))
		f.goesOnSendingTo(3*time.Second, "n1", "n2")
		require.NoError(t, f.UnplugManagement("n2"))
		f.goesOnSendingTo(3*time.Second, "n1", "n2")
		require.NoError(t, f.PlugInManagement("n1", "n2"))
		f.goesOnSendingTo(6*time.Second, "n1", "n2")
	})
	require.NoError(t, f.Unplug("n1"))
	require.Less(t, f.sendsTo("n2"), soon)
	require.NoError(t, f.PlugIn("n1"))
	f.sendsTo("n1", "n2")
}
