package watch

import (
	"cmp"
	"net/netip"
	"slices"
	"strings"
	"time"
)

const (
	// watchers is how many others watch each speaker.
	watchers = 3
	// slack is how much later than due a heartbeat may arrive in any case.
	slack = 10 * time.Millisecond
	// mostLate bounds how much longer watchers wait for a speaker that reports that it was late.
	mostLate = 120 * time.Millisecond
	// A watcher waits so long for the first heartbeat of a new member, or of one that answers and sends none, since
	// that one may not know this speaker yet; and of a member that it watches in place of one that was lost.
	firstBeat, nextBeat = time.Second, 200 * time.Millisecond
	// unsent is how long after its last heartbeat a member that still answers counts as one that sends none.
	unsent = 300 * time.Millisecond
)

// Member is a speaker that takes part.
type Member struct {
	Name string
	// Session is a random number of the speaker's start that no other speaker can have, not zero. It names the speaker in packets,
	// so that none from before its start, and no verdict about the speaker before, counts.
	Session uint64
	Addr    netip.AddrPort
	// Joined is another number each time that the speaker counts again here: it is another member then, and not lost.
	Joined int
}

// Compare compares by name.
func (m Member) Compare(o Member) int { return strings.Compare(m.Name, o.Name) }

// member is what is known of a Member.
type member struct {
	Member
	hash     uint64
	segment  netip.Addr // the first address of the network that it probably is on
	watchers []*member  // by rank, the first ones first
	watched  bool       // this speaker is one of the watchers
	lost     bool

	sequence [classes]uint64 // the last one received
	asked    uint64          // the number of the last question that it has not answered
	askedAt  time.Time
	interval time.Duration // between its heartbeats
	late     time.Duration // how much later than due it may send
	heard    time.Time     // the last packet; zero: none
	beaten   time.Time     // the last heartbeat; zero: none
	grace    time.Time     // until then it may be silent in any case
	doubt    *doubt

	// While this speaker calls for witnesses: how often it has called this member since it heard from it last, and
	// when first.
	calls     int
	firstCall time.Time
}

func newMember(m Member) *member {
	bits := 24
	if m.Addr.Addr().Is6() {
		bits = 64
	}
	segment, _ := m.Addr.Addr().Prefix(bits)
	return &member{Member: m, hash: mix(fnv(m.Name)), segment: segment.Addr(), interval: MaxInterval}
}

// hear records a packet of the member.
func (s *member) hear(p Packet, at time.Time) {
	if at.After(s.heard) {
		s.heard = at
	}
	if s.calls = 0; p.Kind == Beat {
		s.beaten, s.grace = s.heard, time.Time{} // it knows this speaker
	} else if p.Kind == Answer && s.heard.Sub(s.beaten) > unsent {
		s.grace = s.heard.Add(firstBeat)
	}
	s.interval = p.Interval
	s.late = min(p.Late, mostLate)
}

// allowance returns how long the member may be silent.
func (s *member) allowance(missed int) time.Duration {
	return Timing{s.interval, missed}.Allowance() + s.late
}

// silent returns from when on the member counts as silent, if it is not heard before.
func (s *member) silent(missed int) time.Time {
	return later(s.heard.Add(s.allowance(missed)), s.grace)
}

// set replaces the members.
func (m *Machine) set(list []Member) {
	wanted := make(map[uint64]Member, len(list))
	for _, w := range list {
		if w.Session != 0 && w.Name != m.self.Name {
			wanted[w.Session] = w
		}
	}
	for _, s := range slices.Clone(m.members) {
		if w, ok := wanted[s.Session]; s != m.self && (!ok || w != s.Member) {
			m.remove(s)
		}
	}
	var added []*member
	for session, w := range wanted {
		if m.sessions[session] == nil {
			added = append(added, newMember(w))
		}
	}
	if len(added) > 0 {
		m.add(added)
	}
}

// add adds members, which may be watchers of the others.
func (m *Machine) add(all []*member) {
	for _, s := range all {
		s.grace = m.now.Add(firstBeat)
		at, _ := slices.BinarySearchFunc(m.members, s, func(a, b *member) int { return cmp.Or(strings.Compare(a.Name, b.Name), 1) })
		m.members = slices.Insert(m.members, at, s)
		m.sessions[s.Session] = s
	}
	for _, of := range m.members {
		if !of.lost && (of.watchers == nil || slices.ContainsFunc(all, of.prefers)) {
			m.rank(of, firstBeat)
		}
	}
}

// remove forgets a member, and gives those that it watched other watchers.
func (m *Machine) remove(s *member) {
	delete(m.sessions, s.Session)
	m.members = slices.DeleteFunc(m.members, func(o *member) bool { return o == s })
	m.retire(s)
}

// retire ends the part of a member that is gone or lost.
func (m *Machine) retire(s *member) {
	s.lost, s.watched, s.doubt = true, false, nil
	m.watched = slices.DeleteFunc(m.watched, func(o *member) bool { return o == s })
	m.doubted = slices.DeleteFunc(m.doubted, func(o *member) bool { return o == s })
	for _, of := range m.members {
		if !of.lost && slices.Contains(of.watchers, s) {
			m.rank(of, nextBeat)
		}
	}
}

// rank chooses the watchers of a member.
func (m *Machine) rank(of *member, grace time.Duration) {
	of.choose(m.members)
	if watched := slices.Contains(of.watchers, m.self); watched != of.watched {
		of.watched = watched
		if watched {
			of.grace = later(of.grace, m.now.Add(grace))
			m.watched = append(m.watched, of)
		} else {
			m.watched = slices.DeleteFunc(m.watched, func(o *member) bool { return o == of })
		}
	}
}

// choose chooses the watchers by rendezvous hashing: all speakers that know the same members choose the same
// ones, and only those of a member that comes or goes change. One of them at least is on the member's segment, if any
// member is.
func (s *member) choose(from []*member) {
	var last, near ranked
	all := make([]ranked, 0, watchers+1)
	for _, w := range from {
		if w == s || w.lost {
			continue
		}
		r := ranked{w, s.score(w)}
		if w.segment == s.segment && r.score >= near.score {
			near = r
		}
		if len(all) == watchers && r.score <= last.score {
			continue
		}
		at := len(all)
		for at > 0 && r.score > all[at-1].score {
			at--
		}
		all = slices.Insert(all, at, r)
		all = all[:min(len(all), watchers)]
		last = all[len(all)-1]
	}
	if near.member != nil && !slices.Contains(all, near) {
		all[len(all)-1] = near
	}
	s.watchers = s.watchers[:0]
	for _, r := range all {
		s.watchers = append(s.watchers, r.member)
	}
}

// Watchers returns the names of those that watch each member, by its name, if all of them are alive.
func Watchers(list []Member) map[string][]string {
	members, by := make([]*member, 0, len(list)), make(map[string][]string, len(list))
	for _, m := range slices.SortedFunc(slices.Values(list), Member.Compare) {
		members = append(members, newMember(m))
	}
	for _, m := range members {
		m.choose(members)
		for _, w := range m.watchers {
			by[m.Name] = append(by[m.Name], w.Name)
		}
	}
	return by
}

// ranked is a member with its rank among those that may watch another one.
type ranked struct {
	*member
	score uint64
}

// prefers reports whether a new member may be one of the watchers.
func (s *member) prefers(w *member) bool {
	if len(s.watchers) < watchers || s.score(w) > s.score(s.watchers[watchers-1]) {
		return true
	}
	return w.segment == s.segment && !slices.ContainsFunc(s.watchers, func(o *member) bool { return o.segment == s.segment })
}

// score is the rank of a watcher: the highest come first.
func (s *member) score(w *member) uint64 { return mix(s.hash + 3*w.hash) }

// fnv is FNV-1a.
func fnv(name string) uint64 {
	h := uint64(14695981039346656037)
	for i := range len(name) {
		h = (h ^ uint64(name[i])) * 1099511628211
	}
	return h
}

// mix is the finalizer of SplitMix64.
func mix(x uint64) uint64 {
	x += 0x9e3779b97f4a7c15
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}

func later(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}
