package main

import (
	"context"
	"errors"
	"fmt"

	"golang.org/x/sync/errgroup"
)

// runner is a part that works until its context ends.
type runner interface {
	Run(ctx context.Context) error
	String() string
}

// runParts runs the loop until ctx ends or a part fails. The parts outlive the
// loop, those that have not failed: it needs them to hand over.
func runParts(ctx context.Context, loop runner, parts ...runner) error {
	living, end := context.WithCancel(context.WithoutCancel(ctx))
	group, failed := errgroup.WithContext(living)
	for _, p := range parts {
		group.Go(func() error {
			if err := p.Run(living); err != nil {
				return fmt.Errorf("run %s: %w", p, err)
			}
			return nil
		})
	}
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	defer context.AfterFunc(failed, stop)()
	err := loop.Run(ctx)
	if failed.Err() != nil {
		err = nil // a part has failed: what the loop meets without it only hides why
	}
	end()
	return errors.Join(err, group.Wait())
}
