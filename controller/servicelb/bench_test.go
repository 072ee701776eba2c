package servicelb

import (
	"context"
	"fmt"
	"net/netip"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go4.org/netipx"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/lodestone-lb/lodestone/controller/servicelb/ledger"
	"github.com/lodestone-lb/lodestone/ipam"
	"github.com/lodestone-lb/lodestone/pkg/annotation"
	"github.com/lodestone-lb/lodestone/pkg/clusterfacts"
	"github.com/lodestone-lb/lodestone/pkg/config"
	"github.com/lodestone-lb/lodestone/pkg/config/change"
	"github.com/lodestone-lb/lodestone/pkg/notify"
)

// A large cluster. Each pool has as many Services as any other.
const (
	manyPools    = 1000
	manyServices = 10_000
)

// pools is a document of many pools, a /24 each. The one in the middle begins
// with the given address of its /24; one more, "full", has a single address.
func pools(from int) string {
	text := "quarantine: 30s\npools:\n  - {name: full, addresses: [198.51.100.1/32], autoAssign: false}\n"
	for i := range manyPools {
		addresses := fmt.Sprintf("10.%d.%d.0/24", i/250, i%250)
		if i == manyPools/2 {
			addresses = fmt.Sprintf("10.%d.%d.%d-10.%d.%d.255", i/250, i%250, from, i/250, i%250)
		}
		text += fmt.Sprintf("  - {name: pool-%d, addresses: [%s]}\n", i, addresses)
	}
	return text
}

// nodes are the facts of a cluster of 1,000 nodes.
func nodes() *clusterfacts.Facts {
	facts := &clusterfacts.Facts{}
	for i := range 1000 {
		addr := netip.AddrFrom4([4]byte{192, 168, byte(i / 250), byte(i % 250)})
		facts.Forbidden = append(facts.Forbidden, clusterfacts.Forbidden{Range: netipx.IPRangeFrom(addr, addr), Why: "the address of a node"})
	}
	return facts
}

// number is the name of a Service and the address that it has.
func number(i int) (name string, addr netip.Addr) {
	pool := i % manyPools
	return fmt.Sprintf("default/web-%d", i), netip.AddrFrom4([4]byte{10, byte(pool / 250), byte(pool % 250), byte(10 + i/manyPools)})
}

// assigned makes Service number i what a controller before made of it.
func assigned(i int, addr netip.Addr) func(*corev1.Service) {
	return func(svc *corev1.Service) {
		pool := fmt.Sprintf("pool-%d", i%manyPools)
		annotated(annotation.AddressPool, pool)(svc)
		annotated(annotation.Assigned, addr.String())(svc)
		annotated(annotation.AssignedPools, pool)(svc)
		svc.Finalizers = []string{annotation.Finalizer}
		svc.Status.LoadBalancer.Ingress = ingress([]netip.Addr{addr})
		_, message := ledger.Verdict{Held: []ipam.Held{{Addr: addr, Pool: pool}}}.Condition()
		svc.Status.Conditions = []metav1.Condition{{
			Type: annotation.ConditionAllocated, Status: metav1.ConditionTrue, Reason: string(ledger.ReasonAllocated),
			Message: message,
		}}
	}
}

// large returns a controller that has just settled in a cluster of many
// pools and Services, of which as many as are waiting want the one address of
// the pool "full", and have been refused.
func large(b *testing.B, waiting int) *story {
	s := newStory(b)
	s.config.set(pools(0))
	s.around.facts = nodes()
	for i := range manyServices {
		name, addr := number(i)
		has := assigned(i, addr)
		if i < waiting {
			has = annotated(annotation.AddressPool, "full")
		}
		s.server.create(name, s.clock.Add(time.Duration(i)*time.Second), has)
	}
	s.restart()
	for s.once() {
	}
	for _, name := range s.server.names() {
		s.see(name)
	}
	wrote := s.server.patches
	require.Equal(b, waiting, wrote, "only what waits is written")
	for s.once() {
	}
	require.Equal(b, wrote, s.server.patches, "the controller has settled")
	require.Len(b, s.due(), max(0, waiting-1))
	return s
}

// accepting is an API server that takes every patch and does nothing.
type accepting struct{ patches int }

func (a *accepting) PatchStatus(context.Context, string, string, []byte) error {
	a.patches++
	return nil
}

// BenchmarkConfigEdit is all that a controller does about an edit that takes
// the addresses of ten Services out of their pool, or puts them back.
func BenchmarkConfigEdit(b *testing.B) {
	b.Run(fmt.Sprintf("pools=%d/services=%d", manyPools, manyServices), func(b *testing.B) {
		const affected = manyServices / manyPools
		s := large(b, 0)
		api := &accepting{}
		s.API = api
		documents := [][]byte{[]byte(head + pools(0)), []byte(head + pools(100))}
		b.ReportAllocs()
		for i := 1; b.Loop(); i++ {
			before, _ := s.config.Current()
			cfg, err := config.Parse(documents[i%2])
			if err != nil || len(change.Diff(before, cfg)) != 1 {
				b.Fatal(err, change.Diff(before, cfg))
			}
			s.config.put(cfg, nil)
			due := s.due()
			s.warn(s.machine().Overrun())
			if len(due) != affected {
				b.Fatalf("%d Services are due, want %d", len(due), affected)
			}
			for _, name := range due {
				if err := s.reconcile(b.Context(), name); err != nil {
					b.Fatal(err)
				}
			}
			if want := (i + 1) / 2 * affected; api.patches != want {
				b.Fatalf("%d patches, want %d", api.patches, want)
			}
		}
	})
}

// BenchmarkLedger is what the ledger does for 10,000 Services: about one that
// has not changed (Ensure; Reconcile with its object), about one that still
// waits (Refuse), when an address is freed and it is asked who waits (Wake),
// and at the start (Prime).
func BenchmarkLedger(b *testing.B) {
	for _, c := range []struct {
		name    string
		waiting int
		run     func(*testing.B, *story)
	}{
		{"Ensure", 0, benchEnsure},
		{"Refuse", manyServices / 2, benchRefuse},
		{"Reconcile", 0, benchReconcile},
		{"Wake/none", 0, benchWake},
		{"Wake/5000", manyServices / 2, benchWake},
		{"Free/5000", manyServices / 2, benchFree},
		{"Prime", 0, benchPrime},
	} {
		b.Run(c.name, func(b *testing.B) {
			s := large(b, c.waiting)
			b.ReportAllocs()
			c.run(b, s)
		})
	}
}

func benchEnsure(b *testing.B, s *story) {
	services := s.server.all()
	for i := 0; b.Loop(); i++ {
		if v := s.ensures(services[i%len(services)]); len(v.Held) != 1 || v.Refusal != nil || len(s.ledger.retry) > 0 {
			b.Fatal(v)
		}
	}
}

func benchRefuse(b *testing.B, s *story) {
	var services []*corev1.Service
	for _, name := range s.due() {
		services = append(services, s.server.get(name))
	}
	for i := 0; b.Loop(); i++ {
		if v := s.ensures(services[i%len(services)]); v.Refusal == nil || v.Refusal.Reason != ipam.PoolExhausted {
			b.Fatal(v)
		}
	}
}

func benchReconcile(b *testing.B, s *story) {
	names, before := s.server.names(), s.server.patches
	for i := 0; b.Loop(); i++ {
		if err := s.reconcile(b.Context(), names[i%len(names)]); err != nil {
			b.Fatal(err)
		}
	}
	require.Equal(b, before, s.server.patches)
}

func benchWake(b *testing.B, s *story) {
	n := len(s.due())
	for b.Loop() {
		s.warn(s.machine().Overrun())
		if len(s.due()) != n {
			b.Fatal(n)
		}
	}
}

// benchFree frees the address that others wait for: one gets it, and the one
// that had it waits with the others.
func benchFree(b *testing.B, s *story) {
	s.API = &accepting{}
	holder := func() string { // the oldest gets it, and the next one when that one is asked to leave
		for i := range 2 {
			if name, _ := number(i); len(s.holds(string(s.server.get(name).UID))) > 0 {
				return name
			}
		}
		return ""
	}
	for b.Loop() {
		before := holder()
		s.freeNow(before, "", false)
		s.clock = s.clock.Add(time.Minute)
		notify.Wake(s.ledger.retry)
		for s.once() {
		}
		if now := holder(); now == before || now == "" {
			b.Fatal(before, now)
		}
		s.ensures(s.server.get(before))
	}
}

// BenchmarkLackOfAFamily frees an address while 10,000 Services lack an IPv6 address that
// no pool has, and asks who gets something.
func BenchmarkLackOfAFamily(b *testing.B) {
	s := newStory(b)
	s.configure("quarantine: 0s\npools:\n  - {name: four, addresses: [10.0.0.0/16]}\n  - {name: six, addresses: ['2001:db8::1/128']}\n")
	s.creates("six", families(corev1.IPFamilyPolicySingleStack, corev1.IPv6Protocol))
	for i := range manyServices {
		s.server.create(fmt.Sprintf("default/web-%d", i), s.clock.Add(time.Duration(i)*time.Second),
			families(corev1.IPFamilyPolicyPreferDualStack, corev1.IPv4Protocol, corev1.IPv6Protocol))
	}
	for s.once() {
	}
	for _, name := range s.server.names() {
		s.see(name)
	}
	for s.once() {
	}
	b.ReportAllocs()
	for b.Loop() {
		if got, _ := s.machine().Retry(s.clock); len(got) > 0 {
			b.Fatal(got)
		}
	}
}

func benchPrime(b *testing.B, s *story) {
	services := s.server.all()
	var l *ledger.Ledger
	for b.Loop() {
		l = ledger.New(s.scope)
		start := ledger.Start{Situation: s.ledger.situation(), Services: services, NamespaceLabels: s.around.Labels}
		if duplicates := l.Prime(start, s.clock); len(duplicates) > 0 {
			b.Fatal(duplicates)
		}
	}
	for _, svc := range services {
		require.Equal(b, s.holds(string(svc.UID)), heldBy(l, string(svc.UID)))
	}
}
