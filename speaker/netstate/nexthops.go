package netstate

import (
	"fmt"
	"net"
	"net/netip"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// passing are the flags of addresses that do not last: privacy addresses, which a host replaces each day, and
// deprecated ones. keepalived marks addresses that move between hosts in this way.
const passing = unix.IFA_F_TEMPORARY | unix.IFA_F_DEPRECATED

// NextHops returns the usable addresses of the interface in this network namespace that has the given one.
// Addresses that last come first.
func NextHops(local netip.Addr) ([]netip.Addr, error) {
	all, err := Whole(func() ([]netlink.Addr, error) { return netlink.AddrList(nil, netlink.FAMILY_ALL) })
	if err != nil {
		return nil, fmt.Errorf("list addresses: %w", err)
	}
	link := linkOf(local, all)
	var lasting, others []netip.Addr
	for _, a := range all {
		switch addr, ok := netip.AddrFromSlice(a.IP); {
		case !ok || a.LinkIndex != link || a.Flags&unix.IFA_F_TENTATIVE != 0:
		case a.Flags&passing != 0:
			others = append(others, addr.Unmap())
		default:
			lasting = append(lasting, addr.Unmap())
		}
	}
	return append(lasting, others...), nil
}

// linkOf returns the index of the interface that has the address, 0 if there is none.
func linkOf(local netip.Addr, all []netlink.Addr) int {
	for _, a := range all {
		if addr, ok := netip.AddrFromSlice(a.IP); !ok || addr.Unmap() != local.WithZone("") {
			continue
		}
		if i, err := net.InterfaceByIndex(a.LinkIndex); local.Zone() == "" || err == nil && i.Name == local.Zone() {
			return a.LinkIndex
		}
	}
	return 0
}
