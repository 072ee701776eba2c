package annotation_test

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"

	"github.com/lodestone-lb/lodestone/pkg/annotation"
)

func TestMembershipKeys(t *testing.T) {
	t.Parallel()
	const a, b = "8201839b0c01ff82", "a95c0da7beab4b13"
	for value, want := range map[string][]string{
		"": nil, a: {a}, a + "," + b: {a, b}, a + ",": nil, "," + a: nil, a + ", " + b: nil, a + "0": nil, a + "\n": nil, strings.ToUpper(a): nil,
	} {
		assert.Equal(t, want, annotation.ParseMembershipKeys(value), "%q", value)
	}
	assert.Nil(t, annotation.ParseMembershipKeys(strings.Repeat("x,", 1000)))
	assert.Len(t, annotation.ParseMembershipKeys(strings.TrimSuffix(strings.Repeat(a+",", annotation.MaxMembershipKeys), ",")), annotation.MaxMembershipKeys)
}
