package direct

import (
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/lodestone-lb/lodestone/speaker/plan"
)

const (
	// catchUpTime is how long a speaker that is heard again has to set the rules of what came meanwhile.
	catchUpTime = 2 * time.Second
	// lossTime is how long a speaker may have done nothing before others notice: up to 2 s with failover: conservative,
	// and the last thing before that it may not have done.
	lossTime = 3 * time.Second
)

// absences knows which nodes have no rules for a Service, since their speakers were not heard when it came or soon
// after, nor later. Such a node would answer what others keep by a reset, so it is not asked.
type absences struct {
	// came is when a Service came. Those that nobody has missed, as far as is known, are not in it.
	came map[plan.LimitKey]time.Time
	// away are the nodes whose speakers are not heard, or only again since a moment ago.
	away map[string]absence
	// nodes is how many there are.
	nodes int
	// late is how long a speaker may have done nothing before it is lost: lossTime.
	late time.Duration
}

// absence begins when a speaker is heard no more, and ends catchUpTime after it was lost last.
type absence struct{ since, last time.Time }

// see takes over which nodes are lost. It reports whether one has caught up.
func (a *absences) see(now time.Time, lost map[string]bool) (caughtUp bool) {
	for node, is := range lost {
		if was, away := a.away[node]; is && away {
			a.away[node] = absence{was.since, now}
		} else if is {
			a.away[node] = absence{now, now}
		}
	}
	n := len(a.away)
	maps.DeleteFunc(a.away, func(_ string, of absence) bool { return now.Sub(of.last) >= catchUpTime })
	return len(a.away) < n
}

// follow takes over which nodes are lost, and which Services come: those that were not known.
func (a *absences) follow(now time.Time, want plan.Forwarding, known func(plan.LimitKey) bool) {
	a.nodes = len(want.Nodes)
	a.see(now, want.Lost)
	if a.cutOff() {
		return
	}
	for key := range want.Services {
		if !known(key) {
			a.came[key] = now
		}
	}
}

// cutOff reports whether half of the nodes or more are away: this one was cut off from them, perhaps, and they have what
// it has.
func (a *absences) cutOff() bool { return 2*len(a.away) >= a.nodes }

// missedBy returns the nodes that have missed the Service, sorted, with a space after each.
func (a *absences) missedBy(key plan.LimitKey) string {
	if len(a.away) == 0 {
		return ""
	}
	late := a.late
	if a.cutOff() {
		late = 0
	}
	names := ""
	for _, node := range slices.Sorted(maps.Keys(a.away)) {
		if !a.came[key].Before(a.away[node].since.Add(-late)) {
			names += node + " "
		}
	}
	return names
}

// missed returns whether a node is among those that missedBy returned.
func missed(by, node string) bool { return slices.Contains(strings.Fields(by), node) }
