package bgp

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"reflect"
	"slices"
	"sync/atomic"
	"time"

	packet "github.com/osrg/gobgp/v3/pkg/packet/bgp"
	"go4.org/netipx"

	"github.com/lodestone-lb/lodestone/pkg/config"
	"github.com/lodestone-lb/lodestone/pkg/notify"
	"github.com/lodestone-lb/lodestone/speaker/plan"
)

const (
	// reconnect is the pause after a session of at least steady. After shorter sessions it
	// doubles, up to the longest one: RFC 4271 section 8.1 (DampPeerOscillations,
	// IdleHoldTime) leaves the figures open. A router that flaps is thus tried less and less
	// often. Failed attempts do not lengthen the pause, so that a router that reboots is found
	// as soon as it answers.
	reconnect, steady = time.Second, 10 * time.Second
	longestPause      = time.Minute
	maxDoublings      = 6
	// forgiven is how long after the last short session the pause is back at its first value,
	// because the router may have been repaired or rebooted.
	forgiven = 5 * time.Minute
)

// Machine decides which sessions there are to be, and what each router is to be sent. It has no clock and no sockets: an
// Announcer has them, or the simulated fleet of test/world. One goroutine owns it, and each Peering has an owner of its own.
type Machine struct {
	passwords  func(config.SecretKey) (string, error)
	restarting bool
	ctx        context.Context // of the peerings
	cancel     context.CancelCauseFunc
	peerings   map[string]*Peering
	routes     map[netip.Prefix]plan.Route
	permit     *netipx.IPSet     // see plan.BGP
	down       map[string]string // peers whose sessions have to be down, and why
	draining   bool
}

// NewMachine returns a Machine that wants nothing yet. See Options.
func NewMachine(passwords func(config.SecretKey) (string, error), restarting bool) *Machine {
	m := &Machine{passwords: passwords, restarting: restarting, peerings: map[string]*Peering{}, routes: map[netip.Prefix]plan.Route{},
		down: map[string]string{}}
	m.ctx, m.cancel = context.WithCancelCause(context.Background())
	return m
}

// Set replaces all sessions and routes.
func (m *Machine) Set(want plan.BGP) {
	m.setPermit(want.Permit)
	m.setRoutes(want.Routes)
	m.setPeerings(want)
}

// Update is Set for a caller that knows which routes have changed.
func (m *Machine) Update(want plan.BGP, changed []netip.Prefix) {
	m.setPermit(want.Permit)
	for _, prefix := range changed {
		m.setRoute(prefix, want.Routes[prefix])
	}
	m.flush()
	m.setPeerings(want)
}

// SetDown does what Announcer.SetDown promises.
func (m *Machine) SetDown(peer string, down bool, why string) {
	if down {
		m.down[peer] = why
	} else {
		delete(m.down, peer)
	}
	if p := m.peerings[peer]; p != nil {
		t := *p.newest
		t.down = m.down[peer]
		p.setTarget(t)
	}
}

// Drain does what Announcer.Drain promises.
func (m *Machine) Drain(on bool) {
	m.draining = on
	for _, p := range m.peerings {
		p.rib.drain(on)
	}
}

// Stop ends all peerings.
func (m *Machine) Stop(restarting bool) { m.cancel(ending(causeStopped, restarting)) }

// Peerings returns the wanted peerings, by peer name. The map is the caller's.
func (m *Machine) Peerings() map[string]*Peering { return maps.Clone(m.peerings) }

func (m *Machine) setPeerings(want plan.BGP) {
	for name, p := range m.peerings {
		if _, ok := want.Sessions[name]; !ok {
			p.cancel(ending(causeRemoved, false))
			delete(m.peerings, name)
		}
	}
	for name, w := range want.Sessions {
		t, known := m.target(name, w)
		if p := m.peerings[name]; p != nil {
			if known {
				p.setTarget(t)
			}
			continue
		}
		p := newPeering(m, name, t)
		m.peerings[name] = p
		p.rib.drain(m.draining)
		p.rib.limit(m.permit)
		for prefix, route := range m.routes {
			p.rib.set(prefix, route)
		}
	}
}

// target returns the session as it has to be, with its password, and whether the password has
// been read.
func (m *Machine) target(name string, w plan.Session) (t target, known bool) {
	t, known = target{Session: w, down: m.down[name]}, true
	peer := w.Peer
	switch {
	case peer.Passive && !peer.Address.IsValid():
		t.unfit = "a passive peer needs an address"
	case !w.RouterID.Is4():
		t.unfit = "the node has no router ID: it has no IPv4 address, and none is configured"
	case w.Source.IsValid() && w.Source.Is4() != (peer.Address.IsValid() && peer.Address.Is4()):
		t.unfit = fmt.Sprintf("the source address %s and the router's are not of the same family", w.Source)
	case peer.Password != nil:
		known = t.readPassword(m.passwords(*peer.Password))
	}
	return t, known
}

// readPassword takes over the password, or the error why there is none. It returns
// false if the password has not been read yet.
func (t *target) readPassword(password string, err error) (known bool) {
	key := t.Peer.Password
	switch {
	case err != nil:
		t.unfit = fmt.Sprintf("no password: %v", err)
	case password == "":
		t.unfit = fmt.Sprintf("the password in key %q of Secret %q is empty", key.Key, key.Name)
	case len(password) > maxPassword:
		t.unfit = fmt.Sprintf("the password in key %q of Secret %q has %d bytes, TCP-MD5 takes at most %d", key.Key, key.Name,
			len(password), maxPassword)
	default:
		t.password = password
	}
	return !errors.Is(err, config.ErrNotRead)
}

// setRoutes marks the routes that changed. It does not look into routes whose map is the same
// one.
func (m *Machine) setRoutes(want map[netip.Prefix]plan.Route) {
	for prefix := range m.routes {
		if _, ok := want[prefix]; !ok {
			m.setRoute(prefix, nil)
		}
	}
	for prefix, route := range want {
		if before, ok := m.routes[prefix]; ok && reflect.ValueOf(before).Pointer() == reflect.ValueOf(route).Pointer() {
			continue
		}
		m.setRoute(prefix, route)
	}
	m.flush()
}

// setPermit makes all sessions withhold prefixes that are not in the set; nil: none.
func (m *Machine) setPermit(permit *netipx.IPSet) {
	if permit == m.permit || permit != nil && m.permit != nil && permit.Equal(m.permit) {
		return
	}
	m.permit = permit
	for _, p := range m.peerings {
		p.rib.limit(permit)
	}
}

// setRoute replaces a route; nil is none.
func (m *Machine) setRoute(prefix netip.Prefix, route plan.Route) {
	if route == nil {
		delete(m.routes, prefix)
	} else {
		m.routes[prefix] = route
	}
	for _, p := range m.peerings {
		p.rib.set(prefix, route)
	}
}

// flush wakes all sessions to send what has changed.
func (m *Machine) flush() {
	for _, p := range m.peerings {
		p.rib.flush()
	}
}

// target is the wanted state of a session.
type target struct {
	plan.Session
	password string
	// down is why there must be no session with the peer, unfit why there can be none, and
	// unheard why the peer cannot connect. Each is empty if there is no such reason.
	down, unfit, unheard string
}

// wire has the properties that cannot change in a session that is up.
type wire struct {
	address, source, routerID netip.Addr
	iface                     string
	port                      uint16
	localASN                  uint32
	peerASN                   config.ASN
	passive                   bool
	multihop, security        int
	holdTime, restart         time.Duration
}

func (t *target) wire() wire {
	p := t.Peer
	return wire{p.Address, t.Source, t.RouterID, p.Interface, p.Port, t.LocalASN, p.PeerASN, p.Passive, p.Multihop, p.TTLSecurity, p.HoldTime,
		p.GracefulRestart}
}

// differs returns why a session must end to reach the next target; nil: it need not.
func (t *target) differs(next *target) *failure {
	switch held := next.held(); {
	case held != nil && held.cause != causeConnection: // a session that is up needs no further connection
		return held
	case t.password != next.password:
		return ending(causePassword, false)
	case t.wire() != next.wire():
		f := ending(causeConfigured, false)
		// A router that is no peer any more must not keep the routes.
		f.final = t.Peer.Address != next.Peer.Address || t.Peer.Interface != next.Peer.Interface
		return f
	}
	return nil
}

// Peering is what is decided about the session with one router. Its owner has the connections.
type Peering struct {
	name       string
	restarting bool
	rib        *rib
	newest     *target // owned by the Machine's owner

	ctx     context.Context
	cancel  context.CancelCauseFunc
	targets chan target
	latest  atomic.Pointer[target] // for what may change in a session that is up

	target  target
	was     bool      // established before
	began   time.Time // see Established
	short   int       // sessions in a row that did not last
	shortAt time.Time // when the last of them ended
}

func newPeering(m *Machine, name string, t target) *Peering {
	p := &Peering{name: name, restarting: m.restarting, rib: newRIB(name), newest: &t, targets: make(chan target, 1), target: t}
	p.ctx, p.cancel = context.WithCancelCause(m.ctx)
	p.latest.Store(&t)
	return p
}

// setTarget replaces the target. Only the Machine's owner calls it.
func (p *Peering) setTarget(t target) {
	p.newest = &t
	notify.Replace(p.targets, t)
}

// take takes over what is wanted now, and returns why the session has to end for it; nil: it need not.
func (p *Peering) take(next target) *failure {
	why := p.target.differs(&next)
	p.target = next
	p.latest.Store(&next)
	return why
}

// Restarts returns what the OPEN has about a restart; see openOf.
func (p *Peering) Restarts() (restarting, kept bool) {
	return p.restarting && !p.was, p.restarting || p.was
}

// longestPause returns how long to pause at most after an attempt that failed, or after a session that lasted
// so long and that this node did not end.
func (p *Peering) longestPause(lasted time.Duration, now time.Time) time.Duration {
	pause := p.target.Peer.ConnectRetry
	switch {
	case lasted >= steady:
		p.short = 0
		return min(reconnect, pause)
	case lasted > 0:
		if now.Sub(p.shortAt) > forgiven {
			p.short = 0
		}
		p.short, p.shortAt = p.short+1, now
		pause = max(pause, min(pause<<min(p.short, maxDoublings), longestPause))
	}
	return pause
}

// Session returns what is wanted.
func (p *Peering) Session() plan.Session { return p.target.Session }

// Held reports whether the session has to be down now.
func (p *Peering) Held() bool { return p.ctx.Err() != nil || p.target.held() != nil }

// End is how the node ends a session.
type End struct{ failure *failure }

// Agreed has the capabilities that both ends of a session have; see RFC 4724 and RFC 8538.
type Agreed struct{ Restart, Notify bool }

// Message returns the body of the NOTIFICATION that the router is sent, nil if it is sent none.
func (e *End) Message(a Agreed) []byte {
	if m := e.failure.encode(negotiated{restart: a.Restart, notify: a.Notify}); m != nil {
		return m[packet.BGP_HEADER_LENGTH:]
	}
	return nil
}

// Take takes over what is wanted now, and returns how the session has to end. Nil: it need not.
func (p *Peering) Take() *End {
	var f *failure
	if !errors.As(context.Cause(p.ctx), &f) {
		select {
		case next := <-p.targets:
			f = p.take(next)
		default:
		}
	}
	if f == nil {
		return nil
	}
	return &End{f}
}

// Established begins a session.
func (p *Peering) Established(now time.Time) {
	p.was, p.began = true, now
	p.rib.start()
}

// Ended ends the session, or an attempt to have one. It returns how long to pause at most.
func (p *Peering) Ended(now time.Time) time.Duration {
	lasted := time.Duration(0)
	if !p.began.IsZero() {
		lasted = max(now.Sub(p.began), 1)
		p.rib.stop()
	}
	p.began = time.Time{}
	return p.longestPause(lasted, now)
}

// Update is an UPDATE. Without attributes it withdraws.
type Update struct {
	Prefixes   []netip.Prefix
	Attributes *plan.Attributes
}

// Updates returns what is to be sent now, in order.
func (p *Peering) Updates() (all []Update) {
	sorted := 0 // announcements come in the order of a map
	sort := func() {
		slices.SortFunc(all[sorted:], func(a, b Update) int { return a.Prefixes[0].Compare(b.Prefixes[0]) })
		sorted = len(all)
	}
	add := func(prefixes []netip.Prefix, a *plan.Attributes) error {
		if slices.SortFunc(prefixes, netip.Prefix.Compare); len(prefixes) > 0 {
			all = append(all, Update{prefixes, a})
		}
		return nil
	}
	batch := p.rib.take(func(netip.Prefix) Withholding { return "" })
	//nolint:errcheck // nothing fails
	batch.send(func(prefixes []netip.Prefix) error { sort(); defer sort(); return add(prefixes, nil) },
		func(a attributes, prefixes []netip.Prefix) error { return add(prefixes, new(a.Value().attributes())) })
	sort()
	return all
}
