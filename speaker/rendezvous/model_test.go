package rendezvous

import (
	"cmp"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"testing"

	"pgregory.net/rapid"
)

// model decides a whole block as the package comment describes it, without any
// optimization: the owners of its addresses, "" for those that nobody owns.
func model(nodes map[string]bool, first netip.Addr) (owners [blockSize]string) {
	var whole [blockSize]string
	modelFill(&whole, first, nodes)
	deputies := map[string][blockSize]string{}
	for i, owner := range whole {
		if owner == "" || nodes[owner] {
			owners[i] = owner
			continue
		}
		if _, known := deputies[owner]; !known {
			deputies[owner] = modelDeputies(whole, first, nodes, owner)
		}
		if owners[i] = deputies[owner][i]; !nodes[owners[i]] {
			addr := first.As16()
			addr[15] += byte(i)
			owners[i] = modelBest(netip.AddrFrom16(addr).Unmap(), nodes, func(n string) bool { return nodes[n] })
		}
	}
	return owners
}

// modelDeputies are the owners of a block when one node is lost.
func modelDeputies(owners [blockSize]string, first netip.Addr, nodes map[string]bool, lost string) [blockSize]string {
	for i, owner := range owners {
		if owner == lost {
			owners[i] = ""
		}
	}
	rest := maps.Clone(nodes)
	delete(rest, lost)
	modelFill(&owners, first, rest)
	return owners
}

func modelBest(addr netip.Addr, nodes map[string]bool, accept func(node string) bool) string {
	names := slices.DeleteFunc(slices.Sorted(maps.Keys(nodes)), func(n string) bool { return !accept(n) })
	if len(names) == 0 {
		return ""
	}
	return slices.MaxFunc(names, func(a, b string) int {
		return cmp.Compare(score(hashAddr(addr), hashName(a)), score(hashAddr(addr), hashName(b)))
	})
}

func modelFill(owners *[blockSize]string, first netip.Addr, nodes map[string]bool) {
	for i, addr := 0, first; i < blockSize; i, addr = i+1, addr.Next() {
		if owners[i] != "" {
			continue
		}
		count := 1
		for count <= i {
			count *= 2
		}
		has := func(node string, count int) int {
			n := 0
			for _, owner := range owners[:count] {
				if owner == node {
					n++
				}
			}
			return n
		}
		roomInBlock := func(n string) bool { return has(n, blockSize) < share(blockSize, len(nodes)) }
		owners[i] = modelBest(addr, nodes, func(n string) bool { return roomInBlock(n) && has(n, count) < share(count, len(nodes)) })
		if owners[i] == "" {
			owners[i] = modelBest(addr, nodes, roomInBlock)
		}
	}
}

// TestModel asks in random order, over a history of nodes that come, go, and
// are able or not: neither is to be seen in the answers.
func TestModel(t *testing.T) {
	t.Parallel()
	places := make([]int, blockSize)
	for i := range places {
		places[i] = i
	}
	rapid.Check(t, func(t *rapid.T) {
		nodes, e := map[string]bool{}, New(nil)
		for range rapid.IntRange(1, 5).Draw(t, "steps") {
			if rapid.Bool().Draw(t, "other nodes") {
				nodes = map[string]bool{}
				for i := range rapid.IntRange(0, 50).Draw(t, "nodes") {
					nodes[fmt.Sprint("node-", i)] = true
				}
			}
			for _, name := range slices.Sorted(maps.Keys(nodes)) {
				nodes[name] = rapid.IntRange(0, 4).Draw(t, name) > 0
			}
			e = e.With(nodes)
			for _, first := range []string{"203.0.113.32", "2001:db8::60"} {
				first := netip.MustParseAddr(first)
				want := model(nodes, first)
				offsets := rapid.Permutation(places).Draw(t, "offsets")
				for _, offset := range offsets[:rapid.IntRange(0, blockSize).Draw(t, "asked")] {
					addr := first
					for range offset {
						addr = addr.Next()
					}
					if got := e.Owner(addr); got != want[offset] {
						t.Fatalf("%s: owner %q, by the model %q; nodes %v", addr, got, want[offset], nodes)
					}
				}
			}
		}
	})
}

// TestRoomOnlyInTheBlock is a case that chance finds 3 times in 100,000: an
// address whose node is unable, when no able node has room among the first
// addresses and in the block.
func TestRoomOnlyInTheBlock(t *testing.T) {
	t.Parallel()
	nodes := map[string]bool{}
	for i := range 11 {
		nodes[fmt.Sprint("8117-", i)] = i != 2
	}
	e, a := New(nodes), netip.MustParseAddr("203.0.113.0")
	for _, want := range model(nodes, a) {
		if got := e.Owner(a); got != want {
			t.Errorf("%s: owner %q, by the model %q", a, got, want)
		}
		a = a.Next()
	}
}

func TestMemoryIsBounded(t *testing.T) {
	t.Parallel()
	e := New(map[string]bool{"n1": true, "n2": false})
	a := netip.MustParseAddr("10.0.0.0").As4()
	for i := range maxBlocks + 100 {
		a[1], a[2], a[3] = byte(i>>11), byte(i>>3), byte(i<<blockBits)
		if owner := e.Owner(netip.AddrFrom4(a)); owner != "n1" {
			t.Fatalf("%v: owner %q", a, owner)
		}
	}
	if len(e.blocks) != 100 || len(e.deputies) > maxBlocks {
		t.Errorf("%d blocks and %d deputies remembered", len(e.blocks), len(e.deputies))
	}
}
