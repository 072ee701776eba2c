package main

import (
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/lodestone-lb/lodestone/test/e2e/lodestone"
)

// controllerBacklog measures from the start of a controller until 2,000
// waiting Services have an address, against the bare status writes: in turn,
// on the same Services, because the machine is never twice the same.
func controllerBacklog(ctx context.Context, installation *lodestone.Installation) (err error) {
	const rounds = 3
	l := load{installation, 2000}
	if err := l.Configure(ctx, lodestone.Document(widePool)); err != nil {
		return err
	}
	if err := l.ScaleController(ctx, 0); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, l.ScaleController(context.WithoutCancel(ctx), 2)) }()
	if err := l.create(ctx); err != nil {
		return err
	}
	var ratios []float64
	for range rounds {
		ceiling, err := l.ceiling(ctx)
		if err != nil {
			return err
		}
		took, err := l.backlog(ctx)
		if err != nil {
			return err
		}
		ratios = append(ratios, took.Seconds()/ceiling.Seconds())
		result("controller_backlog", "services=%d seconds=%.2f ceiling_seconds=%.2f ratio=%.2f",
			l.services, took.Seconds(), ceiling.Seconds(), ratios[len(ratios)-1])
	}
	slices.Sort(ratios)
	result("controller_backlog", "services=%d rounds=%d median_ratio=%.2f", l.services, rounds, ratios[rounds/2])
	return l.delete(ctx)
}

// ceiling is what the API server itself can do with as many Services, while
// somebody watches as in the measurement. It leaves them as they were.
func (l load) ceiling(ctx context.Context) (took time.Duration, err error) {
	_, err = l.assignments(ctx, func() (err error) {
		took, err = l.bareStatus(ctx)
		return err
	})
	return took, errors.Join(err, l.clear(ctx))
}

// backlog is how long a controller needs from its start. It leaves the
// Services as they were.
func (l load) backlog(ctx context.Context) (time.Duration, error) {
	var start time.Time
	var end func(by unix.Signal) error
	seen, err := l.assignments(ctx, func() (err error) {
		start = time.Now()
		end, err = l.RunController(ctx)
		return err
	})
	if err != nil {
		return 0, err
	}
	return last(seen).Sub(start), errors.Join(end(unix.SIGTERM), l.clear(ctx))
}

func last(seen map[string]time.Time) (latest time.Time) {
	for _, at := range seen {
		if at.After(latest) {
			latest = at
		}
	}
	return latest
}

// controllerBurst measures from each Service's creation to its address, when
// 500 are created as fast as the API server takes them.
func controllerBurst(ctx context.Context, installation *lodestone.Installation) error {
	l := load{installation, 500}
	if err := l.Configure(ctx, lodestone.Document(widePool)); err != nil {
		return err
	}
	took, err := l.burst(ctx)
	if err != nil {
		return err
	}
	result("controller_burst", "services=%d p50_ms=%.0f p99_ms=%.0f", l.services, ms(quantile(took, 0.50)), ms(quantile(took, 0.99)))
	return l.delete(ctx)
}

// burst creates the Services and returns how long each waited for its address.
func (l load) burst(ctx context.Context) ([]time.Duration, error) {
	// The namespace exists and a first Service has been served: the benchmark
	// measures a controller at work, not one that has just started.
	if err := (load{l.Installation, 1}).warmUp(ctx); err != nil {
		return nil, err
	}
	born := births{load: l, at: map[string]time.Time{}}
	seen, err := l.assignments(ctx, func() error { return l.each(ctx, born.create) })
	if err != nil {
		return nil, err
	}
	return born.waited(seen), nil
}

// births are when Services were created, and how long the API server took to
// answer.
type births struct {
	load
	lock     sync.Mutex
	at       map[string]time.Time
	answered []time.Duration
}

func (b *births) create(ctx context.Context, name string) error {
	began := time.Now()
	b.lock.Lock()
	b.at[name] = began
	b.lock.Unlock()
	err := b.createOne(ctx, name)
	b.lock.Lock()
	b.answered = append(b.answered, time.Since(began))
	b.lock.Unlock()
	return err
}

// waited is how long each waited until it was seen with an address.
func (b *births) waited(seen map[string]time.Time) []time.Duration {
	took := make([]time.Duration, 0, len(b.at))
	for name, at := range b.at {
		took = append(took, seen[name].Sub(at))
	}
	return took
}

func (l load) warmUp(ctx context.Context) error {
	if _, err := l.assignments(ctx, func() error { return l.create(ctx) }); err != nil {
		return err
	}
	return l.delete(ctx)
}
