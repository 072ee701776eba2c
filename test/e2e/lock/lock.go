// Package lock keeps programs from bringing up two labs in one place.
package lock

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// Lock keeps other programs out; the program that has it can take it again. It
// ends with its holder, however that ends.
type Lock struct {
	path string

	mu   sync.Mutex
	file *os.File // nil: not held
}

// New returns the lock that is the file at path.
func New(path string) *Lock { return &Lock{path: path} }

// Acquire waits until no other program holds the lock.
func (l *Lock) Acquire(ctx context.Context, progress func(format string, args ...any)) error {
	_, err := wait(ctx, progress, true, l)
	return err
}

// First waits until nobody has one of the locks, this program included, and takes that.
func First(ctx context.Context, progress func(format string, args ...any), locks ...*Lock) (*Lock, error) {
	return wait(ctx, progress, false, locks...)
}

// wait asks for the locks until one is granted. flock(2) could block, but would not know of
// the context.
func wait(ctx context.Context, progress func(format string, args ...any), again bool, locks ...*Lock) (*Lock, error) {
	for waited := false; ; waited = true {
		for _, l := range locks {
			if taken, err := l.try(again); taken || err != nil {
				return l, err
			}
		}
		last := locks[len(locks)-1]
		if !waited {
			progress("another program has the lock %s: waiting", last.path)
		}
		select {
		case <-ctx.Done():
			return last, fmt.Errorf("wait for lock %s: %w", last.path, ctx.Err())
		case <-time.After(100 * time.Millisecond):
		}
	}
}

// try takes the lock if it can. What this program has it takes again, or not.
func (l *Lock) try(again bool) (taken bool, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.file != nil {
		return again, nil
	}
	file, err := os.OpenFile(l.path, os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return false, fmt.Errorf("open lock: %w", err)
	}
	switch err := unix.Flock(int(file.Fd()), unix.LOCK_EX|unix.LOCK_NB); {
	case errors.Is(err, unix.EWOULDBLOCK):
		return false, file.Close()
	case err != nil:
		return false, errors.Join(fmt.Errorf("take lock %s: %w", l.path, err), file.Close())
	}
	l.file = file
	return true, nil
}

// Release lets the next program in.
func (l *Lock) Release() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.file != nil {
		l.file.Close() // ends the lock
		l.file = nil
	}
}
