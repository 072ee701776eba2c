package layer2

import (
	"context"
	"fmt"
	"maps"
	"net"
	"sync/atomic"
	"time"

	"github.com/mdlayher/packet"
	"golang.org/x/net/bpf"
	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"
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
	protocol protocol
	index    int
	name     string
	mac      mac
	// ip is the index of the interface on which the kernel takes the VIPs'
	// packets: the master's, for a port of a bridge or bond.
	ip int
}

func (k portKey) enslaved() bool { return k.ip != k.index }

// port is an interface in use by one protocol.
type port struct {
	key      portKey
	conn     net.PacketConn
	groups   func() (GroupSocket, error)
	opened   time.Time
	counters counters
	own      *atomic.Pointer[map[mac]bool]
	conflict func(*ownership, Conflict) (first bool)
	refresh  time.Duration

	owned atomic.Pointer[owned]
	// fresh holds what is to be announced for the first time here.
	fresh chan []*ownership
	// contested holds what somebody else claims, to be defended.
	contested chan *ownership
	// regroup says that the VIPs changed.
	regroup chan struct{}
	// One gate for each task that sends.
	answering, announcing gate

	cancel context.CancelFunc
	silent chan struct{} // closed once nothing more is sent
	err    error         // why it ended, valid once it was sent to exited
}

// open opens a port and starts its tasks.
func (a *Announcer) open(ctx context.Context, key portKey, vips owned) error {
	etherType, filter := key.protocol.socket(key.mac)
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
	p := &port{
		key:       key,
		conn:      conn,
		opened:    time.Now(),
		groups:    a.openGroups,
		counters:  a.metrics.of(key),
		own:       &a.own,
		conflict:  a.reportConflict,
		refresh:   a.refresh,
		fresh:     make(chan []*ownership, 1),
		contested: make(chan *ownership, 100),
		regroup:   make(chan struct{}, 1),
		cancel:    cancel,
		silent:    make(chan struct{}),
	}
	p.owned.Store(&owned{})
	p.set(vips)
	a.ports[key] = p
	a.running.Go(func() { p.run(ctx, a.exited) })
	return nil
}

// run runs the port's tasks until one fails or ctx ends. A failure is
// reported to exited.
func (p *port) run(ctx context.Context, exited chan<- *port) {
	group, gctx := errgroup.WithContext(ctx)
	group.Go(func() error { return p.join(gctx) })
	senders, sctx := errgroup.WithContext(gctx)
	senders.Go(p.receive)
	senders.Go(func() error { return p.announce(sctx) })
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
func (p *port) set(vips owned) {
	old := *p.owned.Load()
	if maps.Equal(old, vips) {
		return
	}
	p.owned.Store(&vips)
	p.answering.wait(p.conn)
	p.announcing.wait(p.conn)
	select {
	case p.regroup <- struct{}{}:
	default: // it was told, and has not looked yet
	}

	fresh := vips.without(old)
	select {
	case waiting := <-p.fresh:
		fresh = append(waiting, fresh...)
	default:
	}
	p.fresh <- fresh // has room: only Run sends
}

// receive answers until the socket ends.
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

// handle deals with one frame that came in.
func (p *port) handle(frame []byte) {
	m, ok := p.key.protocol.parse(frame)
	if !ok || (*p.own.Load())[m.from] || !m.to.group() && m.to != p.key.mac {
		return
	}
	if o := (*p.owned.Load())[m.claims]; o != nil {
		if o.leaving.claimed(p.key) {
			return // by the node that it goes to
		}
		if p.report(o, m) {
			select {
			case p.contested <- o:
			default: // so many that one more makes no difference
			}
		}
		return // who claims it does not want an answer
	}
	if o := p.reply(m); o != nil && m.takes {
		p.report(o, m)
	}
}

// report reports a conflict, and returns whether it is the first one for the
// VIP in some time.
func (p *port) report(o *ownership, m message) (first bool) {
	p.counters.conflicts.Inc()
	return p.conflict(o, Conflict{o.vip, p.key.name, m.from.String()})
}

// reply answers what asks for a VIP, which it returns. Nil: it is none.
func (p *port) reply(m message) *ownership {
	p.answering.enter()
	defer p.answering.leave()
	o := (*p.owned.Load())[m.asks]
	if o == nil || o.leaving.left(p.key) {
		return nil
	}
	p.counters.requests.Inc()
	if p.send(p.key.protocol.answer(p.key.mac, m)) {
		p.counters.replies.Inc()
	}
	return o
}

// send sends a frame. An error passes or ends the receiver too; it is only
// counted here.
func (p *port) send(frame []byte) bool {
	_, err := p.conn.WriteTo(frame, &packet.Addr{HardwareAddr: frame[:6]})
	if err != nil {
		p.counters.sendErrors.Inc()
	}
	return err == nil
}

// A sender that is stuck (a full transmit queue) is interrupted after
// patience.
const (
	patience = 10 * time.Millisecond
	glance   = 50 * time.Microsecond
)

// gate is a moment of sending that others can wait for. The sender enters,
// looks whether it still may, sends, leaves; it never waits. Who forbade it
// waits until a sender that may have looked before has left.
type gate struct {
	passes atomic.Uint64 // odd while a sender is inside
}

func (g *gate) enter() { g.passes.Add(1) }
func (g *gate) leave() { g.passes.Add(1) }

// wait returns when a sender who was inside when it was called has left.
func (g *gate) wait(conn net.PacketConn) {
	inside := g.passes.Load()
	if inside%2 == 0 {
		return
	}
	for start := time.Now(); g.passes.Load() == inside; time.Sleep(glance) {
		if time.Since(start) > patience {
			_ = conn.SetWriteDeadline(start)
			defer conn.SetWriteDeadline(time.Time{})
		}
	}
}
