package clients_test

import (
	"encoding/binary"
	"maps"
	"net/netip"
	"slices"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/lodestone-lb/lodestone/speaker/layer2/clients"
)

var vips = []netip.Addr{netip.MustParseAddr("203.0.113.1"), netip.MustParseAddr("2001:db8::1")}

func client(i int) clients.Client {
	c := clients.Client{Addr: netip.AddrFrom4([4]byte{198, 18, byte(i >> 8), byte(i)})}
	binary.BigEndian.PutUint32(c.Hardware[2:], uint32(i))
	return c
}

// A full book forgets who asked longest ago, and no one else.
func TestFullBook(t *testing.T) {
	t.Parallel()
	var b clients.Book
	for i := range clients.Max {
		b.Note(vips[i%2], client(i), clients.Elsewhere)
	}
	b.Note(vips[0], client(0), clients.Here) // it asks again
	b.Note(vips[1], client(clients.Max), clients.Here)
	known, sending := b.CountAll()
	assert.Equal(t, clients.Max, known)
	assert.Equal(t, 2, sending)
	known, sending = b.Count(vips[0])
	assert.Equal(t, clients.Max/2, known)
	assert.Equal(t, []clients.Client{client(0)}, b.Sending(vips[0]))
	assert.Equal(t, 1, sending)
	gained, lost := b.Divide(vips[1], func([6]byte) bool { return true })
	assert.Len(t, gained, clients.Max/2-1)
	assert.NotContains(t, gained, client(1), "it was the oldest")
	assert.Empty(t, lost)
	for _, vip := range vips {
		b.Forget(vip)
	}
	known, _ = b.CountAll()
	assert.Zero(t, known)
}

// The book does what a map of places does.
func TestBookIsAMapOfPlaces(t *testing.T) {
	t.Parallel()
	type key struct {
		vip netip.Addr
		clients.Client
	}
	rapid.Check(t, func(t *rapid.T) {
		var b clients.Book
		model := map[key]clients.Place{}
		of := func(vip netip.Addr, holds func(clients.Place) bool) (all []clients.Client) {
			for k, at := range model {
				if k.vip == vip && holds(at) {
					all = append(all, k.Client)
				}
			}
			return all
		}
		for range rapid.IntRange(1, 60).Draw(t, "steps") {
			vip := rapid.SampledFrom(vips).Draw(t, "vip")
			switch rapid.IntRange(0, 4).Draw(t, "step") {
			case 0:
				b.Forget(vip)
				maps.DeleteFunc(model, func(k key, _ clients.Place) bool { return k.vip == vip })
			case 1:
				parts := byte(rapid.IntRange(1, 3).Draw(t, "parts"))
				mine := func(h [6]byte) bool { return h[5]%parts == 0 }
				gained, lost := b.Divide(vip, mine)
				var wantGained, wantLost []clients.Client
				for k, at := range model {
					switch {
					case k.vip != vip:
					case mine(k.Hardware):
						if at != clients.Here {
							wantGained = append(wantGained, k.Client)
						}
						model[k] = clients.Here
					case at == clients.Here:
						wantLost = append(wantLost, k.Client)
						model[k] = clients.Lingering
					}
				}
				assert.ElementsMatch(t, wantGained, gained)
				assert.ElementsMatch(t, wantLost, lost)
			default:
				c, at := client(rapid.IntRange(0, 9).Draw(t, "client")), clients.Place(rapid.IntRange(0, 2).Draw(t, "place"))
				b.Note(vip, c, at)
				model[key{vip, c}] = at
			}
			sending := of(vip, func(p clients.Place) bool { return p != clients.Elsewhere })
			assert.ElementsMatch(t, sending, b.Sending(vip))
			known, n := b.Count(vip)
			require.Equal(t, []int{len(of(vip, func(clients.Place) bool { return true })), len(sending)}, []int{known, n})
			all, _ := b.CountAll()
			require.Equal(t, len(slices.Collect(maps.Keys(model))), all)
		}
	})
}
