package plan_test

import (
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"go4.org/netipx"

	"github.com/lodestone-lb/lodestone/pkg/config"
	"github.com/lodestone-lb/lodestone/pkg/report"
	"github.com/lodestone-lb/lodestone/speaker/plan"
)

var (
	vip  = netip.MustParseAddr("203.0.113.1")
	vip6 = netip.MustParseAddr("2001:db8::1")
)

// labelled selects the nodes whose label "on" is one of the values.
func labelled(values ...string) config.Selector {
	return config.Selector{{Key: "on", Operator: config.In, Values: values}}
}

func pool(name string, advertise []string, prefixes ...string) config.Pool {
	var b netipx.IPSetBuilder
	for _, p := range prefixes {
		b.AddPrefix(netip.MustParsePrefix(p))
	}
	free, _ := b.IPSet()
	return config.Pool{Name: name, Free: free, Withheld: &netipx.IPSet{}, Advertise: advertise}
}

// story is one cluster and what becomes of its VIPs.
type story struct {
	plan.Snapshot
	t *testing.T
}

// newStory starts with nodes n1, n2, n3, all well, one pool announced from
// everywhere, and Service "web" with a VIP of each family and endpoints on n1
// and n2.
func newStory(t *testing.T) *story {
	s := &story{t: t, Snapshot: plan.Snapshot{
		Config: &config.Config{
			Pools:          []config.Pool{pool("lan", nil, "203.0.113.0/24", "2001:db8::/64")},
			Advertisements: []config.Advertisement{{Name: "all", Layer2: &config.Layer2{}}},
		},
		Nodes:    map[string]plan.Node{},
		Speakers: map[string]bool{},
	}}
	for _, n := range []string{"n1", "n2", "n3"} {
		s.Nodes[n] = plan.Node{Labels: map[string]string{"on": n}}
		s.Speakers[n] = true
	}
	s.service("default/web", "n1", "n2").VIPs = []netip.Addr{vip, vip6}
	return s
}

func (s *story) service(name string, endpoints ...string) *plan.Service {
	svc := plan.Service{Name: name, VIPs: []netip.Addr{vip}, Serving: len(endpoints) > 0,
		Backends: backends(endpoints...)}
	s.Services = append(s.Services, svc)
	return &s.Services[len(s.Services)-1]
}

// backends has an endpoint that takes traffic on each of the nodes.
func backends(nodes ...string) (all []plan.Backend) {
	for _, n := range slices.Compact(slices.Sorted(slices.Values(nodes))) {
		all = append(all, plan.Backend{Node: n, Open: 1})
	}
	return all
}

// prefer has the first advertisement prefer nodes.
func (s *story) prefer(weight int, nodes ...string) {
	l := s.Config.Advertisements[0].Layer2
	l.PreferredNodes = append(l.PreferredNodes, config.Preference{Weight: weight, NodeSelector: labelled(nodes...)})
}

// on puts the node on the segments, and only those.
func (s *story) on(name string, all ...report.Segment) {
	s.node(name, func(n *plan.Node) { n.Segments = append([]report.Segment{}, all...) })
}

func segment(subnet, name string) report.Segment {
	return report.Segment{Subnet: netip.MustParsePrefix(subnet), Interface: name}
}

func (s *story) node(name string, change func(*plan.Node)) {
	n := s.Nodes[name]
	change(&n)
	s.Nodes[name] = n
}

// owner returns who announces the VIP, after checking that all plans agree.
func (s *story) owner(vip netip.Addr) string {
	s.t.Helper()
	owner, known := plan.Owners(s.Snapshot)[vip]
	if !known {
		s.t.Fatalf("VIP %s is not in the plan", vip)
	}
	for n := range s.Nodes {
		p := plan.Make(n, s.Snapshot)
		if _, announced := p.Layer2[vip]; announced != (n == owner) {
			s.t.Fatalf("node %s announces %s: %v; the owner is %q", n, vip, announced, owner)
		}
	}
	return owner
}

func (s *story) wantOwner(vip netip.Addr, among ...string) {
	s.t.Helper()
	if owner := s.owner(vip); !slices.Contains(among, owner) {
		s.t.Errorf("owner of %s is %q, want one of %q", vip, owner, among)
	}
}

func (s *story) wantSilent(node string, vip netip.Addr, reason plan.Reason) {
	s.t.Helper()
	s.owner(vip)
	if got := plan.Make(node, s.Snapshot).Silent[vip]; got.Reason != reason || got.Message == "" {
		s.t.Errorf("node %s about %s: %+v, want reason %s", node, vip, got, reason)
	}
}

func (s *story) wantInterfaces(node string, want ...string) {
	s.t.Helper()
	got, ok := plan.Make(node, s.Snapshot).Layer2[vip]
	if !ok || !slices.Equal(got.Interfaces, want) {
		s.t.Errorf("node %s announces %v on %q, want %q", node, ok, got.Interfaces, want)
	}
}

var stories = map[string]func(*story){
	"1 a Cluster-policy Service has exactly one owner per family": func(s *story) {
		s.wantOwner(vip, "n1", "n2", "n3")
		s.wantOwner(vip6, "n1", "n2", "n3")
	},
	"2 with policy Local only a node with an endpoint answers": func(s *story) {
		s.Services[0].Local = true
		s.wantOwner(vip, "n1", "n2")
		s.wantSilent("n3", vip, plan.NoLocalEndpoint)
		s.Services[0].Backends = backends("n2")
		s.wantOwner(vip, "n2")
	},
	"a leased VIP is announced by the advertisements of its pool, on the interface of the pool": func(s *story) {
		leased := netip.MustParseAddr("198.51.100.7")
		s.Services[0].VIPs = append(s.Services[0].VIPs, leased)
		office, edge := pool("office", []string{"office"}), pool("edge", []string{"edge"})
		office.DHCP, edge.DHCP = &config.DHCP{Interface: "eth1"}, &config.DHCP{Interface: "eth2"}
		s.Config.Pools = append(s.Config.Pools, office, edge)
		for name, node := range map[string]string{"office": "n1", "edge": "n2"} {
			s.Config.Advertisements = append(s.Config.Advertisements, config.Advertisement{
				Name: name, Layer2: &config.Layer2{NodeSelector: config.Selector{{Key: "on", Operator: config.In, Values: []string{node}}}}})
		}
		s.Services[0].Leases = map[netip.Addr]string{leased: "eth1", vip: "eth1"}
		s.wantOwner(leased, "n1")
		s.Services[0].Leases[leased] = "eth2"
		s.wantOwner(leased, "n2")
		s.Services[0].Leases[leased] = "eth3" // such a VIP is in no pool
		s.wantOwner(leased, "n1", "n2", "n3")
		s.Config.Pools[0].Advertise = []string{"edge"}
		s.wantOwner(vip, "n2") // the interface on an address that a pool contains is ignored
	},
	"2 endpoints that are on no node are nobody's Local": func(s *story) {
		s.Services[0].Local, s.Services[0].Backends = true, nil
		s.wantOwner(vip, "")
		s.wantSilent("n1", vip, plan.NoLocalEndpoint)
	},
	"each family goes by its own endpoints": func(s *story) {
		s.Services[0].Local = true
		s.Services[0].IPv6 = &plan.Endpoints{Serving: true, Backends: backends("n3")}
		s.wantOwner(vip, "n1", "n2")
		s.wantOwner(vip6, "n3")
		s.wantSilent("n1", vip6, plan.NoLocalEndpoint)
		s.Services[0].Local, s.Services[0].IPv6 = false, &plan.Endpoints{}
		s.wantOwner(vip, "n1", "n2", "n3")
		s.wantOwner(vip6, "")
		s.wantSilent("n1", vip6, plan.NoServingEndpoint)
	},
	"a Service without a serving endpoint is withdrawn": func(s *story) {
		s.Services[0].Serving, s.Services[0].Backends = false, nil
		s.wantOwner(vip, "")
		s.wantSilent("n1", vip, plan.NoServingEndpoint)
	},
	"4 a node without network is used only if there is no other": func(s *story) {
		owner := s.owner(vip)
		s.node(owner, func(n *plan.Node) { n.NetworkUnavailable = true })
		s.wantSilent(owner, vip, plan.NetworkUnavailable)
		for _, n := range []string{"n1", "n2", "n3"} {
			s.node(n, func(n *plan.Node) { n.NetworkUnavailable = true })
		}
		s.wantOwner(vip, owner)
	},
	"5 the exclude label moves the VIP, removing it brings it back": func(s *story) {
		owner := s.owner(vip)
		s.node(owner, func(n *plan.Node) { n.Labelled = true })
		s.wantSilent(owner, vip, plan.NodeExcluded)
		s.node(owner, func(n *plan.Node) { n.Labelled = false })
		s.wantOwner(vip, owner)
	},
	"6 a shared address has one owner, which all its Services accept": func(s *story) {
		s.service("default/dns", "n2", "n3").Local = true
		s.wantOwner(vip, "n2", "n3")
		s.service("default/syslog", "n3").Local = true
		s.wantOwner(vip, "n3")
		s.wantSilent("n2", vip, plan.NoLocalEndpoint)
	},
	"6 a Service without endpoints does not silence those that share its address": func(s *story) {
		s.service("default/empty").Local = true
		s.wantOwner(vip, "n1", "n2", "n3")
	},
	"7 node selectors: one, several, relabelled live": func(s *story) {
		s.Config.Advertisements[0].Layer2.NodeSelector = labelled("n3")
		s.wantOwner(vip, "n3")
		s.wantSilent("n1", vip, plan.NodeNotSelected)
		s.Config.Advertisements[0].Layer2.NodeSelector = labelled("n1", "n2")
		s.wantOwner(vip, "n1", "n2")
		s.node("n2", func(n *plan.Node) { n.Labels = nil })
		s.wantOwner(vip, "n1")
		s.node("n1", func(n *plan.Node) { n.Labels = nil })
		s.wantOwner(vip, "")
		s.wantSilent("n1", vip, plan.NodeNotSelected)
	},
	"8 interfaces are the union of the advertisements that select the node": func(s *story) {
		s.Config.Advertisements = []config.Advertisement{
			{Name: "a", Layer2: &config.Layer2{NodeSelector: labelled("n1"), Interfaces: []string{"eth*", "bond0"}}},
			{Name: "b", Layer2: &config.Layer2{NodeSelector: labelled("n1"), Interfaces: []string{"vlan7", "eth*"}}},
			{Name: "c", Layer2: &config.Layer2{NodeSelector: labelled("n2")}},
		}
		s.Speakers["n2"] = false
		s.wantInterfaces("n1", "bond0", "eth*", "vlan7")
		s.Config.Advertisements[2].Layer2.NodeSelector = labelled("n1")
		s.wantInterfaces("n1")
	},
	"8 of refresh intervals the shortest counts of those that select the node": func(s *story) {
		s.Config.Advertisements = []config.Advertisement{
			{Name: "a", Layer2: &config.Layer2{NodeSelector: labelled("n1"), Interfaces: []string{"eth0"}, Refresh: time.Hour}},
			{Name: "b", Layer2: &config.Layer2{NodeSelector: labelled("n1")}},
			{Name: "c", Layer2: &config.Layer2{NodeSelector: labelled("n1"), Refresh: time.Minute}},
			{Name: "d", Layer2: &config.Layer2{NodeSelector: labelled("n2"), Refresh: time.Second}},
		}
		s.Speakers["n2"] = false
		s.wantInterfaces("n1")
		if got := plan.Make("n1", s.Snapshot).Layer2[vip].Refresh; got != time.Minute {
			s.t.Errorf("refreshed each %s", got)
		}
	},
	"while Services move here from another load balancer, who has a VIP is looked for often": func(s *story) {
		hurry := func() bool { return plan.Make(s.owner(vip), s.Snapshot).Layer2[vip].Hurry }
		if hurry() {
			s.t.Error("nothing moves here")
		}
		s.Config.Compatibility = []config.Compatibility{config.MetalLB}
		if !hurry() {
			s.t.Error("VIPs of MetalLB are in no hurry")
		}
	},
	"9 a pool names its advertisements; two matching give one owner": func(s *story) {
		s.Config.Pools[0].Advertise = []string{"a", "b"}
		s.Config.Advertisements = []config.Advertisement{
			{Name: "a", Layer2: &config.Layer2{NodeSelector: labelled("n1", "n2")}},
			{Name: "b", Layer2: &config.Layer2{NodeSelector: labelled("n2")}},
			{Name: "c", Layer2: &config.Layer2{NodeSelector: labelled("n3")}},
		}
		s.wantOwner(vip, "n1", "n2")
		s.wantSilent("n3", vip, plan.NodeNotSelected)
	},
	"9 no advertisement by layer 2: the reason is visible": func(s *story) {
		s.Config.Advertisements[0].Layer2 = nil
		s.wantOwner(vip, "")
		s.wantSilent("n1", vip, plan.NoAdvertisement)
	},
	"no advertisements: others announce, and nobody lacks an owner": func(s *story) {
		s.Config.Advertisements = nil
		s.wantOwner(vip, "")
		s.wantSilent("n1", vip, plan.AnnouncedByOthers)
		if silence := plan.Make("n1", s.Snapshot).Silent[vip]; silence.Unowned {
			s.t.Errorf("%v counts as a VIP without an owner", silence)
		}
	},
	"14 a VIP whose pool is gone stays announced, by all advertisements": func(s *story) {
		s.Config.Pools = []config.Pool{pool("other", []string{"none"}, "198.51.100.0/24")}
		s.wantOwner(vip, "n1", "n2", "n3")
	},
	"no configuration: nothing is announced, and the message has the reason": func(s *story) {
		s.Config = nil
		s.wantOwner(vip, "")
		s.wantSilent("n1", vip, plan.NoAdvertisement)
		if m := plan.Make("n1", s.Snapshot).Silent[vip].Message; !strings.Contains(m, "configuration") {
			s.t.Errorf("the message is %q", m)
		}
	},
	"61 a dead speaker's VIPs move and nobody else's, and come back": func(s *story) {
		for i := range 30 {
			s.service(fmt.Sprint("default/", i), "n1").VIPs = []netip.Addr{netip.AddrFrom4([4]byte{203, 0, 113, byte(10 + i)})}
		}
		before := plan.Owners(s.Snapshot)
		delete(s.Speakers, "n1")
		for vip, owner := range plan.Owners(s.Snapshot) {
			if owner == "n1" || before[vip] != "n1" && owner != before[vip] {
				s.t.Errorf("%s went from %s to %s when n1 died", vip, before[vip], owner)
			}
		}
		s.wantSilent("n1", vip, plan.SpeakerNotReady)
		s.Speakers["n1"] = true
		if !maps.Equal(before, plan.Owners(s.Snapshot)) {
			s.t.Error("n1 came back, its VIPs did not")
		}
	},
	"9 service selectors: relabelled live, none matching has a reason, two matching give one owner": func(s *story) {
		s.Config.Advertisements = []config.Advertisement{
			{Name: "web", ServiceSelector: labelled("web"), Layer2: &config.Layer2{NodeSelector: labelled("n1")}},
			{Name: "dns", ServiceSelector: labelled("dns", "both"), Layer2: &config.Layer2{NodeSelector: labelled("n2")}},
			{Name: "also dns", ServiceSelector: labelled("both"), Layer2: &config.Layer2{NodeSelector: labelled("n2", "n3")}},
		}
		for _, step := range []struct {
			label  string
			owners []string
			reason plan.Reason // of a node that is not an owner
			silent string
		}{
			{"web", []string{"n1"}, plan.NodeNotSelected, "n2"},
			{"mail", []string{""}, plan.ServiceNotSelected, "n1"},
			{"dns", []string{"n2"}, plan.NodeNotSelected, "n3"},
			{"both", []string{"n2", "n3"}, plan.NodeNotSelected, "n1"},
		} {
			s.Services[0].Labels = map[string]string{"on": step.label}
			s.wantOwner(vip, step.owners...)
			s.wantSilent(step.silent, vip, step.reason)
		}
		s.Services[0].VIPs = []netip.Addr{netip.MustParseAddr("192.0.2.1")} // outside all pools
		s.Services[0].Labels["on"] = "mail"
		s.wantSilent("n1", s.Services[0].VIPs[0], plan.ServiceNotSelected)
	},
	"9 a Service that no advertisement selects does not silence those that share its address": func(s *story) {
		s.Config.Advertisements[0].ServiceSelector = labelled("web")
		s.service("default/other", "n1").Labels = map[string]string{"on": "other"}
		s.wantOwner(vip, "")
		s.wantSilent("n1", vip, plan.ServiceNotSelected)
		s.Services[0].Labels = map[string]string{"on": "web"}
		s.wantOwner(vip, "n1", "n2", "n3")
	},
	"10 preferred nodes are chosen, fallen back from, reclaimed": func(s *story) {
		s.prefer(50, "n1")
		s.prefer(10, "n1", "n2")
		s.wantOwner(vip, "n1")
		s.wantOwner(vip6, "n1")
		s.wantSilent("n2", vip, plan.LessPreferred)
		if got, want := plan.Make("n2", s.Snapshot).Silent[vip].Message, "node n1 owns it: it is preferred by 60, this node by 10"; got != want {
			s.t.Errorf("message on n2: %q, want %q", got, want)
		}
		s.Speakers["n1"] = false
		s.wantOwner(vip, "n2")
		s.wantSilent("n1", vip, plan.SpeakerNotReady)
		s.wantSilent("n3", vip, plan.LessPreferred)
		s.node("n2", func(n *plan.Node) { n.Labelled = true })
		s.wantOwner(vip, "n3")
		s.Speakers["n1"] = true
		s.wantOwner(vip, "n1")
	},
	"10 hard selectors stay hard": func(s *story) {
		s.prefer(100, "n1", "n2")
		s.Config.Advertisements[0].Layer2.NodeSelector = labelled("n2", "n3")
		s.wantOwner(vip, "n2")
		s.wantSilent("n1", vip, plan.NodeNotSelected)
		s.Services[0].Local, s.Services[0].Backends = true, backends("n3")
		s.wantOwner(vip, "n3")
		s.wantSilent("n2", vip, plan.NoLocalEndpoint)
	},
	"10 an advertisement prefers among the nodes that it selects itself": func(s *story) {
		s.prefer(100, "n1", "n2")
		s.Config.Advertisements[0].Layer2.NodeSelector = labelled("n2")
		s.Config.Advertisements = append(s.Config.Advertisements,
			config.Advertisement{Name: "b", Layer2: &config.Layer2{NodeSelector: labelled("n1")}})
		s.wantOwner(vip, "n2")
		s.wantSilent("n1", vip, plan.LessPreferred)
	},
	"10 bounded load spreads VIPs over equals and does not overrule preference": func(s *story) {
		s.prefer(1, "n1", "n2")
		for i := range 32 {
			s.service(fmt.Sprint("default/", i), "n3").VIPs = []netip.Addr{netip.AddrFrom4([4]byte{203, 0, 113, byte(64 + i)})}
		}
		owned := map[string]int{}
		for _, owner := range plan.Owners(s.Snapshot) {
			owned[owner]++
		}
		if owned["n1"]+owned["n2"] != 34 || min(owned["n1"], owned["n2"]) < 12 {
			s.t.Errorf("VIPs by owner: %v", owned)
		}
	},
	"only nodes on the VIP's segment are candidates, whoever of them is alive": func(s *story) {
		s.on("n1", segment("203.0.113.0/24", "eth0"), segment("2001:db8::/64", "eth1"))
		s.on("n2", segment("198.18.0.0/24", "eth0"), segment("2001:db8::/64", "eth1"))
		s.on("n3", segment("203.0.113.0/25", "eth0"))
		s.wantOwner(vip, "n1", "n3")
		s.wantSilent("n2", vip, plan.NotOnSegment)
		s.wantOwner(vip6, "n1", "n2")
		s.wantSilent("n3", vip6, plan.NotOnSegment)
		clear(s.Speakers)
		s.Speakers["n2"] = true
		s.wantOwner(vip, "")
		s.wantSilent("n2", vip, plan.NotOnSegment)
		if got, want := plan.Make("n2", s.Snapshot).Silent[vip].Message,
			"the advertisements announce on no interface of this node that is on 203.0.113.0/25; nobody owns it"; got != want {
			s.t.Errorf("message on n2: %q, want %q", got, want)
		}
	},
	"no node is on the segment: all are candidates": func(s *story) {
		s.on("n1", segment("198.18.0.0/24", "eth0"))
		s.on("n2")
		before := plan.Owners(s.Snapshot)
		s.on("n1")
		s.on("n3", segment("198.18.0.0/24", "eth0"))
		if after := plan.Owners(s.Snapshot); !maps.Equal(before, after) || after[vip] == "" {
			s.t.Errorf("owners were %v, are %v", before, after)
		}
	},
	"a node whose segments are not known is a candidate, and moves nobody else's VIPs": func(s *story) {
		s.on("n1")
		s.on("n2", segment("198.18.0.0/24", "eth0"))
		s.wantOwner(vip, "n1", "n2", "n3")
		s.on("n2", segment("203.0.113.0/24", "eth0"))
		s.wantOwner(vip, "n2", "n3")
		s.Speakers["n2"] = false
		s.wantOwner(vip, "n3")
	},
	"an advertisement may announce on any segment": func(s *story) {
		s.on("n1", segment("203.0.113.0/24", "eth0"))
		s.on("n2")
		s.on("n3", segment("198.18.0.0/24", "eth0"))
		s.wantOwner(vip, "n1")
		s.Config.Advertisements = append(s.Config.Advertisements, config.Advertisement{
			Name: "routed", Layer2: &config.Layer2{NodeSelector: labelled("n2"), AnySegment: true},
		})
		s.wantOwner(vip, "n1", "n2")
		s.wantSilent("n3", vip, plan.NotOnSegment)
		if s.Speakers["n2"] = false; plan.Make("n1", s.Snapshot).Layer2[vip].AnySegment {
			s.t.Error("on any segment, by an advertisement that is not for the node")
		}
		s.Speakers["n1"], s.Speakers["n2"] = false, true
		if s.wantOwner(vip, "n2"); !plan.Make("n2", s.Snapshot).Layer2[vip].AnySegment {
			s.t.Error("not on any segment")
		}
		s.on("n1", segment("192.0.2.0/24", "eth0"))
		s.wantOwner(vip, "n2")
		s.wantSilent("n3", vip, plan.NotOnSegment)
	},
	"8 a segment counts if the advertisement announces on its interface": func(s *story) {
		s.on("n1", segment("203.0.113.0/24", "eth1"))
		s.on("n2", segment("203.0.113.0/24", "eth0"), segment("198.18.0.0/24", "eth1"))
		s.on("n3", report.Segment{Subnet: netip.MustParsePrefix("203.0.113.0/24"), Interface: "docker0", IfNamed: true})
		s.wantOwner(vip, "n1", "n2")
		s.wantSilent("n3", vip, plan.NotOnSegment)
		for pattern, owner := range map[string]string{"eth1": "n1", "eth[0-0]": "n2", "docker*": "n3"} {
			s.Config.Advertisements[0].Layer2.Interfaces = []string{"wlan*", pattern}
			s.wantOwner(vip, owner)
		}
		s.Config.Advertisements[0].Layer2.Interfaces = []string{"wlan*"}
		s.wantOwner(vip, "n1", "n2", "n3")
	},
	"68 a link that is lost moves the VIPs of its segment, and they come back with it": func(s *story) {
		both := []report.Segment{segment("203.0.113.0/24", "eth0"), segment("2001:db8::/64", "eth1")}
		for n := range s.Nodes {
			s.on(n, both...)
		}
		before := plan.Owners(s.Snapshot)
		first := before[vip]
		unplug := func(node string) {
			s.on(node, report.Segment{Subnet: both[0].Subnet, Interface: "eth0", Down: true}, both[1])
		}
		unplug(first)
		s.wantSilent(first, vip, plan.LinkDown)
		second := s.owner(vip)
		s.wantOwner(vip6, before[vip6])
		if second == first || second == "" {
			s.t.Errorf("%s has lost its link, the owner is %q", first, second)
		}
		unplug(second)
		third := s.owner(vip)
		s.wantSilent(second, vip, plan.LinkDown)
		unplug(third) // the switch is off: who was the owner keeps it
		if after := plan.Owners(s.Snapshot); !maps.Equal(before, after) {
			s.t.Errorf("all links are lost: owners were %v, are %v", before, after)
		}
		s.on(second, both...)
		s.wantOwner(vip, second)
		s.Speakers[second] = false
		s.wantOwner(vip, first)
		s.Speakers[second] = true
		s.on(first, both...)
		s.wantOwner(vip, first)
	},
	"a node whose kube-proxy is sick owns what nobody else can": func(s *story) {
		before := plan.Owners(s.Snapshot)
		owner := before[vip]
		sick := func(n *plan.Node) { n.Sick = true }
		s.node(owner, sick)
		s.wantSilent(owner, vip, plan.SpeakerNotReady)
		if other := s.owner(vip); other == owner || other == "" {
			s.t.Errorf("the owner is %q", other)
		}
		for name := range s.Nodes {
			s.node(name, sick)
		}
		if after := plan.Owners(s.Snapshot); !maps.Equal(before, after) {
			s.t.Errorf("all are sick: owners were %v, are %v", before, after)
		}
	},
	// The speaker of n1 has lost the others with the link to them: it alone knows.
	"a node that is apart owns nothing on the segment of that link": func(s *story) {
		s.on("n1", segment("203.0.113.0/24", "eth0"))
		s.node("n1", func(n *plan.Node) { n.Apart = "eth0" })
		s.Speakers = map[string]bool{"n1": true}
		s.wantSilent("n1", vip, plan.LinkDown)
		s.on("n1", report.Segment{Subnet: netip.MustParsePrefix("203.0.113.0/24"), Interface: "eth0"},
			report.Segment{Subnet: netip.MustParsePrefix("203.0.113.0/24"), Interface: "eth1", Down: true})
		s.wantSilent("n1", vip, plan.LinkDown)
		s.on("n1", segment("198.18.0.0/24", "eth0")) // the VIP is on no segment, and there is no other interface
		s.wantSilent("n1", vip, plan.LinkDown)
		s.on("n1", segment("198.18.0.0/24", "eth0"), segment("192.0.2.0/24", "eth1"))
		s.Config.Advertisements[0].Layer2.Interfaces = []string{"eth0"} // not on the other one
		s.wantSilent("n1", vip, plan.LinkDown)
	},
	"a node that is apart owns the VIPs of other segments, and asks for those that it gains": func(s *story) {
		for _, segments := range [][]report.Segment{
			{segment("198.18.0.0/24", "eth0"), segment("203.0.113.0/24", "eth1")},
			{segment("198.18.0.0/24", "eth0"), segment("192.0.2.0/24", "eth1")}, // the VIP is of neither
			{segment("203.0.113.0/24", "eth0"), segment("203.0.113.0/24", "eth1")},
		} {
			s.on("n1", segments...)
			s.node("n1", func(n *plan.Node) { n.Apart = "" })
			s.Speakers = map[string]bool{"n1": true}
			if l := plan.Make("n1", s.Snapshot).Layer2[vip]; l.New || l.Apart {
				s.t.Errorf("%v: it is not apart: %+v", segments, l)
			}
			s.node("n1", func(n *plan.Node) { n.Apart = "eth0" })
			s.wantOwner(vip, "n1")
			if l := plan.Make("n1", s.Snapshot).Layer2[vip]; !l.New || !l.Apart {
				s.t.Errorf("%v: %+v", segments, l)
			}
		}
	},
	"a node that is cut off from the API server owns what nobody else can": func(s *story) {
		before := plan.Owners(s.Snapshot)
		owner := before[vip]
		blind := func(n *plan.Node) { n.Blind = true }
		s.node(owner, blind)
		s.wantSilent(owner, vip, plan.SpeakerNotReady)
		other := s.owner(vip)
		if other == owner || other == "" {
			s.t.Errorf("the owner is %q", other)
		}
		if plan.Make(other, s.Snapshot).Layer2[vip].Home {
			s.t.Error("it is at home elsewhere")
		}
		s.service("default/local", owner).Local = true
		s.wantOwner(vip, owner)
		s.Services = s.Services[:len(s.Services)-1]
		for name := range s.Nodes {
			s.node(name, blind)
		}
		if after := plan.Owners(s.Snapshot); !maps.Equal(before, after) {
			s.t.Errorf("all are cut off: owners were %v, are %v", before, after)
		}
	},
	"68 a node with another link to the segment keeps its VIPs": func(s *story) {
		lost := report.Segment{Subnet: netip.MustParsePrefix("203.0.113.0/24"), Interface: "eth0", Down: true}
		owner := s.owner(vip)
		for n := range s.Nodes {
			s.on(n, segment("203.0.113.0/24", "eth0"))
		}
		s.on(owner, lost, segment("203.0.113.0/24", "eth1"))
		s.wantOwner(vip, owner)
		s.Config.Advertisements[0].Layer2.Interfaces = []string{"eth0"} // not on that one
		s.wantSilent(owner, vip, plan.LinkDown)
	},
	"68 where the segment does not matter, some link does": func(s *story) {
		s.Config.Advertisements[0].Layer2.AnySegment = true
		owner := s.owner(vip)
		s.on(owner, report.Segment{Subnet: netip.MustParsePrefix("198.18.0.0/24"), Interface: "eth0", Down: true},
			segment("198.18.1.0/24", "eth1"))
		s.wantOwner(vip, owner)
		s.on(owner, report.Segment{Subnet: netip.MustParsePrefix("198.18.0.0/24"), Interface: "eth0", Down: true})
		s.wantSilent(owner, vip, plan.LinkDown)
	},
	"68 where no node is on the segment, the links that announce count": func(s *story) {
		down := report.Segment{Subnet: netip.MustParsePrefix("198.18.1.0/24"), Interface: "eth1", Down: true}
		s.Config.Advertisements[0].Layer2.NodeSelector = labelled("n1", "n2", "n3")
		s.Nodes["other"] = plan.Node{Network: report.Network{Segments: []report.Segment{segment("203.0.113.0/24", "eth1")}}}
		for _, others := range []string{"198.18.1.0/24", "203.0.113.0/24"} {
			s.node("other", func(n *plan.Node) { n.Segments[0] = segment(others, "eth1") })
			s.Config.Advertisements[0].Layer2.Interfaces = []string{"eth1"}
			for _, n := range []string{"n1", "n2", "n3"} {
				s.on(n, segment("198.18.0.0/24", "eth0"), segment("198.18.1.0/24", "eth1"))
			}
			before := plan.Owners(s.Snapshot)
			owner := before[vip]
			unplug := func(node string) { s.on(node, segment("198.18.0.0/24", "eth0"), down) }
			unplug(owner)
			s.wantSilent(owner, vip, plan.LinkDown)
			if s.owner(vip) == "" {
				s.t.Error("nobody owns it")
			}
			s.Config.Advertisements[0].Layer2.Interfaces = []string{"eth*"}
			s.wantOwner(vip, owner)
			s.Config.Advertisements[0].Layer2.Interfaces = []string{"wlan0"} // nothing is known of it
			s.wantOwner(vip, owner)
			s.Config.Advertisements[0].Layer2.Interfaces = []string{"eth1"}
			for _, n := range []string{"n1", "n2", "n3"} {
				unplug(n)
			}
			if after := plan.Owners(s.Snapshot); !maps.Equal(before, after) {
				s.t.Errorf("all links are lost: owners were %v, are %v", before, after)
			}
		}
	},
	"10 an owner that is kept stays when a better one returns, and not when it may not own": func(s *story) {
		l := s.Config.Advertisements[0].Layer2
		l.KeepOwner = true
		s.prefer(1, "n1")
		s.wantOwner(vip, "n1")
		s.Speakers["n1"] = false
		deputy := s.owner(vip)
		claims := plan.Make(deputy, s.Snapshot).Claims
		if claims == (report.Claims{}) {
			s.t.Error("it claims nothing")
		}
		s.node(deputy, func(n *plan.Node) { n.Claims = claims })
		s.Speakers["n1"] = true
		s.wantOwner(vip, deputy)
		s.wantSilent("n1", vip, plan.NotOwner)
		if plan.Make(deputy, s.Snapshot).Layer2[vip].Home {
			s.t.Error("it is at home with a deputy")
		}
		s.node(deputy, func(n *plan.Node) { n.Labelled = true })
		s.wantOwner(vip, "n1")
		s.node(deputy, func(n *plan.Node) { n.Labelled = false })
		l.KeepOwner = false
		s.wantOwner(vip, "n1")
		if plan.Make("n1", s.Snapshot).Claims != (report.Claims{}) {
			s.t.Error("claims what it does not keep")
		}
	},
	"10 preference does not overrule the segment": func(s *story) {
		s.prefer(100, "n2")
		s.on("n1", segment("203.0.113.0/24", "eth0"))
		s.on("n2")
		s.wantOwner(vip, "n1", "n3")
		s.wantSilent("n2", vip, plan.NotOnSegment)
	},
	"a node that the API server does not know owns nothing": func(s *story) {
		owner := s.owner(vip)
		delete(s.Nodes, owner)
		s.wantOwner(vip, "n1", "n2", "n3")
		s.wantSilent(owner, vip, plan.NodeUnknown)
	},
	"connections are limited where the VIP is owned, each Service by itself": func(s *story) {
		s.Services[0].Limit = plan.Limit{PerSecond: 100, Ports: []plan.Port{{Protocol: 6, Number: 80}}}
		s.service("default/dns", "n1").Limit = plan.Limit{PerSecond: 7, Ports: []plan.Port{{Protocol: 17, Number: 53}}}
		s.service("default/free", "n1")
		for n := range s.Nodes {
			p, want := plan.Make(n, s.Snapshot), map[plan.LimitKey]uint32{}
			if s.owner(vip) == n {
				want[plan.LimitKey{VIP: vip, Service: "default/web"}], want[plan.LimitKey{VIP: vip, Service: "default/dns"}] = 100, 7
			}
			if s.owner(vip6) == n {
				want[plan.LimitKey{VIP: vip6, Service: "default/web"}] = 100
			}
			got := map[plan.LimitKey]uint32{}
			for key, l := range p.Limits {
				got[key] = l.PerSecond
			}
			if !maps.Equal(got, want) || len(p.LimitErrs) > 0 {
				s.t.Errorf("node %s limits %v, want %v; errors %v", n, got, want, p.LimitErrs)
			}
		}
	},
	"an invalid limit is reported by the owner alone, and limits nothing": func(s *story) {
		s.Services[0].VIPs = s.Services[0].VIPs[:1]
		s.Services[0].LimitErr = errors.New("not a number")
		for n := range s.Nodes {
			p := plan.Make(n, s.Snapshot)
			if err := p.LimitErrs["default/web"]; (err != nil) != (s.owner(vip) == n) || len(p.Limits) > 0 {
				s.t.Errorf("node %s, owner %s: %v, limits %v", n, s.owner(vip), err, p.Limits)
			}
		}
	},
	"nobody is ready": func(s *story) {
		clear(s.Speakers)
		s.wantOwner(vip, "")
		s.wantSilent("n2", vip, plan.SpeakerNotReady)
	},
}

func TestStories(t *testing.T) {
	t.Parallel()
	for name, run := range stories {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			run(newStory(t))
		})
	}
}

func TestMessagesNameTheOwner(t *testing.T) {
	t.Parallel()
	s := newStory(t)
	owner := s.owner(vip)
	for _, n := range []string{"n1", "n2", "n3"} {
		if got := plan.Make(n, s.Snapshot).Silent[vip]; n != owner && (got.Owner != owner || !strings.Contains(got.Message, owner)) {
			t.Errorf("on node %s: %+v, the owner is %s", n, got, owner)
		}
	}
}

// TestUnowned checks that all nodes mark the same VIPs as announced by nobody.
func TestUnowned(t *testing.T) {
	t.Parallel()
	s := newRoutedStory(t)
	unowned := func(why string, want bool) {
		t.Helper()
		for _, node := range []string{"n1", "n2", "n3"} {
			p := plan.Make(node, s.Snapshot)
			if got := p.Silent[vip].Unowned; got != want {
				t.Errorf("%s: on %s unowned is %v in %+v", why, node, got, p.Silent[vip])
			}
		}
	}
	unowned("routers hear of it", false)
	for _, node := range []string{"n1", "n2", "n3"} {
		s.node(node, func(n *plan.Node) { n.Labelled = true })
	}
	unowned("no node announces it to the routers, which a node cannot know of the others", false)

	s = newStory(t)
	unowned("it has an owner", false)
	for _, node := range []string{"n1", "n2", "n3"} {
		s.node(node, func(n *plan.Node) { n.Labelled = true })
	}
	unowned("no node may own it", true)
	s.node("n2", func(n *plan.Node) { n.Labelled = false })
	unowned("one may", false)
	s.Services[0].Serving = false
	unowned("nothing serves it", true)
}
