package report

import (
	"fmt"
	"time"
)

// LateFor is the time that a Late is about.
const LateFor = time.Hour

// Late is how late the loop of a speaker's failure detector was, in LateFor.
type Late struct {
	// Milliseconds is how late it was at most, At when.
	Milliseconds int64     `json:"milliseconds"`
	At           time.Time `json:"at"`
	// Times is how often it was later than the time between two heartbeats, or as often at least.
	Times int `json:"times"`
}

// String describes it for people.
func (l Late) String() string {
	return fmt.Sprintf("%d ms late at %s UTC", l.Milliseconds, l.At.UTC().Format(time.TimeOnly))
}

// tidy returns nothing if it is out of bounds.
func (l Late) tidy() Late {
	if l.Milliseconds <= 0 || l.Times < 0 || !isTime(l.At) {
		return Late{}
	}
	l.At = l.At.UTC().Truncate(time.Second)
	return l
}
