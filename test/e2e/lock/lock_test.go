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
