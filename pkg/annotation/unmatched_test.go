package annotation_test

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"

	"github.com/lodestone-lb/lodestone/pkg/annotation"
)

func TestUnmatchedAdvertisements(t *testing.T) {
	t.Parallel()
	names := []string{"lan", "storage"}
	assert.Equal(t, names, annotation.ParseUnmatchedAdvertisements(annotation.FormatUnmatchedAdvertisements(names)))
	assert.Empty(t, annotation.ParseUnmatchedAdvertisements(annotation.FormatUnmatchedAdvertisements(nil)))
	assert.Equal(t, []string{"lan"}, annotation.ParseUnmatchedAdvertisements(",lan,,"+strings.Repeat("x", 64)))
	assert.Len(t, annotation.ParseUnmatchedAdvertisements(strings.Repeat("x,", 1000)), 64)
	assert.Len(t, annotation.ParseUnmatchedAdvertisements(annotation.FormatUnmatchedAdvertisements(strings.Fields(strings.Repeat("x ", 1000)))), 64)
}
