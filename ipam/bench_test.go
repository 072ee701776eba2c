package ipam_test

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"runtime"
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/lodestone-lb/lodestone/ipam"
	"github.com/lodestone-lb/lodestone/pkg/config"
	"github.com/lodestone-lb/lodestone/pkg/testcost"
)

// BenchmarkAllocate is one Allocate of a new owner (a refused one in
// full-16) at a fill that stays as it is: releases follow, not timed.
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
			req := ipam.Request{Subject: config.Subject{Namespace: "default"}, Families: []ipam.Family{c.family}, RequireAll: true}
			now := start
			owners := make([]ipam.Owner, 256)
			for i := range owners {
				owners[i] = ownerNumber(1<<24 + i)
			}
			b.ReportAllocs()
			for i := 0; b.Loop(); i++ {
				req.Owner = owners[i%len(owners)]
				_, err := a.Allocate(req, now)
				if (err != nil) != (c.name == "full-16") {
					b.Fatal(err)
				}
				if i%256 == 255 {
					b.StopTimer()
					for _, o := range owners {
						a.Release(o.UID, now)
					}
					b.StartTimer()
				}
			}
		})
	}
}

// BenchmarkMix is one create or delete among so many Services, all timed.
func BenchmarkMix(b *testing.B) {
	b.Run("4096", func(b *testing.B) { mix(b, "198.18.0.0/16", 1<<12, false) })
	b.Run("10000", func(b *testing.B) { mix(b, "198.18.0.0/16", 10_000, false) })
	b.Run("32768", func(b *testing.B) { mix(b, "198.18.0.0/16", 1<<15, false) })
	b.Run("100000", func(b *testing.B) { mix(b, "10.0.0.0/14", 100_000, false) })
	b.Run("shared-32768", func(b *testing.B) { mix(b, "198.18.0.0/16", 1<<15, true) })
}

// mix is one create or delete in a fragmented pool with quarantine, of which the
// Services fill a half at most: in turns a random one is deleted and another one
// created. With sharing, two neighbours in the list have a key in common.
func mix(b *testing.B, addresses string, services int, sharing bool) {
	a := filled(b, addresses, services)
	a.Configure(ipam.Setup{Pools: []config.Pool{pool("lan", addresses)}, Quarantine: time.Second})
	type service struct {
		owner ipam.Owner
		terms *ipam.Sharing
	}
	// The first half exists, the second waits in a ring.
	all := make([]service, 2*services)
	for i := range all {
		all[i].owner = ownerNumber(i)
		if sharing {
			all[i].terms = &ipam.Sharing{Key: strconv.Itoa(i / 2), Ports: []ipam.Port{{Protocol: "TCP", Number: uint16(i)}}}
		}
	}
	req := ipam.Request{Subject: config.Subject{Namespace: "default"}, Families: []ipam.Family{ipam.IPv4}, RequireAll: true}
	random := rand.New(rand.NewPCG(1, 1))
	now := start
	b.ReportAllocs()
	for i := 0; b.Loop(); i++ {
		now = now.Add(100 * time.Microsecond)
		if i%2 == 0 {
			gone, next := &all[random.IntN(services)], &all[services+i/2%services]
			a.Release(gone.owner.UID, now)
			*gone, *next = *next, *gone
			req.Owner, req.Sharing = gone.owner, gone.terms
		} else if _, err := a.Allocate(req, now); err != nil {
			b.Fatal(err)
		}
	}
}

// BenchmarkMemory is what an allocator keeps for a Service with one address: next
// to each other, as pools give them, or each alone, as Services may ask for them.
// The texts of the Services are not counted.
func BenchmarkMemory(b *testing.B) {
	const services = 10_000
	for _, c := range []struct {
		name  string
		apart int
	}{{"neighbours", 1}, {"alone", 256}} {
		b.Run(c.name, func(b *testing.B) {
			owners := make([]ipam.Owner, services)
			for i := range owners {
				owners[i] = ownerNumber(i)
			}
			var kept int64
			for b.Loop() {
				before := testcost.Live()
				a := ipam.New()
				a.Configure(ipam.Setup{Pools: []config.Pool{pool("lan", "10.0.0.0/8")}, Quarantine: time.Second})
				for i, o := range owners {
					n := c.apart * i
					a.Restore(ipam.Holding{Owner: o, Addr: netip.AddrFrom4([4]byte{10, byte(n >> 16), byte(n >> 8), byte(n)}), Since: start})
				}
				kept = testcost.Live() - before
				runtime.KeepAlive(a)
			}
			b.ReportMetric(float64(kept)/services, "B/service")
			runtime.KeepAlive(owners)
		})
	}
}

// BenchmarkSharers is a Service that leaves an address which it shares with others, n in
// all, and joins them again. With ports, each has as many of them as are looked at.
func BenchmarkSharers(b *testing.B) {
	for _, c := range []struct {
		name     string
		n, ports int
	}{{"10", 10, 1}, {"1000", ipam.MaxSharers, 1}, {"1000-ports", ipam.MaxSharers, 64}} {
		b.Run(c.name, func(b *testing.B) {
			a := filled(b, "198.18.0.0/16", 0)
			req := ipam.Request{Subject: config.Subject{Namespace: "default"}, Families: []ipam.Family{ipam.IPv4}, RequireAll: true}
			for i := range c.n {
				req.Owner, req.Sharing = ownerNumber(i), &ipam.Sharing{Key: "k"}
				for p := range c.ports {
					req.Sharing.Ports = append(req.Sharing.Ports, ipam.Port{Protocol: "TCP", Number: uint16(i*c.ports + p)})
				}
				_, err := a.Allocate(req, start)
				require.NoError(b, err)
			}
			b.ReportAllocs()
			for b.Loop() {
				a.Release(req.Owner.UID, start)
				if _, err := a.Allocate(req, start); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// BenchmarkConfigure edits one of 1000 pools, with 10,000 addresses in use,
// and one of 10,000 forbidden ranges, of which 1,000 are in pools.
func BenchmarkConfigure(b *testing.B) {
	setup := ipam.Setup{Quarantine: time.Minute}
	a := ipam.New()
	for i := range 1000 {
		setup.Pools = append(setup.Pools, pool(fmt.Sprintf("pool-%d", i), fmt.Sprintf("10.%d.%d.0/24", i/250, i%250)))
		for j := range 10 {
			a.Restore(ipam.Holding{Owner: ownerNumber(10*i + j), Addr: netip.AddrFrom4([4]byte{10, byte(i / 250), byte(i % 250), byte(10 * j)}),
				Since: start})
			text := fmt.Sprintf("100.%d.%d.%d/32", 64+j, i/250, i%250)
			if j == 0 {
				text = fmt.Sprintf("10.%d.%d.250/32", i/250, i%250)
			}
			setup.Forbidden = append(setup.Forbidden, forbidden(text, "the address of a node"))
		}
	}
	random := rand.New(rand.NewPCG(1, 1))
	random.Shuffle(len(setup.Forbidden), func(i, j int) {
		setup.Forbidden[i], setup.Forbidden[j] = setup.Forbidden[j], setup.Forbidden[i]
	})
	b.ReportAllocs()
	for i := 0; b.Loop(); i++ {
		setup.Pools[500] = pool("pool-500", fmt.Sprintf("10.2.0.%d-10.2.0.255", i%2))
		setup.Forbidden[0].Why = []string{"one", "another"}[i%2]
		a.Configure(setup)
	}
}

func ownerNumber(i int) ipam.Owner {
	return ipam.Owner{UID: fmt.Sprintf("7b0d9e5e-6a3f-4c0e-9d53-%012d", i), Name: fmt.Sprintf("default/web-%d", i)}
}

// filled returns an allocator with one pool, without quarantine, in which
// random addresses among the first 2^24 are in use.
func filled(b *testing.B, addresses string, used int) *ipam.Allocator {
	a := ipam.New()
	a.Configure(ipam.Setup{Pools: []config.Pool{pool("lan", addresses)}})
	prefix := netip.MustParsePrefix(addresses)
	bits := min(24, prefix.Addr().BitLen()-prefix.Bits())
	for i, n := range rand.New(rand.NewPCG(1, 1)).Perm(1 << bits)[:used] {
		raw := prefix.Addr().AsSlice()
		for k, v := len(raw)-1, n; v > 0; k, v = k-1, v>>8 {
			raw[k] |= byte(v)
		}
		addr, _ := netip.AddrFromSlice(raw)
		_, ok := a.Restore(ipam.Holding{Owner: ownerNumber(i), Addr: addr, Since: start})
		require.True(b, ok)
	}
	return a
}
