package nft

import (
	"strings"
	"testing"

	"github.com/mdlayher/netlink"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// A chain that is read from a verdict is the one that is written.
func FuzzChainOf(f *testing.F) {
	verdict := func(t testing.TB, chain string) []byte {
		b, err := netlink.MarshalAttributes([]netlink.Attribute{{Type: unix.NFTA_VERDICT_CODE, Data: make([]byte, 4)},
			{Type: unix.NFTA_VERDICT_CHAIN, Data: append([]byte(chain), 0)}})
		require.NoError(t, err)
		return b
	}
	f.Add(verdict(f, "service/shop/web/203.0.113.1"))
	f.Add(verdict(f, ""))
	f.Fuzz(func(t *testing.T, b []byte) {
		chain := ChainOf(b)
		require.LessOrEqual(t, len(chain), len(b))
		require.False(t, strings.HasSuffix(chain, "\x00"))
		if len(chain) < 1<<15 { // an attribute has no more
			require.Equal(t, chain, ChainOf(verdict(t, chain)))
		}
	})
}
