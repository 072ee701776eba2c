package dashboard

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/lodestone-lb/lodestone/inspect/bgp"
	"github.com/lodestone-lb/lodestone/inspect/status"
	"github.com/lodestone-lb/lodestone/pkg/testcost"
)

// state is a State with these VIPs, counted from 192.0.2.1.
func state(vips ...VIP) *State {
	s := &State{Status: &status.Status{VIPs: &status.VIPs{}}}
	for i, v := range vips {
		v.Addr = netip.AddrFrom4([4]byte{192, 0, 2, byte(1 + i)})
		s.VIPs = append(s.VIPs, v)
	}
	return s
}

// Nobody looks for a night: whoever looks then sees what objects have of it.
func TestWhatHappenedBetweenTwoVisitsIsShown(t *testing.T) {
	t.Parallel()
	d, start := New(Options{}), time.Now().UTC().Truncate(time.Second)
	old := Transition{Time: start.Add(-time.Hour), Text: "old"}
	first, second := state(), state()
	first.Time, first.records = start, []Transition{old}
	d.show(first)
	d.state = nil // as watch leaves it
	second.Time = start.Add(12 * time.Hour)
	night := Transition{Time: start.Add(11 * time.Hour), Text: "n3 has no session with tor"}
	second.records = []Transition{old, night}
	d.show(second)
	_, past := d.current()
	require.Equal(t, []Transition{old, night}, past)
}

// A node of a large cluster is lost, and every VIP has a router's path less.
func TestALostNodeCostsLittle(t *testing.T) {
	states := func(nodes int) [2]*State {
		var names []string
		for i := range nodes {
			names = append(names, fmt.Sprintf("node-%05d", i))
		}
		var before, after []VIP
		for range 50 {
			before, after = append(before, VIP{Routers: names}), append(after, VIP{Routers: names[:nodes-1]})
		}
		return [2]*State{state(before...), state(after...)}
	}
	testcost.Grows(t, "a lost node", states(1000), states(4000), func(s [2]*State) { moves(s[0], s[1]) })
}

func TestMovesAreShownTogether(t *testing.T) {
	t.Parallel()
	a, b, none := VIP{Owner: "a"}, VIP{Owner: "b"}, VIP{Reason: "NoServingEndpoint"}
	routed := func(nodes ...string) VIP { return VIP{Routers: nodes} }
	for name, test := range map[string]struct {
		before, after *State
		want          []Transition
	}{
		"nothing": {state(a, b, routed("a", "b")), state(a, b, routed("a", "b")), nil},
		"a node is lost": {state(a, a, a, a, a, b), state(b, b, b, b, b, b),
			[]Transition{{Tone: Note, Text: "192.0.2.1, 192.0.2.2, 192.0.2.3 and 2 more: from a to b"}}},
		"a new VIP": {state(), state(a), []Transition{{Tone: Good, Text: "192.0.2.1: announced by a"}}},
		"nobody any more": {state(a), state(none),
			[]Transition{{Tone: Bad, Text: "192.0.2.1: not announced by a any more; nobody announces it"}}},
		"a Service is gone": {state(a), state(), []Transition{{Tone: Note, Text: "192.0.2.1: no Service has it any more"}}},
		"a node fewer": {state(routed("a", "b")), state(routed("b")),
			[]Transition{{Tone: Note, Text: "192.0.2.1: by BGP no longer from a"}}},
		"a node more":       {state(routed("a")), state(routed("a", "b")), []Transition{{Tone: Good, Text: "192.0.2.1: by BGP also from b"}}},
		"what is not known": {&State{Status: &status.Status{}}, state(a), nil},
		"from layer 2 to BGP": {state(a), state(routed("b")),
			[]Transition{{Tone: Note, Text: "192.0.2.1: not announced by a any more; by BGP also from b"}}},
	} {
		var got []Transition
		for _, m := range moves(test.before, test.after) {
			require.Equal(t, "VIP", m.About)
			got = append(got, Transition{Tone: m.Tone, Text: m.Text})
		}
		assert.Equal(t, test.want, got, name)
	}
}

// While the configuration is invalid it is not known which Services wait. That is no news about them, and nothing is shown of
// which nobody knows whether it is so.
func TestWhatIsNotKnown(t *testing.T) {
	t.Parallel()
	known, unknown := state(VIP{Owner: "a"}), &State{Status: &status.Status{}}
	known.Services = &status.Services{Waiting: []status.Waiting{{Reason: "PoolExhausted", Services: []string{"shop/web"}}}}
	known.Conflicts = []status.Conflict{{Node: "a"}}
	known.Pools, known.Sessions = []status.Pool{}, []bgp.Session{}
	for _, s := range []*State{known, unknown} {
		s.Nodes = []Node{{Name: "a"}}
	}
	require.Empty(t, transitions(known, unknown))
	require.Empty(t, transitions(unknown, known))
	shown := func(s *State, name string) string {
		text, err := json.Marshal(NewView(s, nil, Query{})[name].rows)
		require.NoError(t, err)
		return string(text)
	}
	require.Contains(t, shown(known, "head"), `"services":{"good":0,"bad":1},"vips":{"good":1,"bad":0},"sessions":{"good":0,"bad":0}`)
	require.NotContains(t, shown(unknown, "head"), `"good"`)
	require.Contains(t, shown(unknown, "nodes"), `"unknown":true`)
	for _, name := range []string{"pools", "vips"} {
		require.False(t, NewView(known, nil, Query{})[name].Unknown, name)
		require.True(t, NewView(unknown, nil, Query{})[name].Unknown, name)
	}
}

// What is left out of a list is counted.
func TestManyAreCounted(t *testing.T) {
	t.Parallel()
	s := state()
	for i := range maxRows + 50 {
		s.Pools = append(s.Pools, status.Pool{Name: fmt.Sprint(i)})
	}
	v := NewView(s, nil, Query{})
	require.Len(t, v["pools"].order, maxRows)
	require.Equal(t, 50, v["pools"].More)
	require.Zero(t, v["warnings"].More)
}

// However much happens at once, the timeline stays short.
func TestTransitionsAreBounded(t *testing.T) {
	t.Parallel()
	before, after := state(), state()
	for i := range 1000 {
		after.Nodes = append(after.Nodes, Node{Name: strings.Repeat("n", i+1)})
	}
	all := transitions(before, after)
	require.Len(t, all, maxAtOnce+1)
	require.Equal(t, "and 960 more like that", all[maxAtOnce].Text)
	d := New(Options{})
	for range 20 {
		d.show(before)
		d.show(after)
	}
	_, past := d.current()
	require.LessOrEqual(t, len(past), maxTransitions)
	require.LessOrEqual(t, len(clip(strings.Repeat("é", 1000))), maxText+3)
}

func FuzzParseQuery(f *testing.F) {
	for _, text := range []string{"", "q=a", "vips=-1", "vips=99999999999999999999", "trouble=1&nodes=3", "q=%00%ff"} {
		f.Add(text)
	}
	s := state(VIP{Owner: "a", Services: []string{"shop/web"}}, VIP{Reason: "x"})
	f.Fuzz(func(t *testing.T, text string) {
		values, err := url.ParseQuery(text)
		if err != nil {
			return
		}
		q := ParseQuery(values)
		require.LessOrEqual(t, len(q.Text), maxQuery)
		v := NewView(s, nil, q)
		require.LessOrEqual(t, len(v["vips"].order), 2)
		require.GreaterOrEqual(t, v["vips"].Page, 0)
	})
}
