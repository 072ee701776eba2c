package layer2

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"path"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/lodestone-lb/lodestone/pkg/report"
	"github.com/lodestone-lb/lodestone/speaker/layer2/segment"
	"github.com/lodestone-lb/lodestone/speaker/layer2/wire"
	"github.com/lodestone-lb/lodestone/speaker/netstate"
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
	if !i.Up || !i.Ethernet || i.Loopback || wire.Hardware(i.HardwareAddr) == (wire.MAC{}) {
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
func Segments(all []netstate.Interface, patterns ...[]string) []report.Segment {
	segments := []report.Segment{}
	for _, i := range all {
		i.Up = true
		enslaved := isPort(i, all)
		if !slices.ContainsFunc(patterns, func(p []string) bool { return suitable(i, enslaved, p) }) {
			continue
		}
		for _, a := range i.Addrs {
			if !a.Addr().IsLinkLocalUnicast() { // every segment has those
				segments = append(segments, report.Segment{Subnet: a.Masked(), Interface: i.Name, IfNamed: !suitable(i, enslaved, nil)})
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

// hardwareAddrs returns the addresses of all interfaces.
func hardwareAddrs(interfaces []netstate.Interface) map[wire.MAC]bool {
	all := make(map[wire.MAC]bool, len(interfaces))
	for _, i := range interfaces {
		all[wire.Hardware(i.HardwareAddr)] = true
	}
	return all
}

// group is the VIPs of one protocol that are announced on the same
// interfaces. There are few groups and many VIPs.
type group struct {
	protocol   wire.Protocol
	interfaces []string
	vips       map[netip.Addr]segment.VIP
}

func grouped(vips map[netip.Addr]*assignment) []group {
	type key struct {
		protocol   wire.Protocol
		interfaces string
	}
	index, groups := map[key]int{}, []group(nil)
	for vip, v := range vips {
		p := wire.Of(vip)
		k := key{p, strings.Join(v.interfaces, " ")}
		at, ok := index[k]
		if !ok {
			at, index[k] = len(groups), len(groups)
			groups = append(groups, group{p, v.interfaces, map[netip.Addr]segment.VIP{}})
		}
		groups[at].vips[vip] = v.VIP
	}
	return groups
}

// fit says why a protocol cannot work on an interface that is up. Nil: it can.
//
// NDP demands a link-local address. The kernel asks its neighbours from it
// when a packet's own source is on no interface, as a VIP is not: without one
// it takes what clients send, but cannot find the way back to them.
func fit(p wire.Protocol, i netstate.Interface) error {
	if p != (wire.NDP{}) {
		return nil
	}
	var tentative netip.Addr
	for _, p := range i.Addrs {
		switch {
		case !p.Addr().Is6() || !p.Addr().IsLinkLocalUnicast():
		case slices.Contains(i.Tentative, p):
			tentative = p.Addr()
		default:
			return nil
		}
	}
	if tentative.IsValid() {
		return fmt.Errorf("%w: %s is tentative, which passes in seconds unless `ip -6 addr show dev %s` says dadfailed: "+
			"then another host has it", errNoLinkLocal, tentative, i.Name)
	}
	return fmt.Errorf("%w: is IPv6 switched off by the sysctl net.ipv6.conf.%s.disable_ipv6, or addr_gen_mode none?", errNoLinkLocal, i.Name)
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

// groupsOf returns the groups in which these VIPs are asked for. Those that
// end in the same 24 bits share one.
func groupsOf(vips map[netip.Addr]segment.VIP) map[netip.Addr]bool {
	groups := map[netip.Addr]bool{}
	for vip := range vips {
		if vip.Is6() {
			groups[wire.SolicitedNode(vip)] = true
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
		if err := m.set(ctx, groupsOf(*p.vips.Load())); err != nil {
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
