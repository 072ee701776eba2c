package fleet

import (
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/lodestone-lb/lodestone/test/e2e/probe"
)

// routed announces all VIPs to the router by BGP; more keys of the peer follow.
const routed = "advertisements: [{name: all, bgp: {}}]\npeers: [{name: tor, address: 198.18.255.252, localASN: 64512, peerASN: 64513, " +
	"connectRetry: 1s%s}]\n"

const fastBFD = ", bfd: {transmitInterval: 300ms, receiveInterval: 300ms}"

// routedFleet is two nodes and a router.
type routedFleet struct {
	*Fleet
	t *testing.T
}

// startRouted starts one whose nodes have a session each, once the router sends
// packets to both.
func startRouted(t *testing.T, keys string) *routedFleet {
	t.Helper()
	return startRoutedWith(t, keys, Options{})
}

func startRoutedWith(t *testing.T, keys string, o Options) *routedFleet {
	t.Helper()
	o.Nodes, o.VIPs, o.Router, o.Document = 2, vips, true, document(fmt.Sprintf(routed, keys))
	f := &routedFleet{startFleetWith(t, o), t}
	f.sendsTo("n1", "n2")
	if strings.Contains(keys, "bfd") {
		f.bfdUp("n1", "n2")
	}
	return f
}

// until waits until ok, and returns how long that took.
func (f *routedFleet) until(what string, ok func() bool) time.Duration {
	f.t.Helper()
	start := time.Now()
	require.Eventually(f.t, ok, 40*time.Second, 5*time.Millisecond, what)
	return time.Since(start)
}

func (f *routedFleet) hops() []string {
	f.t.Helper()
	hops, err := f.Router.NextHops(vips[0])
	require.NoError(f.t, err)
	return hops
}

// sendsTo waits until the router sends packets for the first VIP to these nodes
// and no others, and returns how long that took.
func (f *routedFleet) sendsTo(nodes ...string) time.Duration {
	f.t.Helper()
	return f.until(fmt.Sprintf("the router sends to %q", nodes), func() bool { return slices.Equal(f.hops(), nodes) })
}

// goesOnSendingTo checks that it does for a while.
func (f *routedFleet) goesOnSendingTo(d time.Duration, nodes ...string) {
	f.t.Helper()
	for end := time.Now().Add(d); time.Now().Before(end); time.Sleep(5 * time.Millisecond) {
		require.Equal(f.t, nodes, f.hops())
	}
}

// table returns the router's paths to the first VIP as text, and whether one of them is
// by way of the node.
func (f *routedFleet) table(node string) (text string, knows bool) {
	f.t.Helper()
	text, err := f.Router.Ask(f.t.Context(), fmt.Sprintf("show bgp ipv4 unicast %s/32", vips[0]))
	require.NoError(f.t, err)
	return text, strings.Contains(text, "from "+f.Host(node).String())
}

// bfdUp waits until the router has BFD sessions with the nodes that are up, and
// none that is not.
func (f *routedFleet) bfdUp(nodes ...string) {
	f.t.Helper()
	f.until("BFD is up", func() bool {
		text, err := f.Router.Ask(f.t.Context(), "show bfd peers brief")
		return err == nil && strings.Count(text, " up") == len(nodes) && !strings.Contains(text, " down")
	})
}

func (f *routedFleet) session(node string) Session {
	f.t.Helper()
	s, err := f.Router.Session(f.t.Context(), node)
	require.NoError(f.t, err)
	return s
}

// logs waits until the node's speaker has logged that, for the nth time.
func (f *routedFleet) logs(node, what string, times int) {
	f.t.Helper()
	f.until(node+" logs "+what, func() bool { return f.logged(node, what) >= times })
}

func (f *routedFleet) logged(node, what string) int {
	f.t.Helper()
	log, err := os.ReadFile(f.Log(node))
	require.NoError(f.t, err)
	return strings.Count(string(log), what)
}

// losesNothing checks that no datagram of new flows by way of the router is lost
// meanwhile.
func (f *routedFleet) losesNothing(do func()) {
	f.t.Helper()
	asking := probe.UDP(f.t.Context(), probe.Options{Namespace: f.Router.Namespace, Target: netip.AddrPortFrom(vips[0], 80), NewFlows: true})
	require.NoError(f.t, asking.WaitAnswers(f.t.Context(), 50))
	do()
	require.NoError(f.t, asking.WaitAnswers(f.t.Context(), 50))
	record, err := asking.Finish()
	require.NoError(f.t, err)
	assert.Zero(f.t, record.Lost(), record.Losses())
}

// policy is one column of the table in docs/guides/bgp.md, what happens when
// something fails.
type policy struct {
	bfd, graceful bool
}

// The timers are those of the test: the table names only the keys.
const (
	holdTime, restartTime = 9 * time.Second, 9 * time.Second
	// soon is more than BFD takes with 300 ms x 3, on a machine with other things
	// to do, and less than a hold time that has just begun lasts at least: a
	// keepalive is three seconds old, or a little more.
	soon, silence = 4 * time.Second, holdTime - holdTime/3 - time.Second
	// detected is also more than BFD takes, for a wait.
	detected = 2 * time.Second
	// late is how late a router may be that others keep from working.
	late = 3 * time.Second
)

func (p policy) keys() (keys string) {
	keys = fmt.Sprintf(", holdTime: %s", holdTime)
	if p.bfd {
		keys += fastBFD
	}
	if p.graceful {
		keys += fmt.Sprintf(", gracefulRestart: {restartTime: %s}", restartTime)
	}
	return keys
}

// gone is how long a router goes on sending to a node that it no longer hears.
func (p policy) gone() (least, most time.Duration) {
	switch {
	case p.bfd:
		return 0, soon
	case p.graceful:
		return silence + restartTime, holdTime + restartTime + late
	}
	return silence, holdTime + late
}

// Every cell of the table holds.
func TestFailurePolicies(t *testing.T) {
	t.Parallel()
	for name, p := range map[string]policy{"hold time alone": {}, "bfd": {bfd: true}, "gracefulRestart": {graceful: true},
		"bfd and gracefulRestart": {bfd: true, graceful: true}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel() // they mostly wait
			f := startRouted(t, p.keys())
			for _, row := range []struct {
				what string
				act  func(*routedFleet, policy)
			}{
				{"the speaker is updated", (*routedFleet).speakerUpdated},
				{"the speaker is killed", (*routedFleet).speakerKilled},
				{"the node loses power, or its link", (*routedFleet).linkLost},
				{"the node is taken out", (*routedFleet).takenOut},
				{"the last endpoint ends", (*routedFleet).endpointEnds},
				{"the router restarts", (*routedFleet).routerRestarts},
				{"the API server is away", (*routedFleet).apiAway},
			} {
				begin := time.Now()
				row.act(f, p)
				t.Logf("%s: as in the table, %s", row.what, time.Since(begin).Round(time.Millisecond))
			}
		})
	}
}

// whole waits until all is as at the beginning.
func (f *routedFleet) whole(p policy) {
	f.t.Helper()
	f.sendsTo("n1", "n2")
	f.until("both sessions are up", func() bool { return f.session("n1").State == "Established" && f.session("n2").State == "Established" })
	if p.bfd {
		f.bfdUp("n1", "n2")
	}
}

// restart starts a speaker, and waits for its session.
func (f *routedFleet) restart(node string, p policy) {
	f.t.Helper()
	times := f.logged(node, "BGP session established")
	require.NoError(f.t, f.StartSpeaker(node))
	f.logs(node, "BGP session established", times+1)
	f.whole(p)
}

func (f *routedFleet) speakerUpdated(p policy) {
	f.losesNothing(func() {
		require.NoError(f.t, f.EndSpeaker("n1", unix.SIGTERM))
		require.Equal(f.t, []string{"n2"}, f.hops(), "the router was asked to prefer others")
		time.Sleep(detected)
		text, knows := f.table("n1")
		require.Equal(f.t, p.graceful, knows, text)
		f.restart("n1", p)
	})
}

func (f *routedFleet) speakerKilled(p policy) {
	f.losesNothing(func() {
		require.NoError(f.t, f.EndSpeaker("n1", unix.SIGKILL))
		if p.graceful {
			f.goesOnSendingTo(detected, "n1", "n2")
		} else {
			require.Less(f.t, f.sendsTo("n2"), soon)
		}
		f.restart("n1", p)
	})
	if p.graceful { // and if the speaker does not come back
		require.NoError(f.t, f.EndSpeaker("n1", unix.SIGKILL))
		gone := f.sendsTo("n2")
		require.Greater(f.t, gone, restartTime-time.Second)
		require.Less(f.t, gone, restartTime+late)
		f.restart("n1", p)
	}
}

func (f *routedFleet) linkLost(p policy) {
	require.NoError(f.t, f.Unplug("n1"))
	gone := f.sendsTo("n2")
	f.t.Logf("the router sent to the lost node for %s", gone.Round(time.Millisecond))
	least, most := p.gone()
	require.Greater(f.t, gone, least)
	require.Less(f.t, gone, most)
	require.NoError(f.t, f.PlugIn("n1"))
	f.whole(p)
}

func (f *routedFleet) takenOut(p policy) {
	const asked = "draining: routers are asked to prefer other nodes"
	before, times := f.session("n1"), f.logged("n1", asked)
	f.losesNothing(func() {
		require.NoError(f.t, f.Label("n1", map[string]string{"node.kubernetes.io/exclude-from-external-load-balancers": ""}))
		f.until("the router is asked to prefer others", func() bool { // for two seconds, which vtysh may miss
			text, _ := f.table("n1")
			return strings.Contains(text, "graceful-shutdown") || f.logged("n1", asked) > times
		})
		f.sendsTo("n2")
		f.until("the routes are gone", func() bool { _, knows := f.table("n1"); return !knows })
		require.NoError(f.t, f.Label("n1", nil))
		f.whole(p)
	})
	require.Equal(f.t, before.Times, f.session("n1").Times, "the session stays")
}

func (f *routedFleet) endpointEnds(p policy) {
	before := f.session("n1")
	require.NoError(f.t, f.Ready(false))
	require.Less(f.t, f.sendsTo(), soon)
	require.NoError(f.t, f.Ready(true))
	f.whole(p)
	require.Equal(f.t, before.Times, f.session("n1").Times, "the session stays")
}

func (f *routedFleet) routerRestarts(p policy) {
	// After one that did not last 10 s a node lets the router rest.
	f.until("the sessions have lasted", func() bool { return f.session("n1").Millis > 10_000 && f.session("n2").Millis > 10_000 })
	require.NoError(f.t, f.Router.Kill())
	require.NoError(f.t, f.Router.Start(f.t.Context()))
	back := f.sendsTo("n1", "n2")
	f.t.Logf("the router has the routes %s after its start", back.Round(time.Millisecond))
	require.Less(f.t, back, time.Second+late, "connectRetry is a second")
	f.whole(p)
}

func (f *routedFleet) apiAway(p policy) {
	require.NoError(f.t, f.StopAPI())
	f.goesOnSendingTo(2*time.Second, "n1", "n2")
	f.linkLost(p)
}

// BFD comes up, gets other timers and stays up, whatever else
// changes; a peer that is strict has no session without it.
func TestBFDStaysUp(t *testing.T) {
	t.Parallel()
	f := startRouted(t, ", bfd: {transmitInterval: 300ms, receiveInterval: 300ms}")
	for i := range 200 {
		require.NoError(t, f.AddService(netip.AddrFrom4([4]byte{198, 18, 2, byte(i)})))
	}
	f.until("200 more routes", func() bool { return f.session("n1").Prefixes() == len(vips)+200 })
	configure := func(keys string) { require.NoError(t, f.Configure(document(fmt.Sprintf(routed, keys)))) }
	configure(", bfd: {transmitInterval: 400ms, receiveInterval: 600ms, detectMultiplier: 7}")
	f.until("the router has the new timers", func() bool {
		text, err := f.Router.Ask(t.Context(), fmt.Sprintf("show bfd peer %s json", f.Host("n1")))
		return err == nil && strings.Contains(text, `"remote-transmit-interval":400`) &&
			strings.Contains(text, `"remote-receive-interval":600`) && strings.Contains(text, `"remote-detect-multiplier":7`)
	})
	for _, node := range []string{"n1", "n2"} {
		require.Equal(t, 1, f.logged(node, "BFD session up"), node)
		require.Zero(t, f.logged(node, "BFD session down"), node)
		require.Equal(t, 1, f.logged(node, "BGP session established"), node)
	}

	t.Log("without BFD at the router")
	require.NoError(t, f.Router.Configure(t.Context(), "no neighbor nodes bfd"))
	f.sendsTo("n1", "n2")
	configure(", bfd: {strict: true}")
	f.logs("n1", "waiting for BFD (strict)", 1)
	f.sendsTo()
	require.NoError(t, f.Router.Configure(t.Context(), "neighbor nodes bfd"))
	// FRR has a BFD session only with peers that have a BGP session with it: neither comes
	// first, see docs/guides/bgp.md.
	f.goesOnSendingTo(3 * time.Second)
	configure(fastBFD)
	f.sendsTo("n1", "n2")
	f.bfdUp("n1", "n2")
	configure(", bfd: {strict: true}")
	f.goesOnSendingTo(time.Second, "n1", "n2")
}

// Two nodes that have the same router ID by mistake have their sessions, and the
// log reports it.
func TestOneRouterIDForTwoNodes(t *testing.T) {
	t.Parallel()
	f := startRouted(t, ", routerID: 192.0.2.1")
	for node, other := range map[string]string{"n1": "n2", "n2": "n1"} {
		require.Equal(t, "192.0.2.1", f.session(node).RouterID)
		f.logs(node, fmt.Sprintf("node %s has the router ID 192.0.2.1, too", other), 1)
	}
	require.NoError(t, f.Configure(document(fmt.Sprintf(routed, ""))))
	f.until("each has its own", func() bool {
		return f.session("n1").RouterID == f.Host("n1").String() && f.session("n2").RouterID == f.Host("n2").String()
	})
	f.sendsTo("n1", "n2")
}

// A document without peers takes all routes back; one that also announces to
// them is refused, and changes nothing.
func TestConfigurationWithoutPeers(t *testing.T) {
	t.Parallel()
	f := startRouted(t, fastBFD)
	require.NoError(t, f.Configure(document("advertisements: [{name: all, bgp: {}}]\n")))
	f.logs("n1", "the document defines no peers", 1)
	f.goesOnSendingTo(time.Second, "n1", "n2")
	require.NoError(t, f.Configure(document("")))
	require.Less(t, f.sendsTo(), soon)
	text, err := f.Router.Ask(t.Context(), "show bgp summary")
	require.NoError(t, err)
	require.NotContains(t, text, f.Host("n1").String())
	f.until("the VIPs are announced by layer 2", func() bool { return len(f.Owners()) == len(vips) })
	require.NoError(t, f.Configure(document(fmt.Sprintf(routed, fastBFD))))
	f.sendsTo("n1", "n2")
	f.bfdUp("n1", "n2")
}
