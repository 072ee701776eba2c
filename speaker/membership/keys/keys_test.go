package keys

import (
	"encoding/hex"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/lodestone-lb/lodestone/pkg/report"
)

func key(t testing.TB, text string) Key {
	return keyIn(t, text, "kubernetes")
}

func keyIn(t testing.TB, text, clusterID string) Key {
	s, err := Parse([]byte("the membership key " + text))
	require.NoError(t, err)
	k, err := s.Of(clusterID)
	require.NoError(t, err)
	return k
}

func TestParse(t *testing.T) {
	t.Parallel()
	for text, ok := range map[string]bool{"": false, " \n": false, "too short": false, "exactly 16 bytes": true,
		"two lines\nare one key": true} {
		_, err := Parse([]byte(text))
		assert.Equal(t, ok, err == nil, "%q: %v", text, err)
	}
	assert.Equal(t, key(t, "a"), key(t, "a\n"), "white space around counts")
	assert.Len(t, report.Report{Keys: Ring{key(t, "a"), key(t, "b")}.Marks()}.Tidy().Keys, 2, "the marks survive the encoding of a Lease")
}

// The keys for encryption, seals and heartbeats and the mark of a key are all different, and differ from those
// of another cluster and of another Secret.
func TestKeysAreApart(t *testing.T) {
	t.Parallel()
	seen := map[string]string{}
	for _, text := range []string{"a", "b"} {
		for _, id := range []string{"kubernetes", "fra1", "fra2"} {
			k := keyIn(t, text, id)
			mark, err := hex.DecodeString(k.Mark())
			require.NoError(t, err)
			for part, b := range map[string][]byte{"gossip": Ring{k}.Gossip()[0], "seal": Ring{k}.Seals()[0],
				"beats": Ring{k}.Beats()[0], "mark": mark} {
				require.NotEqual(t, make([]byte, len(b)), b)
				name := text + "/" + id + "/" + part
				require.Empty(t, seen[string(b[:markSize])], "%s is it, too", name)
				seen[string(b[:markSize])] = name
			}
		}
	}
}

func TestNext(t *testing.T) {
	t.Parallel()
	a, b, c := key(t, "a"), key(t, "b"), key(t, "c")
	marks := func(r ...Key) []string { return Ring(r).Marks() }
	for name, x := range map[string]struct {
		ring   Ring
		secret Key
		others [][]string
		want   Ring
	}{
		"nothing to do":                   {Ring{a}, a, [][]string{marks(a)}, Ring{a}},
		"alone":                           {Ring{a}, b, nil, Ring{b}},
		"the first to read it":            {Ring{a}, b, [][]string{marks(a), marks(a)}, Ring{a, b}},
		"one has not read it":             {Ring{a, b}, b, [][]string{marks(a, b), marks(a)}, Ring{a, b}},
		"all understand it":               {Ring{a, b}, b, [][]string{marks(a, b), marks(a, b)}, Ring{b, a}},
		"one does not use it yet":         {Ring{b, a}, b, [][]string{marks(b, a), marks(a, b)}, Ring{b, a}},
		"all use it":                      {Ring{b, a}, b, [][]string{marks(b, a), marks(b)}, Ring{b}},
		"one starts with it":              {Ring{a, b}, b, [][]string{marks(a, b), marks(b)}, Ring{b, a}},
		"and another one has not read it": {Ring{a, b}, b, [][]string{marks(a), marks(b)}, Ring{a, b}},
		"one starts from an old Secret":   {Ring{b, a}, b, [][]string{marks(b, a), marks(a)}, Ring{b, a}},
		"one reports none":                {Ring{a}, b, [][]string{marks(a, b), nil}, Ring{a, b}},
		"the next one before it is done":  {Ring{a, b}, c, [][]string{marks(a, b), marks(a)}, Ring{a, c, b}},
		"back before it is done":          {Ring{a, b}, a, [][]string{marks(a, b), marks(a)}, Ring{a}},
		"back when one uses it":           {Ring{b, a}, a, [][]string{marks(b, a), marks(b)}, Ring{b, a}},
	} {
		assert.Equal(t, x.want, x.ring.Next(x.secret, x.others), name)
	}
	many := Ring{a}
	for i := range 2 * report.MaxKeys {
		many = many.Next(key(t, fmt.Sprint(i)), [][]string{nil})
	}
	assert.Len(t, many, report.MaxKeys)
	assert.Equal(t, a, many[0], "the one in use is forgotten")
}

// fleet is speakers that read keys when they like, and read late what is on
// the others' Leases.
type fleet struct {
	secrets []Key
	read    []int // which of them each speaker has read
	rings   []Ring
	leases  []Ring   // on the Leases
	heard   [][]Ring // of them, by each speaker
	waits   []bool   // it has not joined
}

func newFleet(n int, secrets []Key) *fleet {
	f := &fleet{secrets, make([]int, n), make([]Ring, n), make([]Ring, n), make([][]Ring, n), make([]bool, n)}
	for i := range n {
		f.rings[i], f.leases[i] = Ring{secrets[0]}, Ring{secrets[0]}
	}
	for i := range n {
		f.heard[i] = slices.Clone(f.leases)
	}
	return f
}

func (f *fleet) turn(i int) {
	var others [][]string
	f.waits[i] = f.waits[i] && slices.ContainsFunc(f.heard[i], func(r Ring) bool { return !f.rings[i].Meets(r.Marks()) })
	for j, r := range f.heard[i] {
		if j != i {
			others = append(others, r.Marks())
		}
	}
	f.rings[i] = f.rings[i].Next(f.secrets[f.read[i]], others)
}

// restart has the speaker forget all but what it has read last. It lists the Leases, of
// which its own is from before.
func (f *fleet) restart(i int) {
	f.rings[i] = Ring{f.secrets[f.read[i]]}
	f.heard[i], f.waits[i] = slices.Clone(f.leases), true
}

// deaf returns two speakers that have joined of which one does not understand the other.
func (f *fleet) deaf() (listener, speaker int, ok bool) {
	for a := range f.rings {
		for b := range f.rings {
			if !f.waits[a] && !f.waits[b] && !slices.Contains(f.rings[b], f.rings[a][0]) {
				return b, a, true
			}
		}
	}
	return 0, 0, false
}

// Each speaker understands all others at every moment, and in the end all have one key.
func TestAllUnderstandEachOther(t *testing.T) {
	t.Parallel()
	secrets := []Key{key(t, "0"), key(t, "1"), key(t, "2"), key(t, "3")}
	last := len(secrets) - 1
	for seed := range uint64(1000) {
		r := rand.New(rand.NewPCG(seed, 0))
		n := 2 + r.IntN(4)
		f := newFleet(n, secrets)
		for step := range 300 {
			i, j := r.IntN(n), r.IntN(n)
			switch r.IntN(40) {
			case 0, 1, 2, 3:
				f.read[i] = min(f.read[i]+r.IntN(2), last)
			case 4:
				f.restart(i)
			case 5, 6, 7, 8, 9, 10, 11, 12:
				f.leases[i] = f.rings[i]
			case 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23:
				f.heard[i][j] = f.leases[j]
			default:
				f.turn(i)
			}
			if a, b, ok := f.deaf(); ok {
				t.Fatalf("seed %d, step %d: %d, of %s, does not understand %d, of %s", seed, step, a, f.rings[a], b, f.rings[b])
			}
		}
		for range 4 { // all have read the last one, and all is heard
			for i := range n {
				f.read[i] = last
				f.turn(i)
				f.leases[i] = f.rings[i]
				for j := range n {
					f.heard[j] = slices.Clone(f.leases)
				}
			}
		}
		for i := range n {
			require.Equal(t, Ring{secrets[last]}, f.rings[i], "seed %d", seed)
			require.False(t, f.waits[i], "seed %d", seed)
		}
	}
}
