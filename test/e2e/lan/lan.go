// Package lan is the lab's wire: one bridge in a namespace of its own, hosts
// plugged into its ports, and the faults that can befall it.
//
//	lan.go     LAN: builds and destroys it
//	faults.go  unplugged ports, partitions and losses
package lan

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/lodestone-lb/lodestone/test/e2e/netns"
)

const (
	// Interface is every host's name for its link to the bridge.
	Interface = "eth0"

	bridge = "br0"
)

// LAN is the wire of one lab.
type LAN struct{ name string }

// New returns the LAN of that name, of letters and digits: its namespaces are the name,
// a hyphen, and the host.
func New(name string) LAN { return LAN{name} }

// Namespace returns the name of a host's network namespace.
func (l LAN) Namespace(host string) string { return l.name + "-" + host }

// bridgeNamespace holds the bridge.
func (l LAN) bridgeNamespace() string { return l.Namespace("lan") }

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

func (h Host) port() string { return portOf(h.Name) }

func portOf(host string) string { return "p-" + host }

// MAC returns the hardware address of the host's interface, made from its
// first address so that a packet capture can be read.
func (h Host) MAC() net.HardwareAddr {
	ip := h.Addresses[0].Addr().As4()
	return net.HardwareAddr{0x02, 0x00, ip[0], ip[1], ip[2], ip[3]}
}

// ours are the hosts that Build makes, and no others: tests of other packages have
// namespaces too.
var ours = regexp.MustCompile(`^(lan|cp[23]?|client|(router|remote)2?|n[0-9]+)$`)

// Owns reports whether Destroy removes the namespace.
func (l LAN) Owns(namespace string) bool {
	host, found := strings.CutPrefix(namespace, l.Namespace(""))
	return found && ours.MatchString(host)
}

// Destroy removes every namespace that Build may have made.
func (l LAN) Destroy() error {
	paths, err := filepath.Glob(netns.Path(l.Namespace("*")))
	if err != nil {
		return err
	}
	var failed error
	for _, path := range paths {
		if name := filepath.Base(path); l.Owns(name) {
			failed = errors.Join(failed, netns.Delete(name))
		}
	}
	return failed
}

// Build makes the bridge and plugs the hosts in.
func (l LAN) Build(hosts []Host) error {
	if err := l.buildBridge(); err != nil {
		return fmt.Errorf("build bridge: %w", err)
	}
	for _, host := range hosts {
		if err := l.plugIn(host); err != nil {
			return fmt.Errorf("plug in host %s: %w", host.Name, err)
		}
	}
	return nil
}

func (l LAN) buildBridge() error {
	namespace := l.bridgeNamespace()
	if err := netns.Create(namespace); err != nil {
		return err
	}
	// Rules on the bridge are the lab's faults; netfilter's other hooks have
	// no business there. They are in a module, which nodes need for pods that ask a Service of their own node; a kernel
	// without modules has it built in.
	_ = exec.Command("modprobe", "br_netfilter").Run()
	if err := sysctl(namespace, map[string]string{
		"net/bridge/bridge-nf-call-iptables":  "0",
		"net/bridge/bridge-nf-call-ip6tables": "0",
		"net/bridge/bridge-nf-call-arptables": "0",
	}); err != nil {
		return err
	}
	handle, err := netns.Netlink(namespace)
	if err != nil {
		return err
	}
	defer handle.Close()
	link := &netlink.Bridge{LinkAttrs: linkAttrs(bridge), MulticastSnooping: new(false)}
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

func (l LAN) plugIn(host Host) error {
	namespace := l.Namespace(host.Name)
	if err := netns.Create(namespace); err != nil {
		return err
	}
	if err := sysctl(namespace, hostSettings(host)); err != nil {
		return err
	}
	if err := l.connect(host); err != nil {
		return err
	}
	handle, err := netns.Netlink(namespace)
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
func (l LAN) connect(host Host) error {
	if host.Behind != "" {
		return l.lay(host, l.Namespace(host.Behind), linkAttrs("to-"+host.Name))
	}
	handle, err := netns.Netlink(l.bridgeNamespace())
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
	return l.lay(host, l.bridgeNamespace(), attrs)
}

// lay lays the cable to a new interface in a namespace.
func (l LAN) lay(host Host, namespace string, attrs netlink.LinkAttrs) error {
	handle, err := netns.Netlink(namespace)
	if err != nil {
		return err
	}
	defer handle.Close()
	target, err := os.Open(netns.Path(l.Namespace(host.Name)))
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
