package netstate

import (
	"errors"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/vishvananda/netlink"
)

// A list that changed while it was read is neither taken for complete nor asked for without an end.
func TestInterruptedLists(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		interrupted, asked := 3, 0
		ask := func() ([]int, error) {
			if asked++; asked <= interrupted {
				return []int{1}, fmt.Errorf("list: %w", netlink.ErrDumpInterrupted)
			}
			return []int{1, 2}, nil
		}
		got, err := Whole(ask)
		require.NoError(t, err)
		require.Equal(t, []int{1, 2}, got)
		require.Equal(t, 4, asked)

		interrupted, asked = 1000, 0
		began := time.Now()
		got, err = Whole(ask)
		require.ErrorIs(t, err, netlink.ErrDumpInterrupted)
		require.Nil(t, got, "a list that may lack something")
		require.Equal(t, dumpAttempts, asked)
		require.Less(t, time.Since(began), time.Second)

		refused := errors.New("operation not permitted")
		_, err = Whole(func() ([]int, error) { return nil, refused })
		require.Equal(t, refused, err)
	})
}

// A long look costs a small part of the processor. A stop of the process in the midst of a look does not keep it from looking
// again for nine times as long.
func TestPause(t *testing.T) {
	t.Parallel()
	for took, want := range map[time.Duration]time.Duration{
		time.Millisecond: 100 * time.Millisecond, 100 * time.Millisecond: 900 * time.Millisecond, time.Minute: 5 * time.Second,
	} {
		require.Equal(t, want, Pause(100*time.Millisecond, took), "after %s", took)
	}
}
