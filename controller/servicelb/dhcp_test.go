package servicelb

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"github.com/lodestone-lb/lodestone/controller/servicelb/ledger"
	"github.com/lodestone-lb/lodestone/pkg/annotation"
	"github.com/lodestone-lb/lodestone/pkg/kube"
)

// lessor is a DHCP server on each interface that is in ranges, and the client
// before it. It outlives controllers, and answers when a test calls for it.
type lessor struct {
	ranges map[string][]netip.Addr
	// mute servers answer nobody.
	mute    bool
	leased  map[string]map[netip.Addr]string // to whom, by interface
	clients map[string]map[string]ledger.LeaseClient
	states  map[string]map[string]ledger.LeaseState
	// asked counts questions, so that no two complaints are the same.
	asked   int
	changed chan struct{}
	// seen are what the controller has waited for last.
	seen [2]<-chan struct{}
}

func newLessor() *lessor {
	return &lessor{
		ranges: map[string][]netip.Addr{}, leased: map[string]map[netip.Addr]string{},
		clients: map[string]map[string]ledger.LeaseClient{}, states: map[string]map[string]ledger.LeaseState{}, changed: make(chan struct{}),
	}
}

// orphan is the end of the controller: its client forgets, the servers do not.
func (l *lessor) orphan() {
	l.seen = [2]<-chan struct{}{}
	l.clients, l.states = map[string]map[string]ledger.LeaseClient{}, map[string]map[string]ledger.LeaseState{}
}

// serves gives the server on an interface its range.
func (l *lessor) serves(on string, addresses ...string) {
	l.ranges[on] = nil
	for _, a := range addresses {
		l.ranges[on] = append(l.ranges[on], netip.MustParseAddr(a))
	}
	if l.leased[on] == nil {
		l.leased[on] = map[netip.Addr]string{}
	}
}

// Set implements Leases.
func (l *lessor) Set(want map[string][]ledger.LeaseClient) {
	for on := range l.clients {
		if _, wanted := want[on]; !wanted {
			want[on] = nil
		}
	}
	for on, clients := range want {
		gone := l.clients[on]
		l.clients[on] = map[string]ledger.LeaseClient{}
		for _, c := range clients {
			l.clients[on][c.ID] = c
			delete(gone, c.ID)
			if l.states[on] == nil {
				l.states[on] = map[string]ledger.LeaseState{}
			}
			if _, known := l.states[on][c.ID]; !known {
				l.states[on][c.ID] = ledger.LeaseState{}
				l.notify()
			}
		}
		for id := range gone {
			if a := l.states[on][id].Addr; a.IsValid() {
				delete(l.leased[on], a)
			}
			delete(l.states[on], id)
			l.notify()
		}
	}
}

// Current implements Leases: it is when the server answers.
func (l *lessor) Current() map[string]map[string]ledger.LeaseState {
	for _, on := range slices.Sorted(maps.Keys(l.clients)) {
		clients := l.clients[on]
		for _, id := range sortedKeys(clients) {
			if s := l.states[on][id]; !s.Addr.IsValid() && !l.mute {
				l.states[on][id] = l.answer(on, clients[id], s)
			}
		}
	}
	return l.states
}

func sortedKeys(clients map[string]ledger.LeaseClient) []string {
	var keys []string
	for id := range clients {
		keys = append(keys, id)
	}
	slices.Sort(keys)
	return keys
}

func (l *lessor) answer(on string, c ledger.LeaseClient, s ledger.LeaseState) ledger.LeaseState {
	free := func(a netip.Addr) bool { return cmp.Or(l.leased[on][a], c.ID) == c.ID }
	if !slices.Contains(l.ranges[on], c.Last) || !free(c.Last) {
		if c.Last.IsValid() {
			s.Lost = c.Last
		}
		i := slices.IndexFunc(l.ranges[on], free)
		if i < 0 {
			l.asked++
			s.Err = fmt.Errorf("no DHCP server on interface %q has offered an address since 10:%02d (VIPs waiting: %d)", on, l.asked, l.asked)
			return s
		}
		c.Last = l.ranges[on][i]
	}
	l.leased[on][c.Last] = c.ID
	s.Addr, s.Err = c.Last, nil
	if s.Lost == s.Addr {
		s.Lost = netip.Addr{}
	}
	return s
}

// Changed implements Leases.
func (l *lessor) Changed() <-chan struct{} { return l.changed }

func (l *lessor) notify() {
	close(l.changed)
	l.changed = make(chan struct{})
}

// ends ends the lease of an address: it is somebody else's now.
func (l *lessor) ends(on, address, why string) {
	addr := netip.MustParseAddr(address)
	id := l.leased[on][addr]
	l.leased[on][addr] = "somebody else"
	if _, asks := l.states[on][id]; asks {
		l.states[on][id] = ledger.LeaseState{Lost: addr, Err: fmt.Errorf("%s", why)}
	}
	l.notify()
}

// fails has a lease not be extended.
func (l *lessor) fails(on, address, why string) {
	addr := netip.MustParseAddr(address)
	s := l.states[on][l.leased[on][addr]]
	if s.Err = nil; why != "" {
		s.Err = fmt.Errorf("%s", why)
	}
	l.states[on][l.leased[on][addr]] = s
	l.notify()
}

// followedLeases does what keepLeases does, if there is a reason to.
func (s *story) followedLeases() bool {
	poked := len(s.ledger.leases) > 0
	if poked {
		<-s.ledger.leases
	}
	changed := [2]<-chan struct{}{s.Leases.Changed(), s.config.Changed()}
	if !poked && changed == s.lessor.seen {
		return false
	}
	s.lessor.seen = changed
	s.stepLeases()
	s.note()
	return true
}

// wanted are those who want a lease, by interface.
func (s *story) wanted() map[string][]ledger.LeaseClient {
	want, _, _ := s.machine().FollowLeases(s.lessor.Current(), s.clock)
	return want
}

const office = "quarantine: 30s\npools:\n  - {name: office, dhcp: {interface: eth1}}\n"

// newOffice is a story whose only pool has a DHCP server with two addresses.
func newOffice(t failer) *story {
	s := newStory(t)
	s.lessor.serves("eth1", "198.18.0.240", "198.18.0.241")
	s.configure(office)
	return s
}

func (s *story) leases(name, text string) {
	s.failer.Helper()
	if got := s.server.get("default/" + name).Annotations[annotation.Leases]; got != text {
		s.Errorf("Service %s has leases %q, want %q", name, got, text)
	}
}

func TestServiceGetsALeasedAddressWithOneWriteAndOneEvent(t *testing.T) {
	t.Parallel()
	s := newOffice(t)
	s.creates("web")
	s.has("web", "198.18.0.240", "True Allocated")
	s.mentions("web", `198.18.0.240 from pool "office"`)
	s.leases("web", "198.18.0.240=eth1")
	s.wantEvents("Normal Allocated default/web: 198.18.0.240")
	assert.Equal(t, 1, s.server.patches)
	assert.Equal(t, map[string][]ledger.LeaseClient{"eth1": {{ID: "kubernetes/default/web", Hostname: "web", Namespace: "default",
		Last: netip.MustParseAddr("198.18.0.240")}}}, s.wanted())
	s.silent("the lease is extended", func() { s.lessor.notify(); s.run() })

	s.deletes("web")
	assert.Empty(t, s.lessor.leased["eth1"], "the lease is released")
	assert.Empty(t, s.shelf.records, "the server decides how long a leased address is in quarantine")
	s.creates("other")
	s.has("other", "198.18.0.240", "True Allocated")
}

func TestLeasedAddressOutlivesTheController(t *testing.T) {
	t.Parallel()
	s := newOffice(t)
	s.creates("a")
	s.creates("b")
	s.lessor.mute = true
	s.events.take()
	s.silent("the controller restarts, and the server says nothing", func() { s.restart(); s.run() })
	s.has("b", "198.18.0.241", "True Allocated")
	s.creates("c")
	s.has("c", "", "")
	s.silent("it answers again, the Services that have addresses", func() {
		s.deletes("c")
		s.lessor.mute = false
		s.lessor.notify()
		s.run()
	})
	s.wantEvents()
	assert.Equal(t, "kubernetes/default/b", s.lessor.leased["eth1"][netip.MustParseAddr("198.18.0.241")])

	s.silent("a controller starts without a configuration", func() {
		s.config.config = nil
		s.restart()
		s.run()
	})
	s.lessor.serves("eth1", "198.18.0.240", "198.18.0.242")
	s.configure(office)
	s.has("a", "198.18.0.240", "True Allocated")
	s.has("b", "198.18.0.242", "True Allocated")
	s.wantEvents("Warning LeaseLost default/b: 198.18.0.241 is withdrawn: the DHCP server leases 198.18.0.242 instead.",
		"Normal Allocated default/b")
}

func TestLostLeaseTakesTheAddressAwayAtOnce(t *testing.T) {
	t.Parallel()
	s := newOffice(t)
	s.creates("web")
	s.events.take()
	s.lessor.mute = true
	s.lessor.ends("eth1", "198.18.0.240", "the lease of 198.18.0.240 ended at 10:00")
	s.run()
	s.has("web", "", "False LeasePending")
	s.mentions("web", `pool "office" has no lease for the Service yet: the lease of 198.18.0.240 ended at 10:00`)
	s.leases("web", "")
	s.wantEvents("Warning LeaseLost default/web: 198.18.0.240 is withdrawn: the lease of 198.18.0.240 ended at 10:00.",
		"Warning LeasePending default/web")
	assert.Empty(t, s.shelf.records, "it is not ours to keep")
	assert.InDelta(t, 1, testutil.ToFloat64(s.metrics.lost.WithLabelValues("office")), 0)

	s.lessor.mute = false
	s.lessor.notify()
	s.run()
	s.has("web", "198.18.0.241", "True Allocated")
	s.wantEvents("Normal Allocated default/web")
}

// The server leases an address to another Service before the object of the one that has lost it could be written. The other one
// gets it when that has succeeded.
func TestLeasedAddressIsNotGivenWhileAnotherServiceShowsIt(t *testing.T) {
	t.Parallel()
	s := newOffice(t)
	s.lessor.serves("eth1", "198.18.0.240")
	s.creates("a")
	l := s.machine()
	s.lessor.ends("eth1", "198.18.0.240", "it is over")
	clear(s.lessor.leased["eth1"])
	states := func(of string) map[string]map[string]ledger.LeaseState {
		lost := ledger.LeaseState{Lost: netip.MustParseAddr("198.18.0.240"), Err: errors.New("it is over")}
		return map[string]map[string]ledger.LeaseState{"eth1": {"kubernetes/default/a": lost,
			of: {Addr: netip.MustParseAddr("198.18.0.240")}}}
	}
	l.FollowLeases(states(""), s.clock)
	b := s.server.get("default/a").DeepCopy()
	b.Name, b.UID, b.Annotations, b.Status = "b", "b", nil, corev1.ServiceStatus{}
	require.Empty(t, l.Ensure(b, nil, s.clock).Held)
	_, due, _ := l.FollowLeases(states("kubernetes/default/b"), s.clock)
	require.Contains(t, due, "default/b")
	require.Empty(t, l.Ensure(b, nil, s.clock).Held, "the object of the other one shows it")
	a := s.server.get("default/a")
	v := l.Ensure(a, nil, s.clock)
	require.Empty(t, v.Held)
	l.Settle("default/a", string(a.UID), v.Held, s.clock)
	require.True(t, l.Effects().Leases)
	_, due, _ = l.FollowLeases(states("kubernetes/default/b"), s.clock)
	require.Contains(t, due, "default/b")
	require.Len(t, l.Ensure(b, nil, s.clock).Held, 1)
}

// A new controller asks for the address that a Service has, and a server leases it to another Service. It is given back, and the
// one that has it is confirmed or is leased another one. A server that somebody has brought takes no address from a Service by that.
func TestUnconfirmedAddressIsNotTakenByTheLeaseOfAnotherService(t *testing.T) {
	t.Parallel()
	for _, confirmed := range []bool{true, false} {
		s := newOffice(t)
		s.creates("a")
		s.lessor.mute = true
		s.restart()
		s.run()
		s.creates("b")
		addr := netip.MustParseAddr("198.18.0.240")
		s.lessor.states["eth1"]["kubernetes/default/b"] = ledger.LeaseState{Addr: addr}
		s.lessor.leased["eth1"][addr] = "kubernetes/default/b"
		s.lessor.notify()
		s.run()
		s.has("a", "198.18.0.240", "True Allocated")
		s.has("b", "", "False LeasePending")
		s.mentions("b", "the DHCP server leases 198.18.0.240, which default/a has: it is given back")
		assert.Len(t, s.wanted()["eth1"], 1)
		assert.Empty(t, s.lessor.leased["eth1"])
		s.silent("nobody answers", func() { s.lessor.notify(); s.run() })

		s.lessor.mute = false
		first, second := "198.18.0.240", "198.18.0.241"
		if !confirmed {
			s.lessor.states["eth1"]["kubernetes/default/a"] = ledger.LeaseState{Lost: addr, Addr: netip.MustParseAddr(second)}
			s.lessor.leased["eth1"][netip.MustParseAddr(second)] = "kubernetes/default/a"
			first, second = second, first
		}
		s.lessor.notify()
		s.run()
		s.has("a", first, "True Allocated")
		s.has("b", second, "True Allocated")
		assert.Len(t, s.wanted()["eth1"], 2)
	}
}

func TestLeaseThatIsNotExtendedIsSaidBeforeItEnds(t *testing.T) {
	t.Parallel()
	s := newOffice(t)
	s.creates("web")
	s.events.take()
	s.lessor.fails("eth1", "198.18.0.240", "DHCP server 198.18.0.100 has not extended the lease of 198.18.0.240 since 10:00")
	s.run()
	s.has("web", "198.18.0.240", "True LeaseOverdue")
	s.mentions("web", "DHCP server 198.18.0.100 has not extended the lease")
	s.wantEvents("Warning LeaseOverdue default/web")
	s.silent("only a time changes", func() {
		s.lessor.fails("eth1", "198.18.0.240", "DHCP server 198.18.0.100 has not extended the lease of 198.18.0.240 since 11:11")
		s.run()
	})
	s.lessor.fails("eth1", "198.18.0.240", "DHCP server 198.18.0.101 has not extended the lease of 198.18.0.240 since 11:11")
	s.run()
	s.mentions("web", "198.18.0.101")
	s.lessor.fails("eth1", "198.18.0.240", "")
	s.run()
	s.has("web", "198.18.0.240", "True Allocated")
	s.wantEvents("Normal Allocated default/web")
}

func TestServerThatHasNoMoreAddressesIsSaid(t *testing.T) {
	t.Parallel()
	s := newOffice(t)
	s.creates("a")
	s.creates("b")
	s.creates("c")
	s.has("c", "", "False LeasePending")
	s.mentions("c", `pool "office" has no lease for the Service yet: no DHCP server on interface "eth1" has offered an address since`)
	s.wantEvents("Normal Allocated default/a", "Normal Allocated default/b", "Warning LeasePending default/c")
	s.silent("it says when and how many wait, again and again", func() {
		for range 3 {
			s.lessor.notify()
			s.run()
		}
	})
	reg := prometheus.NewPedanticRegistry()
	reg.MustRegister(s.Controller)
	require.NoError(t, testutil.GatherAndCompare(reg, strings.NewReader(`
# HELP lodestone_leases Leases of a pool that leases its addresses, by how they stand: leased, overdue (not being extended), unconfirmed (held since before the start), waiting.
# TYPE lodestone_leases gauge
lodestone_leases{pool="office",state="leased"} 2
lodestone_leases{pool="office",state="overdue"} 0
lodestone_leases{pool="office",state="unconfirmed"} 0
lodestone_leases{pool="office",state="waiting"} 1
# HELP lodestone_services_refused Services whose request is refused at present.
# TYPE lodestone_services_refused gauge
lodestone_services_refused{reason="LeasePending"} 1
`), MetricLeases, MetricRefused))
	s.deletes("a")
	s.has("c", "198.18.0.240", "True Allocated")
}

func TestPoolWithAddressesAtHandComesBeforeALease(t *testing.T) {
	t.Parallel()
	s := newOffice(t)
	s.lessor.serves("eth2", "198.18.2.1")
	s.configure("quarantine: 0s\npools:\n  - {name: office, dhcp: {interface: eth1}}\n  - {name: lab, dhcp: {interface: eth2}}\n  - " +
		"{name: one, addresses: [203.0.113.10]}\n")
	s.creates("a")
	s.has("a", "203.0.113.10", "True Allocated")
	assert.Equal(t, map[string][]ledger.LeaseClient{"eth1": nil, "eth2": nil}, s.wanted())
	s.creates("b")
	s.creates("c")
	s.creates("d")
	s.has("d", "198.18.2.1", "True Allocated")
	assert.Len(t, s.wanted()["eth1"], 2, "it waits no longer for the pool that comes first")
	s.creates("e")
	s.has("e", "", "False LeasePending")
	s.mentions("e", `pool "one" has 0 of 1 IPv4 addresses free: no DHCP server on interface "eth1" has offered an address`)
	s.mentions("e", `interface "eth2"`)
	s.deletes("a")
	s.has("e", "203.0.113.10", "True Allocated")
	assert.Len(t, slices.Concat(s.wanted()["eth1"], s.wanted()["eth2"]), 3)
}

func TestLeaseFollowsWhatTheServiceAsksFor(t *testing.T) {
	t.Parallel()
	s := newOffice(t)
	s.configure(office + "  - {name: six, addresses: ['2001:db8::10'], autoAssign: false}\n  - {name: four, addresses: [203.0.113.10], " +
		"autoAssign: false}\n")
	s.creates("six", annotated(annotation.AddressPool, "six,office"),
		families(corev1.IPFamilyPolicyPreferDualStack, corev1.IPv6Protocol, corev1.IPv4Protocol))
	s.has("six", "2001:db8::10,198.18.0.240", "True Allocated")
	s.leases("six", "198.18.0.240=eth1")
	s.changes("six", families(corev1.IPFamilyPolicySingleStack, corev1.IPv6Protocol))
	s.has("six", "2001:db8::10", "True Allocated")
	s.leases("six", "")
	assert.Empty(t, s.lessor.leased["eth1"])

	s.creates("moves", annotated(annotation.AddressPool, "four"))
	s.changes("moves", annotated(annotation.AddressPool, "office"))
	s.has("moves", "198.18.0.240", "True Allocated")
	s.changes("moves", annotated(annotation.AddressPool, "four"))
	s.pass(time.Minute)
	s.changes("moves", annotated("a", "b"))
	s.has("moves", "203.0.113.10", "True Allocated")
	assert.Empty(t, s.lessor.leased["eth1"])

	for name, change := range map[string]func(*corev1.Service){
		"exact":  annotated(annotation.Addresses, "198.18.0.240"),
		"family": families(corev1.IPFamilyPolicySingleStack, corev1.IPv6Protocol),
		"poison": annotated(annotation.Addresses, "poison"),
		"other":  annotated(annotation.AddressPool, "six"),
	} {
		s.creates(name, change)
	}
	assert.Empty(t, s.wanted()["eth1"], "a lease would help none of them")
}

func TestLeaseIsReleasedWhenNothingShowsTheAddressAnyMore(t *testing.T) {
	t.Parallel()
	for what, change := range map[string]func(*corev1.Service){
		"the family": families(corev1.IPFamilyPolicySingleStack, corev1.IPv6Protocol),
		"the type":   ofType(corev1.ServiceTypeClusterIP),
		"the pool":   annotated(annotation.AddressPool, "four,six"),
	} {
		s := newOffice(t)
		s.configure(office + "  - {name: six, addresses: ['2001:db8::10']}\n  - {name: four, addresses: [203.0.113.10], autoAssign: false}\n")
		s.creates("web", annotated(annotation.AddressPool, "office,six"),
			families(corev1.IPFamilyPolicyPreferDualStack, corev1.IPv6Protocol, corev1.IPv4Protocol))
		s.has("web", "2001:db8::10,198.18.0.240", "True Allocated")
		s.server.fault = func() fault { return lost }
		s.server.update("default/web", change)
		for range 5 {
			s.see("default/web")
			s.once()
			s.stepLeases()
			assert.Len(t, s.lessor.leased["eth1"], 1, "%s has changed, and the API server takes no write", what)
		}
		s.server.fault = nil
		s.run()
		assert.Empty(t, s.lessor.leased["eth1"], "%s has changed", what)
	}
}

func TestLeasedAddressIsNotShared(t *testing.T) {
	t.Parallel()
	s := newOffice(t)
	port := func(n int32) func(*corev1.Service) {
		return func(svc *corev1.Service) { svc.Spec.Ports = []corev1.ServicePort{{Port: n}} }
	}
	s.creates("a", annotated(annotation.SharingKey, "k"), port(80))
	s.creates("b", annotated(annotation.SharingKey, "k"), port(443))
	s.has("b", "", "False AddressReserved")
	s.mentions("b", "198.18.0.240 is reserved for default/a")
	assert.Len(t, s.wanted()["eth1"], 1)
}

func TestRemovedPoolGivesItsLeasesBack(t *testing.T) {
	t.Parallel()
	s := newOffice(t)
	s.creates("a")
	s.creates("b", annotated(annotation.AddressPool, "office"))
	s.events.take()
	s.configure(strings.ReplaceAll(office, "office", "floor"))
	s.mentions("a", `198.18.0.240 from pool "floor"`)
	s.wantEvents()
	s.configure(office)
	s.configure("pools: [{name: four, addresses: [203.0.113.10]}]\n")
	s.has("a", "203.0.113.10", "True Allocated")
	s.has("b", "", "False PoolNotFound")
	assert.Empty(t, s.lessor.leased["eth1"])
	got := strings.Join(s.events.take(), "\n")
	assert.Contains(t, got, "Warning LeaseLost default/a: 198.18.0.240 is withdrawn: its pool is gone from the configuration")
	assert.Contains(t, got, "Warning LeaseLost default/b: 198.18.0.241")
	assert.Contains(t, got, "Normal Allocated default/a: 203.0.113.10")
	assert.Contains(t, got, "Warning PoolNotFound default/b")

	s.configure(office)
	s.has("b", "198.18.0.240", "True Allocated")
	s.config.set("pools: [{name: four, addresses: [203.0.113.10]}]\n")
	s.restart() // the pool went while nobody looked
	s.run()
	s.has("b", "", "False PoolNotFound")
}

func TestLeaseThatContradictsThePoolsIsSaid(t *testing.T) {
	t.Parallel()
	s := newOffice(t)
	s.configure(office + "  - {name: lan, addresses: [198.18.0.240-198.18.0.250], autoAssign: false}\n")
	s.creates("web")
	s.has("web", "", "False LeasePending")
	s.mentions("web", `the DHCP server leases 198.18.0.240, which is in pool "lan": take it out of that pool`)
	s.configure(office)
	s.has("web", "198.18.0.240", "True Allocated")
	s.configure(office + "  - {name: lan, addresses: [198.18.0.240-198.18.0.250], autoAssign: false}\n")
	s.has("web", "198.18.0.240", "True Allocated") // nothing in use moves
	s.mentions("web", `from pool "lan"`)
	s.configure(office)
	s.mentions("web", `from pool "office"`)
}

func TestServiceOfAnotherClassLosesItsLeaseToo(t *testing.T) {
	t.Parallel()
	s := newOffice(t)
	s.creates("web")
	s.scope = kube.Scope{Classes: []string{annotation.DefaultClass}}
	s.silent("nobody serves it any more", func() { s.restart(); s.run() })
	s.has("web", "198.18.0.240", "True Allocated")
	s.lessor.ends("eth1", "198.18.0.240", "the lease of 198.18.0.240 ended")
	s.run()
	s.has("web", "", "")
}

// A lease ends before the controller has seen that the Service's object shows the address, and the Service waits for the same reason
// as before it had the lease. Until the controller has seen that, nobody else gets the address.
func TestALeaseEndsBeforeItIsSeen(t *testing.T) {
	t.Parallel()
	const addr = "198.18.0.240"
	s := newStory(t)
	s.lessor.serves("eth1")
	s.configure(office)
	s.creates("web")
	s.has("web", "", "False LeasePending")
	why := s.lessor.states["eth1"]["kubernetes/default/web"].Err.Error()
	s.lessor.serves("eth1", addr)
	s.lessor.notify()
	require.True(t, s.followedLeases())
	require.NoError(t, s.reconcile(t.Context(), "default/web"))
	s.has("web", addr, "True Allocated")
	s.lessor.mute = true
	s.lessor.ends("eth1", addr, why)
	require.True(t, s.followedLeases())
	require.True(t, apierrors.IsConflict(s.reconcile(t.Context(), "default/web")), "the object may be an old one")

	s.server.create("default/other", s.clock)
	s.see("default/other")
	require.NoError(t, s.reconcile(t.Context(), "default/other"))
	require.True(t, s.followedLeases())
	delete(s.lessor.leased["eth1"], netip.MustParseAddr(addr)) // it is for the next one who asks
	s.lessor.states["eth1"]["kubernetes/default/other"] = s.lessor.answer("eth1", s.lessor.clients["eth1"]["kubernetes/default/other"],
		ledger.LeaseState{})
	s.lessor.notify()
	require.True(t, s.followedLeases())
	require.NoError(t, s.reconcile(t.Context(), "default/other"))
	s.has("other", "", "")
	s.run()
	s.has("web", "", "False LeasePending")
	s.has("other", addr, "True Allocated")
}
