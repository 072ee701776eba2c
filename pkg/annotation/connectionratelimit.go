package annotation

import (
	"fmt"
	"strconv"
)

// MaxConnectionRateLimit is the highest ConnectionRateLimit: above it the
// kernel's arithmetic in whole nanoseconds per connection gets coarse.
const MaxConnectionRateLimit = 1_000_000

// ParseConnectionRateLimit reads the value of ConnectionRateLimit, in new
// connections per second: a whole number in decimal digits from 1 to
// MaxConnectionRateLimit. The error is an InvalidError; a long value is cut in
// it.
func ParseConnectionRateLimit(value string) (uint32, error) {
	n, err := strconv.ParseUint(value, 10, 32)
	if err != nil || n < 1 || n > MaxConnectionRateLimit {
		return 0, invalid(ConnectionRateLimit, value,
			fmt.Sprintf("not a whole number of connections per second from 1 to %d", MaxConnectionRateLimit))
	}
	return uint32(n), nil
}
