package lab

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"slices"
	"strings"

	"github.com/vishvananda/netlink"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/lodestone-lb/lodestone/test/e2e/lan"
	"github.com/lodestone-lb/lodestone/test/e2e/netns"
	"github.com/lodestone-lb/lodestone/test/e2e/process"
)

// Namespace returns the name of a host's network namespace.
func (c *Cluster) Namespace(host string) string { return c.lan.Namespace(host) }

// HostNames lists the machines: the control plane, the client, the nodes, the
// routers and the hosts behind them.
func (c *Cluster) HostNames() []string {
	var names []string
	for _, host := range c.hosts() {
		names = append(names, host.Name)
	}
	return names
}

// Addresses returns a host's addresses, IPv4 first: those on the LAN if it is
// there.
func (c *Cluster) Addresses(host string) []netip.Addr { return c.ips(host) }

// InNamespace runs fn inside the network of a host. Goroutines that fn starts
// are not inside.
func (c *Cluster) InNamespace(host string, fn func() error) error {
	return netns.Do(c.Namespace(host), fn)
}

// Command returns a command that will run in a host's network. It finds kubectl
// and helm, and they find the lab.
func (c *Cluster) Command(ctx context.Context, host string, args ...string) *exec.Cmd {
	cmd := netns.Command(ctx, c.Namespace(host), args...)
	cmd.Env = append(os.Environ(),
		"PATH="+c.path("bin")+":"+os.Getenv("PATH"),
		"KUBECONFIG="+c.Kubeconfig())
	return cmd
}

// ContainerPIDs lists the processes of one container of a node.
func (c *Cluster) ContainerPIDs(node, container string) ([]int, error) {
	return c.place.group().ContainerPIDs(node, container)
}

// Start runs a program in a host's network until it is killed or the lab goes down.
// Process finds it as NAME-HOST.
func (c *Cluster) Start(host, name string, args ...string) (*process.Process, error) {
	return c.processes.Start(process.Spec{Name: name + "-" + host, Namespace: c.Namespace(host), Args: args})
}

// Kubectl runs kubectl as the administrator and returns what it prints.
func (c *Cluster) Kubectl(ctx context.Context, args ...string) (string, error) {
	return c.output(ctx, ControlPlane, append([]string{"kubectl"}, args...)...)
}

// Helm runs helm as the administrator and returns what it prints.
func (c *Cluster) Helm(ctx context.Context, args ...string) (string, error) {
	return c.output(ctx, ControlPlane, append([]string{"helm"}, args...)...)
}

func (c *Cluster) output(ctx context.Context, host string, args ...string) (string, error) {
	output, err := c.Command(ctx, host, args...).CombinedOutput()
	if err != nil {
		return string(output), fmt.Errorf("run %s: %w: %s", strings.Join(args, " "), err, output)
	}
	return string(output), nil
}

// Owner returns the host whose hardware address the client sends traffic for
// the address to: the owner of a VIP, on the wire. The client must have sent
// to the address before.
func (c *Cluster) Owner(address netip.Addr) (string, error) {
	mac, err := c.neighbor(Client, address)
	if err != nil {
		return "", fmt.Errorf("find owner of %s: %w", address, err)
	}
	hosts := c.hosts()
	i := slices.IndexFunc(hosts, func(h lan.Host) bool { return h.MAC().String() == mac.String() })
	if i < 0 {
		return "", fmt.Errorf("find owner of %s: no host has the hardware address %s", address, mac)
	}
	return hosts[i].Name, nil
}

// neighbor looks an address up in a host's table of neighbors.
func (c *Cluster) neighbor(host string, address netip.Addr) (net.HardwareAddr, error) {
	handle, err := netns.Netlink(c.Namespace(host))
	if err != nil {
		return nil, err
	}
	defer handle.Close()
	family := netlink.FAMILY_V4
	if address.Is6() {
		family = netlink.FAMILY_V6
	}
	neighbors, err := handle.NeighList(0, family)
	if err != nil {
		return nil, fmt.Errorf("list neighbors of %s: %w", host, err)
	}
	for _, neighbor := range neighbors {
		if known, _ := netip.AddrFromSlice(neighbor.IP); known.Unmap() == address && len(neighbor.HardwareAddr) > 0 {
			return neighbor.HardwareAddr, nil
		}
	}
	return nil, fmt.Errorf("%s has no hardware address for it", host)
}

// Kubeconfig is the administrator's kubeconfig; it works inside the control plane's namespace.
func (c *Cluster) Kubeconfig() string { return c.path("kubeconfig") }

// RESTConfig is the administrator's configuration for client-go. It works in
// every namespace: its connections are made inside the control plane's namespace.
func (c *Cluster) RESTConfig() (*rest.Config, error) {
	config, err := clientcmd.BuildConfigFromFlags("", c.Kubeconfig())
	if err != nil {
		return nil, fmt.Errorf("read kubeconfig of the lab: %w", err)
	}
	config.Dial = netns.Dialer(c.Namespace(ControlPlane))
	config.QPS = -1 // no limit: what is measured is not the client
	return config, nil
}

// Clientset is the administrator's client.
func (c *Cluster) Clientset() (*kubernetes.Clientset, error) {
	config, err := c.RESTConfig()
	if err != nil {
		return nil, err
	}
	return kubernetes.NewForConfig(config)
}
