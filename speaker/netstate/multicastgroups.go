package netstate

import (
	"fmt"
	"net/netip"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// Groups returns the IPv6 multicast groups that the kernel has joined on the interface of that index in this network namespace.
func Groups(index int) (map[netip.Addr]bool, error) {
	messages, err := Whole(func() ([][]byte, error) {
		request := nl.NewNetlinkRequest(unix.RTM_GETMULTICAST, unix.NLM_F_DUMP)
		request.AddData(nl.NewIfAddrmsg(netlink.FAMILY_V6))
		return request.Execute(unix.NETLINK_ROUTE, 0)
	})
	if err != nil {
		return nil, fmt.Errorf("list the multicast groups of interface %d: %w", index, err)
	}
	groups := map[netip.Addr]bool{}
	for _, m := range messages {
		header := nl.DeserializeIfAddrmsg(m)
		if int(header.Index) != index {
			continue
		}
		attributes, err := nl.ParseRouteAttr(m[header.Len():])
		if err != nil {
			return nil, fmt.Errorf("read the multicast groups of interface %d: %w", index, err)
		}
		for _, a := range attributes {
			if group, ok := netip.AddrFromSlice(a.Value); ok && a.Attr.Type == unix.IFA_MULTICAST {
				groups[group] = true
			}
		}
	}
	return groups, nil
}
