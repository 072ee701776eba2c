package dashboard

import (
	"cmp"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/util/sets"

	"github.com/lodestone-lb/lodestone/inspect/bgp"
	"github.com/lodestone-lb/lodestone/inspect/output"
)

const (
	// maxTransitions is how many transitions are remembered, maxAtOnce how many
	// one look adds: the rest is counted.
	maxTransitions = 200
	maxAtOnce      = 40
	// maxText bounds a text on the page, in bytes: others write some of them.
	maxText = 400
)

// Tone is what a transition means to the reader.
type Tone string

// The tones.
const (
	Good Tone = "good"
	Bad  Tone = "bad"
	Note Tone = "note"
)

// Transition is something that came to be different.
type Transition struct {
	// Time is when that was, or was seen, in whole seconds.
	Time time.Time `json:"time"`
	Tone Tone      `json:"tone"`
	// About is the part of the installation, Text what happened.
	About string `json:"about"`
	Text  string `json:"text"`
}

func sessionIs(s bgp.Session) Transition {
	if s.Up() {
		return Transition{Tone: Good, About: "BGP", Text: fmt.Sprintf("%s has a session with %s", s.Node, s.Peer)}
	}
	return Transition{Tone: Bad, About: "BGP",
		Text: clip(fmt.Sprintf("%s has no session with %s: %s", s.Node, s.Peer, cmp.Or(s.Message, s.State)))}
}

func speakerIs(node string, ready bool, why string) Transition {
	if ready {
		return Transition{Tone: Good, About: "speaker", Text: "the speaker of " + node + " is ready"}
	}
	return Transition{Tone: Bad, About: "speaker", Text: clip("the speaker of " + node + " is not ready: " + why)}
}

func leaderIs(pod string) Transition {
	return Transition{Tone: Note, About: "controller", Text: pod + " leads"}
}

func waits(service, reason, message string) Transition {
	return Transition{Tone: Bad, About: "Service", Text: clip(service + " waits: " + reason + ": " + message)}
}

// transitions returns what came to be different between two looks, at the time
// of the second.
func transitions(before, after *State) []Transition {
	var all []Transition
	for _, part := range [][]Transition{
		configurations(before, after), leaders(before, after), speakers(before, after), sessions(before, after), moves(before, after),
		services(before, after), conflicts(before, after),
	} {
		if more := len(part) - maxAtOnce; more > 0 {
			part = append(part[:maxAtOnce], Transition{Tone: Note, About: part[0].About, Text: fmt.Sprintf("and %d more like that", more)})
		}
		all = append(all, part...)
	}
	for i := range all {
		all[i].Time = after.Time
	}
	return all
}

func configurations(before, after *State) []Transition {
	was, is := before.configuration(), after.configuration()
	if was == is || before.Configuration == nil || after.Configuration == nil {
		return nil
	}
	t := Transition{Tone: Good, About: "configuration", Text: "the configuration is " + is}
	if errs := after.Configuration.Errors; len(errs) > 0 {
		t.Tone, t.Text = Bad, clip(t.Text+": "+errs[0])
	}
	return []Transition{t}
}

func leaders(before, after *State) []Transition {
	if before.Controller == nil || after.Controller == nil || before.Controller.Leader == after.Controller.Leader {
		return nil
	}
	if after.Controller.Leader == "" {
		return []Transition{{Tone: Bad, About: "controller", Text: "nobody leads"}}
	}
	return []Transition{leaderIs(after.Controller.Leader)}
}

func speakers(before, after *State) (all []Transition) {
	was := map[string]Node{}
	for _, n := range before.Nodes {
		was[n.Name] = n
	}
	for _, n := range after.Nodes {
		old, known := was[n.Name]
		delete(was, n.Name)
		switch {
		case !known:
			all = append(all, Transition{Tone: Note, About: "node", Text: n.Name + " is new"})
		case n.Ready != old.Ready:
			all = append(all, speakerIs(n.Name, n.Ready, cmp.Or(n.Problem, "it has none")))
		}
	}
	for _, name := range slices.Sorted(maps.Keys(was)) {
		all = append(all, Transition{Tone: Note, About: "node", Text: name + " is gone"})
	}
	return all
}

func sessions(before, after *State) (all []Transition) {
	type key struct{ node, peer string }
	was := map[key]bgp.Session{}
	for _, s := range before.Sessions {
		was[key{s.Node, s.Peer}] = s
	}
	for _, s := range after.Sessions {
		old, known := was[key{s.Node, s.Peer}]
		if known && (s.State != old.State || s.Up() && !s.Since.Equal(old.Since)) {
			all = append(all, sessionIs(s))
		}
	}
	return all
}

// move is what became of the announcements of VIPs: who owns them by layer 2, and
// which nodes began and ceased to announce them to routers.
type move struct {
	from, to, began, ceased string
	// silent is set if nobody announces them now.
	silent bool
}

// moves lists VIPs that others announce than before. VIPs that moved the same way are together: the loss of a
// node is one line for each heir.
func moves(before, after *State) (all []Transition) {
	if before.Status.VIPs == nil || after.Status.VIPs == nil {
		return nil
	}
	was := make(map[netip.Addr]*VIP, len(before.VIPs))
	for i := range before.VIPs {
		was[before.VIPs[i].Addr] = &before.VIPs[i]
	}
	moved := map[move][]string{}
	for i := range after.VIPs {
		v := &after.VIPs[i]
		old := was[v.Addr]
		if delete(was, v.Addr); old == nil {
			old = &VIP{}
		}
		m := move{from: old.Owner, to: v.Owner, began: without(v.Routers, old.Routers), ceased: without(old.Routers, v.Routers)}
		if m.from == m.to {
			m.from, m.to = "", ""
		}
		if m != (move{}) {
			m.silent = v.Reason != ""
			moved[m] = append(moved[m], v.Addr.String())
		}
	}
	for _, m := range slices.SortedFunc(maps.Keys(moved), func(a, b move) int { return cmp.Compare(a.text(), b.text()) }) {
		t := Transition{Tone: Note, About: "VIP", Text: clip(output.List(moved[m], 3) + ": " + m.text())}
		switch {
		case m.silent:
			t.Tone = Bad
		case m.from == "" && m.ceased == "":
			t.Tone = Good
		}
		all = append(all, t)
	}
	if gone := slices.SortedFunc(maps.Keys(was), netip.Addr.Compare); len(gone) > 0 {
		all = append(all, Transition{Tone: Note, About: "VIP", Text: output.List(output.Strings(gone), 3) + ": no Service has it any more"})
	}
	return all
}

// without lists the names that are not among the others.
func without(names, others []string) string {
	if slices.Equal(names, others) { // nearly always
		return ""
	}
	return output.List(slices.DeleteFunc(slices.Clone(names), func(n string) bool {
		_, found := slices.BinarySearch(others, n)
		return found
	}), 3)
}

// text describes what became of announcements.
func (m move) text() string {
	var parts []string
	switch {
	case m.from != "" && m.to != "":
		parts = append(parts, "from "+m.from+" to "+m.to)
	case m.to != "":
		parts = append(parts, "announced by "+m.to)
	case m.from != "":
		parts = append(parts, "not announced by "+m.from+" any more")
	}
	if m.began != "" {
		parts = append(parts, "by BGP also from "+m.began)
	}
	if m.ceased != "" {
		parts = append(parts, "by BGP no longer from "+m.ceased)
	}
	if m.silent {
		parts = append(parts, "nobody announces it")
	}
	return strings.Join(parts, "; ")
}

func services(before, after *State) (all []Transition) {
	if before.Services == nil || after.Services == nil {
		return nil
	}
	was, is := before.waiting(), after.waiting()
	for _, name := range slices.Sorted(maps.Keys(is)) {
		if was[name] != is[name] {
			all = append(all, waits(name, is[name], after.Services.Messages[name]))
		}
	}
	for _, name := range slices.Sorted(maps.Keys(was)) {
		if _, still := is[name]; !still {
			all = append(all, Transition{Tone: Good, About: "Service", Text: name + " does not wait any more"})
		}
	}
	return all
}

func conflicts(before, after *State) (all []Transition) {
	if before.Conflicts == nil || after.Conflicts == nil {
		return nil
	}
	had, has := sets.New(before.Conflicts...), sets.New(after.Conflicts...)
	for _, c := range after.Conflicts {
		if !had.Has(c) {
			all = append(all, Transition{Tone: Bad, About: "conflict", Text: clip(c.String())})
		}
	}
	for _, c := range before.Conflicts {
		if !has.Has(c) {
			all = append(all, Transition{Tone: Good, About: "conflict",
				Text: fmt.Sprintf("%s does not see another machine with %s any more", c.Node, c.VIP)})
		}
	}
	return all
}

// clip cuts a text where it becomes too long.
func clip(text string) string {
	if len(text) <= maxText {
		return text
	}
	return strings.ToValidUTF8(text[:maxText], "") + "..."
}
