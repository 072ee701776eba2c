package segment

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/binary"
	"math/rand/v2"
	"net/netip"
	"time"

	"github.com/lodestone-lb/lodestone/speaker/layer2/seal"
	"github.com/lodestone-lb/lodestone/speaker/layer2/wire"
)

// A speaker that claims a VIP with the better seal is asked before it is believed,
// and as long as it is. The question has a nonce, and only an answer with it
// counts: whoever repeats a recorded claim cannot answer, so the VIP stays here, and
// a conflict is reported.
const (
	// challenges is how often a speaker is asked before its claim is taken for a
	// forgery, challengeWait how long each answer may take.
	challenges    = 3
	challengeWait = pollInterval
	// challengesPerSecond bounds the questions to all who claim VIPs here.
	challengesPerSecond = 2_000
	// nonceLife is how long a nonce is used. An answer that is later than that, and
	// as much again, is none.
	nonceLife = 2 * time.Second
)

// When a VIP that somebody else claims is announced again, if it is still
// ours.
const (
	// defence answers a foreign host.
	defence = time.Second
	// correction answers a speaker of this cluster that ranks below us, and
	// tells its clients. It may yet be the next owner: then the news that the
	// VIP leaves us comes before, unless a watch lags.
	correction = 400 * time.Millisecond
	// lag answers it while all speakers see each other: then it is the
	// next owner, and we have not heard yet that it is.
	lag = 5 * time.Second
)

// Who yields to another speaker asks that one, and it alone, each pollInterval,
// and claims the VIP when maxMissed times in a row there was no answer.
const (
	pollInterval   = 500 * time.Millisecond
	maxMissed      = 2
	pollsPerSecond = 500
)

// While speakers are lost, one VIP in turn is announced each beaconInterval, for
// the other side of a partition to hear when it heals. Of many speakers each waits longer,
// and not as long as the next one: one beacon of any is enough. A speaker that meets a
// rival announces all its VIPs again, except the ones that the rival has just claimed, and at most once
// in roundInterval. So clients are right within a second: a beacon, a round, a correction.
const (
	beaconInterval = 400 * time.Millisecond
	roundWait      = 100 * time.Millisecond
	roundInterval  = 10 * time.Second
)

// correct has a VIP announced again that a speaker claims which ranks below us.
func (m *Machine) correct(v *vip) {
	switch {
	case m.Whole && !v.lagging:
		v.lagging = true
		m.queue.enter(pending{vip: v, step: stepLag, due: m.now.Add(lag)})
	case !m.Whole:
		if !v.correcting {
			v.correcting = true
			m.queue.enter(pending{vip: v, step: stepCorrection, due: m.now.Add(correction)})
		}
		m.announceRound()
	}
}

// contested reports whether another speaker claimed the VIP just now.
func (v *vip) contested() bool { return v.correcting || v.lagging || len(v.challenged) > 0 }

// announceRound announces everything once more when a rival was met: he may claim more
// than we have heard.
func (m *Machine) announceRound() {
	if m.Whole || !m.round.IsZero() && m.now.Sub(m.round) < roundInterval {
		return
	}
	m.round = m.now
	for _, v := range byAddress(m.vips) {
		m.queue.enter(pending{vip: v, step: stepRound, due: m.now.Add(roundWait)})
	}
}

// beacons choose which VIP is announced next while speakers are lost, and when.
type beacons struct {
	ring   []*vip // those whose turn is before the next round
	random *rand.Rand
}

// next returns the next VIP in the ring. Nil: there is none. Those that somebody else
// claimed just now wait for their correction.
func (b *beacons) next(vips map[netip.Addr]*vip) *vip {
	for range 2 { // the rest of the ring, and once around
		for len(b.ring) > 0 {
			v := b.ring[0]
			if b.ring = b.ring[1:]; v.announces() && v.reason == "" && !v.contested() {
				return v
			}
		}
		b.ring = byAddress(vips)
	}
	return nil
}

// wait returns how long to wait for the next beacon.
func (b *beacons) wait(crowd int) time.Duration {
	if crowd <= 1 {
		return beaconInterval
	}
	longest := time.Duration(crowd) * beaconInterval
	return longest/2 + time.Duration(b.random.Int64N(int64(longest)))
}

// ask has a speaker asked, unless it is being asked.
func (m *Machine) ask(p pending) {
	if p.vip.challenged[p.to] {
		return
	}
	if p.vip.challenged == nil {
		p.vip.challenged = map[wire.MAC]bool{}
	}
	p.vip.challenged[p.to] = true
	m.queue.enter(p)
}

// askChallenged asks the speaker that claims a VIP of ours, or reports that somebody
// repeats its claims.
func (m *Machine) askChallenged(p pending) [][]byte {
	switch v := p.vip; {
	case v.reason == Yielded && v.by == p.to:
		return nil // it has answered
	case p.asked == challenges && v.reason == Yielded:
		return nil // to a third one, which the silent one may have yielded to as well
	case p.asked == challenges:
		m.noteConflict(v, Note{Other: p.to, Silent: true, Announced: v.reason == ""})
		m.defend(v, m.now)
		return nil
	}
	p.due = m.now.Add(challengeWait)
	if !m.challenges.AllowN(m.now, 1) {
		m.ask(p)
		return nil
	}
	p.asked++
	m.ask(p)
	return [][]byte{m.question(p.vip, p.to)}
}

// question returns the frame that asks a speaker whether it has the VIP.
func (m *Machine) question(v *vip, to wire.MAC) []byte {
	s := wire.Statement{Self: m.Self, VIP: v.addr}
	s.Seal = m.Keys.Numbered(v.addr, m.Self, v.Home, m.nonces.of(v.addr, to, m.now))
	return m.Protocol.Probe(s, to)
}

// yield leaves the VIP to another speaker, which is polled from then on.
func (m *Machine) yield(v *vip, to wire.MAC) {
	fresh := v.reason != Yielded
	if v.reason, v.by, v.missed = Yielded, to, 0; !fresh {
		return
	}
	v.heard, v.polls = false, 0
	m.queue.enter(pending{vip: v, step: stepPoll, due: m.now.Add(pollInterval)})
	m.announceRound()
}

// poll asks the speaker that we yielded to whether it still has the VIP, or
// claims it.
func (m *Machine) poll(v *vip) [][]byte {
	if v.reason != Yielded {
		return nil
	}
	again := pending{vip: v, step: stepPoll, due: m.now.Add(pollInterval)}
	if !m.polls.AllowN(m.now, 1) {
		m.queue.enter(again)
		return nil
	}
	v.polls++
	if v.missed++; v.missed > maxMissed {
		v.reason = ""
		m.out.note(Note{Kind: Resumes, VIP: v.addr, Other: v.by})
		m.announceAnew(v)
		return nil
	}
	if v.polls == 1 {
		m.out.note(Note{Kind: Yields, VIP: v.addr, Other: v.by})
	}
	m.queue.enter(again)
	return [][]byte{m.question(v, v.by)}
}

// nonces are the numbers of questions. They follow from a secret, so nothing is kept for
// a question.
type nonces struct {
	secret [32]byte
	begin  time.Time
}

// of returns the nonce of questions to a speaker about a VIP.
func (n *nonces) of(addr netip.Addr, to wire.MAC, at time.Time) (nonce seal.Nonce) {
	h := hmac.New(sha256.New, n.secret[:])
	address := addr.As16()
	h.Write(address[:])
	h.Write(to[:])
	h.Write(binary.BigEndian.AppendUint64(nil, uint64(at.Sub(n.begin)/nonceLife)))
	copy(nonce[:], h.Sum(nil))
	if nonce == (seal.Nonce{}) { // which would be none
		nonce[0] = 1
	}
	return nonce
}

// fits reports whether a speaker that is asked about the VIP may answer with the
// nonce.
func (n *nonces) fits(nonce seal.Nonce, addr netip.Addr, from wire.MAC, now time.Time) bool {
	return nonce == n.of(addr, from, now) || nonce == n.of(addr, from, now.Add(-nonceLife))
}
