package podroutes

import (
	"fmt"
	"net/netip"

	"github.com/vishvananda/netlink"
	"go4.org/netipx"

	"github.com/lodestone-lb/lodestone/pkg/reason"
	"github.com/lodestone-lb/lodestone/speaker/netstate"
	"github.com/lodestone-lb/lodestone/speaker/plan"
)

// Protocol marks the routes in the kernel that are Lodestone's (`proto` in the
// output of ip route). Nobody in rt_protos(5) of iproute2 has the number.
const Protocol = 76

// metric is the metric of all our routes. Routes of others to the same destination have another metric, so
// that they do not replace ours, and ours do not replace theirs.
const metric = 76

// The refusals that follow from the node's kernel. PodRefusals explains them.
const (
	NotOnSegment   plan.PodRefusal = "NotOnSegment"
	CIDROfSegment  plan.PodRefusal = "CIDROfSegment"
	NextHopIsSelf  plan.PodRefusal = "NextHopIsSelf"
	RoutedByOthers plan.PodRefusal = "RoutedByOthers"
)

// PodRefusals explains the refusals that follow from the node's kernel.
func PodRefusals() reason.Texts[plan.PodRefusal] {
	return reason.Texts[plan.PodRefusal]{
		NotOnSegment: {Cause: "The other node's address is on no subnet of this node, or the interface is down.",
			Cure: "Use routes.mode bgp where nodes have no segment in common; otherwise look at the link.",
			Keys: []string{"routes.mode"}},
		CIDROfSegment: {Cause: "The pod CIDR overlaps a subnet of this node, or contains its address.",
			Cure: "The networks of pods and nodes must not overlap: change one of them."},
		NextHopIsSelf: {Cause: "The other node reports this node's address as its own.", Cure: "Correct the Node's InternalIP."},
		RoutedByOthers: {Cause: "Somebody else has a route to the same CIDR.",
			Cure: "Decide who makes the routes, Lodestone or the other, and switch the other one off."},
	}
}

// target is a wanted route.
type target struct {
	node string
	via  netip.Addr
	link int    // index of the interface
	name string // its name
}

// problem is why a wanted route is impossible.
type problem struct {
	reason  plan.PodRefusal
	message string
}

// entry is a route of the kernel's main table.
type entry struct {
	prefix netip.Prefix
	via    netip.Addr
	ours   bool
	raw    netlink.Route
}

func entryOf(r netlink.Route) entry {
	e := entry{ours: r.Protocol == Protocol, raw: r}
	if r.Dst != nil {
		e.prefix, _ = netipx.FromStdIPNet(r.Dst)
	}
	e.via, _ = netipx.FromStdIP(r.Gw)
	return e
}

// is reports whether the entry is the target's route. Other attributes do not matter.
func (e entry) is(t target) bool {
	return e.ours && e.via == t.via && e.via.IsValid() && e.raw.LinkIndex == t.link && e.raw.Priority == metric && len(e.raw.MultiPath) == 0
}

// steps are the changes that bring routes into force.
type steps struct {
	kept     map[netip.Prefix]target // in force already
	puts     map[netip.Prefix]target
	replaces map[netip.Prefix]bool // puts that replace a route of ours
	removes  []netlink.Route
	problems map[netip.Prefix]problem
}

// decide compares the wanted routes with the kernel's table.
func decide(want map[netip.Prefix]plan.PodRoute, interfaces []netstate.Interface, table []entry) steps {
	s := steps{map[netip.Prefix]target{}, map[netip.Prefix]target{}, map[netip.Prefix]bool{}, nil, map[netip.Prefix]problem{}}
	ours, others := map[netip.Prefix][]entry{}, map[netip.Prefix]entry{}
	for _, e := range table {
		if e.ours {
			ours[e.prefix] = append(ours[e.prefix], e)
		} else {
			others[e.prefix] = e
		}
	}
	for prefix, route := range want {
		to, p := resolve(prefix, route, interfaces)
		if other, taken := others[prefix]; taken {
			p = problem{RoutedByOthers, fmt.Sprintf("somebody else has a route to %s already (%s): remove that one, or switch off routes in "+
				"the configuration", prefix, describe(other.raw))}
		}
		if p != (problem{}) {
			s.problems[prefix] = p
			continue
		}
		s.puts[prefix] = to
	}
	for _, prefix := range ordered(ours) {
		for _, e := range ours[prefix] {
			s.see(e)
		}
	}
	return s
}

// see takes an entry of ours into account.
func (s *steps) see(e entry) {
	to, wanted := s.puts[e.prefix]
	_, kept := s.kept[e.prefix]
	switch {
	case wanted && e.is(to):
		s.kept[e.prefix] = to
		delete(s.puts, e.prefix)
	case wanted && !kept && e.raw.Priority == metric:
		s.replaces[e.prefix] = true
	default:
		s.removes = append(s.removes, e.raw)
	}
}

// resolve finds the interface on whose subnet the next hop is.
func resolve(prefix netip.Prefix, route plan.PodRoute, interfaces []netstate.Interface) (target, problem) {
	var to target
	var subnet netip.Prefix
	down := ""
	for _, i := range interfaces {
		for _, a := range i.Addrs {
			if p := clash(prefix, route, a, i.Name); p != (problem{}) {
				return target{}, p
			}
			switch {
			case !a.Contains(route.Via) || i.Loopback:
			case !i.Up:
				down = i.Name
			case !to.via.IsValid() || a.Bits() > subnet.Bits():
				to, subnet = target{route.Node, route.Via, i.Index, i.Name}, a.Masked()
			}
		}
	}
	switch {
	case !to.via.IsValid() && down != "":
		return target{}, problem{NotOnSegment, fmt.Sprintf("node %s is at %s on the segment of %s, which is down", route.Node, route.Via, down)}
	case !to.via.IsValid():
		return target{}, problem{NotOnSegment,
			fmt.Sprintf("node %s is at %s, which is on no subnet of this node: a router is between them, so use mode bgp", route.Node, route.Via)}
	case prefix.Overlaps(subnet):
		return target{}, overlaps(prefix, route, subnet, to.name)
	}
	return to, problem{}
}

// widest is how wide the subnet of a network may be, by whether it is IPv4. What is wider is split by routes, as a VPN.
var widest = map[bool]int{true: 16, false: 64}

// clash returns the problem if this node's address on an interface is the next hop, or in the pod CIDR, or if its subnet contains the
// pod CIDR: the route would take the traffic to that part of the network.
func clash(prefix netip.Prefix, route plan.PodRoute, a netip.Prefix, on string) problem {
	switch own := a.Addr(); {
	case own == route.Via:
		return problem{NextHopIsSelf,
			fmt.Sprintf("node %s reports the address %s, which is this node's on %s: correct the Node's InternalIP", route.Node,
				route.Via, on)}
	case prefix.Contains(own):
		return problem{CIDROfSegment,
			fmt.Sprintf("the pod CIDR %s of node %s contains this node's address %s on %s: their networks must not overlap", prefix, route.Node,
				own, on)}
	case a.Bits() >= widest[own.Is4()] && a.Bits() <= prefix.Bits() && a.Contains(prefix.Addr()):
		return overlaps(prefix, route, a.Masked(), on)
	}
	return problem{}
}

func overlaps(prefix netip.Prefix, route plan.PodRoute, subnet netip.Prefix, on string) problem {
	return problem{CIDROfSegment, fmt.Sprintf("the pod CIDR %s of node %s overlaps the subnet %s of %s: their networks must not overlap",
		prefix, route.Node, subnet, on)}
}

// describe describes a route for people.
func describe(r netlink.Route) string {
	text := "proto " + r.Protocol.String()
	if r.Gw != nil {
		text += " via " + r.Gw.String()
	}
	return fmt.Sprintf("%s interface %d metric %d", text, r.LinkIndex, r.Priority)
}
