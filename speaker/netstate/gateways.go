package netstate

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"go4.org/netipx"
	"golang.org/x/sys/unix"

	"github.com/lodestone-lb/lodestone/pkg/notify"
)

const (
	// After a change the routes are listed pauseGateways later, or as Pause has it: a link that goes down loses
	// its IPv4 routes somewhat later and without a notification.
	pauseGateways = 200 * time.Millisecond
	// retryGateways is the wait after the kernel refused to list or to notify.
	retryGateways = time.Minute
)

// GatewayWatcher is a task that knows the node's default gateways of both families, from whatever source:
// set by hand, by DHCP or by router advertisements. It is a task of its own, because a node may have very many
// routes, and their notifications must not delay those of interfaces.
//
// It looks only at the main routing table. Other tables are for the traffic of a VRF, a tunnel or a source
// address, and a default route there may not lead to a router on the node's segment.
type GatewayWatcher struct {
	interfaces *Watcher
	namespace  netns.NsHandle
	log        *slog.Logger
	buffer     int
	ready      chan struct{}
	listed     sync.Once                    // closes ready
	view       atomic.Pointer[[]netip.Addr] // nil: not known yet
	changed    notify.Signal
	pause      time.Duration // before the next list; owned by Run
}

// NewGatewayWatcher returns a GatewayWatcher for the namespace of the
// interfaces, that knows nothing until it runs.
func NewGatewayWatcher(interfaces *Watcher) *GatewayWatcher {
	return &GatewayWatcher{interfaces: interfaces, namespace: interfaces.namespace, log: interfaces.log, buffer: receiveBuffer,
		ready: make(chan struct{}), pause: pauseGateways}
}

// String names the task.
func (g *GatewayWatcher) String() string { return "gateways" }

// Ready is closed once the kernel has listed its routes, or refused to.
func (g *GatewayWatcher) Ready() <-chan struct{} { return g.ready }

// Gateways returns the next hops of the default routes, link-local ones included, sorted, each once and without
// a zone. They are not known before the kernel has listed its routes. The slice is shared: do not modify it.
func (g *GatewayWatcher) Gateways() (addrs []netip.Addr, known bool) {
	if v := g.view.Load(); v != nil {
		return *v, true
	}
	return nil, false
}

// Changed returns a channel that is closed when Gateways returns something else. Take the channel first, then
// ask, and no change is missed.
func (g *GatewayWatcher) Changed() <-chan struct{} { return g.changed.Next() }

// Run keeps the view up to date until ctx ends. After a failure it tries again: what a speaker announces does
// not depend on gateways.
func (g *GatewayWatcher) Run(ctx context.Context) error {
	for {
		lost, err := g.follow(ctx)
		if ctx.Err() != nil {
			return nil
		}
		wait := g.pause
		if err != nil {
			wait = retryGateways
			g.log.Warn("default gateways not known or out of date: the pools may hand out a gateway's address", "err", err, "retry", wait)
		} else {
			g.log.Debug("resyncing gateways", "cause", lost)
		}
		g.listed.Do(func() { close(g.ready) })
		select {
		case <-ctx.Done():
		case <-time.After(wait):
		}
	}
}

// follow subscribes and lists, and lists again when a default route or an
// interface has changed, until notifications are lost.
func (g *GatewayWatcher) follow(ctx context.Context) (lost, err error) {
	s, err := SubscribeRoutes(g.namespace, g.buffer)
	if err != nil {
		return nil, err
	}
	defer s.Close()
	interfaces := g.interfaces.Changed()
	due := time.After(0)
	for {
		changed := false
		select {
		case <-ctx.Done():
			return nil, nil
		case u, ok := <-s.Updates:
			if !ok {
				return <-s.Lost, nil
			}
			changed = isDefault(u.Route)
		case <-interfaces:
			interfaces, changed = g.interfaces.Changed(), true
		case <-due:
			start := time.Now()
			err := g.list()
			if err != nil && !errors.Is(err, netlink.ErrDumpInterrupted) {
				return nil, err
			}
			g.pause, due, changed = Pause(pauseGateways, time.Since(start)), nil, err != nil
		}
		if changed && due == nil {
			due = time.After(g.pause)
		}
	}
}

// list makes the kernel's default routes the current view.
func (g *GatewayWatcher) list() error {
	h, err := netlink.NewHandleAt(g.namespace, unix.NETLINK_ROUTE)
	if err != nil {
		return fmt.Errorf("open netlink: %w", err)
	}
	defer h.Close()
	addrs := []netip.Addr{}
	for _, family := range []int{netlink.FAMILY_V4, netlink.FAMILY_V6} {
		err := h.RouteListFilteredIter(family, &netlink.Route{Table: unix.RT_TABLE_MAIN}, netlink.RT_FILTER_TABLE, func(r netlink.Route) bool {
			if isDefault(r) {
				addrs = append(addrs, nextHops(r)...)
			}
			return true
		})
		if err != nil {
			return fmt.Errorf("list routes: %w", err)
		}
	}
	slices.SortFunc(addrs, netip.Addr.Compare)
	g.publish(slices.Compact(addrs))
	return nil
}

// publish makes the addresses the current view, if they differ from it.
func (g *GatewayWatcher) publish(addrs []netip.Addr) {
	if old := g.view.Load(); old == nil || !slices.Equal(*old, addrs) {
		g.view.Store(&addrs)
		g.changed.Notify()
	}
	g.listed.Do(func() { close(g.ready) })
}

// isDefault reports whether the route is a default route of the main table.
func isDefault(r netlink.Route) bool {
	if r.Table != unix.RT_TABLE_MAIN || r.Dst == nil {
		return false
	}
	bits, _ := r.Dst.Mask.Size()
	return bits == 0
}

// nextHops returns the routers of the route.
func nextHops(r netlink.Route) []netip.Addr {
	hops := []*netlink.NexthopInfo{{Gw: r.Gw, Via: r.Via}}
	var addrs []netip.Addr
	for _, hop := range append(hops, r.MultiPath...) {
		ip := hop.Gw
		if via, ok := hop.Via.(*netlink.Via); ok { // a router of the other family (RFC 5549)
			ip = via.Addr
		}
		if a, ok := netipx.FromStdIP(ip); ok {
			addrs = append(addrs, a)
		}
	}
	return addrs
}

// RouteSubscription is a stream of notifications of routes that come and go.
type RouteSubscription struct {
	// Updates is closed when the socket ends. Then Lost has the cause.
	Updates chan netlink.RouteUpdate
	Lost    chan error
	done    chan struct{}
}

// SubscribeRoutes opens the subscription in a network namespace, netns.None for this one. buffer is how many
// bytes of a burst are held until they are read. The stream ends when there are more.
func SubscribeRoutes(namespace netns.NsHandle, buffer int) (*RouteSubscription, error) {
	s := &RouteSubscription{Updates: make(chan netlink.RouteUpdate), Lost: make(chan error, 1), done: make(chan struct{})}
	err := netlink.RouteSubscribeWithOptions(s.Updates, s.done, netlink.RouteSubscribeOptions{
		Namespace: &namespace, ReceiveBufferSize: buffer, ErrorCallback: func(err error) {
			select {
			case s.Lost <- err:
			default: // the first shows enough
			}
		}})
	if err != nil {
		return nil, fmt.Errorf("subscribe to routes: %w", err)
	}
	return s, nil
}

// Close closes the socket and waits for its reader.
func (s *RouteSubscription) Close() {
	close(s.done)
	drain(s.Updates)
}
