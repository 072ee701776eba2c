package direct

import (
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/lodestone-lb/lodestone/pkg/testcost"
	"github.com/lodestone-lb/lodestone/speaker/plan"
)

// unwired returns a Simulated of n1, with room for so many tables of policy Local, that has had these plans.
func unwired(tables int, plans ...plan.Forwarding) *Simulated {
	s := NewSimulated(Options{Node: "n1", Log: slog.New(slog.DiscardHandler)}, Tables{})
	s.most = tables * localSize
	s.Begin(plan.Forwarding{}, nil, time.Time{})
	for i, p := range plans {
		now := time.Time{}.Add(time.Duration(i) * time.Second)
		s.Set(p, now)
		s.Reconcile(Seen{}, now)
	}
	return s
}

// each returns a plan with these Services of policy Local, each at a VIP and with backends of its own, by its number.
func each(numbers map[string]int) plan.Forwarding {
	f := plan.Forwarding{Services: map[plan.LimitKey]plan.Direct{}}
	for name, n := range numbers {
		vip := netip.AddrFrom4([4]byte{203, 0, byte(n >> 8), byte(n)})
		f.Services[plan.LimitKey{VIP: vip, Service: name}] = plan.Direct{Ports: web, Local: true, Backends: []plan.Backend{{Node: "n1", Open: n}}}
	}
	return f
}

// numbered returns Services of a namespace.
func numbered(namespace string, from, n int) map[string]int {
	all := map[string]int{}
	for i := range n {
		all[fmt.Sprintf("%s/%03d", namespace, from+i)] = from + i
	}
	return all
}

func together(all ...map[string]int) map[string]int {
	sum := map[string]int{}
	for _, m := range all {
		maps.Copy(sum, m)
	}
	return sum
}

// served returns the Services that have a table, sorted.
func (s *Simulated) served() (names []string) {
	for _, of := range s.have[0].services {
		names = append(names, of.service)
	}
	return slices.Sorted(slices.Values(names))
}

// A namespace with many switched-off Services leaves others their tables, whichever has the lower VIPs. What has none is
// counted.
func TestNamespacesShareTheTablesOfSwitchedOffServices(t *testing.T) {
	t.Parallel()
	all := together(numbered("many", 1, 10), numbered("few", 100, 1))
	s := unwired(100, each(all), plan.Forwarding{})
	require.Len(t, s.served(), 11)
	s.most = 4 * localSize
	s.Set(each(map[string]int{"other/web": 200}), time.Time{})
	s.Reconcile(Seen{}, time.Time{})
	require.Equal(t, []string{"few/100", "many/001", "many/002", "other/web"}, s.served())
	require.Len(t, s.without[0], 8)
}

// Nodes that have the same plan have tables for the same Services, whatever they had before.
func TestNodesAgreeOnWhichServicesHaveTables(t *testing.T) {
	t.Parallel()
	first := numbered("b", 22, 2)
	then := together(numbered("b", 20, 4), numbered("a", 10, 3), numbered("c", 30, 1))
	want := []string{"a/010", "a/011", "b/020", "b/021", "c/030"}
	require.Equal(t, want, unwired(5, each(then)).served())
	require.Equal(t, want, unwired(5, each(first), each(then)).served(), "it had some before")
	more := together(then, numbered("b", 100, 50))
	require.Equal(t, want, unwired(5, each(first), each(then), each(more)).served(), "only b has more Services")
}

// The table that all namespaces share is there, however many they have for themselves.
func TestTheTableOfAllNamespacesComesFirst(t *testing.T) {
	t.Parallel()
	f := each(together(numbered("a", 1, 40), numbered("b", 41, 40), numbered("c", 81, 40)))
	f.Services[plan.LimitKey{VIP: vip4, Service: "c/last"}] = plan.Direct{Ports: web, Backends: some("n1")}
	require.Contains(t, unwired(clusterSize/localSize+2, f).served(), "c/last")
}

// What has no table is shown so.
func TestServicesWithoutATableAreShown(t *testing.T) {
	t.Parallel()
	d := newDirector()
	d.most, d.want = localSize, each(map[string]int{"a/web": 1, "b/web": 2})
	d.rules(0, families[0], Tables{})
	d.publish()
	vip := func(n byte) netip.Addr { return netip.AddrFrom4([4]byte{203, 0, 0, n}) }
	require.Equal(t, []Forwarded{{VIP: vip(1), Service: "a/web", Open: []string{"n1"}},
		{VIP: vip(2), Service: "b/web", Open: []string{}, WithoutTable: true}}, d.View().Services)
}

// Of the Services that were switched off at once, each Director keeps the same ones.
func TestTheSameSwitchedOffServicesAreKept(t *testing.T) {
	t.Parallel()
	keep := func() string {
		m := newMachine(Options{})
		for i := range maxSwitchedOff + 1000 {
			key := plan.LimitKey{VIP: vip4, Service: fmt.Sprintf("n%d/%05d", i%3, i)}
			m.switchedOff[key] = switchedOff{plan.Direct{Ports: []plan.Port{{Protocol: unix.IPPROTO_TCP, Number: uint16(i)}}}, time.Time{}}
		}
		m.boundSwitchedOff()
		var names []string
		for key := range m.switchedOff {
			names = append(names, key.Service)
		}
		require.Len(t, names, maxSwitchedOff)
		return strings.Join(slices.Sorted(slices.Values(names)), " ")
	}
	first := keep()
	for range 3 {
		require.Equal(t, first, keep())
	}
}

// However many namespaces delete their Services at once, it takes no time to speak of to bound them.
func TestManyNamespacesSwitchOff(t *testing.T) {
	t.Parallel()
	machine := func(n int) *Machine {
		m := newMachine(Options{})
		for i := range n {
			vip := netip.AddrFrom4([4]byte{10, byte(i >> 16), byte(i >> 8), byte(i)})
			m.switchedOff[plan.LimitKey{VIP: vip, Service: fmt.Sprintf("n%d/web", i)}] = switchedOff{plan.Direct{Ports: web}, time.Time{}}
		}
		return m
	}
	all := machine(2 * maxSwitchedOff)
	spent := testcost.Of(all.boundSwitchedOff)
	require.Less(t, spent.Time, 2*time.Second)
	require.Len(t, all.switchedOff, maxSwitchedOff)
}

// Of two Services that were switched off at one VIP and port, the connections of the later one are handed over.
func TestTheLastSwitchedOffServiceOfAPort(t *testing.T) {
	t.Parallel()
	for _, names := range [][2]string{{"default/a", "default/b"}, {"default/b", "default/a"}} {
		s := unwired(10, each(map[string]int{names[0]: 1}), each(map[string]int{names[1]: 1}), plan.Forwarding{})
		require.Equal(t, []string{names[1]}, s.served())
		require.Len(t, s.switchedOff, 1)
	}
}
