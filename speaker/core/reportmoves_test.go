package core

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/lodestone-lb/lodestone/pkg/report"
	"github.com/lodestone-lb/lodestone/speaker/plan"
)

// moved returns what is to be reported when the owners were these before.
func (f *fleet) moved(before map[netip.Addr]string, why report.Reason) []string {
	moves := []string{}
	for vip, owner := range f.owners() {
		if before[vip] != owner {
			moves = append(moves, fmt.Sprintf("%s %q %q %s", vip, before[vip], owner, why))
		}
	}
	slices.Sort(moves)
	return moves
}

func TestMovesAreReportedOnceTheyHaveSettled(t *testing.T) {
	t.Parallel()
	f := newFleet(t, 4, 40).start()
	require.Empty(t, f.after(time.Minute), "the first owner of a VIP is not reported as a move")
	before := f.owners()

	t.Log("a node is lost")
	f.lose("n0")
	require.Empty(t, f.after(movesSettle-time.Second))
	lost := f.moved(before, report.SpeakerLost)
	require.NotEmpty(t, lost)
	require.Equal(t, lost, f.after(time.Minute), "by one of the others")
	t.Log("and is back")
	f.begin("n0", false)
	f.see()
	f.join("n0", true)
	back := f.after(time.Minute)
	require.Len(t, back, len(lost))
	require.Contains(t, back[0], ` "n0" NotOwner`)
	require.Equal(t, before, f.owners())

	t.Log("its speaker is replaced: nobody hears of it")
	f.join("n0", false) // it hands over
	require.Empty(t, f.after(time.Second))
	f.lose("n0")
	require.Empty(t, f.after(4*time.Second))
	f.begin("n0", false)
	f.see()
	require.Empty(t, f.after(time.Second))
	f.join("n0", true)
	require.Empty(t, f.after(time.Hour))

	t.Log("it flaps, and in the end it is gone")
	for range 20 {
		f.cut["n0"] = true
		f.see()
		require.Empty(t, f.after(3*time.Second))
		f.cut["n0"] = false
		f.see()
		require.Empty(t, f.after(3*time.Second))
	}
	f.lose("n0")
	require.Equal(t, lost, f.after(time.Hour))
}

func TestMovesHaveTheirReasons(t *testing.T) {
	t.Parallel()
	f := newFleet(t, 3, 30).start()
	f.after(time.Minute)
	for _, step := range []struct {
		why report.Reason
		do  func()
	}{
		{"NodeExcluded", func() { f.exclude("n1", true) }},
		{"NotOwner", func() { f.exclude("n1", false) }},
		{"LessPreferred", func() { f.prefer("n2") }},
		{"SpeakerNotReady", func() { f.join("n2", false) }},
		{"LessPreferred", func() { f.join("n2", true) }},
		{"NodeUnknown", func() { delete(f.nodes, "n2"); f.lose("n2") }},
	} {
		before := f.owners()
		step.do()
		reported := f.moved(before, step.why)
		require.NotEmpty(t, reported, step.why)
		require.Equal(t, reported, f.after(time.Minute), step.why)
	}
}

func TestVIPsThatNobodyHas(t *testing.T) {
	t.Parallel()
	f := newFleet(t, 3, 1).start()
	vip := netip.MustParseAddr("203.0.113.0")
	owner := f.owners()[vip]
	f.after(time.Minute)
	serving := func(yes bool) {
		web := f.services["default/web-0"]
		web.Serving = yes
		f.services["default/web-0"] = web
		f.see()
	}
	serving(false)
	require.Empty(t, f.after(time.Second))
	serving(true)
	require.Empty(t, f.after(time.Minute), "a rollout")
	serving(false)
	require.Equal(t, []string{fmt.Sprintf(`203.0.113.0 %q "" NoServingEndpoint`, owner)}, f.after(time.Minute))
	serving(true)
	require.Len(t, f.after(time.Minute), 1, "it has an owner again")

	t.Log("a Service that is new waits for its endpoints: its first owner is published once, when it has one")
	late := plan.Service{Name: "default/late", VIPs: []netip.Addr{netip.MustParseAddr("203.0.113.99")}}
	f.services[late.Name] = late
	f.see()
	require.Empty(t, f.after(time.Minute))
	late.Serving = true
	f.services[late.Name] = late
	f.see()
	require.Empty(t, f.after(movesSettle-time.Second))
	require.Equal(t, []string{fmt.Sprintf(`203.0.113.99 "" %q FirstOwner`, f.owners()[late.VIPs[0]])}, f.after(time.Hour))

	t.Log("a Service that is deleted while its VIP moves is nobody's business")
	f.exclude(owner, true)
	for _, c := range f.cores {
		c.Step(Service{plan.Service{Name: "default/web-0"}}, f.now)
	}
	delete(f.services, "default/web-0")
	f.see()
	require.NotContains(t, strings.Join(f.after(time.Minute), " "), "203.0.113.0 ")
}

// A VIP that is new is published with its first owner, and with no restart of whatever speaker.
func TestFirstOwners(t *testing.T) {
	t.Parallel()
	f := newFleet(t, 3, 20).start()
	f.after(time.Minute)
	add := func(name string, last byte) netip.Addr {
		s := plan.Service{Name: name, Serving: true, VIPs: []netip.Addr{netip.AddrFrom4([4]byte{203, 0, 113, last})}}
		f.services[name] = s
		f.see()
		return s.VIPs[0]
	}
	vip := add("default/new", 99)
	first := fmt.Sprintf(`203.0.113.99 "" %q FirstOwner`, f.owners()[vip])
	require.Equal(t, []string{first}, f.after(time.Minute))
	for _, node := range []string{"n0", "n1", "n2"} {
		f.lose(node)
		f.begin(node, false)
		f.see()
		f.after(time.Second)
		f.join(node, true)
		require.Empty(t, f.after(time.Hour))
	}

	t.Log("a power cut: nobody knows which VIPs have had an owner")
	for node := range f.nodes {
		f.begin(node, false)
	}
	f.see()
	f.after(time.Minute)
	for node := range f.nodes {
		f.join(node, true)
	}
	require.Empty(t, f.after(time.Hour))

	t.Log("it has an owner and loses it before that is published: the next one is the first")
	add("default/short", 100)
	f.after(time.Second)
	f.exclude(f.owners()[netip.MustParseAddr("203.0.113.100")], true)
	require.Contains(t, f.after(time.Minute), fmt.Sprintf(`203.0.113.100 "" %q FirstOwner`, f.owners()[netip.MustParseAddr("203.0.113.100")]))

	t.Log("an address that comes again is new again")
	svc := f.services["default/new"]
	delete(f.services, svc.Name)
	for _, c := range f.cores {
		c.Step(Service{plan.Service{Name: svc.Name}}, f.now)
	}
	f.see()
	require.Empty(t, f.after(time.Minute))
	f.services[svc.Name] = svc
	f.see()
	require.Equal(t, []string{fmt.Sprintf(`203.0.113.99 "" %q FirstOwner`, f.owners()[vip])}, f.after(time.Minute))

	t.Log("of many at a time some are published")
	for i := range 150 {
		add(fmt.Sprint("default/many-", i), byte(101+i))
	}
	many := len(f.after(5 * time.Minute))
	require.GreaterOrEqual(t, many, maxFirst)
	require.LessOrEqual(t, many, 2*maxFirst, "by the two speakers that report")
	add("default/last", 98)
	require.Len(t, f.after(time.Minute), 1, "there is room again")
}

// The moves between two calm moments are reported once: of each VIP whose owner is another one at the second
// moment, whatever happened in between.
func TestTheDifferenceIsReported(t *testing.T) {
	t.Parallel()
	reported := 0
	rapid.Check(t, func(t *rapid.T) {
		const nodes = 4
		f := newFleet(t, nodes, 8).start()
		f.after(time.Minute)
		node := rapid.Custom(func(t *rapid.T) string { return fmt.Sprint("n", rapid.IntRange(0, nodes-2).Draw(t, "node")) }) // the last one stays
		pause := func() []string { return f.after(time.Duration(rapid.IntRange(0, 12).Draw(t, "seconds")) * time.Second) }
		for range rapid.IntRange(1, 5).Draw(t, "times") {
			before, moves := f.owners(), []string{}
			if rapid.IntRange(0, 3).Draw(t, "restart") == 0 {
				n := node.Draw(t, "of")
				if !f.alive[n] {
					continue
				}
				f.lose(n)
				moves = append(moves, pause()...)
				f.begin(n, false)
				f.see()
				moves = append(moves, pause()...)
				f.join(n, true)
				moves = append(moves, f.after(time.Minute)...)
				require.Zero(t, len(moves)%2, "there and back: %q", moves)
				continue
			}
			for range rapid.IntRange(1, 4).Draw(t, "changes") {
				switch n := node.Draw(t, "at"); rapid.IntRange(0, 2).Draw(t, "kind") {
				case 0:
					f.exclude(n, !f.nodes[n].Labelled)
				case 1:
					f.prefer(n)
				default:
					f.join(n, !f.alive[n])
				}
				// Changes are less than movesSettle apart, the first and the last, too.
				moves = append(moves, f.after(time.Duration(rapid.IntRange(0, 3).Draw(t, "pause"))*time.Second)...)
			}
			moves = append(moves, f.after(time.Minute)...)
			slices.Sort(moves)
			expected := f.moved(before, "")
			require.Len(t, moves, len(expected))
			for i := range moves {
				require.True(t, strings.HasPrefix(moves[i], expected[i]) && report.Reason(strings.Fields(moves[i])[3]).Known(), "%q, not %q",
					moves[i], expected[i])
			}
			reported += len(moves)
		}
	})
	require.Positive(t, reported)
}

// Every reason for which a node can lose a VIP is one that people can read.
func TestReasonsAreKnown(t *testing.T) {
	t.Parallel()
	for _, r := range []plan.Reason{
		plan.NotOwner, plan.NoAdvertisement, plan.ServiceNotSelected, plan.NoServingEndpoint, plan.NoLocalEndpoint, plan.NodeNotSelected,
		plan.NotOnSegment,
		plan.NodeExcluded, plan.NetworkUnavailable, plan.LinkDown, plan.LessPreferred, plan.SpeakerNotReady, plan.NodeUnknown,
	} {
		require.True(t, report.Reason(r).Known(), r)
	}
}
