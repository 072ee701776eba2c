// Package bgp shows the BGP sessions, by the plan and by the speakers' reports, and what the nodes announce to
// the routers. It asks no router: what a router has made of the routes is not here.
//
//	peers.go   the sessions
//	routes.go  the routes
package bgp

import (
	"cmp"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/lodestone-lb/lodestone/inspect/output"
	"github.com/lodestone-lb/lodestone/inspect/simulation"
	"github.com/lodestone-lb/lodestone/pkg/report"
	"github.com/lodestone-lb/lodestone/speaker/plan"
)

// The states of a session, as the cluster shows them.
const (
	Established = "established"
	Down        = "down"
	// Unknown: the session should exist, but no ready speaker reports it.
	Unknown = "unknown"
	// Impossible: the peer selects the node, which lacks something for it.
	Impossible = "impossible"
	// Leftover: the speaker reports a session that should not exist.
	Leftover = "leftover"
)

// Session is a node's session with a peer: by the plan, and by the speaker's report.
type Session struct {
	Node   string     `json:"node"`
	Peer   string     `json:"peer"`
	Router netip.Addr `json:"router,omitzero"`
	State  string     `json:"state"`
	Since  time.Time  `json:"since,omitzero"`
	// BFD is the state of the BFD session; empty: there is none.
	BFD string `json:"bfd,omitempty"`
	// Reason is what is wrong with the session by the plan; empty: nothing is.
	Reason  plan.ProblemReason `json:"reason,omitempty"`
	Message string             `json:"message,omitempty"`
}

// Sessions are those of all nodes, by node and peer.
type Sessions struct {
	Time     time.Time `json:"time"`
	Sessions []Session `json:"sessions"`
}

// Peers returns the sessions that there should be, and those that speakers report. An empty name
// stands for every node, or every peer.
func Peers(n *simulation.Network, now time.Time, node, peer string) Sessions {
	all := Sessions{now.UTC().Truncate(time.Second), []Session{}}
	for _, name := range slices.Sorted(maps.Keys(n.Nodes)) {
		if node != "" && name != node {
			continue
		}
		for _, s := range sessionsOf(n, name) {
			if peer == "" || s.Peer == peer {
				all.Sessions = append(all.Sessions, s)
			}
		}
	}
	return all
}

func sessionsOf(n *simulation.Network, node string) []Session {
	due, problems := n.Sessions(node)
	last, reported := n.Reports[node]
	has := map[string]report.Session{}
	for _, s := range last.Sessions {
		has[s.Peer] = s
	}
	names := slices.Concat(slices.Collect(maps.Keys(due)), slices.Collect(maps.Keys(problems)), slices.Collect(maps.Keys(has)))
	slices.Sort(names)
	var all []Session
	for _, name := range slices.Compact(names) {
		problem, wrong := problems[name]
		s := Session{Node: node, Peer: name, Reason: problem.Reason}
		session, wanted := due[name]
		if wanted {
			s.Router = session.Peer.Address
		}
		t, heard := has[name]
		switch {
		case !wanted && wrong:
			s.State, s.Message = Impossible, problem.Message
		case !wanted:
			s.take(t)
			s.State, s.Message = Leftover, "no peer of the configuration in the cluster is like it; the speaker may have another one in force"
		case !n.Speakers[node]:
			s.State, s.Message = Unknown, unheard(reported, heard, t)
		case !heard:
			s.State, s.Message = Unknown, "there should be a session, and the speaker does not report it: see its log"
		default:
			s.take(t)
			if wrong && !strings.Contains(s.Message, problem.Message) { // an older speaker does not report it
				s.Message = join(s.Message, problem.Message)
			}
		}
		all = append(all, s)
	}
	return all
}

// unheard returns why nothing is known of a session whose speaker is not ready.
func unheard(reported, heard bool, last report.Session) string {
	switch {
	case !reported:
		return "no speaker of the node has ever reported anything"
	case !heard:
		return "the node's speaker is not ready, and has not reported it"
	case last.Established:
		return "the node's speaker is not ready; by its last report the session is established"
	}
	return join("the node's speaker is not ready", last.Message)
}

func join(a, b string) string {
	if a == "" || b == "" {
		return a + b
	}
	return a + "; " + b
}

// take takes over the speaker's report.
func (s *Session) take(t report.Session) {
	s.State, s.Since, s.BFD, s.Message = Down, t.Since, t.BFD, t.Message
	if t.Established {
		s.State = Established
	}
	if t.Router.IsValid() {
		s.Router = t.Router
	}
}

// Up reports whether routes are exchanged.
func (s Session) Up() bool { return s.State == Established }

// Healthy reports whether all sessions are as they should be.
func (s Sessions) Healthy() bool {
	return !slices.ContainsFunc(s.Sessions, func(s Session) bool { return !s.Up() || s.Message != "" })
}

// Show implements output.Page.
func (s Sessions) Show(c *output.Canvas) {
	if len(s.Sessions) == 0 {
		c.Line(output.Plain, "There are no BGP sessions, and there should be none.")
		return
	}
	var rows [][]any
	for _, session := range s.Sessions {
		rows = append(rows, session.row(s.Time))
	}
	c.Rows([]string{"NODE", "PEER", "ROUTER", "STATE", "SINCE", "BFD", "MESSAGE"}, rows)
}

func (s Session) row(now time.Time) []any {
	router, since, tone := "?", "", output.Bad
	if s.Router.IsValid() {
		router = s.Router.String()
	}
	if !s.Since.IsZero() {
		since = output.Age(now.Sub(s.Since))
	}
	switch {
	case s.Up() && s.Message == "":
		tone = output.Good
	case s.Up(), s.State == Leftover:
		tone = output.Warning
	}
	return []any{s.Node, s.Peer, router, output.Cell{Text: s.State, Tone: tone}, since, s.BFD, s.Message}
}

// Peer is how the sessions with a peer are, all nodes together.
type Peer struct {
	Name string `json:"name"`
	// Up of Nodes sessions are established.
	Up    int `json:"up"`
	Nodes int `json:"nodes"`
	// Down are the sessions that are not.
	Down []Session `json:"down,omitempty"`
}

// ByPeer sums the sessions up, by peer.
func (s Sessions) ByPeer() []Peer {
	by := map[string]*Peer{}
	for _, session := range s.Sessions {
		p := by[session.Peer]
		if p == nil {
			p = &Peer{Name: session.Peer}
			by[session.Peer] = p
		}
		if session.State != Leftover {
			p.Nodes++
		}
		if session.Up() {
			p.Up++
		} else {
			p.Down = append(p.Down, session)
		}
	}
	all := []Peer{}
	for _, name := range slices.Sorted(maps.Keys(by)) {
		all = append(all, *by[name])
	}
	return all
}

// Why returns the node and why its session is not there, for people.
func (s Session) Why() string { return s.Node + ": " + cmp.Or(s.Message, s.State) }
