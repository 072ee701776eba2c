package speaker

import (
	"maps"
	"net/netip"
	"slices"
	"time"

	"github.com/lodestone-lb/lodestone/pkg/notify"
	"github.com/lodestone-lb/lodestone/pkg/report"
	"github.com/lodestone-lb/lodestone/speaker/plan"
)

const (
	// movesSettle is how long a VIP must have had the same owner before anybody
	// hears that it is another one: a speaker that is replaced within that time,
	// or a node that flaps, is no news.
	movesSettle = 10 * time.Second
	// movesPublished is how long moves are told. The controller notes them when they
	// are written, which is seconds later.
	movesPublished = 2 * time.Minute
)

// moves are the VIPs that change hands. Every speaker sees them all, in its own
// plan, and one of them tells: see teller.
type moves struct {
	// Owned by the loop. What moves is due not before next, if that is set.
	moving  map[netip.Addr]moving
	orphans map[netip.Addr]bool // that nobody had when it was told last
	next    time.Time

	// Of the state, and under its lock.
	told    []report.Move
	changed notify.Signal
}

// moving is a VIP that changes hands, and that somebody had, or nobody, as long
// as it stayed.
type moving struct {
	from, to string
	why      report.Reason // as of the first move
	at       time.Time     // of the last move
}

// noteMoves notes what changes hands. It comes after the deed.
func (s *Speaker) noteMoves(changes plan.Changes, now time.Time) {
	for _, vip := range changes.Gone() {
		delete(s.moves.moving, vip)
		delete(s.moves.orphans, vip)
	}
	for _, m := range changes.Moves {
		at, known := s.moves.moving[m.VIP]
		if !known {
			at = moving{from: m.From, why: s.why(m)}
		}
		if at.to, at.at = m.To, now; at.to == at.from {
			delete(s.moves.moving, m.VIP)
			continue
		}
		s.moves.moving[m.VIP] = at
	}
	if len(changes.Moves) > 0 {
		s.moves.lookAt(now.Add(movesSettle))
	}
}

// why returns why the node that had a VIP has it no more.
func (s *Speaker) why(m plan.Move) report.Reason {
	why := report.Reason(s.planner.Why(m.VIP, m.From))
	if _, alive := s.speakers[m.From]; why == report.Reason(plan.SpeakerNotReady) && !alive {
		return report.SpeakerLost
	}
	return why
}

// movesDue returns a channel that fires when moves may have settled, or have
// been told for long enough. Nil: there are none.
func (s *Speaker) movesDue() <-chan time.Time {
	if s.moves.next.IsZero() {
		return nil
	}
	return time.After(time.Until(s.moves.next))
}

// settleMoves tells what has moved for good, as far as this node is to tell, and
// forgets what was told long ago.
func (s *Speaker) settleMoves(now time.Time) {
	if s.moves.next.IsZero() || now.Before(s.moves.next) {
		return
	}
	s.moves.next = time.Time{}
	fresh, first := map[moving]report.Move{}, firstReady(s.speakers)
	for vip, m := range s.moves.moving {
		if due := m.at.Add(movesSettle); now.Before(due) {
			s.moves.lookAt(due)
			continue
		}
		delete(s.moves.moving, vip)
		if s.moves.again(vip, m) && teller(m, s.speakers, first) == s.Node {
			key := moving{from: m.from, why: m.why}
			if fresh[key].To == nil {
				fresh[key] = report.Move{At: now, From: m.from, Why: m.why, To: map[string][]netip.Addr{}}
			}
			fresh[key].To[m.to] = append(fresh[key].To[m.to], vip)
		}
	}
	s.publishMoves(slices.Collect(maps.Values(fresh)), now)
}

// lookAt has the moves looked at by then.
func (m *moves) lookAt(when time.Time) {
	if m.next.IsZero() || when.Before(m.next) {
		m.next = when
	}
}

// again notes what nobody has, and reports whether the move is one: a VIP that
// nobody has had yet does not move to its first owner.
func (m *moves) again(vip netip.Addr, of moving) bool {
	had := m.orphans[vip]
	if delete(m.orphans, vip); of.to == "" {
		m.orphans[vip] = true
	}
	return of.from != "" || had
}

// publishMoves replaces what is told.
func (s *Speaker) publishMoves(fresh []report.Move, now time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	told := slices.DeleteFunc(slices.Clone(s.moves.told), func(m report.Move) bool { return now.Sub(m.At) >= movesPublished })
	if n := report.CountVIPs(fresh); n > report.MaxVIPs {
		s.Log.Warn("too many VIPs moved to tell their Services of each", "vips", n, "told", report.MaxVIPs)
	}
	if told = append(told, fresh...); len(fresh) > 0 || len(told) < len(s.moves.told) {
		s.moves.told = told
		s.moves.changed.Notify()
	}
	for _, m := range told {
		s.moves.lookAt(m.At.Add(movesPublished))
	}
}

// Moves returns the VIPs that changed hands lately, as far as this node tells of
// them.
func (s *Speaker) Moves() []report.Move {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.moves.told
}

// Labels returns the node's labels, and whether they are known.
func (s *Speaker) Labels() (map[string]string, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.state.labels, s.state.labelled
}

// Addresses returns the internal addresses of the Node; none: they are not known.
func (s *Speaker) Addresses() []netip.Addr {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.state.addresses
}

// Changed returns a channel that is closed when Moves, Labels or Addresses have another
// answer.
func (s *Speaker) Changed() <-chan struct{} { return s.moves.changed.Next() }

// noteNode publishes the node's labels and addresses.
func (s *Speaker) noteNode() {
	n, known := s.nodes[s.Node]
	s.mu.Lock()
	defer s.mu.Unlock()
	if known != s.state.labelled || !maps.Equal(n.Labels, s.state.labels) || !slices.Equal(n.Addresses, s.state.addresses) {
		s.state.labels, s.state.labelled, s.state.addresses = n.Labels, known, n.Addresses
		s.moves.changed.Notify()
	}
}

// teller returns the node that tells of a move. It is the one that had the VIP,
// if its speaker is ready: it knows since when. Otherwise the first of the others
// by name: so the loss of a node is told by one, and not by each heir; and not by
// the VIP's owner if there are others, since a speaker that has just started does
// not know who had it before.
func teller(m moving, speakers map[string]bool, first [2]string) string {
	switch {
	case m.from != "" && speakers[m.from]:
		return m.from
	case first[0] == m.to && first[1] != "":
		return first[1]
	}
	return first[0]
}

// firstReady returns the first two nodes, by name, whose speakers are ready.
func firstReady(speakers map[string]bool) (first [2]string) {
	for name, ready := range speakers {
		switch {
		case !ready:
		case first[0] == "" || name < first[0]:
			first[0], first[1] = name, first[0]
		case first[1] == "" || name < first[1]:
			first[1] = name
		}
	}
	return first
}
