package watch

import "time"

// lateWindow is how long the lateness of a loop is remembered at least. It is forgotten after twice that time.
const lateWindow = 5 * time.Second

// lateness is how late a loop was at most in the current window and in the one before.
type lateness struct {
	current, before time.Duration
	until           time.Time // of the current window
}

// turn begins another window when the current one is over.
func (l *lateness) turn(now time.Time) {
	if now.Before(l.until) {
		return
	}
	l.before = l.current
	if now.Sub(l.until) >= lateWindow {
		l.before = 0
	}
	l.current, l.until = 0, now.Add(lateWindow)
}

// record records that the loop was so late.
func (l *lateness) record(late time.Duration, now time.Time) {
	l.turn(now)
	l.current = max(l.current, late)
}

// most returns how late the loop was at most.
func (l *lateness) most(now time.Time) time.Duration {
	l.turn(now)
	return max(l.current, l.before)
}
