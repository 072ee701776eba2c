package ipam_test

import (
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go4.org/netipx"

	"github.com/lodestone-lb/lodestone/ipam"
	"github.com/lodestone-lb/lodestone/pkg/config"
)

var start = time.Date(2030, 1, 1, 12, 0, 0, 0, time.UTC)

// pool is an automatic pool of prefixes and ranges; those that begin with "!"
// are withheld.
func pool(name string, addresses ...string) config.Pool {
	var free, withheld netipx.IPSetBuilder
	for _, text := range addresses {
		set := &free
		text, no := strings.CutPrefix(text, "!")
		if no {
			set = &withheld
		}
		if r, err := netipx.ParseIPRange(text); err == nil {
			set.AddRange(r)
		} else {
			set.AddPrefix(netip.MustParsePrefix(text))
		}
	}
	w, _ := withheld.IPSet()
	free.RemoveSet(w)
	f, _ := free.IPSet()
	return config.Pool{Name: name, AutoAssign: true, Free: f, Withheld: w}
}

func onRequest(p config.Pool) config.Pool { p.AutoAssign = false; return p }

func onlyFor(p config.Pool, namespaces ...string) config.Pool { p.Namespaces = namespaces; return p }

func priority(n int, p config.Pool) config.Pool { p.Priority = n; return p }

// story is one allocator that things happen to. Services are "namespace/name";
// "namespace/name#2" is the second incarnation of one.
type story struct {
	*testing.T
	*ipam.Allocator
	now time.Time
}

// begin begins a story with pools and a quarantine of 30s.
func begin(t *testing.T, pools ...config.Pool) *story {
	s := &story{t, ipam.New(), start}
	s.edit(pools...)
	return s
}

func (s *story) edit(pools ...config.Pool) { s.SetPools(pools, 30*time.Second) }

func (s *story) passes(d time.Duration) { s.now = s.now.Add(d) }

func owner(service string) ipam.Owner {
	name, _, _ := strings.Cut(service, "#")
	return ipam.Owner{UID: service, Name: name}
}

// wish changes the request of a Service that wants one IPv4 address.
type wish func(*ipam.Request)

func from(pools ...string) wish { return func(r *ipam.Request) { r.Pools = pools } }

func families(f ...ipam.Family) wish { return func(r *ipam.Request) { r.Families = f } }

func prefer(f ...ipam.Family) wish {
	return func(r *ipam.Request) { r.Families, r.RequireAll = f, false }
}

func at(addresses ...string) wish {
	return func(r *ipam.Request) {
		for _, a := range addresses {
			r.Addresses = append(r.Addresses, netip.MustParseAddr(a))
		}
	}
}

func (s *story) ask(service string, wishes ...wish) ([]ipam.Held, error) {
	o := owner(service)
	namespace, _, _ := strings.Cut(o.Name, "/")
	r := ipam.Request{Owner: o, Namespace: namespace, Families: []ipam.Family{ipam.IPv4}, RequireAll: true}
	for _, w := range wishes {
		w(&r)
	}
	return s.Allocate(r, s.now)
}

// gets lets a Service ask, and wants it to hold these: "pool/address".
func (s *story) gets(service, want string, wishes ...wish) {
	s.Helper()
	held, err := s.ask(service, wishes...)
	require.NoError(s, err)
	require.Equal(s, want, text(held))
	require.Equal(s, held, s.Holds(service))
	for _, h := range held {
		o, ok := s.OwnerOf(h.Addr)
		require.True(s, ok)
		require.Equal(s, owner(service), o)
	}
}

// refused lets a Service ask, and wants a refusal that changes nothing.
func (s *story) refused(service string, reason ipam.Reason, message string, wishes ...wish) *ipam.Refusal {
	s.Helper()
	before := s.Holds(service)
	held, err := s.ask(service, wishes...)
	require.Nil(s, held)
	require.EqualError(s, err, string(reason)+": "+message)
	require.Equal(s, before, s.Holds(service))
	var refusal *ipam.Refusal
	require.ErrorAs(s, err, &refusal)
	return refusal
}

func (s *story) frees(service string) { s.Release(service, s.now) }

func (s *story) holds(service, want string) {
	s.Helper()
	require.Equal(s, want, text(s.Holds(service)))
}

func (s *story) restores(service, addr string) {
	s.Helper()
	_, ok := s.Restore(owner(service), netip.MustParseAddr(addr))
	require.True(s, ok)
}

func text(held []ipam.Held) string {
	var words []string
	for _, h := range held {
		words = append(words, h.Pool+"/"+h.Addr.String())
	}
	return strings.Join(words, " ")
}
