// Package realtime runs a goroutine before all normal ones, if the process has the right to. Packages bfd
// and detector use it for the goroutines that send heartbeats.
package realtime

import (
	"fmt"
	"runtime"

	"golang.org/x/sys/unix"
)

// priority is the lowest real-time priority, so that any other real-time thread comes
// first.
const priority = 1

// Lock gives the calling goroutine a thread of its own that runs before all normal ones,
// until restore is called. On a busy node its packets go out
// within 0.2 ms, mostly, instead of some 50 ms. It needs CAP_SYS_NICE.
func Lock() (restore func(), err error) {
	runtime.LockOSThread()
	before, err := unix.SchedGetAttr(0, 0)
	if err == nil {
		err = unix.SchedSetAttr(0, &unix.SchedAttr{
			Size: unix.SizeofSchedAttr, Policy: unix.SCHED_RR, Priority: priority, Flags: unix.SCHED_FLAG_RESET_ON_FORK,
		}, 0)
	}
	if err != nil {
		runtime.UnlockOSThread()
		return nil, fmt.Errorf("set real-time priority: %w", err)
	}
	return func() {
		if unix.SchedSetAttr(0, before, 0) == nil { // else the thread ends with its goroutine
			runtime.UnlockOSThread()
		}
	}, nil
}
