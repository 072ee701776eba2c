package plan

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/lodestone-lb/lodestone/pkg/config"
)

// A pod CIDR of a Node, which its kubelet may have written, is one that routes may have, or is refused on one line.
func FuzzReadPodCIDR(f *testing.F) {
	for _, text := range []string{"10.244.1.0/24", "10.244.1.7/24", "fd00::/64", "::ffff:10.244.1.0/120", "0.0.0.0/0",
		"fe80::%eth0/64", "a\nb"} {
		f.Add(text)
	}
	c := &config.Config{Routes: &config.Routes{Mode: config.RoutesKernel}}
	f.Fuzz(func(t *testing.T, text string) {
		p := readPodCIDR("n1", text, c)
		if p.refused != "" {
			require.False(t, len(p.message) > 400 || strings.Contains(p.message, "\n"), p.message)
			return
		}
		require.Equal(t, p.prefix, p.prefix.Masked())
		require.True(t, p.prefix.Addr().IsGlobalUnicast() && !p.prefix.Addr().Is4In6() && p.prefix.Addr().Zone() == "", p.prefix)
		again, err := netip.ParsePrefix(p.prefix.String())
		require.NoError(t, err)
		require.Equal(t, p.prefix, again)
	})
}
