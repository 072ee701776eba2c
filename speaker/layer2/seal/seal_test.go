package seal_test

import (
	"encoding/hex"
	"net/netip"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/lodestone-lb/lodestone/speaker/layer2/seal"
)

var (
	vip  = netip.MustParseAddr("198.18.0.100")
	here = [6]byte{2, 0, 0, 0, 0, 1}
	key  = seal.Key("the key of this cluster, 32 bytes")
)

// A seal that differs in anything is not valid.
func TestValid(t *testing.T) {
	t.Parallel()
	s := key.Seal(vip, here, true)
	found, ok := seal.Find(append(s[:], 0, 0, 0, 0))
	require.True(t, ok, "padding follows it")
	assert.True(t, key.Valid(found, vip, here))
	assert.False(t, key.Valid(s, vip.Next(), here), "of another VIP")
	assert.False(t, key.Valid(s, vip, [6]byte{2, 0, 0, 0, 0, 2}), "of another host")
	assert.False(t, seal.Key("another cluster's").Valid(s, vip, here))
	assert.False(t, key.Valid(seal.Seal{}, vip, here))
	for i := range s {
		forged := s
		forged[i] ^= 1
		assert.False(t, key.Valid(forged, vip, here), "byte %d", i)
	}
}

// Speakers of different versions have the same seals.
func TestFormat(t *testing.T) {
	t.Parallel()
	for want, s := range map[string]seal.Seal{
		"4c532000000000ba01ff6f72b410": key.Seal(vip, here, false),
		"4c5321000000006967273e43d71b": key.Seal(vip, here, true),
		"4c532101020304ab6014aed1fbe8": key.Numbered(vip, here, true, seal.Nonce{1, 2, 3, 4}),
		"4c532900000000692458664d95cc": key.Apart(vip, here, true),
		"4c53220102030472b8b8530822b5": key.Returned(vip, here, seal.Nonce{1, 2, 3, 4}),
	} {
		assert.Equal(t, want, hex.EncodeToString(s[:]))
	}
}

// The answer to a question has its number.
func TestNumbers(t *testing.T) {
	t.Parallel()
	n := seal.Nonce{1, 2, 3, 4}
	s := key.Numbered(vip, here, true, n)
	assert.Equal(t, n, s.Nonce())
	assert.True(t, key.Valid(s, vip, here))
	assert.False(t, s.Returned())
	assert.True(t, key.Returned(vip, here, n).Returned())
	assert.Equal(t, n, key.Returned(vip, here, n).Nonce())
	assert.Zero(t, key.Seal(vip, here, true).Nonce())
	other := key.Seal(vip, here, true)
	copy(other[3:], n[:])
	assert.False(t, key.Valid(other, vip, here), "a number cannot be added")
}

// While the key is replaced, speakers make seals with different keys. All accept them, and reject
// seals made with a key that is no longer used.
func TestKeys(t *testing.T) {
	t.Parallel()
	ring := func(keys ...string) seal.Keys {
		var all [][]byte
		for _, k := range keys {
			all = append(all, []byte(k))
		}
		return func() [][]byte { return all }
	}
	before, after, done := ring("old", "new"), ring("new", "old"), ring("new")
	for _, s := range []seal.Seal{before.First().Seal(vip, here, true), before.First().Apart(vip, here, false),
		after.First().Seal(vip, here, false), after.First().Apart(vip, here, false)} {
		assert.True(t, before.Valid(s, vip, here))
		assert.True(t, after.Valid(s, vip, here))
	}
	assert.Equal(t, seal.Key("new").Seal(vip, here, true), after.First().Seal(vip, here, true))
	assert.True(t, done.Valid(after.First().Seal(vip, here, true), vip, here))
	assert.False(t, done.Valid(before.First().Seal(vip, here, true), vip, here))
}

// Of any set of claims one outranks all others. It is of a node at home if
// there is one.
func TestOutranksIsAnOrder(t *testing.T) {
	t.Parallel()
	var all []seal.Seal
	for i := range 40 {
		all = append(all, key.Seal(vip, [6]byte{2, 0, 0, 0, 0, byte(i)}, i%10 == 0))
	}
	for i, a := range all {
		assert.False(t, a.Outranks(a))
		for j, b := range all {
			assert.Equal(t, i != j, a.Outranks(b) != b.Outranks(a), "%d and %d", i, j)
			if i%10 == 0 && j%10 != 0 {
				assert.True(t, a.Outranks(b), "home %d and %d", i, j)
			}
			for _, c := range all {
				assert.False(t, a.Outranks(b) && b.Outranks(c) && c.Outranks(a), "a circle")
			}
		}
	}
}

// Of any set of claims, one of a node that is apart outranks the others only if all are apart:
// then it is of the node at home, if there is one.
func TestWhoIsApartYields(t *testing.T) {
	t.Parallel()
	var all []seal.Seal
	for i := range byte(20) {
		hardware := [6]byte{2, 0, 0, 0, 0, i}
		s := key.Seal(vip, hardware, i%5 == 0)
		if i%2 == 0 {
			s = key.Apart(vip, hardware, i%5 == 0)
		}
		assert.True(t, key.Valid(s, vip, hardware))
		all = append(all, s)
	}
	for i, a := range all {
		for j, b := range all {
			assert.Equal(t, i != j, a.Outranks(b) != b.Outranks(a), "%d and %d", i, j)
			apart, other := i%2 == 0, j%2 == 0
			home, otherHome := i%5 == 0, j%5 == 0
			if !apart && other || apart == other && home && !otherHome {
				assert.True(t, a.Outranks(b), "%d and %d", i, j)
			}
		}
	}
}

// FuzzFind feeds what may follow an ARP packet.
func FuzzFind(f *testing.F) {
	s := key.Seal(vip, here, false)
	for n := range seal.Size + 1 {
		f.Add(s[:n])
	}
	f.Add(make([]byte, 18))
	f.Fuzz(func(t *testing.T, b []byte) {
		found, ok := seal.Find(b)
		if ok && string(found[:]) != string(b[:seal.Size]) || !ok && found != (seal.Seal{}) {
			t.Errorf("found %x in %x", found, b)
		}
		if key.Valid(found, vip, here) && found != key.Seal(vip, here, false) && found != key.Seal(vip, here, true) &&
			found != key.Apart(vip, here, false) && found != key.Apart(vip, here, true) {
			t.Errorf("forged %x", found)
		}
	})
}
