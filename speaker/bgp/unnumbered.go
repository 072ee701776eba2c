package bgp

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/mdlayher/ndp"
	"golang.org/x/net/ipv6"
	"golang.org/x/sync/errgroup"

	"github.com/lodestone-lb/lodestone/pkg/notify"
)

const (
	// The node advertises itself a few times at first, and then often enough for a router that
	// restarts.
	firstAdvertisements = 3
	firstAdvertiseAfter = time.Second
	advertiseAfter      = 10 * time.Second
	// findTimeout is how long an attempt waits for a router.
	findTimeout = 5 * time.Second
	// The router of an unnumbered peer is replaced by another one after rivalAfter if there
	// was no session with it. If there was one, it is replaced only if it is silent for
	// silentAfter after the session, during which it is asked every second. Routers answer
	// every 3 s at least (RFC 4861, section 6.2.6).
	rivalAfter  = 10 * time.Second
	silentAfter = 10 * time.Second
	// rivalWarning is the shortest time between two warnings about routers that are ignored: anybody on the link can
	// make up as many as they like.
	rivalWarning = time.Minute
	// reopenAfter is the pause after a failure.
	reopenAfter = 2 * time.Second
)

// discovery finds the routers of unnumbered peers: by the router advertisements (RFC 4861) that
// they send on their interface. It also advertises the node, with a lifetime of zero because
// the node is no router. The other side finds the node by that.
type discovery struct {
	ctx    context.Context
	inside func(func() error) error
	log    *slog.Logger
	found  func() // a link has another router

	links   atomic.Pointer[map[string]*link] // by interface; the Announcer's Run replaces the map
	running sync.WaitGroup
}

// link is an interface with an unnumbered peer.
type link struct {
	name    string
	own     netip.Addr
	cancel  context.CancelFunc
	router  choice
	err     atomic.Pointer[error] // why nothing can be heard
	changes notify.Signal
	ask     chan struct{} // the router is doubted: ask for routers now
}

// choice is the router that is taken for the peer. Anybody on the link can advertise a router.
// Therefore the first one is taken, and no other while there is a session with it.
type choice struct {
	mu     sync.Mutex
	addr   netip.Addr // invalid: none
	proven bool       // there was a session with it
	since  time.Time  // it was taken
	doubt  time.Time  // zero, or after the end of a session or attempt: when it was heard last, at first that end
	rival  netip.Addr // the last other one that was logged
	warned time.Time  // when that was
}

// hear takes an advertisement, and reports whether it changes the router. rival is set if the
// advertisement is ignored, comes from another router than the last one for which rival was set, and that was
// rivalWarning ago.
func (c *choice) hear(from netip.Addr, now time.Time) (changed, rival bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case c.addr == from:
		if !c.doubt.IsZero() {
			c.doubt = now
		}
		return false, false
	case !c.addr.IsValid():
	case c.proven && (c.doubt.IsZero() || now.Sub(c.doubt) < silentAfter),
		!c.proven && c.doubt.IsZero() && now.Sub(c.since) < rivalAfter:
		if rival = c.rival != from && now.Sub(c.warned) >= rivalWarning; rival {
			c.rival, c.warned = from, now
		}
		return false, rival
	}
	c.addr, c.proven, c.since, c.doubt, c.rival = from, false, now, time.Time{}, netip.Addr{}
	return true, false
}

// end notes that a session with the router, or an attempt, has ended.
func (c *choice) end(router netip.Addr, now time.Time) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.addr == router && c.doubt.IsZero() {
		c.doubt = now
	}
}

// confirm notes that there is a session with the router.
func (c *choice) confirm(router netip.Addr) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.addr == router {
		c.proven, c.doubt = true, time.Time{}
	}
}

func (c *choice) get() netip.Addr {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.addr
}

func (c *choice) doubted() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return !c.doubt.IsZero()
}

func newDiscovery(ctx context.Context, inside func(func() error) error, log *slog.Logger, found func()) *discovery {
	d := &discovery{ctx: ctx, inside: inside, log: log, found: found}
	d.links.Store(&map[string]*link{})
	return d
}

// set listens where a session needs it.
func (d *discovery) set(sessions map[string]*session) {
	before, links := *d.links.Load(), map[string]*link{}
	for _, s := range sessions {
		name := s.newest.Peer.Interface
		if name == "" || links[name] != nil {
			continue
		}
		links[name] = before[name]
		if links[name] == nil {
			links[name] = d.start(name)
		}
	}
	for name, l := range before {
		if links[name] == nil {
			l.cancel()
		}
	}
	d.links.Store(&links)
}

func (d *discovery) start(name string) *link {
	ctx, cancel := context.WithCancel(d.ctx)
	l := &link{name: name, cancel: cancel, ask: make(chan struct{}, 1)}
	d.running.Go(func() {
		for ctx.Err() == nil {
			err := l.listen(ctx, d)
			l.err.Store(&err)
			select {
			case <-ctx.Done():
			case <-time.After(reopenAfter):
			}
		}
	})
	return l
}

// link returns the link of an interface. Nil: no session needs it.
func (d *discovery) link(name string) *link { return (*d.links.Load())[name] }

// known returns the router on an interface, also while no session with it may be tried;
// invalid: none was found.
func (d *discovery) known(name string) netip.Addr {
	if l := d.link(name); l != nil {
		return l.router.get()
	}
	return netip.Addr{}
}

// confirm notes that a session with the router on an interface is established.
func (d *discovery) confirm(name string, router netip.Addr) {
	if l := d.link(name); l != nil {
		l.router.confirm(router)
	}
}

// doubt notes that a session with the router on an interface, or an attempt to
// have one, has ended.
func (d *discovery) doubt(name string, router netip.Addr) {
	if l := d.link(name); l != nil {
		l.router.end(router, time.Now())
		notify.Wake(l.ask)
	}
}

// find returns the router on an interface. It waits for one for up to findTimeout.
func (d *discovery) find(ctx context.Context, name string) (netip.Addr, error) {
	l := d.link(name)
	if l == nil {
		return netip.Addr{}, fmt.Errorf("interface %s is being looked at", name)
	}
	timeout := time.After(findTimeout)
	for {
		changed := l.changes.Next()
		if router := l.router.get(); router.IsValid() {
			return router, nil
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

// listen receives the advertisements of routers and advertises the node until ctx ends or
// something fails.
func (l *link) listen(ctx context.Context, d *discovery) error {
	var conn *ndp.Conn
	var iface *net.Interface
	err := d.inside(func() (err error) {
		if iface, err = net.InterfaceByName(l.name); err == nil {
			numbered := *iface
			numbered.Name = strconv.Itoa(iface.Index) // as in scoped
			conn, l.own, err = ndp.Listen(&numbered, ndp.LinkLocal)
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
		return d.inside(func() error {
			now, err := net.InterfaceByName(l.name)
			if err == nil && !bytes.Equal(now.HardwareAddr, iface.HardwareAddr) {
				err = fmt.Errorf("the hardware address is %s now, and was %s", now.HardwareAddr, iface.HardwareAddr)
			}
			if err != nil {
				return err
			}
			return conn.WriteTo(m, nil, to)
		})
	}
	g.Go(func() error { return l.advertise(ctx, send, iface.HardwareAddr) })
	g.Go(func() error { return l.hear(conn, d) })
	return g.Wait()
}

// hear receives the advertisements of the routers on the link.
func (l *link) hear(conn *ndp.Conn, d *discovery) error {
	var message [headerOfAdvertisement]byte
	for {
		n, control, from, err := conn.ReadRaw(message[:])
		if err != nil {
			return fmt.Errorf("hear routers: %w", err)
		}
		if !advertises(message[:n], control, from) || from.WithZone("") == l.own.WithZone("") {
			continue
		}
		router := from.WithZone(l.name)
		changed, rival := l.router.hear(router, time.Now())
		if changed {
			l.changes.Notify()
			d.found()
		}
		if rival {
			d.log.Warn("another router advertises itself on the interface of an unnumbered BGP peer, and is ignored while the first one lives",
				"interface", l.name, "router", l.router.get(), "ignored", router)
		}
	}
}

// headerOfAdvertisement is the size of a router advertisement without options (RFC 4861 section 4.2).
const headerOfAdvertisement = 16

// advertises reports whether the message is the advertisement of a router on the link (RFC 4861 section 6.1.2). The kernel has
// verified its checksum. Its options do not matter, which a router may have more of than a library knows.
func advertises(message []byte, control *ipv6.ControlMessage, from netip.Addr) bool {
	return len(message) >= headerOfAdvertisement && message[0] == byte(ipv6.ICMPTypeRouterAdvertisement) && message[1] == 0 &&
		control != nil && control.HopLimit == ndp.HopLimit && from.IsLinkLocalUnicast()
}

// advertise advertises the node until ctx ends. It also asks for routers while none is
// confirmed.
func (l *link) advertise(ctx context.Context, send func(ndp.Message, netip.Addr) error, mac net.HardwareAddr) error {
	address := []ndp.Option{&ndp.LinkLayerAddress{Direction: ndp.Source, Addr: mac}}
	for i := 0; ; i++ {
		pause := advertiseAfter
		if i < firstAdvertisements || l.router.doubted() {
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
		case <-l.ask:
			select { // not faster than once a second, however fast sessions end
			case <-ctx.Done():
				return nil
			case <-time.After(firstAdvertiseAfter):
			}
		}
	}
}
