package bgp

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"github.com/mdlayher/ndp"
	"golang.org/x/net/ipv6"
	"golang.org/x/sync/errgroup"

	"github.com/lodestone-lb/lodestone/pkg/news"
)

const (
	// Routers learn of the node by its advertisements: a few at first, then
	// often enough for one that restarts.
	firstAdvertisements = 3
	firstAdvertiseAfter = time.Second
	advertiseAfter      = 10 * time.Second
	// findTimeout is how long an attempt waits for a router.
	findTimeout = 5 * time.Second
	// reopenAfter is the pause after a failure.
	reopenAfter = 2 * time.Second
)

// routers finds the routers of unnumbered peers: by the router advertisements
// (RFC 4861) that they send on their interface. It advertises the node as well,
// as no router (with a lifetime of zero): that is how the other side finds it.
type routers struct {
	ctx    context.Context
	inside func(func() error) error

	open    map[string]*link // owned by the Announcer's Run
	links   atomic.Pointer[map[string]*link]
	running sync.WaitGroup
}

// link is an interface with an unnumbered peer.
type link struct {
	name    string
	own     netip.Addr
	cancel  context.CancelFunc
	router  atomic.Pointer[netip.Addr]
	err     atomic.Pointer[error] // why nothing can be heard
	changes news.Signal
}

func newRouters(ctx context.Context, inside func(func() error) error) *routers {
	r := &routers{ctx: ctx, inside: inside, open: map[string]*link{}}
	r.links.Store(&map[string]*link{})
	return r
}

func (r *routers) wait() { r.running.Wait() }

// set listens where a session needs it.
func (r *routers) set(sessions map[string]*session) {
	links := map[string]*link{}
	for _, s := range sessions {
		name := s.told.Peer.Interface
		if name == "" || links[name] != nil {
			continue
		}
		links[name] = r.open[name]
		if links[name] == nil {
			links[name] = r.start(name)
		}
	}
	for name, l := range r.open {
		if links[name] == nil {
			l.cancel()
		}
	}
	r.open = links
	r.links.Store(&links)
}

func (r *routers) start(name string) *link {
	ctx, cancel := context.WithCancel(r.ctx)
	l := &link{name: name, cancel: cancel}
	r.running.Go(func() {
		for ctx.Err() == nil {
			err := l.listen(ctx, r.inside)
			l.err.Store(&err)
			select {
			case <-ctx.Done():
			case <-time.After(reopenAfter):
			}
		}
	})
	return l
}

// find returns the router on an interface, and waits for it a while.
func (r *routers) find(ctx context.Context, name string) (netip.Addr, error) {
	l := (*r.links.Load())[name]
	if l == nil {
		return netip.Addr{}, fmt.Errorf("interface %s is being looked at", name)
	}
	timeout := time.After(findTimeout)
	for {
		changed := l.changes.Next()
		if router := l.router.Load(); router != nil {
			return *router, nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return netip.Addr{}, context.Cause(ctx)
		case <-timeout:
			if err := l.err.Load(); err != nil {
				return netip.Addr{}, fmt.Errorf("look for the router on %s: %w", name, *err)
			}
			return netip.Addr{}, fmt.Errorf("no router advertises itself on %s: an unnumbered peer is found by its IPv6 router advertisements", name)
		}
	}
}

// listen hears routers and advertises the node until ctx ends or something
// fails.
func (l *link) listen(ctx context.Context, inside func(func() error) error) error {
	var conn *ndp.Conn
	var iface *net.Interface
	err := inside(func() (err error) {
		if iface, err = net.InterfaceByName(l.name); err == nil {
			conn, l.own, err = ndp.Listen(iface, ndp.LinkLocal)
		}
		return err
	})
	if err != nil {
		return err
	}
	defer conn.Close()
	var filter ipv6.ICMPFilter
	filter.SetAll(true)
	filter.Accept(ipv6.ICMPTypeRouterAdvertisement)
	if err := errors.Join(conn.SetICMPFilter(&filter), conn.SetControlMessage(ipv6.FlagHopLimit, true)); err != nil {
		return err
	}
	l.err.Store(nil)
	g, ctx := errgroup.WithContext(ctx)
	context.AfterFunc(ctx, func() { conn.SetReadDeadline(time.Now()) }) //nolint:errcheck // a closed connection is as good
	send := func(m ndp.Message, to netip.Addr) error {
		return inside(func() error { return conn.WriteTo(m, nil, to) })
	}
	g.Go(func() error { return advertise(ctx, send, iface.HardwareAddr) })
	g.Go(func() error { return l.hear(conn) })
	return g.Wait()
}

// hear takes the sender of the last router advertisement for the router.
func (l *link) hear(conn *ndp.Conn) error {
	for {
		m, control, from, err := conn.ReadFrom()
		if err != nil {
			return fmt.Errorf("hear routers: %w", err)
		}
		if _, ok := m.(*ndp.RouterAdvertisement); !ok || control == nil || control.HopLimit != ndp.HopLimit || !from.IsLinkLocalUnicast() || from.WithZone("") == l.own.WithZone("") {
			continue
		}
		router := from.WithZone(l.name)
		if before := l.router.Swap(&router); before == nil || *before != router {
			l.changes.Notify()
		}
	}
}

// advertise asks for routers and advertises the node until ctx ends.
func advertise(ctx context.Context, send func(ndp.Message, netip.Addr) error, mac net.HardwareAddr) error {
	address := []ndp.Option{&ndp.LinkLayerAddress{Direction: ndp.Source, Addr: mac}}
	for i := 0; ; i++ {
		pause := advertiseAfter
		if i < firstAdvertisements {
			pause = firstAdvertiseAfter
			if err := send(&ndp.RouterSolicitation{Options: address}, netip.IPv6LinkLocalAllRouters()); err != nil {
				return fmt.Errorf("ask for routers: %w", err)
			}
		}
		if err := send(&ndp.RouterAdvertisement{Options: address}, netip.IPv6LinkLocalAllNodes()); err != nil {
			return fmt.Errorf("advertise the node: %w", err)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(pause):
		}
	}
}
