package diagnose

import (
	"cmp"
	"fmt"
	"iter"
	"maps"
	"net/netip"
	"slices"
	"strings"

	"github.com/lodestone-lb/lodestone/pkg/report"
)

// ipvsInterface is where kube-proxy in mode IPVS puts every VIP.
const ipvsInterface = "kube-ipvs0"

// nodes yields the nodes whose facts are known, by name.
func (c *Cluster) nodes() iter.Seq2[string, Facts] {
	return func(yield func(string, Facts) bool) {
		for _, name := range slices.Sorted(maps.Keys(c.Facts)) {
			if !yield(name, c.Facts[name]) {
				return
			}
		}
	}
}

// interfaces returns those of the node's interfaces that are on a segment,
// sorted, each once; with a VIP on it, if there is any VIP on a segment.
func (c *Cluster) interfaces(node string) []string {
	var on, withVIP []string
	for _, s := range c.Segments[node] {
		on = append(on, s.Interface)
		if slices.ContainsFunc(c.VIPs, func(v VIP) bool { return s.Subnet.Contains(v.Addr) }) {
			withVIP = append(withVIP, s.Interface)
		}
	}
	if len(withVIP) > 0 {
		on = withVIP
	}
	slices.Sort(on)
	return slices.Compact(on)
}

// Sysctl names a setting of an interface, of IPv4.
func Sysctl(iface, setting string) string { return "net/ipv4/conf/" + iface + "/" + setting }

// Sysctls of the whole node.
const (
	SysctlForward4 = "net/ipv4/ip_forward"
	SysctlForward6 = "net/ipv6/conf/all/forwarding"
)

// InterfaceSettings are the settings of interfaces that are checked; those of
// "all" count for each.
var InterfaceSettings = []string{"forwarding", "rp_filter", "arp_ignore", "arp_announce"}

// strictest returns the setting that is in force on the interface: for these the
// kernel takes the larger of the interface's and that of "all" (ip-sysctl).
func (f Facts) strictest(iface, setting string) (value int, known bool) {
	all, ok1 := f.Sysctls[Sysctl("all", setting)]
	own, ok2 := f.Sysctls[Sysctl(iface, setting)]
	return max(all, own), ok1 && ok2
}

// unread is the finding that a fact is not known.
func (f Facts) unread(what string) Finding {
	return found(Unknown, f.Node, "", "%s is not known: %s", what, cmp.Or(f.Unread[what], "the speaker does not report it"))
}

func set(name string, value int) string { return fmt.Sprintf("sysctl -w %s=%d", name, value) }

// ipvs returns the VIPs that kube-proxy has put on the node.
func (c *Cluster) ipvs(f Facts) (count int, is bool) {
	is = f.ProxyMode == "ipvs"
	for _, i := range f.Interfaces {
		if i.Name != ipvsInterface {
			continue
		}
		is = true
		for _, v := range c.VIPs {
			if has(i, v.Addr) {
				count++
			}
		}
	}
	return count, is
}

func has(i Interface, a netip.Addr) bool {
	return slices.ContainsFunc(i.Addrs, func(p netip.Prefix) bool { return p.Addr() == a })
}

func kubeProxy(c *Cluster) (all []Finding) {
	for name, f := range c.nodes() {
		vips, ipvs := c.ipvs(f)
		if !ipvs {
			continue
		}
		for _, i := range c.interfaces(name) {
			switch value, known := f.strictest(i, "arp_ignore"); {
			case !known:
				all = append(all, f.unread(Sysctl(i, "arp_ignore")))
			case value == 0:
				all = append(all, found(Error, name,
					"kubectl -n kube-system edit configmap kube-proxy: ipvs.strictARP: true; then kubectl -n kube-system rollout restart "+
						"daemonset/kube-proxy",
					"kube-proxy is in mode IPVS without strictARP: arp_ignore is 0 on %s, so that the kernel answers ARP for all VIPs on %s, %d at "+
						"the moment", i, ipvsInterface, vips))
			}
		}
	}
	return all
}

// answers reports whether the kernel answers on the address's segment for one
// that is on the interface.
func (c *Cluster) answers(f Facts, a netip.Addr, iface string) bool {
	return slices.ContainsFunc(c.Segments[f.Node], func(s report.Segment) bool {
		ignore, _ := f.strictest(s.Interface, "arp_ignore")
		return s.Subnet.Contains(a) && (s.Interface == iface || ignore == 0)
	})
}

func arp(c *Cluster) (all []Finding) {
	for name, f := range c.nodes() {
		all = append(all, c.configuredVIPs(name, f)...)
		vips, _ := c.ipvs(f)
		for _, i := range c.interfaces(name) {
			if value, known := f.strictest(i, "arp_ignore"); known && value == 8 {
				all = append(all, found(Error, name, set(Sysctl(i, "arp_ignore"), 1),
					"arp_ignore is 8 on %s: the node answers no ARP, not even for its own address", i))
			}
			if value, known := f.strictest(i, "arp_announce"); known && value < 2 && vips > 0 {
				all = append(all, found(Warning, name, set(Sysctl(i, "arp_announce"), 2),
					"arp_announce is %d on %s, and %d VIPs are on %s: the node may ask its neighbours in their name, who then send to it", value, i, vips,
					ipvsInterface))
			}
		}
	}
	return all
}

// configuredVIPs finds the VIPs on interfaces of the node for which its kernel answers.
func (c *Cluster) configuredVIPs(node string, f Facts) (all []Finding) {
	for _, i := range f.Interfaces {
		for _, v := range c.VIPs {
			if i.Name != ipvsInterface && has(i, v.Addr) && c.answers(f, v.Addr, i.Name) {
				all = append(all, found(Error, node,
					fmt.Sprintf("ip addr del %s dev %s; and find out who added it: keepalived, kube-vip, a person?", v.Addr, i.Name),
					"VIP %s is configured on %s: the kernel answers for it, whoever the owner is", v.Addr, i.Name))
			}
		}
	}
	return all
}

// speaks4 reports whether the node has an IPv4 address that others can reach, or
// does not report its addresses.
func (f Facts) speaks4() bool {
	return len(f.Interfaces) == 0 || slices.ContainsFunc(f.Interfaces, func(i Interface) bool {
		return slices.ContainsFunc(i.Addrs, func(p netip.Prefix) bool { return p.Addr().Is4() && !p.Addr().IsLoopback() })
	})
}

func ipForward(c *Cluster) (all []Finding) {
	v6 := slices.ContainsFunc(c.VIPs, func(v VIP) bool { return v.Addr.Is6() })
	for name, f := range c.nodes() {
		if f.speaks4() {
			all = append(all, f.forwards(name, SysctlForward4, "packets to VIPs", c.interfaces(name))...)
		}
		if v6 {
			all = append(all, f.forwards(name, SysctlForward6, "packets to IPv6 VIPs", nil)...)
		}
	}
	return all
}

// forwards checks that the node forwards what is for VIPs: in general, and if so, on these interfaces.
func (f Facts) forwards(name, sysctl, what string, interfaces []string) (all []Finding) {
	value, known := f.Sysctls[sysctl]
	if !known {
		return []Finding{f.unread(sysctl)}
	}
	if value == 0 {
		return []Finding{found(Error, name, set(sysctl, 1), "%s is 0: %s are not forwarded to pods", sysctl, what)}
	}
	for _, i := range interfaces {
		if value, known := f.Sysctls[Sysctl(i, "forwarding")]; known && value == 0 {
			all = append(all, found(Error, name, set(Sysctl(i, "forwarding"), 1),
				"%s is 0: %s that come in there are not forwarded to pods", Sysctl(i, "forwarding"), what))
		}
	}
	return all
}

// rpFilterStrict is the value of rp_filter by which a packet is dropped unless
// the way back to its source leads through the interface that it came in by.
const rpFilterStrict = 1

func rpFilter(c *Cluster) (all []Finding) {
	for name, f := range c.nodes() {
		for _, i := range c.interfaces(name) {
			value, known := f.strictest(i, "rp_filter")
			switch {
			case !known:
				all = append(all, f.unread(Sysctl(i, "rp_filter")))
			case value != rpFilterStrict:
			case f.Unread["default routes"] != "":
				all = append(all, f.unread("default routes"))
			case len(f.DefaultRoutes) > 0 && !slices.Contains(f.DefaultRoutes, i):
				all = append(all, found(Warning, name, set(Sysctl(i, "rp_filter"), 2),
					"rp_filter is 1 (strict) on %s, and the default route leads through %s: what clients behind routers send to VIPs there is dropped", i,
					list(f.DefaultRoutes)))
			}
		}
	}
	return all
}

// Capabilities by their number (capabilities(7)).
const (
	capNetBindService = 10
	capNetAdmin       = 12
	capNetRaw         = 13
)

func capabilities(c *Cluster) (all []Finding) {
	for name, f := range c.nodes() {
		if f.Unread["capabilities"] != "" {
			all = append(all, f.unread("capabilities"))
			continue
		}
		lacks := func(capability int) bool { return f.Capabilities&(1<<capability) == 0 }
		if lacks(capNetRaw) {
			all = append(all, found(Error, name, "see securityContext of the DaemonSet lodestone-speaker, and the policies that change pods",
				"the speaker lacks NET_RAW: it cannot answer ARP and NDP"))
		}
		if c.NetAdmin != "" && lacks(capNetAdmin) {
			all = append(all, found(Error, name, "helm upgrade with speaker.podRoutes, .connectionRateLimits or .directForwarding true",
				"the speaker lacks NET_ADMIN, as is needed for %s", c.NetAdmin))
		}
		if peers := c.Passive[name]; len(peers) > 0 && lacks(capNetBindService) {
			all = append(all, found(Error, name, "helm upgrade with speaker.bgp.passivePeers=true",
				"the speaker lacks NET_BIND_SERVICE: it cannot listen on port 179 for passive peers (%s)", list(peers)))
		}
	}
	return all
}

func bgpPort(c *Cluster) (all []Finding) {
	for name, f := range c.nodes() {
		peers := c.Passive[name]
		if len(peers) == 0 {
			continue
		}
		if f.Unread["bgp listeners"] != "" {
			all = append(all, f.unread("bgp listeners"))
			continue
		}
		var foreign []string
		ours := false
		for _, l := range f.BGPListeners {
			if ours = ours || l.Ours; !l.Ours {
				foreign = append(foreign, l.Address.String())
			}
		}
		const look = "ss -ltnp 'sport = :179' on the node"
		switch {
		case len(foreign) > 0 && !ours:
			all = append(all, found(Error, name, look, "another BGP daemon listens on %s, and passive peers (%s) connect there in vain",
				strings.Join(foreign, ", "), list(peers)))
		case len(foreign) > 0:
			all = append(all, found(Warning, name, look,
				"another BGP daemon listens on %s beside the speaker: passive peers (%s) may reach the wrong one",
				strings.Join(foreign, ", "), list(peers)))
		case !ours:
			all = append(all, found(Error, name, "kubectl -n "+c.Namespace+" logs of the speaker has the reason",
				"nobody listens on port 179, where passive peers (%s) connect", list(peers)))
		}
	}
	return all
}
