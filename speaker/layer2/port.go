package layer2

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"github.com/mdlayher/packet"
	"golang.org/x/net/bpf"
	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"github.com/lodestone-lb/lodestone/speaker/layer2/seal"
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
	received func(index int) (uint64, error)
	opened   time.Time
	counters counters
	own      *atomic.Pointer[map[mac]bool]
	log      *slog.Logger
	seals    seal.Keys
	nonces   *nonces
	whole    *atomic.Bool // no speaker is lost
	crowd    *atomic.Int64
	conflict func(*ownership, Conflict) (first bool)
	freed    func(*ownership) // nobody else has the VIP

	heard atomic.Uint64 // messages of others
	owned atomic.Pointer[owned]
	// fresh holds what is to be announced for the first time here.
	fresh chan []*ownership
	// contested holds what somebody else claims.
	contested inbox
	// holds are the VIPs that are not announced here at the moment.
	holds holds
	// membersChanged says that whole may have changed.
	membersChanged chan struct{}
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
		received:  a.received,
		counters:  a.metrics.of(key),
		own:       &a.own,
		log:       a.log,
		seals:     a.seals,
		nonces:    newNonces(),
		whole:     &a.whole,
		crowd:     &a.crowd,
		conflict:  a.reportConflict,
		freed:     a.noteFree,
		fresh:     make(chan []*ownership, 1),
		contested: inbox{news: make(chan struct{}, 1)},
		regroup:   make(chan struct{}, 1),
		cancel:    cancel,

		membersChanged: make(chan struct{}, 1),
		silent:         make(chan struct{}),
	}
	p.owned.Store(&owned{})
	p.set(vips)
	wake(p.membersChanged)
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
	fresh := vips.without(old)
	for _, o := range fresh {
		if o.probe.Load() {
			p.holds.begin(o)
		}
	}
	p.owned.Store(&vips)
	p.answering.wait(p.conn)
	p.announcing.wait(p.conn)
	for _, o := range old.without(vips) {
		p.holds.forget(o)
	}
	wake(p.regroup)
	select {
	case waiting := <-p.fresh:
		fresh = append(waiting, fresh...)
	default:
	}
	p.fresh <- fresh // has room: only Run sends
}

// wake makes one receive from the channel succeed, now or later.
func wake(ch chan struct{}) {
	select {
	case ch <- struct{}{}:
	default: // it was told, and has not looked yet
	}
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
	if !ok {
		p.counters.malformed.Inc()
		return
	}
	if (*p.own.Load())[m.from] || !m.to.group() && m.to != p.key.mac {
		return
	}
	p.heard.Add(1)
	if c := p.hear(m); c.kind != nothing {
		p.contested.put(c)
	}
}

// hear answers what asks for a VIP of ours, and judges what claims one. Nobody
// withdraws a VIP meanwhile.
func (p *port) hear(m message) contention {
	p.answering.enter()
	defer p.answering.leave()
	owned := *p.owned.Load()
	if o := owned[m.claims]; o != nil {
		return p.judge(o, m) // who claims it does not want an answer
	}
	if o := owned[m.asks]; o != nil {
		return p.reply(o, m)
	}
	return contention{}
}

// judge decides what follows from somebody else's claim. It may be that of a
// speaker of this cluster; then the better claim counts, on both sides, once the
// speaker has answered a question.
func (p *port) judge(o *ownership, m message) contention {
	h, held := p.holds.get(o)
	switch {
	case o.leaving.claimed(p.key): // by the node that it goes to
	case m.answers && m.seal == (seal.Seal{}): // a speaker, perhaps, that takes our kernel for a client
	case !p.knows(m, o):
		if p.report(o, m, !held) && !held {
			return contention{ownership: o, kind: foreign}
		}
	case m.seal.Nonce() != (seal.Nonce{}):
		return p.believe(o, m)
	case m.seal.Outranks(p.statement(o).seal):
		return p.doubt(o, m)
	case !held || h.reason == Probing:
		return contention{ownership: o, kind: lower}
	}
	return contention{}
}

// reply answers who asks for a VIP.
func (p *port) reply(o *ownership, m message) contention {
	if o.leaving.left(p.key) {
		return contention{}
	}
	h, held := p.holds.get(o)
	known := m.probes() && p.knows(m, o)
	if o.leaving.is() && (held || known) {
		return contention{} // a speaker that yields to us is to have it
	}
	if held {
		// Who looks at the same time whether the VIP is in use wants it too
		// (RFC 5227 section 2.1.1, RFC 4862 section 5.4.3).
		switch {
		case !m.probes():
		case !known:
			p.report(o, m, false)
		case m.seal.Nonce() != (seal.Nonce{}): // who is silent has no answer
		case m.seal.Outranks(p.statement(o).seal) && h.reason != Yielded && p.holds.yield(o, m.from):
			return contention{ownership: o, kind: yielded}
		}
		return contention{}
	}
	p.counters.requests.Inc()
	s := statement{self: p.key.mac, vip: o.vip}
	if m.probes() && m.seal != (seal.Seal{}) { // a speaker's
		s = p.statement(o)
		if n := m.seal.Nonce(); known && n != (seal.Nonce{}) {
			s.seal = p.seals.Numbered(o.vip, p.key.mac, o.home.Load(), n)
		}
	}
	if p.send(p.key.protocol.answer(s, m)) {
		p.counters.replies.Inc()
	}
	if m.takes && !known {
		p.report(o, m, true)
	}
	return contention{}
}

// knows reports whether the sender is a speaker of this cluster.
func (p *port) knows(m message, o *ownership) bool {
	return m.seal != (seal.Seal{}) && p.seals.Valid(m.seal, o.vip, m.from)
}

// report reports a conflict, and returns whether it is the first one for the
// VIP in some time.
func (p *port) report(o *ownership, m message, announced bool) (first bool) {
	p.counters.conflicts.Inc()
	p.holds.lose(o, m.from)
	return p.conflict(o, Conflict{
		VIP: o.vip, Interface: p.key.name, HardwareAddr: m.from.String(), OtherCluster: m.seal != (seal.Seal{}), Announced: announced,
	})
}

// hold is why a port is silent about a VIP that the node owns.
type hold struct {
	reason Reason
	by     mac  // who has it; zero while that is not known
	heard  bool // a claim since the probes began
	polls  int
	missed int // the last polls, in a row
}

// holds are those of a port. They are few, and mostly none: then a look costs
// no lock.
type holds struct {
	n  atomic.Int64
	mu sync.Mutex
	of map[*ownership]hold
}

func (h *holds) get(o *ownership) (hold, bool) {
	if h.n.Load() == 0 {
		return hold{}, false
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	held, ok := h.of[o]
	return held, ok
}

// change changes or ends the hold of a VIP; keep says which.
func (h *holds) change(o *ownership, f func(hold, bool) (_ hold, keep bool)) {
	h.mu.Lock()
	defer h.mu.Unlock()
	before, held := h.of[o]
	after, keep := f(before, held)
	switch {
	case keep && h.of == nil:
		h.of = map[*ownership]hold{o: after}
	case keep:
		h.of[o] = after
	default:
		delete(h.of, o)
	}
	h.n.Store(int64(len(h.of)))
}

// begin is called before the probes of a new VIP.
func (h *holds) begin(o *ownership) {
	h.change(o, func(hold, bool) (hold, bool) { return hold{reason: Probing}, true })
}

// recheck is called before probes that look whether somebody is gone.
func (h *holds) recheck(o *ownership) {
	h.change(o, func(b hold, held bool) (hold, bool) { b.heard = false; return b, held })
}

// lose notes that a foreign host has a VIP that is being probed.
func (h *holds) lose(o *ownership, by mac) {
	if _, held := h.get(o); !held {
		return
	}
	h.change(o, func(b hold, held bool) (hold, bool) {
		if held && b.reason != Yielded {
			b.reason, b.by, b.heard = AddressConflict, by, true
		}
		return b, held
	})
}

// forget ends the hold of a VIP that is withdrawn.
func (h *holds) forget(o *ownership) {
	if _, held := h.get(o); held {
		h.change(o, func(hold, bool) (hold, bool) { return hold{}, false })
	}
}

// free ends the hold, unless a claim was heard, and reports whether it did.
func (h *holds) free(o *ownership) (freed bool) {
	h.change(o, func(b hold, held bool) (hold, bool) { freed = held && !b.heard; return b, held && !freed })
	return freed
}

// yield leaves the VIP to another speaker, and reports whether that is new.
func (h *holds) yield(o *ownership, by mac) (fresh bool) {
	h.change(o, func(b hold, held bool) (hold, bool) {
		fresh = !held || b.reason != Yielded
		if fresh {
			b = hold{reason: Yielded}
		}
		b.by, b.missed = by, 0
		return b, true
	})
	return fresh
}

// poll counts a poll as missed, until the answer comes, and ends the hold
// after too many of them. ok is not set if there is nothing to poll.
func (h *holds) poll(o *ownership) (after hold, ok bool) {
	h.change(o, func(b hold, held bool) (hold, bool) {
		ok = held && b.reason == Yielded
		if ok {
			b.polls, b.missed = b.polls+1, b.missed+1
		}
		after = b
		return b, held && !(ok && b.missed > maxMissed)
	})
	return after, ok
}

// count returns how many VIPs are held for each reason.
func (h *holds) count() map[Reason]int {
	h.mu.Lock()
	defer h.mu.Unlock()
	n := map[Reason]int{}
	for _, held := range h.of {
		n[held.reason]++
	}
	return n
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
