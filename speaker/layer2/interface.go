package layer2

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"path"
	"slices"
	"strings"
	"time"

	ndppacket "github.com/mdlayher/ndp"
	"golang.org/x/sys/unix"

	"github.com/lodestone-lb/lodestone/speaker/netstate"
	"github.com/lodestone-lb/lodestone/speaker/plan"
)

// notByDefault are patterns of the interfaces that an advertisement must name
// to announce on them: they lead to pods, containers and virtual machines of
// this node, into overlays and tunnels, or nowhere.
var notByDefault = []string{
	"docker*", "br-*", "podman*", "cni*", "veth*", // container runtimes and their bridges
	"virbr*", "vnet*", "lxc*", "lxd*", "macvtap*", // virtual machines
	"cali*", "cilium*", "flannel*", "weave*", "antrea*", "ovn*", "kube-bridge", // pod networks
	"kube-ipvs*", "nodelocaldns", // node-local addresses of Kubernetes
	"tun*", "tap*", "vxlan*", "geneve*", "gre*", "erspan*", "wg*", "tailscale*", // tunnels
	"dummy*", "ifb*",
}

// suitable reports whether VIPs with these patterns are announced on the
// interface. Only a broadcast link that is up and speaks Ethernet can be.
// Without patterns, that is every such interface but those that notByDefault
// lists, tun and tap devices, links without ARP, and ports of a bridge or
// bond, for which the master answers. Patterns say it all.
func suitable(i netstate.Interface, enslaved bool, patterns []string) bool {
	if !i.Up || !i.Ethernet || i.Loopback || hardwareAddr(i.HardwareAddr) == (mac{}) {
		return false
	}
	if len(patterns) > 0 {
		return matchAny(patterns, i.Name)
	}
	return !enslaved && !i.NoARP && i.Kind != "tuntap" && !matchAny(notByDefault, i.Name)
}

// Segments returns the subnets of the interfaces that VIPs with one of these
// sets of patterns are announced on, in no order, never nil. An interface that
// is down counts: it says where the node belongs.
func Segments(all []netstate.Interface, patterns ...[]string) []plan.Segment {
	segments := []plan.Segment{}
	for _, i := range all {
		i.Up = true
		enslaved := isPort(i, all)
		if !slices.ContainsFunc(patterns, func(p []string) bool { return suitable(i, enslaved, p) }) {
			continue
		}
		for _, a := range i.Addrs {
			if !a.Addr().IsLinkLocalUnicast() { // every segment has those
				segments = append(segments, plan.Segment{Subnet: a.Masked(), Interface: i.Name, IfNamed: !suitable(i, enslaved, nil)})
			}
		}
	}
	return segments
}

// Matches reports whether some interface, up or down, is one that VIPs with these
// patterns are announced on.
func Matches(all []netstate.Interface, patterns []string) bool {
	return slices.ContainsFunc(all, func(i netstate.Interface) bool {
		i.Up = true
		return suitable(i, isPort(i, all), patterns)
	})
}

func matchAny(patterns []string, name string) bool {
	for _, p := range patterns {
		if ok, _ := path.Match(p, name); ok { // the configuration has only good patterns
			return true
		}
	}
	return false
}

// isPort reports whether the interface is a port of a bridge or bond. A VRF
// is a master too, but its members keep their own neighbours.
func isPort(i netstate.Interface, all []netstate.Interface) bool {
	if i.Master == 0 {
		return false
	}
	for _, m := range all {
		if m.Index == i.Master {
			return m.Kind != "vrf"
		}
	}
	return true
}

// speaks returns the interface that speaks IP for i: its master, if it is a
// port.
func speaks(i netstate.Interface, all []netstate.Interface) netstate.Interface {
	if !isPort(i, all) {
		return i
	}
	for _, m := range all {
		if m.Index == i.Master {
			return m
		}
	}
	return netstate.Interface{Index: i.Master} // we have not heard of it yet
}

// mac is an EUI-48 hardware address, comparable.
type mac [6]byte

var broadcast = mac{0xff, 0xff, 0xff, 0xff, 0xff, 0xff}

// hardwareAddr returns the address as a mac: zero if it is of another kind.
func hardwareAddr(a net.HardwareAddr) (m mac) {
	if len(a) == len(m) {
		copy(m[:], a)
	}
	return m
}

// group reports whether the address is a multicast or the broadcast address.
func (m mac) group() bool { return m[0]&1 != 0 }

func (m mac) String() string { return net.HardwareAddr(m[:]).String() }

// hardwareAddrs returns the addresses of all interfaces.
func hardwareAddrs(interfaces []netstate.Interface) map[mac]bool {
	all := make(map[mac]bool, len(interfaces))
	for _, i := range interfaces {
		all[hardwareAddr(i.HardwareAddr)] = true
	}
	return all
}

// group is the VIPs of one protocol that are announced on the same
// interfaces. There are few groups and many VIPs.
type group struct {
	protocol   protocol
	interfaces []string
	vips       owned
}

func grouped(want map[netip.Addr]plan.Layer2, vips owned) []group {
	type key struct {
		protocol   protocol
		interfaces string
	}
	index, groups := map[key]int{}, []group(nil)
	for vip, l := range want {
		p := protocolOf(vip)
		k := key{p, strings.Join(l.Interfaces, " ")}
		at, ok := index[k]
		if !ok {
			at, index[k] = len(groups), len(groups)
			groups = append(groups, group{p, l.Interfaces, owned{}})
		}
		groups[at].vips[vip] = vips[vip]
	}
	return groups
}

// GroupSocket is a membership in IPv6 multicast groups. While it is open, the
// kernel takes in what is sent to them and tells switches by MLD (RFC 3810)
// to forward it.
type GroupSocket interface {
	// Join joins a group on the interface of that index. It fails with
	// ENOBUFS or ENOMEM when the socket has room for no more groups.
	Join(index int, group netip.Addr) error
	Leave(index int, group netip.Addr) error
	// Close leaves all groups.
	Close() error
}

// OpenGroups opens a GroupSocket in this process's network namespace.
func OpenGroups() (GroupSocket, error) {
	// Bound to no port, it receives nothing.
	fd, err := unix.Socket(unix.AF_INET6, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("open IPv6 socket: %w", err)
	}
	return groupSocket(fd), nil
}

type groupSocket int

func (s groupSocket) Join(index int, group netip.Addr) error {
	return s.set(unix.IPV6_JOIN_GROUP, index, group)
}

func (s groupSocket) Leave(index int, group netip.Addr) error {
	return s.set(unix.IPV6_LEAVE_GROUP, index, group)
}

func (s groupSocket) set(option, index int, group netip.Addr) error {
	return unix.SetsockoptIPv6Mreq(int(s), unix.IPPROTO_IPV6, option, &unix.IPv6Mreq{Multiaddr: group.As16(), Interface: uint32(index)})
}

func (s groupSocket) Close() error { return unix.Close(int(s)) }

// solicitedNode returns the group in which hosts ask for an IPv6 address
// (RFC 4291 section 2.7.1).
func solicitedNode(a netip.Addr) netip.Addr {
	group, _ := ndppacket.SolicitedNodeMulticast(a) // fails only for IPv4
	return group
}

// groupsOf returns the groups in which these VIPs are asked for. Those that
// end in the same 24 bits share one.
func groupsOf(vips owned) map[netip.Addr]bool {
	groups := map[netip.Addr]bool{}
	for vip := range vips {
		if vip.Is6() {
			groups[solicitedNode(vip)] = true
		}
	}
	return groups
}

// join keeps the port in the groups of its VIPs until ctx ends. It is a task
// of its own because the kernel may make it wait, behind whoever else
// configures interfaces.
func (p *port) join(ctx context.Context) error {
	m := membership{index: p.key.ip, open: p.groups, joined: map[netip.Addr]GroupSocket{}}
	defer m.close()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-p.regroup:
		}
		if err := m.set(ctx, groupsOf(*p.owned.Load())); err != nil {
			p.counters.groupErrors.Inc()
			return fmt.Errorf("%w on interface %q: %w", errGroups, p.key.name, err)
		}
	}
}

// membership is the groups that are joined on an interface.
type membership struct {
	index int
	open  func() (GroupSocket, error)
	// sockets are as many as it takes: the kernel limits the memory of each
	// (sysctl net.core.optmem_max), to some 300 groups before Linux 6.7.
	sockets []GroupSocket
	joined  map[netip.Addr]GroupSocket
}

// set leaves the groups that are not wanted and joins those that are, or does
// as much of it as there is time for until ctx ends.
func (m *membership) set(ctx context.Context, want map[netip.Addr]bool) error {
	for group, s := range m.joined {
		if want[group] || ctx.Err() != nil {
			continue
		}
		if err := s.Leave(m.index, group); err != nil {
			return fmt.Errorf("leave %s: %w", group, err)
		}
		delete(m.joined, group)
	}
	for group := range want {
		if m.joined[group] != nil || ctx.Err() != nil {
			continue
		}
		if err := m.join(group); err != nil {
			return fmt.Errorf("join %s beside %d others: %w", group, len(m.joined), err)
		}
	}
	return nil
}

// join joins a group by the first socket that has room.
func (m *membership) join(group netip.Addr) error {
	for _, s := range m.sockets {
		switch err := s.Join(m.index, group); {
		case err == nil:
			m.joined[group] = s
			return nil
		case !errors.Is(err, unix.ENOBUFS) && !errors.Is(err, unix.ENOMEM):
			return err
		}
	}
	s, err := m.open()
	if err != nil {
		return err
	}
	m.sockets = append(m.sockets, s)
	if err := s.Join(m.index, group); err != nil {
		return err
	}
	m.joined[group] = s
	return nil
}

func (m *membership) close() {
	for _, s := range m.sockets {
		s.Close()
	}
}

// deafAfter is how long nothing comes in on an interface that carries one way only: on
// one that works, the other half of a split brain has told a VIP by then, or clients
// have answered what they were told.
const (
	deafAfter       = time.Second
	hearingInterval = 100 * time.Millisecond
)

// hearing is what is known of what comes in on an interface.
type hearing struct {
	frames, messages uint64
	asked, heard     time.Time
	deaf             bool
}

// deaf reports whether speakers are lost and nothing comes in: then this node must not
// repeat that it has the VIPs. A cable, a transceiver or a switch may carry one way
// only; what is sent to this node is lost, and it would not hear who contradicts. It
// tells once what it takes over, and goes on to answer: who asks is heard.
//
// That some neighbour speaks ends it. A frame does not: a switch may send its own.
func (p *port) deaf(h *hearing) bool {
	if p.received == nil || p.whole.Load() {
		return false
	}
	if time.Since(h.asked) < hearingInterval {
		return h.deaf
	}
	h.asked = time.Now()
	frames, err := p.received(p.key.index)
	messages := p.heard.Load()
	if err != nil || h.heard.IsZero() || messages != h.messages || frames != h.frames && !h.deaf {
		h.frames, h.messages, h.heard = frames, messages, h.asked
	}
	before := h.deaf
	h.deaf = time.Since(h.heard) >= deafAfter
	switch {
	case h.deaf && !before:
		p.log.Warn("other speakers are lost, and nothing comes in on the interface: VIPs are not announced again there, only answered for, "+
			"until a neighbour is heard",
			"interface", p.key.name, "family", p.key.protocol.family(),
			"help", "a cable, a transceiver or a switch port may carry one way only; ip -s link show dev "+p.key.name)
	case before && !h.deaf:
		p.log.Info("a neighbour is heard on the interface again: VIPs are announced there", "interface", p.key.name, "family",
			p.key.protocol.family())
	}
	return h.deaf
}

// claims reports whether the turn tells who has the VIP, and does not ask.
func (t turn) claims() bool { return t.step < stepProbe }

// ask makes of a beacon a question, which clients learn nothing from: two halves of a
// split brain that are both silent must hear each other when it heals. Other turns are
// left out.
func (p *port) ask(q *queue, t *turn) [][]byte {
	if t.step != stepBeacon {
		q.again(*t)
		return nil
	}
	t.step = stepProbe
	return [][]byte{p.key.protocol.probe(p.statement(t.ownership), mac{})}
}
