package core

import (
	"errors"
	"net/netip"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/lodestone-lb/lodestone/pkg/config"
	"github.com/lodestone-lb/lodestone/pkg/report"
	"github.com/lodestone-lb/lodestone/speaker/plan"
)

func TestNothingIsOwnedBeforeAllIsReady(t *testing.T) {
	s := newStory(t)
	s.core.Step(Service{web("203.0.113.1", true)}, s.now)
	s.speakers["n2"] = false
	s.core.Step(s.members(), s.now)
	s.core.Step(s.noded(), s.now)
	for _, step := range []Event{Health{Healthy: true, Joined: true, Forwards: true}, Health{Synced: true, Healthy: true, Forwards: true},
		Health{Synced: true, Joined: true, Forwards: true}, Health{Synced: true, Joined: true, Healthy: true}, s.health} {
		e := s.step(step)
		require.False(t, e.Ready || e.BecameReady, "%+v", step)
		s.announced()
	}
	e := s.step(s.configured())
	require.True(t, e.Ready && e.BecameReady)
	s.announced("203.0.113.1")
	e = s.step(Health{Synced: true, Joined: true})
	require.False(t, e.Ready || e.BecameReady)
	s.announced()
	s.silent(plan.SpeakerNotReady, "")
	e = s.step(s.health)
	require.True(t, e.Ready && !e.BecameReady)
	s.announced("203.0.113.1")
}

// The others may be known before this node has joined them: nothing but that is new then.
func TestForwardingIsReportedOnceTheNodeHasJoined(t *testing.T) {
	s := newStory(t)
	e := s.step(Health{Synced: true, Healthy: true}, s.configured(), s.noded(), s.members())
	require.True(t, e.NewPlan && e.Forwarding == nil)
	e = s.step(Health{Synced: true, Joined: true, Healthy: true})
	require.NotNil(t, e.Forwarding)
}

// Without the API server's objects nothing is decided: an empty plan would withdraw what
// the speaker before this one has announced.
func TestNothingIsDecidedBeforeTheCachesAreFilled(t *testing.T) {
	s := newStory(t)
	e := s.step(Health{Joined: true, Healthy: true}, s.configured(), s.members())
	require.Equal(t, Effects{}, e)
	e = s.step(s.health, s.noded())
	require.True(t, e.NewPlan && e.PodRoutes != nil && e.Limits != nil && e.Routes != nil && e.Ready)
}

// A node whose kube-proxy is sick stays ready, as the last choice, and one that is sick
// alone keeps its VIPs: what is in the kernel serves.
func TestASickDataPlaneIsTheLastChoice(t *testing.T) {
	s, vip := pair(t, "n1")
	s.begin(web(vip, true))
	s.announced(vip)
	s.networks = map[string]report.Network{"n1": {Sick: true}}
	e := s.step(Health{Synced: true, Joined: true, Sick: true, Forwards: true}, s.members())
	require.True(t, e.Ready)
	s.announced(vip + " leaving")
	s.networks["n2"] = report.Network{Sick: true}
	s.step(s.members())
	s.announced(vip)
	s.step(Health{Synced: true, Joined: true})
	s.announced()
}

func TestSegmentsMoveVIPs(t *testing.T) {
	s, vip := pair(t, "n1")
	s.begin(web(vip, true))
	network := func(subnets ...string) report.Network {
		n := report.Network{Segments: []report.Segment{}}
		for _, subnet := range subnets {
			n.Segments = append(n.Segments, report.Segment{Subnet: netip.MustParsePrefix(subnet), Interface: "eth0"})
		}
		return n
	}
	on := func(n1, n2 report.Network) {
		s.networks = map[string]report.Network{"n1": n1, "n2": n2}
		s.step(s.members())
		s.after(handOver)
	}
	on(network("203.0.113.0/24"), network())
	s.announced(vip)
	on(network(), network("203.0.113.0/24"))
	s.announced()
	s.silent(plan.NotOnSegment, "n2")
	on(network("203.0.113.0/24"), network("198.18.0.0/24"))
	s.announced(vip)
	s.step(s.node("n2", func(n *plan.Node) { n.Labels = map[string]string{"new": "label"} })) // the segments are kept
	s.announced(vip)
}

func TestVIPsOfADeadSpeakerComeHere(t *testing.T) {
	s, vip := pair(t, "n2")
	s.begin(web(vip, true))
	s.announced()
	s.after(time.Second)
	e := s.step(s.lost())
	s.announced(vip)
	require.Equal(t, s.now, s.core.State().Since[netip.MustParseAddr(vip)])
	require.Equal(t, s.now, s.core.State().Planned)
	require.Len(t, e.Changes.VIPs, 1)
}

// Facts that change nothing cost no plan and set nothing.
func TestWhatIsTheSameChangesNothing(t *testing.T) {
	s, vip := pair(t, "n1")
	s.begin(web(vip, true))
	for _, again := range []Event{Service{web(vip, true)}, s.members(), s.health, Config{s.core.facts.config}} {
		e := s.step(again)
		require.False(t, e.NewPlan || e.SetVIPs || e.Routes != nil || e.PodRoutes != nil || e.StateChanged, "%+v", again)
	}
}

func TestFailedSetIsTriedAgain(t *testing.T) {
	s, vip := pair(t, "n1")
	s.begin(web(vip, true))
	failed := s.core.Step(VIPsFailed{}, s.now)
	require.Equal(t, s.now.Add(RetryAfter), failed.Next)
	s.vips, s.last = nil, failed
	s.after(RetryAfter)
	s.announced(vip)
	require.True(t, s.last.Next.IsZero() || s.last.Next.After(s.now), "once")
	require.False(t, s.step().SetVIPs)
}

// The reports about an address are removed with the last Service that has it.
func TestAddressesWithoutAServiceAreGone(t *testing.T) {
	s, vip := pair(t, "n1")
	s.begin(web(vip, true))
	require.Empty(t, s.step(Service{web(vip, false)}).Gone, "withdrawn, and still the Service's")
	require.Equal(t, []netip.Addr{netip.MustParseAddr(vip)}, s.step(Service{web("", false)}).Gone)
}

// Until the speaker was ready, the kernel keeps what one before it wrote.
func TestLimitsStayUntilReady(t *testing.T) {
	s, vip := pair(t, "n1")
	limited := web(vip, true)
	limited.Limit.PerSecond = 5
	s.health.Healthy = false
	s.begin(limited)
	require.True(t, s.last.NewPlan)
	require.Nil(t, s.last.Limits)
	require.Len(t, s.step(well).Limits, 1)
	other := web("203.0.113.77", true)
	other.Name = "default/other"
	require.Nil(t, s.step(Service{other}).Limits, "they stay")
	e := s.step(Health{Synced: true, Joined: true})
	require.NotNil(t, e.Limits)
	require.Empty(t, e.Limits)
}

func TestAWrongLimitIsLoggedOnce(t *testing.T) {
	s, vip := pair(t, "n1")
	wrong := web(vip, true)
	wrong.LimitErr = errors.New("no number")
	s.begin(wrong)
	require.True(t, s.logged("connections are not limited: correct the Service's annotation"))
	s.step(s.excluded("n2", true))
	require.Empty(t, s.last.Log)
	wrong.LimitErr = errors.New("nor is this")
	s.step(Service{wrong})
	require.True(t, s.logged("connections are not limited: correct the Service's annotation"))
}

func TestRoutesToPodsFollowNodesAndConfiguration(t *testing.T) {
	s := newStory(t)
	n2 := func(cidr, address string) Event {
		return s.node("n2", func(n *plan.Node) {
			n.PodCIDRs, n.Addresses = []string{cidr}, []netip.Addr{netip.MustParseAddr(address)}
		})
	}
	is := func(mode config.RouteMode, routes map[string]string) {
		t.Helper()
		got := map[string]string{}
		require.NotNil(t, s.last.PodRoutes)
		for cidr, r := range s.last.PodRoutes.Routes {
			require.Equal(t, "n2", r.Node)
			got[cidr.String()] = r.Via.String()
		}
		require.Equal(t, mode, s.last.PodRoutes.Mode)
		require.Equal(t, routes, got)
	}
	n2("10.244.2.0/24", "198.18.0.2")
	s.step(s.health, s.noded(), s.members())
	require.Nil(t, s.last.PodRoutes, "nothing is taken away before the configuration is known")
	s.config.Routes = &config.Routes{Mode: config.RoutesKernel}
	s.step(s.configured())
	is(config.RoutesKernel, map[string]string{"10.244.2.0/24": "198.18.0.2"})
	s.step(n2("10.244.7.0/24", "198.18.0.22"))
	is(config.RoutesKernel, map[string]string{"10.244.7.0/24": "198.18.0.22"})
	s.step(s.speaker(false))
	require.Nil(t, s.last.PodRoutes, "the reports of speakers do not change routes to pods")
	s.config.Routes = nil
	s.step(s.configured())
	is("", map[string]string{})
	delete(s.nodes, "n1")
	s.step(s.noded())
	require.Nil(t, s.last.PodRoutes, "a database without this node is not the one that the routes came from")
	s.step(s.configured())
	require.Nil(t, s.last.PodRoutes)
}

// StateChanged is set when the moves, labels or addresses of this node change.
func TestChangesOfTheNode(t *testing.T) {
	s := newStory(t)
	s.begin()
	require.True(t, s.last.StateChanged)
	require.False(t, s.step(s.node("n2", func(n *plan.Node) { n.Labels = map[string]string{"rack": "b"} })).StateChanged)
	require.True(t, s.step(s.node("n1", func(n *plan.Node) { n.Labels = map[string]string{"rack": "a"} })).StateChanged)
	require.Equal(t, "a", s.core.State().Node.Labels["rack"])
	address := netip.MustParseAddr("198.18.0.1")
	require.True(t, s.step(s.node("n1", func(n *plan.Node) { n.Addresses = []netip.Addr{address} })).StateChanged)
	require.Equal(t, []netip.Addr{address}, s.core.State().Node.Addresses)
	require.True(t, s.step(s.gone("n1")).StateChanged)
	require.False(t, s.core.State().Known)
	require.Equal(t, "d1", s.core.State().Digest)
}
