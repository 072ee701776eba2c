package watch

import "time"

const (
	// lateWindow is how long the lateness of a loop counts at least, for its watchers. It counts for less than twice that time.
	lateWindow = 5 * time.Second
	// Status has the lateness of the last hour, to the nearest hourPart.
	hourPart  = 5 * time.Minute
	hourParts = 12
)

// Lateness is how late a loop was in some time.
type Lateness struct {
	Most time.Duration
	At   time.Time // when it was so late; zero: never
	// Times is how often it was later than an interval, so that heartbeats were left out.
	Times int
}

// lateness is how late a loop was, in the current window of time and in some before it.
type lateness struct {
	windows []Lateness // the current one first
	width   time.Duration
	until   time.Time // of the current window
}

func newLateness(windows int, width time.Duration) lateness {
	return lateness{windows: make([]Lateness, windows), width: width}
}

// turn begins another window when the current one is over.
func (l *lateness) turn(now time.Time) {
	if now.Before(l.until) {
		return
	}
	over := min(int(now.Sub(l.until)/l.width)+1, len(l.windows))
	copy(l.windows[over:], l.windows)
	clear(l.windows[:over])
	l.until = now.Add(l.width)
}

// record records that the loop was so late.
func (l *lateness) record(late, interval time.Duration, now time.Time) {
	l.turn(now)
	w := &l.windows[0]
	if late > w.Most {
		w.Most, w.At = late, now
	}
	if late > interval {
		w.Times++
	}
}

// most returns how late the loop was at most.
func (l *lateness) most(now time.Time) time.Duration { return l.all(now).Most }

// all returns how late the loop was in all windows.
func (l *lateness) all(now time.Time) Lateness {
	l.turn(now)
	var all Lateness
	for _, w := range l.windows {
		if w.Most > all.Most {
			all.Most, all.At = w.Most, w.At
		}
		all.Times += w.Times
	}
	return all
}
