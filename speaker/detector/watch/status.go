package watch

import (
	"cmp"
	"slices"
	"time"
)

// mostLosses bounds the losses in Status.
const mostLosses = 16

// Status is what there is to know about a machine at one moment.
type Status struct {
	Timing
	// Lately is how late the loop was at most in the last 5 to 10 seconds, Hour how late it was in the last hour.
	Lately time.Duration
	Hour   Lateness
	// Watchers watch this speaker, Watched are those that it watches.
	Watchers []string
	Watched  []Watched
	// Lost are the members that were lost in the last hour, the latest ones.
	Lost []Loss
	// Accused is how many packets have arrived that take this speaker for lost, AccusedAt when the last one did.
	Accused   uint64
	AccusedAt time.Time
}

// Watched is a member that a speaker watches.
type Watched struct {
	Name string
	// Interval is the time between its heartbeats, Late how late it reports to have been lately.
	Interval, Late time.Duration
	// Silent is how long nothing has come from it. Zero: nothing has ever.
	Silent time.Duration
}

// Loss is a verdict, and when it was.
type Loss struct {
	Verdict
	At time.Time
}

// note keeps the verdict for Status.
func (m *Machine) note(v Verdict) {
	if len(m.losses) == mostLosses {
		m.losses = slices.Delete(m.losses, 0, 1)
	}
	m.losses = append(m.losses, Loss{v, m.now})
}

// Status returns the status. Nothing in it changes later.
func (m *Machine) Status(now time.Time) Status {
	s := Status{
		Timing: m.timing, Lately: m.late.most(now), Hour: m.hour.all(now), Accused: m.accused, AccusedAt: m.accusedAt,
	}
	for _, w := range m.self.watchers {
		s.Watchers = append(s.Watchers, w.Name)
	}
	for _, w := range m.watched {
		of := Watched{Name: w.Name, Interval: w.interval, Late: w.late}
		if !w.heard.IsZero() {
			of.Silent = max(0, now.Sub(w.heard))
		}
		s.Watched = append(s.Watched, of)
	}
	slices.SortFunc(s.Watched, func(a, b Watched) int { return cmp.Compare(a.Name, b.Name) })
	for _, l := range m.losses {
		if now.Sub(l.At) < hourPart*hourParts {
			s.Lost = append(s.Lost, l)
		}
	}
	return s
}
