package annotation_test

import (
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/lodestone-lb/lodestone/pkg/annotation"
)

func TestParseConnectionRateLimit(t *testing.T) {
	t.Parallel()
	for value, want := range map[string]uint32{"1": 1, "100": 100, "0100": 100, "1000000": 1_000_000} {
		got, err := annotation.ParseConnectionRateLimit(value)
		require.NoError(t, err, value)
		assert.Equal(t, want, got, value)
	}
	for _, value := range []string{"", "0", "-1", "+5", "1.5", "1e3", " 100", "100/s", "1_000", "0x10", "1000001", "4294967297",
		"99999999999999999999", "١٠"} {
		_, err := annotation.ParseConnectionRateLimit(value)
		assert.ErrorContains(t, err, strconv.Quote(value))
		assert.ErrorContains(t, err, "from 1 to 1000000")
	}
}

func TestAnInvalidValueIsCutInItsError(t *testing.T) {
	t.Parallel()
	_, err := annotation.ParseConnectionRateLimit(strings.Repeat("9", 200_000))
	require.Error(t, err)
	assert.Less(t, len(err.Error()), 200)
	_, again := annotation.ParseConnectionRateLimit(strings.Repeat("9", 200_000))
	assert.True(t, err == again, "errors of the same value differ, which would be logged again")
}
