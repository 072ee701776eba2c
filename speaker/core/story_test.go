package core

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go4.org/netipx"

	"github.com/lodestone-lb/lodestone/pkg/config"
	"github.com/lodestone-lb/lodestone/pkg/report"
	"github.com/lodestone-lb/lodestone/speaker/plan"
)

const handOver, drain = 2 * time.Second, 2 * time.Second

// story is the core of n1 beside a ready speaker on n2, and what has come of its effects.
type story struct {
	t        *testing.T
	now      time.Time
	core     *Core
	config   config.Config
	nodes    Nodes
	speakers map[string]bool
	networks map[string]report.Network
	health   Health

	last    Effects
	vips    map[netip.Addr]plan.Layer2
	left    int      // how many of the sets had a VIP that leaves
	routers []string // what they were sent
}

// well is a node that lacks nothing.
var well = Health{Synced: true, Joined: true, Healthy: true, Forwards: true}

func newStory(t *testing.T) *story {
	t.Parallel()
	return &story{t: t, now: time.Unix(1e9, 0), core: New(Options{"n1", handOver, drain}), nodes: Nodes{"n1": {}, "n2": {}}, health: well,
		speakers: map[string]bool{"n1": false, "n2": true}, config: config.Config{
			Digest: "d1", Pools: []config.Pool{{Name: "lan", Free: prefix("203.0.113.0/24"), Withheld: &netipx.IPSet{}}},
			Advertisements: []config.Advertisement{{Name: "all", Layer2: &config.Layer2{}}},
		}}
}

// begin has the core know the world as it is, and the Services.
func (s *story) begin(services ...plan.Service) {
	for _, svc := range services {
		s.core.Step(Service{svc}, s.now)
	}
	s.step(s.health, s.configured(), s.noded(), s.members())
}

func (s *story) configured() Event { c := s.config; return Config{&c} }
func (s *story) noded() Event      { return maps.Clone(s.nodes) }
func (s *story) members() Event    { return Members{maps.Clone(s.speakers), maps.Clone(s.networks)} }

// step feeds the core with events, has it decide, and notes the effects.
func (s *story) step(events ...Event) Effects {
	for _, e := range events {
		require.Equal(s.t, Effects{Ready: s.core.ready}, s.core.Step(e, s.now), "a fact decides nothing")
	}
	return s.note(s.core.Step(Decide{}, s.now))
}

func (s *story) note(e Effects) Effects {
	if s.last = e; e.SetVIPs {
		s.vips = maps.Clone(e.VIPs)
		if slices.ContainsFunc(slices.Collect(maps.Values(e.VIPs)), func(l plan.Layer2) bool { return l.Leaving }) {
			s.left++
		}
	}
	if e.BeginDrain {
		s.routers = append(s.routers, "drain true")
	}
	if r := e.Routes; r != nil {
		s.routers = append(s.routers, fmt.Sprint(map[bool]string{true: "set ", false: "update "}[r.All],
			slices.Sorted(maps.Keys(r.Sessions)), slices.Sorted(maps.Keys(strs(r.Routes)))))
	}
	if e.EndDrain {
		s.routers = append(s.routers, "drain false")
	}
	if e.StopRouters {
		s.routers = append(s.routers, "stop")
	}
	return e
}

func strs[K interface {
	comparable
	fmt.Stringer
}, V any](m map[K]V) map[string]V {
	all := map[string]V{}
	for k, v := range m {
		all[k.String()] = v
	}
	return all
}

// after lets time pass. The core decides when it asked to.
func (s *story) after(d time.Duration) {
	end := s.now.Add(d)
	for next := s.last.Next; !next.IsZero() && !next.After(end); next = s.last.Next {
		s.now = next
		s.step()
		require.True(s.t, s.last.Next.IsZero() || s.last.Next.After(s.now), "the core asks for a time that is over")
	}
	s.now = end
}

// announced checks that exactly these VIPs are announced, "leaving" or "arriving" after those that are.
func (s *story) announced(vips ...string) {
	s.t.Helper()
	got := []string{}
	for vip, l := range s.vips {
		got = append(got, vip.String()+map[bool]string{true: " leaving"}[l.Leaving]+map[bool]string{true: " arriving"}[l.Arriving])
	}
	slices.Sort(got)
	require.ElementsMatch(s.t, vips, got)
}

// sent checks that that is what routers were sent since the last time.
func (s *story) sent(what ...string) {
	s.t.Helper()
	require.Equal(s.t, what, s.routers)
	s.routers = nil
}

// silent checks that the only VIP is silent for the reason.
func (s *story) silent(reason plan.Reason, owner string) {
	s.t.Helper()
	for _, silence := range s.core.State().Plan.Silent {
		require.Equal(s.t, [2]string{string(reason), owner}, [2]string{string(silence.Reason), silence.Owner})
	}
	require.Len(s.t, s.core.State().Plan.Silent, 1)
}

// preferring returns an address that the node owns while n1 and n2 are able.
func (s *story) preferring(node string) string {
	s.t.Helper()
	both := plan.Snapshot{Config: &s.config, Nodes: s.nodes, Speakers: map[string]bool{"n1": true, "n2": true}}
	for vip := netip.MustParseAddr("203.0.113.1"); vip.As4()[3] < 255; vip = vip.Next() {
		both.Services = []plan.Service{{Name: "default/web", Serving: true, VIPs: []netip.Addr{vip}}}
		if plan.Owners(both)[vip] == node {
			return vip.String()
		}
	}
	s.t.Fatalf("%s owns no address", node)
	return ""
}

// web is a Service that has endpoints or not, and local one with policy Local that has
// them on these nodes.
func web(vip string, serving bool) plan.Service {
	s := plan.Service{Name: "default/web", Serving: serving}
	if vip != "" {
		s.VIPs = []netip.Addr{netip.MustParseAddr(vip)}
	}
	return s
}

func local(vip string, nodes ...string) plan.Service {
	s := web(vip, len(nodes) > 0)
	s.Local = true
	for _, n := range slices.Sorted(slices.Values(nodes)) {
		s.Backends = append(s.Backends, plan.Backend{Node: n, Open: 1})
	}
	return s
}

func prefix(text string) *netipx.IPSet {
	var b netipx.IPSetBuilder
	b.AddPrefix(netip.MustParsePrefix(text))
	set, _ := b.IPSet()
	return set
}

// node changes the Node.
func (s *story) node(name string, change func(*plan.Node)) Event {
	n := s.nodes[name]
	change(&n)
	s.nodes[name] = n
	return s.noded()
}

func (s *story) excluded(name string, is bool) Event {
	return s.node(name, func(n *plan.Node) { n.Labelled = is })
}

func (s *story) gone(name string) Event { delete(s.nodes, name); return s.noded() }

// speaker has the speaker of n2 publish whether it is ready.
func (s *story) speaker(ready bool) Event { s.speakers["n2"] = ready; return s.members() }

func (s *story) lost() Event { delete(s.speakers, "n2"); return s.members() }
