package world

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
)

// When a clock is set, its wall time jumps, and its monotonic time does not.
func TestAClockThatIsSet(t *testing.T) {
	t.Parallel()
	w := &World{}
	c := systemClock{world: w, ahead: 5 * time.Second, drift: 100}
	before := c.clock()
	assert.Equal(t, epoch.Add(5*time.Second).UnixNano(), before.UnixNano())
	alarm := before.Add(10 * time.Second)
	w.now, c.set = 10*time.Second, -time.Hour
	after := c.clock()
	assert.Equal(t, 10*time.Second+time.Millisecond, after.Sub(before), "what has passed")
	assert.Equal(t, -time.Hour+10*time.Second+time.Millisecond, after.Round(0).Sub(before.Round(0)), "what it shows")
	assert.True(t, after.After(alarm))
	assert.Less(t, c.until(alarm.Add(time.Second)), time.Second)
}
