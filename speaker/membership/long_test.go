//go:build long

package membership

import (
	"testing"
	"time"
)

func TestPacketsThatGetLostForLong(t *testing.T) {
	t.Parallel()
	packetsGetLost(t, 3*time.Minute, 10*time.Minute)
}
