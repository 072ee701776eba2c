package netstate

import (
	"fmt"

	"github.com/vishvananda/netlink"
)

// Received returns how many frames the interface of that index in this network namespace has received.
func Received(index int) (uint64, error) {
	link, err := netlink.LinkByIndex(index)
	if err != nil {
		return 0, fmt.Errorf("read the counters of interface %d: %w", index, err)
	}
	if link.Attrs().Statistics == nil {
		return 0, fmt.Errorf("interface %s has no counters", link.Attrs().Name)
	}
	return link.Attrs().Statistics.RxPackets, nil
}
