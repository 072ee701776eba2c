package direct

import (
	"context"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/lodestone-lb/lodestone/pkg/testnet"
	"github.com/lodestone-lb/lodestone/speaker/plan"
)

func some(names ...string) (all []plan.Backend) {
	for _, n := range names {
		all = append(all, plan.Backend{Node: n, Open: 1})
	}
	return all
}

// Connections are spread over the nodes, whichever owns the VIP. The pods see the client's
// address, and all connections survive when the VIP moves.
func TestConnectionsOutliveAMove(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 3)
	w.cluster = true
	w.own("n1")
	before := w.open(20) // while there is no direct forwarding
	require.Equal(t, map[string]int{"n1": 20}, at(before))
	w.start(w.names...)
	w.want(some("n1", "n2", "n3")...)
	w.live(before, "switched on")
	all := w.open(60)
	for _, name := range w.names {
		require.Greater(t, at(all)[name], 5, "of %v", at(all))
	}
	all = append(all, before...)
	for _, owner := range []string{"n2", "n3", "n1", "n3"} {
		w.own(owner)
		w.live(all, "moved to "+owner)
	}
	for _, c := range all {
		require.NoError(t, c.Close())
	}
	w.until(func() bool {
		return w.nodes["n1"].connections()+w.nodes["n2"].connections()+w.nodes["n3"].connections() == 0
	},
		func() any {
			return fmt.Sprint(w.nodes["n1"].connections(), w.nodes["n2"].connections(), w.nodes["n3"].connections())
		})
}

// Nodes join, drain and return: each connection stays where it began.
func TestMembersComeAndGo(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 3)
	w.cluster = true
	w.begin(some("n1", "n2")...)
	all := w.open(40)
	require.Zero(t, at(all)["n3"])
	for i, backends := range [][]plan.Backend{
		some("n1", "n2", "n3"),
		{{Node: "n1", Draining: 1}, {Node: "n2", Open: 1}, {Node: "n3", Open: 1}},
		{{Node: "n1", Draining: 1}, {Node: "n2", Draining: 1}, {Node: "n3", Open: 1}},
		{{Node: "n1", Open: 3}, {Node: "n2", Draining: 1}, {Node: "n3", Open: 1}},
		some("n1", "n2", "n3"),
	} {
		w.want(backends...)
		w.own(w.names[i%3])
		w.live(all, fmt.Sprint(backends))
		fresh := w.open(20)
		for _, b := range backends {
			if b.Open == 0 {
				require.Zero(t, at(fresh)[b.Node], "it takes no new ones")
			}
		}
		all = append(all, fresh...)
	}
	w.want()
	w.live(all, "switched off")
	require.True(t, w.nodes["n1"].director.View().Services[0].Draining)
	require.Equal(t, map[string]int{w.names[4%3]: 10}, at(w.open(10)))
	w.live(all, "switched off, with new ones")
}

// Connections of a silent node wait for it. When it stays away, they are reset. All others
// continue, and new ones go to other nodes.
func TestSilentNode(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 3)
	w.hold = 15 * time.Second
	w.begin(some("n1", "n2", "n3")...)
	all := w.open(40)
	var there, away []*conn
	for _, c := range all {
		if c.node == "n3" {
			away = append(away, c)
		} else {
			there = append(there, c)
		}
	}
	require.NotEmpty(t, away)
	lost := func(down bool) {
		state := map[bool]string{true: "down", false: "up"}[down]
		w.nodes["n3"].Run("ip", "link", "set", "eth0", state)
		if !down {
			w.nodes["n3"].Address("eth0", "2001:db8::13/64") // the kernel forgets it
		}
		w.lost = map[string]bool{"n3": down}
		backends := some("n1", "n2", "n3")
		if down {
			backends[2] = plan.Backend{Node: "n3", Draining: 1}
		}
		for _, name := range []string{"n1", "n2"} {
			w.setOn(name, backends)
		}
	}
	lost(true)
	w.live(there, "one node is away")
	require.Zero(t, at(w.open(20))["n3"])
	lost(false)
	w.live(all, "it is back in time")

	lost(true)
	w.until(func() bool {
		return strings.Count(fmt.Sprint(w.nodes["n1"].director.Status().Neighbours), string(Gone)) == 2
	}, func() any { return w.nodes["n1"].director.Status() })
	view := w.nodes["n1"].director.View()
	require.Equal(t, []Neighbour{{"n2", w.nodes["n2"].addrs[0], Reachable}, {"n2", w.nodes["n2"].addrs[1], Reachable},
		{"n3", w.nodes["n3"].addrs[0], Gone}, {"n3", w.nodes["n3"].addrs[1], Gone}}, view.Neighbours)
	require.Equal(t, []Forwarded{{VIP: vip4, Service: "default/web", Open: []string{"n1", "n2"}, Others: []string{"n3"}},
		{VIP: vip6, Service: "default/web", Open: []string{"n1", "n2"}, Others: []string{"n3"}}}, view.Services)
	for _, c := range away {
		require.ErrorIs(t, c.ask(), unix.ECONNRESET)
	}
	w.live(there, "one node is gone")
}

// A node that keeps connections and takes no new ones is found while another node is silent. A
// Director that starts then lets the silent node's connections wait, although it has never heard
// that node.
func TestSilentNodeInTheRing(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 4)
	w.hold = time.Minute
	w.begin(some("n2", "n3", "n4")...)
	all := w.open(90)
	drains := []plan.Backend{{Node: "n2", Draining: 1}, {Node: "n3", Open: 1}, {Node: "n4", Open: 1}}
	w.want(drains...)
	w.live(all, "n2 drains")

	w.nodes["n4"].Run("ip", "link", "set", "eth0", "down")
	w.lost = map[string]bool{"n4": true}
	drains = append(slices.Clone(drains[:2]), plan.Backend{Node: "n4", Draining: 1})
	for _, name := range []string{"n1", "n2", "n3"} {
		w.setOn(name, drains)
		d := w.nodes[name].director
		w.until(func() bool {
			return !slices.ContainsFunc(d.Status().Neighbours, func(n Neighbour) bool { return n.Node == "n4" && n.State == Reachable })
		}, func() any { return d.Status() })
	}
	n1 := w.nodes["n1"]
	n1.stop()
	n1.Run("ip", "neigh", "flush", "dev", "eth0")
	w.start("n1")
	w.setOn("n1", drains)
	<-n1.director.Ready()
	for _, c := range all {
		if c.node == "n4" {
			c.timeout = 100 * time.Millisecond
			require.ErrorIs(t, c.ask(), os.ErrDeadlineExceeded, "nobody else may answer")
		} else {
			require.NoError(t, c.ask(), "n4 is silent: %s at %s", c.LocalAddr(), c.node)
		}
	}
}

// A node does not hear another one that all others hear, as when its link has just come back. It
// resets none of that node's connections: a segment that skips a node is dropped in the end, instead
// of being answered by a reset.
func TestNodeThatOneDoesNotHear(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 4)
	w.hold = time.Minute
	w.begin(some(w.names...)...)
	all := w.open(90)
	n1, n4 := w.nodes["n1"], w.nodes["n4"]
	n1.Run("nft", fmt.Sprintf(`table netdev deaf {
		chain ingress { type filter hook ingress device eth0 priority 0; ether saddr %s drop; }
	}`, n4.hardware(t)))
	w.lost = map[string]bool{"n4": true}
	n1.director.Set(w.forwarding(append(some("n1", "n2", "n3"), plan.Backend{Node: "n4", Draining: 1})))
	w.until(func() bool {
		return !slices.ContainsFunc(n1.director.Status().Neighbours, func(n Neighbour) bool { return n.Node == "n4" && n.State != Silent })
	}, func() any { return n1.director.Status() })
	for _, c := range all {
		require.NoError(t, c.SetDeadline(time.Now().Add(15*time.Second)))
		_, err := fmt.Fprintln(c, "who")
		require.NoError(t, err)
	}
	time.Sleep(time.Second)
	n1.Run("nft", "delete table netdev deaf")
	for _, c := range all {
		require.NoError(t, c.SetDeadline(time.Now().Add(15*time.Second)))
		require.True(t, c.lines.Scan(), "%s at %s: %v", c.LocalAddr(), c.node, c.lines.Err())
	}
	w.live(all, "it hears it again")
}

// With only two nodes, a node knows by the router whether the other node is away or it is itself.
func TestTwoNodes(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 2)
	router := testnet.NewHost(t, "router")
	w.plug(w.segment, router, "198.18.0.1/24", "2001:db8::1/64")
	w.gateways.Store(&[]netip.Addr{netip.MustParseAddr("198.18.0.1"), netip.MustParseAddr("2001:db8::1")})
	n1 := w.nodes["n1"]
	n1.Run("ping", "-c1", "198.18.0.1")
	n1.Run("ping", "-c1", "2001:db8::1")
	w.begin(some("n1", "n2")...)
	w.nodes["n2"].Run("ip", "link", "set", "eth0", "down")
	w.lost = map[string]bool{"n2": true}
	ctx, cancel := context.WithCancel(t.Context()) // what is sent to it has the kernel ask all the time
	sent := make(chan error, 1)
	go func() {
		sent <- n1.Do(func() error {
			c, err := net.Dial("udp", "198.18.0.12:9")
			if err != nil {
				return err
			}
			defer c.Close()
			for ; ctx.Err() == nil; time.Sleep(5 * time.Millisecond) {
				c.Write([]byte("x")) //nolint:errcheck // nobody is there
			}
			return nil
		})
	}()
	defer func() { cancel(); require.NoError(t, <-sent) }()
	n1.director.Set(w.forwarding([]plan.Backend{{Node: "n1", Open: 1}, {Node: "n2", Draining: 1}}))
	gone := func() bool {
		all := n1.director.Status().Neighbours
		return len(all) == 2 && all[0].State == Gone && all[1].State == Gone
	}
	w.until(gone, func() any { return n1.director.Status() })
}

// A node that the kernel is asking again keeps its state. One that has not answered is silent.
func TestNeighbourThatIsAsked(t *testing.T) {
	t.Parallel()
	addr := netip.MustParseAddr("198.18.0.12")
	before := neighbour{addr: addr, device: 2, hardware: "123456"}
	for state, silent := range map[int]bool{netlink.NUD_INCOMPLETE: false, netlink.NUD_FAILED: true, netlink.NUD_PROBE: false} {
		l := newLinks()
		l.subnets[netip.MustParsePrefix("198.18.0.0/24")] = 2
		n := netlink.Neigh{IP: addr.AsSlice(), LinkIndex: 2, State: state}
		if state == netlink.NUD_PROBE {
			n.HardwareAddr = net.HardwareAddr(before.hardware)
		}
		l.add([]netlink.Neigh{n}, nil)
		got, _, ok := l.locate(addr, before)
		require.True(t, ok)
		want := before
		want.silent = silent
		require.Equal(t, want, got)
	}
}

// Flushed rules are restored, and connections continue. A restart of the speaker changes
// nothing.
func TestRulesAreBack(t *testing.T) {
	t.Parallel()
	w := startWorld(t, 3, some("n1", "n2", "n3")...)
	all := w.open(20)
	time.Sleep(2 * verifyInterval)
	require.NotContains(t, w.nodes["n1"].log.String(), "restored", "nobody has changed them")
	for _, spoil := range []string{"delete table ip lodestone-direct", "flush table ip6 lodestone-direct",
		"flush chain ip lodestone-direct prerouting", "flush map ip lodestone-direct services", "flush set ip6 lodestone-direct hardware",
		"flush set ip lodestone-direct interfaces", "flush set ip6 lodestone-direct guard"} {
		written := func() int { return strings.Count(w.nodes["n1"].log.String(), `msg="direct forwarding"`) }
		before := written()
		w.nodes["n1"].Run("nft", spoil)
		w.until(func() bool { return written() > before }, func() any { return spoil })
		w.live(all, "after "+spoil)
	}
	for _, name := range w.names {
		w.nodes[name].stop()
		w.live(all, "no Director on "+name)
	}
	w.start(w.names...)
	w.want(some("n1", "n2", "n3")...)
	w.live(all, "started anew")
}

// Three nodes disagree about the table. A segment of an unknown connection goes around for a
// bounded number of hops.
func TestNodesThatDisagree(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 3)
	w.start(w.names...)
	w.own("n1")
	w.wantAt([]string{"n1"}, some("n2")...)
	w.wantAt([]string{"n2"}, some("n3")...)
	w.wantAt([]string{"n3"}, some("n1")...)
	before := w.handed()
	w.strangers(100)
	w.until(func() bool { return w.handed() > before }, func() any { return w.handed() })
	time.Sleep(time.Second)
	require.LessOrEqual(t, w.handed()-before, 100*5)
}

// A Node object with the router's address does not switch direct forwarding off for packets from
// the router.
func TestRouterIsNoNode(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 2)
	w.extra = map[string][]netip.Addr{"liar": {netip.MustParseAddr("198.18.0.2")}} // the client's, which is all that a router is here
	w.begin(some("n1", "n2")...)
	w.until(func() bool { return w.nodes["n1"].director.Status().Peers == 3 }, func() any { return w.nodes["n1"].director.Status() })
	by4 := func() (four []*conn) {
		for i, c := range w.open(40) {
			if i%2 == 0 {
				four = append(four, c)
			}
		}
		return four
	}
	require.Equal(t, map[string]int{"n1": 20}, at(by4()), "what a node hands here is not handed on")
	w.gateways.Store(&[]netip.Addr{netip.MustParseAddr("198.18.0.2")})
	w.until(func() bool { return w.nodes["n1"].director.Status().Peers == 2 }, func() any { return w.nodes["n1"].director.Status() })
	require.NotZero(t, at(by4())["n2"], "half of them, give or take")
}

// With sessionAffinity: ClientIP a client stays on one node, wherever the VIP is.
func TestAffinityOutlivesAMove(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 3)
	w.byClient = true
	w.begin(some("n1", "n2", "n3")...)
	first := w.open(10)
	w.own("n2")
	for i, c := range append(w.open(10), first...) {
		require.Equal(t, first[i%2].node, c.node)
	}
}

// A node that was cut off for long and gets the VIP when it is back hands connections to the
// nodes that keep them.
func TestNodeThatWasCutOff(t *testing.T) {
	t.Parallel()
	w := startWorld(t, 3, some("n1", "n2", "n3")...)
	all := w.open(20)
	w.nodes["n1"].Run("ip", "link", "set", "eth0", "down")
	w.own("n2")
	time.Sleep(w.nodes["n1"].director.Hold + 5*time.Second)
	w.nodes["n1"].Run("ip", "link", "set", "eth0", "up")
	w.nodes["n1"].Address("eth0", "2001:db8::11/64")
	w.own("n1")
	lived := 0
	for _, c := range all {
		if c.node != "n1" {
			require.NoError(t, c.ask())
			lived++
		}
	}
	require.NotZero(t, lived)
}

// However many Services are created and deleted, a bounded number of them is handed over.
func TestFewSwitchedOffServices(t *testing.T) {
	t.Parallel()
	host, d := alone(t)
	want, none := plan.Forwarding{Services: map[plan.LimitKey]plan.Direct{}}, plan.Forwarding{}
	all := some("n1")
	two := []plan.Port{{Protocol: unix.IPPROTO_TCP, Number: 80}, {Protocol: unix.IPPROTO_TCP, Number: 81}}
	vip := func(net byte, i int) netip.Addr { return netip.AddrFrom4([4]byte{10, net, byte(i >> 8), byte(i)}) }
	for i := range maxSwitchedOff/2 + 1000 {
		want.Services[plan.LimitKey{VIP: vip(1, i), Service: fmt.Sprint("many/", i)}] = plan.Direct{Ports: two, Backends: all}
	}
	for i := range 100 {
		want.Services[plan.LimitKey{VIP: vip(2, i), Service: fmt.Sprint("few/", i)}] = plan.Direct{Ports: two, Backends: all}
	}
	require.NoError(t, host.Do(func() error {
		d.take(want)
		d.take(none)
		return d.err
	}))
	require.Len(t, d.switchedOff, maxSwitchedOff/2)
	of := func(namespace string) (n int) {
		for key := range d.switchedOff {
			if strings.HasPrefix(key.Service, namespace+"/") {
				n++
			}
		}
		return n
	}
	require.Equal(t, 100, of("few"), "of the namespace that has most of it")
}

// Services with the longest names and as many ports as count are in the kernel, all of them.
func TestServicesWithLongNames(t *testing.T) {
	t.Parallel()
	host, d := alone(t)
	const services, ports = 7, 64
	want := plan.Forwarding{Services: map[plan.LimitKey]plan.Direct{}}
	direct := plan.Direct{Backends: some("n1")}
	for port := range uint16(ports) {
		direct.Ports = append(direct.Ports, plan.Port{Protocol: unix.IPPROTO_TCP, Number: 80 + port})
	}
	for i := range byte(services) {
		name := fmt.Sprint(strings.Repeat("n", 63), "/", strings.Repeat("s", 62), i)
		for _, vip := range []netip.Addr{netip.AddrFrom4([4]byte{10, 3, 0, i}), netip.AddrFrom16([16]byte{0x20, 1, 0xd, 0xb8, 15: i})} {
			want.Services[plan.LimitKey{VIP: vip, Service: name}] = direct
		}
	}
	require.NoError(t, host.Do(func() error {
		d.take(want)
		return d.err
	}))
	for _, f := range families {
		require.Equal(t, services*ports, strings.Count(host.Run("nft", "list map "+f.name()+" "+servicesMap), "goto"), f.name())
	}
}

// While there are too many tables, a Service that has one keeps it when its backends change.
func TestServiceKeepsItsTable(t *testing.T) {
	t.Parallel()
	host, d := alone(t)
	d.most = clusterSize
	want := func(open ...int) plan.Forwarding {
		f := plan.Forwarding{Services: map[plan.LimitKey]plan.Direct{}}
		for i, n := range open {
			key := plan.LimitKey{VIP: netip.AddrFrom4([4]byte{203, 0, 113, byte(i)}), Service: fmt.Sprint("default/", i)}
			f.Services[key] = plan.Direct{Ports: web, Backends: []plan.Backend{{Node: "n1", Open: n}}}
		}
		return f
	}
	require.NoError(t, host.Do(func() error {
		d.take(want(3))
		for open := range 9 {
			d.take(want(1+open, 14, 15))
			_, has := d.have[0].services[serviceKey(netip.MustParseAddr("203.0.113.0"), 80)]
			if !has {
				t.Errorf("it has none with %d endpoints", 1+open)
			}
		}
		return d.err
	}))
}

// A namespace with too many tables takes none from another one, even if that comes later or has names
// that sort last. All namespaces share the table of policy Cluster.
func TestNamespacesShareTheTables(t *testing.T) {
	t.Parallel()
	host, d := alone(t)
	d.most = clusterSize + 10*localSize
	f := plan.Forwarding{Services: map[plan.LimitKey]plan.Direct{}}
	add := func(name string, local bool, open int) {
		vip := netip.AddrFrom4([4]byte{203, 0, 113, byte(len(f.Services))})
		backends := []plan.Backend{{Node: "n1", Open: open}}
		f.Services[plan.LimitKey{VIP: vip, Service: name}] = plan.Direct{Ports: web, Local: local, Backends: backends}
	}
	tables := func() map[string]int {
		of := map[string]int{}
		require.NoError(t, host.Do(func() error {
			d.take(plan.Forwarding{Services: maps.Clone(f.Services)})
			return d.err
		}))
		for _, s := range d.have[0].services {
			namespace, _, _ := strings.Cut(s.service, "/")
			of[namespace]++
		}
		return of
	}
	for i := range 30 {
		add(fmt.Sprint("greedy/", i), true, 1+i)
	}
	require.Equal(t, map[string]int{"greedy": 18}, tables())
	add("victim/web", true, 99)
	add("victim/shop", false, 1)
	add("other/web", false, 1)
	require.Equal(t, map[string]int{"greedy": 9, "victim": 2, "other": 1}, tables())
}

// A Service that follows another one at its VIP and port gets its connections, although the
// earlier one is switched off.
func TestServiceThatFollowsAnother(t *testing.T) {
	t.Parallel()
	host, d := alone(t)
	named := func(name string, backends []plan.Backend) plan.Forwarding {
		return plan.Forwarding{Services: map[plan.LimitKey]plan.Direct{{VIP: vip4, Service: name}: {Ports: web, Backends: backends}}}
	}
	require.NoError(t, host.Do(func() error {
		for i := range 20 { // each leaves one that is switched off
			d.take(named(fmt.Sprint(i), []plan.Backend{{Node: "n1", Open: 1 + i%7}}))
			if s := d.have[0].services[serviceKey(vip4, 80)]; s.switchedOff {
				t.Errorf("after %d: %+v", i, s)
			}
		}
		return d.err
	}))
	require.Empty(t, d.switchedOff, "nothing of the earlier ones is left to hand over")
}

// A node whose speaker was not heard since a Service came has no rules for it, and would reset connections
// that others keep: it is not asked until its speaker is heard again. It is asked for Services that were
// there before.
func TestNodeThatMissedAService(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 3)
	w.start("n1", "n2")
	w.own("n1")
	there := []string{"n1", "n2"}
	change := func(lost bool, open ...int) {
		w.lost = map[string]bool{"n3": lost}
		backends := []plan.Backend{{Node: "n1", Open: open[0]}, {Node: "n2", Open: open[1]}, {Node: "n3", Open: open[2]}}
		if lost {
			backends[2].Open, backends[2].Draining = 0, 1
		}
		w.wantAt(there, backends...)
	}
	w.wantAt(there) // they begin before the Service comes: they do not know the age of Services that are there at the start
	change(true, 1, 1, 0)
	all := w.open(60)
	require.Zero(t, at(all)["n3"])
	for _, open := range [][]int{{4, 1, 0}, {1, 4, 0}, {2, 2, 0}} {
		change(true, open...)
		w.live(all, fmt.Sprint(open))
	}
	require.Empty(t, w.nodes["n1"].director.View().Services[0].Others)

	w.start("n3")
	there = w.names
	change(false, 2, 2, 2)
	for _, name := range w.names {
		d := w.nodes[name].director
		w.until(func() bool { return len(d.View().Services[0].Open) == 3 }, func() any { return d.View() })
	}
	w.live(all, "all speakers are heard")
	fresh := w.open(60)
	require.NotZero(t, at(fresh)["n3"])
	w.nodes["n3"].stop()
	there = []string{"n1", "n2"}
	change(true, 1, 3, 0)
	w.live(append(all, fresh...), "a speaker is lost that knew the Service")
}

// A node whose speaker is lost has the rules of a Service, but not of a port that came to it since: so it is asked for connections to
// the older ports alone.
func TestNodeThatMissedAPort(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 3)
	other := plan.Port{Protocol: unix.IPPROTO_TCP, Number: 81}
	w.ports = []plan.Port{other}
	w.begin(some("n1", "n2", "n3")...)
	w.nodes["n3"].stop()
	w.lost, w.ports = map[string]bool{"n3": true}, append(w.ports, web...)
	change := func(one, two int) {
		w.wantAt([]string{"n1", "n2"}, plan.Backend{Node: "n1", Open: one}, plan.Backend{Node: "n2", Open: two},
			plan.Backend{Node: "n3", Draining: 1})
	}
	change(1, 1)
	all := w.open(60)
	require.Zero(t, at(all)["n3"])
	for _, open := range [][]int{{4, 1}, {1, 4}, {2, 2}} {
		change(open[0], open[1])
		w.live(all, fmt.Sprint(open))
	}
	have := w.nodes["n1"].director.have[0]
	asks := func(port plan.Port) bool {
		return slices.Contains(have.tables[have.services[serviceKey(vip4, port.Number)].table].next, hop{w.nodes["n3"].addrs[0], 2})
	}
	require.True(t, asks(other))
	require.False(t, asks(web[0]))
}

// A node whose speaker is lost gets endpoints. It keeps no connections, and by its old rules it would hand segments to nodes
// that were asked already. So it is not asked.
func TestNodeThatMissedItsEndpoints(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 3)
	w.start("n1", "n2", "n3")
	w.own("n2")
	w.wantAt(w.names, some("n2", "n3")...)
	all := w.open(60)
	w.nodes["n1"].stop()
	w.lost = map[string]bool{"n1": true}
	for _, open := range [][]int{{4, 1}, {1, 4}, {2, 2}} {
		w.wantAt([]string{"n2", "n3"}, plan.Backend{Node: "n1", Draining: 1}, plan.Backend{Node: "n2", Open: open[0]},
			plan.Backend{Node: "n3", Open: open[1]})
		w.live(all, fmt.Sprint(open))
	}
}

// A node that has lost all others asks them for connections to a Service that comes then, or a moment after they
// are heard again: the node itself was cut off, and the others had the Service before.
func TestNodeThatWasAwayItself(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 3)
	w.start("n1", "n2", "n3")
	w.own("n1")
	w.wantAt([]string{"n1", "n3"}, some("n1", "n2", "n3")...)
	all := w.open(60)
	w.lost = map[string]bool{"n1": true, "n3": true}
	w.setOn("n2", nil)
	w.lost = nil
	w.wantAt([]string{"n2"}, some("n1", "n2", "n3")...)
	w.own("n2")
	w.live(all, "it owns the VIP")
}

// A node that comes back after its connections were given up, and whose speaker is not heard, may have no
// rules: it is not asked.
func TestNodeThatStartsAnew(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 3)
	w.hold = time.Second
	w.begin(some("n1", "n2", "n3")...)
	all := slices.DeleteFunc(w.open(60), func(c *conn) bool { return c.node == "n3" })
	n3 := w.nodes["n3"]
	n3.stop()
	change := func(one, two int) {
		for _, name := range []string{"n1", "n2"} {
			w.setOn(name, []plan.Backend{{Node: "n1", Open: one}, {Node: "n2", Open: two}, {Node: "n3", Draining: 1}})
		}
	}
	w.away(func() { change(1, 1) }, []string{"n1", "n2"}, "n3")
	for _, f := range allTables {
		n3.Run("sh", "-c", "nft delete table "+f.name()+" || true")
	}
	w.back([]string{"n1", "n2"}, "n3")
	for _, open := range [][]int{{4, 1}, {1, 4}, {2, 2}} {
		change(open[0], open[1])
		w.live(all, fmt.Sprint(open))
	}
}

// A node that has given up all others may have been cut off itself: when they answer again they are asked,
// although their speakers are not heard yet.
func TestNodeThatGaveUpAllOthers(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 3)
	w.hold = 4 * time.Second
	w.gateways.Store(&[]netip.Addr{netip.MustParseAddr("198.18.0.2"), netip.MustParseAddr("2001:db8::2")})
	w.begin(some("n1", "n2", "n3")...)
	all := w.open(40)
	require.Len(t, at(all), 3)
	w.away(func() {
		w.setOn("n1", []plan.Backend{{Node: "n1", Open: 1}, {Node: "n2", Draining: 1}, {Node: "n3", Draining: 1}})
	}, []string{"n1"}, "n2", "n3")
	w.back([]string{"n1"}, "n2", "n3")
	for _, name := range w.names {
		d := w.nodes[name].director
		w.until(func() bool { return strings.Count(fmt.Sprint(d.Status().Neighbours), string(Reachable)) == 4 }, func() any { return d.Status() })
	}
	w.live(all, "they answer again")
}

// away takes nodes off the segment and calls inform, which sets the lost speakers on others. Then it waits
// until these have given up the nodes' connections.
func (w *world) away(inform func(), by []string, nodes ...string) {
	w.t.Helper()
	w.lost = map[string]bool{}
	for _, name := range nodes {
		w.nodes[name].Run("ip", "link", "set", "eth0", "down")
		w.lost[name] = true
	}
	inform()
	for _, name := range by {
		d := w.nodes[name].director
		w.until(func() bool { return strings.Count(fmt.Sprint(d.Status().Neighbours), string(Gone)) == 2*len(nodes) },
			func() any { return d.Status() })
	}
}

// back returns nodes to the segment, and waits until they answer the others.
func (w *world) back(by []string, nodes ...string) {
	w.t.Helper()
	for _, name := range nodes {
		n := w.nodes[name]
		n.Run("ip", "link", "set", "eth0", "up")
		n.Address("eth0", n.addrs[1].String()+"/64") // the kernel forgets it
		for _, other := range by {
			for _, a := range n.addrs {
				w.nodes[other].Run("timeout", "30", "sh", "-c", "until ping -c 1 -W 1 "+a.String()+"; do :; done")
			}
		}
	}
}
