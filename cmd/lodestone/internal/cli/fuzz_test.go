package cli

import (
	"net/netip"
	"testing"

	"github.com/stretchr/testify/require"
)

// What is read as an address or a prefix is in one form, and read as the same again.
func FuzzPrefix(f *testing.F) {
	for _, text := range []string{"203.0.113.7", "203.0.113.7/24", "::ffff:203.0.113.7", "::ffff:203.0.113.7/120",
		"fe80::1%eth0", "2001:db8::/32", ""} {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		p, err := prefix(text)
		if err != nil {
			return
		}
		require.True(t, p.IsValid() && p == p.Masked() && p.Addr().Zone() == "" && !p.Addr().Is4In6(), p)
		again, err := prefix(p.String())
		require.NoError(t, err)
		require.Equal(t, p, again)
		if p.IsSingleIP() {
			a, err := address(p.Addr().String())
			require.NoError(t, err)
			require.Equal(t, netip.PrefixFrom(a, a.BitLen()), p)
		}
	})
}
