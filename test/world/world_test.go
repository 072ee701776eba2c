package world_test

import (
	"bytes"
	"os"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/lodestone-lb/lodestone/test/world"
)

// story lives through a seed and returns its story.
func story(seed uint64) string {
	var text bytes.Buffer
	world.Run(world.Draw(seed), &text)
	return text.String()
}

// The same seed gives the same story, to the byte: no clock, no scheduler and no order of a map is to be seen in it.
func TestTheSameSeedGivesTheSameStory(t *testing.T) {
	t.Parallel()
	total := 0
	for seed := range uint64(12) {
		first := story(seed)
		require.Equal(t, first, story(seed), "seed %d", seed)
		total += len(first)
	}
	require.Greater(t, total, 100_000, "something happens")
	require.NotEqual(t, story(1), story(2))
}

// The corpus has seeds that find an old defect when it is put back, each with a number of nodes. Behind it come others.
func TestNoSeedOfTheCorpusFails(t *testing.T) {
	t.Parallel()
	scenarios := []world.Scenario{}
	text, err := os.ReadFile("testdata/corpus.txt")
	require.NoError(t, err)
	for line := range strings.Lines(string(text)) {
		fields := strings.Fields(line)
		if fields[0] == "#" {
			continue
		}
		seed, err := strconv.ParseUint(fields[0], 10, 64)
		require.NoError(t, err)
		nodes, err := strconv.Atoi(fields[1])
		require.NoError(t, err)
		scenarios = append(scenarios, world.Draw(seed).WithNodes(nodes))
	}
	for i := range uint64(60) {
		scenarios = append(scenarios, world.Draw(1_000_000+i))
	}
	for _, s := range scenarios {
		if f := world.Run(s, nil); f != nil {
			t.Errorf("make simulate SEED=%d ARGS='-nodes %d': %s", s.Seed, s.Nodes, f)
		}
	}
}
