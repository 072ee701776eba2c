package bfd

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

const ms = time.Millisecond

// epoch is when stories begin.
var epoch = time.Unix(1_000_000, 0)

// story is one machine and a clock. Its peer is the test.
type story struct {
	*Machine
	t   *testing.T
	now time.Time
}

func newStory(t *testing.T, timers Timers) *story {
	t.Helper()
	s := &story{NewMachine(timers, 7, func() float64 { return 1 }, epoch), t, epoch}
	p, sent := s.Advance(s.now)
	require.True(t, sent, "the first packet goes at once")
	require.Equal(t, Packet{state: Down, multiplier: uint8(timers.DetectMultiplier), my: 7,
		desiredMinTx: max(slowest, timers.TransmitInterval), requiredMinRx: timers.ReceiveInterval}, p)
	return s
}

// upStory is a story that begins when the session is Up and the Poll Sequence
// over.
func upStory(t *testing.T, timers Timers) *story {
	t.Helper()
	s := newStory(t, timers)
	s.hear(Down, timers)
	s.hear(Init, timers)
	p := s.hear(Up, timers, func(p *Packet) { p.final = true })
	require.Nil(t, p)
	require.Equal(t, Up, s.state)
	require.False(t, s.polling)
	return s
}

// hear lets the peer send a packet in a state, and returns the answer, if one
// follows at once.
func (s *story) hear(state State, timers Timers, change ...func(*Packet)) *Packet {
	s.t.Helper()
	p := Packet{
		state: state, multiplier: uint8(timers.DetectMultiplier), my: 9, your: 7,
		desiredMinTx: timers.TransmitInterval, requiredMinRx: timers.ReceiveInterval,
	}
	for _, c := range change {
		c(&p)
	}
	s.Receive(p, s.now)
	return s.sends()
}

func (s *story) sends() *Packet {
	p, sent := s.Advance(s.now)
	if !sent {
		return nil
	}
	return &p
}

// pass lets time pass and returns the packets sent in it.
func (s *story) pass(d time.Duration) (sent []Packet) {
	s.t.Helper()
	for end := s.now.Add(d); ; {
		if s.Deadline().After(end) {
			s.now = end
			return sent
		}
		require.False(s.t, s.Deadline().Before(s.now), "nothing is overdue")
		s.now = s.Deadline()
		if p, ok := s.Advance(s.now); ok {
			sent = append(sent, p)
		}
	}
}

// TestTransitions is the state machine of RFC 5880, section 6.2, and section
// 6.8.6.
func TestTransitions(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		state, hears, becomes State
		diagnostic            Diagnostic
		cause                 Cause
	}{
		{Down, AdminDown, Down, NoDiagnostic, PeerAdminDown},
		{Down, Down, Init, NoDiagnostic, NeverUp},
		{Down, Init, Up, NoDiagnostic, CameUp},
		{Down, Up, Down, NoDiagnostic, NeverUp},
		{Init, AdminDown, Down, NeighborSignaledDown, PeerAdminDown},
		{Init, Down, Init, NoDiagnostic, NeverUp},
		{Init, Init, Up, NoDiagnostic, CameUp},
		{Init, Up, Up, NoDiagnostic, CameUp},
		{Up, AdminDown, Down, NeighborSignaledDown, PeerAdminDown},
		{Up, Down, Down, NeighborSignaledDown, PeerDown},
		{Up, Init, Up, NoDiagnostic, CameUp},
		{Up, Up, Up, NoDiagnostic, CameUp},
	} {
		t.Run(fmt.Sprintf("%s hears %s", test.state, test.hears), func(t *testing.T) {
			t.Parallel()
			s := newStory(t, every(300*ms, 3))
			switch test.state {
			case Init:
				s.hear(Down, every(300*ms, 3))
			case Up:
				s.hear(Init, every(300*ms, 3))
			}
			require.Equal(t, test.state, s.state)
			p := s.hear(test.hears, every(300*ms, 3))
			require.Equal(t, test.becomes, s.state)
			require.Equal(t, test.diagnostic, s.diag)
			require.Equal(t, test.cause, s.cause)
			require.Equal(t, test.state != test.becomes, p != nil, "a new state is told at once, and no other")
			if p != nil {
				require.Equal(t, test.becomes, p.state)
				require.Equal(t, uint32(9), p.your)
			}
		})
	}
}

func TestSlowUntilUp(t *testing.T) {
	t.Parallel()
	s := newStory(t, every(50*ms, 3))
	require.Len(t, s.pass(10*time.Second), 10, "one packet a second while nobody answers")

	p := s.hear(Down, every(50*ms, 3))
	require.Equal(t, Init, p.state)
	require.Equal(t, time.Second, p.desiredMinTx)
	p = s.hear(Init, every(50*ms, 3))
	require.Equal(t, Up, p.state)
	require.Equal(t, 50*ms, p.desiredMinTx)
	require.True(t, p.poll, "the new interval is confirmed by a Poll Sequence")
	s.hear(Up, every(50*ms, 3))
	for _, p := range s.pass(140 * ms) {
		require.True(t, p.poll, "until the Final")
	}
	s.hear(Up, every(50*ms, 3), func(p *Packet) { p.final = true })
	sent := s.pass(140 * ms)
	require.Len(t, sent, 3)
	require.False(t, sent[0].poll)

	s.pass(20 * ms)
	require.Equal(t, Down, s.state, "nothing was heard for 150 ms")
	require.Equal(t, Expired, s.cause)
	require.Len(t, s.pass(10*time.Second), 10, "slow again")
}

func TestDetectionTime(t *testing.T) {
	t.Parallel()
	ours := Timers{TransmitInterval: 100 * ms, ReceiveInterval: 200 * ms, DetectMultiplier: 3}
	for _, theirs := range []Timers{
		{TransmitInterval: 100 * ms, ReceiveInterval: 100 * ms, DetectMultiplier: 5},
		{TransmitInterval: 300 * ms, ReceiveInterval: 100 * ms, DetectMultiplier: 2},
		{TransmitInterval: 0, ReceiveInterval: 100 * ms, DetectMultiplier: 1},
	} {
		s := upStory(t, ours)
		s.hear(Up, theirs)
		want := time.Duration(theirs.DetectMultiplier) * max(ours.ReceiveInterval, theirs.TransmitInterval)
		require.Equal(t, want, s.detectionTime())
		s.pass(want - 1)
		require.Equal(t, Up, s.state)
		s.pass(1)
		require.Equal(t, Down, s.state)
		require.Equal(t, DetectionTimeExpired, s.diag)
		require.Zero(t, s.remote, "who is silent for so long is not known any more")
	}
}

// A session that never was Up, and is not now, has no cause: its owner has
// nothing to do.
func TestInitExpires(t *testing.T) {
	t.Parallel()
	s := newStory(t, every(50*ms, 3))
	s.hear(Down, every(time.Second, 3))
	require.Equal(t, Init, s.state)
	s.pass(3 * time.Second)
	require.Equal(t, Down, s.state)
	require.Equal(t, NeverUp, s.cause)
	require.Equal(t, DetectionTimeExpired, s.diag)
}

func TestFinal(t *testing.T) {
	t.Parallel()
	s := upStory(t, every(300*ms, 3))
	p := s.hear(Up, every(300*ms, 3), func(p *Packet) { p.poll = true })
	require.True(t, p.final)
	require.False(t, p.poll)
	require.Nil(t, s.hear(Up, every(300*ms, 3)), "one Final for one Poll")

	s.Set(every(400*ms, 3)) // our own Poll Sequence begins
	p = s.hear(Up, every(300*ms, 3), func(p *Packet) { p.poll = true })
	require.True(t, p.final)
	require.False(t, p.poll, "never both")
	require.True(t, s.pass(300 * ms)[0].poll)
}

// Section 6.8.3: what the peer could take for silence waits for the Final.
func TestNewTimers(t *testing.T) {
	t.Parallel()
	peer := every(50*ms, 3)
	for _, test := range []struct {
		name                      string
		from, to                  Timers
		transmit, receive         time.Duration // at once
		transmitThen, receiveThen time.Duration
	}{
		{"slower", every(100*ms, 3), every(300*ms, 3), 100 * ms, 300 * ms, 300 * ms, 300 * ms},
		{"faster", every(300*ms, 3), every(100*ms, 3), 100 * ms, 300 * ms, 100 * ms, 100 * ms},
		{"sends slower", every(100*ms, 3), Timers{300 * ms, 100 * ms, 3}, 100 * ms, 100 * ms, 300 * ms, 100 * ms},
		{"receives faster", every(300*ms, 3), Timers{300 * ms, 100 * ms, 3}, 300 * ms, 300 * ms, 300 * ms, 100 * ms},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			s := upStory(t, test.from)
			s.hear(Up, peer)
			s.Set(test.to)
			require.Nil(t, s.sends(), "the Poll waits for its turn (section 6.5)")
			s.hear(Up, peer)
			require.Equal(t, test.transmit, s.transmitInterval())
			require.Equal(t, test.receive, s.receiveInterval())
			p := s.pass(test.transmit)[0]
			require.True(t, p.poll)
			require.Equal(t, test.to.TransmitInterval, p.desiredMinTx)
			require.Equal(t, test.to.ReceiveInterval, p.requiredMinRx)
			s.hear(Up, peer, func(p *Packet) { p.final = true })
			require.Equal(t, test.transmitThen, s.transmitInterval())
			require.Equal(t, test.receiveThen, s.receiveInterval())
			require.Equal(t, Up, s.state)
		})
	}
}

// A Final may answer a Poll that told the values before the last ones.
func TestNewTimersTwice(t *testing.T) {
	t.Parallel()
	s := upStory(t, every(100*ms, 3))
	s.Set(every(200*ms, 3))
	s.Set(every(400*ms, 3))
	s.hear(Up, every(50*ms, 3), func(p *Packet) { p.final = true })
	require.Equal(t, 100*ms, s.transmitInterval())
	require.True(t, s.polling)
	s.hear(Up, every(50*ms, 3), func(p *Packet) { p.final = true })
	require.Equal(t, 400*ms, s.transmitInterval())
	require.False(t, s.polling)
}

func TestPeerAsksForLess(t *testing.T) {
	t.Parallel()
	s := upStory(t, every(100*ms, 3))
	s.hear(Up, Timers{100 * ms, 2 * time.Second, 200})
	require.Len(t, s.pass(10*time.Second), 5, "no more than it can take")
	s.hear(Up, Timers{100 * ms, 0, 200})
	require.Empty(t, s.pass(10*time.Second), "nothing, if it wants nothing")
	require.True(t, s.hear(Up, Timers{100 * ms, 0, 200}, func(p *Packet) { p.poll = true }).final, "but Finals")
	s.hear(Up, every(100*ms, 200))
	require.Len(t, s.pass(time.Second), 10)

	// Demand mode (section 6.6).
	s.hear(Up, every(100*ms, 200), func(p *Packet) { p.demand = true })
	require.Empty(t, s.pass(10*time.Second))
	s.Set(every(200*ms, 3))
	require.True(t, s.sends().poll, "a Poll Sequence is sent all the same")
}

// A peer that wants nothing, and is gone, is looked for again.
func TestSilentPeerIsForgotten(t *testing.T) {
	t.Parallel()
	s := upStory(t, every(100*ms, 3))
	s.hear(Up, Timers{100 * ms, 0, 3})
	sent := s.pass(300 * ms)
	require.Len(t, sent, 1)
	require.Equal(t, Down, sent[0].state)
	require.Zero(t, sent[0].your)
	require.Len(t, s.pass(10*time.Second), 10)
}

// What is shown of a session that has ended by silence is the Detection Time that has ended it, also when the peer is heard again,
// which sends slowly until it is Up, and falls silent once more.
func TestTheDetectionTimeThatHasEndedTheSessionIsShown(t *testing.T) {
	t.Parallel()
	s := upStory(t, every(100*ms, 3))
	require.Equal(t, 300*ms, s.lastDetectionTime())
	s.pass(300 * ms)
	require.Equal(t, Expired, s.cause)
	require.Equal(t, 300*ms, s.lastDetectionTime())
	s.hear(Down, every(time.Second, 3))
	require.Equal(t, Init, s.state)
	require.Equal(t, 300*ms, s.lastDetectionTime())
	s.pass(10 * time.Second)
	require.Equal(t, Down, s.state)
	require.Equal(t, 300*ms, s.lastDetectionTime())
	s.hear(Down, every(time.Second, 3))
	s.hear(Init, every(50*ms, 3))
	require.Equal(t, Up, s.state)
	require.Equal(t, 3*100*ms, s.lastDetectionTime(), "ours is the slower one")
}

func TestPeerAdminDownIsNoFailure(t *testing.T) {
	t.Parallel()
	s := upStory(t, every(100*ms, 3))
	require.Equal(t, Down, s.hear(AdminDown, every(time.Second, 3)).state)
	require.Equal(t, PeerAdminDown, s.cause)
	s.pass(time.Minute) // it says nothing more
	require.Equal(t, Down, s.state)
	require.Equal(t, PeerAdminDown, s.cause)
	s.hear(Down, every(time.Second, 3))
	s.pass(time.Minute) // it tries to come up, and fails
	require.Equal(t, PeerAdminDown, s.cause)

	s = upStory(t, every(100*ms, 3))
	s.pass(time.Second)
	require.Equal(t, Expired, s.cause)
	s.hear(AdminDown, every(time.Second, 3))
	require.Equal(t, PeerAdminDown, s.cause, "after a failure it is switched off")
}

func TestLeave(t *testing.T) {
	t.Parallel()
	s := upStory(t, every(300*ms, 3))
	s.Leave(s.now)
	p := s.sends()
	require.Equal(t, Packet{state: AdminDown, diagnostic: AdministrativelyDown, multiplier: 3, my: 7, your: 9, desiredMinTx: time.Second,
		requiredMinRx: 300 * ms}, *p)
	require.Nil(t, s.hear(Up, every(300*ms, 3), func(p *Packet) { p.poll = true }), "it is over")
	require.False(t, s.Left())
	for range farewells - 1 {
		require.False(t, s.Left())
		s.now = s.Deadline()
		require.Equal(t, AdminDown, s.sends().state)
	}
	require.True(t, s.Left())
	require.LessOrEqual(t, s.now.Sub(epoch), (farewells-1)*farewellInterval)

	s = newStory(t, every(300*ms, 3))
	s.Leave(s.now)
	require.True(t, s.Left(), "who never was heard need not be told")
}

func TestJitter(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		multiplier int
		random     float64
		want       time.Duration
	}{{3, 0, 75 * ms}, {3, 1, 100 * ms}, {1, 0, 75 * ms}, {1, 1, 90 * ms}} {
		s := upStory(t, every(100*ms, test.multiplier))
		s.pass(10 * ms)
		s.hear(Up, every(100*ms, 200))
		s.random = func() float64 { return test.random }
		s.now = s.Deadline()
		require.NotNil(t, s.sends())
		require.Equal(t, test.want, s.Deadline().Sub(s.now))
	}
}

func TestLost(t *testing.T) {
	t.Parallel()
	s := upStory(t, every(100*ms, 10))
	for _, gap := range []time.Duration{75, 100, 110, 160, 200, 75 * 3, 75} {
		s.now = s.now.Add(gap * ms)
		s.hear(Up, every(100*ms, 10))
	}
	require.EqualValues(t, 0+0+0+1+1+1+0, s.lost)
	s.now = s.now.Add(300 * ms)
	s.hear(Up, every(100*ms, 10))
	require.EqualValues(t, 3+2, s.lost)
}
