package leader

import (
	"testing"
	"time"
	"unsafe"

	"github.com/stretchr/testify/require"
)

// While a machine is suspended its monotonic clock stands still, and another replica may lead.
func TestASuspendedMachineDoesNotHoldTheLease(t *testing.T) {
	asked := time.Now()
	term := NewTerm(15*time.Second, 5*time.Second)
	term.Granted(asked)
	require.True(t, term.Holds(asked.Add(time.Second)))

	now := asked.Add(time.Hour)
	(*struct { // package time: its monotonic reading is that of a second later
		wall uint64
		ext  int64
		loc  *time.Location
	})(unsafe.Pointer(&now)).ext -= int64(time.Hour - time.Second)
	require.Equal(t, time.Second, now.Sub(asked))
	require.False(t, term.Holds(now))
	require.False(t, term.Holds(asked.Add(time.Hour)), "and a clock that was set back holds nothing for longer")
}
