package bfd

import (
	"fmt"
	"net/netip"
	"time"
)

// MarshalText returns the name of the state.
func (s State) MarshalText() ([]byte, error) { return []byte(s.String()), nil }

// MarshalText returns the words of the diagnostic.
func (d Diagnostic) MarshalText() ([]byte, error) { return []byte(d.String()), nil }

// Status is what there is to know about a session at one moment.
type Status struct {
	// Session is what there should be.
	Session Session
	// Local is the address and port that packets are sent from, invalid while
	// none can be.
	Local netip.AddrPort
	// State is ours, RemoteState the one in the peer's last packet. A peer that was silent for
	// the detection time, or always, counts as Down.
	State, RemoteState State
	// Diagnostic is the one that we send, RemoteDiagnostic the one that the peer sent.
	Diagnostic, RemoteDiagnostic Diagnostic
	// Cause is why the session last came up or went down.
	Cause Cause
	// Since is when State began.
	Since time.Time
	// Ended is when the session ceased to be Up last, zero if it never was.
	Ended time.Time
	// Discriminator is ours, and new with each session. RemoteDiscriminator is
	// the peer's, 0 while it is not known.
	Discriminator, RemoteDiscriminator uint32
	// TransmitInterval is the negotiated interval of our packets, before jitter,
	// ReceiveInterval that of the peer's.
	TransmitInterval, ReceiveInterval time.Duration
	// DetectionTime is how long the peer may be silent, or was when it counted as Down; 0 if it was
	// never heard.
	DetectionTime time.Duration
	// RemoteMultiplier is the peer's detect multiplier.
	RemoteMultiplier int
	// Error is why the node cannot send or receive, or a hint from the peer's
	// kernel. It does not show whether the session is Up.
	Error string
	// Transitions counts how often the session came to be Up or ceased to be.
	Transitions uint64

	// LastReceived is when the peer's last packet came, zero if none did.
	LastReceived time.Time
	// Received, Sent and SendErrors count packets. Lost is an estimate, from the
	// gaps while Up, of those that the peer sent and that did not arrive.
	Received, Sent, SendErrors, Lost uint64
}

// Up reports whether the path to the peer and back works.
func (s Status) Up() bool { return s.State == Up }

// Failed reports whether the path worked, then failed, and has not worked since. What depends
// on the peer has to go then. It is false for a peer that never was Up, and for one on which
// BFD was switched off (RFC 5882, section 4.2).
func (s Status) Failed() bool { return s.Cause == Expired || s.Cause == PeerDown }

// status returns the status to publish, without the counters of packets.
func (s *session) status(listenError error) Status {
	m := s.machine
	status := Status{
		Session: s.want, Local: s.link.local,
		State: m.state, RemoteState: m.remoteState, Diagnostic: m.diag, RemoteDiagnostic: m.remoteDiag,
		Cause: m.cause, Since: s.since, Ended: s.ended, Discriminator: m.local, RemoteDiscriminator: m.remote,
		TransmitInterval: m.transmitInterval(), ReceiveInterval: m.receiveInterval(),
		DetectionTime: m.lastDetectionTime(), RemoteMultiplier: int(m.remoteMultiplier), Transitions: s.changes,
	}
	switch {
	case listenError != nil:
		status.Error = listenError.Error()
	case s.failure != nil:
		status.Error = s.failure.Error()
	case s.refused:
		status.Error = fmt.Sprintf("%s refuses packets to %s: BFD does not run there, or not for this session", s.want.Remote, s.want.transport())
	}
	return status
}

// snapshot returns the status with its counters.
func (s *session) snapshot() Status {
	status := *s.published.Load()
	c := &s.counters
	if last := c.lastReceived.Load(); last != 0 {
		status.LastReceived = time.Unix(0, last)
	}
	status.Received, status.Sent, status.SendErrors, status.Lost = c.received.Load(), c.sent.Load(), c.sendErrors.Load(), c.lost.Load()
	return status
}
