package direct

import (
	"bufio"
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	nl "github.com/mdlayher/netlink"
	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"
	"github.com/stretchr/testify/require"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/lodestone-lb/lodestone/pkg/notify"
	"github.com/lodestone-lb/lodestone/pkg/report"
	"github.com/lodestone-lb/lodestone/pkg/testnet"
	"github.com/lodestone-lb/lodestone/speaker/plan"
)

// If the rules of one family cannot be written, those of the other one are. The node does not
// report that it has rules, because others would hand it connections of both families.
func TestFamiliesFailAlone(t *testing.T) {
	t.Parallel()
	for i, f := range families {
		t.Run(f.name(), func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, 2)
			n, other := w.nodes["n1"], families[1-i]
			release := n.occupy(t, f)
			w.start(w.names...)
			w.own("n1")
			for _, name := range w.names {
				w.nodes[name].director.Set(w.forwarding(some("n2")))
			}
			count := func() string { return n.Run("nft", "list", "table "+other.name()) }
			w.until(func() bool { return n.director.Status().Err != nil }, func() any { return n.log })
			require.ErrorIs(t, n.director.Status().Err, unix.EPERM)
			require.ErrorContains(t, n.director.Status().Err, f.name())
			require.False(t, n.director.InForce())
			require.Contains(t, count(), "steer-")
			w.until(func() bool { return n.director.Status().Peers == 2 }, func() any { return n.director.Status() })
			time.Sleep(2 * interval)
			want := []string{"n2", "n2"}
			want[i] = "n1"
			for j, c := range w.open(10) {
				require.Equal(t, want[j%2], c.node)
			}
			release()
			w.until(n.director.InForce, func() any { return n.log })
			require.NoError(t, n.director.Status().Err)
			require.Equal(t, map[string]int{"n2": 10}, at(w.open(10)))
		})
	}
}

// occupy lets another program own the table of a family, so that no other may change it.
func (n *node) occupy(t *testing.T, f *family) (release func()) {
	t.Helper()
	cmd := n.Command(context.Background(), "nft", "--interactive")
	in, err := cmd.StdinPipe()
	require.NoError(t, err)
	out, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	release = func() {
		in.Close()
		cmd.Wait() //nolint:errcheck // the program is killed
	}
	t.Cleanup(release)
	_, err = fmt.Fprintf(in, "add table %s { flags owner; }\nlist tables\n", f.name())
	require.NoError(t, err)
	for lines := bufio.NewScanner(out); lines.Scan(); {
		if lines.Text() == "table "+f.name() {
			return release
		}
	}
	t.Fatal("nft did not make the table")
	return nil
}

// A speaker that is dead for longer than the guard ends no connection: neither those that its node
// keeps nor those that its node is asked for.
func TestSpeakerDeadForLong(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 3)
	w.start("n1", "n2")
	w.guard = 6 * time.Second // of n3 alone
	w.start("n3")
	w.own("n1")
	w.want(moved[0]...)
	all := w.open(60)
	require.Len(t, at(all), 3)
	w.nodes["n3"].stop()
	w.lost = map[string]bool{"n3": true}
	w.wantAt([]string{"n1", "n2"}, some("n1", "n2")[0], some("n1", "n2")[1], plan.Backend{Node: "n3", Draining: 1})
	time.Sleep(w.guard + time.Second)
	for _, open := range []string{"n1", "n2"} {
		backends := []plan.Backend{{Node: "n1", Draining: 1}, {Node: "n2", Draining: 1}, {Node: "n3", Draining: 1}}
		backends[map[string]int{"n1": 0, "n2": 1}[open]] = plan.Backend{Node: open, Open: 1}
		w.wantAt([]string{"n1", "n2"}, backends...)
		for _, owner := range []string{"n1", "n2"} {
			w.own(owner)
			w.live(all, fmt.Sprintf("%s takes new connections, %s owns the VIP", open, owner))
		}
	}
}

// Connections are found, and new ones are spread, although other programs have tables at the same
// hooks: on hardened hosts, rules drop segments of connections that conntrack does not know.
func TestOtherTables(t *testing.T) {
	t.Parallel()
	w := startWorld(t, 3, moved[0]...)
	// Of chains at the same priority, the last one comes first.
	for _, n := range w.nodes {
		for _, family := range []string{"ip", "ip6"} {
			n.Run("nft", `table `+family+` mangle {
				chain PREROUTING { type filter hook prerouting priority -150; policy accept;
					ct state invalid drop
					tcp flags & (fin | syn | rst | ack) != syn ct state new drop
				}
			}
			table `+family+` firewall {
				chain early { type filter hook prerouting priority -300; tcp dport 80 accept; }
				chain same { type filter hook prerouting priority `+fmt.Sprint(priority)+`; tcp dport 80 meta mark set 0x4000 accept; }
				chain input { type filter hook input priority 0; ct state invalid drop; }
				chain forward { type filter hook forward priority 0; ct state invalid drop; ct state established accept; }
			}`)
		}
	}
	all := w.open(40)
	require.Len(t, at(all), 3)
	for i, backends := range moved {
		w.own(w.names[i%3])
		w.want(backends...)
		w.live(all, fmt.Sprint("backends ", backends))
	}
}

// A Service that loses its table works as without direct forwarding. When it has one again, its
// connections are handed over.
func TestServiceWithoutATable(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 2)
	const others = 4
	w.most, w.cluster = others*clusterSize, true
	w.start(w.names...)
	w.own("n1")
	many := w.forwarding(some("n2"))
	for i := range others {
		key := plan.LimitKey{VIP: netip.AddrFrom4([4]byte{203, 0, 113, byte(i)}), Service: fmt.Sprint("default/other-", i)}
		six := plan.LimitKey{VIP: netip.MustParseAddr(fmt.Sprintf("2001:db8:5::%d", i)), Service: key.Service}
		d := plan.Direct{Ports: web, Backends: []plan.Backend{{Node: "n1", Open: i + 1}, {Node: "n2", Open: 1}}}
		many.Services[key], many.Services[six] = d, d
	}
	n := w.nodes["n1"]
	for _, name := range w.names {
		w.nodes[name].director.Set(many)
	}
	w.until(func() bool { return n.director.Status().Without == 2 }, func() any { return n.director.Status() })
	require.NoError(t, n.director.Status().Err)
	require.Contains(t, n.log.String(), "too many tables")
	all := w.open(10)
	require.Equal(t, map[string]int{"n1": 10}, at(all))
	w.wantAt([]string{"n1"}, some("n2")...)
	require.Equal(t, 2, n.director.Status().Without, "the others are switched off, and one of them has none")
	w.live(all, "there is a table")
	require.Equal(t, map[string]int{"n2": 10}, at(w.open(10)))
}

func (w *world) forwarding(backends []plan.Backend) plan.Forwarding {
	want := plan.Forwarding{Services: map[plan.LimitKey]plan.Direct{}, Nodes: map[string][]netip.Addr{}, Lost: w.lost}
	for _, n := range w.nodes {
		want.Nodes[n.name] = n.addrs
	}
	maps.Copy(want.Nodes, w.extra)
	if w.ports == nil {
		w.ports = web
	}
	if backends != nil {
		for _, vip := range []netip.Addr{vip4, vip6} {
			want.Services[plan.LimitKey{VIP: vip, Service: "default/web"}] = plan.Direct{Ports: w.ports, Seed: 4711,
				ByClient: w.byClient, Local: !w.cluster, Backends: backends}
		}
	}
	return want
}

// While conntrack is full on the node that hands over, connections that other nodes keep continue,
// as do new connections to them. The Director warns before, because after a change packets need
// entries in conntrack.
func TestConntrackFull(t *testing.T) {
	t.Parallel()
	w := startWorld(t, 2, some("n1", "n2")...)
	all := w.open(20)
	require.Len(t, at(all), 2)
	n := w.nodes["n1"]
	w.shortened("n1")
	limit, err := strconv.Atoi(strings.TrimSpace(n.Run("sysctl", "-n", "net.netfilter.nf_conntrack_max")))
	require.NoError(t, err)
	require.NoError(t, n.Do(func() error { return track(limit) }))
	w.until(func() bool { return n.director.Status().ConntrackFull }, func() any { return n.log })
	require.Contains(t, n.log.String(), "conntrack is nearly full")
	w.live(all, "conntrack is full")
	w.setOn("n1", some("n2")) // all packets go through conntrack until n1's connections were looked up
	for _, c := range all {
		if c.node == "n1" {
			require.NoError(t, c.ask())
		}
	}
	w.shortened("n1")
	require.Equal(t, map[string]int{"n2": 10}, at(w.open(10)))
	require.NoError(t, n.Do(func() error { return netlink.ConntrackTableFlush(netlink.ConntrackTable) }))
	w.until(func() bool { return !n.director.Status().ConntrackFull }, func() any { return n.log })
	require.Equal(t, map[string]int{"n2": 10}, at(w.open(10)))
}

// track adds n flows to conntrack which it does not evict for others.
func track(n int) error {
	c, err := nl.Dial(unix.NETLINK_NETFILTER, nil)
	if err != nil {
		return err
	}
	defer c.Close() //nolint:errcheck // nothing is lost with it
	if err := c.SetWriteBuffer(4 << 20); err != nil {
		return err
	}
	from, to := []byte{10, 9, 0, 0}, []byte{10, 8, 0, 0}
	e := nl.NewAttributeEncoder()
	e.ByteOrder = binary.BigEndian
	tuple := func(from, to []byte) func(*nl.AttributeEncoder) error {
		return func(e *nl.AttributeEncoder) error {
			e.Nested(1, func(e *nl.AttributeEncoder) error { e.Bytes(1, from); e.Bytes(2, to); return nil })
			e.Nested(2, func(e *nl.AttributeEncoder) error {
				e.Uint8(1, unix.IPPROTO_UDP)
				e.Uint16(2, 9)
				e.Uint16(3, 9)
				return nil
			})
			return nil
		}
	}
	e.Nested(1, tuple(from, to))
	e.Nested(2, tuple(to, from))
	e.Uint32(3, 1<<1|1<<2|1<<3) // status: seen reply, assured, confirmed
	e.Uint32(7, 600)            // time-out
	flow, err := e.Encode()
	if err != nil {
		return err
	}
	var batch []nl.Message
	for i := range n + 1000 { // to encode each of them takes several times as long
		data := bytes.ReplaceAll(flow, from, []byte{10, 9, byte(i >> 16), byte(i >> 8)})
		data = bytes.ReplaceAll(data, to, []byte{10, 8, 0, byte(i)})
		const add = 1 << 8 // IPCTNL_MSG_CT_NEW of NFNL_SUBSYS_CTNETLINK
		if i == 0 {        // the others have the same form
			if _, err := c.Execute(nl.Message{Header: nl.Header{Type: add, Flags: nl.Request | nl.Create | nl.Acknowledge},
				Data: append([]byte{unix.AF_INET, 0, 0, 0}, data...)}); err != nil {
				return err
			}
			continue
		}
		batch = append(batch, nl.Message{Header: nl.Header{Type: add, Flags: nl.Request | nl.Create},
			Data: append([]byte{unix.AF_INET, 0, 0, 0}, data...)})
		if len(batch) == 1000 || i == n+999 {
			if _, err := c.SendMessages(batch); err != nil {
				return err
			}
			batch = batch[:0]
		}
	}
	return nil
}

// A bond that sends with other hardware addresses than its own is found, also below VLANs and bridges. Bridges and their ports are
// the kernel's. Machines that run tests may have neither bonds nor VLANs: pairs are in their place, of which each end is on the other.
func TestBondUnder(t *testing.T) {
	t.Parallel()
	host := testnet.NewHost(t, "node")
	for _, pair := range []string{"tlb0 vlan0", "alb1 other1", "alb2 vlan2", "lacp3 vlan3", "pod4 other4"} {
		first, second, _ := strings.Cut(pair, " ")
		host.Run("ip", "link", "add", first, "type", "veth", "peer", "name", second)
	}
	for bridge, of := range map[string][]string{"br1": {"pod4", "alb1"}, "br2": {"vlan2"}, "br3": {"lacp3"}} {
		host.Run("ip", "link", "add", bridge, "type", "bridge")
		for _, port := range of {
			host.Run("ip", "link", "set", port, "master", bridge)
		}
	}
	as := func(link netlink.Link, err error) (netlink.Link, error) {
		require.NoError(t, err)
		switch attrs := *link.Attrs(); strings.TrimRight(attrs.Name, "0123456789") {
		case "tlb":
			return &netlink.Bond{LinkAttrs: attrs, Mode: netlink.BOND_MODE_BALANCE_TLB}, nil
		case "alb":
			return &netlink.Bond{LinkAttrs: attrs, Mode: netlink.BOND_MODE_BALANCE_ALB}, nil
		case "lacp":
			return &netlink.Bond{LinkAttrs: attrs, Mode: netlink.BOND_MODE_802_3AD}, nil
		case "vlan":
			return &netlink.Vlan{LinkAttrs: attrs}, nil
		}
		return link, nil
	}
	find := func(index int) (netlink.Link, error) { return as(netlink.LinkByIndex(index)) }
	within := func(bridge int) (all []netlink.Link, err error) {
		all, err = ports(bridge)
		for i := range all {
			all[i], err = as(all[i], err)
		}
		return all, err
	}
	require.NoError(t, host.Do(func() error {
		for name, want := range map[string]string{"tlb0": "tlb0", "vlan0": "tlb0", "br1": "alb1", "br2": "alb2", "br3": "", "lacp3": "",
			"vlan3": "", "other1": ""} {
			link, err := as(netlink.LinkByName(name))
			require.NoError(t, err)
			vlan := &netlink.Vlan{LinkAttrs: netlink.LinkAttrs{Index: 1 << 20, ParentIndex: link.Attrs().Index}}
			for _, link := range []netlink.Link{link, vlan} {
				found := ""
				bond, err := bondUnder(link.Attrs().Index, func(index int) (netlink.Link, error) {
					if index == vlan.Index {
						return vlan, nil
					}
					return find(index)
				}, within)
				require.NoError(t, err)
				if bond != nil {
					found = bond.Name
				}
				require.Equal(t, want, found, name)
			}
		}
		for name, none := range map[string]error{"there is none": netlink.LinkNotFoundError{}, "the kernel does not answer": unix.ENOBUFS} {
			_, err := bondUnder(1, func(int) (netlink.Link, error) { return nil, none }, within)
			require.Equal(t, none == unix.ENOBUFS, err != nil, name)
			_, err = bondUnder(1, func(index int) (netlink.Link, error) {
				if index == 1 {
					return &netlink.Vlan{LinkAttrs: netlink.LinkAttrs{ParentIndex: 2}}, nil
				}
				return nil, none
			}, within)
			require.Equal(t, none == unix.ENOBUFS, err != nil, "below a VLAN, %s", name)
		}
		return nil
	}))
}

// With kube-proxy in mode IPVS there are no rules, and the VIP works as without direct forwarding.
// Existing rules are removed when the mode changes, and come back.
func TestIPVS(t *testing.T) {
	t.Parallel()
	w := startWorld(t, 2, some("n2")...)
	n := w.nodes["n1"]
	for range 2 {
		require.Empty(t, n.director.NoRules())
		require.Equal(t, map[string]int{"n2": 10}, at(w.open(10)))
		n.Run("ip", "link", "add", "kube-ipvs0", "type", "veth", "peer", "name", "other")
		w.until(func() bool { return !n.director.InForce() }, func() any { return n.log })
		require.ErrorIs(t, n.director.Status().Err, errIPVS)
		require.Equal(t, report.RulesWithIPVS, n.director.NoRules())
		require.Contains(t, n.log.String(), "set mode nftables or iptables")
		require.NotContains(t, n.Run("nft", "list", "tables"), tableName)
		require.Equal(t, map[string]int{"n1": 10}, at(w.open(10)))
		n.Run("ip", "link", "delete", "kube-ipvs0")
		w.until(func() bool { return n.director.InForce() && n.director.Status().Err == nil }, func() any { return n.log })
	}
	n.Run("ip", "link", "add", "kube-ipvs0", "type", "veth", "peer", "name", "other")
	w.until(func() bool { return n.director.Status().Err != nil }, func() any { return n.log })
	w.setOn("n1", nil) // without an error
	require.Empty(t, n.director.View().Services, "nothing is switched off where nothing was handed over")
}

// Elements are compared with those of the kernel when a program has changed something in nftables, and with each
// refresh of the guard.
func TestElementsAreComparedAfterAChange(t *testing.T) {
	t.Parallel()
	host, d := alone(t)
	var log testnet.Log
	d.Log = slog.New(slog.NewTextHandler(&log, nil))
	take := func() {
		d.take(plan.Forwarding{Services: map[plan.LimitKey]plan.Direct{{VIP: vip4, Service: "default/web"}: {Ports: web, Backends: some("n1")}}})
		require.NoError(t, d.err)
	}
	// notices reports whether verify notices that the kernel has one element less than it should.
	notices := func(refresh bool) bool {
		of := d.have[0].hardware
		of["invented"] = true
		d.verify(refresh)
		delete(of, "invented")
		found := d.have[0] == nil
		take()
		d.verify(false)
		return found
	}
	require.NoError(t, host.Do(func() error {
		take()
		require.True(t, notices(false), "its own changes count, too")
		require.False(t, notices(false), "nothing has changed")
		require.True(t, notices(true))
		require.False(t, notices(false), "nothing has changed")
		return nil
	}))
	host.Run("nft", "add", "table", "ip", "another")
	require.NoError(t, host.Do(func() error {
		require.True(t, notices(false), "another program has changed something")
		return nil
	}))
}

// Rules that another program has changed are removed, too, if the node can have none from then on.
func TestChangedRulesGo(t *testing.T) {
	t.Parallel()
	host, d := alone(t)
	require.NoError(t, host.Do(func() error {
		d.take(plan.Forwarding{Services: map[plan.LimitKey]plan.Direct{{VIP: vip4, Service: "default/web"}: {Ports: web, Backends: some("n1")}}})
		return d.err
	}))
	host.Run("nft", "flush map ip lodestone-direct services")
	host.Run("ip", "link", "add", "kube-ipvs0", "type", "veth", "peer", "name", "other")
	require.ErrorIs(t, host.Do(func() error {
		d.verify(false)
		d.reconcile()
		return d.err
	}), errIPVS)
	require.NotContains(t, host.Run("nft", "list", "tables"), tableName)
	require.Equal(t, report.RulesWithIPVS, d.NoRules())
}

// A kernel that refuses the rules is not asked again at once: it goes through all of them, and kube-proxy waits for its turn.
func TestRefusedRulesWaitForTheNextAttempt(t *testing.T) {
	t.Parallel()
	host, d := alone(t)
	release := (&node{Host: host}).occupy(t, families[0])
	of := plan.Direct{Ports: web, Backends: some("n1")}
	require.ErrorIs(t, host.Do(func() error {
		d.take(plan.Forwarding{Services: map[plan.LimitKey]plan.Direct{{VIP: vip4, Service: "default/web"}: of}})
		return d.err
	}), unix.EPERM)
	release()
	again := func() error { return host.Do(func() error { d.reconcile(); return d.err }) }
	require.Equal(t, firstRetry, d.writes[0].wait)
	d.writes[0].next = time.Now().Add(time.Hour) // however long the release took
	require.ErrorIs(t, again(), unix.EPERM, "the next attempt is not due")
	d.writes[0].next = time.Time{}
	require.NoError(t, again())
}

// A change comes before it was noticed that the rules were flushed: all are written, and nobody takes the node for one without rules.
func TestAChangeAfterAFlush(t *testing.T) {
	t.Parallel()
	host, d := alone(t)
	of := plan.Direct{Ports: web, Backends: some("n1")}
	take := func(services map[plan.LimitKey]plan.Direct) error {
		return host.Do(func() error { d.take(plan.Forwarding{Services: services}); return d.err })
	}
	one, other := plan.LimitKey{VIP: vip4, Service: "default/web"}, plan.LimitKey{VIP: vip4.Next(), Service: "default/other"}
	require.NoError(t, take(map[plan.LimitKey]plan.Direct{one: of}))
	changed := d.Changed()
	host.Run("nft", "flush ruleset")
	require.NoError(t, take(map[plan.LimitKey]plan.Direct{one: of, other: of}))
	require.True(t, d.InForce())
	require.False(t, notify.Closed(changed))
	require.Contains(t, host.Run("nft", "list table "+families[0].name()), "steer-")
}

// A node that has no rules for one reason, and then for another one, reports the second one.
func TestReasonsFollowEachOther(t *testing.T) {
	t.Parallel()
	host, d := alone(t)
	host.Run("ip", "link", "add", "kube-ipvs0", "type", "veth", "peer", "name", "other")
	d.refused = errBond // which is gone since
	require.NoError(t, host.Do(d.look))
	require.ErrorIs(t, d.refused, errIPVS)
	require.NotErrorIs(t, d.refused, errBond)
}

// The metrics have the Director's state and the kernel's counters of packets, which do not
// fall when tables change or go.
func TestMetrics(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 2)
	w.start(w.names...)
	w.own("n1")
	read := func() map[string]float64 { return w.nodes["n1"].metrics(t) }
	want := map[string]float64{"failing": 0, "services forwarded": 0, "services draining": 0, "services without_table": 0, "tables": 0,
		"neighbours reachable": 0, "neighbours unknown": 0, "neighbours silent": 0, "neighbours gone": 0, "neighbours elsewhere": 0,
		"conntrack_full": 0}
	require.Equal(t, want, read())
	w.want(some("n2")...)
	w.shortened("n1")
	w.open(10)
	got := read()
	packets := 0.0
	for _, f := range allTables {
		packets += got["handed_packets_total "+f.name()]
		want["handed_packets_total "+f.name()] = got["handed_packets_total "+f.name()]
		for d := range Discards() {
			want["dropped_packets_total "+string(d)+" "+f.name()] = 0
		}
	}
	require.Greater(t, packets, 19.0)
	want["services forwarded"], want["tables"], want["neighbours reachable"] = 2, 1, 2
	require.Equal(t, want, got)
	w.want(some("n1", "n2")...)
	w.want()
	w.nodes["n1"].Run("sh", "-c", "nft delete table ip lodestone-direct; nft delete table ip6 lodestone-direct")
	got = read()
	for _, f := range shortcuts {
		name := "handed_packets_total " + f.name()
		require.Contains(t, got, name)
		require.GreaterOrEqual(t, got[name], want[name], "the others count on")
	}
	require.InDelta(t, 2, got["services draining"], 0)
	require.InDelta(t, 0, got["services forwarded"], 0)
}

// metrics returns the metrics of the node's Director.
func (n *node) metrics(t testing.TB) map[string]float64 {
	got, all := map[string]float64{}, make(chan prometheus.Metric, 100)
	require.NoError(t, n.Do(func() error { // registries collect on other threads
		collector{n.director}.Collect(all)
		close(all)
		return nil
	}))
	for m := range all {
		var out dto.Metric
		require.NoError(t, m.Write(&out))
		name := regexp.MustCompile(`fqName: "lodestone_direct_(\w+)"`).FindStringSubmatch(m.Desc().String())[1]
		for _, l := range out.Label {
			name += " " + l.GetValue()
		}
		got[name] = out.GetGauge().GetValue() + out.GetCounter().GetValue()
	}
	return got
}

// dropped counts the packets that the node has dropped for the reason.
func (n *node) dropped(t testing.TB, reason Discard) (packets float64) {
	got := n.metrics(t)
	for _, f := range allTables {
		packets += got["dropped_packets_total "+string(reason)+" "+f.name()]
	}
	return packets
}

// A client of a VIP for which kube-proxy has no rule yet, on the owner or on the node that keeps the
// connection, gets its connection once there is a rule.
func TestNewVIPWaitsForKubeProxy(t *testing.T) {
	t.Parallel()
	w := startWorld(t, 2, some("n1")...)
	for _, name := range w.names {
		w.want(some(name)...)
		n := w.nodes[name]
		rules := n.Run("nft", "list chain inet proxy services")
		n.Run("nft", "flush chain inet proxy services; chain inet proxy forward { policy accept; }")
		var waits sync.WaitGroup
		waits.Go(func() {
			for ; n.dropped(t, Unserved) == 0; time.Sleep(5 * time.Millisecond) {
				if t.Context().Err() != nil {
					return
				}
			}
			n.Run("nft", rules)
		})
		require.Equal(t, map[string]int{name: 2}, at(w.open(2)))
		waits.Wait()
	}
}

// Packets that wait for a silent node are counted. Those above the limit are counted, too, but a busy
// machine does not send so many in a test.
func TestDropsAreCounted(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 2)
	w.hold = time.Minute
	w.begin(some("n1", "n2")...)
	n := w.nodes["n1"]
	w.nodes["n2"].Run("ip", "link", "set", "eth0", "down")
	w.lost = map[string]bool{"n2": true}
	w.setOn("n1", []plan.Backend{{Node: "n1", Open: 1}, {Node: "n2", Draining: 1}})
	w.until(func() bool { return n.metrics(t)["neighbours silent"] == 2 }, func() any { return n.metrics(t) })
	w.strangers(100)
	w.until(func() bool { return n.dropped(t, Waits) == 100 }, func() any { return n.metrics(t) })
	require.Zero(t, n.dropped(t, Limit))
	require.Contains(t, n.Run("nft", "list table ip lodestone-direct"),
		`limit rate over 50000/second burst 10000 packets counter name "limit" drop`)
}

// The socket to nftables stays open between changes, for longer than the deadline of one. When it breaks, a new one is opened.
func TestSocketThatStaysOpen(t *testing.T) {
	t.Parallel()
	host, d := alone(t)
	want := func(open int) plan.Forwarding {
		return plan.Forwarding{Services: map[plan.LimitKey]plan.Direct{{VIP: vip4, Service: "web"}: {Ports: web,
			Backends: []plan.Backend{{Node: "n1", Open: open}}}}}
	}
	require.NoError(t, host.Do(func() error {
		d.take(want(1))
		k, err := d.line.open()
		require.NoError(t, err)
		require.NoError(t, k.Socket.SetDeadline(time.Now().Add(-time.Hour)))
		d.take(want(2))
		require.NoError(t, d.err, "its deadline has passed")
		require.NoError(t, k.Socket.Close())
		d.take(want(3))
		return d.err
	}))
	require.Equal(t, 3, d.want.Services[plan.LimitKey{VIP: vip4, Service: "web"}].Backends[0].Open)
}

// Elements that an administrator restores from a saved listing are noticed, although they are as many as the wanted ones. Whole
// tables cannot be restored so: nft(8) cannot load its listing of them.
func TestRestoredElementsAreNoticed(t *testing.T) {
	t.Parallel()
	host, d := alone(t)
	nodes := map[string][]netip.Addr{"n2": {netip.MustParseAddr("198.18.1.2")}}
	take := func(byClient bool, hardware string) {
		host.Run("ip", "neigh", "replace", "198.18.1.2", "lladdr", hardware, "dev", "eth0", "nud", "permanent")
		one, other := plan.LimitKey{VIP: vip4, Service: "default/web"}, plan.LimitKey{VIP: vip4.Next(), Service: "default/other"}
		require.NoError(t, host.Do(func() error {
			d.take(plan.Forwarding{Nodes: nodes, Services: map[plan.LimitKey]plan.Direct{
				one:   {Ports: web, ByClient: byClient, Backends: some("n1", "n2")},
				other: {Ports: web, Backends: some("n1", "n2")},
			}})
			d.shortcut.extend(d.shortcut.nextLook, d.have)
			return errors.Join(d.err, d.shortcut.err)
		}))
	}
	load := func(rules string) error {
		nft := host.Command(t.Context(), "nft", "-f", "-")
		nft.Stdin = strings.NewReader(rules)
		return nft.Run()
	}
	type part struct{ kind, name string }
	elements := func(of part) string {
		return regexp.MustCompile(`elements = ({[^}]*})`).FindStringSubmatch(host.Run("nft", "list", of.kind, of.name))[1]
	}
	take(false, "02:00:00:00:00:01")
	saved, parts := host.Run("nft", "list", "ruleset"), map[part]string{}
	for _, f := range []*family{families[0], shortcuts[0]} {
		for _, of := range []part{{"set", f.name() + " " + hardwareSet}, {"map", f.name() + " " + servicesMap}} {
			parts[of] = elements(of)
		}
	}
	take(true, "02:00:00:00:00:02")
	require.Error(t, load("flush ruleset\n"+saved))
	for of, before := range parts {
		after := elements(of)
		require.NotEqual(t, before, after)
		require.NoError(t, load(fmt.Sprintf("flush %s %s; add element %s %s", of.kind, of.name, of.name, before)), of)
		require.Equal(t, before, elements(of))
		require.NoError(t, host.Do(func() error {
			d.verify(false)
			d.reconcile()
			d.shortcut.extend(d.shortcut.nextLook, d.have)
			return errors.Join(d.err, d.shortcut.err)
		}))
		require.Equal(t, after, elements(of))
	}
}
