//go:build linux

// Package testcost measures in tests how time and memory of a function grow with its input, and fails
// where they grow faster than allowed.
package testcost

import (
	"bytes"
	"runtime"
	"runtime/debug"
	"strconv"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// Costs that are never too much, so that noise of the machine and work that is done once do
// not count.
const (
	freeTime  = 20 * time.Millisecond
	freeBytes = 4 << 20
)

// maxGrowth is how many times the cost of the small input the large one may have.
// A linear function needs 4 times as much for it, a quadratic one 16 times. With the race
// detector a linear one allocates up to 8 times as much: pools forget some of what they have.
const maxGrowth = 10

// attempts is how often a cost is measured. The least one counts, because some measurements
// are disturbed.
const attempts = 10

// Cost is what a function takes.
type Cost struct {
	// Time is that of the processor, in the calling thread.
	Time time.Duration
	// Bytes are all that the process allocates meanwhile, also those that are free again. A
	// test that measures them must not be parallel.
	Bytes uint64
}

// Of measures the function.
func Of(f func()) Cost {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	start := threadTime()
	f()
	spent := threadTime() - start
	runtime.ReadMemStats(&after)
	return Cost{spent, after.TotalAlloc - before.TotalAlloc}
}

// Live returns the bytes of the heap that are in use, by the whole process.
func Live() int64 {
	runtime.GC()
	runtime.GC() // what finalizers let go of
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}

// One measurement at a time has no garbage collection, unless the process gets as large as mostMemory.
var calm sync.Mutex

const mostMemory = 1 << 30

// Growth is how many times as long the large input of Grows is as the small one.
const Growth = 4

// Grows fails the test if the large input costs more than the cost of the small
// one explains. The large one is about Growth times as much.
func Grows[T any](t testing.TB, name string, small, large T, read func(T)) {
	t.Helper()
	calm.Lock()
	defer calm.Unlock()
	// On a busy machine a thread that allocates does the collector's work, and that of others, too.
	defer debug.SetMemoryLimit(debug.SetMemoryLimit(mostMemory))
	defer debug.SetGCPercent(debug.SetGCPercent(-1))
	first, then := Cost{1 << 62, 1 << 62}, Cost{1 << 62, 1 << 62}
	for range attempts {
		runtime.GC()
		first = least(first, Of(func() { read(small) }))
		then = least(then, Of(func() { read(large) }))
		if then.Time < max(freeTime, maxGrowth*first.Time) && then.Bytes < max(freeBytes, maxGrowth*first.Bytes) {
			return
		}
	}
	t.Errorf("%s takes %s and %d KiB, and %s and %d KiB for about %d times as much",
		name, first.Time, first.Bytes>>10, then.Time, then.Bytes>>10, Growth)
}

// The most that Within lets a byte cost, beyond the costs that are never too much. It is
// several times what the worst documents need (make bench BENCH=config_worst).
const (
	timePerByte  = 10 * time.Microsecond
	bytesPerByte = 1 << 10
)

// Within fails the test if reading an input of that length costs more than a linear function
// may need for it. A fuzz test that calls it finds the inputs that cost more.
func Within(t testing.TB, name string, length int, read func()) {
	t.Helper()
	most := Cost{freeTime + time.Duration(length)*timePerByte, freeBytes + uint64(length)*bytesPerByte}
	spent := Cost{1 << 62, 1 << 62}
	for range attempts {
		if spent = least(spent, Of(read)); spent.Time < most.Time && spent.Bytes < most.Bytes {
			return
		}
	}
	t.Errorf("%s of %d bytes takes %s and %d KiB, at most %s and %d KiB", name, length, spent.Time, spent.Bytes>>10, most.Time, most.Bytes>>10)
}

func least(a, b Cost) Cost { return Cost{min(a.Time, b.Time), min(a.Bytes, b.Bytes)} }

// Repeat returns the text with a part of it repeated, at least once, until the
// text is about as long as the size. The parts are those between two separators; the numbers in
// the part differ each time, so that names and addresses do.
func Repeat(text []byte, separator byte, from, to, size int) string {
	parts := bytes.SplitAfter(text, []byte{separator})
	from %= len(parts)
	to = from + 1 + to%(len(parts)-from)
	repeated := bytes.Join(parts[from:to], nil)
	if n := len(repeated); n == 0 || repeated[n-1] != separator {
		repeated = append(repeated, separator)
	}
	out := bytes.Join(parts[:from], nil)
	for n := 0; n == 0 || len(out)+len(repeated) < size; n++ {
		out = renumber(out, repeated, n)
	}
	return string(append(out, bytes.Join(parts[to:], nil)...))
}

// renumber appends the text with n added to its numbers: to the octets of an
// address the low and the high byte of n in turn.
func renumber(out, text []byte, n int) []byte {
	octet := 0
	for i := 0; i < len(text); {
		end := i
		for end < len(text) && end-i < 9 && text[end] >= '0' && text[end] <= '9' {
			end++
		}
		if end == i {
			out = append(out, text[i])
			i++
			continue
		}
		number, _ := strconv.Atoi(string(text[i:end])) // at most 9 digits
		dotted := i > 0 && text[i-1] == '.' || end < len(text) && text[end] == '.'
		if dotted && number < 256 {
			octet++
			number = (number + n>>(8*(octet&1))) & 255
		} else {
			number += n
		}
		out = strconv.AppendInt(out, int64(number), 10)
		i = end
	}
	return out
}

func threadTime() time.Duration {
	var now unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &now); err != nil {
		panic(err)
	}
	return time.Duration(now.Nano())
}
