package task_test

import (
	"context"
	"errors"
	"strings"
	"testing"

	"github.com/lodestone-lb/lodestone/pkg/task"
)

type fake struct {
	name string
	run  func(context.Context) error
}

func (f fake) Run(ctx context.Context) error { return f.run(ctx) }
func (f fake) Ready() <-chan struct{}        { return nil }
func (f fake) String() string                { return f.name }

func TestRun(t *testing.T) {
	t.Parallel()
	broken := errors.New("broken")
	forever := fake{"forever", func(ctx context.Context) error { <-ctx.Done(); return nil }}

	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := task.Run(ctx, forever, forever); err != nil {
		t.Errorf("a cancelled context is no error, got %v", err)
	}
	err := task.Run(t.Context(), forever, fake{"layer2", func(context.Context) error { return broken }})
	if !errors.Is(err, broken) || !strings.Contains(err.Error(), "layer2") {
		t.Errorf("the failed task ends all and is named, got %v", err)
	}
	if err := task.Run(t.Context(), forever, fake{"early", func(context.Context) error { return nil }}); err == nil {
		t.Error("a task that ends early is an error")
	}
}
