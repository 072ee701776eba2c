package lab

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/lodestone-lb/lodestone/test/e2e/lan"
)

// Host names. Nodes are n1, n2, ...; the namespace of host X is ls-X in the first place, ls2-X in the second.
const (
	ControlPlane = "cp"
	// With Options.APIServers the control plane has more hosts, each with an API server.
	ControlPlane2 = "cp2"
	ControlPlane3 = "cp3"
	Client        = "client"
	// Router is on the LAN, and Remote is a client behind it. With RouterBoth
	// there is a second of each.
	Router  = "router"
	Remote  = "remote"
	Router2 = "router2"
	Remote2 = "remote2"
)

// family is the addressing plan of one IP family.
type family struct {
	lan      netip.Prefix // the segment; the host number completes it
	pods     netip.Prefix // one subnet of podBits for each node
	podBits  int
	services netip.Prefix
	vips     string       // the pool of the lab's Lodestone
	remote   netip.Prefix // the networks behind routers, one subnet of the LAN's size for each
}

// The benchmarking and documentation ranges: nothing real can have them.
var (
	ipv4 = family{
		lan:      netip.MustParsePrefix("198.18.0.0/24"),
		pods:     netip.MustParsePrefix("10.244.0.0/16"),
		podBits:  24,
		services: netip.MustParsePrefix("10.96.0.0/16"),
		vips:     "198.18.0.200-198.18.0.250",
		remote:   netip.MustParsePrefix("198.18.8.0/22"),
	}
	ipv6 = family{
		lan:      netip.MustParsePrefix("2001:db8:0:1::/64"),
		pods:     netip.MustParsePrefix("2001:db8:10::/48"),
		podBits:  64,
		services: netip.MustParsePrefix("2001:db8:96::/112"),
		vips:     "2001:db8:0:1::200-2001:db8:0:1::250",
		remote:   netip.MustParsePrefix("2001:db8:0:8::/62"),
	}
)

// behind returns the address of host number in the network behind the router
// with that index.
func (f family) behind(index, number int) netip.Prefix {
	raw := f.remote.Addr().AsSlice()
	raw[f.lan.Bits()/8-1] += byte(index)
	raw[len(raw)-1] = byte(number)
	address, _ := netip.AddrFromSlice(raw)
	return netip.PrefixFrom(address, f.lan.Bits())
}

// host returns the address of the host with that number on the LAN. IPv6
// addresses show the number in decimal, as IPv4 ones do: n1 is .11 and ::11.
func (f family) host(number int) netip.Prefix {
	base := strings.TrimSuffix(f.lan.Addr().String(), "0")
	address := netip.MustParseAddr(base + fmt.Sprint(number))
	return netip.PrefixFrom(address, f.lan.Bits())
}

// node returns the pod subnet of the node with that number.
func (f family) node(number int) netip.Prefix {
	raw := f.pods.Addr().AsSlice()
	raw[f.podBits/8-1] = byte(number)
	address, _ := netip.AddrFromSlice(raw)
	return netip.PrefixFrom(address, f.podBits)
}

// topology has the hosts and their links; it follows from the options alone.
type topology struct {
	families []family
	nodes    []string
	routers  []router
	// servers are the hosts with an API server; the first one has the rest of the control plane.
	servers []string
	// ownPodRoutes is Options.OwnPodRoutes.
	ownPodRoutes bool
}

// router is a router on the LAN with a client behind it.
type router struct {
	name, remote string
	daemon       string // RouterFRR or RouterBIRD
}

func newTopology(o Options) topology {
	t := topology{families: []family{ipv4}, ownPodRoutes: o.OwnPodRoutes}
	t.servers = []string{ControlPlane, ControlPlane2, ControlPlane3}[:max(1, o.APIServers)]
	if o.DualStack {
		t.families = append(t.families, ipv6)
	}
	for i := range o.Nodes {
		t.nodes = append(t.nodes, fmt.Sprintf("n%d", i+1))
	}
	switch o.Router {
	case RouterFRR, RouterBIRD:
		t.routers = []router{{Router, Remote, o.Router}}
	case RouterBoth:
		t.routers = []router{{Router, Remote, RouterFRR}, {Router2, Remote2, RouterBIRD}}
	}
	return t
}

// number is the last part of a host's LAN addresses.
func (t topology) number(host string) int {
	switch host {
	case ControlPlane, ControlPlane2, ControlPlane3:
		return 1 + slices.Index(t.servers, host)
	case Client:
		return 100
	case Router:
		return 254
	case Router2:
		return 253
	default:
		return 11 + slices.Index(t.nodes, host)
	}
}

func (t topology) addresses(host string) []netip.Prefix {
	for i, r := range t.routers {
		if host == r.remote {
			return t.each(func(f family) netip.Prefix { return f.behind(i, 2) })
		}
	}
	return t.each(func(f family) netip.Prefix { return f.host(t.number(host)) })
}

func (t topology) ips(host string) []netip.Addr {
	var ips []netip.Addr
	for _, address := range t.addresses(host) {
		ips = append(ips, address.Addr())
	}
	return ips
}

func (t topology) podCIDRs(node string) []netip.Prefix {
	return t.each(func(f family) netip.Prefix { return f.node(slices.Index(t.nodes, node) + 1) })
}

func (t topology) clusterCIDRs() []netip.Prefix {
	return t.each(func(f family) netip.Prefix { return f.pods })
}

func (t topology) serviceCIDRs() []netip.Prefix {
	return t.each(func(f family) netip.Prefix { return f.services })
}

func (t topology) each(part func(family) netip.Prefix) []netip.Prefix {
	prefixes := make([]netip.Prefix, len(t.families))
	for i, f := range t.families {
		prefixes[i] = part(f)
	}
	return prefixes
}

// join lists values with commas, as flags take them.
func join[T fmt.Stringer](values []T) string {
	words := make([]string, len(values))
	for i, value := range values {
		words[i] = value.String()
	}
	return strings.Join(words, ",")
}

// hosts returns every machine of the lab. The control plane and the nodes have
// static routes to the pods, unless the nodes make their own; the client knows the LAN and nothing more.
func (t topology) hosts() []lan.Host {
	hosts := []lan.Host{{Name: Client, Addresses: t.addresses(Client)}}
	for _, server := range t.servers {
		hosts = append(hosts, lan.Host{Name: server, Addresses: t.addresses(server), Routes: t.podRoutes("")})
	}
	for _, node := range t.nodes {
		hosts = append(hosts, t.nodeHost(node))
	}
	for i, r := range t.routers {
		gateway := t.each(func(f family) netip.Prefix { return f.behind(i, 1) })
		remote := lan.Host{Name: r.remote, Addresses: t.addresses(r.remote), Behind: r.name, Gateway: gateway}
		for _, g := range gateway {
			remote.Routes = append(remote.Routes, lan.Route{To: defaultRoute(g.Addr()), Via: g.Addr()})
		}
		hosts = append(hosts, lan.Host{Name: r.name, Addresses: t.addresses(r.name), Forward: true}, remote)
	}
	return hosts
}

// nodeHost is a node, with a default route: a node's own traffic to a Service
// address needs one, though kube-proxy rewrites it before it leaves.
func (t topology) nodeHost(node string) lan.Host {
	var routes []lan.Route
	if !t.ownPodRoutes {
		routes = t.podRoutes(node)
	}
	for _, gateway := range t.ips(ControlPlane) {
		routes = append(routes, lan.Route{To: defaultRoute(gateway), Via: gateway})
	}
	for _, r := range t.routers {
		for i, network := range t.addresses(r.remote) {
			routes = append(routes, lan.Route{To: network.Masked(), Via: t.ips(r.name)[i]})
		}
	}
	return lan.Host{Name: node, Addresses: t.addresses(node), Routes: routes, Forward: true}
}

// defaultRoute is everything in the address's family.
func defaultRoute(address netip.Addr) netip.Prefix {
	everything, _ := address.Prefix(0) // fails for no valid address
	return everything
}

// podRoutes leads to the pods of every node but one.
func (t topology) podRoutes(except string) []lan.Route {
	var routes []lan.Route
	for _, node := range t.nodes {
		if node == except {
			continue
		}
		for i, cidr := range t.podCIDRs(node) {
			routes = append(routes, lan.Route{To: cidr, Via: t.ips(node)[i]})
		}
	}
	return routes
}

// vips returns the address ranges of the lab's pool.
func (t topology) vips() []string {
	ranges := make([]string, len(t.families))
	for i, f := range t.families {
		ranges[i] = f.vips
	}
	return ranges
}
