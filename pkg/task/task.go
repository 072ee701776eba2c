// Package task runs the long-lived parts of a process together: when one
// ends, all end.
package task

import (
	"context"
	"fmt"

	"golang.org/x/sync/errgroup"
)

// Task is a long-lived part of a process.
type Task interface {
	// Run works until ctx ends, which is no error, or until it cannot go on.
	Run(ctx context.Context) error
	// Ready is closed once the task does its work.
	Ready() <-chan struct{}
	// String names the task in logs and errors.
	String() string
}

// Run runs the tasks until ctx ends or one of them returns, then waits for
// the others. The error names the task that caused the end.
func Run(ctx context.Context, tasks ...Task) error {
	group, ctx := errgroup.WithContext(ctx)
	for _, t := range tasks {
		group.Go(func() error {
			err := t.Run(ctx)
			switch {
			case err != nil:
				return fmt.Errorf("run %s: %w", t, err)
			case ctx.Err() == nil:
				return fmt.Errorf("run %s: it ended early", t)
			}
			return nil
		})
	}
	return group.Wait()
}
