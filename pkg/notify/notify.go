// Package notify tells any number of goroutines that something has changed.
package notify

import "sync"

// Signal wakes everybody who waits for a change. Whoever waits takes the
// channel first and looks at what may have changed then: no change is missed.
// Several changes may be one to who is slow. The zero Signal is ready for use.
type Signal struct {
	mu   sync.Mutex
	next chan struct{}
}

// Next returns a channel that the next Notify closes.
func (s *Signal) Next() <-chan struct{} {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.next == nil {
		s.next = make(chan struct{})
	}
	return s.next
}

// Notify tells everybody who has asked for Next. It does not wait.
func (s *Signal) Notify() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.next != nil {
		close(s.next)
		s.next = nil
	}
}
