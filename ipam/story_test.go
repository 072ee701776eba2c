package ipam_test

import (
	"net/netip"
	"slices"
	"strconv"
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

func draining(p config.Pool) config.Pool { p.Draining = true; return p }

func quota(n int, p config.Pool) config.Pool { p.NamespaceQuota = n; return p }

func keeping(d time.Duration, p config.Pool) config.Pool { p.KeepFor = d; return p }

func priority(n int, p config.Pool) config.Pool { p.Priority = n; return p }

// reserved is a reservation for a Service.
func reserved(service string, addresses ...string) config.Reservation {
	r := config.Reservation{Service: service}
	for _, a := range addresses {
		r.Addresses = append(r.Addresses, netip.MustParseAddr(a))
	}
	return r
}

// forbidden forbids a range or prefix.
func forbidden(text, why string) ipam.Forbidden {
	if p, err := netip.ParsePrefix(text); err == nil {
		return ipam.Forbidden{Range: netipx.RangeOfPrefix(p), Why: why}
	}
	return ipam.Forbidden{Range: netipx.MustParseIPRange(text), Why: why}
}

// story is one allocator that things happen to. Services are "namespace/name";
// "namespace/name#2" is the second incarnation of one.
type story struct {
	*testing.T
	*ipam.Allocator
	now   time.Time
	setup ipam.Setup
}

// begin begins a story with pools and a quarantine of 30s.
func begin(t *testing.T, pools ...config.Pool) *story {
	s := &story{t, ipam.New(), start, ipam.Setup{Quarantine: 30 * time.Second}}
	s.edit(pools...)
	return s
}

// edit replaces the pools.
func (s *story) edit(pools ...config.Pool) {
	s.setup.Pools = pools
	s.Configure(s.setup)
}

// reserves replaces the reservations.
func (s *story) reserves(r ...config.Reservation) {
	s.setup.Reservations = r
	s.Configure(s.setup)
}

// forbids replaces what is forbidden.
func (s *story) forbids(f ...ipam.Forbidden) {
	s.setup.Forbidden = f
	s.Configure(s.setup)
}

// conflicts replaces what other hosts have.
func (s *story) conflicts(addresses ...string) {
	s.setup.Conflicted = nil
	for _, a := range addresses {
		s.setup.Conflicted = append(s.setup.Conflicted, netip.MustParseAddr(a))
	}
	s.Configure(s.setup)
}

// quarantines sets the quarantine of all pools.
func (s *story) quarantines(d time.Duration) {
	s.setup.Quarantine = d
	s.Configure(s.setup)
}

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

// shares shares under a key: "80 443/UDP", with the backends, if any.
func shares(key, ports string, backends ...string) wish {
	return func(r *ipam.Request) {
		r.Sharing = &ipam.Sharing{Key: key, Ports: portsOf(ports), Backends: strings.Join(backends, "")}
	}
}

func portsOf(text string) (ports []ipam.Port) {
	for _, word := range strings.Fields(text) {
		number, protocol, named := strings.Cut(word, "/")
		if !named {
			protocol = "TCP"
		}
		n, _ := strconv.ParseUint(number, 10, 16)
		ports = append(ports, ipam.Port{Protocol: protocol, Number: uint16(n)})
	}
	return ports
}

// with lets a Service share with other namespaces, too.
func with(namespaces ...string) wish {
	return func(r *ipam.Request) { r.Sharing.Namespaces = namespaces }
}

func avoiding(addresses ...string) wish {
	return func(r *ipam.Request) {
		for _, a := range addresses {
			r.Avoid = append(r.Avoid, netip.MustParseAddr(a))
		}
	}
}

func renumber(r *ipam.Request) { r.Renumber = true }

func labelled(labels string) wish {
	return func(r *ipam.Request) { r.Subject.Labels = labelsOf(labels) }
}

func inNamespaceLabelled(labels string) wish {
	return func(r *ipam.Request) { r.Subject.NamespaceLabels = labelsOf(labels) }
}

// labelsOf reads "a=b c=d".
func labelsOf(text string) map[string]string {
	labels := map[string]string{}
	for _, word := range strings.Fields(text) {
		k, v, _ := strings.Cut(word, "=")
		labels[k] = v
	}
	return labels
}

func request(service string, wishes ...wish) ipam.Request {
	o := owner(service)
	namespace, _, _ := strings.Cut(o.Name, "/")
	r := ipam.Request{
		Owner: o, Subject: config.Subject{Namespace: namespace},
		Families: []ipam.Family{ipam.IPv4}, RequireAll: true,
	}
	for _, w := range wishes {
		w(&r)
	}
	return r
}

func (s *story) ask(service string, wishes ...wish) ([]ipam.Held, error) {
	return s.Allocate(request(service, wishes...), s.now)
}

// gets lets a Service ask, and wants it to hold these: "pool/address".
func (s *story) gets(service, want string, wishes ...wish) {
	s.Helper()
	held, err := s.ask(service, wishes...)
	require.NoError(s, err)
	require.Equal(s, want, text(held))
	require.Equal(s, held, s.Holds(service))
	for _, h := range held {
		require.True(s, slices.Contains(s.HoldersOf(h.Addr), owner(service)), "%s is held by %v", h.Addr, s.HoldersOf(h.Addr))
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
	_, ok := s.Restore(ipam.Holding{Owner: owner(service), Addr: netip.MustParseAddr(addr), Since: s.now})
	require.True(s, ok)
}

func (s *story) addr(text string) netip.Addr { return netip.MustParseAddr(text) }

func text(held []ipam.Held) string {
	var words []string
	for _, h := range held {
		words = append(words, h.Pool+"/"+h.Addr.String())
	}
	return strings.Join(words, " ")
}
