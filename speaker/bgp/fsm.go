package bgp

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"net/netip"
	"slices"
	"time"

	packet "github.com/osrg/gobgp/v3/pkg/packet/bgp"
)

const (
	// openTimeout is how long the router may take for its OPEN. RFC 4271
	// section 8.2.2 suggests four minutes, in which a router that accepts
	// connections and does no more would keep us from trying again.
	openTimeout = 20 * time.Second
	// sendHold is for how many hold times the router may leave unread what is sent to it. RFC
	// 9687 suggests at least eight minutes, in which the router would send traffic for routes
	// that it ought to have lost.
	sendHold = 2
	// sendTimeout is the same without a hold time.
	sendTimeout = 8 * time.Minute
	// lastWord is how long a NOTIFICATION may take.
	lastWord = time.Second
	// nextHopsEvery is how often the node's addresses are looked up again.
	nextHopsEvery = 5 * time.Second
	// refreshPause is the least time between two answers to requests for all routes of a family. All requests that come
	// meanwhile get the second one: a router that asks without end must not keep a processor busy.
	refreshPause = time.Second
)

// runFSM is one session from its connection to its end. It sends its progress to
// steps.
func (s *session) runFSM(ctx context.Context, t *target, from *incoming, ours []byte) error {
	conn, router, err := s.connect(ctx, t, from)
	if t.Peer.Interface != "" {
		defer s.announcer.discovery.doubt(t.Peer.Interface, router)
	}
	if err != nil {
		return err
	}
	defer conn.Close()
	var open []byte
	if from != nil {
		open = from.open
	}
	n, err := s.open(ctx, t, conn, router, ours, open)
	if err != nil {
		s.sendNotification(conn, err, n)
		return err
	}
	e := encoding{internal: n.internal, localASN: t.LocalASN, fourOctet: n.fourOctet}
	if err := s.lookUpNextHops(&e, conn, n); err != nil {
		return err
	}
	up := Peer{
		State: Established, Address: router, LocalAddress: localOf(conn), PeerASN: n.peerASN, LocalASN: t.LocalASN, RouterID: n.peerID,
		HoldTime: n.holdTime, Keepalive: n.keepalive(t.Peer.KeepaliveInterval), Families: n.families(), Capabilities: n.capabilities(),
	}
	if !s.progress(ctx, up) {
		err = context.Cause(ctx)
	} else {
		if t.Peer.Interface != "" {
			s.announcer.discovery.confirm(t.Peer.Interface, router)
		}
		err = s.established(ctx, conn, n, e)
	}
	s.sendNotification(conn, err, n)
	return err
}

func localOf(conn net.Conn) netip.Addr {
	return conn.LocalAddr().(*net.TCPAddr).AddrPort().Addr().Unmap()
}

// lookUpNextHops sets the next hops by the addresses that the node has now.
func (s *session) lookUpNextHops(e *encoding, conn net.Conn, n negotiated) error {
	local := localOf(conn)
	return s.announcer.options.Inside(func() error {
		addrs, err := s.announcer.options.NextHops(local)
		if err != nil {
			return err
		}
		var beside nextHopAddrs
		for _, addr := range addrs {
			beside.take(addr)
		}
		e.nextHops(local, beside, n.ipv4OverIPv6)
		return nil
	})
}

// progress publishes a step. It returns false if the session has to end instead.
func (s *session) progress(ctx context.Context, to Peer) bool {
	select {
	case s.steps <- to:
		return true
	case <-ctx.Done():
		return false
	}
}

// connect returns a connection with the router, and the router's address.
func (s *session) connect(ctx context.Context, t *target, from *incoming) (net.Conn, netip.Addr, error) {
	router := t.Peer.Address
	if from != nil {
		err := setTTLOf(from.conn, router, t)
		if err != nil {
			from.conn.Close()
		}
		return from.conn, router, err
	}
	s.progress(ctx, Peer{State: Connect, Address: router})
	if t.Peer.Interface != "" {
		found, err := s.announcer.discovery.find(ctx, t.Peer.Interface)
		if err != nil {
			return nil, router, &failure{cause: causeConnection, text: err.Error()}
		}
		router = found
		s.progress(ctx, Peer{State: Connect, Address: router})
	}
	conn, err := dial(ctx, s.announcer.options.Inside, t, router, max(t.Peer.ConnectRetry, time.Second))
	if err != nil {
		return nil, router, connectFailure(t, err)
	}
	return conn, router, nil
}

// open exchanges OPENs. theirs is the router's OPEN if they have been exchanged already.
func (s *session) open(ctx context.Context, t *target, conn net.Conn, router netip.Addr, ours, theirs []byte) (negotiated, error) {
	stop := context.AfterFunc(ctx, func() { conn.Close() })
	defer stop()
	n, err := s.exchange(ctx, t, conn, router, ours, theirs)
	switch {
	case ctx.Err() != nil:
		err = context.Cause(ctx)
	case isTimeout(err):
		text := "the router accepts connections and does not speak BGP: no OPEN came"
		if t.Peer.Passive {
			text = "the router opened a connection and does not speak BGP: no OPEN came"
		}
		switch {
		case n.peerASN != 0:
			text = "the router introduced itself and does not hear this node: no KEEPALIVE came. Perhaps it has TTL security and this node has not"
		case t.Peer.TTLSecurity > 0:
			text += ". Perhaps this node has TTL security and the router has not"
		}
		err = &failure{cause: causeHoldTimer, text: text, notification: notification(packet.BGP_ERROR_HOLD_TIMER_EXPIRED, 0, nil)}
	}
	return n, err
}

func (s *session) exchange(ctx context.Context, t *target, conn net.Conn, router netip.Addr, ours,
	theirs []byte) (n negotiated, err error) {
	if err := conn.SetDeadline(time.Now().Add(openTimeout)); err != nil {
		return n, err
	}
	if theirs == nil {
		if _, err := conn.Write(ours); err != nil {
			return n, err
		}
		s.progress(ctx, Peer{State: OpenSent, Address: router})
		m, err := expect(conn, packet.BGP_MSG_OPEN, packet.BGP_ERROR_SUB_RECEIVE_UNEXPECTED_MESSAGE_IN_OPENSENT_STATE)
		if err != nil {
			return n, err
		}
		theirs = m.body
	}
	if n, err = negotiate(t, theirs); err != nil {
		return n, err
	}
	if n.holdTime > 0 && n.holdTime < openTimeout {
		if err := conn.SetDeadline(time.Now().Add(n.holdTime)); err != nil {
			return n, err
		}
	}
	if _, err := conn.Write(keepalive); err != nil {
		return n, err
	}
	s.progress(ctx, Peer{State: OpenConfirm, Address: router})
	_, err = expect(conn, packet.BGP_MSG_KEEPALIVE, packet.BGP_ERROR_SUB_RECEIVE_UNEXPECTED_MESSAGE_IN_OPENCONFIRM_STATE)
	return n, err
}

// sendNotification sends the router the reason for the end of the session, if it is to be sent
// one, and waits until the router has closed the connection. If we closed a connection with
// unread data, the kernel would discard the message. If the routes are to stay, the router must
// also see the end of the session before the end of BFD, which it may take for a failure, as FRR
// does, and drop the routes.
func (s *session) sendNotification(conn net.Conn, err error, n negotiated) {
	f := brokenConnection(err)
	if f.notification == nil || conn.SetDeadline(time.Now().Add(lastWord)) != nil {
		return
	}
	if m := f.encode(n); m != nil {
		if _, err := conn.Write(m); err != nil {
			return
		}
	}
	if conn.(*net.TCPConn).CloseWrite() == nil {
		io.Copy(io.Discard, conn) //nolint:errcheck // it ends one way or another
	}
}

// established keeps a session that is up. It sends changes and keepalives, and reads, until
// one of these fails or ctx ends.
func (s *session) established(ctx context.Context, conn net.Conn, n negotiated, e encoding) error {
	ctx, cancel := context.WithCancelCause(ctx)
	s.rib.start()
	defer s.rib.stop()
	read := make(chan struct{})
	go func() {
		defer close(read)
		cancel(s.read(ctx, conn, n.holdTime))
	}()
	stop := context.AfterFunc(ctx, func() {
		conn.SetWriteDeadline(time.Now().Add(lastWord)) //nolint:errcheck // a closed connection is as good
	})
	w := &writer{session: s, ctx: ctx, conn: conn, timeout: n.holdTime * sendHold, negotiated: n, encoding: e, sent: time.Now()}
	if n.holdTime == 0 {
		w.timeout = sendTimeout
	}
	cancel(w.run())
	if w.broken {
		conn.Close()
	}
	stop()
	conn.SetReadDeadline(time.Now()) //nolint:errcheck // a closed connection is as good
	<-read
	return context.Cause(ctx)
}

// read reads until the session fails or ctx ends.
func (s *session) read(ctx context.Context, conn net.Conn, holdTime time.Duration) error {
	buffered := bufio.NewReader(conn)
	heard := true
	for {
		if heard {
			var expires time.Time
			if holdTime > 0 {
				expires = time.Now().Add(holdTime)
			}
			if err := conn.SetReadDeadline(expires); err != nil {
				return err
			}
		}
		if ctx.Err() != nil { // the deadline that was to end this loop may be replaced by now
			return context.Cause(ctx)
		}
		m, err := readMessage(buffered)
		if isTimeout(err) {
			return &failure{cause: causeHoldTimer, text: fmt.Sprintf("hold timer expired: the router was not heard for %s", holdTime),
				notification: notification(packet.BGP_ERROR_HOLD_TIMER_EXPIRED, 0, nil)}
		}
		if err != nil {
			return err
		}
		if heard, err = s.handle(m); err != nil {
			return err
		}
	}
}

// handle takes a message of an established session, and reports whether the
// hold timer starts afresh (RFC 4271 section 8.2.2).
func (s *session) handle(m message) (heard bool, err error) {
	switch m.kind {
	case packet.BGP_MSG_KEEPALIVE:
		return true, nil
	case packet.BGP_MSG_UPDATE:
		prefixes, err := countPrefixes(m.body)
		s.received.Add(uint64(prefixes))
		return true, err
	case packet.BGP_MSG_NOTIFICATION:
		return false, notified(m.body)
	case packet.BGP_MSG_ROUTE_REFRESH: // RFC 2918: AFI, reserved, SAFI
		if m.body[3] == packet.SAFI_UNICAST && m.body[0] == 0 {
			s.rib.ask(m.body[1] == packet.AFI_IP)
		}
		return false, nil
	}
	return false, refuse(packet.BGP_ERROR_FSM_ERROR, packet.BGP_ERROR_SUB_RECEIVE_UNEXPECTED_MESSAGE_IN_ESTABLISHED_STATE, []byte{m.kind},
		"the router sent a message of type %d in a session that was up", m.kind)
}

// writer is the sending side of an established session.
type writer struct {
	*session
	ctx        context.Context
	conn       net.Conn
	timeout    time.Duration // of a message
	negotiated negotiated
	encoding   encoding
	looked     encoding  // as of the last look at the node's addresses
	sent       time.Time // when the last message was
	broken     bool      // half a message may be on its way: nothing can follow it
	until      time.Time // for writes after the end of ctx, once there is one
}

// run returns why the session failed, or ended.
func (w *writer) run() error {
	if err := w.flush(); err != nil {
		return err
	}
	if w.negotiated.restart {
		if err := w.endOfRIB(); err != nil {
			return err
		}
	}
	look := time.NewTicker(nextHopsEvery)
	defer look.Stop()
	asked4, asked6 := w.rib.asked4, w.rib.asked6
	var again4, again6 <-chan time.Time
	for {
		var due <-chan time.Time
		if w.negotiated.holdTime > 0 {
			due = time.After(time.Until(w.sent.Add(w.negotiated.keepalive(w.latest.Load().Peer.KeepaliveInterval))))
		}
		var err error
		select {
		case <-w.ctx.Done():
			if err := w.flush(); err != nil {
				return err
			}
			return context.Cause(w.ctx)
		case <-w.rib.wake:
			err = w.flush()
		case <-asked4:
			asked4, again4 = nil, time.After(refreshPause)
			w.rib.refresh(true)
			err = w.flush()
		case <-again4:
			asked4 = w.rib.asked4
		case <-asked6:
			asked6, again6 = nil, time.After(refreshPause)
			w.rib.refresh(false)
			err = w.flush()
		case <-again6:
			asked6 = w.rib.asked6
		case <-look.C:
			err = w.followNextHops()
		case <-due:
			err = w.write(keepalive)
		}
		if err != nil {
			return err
		}
	}
}

// followNextHops announces everything anew if it found other addresses of the node twice in a
// row: a new network configuration takes addresses away for a moment. Addresses of the family
// that the session does not run over come and go without ending it.
func (w *writer) followNextHops() error {
	now := w.encoding
	if w.lookUpNextHops(&now, w.conn, w.negotiated) != nil {
		return nil // what was known stays
	}
	lasts := now == w.looked
	if w.looked = now; !lasts || now == w.encoding {
		return nil
	}
	w.encoding = now
	w.log.Info("BGP next hops changed", "ipv4", w.encoding.next4, "ipv6", w.encoding.next6)
	w.rib.refresh(true)
	w.rib.refresh(false)
	return w.flush()
}

// deny returns why a prefix cannot be announced to the router, and nothing if it can.
func (w *writer) deny(prefix netip.Prefix) Withholding {
	agreed, next := w.negotiated.ipv6, w.encoding.next6
	if prefix.Addr().Is4() {
		agreed, next = w.negotiated.ipv4, w.encoding.next4
	}
	switch {
	case !agreed:
		return withheldFamily
	case !next.IsValid():
		return withheldNextHop
	}
	return ""
}

// flush sends what changed.
func (w *writer) flush() error {
	b := w.rib.take(w.deny)
	if n := len(b.forbidden); n > 0 {
		w.log.Warn("BGP holds back what bgpPermit of the configuration does not contain", "prefixes", n, "first", b.forbidden[0])
	}
	withdraw := func(prefixes []netip.Prefix) error { return w.updates(w.encoding.withdrawals(prefixes)) }
	return b.send(withdraw, func(a attributes, prefixes []netip.Prefix) error {
		messages, err := w.encoding.announcements(a.Value(), prefixes)
		if err != nil {
			if fresh := slices.IndexFunc(prefixes, func(p netip.Prefix) bool { return !b.tooLong[p] }); fresh >= 0 { // else it is logged
				w.log.Error("BGP cannot announce", "prefixes", len(prefixes), "first", prefixes[fresh], "err", err)
			}
			w.rib.reject(prefixes, withheldTooLong)
			messages, err = w.encoding.withdrawals(prefixes) // of what they were before
		}
		return w.updates(messages, err)
	})
}

// send sends the batch, one family after the other. Announcements come before withdrawals, because an aggregate may replace
// the prefixes in it, or they the aggregate.
func (b *batch) send(withdraw func([]netip.Prefix) error, announce func(attributes, []netip.Prefix) error) error {
	for _, is4 := range []bool{true, false} {
		for a, prefixes := range b.announce {
			if err := announce(a, ofFamily(prefixes, is4)); err != nil {
				return err
			}
		}
		if err := withdraw(ofFamily(b.withdraw, is4)); err != nil {
			return err
		}
	}
	return nil
}

func ofFamily(prefixes []netip.Prefix, is4 bool) []netip.Prefix {
	var of []netip.Prefix
	for _, p := range prefixes {
		if p.Addr().Is4() == is4 {
			of = append(of, p)
		}
	}
	return of
}

func (w *writer) updates(messages [][]byte, err error) error {
	if err != nil {
		return fmt.Errorf("encode UPDATE: %w", err)
	}
	for _, m := range messages {
		if err := w.write(m); err != nil {
			return err
		}
		w.updatesSent.Add(1)
	}
	return nil
}

// endOfRIB marks the end of the routes, for a router that may have kept old ones: those that
// were not announced again are gone (RFC 4724 section 2).
func (w *writer) endOfRIB() error {
	for _, f := range []struct {
		agreed bool
		family packet.RouteFamily
	}{{w.negotiated.ipv4, packet.RF_IPv4_UC}, {w.negotiated.ipv6, packet.RF_IPv6_UC}} {
		if !f.agreed {
			continue
		}
		m, err := packet.NewEndOfRib(f.family).Serialize()
		if err != nil {
			return err
		}
		if err := w.write(m); err != nil {
			return err
		}
	}
	return nil
}

// write sends a message. Once the session is to end, messages are sent only to a router that keeps the routes, so that it does not
// keep older ones. All of them take no longer than lastWord.
func (w *writer) write(m []byte) error {
	if err := w.conn.SetWriteDeadline(time.Now().Add(w.timeout)); err != nil {
		return err
	}
	if why := context.Cause(w.ctx); why != nil {
		if f := brokenConnection(why); !f.silent || !w.negotiated.restart {
			return why
		}
		if w.until.IsZero() {
			w.until = time.Now().Add(lastWord)
		}
		if err := w.conn.SetWriteDeadline(w.until); err != nil {
			return err
		}
	}
	_, err := w.conn.Write(m)
	switch {
	case err == nil:
		w.sent = time.Now()
		return nil
	case isTimeout(err):
		err = &failure{cause: causeSendTimer, text: fmt.Sprintf("send hold timer expired: the router has taken nothing for %s", w.timeout)}
	default: // the router may have sent the cause before
		select {
		case <-w.ctx.Done():
		case <-time.After(lastWord):
		}
	}
	w.broken = true
	return err
}
