package soak

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// A seed decides what happens, and before a fault comes again all others have.
func TestChoose(t *testing.T) {
	nodes := []string{"n1", "n2", "n3"}
	const rounds = 40
	on, pairs := map[string]int{}, 0
	for round := range rounds {
		names := map[string]bool{}
		for i := range all {
			step := round*len(all) + i + 1
			chosen := choose(7, step, nodes)
			require.Equal(t, chosen.String(), choose(7, step, nodes).String())
			names[chosen[0].name] = true
			for _, d := range chosen {
				on[d.node]++
				require.True(t, d.min <= d.last && d.last <= max(d.min, d.max), "%s lasts %s", d.name, d.last)
			}
			if len(chosen) == 2 {
				pairs++
				require.Equal(t, []kind{wire, program}, []kind{chosen[0].kind, chosen[1].kind})
			}
		}
		require.Len(t, names, len(all))
	}
	require.Len(t, on, len(nodes))
	require.Greater(t, pairs, rounds)
	require.NotEqual(t, choose(7, 1, nodes).String()+choose(7, 2, nodes).String(), choose(8, 1, nodes).String()+choose(8, 2, nodes).String())
}

func TestMayEnd(t *testing.T) {
	happens := func(last time.Duration, names ...string) (chosen faults) {
		for _, name := range names {
			for _, f := range all {
				if f.name == name {
					chosen = append(chosen, drawn{f, "n1", last})
				}
			}
		}
		require.Len(t, chosen, len(names))
		return chosen
	}
	for _, test := range []struct {
		chosen faults
		n1, n2 bool
		moves  bool
	}{
		{happens(time.Second, "power loss"), false, false, true},
		{happens(time.Minute, "power loss"), true, false, true},
		{happens(time.Second, "partition"), false, false, true},
		{happens(time.Minute, "partition"), true, true, true},
		{happens(time.Second, "speaker killed"), false, false, true},
		{happens(0, "drain"), true, true, true},
		{happens(0, "pods replaced"), true, true, true},
		{happens(time.Minute, "leader stopped"), false, false, false},
		{happens(time.Minute, "API server away"), false, false, false},
		{happens(time.Minute, "power loss", "leader stopped"), true, false, true},
	} {
		assert.Equal(t, test.n1, test.chosen.mayEnd("n1"), "%s: on n1", test.chosen)
		assert.Equal(t, test.n2, test.chosen.mayEnd("n2"), "%s: on n2", test.chosen)
		assert.Equal(t, test.moves, test.chosen.move(), "%s: moves", test.chosen)
	}
}
