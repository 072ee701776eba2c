package direct

import (
	"cmp"
	"iter"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/util/sets"

	"github.com/lodestone-lb/lodestone/speaker/plan"
)

// A speaker that is heard again has catchUpTime to write rules. It may hear of Services that came meanwhile later than that, after
// as long as it was lost, up to longestCatchUp: TCP and watches of the API server, also those of its kube-proxy, retry at growing
// intervals. It knows endpoints on its own node sooner: their readiness is reported from there, so its API server is reachable.
const catchUpTime, longestCatchUp = 2 * time.Second, time.Minute

// absences knows which nodes have no rules for a Service, or only rules from before they had endpoints of it, because their
// speakers were lost then and have not been heard since. Such a node would reset connections that others keep, or hand their
// segments back to a node that was asked. It keeps no connections of the Service, so it is not asked.
type absences struct {
	// came is when ports of a Service came, and when a node joined those that keep its connections. Times before all
	// absences are left out.
	came map[plan.LimitKey]map[arrival]time.Time
	// away are the nodes whose speakers are lost or still catching up.
	away map[string]absence
	// nodes are the nodes that report that they have the rules.
	nodes map[string][]netip.Addr
}

// arrival is what comes to a Service: a port, or a node that keeps its connections.
type arrival struct {
	port uint16
	node string
}

// absence is the time for which a speaker is lost (since to last), and after that catches up. joins is set when it has rules
// for its own endpoints, which it has first. heard is set if the node counts as lost although its speaker was heard.
type absence struct {
	since, last  time.Time
	heard, joins bool
}

// over reports whether the speaker has caught up.
func (of absence) over(now time.Time) bool {
	return now.Sub(of.last) >= min(max(catchUpTime, of.last.Sub(of.since)), longestCatchUp)
}

// see takes over which nodes are lost, and which of these are heard. It reports whether one has caught up further.
func (a *absences) see(now time.Time, lost, heard map[string]bool) (caughtUp bool) {
	for node, is := range lost {
		if is {
			a.away[node] = absence{since: cmp.Or(a.away[node].since, now), last: now, heard: heard[node]}
		}
	}
	for node, of := range a.away {
		switch {
		case of.over(now):
			delete(a.away, node)
			caughtUp = true
		case !of.joins && now.Sub(of.last) >= catchUpTime:
			of.joins = true
			a.away[node] = of
			caughtUp = true
		}
	}
	oldest := now
	for _, of := range a.away {
		if of.since.Before(oldest) {
			oldest = of.since
		}
	}
	maps.DeleteFunc(a.came, func(_ plan.LimitKey, came map[arrival]time.Time) bool {
		maps.DeleteFunc(came, func(_ arrival, at time.Time) bool { return at.Before(oldest) })
		return len(came) == 0
	})
	return caughtUp
}

// follow takes over which nodes are lost, which ports of Services come, and which nodes join those that keep connections.
func (a *absences) follow(now time.Time, want plan.Forwarding, forwarded func(plan.LimitKey) (plan.Direct, bool)) {
	before := a.nodes
	a.nodes = want.Nodes
	// A node that is new among those that report their rules has current rules, whatever was before.
	reports := func(node string) bool { _, had := before[node]; return !had }
	maps.DeleteFunc(a.away, func(node string, _ absence) bool { return reports(node) })
	a.see(now, want.Lost, want.Heard)
	if a.cutOff() {
		return
	}
	note := func(key plan.LimitKey, what arrival) {
		if a.came[key] == nil {
			a.came[key] = map[arrival]time.Time{}
		}
		a.came[key][what] = now
	}
	type change struct{ from, to *plan.Backend } // most Services have the same backends
	joined := map[change][]string{}
	for key, s := range want.Services {
		was, known := forwarded(key)
		anew := !known || was.Seed%seeds != s.Seed%seeds // another Service of the name, which is hashed in another way
		if anew {
			was.Ports = nil
		}
		for _, p := range without(s.Ports, was.Ports) {
			note(key, arrival{port: p.Number})
		}
		if anew {
			continue
		}
		of := change{first(was), first(s)}
		if _, done := joined[of]; !done && of.from != of.to {
			joined[of] = joiners(was.Backends, s.Backends)
		}
		for _, node := range joined[of] {
			if !reports(node) {
				note(key, arrival{node: node})
			}
		}
	}
}

// forget forgets when Services came. A node that starts without rules of an earlier Director does not know how old Services
// are. Most are old, so nodes whose speakers are lost keep connections to them.
func (a *absences) forget() { clear(a.came) }

// first returns the first backend, whose address identifies the array. Nil: there are no backends.
func first(s plan.Direct) *plan.Backend {
	if len(s.Backends) == 0 {
		return nil
	}
	return &s.Backends[0]
}

// joiners returns the nodes that are new in the backends. Both are sorted.
func joiners(before, after []plan.Backend) (nodes []string) {
	for _, b := range after {
		byName := func(b plan.Backend, node string) int { return strings.Compare(b.Node, node) }
		if _, was := slices.BinarySearchFunc(before, b.Node, byName); !was {
			nodes = append(nodes, b.Node)
		}
	}
	return nodes
}

// cutOff reports whether half of the nodes or more are away and not heard: then this node itself may be cut off, while the
// others have the rules.
func (a *absences) cutOff() bool {
	unheard := 0
	for _, of := range a.away {
		if !of.heard {
			unheard++
		}
	}
	return 2*unheard >= len(a.nodes)
}

// parts divides the ports of a Service by the nodes that have missed them, or their first endpoint of the Service. The names are
// sorted, with a space after each.
func (a *absences) parts(key plan.LimitKey, ports []plan.Port) iter.Seq2[string, []plan.Port] {
	if len(a.away) == 0 {
		return func(yield func(string, []plan.Port) bool) { yield("", ports) }
	}
	away, came, parts := slices.Sorted(maps.Keys(a.away)), a.came[key], map[string][]plan.Port{}
	for _, p := range ports {
		missed := ""
		for _, node := range away {
			of := a.away[node]
			if !came[arrival{port: p.Number}].Before(of.since) || !of.joins && !came[arrival{node: node}].Before(of.since) {
				missed += node + " "
			}
		}
		parts[missed] = append(parts[missed], p)
	}
	return maps.All(parts)
}

// missedBy returns the nodes that have missed some of the ports, in the same way.
func (a *absences) missedBy(key plan.LimitKey, ports []plan.Port) (nodes string) {
	for missed := range a.parts(key, ports) {
		nodes += missed
	}
	return nodes
}

// without returns the ports that are not among the others.
func without(ports, others []plan.Port) []plan.Port {
	if slices.Equal(ports, others) { // nearly always
		return nil
	}
	return slices.DeleteFunc(slices.Clone(ports), sets.New(others...).Has)
}

// missed reports whether a node is among those that parts or missedBy returned.
func missed(by, node string) bool { return slices.Contains(strings.Fields(by), node) }
