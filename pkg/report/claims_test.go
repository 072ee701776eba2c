package report_test

import (
	"maps"
	"net/netip"
	"slices"
	"testing"

	"github.com/lodestone-lb/lodestone/pkg/report"
)

func TestClaimsHaveRoomForAllBuckets(t *testing.T) {
	t.Parallel()
	used := map[uint16]bool{}
	for i := range 1 << 14 {
		used[report.Bucket(netip.AddrFrom4([4]byte{10, 0, byte(i >> 8), byte(i)}))] = true
	}
	var c report.Claims
	all := slices.Sorted(maps.Keys(used))
	if len(all) != 1024 || all[1023] != 1023 {
		t.Fatalf("%d buckets are in use, up to %d", len(all), all[len(all)-1])
	}
	for _, b := range all {
		c.Set(b)
	}
	c.Clear(7)
	for _, b := range all {
		if c.Has(b) != (b != 7) {
			t.Errorf("bucket %d: %v", b, c.Has(b))
		}
	}
}
