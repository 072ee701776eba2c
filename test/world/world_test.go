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

// The corpus has every seed that ever found something, of the product or of the world itself. Behind it come as many
// new ones as a minute has room for.
func TestNoSeedOfTheCorpusFails(t *testing.T) {
	t.Parallel()
	seeds := []uint64{}
	text, err := os.ReadFile("testdata/corpus.txt")
	require.NoError(t, err)
	for line := range strings.Lines(string(text)) {
		if fields := strings.Fields(line); len(fields) > 0 && fields[0] != "#" {
			seed, err := strconv.ParseUint(fields[0], 10, 64)
			require.NoError(t, err)
			seeds = append(seeds, seed)
		}
	}
	for i := range uint64(100) {
		seeds = append(seeds, 1_000_000+i)
	}
	for _, seed := range seeds {
		if f := world.Run(world.Draw(seed), nil); f != nil {
			t.Errorf("seed %d: %s (make simulate SEED=%d)", seed, f, seed)
		}
	}
}
