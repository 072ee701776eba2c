//go:build !race

package objects_test

import "time"

// aLook is how long a look at an object may take.
const aLook = time.Millisecond
