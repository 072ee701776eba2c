package direct

import (
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/lodestone-lb/lodestone/pkg/testnet"
	"github.com/lodestone-lb/lodestone/speaker/plan"
)

func BenchmarkTable(b *testing.B) {
	for _, n := range []int{3, 10, 100} {
		b.Run(fmt.Sprint("nodes=", n), func(b *testing.B) {
			all := backends(nodes(n), 1)
			for b.Loop() {
				newTable(all, clusterSize)
			}
		})
	}
}

// BenchmarkChange measures the time from a plan with 1,000 VIPs until its rules are in force: for the
// first plan, when a node drains and returns, when one Service comes and goes, and when nothing has
// changed. With policy Cluster all nodes keep connections of all VIPs, in one table; with policy Local
// three nodes have the pods of each Service, and there are 64 such sets of nodes.
func BenchmarkChange(b *testing.B) {
	for _, policy := range []string{"Cluster", "Local"} {
		for _, n := range []int{10, 100} {
			for _, change := range []string{"first", "node", "service", "verify", "unchanged"} {
				b.Run(fmt.Sprintf("policy=%s/nodes=%d/%s", policy, n, change), func(b *testing.B) { benchmarkChange(b, policy, n, change) })
			}
		}
	}
}

func benchmarkChange(b *testing.B, policy string, n int, change string) {
	host := testnet.NewHost(b, "node")
	s := testnet.NewSegment(b, 0)
	s.Plug(host, "eth0")
	host.Address("eth0", "198.18.0.1/16")
	all := backends(nodes(n), 1)
	want := plan.Forwarding{Nodes: map[string][]netip.Addr{}}
	for i, node := range all {
		addr := netip.AddrFrom4([4]byte{198, 18, 1, byte(i)})
		want.Nodes[node.Node] = []netip.Addr{addr}
		host.Run("ip", "neigh", "add", addr.String(), "lladdr", fmt.Sprintf("02:00:00:00:01:%02x", i), "dev", "eth0", "nud", "permanent")
	}
	// services are those there are when the last node drains, or does not.
	services := func(drains bool) map[plan.LimitKey]plan.Direct {
		now := slices.Clone(all)
		if drains {
			now[n-1] = plan.Backend{Node: now[n-1].Node, Draining: 1}
		}
		var sets [][]plan.Backend
		for i := range 64 {
			first, second, third := now[i%n], now[(i+n/3)%n], now[(i+n/2)%n]
			first.Open *= 1 + i/n // as many pods
			sets = append(sets, []plan.Backend{first, second, third})
		}
		services := map[plan.LimitKey]plan.Direct{}
		for i := range 1000 {
			of := now
			if policy == "Local" {
				of = sets[i%len(sets)]
			}
			key := plan.LimitKey{VIP: netip.AddrFrom4([4]byte{203, 0, byte(i >> 8), byte(i)}), Service: fmt.Sprint(i)}
			services[key] = plan.Direct{Ports: web, Seed: uint32(i), Local: policy == "Local", Backends: of}
		}
		return services
	}
	ordinary, drains, fewer := services(false), services(true), services(false)
	delete(fewer, plan.LimitKey{VIP: netip.MustParseAddr("203.0.0.0"), Service: "0"})
	require.NoError(b, host.Do(func() error {
		d := New(Options{Log: slog.New(slog.DiscardHandler), Node: all[0].Node, Gateways: func() []netip.Addr { return nil }})
		before := kernelMemory(b)
		want.Services = ordinary
		d.take(want)
		require.True(b, d.shortcut.extend(time.Now(), d.have))
		used := kernelMemory(b) - before
		for i := 0; b.Loop(); i++ {
			want.Services = ordinary
			switch {
			case change == "first":
				d.have, d.shortcut.have = [2]*ruleset{}, [2]*ruleset{}
			case change == "verify":
				d.verify(true)
				continue
			case change == "unchanged":
				d.verify(false)
				continue
			case change == "node" && i%2 == 0:
				want.Services = drains
			case change == "service" && i%2 == 0:
				want.Services = fewer
			}
			d.take(want)
			b.StopTimer() // without the shortcut, which the next change takes from the Services that it affects
			d.shortcut.nextLook = time.Time{}
			d.shortcut.extend(time.Now(), d.have)
			b.StartTimer()
		}
		b.ReportMetric(float64(used), "kernel-KB")
		return d.err
	}))
}

// kernelMemory returns the memory of the kernel itself, in KB.
func kernelMemory(b *testing.B) (kb int) {
	text, err := os.ReadFile("/proc/meminfo")
	require.NoError(b, err)
	for line := range strings.Lines(string(text)) {
		if f := strings.Fields(line); f[0] == "Slab:" || f[0] == "VmallocUsed:" {
			n, err := strconv.Atoi(f[1])
			require.NoError(b, err)
			kb += n
		}
	}
	return kb
}
