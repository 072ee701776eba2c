package lock

import (
	"context"
	"errors"
	"path/filepath"
	"testing"
	"time"
)

func TestLockKeepsOthersOutUntilReleased(t *testing.T) {
	path := filepath.Join(t.TempDir(), "lock")
	ours, theirs := New(path), New(path)
	messages := 0
	count := func(string, ...any) { messages++ }

	for range 2 { // the second time it is ours already
		if err := ours.Acquire(t.Context(), count); err != nil {
			t.Fatal(err)
		}
	}
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	if err := theirs.Acquire(ctx, count); !errors.Is(err, context.DeadlineExceeded) || messages != 1 {
		t.Errorf("acquire a held lock: %v after %d messages, want a deadline exceeded after 1", err, messages)
	}
	ours.Release()
	if err := theirs.Acquire(t.Context(), count); err != nil {
		t.Errorf("acquire a released lock: %v", err)
	}
	theirs.Release()
}

func TestFirstTakesOneThatNobodyHas(t *testing.T) {
	dir := t.TempDir()
	a, b := New(filepath.Join(dir, "a")), New(filepath.Join(dir, "b"))
	quiet := func(string, ...any) {}
	for _, want := range []*Lock{a, b} {
		if got, err := First(t.Context(), quiet, a, b); err != nil || got != want {
			t.Fatalf("First = %v, %v, want %v", got, err, want)
		}
	}
	go func() {
		time.Sleep(20 * time.Millisecond)
		b.Release()
	}()
	if got, err := First(t.Context(), quiet, a, b); err != nil || got != b {
		t.Errorf("First = %v, %v, want the one that was released", got, err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	if _, err := First(ctx, quiet, a, b); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("First of two that are taken: %v, want a deadline exceeded", err)
	}
}
