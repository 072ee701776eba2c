package ipam_test

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/lodestone-lb/lodestone/ipam"
	"github.com/lodestone-lb/lodestone/pkg/config"
)

// BenchmarkAllocate is one Allocate of a new owner (a refused one in
// full-16) at a fill that stays as it is: releases follow, not timed. Its mix
// is creates and deletes, all timed.
func BenchmarkAllocate(b *testing.B) {
	for _, c := range []struct {
		name, addresses string
		used            int
		family          ipam.Family
	}{
		{"empty-16", "198.18.0.0/16", 0, ipam.IPv4},
		{"half-16", "198.18.0.0/16", 1 << 15, ipam.IPv4},
		{"full-16", "198.18.0.0/16", 1 << 16, ipam.IPv4},
		{"8-million", "10.0.0.0/8", 1_000_000, ipam.IPv4},
		{"IPv6-64", "2001:db8::/64", 1_000_000, ipam.IPv6},
	} {
		b.Run(c.name, func(b *testing.B) {
			a := filled(b, c.addresses, c.used)
			req := ipam.Request{Namespace: "default", Families: []ipam.Family{c.family}, RequireAll: true}
			now := start
			b.ReportAllocs()
			for i := 0; b.Loop(); i++ {
				req.Owner.UID = uids[i%len(uids)]
				_, err := a.Allocate(req, now)
				if (err != nil) != (c.name == "full-16") {
					b.Fatal(err)
				}
				if i%256 == 255 {
					b.StopTimer()
					for _, uid := range uids {
						a.Release(uid, now)
					}
					b.StartTimer()
				}
			}
		})
	}
	b.Run("mix", mix)
}

// mix is one create or delete in a half-full and fragmented /16 with
// quarantine: in turns a random Service is deleted and created again.
func mix(b *testing.B) {
	a := filled(b, "198.18.0.0/16", 1<<15)
	a.SetPools([]config.Pool{pool("lan", "198.18.0.0/16")}, time.Second)
	req := ipam.Request{Namespace: "default", Families: []ipam.Family{ipam.IPv4}, RequireAll: true}
	names := make([]string, 1<<15)
	for i := range names {
		names[i] = strconv.Itoa(i)
	}
	random := rand.New(rand.NewPCG(1, 1))
	now := start
	b.ReportAllocs()
	for i := 0; b.Loop(); i++ {
		now = now.Add(100 * time.Microsecond)
		if i%2 == 0 {
			req.Owner.UID = names[random.IntN(len(names))]
			a.Release(req.Owner.UID, now)
		} else {
			if _, err := a.Allocate(req, now); err != nil {
				b.Fatal(err)
			}
		}
	}
}

// BenchmarkSetPools edits one of 1000 pools with 10,000 addresses in use.
func BenchmarkSetPools(b *testing.B) {
	var pools []config.Pool
	a := ipam.New()
	for i := range 1000 {
		pools = append(pools, pool(fmt.Sprintf("pool-%d", i), fmt.Sprintf("10.%d.%d.0/24", i/250, i%250)))
		for j := range 10 {
			a.Restore(ipam.Owner{UID: fmt.Sprint(i, j)}, netip.AddrFrom4([4]byte{10, byte(i / 250), byte(i % 250), byte(10 * j)}))
		}
	}
	b.ReportAllocs()
	for i := 0; b.Loop(); i++ {
		pools[500] = pool("pool-500", fmt.Sprintf("10.2.0.%d-10.2.0.255", i%2))
		a.SetPools(pools, time.Minute)
	}
}

var uids = func() (u [256]string) {
	for i := range u {
		u[i] = fmt.Sprintf("7b0d9e5e-6a3f-4c0e-9d53-%012d", i)
	}
	return u
}()

// filled returns an allocator with one pool, without quarantine, in which
// random addresses among the first 2^24 are in use by the owners "0", "1"...
func filled(b *testing.B, addresses string, used int) *ipam.Allocator {
	a := ipam.New()
	a.SetPools([]config.Pool{pool("lan", addresses)}, 0)
	prefix := netip.MustParsePrefix(addresses)
	bits := min(24, prefix.Addr().BitLen()-prefix.Bits())
	for i, n := range rand.New(rand.NewPCG(1, 1)).Perm(1 << bits)[:used] {
		raw := prefix.Addr().AsSlice()
		for k, v := len(raw)-1, n; v > 0; k, v = k-1, v>>8 {
			raw[k] |= byte(v)
		}
		addr, _ := netip.AddrFromSlice(raw)
		_, ok := a.Restore(ipam.Owner{UID: strconv.Itoa(i)}, addr)
		require.True(b, ok)
	}
	return a
}
