// Package lock keeps programs from bringing up two labs on one machine.
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
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.file != nil {
		return nil
	}
	file, err := os.OpenFile(l.path, os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return fmt.Errorf("open lock: %w", err)
	}
	if err := wait(ctx, file, progress); err != nil {
		return errors.Join(fmt.Errorf("wait for lock %s: %w", l.path, err), file.Close())
	}
	l.file = file
	return nil
}

// wait asks for the lock until it is granted. flock(2) could block, but would
// not know of the context.
func wait(ctx context.Context, file *os.File, progress func(format string, args ...any)) error {
	for waited := false; ; waited = true {
		err := unix.Flock(int(file.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if !errors.Is(err, unix.EWOULDBLOCK) {
			return err
		}
		if !waited {
			progress("another program has the lock %s: waiting", file.Name())
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(100 * time.Millisecond):
		}
	}
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
