package layer2

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"

	"github.com/lodestone-lb/lodestone/pkg/report"
	"github.com/lodestone-lb/lodestone/speaker/layer2/segment"
	"github.com/lodestone-lb/lodestone/speaker/layer2/wire"
	"github.com/lodestone-lb/lodestone/speaker/netstate"
	"github.com/lodestone-lb/lodestone/speaker/plan"
)

// notByDefault are patterns of interfaces on which VIPs are announced only if an advertisement names them.
// They lead to pods, containers and virtual machines of this node, into overlays and tunnels, or nowhere.
var notByDefault = []string{
	"docker*", "br-*", "podman*", "cni*", "veth*", // container runtimes and their bridges
	"virbr*", "vnet*", "lxc*", "lxd*", "macvtap*", // virtual machines
	"cali*", "cilium*", "flannel*", "weave*", "antrea*", "ovn*", "kube-bridge", // pod networks
	"kube-ipvs*", "nodelocaldns", // node-local addresses of Kubernetes
	"tun*", "tap*", "vxlan*", "geneve*", "gre*", "erspan*", "wg*", "tailscale*", // tunnels
	"dummy*", "ifb*",
}

// suitable reports whether VIPs with these patterns are announced on the interface. It has to be an
// Ethernet interface that is up, and not loopback. With patterns, one of them has to match; nothing else
// counts. Without patterns, the following are excluded: the interfaces of notByDefault, tun and tap
// devices, links without ARP, and ports of a bridge or bond, for which the master answers.
func suitable(i netstate.Interface, enslaved bool, patterns []string) bool {
	if !i.Up || !i.Ethernet || i.Loopback || wire.Hardware(i.HardwareAddr) == (wire.MAC{}) {
		return false
	}
	if len(patterns) > 0 {
		return plan.MatchesAny(patterns, i.Name)
	}
	return !enslaved && !i.NoARP && i.Kind != "tuntap" && !plan.MatchesAny(notByDefault, i.Name)
}

// Segments returns the subnets of the interfaces on which VIPs with one of these sets of patterns are
// announced, in no order, never nil. An interface that is down counts: the node belongs to its segment.
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

// Matches reports whether VIPs with these patterns are announced on one of the interfaces, up or down.
func Matches(all []netstate.Interface, patterns []string) bool {
	return slices.ContainsFunc(all, func(i netstate.Interface) bool {
		i.Up = true
		return suitable(i, isPort(i, all), patterns)
	})
}

// isPort reports whether the interface is a port of a bridge or bond.
func isPort(i netstate.Interface, all []netstate.Interface) bool {
	return ipInterface(i, all).Index != i.Index
}

// ipInterface returns the interface that has the IP addresses of i: its master if i is a port of a bridge or bond. A VRF
// is a master, too, but its members have their own addresses and neighbours.
func ipInterface(i netstate.Interface, all []netstate.Interface) netstate.Interface {
	if i.Master == 0 {
		return i
	}
	switch at := slices.IndexFunc(all, func(m netstate.Interface) bool { return m.Index == i.Master }); {
	case at < 0: // the kernel has not reported it yet
		return netstate.Interface{Index: i.Master}
	case all[at].Kind == "vrf":
		return i
	default:
		return all[at]
	}
}

// hardwareAddrs returns the addresses of all interfaces.
func hardwareAddrs(interfaces []netstate.Interface) map[wire.MAC]bool {
	all := make(map[wire.MAC]bool, len(interfaces))
	for _, i := range interfaces {
		all[wire.Hardware(i.HardwareAddr)] = true
	}
	return all
}

// group has the VIPs of one protocol with the same interface patterns. There are few groups and many VIPs.
type group struct {
	protocol   wire.Protocol
	interfaces []string
	anySegment bool
	vips       map[netip.Addr]segment.VIP
}

// on returns the VIPs of the group that belong to the segment of an interface. A port of a bridge or bond has two names:
// its own and that of its master, which has the subnets.
func (g *group) on(segments []report.Segment, names ...string) map[netip.Addr]segment.VIP {
	others := func(s report.Segment) bool { return !slices.Contains(names, s.Interface) }
	if g.anySegment || !slices.ContainsFunc(segments, others) {
		return g.vips
	}
	vips := maps.Clone(g.vips)
	maps.DeleteFunc(vips, func(vip netip.Addr, _ segment.VIP) bool { return !plan.Belongs(vip, segments, names...) })
	return vips
}

func grouped(vips map[netip.Addr]*assignment) []group {
	type key struct {
		protocol   wire.Protocol
		interfaces string
		anySegment bool
	}
	index, groups := map[key]int{}, []group(nil)
	for vip, v := range vips {
		p := wire.Of(vip)
		k := key{p, strings.Join(v.interfaces, " "), v.anySegment}
		at, ok := index[k]
		if !ok {
			at, index[k] = len(groups), len(groups)
			groups = append(groups, group{p, v.interfaces, v.anySegment, map[netip.Addr]segment.VIP{}})
		}
		groups[at].vips[vip] = v.VIP
	}
	return groups
}

// fit returns an error if the protocol cannot work on an interface that is up.
//
// NDP needs a link-local address. The kernel asks neighbours from it when a packet's source address, such
// as a VIP, is on no interface. Without it the kernel receives clients' packets, but cannot answer them.
func fit(p wire.Protocol, i netstate.Interface) error {
	tentative, usable := i.LinkLocal()
	switch {
	case usable || p != (wire.NDP{}):
		return nil
	case tentative.IsValid():
		return fmt.Errorf("%w: %s is tentative, which passes in seconds unless `ip -6 addr show dev %s` shows dadfailed: "+
			"then another host has it", errNoLinkLocal, tentative, i.Name)
	}
	return fmt.Errorf("%w: is IPv6 switched off by the sysctl net.ipv6.conf.%s.disable_ipv6, or addr_gen_mode none?", errNoLinkLocal, i.Name)
}
