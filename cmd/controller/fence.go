package main

import (
	"errors"
	"net/http"
	"time"
)

// errFenced is why a write was not sent.
var errFenced = errors.New("not written: the leader lease has not been renewed in time, another process may lead")

// look is the interval at which a write that waits checks who leads.
const look = 50 * time.Millisecond

// fence keeps a leader that was suspended from writing. When such a process wakes up, it
// believes for a moment that it still leads, and its knowledge of Services is as old as its
// sleep is long.
type fence struct {
	next http.RoundTripper
	// holds reports whether this process certainly has the lease.
	holds func() bool
}

// RoundTrip implements http.RoundTripper. A write waits until this process certainly leads. If
// another one leads, this process ends meanwhile.
func (f fence) RoundTrip(r *http.Request) (*http.Response, error) {
	if r.Method == http.MethodGet || r.Method == http.MethodHead {
		return f.next.RoundTrip(r)
	}
	for !f.holds() {
		select {
		case <-time.After(look):
		case <-r.Context().Done():
			if r.Body != nil {
				r.Body.Close()
			}
			return nil, errFenced
		}
	}
	return f.next.RoundTrip(r)
}
