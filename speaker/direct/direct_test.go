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

func some(names ...string) (all []plan.Backend) {
	for _, n := range names {
		all = append(all, plan.Backend{Node: n, Open: 1})
	}
	return all
}

// Connections are spread over the nodes, whichever owns the VIP, the pods see the client's
// address, and no connection notices that the VIP moves.
func TestConnectionsOutliveAMove(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 3)
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
	w := startWorld(t, 3, some("n1", "n2")...)
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

// Connections of a node that is silent wait for it; when it stays away they are reset. All
// others go on, and new ones have others.
func TestSilentNode(t *testing.T) {
	t.Parallel()
	w := startWorld(t, 3, some("n1", "n2", "n3")...)
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
			address(w.nodes["n3"].Host, "eth0", "2001:db8::13/64") // the kernel forgets it
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
		_, gone := w.nodes["n1"].director.Status().Gone["n3"]
		return gone
	}, func() any { return w.nodes["n1"].director.Status() })
	view := w.nodes["n1"].director.View()
	require.Equal(t, []Neighbour{{"n2", w.nodes["n2"].addrs[0], Reachable}, {"n2", w.nodes["n2"].addrs[1], Reachable},
		{"n3", w.nodes["n3"].addrs[0], Gone}, {"n3", w.nodes["n3"].addrs[1], Gone}}, view.Neighbours)
	require.Equal(t, []Forwarded{{vip4, "default/web", false, []string{"n1", "n2"}, []string{"n3"}},
		{vip6, "default/web", false, []string{"n1", "n2"}, []string{"n3"}}}, view.Services)
	for _, c := range away {
		require.ErrorIs(t, c.ask(), unix.ECONNRESET)
	}
	w.live(there, "one node is gone")
}

// Whoever flushes the rules, they are back, and connections with them. A speaker that is
// started anew changes nothing.
func TestRulesAreBack(t *testing.T) {
	t.Parallel()
	w := startWorld(t, 3, some("n1", "n2", "n3")...)
	all := w.open(20)
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

// Three nodes disagree about the table. A segment of a connection that nobody knows goes
// around, and not for long.
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

// A node that says that it has the router's address does not switch direct forwarding off for
// what comes by the router.
func TestRouterIsNoNode(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 2)
	w.extra = map[string][]netip.Addr{"liar": {netip.MustParseAddr("198.18.0.2")}} // the client's, which is all that a router is here
	w.start(w.names...)
	w.own("n1")
	w.want(some("n1", "n2")...)
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
	require.Greater(t, at(by4())["n2"], 4)
}

// With sessionAffinity: ClientIP a client stays on one node, wherever the VIP is.
func TestAffinityOutlivesAMove(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 3)
	w.byClient = true
	w.start(w.names...)
	w.own("n1")
	w.want(some("n1", "n2", "n3")...)
	first := w.open(10)
	w.own("n2")
	for i, c := range append(w.open(10), first...) {
		require.Equal(t, first[i%2].node, c.node)
	}
}

// A node that was cut off for long and gets the VIP when it is back hands connections to
// those who have them.
func TestNodeThatWasCutOff(t *testing.T) {
	t.Parallel()
	w := startWorld(t, 3, some("n1", "n2", "n3")...)
	all := w.open(20)
	w.nodes["n1"].Run("ip", "link", "set", "eth0", "down")
	w.own("n2")
	time.Sleep(w.nodes["n1"].director.Hold + 5*time.Second)
	w.nodes["n1"].Run("ip", "link", "set", "eth0", "up")
	address(w.nodes["n1"].Host, "eth0", "2001:db8::11/64")
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

// Who creates Services and deletes them again has the node remember so many of them.
func TestFewServicesDrain(t *testing.T) {
	t.Parallel()
	host := testnet.NewHost(t, "node")
	testnet.NewSegment(t, 0).Plug(host, "eth0")
	address(host, "eth0", "198.18.0.1/16")
	d := New(Options{Log: slog.New(slog.DiscardHandler), Node: "n1", Gateways: func() []netip.Addr { return nil }})
	want, none := plan.Forwarding{Services: map[plan.LimitKey]plan.Direct{}}, plan.Forwarding{}
	all := some("n1")
	for i := range maxDraining + 1000 {
		want.Services[plan.LimitKey{VIP: vip4, Service: fmt.Sprint(i)}] = plan.Direct{Ports: web, Backends: all}
	}
	require.NoError(t, host.Do(func() error {
		d.take(want)
		d.take(none)
		return d.err
	}))
	require.Len(t, d.draining, maxDraining)
}

// Who follows another Service at its VIP and port is not kept from its connections by what
// that one left.
func TestServiceThatFollowsAnother(t *testing.T) {
	t.Parallel()
	host := testnet.NewHost(t, "node")
	testnet.NewSegment(t, 0).Plug(host, "eth0")
	address(host, "eth0", "198.18.0.1/16")
	d := New(Options{Log: slog.New(slog.DiscardHandler), Node: "n1", Gateways: func() []netip.Addr { return nil }})
	named := func(name string, backends []plan.Backend) plan.Forwarding {
		return plan.Forwarding{Services: map[plan.LimitKey]plan.Direct{{VIP: vip4, Service: name}: {Ports: web, Backends: backends}}}
	}
	require.NoError(t, host.Do(func() error {
		for i := range 20 { // each leaves one that drains
			d.take(named(fmt.Sprint(i), []plan.Backend{{Node: "n1", Open: 1 + i%7}}))
			if s := d.have[0].services[serviceKey(vip4, 80)]; s.drains {
				t.Errorf("after %d: %+v", i, s)
			}
		}
		return d.err
	}))
	require.Len(t, d.draining, 19)
}
