package podroutes

import (
	"fmt"
	"net/netip"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/vishvananda/netlink"
	"go4.org/netipx"
	"pgregory.net/rapid"

	"github.com/lodestone-lb/lodestone/speaker/netstate"
	"github.com/lodestone-lb/lodestone/speaker/plan"
)

// drawEntry draws a route that somebody may have put into the kernel.
func drawEntry(t *rapid.T) entry {
	r := netlink.Route{
		Dst: netipx.PrefixIPNet(drawPrefix(t)), Gw: drawNextHop(t).AsSlice(), LinkIndex: rapid.IntRange(1, 3).Draw(t, "link"),
		Protocol: rapid.SampledFrom([]netlink.RouteProtocol{Protocol, Protocol, 2, 4}).Draw(t, "protocol"),
		Priority: rapid.SampledFrom([]int{metric, 0, 5}).Draw(t, "metric"),
	}
	if rapid.IntRange(0, 9).Draw(t, "multipath") == 0 {
		r.MultiPath = []*netlink.NexthopInfo{{LinkIndex: 2, Gw: r.Gw}}
	}
	return entryOf(r)
}

func drawPrefix(t *rapid.T) netip.Prefix {
	return netip.MustParsePrefix(fmt.Sprintf("10.244.%d.0/24", rapid.IntRange(1, 4).Draw(t, "cidr")))
}

func drawNextHop(t *rapid.T) netip.Addr {
	return netip.MustParseAddr(rapid.SampledFrom([]string{"198.18.0.1", "198.18.0.2", "198.18.1.2", "192.0.2.1"}).Draw(t, "via"))
}

func drawInterfaces(t *rapid.T) []netstate.Interface {
	all := []netstate.Interface{
		{Index: 1, Name: "lo", Loopback: true, Up: true, Addrs: []netip.Prefix{netip.MustParsePrefix("127.0.0.1/8")}},
		{Index: 2, Name: "eth0", Addrs: []netip.Prefix{netip.MustParsePrefix("198.18.0.9/24")}},
		{Index: 3, Name: "eth1", Addrs: []netip.Prefix{netip.MustParsePrefix("198.18.1.9/16")}},
	}
	for i := range all {
		all[i].Up = rapid.Bool().Draw(t, "up")
	}
	return all
}

// after returns the table after the steps, as the kernel does them: a
// replacement takes the place of the first with that destination and metric.
func after(table []entry, s steps) []entry {
	table = slices.Clone(table)
	for prefix, to := range s.puts {
		put := entryOf(netlink.Route{Dst: netipx.PrefixIPNet(prefix), Gw: to.via.AsSlice(), LinkIndex: to.link, Priority: metric,
			Protocol: Protocol})
		i := slices.IndexFunc(table, func(e entry) bool { return e.prefix == prefix && e.raw.Priority == metric })
		if s.replaces[prefix] {
			table[i] = put
		} else {
			table = append(table, put)
		}
	}
	for _, r := range s.removes {
		i := slices.IndexFunc(table, func(e entry) bool { return e.raw.Equal(r) })
		table = slices.Delete(table, i, i+1)
	}
	return table
}

func others(table []entry) []entry {
	return slices.DeleteFunc(slices.Clone(table), func(e entry) bool { return e.ours })
}

// Whatever is in the table, the routes of others stay. Wanted routes that are possible
// are there after one or two steps, and after that no step is needed.
func TestDecide(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		table := rapid.SliceOfN(rapid.Custom(drawEntry), 0, 8).Draw(t, "table")
		want := map[netip.Prefix]plan.PodRoute{}
		for range rapid.IntRange(0, 4).Draw(t, "wanted") {
			want[drawPrefix(t)] = plan.PodRoute{Node: "n", Via: drawNextHop(t)}
		}
		interfaces := drawInterfaces(t)
		begin := others(table)
		for range 2 {
			s := decide(want, interfaces, table)
			for prefix := range s.puts {
				require.False(t, slices.ContainsFunc(begin, func(e entry) bool { return e.prefix == prefix }), "%s is somebody else's", prefix)
			}
			for prefix := range want {
				_, kept := s.kept[prefix]
				_, put := s.puts[prefix]
				_, problem := s.problems[prefix]
				require.True(t, kept != put && !problem || problem && !kept && !put, "%s: %+v", prefix, s)
			}
			table = after(table, s)
			require.Equal(t, begin, others(table))
		}
		s := decide(want, interfaces, table)
		require.Empty(t, s.puts)
		require.Empty(t, s.removes)
		for prefix, to := range s.kept {
			require.True(t, netip.MustParsePrefix("198.18.0.0/15").Contains(to.via), "%s", to.via)
			require.True(t, slices.ContainsFunc(interfaces, func(i netstate.Interface) bool { return i.Index == to.link && i.Up && !i.Loopback }))
			require.NotContains(t, s.problems, prefix)
		}
	})
}
