package lan

import (
	"bytes"
	"context"
	"fmt"
	"strings"

	"github.com/vishvananda/netlink"

	"github.com/lodestone-lb/lodestone/test/e2e/netns"
)

// faultTable holds every rule that a fault added; healing deletes the table.
// The policy is accept, so an empty table is a healthy wire.
const faultTable = `
add table bridge faults
add chain bridge faults forward { type filter hook forward priority 0; policy accept; }
`

// Unplug takes the host's port down: nothing of that host reaches anybody.
func (l LAN) Unplug(host string) error { return l.setPort(host, (*netlink.Handle).LinkSetDown) }

// PlugIn brings the host's port back up.
func (l LAN) PlugIn(host string) error { return l.setPort(host, (*netlink.Handle).LinkSetUp) }

func (l LAN) setPort(host string, set func(*netlink.Handle, netlink.Link) error) error {
	handle, err := netns.Netlink(l.bridgeNamespace())
	if err != nil {
		return err
	}
	defer handle.Close()
	link, err := handle.LinkByName(portOf(host))
	if err != nil {
		return fmt.Errorf("find bridge port of host %q: %w", host, err)
	}
	return set(handle, link)
}

// Partition stops all frames between hosts of different groups. A host in no
// group still reaches everybody.
func (l LAN) Partition(groups ...[]string) error { return l.addFaults(partitionRules(groups...)) }

func partitionRules(groups ...[]string) string {
	var rules strings.Builder
	for i, from := range groups {
		for j, to := range groups {
			if i != j {
				fmt.Fprintf(&rules, "iifname %s oifname %s drop\n", portSet(from), portSet(to))
			}
		}
	}
	return rules.String()
}

// Deafen stops all frames to the host: its link carries one way only.
func (l LAN) Deafen(host string) error { return l.addFaults("oifname " + portOf(host) + " drop\n") }

func portSet(hosts []string) string {
	ports := make([]string, len(hosts))
	for i, host := range hosts {
		ports[i] = portOf(host)
	}
	return "{ " + strings.Join(ports, ", ") + " }"
}

// BlockPort stops traffic to and from the port, of "tcp" or "udp", on the wire.
func (l LAN) BlockPort(protocol string, port uint16) error {
	return l.addFaults(fmt.Sprintf("meta l4proto %[1]s th dport %[2]d drop\nmeta l4proto %[1]s th sport %[2]d drop\n", protocol, port))
}

// Lose drops the given percentage of all frames, at random.
func (l LAN) Lose(percent int) error { return LoseOn(l.bridgeNamespace(), percent) }

// LoseOn is Lose for the bridges of any namespace.
func LoseOn(namespace string, percent int) error {
	switch {
	case percent < 1 || percent > 100:
		return fmt.Errorf("lose %d percent: want 1 to 100", percent)
	case percent == 100:
		return addFaultsOn(namespace, "drop\n")
	default:
		return addFaultsOn(namespace, fmt.Sprintf("numgen random mod 100 < %d drop\n", percent))
	}
}

func (l LAN) addFaults(rules string) error { return addFaultsOn(l.bridgeNamespace(), rules) }

func addFaultsOn(namespace, rules string) error {
	script := faultTable
	for rule := range strings.Lines(rules) {
		script += "add rule bridge faults forward " + rule
	}
	return nft(namespace, script)
}

// HealOn takes every fault rule of a namespace's bridges away.
func HealOn(namespace string) error {
	return nft(namespace, "add table bridge faults\ndelete table bridge faults\n")
}

// Heal takes every fault rule away and brings every port up.
func (l LAN) Heal() error {
	if err := HealOn(l.bridgeNamespace()); err != nil {
		return err
	}
	handle, err := netns.Netlink(l.bridgeNamespace())
	if err != nil {
		return err
	}
	defer handle.Close()
	links, err := handle.LinkList()
	if err != nil {
		return fmt.Errorf("list bridge ports: %w", err)
	}
	for _, link := range links {
		if strings.HasPrefix(link.Attrs().Name, portOf("")) {
			if err := handle.LinkSetUp(link); err != nil {
				return fmt.Errorf("bring up %s: %w", link.Attrs().Name, err)
			}
		}
	}
	return nil
}

func nft(namespace, script string) error {
	cmd := netns.Command(context.Background(), namespace, "nft", "-f", "-")
	cmd.Stdin = strings.NewReader(script)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("load rules on the bridge: %w: %s", err, stderr.Bytes())
	}
	return nil
}
