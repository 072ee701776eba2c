package rendezvous_test

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"github.com/lodestone-lb/lodestone/speaker/rendezvous"
)

// cluster returns n able nodes, named from the seed.
func cluster(seed uint64, n int) map[string]bool {
	nodes := map[string]bool{}
	for i := range n {
		nodes[fmt.Sprintf("node-%d-%d", seed, i)] = true
	}
	return nodes
}

// pool returns n addresses from the first one of a random /24.
func pool(seed uint64, n int) []netip.Addr {
	a := netip.AddrFrom4([4]byte{10, byte(seed >> 8), byte(seed), 0})
	vips := make([]netip.Addr, n)
	for i := range vips {
		vips[i], a = a, a.Next()
	}
	return vips
}

func owners(nodes map[string]bool, vips []netip.Addr) map[netip.Addr]string {
	e, owners := rendezvous.New(nodes), map[netip.Addr]string{}
	for _, v := range vips {
		owners[v] = e.Owner(v)
	}
	return owners
}

// with returns the nodes with one of them able, unable, or new.
func with(nodes map[string]bool, name string, able bool) map[string]bool {
	nodes = maps.Clone(nodes)
	nodes[name] = able
	return nodes
}

// movedBetweenOthers counts the VIPs that went from one node to another,
// neither being the one that changed.
func movedBetweenOthers(before, after map[netip.Addr]string, changed string) int {
	moved := 0
	for vip, owner := range before {
		if owner != after[vip] && owner != changed && after[vip] != changed {
			moved++
		}
	}
	return moved
}

func drawCluster(t *rapid.T) map[string]bool {
	nodes := cluster(rapid.Uint64().Draw(t, "seed"), rapid.IntRange(1, 60).Draw(t, "nodes"))
	for _, name := range slices.Sorted(maps.Keys(nodes)) {
		nodes[name] = rapid.IntRange(0, 9).Draw(t, name) > 0
	}
	return nodes
}

func drawVIPs(t *rapid.T) []netip.Addr {
	return pool(rapid.Uint64Range(0, 1<<16-1).Draw(t, "pool"), rapid.IntRange(1, 256).Draw(t, "vips"))
}

func TestOwnerIsAnAbleNodeIfThereIsOne(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		nodes := drawCluster(t)
		able := 0
		for _, a := range nodes {
			if a {
				able++
			}
		}
		for vip, owner := range owners(nodes, drawVIPs(t)) {
			if able > 0 != nodes[owner] || able == 0 && owner != "" {
				t.Fatalf("%s: owner %q of %v", vip, owner, nodes)
			}
		}
	})
}

func TestOwnerDoesNotDependOnOtherVIPs(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		nodes, vips := drawCluster(t), drawVIPs(t)
		all := owners(nodes, vips)
		some := rapid.SliceOfDistinct(rapid.SampledFrom(vips), func(a netip.Addr) netip.Addr { return a }).Draw(t, "some")
		for vip, owner := range owners(nodes, some) {
			if owner != all[vip] {
				t.Fatalf("%s: owner %q, among others %q", vip, owner, all[vip])
			}
		}
	})
}

func TestLoadIsBounded(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		nodes := drawCluster(t)
		for name := range nodes {
			nodes[name] = true
		}
		able, count := len(nodes), 1<<rapid.IntRange(0, 5).Draw(t, "VIPs as a power of two")
		if able > 1 && rapid.Bool().Draw(t, "one is lost") {
			nodes[rapid.SampledFrom(slices.Sorted(maps.Keys(nodes))).Draw(t, "lost")] = false
			able, count = able-1, 32
		}
		if able == 0 {
			return
		}
		load := map[string]int{}
		for _, owner := range owners(nodes, pool(rapid.Uint64Range(0, 1<<16-1).Draw(t, "pool"), count)) {
			load[owner]++
			if most := (5*count + 4*able - 1) / (4 * able); load[owner] > most {
				t.Fatalf("%s owns %d of %d VIPs on %d nodes, at most %d", owner, load[owner], count, able, most)
			}
		}
	})
}

func TestOnlyTheVIPsOfALostNodeMoveAndTheyComeBack(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		nodes, vips := cluster(rapid.Uint64().Draw(t, "seed"), rapid.IntRange(2, 60).Draw(t, "nodes")), drawVIPs(t)
		lost := rapid.SampledFrom(slices.Sorted(maps.Keys(nodes))).Draw(t, "lost")
		before, during := owners(nodes, vips), owners(with(nodes, lost, false), vips)
		for vip, owner := range before {
			if owner != lost && during[vip] != owner {
				t.Fatalf("%s moved from %s to %s when %s was lost", vip, owner, during[vip], lost)
			}
		}
		if after := owners(with(nodes, lost, true), vips); !maps.Equal(before, after) {
			t.Fatalf("owners differ after %s came back", lost)
		}
	})
}

func TestOwnerAmong(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		nodes, vips := drawCluster(t), drawVIPs(t)
		names := rapid.SampledFrom(slices.Sorted(maps.Keys(nodes)))
		among := map[string]bool{}
		for range rapid.IntRange(0, 5).Draw(t, "endpoints") {
			among[names.Draw(t, "node with an endpoint")] = true
		}
		other := names.Draw(t, "node that gets an endpoint too")
		e, lost := rendezvous.New(nodes), rendezvous.New(with(nodes, other, false))
		for _, vip := range vips {
			some := append([]string{}, slices.Sorted(maps.Keys(among))...) // nil stands for all
			owner := e.OwnerAmong(vip, some)
			if later := lost.OwnerAmong(vip, some); owner != other && later != owner {
				t.Fatalf("%s: moved from %q to %q because %q was lost", vip, owner, later, other)
			}
			if owner != "" && (!among[owner] || !nodes[owner]) {
				t.Fatalf("%s: owner %q has no endpoint or is unable", vip, owner)
			}
			if later := e.OwnerAmong(vip, slices.Sorted(maps.Keys(with(among, other, true)))); later != owner && later != other {
				t.Fatalf("%s: moved from %q to %q because %q got an endpoint", vip, owner, later, other)
			}
			if everywhere := e.OwnerAmong(vip, slices.Sorted(maps.Keys(nodes))); everywhere != e.Owner(vip) && nodes[e.Owner(vip)] {
				t.Fatalf("%s: endpoints everywhere give another owner", vip)
			}
		}
	})
}

// TestKnownOwners pins the arithmetic: speakers of two versions must agree
// while one rolls out.
func TestKnownOwners(t *testing.T) {
	t.Parallel()
	e := rendezvous.New(map[string]bool{"n1": true, "n2": true, "n3": true})
	got := ""
	for _, vip := range []string{"203.0.113.0", "203.0.113.1", "203.0.113.2", "203.0.113.3", "203.0.113.31", "203.0.113.32", "255.255.255.255",
		"2001:db8::", "2001:db8::1", "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff"} {
		got += e.Owner(netip.MustParseAddr(vip)) + " "
	}
	if want := "n3 n2 n3 n2 n2 n3 n1 n2 n3 n3 "; got != want {
		t.Errorf("owners are %q, were %q", got, want)
	}
}

// TestFigures measures what the package comment claims.
func TestFigures(t *testing.T) {
	t.Parallel()
	r := rand.New(rand.NewPCG(1, 2))
	for _, n := range []int{3, 5, 10, 50} {
		for _, v := range []int{6, 30, 100} {
			const runs = 200
			var most, needed, extra, removed float64
			for range runs {
				nodes, vips := cluster(r.Uint64(), n), pool(r.Uint64(), v)
				before := owners(nodes, vips)
				load := map[string]int{}
				for _, owner := range before {
					load[owner]++
				}
				most += float64(slices.Max(slices.Collect(maps.Values(load))))
				added := owners(with(nodes, "added", true), vips)
				extra += float64(movedBetweenOthers(before, added, "added"))
				for _, owner := range added {
					if owner == "added" {
						needed++
					}
				}
				gone := slices.Sorted(maps.Keys(nodes))[0]
				during := owners(with(nodes, gone, false), vips)
				delete(nodes, gone)
				removed += float64(movedBetweenOthers(during, owners(nodes, vips), ""))
			}
			t.Logf("%2d nodes, %3d VIPs: most loaded node %.2f of fair share; node added: %.2f VIPs go to it and %.2f between others; lost "+
				"node deleted for good: %.2f",
				n, v, most/runs*float64(n)/float64(v), needed/runs, extra/runs, removed/runs)
			if extra > needed {
				t.Errorf("%d nodes, %d VIPs: %.2f moves between others for %.2f needed", n, v, extra/runs, needed/runs)
			}
		}
	}
}

// BenchmarkOwners decides 10,000 VIPs anew, and after the loss of a node. It
// is for comparing: the scattered VIPs are in as many blocks.
func BenchmarkOwners(b *testing.B) {
	for name, stride := range map[string]int{"dense": 1, "scattered": 100} {
		vips, a := make([]netip.Addr, 10_000), [4]byte{10}
		for i := range vips {
			n := i * stride
			a[1], a[2], a[3] = byte(n>>16), byte(n>>8), byte(n)
			vips[i] = netip.AddrFrom4(a)
		}
		for _, n := range []int{100, 1000} {
			nodes := cluster(1, n)
			lost := with(nodes, "node-1-7", false)
			e := rendezvous.New(nodes)
			ask := func(e *rendezvous.Electorate) {
				for _, vip := range vips {
					e.Owner(vip)
				}
			}
			ask(e)
			b.Run(fmt.Sprintf("%s/%d nodes/anew", name, n), func(b *testing.B) {
				for b.Loop() {
					ask(rendezvous.New(nodes))
				}
			})
			b.Run(fmt.Sprintf("%s/%d nodes/one lost", name, n), func(b *testing.B) {
				for b.Loop() {
					ask(e.With(lost))
				}
			})
		}
	}
}
