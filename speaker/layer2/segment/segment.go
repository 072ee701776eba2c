// Package segment decides what a node does about its VIPs on one segment, in one family: which requests it
// answers, when it announces, how it probes a new address, and what it does when another machine claims a
// VIP.
//
// Machine does this, and is deterministic. Events go in with the time: VIPs are assigned, a message was
// received, speakers are lost, something is due. Effects come out: frames to send, and notes to log. The
// machine has no goroutine, clock, socket, lock or logger: the same events give the same frames, and a test
// can let several machines play against each other. Package layer2 has the sockets.
//
// The files, from the outside in:
//
//	segment.go   Machine: events, effects, and the state of a VIP
//	receive.go   a received message: who answers a request, and whose claim of a VIP it is
//	foreign.go   the conflict with a foreign host that claims a VIP: report it, and defend the VIP
//	contest.go   two speakers that claim a VIP: ask the other one, yield, and answer again when it has gone
//	probe.go     whether a new address is in use, and when it is free again
//	queue.go     what has to be sent, and when
//	announce.go  the announcements of a VIP, and when they are repeated
//	deaf.go      whether the interface is deaf: it carries one way only
package segment

import (
	"encoding/binary"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"time"

	"golang.org/x/time/rate"

	"github.com/lodestone-lb/lodestone/speaker/layer2/seal"
	"github.com/lodestone-lb/lodestone/speaker/layer2/wire"
)

// Event is what happens: Assigned, Surroundings, Received, Counted or Due.
type Event interface{ event() }

// Assigned replaces the VIPs that the node announces here. The machine keeps no part of
// the map.
type Assigned struct{ VIPs map[netip.Addr]VIP }

// VIP is how a VIP is announced.
type VIP struct {
	// Probe is set if the VIP has to be probed before it is announced.
	Probe bool
	// Home is set if the node owns the VIP when all nodes are able to. Of two speakers that claim the VIP, the
	// one with Home keeps it.
	Home bool
	// Apart is set if the node has lost the other speakers with a link. It yields to a speaker that is not
	// apart.
	Apart bool
	// Hurry is set if a VIP that another machine has is probed each second, and not each ten.
	Hurry bool
	// Leaving is set while the VIP moves to another node. This node answers for it until that node is
	// heard.
	Leaving bool
	// Arriving is set while the VIP moves to this node, which should not have it yet. The node claims the VIP
	// only if no other speaker answers for it.
	Arriving bool
	// Refresh is how often the VIP is announced again. Zero: never.
	Refresh time.Duration
}

// Surroundings is what else the node knows.
type Surroundings struct {
	// Whole is set if no speaker is lost.
	Whole bool
	// Crowd is the factor, at least 1, by which speakers lengthen intervals in a large cluster, so that
	// all together do not send more on the segment.
	Crowd int
}

// Received is a message of another machine to this one or to all. Those that neither ask for an assigned VIP
// nor claim one may be left out.
type Received struct{ Message wire.Message }

// Counted is how many frames the interface has received, and how many messages of other machines to this one or to
// all were among them, left out or not. See WantsCount.
type Counted struct {
	Frames, Messages uint64
	// Known is not set if the kernel did not answer how many frames.
	Known bool
}

// Due is sent at the time that Next returned.
type Due struct{}

func (Assigned) event()     {}
func (Surroundings) event() {}
func (Received) event()     {}
func (Counted) event()      {}
func (Due) event()          {}

// Effects are what follows from an event. They are valid until the next one.
type Effects struct {
	// Frames have to be sent now, in this order. If sending one fails, that is no event: any frame may be
	// lost on the segment.
	Frames [][]byte
	Notes  []Note
	// How many packets of a kind were sent or received.
	Requests, Replies, Announcements, Conflicts int
}

// Kind is what a Note is about.
type Kind int

// The kinds of notes, with the fields that they set in brackets.
const (
	// Conflict: another host claims a VIP [VIP, Other, First, OtherCluster, Silent, Announced].
	Conflict Kind = iota
	// Free: a VIP was probed, and no other machine has it [VIP].
	Free
	// Arrived: no other speaker answers for an arriving VIP, and it is announced. Whether a foreign host has it was not asked [VIP].
	Arrived
	// Yields: the VIP is left to another speaker [VIP, Other].
	Yields
	// Resumes: that speaker is silent, and the VIP is announced again [VIP, Other].
	Resumes
	// Deaf: the interface receives nothing. Hears: it does again.
	Deaf
	Hears
	// AllBack: the interface is deaf still, but no speaker is lost any more.
	AllBack
)

// Note is something that has to be logged, or that concerns other segments.
type Note struct {
	Kind  Kind
	VIP   netip.Addr
	Other wire.MAC
	// First is set for the first conflict of the VIP in DefendInterval.
	First bool
	// OtherCluster is set if the other machine is a speaker with another key.
	OtherCluster bool
	// Silent is set if the claim has a seal of this cluster, but that speaker does not answer.
	Silent bool
	// Announced is set if this node announces the VIP all the same.
	Announced bool
}

// Reason is a stable code for why a VIP of this node is not announced.
type Reason string

// The reasons that a segment has.
const (
	// Probing: the VIP is new, and the node asks whether another machine has the address.
	Probing Reason = "Probing"
	// AddressConflict: the VIP is new, and a machine that is no speaker of this cluster has the address.
	AddressConflict Reason = "AddressConflict"
	// Yielded: another speaker with our key announces the VIP, too, and ranks above this one. The two do
	// not know each other by the membership.
	Yielded Reason = "Yielded"
)

// Config are the settings of a machine.
type Config struct {
	Protocol wire.Protocol
	// Self is the hardware address of the interface.
	Self wire.MAC
	// Keys are the keys that the speakers of the cluster share.
	Keys seal.Keys
	// Secret is random and known to nobody else. The nonces of questions and the times of beacons are
	// derived from it.
	Secret [32]byte
}

// Machine decides what a node does on one segment, in one family. It has one owner at a time.
type Machine struct {
	Config
	Surroundings
	now time.Time // of the event
	out Effects

	vips    map[netip.Addr]*vip
	queue   queue
	beacons beacons
	round   time.Time // when everything was announced because a rival was met
	nonces  nonces
	hearing hearing
	polls   *rate.Limiter
	// challenges bounds the questions to all speakers that claim our VIPs.
	challenges *rate.Limiter
}

// vip is the state of a VIP while it is assigned. A VIP that comes back while it leaves gets a new one.
type vip struct {
	VIP
	addr netip.Addr
	gone bool // not assigned any more
	// edition counts how often the VIP was announced or probed anew. Pending announcements and probes of
	// earlier editions are not sent.
	edition int
	// unprobed is set until a VIP that has to be probed was found to be free.
	unprobed bool

	// reason is why the VIP is not announced. Empty: it is announced. by is the machine that has it then,
	// and heard is set if there was a claim since the probes began.
	reason Reason
	by     wire.MAC
	heard  bool
	// polls counts the questions to the speaker to which this node has yielded. missed counts the last
	// ones without an answer.
	polls, missed int

	// taken is set when the next owner of a leaving VIP has it.
	taken bool
	// deferred is set when this node has left the VIP to a speaker that probes it, too. A probe does not prove anything, because it may
	// be a recorded one, and who probes answers no question. So it counts once; after that the claims of the two decide.
	deferred bool
	warned   time.Time // when a conflict was reported last
	defended time.Time // when it was last announced again because of a conflict, or is to be
	// Another speaker has just claimed the VIP, and its claim is corrected soon (correcting), or it may be
	// the next owner (lagging), or it is asked a question (challenged; true: it has answered one).
	correcting, lagging bool
	challenged          map[wire.MAC]bool
}

// New returns a machine without VIPs, in whole surroundings.
func New(c Config, now time.Time) *Machine {
	return &Machine{
		Config: c, Surroundings: Surroundings{Whole: true, Crowd: 1}, now: now,
		vips: map[netip.Addr]*vip{}, queue: queue{pace: rate.NewLimiter(framesPerSecond, burstFrames)}, nonces: nonces{c.Secret, now},
		beacons:    beacons{random: rand.New(rand.NewPCG(binary.BigEndian.Uint64(c.Secret[:]), binary.BigEndian.Uint64(c.Secret[8:])))},
		polls:      rate.NewLimiter(pollsPerSecond, pollsPerSecond/10),
		challenges: rate.NewLimiter(challengesPerSecond, challengesPerSecond/2),
	}
}

// Step takes one event, and returns what follows from it.
func (m *Machine) Step(e Event, now time.Time) *Effects {
	m.now, m.out = now, Effects{Frames: m.out.Frames[:0], Notes: m.out.Notes[:0]}
	switch e := e.(type) {
	case Received:
		m.receive(e.Message)
	case Due:
		m.sendDue()
	case Assigned:
		m.assign(e.VIPs)
	case Surroundings:
		m.lookAround(e)
	case Counted:
		m.hearing.count(e, now, &m.out)
	}
	return &m.out
}

// Next returns when something is due next. ok is not set if there is nothing.
func (m *Machine) Next() (at time.Time, ok bool) { return m.queue.next() }

// assign makes these the VIPs of the segment. From now on nothing is sent for others.
func (m *Machine) assign(want map[netip.Addr]VIP) {
	for addr, v := range m.vips {
		if _, stays := want[addr]; !stays {
			v.gone = true
			delete(m.vips, addr)
		}
	}
	var fresh []*vip
	for addr, w := range want {
		v := m.vips[addr]
		switch {
		case v == nil, !w.Leaving && (v.Leaving || v.Arriving && !w.Arriving && v.reason == Yielded):
			v = renew(v, addr, w)
			m.vips[addr], fresh = v, append(fresh, v)
		case v.Refresh != w.Refresh && !w.Leaving && v.reason == "": // announced now, and from now on each interval
			fresh = append(fresh, v)
		case w.Leaving && !v.Leaving:
			if v.reason == "" {
				fresh = append(fresh, v)
			}
		}
		v.VIP = w
	}
	slices.SortFunc(fresh, (*vip).compare)
	m.queue.tidy(len(m.vips))
	for _, v := range fresh {
		switch {
		case v.reason == Yielded:
			m.queue.enter(pending{vip: v, step: stepPoll, due: m.now.Add(pollInterval)})
		case v.Leaving && !v.unprobed:
			m.queue.enter(pending{vip: v, step: stepProbe, edition: v.edition, due: m.now})
		default:
			m.announceAnew(v)
		}
	}
}

// renew returns a new state for a VIP that comes, or comes back. If this node still answers for the VIP, it
// neither probes it nor waits for another speaker. before may be nil.
func renew(before *vip, addr netip.Addr, w VIP) *vip {
	answers := before.answersAtLast()
	if before != nil {
		before.gone = true
	}
	v := &vip{addr: addr, unprobed: w.Probe && !answers}
	if w.Arriving && !answers {
		v.reason = Yielded
	}
	return v
}

// answersAtLast reports whether this node still answers for a VIP that leaves. It does until another speaker claims the VIP and
// answers the question whether it has it: so one of the two nodes answers at every moment, and both do for no longer than a few frames
// take. If the claim came before this node heard that the VIP leaves, the probe of this node brings another one. v may be nil.
func (v *vip) answersAtLast() bool { return v != nil && v.Leaving && !v.taken && v.reason == "" }

// lookAround takes over the surroundings. When speakers are lost, beacons begin, and a speaker that seemed
// to be the next owner of a VIP is a rival.
func (m *Machine) lookAround(s Surroundings) {
	lost, back := m.Whole && !s.Whole, !m.Whole && s.Whole
	m.Surroundings = s
	if back && m.hearing.deaf {
		m.out.note(Note{Kind: AllBack})
	}
	if !lost {
		return
	}
	m.hearing = hearing{}
	lagging := m.queue.lines[stepLag]
	m.queue.lines[stepLag] = nil
	for _, p := range lagging {
		p.vip.lagging = false
		m.correct(p.vip)
	}
	if !m.queue.waits(stepBeacon) {
		m.queue.enter(pending{step: stepBeacon, due: m.now.Add(m.beacons.wait(m.Crowd))})
	}
}

// statement returns this node's claim of the VIP.
func (c *Config) statement(v *vip) wire.Statement {
	key, s := c.Keys.First(), wire.Statement{Self: c.Self, VIP: v.addr}
	if v.Apart {
		s.Seal = key.Apart(v.addr, c.Self, v.Home)
	} else {
		s.Seal = key.Seal(v.addr, c.Self, v.Home)
	}
	return s
}

func (e *Effects) send(frames ...[]byte) { e.Frames = append(e.Frames, frames...) }

func (e *Effects) note(n Note) { e.Notes = append(e.Notes, n) }

// State is the state of a VIP on the segment.
type State struct {
	// Reason is why the VIP is not announced. Empty: it is announced.
	Reason Reason
	// Other is the machine that has the VIP, if that is the reason.
	Other wire.MAC
}

// State returns the state of an assigned VIP.
func (m *Machine) State(addr netip.Addr) State {
	if v := m.vips[addr]; v != nil {
		return State{v.reason, v.by}
	}
	return State{}
}

// Withheld returns how many VIPs are not announced, by reason, without those that arrive.
func (m *Machine) Withheld() map[Reason]int {
	n := map[Reason]int{}
	for _, v := range m.vips {
		if v.reason != "" && !v.Arriving {
			n[v.reason]++
		}
	}
	return n
}

// Leaving returns the leaving VIPs for which this node still answers, by address.
func (m *Machine) Leaving() (addrs []netip.Addr) {
	for addr, v := range m.vips {
		if v.answersAtLast() {
			addrs = append(addrs, addr)
		}
	}
	slices.SortFunc(addrs, netip.Addr.Compare)
	return addrs
}

// byAddress returns the VIPs in order.
func byAddress(vips map[netip.Addr]*vip) []*vip {
	return slices.SortedFunc(maps.Values(vips), (*vip).compare)
}

func (v *vip) compare(other *vip) int { return v.addr.Compare(other.addr) }
