package plan_test

import (
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
	"go4.org/netipx"
	"pgregory.net/rapid"

	"github.com/lodestone-lb/lodestone/pkg/config"
	"github.com/lodestone-lb/lodestone/speaker/plan"
)

var errAnnotation = errors.New("lodestone.io/bgp-asn is wrong")

func drawNodeBGP(t *rapid.T) plan.NodeBGP {
	b := plan.NodeBGP{RouterID: netip.AddrFrom4([4]byte{192, 0, 2, byte(rapid.IntRange(1, 20).Draw(t, "router ID"))})}
	switch rapid.IntRange(0, 7).Draw(t, "annotations") {
	case 0:
		b.ASNErr = errAnnotation
	case 1:
		b.RouterID = netip.Addr{}
	case 2:
	default:
		b.ASN = 64512
	}
	return b
}

func drawPeers(t *rapid.T) []config.Peer {
	var peers []config.Peer
	for i := range rapid.IntRange(0, 4).Draw(t, "peers") {
		p := config.Peer{
			Name: fmt.Sprint("tor-", i), PeerASN: config.ASN{Number: 64513},
			Address: netip.AddrFrom4([4]byte{198, 18, 0, byte(rapid.IntRange(0, 5).Draw(t, "router"))}),
		}
		if rapid.Bool().Draw(t, "some nodes") {
			p.NodeSelector = labelled(fmt.Sprint(rapid.IntRange(0, 3).Draw(t, "rack")), "0")
		}
		if rapid.Bool().Draw(t, "has localASN") {
			p.LocalASN = 64514
		}
		peers = append(peers, p)
	}
	return peers
}

func drawBGP(t *rapid.T) *config.BGP {
	number := func(label string) *uint32 {
		return rapid.SampledFrom([]*uint32{nil, new(uint32), ptr(1), ptr(2)}).Draw(t, label)
	}
	b := &config.BGP{
		AggregationLength: rapid.SampledFrom([]int{32, 32, 30, 29, 27}).Draw(t, "length"), AggregationLengthV6: 128,
		AggregatePartly: rapid.IntRange(0, 3).Draw(t, "partly") == 0,
		LocalPreference: number("preference"), MED: number("MED"), Prepend: rapid.IntRange(0, 2).Draw(t, "prepend"),
	}
	for _, c := range rapid.SliceOfNDistinct(rapid.Uint32Range(0, 3), 0, 2, rapid.ID).Draw(t, "communities") {
		b.Communities = append(b.Communities, config.Community(c))
		b.LargeCommunities = append(b.LargeCommunities, config.LargeCommunity{GlobalAdmin: c})
	}
	slices.Sort(b.Communities)
	slices.SortFunc(b.LargeCommunities, config.LargeCommunity.Compare)
	if rapid.IntRange(0, 3).Draw(t, "some peers") == 0 {
		b.Peers = []string{"tor-0", "tor-2"}
	}
	if rapid.IntRange(0, 3).Draw(t, "some nodes") == 0 {
		b.NodeSelector = labelled("0", "1")
	}
	return b
}

func ptr(n uint32) *uint32 { return &n }

// heard returns the routers that have a session with the node, by the rules as
// the reference has them.
func heard(s plan.Snapshot, node string) map[string]bool {
	peers, at := map[string]bool{}, map[netip.Addr]bool{}
	n, known := s.Nodes[node]
	for _, p := range s.Config.Peers {
		if !known || !p.NodeSelector.Matches(n.Labels) || at[p.Address] || p.LocalASN == 0 && n.BGP.ASN == 0 || !n.BGP.RouterID.IsValid() {
			continue
		}
		peers[p.Name], at[p.Address] = true, true
	}
	return peers
}

// advertised returns to which peers the node announces VIPs by the advertisement, and which VIPs it
// serves.
func advertised(s plan.Snapshot, node string, a config.Advertisement) (peers []string, covered map[netip.Addr]bool) {
	covered = map[netip.Addr]bool{}
	n := s.Nodes[node]
	if a.BGP == nil || !a.BGP.NodeSelector.Matches(n.Labels) {
		return nil, nil
	}
	for name := range heard(s, node) {
		if len(a.BGP.Peers) == 0 || slices.Contains(a.BGP.Peers, name) {
			peers = append(peers, name)
		}
	}
	for _, svc := range s.Services {
		for _, vip := range svc.VIPs {
			if pool, ok := s.Config.PoolOf(vip); a.ServiceSelector.Matches(svc.Labels) &&
				(!ok || len(pool.Advertise) == 0 || slices.Contains(pool.Advertise, a.Name)) {
				covered[vip] = false
			}
		}
	}
	for vip := range covered {
		serving, accepted := false, true
		for _, svc := range s.Services {
			if slices.Contains(svc.VIPs, vip) && svc.Serving {
				serving, accepted = true, accepted && (!svc.Local || takesTraffic(svc, node))
			}
		}
		covered[vip] = serving && accepted && announces(s, node) && !(unfit(s, node) && healthier(s, node, vip))
	}
	return peers, covered
}

func announces(s plan.Snapshot, node string) bool {
	n := s.Nodes[node]
	excluded := n.Leaving || n.Labelled && !s.Config.IgnoreExcludeLabel || slices.Contains(n.Taints, "out")
	return s.Speakers[node] && !excluded
}

func unfit(s plan.Snapshot, node string) bool {
	return s.Nodes[node].Sick || s.Nodes[node].NetworkUnavailable
}

// healthier reports whether some other node that is not unfit announces the VIP, which serves,
// by an advertisement by which the node may.
func healthier(s plan.Snapshot, node string, vip netip.Addr) bool {
	by := func(node string, a config.Advertisement) bool {
		if a.BGP == nil || !a.BGP.NodeSelector.Matches(s.Nodes[node].Labels) {
			return false
		}
		for name := range heard(s, node) {
			if len(a.BGP.Peers) == 0 || slices.Contains(a.BGP.Peers, name) {
				return true
			}
		}
		return false
	}
	for other := range s.Nodes {
		accepted := !slices.ContainsFunc(s.Services, func(svc plan.Service) bool {
			return slices.Contains(svc.VIPs, vip) && svc.Serving && svc.Local && !takesTraffic(svc, other)
		})
		if other == node || unfit(s, other) || !accepted || !announces(s, other) {
			continue
		}
		for _, a := range s.Config.Advertisements {
			covers := slices.ContainsFunc(s.Services, func(svc plan.Service) bool {
				pool, ok := s.Config.PoolOf(vip)
				return slices.Contains(svc.VIPs, vip) && a.ServiceSelector.Matches(svc.Labels) &&
					(!ok || len(pool.Advertise) == 0 || slices.Contains(pool.Advertise, a.Name))
			})
			if covers && by(node, a) && by(other, a) {
				return true
			}
		}
	}
	return false
}

// prefixes returns what an advertisement announces of the VIPs that it covers.
func prefixes(s plan.Snapshot, a config.Advertisement, covered map[netip.Addr]bool) map[netip.Prefix]bool {
	all := map[netip.Prefix]bool{}
	for vip, served := range covered {
		prefix, whole := netip.PrefixFrom(vip, 32).Masked(), served
		if aggregate, _ := vip.Prefix(a.BGP.AggregationLength); ours(s, vip, aggregate) {
			for other, served := range covered {
				whole = whole && (!aggregate.Contains(other) || served || a.BGP.AggregatePartly)
			}
			if whole {
				prefix = aggregate
			}
		}
		if served {
			all[prefix] = true
		}
	}
	return all
}

// ours reports whether all addresses of the aggregate are in the VIP's pool.
func ours(s plan.Snapshot, vip netip.Addr, aggregate netip.Prefix) bool {
	pool, ok := s.Config.PoolOf(vip)
	for a := aggregate.Addr(); ok && aggregate.Contains(a); a = a.Next() {
		ok = pool.Free.Contains(a)
	}
	return ok
}

func TestRoutesEqualTheReference(t *testing.T) {
	t.Parallel()
	aggregates, overlapping := 0, 0
	rapid.Check(t, func(t *rapid.T) {
		s := drawSnapshot(t)
		for node := range s.Nodes {
			p := plan.Make(node, s).BGP
			require.Equal(t, heard(s, node), keys(p.Sessions))
			routes, vips := map[netip.Prefix]map[string][]*config.BGP{}, map[netip.Addr]map[string]bool{}
			for _, a := range s.Config.Advertisements {
				peers, covered := advertised(s, node, a)
				for _, peer := range peers {
					for prefix := range prefixes(s, a, covered) {
						if routes[prefix] == nil {
							routes[prefix] = map[string][]*config.BGP{}
						}
						routes[prefix][peer] = append(routes[prefix][peer], a.BGP)
					}
					for vip, served := range covered {
						if served && vips[vip] == nil {
							vips[vip] = map[string]bool{}
						}
						if served {
							vips[vip][peer] = true
						}
					}
				}
			}
			require.Equal(t, keys(routes), keys(p.Routes), node)
			for prefix, route := range routes {
				require.Equal(t, keys(route), keys(p.Routes[prefix]), prefix)
				for peer, asked := range route {
					checkAttributes(t, asked, p.Routes[prefix][peer])
					overlapping += len(asked) - 1
				}
				if !prefix.IsSingleIP() {
					aggregates++
				}
			}
			require.Equal(t, keys(vips), keys(p.VIPs), node)
			for vip, peers := range vips {
				require.Equal(t, slices.Sorted(maps.Keys(peers)), p.VIPs[vip])
			}
			for prefix := range p.Routes {
				_, vip := p.VIPs[prefix.Addr()]
				require.True(t, prefix.IsSingleIP() && vip ||
					slices.ContainsFunc(s.Config.Pools, func(p config.Pool) bool { return p.ContainsPrefix(prefix) }), prefix)
			}
			checkPermitted(t, s, node, p)
		}
	})
	require.True(t, aggregates > 0 && overlapping > 0, "%d aggregates, %d overlapping routes", aggregates, overlapping)
}

// checkPermitted checks that a list of what may be announced leaves out what it
// does not contain, and nothing else.
func checkPermitted(t *rapid.T, s plan.Snapshot, node string, without plan.BGP) {
	var b netipx.IPSetBuilder
	for vip := range without.VIPs {
		if prefix, _ := vip.Prefix(rapid.IntRange(24, 32).Draw(t, "permitted")); rapid.Bool().Draw(t, "permit") {
			b.AddPrefix(prefix)
		}
	}
	c := *s.Config
	c.Permit, _ = b.IPSet()
	s.Config = &c
	with := plan.Make(node, s)
	for prefix := range with.BGP.Routes {
		require.True(t, c.Permit.ContainsPrefix(prefix), prefix)
	}
	for vip, peers := range without.VIPs {
		if c.Permit.Contains(vip) {
			require.Equal(t, peers, with.BGP.VIPs[vip])
		} else {
			require.NotContains(t, with.BGP.VIPs, vip)
			_, owned := with.Layer2[vip]
			require.True(t, owned || with.Silent[vip].Reason != "", vip)
		}
	}
}

func keys[K comparable, V any](m map[K]V) map[K]bool {
	all := map[K]bool{}
	for k := range m {
		all[k] = true
	}
	return all
}

// checkAttributes checks that the attributes are those that are asked for.
func checkAttributes(t *rapid.T, asked []*config.BGP, got plan.Attributes) {
	var preferences, meds []uint32
	var prepends []int
	communities := map[config.Community]bool{}
	for _, b := range asked {
		for i, c := range b.Communities {
			communities[c] = true
			require.Contains(t, got.LargeCommunities, b.LargeCommunities[i])
		}
		if b.LocalPreference != nil {
			preferences = append(preferences, *b.LocalPreference)
		}
		if b.MED != nil {
			meds = append(meds, *b.MED)
		}
		if b.Prepend > 0 {
			prepends = append(prepends, b.Prepend)
		}
	}
	require.ElementsMatch(t, slices.Collect(maps.Keys(communities)), got.Communities)
	require.True(t, slices.IsSorted(got.Communities))
	require.Len(t, got.LargeCommunities, len(got.Communities))
	require.Equal(t, len(preferences) > 0, got.LocalPreference != nil)
	require.Equal(t, len(meds) > 0, got.MED != nil)
	if len(preferences) > 0 {
		require.Equal(t, slices.Max(preferences), *got.LocalPreference)
	}
	if len(meds) > 0 {
		require.Equal(t, slices.Min(meds), *got.MED)
	}
	if len(prepends) > 0 {
		require.Equal(t, slices.Min(prepends), got.Prepend)
	} else {
		require.Zero(t, got.Prepend)
	}
}
