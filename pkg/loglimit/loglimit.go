// Package loglimit bounds how much others can have a program log. A router, a node that has been taken over or a machine on the
// segment can cause the same line without end, and the lines of everything else would be lost with the file that is full.
package loglimit

import (
	"context"
	"log/slog"
	"sync"

	"golang.org/x/time/rate"
)

const (
	// burst is how many lines of one kind are logged at once. A fleet may lose thousands of nodes in a moment.
	burst = 10_000
	// perSecond is how many follow.
	perSecond = 1
)

// Logger returns a logger that logs to the same place. Lines of one kind, which is one place in the code, are left out beyond a bound.
// The next one that is not has the attribute left_out, with their number.
func Logger(log *slog.Logger) *slog.Logger {
	return slog.New(handler{log.Handler(), &kinds{of: map[uintptr]*kind{}}})
}

// handler is a slog.Handler. All that are derived from one share its kinds.
type handler struct {
	slog.Handler
	kinds *kinds
}

// kinds are the lines by their places in the code, of which there are few.
type kinds struct {
	mu sync.Mutex
	of map[uintptr]*kind
}

type kind struct {
	pace    *rate.Limiter
	leftOut int // since the last line
}

// Handle implements slog.Handler.
func (h handler) Handle(ctx context.Context, r slog.Record) error {
	leftOut, logged := h.kinds.take(r.PC)
	if !logged {
		return nil
	}
	if leftOut > 0 {
		r = r.Clone()
		r.AddAttrs(slog.Int("left_out", leftOut))
	}
	return h.Handler.Handle(ctx, r) //nolint:wrapcheck // it is the handler's
}

// WithAttrs implements slog.Handler.
func (h handler) WithAttrs(attrs []slog.Attr) slog.Handler {
	return handler{h.Handler.WithAttrs(attrs), h.kinds}
}

// WithGroup implements slog.Handler.
func (h handler) WithGroup(name string) slog.Handler {
	return handler{h.Handler.WithGroup(name), h.kinds}
}

// take reports whether a line of the place is logged, and how many before it were not.
func (k *kinds) take(place uintptr) (leftOut int, logged bool) {
	k.mu.Lock()
	defer k.mu.Unlock()
	of := k.of[place]
	if of == nil {
		of = &kind{pace: rate.NewLimiter(perSecond, burst)}
		k.of[place] = of
	}
	if !of.pace.Allow() {
		of.leftOut++
		return 0, false
	}
	leftOut, of.leftOut = of.leftOut, 0
	return leftOut, true
}
