package plan

import (
	"net/netip"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/lodestone-lb/lodestone/pkg/config"
	"github.com/lodestone-lb/lodestone/pkg/report"
)

// What is forwarded directly follows from the advertisement, the endpoints and what becomes of
// the nodes.
func TestForwarding(t *testing.T) {
	t.Parallel()
	vip := netip.MustParseAddr("203.0.113.1")
	http := []Port{{Protocol: 6, Number: 80}}
	cfg := func(direct bool) *config.Config {
		return &config.Config{Advertisements: []config.Advertisement{{Name: "all", Layer2: &config.Layer2{Direct: direct}}}}
	}
	forwards := report.Network{Forwards: true}
	nodes := map[string]Node{"n1": {Network: forwards}, "n2": {Network: forwards}, "n3": {Network: report.Network{Sick: true, Forwards: true}},
		"n4": {Excluded: true, Network: forwards}, "n5": {Network: forwards}, "n6": {}}
	speakers := map[string]bool{"n1": true, "n2": true, "n3": true, "n4": true, "n5": false, "n6": true}
	p := NewPlanner("n1")
	p.Set(cfg(true), nodes, speakers)
	p.Put(Service{Name: "default/web", VIPs: []netip.Addr{vip}, Serving: true, Ports: http, Seed: 7})
	p.Update()
	f := p.Plan().Forwarding
	require.Equal(t, map[LimitKey]Direct{{vip, "default/web"}: {Ports: http, Seed: 7, Backends: []Backend{
		{"n1", 1, 0}, {"n2", 1, 0}, {"n3", 0, 1}, {"n4", 0, 1}, {"n5", 0, 1}}}}, f.Services)
	require.Equal(t, map[string]bool{"n5": true}, f.Lost)

	p.Put(Service{Name: "default/other", VIPs: []netip.Addr{netip.MustParseAddr("203.0.113.2")}, Serving: true})
	p.Update()
	require.Same(t, f, p.Plan().Forwarding, "it takes no TCP")

	local := Service{Name: "default/web", VIPs: []netip.Addr{vip}, Serving: true, Local: true, Ports: http, ByClient: true,
		ServingNodes: map[string]bool{"n2": true, "n4": true}, Backends: []Backend{{"n2", 2, 1}, {"n4", 3, 0}, {"n6", 1, 0}}}
	p.Put(local)
	p.Update()
	require.Equal(t, Direct{Ports: http, ByClient: true, Backends: []Backend{{"n2", 2, 1}, {"n4", 0, 3}}},
		p.Plan().Forwarding.Services[LimitKey{vip, "default/web"}])

	p.Set(cfg(false), nodes, speakers)
	p.Update()
	require.Empty(t, p.Plan().Forwarding.Services)
	p.Set(cfg(true), nodes, speakers)
	p.Update()
	require.Len(t, p.Plan().Forwarding.Services, 1)
	p.Put(Service{Name: "default/web"})
	p.Update()
	require.Empty(t, p.Plan().Forwarding.Services)
}
