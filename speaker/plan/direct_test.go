package plan

import (
	"fmt"
	"maps"
	"net/netip"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/lodestone-lb/lodestone/pkg/config"
	"github.com/lodestone-lb/lodestone/pkg/report"
)

// The Forwarding follows from the advertisement, the endpoints and the state of the nodes.
func TestForwarding(t *testing.T) {
	t.Parallel()
	vip := netip.MustParseAddr("203.0.113.1")
	http := []Port{{Protocol: 6, Number: 80}}
	cfg := func(direct bool) *config.Config {
		return &config.Config{Advertisements: []config.Advertisement{{Name: "all", Layer2: &config.Layer2{Direct: direct}}}}
	}
	forwards := report.Network{Forwards: true}
	nodes := map[string]Node{"n1": {Network: forwards}, "n2": {Network: forwards}, "n3": {Network: report.Network{Sick: true, Forwards: true}},
		"n4": {Labelled: true, Network: forwards}, "n5": {Network: forwards}, "n6": {}}
	speakers := map[string]bool{"n1": true, "n2": true, "n3": true, "n4": true, "n5": false, "n6": true}
	p := NewPlanner("n1")
	p.Set(cfg(true), nodes, speakers)
	p.Put(Service{Name: "default/web", VIPs: []netip.Addr{vip}, Serving: true, Ports: http, Seed: 7})
	p.Update()
	f := p.Plan().Forwarding
	require.Equal(t, map[LimitKey]Direct{{vip, "default/web"}: {Ports: http, Seed: 7, Backends: []Backend{
		{"n1", 1, 0}, {"n2", 1, 0}, {"n3", 0, 1}, {"n4", 0, 1}, {"n5", 0, 1}}}}, f.Services)
	require.Equal(t, map[string]bool{"n5": true}, f.Lost)
	require.Equal(t, map[string]bool{"n5": true}, f.Heard)
	delete(speakers, "n5")
	p.Set(cfg(true), nodes, speakers)
	p.Update()
	require.Equal(t, map[string]bool{"n5": true}, p.Plan().Forwarding.Lost)
	require.Empty(t, p.Plan().Forwarding.Heard)
	f = p.Plan().Forwarding

	p.Put(Service{Name: "default/other", VIPs: []netip.Addr{netip.MustParseAddr("203.0.113.2")}, Serving: true})
	p.Update()
	require.Same(t, f, p.Plan().Forwarding, "it takes no TCP")

	local := Service{Name: "default/web", VIPs: []netip.Addr{vip}, Serving: true, Local: true, Ports: http, ByClient: true,
		Backends: []Backend{{"n2", 2, 1}, {"n4", 3, 0}, {"n6", 1, 0}}}
	p.Put(local)
	p.Update()
	require.Equal(t, Direct{Ports: http, ByClient: true, Local: true, Backends: []Backend{{"n2", 2, 1}, {"n4", 0, 3}}},
		p.Plan().Forwarding.Services[LimitKey{vip, "default/web"}])

	f = p.Plan().Forwarding
	p.Set(cfg(true), maps.Clone(nodes), maps.Clone(speakers))
	p.Update()
	require.Same(t, f, p.Plan().Forwarding, "nothing of it is different")
	speakers["n5"] = true
	p.Set(cfg(true), nodes, speakers)
	p.Update()
	require.Empty(t, p.Plan().Forwarding.Lost)
	six := Node{Addresses: []netip.Addr{netip.MustParseAddr("198.18.0.6")}}
	nodes["n6"] = six
	p.Set(cfg(true), nodes, speakers)
	p.Update()
	require.NotContains(t, p.Plan().Forwarding.Nodes, "n6", "it has no rules")
	six.Forwards = true
	nodes["n6"] = six
	p.Set(cfg(true), nodes, speakers)
	p.Update()
	require.Equal(t, six.Addresses, p.Plan().Forwarding.Nodes["n6"])

	p.Set(cfg(false), nodes, speakers)
	p.Update()
	require.Empty(t, p.Plan().Forwarding.Services)
	follower := NewPlanner("n1")
	follower.Set(cfg(false), nodes, speakers)
	follower.Update()
	require.Equal(t, p.Plan().Forwarding.Nodes, follower.Plan().Forwarding.Nodes, "what is switched off drains")
	p.Set(cfg(true), nodes, speakers)
	p.Update()
	require.Len(t, p.Plan().Forwarding.Services, 1)
	p.Put(Service{Name: "default/web"})
	p.Update()
	require.Empty(t, p.Plan().Forwarding.Services)
	nodes = maps.Clone(nodes)
	delete(nodes, "n6")
	p.Set(cfg(true), nodes, speakers)
	p.Update()
	p.Put(local)
	p.Update()
	require.NotContains(t, p.Plan().Forwarding.Nodes, "n6", "it went while nothing was forwarded")
}

// If an advertisement selects some nodes, these keep the connections. In a small cluster the others
// keep those that they have.
func TestForwardingToSelectedNodes(t *testing.T) {
	t.Parallel()
	vip := netip.MustParseAddr("203.0.113.1")
	c := &config.Config{Advertisements: []config.Advertisement{{Name: "edge", Layer2: &config.Layer2{Direct: true,
		NodeSelector: config.Selector{{Key: "edge", Operator: config.Exists}}}}}}
	for name, test := range map[string]struct {
		local  bool
		others int
		want   []Backend
	}{
		"few":            {false, 3, []Backend{{"n0", 1, 0}, {"n1", 1, 0}, {"n2", 0, 1}, {"n3", 0, 1}, {"n4", 0, 1}}},
		"many":           {false, 8, []Backend{{"n0", 1, 0}, {"n1", 1, 0}}},
		"few, by Local":  {true, 3, []Backend{{"n1", 2, 1}, {"n2", 0, 3}, {"n3", 0, 3}, {"n4", 0, 3}}},
		"many, by Local": {true, 8, []Backend{{"n1", 2, 1}}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			web := Service{Name: "default/web", VIPs: []netip.Addr{vip}, Serving: true, Ports: []Port{{Protocol: 6, Number: 80}},
				Local: test.local}
			nodes, speakers := map[string]Node{}, map[string]bool{}
			for i := range 2 + test.others {
				name, n := fmt.Sprint("n", i), Node{Network: report.Network{Forwards: true}}
				if i < 2 {
					n.Labels = map[string]string{"edge": ""}
				}
				if i > 0 {
					web.Backends = append(web.Backends, Backend{name, 2, 1})
				}
				nodes[name], speakers[name] = n, true
			}
			f := Make("n0", Snapshot{Config: c, Nodes: nodes, Speakers: speakers, Services: []Service{web}}).Forwarding
			require.Equal(t, test.want, f.Services[LimitKey{vip, "default/web"}].Backends)
		})
	}
}

// A limit is in force wherever connections are kept, so that all nodes together keep to it.
func TestLimitsWithDirectForwarding(t *testing.T) {
	t.Parallel()
	vip, key := netip.MustParseAddr("203.0.113.1"), LimitKey{netip.MustParseAddr("203.0.113.1"), "default/web"}
	http, dns := []Port{{Protocol: 6, Number: 80}}, []Port{{Protocol: 6, Number: 53}, {Protocol: 17, Number: 53}}
	web := Service{Name: "default/web", VIPs: []netip.Addr{vip}, Serving: true, Ports: http, Limit: Limit{100, http}}
	local := web
	local.Local, local.Backends = true, []Backend{{"n1", 1, 0}, {"n2", 3, 0}, {"n3", 0, 2}}
	mixed, large := local, web
	mixed.Ports, mixed.Limit = dns[:1], Limit{100, dns}
	large.Limit.PerSecond = 1_000_000_000
	for name, test := range map[string]struct {
		service Service
		want    map[string]uint32 // by node, "owner" for the one that owns the VIP
		sick    bool              // all are
	}{
		"all nodes take as many":      {service: web, want: map[string]uint32{"owner": 34, "n1": 34, "n2": 34, "n3": 34}},
		"as the endpoints":            {service: local, want: map[string]uint32{"n1": 25, "n2": 75}},
		"a large one":                 {service: large, want: map[string]uint32{"n1": 333_333_334, "n2": 333_333_334, "n3": 333_333_334}},
		"the owner takes the rest":    {service: mixed, want: map[string]uint32{"owner": 100}},
		"nobody takes new ones":       {service: local, want: map[string]uint32{"n1": 17, "n2": 50, "n3": 34}, sick: true},
		"a node without rules is out": {service: web, want: map[string]uint32{"n4": 0}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			nodes, speakers := map[string]Node{"n4": {Labelled: true}}, map[string]bool{"n4": true}
			for _, n := range []string{"n1", "n2", "n3"} {
				nodes[n], speakers[n] = Node{Network: report.Network{Forwards: true, Sick: test.sick}}, true
			}
			c := &config.Config{Advertisements: []config.Advertisement{{Name: "all", Layer2: &config.Layer2{Direct: true}}}}
			snapshot := Snapshot{Config: c, Nodes: nodes, Speakers: speakers, Services: []Service{test.service}}
			owner := Owners(snapshot)[vip]
			require.NotEmpty(t, owner)
			for node, want := range test.want {
				if node == "owner" {
					node = owner
				}
				limit := Make(node, snapshot).Limits[key]
				require.Equal(t, want, limit.PerSecond, node)
				if want > 0 {
					require.Equal(t, test.service.Limit.Ports, limit.Ports)
				}
			}
		})
	}
	// One who has no rules keeps all that comes to it.
	alone := Snapshot{Config: &config.Config{Advertisements: []config.Advertisement{{Name: "all", Layer2: &config.Layer2{Direct: true}}}},
		Nodes: map[string]Node{"n1": {}}, Speakers: map[string]bool{"n1": true}, Services: []Service{web}}
	require.Equal(t, uint32(100), Make("n1", alone).Limits[key].PerSecond)
}

// A limit is divided among the nodes that the owner can hand packets to: another one, which nothing
// comes to, would admit nothing of its part.
func TestLimitIsDividedAmongNeighbours(t *testing.T) {
	t.Parallel()
	vip, six := netip.MustParseAddr("203.0.113.1"), netip.MustParseAddr("2001:db8:9::1")
	key, http := LimitKey{six, "default/web"}, []Port{{Protocol: 6, Number: 80}}
	web := Service{Name: "default/web", VIPs: []netip.Addr{vip, six}, Serving: true, Ports: http, Limit: Limit{100, http}}
	lan := report.Network{Forwards: true, Segments: []report.Segment{{Subnet: netip.MustParsePrefix("198.18.0.0/24"), Interface: "eth0"}}}
	at := func(addresses ...string) Node {
		n := Node{Network: lan}
		for _, a := range addresses {
			n.Addresses = append(n.Addresses, netip.MustParseAddr(a))
		}
		return n
	}
	far := at("198.18.1.5")
	far.Segments = []report.Segment{{Subnet: netip.MustParsePrefix("198.18.1.0/24"), Interface: "eth0"}}
	owner := at("2001:db8::1", "198.18.9.1") // on none of its segments
	owner.Labels = map[string]string{"first": ""}
	nodes := map[string]Node{"n1": owner, "n2": at("198.18.0.2"), "n3": at(), "n4": at("198.18.1.4"), "n5": far,
		"n6": {Labelled: true, Addresses: []netip.Addr{netip.MustParseAddr("198.18.0.6")}, Network: lan}}
	apart := Snapshot{Nodes: nodes, Speakers: map[string]bool{"n1": true, "n2": true, "n3": true, "n4": true, "n5": true, "n6": true},
		Config: &config.Config{Advertisements: []config.Advertisement{{Name: "all", Layer2: &config.Layer2{Direct: true,
			PreferredNodes: []config.Preference{{Weight: 1, NodeSelector: config.Selector{{Key: "first", Operator: config.Exists}}}}}}}},
		Services: []Service{web}}
	limits := func() map[string]uint32 {
		all := map[string]uint32{}
		for node := range nodes {
			if l, limited := Make(node, apart).Limits[key]; limited {
				all[node] = l.PerSecond
			}
		}
		return all
	}
	require.Equal(t, map[string]uint32{"n1": 100}, limits(), "it reaches no other one by IPv6")
	key = LimitKey{vip, "default/web"}
	require.Equal(t, map[string]uint32{"n1": 50, "n2": 50}, limits())
	local := web
	local.Local = true
	mixed := local
	mixed.Limit.Ports = []Port{http[0], {Protocol: 17, Number: 53}}
	mixed.Backends = []Backend{{"n1", 1, 0}, {"n2", 3, 0}, {"n5", 4, 0}}
	apart.Services = []Service{mixed}
	require.Equal(t, map[string]uint32{"n1": 100, "n2": 75}, limits())
	local.Backends = mixed.Backends
	apart.Services = []Service{local}
	for _, name := range []string{"n1", "n2", "n5"} {
		n := nodes[name]
		n.Sick = true
		nodes[name] = n
	}
	require.Equal(t, map[string]uint32{"n1": 25, "n2": 75}, limits(), "nobody takes new ones")
	delete(apart.Speakers, "n2")
	require.Equal(t, map[string]uint32{"n1": 100}, limits(), "nor does one who is lost")
}
