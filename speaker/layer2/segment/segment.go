// Package segment decides what a node does about its VIPs on one segment, in one
// family: which requests it answers, when it announces, what it asks before it
// announces an address that is new, and what follows when somebody else claims a VIP.
//
// Machine is all of it, and it is deterministic. What happens goes in as events, with the
// time: VIPs are assigned, a frame has come in, speakers are lost, something is due. What
// the node does comes out as effects: frames to send, and notes of what people are to
// hear. There is no goroutine, clock, socket, lock or logger in here, so that three
// machines can be played against each other in one test, and the same events give the
// same frames. Package layer2 is the shell: it has the sockets.
//
// The files, from the outside in:
//
//	segment.go   events, effects, and what is kept of a VIP
//	receive.go   a frame has come in: answer it, or deal with the claim in it
//	contest.go   two speakers of this cluster claim one VIP: who yields
//	probe.go     is a new address in use? is the host that has it gone?
//	queue.go     what is to be sent, and when
//	hearing.go   does the interface carry one way only?
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

// VIP is how one VIP is to be announced.
type VIP struct {
	// Probe has it asked first whether another host has the address.
	Probe bool
	// Home: the node owns it while all nodes are able. Of two speakers that claim it, that
	// one keeps it.
	Home bool
	// Apart: the node has lost the other speakers with its link to them, and yields to
	// whoever has not.
	Apart bool
	// Hurry has it looked at each second, and not each 10, whether a host that has the
	// address is gone.
	Hurry bool
	// Leaving: it moves to another node, and is answered for until that one is heard.
	Leaving bool
	// Refresh is how often it is announced again. Zero: never.
	Refresh time.Duration
}

// Surroundings is what the node knows besides.
type Surroundings struct {
	// Whole: no speaker is lost.
	Whole bool
	// Crowd is by how much an interval of each speaker is longer than that of a few
	// speakers, so that all together do no more on the segment. At least 1.
	Crowd int
	// Own are the node's own hardware addresses: what comes from them is its own.
	Own map[wire.MAC]bool
}

// Received is a frame that came in.
type Received struct{ Frame []byte }

// Counted is how many frames have come in on the interface. See WantsCount.
type Counted struct {
	Frames uint64
	// Known is not set if the kernel did not say.
	Known bool
}

// Due says that it is time for what Next returned.
type Due struct{}

func (Assigned) event()     {}
func (Surroundings) event() {}
func (Received) event()     {}
func (Counted) event()      {}
func (Due) event()          {}

// Effects are what follows from an event. They are valid until the next one.
type Effects struct {
	// Frames are to be sent now, in this order. One that is lost is no event: the
	// segment may lose each.
	Frames [][]byte
	Notes  []Note
	// How many packets of a kind were sent or received.
	Requests, Replies, Announcements, Conflicts, Malformed int
}

// Kind is what a Note is about.
type Kind int

// The kinds of notes. What they are about is in brackets.
const (
	// Conflict: another host claims a VIP [VIP, Other, First, OtherCluster, Silent, Announced].
	Conflict Kind = iota
	// Free: a VIP was probed, and nobody else has it [VIP].
	Free
	// Yields: the VIP is left to another speaker [VIP, Other].
	Yields
	// Resumes: that speaker is silent, and the VIP is announced again [VIP, Other].
	Resumes
	// Deaf: the interface carries nothing to this node. Hears: it does again.
	Deaf
	Hears
)

// Note is something that people are to hear, or that other segments are concerned by.
type Note struct {
	Kind  Kind
	VIP   netip.Addr
	Other wire.MAC
	// First: the first conflict of the VIP in DefendInterval.
	First bool
	// OtherCluster: the other one is a speaker, which has another key.
	OtherCluster bool
	// Silent: the claim has a seal of this cluster, and who made it does not answer.
	Silent bool
	// Announced: the VIP is announced here all the same.
	Announced bool
}

// Reason is a stable code for why a VIP of this node is not announced.
type Reason string

// The reasons that a segment has.
const (
	// Probing: the VIP is new, and whether somebody else has the address is
	// being asked.
	Probing Reason = "Probing"
	// AddressConflict: the VIP is new, and a host that is no speaker of this
	// cluster has the address.
	AddressConflict Reason = "AddressConflict"
	// Yielded: another speaker with our key announces the VIP, too, and ranks
	// above this one. The membership does not know them both.
	Yielded Reason = "Yielded"
)

// Config is what a machine is made of.
type Config struct {
	Protocol wire.Protocol
	// Self is the hardware address of the interface.
	Self wire.MAC
	// Keys are what the speakers of the cluster share, and nobody else.
	Keys seal.Keys
	// Secret is random, and nobody else knows it: the numbers of questions, and the moments
	// of beacons, follow from it.
	Secret [32]byte
}

// Machine is what a node does on one segment, in one family. It has one owner at a time.
type Machine struct {
	Config
	Surroundings
	now time.Time // of the event
	out Effects

	vips    map[netip.Addr]*vip
	queue   queue
	beacons beacons
	round   time.Time // when all was announced because a rival was met
	nonces  nonces
	hearing hearing
	polls   *rate.Limiter
	// challenges bounds the questions to all who claim VIPs here.
	challenges *rate.Limiter
}

// vip is what is kept of one VIP from when it is assigned until it is not, or until it
// comes back while it leaves.
type vip struct {
	VIP
	addr netip.Addr
	gone bool // assigned no more
	// edition counts how often it was announced anew: what is left of earlier ones is not
	// sent.
	edition int

	// reason is why it is not announced, by whose fault, and heard whether there was a claim since
	// the probes began. Empty: it is announced.
	reason Reason
	by     wire.MAC
	heard  bool
	// polls counts the questions to the speaker that it was left to, missed the last ones
	// without an answer.
	polls, missed int

	// claimed is when another host claimed it last, unless it was announced since. announced
	// is when it was. See left.
	claimed, announced time.Time
	warned             time.Time // of the last conflict that people heard of
	defended           time.Time // when it was last announced again because of a conflict, or is to be
	// Another speaker claimed it just now: it is to be corrected, or may be the next owner,
	// or is being asked.
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
		m.receive(e.Frame)
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

// Next returns when there is something due. ok is not set if there is nothing.
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
		case v == nil, v.Leaving && !w.Leaving: // who comes back is announced as if it were new
			if v != nil {
				v.gone = true
			}
			v = &vip{addr: addr}
			if w.Probe {
				v.reason = Probing
			}
			m.vips[addr], fresh = v, append(fresh, v)
		case v.Refresh != w.Refresh && !w.Leaving && v.reason == "": // announced now, and from now on each interval
			v.edition++
			fresh = append(fresh, v)
		case w.Leaving && !v.Leaving && m.now.Sub(v.claimed) > defence:
			v.claimed = time.Time{} // a claim that was contradicted is not the next owner's
		}
		v.VIP = w
	}
	sortByAddress(fresh)
	for _, v := range fresh {
		if v.reason == Probing {
			m.queue.enter(pending{vip: v, step: stepProbe, due: m.now})
		} else {
			m.queue.enter(pending{vip: v, edition: v.edition})
		}
	}
}

// left reports whether a VIP that leaves has gone to its next owner. This node answers for it until
// another host claims it, and not after: at every moment one of the two nodes answers, and both
// do for no longer than a frame takes. The claim may come before this node hears that the VIP
// leaves, so that claims are recorded at all times.
func (v *vip) left() bool { return v.Leaving && !v.claimed.IsZero() }

// lookAround takes over what is new about the surroundings. While speakers are lost there
// are beacons, and who was taken for the next owner of a VIP is a rival.
func (m *Machine) lookAround(s Surroundings) {
	lost := m.Whole && !s.Whole
	if m.Surroundings = s; !lost {
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

// statement is what this node says of the VIP.
func (c *Config) statement(v *vip) wire.Statement {
	if v.Apart {
		return wire.Statement{Self: c.Self, VIP: v.addr, Seal: c.Keys.Apart(v.addr, c.Self, v.Home)}
	}
	return wire.Statement{Self: c.Self, VIP: v.addr, Seal: c.Keys.Seal(v.addr, c.Self, v.Home)}
}

func (e *Effects) send(frames ...[]byte) { e.Frames = append(e.Frames, frames...) }

func (e *Effects) note(n Note) { e.Notes = append(e.Notes, n) }

// State is how a VIP stands on the segment.
type State struct {
	// Reason is why it is not announced. Empty: it is.
	Reason Reason
	// Other is who has it, if that is known and a reason.
	Other wire.MAC
}

// State returns how a VIP that is assigned stands.
func (m *Machine) State(addr netip.Addr) State {
	if v := m.vips[addr]; v != nil {
		return State{v.reason, v.by}
	}
	return State{}
}

// Withheld returns how many VIPs are not announced, by reason.
func (m *Machine) Withheld() map[Reason]int {
	n := map[Reason]int{}
	for _, v := range m.vips {
		if v.reason != "" {
			n[v.reason]++
		}
	}
	return n
}

// Leaving returns the VIPs that leave and are still answered for, by address.
func (m *Machine) Leaving() (addrs []netip.Addr) {
	for addr, v := range m.vips {
		if v.Leaving && !v.left() && v.reason == "" {
			addrs = append(addrs, addr)
		}
	}
	slices.SortFunc(addrs, netip.Addr.Compare)
	return addrs
}

// byAddress returns the VIPs in order.
func byAddress(vips map[netip.Addr]*vip) []*vip {
	all := slices.Collect(maps.Values(vips))
	sortByAddress(all)
	return all
}

func sortByAddress(vips []*vip) {
	slices.SortFunc(vips, func(a, b *vip) int { return a.addr.Compare(b.addr) })
}
