package layer2

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/vishvananda/netlink"

	"github.com/lodestone-lb/lodestone/pkg/testnet"
	"github.com/lodestone-lb/lodestone/speaker/election"
	"github.com/lodestone-lb/lodestone/speaker/plan"
)

// quarter is real nodes that share VIPs, and the kernels of hosts that use them.
type quarter struct {
	*testnet.Segment
	t       *testing.T
	nodes   []*node
	clients []*testnet.Host
}

var sharedVIPs = []netip.Addr{vipA, vip6}

func newQuarter(t *testing.T, nodes, hosts int) *quarter {
	t.Helper()
	q := &quarter{Segment: testnet.NewSegment(t, nodes+hosts), t: t}
	for _, h := range q.Hosts[:nodes] {
		n := startNode(t, h, nil)
		n.serve(vip6)
		// As kube-proxy with strictARP: the kernel takes the packets, and says
		// nothing of the VIP.
		n.host.Run("sysctl", "-qw", "net.ipv4.conf.all.arp_ignore=1", "net.ipv4.conf.all.arp_announce=2")
		n.host.Run("ip", "addr", "add", vipA.String()+"/32", "dev", "lo")
		q.nodes = append(q.nodes, n)
	}
	q.clients = q.Hosts[nodes:]
	for _, h := range q.Hosts {
		settled(t, h, "eth0")
	}
	return q
}

func hostNames(nodes []*node) []string {
	var all []string
	for _, n := range nodes {
		all = append(all, n.host.Name)
	}
	slices.Sort(all)
	return all
}

func sharing(nodes []*node) map[netip.Addr]plan.Layer2 {
	want := map[netip.Addr]plan.Layer2{}
	for _, vip := range sharedVIPs {
		want[vip] = plan.Layer2{Sharers: hostNames(nodes)}
	}
	return want
}

// among has the nodes share the VIPs, and waits until they answer on the segment
// and have no more to ask.
func (q *quarter) among(nodes ...*node) {
	q.t.Helper()
	for _, n := range nodes {
		n.set(sharing(nodes))
	}
	eventually(q.t, "all answer", func() bool {
		return !slices.ContainsFunc(nodes, func(n *node) bool {
			return slices.ContainsFunc(n.Status().VIPs, func(v VIPStatus) bool { return len(v.Interfaces) == 0 })
		})
	})
	time.Sleep(schedule[sharedSteps-1] + correctAgain + 300*time.Millisecond)
}

// of returns the node that has the client, as its hardware address.
func (q *quarter) of(client *testnet.Host, vip netip.Addr, nodes ...*node) string {
	name := election.NewShare(vip, hostNames(nodes)).NodeOf(macOf(q.t, client, "eth0"))
	at := slices.IndexFunc(nodes, func(n *node) bool { return n.host.Name == name })
	return nodes[at].mac("eth0").String()
}

// resolveAll has the clients use the VIPs, and demands that each has been told by
// its node.
func (q *quarter) resolveAll(nodes ...*node) {
	q.t.Helper()
	for _, c := range q.clients {
		for _, vip := range sharedVIPs {
			c.Run("ping", "-c1", "-W2", vip.String())
			hw, _ := neighbour(q.t, c, vip)
			require.Equal(q.t, q.of(c, vip, nodes...), hw, "%s: %s", c.Name, vip)
		}
	}
}

// packets captures what a client hears of the VIPs on the link layer. What is for
// other hosts a switch may send everywhere.
func packets(t *testing.T, client *testnet.Host) (stop func() []string) {
	end := capture(t, client, "-Q", "in", "(arp or (icmp6 and (ip6[40] == 135 or ip6[40] == 136))) and (ether multicast or ether dst "+
		macOf(t, client, "eth0").String()+")")
	return func() []string {
		return slices.DeleteFunc(end(), func(line string) bool {
			return !slices.ContainsFunc(sharedVIPs, func(vip netip.Addr) bool { return strings.Contains(line, vip.String()) })
		})
	}
}

// Kernels of six hosts, one answer for each. A node is lost: its clients' kernels
// are corrected, and those of the others hear nothing. It comes back with nothing
// in memory, and another one is lost.
func TestSharedVIPReal(t *testing.T) {
	t.Parallel()
	q := newQuarter(t, 3, 6)
	all := q.nodes
	q.among(all...)
	q.resolveAll(all...)
	for _, c := range q.clients[:2] {
		want := slices.Repeat([]string{q.of(c, vipA, all...)}, 3)
		assert.Equal(t, want, arping(t, c, vipA, 3), "one answer for each request")
		out, _ := c.Command(t.Context(), "ndisc6", "-m", "-r", "1", "-w", "300", vip6.String(), "eth0").CombinedOutput()
		assert.Equal(t, 1, strings.Count(string(out), " from "+vip6.String()), "answers to one question:\n%s", out)
	}

	q.lose(1)
	all[1].set(nil) // its process ends: it has forgotten all
	q.Switch.Run("ip", "link", "set", "p2", "up")
	q.among(all...)
	for _, c := range q.clients {
		for _, vip := range sharedVIPs {
			hw, _ := neighbour(t, c, vip)
			assert.Equal(t, q.of(c, vip, all...), hw, "it is back")
		}
	}
	q.lose(0)
	for _, n := range q.nodes {
		assert.Empty(t, n.Conflicts())
	}
}

// lose cuts one of the nodes off.
func (q *quarter) lose(which int) {
	q.t.Helper()
	rest := slices.Delete(slices.Clone(q.nodes), which, which+1)
	type entry struct {
		client *testnet.Host
		vip    netip.Addr
		want   string
	}
	var moves []entry
	updates, stops := map[*testnet.Host]chan netlink.NeighUpdate{}, map[*testnet.Host]func() []string{}
	quit := make(chan struct{})
	defer close(quit)
	for _, c := range q.clients {
		updates[c] = make(chan netlink.NeighUpdate, 1000)
		require.NoError(q.t, netlink.NeighSubscribeAt(*c.Handle(), updates[c], quit))
		stays := true
		for _, vip := range sharedVIPs {
			if now := q.of(c, vip, rest...); now != q.of(c, vip, q.nodes...) {
				moves, stays = append(moves, entry{c, vip, now}), false
			}
		}
		if stays {
			stops[c] = packets(q.t, c)
		}
	}
	q.Switch.Run("ip", "link", "set", fmt.Sprint("p", which+1), "down")
	start := time.Now()
	for _, n := range rest {
		n.set(sharing(rest))
	}
	told := map[entry]bool{}
	for _, m := range moves {
		for deadline := time.After(5 * time.Second); !told[m]; {
			select {
			case u := <-updates[m.client]:
				vip, _ := netip.AddrFromSlice(u.IP)
				told[entry{m.client, vip.Unmap(), u.HardwareAddr.String()}] = true
			case <-deadline:
				q.t.Fatalf("%s was not told where %s is", m.client.Name, m.vip)
			}
		}
	}
	q.t.Logf("node %d lost: %d neighbour entries of its clients corrected %v after Set; %d clients unconcerned", which, len(moves),
		time.Since(start), len(stops))
	for _, m := range moves {
		m.client.Run("ping", "-c1", "-W2", m.vip.String())
		hw, _ := neighbour(q.t, m.client, m.vip)
		assert.Equal(q.t, m.want, hw)
	}
	time.Sleep(correctAgain + 200*time.Millisecond)
	for c, stop := range stops {
		assert.Empty(q.t, stop(), "%s: its node is there", c.Name)
	}
}

// A host asks from one address and verifies the answer from another one: a node
// that knew hosts by their IP addresses would leave it alone then.
func TestHostVerifiesFromAnotherAddress(t *testing.T) {
	t.Parallel()
	q := newQuarter(t, 3, 1)
	q.among(q.nodes...)
	client := q.clients[0]
	stop := capture(t, client, "-Q", "out", "icmp6 and ip6[40] == 135")
	client.Run("ping", "-c1", "-W2", vip6.String())
	client.Run("ip", "neigh", "change", vip6.String(), "dev", "eth0", "nud", "probe")
	eventually(t, "verified", func() bool { _, state := neighbour(t, client, vip6); return state == "REACHABLE" })
	hw, _ := neighbour(t, client, vip6)
	assert.Equal(t, q.of(client, vip6, q.nodes...), hw)
	asked, verified := 0, 0
	for _, line := range stop() {
		switch {
		case !strings.Contains(line, "who has "+vip6.String()):
		case strings.Contains(line, "33:33:ff:") && strings.Contains(line, " 2001:db8::4 > "):
			asked++
		case strings.Contains(line, " fe80::"):
			verified++
		}
	}
	assert.Equal(t, []int{1, 1}, []int{asked, verified}, "from the address of its packets, then from its link-local address")
}

// A kernel that is given a shared VIP learns that it is in use, and the entries of
// other hosts stay what they are.
func TestDuplicateOfASharedVIP(t *testing.T) {
	t.Parallel()
	q := newQuarter(t, 3, 4)
	q.among(q.nodes...)
	q.resolveAll(q.nodes...)
	thief, others := q.clients[0], q.clients[1:]
	thief.Run("ip", "neigh", "flush", "dev", "eth0")
	thief.Run("ip", "addr", "add", vip6.String()+"/64", "dev", "eth0")
	eventually(t, "dadfailed", func() bool {
		return strings.Contains(thief.Run("ip", "-6", "addr", "show", "dev", "eth0", "to", vip6.String()), "dadfailed")
	})
	for _, c := range others {
		hw, _ := neighbour(t, c, vip6)
		assert.Equal(t, q.of(c, vip6, q.nodes...), hw)
	}
	assert.Equal(t, 1, func() (reported int) {
		for _, n := range q.nodes {
			reported += len(n.Conflicts())
		}
		return reported
	}(), "by the node that has the thief")
}

// The worst that can happen: a node is lost, and no other one has ever heard its
// client. The client's kernel finds out by itself. Its timers are shortened here;
// with those of Linux as they are it takes up to 45 s until the entry is doubted,
// and 8 s more.
func TestClientThatNobodyKnows(t *testing.T) {
	t.Parallel()
	q := newQuarter(t, 2, 1)
	client := q.clients[0]
	for _, family := range []string{"ipv4", "ipv6"} {
		client.Run("sysctl", "-qw", "net."+family+".neigh.eth0.base_reachable_time_ms=1000", "net."+family+".neigh.eth0.delay_first_probe_time=1",
			"net."+family+".neigh.eth0.retrans_time_ms=200")
	}
	q.among(q.nodes[0])
	q.resolveAll(q.nodes[0])
	q.Switch.Run("ip", "link", "set", "p1", "down")
	start := time.Now()
	q.nodes[1].set(sharing(q.nodes[1:]))
	for _, vip := range sharedVIPs {
		eventually(t, "found", func() bool { return client.Command(t.Context(), "ping", "-c1", "-W0.1", vip.String()).Run() == nil })
		t.Logf("%s found %v after its node was lost", vip, time.Since(start))
	}
	assert.Zero(t, testutil.ToFloat64(q.nodes[1].metrics.corrections.WithLabelValues("eth0", "IPv4")))
}
