package plan_test

import (
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/lodestone-lb/lodestone/pkg/config"
	"github.com/lodestone-lb/lodestone/speaker/plan"
)

// hosts is a BGP advertisement of the document without settings.
func hosts() *config.BGP { return &config.BGP{AggregationLength: 32, AggregationLengthV6: 128} }

func router(name string, last byte) config.Peer {
	return config.Peer{Name: name, Address: netip.AddrFrom4([4]byte{198, 18, 0, last}), LocalASN: 64512, PeerASN: config.ASN{Number: 64513}}
}

// newRoutedStory is a newStory in which BGP to two routers announces the pool.
func newRoutedStory(t *testing.T) *story {
	s := newStory(t)
	s.Config.Advertisements = []config.Advertisement{{Name: "tor", BGP: hosts()}}
	s.Config.Peers = []config.Peer{router("tor-a", 1), router("tor-b", 2)}
	for i, n := range []string{"n1", "n2", "n3"} {
		s.node(n, func(n *plan.Node) { n.Addresses = []netip.Addr{netip.AddrFrom4([4]byte{198, 18, 0, byte(11 + i)})} })
	}
	return s
}

func (s *story) bgp(node string) plan.BGP { return plan.Make(node, s.Snapshot).BGP }

// wantHeard checks which peers hear of the VIP from the node, by a route that
// is the whole VIP and nothing else.
func (s *story) wantHeard(vip netip.Addr, node string, peers ...string) {
	s.t.Helper()
	s.wantRoute(netip.PrefixFrom(vip, vip.BitLen()).String(), node, peers...)
	b := s.bgp(node)
	assert.Equal(s.t, peers, b.VIPs[vip], "%s from %s", vip, node)
}

func (s *story) wantRoute(prefix, node string, peers ...string) {
	s.t.Helper()
	var got []string
	for peer := range s.bgp(node).Routes[netip.MustParsePrefix(prefix)] {
		got = append(got, peer)
	}
	assert.ElementsMatch(s.t, peers, got, "%s from %s", prefix, node)
}

func (s *story) wantProblem(node, peer string, reason plan.ProblemReason, message string) {
	s.t.Helper()
	got := s.bgp(node).Problems[peer]
	assert.Equal(s.t, reason, got.Reason)
	assert.Equal(s.t, message, got.Message)
}

func (s *story) wantMessage(node string, vip netip.Addr, want string) {
	s.t.Helper()
	assert.Equal(s.t, want, plan.Make(node, s.Snapshot).Silent[vip].Message)
}

var routedStories = map[string]func(*story){
	"24 with policy Cluster all nodes announce, both families": func(s *story) {
		for _, node := range []string{"n1", "n2", "n3"} {
			s.wantHeard(vip, node, "tor-a", "tor-b")
			s.wantHeard(vip6, node, "tor-a", "tor-b")
			assert.Empty(s.t, plan.Make(node, s.Snapshot).Silent)
		}
		s.wantOwner(vip, "")
	},
	"24 a node that must not announce keeps its sessions": func(s *story) {
		s.Nodes["n4"], s.Speakers["n4"] = s.Nodes["n1"], true
		s.node("n1", func(n *plan.Node) { n.Labelled = true })
		s.node("n2", func(n *plan.Node) { n.NetworkUnavailable = true })
		s.Speakers["n3"] = false
		for node, reason := range map[string]plan.Reason{"n1": plan.NodeExcluded, "n2": plan.NetworkUnavailable, "n3": plan.SpeakerNotReady} {
			s.wantHeard(vip, node)
			s.wantSilent(node, vip, reason)
			assert.Len(s.t, s.bgp(node).Sessions, 2)
		}
		delete(s.Nodes, "n4")
		s.wantHeard(vip, "n2", "tor-a", "tor-b") // there is no other
		delete(s.Nodes, "n1")
		assert.Equal(s.t, plan.NodeUnknown, plan.Make("n1", s.Snapshot).Silent[vip].Reason)
		assert.Empty(s.t, s.bgp("n1").Sessions)
	},
	"25 with policy Local only nodes with an endpoint announce": func(s *story) {
		s.Services[0].Local = true
		s.wantHeard(vip, "n1", "tor-a", "tor-b")
		s.wantHeard(vip, "n3")
		s.wantSilent("n3", vip, plan.NoLocalEndpoint)
		s.Services[0].Backends = backends("n2")
		s.wantHeard(vip, "n1")
		s.service("default/dns", "n3").Local = true // shares the IPv4 address
		s.wantHeard(vip, "n2")
		s.wantHeard(vip6, "n2", "tor-a", "tor-b")
	},
	"25 without a serving endpoint nobody announces": func(s *story) {
		s.Services[0].Serving, s.Services[0].Backends = false, nil
		s.wantHeard(vip, "n1")
		s.wantSilent("n1", vip, plan.NoServingEndpoint)
		s.wantMessage("n1", vip, "no endpoint takes traffic")
	},
	"28 peers by node selector, a local ASN and router ID of each node": func(s *story) {
		s.Config.Peers[0].NodeSelector, s.Config.Peers[0].LocalASN = labelled("n1", "n2"), 0
		s.Config.Peers[1].NodeSelector = labelled("n3")
		s.node("n1", func(n *plan.Node) {
			n.BGP = plan.NodeBGP{ASN: 65001, RouterID: netip.MustParseAddr("192.0.2.1"), Source4: netip.MustParseAddr("198.18.1.11"),
				Source6: netip.MustParseAddr("2001:db8::11")}
		})
		s.node("n2", func(n *plan.Node) { n.BGP = plan.NodeBGP{ASN: 65002} })
		s.wantHeard(vip, "n1", "tor-a")
		s.wantHeard(vip, "n2", "tor-a")
		s.wantHeard(vip, "n3", "tor-b")
		peers := s.Config.Peers
		assert.Equal(s.t, map[string]plan.Session{
			"tor-a": {Peer: &peers[0], LocalASN: 65001, RouterID: netip.MustParseAddr("192.0.2.1"), Source: netip.MustParseAddr("198.18.1.11")},
		}, s.bgp("n1").Sessions)
		assert.Equal(s.t, map[string]plan.Session{"tor-a": {Peer: &peers[0], LocalASN: 65002, RouterID: netip.MustParseAddr("198.18.0.12")}},
			s.bgp("n2").Sessions)

		p := &peers[0]
		p.LocalASN, p.RouterID, p.SourceAddress = 64999, netip.MustParseAddr("192.0.2.99"), netip.MustParseAddr("198.18.0.99")
		assert.Equal(s.t, plan.Session{Peer: p, LocalASN: 64999, RouterID: p.RouterID, Source: p.SourceAddress}, s.bgp("n1").Sessions["tor-a"],
			"the peer's own come first")
		p.Address, p.SourceAddress = netip.MustParseAddr("2001:db8::1"), netip.Addr{}
		assert.Equal(s.t, netip.MustParseAddr("2001:db8::11"), s.bgp("n1").Sessions["tor-a"].Source)
		p.Address = netip.MustParseAddr("fe80::1%eth0")
		assert.False(s.t, s.bgp("n1").Sessions["tor-a"].Source.IsValid())
	},
	"28 what a node lacks costs it that session alone": func(s *story) {
		bad := errors.New("lodestone.io/bgp-asn is wrong")
		s.Config.Peers[0].LocalASN = 0
		s.wantHeard(vip, "n1", "tor-b")
		s.wantProblem("n1", "tor-a", plan.NoLocalASN,
			`peer "tor-a" has no localASN and node n1 no annotation lodestone.io/bgp-asn: set one of them`)
		s.node("n1", func(n *plan.Node) { n.BGP.ASNErr = bad })
		s.wantProblem("n1", "tor-a", plan.AnnotationInvalid, `node n1: annotation lodestone.io/bgp-asn is wrong`)
		s.node("n1", func(n *plan.Node) { n.BGP = plan.NodeBGP{ASN: 1, RouterIDErr: bad} })
		s.Config.Peers[1].RouterID = netip.MustParseAddr("192.0.2.7")
		s.wantProblem("n1", "tor-a", plan.AnnotationInvalid, `node n1: annotation lodestone.io/bgp-asn is wrong`)
		s.wantHeard(vip, "n1", "tor-b")
		s.node("n1", func(n *plan.Node) { n.BGP = plan.NodeBGP{ASN: 1, SourceErr: bad} })
		s.Config.Peers[1].SourceAddress = netip.MustParseAddr("198.18.0.11")
		s.wantProblem("n1", "tor-a", plan.AnnotationInvalid, `node n1: annotation lodestone.io/bgp-asn is wrong`)
		s.wantHeard(vip, "n1", "tor-b")
		s.node("n1", func(n *plan.Node) { n.BGP, n.Addresses = plan.NodeBGP{ASN: 1}, []netip.Addr{vip6} })
		s.wantProblem("n1", "tor-a", plan.NoRouterID,
			`node n1 has no IPv4 address to take its router ID from: set its annotation lodestone.io/bgp-router-id, or routerID of peer "tor-a"`)

		s.Config.Peers = s.Config.Peers[:1]
		s.wantSilent("n1", vip, plan.NoSession)
		s.wantMessage("n1", vip, `this node has no session with the BGP peers of the advertisements: node n1 has no IPv4 address to take its router ID from: set its annotation lodestone.io/bgp-router-id, or routerID of peer "tor-a"`)
	},
	"28 two peers at one address: the first has the session": func(s *story) {
		s.Config.Peers[0].NodeSelector = labelled("n1", "n2")
		s.Config.Peers[1].NodeSelector, s.Config.Peers[1].Address = labelled("n2", "n3"), s.Config.Peers[0].Address
		s.wantHeard(vip, "n2", "tor-a")
		s.wantProblem("n2", "tor-b", plan.AddressTaken,
			`peer "tor-a" is at 198.18.0.1, too, and selects node n2 as well: separate them by nodeSelector`)
		s.wantHeard(vip, "n3", "tor-b")
	},
	"30 two nodes with one router ID have their sessions, and a problem each": func(s *story) {
		s.Config.Peers[0].RouterID, s.Config.Peers[0].NodeSelector = netip.MustParseAddr("192.0.2.1"), labelled("n1", "n2")
		const shared = " has the router ID 192.0.2.1, too, so that routers may take the two for one: " +
			"give each its own by annotation lodestone.io/bgp-router-id, and remove routerID from peers of several nodes"
		s.wantProblem("n1", "tor-a", plan.RouterIDShared, "node n2"+shared)
		s.wantProblem("n2", "tor-a", plan.RouterIDShared, "node n1"+shared)
		s.wantHeard(vip, "n1", "tor-a", "tor-b")
		assert.Empty(s.t, s.bgp("n3").Problems)
		s.Config.Peers[0].NodeSelector = labelled("n1")
		assert.Empty(s.t, s.bgp("n1").Problems)
	},
	"32 attributes are those of the advertisement": func(s *story) {
		b := s.Config.Advertisements[0].BGP
		b.Communities, b.LargeCommunities = []config.Community{0xffffff01}, []config.LargeCommunity{{GlobalAdmin: 64512, Data1: 1, Data2: 2}}
		b.LocalPreference, b.MED, b.Prepend = ptr(0), ptr(10), 3
		want := plan.Attributes{Communities: b.Communities, LargeCommunities: b.LargeCommunities, LocalPreference: ptr(0),
			MED: ptr(10), Prepend: 3}
		assert.Equal(s.t, plan.Route{"tor-a": want, "tor-b": want}, s.bgp("n1").Routes[netip.MustParsePrefix("203.0.113.1/32")])
	},
	"32 an aggregate stands for VIPs that are all served": func(s *story) {
		s.Config.Advertisements[0].BGP.AggregationLength, s.Config.Advertisements[0].BGP.AggregationLengthV6 = 28, 64
		mail := s.service("default/mail", "n1")
		mail.VIPs, mail.Local = []netip.Addr{netip.MustParseAddr("203.0.113.2")}, true
		s.wantRoute("203.0.113.0/28", "n1", "tor-a", "tor-b")
		s.wantRoute("2001:db8::/64", "n1", "tor-a", "tor-b")
		assert.Len(s.t, s.bgp("n1").Routes, 2)
		s.wantHeard(vip, "n2", "tor-a", "tor-b")
		s.wantRoute("203.0.113.2/32", "n2")
		s.wantRoute("2001:db8::/64", "n2", "tor-a", "tor-b")
		s.wantSilent("n2", mail.VIPs[0], plan.NoLocalEndpoint)
		s.Config.Advertisements[0].BGP.AggregatePartly = true
		s.wantRoute("203.0.113.0/28", "n2", "tor-a", "tor-b")
		assert.Len(s.t, s.bgp("n2").Routes, 2)
		s.wantSilent("n2", mail.VIPs[0], plan.NoLocalEndpoint)
		s.Services[0].Serving = false
		s.wantRoute("203.0.113.0/28", "n2")
		s.wantRoute("203.0.113.0/28", "n1", "tor-a", "tor-b")
	},
	"32 no aggregate has addresses that are not the pool's": func(s *story) {
		s.Config.Advertisements[0].BGP.AggregationLength = 24
		office := pool("office", nil)
		office.DHCP = &config.DHCP{Interface: "eth1"}
		s.Config.Pools = []config.Pool{pool("half", nil, "203.0.113.0/25"), office}
		leased := netip.MustParseAddr("198.51.100.7")
		s.Services[0].VIPs, s.Services[0].Leases = append(s.Services[0].VIPs, leased), map[netip.Addr]string{leased: "eth1"}
		s.wantHeard(vip, "n1", "tor-a", "tor-b")
		s.wantHeard(vip6, "n1", "tor-a", "tor-b") // its pool is gone
		s.wantHeard(leased, "n1", "tor-a", "tor-b")
		s.Config.Pools[0] = pool("whole", nil, "203.0.113.0/24")
		s.wantRoute("203.0.113.0/24", "n1", "tor-a", "tor-b")
	},
	"33 overlapping advertisements: communities unite, the more preferred value counts": func(s *story) {
		a, b := s.Config.Advertisements[0].BGP, hosts()
		a.Communities, a.LargeCommunities, a.LocalPreference, a.MED, a.Prepend = []config.Community{1, 3},
			[]config.LargeCommunity{{GlobalAdmin: 2}}, ptr(100), ptr(7), 4
		b.Communities, b.LargeCommunities, b.LocalPreference, b.MED, b.Prepend = []config.Community{2, 3},
			[]config.LargeCommunity{{GlobalAdmin: 1}}, ptr(200), ptr(9), 2
		b.Peers = []string{"tor-b"}
		s.Config.Advertisements = append(s.Config.Advertisements, config.Advertisement{Name: "more", ServiceSelector: labelled("web"), BGP: b})
		first := plan.Attributes{Communities: a.Communities, LargeCommunities: a.LargeCommunities, LocalPreference: ptr(100),
			MED: ptr(7), Prepend: 4}
		prefix := netip.MustParsePrefix("203.0.113.1/32")
		assert.Equal(s.t, plan.Route{"tor-a": first, "tor-b": first}, s.bgp("n1").Routes[prefix])
		s.Services[0].Labels = map[string]string{"on": "web"}
		assert.Equal(s.t, plan.Route{"tor-a": first, "tor-b": {
			Communities: []config.Community{1, 2, 3}, LargeCommunities: []config.LargeCommunity{{GlobalAdmin: 1}, {GlobalAdmin: 2}},
			LocalPreference: ptr(200), MED: ptr(7), Prepend: 2,
		}}, s.bgp("n1").Routes[prefix])
		slices.Reverse(s.Config.Advertisements)
		assert.Equal(s.t, ptr(200), s.bgp("n1").Routes[prefix]["tor-b"].LocalPreference, "in whatever order")
	},
	"33 one aggregates, the other does not: both routes": func(s *story) {
		b := hosts()
		b.AggregationLength, b.Peers = 24, []string{"tor-b"}
		s.Config.Advertisements = append(s.Config.Advertisements, config.Advertisement{Name: "aggregate", BGP: b})
		s.wantRoute("203.0.113.0/24", "n1", "tor-b")
		s.wantHeard(vip, "n1", "tor-a", "tor-b")
	},
	"35 an advertisement to some peers only, two to one peer each": func(s *story) {
		s.Config.Advertisements[0].BGP.Peers = []string{"tor-b"}
		s.wantHeard(vip, "n1", "tor-b")
		assert.Len(s.t, s.bgp("n1").Sessions, 2, "a peer that hears of nothing is no mistake")
		s.Config.Pools = []config.Pool{pool("v4", []string{"a"}, "203.0.113.0/24"), pool("v6", []string{"b"}, "2001:db8::/64")}
		s.Config.Advertisements = []config.Advertisement{{Name: "a", BGP: hosts()}, {Name: "b", BGP: hosts()}}
		s.Config.Advertisements[0].BGP.Peers, s.Config.Advertisements[1].BGP.Peers = []string{"tor-a"}, []string{"tor-b"}
		s.wantHeard(vip, "n1", "tor-a")
		s.wantHeard(vip6, "n1", "tor-b")
	},
	"35 why nobody hears of a VIP": func(s *story) {
		a := &s.Config.Advertisements[0]
		a.ServiceSelector = labelled("web")
		s.wantSilent("n1", vip, plan.ServiceNotSelected)
		a.ServiceSelector, a.BGP.NodeSelector = nil, labelled("n2")
		s.wantHeard(vip, "n2", "tor-a", "tor-b")
		s.wantSilent("n1", vip, plan.NodeNotSelected)
		a.BGP.NodeSelector, a.BGP.Peers, s.Config.Peers[0].NodeSelector = nil, []string{"tor-a"}, labelled("n2")
		s.wantHeard(vip, "n2", "tor-a")
		s.wantSilent("n1", vip, plan.NoPeer)
		s.wantMessage("n1", vip, "no BGP peer of the advertisements selects this node")
		s.Config.Pools[0].Advertise = []string{"none"}
		s.wantSilent("n2", vip, plan.NoAdvertisement)
		s.wantMessage("n2", vip, `no advertisement applies to pool "lan"`)
	},
	"38 layer 2 and BGP for one Service: one owner, and all nodes announce by BGP": func(s *story) {
		s.Config.Advertisements[0].Layer2 = &config.Layer2{NodeSelector: labelled("n1")}
		s.wantOwner(vip, "n1")
		for _, node := range []string{"n1", "n2", "n3"} {
			s.wantHeard(vip, node, "tor-a", "tor-b")
			assert.Empty(s.t, plan.Make(node, s.Snapshot).Silent)
		}
		s.Config.Advertisements[0].BGP.NodeSelector = labelled("n3")
		s.wantOwner(vip, "n1")
		s.wantHeard(vip, "n1")
		s.wantHeard(vip, "n3", "tor-a", "tor-b")
		s.wantSilent("n2", vip, plan.NodeNotSelected)
		s.Config.Advertisements[0].Layer2.NodeSelector = labelled("n1", "n2")
		silent := map[string]string{"n1": "n2", "n2": "n1"}[s.owner(vip)]
		s.wantMessage(silent, vip, fmt.Sprintf("node %s owns it; by BGP: the advertisements select other nodes", s.owner(vip)))
	},
	"38 a Service that only one of the two is for": func(s *story) {
		s.Config.Advertisements = append(s.Config.Advertisements,
			config.Advertisement{Name: "l2", ServiceSelector: labelled("web"), Layer2: &config.Layer2{}})
		s.wantHeard(vip, "n1", "tor-a", "tor-b")
		s.wantOwner(vip, "")
		s.Config.Advertisements[0].ServiceSelector = labelled("web")
		s.wantSilent("n1", vip, plan.ServiceNotSelected)
		s.Config.Advertisements[1].ServiceSelector = nil
		s.wantOwner(vip, "n1", "n2", "n3")
		for node := range s.Nodes {
			if node != s.owner(vip) {
				s.wantSilent(node, vip, plan.NotOwner)
			}
		}
	},
	"connections are limited on every node that announces": func(s *story) {
		s.Services[0].Limit = plan.Limit{PerSecond: 100, Ports: []plan.Port{{Protocol: 6, Number: 80}}}
		s.Services[0].Local = true
		for node, n := range map[string]int{"n1": 2, "n2": 2, "n3": 0} {
			assert.Len(s.t, plan.Make(node, s.Snapshot).Limits, n)
		}
	},
}

func TestRoutedStories(t *testing.T) {
	t.Parallel()
	for name, run := range routedStories {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			run(newRoutedStory(t))
		})
	}
}

// 36 A relabelled node gains and loses sessions; those of others stay, and so
// do its own routes to other peers.
func TestARelabelledNodeChangesItsSessionsAlone(t *testing.T) {
	t.Parallel()
	s := newRoutedStory(t)
	s.Config.Peers[0].NodeSelector = labelled("n1", "n2")
	planners := map[string]*plan.Planner{"n1": plan.NewPlanner("n1"), "n2": plan.NewPlanner("n2")}
	step := func() map[string]plan.Changes {
		changes := map[string]plan.Changes{}
		for name, p := range planners {
			p.Set(s.Config, maps.Clone(s.Nodes), s.Speakers)
			changes[name] = p.Update()
		}
		return changes
	}
	for name, p := range planners {
		p.Put(s.Services[0])
		require.False(t, p.Plan().BGP.Sessions == nil, name)
	}
	step()
	require.Equal(t, []string{"tor-a", "tor-b"}, slices.Sorted(maps.Keys(planners["n1"].Plan().BGP.Sessions)))

	s.node("n1", func(n *plan.Node) { n.Labels = map[string]string{"on": "elsewhere"} })
	changes := step()
	require.Equal(t, plan.Changes{VIPs: []plan.Change{}}, changes["n2"], "nothing about the other node")
	require.True(t, changes["n1"].Sessions)
	require.Len(t, changes["n1"].Prefixes, 2, "without tor-a")
	require.Equal(t, []string{"tor-b"}, slices.Sorted(maps.Keys(planners["n1"].Plan().BGP.Sessions)))
	require.Equal(t, []string{"tor-b"}, planners["n1"].Plan().BGP.VIPs[vip])

	s.node("n1", func(n *plan.Node) { n.Labels = map[string]string{"on": "n1"} })
	require.True(t, step()["n1"].Sessions)
	require.Equal(t, []string{"tor-a", "tor-b"}, planners["n1"].Plan().BGP.VIPs[vip])
	require.False(t, step()["n1"].Sessions, "nothing new")

	s.Config.Peers[0].NodeSelector, s.Config.Advertisements[0].BGP.NodeSelector = nil, labelled("n1")
	step()
	s.node("n1", func(n *plan.Node) { n.Labels = map[string]string{"on": "elsewhere"} })
	require.Equal(t, []bool{false, true}, []bool{step()["n1"].Sessions, len(planners["n1"].Plan().BGP.Routes) == 0},
		"sessions stay without routes")
}

// A node whose kube-proxy is sick announces what no healthy one announces: routers spread
// traffic over all that do.
func TestRoutesOfSickNodes(t *testing.T) {
	t.Parallel()
	s := newRoutedStory(t)
	sick := func(n *plan.Node) { n.Sick = true }
	s.node("n1", sick)
	assert.NotContains(t, s.bgp("n1").VIPs, vip)
	s.wantHeard(vip, "n2", "tor-a", "tor-b")
	for _, n := range []string{"n2", "n3"} {
		s.node(n, sick)
	}
	for n := range s.Nodes {
		s.wantHeard(vip, n, "tor-a", "tor-b")
	}
	s.node("n2", func(n *plan.Node) { n.Sick = false })
	for i := range s.Services {
		s.Services[i].Local = true
	}
	assert.NotContains(t, s.bgp("n1").VIPs, vip)
	s.Services[0].Backends = backends("n1")
	s.wantHeard(vip, "n1", "tor-a", "tor-b")
}

// Routers find out themselves whether they reach a node. So a node that is apart keeps its routes.
func TestRoutesOfANodeThatIsApart(t *testing.T) {
	t.Parallel()
	s := newRoutedStory(t)
	s.node("n1", func(n *plan.Node) { n.Apart = "eth0" })
	s.Speakers = map[string]bool{"n1": true}
	s.wantHeard(vip, "n1", "tor-a", "tor-b")
}
