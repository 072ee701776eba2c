package guard

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// BenchmarkPacket seals and opens one as long as most are, and one of the longest.
func BenchmarkPacket(b *testing.B) {
	for name, n := range map[string]int{"bytes=50": 50, "bytes=1400": 1400} {
		b.Run(name, func(b *testing.B) {
			plain, keys := make([]byte, n), theKeys()[:1]
			b.ReportAllocs()
			for b.Loop() {
				sealed, err := seal(nil, keys, plain, forPacket)
				require.NoError(b, err)
				_, err = open(keys, sealed, forPacket)
				require.NoError(b, err)
			}
		})
	}
}
