package podroutes

import (
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"go4.org/netipx"
	"golang.org/x/sys/unix"

	"github.com/lodestone-lb/lodestone/speaker/netstate"
	"github.com/lodestone-lb/lodestone/speaker/plan"
)

const (
	// receiveBuffer holds the notifications of a burst until we read them. An overrun only costs one look
	// at the whole table.
	receiveBuffer = 1 << 20
	// timeout bounds the wait for an answer of the kernel.
	timeout = 10 * time.Second
)

// kernel is the main routing table of a network namespace.
type kernel struct{ namespace netns.NsHandle }

func (k kernel) open() (*netlink.Handle, error) {
	h, err := netlink.NewHandleAt(k.namespace, unix.NETLINK_ROUTE)
	if err != nil {
		return nil, fmt.Errorf("open netlink: %w", err)
	}
	if err := h.SetSocketTimeout(timeout); err != nil {
		h.Close()
		return nil, fmt.Errorf("set the timeout of netlink: %w", err)
	}
	return h, nil
}

// list returns our routes, and those of others to wanted destinations.
func (k kernel) list(want map[netip.Prefix]plan.PodRoute) ([]entry, error) {
	h, err := k.open()
	if err != nil {
		return nil, err
	}
	defer h.Close()
	var table []entry
	for _, family := range []int{netlink.FAMILY_V4, netlink.FAMILY_V6} {
		routes, err := netstate.Whole(func() (routes []entry, err error) {
			err = h.RouteListFilteredIter(family, &netlink.Route{Table: unix.RT_TABLE_MAIN}, netlink.RT_FILTER_TABLE, func(r netlink.Route) bool {
				e := entryOf(r)
				if _, wanted := want[e.prefix]; e.ours || wanted {
					routes = append(routes, e)
				}
				return true
			})
			return routes, err
		})
		if err != nil {
			return nil, fmt.Errorf("list routes: %w", err)
		}
		table = append(table, routes...)
	}
	return table, nil
}

// apply executes the steps and returns the routes that are in force then, and those that were removed. If the kernel
// refuses a route, the others are still set.
func (k kernel) apply(s steps) (inForce map[netip.Prefix]target, removed []netlink.Route, err error) {
	inForce = maps.Clone(s.kept)
	if len(s.puts)+len(s.removes) == 0 {
		return inForce, nil, nil
	}
	h, err := k.open()
	if err != nil {
		return inForce, nil, err
	}
	defer h.Close()
	var refused []error
	for _, prefix := range ordered(s.puts) {
		to := s.puts[prefix]
		put := h.RouteAdd
		if s.replaces[prefix] {
			put = h.RouteReplace
		}
		err := put(&netlink.Route{Dst: netipx.PrefixIPNet(prefix), Gw: to.via.AsSlice(), LinkIndex: to.link, Priority: metric,
			Protocol: Protocol})
		if err != nil {
			refused = append(refused, fmt.Errorf("set the route to %s via %s on %s: %w", prefix, to.via, to.name, err))
			continue
		}
		inForce[prefix] = to
	}
	for _, r := range s.removes {
		if err := h.RouteDel(&r); err != nil && !errors.Is(err, unix.ESRCH) { // somebody was faster
			refused = append(refused, fmt.Errorf("remove the route to %s: %w", r.Dst, err))
			continue
		}
		removed = append(removed, r)
	}
	if len(refused) > 1 {
		return inForce, removed, fmt.Errorf("%w (and %d more routes)", refused[0], len(refused)-1)
	}
	return inForce, removed, errors.Join(refused...)
}
