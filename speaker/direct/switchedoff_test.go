package direct

import (
	"fmt"
	"log/slog"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/lodestone-lb/lodestone/pkg/testnet"
	"github.com/lodestone-lb/lodestone/speaker/plan"
)

// Connections of a Service that was switched off are handed over although the speakers are replaced,
// more than once. New connections stay with the owner.
func TestSwitchedOffServicesOutliveARestart(t *testing.T) {
	t.Parallel()
	w := startWorld(t, 3, some("n1", "n2", "n3")...)
	all := w.open(40)
	require.Len(t, at(all), 3)
	w.want()
	w.live(all, "switched off")
	for i := range 2 {
		for _, name := range w.names {
			n := w.nodes[name]
			n.stop()
			n.Run("ip", "neigh", "flush", "dev", "eth0")
			began := time.Now()
			w.start(name)
			n.director.Set(w.forwarding(nil))
			<-n.director.Ready()
			if time.Since(began) < settleTime { // after that it waits no longer for those that it does not know
				require.Equal(t, 4, n.director.Status().Peers, "nothing waits for them")
			}
			w.until(func() bool { return n.director.Status().Peers == 4 }, func() any { return n.director.Status() })
		}
		w.live(all, "replaced")
		for _, owner := range w.names {
			w.own(owner)
			w.live(all, "moved to "+owner)
			require.Equal(t, map[string]int{owner: 10}, at(w.open(10)), "after %d", i)
		}
		require.Equal(t, []Forwarded{{VIP: vip4, Service: "default/web", Draining: true, Open: []string{}, Others: w.names},
			{VIP: vip6, Service: "default/web", Draining: true, Open: []string{}, Others: w.names}}, w.nodes["n1"].director.View().Services)
	}
	w.want(some("n1", "n2", "n3")...)
	require.Empty(t, w.nodes["n1"].director.Status().switchedOff)
	w.live(all, "switched on again")

	w.ports = []plan.Port{{Protocol: unix.IPPROTO_TCP, Number: 81}}
	w.want(some("n1", "n2", "n3")...)
	for _, owner := range w.names {
		w.own(owner)
		w.live(all, "their port is no longer the Service's: moved to "+owner)
	}
	w.nodes["n3"].stop()
	w.start("n3")
	w.want(some("n1", "n2", "n3")...)
	w.live(all, "the speaker of their owner was replaced after that")
}

// alone returns a node on a segment that it has to itself, and a Director for it.
func alone(t *testing.T) (*testnet.Host, *Director) {
	host := testnet.NewHost(t, "node")
	testnet.NewSegment(t, 0).Plug(host, "eth0")
	host.Address("eth0", "198.18.0.1/16")
	return host, newDirector()
}

// newDirector returns a Director of n1 that Run does not own.
func newDirector() *Director {
	return New(Options{Log: slog.New(slog.DiscardHandler), Node: "n1", Gateways: func() []netip.Addr { return nil }})
}

// follower returns a Director with what one before it left on the host, and nodes 198.18.1.0 and
// upwards, beside n1, which it is.
func follower(t *testing.T, host *testnet.Host, want plan.Forwarding) *Director {
	d := newDirector()
	require.NoError(t, host.Do(func() error {
		d.want, d.stale = want, true
		if err := d.inherit(); err != nil {
			return err
		}
		d.reconcile()
		return d.err
	}))
	return d
}

// A Director inherits Services that are not wanted, for a while, and a bounded number of them. Wanted
// Services are not switched off, whichever Service had their VIP and port before. Elements of other
// programs do no harm.
func TestInherit(t *testing.T) {
	t.Parallel()
	host, _ := alone(t)
	names := []string{"n1"}
	known := map[string][]netip.Addr{}
	for i := range 8 {
		name, addr := fmt.Sprint("n", i+2), netip.AddrFrom4([4]byte{198, 18, 1, byte(i)})
		names, known[name] = append(names, name), []netip.Addr{addr}
		host.Run("ip", "neigh", "add", addr.String(), "lladdr", fmt.Sprintf("02:00:00:00:01:%02x", i), "dev", "eth0", "nud", "permanent")
	}
	two := []plan.Port{{Protocol: unix.IPPROTO_TCP, Number: 80}, {Protocol: unix.IPPROTO_TCP, Number: 443}}
	key := func(last byte, name string) plan.LimitKey {
		return plan.LimitKey{VIP: netip.AddrFrom4([4]byte{203, 0, 113, last}), Service: name}
	}
	all := plan.Forwarding{Nodes: known, Services: map[plan.LimitKey]plan.Direct{
		key(1, "default/few"):   {Ports: web, Seed: 3, Backends: some("n2", "n3", "n4")},
		key(2, "default/all"):   {Ports: two, Seed: 4, ByClient: true, Backends: some(names...)},
		key(3, "default/stays"): {Ports: web, Backends: some(names...)},
		key(3, "default/other"): {Ports: two[1:], Backends: some(names...)},
		key(4, "default/gives"): {Ports: web, Backends: some(names...)},
	}}
	first := follower(t, host, all)
	require.Empty(t, first.switchedOff)
	for i, garbage := range []string{"%d : goto steer-0-8192-1-3-x", `%d comment "a/b" : goto garbage`,
		`%d comment "a/b" : goto steer-00-8192-1-3-2`} {
		_, chain, _ := strings.Cut(garbage, "goto ")
		host.Run("nft", fmt.Sprintf("add chain ip lodestone-direct %s; add element ip lodestone-direct services { 203.0.113.9 . "+garbage+" }",
			chain, i))
	}
	host.Run("nft", `add element ip lodestone-direct services { 203.0.113.9 . 80 comment "default/other" : accept }`)
	want := plan.Forwarding{Nodes: known, Services: map[plan.LimitKey]plan.Direct{
		key(3, "default/stays"): all.Services[key(3, "default/stays")], key(3, "default/other"): {Ports: web, Backends: some("n5")},
		key(4, "default/takes"): {Ports: web, Backends: some("n5")}}}
	d := follower(t, host, want)
	for key, off := range d.switchedOff {
		require.WithinDuration(t, time.Now().Add(switchedOffTime), off.until, time.Minute, key)
	}
	few, every := d.switchedOff[key(1, "default/few")], d.switchedOff[key(2, "default/all")]
	require.Len(t, d.switchedOff, 3)
	require.Equal(t, two[1:], d.switchedOff[key(3, "default/other")].Ports, "the Service has another port now")
	keeping := func(names ...string) (all []plan.Backend) {
		for _, n := range names {
			all = append(all, plan.Backend{Node: n, Draining: 1})
		}
		return all
	}
	require.Equal(t, keeping("n1", "n2", "n3", "n4"), few.Backends)
	require.Equal(t, keeping(names...), every.Backends)
	require.ElementsMatch(t, two, every.Ports)
	require.True(t, every.ByClient)
	have, before := d.have[0].services, first.have[0].services
	for key := range d.want.Services {
		require.False(t, have[serviceKey(key.VIP, 80)].switchedOff, key)
	}
	of := serviceKey(key(2, "").VIP, 443)
	require.True(t, have[of].switchedOff)
	require.Equal(t, before[of].seed, have[of].seed)
	require.Equal(t, before[of].ring, have[of].ring)
	require.Equal(t, first.have[0].tables[before[of].table], d.have[0].tables[have[of].table], "each segment goes where it did")
	d.expire(time.Now().Add(switchedOffTime + time.Minute))
	require.Empty(t, d.switchedOff)

	many := plan.Forwarding{Services: map[plan.LimitKey]plan.Direct{}}
	for i := range maxSwitchedOff + 100 {
		vip := netip.AddrFrom4([4]byte{203, 0, byte(i >> 8), byte(i)})
		many.Services[plan.LimitKey{VIP: vip, Service: fmt.Sprint("default/", i)}] = plan.Direct{Ports: web, Backends: some("n1")}
	}
	follower(t, host, many)
	ports := 0
	for _, off := range follower(t, host, plan.Forwarding{}).switchedOff {
		ports += len(off.Ports)
	}
	require.Equal(t, maxSwitchedOff, ports)

	begins := newDirector()
	require.NoError(t, host.Do(func() error {
		defer begins.publish()
		return begins.inherit()
	}))
	require.True(t, begins.InForce(), "the rules work even if the first look at the neighbours fails")

	host.Run("nft", "flush set ip lodestone-direct "+guardSet)
	require.Empty(t, follower(t, host, plan.Forwarding{}).switchedOff, "there was no Director for too long")
	require.NotContains(t, host.Run("nft", "list tables"), "table ip "+tableName)
}
