package election_test

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"slices"
	"testing"

	"github.com/stretchr/testify/assert"
	"pgregory.net/rapid"

	"github.com/lodestone-lb/lodestone/speaker/election"
)

var shared = netip.MustParseAddr("203.0.113.7")

// host returns a hardware address; those of machines bought together differ in
// the last bytes alone.
func host(i int) (mac [6]byte) {
	raw := binary.BigEndian.AppendUint64(nil, 0x3cecef000000+uint64(i))
	copy(mac[:], raw[2:])
	return mac
}

// Every node knows the one node of each host, in whatever order it has heard of
// the nodes, and when one goes, only its hosts move.
func TestShareIsDisjointAndMovesLittle(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		names := rapid.SliceOfNDistinct(rapid.StringMatching(`[a-z]{1,3}-[0-9]`), 1, 9, rapid.ID[string]).Draw(t, "nodes")
		raw := [16]byte{}
		copy(raw[:], rapid.SliceOfN(rapid.Byte(), 16, 16).Draw(t, "vip"))
		vip := netip.AddrFrom16(raw)
		here, there := election.NewShare(vip, names), election.NewShare(vip, rapid.Permutation(names).Draw(t, "order"))
		lost := rapid.SampledFrom(names).Draw(t, "lost")
		rest := election.NewShare(vip, slices.DeleteFunc(slices.Clone(names), func(n string) bool { return n == lost }))
		for i := range 100 {
			mac := host(i)
			node := here.NodeOf(mac)
			if !slices.Contains(names, node) || there.NodeOf(mac) != node {
				t.Fatalf("host %x has %q here and %q there", mac, node, there.NodeOf(mac))
			}
			switch after := rest.NodeOf(mac); {
			case node != lost && after != node:
				t.Fatalf("%s was lost, host %x moved from %s to %s", lost, mac, node, after)
			case len(names) == 1 && after != "":
				t.Fatalf("host %x has %s of no nodes", mac, after)
			}
		}
	})
}

// The hosts of one VIP, and those of a lost node, are spread evenly, and another
// VIP spreads them otherwise.
func TestShareSpreads(t *testing.T) {
	t.Parallel()
	const hosts = 3000
	names := []string{"node-1", "node-2", "node-3", "node-4"}
	share, rest, other := election.NewShare(shared, names), election.NewShare(shared, names[1:]), election.NewShare(shared.Next(), names)
	count, heirs, same := map[string]int{}, map[string]int{}, 0
	for i := range hosts {
		mac := host(i)
		count[share.NodeOf(mac)]++
		if share.NodeOf(mac) == names[0] {
			heirs[rest.NodeOf(mac)]++
		}
		if other.NodeOf(mac) == share.NodeOf(mac) {
			same++
		}
	}
	for _, name := range names {
		assert.InDelta(t, hosts/4, count[name], hosts/40, name)
	}
	for _, name := range names[1:] {
		assert.InDelta(t, hosts/12, heirs[name], hosts/40, name)
	}
	assert.InDelta(t, hosts/4, same, hosts/40, "of another VIP")
}

// What the answer is must never change: speakers of different versions share a
// VIP while the DaemonSet is updated.
func TestKnownShare(t *testing.T) {
	t.Parallel()
	share, got := election.NewShare(shared, []string{"node-1", "node-2", "node-3"}), ""
	for i := range 24 {
		got += fmt.Sprint(share.NodeOf(host(i))[5:])
	}
	assert.Equal(t, "121212311333222333112332", got)
	assert.Empty(t, election.NewShare(shared, nil).NodeOf(host(1)))
}
