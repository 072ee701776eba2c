package direct

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"slices"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/lodestone-lb/lodestone/speaker/netstate"
)

// host is another node.
type host struct {
	neighbour
	since time.Time // if it is silent: when it stopped to answer
	asked time.Time // if the kernel is waiting for its answer: since when
	gone  bool      // connections no longer wait for it
	// anew is set if the node may have restarted and have no rules: it was gone or unheard while others were heard, and
	// its speaker has not been heard since. Then it counts as gone, although it answers.
	anew bool
	// unheard is set if the node has not answered since this Director began, while others have: it is unknown for how
	// long it has been away.
	unheard bool
}

// look finds out which nodes are on the segment, and lets the kernel ask those that are silent,
// lost or unknown.
func (d *Director) look() error {
	links, err := readLinks(d.Gateways())
	if err != nil {
		return err
	}
	d.lookAtConntrack()
	for _, n := range d.see(links, time.Now()) {
		if err := ask(n); err != nil {
			d.Log.Debug("neighbour not asked", "address", n.addr, "err", err)
		}
	}
	refused, err := refuse(d.nodes)
	if err == nil && fmt.Sprint(refused) != fmt.Sprint(d.refused) {
		d.refused, d.stale = refused, true
	}
	return err
}

// see takes over the kernel's neighbour table, and returns which neighbours the kernel is to ask.
func (m *Machine) see(links *links, now time.Time) (asks []neighbour) {
	before, silent := m.nodes, false
	m.nodes = map[netip.Addr]*host{}
	for node, addrs := range m.want.Nodes {
		if node == m.node {
			continue
		}
		for _, a := range addrs {
			was, lost := cmp.Or(before[a], &host{}), m.want.Lost[node]
			n, e, ok := links.locate(a, was.neighbour)
			if !ok {
				continue
			}
			h := was.next(n, e, lost, now)
			m.nodes[a] = h
			silent = silent || h.silent && !was.gone
			if (h.silent || lost) && !e.asked && !e.fixed {
				asks = append(asks, n)
			}
		}
	}
	if silent {
		asks = slices.AppendSeq(asks, maps.Values(links.gateways))
	}
	m.bury(now, links.gateways)
	for a, h := range m.nodes {
		if was := before[a]; was == nil || was.neighbour != h.neighbour || was.gone != h.gone {
			m.stale = true
		}
	}
	m.stale = m.stale || len(m.nodes) != len(before)
	return asks
}

// next returns the node's next state, by its entry in the kernel's neighbour table. lost is set if its speaker is lost.
func (h *host) next(n neighbour, e entry, lost bool, now time.Time) *host {
	after := &host{neighbour: n, since: h.since, gone: h.gone, unheard: h.unheard && n.silent,
		anew: (h.anew || h.unheard && !n.silent) && lost}
	if e.asked {
		after.asked = cmp.Or(h.asked, now)
		after.silent = after.silent || now.Sub(after.asked) >= answerTime
	}
	if after.silent && !h.silent {
		after.since = now
	}
	return after
}

// segmentKey is a segment in one family.
type segmentKey struct {
	device int
	four   bool
}

// bury finds the nodes that have been silent for too long. If this node hears no other node and no
// gateway on a segment, it may be cut off itself. So once it hears again, all nodes have the whole
// time again, except those that it never heard, which may not exist.
func (m *Machine) bury(now time.Time, gateways map[segmentKey]neighbour) {
	heard, others := map[segmentKey]time.Time{}, map[segmentKey]bool{}
	hear := func(on segmentKey) { heard[on] = cmp.Or(m.heard[on], now) }
	for on := range gateways {
		hear(on)
	}
	for a, h := range m.nodes {
		if on := (segmentKey{h.device, a.Is4()}); !h.silent {
			hear(on)
			others[on] = others[on] || !h.gone
		}
	}
	m.heard = heard
	for a, h := range m.nodes {
		on := segmentKey{h.device, a.Is4()}
		since, any := heard[on]
		goes := h.silent && now.Sub(h.since) >= m.hold && (h.hardware == "" || any && now.Sub(since) >= m.hold)
		if goes && !h.gone {
			h.anew = others[on]
		}
		h.unheard = h.unheard || h.hardware == "" && h.silent && others[on] && now.Sub(h.since) >= settleTime
		h.gone = goes || h.anew
	}
}

// neighbour is a node on a segment that this node is on, too.
type neighbour struct {
	addr     netip.Addr
	device   int    // the interface to it
	hardware string // its hardware address, empty if it has not answered yet
	silent   bool   // it does not answer
}

// links are what the kernel knows of the segments.
type links struct {
	subnets map[netip.Prefix]int // the interface of each
	known   map[neighbourKey]entry
	routers map[string]bool // hardware addresses
	// gateways are the routers that answer, one of each segment.
	gateways map[segmentKey]neighbour
}

// entry is a neighbour in the kernel's table.
type entry struct {
	hardware string // empty if it does not answer
	asked    bool   // the kernel is waiting for its answer
	fixed    bool   // an administrator has set it: the kernel never asks
}

type neighbourKey struct {
	addr   netip.Addr
	device int
}

func newLinks() *links {
	return &links{map[netip.Prefix]int{}, map[neighbourKey]entry{}, map[string]bool{}, map[segmentKey]neighbour{}}
}

// readLinks reads the links from the kernel.
func readLinks(gateways []netip.Addr) (*links, error) {
	l := newLinks()
	addrs, err := netstate.Whole(func() ([]netlink.Addr, error) { return netlink.AddrList(nil, netlink.FAMILY_ALL) })
	if err != nil {
		return nil, fmt.Errorf("list the node's addresses: %w", err)
	}
	for _, a := range addrs {
		if ip, ok := netip.AddrFromSlice(a.IP); ok && a.IPNet != nil {
			ones, _ := a.Mask.Size()
			if ip = ip.Unmap(); ones < ip.BitLen() && !ip.IsLoopback() && !ip.IsLinkLocalUnicast() {
				subnet := netip.PrefixFrom(ip, ones).Masked()
				if other, twice := l.subnets[subnet]; twice && other != a.LinkIndex {
					a.LinkIndex = chosen(subnet, other)
				}
				l.subnets[subnet] = a.LinkIndex
			}
		}
	}
	known, err := netstate.Whole(func() ([]netlink.Neigh, error) { return netlink.NeighList(0, netlink.FAMILY_ALL) })
	if err != nil {
		return nil, fmt.Errorf("list the node's neighbours: %w", err)
	}
	l.add(known, gateways)
	return l, nil
}

// chosen returns the interface through which the kernel sends into a subnet that several have.
func chosen(subnet netip.Prefix, otherwise int) int {
	for to, tries := subnet.Addr().Next(), 4; subnet.Contains(to) && tries > 0; to, tries = to.Next(), tries-1 {
		routes, err := netlink.RouteGet(to.AsSlice())
		if err == nil && len(routes) > 0 && routes[0].Type == unix.RTN_UNICAST { // it may be the node itself
			return routes[0].LinkIndex
		}
	}
	return otherwise
}

// add adds entries of the kernel's neighbour table.
func (l *links) add(neighbours []netlink.Neigh, gateways []netip.Addr) {
	for _, n := range neighbours {
		ip, ok := netip.AddrFromSlice(n.IP)
		switch key := (neighbourKey{ip.Unmap(), n.LinkIndex}); {
		case !ok:
		case n.State&netlink.NUD_INCOMPLETE != 0:
			l.known[key] = entry{asked: true}
		case n.State&netlink.NUD_FAILED != 0:
			l.known[key] = entry{}
		case len(n.HardwareAddr) == 6:
			e := entry{hardware: string(n.HardwareAddr), fixed: n.State&(netlink.NUD_PERMANENT|netlink.NUD_NOARP) != 0}
			l.known[key] = e
			if slices.Contains(gateways, key.addr) {
				l.routers[e.hardware] = true
				if !e.fixed {
					l.gateways[segmentKey{key.device, key.addr.Is4()}] = neighbour{addr: key.addr, device: key.device, hardware: e.hardware}
				}
			}
		}
	}
}

// locate returns the node with that address, by the kernel's entry and otherwise as it was before,
// and that entry. ok is not set if the node neither is nor was on a segment of this node, or if it has a router's
// hardware address: packets that the router forwards would count as the node's.
func (l *links) locate(addr netip.Addr, before neighbour) (n neighbour, e entry, ok bool) {
	device, longest := 0, -1
	for subnet, index := range l.subnets {
		if subnet.Contains(addr) && subnet.Bits() > longest {
			device, longest = index, subnet.Bits()
		}
	}
	if longest < 0 { // the interface is down, perhaps
		before.silent = true
		return before, l.known[neighbourKey{addr, before.device}], before.hardware != "" && !l.routers[before.hardware]
	}
	n = neighbour{addr, device, before.hardware, before.silent || before.hardware == ""}
	e, known := l.known[neighbourKey{addr, device}]
	if known && !e.asked {
		if n.silent = e.hardware == ""; !n.silent {
			n.hardware = e.hardware
		}
	}
	return n, e, !l.routers[n.hardware]
}

// ask lets the kernel ask whether the neighbour is there.
func ask(n neighbour) error {
	request := &netlink.Neigh{LinkIndex: n.device, IP: n.addr.AsSlice(), Flags: netlink.NTF_USE}
	if n.hardware != "" && !n.silent {
		request.State, request.Flags, request.HardwareAddr = netlink.NUD_PROBE, 0, net.HardwareAddr(n.hardware)
	}
	request.Family = unix.AF_INET
	if n.addr.Is6() {
		request.Family = unix.AF_INET6
	}
	if err := netlink.NeighSet(request); err != nil {
		return fmt.Errorf("ask for neighbour %s: %w", n.addr, err)
	}
	return nil
}

var (
	errIPVS = errors.New("kube-proxy is in mode IPVS: it has the interface kube-ipvs0; if it is in another mode by now, delete that interface")
	errBond = errors.New("it is a bond in mode")
)

// refuse returns why the node cannot have rules. With kube-proxy in mode IPVS, conntrack does
// not show which connections the node keeps. If a bond sends with other hardware addresses than
// the one it answers with, other nodes do not recognize the packets that this node hands over.
// The other error is the kernel's: it is not known whether the node can have rules.
func refuse(nodes map[netip.Addr]*host) (why, err error) {
	if ipvs, err := found(netlink.LinkByName("kube-ipvs0")); ipvs != nil || err != nil {
		return errIPVS, err
	}
	devices := map[int]bool{}
	for _, h := range nodes {
		devices[h.device] = true
	}
	for _, device := range slices.Sorted(maps.Keys(devices)) {
		bond, err := bondUnder(device, netlink.LinkByIndex, ports)
		if err != nil {
			return nil, err
		}
		if bond != nil {
			return fmt.Errorf("use interface %q: %w %s", bond.Name, errBond, bond.Mode), nil
		}
	}
	return nil, nil //nolint:nilnil // it can
}

// found returns the link, nil if there is none.
func found(link netlink.Link, err error) (netlink.Link, error) {
	if gone := (netlink.LinkNotFoundError{}); errors.As(err, &gone) {
		return nil, nil //nolint:nilnil // there is none
	}
	if err != nil {
		return nil, fmt.Errorf("look at an interface: %w", err)
	}
	return link, nil
}

// balances are the modes of bonds that send with the hardware address of whichever port.
var balances = map[netlink.BondMode]bool{netlink.BOND_MODE_BALANCE_TLB: true, netlink.BOND_MODE_BALANCE_ALB: true}

// bondUnder returns the bond in such a mode that the interface is, or that is below it: below VLANs and bridges. Nil: there is none.
func bondUnder(device int, find func(int) (netlink.Link, error), ports func(int) ([]netlink.Link, error)) (*netlink.Bond, error) {
	link, err := found(find(device))
	under := []netlink.Link{link}
	for depth := 0; err == nil && len(under) > 0 && depth < 4; depth++ { // a VLAN may be in a VLAN, and a bridge between them
		var next []netlink.Link
		for _, link := range under {
			var below []netlink.Link
			var unknown error
			switch link := link.(type) {
			case *netlink.Bond:
				if balances[link.Mode] {
					return link, nil
				}
			case *netlink.Vlan:
				below = make([]netlink.Link, 1)
				below[0], unknown = found(find(link.ParentIndex))
			case *netlink.Bridge:
				below, unknown = ports(link.Index)
			}
			next, err = append(next, below...), errors.Join(err, unknown)
		}
		under = next
	}
	return nil, err
}

// ports returns the ports of a bridge. The kernel selects them, because a node has many other interfaces.
func ports(bridge int) (all []netlink.Link, err error) {
	messages, err := netstate.Whole(func() ([][]byte, error) {
		request := nl.NewNetlinkRequest(unix.RTM_GETLINK, unix.NLM_F_DUMP)
		request.AddData(nl.NewIfInfomsg(unix.AF_UNSPEC))
		request.AddData(nl.NewRtAttr(unix.IFLA_MASTER, nl.Uint32Attr(uint32(bridge))))
		return request.Execute(unix.NETLINK_ROUTE, unix.RTM_NEWLINK)
	})
	if err != nil {
		return nil, fmt.Errorf("list the ports of bridge %d: %w", bridge, err)
	}
	for _, m := range messages {
		port, err := netlink.LinkDeserialize(nil, m)
		if err != nil {
			return nil, fmt.Errorf("decode a port of bridge %d: %w", bridge, err)
		}
		all = append(all, port)
	}
	return all, nil
}
