package direct

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/lodestone-lb/lodestone/speaker/plan"
)

func backends(names string, open int) (all []plan.Backend) {
	for name := range strings.FieldsSeq(names) {
		all = append(all, plan.Backend{Node: name, Open: open})
	}
	return all
}

func nodes(n int) string {
	var names []string
	for i := range n {
		names = append(names, fmt.Sprintf("n%02d", i))
	}
	return strings.Join(names, " ")
}

// named is a table with the names of the nodes.
type named []struct {
	open string
	ring []string
}

func newNamed(backends []plan.Backend, size int) named {
	t := newTable(backends, size)
	all := make(named, len(t.buckets))
	for i, b := range t.buckets {
		all[i].open = t.nodes[b.open]
		for _, n := range b.ring {
			all[i].ring = append(all[i].ring, t.nodes[n])
		}
	}
	return all
}

// walk is after with names.
func (t *table) walk() func(bucket int, node string, isSilent func(string) bool) string {
	members, silent := map[string]*member{}, make([]bool, len(t.nodes))
	return func(bucket int, node string, isSilent func(string) bool) string {
		if members[node] == nil {
			m := t.member(node)
			members[node] = &m
		}
		for i, name := range t.nodes {
			silent[i] = isSilent(name)
		}
		if next := t.after(bucket, members[node], silent); next >= 0 {
			return t.nodes[next]
		}
		return ""
	}
}

// shares returns each node's part of the buckets against its weight.
func shares(t named, all []plan.Backend) (worst float64) {
	count, sum := map[string]int{}, 0
	for _, bucket := range t {
		count[bucket.open]++
	}
	for _, b := range all {
		sum += b.Open
	}
	for _, b := range all {
		due := float64(len(t)*b.Open) / float64(sum)
		worst = max(worst, math.Abs(float64(count[b.Node])-due)/due)
	}
	return worst
}

func TestEachNodeHasItsShare(t *testing.T) {
	t.Parallel()
	for n := 2; n <= 10; n++ {
		all := backends(nodes(n), 1)
		require.Less(t, shares(newNamed(all, clusterSize), all), 0.06, "%d nodes", n)
	}
	weighted := []plan.Backend{{Node: "a", Open: 1}, {Node: "b", Open: 4}, {Node: "c", Open: 2, Draining: 3}}
	require.Less(t, shares(newNamed(weighted, clusterSize), weighted), 0.07)
	many := []plan.Backend{{Node: "a", Open: 1000}, {Node: "b", Open: 500}}
	require.Less(t, shares(newNamed(many, clusterSize), many), 0.06)
}

// Tables have few buckets, so shares depend on which nodes they are.
func TestSharesOfSets(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		size, nodes, sets int
		median, most      float64
	}{{localSize, 2, 75, 0.02, 0.06}, {localSize, 3, 75, 0.04, 0.1}, {localSize, 5, 75, 0.07, 0.16}, {localSize, 10, 75, 0.13, 0.25},
		{clusterSize, 10, 15, 0.05, 0.08}} {
		var worst []float64
		for set := range test.sets {
			var names []string
			for i := range test.nodes {
				names = append(names, fmt.Sprintf("s%03d-%02d", set, i))
			}
			all := backends(strings.Join(names, " "), 1)
			worst = append(worst, shares(newNamed(all, test.size), all))
		}
		slices.Sort(worst)
		median, most := worst[test.sets/2], worst[test.sets-1]
		t.Logf("%d nodes: one differs from its share by %.3f in half of the sets, and by %.3f in the worst", test.nodes, median, most)
		require.Less(t, median, test.median)
		require.Less(t, most, test.most)
	}
}

// A node that leaves gives its buckets to others, a node that joins takes its own from others,
// and no other bucket moves.
func TestOnlyWhatHasToMoveMoves(t *testing.T) {
	t.Parallel()
	before, after := newNamed(backends("a b c d e f", 1), clusterSize), newNamed(backends("a b c d e f g", 1), clusterSize)
	for i := range before {
		if after[i].open != "g" {
			require.Equal(t, before[i].open, after[i].open)
		}
	}
	drained := backends("a b c d e f g", 1)
	drained[6] = plan.Backend{Node: "g", Draining: 1}
	for i, b := range newNamed(drained, clusterSize) {
		require.Equal(t, before[i].open, b.open, "g takes no new connections")
		require.Equal(t, after[i].ring, b.ring)
	}
}

// A connection is found wherever it began: if up to five nodes in a row join, drain and return,
// each node that had a bucket is in its ring.
func TestEarlierHoldersAreInTheRing(t *testing.T) {
	t.Parallel()
	for seed := range uint64(20) {
		random := rand.New(rand.NewPCG(seed, 0))
		n := 2 + random.IntN(20)
		moving := random.Perm(n)[:min(n-1, 5)]
		all := backends(nodes(n), 1)
		var tables []named
		for range 10 {
			tables = append(tables, newNamed(all, localSize))
			b := &all[moving[random.IntN(len(moving))]]
			b.Open, b.Draining = b.Draining, b.Open
		}
		last := tables[len(tables)-1]
		for _, before := range tables {
			for i, b := range before {
				if b.open != last[i].open && !slices.Contains(last[i].ring, b.open) {
					t.Fatalf("seed %d: bucket %d of %s", seed, i, b.open)
				}
			}
		}
	}
}

// From each node a segment visits all others that answer, whichever takes new connections.
func TestTheRingVisitsAll(t *testing.T) {
	t.Parallel()
	for n := 1; n <= maxRing+2; n++ {
		all := backends(nodes(n), 3)
		for i := range all {
			all[i].Open, all[i].Draining = i%2, 3-i%2
		}
		next := newTable(all, localSize).walk()
		for i, b := range newNamed(all, localSize) {
			silent := func(node string) bool {
				return i%4 == 1 && node == b.ring[0] || i%4 == 2 && node == b.ring[len(b.ring)-1]
			}
			answering := slices.DeleteFunc(slices.Clone(b.ring), silent)
			for _, start := range all {
				visited := map[string]bool{}
				for node, hops := start.Node, 0; hops < len(b.ring) && node != ""; hops++ {
					if hops > 0 && silent(node) {
						t.Fatalf("%s is silent", node)
					}
					visited[node] = true
					node = next(i, node, silent)
					if node != "" && hops == len(b.ring)-1 {
						visited[node] = true
					}
				}
				for _, node := range answering {
					if !visited[node] {
						t.Fatalf("from %s %s is not reached in %v", start.Node, node, b.ring)
					}
				}
			}
		}
	}
	require.Empty(t, newNamed(nil, clusterSize))
}

// While an endpoint moves, some nodes use the old table and some the new one. A segment skips no node that is in both,
// whichever node it comes from.
func TestTheRingVisitsAllWhileTablesDiffer(t *testing.T) {
	t.Parallel()
	next := []func(int, string, func(string) bool) string{newTable(backends("a b c", 1), localSize).walk(),
		newTable(backends("b c d", 1), localSize).walk()}
	none := func(string) bool { return false }
	for i := range localSize {
		for by := range 16 { // which of the tables each of the four nodes has
			for _, start := range []string{"a", "b", "c", "d"} {
				visited := map[string]bool{}
				for node, hops := start, 0; hops < 4; hops++ {
					visited[node] = true
					node = next[by>>(node[0]-'a')&1](i, node, none)
				}
				require.True(t, visited["b"] && visited["c"], "bucket %d, tables %04b: from %s only %v", i, by, start, visited)
			}
		}
	}
}

func TestPlacesOfASlotDiffer(t *testing.T) {
	t.Parallel()
	seen, order := map[uint32]bool{}, newOrder("a", 1, clusterSize)
	for b := range uint32(clusterSize) {
		seen[order.place(b)] = true
	}
	require.Len(t, seen, clusterSize)
}

// Up to five nodes may join at once. When more do, connections are not found in the buckets
// whose first six places the joiners have. Those are as many as with a random ranking.
func TestManyJoinersAtOnce(t *testing.T) {
	t.Parallel()
	for _, test := range []struct{ before, joining int }{{1, 5}, {3, 5}, {4, 5}, {20, 5}, {3, 6}, {3, 9}, {3, 27}, {10, 10}, {10, 90}} {
		all := test.before + test.joining
		before, after := newNamed(backends(nodes(test.before), 1), clusterSize), newNamed(backends(nodes(all), 1), clusterSize)
		lost, expected := 0, 1.0
		for i, b := range after {
			if kept := before[i].open; !slices.Contains(b.ring, kept) {
				lost++
			}
		}
		for i := range maxRing {
			expected *= float64(max(0, test.joining-i)) / float64(all-i)
		}
		share := float64(lost) / float64(len(after))
		t.Logf("%d to %d nodes: %.2f %% are not found", test.before, all, 100*share)
		require.InDelta(t, expected, share, 0.02)
		if test.joining < maxRing {
			require.Zero(t, lost)
		}
	}
}
