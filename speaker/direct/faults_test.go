package direct

import (
	"bufio"
	"context"
	"fmt"
	"maps"
	"net/netip"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/lodestone-lb/lodestone/speaker/plan"
)

// Where the rules of one family cannot be written, those of the other one are. The node does
// not report that it has the rules, since others would hand it connections in both.
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

// occupy has another program own the table of a family, so that nobody else may change it.
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
		cmd.Wait() //nolint:errcheck // it says nothing
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

// A speaker that is dead for longer than the rules work without it ends no connection: neither
// those that its node keeps nor those that its node is asked for.
func TestSpeakerDeadForLong(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 3)
	w.guard = 6 * time.Second
	w.start(w.names...)
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

// Other programs' tables at the same hooks neither keep connections from being found nor new
// ones from being spread: rules that many hosts are hardened by drop segments of connections
// that conntrack does not know.
func TestOtherTables(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 3)
	w.start(w.names...)
	w.own("n1")
	w.want(moved[0]...)
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

// A Service for which there is no table any more works as without. When there is one again it
// is handed over.
func TestServiceWithoutATable(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 2)
	w.most = 4
	w.start(w.names...)
	w.own("n1")
	many := w.forwarding(some("n2"))
	for i := range w.most {
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
	require.Zero(t, n.director.Status().Without)
	w.live(all, "there is a table")
	require.Equal(t, map[string]int{"n2": 10}, at(w.open(10)))
}

func (w *world) forwarding(backends []plan.Backend) plan.Forwarding {
	want := plan.Forwarding{Services: map[plan.LimitKey]plan.Direct{}, Nodes: map[string][]netip.Addr{}, Lost: w.lost}
	for _, n := range w.nodes {
		want.Nodes[n.name] = n.addrs
	}
	maps.Copy(want.Nodes, w.extra)
	if backends != nil {
		for _, vip := range []netip.Addr{vip4, vip6} {
			want.Services[plan.LimitKey{VIP: vip, Service: "default/web"}] = plan.Direct{Ports: web, Seed: 4711, ByClient: w.byClient,
				Backends: backends}
		}
	}
	return want
}
