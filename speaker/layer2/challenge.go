package layer2

import (
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"net/netip"
	"time"

	"github.com/lodestone-lb/lodestone/speaker/layer2/seal"
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

// nonces are the numbers of a port's questions. They follow from a secret, so
// nothing is kept for a question.
type nonces struct {
	secret [sha256.Size]byte
	begin  time.Time
}

func newNonces() *nonces {
	n := &nonces{begin: time.Now()}
	rand.Read(n.secret[:]) //nolint:errcheck // never fails
	return n
}

// of returns the nonce of questions to a speaker about a VIP.
func (n *nonces) of(vip netip.Addr, to mac, at time.Time) (nonce seal.Nonce) {
	h := hmac.New(sha256.New, n.secret[:])
	address := vip.As16()
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
func (n *nonces) fits(nonce seal.Nonce, vip netip.Addr, from mac) bool {
	now := time.Now()
	return nonce == n.of(vip, from, now) || nonce == n.of(vip, from, now.Add(-nonceLife))
}

// question returns the frame that asks a speaker whether it has the VIP.
func (p *port) question(o *ownership, to mac) []byte {
	s := statement{self: p.key.mac, vip: o.vip}
	s.seal = p.seals.Numbered(o.vip, p.key.mac, o.home.Load(), p.nonces.of(o.vip, to, time.Now()))
	return p.key.protocol.probe(s, to)
}

// believe deals with the answer to a question.
func (p *port) believe(o *ownership, m message) contention {
	if p.nonces.fits(m.seal.Nonce(), o.vip, m.from) && p.holds.yield(o, m.from) {
		return contention{ownership: o, kind: yielded}
	}
	return contention{}
}

// doubt has a speaker asked that claims a VIP of ours with the better seal, unless
// it is the one that is asked all the time.
func (p *port) doubt(o *ownership, m message) contention {
	if h, held := p.holds.get(o); held && h.reason == Yielded && h.by == m.from {
		return contention{}
	}
	return contention{ownership: o, kind: higher, by: m.from}
}

// challenge enters the questions to a speaker, the first one at once, unless it is
// being asked.
func (q *queue) challenge(o *ownership, to mac) {
	q.ask(turn{ownership: o, step: stepChallenge, to: to, due: time.Now()})
}

func (q *queue) ask(t turn) {
	if at := (line{ownership: t.ownership, step: stepChallenge, to: t.to}); !q.waiting[at] {
		q.waiting[at] = true
		q.challenged[t.ownership]++
		q.lines[stepChallenge] = append(q.lines[stepChallenge], t)
	}
}

// challenge asks the speaker that claims a VIP of ours, or reports that somebody
// repeats its claims.
func (p *port) challenge(q *queue, t turn) [][]byte {
	h, held := p.holds.get(t.ownership)
	switch {
	case held && h.reason == Yielded && h.by == t.to:
		return nil // it has answered
	case t.asked == challenges:
		p.counters.conflicts.Inc()
		first := p.conflict(t.ownership, Conflict{
			VIP: t.vip, Interface: p.key.name, HardwareAddr: t.to.String(), Silent: true, Announced: !held,
		})
		if first && !held {
			q.enter(t.ownership, stepDefence, 0)
		}
		return nil
	}
	t.due = time.Now().Add(challengeWait)
	if !q.challenges.Allow() {
		q.ask(t)
		return nil
	}
	t.asked++
	q.ask(t)
	return [][]byte{p.question(t.ownership, t.to)}
}
