package watch

import (
	"slices"
	"time"
)

const (
	// A member in doubt is asked askMost times, each askInterval, and then each askSlowly.
	askInterval, askSlowly = 8 * time.Millisecond, 100 * time.Millisecond
	askMost                = 8
	// inquiryTime is how long a member may take to answer a speaker that does not watch it. inquiryDelay is how long
	// that speaker waits before it asks because of a single verdict: the second one is on its way.
	inquiryTime, inquiryDelay = 40 * time.Millisecond, 40 * time.Millisecond
	// callInterval is the time between two calls for witnesses.
	callInterval = 12 * time.Millisecond
	// witnessTime is how long a call of another member counts, verdictTime how long its verdict does.
	witnessTime, verdictTime = 150 * time.Millisecond, time.Second
	// deniedTime is how long a member is not declared lost after another one has heard from it.
	deniedTime = 150 * time.Millisecond
	// A member that was called callsMost times or more, and first unansweredTime ago, does not answer.
	callsMost, unansweredTime = 2, 60 * time.Millisecond
	// A verdict is sent verdictTimes, each verdictInterval.
	verdictTimes, verdictInterval = 3, 20 * time.Millisecond
	// answerTime is how long an answer shows that a member is alive that this speaker does not watch. It bounds how
	// often the calls of others have this speaker ask a member.
	answerTime = 250 * time.Millisecond
	// witnessesNeeded is how many others have to miss a member, too, before this speaker sends its verdict. A verdict of
	// verdictsNeeded members counts for all.
	witnessesNeeded, verdictsNeeded = 1, 2
	// mostWitnesses bounds the witnesses that are remembered of one member.
	mostWitnesses = 8
)

// doubt is what this speaker does about a member that may be lost.
type doubt struct {
	// silent is from when on the member counts as silent, unless it is heard before. For a watcher it follows from the
	// heartbeats.
	silent    time.Time
	ask, call time.Time // when the next ones are due
	asks      int
	helpers   int // how many members are called
	denied    time.Time
	witnesses []witness
}

// witness is another member that does not hear the one in doubt.
type witness struct {
	from  *member
	dead  bool // it has sent the verdict
	until time.Time
}

// announcement is a verdict that is being sent to all.
type announcement struct {
	about Member
	left  int
	next  time.Time
}

// doubtful returns from when on a watched member is in doubt: one heartbeat before it is silent.
func (m *Machine) doubtful(s *member) time.Time { return s.silent(m.timing.Missed).Add(-s.interval) }

// fresh reports whether this speaker has heard from the member so recently that the member is alive.
func (m *Machine) fresh(s *member) bool {
	if s.watched {
		return m.now.Before(s.heard.Add(s.allowance(m.timing.Missed) - s.interval))
	}
	return m.now.Before(s.heard.Add(answerTime))
}

// doubt returns the doubt about the member. A new one ends with the member silent at that time.
func (m *Machine) doubt(s *member, silent time.Time) *doubt {
	if s.doubt == nil {
		s.doubt = &doubt{silent: silent, ask: m.now}
		m.doubted = append(m.doubted, s)
	}
	return s.doubt
}

// inquire has this speaker find out whether a member answers that another one does not hear.
func (m *Machine) inquire(s *member) *doubt {
	if s.watched && m.now.Before(s.heard.Add(s.allowance(m.timing.Missed))) {
		return m.doubt(s, s.silent(m.timing.Missed))
	}
	return m.doubt(s, m.now.Add(inquiryTime))
}

// trust ends the doubt about a member that was heard, unless that was too long ago.
func (m *Machine) trust(s *member) {
	switch {
	case s.doubt == nil:
	case s.watched && !m.now.Before(m.doubtful(s)):
		s.doubt.silent = s.silent(m.timing.Missed)
	default:
		s.doubt = nil
		m.doubted = slices.DeleteFunc(m.doubted, func(o *member) bool { return o == s })
	}
}

// due returns when to pursue the doubt again.
func (d *doubt) due() time.Time {
	next := later(d.silent, d.call)
	if d.ask.Before(next) {
		return d.ask
	}
	return next
}

// watch doubts the watched members that are not heard, and pursues all doubts.
func (m *Machine) watch() {
	for _, s := range m.watched {
		if s.doubt == nil && !m.now.Before(m.doubtful(s)) {
			m.doubt(s, s.silent(m.timing.Missed))
		}
	}
	for _, s := range slices.Clone(m.doubted) {
		if s.doubt != nil && !m.now.Before(s.doubt.due()) { // another verdict may have ended it
			m.pursue(s)
		}
	}
}

// pursue asks the member, and calls for witnesses once it is silent.
func (m *Machine) pursue(s *member) {
	d := s.doubt
	if !m.now.Before(d.ask) {
		m.send(s, Ask, 0)
		d.ask = m.now.Add(askInterval)
		if d.asks++; d.asks >= askMost {
			d.ask = m.now.Add(askSlowly)
		}
	}
	switch {
	case m.now.Before(later(d.silent, d.call)):
	case m.now.Before(d.denied.Add(deniedTime)):
		m.call(s)
		d.call = m.now.Add(askSlowly)
	case d.count(m.now, false) >= witnessesNeeded:
		m.lose(s, false)
		m.verdicts = append(m.verdicts, announcement{s.Member, verdictTimes, m.now})
	case !m.now.Before(d.silent.Add(inquiryTime)) && m.alone(s):
		for _, o := range slices.Clone(m.members) {
			if o != m.self && !o.lost {
				m.lose(o, true)
			}
		}
	default:
		m.call(s)
		d.call = m.now.Add(callInterval)
	}
}

// call calls for witnesses: the other watchers of the member first, then more and more members, while none answers.
func (m *Machine) call(s *member) {
	d, calls := s.doubt, 0
	answered := d.helpers == 0
	call := func(o *member) {
		if o == m.self || o == s || o.lost || calls == d.helpers {
			return
		}
		calls++
		answered = answered || o.calls < callsMost
		if o.calls++; o.calls == 1 {
			o.firstCall = m.now
		}
		m.send(o, Silent, s.Session)
	}
	d.helpers = max(d.helpers, watchers)
	for _, o := range s.watchers {
		call(o)
	}
	at := slices.Index(m.members, m.self)
	for i := range m.members {
		if o := m.members[(at+i)%len(m.members)]; !slices.Contains(s.watchers, o) {
			call(o)
		}
	}
	if !answered {
		d.helpers *= 2
	}
}

// alone reports whether no member answers this speaker, apart from the one in doubt.
func (m *Machine) alone(s *member) bool {
	return !slices.ContainsFunc(m.members, func(o *member) bool {
		return o != m.self && o != s && !o.lost && (o.calls < callsMost || m.now.Before(o.firstCall.Add(unansweredTime)))
	})
}

// called records that another member does not hear the subject, and answers if this speaker does. Else it finds out.
// It answers for itself if it does not know the subject, which may have started anew while the other one was paused: who
// has no answer at all takes itself to be alone.
func (m *Machine) called(from, s *member) {
	switch {
	case s == nil:
		m.send(from, Answer, 0)
	case s == from:
	case s.lost:
		m.send(from, Dead, s.Session)
	case m.fresh(s):
		m.send(from, Heard, s.Session)
	default:
		m.inquire(s).record(witness{from, false, m.now.Add(witnessTime)}, m.now)
	}
}

// denied records that another member hears the subject.
func (m *Machine) denied(s *member) {
	if s != nil && s.doubt != nil {
		s.doubt.denied = m.now
	}
}

// reportedDead records the verdict of another member about the subject. Two of them count, unless this speaker hears the
// subject itself. After one alone this speaker finds out.
func (m *Machine) reportedDead(from, s *member) {
	if s == nil || s.lost || s == from {
		return
	}
	known := s.doubt != nil
	d := m.inquire(s)
	d.record(witness{from, true, m.now.Add(verdictTime)}, m.now)
	switch {
	case m.fresh(s):
	case d.count(m.now, true) >= verdictsNeeded:
		m.lose(s, false)
	case !known && !s.watched:
		d.ask, d.silent = d.ask.Add(inquiryDelay), d.silent.Add(inquiryDelay)
	}
}

// record records a witness, or that it is one for longer.
func (d *doubt) record(w witness, now time.Time) {
	d.witnesses = slices.DeleteFunc(d.witnesses, func(o witness) bool { return !now.Before(o.until) || o.from == w.from && !o.dead })
	known := slices.ContainsFunc(d.witnesses, func(o witness) bool { return o.from == w.from })
	if !known && len(d.witnesses) < mostWitnesses {
		d.witnesses = append(d.witnesses, w)
	}
}

// count returns how many witnesses count now, or how many of them have sent the verdict.
func (d *doubt) count(now time.Time, dead bool) (n int) {
	for _, w := range d.witnesses {
		if now.Before(w.until) && (w.dead || !dead) && !w.from.lost {
			n++
		}
	}
	return n
}

// lose takes the member for lost.
func (m *Machine) lose(s *member, alone bool) {
	v := Verdict{Member: s.Member, Alone: alone}
	if s.watched && !s.heard.IsZero() {
		v.Silence = m.now.Sub(s.heard)
	}
	m.out.Lost = append(m.out.Lost, v)
	m.note(v)
	m.retire(s)
}

// announce sends verdicts to all members, and to the ones that they are about.
func (m *Machine) announce() {
	for i := range m.verdicts {
		a := &m.verdicts[i]
		if m.now.Before(a.next) {
			continue
		}
		for _, o := range m.members {
			if o != m.self && (!o.lost || o.Session == a.about.Session) {
				m.send(o, Dead, a.about.Session)
			}
		}
		a.left, a.next = a.left-1, m.now.Add(verdictInterval)
	}
	m.verdicts = slices.DeleteFunc(m.verdicts, func(a announcement) bool { return a.left == 0 })
}

// giveBack gives all others the time in which this loop did not run, or in a flood an interval each time that something is due, which
// may be more than has passed. So nobody gets more than a member that was heard just now.
func (m *Machine) giveBack(late time.Duration) {
	back := func(t, most time.Time) time.Time {
		if given := t.Add(late); given.Before(most) {
			return given
		}
		return later(t, most)
	}
	for _, s := range m.watched {
		s.grace = back(s.grace, m.now.Add(firstBeat))
		if !s.heard.IsZero() {
			s.heard = back(s.heard, m.now)
		}
	}
	for _, s := range m.doubted {
		s.doubt.silent = back(s.doubt.silent, later(m.now.Add(s.allowance(m.timing.Missed)), s.grace))
	}
}
