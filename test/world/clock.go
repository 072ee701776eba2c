package world

import (
	"time"
	"unsafe"
)

// systemClock is the clock of a machine. It is fast or slow, and may be set. Then the wall clock jumps, and the monotonic
// clock does not. A time.Time of the machine has both readings, like one of time.Now.
type systemClock struct {
	world *World
	ahead time.Duration // of the world's time, when the world began
	drift int64         // in millionths
	set   time.Duration // by how much it is set wrongly
}

// clock returns the time of the machine's clock.
func (c *systemClock) clock() time.Time {
	passed := c.ahead + c.world.now + time.Duration(int64(c.world.now)/1_000_000*c.drift)
	return reading(epoch.Add(passed+c.set), time.Hour+passed)
}

// until returns how long it takes until the machine's clock shows that time.
func (c *systemClock) until(at time.Time) time.Duration {
	d := max(at.Sub(c.clock()), 0)
	return d - time.Duration(int64(d)/1_000_000*c.drift) + time.Microsecond
}

// reading returns a time with a reading of the monotonic clock, which only time.Now makes: see its source for the
// fields. TestAClockThatIsSet fails if they change.
func reading(wall time.Time, monotonic time.Duration) (t time.Time) {
	const hasMonotonic, nsecShift = 1 << 63, 30
	since1885 := time.Date(1885, 1, 1, 0, 0, 0, 0, time.UTC).Unix()
	fields := (*struct {
		wall uint64
		ext  int64
		_    *time.Location
	})(unsafe.Pointer(&t))
	fields.wall = hasMonotonic | uint64(wall.Unix()-since1885)<<nsecShift | uint64(wall.Nanosecond())
	fields.ext = int64(monotonic)
	return t
}
