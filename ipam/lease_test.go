package ipam

import (
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// TestTableAgainstMap adds and removes hashes at random, most of which have the
// last three slots of any table for their own: they fill one row of slots that
// goes on at the front.
func TestTableAgainstMap(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	hashes := make([]uint64, 100)
	for i := range hashes {
		if hashes[i] = random.Uint64(); i%3 > 0 {
			hashes[i] = uint64(i)<<32 | uint64(^uint32(0)-uint32(i%3))
		}
	}
	var table table[int]
	want := map[uint64]*int{}
	agree := func() {
		t.Helper()
		require.Equal(t, len(want), table.used)
		for _, h := range hashes {
			require.Same(t, want[h], table.get(h))
		}
	}
	for step := range 100_000 {
		// The number of hashes rises to all of them and falls to none.
		h, fills := hashes[random.IntN(len(hashes))], step/2000%2 == 0
		switch {
		case want[h] == nil || fills && random.IntN(3) == 0:
			if want[h] != nil || fills || random.IntN(8) == 0 {
				want[h] = new(int)
				table.set(h, want[h])
			}
		case !fills || random.IntN(8) == 0:
			delete(want, h)
			table.remove(h)
		}
		if step%50 == 0 {
			agree()
		}
	}
	for h := range want {
		table.remove(h)
	}
	clear(want)
	agree()
	for _, s := range table.slots {
		require.Zero(t, s)
	}
}

// TestHoldersWithOneHash is about three UIDs that have the same hash, which no
// other test comes across.
func TestHoldersWithOneHash(t *testing.T) {
	x := holderIndex{others: map[string]*holder{}}
	named := func(uid string) *holder { return &holder{identity: identity{owner: Owner{UID: uid}, uidHash: 7}} }
	a, b, c := named("a"), named("b"), named("c")
	finds := func(want ...*holder) {
		t.Helper()
		var found []*holder
		for _, uid := range []string{"a", "b", "c"} {
			if h := x.of(uid, 7); h != nil {
				found = append(found, h)
			}
		}
		assert.Equal(t, want, found)
	}
	x.add(a)
	x.add(b)
	finds(a, b)
	x.remove(a)
	finds(b)
	x.add(c)
	finds(b, c)
	x.remove(b)
	x.add(a)
	finds(a, c)
	x.remove(c)
	x.remove(a)
	assert.Zero(t, x.byHash.used)
	assert.Empty(t, x.others)
}

// TestUseIndexAgainstMap has addresses at the ends of pages and of both families'
// ranges, alone in a page and with neighbours, and such of both families that are
// the same number.
func TestUseIndexAgainstMap(t *testing.T) {
	var addrs []netip.Addr
	for _, text := range []string{
		"0.0.0.0", "198.18.0.15", "198.18.0.16", "198.18.0.17", "198.18.0.31", "198.18.1.15", "255.255.255.255",
		"::", "::1", "::c612:f", "2001:db8::f", "2001:db8::10", "2001:db8::1:f", "2001:db8:0:0:ffff:ffff:ffff:ffff", "2001:db8:0:1::",
		"ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff",
	} {
		addrs = append(addrs, netip.MustParseAddr(text))
	}
	x, want := useIndex{}, map[netip.Addr]use{}
	random := rand.New(rand.NewPCG(1, 2))
	for range 2000 {
		a := addrs[random.IntN(len(addrs))]
		if want[a] = (use{}); random.IntN(3) > 0 {
			want[a] = []use{{lease: &lease{addr: a}}, {rest: &rest{addr: a}}}[random.IntN(2)]
		}
		if p := x.page(a); want[a] != (use{}) {
			p.set(a, want[a])
		} else {
			p.set(a, use{lease: &lease{}})
			x.remove(p, a)
			delete(want, a)
		}
		for _, a := range addrs {
			require.True(t, want[a] == x.get(a), a)
		}
		require.ElementsMatch(t, slices.Collect(maps.Values(want)), slices.Collect(x.all()))
		require.Zero(t, x.get(netip.Addr{}))
	}
	for a := range want {
		x.remove(x.page(a), a)
	}
	assert.Empty(t, x, "pages without addresses in use")
}
