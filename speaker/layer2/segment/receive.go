package segment

import (
	"github.com/lodestone-lb/lodestone/speaker/layer2/seal"
	"github.com/lodestone-lb/lodestone/speaker/layer2/wire"
)

// receive handles a received message.
func (m *Machine) receive(msg wire.Message) {
	if v := m.vips[msg.Claims]; v != nil {
		m.claim(v, msg) // a claim needs no answer
	} else if v := m.vips[msg.Asks]; v != nil {
		m.answer(v, msg)
	}
}

// claim handles another machine's claim of a VIP. If the machine is a speaker of this cluster, the better
// claim counts, on both sides, once the speaker has answered a question.
//
// A claim of a VIP that leaves this node counts after such an answer, too. Until then it may have been recorded earlier, or its
// speaker may have yielded meanwhile to an announcement of this node: if this node went silent, nobody would answer clients.
func (m *Machine) claim(v *vip, msg wire.Message) {
	known := m.knows(msg, v)
	switch {
	case v.Leaving && (!known || v.taken):
	case v.Leaving && msg.Seal.Nonce() == (seal.Nonce{}):
		m.out.send(m.question(v, msg.From))
	case v.Leaving:
		v.taken = m.nonces.fits(msg.Seal.Nonce(), v.addr, m.now)
	case msg.Answers && msg.Seal == (seal.Seal{}): // perhaps a speaker that answers our kernel, like any client
	case !known:
		m.reportConflict(v, msg)
		m.defend(v, m.now.Add(defence))
	case msg.Seal.Nonce() != (seal.Nonce{}):
		if m.nonces.fits(msg.Seal.Nonce(), v.addr, m.now) {
			m.yield(v, msg.From)
		}
	case msg.Seal.Outranks(m.statement(v).Seal):
		if v.reason != Yielded || v.by != msg.From { // otherwise it is being polled
			m.ask(pending{vip: v, step: stepChallenge, to: msg.From, due: m.now})
		}
	case v.reason == "", v.reason == Probing:
		m.correct(v)
	}
}

// answer answers a request for a VIP, unless another machine should answer.
func (m *Machine) answer(v *vip, msg wire.Message) {
	known := msg.Probes() && m.knows(msg, v)
	switch {
	case v.Leaving && !v.answersAtLast():
		return
	case v.Leaving && known: // the next owner, which has yielded to this node; or one that the VIP leaves, too, returns a question
		m.out.send(m.returned(v, msg)...)
		return
	case v.reason != "":
		m.meet(v, msg, known)
		return
	}
	m.out.Requests++
	s := wire.Statement{Self: m.Self, VIP: v.addr}
	if msg.Probes() && msg.Seal != (seal.Seal{}) { // from a speaker
		s = m.statement(v)
		switch n := msg.Seal.Nonce(); {
		case !known:
		case n == (seal.Nonce{}): // perhaps the VIP leaves it, and clients look for the VIP there
			m.defend(v, m.now.Add(correction))
		case m.nonces.fits(n, v.addr, m.now): // our question, returned by a speaker that the VIP leaves
			v.hasAnswered(msg.From)
			fallthrough
		default:
			s = m.numbered(v, n)
		}
	}
	m.out.send(m.Protocol.Answer(s, msg))
	m.out.Replies++
	if msg.Takes && !known {
		m.reportConflict(v, msg)
	}
}

// meet handles a probe of another machine for a VIP that this node does not announce. That machine wants
// the address, too (RFC 5227 section 2.1.1, RFC 4862 section 5.4.3).
func (m *Machine) meet(v *vip, msg wire.Message, known bool) {
	switch {
	case !msg.Probes():
	case !known:
		m.reportConflict(v, msg)
	case msg.Seal.Nonce() != (seal.Nonce{}):
		m.heed(v, msg)
	case msg.Seal.Outranks(m.statement(v).Seal) && v.reason != Yielded && !v.deferred:
		v.deferred = true
		m.yield(v, msg.From)
	}
}

// returned returns the frame that returns a question, if msg is one. So who asks sees that this node has made the claim that the question
// is about, if there was one, and that it does not announce the VIP any more.
func (c *Config) returned(v *vip, msg wire.Message) (frames [][]byte) {
	if n := msg.Seal.Nonce(); n != (seal.Nonce{}) && !msg.Seal.Returned() {
		s := wire.Statement{Self: c.Self, VIP: v.addr, Seal: c.Keys.First().Returned(v.addr, c.Self, n)}
		frames = append(frames, c.Protocol.Probe(s, msg.From))
	}
	return frames
}

// heed handles a question about a VIP that this node does not announce. If its nonce is that of a question of this node,
// it comes from the speaker that was asked: the VIP leaves that speaker, which answers for it until it hears the next owner;
// or that speaker has yielded, too.
func (m *Machine) heed(v *vip, msg wire.Message) {
	switch {
	case v.reason != Yielded:
	case !m.nonces.fits(msg.Seal.Nonce(), v.addr, m.now):
		if !v.Arriving && msg.To == m.Self { // a claim of this node and another one's answer to a question have crossed
			m.out.send(m.returned(v, msg)...)
		}
	case v.Arriving:
		v.by, v.missed = msg.From, 0
	case v.by == msg.From:
		m.resume(v)
	}
}

// knows reports whether the sender is a speaker of this cluster.
func (c *Config) knows(msg wire.Message, v *vip) bool {
	return msg.Seal != (seal.Seal{}) && c.Keys.Valid(msg.Seal, v.addr, msg.From)
}
