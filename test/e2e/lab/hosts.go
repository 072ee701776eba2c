package lab

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"slices"
	"strings"

	"github.com/lodestone-lb/lodestone/test/e2e/lan"
	"github.com/lodestone-lb/lodestone/test/e2e/netns"
)

// namespace returns a host's network namespace. Hosts go by either name.
func (c *Cluster) namespace(host string) string { return "ls-" + strings.TrimPrefix(host, "ls-") }

// HostNames lists the machines: the control plane, the client and the nodes.
func (c *Cluster) HostNames() []string { return append([]string{ControlPlane, Client}, c.nodes...) }

// Addresses returns a host's LAN addresses, IPv4 first.
func (c *Cluster) Addresses(host string) []netip.Addr { return c.ips(strings.TrimPrefix(host, "ls-")) }

// InNamespace runs fn inside the network of a host. Goroutines that fn starts
// are not inside.
func (c *Cluster) InNamespace(host string, fn func() error) error {
	return netns.Do(c.namespace(host), fn)
}

// Command returns a command that will run in a host's network. It finds kubectl
// and helm, and they find the lab.
func (c *Cluster) Command(ctx context.Context, host string, args ...string) *exec.Cmd {
	cmd := netns.Command(ctx, c.namespace(host), args...)
	cmd.Env = append(os.Environ(),
		"PATH="+c.path("bin")+":"+os.Getenv("PATH"),
		"KUBECONFIG="+c.Kubeconfig())
	return cmd
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

// hostOf finds the host with that hardware address, or "".
func (c *Cluster) hostOf(mac string) string {
	hosts := c.hosts()
	i := slices.IndexFunc(hosts, func(h lan.Host) bool { return h.MAC().String() == mac })
	if i < 0 {
		return ""
	}
	return hosts[i].Name
}
