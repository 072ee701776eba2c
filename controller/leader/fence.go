package leader

import (
	"context"
	"errors"
	"io"
	"net/http"
	"sync"
	"time"
)

// ErrFenced is why a write was not sent.
var ErrFenced = errors.New("not written: the leader lease has not been renewed in time, another process may lead")

// Look is the interval at which a write that waits checks who leads.
const Look = 50 * time.Millisecond

// Fence keeps a leader that was suspended from writing. When such a process wakes up, it
// believes for a moment that it still leads, and its knowledge of Services is as old as its
// sleep is long.
type Fence struct {
	holds func() bool
	write time.Duration

	mu       sync.Mutex
	closed   bool
	underWay sync.WaitGroup // grows only until closed
}

// NewFence returns the Fence of a process. holds reports whether the process certainly has the lease, and has
// time for a write that takes that long.
func NewFence(holds func() bool, write time.Duration) *Fence {
	return &Fence{holds: holds, write: write}
}

// Wrap returns a transport whose writes wait until this process certainly leads, and are given up when they have
// taken as long as a write may. If another process leads, this one ends meanwhile.
func (f *Fence) Wrap(next http.RoundTripper) http.RoundTripper { return fenced{f, next} }

// Close keeps all writes from being sent from now on, and returns when none is under way.
func (f *Fence) Close() {
	f.mu.Lock()
	f.closed = true
	f.mu.Unlock()
	f.underWay.Wait()
}

// begin reports whether a write may be sent now, which is then under way.
func (f *Fence) begin() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.closed || !f.holds() {
		return false
	}
	f.underWay.Add(1)
	return true
}

// fenced is a transport with a Fence before it.
type fenced struct {
	*Fence
	next http.RoundTripper
}

// RoundTrip implements http.RoundTripper.
func (f fenced) RoundTrip(r *http.Request) (*http.Response, error) {
	if r.Method == http.MethodGet || r.Method == http.MethodHead {
		return f.next.RoundTrip(r)
	}
	for !f.begin() {
		select {
		case <-time.After(Look):
		case <-r.Context().Done():
			if r.Body != nil {
				r.Body.Close()
			}
			return nil, ErrFenced
		}
	}
	defer f.underWay.Done()
	ctx, cancel := context.WithTimeout(r.Context(), f.write)
	response, err := f.next.RoundTrip(r.WithContext(ctx))
	if err != nil {
		cancel()
		return nil, err
	}
	response.Body = body{response.Body, cancel}
	return response, nil
}

// body is that of an answer. The time of its write counts until it is closed.
type body struct {
	io.ReadCloser
	cancel context.CancelFunc
}

// Close closes the body.
func (b body) Close() error {
	defer b.cancel()
	return b.ReadCloser.Close() //nolint:wrapcheck // it stands in its place
}
