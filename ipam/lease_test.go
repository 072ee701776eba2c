package ipam

import (
	"testing"

	"github.com/stretchr/testify/assert"
)

// TestHoldersWithOneHash is about three UIDs that have the same hash, which no
// other test comes across.
func TestHoldersWithOneHash(t *testing.T) {
	x := holderIndex{map[uint64]*holder{}, map[string]*holder{}}
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
	assert.Empty(t, x.byHash)
	assert.Empty(t, x.others)
}
