package netstate

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"go4.org/netipx"
	"golang.org/x/sys/unix"

	"github.com/lodestone-lb/lodestone/pkg/testnet"
)

// watch runs a Watcher in the host's namespace until the test ends.
func watch(t *testing.T, h *testnet.Host, log slog.Handler, buffer int) *Watcher {
	t.Helper()
	w := New(Options{Namespace: h.Handle(), Log: slog.New(log)})
	w.buffer = buffer
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error)
	go func() { done <- w.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	<-w.Ready()
	return w
}

// await waits until the view satisfies ok, woken by changes alone.
func await(t *testing.T, w *Watcher, what string, ok func(map[string]Interface) bool) {
	t.Helper()
	deadline := time.After(30 * time.Second)
	for {
		changed := w.Changed()
		byName := map[string]Interface{}
		for _, i := range w.Interfaces() {
			byName[i.Name] = i
		}
		if ok(byName) {
			return
		}
		select {
		case <-changed:
		case <-deadline:
			t.Fatalf("%s: never seen; have %+v", what, w.Interfaces())
		}
	}
}

func TestWatcherFollowsTheKernel(t *testing.T) {
	t.Parallel()
	s := testnet.NewSegment(t, 1)
	h := s.Hosts[0]
	h.Run("sysctl", "-qw", "net.ipv6.conf.eth0.dad_transmits=10") // what is tentative is so long enough to be seen
	w := watch(t, h, slog.DiscardHandler, receiveBuffer)
	await(t, w, "the first view has everything", func(m map[string]Interface) bool {
		e, lo := m["eth0"], m["lo"]
		return e.Up && e.Ethernet && e.Kind == "veth" && len(e.HardwareAddr) == 6 && e.MTU == 1500 && !e.Loopback &&
			slices.Contains(e.Addrs, netip.MustParsePrefix("198.18.0.1/24")) &&
			slices.Contains(e.Addrs, netip.MustParsePrefix("2001:db8::1/64")) && lo.Loopback && !lo.Ethernet
	})
	steps := []struct {
		what, command string
		on            *testnet.Host
		ok            func(map[string]Interface) bool
	}{
		{"an address appears", "addr add 198.18.9.9/32 dev eth0", h, func(m map[string]Interface) bool {
			return slices.Contains(m["eth0"].Addrs, netip.MustParsePrefix("198.18.9.9/32"))
		}},
		{"and goes", "addr del 198.18.9.9/32 dev eth0", h, func(m map[string]Interface) bool {
			return !slices.Contains(m["eth0"].Addrs, netip.MustParsePrefix("198.18.9.9/32"))
		}},
		{"an IPv6 address is tentative at first", "addr add 2001:db8::77/64 dev eth0", h, func(m map[string]Interface) bool {
			return slices.Contains(m["eth0"].Tentative, netip.MustParsePrefix("2001:db8::77/64"))
		}},
		{"and then it is not", "addr show dev eth0", h, func(m map[string]Interface) bool {
			p := netip.MustParsePrefix("2001:db8::77/64")
			return slices.Contains(m["eth0"].Addrs, p) && !slices.Contains(m["eth0"].Tentative, p)
		}},
		{"the carrier is lost", "link set p1 down", s.Switch, func(m map[string]Interface) bool { return !m["eth0"].Up }},
		{"and back", "link set p1 up", s.Switch, func(m map[string]Interface) bool { return m["eth0"].Up }},
		{"the MAC changes", "link set eth0 address 02:00:00:00:00:77", h, func(m map[string]Interface) bool {
			return m["eth0"].HardwareAddr.String() == "02:00:00:00:00:77"
		}},
		{"it is taken down", "link set eth0 down", h, func(m map[string]Interface) bool { return !m["eth0"].Up }},
		{"it is renamed", "link set eth0 name lan0", h,
			func(m map[string]Interface) bool { return m["eth0"].Index == 0 && m["lan0"].Index != 0 }},
		{"a bridge appears", "link add br0 type bridge", h, func(m map[string]Interface) bool { return m["br0"].Kind == "bridge" }},
		{"it becomes its port", "link set lan0 master br0", h, func(m map[string]Interface) bool {
			return m["lan0"].Master == m["br0"].Index && m["br0"].Index != 0
		}},
		{"it leaves the bridge and is still there", "link set lan0 nomaster", h, func(m map[string]Interface) bool {
			return m["lan0"].Index != 0 && m["lan0"].Master == 0
		}},
		{"the cable is removed", "link del p1", s.Switch, func(m map[string]Interface) bool { return m["lan0"].Index == 0 }},
	}
	for _, step := range steps {
		step.on.Run("ip", strings.Fields(step.command)...)
		await(t, w, step.what, step.ok)
	}
}

// An address that another host has stays, and stays tentative, also for who
// comes later.
func TestDuplicateAddressStaysTentative(t *testing.T) {
	t.Parallel()
	s := testnet.NewSegment(t, 2)
	h, taken := s.Hosts[0], netip.MustParsePrefix("2001:db8::2/64")
	early := watch(t, h, slog.DiscardHandler, receiveBuffer)
	h.Run("ip", "addr", "add", taken.String(), "dev", "eth0")
	for deadline := time.Now().Add(30 * time.Second); !strings.Contains(h.Run("ip", "addr", "show", "dev", "eth0"),
		"dadfailed"); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("the kernel never found the duplicate")
		}
	}
	for _, w := range []*Watcher{early, watch(t, h, slog.DiscardHandler, receiveBuffer)} {
		await(t, w, "a duplicate, and an address that is none", func(m map[string]Interface) bool {
			return slices.Contains(m["eth0"].Addrs, taken) && slices.Contains(m["eth0"].Tentative, taken) &&
				!slices.Contains(m["eth0"].Tentative, netip.MustParsePrefix("2001:db8::1/64"))
		})
	}
	h.Run("ip", "addr", "del", taken.String(), "dev", "eth0")
	await(t, early, "gone", func(m map[string]Interface) bool {
		return !slices.Contains(m["eth0"].Addrs, taken) && !slices.Contains(m["eth0"].Tentative, taken)
	})
}

// Notifications of the AF_BRIDGE family are not about the interface itself. If one were taken for
// its deletion, its addresses would be lost, too.
func TestLeavingABridgeNeverHidesTheInterface(t *testing.T) {
	t.Parallel()
	h := testnet.NewHost(t, "port")
	h.Run("ip", "link", "add", "br0", "type", "bridge")
	h.Run("ip", "link", "add", "eth0", "type", "veth", "peer", "name", "eth1")
	h.Run("ip", "addr", "add", "198.18.0.1/24", "dev", "eth0")
	w := watch(t, h, slog.DiscardHandler, receiveBuffer)
	for range 20 {
		h.Run("ip", "link", "set", "eth0", "master", "br0")
		await(t, w, "a master", func(m map[string]Interface) bool { return m["eth0"].Master != 0 })
		h.Run("ip", "link", "set", "eth0", "nomaster")
		await(t, w, "no master", func(m map[string]Interface) bool {
			if len(m["eth0"].Addrs) == 0 {
				t.Fatal("eth0 or its address vanished")
			}
			return m["eth0"].Master == 0
		})
	}
}

// The smallest buffer loses most notifications of a burst; the view ends up
// right nevertheless.
func TestResyncAfterOverrun(t *testing.T) {
	t.Parallel()
	h := testnet.NewHost(t, "overrun")
	h.Run("ip", "link", "add", "eth0", "type", "veth", "peer", "name", "eth1")
	var lost resyncs
	w := watch(t, h, &lost, 1)
	var batch strings.Builder
	for i := range 500 {
		fmt.Fprintf(&batch, "addr add 198.18.%d.%d/32 dev eth0\nlink set eth0 mtu %d\n", i/250, i%250+1, 1000+i)
	}
	c := h.Command(t.Context(), "ip", "-batch", "-")
	c.Stdin = strings.NewReader(batch.String())
	if out, err := c.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	await(t, w, "everything", func(m map[string]Interface) bool {
		return m["eth0"].MTU == 1499 && len(m["eth0"].Addrs) == 500
	})
	if lost.n.Load() == 0 {
		t.Error("no notification was lost: the test tests nothing")
	}
}

// A change of what is not in the view wakes nobody.
func TestOnlyWhatDiffersIsAChange(t *testing.T) {
	t.Parallel()
	h := testnet.NewHost(t, "quiet")
	h.Run("ip", "link", "add", "eth0", "type", "veth", "peer", "name", "eth1")
	w := watch(t, h, slog.DiscardHandler, receiveBuffer)
	changed := w.Changed()
	for i := range 20 {
		h.Run("ip", "link", "set", "eth0", "alias", fmt.Sprint("name", i))
	}
	h.Run("ip", "link", "set", "eth0", "mtu", "1400")
	<-changed
	await(t, w, "the first change is the one of the MTU", func(m map[string]Interface) bool {
		if m["eth0"].MTU != 1400 {
			t.Fatalf("woken for %+v", m["eth0"])
		}
		return true
	})
}

// A wireless driver reports the end of each scan, and other things, as a change of the interface. Of the interface that
// message has the name and the flags alone.
func TestWirelessEventsAreNoChange(t *testing.T) {
	t.Parallel()
	view, header := table{}, unix.NlMsghdr{Type: unix.RTM_NEWLINK}
	view.link(netlink.LinkUpdate{Header: header, Link: &netlink.Device{LinkAttrs: netlink.LinkAttrs{Index: 3, Name: "wlan0", MTU: 1500,
		HardwareAddr: net.HardwareAddr{2, 0, 0, 0, 0, 7}, RawFlags: unix.IFF_UP | unix.IFF_RUNNING, EncapType: "ether"}}})
	before := view[3]

	event := nl.NewIfInfomsg(unix.AF_UNSPEC)
	event.Index, event.Type, event.Flags = 3, unix.ARPHRD_ETHER, unix.IFF_UP|unix.IFF_RUNNING
	scanned := make([]byte, 16) // struct iw_event
	link, err := netlink.LinkDeserialize(&header, slices.Concat(event.Serialize(),
		nl.NewRtAttr(unix.IFLA_IFNAME, nl.ZeroTerminated("wlan0")).Serialize(), nl.NewRtAttr(unix.IFLA_WIRELESS, scanned).Serialize()))
	if err != nil {
		t.Fatal(err)
	}
	changed := view.link(netlink.LinkUpdate{IfInfomsg: *event, Header: header, Link: link})
	if changed || !reflect.DeepEqual(view[3], before) {
		t.Errorf("%+v became %+v", before, view[3])
	}
}

// Links and addresses come on two sockets, so the deletion of an address may come after that of its
// interface. Nothing may be left of either: in time a node has millions of interfaces of pods.
func TestInterfacesThatAreGoneLeaveNothing(t *testing.T) {
	t.Parallel()
	view, index := table{}, 7
	link := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Index: index, Name: "veth7"}}
	addr := netlink.AddrUpdate{LinkIndex: index, LinkAddress: *netipx.PrefixIPNet(netip.MustParsePrefix("fe80::1/64"))}
	come, gone := unix.NlMsghdr{Type: unix.RTM_NEWLINK}, unix.NlMsghdr{Type: unix.RTM_DELLINK}

	view.link(netlink.LinkUpdate{Header: come, Link: link})
	addr.NewAddr = true
	view.addr(addr)
	view.link(netlink.LinkUpdate{Header: gone, Link: link})
	addr.NewAddr = false
	if view.addr(addr); len(view) > 0 {
		t.Errorf("left behind: %+v", view)
	}
}

// An interface that leaves and comes back with its index keeps its new address, whichever socket is read first.
func TestAnInterfaceThatComesBackKeepsItsNewAddress(t *testing.T) {
	t.Parallel()
	view := table{}
	link := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Index: 7, Name: "eth1"}}
	addr := netlink.AddrUpdate{LinkIndex: 7, LinkAddress: *netipx.PrefixIPNet(netip.MustParsePrefix("198.18.0.1/24")), NewAddr: true}
	come, gone := unix.NlMsghdr{Type: unix.RTM_NEWLINK}, unix.NlMsghdr{Type: unix.RTM_DELLINK}
	view.link(netlink.LinkUpdate{Header: come, Link: link})
	view.addr(addr)
	for _, addr.NewAddr = range []bool{false, true} {
		view.addr(addr)
	}
	view.link(netlink.LinkUpdate{Header: gone, Link: link})
	view.link(netlink.LinkUpdate{Header: come, Link: link})
	if got := view[7].Addrs; len(got) != 1 {
		t.Errorf("it has %v", got)
	}
}

// The newest address of IPv6 comes first in the kernel's list: one of privacy
// extensions, or one that moves from node to node.
func TestBesideAnAddressIsWhatLasts(t *testing.T) {
	t.Parallel()
	h := testnet.NewHost(t, "beside")
	h.Run("ip", "link", "add", "eth0", "type", "veth", "peer", "name", "eth1")
	for _, address := range []string{"198.18.0.1/24", "198.18.0.9/24", "2001:db8::1/64 nodad", "2001:db8::2/64 nodad preferred_lft 0",
		"2001:db8::3/64 nodad"} {
		h.Run("ip", append([]string{"addr", "add", "dev", "eth0"}, strings.Fields(address)...)...)
	}
	h.Run("ip", "addr", "add", "198.18.1.1/24", "dev", "eth1")
	h.Run("ip", "link", "set", "eth0", "addrgenmode", "none")
	h.Run("ip", "link", "set", "eth0", "up")
	h.Run("ip", "link", "set", "eth1", "up")
	beside := func(local string) (addrs []netip.Addr) {
		err := h.Do(func() (err error) { addrs, err = NextHops(netip.MustParseAddr(local)); return err })
		if err != nil {
			t.Fatal(err)
		}
		return addrs
	}
	want := []string{"198.18.0.1", "2001:db8::3", "2001:db8::1", "198.18.0.9", "2001:db8::2"}
	if got := fmt.Sprint(beside("198.18.0.1")); got != fmt.Sprint(want) {
		t.Errorf("%s, want %s", got, want)
	}
	if got := beside("198.18.0.2"); got != nil {
		t.Errorf("beside nothing: %v", got)
	}
}

// resyncs counts the log lines about a resync.
type resyncs struct {
	slog.Handler
	n atomic.Int64
}

func (r *resyncs) Enabled(context.Context, slog.Level) bool { return true }

func (r *resyncs) Handle(_ context.Context, rec slog.Record) error {
	if strings.HasPrefix(rec.Message, "resyncing") {
		r.n.Add(1)
	}
	return nil
}
