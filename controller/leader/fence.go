package leader

import (
	"errors"
	"net/http"
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
	Next http.RoundTripper
	// Holds reports whether this process certainly has the lease.
	Holds func() bool
}

// RoundTrip implements http.RoundTripper. A write waits until this process certainly leads. If
// another one leads, this process ends meanwhile.
func (f Fence) RoundTrip(r *http.Request) (*http.Response, error) {
	if r.Method == http.MethodGet || r.Method == http.MethodHead {
		return f.Next.RoundTrip(r)
	}
	for !f.Holds() {
		select {
		case <-time.After(Look):
		case <-r.Context().Done():
			if r.Body != nil {
				r.Body.Close()
			}
			return nil, ErrFenced
		}
	}
	return f.Next.RoundTrip(r)
}
