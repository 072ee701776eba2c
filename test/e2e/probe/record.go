package probe

import (
	"fmt"
	"slices"
	"time"

	"github.com/lodestone-lb/lodestone/test/e2e/echo"
)

// Answer is one answer and when it arrived.
type Answer struct {
	echo.Answer
	At time.Time
}

// Record is everything a measurement saw, answers in order of arrival.
type Record struct {
	Started, Stopped time.Time
	// Begun is when what is measured began; zero: with the first probe.
	Begun   time.Time
	Sent    int
	Answers []Answer
	// Slowest is the longest time between a probe and its answer.
	Slowest time.Duration

	unanswered []time.Time // when each probe was sent; zero: it was answered
}

// Lost counts the probes that were never answered. Those in flight at the end
// are among them.
func (r Record) Lost() int { return r.Sent - len(r.Answers) }

// Losses returns when the probes that were never answered were sent, and who answered at these times.
func (r Record) Losses() string {
	text := fmt.Sprintf("%d of %d lost since %s", r.Lost(), r.Sent, r.Started.UTC().Format("15:04:05.000"))
	var first, last time.Time
	count := 0
	end := func() {
		if count > 0 {
			text += fmt.Sprintf("; %d sent after %s to %s, when the last answer was from %s", count,
				first.Sub(r.Started).Round(time.Millisecond), last.Sub(r.Started).Round(time.Millisecond), nameOf(r.lastBefore(first)))
		}
		count = 0
	}
	for _, sent := range r.unanswered {
		switch {
		case sent.IsZero():
			end()
			continue
		case count == 0:
			first = sent
		}
		last = sent
		count++
	}
	end()
	return text
}

// lastBefore returns the last answer that arrived before.
func (r Record) lastBefore(at time.Time) (last echo.Answer) {
	for _, answer := range r.Answers {
		if answer.At.Before(at) {
			last = answer.Answer
		}
	}
	return last
}

// Outage is a time without answers, and who answered last before it and first
// after it: nobody, if it had no beginning or no end.
type Outage struct {
	From, To      time.Time
	Before, After echo.Answer
}

// Duration is how long nobody answered.
func (o Outage) Duration() time.Duration { return o.To.Sub(o.From) }

func (o Outage) String() string {
	return fmt.Sprintf("%s without answers, from %s to %s", o.Duration().Round(time.Millisecond),
		nameOf(o.Before), nameOf(o.After))
}

func nameOf(a echo.Answer) string {
	if a.Pod == "" {
		return "nobody"
	}
	return a.Pod + " on " + a.Node
}

// Outage returns the longest time without an answer that was not over when what is measured
// began. Where all is well that is little more than the interval between probes. The time of
// arrival counts, not that of sending: what a client waits for is an answer.
func (r Record) Outage() Outage {
	longest := Outage{From: r.Started, To: r.Started}
	last := Answer{At: r.Started}
	for _, answer := range append(slices.Clip(r.Answers), Answer{At: r.Stopped}) {
		if answer.At.After(r.Begun) && answer.At.Sub(last.At) > longest.Duration() {
			longest = Outage{From: last.At, To: answer.At, Before: last.Answer, After: answer.Answer}
		}
		last = answer
	}
	return longest
}

// Nodes counts the answers by the node whose pod gave them.
func (r Record) Nodes() map[string]int {
	nodes := make(map[string]int)
	for _, answer := range r.Answers {
		nodes[answer.Node]++
	}
	return nodes
}
