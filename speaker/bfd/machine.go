package bfd

import (
	"cmp"
	"time"

	"github.com/lodestone-lb/lodestone/pkg/reason"
)

const (
	// slowest is the least DesiredMinTxInterval of a session that is not Up
	// (RFC 5880, section 6.8.3).
	slowest = time.Second
	// A session that ends sends so many packets with that state, with at least so much time
	// between them. They mostly reach the peer within its Detection Time, as RFC 5880, section
	// 6.8.16 demands.
	farewells        = 3
	farewellInterval = 100 * time.Millisecond
)

// Timers are what one side asks for.
type Timers struct {
	// TransmitInterval is bfd.DesiredMinTxInterval, ReceiveInterval is
	// bfd.RequiredMinRxInterval. Both are whole microseconds, at least 1 ms.
	TransmitInterval, ReceiveInterval time.Duration
	// DetectMultiplier is bfd.DetectMult: how many packets the peer misses before
	// it declares the session down. 1 to 255.
	DetectMultiplier int
}

// Cause is why a session came up or went down.
type Cause string

// The causes.
const (
	// NeverUp: the session has not been Up yet.
	NeverUp Cause = ""
	// CameUp: both sides hear each other.
	CameUp Cause = "up"
	// Expired: the peer was not heard for the Detection Time.
	Expired Cause = "detection_time_expired"
	// PeerDown: the peer does not hear us any more, or has started anew.
	PeerDown Cause = "peer_down"
	// PeerAdminDown: people have switched the session off on the peer. That means nothing for
	// the path, and the session's client goes on without BFD (RFC 5882, section 4.2), unless it wants no path without.
	PeerAdminDown Cause = "peer_admin_down"
)

// causes are all that a transition can have.
var causes = [...]Cause{CameUp, Expired, PeerDown, PeerAdminDown}

// Causes explains each Cause that a transition can have.
func Causes() reason.Texts[Cause] {
	return reason.Texts[Cause]{
		CameUp: {Cause: "Both sides hear each other.", Cure: "Nothing to do."},
		Expired: {Cause: "The peer was not heard for the detection time.",
			Cure: "See to the path and the router. If it happens often on a busy node, take longer ones for transmitInterval and " +
				"receiveInterval, or the chart's speaker.bgp.realTimeBFD.",
			Keys: []string{"peers[].bfd.transmitInterval", "peers[].bfd.receiveInterval", "speaker.bgp.realTimeBFD"}},
		PeerDown: {Cause: "The peer does not hear this node any more, or has started anew.",
			Cure: "See to the way from the node to the router; if the router restarted, nothing."},
		PeerAdminDown: {Cause: "People have switched the session off on the peer. BGP goes on without BFD, unless strict is set.",
			Cure: "Not a fault: switch it on again on the router if BFD is wanted."},
	}
}

// Machine is the state machine of one session in Asynchronous mode (RFC 5880, section 6.8),
// with the state variables of section 6.8.1. It has no clock and sends nothing. Every step
// gets the time, Advance returns the packet to send, and Deadline returns when to call Advance
// again.
type Machine struct {
	timers Timers         // what the owner wants
	random func() float64 // from [0, 1)

	state, remoteState State
	diag, remoteDiag   Diagnostic
	local, remote      uint32 // discriminators; remote is 0 while it is not known
	remoteMinTx        time.Duration
	remoteMinRx        time.Duration
	remoteMultiplier   uint8
	remoteDemand       bool
	cause              Cause
	lost               uint64 // packets of the peer, estimated from the gaps

	// The intervals that we announce, and those that we use. They differ until a Poll Sequence
	// has sent it to the peer (section 6.8.3).
	minTx, minRx         time.Duration
	usedMinTx, usedMinRx time.Duration
	polling, pollAgain   bool

	heard    time.Time     // the last packet; zero: none within a Detection Time
	expired  time.Duration // the Detection Time that ended the session last, by silence
	sent     time.Time     // the last packet; zero: none
	next     time.Time     // the next periodic one
	interval time.Duration // that next was drawn from
	urgent   bool          // the state has changed since the last packet
	final    bool          // a Poll waits for its Final
	goodbyes int           // packets to send in AdminDown
}

// NewMachine returns a session in state Down that sends its first packet at
// once. The discriminator is not zero and no other session's.
func NewMachine(t Timers, discriminator uint32, random func() float64, now time.Time) *Machine {
	m := &Machine{timers: t, random: random, local: discriminator, state: Down, next: now}
	m.forget()
	m.negotiate()
	m.interval = m.transmitInterval()
	return m
}

// forget resets what is known of a peer that was silent for a Detection Time (section 6.8.1,
// bfd.RemoteDiscr).
func (m *Machine) forget() {
	m.heard, m.remote, m.remoteState, m.remoteDemand = time.Time{}, 0, Down, false
	m.remoteMinTx, m.remoteMinRx, m.remoteMultiplier = 0, time.Microsecond, 0
}

// Set takes over the timers that the owner wants. The state of the session stays.
func (m *Machine) Set(t Timers) {
	m.timers = t
	m.negotiate()
	m.reschedule()
}

// Leave ends the session for good. The peer, if it was ever heard, is sent a few packets with
// that state (section 6.8.16).
func (m *Machine) Leave(now time.Time) {
	if m.remote != 0 {
		m.goodbyes = farewells
	}
	m.interval = min(m.transmitInterval(), farewellInterval)
	m.next = now
	m.state, m.diag = AdminDown, AdministrativelyDown
	m.final, m.urgent = false, false
	m.negotiate()
}

// Left reports whether the last packet after Leave was sent.
func (m *Machine) Left() bool { return m.state == AdminDown && m.goodbyes == 0 }

// Accepts reports whether a packet of the peer is for this session, by its discriminator.
func (m *Machine) Accepts(p Packet) bool { return p.your == m.local || p.your == 0 && m.state != Up }

// State and Cause are those of Status.
func (m *Machine) State() State { return m.state }

// Cause is why the session last came up or went down.
func (m *Machine) Cause() Cause { return m.cause }

// Receive takes a packet of the peer for this session (section 6.8.6).
func (m *Machine) Receive(p Packet, now time.Time) {
	m.countLost(now)
	m.heard = now
	m.remote, m.remoteDiag, m.remoteDemand = p.my, p.diagnostic, p.demand
	m.remoteMinTx, m.remoteMinRx, m.remoteMultiplier = p.desiredMinTx, p.requiredMinRx, p.multiplier
	m.remoteState = p.state
	if m.state == AdminDown {
		return
	}
	if p.final && m.polling {
		m.endPoll()
	}
	m.follow()
	m.final = m.final || p.poll
	m.reschedule()
}

// follow makes the transition that the state of the peer asks for (section
// 6.2).
func (m *Machine) follow() {
	switch {
	case m.remoteState == AdminDown:
		if m.state != Down {
			m.change(Down, NeighborSignaledDown, PeerAdminDown)
		}
		// This replaces any other cause, because nobody watches the path any more.
		m.cause = PeerAdminDown
	case m.state == Down && m.remoteState == Down:
		m.change(Init, m.diag, m.cause)
	case m.state == Down && m.remoteState == Init, m.state == Init && m.remoteState >= Init:
		m.change(Up, NoDiagnostic, CameUp)
	case m.state == Up && m.remoteState == Down:
		m.change(Down, NeighborSignaledDown, PeerDown)
	}
}

// change makes a transition. The cause counts only if the session comes up or was Up.
func (m *Machine) change(to State, diag Diagnostic, cause Cause) {
	if m.state == Up || to == Up {
		m.cause = cause
	}
	m.state, m.diag, m.urgent = to, diag, true
	m.negotiate()
}

// negotiate announces the intervals that the owner wants and the state allows. While the
// session is Up, a slower transmission and a shorter Detection Time wait for the end of a Poll
// Sequence, because the peer uses the old ones until then (section 6.8.3).
func (m *Machine) negotiate() {
	minTx, minRx := m.timers.TransmitInterval, m.timers.ReceiveInterval
	if m.state != Up {
		m.minTx, m.minRx = max(minTx, slowest), minRx
		m.usedMinTx, m.usedMinRx = m.minTx, m.minRx
		m.polling, m.pollAgain = false, false
		return
	}
	if minTx == m.minTx && minRx == m.minRx {
		return
	}
	m.minTx, m.minRx = minTx, minRx
	m.usedMinTx, m.usedMinRx = min(m.usedMinTx, minTx), max(m.usedMinRx, minRx)
	// A Final on its way may answer a Poll with the values before these.
	m.pollAgain, m.polling = m.polling, true
}

// endPoll puts the intervals into use that the peer has confirmed.
func (m *Machine) endPoll() {
	if m.pollAgain {
		m.pollAgain = false
		return
	}
	m.polling = false
	m.usedMinTx, m.usedMinRx = m.minTx, m.minRx
}

// transmitInterval is the interval between our packets, before jitter (section
// 6.8.2).
func (m *Machine) transmitInterval() time.Duration { return max(m.usedMinTx, m.remoteMinRx) }

// receiveInterval is the interval between the peer's packets.
func (m *Machine) receiveInterval() time.Duration { return max(m.usedMinRx, m.remoteMinTx) }

// detectionTime is how long the peer may be silent (section 6.8.4); zero while
// it is not known.
func (m *Machine) detectionTime() time.Duration {
	return time.Duration(m.remoteMultiplier) * m.receiveInterval()
}

// reschedule draws the time of the next periodic packet anew if the interval
// has changed.
func (m *Machine) reschedule() {
	if interval := m.transmitInterval(); interval != m.interval && m.state != AdminDown {
		m.interval = interval
		m.next = m.sent.Add(m.jittered())
	}
}

// jittered is the interval, reduced by up to a quarter, and by at least a
// tenth if one lost packet ends the session (section 6.8.7).
func (m *Machine) jittered() time.Duration {
	span := 0.25
	if m.timers.DetectMultiplier == 1 {
		span = 0.15
	}
	return time.Duration(float64(m.interval) * (0.75 + span*m.random()))
}

// silent reports whether there are no periodic packets: the peer wants none,
// or has Demand mode active (section 6.8.7).
func (m *Machine) silent() bool {
	demanded := m.remoteDemand && m.state == Up && m.remoteState == Up && !m.polling
	return m.remoteMinRx == 0 || demanded
}

// Advance does what is due. It is to be called after every other step and at
// the deadline, and returns a packet if one is to be sent now.
func (m *Machine) Advance(now time.Time) (p Packet, send bool) {
	m.expire(now)
	periodic := !m.silent() && !now.Before(m.next)
	if m.state == AdminDown {
		if m.goodbyes == 0 || now.Before(m.next) {
			return Packet{}, false
		}
		m.goodbyes--
	} else if !m.final && !m.urgent && !periodic {
		return Packet{}, false
	}
	p = Packet{
		diagnostic: m.diag, state: m.state, poll: m.polling && !m.final, final: m.final,
		multiplier: uint8(m.timers.DetectMultiplier), my: m.local, your: m.remote,
		desiredMinTx: m.minTx, requiredMinRx: m.minRx,
	}
	m.final, m.urgent = false, false
	m.sent = now
	m.next = now.Add(m.jittered())
	return p, true
}

// lastDetectionTime is the Detection Time, or the one that has ended the session: the peer sends slowly until it is Up again.
func (m *Machine) lastDetectionTime() time.Duration {
	now := m.detectionTime()
	if now == 0 || m.state != Up && m.cause == Expired {
		return cmp.Or(m.expired, now)
	}
	return now
}

// expire ends the session when the peer was silent for the Detection Time (section 6.8.4).
func (m *Machine) expire(now time.Time) {
	if m.heard.IsZero() || now.Before(m.heard.Add(m.detectionTime())) {
		return
	}
	if m.state == Up || m.cause != Expired {
		m.expired = m.detectionTime()
	}
	m.forget()
	if m.state == Init || m.state == Up {
		m.change(Down, DetectionTimeExpired, Expired)
	}
	m.reschedule()
}

// Deadline returns when Advance has to be called at the latest. A time that is over means at
// once.
func (m *Machine) Deadline() time.Time {
	switch {
	case m.final || m.urgent:
		return m.sent // a time that is over: at once
	case m.state == AdminDown:
		return m.next
	case m.heard.IsZero():
		return m.next // a peer that was never heard has not asked us to be silent
	}
	expiry := m.heard.Add(m.detectionTime())
	if m.silent() || expiry.Before(m.next) {
		return expiry
	}
	return m.next
}

// gap returns how long the peer was silent before a packet that comes now, and the agreed
// interval. Both are 0 unless the session is Up.
func (m *Machine) gap(now time.Time) (gap, interval time.Duration) {
	if m.state != Up || m.heard.IsZero() {
		return 0, 0
	}
	return now.Sub(m.heard), m.receiveInterval()
}

// countLost estimates from the time since the last packet how many were lost.
// The peer sends after 75 to 100 % of the interval, and late when it is busy.
func (m *Machine) countLost(now time.Time) {
	gap, interval := m.gap(now)
	if gap -= interval / 4; interval > 0 && gap > interval {
		m.lost += uint64((gap - 1) / interval)
	}
}
