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
	for seed := range uint64(6) {
		first := story(seed)
		require.Equal(t, first, story(seed), "seed %d", seed)
		total += len(first)
	}
	require.Greater(t, total, 50_000, "something happens")
	require.NotEqual(t, story(1), story(2))
}

// seed is a line of the corpus: a seed and a number of nodes that find old defects when they are put back, and which.
type seed struct {
	number uint64
	nodes  int
	finds  []string
}

func corpus(t *testing.T) (all []seed) {
	t.Helper()
	text, err := os.ReadFile("testdata/corpus.txt")
	require.NoError(t, err)
	for line := range strings.Lines(string(text)) {
		if strings.HasPrefix(line, "#") {
			continue
		}
		fields := strings.Fields(strings.ReplaceAll(line, ",", ""))
		number, err := strconv.ParseUint(fields[0], 10, 64)
		require.NoError(t, err)
		nodes, err := strconv.Atoi(fields[1])
		require.NoError(t, err)
		all = append(all, seed{number, nodes, fields[2:]})
	}
	return all
}

// live fails the test if a scenario fails.
func live(t *testing.T, s world.Scenario) {
	t.Helper()
	if f := world.Run(s, nil); f != nil {
		t.Errorf("make simulate SEED=%d ARGS='-nodes %d': %s", s.Seed, s.Nodes, f)
	}
}

// Behind the corpus come other seeds, of which TestOtherSeeds, which is long, has more.
const others, fewOthers, moreOthers = 10_000_000, 25, 100

func TestNoSeedOfTheCorpusFails(t *testing.T) {
	t.Parallel()
	for _, s := range corpus(t) {
		live(t, world.Draw(s.number).WithNodes(s.nodes))
	}
	for i := range uint64(fewOthers) {
		live(t, world.Draw(others+i))
	}
}
