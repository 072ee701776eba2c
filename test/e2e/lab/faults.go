package lab

import (
	"fmt"
	"slices"
	"strings"

	"github.com/lodestone-lb/lodestone/test/e2e/process"
)

// GossipPort is the TCP and UDP port on which speakers reach each other.
const GossipPort = 9744

// NodeLoss cuts a node off, as seen from everybody else: its power is gone.
func (c *Cluster) NodeLoss(node string) error {
	if err := c.known(node); err != nil {
		return err
	}
	return c.lan.Unplug(node)
}

// HealNode brings a lost node back.
func (c *Cluster) HealNode(node string) error {
	if err := c.known(node); err != nil {
		return err
	}
	return c.lan.PlugIn(node)
}

// Partition stops all traffic between hosts of different groups; a host in no
// group still reaches everybody. A single group is cut off from all other nodes.
func (c *Cluster) Partition(groups ...[]string) error {
	if err := c.known(slices.Concat(groups...)...); err != nil {
		return err
	}
	if len(groups) == 1 {
		groups = append(groups, c.nodesBut(groups[0]))
	}
	if slices.ContainsFunc(groups, func(group []string) bool { return len(group) == 0 }) {
		return fmt.Errorf("partition %v: a side is empty", groups)
	}
	return c.lan.Partition(groups...)
}

func (c *Cluster) nodesBut(group []string) []string {
	return slices.DeleteFunc(c.Nodes(), func(node string) bool { return slices.Contains(group, node) })
}

// Deafen makes a node's link carry what the node sends, and nothing to it.
func (c *Cluster) Deafen(node string) error {
	if err := c.known(node); err != nil {
		return err
	}
	return c.lan.Deafen(node)
}

// BlockGossip stops the packets between speakers; the segment stays intact.
func (c *Cluster) BlockGossip() error {
	for _, protocol := range []string{"udp", "tcp"} {
		if err := c.lan.BlockPort(protocol, GossipPort); err != nil {
			return err
		}
	}
	return nil
}

// BlockPort stops traffic of one "tcp" or "udp" port between all hosts.
func (c *Cluster) BlockPort(protocol string, port uint16) error {
	return c.lan.BlockPort(protocol, port)
}

// Lose drops the given percentage of all frames between hosts.
func (c *Cluster) Lose(percent int) error { return c.lan.Lose(percent) }

// Heal undoes every fault on the wire.
func (c *Cluster) Heal() error { return c.lan.Heal() }

// Process finds a program of the lab, such as "kube-apiserver" or "kubelet-n1",
// to be frozen, thawed, killed or restarted.
func (c *Cluster) Process(name string) (*process.Process, error) { return c.processes.Get(name) }

// Processes lists the programs of the lab.
func (c *Cluster) Processes() ([]string, error) { return c.processes.Names() }

func (c *Cluster) known(hosts ...string) error {
	all := c.HostNames()
	for _, host := range hosts {
		if !slices.Contains(all, host) {
			return fmt.Errorf("unknown host %q: want one of %s", host, strings.Join(all, ", "))
		}
	}
	return nil
}
