package layer2

import (
	"context"
	"crypto/rand"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"slices"
	"sync/atomic"
	"time"

	"github.com/mdlayher/packet"
	"golang.org/x/net/bpf"
	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"github.com/lodestone-lb/lodestone/pkg/notify"
	"github.com/lodestone-lb/lodestone/speaker/layer2/segment"
	"github.com/lodestone-lb/lodestone/speaker/layer2/wire"
)

// Listen opens a socket that carries whole Ethernet frames of one EtherType.
type Listen func(i *net.Interface, etherType int, filter []bpf.RawInstruction) (net.PacketConn, error)

// ListenPacket opens a packet socket in this process's network namespace.
func ListenPacket(i *net.Interface, etherType int, filter []bpf.RawInstruction) (net.PacketConn, error) {
	return packet.Listen(i, packet.Raw, etherType, &packet.Config{Filter: filter})
}

// socketKey identifies a socket. When a part changes, another socket replaces it, and everything is announced anew.
type socketKey struct {
	protocol wire.Protocol
	index    int
	name     string
	mac      wire.MAC
	// ip is the index of the interface on which the kernel receives the VIPs' packets: for a port of a
	// bridge or bond, the index of its master.
	ip int
}

func (k socketKey) enslaved() bool { return k.ip != k.index }

// socket is a packet socket on an interface, for one protocol, with the segment's machine, which decides what is sent there. One task
// receives, one sends what is due, and one joins the multicast groups in which IPv6 hosts ask.
type socket struct {
	key      socketKey
	conn     net.PacketConn
	groups   joinedGroups
	received func(index int) (uint64, error)
	opened   time.Time
	counters counters
	note     func(socketKey, segment.Note)

	// owner is full while a task uses the machine and sends its frames. It is a channel and not a mutex,
	// so that a task can stop waiting for it when a frame is stuck.
	owner   chan struct{}
	machine *segment.Machine
	// alarm is when the task that sends wakes up next. Zero: never.
	alarm time.Time

	vips atomic.Pointer[map[netip.Addr]segment.VIP]
	self *atomic.Pointer[map[wire.MAC]bool] // the addresses of this node
	// heard counts the messages of neighbours.
	heard atomic.Uint64
	// woken receives if something is due before alarm, regroup if the VIPs or the interfaces have changed.
	woken, regroup chan struct{}

	cancel context.CancelFunc
	silent chan struct{} // closed once nothing more is sent
	err    error         // why it ended; valid after it was sent to exited
}

// open opens a socket and starts its tasks.
func (a *Announcer) open(ctx context.Context, key socketKey, vips map[netip.Addr]segment.VIP) error {
	etherType, filter := key.protocol.Socket(key.mac)
	if key.enslaved() {
		etherType = unix.ETH_P_ALL // other sockets do not see the frames of a port: its master takes them before
	}
	raw, err := bpf.Assemble(filter)
	if err != nil {
		return fmt.Errorf("assemble the filter of interface %q: %w", key.name, err)
	}
	conn, err := a.options.Listen(&net.Interface{Index: key.index, Name: key.name, HardwareAddr: key.mac[:]}, etherType, raw)
	if err != nil {
		a.metrics.of(key).openErrors.Inc()
		return fmt.Errorf("open a socket on interface %q: %w", key.name, err)
	}
	ctx, cancel := context.WithCancel(ctx)
	s := a.newSocket(key, conn)
	s.cancel = cancel
	s.step(a.around)
	s.set(vips)
	a.sockets[key] = s
	a.running.Go(func() { s.run(ctx, a.exited) })
	return nil
}

func (a *Announcer) newSocket(key socketKey, conn net.PacketConn) *socket {
	c := segment.Config{Protocol: key.protocol, Self: key.mac, Keys: a.options.Keys}
	rand.Read(c.Secret[:]) //nolint:errcheck // never fails
	s := &socket{
		key: key, conn: conn, received: a.options.Received, opened: time.Now(),
		groups:   joinedGroups{index: key.ip, open: a.options.Groups, kernel: a.options.Joined, joined: map[netip.Addr]GroupSocket{}},
		counters: a.metrics.of(key), note: a.note, self: &a.self,
		owner: make(chan struct{}, 1), machine: segment.New(c, time.Now()),
		woken: make(chan struct{}, 1), regroup: make(chan struct{}, 1), silent: make(chan struct{}),
	}
	s.vips.Store(&map[netip.Addr]segment.VIP{})
	return s
}

// run runs the socket's tasks until one fails or ctx ends. If one fails, it sends the socket to exited.
func (s *socket) run(ctx context.Context, exited chan<- *socket) {
	group, gctx := errgroup.WithContext(ctx)
	group.Go(func() error { return s.join(gctx) })
	senders, sctx := errgroup.WithContext(gctx)
	senders.Go(s.receive)
	senders.Go(func() error { s.announce(sctx); return nil })
	senders.Go(func() error { <-sctx.Done(); return s.conn.Close() })
	group.Go(func() error { defer close(s.silent); return senders.Wait() })
	s.err = group.Wait()
	if ctx.Err() == nil {
		select {
		case exited <- s:
		case <-ctx.Done():
		}
	}
}

// close ends the socket's tasks and waits until they do not send any more. Leaving the groups may take
// longer.
func (s *socket) close() {
	s.cancel()
	<-s.silent
}

// set replaces the VIPs of the socket. When it returns, nothing is sent for the others any more.
func (s *socket) set(vips map[netip.Addr]segment.VIP) {
	defer notify.Wake(s.regroup) // also with the same VIPs: the kernel may have forgotten their groups
	if maps.Equal(*s.vips.Load(), vips) {
		return
	}
	s.vips.Store(&vips)
	s.step(segment.Assigned{VIPs: vips})
}

// receive receives frames until the socket is closed.
func (s *socket) receive() error {
	buf := make([]byte, 1514) // ARP packets have 60 bytes; NDP packets may have options
	for {
		n, _, err := s.conn.ReadFrom(buf)
		if err != nil {
			s.counters.receiveErrors.Inc()
			return fmt.Errorf("receive on interface %q: %w", s.key.name, err)
		}
		s.handle(buf[:n])
	}
}

// handle hands a message that concerns a VIP to the machine. The others do not wait for the machine, however many there are.
func (s *socket) handle(frame []byte) {
	msg, ok := s.key.protocol.Parse(frame)
	if !ok {
		s.counters.malformed.Inc()
		return
	}
	if (*s.self.Load())[msg.From] || !msg.IsFor(s.key.mac) {
		return
	}
	s.heard.Add(1)
	vips := *s.vips.Load()
	if _, asked := vips[msg.Asks]; !asked {
		if _, claimed := vips[msg.Claims]; !claimed {
			return
		}
	}
	s.owner <- struct{}{}
	s.stepAndLeave(segment.Received{Message: msg})
}

// announce sends what is due, until ctx ends.
func (s *socket) announce(ctx context.Context) {
	timer := time.NewTimer(0)
	defer timer.Stop()
	for ctx.Err() == nil {
		select {
		case <-ctx.Done():
		case <-timer.C:
		case <-s.woken:
		}
		for ctx.Err() == nil {
			next, waiting := s.sendDue()
			if wait := time.Until(next); !waiting || wait > 0 {
				if waiting {
					timer.Reset(wait)
				}
				break
			}
		}
	}
}

// sendDue sends what is due, and returns when something is due next.
func (s *socket) sendDue() (next time.Time, waiting bool) {
	s.owner <- struct{}{}
	now := time.Now()
	if next, waiting = s.machine.Next(); !waiting || next.After(now) {
		s.alarm = next
		<-s.owner
		return next, waiting
	}
	counts := s.received != nil && s.machine.WantsCount(now)
	s.stepAndLeave(segment.Due{})
	if counts { // without owning the machine, because the kernel may take long, as while it makes interfaces
		frames, err := s.received(s.key.index)
		s.step(segment.Counted{Frames: frames, Messages: s.heard.Load(), Known: err == nil})
	}
	return time.Time{}, true
}

// stuckAfter is how long a task waits for the machine. Then the frame that is being sent is given up: it
// is stuck in a full transmit queue.
const stuckAfter = 10 * time.Millisecond

// own makes the caller the owner of the machine until it reads from s.owner.
func (s *socket) own() {
	select {
	case s.owner <- struct{}{}:
		return
	default:
	}
	for {
		select {
		case s.owner <- struct{}{}:
			_ = s.conn.SetWriteDeadline(time.Time{})
			return
		case <-time.After(stuckAfter): // again, because the frame of another task may be stuck by now
			_ = s.conn.SetWriteDeadline(time.Now())
		}
	}
}

// step hands an event to the machine.
func (s *socket) step(e segment.Event) {
	s.own()
	s.stepAndLeave(e)
}

// stepAndLeave hands an event to the machine and releases it. The caller has to own the machine.
func (s *socket) stepAndLeave(e segment.Event) {
	effects := s.machine.Step(e, time.Now())
	s.send(effects)
	notes := slices.Clone(effects.Notes)
	if next, waiting := s.machine.Next(); waiting && (s.alarm.IsZero() || next.Before(s.alarm)) {
		notify.Wake(s.woken)
	}
	<-s.owner
	for _, n := range notes {
		s.note(s.key, n)
	}
}

// send sends and counts the effects of the machine.
func (s *socket) send(e *segment.Effects) {
	for _, f := range e.Frames {
		// An error is only counted: either it is temporary, or the task that receives fails, too.
		if _, err := s.conn.WriteTo(f, &packet.Addr{HardwareAddr: f[:6]}); err != nil {
			s.counters.sendErrors.Inc()
		}
	}
	s.counters.add(e)
}

// state returns the state of a VIP.
func (s *socket) state(vip netip.Addr) segment.State {
	s.own()
	defer func() { <-s.owner }()
	return s.machine.State(vip)
}

// leaving returns the leaving VIPs for which this node still answers.
func (s *socket) leaving() []netip.Addr {
	s.own()
	defer func() { <-s.owner }()
	return s.machine.Leaving()
}

// withheld returns how many VIPs are not announced, by reason.
func (s *socket) withheld() map[Reason]int {
	s.own()
	defer func() { <-s.owner }()
	return s.machine.Withheld()
}
