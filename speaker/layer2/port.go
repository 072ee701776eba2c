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
	c, err := packet.Listen(i, packet.Raw, etherType, &packet.Config{Filter: filter})
	if err != nil {
		return nil, err
	}
	return c, nil
}

// portKey is what a port depends on. When a part changes, the port is
// replaced by another one, which announces everything anew.
type portKey struct {
	protocol wire.Protocol
	index    int
	name     string
	mac      wire.MAC
	// ip is the index of the interface on which the kernel takes the VIPs'
	// packets: the master's, for a port of a bridge or bond.
	ip int
}

func (k portKey) enslaved() bool { return k.ip != k.index }

// port is an interface in use by one protocol: a socket, and the machine of the segment
// behind it. One task receives, one sends what is due, and one keeps the multicast groups
// in which IPv6 hosts ask.
type port struct {
	key      portKey
	conn     net.PacketConn
	groups   func() (GroupSocket, error)
	received func(index int) (uint64, error)
	opened   time.Time
	counters counters
	note     func(portKey, segment.Note)

	// owner is full while somebody has the machine, and sends what it says. It is no mutex,
	// because who waits for a frame that is stuck must be able to give up waiting.
	owner   chan struct{}
	machine *segment.Machine
	// alarm is when the task that sends wakes up by itself. Zero: never.
	alarm time.Time

	vips atomic.Pointer[map[netip.Addr]segment.VIP]
	// woken says that something is due before alarm, regroup that the VIPs changed.
	woken, regroup chan struct{}

	cancel context.CancelFunc
	silent chan struct{} // closed once nothing more is sent
	err    error         // why it ended, valid once it was sent to exited
}

// open opens a port and starts its tasks.
func (a *Announcer) open(ctx context.Context, key portKey, vips map[netip.Addr]segment.VIP) error {
	etherType, filter := key.protocol.Socket(key.mac)
	if key.enslaved() {
		etherType = unix.ETH_P_ALL // the master takes frames before sockets of one type see them
	}
	raw, err := bpf.Assemble(filter)
	if err != nil {
		return fmt.Errorf("assemble the filter of interface %q: %w", key.name, err)
	}
	conn, err := a.listen(&net.Interface{Index: key.index, Name: key.name, HardwareAddr: key.mac[:]}, etherType, raw)
	if err != nil {
		a.metrics.of(key).openErrors.Inc()
		return fmt.Errorf("open a socket on interface %q: %w", key.name, err)
	}
	ctx, cancel := context.WithCancel(ctx)
	p := a.newPort(key, conn)
	p.cancel = cancel
	p.step(a.around)
	p.set(vips)
	a.ports[key] = p
	a.running.Go(func() { p.run(ctx, a.exited) })
	return nil
}

func (a *Announcer) newPort(key portKey, conn net.PacketConn) *port {
	c := segment.Config{Protocol: key.protocol, Self: key.mac, Keys: a.seals}
	rand.Read(c.Secret[:]) //nolint:errcheck // never fails
	p := &port{
		key: key, conn: conn, groups: a.openGroups, received: a.received, opened: time.Now(), counters: a.metrics.of(key), note: a.note,
		owner: make(chan struct{}, 1), machine: segment.New(c, time.Now()),
		woken: make(chan struct{}, 1), regroup: make(chan struct{}, 1), silent: make(chan struct{}),
	}
	p.vips.Store(&map[netip.Addr]segment.VIP{})
	return p
}

// run runs the port's tasks until one fails or ctx ends. A failure is
// reported to exited.
func (p *port) run(ctx context.Context, exited chan<- *port) {
	group, gctx := errgroup.WithContext(ctx)
	group.Go(func() error { return p.join(gctx) })
	senders, sctx := errgroup.WithContext(gctx)
	senders.Go(p.receive)
	senders.Go(func() error { p.announce(sctx); return nil })
	senders.Go(func() error { <-sctx.Done(); return p.conn.Close() })
	group.Go(func() error { defer close(p.silent); return senders.Wait() })
	p.err = group.Wait()
	if ctx.Err() == nil {
		select {
		case exited <- p:
		case <-ctx.Done():
		}
	}
}

// close ends the port's tasks and waits until they no longer send. To leave
// its groups may take longer.
func (p *port) close() {
	p.cancel()
	<-p.silent
}

// set replaces the VIPs of the port. When it returns, nothing more is sent
// for those that are gone.
func (p *port) set(vips map[netip.Addr]segment.VIP) {
	if maps.Equal(*p.vips.Load(), vips) {
		return
	}
	p.vips.Store(&vips)
	p.step(segment.Assigned{VIPs: vips})
	notify.Wake(p.regroup)
}

// receive takes frames to the machine until the socket ends.
func (p *port) receive() error {
	buf := make([]byte, 1514) // an ARP packet has 60 bytes; one of NDP may have options
	for {
		n, _, err := p.conn.ReadFrom(buf)
		if err != nil {
			p.counters.receiveErrors.Inc()
			return fmt.Errorf("receive on interface %q: %w", p.key.name, err)
		}
		p.handle(buf[:n])
	}
}

func (p *port) handle(frame []byte) {
	p.owner <- struct{}{}
	p.stepAndLeave(segment.Received{Frame: frame})
}

// announce has the machine send what is due, until ctx ends.
func (p *port) announce(ctx context.Context) {
	timer := time.NewTimer(0)
	defer timer.Stop()
	for ctx.Err() == nil {
		select {
		case <-ctx.Done():
		case <-timer.C:
		case <-p.woken:
		}
		for ctx.Err() == nil {
			next, waiting := p.sendDue()
			if wait := time.Until(next); !waiting || wait > 0 {
				if waiting {
					timer.Reset(wait)
				}
				break
			}
		}
	}
}

// sendDue sends what is due, and returns when the next is.
func (p *port) sendDue() (next time.Time, waiting bool) {
	p.owner <- struct{}{}
	now := time.Now()
	if next, waiting = p.machine.Next(); !waiting || next.After(now) {
		p.alarm = next
		<-p.owner
		return next, waiting
	}
	events := []segment.Event{segment.Due{}}
	if p.received != nil && p.machine.WantsCount(now) {
		frames, err := p.received(p.key.index)
		events = []segment.Event{segment.Counted{Frames: frames, Known: err == nil}, segment.Due{}}
	}
	p.stepAndLeave(events...)
	return time.Time{}, true
}

// A frame that is stuck (a full transmit queue) is given up when somebody has waited for the
// machine for stuckAfter.
const stuckAfter = 10 * time.Millisecond

// own makes the caller the owner of the machine until it reads from p.owner.
func (p *port) own() {
	select {
	case p.owner <- struct{}{}:
		return
	default:
	}
	select {
	case p.owner <- struct{}{}:
	case <-time.After(stuckAfter):
		_ = p.conn.SetWriteDeadline(time.Now())
		p.owner <- struct{}{}
		_ = p.conn.SetWriteDeadline(time.Time{})
	}
}

// step takes an event to the machine.
func (p *port) step(e segment.Event) {
	p.own()
	p.stepAndLeave(e)
}

// stepAndLeave is called by the owner of the machine, who ceases to be it.
func (p *port) stepAndLeave(events ...segment.Event) {
	var notes []segment.Note
	for _, e := range events {
		effects := p.machine.Step(e, time.Now())
		p.send(effects)
		notes = append(notes, effects.Notes...)
	}
	if next, waiting := p.machine.Next(); waiting && (p.alarm.IsZero() || next.Before(p.alarm)) {
		notify.Wake(p.woken)
	}
	<-p.owner
	for _, n := range notes {
		p.note(p.key, n)
	}
}

// send sends and counts what the machine says.
func (p *port) send(e *segment.Effects) {
	for _, f := range e.Frames {
		// An error passes or ends the receiver too; it is only counted here.
		if _, err := p.conn.WriteTo(f, &packet.Addr{HardwareAddr: f[:6]}); err != nil {
			p.counters.sendErrors.Inc()
		}
	}
	p.counters.add(e)
}

// state returns how a VIP of the port stands.
func (p *port) state(vip netip.Addr) segment.State {
	p.own()
	defer func() { <-p.owner }()
	return p.machine.State(vip)
}

// leaving returns the VIPs that leave and are still answered for.
func (p *port) leaving() []netip.Addr {
	p.own()
	defer func() { <-p.owner }()
	return p.machine.Leaving()
}

// withheld returns how many VIPs are not announced, by reason.
func (p *port) withheld() map[Reason]int {
	p.own()
	defer func() { <-p.owner }()
	return p.machine.Withheld()
}
