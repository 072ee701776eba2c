// Package dhcp leases addresses from a DHCPv4 server (RFC 2131): one for each
// of many VIPs, by one socket on one interface.
//
// The addresses are on no interface. The speaker that owns the VIP answers ARP requests for
// them, often from another node, or nobody does. A unicast answer of a server would therefore
// not arrive here. So every message but the release is broadcast, asks for a broadcast answer,
// and leaves ciaddr empty, as after a reboot (section 4.3.2, INIT-REBOOT). Servers confirm and
// extend leases on such messages, too.
//
// One goroutine, Run, owns the socket and the clock. The machine has neither. The files, from the
// outside in:
//
//	dhcp.go     Source, the task: it has addresses leased for Clients
//	state.go    Lease and State: how a client stands
//	lease.go    how a lease is asked for, renewed and lost: what is sent to servers and when, and what an answer means
//	message.go  the messages, written and parsed
//	socket.go   the interface and the socket on it
package dhcp

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/lodestone-lb/lodestone/pkg/notify"
)

const (
	// pace is the least time between two messages: the usual receive buffer
	// of a server holds about 270 of them.
	pace = 5 * time.Millisecond
	// A socket that failed is opened again after the first delay, which
	// doubles up to the last one.
	firstRetry = 250 * time.Millisecond
	lastRetry  = 8 * time.Second
	// glance is how long the state of the interface is used for sending before it is read
	// again. To read it means to list all interfaces of the node.
	glance = 250 * time.Millisecond
)

// Client is a VIP that wants an address.
type Client struct {
	// ID is what servers know the client by (option 61, of type 0), whichever
	// node asks: 1 to 254 bytes, unique among all that ask the server.
	ID string
	// Hostname is what servers list the client as (option 12). It is cut to
	// 63 bytes, and may be empty.
	Hostname string
	// Namespace takes turns with others, so that many clients of one do not delay those of another.
	Namespace string
	// Last is the address that the client had. It is asked for first. The zero Addr: none.
	Last netip.Addr
}

// Options are what a Source needs.
type Options struct {
	// Interface is on the segment of the server or of its relay. A bridge or a bond goes by
	// its own name, not by that of a port.
	Interface string
	Log       *slog.Logger
	// Network is where the interface is. Nil: this process's network
	// namespace.
	Network Network
}

// Source is a task that keeps a lease for each client.
type Source struct {
	name    string
	log     *slog.Logger
	network Network
	wake    chan struct{}
	heard   chan event

	mu      sync.Mutex // guards what follows; never held over I/O
	machine *machine
	failed  error // why there is no socket
	changed notify.Signal

	// Owned by Run.
	socket  *socket
	checked time.Time     // when the interface was last looked at
	sent    time.Time     // when the last message was
	retry   time.Time     // when to open the socket again
	delay   time.Duration // until the retry after that
}

// New returns a Source that asks for nothing until it runs.
func New(o Options) *Source {
	log := o.Log.With("interface", o.Interface)
	s := &Source{
		name:    o.Interface,
		log:     log,
		network: o.Network,
		wake:    make(chan struct{}, 1),
		heard:   make(chan event),
		machine: newMachine(o.Interface, log),
		delay:   firstRetry,
	}
	if s.network == nil {
		s.network = host{}
	}
	return s
}

// Set replaces the whole set of clients. A new client asks for an address. The lease of a
// client that is gone is released, or left to expire if it was never confirmed to this
// process. Set does not wait.
func (s *Source) Set(want []Client) {
	s.mu.Lock()
	s.machine.set(time.Now(), want)
	s.notify()
	s.mu.Unlock()
	notify.Wake(s.wake)
}

// ExtendOnly has the Source extend the leases that there are, and ask for no others from now on, also in place of one that ends.
func (s *Source) ExtendOnly() {
	s.mu.Lock()
	s.machine.extendOnly()
	s.mu.Unlock()
	notify.Wake(s.wake)
}

// Current returns the state of each client by ID.
func (s *Source) Current() map[string]State {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.machine.states(s.failed)
}

// Changed returns a channel that is closed when a lease or an error comes or goes. A renewal
// does not close it. Take the channel first, then ask Current: no change is missed.
func (s *Source) Changed() <-chan struct{} { return s.changed.Next() }

// notify signals a change to those who wait for it. s.mu is held.
func (s *Source) notify() {
	if s.machine.changed {
		s.machine.changed = false
		s.changed.Notify()
	}
}

// Run keeps the leases until ctx ends. It then releases only those that Set gave up: the VIPs
// live on, and the next process that runs takes their leases over. It never fails: it tries
// again, and Current has the error.
func (s *Source) Run(ctx context.Context) error {
	defer s.close()
	for ctx.Err() == nil {
		s.wait(ctx, s.step(ctx, time.Now()))
	}
	for m := s.released(); m != nil && s.socket != nil; m = s.released() {
		time.Sleep(time.Until(s.sent.Add(pace)))
		s.send(m, time.Now())
	}
	return nil
}

// released returns a release to be sent, nil if there is none.
func (s *Source) released() *message {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.machine.release()
}

// wait returns at the given time, if it is not zero, or as soon as there is
// something to do.
func (s *Source) wait(ctx context.Context, until time.Time) {
	var due <-chan time.Time
	if !until.IsZero() {
		due = time.After(time.Until(until))
	}
	select {
	case <-ctx.Done():
	case <-due:
	case <-s.wake:
	case e := <-s.heard:
		s.receive(e)
	}
}

// step sends at most one message and returns when the next step is due.
func (s *Source) step(ctx context.Context, now time.Time) (next time.Time) {
	if free := s.sent.Add(pace); now.Before(free) {
		return free
	}
	if s.socket == nil && !now.Before(s.retry) && s.needed() {
		s.open(ctx, now)
	}
	m, next := s.decide(now)
	if m != nil {
		s.send(m, now)
	}
	if s.socket == nil && s.needed() && (next.IsZero() || s.retry.Before(next)) {
		next = s.retry
	}
	return next
}

// decide returns the message to send now, nil if there is none, and when to call it again.
func (s *Source) decide(now time.Time) (m *message, next time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	defer s.notify()
	if s.socket == nil {
		return nil, s.machine.lapse(now)
	}
	return s.machine.act(now)
}

// needed reports whether there are clients, or leases to release.
func (s *Source) needed() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.machine.byID)+len(s.machine.released) > 0
}

// send sends a message. One that cannot be sent is sent again when there is a socket again.
func (s *Source) send(m *message, now time.Time) {
	s.sent = now
	if s.trySend(m, now) || m.release == nil { // others are sent until they are answered
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.machine.byID[m.client.ID] == nil { // otherwise it has come back meanwhile
		s.machine.released = append(s.machine.released, m)
	}
}

// trySend reports whether the message was sent. If not, the socket is closed.
func (s *Source) trySend(m *message, now time.Time) bool {
	if now.Sub(s.checked) >= glance {
		i, err := s.network.Interface(s.name)
		if err == nil {
			err = s.socket.replacedBy(i)
		}
		if err != nil {
			s.fail(err)
			return false
		}
		s.use(i, now)
	}
	if err := s.socket.send(m); err != nil {
		s.fail(fmt.Errorf("send on interface %q: %w", s.name, err))
		return false
	}
	return true
}

// receive deals with what the socket heard.
func (s *Source) receive(e event) {
	if e.socket != s.socket {
		return // closed meanwhile
	}
	if e.err != nil {
		s.fail(fmt.Errorf("receive on interface %q: %w", s.name, e.err))
		return
	}
	s.mu.Lock()
	s.machine.receive(time.Now(), e.answer)
	s.notify()
	s.mu.Unlock()
}

// open opens the socket, or plans the next attempt.
func (s *Source) open(ctx context.Context, now time.Time) {
	i, err := s.network.Interface(s.name)
	if err == nil {
		err = i.usable(s.name)
	}
	var p *socket
	if err == nil {
		p, err = openSocket(ctx, s.network, i, s.heard)
	}
	if errors.Is(err, unix.EPERM) {
		err = fmt.Errorf("%w: leases need the capability NET_RAW; with Helm, set controller.dhcp.enabled", err)
	}
	if err != nil {
		s.fail(err)
		return
	}
	s.socket, s.delay = p, firstRetry
	s.use(i, now)
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.failed != nil {
		s.log.Info("interface works again")
		s.failed = nil
		s.machine.hurry(now)
		s.notify()
	}
}

// use records what was just seen of the interface.
func (s *Source) use(i Interface, now time.Time) {
	s.checked = now
	s.mu.Lock()
	s.machine.own = i.Addrs
	s.mu.Unlock()
}

// fail closes the socket and plans the next attempt.
func (s *Source) fail(err error) {
	s.close()
	s.retry = time.Now().Add(s.delay)
	s.delay = min(2*s.delay, lastRetry)
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.failed == nil || s.failed.Error() != err.Error() {
		s.log.Warn("interface failed: no lease is acquired or extended", "err", err)
		s.failed, s.machine.changed = err, true
		s.notify()
	}
}

// close closes the socket, if there is one.
func (s *Source) close() {
	if s.socket != nil {
		s.socket.close()
		s.socket = nil
	}
}
