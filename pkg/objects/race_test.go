//go:build race

package objects_test

import "time"

// aLook allows for the race detector, which makes a look take ten times as long.
const aLook = 10 * time.Millisecond
