package ipam

import (
	"math"
	"math/rand/v2"
	"net/netip"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// TestFreeSpaceAgainstBitmap takes and gives back at random, across a carry
// from the low to the high half of an address, with enough holes for several
// levels of the tree.
func TestFreeSpaceAgainstBitmap(t *testing.T) {
	const size = 8192
	first := num{7, math.MaxUint64 - size/2}
	nth := func(i int) num {
		n := num{first.hi, first.lo + uint64(i)}
		if n.lo < first.lo {
			n.hi++
		}
		return n
	}
	s := newFreeSpace([]run{{first, nth(size - 1)}})
	var used [size]bool
	random := rand.New(rand.NewPCG(1, 2))
	lowest := func() int {
		for i := range used {
			if !used[i] {
				return i
			}
		}
		return size
	}
	for step := range 300_000 {
		i := random.IntN(size)
		switch {
		case used[i]:
			s.put(nth(i))
			used[i] = false
		case step%100 == 0:
			i = lowest()
			require.Equal(t, nth(i), s.takeLowest())
			used[i] = true
		default:
			if !s.take(nth(i)) || s.take(nth(i)) {
				t.Fatalf("%d is free: it can be taken, and once", i)
			}
			used[i] = true
		}
	}
	s.joinBack()
	assert.Greater(t, s.runs.Len(), size/5)
	for i := range used {
		if used[i] {
			s.put(nth(i))
		}
	}
	s.joinBack()
	r, _ := s.runs.Min()
	assert.Equal(t, run{first, nth(size - 1)}, r)
	assert.Equal(t, 1, s.runs.Len())
	assert.Equal(t, float64(size), r.size())
	for range size {
		s.takeLowest()
	}
	assert.True(t, s.empty())
}

func TestFreeSpaceAtTheEndsOfTheNumbers(t *testing.T) {
	zero, last := num{}, num{math.MaxUint64, math.MaxUint64}
	s := newFreeSpace([]run{{zero, zero}, {last, last}})
	require.Equal(t, zero, s.takeLowest())
	require.Equal(t, last, s.takeLowest())
	assert.True(t, s.empty())
	s.put(last)
	s.put(zero)
	s.joinBack()
	assert.Equal(t, 2, s.runs.Len())
	assert.False(t, s.take(num{1, 1}))
}

func TestNumbersAreAddresses(t *testing.T) {
	for _, text := range []string{"0.0.0.0", "198.18.0.255", "255.255.255.255", "::", "2001:db8::ffff:ffff:ffff:ffff", "ffff::1"} {
		a := netip.MustParseAddr(text)
		assert.Equal(t, a, numOf(a).addr(familyOf(a)))
	}
}
