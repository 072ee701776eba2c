package annotation_test

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/lodestone-lb/lodestone/pkg/annotation"
)

func TestRoutedPodCIDRs(t *testing.T) {
	both := []netip.Prefix{netip.MustParsePrefix("10.244.1.0/24"), netip.MustParsePrefix("fd00:10:244:1::/64")}
	assert.Equal(t, "10.244.1.0/24,fd00:10:244:1::/64", annotation.FormatRoutedPodCIDRs(both))
	assert.Equal(t, both, annotation.ParseRoutedPodCIDRs("10.244.1.0/24,fd00:10:244:1::/64"))
	assert.Equal(t, both, annotation.ParseRoutedPodCIDRs("10.244.1.0/24,nonsense,,fd00:10:244:1::7/64"))
	assert.Empty(t, annotation.ParseRoutedPodCIDRs(""))
}

func FuzzParseRoutedPodCIDRs(f *testing.F) {
	for _, seed := range []string{"", "10.244.1.0/24", "10.244.1.0/24,fd00:10:244:1::/64", ",,", "0.0.0.0/0", "::ffff:10.0.0.0/120", strings.Repeat("10.0.0.0/8,", 100)} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, text string) {
		cidrs := annotation.ParseRoutedPodCIDRs(text)
		require.LessOrEqual(t, len(cidrs), 8)
		require.Equal(t, cidrs, annotation.ParseRoutedPodCIDRs(annotation.FormatRoutedPodCIDRs(cidrs)))
	})
}
