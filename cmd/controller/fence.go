package main

import (
	"errors"
	"net/http"
	"time"
)

// errFenced is why a write was not sent.
var errFenced = errors.New("not written: the leader lease has not been renewed in time, another process may lead")

// look is how often a write that waits looks who leads.
const look = 50 * time.Millisecond

// fence keeps a process from writing that led and was suspended: when it
// wakes up it believes for a moment that it still leads, and what it knows of
// Services is as old as its sleep.
type fence struct {
	next http.RoundTripper
	// holds reports whether the lease is certainly this process's.
	holds func() bool
}

// RoundTrip implements http.RoundTripper. A write waits until it is certain
// who leads: the process ends meanwhile if it is another one.
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
