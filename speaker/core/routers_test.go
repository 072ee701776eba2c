package core

import (
	"net/netip"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go4.org/netipx"

	"github.com/lodestone-lb/lodestone/pkg/config"
	"github.com/lodestone-lb/lodestone/speaker/plan"
)

const routedVIP = "203.0.113.1"

// routed is a story in which all is announced by BGP.
func routed(t *testing.T) *story {
	s := newStory(t)
	s.config.Peers = []config.Peer{{Name: "tor", Address: netip.MustParseAddr("198.18.0.254"), LocalASN: 64512,
		PeerASN: config.ASN{Number: 64513}, RouterID: netip.MustParseAddr("198.18.0.1")}}
	s.config.Advertisements = []config.Advertisement{{Name: "routed", BGP: &config.BGP{AggregationLength: 32, AggregationLengthV6: 128}}}
	s.nodes = Nodes{"n1": {}}
	s.speakers = map[string]bool{}
	return s
}

func TestRoutersHearOfServices(t *testing.T) {
	s := routed(t)
	s.begin(web(routedVIP, true))
	s.sent("set [tor] [203.0.113.1/32]")
	s.step(Service{web(routedVIP, false)})
	s.sent("update [tor] []")
	require.Equal(t, []netip.Prefix{netip.MustParsePrefix("203.0.113.1/32")}, s.last.Routes.Changed)
	s.step(Service{web(routedVIP, true)})
	s.sent("update [tor] [203.0.113.1/32]")
	s.config.Peers = nil
	s.step(s.configured())
	s.sent("update [] []")
}

func TestRoutersHearWhatIsPermitted(t *testing.T) {
	s := routed(t)
	s.begin(web(routedVIP, true))
	s.sent("set [tor] [203.0.113.1/32]")
	for _, tt := range []struct {
		permit *netipx.IPSet
		sent   string
	}{
		{prefix("203.0.113.8/29"), "update [tor] []"},
		{prefix("203.0.113.0/29"), "update [tor] [203.0.113.1/32]"},
		{nil, "update [tor] [203.0.113.1/32]"}, // the announcer need not look any more
	} {
		s.config.Permit = tt.permit
		s.step(s.configured())
		s.sent(tt.sent)
	}
}

func TestRoutersHearNothingBeforeAllIsReady(t *testing.T) {
	s := routed(t)
	s.health.Healthy = false
	s.begin(web(routedVIP, true))
	s.step(Passwords{})
	s.sent()
	s.step(well)
	s.sent("set [tor] [203.0.113.1/32]")
	s.step(s.health)
	s.sent("update [tor] []")
}

func TestRoutersAreAskedToPreferOthersFirst(t *testing.T) {
	s := routed(t)
	s.begin(web(routedVIP, true))
	s.sent("set [tor] [203.0.113.1/32]")
	s.step(s.excluded("n1", true))
	require.True(t, s.logged("draining: routers are asked to prefer other nodes"))
	s.sent("drain true", "set [tor] [203.0.113.1/32]")
	s.after(drain - 1)
	s.sent()
	s.after(1)
	s.sent("set [tor] []", "drain false")
	s.step(s.excluded("n1", false))
	s.sent("update [tor] [203.0.113.1/32]")
}

// An edit of the configuration excludes a node as a change of the node does.
func TestNodeThatTheConfigurationExcludesDrains(t *testing.T) {
	s := routed(t)
	s.nodes["n1"] = plan.Node{Taints: []string{"example.com/repair"}}
	s.begin(web(routedVIP, true))
	s.sent("set [tor] [203.0.113.1/32]")
	s.config.ExcludeTaints = []string{"example.com/repair"}
	s.step(s.configured())
	s.sent("drain true", "set [tor] [203.0.113.1/32]")
	s.after(drain)
	s.sent("set [tor] []", "drain false")
}

func TestNodeBackWhileItDrains(t *testing.T) {
	s := routed(t)
	s.begin(web(routedVIP, true))
	s.step(s.excluded("n1", true))
	s.sent("set [tor] [203.0.113.1/32]", "drain true", "set [tor] [203.0.113.1/32]")
	s.after(drain / 2)
	s.step(s.excluded("n1", false))
	s.sent("set [tor] [203.0.113.1/32]", "drain false")
	s.after(time.Minute)
	s.sent()
}

func TestNewPasswordsSetTheSessionsAgain(t *testing.T) {
	s := routed(t)
	s.begin(web(routedVIP, true))
	s.sent("set [tor] [203.0.113.1/32]")
	s.step(Passwords{})
	s.sent("update [tor] [203.0.113.1/32]")
}

// Routes that were not set are set as a whole, a second later if nothing happens before, and so is what routers are asked to
// prefer.
func TestRoutesAfterThoseThatFailed(t *testing.T) {
	s := routed(t)
	s.begin(web(routedVIP, true))
	s.sent("set [tor] [203.0.113.1/32]")
	fail := func() {
		s.last = s.core.Step(RoutesFailed{}, s.now)
		require.Equal(t, s.now.Add(RetryAfter), s.last.Next)
	}
	fail()
	s.after(RetryAfter)
	s.sent("set [tor] [203.0.113.1/32]", "drain false")
	s.after(time.Minute)
	s.sent()

	s.step(s.excluded("n1", true))
	s.sent("drain true", "set [tor] [203.0.113.1/32]")
	fail()
	s.step(Service{plan.Service{Name: "default/dns", Serving: true, VIPs: []netip.Addr{netip.MustParseAddr("203.0.113.2")}}})
	s.sent("drain true", "set [tor] [203.0.113.1/32]")
	s.after(drain)
	s.sent("set [tor] []", "drain false")
	fail()
	s.after(RetryAfter)
	s.sent("set [tor] []", "drain false")
	s.after(time.Minute)
	s.sent()
}

func TestEndOfTheSpeakerDrainsAndLeavesRoutes(t *testing.T) {
	s := routed(t)
	s.begin(web(routedVIP, true))
	s.sent("set [tor] [203.0.113.1/32]")
	require.Equal(t, drain, s.stop(0))
	s.sent("drain true", "stop")
}

func TestEndOfASpeakerThatDrains(t *testing.T) {
	s := routed(t)
	s.begin(web(routedVIP, true))
	s.step(s.excluded("n1", true))
	s.sent("set [tor] [203.0.113.1/32]", "drain true", "set [tor] [203.0.113.1/32]")
	s.after(drain / 4)
	require.Equal(t, drain-drain/4+withdrawal, s.stop(0), "routers have the same time")
	s.sent("set [tor] []", "stop")
}
