// Package watch decides which of the other speakers are alive, within a tenth of a second in a fleet of any size.
//
// It is a deterministic machine: packets, the members and the time go in by Step, and packets and verdicts come out.
// It has one owner, waits for nothing, and sends nothing itself.
//
//	watch.go    Machine: its events and effects; heartbeats
//	members.go  the members, and who watches whom
//	verdict.go  from silence to a verdict
//	late.go     how late a speaker's own loop was
//	status.go   what a machine knows, for people
//	packet.go   what speakers send to each other, and the seal on it
//
// Three others watch each speaker, so that the cost for a speaker does not grow with the fleet. It sends each of
// them a heartbeat per interval. A watcher that misses two in a row asks the speaker itself. One that misses three
// asks the other watchers; those that are lost with the speaker are replaced by further members, which ask the
// speaker. If two of them hear nothing, each of the two sends the verdict to all members, and a member that has it
// from two takes the speaker for lost. One member alone, a liar or one with a broken link, takes nobody down, unless it forges
// the packets of another one: all have the same key.
//
// A speaker that was late takes nobody for silent because of what it could not see: it gives all others the time back. A speaker that
// sends late reports that in its next packets, and its watchers wait longer, within bounds.
package watch

import (
	"net/netip"
	"time"
)

// Timing has the intervals by which a speaker sends and takes others for silent.
type Timing struct {
	// Interval is the time between two heartbeats. The others learn it from each packet.
	Interval time.Duration
	// Missed is how many heartbeats in a row a speaker has missed that counts as silent.
	Missed int
}

// Allowance is how long a speaker that was not late lately may be silent.
func (t Timing) Allowance() time.Duration { return time.Duration(t.Missed)*t.Interval + slack }

// The bounds of an Interval, which a packet carries in milliseconds.
const (
	MinInterval = 10 * time.Millisecond
	MaxInterval = 250 * time.Millisecond
)

// Event is something that has happened. The events are Members, *Received and Due.
type Event interface{ event() }

// Members replaces the members and the timing. A member that has started anew has another session. The speaker
// itself is a member without being listed. A member that was lost stays lost until it was not listed once.
type Members struct {
	List   []Member
	Timing Timing
}

// Received is a packet that arrived with a valid seal.
type Received struct {
	Packet Packet
	From   netip.AddrPort
	// At is when the packet arrived at this node, which may be a while before it is read.
	At time.Time
}

// Due has the machine do what is due. All packets that had arrived by then are steps before it, unless there were more
// than can be read: Flooded.
type Due struct{ Flooded bool }

func (Members) event()   {}
func (*Received) event() {}
func (Due) event()       {}

// Effects are what follows from a step. They are valid until the next one.
type Effects struct {
	Packets []Outgoing
	// Lost are the members that count as lost from now on.
	Lost []Verdict
	// Replayed is set if the packet was received before, or comes from another address than the member's.
	Replayed bool
}

// Outgoing is a packet to send.
type Outgoing struct {
	To      netip.AddrPort
	Session uint64 // of the receiver
	Packet  Packet
}

// Verdict is about a member that is lost.
type Verdict struct {
	Member
	// Silence is how long this speaker has not heard from the member. Zero: it did not watch the member.
	Silence time.Duration
	// Alone is set if nobody answers this speaker at all.
	Alone bool
}

// Machine is the failure detector of one speaker.
type Machine struct {
	self     *member
	timing   Timing
	members  []*member // all, this speaker included, by name
	sessions map[uint64]*member
	watched  []*member // those that this speaker watches
	doubted  []*member // those with a doubt
	verdicts []announcement
	late     lateness  // what the others are to allow for
	hour     lateness  // for people
	losses   []Loss    // the last ones
	accused  uint64    // how often others have taken this speaker for lost
	next     time.Time // of the next heartbeats; zero: now, and that is not late
	sequence uint64    // of the last packet
	now      time.Time
	out      Effects

	accusedAt time.Time
}

// New returns a machine that is due at once.
func New(self Member, timing Timing, now time.Time) *Machine {
	m := &Machine{self: newMember(self), timing: timing, now: now}
	m.late, m.hour = newLateness(2, lateWindow), newLateness(hourParts, hourPart)
	m.members, m.sessions = []*member{m.self}, map[uint64]*member{}
	return m
}

// Step records the event and returns what follows from it.
func (m *Machine) Step(e Event, now time.Time) *Effects {
	m.now, m.out = now, Effects{Packets: m.out.Packets[:0], Lost: m.out.Lost[:0]}
	switch e := e.(type) {
	case Members:
		m.timing = e.Timing
		m.set(e.List)
	case *Received:
		m.receive(e)
	case Due:
		if e.Flooded {
			m.giveBack(m.timing.Interval)
		}
		m.beat()
		m.watch()
		m.announce()
	}
	return &m.out
}

// Deadline returns when Due is due.
func (m *Machine) Deadline() time.Time {
	deadline := m.next
	sooner := func(t time.Time) {
		if t.Before(deadline) {
			deadline = t
		}
	}
	for _, s := range m.watched {
		if s.doubt == nil {
			sooner(m.doubtful(s))
		}
	}
	for _, s := range m.doubted {
		sooner(s.doubt.due())
	}
	for _, a := range m.verdicts {
		sooner(a.next)
	}
	return deadline
}

// beat sends heartbeats when they are due. If they are late, all others get that time back: this loop did not run,
// and what it has not heard in that time is no sign of anything.
func (m *Machine) beat() {
	if m.next.IsZero() {
		m.next = m.now
	}
	late := m.now.Sub(m.next)
	if late < 0 {
		return
	}
	m.late.record(late, m.timing.Interval, m.now)
	m.hour.record(late, m.timing.Interval, m.now)
	if late > m.timing.Interval/2 {
		m.giveBack(late)
	}
	for _, w := range m.self.watchers {
		m.send(w, Beat, 0)
	}
	if m.next = m.next.Add(m.timing.Interval); !m.next.After(m.now) {
		m.next = m.now.Add(m.timing.Interval)
	}
}

// send sends a packet about the subject to the member.
func (m *Machine) send(to *member, kind Kind, subject uint64) {
	if m.sequence++; kind == Ask {
		to.asked, to.askedAt = m.sequence, m.now
	}
	m.out.Packets = append(m.out.Packets, Outgoing{to.Addr, to.Session, Packet{
		Kind: kind, From: m.self.Session, Sequence: m.sequence, Subject: subject,
		Interval: m.timing.Interval, Late: m.late.most(m.now),
	}})
}

// receive records what another speaker sends. Each packet shows that its sender is alive.
func (m *Machine) receive(e *Received) {
	p := e.Packet
	from := m.sessions[p.From]
	if from == nil || from.lost {
		// The sender takes this speaker for a member, and must not take it for lost because it sends no heartbeats.
		if p.Kind == Ask {
			m.send(&member{Member: Member{Session: p.From, Addr: e.From}}, Answer, p.Sequence)
		}
		return
	}
	if e.From != from.Addr {
		m.out.Replayed = true
		return
	}
	last := &from.sequence[p.Kind.class()]
	if !m.answers(from, p) && p.Sequence <= *last {
		m.out.Replayed = true
		m.compare(from, p)
		return
	}
	*last = p.Sequence
	from.hear(p, e.At)
	m.trust(from)
	switch p.Kind {
	case Ask:
		m.send(from, Answer, p.Sequence)
	case Silent:
		m.called(from, m.sessions[p.Subject])
	case Heard:
		m.denied(m.sessions[p.Subject])
	case Dead:
		if p.Subject == m.self.Session {
			m.accused, m.accusedAt = m.accused+1, m.now
			from.grace = later(from.grace, m.now.Add(firstBeat)) // it sends this speaker no heartbeats now
			return
		}
		m.reportedDead(from, m.sessions[p.Subject])
	case Beat, Answer:
	}
}

// answers reports whether the packet answers the last question to the member, so that it was not recorded before. Then the member has
// hardly sent higher numbers than this one: those that were received are forged, by somebody who has the key, and are forgotten.
func (m *Machine) answers(from *member, p Packet) bool {
	if p.Kind != Answer || p.Subject != from.asked || from.asked == 0 || m.now.Sub(from.askedAt) >= answerTime {
		return false
	}
	from.asked = 0
	for class := range from.sequence {
		from.sequence[class] = min(from.sequence[class], p.Sequence)
	}
	return true
}

// compare asks a member for its number, because a packet has a lower one than was received before. That packet is a recorded one, or the
// higher number was forged. A question is answered in any case, because the number of this speaker may have been forged, too: two that
// only asked would never hear each other again.
func (m *Machine) compare(from *member, p Packet) {
	if m.now.Sub(from.askedAt) >= answerTime {
		m.send(from, Ask, 0)
	}
	if p.Kind == Ask {
		m.send(from, Answer, p.Sequence)
	}
}
