package diagnose

import (
	"cmp"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/lodestone-lb/lodestone/pkg/report"
)

// speakers reports what keeps nodes from owning VIPs.
func speakers(c *Cluster) (all []Finding) {
	for name, f := range c.nodes() {
		for _, cond := range f.Conditions {
			if !cond.OK {
				all = append(all, found(Error, name, "lodestone explain node "+name, "the speaker is not ready: %s: %s", cond.Name, cond.Message))
			}
		}
	}
	return all
}

// complete reports what is not known.
func complete(c *Cluster) (all []Finding) {
	for _, text := range c.Unread {
		all = append(all, found(Unknown, "", "", "%s", text))
	}
	for _, node := range slices.Sorted(maps.Keys(c.Mute)) {
		all = append(all, found(Unknown, node, "kubectl -n "+c.Namespace+" get pods -o wide", "nothing is known of the node itself: %s",
			c.Mute[node]))
	}
	if !c.Active {
		return all
	}
	for name, f := range c.nodes() {
		if !f.Active {
			all = append(all, found(Unknown, name, "", "the speaker has not probed the network: %s",
				cmp.Or(f.Unread["active"], "it is of another version")))
		}
	}
	return all
}

func implementations(c *Cluster) (all []Finding) {
	for _, o := range c.Others {
		hint := "remove " + o.Name + ", or give each its class (spec.loadBalancerClass); controller.handleClassless=false leaves Services " +
			"without a class to the other"
		if o.Handles {
			all = append(all, found(Error, "", hint, "%s handles Services that Lodestone serves: %s", o.Name, o.Evidence))
		} else {
			all = append(all, found(Warning, "", hint, "%s is installed, and may handle Services that Lodestone serves: %s", o.Name, o.Evidence))
		}
	}
	return all
}

func onSegment(c *Cluster) (all []Finding) {
	const look = "ip -brief addr on the nodes; interfaces and nodeSelector of the advertisements"
	alone := map[string][]string{}
	for _, v := range c.VIPs {
		if v.OffSegment != "" {
			all = append(all, found(Error, "", look, "nobody announces %s: %s", v.Addr, v.OffSegment))
			continue
		}
		if v.Owner == "" {
			continue
		}
		if nodes := c.on(v.Addr); len(nodes) == 1 && len(c.Segments) > 1 {
			alone[nodes[0]] = append(alone[nodes[0]], v.Addr.String())
		}
	}
	for _, node := range slices.Sorted(maps.Keys(alone)) {
		all = append(all, found(Warning, node, look, "no other node is on the segment of %s: nobody could take over", list(alone[node])))
	}
	return all
}

// on returns the nodes on the segment of the VIP, sorted.
func (c *Cluster) on(vip netip.Addr) (nodes []string) {
	for node, segments := range c.Segments {
		if slices.ContainsFunc(segments, func(s report.Segment) bool { return s.Subnet.Contains(vip) }) {
			nodes = append(nodes, node)
		}
	}
	slices.Sort(nodes)
	return nodes
}

// Plan returns which VIPs each node is to try, in the form of ParamVIP: each VIP
// is tried by one node, the one after its owner of those on the segment that
// answer. A node tries at most MaxVIPs.
func (c *Cluster) Plan() map[string][]netip.AddrPort {
	plan := map[string][]netip.AddrPort{}
	for _, v := range c.VIPs {
		nodes := slices.DeleteFunc(c.on(v.Addr), func(n string) bool { return c.Mute[n] != "" && n != v.Owner })
		i := slices.Index(nodes, v.Owner)
		if v.Owner == "" || len(nodes) < 2 || i < 0 {
			continue
		}
		if node := nodes[(i+1)%len(nodes)]; len(plan[node]) < MaxVIPs {
			plan[node] = append(plan[node], netip.AddrPortFrom(v.Addr, v.Port))
		}
	}
	return plan
}

func alive(c *Cluster) (all []Finding) {
	for name, f := range c.nodes() {
		for _, other := range slices.Sorted(maps.Keys(c.Facts)) {
			if !slices.Contains(f.Alive, other) {
				all = append(all, found(Error, name, "lodestone diagnose --active finds between which nodes the membership port is closed",
					"the speaker does not see that of node %s, which is alive: both may announce the same VIPs", other))
			}
		}
	}
	return all
}

func membershipPort(c *Cluster) (all []Finding) {
	for name, f := range c.nodes() {
		if f.Unread["members"] != "" {
			all = append(all, f.unread("members"))
		}
		for _, m := range f.Members {
			var by []string
			for protocol, why := range map[string]string{"TCP": m.TCP, "UDP": m.UDP} {
				if why != "" {
					by = append(by, protocol+" ("+why+")")
				}
			}
			if slices.Sort(by); len(by) > 0 {
				all = append(all, found(Error, name,
					fmt.Sprintf("open port %d between all nodes, for TCP and UDP; nft list ruleset on both nodes", m.Address.Port()),
					"the speaker of node %s does not answer at %s by %s", m.Node, m.Address, strings.Join(by, " and ")))
			}
		}
	}
	return all
}

func bgp(c *Cluster) (all []Finding) {
	for _, s := range c.Sessions {
		hint := "lodestone bgp peers --peer " + s.Peer
		switch {
		case s.Leftover:
			all = append(all, found(Warning, s.Node, hint, "there is a session with peer %s, and should be none: %s", s.Peer, s.Message))
		case !s.Up:
			all = append(all, found(Error, s.Node, hint, "no session with peer %s: %s", s.Peer, cmp.Or(s.Message, "the speaker gives no reason")))
		case s.Message != "":
			all = append(all, found(Warning, s.Node, hint, "session with peer %s: %s", s.Peer, s.Message))
		}
	}
	return all
}

func bfd(c *Cluster) (all []Finding) {
	for _, s := range c.Sessions {
		if s.BFD != "" && s.BFD != "Up" && !s.Leftover {
			all = append(all, found(Error, s.Node, "is BFD on at the router for this peer, and UDP port 3784 (4784 with multihop) open?",
				"the BFD session with peer %s is %s: the loss of the router is noticed late", s.Peer, s.BFD))
		}
	}
	return all
}

// owners returns the nodes by the hardware addresses of their interfaces.
func (c *Cluster) owners() map[string]string {
	by := map[string]string{}
	for name, f := range c.nodes() {
		for _, i := range f.Interfaces {
			if i.HardwareAddr != "" {
				by[i.HardwareAddr] = name
			}
		}
	}
	return by
}

// fault returns what is wrong with how an address of a node answers; empty: nothing is.
func (n Neighbour) fault(owners map[string]string) string {
	by := "ARP"
	if n.Address.Is6() {
		by = "NDP"
	}
	var all []string
	wrong := 0
	for _, mac := range n.Answers {
		if owners[mac] != n.Node {
			wrong++
		}
		all = append(all, fmt.Sprintf("%s (%s)", mac, cmp.Or(owners[mac], "no known node")))
	}
	switch {
	case len(n.Answers) == 0:
		return fmt.Sprintf("nobody answers %s for it on %s", by, n.Interface)
	case wrong == 0: // a node may answer by several interfaces
		return ""
	case len(n.Answers) > 1:
		return fmt.Sprintf("%d hardware addresses answer %s for it on %s: %s", len(n.Answers), by, n.Interface, strings.Join(all, ", "))
	}
	return fmt.Sprintf("%s answers %s for it on %s", all[0], by, n.Interface)
}

func neighbours(c *Cluster) (all []Finding) {
	owners := c.owners()
	for name, f := range c.nodes() {
		for _, n := range f.Neighbours {
			hint := fmt.Sprintf("arping -I %s %s on the node; same VLAN, port security, ARP inspection?", n.Interface, n.Address)
			if n.Address.Is6() {
				hint = fmt.Sprintf("ndisc6 %s %s on the node; same VLAN, MLD snooping, RA guard?", n.Address, n.Interface)
			}
			_, known := c.Facts[n.Node]
			switch wrong := n.fault(owners); {
			case n.Error != "":
				all = append(all, found(Unknown, name, "", "address %s of node %s was not asked for: %s", n.Address, n.Node, n.Error))
			case wrong != "" && (known || len(n.Answers) != 1): // only the node's speaker knows whose hardware address it is
				all = append(all, found(Error, name, hint, "address %s of node %s: %s", n.Address, n.Node, wrong))
			}
		}
	}
	return all
}

func reach(c *Cluster) (all []Finding) {
	owners := c.owners()
	for name, f := range c.nodes() {
		for _, t := range f.VIPs {
			hint := "lodestone explain vip " + t.Address.String()
			_, known := c.Facts[t.Node]
			switch wrong := t.fault(owners); {
			case t.Error != "":
				all = append(all, found(Unknown, name, "", "VIP %s was not tried: %s", t.Address, t.Error))
			case wrong != "" && (known || len(t.Answers) != 1):
				all = append(all, found(Error, name, hint, "VIP %s of node %s: %s", t.Address, t.Node, wrong))
			case t.Reply == Silence:
				all = append(all, found(Error, name, hint+"; tcpdump on node "+t.Node+"; a NetworkPolicy may forbid nodes what it allows to clients",
					"VIP %s of node %s: TCP port %d does not answer", t.Address, t.Node, t.Port))
			case t.Reply == Refused:
				all = append(all, found(Warning, name, "kubectl get endpointslices of the Service; does the pod listen on the target port?",
					"VIP %s of node %s: TCP port %d refuses connections", t.Address, t.Node, t.Port))
			}
		}
	}
	return all
}

func mtu(c *Cluster) (all []Finding) {
	by := map[netip.Prefix]map[int][]string{}
	for _, node := range slices.Sorted(maps.Keys(c.Segments)) {
		for _, s := range c.Segments[node] {
			for _, i := range c.Facts[node].Interfaces {
				if i.Name != s.Interface {
					continue
				}
				if by[s.Subnet] == nil {
					by[s.Subnet] = map[int][]string{}
				}
				by[s.Subnet][i.MTU] = append(by[s.Subnet][i.MTU], node+" ("+i.Name+")")
			}
		}
	}
	for _, subnet := range slices.SortedFunc(maps.Keys(by), netip.Prefix.Compare) {
		sizes := slices.Sorted(maps.Keys(by[subnet]))
		if len(sizes) < 2 {
			continue
		}
		var texts []string
		for _, size := range sizes {
			texts = append(texts, fmt.Sprintf("%d on %s", size, list(by[subnet][size])))
		}
		all = append(all, found(Warning, "", "ip link set dev INTERFACE mtu SIZE, and in the host's network configuration",
			"interfaces on %s have different MTUs, %s: larger packets to the former are lost", subnet, strings.Join(texts, ", ")))
	}
	return all
}

// A clock is off when it differs by more than tolerated, beyond what is
// uncertain; by more than harmful, tokens are refused.
const (
	tolerated = 2 * time.Second
	harmful   = 30 * time.Second
)

func clocks(c *Cluster) (all []Finding) {
	if c.APIServer == nil && len(c.Clocks) > 0 {
		return []Finding{found(Unknown, "", "", "the clock of the API server is not known, and the nodes' are not compared with it")}
	}
	for _, node := range slices.Sorted(maps.Keys(c.Clocks)) {
		ahead := c.Clocks[node].Offset - c.APIServer.Offset
		unsure, where, severity := c.Clocks[node].Uncertainty+c.APIServer.Uncertainty, "ahead of", Warning
		if ahead < 0 {
			ahead, where = -ahead, "behind"
		}
		if ahead-unsure > harmful {
			severity = Error
		}
		if ahead-unsure > tolerated {
			all = append(all, found(severity, node, "chronyc tracking, or timedatectl, on the node",
				"the clock is %s %s that of the API server, give or take %s", ahead.Round(100*time.Millisecond), where,
				unsure.Round(100*time.Millisecond)))
		}
	}
	return all
}
