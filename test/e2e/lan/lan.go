// Package lan is the lab's wire: one bridge in a namespace of its own, hosts
// plugged into its ports, and the faults that can befall it.
package lan

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/lodestone-lb/lodestone/test/e2e/netns"
)

const (
	// Namespace holds the bridge.
	Namespace = "ls-lan"
	// Interface is every host's name for its link to the bridge.
	Interface = "eth0"

	bridge = "br0"
)

// Host is one machine: a network namespace with one interface, and one more
// for each host behind it.
type Host struct {
	Name      string
	Addresses []netip.Prefix
	Routes    []Route
	Forward   bool // a router between its interfaces, as every node is
	// Behind is the host at the other end of the cable, which was built before.
	// Empty: the cable leads to the bridge.
	Behind string
	// Gateway are the addresses of that end.
	Gateway []netip.Prefix
}

// Route is one static route of a host.
type Route struct {
	To  netip.Prefix
	Via netip.Addr
}

// Namespace returns the name of the host's network namespace.
func (h Host) Namespace() string { return "ls-" + h.Name }

func (h Host) port() string { return portOf(h.Name) }

func portOf(host string) string { return "p-" + host }

// MAC returns the hardware address of the host's interface, made from its
// first address so that a packet capture can be read.
func (h Host) MAC() net.HardwareAddr {
	ip := h.Addresses[0].Addr().As4()
	return net.HardwareAddr{0x02, 0x00, ip[0], ip[1], ip[2], ip[3]}
}

// ours are the namespaces that Build makes, and no others: tests of other
// packages have namespaces too.
var ours = regexp.MustCompile(`^ls-(lan|cp[23]?|client|(router|remote)2?|n[0-9]+)$`)

// Owns reports whether Destroy removes the namespace.
func Owns(namespace string) bool { return ours.MatchString(namespace) }

// Destroy removes every namespace that Build may have made.
func Destroy() error {
	paths, err := filepath.Glob(netns.Path("ls-*"))
	if err != nil {
		return err
	}
	var failed error
	for _, path := range paths {
		if name := filepath.Base(path); Owns(name) {
			failed = errors.Join(failed, netns.Delete(name))
		}
	}
	return failed
}

// Build makes the bridge and plugs the hosts in.
func Build(hosts []Host) error {
	if err := buildBridge(); err != nil {
		return fmt.Errorf("build bridge: %w", err)
	}
	for _, host := range hosts {
		if err := plugIn(host); err != nil {
			return fmt.Errorf("plug in host %s: %w", host.Name, err)
		}
	}
	return nil
}

func buildBridge() error {
	if err := netns.Create(Namespace); err != nil {
		return err
	}
	// Rules on the bridge are the lab's faults; netfilter's other hooks have
	// no business there.
	if err := sysctl(Namespace, map[string]string{
		"net/bridge/bridge-nf-call-iptables":  "0",
		"net/bridge/bridge-nf-call-ip6tables": "0",
		"net/bridge/bridge-nf-call-arptables": "0",
	}); err != nil {
		return err
	}
	handle, err := netns.Netlink(Namespace)
	if err != nil {
		return err
	}
	defer handle.Close()
	snooping := false
	link := &netlink.Bridge{LinkAttrs: linkAttrs(bridge), MulticastSnooping: &snooping}
	if err := handle.LinkAdd(link); err != nil {
		return err
	}
	return handle.LinkSetUp(link)
}

func linkAttrs(name string) netlink.LinkAttrs {
	attrs := netlink.NewLinkAttrs()
	attrs.Name = name
	return attrs
}

func plugIn(host Host) error {
	if err := netns.Create(host.Namespace()); err != nil {
		return err
	}
	if err := sysctl(host.Namespace(), hostSettings(host)); err != nil {
		return err
	}
	if err := connect(host); err != nil {
		return err
	}
	handle, err := netns.Netlink(host.Namespace())
	if err != nil {
		return err
	}
	defer handle.Close()
	return configure(handle, host)
}

func hostSettings(host Host) map[string]string {
	settings := map[string]string{
		"net/ipv6/conf/all/accept_dad":     "0", // addresses work at once
		"net/ipv6/conf/default/accept_dad": "0",
	}
	if host.Forward {
		settings["net/ipv4/ip_forward"] = "1"
		settings["net/ipv6/conf/all/forwarding"] = "1"
		// Of several ways to an address, a connection takes one.
		settings["net/ipv4/fib_multipath_hash_policy"] = "1"
		settings["net/ipv6/fib_multipath_hash_policy"] = "1"
	}
	return settings
}

// connect lays the cable: a veth pair from the host's interface to its port on
// the bridge, or to the host that it is behind.
func connect(host Host) error {
	if host.Behind != "" {
		return lay(host, Host{Name: host.Behind}.Namespace(), linkAttrs("to-"+host.Name))
	}
	handle, err := netns.Netlink(Namespace)
	if err != nil {
		return err
	}
	defer handle.Close()
	master, err := handle.LinkByName(bridge)
	if err != nil {
		return err
	}
	attrs := linkAttrs(host.port())
	attrs.MasterIndex = master.Attrs().Index
	return lay(host, Namespace, attrs)
}

// lay lays the cable to a new interface in a namespace.
func lay(host Host, namespace string, attrs netlink.LinkAttrs) error {
	handle, err := netns.Netlink(namespace)
	if err != nil {
		return err
	}
	defer handle.Close()
	target, err := os.Open(netns.Path(host.Namespace()))
	if err != nil {
		return err
	}
	defer target.Close()
	veth := &netlink.Veth{
		LinkAttrs:        attrs,
		PeerName:         Interface,
		PeerHardwareAddr: host.MAC(),
		PeerNamespace:    netlink.NsFd(target.Fd()),
	}
	if err := handle.LinkAdd(veth); err != nil {
		return err
	}
	return bring(handle, veth, host.Gateway)
}

// bring brings a link up, with these addresses.
func bring(handle *netlink.Handle, link netlink.Link, addresses []netip.Prefix) error {
	if err := handle.LinkSetUp(link); err != nil {
		return err
	}
	for _, address := range addresses {
		if err := handle.AddrAdd(link, &netlink.Addr{IPNet: ipNet(address), Flags: unix.IFA_F_NODAD}); err != nil {
			return fmt.Errorf("add address %s: %w", address, err)
		}
	}
	return nil
}

func configure(handle *netlink.Handle, host Host) error {
	for name, addresses := range map[string][]netip.Prefix{"lo": nil, Interface: host.Addresses} {
		link, err := handle.LinkByName(name)
		if err != nil {
			return err
		}
		if err := bring(handle, link, addresses); err != nil {
			return err
		}
	}
	for _, route := range host.Routes {
		if err := handle.RouteAdd(&netlink.Route{Dst: ipNet(route.To), Gw: route.Via.AsSlice()}); err != nil {
			return fmt.Errorf("add route %s via %s: %w", route.To, route.Via, err)
		}
	}
	return nil
}

func ipNet(prefix netip.Prefix) *net.IPNet {
	return &net.IPNet{
		IP:   prefix.Addr().AsSlice(),
		Mask: net.CIDRMask(prefix.Bits(), prefix.Addr().BitLen()),
	}
}

// sysctl writes kernel settings; below /proc/sys/net they are the namespace's.
func sysctl(namespace string, settings map[string]string) error {
	return netns.Do(namespace, func() error {
		for key, value := range settings {
			if err := os.WriteFile(filepath.Join("/proc/sys", key), []byte(value), 0o644); err != nil {
				return fmt.Errorf("set %s: %w", key, err)
			}
		}
		return nil
	})
}
