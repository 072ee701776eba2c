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

// A speaker that claims a VIP with a better seal is asked a question before this node yields, and each
// pollInterval after that. Only an answer with the nonce of the question counts. Somebody who repeats a
// recorded claim cannot answer: then the VIP stays here, and a conflict is reported.
const (
	// challenges is how often a speaker is asked before its claim counts as forged. challengeWait is how
	// long each answer may take.
	challenges    = 3
	challengeWait = pollInterval
	// challengesPerSecond bounds the questions to all speakers that claim our VIPs.
	challengesPerSecond = 2_000
	// maxChallenged is how many speakers are asked at a time about one VIP. There is one rival, or two: a machine that has the key
	// can claim a VIP for as many hardware addresses as it likes.
	maxChallenged = 8
	// nonceLife is how long a nonce is used. An answer is accepted for at least that time, and at most
	// twice as long.
	nonceLife = 2 * time.Second
)

// How long after another speaker of this cluster has claimed a VIP the VIP is announced again, if it is still ours.
const (
	// correction is for one that ranks below this one, and corrects its clients. If
	// that speaker is the next owner, this node usually hears before that the VIP leaves.
	correction = 400 * time.Millisecond
	// lag is for such a speaker while no speaker is lost: then it is the next owner, and this node will
	// hear that soon.
	lag = 5 * time.Second
)

// A node that has yielded to another speaker asks that speaker each pollInterval. It claims the VIP again
// when maxMissed answers in a row are missing.
const (
	pollInterval   = 500 * time.Millisecond
	maxMissed      = 2
	pollsPerSecond = 500
)

// While speakers are lost, each speaker announces one VIP in turn each beaconInterval, so that the two
// sides of a partition hear each other when it heals. In a large cluster each speaker waits longer, for a
// random time: one beacon of any speaker is enough. A speaker that meets a rival announces all its VIPs
// again, except the ones that the rival has just claimed, and at most once in roundInterval. So all clients
// are corrected within a second, by a beacon, a round and a correction.
const (
	beaconInterval = 400 * time.Millisecond
	roundWait      = 100 * time.Millisecond
	roundInterval  = 10 * time.Second
)

// correct schedules an announcement of a VIP that a lower-ranking speaker has claimed.
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

// announceRound announces everything once more because a rival was met, which may claim more VIPs than
// this node has heard.
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
	ring   []*vip // the VIPs whose turn is still to come in this round
	random *rand.Rand
}

// next returns the next VIP in the ring. Nil: there is none. VIPs that another speaker has just claimed are
// left out: they wait for their correction.
func (b *beacons) next(vips map[netip.Addr]*vip) *vip {
	for range 2 { // the rest of the ring, and once around
		for len(b.ring) > 0 {
			v := b.ring[0]
			if b.ring = b.ring[1:]; !v.gone && !v.Leaving && v.reason == "" && !v.contested() {
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

// ask schedules a question to a speaker about a VIP, unless one is scheduled already. Others are asked when they claim it again.
func (m *Machine) ask(p pending) {
	if _, asked := p.vip.challenged[p.to]; asked || len(p.vip.challenged) == maxChallenged {
		return
	}
	if p.vip.challenged == nil {
		p.vip.challenged = map[wire.MAC]bool{}
	}
	p.vip.challenged[p.to] = p.answered
	m.queue.enter(p)
}

// askChallenged asks the speaker that claims a VIP of ours. If it has given the VIP up since, or does not answer the last question,
// hosts that believed the claim are corrected. In the second case somebody repeats that speaker's claims.
func (m *Machine) askChallenged(p pending) [][]byte {
	switch v := p.vip; {
	case v.reason == Yielded && (v.by == p.to || p.asked == challenges):
		return nil // It has answered; or this node has yielded to a third speaker.
	case p.answered:
		m.defend(v, m.now)
		return nil
	case p.asked == challenges:
		m.noteConflict(v, Note{Other: p.to, Silent: true, Announced: v.reason == ""})
		m.defend(v, m.now)
		return nil
	}
	p.step, p.due = stepChallengeAgain, m.now.Add(challengeWait)
	if !m.challenges.AllowN(m.now, 1) {
		m.ask(p)
		return nil
	}
	p.asked++
	m.ask(p)
	return [][]byte{m.question(p.vip, p.to)}
}

// question returns the frame that asks a speaker, or all, whether it has the VIP.
func (m *Machine) question(v *vip, to wire.MAC) []byte {
	return m.Protocol.Probe(m.numbered(v, m.nonces.of(v.addr, m.now)), to)
}

// numbered returns the statement of a question about the VIP, or of the answer to it.
func (c *Config) numbered(v *vip, n seal.Nonce) wire.Statement {
	return wire.Statement{Self: c.Self, VIP: v.addr, Seal: c.Keys.First().Numbered(v.addr, c.Self, v.Home, n)}
}

// hasAnswered notes that the speaker, if it is asked about its claim, has shown that it made the claim itself.
func (v *vip) hasAnswered(speaker wire.MAC) {
	if _, asked := v.challenged[speaker]; asked {
		v.challenged[speaker] = true
	}
}

// yield leaves the VIP to another speaker, and polls that speaker from then on.
func (m *Machine) yield(v *vip, to wire.MAC) {
	v.hasAnswered(to)
	fresh := v.reason != Yielded
	if v.reason, v.by, v.missed = Yielded, to, 0; !fresh {
		return
	}
	v.heard, v.polls = false, 0
	m.queue.enter(pending{vip: v, step: stepPoll, due: m.now.Add(pollInterval)})
	m.announceRound()
}

// poll asks the speaker to which this node has yielded whether it still has the VIP. About an arriving VIP it asks all
// speakers until one has answered. If the last questions had no answer, this node resumes the VIP.
func (m *Machine) poll(v *vip) [][]byte {
	if v.reason != Yielded {
		return nil
	}
	if v.missed == maxMissed {
		m.resume(v)
		return nil
	}
	again := pending{vip: v, step: stepPoll, due: m.now.Add(pollInterval)}
	// The first questions about an arriving VIP are not limited: perhaps nobody answers clients until it is claimed.
	if first := v.Arriving && v.polls < maxMissed; !first && !m.polls.AllowN(m.now, 1) {
		m.queue.enter(again)
		return nil
	}
	v.polls++
	v.missed++
	if v.polls == 1 && !v.Arriving {
		m.out.note(Note{Kind: Yields, VIP: v.addr, Other: v.by})
	}
	m.queue.enter(again)
	return [][]byte{m.question(v, v.by)}
}

// resume claims a VIP that was left to another speaker. A VIP that this node has not found to be free is probed first: the
// other speaker may have given it up because another machine has it.
func (m *Machine) resume(v *vip) {
	v.reason = ""
	switch {
	case v.unprobed:
	case v.Arriving:
		m.out.note(Note{Kind: Arrived, VIP: v.addr})
	default:
		m.out.note(Note{Kind: Resumes, VIP: v.addr, Other: v.by})
	}
	m.announceAnew(v)
}

// nonces are the numbers of questions. They are derived from a secret, so that nothing has to be kept for a
// question.
type nonces struct {
	secret [32]byte
	begin  time.Time
}

// of returns the nonce of questions about a VIP.
func (n *nonces) of(addr netip.Addr, at time.Time) (nonce seal.Nonce) {
	h := hmac.New(sha256.New, n.secret[:])
	address := addr.As16()
	h.Write(address[:])
	h.Write(binary.BigEndian.AppendUint64(nil, uint64(at.Sub(n.begin)/nonceLife)))
	copy(nonce[:], h.Sum(nil))
	if nonce == (seal.Nonce{}) { // the zero value is no nonce
		nonce[0] = 1
	}
	return nonce
}

// fits reports whether the nonce is that of a recent question about the VIP.
func (n *nonces) fits(nonce seal.Nonce, addr netip.Addr, now time.Time) bool {
	return nonce == n.of(addr, now) || nonce == n.of(addr, now.Add(-nonceLife))
}
