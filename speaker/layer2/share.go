package layer2

import (
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/lodestone-lb/lodestone/speaker/election"
	"github.com/lodestone-lb/lodestone/speaker/layer2/clients"
	"github.com/lodestone-lb/lodestone/speaker/layer2/seal"
)

// A VIP that nodes share is announced to nobody in general. Each of them answers
// the clients that are its part, and notes who asks for it: requests are
// broadcast, so all hear all. When the nodes change, each tells the clients that
// it has gained, and those alone.
//
// A node that comes, with nothing noted, asks all on the segment; the others tell
// it the clients that send to them. A node that goes does so too, before it stops
// to answer: its heirs ask it. And whoever has clients that are not its own any
// more tells the others of them, who may not know that they were away. To tell is
// to repeat a client's request, so that it is dealt with like one that was heard.
// All this is sealed, and claims nothing: no client believes anything because of it.
//
// The kernel of such a node may ask for the VIP, too: it forwards what no Service
// takes, a ping or a client's own check of its neighbour. Nobody answers it, as where
// one node has the VIP: the next one would forward it again.

// sharedSteps is how many steps of the schedule questions to the others take:
// they hear us in the first second, or do not matter.
const sharedSteps = 3

// part is the clients of a shared VIP that are this node's.
type part struct {
	share   *election.Share
	node    string
	sharers []string
}

// has reports whether the client is this node's.
func (p *part) has(hardware [6]byte) bool { return p.share.NodeOf(hardware) == p.node }

// shared reports whether nodes share the VIP.
func (o *ownership) shared() bool { return o.part.Load() != nil }

// divide makes the node one of these that share the VIP, and reports whether they
// were others before.
func (o *ownership) divide(node string, sharers []string) bool {
	before := o.part.Load()
	if sharers == nil || before != nil && slices.Equal(before.sharers, sharers) {
		return false
	}
	sharers = slices.Clone(sharers)
	o.part.Store(&part{election.NewShare(o.vip, sharers), node, sharers})
	return before != nil
}

// divide deals with VIPs that are shared by other nodes than before. Who answers
// meanwhile knows that already.
func (p *port) divide(changed []*ownership) {
	p.answering.wait(p.conn)
	for _, o := range changed {
		if (*p.owned.Load())[o.vip] != o {
			continue
		}
		now, no := p.clients.Divide(o.vip, o.part.Load().has)
		p.contested.put(contention{ownership: o, kind: divided})
		for _, c := range now {
			p.contested.put(contention{ownership: o, kind: gained, client: c})
		}
		for _, c := range no {
			p.contested.put(contention{ownership: o, kind: lost, client: c})
		}
	}
}

// sharer reports whether another speaker says m of a VIP that is shared.
func (p *port) sharer(o *ownership, m message) bool {
	switch {
	case !o.shared() || m.seal == (seal.Seal{}):
		return false
	case m.probes():
		return p.seals.Valid(m.seal, o.vip, m.via)
	}
	return p.seals.Repeats(m.seal, o.vip, m.via, seal.Client{Hardware: m.from, Addr: m.claims})
}

// consult deals with what another sharer says: it asks for clients, or tells of
// one.
func (p *port) consult(o *ownership, m message) contention {
	p.siblings[m.via] = true
	if m.probes() {
		return contention{ownership: o, kind: asked, by: m.via, joins: m.seal.Joins()}
	}
	c := clients.Client{Hardware: m.from, Addr: m.claims}
	if o.part.Load().has(m.from) && !o.leaving.is() {
		return contention{ownership: o, kind: gained, client: c}
	}
	p.clients.Note(o.vip, c, clients.Elsewhere)
	return contention{}
}

// mine notes the client that asks, and reports whether it is this node's. Who
// looks whether the address is in use will send nothing.
func (p *port) mine(o *ownership, m message) bool {
	mine := o.part.Load().has(m.from)
	if m.probes() {
		return mine
	}
	at := clients.Elsewhere
	switch {
	case mine:
		at = clients.Here
	case !m.to.group(): // it verifies what it knows
		at = clients.Lingering
	}
	p.clients.Note(o.vip, clients.Client{Hardware: m.from, Addr: m.claims}, at)
	return mine
}

// agree deals with what is new about those who share a VIP.
func (p *port) agree(q *queue, c contention) {
	switch c.kind {
	case asked:
		p.brief(q, c)
	case divided:
		q.lines[0] = append(q.lines[0], turn{ownership: c.ownership, resumed: q.resumed[c.ownership]})
	case gained:
		q.correct(c.ownership, c.client)
	case lost:
		for to := range q.sharers {
			q.tell(c.ownership, c.client, to)
		}
	}
}

// brief tells another sharer the clients that send to this node: one that comes,
// or the heir of a VIP that leaves. The last frame tells it of this node.
func (p *port) brief(q *queue, c contention) {
	q.sharers[c.by] = true
	last := line{ownership: c.ownership, step: stepBrief, to: c.by}
	if !c.joins && (!c.leaving.is() || c.leaving.briefed(p.key, c.by)) || q.waiting[last] {
		return // the same answer would wait behind itself, however often somebody repeats the question
	}
	q.waiting[last] = true
	for _, client := range p.clients.Sending(c.vip) {
		q.tell(c.ownership, client, c.by)
	}
	q.tell(c.ownership, clients.Client{}, c.by)
}

// share returns the frames for a turn of a shared VIP.
func (p *port) share(q *queue, t turn) [][]byte {
	part := t.part.Load()
	switch {
	case t.step == stepDefence:
		for _, c := range p.clients.Sending(t.vip) {
			if part.has(c.Hardware) {
				q.correct(t.ownership, c)
			}
		}
		return nil
	case t.step == stepClient || t.step == stepClientAgain:
		return p.correct(q, t)
	case t.step == stepBrief && t.client == clients.Client{}:
		t.leaving.inherited(p.key, t.to, len(part.sharers)-1)
		return [][]byte{p.key.protocol.probe(p.statement(t.ownership), t.to)}
	case t.step == stepBrief:
		s := p.statement(t.ownership)
		s.seal = p.seals.Repeating(t.vip, p.key.mac, seal.Client{Hardware: t.client.Hardware, Addr: t.client.Addr})
		return [][]byte{p.key.protocol.repeat(s, t.client, t.to)}
	case t.step >= sharedSteps:
		delete(q.resumed, t.ownership)
		return nil
	case t.joins && t.step == 1: // each time all are told again
		q.again(t)
		return nil
	case t.joins:
		s := p.statement(t.ownership)
		s.seal = p.seals.Joining(t.vip, p.key.mac)
		return [][]byte{p.key.protocol.probe(s, mac{})}
	}
	for to := range q.sharers {
		q.tell(t.ownership, clients.Client{}, to)
	}
	q.again(t)
	return nil
}

// correct tells one client what an announcement tells all, twice: a frame may be
// lost.
func (p *port) correct(q *queue, t turn) [][]byte {
	if !t.part.Load().has(t.client.Hardware) {
		return nil // it is another node's by now
	}
	if t.step == stepClient {
		p.clients.Note(t.vip, t.client, clients.Here)
		t.step, t.due = stepClientAgain, time.Now().Add(correctAgain)
		q.lines[stepClientAgain] = append(q.lines[stepClientAgain], t)
	}
	frames := p.key.protocol.announce(p.statement(t.ownership), false)
	for _, f := range frames {
		copy(f, t.client.Hardware[:])
	}
	return frames
}

// correctAgain is when a client is told again. Linux takes no more than one plain
// change of an entry per second (sysctl neigh/*/locktime).
const correctAgain = time.Second

// correct enters that a client is to be told, as soon as possible, unless that is
// waiting.
func (q *queue) correct(o *ownership, c clients.Client) {
	if at := (line{ownership: o, step: stepClient, client: c}); !q.waiting[at] && len(q.lines[stepClient]) < maxContentions {
		q.waiting[at] = true
		q.lines[stepClient] = append(q.lines[stepClient], turn{ownership: o, step: stepClient, client: c})
	}
}

// tell enters that another sharer is told of a client, or of no client: that all
// was told, and this node asks for what it may not know.
func (q *queue) tell(o *ownership, c clients.Client, to mac) {
	q.lines[stepBrief] = append(q.lines[stepBrief], turn{ownership: o, step: stepBrief, due: time.Now(), client: c, to: to})
}

// leaving is what an ownership knows of its end when its VIP moves to another
// node: on which ports that node has claimed it. A port answers until then, so
// that at every moment one of the two does, and not after, so that both never
// do for longer than a frame takes.
//
// The next owner may be faster than this node hears that it is the next one.
// Claims are therefore noted all the time.
type leaving struct {
	begun  atomic.Bool
	mu     sync.Mutex
	claims map[portKey]time.Time // the last one
	told   map[portKey]time.Time // the last announcement of this node
	// heirs are those of a shared VIP that know its clients.
	heirs map[portKey]map[mac]bool
}

// begin says that the VIP leaves. Claims so old that they were contradicted
// are not the next owner's.
func (l *leaving) begin() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.begun.Load() {
		return
	}
	for key, at := range l.claims {
		if time.Since(at) > defence {
			delete(l.claims, key)
		}
	}
	l.begun.Store(true)
}

// is reports whether the VIP leaves.
func (l *leaving) is() bool { return l.begun.Load() }

// crossing is how long frames may take that cross on the wire.
const crossing = 20 * time.Millisecond

// claimed notes that another host claims the VIP on the port and reports
// whether the VIP leaves. A claim that may have crossed our announcement does not
// count: who made it yields, perhaps, and repeats it otherwise.
func (l *leaving) claimed(on portKey) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.claims == nil {
		l.claims = map[portKey]time.Time{}
	}
	if time.Since(l.told[on]) > crossing {
		l.claims[on] = time.Now()
	}
	return l.begun.Load()
}

// contradicted notes that this node has announced the VIP on the port: clients
// do not believe who claimed it before.
func (l *leaving) contradicted(on portKey) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.claims, on)
	if l.told == nil {
		l.told = map[portKey]time.Time{}
	}
	l.told[on] = time.Now()
}

// left reports whether the VIP has gone from the port to another host.
func (l *leaving) left(on portKey) bool {
	if !l.begun.Load() {
		return false
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	_, claimed := l.claims[on]
	return claimed
}

// inherited notes that one of the heirs of a shared VIP knows its clients. When
// all do, the VIP has gone from the port.
func (l *leaving) inherited(on portKey, by mac, heirs int) {
	if !l.begun.Load() {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.heirs == nil {
		l.heirs = map[portKey]map[mac]bool{}
	}
	if l.heirs[on] == nil {
		l.heirs[on] = map[mac]bool{}
	}
	if l.heirs[on][by] = true; len(l.heirs[on]) < heirs {
		return
	}
	if l.claims == nil {
		l.claims = map[portKey]time.Time{}
	}
	l.claims[on] = time.Now()
}

// briefed reports whether the heir knows the clients.
func (l *leaving) briefed(on portKey, by mac) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.heirs[on][by]
}
