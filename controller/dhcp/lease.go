package dhcp

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"time"

	"github.com/insomniacslk/dhcp/dhcpv4"
)

const (
	// Delays between retransmissions double from the first to the last one,
	// give or take the jitter (RFC 2131 section 4.1).
	firstDelay = 4 * time.Second
	lastDelay  = 64 * time.Second
	jitter     = time.Second
	// requestAttempts is how often a REQUEST is sent before starting over: about a
	// minute (section 3.1.5).
	requestAttempts = 4
	// refusedAttempts is how often an address from before the start is asked for although a
	// server refuses it, because that may be another server than the one that leased it.
	refusedAttempts = 2
	// slowDelay is the least time between REQUESTs for a lease that still
	// runs (section 4.4.5).
	slowDelay = time.Minute
	// fuzz is the part of the time before T1 that is cut at random, so that
	// leases granted together are not extended together (section 4.4.5).
	fuzz = 0.1
	// settleTime is given to a switch whose port came up.
	settleTime = time.Second
	// turnTime is how long others wait with a DISCOVER for an answer to one:
	// dnsmasq pings an address for three seconds before it offers it.
	turnTime = 3500 * time.Millisecond
	// turnMemory is how long it is known when a namespace had its last turn.
	turnMemory = time.Hour
	// silent is how many DISCOVERs in a row stay unanswered until every waiting client has an
	// error.
	silent = 2
)

// phase is a state of RFC 2131 figure 5. There is no INIT: a client that waits for nothing is
// selecting and due.
type phase string

const (
	idle       phase = ""           // asks for nothing
	rebooting  phase = "rebooting"  // asks for the address that it had
	selecting  phase = "selecting"  // asks for any address
	requesting phase = "requesting" // asks for the address that was offered
	bound      phase = "bound"
	renewing   phase = "renewing"  // asks the server to extend the lease
	rebinding  phase = "rebinding" // asks all servers to extend the lease
)

// client is where a client's exchange with servers stands, and its lease.
type client struct {
	Client
	phase phase
	// due is when there is something to do.
	due time.Time

	// The exchange. xid is known to machine.byXID unless the phase is bound.
	xid   dhcpv4.TransactionID
	began time.Time
	asked time.Time // of the first REQUEST with this xid
	tries int       // messages without an answer
	// refused is set when some server refused the address that is being confirmed.
	refused bool
	// complained is set when an answer to the last message led to an error.
	complained bool
	// failures is how many times in a row a server refused what it had offered, or took a lease
	// away soon.
	failures int

	// discovered is the time since began that the last DISCOVER carried.
	discovered time.Duration
	offer      *answer

	lease *Lease
	via   mac // the server of the lease or its relay
	lost  netip.Addr
	err   error // what went wrong last; nil once there is a lease
}

// machine decides what is sent to servers, and when, for all clients. It does no I/O, and the
// caller hands it the time.
//
// DISCOVERs take turns. Servers do not set an address aside when they offer it, and some
// (dnsmasq) choose it by the hardware address, which is the same for all clients here: clients
// that asked together would be offered the same address, and all but one would then be refused
// it. Namespaces take turns, too, as each DISCOVER may take seconds. So do clients that have an address
// and those that have none: a server decides how often leases are extended.
type machine struct {
	name string // of the interface
	log  *slog.Logger
	// own are the addresses of the interface.
	own []netip.Prefix

	byID     map[string]*client
	byXID    map[dhcpv4.TransactionID]*client
	released []*message // to be sent

	turn     *client // who DISCOVERed last and has not finished
	turnEnds time.Time
	// turns are when the namespaces DISCOVERed last, also those without clients: these may come anew.
	turns map[string]time.Time
	// kept is set if the last message was about an address that a client has or had: the next may be about a new one.
	kept bool
	// unanswered counts the DISCOVERs of all clients since the last OFFER.
	unanswered int
	// heard is when a server last granted something.
	heard time.Time

	changed bool // Source.Changed is to be notified
	// extends is set if only the leases that there are are extended.
	extends bool
}

func newMachine(name string, log *slog.Logger) *machine {
	return &machine{name: name, log: log, byID: map[string]*client{}, byXID: map[dhcpv4.TransactionID]*client{},
		turns: map[string]time.Time{}}
}

// set replaces the clients.
func (t *machine) set(now time.Time, want []Client) {
	keep := map[string]bool{}
	for _, c := range want {
		keep[c.ID] = true
		if !c.Last.Is4() {
			c.Last = netip.Addr{}
		}
		s := t.byID[c.ID]
		if s == nil {
			s = &client{}
			t.byID[c.ID] = s
			t.changed = true
		} else if s.phase != rebooting || s.Last == c.Last {
			s.Client = c
			continue
		}
		s.Client = c
		t.released = slices.DeleteFunc(t.released, func(m *message) bool { return m.client.ID == c.ID })
		switch {
		case c.ID == "" || len(c.ID) > maxID:
			s.err = fmt.Errorf("client identifier of %d bytes, must have 1 to %d", len(c.ID), maxID)
		case c.Last.IsValid():
			t.begin(s, rebooting, now)
		default:
			t.begin(s, selecting, now)
		}
	}
	for id, s := range t.byID {
		if !keep[id] {
			t.remove(s)
		}
	}
	maps.DeleteFunc(t.turns, func(_ string, last time.Time) bool { return now.Sub(last) > turnMemory })
}

// extendOnly ends the exchanges of clients without a lease. From now on none begins.
func (t *machine) extendOnly() {
	t.extends = true
	for _, s := range t.byID {
		if s.lease == nil {
			t.end(s)
			s.phase = idle
		}
	}
}

// remove forgets a client and gives its lease back.
func (t *machine) remove(s *client) {
	t.end(s)
	delete(t.byID, s.ID)
	t.changed = true
	if l := s.lease; l != nil {
		t.log.Info("releasing a lease", "client", s.ID, "address", l.Addr, "server", l.Server)
		t.released = append(t.released, &message{
			kind: dhcpv4.MessageTypeRelease, xid: newXID(), client: s.Client, server: l.Server,
			release: &release{l.Addr, s.via},
		})
	}
}

// release returns a release to be sent, nil if there is none.
func (t *machine) release() (m *message) {
	if len(t.released) > 0 {
		m, t.released = t.released[0], t.released[1:]
	}
	return m
}

// begin starts an exchange. There is no random delay before the first message. Section 4.4.1
// has one for hosts that start together, but here one process asks for all.
func (t *machine) begin(s *client, p phase, now time.Time) {
	t.end(s)
	if t.extends && s.lease == nil {
		s.phase = idle
		return
	}
	for s.xid = newXID(); t.byXID[s.xid] != nil; s.xid = newXID() {
	}
	t.byXID[s.xid] = s
	s.phase, s.due, s.began, s.asked, s.tries, s.refused = p, now, now, time.Time{}, 0, false
}

// end ends the exchange, if there is one. Later answers are ignored.
func (t *machine) end(s *client) {
	if t.byXID[s.xid] == s {
		delete(t.byXID, s.xid)
	}
	if t.turn == s {
		t.turn = nil
	}
}

func newXID() (xid dhcpv4.TransactionID) {
	binary.BigEndian.PutUint32(xid[:], rand.Uint32())
	return xid
}

// hurry makes every client that waits for an answer ask again soon, because the way to the
// servers was interrupted.
func (t *machine) hurry(now time.Time) {
	for _, s := range t.byID {
		if soon := now.Add(settleTime); s.tries > 0 || s.due.Before(soon) {
			s.due, s.tries = soon, 0
		}
	}
	t.turn = nil
	t.changed = true
}

// act advances the client that is due. It returns a message to send, which may be nil, and
// when to call it again. The zero time: not before something changed.
func (t *machine) act(now time.Time) (m *message, again time.Time) {
	for {
		if m := t.release(); m != nil {
			return m, now
		}
		s, due := t.next(now)
		if s == nil {
			return nil, due
		}
		if !t.advance(s, now) {
			return t.ask(s, now), now
		}
	}
}

// next returns the client that is due now, or nil and when the next one is due. It looks at
// all clients: a thousand cost some microseconds, and there are at most two hundred messages
// in a second.
func (t *machine) next(now time.Time) (first *client, due time.Time) {
	for _, s := range t.byID {
		at := s.due
		if s.phase == selecting && t.turn != nil && at.Before(t.turnEnds) {
			at = t.turnEnds
		}
		switch {
		case s.phase == idle:
		case !at.After(now):
			if first == nil || t.before(s, first) {
				first = s
			}
		case due.IsZero() || at.Before(due):
			due = at
		}
	}
	return first, due
}

// before orders two clients that are both due. A client that was offered an address comes
// first, so that it takes the address before another is offered it. Then those that have an address and
// those that ask for any take turns. Of a namespace, the client that
// has asked in vain most often comes last, so that an exhausted range does not keep others waiting.
func (t *machine) before(a, b *client) bool {
	rank := func(s *client) int {
		switch {
		case s.phase == requesting:
			return 0
		case (s.phase == selecting) == t.kept:
			return 1
		}
		return 2
	}
	turns := 0
	if a.phase == selecting {
		turns = t.turns[a.Namespace].Compare(t.turns[b.Namespace])
	}
	return cmp.Or(cmp.Compare(rank(a), rank(b)), turns, cmp.Compare(a.tries, b.tries), a.due.Compare(b.due), cmp.Compare(a.ID, b.ID)) < 0
}

// advance makes the transition that the time asks for, and reports whether
// there was one.
func (t *machine) advance(s *client, now time.Time) bool {
	l := s.lease
	switch {
	case l != nil && !now.Before(l.Expires):
		why := fmt.Errorf("no server extended it since %s", clock(s.began))
		if s.phase == bound {
			why = errors.New("it was over before a server could be asked to extend it, so let the server give longer leases")
		}
		t.lose(s, now, fmt.Errorf("the lease of %v ended at %s: %w", l.Addr, clock(l.Expires), why))
	case l != nil && !now.Before(l.Rebind) && s.phase != rebinding:
		began, tries := s.began, s.tries
		if s.phase == bound {
			began, tries = now, 0
		}
		t.begin(s, rebinding, now)
		s.began, s.tries = began, tries // it is the same silence
	case l != nil && !now.Before(l.Renew) && s.phase == bound:
		t.begin(s, renewing, now)
	case l == nil && s.refused && s.tries >= refusedAttempts && s.phase == rebooting:
		t.begin(s, selecting, now)
	case l == nil && s.tries >= requestAttempts && s.phase != selecting:
		s.complained = false
		t.complain(s, t.silence(s, 0))
		t.begin(s, selecting, now)
	default:
		return false
	}
	return true
}

// lapse replaces act while nothing can be sent. Leases still end. It returns when to call it
// again, or the zero time.
func (t *machine) lapse(now time.Time) (again time.Time) {
	for _, s := range t.byID {
		for s.lease != nil && t.advance(s, now) {
			t.changed = true
		}
		if s.lease == nil {
			continue
		}
		for _, at := range []time.Time{s.lease.Renew, s.lease.Rebind, s.lease.Expires} {
			if at.After(now) && (again.IsZero() || at.Before(again)) {
				again = at
			}
		}
	}
	return again
}

// ask returns the message that the phase asks for.
func (t *machine) ask(s *client, now time.Time) *message {
	s.complained, t.kept = false, s.phase != selecting && s.phase != requesting
	if s.tries == 1 {
		t.changed = true // from now on it is an error
		t.log.Debug("no answer from a DHCP server", "client", s.ID, "phase", string(s.phase))
	}
	if s.lease != nil {
		return t.extend(s, now)
	}
	s.tries++
	delay := min(firstDelay<<min(s.tries-1, 8), lastDelay)
	s.due = now.Add(delay - jitter + rand.N(2*jitter))
	m := &message{kind: dhcpv4.MessageTypeRequest, xid: s.xid, elapsed: now.Sub(s.began), client: s.Client, requested: s.Last}
	switch s.phase {
	case selecting:
		m.kind, s.discovered = dhcpv4.MessageTypeDiscover, m.elapsed
		t.turn, t.turnEnds, t.turns[s.Namespace] = s, now.Add(turnTime), now
		if t.unanswered++; t.unanswered == silent {
			t.changed = true
			t.log.Warn("no DHCP server offers an address", "client", s.ID)
		}
		return m
	case requesting:
		m.requested, m.server = s.offer.addr, s.offer.server
		m.elapsed = s.discovered // section 3.1.3
	}
	if s.asked.IsZero() {
		s.asked = now
	}
	return m
}

// extend returns the REQUEST for an address that is leased. Each is an exchange of its own, so
// that it is known which REQUEST an answer belongs to: the lease counts from its time (section
// 4.4.1).
func (t *machine) extend(s *client, now time.Time) *message {
	began, tries := s.began, s.tries
	t.begin(s, s.phase, now)
	s.began, s.asked, s.tries = began, now, tries+1
	end := s.lease.Expires
	if s.phase == renewing {
		end = s.lease.Rebind
	}
	s.due = now.Add(min(max(end.Sub(now)/2, slowDelay), end.Sub(now)))
	return &message{kind: dhcpv4.MessageTypeRequest, xid: s.xid, elapsed: now.Sub(began), client: s.Client, requested: s.lease.Addr}
}

// receive handles an answer. It ignores an answer to somebody else and one that does not fit
// the question, because anybody on the segment can send such.
func (t *machine) receive(now time.Time, a answer) {
	s := t.byXID[a.xid]
	if s == nil || a.clientID != nil && !bytes.Equal(a.clientID, clientID(s.ID)) { // RFC 6842
		return
	}
	if a.err == nil && a.kind != dhcpv4.MessageTypeNak && s.lease == nil {
		a.err = t.refuse(s, a.addr)
	}
	if a.kind == dhcpv4.MessageTypeOffer {
		t.changed = t.changed || t.unanswered >= silent
		t.unanswered = 0
	}
	switch {
	case s.phase == requesting && a.server != s.offer.server, s.phase == renewing && a.server != s.lease.Server:
		// Nobody else was asked.
	case a.err != nil:
		t.complain(s, fmt.Errorf("the answer of DHCP server %v is unusable: %w", a.server, a.err))
	case a.kind == dhcpv4.MessageTypeOffer && s.phase == selecting && t.requested(a.addr):
		s.due = now.Add(jitter) // the server will offer another
	case a.kind == dhcpv4.MessageTypeOffer && s.phase == selecting:
		s.phase, s.due, s.tries, s.offer = requesting, now, 0, &a
		if t.turn == s {
			t.turnEnds = now.Add(turnTime)
		}
	case a.kind == dhcpv4.MessageTypeAck && !s.asked.IsZero() && a.addr == s.wants():
		t.grant(s, a)
	case a.kind == dhcpv4.MessageTypeNak && !s.asked.IsZero():
		t.deny(s, a, now)
	}
}

// requested reports whether a client is about to take an offered address.
func (t *machine) requested(a netip.Addr) bool {
	for _, s := range t.byID {
		if s.phase == requesting && s.offer.addr == a {
			return true
		}
	}
	return false
}

// wants returns the address that the client REQUESTs.
func (s *client) wants() netip.Addr {
	switch s.phase {
	case rebooting:
		return s.Last
	case requesting:
		return s.offer.addr
	}
	return s.lease.Addr
}

// refuse returns why a client cannot have an address.
func (t *machine) refuse(s *client, a netip.Addr) error {
	if slices.ContainsFunc(t.own, func(p netip.Prefix) bool { return p.Addr() == a }) {
		return fmt.Errorf("%v is this node's own address on interface %q", a, t.name)
	}
	for _, other := range t.byID {
		if other != s && other.lease != nil && other.lease.Addr == a {
			return fmt.Errorf("%v is leased to %q already: a server that distinguishes clients by hardware address, not by client identifier "+
				"(option 61), can lease only one VIP", a, other.ID)
		}
	}
	return nil
}

// grant records a lease, new or extended.
func (t *machine) grant(s *client, a answer) {
	// RFC 2131 section 4.4.5: T1 < T2 < lease, by default at 0.5 and 0.875.
	rebind := a.rebind
	if rebind <= 0 || rebind >= a.lease {
		rebind = a.lease / 8 * 7
	}
	renew := a.renew
	if renew <= 0 || renew >= rebind {
		renew = min(a.lease/2, rebind)
	}
	renew -= time.Duration(fuzz * rand.Float64() * float64(renew))

	old := s.lease
	l := &Lease{
		Addr: a.addr, Subnet: a.subnet, Server: a.server,
		Acquired: s.asked, Renew: s.asked.Add(renew), Rebind: s.asked.Add(rebind), Expires: s.asked.Add(a.lease),
	}
	if old != nil {
		l.Acquired = old.Acquired
	}
	if last := s.Last; old == nil && last.IsValid() && last != a.addr {
		s.lost = last
	}
	if s.lost == a.addr {
		s.lost = netip.Addr{}
	}
	if old == nil || s.tries > 1 || s.err != nil {
		t.changed = true
		t.log.Info("address leased", "client", s.ID, "address", l.Addr, "server", l.Server, "expires", l.Expires)
	}
	t.end(s)
	s.phase, s.due, s.tries, s.err = bound, l.Renew, 0, nil
	s.lease, s.via, s.offer = l, a.via, nil
	t.heard = s.asked
}

// deny handles a NAK: the client starts over (section 3.1.5). It starts over at once if it
// lost the address that it had. If a server refuses what it offered, it waits longer each
// time.
//
// Nobody knows which server leased an address from before the start, and any server on the
// segment may refuse it. The client therefore goes on asking for it for some seconds, and an
// ACK counts. After that it asks for any address. It gives up the address that it had when a
// server has leased it another.
func (t *machine) deny(s *client, a answer, now time.Time) {
	addr := s.wants()
	err := fmt.Errorf("DHCP server %v refused %v", a.server, addr)
	if a.text != "" {
		err = fmt.Errorf("%w: %q", err, a.text)
	}
	if s.phase == requesting {
		t.complain(s, err)
		t.startOver(s, now, 0)
		return
	}
	if s.phase == rebooting {
		s.refused = true
		t.complain(s, fmt.Errorf("%w; asking again, because another server may confirm it", err))
		return
	}
	t.lose(s, now, err)
}

// lose ends the lease.
func (t *machine) lose(s *client, now time.Time, err error) {
	l := s.lease
	s.lost, s.Last, s.lease = l.Addr, l.Addr, nil
	t.log.Warn("address lost", "client", s.ID, "err", err)
	s.err, t.changed = err, true
	t.startOver(s, now, now.Sub(l.Acquired))
}

// startOver makes the client ask for any address: at once if it had one for a while, and otherwise
// later each time. A server that gives and takes would have the Service written without end.
func (t *machine) startOver(s *client, now time.Time, had time.Duration) {
	if had >= lastDelay {
		s.failures = 0
	} else {
		now = now.Add(min(firstDelay<<min(s.failures, 8), lastDelay) - rand.N(firstDelay))
		s.failures++
	}
	t.begin(s, selecting, now)
}

// complain records an error, and logs it once. Of the answers to one message only the first
// causes an error, because anybody on the segment can send any number of them.
func (t *machine) complain(s *client, err error) {
	if !s.complained && (s.err == nil || s.err.Error() != err.Error()) {
		t.log.Warn("no lease yet", "client", s.ID, "err", err)
		s.err, s.complained, t.changed = err, true, true
	}
}
