package layer2

import (
	"net"
	"path"
	"slices"

	"github.com/lodestone-lb/lodestone/pkg/netstate"
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
