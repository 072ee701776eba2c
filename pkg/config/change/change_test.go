package change

import (
	"fmt"
	"math/bits"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go4.org/netipx"

	"github.com/lodestone-lb/lodestone/pkg/config"
)

const header = "apiVersion: lodestone.io/v1alpha1\nkind: Config\n"

func parsed(t testing.TB, pools string) *config.Config {
	t.Helper()
	c, err := config.Parse([]byte(header + "pools:\n" + pools))
	require.NoError(t, err)
	return c
}

// sentences are what people read of an edit, with the kinds before them.
func sentences(changes []Change) []string {
	var all []string
	for _, c := range changes {
		all = append(all, string(c.Kind)+": "+c.Message)
	}
	return all
}

func TestDiff(t *testing.T) {
	const a, b, c = "- {name: a, addresses: [203.0.113.0/26]}\n", "- {name: b, addresses: [198.51.100.0/27]}\n",
		"- {name: c, addresses: [192.0.2.1]}\n"
	pool := func(settings string) string {
		return "- {name: a, addresses: [203.0.113.0/26], " + settings + "}\n"
	}
	tests := map[string]struct {
		old, edited string
		want        []string
	}{
		"nothing": {a + b, a + b, nil},
		"only written differently": {
			"- {name: a, addresses: [203.0.113.0/26], namespaces: [x, y]}\n",
			"- {name: a, addresses: [203.0.113.1-203.0.113.9, 203.0.113.10-203.0.113.62], namespaces: [y, x], priority: 0, state: " +
				"active, autoAssign: true, serviceSelector: {}}\n",
			nil,
		},
		"leases added and removed": {a + "- {name: old, dhcp: {interface: eth1}}\n", a + "- {name: new, dhcp: {interface: eth2}}\n",
			[]string{
				`Added: pool "new" is added with leases on interface "eth2"`,
				`Removed: pool "old" is removed with leases on interface "eth1": ` +
					"its leases are released, and Services lose those that they hold",
			}},
		"leases renamed": {"- {name: old, dhcp: {interface: eth1}}\n", "- {name: new, dhcp: {interface: eth1}}\n", []string{
			`Renamed: pool "old" is called "new" now: Services keep their addresses, annotations that name "old" find no pool`,
		}},
		"leased elsewhere": {"- {name: a, dhcp: {interface: eth1}}\n", "- {name: a, dhcp: {interface: eth2}}\n", []string{
			`Edited: pool "a": dhcp is interface "eth2", was interface "eth1": ` +
				"its leases are released, and Services lose those that they hold",
		}},
		"leased instead": {"- {name: a, addresses: [192.0.2.1]}\n", "- {name: a, dhcp: {interface: eth2}}\n", []string{
			`Shrunk: pool "a" loses 1 address (192.0.2.1): Services keep those that they hold`,
			`Edited: pool "a": dhcp is interface "eth2", was not set`,
		}},
		"added": {a, b + a, []string{`Added: pool "b" is added with 30 addresses (198.51.100.1-198.51.100.30)`}},
		"removed": {b + a, a, []string{`Removed: pool "b" is removed with 30 addresses (198.51.100.1-198.51.100.30): ` +
			"Services keep those that they hold"}},
		"in the order of the documents": {a + c, b + a, []string{
			`Added: pool "b" is added with 30 addresses (198.51.100.1-198.51.100.30)`,
			`Removed: pool "c" is removed with 1 address (192.0.2.1): Services keep those that they hold`,
		}},
		"renamed": {a + b, strings.ReplaceAll(a, "a,", "office,") + b, []string{
			`Renamed: pool "a" is called "office" now: Services keep their addresses, annotations that name "a" find no pool`,
		}},
		"renamed and drained": {a, "- {name: old, addresses: [203.0.113.0/26], state: draining}\n", []string{
			`Renamed: pool "a" is called "old" now: Services keep their addresses, annotations that name "a" find no pool`,
			`Drained: pool "old" is draining: it gives no new addresses, Services keep those that they hold`,
		}},
		"renamed and resized is another pool": {a, "- {name: office, addresses: [203.0.113.0/27]}\n", []string{
			`Added: pool "office" is added with 30 addresses (203.0.113.1-203.0.113.30)`,
			`Removed: pool "a" is removed with 62 addresses (203.0.113.1-203.0.113.62): Services keep those that they hold`,
		}},
		"widened": {a, "- {name: a, addresses: [203.0.113.0/25, \"2001:db8::/64\"]}\n", []string{
			`Widened: pool "a" gains about 1.8e+19 addresses (203.0.113.63-203.0.113.126, 2001:db8::/64)`,
		}},
		"shrunk by exclusion": {a, "- {name: a, addresses: [203.0.113.0/26], exclude: [203.0.113.8/29, 203.0.113.1]}\n", []string{
			`Shrunk: pool "a" loses 9 addresses (203.0.113.1, 203.0.113.8/29): Services keep those that they hold`,
		}},
		"moved to other addresses": {"- {name: a, addresses: [192.0.2.1]}\n", "- {name: a, addresses: [192.0.2.2]}\n", []string{
			`Widened: pool "a" gains 1 address (192.0.2.2)`,
			`Shrunk: pool "a" loses 1 address (192.0.2.1): Services keep those that they hold`,
		}},
		"many parts": {"- {name: a, addresses: [192.0.2.1]}\n",
			"- {name: a, addresses: [192.0.2.1, 192.0.2.3, 192.0.2.5, 192.0.2.7, 192.0.2.9, 192.0.2.11, 192.0.2.13, 192.0.2.15]}\n",
			[]string{
				`Widened: pool "a" gains 7 addresses (192.0.2.3, 192.0.2.5, 192.0.2.7, 192.0.2.9, 192.0.2.11 and 2 more)`,
			}},
		"split": {a, "- {name: a, addresses: [203.0.113.1-203.0.113.9]}\n- {name: b, addresses: [203.0.113.10-203.0.113.62]}\n", []string{
			`Shrunk: pool "a" loses 53 addresses (203.0.113.10-203.0.113.62): Services keep those that they hold`,
			`Added: pool "b" is added with 53 addresses (203.0.113.10-203.0.113.62)`,
		}},
		"the last comes first": {a + b + c, c + a + b, []string{`Moved: pool "c" is tried first now`}},
		"the first comes last": {a + b + c, b + c + a, []string{`Moved: pool "a" is tried after pool "c" now`}},
		"another priority": {a + b, pool("priority: 5") + b,
			[]string{`Moved: pool "a" has priority 5, was 0: it is tried after pool "b"`}},
		"another priority in the same order": {
			a + b, pool("priority: -5") + b, []string{`Moved: pool "a" has priority -5, was 0: it is tried first`},
		},
		"priority without autoAssign": {
			pool("autoAssign: false") + b, pool("autoAssign: false, priority: 3") + b,
			[]string{`Moved: pool "a" has priority 3, was 0: without autoAssign it has no effect`},
		},
		"order without autoAssign": {pool("autoAssign: false") + b, b + pool("autoAssign: false"), nil},
		"autoAssign":               {a + b, pool("autoAssign: false") + b, []string{`Edited: pool "a": autoAssign is false, was true`}},
		"drained": {a, pool("state: draining"),
			[]string{`Drained: pool "a" is draining: it gives no new addresses, Services keep those that they hold`}},
		"reopened": {pool("state: draining"), a, []string{`Reopened: pool "a" is active again: it gives new addresses`}},
		"restricted": {a, pool("namespaces: [x, y], namespaceSelector: {matchLabels: {team: a}}, serviceSelector: {matchExpressions: " +
			"[{key: tier, operator: NotIn, values: [db, mail]}, {key: old, operator: DoesNotExist}]}, namespaceQuota: 4, requesters: " +
			"[], keepFor: 1h"), []string{
			`Edited: pool "a": namespaces is [x, y], was not set`,
			`Edited: pool "a": namespaceSelector is team=a, was not set`,
			`Edited: pool "a": serviceSelector is tier notin (db,mail),!old, was not set`,
			`Edited: pool "a": namespaceQuota is 4, was not set`,
			`Edited: pool "a": requesters is [], was not set`,
			`Edited: pool "a": keepFor is 1h0m0s, was 0s`,
		}},
		"lists": {
			pool("namespaces: [x, y, z], requesters: [x]"), pool("namespaces: [n1, n2, n3, n4, n5, n6, n7, x, z], requesters: []"),
			[]string{`Edited: pool "a": namespaces gains n1, n2, n3, n4, n5 and 2 more and loses y`,
				`Edited: pool "a": requesters loses x`},
		},
		"no longer restricted": {pool("namespaces: [x], requesters: []"), a, []string{
			`Edited: pool "a": namespaces is not set, was [x]`, `Edited: pool "a": requesters is not set, was []`,
		}},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			assert.Equal(t, tt.want, sentences(Diff(parsed(t, tt.old), parsed(t, tt.edited))))
		})
	}
}

// The first document of a controller adds all its pools.
func TestDiffOfNothing(t *testing.T) {
	c := parsed(t, "- {name: a, addresses: [192.0.2.1]}\n- {name: b, addresses: [192.0.2.2]}\n")
	added, removed := Diff(nil, c), Diff(c, nil)
	require.Len(t, added, 2)
	require.Len(t, removed, 2)
	for i, name := range []string{"a", "b"} {
		assert.Equal(t, [2]string{name, string(Added)}, [2]string{added[i].Pool, string(added[i].Kind)})
		assert.Equal(t, [2]string{name, string(Removed)}, [2]string{removed[i].Pool, string(removed[i].Kind)})
	}
	assert.Empty(t, Diff(nil, nil))
}

// A long selector does not fill an Event.
func TestDiffIsShort(t *testing.T) {
	long := "- {name: a, addresses: [192.0.2.1], serviceSelector: {matchExpressions: [{key: k, operator: In, values: [v0"
	for i := range 500 {
		long += fmt.Sprintf(", v%d", i+1)
	}
	changes := Diff(parsed(t, "- {name: a, addresses: [192.0.2.1]}\n"), parsed(t, long+"]}]}}\n"))
	require.Len(t, changes, 1)
	assert.Less(t, len(changes[0].Message), 300)
}

// randomPools are some of eight pools, each under one of two names and with
// one of four sets of addresses.
func randomPools(r *rand.Rand) string {
	var b strings.Builder
	for _, i := range r.Perm(8)[:r.IntN(8)] {
		fmt.Fprintf(&b, "- {name: %c%d, addresses: [192.0.2.%d-192.0.2.%d], priority: %d, autoAssign: %t, state: %s}\n",
			'a'+i, r.IntN(2), 16*i+r.IntN(2), 16*i+8+r.IntN(2), r.IntN(3), r.IntN(4) > 0, []string{"active", "draining"}[r.IntN(2)])
	}
	return b.String()
}

// The changes are all that happened: applied to the old addresses they
// give the new ones, and the way back is the reverse.
func TestDiffAccountsForEveryAddress(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	kinds := map[Kind]bool{}
	for range 500 {
		const constant = "- {name: z, addresses: [10.0.0.1]}\n"
		old, edited := parsed(t, constant+randomPools(r)), parsed(t, constant+randomPools(r))
		require.Empty(t, Diff(old, old))
		there, back := Diff(old, edited), Diff(edited, old)
		require.Equal(t, addressesOf(edited), apply(addressesOf(old), there))
		require.Equal(t, addressesOf(old), apply(addressesOf(edited), back))
		for _, c := range there {
			kinds[c.Kind] = true
		}
	}
	assert.Len(t, kinds, 9, "every kind of change came up")
}

// addressesOf are the addresses that each pool hands out.
func addressesOf(c *config.Config) map[string][]netipx.IPRange {
	all := map[string][]netipx.IPRange{}
	for _, p := range c.Pools {
		all[p.Name] = p.Free.Ranges()
	}
	return all
}

// apply applies the changes to the old addresses.
func apply(pools map[string][]netipx.IPRange, changes []Change) map[string][]netipx.IPRange {
	for _, c := range changes {
		var s netipx.IPSetBuilder
		for _, r := range pools[c.Pool] {
			s.AddRange(r)
		}
		switch c.Kind {
		case Removed:
			delete(pools, c.Pool)
			continue
		case Renamed:
			pools[c.Pool] = pools[c.Was]
			delete(pools, c.Was)
			continue
		case Added, Widened:
			s.AddSet(c.Addresses)
		case Shrunk:
			s.RemoveSet(c.Addresses)
		}
		left, _ := s.IPSet()
		pools[c.Pool] = left.Ranges()
	}
	return pools
}

// As few pools as possible count as moved, and without them the order is the
// same as before.
func TestFewestPoolsMove(t *testing.T) {
	r := rand.New(rand.NewPCG(3, 4))
	for range 300 {
		s := r.Perm(1 + r.IntN(9))
		var stay []int
		for _, i := range slices.Backward(longestIncreasing(s)) {
			stay = append(stay, s[i])
		}
		require.True(t, slices.IsSorted(stay), "%v of %v", stay, s)
		require.Len(t, stay, longestByTrying(s), "%v", s)
	}
	assert.Empty(t, longestIncreasing(nil))
}

// longestByTrying tries every subsequence.
func longestByTrying(s []int) int {
	longest := 0
	for set := range uint(1) << len(s) {
		var some []int
		for i, n := range s {
			if set&(1<<i) != 0 {
				some = append(some, n)
			}
		}
		if slices.IsSorted(some) {
			longest = max(longest, bits.OnesCount(set))
		}
	}
	return longest
}

// thousandPools has 1000 pools of 100 entries, which is about what a ConfigMap
// holds.
func thousandPools() []byte {
	var b strings.Builder
	b.WriteString(header + "pools:\n")
	for p := range 1000 {
		fmt.Fprintf(&b, "- name: p%d\n  addresses: [", p)
		for r := range 100 {
			fmt.Fprintf(&b, "1.%d.%d.%d,", p/100, p%100, r)
		}
		b.WriteString("]\n")
	}
	return []byte(b.String())
}

// BenchmarkDiffThousandPools compares documents of 1000 pools with 100 entries
// each: equal ones, and one in the reverse order in which every pool has lost
// an address and is closed to most namespaces.
func BenchmarkDiffThousandPools(b *testing.B) {
	old, err := config.Parse(thousandPools())
	require.NoError(b, err)
	edited := &config.Config{Pools: slices.Clone(old.Pools)}
	slices.Reverse(edited.Pools)
	for i := range edited.Pools {
		p := &edited.Pools[i]
		p.Free = minus(p.Free, only(p.Free.Ranges()[0].From()))
		p.Namespaces = []string{"edge"}
	}
	for _, c := range []struct {
		name string
		to   *config.Config
	}{{"equal", old}, {"all-changed", edited}} {
		b.Run(c.name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				Diff(old, c.to)
			}
		})
	}
}

func only(a netip.Addr) *netipx.IPSet {
	var s netipx.IPSetBuilder
	s.Add(a)
	set, _ := s.IPSet()
	return set
}
