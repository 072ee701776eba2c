package layer2

import (
	"context"
	"crypto/rand"
	"fmt"
	"maps"
	"net"
	"net/netip"
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

// responderKey identifies a responder. When a part changes, another responder replaces it, and announces
// everything anew.
type responderKey struct {
	protocol wire.Protocol
	index    int
	name     string
	mac      wire.MAC
	// ip is the index of the interface on which the kernel receives the VIPs' packets: for a port of a
	// bridge or bond, the index of its master.
	ip int
}

func (k responderKey) enslaved() bool { return k.ip != k.index }

// responder is an interface in use by one protocol: a socket and the segment's machine. One task receives,
// one sends what is due, and one joins the multicast groups in which IPv6 hosts ask.
type responder struct {
	key      responderKey
	conn     net.PacketConn
	groups   joinedGroups
	received func(index int) (uint64, error)
	opened   time.Time
	counters counters
	note     func(responderKey, segment.Note)

	// owner is full while a task uses the machine and sends its frames. It is a channel and not a mutex,
	// so that a task can stop waiting for it when a frame is stuck.
	owner   chan struct{}
	machine *segment.Machine
	// alarm is when the task that sends wakes up next. Zero: never.
	alarm time.Time

	vips atomic.Pointer[map[netip.Addr]segment.VIP]
	// woken receives if something is due before alarm, regroup if the VIPs or the interfaces have changed.
	woken, regroup chan struct{}

	cancel context.CancelFunc
	silent chan struct{} // closed once nothing more is sent
	err    error         // why it ended; valid after it was sent to exited
}

// open opens a responder and starts its tasks.
func (a *Announcer) open(ctx context.Context, key responderKey, vips map[netip.Addr]segment.VIP) error {
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
	r := a.newResponder(key, conn)
	r.cancel = cancel
	r.step(a.around)
	r.set(vips)
	a.responders[key] = r
	a.running.Go(func() { r.run(ctx, a.exited) })
	return nil
}

func (a *Announcer) newResponder(key responderKey, conn net.PacketConn) *responder {
	c := segment.Config{Protocol: key.protocol, Self: key.mac, Keys: a.options.Keys}
	rand.Read(c.Secret[:]) //nolint:errcheck // never fails
	r := &responder{
		key: key, conn: conn, received: a.options.Received, opened: time.Now(),
		groups:   joinedGroups{index: key.ip, open: a.options.Groups, kernel: a.options.Joined, joined: map[netip.Addr]GroupSocket{}},
		counters: a.metrics.of(key), note: a.note,
		owner: make(chan struct{}, 1), machine: segment.New(c, time.Now()),
		woken: make(chan struct{}, 1), regroup: make(chan struct{}, 1), silent: make(chan struct{}),
	}
	r.vips.Store(&map[netip.Addr]segment.VIP{})
	return r
}

// run runs the responder's tasks until one fails or ctx ends. If one fails, it sends the responder to
// exited.
func (r *responder) run(ctx context.Context, exited chan<- *responder) {
	group, gctx := errgroup.WithContext(ctx)
	group.Go(func() error { return r.join(gctx) })
	senders, sctx := errgroup.WithContext(gctx)
	senders.Go(r.receive)
	senders.Go(func() error { r.announce(sctx); return nil })
	senders.Go(func() error { <-sctx.Done(); return r.conn.Close() })
	group.Go(func() error { defer close(r.silent); return senders.Wait() })
	r.err = group.Wait()
	if ctx.Err() == nil {
		select {
		case exited <- r:
		case <-ctx.Done():
		}
	}
}

// close ends the responder's tasks and waits until they do not send any more. Leaving the groups may take
// longer.
func (r *responder) close() {
	r.cancel()
	<-r.silent
}

// set replaces the VIPs of the responder. When it returns, nothing is sent for the others any more.
func (r *responder) set(vips map[netip.Addr]segment.VIP) {
	defer notify.Wake(r.regroup) // also with the same VIPs: the kernel may have forgotten their groups
	if maps.Equal(*r.vips.Load(), vips) {
		return
	}
	r.vips.Store(&vips)
	r.step(segment.Assigned{VIPs: vips})
}

// receive hands frames to the machine until the socket is closed.
func (r *responder) receive() error {
	buf := make([]byte, 1514) // ARP packets have 60 bytes; NDP packets may have options
	for {
		n, _, err := r.conn.ReadFrom(buf)
		if err != nil {
			r.counters.receiveErrors.Inc()
			return fmt.Errorf("receive on interface %q: %w", r.key.name, err)
		}
		r.handle(buf[:n])
	}
}

func (r *responder) handle(frame []byte) {
	r.owner <- struct{}{}
	r.stepAndLeave(segment.Received{Frame: frame})
}

// announce sends what is due, until ctx ends.
func (r *responder) announce(ctx context.Context) {
	timer := time.NewTimer(0)
	defer timer.Stop()
	for ctx.Err() == nil {
		select {
		case <-ctx.Done():
		case <-timer.C:
		case <-r.woken:
		}
		for ctx.Err() == nil {
			next, waiting := r.sendDue()
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
func (r *responder) sendDue() (next time.Time, waiting bool) {
	r.owner <- struct{}{}
	now := time.Now()
	if next, waiting = r.machine.Next(); !waiting || next.After(now) {
		r.alarm = next
		<-r.owner
		return next, waiting
	}
	events := []segment.Event{segment.Due{}}
	if r.received != nil && r.machine.WantsCount(now) {
		frames, err := r.received(r.key.index)
		events = []segment.Event{segment.Counted{Frames: frames, Known: err == nil}, segment.Due{}}
	}
	r.stepAndLeave(events...)
	return time.Time{}, true
}

// stuckAfter is how long a task waits for the machine. Then the frame that is being sent is given up: it
// is stuck in a full transmit queue.
const stuckAfter = 10 * time.Millisecond

// own makes the caller the owner of the machine until it reads from r.owner.
func (r *responder) own() {
	select {
	case r.owner <- struct{}{}:
		return
	default:
	}
	for {
		select {
		case r.owner <- struct{}{}:
			_ = r.conn.SetWriteDeadline(time.Time{})
			return
		case <-time.After(stuckAfter): // again, because the frame of another task may be stuck by now
			_ = r.conn.SetWriteDeadline(time.Now())
		}
	}
}

// step hands an event to the machine.
func (r *responder) step(e segment.Event) {
	r.own()
	r.stepAndLeave(e)
}

// stepAndLeave hands events to the machine and releases it. The caller has to own the machine.
func (r *responder) stepAndLeave(events ...segment.Event) {
	var notes []segment.Note
	for _, e := range events {
		effects := r.machine.Step(e, time.Now())
		r.send(effects)
		notes = append(notes, effects.Notes...)
	}
	if next, waiting := r.machine.Next(); waiting && (r.alarm.IsZero() || next.Before(r.alarm)) {
		notify.Wake(r.woken)
	}
	<-r.owner
	for _, n := range notes {
		r.note(r.key, n)
	}
}

// send sends and counts the effects of the machine.
func (r *responder) send(e *segment.Effects) {
	for _, f := range e.Frames {
		// An error is only counted: either it is temporary, or the task that receives fails, too.
		if _, err := r.conn.WriteTo(f, &packet.Addr{HardwareAddr: f[:6]}); err != nil {
			r.counters.sendErrors.Inc()
		}
	}
	r.counters.add(e)
}

// state returns the state of a VIP.
func (r *responder) state(vip netip.Addr) segment.State {
	r.own()
	defer func() { <-r.owner }()
	return r.machine.State(vip)
}

// leaving returns the leaving VIPs for which this node still answers.
func (r *responder) leaving() []netip.Addr {
	r.own()
	defer func() { <-r.owner }()
	return r.machine.Leaving()
}

// withheld returns how many VIPs are not announced, by reason.
func (r *responder) withheld() map[Reason]int {
	r.own()
	defer func() { <-r.owner }()
	return r.machine.Withheld()
}
