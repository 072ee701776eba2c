//go:build linux

package testcost_test

import (
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/lodestone-lb/lodestone/pkg/testcost"
)

// recorder keeps whether a test would have failed.
type recorder struct {
	testing.TB
	failed bool
}

func (r *recorder) Helper()               {}
func (r *recorder) Errorf(string, ...any) { r.failed = true }

// distinct counts the lines that are not the same, by searching the earlier ones.
func distinct(text string) {
	var seen []string
	for line := range strings.SplitSeq(text, "\n") {
		if !slices.Contains(seen, line) {
			seen = append(seen, line)
		}
	}
}

// A reader of quadratic cost fails a test, and one of linear cost does not.
func TestQuadraticReadersAreFound(t *testing.T) {
	one := []byte("a:\n- n1\n")
	// More than Growth times as long: if the small one is measured on a busy machine, that does not explain the large one.
	small, large := testcost.Repeat(one, '\n', 1, 0, 4<<10), testcost.Repeat(one, '\n', 1, 0, 64<<10)
	r := &recorder{TB: t}
	testcost.Grows(r, "linear", small, large, func(text string) { strings.Count(text, "\n") })
	require.False(t, r.failed)
	testcost.Grows(r, "quadratic", small, large, distinct)
	require.True(t, r.failed)
	r.failed = false
	testcost.Grows(r, "memory", small, large, func(text string) {
		for i := range text {
			if i%128 == 0 {
				_ = strings.Clone(text)
			}
		}
	})
	require.True(t, r.failed)
}

// One input is enough where it costs much more than its length explains.
func TestAReaderIsFoundByOneInput(t *testing.T) {
	const long = 64 << 10
	text := testcost.Repeat([]byte("a:\n- n1\n"), '\n', 1, 0, long)
	r := &recorder{TB: t}
	testcost.Within(r, "linear", len(text), func() { strings.Count(text, "\n") })
	testcost.Within(r, "short", 16, func() { distinct("a\nb") })
	require.False(t, r.failed)
	testcost.Within(r, "time", 16, func() { distinct(text) })
	require.True(t, r.failed)
	r.failed = false
	testcost.Within(r, "memory", len(text), func() {
		for range len(text) / 16 {
			_ = strings.Clone(text)
		}
	})
	require.True(t, r.failed)
}

func TestRepeatedPartsDiffer(t *testing.T) {
	t.Parallel()
	text := testcost.Repeat([]byte("pools:\n- name: p1\n  addresses: [192.0.2.1]\nkind: Config\n"), '\n', 1, 1, 100_000)
	assert.True(t, strings.HasPrefix(text, "pools:\n- name: p1\n  addresses: [192.0.2.1]\n- name: p2\n"))
	assert.True(t, strings.HasSuffix(text, "kind: Config\n"))
	assert.Less(t, len(text), 100_100)
	lines := strings.Split(text, "\n")
	addresses := map[string]bool{}
	for _, line := range lines {
		if strings.HasPrefix(line, "  addresses") {
			require.False(t, addresses[line], line)
			addresses[line] = true
		}
	}
	assert.Greater(t, len(addresses), 1000)
	for _, short := range []string{"", "\n", "a", "1"} {
		assert.NotPanics(t, func() { testcost.Repeat([]byte(short), '\n', 5, 9, 1000) }, short)
	}
}
